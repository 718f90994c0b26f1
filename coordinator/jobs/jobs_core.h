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
  bool believes_ages = false;      // ages that a worker or node reports: stages get out of order
  bool gives_spares_away = false;  // to any job: their room is promised twice
  bool restarts_hangs_for_free = false;
  bool restarts_in_place_for_free = false;
  bool forgets_class_limits = false;
  // Counts a failure for a restart within the attempt, and again for the end of the runner.
  bool counts_failures_twice = false;
  // Forgets that an attempt has failed once a runner reports that it was stopped because of it.
  bool forgets_echoes = false;
};

struct JobsOptions {
  // A node that is silent for this long is lost if other nodes are heard.
  absl::Duration node_lease = absl::Seconds(30);
  // How long a node may be silent if no node is heard: perhaps only the coordinator's network has
  // failed. When the first node is heard again, the others have one more lease to come back too.
  absl::Duration outage_tolerance = absl::Seconds(90);
  // The most jobs kept; beyond that, those that ended first are removed.
  size_t max_jobs = 10'000;
  // The most bytes of all jobs' records; beyond that, a submission makes room or is refused.
  size_t max_bytes = 512 << 20;
  // A node that has nothing to run and is not heard for this long is forgotten.
  absl::Duration node_retention = absl::Hours(24);
  // The same for a cordoned node: it may be under repair, and would return without its cordon.
  absl::Duration cordoned_retention = absl::Hours(24 * 30);
  // The most jobs of one owner that have not ended, and the most of its processes that run at a
  // time. 0: any number.
  int max_jobs_of_owner = 0;
  int max_processes_of_owner = 0;
  // Makes the token of an attempt, always the same for the same rendezvous job. Null: attempts have
  // none, and use that of their node.
  std::function<std::string(absl::string_view group)> attempt_token = nullptr;
  JobsMutants mutants = {};
};

// The results of an event.
struct JobsOutput {
  std::vector<std::pair<CallId, v1::OpResult>> replies;  // without headers
  std::vector<v1::JournalChange> changes;                // of this event, in order
  // Rendezvous jobs that no worker may join any more, and why.
  std::vector<std::pair<std::string, std::string>> closed_groups;
  // A line for the log.
  struct Notice {
    bool warning;
    std::string job_id;
    std::string text;
  };
  std::vector<Notice> notices;
};

// The submitted jobs, the nodes that wait for them, and which job runs where
// (proto/muster/v1/job.proto and node.proto have the rules). Not thread-safe; pure.
//
// A job holds space on a node from the record of its placement until the node reports that nothing
// of it is left there, or the node is lost. An attempt is over when that holds on all its nodes,
// and only then is another one placed.
//
// JobRecords and what operators have set for nodes are durable. What nodes have and when they were
// heard is not: after a restart of the coordinator, nodes report it again.
class JobsCore {
 public:
  static constexpr size_t kMaxKey = 128;
  static constexpr int kKeptAttempts = 8;
  static constexpr size_t kMaxNodes = 100'000;

  explicit JobsCore(JobsOptions options) : options_(options) {}
  JobsCore(const JobsCore&) = delete;
  JobsCore& operator=(const JobsCore&) = delete;

  // An event: its time, and the revision of its changes.
  struct Event {
    absl::Time now;
    uint64_t revision = 0;
    absl::string_view cluster_id = {};
    // The user who requested the operation; null: a caller without a name.
    const Identity* caller = nullptr;
  };

  // Returns whether the operation concerns jobs or nodes.
  static bool Takes(v1::Op::KindCase kind);
  // Handles an operation. The reply is in this output or in that of a later event.
  void Handle(CallId call, const v1::Op& op, const Event& event, JobsOutput* out);
  // Forgets a held call whose caller is gone. Returns false if no call of this core has this id.
  bool Abandon(CallId call);
  void Tick(const Event& event, JobsOutput* out);
  absl::Time NextDeadline() const;

  // News of a rendezvous job. Ignored unless it is the one of a current attempt or of its agents.
  struct GroupNews {
    std::string group;
    // kSealed; kRestored and kStepped, reported by rank 0; kDetected: a worker has failed or was
    // lost.
    AttemptStage stage;
    // kDetected: when the worker was last heard; InfinitePast: unknown.
    absl::Time at;
  };
  void Hear(const GroupNews& news, const Event& event, JobsOutput* out);

  // Sets why no job can be submitted, as one line; empty: jobs can be submitted.
  void SetNoRoom(std::string why) { no_room_ = std::move(why); }

  // Called before serving and after all Restores. `lost_terms`: if changes after the last recorded
  // one may be lost, so that attempts may run that are not recorded: by how many terms this term is
  // later than the last recorded one; 0: none are lost.
  void StartTerm(const Event& event, uint64_t lost_terms, JobsOutput* out);
  // Applies a change from the journal. Errors: DATA_LOSS if no core can have written it.
  absl::Status Restore(const v1::JobRecordChanged& change);
  void Restore(const v1::NodeChanged& change);
  // Calls f(v1::JournalChange) for each change that Restore needs.
  void ForEachChange(const std::function<void(const v1::JournalChange&)>& f) const;

  // How far a watcher has read the changes.
  struct WatchPlace {
    uint64_t seen = 0;           // all changes up to this revision
    uint64_t removals_seen = 0;  // and removals
    // The last change read, as (revision, sequence of the job): an event can change more jobs than
    // a message takes, and `seen` passes its revision only with the last of them.
    std::pair<uint64_t, uint64_t> last = {0, 0};
  };
  // Fills `batch` with the next message of a watch, of about `max_bytes` at most: what has changed
  // after `*place` and is durable. Moves `*place`. The message may be empty. `who`: see
  // Event::caller. Errors: NOT_FOUND.
  std::optional<v1::OpError> ReadChanges(const v1::WatchJobsRequest& request, const Identity* who,
                                         uint64_t durable_revision, size_t max_bytes,
                                         WatchPlace* place, v1::WatchJobsBatch* batch) const;

  size_t jobs() const { return jobs_.size(); }
  size_t nodes() const { return nodes_.size(); }
  // Returns null if there is no such job.
  const v1::JobRecord* Find(absl::string_view job_id) const;
  // Returns the job and the attempt whose rendezvous job this is; nullopt if there is none.
  std::optional<std::pair<std::string, int>> AttemptOf(absl::string_view group) const;
  static std::string GroupOf(absl::string_view job_id, int attempt);

 private:
  struct Job {
    v1::JobRecord record;
    absl::Time not_before = absl::InfinitePast();
    // When the time limit of the current attempt is reached.
    absl::Time ends_by = absl::InfiniteFuture();
    absl::Time forget_at = absl::InfiniteFuture();  // once the job has ended
    int node_failures = 0;                          // in a row
    struct Avoidance {
      absl::Time until = absl::InfinitePast();
      int times = 0;  // how often the node could not start the job
    };
    // The nodes of record.avoided_nodes, and those that the job has avoided before.
    absl::btree_map<std::string, Avoidance> avoided;
    // The nodes that could not start the current attempt, besides that of its end.
    std::vector<std::string> could_not_start;
    bool given_up_early = false;                   // of the current attempt, see ReportedEnd
    absl::Time runs_since = absl::InfinitePast();  // start of the current attempt, or of the term
    size_t bytes = 0;                              // the size of the record, as counted in bytes_
    // By node rank of the current attempt: why the node asks for the next restart in place. Nodes
    // repeat the request.
    absl::btree_map<int, v1::AttemptEnd> asked;
    HistoryKey in_journal;  // the last entry of the history that the journal has
    // What the job waits for according to the last schedule, in words. Not in the record: the next
    // coordinator determines it again.
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
    absl::Time called = absl::InfinitePast();   // its last call in this term
    absl::Time timer = absl::InfiniteFuture();  // in node_timers_
    uint64_t version = 0;
    std::optional<CallId> held;
    absl::Time held_until = absl::InfiniteFuture();
    std::vector<v1::LogQuery> queries;
    std::vector<std::string> held_jobs;  // the jobs whose checkpoints it holds, by its last call
    std::optional<v1::LogLevelOrder> log_level;
    absl::Time log_level_until = absl::InfiniteFuture();
    absl::btree_set<uint64_t> jobs;  // by sequence: those with a placement that has not ended
    // The first attempt that is not assigned to the node but has processes there, as GroupOf names
    // it; empty: none. Nothing new starts before they are gone.
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

  // Operations. A function that returns an Error answers the call unless it returns one.
  Error Submit(CallId call, const v1::SubmitJobRequest& request);
  // Answers a request that has the key of `job`. `hash`: that of the new request, which must equal
  // that of the job's own request.
  Error Resubmit(CallId call, const Job& job, uint64_t hash, bool dry_run);
  // Returns an error if the job does not fit on all nodes together.
  Error CheckSize(const v1::JobSpec& spec) const;
  Error Get(CallId call, const v1::GetJobRequest& request);
  Error List(CallId call, const v1::ListJobsRequest& request);
  Error Control(CallId call, const v1::ControlJobRequest& request);
  Error ReadLog(CallId call, const v1::ReadJobLogRequest& request);
  Error Sync(CallId call, const v1::SyncNodeRequest& request);
  Error AnswerLog(CallId call, const v1::AnswerLogRequest& request);
  Error ControlNode(CallId call, const v1::ControlNodeRequest& request);
  // Nothing of it is durable: another coordinator does not know the order.
  Error OrderLogLevel(CallId call, const v1::ControlNodeRequest& request, Node* node);
  Error ListNodes(CallId call, const v1::ListNodesRequest& request);

  void Begin(const Event& event, JobsOutput* out);
  // Schedules if something has changed, creates the journal's records, and answers the calls that
  // wait for them.
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
  // Returns the earliest time at which the running attempt may be stopped to start again with more
  // processes; infinite: never.
  absl::Time GrowsFrom(const Job& job) const;
  void NoteGrowth(const Job& job);
  // Records whether the job has spares, or lacks some, for the schedule.
  void NoteSpares(const Job& job);
  void DropSpares(Job* job);
  // Drops the spares on a node that can no longer run them; with `gpus`, only those with a GPU of
  // this number or a larger one.
  void DropSparesOn(const std::string& node, std::optional<int> gpus = std::nullopt);
  void SetState(Job* job, v1::JobState state, std::string why);
  // Schedules the job's removal after its retention, if it has ended.
  void NoteRetention(Job* job);
  void Touch(const Job& job) { touched_jobs_.insert(job.record.sequence()); }
  // Records that only this placement of the current attempt has changed.
  void TouchPlacement(const Job& job, const v1::Placement& placement) {
    touched_placements_.insert({job.record.sequence(), placement.node_rank()});
  }
  absl::Status RestorePlacement(const v1::JobRecordChanged& change);
  void JournalPlacements();
  // Answers the calls that wait for another revision of the job.
  void AnswerGets(const Job& job);
  void TouchNode(const std::string& node) { touched_nodes_.insert(node); }
  // Orders all nodes of the attempt to end it. The first reason stays.
  void Stop(Job* job, v1::EndClass end_class, const std::string& why);
  // Keeps the next attempts off the node as long as they can do without it. The node is tried again
  // after a time that grows with each of its failures.
  void Avoid(Job* job, const std::string& node);
  // Starts the time for which the node is avoided; its length follows from the failures.
  void AvoidForAWhile(Job* job, const std::string& node);
  // Ends the avoidance of the node.
  void TryAgain(Job* job, const std::string& node);
  // Ends the avoidance of all nodes.
  void ForgetAvoided(Job* job);
  // `failed`: when the failure that ended the placement happened; InfinitePast: unknown.
  void EndPlacement(Job* job, v1::Placement* placement, const v1::AttemptEnd& end,
                    absl::Time failed = absl::InfinitePast());
  // Handles a node's request to start again, within the attempt, what the attempt has lost.
  // `report` may be a repeat.
  void OnAsked(Job* job, const v1::Placement& placement, const v1::AttemptReport& report);
  // Continues the current attempt after its end, with a new entry of the history.
  void RestartInPlace(Job* job, const v1::AttemptReport& report);
  // Records that the current attempt has reached a stage.
  void Reach(Job* job, AttemptStage stage, absl::Time at);
  void Reach(Job* job, AttemptStage stage) { Reach(job, stage, now_); }
  // Called when nothing of the current attempt is left.
  void Finish(Job* job);
  bool MakeRoomForOne();
  // Counts the bytes that the record has now.
  void Measure(Job* job);
  // CheckProcesses returns whether the owner may have a job of this size; CheckLimits also whether
  // it may have one more job.
  Error CheckProcesses(const std::string& owner, const v1::JobSpec& spec) const;
  Error CheckLimits(const std::string& owner, const v1::JobSpec& spec) const;
  // Returns whether the caller sees the job's variables. They may be secrets, so only the job's
  // owner and admins see them.
  static bool SeesEnv(const Identity* who, const v1::JobRecord& record);
  void Forget(uint64_t sequence);

  Error CheckSync(const v1::SyncNodeRequest& request) const;
  void OnReport(const std::string& name, Node* node, const v1::AttemptReport& report);
  // Returns the new value of Node::leftover.
  std::string LeftoverOf(const std::string& name, const v1::SyncNodeRequest& request) const;
  // Ends the placements that the node no longer reports.
  void OnMissing(const std::string& name, Node* node, const v1::SyncNodeRequest& request);
  void LoseNode(const std::string& name, Node* node, const std::string& why);
  void AnswerSync(const std::string& name, Node* node);
  void SetNodeTimer(const std::string& name, Node* node);
  absl::Duration RetentionOf(const Node& node) const {
    return node.cordoned ? std::max(options_.cordoned_retention, options_.node_retention)
                         : options_.node_retention;
  }
  void TickNode(const std::string& name);

  // `free`: without the space that is taken.
  CandidateNodes Candidates(bool free, bool cordoned_too = false) const;
  ScheduleQuestion Question() const;
  // Called if nodes may have more space than before: what was too large for all of them may fit.
  void NodesHaveMore();
  // Schedules within kScheduleSoon, together with other changes until then.
  void ScheduleSoon();
  void RunSchedule();
  void Start(Job* job, PlacementDecision placement);
  // Ends the avoidance of nodes if the job cannot run without them. Returns whether it has.
  bool StopAvoiding(Job* job);
  // Returns what the schedule would do with a job that is submitted now, as the last of its
  // priority.
  v1::JobPlan PlanOf(const std::string& owner, const v1::JobSpec& spec) const;
  // Returns what the schedule has done with a submitted job.
  v1::JobPlan PlanOf(const Job& job) const;
  // Returns the plan of a job that waits for `why`: where it would run if nothing else did.
  v1::JobPlan PlanOfOneThatWaits(const v1::JobRecord& record, const std::string& why) const;
  // Sets where the parts of the attempt in `plan->placements()` listen.
  void PlanPorts(v1::JobPlan* plan) const;
  bool Settled() const { return now_ - started_ >= options_.node_lease; }

  void Reply(CallId call, v1::OpResult result) {
    out_->replies.emplace_back(call, std::move(result));
  }
  void ReplyError(CallId call, v1::OpError error);
  void ReplyJob(CallId call, const Job& job, bool with_env);
  // Returns the job as callers see it, with what it waits for.
  static v1::JobRecord View(const Job& job);
  // Sets the fields of `view` that differ from the record, besides those that a view leaves out.
  static void SetWords(const Job& job, v1::JobRecord* view);
  // Returns the job as List shows it: with only the last attempt of the history, no variables and
  // no stacks.
  static v1::JobRecord Listed(const Job& job);
  void SetRevision(Job* job, uint64_t revision);

  const JobsOptions options_;
  absl::btree_map<uint64_t, Job> jobs_;  // by sequence
  absl::flat_hash_map<std::string, uint64_t> by_id_;
  // By owner and idempotency key, so that users cannot collide with each other's keys.
  using Key = std::pair<std::string, std::string>;
  static Key KeyOf(const v1::JobRecord& record) {
    return {record.owner(), record.idempotency_key()};
  }
  absl::flat_hash_map<Key, uint64_t> by_key_;
  JobChanges changes_;
  absl::btree_set<uint64_t> queued_, active_;
  // By the time of the end and the sequence: the job that ended first is the first to make room for
  // others.
  absl::btree_set<std::pair<int64_t, uint64_t>> ended_;
  static std::pair<int64_t, uint64_t> EndOf(const v1::JobRecord& record) {
    return {record.ended_unix_ms(), record.sequence()};
  }
  absl::btree_set<uint64_t> may_grow_;  // active jobs that may grow
  absl::btree_set<uint64_t> spared_;    // jobs that have spares
  absl::btree_set<uint64_t> unspared_;  // active jobs that lack spares
  uint64_t last_sequence_ = 0;
  absl::btree_map<std::string, Node> nodes_;

  absl::btree_set<std::pair<absl::Time, std::string>> node_timers_;
  absl::btree_set<std::pair<absl::Time, uint64_t>> limits_;    // ends_by of jobs
  absl::btree_set<std::pair<absl::Time, uint64_t>> retained_;  // forget_at of jobs
  // When the avoidance of a node ends, the job and the node.
  absl::btree_set<std::tuple<absl::Time, uint64_t, std::string>> avoided_;
  absl::btree_map<CallId, HeldGet> gets_;
  absl::flat_hash_map<std::string, absl::btree_set<CallId>> gets_of_;  // by job_id
  absl::btree_map<uint64_t, OpenQuery> queries_;
  absl::btree_set<std::pair<absl::Time, CallId>> call_timers_;  // for gets_
  absl::btree_set<std::pair<absl::Time, uint64_t>> query_timers_;
  absl::flat_hash_map<CallId, std::string> syncs_;  // held calls, with their node
  absl::flat_hash_map<CallId, uint64_t> reads_;     // held calls, with their query
  uint64_t next_query_ = 1;
  absl::Time started_ = absl::InfinitePast();  // of the term
  absl::Time heard_any_ = absl::InfinitePast();
  // When the first node was heard again after a time in which none was; the others come back later.
  absl::Time returned_at_ = absl::InfinitePast();
  absl::Time schedule_at_ = absl::InfiniteFuture();
  absl::flat_hash_map<std::string, std::string> too_large_;  // see ScheduleQuestion
  bool resumes_ = false;   // the term began with jobs that have not ended
  bool restored_ = false;  // it began from a copy: later attempts may be running
  bool dirty_ = false;     // room or jobs have changed since the last schedule

  // The current event.
  absl::Time now_ = absl::InfinitePast();
  uint64_t revision_ = 0;
  uint64_t last_order_ = 0;  // id of the last LogLevelOrder
  std::string cluster_id_;
  const Identity* caller_ = nullptr;
  size_t bytes_ = 0;  // of all records
  JobsOutput* out_ = nullptr;
  absl::btree_set<uint64_t> touched_jobs_;
  absl::btree_set<std::pair<uint64_t, int>> touched_placements_;
  absl::btree_set<std::string> touched_nodes_;
  std::vector<std::function<void()>> at_end_;
  std::string no_room_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_JOBS_CORE_H_
