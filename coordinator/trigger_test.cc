#include "coordinator/trigger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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
                             std::vector<uint64_t> acked = {}, std::vector<uint64_t> pending = {}) {
    v1::PollTriggersRequest request;
    request.set_rank(rank);
    request.set_step(step);
    request.set_horizon(horizon);
    for (const uint64_t id : acked) request.add_acked(id);
    for (const uint64_t id : pending) request.add_pending(id);
    v1::PollTriggersReply reply;
    acked_.clear();
    error_ = set_.Poll(request, rank, &reply, &changes_, &acked_);
    return reply;
  }
  // Returns the decision that `rank` gets once it has promised for trigger `id`; -1: undecided.
  int64_t Promise(int rank, uint64_t id, int64_t step, int64_t horizon = 0) {
    const v1::PollTriggersReply reply = Poll(rank, step, horizon, {}, {id});
    for (const v1::TriggerEvent& event : reply.triggers()) {
      if (event.trigger_id() == id) return event.effective_step();
    }
    return -2;
  }

  TriggerSet set_;
  uint64_t next_id_ = 100;
  std::vector<v1::TriggerChanged> changes_;
  std::vector<uint64_t> acked_;
  std::optional<v1::OpError> error_;
};

TEST_F(TriggerTest, NextStep_IsTheLargestPromisePlusLead) {
  const uint64_t id = Raise(0, v1::TRIGGER_ALIGN_NEXT_STEP, 0, 3).trigger_id();
  EXPECT_EQ(Promise(0, id, 10, 12), -1);
  EXPECT_EQ(Promise(1, id, 8, 20), -1);
  EXPECT_EQ(Promise(2, id, 11), 23);
  for (int rank = 0; rank < 3; ++rank) {
    const v1::PollTriggersReply reply = Poll(rank, 12);
    ASSERT_EQ(reply.triggers_size(), 1);
    EXPECT_EQ(reply.triggers(0).effective_step(), 23);
  }
}

TEST_F(TriggerTest, PollWithoutAPromise_TellsOfItAndBindsNobody) {
  const uint64_t id = Raise(1).trigger_id();
  for (int rank = 0; rank < 3; ++rank) {
    const v1::PollTriggersReply reply = Poll(rank, 10, 1000);
    ASSERT_EQ(reply.triggers_size(), 1);
    EXPECT_EQ(reply.triggers(0).trigger_id(), id);
    EXPECT_EQ(reply.triggers(0).effective_step(), -1);
    EXPECT_EQ(reply.triggers(0).align(), v1::TRIGGER_ALIGN_NEXT_STEP);
  }
}

TEST_F(TriggerTest, OneRankWithoutAPromise_HoldsTheDecision) {
  const uint64_t id = Raise(0).trigger_id();
  EXPECT_EQ(Promise(0, id, 10), -1);
  EXPECT_EQ(Promise(0, id, 10), -1);  // repeated
  EXPECT_EQ(Promise(1, id, 4), -1);
  EXPECT_EQ(Poll(2, 7).triggers(0).effective_step(), -1);
  EXPECT_EQ(Promise(2, id, 7), 11);
  EXPECT_EQ(Promise(0, id, 10), 11);
}

TEST_F(TriggerTest, DecidedStep_DoesNotMoveWithLaterPromises) {
  const uint64_t id = Raise(1).trigger_id();
  for (int rank = 0; rank < 3; ++rank) Promise(rank, id, 5);
  EXPECT_EQ(Promise(0, id, 5, 50), 6);
  EXPECT_EQ(Poll(1, 5).triggers(0).effective_step(), 6);
}

TEST_F(TriggerTest, SecondTrigger_NeedsPromisesOfItsOwn) {
  const uint64_t first = Raise(1).trigger_id();
  for (int rank = 0; rank < 3; ++rank) Promise(rank, first, 5);
  const uint64_t second = Raise(1).trigger_id();
  EXPECT_EQ(Promise(0, second, 8), -1);
  EXPECT_EQ(Promise(1, second, 8), -1);
  EXPECT_EQ(Promise(2, second, 7), 9);
}

// Every rank of a job raises it when all get SIGTERM.
TEST_F(TriggerTest, TriggerThatAllRanksRaise_IsOne_UntilItIsDecided) {
  constexpr int kRanks = 300;
  static_assert(kRanks > TriggerSet::kMaxLive);
  set_.StartGeneration(kRanks, &changes_);
  const uint64_t id = Raise(0).trigger_id();
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_EQ(Raise(rank).trigger_id(), id);
    ASSERT_FALSE(error_.has_value()) << "rank " << rank << ": " << error_->message();
  }
  EXPECT_EQ(set_.size(), 1u);
  // A trigger that differs stays apart.
  EXPECT_NE(Raise(-1).trigger_id(), id);
  EXPECT_NE(Raise(1, v1::TRIGGER_ALIGN_NEXT_STEP, 0, 3).trigger_id(), id);
  EXPECT_NE(Raise(1, v1::TRIGGER_ALIGN_AT_STEP, 9).trigger_id(), id);
  v1::RaiseTriggerRequest other;
  other.set_name("stop");
  other.set_payload("why");
  v1::RaiseTriggerReply reply;
  EXPECT_FALSE(set_.Raise(other, 1, next_id_++, &reply, &changes_).has_value());
  EXPECT_NE(reply.trigger_id(), id);
  // Ranks may have acted on a decided one, and raise it again for later.
  for (int rank = 0; rank < kRanks; ++rank) Promise(rank, id, 5);
  EXPECT_NE(Raise(1).trigger_id(), id);
}

TEST_F(TriggerTest, NoRank_CanHaveBegunTheDecidedStep) {
  // Ranks run free until they know of the trigger, then up to their promise; whatever the order,
  // the decision is beyond what any has begun.
  int64_t begun[3] = {0, 0, 0};
  for (int round = 0; round < 20; ++round) {
    const uint64_t id = Raise(round % 3).trigger_id();
    int64_t effective = -1, horizon[3] = {-1, -1, -1};
    for (int i = round; effective < 0; ++i) {
      const int rank = (i * 7 + round) % 3;
      for (int other = 0; other < 3; ++other) {
        if (horizon[other] < 0) begun[other] += (i + other) % 4;
      }
      if (horizon[rank] < 0) horizon[rank] = begun[rank] + 1 + (i * 5) % 4;
      effective = Promise(rank, id, begun[rank], horizon[rank]);
    }
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_GE(effective, horizon[rank]);
      EXPECT_GT(effective, begun[rank]);
      Poll(rank, begun[rank], 0, {id});
    }
  }
  EXPECT_EQ(set_.size(), 0u);
}

TEST_F(TriggerTest, AtStep_RefusedIfARankHasFinishedIt) {
  for (int rank = 0; rank < 3; ++rank) Poll(rank, 9);
  Raise(0, v1::TRIGGER_ALIGN_AT_STEP, 9);
  EXPECT_EQ(error_->code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(error_->detail().field(), "step");
  const uint64_t id = Raise(0, v1::TRIGGER_ALIGN_AT_STEP, 20).trigger_id();
  Promise(0, id, 9);
  Promise(1, id, 9);
  EXPECT_EQ(Promise(2, id, 12), 20);
}

TEST_F(TriggerTest, AtStep_ThatARankMayBegin_IsPutOff) {
  const uint64_t id = Raise(-1, v1::TRIGGER_ALIGN_AT_STEP, 8).trigger_id();
  Promise(0, id, 2);
  Promise(1, id, 12, 15);
  EXPECT_EQ(Promise(2, id, 2), 15);
}

TEST_F(TriggerTest, Now_IsToldAtOnce) {
  Raise(-1, v1::TRIGGER_ALIGN_NOW);
  const v1::PollTriggersReply reply = Poll(0, 2);
  ASSERT_EQ(reply.triggers_size(), 1);
  EXPECT_EQ(reply.triggers(0).effective_step(), -1);
  EXPECT_EQ(reply.triggers(0).raised_by_rank(), -1);
}

TEST_F(TriggerTest, Ack_ByAll_RemovesIt) {
  const uint64_t id = Raise(0).trigger_id();
  for (int rank = 0; rank < 3; ++rank) Promise(rank, id, 5);
  EXPECT_EQ(Poll(0, 6, 0, {id}).triggers_size(), 0);
  EXPECT_EQ(Poll(1, 6).triggers_size(), 1);
  Poll(1, 7, 0, {id});
  Poll(2, 7, 0, {id, 999});
  EXPECT_EQ(set_.size(), 0u);
  EXPECT_TRUE(changes_.back().removed());
}

TEST_F(TriggerTest, DeadRank_IsNotWaitedFor) {
  const uint64_t id = Raise(0).trigger_id();
  Promise(0, id, 5);
  Promise(1, id, 5);
  set_.RankGone(2, &changes_);
  EXPECT_EQ(Poll(0, 5).triggers(0).effective_step(), 6);
  Poll(0, 6, 0, {id});
  Poll(1, 6, 0, {id});
  EXPECT_EQ(set_.size(), 0u);
}

TEST_F(TriggerTest, DeadRankThatHadPromised_DoesNotCountTwice) {
  const uint64_t id = Raise(0).trigger_id();
  Promise(2, id, 5);
  set_.RankGone(2, &changes_);
  EXPECT_EQ(Promise(0, id, 5), -1);
  EXPECT_EQ(Promise(1, id, 5), 6);
}

TEST_F(TriggerTest, ReplacedRank_MustPromiseAndAckAgain) {
  const uint64_t id = Raise(0).trigger_id();
  for (int rank = 0; rank < 3; ++rank) Promise(rank, id, 5);
  Poll(2, 6, 0, {id});
  const uint64_t second = Raise(1).trigger_id();
  Promise(2, second, 6);
  set_.RankReplaced(2);
  EXPECT_EQ(Poll(2, 6).triggers_size(), 2);
  Promise(0, second, 6);
  EXPECT_EQ(Promise(1, second, 6), -1);
  set_.RankGone(1, &changes_);
  set_.RankReplaced(1);
  EXPECT_EQ(Promise(2, second, 6), -1);
  EXPECT_EQ(Promise(1, second, 9), 10);
}

TEST_F(TriggerTest, Restart_ForgetsPromisesAndKeepsDecisions) {
  const uint64_t decided = Raise(0).trigger_id();
  for (int rank = 0; rank < 3; ++rank) Promise(rank, decided, 5);
  const uint64_t open = Raise(0).trigger_id();
  Promise(0, open, 5);
  Promise(1, open, 5);
  set_.Resume();
  EXPECT_EQ(Promise(2, open, 5), -1);
  EXPECT_EQ(Promise(2, decided, 5), 6);
}

TEST_F(TriggerTest, Restart_KeepsAcknowledgements) {
  const uint64_t id = Raise(0).trigger_id();
  for (int rank = 0; rank < 3; ++rank) Promise(rank, id, 5);
  Poll(0, 6, 0, {id});
  EXPECT_THAT(acked_, ElementsAre(id));
  Poll(0, 6, 0, {id});
  EXPECT_THAT(acked_, IsEmpty()) << "it is known already";
  set_.Resume();
  EXPECT_EQ(Poll(0, 6).triggers_size(), 0);
  EXPECT_EQ(Poll(1, 6).triggers_size(), 1);
  set_.RankGone(2, &changes_);
  Poll(1, 7, 0, {id});
  EXPECT_THAT(acked_, IsEmpty()) << "that was the last one: its removal says so";
  EXPECT_EQ(set_.size(), 0u);
}

TEST_F(TriggerTest, NextGeneration_DropsRanksTriggersAndKeepsOperators) {
  Raise(0);
  const uint64_t id = Raise(-1).trigger_id();
  for (int rank = 0; rank < 3; ++rank) Promise(rank, id, 5);
  changes_.clear();
  set_.StartGeneration(2, &changes_);
  EXPECT_EQ(set_.size(), 1u);
  EXPECT_EQ(Promise(0, id, 1), -1);
  EXPECT_EQ(Promise(1, id, 2), 3);
}

TEST_F(TriggerTest, LargePayloads_AreRefusedBeforeAPollIsTooLargeForAMessage) {
  v1::RaiseTriggerRequest request;
  request.set_name("x");
  request.set_payload(std::string(TriggerSet::kMaxPayload, 'x'));
  v1::RaiseTriggerReply reply;
  uint64_t id = 1;
  while (!set_.Raise(request, -1, id, &reply, &changes_).has_value()) ++id;
  EXPECT_EQ(id - 1, TriggerSet::kMaxPayloads / TriggerSet::kMaxPayload);
  EXPECT_EQ(set_.Raise(request, 0, id, &reply, &changes_)->detail().field(), "payload");
  request.clear_payload();
  EXPECT_FALSE(set_.Raise(request, 0, id, &reply, &changes_).has_value());
  v1::PollTriggersRequest poll;
  poll.set_step(1);
  v1::PollTriggersReply told;
  EXPECT_FALSE(set_.Poll(poll, 0, &told, &changes_, &acked_).has_value());
  EXPECT_LT(told.ByteSizeLong(), size_t{1} << 20);
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
