#ifndef MUSTER_WORKER_TRAIN_LR_SCHEDULER_H_
#define MUSTER_WORKER_TRAIN_LR_SCHEDULER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "worker/train/plain_state.h"

namespace muster {

// The learning rates of an optimizer's parameter groups, which is all that a scheduler needs.
// OptimizerHandle (worker/train/optimizer_handle.h) implements it.
class LrTarget {
 public:
  virtual ~LrTarget() = default;
  virtual int64_t num_groups() const = 0;
  virtual double lr(int64_t group) const = 0;
  virtual void set_lr(int64_t group, double lr) = 0;
  // SGD's momentum or Adam's first beta; nothing if the optimizer has neither. For OneCycleLR,
  // whose scheduler refuses such an optimizer unless cycle_momentum is off.
  virtual std::optional<double> momentum(int64_t /*group*/) const { return std::nullopt; }
  virtual void set_momentum(int64_t /*group*/, double /*momentum*/) {}
};

// A learning rate as a function of the number of scheduler steps and the group's initial rate.
// Immutable and pure: the rate at step s never depends on how s was reached, so resuming is exact.
// Values agree with torch's classes of the same names (whose recursive forms differ from these
// closed forms only by rounding).
class LrSchedule {
 public:
  virtual ~LrSchedule() = default;
  virtual double Lr(int64_t step, double base_lr) const = 0;
  virtual std::optional<double> Momentum(int64_t /*step*/) const { return std::nullopt; }
  // The last step with its own rate, for schedules that end; a scheduler does not step beyond it.
  virtual std::optional<int64_t> last_step() const { return std::nullopt; }
  // Whether Lr() may be called for steps that training never reaches. Not so for user functions,
  // which may read a table.
  virtual bool knows_any_step() const { return false; }
};
using LrSchedulePtr = std::shared_ptr<const LrSchedule>;

// Below, b is base_lr and s is the step. Bad arguments throw a c10::Error that names the argument.

// b * factor(s).
LrSchedulePtr LambdaLR(std::function<double(int64_t)> factor);
// Linear warm-up from 0 over `warmup` steps, then linear decay to 0 at step `total`.
LrSchedulePtr LinearWithWarmup(int64_t warmup, int64_t total);
// Linear warm-up from 0, then half a cosine (or `cycles` of a full one) down to 0 at step `total`.
LrSchedulePtr CosineWithWarmup(int64_t warmup, int64_t total, double cycles = 0.5);
// Linear warm-up from 0, then b forever.
LrSchedulePtr ConstantWithWarmup(int64_t warmup);
// Linear warm-up from 0, then b * sqrt(timescale / (s - warmup + timescale)); timescale 0:
// `warmup`, or 10000 if that is 0.
LrSchedulePtr InverseSqrtWithWarmup(int64_t warmup, int64_t timescale = 0);
// b * gamma^floor(s / step_size).
LrSchedulePtr StepLR(int64_t step_size, double gamma = 0.1);
// b * gamma^(number of milestones <= s); a milestone listed twice counts twice.
LrSchedulePtr MultiStepLR(std::vector<int64_t> milestones, double gamma = 0.1);
// b * gamma^s.
LrSchedulePtr ExponentialLR(double gamma);
// b * factor for s < total_iters, then b.
LrSchedulePtr ConstantLR(double factor = 1.0 / 3, int64_t total_iters = 5);
// From b * start_factor to b * end_factor in total_iters equal steps.
LrSchedulePtr LinearLR(double start_factor = 1.0 / 3, double end_factor = 1.0,
                       int64_t total_iters = 5);
// b * (1 - min(s, total_iters) / total_iters)^power.
LrSchedulePtr PolynomialLR(int64_t total_iters = 5, double power = 1.0);
// eta_min + (b - eta_min) * (1 + cos(pi * s / t_max)) / 2; rises again beyond t_max, as in torch.
LrSchedulePtr CosineAnnealingLR(int64_t t_max, double eta_min = 0);
// Cosine annealing restarted after t_0, t_0 * t_mult, t_0 * t_mult^2, ... steps.
LrSchedulePtr CosineAnnealingWarmRestarts(int64_t t_0, int64_t t_mult = 1, double eta_min = 0);

// One cycle up to max_lr and down again. It ignores the base rate. Its last step is total_steps
// - 1, whose rate and momentum later ones keep.
struct OneCycleOptions {
  double max_lr = 0;
  int64_t total_steps = 0;
  double pct_start = 0.3;
  bool cosine = true;  // anneal_strategy 'cos'; false: 'linear'
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25;
  double final_div_factor = 1e4;
  bool three_phase = false;
};
LrSchedulePtr OneCycleLR(const OneCycleOptions& options);

// `after`, starting at step `warmup` with its own step 0; before that, a straight line from
// start_factor * r to r, where r is the rate of `after` at its step 0.
LrSchedulePtr WithWarmup(int64_t warmup, LrSchedulePtr after, double start_factor = 0);
// torch's SequentialLR: schedules[i] runs from milestones[i-1] on, which is its own step 0.
LrSchedulePtr SequentialLR(std::vector<LrSchedulePtr> schedules, std::vector<int64_t> milestones);
// Each schedule takes the rate of the one before it as its base: torch's ChainedScheduler for
// schedules that scale the base rate by a factor.
LrSchedulePtr ChainedLR(std::vector<LrSchedulePtr> schedules);

// What PreparedScheduler drives: something that steps. Not thread-safe.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Sets the next learning rates. Returns false, without effect, if the schedule has ended.
  virtual bool Step() = 0;
  virtual int64_t step_count() const = 0;
  virtual PlainState SaveState() const = 0;
  // Refuses (c10::Error) a state that LoadState() would refuse. Changes nothing.
  virtual void CheckState(const PlainState& state) const = 0;
  // Loads a state after CheckState().
  virtual void LoadState(const PlainState& state) = 0;
};

// Drives the rates of a target along a schedule. Sets the rates of step 0 when constructed; the
// rates the target had before are the base rates. `target` is borrowed and must outlive it. Not
// thread-safe.
//
// Rates set by hand (target.set_lr) stay: the next Step() gives the group the base rate for which
// the schedule has that rate at the current step, and continues from there, as torch's recursive
// schedulers do (StepLR: half the rate now is half the rate ever after). If no base rate does that,
// the schedule takes over again at the next Step(), with one warning: OneCycleLR ignores base
// rates, the first step of a warm-up has rate 0 for any base rate, and near that step a
// proportional base rate would make later rates explode.
//
// Loading a state sets the step and the base rates. The rates are then those of this schedule at
// that step, which may differ from those of the saved run, except rates that were set by hand.
//
// If there are several schedules, one that has ended stays at its last rate while the others
// continue.
//
// A parameter group that is added to the target later follows the schedule of the others, starting
// from its own rate; if each group has its own schedule, the next Step() throws.
class LrScheduler : public Scheduler {
 public:
  LrScheduler(LrTarget& target, LrSchedulePtr schedule);
  // One schedule for each parameter group.
  LrScheduler(LrTarget& target, std::vector<LrSchedulePtr> schedules);

  bool Step() override;
  int64_t step_count() const override { return step_; }
  std::vector<double> last_lr() const;
  const std::vector<double>& base_lrs() const { return base_lrs_; }

  PlainState SaveState() const override;
  void CheckState(const PlainState& state) const override;
  void LoadState(const PlainState& state) override;

 private:
  LrTarget& target_;
  std::vector<LrSchedulePtr> schedules_;
  std::vector<double> base_lrs_;
  std::vector<double> set_lrs_;  // as the target returned them
  int64_t step_ = 0;
  bool warned_ = false;

  // The step of a group's schedule: one that has ended stays at its last.
  int64_t StepOf(int64_t group) const;
  void Apply();
  // Base rates for rates set by hand and for groups added since the last step.
  void Rebase();
  void CheckGroups() const;
  void AddGroups();
};

struct PlateauOptions {
  bool minimize = true;  // mode 'min'; false: 'max'
  double factor = 0.1;
  int64_t patience = 10;
  double threshold = 1e-4;
  bool relative_threshold = true;  // threshold_mode 'rel'; false: 'abs'
  int64_t cooldown = 0;
  double min_lr = 0;
  double eps = 1e-8;  // smaller changes are not made
};

// The recipe from which prepare() makes a ReduceLROnPlateau for the optimizer in the same call:
// prepare(optimizer, PlateauSchedule({.factor = 0.5, .patience = 3})).
struct PlateauSchedule {
  PlateauSchedule() = default;
  explicit PlateauSchedule(const PlateauOptions& plateau) : options(plateau) {}
  PlateauOptions options;
};

// A scheduler that steps on a metric. In a job, pass the same (reduced) metric on every rank. Not
// thread-safe.
class MetricScheduler {
 public:
  virtual ~MetricScheduler() = default;
  virtual void Step(double metric) = 0;
  virtual int64_t step_count() const = 0;
  virtual PlainState SaveState() const = 0;
  // Refuses (c10::Error) a state that LoadState() would refuse. Changes nothing.
  virtual void CheckState(const PlainState& state) const = 0;
  // Loads a state after CheckState().
  virtual void LoadState(const PlainState& state) = 0;
};

// torch's ReduceLROnPlateau: multiplies the rates by `factor` when a metric has not improved for
// more than `patience` steps. Rates set by hand and those of groups added later are reduced from
// their current values. `target` is borrowed.
class ReduceLROnPlateau : public MetricScheduler {
 public:
  ReduceLROnPlateau(LrTarget& target, const PlateauOptions& options = {});

  // A NaN metric counts as no improvement.
  void Step(double metric) override;
  int64_t step_count() const override { return step_; }
  int64_t num_bad_steps() const { return bad_; }
  double best() const { return best_; }

  PlainState SaveState() const override;
  void CheckState(const PlainState& state) const override;
  void LoadState(const PlainState& state) override;

 private:
  LrTarget& target_;
  const PlateauOptions options_;
  int64_t step_ = 0;
  int64_t bad_ = 0;
  int64_t cooldown_left_ = 0;
  double best_;

  bool Better(double metric) const;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_LR_SCHEDULER_H_
