#include "coordinator/service/grpc_frontend.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "coordinator/journal/journal.h"
#include "coordinator/journal/memory_journal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/kv.pb.h"
#include "proto/muster/v1/rendezvous.pb.h"
#include "proto/muster/v1/session.pb.h"
#include "proto/muster/v1/watch.pb.h"

namespace muster::coordinator {
namespace {

// The life of a call, without gRPC: every order in which its events can come.

grpc::ByteBuffer Bytes(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// The test's knowledge of a call, even after the frontend has deleted it.
struct Life {
  bool deleted = false;
  std::vector<RpcEvent> in_flight;
  int in_flight_when_deleted = 0;
  grpc::ByteBuffer* read_into = nullptr;
  std::optional<grpc::StatusCode> status;  // once finished
  std::string message;
  std::vector<std::string> written;
  Notification finished;
};

class FakeCall final : public RpcCall {
 public:
  FakeCall(std::string method, std::shared_ptr<Life> life, std::string peer, std::string identity)
      : method_(std::move(method)),
        peer_(std::move(peer)),
        identity_(std::move(identity)),
        life_(std::move(life)) {}
  ~FakeCall() override {
    life_->deleted = true;
    life_->in_flight_when_deleted = static_cast<int>(life_->in_flight.size());
  }
  const std::string& method() const override { return method_; }
  std::chrono::system_clock::time_point deadline() const override {
    return std::chrono::system_clock::now() + std::chrono::hours(1);
  }
  const std::multimap<grpc::string_ref, grpc::string_ref>& metadata() const override {
    return metadata_;
  }
  std::string peer() const override { return peer_; }
  std::string certificate() const override { return identity_; }

 private:
  void StartRead(grpc::ByteBuffer* message) override {
    Start(RpcEvent::kRead);
    life_->read_into = message;
  }
  void StartWrite(const grpc::ByteBuffer& message) override {
    Start(RpcEvent::kWritten);
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(message.Dump(&slices).ok());
    life_->written.emplace_back();
    for (const grpc::Slice& slice : slices)
      life_->written.back().append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  void StartFinish(const grpc::Status& status) override {
    Start(RpcEvent::kFinished);
    life_->status = status.error_code();
    life_->message = status.error_message();
    life_->finished.Notify();
  }
  void StartWriteAndFinish(const grpc::ByteBuffer&) override {
    Start(RpcEvent::kFinished);
    life_->status = grpc::StatusCode::OK;
    life_->finished.Notify();
  }
  void Cancel() override {}
  void Start(RpcEvent event) {
    EXPECT_EQ(std::count(life_->in_flight.begin(), life_->in_flight.end(), event), 0);
    life_->in_flight.push_back(event);
  }

  const std::string method_, peer_, identity_;
  const std::multimap<grpc::string_ref, grpc::string_ref> metadata_;
  const std::shared_ptr<Life> life_;
};

// Goes through all sequences of choices, one in each round.
class Choices {
 public:
  size_t Choose(size_t count) {
    if (at_ == taken_.size()) taken_.push_back({0, count});
    EXPECT_EQ(taken_[at_].count, count) << "the same choices led to another place";
    return taken_[at_++].chosen;
  }
  bool NextRound() {
    at_ = 0;
    while (!taken_.empty() && taken_.back().chosen + 1 == taken_.back().count) taken_.pop_back();
    if (taken_.empty()) return false;
    ++taken_.back().chosen;
    return true;
  }

 private:
  struct Taken {
    size_t chosen;
    size_t count;
  };
  std::vector<Taken> taken_;
  size_t at_ = 0;
};

class GrpcFrontendTest : public ::testing::Test {
 protected:
  GrpcFrontendTest() : GrpcFrontendTest(GrpcFrontend::Limits()) {}
  explicit GrpcFrontendTest(const GrpcFrontend::Limits& limits,
                            std::unique_ptr<Journal> journal = std::make_unique<MemoryJournal>())
      : runner_(CoreRunner::Options(), std::move(journal)),
        frontend_(&runner_, &metrics_, Clock::Real().Now(), limits) {
    EXPECT_TRUE(runner_.Start().ok());
  }
  // Seats worker w0 as all of job "j".
  void SetUp() override {
    v1::JoinRequest join;
    join.mutable_fence()->set_job_id("j");
    join.mutable_fence()->set_worker_id("w0");
    join.mutable_fence()->set_incarnation(1);
    join.mutable_spec()->set_min_workers(1);
    join.mutable_spec()->set_max_workers(1);
    join.mutable_spec()->mutable_lease()->set_seconds(3600);
    const Opened opened = Open("/muster.v1.Rendezvous/Join");
    Happen(opened, RpcEvent::kRead, true, join.SerializeAsString());
    ASSERT_EQ(opened.life->status, grpc::StatusCode::OK);
    Happen(opened, RpcEvent::kFinished, true);
    Happen(opened, RpcEvent::kGone, false);
  }
  void TearDown() override {
    frontend_.EndHealthWatches();
    runner_.Stop();
  }

  // Blocks until the runner has applied what it was handed and has delivered the output, which it
  // does before it turns to a later task.
  void Settle() {
    for (int turn = 0; turn < 2; ++turn) {
      Notification done;
      runner_.WithCore([&](Core*) { done.Notify(); });
      done.WaitForNotification();
    }
  }

  struct Opened {
    RpcCall* call;
    std::shared_ptr<Life> life;
  };
  Opened Open(const std::string& method, const std::string& peer = "",
              const std::string& identity = "") {
    auto life = std::make_shared<Life>();
    auto call = std::make_unique<FakeCall>(method, life, peer, identity);
    RpcCall* const raw = call.get();
    frontend_.Adopt(std::move(call));
    return {raw, life};
  }

  void Happen(const Opened& opened, RpcEvent event, bool ok, const std::string& message = {}) {
    Life& life = *opened.life;
    if (event != RpcEvent::kGone) {
      const auto it = std::find(life.in_flight.begin(), life.in_flight.end(), event);
      ASSERT_NE(it, life.in_flight.end());
      life.in_flight.erase(it);
    }
    if (event == RpcEvent::kRead && ok) *life.read_into = Bytes(message);
    frontend_.Handle(opened.call, event, ok);
    Settle();
  }

  // Tries every order: each message is read or the read fails, each write ends well or not, and the
  // caller goes away at any time, also between a read and its event. Each call must end, once, and
  // leave nothing in the runner.
  void TryEveryOrder(const std::string& method, const std::vector<std::string>& messages) {
    Choices choices;
    int rounds = 0;
    do {
      ++rounds;
      const Opened opened = Open(method);
      Life& life = *opened.life;
      size_t next_message = 0;
      bool gone = false;
      std::string history;
      while (!life.deleted) {
        struct Step {
          RpcEvent event;
          bool ok;
        };
        std::vector<Step> steps;
        for (const RpcEvent event : life.in_flight) {
          if (event == RpcEvent::kRead && next_message < messages.size()) {
            steps.push_back({event, true});
          }
          if (event == RpcEvent::kRead || event == RpcEvent::kWritten) {
            steps.push_back({event, false});
          }
          if (event == RpcEvent::kWritten || event == RpcEvent::kFinished) {
            steps.push_back({event, true});
          }
        }
        if (!gone) steps.push_back({RpcEvent::kGone, false});
        ASSERT_FALSE(steps.empty()) << "the call does not end:" << history;
        const Step step = steps[choices.Choose(steps.size())];
        absl::StrAppend(&history, " ", static_cast<int>(step.event), step.ok ? "+" : "-");
        gone = gone || step.event == RpcEvent::kGone;
        const bool reads = step.event == RpcEvent::kRead && step.ok;
        Happen(opened, step.event, step.ok, reads ? messages[next_message] : std::string());
        if (reads) ++next_message;
      }
      ASSERT_EQ(life.in_flight_when_deleted, 0) << history;
      ASSERT_TRUE(life.status.has_value()) << history;
      ASSERT_EQ(runner_.open_calls(), 0u) << "the runner holds a call that is over:" << history;
      ASSERT_EQ(runner_.watchers(), 0u) << "the runner holds a watch that is over:" << history;
      ASSERT_EQ(frontend_.silent_calls(), 0u) << history;
    } while (choices.NextRound());
    EXPECT_GT(rounds, 2);
  }

  // Opens an agent's stream to which the welcome is being written when the coordinator ends for
  // good.
  Opened StopWhileWriting() {
    v1::AgentFrame hello;
    hello.mutable_hello()->set_protocol_min(1);
    hello.mutable_hello()->set_protocol_max(1);
    hello.mutable_hello()->set_node("node");
    hello.mutable_hello()->set_agent_incarnation(7);
    const Opened opened = Open("/muster.v1.Session/Attach");
    Happen(opened, RpcEvent::kRead, true, hello.SerializeAsString());
    EXPECT_EQ(opened.life->written.size(), 1u);
    runner_.SetEndsForGood("the job is over");
    runner_.Stop();
    EXPECT_EQ(opened.life->written.size(), 1u);
    EXPECT_FALSE(opened.life->status.has_value());
    return opened;
  }

  // All of `events` fail; the first of them ends the stream, and nothing more is written.
  void EndInOrder(const Opened& opened, const std::vector<RpcEvent>& events) {
    for (const RpcEvent event : events) {
      Happen(opened, event, false);
      EXPECT_TRUE(opened.life->status.has_value());
    }
    Happen(opened, RpcEvent::kRead, false);
    Happen(opened, RpcEvent::kFinished, true);
    EXPECT_TRUE(opened.life->deleted);
    EXPECT_EQ(opened.life->written.size(), 1u);
  }

  CoreRunner runner_;
  RpcMetrics metrics_;
  GrpcFrontend frontend_;
};

std::string WaitForAKey() {
  v1::WaitRequest wait;
  wait.mutable_fence()->set_job_id("j");
  wait.add_keys("never");
  wait.mutable_timeout()->set_seconds(3000);
  return wait.SerializeAsString();
}

TEST_F(GrpcFrontendTest, HeldCallInEveryOrderOfEvents_EndsOnceAndLeavesNothing) {
  TryEveryOrder("/muster.v1.KeyValueStore/Wait", {WaitForAKey()});
}

TEST_F(GrpcFrontendTest, AnsweredCallInEveryOrderOfEvents_EndsOnceAndLeavesNothing) {
  v1::TxnRequest txn;
  txn.mutable_fence()->set_job_id("j");
  txn.add_then()->mutable_get()->set_key("k");
  TryEveryOrder("/muster.v1.KeyValueStore/Txn", {txn.SerializeAsString()});
  TryEveryOrder("/muster.v1.Admin/Status", {""});
  TryEveryOrder("/grpc.health.v1.Health/Check", {""});
}

TEST_F(GrpcFrontendTest, CallThatIsNoMessage_EndsOnceAndLeavesNothing) {
  TryEveryOrder("/muster.v1.KeyValueStore/Wait", {"\xff\xff\xff"});
  TryEveryOrder("/muster.v1.Watch/Watch", {"\xff\xff\xff"});
  TryEveryOrder("/muster.v1.Jobs/Watch", {"\xff\xff\xff"});
  TryEveryOrder("/muster.v1.Session/Attach", {"\xff\xff\xff"});
}

TEST_F(GrpcFrontendTest, WatchInEveryOrderOfEvents_EndsOnceAndLeavesNothing) {
  v1::WatchRequest watch;
  watch.set_job_id("j");
  watch.set_keys(true);
  TryEveryOrder("/muster.v1.Watch/Watch", {watch.SerializeAsString()});
}

TEST_F(GrpcFrontendTest, WatchOfJobsInEveryOrderOfEvents_EndsOnceAndLeavesNothing) {
  v1::WatchJobsRequest watch;
  watch.set_name_prefix("a");
  TryEveryOrder("/muster.v1.Jobs/Watch", {watch.SerializeAsString()});
}

TEST_F(GrpcFrontendTest, HealthWatchInEveryOrderOfEvents_EndsOnceAndLeavesNothing) {
  // Only its caller's going away ends a watch of the health.
  TryEveryOrder("/grpc.health.v1.Health/Watch", {""});
}

TEST_F(GrpcFrontendTest, AgentStreamInEveryOrderOfEvents_EndsOnceAndLeavesNothing) {
  v1::AgentFrame hello;
  hello.mutable_hello()->set_protocol_min(1);
  hello.mutable_hello()->set_protocol_max(1);
  hello.mutable_hello()->set_node("node");
  hello.mutable_hello()->set_agent_incarnation(7);
  v1::AgentFrame bye;
  bye.set_seq(1);
  bye.mutable_bye();
  TryEveryOrder("/muster.v1.Session/Attach", {hello.SerializeAsString(), bye.SerializeAsString()});
}

TEST_F(GrpcFrontendTest, StopDuringAWriteToAnAgent_GoodbyeFollowsTheWrite) {
  const Opened opened = StopWhileWriting();
  Happen(opened, RpcEvent::kWritten, true);
  ASSERT_EQ(opened.life->written.size(), 2u);
  v1::CoordinatorFrame last;
  ASSERT_TRUE(last.ParseFromString(opened.life->written[1]));
  EXPECT_TRUE(last.goodbye().final());
  EXPECT_EQ(opened.life->status, grpc::StatusCode::UNAVAILABLE);
  Happen(opened, RpcEvent::kWritten, true);
  Happen(opened, RpcEvent::kRead, false);
  Happen(opened, RpcEvent::kFinished, true);
  Happen(opened, RpcEvent::kGone, false);
  EXPECT_TRUE(opened.life->deleted);
}

TEST_F(GrpcFrontendTest, StopDuringAWriteThatFails_EndsTheStream) {
  const Opened opened = StopWhileWriting();
  EndInOrder(opened, {RpcEvent::kWritten, RpcEvent::kGone});
}

TEST_F(GrpcFrontendTest, StopDuringAWriteToAnAgentThatGoes_EndsTheStream) {
  const Opened opened = StopWhileWriting();
  EndInOrder(opened, {RpcEvent::kGone, RpcEvent::kWritten});
}

class SilentTest : public GrpcFrontendTest {
 protected:
  SilentTest() : GrpcFrontendTest({.first_message = absl::Seconds(30), .silent_calls = 2}) {}
  static constexpr char kWait[] = "/muster.v1.KeyValueStore/Wait";
  static constexpr char kAttach[] = "/muster.v1.Session/Attach";

  // Ends the rest of a call that has been finished.
  void End(const Opened& opened) {
    Happen(opened, RpcEvent::kRead, false);
    Happen(opened, RpcEvent::kFinished, true);
    Happen(opened, RpcEvent::kGone, false);
    EXPECT_TRUE(opened.life->deleted);
  }
};

TEST_F(SilentTest, CallOrStreamWithoutAMessage_IsEndedInTime) {
  for (const char* method : {kWait, kAttach}) {
    const absl::Time before = Clock::Real().Now();
    const Opened opened = Open(method);
    const absl::Time after = Clock::Real().Now();
    frontend_.EndSilent(before + absl::Seconds(29));
    EXPECT_FALSE(opened.life->status.has_value()) << method;
    frontend_.EndSilent(after + absl::Seconds(30));
    EXPECT_EQ(opened.life->status, grpc::StatusCode::DEADLINE_EXCEEDED) << method;
    End(opened);
  }
}

TEST_F(SilentTest, CallThatHasSentItsMessage_IsNotEnded) {
  const Opened opened = Open(kWait);
  Happen(opened, RpcEvent::kRead, true, WaitForAKey());
  frontend_.EndSilent(Clock::Real().Now() + absl::Hours(1));
  EXPECT_FALSE(opened.life->status.has_value());
  Happen(opened, RpcEvent::kGone, false);
  Happen(opened, RpcEvent::kFinished, true);
  EXPECT_TRUE(opened.life->deleted);
}

TEST_F(SilentTest, TooManySilentCalls_AreRefusedUntilOneSpeaks) {
  const Opened first = Open(kWait), second = Open(kAttach), third = Open(kWait);
  EXPECT_EQ(frontend_.silent_calls(), 2u);
  EXPECT_EQ(frontend_.refused_calls(), 1u);
  EXPECT_EQ(third.life->status, grpc::StatusCode::UNAVAILABLE);
  Happen(third, RpcEvent::kFinished, true);
  Happen(third, RpcEvent::kGone, false);
  EXPECT_TRUE(third.life->deleted);
  Happen(first, RpcEvent::kRead, true, WaitForAKey());
  const Opened fourth = Open(kWait);
  EXPECT_FALSE(fourth.life->status.has_value());
  frontend_.EndSilent(Clock::Real().Now() + absl::Hours(1));
  End(second);
  End(fourth);
  Happen(first, RpcEvent::kGone, false);
  Happen(first, RpcEvent::kFinished, true);
  EXPECT_TRUE(first.life->deleted);
}

class QuotaTest : public GrpcFrontendTest {
 protected:
  QuotaTest()
      : GrpcFrontendTest({.connection = {.calls = 2, .streams = 1, .silent = 2, .held_bytes = 3000},
                          .user = {.calls = 3, .streams = 2, .silent = 3, .held_bytes = 5000}}) {}
  static constexpr char kWait[] = "/muster.v1.KeyValueStore/Wait";
  static constexpr char kAttach[] = "/muster.v1.Session/Attach";

  // Opens a call that waits for `keys` keys, each of which counts 128 bytes and its own.
  Opened Hold(const std::string& peer, int keys = 1) {
    const Opened opened = Open(kWait, peer);
    if (opened.life->status.has_value()) return opened;
    v1::WaitRequest wait;
    wait.mutable_fence()->set_job_id("j");
    for (int i = 0; i < keys; ++i) wait.add_keys(absl::StrCat("never", i));
    wait.mutable_timeout()->set_seconds(3000);
    Happen(opened, RpcEvent::kRead, true, wait.SerializeAsString());
    return opened;
  }
  // Ends a call whose caller disconnects, or has seen its end.
  void End(const Opened& opened) {
    Happen(opened, RpcEvent::kGone, false);
    for (const RpcEvent event : {RpcEvent::kRead, RpcEvent::kFinished}) {
      const auto& in_flight = opened.life->in_flight;
      if (std::count(in_flight.begin(), in_flight.end(), event) > 0)
        Happen(opened, event, event != RpcEvent::kRead);
    }
    EXPECT_TRUE(opened.life->deleted);
  }
  static bool Refused(const Opened& opened, const std::string& whose) {
    return opened.life->status == grpc::StatusCode::UNAVAILABLE &&
           opened.life->message.find(whose) != std::string::npos;
  }
};

TEST_F(QuotaTest, CallsOfOneConnection_TakeNoRoomFromOthers) {
  std::vector<Opened> open = {Hold("ipv4:10.0.0.1:5"), Hold("ipv4:10.0.0.1:5")};
  const Opened third = Hold("ipv4:10.0.0.1:5");
  EXPECT_TRUE(Refused(third, "connection ipv4:10.0.0.1:5 is at its quota of 2 open calls"))
      << third.life->message;
  EXPECT_EQ(frontend_.quota_refusals(false), 1u);
  open.push_back(Hold("ipv4:10.0.0.2:5"));
  EXPECT_FALSE(open.back().life->status.has_value());
  End(third);
  End(open[0]);
  open[0] = Hold("ipv4:10.0.0.1:5");
  EXPECT_FALSE(open[0].life->status.has_value());
  for (const Opened& one : open) End(one);
}

TEST_F(QuotaTest, ConnectionsOfOneAddress_AreOneUser) {
  std::vector<Opened> open;
  for (const char* peer : {"ipv4:10.0.0.1:5", "ipv4:10.0.0.1:6", "ipv4:10.0.0.1:7"})
    open.push_back(Hold(peer));
  open.push_back(Hold("ipv4:10.0.0.1:8"));
  EXPECT_TRUE(Refused(open.back(), "user ipv4:10.0.0.1 is at its quota of 3 open calls"))
      << open.back().life->message;
  EXPECT_EQ(frontend_.quota_refusals(true), 1u);
  for (const Opened& one : open) End(one);
}

TEST_F(QuotaTest, CertificateOfTheConnection_IsTheUser) {
  std::vector<Opened> open;
  for (const char* peer : {"ipv4:10.0.0.1:5", "ipv4:10.0.0.2:5", "ipv4:10.0.0.3:5"})
    open.push_back(Open(kWait, peer, "alice"));
  open.push_back(Open(kWait, "ipv4:10.0.0.4:5", "alice"));
  EXPECT_TRUE(Refused(open.back(), "user alice is at its quota of 3")) << open.back().life->message;
  open.push_back(Open(kWait, "ipv4:10.0.0.4:5", "bob"));
  EXPECT_FALSE(open.back().life->status.has_value());
  for (const Opened& one : open) End(one);
}

TEST_F(QuotaTest, BytesOfOneConnectionAndUser_AreBounded) {
  std::vector<Opened> open = {Hold("ipv4:10.0.0.1:5", 20)};
  open.push_back(Hold("ipv4:10.0.0.1:5", 20));
  EXPECT_TRUE(Refused(open[1], "connection ipv4:10.0.0.1:5 is at its quota of 3000 bytes"))
      << open[1].life->message;
  open.push_back(Hold("ipv4:10.0.0.1:6", 20));
  EXPECT_TRUE(Refused(open[2], "user ipv4:10.0.0.1 is at its quota of 5000 bytes"))
      << open[2].life->message;
  End(open[1]);
  End(open[2]);
  open.resize(1);
  open.push_back(Hold("ipv4:10.0.0.1:6"));  // as those of a rendezvous are
  EXPECT_FALSE(open[1].life->status.has_value());
  for (const Opened& one : open) End(one);
  const Opened again = Hold("ipv4:10.0.0.1:5", 20);
  EXPECT_FALSE(again.life->status.has_value());
  End(again);
}

TEST_F(QuotaTest, StreamsAndSilentCalls_HaveTheirOwn) {
  std::vector<Opened> open = {Open(kAttach, "ipv4:10.0.0.1:5"), Open(kAttach, "ipv4:10.0.0.1:5")};
  EXPECT_TRUE(Refused(open[1], "quota of 1 open streams and watches")) << open[1].life->message;
  open.push_back(Open(kAttach, "ipv4:10.0.0.1:6"));
  open.push_back(Open(kWait, "ipv4:10.0.0.1:6"));
  open.push_back(Open(kWait, "ipv4:10.0.0.1:7"));
  EXPECT_TRUE(Refused(open[4], "user ipv4:10.0.0.1 is at its quota of 3")) << open[4].life->message;
  for (const Opened& one : open) End(one);
}

TEST_F(QuotaTest, UnixSocket_HasNone) {
  std::vector<Opened> open;
  for (int i = 0; i < 5; ++i) open.push_back(Hold("unix:"));
  for (const Opened& one : open) EXPECT_FALSE(one.life->status.has_value());
  for (const Opened& one : open) End(one);
}

class HealthTest : public GrpcFrontendTest {
 protected:
  HealthTest()
      : GrpcFrontendTest({.silent_calls = 1, .silent_health_calls = 1, .health_watches = 1}) {}
};

// Callers without a token may call the health service.
TEST_F(HealthTest, SilentCallsToIt_TakeNoRoomFromOthers) {
  const Opened first = Open("/grpc.health.v1.Health/Check");
  const Opened second = Open("/grpc.health.v1.Health/Watch");
  EXPECT_EQ(second.life->status, grpc::StatusCode::UNAVAILABLE);
  const Opened other = Open("/muster.v1.KeyValueStore/Wait");
  EXPECT_FALSE(other.life->status.has_value());
  frontend_.EndSilent(Clock::Real().Now() + absl::Hours(1));
  Happen(second, RpcEvent::kFinished, true);
  Happen(second, RpcEvent::kGone, false);
  for (const Opened& call : {first, other}) {
    Happen(call, RpcEvent::kRead, false);
    Happen(call, RpcEvent::kFinished, true);
    Happen(call, RpcEvent::kGone, false);
    EXPECT_TRUE(call.life->deleted);
  }
}

TEST_F(HealthTest, TooManyHealthWatches_AreRefused) {
  const Opened first = Open("/grpc.health.v1.Health/Watch");
  Happen(first, RpcEvent::kRead, true);
  const Opened second = Open("/grpc.health.v1.Health/Watch");
  Happen(second, RpcEvent::kRead, true);
  EXPECT_FALSE(first.life->status.has_value());
  EXPECT_EQ(second.life->status, grpc::StatusCode::UNAVAILABLE);
  Happen(second, RpcEvent::kFinished, true);
  Happen(second, RpcEvent::kGone, false);
  Happen(first, RpcEvent::kWritten, true);
  Happen(first, RpcEvent::kGone, false);
  Happen(first, RpcEvent::kFinished, true);
  EXPECT_TRUE(first.life->deleted);
}

// A journal whose disk answers when the test says so.
class SlowJournal final : public Journal {
 public:
  const std::string& cluster_id() const override { return memory_.cluster_id(); }
  uint64_t term() const override { return memory_.term(); }
  const std::string& description() const override { return memory_.description(); }
  absl::Status Replay(
      const std::function<absl::Status(uint64_t, absl::string_view)>& snapshot,
      const std::function<absl::Status(uint64_t, absl::string_view)>& record) override {
    return memory_.Replay(snapshot, record);
  }
  void Start(std::function<void(const Progress&)> progress) override {
    memory_.Start(std::move(progress));
  }
  void Append(uint64_t revision, std::string record) override {
    memory_.Append(revision, std::move(record));
  }
  void WriteSnapshot(uint64_t revision, std::unique_ptr<Replica> replica,
                     std::function<void(absl::Status)> done) override {
    memory_.WriteSnapshot(revision, std::move(replica), std::move(done));
  }
  uint64_t records_since_snapshot() const override { return 0; }
  uint64_t bytes_since_snapshot() const override { return 0; }
  absl::StatusOr<BackupPart> ReadBackup(uint64_t, uint64_t, size_t) const override {
    // Answers in time even if the test could say so only afterwards.
    answers_.WaitForNotificationWithTimeout(absl::Seconds(10));
    return BackupPart{.bytes = 4, .data = "part"};
  }
  void Stop() override { memory_.Stop(); }

  void Answer() const { answers_.Notify(); }

 private:
  MemoryJournal memory_;
  mutable Notification answers_;
};

class SlowDiskTest : public GrpcFrontendTest {
 protected:
  SlowDiskTest() : GrpcFrontendTest(GrpcFrontend::Limits(), std::make_unique<SlowJournal>()) {}
  Opened Begin(const std::string& method) {
    const Opened opened = Open(method);
    Happen(opened, RpcEvent::kRead, true);
    return opened;
  }
  void End(const Opened& opened) {
    Happen(opened, RpcEvent::kFinished, true);
    Happen(opened, RpcEvent::kGone, false);
    EXPECT_TRUE(opened.life->deleted);
  }
};

TEST_F(SlowDiskTest, BackupThatWaitsForTheDisk_HoldsUpNoOtherCall) {
  const Opened backup = Begin("/muster.v1.Backup/Read");
  ASSERT_FALSE(backup.life->finished.HasBeenNotified());
  const Opened gone = Begin("/muster.v1.Backup/Read");
  const Opened status = Begin("/muster.v1.Admin/Status");
  EXPECT_EQ(status.life->status, grpc::StatusCode::OK);
  End(status);
  // Meanwhile a caller goes.
  Happen(gone, RpcEvent::kGone, false);
  EXPECT_EQ(gone.life->status, grpc::StatusCode::CANCELLED);
  Happen(gone, RpcEvent::kFinished, true);
  EXPECT_TRUE(gone.life->deleted);
  static_cast<const SlowJournal&>(runner_.journal()).Answer();
  backup.life->finished.WaitForNotification();
  EXPECT_EQ(backup.life->status, grpc::StatusCode::OK);
  End(backup);
}

}  // namespace
}  // namespace muster::coordinator
