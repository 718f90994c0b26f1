#ifndef MUSTER_WORKER_BIGMODEL_EMPTY_WEIGHTS_H_
#define MUSTER_WORKER_BIGMODEL_EMPTY_WEIGHTS_H_

#include <memory>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace muster {

class InitTape;

struct EmptyWeightsOptions {
  // Buffers are empty, too. By default they have the values that the constructor gives them,
  // because files often leave out those that the constructor can compute (the tables of rotary
  // embeddings).
  bool include_buffers = false;
  // Random numbers are drawn as if there were memory, and parameters remember how their values come
  // about: Materialize() computes them. Parameters that name a device are there at once.
  bool deferred = false;
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
  friend struct EmptyWeightsMode;

  void Defer(torch::nn::Module& module);

  const EmptyWeightsOptions options_;
  const std::shared_ptr<InitTape> tape_;
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

// Constructs a module whose parameters are on the meta device until Materialize() gives them the
// values that the constructor gives them otherwise. `make` as above.
template <class Make>
auto DeferredInit(Make&& make) {
  return InitEmptyWeights(std::forward<Make>(make), {.deferred = true});
}

// Whether Materialize() can compute the values of a tensor on the meta device.
bool HasDeferredValues(const at::Tensor& tensor);

// Gives a parameter of DeferredInit() memory on `device` and its values: those, to the last bit, of
// a module that was constructed there and then. In any order; takes the memory of this parameter
// and of what its values are computed from. Nothing happens if it has memory. Throws c10::Error
// with `name`: nobody has recorded its values, or it was written since. `with_values` false: memory
// alone, for what another process is about to send.
void Materialize(const at::Tensor& tensor, at::Device device, const std::string& name,
                 bool with_values = true);

// Makes `tensor`, wherever it is referred to, the same as `value`: also from the meta device to
// another, where set_data() refuses. It keeps requires_grad.
void PlaceTensor(const at::Tensor& tensor, const at::Tensor& value);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_EMPTY_WEIGHTS_H_
