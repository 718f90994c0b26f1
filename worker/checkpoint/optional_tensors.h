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

// A module that has tensors which files may lack, also where every other one must be there. Such a
// tensor keeps its value then, or is zero where it has none yet, and is not missing.
class HasOptionalTensors {
 public:
  // Their names in the module, as named_parameters() and named_buffers() have them.
  virtual std::vector<std::string> OptionalTensors() const = 0;

 protected:
  ~HasOptionalTensors() = default;
};

// The names in `root` of the optional tensors of all modules in it.
std::set<std::string> OptionalTensorsOf(const torch::nn::Module& root);

// Removes from `targets`, tensors of `root` by name, the optional ones whose names are not in
// `given`.
void RemoveOptional(const torch::nn::Module& root, const std::set<std::string>& given,
                    NamedTensors* targets);

// What the tensors of files are called in the model, by LoadWeightsOptions::prefix and rename.
std::set<std::string> NamesInModel(const std::vector<std::string>& in_files,
                                   const std::string& prefix,
                                   const std::function<std::string(const std::string&)>& rename);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_OPTIONAL_TENSORS_H_
