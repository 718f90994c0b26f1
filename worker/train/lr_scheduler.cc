#include "worker/train/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/log.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

constexpr double kPi = 3.14159265358979323846;

class FunctionSchedule : public LrSchedule {
 public:
  FunctionSchedule(std::function<double(int64_t, double)> lr, bool knows_any_step)
      : lr_(std::move(lr)), knows_any_step_(knows_any_step) {}
  double Lr(int64_t step, double base_lr) const override { return lr_(step, base_lr); }
  bool knows_any_step() const override { return knows_any_step_; }

 private:
  const std::function<double(int64_t, double)> lr_;
  const bool knows_any_step_;
};

LrSchedulePtr Make(std::function<double(int64_t, double)> lr, bool knows_any_step = true) {
  return std::make_shared<FunctionSchedule>(std::move(lr), knows_any_step);
}

bool AllKnowAnyStep(const std::vector<LrSchedulePtr>& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [](const LrSchedulePtr& part) { return part->knows_any_step(); });
}

double D(int64_t i) { return static_cast<double>(i); }

// The warm-up factor; nothing once the warm-up is over.
std::optional<double> Warming(int64_t step, int64_t warmup) {
  if (step < warmup) return D(step) / D(std::max<int64_t>(1, warmup));
  return std::nullopt;
}

class OneCycle : public LrSchedule {
 public:
  explicit OneCycle(const OneCycleOptions& o) : o_(o) {
    const double up = o.pct_start * D(o.total_steps) - 1;
    const double initial = o.max_lr / o.div_factor;
    const double end = D(o.total_steps - 1);
    if (o.three_phase) {
      phases_ = {{up, initial, o.max_lr, o.max_momentum, o.base_momentum},
                 {2 * up, o.max_lr, initial, o.base_momentum, o.max_momentum},
                 {end, initial, initial / o.final_div_factor, o.max_momentum, o.max_momentum}};
    } else {
      phases_ = {{up, initial, o.max_lr, o.max_momentum, o.base_momentum},
                 {end, o.max_lr, initial / o.final_div_factor, o.base_momentum, o.max_momentum}};
    }
  }

  double Lr(int64_t step, double /*base_lr*/) const override {
    const auto [phase, fraction] = At(step);
    return Anneal(phase.start_lr, phase.end_lr, fraction);
  }
  std::optional<double> Momentum(int64_t step) const override {
    if (!o_.cycle_momentum) return std::nullopt;
    const auto [phase, fraction] = At(step);
    return Anneal(phase.start_momentum, phase.end_momentum, fraction);
  }
  std::optional<int64_t> last_step() const override { return o_.total_steps - 1; }

 private:
  struct Phase {
    double end_step, start_lr, end_lr, start_momentum, end_momentum;
  };
  const OneCycleOptions o_;
  std::vector<Phase> phases_;

  std::pair<Phase, double> At(int64_t step) const {
    // Beyond its end, the line would continue to rates below 0.
    step = std::min(step, o_.total_steps - 1);
    double start = 0;
    for (size_t i = 0; i < phases_.size(); ++i) {
      if (D(step) <= phases_[i].end_step || i + 1 == phases_.size()) {
        const double length = phases_[i].end_step - start;
        return {phases_[i], length > 0 ? (D(step) - start) / length : 1.0};
      }
      start = phases_[i].end_step;
    }
    return {phases_.back(), 1.0};
  }
  double Anneal(double from, double to, double fraction) const {
    if (!o_.cosine) return (to - from) * fraction + from;
    return to + (from - to) / 2.0 * (std::cos(kPi * fraction) + 1);
  }
};

// Runs parts[i] from step starts[i] on.
class Sequence : public LrSchedule {
 public:
  Sequence(std::vector<LrSchedulePtr> parts, std::vector<int64_t> starts)
      : parts_(std::move(parts)), starts_(std::move(starts)) {}
  double Lr(int64_t step, double base_lr) const override {
    const size_t i = Part(step);
    return parts_[i]->Lr(step - starts_[i], base_lr);
  }
  std::optional<double> Momentum(int64_t step) const override {
    const size_t i = Part(step);
    return parts_[i]->Momentum(step - starts_[i]);
  }
  std::optional<int64_t> last_step() const override {
    const auto last = parts_.back()->last_step();
    if (!last.has_value()) return std::nullopt;
    return starts_.back() + *last;
  }
  bool knows_any_step() const override { return AllKnowAnyStep(parts_); }

 private:
  const std::vector<LrSchedulePtr> parts_;
  const std::vector<int64_t> starts_;

  size_t Part(int64_t step) const {
    return std::upper_bound(starts_.begin() + 1, starts_.end(), step) - starts_.begin() - 1;
  }
};

class Chain : public LrSchedule {
 public:
  explicit Chain(std::vector<LrSchedulePtr> parts) : parts_(std::move(parts)) {}
  double Lr(int64_t step, double base_lr) const override {
    double lr = base_lr;
    for (const LrSchedulePtr& part : parts_) lr = part->Lr(step, lr);
    return lr;
  }
  std::optional<double> Momentum(int64_t step) const override {
    std::optional<double> momentum;
    for (const LrSchedulePtr& part : parts_) {
      if (const auto own = part->Momentum(step)) momentum = own;
    }
    return momentum;
  }
  std::optional<int64_t> last_step() const override {
    std::optional<int64_t> last;
    for (const LrSchedulePtr& part : parts_) {
      const auto own = part->last_step();
      if (own.has_value()) last = std::min(last.value_or(*own), *own);
    }
    return last;
  }
  bool knows_any_step() const override { return AllKnowAnyStep(parts_); }

 private:
  const std::vector<LrSchedulePtr> parts_;
};

// Returns the base rate with which `schedule` has the rate `lr` at `step`; nothing if there is
// none. Rates are linear in the base rate; a user's class for which they are not misses `lr`. Also
// returns nothing if a later increase would multiply a tiny rate far beyond both `lr` and the rates
// of `base`, for example at the bottom of a cosine before its restart. Increases in a user's
// function are not known.
std::optional<double> BaseFor(const LrSchedule& schedule, int64_t step, double lr, double base) {
  const double probe = base > 0 ? base : 1;
  const double at_zero = schedule.Lr(step, 0);
  const double slope = (schedule.Lr(step, probe) - at_zero) / probe;
  const double found = (lr - at_zero) / slope;
  if (!std::isfinite(found)) return std::nullopt;
  const double rounding = 1e-9 * std::max(std::abs(lr), std::abs(at_zero));
  if (!(std::abs(schedule.Lr(step, found) - lr) <= rounding)) return std::nullopt;
  if (!schedule.knows_any_step()) return found;
  for (int64_t ahead = 2; ahead <= int64_t{1} << 20; ahead *= 2) {
    for (const int64_t s : {step + ahead / 2, step + ahead * 3 / 4}) {
      if (s > schedule.last_step().value_or(s)) continue;
      if (schedule.Lr(s, found) > 10 * std::max(lr, schedule.Lr(s, probe))) return std::nullopt;
    }
  }
  return found;
}

const std::vector<double>& Row(const PlainState& state, const char* name, size_t size) {
  const auto it = state.find(name);
  TORCH_CHECK(it != state.end(), "scheduler state has no '", name, "'");
  TORCH_CHECK(it->second.size() == size, "scheduler state '", name, "' has ", it->second.size(),
              " values where this optimizer needs ", size);
  return it->second;
}

}  // namespace

LrSchedulePtr LambdaLR(std::function<double(int64_t)> factor) {
  TORCH_CHECK(factor != nullptr, "LambdaLR needs a function");
  return Make([factor = std::move(factor)](int64_t s, double b) { return b * factor(s); },
              /*knows_any_step=*/false);
}

LrSchedulePtr LinearWithWarmup(int64_t warmup, int64_t total) {
  TORCH_CHECK(warmup >= 0, "warmup must not be negative, got ", warmup);
  return Make([=](int64_t s, double b) {
    if (const auto w = Warming(s, warmup)) return b * *w;
    return b * std::max(0.0, D(total - s) / D(std::max<int64_t>(1, total - warmup)));
  });
}

LrSchedulePtr CosineWithWarmup(int64_t warmup, int64_t total, double cycles) {
  TORCH_CHECK(warmup >= 0, "warmup must not be negative, got ", warmup);
  return Make([=](int64_t s, double b) {
    if (const auto w = Warming(s, warmup)) return b * *w;
    const double progress = D(s - warmup) / D(std::max<int64_t>(1, total - warmup));
    return b * std::max(0.0, 0.5 * (1 + std::cos(kPi * cycles * 2 * progress)));
  });
}

LrSchedulePtr ConstantWithWarmup(int64_t warmup) {
  TORCH_CHECK(warmup >= 0, "warmup must not be negative, got ", warmup);
  return Make([=](int64_t s, double b) { return b * Warming(s, warmup).value_or(1); });
}

LrSchedulePtr InverseSqrtWithWarmup(int64_t warmup, int64_t timescale) {
  TORCH_CHECK(warmup >= 0 && timescale >= 0, "warmup and timescale must not be negative");
  const int64_t scale = timescale > 0 ? timescale : (warmup > 0 ? warmup : 10000);
  return Make([=](int64_t s, double b) {
    if (const auto w = Warming(s, warmup)) return b * *w;
    return b * std::sqrt(D(scale) / D(s - warmup + scale));
  });
}

LrSchedulePtr StepLR(int64_t step_size, double gamma) {
  TORCH_CHECK(step_size >= 1, "StepLR's step_size must be at least 1, got ", step_size);
  return Make([=](int64_t s, double b) { return b * std::pow(gamma, D(s / step_size)); });
}

LrSchedulePtr MultiStepLR(std::vector<int64_t> milestones, double gamma) {
  std::sort(milestones.begin(), milestones.end());
  return Make([milestones = std::move(milestones), gamma](int64_t s, double b) {
    const auto passed =
        std::upper_bound(milestones.begin(), milestones.end(), s) - milestones.begin();
    return b * std::pow(gamma, D(passed));
  });
}

LrSchedulePtr ExponentialLR(double gamma) {
  return Make([=](int64_t s, double b) { return b * std::pow(gamma, D(s)); });
}

LrSchedulePtr ConstantLR(double factor, int64_t total_iters) {
  TORCH_CHECK(factor >= 0 && factor <= 1, "ConstantLR's factor must be in [0, 1], got ", factor);
  return Make([=](int64_t s, double b) { return s < total_iters ? b * factor : b; });
}

LrSchedulePtr LinearLR(double start_factor, double end_factor, int64_t total_iters) {
  TORCH_CHECK(start_factor > 0 && start_factor <= 1,
              "LinearLR's start_factor must be in (0, 1], got ", start_factor);
  TORCH_CHECK(end_factor >= 0 && end_factor <= 1, "LinearLR's end_factor must be in [0, 1], got ",
              end_factor);
  TORCH_CHECK(total_iters >= 1, "LinearLR's total_iters must be at least 1, got ", total_iters);
  return Make([=](int64_t s, double b) {
    const double done = D(std::min(s, total_iters)) / D(total_iters);
    return b * (start_factor + (end_factor - start_factor) * done);
  });
}

LrSchedulePtr PolynomialLR(int64_t total_iters, double power) {
  TORCH_CHECK(total_iters >= 1, "PolynomialLR's total_iters must be at least 1, got ", total_iters);
  return Make([=](int64_t s, double b) {
    return b * std::pow(1 - D(std::min(s, total_iters)) / D(total_iters), power);
  });
}

LrSchedulePtr CosineAnnealingLR(int64_t t_max, double eta_min) {
  TORCH_CHECK(t_max >= 1, "CosineAnnealingLR's T_max must be at least 1, got ", t_max);
  return Make([=](int64_t s, double b) {
    return eta_min + (b - eta_min) * (1 + std::cos(kPi * D(s) / D(t_max))) / 2;
  });
}

LrSchedulePtr CosineAnnealingWarmRestarts(int64_t t_0, int64_t t_mult, double eta_min) {
  TORCH_CHECK(t_0 >= 1, "CosineAnnealingWarmRestarts' T_0 must be at least 1, got ", t_0);
  TORCH_CHECK(t_mult >= 1, "CosineAnnealingWarmRestarts' T_mult must be at least 1, got ", t_mult);
  return Make([=](int64_t s, double b) {
    int64_t length = t_0;
    int64_t position = s;
    if (t_mult == 1) {
      position = s % t_0;
    } else {
      while (position >= length) {
        position -= length;
        length *= t_mult;
      }
    }
    return eta_min + (b - eta_min) * (1 + std::cos(kPi * D(position) / D(length))) / 2;
  });
}

LrSchedulePtr OneCycleLR(const OneCycleOptions& options) {
  TORCH_CHECK(options.total_steps >= 1, "OneCycleLR's total_steps must be at least 1, got ",
              options.total_steps);
  TORCH_CHECK(options.pct_start >= 0 && options.pct_start <= 1,
              "OneCycleLR's pct_start must be in [0, 1], got ", options.pct_start);
  TORCH_CHECK(options.div_factor > 0 && options.final_div_factor > 0,
              "OneCycleLR's div_factor and final_div_factor must be above 0");
  return std::make_shared<OneCycle>(options);
}

LrSchedulePtr WithWarmup(int64_t warmup, LrSchedulePtr after, double start_factor) {
  TORCH_CHECK(after != nullptr, "WithWarmup needs a schedule to follow");
  TORCH_CHECK(warmup >= 0, "warmup must not be negative, got ", warmup);
  LrSchedulePtr rise = Make([=](int64_t s, double b) {
    return after->Lr(0, b) * (start_factor + (1 - start_factor) * Warming(s, warmup).value_or(1));
  });
  return std::make_shared<Sequence>(std::vector<LrSchedulePtr>{std::move(rise), std::move(after)},
                                    std::vector<int64_t>{0, warmup});
}

LrSchedulePtr SequentialLR(std::vector<LrSchedulePtr> schedules, std::vector<int64_t> milestones) {
  TORCH_CHECK(!schedules.empty() && schedules.size() == milestones.size() + 1,
              "SequentialLR needs one milestone less than schedules, got ", schedules.size(),
              " schedules and ", milestones.size(), " milestones");
  milestones.insert(milestones.begin(), 0);
  TORCH_CHECK(std::is_sorted(milestones.begin(), milestones.end()),
              "SequentialLR's milestones must be ascending and not negative");
  return std::make_shared<Sequence>(std::move(schedules), std::move(milestones));
}

LrSchedulePtr ChainedLR(std::vector<LrSchedulePtr> schedules) {
  TORCH_CHECK(!schedules.empty(), "ChainedLR needs at least one schedule");
  return std::make_shared<Chain>(std::move(schedules));
}

LrScheduler::LrScheduler(LrTarget& target, LrSchedulePtr schedule)
    : LrScheduler(target, std::vector<LrSchedulePtr>(target.num_groups(), schedule)) {}

LrScheduler::LrScheduler(LrTarget& target, std::vector<LrSchedulePtr> schedules)
    : target_(target), schedules_(std::move(schedules)) {
  TORCH_CHECK(static_cast<int64_t>(schedules_.size()) == target_.num_groups(), "a scheduler got ",
              schedules_.size(), " schedules for an optimizer with ", target_.num_groups(),
              " parameter groups");
  for (int64_t g = 0; g < target_.num_groups(); ++g) {
    TORCH_CHECK(schedules_[g] != nullptr, "the schedule of parameter group ", g, " is null");
    base_lrs_.push_back(target_.lr(g));
    TORCH_CHECK(!schedules_[g]->Momentum(0).has_value() || target_.momentum(g).has_value(),
                "the schedule of parameter group ", g,
                " cycles the momentum (OneCycleLR does by default), and the optimizer has neither "
                "momentum nor betas: set cycle_momentum to false");
  }
  Apply();
}

int64_t LrScheduler::StepOf(int64_t group) const {
  return std::min(step_, schedules_[group]->last_step().value_or(step_));
}

void LrScheduler::Apply() {
  set_lrs_.resize(base_lrs_.size());
  for (int64_t g = 0; g < static_cast<int64_t>(base_lrs_.size()); ++g) {
    const int64_t step = StepOf(g);
    target_.set_lr(g, schedules_[g]->Lr(step, base_lrs_[g]));
    set_lrs_[g] = target_.lr(g);
    if (const auto momentum = schedules_[g]->Momentum(step)) target_.set_momentum(g, *momentum);
  }
}

void LrScheduler::CheckGroups() const {
  const auto known = static_cast<int64_t>(base_lrs_.size());
  const int64_t now = target_.num_groups();
  if (now == known) return;
  TORCH_CHECK(now > known, "the optimizer has ", now, " parameter groups and had ", known,
              " when its schedule was made: groups can be added, not removed");
  for (const LrSchedulePtr& schedule : schedules_) {
    TORCH_CHECK(schedule == schedules_.front(), "the optimizer has ", now, " parameter groups and ",
                known,
                " schedules: with schedules of their own, add all groups before the schedule");
  }
}

void LrScheduler::AddGroups() {
  CheckGroups();
  for (auto g = static_cast<int64_t>(base_lrs_.size()); g < target_.num_groups(); ++g) {
    schedules_.push_back(schedules_.front());
    const double lr = target_.lr(g);
    base_lrs_.push_back(BaseFor(*schedules_.back(), step_, lr, lr).value_or(lr));
    set_lrs_.push_back(lr);
  }
}

void LrScheduler::Rebase() {
  AddGroups();
  for (int64_t g = 0; g < static_cast<int64_t>(base_lrs_.size()); ++g) {
    const double lr = target_.lr(g);
    if (lr == set_lrs_[g]) continue;
    if (const auto base = BaseFor(*schedules_[g], StepOf(g), lr, base_lrs_[g])) {
      base_lrs_[g] = *base;
    } else if (!warned_) {
      warned_ = true;
      MUSTER_LOG(Warning) << "the learning rate of parameter group " << g << " was set to " << lr
                          << " by hand at step " << step_
                          << " of a schedule that cannot continue from there, and now sets its own "
                             "rate: set the rate before the schedule is made, or use a schedule "
                             "that scales it";
    }
  }
}

bool LrScheduler::Step() {
  const bool ended = !schedules_.empty() && std::all_of(schedules_.begin(), schedules_.end(),
                                                        [this](const LrSchedulePtr& schedule) {
                                                          const auto last = schedule->last_step();
                                                          return last.has_value() && step_ >= *last;
                                                        });
  if (ended) return false;
  Rebase();
  ++step_;
  Apply();
  return true;
}

std::vector<double> LrScheduler::last_lr() const {
  std::vector<double> lrs;
  for (int64_t g = 0; g < target_.num_groups(); ++g) lrs.push_back(target_.lr(g));
  return lrs;
}

PlainState LrScheduler::SaveState() const {
  // Groups added since the last step have no base rate yet: compute the one for a step from here.
  std::vector<double> base_lrs = base_lrs_, scheduled = set_lrs_;
  for (int64_t g = static_cast<int64_t>(base_lrs.size()); g < target_.num_groups(); ++g) {
    const double lr = target_.lr(g);
    base_lrs.push_back(BaseFor(*schedules_.front(), step_, lr, lr).value_or(lr));
    scheduled.push_back(schedules_.front()->Lr(step_, base_lrs.back()));
  }
  return {{"step", {D(step_)}},
          {"base_lrs", std::move(base_lrs)},
          {"last_lr", last_lr()},
          {"scheduled_lr", std::move(scheduled)}};
}

void LrScheduler::CheckState(const PlainState& state) const {
  CheckGroups();
  const auto groups = static_cast<size_t>(target_.num_groups());
  const double step = Row(state, "step", 1)[0];
  Row(state, "base_lrs", groups);
  Row(state, "last_lr", groups);
  if (state.count("scheduled_lr") > 0) Row(state, "scheduled_lr", groups);
  TORCH_CHECK(step >= 0, "scheduler state 'step' is negative: ", step);
}

void LrScheduler::LoadState(const PlainState& state) {
  CheckState(state);
  AddGroups();
  const std::vector<double>& last_lr = state.at("last_lr");
  step_ = static_cast<int64_t>(state.at("step")[0]);
  base_lrs_ = state.at("base_lrs");
  Apply();
  // Rates changed by hand win over the schedule's, and the next step continues from them, as in an
  // uninterrupted run. Rates that the saved run's schedule had set are replaced by this schedule's,
  // which may be longer, for example. Older states do not distinguish the two.
  const auto scheduled = state.find("scheduled_lr");
  for (size_t g = 0; g < last_lr.size(); ++g) {
    if (scheduled != state.end() && scheduled->second[g] == last_lr[g]) continue;
    target_.set_lr(static_cast<int64_t>(g), last_lr[g]);
  }
}

namespace {

// The value that any metric is better than.
double WorstOf(const PlateauOptions& options) {
  const double infinity = std::numeric_limits<double>::infinity();
  return options.minimize ? infinity : -infinity;
}

}  // namespace

ReduceLROnPlateau::ReduceLROnPlateau(LrTarget& target, const PlateauOptions& options)
    : target_(target), options_(options) {
  TORCH_CHECK(options.factor < 1, "ReduceLROnPlateau's factor must be below 1, got ",
              options.factor);
  best_ = WorstOf(options);
}

bool ReduceLROnPlateau::Better(double metric) const {
  const double sign = options_.minimize ? -1 : 1;
  const double bar = options_.relative_threshold ? best_ * (1 + sign * options_.threshold)
                                                 : best_ + sign * options_.threshold;
  return options_.minimize ? metric < bar : metric > bar;
}

void ReduceLROnPlateau::Step(double metric) {
  ++step_;
  if (Better(metric)) {
    best_ = metric;
    bad_ = 0;
  } else {
    ++bad_;
  }
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    bad_ = 0;
  }
  if (bad_ <= options_.patience) return;
  for (int64_t g = 0; g < target_.num_groups(); ++g) {
    const double old_lr = target_.lr(g);
    const double new_lr = std::max(old_lr * options_.factor, options_.min_lr);
    if (old_lr - new_lr > options_.eps) target_.set_lr(g, new_lr);
  }
  cooldown_left_ = options_.cooldown;
  bad_ = 0;
}

PlainState ReduceLROnPlateau::SaveState() const {
  std::vector<double> lrs;
  for (int64_t g = 0; g < target_.num_groups(); ++g) lrs.push_back(target_.lr(g));
  return {{"step", {D(step_)}},
          {"bad", {D(bad_)}},
          {"cooldown_left", {D(cooldown_left_)}},
          {"best", {best_}},
          {"last_lr", std::move(lrs)}};
}

void ReduceLROnPlateau::CheckState(const PlainState& state) const {
  for (const char* name : {"step", "bad", "cooldown_left"}) Row(state, name, 1);
  const auto best = state.find("best");
  TORCH_CHECK(best == state.end() || best->second.size() <= 1,
              "scheduler state has several 'best'");
  Row(state, "last_lr", static_cast<size_t>(target_.num_groups()));
}

void ReduceLROnPlateau::LoadState(const PlainState& state) {
  CheckState(state);
  const std::vector<double>& lrs = state.at("last_lr");
  step_ = static_cast<int64_t>(state.at("step")[0]);
  bad_ = static_cast<int64_t>(state.at("bad")[0]);
  cooldown_left_ = static_cast<int64_t>(state.at("cooldown_left")[0]);
  // Older states of a schedule that had no metric yet have no best value.
  const auto best = state.find("best");
  best_ = best == state.end() || best->second.empty() ? WorstOf(options_) : best->second[0];
  for (size_t g = 0; g < lrs.size(); ++g) target_.set_lr(static_cast<int64_t>(g), lrs[g]);
}

}  // namespace muster
