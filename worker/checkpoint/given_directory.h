#ifndef MUSTER_WORKER_CHECKPOINT_GIVEN_DIRECTORY_H_
#define MUSTER_WORKER_CHECKPOINT_GIVEN_DIRECTORY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster {

// The directory that a rank gives to a call.
struct GivenDirectory {
  std::string path;    // as given; empty: none
  std::string folder;  // what that leads to; empty: not to be compared
};

// With `folder`: links are followed as far as the path exists. Blocks on the disk.
GivenDirectory FollowGivenDirectory(const std::string& path);

enum class GivenAlike {
  kOrNone,    // all give one, or none does
  kByName,    // and nodes, which have folders of their own, call it the same
  kByFolder,  // and it is one folder
};

// Compares what the ranks give to `call`, by rank. INVALID_ARGUMENT names two that differ. The same
// folder may be given in other words: relative, or by a link.
absl::Status CheckGivenAlike(absl::string_view call, const std::vector<GivenDirectory>& directories,
                             GivenAlike alike);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_GIVEN_DIRECTORY_H_
