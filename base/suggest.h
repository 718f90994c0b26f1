#ifndef MUSTER_BASE_SUGGEST_H_
#define MUSTER_BASE_SUGGEST_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster {

// Returns the candidate that `word` was probably meant to be: the one with the fewest letters
// changed, added, dropped or swapped with a neighbour, if that is at most a third of the longer
// word; or the only one that begins with `word`. Empty if none is near.
std::string Nearest(absl::string_view word, const std::vector<std::string>& candidates);

// Returns "; did you mean NEAREST?" or an empty text.
std::string DidYouMean(absl::string_view word, const std::vector<std::string>& candidates,
                       absl::string_view prefix = "");

}  // namespace muster

#endif  // MUSTER_BASE_SUGGEST_H_
