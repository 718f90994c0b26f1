#include "coordinator/jobs/job_changes.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace muster::coordinator {
namespace {

std::vector<std::pair<uint64_t, uint64_t>> All(const JobChanges& changes) {
  return {changes.changes().begin(), changes.changes().end()};
}

TEST(JobChanges, EachJob_IsThereOnce_AtItsLastChange) {
  JobChanges changes;
  changes.Changed(1, 0, 10);
  changes.Changed(2, 0, 11);
  changes.Changed(1, 10, 12);
  EXPECT_EQ(All(changes), (std::vector<std::pair<uint64_t, uint64_t>>{{11, 2}, {12, 1}}));
  changes.Removed(2, 11, {13, "b-2", "ann"});
  EXPECT_EQ(All(changes), (std::vector<std::pair<uint64_t, uint64_t>>{{12, 1}}));
  ASSERT_EQ(changes.removals().size(), 1u);
  EXPECT_EQ(changes.removals()[0].job_id, "b-2");
}

TEST(JobChanges, OldRemovals_AreForgotten_AndThatIsKnown) {
  JobChanges changes;
  changes.ForgetRemovals(100);
  EXPECT_EQ(changes.forgotten(), 100u);
  for (uint64_t i = 1; i <= JobChanges::kKeptRemovals + 2; ++i) {
    changes.Removed(i, 0, {100 + i, std::to_string(i), ""});
  }
  EXPECT_EQ(changes.removals().size(), JobChanges::kKeptRemovals);
  EXPECT_EQ(changes.forgotten(), 102u);
  EXPECT_EQ(changes.removals().front().revision, 103u);
}

}  // namespace
}  // namespace muster::coordinator
