#ifndef MUSTER_WORKER_TRAIN_ACTIVATION_CHECKPOINT_H_
#define MUSTER_WORKER_TRAIN_ACTIVATION_CHECKPOINT_H_

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/nested/nested.h"

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

// A module's forward(), or a call.
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

// What it takes to run a function again.
struct Rerun {
  std::function<void()> function;
  std::vector<at::Tensor> inputs;
  // Of a module.
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
};

template <typename Function>
void AddTensorsOf(Function& function, Rerun* rerun) {
  const auto add = [rerun](auto& module) {
    for (const at::Tensor& parameter : module.parameters()) rerun->parameters.push_back(parameter);
    for (const at::Tensor& buffer : module.buffers()) rerun->buffers.push_back(buffer);
  };
  if constexpr (requires { function->buffers(); }) {
    add(*function);
  } else if constexpr (requires { function.buffers(); }) {
    add(function);
  }
}

class Region;

// While it lives, what autograd saves in this thread for the backward pass is dropped, and computed
// again when the backward pass asks for it.
class RegionScope {
 public:
  explicit RegionScope(Rerun rerun);
  ~RegionScope();
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

 private:
  std::shared_ptr<Region> region_;
};

// Nothing is saved here: gradients are off, or an activation_checkpoint() around this one drops it.
bool NothingToDrop();

}  // namespace activation_internal

// Calls `function(inputs...)`, or the forward() of a module (a ModuleHolder, a shared_ptr, a
// pointer), and returns what it returns, without keeping the intermediate tensors that
// its backward pass needs: the backward pass runs it a second time for them, up to the last one.
// Memory of a model of n blocks falls from the activations of all to one tensor for each block and
// the activations of one; the price is about a third more computation.
//
//   for (auto& block : *blocks) x = muster::activation_checkpoint(block.as<Block>(), x, mask);
//
// Results and gradients are those of a plain call to the last bit: random generators, autocast and
// a module's buffers (running statistics) are in the second run what they were in the first.
// Works in any prepared model, with data parallelism and sharding, and for gradients of gradients.
// Calls inside of others are plain calls. With gradients off it is a plain call.
//
// `function` and `inputs` are copied (tensors and modules are handles) and kept until the graph is
// freed; what they refer to must live until then. (A module that keeps a tensor of its forward pass
// in a member keeps that graph, and so itself.) `function` must compute the same each time it is
// called with the same inputs. Give a module rather than a lambda around it: only then changes of
// parameters that autograd does not save, such as biases, are noticed, and buffers are restored.
// The backward pass throws c10::Error, naming the tensor, if the second run saves other tensors
// than the first, if an input or a parameter was changed in place since, or if the function writes
// a buffer of a module that was not given as `function`; and the call throws in a process whose
// autograd engine is not LibTorch's own (Python's), and in a backward pass that is under way when a
// process calls it for the first time. Thread-safe, but for random numbers: threads that draw from
// one generator meanwhile get others in the second run.
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
  if (internal::NothingToDrop()) {
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
  // Each run has copies of its own, so that one which changes its captures finds them as the first.
  rerun.function = [function = std::decay_t<Function>(function),
                    inputs = std::tuple<std::decay_t<Inputs>...>(inputs...)] {
    auto again = function;
    auto arguments = inputs;
    std::apply([&](auto&... each) { internal::Call(again, each...); }, arguments);
  };
  const internal::RegionScope scope(std::move(rerun));
  return internal::Call(function, std::forward<Inputs>(inputs)...);
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_ACTIVATION_CHECKPOINT_H_
