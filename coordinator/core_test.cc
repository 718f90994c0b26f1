#include "coordinator/core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/defaults.h"
#include "coordinator/errors.h"
#include "google/protobuf/stubs/logging.h"
#include "proto/muster/v1/journal.pb.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const absl::Time kStart = absl::FromUnixSeconds(1'700'000'000);

// A core with a journal that becomes durable on request, and all replies by call.
class Bench {
 public:
  explicit Bench(CoreOptions options = {}) : options_(options) {
    options_.cluster_id = "c1";
    core_ = std::make_unique<Core>(options_);
    Start();
  }

  void Start() {
    core_->StartTerm(core_->last_term() + 1, now_, &out_);
    Collect();
  }
  // The process dies; what was written of the journal is replayed, or a snapshot and the rest.
  void Restart(bool snapshot = false) {
    const std::string image = snapshot ? core_->Snapshot() : "";
    const uint64_t revision = core_->last_record_revision();
    core_ = std::make_unique<Core>(options_);
    if (snapshot) {
      ASSERT_TRUE(core_->Restore(image).ok());
    }
    for (const Record& record : journal_) {
      if (snapshot && record.revision <= revision) continue;
      const absl::Status status = core_->Replay(record.payload);
      ASSERT_TRUE(status.ok()) << status;
    }
    replies_.clear();
    Start();
  }

  // Another process begins with `journal`, a copy of an earlier state.
  void StartFromCopy(const std::vector<Record>& journal, bool restored) {
    core_ = std::make_unique<Core>(options_);
    journal_ = journal;
    for (const Record& record : journal_) ASSERT_TRUE(core_->Replay(record.payload).ok());
    replies_.clear();
    core_->StartTerm(core_->last_term() + (restored ? 65537 : 1), now_, &out_, restored);
    Collect();
  }

  CallId Do(const v1::Op& op, absl::string_view node = "") {
    const CallId call = next_call_++;
    core_->Handle(call, op, {node}, now_, &out_);
    Collect();
    return call;
  }
  void Collect() {
    for (Reply& reply : out_.replies) {
      EXPECT_FALSE(replies_.contains(reply.call)) << "two replies to call " << reply.call;
      replies_[reply.call] = reply;
    }
    for (Record& record : out_.records) journal_.push_back(record);
    for (NodeDirective& directive : out_.directives) directives_.push_back(directive);
    for (v1::BarrierReport& report : out_.reports) reports_.push_back(report);
    for (Notice& notice : out_.notices) notices_.push_back(notice.text);
    deposed_ = deposed_ || out_.deposed;
    asked_to_catch_up_ = asked_to_catch_up_ || out_.catch_up;
    if (out_.deposed) deposed_why_ = out_.deposed_why;
    out_.Clear();
  }
  void Advance(absl::Duration duration) {
    const absl::Time end = now_ + duration;
    while (core_->NextDeadline() <= end) {
      now_ = std::max(now_, core_->NextDeadline());
      core_->Tick(now_, &out_);
      Collect();
    }
    now_ = end;
    core_->Tick(now_, &out_);
    Collect();
  }
  bool Answered(CallId call) const { return replies_.contains(call); }
  const v1::OpResult& Result(CallId call) const {
    static const v1::OpResult none;
    const auto it = replies_.find(call);
    if (it == replies_.end()) {
      ADD_FAILURE() << "call " << call << " has no reply yet";
      return none;
    }
    const std::shared_ptr<const Answer>& answer = it->second.answer;
    return parsed_.try_emplace(answer, answer->Parse()).first->second;
  }
  const v1::OpError& Error(CallId call) const { return Result(call).error(); }
  v1::ErrorReason Reason(CallId call) const { return Error(call).detail().reason(); }

  CoreOptions options_;
  std::unique_ptr<Core> core_;
  absl::Time now_ = kStart;
  Output out_;
  CallId next_call_ = 1;
  std::map<CallId, Reply> replies_;
  mutable std::map<std::shared_ptr<const Answer>, v1::OpResult> parsed_;
  std::vector<Record> journal_;
  std::vector<NodeDirective> directives_;
  std::vector<v1::BarrierReport> reports_;
  std::vector<std::string> notices_;
  bool deposed_ = false;
  bool asked_to_catch_up_ = false;
  std::string deposed_why_;
};

// One worker process of the test, which knows who it is and where it sits.
struct Worker {
  std::string id;
  uint64_t incarnation = 0;
  std::string host = "h";
  uint64_t generation = 0;
  int rank = -1;
  uint64_t next_request = 1;

  void FillFence(v1::Fence* fence) const {
    fence->set_job_id("j");
    fence->set_worker_id(id);
    fence->set_incarnation(incarnation);
    fence->set_generation(generation);
  }
};

v1::RendezvousSpec Spec(int min, int max, bool end_on_failure = true) {
  v1::RendezvousSpec spec;
  spec.set_min_workers(min);
  spec.set_max_workers(max);
  spec.set_end_generation_on_failure(end_on_failure);
  *spec.mutable_lease() = ToProto(absl::Seconds(6));
  return spec;
}

v1::Op JoinOp(const Worker& worker, const v1::RendezvousSpec& spec) {
  v1::Op op;
  v1::JoinRequest* join = op.mutable_join();
  worker.FillFence(join->mutable_fence());
  *join->mutable_spec() = spec;
  join->mutable_topology()->set_host(worker.host);
  join->set_preferred_rank(-1);
  join->set_pid(1000 + static_cast<int64_t>(worker.incarnation % 1000));
  return op;
}

class CoreTest : public ::testing::Test {
 protected:
  std::vector<Worker> Form(int n, bool end_on_failure = true, int hosts = 1) {
    std::vector<Worker> workers;
    for (int i = 0; i < n; ++i) {
      workers.push_back(
          {absl::StrCat("w", i), 100 + static_cast<uint64_t>(i), absl::StrCat("h", i % hosts)});
    }
    spec_ = Spec(n, n, end_on_failure);
    JoinAll(&workers);
    return workers;
  }
  void JoinAll(std::vector<Worker>* workers) {
    std::vector<CallId> calls;
    for (const Worker& worker : *workers)
      calls.push_back(bench_.Do(JoinOp(worker, spec_), "node-" + worker.host));
    for (size_t i = 0; i < calls.size(); ++i) Sit(&(*workers)[i], calls[i]);
  }
  void Sit(Worker* worker, CallId call) {
    const v1::OpResult& result = bench_.Result(call);
    ASSERT_TRUE(result.has_join()) << result.DebugString();
    worker->generation = result.join().generation();
    worker->rank = result.join().rank();
  }
  CallId Arrive(const Worker& worker, const std::string& id, uint64_t counter,
                absl::Duration timeout = absl::Seconds(100), const std::string& payload = "") {
    v1::Op op;
    v1::ArriveRequest* arrive = op.mutable_arrive();
    worker.FillFence(arrive->mutable_fence());
    arrive->set_barrier_id(id);
    arrive->set_counter(counter);
    arrive->set_rank(worker.rank);
    arrive->set_payload(payload);
    *arrive->mutable_timeout() = ToProto(timeout);
    return bench_.Do(op);
  }
  CallId Beat(const Worker& worker, int64_t step = 0) {
    v1::Op op;
    worker.FillFence(op.mutable_heartbeat()->mutable_fence());
    op.mutable_heartbeat()->set_step(step);
    return bench_.Do(op);
  }
  // Makes a transaction in which nothing is asked for yet.
  v1::Op TxnOp(const Worker& worker, uint64_t request_id) {
    v1::Op op;
    worker.FillFence(op.mutable_txn()->mutable_fence());
    op.mutable_txn()->mutable_fence()->set_request_id(request_id);
    return op;
  }
  v1::Op PutOp(const Worker& worker, const std::string& key, const std::string& value,
               bool durable = false, uint64_t request_id = 0, bool lease = false) {
    v1::Op op = TxnOp(worker, request_id);
    v1::PutOp* put = op.mutable_txn()->add_then()->mutable_put();
    put->set_key(key);
    put->set_value(value);
    put->set_klass(durable ? v1::KV_CLASS_DURABLE : v1::KV_CLASS_EPHEMERAL);
    put->set_with_lease(lease);
    return op;
  }
  std::string Get(const std::string& key) {
    v1::Op op;
    op.mutable_txn()->mutable_fence()->set_job_id("j");
    op.mutable_txn()->add_then()->mutable_get()->set_key(key);
    const CallId call = bench_.Do(op);
    const v1::OpResult& result = bench_.Result(call);
    if (result.txn().results_size() == 0 || result.txn().results(0).kvs_size() == 0)
      return "(absent)";
    return result.txn().results(0).kvs(0).value();
  }
  CallId Exit(const Worker& worker, int code, int signal = 0, bool may_restart = false) {
    v1::Op op;
    op.mutable_report_exit()->mutable_fence()->set_job_id("j");
    op.mutable_report_exit()->mutable_fence()->set_worker_id("agent");
    op.mutable_report_exit()->set_worker_id(worker.id);
    op.mutable_report_exit()->set_incarnation(worker.incarnation);
    op.mutable_report_exit()->mutable_cause()->set_exit_code(code);
    op.mutable_report_exit()->mutable_cause()->set_signal(signal);
    op.mutable_report_exit()->mutable_cause()->set_may_restart(may_restart);
    return bench_.Do(op);
  }

  Bench bench_;
  v1::RendezvousSpec spec_ = Spec(1, 1);
};

TEST_F(CoreTest, Join_Fixed_SealsWhenAllAreIn) {
  spec_ = Spec(3, 3);
  const CallId a = bench_.Do(JoinOp({"a", 1, "h1"}, spec_));
  const CallId b = bench_.Do(JoinOp({"b", 2, "h1"}, spec_));
  EXPECT_FALSE(bench_.Answered(a));
  const CallId c = bench_.Do(JoinOp({"c", 3, "h2"}, spec_));
  EXPECT_EQ(bench_.Result(a).join().rank(), 0);
  EXPECT_EQ(bench_.Result(b).join().rank(), 1);
  EXPECT_EQ(bench_.Result(c).join().rank(), 2);
  EXPECT_EQ(bench_.Result(c).join().world_size(), 3);
  EXPECT_EQ(bench_.Result(c).join().generation(), 1u);
  EXPECT_EQ(bench_.Result(c).join().node_rank(), 1);
  EXPECT_EQ(bench_.Result(c).join().num_nodes(), 2);
  EXPECT_EQ(bench_.Result(c).join().generation_prefix(), "gen/1/");
}

TEST_F(CoreTest, Seal_Reply_WaitsForItsRecord) {
  spec_ = Spec(1, 1);
  const CallId call = bench_.Do(JoinOp({"a", 1}, spec_));
  ASSERT_FALSE(bench_.journal_.empty());
  EXPECT_EQ(bench_.replies_[call].durable_revision, bench_.journal_.back().revision);
}

TEST_F(CoreTest, Join_RetryByTheSameIncarnation_GetsTheSameSeat) {
  std::vector<Worker> workers = Form(2);
  const CallId again = bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_EQ(bench_.Result(again).join().rank(), workers[1].rank);
  EXPECT_EQ(bench_.Result(again).join().generation(), 1u);
}

TEST_F(CoreTest, Join_RetryWhileWaiting_AnswersBothCalls) {
  spec_ = Spec(2, 2);
  const CallId first = bench_.Do(JoinOp({"a", 1}, spec_));
  const CallId second = bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.Do(JoinOp({"b", 2}, spec_));
  EXPECT_EQ(bench_.Result(first).join().rank(), bench_.Result(second).join().rank());
}

TEST_F(CoreTest, Join_NewIncarnationBeforeSealing_ReplacesTheOld) {
  spec_ = Spec(2, 2);
  const CallId old = bench_.Do(JoinOp({"a", 1}, spec_));
  const CallId young = bench_.Do(JoinOp({"a", 9}, spec_));
  EXPECT_EQ(bench_.Reason(old), v1::ERROR_REASON_SUPERSEDED);
  EXPECT_EQ(bench_.Error(old).detail().current_incarnation(), 9u);
  EXPECT_FALSE(bench_.Answered(young));
  const CallId late = bench_.Do(JoinOp({"a", 1}, spec_));
  EXPECT_EQ(bench_.Reason(late), v1::ERROR_REASON_SUPERSEDED);
  bench_.Do(JoinOp({"b", 2}, spec_));
  EXPECT_TRUE(bench_.Result(young).has_join());
}

TEST_F(CoreTest, Join_NewIncarnationAfterSealing_EndsTheGeneration) {
  std::vector<Worker> workers = Form(2);
  const CallId barrier = Arrive(workers[1], "b", 0);
  const CallId young = bench_.Do(JoinOp({"w0", 77, "h0"}, spec_));
  EXPECT_EQ(bench_.Reason(barrier), v1::ERROR_REASON_GENERATION_ENDED);
  EXPECT_EQ(bench_.Error(barrier).detail().culprits(0).worker_id(), "w0");
  EXPECT_EQ(bench_.Reason(Beat(workers[0])), v1::ERROR_REASON_SUPERSEDED);
  const CallId other = bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_EQ(bench_.Result(young).join().generation(), 2u);
  EXPECT_EQ(bench_.Result(young).join().rank(), 0);
  EXPECT_EQ(bench_.Result(other).join().rank(), 1);
}

TEST_F(CoreTest, Join_NewIncarnationWithoutEnding_TakesTheSeat) {
  std::vector<Worker> workers = Form(2, false);
  const CallId young = bench_.Do(JoinOp({"w0", 77, "h0"}, spec_));
  ASSERT_TRUE(bench_.Result(young).has_join());
  EXPECT_EQ(bench_.Result(young).join().generation(), 1u);
  EXPECT_EQ(bench_.Result(young).join().rank(), workers[0].rank);
  EXPECT_EQ(bench_.Reason(Arrive(workers[0], "b", 0)), v1::ERROR_REASON_SUPERSEDED);
  ASSERT_FALSE(bench_.directives_.empty());
  EXPECT_EQ(bench_.directives_.back().directive->kill_worker().incarnation(), 100u);
}

TEST_F(CoreTest, Join_Elastic_WaitsForTheLastCall) {
  spec_ = Spec(2, 4);
  *spec_.mutable_last_call() = ToProto(absl::Seconds(5));
  const CallId a = bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.Do(JoinOp({"b", 2}, spec_));
  bench_.Advance(absl::Seconds(4));
  const CallId c = bench_.Do(JoinOp({"c", 3}, spec_));
  EXPECT_FALSE(bench_.Answered(a));
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Result(a).join().world_size(), 3);
  EXPECT_EQ(bench_.Result(c).join().rank(), 2);
}

TEST_F(CoreTest, Join_ElasticAllIn_SealsAtOnce) {
  spec_ = Spec(2, 3);
  const CallId a = bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.Do(JoinOp({"b", 2}, spec_));
  bench_.Do(JoinOp({"c", 3}, spec_));
  EXPECT_EQ(bench_.Result(a).join().world_size(), 3);
}

TEST_F(CoreTest, Join_DivisibleBy_LeavesTheOddOneWaiting) {
  spec_ = Spec(2, 6);
  spec_.set_divisible_by(2);
  std::vector<CallId> calls;
  for (int i = 0; i < 5; ++i)
    calls.push_back(bench_.Do(JoinOp({absl::StrCat("w", i), 1ull + i}, spec_)));
  bench_.Advance(absl::Seconds(5));
  EXPECT_EQ(bench_.Result(calls[0]).join().world_size(), 4);
  EXPECT_FALSE(bench_.Answered(calls[4]));
}

TEST_F(CoreTest, Join_ImpossibleSpec_IsRefused) {
  spec_ = Spec(5, 7);
  spec_.set_divisible_by(4);
  const CallId call = bench_.Do(JoinOp({"a", 1}, spec_));
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_BAD_FIELD);
  EXPECT_EQ(bench_.Error(call).detail().field(), "spec.divisible_by");
}

TEST_F(CoreTest, Join_OtherSpec_IsRefused) {
  spec_ = Spec(2, 2);
  bench_.Do(JoinOp({"a", 1}, spec_));
  const CallId call = bench_.Do(JoinOp({"b", 2}, Spec(3, 3)));
  EXPECT_EQ(bench_.Error(call).detail().field(), "spec");
  EXPECT_THAT(bench_.Error(call).message(), HasSubstr("2:2"));
}

// The agents of a launch with MIN:MAX machines have met again without the one that was lost.
TEST_F(CoreTest, Join_OtherSpecAfterElasticAgentsMetAgain_BeginsWithTheOtherSize) {
  v1::RendezvousSpec agents = Spec(1, 3);
  *agents.mutable_last_call() = ToProto(absl::Seconds(1));
  const auto meet = [&](std::vector<int> nodes, absl::Duration last_call = absl::Seconds(1)) {
    for (const int node : nodes) {
      v1::Op op = JoinOp({absl::StrCat("node", node), 900ull + node}, agents);
      op.mutable_join()->mutable_fence()->set_job_id("j.agents");
      bench_.Do(op, absl::StrCat("node-h", node));
    }
    bench_.Advance(last_call);
  };
  meet({0, 1});
  std::vector<Worker> workers = Form(2, /*end_on_failure=*/true, /*hosts=*/2);
  const CallId early = bench_.Do(JoinOp({"w2", 7, "h2"}, Spec(3, 3)), "node-h2");
  EXPECT_EQ(bench_.Error(early).detail().field(), "spec") << "its agent has no place";

  Exit(workers[0], 1, 0, /*may_restart=*/true);  // the other one is on the machine that is lost
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j.agents");
  bench_.Do(end);
  EXPECT_EQ(
      bench_.Error(bench_.Do(JoinOp({"w0", 200, "h0"}, Spec(1, 1)), "node-h0")).detail().field(),
      "spec")
      << "its agents have not met";
  meet({0}, kDefaultLease);  // until then the other one could come back
  Worker next = {"w0", 201, "h0"};
  Sit(&next, bench_.Do(JoinOp(next, Spec(1, 1)), "node-h0"));
  EXPECT_EQ(next.generation, workers[0].generation + 1);
  EXPECT_EQ(bench_.Reason(Arrive(workers[1], "b", 0)), v1::ERROR_REASON_STALE_GENERATION);
}

// More machines than there are places: one that is slow to stop its workers keeps its place.
TEST_F(CoreTest, Join_ElasticAgentsWithOneMoreThanTheMaximum_SurvivorsKeepTheirPlaces) {
  v1::RendezvousSpec agents = Spec(1, 2);
  *agents.mutable_last_call() = ToProto(absl::Seconds(1));
  const auto join = [&](int node, uint64_t start = 900) {
    v1::Op op = JoinOp({absl::StrCat("node", node), start + node}, agents);
    op.mutable_join()->mutable_fence()->set_job_id("j.agents");
    return bench_.Do(op, absl::StrCat("node-h", node));
  };
  const auto end = [&] {
    v1::Op op;
    op.mutable_end_generation()->mutable_fence()->set_job_id("j.agents");
    bench_.Do(op);
  };
  const CallId first = join(0);
  ASSERT_EQ(bench_.Result(join(1)).join().generation(), 1u);
  ASSERT_EQ(bench_.Result(first).join().rank(), 0);
  const CallId beyond = join(2);

  end();
  const CallId fast = join(1);
  bench_.Advance(absl::Seconds(5));  // more than the last call, and less than a lease
  EXPECT_FALSE(bench_.Answered(fast));
  const CallId slow = join(0);
  EXPECT_EQ(bench_.Result(slow).join().rank(), 0);
  EXPECT_EQ(bench_.Result(fast).join().rank(), 1);
  EXPECT_FALSE(bench_.Answered(beyond));

  // The same holds for a worker that was killed and started again: its former self ends when it
  // joins.
  end();
  const CallId other = join(0);
  const CallId restarted = join(1, /*start=*/1900);
  EXPECT_EQ(bench_.Result(other).join().rank(), 0);
  EXPECT_EQ(bench_.Result(restarted).join().rank(), 1);
  EXPECT_FALSE(bench_.Answered(beyond));

  // A worker that is silent for a lease has lost its claim.
  end();
  const CallId again = join(1, /*start=*/1900);
  bench_.Advance(kDefaultLease);
  EXPECT_EQ(bench_.Result(again).join().generation(), 4u);
  EXPECT_EQ(bench_.Result(beyond).join().rank(), 0);
}

// A launch was started again before the old one, which waits for its workers, has left.
TEST_F(CoreTest, Leave_OfAnOldIncarnationBetweenGenerations_TakesNoPlaceFromTheNewOne) {
  v1::RendezvousSpec agents = Spec(1, 3);
  *agents.mutable_last_call() = ToProto(absl::Seconds(1));
  const auto join = [&](int node, uint64_t incarnation) {
    v1::Op op = JoinOp({absl::StrCat("node", node), incarnation}, agents);
    op.mutable_join()->mutable_fence()->set_job_id("j.agents");
    return bench_.Do(op, absl::StrCat("node-h", node));
  };
  join(0, 900);
  join(1, 901);
  bench_.Advance(absl::Seconds(1));
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j.agents");
  bench_.Do(end);
  const CallId other = join(0, 900);
  const CallId fresh = join(1, 911);
  v1::Op leave;
  v1::Fence* const fence = leave.mutable_leave()->mutable_fence();
  fence->set_job_id("j.agents");
  fence->set_worker_id("node1");
  fence->set_incarnation(901);
  fence->set_generation(1);
  EXPECT_EQ(bench_.Reason(bench_.Do(leave)), v1::ERROR_REASON_SUPERSEDED);
  EXPECT_FALSE(bench_.Answered(fresh));
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Result(fresh).join().world_size(), 2);
  EXPECT_EQ(bench_.Result(other).join().world_size(), 2);
}

// A launch that is stopped leaves once its workers have ended: the others have met by then.
TEST_F(CoreTest, Leave_ByAnElasticAgentBetweenGenerations_OthersDoNotWaitForIt) {
  v1::RendezvousSpec agents = Spec(1, 4);
  *agents.mutable_last_call() = ToProto(absl::Seconds(1));
  const auto join = [&](int node) {
    v1::Op op = JoinOp({absl::StrCat("node", node), 900ull + node}, agents);
    op.mutable_join()->mutable_fence()->set_job_id("j.agents");
    return bench_.Do(op, absl::StrCat("node-h", node));
  };
  v1::Op leave;
  v1::Fence* const fence = leave.mutable_leave()->mutable_fence();
  fence->set_job_id("j.agents");
  fence->set_worker_id("node2");
  fence->set_incarnation(902);
  fence->set_generation(1);
  fence->set_request_id(7);
  // The agent has either asked for a place again or not.
  for (const bool asked : {false, true}) {
    for (const int node : {0, 1, 2}) join(node);
    bench_.Advance(absl::Seconds(1));
    v1::Op end;
    end.mutable_end_generation()->mutable_fence()->set_job_id("j.agents");
    bench_.Do(end);
    const CallId first = join(0);
    join(1);
    if (asked) join(2);
    bench_.Advance(absl::Milliseconds(500));
    EXPECT_FALSE(bench_.Answered(first));
    EXPECT_TRUE(bench_.Result(bench_.Do(leave)).has_leave());
    EXPECT_TRUE(bench_.Result(bench_.Do(leave)).has_leave()) << "its answer was lost";
    bench_.Restart(/*snapshot=*/asked);
    const CallId again = join(0);
    join(1);
    bench_.Advance(absl::Seconds(1));  // the last call
    EXPECT_EQ(bench_.Result(again).join().world_size(), 2);
    bench_.Do(end);
    fence->set_generation(3);
    fence->set_request_id(8);
  }
}

// If the number of agents is fixed, so is that of the workers.
TEST_F(CoreTest, Join_OtherSpecOfFixedAgents_IsRefused) {
  v1::Op op = JoinOp({"node0", 900}, Spec(1, 1));
  op.mutable_join()->mutable_fence()->set_job_id("j.agents");
  bench_.Do(op, "node-h0");
  Form(2);
  const CallId call = bench_.Do(JoinOp({"w0", 7, "h0"}, Spec(1, 1)), "node-h0");
  EXPECT_EQ(bench_.Error(call).detail().field(), "spec");
}

TEST_F(CoreTest, Join_Timeout_SaysHowManyCameAndWhoIsMissing) {
  spec_ = Spec(3, 3);
  *spec_.mutable_join_timeout() = ToProto(absl::Seconds(10));
  v1::Op a = JoinOp({"a", 1}, spec_);
  a.mutable_join()->set_preferred_rank(0);
  v1::Op b = JoinOp({"b", 2}, spec_);
  b.mutable_join()->set_preferred_rank(2);
  const CallId first = bench_.Do(a);
  const CallId second = bench_.Do(b);
  bench_.Advance(absl::Seconds(10));
  EXPECT_EQ(bench_.Reason(first), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
  EXPECT_THAT(bench_.Error(first).message(), HasSubstr("2 of 3 workers"));
  EXPECT_THAT(bench_.Error(first).message(), HasSubstr("rank 1"));
  EXPECT_EQ(bench_.Error(first).message(), bench_.Error(second).message());
  EXPECT_THAT(bench_.Error(first).detail().missing_ranks(), ElementsAre(1));
}

TEST_F(CoreTest, Join_TimeoutAfterAFailure_NamesTheDead) {
  std::vector<Worker> workers = Form(3);
  Exit(workers[2], 0, 9);
  *spec_.mutable_join_timeout() = google::protobuf::Duration();
  spec_.clear_join_timeout();
  const CallId a = bench_.Do(JoinOp(workers[0], spec_));
  bench_.Advance(absl::Seconds(600));
  EXPECT_EQ(bench_.Reason(a), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
  EXPECT_THAT(bench_.Error(a).message(), HasSubstr("killed(9)"));
  EXPECT_THAT(bench_.Error(a).detail().missing_ranks(), ElementsAre(1, 2));
}

TEST_F(CoreTest, Join_TimeoutsOneAfterTheOther_AllNameTheOneThatNeverCame) {
  std::vector<Worker> workers = Form(5);
  *spec_.mutable_join_timeout() = ToProto(absl::Seconds(600));
  Exit(workers[0], 1);
  std::vector<CallId> calls;
  for (int i = 1; i < 5; ++i) {
    calls.push_back(bench_.Do(JoinOp(workers[i], Spec(5, 5))));
    bench_.Advance(absl::Seconds(1));
  }
  bench_.notices_.clear();
  bench_.Advance(absl::Seconds(700));
  for (const CallId call : calls) {
    EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
    EXPECT_THAT(bench_.Error(call).message(), HasSubstr("4 of 5 workers joined"));
    EXPECT_THAT(bench_.Error(call).detail().missing_ranks(), ElementsAre(0));
    EXPECT_EQ(bench_.Error(call).detail().culprits_size(), 1);
    // The callers share the bytes, however many they are.
    EXPECT_EQ(bench_.replies_[call].answer, bench_.replies_[calls[0]].answer);
  }
  EXPECT_EQ(std::count_if(bench_.notices_.begin(), bench_.notices_.end(),
                          [](const std::string& text) {
                            return absl::StrContains(text, "workers joined within");
                          }),
            1);
}

TEST_F(CoreTest, Join_TimeoutsOfAFirstRendezvous_CountThoseThatGaveUpMeanwhile) {
  spec_ = Spec(4, 4);
  const auto join = [&](int rank, uint64_t incarnation) {
    v1::Op op = JoinOp({absl::StrCat("w", rank), incarnation}, spec_);
    op.mutable_join()->set_preferred_rank(rank);
    return bench_.Do(op);
  };
  const auto at = [&](int second) { bench_.Advance(kStart + absl::Seconds(second) - bench_.now_); };
  const auto missing = [&](CallId call) {
    EXPECT_THAT(bench_.Error(call).message(), HasSubstr("3 of 4 workers joined within 10m"));
    return bench_.Error(call).detail().missing_ranks();
  };
  join(0, 1);
  at(1);
  join(1, 1);
  at(2);
  const CallId third = join(2, 1);
  at(601);  // two have given up
  const CallId again = join(0, 2);
  at(602);
  EXPECT_THAT(missing(third), ElementsAre(3));
  at(1200);
  join(1, 2);
  at(1201);
  EXPECT_THAT(missing(again), ElementsAre(3));
  at(1700);
  const CallId last = join(2, 2);
  at(2250);
  join(3, 2);
  at(2300);  // rank 0 gave up longer ago than a join may take
  EXPECT_THAT(missing(last), ElementsAre(0));
}

TEST_F(CoreTest, Join_TimeoutAfterOthersGaveUp_DoesNotCountThemIfAllWouldDo) {
  for (const bool formed : {false, true}) {
    bench_ = Bench();
    spec_ = Spec(4, 4);
    if (formed) Exit(Form(4)[0], 1);
    const absl::Time start = bench_.now_;
    const auto join = [&](int rank) {
      v1::Op op = JoinOp({absl::StrCat("w", rank), 900 + static_cast<uint64_t>(rank)}, spec_);
      op.mutable_join()->set_preferred_rank(rank);
      return bench_.Do(op);
    };
    const auto at = [&](int second) {
      bench_.Advance(start + absl::Seconds(second) - bench_.now_);
    };
    join(0);
    at(300);
    const CallId second = join(1);
    join(2);
    at(650);
    join(3);
    at(900);
    EXPECT_THAT(bench_.Error(second).message(), HasSubstr("3 of 4 workers joined within 10m"));
    EXPECT_THAT(bench_.Error(second).message(), HasSubstr("; 1 more gave up, the last one 5m ago"));
    EXPECT_THAT(bench_.Error(second).detail().missing_ranks(), ElementsAre(0));
  }
}

TEST_F(CoreTest, Join_TimeoutsAndJoinsInTurn_MakeTheTextOnceASecond) {
  spec_ = Spec(1000, 1000);
  const auto join = [&](int i, uint64_t incarnation) {
    return bench_.Do(JoinOp({absl::StrCat("w", i), incarnation}, spec_));
  };
  std::vector<CallId> calls;
  for (int i = 0; i < 40; ++i) {
    calls.push_back(join(i, 1));
    bench_.Advance(absl::Milliseconds(50));
  }
  bench_.Advance(absl::Seconds(600) - absl::Seconds(2));
  std::set<const Answer*> texts;
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(bench_.Answered(calls[i])) << i;
    texts.insert(bench_.replies_[calls[i]].answer.get());
    join(i % 2 == 0 ? i : i + 1000, 2);
    bench_.Advance(absl::Milliseconds(50));
  }
  EXPECT_LE(texts.size(), 3u);
}

TEST_F(CoreTest, Join_CallerGone_LosesItsPlace) {
  spec_ = Spec(2, 2);
  const CallId a = bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.core_->Abandon(a, bench_.now_, &bench_.out_);
  bench_.Collect();
  const CallId b = bench_.Do(JoinOp({"b", 2}, spec_));
  EXPECT_FALSE(bench_.Answered(b));
}

TEST_F(CoreTest, Rejoin_Survivors_KeepTheirRanks) {
  std::vector<Worker> workers = Form(4);
  EXPECT_EQ(bench_.Result(Exit(workers[1], 1)).report_exit().header().term(), 1u);
  // They come back in another order, with a new worker for the dead one.
  std::vector<Worker> next = {workers[3], {"x", 500, "h0"}, workers[2], workers[0]};
  JoinAll(&next);
  EXPECT_EQ(next[0].rank, 3);
  EXPECT_EQ(next[1].rank, 1);
  EXPECT_EQ(next[2].rank, 2);
  EXPECT_EQ(next[3].rank, 0);
  EXPECT_EQ(next[0].generation, 2u);
}

TEST_F(CoreTest, Rejoin_Stragglers_AreRememberedOverGenerations) {
  std::vector<Worker> workers = Form(3);
  Arrive(workers[0], "b", 0);
  Arrive(workers[1], "b", 0);
  bench_.Advance(absl::Milliseconds(20));
  bench_.Result(Arrive(workers[2], "b", 0));
  Exit(workers[1], 1);
  std::vector<Worker> next = {workers[0], {"x", 500, "h0"}, workers[2]};
  JoinAll(&next);
  v1::Op op;
  op.mutable_straggler_report()->set_job_id("j");
  const v1::StragglerReportReply report = bench_.Result(bench_.Do(op)).straggler_report();
  ASSERT_EQ(report.rows_size(), 2);  // the newcomer at rank 1 has none
  EXPECT_EQ(report.rows(0).rank(), next[2].rank);
  EXPECT_EQ(report.rows(0).times_last(), 1u);
  EXPECT_EQ(FromProto(report.rows(0).max_lateness()), absl::Milliseconds(20));
  EXPECT_EQ(report.rows(1).rank(), next[0].rank);
}

TEST_F(CoreTest, Spare_IsSeatedOnlyWhenNeeded) {
  spec_ = Spec(2, 2);
  v1::Op spare = JoinOp({"s", 9, "h0"}, spec_);
  spare.mutable_join()->set_spare(true);
  const CallId waiting = bench_.Do(spare);
  std::vector<Worker> workers = Form(2);
  EXPECT_FALSE(bench_.Answered(waiting));
  Exit(workers[0], 1);
  const CallId survivor = bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_EQ(bench_.Result(survivor).join().rank(), 1);
  EXPECT_EQ(bench_.Result(waiting).join().rank(), 0);
}

TEST_F(CoreTest, Members_SayWhyTheyHaveTheirRanks_AlsoAfterARestart) {
  std::vector<Worker> workers = Form(2, true, 2);
  v1::Op spare = JoinOp({"s", 9, "h0"}, spec_);
  spare.mutable_join()->set_spare(true);
  bench_.Do(spare);
  const auto why = [&] {
    v1::Op op;
    op.mutable_get_members()->set_job_id("j");
    std::vector<std::string> texts;
    for (const v1::Member& member : bench_.Result(bench_.Do(op)).get_members().members()) {
      texts.push_back(
          absl::StrCat(member.rank(), " ", member.worker_id(), ": ", member.why_rank()));
    }
    return texts;
  };
  EXPECT_THAT(why(),
              ElementsAre("0 w0: by order of racks and hosts", "1 w1: by order of racks and hosts",
                          "-1 s: waits for a free seat: generation 1 runs with 2 workers"));
  Exit(workers[0], 1);
  EXPECT_THAT(why()[2], HasSubstr("waits for 2 of 2 workers; spares here: 1"));
  // This other spare is passed over.
  v1::Op other = JoinOp({"t", 10, "h9"}, spec_);
  other.mutable_join()->set_spare(true);
  bench_.Do(other);
  bench_.Do(JoinOp(workers[1], spec_));
  const std::vector<std::string> seated = {
      "0 s: was a spare; takes the rank of \"w0\" on the same host", "1 w1: keeps its rank"};
  EXPECT_THAT(why(),
              ElementsAre(seated[0], seated[1], "-1 t: waits as a spare: all 2 seats are taken"));
  for (const bool snapshot : {false, true}) {
    bench_.Restart(snapshot);
    EXPECT_THAT(why(), ElementsAre(seated[0], seated[1]));
  }
}

TEST_F(CoreTest, Member_RestartedInItsSeat_SaysSo) {
  std::vector<Worker> workers = Form(2, /*end_on_failure=*/false);
  Exit(workers[1], 1);
  workers[1].incarnation += 50;
  bench_.Result(bench_.Do(JoinOp(workers[1], spec_)));
  v1::Op op;
  op.mutable_get_members()->set_job_id("j");
  EXPECT_EQ(bench_.Result(bench_.Do(op)).get_members().members(1).why_rank(),
            "keeps its rank after a restart");
}

TEST_F(CoreTest, Spare_OfAnElasticJob_ReplacesTheLostAtOnce) {
  spec_ = Spec(2, 8);
  std::vector<CallId> spares;
  for (const uint64_t incarnation : {900, 901}) {
    v1::Op spare = JoinOp({absl::StrCat("s", incarnation), incarnation, "h9"}, spec_);
    spare.mutable_join()->set_spare(true);
    spares.push_back(bench_.Do(spare));
  }
  std::vector<Worker> workers;
  std::vector<CallId> calls;
  for (uint64_t i = 0; i < 4; ++i) {
    workers.push_back({absl::StrCat("w", i), 100 + i, absl::StrCat("h", i)});
    calls.push_back(bench_.Do(JoinOp(workers[i], spec_)));
  }
  bench_.Advance(absl::Seconds(5));  // the last call of the first generation
  for (int i = 0; i < 4; ++i) Sit(&workers[i], calls[i]);
  EXPECT_FALSE(bench_.Answered(spares[0]));

  Exit(workers[1], 0, 9);
  const CallId third = bench_.Do(JoinOp(workers[3], spec_));
  const CallId first = bench_.Do(JoinOp(workers[0], spec_));
  EXPECT_FALSE(bench_.Answered(first));  // rank 2 lives and will come
  const CallId second = bench_.Do(JoinOp(workers[2], spec_));
  EXPECT_EQ(bench_.Result(first).join().world_size(), 4);
  EXPECT_EQ(bench_.Result(first).join().rank(), workers[0].rank);
  EXPECT_EQ(bench_.Result(second).join().rank(), workers[2].rank);
  EXPECT_EQ(bench_.Result(third).join().rank(), workers[3].rank);
  EXPECT_EQ(bench_.Result(spares[0]).join().rank(), workers[1].rank);
  EXPECT_FALSE(bench_.Answered(spares[1]));

  // A worker that leaves on purpose is not replaced.
  std::vector<Worker> next = {workers[0], workers[2], workers[3], {"s900", 900, "h9"}};
  Sit(&next[0], first);
  Sit(&next[1], second);
  Sit(&next[2], third);
  Sit(&next[3], spares[0]);
  v1::Op leave;
  next[3].FillFence(leave.mutable_leave()->mutable_fence());
  bench_.Do(leave);
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  for (int i = 0; i < 3; ++i) calls[i] = bench_.Do(JoinOp(next[i], spec_));
  EXPECT_EQ(bench_.Result(calls[0]).join().world_size(), 3);
  EXPECT_FALSE(bench_.Answered(spares[1]));
}

TEST_F(CoreTest, Rejoin_OfANewIncarnationThatTimesOut_LeavesNoGenerationBehind) {
  std::vector<Worker> workers = Form(3);
  Worker anew = workers[1];
  anew.incarnation += 50;
  const CallId waiting = Arrive(workers[0], "b", 0);
  const CallId join = bench_.Do(JoinOp(anew, spec_));
  // Its own join shows that the old process is gone: no caller waits for the result of the new one.
  EXPECT_EQ(bench_.Reason(waiting), v1::ERROR_REASON_GENERATION_ENDED);
  bench_.Advance(absl::Seconds(600));
  EXPECT_EQ(bench_.Reason(join), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
  EXPECT_EQ(bench_.Reason(Arrive(workers[2], "b", 0)), v1::ERROR_REASON_GENERATION_ENDED);
  EXPECT_TRUE(bench_.Result(Beat(workers[0])).heartbeat().generation_ended());
  // All come again, the late one too.
  std::vector<Worker> next = {workers[0], anew, workers[2]};
  JoinAll(&next);
  EXPECT_EQ(next[1].generation, 2u);
  EXPECT_EQ(next[1].rank, workers[1].rank);
}

TEST_F(CoreTest, RankTable_IsPagedAndSkippedByDigest) {
  bench_.options_.rank_table_page = 2;
  bench_.core_ = std::make_unique<Core>(bench_.options_);
  bench_.Start();
  std::vector<Worker> workers = Form(5);
  std::vector<int> ranks;
  uint64_t digest = 0;
  for (int first = 0; first >= 0;) {
    v1::Op op;
    op.mutable_get_rank_table()->set_job_id("j");
    op.mutable_get_rank_table()->set_first_rank(first);
    const v1::OpResult result = bench_.Result(bench_.Do(op));
    for (const v1::RankRow& row : result.get_rank_table().rows()) ranks.push_back(row.rank());
    first = result.get_rank_table().next_rank();
    digest = result.get_rank_table().table_digest();
  }
  EXPECT_THAT(ranks, ElementsAre(0, 1, 2, 3, 4));
  v1::Op op;
  op.mutable_get_rank_table()->set_job_id("j");
  op.mutable_get_rank_table()->set_if_digest_differs(digest);
  EXPECT_EQ(bench_.Result(bench_.Do(op)).get_rank_table().rows_size(), 0);
  op.mutable_get_rank_table()->set_generation(7);
  EXPECT_EQ(bench_.Error(bench_.Do(op)).code(), static_cast<int>(absl::StatusCode::kNotFound));
}

TEST_F(CoreTest, EndGeneration_ByAnOperator_LetsNewcomersIn) {
  spec_ = Spec(1, 4);
  *spec_.mutable_last_call() = ToProto(absl::Seconds(1));
  std::vector<Worker> one = {{"a", 1}};
  const CallId a = bench_.Do(JoinOp(one[0], spec_));
  bench_.Advance(absl::Seconds(1));
  Sit(&one[0], a);
  const CallId late = bench_.Do(JoinOp({"b", 2}, spec_));
  EXPECT_FALSE(bench_.Answered(late));
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  end.mutable_end_generation()->set_reason("grow");
  EXPECT_EQ(bench_.Result(bench_.Do(end)).end_generation().next_generation(), 2u);
  EXPECT_TRUE(bench_.Result(Beat(one[0])).heartbeat().generation_ended());
  bench_.Do(JoinOp(one[0], spec_));
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Result(late).join().world_size(), 2);
}

TEST_F(CoreTest, Quarantine_ByAnOperator_KeepsTheHostOut) {
  spec_ = Spec(1, 1);
  *spec_.mutable_join_timeout() = ToProto(absl::Seconds(100));
  bench_.Do(JoinOp({"a", 1, "good"}, spec_));
  v1::Op op;
  op.mutable_quarantine()->mutable_fence()->set_job_id("j");
  op.mutable_quarantine()->set_host("bad");
  *op.mutable_quarantine()->mutable_for_() = ToProto(absl::Seconds(30));
  bench_.Do(op);
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  const CallId bad = bench_.Do(JoinOp({"b", 2, "bad"}, spec_));
  bench_.Advance(absl::Seconds(29));
  EXPECT_FALSE(bench_.Answered(bad));
  bench_.Advance(absl::Seconds(2));
  EXPECT_TRUE(bench_.Result(bad).has_join());
}

TEST_F(CoreTest, Quarantine_IsShownAndCanBeLifted) {
  spec_ = Spec(2, 2);
  std::vector<Worker> workers = {{"a", 1, "good"}, {"b", 2, "bad"}};
  for (int round = 0; round < 3; ++round) {
    JoinAll(&workers);
    Exit(workers[1], 1);
    workers[1].incarnation += 10;
  }
  v1::StatusReply status;
  bench_.core_->FillStatus(&status);
  ASSERT_EQ(status.jobs(0).quarantined_size(), 1);
  const v1::QuarantinedHost& host = status.jobs(0).quarantined(0);
  EXPECT_EQ(host.host(), "bad");
  EXPECT_TRUE(host.automatic());
  EXPECT_THAT(host.reason(), HasSubstr("named 3 times within 1h, last because a worker exited"));
  EXPECT_EQ(FromProto(host.left()), absl::Minutes(30));
  const CallId a = bench_.Do(JoinOp(workers[0], spec_));
  bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_FALSE(bench_.Answered(a));
  v1::Op op;
  op.mutable_quarantine()->mutable_fence()->set_job_id("j");
  op.mutable_quarantine()->set_host("bad");
  bench_.Do(op);
  EXPECT_TRUE(bench_.Answered(a)) << "no longer quarantined: it is an ordinary host again";
  status.Clear();
  bench_.core_->FillStatus(&status);
  EXPECT_EQ(status.jobs(0).quarantined_size(), 0);
}

TEST_F(CoreTest, Quarantine_HostNamedThreeTimes_IsUsedOnlyAsALastResort) {
  spec_ = Spec(2, 2);
  std::vector<Worker> workers = {{"a", 1, "good"}, {"b", 2, "bad"}};
  for (int round = 0; round < 3; ++round) {
    JoinAll(&workers);
    Exit(workers[1], 1);
    workers[1].incarnation += 10;
  }
  const CallId a = bench_.Do(JoinOp(workers[0], spec_));
  bench_.Do(JoinOp(workers[1], spec_));  // on the quarantined host
  EXPECT_FALSE(bench_.Answered(a));
  const CallId c = bench_.Do(JoinOp({"c", 3, "other"}, spec_));
  EXPECT_EQ(bench_.Result(a).join().rank(), workers[0].rank);
  EXPECT_EQ(bench_.Result(c).join().rank(), workers[1].rank);
}

TEST_F(CoreTest, Quarantine_StrikesLongAgo_DoNotCount) {
  spec_ = Spec(2, 2);
  std::vector<Worker> workers = {{"a", 1, "good"}, {"b", 2, "bad"}};
  for (int round = 0; round < 3; ++round) {
    JoinAll(&workers);
    Exit(workers[1], 1);
    workers[1].incarnation += 10;
    if (round == 1) bench_.Advance(absl::Hours(1));
  }
  const CallId a = bench_.Do(JoinOp(workers[0], spec_));
  bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_TRUE(bench_.Answered(a)) << "two of the three strikes were an hour ago";
}

TEST_F(CoreTest, Quarantine_StrikesBeforeARestart_Count) {
  for (const bool snapshot : {false, true}) {
    bench_ = Bench();
    spec_ = Spec(2, 2);
    std::vector<Worker> workers = {{"a", 1, "good"}, {"b", 2, "bad"}};
    for (int round = 0; round < 3; ++round) {
      JoinAll(&workers);
      Exit(workers[1], 1);
      workers[1].incarnation += 10;
      if (round == 1) bench_.Restart(snapshot);
    }
    const CallId a = bench_.Do(JoinOp(workers[0], spec_));
    bench_.Do(JoinOp(workers[1], spec_));
    EXPECT_FALSE(bench_.Answered(a));
  }
}

TEST_F(CoreTest, Quarantine_ThatIsOver_IsNotBackAfterARestart) {
  for (const bool snapshot : {false, true}) {
    bench_ = Bench();
    spec_ = Spec(2, 2);
    std::vector<Worker> workers = {{"a", 1, "good"}, {"b", 2, "bad"}};
    JoinAll(&workers);
    v1::Op op;
    op.mutable_quarantine()->mutable_fence()->set_job_id("j");
    op.mutable_quarantine()->set_host("bad");
    *op.mutable_quarantine()->mutable_for_() = ToProto(absl::Hours(2));
    bench_.Do(op);
    const auto left = [this] {
      v1::StatusReply status;
      bench_.core_->FillStatus(&status);
      if (status.jobs(0).quarantined_size() == 0) return absl::ZeroDuration();
      return FromProto(status.jobs(0).quarantined(0).left());
    };
    bench_.Advance(absl::Minutes(90));
    bench_.Restart(snapshot);
    EXPECT_EQ(left(), absl::Minutes(30));
    const absl::Time now = bench_.now_;
    // A clock that was set back makes it no longer than the record says that it is.
    bench_.now_ -= absl::Hours(100);
    bench_.Restart(snapshot);
    EXPECT_EQ(left(), snapshot ? absl::Minutes(30) : absl::Hours(2));
    bench_.now_ = now + absl::Hours(1);  // while no coordinator runs
    bench_.Restart();
    EXPECT_EQ(left(), absl::ZeroDuration());
  }
}

TEST_F(CoreTest, Quarantine_StrikesLongBeforeARestart_DoNotCount) {
  for (const bool snapshot : {false, true}) {
    bench_ = Bench();
    spec_ = Spec(2, 2);
    std::vector<Worker> workers = {{"a", 1, "good"}, {"b", 2, "bad"}};
    for (int round = 0; round < 3; ++round) {
      JoinAll(&workers);
      Exit(workers[1], 1);
      workers[1].incarnation += 10;
      if (round != 1) continue;
      bench_.Advance(absl::Hours(1));
      bench_.Restart(snapshot);
    }
    const CallId a = bench_.Do(JoinOp(workers[0], spec_));
    bench_.Do(JoinOp(workers[1], spec_));
    EXPECT_TRUE(bench_.Answered(a)) << "two of the three strikes were an hour ago";
  }
}

TEST_F(CoreTest, Job_LeftAlone_IsRemovedWithItsKeys) {
  std::vector<Worker> workers = Form(2);
  bench_.Do(PutOp(workers[0], "k", "v", /*durable=*/true));
  bench_.Advance(absl::Hours(30));  // no beats: the leases expire, and the generation ends
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 1u);
  EXPECT_EQ(bench_.Error(Beat(workers[0])).code(), static_cast<int>(absl::StatusCode::kNotFound));
  bench_.Restart();
  v1::StatusReply status;
  bench_.core_->FillStatus(&status);
  EXPECT_EQ(status.jobs_size(), 0);
  EXPECT_LT(bench_.core_->Snapshot().size(), 100u);
}

TEST_F(CoreTest, Job_InUse_IsNotRemoved) {
  std::vector<Worker> workers = Form(1);
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  for (int hour = 0; hour < 50; ++hour) {
    bench_.Advance(absl::Hours(1));
    // Its worker still runs, though without a seat.
    v1::Beat beat;
    v1::WorkerBeat* one = beat.add_workers();
    one->set_job_id("j");
    one->set_worker_id(workers[0].id);
    one->set_incarnation(workers[0].incarnation);
    bench_.core_->HandleBeat("node-h0", beat, bench_.now_, &bench_.out_);
    bench_.Collect();
  }
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 0u);
  bench_.Advance(absl::Hours(23));
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 0u);
  bench_.Restart();
  bench_.Advance(absl::Hours(23));  // the time restarts
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 0u);
  bench_.Advance(absl::Hours(2));
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 1u);
}

TEST_F(CoreTest, Job_ThatIsOnlyRead_IsRemoved) {
  std::vector<Worker> workers = Form(1);
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  v1::Op list, wait;
  list.mutable_list_checkpoints()->mutable_fence()->set_job_id("j");
  wait.mutable_wait()->mutable_fence()->set_job_id("j");
  wait.mutable_wait()->add_keys("never");
  *wait.mutable_wait()->mutable_timeout() = ToProto(absl::Seconds(1));
  for (int hour = 0; hour < 23; ++hour) {
    bench_.Advance(absl::Hours(1));
    EXPECT_TRUE(bench_.Result(bench_.Do(list)).has_list_checkpoints());
    EXPECT_EQ(Get("k"), "(absent)");
    bench_.Do(wait);
  }
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 0u);
  // A write is a use.
  v1::Op put;
  put.mutable_txn()->mutable_fence()->set_job_id("j");
  put.mutable_txn()->add_then()->mutable_put()->set_key("k");
  bench_.Do(put);
  for (int hour = 0; hour < 23; ++hour) {
    bench_.Advance(absl::Hours(1));
    bench_.Do(list);
    bench_.Do(wait);
  }
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 0u);
  bench_.Advance(absl::Hours(2));
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 1u);
  const CallId gone = bench_.Do(list);
  EXPECT_EQ(bench_.Error(gone).code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_THAT(bench_.Error(gone).message(), HasSubstr("or it was removed"));
}

TEST_F(CoreTest, Job_ThatRests_HasNoAnswersAndNoHistoryAnyMore) {
  std::vector<Worker> workers = Form(2);
  const std::string value(10'000, 'v');
  for (uint64_t request = 1; request <= 50; ++request) {
    v1::Op op = PutOp(workers[0], "k", value, /*durable=*/true, request);
    op.mutable_txn()->add_then()->mutable_get()->set_key("k");  // the answer has the value
    bench_.Do(op);
  }
  const v1::Op repeated = PutOp(workers[1], "k", value, /*durable=*/true, 7);
  const CallId first = bench_.Do(repeated);
  const v1::Op by_operator = [] {
    v1::Op op;
    v1::Fence* const fence = op.mutable_txn()->mutable_fence();
    fence->set_job_id("j");
    fence->set_incarnation(4711);
    fence->set_request_id(1);
    op.mutable_txn()->add_then()->mutable_put()->set_key("o");
    op.mutable_txn()->mutable_then(0)->mutable_put()->set_klass(v1::KV_CLASS_DURABLE);
    return op;
  }();
  const CallId first_of_operator = bench_.Do(by_operator);
  const auto watch = [this](uint64_t from) {
    v1::WatchRequest request;
    request.set_job_id("j");
    request.set_keys(true);
    v1::WatchBatch batch;
    const auto error = bench_.core_->ReadWatch(request, from, ~0ull, 1 << 20, &batch);
    return error.has_value() ? error->detail().reason() : v1::ERROR_REASON_UNSPECIFIED;
  };
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  bench_.Advance(absl::Minutes(9));
  const uint64_t read = bench_.core_->revision() + 1;  // the leases have ended
  EXPECT_GT(bench_.core_->Snapshot().size(), 200'000u);
  EXPECT_EQ(watch(read - 5), v1::ERROR_REASON_UNSPECIFIED);
  EXPECT_EQ(bench_.Result(bench_.Do(repeated)).SerializeAsString(),
            bench_.Result(first).SerializeAsString());
  bench_.Advance(absl::Minutes(2));
  EXPECT_EQ(watch(read - 5), v1::ERROR_REASON_COMPACTED);
  EXPECT_EQ(watch(read), v1::ERROR_REASON_UNSPECIFIED);
  for (int start = 0; start < 3; ++start) {
    EXPECT_LT(bench_.core_->Snapshot().size(), 20'000u) << start;
    EXPECT_EQ(Get("k"), value);
    EXPECT_EQ(bench_.Reason(bench_.Do(repeated)), v1::ERROR_REASON_RESULT_FORGOTTEN);
    const CallId again = bench_.Do(by_operator);
    EXPECT_EQ(bench_.Result(again).txn().results(0).mod_revision(),
              bench_.Result(first_of_operator).txn().results(0).mod_revision());
    const Reply kept = bench_.replies_[first_of_operator];
    bench_.Restart(/*snapshot=*/start == 1);
    bench_.replies_[first_of_operator] = kept;
  }
}

TEST_F(CoreTest, Job_WithWaitingWorkers_IsNotRemoved) {
  spec_ = Spec(2, 2);
  *spec_.mutable_join_timeout() = ToProto(absl::Hours(100));
  bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.Advance(absl::Hours(90));
  EXPECT_EQ(bench_.core_->stats().jobs_removed, 0u);
}

TEST_F(CoreTest, Beat_OfAWorkerWhoseGenerationEnded_IsToldAgain) {
  std::vector<Worker> workers = Form(2, true, 2);
  Exit(workers[1], 1);
  bench_.Restart();  // the directive may have been lost with the coordinator
  bench_.directives_.clear();
  const auto beat = [&](const Worker& worker) {
    v1::Beat message;
    v1::WorkerBeat* one = message.add_workers();
    one->set_job_id("j");
    one->set_worker_id(worker.id);
    one->set_incarnation(worker.incarnation);
    bench_.core_->HandleBeat("node-" + worker.host, message, bench_.now_, &bench_.out_);
    bench_.Collect();
  };
  beat(workers[0]);
  ASSERT_EQ(bench_.directives_.size(), 1u);
  EXPECT_EQ(bench_.directives_[0].node, "node-h0");
  EXPECT_EQ(bench_.directives_[0].directive->generation_ended().generation(), 1u);
  EXPECT_EQ(bench_.directives_[0].directive->generation_ended().culprits(0).rank(), 1);
  // Once it waits for its next seat there is nothing left to tell.
  bench_.Do(JoinOp(workers[0], spec_));
  beat(workers[0]);
  EXPECT_EQ(bench_.directives_.size(), 1u);
  // A process that has never had a seat gets nothing either.
  beat({"b", 77, "h5"});
  EXPECT_EQ(bench_.directives_.size(), 1u);
}

class HubCoreTest : public CoreTest {
 protected:
  HubCoreTest() { Limit(1); }
  void Limit(int direct_agents) {
    CoreOptions options;
    options.hubs.direct_agents = direct_agents;
    options.hubs.agents_per_hub = 4;
    bench_ = Bench(options);
  }
  void Attach(const std::string& node) {
    v1::Hello hello;
    hello.set_hub_address(node + ":29401");
    hello.add_features("hub");
    bench_.core_->AttachAgent(node, hello, bench_.now_, &bench_.out_);
    bench_.Collect();
  }
  void BeatOf(const std::string& node, const std::vector<Worker>& workers,
              const std::vector<std::string>& agents = {}) {
    v1::Beat beat;
    for (const Worker& worker : workers) {
      v1::WorkerBeat* one = beat.add_workers();
      one->set_job_id("j");
      one->set_worker_id(worker.id);
      one->set_incarnation(worker.incarnation);
    }
    for (const std::string& agent : agents) beat.mutable_hub()->add_agents()->set_node(agent);
    bench_.core_->HandleBeat(node, beat, bench_.now_, &bench_.out_);
    bench_.Collect();
  }
  v1::StatusReply Status() {
    v1::StatusReply status;
    bench_.core_->FillStatus(&status);
    return status;
  }
};

TEST_F(HubCoreTest, AgentBeyondTheLimit_IsToldToUseAHub) {
  Attach("a");
  EXPECT_THAT(bench_.directives_, IsEmpty());
  Attach("b");
  ASSERT_EQ(bench_.directives_.size(), 1u);
  EXPECT_EQ(bench_.directives_[0].node, "b");
  EXPECT_EQ(bench_.directives_[0].durable_revision, 0u);
  const v1::UseHub& use = bench_.directives_[0].directive->use_hub();
  EXPECT_EQ(use.node(), "a");
  EXPECT_EQ(use.address(), "a:29401");
  EXPECT_THAT(use.why(), HasSubstr("--direct_agents"));
}

TEST_F(HubCoreTest, Roster_IsCountedInTheStatus) {
  Attach("a");
  BeatOf("a", {}, {"b", "c"});
  EXPECT_EQ(Status().agents(), 3);
  EXPECT_EQ(Status().agents_behind_hubs(), 2);
  EXPECT_EQ(Status().hubs(), 1);
  BeatOf("a", {});  // no roster: nothing has changed
  EXPECT_EQ(Status().agents_behind_hubs(), 2);
  bench_.core_->DetachAgent("a", bench_.now_, &bench_.out_);
  EXPECT_EQ(Status().agents(), 0);
}

TEST_F(HubCoreTest, MovesThatWaitForTime_ComeWithATick) {
  v1::Hello hello;
  hello.set_hub_address("a:1");
  hello.add_features("hub");
  hello.set_session_id("of an earlier term");
  for (const char* node : {"a", "b"})
    bench_.core_->AttachAgent(node, hello, bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_THAT(bench_.directives_, IsEmpty());
  BeatOf("b", {}, {"x"});
  bench_.Advance(Hubs::kFirstBeat);
  EXPECT_THAT(bench_.directives_, IsEmpty()) << "b is a hub, and a is the only one beside it";
  Attach("c");
  ASSERT_EQ(bench_.directives_.size(), 1u);
  EXPECT_EQ(bench_.directives_[0].directive->use_hub().node(), "b");
}

TEST_F(HubCoreTest, Seat_IsOnTheNodeThatItsBeatsComeThrough) {
  std::vector<Worker> workers = Form(2, true, 2);
  Attach("hub");
  Attach("old hub");
  BeatOf("hub", workers);
  // Facts that the former hub still had in hand do not last.
  BeatOf("old hub", {workers[1]});
  BeatOf("hub", workers);
  bench_.directives_.clear();
  Exit(workers[0], 1);
  ASSERT_EQ(bench_.directives_.size(), 1u);
  EXPECT_EQ(bench_.directives_[0].node, "hub");
  EXPECT_EQ(bench_.directives_[0].directive->generation_ended().generation(), 1u);
}

TEST_F(HubCoreTest, BeatAfterTheEnd_TellsAHubOnceForAllItsWorkers) {
  std::vector<Worker> workers = Form(8, true, 4);
  Exit(workers[0], 1);
  bench_.directives_.clear();
  BeatOf("hub", workers);
  ASSERT_EQ(bench_.directives_.size(), 1u);
  EXPECT_TRUE(bench_.directives_[0].directive->has_generation_ended());
}

TEST_F(HubCoreTest, HubThatHasSeenAHigherTerm_DeposesForThoseItSpeaksFor) {
  std::vector<Worker> workers = Form(1);
  Attach("hub");
  BeatOf("hub", workers);
  v1::Hello hello;
  hello.set_term_seen(5);
  hello.set_cluster_id("c1");
  bench_.core_->AttachAgent("hub", hello, bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_TRUE(bench_.deposed_);
}

TEST_F(HubCoreTest, NobodyOffersItself_IsANotice) {
  v1::Hello hello;
  hello.add_features("hub");
  for (const char* node : {"a", "b", "c"})
    bench_.core_->AttachAgent(node, hello, bench_.now_, &bench_.out_);
  bench_.Collect();
  ASSERT_EQ(bench_.notices_.size(), 1u);
  EXPECT_THAT(bench_.notices_[0], HasSubstr("--hub_listen"));
}

TEST_F(CoreTest, Beat_OfASupersededIncarnation_IsToldAgainToKillIt) {
  std::vector<Worker> workers = Form(1, false);
  Worker young = workers[0];
  young.incarnation = 500;
  Sit(&young, bench_.Do(JoinOp(young, spec_)));
  bench_.Restart();
  bench_.directives_.clear();
  v1::Beat message;
  v1::WorkerBeat* one = message.add_workers();
  one->set_job_id("j");
  one->set_worker_id(workers[0].id);
  one->set_incarnation(workers[0].incarnation);
  bench_.core_->HandleBeat("node-h0", message, bench_.now_, &bench_.out_);
  bench_.Collect();
  ASSERT_EQ(bench_.directives_.size(), 1u);
  EXPECT_EQ(bench_.directives_[0].directive->kill_worker().incarnation(), workers[0].incarnation);
}

TEST_F(CoreTest, Kv_LeasedKeyOfAnEndedGeneration_DiesWithTheLease) {
  std::vector<Worker> workers = Form(2);
  for (const Worker& worker : workers) bench_.Do(PutOp(worker, worker.id, "v", false, 0, true));
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  bench_.Do(JoinOp(workers[0], spec_));  // waits for the other one, which never returns
  EXPECT_EQ(Get("w0"), "v");
  EXPECT_EQ(Get("w1"), "v");
  bench_.Advance(absl::Seconds(10));
  EXPECT_EQ(Get("w0"), "v");
  EXPECT_EQ(Get("w1"), "(absent)");
}

TEST_F(CoreTest, Recall_OfASupersededIncarnation_IsRefused) {
  std::vector<Worker> workers = Form(1);
  v1::Op op;
  workers[0].FillFence(op.mutable_recall_barriers()->mutable_fence());
  EXPECT_TRUE(bench_.Result(bench_.Do(op)).has_recall_barriers());
  op.mutable_recall_barriers()->mutable_fence()->set_incarnation(9);
  const CallId call = bench_.Do(op);
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_SUPERSEDED);
  EXPECT_EQ(bench_.Error(call).detail().current_incarnation(), workers[0].incarnation);
}

TEST_F(CoreTest, Operator_RepeatedRequest_GetsTheFirstAnswer) {
  std::vector<Worker> workers = Form(1);
  v1::Op op;
  v1::Fence* fence = op.mutable_raise_trigger()->mutable_fence();
  fence->set_job_id("j");
  fence->set_incarnation(4711);
  fence->set_request_id(1);
  op.mutable_raise_trigger()->set_name("stop");
  const uint64_t id = bench_.Result(bench_.Do(op)).raise_trigger().trigger_id();
  EXPECT_EQ(bench_.Result(bench_.Do(op)).raise_trigger().trigger_id(), id);
  for (const bool snapshot : {false, true}) {
    bench_.Restart(snapshot);
    EXPECT_EQ(bench_.Result(bench_.Do(op)).raise_trigger().trigger_id(), id);
  }
  fence->set_incarnation(4712);  // another process
  EXPECT_NE(bench_.Result(bench_.Do(op)).raise_trigger().trigger_id(), id);
  EXPECT_EQ(bench_.core_->stats().triggers_raised, 1u);  // since the restart
}

TEST_F(CoreTest, RepeatedRequest_OlderThanWhatASnapshotKeeps_IsNotDoneAgain) {
  CoreOptions options;
  options.kept_answers = 4;
  bench_ = Bench(options);
  std::vector<Worker> workers = Form(1);
  const auto add = [&](uint64_t request) {
    v1::Op op = TxnOp(workers[0], request);
    v1::AddOp* one = op.mutable_txn()->add_then()->mutable_add();
    one->set_key("n");
    one->set_delta(1);
    one->set_klass(v1::KV_CLASS_DURABLE);
    return bench_.Do(op);
  };
  for (uint64_t request = 1; request <= 6; ++request) add(request);
  bench_.Restart(/*snapshot=*/true);
  EXPECT_EQ(bench_.Reason(add(2)), v1::ERROR_REASON_RESULT_FORGOTTEN);
  EXPECT_EQ(bench_.Result(add(5)).txn().results(0).number(), 5);
  EXPECT_EQ(Get("n"), "6");
}

TEST_F(CoreTest, RepeatedRead_IsReadAgain_AndTakesNoPlaceAmongTheAnswers) {
  CoreOptions options;
  options.kept_answers = 1;
  bench_ = Bench(options);
  std::vector<Worker> workers = Form(1);
  v1::Op add = TxnOp(workers[0], 1);
  add.mutable_txn()->add_then()->mutable_add()->set_key("n");
  add.mutable_txn()->mutable_then(0)->mutable_add()->set_delta(1);
  v1::Op read = TxnOp(workers[0], 2);
  read.mutable_txn()->add_then()->mutable_get()->set_key("n");
  bench_.Do(add);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(bench_.Result(bench_.Do(read)).txn().results(0).kvs(0).value(), "1");
  }
  EXPECT_EQ(bench_.Result(bench_.Do(add)).txn().results(0).number(), 1);
  EXPECT_EQ(Get("n"), "1");
}

TEST_F(CoreTest, KeptAnswers_AreBoundedInBytes) {
  CoreOptions options;
  options.kept_answer_bytes = 1000;
  bench_ = Bench(options);
  std::vector<Worker> workers = Form(1);
  const auto append = [&](uint64_t id) {  // its answer holds 300 bytes
    v1::Op op = TxnOp(workers[0], id);
    v1::AppendOp* one = op.mutable_txn()->add_then()->mutable_append();
    one->set_key("k");
    one->set_value(std::string(id == 1 ? 300 : 1, 'x'));
    op.mutable_txn()->add_then()->mutable_get()->set_key("k");
    return bench_.Do(op);
  };
  for (uint64_t id = 1; id <= 4; ++id) append(id);
  EXPECT_EQ(bench_.Reason(append(1)), v1::ERROR_REASON_RESULT_FORGOTTEN);
  EXPECT_EQ(bench_.Result(append(4)).txn().results(0).number(), 303);
  EXPECT_EQ(Get("k").size(), 303u);
}

TEST_F(CoreTest, ElasticJob_ManyWorkersComeAndGo_MemoryStaysBounded) {
  spec_ = Spec(1, 1);
  size_t early = 0;
  for (int i = 0; i < 6000; ++i) {
    Worker worker{absl::StrCat("w", i), 10 + static_cast<uint64_t>(i)};
    Sit(&worker, bench_.Do(JoinOp(worker, spec_)));
    bench_.Do(PutOp(worker, "k", "v", true, 1));
    Worker again = worker;
    again.incarnation += 100000;  // leaves a fenced incarnation behind
    bench_.Do(JoinOp(again, spec_));
    Exit(again, 1);
    bench_.journal_.clear();
    bench_.replies_.clear();
    bench_.directives_.clear();
    if (i == 2999) early = bench_.core_->Snapshot().size();
  }
  EXPECT_LT(bench_.core_->Snapshot().size(), early + early / 10);
}

TEST_F(CoreTest, Join_NewIncarnationOfADepartedWorker_FencesTheOld) {
  for (const bool snapshot : {false, true}) {
    bench_ = Bench();
    spec_ = Spec(1, 2);
    *spec_.mutable_last_call() = ToProto(absl::Seconds(1));
    std::vector<Worker> both = {{"a", 1}, {"b", 2}};
    JoinAll(&both);
    Exit(both[0], 1);
    bench_.Do(JoinOp(both[1], spec_));
    bench_.Advance(absl::Seconds(1));  // generation 2 is without a
    bench_.Restart(snapshot);
    const CallId young = bench_.Do(JoinOp({"a", 77}, spec_));
    EXPECT_FALSE(bench_.Answered(young));
    EXPECT_EQ(bench_.Reason(bench_.Do(JoinOp(both[0], spec_))), v1::ERROR_REASON_SUPERSEDED);
  }
}

TEST_F(CoreTest, Fence_UnknownJob_NotFound) {
  EXPECT_EQ(bench_.Error(Beat({"w", 1})).code(), static_cast<int>(absl::StatusCode::kNotFound));
}

TEST_F(CoreTest, Fence_StaleGeneration_CarriesTheCurrentOne) {
  std::vector<Worker> workers = Form(1);
  Worker stale = workers[0];
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  JoinAll(&workers);
  const CallId call = bench_.Do(PutOp(stale, "k", "v"));
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_STALE_GENERATION);
  EXPECT_EQ(bench_.Error(call).detail().current_generation(), 2u);
  EXPECT_EQ(Get("k"), "(absent)");
}

TEST_F(CoreTest, Fence_FutureGeneration_IsABug) {
  std::vector<Worker> workers = Form(1);
  workers[0].generation = 9;
  EXPECT_EQ(bench_.Reason(bench_.Do(PutOp(workers[0], "k", "v"))),
            v1::ERROR_REASON_FUTURE_GENERATION);
}

TEST_F(CoreTest, Fence_HigherTermOfAMember_DeposesTheCoordinator) {
  std::vector<Worker> workers = Form(1);
  v1::Op op = PutOp(workers[0], "k", "v");
  op.mutable_txn()->mutable_fence()->set_term_seen(5);
  op.mutable_txn()->mutable_fence()->set_cluster(0xc1);
  EXPECT_EQ(bench_.Reason(bench_.Do(op)), v1::ERROR_REASON_STOPPING);
  EXPECT_TRUE(bench_.deposed_);
  EXPECT_THAT(bench_.deposed_why_, HasSubstr("--restored"));
  EXPECT_EQ(bench_.core_->stats().unproven_deposals, 0u);
}

TEST_F(CoreTest, Fence_OfAMemberWithNumbersThatNobodyCanHaveSeen_DeposesNobody) {
  std::vector<Worker> workers = Form(1);
  const uint64_t term = bench_.core_->last_term();
  struct Seen {
    uint64_t term, revision;
  };
  uint64_t refused = 0;
  for (const Seen& seen :
       {Seen{Core::kMaxTerm + 1, 0}, Seen{~uint64_t{0}, 0}, Seen{term + (1 << 20) + 1, 0},
        Seen{term, (term + 1) << 40}, Seen{0, ~uint64_t{0}}, Seen{term + 5, (term + 6) << 40}}) {
    SCOPED_TRACE(absl::StrCat(seen.term, " ", seen.revision));
    v1::Op op = PutOp(workers[0], "k", "v");
    op.mutable_txn()->mutable_fence()->set_term_seen(seen.term);
    op.mutable_txn()->mutable_fence()->set_revision_seen(seen.revision);
    op.mutable_txn()->mutable_fence()->set_cluster(0xc1);
    const CallId call = bench_.Do(op);
    EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_BAD_FIELD);
    EXPECT_THAT(bench_.Error(call).message(), HasSubstr("the caller's state is corrupt"));
    EXPECT_FALSE(bench_.deposed_);
    EXPECT_EQ(bench_.core_->stats().unproven_deposals, ++refused);
  }
  // A later coordinator does give these numbers out.
  v1::Op op = PutOp(workers[0], "k", "v");
  op.mutable_txn()->mutable_fence()->set_term_seen(term + 65537);
  op.mutable_txn()->mutable_fence()->set_revision_seen(((term + 65537) << 40) + 7);
  op.mutable_txn()->mutable_fence()->set_cluster(0xc1);
  bench_.Do(op);
  EXPECT_TRUE(bench_.deposed_);
}

TEST_F(CoreTest, Fence_HigherTermOfAMembersAgent_DeposesTheCoordinator) {
  std::vector<Worker> workers = Form(1);
  v1::Op op;
  v1::ArriveManyRequest* arrive = op.mutable_arrive_many();
  arrive->mutable_fence()->set_job_id("j");
  arrive->mutable_fence()->set_worker_id("node-h0");
  arrive->mutable_fence()->set_incarnation(7);
  arrive->mutable_fence()->set_generation(1);
  arrive->mutable_fence()->set_term_seen(5);
  arrive->mutable_fence()->set_cluster(0xc1);
  bench_.Do(op, "node-of-nobody");
  EXPECT_FALSE(bench_.deposed_);
  bench_.Do(op, "node-h0");
  EXPECT_TRUE(bench_.deposed_);
}

TEST_F(CoreTest, Fence_HigherTermWithoutProof_IsRefusedAndDeposesNobody) {
  std::vector<Worker> workers = Form(1);
  const auto ahead = [](v1::Fence* fence, uint64_t cluster) {
    fence->set_term_seen(99);
    fence->set_cluster(cluster);
  };
  std::vector<v1::Op> ops;
  // A member that does not say which cluster's term that was.
  ops.push_back(PutOp(workers[0], "k", "v"));
  ahead(ops.back().mutable_txn()->mutable_fence(), 0);
  // Strangers that name the cluster: another process of the worker, another worker, another job, an
  // operator.
  for (const Worker& worker : {Worker{"w0", 5, "h0", 1}, Worker{"x", 100, "h0", 1}}) {
    ops.push_back(PutOp(worker, "k", "v"));
    ahead(ops.back().mutable_txn()->mutable_fence(), 0xc1);
    ops.push_back(JoinOp(worker, spec_));
    ahead(ops.back().mutable_join()->mutable_fence(), 0xc1);
  }
  ops.emplace_back().mutable_heartbeat()->mutable_fence()->set_job_id("unknown");
  ahead(ops.back().mutable_heartbeat()->mutable_fence(), 0xc1);
  ops.emplace_back().mutable_end_generation()->mutable_fence()->set_job_id("j");
  ahead(ops.back().mutable_end_generation()->mutable_fence(), 0xc1);
  ops.emplace_back().mutable_report_exit()->mutable_fence()->set_job_id("j");
  ahead(ops.back().mutable_report_exit()->mutable_fence(), 0xc1);
  ops.emplace_back().mutable_recall_barriers()->mutable_fence()->set_job_id("j");
  ahead(ops.back().mutable_recall_barriers()->mutable_fence(), 0xc1);
  for (const v1::Op& op : ops) {
    const CallId call = bench_.Do(op);
    EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_STALE_TERM) << op.DebugString();
    EXPECT_EQ(bench_.Error(call).code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
    EXPECT_EQ(bench_.Error(call).detail().current_term(), 1u);
  }
  EXPECT_FALSE(bench_.deposed_);
  EXPECT_EQ(bench_.core_->stats().unproven_deposals, ops.size());
  EXPECT_EQ(Get("k"), "(absent)");
  EXPECT_FALSE(bench_.Result(Beat(workers[0])).has_error());
}

TEST_F(CoreTest, Agent_ThatHasSeenAHigherTerm_DeposesIfItSpeaksForASeat) {
  Form(1);
  v1::Hello hello;
  hello.set_term_seen(5);
  hello.set_cluster_id("another");
  bench_.core_->AttachAgent("node-h0", hello, bench_.now_, &bench_.out_);
  hello.set_cluster_id("c1");
  bench_.core_->AttachAgent("node-of-nobody", hello, bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_FALSE(bench_.deposed_);
  EXPECT_EQ(bench_.core_->stats().unproven_deposals, 1u);
  bench_.core_->AttachAgent("node-h0", hello, bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_TRUE(bench_.deposed_);
  EXPECT_THAT(bench_.deposed_why_, HasSubstr("--restored"));
}

// The client's knowledge of a lost state.
struct Lost {
  std::vector<Record> copy;  // of the journal, before it was lost
  Worker survivor, young;    // the young one was started after the copy was made
  uint64_t generation = 0, revision = 0, key_version = 0, key_revision = 0;
};

class RestoredCoreTest : public CoreTest {
 protected:
  // A job continues after a copy of the journal was made: "k" is written again, a worker is started
  // again, and a generation is sealed, over a restart of the coordinator.
  Lost LoseAState() {
    Lost lost;
    std::vector<Worker> workers = Form(2);
    bench_.Do(PutOp(workers[0], "k", "copied", /*durable=*/true));
    v1::Op raise;
    raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
    raise.mutable_raise_trigger()->set_name("stop");
    bench_.Do(raise);
    lost.copy = bench_.journal_;
    bench_.Restart();
    Worker young = workers[1];
    young.incarnation = 999;
    std::vector<CallId> calls = {bench_.Do(JoinOp(young, spec_), "node-h0")};
    calls.push_back(bench_.Do(JoinOp(workers[0], spec_), "node-h0"));
    Sit(&young, calls[0]);
    Sit(&workers[0], calls[1]);
    const CallId put = bench_.Do(PutOp(workers[0], "k", "lost", /*durable=*/true));
    lost.key_revision = bench_.Result(put).txn().results(0).mod_revision();
    lost.key_version = 2;
    lost.survivor = workers[0];
    lost.young = young;
    lost.generation = young.generation;
    lost.revision = bench_.core_->revision();
    EXPECT_EQ(lost.generation, 2u);
    return lost;
  }
  bool Holds(v1::Compare::Target target, uint64_t number) {
    v1::Op op;
    op.mutable_txn()->mutable_fence()->set_job_id("j");
    v1::Compare* compare = op.mutable_txn()->add_compares();
    compare->set_key("k");
    compare->set_target(target);
    compare->set_number(number);
    return bench_.Result(bench_.Do(op)).txn().succeeded();
  }
  std::optional<v1::OpError> Watch(uint64_t from) {
    v1::WatchRequest request;
    request.set_job_id("j");
    request.set_keys(true);
    v1::WatchBatch batch;
    return bench_.core_->ReadWatch(request, from, ~0ull, 1 << 20, &batch);
  }
};

TEST_F(RestoredCoreTest, Marked_NothingSeenOfTheLostStateIsTakenForNew) {
  const Lost lost = LoseAState();
  bench_.StartFromCopy(lost.copy, /*restored=*/true);
  // Revisions and versions.
  EXPECT_GT(bench_.core_->revision(), lost.revision);
  EXPECT_EQ(Get("k"), "copied");
  EXPECT_FALSE(Holds(v1::Compare::MOD_REVISION, lost.key_revision));
  for (int writes = 0; writes < 3; ++writes) {
    EXPECT_FALSE(Holds(v1::Compare::VERSION, lost.key_version)) << "after " << writes;
    v1::Op put;
    put.mutable_txn()->mutable_fence()->set_job_id("j");
    put.mutable_txn()->add_then()->mutable_put()->set_key("k");
    put.mutable_txn()->mutable_then(0)->mutable_put()->set_klass(v1::KV_CLASS_DURABLE);
    bench_.Do(put);
  }
  // Watchers.
  const std::optional<v1::OpError> watch = Watch(lost.revision + 1);
  ASSERT_TRUE(watch.has_value());
  EXPECT_EQ(watch->detail().reason(), v1::ERROR_REASON_COMPACTED);
  // Generations, also the one that the copy does not know; and a worker that it does not know is
  // not taken for an older one.
  for (const Worker& worker : {lost.survivor, lost.young}) {
    const CallId call = bench_.Do(PutOp(worker, "k", "v"));
    EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_STALE_GENERATION);
    EXPECT_GT(bench_.Error(call).detail().current_generation(), lost.generation);
    EXPECT_TRUE(bench_.Result(Beat(worker)).heartbeat().generation_ended());
  }
  // Triggers: it is unknown which were acted on.
  EXPECT_FALSE(bench_.deposed_);
  std::vector<Worker> workers = {lost.survivor, lost.young};
  JoinAll(&workers);
  EXPECT_GT(workers[0].generation, lost.generation);
  v1::Op poll;
  workers[0].FillFence(poll.mutable_poll_triggers()->mutable_fence());
  poll.mutable_poll_triggers()->set_rank(workers[0].rank);
  EXPECT_EQ(bench_.Result(bench_.Do(poll)).poll_triggers().triggers_size(), 0);
}

TEST_F(RestoredCoreTest, Marked_TheNextStartsReadTheSame) {
  const Lost lost = LoseAState();
  bench_.StartFromCopy(lost.copy, /*restored=*/true);
  const uint64_t term = bench_.core_->last_term();
  EXPECT_EQ(bench_.core_->restored_term(), term);
  const std::string state = bench_.core_->Snapshot();
  Core replayed{bench_.options_}, loaded{bench_.options_};
  for (const Record& record : bench_.journal_) ASSERT_TRUE(replayed.Replay(record.payload).ok());
  ASSERT_TRUE(loaded.Restore(state).ok());
  EXPECT_EQ(replayed.Snapshot(), state);
  EXPECT_EQ(loaded.Snapshot(), state);
  EXPECT_EQ(replayed.restored_term(), term);
  EXPECT_EQ(loaded.restored_term(), term);
  bench_.Restart(true);
  EXPECT_EQ(bench_.Reason(bench_.Do(PutOp(lost.survivor, "k", "v"))),
            v1::ERROR_REASON_STALE_GENERATION);
}

TEST_F(RestoredCoreTest, Marked_JobsAreNotOverBeforeTheirWorkersHadALeaseToComeBack) {
  const Lost lost = LoseAState();
  bench_.StartFromCopy(lost.copy, /*restored=*/true);
  v1::Op remove;
  remove.mutable_remove_job()->mutable_fence()->set_job_id("j");
  EXPECT_EQ(bench_.Reason(bench_.Do(remove)), v1::ERROR_REASON_JOB_RUNS);
  bench_.Advance(absl::Seconds(7));
  EXPECT_TRUE(bench_.Result(bench_.Do(remove)).has_remove_job());
}

TEST_F(CoreTest, Fences_OfAWholeWorld_AreThereAfterASnapshot) {
  const int world = 1200;
  const std::vector<Worker> old = Form(world);
  Exit(old[0], 1);
  std::vector<Worker> young = old;
  for (Worker& worker : young) worker.incarnation += 10'000;
  JoinAll(&young);
  bench_.Restart(/*snapshot=*/true);
  for (const Worker& worker : old) {
    EXPECT_EQ(bench_.Reason(bench_.Do(JoinOp(worker, spec_), "node-h0")),
              v1::ERROR_REASON_SUPERSEDED)
        << worker.id;
  }
}

TEST_F(RestoredCoreTest, NotMarked_AMemberThatHasSeenMoreEndsTheCoordinator) {
  const Lost lost = LoseAState();
  bench_.StartFromCopy(lost.copy, /*restored=*/false);
  EXPECT_EQ(bench_.core_->last_term(), 2u) << "the lost term again";
  v1::Op op = PutOp(lost.survivor, "k", "v");
  v1::Fence* fence = op.mutable_txn()->mutable_fence();
  fence->set_cluster(0xc1);
  fence->set_term_seen(2);
  fence->set_revision_seen(bench_.core_->revision());
  EXPECT_EQ(bench_.Reason(bench_.Do(op)), v1::ERROR_REASON_FUTURE_GENERATION);
  EXPECT_FALSE(bench_.deposed_);
  fence->set_revision_seen(lost.revision);
  EXPECT_EQ(bench_.Reason(bench_.Do(op)), v1::ERROR_REASON_STOPPING);
  EXPECT_TRUE(bench_.deposed_);
  EXPECT_THAT(bench_.deposed_why_, HasSubstr("muster-coordinator --restored"));
}

TEST_F(RestoredCoreTest, NotMarked_EveryErrorOfTheLostStateNamesTheWayOut) {
  const Lost lost = LoseAState();
  bench_.StartFromCopy(lost.copy, /*restored=*/false);
  const CallId future = bench_.Do(PutOp(lost.survivor, "k", "v"));
  EXPECT_THAT(bench_.Error(future).message(), HasSubstr("--restored"));
  // Its worker was started after the copy was made: no proof, so it is only refused.
  v1::Op op = PutOp(lost.young, "k", "v");
  op.mutable_txn()->mutable_fence()->set_cluster(0xc1);
  op.mutable_txn()->mutable_fence()->set_revision_seen(lost.revision);
  const CallId ahead = bench_.Do(op);
  EXPECT_EQ(bench_.Reason(ahead), v1::ERROR_REASON_STALE_TERM);
  EXPECT_THAT(bench_.Error(ahead).message(), HasSubstr("--restored"));
  EXPECT_FALSE(bench_.deposed_);
  const std::optional<v1::OpError> watch = Watch(lost.revision + 1);
  ASSERT_TRUE(watch.has_value());
  EXPECT_EQ(watch->detail().reason(), v1::ERROR_REASON_COMPACTED);
  EXPECT_FALSE(Watch(bench_.core_->revision() + 1).has_value());
}

TEST_F(CoreTest, GetMembers_HasTheCountOfProgressOfBeatsAndHeartbeats) {
  const std::vector<Worker> workers = Form(2, true, 2);
  v1::Op heartbeat;
  workers[0].FillFence(heartbeat.mutable_heartbeat()->mutable_fence());
  heartbeat.mutable_heartbeat()->set_progress(7);
  bench_.Do(heartbeat);
  v1::Beat beat;
  v1::WorkerBeat* const one = beat.add_workers();
  one->set_job_id("j");
  one->set_worker_id(workers[1].id);
  one->set_incarnation(workers[1].incarnation);
  one->set_progress(8);
  bench_.core_->HandleBeat("node-" + workers[1].host, beat, bench_.now_, &bench_.out_);
  bench_.Collect();
  v1::Op op;
  op.mutable_get_members()->set_job_id("j");
  const v1::GetMembersReply& reply = bench_.Result(bench_.Do(op)).get_members();
  ASSERT_EQ(reply.members_size(), 2);
  EXPECT_EQ(reply.members(0).progress() + reply.members(1).progress(), 15u);
  // A worker or an agent of an older version says nothing about it.
  one->clear_progress();
  bench_.core_->HandleBeat("node-" + workers[1].host, beat, bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.Result(bench_.Do(op)).get_members().members(workers[1].rank).progress(), 0u);
}

TEST_F(CoreTest, CheckpointThatIsWritten_IsToldOfEachWorkerAndOfAllTogether) {
  const std::vector<Worker> workers = Form(2, true, 2);
  v1::Op heartbeat;
  workers[0].FillFence(heartbeat.mutable_heartbeat()->mutable_fence());
  v1::SaveProgress& save = *heartbeat.mutable_heartbeat()->mutable_save();
  save.set_path("/c/checkpoint_7");
  save.set_step(70);
  save.set_written_bytes(30);
  save.set_bytes(100);
  save.mutable_elapsed()->set_seconds(2);
  save.set_asynchronous(true);
  bench_.Do(heartbeat);
  v1::Beat beat;
  v1::WorkerBeat* const one = beat.add_workers();
  one->set_job_id("j");
  one->set_worker_id(workers[1].id);
  one->set_incarnation(workers[1].incarnation);
  one->mutable_save()->set_step(70);
  one->mutable_save()->set_written_bytes(5);
  one->mutable_save()->set_bytes(50);
  one->mutable_save()->mutable_elapsed()->set_seconds(3);
  const auto said = [&] {
    bench_.core_->HandleBeat("node-" + workers[1].host, beat, bench_.now_, &bench_.out_);
    bench_.Collect();
    v1::StatusReply status;
    bench_.core_->FillStatus(&status);
    return status.jobs(0);
  };
  v1::JobStatus status = said();
  EXPECT_EQ(status.saving(), 2);
  EXPECT_EQ(status.save().path(), "/c/checkpoint_7");
  EXPECT_EQ(status.save().step(), 70);
  EXPECT_EQ(status.save().written_bytes(), 35u);
  EXPECT_EQ(status.save().bytes(), 150u);
  EXPECT_EQ(status.save().elapsed().seconds(), 3);
  v1::Op op;
  op.mutable_get_members()->set_job_id("j");
  const v1::GetMembersReply members = bench_.Result(bench_.Do(op)).get_members();
  ASSERT_EQ(members.members_size(), 2);
  EXPECT_EQ(members.members(workers[0].rank).save().written_bytes(), 30u);
  EXPECT_EQ(members.members(workers[1].rank).save().bytes(), 50u);
  // One writes the next checkpoint already.
  one->mutable_save()->set_step(80);
  status = said();
  EXPECT_EQ(status.saving(), 1);
  EXPECT_EQ(status.save().step(), 70);
  one->clear_save();
  heartbeat.mutable_heartbeat()->clear_save();
  bench_.Do(heartbeat);
  EXPECT_FALSE(said().has_save());
}

TEST_F(CoreTest, GetMembers_OfManyThatFailedWithLastWords_FitsAMessage) {
  std::vector<Worker> workers = Form(100, /*end_on_failure=*/false);
  for (const Worker& worker : workers) {
    v1::Op op;
    v1::ReportExitRequest* exit = op.mutable_report_exit();
    exit->mutable_fence()->set_job_id("j");
    exit->set_worker_id(worker.id);
    exit->set_incarnation(worker.incarnation);
    exit->mutable_cause()->set_exit_code(3);
    for (int i = 0; i < 64; ++i) exit->mutable_cause()->add_last_log_lines(std::string(1000, 'x'));
    bench_.Do(op);
  }
  v1::Op op;
  op.mutable_get_members()->set_job_id("j");
  const v1::GetMembersReply& reply = bench_.Result(bench_.Do(op)).get_members();
  EXPECT_LT(reply.ByteSizeLong(), size_t{2} << 20);
  ASSERT_EQ(reply.members_size(), 100);
  EXPECT_EQ(reply.members(0).exit().last_log_lines_size(), 64);
  EXPECT_EQ(reply.members(99).exit().exit_code(), 3);
}

TEST_F(CoreTest, Status_SaysWhatARendezvousWaitsFor) {
  const auto job = [this] {
    v1::StatusReply status;
    bench_.core_->FillStatus(&status);
    return status.jobs(0);
  };
  spec_.set_min_workers(3);
  spec_.set_max_workers(3);
  std::vector<Worker> workers = {{"w0", 1, "h0"}, {"w1", 2, "h1"}, {"w2", 3, "h2"}};
  bench_.Do(JoinOp(workers[0], spec_));
  EXPECT_EQ(job().waits_for(), "2 of 3 workers");
  bench_.Advance(absl::Seconds(60));
  EXPECT_EQ(job().waits_at_most().seconds(), 540);  // of the join timeout
  bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_EQ(job().waits_for(), "1 of 3 workers");
  bench_.Do(JoinOp(workers[2], spec_));
  EXPECT_EQ(job().waits_for(), "");
  EXPECT_FALSE(job().has_waits_at_most());
  bench_.Do(JoinOp({"w3", 4, "h3"}, spec_));
  EXPECT_EQ(job().waits_for(), "a free seat: generation 1 runs with 3 workers");
}

TEST_F(CoreTest, GetMembers_MoreThanAMessageHolds_ComeInPages) {
  constexpr int kWorkers = 9000;
  for (int i = 0; i < kWorkers; ++i) {
    Worker worker = {absl::StrCat(std::string(200, 'w'), i), static_cast<uint64_t>(i + 1),
                     std::string(200, 'h')};
    spec_.set_min_workers(kWorkers + 1);  // no worker is seated: all wait
    spec_.set_max_workers(kWorkers + 1);
    bench_.Do(JoinOp(worker, spec_));
  }
  v1::Op op;
  op.mutable_get_members()->set_job_id("j");
  std::vector<std::string> seen;
  int pages = 0;
  do {
    const v1::GetMembersReply reply = bench_.Result(bench_.Do(op)).get_members();
    EXPECT_LT(reply.ByteSizeLong(), size_t{4} << 20);
    for (const v1::Member& member : reply.members()) seen.push_back(member.worker_id());
    op.mutable_get_members()->set_first(reply.next());
    ++pages;
  } while (op.get_members().first() > 0);
  EXPECT_EQ(pages, 2);
  ASSERT_EQ(seen.size(), static_cast<size_t>(kWorkers));
  for (int i = 0; i < kWorkers; ++i) {
    ASSERT_EQ(seen[i], absl::StrCat(std::string(200, 'w'), i));
  }
  for (const int first : {-1, kWorkers + 1}) {
    op.mutable_get_members()->set_first(first);
    EXPECT_EQ(bench_.Reason(bench_.Do(op)), v1::ERROR_REASON_BAD_FIELD);
  }
}

TEST_F(CoreTest, Fence_OfAnotherCluster_IsRefusedAndDeposesNobody) {
  bench_.Restart();  // with its cluster_id
  std::vector<Worker> workers = Form(1);
  v1::Op op = PutOp(workers[0], "k", "v");
  v1::Fence& fence = *op.mutable_txn()->mutable_fence();
  fence.set_term_seen(7);
  fence.set_cluster(0xc2);
  EXPECT_EQ(bench_.Reason(bench_.Do(op)), v1::ERROR_REASON_OTHER_CLUSTER);
  EXPECT_FALSE(bench_.deposed_);
  fence.set_cluster(0xc1);
  fence.set_term_seen(1);
  EXPECT_FALSE(bench_.Result(bench_.Do(op)).has_error());
  // Workers from there may start over, also in a job that is known here.
  Worker stray{.id = "w1", .incarnation = 55};
  v1::Op join = JoinOp(stray, spec_);
  join.mutable_join()->mutable_fence()->set_term_seen(7);
  join.mutable_join()->mutable_fence()->set_cluster(0xc2);
  const CallId call = bench_.Do(join);
  EXPECT_FALSE(bench_.deposed_);
  EXPECT_FALSE(bench_.Answered(call)) << "it waits for a seat";
}

TEST_F(CoreTest, Fence_NotSeated_NotMember) {
  Form(1);
  Worker stranger{"x", 5, "h", 1};
  EXPECT_EQ(bench_.Reason(bench_.Do(PutOp(stranger, "k", "v"))), v1::ERROR_REASON_NOT_MEMBER);
}

TEST_F(CoreTest, Handle_BeforeStartTerm_Starting) {
  Core core{CoreOptions()};
  Output out;
  core.Handle(1, v1::Op(), {}, kStart, &out);
  EXPECT_EQ(out.replies[0].answer->Parse().error().detail().reason(), v1::ERROR_REASON_STARTING);
  EXPECT_TRUE(out.replies[0].answer->Parse().error().detail().retryable());
}

TEST_F(CoreTest, Lease_RunsOut_EndsTheGenerationAndNamesTheRank) {
  std::vector<Worker> workers = Form(2);
  const CallId barrier = Arrive(workers[0], "b", 0);
  for (int i = 0; i < 6; ++i) {
    bench_.Advance(absl::Seconds(1));
    Beat(workers[0]);
  }
  bench_.Advance(absl::Milliseconds(10));
  EXPECT_EQ(bench_.Reason(barrier), v1::ERROR_REASON_GENERATION_ENDED);
  EXPECT_EQ(bench_.Error(barrier).detail().culprits(0).rank(), 1);
  EXPECT_THAT(bench_.Error(barrier).message(), HasSubstr("no sign of life"));
  EXPECT_EQ(bench_.core_->stats().workers_lost, 1u);
}

TEST_F(CoreTest, Lease_RunsOutAfterTheEnd_CountsAsLostToo) {
  std::vector<Worker> workers = Form(4, true, 2);
  const auto beat = [&](const Worker& worker) {
    v1::Beat message;
    v1::WorkerBeat* const one = message.add_workers();
    one->set_job_id("j");
    one->set_worker_id(worker.id);
    one->set_incarnation(worker.incarnation);
    bench_.core_->HandleBeat("node-" + worker.host, message, bench_.now_, &bench_.out_);
    bench_.Collect();
  };
  for (int i = 0; i < 4; ++i) {  // host h1 has lost power: w1 and w3
    bench_.Advance(absl::Seconds(2));
    beat(workers[0]);
    beat(workers[2]);
  }
  const auto members = [this](v1::WorkerState state) {
    std::map<v1::WorkerState, int64_t> counts = bench_.core_->MembersByState();
    return counts[state];
  };
  EXPECT_EQ(members(v1::WORKER_STATE_RUNNING), 2);
  EXPECT_EQ(members(v1::WORKER_STATE_LOST), 2);
  EXPECT_EQ(bench_.core_->stats().workers_lost, 2u);
  // A worker that waits for the next generation counts once.
  bench_.Do(JoinOp(workers[0], spec_), "node-h0");
  EXPECT_EQ(members(v1::WORKER_STATE_RUNNING), 1);
  EXPECT_EQ(members(v1::WORKER_STATE_JOINING), 1);
  bench_.Advance(absl::Hours(1));
  EXPECT_EQ(members(v1::WORKER_STATE_RUNNING), 0);
  EXPECT_EQ(members(v1::WORKER_STATE_LOST), 4);
  EXPECT_EQ(bench_.core_->stats().workers_lost, 4u);
  v1::Op op;
  op.mutable_get_members()->set_job_id("j");
  const CallId call = bench_.Do(op);
  for (const v1::Member& member : bench_.Result(call).get_members().members()) {
    EXPECT_EQ(member.state(), v1::WORKER_STATE_LOST) << member.worker_id();
  }
}

TEST_F(CoreTest, Lease_RenewedByBeats_DoesNotRunOut) {
  std::vector<Worker> workers = Form(2);
  for (int i = 0; i < 20; ++i) {
    v1::Beat beat;
    for (const Worker& worker : workers) {
      v1::WorkerBeat* one = beat.add_workers();
      one->set_job_id("j");
      one->set_worker_id(worker.id);
      one->set_incarnation(worker.incarnation);
      one->set_step(i);
    }
    bench_.core_->HandleBeat("node-h0", beat, bench_.now_, &bench_.out_);
    bench_.Advance(absl::Seconds(2));
  }
  EXPECT_EQ(bench_.core_->stats().workers_lost, 0u);
}

TEST_F(CoreTest, Lease_BeatsOfAnotherIncarnation_DoNotRenew) {
  std::vector<Worker> workers = Form(2);
  for (int i = 0; i < 4; ++i) {
    Beat(workers[1]);
    v1::Beat beat;
    v1::WorkerBeat* one = beat.add_workers();
    one->set_job_id("j");
    one->set_worker_id("w0");
    one->set_incarnation(4711);
    bench_.core_->HandleBeat("node", beat, bench_.now_, &bench_.out_);
    bench_.Advance(absl::Seconds(2));
  }
  EXPECT_EQ(bench_.core_->stats().workers_lost, 1u);
}

TEST_F(CoreTest, Lease_LostWithoutEnding_IsRefusedUntilItJoinsAgain) {
  std::vector<Worker> workers = Form(2, false);
  for (int i = 0; i < 4; ++i) {
    bench_.Advance(absl::Seconds(2));
    Beat(workers[0]);
  }
  const CallId late = Beat(workers[1]);
  EXPECT_EQ(bench_.Reason(late), v1::ERROR_REASON_LEASE_EXPIRED);
  EXPECT_EQ(bench_.Error(late).detail().current_generation(), 1u);
  EXPECT_EQ(bench_.Error(late).detail().current_term(), 1u);
  EXPECT_EQ(bench_.Reason(Arrive(workers[0], "b", 0)), v1::ERROR_REASON_RANK_FAILED);
  const CallId again = bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_EQ(bench_.Result(again).join().rank(), workers[1].rank);
  EXPECT_TRUE(bench_.Result(Beat(workers[1])).has_heartbeat());
}

TEST_F(CoreTest, Pause_OfTheCoordinator_GrantsAFullLease) {
  std::vector<Worker> workers = Form(2);
  bench_.now_ += absl::Seconds(60);  // nothing ran: no tick, no event
  bench_.core_->Tick(bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.core_->stats().workers_lost, 0u);
  bench_.Advance(absl::Seconds(5));
  Beat(workers[0]);
  EXPECT_EQ(bench_.core_->stats().workers_lost, 0u);
  bench_.Advance(absl::Seconds(2));
  EXPECT_EQ(bench_.core_->stats().workers_lost, 1u);
}

// Returns a beat of the agent of `host` about those workers.
v1::Beat BeatOf(const std::vector<Worker>& workers, const std::string& host) {
  v1::Beat beat;
  for (const Worker& worker : workers) {
    if (worker.host != host) continue;
    v1::WorkerBeat* one = beat.add_workers();
    one->set_job_id("j");
    one->set_worker_id(worker.id);
    one->set_incarnation(worker.incarnation);
  }
  return beat;
}

class CutTest : public CoreTest {
 protected:
  // Forms a generation with one worker on each of `hosts` hosts, each with its agent.
  void FormWithAgents(int hosts) {
    workers_ = Form(hosts, true, hosts);
    for (int i = 0; i < hosts; ++i) Attach(i);
  }
  void Attach(int host) {
    bench_.core_->AttachAgent(absl::StrCat("node-h", host), v1::Hello(), bench_.now_, &bench_.out_);
    bench_.Collect();
  }
  void AgentBeats(int host, bool with_workers = true) {
    const std::string name = absl::StrCat("h", host);
    bench_.core_->HandleBeat("node-" + name, with_workers ? BeatOf(workers_, name) : v1::Beat(),
                             bench_.now_, &bench_.out_);
    bench_.Collect();
  }
  // Lets a spare on host 9 join.
  CallId SpareJoins() {
    v1::Op spare = JoinOp({"spare", 900, "h9"}, spec_);
    spare.mutable_join()->set_spare(true);
    return bench_.Do(spare, "node-h9");
  }
  // Lets seconds pass in which only these hosts are heard, each at least twice in a lease.
  void Pass(int seconds, const std::vector<int>& heard) {
    for (int i = 0; i < seconds; ++i) {
      bench_.Advance(absl::Seconds(1));
      for (const int host : heard) AgentBeats(host);
    }
  }
  v1::JobStatus Job() {
    v1::StatusReply status;
    bench_.core_->FillStatus(&status);
    return status.jobs_size() == 1 ? status.jobs(0) : v1::JobStatus();
  }
  uint64_t lost() const { return bench_.core_->stats().workers_lost; }

  std::vector<Worker> workers_;
};

TEST_F(CutTest, NobodyIsHeard_TheGenerationIsThereWhenTheyAreBack) {
  FormWithAgents(3);
  const CallId a = Arrive(workers_[0], "b", 0, absl::Minutes(10));
  Pass(4, {0, 1, 2});
  bench_.Advance(absl::Seconds(1.9));
  AgentBeats(2);  // each beats in its own time
  Pass(80, {});
  EXPECT_EQ(lost(), 0u);
  EXPECT_EQ(Job().rendezvous_state(), "SEALED");
  EXPECT_EQ(Job().silent(), 3);
  EXPECT_EQ(Job().silent_for().seconds(), 80);
  EXPECT_THAT(Job().silent_why(), HasSubstr("all workers of its generation are silent"));
  EXPECT_THAT(
      bench_.notices_,
      ::testing::Contains(HasSubstr("generation 1 continues if they are back within 1m30s")));
  AgentBeats(1);  // the others reconnect a little later
  Pass(4, {1});
  AgentBeats(0);
  AgentBeats(2);
  Pass(10, {0, 1, 2});
  EXPECT_EQ(lost(), 0u);
  EXPECT_EQ(Job().silent(), 0);
  EXPECT_THAT(bench_.notices_, ::testing::Contains(HasSubstr("all workers are back")));
  const CallId b = Arrive(workers_[1], "b", 0, absl::Minutes(10));
  const CallId c = Arrive(workers_[2], "b", 0, absl::Minutes(10));
  for (const CallId call : {a, b, c}) EXPECT_TRUE(bench_.Result(call).has_arrive());
}

TEST_F(CutTest, NobodyIsHeardForLongerThanTheTolerance_EndsTheGeneration) {
  FormWithAgents(2);
  Pass(95, {});
  EXPECT_EQ(lost(), 0u);
  Pass(3, {});
  EXPECT_EQ(lost(), 2u);
  EXPECT_EQ(Job().rendezvous_state(), "ENDED");
  EXPECT_THAT(bench_.notices_,
              ::testing::Contains(HasSubstr("the outage_tolerance of 1m30s has also passed")));
}

TEST_F(CutTest, ToleranceOfTheJob_CountsInsteadOfTheDefault) {
  spec_ = Spec(1, 1);
  *spec_.mutable_outage_tolerance() = ToProto(absl::Seconds(4));
  workers_ = {{"w0", 100, "h0"}};
  JoinAll(&workers_);
  Pass(9, {});
  EXPECT_EQ(lost(), 0u);
  Pass(3, {});
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CutTest, WorkersWithOtherTolerances_AreOfTheSameJob) {
  workers_ = {{"w0", 100, "h0"}, {"w1", 101, "h1"}};
  spec_ = Spec(2, 2);
  const CallId a = bench_.Do(JoinOp(workers_[0], spec_));
  *spec_.mutable_outage_tolerance() = ToProto(absl::Seconds(4));
  const CallId b = bench_.Do(JoinOp(workers_[1], spec_));
  EXPECT_TRUE(bench_.Result(a).has_join());
  EXPECT_TRUE(bench_.Result(b).has_join());
}

TEST_F(CutTest, OneMachineIsSilent_IsLostAfterTheLease) {
  FormWithAgents(2);
  Pass(7, {0});
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CutTest, OneDoesNotComeBackFromTheCut_IsLostAWhileAfterTheOthersReturn) {
  FormWithAgents(3);
  Pass(30, {});
  EXPECT_EQ(lost(), 0u);
  Pass(15, {0, 1});
  EXPECT_EQ(lost(), 0u);
  Pass(3, {0, 1});
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CutTest, AgentThatIsBackWithoutItsWorker_IsBelieved) {
  FormWithAgents(2);
  AgentBeats(0);
  AgentBeats(1);
  Pass(30, {});
  for (int i = 0; i < 4; ++i) {
    bench_.Advance(absl::Seconds(1));
    AgentBeats(0);
    AgentBeats(1, /*with_workers=*/false);
  }
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CutTest, AgentThatNoLongerListsItsOnlyWorker_IsNoCut) {
  FormWithAgents(1);
  AgentBeats(0);
  for (int i = 0; i < 8; ++i) {
    bench_.Advance(absl::Seconds(1));
    AgentBeats(0, /*with_workers=*/false);
  }
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CutTest, SomebodyJoinsMeanwhile_EndsTheGenerationForItIfNobodyFollows) {
  FormWithAgents(1);
  Pass(20, {});
  bench_.Do(JoinOp({"other", 900, "h9"}, spec_));
  Pass(14, {});
  EXPECT_EQ(lost(), 0u);  // it may be the first that is back from a cut
  Pass(4, {});
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CutTest, SomebodyJoinsThroughAnAgentThatWasHeardThroughout_EndsTheGenerationAtOnce) {
  FormWithAgents(1);
  Attach(9);
  Pass(20, {9});
  EXPECT_EQ(lost(), 0u);
  bench_.Do(JoinOp({"other", 900, "h9"}, spec_), "node-h9");
  bench_.Advance(absl::Milliseconds(10));
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CutTest, SpareThatIsBackFirst_LeavesTheOthersTimeToReturn) {
  for (const bool restart : {false, true}) {
    SCOPED_TRACE(restart);
    FormWithAgents(2);
    const CallId waits = SpareJoins();
    Attach(9);
    Pass(4, {0, 1, 9});
    Pass(20, {});
    if (restart) {
      bench_.Restart();
      Pass(7, {});
    }
    Attach(9);
    if (restart) SpareJoins();
    Pass(13, {9});
    EXPECT_EQ(lost(), 0u);
    AgentBeats(0);
    Pass(10, {0, 9});
    EXPECT_EQ(lost(), 0u);
    AgentBeats(1);
    Pass(20, {0, 1, 9});
    EXPECT_EQ(lost(), 0u);
    EXPECT_EQ(Job().silent(), 0);
    EXPECT_FALSE(bench_.Answered(waits));
    bench_ = Bench(CoreOptions());
  }
}

TEST_F(CutTest, SpareThatIsBackAlone_EndsTheGenerationAWhileAfterItsReturn) {
  FormWithAgents(2);
  SpareJoins();
  Attach(9);
  Pass(4, {0, 1, 9});
  Pass(20, {});
  Pass(15, {9});
  EXPECT_EQ(lost(), 0u);
  Pass(3, {9});
  EXPECT_GE(lost(), 1u);
}

TEST_F(CutTest, SpareThatWasHeardThroughout_EndsTheGenerationAfterTheLease) {
  FormWithAgents(2);
  SpareJoins();
  Attach(9);
  Pass(4, {0, 1, 9});
  Pass(7, {9});
  EXPECT_GE(lost(), 1u);
}

TEST_F(CutTest, NameIsNeededMeanwhile_IsFreeAfterTheLease) {
  for (const bool remove : {true, false}) {
    SCOPED_TRACE(remove);
    FormWithAgents(2);
    Pass(4, {});
    v1::Op op = JoinOp({"other", 900, "h9"}, Spec(1, 1));
    if (remove) op = v1::Op();
    if (remove) op.mutable_remove_job()->mutable_fence()->set_job_id("j");
    EXPECT_TRUE(bench_.Result(bench_.Do(op)).has_error());
    Pass(8, {});
    EXPECT_EQ(Job().silent(), 2);
    const CallId call = bench_.Do(op);
    EXPECT_FALSE(bench_.Result(call).has_error()) << bench_.Error(call).ShortDebugString();
    EXPECT_EQ(Job().world_size(), remove ? 0 : 1);
  }
}

TEST_F(CutTest, MostAgentsFallSilentAtOnce_AreWaitedFor) {
  FormWithAgents(5);
  Pass(4, {0, 1, 2, 3, 4});
  Pass(40, {0, 1});
  EXPECT_EQ(lost(), 0u);
  EXPECT_EQ(Job().silent(), 3);
  EXPECT_THAT(Job().silent_why(), HasSubstr("3 of 5 agents fell silent at once"));
  Pass(10, {0, 1, 2, 3, 4});
  EXPECT_EQ(lost(), 0u);
  EXPECT_EQ(Job().silent(), 0);
}

TEST_F(CutTest, AgentThatReconnects_IsNotTakenAtItsWordBeforeItsFirstBeat) {
  FormWithAgents(2);
  Pass(30, {});
  Attach(0);
  Attach(1);
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(lost(), 0u);
}

class CatchUpTest : public CutTest {
 protected:
  CatchUpTest() {
    CoreOptions options;
    options.catches_up = true;
    bench_ = Bench(options);
  }
};

TEST_F(CatchUpTest, LeaseThatEnded_RunsOutOnlyWhenAllThatCameIsRead) {
  FormWithAgents(2);
  Pass(4, {0, 1});
  Pass(7, {0});  // the beats of the other are there, but unread
  EXPECT_TRUE(bench_.asked_to_catch_up_);
  EXPECT_EQ(lost(), 0u);
  AgentBeats(1);
  bench_.core_->CaughtUp(bench_.now_, bench_.now_, &bench_.out_);
  Pass(3, {0});
  EXPECT_EQ(lost(), 0u);
}

TEST_F(CatchUpTest, NothingCameThatWasUnread_IsLost) {
  FormWithAgents(2);
  Pass(6, {0});
  bench_.Advance(absl::Milliseconds(10));
  EXPECT_EQ(lost(), 0u);
  bench_.core_->CaughtUp(bench_.now_, bench_.now_, &bench_.out_);
  bench_.Collect();
  bench_.Advance(absl::Milliseconds(1));
  EXPECT_EQ(lost(), 1u);
}

TEST_F(CatchUpTest, SilentAfterTheEnd_CountAsLostOnceAllIsReadAndWatchersAreTold) {
  FormWithAgents(3);
  Exit(workers_[0], 1);
  const uint64_t from = bench_.core_->revision() + 1;
  const auto states = [this] {
    v1::Op op;
    op.mutable_get_members()->set_job_id("j");
    const CallId call = bench_.Do(op);
    std::vector<v1::WorkerState> all;
    for (const v1::Member& member : bench_.Result(call).get_members().members()) {
      all.push_back(member.state());
    }
    return all;
  };
  bench_.Advance(absl::Seconds(7));
  EXPECT_THAT(states(), ElementsAre(v1::WORKER_STATE_EXITED, v1::WORKER_STATE_RUNNING,
                                    v1::WORKER_STATE_RUNNING))
      << "their beats may be among what is unread";
  bench_.core_->CaughtUp(bench_.now_, bench_.now_, &bench_.out_);
  bench_.Collect();
  bench_.Advance(absl::Minutes(1));
  EXPECT_EQ(bench_.core_->stats().workers_lost, 2u);
  EXPECT_THAT(states(),
              ElementsAre(v1::WORKER_STATE_EXITED, v1::WORKER_STATE_LOST, v1::WORKER_STATE_LOST));
  AgentBeats(1);
  EXPECT_EQ(states()[1], v1::WORKER_STATE_RUNNING);
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_members(true);
  v1::WatchBatch batch;
  ASSERT_FALSE(bench_.core_->ReadWatch(request, from, ~0ull, 1 << 20, &batch).has_value());
  std::vector<std::pair<int, v1::WorkerState>> told;
  for (const v1::WatchEvent& event : batch.events()) {
    if (event.has_member()) told.emplace_back(event.member().rank(), event.member().state());
  }
  EXPECT_THAT(told,
              ElementsAre(std::pair(1, v1::WORKER_STATE_LOST), std::pair(2, v1::WORKER_STATE_LOST),
                          std::pair(1, v1::WORKER_STATE_RUNNING)));
}

TEST_F(CatchUpTest, CoordinatorThatNeverCatchesUp_StillFindsTheDead) {
  FormWithAgents(2);
  Pass(95, {0});
  EXPECT_EQ(lost(), 0u);
  Pass(6, {0});
  EXPECT_EQ(lost(), 1u);
  EXPECT_THAT(bench_.notices_,
              ::testing::Contains(HasSubstr("has been behind on its incoming messages")));
}

TEST_F(CutTest, RestartedCoordinatorThatHearsNobody_WaitsForThem) {
  FormWithAgents(2);
  bench_.Restart();
  Pass(80, {});
  EXPECT_EQ(lost(), 0u);
  Attach(0);
  Attach(1);
  Pass(10, {0, 1});
  EXPECT_EQ(lost(), 0u);
  EXPECT_EQ(Job().rendezvous_state(), "SEALED");
}

TEST_F(CutTest, Restart_AgentThatConnectsLate_KeepsItsWorkers) {
  FormWithAgents(2);
  bench_.Restart();
  Attach(0);
  Pass(12, {0});  // the other's attempt to connect takes 10 s
  EXPECT_EQ(lost(), 0u);
  Attach(1);
  Pass(10, {0, 1});
  EXPECT_EQ(lost(), 0u);
  EXPECT_EQ(Job().rendezvous_state(), "SEALED");
}

TEST_F(CutTest, Restart_AgentThatNeverConnects_LosesItsWorkers) {
  FormWithAgents(2);
  bench_.Restart();
  Attach(0);
  Pass(17, {0});
  EXPECT_GT(lost(), 0u);
}

TEST_F(CoreTest, Pause_OfTheCoordinator_LetsQueuedArrivalsInBeforeDeadlines) {
  std::vector<Worker> workers = Form(2);
  const CallId a = Arrive(workers[0], "b", 0, absl::Seconds(10));
  bench_.now_ += absl::Seconds(60);
  bench_.core_->Tick(bench_.now_, &bench_.out_);
  bench_.Collect();
  const CallId b = Arrive(workers[1], "b", 0, absl::Seconds(10));
  EXPECT_TRUE(bench_.Result(a).has_arrive());
  EXPECT_TRUE(bench_.Result(b).has_arrive());
}

TEST_F(CoreTest, Exit_IsToldAtOnceToEveryNodeAndWaiter) {
  std::vector<Worker> workers = Form(4, true, 2);
  const CallId barrier = Arrive(workers[0], "b", 0);
  v1::Op wait;
  workers[1].FillFence(wait.mutable_wait()->mutable_fence());
  wait.mutable_wait()->add_keys("never");
  *wait.mutable_wait()->mutable_timeout() = ToProto(absl::Seconds(100));
  const CallId waiting = bench_.Do(wait);
  Exit(workers[3], 0, 9);
  EXPECT_EQ(bench_.Reason(barrier), v1::ERROR_REASON_GENERATION_ENDED);
  EXPECT_EQ(bench_.Reason(waiting), v1::ERROR_REASON_GENERATION_ENDED);
  EXPECT_EQ(bench_.Error(barrier).detail().culprits(0).process_state(), "killed(9)");
  EXPECT_EQ(bench_.Error(barrier).code(), static_cast<int>(absl::StatusCode::kAborted));
  std::vector<std::string> nodes;
  for (const NodeDirective& one : bench_.directives_) {
    EXPECT_TRUE(one.directive->has_generation_ended());
    EXPECT_EQ(one.durable_revision, bench_.journal_.back().revision);
    nodes.push_back(one.node);
  }
  EXPECT_THAT(nodes, ::testing::UnorderedElementsAre("node-h0", "node-h1"));
}

TEST_F(CoreTest, Exit_OfAnOldIncarnation_ChangesNothing) {
  std::vector<Worker> workers = Form(1);
  Worker old = workers[0];
  old.incarnation = 5;
  Exit(old, 1);
  EXPECT_TRUE(bench_.Result(Beat(workers[0])).has_heartbeat());
  EXPECT_EQ(bench_.core_->stats().generations_ended, 0u);
}

TEST_F(CoreTest, Exit_WithCodeZero_OthersGoOnUntilTheyNeedIt) {
  std::vector<Worker> workers = Form(2);
  Exit(workers[1], 0);
  EXPECT_FALSE(bench_.Result(Beat(workers[0])).heartbeat().generation_ended());
  const CallId barrier = Arrive(workers[0], "b", 0);
  EXPECT_EQ(bench_.Reason(barrier), v1::ERROR_REASON_RANK_FAILED);
  EXPECT_THAT(bench_.Error(barrier).message(), HasSubstr("rank 1"));
}

TEST_F(CoreTest, Leave_ByAll_EndsTheGenerationWithoutAFailure) {
  std::vector<Worker> workers = Form(2);
  for (const Worker& worker : workers) {
    v1::Op op;
    worker.FillFence(op.mutable_leave()->mutable_fence());
    EXPECT_TRUE(bench_.Result(bench_.Do(op)).has_leave());
  }
  EXPECT_EQ(bench_.core_->stats().generations_ended, 1u);
  EXPECT_EQ(bench_.core_->stats().workers_failed, 0u);
}

TEST_F(CoreTest, Leave_WhileWaiting_GivesUpThePlace) {
  spec_ = Spec(2, 2);
  Worker a{"a", 1};
  const CallId join = bench_.Do(JoinOp(a, spec_));
  v1::Op op;
  a.FillFence(op.mutable_leave()->mutable_fence());
  EXPECT_TRUE(bench_.Result(bench_.Do(op)).has_leave());
  EXPECT_EQ(bench_.Error(join).code(), static_cast<int>(absl::StatusCode::kCancelled));
}

TEST_F(CoreTest, AgreeAlive_AllGetTheSameSetWithoutTheDead) {
  std::vector<Worker> workers = Form(4, false);
  const auto enter = [&](const Worker& worker) {
    v1::Op op;
    worker.FillFence(op.mutable_agree_alive()->mutable_fence());
    op.mutable_agree_alive()->set_rank(worker.rank);
    return bench_.Do(op);
  };
  const CallId a = enter(workers[0]);
  const CallId b = enter(workers[1]);
  const CallId c = enter(workers[2]);
  EXPECT_FALSE(bench_.Answered(a));
  Exit(workers[1], 1);  // inside, then dead: not in the answer
  EXPECT_FALSE(bench_.Answered(a));
  Exit(workers[3], 1);
  EXPECT_THAT(bench_.Result(a).agree_alive().alive(), ElementsAre(0, 2));
  EXPECT_EQ(bench_.replies_[a].answer, bench_.replies_[c].answer);
  EXPECT_EQ(bench_.replies_[a].answer, bench_.replies_[b].answer);
  EXPECT_GT(bench_.replies_[a].durable_revision, 0u);
}

TEST_F(CoreTest, AgreeAlive_Timeout_NamesTheLivingWhoDidNotCome) {
  std::vector<Worker> workers = Form(2, false);
  v1::Op op;
  workers[0].FillFence(op.mutable_agree_alive()->mutable_fence());
  op.mutable_agree_alive()->set_rank(workers[0].rank);
  *op.mutable_agree_alive()->mutable_timeout() = ToProto(absl::Seconds(3));
  const CallId call = bench_.Do(op);
  bench_.Advance(absl::Seconds(3));
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_BARRIER_TIMEOUT);
  EXPECT_THAT(bench_.Error(call).message(), HasSubstr("rank 1"));
}

// A rank's machine went down with the coordinator: the others learn who is left, and get no
// timeout.
TEST_F(CoreTest, AgreeAlive_LongerOutageThanItsTimeout_LeavesOutWhoDoesNotComeBack) {
  std::vector<Worker> workers = Form(3, false);
  bench_.Restart();
  std::vector<CallId> calls;
  for (int i = 0; i < 2; ++i) {
    v1::Op op;
    workers[i].FillFence(op.mutable_agree_alive()->mutable_fence());
    op.mutable_agree_alive()->set_rank(workers[i].rank);
    *op.mutable_agree_alive()->mutable_timeout() = ToProto(absl::Seconds(30));
    *op.mutable_agree_alive()->mutable_waited() = ToProto(absl::Seconds(50));
    calls.push_back(bench_.Do(op));
  }
  for (int second = 0; second < 30 && !bench_.Answered(calls[0]); ++second) {
    for (int i = 0; i < 2; ++i) Beat(workers[i]);
    bench_.Advance(absl::Seconds(1));
  }
  for (const CallId call : calls) {
    EXPECT_THAT(bench_.Result(call).agree_alive().alive(), ElementsAre(0, 1));
  }
}

TEST_F(CoreTest, Barrier_AllArrive_OneSharedAnswer) {
  std::vector<Worker> workers = Form(3);
  std::vector<CallId> calls;
  for (const Worker& worker : workers) calls.push_back(Arrive(worker, "b", 0));
  for (const CallId call : calls) {
    ASSERT_TRUE(bench_.Result(call).has_arrive());
    EXPECT_EQ(bench_.replies_[call].answer, bench_.replies_[calls[0]].answer);
  }
  v1::OpResult parsed;
  ASSERT_TRUE(parsed.ParseFromString(bench_.replies_[calls[0]].answer->bytes()));
  EXPECT_EQ(parsed.arrive().report().state(), v1::BARRIER_STATE_PASSED);
}

TEST_F(CoreTest, Barrier_OrdinaryPass_NeedsNoRecord) {
  std::vector<Worker> workers = Form(2);
  const size_t before = bench_.journal_.size();
  Arrive(workers[0], "b", 0);
  Arrive(workers[1], "b", 0);
  EXPECT_EQ(bench_.journal_.size(), before);
}

TEST_F(CoreTest, Barrier_ArriveMany_CountsAllRanksOfAnAgent) {
  std::vector<Worker> workers = Form(4);
  v1::Op op;
  v1::ArriveManyRequest* many = op.mutable_arrive_many();
  many->mutable_fence()->set_job_id("j");
  many->mutable_fence()->set_generation(1);
  many->set_barrier_id("b");
  for (int i = 0; i < 3; ++i) {
    many->add_ranks(workers[i].rank);
    many->add_incarnations(workers[i].incarnation);
    many->add_lateness_us(1000 * i);
  }
  const CallId agent = bench_.Do(op, "node");
  EXPECT_FALSE(bench_.Answered(agent));
  bench_.Advance(absl::Milliseconds(5));
  Arrive(workers[3], "b", 0);
  const v1::BarrierReport& report = bench_.Result(agent).arrive().report();
  EXPECT_EQ(report.first_rank(), workers[2].rank);
  EXPECT_EQ(report.last_rank(), workers[3].rank);
  EXPECT_EQ(FromProto(report.open_for()), absl::Milliseconds(7));
}

TEST_F(CoreTest, Barrier_ArriveManyWithADeadIncarnation_HasNoEffect) {
  std::vector<Worker> workers = Form(2);
  v1::Op op;
  v1::ArriveManyRequest* many = op.mutable_arrive_many();
  many->mutable_fence()->set_job_id("j");
  many->mutable_fence()->set_generation(1);
  many->set_barrier_id("b");
  for (const Worker& worker : workers) {
    many->add_ranks(worker.rank);
    many->add_incarnations(worker.incarnation + (worker.rank == 1 ? 1 : 0));
  }
  const CallId call = bench_.Do(op, "node");
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_SUPERSEDED);
  EXPECT_FALSE(bench_.Answered(Arrive(workers[0], "b", 0)));
}

class StacksTest : public CoreTest {
 protected:
  CallId Ask(const std::vector<int>& ranks = {}) {
    v1::Op op;
    v1::CaptureStacksRequest* const request = op.mutable_capture_stacks();
    request->set_job_id("j");
    for (const int rank : ranks) request->add_ranks(rank);
    bench_.directives_.clear();
    return bench_.Do(op);
  }
  // Sends the agent's answer to the question `index` of the last call.
  void Reply(size_t index, const std::string& text) {
    const v1::CollectStack& asked = bench_.directives_.at(index).directive->collect_stack();
    v1::StackReply stack;
    stack.set_query_id(asked.query_id());
    stack.set_pid(asked.pid());
    stack.set_process_state("sleeping");
    stack.set_native_stack(text);
    bench_.core_->HandleStack(bench_.directives_.at(index).node, stack, bench_.now_, &bench_.out_);
    bench_.Collect();
  }
};

TEST_F(StacksTest, AllAgentsAnswer_ReplyHasTheStacksOfNow) {
  Form(2, true, 2);
  const CallId call = Ask();
  ASSERT_EQ(bench_.directives_.size(), 2u);
  EXPECT_FALSE(bench_.Answered(call));
  Reply(0, "#0 read()");
  EXPECT_FALSE(bench_.Answered(call));
  Reply(1, "#0 write()");
  const v1::CaptureStacksReply reply = bench_.Result(call).capture_stacks();
  EXPECT_EQ(reply.generation(), 1u);
  EXPECT_EQ(reply.next(), 0);
  ASSERT_EQ(reply.stacks_size(), 2);
  EXPECT_EQ(reply.stacks(1).worker().rank(), 1);
  EXPECT_EQ(reply.stacks(1).worker().host(), "h1");
  EXPECT_EQ(reply.stacks(1).worker().process_state(), "sleeping");
  EXPECT_EQ(reply.stacks(1).worker().native_stack(), "#0 write()");
  EXPECT_EQ(reply.stacks(1).missing(), "");
  // A later question does not show the stack of this one.
  const CallId later = Ask({0});
  bench_.Advance(absl::Seconds(5));
  const v1::RankStack row = bench_.Result(later).capture_stacks().stacks(0);
  EXPECT_EQ(row.worker().native_stack(), "");
  EXPECT_THAT(row.missing(), HasSubstr("not answered in time"));
}

TEST_F(StacksTest, GenerationThatEnds_AnswersWithWhatHasCome) {
  std::vector<Worker> workers = Form(2, true, 2);
  const CallId call = Ask();
  Reply(0, "#0 read()");
  Exit(workers[1], 1);
  const v1::CaptureStacksReply reply = bench_.Result(call).capture_stacks();
  EXPECT_EQ(reply.stacks(0).worker().native_stack(), "#0 read()");
  EXPECT_EQ(reply.stacks(1).worker().process_state(), "exited(1)");
  EXPECT_THAT(reply.stacks(1).missing(), HasSubstr("has ended"));
  const CallId after = Ask();
  EXPECT_EQ(bench_.Reason(after), v1::ERROR_REASON_JOB_STATE);
  EXPECT_THAT(bench_.Error(after).message(), HasSubstr("no running workers"));
}

TEST_F(StacksTest, WrongRequests_NameTheField) {
  Form(2, true, 2);
  EXPECT_EQ(bench_.Error(Ask({2})).detail().field(), "ranks");
  EXPECT_EQ(bench_.Error(Ask({-1})).detail().field(), "ranks");
  EXPECT_EQ(bench_.Error(Ask(std::vector<int>(65, 0))).detail().field(), "ranks");
  v1::Op op;
  op.mutable_capture_stacks()->set_job_id("j");
  op.mutable_capture_stacks()->set_first(2);
  EXPECT_EQ(bench_.Error(bench_.Do(op)).detail().field(), "first");
  op.mutable_capture_stacks()->set_first(0);
  op.mutable_capture_stacks()->mutable_timeout()->set_seconds(-1);
  EXPECT_EQ(bench_.Error(bench_.Do(op)).detail().field(), "timeout");
  op.mutable_capture_stacks()->set_job_id("k");
  EXPECT_EQ(bench_.Error(bench_.Do(op)).code(), static_cast<int>(absl::StatusCode::kNotFound));
}

TEST_F(StacksTest, ManyRanks_ComeInPages) {
  Form(70, true, 70);
  const CallId call = Ask();
  EXPECT_EQ(bench_.directives_.size(), 64u);
  bench_.Advance(absl::Seconds(5));
  EXPECT_EQ(bench_.Result(call).capture_stacks().stacks_size(), 64);
  EXPECT_EQ(bench_.Result(call).capture_stacks().next(), 64);
}

TEST_F(StacksTest, TooManyCallers_AreRefusedUntilOneIsGone) {
  Form(2, true, 2);
  std::vector<CallId> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(Ask({0}));
  EXPECT_EQ(bench_.Reason(Ask({0})), v1::ERROR_REASON_OVERLOADED);
  bench_.core_->Abandon(calls[0], bench_.now_, &bench_.out_);
  const CallId next = Ask({0});
  Reply(0, "#0 read()");
  EXPECT_EQ(bench_.Result(next).capture_stacks().stacks(0).worker().native_stack(), "#0 read()");
  EXPECT_FALSE(bench_.Answered(calls[0]));
}

TEST_F(StacksTest, AgentsThatNeverAnswer_TakeNoQuestionFromThoseThatDo) {
  std::vector<Worker> workers;
  spec_ = Spec(64, 64);
  *spec_.mutable_lease() = ToProto(absl::Hours(1));
  for (uint64_t i = 0; i < 64; ++i) workers.push_back({absl::StrCat("w", i), 100 + i});
  JoinAll(&workers);
  for (int i = 0; i < 63; ++i) {
    Ask();
    bench_.Advance(absl::Seconds(5));
  }
  std::vector<int> half(32);
  for (int i = 0; i < 32; ++i) half[i] = i;
  Ask(half);
  bench_.Advance(absl::Seconds(5));
  // Beyond 4,096 questions without an answer the oldest are given up.
  const CallId call = Ask();
  for (size_t i = 0; i < 64; ++i) Reply(i, "#0 read()");
  ASSERT_TRUE(bench_.Answered(call));
  EXPECT_EQ(bench_.Result(call).capture_stacks().stacks(0).worker().native_stack(), "#0 read()");
}

class UnseatedStacksTest : public StacksTest {
 protected:
  void Beat(const std::string& node, int rank) {
    v1::Beat beat;
    v1::WorkerBeat* const one = beat.add_workers();
    one->set_job_id("j");
    one->set_worker_id(absl::StrCat("w", rank));
    one->set_incarnation(5);
    one->set_process_state("running");
    one->mutable_unseated()->set_rank(rank);
    one->mutable_unseated()->set_pid(100 + rank);
    one->mutable_unseated()->set_host(absl::StrCat("h-", node));
    bench_.core_->HandleBeat(node, beat, bench_.now_, &bench_.out_);
    bench_.Collect();
  }
};

TEST_F(UnseatedStacksTest, ProgramsThatNeverJoin_HaveStacks) {
  EXPECT_EQ(bench_.Error(Ask()).code(), static_cast<int>(absl::StatusCode::kNotFound));
  Beat("n0", 0);
  Beat("n2", 2);
  const CallId call = Ask();
  ASSERT_EQ(bench_.directives_.size(), 2u);
  EXPECT_EQ(bench_.directives_[0].node, "n0");
  EXPECT_EQ(bench_.directives_[1].directive->collect_stack().pid(), 102);
  EXPECT_EQ(bench_.directives_[1].directive->collect_stack().worker_id(), "w2");
  Reply(0, "py#0 step (/srv/train.py:4)");
  EXPECT_FALSE(bench_.Answered(call));
  Reply(1, "#0 write()");
  const v1::CaptureStacksReply reply = bench_.Result(call).capture_stacks();
  EXPECT_EQ(reply.generation(), 0u);
  ASSERT_EQ(reply.stacks_size(), 3);
  EXPECT_EQ(reply.stacks(0).worker().native_stack(), "py#0 step (/srv/train.py:4)");
  EXPECT_EQ(reply.stacks(0).worker().host(), "h-n0");
  EXPECT_EQ(reply.stacks(0).worker().process_state(), "sleeping");
  EXPECT_THAT(reply.stacks(1).missing(), HasSubstr("no process"));
  EXPECT_EQ(reply.stacks(2).worker().rank(), 2);
  EXPECT_EQ(bench_.Error(Ask({3})).detail().field(), "ranks");
}

TEST_F(UnseatedStacksTest, AgentThatDoesNotAnswer_EndsTheWaitAtTheDeadline) {
  Beat("n0", 0);
  const CallId call = Ask();
  EXPECT_LE(bench_.core_->NextDeadline(), bench_.now_ + absl::Seconds(5));
  bench_.Advance(absl::Seconds(5));
  EXPECT_THAT(bench_.Result(call).capture_stacks().stacks(0).missing(),
              HasSubstr("not answered in time"));
  std::vector<CallId> calls;
  for (int i = 0; i < 8; ++i) {
    Beat("n0", 0);
    calls.push_back(Ask());
  }
  EXPECT_EQ(bench_.Reason(Ask()), v1::ERROR_REASON_OVERLOADED);
  bench_.core_->Abandon(calls[0], bench_.now_, &bench_.out_);
  const CallId next = Ask();
  Reply(0, "#0 read()");
  EXPECT_EQ(bench_.Result(next).capture_stacks().stacks(0).worker().native_stack(), "#0 read()");
  EXPECT_FALSE(bench_.Answered(calls[0]));
}

TEST_F(UnseatedStacksTest, SealedGeneration_CountsAlone) {
  Beat("n7", 7);
  Form(2, true, 2);
  Ask();
  ASSERT_EQ(bench_.directives_.size(), 2u);
  EXPECT_EQ(bench_.directives_[0].node, "node-h0");
}

TEST_F(CoreTest, Barrier_Timeout_SameBytesForAllWithHostPidStepAndStack) {
  std::vector<Worker> workers = Form(3, true, 3);
  spec_ = Spec(3, 3);
  const CallId a = Arrive(workers[0], "b", 0, absl::Seconds(4));
  const CallId b = Arrive(workers[1], "b", 0, absl::Seconds(4));
  v1::Beat beat;
  v1::WorkerBeat* one = beat.add_workers();
  one->set_job_id("j");
  one->set_worker_id("w2");
  one->set_incarnation(workers[2].incarnation);
  one->set_step(41);
  one->set_process_state("stopped");
  bench_.core_->HandleBeat("node-h2", beat, bench_.now_, &bench_.out_);
  bench_.Advance(absl::Seconds(3));
  ASSERT_FALSE(bench_.directives_.empty());
  EXPECT_EQ(bench_.directives_[0].node, "node-h2");
  EXPECT_EQ(bench_.directives_[0].directive->collect_stack().job_id(), "j");
  v1::StackReply stack;
  stack.set_query_id(bench_.directives_[0].directive->collect_stack().query_id());
  stack.set_native_stack("#0 forged()");
  const Identity stranger{.role = Role::kAttempt, .group = "other-1.1"};
  bench_.core_->HandleStack("node-h2", stack, bench_.now_, &bench_.out_, &stranger);
  stack.set_native_stack("#0 read()");
  bench_.core_->HandleStack("node-h2", stack, bench_.now_, &bench_.out_);
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Reason(a), v1::ERROR_REASON_BARRIER_TIMEOUT);
  EXPECT_EQ(bench_.replies_[a].answer, bench_.replies_[b].answer);
  const v1::Culprit& culprit = bench_.Error(a).detail().culprits(0);
  EXPECT_EQ(culprit.rank(), 2);
  EXPECT_EQ(culprit.host(), "h2");
  EXPECT_EQ(culprit.last_step(), 41);
  EXPECT_EQ(culprit.process_state(), "stopped");
  EXPECT_EQ(culprit.native_stack(), "#0 read()");
  EXPECT_GT(culprit.pid(), 0);
  EXPECT_THAT(bench_.Error(a).message(), HasSubstr("rank 2 (w2 on h2"));
  // Announced only once it is in the journal: no other result can follow.
  EXPECT_EQ(bench_.replies_[a].durable_revision, bench_.journal_.back().revision);
  // At the soft deadline the same was reported without failing, to every node by one message.
  ASSERT_GE(bench_.reports_.size(), 2u);
  EXPECT_EQ(bench_.reports_[0].state(), v1::BARRIER_STATE_OPEN);
  std::map<std::string, const v1::Directive*> told;
  for (const NodeDirective& one : bench_.directives_) {
    if (one.directive->has_barrier_late()) told[one.node] = one.directive.get();
  }
  ASSERT_EQ(told.size(), 3u);
  EXPECT_EQ(told["node-h0"], told["node-h1"]);
  EXPECT_EQ(told["node-h0"]->barrier_late().job_id(), "j");
  EXPECT_EQ(told["node-h0"]->barrier_late().report().SerializeAsString(),
            bench_.reports_[0].SerializeAsString());
}

TEST_F(CoreTest, Barrier_AbandonedCall_ArrivalStands) {
  std::vector<Worker> workers = Form(2);
  const CallId a = Arrive(workers[0], "b", 0);
  bench_.core_->Abandon(a, bench_.now_, &bench_.out_);
  bench_.Collect();
  const CallId b = Arrive(workers[1], "b", 0);
  EXPECT_TRUE(bench_.Result(b).has_arrive());
  EXPECT_FALSE(bench_.Answered(a));
  EXPECT_TRUE(bench_.Result(Arrive(workers[0], "b", 0)).has_arrive());
}

TEST_F(CoreTest, Barrier_AcrossARestart_InFlightFinishes) {
  std::vector<Worker> workers = Form(2);
  for (int counter = 0; counter < 3; ++counter) {
    Arrive(workers[0], "b", counter);
    Arrive(workers[1], "b", counter);
  }
  Arrive(workers[0], "b", 3);
  bench_.Restart();
  const CallId a = Arrive(workers[0], "b", 3);
  const CallId b = Arrive(workers[1], "b", 3);
  EXPECT_TRUE(bench_.Result(a).has_arrive());
  EXPECT_TRUE(bench_.Result(b).has_arrive());
  EXPECT_EQ(bench_.Reason(Arrive(workers[0], "b", 9)), v1::ERROR_REASON_BARRIER_COUNTER);
}

TEST_F(CoreTest, Barrier_PassedForOneBeforeACrash_PassesForTheOther) {
  std::vector<Worker> workers = Form(2);
  Arrive(workers[0], "b", 0);
  Arrive(workers[1], "b", 0);  // worker 1 hears of it, worker 0 does not
  bench_.Restart();
  const CallId again = Arrive(workers[0], "b", 0);
  EXPECT_FALSE(bench_.Answered(again));
  v1::Op op;
  workers[1].FillFence(op.mutable_recall_barriers()->mutable_fence());
  v1::SeenBarrier* seen = op.mutable_recall_barriers()->add_seen();
  seen->set_barrier_id("b");
  seen->set_counter(0);
  seen->set_state(v1::BARRIER_STATE_PASSED);
  bench_.Do(op);
  EXPECT_EQ(bench_.Result(again).arrive().report().state(), v1::BARRIER_STATE_PASSED);
}

TEST_F(CoreTest, Barrier_PreviousState_TellsWhatACrashForgot) {
  std::vector<Worker> workers = Form(2);
  Arrive(workers[0], "b", 0);
  Arrive(workers[1], "b", 0);
  bench_.Restart();
  const CallId again = Arrive(workers[0], "b", 0);
  v1::Op op;
  v1::ArriveRequest* next = op.mutable_arrive();
  workers[1].FillFence(next->mutable_fence());
  next->set_barrier_id("b");
  next->set_counter(1);
  next->set_rank(workers[1].rank);
  next->set_previous_state(v1::BARRIER_STATE_PASSED);
  const CallId ahead = bench_.Do(op);
  EXPECT_TRUE(bench_.Result(again).has_arrive());
  const CallId follow = Arrive(workers[0], "b", 1);
  EXPECT_TRUE(bench_.Result(ahead).has_arrive());
  EXPECT_TRUE(bench_.Result(follow).has_arrive());
}

TEST_F(CoreTest, Barrier_FailedOrWithPayloads_IsRememberedAcrossARestart) {
  for (const bool snapshot : {false, true}) {
    bench_ = Bench();
    std::vector<Worker> workers = Form(2);
    const CallId timed_out = Arrive(workers[0], "late", 0, absl::Seconds(1));
    bench_.Advance(absl::Seconds(1));
    const std::string message = bench_.Error(timed_out).message();
    Arrive(workers[0], "gather", 0, absl::Seconds(9), "x");
    Arrive(workers[1], "gather", 0, absl::Seconds(9), "y");
    bench_.Restart(snapshot);
    const CallId again = Arrive(workers[1], "late", 0);
    EXPECT_EQ(bench_.Error(again).message(), message);
    const CallId gathered = Arrive(workers[1], "gather", 0, absl::Seconds(9), "y");
    EXPECT_THAT(bench_.Result(gathered).arrive().payloads(), ElementsAre("x", "y"));
  }
}

TEST_F(CoreTest, Snapshot_OfAGenerationThatHasEnded_HasWhatFailedAndNoPayloads) {
  std::vector<Worker> workers = Form(2);
  Arrive(workers[0], "late", 0, absl::Seconds(1));
  bench_.Advance(absl::Seconds(1));
  for (const Worker& worker : workers)
    Arrive(worker, "gather", 0, absl::Seconds(9), "payload-of-a-rank");
  EXPECT_THAT(bench_.core_->Snapshot(), HasSubstr("payload-of-a-rank"));
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  EXPECT_THAT(bench_.core_->Snapshot(),
              ::testing::AllOf(HasSubstr("late"), ::testing::Not(HasSubstr("payload-of-a-rank"))));
  for (const bool snapshot : {false, true}) {
    EXPECT_EQ(bench_.Reason(Arrive(workers[0], "gather", 0, absl::Seconds(9), "payload-of-a-rank")),
              v1::ERROR_REASON_GENERATION_ENDED);
    bench_.Restart(snapshot);
  }
}

TEST_F(CoreTest, Snapshot_InParts_IsTheSameStateWhateverTheirSize) {
  std::vector<Worker> workers = Form(2);
  for (int i = 0; i < 100; ++i)
    bench_.Do(PutOp(workers[0], absl::StrCat("k", i), std::string(10'000, 'v'), true));
  const std::string state = bench_.core_->Snapshot();
  for (const size_t part_bytes : {size_t{1}, size_t{100'000}, size_t{300'000}, size_t{1} << 30}) {
    std::vector<std::string> parts;
    ASSERT_TRUE(bench_.core_
                    ->WriteSnapshot(part_bytes,
                                    [&](std::string part) {
                                      parts.push_back(std::move(part));
                                      return absl::OkStatus();
                                    })
                    .ok());
    if (part_bytes <= 300'000) {
      EXPECT_GE(parts.size(), 2u);
      for (const std::string& part : parts) EXPECT_LT(part.size(), part_bytes + 300'000);
    }
    Core restored(bench_.options_);
    for (const std::string& part : parts) ASSERT_TRUE(restored.Restore(part).ok());
    EXPECT_TRUE(restored.Snapshot() == state);
    EXPECT_EQ(restored.last_record_revision(), bench_.core_->last_record_revision());
  }
  // Parts of two snapshots are not mixed, and none comes after a record.
  Core mixed(bench_.options_);
  ASSERT_TRUE(mixed.Restore(state).ok());
  bench_.Do(PutOp(workers[0], "k", "v", true));
  EXPECT_EQ(mixed.Restore(bench_.core_->Snapshot()).code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(mixed.Replay(bench_.journal_.back().payload).ok());
  EXPECT_FALSE(mixed.Restore(state).ok());
  // The caller that takes the parts can have no more of them.
  int taken = 0;
  EXPECT_EQ(bench_.core_
                ->WriteSnapshot(1,
                                [&](const std::string&) {
                                  ++taken;
                                  return absl::CancelledError("enough");
                                })
                .code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(taken, 1);
}

TEST_F(CoreTest, Kv_DurablePut_WaitsForItsRecordAndSurvives) {
  std::vector<Worker> workers = Form(1);
  const CallId put = bench_.Do(PutOp(workers[0], "k", "v", true));
  EXPECT_EQ(bench_.replies_[put].durable_revision, bench_.journal_.back().revision);
  bench_.Do(PutOp(workers[0], "gone", "v", false));
  bench_.Restart();
  EXPECT_EQ(Get("k"), "v");
  EXPECT_EQ(Get("gone"), "(absent)");
  bench_.Restart(true);
  EXPECT_EQ(Get("k"), "v");
}

TEST_F(CoreTest, Kv_EphemeralPut_NeedsNoRecord) {
  std::vector<Worker> workers = Form(1);
  const size_t before = bench_.journal_.size();
  const CallId put = bench_.Do(PutOp(workers[0], "k", "v"));
  EXPECT_EQ(bench_.journal_.size(), before);
  EXPECT_LE(bench_.replies_[put].durable_revision, bench_.journal_.back().revision);
}

TEST_F(CoreTest, Kv_ReadAfterADurablePut_WaitsForIt) {
  std::vector<Worker> workers = Form(1);
  bench_.Do(PutOp(workers[0], "k", "v", true));
  v1::Op op;
  workers[0].FillFence(op.mutable_txn()->mutable_fence());
  op.mutable_txn()->add_then()->mutable_get()->set_key("k");
  const CallId get = bench_.Do(op);
  EXPECT_EQ(bench_.replies_[get].durable_revision, bench_.journal_.back().revision);
}

TEST_F(CoreTest, Kv_OverwrittenByEphemeral_DoesNotComeBackAfterARestart) {
  std::vector<Worker> workers = Form(1);
  bench_.Do(PutOp(workers[0], "k", "old", true));
  bench_.Do(PutOp(workers[0], "k", "new", false));
  bench_.Restart();
  EXPECT_EQ(Get("k"), "(absent)");
}

TEST_F(CoreTest, Kv_RepeatedRequest_GetsTheFirstAnswer) {
  std::vector<Worker> workers = Form(1);
  v1::Op op = TxnOp(workers[0], 1);
  v1::AddOp* add = op.mutable_txn()->add_then()->mutable_add();
  add->set_key("n");
  add->set_delta(5);
  add->set_klass(v1::KV_CLASS_DURABLE);
  EXPECT_EQ(bench_.Result(bench_.Do(op)).txn().results(0).number(), 5);
  EXPECT_EQ(bench_.Result(bench_.Do(op)).txn().results(0).number(), 5);
  for (const bool snapshot : {false, true}) {
    bench_.Restart(snapshot);
    EXPECT_EQ(bench_.Result(bench_.Do(op)).txn().results(0).number(), 5);
    EXPECT_EQ(Get("n"), "5");
  }
  add->set_delta(6);
  EXPECT_EQ(bench_.Reason(bench_.Do(op)), v1::ERROR_REASON_KEY_REUSED);
}

TEST_F(CoreTest, Kv_LeasedKey_DiesWithItsWorker) {
  std::vector<Worker> workers = Form(2, false);
  bench_.Do(PutOp(workers[1], "here", "1", false, 0, true));
  EXPECT_EQ(Get("here"), "1");
  Exit(workers[1], 1);
  EXPECT_EQ(Get("here"), "(absent)");
}

TEST_F(CoreTest, Kv_GenerationPrefix_IsCleanedWhenItEnds) {
  std::vector<Worker> workers = Form(1);
  bench_.Do(PutOp(workers[0], "gen/1/addr", "x"));
  bench_.Do(PutOp(workers[0], "gen/1/durable", "x", true));
  bench_.Do(PutOp(workers[0], "gen/10/addr", "x"));
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  bench_.Do(end);
  EXPECT_EQ(Get("gen/1/addr"), "(absent)");
  EXPECT_EQ(Get("gen/1/durable"), "(absent)");
  EXPECT_EQ(Get("gen/10/addr"), "x");
  bench_.Restart();
  EXPECT_EQ(Get("gen/1/durable"), "(absent)");
}

TEST_F(CoreTest, Kv_Wait_IsAnsweredByThePut) {
  std::vector<Worker> workers = Form(2);
  v1::Op wait;
  workers[0].FillFence(wait.mutable_wait()->mutable_fence());
  wait.mutable_wait()->add_keys("a");
  wait.mutable_wait()->add_keys("b");
  *wait.mutable_wait()->mutable_timeout() = ToProto(absl::Seconds(5));
  const CallId call = bench_.Do(wait);
  bench_.Do(PutOp(workers[1], "b", "2"));
  EXPECT_FALSE(bench_.Answered(call));
  bench_.Do(PutOp(workers[1], "a", "1"));
  EXPECT_EQ(bench_.Result(call).wait().kvs(0).value(), "1");
  EXPECT_EQ(bench_.Result(call).wait().kvs(1).value(), "2");
  wait.mutable_wait()->set_keys(0, "c");
  const CallId late = bench_.Do(wait);
  bench_.Advance(absl::Seconds(5));
  EXPECT_EQ(bench_.Reason(late), v1::ERROR_REASON_WAIT_TIMEOUT);
  EXPECT_THAT(bench_.Error(late).message(), HasSubstr("\"c\""));
}

TEST_F(CoreTest, Watch_ShowsDurableChangesOnlyWhenTheyAre) {
  std::vector<Worker> workers = Form(1);
  const uint64_t from = bench_.core_->revision() + 1;
  bench_.Do(PutOp(workers[0], "a", "1"));
  bench_.Do(PutOp(workers[0], "b", "2", true));
  bench_.Do(PutOp(workers[0], "c", "3"));
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_keys(true);
  v1::WatchBatch batch;
  ASSERT_FALSE(bench_.core_->ReadWatch(request, from, from - 1, 1 << 20, &batch).has_value());
  ASSERT_EQ(batch.events_size(), 1);
  EXPECT_EQ(batch.events(0).put().key(), "a");
  v1::WatchBatch rest;
  ASSERT_FALSE(
      bench_.core_->ReadWatch(request, batch.next_revision(), ~0ull, 1 << 20, &rest).has_value());
  ASSERT_EQ(rest.events_size(), 2);
  EXPECT_EQ(rest.events(1).put().key(), "c");
  EXPECT_EQ(rest.next_revision(), bench_.core_->revision() + 1);
}

TEST_F(CoreTest, Watch_FromBeforeARestart_IsCompacted) {
  std::vector<Worker> workers = Form(1);
  const uint64_t from = bench_.core_->revision();
  bench_.Restart();
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_keys(true);
  v1::WatchBatch batch;
  const auto error = bench_.core_->ReadWatch(request, from, ~0ull, 1 << 20, &batch);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->detail().reason(), v1::ERROR_REASON_COMPACTED);
  EXPECT_GE(error->detail().compacted_revision(), from);
  EXPECT_FALSE(
      bench_.core_->ReadWatch(request, bench_.core_->revision() + 1, ~0ull, 1 << 20, &batch)
          .has_value());
}

TEST_F(CoreTest, Watch_Members_TellsOfSealsDeathsAndEnds) {
  std::vector<Worker> workers = Form(2);
  const uint64_t from = bench_.core_->revision();
  Exit(workers[0], 3);
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_members(true);
  v1::WatchBatch batch;
  ASSERT_FALSE(bench_.core_->ReadWatch(request, from, ~0ull, 1 << 20, &batch).has_value());
  ASSERT_EQ(batch.events_size(), 3);
  EXPECT_EQ(batch.events(0).generation_sealed(), 1u);
  EXPECT_EQ(batch.events(1).member().exit().exit_code(), 3);
  EXPECT_EQ(batch.events(2).generation_ended(), 1u);
}

TEST_F(CoreTest, Trigger_AtAStepThatHadBegun_IsPutOffAndTheLogSaysSo) {
  std::vector<Worker> workers = Form(1);
  v1::Op raise;
  raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
  raise.mutable_raise_trigger()->set_name("stop");
  raise.mutable_raise_trigger()->set_align(v1::TRIGGER_ALIGN_AT_STEP);
  raise.mutable_raise_trigger()->set_step(8);
  const uint64_t id = bench_.Result(bench_.Do(raise)).raise_trigger().trigger_id();
  v1::Op poll;
  workers[0].FillFence(poll.mutable_poll_triggers()->mutable_fence());
  poll.mutable_poll_triggers()->set_step(9);
  poll.mutable_poll_triggers()->add_pending(id);
  EXPECT_EQ(bench_.Result(bench_.Do(poll)).poll_triggers().triggers(0).effective_step(), 10);
  EXPECT_EQ(bench_.notices_.back(),
            "trigger \"stop\" was requested before step 8, which a rank had already begun: all act "
            "before step 10");
}

TEST_F(CoreTest, Trigger_RaisedByOne_TakesEffectOnTheSameStep) {
  std::vector<Worker> workers = Form(2);
  const auto poll = [&](const Worker& worker, int64_t step, std::vector<uint64_t> pending = {},
                        std::vector<uint64_t> acked = {}) {
    v1::Op op;
    worker.FillFence(op.mutable_poll_triggers()->mutable_fence());
    op.mutable_poll_triggers()->set_rank(worker.rank);
    op.mutable_poll_triggers()->set_step(step);
    for (const uint64_t id : pending) op.mutable_poll_triggers()->add_pending(id);
    for (const uint64_t id : acked) op.mutable_poll_triggers()->add_acked(id);
    return bench_.Result(bench_.Do(op)).poll_triggers();
  };
  v1::Op raise;
  workers[1].FillFence(raise.mutable_raise_trigger()->mutable_fence());
  raise.mutable_raise_trigger()->mutable_fence()->set_request_id(1);
  raise.mutable_raise_trigger()->set_name("stop");
  raise.mutable_raise_trigger()->set_payload("p");
  const v1::RaiseTriggerReply raised = bench_.Result(bench_.Do(raise)).raise_trigger();
  EXPECT_EQ(raised.effective_step(), -1);
  const uint64_t id = raised.trigger_id();
  EXPECT_EQ(poll(workers[0], 10, {id}).triggers(0).effective_step(), -1);
  bench_.Restart();
  // Promises are not journaled: both must come again.
  const v1::PollTriggersReply b = poll(workers[1], 13, {id});
  ASSERT_EQ(b.triggers_size(), 1);
  EXPECT_EQ(b.triggers(0).effective_step(), -1);
  EXPECT_EQ(b.triggers(0).raised_by_rank(), 1);
  EXPECT_EQ(poll(workers[0], 10, {id}).triggers(0).effective_step(), 14);
  bench_.Restart();
  EXPECT_EQ(poll(workers[1], 13).triggers(0).effective_step(), 14);
  EXPECT_EQ(bench_.Result(bench_.Do(raise)).raise_trigger().trigger_id(), id);
  EXPECT_EQ(poll(workers[0], 14, {}, {id}).triggers_size(), 0);
  EXPECT_EQ(poll(workers[1], 14, {}, {id}).triggers_size(), 0);
}

TEST_F(CoreTest, Restart_KeepsSeatsFencesAndGivesALease) {
  for (const bool snapshot : {false, true}) {
    bench_ = Bench();
    std::vector<Worker> workers = Form(2);
    bench_.Do(JoinOp({"w0", 77, "h0"}, spec_));
    std::vector<Worker> next = {{"w0", 77, "h0"}, workers[1]};
    const CallId b = bench_.Do(JoinOp(next[1], spec_));
    Sit(&next[1], b);
    EXPECT_EQ(next[1].generation, 2u);
    next[0].generation = 2;
    next[0].rank = 0;
    bench_.now_ += absl::Seconds(60);
    bench_.Restart(snapshot);
    EXPECT_EQ(bench_.core_->last_term(), 2u);
    bench_.Advance(absl::Seconds(5));
    EXPECT_EQ(bench_.core_->stats().workers_lost, 0u);
    EXPECT_TRUE(bench_.Result(Beat(next[0])).has_heartbeat());
    EXPECT_TRUE(bench_.Result(Beat(next[1])).has_heartbeat());
    EXPECT_EQ(bench_.Reason(Beat(workers[0])), v1::ERROR_REASON_SUPERSEDED);
    EXPECT_EQ(bench_.Reason(bench_.Do(JoinOp(workers[0], spec_))), v1::ERROR_REASON_SUPERSEDED);
  }
}

TEST_F(CoreTest, Restart_EndedGeneration_StaysEnded) {
  for (const bool snapshot : {false, true}) {
    bench_ = Bench();
    std::vector<Worker> workers = Form(2);
    Exit(workers[0], 1);
    bench_.Restart(snapshot);
    EXPECT_TRUE(bench_.Result(Beat(workers[1])).heartbeat().generation_ended());
    EXPECT_EQ(bench_.Reason(bench_.Do(JoinOp(workers[0], spec_))), v1::ERROR_REASON_NOT_MEMBER);
    workers[0].incarnation = 900;
    JoinAll(&workers);
    EXPECT_EQ(workers[1].rank, 1);
    EXPECT_EQ(workers[1].generation, 2u);
  }
}

TEST_F(CoreTest, Restart_Revisions_AreNeverGivenOutTwice) {
  std::vector<Worker> workers = Form(1);
  for (int i = 0; i < 10; ++i) bench_.Do(PutOp(workers[0], "k", "v"));
  const uint64_t before = bench_.core_->revision();
  bench_.Restart();
  EXPECT_GT(bench_.core_->revision(), before);
}

TEST_F(CoreTest, Replay_Garbage_IsDataLossNotACrash) {
  Core core{CoreOptions()};
  EXPECT_EQ(core.Replay("\xff\xff\xff").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(core.Restore("\xff\xff\xff").code(), absl::StatusCode::kDataLoss);
  v1::JournalRecord record;
  record.set_revision(1);
  record.add_changes()->mutable_kv_changed()->set_job_id("nobody");
  EXPECT_EQ(core.Replay(record.SerializeAsString()).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(core.Replay(record.SerializeAsString()).code(), absl::StatusCode::kDataLoss);
}

TEST_F(CoreTest, CloseJob_WaitersAndLaterJoinsAreRefused) {
  spec_ = Spec(2, 2);
  const CallId waiting = bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.core_->CloseJob("j", "cancelled by its owner", bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.Reason(waiting), v1::ERROR_REASON_RENDEZVOUS_CLOSED);
  bench_.Restart(true);
  const CallId late = bench_.Do(JoinOp({"a", 1}, spec_));
  EXPECT_EQ(bench_.Reason(late), v1::ERROR_REASON_RENDEZVOUS_CLOSED);
  EXPECT_THAT(bench_.Error(late).message(), HasSubstr("cancelled by its owner"));
}

TEST_F(CoreTest, RemoveJob_OperatorsWaitsEndAndTheNameIsFree) {
  std::vector<Worker> workers = Form(1);
  v1::Op wait;
  wait.mutable_wait()->mutable_fence()->set_job_id("j");
  wait.mutable_wait()->add_keys("never");
  *wait.mutable_wait()->mutable_timeout() = ToProto(absl::Seconds(100));
  const CallId waiting = bench_.Do(wait);
  bench_.core_->RemoveJob("j", bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.Error(waiting).code(), static_cast<int>(absl::StatusCode::kNotFound));
  bench_.Restart();
  spec_ = Spec(2, 2);
  EXPECT_FALSE(bench_.Answered(bench_.Do(JoinOp({"a", 1}, spec_))));
}

TEST_F(CoreTest, Job_ThatIsOver_GivesItsNameToAnotherSizeAtOnce) {
  std::vector<Worker> old = Form(2);
  bench_.Do(PutOp(old[0], "k", "v", /*durable=*/true));
  Exit(old[0], 0);
  Exit(old[1], 0);
  spec_ = Spec(3, 3);
  std::vector<Worker> young = {{"w0", 500, "h0"}, {"w1", 501, "h0"}, {"w2", 502, "h0"}};
  JoinAll(&young);
  EXPECT_EQ(young[2].generation, 2u) << "numbers go on, so that the old ones are behind";
  EXPECT_EQ(Get("k"), "(absent)") << "it is another job";
  EXPECT_EQ(bench_.Reason(bench_.Do(PutOp(old[0], "k", "v"))), v1::ERROR_REASON_SUPERSEDED);
  Worker stray = old[1];
  stray.id = "stray";
  EXPECT_EQ(bench_.Reason(bench_.Do(PutOp(stray, "k", "v"))), v1::ERROR_REASON_STALE_GENERATION);
  for (const bool snapshot : {false, true}) {
    bench_.Restart(snapshot);
    EXPECT_FALSE(bench_.Result(Beat(young[1])).heartbeat().generation_ended());
  }
}

TEST_F(CoreTest, Job_ThatIsOver_IsReplacedInOneRecord) {
  std::vector<Worker> old = Form(2);
  Exit(old[0], 0);
  Exit(old[1], 0);
  const size_t records = bench_.journal_.size();
  spec_ = Spec(3, 3);
  bench_.Do(JoinOp({"w0", 500, "h0"}, spec_));
  ASSERT_EQ(bench_.journal_.size(), records + 1);
  v1::JournalRecord record;
  ASSERT_TRUE(record.ParseFromString(bench_.journal_.back().payload));
  bool removed = false, created = false;
  for (const v1::JournalChange& change : record.changes()) {
    removed = removed || change.has_job_removed();
    created = created || (removed && change.has_job_created());
  }
  EXPECT_TRUE(removed && created) << record.ShortDebugString();
  // Killed before that record is on disk: the former job is there, with its numbers.
  bench_.journal_.pop_back();
  bench_.Restart();
  v1::StatusReply status;
  bench_.core_->FillStatus(&status);
  ASSERT_EQ(status.jobs_size(), 1);
  EXPECT_EQ(status.jobs(0).generation(), 1u);
}

TEST_F(CoreTest, Job_ThatIsOver_BeforeItsSuccessorSeals_KeepsItsNumbersOverARestart) {
  std::vector<Worker> old = Form(2);
  Exit(old[0], 0);
  Exit(old[1], 0);
  for (const bool snapshot : {false, true}) {
    SCOPED_TRACE(snapshot);
    spec_ = Spec(3, 3);
    bench_.Do(JoinOp({"w0", 500, "h0"}, spec_));
    bench_.Restart(snapshot);
  }
  std::vector<Worker> young = {{"w0", 500, "h0"}, {"w1", 501, "h0"}, {"w2", 502, "h0"}};
  JoinAll(&young);
  EXPECT_EQ(young[2].generation, 2u);
}

TEST_F(CoreTest, Job_WithWorkersThatMayComeBack_KeepsItsName) {
  std::vector<Worker> workers = Form(2);
  // This is between two generations: one worker has failed, the other lives.
  Exit(workers[0], 1);
  const v1::RendezvousSpec other = Spec(3, 3);
  CallId call = bench_.Do(JoinOp({"x", 9}, other));
  EXPECT_EQ(bench_.Error(call).detail().field(), "spec");
  EXPECT_THAT(bench_.Error(call).message(), HasSubstr("alive"));
  // The other worker is not heard any longer.
  bench_.Advance(absl::Seconds(7));
  call = bench_.Do(JoinOp({"x", 9}, other));
  EXPECT_FALSE(bench_.Answered(call)) << "it waits for the other two";
}

TEST_F(CoreTest, Job_WhoseJoinersGaveUp_GivesItsNameToAnotherSize) {
  spec_ = Spec(2, 2);
  bench_.Do(JoinOp({"a", 1}, spec_));
  EXPECT_EQ(bench_.Error(bench_.Do(JoinOp({"b", 2}, Spec(1, 1)))).detail().field(), "spec");
  bench_.Advance(absl::Seconds(600));
  EXPECT_TRUE(bench_.Result(bench_.Do(JoinOp({"b", 2}, Spec(1, 1)))).has_join());
}

TEST_F(CoreTest, Job_ReplacedByAnother_WatchersReadAgain) {
  std::vector<Worker> old = Form(1);
  Exit(old[0], 0);
  v1::WatchRequest request;
  request.set_job_id("j");
  request.set_members(true);
  v1::WatchBatch batch;
  const uint64_t from = bench_.core_->revision() + 1;
  ASSERT_FALSE(bench_.core_->ReadWatch(request, from, ~0ull, 1 << 20, &batch).has_value());
  spec_ = Spec(2, 2);
  bench_.Do(JoinOp({"a", 1}, spec_));
  const auto error = bench_.core_->ReadWatch(request, from, ~0ull, 1 << 20, &batch);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->detail().reason(), v1::ERROR_REASON_COMPACTED);
}

TEST_F(CoreTest, RemoveJobOp_OnlyOfAJobThatIsOver) {
  v1::Op remove;
  remove.mutable_remove_job()->mutable_fence()->set_job_id("j");
  EXPECT_TRUE(Core::NeedsJournal(remove));
  EXPECT_EQ(bench_.Error(bench_.Do(remove)).code(), static_cast<int>(absl::StatusCode::kNotFound));
  std::vector<Worker> workers = Form(2);
  CallId call = bench_.Do(remove);
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_JOB_RUNS);
  EXPECT_THAT(bench_.Error(call).message(), HasSubstr("2 seated"));
  Exit(workers[0], 0);
  Exit(workers[1], 0);
  const CallId waiting = bench_.Do(JoinOp({"w0", 500, "h0"}, spec_));
  EXPECT_EQ(bench_.Reason(bench_.Do(remove)), v1::ERROR_REASON_JOB_RUNS);
  bench_.core_->Abandon(waiting, bench_.now_, &bench_.out_);
  bench_.Collect();
  call = bench_.Do(remove);
  EXPECT_TRUE(bench_.Result(call).has_remove_job()) << bench_.Result(call).DebugString();
  EXPECT_EQ(bench_.replies_[call].durable_revision, bench_.journal_.back().revision);
  bench_.Restart();
  v1::StatusReply status;
  bench_.core_->FillStatus(&status);
  EXPECT_EQ(status.jobs_size(), 0);
}

TEST_F(CoreTest, Trigger_OnAJobThatIsOver_IsRefused) {
  v1::Op raise;
  raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
  raise.mutable_raise_trigger()->set_name("stop");
  std::vector<Worker> workers = Form(2);
  Exit(workers[0], 0, 9);
  // One lives and joins again: the trigger is for the next generation.
  EXPECT_TRUE(bench_.Result(bench_.Do(raise)).has_raise_trigger());
  Exit(workers[1], 1);
  const CallId call = bench_.Do(raise);
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_JOB_ENDED);
  EXPECT_EQ(bench_.Error(call).code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(bench_.Error(call).message(), HasSubstr("\"stop\""));
}

TEST_F(CoreTest, Trigger_WhileWorkersGatherFirst_IsKeptOverARestart) {
  for (const bool restart : {false, true}) {
    bench_ = Bench();
    spec_ = Spec(2, 2);
    bench_.Do(JoinOp({"a", 1}, spec_));
    v1::Op raise;
    raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
    raise.mutable_raise_trigger()->set_name("stop");
    EXPECT_TRUE(bench_.Result(bench_.Do(raise)).has_raise_trigger());
    if (restart) bench_.Restart();
    bench_.Advance(absl::Minutes(11));
    std::vector<Worker> workers = {{"a", 1}, {"b", 2}};
    JoinAll(&workers);
    v1::Op poll;
    workers[0].FillFence(poll.mutable_poll_triggers()->mutable_fence());
    poll.mutable_poll_triggers()->set_rank(workers[0].rank);
    EXPECT_EQ(bench_.Result(bench_.Do(poll)).poll_triggers().triggers_size(), 1) << restart;
  }
}

class BetweenAttemptsTest : public CoreTest {
 protected:
  // Ends all workers, one of them badly, and their agent may start them again.
  void FailAnAttempt() {
    workers_ = Form(2);
    bench_.core_->AttachAgent("node-h0", v1::Hello(), bench_.now_, &bench_.out_);
    bench_.Collect();
    Exit(workers_[0], 1, 0, /*may_restart=*/true);
    Exit(workers_[1], 0, 0, /*may_restart=*/true);
  }
  static v1::Op Raise() {
    v1::Op raise;
    raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
    raise.mutable_raise_trigger()->set_name("stop");
    return raise;
  }
  static v1::Op Remove() {
    v1::Op remove;
    remove.mutable_remove_job()->mutable_fence()->set_job_id("j");
    return remove;
  }
  std::vector<Worker> workers_;
};

TEST_F(BetweenAttemptsTest, Trigger_ReachesTheNextAttempt) {
  FailAnAttempt();
  EXPECT_TRUE(bench_.Result(bench_.Do(Raise())).has_raise_trigger());
  workers_ = {{"w0", 200, "h0"}, {"w1", 201, "h0"}};
  JoinAll(&workers_);
  v1::Op poll;
  workers_[0].FillFence(poll.mutable_poll_triggers()->mutable_fence());
  poll.mutable_poll_triggers()->set_rank(workers_[0].rank);
  const CallId call = bench_.Do(poll);
  ASSERT_EQ(bench_.Result(call).poll_triggers().triggers_size(), 1);
  EXPECT_EQ(bench_.Result(call).poll_triggers().triggers(0).name(), "stop");
}

TEST_F(BetweenAttemptsTest, RemoveAndAnotherSize_AreRefusedAndNameTheAgent) {
  FailAnAttempt();
  CallId call = bench_.Do(Remove());
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_JOB_RUNS);
  EXPECT_THAT(bench_.Error(call).message(),
              HasSubstr("is being restarted by agent \"node-h0\" on host \"h0\""));
  call = bench_.Do(JoinOp({"x", 9}, Spec(3, 3)));
  EXPECT_EQ(bench_.Error(call).detail().field(), "spec");
  EXPECT_THAT(bench_.Error(call).message(), HasSubstr("restarted by agent \"node-h0\""));
}

TEST_F(BetweenAttemptsTest, AgentThatGivesUp_LeavesAJobThatIsOver) {
  FailAnAttempt();
  bench_.core_->DetachAgent("node-h0", bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.Reason(bench_.Do(Raise())), v1::ERROR_REASON_JOB_ENDED);
  EXPECT_TRUE(bench_.Result(bench_.Do(Remove())).has_remove_job());
}

TEST_F(BetweenAttemptsTest, RestartedCoordinator_GivesTheAgentALeaseToComeBack) {
  FailAnAttempt();
  bench_.Restart(/*snapshot=*/true);
  EXPECT_EQ(bench_.Reason(bench_.Do(Remove())), v1::ERROR_REASON_JOB_RUNS);
  bench_.Advance(absl::Seconds(7));
  EXPECT_TRUE(bench_.Result(bench_.Do(Remove())).has_remove_job());
}

TEST_F(BetweenAttemptsTest, RunThatSucceeded_IsOverAtOnce) {
  workers_ = Form(2);
  bench_.core_->AttachAgent("node-h0", v1::Hello(), bench_.now_, &bench_.out_);
  bench_.Collect();
  for (const Worker& worker : workers_) Exit(worker, 0, 0, /*may_restart=*/true);
  EXPECT_TRUE(bench_.Result(bench_.Do(Remove())).has_remove_job());
}

// The hub is there for as long as the coordinator runs; the job's agent is not.
TEST_F(BetweenAttemptsTest, AgentBehindAHub_IsAskedForAndNotItsHub) {
  workers_ = Form(2);
  const auto roster = [this](absl::Span<const std::string> hosts) {
    v1::Beat beat;
    for (const Worker& worker : workers_) {
      v1::WorkerBeat* one = beat.add_workers();
      one->set_job_id("j");
      one->set_worker_id(worker.id);
      one->set_incarnation(worker.incarnation);
    }
    beat.mutable_hub();
    for (const std::string& host : hosts) {
      v1::HubAgent* agent = beat.mutable_hub()->add_agents();
      agent->set_node("agent-" + host);
      agent->set_host(host);
    }
    bench_.core_->HandleBeat("hub", beat, bench_.now_, &bench_.out_);
    bench_.Collect();
  };
  bench_.core_->AttachAgent("hub", v1::Hello(), bench_.now_, &bench_.out_);
  bench_.Collect();
  roster({"elsewhere", "h0"});
  Exit(workers_[0], 1, 0, /*may_restart=*/true);
  Exit(workers_[1], 0, 0, /*may_restart=*/true);
  const CallId call = bench_.Do(Remove());
  EXPECT_EQ(bench_.Reason(call), v1::ERROR_REASON_JOB_RUNS);
  EXPECT_THAT(bench_.Error(call).message(), HasSubstr("by agent \"agent-h0\" on host \"h0\""));
  EXPECT_TRUE(bench_.Result(bench_.Do(Raise())).has_raise_trigger());
  // The agent has gone over to the coordinator.
  roster({"elsewhere"});
  v1::Hello hello;
  hello.set_host("h0");
  bench_.core_->AttachAgent("agent-h0", hello, bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.Reason(bench_.Do(Remove())), v1::ERROR_REASON_JOB_RUNS);
  // The agent has given up.
  bench_.core_->DetachAgent("agent-h0", bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.Reason(bench_.Do(Raise())), v1::ERROR_REASON_JOB_ENDED);
  EXPECT_TRUE(bench_.Result(bench_.Do(Remove())).has_remove_job());
}

// Another launch of the same host has nothing to do with the job.
TEST_F(BetweenAttemptsTest, OtherAgentOfTheHost_DoesNotHoldTheJobOfOneThatIsGone) {
  for (const bool its_own : {false, true}) {
    SCOPED_TRACE(its_own);
    const std::string node = its_own ? "h0/41-own" : "h0/42-other";
    Worker worker = {"w0", its_own ? 300u : 200u, "h0"};
    spec_ = Spec(1, 1);
    v1::Hello hello;
    hello.set_host("h0");
    bench_.core_->AttachAgent(node, hello, bench_.now_, &bench_.out_);
    bench_.Collect();
    Sit(&worker, bench_.Do(JoinOp(worker, spec_), "h0/41-own"));
    Exit(worker, 1, 0, /*may_restart=*/true);
    if (its_own) {
      EXPECT_EQ(bench_.Reason(bench_.Do(Remove())), v1::ERROR_REASON_JOB_RUNS);
    } else {
      EXPECT_TRUE(bench_.Result(bench_.Do(Remove())).has_remove_job());
    }
  }
}

TEST_F(CoreTest, Trigger_OfARunThatIsDone_IsNotPassedOn) {
  v1::Op raise;
  raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
  raise.mutable_raise_trigger()->set_name("stop");
  const auto triggers_told = [&](std::vector<Worker> workers) {
    JoinAll(&workers);
    v1::Op poll;
    workers[0].FillFence(poll.mutable_poll_triggers()->mutable_fence());
    poll.mutable_poll_triggers()->set_rank(workers[0].rank);
    const int told = bench_.Result(bench_.Do(poll)).poll_triggers().triggers_size();
    bench_.Do(raise);
    return told;
  };
  std::vector<Worker> workers = Form(1);
  bench_.Do(raise);
  // All have left: the next run is another one.
  Exit(workers[0], 0);
  workers[0].incarnation = 200;
  EXPECT_EQ(triggers_told(workers), 0);
  // A failure is followed by a restart, which is the same run.
  Exit(workers[0], 1);
  workers[0].incarnation = 201;
  EXPECT_EQ(triggers_told(workers), 1);
  // The job was not restarted for long.
  Exit(workers[0], 1);
  bench_.Advance(absl::Seconds(600));
  workers[0].incarnation = 202;
  EXPECT_EQ(triggers_told(workers), 0);
}

TEST_F(CoreTest, Trigger_Acknowledged_IsNotToldAgainAfterARestart) {
  std::vector<Worker> workers = Form(2);
  v1::Op raise;
  raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
  raise.mutable_raise_trigger()->set_name("checkpoint");
  const uint64_t id = bench_.Result(bench_.Do(raise)).raise_trigger().trigger_id();
  const auto poll = [&](const Worker& worker, bool ack) {
    v1::Op op;
    worker.FillFence(op.mutable_poll_triggers()->mutable_fence());
    op.mutable_poll_triggers()->set_rank(worker.rank);
    op.mutable_poll_triggers()->add_pending(id);
    if (ack) op.mutable_poll_triggers()->add_acked(id);
    return bench_.Result(bench_.Do(op)).poll_triggers().triggers_size();
  };
  poll(workers[0], false);
  poll(workers[1], false);
  poll(workers[0], true);
  for (const bool snapshot : {false, true}) {
    bench_.Restart(snapshot);
    EXPECT_EQ(poll(workers[0], false), 0) << "it has acted upon it";
    EXPECT_EQ(poll(workers[1], false), 1);
  }
  // This was the last acknowledgement: the trigger is gone, also for the next coordinator.
  poll(workers[1], true);
  bench_.Restart();
  EXPECT_EQ(poll(workers[1], false), 0);
}

TEST_F(CoreTest, Trigger_AcknowledgedByAProcessThatWasReplaced_IsToldToTheNewOne) {
  std::vector<Worker> workers = Form(2, /*end_on_failure=*/false);
  v1::Op raise;
  raise.mutable_raise_trigger()->mutable_fence()->set_job_id("j");
  raise.mutable_raise_trigger()->set_name("profile");
  raise.mutable_raise_trigger()->set_align(v1::TRIGGER_ALIGN_NOW);
  const uint64_t id = bench_.Result(bench_.Do(raise)).raise_trigger().trigger_id();
  v1::Op poll;
  workers[0].FillFence(poll.mutable_poll_triggers()->mutable_fence());
  poll.mutable_poll_triggers()->set_rank(workers[0].rank);
  poll.mutable_poll_triggers()->add_acked(id);
  EXPECT_EQ(bench_.Result(bench_.Do(poll)).poll_triggers().triggers_size(), 0);
  workers[0].incarnation = 777;
  Sit(&workers[0], bench_.Do(JoinOp(workers[0], spec_)));
  bench_.Restart();
  v1::Op again;
  workers[0].FillFence(again.mutable_poll_triggers()->mutable_fence());
  again.mutable_poll_triggers()->set_rank(workers[0].rank);
  EXPECT_EQ(bench_.Result(bench_.Do(again)).poll_triggers().triggers_size(), 1);
}

TEST_F(CoreTest, ReasonsOfOthers_AreOneLineInErrorsAndReports) {
  std::vector<Worker> workers = Form(2);
  const std::string reason = "because\nE 01-01 forged\x1b[2J";
  const CallId waiting = Arrive(workers[0], "b", 0);
  v1::Op cancel;
  cancel.mutable_cancel_barrier()->mutable_fence()->set_job_id("j");
  cancel.mutable_cancel_barrier()->set_barrier_id("b");
  cancel.mutable_cancel_barrier()->set_reason(reason);
  bench_.Do(cancel);
  const CallId in_the_next = Arrive(workers[0], "b", 1);
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("j");
  end.mutable_end_generation()->set_reason(reason);
  bench_.Do(end);
  v1::Op quarantine;
  quarantine.mutable_quarantine()->mutable_fence()->set_job_id("j");
  quarantine.mutable_quarantine()->set_host("h0");
  quarantine.mutable_quarantine()->mutable_for_()->set_seconds(30);
  quarantine.mutable_quarantine()->set_reason(reason);
  bench_.Do(quarantine);
  std::vector<std::string> texts = {bench_.Error(waiting).message(),
                                    bench_.Error(in_the_next).message(),
                                    bench_.reports_.back().message(), bench_.notices_.back()};
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("because\\nE 01-01 forged\\x1b[2J"));
    EXPECT_EQ(text.find_first_of("\n\x1b"), std::string::npos) << text;
  }
}

TEST_F(CoreTest, Join_Deadline_IsEachOnesOwn) {
  spec_ = Spec(3, 3);
  *spec_.mutable_join_timeout() = ToProto(absl::Seconds(10));
  const CallId first = bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.Advance(absl::Seconds(8));
  const CallId second = bench_.Do(JoinOp({"b", 2}, spec_));
  const CallId retry = bench_.Do(JoinOp({"a", 1}, spec_));
  bench_.Advance(absl::Seconds(2));
  EXPECT_EQ(bench_.Reason(first), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
  EXPECT_EQ(bench_.Reason(retry), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT) << "a retry begins nothing";
  EXPECT_THAT(bench_.Error(first).message(), HasSubstr("2 of 3 workers"));
  EXPECT_FALSE(bench_.Answered(second));
  bench_.Advance(absl::Seconds(7));
  EXPECT_FALSE(bench_.Answered(second));
  const CallId anew = bench_.Do(JoinOp({"a", 7}, spec_));
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Reason(second), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
  EXPECT_FALSE(bench_.Answered(anew));
}

TEST_F(CoreTest, Join_ThatHasWaited_IsGivenWhatIsLeftOfItsTimeout) {
  spec_ = Spec(3, 3);
  *spec_.mutable_join_timeout() = ToProto(absl::Seconds(100));
  const auto join = [&](const char* name, uint64_t incarnation, absl::Duration waited) {
    v1::Op op = JoinOp({name, incarnation}, spec_);
    *op.mutable_join()->mutable_waited() = ToProto(waited);
    return bench_.Do(op);
  };
  join("a", 1, absl::ZeroDuration());
  bench_.Advance(absl::Seconds(60));
  bench_.Restart();
  const CallId again = join("a", 1, absl::Seconds(60));
  // The worker that it waits for may be on its way back.
  const CallId longest = join("b", 2, absl::Hours(9));
  bench_.Advance(absl::Seconds(2));
  EXPECT_FALSE(bench_.Answered(longest));
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Reason(longest), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
  bench_.Advance(absl::Seconds(36));
  EXPECT_FALSE(bench_.Answered(again));
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Reason(again), v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
}

TEST_F(CoreTest, Dedupe_SnapshotOfAnOlderCoordinator_KeepsAnswersBelowWhatWasForgotten) {
  const std::vector<Worker> workers = Form(1);
  const v1::Op seventh = PutOp(workers[0], "k", "v", /*durable=*/true, 7);
  const std::string answer = bench_.Result(bench_.Do(seventh)).SerializeAsString();
  const std::string image = bench_.core_->Snapshot();
  for (const bool in_answer : {false, true}) {
    v1::CoordinatorSnapshot old;
    ASSERT_TRUE(old.ParseFromString(image));
    v1::RequestAnswered* kept = nullptr;
    for (v1::JournalChange& change : *old.mutable_changes()) {
      if (change.has_request_answered()) kept = change.mutable_request_answered();
    }
    ASSERT_NE(kept, nullptr);
    if (in_answer) {
      kept->set_forgotten(9);
    } else {
      v1::RequestsForgotten* const forgotten = old.add_changes()->mutable_requests_forgotten();
      forgotten->set_job_id("j");
      forgotten->set_worker_id(workers[0].id);
      forgotten->set_incarnation(workers[0].incarnation);
      forgotten->set_up_to(9);
    }
    bench_.core_ = std::make_unique<Core>(bench_.options_);
    ASSERT_TRUE(bench_.core_->Restore(old.SerializeAsString()).ok());
    bench_.replies_.clear();
    bench_.Start();
    EXPECT_EQ(bench_.Result(bench_.Do(seventh)).SerializeAsString(), answer);
    EXPECT_EQ(bench_.Reason(bench_.Do(PutOp(workers[0], "e", "v", true, 8))),
              v1::ERROR_REASON_RESULT_FORGOTTEN);
  }
}

TEST_F(CoreTest, Quarantine_RecordWithFewerTimesThanStrikes_CountsThemAll) {
  spec_ = Spec(2, 2);
  std::vector<Worker> workers = {{"a", 1, "good"}, {"b", 2, "bad"}};
  for (int round = 0; round < 3; ++round) {
    JoinAll(&workers);
    Exit(workers[1], 1);
    workers[1].incarnation += 10;
    if (round != 1) continue;
    for (Record& record : bench_.journal_) {
      v1::JournalRecord changes;
      ASSERT_TRUE(changes.ParseFromString(record.payload));
      for (v1::JournalChange& change : *changes.mutable_changes()) {
        if (!change.has_host_struck()) continue;
        change.mutable_host_struck()->mutable_at_unix_ms()->Truncate(1);
      }
      record.payload = changes.SerializeAsString();
    }
    bench_.Restart();
  }
  const CallId a = bench_.Do(JoinOp(workers[0], spec_));
  bench_.Do(JoinOp(workers[1], spec_));
  EXPECT_FALSE(bench_.Answered(a)) << "it was named three times";
}

TEST_F(CoreTest, Quarantine_OfAJobWithoutWorkers_KeepsIt) {
  Exit(Form(1)[0], 0);
  bench_.Advance(bench_.options_.job_retention - absl::Minutes(1));
  v1::Op op;
  op.mutable_quarantine()->mutable_fence()->set_job_id("j");
  op.mutable_quarantine()->set_host("bad");
  *op.mutable_quarantine()->mutable_for_() = ToProto(absl::Hours(720));
  bench_.Do(op);
  const auto jobs = [this] {
    v1::StatusReply status;
    bench_.core_->FillStatus(&status);
    return status.jobs_size();
  };
  bench_.Advance(bench_.options_.job_retention - absl::Minutes(1));
  EXPECT_EQ(jobs(), 1);
  bench_.Advance(absl::Minutes(2));
  EXPECT_EQ(jobs(), 0);
}

TEST_F(CoreTest, Dedupe_WhatWasForgotten_IsForgottenAfterASnapshotToo) {
  bench_.options_.kept_answers = 2;
  bench_.Restart();
  std::vector<Worker> workers = Form(1);
  const v1::Op durable = PutOp(workers[0], "k", "v", /*durable=*/true, 1);
  bench_.Do(durable);
  // Only answers that no snapshot holds are left of this worker.
  for (uint64_t id = 2; id <= 4; ++id) bench_.Do(PutOp(workers[0], "e", "v", false, id));
  EXPECT_EQ(bench_.Reason(bench_.Do(durable)), v1::ERROR_REASON_RESULT_FORGOTTEN);
  bench_.Restart(/*snapshot=*/true);
  EXPECT_EQ(bench_.Reason(bench_.Do(durable)), v1::ERROR_REASON_RESULT_FORGOTTEN);
  bench_.Restart(/*snapshot=*/true);
  EXPECT_EQ(bench_.Reason(bench_.Do(durable)), v1::ERROR_REASON_RESULT_FORGOTTEN);
}

TEST_F(CoreTest, Barrier_AfterARestart_IsGivenWhatIsLeftOfItsTimeout) {
  std::vector<Worker> workers = Form(3);
  Arrive(workers[0], "b", 0, absl::Seconds(100));
  bench_.Advance(absl::Seconds(3));
  Beat(workers[1]);
  Beat(workers[2]);
  bench_.Restart();
  const auto again = [&](const Worker& worker, absl::Duration waited) {
    v1::Op op;
    v1::ArriveRequest* arrive = op.mutable_arrive();
    worker.FillFence(arrive->mutable_fence());
    arrive->set_barrier_id("b");
    arrive->set_rank(worker.rank);
    *arrive->mutable_timeout() = ToProto(absl::Seconds(100));
    *arrive->mutable_waited() = ToProto(waited);
    return bench_.Do(op);
  };
  const CallId late = again(workers[1], absl::Seconds(1));
  const CallId early = again(workers[0], absl::Seconds(60));
  const absl::Time end = bench_.now_ + absl::Seconds(40);
  while (bench_.now_ + absl::Seconds(1) < end) {
    bench_.Advance(absl::Seconds(1));
    for (const Worker& worker : workers) Beat(worker);
    ASSERT_FALSE(bench_.Answered(early));
  }
  bench_.Advance(absl::Seconds(1));
  EXPECT_EQ(bench_.Reason(early), v1::ERROR_REASON_BARRIER_TIMEOUT);
  EXPECT_EQ(bench_.Reason(late), v1::ERROR_REASON_BARRIER_TIMEOUT);
  EXPECT_THAT(bench_.Error(early).detail().missing_ranks(), ElementsAre(workers[2].rank));
}

TEST_F(CoreTest, Event_WithManyJobs_LooksAtItsOwnOnly) {
  // The cost of an event shows in the jobs it looks at. Pauses above 20 ms between events make it
  // look for leases that ran meanwhile.
  const auto visited = [](int jobs) {
    Bench bench;
    std::vector<v1::Op> joins;
    for (int i = 0; i < jobs; ++i) {
      v1::Op join = JoinOp({"w0", 1, "h"}, Spec(1, 1));
      join.mutable_join()->mutable_fence()->set_job_id(absl::StrCat("j", i));
      *join.mutable_join()->mutable_spec()->mutable_lease() = ToProto(absl::Hours(1));
      EXPECT_TRUE(bench.Result(bench.Do(join)).has_join());
    }
    const uint64_t before = bench.core_->stats().jobs_visited;
    for (int i = 0; i < 100; ++i) {
      bench.now_ += absl::Milliseconds(50);
      v1::Op beat;
      beat.mutable_heartbeat()->mutable_fence()->set_job_id("j0");
      beat.mutable_heartbeat()->mutable_fence()->set_worker_id("w0");
      beat.mutable_heartbeat()->mutable_fence()->set_incarnation(1);
      beat.mutable_heartbeat()->mutable_fence()->set_generation(1);
      EXPECT_TRUE(bench.Result(bench.Do(beat)).has_heartbeat());
      bench.core_->Tick(bench.now_, &bench.out_);
      EXPECT_LE(bench.core_->NextDeadline(), bench.now_ + absl::Seconds(1));
    }
    return bench.core_->stats().jobs_visited - before;
  };
  EXPECT_EQ(visited(2000), visited(1));
}

TEST_F(CoreTest, Pause_WithManyJobs_GivesOnlyThoseTheirLeaseAnewThatItConcerns) {
  for (const int seconds : {6, 60, 600}) {
    v1::Op join = JoinOp({"w0", 1, "h"}, Spec(1, 1));
    join.mutable_join()->mutable_fence()->set_job_id(absl::StrCat("j", seconds));
    *join.mutable_join()->mutable_spec()->mutable_lease() = ToProto(absl::Seconds(seconds));
    bench_.Do(join);
  }
  bench_.now_ += absl::Seconds(100);
  const uint64_t before = bench_.core_->stats().jobs_visited;
  bench_.core_->AttachAgent("n", v1::Hello(), bench_.now_, &bench_.out_);
  EXPECT_EQ(bench_.core_->stats().jobs_visited - before, 2u) << "600 s of lease are left alone";
  bench_.core_->Tick(bench_.now_, &bench_.out_);
  bench_.Collect();
  EXPECT_EQ(bench_.core_->MembersByState()[v1::WORKER_STATE_RUNNING], 3) << "no worker was lost";
}

TEST_F(CoreTest, Status_TellsJobsAndStates) {
  std::vector<Worker> workers = Form(2);
  Beat(workers[0], 7);
  v1::StatusReply status;
  bench_.core_->FillStatus(&status);
  ASSERT_EQ(status.jobs_size(), 1);
  EXPECT_EQ(status.jobs(0).rendezvous_state(), "SEALED");
  EXPECT_EQ(status.jobs(0).max_step(), 7);
  EXPECT_EQ(bench_.core_->MembersByState()[v1::WORKER_STATE_RUNNING], 2);
}

TEST_F(CoreTest, TenThousandRanks_JoinBarrierAndDeath) {
  constexpr int kWorkers = 10000;
  std::vector<Worker> workers;
  spec_ = Spec(kWorkers, kWorkers);
  std::vector<CallId> calls;
  for (int i = 0; i < kWorkers; ++i) {
    workers.push_back(
        {absl::StrCat("w", i), 1 + static_cast<uint64_t>(i), absl::StrCat("h", i / 8)});
    calls.push_back(bench_.Do(JoinOp(workers[i], spec_), "node-" + workers[i].host));
  }
  for (int i = 0; i < kWorkers; ++i) {
    Sit(&workers[i], calls[i]);
    EXPECT_EQ(workers[i].rank, i);
  }
  std::vector<CallId> agents;
  for (int node = 0; node < kWorkers / 8; ++node) {
    v1::Op op;
    v1::ArriveManyRequest* many = op.mutable_arrive_many();
    many->mutable_fence()->set_job_id("j");
    many->mutable_fence()->set_generation(1);
    many->set_barrier_id("b");
    for (int i = 8 * node; i < 8 * node + 8; ++i) {
      many->add_ranks(i);
      many->add_incarnations(workers[i].incarnation);
    }
    agents.push_back(bench_.Do(op, absl::StrCat("node-h", node)));
  }
  for (const CallId call : agents) {
    ASSERT_TRUE(bench_.Result(call).has_arrive());
    EXPECT_EQ(bench_.replies_[call].answer, bench_.replies_[agents[0]].answer);
  }
  bench_.directives_.clear();
  Exit(workers[4242], 0, 9);
  EXPECT_EQ(bench_.directives_.size(), static_cast<size_t>(kWorkers / 8));
}

void Mutate(std::string* bytes, std::mt19937_64* random) {
  const int edits = 1 + (*random)() % 4;
  for (int i = 0; i < edits; ++i) {
    switch ((*random)() % 4) {
      case 0:
        if (!bytes->empty())
          (*bytes)[(*random)() % bytes->size()] ^= static_cast<char>(1 << ((*random)() % 8));
        break;
      case 1:
        if (!bytes->empty()) (*bytes)[(*random)() % bytes->size()] = static_cast<char>((*random)());
        break;
      case 2:
        bytes->insert(bytes->begin() + (*random)() % (bytes->size() + 1),
                      static_cast<char>((*random)()));
        break;
      default:
        if (!bytes->empty()) bytes->erase(bytes->begin() + (*random)() % bytes->size());
    }
  }
}

TEST_F(CoreTest, Text_CutInACharacter_LeavesAReadableJournal) {
  std::vector<Worker> workers = Form(1);
  v1::Op op;
  op.mutable_report_exit()->mutable_fence()->set_job_id("j");
  op.mutable_report_exit()->set_worker_id("w0");
  op.mutable_report_exit()->set_incarnation(workers[0].incarnation);
  op.mutable_report_exit()->mutable_cause()->set_exit_code(1);
  op.mutable_report_exit()->mutable_cause()->set_message(std::string(1023, 'x') + "\u00e9\u00e9");
  bench_.Do(op);
  bench_.Restart();
}

TEST_F(CoreTest, Handle_MutatedOps_NeverCrash) {
  // Broken UTF-8 is refused when the bytes are parsed; protobuf need not say so each time.
  google::protobuf::LogSilencer quiet;
  std::mt19937_64 random(7);
  std::vector<Worker> workers = Form(3, false);
  std::vector<v1::Op> seeds;
  for (const Worker& worker : workers) {
    seeds.push_back(JoinOp(worker, spec_));
    seeds.push_back(PutOp(worker, "key", "value", true, 3));
    seeds.push_back(PutOp(worker, "key", "12", false, 0, true));
    v1::Op op;
    worker.FillFence(op.mutable_arrive()->mutable_fence());
    op.mutable_arrive()->set_barrier_id("b");
    op.mutable_arrive()->set_rank(worker.rank);
    op.mutable_arrive()->set_call_site(3);
    op.mutable_arrive()->add_participants(0);
    op.mutable_arrive()->add_participants(2);
    op.mutable_arrive()->set_payload("p");
    *op.mutable_arrive()->mutable_timeout() = ToProto(absl::Seconds(5));
    seeds.push_back(op);
    op.Clear();
    worker.FillFence(op.mutable_arrive_many()->mutable_fence());
    op.mutable_arrive_many()->set_barrier_id("b");
    op.mutable_arrive_many()->add_ranks(worker.rank);
    op.mutable_arrive_many()->add_incarnations(worker.incarnation);
    op.mutable_arrive_many()->add_lateness_us(7);
    seeds.push_back(op);
    op.Clear();
    worker.FillFence(op.mutable_agree_alive()->mutable_fence());
    op.mutable_agree_alive()->set_rank(worker.rank);
    op.mutable_agree_alive()->add_set(worker.rank);
    seeds.push_back(op);
    op.Clear();
    worker.FillFence(op.mutable_raise_trigger()->mutable_fence());
    op.mutable_raise_trigger()->set_name("t");
    op.mutable_raise_trigger()->set_step(3);
    seeds.push_back(op);
    op.Clear();
    worker.FillFence(op.mutable_poll_triggers()->mutable_fence());
    op.mutable_poll_triggers()->set_rank(worker.rank);
    op.mutable_poll_triggers()->set_step(3);
    op.mutable_poll_triggers()->add_acked(1);
    seeds.push_back(op);
    op.Clear();
    worker.FillFence(op.mutable_wait()->mutable_fence());
    op.mutable_wait()->add_keys("key");
    op.mutable_wait()->add_keys("other");
    *op.mutable_wait()->mutable_timeout() = ToProto(absl::Seconds(1));
    seeds.push_back(op);
    op.Clear();
    worker.FillFence(op.mutable_report_exit()->mutable_fence());
    op.mutable_report_exit()->set_worker_id(worker.id);
    op.mutable_report_exit()->set_incarnation(worker.incarnation);
    op.mutable_report_exit()->mutable_cause()->set_exit_code(1);
    seeds.push_back(op);
    op.Clear();
    worker.FillFence(op.mutable_leave()->mutable_fence());
    seeds.push_back(op);
    op.Clear();
    op.mutable_recall_barriers()->mutable_fence()->set_job_id("j");
    op.mutable_recall_barriers()->mutable_fence()->set_generation(1);
    op.mutable_recall_barriers()->add_seen()->set_barrier_id("b");
    seeds.push_back(op);
    op.Clear();
    op.mutable_quarantine()->mutable_fence()->set_job_id("j");
    op.mutable_quarantine()->set_host("h0");
    op.mutable_quarantine()->mutable_for_()->set_seconds(2);
    seeds.push_back(op);
    op.Clear();
    op.mutable_end_generation()->mutable_fence()->set_job_id("j");
    seeds.push_back(op);
    op.Clear();
    op.mutable_cancel_barrier()->mutable_fence()->set_job_id("j");
    op.mutable_cancel_barrier()->set_barrier_id("b");
    seeds.push_back(op);
    op.Clear();
    op.mutable_get_rank_table()->set_job_id("j");
    op.mutable_get_rank_table()->set_max_rows(2);
    seeds.push_back(op);
    op.Clear();
    op.mutable_describe_barrier()->set_job_id("j");
    op.mutable_describe_barrier()->set_barrier_id("b");
    seeds.push_back(op);
    op.Clear();
    op.mutable_list_barriers()->set_job_id("j");
    seeds.push_back(op);
    op.Clear();
    op.mutable_straggler_report()->set_job_id("j");
    seeds.push_back(op);
    op.Clear();
    op.mutable_get_members()->set_job_id("j");
    seeds.push_back(op);
  }
  std::vector<std::string> records;
  for (int i = 0; i < 60000; ++i) {
    std::string bytes = seeds[random() % seeds.size()].SerializeAsString();
    if (random() % 4 != 0) Mutate(&bytes, &random);
    v1::Op op;
    if (!op.ParseFromString(bytes)) continue;
    const CallId call = bench_.next_call_++;
    bench_.core_->Handle(call, op, {random() % 2 == 0 ? "node" : ""}, bench_.now_, &bench_.out_);
    if (random() % 16 == 0) bench_.core_->Abandon(1 + random() % call, bench_.now_, &bench_.out_);
    if (random() % 8 == 0) {
      bench_.now_ += absl::Milliseconds(random() % 2000);
      bench_.core_->Tick(bench_.now_, &bench_.out_);
    }
    for (const Record& record : bench_.out_.records) records.push_back(record.payload);
    bench_.out_.Clear();
  }
  // The records that it wrote can be read again, and give the same state.
  Core replayed{bench_.options_};
  for (const Record& record : bench_.journal_) ASSERT_TRUE(replayed.Replay(record.payload).ok());
  for (const std::string& payload : records) {
    const absl::Status status = replayed.Replay(payload);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(replayed.last_record_revision(), bench_.core_->last_record_revision());
}

TEST_F(CoreTest, Replay_MutatedRecords_NeverCrash) {
  google::protobuf::LogSilencer quiet;
  std::mt19937_64 random(11);
  std::vector<Worker> workers = Form(3);
  bench_.Do(PutOp(workers[0], "k", "v", true, 1));
  Arrive(workers[0], "b", 0, absl::Seconds(1));
  bench_.Advance(absl::Seconds(1));
  Exit(workers[1], 1);
  const std::string snapshot = bench_.core_->Snapshot();
  for (int i = 0; i < 3000; ++i) {
    Core core{bench_.options_};
    Output out;
    if (i % 2 == 0) {
      std::string bytes = snapshot;
      Mutate(&bytes, &random);
      if (!core.Restore(bytes).ok()) continue;
    } else {
      bool ok = true;
      for (const Record& record : bench_.journal_) {
        std::string bytes = record.payload;
        if (random() % 3 == 0) Mutate(&bytes, &random);
        ok = ok && core.Replay(bytes).ok();
      }
      if (!ok) continue;
    }
    if (core.last_term() > 1000) continue;
    core.StartTerm(core.last_term() + 1, kStart, &out);
    core.Handle(1, JoinOp(workers[0], spec_), {}, kStart, &out);
    core.Tick(kStart + absl::Seconds(100), &out);
    core.Snapshot();
  }
}

class CheckpointTest : public CoreTest {
 protected:
  v1::Op BeginOp(const Worker& worker, int64_t step, int ranks) {
    v1::Op op;
    v1::BeginCheckpointRequest* const begin = op.mutable_begin_checkpoint();
    worker.FillFence(begin->mutable_fence());
    begin->set_path(absl::StrCat("/c/", step));
    begin->set_staging(absl::StrCat("/c/", step, ".tmp"));
    begin->set_step(step);
    begin->set_ranks(ranks);
    return op;
  }
  v1::Op ReportOp(const Worker& worker, uint64_t id) {
    v1::Op op;
    v1::ReportShardsRequest* const report = op.mutable_report_shards();
    worker.FillFence(report->mutable_fence());
    report->set_checkpoint_id(id);
    report->set_rank(worker.rank);
    report->set_last(true);
    v1::ShardFile* const file = report->add_files();
    file->set_name(absl::StrCat("rank", worker.rank));
    file->set_xxh3(std::string(32, '0'));
    return op;
  }
  v1::Op SealOp(const Worker& worker, uint64_t id) {
    v1::Op op;
    worker.FillFence(op.mutable_seal_checkpoint()->mutable_fence());
    op.mutable_seal_checkpoint()->set_checkpoint_id(id);
    return op;
  }
  v1::Op PublishOp(const Worker& worker, uint64_t id) {
    v1::Op op;
    worker.FillFence(op.mutable_publish_checkpoint()->mutable_fence());
    op.mutable_publish_checkpoint()->set_checkpoint_id(id);
    return op;
  }
  uint64_t Begin(const Worker& worker, int64_t step, int ranks) {
    return bench_.Result(bench_.Do(BeginOp(worker, step, ranks)))
        .begin_checkpoint()
        .checkpoint_id();
  }
  // Resolves as an operator.
  CallId Resolve() {
    v1::Op op;
    op.mutable_resolve_checkpoint()->mutable_fence()->set_job_id("j");
    return bench_.Do(op);
  }
};

TEST_F(CheckpointTest, SealedOne_IsDurableBeforeItIsAnswered) {
  std::vector<Worker> workers = Form(2);
  const uint64_t id = Begin(workers[0], 10, 2);
  EXPECT_EQ(Begin(workers[1], 10, 2), id);
  for (const Worker& worker : workers) {
    EXPECT_TRUE(bench_.Result(bench_.Do(ReportOp(worker, id))).has_report_shards());
  }
  const size_t records = bench_.journal_.size();
  const CallId seal = bench_.Do(SealOp(workers[0], id));
  EXPECT_EQ(bench_.Result(seal).seal_checkpoint().checkpoint().state(),
            v1::CHECKPOINT_STATE_SEALED);
  ASSERT_EQ(bench_.journal_.size(), records + 1);
  EXPECT_EQ(bench_.replies_[seal].durable_revision, bench_.journal_.back().revision);
  // Readers of it wait for the same record.
  EXPECT_EQ(bench_.replies_[Resolve()].durable_revision, bench_.journal_.back().revision);
  EXPECT_TRUE(bench_.Result(bench_.Do(PublishOp(workers[0], id))).has_publish_checkpoint());
  EXPECT_EQ(bench_.Result(Resolve()).resolve_checkpoint().checkpoint().step(), 10);
}

TEST_F(CheckpointTest, OneWithoutARecord_IsCountedOnceAndNothingElse) {
  std::vector<Worker> workers = Form(2);
  v1::Op op = PublishOp(workers[0], 0);
  op.mutable_publish_checkpoint()->mutable_fence()->set_request_id(7);
  op.mutable_publish_checkpoint()->set_bytes(100);
  op.mutable_publish_checkpoint()->set_stall_us(250'000);
  op.mutable_publish_checkpoint()->set_save_us(2'000'000);
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_TRUE(bench_.Result(bench_.Do(op)).has_publish_checkpoint());
    const CoreStats& stats = bench_.core_->stats();
    EXPECT_EQ(stats.checkpoints_published, 1u);
    EXPECT_EQ(stats.checkpoint_bytes, 100u);
    EXPECT_EQ(stats.checkpoint_stall.sum_seconds, 0.25);
    EXPECT_EQ(stats.checkpoint_save.sum_seconds, 2);
  }
  EXPECT_EQ(bench_.Reason(Resolve()), v1::ERROR_REASON_NO_CHECKPOINT);
}

TEST_F(CheckpointTest, Restart_KeepsWhatIsSealedAndAsksForReportsAgain) {
  for (const bool snapshot : {false, true}) {
    SCOPED_TRACE(snapshot);
    bench_ = Bench();
    std::vector<Worker> workers = Form(2);
    const uint64_t id = Begin(workers[0], 10, 2);
    for (const Worker& worker : workers) bench_.Do(ReportOp(worker, id));
    bench_.Restart(snapshot);
    CallId seal = bench_.Do(SealOp(workers[0], id));
    EXPECT_EQ(bench_.Reason(seal), v1::ERROR_REASON_SHARDS_MISSING);
    EXPECT_EQ(bench_.Error(seal).detail().culprits_size(), 2);
    for (const Worker& worker : workers) bench_.Do(ReportOp(worker, id));
    bench_.Do(SealOp(workers[0], id));
    bench_.Restart(snapshot);
    // The answer was lost: the same again.
    seal = bench_.Do(SealOp(workers[0], id));
    EXPECT_EQ(bench_.Result(seal).seal_checkpoint().checkpoint().files(), 2);
    bench_.Do(PublishOp(workers[0], id));
    bench_.Restart(snapshot);
    EXPECT_EQ(bench_.Result(Resolve()).resolve_checkpoint().checkpoint().checkpoint_id(), id);
  }
}

TEST_F(CheckpointTest, StrangersAndTheGenerationBefore_AreRefused) {
  std::vector<Worker> workers = Form(2);
  const uint64_t id = Begin(workers[0], 10, 2);
  v1::Op other = ReportOp(workers[0], id);
  other.mutable_report_shards()->set_rank(1);
  EXPECT_THAT(bench_.Error(bench_.Do(other)).message(), HasSubstr("holds rank 0, not 1"));
  Worker stranger = workers[0];
  stranger.incarnation = 999;
  EXPECT_TRUE(bench_.Result(bench_.Do(SealOp(stranger, id))).has_error());
  v1::Op nobody = SealOp(workers[0], id);
  nobody.mutable_seal_checkpoint()->mutable_fence()->clear_worker_id();
  EXPECT_EQ(bench_.Reason(bench_.Do(nobody)), v1::ERROR_REASON_BAD_FIELD);

  EXPECT_THAT(bench_.Error(bench_.Do(BeginOp(workers[0], 11, 3))).message(),
              HasSubstr("this generation has 2"));

  Exit(workers[1], 1);
  std::vector<Worker> next = workers;
  for (Worker& worker : next) worker.incarnation += 1000;
  JoinAll(&next);
  EXPECT_TRUE(bench_.Result(bench_.Do(SealOp(workers[0], id))).has_error());
  const CallId seal = bench_.Do(SealOp(next[0], id));
  EXPECT_EQ(bench_.Reason(seal), v1::ERROR_REASON_NO_CHECKPOINT) << "its generation is over";
}

TEST_F(CheckpointTest, JobOfAnotherSize_FindsThemAndTheChainGoesOn) {
  for (const bool snapshot : {false, true}) {
    SCOPED_TRACE(snapshot);
    bench_ = Bench();
    spec_ = Spec(2, 2);
    std::vector<Worker> old = Form(2);
    const uint64_t id = Begin(old[0], 10, 2);
    for (const Worker& worker : old) bench_.Do(ReportOp(worker, id));
    const std::string sealed =
        bench_.Result(bench_.Do(SealOp(old[0], id))).seal_checkpoint().checkpoint().sha256();
    bench_.Do(PublishOp(old[0], id));
    const uint64_t prepared = Begin(old[0], 11, 2);
    for (const Worker& worker : old) Exit(worker, 0);
    spec_ = Spec(3, 3);
    std::vector<Worker> young = {{"w0", 500, "h0"}, {"w1", 501, "h0"}, {"w2", 502, "h0"}};
    JoinAll(&young);
    for (int restarts = 0; restarts < 2; ++restarts) {
      EXPECT_EQ(bench_.Result(Resolve()).resolve_checkpoint().checkpoint().checkpoint_id(), id);
      bench_.Restart(snapshot);
    }
    EXPECT_EQ(bench_.Reason(bench_.Do(SealOp(young[0], prepared))), v1::ERROR_REASON_NO_CHECKPOINT);
    const uint64_t next = Begin(young[0], 20, 3);
    for (const Worker& worker : young) bench_.Do(ReportOp(worker, next));
    const CallId seal = bench_.Do(SealOp(young[0], next));
    EXPECT_EQ(bench_.Result(seal).seal_checkpoint().checkpoint().previous_sha256(), sealed);
  }
}

TEST_F(CheckpointTest, JobWithThem_KeepsItsKeysNoLongerThanOthers) {
  std::vector<Worker> workers = Form(1);
  const uint64_t id = Begin(workers[0], 10, 1);
  bench_.Do(ReportOp(workers[0], id));
  bench_.Do(SealOp(workers[0], id));
  bench_.Do(PublishOp(workers[0], id));
  bench_.Do(PutOp(workers[0], "k", std::string(100'000, 'v'), /*durable=*/true));
  Exit(workers[0], 0);
  bench_.Advance(absl::Hours(23));
  EXPECT_GT(bench_.core_->Snapshot().size(), 100'000u);
  bench_.Advance(absl::Hours(2));
  for (int restarts = 0; restarts < 2; ++restarts) {
    EXPECT_LT(bench_.core_->Snapshot().size(), 10'000u);
    EXPECT_EQ(bench_.Result(Resolve()).resolve_checkpoint().checkpoint().checkpoint_id(), id);
    bench_.Restart(/*snapshot=*/restarts == 1);
  }
}

TEST_F(CheckpointTest, JobWithThem_IsKeptLonger) {
  std::vector<Worker> workers = Form(1);
  const uint64_t id = Begin(workers[0], 10, 1);
  bench_.Do(ReportOp(workers[0], id));
  bench_.Do(SealOp(workers[0], id));
  bench_.Do(PublishOp(workers[0], id));
  Exit(workers[0], 0);
  bench_.Advance(absl::Hours(48));
  EXPECT_EQ(bench_.Result(Resolve()).resolve_checkpoint().checkpoint().checkpoint_id(), id);
  bench_.Advance(absl::Hours(24 * 31));
  EXPECT_TRUE(bench_.Result(Resolve()).has_error());
  v1::StatusReply status;
  bench_.core_->FillStatus(&status);
  EXPECT_EQ(status.jobs_size(), 0);
}

}  // namespace
}  // namespace muster::coordinator
