#ifndef MUSTER_INTERNAL_SLOTS_H_
#define MUSTER_INTERNAL_SLOTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/model_slot.h"
#include "worker/parallel/sharding_options.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/optimizer_handle.h"
#include "worker/train/plain_state.h"
#include "worker/train/prepared_scheduler.h"

// The implementation behind the handles of prepared optimizers and schedules.
namespace muster::internal {

class Registry;
class StepController;

// Returns the folder to which parameters, optimizer states or gradients are offloaded; empty if
// none are offloaded to a disk.
std::string FolderOfOffload(const ShardingOptions& sharding);

// A prepared optimizer.
class OptimizerSlot {
 public:
  // `handle` is borrowed, or owned by `owned`. `source`: the object that prepare() was given;
  // `source_id`: a number that distinguishes it from other objects at that address, or 0.
  OptimizerSlot(StepController* steps, OptimizerHandle* handle,
                std::unique_ptr<OptimizerHandle> owned, const void* source, uint64_t source_id = 0)
      : controller_(steps),
        owned_(std::move(owned)),
        handle_(handle),
        source_(source),
        source_id_(source_id) {}

  void Step();
  at::Tensor StepWithClosure(const std::function<at::Tensor()>& closure);
  void ZeroGrad(bool set_to_none);
  bool step_was_skipped() const { return step_was_skipped_; }
  int64_t steps() const { return steps_; }
  // The steps of this process's run only.
  int64_t steps_here() const { return steps_here_; }
  // The steps that were tried: the same on all processes, even inside LocalSGD, where each process
  // skips the steps whose gradients overflow on it.
  int64_t tried_steps() const { return steps_ + skipped_apart_; }
  // Sets the number of steps, which all processes agree on from here on. The loss scale may have
  // changed.
  void set_steps(int64_t steps) {
    steps_ = steps;
    skipped_apart_ = 0;
    stepped_at_scale_ = false;
  }
  OptimizerHandle& handle() { return *handle_; }
  const OptimizerHandle& handle() const { return *handle_; }
  const void* source() const { return source_; }
  uint64_t source_id() const { return source_id_; }
  // Keeps alive what the optimizer is made of.
  void Keep(std::shared_ptr<void> keep) { keep_ = std::move(keep); }

 private:
  friend class StepController;
  friend class GradientOrigins;

  StepController* const controller_;
  const std::unique_ptr<OptimizerHandle> owned_;
  OptimizerHandle* const handle_;
  const void* const source_;
  const uint64_t source_id_;
  std::shared_ptr<void> keep_;

  // Written by the StepController.
  bool step_was_skipped_ = false;
  // Whether the present gradients are unscaled and corrected for their window.
  bool gradients_finished_ = false;
  bool stepped_at_scale_ = false;  // since the last update of the loss scale
  // Whether scaling or clipping has failed halfway, so that only some gradients are changed.
  bool gradients_torn_ = false;
  // Whether a step has used the present gradients: the next ZeroGrad() clears them.
  bool consumed_ = false;
  bool waits_ = false;  // has gradients of windows before this one, which no step has used
  // Set if ZeroGrad() came before the step of this micro-step: it is done when the micro-step ends.
  std::optional<bool> zero_at_end_;
  // Whether steps since the last one were left out only because of no_sync(): the program makes its
  // windows itself.
  bool left_to_no_sync_ = false;
  // Set if ZeroGrad() came outside of no_sync() since then: if the next backward pass is under
  // no_sync(), a new window begins there, and the previous one was given up.
  std::optional<bool> zero_in_no_sync_;
  // The kind of losses in the windows whose gradients neither a step nor ZeroGrad() has used or
  // cleared.
  enum class Losses { kNone, kPlain, kWeighted };
  Losses pending_losses_ = Losses::kNone;
  // A parameter that got its first gradient of the window in a micro-step before this one.
  at::Tensor witness_;
  // The indices of parameters that no model exchanges, as of the versions in checked_parameters_
  // and checked_models_.
  std::vector<size_t> local_;
  std::vector<std::weak_ptr<ModelSlot>> models_;  // that have parameters of this optimizer
  std::vector<int64_t> forwards_at_step_;         // of each, at this optimizer's last step
  int64_t pass_at_step_ = 0;                      // the last backward pass at that time
  int64_t checked_parameters_ = -1;
  uint64_t checked_models_ = 0;
  int64_t steps_ = 0;
  int64_t skipped_apart_ = 0;  // inside LocalSGD, since set_steps()
  int64_t steps_here_ = 0;
  bool had_gradients_ = false;  // set by the first step, which may warn of none
};

// A prepared schedule of any kind. Between PrepareSchedule and the end of the prepare() call it has
// no optimizer yet.
class SchedulerSlot {
 public:
  // Makes the scheduler once its optimizer is known.
  using Make = std::function<std::unique_ptr<Scheduler>(OptimizerHandle&)>;
  using MakePlateau = std::function<std::unique_ptr<MetricScheduler>(OptimizerHandle&)>;

  // `source`: a LibTorch scheduler that the slot drives; `keep`: an object that must outlive the
  // slot.
  SchedulerSlot(StepController* steps, Make make, const void* source = nullptr,
                std::shared_ptr<void> keep = nullptr)
      : controller_(steps), make_(std::move(make)), source_(source), keep_(std::move(keep)) {}
  SchedulerSlot(StepController* steps, MakePlateau make, const void* source = nullptr,
                std::shared_ptr<void> keep = nullptr)
      : controller_(steps),
        make_plateau_(std::move(make)),
        source_(source),
        keep_(std::move(keep)) {}

  void Bind(std::shared_ptr<OptimizerSlot> optimizer);
  void Step();
  // Warns once if the optimizer has stepped and the schedule never has, because the program does
  // not call step(). `at_end`: training ends; before that, it warns only if the rate is still 0.
  void WarnIfLeftOut(bool at_end);
  // (collective) Steps with the mean of all processes' metrics.
  void StepMetric(double metric);
  double last_lr() const;
  std::vector<double> last_lrs() const;
  int64_t step_count() const;
  PlainState SaveState() const;
  void CheckState(const PlainState& state) const;
  void LoadState(const PlainState& state);
  const void* source() const { return source_; }
  const std::shared_ptr<OptimizerSlot>& optimizer() const { return optimizer_; }

 private:
  void CheckBound() const;
  void Warn(const char* text);

  StepController* const controller_;
  const Make make_;
  const MakePlateau make_plateau_;
  const void* const source_;
  const std::shared_ptr<void> keep_;
  std::shared_ptr<OptimizerSlot> optimizer_;
  std::unique_ptr<Scheduler> scheduler_;  // this or plateau_
  std::unique_ptr<MetricScheduler> plateau_;
  std::unique_ptr<PreparedScheduler> gate_;
  bool stepped_ = false;
  bool warned_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_SLOTS_H_
