#include "client/jobs/recovery.h"

#include <gtest/gtest.h>

#include <optional>

#include "absl/time/time.h"

namespace muster {
namespace {

absl::Time At(int seconds) { return absl::FromUnixSeconds(1'700'000'000 + seconds); }

Job TwoAttempts() {
  Job job;
  Attempt& first = job.history.emplace_back();
  first.number = 4;
  first.times.failed = At(0);
  first.times.detected = At(1);
  first.times.decided = At(3);
  first.times.fenced = At(6);
  Attempt& second = job.history.emplace_back();
  second.number = 5;
  second.times.placed = At(10);
  second.times.sealed = At(15);
  second.times.restored = At(21);
  second.times.stepped = At(28);
  return job;
}

TEST(Recovery, EachStage_CountsFromTheOneBefore) {
  const std::vector<Recovery> recoveries = Recoveries(TwoAttempts());
  ASSERT_EQ(recoveries.size(), 1u);
  const Recovery& recovery = recoveries[0];
  EXPECT_EQ(recovery.attempt, 4);
  EXPECT_EQ(recovery.detect, absl::Seconds(1));
  EXPECT_EQ(recovery.decide, absl::Seconds(2));
  EXPECT_EQ(recovery.fence, absl::Seconds(3));
  EXPECT_EQ(recovery.place, absl::Seconds(4));
  EXPECT_EQ(recovery.rendezvous, absl::Seconds(5));
  EXPECT_EQ(recovery.restore, absl::Seconds(6));
  EXPECT_EQ(recovery.first_step, absl::Seconds(7));
  EXPECT_EQ(recovery.total, absl::Seconds(28));
}

TEST(Recovery, UnknownTimes_MakeUnknownStages) {
  Job job = TwoAttempts();
  job.history[0].times.failed = absl::InfinitePast();   // it was preempted
  job.history[1].times.stepped = absl::InfinitePast();  // a foreign program
  job.history[1].times.restored = absl::InfinitePast();
  const Recovery recovery = Recoveries(job)[0];
  EXPECT_EQ(recovery.detect, std::nullopt);
  EXPECT_EQ(recovery.decide, absl::Seconds(2));
  EXPECT_EQ(recovery.rendezvous, absl::Seconds(5));
  EXPECT_EQ(recovery.restore, std::nullopt);
  EXPECT_EQ(recovery.first_step, std::nullopt);
  EXPECT_EQ(recovery.total, std::nullopt);
  const Recovery none = RecoveryOf(Attempt(), nullptr);
  EXPECT_EQ(none.detect, std::nullopt);
  EXPECT_EQ(none.fence, std::nullopt);
}

TEST(Recovery, ProgramThatLoadsNothing_HasItsFirstStepFromTheRendezvousOn) {
  Job job = TwoAttempts();
  job.history[1].times.restored = absl::InfinitePast();
  EXPECT_EQ(Recoveries(job)[0].first_step, absl::Seconds(13));
}

TEST(Recovery, LastAttempt_IsKnownUpToItsEnd) {
  const Job job = TwoAttempts();
  EXPECT_EQ(RecoveryOf(job.history[0], nullptr).fence, absl::Seconds(3));
  EXPECT_EQ(RecoveryOf(job.history[0], nullptr).place, std::nullopt);
  EXPECT_TRUE(Recoveries(Job()).empty());
}

}  // namespace
}  // namespace muster
