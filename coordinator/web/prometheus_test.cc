#include "coordinator/web/prometheus.h"

#include <regex>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "coordinator/web/histogram.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

TEST(PrometheusText, Families_AreWrittenInTheExpositionFormat) {
  PrometheusText text;
  text.Family("muster_members", PrometheusText::Type::kGauge,
              "Workers by state.\nAll jobs \\ all.");
  text.Sample({{"state", "RUNNING"}, {"job", "a\"b\\c\nd"}}, 3);
  text.Family("muster_generation_changes_total", PrometheusText::Type::kCounter, "Sealed.");
  text.Sample({}, 2);
  text.Family("muster_fsync_seconds", PrometheusText::Type::kHistogram, "Sync.");
  text.Histogram({{"journal", "x"}}, {0.001, 0.5}, {1, 2, 3}, 1.25);
  EXPECT_EQ(text.text(),
            "# HELP muster_members Workers by state.\\nAll jobs \\\\ all.\n"
            "# TYPE muster_members gauge\n"
            "muster_members{state=\"RUNNING\",job=\"a\\\"b\\\\c\\nd\"} 3\n"
            "# HELP muster_generation_changes_total Sealed.\n"
            "# TYPE muster_generation_changes_total counter\n"
            "muster_generation_changes_total 2\n"
            "# HELP muster_fsync_seconds Sync.\n"
            "# TYPE muster_fsync_seconds histogram\n"
            "muster_fsync_seconds_bucket{journal=\"x\",le=\"0.001\"} 1\n"
            "muster_fsync_seconds_bucket{journal=\"x\",le=\"0.5\"} 3\n"
            "muster_fsync_seconds_bucket{journal=\"x\",le=\"+Inf\"} 6\n"
            "muster_fsync_seconds_sum{journal=\"x\"} 1.25\n"
            "muster_fsync_seconds_count{journal=\"x\"} 6\n");
}

TEST(DurationHistogram, Bounds_AreOneTwoFiveSteps) {
  const std::vector<double> bounds = DurationHistogram::BoundsInSeconds();
  EXPECT_DOUBLE_EQ(bounds.front(), 1e-5);
  EXPECT_DOUBLE_EQ(bounds[1], 2e-5);
  EXPECT_DOUBLE_EQ(bounds[2], 5e-5);
  EXPECT_DOUBLE_EQ(bounds[3], 1e-4);
  EXPECT_DOUBLE_EQ(bounds.back(), 50.0);
}

TEST(DurationHistogram, Observe_CountsInTheBucketOfItsBound) {
  const std::vector<double> bounds = DurationHistogram::BoundsInSeconds();
  DurationHistogram histogram;
  for (const double bound : bounds) histogram.Observe(absl::Seconds(bound));
  histogram.Observe(absl::Seconds(1000));
  histogram.Observe(-absl::Seconds(1));
  std::vector<uint64_t> expected(DurationHistogram::kBounds + 1, 1);
  expected[0] = 2;
  EXPECT_EQ(histogram.Counts(), expected);
}

}  // namespace
}  // namespace muster::coordinator
