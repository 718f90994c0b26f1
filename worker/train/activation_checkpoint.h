#ifndef MUSTER_WORKER_TRAIN_ACTIVATION_CHECKPOINT_H_
#define MUSTER_WORKER_TRAIN_ACTIVATION_CHECKPOINT_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/nested/nested.h"
#include "worker/train/output_dtypes.h"

namespace torch::nn {
class Module;
}

namespace muster {

namespace activation_internal {

template <typename Function, typename... Inputs>
concept HasForward = requires(Function& function, Inputs&&... inputs) {
  function.forward(std::forward<Inputs>(inputs)...);
};
template <typename Function, typename... Inputs>
concept PointsToForward = requires(Function& function, Inputs&&... inputs) {
  function->forward(std::forward<Inputs>(inputs)...);
};

// Calls a module's forward(), or a function.
template <typename Function, typename... Inputs>
decltype(auto) Call(Function& function, Inputs&&... inputs) {
  if constexpr (PointsToForward<Function, Inputs...>) {
    return function->forward(std::forward<Inputs>(inputs)...);
  } else if constexpr (HasForward<Function, Inputs...>) {
    return function.forward(std::forward<Inputs>(inputs)...);
  } else {
    static_assert(std::is_invocable_v<Function&, Inputs...>,
                  "activation_checkpoint(function, inputs...): `function` is neither a module "
                  "whose forward() takes these inputs nor a function that does");
    return std::invoke(function, std::forward<Inputs>(inputs)...);
  }
}

// The information needed to run a function again.
struct Rerun {
  // Takes the visible tensors of the inputs, which are kept only in `inputs`.
  std::function<void(const std::vector<at::Tensor>& inputs)> function;
  std::vector<at::Tensor> inputs;
  // The module's parameters and buffers.
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
};

template <typename Function>
void AddTensorsOf(Function& function, Rerun* rerun) {
  const auto add = [rerun](auto& module) {
    for (const at::Tensor& parameter : module.parameters()) rerun->parameters.push_back(parameter);
    for (const at::Tensor& buffer : module.buffers()) rerun->buffers.push_back(buffer);
  };
  if constexpr (requires { function.ptr()->buffers(); }) {
    add(*function.ptr());
  } else if constexpr (requires { function->buffers(); }) {
    add(*function);
  } else if constexpr (requires { function.buffers(); }) {
    add(function);
  }
}

template <typename T>
constexpr bool HoldsSeenTensors() {
  if constexpr (IsTransparent<T>()) {
    return nested_internal::HoldsTensor<T>();
  } else {
    return false;
  }
}

// Return `value` without its tensors, and with those of `tensors` from `*next` on.
template <typename T>
T WithoutTensors(const T& value) {
  if constexpr (HoldsSeenTensors<T>()) {
    return MapTensors(value, [](const at::Tensor&) { return at::Tensor(); });
  } else {
    return value;
  }
}
template <typename T>
T WithTensors(const T& value, const std::vector<at::Tensor>& tensors, size_t* next) {
  if constexpr (HoldsSeenTensors<T>()) {
    return MapTensors(value, [&](const at::Tensor&) { return tensors[(*next)++]; });
  } else {
    return value;
  }
}

// Returns the module behind a handle; null for a function.
template <typename Function>
const torch::nn::Module* ModuleOf(const Function& function) {
  if constexpr (requires { static_cast<const torch::nn::Module*>(function.ptr().get()); }) {
    return function.is_empty() ? nullptr : function.ptr().get();
  } else if constexpr (requires { static_cast<const torch::nn::Module*>(function.get()); }) {
    return function.get();
  } else if constexpr (std::is_convertible_v<Function, const torch::nn::Module*>) {
    return function;
  } else {
    return nullptr;
  }
}

class Region;

// In this scope, what autograd saves in this thread for the backward pass is dropped; it is
// computed again when the backward pass needs it.
class RegionScope {
 public:
  // For a call of `module`, which may be null.
  RegionScope(Rerun rerun, const torch::nn::Module* module);
  // If End() was not called, an exception has ended the first run, and there is no second.
  ~RegionScope();
  // After the call. May throw: it compares what the call has changed.
  void End();
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

 private:
  std::shared_ptr<Region> region_;
  bool ended_ = false;
};

// Called before a call of `module`, which may be null: returns whether nothing would be saved here,
// because gradients are off or an enclosing activation_checkpoint() drops it.
bool NothingToDrop(const torch::nn::Module* module);

// Whether a policy selects `module` (activation_policy.h).
bool IsSelected(const torch::nn::Module* module);

}  // namespace activation_internal

// Calls `function(inputs...)`, or the forward() of a module (a ModuleHolder, a shared_ptr, a
// pointer), and returns what it returns, without keeping the intermediate tensors that its backward
// pass needs: the backward pass runs it a second time, up to the last of them. For a model of n
// blocks, memory falls from the activations of all blocks to one tensor per block and the
// activations of one block, for about a third more computation.
//
//   for (auto& block : *blocks) x = muster::activation_checkpoint(block.as<Block>(), x, mask);
//
// Results and gradients equal those of a plain call to the last bit: in the second run, random
// generators, autocast and a module's buffers (running statistics) are as they were in the first.
// Works in any prepared model, with data parallelism and sharding, and for gradients of gradients.
// Nested calls, and calls with gradients off, are plain calls.
//
// `function` and `inputs` are copied (tensors and modules are handles) and kept until the graph is
// freed; what they refer to must live until then. (A module that stores a tensor of its forward
// pass in a member keeps that graph alive, and thereby itself.) `function` must compute the same
// result each time it is called with the same inputs. Give a module rather than a lambda around it:
// only then changes of parameters that autograd does not save, such as biases, are noticed, and
// buffers are restored. The backward pass throws c10::Error, naming the tensor, if the second run
// saves other tensors than the first, if an input or a parameter was changed in place since, or if
// the function writes a buffer of a module that was not passed as `function`. The call itself
// throws in a process whose autograd engine is not LibTorch's own (Python's), and if a process
// calls it for the first time during a backward pass. Thread-safe, except for random numbers:
// threads that draw from the same generator meanwhile get other numbers in the second run.
template <typename Function, typename... Inputs>
auto activation_checkpoint(Function&& function, Inputs&&... inputs) {
  static_assert(std::is_copy_constructible_v<std::decay_t<Function>> &&
                    (std::is_copy_constructible_v<std::decay_t<Inputs>> && ...),
                "activation_checkpoint(function, inputs...) keeps copies of the function and its "
                "inputs for the backward pass; pass handles that can be copied, as shared_ptr");
  static_assert(
      !requires { function._ivalue(); },
      "activation_checkpoint(): a TorchScript module rewrites itself after its first "
      "run, so that a second one would save other tensors; use a module in C++");
  namespace internal = activation_internal;
  const torch::nn::Module* const module = internal::ModuleOf(function);
  if (internal::NothingToDrop(module)) {
    return internal::Call(function, std::forward<Inputs>(inputs)...);
  }
  internal::Rerun rerun;
  const auto add = [&rerun]<typename T>(const T& input) {
    if constexpr (IsTransparent<T>()) {
      ForEachTensor(input, [&](const at::Tensor& tensor) { rerun.inputs.push_back(tensor); });
    }
  };
  (add(std::as_const(inputs)), ...);
  internal::AddTensorsOf(function, &rerun);
  // Each run has its own copies, so that a function which changes its captures finds them as in the
  // first run. The tensors are kept only in rerun.inputs, so that they can be offloaded meanwhile.
  const std::tuple<std::decay_t<Inputs>...> copies(inputs...);
  rerun.function =
      [function = std::decay_t<Function>(function),
       inputs = std::apply(
           [](const auto&... each) {
             return std::tuple<std::decay_t<Inputs>...>(internal::WithoutTensors(each)...);
           },
           copies)](const std::vector<at::Tensor>& tensors) {
        auto again = function;
        size_t next = 0;
        // Braces, because they are evaluated in order.
        auto arguments = std::apply(
            [&](const auto&... each) {
              return std::tuple<std::decay_t<Inputs>...>{
                  internal::WithTensors(each, tensors, &next)...};
            },
            inputs);
        std::apply([&](auto&... each) { internal::Call(again, each...); }, arguments);
      };
  internal::RegionScope scope(std::move(rerun), module);
  if constexpr (std::is_void_v<decltype(internal::Call(function,
                                                       std::forward<Inputs>(inputs)...))>) {
    internal::Call(function, std::forward<Inputs>(inputs)...);
    scope.End();
  } else {
    auto result = internal::Call(function, std::forward<Inputs>(inputs)...);
    scope.End();
    return result;
  }
}

// Calls a block of a model: the forward() of a module (a ModuleHolder, an AnyModule, a shared_ptr,
// a pointer). A plain call, unless options.activation_checkpointing or the configuration that the
// job was launched with selects the module: then it is activation_checkpoint(block, inputs...).
// What a unit of options.sharding returns is converted to its output_dtype under mixed precision.
// LibTorch has no central place that all module calls pass through, so use it where the model calls
// its repeated blocks:
//
//   for (auto& block : blocks_) x = muster::call(block, x, mask);
//
// Thread-safe.
template <typename Block, typename... Inputs>
auto call(Block&& block, Inputs&&... inputs) {
  namespace internal = activation_internal;
  static_assert(
      requires { block.ptr(); } || requires { block.get(); } ||
          std::is_convertible_v<Block, const torch::nn::Module*>,
      "muster::call(block, inputs...): `block` is not a module by its holder, a shared_ptr or a "
      "pointer");
  const torch::nn::Module* const module = internal::ModuleOf(block);
  const auto run = [&] {
    if (!internal::IsSelected(module)) {
      return internal::Call(block, std::forward<Inputs>(inputs)...);
    }
    return activation_checkpoint(std::forward<Block>(block), std::forward<Inputs>(inputs)...);
  };
  if constexpr (!std::is_void_v<decltype(run())>) {
    if constexpr (internal::HoldsSeenTensors<decltype(run())>()) {
      if (const auto dtype = OutputDtypeOf(module)) return ConvertFloats(run(), *dtype);
    }
    return run();
  } else {
    run();
  }
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_ACTIVATION_CHECKPOINT_H_
