#include "worker/models/stop_strings.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace muster::models {

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
  strings_.erase(std::remove(strings_.begin(), strings_.end(), ""), strings_.end());
}

std::string StopStrings::Push(absl::string_view part) {
  if (found_) return "";
  absl::StrAppend(&held_, part);
  size_t first = std::string::npos;
  for (const std::string& string : strings_) first = std::min(first, held_.find(string));
  if (first != std::string::npos) {
    found_ = true;
    held_.resize(first);
    return std::exchange(held_, "");
  }
  // The longest suffix of the text that is a prefix of one of the strings is held back.
  size_t keep = 0;
  for (const std::string& string : strings_) {
    for (size_t n = std::min(string.size() - 1, held_.size()); n > keep; --n) {
      if (absl::EndsWith(held_, absl::string_view(string).substr(0, n))) keep = n;
    }
  }
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopStrings::Finish() { return found_ ? "" : std::exchange(held_, ""); }

}  // namespace muster::models
