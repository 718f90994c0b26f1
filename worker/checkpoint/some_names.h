#ifndef MUSTER_WORKER_CHECKPOINT_SOME_NAMES_H_
#define MUSTER_WORKER_CHECKPOINT_SOME_NAMES_H_

#include <cstddef>
#include <string>
#include <vector>

namespace muster {

// Returns the names, separated by commas, for messages; of more than `most` names only the first
// ones: "a, b and 3 more".
std::string SomeNames(const std::vector<std::string>& names, size_t most);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SOME_NAMES_H_
