#ifndef MUSTER_WORKER_CHECKPOINT_OPTIONAL_TENSORS_H_
#define MUSTER_WORKER_CHECKPOINT_OPTIONAL_TENSORS_H_

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "worker/checkpoint/safetensors.h"

namespace torch::nn {
class Module;
}

namespace muster {

// A module with tensors that files may lack, even if every other tensor must be there. Such a
// tensor then keeps its value, or is zero if it has none yet, and is not missing.
class HasOptionalTensors {
 public:
  // Returns their names in the module, as in named_parameters() and named_buffers().
  virtual std::vector<std::string> OptionalTensors() const = 0;

 protected:
  ~HasOptionalTensors() = default;
};

// Returns the names in `root` of the optional tensors of all its modules.
std::set<std::string> OptionalTensorsOf(const torch::nn::Module& root);

// Removes from `targets`, tensors of `root` by name, the optional ones whose names are not in
// `given`.
void RemoveOptional(const torch::nn::Module& root, const std::set<std::string>& given,
                    NamedTensors* targets);

// Returns the names in the model of tensors in files, by LoadWeightsOptions::prefix and rename.
std::set<std::string> NamesInModel(const std::vector<std::string>& in_files,
                                   const std::string& prefix,
                                   const std::function<std::string(const std::string&)>& rename);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_OPTIONAL_TENSORS_H_
