#ifndef MUSTER_COORDINATOR_JOBS_JOBS_CORE_H_
#define MUSTER_COORDINATOR_JOBS_JOBS_CORE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/access.h"
#include "coordinator/answer.h"
#include "coordinator/jobs/attempt_outcome.h"
#include "coordinator/jobs/attempt_times.h"
#include "coordinator/jobs/job_changes.h"
#include "coordinator/jobs/placement.h"
#include "coordinator/jobs/record_history.h"
#include "coordinator/jobs/schedule.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/journal.pb.h"
#include "proto/muster/v1/node.pb.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// Deliberate faults, so that the simulation can prove that it would notice them.
struct JobsMutants {
  bool starts_before_former_ended = false;  // two attempts of a job at once
  bool places_half_a_gang = false;
  bool retries_user_errors = false;
  bool believes_ages = false;      // that a worker or node gives: stages out of order
  bool gives_spares_away = false;  // to any job: their room is promised twice
  bool restarts_hangs_for_free = false;
  bool restarts_in_place_for_free = false;
  bool forgets_class_limits = false;
  // A failure for which the attempt was restarted within, and then by the end of its runner.
  bool counts_failures_twice = false;
  // That an attempt has failed, once a runner says that it was stopped for it.
  bool forgets_echoes = false;
};

struct JobsOptions {
  // A node that is silent for so long is lost, if other nodes are heard.
  absl::Duration node_lease = absl::Seconds(30);
  // And if none is: perhaps only the coordinator's network has failed. When the first one is heard
  // again, the others have another lease to come back too.
  absl::Duration outage_tolerance = absl::Seconds(90);
  // Kept in all; beyond that those go that have ended first.
  size_t max_jobs = 10'000;
  // Of the records of all jobs, likewise: beyond it a submission makes room or is refused.
  size_t max_bytes = 512 << 20;
  // A node that has nothing to run and is not heard for so long is forgotten.
  absl::Duration node_retention = absl::Hours(24);
  // And one that is cordoned: it may be under repair, and would come back as any other.
  absl::Duration cordoned_retention = absl::Hours(24 * 30);
  // Of one owner: jobs that have not ended, and processes that run at a time. 0: any number.
  int max_jobs_of_owner = 0;
  int max_processes_of_owner = 0;
  // Makes the token of an attempt, always the same for the same rendezvous job. Null: attempts have
  // none, and use that of their node.
  std::function<std::string(absl::string_view group)> attempt_token = nullptr;
  JobsMutants mutants = {};
};

// What follows from an event.
struct JobsOutput {
  std::vector<std::pair<CallId, v1::OpResult>> replies;  // without headers
  std::vector<v1::JournalChange> changes;                // of this event, in this order
  // Rendezvous jobs that no worker may join any more, and why.
  std::vector<std::pair<std::string, std::string>> closed_groups;
  // (warning, job_id, text) for the log.
  struct Notice {
    bool warning;
    std::string job_id;
    std::string text;
  };
  std::vector<Notice> notices;
};

// Submitted jobs, the nodes that wait for them, and which runs where (proto/muster/v1/job.proto and
// node.proto have the rules). Not thread-safe; pure.
//
// A job holds space on a node from the record of its placement on until the node says that nothing
// of it is left there, or the node is lost; an attempt is over when that is so on all its nodes,
// and only then another one is placed.
//
// Durable are JobRecords, and what operators said of nodes. What nodes have and when they were
// heard is not: after a restart of the coordinator nodes say it again.
class JobsCore {
 public:
  static constexpr size_t kMaxKey = 128;
  static constexpr int kKeptAttempts = 8;
  static constexpr size_t kMaxNodes = 100'000;

  explicit JobsCore(JobsOptions options) : options_(options) {}
  JobsCore(const JobsCore&) = delete;
  JobsCore& operator=(const JobsCore&) = delete;

  // One event: its time, and the revision that its changes have.
  struct Event {
    absl::Time now;
    uint64_t revision = 0;
    absl::string_view cluster_id = {};
    // The user whose operation it is; null: a caller without a name.
    const Identity* caller = nullptr;
  };

  // Whether the operation is one of jobs or nodes.
  static bool Takes(v1::Op::KindCase kind);
  // The reply comes in this output or in that of a later event.
  void Handle(CallId call, const v1::Op& op, const Event& event, JobsOutput* out);
  // The caller of a held call is gone. False: no call of this core.
  bool Abandon(CallId call);
  void Tick(const Event& event, JobsOutput* out);
  absl::Time NextDeadline() const;

  // What became of a rendezvous job; nothing if it is not that of a current attempt, or of its
  // agents.
  struct GroupNews {
    std::string group;
    // kSealed; kRestored and kStepped, of rank 0; kDetected: a worker has failed or was lost.
    AttemptStage stage;
    // Of kDetected: when the worker was heard last; InfinitePast: not known.
    absl::Time at;
  };
  void Hear(const GroupNews& news, const Event& event, JobsOutput* out);

  // Why no job can be submitted, one line; empty: one can.
  void SetNoRoom(std::string why) { no_room_ = std::move(why); }

  // Before serving, and after all Restores. `lost_terms`: by how many terms this one is later than
  // the last one recorded if changes after these are lost, so that attempts may run that are not
  // recorded; 0: none are.
  void StartTerm(const Event& event, uint64_t lost_terms, JobsOutput* out);
  // Errors: DATA_LOSS for a change that no core has written.
  absl::Status Restore(const v1::JobRecordChanged& change);
  void Restore(const v1::NodeChanged& change);
  // Calls f(v1::JournalChange) for all that Restore needs.
  void ForEachChange(const std::function<void(const v1::JournalChange&)>& f) const;

  // How far a watcher has read.
  struct WatchPlace {
    uint64_t seen = 0;           // all changes up to this revision
    uint64_t removals_seen = 0;  // and removals
    // The last change read, as (revision, sequence of the job): an event can change more jobs than
    // a message takes, and `seen` passes its revision only with the last of them.
    std::pair<uint64_t, uint64_t> last = {0, 0};
  };
  // The next message of a watch, of about `max_bytes` at most, with what has changed after `*place`
  // and is durable; moves `*place`. It may be empty. `who`: as in Event. Errors: NOT_FOUND.
  std::optional<v1::OpError> ReadChanges(const v1::WatchJobsRequest& request, const Identity* who,
                                         uint64_t durable_revision, size_t max_bytes,
                                         WatchPlace* place, v1::WatchJobsBatch* batch) const;

  size_t jobs() const { return jobs_.size(); }
  size_t nodes() const { return nodes_.size(); }
  // Null: there is none.
  const v1::JobRecord* Find(absl::string_view job_id) const;
  // The job and the attempt that this rendezvous job is; nullopt: of none.
  std::optional<std::pair<std::string, int>> AttemptOf(absl::string_view group) const;
  static std::string GroupOf(absl::string_view job_id, int attempt);

 private:
  struct Job {
    v1::JobRecord record;
    absl::Time not_before = absl::InfinitePast();
    absl::Time ends_by = absl::InfiniteFuture();    // of the current attempt, by its time limit
    absl::Time forget_at = absl::InfiniteFuture();  // of one that has ended
    int node_failures = 0;                          // in a row
    struct Avoidance {
      absl::Time until = absl::InfinitePast();
      int times = 0;  // that the node could not start it
    };
    // Of record.avoided_nodes, and of nodes that it has avoided before.
    absl::btree_map<std::string, Avoidance> avoided;
    // Nodes that could not start the current attempt, beside that of its end.
    std::vector<std::string> could_not_start;
    bool given_up_early = false;  // a living node has ended the current attempt soon, by itself
    absl::Time runs_since = absl::InfinitePast();  // the current attempt, or the term
    size_t bytes = 0;                              // of the record, as bytes_ counts it
    // By node rank, of the current attempt: why it asks for its next restart in place. Nodes repeat
    // it.
    absl::btree_map<int, v1::AttemptEnd> asked;
    HistoryKey in_journal;  // the last entry of the history that the journal has
    // By the last schedule, in words. Not in the record: the next coordinator finds it again.
    std::string waits_for;
  };
  struct Node {
    v1::NodeInfo info;
    uint64_t uid = 0;
    bool known = false;  // heard since the start of the term
    bool lost = false;
    bool cordoned = false, draining = false;
    std::string why;
    absl::Time heard = absl::InfinitePast();
    absl::Time called = absl::InfinitePast();   // last, in this term
    absl::Time timer = absl::InfiniteFuture();  // in node_timers_
    uint64_t version = 0;
    std::optional<CallId> held;
    absl::Time held_until = absl::InfiniteFuture();
    std::vector<v1::LogQuery> queries;
    std::vector<std::string> held_jobs;  // whose checkpoints it holds, as its last call says
    std::optional<v1::LogLevelOrder> log_level;
    absl::Time log_level_until = absl::InfiniteFuture();
    absl::btree_set<uint64_t> jobs;  // by sequence: with a placement that has not ended
    // The first attempt that is not assigned of which it has processes, as GroupOf; empty: of none.
    // Nothing new starts before they are gone.
    std::string leftover;
    uint64_t sequence = 0;  // of its last call
    bool hung_up = false;   // its last call was abandoned
  };
  struct HeldGet {
    std::string job_id;
    absl::Time until;
    bool with_env = true;
  };
  struct OpenQuery {
    CallId call;
    std::string node;
    int attempt;
    absl::Time until;
  };
  using Error = std::optional<v1::OpError>;

  // The operations. Those with an Error answer the call unless they return one.
  Error Submit(CallId call, const v1::SubmitJobRequest& request);
  // Answers a request with the key of `job`, whose own request had the hash of the new one or not.
  Error Resubmit(CallId call, const Job& job, uint64_t hash, bool dry_run);
  // An error if all nodes together are too few for it.
  Error CheckSize(const v1::JobSpec& spec) const;
  Error Get(CallId call, const v1::GetJobRequest& request);
  Error List(CallId call, const v1::ListJobsRequest& request);
  Error Control(CallId call, const v1::ControlJobRequest& request);
  Error ReadLog(CallId call, const v1::ReadJobLogRequest& request);
  Error Sync(CallId call, const v1::SyncNodeRequest& request);
  Error AnswerLog(CallId call, const v1::AnswerLogRequest& request);
  Error ControlNode(CallId call, const v1::ControlNodeRequest& request);
  // Nothing durable: another coordinator knows nothing of it.
  Error OrderLogLevel(CallId call, const v1::ControlNodeRequest& request, Node* node);
  Error ListNodes(CallId call, const v1::ListNodesRequest& request);

  void Begin(const Event& event, JobsOutput* out);
  // Schedules if something has changed, makes the records, and answers what waits for them.
  void End();

  Job* FindJob(absl::string_view job_id);
  static v1::OpError UnknownJob(absl::string_view job_id);
  static bool IsActive(v1::JobState state);
  static bool HasEnded(v1::JobState state);
  static v1::JobAttempt* Current(Job* job);

  Error Act(Job* job, v1::JobAction action, int after_attempt, const std::string& why);
  Error Retry(Job* job, int after_attempt, const std::string& why);
  Error Resize(Job* job, const v1::ControlJobRequest& request, const std::string& why);
  Error Remove(Job* job);
  // From when on the running attempt may be stopped to start again with more processes; infinite:
  // never.
  absl::Time GrowsFrom(const Job& job) const;
  void NoteGrowth(const Job& job);
  // Whether the job has spares, or has to get some, as the schedule needs to know.
  void NoteSpares(const Job& job);
  void DropSpares(Job* job);
  // Those that are on a node which cannot run them any more; with `gpus`, only those with a GPU of
  // this number or a larger one.
  void DropSparesOn(const std::string& node, std::optional<int> gpus = std::nullopt);
  void SetState(Job* job, v1::JobState state, std::string why);
  // By its retention, if it has ended.
  void NoteRetention(Job* job);
  void Touch(const Job& job) { touched_jobs_.insert(job.record.sequence()); }
  // Only this placement of the current attempt has changed.
  void TouchPlacement(const Job& job, const v1::Placement& placement) {
    touched_placements_.insert({job.record.sequence(), placement.node_rank()});
  }
  absl::Status RestorePlacement(const v1::JobRecordChanged& change);
  void JournalPlacements();
  // Those that wait for another revision of the job.
  void AnswerGets(const Job& job);
  void TouchNode(const std::string& node) { touched_nodes_.insert(node); }
  // All nodes of the attempt are to end it. The first reason stays.
  void Stop(Job* job, v1::EndClass end_class, const std::string& why);
  // The next attempts do not start on the node, as long as they can do without it; after a time
  // that grows with each failure of the node it is tried again.
  void Avoid(Job* job, const std::string& node);
  // From now on for the time that follows from the failures.
  void AvoidForAWhile(Job* job, const std::string& node);
  // The time of one of them is over.
  void TryAgain(Job* job, const std::string& node);
  // All may be tried again.
  void ForgetAvoided(Job* job);
  // `failed`: when what ended it happened; InfinitePast: not known.
  void EndPlacement(Job* job, v1::Placement* placement, const v1::AttemptEnd& end,
                    absl::Time failed = absl::InfinitePast());
  // A node asks to start again, within the attempt, what that has lost. `report` may be a repeat.
  void OnAsked(Job* job, const v1::Placement& placement, const v1::AttemptReport& report);
  // The current attempt goes on after its end: what comes now is another entry of the history.
  void RestartInPlace(Job* job, const v1::AttemptReport& report);
  // The current attempt has reached a stage.
  void Reach(Job* job, AttemptStage stage, absl::Time at);
  void Reach(Job* job, AttemptStage stage) { Reach(job, stage, now_); }
  // Nothing of the current attempt is left.
  void Finish(Job* job);
  bool MakeRoomForOne();
  // Counts what the record has now.
  void Measure(Job* job);
  // Whether the owner may have a job of this size, and one more job.
  Error CheckProcesses(const std::string& owner, const v1::JobSpec& spec) const;
  Error CheckLimits(const std::string& owner, const v1::JobSpec& spec) const;
  // Variables may be secrets: those of a job are shown to its owner and to admins.
  static bool SeesEnv(const Identity* who, const v1::JobRecord& record);
  void Forget(uint64_t sequence);

  Error CheckSync(const v1::SyncNodeRequest& request) const;
  void OnReport(const std::string& name, Node* node, const v1::AttemptReport& report);
  // As Node::leftover.
  std::string LeftoverOf(const std::string& name, const v1::SyncNodeRequest& request) const;
  // What it does not report any more.
  void OnMissing(const std::string& name, Node* node, const v1::SyncNodeRequest& request);
  void LoseNode(const std::string& name, Node* node, const std::string& why);
  void AnswerSync(const std::string& name, Node* node);
  void SetNodeTimer(const std::string& name, Node* node);
  absl::Duration RetentionOf(const Node& node) const {
    return node.cordoned ? std::max(options_.cordoned_retention, options_.node_retention)
                         : options_.node_retention;
  }
  void TickNode(const std::string& name);

  // With `free`: without what is taken.
  CandidateNodes Candidates(bool free, bool cordoned_too = false) const;
  ScheduleQuestion Question() const;
  // Nodes may have more to give than before: what was too large for all of them may fit.
  void NodesHaveMore();
  // Within kScheduleSoon, with whatever else comes until then.
  void ScheduleSoon();
  void RunSchedule();
  void Start(Job* job, PlacementDecision placement);
  // If it cannot run without the nodes that it avoids: they are tried again.
  bool StopAvoiding(Job* job);
  // What the schedule would do with a job that is submitted now, as the last of its priority.
  v1::JobPlan PlanOf(const std::string& owner, const v1::JobSpec& spec) const;
  // What it has done with one that is submitted.
  v1::JobPlan PlanOf(const Job& job) const;
  // Of a job that waits for `why`: where it would run if nothing else did.
  v1::JobPlan PlanOfOneThatWaits(const v1::JobRecord& record, const std::string& why) const;
  // Where a part of the attempt in `plan->placements()` listens.
  void PlanPorts(v1::JobPlan* plan) const;
  bool Settled() const { return now_ - started_ >= options_.node_lease; }

  void Reply(CallId call, v1::OpResult result) {
    out_->replies.emplace_back(call, std::move(result));
  }
  void ReplyError(CallId call, v1::OpError error);
  void ReplyJob(CallId call, const Job& job, bool with_env);
  // As callers see it: with what it waits for.
  static v1::JobRecord View(const Job& job);
  // What differs in `view`, beside what it leaves out.
  static void SetWords(const Job& job, v1::JobRecord* view);
  // As List has it: of the history the last attempt, no variables, no stacks.
  static v1::JobRecord Listed(const Job& job);
  void SetRevision(Job* job, uint64_t revision);

  const JobsOptions options_;
  absl::btree_map<uint64_t, Job> jobs_;  // by sequence
  absl::flat_hash_map<std::string, uint64_t> by_id_;
  // By owner and idempotency key: no user can take another's.
  using Key = std::pair<std::string, std::string>;
  static Key KeyOf(const v1::JobRecord& record) {
    return {record.owner(), record.idempotency_key()};
  }
  absl::flat_hash_map<Key, uint64_t> by_key_;
  JobChanges changes_;
  absl::btree_set<uint64_t> queued_, active_;
  // When, and which: the first that makes room for others has ended first.
  absl::btree_set<std::pair<int64_t, uint64_t>> ended_;
  static std::pair<int64_t, uint64_t> EndOf(const v1::JobRecord& record) {
    return {record.ended_unix_ms(), record.sequence()};
  }
  absl::btree_set<uint64_t> may_grow_;  // of the active ones
  absl::btree_set<uint64_t> spared_;    // that have spares
  absl::btree_set<uint64_t> unspared_;  // of the active ones, that lack some
  uint64_t last_sequence_ = 0;
  absl::btree_map<std::string, Node> nodes_;

  absl::btree_set<std::pair<absl::Time, std::string>> node_timers_;
  absl::btree_set<std::pair<absl::Time, uint64_t>> limits_;    // ends_by of jobs
  absl::btree_set<std::pair<absl::Time, uint64_t>> retained_;  // forget_at of jobs
  // Of nodes that jobs avoid: until when, the job and the node.
  absl::btree_set<std::tuple<absl::Time, uint64_t, std::string>> avoided_;
  absl::btree_map<CallId, HeldGet> gets_;
  absl::flat_hash_map<std::string, absl::btree_set<CallId>> gets_of_;  // by job_id
  absl::btree_map<uint64_t, OpenQuery> queries_;
  absl::btree_set<std::pair<absl::Time, CallId>> call_timers_;  // of gets
  absl::btree_set<std::pair<absl::Time, uint64_t>> query_timers_;
  absl::flat_hash_map<CallId, std::string> syncs_;  // held: the node
  absl::flat_hash_map<CallId, uint64_t> reads_;     // held: the query
  uint64_t next_query_ = 1;
  absl::Time started_ = absl::InfinitePast();  // of the term
  absl::Time heard_any_ = absl::InfinitePast();
  // When the first node was heard again after a time in which none was: the others come back later.
  absl::Time returned_at_ = absl::InfinitePast();
  absl::Time schedule_at_ = absl::InfiniteFuture();
  absl::flat_hash_map<std::string, std::string> too_large_;  // see ScheduleQuestion
  bool resumes_ = false;   // the term began with jobs that have not ended
  bool restored_ = false;  // and with a copy: later attempts of them may be running
  bool dirty_ = false;     // room or jobs have changed since the last schedule

  // This event.
  absl::Time now_ = absl::InfinitePast();
  uint64_t revision_ = 0;
  uint64_t last_order_ = 0;  // id of the last LogLevelOrder
  std::string cluster_id_;
  const Identity* caller_ = nullptr;  // of this event
  size_t bytes_ = 0;                  // of all records
  JobsOutput* out_ = nullptr;
  absl::btree_set<uint64_t> touched_jobs_;
  absl::btree_set<std::pair<uint64_t, int>> touched_placements_;
  absl::btree_set<std::string> touched_nodes_;
  std::vector<std::function<void()>> at_end_;
  std::string no_room_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_JOBS_CORE_H_
