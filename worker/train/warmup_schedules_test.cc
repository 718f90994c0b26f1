#include "worker/train/warmup_schedules.h"

#include <cmath>
#include <limits>
#include <vector>

#include "c10/util/Exception.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

// The numbers were computed in Python from DeepSpeed's formulas.
void ExpectRates(const LrSchedulePtr& schedule, double base, const std::vector<double>& want) {
  for (size_t s = 0; s < want.size(); ++s) {
    EXPECT_NEAR(schedule->Lr(static_cast<int64_t>(s), base), want[s], 1e-11) << "update " << s;
  }
}

TEST(WarmupLR, ItsRates_AreDeepSpeeds) {
  WarmupOptions options{.min_lr = 0.001, .max_lr = 0.01, .warmup_steps = 4};
  ExpectRates(WarmupLR(options), 7,
              {0.001, 0.001, 0.0055, 0.008132331253245, 0.01, 0.01, 0.01, 0.01});
  options.logarithmic = false;
  ExpectRates(WarmupLR(options), 7, {0.001, 0.001, 0.00325, 0.0055, 0.00775, 0.01, 0.01});
  ExpectRates(WarmupLR({.max_lr = 0.01, .warmup_steps = 1}), 7, {0, 0, 0.01, 0.01});
}

TEST(WarmupDecayLR, ItsRates_AreDeepSpeeds) {
  ExpectRates(WarmupDecayLR({.min_lr = 0.001, .max_lr = 0.01, .warmup_steps = 4}, 8), 7,
              {0.001, 0.001, 0.0055, 0.008132331253245, 0.01, 0.01, 0.00775, 0.0055, 0.00325, 0.001,
               0.001, 0.001});
}

TEST(WarmupCosineLR, ItsRates_AreDeepSpeeds) {
  ExpectRates(
      WarmupCosineLR(
          {.min_ratio = 0.1, .cosine_min_ratio = 0.01, .warmup_steps = 3, .logarithmic = false}, 8),
      0.1,
      {0, 0.01, 0.04, 0.07, 0.09054634122156, 0.06579634122156, 0.03520365877844, 0.01045365877844,
       0.001, 0.001, 0.001});
  // No steps are left for the cosine.
  ExpectRates(WarmupCosineLR({.warmup_steps = 4}, 4), 0.1,
              {0, 0, 0.05, 0.079248125036058, 0.1, 1e-5, 1e-5});
}

TEST(WarmupSchedules, BadNumbers_AreRefused) {
  EXPECT_THROW(WarmupLR({.warmup_steps = 0}), c10::Error);
  EXPECT_THROW(WarmupLR({.min_lr = -1}), c10::Error);
  EXPECT_THROW(WarmupLR({.max_lr = std::nan("")}), c10::Error);
  EXPECT_THROW(WarmupDecayLR({}, 0), c10::Error);
  EXPECT_THROW(WarmupCosineLR({}, -1), c10::Error);
  EXPECT_THROW(WarmupCosineLR({.cosine_min_ratio = std::numeric_limits<double>::infinity()}, 9),
               c10::Error);
}

}  // namespace
}  // namespace muster
