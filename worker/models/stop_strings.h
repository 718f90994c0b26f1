#ifndef MUSTER_WORKER_MODELS_STOP_STRINGS_H_
#define MUSTER_WORKER_MODELS_STOP_STRINGS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::models {

// Finds the first of several strings in text that arrives in parts. Pure. Not thread-safe.
class StopStrings {
 public:
  // Empty strings are ignored.
  explicit StopStrings(std::vector<std::string> strings);

  // Returns the text that can be shown after this part: everything up to the string that was found,
  // or up to where one could still begin; nothing after a string was found.
  std::string Push(absl::string_view part);
  // Returns the text that was held back, when no more text comes.
  std::string Finish();
  bool found() const { return found_; }

 private:
  std::vector<std::string> strings_;
  std::string held_;
  bool found_ = false;
};

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_STOP_STRINGS_H_
