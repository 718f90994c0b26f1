#include "agent/hang_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "agent/fake_op_sender.h"
#include "base/mutex.h"
#include "base/test_wait.h"

namespace muster::agent {
namespace {

// A coordinator that answers what a test says; ranks make no progress unless the test says so.
class HangWatchTest : public ::testing::Test {
 protected:
  void Start() {
    watch_ = HangWatch::Start({.job = "j-1.1",
                               .timeout = absl::Milliseconds(20),
                               .sender = &sender_,
                               .judges =
                                   [this] {
                                     ++asked_;
                                     return judges_.load();
                                   },
                               .on_hang =
                                   [this](HangReport report) {
                                     MutexLock lock(&mu_);
                                     told_ = std::move(report);
                                   },
                               .period = absl::Milliseconds(1)});
  }
  v1::OpResult Members(int step) {
    v1::OpResult result;
    v1::GetMembersReply& reply = *result.mutable_get_members();
    reply.set_generation(1);
    for (int rank = 0; rank < 2; ++rank) {
      v1::Member* const member = reply.add_members();
      member->set_rank(rank);
      member->set_worker_id(rank == 0 ? "w0" : "w1");
      member->set_state(v1::WORKER_STATE_RUNNING);
      member->set_last_step(step);
    }
    return result;
  }
  // Answers looks until stacks are requested.
  void AnswerUntilStacks(int step) {
    while (true) {
      const v1::Op op = sender_.WaitForOp();
      if (op.has_capture_stacks()) return;
      EXPECT_EQ(op.get_members().job_id(), "j-1.1");
      sender_.Answer(Members(step));
    }
  }
  v1::OpResult Stack(int rank, int next) {
    v1::OpResult result;
    v1::RankStack* const stack = result.mutable_capture_stacks()->add_stacks();
    stack->mutable_worker()->set_rank(rank);
    stack->mutable_worker()->set_native_stack("#0 poll");
    result.mutable_capture_stacks()->set_next(next);
    return result;
  }
  std::optional<HangReport> told() {
    MutexLock lock(&mu_);
    return told_;
  }

  FakeOpSender sender_;
  std::atomic<bool> judges_{true};
  std::atomic<int> asked_{0};
  Mutex mu_;
  std::optional<HangReport> told_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<HangWatch> watch_;  // last: it calls into the others
};

TEST_F(HangWatchTest, Hang_IsToldWithTheStacksOfAllPages) {
  Start();
  AnswerUntilStacks(7);
  EXPECT_FALSE(told().has_value());
  sender_.Answer(Stack(0, 1));
  EXPECT_EQ(sender_.WaitForOp().capture_stacks().first(), 1);
  sender_.Answer(Stack(1, 0));
  EXPECT_TRUE(sender_.WaitForOp().has_get_members()) << "whether it still hangs";
  sender_.Answer(Members(7));
  // The next look comes after the hang was reported.
  sender_.WaitForOp();
  ASSERT_TRUE(told().has_value());
  EXPECT_THAT(told()->hang.why, ::testing::HasSubstr("rank 0"));
  ASSERT_EQ(told()->ranks.size(), 1u);
  EXPECT_EQ(told()->ranks[0].ranks_size(), 2);
}

TEST_F(HangWatchTest, ProgressWhileStacksAreTaken_IsNotTold) {
  Start();
  AnswerUntilStacks(7);
  sender_.Answer(Stack(0, 0));
  sender_.WaitForOp();
  sender_.Answer(Members(8));
  sender_.WaitForOp();
  EXPECT_FALSE(told().has_value());
}

TEST_F(HangWatchTest, HangWithoutStacks_IsToldAllTheSame) {
  Start();
  AnswerUntilStacks(7);
  v1::OpResult refused;
  refused.mutable_error()->set_code(14);
  refused.mutable_error()->set_message("overloaded");
  sender_.Answer(refused);
  sender_.WaitForOp();
  sender_.Answer(Members(7));
  sender_.WaitForOp();
  ASSERT_TRUE(told().has_value());
  EXPECT_TRUE(told()->ranks.empty());
}

TEST_F(HangWatchTest, NodeThatDoesNotJudge_AsksNothing) {
  judges_ = false;
  Start();
  WaitUntil([&] { return asked_ > 3; });
  EXPECT_TRUE(sender_.ops().empty());
  judges_ = true;
  AnswerUntilStacks(7);
}

TEST_F(HangWatchTest, StopWhileACallIsOpen_DoesNotWaitForIt) {
  Start();
  sender_.WaitForOp();
  watch_.reset();
  EXPECT_FALSE(told().has_value());
}

}  // namespace
}  // namespace muster::agent
