#ifndef MUSTER_WORKER_BIGMODEL_EMPTY_WEIGHTS_H_
#define MUSTER_WORKER_BIGMODEL_EMPTY_WEIGHTS_H_

#include <memory>
#include <utility>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace muster {

struct EmptyWeightsOptions {
  // Buffers are empty, too. By default they have the values that the constructor gives them,
  // because files often leave out those that the constructor can compute (the tables of rotary
  // embeddings).
  bool include_buffers = false;
};

// While it lives, tensors that this thread creates without naming a device are on the meta device:
// they have shapes and types, and take no memory. So any torch::nn module is constructed at once,
// whatever its size, and no random number is drawn.
//
// LibTorch is asked to record what the constructor does. A value that is needed after all (item(),
// a comparison, a buffer in Finish()) is computed from the record; random numbers of such values
// come from LibTorch's generator. A tensor that names its device (torch::tensor({1, 2}),
// options.device(kCPU)) is there at once.
//
// Scopes may be nested: the inner one counts. Of this thread only; not thread-safe.
class EmptyWeightsScope {
 public:
  explicit EmptyWeightsScope(const EmptyWeightsOptions& options = {});
  ~EmptyWeightsScope();
  EmptyWeightsScope(const EmptyWeightsScope&) = delete;
  EmptyWeightsScope& operator=(const EmptyWeightsScope&) = delete;

  // Ends the recording of a module that was constructed in this scope: its parameters are on the
  // meta device, those too that named another device; its buffers get their values (with
  // include_buffers: are on the meta device). Throws c10::Error that names a buffer whose values
  // depend on something that is not there.
  void Finish(torch::nn::Module& module);

  // What the record says of a tensor that was created in this scope; the tensor itself if it has
  // memory. Throws c10::Error if it was not created in the scope.
  at::Tensor ValueOf(const at::Tensor& tensor);

 private:
  class Tape;
  friend struct EmptyWeightsMode;

  const EmptyWeightsOptions options_;
  const std::unique_ptr<Tape> tape_;
  EmptyWeightsScope* const outer_;
};

// Constructs a module in such a scope; see muster/bigmodel.h. `make` returns a module holder or a
// pointer to a module.
template <class Make>
auto InitEmptyWeights(Make&& make, const EmptyWeightsOptions& options = {}) {
  EmptyWeightsScope scope(options);
  auto module = std::forward<Make>(make)();
  scope.Finish(*module);
  return module;
}

// Makes `tensor`, wherever it is referred to, the same as `value`: also from the meta device to
// another, where set_data() refuses. It keeps requires_grad.
void PlaceTensor(const at::Tensor& tensor, const at::Tensor& value);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_EMPTY_WEIGHTS_H_
