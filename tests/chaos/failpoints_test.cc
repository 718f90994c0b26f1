#include <csignal>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/failpoint.h"
#include "gtest/gtest.h"
#include "tests/chaos/cluster.h"
#include "tests/chaos/plans.h"

namespace muster::chaos {
namespace {

void Expect(const Plan& plan) {
  Cluster cluster(plan);
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
}

// kill -9 of the coordinator at each of its failpoints.
class KilledCoordinator : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledCoordinator, JobEndsWellAndNothingIsLost) { Expect(CoordinatorPlan(GetParam())); }

INSTANTIATE_TEST_SUITE_P(At, KilledCoordinator, ::testing::ValuesIn(CoordinatorFailpoints()),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param, {{".", "_"}});
                         });

TEST(Chaos, NothingFails_NothingIsWrong) { Expect({.name = "quiet"}); }

TEST(Chaos, KilledWorker_IsReplacedAndTheJobGoesOn) {
  Expect({.name = "killed_worker",
          .workers = 3,
          .signals = {{.worker = 0, .round = 7, .target = 1, .signal = SIGKILL},
                      {.worker = 2, .round = 12, .target = 0, .signal = SIGKILL}}});
}

}  // namespace
}  // namespace muster::chaos
