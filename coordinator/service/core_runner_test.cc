#include "coordinator/service/core_runner.h"

#include <google/protobuf/message_lite.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fake_clock.h"
#include "base/mutex.h"
#include "base/test_wait.h"
#include "coordinator/journal/memory_journal.h"
#include "coordinator/service/watch_source.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/journal.pb.h"
#include "proto/muster/v1/watch.pb.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

// The runner's bounds, with fake streams: what is sent and when a write ends is up to the test.

v1::CoordinatorFrame Parse(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices)
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  v1::CoordinatorFrame frame;
  EXPECT_TRUE(frame.ParseFromString(bytes));
  return frame;
}

class FakeStream : public AgentStream {
 public:
  void Bind(std::shared_ptr<FrameSource> source) override { source_ = std::move(source); }
  bool TryWrite(absl::FunctionRef<grpc::ByteBuffer()> next) override {
    if (writing_ || closed_.has_value()) return false;
    writing_ = true;
    frames.push_back(Parse(next()));
    return true;
  }
  void ReadNext(bool) override { ++reads; }
  void CloseAfter(grpc::ByteBuffer last, const absl::Status& status) override {
    if (!closed_.has_value()) frames.push_back(Parse(last));
    Close(status);
  }
  void Close(const absl::Status& status) override {
    if (!closed_.has_value()) closed_ = status;
    source_ = nullptr;  // as with a real stream once it has ended
  }
  // Ends the write in flight.
  void Written() {
    ASSERT_TRUE(writing_);
    writing_ = false;
    if (source_ != nullptr) source_->Writable();
  }
  void WriteAll() {
    while (writing_) Written();
  }
  const std::optional<absl::Status>& closed() const { return closed_; }
  v1::OpResult Result(uint64_t op_id) const {
    for (const v1::CoordinatorFrame& frame : frames) {
      for (const v1::OpResult& result : frame.results().results())
        if (result.op_id() == op_id) return result;
    }
    return {};
  }

  int reads = 0;
  std::vector<v1::CoordinatorFrame> frames;

 private:
  std::shared_ptr<FrameSource> source_;
  bool writing_ = false;
  std::optional<absl::Status> closed_;
};

// Takes every frame at once, on any thread.
class TakingStream final : public AgentStream {
 public:
  void Bind(std::shared_ptr<FrameSource>) override {}
  bool TryWrite(absl::FunctionRef<grpc::ByteBuffer()> next) override {
    MutexLock lock(&mu_);
    results_ += Parse(next()).results().results_size();
    changed_.SignalAll();
    return true;
  }
  void ReadNext(bool) override {}
  void Close(const absl::Status&) override {}
  void CloseAfter(grpc::ByteBuffer, const absl::Status&) override {}
  // Blocks until it has `count` results.
  void WaitForResults(int count) {
    MutexLock lock(&mu_);
    while (results_ < count) changed_.Wait(&mu_);
    EXPECT_EQ(results_, count);
  }

 private:
  Mutex mu_;
  CondVar changed_;
  int results_ ABSL_GUARDED_BY(mu_) = 0;
};

template <typename Batch>
class FakeWatchOf final : public WatchStream {
 public:
  void Write(const google::protobuf::MessageLite& message) override {
    batches.push_back(dynamic_cast<const Batch&>(message));
  }
  void Close(const absl::Status& status) override { closed = status; }

  std::vector<Batch> batches;
  std::optional<absl::Status> closed;
};
using FakeWatch = FakeWatchOf<v1::WatchBatch>;
using FakeJobsWatch = FakeWatchOf<v1::WatchJobsBatch>;

class FakeSink final : public CallSink {
 public:
  void OnAnswer(const std::shared_ptr<const Answer>& given) override {
    answer = given;
    answered.Notify();
  }
  v1::ErrorReason reason() const { return answer->Parse().error().detail().reason(); }

  std::shared_ptr<const Answer> answer;
  Notification answered;
};

// A sink that outlives its call.
std::shared_ptr<CallSink> Borrowed(CallSink* sink) { return {std::shared_ptr<void>(), sink}; }

// Returns the join of worker w0, which asks to be all of job "j".
v1::Op JoinAlone() {
  v1::Op op;
  v1::JoinRequest& join = *op.mutable_join();
  join.mutable_fence()->set_job_id("j");
  join.mutable_fence()->set_worker_id("w0");
  join.mutable_fence()->set_incarnation(1);
  join.mutable_spec()->set_min_workers(1);
  join.mutable_spec()->set_max_workers(1);
  join.mutable_spec()->mutable_lease()->set_seconds(3600);
  return op;
}

class CoreRunnerTest : public ::testing::Test {
 protected:
  // Starts a runner with worker w0 seated alone in job "j".
  void Start(const CoreRunner::Limits& limits, CoreOptions core = {}) {
    runner_ = std::make_unique<CoreRunner>(CoreRunner::Options{.core = core, .limits = limits},
                                           std::make_unique<MemoryJournal>());
    ASSERT_TRUE(runner_->Start().ok());
    FakeSink sink;
    Call(JoinAlone(), &sink);
    ASSERT_TRUE(sink.answer->Parse().has_join());
    generation_ = sink.answer->Parse().join().generation();
  }
  void TearDown() override {
    if (runner_ != nullptr) runner_->Stop();
  }

  // Blocks until all that was handed over has been applied, and its output delivered: the runner's
  // own thread may be busy with it.
  void Settle() {
    // The second turn begins when what the first put out has been delivered.
    for (int turn = 0; turn < 2; ++turn) InTurn([](Core*) {});
  }
  // Blocks until `task` has run, in turn with all other events.
  void InTurn(absl::FunctionRef<void(Core*)> task) {
    Notification done;
    runner_->WithCore([&](Core* core) {
      task(core);
      done.Notify();
    });
    done.WaitForNotification();
  }
  void Abandon(CallId id) {
    runner_->Abandon(id);
    Settle();
  }
  void Frame(const std::shared_ptr<AgentStream>& stream, std::unique_ptr<v1::AgentFrame> frame,
             size_t bytes = 0) {
    runner_->AgentFrame(stream, std::move(frame), bytes);
    Settle();
  }
  void WatchOpen(std::shared_ptr<WatchStream> stream, std::unique_ptr<WatchSource> source) {
    runner_->WatchOpen(std::move(stream), std::move(source));
    Settle();
  }
  void WatchWritable(const std::shared_ptr<WatchStream>& stream) {
    runner_->WatchWritable(stream);
    Settle();
  }
  void WatchClosed(const std::shared_ptr<WatchStream>& stream) {
    runner_->WatchClosed(stream);
    Settle();
  }
  CallId Call(const v1::Op& op, FakeSink* sink, size_t bytes = 0) {
    const CallId id = Bring(op, sink, bytes);
    Settle();
    return id;
  }
  // Brings a call while the runner is busy.
  CallId Bring(const v1::Op& op, FakeSink* sink, size_t bytes = 0) {
    const CallId id = runner_->NewCallId();
    runner_->Call(id, std::make_unique<v1::Op>(op), bytes, Borrowed(sink));
    return id;
  }
  v1::Fence Fence() const {
    v1::Fence fence;
    fence.set_job_id("j");
    fence.set_worker_id("w0");
    fence.set_incarnation(1);
    fence.set_generation(generation_);
    return fence;
  }
  v1::Op Put(const std::string& key, const std::string& value) const {
    v1::Op op;
    *op.mutable_txn()->mutable_fence() = Fence();
    v1::PutOp& put = *op.mutable_txn()->add_then()->mutable_put();
    put.set_key(key);
    put.set_value(value);
    return op;
  }
  v1::Op Get(const std::string& key) const {
    v1::Op op;
    *op.mutable_txn()->mutable_fence() = Fence();
    op.mutable_txn()->add_then()->mutable_get()->set_key(key);
    return op;
  }
  v1::Op Wait(const std::string& key) const {
    v1::Op op;
    *op.mutable_wait()->mutable_fence() = Fence();
    op.mutable_wait()->add_keys(key);
    op.mutable_wait()->mutable_timeout()->set_seconds(3000);
    return op;
  }
  void PutNow(const std::string& key, const std::string& value) {
    FakeSink sink;
    Call(Put(key, value), &sink);
    ASSERT_TRUE(sink.answer->Parse().has_txn()) << sink.answer->Parse().ShortDebugString();
  }

  void Hello(const std::shared_ptr<AgentStream>& stream, const std::string& node) {
    auto hello = std::make_unique<v1::AgentFrame>();
    hello->mutable_hello()->set_protocol_min(1);
    hello->mutable_hello()->set_protocol_max(1);
    hello->mutable_hello()->set_node(node);
    hello->mutable_hello()->set_agent_incarnation(7);
    Frame(stream, std::move(hello));
  }
  std::shared_ptr<FakeStream> Attach() {
    auto stream = std::make_shared<FakeStream>();
    Hello(stream, "node");
    EXPECT_EQ(stream->frames.size(), 1u);
    stream->WriteAll();
    return stream;
  }
  void Send(const std::shared_ptr<FakeStream>& stream, v1::Op op, uint64_t op_id, uint64_t ack = 0,
            size_t bytes = 0) {
    auto frame = std::make_unique<v1::AgentFrame>();
    frame->set_seq(++seq_);
    frame->set_ack(ack);
    op.set_op_id(op_id);
    *frame->mutable_ops()->add_ops() = std::move(op);
    Frame(stream, std::move(frame), bytes);
  }

  // Returns the rendezvous job of a new attempt of a submitted job, on a node of its own.
  std::string NewAttempt() {
    v1::Op sync;
    sync.mutable_sync_node()->set_node(absl::StrCat("n", ++nodes_));
    sync.mutable_sync_node()->set_node_uid(7);
    sync.mutable_sync_node()->mutable_info()->set_cpus(1);
    FakeSink synced, submitted;
    Call(sync, &synced);
    v1::Op submit;
    submit.mutable_submit_job()->mutable_spec()->set_name("x");
    submit.mutable_submit_job()->mutable_spec()->add_argv("./train");
    submit.mutable_submit_job()->mutable_spec()->set_max_processes(1);
    Call(submit, &submitted);
    const v1::JobRecord job = submitted.answer->Parse().submit_job().job();
    EXPECT_EQ(job.attempts(), 1) << job.ShortDebugString();
    return absl::StrCat(job.job_id(), ".1");
  }

  std::unique_ptr<CoreRunner> runner_;
  uint64_t generation_ = 0;
  uint64_t seq_ = 0;
  int nodes_ = 0;
};

TEST_F(CoreRunnerTest, FanOutToManyAgents_ReachesEachOnce) {
  Start({});
  constexpr int kAgents = 300, kRounds = 20;
  std::vector<std::shared_ptr<TakingStream>> streams;
  for (int i = 0; i < kAgents; ++i) {
    streams.push_back(std::make_shared<TakingStream>());
    Hello(streams.back(), absl::StrCat("node-", i));
  }
  for (int round = 1; round <= kRounds; ++round) {
    const std::string key = absl::StrCat("k", round);
    for (const auto& stream : streams) {
      auto frame = std::make_unique<v1::AgentFrame>();
      frame->set_seq(round);
      v1::Op& op = *frame->mutable_ops()->add_ops();
      op = Wait(key);
      op.set_op_id(round);
      runner_->AgentFrame(stream, std::move(frame));
    }
    PutNow(key, "v");
    for (const auto& stream : streams) stream->WaitForResults(round);
  }
}

TEST_F(CoreRunnerTest, Stop_SaysGoodbyeAlsoToAnAgentThatIsBeingWrittenTo) {
  Start({});
  const auto stream = Attach();
  Send(stream, Get("k"), 1);  // the write of its answer does not end
  runner_->SetEndsForGood("the job is over: caf\xe9");
  runner_->Stop();
  EXPECT_TRUE(stream->frames.back().goodbye().final()) << stream->frames.back().ShortDebugString();
  EXPECT_EQ(stream->frames.back().goodbye().reason(), "the job is over: caf\\xe9");
  EXPECT_TRUE(stream->closed().has_value());
}

// The stream of an attempt's agent.
class ScopedStream final : public FakeStream {
 public:
  explicit ScopedStream(std::string group)
      : identity_(std::make_shared<Identity>(
            Identity{.role = Role::kAttempt, .group = std::move(group)})) {}
  std::shared_ptr<const Identity> identity() const override { return identity_; }

 private:
  const std::shared_ptr<const Identity> identity_;
};

TEST_F(CoreRunnerTest, AgentOfAnAttempt_SpeaksForItsOwnJobOnly) {
  Start({});
  const auto stranger = std::make_shared<ScopedStream>(NewAttempt());
  Hello(stranger, "a");
  stranger->WriteAll();
  Send(stranger, Put("k", "v"), 1);
  stranger->WriteAll();
  const v1::OpError refused = stranger->Result(1).error();
  EXPECT_EQ(refused.code(), static_cast<int>(absl::StatusCode::kPermissionDenied));
  EXPECT_EQ(refused.detail().reason(), v1::ERROR_REASON_SCOPE);
  auto beat = std::make_unique<v1::AgentFrame>();
  beat->mutable_beat()->add_workers()->set_job_id("j");
  Frame(stranger, std::move(beat));
  ASSERT_TRUE(stranger->closed().has_value());
  EXPECT_EQ(rpc::GetReason(*stranger->closed()), v1::ERROR_REASON_SCOPE);

  seq_ = 0;
  const std::string group = NewAttempt();
  const auto own = std::make_shared<ScopedStream>(group);
  Hello(own, "b");
  own->WriteAll();
  v1::Op join = JoinAlone();
  join.mutable_join()->mutable_fence()->set_job_id(group);
  Send(own, join, 1);
  own->WriteAll();
  EXPECT_TRUE(own->Result(1).has_join()) << own->Result(1).ShortDebugString();
}

TEST_F(CoreRunnerTest, AgentOfAnAttemptThatIsUnknown_IsNotLetIn) {
  Start({});
  const auto stream = std::make_shared<ScopedStream>("gone-1.1");
  Hello(stream, "a");
  ASSERT_TRUE(stream->closed().has_value());
  EXPECT_EQ(rpc::GetReason(*stream->closed()), v1::ERROR_REASON_RENDEZVOUS_CLOSED);
}

TEST_F(CoreRunnerTest, AgentOfAnAttempt_TakesNoSessionOfAnother) {
  Start({});
  const auto first = Attach();  // "node"
  const auto thief = std::make_shared<ScopedStream>(NewAttempt());
  Hello(thief, "node");
  ASSERT_TRUE(thief->closed().has_value());
  EXPECT_EQ(rpc::GetReason(*thief->closed()), v1::ERROR_REASON_SCOPE);
  EXPECT_FALSE(first->closed().has_value());
  Send(first, Get("k"), 1);
  first->WriteAll();
  EXPECT_TRUE(first->Result(1).has_txn());
}

TEST_F(CoreRunnerTest, TooManyCallsOfAnAgent_AreRefusedUntilSomeAreAnswered) {
  Start({.calls_of_agent = 2});
  const auto stream = Attach();
  for (uint64_t op = 1; op <= 3; ++op) Send(stream, Wait("k"), op);
  stream->WriteAll();
  EXPECT_EQ(stream->Result(1).op_id(), 0u);  // held
  const v1::OpError refused = stream->Result(3).error();
  EXPECT_EQ(refused.code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(refused.detail().reason(), v1::ERROR_REASON_OVERLOADED);
  EXPECT_TRUE(refused.detail().retryable());
  EXPECT_GT(refused.detail().retry_after().nanos(), 0);
  EXPECT_EQ(runner_->overloaded(), 1u);
  PutNow("k", "v");  // by a unary call: not the agent's
  stream->WriteAll();
  EXPECT_TRUE(stream->Result(1).has_wait());
  EXPECT_TRUE(stream->Result(2).has_wait());
  Send(stream, Wait("k"), 4);
  stream->WriteAll();
  EXPECT_TRUE(stream->Result(4).has_wait());
}

TEST_F(CoreRunnerTest, TooManyCalls_AreRefused) {
  Start({.calls = 2});
  FakeSink held[2], third;
  CallId ids[2];
  for (int i = 0; i < 2; ++i) ids[i] = Call(Wait("k"), &held[i]);
  Call(Wait("k"), &third);
  ASSERT_TRUE(third.answered.HasBeenNotified());
  EXPECT_EQ(third.reason(), v1::ERROR_REASON_OVERLOADED);
  Abandon(ids[0]);
  FakeSink fourth;
  Call(Put("k", "v"), &fourth);
  EXPECT_TRUE(fourth.answer->Parse().has_txn());
  EXPECT_TRUE(held[1].answer->Parse().has_wait());
}

// If a coordinator has no time to read, a beat that has come counts, however late its turn is.
class BehindTest : public CoreRunnerTest {
 protected:
  void SetUp() override {
    runner_ = std::make_unique<CoreRunner>(
        CoreRunner::Options{.core = {}, .limits = {}, .clock = &clock_},
        std::make_unique<MemoryJournal>());
    runner_->set_on_catch_up([this](absl::Time asked) { asked_.push_back(asked); });
    ASSERT_TRUE(runner_->Start().ok());
    stream_ = Attach();
    for (const char* worker : {"w0", "w1"}) {
      v1::Op op = JoinAlone();
      v1::JoinRequest& join = *op.mutable_join();
      join.mutable_fence()->set_worker_id(worker);
      join.mutable_spec()->set_min_workers(2);
      join.mutable_spec()->set_max_workers(2);
      join.mutable_spec()->mutable_lease()->set_seconds(6);
      Send(stream_, op, ++ops_);
    }
    stream_->WriteAll();
    ASSERT_TRUE(stream_->Result(2).has_join());
  }
  void Beat(const std::vector<std::string>& workers) {
    auto frame = std::make_unique<v1::AgentFrame>();
    for (const std::string& worker : workers) {
      v1::WorkerBeat& beat = *frame->mutable_beat()->add_workers();
      beat.set_job_id("j");
      beat.set_worker_id(worker);
      beat.set_incarnation(1);
    }
    // Applied before the clock advances: seconds that pass at once look like a pause of the
    // coordinator.
    Frame(stream_, std::move(frame));
    stream_->WriteAll();
  }
  // Returns the count in turn with all other events.
  uint64_t Lost() {
    Settle();
    uint64_t lost = 0;
    InTurn([&](Core* core) { lost = core->stats().workers_lost; });
    return lost;
  }
  size_t Asked() {
    size_t asked = 0;
    InTurn([&](Core*) { asked = asked_.size(); });
    return asked;
  }
  // Lets time pass in which only w0 is read, until the runner asks whether more is unread.
  void Pass(int seconds) {
    for (int i = 0; i < seconds; ++i) {
      clock_.Advance(absl::Seconds(1));
      Beat({"w0"});
    }
    WaitUntil([&] { return Asked() > 0; });
    EXPECT_EQ(Lost(), 0u);
  }

  FakeClock clock_;
  std::shared_ptr<FakeStream> stream_;
  uint64_t ops_ = 0;
  std::vector<absl::Time> asked_;  // in the turn, which is free between events
};

TEST_F(BehindTest, BeatThatWasNotReadYet_KeepsItsWorker) {
  Pass(7);
  ASSERT_EQ(asked_.size(), 1u);
  clock_.Advance(absl::Seconds(1));
  Beat({"w0", "w1"});  // it had come in time
  runner_->CaughtUp(asked_[0]);
  EXPECT_EQ(Lost(), 0u);
}

TEST_F(BehindTest, NothingWasUnread_WorkerIsLost) {
  Pass(7);
  ASSERT_EQ(asked_.size(), 1u);
  runner_->CaughtUp(asked_[0]);
  EXPECT_EQ(Lost(), 1u);
}

TEST_F(CoreRunnerTest, CallsThatHoldTooManyBytes_AreRefusedUntilSomeAreAnswered) {
  Start({.held_bytes_of_callers = 4000});
  FakeSink held, refused;
  const CallId id = Call(Wait("k"), &held, 3000);
  EXPECT_GE(runner_->held_bytes(false), 3000u);
  Call(Wait("k"), &refused, 3000);
  ASSERT_TRUE(refused.answered.HasBeenNotified());
  EXPECT_EQ(refused.reason(), v1::ERROR_REASON_OVERLOADED);
  FakeSink small;  // small as those of a rendezvous: still held
  const CallId small_id = Call(Wait("k"), &small, 1500);
  EXPECT_FALSE(small.answered.HasBeenNotified());
  Abandon(small_id);
  FakeSink at_once;  // is not held
  Call(Get("k"), &at_once, 1000);
  EXPECT_TRUE(at_once.answer->Parse().has_txn());
  Abandon(id);
  EXPECT_EQ(runner_->held_bytes(false), 0u);
  FakeSink served;
  Call(Wait("k"), &served, 1000);
  EXPECT_FALSE(served.answered.HasBeenNotified());
  PutNow("k", "v");
  EXPECT_TRUE(served.answer->Parse().has_wait());
  EXPECT_EQ(runner_->held_bytes(false), 0u);
}

TEST_F(CoreRunnerTest, ManyKeysInOneWait_CountByTheirNumber) {
  Start({.held_bytes_of_callers = 4000});
  v1::Op wait = Wait("k");
  for (int i = 0; i < 100; ++i) wait.mutable_wait()->add_keys(absl::StrCat(i));
  FakeSink refused;
  Call(wait, &refused, 300);
  ASSERT_TRUE(refused.answered.HasBeenNotified());
  EXPECT_EQ(refused.reason(), v1::ERROR_REASON_OVERLOADED);
}

TEST_F(CoreRunnerTest, BytesThatAnAgentHolds_AreRefusedToItAlone) {
  Start({.held_bytes_of_agent = 2000, .held_bytes_of_callers = 100});
  const auto stream = Attach();
  Send(stream, Wait("k"), 1, /*ack=*/0, /*bytes=*/3000);
  Send(stream, Wait("k"), 2, /*ack=*/0, /*bytes=*/100);
  stream->WriteAll();
  EXPECT_EQ(stream->Result(1).error().detail().reason(), v1::ERROR_REASON_OVERLOADED);
  EXPECT_EQ(stream->Result(2).op_id(), 0u);  // held
  PutNow("k", "v");                          // by a unary call: not the agent's
  stream->WriteAll();
  EXPECT_TRUE(stream->Result(2).has_wait());
  EXPECT_EQ(runner_->held_bytes(true), 0u);
}

TEST_F(CoreRunnerTest, LargeOperationAmongSmallOnes_CountsAsALargeOne) {
  Start({.held_bytes_of_agent = 4000});
  const auto stream = Attach();
  auto frame = std::make_unique<v1::AgentFrame>();
  frame->set_seq(++seq_);
  v1::Op large = Wait(std::string(1000, 'a'));
  for (const char c : {'A', 'B', 'C', 'D'}) large.mutable_wait()->add_keys(std::string(1000, c));
  for (uint64_t id = 1; id <= 102; ++id) {
    v1::Op* const op = frame->mutable_ops()->add_ops();
    // A large one that waits, one that does not, a small one that waits, and as many that do not.
    *op = id == 1     ? large
          : id == 2   ? Put("b", std::string(1000, 'b'))
          : id == 102 ? Wait("c")
                      : Get("d");
    op->set_op_id(id);
  }
  const size_t bytes = frame->ByteSizeLong();
  Frame(stream, std::move(frame), bytes);
  stream->WriteAll();
  EXPECT_EQ(stream->Result(1).error().detail().reason(), v1::ERROR_REASON_OVERLOADED);
  EXPECT_TRUE(stream->Result(2).has_txn());
  EXPECT_EQ(stream->Result(102).op_id(), 0u);  // held
  EXPECT_LT(runner_->held_bytes(true), 1000u);
}

TEST_F(CoreRunnerTest, RequestsBehindABusyRunner_AreBoundedInBytes) {
  Start({.queued_bytes = 1000});
  Notification busy, go_on;
  std::thread applying([&] {
    runner_->WithCore([&](Core*) {
      busy.Notify();
      go_on.WaitForNotification();
    });
  });
  busy.WaitForNotification();
  FakeSink fits, too_much;
  Bring(Get("k"), &fits, 1000);
  Bring(Get("k"), &too_much, 1);
  ASSERT_TRUE(too_much.answered.HasBeenNotified());
  EXPECT_EQ(too_much.reason(), v1::ERROR_REASON_OVERLOADED);
  go_on.Notify();
  applying.join();
  fits.answered.WaitForNotification();
  EXPECT_TRUE(fits.answer->Parse().has_txn());
  FakeSink later;
  Call(Get("k"), &later, 1000);
  later.answered.WaitForNotification();
  EXPECT_TRUE(later.answer->Parse().has_txn());
}

TEST_F(CoreRunnerTest, AgentThatTakesNoAnswers_IsNotReadFromUntilItDoes) {
  Start({.unsent_bytes = 100'000});
  PutNow("k", std::string(60'000, 'x'));
  const auto stream = Attach();
  const int reads = stream->reads;
  Send(stream, Get("k"), 1);  // being written
  Send(stream, Get("k"), 2);  // waits: 60 kB
  EXPECT_EQ(stream->reads, reads + 2);
  Send(stream, Get("k"), 3);  // 120 kB wait
  EXPECT_EQ(stream->reads, reads + 2);
  stream->Written();  // takes both
  EXPECT_EQ(stream->reads, reads + 3);
  stream->WriteAll();
  for (uint64_t op = 1; op <= 3; ++op) EXPECT_TRUE(stream->Result(op).has_txn()) << op;
}

TEST_F(CoreRunnerTest, AgentThatNeverAcknowledges_LosesItsSession) {
  Start({.unacknowledged_bytes = 200'000});
  PutNow("k", std::string(60'000, 'x'));
  const auto stream = Attach();
  for (uint64_t op = 1; op <= 3; ++op) {
    Send(stream, Get("k"), op);
    stream->WriteAll();
  }
  EXPECT_FALSE(stream->closed().has_value());
  Send(stream, Get("k"), 4, /*ack=*/1);
  stream->WriteAll();
  EXPECT_FALSE(stream->closed().has_value());
  Send(stream, Get("k"), 5, /*ack=*/1);
  ASSERT_TRUE(stream->closed().has_value());
  EXPECT_EQ(stream->closed()->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(rpc::GetReason(*stream->closed()), v1::ERROR_REASON_OVERLOADED);
  EXPECT_EQ(runner_->agents(), 0u);
  seq_ = 0;
  const auto again = Attach();
  Send(again, Get("k"), 1);
  again->WriteAll();
  EXPECT_TRUE(again->Result(1).has_txn());
}

TEST_F(CoreRunnerTest, AnswerLargerThanAMessage_BecomesAnError) {
  Start({});
  PutNow("k", std::string(5000, 'x'));
  FakeSink whole;
  Call(Get("k"), &whole);
  const size_t size = whole.answer->bytes().size();
  runner_->Stop();
  for (const size_t limit : {size, size - 1}) {
    Start({.answer_bytes = limit});
    PutNow("k", std::string(5000, 'x'));
    FakeSink sink;
    Call(Get("k"), &sink);
    if (limit == size) {
      EXPECT_TRUE(sink.answer->Parse().has_txn());
    } else {
      EXPECT_EQ(sink.reason(), v1::ERROR_REASON_LIMIT);
      EXPECT_NE(sink.answer->Parse().error().message().find(absl::StrCat(size, " bytes")),
                std::string::npos);
    }
    runner_->Stop();
  }
}

TEST_F(CoreRunnerTest, SlowWatcher_HoldsOneBatchAndIsToldToReadAgain) {
  CoreOptions core;
  core.watch_bytes = 100'000;
  Start({}, core);
  auto slow = std::make_shared<FakeWatch>(), quick = std::make_shared<FakeWatch>();
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_keys(true);
  for (const auto& watch : {slow, quick}) WatchOpen(watch, WatchEvents(request));
  size_t seen = 0;
  for (int i = 0; i < 30; ++i) {
    WatchWritable(quick);
    PutNow("k", std::string(10'000, 'x'));
  }
  for (const v1::WatchBatch& batch : quick->batches) seen += batch.events_size();
  EXPECT_EQ(seen, 30u);
  EXPECT_FALSE(quick->closed.has_value());
  EXPECT_EQ(slow->batches.size(), 1u);  // the greeting, never taken
  const uint64_t resume = slow->batches[0].next_revision();
  WatchWritable(slow);
  ASSERT_TRUE(slow->closed.has_value());
  EXPECT_EQ(rpc::GetReason(*slow->closed), v1::ERROR_REASON_COMPACTED);
  EXPECT_GE(rpc::GetDetail(*slow->closed)->compacted_revision(), resume);
  for (const auto& watch : {slow, quick}) WatchClosed(watch);
  EXPECT_EQ(runner_->watchers(), 0u);
}

TEST_F(CoreRunnerTest, RevisionLargerThanAMessage_IsToldAsCompacted) {
  Start({.answer_bytes = 3000});
  auto watch = std::make_shared<FakeWatch>();
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_keys(true);
  WatchOpen(watch, WatchEvents(request));
  WatchWritable(watch);
  PutNow("small", std::string(2000, 'x'));
  ASSERT_EQ(watch->batches.size(), 2u);
  EXPECT_EQ(watch->batches[1].events_size(), 1);
  WatchWritable(watch);
  PutNow("large", std::string(3000, 'x'));
  ASSERT_TRUE(watch->closed.has_value());
  EXPECT_EQ(rpc::GetReason(*watch->closed), v1::ERROR_REASON_COMPACTED);
  // A new watch from that revision on sees what comes.
  auto next = std::make_shared<FakeWatch>();
  request.set_from_revision(rpc::GetDetail(*watch->closed)->compacted_revision() + 1);
  WatchOpen(next, WatchEvents(request));
  WatchWritable(next);
  PutNow("small", "y");
  EXPECT_EQ(next->batches.back().events(0).put().value(), "y");
  for (const auto& each : {watch, next}) WatchClosed(each);
}

TEST_F(CoreRunnerTest, TooManyWatches_AreRefused) {
  Start({.watchers = 1});
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_keys(true);
  auto first = std::make_shared<FakeWatch>(), second = std::make_shared<FakeWatch>();
  WatchOpen(first, WatchEvents(request));
  WatchOpen(second, WatchEvents(request));
  EXPECT_FALSE(first->closed.has_value());
  ASSERT_TRUE(second->closed.has_value());
  EXPECT_EQ(rpc::GetReason(*second->closed), v1::ERROR_REASON_OVERLOADED);
  WatchClosed(second);
  WatchClosed(first);
  auto third = std::make_shared<FakeWatch>();
  WatchOpen(third, WatchEvents(request));
  EXPECT_FALSE(third->closed.has_value());
  WatchClosed(third);
}

v1::Op SubmitOp(const std::string& name) {
  v1::Op op;
  op.mutable_submit_job()->mutable_spec()->set_name(name);
  op.mutable_submit_job()->mutable_spec()->add_argv("./train");
  op.mutable_submit_job()->mutable_spec()->set_max_processes(1);
  op.mutable_submit_job()->mutable_spec()->set_wait_for_nodes(true);
  return op;
}
v1::Op ControlOp(const std::string& job_id, v1::JobAction action) {
  v1::Op op;
  op.mutable_control_job()->set_job_id(job_id);
  op.mutable_control_job()->set_action(action);
  return op;
}

TEST_F(CoreRunnerTest, SlowWatcherOfJobs_GetsTheLatestState_AndNoQueueGrows) {
  Start({});
  auto slow = std::make_shared<FakeJobsWatch>(), quick = std::make_shared<FakeJobsWatch>(),
       other = std::make_shared<FakeJobsWatch>();
  v1::WatchJobsRequest of_other;
  of_other.set_job_id("b-2");
  FakeSink submitted[2];
  Call(SubmitOp("a"), &submitted[0]);
  Call(SubmitOp("b"), &submitted[1]);
  for (const auto& watch : {slow, quick}) WatchOpen(watch, WatchJobs({}, nullptr));
  WatchOpen(other, WatchJobs(of_other, nullptr));
  WatchWritable(other);
  ASSERT_EQ(slow->batches.size(), 1u);
  EXPECT_EQ(slow->batches[0].jobs_size(), 2);
  for (int i = 0; i < 10; ++i) {
    WatchWritable(quick);
    FakeSink sink;
    Call(ControlOp("a-1", i % 2 == 0 ? v1::JOB_ACTION_SUSPEND : v1::JOB_ACTION_RESUME), &sink);
  }
  EXPECT_EQ(quick->batches.size(), 11u);
  EXPECT_EQ(quick->batches[1].jobs(0).state(), v1::JOB_STATE_SUSPENDED);
  EXPECT_EQ(other->batches.size(), 1u) << "another job is none of its business";
  EXPECT_EQ(slow->batches.size(), 1u);
  WatchWritable(slow);
  ASSERT_EQ(slow->batches.size(), 2u);
  ASSERT_EQ(slow->batches[1].jobs_size(), 1);
  EXPECT_EQ(slow->batches[1].jobs(0).SerializeAsString(),
            quick->batches.back().jobs(0).SerializeAsString());
  // The next watch continues where that one was.
  v1::WatchJobsRequest request;
  request.set_seen_revision(quick->batches[0].seen_revision());
  auto next = std::make_shared<FakeJobsWatch>();
  WatchOpen(next, WatchJobs(request, nullptr));
  ASSERT_EQ(next->batches.size(), 1u);
  ASSERT_EQ(next->batches[0].jobs_size(), 1);
  EXPECT_EQ(next->batches[0].jobs(0).job_id(), "a-1");
  FakeSink cancelled, removed;
  Call(ControlOp("b-2", v1::JOB_ACTION_CANCEL), &cancelled);
  WatchWritable(other);
  EXPECT_EQ(other->batches.back().jobs(0).state(), v1::JOB_STATE_CANCELLED);
  Call(ControlOp("b-2", v1::JOB_ACTION_REMOVE), &removed);
  ASSERT_TRUE(other->closed.has_value());
  EXPECT_TRUE(absl::IsNotFound(*other->closed));
  WatchWritable(quick);
  EXPECT_EQ(quick->batches.back().gone(0), "b-2");
  for (const auto& watch : {slow, quick, other, next}) WatchClosed(watch);
}

TEST_F(CoreRunnerTest, FrameAfterStop_EndsItsStream) {
  Start({});
  const auto stream = Attach();
  runner_->Stop();
  ASSERT_TRUE(stream->closed().has_value());
  EXPECT_TRUE(stream->frames.back().has_goodbye());
  const auto late = std::make_shared<FakeStream>();
  Send(late, Get("k"), 1);
  ASSERT_TRUE(late->closed().has_value());
  EXPECT_EQ(rpc::GetReason(*late->closed()), v1::ERROR_REASON_STOPPING);
}

// A journal in memory that writes a snapshot when the test says so.
class SlowSnapshots final : public Journal {
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
    progress_ = progress;
    memory_.Start(std::move(progress));
  }
  void Append(uint64_t revision, std::string record) override {
    records.emplace_back(revision, record);
    memory_.Append(revision, std::move(record));
  }
  void WriteSnapshot(uint64_t, std::unique_ptr<Replica> given,
                     std::function<void(absl::Status)> done) override {
    replica = std::move(given);
    done_ = std::move(done);
    (asked.HasBeenNotified() ? asked_again : asked).Notify();
  }
  uint64_t records_since_snapshot() const override { return 0; }
  uint64_t bytes_since_snapshot() const override { return 0; }
  void Stop() override {}

  void Fail() {
    Progress progress;
    progress.status = absl::DataLossError("I/O error");
    progress_(progress);
  }
  void Finish(const absl::Status& status) { std::exchange(done_, nullptr)(status); }

  // Once, and once more.
  Notification asked, asked_again;
  std::vector<std::pair<uint64_t, std::string>> records;
  std::unique_ptr<Replica> replica;

 private:
  MemoryJournal memory_;
  std::function<void(const Progress&)> progress_;
  std::function<void(absl::Status)> done_;
};

class SnapshotTest : public ::testing::Test {
 protected:
  // A request for a snapshot, and its answer.
  struct Asked {
    explicit Asked(CoreRunner* runner) {
      runner->Snapshot([this](absl::StatusOr<uint64_t> told) {
        result = std::move(told);
        answered.Notify();
      });
    }
    const absl::Status& Wait() {
      answered.WaitForNotification();
      return result.status();
    }
    absl::StatusOr<uint64_t> result;
    Notification answered;
  };

  SnapshotTest()
      : journal_(new SlowSnapshots),
        runner_({.core = {}, .limits = {}}, std::unique_ptr<Journal>(journal_)) {
    EXPECT_TRUE(runner_.Start().ok());
  }

  SlowSnapshots* const journal_;
  CoreRunner runner_;
};

TEST_F(SnapshotTest, OneIsWrittenAtATime) {
  Asked first(&runner_);
  journal_->asked.WaitForNotification();
  Asked second(&runner_);
  EXPECT_EQ(rpc::GetReason(second.Wait()), v1::ERROR_REASON_OVERLOADED);
  EXPECT_FALSE(first.answered.HasBeenNotified());
  journal_->Finish(absl::OkStatus());
  EXPECT_TRUE(first.Wait().ok()) << first.result.status();
}

TEST_F(SnapshotTest, JournalThatFails_AnswersWhoWaitsAndRefusesTheNext) {
  Asked first(&runner_);
  journal_->asked.WaitForNotification();
  journal_->Fail();
  EXPECT_EQ(rpc::GetReason(first.Wait()), v1::ERROR_REASON_JOURNAL_FAILED);
  Asked second(&runner_);
  EXPECT_EQ(rpc::GetReason(second.Wait()), v1::ERROR_REASON_JOURNAL_FAILED);
  journal_->Finish(absl::DataLossError("I/O error"));
}

TEST_F(SnapshotTest, Stop_AnswersWhoWaits) {
  Asked first(&runner_);
  journal_->asked.WaitForNotification();
  runner_.Stop();
  EXPECT_EQ(rpc::GetReason(first.Wait()), v1::ERROR_REASON_STOPPING);
  Asked second(&runner_);
  EXPECT_EQ(rpc::GetReason(second.Wait()), v1::ERROR_REASON_STOPPING);
}

class WrittenSnapshotTest : public SnapshotTest {
 protected:
  v1::OpResult Call(const v1::Op& op) {
    FakeSink sink;
    runner_.Call(runner_.NewCallId(), std::make_unique<v1::Op>(op), 0, Borrowed(&sink));
    sink.answered.WaitForNotification();
    return sink.answer->Parse();
  }
  // Returns the parts that the journal is given, as one snapshot.
  v1::CoordinatorSnapshot Written(Replica* replica) {
    std::string all;
    EXPECT_TRUE(replica
                    ->Write([&](absl::string_view part) {
                      all += std::string(part);
                      return absl::OkStatus();
                    })
                    .ok());
    v1::CoordinatorSnapshot snapshot;
    EXPECT_TRUE(snapshot.ParseFromString(all));
    return snapshot;
  }
};

TEST_F(WrittenSnapshotTest, IsBuiltBesideTheCore_AndOfTheCoreOnlyIfTheJournalIsDamaged) {
  ASSERT_TRUE(Call(JoinAlone()).has_join());
  Asked asked(&runner_);
  journal_->asked.WaitForNotification();
  ASSERT_TRUE(journal_->replica->NeedsHistory());
  for (const auto& [revision, record] : journal_->records)
    ASSERT_TRUE(journal_->replica->Replay(record).ok());
  const v1::CoordinatorSnapshot built = Written(journal_->replica.get());
  EXPECT_EQ(built.revision(), journal_->records.back().first);
  // If what the journal holds cannot be read, the snapshot is the state in memory, and the caller
  // that asked for one gets it.
  journal_->Finish(absl::DataLossError("a record has a wrong checksum"));
  journal_->asked_again.WaitForNotification();
  EXPECT_FALSE(asked.answered.HasBeenNotified());
  ASSERT_FALSE(journal_->replica->NeedsHistory());
  EXPECT_EQ(Written(journal_->replica.get()).SerializeAsString(), built.SerializeAsString());
  journal_->Finish(absl::OkStatus());
  EXPECT_TRUE(asked.Wait().ok()) << asked.result.status();
  EXPECT_EQ(*asked.result, built.revision());
  EXPECT_EQ(runner_.snapshot_failures(), 1u);
  EXPECT_TRUE(runner_.snapshot_ok());
}

// Answers a call by making the next one, as clients do that never pause.
class ChainSink final : public CallSink {
 public:
  ChainSink(CoreRunner* runner, v1::Op op, int calls)
      : runner_(runner), op_(std::move(op)), left_(calls) {}
  void Next() {
    runner_->Call(runner_->NewCallId(), std::make_unique<v1::Op>(op_), 0, Borrowed(this));
  }
  void OnAnswer(const std::shared_ptr<const Answer>&) override {
    if (--left_ > 0) {
      Next();
    } else {
      done.Notify();
    }
  }
  int left() const { return left_; }
  Notification done;

 private:
  CoreRunner* const runner_;
  const v1::Op op_;
  std::atomic<int> left_;
};

TEST_F(CoreRunnerTest, WhoBringsACallWhileOthersNeverPause_IsLetGoAfterAWhile) {
  Start({});
  // Each answer, on the thread that applies, brings the next call: there is always one more.
  ChainSink chain(runner_.get(), Get("k"), 100'000);
  chain.Next();
  EXPECT_GT(chain.left(), 1'000) << "the caller of the first applied those of all others";
  chain.done.WaitForNotification();
}

// A journal that is durable when the test says so, and hands its records to the next one.
class HandedJournal final : public Journal {
 public:
  using Records = std::vector<std::pair<uint64_t, std::string>>;
  explicit HandedJournal(Records records = {}, uint64_t term = 1, uint64_t restored = 0)
      : term_(term), restored_(restored), records_(std::move(records)) {}

  static uint64_t RestoreIdOf(uint64_t restored) { return restored * 3; }

  const std::string& cluster_id() const override { return id_; }
  uint64_t term() const override { return term_; }
  uint64_t restored() const override { return restored_; }
  uint64_t restore_id() const override { return RestoreIdOf(restored_); }
  const std::string& description() const override { return id_; }
  absl::Status Replay(
      const std::function<absl::Status(uint64_t, absl::string_view)>&,
      const std::function<absl::Status(uint64_t, absl::string_view)>& record) override {
    for (const auto& [revision, payload] : records_) {
      if (absl::Status status = record(revision, payload); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  void Start(std::function<void(const Progress&)> progress) override {
    progress_ = std::move(progress);
  }
  void Append(uint64_t revision, std::string record) override {
    records_.emplace_back(revision, std::move(record));
    if (!held_) Release();
  }
  void WriteSnapshot(uint64_t, std::unique_ptr<Replica>,
                     std::function<void(absl::Status)> done) override {
    done(absl::OkStatus());
  }
  uint64_t records_since_snapshot() const override { return 0; }
  uint64_t bytes_since_snapshot() const override { return 0; }
  void Stop() override {}

  const Records& records() const { return records_; }
  void Hold() { held_ = true; }
  // Called within an event.
  void Release() {
    Progress progress;
    progress.durable_revision = records_.back().first;
    progress_(progress);
  }

 private:
  const std::string id_ = "00000000000000000000000000000001";
  const uint64_t term_;
  const uint64_t restored_;
  std::function<void(const Progress&)> progress_;
  Records records_;
  bool held_ = false;
};

TEST_F(CoreRunnerTest, CopyMarkedAsRestored_EndsItsGenerationsOnce) {
  HandedJournal::Records records;
  // Starts on what the former runner has written; returns the generation of "j".
  const auto run = [&](uint64_t term, uint64_t restored, const v1::Op& op, FakeSink* sink) {
    auto owned = std::make_unique<HandedJournal>(records, term, restored);
    HandedJournal* const journal = owned.get();
    runner_ = std::make_unique<CoreRunner>(CoreRunner::Options{}, std::move(owned));
    EXPECT_TRUE(runner_->Start().ok());
    Call(op, sink);
    uint64_t generation = 0;
    InTurn([&](Core* core) {
      v1::StatusReply status;
      core->FillStatus(&status);
      generation = status.jobs(0).generation();
      EXPECT_EQ(status.header().term(), term);
      EXPECT_EQ(status.header().restore_id(), HandedJournal::RestoreIdOf(restored));
    });
    runner_->Stop();
    records = journal->records();
    return generation;
  };
  FakeSink join, stale, again;
  EXPECT_EQ(run(1, 0, JoinAlone(), &join), 1u);
  generation_ = 1;
  EXPECT_EQ(run(70000, 69999, Put("k", "v"), &stale), 1 + 65536 + 70000u);
  EXPECT_EQ(stale.reason(), v1::ERROR_REASON_STALE_GENERATION);
  EXPECT_EQ(run(70001, 69999, Put("k", "v"), &again), 1 + 65536 + 70000u)
      << "it has taken note of it";
}

TEST_F(CoreRunnerTest, TermBeyondTheLast_IsRefused) {
  CoreRunner runner(CoreRunner::Options{},
                    std::make_unique<HandedJournal>(HandedJournal::Records(), Core::kMaxTerm + 1));
  const absl::Status status = runner.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("empty directory"));
}

TEST_F(CoreRunnerTest, AnswerLargerThanAMessage_SaysWhetherItWasDone) {
  CoreRunner::Limits limits;
  limits.answer_bytes = 10000;
  Start(limits);
  PutNow("large", std::string(20000, 'x'));
  // This one only reads, so it is as if it had not been asked.
  FakeSink read;
  Call(Get("large"), &read);
  EXPECT_EQ(read.reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_EQ(read.answer->Parse().error().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
  // This one writes and reads: it was done, and a repeat does not do it again.
  v1::Op op = Put("count", "1");
  op.mutable_txn()->mutable_fence()->set_request_id(5);
  op.mutable_txn()->mutable_then(0)->mutable_add()->set_key("count");
  op.mutable_txn()->mutable_then(0)->mutable_add()->set_delta(1);
  op.mutable_txn()->add_then()->mutable_get()->set_key("large");
  uint64_t revision = 0;
  for (int times = 0; times < 2; ++times) {
    FakeSink written;
    Call(op, &written);
    const v1::OpError error = written.answer->Parse().error();
    EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_RESULT_TOO_LARGE);
    EXPECT_EQ(error.code(), static_cast<int>(absl::StatusCode::kOutOfRange));
    EXPECT_THAT(error.message(), ::testing::HasSubstr("was done"));
    EXPECT_GT(error.detail().revision(), 0u);
    EXPECT_TRUE(times == 0 || error.detail().revision() == revision);
    revision = error.detail().revision();
  }
  FakeSink count;
  Call(Get("count"), &count);
  const v1::KeyValue kv = count.answer->Parse().txn().results(0).kvs(0);
  EXPECT_EQ(kv.value(), "1");
  EXPECT_EQ(kv.mod_revision(), revision);
}

TEST_F(CoreRunnerTest, ErrorLargerThanAMessage_KeepsItsReasonAndSaysLess) {
  CoreRunner::Limits limits;
  limits.answer_bytes = 10000;
  Start(limits);
  constexpr int kWorkers = 100;
  std::vector<std::unique_ptr<FakeSink>> sinks;
  for (int i = 0; i < kWorkers; ++i) {
    v1::Op join = JoinAlone();
    v1::JoinRequest& request = *join.mutable_join();
    request.mutable_fence()->set_job_id("large");
    request.mutable_fence()->set_worker_id(absl::StrCat(std::string(200, 'w'), i));
    request.mutable_spec()->set_min_workers(kWorkers);
    request.mutable_spec()->set_max_workers(kWorkers);
    sinks.push_back(std::make_unique<FakeSink>());
    Call(join, sinks.back().get());
  }
  const v1::JoinReply seat = sinks[0]->answer->Parse().join();
  v1::Op arrive;
  v1::ArriveRequest& request = *arrive.mutable_arrive();
  request.mutable_fence()->set_job_id("large");
  request.mutable_fence()->set_worker_id(absl::StrCat(std::string(200, 'w'), 0));
  request.mutable_fence()->set_incarnation(1);
  request.mutable_fence()->set_generation(seat.generation());
  request.set_barrier_id("b");
  request.set_rank(seat.rank());
  FakeSink waiting;
  Call(arrive, &waiting);
  v1::Op cancel;
  cancel.mutable_cancel_barrier()->mutable_fence()->set_job_id("large");
  cancel.mutable_cancel_barrier()->set_barrier_id("b");
  cancel.mutable_cancel_barrier()->set_reason("enough");
  FakeSink cancelled;
  Call(cancel, &cancelled);
  const v1::OpError error = waiting.answer->Parse().error();
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_CANCELLED_BY_PEER);
  EXPECT_THAT(error.message(), ::testing::HasSubstr("enough"));
  EXPECT_LE(waiting.answer->bytes().size(), limits.answer_bytes);
}

TEST_F(CoreRunnerTest, Events_OfOneJob_LookAtItsWatchersOnly) {
  Start({});
  constexpr int kOthers = 200;
  std::vector<std::shared_ptr<FakeWatch>> watches;
  for (int i = 0; i < kOthers; ++i) {
    v1::Op join = JoinAlone();
    join.mutable_join()->mutable_fence()->set_job_id(absl::StrCat("other", i));
    FakeSink sink;
    Call(join, &sink);
    v1::WatchRequest request;
    request.set_job_id(absl::StrCat("other", i));
    request.set_keys(true);
    watches.push_back(std::make_shared<FakeWatch>());
    WatchOpen(watches.back(), WatchEvents(request));
  }
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_keys(true);
  auto watch = std::make_shared<FakeWatch>();
  WatchOpen(watch, WatchEvents(request));
  WatchWritable(watch);
  const uint64_t before = runner_->watchers_visited();
  for (int i = 0; i < 10; ++i) PutNow("k", absl::StrCat(i));
  EXPECT_EQ(runner_->watchers_visited() - before, 10u);
  EXPECT_EQ(watch->batches.size(), 2u)
      << "the first says from where it sees, the next waits for it";
  WatchClosed(watch);
  const uint64_t closed = runner_->watchers_visited();
  PutNow("k", "v");
  EXPECT_EQ(runner_->watchers_visited(), closed);
  EXPECT_EQ(runner_->watchers(), static_cast<uint64_t>(kOthers));
  for (const auto& other : watches) WatchClosed(other);
}

// A watch that is called on any thread.
class WaitingWatch final : public WatchStream {
 public:
  void Write(const google::protobuf::MessageLite& message) override {
    MutexLock lock(&mu_);
    batches_.push_back(dynamic_cast<const v1::WatchBatch&>(message));
    changed_.SignalAll();
  }
  void Close(const absl::Status&) override {}
  // Blocks until batch `number` was written, and returns it.
  v1::WatchBatch Batch(size_t number) {
    MutexLock lock(&mu_);
    while (batches_.size() <= number) changed_.Wait(&mu_);
    return batches_[number];
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<v1::WatchBatch> batches_ ABSL_GUARDED_BY(mu_);
};

TEST_F(CoreRunnerTest, Watcher_SeesWhatIsDurableWhenItIs) {
  auto owned = std::make_unique<HandedJournal>();
  HandedJournal* const journal = owned.get();
  runner_ = std::make_unique<CoreRunner>(CoreRunner::Options{}, std::move(owned));
  ASSERT_TRUE(runner_->Start().ok());
  FakeSink sink;
  Call(JoinAlone(), &sink);
  generation_ = 1;
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_keys(true);
  auto early = std::make_shared<WaitingWatch>();
  WatchOpen(early, WatchEvents(request));
  WatchWritable(early);
  journal->Hold();
  v1::Op put = Put("k", "v");
  put.mutable_txn()->mutable_then(0)->mutable_put()->set_klass(v1::KV_CLASS_DURABLE);
  const uint64_t from = early->Batch(0).next_revision();
  FakeSink written;
  Call(put, &written);
  // This watch comes while the change is on its way to the disk.
  auto late = std::make_shared<WaitingWatch>();
  request.set_from_revision(from);
  WatchOpen(late, WatchEvents(request));
  WatchWritable(late);
  EXPECT_EQ(late->Batch(0).events_size(), 0);
  EXPECT_FALSE(written.answered.HasBeenNotified());
  runner_->WithCore([journal](Core*) { journal->Release(); });
  for (const auto& watch : {early, late}) {
    EXPECT_EQ(watch->Batch(1).events(0).put().value(), "v");
  }
  written.answered.WaitForNotification();
  WatchClosed(early);
  WatchClosed(late);
}

TEST_F(CoreRunnerTest, WatchOfJobs_ShowsWhatIsDurable_AndEndsWithTheCoordinator) {
  auto owned = std::make_unique<HandedJournal>();
  HandedJournal* const journal = owned.get();
  runner_ = std::make_unique<CoreRunner>(CoreRunner::Options{}, std::move(owned));
  ASSERT_TRUE(runner_->Start().ok());
  auto watch = std::make_shared<FakeJobsWatch>();
  WatchOpen(watch, WatchJobs({}, nullptr));
  WatchWritable(watch);
  const auto batches = [&] {
    size_t count = 0;
    InTurn([&](Core*) { count = watch->batches.size(); });
    return count;
  };
  EXPECT_EQ(batches(), 1u);
  journal->Hold();
  FakeSink sink;
  Call(SubmitOp("a"), &sink);
  EXPECT_EQ(batches(), 1u) << "it may still be lost";
  runner_->WithCore([journal](Core*) { journal->Release(); });
  sink.answered.WaitForNotification();
  EXPECT_EQ(batches(), 2u);
  runner_->Stop();
  ASSERT_TRUE(watch->closed.has_value());
  EXPECT_EQ(rpc::GetReason(*watch->closed), v1::ERROR_REASON_STOPPING);
}

}  // namespace
}  // namespace muster::coordinator
