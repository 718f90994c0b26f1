#ifndef MUSTER_COORDINATOR_CORE_H_
#define MUSTER_COORDINATOR_CORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/defaults.h"
#include "coordinator/access.h"
#include "coordinator/answer.h"
#include "coordinator/hubs.h"
#include "coordinator/jobs/jobs_core.h"
#include "proto/muster/v1/admin.pb.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/session.pb.h"
#include "proto/muster/v1/watch.pb.h"

namespace muster::coordinator {

// The sender of an operation. A view: valid during the call only.
struct Caller {
  absl::string_view node = {};  // the agent whose stream it came on; empty for a unary call
  // The identity of the sender; null: the process of the core itself, which may do everything.
  const Identity* identity = nullptr;
};

// An answer that may be sent once the journal is durable up to `durable_revision`; 0 or anything
// already durable: at once. If the journal fails, UNAVAILABLE / JOURNAL_FAILED is sent in its
// place.
struct Reply {
  CallId call = 0;
  std::shared_ptr<const Answer> answer;
  uint64_t durable_revision = 0;
};

// A record that the journal must hold, in this order. `payload` is a serialised v1::JournalRecord.
// Revisions grow, with gaps.
struct Record {
  uint64_t revision = 0;
  std::string payload;
};

// A directive for the agent `node`; dropped if the agent is not attached. The rule for
// `durable_revision` is that of Reply.
struct NodeDirective {
  std::string node;
  std::shared_ptr<const v1::Directive> directive;
  uint64_t durable_revision = 0;
};

// One line for the log, for operators.
struct Notice {
  bool warning = false;
  std::string job_id;
  std::string text;
};

// The work for the owner after an event. Events append, so one Output may collect a batch of them.
struct Output {
  std::vector<Reply> replies;
  std::vector<Record> records;
  std::vector<NodeDirective> directives;
  // Jobs with new watch events: call ReadWatch for their watchers.
  std::vector<std::string> changed_jobs;
  // Submitted jobs that have changed or are gone: call ReadJobs for their watchers.
  std::vector<std::string> changed_submitted;
  // Reports of barriers at their soft deadline, and of those that failed.
  std::vector<v1::BarrierReport> reports;
  std::vector<Notice> notices;
  // The lease of a worker has run out. Before the worker is given up, all that it may have sent
  // must be read: see Core::CaughtUp.
  bool catch_up = false;
  // A member of a job has seen a newer state than this coordinator's: stop serving at once.
  bool deposed = false;
  std::string deposed_why;  // one line for the log, with the way out

  void Clear();
};

// Durations of up to 7 minutes, in buckets: bucket i counts those of at most 2^i * 0.1 ms that fit
// no smaller bucket; the last one counts the rest as well.
struct DurationCounts {
  static constexpr int kBuckets = 24;
  static constexpr double Bound(int bucket) {
    return 0.0001 * static_cast<double>(int64_t{1} << bucket);
  }
  void Observe(double seconds);

  uint64_t buckets[kBuckets] = {};
  double sum_seconds = 0;
};

// Counts since construction, for the metrics page.
struct CoreStats {
  uint64_t barriers_passed = 0;
  uint64_t barriers_failed = 0;
  // Times from the first arrival to the release of passed barriers.
  DurationCounts barrier_wait;
  uint64_t checkpoints_published = 0;
  uint64_t checkpoints_given_up = 0;
  uint64_t checkpoints_damaged = 0;  // found by verifications
  uint64_t checkpoint_bytes = 0;     // total of those published
  // Published checkpoints whose writers reported how long training waited and how long the save
  // took.
  DurationCounts checkpoint_stall;
  DurationCounts checkpoint_save;
  uint64_t generations_sealed = 0;
  uint64_t generations_ended = 0;
  uint64_t workers_lost = 0;
  uint64_t workers_failed = 0;
  uint64_t fenced_calls = 0;
  uint64_t refused_calls = 0;  // calls whose callers have no right to them
  // Callers that had seen a higher term or revision and did not prove that they belong here.
  uint64_t unproven_deposals = 0;
  uint64_t repeated_requests = 0;
  uint64_t kv_writes = 0;
  uint64_t triggers_raised = 0;
  uint64_t jobs_removed = 0;
  // Jobs that an event examined beyond its own: those whose deadline came, or whose leases restart
  // after a pause.
  uint64_t jobs_visited = 0;
};

// Deliberate faults, so that tests/simulation can prove that it would notice them. All false
// outside of tests.
struct Mutants {
  bool barrier_releases_one_early = false;
  bool acknowledges_before_durable = false;
  bool accepts_stale_generation = false;
  bool watch_skips_a_revision = false;
  bool dead_incarnation_renews_lease = false;
  bool trigger_below_a_horizon = false;
  bool ignores_recall = false;
  bool spare_moves_survivors = false;
  bool forgets_departed = false;
  bool seals_before_coverage = false;
  bool deletes_last_resumable = false;
  bool resumes_from_damaged = false;
  bool resumes_from_held_back = false;
  bool deletes_before_seal = false;
  bool deletes_pinned = false;
  bool forgets_damage = false;
  bool sizes_clear_damage = false;
  bool sizes_count_as_contents = false;
};

struct CoreOptions {
  std::string cluster_id;
  uint64_t restore_id = 0;  // see ReplyHeader
  absl::Duration default_lease = kDefaultLease;
  absl::Duration default_outage_tolerance = kDefaultOutageTolerance;
  absl::Duration default_join_timeout = absl::Seconds(600);
  absl::Duration default_last_call = absl::Seconds(5);
  absl::Duration recovery_last_call =
      absl::Seconds(1);  // with spares at hand, from the second generation on
  absl::Duration default_barrier_timeout = absl::Seconds(1800);
  absl::Duration default_soft_timeout = absl::Seconds(60);
  absl::Duration diag_budget =
      absl::Seconds(2);           // before a barrier's deadline, to ask agents for fresh stacks
  int diag_max_stacks = 16;       // asked for one report
  int strikes_to_quarantine = 3;  // 0: never automatically
  absl::Duration strike_window = absl::Hours(1);  // in which a host is named that often
  absl::Duration quarantine_for = absl::Minutes(30);
  size_t kept_barrier_results = 1000;    // for each job
  size_t kept_barrier_bytes = 16 << 20;  // for each job: results with payloads are large
  size_t watch_events = 32768;           // kept for each job
  size_t watch_bytes = 4 << 20;          // kept for each job: how far a watcher may fall behind
  size_t kept_answers = 512;             // for each worker, for repeated requests
  size_t kept_answer_bytes = 256 << 10;  // in all; the latest is kept whatever its size
  int rank_table_page = 1000;
  // A job without seated or waiting workers and without writes for this long is removed, with its
  // keys and history. The time restarts with the coordinator.
  absl::Duration job_retention = absl::Hours(24);
  // The same for a job that has checkpoints, because the process that continues it may come late.
  // Its keys still go after job_retention.
  absl::Duration checkpoint_retention = absl::Hours(24 * 30);
  // Signs the hash of a sealed checkpoint's record: the same signature for the same hash. Null:
  // records are not signed.
  std::function<std::string(absl::string_view sha256)> sign_checkpoint = nullptr;
  // The most bytes of the keys of one job and of all jobs, approximately as they count in memory
  // and in a snapshot.
  size_t job_kv_bytes = 256 << 20;
  size_t kv_bytes = 768 << 20;
  HubOptions hubs;
  JobsOptions jobs;  // submitted ones, and nodes
  // Whether Output::catch_up is heeded. If not, everything received is applied at once, as in a
  // simulation.
  bool catches_up = false;
  Mutants mutants;
};

// The whole state of a coordinator as one state machine: rendezvous, roster, barriers, triggers,
// key-value and watch history of all jobs. It takes events and the time, and returns answers,
// records and notifications.
//
// Thread-safety: none; one thread applies events. Nothing blocks: there is no clock, thread,
// socket, file or lock inside, so the same object runs in the server and in tests/simulation.
//
// Time is the server's monotonic clock and must not go back. Call Tick at NextDeadline(); an event
// that comes much later than that shows that the whole process was paused, and every lease then
// restarts.
//
// Durability: an event changes the state at once and yields at most one Record. Every output that
// reveals the change carries that record's revision in `durable_revision` and must wait until it is
// durable. To restart: Restore the newest snapshot, Replay the records after it, then StartTerm;
// make the record of StartTerm durable before serving.
class Core {
 public:
  explicit Core(CoreOptions options);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Whether to refuse `op` while the journal cannot be written: its effect would be in memory only.
  static bool NeedsJournal(const v1::Op& op);

  // Returns who submitted the job of that id, or the job that this rendezvous job is an attempt of;
  // empty: unknown.
  std::string OwnerOf(absl::string_view job) const;
  // Checks whether the token of this attempt still opens something. Errors: RENDEZVOUS_CLOSED.
  std::optional<v1::OpError> CheckAttempt(absl::string_view group) const;

  // Applies one operation. The reply to `call` comes in this Output or in a later one. Any bytes
  // are fine as input.
  void Handle(CallId call, const v1::Op& op, const Caller& caller, absl::Time now, Output* out);
  // Forgets a held call whose caller is gone. A waiting joiner loses its place; an arrival remains
  // valid.
  void Abandon(CallId call, absl::Time now, Output* out);

  // Handles the first frame of an agent's stream, also after each reconnect. What the agent has
  // seen may depose. Agents that should reach the coordinator through another one get the directive
  // UseHub. Agents of different `group`s (access.h; empty: none) are no hubs of one another.
  void AttachAgent(absl::string_view node, const v1::Hello& hello, absl::Time now, Output* out,
                   absl::string_view group = {});
  // Ends the agent's session permanently (the server's resume window has passed, or it said Bye).
  void DetachAgent(absl::string_view node, absl::Time now, Output* out);
  void HandleBeat(absl::string_view node, const v1::Beat& beat, absl::Time now, Output* out);
  void HandleStack(absl::string_view node, const v1::StackReply& stack, absl::Time now, Output* out,
                   const Identity* identity = nullptr);

  // Notes that everything that had come by `until` has been applied, so that leases that ended
  // before may run out. Otherwise a coordinator that is behind (flooded, short of CPU) would give
  // up workers whose beats it has not read. Due when Output::catch_up says so; if it does not come
  // within the outage_tolerance of a job, its leases expire anyway.
  void CaughtUp(absl::Time until, absl::Time now, Output* out);
  // Lets deadlines up to `now` pass.
  void Tick(absl::Time now, Output* out);
  // Returns when Tick has something to do; InfiniteFuture: nothing waits.
  absl::Time NextDeadline() const;

  // Only before StartTerm. A snapshot is restored part by part, or whole, before any record.
  // Errors: DATA_LOSS for bytes that are not a snapshot or a record, or a revision out of order.
  absl::Status Restore(absl::string_view part);
  absl::Status Replay(absl::string_view record_payload);
  // Hands over the durable state as of last_record_revision() in parts of about `part_bytes` (one
  // seat table, and one answer, are not divided), which Restore takes in this order. Stops at the
  // first error of `part` and returns it.
  absl::Status WriteSnapshot(size_t part_bytes,
                             absl::FunctionRef<absl::Status(std::string part)> part) const;
  // Returns all parts together, which are one part again. For small states: no message has more
  // than 2 GiB.
  std::string Snapshot() const;
  // Returns the strikes and quarantines still in effect, because no record tells that they have
  // expired. A core that was restored from the records up to last_record_revision() has the same
  // state as this one after RestoreHosts of them, which may be called only before StartTerm.
  // Errors: DATA_LOSS.
  std::string SnapshotHosts() const;
  absl::Status RestoreHosts(absl::string_view hosts);
  // Begins to serve as `term`, which must be higher than last_term() and at most kMaxTerm. Seated
  // workers get one full lease, and those whose agent takes longer to connect again kTimeToReturn.
  //
  // `restored`: what was replayed is a copy of an earlier state, whose later part is lost. Nothing
  // that a client has seen of that part may be taken for something new: all generations end, the
  // numbers of generations and the versions of keys jump (revisions do with the term), and triggers
  // are dropped.
  void StartTerm(uint64_t term, absl::Time now, Output* out, bool restored = false);
  static constexpr uint64_t kMaxTerm = (uint64_t{1} << 24) - 1;
  uint64_t last_term() const;             // 0: none yet
  uint64_t restored_term() const;         // the term of the last StartTerm with `restored`; 0: none
  uint64_t revision() const;              // the revision of the last change
  uint64_t last_record_revision() const;  // the same, of those that went into a Record

  // Ends a job: waiting joins fail with RENDEZVOUS_CLOSED, its generation ends. Unknown jobs are
  // ignored.
  void CloseJob(absl::string_view job_id, absl::string_view why, absl::Time now, Output* out);
  // Forgets a job and all its keys. Jobs that are left alone for CoreOptions::job_retention are
  // removed without it.
  void RemoveJob(absl::string_view job_id, absl::Time now, Output* out);

  // Reads the events of a job that `request` asks for, from revision `from` on (0: from now), as
  // far as they are durable and at most about `max_bytes` (whole revisions; at least one).
  // batch->next_revision is where to continue. Errors: NOT_FOUND, OUT_OF_RANGE / COMPACTED.
  std::optional<v1::OpError> ReadWatch(const v1::WatchRequest& request, uint64_t from,
                                       uint64_t durable_revision, size_t max_bytes,
                                       v1::WatchBatch* batch) const;

  // Reads the next message of a watch of submitted jobs, see JobsCore::ReadChanges. Errors:
  // NOT_FOUND.
  std::optional<v1::OpError> ReadJobs(const v1::WatchJobsRequest& request, const Identity* who,
                                      uint64_t durable_revision, size_t max_bytes,
                                      JobsCore::WatchPlace* place, v1::WatchJobsBatch* batch) const;

  // Sets what operators should attend to, for FillStatus, and why no job can be submitted (empty:
  // one can), until the next call.
  void SetWarnings(std::vector<std::string> warnings, std::string no_room);
  // Fills what the core knows: header, jobs, warnings, and agents, both attached and behind hubs.
  void FillStatus(v1::StatusReply* status) const;
  v1::ReplyHeader Header() const;
  // The bytes of the keys of all jobs, against CoreOptions.kv_bytes.
  size_t kv_bytes() const;
  const CoreStats& stats() const;
  // The number of agents that hubs speak for, and the number of these hubs.
  int agents_behind_hubs() const;
  int hubs() const;
  // Counts the workers of all jobs by state, for the metrics page.
  std::map<v1::WorkerState, int64_t> MembersByState() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_H_
