#include "worker/train/prepared_scheduler.h"

namespace muster {

int64_t PreparedScheduler::Step(const MicroStep& step, bool optimizer_step_was_skipped) {
  int64_t units = 1;
  if (options_.step_with_optimizer) {
    if (!step.sync || optimizer_step_was_skipped) return 0;
    if (options_.units == SchedulerUnits::kProcesses && !options_.split_batches) {
      units *= options_.num_processes;
    }
    if (options_.adjust_scheduler) units *= step.window_length;
  }
  for (int64_t i = 0; i < units; ++i) {
    if (!scheduler_.Step()) return i;
  }
  return units;
}

}  // namespace muster
