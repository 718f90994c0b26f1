#ifndef MUSTER_WORKER_CHECKPOINT_GIVEN_DIRECTORY_H_
#define MUSTER_WORKER_CHECKPOINT_GIVEN_DIRECTORY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster {

// The directory that a rank passes to a call.
struct GivenDirectory {
  std::string path;    // as given; empty: none
  std::string folder;  // what `path` leads to; empty: not to be compared
};

// Returns the directory with `folder`: links are followed as far as the path exists. Blocks on the
// disk.
GivenDirectory FollowGivenDirectory(const std::string& path);

enum class GivenAlike {
  kOrNone,    // all ranks give a directory, or none does
  kByName,    // like kOrNone, and nodes, which have folders of their own, use the same name
  kByFolder,  // like kByName, and it is one folder
};

// Compares the directories that the ranks pass to `call`, by rank. INVALID_ARGUMENT naming two that
// differ. The same folder may be given by different paths: relative, or through a link.
absl::Status CheckGivenAlike(absl::string_view call, const std::vector<GivenDirectory>& directories,
                             GivenAlike alike);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_GIVEN_DIRECTORY_H_
