#ifndef MUSTER_WORKER_BIGMODEL_MODULE_DESCRIPTION_H_
#define MUSTER_WORKER_BIGMODEL_MODULE_DESCRIPTION_H_

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/bigmodel/device_map.h"

namespace torch::nn {
class Module;
}

namespace muster {

// Returns what the planner needs to know of a module, on any device, including meta. Names are
// those of named_parameters(); names of one object are tied. Errors: UNIMPLEMENTED that names a
// tensor of a type that files cannot hold.
absl::StatusOr<PlannedModel> DescribeModule(const torch::nn::Module& module);

// Returns the name of a class as people write it: without namespaces, and without the "Impl" of
// LibTorch's module holders.
std::string ShortClassName(absl::string_view name);
std::set<std::string> ShortClassNames(const std::set<std::string>& names);

// Returns the type as PlannedTensor has it: "F32", "BF16", ...
absl::StatusOr<std::string> PlannedType(at::ScalarType type);

// The same for tensors by name. Errors: also INVALID_ARGUMENT for a name that no tensor has.
absl::StatusOr<std::map<std::string, std::string>> PlannedTypes(
    const torch::nn::Module& module, const std::map<std::string, at::ScalarType>& types);

// Returns parameters, then buffers, by name; a tensor with several names under each of them.
std::vector<std::pair<std::string, at::Tensor>> TensorsOf(const torch::nn::Module& module);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_MODULE_DESCRIPTION_H_
