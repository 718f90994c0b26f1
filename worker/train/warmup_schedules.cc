#include "worker/train/warmup_schedules.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numbers>
#include <utility>

#include "c10/util/Exception.h"

namespace muster {
namespace {

class Formula final : public LrSchedule {
 public:
  using Rate = std::function<double(int64_t i, double base_lr)>;
  explicit Formula(Rate rate) : rate_(std::move(rate)) {}
  double Lr(int64_t step, double base_lr) const override { return rate_(step - 1, base_lr); }
  bool knows_any_step() const override { return true; }

 private:
  const Rate rate_;
};

// The warm-up, from 0 to 1.
struct WarmUp {
  int64_t steps;
  bool logarithmic;

  double At(int64_t i) const {
    const auto at = static_cast<double>(i);
    const auto all = static_cast<double>(steps);
    return logarithmic ? std::log(at + 1) / std::log(all) : at / all;
  }
};

WarmUp WarmUpOf(int64_t steps, bool logarithmic) {
  TORCH_CHECK(steps >= 1, "warmup_steps must be at least 1, got ", steps);
  return {std::max<int64_t>(2, steps), logarithmic};
}

void CheckRates(const WarmupOptions& options) {
  TORCH_CHECK(std::isfinite(options.min_lr) && std::isfinite(options.max_lr) &&
                  options.min_lr >= 0 && options.max_lr >= 0,
              "min_lr and max_lr must be finite and not negative, got ", options.min_lr, " and ",
              options.max_lr);
}

void CheckTotal(int64_t total_steps) {
  TORCH_CHECK(total_steps >= 1, "total_steps must be at least 1, got ", total_steps);
}

// `after`: the factor after the warm-up, which falls from 1.
LrSchedulePtr Warmup(const WarmupOptions& options, const WarmUp& warm_up,
                     std::function<double(int64_t)> after) {
  CheckRates(options);
  return std::make_shared<Formula>(
      [options, warm_up, after = std::move(after)](int64_t i, double /*base_lr*/) {
        if (i < 0) return options.min_lr;
        const double gamma = i < warm_up.steps ? warm_up.At(i) : after(i);
        return options.min_lr + (options.max_lr - options.min_lr) * gamma;
      });
}

}  // namespace

LrSchedulePtr WarmupLR(const WarmupOptions& options) {
  return Warmup(options, WarmUpOf(options.warmup_steps, options.logarithmic),
                [](int64_t) { return 1.0; });
}

LrSchedulePtr WarmupDecayLR(const WarmupOptions& options, int64_t total_steps) {
  CheckTotal(total_steps);
  const WarmUp warm_up = WarmUpOf(options.warmup_steps, options.logarithmic);
  const auto decay = static_cast<double>(std::max<int64_t>(1, total_steps - warm_up.steps));
  return Warmup(options, warm_up, [total_steps, decay](int64_t i) {
    return std::max(0.0, static_cast<double>(total_steps - i) / decay);
  });
}

LrSchedulePtr WarmupCosineLR(const WarmupCosineOptions& options, int64_t total_steps) {
  CheckTotal(total_steps);
  const auto is_ratio = [](double ratio) { return std::isfinite(ratio) && ratio >= 0; };
  TORCH_CHECK(is_ratio(options.min_ratio) && is_ratio(options.cosine_min_ratio),
              "min_ratio and cosine_min_ratio must be finite and not negative, got ",
              options.min_ratio, " and ", options.cosine_min_ratio);
  const WarmUp warm_up = WarmUpOf(options.warmup_steps, options.logarithmic);
  const auto decay = static_cast<double>(std::max<int64_t>(1, total_steps - warm_up.steps));
  return std::make_shared<Formula>([options, warm_up, decay](int64_t i, double base_lr) {
    if (i < 0) return 0.0;
    if (i < warm_up.steps) {
      return base_lr * (options.min_ratio + (1 - options.min_ratio) * warm_up.At(i));
    }
    const double progress = std::min(1.0, static_cast<double>(i - warm_up.steps + 1) / decay);
    const double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
    const double least = options.cosine_min_ratio;
    return base_lr * std::max(0.0, least + (1 - least) * cosine);
  });
}

}  // namespace muster
