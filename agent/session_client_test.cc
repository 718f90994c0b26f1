#include "agent/session_client.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/fake_outgoing_stream.h"
#include "base/fake_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SessionClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.node = "node-a";
    options_.address = "10.0.0.1:29400";
    options_.incarnation = 77;
    options_.clock = &clock_;
    options_.random = [] { return 0.5; };
    options_.on_connected = [this](uint64_t term, bool resumed) {
      connected_.push_back(absl::StrCat("term ", term, resumed ? " resumed" : " new"));
    };
    options_.on_directive = [this](const v1::Directive& d) { directives_.push_back(d); };
    options_.on_lost = [this](const absl::Status& status) { lost_.push_back(status); };
  }

  void Make() {
    client_ = std::make_unique<SessionClient>(options_, &transport_);
    client_->OfferHub(hub_address_);
    client_->Tick();
  }
  FakeOutgoingStream& stream() { return *transport_.streams.back(); }

  // Submits `op` and records its result: "ok" or the message of the error.
  uint64_t Submit(const std::string& name, v1::Op op) {
    return client_->Submit(std::move(op), [this, name](const v1::OpResult& result) {
      results_.push_back(
          absl::StrCat(name, ": ", result.has_error() ? result.error().message() : "ok"));
    });
  }
  static v1::Op Add(uint64_t request_id, const std::string& worker = "w0") {
    v1::Op op;
    op.mutable_txn()->mutable_fence()->set_job_id("job");
    op.mutable_txn()->mutable_fence()->set_worker_id(worker);
    op.mutable_txn()->mutable_fence()->set_request_id(request_id);
    op.mutable_txn()->add_then()->mutable_add()->set_key("k");
    return op;
  }
  static v1::Op Arrive(const std::string& id, uint64_t counter, uint64_t generation = 1) {
    v1::Op op;
    op.mutable_arrive()->mutable_fence()->set_job_id("job");
    op.mutable_arrive()->mutable_fence()->set_generation(generation);
    op.mutable_arrive()->set_barrier_id(id);
    op.mutable_arrive()->set_counter(counter);
    return op;
  }
  static v1::CoordinatorFrame Passed(uint64_t seq, std::vector<uint64_t> ops) {
    v1::CoordinatorFrame frame;
    frame.set_seq(seq);
    for (const uint64_t op : ops) {
      v1::OpResult& result = *frame.mutable_results()->add_results();
      result.set_op_id(op);
      result.mutable_arrive()->mutable_report()->set_state(v1::BARRIER_STATE_PASSED);
    }
    return frame;
  }
  static v1::CoordinatorFrame Results(uint64_t seq, std::vector<uint64_t> ops, uint64_t ack = 0) {
    v1::CoordinatorFrame frame;
    frame.set_seq(seq);
    frame.set_ack(ack);
    for (const uint64_t op : ops) {
      v1::OpResult& result = *frame.mutable_results()->add_results();
      result.set_op_id(op);
      result.mutable_txn();
    }
    return frame;
  }
  void Welcome(const std::string& session, uint64_t term = 1, uint64_t received = 0,
               const std::string& cluster = "c") {
    v1::CoordinatorFrame frame;
    v1::Welcome& welcome = *frame.mutable_welcome();
    welcome.set_protocol(1);
    welcome.set_term(term);
    welcome.set_session_id(session);
    welcome.set_last_received_seq(received);
    welcome.set_cluster_id(cluster);
    welcome.mutable_lease()->set_seconds(6);
    for (const std::string& feature : features_) welcome.add_features(feature);
    stream().events->OnFrame(frame);
  }
  // Connects for the first time; forgets what was written before.
  void Connect() {
    Make();
    stream().Done();
    Welcome("s1");
    client_->Tick();
    stream().Drain();
    stream().written.clear();
  }
  // Breaks the stream and opens a new one, whose last frame so far is hello.
  void Reconnect() {
    stream().events->OnClosed(absl::UnavailableError("broken pipe"));
    clock_.Advance(absl::Seconds(2));
    client_->Tick();
    ASSERT_TRUE(stream().written.back().has_hello());
    stream().Done();
  }
  // The coordinator names a hub.
  void Use(const std::string& node, const std::string& address, uint64_t seq = 1) {
    v1::CoordinatorFrame frame;
    frame.set_seq(seq);
    v1::UseHub& use = *frame.mutable_directive()->mutable_use_hub();
    use.set_node(node);
    use.set_address(address);
    use.set_why("65 agents are attached");
    stream().events->OnFrame(frame);
  }
  // The agent has said Bye, and the coordinator ends the stream. The agent opens one to `address`.
  void Leave(const std::string& address) {
    ASSERT_TRUE(stream().written.back().has_bye()) << stream().written.back().ShortDebugString();
    stream().Drain();
    stream().events->OnClosed(absl::OkStatus());
    ExpectHello(address);
  }
  // Expects that the next attempt is due within `wait` and goes to `address`.
  void ExpectHello(const std::string& address, absl::Duration wait = absl::ZeroDuration()) {
    const size_t before = transport_.streams.size();
    clock_.Advance(wait);
    client_->Tick();
    ASSERT_EQ(transport_.streams.size(), before + 1);
    EXPECT_EQ(stream().hub, address);
    ASSERT_TRUE(stream().written.back().has_hello());
    stream().Done();
  }
  // Connects, and moves to hub "node-h" in session "h1".
  void ConnectToHub() {
    Connect();
    Use("node-h", "10.0.0.2:29500");
    Leave("10.0.0.2:29500");
    Welcome("h1");
    client_->Tick();
    stream().Drain();
    Acknowledge();
    stream().written.clear();
  }
  // Sends the frame that follows a beat.
  void Acknowledge() { stream().events->OnFrame(v1::CoordinatorFrame()); }
  void SayAway(bool away) {
    v1::CoordinatorFrame frame;
    frame.mutable_hub_state()->set_coordinator_away(away);
    if (away) frame.mutable_hub_state()->set_why("connection refused");
    stream().events->OnFrame(frame);
  }
  const v1::Hello& hello() { return stream().written.front().hello(); }
  static std::vector<uint64_t> OpIds(const v1::AgentFrame& frame) {
    std::vector<uint64_t> ids;
    for (const v1::Op& op : frame.ops().ops()) ids.push_back(op.op_id());
    return ids;
  }
  // Returns "seq: op op" of each frame with operations that this stream has written.
  std::vector<std::string> Written() {
    std::vector<std::string> out;
    for (const v1::AgentFrame& frame : stream().written) {
      if (!frame.has_ops()) continue;
      std::string text = absl::StrCat(frame.seq(), ":");
      for (const uint64_t id : OpIds(frame)) absl::StrAppend(&text, " ", id);
      out.push_back(text);
    }
    return out;
  }

  FakeClock clock_;
  FakeStreamOpener transport_;
  SessionClient::Options options_;
  std::string hub_address_;
  std::vector<std::string> features_;  // the coordinator's
  std::vector<std::string> connected_;
  std::vector<std::string> results_;
  std::vector<v1::Directive> directives_;
  std::vector<absl::Status> lost_;
  std::unique_ptr<SessionClient> client_;  // last: its destructor makes no calls
};

TEST_F(SessionClientTest, Start_SaysHelloAndHoldsEverythingUntilWelcome) {
  hub_address_ = "10.0.0.9:29500";
  Make();
  Submit("a", Add(1));
  ASSERT_EQ(stream().written.size(), 1u);
  const v1::Hello& hello = stream().written[0].hello();
  EXPECT_EQ(hello.node(), "node-a");
  EXPECT_EQ(hello.agent_incarnation(), 77u);
  EXPECT_EQ(hello.last_received_seq(), 0u);
  EXPECT_EQ(hello.hub_address(), "10.0.0.9:29500");
  stream().Done();
  EXPECT_EQ(stream().written.size(), 1u);
  EXPECT_FALSE(client_->connected());
  Welcome("s1");
  EXPECT_TRUE(client_->connected());
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  EXPECT_THAT(connected_, ElementsAre("term 1 new"));
}

TEST_F(SessionClientTest, SlowWriter_MergesWhatComesMeanwhileIntoOneFrame) {
  Connect();
  for (int i = 1; i <= 5; ++i) Submit("x", Add(i));
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  stream().Done();
  EXPECT_THAT(Written(), ElementsAre("1: 1", "2: 2 3 4 5"));
  stream().Done();
  EXPECT_FALSE(stream().writing);
}

TEST_F(SessionClientTest, LargeBatch_IsCutIntoFramesOfTheLimit) {
  options_.frame_bytes = 3 * Add(1).ByteSizeLong() + 10;
  Connect();
  for (int i = 1; i <= 8; ++i) Submit("x", Add(i));
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1", "2: 2 3 4", "3: 5 6 7", "4: 8"));
}

TEST_F(SessionClientTest, Results_ReachTheirCallersOnceAndAreAcknowledged) {
  Connect();
  Submit("a", Add(1));
  Submit("b", Add(2));
  stream().Drain();
  stream().events->OnFrame(Results(1, {2, 1}, 2));
  EXPECT_THAT(results_, ElementsAre("b: ok", "a: ok"));
  stream().events->OnFrame(Results(1, {2, 1}, 2));  // a duplicate
  EXPECT_EQ(results_.size(), 2u);
  EXPECT_EQ(client_->held_ops(), 0u);
  Submit("c", Add(3));
  EXPECT_EQ(stream().written.back().ack(), 1u);
}

TEST_F(SessionClientTest, ManyFramesAndNothingToSay_AreAcknowledgedAllTheSame) {
  Connect();
  v1::CoordinatorFrame frame;
  frame.mutable_directive()->mutable_generation_ended()->set_job_id("job");
  for (int i = 1; i <= 32; ++i) {
    frame.set_seq(i);
    stream().events->OnFrame(frame);
  }
  EXPECT_EQ(directives_.size(), 32u);
  ASSERT_EQ(stream().written.size(), 1u);
  EXPECT_EQ(stream().written[0].ack(), 32u);
  EXPECT_EQ(stream().written[0].seq(), 0u);
}

TEST_F(SessionClientTest, Resume_SendsOnlyWhatWasNotSeenUnderTheSameNumbers) {
  Connect();
  for (int i = 1; i <= 3; ++i) {
    Submit("x", Add(i));
    stream().Drain();
  }
  Submit("y", Add(4));  // its write never ends
  stream().events->OnFrame(Results(1, {1}));
  Reconnect();
  EXPECT_EQ(stream().written.back().hello().last_received_seq(), 1u);
  Submit("z", Add(5));
  Welcome("s1", 1, 2);  // the server has seen frames 1 and 2: operations 1 and 2
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("3: 3 4 5"));
  EXPECT_THAT(connected_, ElementsAre("term 1 new", "term 1 resumed"));
  // The result of operation 2 was lost on the way and is sent again.
  stream().events->OnFrame(Results(2, {2, 3, 4, 5}));
  EXPECT_EQ(results_.size(), 5u);
}

TEST_F(SessionClientTest, LostAck_FrameThatWasSeenIsNotSentAgain) {
  Connect();
  Submit("a", Add(1));
  stream().Drain();
  Reconnect();
  Welcome("s1", 1, 1);
  client_->Tick();
  stream().Drain();
  EXPECT_THAT(Written(), IsEmpty());
  EXPECT_EQ(client_->held_ops(), 1u);
  stream().events->OnFrame(Results(1, {1}));
  EXPECT_THAT(results_, ElementsAre("a: ok"));
}

TEST_F(SessionClientTest, NewSession_EverythingHeldGoesOutOnceMore) {
  Connect();
  Submit("a", Add(1));
  Submit("b", Add(2));
  stream().Drain();
  stream().events->OnFrame(Results(1, {1}, 2));
  Reconnect();
  Welcome("s2");
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 2"));
  EXPECT_THAT(connected_, ElementsAre("term 1 new", "term 1 new"));
  stream().events->OnFrame(Results(1, {2}));  // the new session counts from 1
  EXPECT_THAT(results_, ElementsAre("a: ok", "b: ok"));
}

TEST_F(SessionClientTest, NewSession_WhatHasATimeoutSaysHowLongItHasWaited) {
  Connect();
  v1::Op many;
  many.mutable_arrive_many()->set_barrier_id("b");
  many.mutable_arrive_many()->mutable_waited()->set_seconds(3);  // before it reached this agent
  Submit("a", Arrive("b", 0));
  Submit("m", many);
  Submit("t", Add(1));
  v1::Op join, agree, wait;
  join.mutable_join()->mutable_waited()->set_seconds(1);
  agree.mutable_agree_alive();
  wait.mutable_wait()->mutable_waited()->set_seconds(-5);
  Submit("j", join);
  Submit("l", agree);
  Submit("w", wait);
  stream().Drain();
  EXPECT_FALSE(stream().written.back().ops().ops(0).arrive().has_waited());
  // In each new session again, counted from the same start.
  for (const int seconds : {2, 4}) {
    Reconnect();  // after 2 s
    Welcome(absl::StrCat("s", seconds), seconds);
    stream().Drain();
    std::map<std::string, int64_t> waited;
    for (const v1::AgentFrame& frame : stream().written) {
      for (const v1::Op& op : frame.ops().ops()) {
        if (op.has_arrive()) waited["a"] = op.arrive().waited().seconds();
        if (op.has_arrive_many()) waited["m"] = op.arrive_many().waited().seconds();
        if (op.has_join()) waited["j"] = op.join().waited().seconds();
        if (op.has_agree_alive()) waited["l"] = op.agree_alive().waited().seconds();
        if (op.has_wait()) waited["w"] = op.wait().waited().seconds();
      }
    }
    EXPECT_EQ(waited["a"], seconds);
    EXPECT_EQ(waited["m"], seconds + 3);
    EXPECT_EQ(waited["j"], seconds + 1);
    EXPECT_EQ(waited["l"], seconds);
    EXPECT_EQ(waited["w"], seconds);
  }
}

TEST_F(SessionClientTest, Hello_SaysWhichTermOfWhichClusterWasSeen) {
  Make();
  EXPECT_EQ(stream().written.back().hello().term_seen(), 0u);
  stream().Done();
  Welcome("s1", 3);
  stream().Drain();
  Reconnect();
  EXPECT_EQ(stream().written.back().hello().term_seen(), 3u);
  EXPECT_EQ(stream().written.back().hello().cluster_id(), "c");
}

TEST_F(SessionClientTest, NewSession_SentOperationWithoutARequestIdIsNotRepeated) {
  Connect();
  Submit("a", Add(0, ""));
  stream().Drain();
  Submit("b", Add(0, ""));
  stream().events->OnClosed(absl::UnavailableError("broken pipe"));
  Submit("c", Add(0, ""));
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  stream().Done();
  Welcome("s2");
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 3"));  // it was never sent before
  ASSERT_EQ(results_.size(), 2u);
  EXPECT_THAT(results_[0], HasSubstr("whether the request took effect is unknown"));
}

TEST_F(SessionClientTest, NewTerm_IsToldOfBarriersBeforeWhatIsHeld) {
  Connect();
  Submit("a0", Arrive("a", 0));
  Submit("b0", Arrive("b", 0));
  Submit("a1", Arrive("a", 1));
  Submit("b1", Arrive("b", 1));
  stream().Drain();
  stream().events->OnFrame(Passed(1, {1, 2, 3}));
  Reconnect();
  Welcome("s9", 2);
  ASSERT_EQ(stream().written.size(), 2u);
  const v1::OpBatch& batch = stream().written[1].ops();
  ASSERT_EQ(batch.ops_size(), 2);
  const v1::RecallBarriersRequest& recall = batch.ops(0).recall_barriers();
  EXPECT_EQ(recall.fence().job_id(), "job");
  EXPECT_EQ(recall.fence().generation(), 1u);
  ASSERT_EQ(recall.seen_size(), 2);
  EXPECT_EQ(recall.seen(0).barrier_id(), "a");
  EXPECT_EQ(recall.seen(0).counter(), 1u);
  EXPECT_EQ(recall.seen(0).state(), v1::BARRIER_STATE_PASSED);
  EXPECT_EQ(recall.seen(1).barrier_id(), "b");
  EXPECT_EQ(recall.seen(1).counter(), 0u);
  EXPECT_EQ(batch.ops(1).arrive().barrier_id(), "b");
  EXPECT_EQ(client_->term(), 2u);
  // No caller waits for the answer to the recall.
  v1::CoordinatorFrame frame = Passed(1, {4});
  frame.mutable_results()->add_results()->set_op_id(batch.ops(0).op_id());
  stream().Drain();
  stream().events->OnFrame(frame);
  EXPECT_EQ(client_->held_ops(), 0u);
  EXPECT_EQ(results_.size(), 4u);
}

TEST_F(SessionClientTest, NewTermWhoseFirstStreamBreaks_IsToldAgainInItsNextSession) {
  Connect();
  Submit("a0", Arrive("a", 0));
  Submit("b0", Arrive("b", 0));
  stream().Drain();
  stream().events->OnFrame(Passed(1, {1}));
  for (const char* session : {"s8", "s9"}) {
    Reconnect();
    Welcome(session, 2);
    const v1::OpBatch& batch = stream().written.back().ops();
    ASSERT_EQ(batch.ops_size(), 2);
    EXPECT_EQ(batch.ops(0).recall_barriers().seen_size(), 1);
    EXPECT_EQ(batch.ops(1).arrive().barrier_id(), "b");
  }
}

TEST_F(SessionClientTest, NewTerm_BarriersOfAnOlderGenerationAreNotRecalled) {
  Connect();
  Submit("a", Arrive("a", 0, 1));
  Submit("b", Arrive("b", 0, 2));
  stream().Drain();
  stream().events->OnFrame(Passed(1, {1, 2}));
  Reconnect();
  Welcome("s9", 2);
  const v1::OpBatch& batch = stream().written.back().ops();
  ASSERT_EQ(batch.ops_size(), 1);
  EXPECT_EQ(batch.ops(0).recall_barriers().fence().generation(), 2u);
  ASSERT_EQ(batch.ops(0).recall_barriers().seen_size(), 1);
  EXPECT_EQ(batch.ops(0).recall_barriers().seen(0).barrier_id(), "b");
}

TEST_F(SessionClientTest, OlderTerm_IsLeftAlone) {
  Connect();
  Reconnect();
  Welcome("s2", 3);
  Reconnect();
  Welcome("s3", 2);
  EXPECT_TRUE(stream().closing);
  EXPECT_FALSE(client_->connected());
  EXPECT_EQ(client_->term(), 3u);
}

TEST_F(SessionClientTest, EarlyTermOfAnotherCluster_IsTaken) {
  Connect();
  Reconnect();
  Welcome("s2", 3);
  Reconnect();
  Welcome("s3", 1, 0, "d");
  EXPECT_FALSE(stream().closing);
  EXPECT_TRUE(client_->connected());
  EXPECT_EQ(client_->term(), 1u);
}

TEST_F(SessionClientTest, BrokenAgainBeforeWelcome_LosesNothing) {
  Connect();
  Submit("a", Add(1));
  stream().Drain();
  Reconnect();
  Reconnect();
  Welcome("s1", 1, 0);
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
}

TEST_F(SessionClientTest, EventsOfAnOldStream_AreIgnored) {
  Connect();
  Submit("a", Add(1));
  stream().Drain();
  const std::shared_ptr<FakeOutgoingStream> old = transport_.streams.back();
  Reconnect();
  Welcome("s1", 1, 1);
  old->events->OnFrame(Results(1, {1}));
  old->events->OnWritten();
  old->events->OnClosed(absl::UnavailableError("late"));
  EXPECT_TRUE(client_->connected());
  EXPECT_THAT(results_, IsEmpty());
}

TEST_F(SessionClientTest, GapInTheCoordinatorsFrames_StartsAgain) {
  Connect();
  Submit("a", Add(1));
  stream().Drain();
  stream().events->OnFrame(Results(2, {1}));
  EXPECT_TRUE(stream().closing);
  EXPECT_THAT(results_, IsEmpty());
  EXPECT_FALSE(client_->connected());
}

TEST_F(SessionClientTest, Backoff_DoublesFromTheFirstToAThirdOfTheLease) {
  Connect();
  std::vector<absl::Duration> waits;
  for (int i = 0; i < 9; ++i) {
    stream().events->OnClosed(absl::UnavailableError("refused"));
    const absl::Time next = client_->Tick();
    waits.push_back(next - clock_.Now());
    clock_.Advance(next - clock_.Now());
    client_->Tick();
  }
  EXPECT_THAT(waits,
              ElementsAre(absl::Milliseconds(25), absl::Milliseconds(50), absl::Milliseconds(100),
                          absl::Milliseconds(200), absl::Milliseconds(400), absl::Milliseconds(800),
                          absl::Seconds(1), absl::Seconds(1), absl::Seconds(1)));
}

TEST_F(SessionClientTest, Goodbye_WaitsAsLongAsItWasAskedTo) {
  Connect();
  v1::CoordinatorFrame goodbye;
  goodbye.mutable_goodbye()->set_reason("stopping");
  goodbye.mutable_goodbye()->mutable_retry_after()->set_seconds(3);
  stream().events->OnFrame(goodbye);
  stream().events->OnClosed(absl::UnavailableError("stopping"));
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Seconds(3));
}

TEST_F(SessionClientTest, GoodbyeForEver_IsOneOfAMinute) {
  Connect();
  v1::CoordinatorFrame goodbye;
  goodbye.mutable_goodbye()->mutable_retry_after()->set_seconds(INT64_MAX);
  stream().events->OnFrame(goodbye);
  stream().events->OnClosed(absl::OkStatus());
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Minutes(1));
}

// The coordinator of an ended launch: the agent does not wait for its return.
TEST_F(SessionClientTest, GoodbyeForGood_FailsAllAtOnceAndTriesNoMore) {
  Connect();
  v1::CoordinatorFrame goodbye;
  goodbye.mutable_goodbye()->set_reason("rank 0 was killed");
  goodbye.mutable_goodbye()->set_final(true);
  stream().events->OnFrame(goodbye);
  EXPECT_TRUE(client_->ended());
  EXPECT_EQ(client_->lost().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client_->lost().message()), HasSubstr("has ended: rank 0 was killed"));
  EXPECT_EQ(client_->WaitUntilConnected(absl::InfiniteDuration()), client_->lost());
  stream().events->OnClosed(absl::UnavailableError("stopping"));
  EXPECT_EQ(client_->Tick(), absl::InfiniteFuture());
}

TEST_F(SessionClientTest, WelcomedAndDropped_BacksOffAllTheSame) {
  Connect();
  std::vector<absl::Duration> waits;
  for (int i = 0; i < 8; ++i) {
    stream().events->OnClosed(absl::UnavailableError("it falls"));
    const absl::Time next = client_->Tick();
    waits.push_back(next - clock_.Now());
    clock_.Advance(next - clock_.Now());
    client_->Tick();
    stream().Done();
    Welcome("s1");
  }
  EXPECT_EQ(waits[0], absl::Milliseconds(25));
  EXPECT_EQ(waits[1], absl::Milliseconds(50));
  EXPECT_EQ(waits[7], absl::Seconds(1));  // half of a third of the lease
  // A stream that lasts resets the backoff.
  clock_.Advance(absl::Seconds(10));
  stream().events->OnClosed(absl::UnavailableError("it falls"));
  EXPECT_EQ(client_->Tick() - clock_.Now(), absl::Milliseconds(25));
}

TEST_F(SessionClientTest, TinyLease_DoesNotMakeItSpin) {
  Make();
  stream().Done();
  v1::CoordinatorFrame frame;
  frame.mutable_welcome()->set_protocol(1);
  frame.mutable_welcome()->mutable_lease()->set_nanos(1);
  stream().events->OnFrame(frame);
  for (int i = 0; i < 3; ++i) {
    stream().events->OnClosed(absl::UnavailableError("it falls"));
    const absl::Time next = client_->Tick();
    EXPECT_EQ(next - clock_.Now(), absl::Milliseconds(25));
    clock_.Advance(next - clock_.Now());
    client_->Tick();
  }
}

TEST_F(SessionClientTest, AnswerOfAnotherKind_IsAnErrorAndNoBarrierPassed) {
  Connect();
  Submit("a", Arrive("b", 0));
  stream().Drain();
  stream().events->OnFrame(Results(1, {1}));  // the answer of a transaction
  EXPECT_THAT(results_, ElementsAre(HasSubstr("a: the coordinator at 10.0.0.1:29400 answered a "
                                              "request with a result of the wrong kind")));
  // And it is not recalled as an instance that passed.
  Reconnect();
  Welcome("s2", 2);
  stream().Drain();
  EXPECT_THAT(Written(), IsEmpty());
}

TEST_F(SessionClientTest, ProtocolThatWasNotOffered_IsLeftAlone) {
  Make();
  stream().Done();
  v1::CoordinatorFrame frame;
  frame.mutable_welcome()->set_protocol(2);
  stream().events->OnFrame(frame);
  EXPECT_FALSE(client_->connected());
  EXPECT_TRUE(stream().closing);
}

// A transport whose stream breaks before it is returned.
TEST_F(SessionClientTest, DroppedWhileOpening_IsClosedAllTheSame) {
  struct Hasty final : public StreamOpener {
    absl::StatusOr<std::shared_ptr<OutgoingStream>> Open(
        const std::string&, std::shared_ptr<OutgoingStreamEvents> events) override {
      stream = std::make_shared<FakeOutgoingStream>(events);
      v1::CoordinatorFrame frame;
      frame.mutable_directive();  // instead of a welcome
      events->OnFrame(frame);
      return stream;
    }
    std::shared_ptr<FakeOutgoingStream> stream;
  };
  Hasty hasty;
  SessionClient stream(options_, &hasty);
  stream.Tick();
  EXPECT_TRUE(hasty.stream->closing);
}

TEST_F(SessionClientTest, SubmittedAndForgottenWhileAway_IsNotKept) {
  Make();
  for (int i = 0; i < 100'000; ++i) client_->Forget(Submit("x", Add(i + 1)));
  EXPECT_EQ(client_->held_ops(), 0u);
  Submit("last", Add(1));
  stream().Done();
  Welcome("s1");
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 100001"));
}

TEST_F(SessionClientTest, StacksWhileAway_AreBounded) {
  Make();
  v1::StackReply stack;
  for (int i = 0; i < 1000; ++i) client_->SendStack(stack);
  stream().Done();
  // The first welcome forgets them, because the new session did not ask for them; later ones are
  // bounded, too.
  Welcome("s1");
  stream().Drain();
  for (int i = 0; i < 1000; ++i) client_->SendStack(stack);
  stream().Drain();
  const auto stacks = std::count_if(stream().written.begin(), stream().written.end(),
                                    [](const v1::AgentFrame& f) { return f.has_stack(); });
  EXPECT_EQ(stacks, 256);
}

// A coordinator may ask forever, and each answer has up to 64 KiB.
TEST_F(SessionClientTest, StacksThatAreNotAcknowledged_AreBounded) {
  Connect();
  const auto sent = [&] {
    stream().Drain();
    const auto stacks = std::count_if(stream().written.begin(), stream().written.end(),
                                      [](const v1::AgentFrame& f) { return f.has_stack(); });
    stream().written.clear();
    return stacks;
  };
  for (int i = 0; i < 1000; ++i) client_->SendStack({});
  EXPECT_EQ(sent(), 256);
  for (int i = 0; i < 1000; ++i) client_->SendStack({});
  EXPECT_EQ(sent(), 0);
  // In a resumed session, only acknowledged answers make room.
  Reconnect();
  Welcome("s1", 1, 100);
  EXPECT_EQ(sent(), 156);
  for (int i = 0; i < 1000; ++i) client_->SendStack({});
  EXPECT_EQ(sent(), 100);
  stream().events->OnFrame(Results(1, {}, 200));
  for (int i = 0; i < 1000; ++i) client_->SendStack({});
  EXPECT_EQ(sent(), 100);
}

TEST_F(SessionClientTest, CoordinatorThatAcknowledgesNothing_IsConnectedAnew) {
  Connect();
  int sent = 0;
  for (; sent < 70'000 && !stream().closing; ++sent) {
    const uint64_t op = Submit("x", Add(sent + 1));
    stream().Drain();
    stream().written.clear();
    stream().events->OnFrame(Results(sent + 1, {op}));
  }
  EXPECT_LT(sent, 70'000);
  EXPECT_EQ(results_.back(), "x: ok");
}

TEST_F(SessionClientTest, CoordinatorStopsInOrder_WhatItHeldGoesToTheNextOne) {
  Connect();
  Submit("barrier", Arrive("a", 0));
  Submit("operator", Add(0, ""));
  stream().Drain();
  v1::CoordinatorFrame frame;
  frame.set_seq(1);
  for (const uint64_t op : {1, 2}) {
    v1::OpResult& result = *frame.mutable_results()->add_results();
    result.set_op_id(op);
    *result.mutable_error() = rpc::ToOpError(rpc::ErrorWithReason(
        absl::StatusCode::kUnavailable, "stopping", v1::ERROR_REASON_STOPPING, true));
  }
  stream().events->OnFrame(frame);
  EXPECT_THAT(results_, ElementsAre("operator: stopping"));
  for (const char* session : {"s1", "s2"}) {  // whichever the next stream is
    Reconnect();
    Welcome(session, 1, session == std::string("s1") ? 2 : 0);
    stream().Drain();
    EXPECT_EQ(OpIds(stream().written.back()).back(), 1u);
    if (session == std::string("s1")) {
      frame.set_seq(2);
      stream().events->OnFrame(frame);
    }
  }
  stream().events->OnFrame(Passed(1, {1}));
  EXPECT_THAT(results_, ElementsAre("operator: stopping", "barrier: ok"));
}

TEST_F(SessionClientTest, Beats_ComeAtOnceAndThenEveryPeriod) {
  int made = 0;
  options_.beat = [&made] {
    v1::Beat beat;
    beat.add_workers()->set_step(++made);
    return beat;
  };
  Make();
  stream().Done();
  Welcome("s1");
  const absl::Time next = client_->Tick();
  EXPECT_EQ(next, clock_.Now() + absl::Seconds(2));
  ASSERT_TRUE(stream().written.back().has_beat());
  EXPECT_EQ(stream().written.back().seq(), 0u);
  // A stalled writer gets only the newest beat.
  for (int i = 0; i < 3; ++i) {
    clock_.Advance(absl::Seconds(2));
    client_->Tick();
  }
  const size_t before = stream().written.size();
  stream().Drain();
  ASSERT_EQ(stream().written.size(), before + 1);
  EXPECT_EQ(stream().written.back().beat().workers(0).step(), 4);
}

TEST_F(SessionClientTest, BeatThatIsNotSent_IsHandedBackBeforeTheNext) {
  int made = 0;
  std::vector<int64_t> unsent;
  options_.beat = [&] {
    v1::Beat beat;
    beat.add_workers()->set_step(++made);
    return beat;
  };
  options_.on_unsent_beat = [&](const v1::Beat& beat) { unsent.push_back(beat.workers(0).step()); };
  Make();
  stream().Done();
  Welcome("s1");
  client_->Tick();  // the first is being written
  for (int i = 0; i < 3; ++i) {
    clock_.Advance(absl::Seconds(2));
    client_->Tick();
  }
  EXPECT_THAT(unsent, ElementsAre(2, 3));
  stream().events->OnClosed(absl::UnavailableError("cut"));
  EXPECT_THAT(unsent, ElementsAre(2, 3, 4));
}

TEST_F(SessionClientTest, BeatPeriod_CanChange) {
  Connect();
  client_->SetBeatPeriod(absl::Seconds(1));
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Seconds(1));
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Seconds(1));
  EXPECT_TRUE(stream().written.back().has_beat());
  client_->SetBeatPeriod(absl::Seconds(2));
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Seconds(2));
}

TEST_F(SessionClientTest, Outage_FailsNothingUntilToleratedThenNamesAddressAndTime) {
  Connect();
  Submit("a", Add(1));
  stream().Drain();
  stream().events->OnClosed(absl::UnavailableError("connection refused"));
  clock_.Advance(absl::Seconds(89));
  client_->Tick();
  Submit("b", Add(2));
  EXPECT_THAT(results_, IsEmpty());
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  const std::string text =
      "the coordinator at 10.0.0.1:29400 has been away for 1m30s, longer than the 1m30s that are "
      "tolerated: check whether it is running, and the network to it (connection refused)";
  EXPECT_THAT(results_, ElementsAre("a: " + text, "b: " + text));
  ASSERT_EQ(lost_.size(), 1u);
  EXPECT_EQ(lost_[0].code(), absl::StatusCode::kUnavailable);
  Submit("c", Add(3));
  EXPECT_THAT(results_.back(), HasSubstr("c: the coordinator at 10.0.0.1:29400"));
  // The answer comes back anyway.
  stream().Drain();
  Welcome("s2", 2);
  Submit("d", Add(4));
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 4"));
  EXPECT_EQ(lost_.size(), 1u);
}

TEST_F(SessionClientTest, NeverThere_IsNotAnOutage) {
  Make();
  Submit("a", Add(1));
  for (int i = 0; i < 20; ++i) {
    stream().events->OnClosed(absl::UnavailableError("connection refused"));
    clock_.Advance(absl::Seconds(10));
    client_->Tick();
  }
  EXPECT_THAT(results_, IsEmpty());
  EXPECT_THAT(lost_, IsEmpty());
  const absl::Status status = client_->WaitUntilConnected(absl::ZeroDuration());
  EXPECT_THAT(std::string(status.message()), HasSubstr("10.0.0.1:29400"));
}

TEST_F(SessionClientTest, RefusedAgent_FailsAtOnceAndDoesNotTryAgain) {
  Make();
  Submit("a", Add(1));
  stream().events->OnClosed(absl::FailedPreconditionError("speaks protocol 1, not 2"));
  ASSERT_EQ(results_.size(), 1u);
  EXPECT_THAT(results_[0], HasSubstr("refuses this agent: speaks protocol 1, not 2"));
  EXPECT_EQ(client_->Tick(), absl::InfiniteFuture());
  EXPECT_EQ(client_->WaitUntilConnected(absl::InfiniteDuration()).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(SessionClientTest, TooMuchHeld_IsOverloadedUntilThereIsRoom) {
  options_.max_held_ops = 2;
  Connect();
  Submit("a", Add(1));
  Submit("b", Add(2));
  absl::Status status;
  client_->Submit(Add(3),
                  [&](const v1::OpResult& result) { status = rpc::FromOpError(result.error()); });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_OVERLOADED);
  stream().Drain();
  stream().events->OnFrame(Results(1, {1}));
  Submit("d", Add(4));
  EXPECT_EQ(client_->held_ops(), 2u);
}

TEST_F(SessionClientTest, OperationLargerThanAMessage_IsRefusedHere) {
  options_.max_op_bytes = 1000;
  Connect();
  v1::Op op = Add(1);
  op.mutable_txn()->add_then()->mutable_put()->set_value(std::string(1000, 'x'));
  absl::Status status;
  client_->Submit(op,
                  [&](const v1::OpResult& result) { status = rpc::FromOpError(result.error()); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_LIMIT);
  EXPECT_THAT(Written(), IsEmpty());
}

// The coordinator could not parse the frame, nor anything else in it, however often it is sent.
TEST_F(SessionClientTest, OperationThatIsNotUtf8_IsRefusedHereAndNamesTheField) {
  Connect();
  v1::Op op;
  op.mutable_report_exit()->mutable_cause()->add_last_log_lines("caf\xe9");
  absl::Status status;
  client_->Submit(op,
                  [&](const v1::OpResult& result) { status = rpc::FromOpError(result.error()); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_BAD_FIELD);
  EXPECT_EQ(rpc::GetDetail(status)->field(), "report_exit.cause.last_log_lines[0]");
  v1::StackReply stack;
  stack.set_native_stack("\xff");
  client_->SendStack(stack);
  EXPECT_TRUE(stream().written.empty());
  Submit("a", Add(1));
  EXPECT_THAT(Written(), ElementsAre("1: 2"));
}

TEST_F(SessionClientTest, ErrorThatIsNotUtf8_CanBeToldToAgentsBehindThisOne) {
  Connect();
  stream().events->OnClosed(absl::UnavailableError("caf\xe9"));
  EXPECT_EQ(client_->upstream().why_away, "caf\\xe9");
}

TEST_F(SessionClientTest, Forgotten_IsNeitherSentNorAnswered) {
  Connect();
  const uint64_t sent = Submit("a", Add(1));
  const uint64_t waiting = Submit("b", Add(2));
  client_->Forget(waiting);
  client_->Forget(sent);
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  stream().events->OnFrame(Results(1, {1, 2}));
  EXPECT_THAT(results_, IsEmpty());
}

TEST_F(SessionClientTest, Stack_GoesOutAndSurvivesAResume) {
  Connect();
  v1::StackReply stack;
  stack.set_query_id(5);
  client_->SendStack(stack);
  ASSERT_TRUE(stream().written.back().has_stack());
  EXPECT_EQ(stream().written.back().seq(), 1u);
  Reconnect();
  Welcome("s1", 1, 0);
  ASSERT_TRUE(stream().written.back().has_stack());
  EXPECT_EQ(stream().written.back().stack().query_id(), 5u);
  EXPECT_EQ(stream().written.back().seq(), 1u);
}

TEST_F(SessionClientTest, SubmitFromWithinAResult_Works) {
  Connect();
  client_->Submit(Add(1), [this](const v1::OpResult&) { Submit("second", Add(2)); });
  stream().Drain();
  stream().events->OnFrame(Results(1, {1}));
  stream().Drain();
  stream().events->OnFrame(Results(2, {2}));
  EXPECT_THAT(results_, ElementsAre("second: ok"));
}

TEST_F(SessionClientTest, Destroyed_LateEventsReachNobody) {
  Connect();
  Submit("a", Add(1));
  const std::shared_ptr<FakeOutgoingStream> old = transport_.streams.back();
  client_.reset();
  EXPECT_TRUE(old->closing);
  old->events->OnFrame(Results(1, {1}));
  old->events->OnClosed(absl::CancelledError(""));
  EXPECT_THAT(results_, IsEmpty());
}

TEST_F(SessionClientTest, UseHub_MovesWhatIsHeldToANewSessionThere) {
  hub_address_ = "10.0.0.9:1";
  Connect();
  EXPECT_THAT(client_->upstream().hub, IsEmpty());
  Submit("a", Add(1));
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  EXPECT_EQ(stream().written.back().bye().reason(), "uses hub node-h");
  Submit("b", Add(2));
  Leave("10.0.0.2:29500");
  EXPECT_FALSE(client_->connected());
  EXPECT_EQ(hello().node(), "node-a");
  EXPECT_THAT(hello().features(), ElementsAre("hub"));
  EXPECT_EQ(hello().term_seen(), 1u);
  EXPECT_EQ(hello().cluster_id(), "c");
  EXPECT_EQ(hello().session_id(), "s1");
  EXPECT_EQ(hello().hub_address(), "");
  Welcome("s1");  // by chance the name of the coordinator's session, but another session
  EXPECT_TRUE(client_->connected());
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1 2"));
  EXPECT_THAT(connected_, ElementsAre("term 1 new", "term 1 new"));
  stream().events->OnFrame(Results(1, {1, 2}));
  EXPECT_THAT(results_, ElementsAre("a: ok", "b: ok"));
  EXPECT_EQ(client_->upstream().hub, "node-h");
  EXPECT_EQ(client_->upstream().session, 2u);
  EXPECT_THAT(directives_, IsEmpty());
}

TEST_F(SessionClientTest, UseHubWhileOthersAreBehindThisAgent_IsNotFollowed) {
  bool is_hub = true;
  options_.is_hub = [&is_hub] { return is_hub; };
  Make();
  stream().Done();
  Welcome("s1");
  Use("node-h", "10.0.0.2:29500");
  Submit("a", Add(1));
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  EXPECT_TRUE(client_->connected());
  is_hub = false;
  Use("node-h", "10.0.0.2:29500", 2);
  stream().Drain();
  EXPECT_EQ(stream().written.back().bye().reason(), "uses hub node-h");
}

TEST_F(SessionClientTest, MoveToAHub_IsNoOutage) {
  options_.outage_tolerance = absl::ZeroDuration();
  Make();
  EXPECT_THAT(hello().features(), IsEmpty());  // a failing hub would exceed its tolerance
  stream().Done();
  Welcome("s1");
  Use("node-h", "10.0.0.2:29500");
  stream().Drain();
  Leave("10.0.0.2:29500");
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  Welcome("h1");
  EXPECT_THAT(lost_, IsEmpty());
}

TEST_F(SessionClientTest, UseHubWhileWriting_ByeFollowsTheWrite) {
  Connect();
  Submit("a", Add(1));
  Use("node-h", "10.0.0.2:29500");
  EXPECT_TRUE(stream().written.back().has_ops());
  stream().Done();
  Leave("10.0.0.2:29500");
  Welcome("h1");
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
}

TEST_F(SessionClientTest, UseHub_WaitsForOperationsThatCannotBeRepeated) {
  Connect();
  Submit("operator", Add(0, ""));
  Submit("worker", Add(1));
  stream().Drain();
  stream().written.clear();
  Use("node-h", "10.0.0.2:29500");
  Submit("later", Add(0, ""));
  EXPECT_THAT(stream().written, IsEmpty());
  stream().events->OnFrame(Results(2, {1}));
  Leave("10.0.0.2:29500");
  Welcome("h1");
  stream().Drain();
  EXPECT_THAT(results_, ElementsAre("operator: ok"));
  EXPECT_THAT(Written(), ElementsAre("1: 2 3"));
}

TEST_F(SessionClientTest, UseHubWhileAWorkerWaitsForItsSeat_MovesOnceItHasIt) {
  Connect();
  v1::Op join;
  join.mutable_join()->mutable_fence()->set_worker_id("w0");
  Submit("join", join);
  stream().Drain();
  stream().written.clear();
  Use("node-h", "10.0.0.2:29500");
  // A move would end the session that holds its place in the queue. Other operations continue.
  Submit("other", Add(1));
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("2: 2"));
  EXPECT_FALSE(stream().written.back().has_bye());
  v1::CoordinatorFrame seated;
  seated.set_seq(2);
  seated.mutable_results()->add_results()->set_op_id(1);
  seated.mutable_results()->mutable_results(0)->mutable_join();
  stream().events->OnFrame(seated);
  EXPECT_THAT(results_, ElementsAre("join: ok"));
  Leave("10.0.0.2:29500");
}

TEST_F(SessionClientTest, UseHubWhileNoSeatIsGiven_MovesInTheEnd) {
  Connect();
  v1::Op join;
  join.mutable_join()->mutable_fence()->set_worker_id("w0");
  Submit("join", join);
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  for (int i = 0; i < 19; ++i) {
    clock_.Advance(absl::Seconds(1));
    client_->Tick();
    stream().Drain();
  }
  EXPECT_FALSE(stream().written.back().has_bye());
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  stream().Drain();
  Leave("10.0.0.2:29500");
  EXPECT_LT(clock_.Now(), client_->Tick());  // nothing is left to wait for
}

TEST_F(SessionClientTest, UseHubWhileAWorkerWaitsThatGoes_MovesAtOnce) {
  Connect();
  v1::Op join;
  join.mutable_join()->mutable_fence()->set_worker_id("w0");
  const uint64_t op = Submit("join", join);
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  client_->Forget(op);
  stream().Drain();
  Leave("10.0.0.2:29500");
}

TEST_F(SessionClientTest, UseHub_DoesNotWaitForWhatItsCallerHasForgotten) {
  Connect();
  const uint64_t op = Submit("operator", Add(0, ""));
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  client_->Forget(op);
  Leave("10.0.0.2:29500");
}

TEST_F(SessionClientTest, UseHub_WaitsOneSecondAtMost) {
  Connect();
  Submit("operator", Add(0, ""));
  Submit("worker", Add(1));
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  stream().Drain();
  EXPECT_TRUE(stream().written.back().has_bye());
  // And another second for a coordinator that does not end the stream.
  const absl::Time next = client_->Tick();
  EXPECT_LE(next - clock_.Now(), absl::Seconds(1));
  ExpectHello("10.0.0.2:29500", absl::Seconds(1));
  EXPECT_TRUE(transport_.streams.front()->closing);
  Welcome("h1");
  stream().Drain();
  EXPECT_THAT(results_, ElementsAre(HasSubstr("whether the request took effect is unknown")));
  EXPECT_THAT(Written(), ElementsAre("1: 2"));
}

TEST_F(SessionClientTest, StreamThatBreaksDuringAMove_MovesAllTheSame) {
  Connect();
  Submit("operator", Add(0, ""));
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  stream().events->OnClosed(absl::UnavailableError("broken pipe"));
  ExpectHello("10.0.0.2:29500");
}

TEST_F(SessionClientTest, TwoHubsInARow_TheLastOneCounts) {
  Connect();
  Submit("operator", Add(0, ""));
  stream().Drain();
  Use("node-g", "10.0.0.3:29500", 1);
  Use("node-h", "10.0.0.2:29500", 2);
  stream().events->OnFrame(Results(3, {1}));
  EXPECT_EQ(stream().written.back().bye().reason(), "uses hub node-h");
  Use("node-g", "10.0.0.3:29500", 4);  // too late
  Leave("10.0.0.2:29500");
}

TEST_F(SessionClientTest, HubThatCannotBeUsed_CoordinatorHearsOfIt) {
  hub_address_ = "10.0.0.9:29500";
  Connect();
  Submit("a", Add(1));
  stream().Drain();
  uint64_t seq = 0;
  for (const auto& [node, address] : std::vector<std::pair<std::string, std::string>>{
           {"node-h", ""},
           {"node-h", "somewhere"},
           {"node-h", "10.0.0.2:0"},
           {"node-h", "10.0.0.9:29500"},  // leads back to itself
           {"node-a", "10.0.0.2:29500"},  // itself
           {"", "10.0.0.2:29500"}}) {
    SCOPED_TRACE(node + " at " + address);
    Use(node, address, ++seq);
    EXPECT_TRUE(stream().closing);
    ExpectHello("", absl::Seconds(2));
    EXPECT_EQ(hello().failed_hub(), node);
    EXPECT_EQ(hello().session_id(), "s1");
    EXPECT_EQ(hello().last_received_seq(), seq);
    Welcome("s1", 1, 1);
    stream().Drain();
  }
  EXPECT_EQ(connected_.back(), "term 1 resumed");
  EXPECT_EQ(client_->held_ops(), 1u);
  Reconnect();
  EXPECT_EQ(hello().failed_hub(), "");
}

TEST_F(SessionClientTest, HubThatNothingIsOpenedTo_IsLeftForTheCoordinator) {
  Connect();
  transport_.refuses = "10.0.0.2:29500";  // for example because it has no TLS
  Use("node-h", "10.0.0.2:29500");
  stream().Drain();
  stream().events->OnClosed(absl::OkStatus());
  client_->Tick();
  ExpectHello("", absl::Seconds(2));
  EXPECT_EQ(hello().failed_hub(), "node-h");
}

TEST_F(SessionClientTest, HubThatClosesBeforeWelcome_IsLeftForTheCoordinator) {
  Connect();
  Submit("a", Add(1));
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  Leave("10.0.0.2:29500");
  stream().events->OnClosed(absl::UnavailableError("connection refused"));
  ExpectHello("", absl::Seconds(1));
  EXPECT_EQ(hello().failed_hub(), "node-h");
  EXPECT_EQ(hello().session_id(), "s1");
  Welcome("s2");
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  stream().events->OnFrame(Results(1, {1}));
  EXPECT_THAT(results_, ElementsAre("a: ok"));
  Reconnect();
  EXPECT_EQ(stream().hub, "");
  EXPECT_EQ(hello().failed_hub(), "");
}

TEST_F(SessionClientTest, HubThatDoesNotWelcome_IsLeftAfterAThirdOfTheLease) {
  Connect();
  Use("node-h", "10.0.0.2:29500");
  Leave("10.0.0.2:29500");
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Seconds(2));
  clock_.Advance(absl::Seconds(2));
  client_->Tick();
  EXPECT_TRUE(stream().closing);
  ExpectHello("", absl::Seconds(1));
  EXPECT_EQ(hello().failed_hub(), "node-h");
}

TEST_F(SessionClientTest, HubOfAnotherClusterOrAnOlderTerm_IsLeftForTheCoordinator) {
  for (const auto& [term, cluster] :
       std::vector<std::pair<uint64_t, std::string>>{{2, "d"}, {1, "c"}, {2, ""}}) {
    SCOPED_TRACE(absl::StrCat("term ", term, " of ", cluster));
    transport_.streams.clear();
    Make();
    stream().Done();
    Welcome("s1", 2);
    Use("node-h", "10.0.0.2:29500");
    stream().Drain();
    Leave("10.0.0.2:29500");
    Welcome("h1", term, 0, cluster);
    EXPECT_FALSE(client_->connected());
    EXPECT_TRUE(stream().closing);
    ExpectHello("", absl::Seconds(1));
    EXPECT_EQ(hello().failed_hub(), "node-h");
    EXPECT_EQ(hello().term_seen(), 2u);
    EXPECT_EQ(hello().cluster_id(), "c");
  }
}

TEST_F(SessionClientTest, HubOfANewerTerm_IsToldOfBarriersBeforeWhatIsHeld) {
  Connect();
  Submit("a0", Arrive("a", 0));
  Submit("b0", Arrive("b", 0));
  stream().Drain();
  stream().events->OnFrame(Passed(1, {1}));
  Use("node-h", "10.0.0.2:29500", 2);
  Leave("10.0.0.2:29500");
  Welcome("h1", 2);
  stream().Drain();
  const v1::OpBatch& batch = stream().written.back().ops();
  ASSERT_EQ(batch.ops_size(), 2);
  EXPECT_EQ(batch.ops(0).recall_barriers().seen(0).barrier_id(), "a");
  EXPECT_EQ(batch.ops(1).arrive().barrier_id(), "b");
  EXPECT_EQ(client_->term(), 2u);
}

TEST_F(SessionClientTest, HubThatHasLostTheCoordinator_IsAnOutage) {
  ConnectToHub();
  SayAway(true);
  EXPECT_FALSE(client_->connected());
  EXPECT_THAT(client_->upstream().why_away, HasSubstr("connection refused"));
  Submit("a", Add(1));
  EXPECT_THAT(stream().written, IsEmpty());  // nothing that might be lost there
  // The hub is alive anyway.
  clock_.Advance(absl::Seconds(1.9));
  client_->Tick();
  EXPECT_FALSE(stream().closing);
  SayAway(true);
  SayAway(false);
  EXPECT_TRUE(client_->connected());
  EXPECT_EQ(connected_.back(), "term 1 resumed");
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  clock_.Advance(absl::Seconds(0.2));
  client_->Tick();
  EXPECT_FALSE(stream().closing);
}

TEST_F(SessionClientTest, HubThatDoesNotFindTheCoordinator_IsLeftAfterAThirdOfTheLease) {
  ConnectToHub();
  SayAway(true);
  clock_.Advance(absl::Seconds(2));
  client_->Tick();
  EXPECT_TRUE(stream().closing);
  ExpectHello("", absl::Seconds(1));
  // The coordinator knows which hubs it has lost.
  EXPECT_EQ(hello().failed_hub(), "");
  // But it does not know that a hub which it believes to have cannot reach it.
  Welcome("s2");
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  stream().Drain();
  Leave("10.0.0.2:29500");
  Welcome("h2");
  SayAway(true);
  clock_.Advance(absl::Seconds(2));
  client_->Tick();
  ExpectHello("", absl::Seconds(2));
  EXPECT_EQ(hello().failed_hub(), "node-h");
}

TEST_F(SessionClientTest, HubThatWasRightAboutTheCoordinator_IsNotToBlame) {
  ConnectToHub();
  for (int i = 0; i < 3; ++i) {
    SayAway(true);
    clock_.Advance(absl::Seconds(2));
    client_->Tick();
    ExpectHello("", absl::Seconds(2));
    EXPECT_EQ(hello().failed_hub(), "");
    stream().events->OnClosed(absl::UnavailableError("connection refused"));
    ExpectHello("10.0.0.2:29500", absl::Seconds(2));
    EXPECT_EQ(hello().session_id(), "h1");
    Welcome("h1");
  }
}

TEST_F(SessionClientTest, HubThatTakesNobodyWithoutTheCoordinator_IsNotToBlame) {
  ConnectToHub();
  SayAway(true);
  clock_.Advance(absl::Seconds(2));
  client_->Tick();
  for (int i = 0; i < 3; ++i) {
    ExpectHello("", absl::Seconds(2));
    EXPECT_EQ(hello().failed_hub(), "");
    stream().events->OnClosed(absl::UnavailableError("connection refused"));
    ExpectHello("10.0.0.2:29500", absl::Seconds(2));
    stream().events->OnClosed(absl::UnavailableError("no stream to the coordinator"));
  }
}

TEST_F(SessionClientTest, HubThatFailed_IsNamedHoweverLongTheCoordinatorIsAway) {
  ConnectToHub();
  stream().events->OnClosed(absl::UnavailableError("connection reset"));
  ExpectHello("10.0.0.2:29500", absl::Seconds(1));
  stream().events->OnClosed(absl::UnavailableError("connection refused"));
  for (int i = 0; i < 3; ++i) {
    ExpectHello("", absl::Seconds(2));
    EXPECT_EQ(hello().failed_hub(), "node-h");
    stream().events->OnClosed(absl::UnavailableError("connection refused"));
    ExpectHello("10.0.0.2:29500", absl::Seconds(2));
    stream().events->OnClosed(absl::UnavailableError("connection refused"));
  }
}

TEST_F(SessionClientTest, BeatThatAHubDoesNotAcknowledge_IsTheEndOfIt) {
  int beats = 0;
  options_.beat = [&] {
    ++beats;
    return v1::Beat();
  };
  ConnectToHub();
  Submit("a", Add(1));
  stream().Drain();
  for (int i = 0; i < 3; ++i) {
    clock_.Advance(absl::Seconds(2));
    client_->Tick();
    stream().Drain();
    Acknowledge();
  }
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Milliseconds(1500));
  EXPECT_EQ(beats, 6);
  stream().Drain();
  EXPECT_TRUE(client_->connected());
  clock_.Advance(absl::Milliseconds(1500));
  client_->Tick();
  EXPECT_FALSE(client_->connected());
  ExpectHello("", absl::Seconds(1));
  EXPECT_EQ(hello().failed_hub(), "node-h");
  EXPECT_EQ(transport_.reconnects, 0);
  Welcome("s2");
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  // The coordinator itself may be slow: only the connection decides what is an outage.
  clock_.Advance(absl::Seconds(20));
  client_->Tick();
  EXPECT_TRUE(client_->connected());
}

TEST_F(SessionClientTest, HubThatTalksButDoesNotAcknowledge_IsLeftToo) {
  ConnectToHub();
  clock_.Advance(absl::Seconds(2));
  client_->Tick();
  stream().Drain();
  clock_.Advance(absl::Seconds(1));
  SayAway(true);
  SayAway(false);
  EXPECT_TRUE(client_->connected());
  clock_.Advance(absl::Milliseconds(500));
  client_->Tick();
  EXPECT_FALSE(client_->connected());
  ExpectHello("", absl::Seconds(1));
  EXPECT_EQ(hello().failed_hub(), "node-h");
}

TEST_F(SessionClientTest, HubWhoseBeatTheCoordinatorDoesNotAnswer_OpensAnotherStream) {
  bool is_hub = true;
  options_.is_hub = [&] { return is_hub; };
  features_ = {"answers_beats"};
  Make();
  stream().Done();
  Welcome("s1");
  client_->Tick();
  EXPECT_TRUE(stream().written.back().beat().wants_answer());
  stream().Drain();
  Acknowledge();
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Milliseconds(1500));
  stream().Drain();
  EXPECT_TRUE(client_->connected());
  clock_.Advance(absl::Milliseconds(1500));
  client_->Tick();
  EXPECT_FALSE(client_->connected());
  EXPECT_THAT(client_->upstream().why_away, HasSubstr("has not acknowledged a beat"));
  EXPECT_EQ(transport_.reconnects, 1);
  ExpectHello("", absl::Seconds(1));
  EXPECT_EQ(hello().session_id(), "s1");  // the session continues
  Welcome("s1");
  // Without agents behind it, it relies on the connection to report when it is broken.
  is_hub = false;
  client_->Tick();
  EXPECT_FALSE(stream().written.back().beat().wants_answer());
  stream().Drain();
  clock_.Advance(absl::Seconds(20));
  client_->Tick();
  EXPECT_TRUE(client_->connected());
}

TEST_F(SessionClientTest, HubOfACoordinatorThatAnswersNoBeats_StaysWithIt) {
  options_.is_hub = [] { return true; };
  Connect();
  clock_.Advance(absl::Seconds(20));
  client_->Tick();
  stream().Drain();
  clock_.Advance(absl::Seconds(20));
  client_->Tick();
  EXPECT_TRUE(client_->connected());
}

TEST_F(SessionClientTest, HubWhoseStreamBreaks_IsTriedOnceMore) {
  ConnectToHub();
  Submit("a", Add(1));
  stream().Drain();
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  // The hub has a new session with the coordinator: all its agents come back.
  stream().events->OnClosed(absl::AbortedError("a new session"));
  ExpectHello("10.0.0.2:29500", absl::Seconds(1));
  EXPECT_EQ(hello().session_id(), "h1");
  Welcome("h2", 2);
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  EXPECT_EQ(client_->upstream().session, 3u);
  // A hub whose stream lasts is trusted again.
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  stream().Drain();
  Acknowledge();
  clock_.Advance(absl::Seconds(1));
  client_->Tick();
  stream().events->OnClosed(absl::AbortedError("another session"));
  ExpectHello("10.0.0.2:29500", absl::Seconds(1));
  Welcome("h3", 2);
  stream().events->OnClosed(absl::AbortedError("and another"));
  ExpectHello("", absl::Seconds(1));
  EXPECT_EQ(hello().failed_hub(), "node-h");
}

TEST_F(SessionClientTest, HubThatIsKilled_IsTriedOnceMoreAndLeft) {
  ConnectToHub();
  clock_.Advance(absl::Seconds(10));
  stream().events->OnClosed(absl::UnavailableError("connection reset"));
  ExpectHello("10.0.0.2:29500", absl::Milliseconds(50));
  stream().events->OnClosed(absl::UnavailableError("connection refused"));
  ExpectHello("", absl::Milliseconds(100));
  EXPECT_EQ(hello().failed_hub(), "node-h");
}

TEST_F(SessionClientTest, HubThatEndsInOrder_IsLeftAndNotToBlame) {
  ConnectToHub();
  v1::CoordinatorFrame goodbye;
  goodbye.mutable_goodbye()->set_reason("the agent ends");
  stream().events->OnFrame(goodbye);
  stream().events->OnClosed(absl::OkStatus());
  ExpectHello("", absl::Seconds(1));
  EXPECT_EQ(hello().failed_hub(), "");
  // It is not an alternative, either.
  stream().events->OnClosed(absl::UnavailableError("connection refused"));
  ExpectHello("", absl::Seconds(1));
}

TEST_F(SessionClientTest, HubThatAsksForPatience_IsComeBackTo) {
  ConnectToHub();
  v1::CoordinatorFrame goodbye;
  goodbye.mutable_goodbye()->set_reason("a new session");
  goodbye.mutable_goodbye()->mutable_retry_after()->set_seconds(3);
  stream().events->OnFrame(goodbye);
  stream().events->OnClosed(absl::OkStatus());
  EXPECT_EQ(client_->Tick(), clock_.Now() + absl::Seconds(3));
  ExpectHello("10.0.0.2:29500", absl::Seconds(3));
}

TEST_F(SessionClientTest, NeitherHubNorCoordinator_InTurnUntilTheOutageIsNotTolerated) {
  ConnectToHub();
  Submit("a", Add(1));
  stream().Drain();
  stream().events->OnClosed(absl::UnavailableError("broken pipe"));
  std::string tried;
  absl::Duration away;
  // A hub that answers does not mean that the coordinator does.
  const auto step = [&] {
    if (tried.back() == 'H') Acknowledge();
    if (tried.back() == 'h') {
      Welcome("h2");
      SayAway(true);
      tried.back() = 'H';
    }
    clock_.Advance(absl::Milliseconds(100));
    away += absl::Milliseconds(100);
    const size_t before = transport_.streams.size();
    client_->Tick();
    if (stream().writing) stream().Done();
    if (transport_.streams.size() != before) tried += stream().hub.empty() ? 'c' : 'h';
  };
  tried = "-";
  while (lost_.empty() && away < absl::Minutes(5)) step();
  EXPECT_EQ(tried.substr(0, 7), "-HcHcHc");
  ASSERT_EQ(lost_.size(), 1u);
  EXPECT_EQ(away, absl::Seconds(90));
  EXPECT_THAT(results_, ElementsAre(HasSubstr("a: the coordinator at 10.0.0.1:29400 has been away "
                                              "for 1m30s")));
  // Once for each outage.
  for (int i = 0; i < 100; ++i) step();
  EXPECT_EQ(lost_.size(), 1u);
  Submit("b", Add(2));
  EXPECT_THAT(results_.back(), HasSubstr("b: the coordinator at 10.0.0.1:29400 has been away"));
  // It is back: the hub does not contradict that for a while, or the coordinator welcomes the
  // agent.
  while (tried.back() != 'h') step();
  Welcome("h3");
  client_->Tick();
  stream().Drain();
  Acknowledge();
  clock_.Advance(absl::Milliseconds(1500));
  client_->Tick();
  EXPECT_TRUE(client_->lost().ok());
}

TEST_F(SessionClientTest, CoordinatorThatRestartsDuringAMove_IsFoundThroughTheHub) {
  Connect();
  Submit("b0", Arrive("b", 0));
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  v1::CoordinatorFrame goodbye;
  goodbye.mutable_goodbye()->set_reason("stopping");
  goodbye.mutable_goodbye()->mutable_retry_after()->set_seconds(1);
  stream().events->OnFrame(goodbye);
  stream().events->OnClosed(absl::UnavailableError("stopping"));
  ExpectHello("10.0.0.2:29500", absl::Seconds(1));
  Welcome("h1");
  SayAway(true);
  EXPECT_FALSE(client_->connected());
  stream().events->OnClosed(absl::AbortedError("a new session"));
  ExpectHello("10.0.0.2:29500", absl::Seconds(1));
  Welcome("h2", 2);
  stream().Drain();
  EXPECT_THAT(Written(), ElementsAre("1: 1"));
  stream().events->OnFrame(Passed(1, {1}));
  EXPECT_THAT(results_, ElementsAre("b0: ok"));
}

TEST_F(SessionClientTest, FinishDuringAMove_SaysGoodbyeWhereItIs) {
  Connect();
  Submit("operator", Add(0, ""));
  stream().Drain();
  Use("node-h", "10.0.0.2:29500");
  client_->Finish(absl::InfinitePast());
  EXPECT_EQ(stream().written.back().bye().reason(), "the agent ends");
  stream().Drain();
  stream().events->OnClosed(absl::OkStatus());
  clock_.Advance(absl::Seconds(10));
  client_->Tick();
  EXPECT_EQ(transport_.streams.size(), 1u);
}

TEST_F(SessionClientTest, FinishBetweenCoordinatorAndHub_IsTheEnd) {
  Connect();
  Use("node-h", "10.0.0.2:29500");
  Leave("10.0.0.2:29500");
  client_->Finish(absl::InfinitePast());
  stream().events->OnClosed(absl::UnavailableError("connection refused"));
  clock_.Advance(absl::Seconds(10));
  client_->Tick();
  EXPECT_EQ(transport_.streams.size(), 2u);
}

TEST_F(SessionClientTest, FinishAtAHub_SaysGoodbyeThere) {
  ConnectToHub();
  client_->Finish(absl::InfinitePast());
  EXPECT_EQ(stream().written.back().bye().reason(), "the agent ends");
  // An agent that ends is no longer moved.
  Use("node-g", "10.0.0.3:29500");
  stream().Drain();
  EXPECT_TRUE(stream().written.back().has_bye());
}

TEST_F(SessionClientTest, Upstream_TellsOfEachChange) {
  std::vector<std::string> seen;
  options_.on_upstream = [&] {
    const Upstream up = client_->upstream();
    seen.push_back(absl::StrCat(up.session, up.connected ? " up " : " away ", up.term, " ",
                                up.cluster_id, up.hub.empty() ? "" : " through ", up.hub));
  };
  ConnectToHub();
  SayAway(true);
  SayAway(false);
  stream().events->OnClosed(absl::UnavailableError("broken pipe"));
  EXPECT_THAT(seen, ElementsAre("1 up 1 c", "1 away 1 c", "2 up 1 c through node-h",
                                "2 away 1 c through node-h", "2 up 1 c through node-h",
                                "2 away 1 c through node-h"));
  EXPECT_EQ(client_->upstream().lease, absl::Seconds(6));
}

}  // namespace
}  // namespace muster::agent
