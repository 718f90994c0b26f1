#include "agent/line_splitter.h"

#include <algorithm>
#include <utility>

namespace muster::agent {

LineSplitter::LineSplitter(Callback on_line, Callback on_partial)
    : on_line_(std::move(on_line)), on_partial_(std::move(on_partial)) {}

void LineSplitter::EndLine() {
  on_line_(line_);
  line_.clear();
  returned_ = false;
}

void LineSplitter::Append(absl::string_view bytes) {
  while (!bytes.empty()) {
    if (bytes[0] == '\n') {
      if (!cut_) EndLine();
      cut_ = false;
      returned_ = false;
      bytes.remove_prefix(1);
      continue;
    }
    if (bytes[0] == '\r') {
      returned_ = true;
      bytes.remove_prefix(1);
      continue;
    }
    if (returned_) {
      line_.clear();
      returned_ = false;
    }
    size_t n = std::min(bytes.find_first_of("\r\n"), bytes.size());
    n = std::min(n, kMaxLine - line_.size());
    line_.append(bytes.data(), n);
    bytes.remove_prefix(n);
    cut_ = line_.size() == kMaxLine;
    if (cut_) EndLine();
  }
  if (on_partial_ && !line_.empty()) on_partial_(line_);
}

void LineSplitter::Finish() {
  if (!line_.empty()) EndLine();
  returned_ = false;
}

}  // namespace muster::agent
