#include "agent/hub_core.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/fake_incoming_stream.h"
#include "agent/fake_op_sender.h"
#include "base/fake_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

class HubCoreTest : public ::testing::Test {
 protected:
  HubCoreTest() {
    upstream_state_.connected = true;
    upstream_state_.session = 1;
    upstream_state_.term = 5;
    upstream_state_.cluster_id = "c1";
    upstream_state_.lease = absl::Seconds(6);
    options_.node = "hub";
    options_.incarnation = 9;
    options_.clock = &clock_;
    options_.upstream = [this] { return upstream_state_; };
    options_.send_stack = [this](v1::StackReply reply) { stacks_.push_back(std::move(reply)); };
    Make();
  }
  void Make() { core_ = std::make_unique<HubCore>(options_, &upstream_); }

  FakeHubAgent Agent(const std::string& node) {
    FakeHubAgent agent(core_.get(), node);
    agent.Open();
    agent.Take();
    return agent;
  }
  // Returns the results that the agent got, as "op_id ok" or "op_id REASON".
  static std::vector<std::string> Results(const std::vector<v1::CoordinatorFrame>& frames) {
    std::vector<std::string> results;
    for (const v1::CoordinatorFrame& frame : frames) {
      for (const v1::OpResult& result : frame.results().results()) {
        results.push_back(absl::StrCat(
            result.op_id(), " ",
            result.has_error() ? v1::ErrorReason_Name(result.error().detail().reason()).substr(13)
                               : "ok"));
      }
    }
    return results;
  }
  static v1::Op Txn(uint64_t op_id) {
    v1::Op op;
    op.set_op_id(op_id);
    op.mutable_txn()->mutable_fence()->set_job_id("job");
    return op;
  }
  static v1::OpResult TxnDone() {
    v1::OpResult result;
    result.mutable_txn()->mutable_header()->set_term(5);
    return result;
  }
  static v1::Op Arrive(uint64_t op_id, std::vector<int> ranks, uint64_t counter = 0,
                       uint64_t generation = 1) {
    v1::Op op;
    op.set_op_id(op_id);
    v1::ArriveManyRequest& many = *op.mutable_arrive_many();
    many.mutable_fence()->set_job_id("job");
    many.mutable_fence()->set_generation(generation);
    many.set_barrier_id("b");
    many.set_counter(counter);
    for (const int rank : ranks) {
      many.add_ranks(rank);
      many.add_incarnations(100 + rank);
    }
    return op;
  }
  static v1::OpResult Passed() {
    v1::OpResult result;
    result.mutable_arrive()->mutable_report()->set_state(v1::BARRIER_STATE_PASSED);
    return result;
  }
  static v1::Op Join(uint64_t op_id, int rank) {
    v1::Op op;
    op.set_op_id(op_id);
    op.mutable_join()->mutable_fence()->set_job_id("job");
    op.mutable_join()->mutable_fence()->set_worker_id(absl::StrCat("w", rank));
    op.mutable_join()->mutable_fence()->set_incarnation(100 + rank);
    return op;
  }
  static v1::OpResult Seat(int rank, uint64_t generation = 1) {
    v1::OpResult result;
    result.mutable_join()->set_rank(rank);
    result.mutable_join()->set_generation(generation);
    return result;
  }
  // Seats these ranks behind `agent`, or on this node.
  void Join(FakeHubAgent* agent, std::vector<int> ranks) {
    for (const int rank : ranks) {
      if (agent != nullptr) {
        agent->Op(Join(900 + rank, rank));
      } else {
        core_->Submit(Join(0, rank), [](const v1::OpResult&) {});
      }
      upstream_.Answer(Seat(rank));
    }
    if (agent != nullptr) agent->Take();
  }
  static v1::Beat Beat(const std::string& worker, int64_t step = 0,
                       const std::string& state = "running") {
    v1::Beat beat;
    v1::WorkerBeat& row = *beat.add_workers();
    row.set_job_id("job");
    row.set_worker_id(worker);
    row.set_incarnation(100);
    row.set_step(step);
    row.set_process_state(state);
    return beat;
  }
  std::vector<std::string> PassedOn() {
    v1::Beat beat;
    core_->AddToBeat(&beat);
    std::vector<std::string> rows;
    for (const v1::WorkerBeat& row : beat.workers())
      rows.push_back(absl::StrCat(row.worker_id(), " at ", row.step()));
    return rows;
  }
  std::vector<std::string> Roster() {
    v1::Beat beat;
    core_->AddToBeat(&beat);
    if (!beat.has_hub()) return {"not told"};
    std::vector<std::string> rows;
    for (const v1::HubAgent& row : beat.hub().agents())
      rows.push_back(absl::StrCat(row.node(), " on ", row.host()));
    return rows;
  }
  static v1::AgentFrame Bye() {
    v1::AgentFrame frame;
    frame.mutable_bye();
    return frame;
  }

  FakeClock clock_;
  FakeOpSender upstream_;
  Upstream upstream_state_;
  std::vector<v1::StackReply> stacks_;
  HubCore::Options options_;
  std::unique_ptr<HubCore> core_;
};

TEST_F(HubCoreTest, Hello_IsWelcomedAsByTheCoordinator) {
  FakeHubAgent agent(core_.get(), "a");
  agent.Open();
  const std::vector<v1::CoordinatorFrame> frames = agent.Take();
  ASSERT_THAT(frames, SizeIs(2));
  const v1::Welcome& welcome = frames[0].welcome();
  EXPECT_EQ(welcome.protocol(), 1u);
  EXPECT_EQ(welcome.term(), 5u);
  EXPECT_EQ(welcome.cluster_id(), "c1");
  EXPECT_EQ(welcome.lease().seconds(), 6);
  EXPECT_FALSE(welcome.session_id().empty());
  ASSERT_TRUE(frames[1].has_hub_state());
  EXPECT_FALSE(frames[1].hub_state().coordinator_away());
  EXPECT_TRUE(agent.incoming().reading);
  EXPECT_EQ(core_->agents(), 1u);
}

TEST_F(HubCoreTest, Operations_GoOnAndTheirResultsComeBackByTheirNumbers) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Op(Txn(7));
  b.Op(Txn(7));
  std::vector<std::string> own;
  core_->Submit(Txn(0), [&](const v1::OpResult& result) {
    own.push_back(result.has_txn() ? "ok" : "failed");
  });
  ASSERT_THAT(upstream_.ops(), SizeIs(3));
  upstream_.Answer(TxnDone());
  EXPECT_THAT(Results(a.Take()), ElementsAre("7 ok"));
  EXPECT_THAT(Results(b.Take()), IsEmpty());
  upstream_.Answer(TxnDone());
  EXPECT_THAT(Results(b.Take()), ElementsAre("7 ok"));
  upstream_.Answer(TxnDone());
  EXPECT_THAT(own, ElementsAre("ok"));
}

TEST_F(HubCoreTest, ArrivalsOfAllAgentsAndThisNode_BecomeOneWithTheLast) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  Join(&a, {0, 1});
  Join(&b, {2, 3});
  Join(nullptr, {4});
  a.Op(Arrive(1, {0, 1}));
  b.Op(Arrive(2, {2, 3}));
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  int own = 0;
  core_->Submit(Arrive(0, {4}), [&](const v1::OpResult& result) { own += result.has_arrive(); });
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(upstream_.ops()[0].arrive_many().fence().worker_id(), "hub");
  upstream_.Answer(Passed());
  EXPECT_THAT(Results(a.Take()), ElementsAre("1 ok"));
  EXPECT_THAT(Results(b.Take()), ElementsAre("2 ok"));
  EXPECT_EQ(own, 1);
}

TEST_F(HubCoreTest, RankOfThisNode_IsWaitedForFromItsJoinOn) {
  FakeHubAgent a = Agent("a");
  Join(nullptr, {4});
  a.Op(Arrive(1, {0}));
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  core_->Submit(Arrive(0, {4}), [](const v1::OpResult&) {});
  EXPECT_THAT(upstream_.ops(), SizeIs(1));
}

TEST_F(HubCoreTest, RanksThatAreNotKnown_AreLearnedFromTheirFirstArrival) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Op(Arrive(1, {0, 1}, 0));
  ASSERT_THAT(upstream_.ops(), SizeIs(1)) << "nobody else is known to take part";
  b.Op(Arrive(1, {2, 3}, 0));
  ASSERT_THAT(upstream_.ops(), SizeIs(1)) << "a has come already, b may not be the last";
  clock_.Advance(absl::Milliseconds(2));
  core_->Tick();
  ASSERT_THAT(upstream_.ops(), SizeIs(2));
  upstream_.Answer(Passed());
  upstream_.Answer(Passed());
  a.Op(Arrive(2, {0, 1}, 1));
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  b.Op(Arrive(2, {2, 3}, 1));
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(0, 1, 2, 3));
}

TEST_F(HubCoreTest, AgentThatIsLate_OthersGoAfterTheWindow) {
  FakeHubAgent a = Agent("a"), b = Agent("b"), c = Agent("c");
  Join(&a, {0});
  Join(&b, {1});
  Join(&c, {2});
  a.Op(Arrive(1, {0}));
  b.Op(Arrive(1, {1}));
  EXPECT_EQ(core_->Tick(), clock_.Now() + absl::Milliseconds(2));
  clock_.Advance(absl::Milliseconds(2));
  core_->Tick();
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(0, 1));
}

TEST_F(HubCoreTest, AgentWithoutStreamOrOfAnOlderGeneration_IsNotWaitedFor) {
  FakeHubAgent a = Agent("a"), b = Agent("b"), c = Agent("c");
  Join(&a, {0});
  Join(&b, {1});
  Join(&c, {2});
  b.Close();
  v1::Directive ended;
  ended.mutable_generation_ended()->set_job_id("job");
  ended.mutable_generation_ended()->set_generation(1);
  core_->OnDirective(ended);
  a.Op(Join(5, 0));
  upstream_.Answer(Seat(0, 2));
  a.Op(Arrive(6, {0}, 0, /*generation=*/2));
  EXPECT_THAT(upstream_.ops(), SizeIs(1));
}

TEST_F(HubCoreTest, ErrorOfOneRank_EachAgentsMessageIsSentOnItsOwn) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  Join(&a, {0});
  Join(&b, {1});
  a.Op(Arrive(1, {0}));
  b.Op(Arrive(1, {1}));
  v1::OpResult superseded;
  superseded.mutable_error()->mutable_detail()->set_reason(v1::ERROR_REASON_SUPERSEDED);
  upstream_.Answer(superseded);
  ASSERT_THAT(upstream_.ops(), SizeIs(2));
  upstream_.Answer(superseded);
  upstream_.Answer(Passed());
  EXPECT_THAT(Results(a.Take()), ElementsAre("1 SUPERSEDED"));
  EXPECT_THAT(Results(b.Take()), ElementsAre("1 ok"));
}

TEST_F(HubCoreTest, Beats_ArePassedOnOnceWithTheLatestOfEachWorker) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Beat(Beat("w0", 1));
  a.Beat(Beat("w0", 2));
  b.Beat(Beat("w1", 7));
  EXPECT_THAT(PassedOn(), UnorderedElementsAre("w0 at 2", "w1 at 7"));
  EXPECT_THAT(PassedOn(), IsEmpty());
  b.Beat(Beat("w1", 8));
  EXPECT_THAT(PassedOn(), ElementsAre("w1 at 8"));
}

TEST_F(HubCoreTest, BeatThatIsOld_RenewsNoLeaseButAStoppedProcessIsTold) {
  FakeHubAgent a = Agent("a");
  a.Beat(Beat("w0", 1));
  a.Beat(Beat("w1", 2, "stopped"));
  clock_.Advance(absl::Seconds(4));
  EXPECT_THAT(PassedOn(), ElementsAre("w1 at 2"));
}

TEST_F(HubCoreTest, BeatThatWaits_SaysHowLongAgoThingsAreNow) {
  FakeHubAgent a = Agent("a");
  v1::Beat said = Beat("w0", 1);
  said.mutable_workers(0)->mutable_restored_ago()->set_seconds(5);
  a.Beat(said);
  clock_.Advance(absl::Seconds(2));
  v1::Beat beat;
  core_->AddToBeat(&beat);
  ASSERT_EQ(beat.workers_size(), 1);
  EXPECT_EQ(beat.workers(0).restored_ago().seconds(), 7);
  EXPECT_FALSE(beat.workers(0).has_first_step_ago());
  // The beat was not sent.
  core_->TakeBack(beat);
  clock_.Advance(absl::Seconds(1));
  v1::Beat next;
  core_->AddToBeat(&next);
  ASSERT_EQ(next.workers_size(), 1);
  EXPECT_EQ(next.workers(0).restored_ago().seconds(), 8);
}

TEST_F(HubCoreTest, Beats_OfManyAgentsFindRoomInTurn) {
  options_.limits.beat_bytes = 2;  // the first one that is added exceeds it
  Make();
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Beat(Beat("w0", 1));
  b.Beat(Beat("w1", 1));
  EXPECT_THAT(PassedOn(), ElementsAre("w0 at 1"));
  a.Beat(Beat("w0", 2));
  EXPECT_THAT(PassedOn(), ElementsAre("w1 at 1"));
  EXPECT_THAT(PassedOn(), ElementsAre("w0 at 2"));
}

TEST_F(HubCoreTest, BeatThatWasNotSent_GoesIntoTheNext) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Beat(Beat("w0", 1));
  b.Beat(Beat("w1", 1));
  v1::Beat beat;
  *beat.add_workers() = Beat("own").workers(0);
  core_->AddToBeat(&beat);
  ASSERT_EQ(beat.workers_size(), 3);
  ASSERT_TRUE(beat.has_hub());
  a.Beat(Beat("w0", 2));
  core_->TakeBack(beat);
  EXPECT_THAT(PassedOn(), UnorderedElementsAre("w0 at 2", "w1 at 1"));
  core_->TakeBack(beat);
  EXPECT_THAT(Roster(), SizeIs(2));
  // With the age that it has by now.
  core_->TakeBack(beat);
  clock_.Advance(absl::Seconds(4));
  EXPECT_THAT(PassedOn(), IsEmpty());
}

TEST_F(HubCoreTest, Beat_IsAcknowledgedAtOnceAlsoIfNothingIsNew) {
  FakeHubAgent a = Agent("a");
  for (int i = 0; i < 3; ++i) {
    a.Beat(Beat("w0"));
    const std::vector<v1::CoordinatorFrame> frames = a.Take();
    ASSERT_THAT(frames, SizeIs(1));
    EXPECT_EQ(frames[0].seq(), 0u);
    EXPECT_EQ(frames[0].kind_case(), v1::CoordinatorFrame::KIND_NOT_SET);
  }
}

TEST_F(HubCoreTest, Roster_IsToldWhenItHasChangedAndOnEachStream) {
  EXPECT_THAT(Roster(), ElementsAre("not told"));
  FakeHubAgent a = Agent("a"), b = Agent("b");
  EXPECT_THAT(Roster(), ElementsAre("a on a-host", "b on b-host"));
  EXPECT_THAT(Roster(), ElementsAre("not told"));
  core_->OnUpstream();
  EXPECT_THAT(Roster(), ElementsAre("a on a-host", "b on b-host"));
  a.Send(Bye());
  EXPECT_THAT(Roster(), ElementsAre("b on b-host"));
  b.Close();
  EXPECT_THAT(Roster(), IsEmpty());
  core_->OnUpstream();
  EXPECT_THAT(Roster(), IsEmpty());
  // A coordinator that does not know the agent's leases gets nothing, either.
  upstream_state_.session = 2;
  core_->OnUpstream();
  EXPECT_THAT(Roster(), ElementsAre("not told"));
}

TEST_F(HubCoreTest, Roster_HostThatIsTooLong_IsCutAtACharacter) {
  const auto incoming = std::make_shared<FakeIncomingStream>();
  incoming->reading = false;
  v1::AgentFrame frame;
  v1::Hello& hello = *frame.mutable_hello();
  hello.set_protocol_min(1);
  hello.set_protocol_max(1);
  hello.set_node("a");
  hello.set_host(std::string(255, 'x') + "\u00e4");
  core_->OnFrame(incoming, frame, 0);
  v1::Beat beat, received;
  core_->AddToBeat(&beat);
  // Otherwise the coordinator would end the stream of this hub again and again.
  ASSERT_TRUE(received.ParseFromString(beat.SerializeAsString()));
  EXPECT_EQ(received.hub().agents(0).host(), std::string(255, 'x'));
}

TEST_F(HubCoreTest, Directives_GoToThoseTheyConcern) {
  FakeHubAgent a = Agent("a"), b = Agent("b"), idle = Agent("idle");
  Join(&a, {0, 1});
  b.Beat(Beat("w2"));
  b.Take();
  const auto told = [](FakeHubAgent& agent) {
    const std::vector<v1::CoordinatorFrame> frames = agent.Take();
    return !frames.empty() && frames.back().has_directive();
  };
  v1::Directive kill;
  kill.mutable_kill_worker()->set_job_id("job");
  kill.mutable_kill_worker()->set_worker_id("w1");
  kill.mutable_kill_worker()->set_incarnation(101);
  core_->OnDirective(kill);
  EXPECT_TRUE(told(a));
  EXPECT_FALSE(told(b));
  // An older start of the worker, which may be anywhere in the job.
  kill.mutable_kill_worker()->set_incarnation(55);
  core_->OnDirective(kill);
  EXPECT_TRUE(told(a));
  EXPECT_TRUE(told(b));
  EXPECT_FALSE(told(idle));
  v1::Directive late;
  late.mutable_barrier_late()->set_job_id("job");
  core_->OnDirective(late);
  EXPECT_TRUE(told(a));
  EXPECT_TRUE(told(b));
  EXPECT_FALSE(told(idle));
  late.mutable_barrier_late()->set_job_id("other");
  core_->OnDirective(late);
  EXPECT_FALSE(told(a));
  v1::Directive stack;
  stack.mutable_collect_stack()->set_query_id(4);
  stack.mutable_collect_stack()->set_worker_id("w2");
  core_->OnDirective(stack);
  EXPECT_FALSE(told(a));
  EXPECT_TRUE(told(b));
  stack.mutable_collect_stack()->set_job_id("job");
  core_->OnDirective(stack);
  EXPECT_TRUE(told(b));
}

TEST_F(HubCoreTest, CollectStack_SameWorkerNameInAnotherJob_GoesToItsOwnAgent) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  v1::Beat beat = Beat("w0");
  a.Beat(beat);
  beat.mutable_workers(0)->set_job_id("other");
  b.Beat(beat);
  a.Take();
  b.Take();
  v1::Directive stack;
  stack.mutable_collect_stack()->set_query_id(4);
  stack.mutable_collect_stack()->set_job_id("other");
  stack.mutable_collect_stack()->set_worker_id("w0");
  core_->OnDirective(stack);
  const auto asked = [](FakeHubAgent& agent) {
    const std::vector<v1::CoordinatorFrame> frames = agent.Take();
    return !frames.empty() && frames.back().directive().has_collect_stack();
  };
  EXPECT_FALSE(asked(a));
  EXPECT_TRUE(asked(b));
}

TEST_F(HubCoreTest, Stack_IsPassedOnFromWhomItWasAskedOfOnce) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Beat(Beat("w0"));
  v1::Directive stack;
  stack.mutable_collect_stack()->set_query_id(4);
  stack.mutable_collect_stack()->set_worker_id("w0");
  core_->OnDirective(stack);
  v1::AgentFrame reply;
  reply.set_seq(1);
  reply.mutable_stack()->set_query_id(4);
  b.Send(reply);
  EXPECT_THAT(stacks_, IsEmpty());
  a.Send(reply);
  EXPECT_THAT(stacks_, SizeIs(1));
  reply.set_seq(2);
  a.Send(reply);
  EXPECT_THAT(stacks_, SizeIs(1));
}

TEST_F(HubCoreTest, Stacks_ThatAreNeverAnswered_LeaveRoomForNewOnes) {
  options_.limits.stacks_of_agent = 2;
  Make();
  FakeHubAgent a = Agent("a");
  a.Beat(Beat("w0"));
  v1::Directive stack;
  stack.mutable_collect_stack()->set_worker_id("w0");
  for (int query = 1; query <= 3; ++query) {
    stack.mutable_collect_stack()->set_query_id(query);
    core_->OnDirective(stack);
  }
  const std::vector<v1::CoordinatorFrame> frames = a.Take();
  EXPECT_EQ(frames.back().directive().collect_stack().query_id(), 3u);
  v1::AgentFrame reply;
  for (const int query : {1, 3}) {
    reply.set_seq(reply.seq() + 1);
    reply.mutable_stack()->set_query_id(query);
    a.Send(reply);
  }
  ASSERT_THAT(stacks_, SizeIs(1));
  EXPECT_EQ(stacks_[0].query_id(), 3u);
}

TEST_F(HubCoreTest, StreamThatBreaks_GoesOnInTheSameSession) {
  FakeHubAgent a = Agent("a");
  a.Op(Txn(1));
  const std::string session = a.session;
  a.Close();
  upstream_.Answer(TxnDone());
  clock_.Advance(absl::Seconds(59));
  core_->Tick();
  a.Open();
  EXPECT_THAT(Results(a.Take()), ElementsAre("1 ok"));
  EXPECT_EQ(a.session, session);
  // What was applied is not applied again.
  v1::AgentFrame again;
  again.set_seq(1);
  *again.mutable_ops()->add_ops() = Txn(1);
  a.Send(again);
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  EXPECT_TRUE(a.incoming().reading);
}

TEST_F(HubCoreTest, SessionThatEnds_IsForgottenUpstream) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  Join(&a, {0});
  Join(&b, {1});
  a.Op(Txn(1));
  a.Op(Arrive(2, {0}));
  b.Op(Arrive(2, {1}));
  ASSERT_THAT(upstream_.ops(), SizeIs(2));
  a.Close();
  clock_.Advance(absl::Seconds(60));
  core_->Tick();
  EXPECT_EQ(core_->agents(), 1u);
  ASSERT_THAT(upstream_.ops(), SizeIs(1)) << "b waits for the joint message";
  b.Send(Bye());
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  ASSERT_TRUE(b.incoming().status.has_value());
  EXPECT_TRUE(b.incoming().status->ok());
}

TEST_F(HubCoreTest, SecondStreamOfAnAgent_TakesOver) {
  FakeHubAgent a = Agent("a");
  FakeHubAgent twin = a;
  twin.Open();
  EXPECT_TRUE(absl::IsAborted(*a.incoming().status));
  twin.Take();
  EXPECT_EQ(twin.session, a.session);
  a.Close();
  twin.Op(Txn(1));
  upstream_.Answer(TxnDone());
  EXPECT_THAT(Results(twin.Take()), ElementsAre("1 ok"));
  // Another process with the same name has its own session.
  FakeHubAgent other = twin;
  other.incarnation = 78;
  other.Open();
  other.Take();
  EXPECT_NE(other.session, twin.session);
  EXPECT_EQ(core_->agents(), 1u);
}

TEST_F(HubCoreTest, NewSessionUpstream_EndsAllSessionsAndAsksBack) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Op(Txn(1));
  b.Close();
  upstream_state_.session = 2;
  core_->OnUpstream();
  EXPECT_THAT(upstream_.ops(), IsEmpty()) << "the agent sends it again";
  EXPECT_EQ(core_->agents(), 0u);
  const std::vector<v1::CoordinatorFrame> frames = a.Take();
  ASSERT_THAT(frames, SizeIs(1));
  ASSERT_TRUE(frames[0].has_goodbye());
  EXPECT_TRUE(frames[0].goodbye().has_retry_after());
  EXPECT_TRUE(a.incoming().status->ok());
  a.Close();
  const std::string before = a.session;
  a.Open();
  a.Take();
  EXPECT_NE(a.session, before);
}

TEST_F(HubCoreTest, Goodbye_WaitsForTheWriteInFlightAndNotForEver) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.Op(Txn(1));
  upstream_.Answer(TxnDone());
  b.Op(Txn(1));
  upstream_.Answer(TxnDone());
  core_->Finish();
  EXPECT_TRUE(a.incoming().in_flight->has_results());
  const std::vector<v1::CoordinatorFrame> frames = a.Take();
  ASSERT_THAT(frames, SizeIs(2));
  EXPECT_TRUE(frames[1].has_goodbye());
  EXPECT_FALSE(frames[1].goodbye().has_retry_after());
  EXPECT_TRUE(a.incoming().status->ok());
  EXPECT_FALSE(b.incoming().status.has_value());
  clock_.Advance(absl::Seconds(1));
  core_->Tick();
  EXPECT_TRUE(absl::IsUnavailable(*b.incoming().status));
  FakeHubAgent late(core_.get(), "late");
  late.Open();
  EXPECT_TRUE(absl::IsUnavailable(*late.incoming().status));
}

TEST_F(HubCoreTest, CoordinatorAwayAndBack_IsToldToAll) {
  FakeHubAgent a = Agent("a");
  upstream_state_.connected = false;
  upstream_state_.why_away = "the line is cut";
  core_->OnUpstream();
  std::vector<v1::CoordinatorFrame> frames = a.Take();
  ASSERT_THAT(frames, SizeIs(1));
  EXPECT_TRUE(frames[0].hub_state().coordinator_away());
  EXPECT_EQ(frames[0].hub_state().why(), "the line is cut");
  FakeHubAgent b(core_.get(), "b");
  b.Open();
  EXPECT_THAT(b.incoming().status->message(), HasSubstr("the line is cut"));
  // A beat is acknowledged anyway.
  a.Beat(Beat("w0"));
  EXPECT_THAT(a.Take(), SizeIs(1));
  upstream_state_.connected = true;
  core_->OnUpstream();
  frames = a.Take();
  ASSERT_THAT(frames, SizeIs(1));
  ASSERT_TRUE(frames[0].has_hub_state());
  EXPECT_FALSE(frames[0].hub_state().coordinator_away());
}

TEST_F(HubCoreTest, CoordinatorAwayBeyondTheTolerance_AgentsAreSentAwayAndNotFailed) {
  FakeHubAgent a = Agent("a");
  a.Op(Txn(1));
  upstream_state_.connected = false;
  v1::OpResult lost;
  *lost.mutable_error() = rpc::ToOpError(absl::UnavailableError("away for too long"));
  upstream_.Answer(lost);
  const std::vector<v1::CoordinatorFrame> frames = a.Take();
  EXPECT_THAT(Results(frames), IsEmpty());
  ASSERT_FALSE(frames.empty());
  EXPECT_TRUE(frames.back().has_goodbye());
  EXPECT_FALSE(frames.back().goodbye().has_retry_after());
}

TEST_F(HubCoreTest, HubBehindAHub_IsRefused) {
  FakeHubAgent a = Agent("a");
  v1::Beat beat;
  beat.mutable_hub()->add_agents()->set_node("c");
  a.Beat(beat);
  EXPECT_EQ(a.incoming().status->code(), absl::StatusCode::kFailedPrecondition);
  FakeHubAgent b = Agent("b");
  upstream_state_.hub = "other";
  core_->OnUpstream();
  const std::vector<v1::CoordinatorFrame> frames = b.Take();
  EXPECT_TRUE(frames.back().has_goodbye());
  EXPECT_FALSE(frames.back().goodbye().has_retry_after());
  FakeHubAgent c(core_.get(), "c");
  c.Open();
  EXPECT_EQ(c.incoming().status->code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(HubCoreTest, BadFirstFrames_EndTheStream) {
  const auto open = [&](const v1::AgentFrame& frame) {
    const auto incoming = std::make_shared<FakeIncomingStream>();
    incoming->reading = false;
    core_->OnFrame(incoming, frame, 0);
    EXPECT_FALSE(incoming->reading);
    core_->OnClosed(incoming);
    return incoming->status.has_value() ? incoming->status->code() : absl::StatusCode::kOk;
  };
  v1::AgentFrame frame;
  EXPECT_EQ(open(frame), absl::StatusCode::kInvalidArgument);
  frame.mutable_beat();
  EXPECT_EQ(open(frame), absl::StatusCode::kInvalidArgument);
  frame.mutable_hello()->set_protocol_min(1);
  frame.mutable_hello()->set_protocol_max(1);
  EXPECT_EQ(open(frame), absl::StatusCode::kInvalidArgument) << "no name";
  frame.mutable_hello()->set_node("hub");
  EXPECT_EQ(open(frame), absl::StatusCode::kInvalidArgument) << "the hub's own name";
  frame.mutable_hello()->set_node("a");
  frame.mutable_hello()->set_protocol_min(2);
  frame.mutable_hello()->set_protocol_max(3);
  EXPECT_EQ(open(frame), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(core_->agents(), 0u);
}

TEST_F(HubCoreTest, FramesThatDoNotFollowOrHelloTwice_EndTheStream) {
  FakeHubAgent a = Agent("a"), b = Agent("b");
  a.seq = 5;
  a.Op(Txn(1));
  EXPECT_EQ(a.incoming().status->code(), absl::StatusCode::kInvalidArgument);
  v1::AgentFrame hello;
  hello.mutable_hello()->set_node("b");
  b.Send(hello);
  EXPECT_EQ(b.incoming().status->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(upstream_.ops(), IsEmpty());
}

TEST_F(HubCoreTest, TooManyAgents_AreRefusedAndOneThatIsAwayMakesRoom) {
  options_.limits.agents = 2;
  Make();
  FakeHubAgent a = Agent("a"), b = Agent("b");
  FakeHubAgent c(core_.get(), "c");
  c.Open();
  EXPECT_EQ(rpc::GetReason(*c.incoming().status), v1::ERROR_REASON_OVERLOADED);
  b.Close();
  FakeHubAgent d = Agent("d");
  EXPECT_FALSE(d.incoming().status.has_value());
  EXPECT_EQ(core_->agents(), 2u);
}

TEST_F(HubCoreTest, TooManyOperations_AreRefusedWithoutHarmToOthers) {
  options_.limits.calls_of_agent = 2;
  options_.limits.calls = 3;
  Make();
  FakeHubAgent a = Agent("a"), b = Agent("b");
  for (uint64_t i = 1; i <= 3; ++i) a.Op(Txn(i));
  EXPECT_THAT(Results(a.Take()), ElementsAre("3 OVERLOADED"));
  for (uint64_t i = 1; i <= 2; ++i) b.Op(Txn(i));
  EXPECT_THAT(Results(b.Take()), ElementsAre("2 OVERLOADED"));
  core_->Submit(Txn(0), [](const v1::OpResult&) {});
  EXPECT_THAT(upstream_.ops(), SizeIs(4));
  for (int i = 0; i < 4; ++i) upstream_.Answer(TxnDone());
  a.Op(Txn(4));
  EXPECT_THAT(upstream_.ops(), SizeIs(1));
}

TEST_F(HubCoreTest, TooManyBytesHeld_AreRefused) {
  options_.limits.held_bytes_of_agent = 1000;
  Make();
  FakeHubAgent a = Agent("a");
  v1::Op big = Txn(1);
  big.mutable_txn()->mutable_fence()->set_worker_id(std::string(900, 'w'));
  a.Op(big);
  big.set_op_id(2);
  a.Op(big);
  EXPECT_THAT(Results(a.Take()), ElementsAre("2 OVERLOADED"));
  EXPECT_THAT(upstream_.ops(), SizeIs(1));
}

TEST_F(HubCoreTest, AgentThatTakesNothing_IsNotReadFromAndLosesItsSessionInTheEnd) {
  options_.limits.unsent_bytes = 1000;
  options_.limits.unacknowledged_bytes = 5000;
  Make();
  FakeHubAgent a = Agent("a");
  v1::OpResult large = TxnDone();
  large.mutable_txn()->mutable_header()->set_cluster_id(std::string(800, 'x'));
  for (uint64_t i = 1; i <= 3; ++i) {
    a.Op(Txn(i));
    upstream_.Answer(large);
  }
  ASSERT_TRUE(a.incoming().reading);
  a.Op(Txn(4));  // the first is in flight, two wait
  EXPECT_FALSE(a.incoming().reading);
  EXPECT_THAT(a.Take(), SizeIs(2));
  EXPECT_TRUE(a.incoming().reading) << "there is room again";
  // Received and never acknowledged.
  a.received = 0;
  for (uint64_t i = 5; i <= 12 && a.incoming().reading; ++i) {
    a.Op(Txn(i));
    upstream_.Answer(large);
    const uint64_t received = std::exchange(a.received, 0);
    if (!a.incoming().status.has_value()) {
      a.received = received;
      a.incoming().in_flight.reset();
      core_->OnWritten(
          std::shared_ptr<IncomingStream>(std::shared_ptr<IncomingStream>(), &a.incoming()));
      a.received = 0;
    }
  }
  ASSERT_TRUE(a.incoming().status.has_value());
  EXPECT_EQ(a.incoming().status->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(core_->agents(), 0u);
}

TEST_F(HubCoreTest, BeatTooLarge_EndsTheStream) {
  options_.limits.beat_bytes_of_agent = 500;
  Make();
  FakeHubAgent a = Agent("a");
  for (int i = 0; i < 100 && !a.incoming().status.has_value(); ++i) {
    a.Beat(Beat(absl::StrCat("w", i)));
    a.Take();
  }
  EXPECT_EQ(rpc::GetReason(*a.incoming().status), v1::ERROR_REASON_LIMIT);
}

// Small workers: each is a separate entry in the hub's memory.
TEST_F(HubCoreTest, BeatOfTooManyWorkers_EndsTheStream) {
  options_.limits.beats_of_agent = 3;
  Make();
  FakeHubAgent a = Agent("a");
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 2; ++j) a.Beat(Beat(absl::StrCat("w", i)));
    a.Take();
    ASSERT_FALSE(a.incoming().status.has_value()) << *a.incoming().status;
  }
  a.Beat(Beat("w3"));
  a.Take();
  ASSERT_TRUE(a.incoming().status.has_value());
  EXPECT_EQ(rpc::GetReason(*a.incoming().status), v1::ERROR_REASON_LIMIT);
  EXPECT_THAT(std::string(a.incoming().status->message()), HasSubstr("of more than 3 workers"));
}

TEST_F(HubCoreTest, MoreWorkersThanAreRemembered_DirectivesStillReachThem) {
  options_.limits.workers_of_agent = 1;
  Make();
  FakeHubAgent a = Agent("a");
  a.Beat(Beat("w0"));
  a.Beat(Beat("w1"));
  a.Take();
  v1::Directive kill;
  kill.mutable_kill_worker()->set_job_id("job");
  kill.mutable_kill_worker()->set_worker_id("w1");
  kill.mutable_kill_worker()->set_incarnation(100);
  core_->OnDirective(kill);
  const std::vector<v1::CoordinatorFrame> frames = a.Take();
  ASSERT_FALSE(frames.empty());
  EXPECT_TRUE(frames.back().has_directive());
}

}  // namespace
}  // namespace muster::agent
