#ifndef MUSTER_INTERNAL_BACKWARD_WATCH_H_
#define MUSTER_INTERNAL_BACKWARD_WATCH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/parallel/gradient_observers.h"

namespace muster::internal {

// The backward passes of an Accelerator. Use Scope on the training thread; the rest may be read on
// the threads of a backward pass.
class BackwardPasses {
 public:
  // While a Scope lives, backward passes are those of accelerator.backward().
  class Scope {
   public:
    explicit Scope(BackwardPasses& passes) : passes_(passes), before_(passes.current_) {
      passes_.current_ = ++passes_.last_;
    }
    ~Scope() { passes_.current_ = before_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    BackwardPasses& passes_;
    const int64_t before_;
  };

  int64_t last() const { return last_; }
  // Whether, since ForgetPlain(), a backward pass outside these scopes (loss.backward()) has added
  // to a gradient that is watched.
  bool any_plain() const { return any_plain_; }
  void ForgetPlain() { any_plain_ = false; }

 private:
  friend class BackwardWatch;

  int64_t last_ = 0;
  std::atomic<int64_t> current_ = 0;  // 0: no scope
  std::atomic<bool> any_plain_ = false;
};

// Which backward passes have added to the gradients of a model's parameters. Costs some nanoseconds
// per parameter and pass. Not thread-safe, except for the backward passes themselves.
class BackwardWatch {
 public:
  // `passes` is shared with the hooks, which may outlive their Accelerator. A parameter is watched
  // from the time that it requires a gradient.
  BackwardWatch(std::shared_ptr<BackwardPasses> passes,
                const std::vector<std::pair<std::string, at::Tensor>>& parameters);
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  // The facts about one parameter.
  struct Seen {
    // Records the parameter's current value, after a pass that has added to its gradient.
    void Record();
    // Returns a tensor of one boolean, on the parameter's device: whether the parameter has changed
    // since Record(). Undefined if nothing was recorded.
    at::Tensor Changed() const;
    // For a few elements of the parameter, in double on the CPU: Before() returns their recorded
    // values, At() the current values at the same positions of `other`, a tensor of the same shape.
    // Undefined if nothing was recorded.
    at::Tensor Before() const;
    at::Tensor At(const at::Tensor& other) const;

    at::Tensor parameter;
    std::string name;
    std::atomic<int64_t> pass = 0;    // the last pass that added to its gradient
    std::atomic<bool> plain = false;  // loss.backward() has added to it; see BackwardPasses
    // The parameter's version after the last backward pass that no prepared optimizer would follow;
    // -1: none.
    int64_t version = -1;
    // The positions at which its gradient was largest after that pass, and its values there,
    // because LibTorch's SGD changes parameters without counting a version. Undefined for sparse
    // gradients.
    at::Tensor place, value;
    bool partial = false;  // that pass was not the last one of its window
    bool clipped = false;  // the loop has clipped it since then
  };

  // Starts to watch the parameters that require a gradient by now.
  void Refresh();
  const std::vector<std::unique_ptr<Seen>>& all() const { return seen_; }
  // Returns null for a tensor that is not a parameter of the model.
  Seen* Find(const at::Tensor& parameter) const;
  // Whether the last accelerator.backward() has added to the gradient of `parameter`.
  bool InLastPass(const at::Tensor& parameter) const;
  bool Plain(const at::Tensor& parameter) const;

 private:
  const std::shared_ptr<BackwardPasses> passes_;
  std::vector<std::unique_ptr<Seen>> seen_;
  std::unordered_map<const void*, Seen*> by_tensor_;
  std::vector<Seen*> frozen_;
  GradientObservers observers_;  // declared after what its hooks use
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_BACKWARD_WATCH_H_
