#ifndef MUSTER_WORKER_TRAIN_OPTIONS_H_
#define MUSTER_WORKER_TRAIN_OPTIONS_H_

#include <cstdint>
#include <optional>

// The user-visible settings of this folder, separate from the classes that apply them.
namespace muster {

// How the loss is divided in a window that is shorter than num_steps because the loader ended.
enum class ShortWindow {
  // By the real length of the window: each of its micro-steps has the same weight, as in a full
  // window.
  kRescale,
  // By num_steps, as Accelerate does: the gradient of a window of k micro-steps is k/num_steps of
  // the mean. For trajectories that must equal Accelerate's, such as the recorded `training` cases
  // (tests/testdata).
  kLikeAccelerate,
};

struct AccumulationOptions {
  // Micro-steps per optimizer step, at least 1. Absent: 1; in AcceleratorOptions, the value of its
  // gradient_accumulation_steps.
  std::optional<int64_t> num_steps;
  bool sync_with_dataloader = true;  // the last batch of a loader ends the window
  // Exchange gradients in every micro-step; the optimizer still steps only at the end of the
  // window.
  bool sync_each_batch = false;
  // For a schedule made for the number of micro-steps: every optimizer step advances it by the
  // length of its window, so that it ends with the training. Off by default, which is the effect of
  // Accelerate's flag of this name (it is never read); see PreparedScheduler.
  bool adjust_scheduler = false;
  ShortWindow short_window = ShortWindow::kRescale;
};

// Settings of loss scaling under fp16, see grad_scaler.h.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // consecutive good steps before the scale grows
  bool enabled = true;             // false: everything passes through
  // false: the scale stays constant; steps that overflow are still skipped.
  bool dynamic = true;
  // As in DeepSpeed: of this many steps that overflow, only the last one reduces the scale, and so
  // does each later one; the count restarts when the scale grows.
  int64_t hysteresis = 1;
  // The scale never falls below this; throws if a step overflows when it would have to. 0: no
  // limit.
  double min_scale = 0;

  bool operator==(const GradScalerOptions&) const = default;
};

// How far one optimizer step advances a schedule.
enum class SchedulerUnits {
  kOptimizerSteps,  // 1
  // num_processes, or 1 with split_batches, as in Accelerate: for schedules made for the number of
  // batches that a single process would see.
  kProcesses,
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OPTIONS_H_
