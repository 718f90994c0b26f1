#include "agent/arrivals.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/fake_op_sender.h"
#include "base/fake_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Cases that only a hub meets: joint messages of several agents. relay_core_test has a relay's.
class ArrivalMergerTest : public ::testing::Test {
 protected:
  ArrivalMergerTest() { Make(1 << 20); }
  void Make(size_t max_bytes) {
    merger_ =
        std::make_unique<ArrivalMerger>(ArrivalMerger::Options{.node = "hub",
                                                               .incarnation = 9,
                                                               .window = absl::Milliseconds(2),
                                                               .max_bytes = max_bytes,
                                                               .wake = [this] { ++wakes_; },
                                                               .clock = &clock_},
                                        &upstream_);
  }
  static v1::Op Many(std::vector<int> ranks, uint64_t counter = 0) {
    v1::Op op;
    v1::ArriveManyRequest& many = *op.mutable_arrive_many();
    many.mutable_fence()->set_job_id("job");
    many.mutable_fence()->set_generation(1);
    many.mutable_fence()->set_worker_id("some agent");
    many.mutable_fence()->set_term_seen(ranks[0]);
    many.set_barrier_id("b");
    many.set_counter(counter);
    many.mutable_timeout()->set_seconds(60);
    for (const int rank : ranks) {
      many.add_ranks(rank);
      many.add_incarnations(100 + rank);
      many.add_lateness_us(10 * rank);
    }
    return op;
  }
  static v1::Op One(int rank, uint64_t incarnation) {
    v1::Op op;
    v1::ArriveRequest& arrive = *op.mutable_arrive();
    arrive.mutable_fence()->set_job_id("job");
    arrive.mutable_fence()->set_generation(1);
    arrive.mutable_fence()->set_worker_id(absl::StrCat("w", rank));
    arrive.mutable_fence()->set_incarnation(incarnation);
    arrive.set_barrier_id("b");
    arrive.mutable_timeout()->set_seconds(60);
    arrive.set_rank(rank);
    return op;
  }
  void Add(const std::string& name, v1::Op op, size_t expected, uint64_t tag = 0) {
    merger_->Add(
        std::move(op),
        [this, name](const v1::OpResult& result) {
          answers_.push_back(absl::StrCat(name, result.has_error() ? " failed" : " passed"));
        },
        expected, tag);
  }
  static v1::OpResult Passed() {
    v1::OpResult result;
    result.mutable_arrive()->mutable_report()->set_state(v1::BARRIER_STATE_PASSED);
    return result;
  }
  static v1::OpResult Failed(v1::ErrorReason reason) {
    v1::OpResult result;
    result.mutable_error()->mutable_detail()->set_reason(reason);
    return result;
  }

  FakeClock clock_;
  FakeOpSender upstream_;
  std::unique_ptr<ArrivalMerger> merger_;
  std::vector<std::string> answers_;
  int wakes_ = 0;
};

TEST_F(ArrivalMergerTest, JointMessagesOfAgents_BecomeOneWithTheTimeTheyWaitedHere) {
  Add("a", Many({1, 2}), 4);
  clock_.Advance(absl::Microseconds(500));
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  EXPECT_EQ(wakes_, 1);
  v1::Op single = One(3, 103);
  Add("b", std::move(single), 4);
  Add("c", Many({4}), 4);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  const v1::ArriveManyRequest many = upstream_.ops()[0].arrive_many();
  EXPECT_THAT(many.ranks(), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(many.incarnations(), ElementsAre(101, 102, 103, 104));
  EXPECT_THAT(many.lateness_us(), ElementsAre(510, 520, 0, 40));
  EXPECT_EQ(many.fence().worker_id(), "hub");
  EXPECT_EQ(many.fence().incarnation(), 9u);
  EXPECT_EQ(many.fence().term_seen(), 4u);
  EXPECT_EQ(many.payloads_size(), 0);
  upstream_.Answer(Passed());
  EXPECT_THAT(answers_, ElementsAre("a passed", "b passed", "c passed"));
}

TEST_F(ArrivalMergerTest, Alone_IsSentAsItWasMadeButForTheLateness) {
  Add("a", Many({1, 2}), 3);
  clock_.Advance(absl::Milliseconds(2));
  merger_->Tick();
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  v1::Op sent = upstream_.ops()[0];
  EXPECT_THAT(sent.arrive_many().lateness_us(), ElementsAre(2010, 2020));
  *sent.mutable_arrive_many()->mutable_lateness_us() = Many({1, 2}).arrive_many().lateness_us();
  sent.clear_op_id();
  EXPECT_EQ(sent.SerializeAsString(), Many({1, 2}).SerializeAsString());
}

TEST_F(ArrivalMergerTest, PayloadsOfJointMessages_StayWithTheirRanks) {
  v1::Op a = Many({5, 6});
  a.mutable_arrive_many()->add_payloads("five");
  a.mutable_arrive_many()->add_payloads("six");
  v1::Op b = One(3, 103);
  b.mutable_arrive()->set_payload("three");
  Add("a", std::move(a), 3);
  Add("b", std::move(b), 3);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(5, 6, 3));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().payloads(), ElementsAre("five", "six", "three"));
}

TEST_F(ArrivalMergerTest, RanksThatWaitedBefore_KeepWhatEachHasWaited) {
  v1::Op a = Many({1, 2});
  a.mutable_arrive_many()->mutable_waited()->set_seconds(10);
  a.mutable_arrive_many()->add_waited_less_us(0);
  a.mutable_arrive_many()->add_waited_less_us(7'000'000);
  v1::Op b = One(3, 103);
  b.mutable_arrive()->mutable_waited()->set_seconds(12);
  Add("a", std::move(a), 4);
  Add("b", std::move(b), 4);
  Add("c", Many({4}), 4);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  const v1::ArriveManyRequest many = upstream_.ops()[0].arrive_many();
  EXPECT_EQ(many.waited().seconds(), 12);
  EXPECT_THAT(many.waited_less_us(), ElementsAre(2'000'000, 9'000'000, 0, 12'000'000));
}

TEST_F(ArrivalMergerTest, ErrorOfOneRank_EachAgentsOwnMessageIsSent) {
  Add("a", Many({1, 2}), 3);
  Add("b", Many({3}), 3);
  upstream_.Answer(Failed(v1::ERROR_REASON_SUPERSEDED));
  EXPECT_THAT(answers_, IsEmpty());
  ASSERT_THAT(upstream_.ops(), SizeIs(2));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(1, 2));
  EXPECT_EQ(upstream_.ops()[0].arrive_many().fence().worker_id(), "some agent");
  EXPECT_THAT(upstream_.ops()[1].arrive_many().ranks(), ElementsAre(3));
  upstream_.Answer(Failed(v1::ERROR_REASON_SUPERSEDED));
  upstream_.Answer(Passed());
  EXPECT_THAT(answers_, ElementsAre("a failed", "b passed"));
}

TEST_F(ArrivalMergerTest, OneRankWithTwoIncarnations_GoesApart) {
  Add("old", One(1, 7), 3);
  Add("new", One(1, 8), 3);
  Add("other", One(2, 9), 3);
  clock_.Advance(absl::Milliseconds(2));
  merger_->Tick();
  ASSERT_THAT(upstream_.ops(), SizeIs(2));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().incarnations(), ElementsAre(7, 9));
  EXPECT_EQ(upstream_.ops()[1].arrive().fence().incarnation(), 8u);
}

TEST_F(ArrivalMergerTest, ColumnsThatDoNotFit_AreNobodyElsesConcern) {
  v1::Op short_column = Many({1, 2});
  short_column.mutable_arrive_many()->mutable_incarnations()->RemoveLast();
  v1::Op none = Many({1});
  none.mutable_arrive_many()->clear_ranks();
  Add("other", Many({3}), 9);
  Add("short", std::move(short_column), 9);
  Add("none", std::move(none), 9);
  ASSERT_THAT(upstream_.ops(), SizeIs(2));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(1, 2));
  EXPECT_THAT(upstream_.ops()[1].arrive_many().ranks(), IsEmpty());
}

TEST_F(ArrivalMergerTest, JointMessage_StaysWithinItsBytes) {
  const size_t one = Many({1}).ByteSizeLong();
  Make(/*max_bytes=*/2 * one + one / 2);
  v1::Op big = Many({1});
  big.mutable_arrive_many()->set_call_site_text(std::string(200, 'x'));
  Add("big", std::move(big), 9);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  upstream_.Answer(Passed());
  for (const int rank : {1, 2, 3}) Add("small", Many({rank}), 9);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(1, 2));
  // The remaining arrivals have their own window.
  EXPECT_EQ(merger_->Tick(), clock_.Now() + absl::Milliseconds(2));
}

TEST_F(ArrivalMergerTest, Dropped_IsAnsweredNoMoreAndForgottenWithTheLastOfItsMessage) {
  Add("a", Many({1}, 0), 2, /*tag=*/7);
  Add("b", Many({2}, 0), 2, /*tag=*/8);
  Add("waits", Many({1}, 1), 2, /*tag=*/9);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  merger_->Drop({7, 9});
  EXPECT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_EQ(merger_->Tick(), absl::InfiniteFuture());
  merger_->Drop({8});
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  EXPECT_THAT(answers_, IsEmpty());
}

}  // namespace
}  // namespace muster::agent
