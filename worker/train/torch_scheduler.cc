#include "worker/train/torch_scheduler.h"

#include <typeinfo>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"
#include "torch/optim/schedulers/lr_scheduler.h"
#include "torch/optim/schedulers/reduce_on_plateau_scheduler.h"
#include "torch/optim/schedulers/step_lr.h"

namespace muster {
namespace {

namespace optim = torch::optim;

constexpr const char* kOtherOptimizer =
    "this scheduler was made for another optimizer than the one it is prepared with: its steps "
    "would "
    "change nothing here";

// LRScheduler's protected members. The pointers to them belong to the base class and work for any
// object.
struct LrSchedulerMembers : optim::LRScheduler {
  static auto StepCount() { return &LrSchedulerMembers::step_count_; }
  static auto CurrentLrs() { return &LrSchedulerMembers::get_current_lrs; }
};

std::vector<double> Lrs(const LrTarget& target) {
  std::vector<double> lrs;
  for (int64_t g = 0; g < target.num_groups(); ++g) lrs.push_back(target.lr(g));
  return lrs;
}

void SetLrs(LrTarget& target, const std::vector<double>& lrs) {
  for (size_t g = 0; g < lrs.size(); ++g) target.set_lr(static_cast<int64_t>(g), lrs[g]);
}

// The number in a row of length one.
double Number(const PlainState& state, const char* name) {
  const auto it = state.find(name);
  TORCH_CHECK(it != state.end() && it->second.size() == 1, "scheduler state has no number '", name,
              "'");
  return it->second[0];
}

const std::vector<double>& LastLrs(const PlainState& state, const LrTarget& target) {
  const auto it = state.find("last_lr");
  TORCH_CHECK(it != state.end(), "scheduler state has no 'last_lr'");
  TORCH_CHECK(static_cast<int64_t>(it->second.size()) == target.num_groups(),
              "scheduler state 'last_lr' has ", it->second.size(),
              " values where this optimizer needs ", target.num_groups());
  return it->second;
}

class TorchScheduler : public Scheduler {
 public:
  TorchScheduler(optim::LRScheduler& scheduler, LrTarget& target)
      : scheduler_(scheduler), target_(target) {
    if (target.num_groups() == 0) return;
    const double lr = target.lr(0);
    const double probe = 2 * lr + 1;
    target.set_lr(0, probe);
    const std::vector<double> seen = (scheduler.*LrSchedulerMembers::CurrentLrs())();
    target.set_lr(0, lr);
    TORCH_CHECK(!seen.empty() && seen[0] == probe, kOtherOptimizer);
  }

  bool Step() override {
    scheduler_.step();
    return true;
  }
  int64_t step_count() const override { return count(); }

  PlainState SaveState() const override {
    return {{"step", {static_cast<double>(count())}}, {"last_lr", Lrs(target_)}};
  }

  void CheckState(const PlainState& state) const override {
    const auto step = static_cast<unsigned>(Number(state, "step"));
    LastLrs(state, target_);
    TORCH_CHECK(knows_its_step_alone() || count() <= step, "this scheduler has made ", count(),
                " steps already and cannot go back to ", step, ": load into a new one");
  }

  void LoadState(const PlainState& state) override {
    CheckState(state);
    const auto step = static_cast<unsigned>(Number(state, "step"));
    if (knows_its_step_alone()) count() = step;
    while (count() < step) scheduler_.step();
    SetLrs(target_, LastLrs(state, target_));
  }

 private:
  optim::LRScheduler& scheduler_;
  LrTarget& target_;

  unsigned& count() const { return scheduler_.*LrSchedulerMembers::StepCount(); }
  bool knows_its_step_alone() const { return typeid(scheduler_) == typeid(optim::StepLR); }
};

// ReduceLROnPlateauScheduler keeps all its state private and has no way to save it. An explicit
// instantiation may name private members ([temp.spec.general]), and passes them on through a
// friend.
template <auto kMember, class Tag>
struct Hand {
  friend constexpr auto MemberOf(Tag) { return kMember; }
};
#define MUSTER_MEMBER(Tag, member)       \
  struct Tag {                           \
    friend constexpr auto MemberOf(Tag); \
  };                                     \
  template struct Hand<&optim::ReduceLROnPlateauScheduler::member, Tag>
MUSTER_MEMBER(Best, best);
MUSTER_MEMBER(BadEpochs, num_bad_epochs);
MUSTER_MEMBER(Cooldown, cooldown_counter);
MUSTER_MEMBER(Epoch, last_epoch);
MUSTER_MEMBER(MinLrs, min_lrs);
MUSTER_MEMBER(Reduce, reduce_lr);
#undef MUSTER_MEMBER

class TorchPlateau : public MetricScheduler {
 public:
  TorchPlateau(optim::ReduceLROnPlateauScheduler& scheduler, LrTarget& target)
      : scheduler_(scheduler), target_(target) {
    if (target.num_groups() == 0) return;
    const std::vector<double> lrs = Lrs(target);
    CheckMinLrs();
    // Large enough that any factor below 1 makes a difference above eps.
    const double probe = 1e30;
    target.set_lr(0, probe);
    (scheduler.*MemberOf(Reduce()))(0);
    const bool sees = target.lr(0) != probe;
    SetLrs(target, lrs);
    TORCH_CHECK(sees, kOtherOptimizer);
  }

  void Step(double metric) override {
    CheckMinLrs();
    scheduler_.step(static_cast<float>(metric));
    ++step_;
  }
  int64_t step_count() const override { return step_; }

  PlainState SaveState() const override {
    const float best = scheduler_.*MemberOf(Best());
    const auto number = [](auto value) { return std::vector<double>{static_cast<double>(value)}; };
    return {{"step", number(step_)},
            {"epoch", number(scheduler_.*MemberOf(Epoch()))},
            {"bad", number(scheduler_.*MemberOf(BadEpochs()))},
            {"cooldown_left", number(scheduler_.*MemberOf(Cooldown()))},
            {"best", number(best)},
            {"last_lr", Lrs(target_)}};
  }

  void CheckState(const PlainState& state) const override {
    for (const char* name : {"step", "epoch", "bad", "cooldown_left"}) Number(state, name);
    const auto best = state.find("best");
    TORCH_CHECK(best == state.end() || best->second.size() <= 1,
                "scheduler state has several 'best'");
    LastLrs(state, target_);
  }

  void LoadState(const PlainState& state) override {
    CheckState(state);
    step_ = static_cast<int64_t>(Number(state, "step"));
    scheduler_.*MemberOf(Epoch()) = static_cast<int>(Number(state, "epoch"));
    scheduler_.*MemberOf(BadEpochs()) = static_cast<int>(Number(state, "bad"));
    scheduler_.*MemberOf(Cooldown()) = static_cast<int>(Number(state, "cooldown_left"));
    const auto best = state.find("best");
    if (best != state.end() && !best->second.empty()) {
      scheduler_.*MemberOf(Best()) = static_cast<float>(best->second[0]);
    }
    SetLrs(target_, LastLrs(state, target_));
  }

 private:
  optim::ReduceLROnPlateauScheduler& scheduler_;
  LrTarget& target_;
  int64_t step_ = 0;

  // The scheduler has one entry for each group that existed at its construction, and would read
  // beyond them.
  void CheckMinLrs() const {
    const size_t size = (scheduler_.*MemberOf(MinLrs())).size();
    TORCH_CHECK(static_cast<int64_t>(size) >= target_.num_groups(),
                "LibTorch's ReduceLROnPlateauScheduler was made for ", size,
                " parameter groups and the optimizer has ", target_.num_groups(),
                ": add the groups before it is made, or use PlateauSchedule");
  }
};

}  // namespace

std::unique_ptr<Scheduler> WrapTorchScheduler(torch::optim::LRScheduler& scheduler,
                                              LrTarget& target) {
  return std::make_unique<TorchScheduler>(scheduler, target);
}

std::unique_ptr<MetricScheduler> WrapTorchPlateau(
    torch::optim::ReduceLROnPlateauScheduler& scheduler, LrTarget& target) {
  return std::make_unique<TorchPlateau>(scheduler, target);
}

}  // namespace muster
