#include "coordinator/unseated.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

class UnseatedTest : public ::testing::Test {
 protected:
  void Say(const std::string& job, int rank, int64_t pid = 100, uint64_t incarnation = 7) {
    v1::WorkerBeat beat;
    beat.set_job_id(job);
    beat.set_worker_id(absl::StrCat("w", rank));
    beat.set_incarnation(incarnation);
    beat.set_process_state("running");
    beat.mutable_unseated()->set_rank(rank);
    beat.mutable_unseated()->set_pid(pid);
    beat.mutable_unseated()->set_host("h");
    unseated_.Said("node", beat, now_);
  }

  Unseated unseated_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
};

TEST_F(UnseatedTest, Processes_AreKnownUntilTheirAgentSaysThemNoMore) {
  EXPECT_EQ(unseated_.Size("j", now_), 0);
  Say("j", 1);
  EXPECT_EQ(unseated_.Size("j", now_), 2);
  EXPECT_EQ(unseated_.Find("j", 0, now_), nullptr);
  ASSERT_NE(unseated_.Find("j", 1, now_), nullptr);
  EXPECT_EQ(unseated_.Find("j", 1, now_)->node, "node");
  now_ += Unseated::kFresh + absl::Seconds(1);
  EXPECT_EQ(unseated_.Size("j", now_), 0);
  EXPECT_EQ(unseated_.Find("j", 1, now_), nullptr);
}

TEST_F(UnseatedTest, StackOfAnotherStart_IsNotKept) {
  Say("j", 0, 100);
  v1::StackReply stack;
  stack.set_pid(100);
  stack.set_native_stack("#0 read()");
  EXPECT_FALSE(unseated_.SetStack("k", "w0", stack));
  EXPECT_FALSE(unseated_.SetStack("j", "w1", stack));
  EXPECT_TRUE(unseated_.SetStack("j", "w0", stack));
  EXPECT_EQ(unseated_.Find("j", 0, now_)->stack, "#0 read()");
  Say("j", 0, 101, 8);
  EXPECT_EQ(unseated_.Find("j", 0, now_)->stack, "");
  EXPECT_FALSE(unseated_.SetStack("j", "w0", stack));
}

TEST_F(UnseatedTest, LongStacks_AreCut) {
  Say("j", 0);
  v1::StackReply stack;
  stack.set_native_stack(std::string(100'000, 'x'));
  ASSERT_TRUE(unseated_.SetStack("j", "w0", stack));
  EXPECT_LE(unseated_.Find("j", 0, now_)->stack.size(), size_t{16} << 10);
}

TEST_F(UnseatedTest, MoreThanTheLimit_AreNotKnown) {
  for (size_t i = 0; i <= Unseated::kMaxProcesses; ++i) {
    Say(absl::StrCat("j", i % 3), static_cast<int>(i / 3));
  }
  const int last = static_cast<int>(Unseated::kMaxProcesses / 3);
  EXPECT_EQ(unseated_.Find(absl::StrCat("j", Unseated::kMaxProcesses % 3), last, now_), nullptr);
  // Processes that are known stay known, and one that is gone makes room.
  Say("j0", 0);
  EXPECT_NE(unseated_.Find("j0", 0, now_), nullptr);
  now_ += 2 * Unseated::kFresh + absl::Seconds(1);
  Say("k", 0);
  EXPECT_NE(unseated_.Find("k", 0, now_), nullptr);
}

TEST_F(UnseatedTest, WrongBeats_AreIgnored) {
  Say("j", -1);
  Say("j", 1 << 30);
  Say(std::string(1000, 'j'), 0);
  EXPECT_EQ(unseated_.Size("j", now_), 0);
  EXPECT_EQ(unseated_.Size(std::string(1000, 'j'), now_), 0);
}

TEST_F(UnseatedTest, Calls_WaitForAnswersOrTheirDeadline) {
  Say("j", 0);
  EXPECT_TRUE(unseated_.AddCall("j", 1, now_ + absl::Seconds(5), 0, {{0, 11}}).empty());
  EXPECT_TRUE(unseated_.AddCall("j", 2, now_ + absl::Seconds(9), 0, {{0, 12}}).empty());
  EXPECT_EQ(unseated_.NextDeadline(), now_ + absl::Seconds(5));
  EXPECT_EQ(unseated_.Answered("j", 11).size(), 1u);
  unseated_.Abandon("j", 2);
  EXPECT_EQ(unseated_.NextDeadline(), absl::InfiniteFuture());
  EXPECT_TRUE(unseated_.AddCall("j", 3, now_ + absl::Seconds(9), 0, {{0, 13}}).empty());
  now_ += absl::Seconds(9);
  EXPECT_EQ(unseated_.Expired(now_).size(), 1u);
  EXPECT_EQ(unseated_.TakeExpired("j", now_).size(), 1u);
  EXPECT_TRUE(unseated_.Expired(now_).empty());
}

}  // namespace
}  // namespace muster::coordinator
