// kill -9 at every step of a save, of each rank, of an agent, of the coordinator: the newest sealed
// checkpoint loads, nothing sealed is lost, nothing grows. docs/failpoints.md has the long set.
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/chaos/crash_plans.h"

namespace muster::chaos {
namespace {

class KilledInASave : public ::testing::TestWithParam<CrashPlan> {};

TEST_P(KilledInASave, NewestSealedLoadsAndNothingIsLeftOver) {
  bool reached = false;
  std::string logs;
  const std::vector<std::string> wrong = RunCrashPlan(GetParam(), &reached, &logs);
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << logs;
  EXPECT_TRUE(reached) << "no process was killed: this moment never comes";
}

TEST(CrashPlans, KillBeforeEveryCallOfASaveAndOfARemoval) {
  EXPECT_THAT(CallsWithoutAPlan(), ::testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(At, KilledInASave, ::testing::ValuesIn(CrashPlans()),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param.plan.name, {{".", "_"}});
                         });

}  // namespace
}  // namespace muster::chaos
