#ifndef MUSTER_WORKER_TRAIN_TORCH_SCHEDULER_H_
#define MUSTER_WORKER_TRAIN_TORCH_SCHEDULER_H_

#include <cstdint>
#include <vector>

#include "c10/util/Exception.h"
#include "worker/train/lr_scheduler.h"

namespace muster {

// Any object with step(), such as torch::optim::StepLR, as a Scheduler. `scheduler` and `target`
// (the handle of its optimizer) are borrowed; no steps of it may have been made before. torch's
// schedulers cannot be set to a step, so LoadState() makes the missing steps and then puts the
// saved rates back.
template <typename TorchScheduler>
class TorchSchedulerAdapter : public Scheduler {
 public:
  TorchSchedulerAdapter(TorchScheduler& scheduler, LrTarget& target)
      : scheduler_(scheduler), target_(target) {}

  bool Step() override {
    scheduler_.step();
    ++step_;
    return true;
  }
  int64_t step_count() const override { return step_; }

  PlainState SaveState() const override {
    std::vector<double> lrs;
    for (int64_t g = 0; g < target_.num_groups(); ++g) lrs.push_back(target_.lr(g));
    return {{"step", {static_cast<double>(step_)}}, {"last_lr", lrs}};
  }

  void LoadState(const PlainState& state) override {
    const auto step = state.find("step");
    const auto lrs = state.find("last_lr");
    TORCH_CHECK(step != state.end() && step->second.size() == 1 && lrs != state.end(),
                "scheduler state has no 'step' and 'last_lr'");
    TORCH_CHECK(static_cast<int64_t>(lrs->second.size()) == target_.num_groups(),
                "scheduler state 'last_lr' has ", lrs->second.size(),
                " values where this optimizer needs ", target_.num_groups());
    TORCH_CHECK(step_ <= static_cast<int64_t>(step->second[0]), "this scheduler has made ", step_,
                " steps already and cannot go back to ", step->second[0], ": load into a new one");
    while (step_ < static_cast<int64_t>(step->second[0])) Step();
    for (int64_t g = 0; g < target_.num_groups(); ++g) target_.set_lr(g, lrs->second[g]);
  }

 private:
  TorchScheduler& scheduler_;
  LrTarget& target_;
  int64_t step_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_TORCH_SCHEDULER_H_
