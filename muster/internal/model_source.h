#ifndef MUSTER_INTERNAL_MODEL_SOURCE_H_
#define MUSTER_INTERNAL_MODEL_SOURCE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"

namespace torch::jit {
struct Module;
}

namespace muster::internal {

// What Core needs from a model of any class: its tensors, its identity, its device. Keeps the model
// alive. Not thread-safe.
class ModelSource {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  virtual ~ModelSource() = default;
  // An identity that sources of the same model share. No other model has it while this source
  // lives.
  virtual const void* identity() const = 0;
  // Whether anything besides this source holds the model.
  virtual bool held_elsewhere() const = 0;
  // The defined tensors by full name, in the order of registration.
  virtual Named parameters() const = 0;
  virtual Named buffers() const = 0;
  // Moves the model, but parameters on the meta device stay there.
  virtual void MoveTo(at::Device device) = 0;
  // Null for TorchScript.
  virtual torch::nn::Module* module() { return nullptr; }
};

std::unique_ptr<ModelSource> SourceOf(std::shared_ptr<torch::nn::Module> module);
// TorchScript modules are handles: a copy is the same module.
std::unique_ptr<ModelSource> SourceOf(const torch::jit::Module& module);

// Returns parameters, then buffers; detached, not copied.
ModelSource::Named TensorsOf(const ModelSource& model);

// Call it before values are written to these tensors: each one whose elements share memory, as
// those of expand() do, gets memory of its own and keeps its values. Pass the model's tensors, not
// detached ones. Tensors in one place stay in one place.
void GiveOwnMemory(const ModelSource::Named& tensors);

// Returns the parameters whose gradients are sparse: those of embeddings made with sparse(true).
std::vector<at::Tensor> SparseParametersOf(torch::nn::Module& module);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_MODEL_SOURCE_H_
