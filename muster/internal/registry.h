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

// The objects that prepare() was given: models, optimizers, schedules and loaders, in order of
// preparation, by which checkpoints number them. It shares its entries with the program's handles,
// and forgets those that only the registry still holds. Not thread-safe.
class Registry {
 public:
  // `optimizer_forgotten` is called after optimizers were forgotten.
  explicit Registry(std::function<void()> optimizer_forgotten)
      : optimizer_forgotten_(std::move(optimizer_forgotten)) {}
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  const std::vector<std::shared_ptr<ModelSlot>>& models() const { return models_; }
  const std::vector<std::shared_ptr<OptimizerSlot>>& optimizers() const { return optimizers_; }
  const std::vector<std::shared_ptr<SchedulerSlot>>& schedulers() const { return schedulers_; }
  const std::vector<std::shared_ptr<LoaderStateHandle>>& loaders() const { return loaders_; }
  // Changes whenever models() does.
  uint64_t models_version() const { return models_version_; }
  // Steps of the first optimizer; 0 without one.
  int64_t global_step() const { return optimizers_.empty() ? 0 : optimizers_.front()->steps(); }
  // Whether any optimizer has stepped, including those that are forgotten by now.
  bool stepped() const { return stepped_; }
  void NoteStep() { stepped_ = true; }

  // Begin and end a prepare() call; within one, schedules may come before their optimizer. Calls
  // nest, and only the outermost counts: BeginCall() returns whether it is the outermost.
  bool BeginCall();
  // Binds the schedules of the call to its optimizer or, if it has none, to the only one there is;
  // throws if there is not exactly one. With `failed` it forgets them instead.
  void EndCall(bool failed);

  // The slot of that model; null if it is new. Throws if it was prepared for the other purpose.
  std::shared_ptr<ModelSlot> FindModel(const void* identity, bool evaluation) const;
  std::shared_ptr<ModelSlot> AddModel(std::shared_ptr<ModelSlot> slot);

  // The slot of the optimizer at `source`, or null. An earlier optimizer at this address, for which
  // `is_same` is false, is forgotten with its schedules.
  std::shared_ptr<OptimizerSlot> FindOptimizer(
      const void* source, absl::FunctionRef<bool(const OptimizerSlot&)> is_same);
  std::shared_ptr<OptimizerSlot> AddOptimizer(std::shared_ptr<OptimizerSlot> slot);

  // Adds a schedule of `optimizer` or, if that is null, of this call's. Throws without either.
  std::shared_ptr<SchedulerSlot> AddSchedule(std::shared_ptr<SchedulerSlot> slot,
                                             const std::shared_ptr<OptimizerSlot>& optimizer);

  // Adds a loader. It takes the place of a dropped one with the same settings and continues where
  // that stopped. `epoch`: the epoch in whose body it was prepared; -1: none. If the program still
  // holds an older one whose place it may take, the decision waits for SettleLoaders().
  void AddLoader(std::shared_ptr<LoaderStateHandle> loader, int64_t epoch = -1);
  // Puts loaders that were added since in the places of those that the program has dropped: of one
  // with the same settings or, if the new loader was prepared in an epoch, of the first one of an
  // earlier epoch that shuffles as it does. That older one must have been prepared in an epoch,
  // too, or have trained in one, according to `trained(place)`. Call it before a pass, a save or a
  // load: a handle that was assigned to has dropped its loader by then.
  void SettleLoaders(absl::FunctionRef<bool(size_t)> trained);
  // Throws if that loader, if it is prepared, cannot be put there.
  void CheckLoader(size_t place, const LoaderState& state,
                   const std::map<std::string, at::Tensor>& tensors) const;
  // Puts loader number `place` where a checkpoint left it: now, or once it is prepared.
  void LoadLoader(size_t place, const LoaderState& state,
                  std::map<std::string, at::Tensor> tensors);
  void ForgetLoadedPlaces() { pending_loaders_.clear(); }

  // Forgets the objects that only the registry still holds: the program can neither train nor reach
  // them. Do not call it in the middle of a window, whose gradients are on their way to a step.
  void ForgetUnheld();
  void Clear();

 private:
  struct LoaderPlace {
    LoaderState state;
    std::map<std::string, at::Tensor> tensors;
  };

  struct LoaderOrigin {
    int64_t epoch = -1;      // in whose body it was prepared; -1: none
    bool settled = true;     // its place is its own
    bool succeeded = false;  // another loader has taken its place
  };

  void ForgetOptimizer(const OptimizerSlot* slot);
  std::optional<size_t> PredecessorOf(size_t place, absl::FunctionRef<bool(size_t)> trained) const;
  void WarnIfHeldBefore(size_t place);
  // Moves the loader to its place in a loaded state, if that has one.
  void TakeLoadedPlace(size_t place, LoaderStateHandle& loader);

  const std::function<void()> optimizer_forgotten_;
  std::vector<std::shared_ptr<ModelSlot>> models_;
  std::vector<std::shared_ptr<OptimizerSlot>> optimizers_;
  std::vector<std::shared_ptr<SchedulerSlot>> schedulers_;
  std::vector<std::shared_ptr<LoaderStateHandle>> loaders_;
  std::vector<LoaderOrigin> origins_;  // of each loader
  bool told_held_ = false;
  // Places from a loaded state, by index in loaders_, for loaders that are prepared later.
  std::map<size_t, LoaderPlace> pending_loaders_;
  std::vector<std::shared_ptr<OptimizerSlot>> call_optimizers_;
  std::vector<std::shared_ptr<SchedulerSlot>> call_schedulers_;
  int call_depth_ = 0;
  uint64_t models_version_ = 0;
  bool stepped_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_REGISTRY_H_
