#ifndef MUSTER_INTERNAL_REGISTRY_H_
#define MUSTER_INTERNAL_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "muster/internal/model_slot.h"
#include "muster/internal/slots.h"
#include "worker/data/loader.h"

namespace muster::internal {

// What prepare() has been given: models, optimizers, schedules and loaders, in that order of
// preparation which a checkpoint numbers them by. It owns its entries together with the handles
// that the program has, and forgets those that it alone still holds. Not thread-safe.
class Registry {
 public:
  // `optimizer_forgotten` is called before an optimizer is left out.
  explicit Registry(std::function<void()> optimizer_forgotten)
      : optimizer_forgotten_(std::move(optimizer_forgotten)) {}
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  const std::vector<std::shared_ptr<ModelSlot>>& models() const { return models_; }
  const std::vector<std::shared_ptr<OptimizerSlot>>& optimizers() const { return optimizers_; }
  const std::vector<std::shared_ptr<SchedulerSlot>>& schedulers() const { return schedulers_; }
  const std::vector<std::shared_ptr<LoaderStateHandle>>& loaders() const { return loaders_; }
  // Changes with models().
  uint64_t models_version() const { return models_version_; }
  // Steps of the first optimizer; 0 without one.
  int64_t global_step() const { return optimizers_.empty() ? 0 : optimizers_.front()->steps(); }
  // Whether an optimizer has stepped, also one that is forgotten by now.
  bool stepped() const { return stepped_; }
  void NoteStep() { stepped_ = true; }

  // A prepare() call; within one, schedules may come before their optimizer. Calls nest, and only
  // the outermost counts: BeginCall() returns whether it is that one.
  bool BeginCall();
  // Binds the schedules of the call to its optimizer, or, if it has none, to the only one there is.
  // Throws if that is not one. With `failed` it forgets them instead.
  void EndCall(bool failed);

  // The slot of that model; null if it is new. Throws if it is prepared for the other purpose.
  std::shared_ptr<ModelSlot> FindModel(const void* identity, bool evaluation) const;
  std::shared_ptr<ModelSlot> AddModel(std::shared_ptr<ModelSlot> slot);

  // The slot of the optimizer at `source`, or null. An optimizer that was there before, for which
  // `is_same` is false, is forgotten with its schedules.
  std::shared_ptr<OptimizerSlot> FindOptimizer(
      const void* source, absl::FunctionRef<bool(const OptimizerSlot&)> is_same);
  std::shared_ptr<OptimizerSlot> AddOptimizer(std::shared_ptr<OptimizerSlot> slot);

  // Of `optimizer` or, if that is null, of this call's. Throws without either.
  std::shared_ptr<SchedulerSlot> AddSchedule(std::shared_ptr<SchedulerSlot> slot,
                                             const std::shared_ptr<OptimizerSlot>& optimizer);

  // A loader with the settings of a dropped one takes its place and continues where it stopped.
  // `epoch`: in whose body it was prepared; -1: in none. While the program still holds an older one
  // whose place it may take, that waits for SettleLoaders().
  void AddLoader(std::shared_ptr<LoaderStateHandle> loader, int64_t epoch = -1);
  // Puts loaders that were added since in the places of those that the program has dropped: of one
  // with the same settings or, if it was prepared in an epoch, of the first one of an earlier epoch
  // that shuffles as it does. That one was prepared in an epoch, too, or has trained in one, as
  // `trained(place)` says. Before a pass, a save or a load: a handle that is assigned to has
  // dropped its loader by then.
  void SettleLoaders(absl::FunctionRef<bool(size_t)> trained);
  // Throws if that loader, if it is prepared, cannot be put there.
  void CheckLoader(size_t place, const LoaderState& state,
                   const std::map<std::string, at::Tensor>& tensors) const;
  // Puts loader number `place` where a checkpoint left it: now, or once it is prepared.
  void LoadLoader(size_t place, const LoaderState& state,
                  std::map<std::string, at::Tensor> tensors);
  void ForgetLoadedPlaces() { pending_loaders_.clear(); }

  // Forgets the objects that only this one still holds: the program can neither train nor reach
  // them. Not in the middle of a window, whose gradients are on their way to a step.
  void ForgetUnheld();
  void Clear();

 private:
  struct LoaderPlace {
    LoaderState state;
    std::map<std::string, at::Tensor> tensors;
  };

  struct LoaderOrigin {
    int64_t epoch = -1;      // in whose body it was prepared; -1: in none
    bool settled = true;     // its place is its own
    bool succeeded = false;  // another one has taken its place, and it has none
  };

  void ForgetOptimizer(const OptimizerSlot* slot);
  std::optional<size_t> PredecessorOf(size_t place, absl::FunctionRef<bool(size_t)> trained) const;
  void WarnIfHeldBefore(size_t place);
  // If a loaded state has one.
  void TakeLoadedPlace(size_t place, LoaderStateHandle& loader);

  const std::function<void()> optimizer_forgotten_;
  std::vector<std::shared_ptr<ModelSlot>> models_;
  std::vector<std::shared_ptr<OptimizerSlot>> optimizers_;
  std::vector<std::shared_ptr<SchedulerSlot>> schedulers_;
  std::vector<std::shared_ptr<LoaderStateHandle>> loaders_;
  std::vector<LoaderOrigin> origins_;  // of each
  bool told_held_ = false;
  // Of a loaded state, by place in loaders_: for loaders that are prepared later.
  std::map<size_t, LoaderPlace> pending_loaders_;
  std::vector<std::shared_ptr<OptimizerSlot>> call_optimizers_;
  std::vector<std::shared_ptr<SchedulerSlot>> call_schedulers_;
  int call_depth_ = 0;
  uint64_t models_version_ = 0;
  bool stepped_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_REGISTRY_H_
