#include "coordinator/jobs/jobs_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "coordinator/jobs/job_spec.h"
#include "proto/job_limits.h"
#include "proto/name_value.h"

namespace muster::coordinator {
namespace {

constexpr char kCluster[] = "cluster";

// A core with its journal, and nodes that do what it tells them.
class JobsCoreTest : public testing::Test {
 protected:
  JobsCoreTest() { StartTerm(); }

  void StartTerm(uint64_t lost_terms = 0) {
    core_ = std::make_unique<JobsCore>(options_);
    for (const v1::JournalChange& change : journal_) {
      if (change.has_job_record_changed()) {
        EXPECT_TRUE(core_->Restore(change.job_record_changed()).ok());
      }
      if (change.has_node_changed()) core_->Restore(change.node_changed());
    }
    JobsOutput out;
    core_->StartTerm(NextEvent(), lost_terms, &out);
    Take(std::move(out));
    replies_.clear();
    syncs_.clear();
    for (auto& [name, node] : nodes_) node.last.Clear();
  }
  // Waits a lease: after it, the core waits for no more news from nodes.
  void Settle() { Advance(options_.node_lease); }

  // Restarts the coordinator with a copy of its journal; node a does not call yet.
  void Restore(const std::vector<v1::JournalChange>& copy) {
    journal_ = copy;
    nodes_["a"].talks = false;
    StartTerm(/*lost_terms=*/65536);
  }
  // Lets node a call: what the copy lacks ends there, and `rest` later the job runs in one place.
  void CallLate(const std::string& job, absl::Duration rest) {
    nodes_["a"].talks = true;
    Sync("a");
    EXPECT_TRUE(nodes_["a"].attempts.empty());
    Advance(rest);
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
    EXPECT_EQ(nodes_["a"].attempts.size() + nodes_["b"].attempts.size(), 1u);
  }

  JobsCore::Event NextEvent() {
    if (!idle_) ++revision_;
    return {now_, revision_, kCluster, caller_.has_value() ? &*caller_ : nullptr};
  }
  void Take(JobsOutput out) {
    for (v1::JournalChange& change : out.changes) journal_.push_back(std::move(change));
    for (auto& [call, result] : out.replies) replies_[call] = std::move(result);
    for (auto& closed : out.closed_groups) closed_.push_back(closed.first);
  }
  // Returns the id of the call.
  CallId Send(const v1::Op& op) {
    JobsOutput out;
    core_->Handle(++call_, op, NextEvent(), &out);
    Take(std::move(out));
    return call_;
  }
  v1::OpResult Call(const v1::Op& op) {
    const CallId call = Send(op);
    EXPECT_TRUE(replies_.contains(call)) << "the call is held: " << op.ShortDebugString();
    v1::OpResult result = replies_[call];
    Pump();
    return result;
  }
  void Advance(absl::Duration by) {
    const absl::Time until = now_ + by;
    while (true) {
      const absl::Time next = std::min(core_->NextDeadline(), until);
      now_ = std::max(now_, next);
      Pump();
      JobsOutput out;
      core_->Tick(NextEvent(), &out);
      Take(std::move(out));
      Pump();
      if (now_ >= until) return;
    }
  }

  // ---- clients

  static v1::JobSpec Spec(int processes, int max_restarts = 0) {
    v1::JobSpec spec;
    spec.set_name("mnist");
    spec.add_argv("./train");
    spec.set_max_processes(processes);
    spec.set_max_restarts(max_restarts);
    return spec;
  }
  v1::OpResult TrySubmit(const v1::JobSpec& spec, const std::string& key = "") {
    v1::Op op;
    *op.mutable_submit_job()->mutable_spec() = spec;
    op.mutable_submit_job()->set_idempotency_key(key);
    return Call(op);
  }
  void As(const std::string& name, Role role) { caller_ = Identity{.name = name, .role = role}; }
  std::string Submit(const v1::JobSpec& spec) {
    const v1::OpResult result = TrySubmit(spec);
    EXPECT_FALSE(result.has_error()) << result.error().message();
    return result.submit_job().job().job_id();
  }
  v1::OpResult Control(const std::string& job_id, v1::JobAction action, int after_attempt = 0) {
    v1::Op op;
    op.mutable_control_job()->set_job_id(job_id);
    op.mutable_control_job()->set_action(action);
    op.mutable_control_job()->set_after_attempt(after_attempt);
    return Call(op);
  }
  v1::OpResult Resize(const std::string& job_id, int min_processes, int max_processes) {
    v1::Op op;
    op.mutable_control_job()->set_job_id(job_id);
    op.mutable_control_job()->set_action(v1::JOB_ACTION_RESIZE);
    op.mutable_control_job()->set_min_processes(min_processes);
    op.mutable_control_job()->set_max_processes(max_processes);
    return Call(op);
  }
  // Returns the number of processes of the current attempt.
  int ProcessesOf(const std::string& job_id) {
    const v1::JobRecord record = Get(job_id);
    return CountProcesses(record.history(record.history_size() - 1));
  }
  v1::JobRecord Get(const std::string& job_id) {
    v1::Op op;
    op.mutable_get_job()->set_job_id(job_id);
    return Call(op).get_job().job();
  }
  v1::JobState StateOf(const std::string& job_id) { return Get(job_id).state(); }

  // ---- nodes

  struct Node {
    uint64_t uid = 1;
    int cpus = 4;
    int gpus = 0;
    bool talks = true;
    bool restarts_in_place = true;
    uint64_t sequence = 0;
    std::map<std::pair<std::string, int>, v1::AttemptReport> attempts;
    v1::SyncNodeReply last;
    std::vector<v1::LogQuery> queries;
    std::vector<std::string> held_jobs;
  };
  Node& AddNode(const std::string& name, int cpus = 4) {
    nodes_[name].cpus = cpus;
    nodes_[name].uid = ++uids_;
    Sync(name);
    return nodes_[name];
  }
  // Reports everything on the node, and does what the reply says.
  void Sync(const std::string& name) {
    SendSync(name);
    Pump();
  }
  void SendSync(const std::string& name, const std::string& cluster = kCluster) {
    Node& node = nodes_.at(name);
    v1::Op op;
    v1::SyncNodeRequest* const request = op.mutable_sync_node();
    request->set_node(name);
    request->set_node_uid(node.uid);
    request->set_cluster_id(cluster);
    request->set_sequence(node.sequence);
    request->mutable_info()->set_cpus(node.cpus);
    request->mutable_info()->set_memory_bytes(int64_t{64} << 30);
    request->mutable_info()->set_restarts_in_place(node.restarts_in_place);
    request->mutable_info()->set_takes_files(true);
    for (int i = 0; i < node.gpus; ++i) request->mutable_info()->add_gpus("gpu");
    request->set_seen_version(node.last.version());
    for (const std::string& job : node.held_jobs) request->add_held_jobs(job);
    for (const auto& [key, report] : node.attempts) *request->add_attempts() = report;
    syncs_[name] = Send(op);
  }
  // Lets nodes read their answers and call again, until all calls are held.
  void Pump() {
    for (bool more = true; more;) {
      more = false;
      for (auto& [name, node] : nodes_) {
        if (!node.talks) continue;
        const auto sync = syncs_.find(name);
        if (sync != syncs_.end() && !replies_.contains(sync->second)) continue;
        more = true;
        if (sync == syncs_.end()) {
          SendSync(name);
          continue;
        }
        const v1::OpResult result = std::move(replies_[sync->second]);
        replies_.erase(sync->second);
        syncs_.erase(sync);
        ASSERT_FALSE(result.has_error()) << result.error().message();
        for (const v1::LogQuery& query : result.sync_node().queries()) {
          node.queries.push_back(query);
        }
        node.last = result.sync_node();
        for (const v1::NodeAssignment& assignment : node.last.assignments()) {
          if (!assignment.token().empty()) tokens_.push_back(assignment.token());
          if (assignment.restarts_left() > 0) {
            restarts_left_.push_back(assignment.restarts_left());
          }
        }
        Obey(&node);
      }
    }
  }
  void Obey(Node* node) {
    std::set<std::pair<std::string, int>> wanted;
    for (const v1::NodeAssignment& assignment : node->last.assignments()) {
      const auto key = std::make_pair(assignment.job_id(), assignment.attempt());
      wanted.insert(key);
      v1::AttemptReport& report = node->attempts[key];
      if (report.state() == v1::PLACEMENT_STATE_UNSPECIFIED) {
        report.set_job_id(assignment.job_id());
        report.set_attempt(assignment.attempt());
        report.set_state(v1::PLACEMENT_STATE_RUNNING);
        report.set_started_unix_ms(absl::ToUnixMillis(now_));
        ++starts_[assignment.job_id()];
      }
      if (assignment.stop() && report.state() != v1::PLACEMENT_STATE_ENDED && stops_obey_) {
        SetEnd(&report, v1::END_CLASS_CANCELLED, assignment.stop_why());
      }
    }
    for (auto it = node->attempts.begin(); it != node->attempts.end();) {
      it = wanted.contains(it->first) ? std::next(it) : node->attempts.erase(it);
    }
  }
  void ObeyStops() {
    stops_obey_ = true;
    for (auto& [name, node] : nodes_) Obey(&node);
    for (auto& [name, node] : nodes_) Sync(name);
  }
  void SetEnd(v1::AttemptReport* report, v1::EndClass end_class, const std::string& why) {
    report->set_state(v1::PLACEMENT_STATE_ENDED);
    report->set_ended_unix_ms(absl::ToUnixMillis(now_));
    report->mutable_end()->set_end_class(end_class);
    report->mutable_end()->set_why(why);
  }
  // Ends the processes of the job's current attempt on this node in this way.
  void EndOn(const std::string& name, const std::string& job_id, v1::EndClass end_class,
             const std::string& why = "rank 0 exited with code 1", int asked = 0) {
    const int attempt = Get(job_id).attempts();
    const auto it = nodes_.at(name).attempts.find({job_id, attempt});
    ASSERT_NE(it, nodes_.at(name).attempts.end()) << name << " does not run it";
    it->second.set_restart(asked);
    SetEnd(&it->second, end_class, why);
    Sync(name);
  }

  // Lets the runner on this node ask to start again, within the attempt, what the attempt has lost.
  void AskOn(const std::string& name, const std::string& job_id, int restart,
             v1::EndClass end_class, const std::string& why = "rank 1 was killed") {
    v1::AttemptReport& report = nodes_.at(name).attempts.at({job_id, Get(job_id).attempts()});
    report.set_restart(restart);
    report.set_ended_unix_ms(absl::ToUnixMillis(now_));
    report.mutable_end()->set_end_class(end_class);
    report.mutable_end()->set_why(why);
    report.mutable_end()->set_rank(1);
    report.mutable_failed_ago()->set_seconds(1);
    Sync(name);
  }
  // Returns how many restarts the node was granted.
  int RestartsOn(const std::string& name) {
    return nodes_.at(name).last.assignments_size() == 0
               ? -1
               : nodes_.at(name).last.assignments(0).restarts();
  }

  void Hear(const std::string& group, AttemptStage stage,
            absl::Duration ago = absl::ZeroDuration()) {
    JobsOutput out;
    core_->Hear({group, stage, now_ - ago}, NextEvent(), &out);
    Take(std::move(out));
    Pump();
  }

  // Returns the next message of a watch of everything that is durable.
  v1::WatchJobsBatch Read(const v1::WatchJobsRequest& request, JobsCore::WatchPlace* place) {
    v1::WatchJobsBatch batch;
    const auto error = core_->ReadChanges(request, caller_.has_value() ? &*caller_ : nullptr,
                                          revision_, 1 << 20, place, &batch);
    EXPECT_FALSE(error.has_value()) << error->message();
    return batch;
  }
  static std::vector<std::string> Ids(const v1::WatchJobsBatch& batch) {
    std::vector<std::string> ids;
    for (const v1::JobRecord& job : batch.jobs()) ids.push_back(job.job_id());
    return ids;
  }

  JobsOptions options_;
  std::vector<v1::JournalChange> journal_;
  std::vector<std::string> tokens_;  // tokens that nodes were sent
  std::vector<int> restarts_left_;   // restarts_left that nodes were sent, if any
  std::optional<Identity> caller_;   // the caller of all operations
  std::unique_ptr<JobsCore> core_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(5);
  uint64_t revision_ = 100;
  bool idle_ = false;  // events do not change the revision
  CallId call_ = 0;
  std::map<CallId, v1::OpResult> replies_;
  std::map<std::string, CallId> syncs_;  // held calls
  std::map<std::string, Node> nodes_;
  std::map<std::string, int> starts_;
  std::vector<std::string> closed_;
  uint64_t uids_ = 0;
  bool stops_obey_ = true;
};

TEST_F(JobsCoreTest, Job_OnWaitingNodes_RunsAndSucceeds) {
  AddNode("a");
  AddNode("b");
  const std::string job = Submit(Spec(8));
  EXPECT_EQ(job, "mnist-1");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EndOn("b", job, v1::END_CLASS_SUCCEEDED);
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(record.why(), "all processes have succeeded");
  EXPECT_EQ(closed_, std::vector<std::string>{"mnist-1.1"});
  EXPECT_TRUE(nodes_["a"].attempts.empty());  // the node may forget it
}

TEST_F(JobsCoreTest, Job_WithoutRoom_WaitsAndSaysWhatFor) {
  AddNode("a", 2);
  Submit(Spec(2));
  const std::string second = Submit(Spec(1));
  EXPECT_EQ(Get(second).why(),
            "it was submitted; it waits for room for 1 process with 1 CPU: no "
            "node has it");
  EndOn("a", "mnist-1", v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(second), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, JobLargerThanAllNodes_IsRefused_UnlessItMayWait) {
  AddNode("a", 2);
  Settle();
  const v1::OpResult refused = TrySubmit(Spec(3));
  EXPECT_EQ(refused.error().message(),
            "the job is larger than all nodes together: it needs room for 3 processes with 1 CPU "
            "each: 2 fit; ask for less, or set wait_for_nodes to queue it");
  v1::JobSpec spec = Spec(3);
  spec.set_wait_for_nodes(true);
  const std::string job = Submit(spec);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  AddNode("b", 3);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, SizeThatNeedsACordonedNode_IsNoReasonToRefuse) {
  AddNode("a", 2);
  AddNode("b", 2);
  Settle();
  v1::Op op;
  op.mutable_control_node()->set_node("b");
  op.mutable_control_node()->set_action(v1::NODE_ACTION_CORDON);
  Call(op);
  const std::string job = Submit(Spec(4));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  EXPECT_FALSE(Resize(job, 3, 4).has_error());
  op.mutable_control_node()->set_action(v1::NODE_ACTION_UNCORDON);
  Call(op);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  nodes_["b"].talks = false;
  Advance(absl::Minutes(5));
  EXPECT_EQ(TrySubmit(Spec(4)).error().message(),
            "the job is larger than all nodes together, without 1 that is lost (muster nodes): it "
            "needs room for 4 processes with 1 CPU each: 2 fit; ask for less, or set "
            "wait_for_nodes to queue it");
}

TEST_F(JobsCoreTest, JobBehindManyThatAreTooLargeForAllNodes_StartsSoon) {
  AddNode("a", 2);
  v1::JobSpec spec = Spec(3);
  spec.set_wait_for_nodes(true);
  std::string large;
  for (int i = 0; i < 300; ++i) {
    spec.set_max_processes(3 + i);
    const std::string job = Submit(spec);
    if (i == 0) large = job;
  }
  // All of them at once, as after a restart.
  StartTerm();
  Sync("a");
  const std::string small = Submit(Spec(2));
  Settle();
  Advance(absl::Seconds(1));
  EXPECT_EQ(StateOf(small), v1::JOB_STATE_RUNNING);
  // What was too large before may fit later.
  EndOn("a", small, v1::END_CLASS_SUCCEEDED);
  AddNode("b", 3);
  EXPECT_EQ(StateOf(large), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, FailureOnOneNode_StopsTheOthers_AndRestarts) {
  AddNode("a", 2);
  AddNode("b", 2);
  const std::string job = Submit(Spec(4, /*max_restarts=*/1));
  EndOn("b", job, v1::END_CLASS_PROCESS_FAILED, "rank 2 was killed by signal 9");
  v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(record.attempts(), 2);
  EXPECT_EQ(record.restarts(), 1);
  EXPECT_EQ(record.history(0).end().why(), "rank 2 was killed by signal 9");
  EXPECT_EQ(record.history(0).end().node(), "b");
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(record.why(), "rank 0 exited with code 1; it was restarted 1 time");
}

TEST_F(JobsCoreTest, FailurePolicy_LimitsTheRestartsOfEachClass) {
  AddNode("a", 4);
  v1::JobSpec spec = Spec(1, /*max_restarts=*/5);
  const auto limit = [&](v1::EndClass end_class, int count) {
    spec.add_class_limits()->set_end_class(end_class);
    spec.mutable_class_limits()->rbegin()->set_count(count);
  };
  limit(v1::END_CLASS_OUT_OF_MEMORY, 1);
  limit(v1::END_CLASS_PROCESS_FAILED, 2);
  const std::string job = Submit(spec);
  EndOn("a", job, v1::END_CLASS_OUT_OF_MEMORY);
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  EndOn("a", job, v1::END_CLASS_PEER_FAILED);  // counted as PROCESS_FAILED
  EndOn("a", job, v1::END_CLASS_HANG);         // has no limit of its own
  EXPECT_EQ(Get(job).state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).restarts(), 4);
  EndOn("a", job, v1::END_CLASS_OUT_OF_MEMORY, "rank 0 was killed for memory");
  EXPECT_EQ(Get(job).state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).why(),
            "rank 0 was killed for memory; its failure policy allows 1 restart after "
            "OUT_OF_MEMORY");
  // A retry by an operator resets the counts.
  Control(job, v1::JOB_ACTION_RETRY, 5);
  EndOn("a", job, v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(Get(job).state(), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, FailurePolicy_LimitsRestartsInPlace_AndCountsEachOnce) {
  AddNode("a", 4);
  v1::JobSpec spec = Spec(2, /*max_restarts=*/5);
  spec.add_class_limits()->set_end_class(v1::END_CLASS_PROCESS_FAILED);
  spec.mutable_class_limits(0)->set_count(1);
  const std::string job = Submit(spec);
  AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(RestartsOn("a"), 1);
  ASSERT_EQ(Get(job).class_restarts_size(), 1);
  EXPECT_EQ(Get(job).class_restarts(0).count(), 1);
  // This class has no limit of its own.
  AskOn("a", job, 2, v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(RestartsOn("a"), 2);
  AskOn("a", job, 3, v1::END_CLASS_PROCESS_FAILED, "rank 1 was killed again");
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(record.why(),
            "rank 1 was killed again; its failure policy allows 1 restart after PROCESS_FAILED");
  EXPECT_EQ(record.restarts(), 2);
  ASSERT_EQ(record.class_restarts_size(), 1);
  EXPECT_EQ(record.class_restarts(0).count(), 1);
}

TEST_F(JobsCoreTest, FailurePolicy_RestartInPlaceThatIsRefused_IsCountedWithTheEndOfItsAttempt) {
  AddNode("a", 2);
  AddNode("b", 2).restarts_in_place = false;
  Sync("b");
  v1::JobSpec spec = Spec(4, /*max_restarts=*/5);
  spec.add_class_limits()->set_end_class(v1::END_CLASS_PROCESS_FAILED);
  spec.mutable_class_limits(0)->set_count(2);
  const std::string job = Submit(spec);
  AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(Get(job).attempts(), 2);
  EXPECT_EQ(Get(job).restarts(), 1);
  ASSERT_EQ(Get(job).class_restarts_size(), 1);
  EXPECT_EQ(Get(job).class_restarts(0).count(), 1);
}

TEST_F(JobsCoreTest, FailurePolicy_LimitsWhatIsNotCountedToo) {
  AddNode("a", 1);
  v1::JobSpec spec = Spec(1);
  spec.set_preemptible(true);
  spec.add_class_limits()->set_end_class(v1::END_CLASS_PREEMPTED);
  spec.mutable_class_limits(0)->set_count(0);
  const std::string job = Submit(spec);
  Settle();
  v1::JobSpec other = Spec(1);
  other.set_priority(1);
  Submit(other);
  ObeyStops();
  EXPECT_EQ(Get(job).state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Get(job).why(),
              testing::HasSubstr("its failure policy allows 0 restarts after PREEMPTED"));
}

TEST_F(JobsCoreTest, Retention_ForgetsAJobThatHasEnded_AlsoAfterARestart) {
  AddNode("a", 4);
  v1::JobSpec spec = Spec(1);
  *spec.mutable_retention() = ToProto(absl::Hours(2));
  const std::string first = Submit(spec), second = Submit(spec), runs = Submit(spec);
  const std::string kept = Submit(Spec(1));
  EndOn("a", first, v1::END_CLASS_SUCCEEDED);
  EndOn("a", kept, v1::END_CLASS_SUCCEEDED);
  Advance(absl::Hours(1));
  EndOn("a", second, v1::END_CLASS_PROCESS_FAILED);
  Advance(absl::Minutes(59));
  EXPECT_EQ(StateOf(first), v1::JOB_STATE_SUCCEEDED);
  Advance(absl::Minutes(1));
  EXPECT_EQ(StateOf(first), v1::JOB_STATE_UNSPECIFIED) << "it is not there";
  StartTerm();
  Sync("a");
  EXPECT_EQ(StateOf(second), v1::JOB_STATE_FAILED);
  Control(second, v1::JOB_ACTION_RETRY, 1);
  Advance(absl::Hours(2));
  EXPECT_EQ(StateOf(second), v1::JOB_STATE_RUNNING) << "it has not ended any more";
  EXPECT_EQ(StateOf(kept), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(StateOf(runs), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, Retention_OfAJobThatEndedInTheFuture_BeginsWithTheTerm) {
  AddNode("a", 4);
  v1::JobSpec spec = Spec(1);
  *spec.mutable_retention() = ToProto(absl::Hours(2));
  constexpr absl::Duration kAhead = absl::Hours(24 * 365);
  now_ += kAhead;  // the clock was wrong
  const std::string job = Submit(spec);
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  now_ -= kAhead;
  StartTerm();
  Sync("a");
  Advance(absl::Minutes(60));
  StartTerm();
  Sync("a");
  Advance(absl::Minutes(59));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_SUCCEEDED);
  Advance(absl::Minutes(1));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_UNSPECIFIED);
}

TEST_F(JobsCoreTest, Files_GoToTheNodesAndIntoNoReply) {
  Node& node = AddNode("a", 4);
  v1::JobSpec spec = Spec(1);
  v1::JobFile* const file = spec.add_files();
  file->set_path("config.yaml");
  file->set_content("lr: 1");
  const v1::OpResult made = TrySubmit(spec);
  EXPECT_EQ(made.submit_job().job().spec().files(0).content(), "");
  const std::string job = made.submit_job().job().job_id();
  EXPECT_EQ(Get(job).spec().files(0).content(), "");
  EXPECT_EQ(Get(job).spec().files(0).size(), 5);
  v1::Op list;
  list.mutable_list_jobs();
  EXPECT_EQ(Call(list).list_jobs().jobs(0).spec().files(0).content(), "");
  ASSERT_EQ(node.last.assignments_size(), 1);
  EXPECT_EQ(node.last.assignments(0).spec().files(0).content(), "lr: 1");
}

TEST_F(JobsCoreTest, Recovery_HasTheTimeOfEachStage_AlsoAfterARestart) {
  AddNode("a", 2);
  AddNode("b", 2);
  const std::string job = Submit(Spec(4, 1));
  const auto ms = [&](absl::Duration ago) { return absl::ToUnixMillis(now_ - ago); };
  const absl::Duration none = absl::ZeroDuration();
  EXPECT_EQ(Get(job).history(0).times().placed_unix_ms(), ms(none));
  Advance(absl::Seconds(1));
  Hear("mnist-1.1", AttemptStage::kSealed);
  Advance(absl::Seconds(5));
  // A later beat reports these.
  Hear("mnist-1.1", AttemptStage::kRestored, absl::Seconds(2));
  Hear("mnist-1.1", AttemptStage::kStepped, absl::Seconds(1));
  v1::AttemptTimes times = Get(job).history(0).times();
  EXPECT_EQ(times.sealed_unix_ms(), ms(absl::Seconds(5)));
  EXPECT_EQ(times.restored_unix_ms(), ms(absl::Seconds(2)));
  EXPECT_EQ(times.stepped_unix_ms(), ms(absl::Seconds(1)));
  EXPECT_EQ(times.detected_unix_ms(), 0);

  Advance(absl::Seconds(60));
  stops_obey_ = false;
  Hear("mnist-1.1", AttemptStage::kDetected, absl::InfiniteDuration());
  Advance(absl::Seconds(2));
  v1::AttemptReport& report = nodes_["b"].attempts.at({job, 1});
  report.mutable_failed_ago()->set_seconds(2);
  report.mutable_failed_ago()->set_nanos(5'000'000);
  EndOn("b", job, v1::END_CLASS_PROCESS_FAILED);
  times = Get(job).history(0).times();
  EXPECT_EQ(times.failed_unix_ms(), ms(absl::Milliseconds(2005)));
  EXPECT_EQ(times.detected_unix_ms(), ms(absl::Seconds(2)));
  EXPECT_EQ(times.decided_unix_ms(), ms(none));
  EXPECT_EQ(times.fenced_unix_ms(), 0);
  StartTerm();
  Advance(absl::Seconds(3));
  ObeyStops();
  const v1::JobRecord record = Get(job);
  ASSERT_EQ(record.history_size(), 2);
  EXPECT_EQ(record.history(0).times().fenced_unix_ms(), ms(none));
  EXPECT_EQ(record.history(0).times().stepped_unix_ms(), times.stepped_unix_ms());
  EXPECT_EQ(record.history(0).times().failed_unix_ms(), times.failed_unix_ms());
  EXPECT_EQ(record.history(1).times().placed_unix_ms(), ms(none));
  // Later news of the former attempt's group do not concern this attempt.
  Hear("mnist-1.1", AttemptStage::kSealed);
  EXPECT_EQ(Get(job).history(1).times().sealed_unix_ms(), 0);
}

TEST_F(JobsCoreTest, StageThatIsNotKnown_IsNotInvented) {
  AddNode("a", 4);
  const std::string job = Submit(Spec(1, 3));
  Advance(absl::Seconds(1));
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);  // its node does not report when
  v1::AttemptTimes times = Get(job).history(0).times();
  EXPECT_EQ(times.sealed_unix_ms(), 0);
  EXPECT_EQ(times.stepped_unix_ms(), 0);
  EXPECT_EQ(times.failed_unix_ms(), 0);
  EXPECT_NE(times.detected_unix_ms(), 0);
  // A stopped attempt has not failed, whatever its processes do then.
  stops_obey_ = false;
  Control(job, v1::JOB_ACTION_SUSPEND);
  Hear("mnist-1.2", AttemptStage::kDetected, absl::InfiniteDuration());
  nodes_["a"].attempts.at({job, 2}).mutable_failed_ago()->set_seconds(1);
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  times = Get(job).history(1).times();
  EXPECT_EQ(times.failed_unix_ms(), 0);
  EXPECT_EQ(times.detected_unix_ms(), 0);
  EXPECT_NE(times.decided_unix_ms(), 0);
  EXPECT_NE(times.fenced_unix_ms(), 0);
}

TEST_F(JobsCoreTest, Seal_OfItsWorkers_CountsForMoreThanThatOfItsAgents) {
  AddNode("a", 4);
  const std::string job = Submit(Spec(1));
  Hear("mnist-1.1.agents", AttemptStage::kSealed);
  EXPECT_EQ(Get(job).history(0).times().sealed_unix_ms(), absl::ToUnixMillis(now_));
  Advance(absl::Seconds(1));
  Hear("mnist-1.1", AttemptStage::kSealed);
  const int64_t sealed = absl::ToUnixMillis(now_);
  Advance(absl::Seconds(1));
  Hear("mnist-1.1.agents", AttemptStage::kSealed);
  EXPECT_EQ(Get(job).history(0).times().sealed_unix_ms(), sealed);
}

TEST_F(JobsCoreTest, LostNode_HasFailedWhenItWasHeardLast_IfItWasHeardAtAll) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  AddNode("b");
  Advance(absl::Seconds(7));
  Sync("a");
  const int64_t heard = absl::ToUnixMillis(now_);
  nodes_["a"].talks = false;
  Advance(absl::Seconds(40));
  v1::AttemptTimes times = Get(job).history(0).times();
  EXPECT_EQ(times.failed_unix_ms(), heard);
  EXPECT_EQ(times.detected_unix_ms(), heard + 30'000);
  EXPECT_EQ(times.decided_unix_ms(), times.detected_unix_ms());
  // The next coordinator never hears from its node.
  ASSERT_EQ(Get(job).history(1).placements(0).node(), "b");
  nodes_["b"].talks = false;
  StartTerm();
  AddNode("c");
  Advance(absl::Minutes(2));
  times = Get(job).history(1).times();
  EXPECT_EQ(times.failed_unix_ms(), 0);
  EXPECT_NE(times.detected_unix_ms(), 0);
}

TEST_F(JobsCoreTest, NextAttempt_WaitsUntilEveryNodeHasEndedTheFormer) {
  AddNode("a", 2);
  AddNode("b", 2);
  stops_obey_ = false;
  const std::string job = Submit(Spec(4, 1));
  EndOn("b", job, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(Get(job).attempts(), 1);
  Advance(absl::Minutes(10));
  EXPECT_EQ(Get(job).attempts(), 1);
  ObeyStops();
  EXPECT_EQ(Get(job).attempts(), 2);
}

TEST_F(JobsCoreTest, RestartInPlace_IsCounted_AndHasTheTimesOfAnAttempt) {
  AddNode("a");
  const std::string job = Submit(Spec(2, 2));
  const auto ms = [&](absl::Duration ago) { return absl::ToUnixMillis(now_ - ago); };
  const absl::Duration none = absl::ZeroDuration();
  Hear("mnist-1.1", AttemptStage::kSealed);
  Hear("mnist-1.1", AttemptStage::kStepped);
  Advance(absl::Seconds(60));
  Hear("mnist-1.1", AttemptStage::kDetected, absl::InfiniteDuration());
  Advance(absl::Seconds(2));
  AskOn("a", job, 1, v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(RestartsOn("a"), 1);
  v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(record.why(), "restart 1 of 2, within attempt 1, after: rank 1 was killed");
  EXPECT_EQ(record.restarts(), 1);
  EXPECT_EQ(record.attempts(), 1);
  ASSERT_EQ(record.history_size(), 2);
  EXPECT_EQ(record.history(0).end().end_class(), v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(record.history(0).end().rank(), 1);
  EXPECT_EQ(record.history(0).times().detected_unix_ms(), ms(absl::Seconds(2)));
  EXPECT_EQ(record.history(0).times().failed_unix_ms(), ms(absl::Seconds(2)));
  EXPECT_EQ(record.history(0).times().decided_unix_ms(), ms(none));
  EXPECT_EQ(record.history(0).times().fenced_unix_ms(), ms(none));
  EXPECT_EQ(record.history(1).number(), 1);
  EXPECT_EQ(record.history(1).restarts(), 1);
  EXPECT_FALSE(record.history(1).has_end());
  EXPECT_EQ(record.history(1).times().placed_unix_ms(), ms(none));
  EXPECT_EQ(record.history(1).times().stepped_unix_ms(), 0);
  // The node repeats the request, also to another coordinator: it is the same request.
  Sync("a");
  StartTerm();
  Sync("a");
  EXPECT_EQ(Get(job).restarts(), 1);
  EXPECT_EQ(RestartsOn("a"), 1);
  EXPECT_EQ(starts_[job], 1);
  Advance(absl::Seconds(1));
  Hear("mnist-1.1", AttemptStage::kSealed);
  Hear("mnist-1.1", AttemptStage::kStepped);
  EXPECT_EQ(Get(job).history(1).times().stepped_unix_ms(), ms(none));
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(JobsCoreTest, RestartsInPlaceAndOthers_HaveOneBudget) {
  AddNode("a");
  const std::string job = Submit(Spec(2, 2));
  EXPECT_EQ(Get(job).restarts(), 0);
  AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(Get(job).restarts(), 2);
  EXPECT_EQ(Get(job).attempts(), 2);
  // The node could ask anyway; then the job has failed as by any other failure.
  AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED, "rank 1 was killed again");
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(record.why(), "rank 1 was killed again; it was restarted 2 times");
  EXPECT_EQ(record.history_size(), 3);
}

// The node has not read the answer yet.
TEST_F(JobsCoreTest, RunnerIsStoppedWhenItsRestartIsGranted_FailureCountsOnce) {
  AddNode("a");
  for (const bool granted : {false, true}) {
    v1::JobSpec spec = Spec(2, /*max_restarts=*/3);
    spec.add_class_limits()->set_end_class(v1::END_CLASS_PROCESS_FAILED);
    spec.mutable_class_limits(0)->set_count(1);
    const std::string job = Submit(spec);
    if (granted) AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
    EndOn("a", job, v1::END_CLASS_PROCESS_FAILED, "rank 1 was killed", /*asked=*/1);
    const v1::JobRecord record = Get(job);
    EXPECT_EQ(record.state(), v1::JOB_STATE_RUNNING) << record.why();
    EXPECT_EQ(record.restarts(), 1);
    EXPECT_EQ(record.attempts(), 2);
    if (granted) {
      EXPECT_EQ(record.history(1).end().end_class(), v1::END_CLASS_NODE_LOST);
    }
    Control(job, v1::JOB_ACTION_CANCEL);
    ObeyStops();
  }
}

TEST_F(JobsCoreTest, UserErrorInPlace_EndsTheJob) {
  AddNode("a");
  const std::string job = Submit(Spec(2, 2));
  AskOn("a", job, 1, v1::END_CLASS_USER_ERROR, "rank 1 exited with code 2");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).restarts(), 0);
}

TEST_F(JobsCoreTest, UserErrorOfOneNode_BesideAFailureOfAnother_EndsTheJob_WhicheverIsFirst) {
  AddNode("a", 2);
  AddNode("b", 2);
  for (const bool asks_first : {false, true}) {
    const std::string job = Submit(Spec(4, 3));
    if (asks_first) {
      AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
      EXPECT_EQ(RestartsOn("a"), 1);
    }
    stops_obey_ = false;
    EndOn("b", job, v1::END_CLASS_USER_ERROR, "rank 3 exited with code 2");
    if (!asks_first) AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
    ObeyStops();
    const v1::JobRecord record = Get(job);
    EXPECT_EQ(record.state(), v1::JOB_STATE_FAILED);
    EXPECT_EQ(record.why(), "rank 3 exited with code 2");
    EXPECT_EQ(record.restarts(), asks_first ? 1 : 0);
  }
}

TEST_F(JobsCoreTest, RestartInPlaceOfSeveralNodes_WaitsForTheCause_AndReachesAll) {
  AddNode("a", 2);
  AddNode("b", 2);
  const std::string job = Submit(Spec(4, 1));
  AskOn("a", job, 1, v1::END_CLASS_PEER_FAILED, "rank 3 was killed");
  EXPECT_EQ(RestartsOn("a"), 0);
  AskOn("b", job, 1, v1::END_CLASS_PROCESS_FAILED, "rank 3 was killed");
  EXPECT_EQ(RestartsOn("a"), 1);
  EXPECT_EQ(RestartsOn("b"), 1);
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.restarts(), 1);
  EXPECT_EQ(record.history(0).end().end_class(), v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(record.history(0).end().node(), "b");
}

TEST_F(JobsCoreTest, RestartInPlaceWhoseCauseNobodyHas_IsLetOnceAllAsk) {
  AddNode("a", 2);
  AddNode("b", 2);
  const std::string job = Submit(Spec(4, 1));
  AskOn("a", job, 1, v1::END_CLASS_PEER_FAILED);
  AskOn("b", job, 1, v1::END_CLASS_PEER_FAILED);
  EXPECT_EQ(RestartsOn("a"), 1);
  EXPECT_EQ(Get(job).restarts(), 1);
}

TEST_F(JobsCoreTest, NodeIsLostBeforeARestartInPlace_AttemptEndsUncounted) {
  AddNode("a", 2);
  AddNode("b", 2);
  Settle();
  const std::string job = Submit(Spec(4, 1));
  AskOn("a", job, 1, v1::END_CLASS_PEER_FAILED);
  nodes_["b"].talks = false;
  Advance(2 * options_.node_lease);
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.restarts(), 0);
  EXPECT_EQ(record.history(0).end().end_class(), v1::END_CLASS_NODE_LOST);
}

TEST_F(JobsCoreTest, JobThatIsStopped_DoesNotRestartInPlace) {
  AddNode("a");
  const std::string job = Submit(Spec(2, 2));
  stops_obey_ = false;
  Control(job, v1::JOB_ACTION_CANCEL);
  AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(RestartsOn("a"), 0);
  EXPECT_EQ(Get(job).restarts(), 0);
  ObeyStops();
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(Get(job).history(0).end().end_class(), v1::END_CLASS_CANCELLED);
}

TEST_F(JobsCoreTest, RestartsInPlace_AreOfferedWhereAllNodesCan_AndSomeAreLeft) {
  AddNode("a", 2);
  AddNode("b", 2).restarts_in_place = false;
  Sync("b");
  const std::string job = Submit(Spec(4, 1));
  EXPECT_FALSE(Get(job).history(0).may_restart());
  AskOn("a", job, 1, v1::END_CLASS_PROCESS_FAILED);
  // As if the attempt had ended.
  EXPECT_EQ(Get(job).attempts(), 2);
  Control(job, v1::JOB_ACTION_CANCEL);
  nodes_["b"].restarts_in_place = true;
  Sync("b");
  const std::string other = Submit(Spec(4, 3));
  EXPECT_TRUE(Get(other).history(0).may_restart());
  EXPECT_EQ(restarts_left_, (std::vector<int>{3, 3}));
}

TEST_F(JobsCoreTest, RestartInPlace_WaitsForTheDelay_WhichDoubles) {
  AddNode("a");
  v1::JobSpec spec = Spec(2, 9);
  spec.mutable_restart_delay()->set_seconds(2);
  const std::string job = Submit(spec);
  for (const int seconds : {2, 4, 8}) {
    AskOn("a", job, Get(job).restarts() + 1, v1::END_CLASS_PROCESS_FAILED);
    EXPECT_EQ(nodes_["a"].last.assignments(0).restart_delay().seconds(), seconds);
    // The node may not have read the answer yet.
    StartTerm();
    Sync("a");
    EXPECT_EQ(nodes_["a"].last.assignments(0).restart_delay().seconds(), seconds);
  }
  Advance(absl::Minutes(10));
  AskOn("a", job, 4, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(nodes_["a"].last.assignments(0).restart_delay().seconds(), 2);
  for (int restart = 5; restart <= 9; ++restart) {
    AskOn("a", job, restart, v1::END_CLASS_PROCESS_FAILED);
  }
  // The length of the history is limited.
  EXPECT_EQ(Get(job).history_size(), JobsCore::kKeptAttempts);
  EXPECT_EQ(Get(job).restarts(), 9);
}

TEST_F(JobsCoreTest, UserError_IsNotRetried) {
  AddNode("a");
  const std::string job = Submit(Spec(1, 5));
  EndOn("a", job, v1::END_CLASS_USER_ERROR, "there is no program ./train");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).attempts(), 1);
}

TEST_F(JobsCoreTest, EchoOfAFailure_DoesNotHideItsCause) {
  AddNode("a", 2);
  AddNode("b", 2);
  stops_obey_ = false;
  const std::string job = Submit(Spec(4, 5));
  EndOn("a", job, v1::END_CLASS_PEER_FAILED, "rank 2 exited with code 2");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_STOPPING);
  EndOn("b", job, v1::END_CLASS_USER_ERROR, "rank 2 exited with code 2");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
}

// On many nodes, the fastest runner reports that another one has failed, and the next ones report
// that they were stopped because of it, before that runner has reported the cause.
TEST_F(JobsCoreTest, RunnersThatObeyAnOrderToStop_DoNotHideTheCause) {
  for (const char* const name : {"a", "b", "c"}) AddNode(name, 1);
  stops_obey_ = false;
  const auto fail = [&](const std::string& job, v1::EndClass end_class) {
    EndOn("b", job, v1::END_CLASS_PEER_FAILED, "rank 0 has failed");
    EndOn("c", job, v1::END_CLASS_CANCELLED, "its runner was asked to stop");
    EndOn("a", job, end_class, "rank 0 has failed");
  };
  for (const v1::EndClass end_class : {v1::END_CLASS_USER_ERROR, v1::END_CLASS_PROCESS_FAILED}) {
    const std::string job = Submit(Spec(3));
    fail(job, end_class);
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
    EXPECT_EQ(Get(job).history(0).end().end_class(), end_class);
    EXPECT_EQ(Get(job).history(0).end().node(), "a");
  }
  const std::string job = Submit(Spec(3, 2));
  for (int restart = 1; restart <= 2; ++restart) {
    fail(job, v1::END_CLASS_PROCESS_FAILED);
    EXPECT_EQ(Get(job).restarts(), restart);
  }
  fail(job, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).attempts(), 3);
}

// This happens if the runner of a node does not reach the rendezvous: the others give up, and it is
// stopped.
TEST_F(JobsCoreTest, EchoWhoseCauseNobodyHas_CountsAsAFailure) {
  AddNode("a", 1);
  AddNode("b", 1);
  stops_obey_ = false;
  const std::string job = Submit(Spec(2, 1));
  for (int i = 0; i < 2; ++i) {
    EndOn("a", job, v1::END_CLASS_PEER_FAILED, "node b did not come");
    EndOn("b", job, v1::END_CLASS_CANCELLED, "its runner was asked to stop");
    EXPECT_EQ(Get(job).restarts(), 1);
  }
  EXPECT_EQ(Get(job).state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).why(), "node b did not come; it was restarted 1 time");
}

TEST_F(JobsCoreTest, EchoOfALostNode_IsNotCounted) {
  AddNode("a", 1);
  AddNode("b", 1);
  Settle();
  const std::string job = Submit(Spec(2, 1));
  nodes_["b"].talks = false;
  EndOn("a", job, v1::END_CLASS_PEER_FAILED, "node b is silent");
  Advance(2 * options_.node_lease);
  EXPECT_EQ(Get(job).history(0).end().end_class(), v1::END_CLASS_NODE_LOST);
  EXPECT_EQ(Get(job).restarts(), 0);
}

TEST_F(JobsCoreTest, UserErrorBesideAnotherFailure_IsNotRetried_WhicheverIsFirst) {
  AddNode("a", 2);
  AddNode("b", 2);
  for (const bool user_error_first : {false, true}) {
    stops_obey_ = false;
    const std::string job = Submit(Spec(4, 5));
    const auto fail = [&] { EndOn("a", job, v1::END_CLASS_PROCESS_FAILED); };
    if (!user_error_first) fail();
    EndOn("b", job, v1::END_CLASS_USER_ERROR, "rank 2 exited with code 2");
    if (user_error_first) fail();
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
    EXPECT_EQ(Get(job).why(), "rank 2 exited with code 2");
    EXPECT_EQ(Get(job).restarts(), 0);
  }
}

TEST_F(JobsCoreTest, RestartDelay_Doubles) {
  AddNode("a");
  v1::JobSpec spec = Spec(1, 5);
  spec.mutable_restart_delay()->set_seconds(10);
  const std::string job = Submit(spec);
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  Advance(absl::Seconds(9));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  Advance(absl::Seconds(2));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  Advance(absl::Seconds(19));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  Advance(absl::Seconds(2));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, RestartDelay_GoesOn_AfterARestartOfTheCoordinator) {
  AddNode("a");
  v1::JobSpec spec = Spec(1, 5);
  spec.mutable_restart_delay()->set_seconds(10);
  const std::string job = Submit(spec);
  for (const int seconds : {10, 20}) {
    EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
    Advance(absl::Seconds(4));
    StartTerm();
    Sync("a");
    Advance(absl::Seconds(seconds - 5));
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
    Advance(absl::Seconds(2));
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  }
  // The job does not start on the node that cannot start it, as long as others may come back.
  EndOn("a", job, v1::END_CLASS_NODE_FAILED, "the disk is full");
  StartTerm();
  Sync("a");
  AddNode("b");
  Advance(absl::Seconds(4));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  Advance(absl::Seconds(2));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, RestartDelay_BeginsAgain_AfterAnAttemptThatRanForLong) {
  AddNode("a");
  v1::JobSpec spec = Spec(1, 100);
  spec.mutable_restart_delay()->set_seconds(10);
  const std::string job = Submit(spec);
  // There are more early failures than the history keeps.
  for (int i = 0; i < 12; ++i) {
    EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
    Advance(absl::Minutes(5) + absl::Seconds(2));
    ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  }
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  Advance(absl::Minutes(4));
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  Advance(absl::Minutes(2));
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  // Training for a week with a failure once a day waits 10 seconds each day; a second failure soon
  // after another waits longer.
  for (int i = 0; i < 3; ++i) {
    Advance(absl::Minutes(11));
    for (const absl::Duration delay : {absl::Seconds(10), absl::Seconds(10), absl::Seconds(20)}) {
      EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
      Advance(delay - absl::Seconds(1));
      ASSERT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
      Advance(absl::Seconds(2));
      ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
    }
  }
}

TEST_F(JobsCoreTest, RestartDelay_DoesNotFollowTheClocksOfNodes) {
  AddNode("a", 1);
  AddNode("b", 1);
  v1::JobSpec spec = Spec(2, 5);
  spec.mutable_restart_delay()->set_seconds(10);
  const std::string job = Submit(spec);
  for (const int seconds : {10, 20, 40}) {
    // The clock of b is eleven minutes ahead, so b ended eleven minutes after the other had
    // started.
    const int attempt = Get(job).attempts();
    v1::AttemptReport& report = nodes_["b"].attempts.at({job, attempt});
    report.set_started_unix_ms(absl::ToUnixMillis(now_ + absl::Minutes(11)));
    SetEnd(&report, v1::END_CLASS_PROCESS_FAILED, "rank 1 exited with code 1");
    report.set_ended_unix_ms(absl::ToUnixMillis(now_ + absl::Minutes(11)));
    Sync("b");
    const v1::JobRecord record = Get(job);
    EXPECT_EQ(record.history(attempt - 1).ended_unix_ms(), absl::ToUnixMillis(now_));
    Advance(absl::Seconds(seconds - 1));
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED) << seconds;
    Advance(absl::Seconds(2));
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING) << seconds;
  }
}

TEST_F(JobsCoreTest, NodeThatCannotStartIt_IsAvoided) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  AddNode("b");
  EndOn("a", job, v1::END_CLASS_NODE_FAILED, "the disk is full");
  Advance(absl::Seconds(10));
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(record.history(1).placements(0).node(), "b");
  EXPECT_EQ(record.restarts(), 0);
}

// If, for example, all disks in a rack are full, avoiding one more node per attempt would fail the
// job.
TEST_F(JobsCoreTest, NodesThatCannotStartIt_AreAllAvoided) {
  AddNode("a", 1);
  AddNode("b", 1);
  AddNode("healthy", 1);
  for (const char* node : {"a", "b", "healthy"}) nodes_[node].talks = false;
  const std::string job = Submit(Spec(3));
  AddNode("c", 1);
  AddNode("d", 1);
  // None of the first three nodes has reported yet that it has begun.
  const auto report = [&](const std::string& node, v1::EndClass end_class) {
    v1::AttemptReport& attempt = nodes_[node].attempts[{job, 1}];
    attempt.set_job_id(job);
    attempt.set_attempt(1);
    SetEnd(&attempt, end_class, "the disk is full");
    SendSync(node);
  };
  report("a", v1::END_CLASS_NODE_FAILED);
  report("b", v1::END_CLASS_NODE_FAILED);
  report("healthy", v1::END_CLASS_CANCELLED);
  EXPECT_THAT(Get(job).avoided_nodes(), testing::UnorderedElementsAre("a", "b"));
  Advance(absl::Seconds(5));
  const v1::JobRecord record = Get(job);
  ASSERT_EQ(record.history_size(), 2);
  std::vector<std::string> second;
  for (const v1::Placement& placement : record.history(1).placements()) {
    second.push_back(placement.node());
  }
  EXPECT_THAT(second, testing::UnorderedElementsAre("c", "d", "healthy"));
}

// A restarted coordinator hears from that node first.
TEST_F(JobsCoreTest, NodeThatCannotStartIt_IsAvoided_WhileTheOthersAreAwaited) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  AddNode("b");
  EndOn("a", job, v1::END_CLASS_NODE_FAILED, "the disk is full");
  nodes_["b"].talks = false;
  StartTerm();
  Sync("a");
  Advance(absl::Seconds(10));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  nodes_["b"].talks = true;
  Advance(absl::Seconds(1));
  v1::JobRecord record = Get(job);
  ASSERT_EQ(record.history_size(), 2);
  EXPECT_EQ(record.history(1).placements(0).node(), "b");
  // This time no other node connects.
  EndOn("b", job, v1::END_CLASS_NODE_FAILED, "the disk is full");
  nodes_["b"].talks = false;
  StartTerm();
  Sync("a");
  Settle();
  Advance(absl::Seconds(1));
  record = Get(job);
  ASSERT_EQ(record.history_size(), 3);
  EXPECT_EQ(record.history(2).placements(0).node(), "a");
}

// Otherwise a job would wait for a node that seems to be idle and ready.
TEST_F(JobsCoreTest, NodeWithProcessesThatAreToEnd_SaysWhyNothingStartsThere) {
  const auto why = [&] {
    v1::Op list;
    list.mutable_list_nodes();
    return Call(list).list_nodes().nodes(0).why();
  };
  AddNode("a");
  Submit(Spec(1));
  nodes_["a"].talks = false;
  Advance(options_.node_lease + options_.outage_tolerance + absl::Seconds(1));
  // The node is back, and has not ended the processes yet.
  SendSync("a");
  EXPECT_EQ(
      why(),
      "it still has processes of \"mnist-1.1\", which are to end: nothing starts there before");
  nodes_["a"].attempts.clear();
  SendSync("a");
  EXPECT_EQ(why(), "");
}

// For example a process in a driver that hangs: its node reports that the attempt has ended, and in
// the same call that it still has processes of it.
TEST_F(JobsCoreTest, ProcessThatItsNodeCannotEnd_ClosesTheNode_AndTheJobGoesOnElsewhere) {
  AddNode("a", 1);
  const std::string job = Submit(Spec(1, 5));
  AddNode("b", 1);
  const std::string other = Submit(Spec(1));
  nodes_["a"].talks = false;
  v1::Op op;
  v1::SyncNodeRequest* const request = op.mutable_sync_node();
  request->set_node("a");
  request->set_node_uid(nodes_["a"].uid);
  request->set_cluster_id(kCluster);
  request->mutable_info()->set_cpus(1);
  v1::AttemptReport* const ended = request->add_attempts();
  ended->set_job_id(job);
  ended->set_attempt(1);
  SetEnd(ended, v1::END_CLASS_PROCESS_FAILED, "rank 0 does not end after SIGKILL");
  v1::AttemptReport* const left = request->add_attempts();
  left->set_job_id(job);
  left->set_attempt(1);
  left->set_state(v1::PLACEMENT_STATE_RUNNING);
  Send(op);
  EXPECT_EQ(closed_, std::vector<std::string>{"mnist-1.1"});
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  EndOn("b", other, v1::END_CLASS_SUCCEEDED);
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).history(1).placements(0).node(), "b");
  v1::Op list;
  list.mutable_list_nodes();
  EXPECT_EQ(
      Call(list).list_nodes().nodes(0).why(),
      "it still has processes of \"mnist-1.1\", which are to end: nothing starts there before");
  // Then the node reports only those processes.
  request->mutable_attempts()->DeleteSubrange(0, 1);
  Send(op);
  const std::string third = Submit(Spec(1));
  EXPECT_EQ(StateOf(third), v1::JOB_STATE_QUEUED);
  request->clear_attempts();
  Send(op);
  EXPECT_EQ(StateOf(third), v1::JOB_STATE_STARTING);
}

TEST_F(JobsCoreTest, SilentNode_IsLost_AndItsJobStartsElsewhere) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  AddNode("b");
  nodes_["a"].talks = false;
  Advance(absl::Seconds(25));
  EXPECT_EQ(Get(job).attempts(), 1);
  Advance(absl::Seconds(10));
  v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(record.attempts(), 2);
  EXPECT_EQ(record.history(1).placements(0).node(), "b");
  EXPECT_EQ(record.history(0).end().end_class(), v1::END_CLASS_NODE_LOST);
  EXPECT_EQ(record.restarts(), 0);
  // The node comes back, and has to end its attempts.
  nodes_["a"].talks = true;
  Sync("a");
  Pump();
  EXPECT_EQ(Get(job).attempts(), 2);
  EXPECT_TRUE(nodes_["a"].last.assignments().empty());
}

TEST_F(JobsCoreTest, AllNodesSilent_AreNotLost_WithinTheOutageTolerance) {
  AddNode("a");
  AddNode("b");
  const std::string job = Submit(Spec(8));
  nodes_["a"].talks = nodes_["b"].talks = false;
  Advance(absl::Seconds(80));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  nodes_["a"].talks = nodes_["b"].talks = true;
  Advance(absl::Seconds(1));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  nodes_["a"].talks = nodes_["b"].talks = false;
  Advance(absl::Seconds(100));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
}

TEST_F(JobsCoreTest, FirstNodeAfterACutOfAll_GivesTheOthersALeaseToComeBack) {
  AddNode("a");
  AddNode("b");
  const std::string job = Submit(Spec(8));
  const auto cut = [&] {
    nodes_["a"].talks = nodes_["b"].talks = false;
    Advance(absl::Seconds(80));
    nodes_["a"].talks = true;
  };
  cut();
  Advance(absl::Seconds(3));
  nodes_["b"].talks = true;
  Advance(absl::Seconds(1));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).attempts(), 1);
  // This time b does not come back.
  cut();
  Advance(absl::Seconds(28));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  Advance(absl::Seconds(4));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(Get(job).history(0).end().end_class(), v1::END_CLASS_NODE_LOST);
}

TEST_F(JobsCoreTest, LostNode_IsNotKept_ByANetworkThatFailsAgainAndAgain) {
  AddNode("a");
  AddNode("b");
  const std::string job = Submit(Spec(8));
  nodes_["b"].talks = false;
  for (int i = 0; i < 6; ++i) {
    nodes_["a"].talks = true;
    Pump();
    nodes_["a"].talks = false;
    EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING) << i;
    Advance(absl::Seconds(20));
  }
  Advance(absl::Seconds(2));
  EXPECT_EQ(Get(job).history(0).end().end_class(), v1::END_CLASS_NODE_LOST);
}

TEST_F(JobsCoreTest, PausedCoordinator_LosesNobody) {
  AddNode("a");
  AddNode("b");
  const std::string job = Submit(Spec(1));
  now_ += absl::Hours(1);
  Sync("b");
  JobsOutput out;
  core_->Tick(NextEvent(), &out);
  Take(std::move(out));
  EXPECT_EQ(Get(job).attempts(), 1);
}

TEST_F(JobsCoreTest, NodeThatLostItsRecords_HasLostItsAttempts) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  nodes_["a"].uid = ++uids_;
  nodes_["a"].attempts.clear();
  core_->Abandon(syncs_["a"]);
  Sync("a");
  EXPECT_EQ(Get(job).attempts(), 2);
  EXPECT_EQ(Get(job).history(0).end().why(), "node \"a\" has lost its records of attempts");
}

TEST_F(JobsCoreTest, SecondAgentOfAName_IsRefused_WhileTheFirstIsThere) {
  AddNode("a");
  v1::Op op;
  op.mutable_sync_node()->set_node("a");
  op.mutable_sync_node()->set_node_uid(999);
  const v1::OpResult result = Call(op);
  EXPECT_EQ(result.error().code(), static_cast<int>(absl::StatusCode::kAlreadyExists));
}

TEST_F(JobsCoreTest, SecondAgentBetweenTwoCallsOfTheFirst_IsRefusedToo) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  // The first agent has its answer, and has not called again.
  nodes_["a"].talks = false;
  Control(job, v1::JOB_ACTION_CANCEL);
  v1::Op op;
  op.mutable_sync_node()->set_node("a");
  op.mutable_sync_node()->set_node_uid(999);
  EXPECT_EQ(Call(op).error().code(), static_cast<int>(absl::StatusCode::kAlreadyExists));
}

TEST_F(JobsCoreTest, OlderCallOfANode_IsRefused) {
  v1::Op op;
  op.mutable_sync_node()->set_node("a");
  op.mutable_sync_node()->set_node_uid(5);
  op.mutable_sync_node()->set_sequence(10);
  Call(op);
  op.mutable_sync_node()->set_sequence(9);
  EXPECT_EQ(Call(op).error().code(), static_cast<int>(absl::StatusCode::kAborted));
}

TEST_F(JobsCoreTest, AgentThatStartsAgainWithAClockThatWasSetBack_IsHeardBeforeItsNodeIsLost) {
  Node& node = AddNode("a");
  const std::string job = Submit(Spec(1));
  AddNode("b");
  node.sequence = 1000;
  Sync("a");
  // The end of the agent breaks the held call.
  core_->Abandon(syncs_["a"]);
  node.talks = false;
  node.sequence = 5;
  SendSync("a");
  EXPECT_EQ(replies_[syncs_["a"]].error().code(), static_cast<int>(absl::StatusCode::kAborted));
  syncs_.erase("a");
  Advance(absl::Seconds(16));
  node.talks = true;
  Sync("a");
  Advance(absl::Minutes(1));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).attempts(), 1);
}

TEST_F(JobsCoreTest, RunnerThatSomebodyElseStops_IsTheNodes) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  nodes_["a"].attempts.at({job, 1}).mutable_ran_for()->set_seconds(60);
  EndOn("a", job, v1::END_CLASS_CANCELLED, "its runner was asked to stop");
  EXPECT_EQ(Get(job).history(0).end().end_class(), v1::END_CLASS_NODE_LOST);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  // A program that does this would start again and again, and these restarts are not counted.
  EndOn("a", job, v1::END_CLASS_CANCELLED, "its runner was asked to stop");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  Advance(absl::Seconds(5));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, Cancel_InEveryState_EndsTheJob) {
  AddNode("a", 1);
  const std::string running = Submit(Spec(1));
  const std::string queued = Submit(Spec(1));
  EXPECT_FALSE(Control(queued, v1::JOB_ACTION_CANCEL).has_error());
  EXPECT_EQ(StateOf(queued), v1::JOB_STATE_CANCELLED);
  stops_obey_ = false;
  EXPECT_FALSE(Control(running, v1::JOB_ACTION_CANCEL).has_error());
  EXPECT_EQ(StateOf(running), v1::JOB_STATE_STOPPING);
  EXPECT_FALSE(Control(running, v1::JOB_ACTION_CANCEL).has_error());  // a repeat
  ObeyStops();
  EXPECT_EQ(StateOf(running), v1::JOB_STATE_CANCELLED);
  EXPECT_FALSE(Control(running, v1::JOB_ACTION_CANCEL).has_error());
  const std::string done = Submit(Spec(1));
  EndOn("a", done, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(Control(done, v1::JOB_ACTION_CANCEL).error().message(), "job mnist-3 has succeeded");
}

TEST_F(JobsCoreTest, SuspendedJob_KeepsItsPlaceInTheRecords_AndResumes) {
  AddNode("a", 1);
  const std::string job = Submit(Spec(1));
  Control(job, v1::JOB_ACTION_SUSPEND);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_SUSPENDED);
  Submit(Spec(1));
  EXPECT_FALSE(Control(job, v1::JOB_ACTION_RESUME).has_error());
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  EndOn("a", "mnist-2", v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).restarts(), 0);
}

TEST_F(JobsCoreTest, Retry_OfAFailedJob_HappensOnceForEachCall) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
  EXPECT_FALSE(Control(job, v1::JOB_ACTION_RETRY, 1).has_error());
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  // This repeats the first call, as if its answer was lost.
  EXPECT_FALSE(Control(job, v1::JOB_ACTION_RETRY, 1).has_error());
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
  // A call that does not name the attempt it follows would be taken for a repeat.
  const v1::OpResult without = Control(job, v1::JOB_ACTION_RETRY);
  EXPECT_EQ(without.error().detail().field(), "after_attempt");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
  EXPECT_FALSE(Control(job, v1::JOB_ACTION_RETRY, 2).has_error());
  EXPECT_FALSE(Control(job, v1::JOB_ACTION_RETRY).has_error());  // the job runs already
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, Retry_OfAJobThatNeverStarted_NamesNoAttempt) {
  const std::string job = Submit(Spec(1));
  Control(job, v1::JOB_ACTION_CANCEL);
  EXPECT_FALSE(Control(job, v1::JOB_ACTION_RETRY).has_error());
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
}

TEST_F(JobsCoreTest, Resume_OfAJobThatHasEnded_NamesWhatRunsItAgain) {
  AddNode("a");
  const std::string failed = Submit(Spec(1));
  EndOn("a", failed, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(Control(failed, v1::JOB_ACTION_RESUME).error().message(),
            "job mnist-1 has failed: retry it to run it again");
  const std::string succeeded = Submit(Spec(1));
  EndOn("a", succeeded, v1::END_CLASS_SUCCEEDED);
  for (const v1::JobAction action : {v1::JOB_ACTION_RESUME, v1::JOB_ACTION_RETRY}) {
    EXPECT_EQ(Control(succeeded, action).error().message(),
              "job mnist-2 has succeeded: submit it again to run it again");
  }
}

TEST_F(JobsCoreTest, TimeLimit_EndsTheJob_AlsoAcrossARestart) {
  AddNode("a");
  v1::JobSpec spec = Spec(1, 3);
  spec.mutable_time_limit()->set_seconds(100);
  const std::string job = Submit(spec);
  Advance(absl::Seconds(90));
  nodes_["a"].attempts.begin()->second.mutable_ran_for()->set_seconds(90);
  StartTerm();
  Sync("a");
  Advance(absl::Seconds(11));
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(record.why(), "attempt 1 has run for its time limit of 1m40s");
}

TEST_F(JobsCoreTest, JobOfATimeLimit_KeepsItsRoomForItsGraceToo) {
  AddNode("a", 4);
  v1::JobSpec first = Spec(3);
  first.mutable_time_limit()->set_seconds(100);
  first.mutable_stop_grace()->set_seconds(60);
  Submit(first);
  Submit(Spec(4));
  // The third job, with its grace, ends no later than the first, when the second begins.
  v1::JobSpec third = Spec(1);
  third.mutable_time_limit()->set_seconds(100);
  third.mutable_stop_grace()->set_seconds(30);
  EXPECT_EQ(StateOf(Submit(third)), v1::JOB_STATE_RUNNING);
  third.mutable_stop_grace()->set_seconds(61);
  EXPECT_EQ(StateOf(Submit(third)), v1::JOB_STATE_QUEUED);
}

TEST_F(JobsCoreTest, JobsBehindOneThatEndsPartByPart_StartTogetherSoonAfter) {
  for (const char* const name : {"a", "b", "c", "d"}) AddNode(name, 1);
  stops_obey_ = false;
  const std::string wide = Submit(Spec(4));
  std::vector<std::string> jobs;
  for (int i = 0; i < 4; ++i) jobs.push_back(Submit(Spec(1)));
  EndOn("a", wide, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(StateOf(jobs[0]), v1::JOB_STATE_RUNNING);
  EndOn("b", wide, v1::END_CLASS_CANCELLED);
  EndOn("c", wide, v1::END_CLASS_CANCELLED);
  EXPECT_EQ(StateOf(jobs[1]), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(core_->NextDeadline(), now_ + absl::Milliseconds(100));
  Advance(absl::Milliseconds(100));
  EXPECT_EQ(StateOf(jobs[1]), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(StateOf(jobs[2]), v1::JOB_STATE_RUNNING);
  // After its last end, there is nothing left to wait for.
  EndOn("d", wide, v1::END_CLASS_CANCELLED);
  EXPECT_EQ(StateOf(jobs[3]), v1::JOB_STATE_RUNNING);
}

// Nodes may take minutes to report that the job runs, and only then does its time limit begin.
TEST_F(JobsCoreTest, JobOfATimeLimit_ThatIsStarting_IsExpectedToEnd) {
  Node& node = AddNode("a", 4);
  node.talks = false;
  v1::JobSpec spec = Spec(3);
  spec.mutable_time_limit()->set_seconds(3600);
  const std::string first = Submit(spec);
  ASSERT_EQ(StateOf(first), v1::JOB_STATE_STARTING);
  Submit(Spec(4));
  spec = Spec(1);
  spec.mutable_time_limit()->set_seconds(3601);
  const std::string longer = Submit(spec);
  EXPECT_EQ(StateOf(longer), v1::JOB_STATE_QUEUED);
  spec.mutable_time_limit()->set_seconds(3600);
  const std::string shorter = Submit(spec);
  EXPECT_EQ(StateOf(shorter), v1::JOB_STATE_STARTING);
}

TEST_F(JobsCoreTest, UrgentJob_PreemptsAndTheOtherComesBack) {
  AddNode("a", 1);
  Settle();
  v1::JobSpec spec = Spec(1);
  spec.set_preemptible(true);
  const std::string job = Submit(spec);
  spec.set_priority(1);
  const std::string urgent = Submit(spec);
  EXPECT_EQ(StateOf(urgent), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  EndOn("a", urgent, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).restarts(), 0);
}

TEST_F(JobsCoreTest, DrainedNode_GetsNothing_AndItsJobsMove) {
  AddNode("a", 2);
  const std::string job = Submit(Spec(1));
  AddNode("b", 2);
  v1::Op op;
  op.mutable_control_node()->set_node("a");
  op.mutable_control_node()->set_action(v1::NODE_ACTION_DRAIN);
  EXPECT_FALSE(Call(op).has_error());
  Pump();
  EXPECT_EQ(Get(job).history(1).placements(0).node(), "b");
  StartTerm();
  Sync("a");
  Sync("b");
  v1::Op list;
  list.mutable_list_nodes();
  EXPECT_TRUE(Call(list).list_nodes().nodes(0).draining());
}

// For example machines in a cloud, each with its own name.
TEST_F(JobsCoreTest, DrainedNodeThatIsGone_IsForgotten_LaterThanOthers_AndBeforeIfAPersonSaysSo) {
  options_.node_retention = absl::Hours(1);
  options_.cordoned_retention = absl::Hours(3);
  StartTerm();
  const auto control = [&](const std::string& node, v1::NodeAction action) {
    v1::Op op;
    op.mutable_control_node()->set_node(node);
    op.mutable_control_node()->set_action(action);
    Call(op);
  };
  for (const char* const name : {"drained", "other", "uncordoned"}) AddNode(name);
  control("drained", v1::NODE_ACTION_DRAIN);
  control("uncordoned", v1::NODE_ACTION_DRAIN);
  for (auto& [name, node] : nodes_) node.talks = false;
  Advance(absl::Hours(1) + absl::Minutes(1));
  EXPECT_EQ(core_->nodes(), 2u);
  control("uncordoned", v1::NODE_ACTION_UNCORDON);
  Advance(absl::Seconds(2));
  EXPECT_EQ(core_->nodes(), 1u);
  Advance(absl::Hours(3) - absl::Minutes(62));
  EXPECT_EQ(core_->nodes(), 1u);
  Advance(absl::Minutes(2));
  EXPECT_EQ(core_->nodes(), 0u);
  StartTerm();
  nodes_["drained"].talks = true;
  Sync("drained");
  v1::Op list;
  list.mutable_list_nodes();
  const v1::OpResult nodes = Call(list);
  for (const v1::NodeRecord& node : nodes.list_nodes().nodes()) EXPECT_FALSE(node.cordoned());
}

TEST_F(JobsCoreTest, IdempotencyKey_ReturnsTheFirstJob_AlsoAfterARestart) {
  AddNode("a");
  v1::JobSpec spec = Spec(1);
  for (int i = 0; i < 20; ++i) AddNameValue(absl::StrCat("V", i), "x", spec.mutable_env());
  EXPECT_EQ(TrySubmit(spec, "k").submit_job().job().job_id(), "mnist-1");
  StartTerm();
  std::reverse(spec.mutable_env()->begin(), spec.mutable_env()->end());
  const v1::OpResult again = TrySubmit(spec, "k");
  EXPECT_EQ(again.submit_job().job().job_id(), "mnist-1");
  EXPECT_TRUE(again.submit_job().existed());
  spec.set_max_processes(2);
  EXPECT_EQ(TrySubmit(spec, "k").error().detail().reason(), v1::ERROR_REASON_KEY_REUSED);
}

// An older coordinator did not refuse variables that agents set.
TEST_F(JobsCoreTest, IdempotencyKey_OfAJobThatWouldBeRefusedNow_ReturnsIt) {
  AddNode("a");
  v1::JobSpec spec = Spec(1);
  EXPECT_EQ(TrySubmit(spec, "k").submit_job().job().job_id(), "mnist-1");
  AddNameValue("RANK", "0", spec.mutable_env());
  for (v1::JournalChange& change : journal_) {
    if (!change.job_record_changed().has_record()) continue;
    v1::JobRecord* const record = change.mutable_job_record_changed()->mutable_record();
    *record->mutable_spec() = spec;
    FillJobSpec(record->mutable_spec());
    record->set_request_hash(HashJobSpec(record->spec()));
  }
  StartTerm();
  const v1::OpResult again = TrySubmit(spec, "k");
  EXPECT_FALSE(again.has_error()) << again.error().message();
  EXPECT_EQ(again.submit_job().job().job_id(), "mnist-1");
  EXPECT_TRUE(again.submit_job().existed());
  EXPECT_EQ(TrySubmit(spec, "k2").error().detail().reason(), v1::ERROR_REASON_BAD_FIELD);
}

TEST_F(JobsCoreTest, Submit_SizeIsThatOfTheCallersSpecification) {
  AddNode("a");
  v1::JobSpec spec = Spec(1);
  for (int i = 0; i < kMaxFiles; ++i) spec.add_files()->set_path(absl::StrCat("f", i));
  AddNameValue("A", "", spec.mutable_env());
  spec.mutable_env(spec.env_size() - 1)
      ->set_value(std::string(kMaxSpecBytes - spec.ByteSizeLong() - 8, 'x'));
  const v1::OpResult result = TrySubmit(spec);
  EXPECT_FALSE(result.has_error()) << result.error().message();
}

TEST_F(JobsCoreTest, RestartOfTheCoordinator_KeepsRunningJobs) {
  AddNode("a", 2);
  AddNode("b", 2);
  const std::string job = Submit(Spec(4));
  const std::string queued = Submit(Spec(4));
  StartTerm();
  Sync("a");
  Sync("b");
  Advance(absl::Minutes(5));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(starts_[job], 2);  // once per node
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  EndOn("b", job, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(queued), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, ElasticJob_ThatARestartedCoordinatorFinds_WaitsForAllNodes) {
  v1::JobSpec spec = Spec(4);
  spec.set_min_processes(1);
  const std::string job = Submit(spec);
  StartTerm();
  AddNode("a", 1);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  AddNode("b", 1);
  Settle();
  EXPECT_EQ(ProcessesOf(job), 2) << "what is there after a lease";
  // A coordinator that has nothing to resume does not wait for nodes.
  journal_.clear();
  nodes_.clear();
  StartTerm();
  AddNode("a", 1);
  EXPECT_EQ(ProcessesOf(Submit(spec)), 1);
}

TEST_F(JobsCoreTest, RestoredCoordinator_EndsWhatRuns_AndNumbersJump) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  StartTerm(/*lost_terms=*/65536);
  Sync("a");
  Settle();
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_RUNNING);
  EXPECT_GT(record.attempts(), 1000);
  EXPECT_EQ(Submit(Spec(1)), "mnist-1002");
}

// In the copy, the job is in the queue. Since then it has started, on a node that calls late.
TEST_F(JobsCoreTest, RestoredCoordinator_StartsNothingBeforeNodesHadALeaseToSayWhatTheyRun) {
  const std::string job = Submit(Spec(1));
  const std::vector<v1::JournalChange> copy = journal_;
  AddNode("a");
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  Restore(copy);
  AddNode("b");
  Advance(absl::Seconds(20));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(Get(job).why(), testing::HasSubstr("nodes that may come back"));
  CallLate(job, absl::Seconds(11));
}

TEST_F(JobsCoreTest, RestoredCoordinator_ThatIsStartedAgainAtOnce_StillWaitsForNodes) {
  const std::string job = Submit(Spec(1));
  const std::vector<v1::JournalChange> copy = journal_;
  AddNode("a");
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  Restore(copy);
  StartTerm();
  AddNode("b");
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  CallLate(job, options_.node_lease);
}

// In the copy, the job is suspended. Since then it was resumed, but no record of that is left.
TEST_F(JobsCoreTest, RestoredCoordinator_JobThatIsResumedAtOnce_DoesNotRunBesideWhatWasLost) {
  const std::string job = Submit(Spec(1));
  Control(job, v1::JOB_ACTION_SUSPEND);
  const std::vector<v1::JournalChange> copy = journal_;
  AddNode("a");
  Control(job, v1::JOB_ACTION_RESUME);
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  Restore(copy);
  AddNode("b");
  Control(job, v1::JOB_ACTION_RESUME);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  CallLate(job, options_.node_lease);
}

// Clients take `attempts` for the number of the last attempt, and would look for its files.
TEST_F(JobsCoreTest, RestoredCoordinator_NumbersThatAreLeftOut_AreNoAttempts) {
  const std::string job = Submit(Spec(1));
  StartTerm(/*lost_terms=*/65536);
  EXPECT_EQ(Get(job).attempts(), 0);
  v1::Op read;
  read.mutable_read_job_log()->set_job_id(job);
  EXPECT_THAT(Call(read).error().message(), testing::HasSubstr("has not started"));
  Control(job, v1::JOB_ACTION_CANCEL);
  EXPECT_FALSE(Control(job, v1::JOB_ACTION_RETRY, /*after_attempt=*/0).has_error());
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED);
  AddNode("a");
  Settle();
  const v1::JobRecord record = Get(job);
  ASSERT_EQ(record.history_size(), 1);
  EXPECT_GT(record.attempts(), 1000);
  EXPECT_EQ(record.attempts(), record.history(0).number());
  // The next restore leaves out more numbers, before the next attempt.
  nodes_["a"].talks = false;
  StartTerm(/*lost_terms=*/2 * 65536);
  EXPECT_EQ(Get(job).attempts(), record.attempts());
}

TEST_F(JobsCoreTest, OneCopyRestoredTwice_GivesNoNumberTwice) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  const std::vector<v1::JournalChange> copy = journal_;
  const auto live = [&](uint64_t term) {
    journal_ = copy;
    nodes_["a"].attempts.clear();
    StartTerm(term);
    Sync("a");
    Settle();
    std::set<int> numbers;
    for (int i = 0; i < 20; ++i) {
      numbers.insert(Get(job).attempts());
      // The coordinator did not order this end, so the job starts again.
      nodes_["a"].attempts.begin()->second.mutable_ran_for()->set_seconds(60);
      EndOn("a", job, v1::END_CLASS_CANCELLED);
    }
    std::set<std::string> ids;
    for (int i = 0; i < 20; ++i) ids.insert(Submit(Spec(1)));
    return std::make_pair(numbers, ids);
  };
  std::set<int> numbers;
  std::set<std::string> ids;
  // Ten minutes lie between the first two restores, then 45 and a half days: as many minutes as the
  // number of terms that a restore adds.
  for (const uint64_t lost_terms : {65537, 65547, 65537 + 65536}) {
    const size_t lives = numbers.size() / 20;
    const auto [more_numbers, more_ids] = live(lost_terms);
    EXPECT_EQ(more_numbers.size(), 20u);
    numbers.insert(more_numbers.begin(), more_numbers.end());
    ids.insert(more_ids.begin(), more_ids.end());
    EXPECT_EQ(numbers.size(), (lives + 1) * 20) << lost_terms;
    EXPECT_EQ(ids.size(), (lives + 1) * 20) << lost_terms;
  }
}

TEST_F(JobsCoreTest, HeldGet_IsAnsweredByTheNextChange) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  v1::Op op;
  op.mutable_get_job()->set_job_id(job);
  op.mutable_get_job()->set_seen_revision(Get(job).revision());
  op.mutable_get_job()->mutable_hold()->set_seconds(20);
  const CallId call = Send(op);
  EXPECT_FALSE(replies_.contains(call));
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  ASSERT_TRUE(replies_.contains(call));
  EXPECT_EQ(replies_[call].get_job().job().state(), v1::JOB_STATE_SUCCEEDED);
  op.mutable_get_job()->set_seen_revision(Get(job).revision());
  const CallId late = Send(op);
  Advance(absl::Seconds(21));
  EXPECT_TRUE(replies_.contains(late));
}

TEST_F(JobsCoreTest, HeldGet_IsAnsweredByAChangeOfOnePlacement) {
  for (const char* name : {"a", "b", "c"}) AddNode(name, 1);
  for (auto& [name, node] : nodes_) node.talks = false;
  const std::string job = Submit(Spec(3));
  for (const char* name : {"a", "b", "c"}) {
    v1::Op op;
    op.mutable_get_job()->set_job_id(job);
    op.mutable_get_job()->set_seen_revision(Get(job).revision());
    op.mutable_get_job()->mutable_hold()->set_seconds(20);
    const CallId call = Send(op);
    EXPECT_FALSE(replies_.contains(call)) << name;
    nodes_[name].talks = true;
    Pump();
    ASSERT_TRUE(replies_.contains(call)) << name << " runs its part";
    EXPECT_GT(replies_[call].get_job().job().revision(), op.get_job().seen_revision());
  }
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
}

TEST_F(JobsCoreTest, Watch_SendsWhatHasChanged_AndWhatIsGone) {
  const std::string a = Submit(Spec(1)), b = Submit(Spec(2));
  JobsCore::WatchPlace place;
  const v1::WatchJobsRequest all;
  v1::WatchJobsBatch batch = Read(all, &place);
  EXPECT_EQ(Ids(batch), (std::vector<std::string>{a, b}));
  EXPECT_FALSE(batch.lists_kept());
  EXPECT_EQ(batch.seen_revision(), revision_);
  EXPECT_EQ(batch.jobs(0).why(), Get(a).why()) << "with what it waits for";
  EXPECT_TRUE(Ids(Read(all, &place)).empty());
  Control(a, v1::JOB_ACTION_SUSPEND);
  batch = Read(all, &place);
  EXPECT_EQ(Ids(batch), std::vector<std::string>{a});
  EXPECT_EQ(batch.jobs(0).state(), v1::JOB_STATE_SUSPENDED);
  // A change is sent only once it is durable.
  Control(a, v1::JOB_ACTION_CANCEL);
  const uint64_t durable = revision_ - 1;
  v1::WatchJobsBatch nothing;
  EXPECT_FALSE(core_->ReadChanges(all, nullptr, durable, 1 << 20, &place, &nothing).has_value());
  EXPECT_TRUE(Ids(nothing).empty());
  EXPECT_EQ(Ids(Read(all, &place)), std::vector<std::string>{a});
  Control(a, v1::JOB_ACTION_REMOVE);
  batch = Read(all, &place);
  EXPECT_TRUE(Ids(batch).empty());
  ASSERT_EQ(batch.gone_size(), 1);
  EXPECT_EQ(batch.gone(0), a);
  EXPECT_EQ(Read(all, &place).gone_size(), 0);

  // After a restart, removals are not known: all remaining jobs are named, and b has not changed.
  const std::string c = Submit(Spec(3));
  EXPECT_EQ(Ids(Read(all, &place)), std::vector<std::string>{c});
  Control(c, v1::JOB_ACTION_CANCEL);
  Control(c, v1::JOB_ACTION_REMOVE);
  StartTerm();
  batch = Read(all, &place);
  EXPECT_TRUE(batch.lists_kept());
  EXPECT_TRUE(Ids(batch).empty());
  ASSERT_EQ(batch.kept_size(), 1);
  EXPECT_EQ(batch.kept(0), b);
  EXPECT_FALSE(Read(all, &place).lists_kept());
}

TEST_F(JobsCoreTest, Watch_HasTheFiltersOfList_AndTellsWhatLeavesThem) {
  v1::JobSpec spec = Spec(1);
  As("ann", Role::kSubmit);
  const std::string a = Submit(spec);
  spec.set_name("other");
  Submit(spec);
  As("bob", Role::kSubmit);
  spec.set_name("mnist");
  Submit(spec);
  v1::WatchJobsRequest queued;
  queued.add_states(v1::JOB_STATE_QUEUED);
  queued.set_owner("ann");
  queued.set_name_prefix("mnist");
  JobsCore::WatchPlace place;
  EXPECT_EQ(Ids(Read(queued, &place)), std::vector<std::string>{a});
  Control(a, v1::JOB_ACTION_SUSPEND);
  v1::WatchJobsBatch batch = Read(queued, &place);
  EXPECT_TRUE(Ids(batch).empty());
  ASSERT_EQ(batch.gone_size(), 1);
  EXPECT_EQ(batch.gone(0), a);
  Control(a, v1::JOB_ACTION_RESUME);
  EXPECT_EQ(Ids(Read(queued, &place)), std::vector<std::string>{a});
}

TEST_F(JobsCoreTest, WatchOfOneJob_IsAsGet_AndEndsWithTheJob) {
  v1::JobSpec spec = Spec(1);
  AddNameValue("KEY", "secret", spec.mutable_env());
  As("ann", Role::kSubmit);
  const std::string a = Submit(spec), b = Submit(spec);
  v1::WatchJobsRequest one;
  one.set_job_id(a);
  JobsCore::WatchPlace place;
  v1::WatchJobsBatch batch = Read(one, &place);
  ASSERT_EQ(Ids(batch), std::vector<std::string>{a});
  EXPECT_EQ(batch.jobs(0).spec().env_size(), 1);
  EXPECT_EQ(batch.seen_revision(), batch.jobs(0).revision());
  As("bob", Role::kSubmit);
  JobsCore::WatchPlace of_bob;
  EXPECT_EQ(Read(one, &of_bob).jobs(0).spec().env_size(), 0);
  Control(b, v1::JOB_ACTION_SUSPEND);
  EXPECT_TRUE(Ids(Read(one, &place)).empty());
  Control(a, v1::JOB_ACTION_CANCEL);
  EXPECT_EQ(Ids(Read(one, &place)), std::vector<std::string>{a});
  Control(a, v1::JOB_ACTION_REMOVE);
  v1::WatchJobsBatch none;
  const auto error = core_->ReadChanges(one, nullptr, revision_, 1 << 20, &place, &none);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), static_cast<int>(absl::StatusCode::kNotFound));
}

TEST_F(JobsCoreTest, Watch_OfManyJobs_ComesInMessagesOfBoundedSize) {
  std::set<std::string> submitted;
  for (int i = 0; i < 50; ++i) submitted.insert(Submit(Spec(1)));
  std::set<std::string> told;
  JobsCore::WatchPlace place;
  int messages = 0;
  for (bool more = true; more; ++messages) {
    v1::WatchJobsBatch batch;
    ASSERT_FALSE(core_->ReadChanges({}, nullptr, revision_, 1000, &place, &batch).has_value());
    EXPECT_LT(batch.ByteSizeLong(), 2000u);
    for (const std::string& id : Ids(batch)) EXPECT_TRUE(told.insert(id).second) << id;
    more = batch.more();
    // A job that changes meanwhile is sent once more, with its latest state.
    if (messages == 0) Control("mnist-1", v1::JOB_ACTION_SUSPEND);
    if (messages == 0) told.erase("mnist-1");
  }
  EXPECT_GT(messages, 5);
  EXPECT_EQ(told, submitted);
}

// Fifty jobs start in one event and have one revision. A watcher that resumes after any of the
// messages also gets the rest of the revision, and what was removed meanwhile.
TEST_F(JobsCoreTest, Watch_OfManyJobsThatChangeInOneEvent_TellsAllOfThem) {
  std::set<std::string> submitted;
  for (int i = 0; i < 50; ++i) submitted.insert(Submit(Spec(1)));
  JobsCore::WatchPlace place;
  EXPECT_EQ(Ids(Read({}, &place)).size(), 50u);
  AddNode("a", 50).talks = false;
  ASSERT_EQ(Get("mnist-1").revision(), Get("mnist-50").revision());
  std::set<std::string> told;
  std::vector<uint64_t> resume_at;
  for (bool more = true; more;) {
    v1::WatchJobsBatch batch;
    ASSERT_FALSE(core_->ReadChanges({}, nullptr, revision_, 1000, &place, &batch).has_value());
    EXPECT_LT(batch.ByteSizeLong(), 2000u);
    for (const std::string& id : Ids(batch)) EXPECT_TRUE(told.insert(id).second) << id;
    more = batch.more();
    if (more) resume_at.push_back(batch.seen_revision());
  }
  EXPECT_EQ(told, submitted);
  EXPECT_GT(resume_at.size(), 3u);
  for (const uint64_t seen : resume_at) {
    JobsCore::WatchPlace again{.seen = seen};
    EXPECT_EQ(Ids(Read({}, &again)).size(), 50u) << seen;
  }
}

// This also holds within the very first revision: a watcher that has read a part of it no longer
// counts as one that has read nothing.
TEST_F(JobsCoreTest, Watch_ThatIsInsideOfARevision_HearsOfWhatIsRemovedAndOfOtherStates) {
  revision_ = 1;
  idle_ = true;
  StartTerm();
  for (int i = 0; i < 20; ++i) Submit(Spec(1));
  idle_ = false;
  JobsCore::WatchPlace place;
  v1::WatchJobsRequest request;
  request.add_states(v1::JOB_STATE_QUEUED);
  v1::WatchJobsBatch batch;
  ASSERT_FALSE(core_->ReadChanges(request, nullptr, revision_, 500, &place, &batch).has_value());
  ASSERT_TRUE(batch.more());
  Control("mnist-1", v1::JOB_ACTION_CANCEL);
  Control("mnist-2", v1::JOB_ACTION_CANCEL);
  Control("mnist-2", v1::JOB_ACTION_REMOVE);
  std::set<std::string> gone;
  for (bool more = true; more;) {
    batch.Clear();
    ASSERT_FALSE(core_->ReadChanges(request, nullptr, revision_, 500, &place, &batch).has_value());
    gone.insert(batch.gone().begin(), batch.gone().end());
    more = batch.more();
  }
  EXPECT_EQ(gone, (std::set<std::string>{"mnist-1", "mnist-2"}));
}

TEST_F(JobsCoreTest, Log_IsAskedOfTheNodeThatRanTheRank) {
  AddNode("a", 2);
  AddNode("b", 2);
  const std::string job = Submit(Spec(4));
  v1::Op op;
  op.mutable_read_job_log()->set_job_id(job);
  op.mutable_read_job_log()->set_rank(3);
  const CallId call = Send(op);
  Pump();
  ASSERT_EQ(nodes_["b"].queries.size(), 1u);
  const v1::LogQuery query = nodes_["b"].queries[0];
  EXPECT_EQ(query.local_rank(), 1);
  v1::Op answer;
  answer.mutable_answer_log()->set_node("a");  // not the node that was asked
  answer.mutable_answer_log()->set_query_id(query.query_id());
  Call(answer);
  EXPECT_FALSE(replies_.contains(call));
  answer.mutable_answer_log()->set_node("b");
  answer.mutable_answer_log()->set_data("hello\n");
  Call(answer);
  ASSERT_TRUE(replies_.contains(call));
  EXPECT_EQ(replies_[call].read_job_log().data(), "hello\n");
  op.mutable_read_job_log()->set_rank(4);
  EXPECT_EQ(Call(op).error().message(), "attempt 1 of job mnist-1 has no rank 4");
  op.mutable_read_job_log()->set_rank(0);
  const CallId silent = Send(op);
  Advance(absl::Seconds(4));
  EXPECT_EQ(replies_[silent].error().message(), "node \"a\" did not answer in time: try again");
}

// List copies field by field: a new field must not be forgotten.
TEST_F(JobsCoreTest, List_HasAllFieldsOfARecord_ButWhatIsLarge) {
  v1::JobRecordChanged change;
  v1::JobRecord* const record = change.mutable_record();
  const google::protobuf::Reflection& reflection = *record->GetReflection();
  for (int i = 0; i < record->GetDescriptor()->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* const field = record->GetDescriptor()->field(i);
    using Field = google::protobuf::FieldDescriptor;
    switch (field->cpp_type()) {
      case Field::CPPTYPE_MESSAGE:
        if (field->is_repeated()) {
          reflection.AddMessage(record, field);
        } else {
          reflection.MutableMessage(record, field);
        }
        break;
      case Field::CPPTYPE_STRING:
        if (field->is_repeated()) {
          reflection.AddString(record, field, field->name());
        } else {
          reflection.SetString(record, field, field->name());
        }
        break;
      case Field::CPPTYPE_INT32:
        reflection.SetInt32(record, field, 1);
        break;
      case Field::CPPTYPE_INT64:
        reflection.SetInt64(record, field, 2);
        break;
      case Field::CPPTYPE_UINT64:
        reflection.SetUInt64(record, field, 3);
        break;
      case Field::CPPTYPE_BOOL:
        reflection.SetBool(record, field, true);
        break;
      case Field::CPPTYPE_ENUM:
        reflection.SetEnumValue(record, field, 1);
        break;
      default:
        FAIL() << "set " << field->name() << " here";
    }
  }
  record->set_state(v1::JOB_STATE_FAILED);
  record->mutable_spec()->add_env()->set_name("SECRET");
  record->mutable_spec()->add_files()->set_content("large");
  record->mutable_history(0)->set_number(1);
  v1::JobAttempt* const last = record->add_history();
  last->set_number(2);
  last->mutable_end()->set_why("it hung");
  last->mutable_end()->add_hung();
  record->set_attempts(2);
  ASSERT_TRUE(core_->Restore(change).ok());
  v1::Op op;
  op.mutable_list_jobs();
  const v1::ListJobsReply reply = Call(op).list_jobs();
  ASSERT_EQ(reply.jobs_size(), 1);
  v1::JobRecord expected = *record;
  expected.mutable_spec()->clear_env();
  expected.mutable_spec()->mutable_files(0)->clear_content();
  expected.mutable_history()->DeleteSubrange(0, 1);
  expected.mutable_history(0)->mutable_end()->clear_hung();
  EXPECT_EQ(reply.jobs(0).DebugString(), expected.DebugString());
}

TEST_F(JobsCoreTest, DryRun_KeepsNothing_AndShowsThePlan) {
  AddNode("a");
  v1::Op op;
  *op.mutable_submit_job()->mutable_spec() = Spec(2);
  op.mutable_submit_job()->set_dry_run(true);
  const size_t records = journal_.size();
  const v1::OpResult result = Call(op);
  EXPECT_TRUE(result.submit_job().plan().starts_now());
  EXPECT_EQ(result.submit_job().plan().placements(0).node(), "a");
  EXPECT_EQ(journal_.size(), records);
  EXPECT_EQ(core_->jobs(), 0u);
}

TEST_F(JobsCoreTest, DryRun_BesideAJobThatWaits_SaysWhatTheSubmissionWould) {
  AddNode("a", 8);
  Submit(Spec(4));
  const std::string large = Submit(Spec(8));
  v1::Op op;
  *op.mutable_submit_job()->mutable_spec() = Spec(4);
  op.mutable_submit_job()->set_dry_run(true);
  v1::JobPlan plan = Call(op).submit_job().plan();
  EXPECT_FALSE(plan.starts_now());
  EXPECT_EQ(plan.why(), absl::StrCat("waits for ", large,
                                     ", which came first or has a higher priority, to start: it "
                                     "needs the room that is free now"));
  EXPECT_EQ(plan.placements(0).node(), "a");
  const v1::JobPlan of_submission = TrySubmit(Spec(4)).submit_job().plan();
  EXPECT_EQ(of_submission.SerializeAsString(), plan.SerializeAsString());
  // On room that the first job does not need, the job starts although others wait.
  AddNode("b", 3);
  op.mutable_submit_job()->mutable_spec()->set_max_processes(3);
  plan = Call(op).submit_job().plan();
  EXPECT_TRUE(plan.starts_now()) << plan.why();
  EXPECT_EQ(plan.placements(0).node(), "b");
  EXPECT_EQ(TrySubmit(Spec(3)).submit_job().plan().SerializeAsString(), plan.SerializeAsString());
}

TEST_F(JobsCoreTest, DryRun_SaysWhoListensWhere_AndIsTheSameEachTime) {
  AddNode("a", 1);
  AddNode("b", 1);
  v1::Op op;
  *op.mutable_submit_job()->mutable_spec() = Spec(2);
  op.mutable_submit_job()->set_dry_run(true);
  const v1::JobPlan plan = Call(op).submit_job().plan();
  ASSERT_EQ(plan.ports_size(), 3);
  EXPECT_EQ(plan.ports(0).name(), "master_port");
  EXPECT_EQ(plan.ports(0).node(), "a");
  EXPECT_EQ(plan.ports(1).name(), "processes");
  EXPECT_EQ(plan.ports(2).node(), "b");
  EXPECT_EQ(Call(op).submit_job().plan().SerializeAsString(), plan.SerializeAsString());
}

TEST_F(JobsCoreTest, DryRun_PlansNoMoreThanTheOwnersLimitAllows) {
  options_.max_processes_of_owner = 4;
  StartTerm();
  for (const char* const name : {"a", "b", "c", "d"}) AddNode(name, 2);
  As("ann", Role::kSubmit);
  v1::Op op;
  *op.mutable_submit_job()->mutable_spec() = Spec(2);
  op.mutable_submit_job()->mutable_spec()->set_spare_nodes(3);
  op.mutable_submit_job()->set_dry_run(true);
  EXPECT_EQ(Call(op).submit_job().plan().spares_size(), 1);
  const std::string first = Submit(Spec(1));
  ASSERT_EQ(Get(first).attempts(), 1);
  EXPECT_EQ(Call(op).submit_job().plan().spares_size(), 0);
  Submit(Spec(2));
  const v1::JobPlan waits = Call(op).submit_job().plan();
  EXPECT_FALSE(waits.starts_now());
  EXPECT_EQ(waits.why(),
            "waits for other jobs of user \"ann\" to end: they run 3 processes of the 4 that each "
            "user may run");
  As("bob", Role::kSubmit);
  EXPECT_TRUE(Call(op).submit_job().plan().starts_now());
}

TEST_F(JobsCoreTest, DryRunOfAnUrgentJob_PlansTheRoomOfSparesThatItWouldGet) {
  AddNode("a", 2);
  AddNode("b", 2);
  v1::JobSpec spared = Spec(2);
  spared.set_spare_nodes(1);
  const std::string job = Submit(spared);
  Settle();
  ASSERT_EQ(Get(job).spares_size(), 1);
  v1::Op op;
  *op.mutable_submit_job()->mutable_spec() = Spec(2);
  op.mutable_submit_job()->set_dry_run(true);
  EXPECT_FALSE(Call(op).submit_job().plan().starts_now());
  op.mutable_submit_job()->mutable_spec()->set_priority(1);
  const v1::JobPlan plan = Call(op).submit_job().plan();
  EXPECT_TRUE(plan.starts_now());
  EXPECT_EQ(plan.placements(0).node(), Get(job).spares(0).node());
  // The submitted job does what the plan says.
  v1::JobSpec urgent = Spec(2);
  urgent.set_priority(1);
  EXPECT_EQ(StateOf(Submit(urgent)), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).spares_size(), 0);
}

TEST_F(JobsCoreTest, DryRunWithAKeyThatWasUsed_TellsOfThatJob) {
  AddNode("a", 1);
  const std::string job = TrySubmit(Spec(1), "k").submit_job().job().job_id();
  v1::Op op;
  *op.mutable_submit_job()->mutable_spec() = Spec(1);
  op.mutable_submit_job()->set_idempotency_key("k");
  op.mutable_submit_job()->set_dry_run(true);
  const v1::SubmitJobReply reply = Call(op).submit_job();
  EXPECT_TRUE(reply.existed());
  EXPECT_EQ(reply.plan().why(), "job " + job + " has this key, and runs");
  EXPECT_EQ(reply.plan().placements_size(), 1);
  EXPECT_EQ(reply.plan().processes(), 1);
}

TEST_F(JobsCoreTest, Hang_CountsAsARestart_AndItsStacksAreKept) {
  AddNode("a", 1);
  const std::string job = Submit(Spec(1, /*max_restarts=*/1));
  v1::AttemptReport& report = nodes_["a"].attempts.begin()->second;
  v1::HungRanks* const hung = report.mutable_end()->add_hung();
  hung->add_ranks(0);
  hung->set_doing("step 12, backward");
  hung->set_stack("#0 poll");
  for (int i = 0; i < 100; ++i) {
    *report.mutable_end()->add_hung() = *hung;
    report.mutable_end()->mutable_hung(i + 1)->set_stack(std::string(1000, 'x'));
  }
  EndOn("a", job, v1::END_CLASS_HANG);
  Pump();
  v1::JobRecord record = Get(job);
  EXPECT_EQ(record.restarts(), 1);
  const v1::AttemptEnd& end = record.history(0).end();
  EXPECT_EQ(end.end_class(), v1::END_CLASS_HANG);
  ASSERT_GT(end.hung_size(), 1);
  EXPECT_LT(end.hung_size(), 101) << "what a node says is bounded";
  EXPECT_EQ(end.hung(0).stack(), "#0 poll");
  v1::Op list;
  list.mutable_list_jobs();
  const v1::OpResult listed = Call(list);
  for (const v1::JobAttempt& attempt : listed.list_jobs().jobs(0).history()) {
    EXPECT_EQ(attempt.end().hung_size(), 0) << "lists are small";
  }
  EndOn("a", job, v1::END_CLASS_HANG);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
}

TEST_F(JobsCoreTest, WhatEarlierAttemptsHaveLeft_IsJournaledOnce_AndKnownAgain) {
  AddNode("a", 1);
  const std::string job = Submit(Spec(1, /*max_restarts=*/2));
  v1::AttemptReport& report = nodes_["a"].attempts.at({job, 1});
  v1::HungRanks* const hung = report.mutable_end()->add_hung();
  hung->add_ranks(0);
  hung->set_stack(std::string(30'000, 's'));
  report.mutable_end()->add_last_lines(std::string(4'000, 'l'));
  EndOn("a", job, v1::END_CLASS_HANG, "rank 0 is in ReadShard");
  ASSERT_EQ(Get(job).attempts(), 2);
  const size_t before = journal_.size();
  for (const AttemptStage stage : {AttemptStage::kSealed, AttemptStage::kStepped}) {
    Hear("mnist-1.2", stage);
  }
  ASSERT_GT(journal_.size(), before);
  for (size_t i = before; i < journal_.size(); ++i) {
    EXPECT_LT(journal_[i].ByteSizeLong(), 2'000u);
  }
  const v1::JobRecord known = Get(job);
  EXPECT_EQ(known.history(0).end().hung(0).stack().size(), 30'000u);
  // Restored from the changes, and from a snapshot with changes after it.
  StartTerm();
  EXPECT_EQ(Get(job).SerializeAsString(), known.SerializeAsString());
  std::vector<v1::JournalChange> snapshot;
  core_->ForEachChange([&](const v1::JournalChange& change) { snapshot.push_back(change); });
  journal_ = snapshot;
  StartTerm();
  Sync("a");
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  const v1::JobRecord later = Get(job);
  ASSERT_EQ(later.history_size(), 3);
  StartTerm();
  EXPECT_EQ(Get(job).SerializeAsString(), later.SerializeAsString());
}

TEST_F(JobsCoreTest, EndedJobs_MakeRoomForNewOnes) {
  options_.max_jobs = 2;
  StartTerm();
  AddNode("a", 1);
  const std::string first = Submit(Spec(1));
  EndOn("a", first, v1::END_CLASS_SUCCEEDED);
  Submit(Spec(1));
  Submit(Spec(1));
  EXPECT_EQ(core_->Find(first), nullptr);
  EXPECT_EQ(TrySubmit(Spec(1)).error().detail().reason(), v1::ERROR_REASON_LIMIT);
}

TEST_F(JobsCoreTest, JobThatHasEndedFirst_MakesRoomFirst_AlsoAfterARestart) {
  for (const bool restart : {false, true}) {
    options_.max_jobs = 2;
    journal_.clear();
    nodes_.clear();
    StartTerm();
    AddNode("a", 1);
    AddNode("b", 1);
    const std::string first = Submit(Spec(1));
    const std::string second = Submit(Spec(1));
    EndOn("b", second, v1::END_CLASS_SUCCEEDED);
    Advance(absl::Hours(1));
    EndOn("a", first, v1::END_CLASS_PROCESS_FAILED);
    if (restart) StartTerm();
    Submit(Spec(1));
    EXPECT_NE(core_->Find(first), nullptr);
    EXPECT_EQ(core_->Find(second), nullptr);
  }
}

TEST_F(JobsCoreTest, BytesOfAllRecords_AreBounded_AlsoAfterARestart) {
  options_.max_bytes = 20'000;
  StartTerm();
  AddNode("a", 1);
  v1::JobSpec large = Spec(1);
  AddNameValue("A", std::string(9'000, 'x'), large.mutable_env());
  const std::string first = Submit(large);
  EndOn("a", first, v1::END_CLASS_SUCCEEDED);
  Submit(large);
  Submit(large);
  EXPECT_NE(core_->Find(first), nullptr);
  const std::string fourth = Submit(large);  // 27,000 bytes are used before it
  EXPECT_EQ(core_->Find(first), nullptr);
  EXPECT_EQ(TrySubmit(Spec(1)).error().detail().reason(), v1::ERROR_REASON_LIMIT);
  StartTerm();
  EXPECT_EQ(TrySubmit(Spec(1)).error().detail().reason(), v1::ERROR_REASON_LIMIT);
  Control(fourth, v1::JOB_ACTION_CANCEL);
  Control(fourth, v1::JOB_ACTION_REMOVE);
  Submit(Spec(1));
}

TEST_F(JobsCoreTest, Owner_IsWhomTheTransportKnows) {
  v1::Op op;
  *op.mutable_submit_job()->mutable_spec() = Spec(1);
  op.mutable_submit_job()->set_owner("bob");
  EXPECT_EQ(Call(op).submit_job().job().owner(), "bob");
  As("ann", Role::kSubmit);
  EXPECT_EQ(Call(op).submit_job().job().owner(), "ann");
  As("", Role::kAdmin);
  EXPECT_EQ(Call(op).submit_job().job().owner(), "bob");
}

TEST_F(JobsCoreTest, IdempotencyKey_IsItsOwners) {
  As("ann", Role::kSubmit);
  EXPECT_EQ(TrySubmit(Spec(1), "k").submit_job().job().job_id(), "mnist-1");
  As("bob", Role::kSubmit);
  EXPECT_EQ(TrySubmit(Spec(1), "k").submit_job().job().job_id(), "mnist-2");
  StartTerm();
  EXPECT_EQ(TrySubmit(Spec(1), "k").submit_job().job().job_id(), "mnist-2");
  As("ann", Role::kSubmit);
  EXPECT_TRUE(TrySubmit(Spec(1), "k").submit_job().existed());
}

TEST_F(JobsCoreTest, Variables_AreShownToTheirOwnerAndToAdmins) {
  v1::JobSpec spec = Spec(1);
  AddNameValue("TOKEN", "secret", spec.mutable_env());
  As("ann", Role::kSubmit);
  const std::string id = Submit(spec);
  EXPECT_EQ(Get(id).spec().env_size(), 1);
  As("root", Role::kAdmin);
  EXPECT_EQ(Get(id).spec().env_size(), 1);
  As("bob", Role::kSubmit);
  EXPECT_EQ(Get(id).spec().env_size(), 0);
  As("eve", Role::kView);
  EXPECT_EQ(Get(id).spec().env_size(), 0);
  // This also holds if the answer is held and sent in the event of another caller.
  v1::Op held;
  held.mutable_get_job()->set_job_id(id);
  held.mutable_get_job()->set_seen_revision(Get(id).revision());
  held.mutable_get_job()->mutable_hold()->set_seconds(30);
  const CallId call = Send(held);
  As("ann", Role::kSubmit);
  Control(id, v1::JOB_ACTION_CANCEL);
  ASSERT_TRUE(replies_.contains(call));
  EXPECT_EQ(replies_[call].get_job().job().state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(replies_[call].get_job().job().spec().env_size(), 0);
}

TEST_F(JobsCoreTest, OwnerAtTheLimitOfJobs_IsRefusedUntilOneHasEnded) {
  options_.max_jobs_of_owner = 2;
  options_.max_processes_of_owner = 8;
  StartTerm();
  As("ann", Role::kSubmit);
  const std::string first = Submit(Spec(1));
  Submit(Spec(1));
  const v1::OpError error = TrySubmit(Spec(1)).error();
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_EQ(error.message(),
            "user \"ann\" has 2 jobs that have not ended, and each user may have 2: submit again "
            "when one has ended, or cancel one");
  As("bob", Role::kSubmit);
  Submit(Spec(1));
  EXPECT_EQ(TrySubmit(Spec(9)).error().message(),
            "the job has up to 9 processes, and each user may run 8 at a time: ask for fewer");
  As("ann", Role::kSubmit);
  Control(first, v1::JOB_ACTION_CANCEL);
  Submit(Spec(1));
  EXPECT_EQ(Control(first, v1::JOB_ACTION_RETRY, 0).error().detail().reason(),
            v1::ERROR_REASON_LIMIT);
}

v1::JobSpec Elastic(int min_processes, int max_processes, absl::Duration grow_after) {
  v1::JobSpec spec;
  spec.set_name("mnist");
  spec.add_argv("./train");
  spec.set_min_processes(min_processes);
  spec.set_max_processes(max_processes);
  *spec.mutable_grow_after() = ToProto(grow_after);
  return spec;
}

TEST_F(JobsCoreTest, ResizeToFewer_StopsAtOnce_AndStartsAgainUncounted) {
  AddNode("a", 4);
  stops_obey_ = false;
  const std::string job = Submit(Spec(4));
  EXPECT_FALSE(Resize(job, 2, 2).has_error());
  EXPECT_EQ(Get(job).why(), "it is resized from 4 to 2 processes");
  EXPECT_FALSE(Resize(job, 2, 2).has_error());  // a repeat
  EXPECT_EQ(Get(job).attempts(), 1);
  ObeyStops();
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(ProcessesOf(job), 2);
  EXPECT_EQ(Get(job).restarts(), 0);
  EXPECT_EQ(Get(job).history(0).end().end_class(), v1::END_CLASS_RESIZED);
}

TEST_F(JobsCoreTest, ResizeToMore_WaitsForRoomWhileItRuns) {
  AddNode("a", 4);
  const std::string other = Submit(Spec(2));
  const std::string job = Submit(Spec(2));
  Settle();
  EXPECT_FALSE(Resize(job, 4, 4).has_error());
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).why(), "attempt 1 runs; it starts again when there is room for 4 processes");
  Advance(absl::Minutes(10));
  EXPECT_EQ(Get(job).attempts(), 1);
  StartTerm();  // the new size is in the record
  Sync("a");
  Settle();
  EndOn("a", other, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(ProcessesOf(job), 4);
  EXPECT_EQ(Get(job).attempts(), 2);
  EXPECT_EQ(Get(job).history(0).end().why(), "there is room for 4 processes instead of 2");
}

TEST_F(JobsCoreTest, ResizeToARange_GrowsNowIfItCan_AndNotLater) {
  AddNode("a", 4);
  const std::string job = Submit(Spec(1));
  Settle();
  EXPECT_FALSE(Resize(job, 1, 3).has_error());
  EXPECT_EQ(ProcessesOf(job), 3);
  EXPECT_FALSE(Resize(job, 1, 6).has_error());
  EXPECT_EQ(ProcessesOf(job), 4);
  EXPECT_EQ(Get(job).attempts(), 3);
  AddNode("b", 4);
  Advance(absl::Minutes(10));
  EXPECT_EQ(Get(job).attempts(), 3);
}

TEST_F(JobsCoreTest, ResizeToARange_WaitsForTheRoomThatAnotherJobGrowsInto) {
  AddNode("a", 4);
  Settle();
  const std::string first = Submit(Spec(1));
  const std::string second = Submit(Spec(1));
  stops_obey_ = false;
  EXPECT_FALSE(Resize(first, 1, 2).has_error());
  EXPECT_EQ(StateOf(first), v1::JOB_STATE_STOPPING);
  EXPECT_FALSE(Resize(second, 1, 2).has_error());
  EXPECT_EQ(StateOf(second), v1::JOB_STATE_RUNNING);
  StartTerm();  // the order is in the record
  Sync("a");
  Settle();
  ObeyStops();
  Advance(absl::Seconds(1));
  EXPECT_EQ(ProcessesOf(first), 2);
  EXPECT_EQ(ProcessesOf(second), 2);
  EXPECT_FALSE(Get(second).grows());
}

TEST_F(JobsCoreTest, Resize_InEveryState) {
  AddNode("a", 2);
  const std::string running = Submit(Spec(2));
  const std::string queued = Submit(Spec(2));
  EXPECT_FALSE(Resize(queued, 1, 0).has_error());
  EXPECT_EQ(Get(queued).spec().max_processes(), 1);
  EXPECT_FALSE(Resize(running, 1, 1).has_error());  // makes room for the other job
  EXPECT_EQ(StateOf(queued), v1::JOB_STATE_RUNNING);
  Control(queued, v1::JOB_ACTION_SUSPEND);
  EXPECT_FALSE(Resize(queued, 1, 2).has_error());
  EXPECT_EQ(StateOf(queued), v1::JOB_STATE_SUSPENDED);
  EndOn("a", running, v1::END_CLASS_USER_ERROR, "no data");
  EXPECT_FALSE(Resize(running, 2, 2).has_error());
  EXPECT_EQ(Get(running).why(), "no data");
  Control(running, v1::JOB_ACTION_RETRY, 2);
  EXPECT_EQ(ProcessesOf(running), 2);
  stops_obey_ = false;
  Control(running, v1::JOB_ACTION_CANCEL);
  EXPECT_EQ(Resize(running, 1, 1).error().message(), "job mnist-1 is being cancelled");
  ObeyStops();
  Control(queued, v1::JOB_ACTION_RESUME);
  EXPECT_EQ(ProcessesOf(queued), 2);
  EndOn("a", queued, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(Resize(queued, 1, 1).error().message(),
            "job mnist-2 has succeeded: submit it again with another number of processes");
}

TEST_F(JobsCoreTest, Resize_OfBadSize_IsRefusedAndChangesNothing) {
  options_.max_processes_of_owner = 8;
  StartTerm();
  AddNode("a", 4);
  As("ann", Role::kSubmit);
  const std::string job = Submit(Spec(4));
  Settle();
  for (const auto& [least, most] : std::vector<std::pair<int, int>>{
           {0, 0}, {-1, 2}, {3, 2}, {1, 9}, {5, 5}, {1, 2'000'000}, {1 << 30, 1 << 30}}) {
    EXPECT_TRUE(Resize(job, least, most).has_error()) << least << ":" << most;
  }
  EXPECT_EQ(Resize("mnist-9", 1, 1).error().code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(Get(job).spec().max_processes(), 4);
  EXPECT_EQ(Get(job).attempts(), 1);
}

TEST_F(JobsCoreTest, JobOfWhichAPartHasSucceeded_IsNotResized) {
  AddNode("a", 2);
  AddNode("b", 2);
  Settle();
  const std::string job = Submit(Spec(4));
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(Resize(job, 2, 2).error().message(),
            "job mnist-1 has processes that have succeeded: it keeps its size");
  EXPECT_EQ(Get(job).spec().max_processes(), 4);
  EXPECT_FALSE(Resize(job, 4, 4).has_error());
  EndOn("b", job, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(JobsCoreTest, ElasticJob_ShrinksWithALostNode_AndGrowsWhenItIsBack) {
  AddNode("a", 2);
  AddNode("b", 2);
  Settle();
  const std::string job = Submit(Elastic(1, 4, absl::Minutes(2)));
  EXPECT_EQ(ProcessesOf(job), 4);
  nodes_["b"].talks = false;
  Advance(absl::Minutes(1));
  EXPECT_EQ(ProcessesOf(job), 2);
  Advance(absl::Minutes(5));
  nodes_["b"].talks = true;
  nodes_["b"].attempts.clear();
  Advance(absl::Seconds(1));
  EXPECT_EQ(ProcessesOf(job), 4);
  EXPECT_EQ(Get(job).attempts(), 3);
  EXPECT_EQ(Get(job).restarts(), 0);
}

TEST_F(JobsCoreTest, ElasticJob_GrowsOnlyAfterItsTime_AndOnlyIfAsked) {
  AddNode("a", 2);
  Settle();
  const std::string grows = Submit(Elastic(1, 4, absl::Minutes(2)));
  AddNode("b", 2);
  Advance(absl::Seconds(119));
  EXPECT_EQ(ProcessesOf(grows), 2);
  Advance(absl::Seconds(2));
  EXPECT_EQ(ProcessesOf(grows), 4);
  Control(grows, v1::JOB_ACTION_CANCEL);
  v1::JobSpec spec = Elastic(1, 6, absl::Minutes(2));
  spec.clear_grow_after();
  const std::string stays = Submit(spec);
  AddNode("c", 2);
  Advance(absl::Hours(1));
  EXPECT_EQ(ProcessesOf(stays), 4);
  EXPECT_EQ(Get(stays).attempts(), 1);
}

// The disk of b is full for a minute each time.
TEST_F(JobsCoreTest, ElasticJob_GrowsOntoANodeThatCouldNotStartIt_WhichIsTriedLessAndLessOften) {
  AddNode("a", 2);
  AddNode("b", 2);
  Settle();
  const std::string job = Submit(Elastic(1, 4, absl::Minutes(10)));
  for (const absl::Duration avoided : {absl::Minutes(30), absl::Minutes(60), absl::Minutes(120)}) {
    EXPECT_EQ(ProcessesOf(job), 4);
    EndOn("b", job, v1::END_CLASS_NODE_FAILED, "the disk is full");
    Advance(absl::Minutes(29));
    EXPECT_EQ(ProcessesOf(job), 2);
    EXPECT_THAT(Get(job).why(), testing::HasSubstr("; for some time it avoids node \"b\", which "
                                                   "could not start it"));
    Advance(avoided - absl::Minutes(29) - absl::Seconds(1));
    EXPECT_EQ(ProcessesOf(job), 2);
    Advance(absl::Seconds(2));
  }
  EXPECT_EQ(ProcessesOf(job), 4);
  EXPECT_EQ(Get(job).avoided_nodes_size(), 0);
  EXPECT_EQ(Get(job).restarts(), 0);
  // Another coordinator starts the time again, and a retry ends the avoidance.
  EndOn("b", job, v1::END_CLASS_NODE_FAILED, "the disk is full");
  Advance(absl::Minutes(1));
  StartTerm();
  Pump();
  Advance(absl::Minutes(29));
  EXPECT_EQ(ProcessesOf(job), 2);
  Advance(absl::Minutes(2));
  EXPECT_EQ(ProcessesOf(job), 4);
  EndOn("b", job, v1::END_CLASS_NODE_FAILED, "the disk is full");
  Control(job, v1::JOB_ACTION_CANCEL);
  Control(job, v1::JOB_ACTION_RETRY, Get(job).attempts());
  EXPECT_EQ(ProcessesOf(job), 4);
}

TEST_F(JobsCoreTest, GrowingJob_KeepsTheRoomForWhichItStops) {
  AddNode("a", 2);
  Settle();
  const std::string job = Submit(Elastic(1, 4, absl::Seconds(1)));
  stops_obey_ = false;
  AddNode("b", 2);
  Advance(absl::Seconds(2));
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_STOPPING);
  const std::string late = Submit(Spec(1));
  EXPECT_EQ(StateOf(late), v1::JOB_STATE_QUEUED);
  ObeyStops();
  EXPECT_EQ(ProcessesOf(job), 4);
  EXPECT_EQ(StateOf(late), v1::JOB_STATE_QUEUED);
}

TEST_F(JobsCoreTest, Assignment_HasTheTokenOfItsAttempt_OnceWithItsSpecification) {
  options_.attempt_token = [](absl::string_view group) { return absl::StrCat("for ", group); };
  StartTerm();
  AddNode("a");
  Settle();
  const std::string id = Submit(Spec(1));
  std::vector<std::string> tokens = tokens_;
  EXPECT_EQ(tokens, std::vector<std::string>{absl::StrCat("for ", id, ".1")});
  Advance(absl::Seconds(30));
  EXPECT_EQ(tokens_.size(), 1u);
}

TEST_F(JobsCoreTest, NodeThatHoldsMemory_HearsWhichJobsHaveEnded) {
  Node& node = AddNode("a");
  Settle();
  const std::string job = Submit(Spec(4, /*max_restarts=*/1));
  node.held_jobs = {job};
  // Another attempt follows the first end, but not the second.
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(node.last.ended_jobs_size(), 0);
  Advance(absl::Minutes(1));
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(node.last.ended_jobs_size(), 0);
  EndOn("a", job, v1::END_CLASS_PROCESS_FAILED);
  ASSERT_EQ(StateOf(job), v1::JOB_STATE_FAILED);
  EXPECT_THAT(node.last.ended_jobs(), testing::ElementsAre(job));
  // Retry queues the job again: it no longer counts as ended.
  Control(job, v1::JOB_ACTION_RETRY, 2);
  Advance(options_.node_lease / 3);
  EXPECT_EQ(node.last.ended_jobs_size(), 0);
}

TEST_F(JobsCoreTest, JobThatIsCancelledWhileItWaits_IsToldByTheNextReply) {
  Node& node = AddNode("a");
  Settle();
  Submit(Spec(4));
  const std::string waits = Submit(Spec(4));
  // For example from an earlier attempt.
  node.held_jobs = {waits, "unknown-9"};
  Sync("a");
  Control(waits, v1::JOB_ACTION_CANCEL);
  Advance(options_.node_lease / 3);
  EXPECT_THAT(node.last.ended_jobs(), testing::ElementsAre(waits, "unknown-9"));
}

TEST_F(JobsCoreTest, MemoryOfAnotherCluster_IsNotJudged) {
  Node& node = AddNode("a");
  node.held_jobs = {"mnist-1"};
  node.talks = false;
  SendSync("a", "another");
  JobsOutput out;
  now_ += options_.node_lease / 3;
  core_->Tick(NextEvent(), &out);
  Take(std::move(out));
  EXPECT_EQ(replies_.at(syncs_.at("a")).sync_node().ended_jobs_size(), 0);
}

TEST_F(JobsCoreTest, WithoutRoom_JobsRunOnAndNoneIsSubmitted) {
  AddNode("a");
  Settle();
  const std::string job = TrySubmit(Spec(4), "key").submit_job().job().job_id();
  core_->SetNoRoom("the disk is nearly full");
  const v1::OpResult refused = TrySubmit(Spec(1));
  EXPECT_EQ(refused.error().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(refused.error().detail().reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_EQ(refused.error().message(), "the disk is nearly full");
  // A client that has not received the answer repeats an earlier submission.
  EXPECT_EQ(TrySubmit(Spec(4), "key").submit_job().job().job_id(), job);
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_SUCCEEDED);
  core_->SetNoRoom("");
  EXPECT_EQ(StateOf(Submit(Spec(1))), v1::JOB_STATE_RUNNING);
}

std::vector<std::string> NodesOf(const google::protobuf::RepeatedPtrField<v1::Placement>& all) {
  std::vector<std::string> nodes;
  for (const v1::Placement& placement : all) nodes.push_back(placement.node());
  return nodes;
}

TEST_F(JobsCoreTest, LostNode_IsReplacedByASpare_AlthoughOthersWaitForRoom) {
  for (const char* const name : {"a", "b", "c"}) AddNode(name, 2);
  Settle();
  v1::JobSpec spec = Spec(4);
  spec.set_spare_nodes(1);
  const std::string job = Submit(spec);
  const std::string late = Submit(Spec(1));
  EXPECT_EQ(NodesOf(Get(job).history(0).placements()), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(NodesOf(Get(job).spares()), std::vector<std::string>{"c"});
  EXPECT_EQ(StateOf(late), v1::JOB_STATE_QUEUED);
  nodes_["b"].talks = false;
  Advance(options_.node_lease + absl::Seconds(2));
  const v1::JobRecord record = Get(job);
  EXPECT_EQ(record.state(), v1::JOB_STATE_RUNNING) << record.why();
  EXPECT_EQ(record.attempts(), 2);
  EXPECT_EQ(record.restarts(), 0);
  EXPECT_EQ(NodesOf(record.history(1).placements()), (std::vector<std::string>{"a", "c"}));
  EXPECT_EQ(record.spares_size(), 0);
  EXPECT_EQ(StateOf(late), v1::JOB_STATE_QUEUED);
  // The node comes back: now the waiting job comes first, and the rest is too small for a spare.
  nodes_["b"].talks = true;
  nodes_["b"].attempts.clear();
  Advance(absl::Seconds(1));
  EXPECT_EQ(StateOf(late), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).spares_size(), 0);
  EndOn("b", late, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(NodesOf(Get(job).spares()), std::vector<std::string>{"b"});
}

TEST_F(JobsCoreTest, Spares_SurviveTheCoordinator_AndAreDroppedWithTheirNode) {
  for (const char* const name : {"a", "b"}) AddNode(name, 2);
  Settle();
  v1::JobSpec spec = Spec(2);
  spec.set_spare_nodes(1);
  const std::string job = Submit(spec);
  EXPECT_EQ(NodesOf(Get(job).spares()), std::vector<std::string>{"b"});
  StartTerm();
  Pump();
  EXPECT_EQ(NodesOf(Get(job).spares()), std::vector<std::string>{"b"});
  EXPECT_EQ(StateOf(Submit(Spec(1))), v1::JOB_STATE_QUEUED);
  v1::Op list;
  list.mutable_list_nodes();
  const v1::OpResult nodes = Call(list);
  EXPECT_EQ(nodes.list_nodes().nodes(1).used_cpus(), 2);
  EXPECT_EQ(nodes.list_nodes().nodes(1).spare_of(0), job);
  v1::Op cordon;
  cordon.mutable_control_node()->set_node("b");
  cordon.mutable_control_node()->set_action(v1::NODE_ACTION_CORDON);
  Call(cordon);
  EXPECT_EQ(Get(job).spares_size(), 0);
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_RUNNING);
}

// For example after a power cut that has destroyed a GPU.
TEST_F(JobsCoreTest, Restart_SpareOnANodeWithFewerGpus_IsDropped) {
  for (const char* const name : {"a", "b"}) {
    AddNode(name, 8).gpus = 8;
    Sync(name);
  }
  Settle();
  v1::JobSpec spec = Spec(8);
  spec.mutable_per_process()->set_gpus(1);
  spec.set_processes_per_node(8);
  spec.set_spare_nodes(1);
  const std::string job = Submit(spec);
  ASSERT_EQ(NodesOf(Get(job).spares()), std::vector<std::string>{"b"});
  StartTerm();
  Sync("b");
  EXPECT_EQ(Get(job).spares_size(), 1);
  for (const char* const name : {"a", "b"}) {
    nodes_[name].gpus = 7;
    nodes_[name].attempts.clear();
  }
  StartTerm();
  Sync("b");
  EXPECT_EQ(Get(job).spares_size(), 0);
  // The other node has lost its attempt, and has 7 GPUs as well.
  Sync("a");
  Settle();
  EXPECT_EQ(StateOf(job), v1::JOB_STATE_QUEUED) << Get(job).why();
  EXPECT_EQ(Get(job).attempts(), 1);
}

TEST_F(JobsCoreTest, Spares_EndWithTheirJob) {
  for (const char* const name : {"a", "b"}) AddNode(name, 2);
  Settle();
  v1::JobSpec spec = Spec(2);
  spec.set_spare_nodes(1);
  for (const v1::JobAction action : {v1::JOB_ACTION_CANCEL, v1::JOB_ACTION_SUSPEND}) {
    const std::string job = Submit(spec);
    ASSERT_EQ(Get(job).spares_size(), 1);
    const std::string late = Submit(Spec(1));
    stops_obey_ = false;
    Control(job, action);
    EXPECT_EQ(Get(job).spares_size(), 0);
    EXPECT_EQ(StateOf(late), v1::JOB_STATE_RUNNING);
    ObeyStops();
    Control(late, v1::JOB_ACTION_CANCEL);
  }
  const std::string job = Submit(spec);
  EndOn("a", job, v1::END_CLASS_SUCCEEDED);
  EXPECT_EQ(Get(job).spares_size(), 0);
}

TEST_F(JobsCoreTest, SpareNodes_BeyondBounds_AreRefused) {
  v1::JobSpec spec = Spec(2);
  for (const int spares : {-1, 1025}) {
    spec.set_spare_nodes(spares);
    EXPECT_EQ(TrySubmit(spec).error().detail().field(), "spec.spare_nodes");
  }
}

TEST_F(JobsCoreTest, LogLevel_ReachesTheNodeOnce_AndForgetsItself) {
  AddNode("a");
  const auto order = [&](int level, int64_t seconds) {
    v1::Op op;
    op.mutable_control_node()->set_node("a");
    op.mutable_control_node()->set_action(v1::NODE_ACTION_LOG_LEVEL);
    op.mutable_control_node()->set_log_level(level);
    if (seconds != 0) op.mutable_control_node()->mutable_for_()->set_seconds(seconds);
    return Call(op);
  };
  EXPECT_FALSE(order(1, 600).has_error());
  EXPECT_EQ(nodes_["a"].last.log_level().level(), 1);
  EXPECT_EQ(nodes_["a"].last.log_level().for_().seconds(), 600);
  const uint64_t id = nodes_["a"].last.log_level().id();
  // An agent that starts later gets the level for the rest of the time.
  Advance(absl::Minutes(4));
  EXPECT_EQ(nodes_["a"].last.log_level().id(), id);
  EXPECT_LE(nodes_["a"].last.log_level().for_().seconds(), 370);
  Advance(absl::Minutes(7));
  EXPECT_FALSE(nodes_["a"].last.has_log_level());
  EXPECT_FALSE(order(4, 0).has_error());
  const uint64_t next = nodes_["a"].last.log_level().id();
  EXPECT_NE(next, id);
  // Nothing changes the journal between the two orders.
  idle_ = true;
  EXPECT_FALSE(order(1, 0).has_error());
  const uint64_t third = nodes_["a"].last.log_level().id();
  EXPECT_NE(third, next);
  EXPECT_FALSE(order(2, 0).has_error());
  EXPECT_NE(nodes_["a"].last.log_level().id(), third);
  idle_ = false;
  EXPECT_FALSE(nodes_["a"].last.log_level().has_for_());
  EXPECT_EQ(order(0, 0).error().detail().field(), "log_level");
  EXPECT_EQ(order(5, 0).error().detail().field(), "log_level");
  EXPECT_EQ(order(1, 100'000).error().detail().field(), "for");
  nodes_["a"].talks = false;
  Advance(absl::Minutes(5));
  EXPECT_EQ(order(1, 0).error().code(), static_cast<int>(absl::StatusCode::kUnavailable));
}

// The order does not change the journal, so the next change has the revision that the order was
// given.
TEST_F(JobsCoreTest, LogLevelAndThenAJob_NodeThatHasTheOrderAloneIsAnsweredAtOnce) {
  AddNode("a");
  Pump();
  nodes_["a"].talks = false;
  v1::Op op;
  op.mutable_control_node()->set_node("a");
  op.mutable_control_node()->set_action(v1::NODE_ACTION_LOG_LEVEL);
  op.mutable_control_node()->set_log_level(1);
  EXPECT_FALSE(Call(op).has_error());
  ASSERT_TRUE(replies_.contains(syncs_["a"]));  // the reply to its held call
  nodes_["a"].last = replies_[syncs_["a"]].sync_node();
  EXPECT_TRUE(nodes_["a"].last.has_log_level());
  idle_ = true;
  Submit(Spec(1));
  SendSync("a");
  ASSERT_TRUE(replies_.contains(syncs_["a"]));
  EXPECT_EQ(replies_[syncs_["a"]].sync_node().assignments_size(), 1);
}

// A version from the previous term is not comparable with versions of this term.
TEST_F(JobsCoreTest, NewTerm_FirstCallOfANodeIsAnsweredWhateverVersionItHasSeen) {
  AddNode("a");
  const std::string job = Submit(Spec(1));
  nodes_["a"].talks = false;
  StartTerm();
  for (const int ahead : {-1, 0, 1, 2}) {
    nodes_["a"].last.set_version(revision_ + ahead);
    idle_ = true;
    SendSync("a");
    idle_ = false;
    EXPECT_TRUE(replies_.contains(syncs_["a"])) << ahead;
    StartTerm();
  }
}

}  // namespace
}  // namespace muster::coordinator
