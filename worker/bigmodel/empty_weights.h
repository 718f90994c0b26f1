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
  // Whether buffers are empty, too. By default they have the values that the constructor gives
  // them, because files often omit those that it can compute (the tables of rotary embeddings).
  bool include_buffers = false;
  // Whether random numbers are drawn as if memory were allocated, and parameters remember how their
  // values are computed, for Materialize(). Parameters that name a device are allocated at once.
  bool deferred = false;
};

// While it exists, tensors that this thread creates without naming a device are on the meta device:
// they have shapes and types but take no memory. A torch::nn module of any size is therefore
// constructed immediately, without drawing random numbers.
//
// LibTorch records what the constructor does. A value that is needed after all (item(), a
// comparison, a buffer in Finish()) is computed from the record; its random numbers come from
// LibTorch's generator. A tensor that names its device (torch::tensor({1, 2}),
// options.device(kCPU)) is allocated at once.
//
// Scopes may be nested: the innermost applies. Affects only this thread; not thread-safe.
class EmptyWeightsScope {
 public:
  explicit EmptyWeightsScope(const EmptyWeightsOptions& options = {});
  ~EmptyWeightsScope();
  EmptyWeightsScope(const EmptyWeightsScope&) = delete;
  EmptyWeightsScope& operator=(const EmptyWeightsScope&) = delete;

  // Ends the recording of a module that was constructed in this scope. Its parameters are then on
  // the meta device, even those that named another device; its buffers get their values (with
  // include_buffers: are on the meta device). Throws a c10::Error that names a buffer whose values
  // depend on something unavailable.
  void Finish(torch::nn::Module& module);

  // Returns the recorded value of a tensor that was created in this scope, or the tensor itself if
  // it has memory. Throws c10::Error if it was not created in the scope.
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
// values that the constructor would have given them. `make` as above.
template <class Make>
auto DeferredInit(Make&& make) {
  return InitEmptyWeights(std::forward<Make>(make), {.deferred = true});
}

// Whether Materialize() can compute the values of a tensor on the meta device.
bool HasDeferredValues(const at::Tensor& tensor);

// Gives a parameter of DeferredInit() memory on `device` and its values, equal to the last bit to
// those of a module constructed there and then. May be called in any order; takes memory for this
// parameter and for what its values are computed from. Does nothing if the parameter has memory.
// Throws a c10::Error with `name` if its values were not recorded or it was written since.
// `with_values` false: allocates memory only, for values that another process will send.
void Materialize(const at::Tensor& tensor, at::Device device, const std::string& name,
                 bool with_values = true);

// Makes `tensor` the same as `value` everywhere it is referenced, even from the meta device to
// another, which set_data() refuses. Keeps requires_grad.
void PlaceTensor(const at::Tensor& tensor, const at::Tensor& value);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_EMPTY_WEIGHTS_H_
