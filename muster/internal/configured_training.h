#ifndef MUSTER_INTERNAL_CONFIGURED_TRAINING_H_
#define MUSTER_INTERNAL_CONFIGURED_TRAINING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "muster/internal/engine_settings.h"
#include "muster/options.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/optimizer_handle.h"

namespace muster::internal {

// Make the optimizer and the schedule that a DeepSpeed configuration names: see
// Accelerator::make_optimizer() and make_scheduler(). Values that it leaves out have DeepSpeed's
// defaults. Throw c10::Error if there is no such section or a value is missing.
std::shared_ptr<OptimizerHandle> MakeOptimizer(const ConfiguredTraining& configured,
                                               std::vector<ConfiguredGroup> groups,
                                               const OptimizerArguments& arguments);
// `ranks`: the number of ranks by which Accelerate divides the steps of the arguments.
LrSchedulePtr MakeScheduler(const ConfiguredTraining& configured,
                            const SchedulerArguments& arguments, int64_t ranks);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_CONFIGURED_TRAINING_H_
