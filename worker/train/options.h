#ifndef MUSTER_WORKER_TRAIN_OPTIONS_H_
#define MUSTER_WORKER_TRAIN_OPTIONS_H_

#include <cstdint>

// The settings of this folder that users see, apart from the classes that follow them.
namespace muster {

// How the loss is divided in a window that a loader's end makes shorter than num_steps.
enum class ShortWindow {
  // By the real length of the window: every micro-step of it counts the same, as in a full window.
  kRescale,
  // By num_steps, as Accelerate does: the gradient of a window of k micro-steps is k/num_steps of
  // the mean. For trajectories that have to equal Accelerate's, such as the recorded `training`
  // cases (tests/testdata).
  kLikeAccelerate,
};

struct AccumulationOptions {
  int64_t num_steps = 1;             // micro-steps per optimizer step, at least 1
  bool sync_with_dataloader = true;  // the last batch of a loader ends the window
  // Exchange gradients in every micro-step; the optimizer still waits.
  bool sync_each_batch = false;
  // The schedule was made for the number of micro-steps: every optimizer step moves it on by the
  // length of its window, so it ends with the training. Off by default, which is what Accelerate's
  // flag of this name amounts to (it is never read); see PreparedScheduler.
  bool adjust_scheduler = false;
  ShortWindow short_window = ShortWindow::kRescale;
};

// Of the loss scaling under fp16, see grad_scaler.h.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // good steps in a row before the scale grows
  bool enabled = true;             // false: everything passes through
  // false: the scale stays what it is; steps that overflow are skipped all the same.
  bool dynamic = true;
  // DeepSpeed's: of this many steps that overflow, only the last one makes the scale smaller, and
  // so does each after it; when the scale grows, the count starts again.
  int64_t hysteresis = 1;
  // The scale is never smaller; a step that overflows when it would have to be throws. 0: no limit.
  double min_scale = 0;

  bool operator==(const GradScalerOptions&) const = default;
};

// What one optimizer step is worth to a schedule.
enum class SchedulerUnits {
  kOptimizerSteps,  // 1
  // num_processes, or 1 with split_batches: Accelerate's way, for schedules made for the number of
  // batches that one process alone would see.
  kProcesses,
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OPTIONS_H_
