#ifndef MUSTER_WORKER_PARALLEL_GRADIENT_OBSERVERS_H_
#define MUSTER_WORKER_PARALLEL_GRADIENT_OBSERVERS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace muster {

// Calls a function whenever a backward pass has added to the gradient of a parameter, with the
// tensor that it added (undefined: nothing). Called on the thread of the backward pass, in every
// pass for every parameter: the function should take only nanoseconds. Not thread-safe.
class GradientObservers {
 public:
  GradientObservers() = default;
  ~GradientObservers() { Clear(); }
  GradientObservers(const GradientObservers&) = delete;
  GradientObservers& operator=(const GradientObservers&) = delete;

  // Functions for one parameter are called in the order in which they were added.
  template <typename Fn>
  void Add(const at::Tensor& parameter, Fn fn) {
    std::shared_ptr<torch::autograd::Node> node =
        torch::autograd::impl::grad_accumulator(parameter);
    const uintptr_t key = node->add_post_hook(std::make_unique<Hook<Fn>>(std::move(fn)));
    nodes_.emplace_back(key, std::move(node));
  }

  void Clear() {
    for (auto& [key, node] : nodes_) node->del_post_hook(key);
    nodes_.clear();
  }

 private:
  template <typename Fn>
  class Hook : public torch::autograd::FunctionPostHook {
   public:
    explicit Hook(Fn fn) : fn_(std::move(fn)) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list& inputs) override {
      fn_(inputs[0]);
      return outputs;
    }

   private:
    const Fn fn_;
  };

  // The accumulators, which the parameters alone would not keep alive.
  std::vector<std::pair<uintptr_t, std::shared_ptr<torch::autograd::Node>>> nodes_;
};

// Runs `fn` once the backward pass under way has ended. Call it only inside one.
inline void AtEndOfBackward(std::function<void()> fn) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(fn));
}

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_GRADIENT_OBSERVERS_H_
