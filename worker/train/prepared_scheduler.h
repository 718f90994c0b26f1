#ifndef MUSTER_WORKER_TRAIN_PREPARED_SCHEDULER_H_
#define MUSTER_WORKER_TRAIN_PREPARED_SCHEDULER_H_

#include <cstdint>

#include "worker/train/accumulation.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/options.h"

namespace muster {

struct PreparedSchedulerOptions {
  bool step_with_optimizer = true;  // false: one step at every call, independently of the optimizer
  SchedulerUnits units = SchedulerUnits::kOptimizerSteps;
  int num_processes = 1;       // for kProcesses
  bool split_batches = false;  // for kProcesses
  // Each optimizer step is also worth as many units as its window had micro-steps. For a schedule
  // made for the number of batches (times processes, with kProcesses) it then ends with the
  // training.
  bool adjust_scheduler = false;
};

// Advances a scheduler only when the optimizer has stepped. A schedule that has ended (OneCycleLR
// after total_steps - 1 steps) stays at its last rate. `scheduler` is borrowed. Not thread-safe.
class PreparedScheduler {
 public:
  PreparedScheduler(Scheduler& scheduler, const PreparedSchedulerOptions& options)
      : scheduler_(scheduler), options_(options) {}

  // Call it after the optimizer in each micro-step. Does nothing unless `step.sync`, and if the
  // optimizer step was skipped (inf or NaN under a gradient scaler). Returns the number of steps
  // made.
  int64_t Step(const MicroStep& step, bool optimizer_step_was_skipped);

  Scheduler& inner() { return scheduler_; }

 private:
  Scheduler& scheduler_;
  const PreparedSchedulerOptions options_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_PREPARED_SCHEDULER_H_
