#include "agent/relay_core.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/fake_op_sender.h"
#include "base/fake_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class RelayCoreTest : public ::testing::Test {
 protected:
  RelayCoreTest() {
    RelayCore::Options options;
    options.node = "node-a";
    options.incarnation = 9;
    options.clock = &clock_;
    options.connected = [this] { return connected_; };
    options.process_state = [this](int64_t pid) {
      const auto it = states_.find(pid);
      return it == states_.end() ? "gone" : it->second;
    };
    core_ = std::make_unique<RelayCore>(std::move(options), &upstream_);
  }

  static v1::Fence Fence(int rank, uint64_t generation = 1) {
    v1::Fence fence;
    fence.set_job_id("job");
    fence.set_worker_id(absl::StrCat("w", rank));
    fence.set_incarnation(100 + rank);
    fence.set_generation(generation);
    fence.set_term_seen(1);
    return fence;
  }
  void Seat(int rank, uint64_t generation = 1) {
    v1::Op op;
    *op.mutable_join()->mutable_fence() = Fence(rank, 0);
    op.mutable_join()->set_pid(1000 + rank);
    states_[1000 + rank] = "running";
    Submit(absl::StrCat("join", rank), std::move(op));
    v1::OpResult result;
    result.mutable_join()->set_rank(rank);
    result.mutable_join()->set_generation(generation);
    result.mutable_join()->mutable_header()->set_term(3);
    upstream_.Answer(result);
    results_.clear();
  }
  static v1::Op Arrive(int rank, uint64_t counter = 0, const std::string& payload = "") {
    v1::Op op;
    v1::ArriveRequest& arrive = *op.mutable_arrive();
    *arrive.mutable_fence() = Fence(rank);
    arrive.set_barrier_id("b");
    arrive.set_counter(counter);
    arrive.set_rank(rank);
    arrive.set_payload(payload);
    arrive.set_call_site(5);
    return op;
  }
  void Submit(const std::string& name, v1::Op op) {
    core_->Submit(std::move(op), [this, name](const v1::OpResult& result) {
      results_[name] = result.has_error() ? absl::StrCat("error ", result.error().message()) : "ok";
      last_ = result;
    });
  }
  v1::HeartbeatReply Beat(int rank, int64_t step, uint64_t generation = 1) {
    v1::Op op;
    *op.mutable_heartbeat()->mutable_fence() = Fence(rank, generation);
    op.mutable_heartbeat()->set_step(step);
    op.mutable_heartbeat()->set_phase("training");
    op.mutable_heartbeat()->set_last_collective("all_reduce #4");
    op.mutable_heartbeat()->set_progress(99);
    if (saving_) op.mutable_heartbeat()->mutable_save()->set_written_bytes(7);
    last_.Clear();
    Submit("beat", std::move(op));
    return last_.heartbeat();
  }
  std::vector<std::string> BeatStates() {
    std::vector<std::string> out;
    const v1::Beat beat = core_->MakeBeat();
    for (const v1::WorkerBeat& one : beat.workers()) {
      out.push_back(absl::StrCat(one.worker_id(), " ", one.process_state()));
    }
    return out;
  }
  static v1::OpResult Error(v1::ErrorReason reason) {
    v1::OpResult result;
    *result.mutable_error() =
        rpc::ToOpError(rpc::ErrorWithReason(absl::StatusCode::kAborted, "no", reason));
    return result;
  }

  FakeClock clock_;
  FakeOpSender upstream_;
  bool connected_ = true;
  bool saving_ = false;
  std::map<int64_t, std::string> states_;
  std::map<std::string, std::string> results_;
  v1::OpResult last_;
  std::unique_ptr<RelayCore> core_;
};

TEST_F(RelayCoreTest, AllLocalRanksArrive_OneOperationWithTheLastOfThem) {
  for (int rank : {0, 1, 2}) Seat(rank);
  Submit("a0", Arrive(0));
  clock_.Advance(absl::Microseconds(300));
  Submit("a1", Arrive(1));
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  Submit("a2", Arrive(2));
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  const v1::ArriveManyRequest many = upstream_.ops()[0].arrive_many();
  EXPECT_THAT(many.ranks(), ElementsAre(0, 1, 2));
  EXPECT_THAT(many.incarnations(), ElementsAre(100, 101, 102));
  EXPECT_THAT(many.lateness_us(), ElementsAre(300, 0, 0));
  EXPECT_EQ(many.fence().worker_id(), "node-a");
  EXPECT_EQ(many.fence().generation(), 1u);
  EXPECT_EQ(many.fence().term_seen(), 1u);
  EXPECT_EQ(many.call_site(), 5u);
  EXPECT_THAT(many.payloads(), IsEmpty());
  upstream_.Answer({});
  EXPECT_THAT(results_, SizeIs(3));
}

TEST_F(RelayCoreTest, AllLocalRanksArrive_WhatTheyHaveSeenAndWaitedIsTheMost) {
  for (int rank : {0, 1, 2}) Seat(rank);
  for (int rank : {0, 1, 2}) {
    v1::Op op = Arrive(rank);
    op.mutable_arrive()->mutable_fence()->set_revision_seen(rank == 1 ? 70 : 50);
    op.mutable_arrive()->mutable_waited()->set_seconds(rank == 1 ? 0 : 10 + rank);
    Submit(absl::StrCat("a", rank), op);
  }
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  const v1::ArriveManyRequest many = upstream_.ops()[0].arrive_many();
  EXPECT_EQ(many.fence().revision_seen(), 70u);
  EXPECT_EQ(many.waited().seconds(), 12);
  EXPECT_THAT(many.waited_less_us(), ElementsAre(2'000'000, 12'000'000, 0));
}

TEST_F(RelayCoreTest, LateLocalRank_TheOthersGoAfterTheWindow) {
  for (int rank : {0, 1, 2}) Seat(rank);
  Submit("a0", Arrive(0));
  Submit("a1", Arrive(1));
  EXPECT_EQ(core_->Tick(), clock_.Now() + absl::Milliseconds(1));
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_EQ(core_->Tick(), absl::InfiniteFuture());
  Submit("a2", Arrive(2));
  clock_.Advance(absl::Milliseconds(1));
  core_->Tick();
  ASSERT_THAT(upstream_.ops(), SizeIs(2));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(0, 1));
  EXPECT_EQ(upstream_.ops()[1].arrive().rank(), 2);
}

TEST_F(RelayCoreTest, SubsetBarrier_WaitsForItsLocalParticipantsOnly) {
  for (int rank : {0, 1, 2}) Seat(rank);
  for (int rank : {0, 2}) {
    v1::Op op = Arrive(rank);
    for (const int participant : {0, 2, 7}) op.mutable_arrive()->add_participants(participant);
    Submit(absl::StrCat("a", rank), std::move(op));
  }
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().participants(), ElementsAre(0, 2, 7));
}

TEST_F(RelayCoreTest, Payloads_GoByRank) {
  for (int rank : {0, 1}) Seat(rank);
  Submit("a1", Arrive(1, 0, "one"));
  Submit("a0", Arrive(0, 0, "zero"));
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(1, 0));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().payloads(), ElementsAre("one", "zero"));
}

TEST_F(RelayCoreTest, OtherCallSiteOrOnlyOneWithPayload_IsToldApart) {
  for (int rank : {0, 1, 2}) Seat(rank);
  Submit("a0", Arrive(0));
  v1::Op elsewhere = Arrive(1);
  elsewhere.mutable_arrive()->set_call_site(6);
  Submit("a1", std::move(elsewhere));
  Submit("a2", Arrive(2, 0, "p"));
  const std::vector<v1::Op> ops = upstream_.ops();
  ASSERT_THAT(ops, SizeIs(3));
  for (const v1::Op& op : ops) EXPECT_TRUE(op.has_arrive());
}

TEST_F(RelayCoreTest, RepeatedArrival_CountsOnceAndBothCallsAreAnswered) {
  for (int rank : {0, 1}) Seat(rank);
  Submit("first", Arrive(0));
  Submit("again", Arrive(0));
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  Submit("other", Arrive(1));
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_THAT(upstream_.ops()[0].arrive_many().ranks(), ElementsAre(0, 1));
  upstream_.Answer({});
  EXPECT_THAT(results_, SizeIs(3));
}

TEST_F(RelayCoreTest, ErrorAboutOneRank_EachIsSentOnItsOwn) {
  for (int rank : {0, 1}) Seat(rank);
  Submit("a0", Arrive(0));
  Submit("a1", Arrive(1));
  upstream_.Answer(Error(v1::ERROR_REASON_SUPERSEDED));
  EXPECT_THAT(results_, IsEmpty());
  const std::vector<v1::Op> ops = upstream_.ops();
  ASSERT_THAT(ops, SizeIs(2));
  EXPECT_EQ(ops[0].arrive().rank(), 0);
  EXPECT_EQ(ops[1].arrive().rank(), 1);
  upstream_.Answer(Error(v1::ERROR_REASON_SUPERSEDED));
  upstream_.Answer({});
  EXPECT_EQ(results_["a0"], "error no");
  EXPECT_EQ(results_["a1"], "ok");
}

TEST_F(RelayCoreTest, ErrorAboutTheBarrier_IsEverybodys) {
  for (int rank : {0, 1}) Seat(rank);
  Submit("a0", Arrive(0));
  Submit("a1", Arrive(1));
  upstream_.Answer(Error(v1::ERROR_REASON_BARRIER_TIMEOUT));
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  EXPECT_EQ(results_["a0"], "error no");
  EXPECT_EQ(results_["a1"], "error no");
}

TEST_F(RelayCoreTest, Heartbeat_IsAnsweredHereAndFillsTheBeat) {
  Seat(0);
  const v1::HeartbeatReply reply = Beat(0, 7);
  EXPECT_THAT(upstream_.ops(), IsEmpty());
  EXPECT_EQ(reply.generation(), 1u);
  EXPECT_FALSE(reply.generation_ended());
  EXPECT_EQ(reply.header().term(), 3u);
  const v1::Beat beat = core_->MakeBeat();
  ASSERT_EQ(beat.workers_size(), 1);
  EXPECT_EQ(beat.workers(0).job_id(), "job");
  EXPECT_EQ(beat.workers(0).worker_id(), "w0");
  EXPECT_EQ(beat.workers(0).incarnation(), 100u);
  EXPECT_EQ(beat.workers(0).step(), 7);
  EXPECT_EQ(beat.workers(0).phase(), "training");
  EXPECT_EQ(beat.workers(0).last_collective(), "all_reduce #4");
  EXPECT_EQ(beat.workers(0).progress(), 99u);
  EXPECT_EQ(beat.workers(0).process_state(), "running");
}

TEST_F(RelayCoreTest, CheckpointThatIsWritten_IsInTheBeatUntilItIsDone) {
  Seat(0);
  saving_ = true;
  Beat(0, 7);
  EXPECT_EQ(core_->MakeBeat().workers(0).save().written_bytes(), 7u);
  saving_ = false;
  Beat(0, 8);
  EXPECT_FALSE(core_->MakeBeat().workers(0).has_save());
}

TEST_F(RelayCoreTest, Beat_SaysHowLongAgoTheStateWasLoadedAndAStepDone) {
  Seat(0);
  v1::Op op;
  *op.mutable_heartbeat()->mutable_fence() = Fence(0);
  op.mutable_heartbeat()->mutable_restored_ago()->set_seconds(5);
  Submit("beat", op);
  clock_.Advance(absl::Seconds(1));
  v1::Beat beat = core_->MakeBeat();
  ASSERT_EQ(beat.workers_size(), 1);
  EXPECT_EQ(beat.workers(0).restored_ago().seconds(), 6);
  EXPECT_FALSE(beat.workers(0).has_first_step_ago());
  op.mutable_heartbeat()->mutable_restored_ago()->set_seconds(6);
  op.mutable_heartbeat()->mutable_first_step_ago()->set_seconds(0);
  Submit("beat", op);
  clock_.Advance(absl::Seconds(2));
  beat = core_->MakeBeat();
  EXPECT_EQ(beat.workers(0).restored_ago().seconds(), 8);
  EXPECT_EQ(beat.workers(0).first_step_ago().seconds(), 2);
}

// Otherwise the coordinator takes the beat for that of a program that reports no times.
TEST_F(RelayCoreTest, FirstStep_IsToldByAHeartbeatAndNotByAnArrival) {
  Seat(0);
  const auto arrive_at = [&](int64_t step) {
    v1::Op op = Arrive(0, step);
    op.mutable_arrive()->set_step(step);
    Submit("arrive", std::move(op));
    return core_->MakeBeat().workers(0).step();
  };
  EXPECT_EQ(arrive_at(5), 0);
  Beat(0, 6);
  EXPECT_EQ(arrive_at(7), 7);
}

TEST_F(RelayCoreTest, GenerationEnded_IsToldByTheNextHeartbeat) {
  Seat(0);
  Seat(1, 2);
  v1::GenerationEnded ended;
  ended.set_job_id("job");
  ended.set_generation(1);
  ended.set_why("rank 5 died");
  core_->GenerationEnded(ended);
  const v1::HeartbeatReply reply = Beat(0, 1);
  EXPECT_TRUE(reply.generation_ended());
  EXPECT_EQ(reply.why(), "rank 5 died");
  EXPECT_FALSE(Beat(1, 1, 2).generation_ended());
  EXPECT_THAT(BeatStates(), ElementsAre("w1 running"));
}

TEST_F(RelayCoreTest, AfterANewConnection_TheFirstHeartbeatAsksTheCoordinator) {
  Seat(0);
  core_->Connected(4);
  Beat(0, 1);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_TRUE(upstream_.ops()[0].has_heartbeat());
  v1::OpResult result;
  result.mutable_heartbeat()->set_generation(1);
  upstream_.Answer(result);
  EXPECT_EQ(Beat(0, 2).header().term(), 4u);
  EXPECT_THAT(upstream_.ops(), IsEmpty());
}

TEST_F(RelayCoreTest, CoordinatorAway_HeartbeatsAreAnsweredAllTheSame) {
  Seat(0);
  core_->Connected(4);
  connected_ = false;
  EXPECT_EQ(Beat(0, 1).generation(), 1u);
  EXPECT_THAT(upstream_.ops(), IsEmpty());
}

TEST_F(RelayCoreTest, UnknownOrOlderWorker_AsksTheCoordinator) {
  Seat(0);
  Beat(3, 1);
  Beat(0, 1, 9);
  EXPECT_THAT(upstream_.ops(), SizeIs(2));
}

TEST_F(RelayCoreTest, StoppedProcess_IsToldOnceAndThenLosesItsLease) {
  Seat(0);
  Seat(1);
  EXPECT_THAT(BeatStates(), ElementsAre("w0 running", "w1 running"));
  states_[1000] = "stopped";
  EXPECT_THAT(BeatStates(), ElementsAre("w0 stopped", "w1 running"));
  EXPECT_THAT(BeatStates(), ElementsAre("w1 running"));
  states_[1000] = "sleeping";
  EXPECT_THAT(BeatStates(), ElementsAre("w0 sleeping", "w1 running"));
}

TEST_F(RelayCoreTest, ProcessThatCannotBeSeen_CountsAsLongAsItIsHeardOf) {
  Seat(0);
  states_.clear();
  EXPECT_THAT(BeatStates(), ElementsAre("w0 unknown"));
  clock_.Advance(absl::Seconds(5));
  Beat(0, 1);
  clock_.Advance(absl::Seconds(5));
  EXPECT_THAT(BeatStates(), ElementsAre("w0 unknown"));
  clock_.Advance(absl::Seconds(1));
  EXPECT_THAT(BeatStates(), IsEmpty());
}

// In its own pid namespace a worker reports 1, which is a different process here.
TEST_F(RelayCoreTest, NumberThatAWorkerSays_IsNotWhatIsWatched) {
  int64_t kernels = 77;
  RelayCore::Options options;
  options.clock = &clock_;
  options.process_of = [&](const std::string& job, const std::string& worker_id,
                           uint64_t incarnation, int64_t claimed) {
    EXPECT_EQ(absl::StrCat(job, " ", worker_id, " ", incarnation, " ", claimed), "job w0 100 1000");
    return kernels;
  };
  options.process_state = [this](int64_t pid) {
    EXPECT_EQ(pid, 77);
    return states_[pid];
  };
  core_ = std::make_unique<RelayCore>(std::move(options), &upstream_);
  v1::Op join;
  *join.mutable_join()->mutable_fence() = Fence(0, 0);
  join.mutable_join()->set_pid(1000);
  Submit("join", std::move(join));
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_EQ(upstream_.ops()[0].join().pid(), 77) << "what the coordinator receives";
  upstream_.Answer({});
  Seat(0);  // reports 1000, which runs according to states_
  states_[77] = "stopped";
  EXPECT_THAT(BeatStates(), ElementsAre("w0 stopped"));
  EXPECT_EQ(core_->ProcessOf("job", "w0", 77), 77);
  EXPECT_EQ(core_->ProcessOf("job", "w0", 1000), std::nullopt);
  EXPECT_EQ(core_->ProcessOf("other job", "w0", 77), std::nullopt);
  EXPECT_EQ(core_->ProcessOf("", "w0", 77), 77);  // an older coordinator names no job
  // Not known to the kernel as a worker: it counts as living as long as it shows signs of life.
  kernels = 0;
  EXPECT_THAT(BeatStates(), ElementsAre("w0 unknown"));
  clock_.Advance(absl::Seconds(6));
  EXPECT_THAT(BeatStates(), IsEmpty());
  EXPECT_EQ(core_->ProcessOf("job", "w0", 77), 0);
}

TEST_F(RelayCoreTest, ProcessesWithoutASeat_AreInTheBeatAndCanBeAskedFor) {
  std::vector<LocalProcess> processes = {
      {.job = "job", .worker_id = "w0", .incarnation = 100, .rank = 0, .pid = 1000},
      {.job = "job", .worker_id = "w1", .incarnation = 101, .rank = 1, .pid = 1001}};
  RelayCore::Options options;
  options.host = "h";
  options.clock = &clock_;
  options.processes = [&] { return processes; };
  options.process_state = [this](int64_t pid) { return states_[pid]; };
  core_ = std::make_unique<RelayCore>(std::move(options), &upstream_);
  states_[1001] = "sleeping";
  Seat(0);
  v1::Beat beat = core_->MakeBeat();
  ASSERT_EQ(beat.workers_size(), 2);
  EXPECT_FALSE(beat.workers(0).has_unseated());
  EXPECT_EQ(beat.workers(1).worker_id(), "w1");
  EXPECT_EQ(beat.workers(1).incarnation(), 101u);
  EXPECT_EQ(beat.workers(1).process_state(), "sleeping");
  EXPECT_EQ(beat.workers(1).unseated().rank(), 1);
  EXPECT_EQ(beat.workers(1).unseated().pid(), 1001);
  EXPECT_EQ(beat.workers(1).unseated().host(), "h");
  EXPECT_EQ(core_->ProcessOf("job", "w1", 1001), 1001);
  // A script has meanwhile started its program.
  processes[1].pid = 1002;
  EXPECT_EQ(core_->ProcessOf("job", "w1", 1001), 1002);
  EXPECT_EQ(core_->ProcessOf("job", "w0", 7), std::nullopt) << "it has a seat, as another process";
  EXPECT_EQ(core_->ProcessOf("other", "w1", 1001), std::nullopt);
  EXPECT_EQ(core_->ProcessOf("", "w1", 1001), std::nullopt);
  // The process has ended.
  states_[1002] = "gone";
  EXPECT_EQ(core_->MakeBeat().workers_size(), 1);
}

TEST_F(RelayCoreTest, LookingAtProcesses_HoldsUpNoCall) {
  RelayCore::Options options;
  options.clock = &clock_;
  options.process_state = [this](int64_t pid) {
    EXPECT_EQ(core_->ProcessOf("job", "w0", pid), pid) << "a call beside it goes through";
    return "running";
  };
  options.refresh = [this](v1::WorkerBeat* beat) {
    core_->WorkerEnded("job", beat->worker_id(), beat->incarnation());
  };
  core_ = std::make_unique<RelayCore>(std::move(options), &upstream_);
  Seat(0);
  EXPECT_EQ(core_->MakeBeat().workers_size(), 1);
  EXPECT_EQ(core_->MakeBeat().workers_size(), 0);
}

TEST_F(RelayCoreTest, EndedAndLeft_AreInNoBeat) {
  for (int rank : {0, 1, 2}) Seat(rank);
  core_->WorkerEnded("job", "w0", 100);
  core_->WorkerEnded("job", "w1", 55);  // another incarnation
  v1::Op leave;
  *leave.mutable_leave()->mutable_fence() = Fence(2);
  Submit("leave", std::move(leave));
  v1::OpResult result;
  result.mutable_leave();
  upstream_.Answer(result);
  EXPECT_THAT(BeatStates(), ElementsAre("w1 running"));
  EXPECT_EQ(core_->ProcessOf("job", "w1", 1001), 1001);
  EXPECT_EQ(core_->ProcessOf("job", "w1", 1), std::nullopt);
  EXPECT_EQ(core_->ProcessOf("job", "w0", 1000), std::nullopt);
}

TEST_F(RelayCoreTest, WhatAWorkerSaidLast_IsSentBeforeItLeavesOrItsExitIsReported) {
  for (int rank : {0, 1, 2, 3}) Seat(rank);
  for (int rank : {0, 1, 2}) Beat(rank, 32);
  core_->MakeBeat();
  Beat(0, 39);
  v1::Op leave;
  *leave.mutable_leave()->mutable_fence() = Fence(0);
  Submit("leave", std::move(leave));
  std::vector<v1::Op> ops = upstream_.ops();
  ASSERT_THAT(ops, SizeIs(2));
  EXPECT_EQ(ops[0].heartbeat().step(), 39);
  EXPECT_EQ(ops[0].heartbeat().phase(), "training");
  EXPECT_EQ(ops[0].heartbeat().fence().worker_id(), "w0");
  EXPECT_EQ(ops[0].heartbeat().fence().incarnation(), 100u);
  EXPECT_EQ(ops[0].heartbeat().fence().generation(), 1u);
  EXPECT_TRUE(ops[1].has_leave());
  upstream_.Answer({});
  upstream_.Answer({});
  EXPECT_EQ(results_["leave"], "ok");

  v1::Op arrive = Arrive(1);
  arrive.mutable_arrive()->set_step(37);
  Submit("a1", std::move(arrive));
  core_->WorkerEnded("job", "w1", 101);
  // Nothing new, but the beat that has it may still wait at a hub.
  core_->WorkerEnded("job", "w2", 102);
  core_->WorkerEnded("job", "w3", 103);  // has reported nothing
  ops = upstream_.ops();
  ASSERT_THAT(ops, SizeIs(2));
  EXPECT_EQ(ops[0].heartbeat().step(), 37);
  EXPECT_EQ(ops[1].heartbeat().step(), 32);
  upstream_.Answer(Error(v1::ERROR_REASON_NOT_MEMBER));
  upstream_.Answer(Error(v1::ERROR_REASON_NOT_MEMBER));
  EXPECT_THAT(BeatStates(), IsEmpty());
}

TEST_F(RelayCoreTest, OtherOperations_ArePassedOn) {
  v1::Op op;
  op.mutable_txn()->add_then()->mutable_add()->set_key("k");
  Submit("txn", op);
  ASSERT_THAT(upstream_.ops(), SizeIs(1));
  EXPECT_EQ(upstream_.ops()[0].txn().then(0).add().key(), "k");
  upstream_.Answer({});
  EXPECT_EQ(results_["txn"], "ok");
}

}  // namespace
}  // namespace muster::agent
