#ifndef MUSTER_WORKER_TRAIN_TORCH_SCHEDULER_H_
#define MUSTER_WORKER_TRAIN_TORCH_SCHEDULER_H_

#include <memory>

#include "worker/train/lr_scheduler.h"

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace muster {

// LibTorch's own schedulers (torch/optim/schedulers) behind our interfaces, to be gated and saved
// with the others. The scheduler and `target`, the handle on its optimizer, are borrowed. Both
// throw c10::Error if the scheduler was made for another optimizer; it does not expose which one
// that is, so they briefly change a rate of `target` and check whether the scheduler sees it (the
// plateau one: whether it can reduce it, which in that error leaves the other optimizer's rates
// reduced).

// For StepLR, or a user's class. LibTorch's schedulers work on the current rates, so rates set by
// hand, and groups added later, need no special treatment. LoadState() makes the missing steps and
// then restores the saved rates, so that the private counters of a derived class are right, too;
// only a StepLR can be loaded backwards.
std::unique_ptr<Scheduler> WrapTorchScheduler(torch::optim::LRScheduler& scheduler,
                                              LrTarget& target);

// Its metric is a float. Its state is saved exactly, including the best metric and the counters.
std::unique_ptr<MetricScheduler> WrapTorchPlateau(
    torch::optim::ReduceLROnPlateauScheduler& scheduler, LrTarget& target);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_TORCH_SCHEDULER_H_
