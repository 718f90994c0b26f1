#include "coordinator/trigger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace muster::coordinator {
namespace {

class TriggerTest : public ::testing::Test {
 protected:
  TriggerTest() { set_.StartGeneration(3, &changes_); }

  v1::RaiseTriggerReply Raise(int rank, v1::TriggerAlign align = v1::TRIGGER_ALIGN_NEXT_STEP,
                              int64_t step = 0, int64_t lead = 0) {
    v1::RaiseTriggerRequest request;
    request.set_name("stop");
    request.set_align(align);
    request.set_step(step);
    request.set_min_lead_steps(lead);
    v1::RaiseTriggerReply reply;
    error_ = set_.Raise(request, rank, next_id_++, &reply, &changes_);
    return reply;
  }
  v1::PollTriggersReply Poll(int rank, int64_t step, int64_t horizon = 0,
                             std::vector<uint64_t> acked = {}) {
    v1::PollTriggersRequest request;
    request.set_rank(rank);
    request.set_step(step);
    request.set_horizon(horizon);
    for (const uint64_t id : acked) request.add_acked(id);
    v1::PollTriggersReply reply;
    error_ = set_.Poll(request, rank, &reply, &changes_);
    return reply;
  }

  TriggerSet set_;
  uint64_t next_id_ = 100;
  std::vector<v1::TriggerChanged> changes_;
  std::optional<v1::OpError> error_;
};

TEST_F(TriggerTest, NextStep_IsTheLargestHorizonPlusLead) {
  Poll(0, 10, 12);
  Poll(1, 8, 20);
  Poll(2, 11);
  const v1::RaiseTriggerReply raised = Raise(0, v1::TRIGGER_ALIGN_NEXT_STEP, 0, 3);
  EXPECT_EQ(raised.effective_step(), 23);
  for (int rank = 0; rank < 3; ++rank) {
    const v1::PollTriggersReply reply = Poll(rank, 12);
    ASSERT_EQ(reply.triggers_size(), 1);
    EXPECT_EQ(reply.triggers(0).effective_step(), 23);
  }
}

TEST_F(TriggerTest, UnknownHorizon_DecisionWaitsForTheLastRank) {
  Poll(0, 10);
  EXPECT_EQ(Raise(0).effective_step(), -1);
  EXPECT_EQ(Poll(0, 11).triggers_size(), 0);
  EXPECT_EQ(Poll(1, 4).triggers_size(), 0);
  const v1::PollTriggersReply last = Poll(2, 7);
  ASSERT_EQ(last.triggers_size(), 1);
  EXPECT_EQ(last.triggers(0).effective_step(), 12);
  EXPECT_EQ(Poll(0, 11).triggers(0).effective_step(), 12);
}

TEST_F(TriggerTest, DecidedStep_DoesNotMoveWithLaterHorizons) {
  for (int rank = 0; rank < 3; ++rank) Poll(rank, 5);
  EXPECT_EQ(Raise(1).effective_step(), 6);
  Poll(0, 5, 50);
  EXPECT_EQ(Poll(1, 5).triggers(0).effective_step(), 6);
}

TEST_F(TriggerTest, NoRank_CanHavePassedTheDecidedStep) {
  // Each rank runs up to its horizon without asking; whatever the order, the decision is at or
  // beyond every horizon.
  int64_t horizon[3] = {0, 0, 0};
  for (int i = 0; i < 60; ++i) {
    const int rank = (i * 7) % 3;
    const int64_t step = horizon[rank] == 0 ? 0 : horizon[rank] - 1;
    horizon[rank] = step + 1 + (i * 5) % 4;
    Poll(rank, step, horizon[rank]);
    if (i > 6 && i % 10 == 0) {
      const int64_t effective = Raise(rank).effective_step();
      for (const int64_t other : horizon) EXPECT_GE(effective, other);
    }
  }
}

TEST_F(TriggerTest, AtStep_RefusedIfARankMayHavePassed) {
  for (int rank = 0; rank < 3; ++rank) Poll(rank, 5, 10);
  Raise(0, v1::TRIGGER_ALIGN_AT_STEP, 9);
  EXPECT_EQ(error_->code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(error_->detail().field(), "step");
  EXPECT_EQ(Raise(0, v1::TRIGGER_ALIGN_AT_STEP, 10).effective_step(), 10);
}

TEST_F(TriggerTest, AtStep_BeforeAllAreKnown_IsNotEarlierThanAsked) {
  Raise(-1, v1::TRIGGER_ALIGN_AT_STEP, 8);
  Poll(0, 2);
  Poll(1, 2);
  EXPECT_EQ(Poll(2, 2).triggers(0).effective_step(), 8);
}

TEST_F(TriggerTest, Now_IsToldAtOnce) {
  Raise(-1, v1::TRIGGER_ALIGN_NOW);
  const v1::PollTriggersReply reply = Poll(0, 2);
  ASSERT_EQ(reply.triggers_size(), 1);
  EXPECT_EQ(reply.triggers(0).effective_step(), -1);
  EXPECT_EQ(reply.triggers(0).raised_by_rank(), -1);
}

TEST_F(TriggerTest, Ack_ByAll_RemovesIt) {
  for (int rank = 0; rank < 3; ++rank) Poll(rank, 5);
  const uint64_t id = Raise(0).trigger_id();
  EXPECT_EQ(Poll(0, 6, 0, {id}).triggers_size(), 0);
  EXPECT_EQ(Poll(1, 6).triggers_size(), 1);
  Poll(1, 7, 0, {id});
  Poll(2, 7, 0, {id, 999});
  EXPECT_EQ(set_.size(), 0u);
  EXPECT_TRUE(changes_.back().removed());
}

TEST_F(TriggerTest, DeadRank_IsNotWaitedFor) {
  Poll(0, 5);
  Poll(1, 5);
  Raise(0);
  set_.RankGone(2, &changes_);
  EXPECT_EQ(Poll(0, 5).triggers(0).effective_step(), 6);
  Poll(0, 6, 0, {100});
  Poll(1, 6, 0, {100});
  EXPECT_EQ(set_.size(), 0u);
}

TEST_F(TriggerTest, ReplacedRank_MustPollAndAckAgain) {
  for (int rank = 0; rank < 3; ++rank) Poll(rank, 5);
  const uint64_t id = Raise(0).trigger_id();
  Poll(2, 6, 0, {id});
  set_.RankReplaced(2);
  EXPECT_EQ(Raise(1).effective_step(), -1);
  EXPECT_EQ(Poll(2, 6).triggers_size(), 2);
  set_.RankGone(1, &changes_);
  set_.RankReplaced(1);
  EXPECT_EQ(Raise(0).effective_step(), -1);
}

TEST_F(TriggerTest, NextGeneration_DropsRanksTriggersAndKeepsOperators) {
  for (int rank = 0; rank < 3; ++rank) Poll(rank, 5);
  Raise(0);
  Raise(-1);
  changes_.clear();
  set_.StartGeneration(2, &changes_);
  EXPECT_EQ(set_.size(), 1u);
  EXPECT_EQ(Poll(0, 1).triggers_size(), 0);
  EXPECT_EQ(Poll(1, 2).triggers(0).effective_step(), 3);
}

TEST_F(TriggerTest, BadInput_IsRefused) {
  v1::RaiseTriggerRequest request;
  v1::RaiseTriggerReply reply;
  EXPECT_EQ(set_.Raise(request, 0, 1, &reply, &changes_)->detail().field(), "name");
  request.set_name("x");
  request.set_payload(std::string((64 << 10) + 1, 'x'));
  EXPECT_EQ(set_.Raise(request, 0, 1, &reply, &changes_)->detail().field(), "payload");
  Poll(0, -1);
  EXPECT_EQ(error_->detail().field(), "step");
  Poll(0, 5, 5);
  EXPECT_EQ(error_->detail().field(), "horizon");
  Poll(0, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(error_->detail().field(), "step");
}

}  // namespace
}  // namespace muster::coordinator
