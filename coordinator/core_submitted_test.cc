#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/mutate.h"
#include "coordinator/core.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

// Submitted jobs together with the groups of their attempts: what jobs/jobs_core.h decides is
// journaled, and closes groups.
class SubmittedTest : public ::testing::Test {
 protected:
  SubmittedTest() { Restart(); }

  // Restarts with a term that is `terms` later than before.
  void Restart(bool snapshot = false, uint64_t terms = 1, bool restored = false) {
    const std::string image = snapshot ? core_->Snapshot() : "";
    const uint64_t revision = snapshot ? core_->last_record_revision() : 0;
    CoreOptions options;
    options.cluster_id = "c1";
    core_ = std::make_unique<Core>(options);
    if (snapshot) {
      ASSERT_TRUE(core_->Restore(image).ok());
    }
    for (const Record& record : journal_) {
      if (record.revision > revision) {
        ASSERT_TRUE(core_->Replay(record.payload).ok());
      }
    }
    core_->StartTerm(core_->last_term() + terms, now_, &out_, restored);
    Collect();
  }
  void Collect() {
    for (Reply& reply : out_.replies) replies_[reply.call] = reply;
    for (Record& record : out_.records) journal_.push_back(std::move(record));
    deposed_ = deposed_ || out_.deposed;
    out_.Clear();
  }
  CallId Send(const v1::Op& op) {
    core_->Handle(++call_, op, {}, now_ += absl::Milliseconds(1), &out_);
    Collect();
    return call_;
  }
  v1::OpResult Call(const v1::Op& op) {
    const CallId call = Send(op);
    EXPECT_TRUE(replies_.contains(call));
    return replies_.contains(call) ? replies_[call].answer->Parse() : v1::OpResult();
  }

  std::string Submit(int max_restarts) {
    v1::Op op;
    v1::JobSpec* const spec = op.mutable_submit_job()->mutable_spec();
    spec->set_name("job");
    *spec->add_argv() = "./train";
    spec->set_max_processes(1);
    spec->set_max_restarts(max_restarts);
    return Call(op).submit_job().job().job_id();
  }
  v1::JobRecord Get(const std::string& job_id) {
    v1::Op op;
    op.mutable_get_job()->set_job_id(job_id);
    return Call(op).get_job().job();
  }
  v1::Op SyncOp(uint64_t seen = 0) {
    v1::Op op;
    op.mutable_sync_node()->set_node("n");
    op.mutable_sync_node()->set_node_uid(7);
    op.mutable_sync_node()->mutable_info()->set_cpus(4);
    op.mutable_sync_node()->set_seen_version(seen);
    return op;
  }
  v1::SyncNodeReply Report(const std::string& job_id, v1::PlacementState state,
                           v1::EndClass end_class = v1::END_CLASS_PROCESS_FAILED) {
    v1::Op op = SyncOp();
    v1::AttemptReport* const report = op.mutable_sync_node()->add_attempts();
    report->set_job_id(job_id);
    report->set_attempt(Get(job_id).attempts());
    report->set_state(state);
    if (state == v1::PLACEMENT_STATE_ENDED) {
      report->mutable_end()->set_end_class(end_class);
      report->mutable_end()->set_why("rank 0 exited with code 1");
    }
    return Call(op).sync_node();
  }

  // Joins as a worker of the group, which is seated at once.
  v1::OpResult Join(const std::string& group, uint64_t incarnation) {
    v1::Op op;
    v1::JoinRequest* const join = op.mutable_join();
    join->mutable_fence()->set_job_id(group);
    join->mutable_fence()->set_worker_id("w");
    join->mutable_fence()->set_incarnation(incarnation);
    join->mutable_spec()->set_min_workers(1);
    join->mutable_spec()->set_max_workers(1);
    join->set_preferred_rank(-1);
    return Call(op);
  }
  void FillFence(const std::string& group, const v1::OpResult& joined, uint64_t incarnation,
                 v1::Fence* fence) {
    fence->set_job_id(group);
    fence->set_worker_id("w");
    fence->set_incarnation(incarnation);
    fence->set_generation(joined.join().generation());
  }
  // Saves and publishes a checkpoint of this step.
  void SaveCheckpoint(const std::string& group, const v1::OpResult& joined, uint64_t incarnation,
                      int64_t step) {
    v1::Op begin;
    FillFence(group, joined, incarnation, begin.mutable_begin_checkpoint()->mutable_fence());
    begin.mutable_begin_checkpoint()->set_path(absl::StrCat("/c/checkpoints/checkpoint_", step));
    begin.mutable_begin_checkpoint()->set_staging(absl::StrCat("/c/checkpoints/", step, ".tmp"));
    begin.mutable_begin_checkpoint()->set_step(step);
    begin.mutable_begin_checkpoint()->set_ranks(1);
    const uint64_t id = Call(begin).begin_checkpoint().checkpoint_id();
    v1::Op report;
    FillFence(group, joined, incarnation, report.mutable_report_shards()->mutable_fence());
    report.mutable_report_shards()->set_checkpoint_id(id);
    report.mutable_report_shards()->set_last(true);
    Call(report);
    v1::Op seal;
    FillFence(group, joined, incarnation, seal.mutable_seal_checkpoint()->mutable_fence());
    seal.mutable_seal_checkpoint()->set_checkpoint_id(id);
    Call(seal);
    v1::Op publish;
    FillFence(group, joined, incarnation, publish.mutable_publish_checkpoint()->mutable_fence());
    publish.mutable_publish_checkpoint()->set_checkpoint_id(id);
    EXPECT_TRUE(Call(publish).has_publish_checkpoint());
  }
  int64_t StepToResume(const std::string& group) {
    v1::Op op;
    op.mutable_resolve_checkpoint()->mutable_fence()->set_job_id(group);
    return Call(op).resolve_checkpoint().checkpoint().step();
  }

  std::unique_ptr<Core> core_;
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
  Output out_;
  CallId call_ = 0;
  std::map<CallId, Reply> replies_;
  std::vector<Record> journal_;
  bool deposed_ = false;
};

TEST_F(SubmittedTest, Answer_WaitsForTheRecord_AlsoThatOfALaterReader) {
  const std::string job = Submit(0);
  const uint64_t record = journal_.back().revision;
  EXPECT_EQ(replies_[call_].durable_revision, record);
  Get(job);
  EXPECT_EQ(replies_[call_].durable_revision, record);
  EXPECT_EQ(replies_[call_].answer->Parse().get_job().header().cluster_id(), "c1");
}

TEST_F(SubmittedTest, GroupOfAnAttempt_IsClosedBeforeTheNextOne) {
  Call(SyncOp());
  const std::string job = Submit(1);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  ASSERT_TRUE(Join("job-1.1", 11).has_join());
  Report(job, v1::PLACEMENT_STATE_ENDED);
  EXPECT_EQ(Get(job).attempts(), 2);
  EXPECT_EQ(Join("job-1.1", 12).error().detail().reason(), v1::ERROR_REASON_RENDEZVOUS_CLOSED);
  EXPECT_TRUE(Join("job-1.2", 13).has_join());
  // The former group may have been forgotten.
  core_->RemoveJob("job-1.1", now_, &out_);
  Collect();
  EXPECT_EQ(Join("job-1.1", 14).error().message(),
            "job \"job-1.1\" has ended: attempt 1 of job job-1 is over");
  EXPECT_TRUE(Join("other.1", 15).has_join());
}

TEST_F(SubmittedTest, AgentsOfAnAttemptThatIsOver_CannotMeetAgain) {
  Call(SyncOp());
  const std::string job = Submit(1);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  ASSERT_TRUE(Join("job-1.1.agents", 11).has_join());
  Report(job, v1::PLACEMENT_STATE_ENDED);
  EXPECT_EQ(Join("job-1.1.agents", 12).error().detail().reason(),
            v1::ERROR_REASON_RENDEZVOUS_CLOSED);
  EXPECT_TRUE(Join("job-1.2.agents", 13).has_join());
  core_->RemoveJob("job-1.1.agents", now_, &out_);
  Collect();
  EXPECT_EQ(Join("job-1.1.agents", 14).error().message(),
            "job \"job-1.1.agents\" has ended: attempt 1 of job job-1 is over");
}

TEST_F(SubmittedTest, Identity_DecidesWhatACallMayDo) {
  Call(SyncOp());
  const Identity ann{.name = "ann", .role = Role::kSubmit},
      bob{.name = "bob", .role = Role::kSubmit},
      attempt{.role = Role::kAttempt, .group = "job-1.1"};
  const auto as = [&](const Identity& who, const v1::Op& op) {
    core_->Handle(++call_, op, {.identity = &who}, now_ += absl::Milliseconds(1), &out_);
    Collect();
    return replies_.at(call_).answer->Parse();
  };
  v1::Op submit;
  submit.mutable_submit_job()->mutable_spec()->set_name("job");
  submit.mutable_submit_job()->mutable_spec()->add_argv("./train");
  submit.mutable_submit_job()->mutable_spec()->set_max_processes(1);
  EXPECT_EQ(as(ann, submit).submit_job().job().owner(), "ann");
  EXPECT_EQ(core_->OwnerOf("job-1"), "ann");
  EXPECT_EQ(core_->OwnerOf("job-1.1"), "ann");
  EXPECT_EQ(core_->OwnerOf("job-2"), "");

  v1::Op join;
  join.mutable_join()->mutable_fence()->set_job_id("job-1.1");
  join.mutable_join()->mutable_fence()->set_worker_id("w");
  join.mutable_join()->mutable_fence()->set_incarnation(7);
  join.mutable_join()->mutable_spec()->set_min_workers(1);
  join.mutable_join()->mutable_spec()->set_max_workers(1);
  join.mutable_join()->set_preferred_rank(-1);
  EXPECT_EQ(as(ann, join).error().detail().reason(), v1::ERROR_REASON_SCOPE);
  EXPECT_TRUE(as(attempt, join).has_join());
  v1::Op trigger;
  trigger.mutable_raise_trigger()->mutable_fence()->set_job_id("job-1.1");
  trigger.mutable_raise_trigger()->set_name("stop");
  EXPECT_EQ(as(bob, trigger).error().detail().reason(), v1::ERROR_REASON_SCOPE);
  EXPECT_TRUE(as(ann, trigger).has_raise_trigger());

  v1::Op cancel;
  cancel.mutable_control_job()->set_job_id("job-1");
  cancel.mutable_control_job()->set_action(v1::JOB_ACTION_CANCEL);
  EXPECT_EQ(as(bob, cancel).error().detail().reason(), v1::ERROR_REASON_SCOPE);
  EXPECT_EQ(as(attempt, cancel).error().detail().reason(), v1::ERROR_REASON_SCOPE);
  // The id of a submitted job gives no right to a rendezvous job of that name.
  ASSERT_TRUE(Join("job-1", 99).has_join());
  v1::Op end;
  end.mutable_end_generation()->mutable_fence()->set_job_id("job-1");
  EXPECT_EQ(as(ann, end).error().detail().reason(), v1::ERROR_REASON_SCOPE);
  EXPECT_EQ(core_->stats().refused_calls, 5u);

  // Knowing what can be read of a member, or a job's own token, does not suffice to depose.
  v1::Op list;
  v1::Fence* const fence = list.mutable_list_checkpoints()->mutable_fence();
  fence->set_job_id("job-1.1");
  fence->set_worker_id("w");
  fence->set_incarnation(7);
  fence->set_term_seen(core_->last_term() + 1);
  fence->set_cluster(0xc1);
  for (const Identity* who : {&ann, &bob, &attempt}) {
    as(*who, list);
    EXPECT_FALSE(deposed_) << who->name;
  }
  v1::Hello hello;
  hello.set_cluster_id("c1");
  hello.set_term_seen(core_->last_term() + 1);
  core_->AttachAgent("n", hello, now_, &out_, attempt.group);
  Collect();
  EXPECT_FALSE(deposed_);

  // The token ends with its attempt, also when nothing is known of the attempt any longer.
  EXPECT_TRUE(as(ann, cancel).has_control_job());
  Report("job-1", v1::PLACEMENT_STATE_ENDED);
  join.mutable_join()->mutable_fence()->set_job_id("job-1.1.agents");
  EXPECT_EQ(as(attempt, join).error().detail().reason(), v1::ERROR_REASON_RENDEZVOUS_CLOSED);
  cancel.mutable_control_job()->set_action(v1::JOB_ACTION_REMOVE);
  EXPECT_TRUE(as(ann, cancel).has_control_job());
  core_->RemoveJob("job-1.1", now_, &out_);
  Collect();
  for (const char* group : {"job-1.1", "job-1.1.agents"}) {
    join.mutable_join()->mutable_fence()->set_job_id(group);
    EXPECT_EQ(as(attempt, join).error().detail().reason(), v1::ERROR_REASON_RENDEZVOUS_CLOSED);
  }
  EXPECT_TRUE(core_->CheckAttempt("job-1.1").has_value());
}

TEST_F(SubmittedTest, RepeatedRequest_OfAUser_GetsTheFirstAnswer) {
  const Identity ann{.name = "ann", .role = Role::kSubmit},
      root{.name = "root", .role = Role::kAdmin}, view{.name = "eve", .role = Role::kView};
  const auto as = [&](const Identity& who, const v1::Op& op) {
    core_->Handle(++call_, op, {.identity = &who}, now_ += absl::Milliseconds(1), &out_);
    Collect();
    return replies_.at(call_).answer->Parse();
  };
  v1::Op submit;
  submit.mutable_submit_job()->mutable_spec()->set_name("job");
  submit.mutable_submit_job()->mutable_spec()->add_argv("./train");
  submit.mutable_submit_job()->mutable_spec()->set_max_processes(1);
  as(ann, submit);
  Call(SyncOp());
  ASSERT_TRUE(Join("job-1.1", 7).has_join());
  v1::Op trigger;
  v1::Fence* const fence = trigger.mutable_raise_trigger()->mutable_fence();
  fence->set_job_id("job-1.1");
  fence->set_incarnation(77);
  fence->set_request_id(1);
  trigger.mutable_raise_trigger()->set_name("checkpoint");
  const uint64_t first = as(ann, trigger).raise_trigger().trigger_id();
  EXPECT_NE(first, 0u);
  EXPECT_EQ(as(ann, trigger).raise_trigger().trigger_id(), first);
  for (const bool snapshot : {false, true}) {
    Restart(snapshot);
    EXPECT_EQ(as(ann, trigger).raise_trigger().trigger_id(), first) << snapshot;
  }
  // A worker's name changes nothing: people are no workers.
  fence->set_worker_id("w");
  EXPECT_EQ(as(ann, trigger).raise_trigger().trigger_id(), first);
  fence->clear_worker_id();
  // A process of another user with the same number is another client.
  const uint64_t other = as(root, trigger).raise_trigger().trigger_id();
  EXPECT_NE(other, first);
  EXPECT_NE(other, 0u);
  EXPECT_EQ(as(view, trigger).error().detail().reason(), v1::ERROR_REASON_SCOPE);
}

TEST_F(SubmittedTest, Crash_BetweenTheEndOfAnAttemptAndItsGroups_IsMadeGood) {
  Call(SyncOp());
  const std::string job = Submit(0);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  ASSERT_TRUE(Join("job-1.1", 11).has_join());
  const size_t before = journal_.size();
  Report(job, v1::PLACEMENT_STATE_ENDED);
  ASSERT_EQ(journal_.size(), before + 2);
  journal_.pop_back();
  Restart();
  EXPECT_EQ(Get(job).state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Join("job-1.1", 12).error().detail().reason(), v1::ERROR_REASON_RENDEZVOUS_CLOSED);
}

TEST_F(SubmittedTest, NextAttempt_ResumesFromTheCheckpointsOfTheFormer) {
  Call(SyncOp());
  const std::string job = Submit(2);
  for (int attempt = 1; attempt <= 3; ++attempt) {
    const std::string group = absl::StrCat("job-1.", attempt);
    Report(job, v1::PLACEMENT_STATE_RUNNING);
    const v1::OpResult joined = Join(group, attempt * 10);
    EXPECT_EQ(StepToResume(group), attempt == 1 ? 0 : 100 * (attempt - 1));
    SaveCheckpoint(group, joined, attempt * 10, 100 * attempt);
    if (attempt == 2) Restart();
    if (attempt == 3) Restart(/*snapshot=*/true);
    EXPECT_EQ(StepToResume(group), 100 * attempt);
    if (attempt < 3) Report(job, v1::PLACEMENT_STATE_ENDED);
  }
}

// Thirty days lie between the copy and the restore: more numbers than that are left out.
TEST_F(SubmittedTest, AttemptAfterARestore_ResumesFromTheCheckpointsOfTheFormer) {
  Call(SyncOp());
  const std::string job = Submit(2);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  SaveCheckpoint("job-1.1", Join("job-1.1", 10), 10, 100);
  Restart(/*snapshot=*/false, /*terms=*/65536 + 30 * 24 * 60, /*restored=*/true);
  Call(SyncOp());
  core_->Tick(now_ += absl::Seconds(31), &out_);
  Collect();
  const int attempt = Get(job).attempts();
  EXPECT_GT(attempt, 100'000);
  const std::string group = absl::StrCat("job-1.", attempt);
  EXPECT_TRUE(Join(group, 20).has_join());
  EXPECT_EQ(StepToResume(group), 100);
}

// Only the first records of a start with a copy may be on the disk: the next start does not know
// that it begins with a copy, unless it has to start over.
TEST_F(SubmittedTest, Crash_InTheFirstStartWithACopy_GivesNoNumberAgain) {
  Call(SyncOp());
  const std::string job = Submit(2);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  Join("job-1.1", 10);
  const std::vector<Record> copy = journal_;
  constexpr uint64_t kTerms = 65536 + 30 * 24 * 60;
  Restart(/*snapshot=*/false, kTerms, /*restored=*/true);
  const std::vector<Record> started = journal_;
  const uint64_t restored_term = core_->last_term();
  ASSERT_GT(started.size(), copy.size());
  for (size_t kept = copy.size(); kept <= started.size(); ++kept) {
    journal_.assign(started.begin(), started.begin() + kept);
    CoreOptions options;
    options.cluster_id = "c1";
    core_ = std::make_unique<Core>(options);
    for (const Record& record : journal_) ASSERT_TRUE(core_->Replay(record.payload).ok());
    // The service does the same: its journal has the terms of the restore.
    core_->StartTerm(std::max(restored_term + 1, core_->last_term() + 1), now_, &out_,
                     /*restored=*/core_->restored_term() < restored_term);
    Collect();
    EXPECT_NE(Get(job).state(), v1::JOB_STATE_RUNNING) << kept - copy.size() << " records";
    const std::string next = Submit(0);
    int number = 0;
    ASSERT_TRUE(absl::SimpleAtoi(next.substr(4), &number)) << next;
    EXPECT_GT(number, 1000) << kept - copy.size() << " records";
    Call(SyncOp());
    core_->Tick(now_ += absl::Seconds(31), &out_);
    Collect();
    EXPECT_GT(Get(job).attempts(), 100'000) << kept - copy.size() << " records";
  }
}

TEST_F(SubmittedTest, DryRun_SaysFromWhichCheckpointTheJobWouldResume) {
  Call(SyncOp());
  v1::Op op;
  v1::SubmitJobRequest& dry = *op.mutable_submit_job();
  dry.set_dry_run(true);
  dry.mutable_spec()->set_name("job");
  dry.mutable_spec()->add_argv("./train");
  dry.mutable_spec()->set_max_processes(1);
  const auto plan = [&] { return Call(op).submit_job().plan().checkpoint(); };
  // A private folder has no checkpoint.
  EXPECT_EQ(plan().decided_by(), "program");
  EXPECT_FALSE(plan().has_record());
  EXPECT_EQ(plan().folder(), "");
  dry.mutable_spec()->set_working_directory("/w/");
  EXPECT_EQ(plan().folder(), "/w/muster-run/checkpoints");
  v1::NameValue* const variable = dry.mutable_spec()->add_env();
  variable->set_name("MUSTER_PROJECT_DIR");
  variable->set_value("/");
  EXPECT_EQ(plan().folder(), "/checkpoints");
  variable->set_value("/c");
  EXPECT_EQ(plan().folder(), "/c/checkpoints");
  EXPECT_FALSE(plan().has_record());
  for (const auto& [given, folder] : {std::pair{"./run/", "/w/run"},
                                      {"a//b", "/w/a/b"},
                                      {"../x", "/x"},
                                      {"/c/d/..", "/c"},
                                      {"/c/.", "/c"},
                                      {".", "/w"},
                                      {"..", ""}}) {
    variable->set_value(given);
    EXPECT_EQ(plan().folder(), absl::StrCat(folder, "/checkpoints")) << given;
  }
  variable->set_value("~/run");
  EXPECT_EQ(plan().folder(), "");
  EXPECT_EQ(plan().why(),
            "the checkpoints are in the home of the job's user, which only its nodes know");
  variable->set_value("/c");

  // Another job has checkpoints there.
  const std::string job = Submit(2);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  v1::OpResult joined = Join("job-1.1", 11);
  SaveCheckpoint("job-1.1", joined, 11, 100);
  SaveCheckpoint("job-1.1", joined, 11, 200);
  v1::PlannedCheckpoint found = plan();
  EXPECT_EQ(found.decided_by(), "program");
  EXPECT_EQ(found.record().path(), "/c/checkpoints/checkpoint_200");
  EXPECT_EQ(found.record().step(), 200);
  EXPECT_EQ(found.record().job_id(), "job-1.1");
  EXPECT_EQ(found.SerializeAsString(), plan().SerializeAsString());
  variable->set_value("../c/./deeper/..");
  EXPECT_EQ(found.SerializeAsString(), plan().SerializeAsString());
  variable->set_value("/c/deeper");
  EXPECT_FALSE(plan().has_record());
  EXPECT_EQ(plan().why(),
            "this job has no checkpoint here: rank 0 takes the newest one in the folder that is "
            "whole, and this coordinator knows none there");
  variable->set_value("/c");
  v1::Op hold;
  FillFence("job-1.1", joined, 11, hold.mutable_mark_checkpoint()->mutable_fence());
  hold.mutable_mark_checkpoint()->set_checkpoint_id(found.record().checkpoint_id());
  hold.mutable_mark_checkpoint()->set_mark(v1::MarkCheckpointRequest::HOLD_BACK);
  ASSERT_TRUE(Call(hold).has_mark_checkpoint());
  EXPECT_EQ(plan().record().step(), 100) << "no resume takes one that is held back";
}

TEST_F(SubmittedTest, DryRunOfAJobThatIsThere_HasItsOwnNewestCheckpoint) {
  Call(SyncOp());
  v1::Op op;
  v1::SubmitJobRequest& submit = *op.mutable_submit_job();
  submit.set_idempotency_key("k");
  submit.mutable_spec()->set_name("job");
  submit.mutable_spec()->add_argv("./train");
  submit.mutable_spec()->set_max_processes(1);
  submit.mutable_spec()->set_max_restarts(2);
  const std::string job = Call(op).submit_job().job().job_id();
  submit.set_dry_run(true);
  EXPECT_EQ(Call(op).submit_job().plan().checkpoint().decided_by(), "program");
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  SaveCheckpoint("job-1.1", Join("job-1.1", 11), 11, 100);
  // This also holds while the next attempt has not joined, and after a restart.
  Report(job, v1::PLACEMENT_STATE_ENDED);
  Restart();
  Call(SyncOp());
  const size_t records = journal_.size();
  const v1::SubmitJobReply reply = Call(op).submit_job();
  EXPECT_TRUE(reply.existed());
  EXPECT_EQ(reply.plan().checkpoint().decided_by(), "coordinator");
  EXPECT_EQ(reply.plan().checkpoint().record().path(), "/c/checkpoints/checkpoint_100");
  EXPECT_EQ(journal_.size(), records);
}

TEST_F(SubmittedTest, Group_SaysWhatStagesItsAttemptHasReached) {
  Call(SyncOp());
  const std::string job = Submit(1);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  const auto times = [&](int attempt) { return Get(job).history(attempt - 1).times(); };
  const auto ms = [&] { return absl::ToUnixMillis(now_); };
  const v1::OpResult joined = Join("job-1.1", 11);
  int64_t at = ms();
  EXPECT_EQ(times(1).sealed_unix_ms(), at);
  v1::Op beat;
  FillFence("job-1.1", joined, 11, beat.mutable_heartbeat()->mutable_fence());
  Call(beat);
  EXPECT_EQ(times(1).restored_unix_ms(), 0);
  now_ += absl::Seconds(4);
  beat.mutable_heartbeat()->mutable_restored_ago()->set_seconds(1);
  Call(beat);
  at = ms();
  EXPECT_EQ(times(1).restored_unix_ms(), at - 1000);
  EXPECT_EQ(times(1).stepped_unix_ms(), 0);
  // The step that an arrival at a barrier has is not when the first one was done.
  v1::Op arrival;
  v1::ArriveRequest& arrive = *arrival.mutable_arrive();
  FillFence("job-1.1", joined, 11, arrive.mutable_fence());
  arrive.set_barrier_id("b");
  arrive.set_step(5);
  Call(arrival);
  Call(beat);
  EXPECT_EQ(times(1).stepped_unix_ms(), 0);
  // The times come from its agent. A restarted coordinator, which reads the journal, hears them
  // again.
  const v1::AttemptTimes before = times(1);
  Restart();
  EXPECT_EQ(times(1).SerializeAsString(), before.SerializeAsString());
  v1::Beat beats;
  v1::WorkerBeat* const worker = beats.add_workers();
  worker->set_job_id("job-1.1");
  worker->set_worker_id("w");
  worker->set_incarnation(11);
  worker->set_step(7);
  worker->mutable_restored_ago()->set_seconds(3);
  worker->mutable_first_step_ago()->set_nanos(500'000'000);
  now_ += absl::Seconds(1);
  core_->HandleBeat("agent", beats, now_, &out_);
  Collect();
  at = ms();
  EXPECT_EQ(times(1).stepped_unix_ms(), at - 500);
  EXPECT_EQ(times(1).restored_unix_ms(), before.restored_unix_ms());
  const size_t records = journal_.size();
  core_->HandleBeat("agent", beats, now_, &out_);
  Collect();
  EXPECT_EQ(journal_.size(), records) << "what is known is not written again";

  v1::Op exit;
  FillFence("job-1.1", joined, 11, exit.mutable_report_exit()->mutable_fence());
  exit.mutable_report_exit()->set_worker_id("w");
  exit.mutable_report_exit()->set_incarnation(11);
  exit.mutable_report_exit()->mutable_cause()->set_signal(9);
  Call(exit);
  const int64_t detected = ms();
  EXPECT_EQ(times(1).detected_unix_ms(), detected);
  now_ += absl::Seconds(2);
  Report(job, v1::PLACEMENT_STATE_ENDED);
  EXPECT_EQ(times(1).detected_unix_ms(), detected);
  EXPECT_GE(times(1).decided_unix_ms(), detected + 2000);
  EXPECT_EQ(times(1).fenced_unix_ms(), times(1).decided_unix_ms());
  EXPECT_EQ(times(2).placed_unix_ms(), times(1).fenced_unix_ms());
}

TEST_F(SubmittedTest, LostWorker_HasFailedWhenItWasHeardLast) {
  Call(SyncOp());
  const std::string job = Submit(1);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  const v1::OpResult joined = Join("job-1.1", 11);
  now_ += absl::Seconds(1);
  v1::Op beat;
  FillFence("job-1.1", joined, 11, beat.mutable_heartbeat()->mutable_fence());
  Call(beat);
  const int64_t heard = absl::ToUnixMillis(now_);
  const absl::Time end = now_ + absl::Minutes(3);
  while (core_->NextDeadline() < end && Get(job).history(0).times().detected_unix_ms() == 0) {
    now_ = std::max(now_, core_->NextDeadline());
    // Its node is heard all the time.
    Report(job, v1::PLACEMENT_STATE_RUNNING);
    core_->Tick(now_, &out_);
    Collect();
    core_->CaughtUp(now_, now_, &out_);
    Collect();
  }
  const v1::AttemptTimes times = Get(job).history(0).times();
  EXPECT_EQ(times.failed_unix_ms(), heard);
  EXPECT_GT(times.detected_unix_ms(), heard + 1000);
  EXPECT_EQ(times.decided_unix_ms(), 0) << "its node says that it runs";
}

TEST_F(SubmittedTest, Replay_MakesTheSameState) {
  Call(SyncOp());
  const std::string job = Submit(1);
  Submit(0);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  Report(job, v1::PLACEMENT_STATE_ENDED);
  v1::Op cordon;
  cordon.mutable_control_node()->set_node("n");
  cordon.mutable_control_node()->set_action(v1::NODE_ACTION_CORDON);
  Call(cordon);
  CoreOptions options;
  options.cluster_id = "c1";
  Core replayed(options);
  for (const Record& record : journal_) ASSERT_TRUE(replayed.Replay(record.payload).ok());
  EXPECT_EQ(replayed.Snapshot(), core_->Snapshot());
  Restart(/*snapshot=*/true);
  v1::Op list;
  list.mutable_list_jobs();
  EXPECT_EQ(Call(list).list_jobs().jobs_size(), 2);
}

TEST_F(SubmittedTest, MutatedJournal_IsRefusedOrServed) {
  Call(SyncOp());
  const std::string job = Submit(2);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  Report(job, v1::PLACEMENT_STATE_ENDED);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  Submit(0);
  std::mt19937_64 random(5);
  int served = 0;
  for (int round = 0; round < 3000; ++round) {
    CoreOptions options;
    options.cluster_id = "c1";
    Core core(options);
    bool ok = true;
    for (const Record& record : journal_) {
      ok = ok &&
           core.Replay(random() % 4 == 0 ? Mutate(record.payload, random) : record.payload).ok();
    }
    if (!ok || core.last_term() > 1000) continue;
    ++served;
    Output out;
    core.StartTerm(core.last_term() + 1, now_, &out);
    core.Handle(1, SyncOp(), {}, now_, &out);
    v1::Op list;
    list.mutable_list_nodes();
    core.Handle(2, list, {}, now_, &out);
    core.Tick(now_ + absl::Minutes(5), &out);
    core.Snapshot();
  }
  EXPECT_GT(served, 30);
}

TEST_F(SubmittedTest, SilentNode_IsGivenUp_ByTicks) {
  Call(SyncOp());
  const std::string job = Submit(0);
  Report(job, v1::PLACEMENT_STATE_RUNNING);
  const absl::Time end = now_ + absl::Minutes(3);
  while (core_->NextDeadline() < end) {
    now_ = std::max(now_, core_->NextDeadline());
    core_->Tick(now_, &out_);
    Collect();
  }
  EXPECT_EQ(Get(job).history(0).end().end_class(), v1::END_CLASS_NODE_LOST);
}

}  // namespace
}  // namespace muster::coordinator
