#ifndef MUSTER_AGENT_LINE_SPLITTER_H_
#define MUSTER_AGENT_LINE_SPLITTER_H_

#include <cstddef>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace muster::agent {

// Splits a process's output into lines, the way a terminal would show them: "\n" and "\r\n" end a
// line, a lone "\r" moves the cursor back so that the following text replaces the line (a progress
// bar). Not thread-safe.
class LineSplitter {
 public:
  // Longer lines are cut into pieces of this size. A line that consists of whole pieces ends with
  // the last one: its "\n" makes no empty line.
  static constexpr size_t kMaxLine = 64 * 1024;

  // `on_line` gets each finished line without its end. `on_partial` (may be null) gets what the
  // unfinished line shows, once at the end of each Append() that changed it.
  using Callback = std::function<void(absl::string_view)>;
  LineSplitter(Callback on_line, Callback on_partial);

  void Append(absl::string_view bytes);

  // Ends the input: the rest is a line, too.
  void Finish();

 private:
  void EndLine();

  const Callback on_line_;
  const Callback on_partial_;
  std::string line_;       // since the last "\r" that was followed by text
  bool cut_ = false;       // the last byte completed a piece
  bool returned_ = false;  // the last byte was "\r": it clears the line unless "\n" comes next
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_LINE_SPLITTER_H_
