#include "muster/internal/configured_training.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "c10/util/Exception.h"
#include "worker/train/optimizer.h"
#include "worker/train/warmup_schedules.h"

namespace muster::internal {
namespace {

template <typename Options>
std::shared_ptr<OptimizerHandle> Fuse(const Options& common, std::vector<ConfiguredGroup> groups) {
  std::vector<ParamGroup<Options>> fused;
  for (ConfiguredGroup& group : groups) {
    Options options = common;
    options.lr = group.lr.value_or(options.lr);
    options.weight_decay = group.weight_decay.value_or(options.weight_decay);
    fused.push_back({.params = std::move(group.params), .options = options});
  }
  return std::make_shared<Fused<Options>>(fused);
}

}  // namespace

std::shared_ptr<OptimizerHandle> MakeOptimizer(const ConfiguredTraining& configured,
                                               std::vector<ConfiguredGroup> groups,
                                               const OptimizerArguments& arguments) {
  TORCH_CHECK(configured.optimizer.has_value(),
              "make_optimizer() needs a DeepSpeed config with the section \"optimizer\", and this "
              "process has none: add the section, or make the optimizer in the program, as "
              "muster::FusedAdamW(net->parameters(), {.lr = 1e-4})");
  const client::PlannedOptimizer& from = *configured.optimizer;
  const auto common = [&](auto options) {
    options.lr = configured.autos.count("optimizer.params.lr") > 0 ? arguments.lr
                                                                   : from.lr.value_or(options.lr);
    // DeepSpeed's default is 0 for every type.
    options.weight_decay = configured.autos.count("optimizer.params.weight_decay") > 0
                               ? arguments.weight_decay
                               : from.weight_decay.value_or(0);
    if constexpr (requires { options.betas; }) {
      if (from.beta1.has_value() && from.beta2.has_value()) {
        options.betas = {*from.beta1, *from.beta2};
      }
    }
    if constexpr (requires { options.eps; }) options.eps = from.eps.value_or(options.eps);
    if constexpr (requires { options.momentum; }) {
      options.momentum = from.momentum.value_or(options.momentum);
      options.nesterov = from.nesterov.value_or(options.nesterov);
    }
    return options;
  };
  if (from.type == "AdamW") return Fuse(common(AdamWOptions()), std::move(groups));
  if (from.type == "Adam") return Fuse(common(AdamOptions()), std::move(groups));
  if (from.type == "SGD") return Fuse(common(SGDOptions()), std::move(groups));
  TORCH_CHECK(from.type == "Adagrad", "unknown optimizer ", from.type);
  return Fuse(common(AdagradOptions()), std::move(groups));
}

namespace {

// A warm-up to the rate of each group of the optimizer.
class UpToTheBaseRate final : public LrSchedule {
 public:
  using Make = std::function<LrSchedulePtr(const WarmupOptions&)>;
  UpToTheBaseRate(const WarmupOptions& options, Make make)
      : options_(options), make_(std::move(make)) {}
  double Lr(int64_t step, double base_lr) const override {
    WarmupOptions options = options_;
    options.max_lr = base_lr;
    return make_(options)->Lr(step, base_lr);
  }
  bool knows_any_step() const override { return true; }

 private:
  const WarmupOptions options_;
  const Make make_;
};

}  // namespace

LrSchedulePtr MakeScheduler(const ConfiguredTraining& configured,
                            const SchedulerArguments& arguments, int64_t ranks) {
  TORCH_CHECK(configured.scheduler.has_value(),
              "make_scheduler() needs a DeepSpeed config with the section \"scheduler\", and this "
              "process has none: add the section, or make the schedule in the program, as "
              "muster::LinearWithWarmup(100, 9000)");
  const client::PlannedScheduler& from = *configured.scheduler;
  const auto is_auto = [&](const char* name) { return configured.autos.count(name) > 0; };
  const int64_t warmup_steps = is_auto("scheduler.params.warmup_num_steps")
                                   ? std::max<int64_t>(1, arguments.warmup_num_steps)
                                   : from.warmup_steps.value_or(1000);
  const auto total_steps = [&] {
    std::optional<int64_t> total = from.total_steps;
    if (is_auto("scheduler.params.total_num_steps") && arguments.total_num_steps.has_value()) {
      total = (*arguments.total_num_steps + ranks - 1) / ranks;
    }
    TORCH_CHECK(total.has_value(), "scheduler.params.total_num_steps of the DeepSpeed config is ",
                is_auto("scheduler.params.total_num_steps") ? "\"auto\"" : "not there", ", and ",
                from.type,
                " needs it: write a number there, or \"auto\" and give "
                "make_scheduler() .total_num_steps");
    return *total;
  };
  if (from.type == "WarmupCosineLR") {
    WarmupCosineOptions options;
    options.min_ratio = from.min_ratio.value_or(options.min_ratio);
    options.cosine_min_ratio = from.cosine_min_ratio.value_or(options.cosine_min_ratio);
    options.warmup_steps = warmup_steps;
    options.logarithmic = from.logarithmic;
    return WarmupCosineLR(options, total_steps());
  }
  WarmupOptions options;
  options.min_lr = from.min_lr.value_or(0);
  // If it is left out, DeepSpeed's WarmupLR takes the optimizer's rate as well, and WarmupDecayLR
  // takes 0.001.
  const bool of_optimizer = is_auto("scheduler.params.warmup_max_lr") || from.type == "WarmupLR";
  options.max_lr = from.max_lr.value_or(options.max_lr);
  options.warmup_steps = warmup_steps;
  options.logarithmic = from.logarithmic;
  std::function<LrSchedulePtr(const WarmupOptions&)> make = WarmupLR;
  if (from.type != "WarmupLR") {
    TORCH_CHECK(from.type == "WarmupDecayLR", "unknown scheduler ", from.type);
    make = [total = total_steps()](const WarmupOptions& o) { return WarmupDecayLR(o, total); };
  }
  if (from.max_lr.has_value() || !of_optimizer) return make(options);
  return std::make_shared<UpToTheBaseRate>(options, std::move(make));
}

}  // namespace muster::internal
