#ifndef MUSTER_HANDLES_H_
#define MUSTER_HANDLES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/Exception.h"
#include "muster/internal/model_slot.h"
#include "muster/internal/model_source.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/nested/nested.h"

namespace torch::nn {
class AnyModule;
}

// The handles that prepare() returns for models, optimizers and schedules.
namespace muster {

class OptimizerHandle;

namespace internal {

class OptimizerSlot;
class SchedulerSlot;

// Delays the static_asserts below until their template is instantiated.
template <class...>
inline constexpr bool kNever = false;

// The model types that prepare() takes: how to get the module and how to call it.
template <class M>
struct ModelTraits {
  static constexpr bool kIsModel = false;
};

template <class Module, class... Args>
concept HasForward = requires(Module& module, Args&&... args) {
  module.forward(std::forward<Args>(args)...);
};
template <class Module, class... Args>
concept IsCallable = requires(Module& module, Args&&... args) {
  module(std::forward<Args>(args)...);
};

// A holder's call operator is forward(); a user's class may have both forward() and a call
// operator.
template <bool kPreferForward, class Module, class... Args>
decltype(auto) Invoke(Module& module, Args&&... args) {
  if constexpr (HasForward<Module, Args...> && (kPreferForward || !IsCallable<Module, Args...>)) {
    return module.forward(std::forward<Args>(args)...);
  } else if constexpr (IsCallable<Module, Args...>) {
    return module(std::forward<Args>(args)...);
  } else {
    static_assert(kNever<Module, Args...>,
                  "the model cannot be called with these arguments: its class has neither a public "
                  "forward() nor a call operator that takes them; for another method use "
                  "model.call(&Net::method, arguments...)");
  }
}

template <class M>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, M>
struct ModelTraits<M> {
  static constexpr bool kIsModel = true;
  using Module = typename M::ContainedType;
  static Module* Get(M& model) { return model.is_empty() ? nullptr : model.get(); }
  static std::unique_ptr<ModelSource> Source(M& model) {
    return SourceOf(model.is_empty() ? std::shared_ptr<Module>() : model.ptr());
  }
  template <bool kPreferForward, class... Args>
  static decltype(auto) Call(Module& module, Args&&... args) {
    return Invoke<true>(module, std::forward<Args>(args)...);
  }
};

template <class D>
requires std::is_base_of_v<torch::nn::Module, D>
struct ModelTraits<std::shared_ptr<D>> {
  static constexpr bool kIsModel = true;
  using Module = D;
  static Module* Get(std::shared_ptr<D>& model) { return model.get(); }
  static std::unique_ptr<ModelSource> Source(std::shared_ptr<D>& model) { return SourceOf(model); }
  template <bool kPreferForward, class... Args>
  static decltype(auto) Call(Module& module, Args&&... args) {
    static_assert(!std::is_same_v<D, torch::nn::Module>,
                  "a shared_ptr to torch::nn::Module itself cannot be called, since that class has "
                  "no forward(): prepare a shared_ptr to your own class, or use "
                  "model.call([](torch::nn::Module& module) { ... })");
    return Invoke<kPreferForward>(module, std::forward<Args>(args)...);
  }
};

template <class M>
requires std::is_same_v<M, torch::nn::AnyModule>
struct ModelTraits<M> {
  static constexpr bool kIsModel = true;
  using Module = M;
  static Module* Get(M& model) { return &model; }
  static std::unique_ptr<ModelSource> Source(M& model) {
    return SourceOf(model.is_empty() ? std::shared_ptr<torch::nn::Module>() : model.ptr());
  }
  template <bool kPreferForward, class... Args>
  static at::Tensor Call(Module& module, Args&&... args) {
    return module.template forward<at::Tensor>(std::forward<Args>(args)...);
  }
};

template <class M>
requires std::is_same_v<M, torch::jit::Module>
struct ModelTraits<M> {
  static constexpr bool kIsModel = true;
  using Module = M;
  static Module* Get(M& model) { return &model; }
  static std::unique_ptr<ModelSource> Source(M& model) { return SourceOf(model); }
  template <bool kPreferForward, class... Args>
  static auto Call(Module& module, Args&&... args) {
    if constexpr (HasForward<Module, Args...>) {
      return module.forward(std::forward<Args>(args)...);
    } else {
      return module.forward({c10::IValue(std::forward<Args>(args))...});
    }
  }
};

}  // namespace internal

// A prepared model; call it like the model itself. Each call runs under the configured autocast,
// returns float32 (or options.sharding->output_dtype), and takes part in the gradient exchange. `M`
// is the prepared type: a module holder (TORCH_MODULE), a std::shared_ptr to a class derived from
// torch::nn::Module, a torch::nn::AnyModule or a torch::jit::Module. A value type: copies refer to
// the same model. A default-constructed one is empty: any use except assignment throws c10::Error.
// Not thread-safe.
template <class M>
class AcceleratedModel {
  using Traits = internal::ModelTraits<M>;

 public:
  using ModuleType = typename Traits::Module;

  AcceleratedModel() = default;
  AcceleratedModel(M module, std::shared_ptr<internal::ModelSlot> slot)
      : module_(std::move(module)), slot_(std::move(slot)) {}

  // Runs the forward pass with the model's arguments: forward() of the class, or its call operator.
  // TorchScript takes tensors, other values, or one vector of IValues, and returns an IValue.
  template <class... Args>
  auto operator()(Args&&... args) {
    return Run([&]() -> decltype(auto) {
      return Traits::template Call<false>(module(), std::forward<Args>(args)...);
    });
  }
  template <class... Args>
  auto forward(Args&&... args) {
    return Run([&]() -> decltype(auto) {
      return Traits::template Call<true>(module(), std::forward<Args>(args)...);
    });
  }
  // For an AnyModule whose forward() returns an R.
  template <class R, class... Args>
  requires std::is_same_v<M, torch::nn::AnyModule> R forward(Args&&... args) {
    return Run([&] { return module().template forward<R>(std::forward<Args>(args)...); });
  }
  // Runs another method as a forward pass, with autocast and gradient exchange: a member function,
  // model.call(&Net::encode, x), or any function of the module, model.call([&](Net& net) { ... }).
  // One that returns nothing, and leaves the loss in a variable of the program, is one as well, but
  // not with find_unused_parameters or static_graph.
  template <class F, class... Args>
  auto call(F&& function, Args&&... args) {
    static_assert(std::is_invocable_v<F, ModuleType&, Args...>,
                  "model.call() takes a member function of the model's class, or a function whose "
                  "first argument is the module, and then the arguments of either");
    return Run([&]() -> decltype(auto) {
      return std::invoke(std::forward<F>(function), module(), std::forward<Args>(args)...);
    });
  }

  // The module itself: parameters(), train(), eval(), its own members. A forward pass through it
  // bypasses autocast and the gradient exchange; step() refuses its gradients.
  auto* operator->() const {
    if constexpr (std::is_same_v<M, torch::nn::AnyModule>) {
      return module().ptr().get();
    } else {
      return &module();
    }
  }
  auto& operator*() const { return *operator->(); }
  M& unwrap() {
    CheckPrepared();
    return *module_;
  }
  const M& unwrap() const {
    CheckPrepared();
    return *module_;
  }

  // The model's parameters, for every kind of model; for clip_grad_norm_() and optimizers.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> list;
    for (auto& [name, parameter] : slot()->source().parameters()) list.push_back(parameter);
    return list;
  }

  const std::shared_ptr<internal::ModelSlot>& slot() const {
    CheckPrepared();
    return slot_;
  }

 private:
  void CheckPrepared() const {
    TORCH_CHECK(slot_ != nullptr,
                "this model handle is empty: assign what accelerator.prepare(model) returns to it");
  }
  ModuleType& module() const {
    CheckPrepared();
    return *Traits::Get(*module_);
  }
  template <class F>
  auto Run(F&& forward) {
    using Result = std::remove_cvref_t<std::invoke_result_t<F>>;
    static_assert(
        IsTransparent<std::conditional_t<std::is_void_v<Result>, int, Result>>(),
        "the model returns a type whose tensors Muster cannot see: make it an aggregate of "
        "tensors, or give it MusterFields (muster/data.h), so that its outputs become "
        "float32 and take part in the gradient exchange");
    CheckPrepared();
    return slot_->Run(std::forward<F>(forward));
  }

  mutable std::optional<M> module_;  // a handle: const access to it gives the module
  std::shared_ptr<internal::ModelSlot> slot_;
};

// A prepared optimizer: step() and zero_grad() act only where gradients are synchronized, so the
// loop needs no `if`. A value type: copies refer to the same optimizer. A default-constructed one
// is empty: any use except assignment throws c10::Error. Not thread-safe.
class AcceleratedOptimizer {
 public:
  AcceleratedOptimizer() = default;
  explicit AcceleratedOptimizer(std::shared_ptr<internal::OptimizerSlot> slot)
      : slot_(std::move(slot)) {}

  // Updates the parameters at the end of an accumulation window; does nothing inside one. A
  // gradient scaler skips an update whose gradients contain inf or NaN. Throws a c10::Error that
  // names the parameter if its gradient is not this window's average over all processes: a forward
  // pass bypassed the prepared model, the parameter belongs to no prepared model, or the gradient
  // was zeroed by other means.
  void step();
  // (collective) Updates with an optimizer that evaluates the loss itself, such as LBFGS. `closure`
  // zeroes the gradients, computes the loss through the prepared model, calls
  // accelerator.backward(loss) and returns the loss (one element). It runs several times; each
  // time, gradients and loss are averaged over the processes, so all processes take the same step.
  // Returns the loss of the first evaluation, averaged. Throws c10::Error with gradient
  // accumulation, under fp16 and inside join_uneven_inputs().
  at::Tensor step(const std::function<at::Tensor()>& closure);
  // Clears the gradients, unless that would lose micro-steps of a window before its step. Call it
  // at the start or at the end of each micro-step.
  void zero_grad(bool set_to_none = true);
  // Whether the last step() was skipped because of inf or NaN.
  bool step_was_skipped() const;
  // Parameter groups, including those added to the optimizer after prepare().
  int64_t num_groups() const;
  // Learning rate of a parameter group.
  double lr(int64_t group = 0) const;
  // Sets the learning rate of all groups or of one. A schedule continues from it.
  void set_lr(double lr);
  void set_lr(double lr, int64_t group);
  // Updates done so far.
  int64_t steps() const;

  OptimizerHandle& handle();
  const std::shared_ptr<internal::OptimizerSlot>& slot() const {
    TORCH_CHECK(
        slot_ != nullptr,
        "this optimizer handle is empty: assign what accelerator.prepare(optimizer) returns "
        "to it");
    return slot_;
  }

 private:
  OptimizerHandle& handle_of(int64_t group) const;

  std::shared_ptr<internal::OptimizerSlot> slot_;
};

namespace internal {

// The common part of all schedule handles. A value type: copies refer to the same schedule. A
// default-constructed one is empty: any use except assignment throws c10::Error.
class ScheduleHandle {
 public:
  ScheduleHandle() = default;
  explicit ScheduleHandle(std::shared_ptr<SchedulerSlot> slot) : slot_(std::move(slot)) {}

  // The current rate of the first parameter group.
  double last_lr() const;
  // The current rates of all groups.
  std::vector<double> get_last_lr() const;
  // Steps of the schedule so far; for a plateau schedule, the number of metrics seen.
  int64_t step_count() const;

  const std::shared_ptr<SchedulerSlot>& slot() const {
    TORCH_CHECK(slot_ != nullptr,
                "this schedule handle is empty: assign what accelerator.prepare(schedule) returns "
                "to it");
    return slot_;
  }

 private:
  std::shared_ptr<SchedulerSlot> slot_;
};

}  // namespace internal

// A prepared learning-rate schedule: call step() once per micro-step, after the optimizer's. It
// advances when the optimizer has stepped.
class AcceleratedScheduler : public internal::ScheduleHandle {
 public:
  using ScheduleHandle::ScheduleHandle;
  void step();
};

// A prepared schedule that reduces rates when a metric stops improving.
class AcceleratedPlateau : public internal::ScheduleHandle {
 public:
  using ScheduleHandle::ScheduleHandle;
  // (collective) Call it after each evaluation. It uses the mean of the processes' metrics, so that
  // all make the same decision.
  void step(double metric);
};

}  // namespace muster

#endif  // MUSTER_HANDLES_H_
