#ifndef MUSTER_COORDINATOR_SERVICE_CORE_RUNNER_H_
#define MUSTER_COORDINATOR_SERVICE_CORE_RUNNER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "coordinator/core.h"
#include "coordinator/journal/journal.h"
#include "coordinator/service/agent_sessions.h"
#include "coordinator/service/agent_stream.h"
#include "coordinator/service/attached_agent.h"
#include "coordinator/service/fan_out.h"
#include "coordinator/service/journal_gate.h"
#include "coordinator/service/open_calls.h"
#include "coordinator/service/runner_limits.h"
#include "coordinator/service/snapshots.h"
#include "coordinator/service/watch_source.h"
#include "coordinator/service/watchers.h"
#include "coordinator/web/histogram.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// Owns the core and its journal, and has one thread at a time touch them: the one that has the
// turn. A thread that brings an event while no thread has the turn takes it and applies the event;
// otherwise the event is queued for the holder of the turn. The runner's own thread takes the turn
// for deadlines, for snapshots, for what the journal reports, and to relieve a caller that has
// applied the events of others for long. Answers go out through sinks and streams. A call that
// waits holds no thread, only an entry in a table.
//
// An answer that depends on a record is held back until the record is durable. If the journal
// fails, it becomes UNAVAILABLE / JOURNAL_FAILED, and operations that would need the journal are
// refused before they change anything.
//
// No behavior of a client makes it hold more than Limits: it refuses the excess with OVERLOADED
// before it changes anything, or stops reading the stream until the client has accepted its
// answers.
//
// All public methods are thread-safe and do not block, except Start and Stop.
class CoreRunner {
 public:
  using Limits = RunnerLimits;
  struct Options {
    CoreOptions core;
    // How long an agent's session survives without a stream before its calls are abandoned.
    absl::Duration resume_window = absl::Seconds(60);
    // After this many records, or bytes of them, a snapshot is written, and later if the last one
    // had more bytes than that: see SnapshotDue.
    uint64_t snapshot_records = 64 * 1024;
    uint64_t snapshot_bytes = 64 << 20;
    Limits limits;
    // The cores' notices for operators. A user of an embedded coordinator learns all of this from
    // the launcher.
    bool log_notices = true;
    const Clock* clock = &Clock::Real();
  };

  // `journal` has been opened and not replayed.
  CoreRunner(const Options& options, std::unique_ptr<Journal> journal);
  ~CoreRunner();

  // Replays the journal, makes the new term durable, and begins to apply. Blocks on the disk.
  // Errors: DATA_LOSS corrupt journal; RESOURCE_EXHAUSTED or UNAVAILABLE it cannot be written.
  absl::Status Start();

  // Makes Stop announce to the agents that this coordinator does not return, and why.
  void SetEndsForGood(const std::string& why);
  // Answers all pending calls with UNAVAILABLE / STOPPING, ends all streams, writes queued records
  // to the journal. Blocks. Repeatable. Calls that come later are answered the same way.
  void Stop();

  CallId NewCallId() { return next_call_.fetch_add(1, std::memory_order_relaxed); }
  // `sink` is released once it was answered. `bytes` is the size of the request. `identity` is the
  // caller; null: this process.
  void Call(CallId id, std::unique_ptr<v1::Op> op, size_t bytes, std::shared_ptr<CallSink> sink,
            std::shared_ptr<const Identity> identity = nullptr);
  // Abandons a call whose caller has gone away. The sink is answered with CANCELLED unless it was
  // answered before.
  void Abandon(CallId id);

  // Handles a frame of an agent's stream. Frames come in order; the first is a Hello, and
  // AgentClosed ends them. `bytes` is the size of the frame.
  void AgentFrame(const std::shared_ptr<AgentStream>& stream,
                  std::shared_ptr<const v1::AgentFrame> frame, size_t bytes = 0);
  void AgentClosed(const std::shared_ptr<AgentStream>& stream);

  // Serves a watch until WatchClosed. The stream stays valid until then.
  void WatchOpen(std::shared_ptr<WatchStream> stream, std::unique_ptr<WatchSource> source);
  void WatchWritable(const std::shared_ptr<WatchStream>& stream);
  void WatchClosed(const std::shared_ptr<WatchStream>& stream);

  // Writes a snapshot; `done` gets its revision once it is durable. Errors: UNAVAILABLE with
  // JOURNAL_FAILED, STOPPING, or OVERLOADED (one is being written); those of
  // Journal::WriteSnapshot.
  void Snapshot(std::function<void(absl::StatusOr<uint64_t>)> done);
  // Notes that everything that this process had received by `asked` has been handed over: see
  // set_on_catch_up.
  void CaughtUp(absl::Time asked);
  // Runs `task` with the core, in turn with all other events. After Stop, or when stopping, it is
  // run with nullptr.
  void WithCore(absl::AnyInvocable<void(Core*)> task);

  // Called once, in the turn, when a caller has seen a newer coordinator. Set before Start.
  void set_on_deposed(std::function<void()> callback) { on_deposed_ = std::move(callback); }
  // Called in the turn on changes of the journal's health, with Journal::Progress::status. Set
  // before Start.
  void set_on_journal_health(std::function<void(const absl::Status&)> callback) {
    on_journal_health_ = std::move(callback);
  }

  // Called in the turn when a lease has expired, before a worker is given up, so that no message of
  // it stays unread: read all received messages, hand them over, then call CaughtUp(asked). At most
  // one such call is in progress. Must not block. Without it the events queued here count as all
  // received messages. Set before Start.
  void set_on_catch_up(std::function<void(absl::Time asked)> callback) {
    on_catch_up_ = std::move(callback);
  }

  // For the metrics page.
  const DurationHistogram& fsync_seconds() const { return fsync_seconds_; }
  static constexpr int kOpKinds = OpenCalls::kOpKinds;
  const DurationHistogram& op_seconds(int kind) const ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return calls_.seconds(kind);
  }
  uint64_t queue_depth() const { return queue_depth_.load(std::memory_order_relaxed); }
  uint64_t events() const { return events_.load(std::memory_order_relaxed); }
  uint64_t journal_records() const { return journal_records_.load(std::memory_order_relaxed); }
  uint64_t journal_bytes() const { return journal_bytes_.load(std::memory_order_relaxed); }
  uint64_t journal_backlog_bytes() const ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return gate_.backlog_bytes();
  }
  uint64_t overloaded() const { return overloaded_.load(std::memory_order_relaxed); }
  bool journal_ok() const { return journal_ok_.load(std::memory_order_relaxed); }
  // The bytes held for agents, or for direct callers.
  uint64_t held_bytes(bool agents) const ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return calls_.held_bytes(agents);
  }
  // False: the last snapshot could not be written. The journal grows until one can.
  bool snapshot_ok() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return snapshots_.ok(); }
  uint64_t snapshots() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return snapshots_.written(); }
  uint64_t snapshot_failures() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return snapshots_.failed(); }
  // The size of the last snapshot that was written, or read at the start.
  uint64_t snapshot_bytes() const { return journal_->snapshot_bytes(); }
  // How long the last snapshot that was written took; zero: none was.
  absl::Duration snapshot_took() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return snapshots_.took(); }
  // Watches looked at because something of their job had changed.
  uint64_t watchers_visited() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return watchers_.visited(); }
  uint64_t open_calls() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return calls_.size(); }
  uint64_t agents() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return sessions_.size(); }
  uint64_t watchers() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return watchers_.size(); }
  const Journal& journal() const { return *journal_; }

 private:
  using Task = absl::AnyInvocable<void()>;

  // The right to touch the core and all that belongs to it. It is not a lock: `applying_`, under
  // mu_, says whether it is free. It lets clang check who touches what, and knows its holder.
  class ABSL_LOCKABLE Turn {
   public:
    void Take() ABSL_EXCLUSIVE_LOCK_FUNCTION() { holder_ = std::this_thread::get_id(); }
    void Give() ABSL_UNLOCK_FUNCTION() { holder_ = std::thread::id(); }
    bool IsMine() const { return holder_.load() == std::this_thread::get_id(); }
    // Called at the start of each task, which runs in the turn.
    void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK() { MUSTER_CHECK(IsMine()); }

   private:
    std::atomic<std::thread::id> holder_{};
  };
  class ABSL_SCOPED_LOCKABLE HoldTurn {
   public:
    explicit HoldTurn(Turn* turn) ABSL_EXCLUSIVE_LOCK_FUNCTION(turn) : turn_(turn) {
      turn_->Take();
    }
    ~HoldTurn() ABSL_UNLOCK_FUNCTION() { turn_->Give(); }
    HoldTurn(const HoldTurn&) = delete;
    HoldTurn& operator=(const HoldTurn&) = delete;

   private:
    Turn* const turn_;
  };

  enum class By { kCaller, kThread };
  // Queues `task`, which the caller applies if no thread is applying and `by` allows it, else
  // another thread. Returns false, and does not keep `task`, once the runner has ended.
  bool Post(Task&& task, By by = By::kCaller);
  // Does the part of Start that needs the turn: replays, and makes the term durable.
  absl::Status BeginTerm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void Run();
  // Applies until the queue is empty, or hands over to the thread: to write a snapshot, to stop, or
  // because it has applied for long. Gives the turn back.
  void ApplyAll() ABSL_UNLOCK_FUNCTION(turn_);
  void ApplyBatch(std::vector<Task>& tasks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  absl::Time NextDeadline() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  bool SnapshotDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void MaybeTrim(absl::Time now);

  void DoCall(CallId id, const v1::Op& op, const Caller& caller, OpenCall call)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void DoFrame(const std::shared_ptr<AgentStream>& stream, const v1::AgentFrame& frame,
               size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void DoHello(const std::shared_ptr<AgentStream>& stream, const v1::Hello& hello)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void EndSession(const std::shared_ptr<AttachedAgent>& session)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void DoProgress(const Journal::Progress& progress) ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  // Delivers the core's output.
  void Drain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void Deliver(CallId id, std::shared_ptr<const Answer> answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  // Whether `op`, an open call, is refused because something has grown too large or the journal
  // has failed; nullptr: it is not.
  std::shared_ptr<const Answer> Refusal(CallId id, const v1::Op& op)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void Direct(const NodeDirective& directive) ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void ReleaseDurable() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  // Returns whether a session ended, which may have put something out.
  bool FlushSessions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void TakeSnapshot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  void StopAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);

  const Options options_;
  const std::unique_ptr<Journal> journal_;
  std::function<void()> on_deposed_;
  std::function<void(const absl::Status&)> on_journal_health_;
  std::function<void(absl::Time)> on_catch_up_;
  const std::shared_ptr<const Answer> stopping_answer_;
  const std::shared_ptr<const Answer> cancelled_;
  const std::shared_ptr<const Answer> too_many_calls_ = OpenCalls::TooManyCalls();
  const std::shared_ptr<const Answer> too_many_watchers_;
  const std::shared_ptr<const Answer> snapshot_busy_;

  Turn turn_;
  Core core_ ABSL_GUARDED_BY(turn_);
  Output out_ ABSL_GUARDED_BY(turn_);
  bool catching_up_ ABSL_GUARDED_BY(turn_) = false;
  bool stopped_ ABSL_GUARDED_BY(turn_) = false;
  OpenCalls calls_ ABSL_GUARDED_BY(turn_);
  JournalGate gate_ ABSL_GUARDED_BY(turn_);
  AgentSessions sessions_ ABSL_GUARDED_BY(turn_);
  Watchers watchers_ ABSL_GUARDED_BY(turn_);
  Snapshots snapshots_ ABSL_GUARDED_BY(turn_);

  absl::Time last_trim_ = absl::InfinitePast();
  int trims_left_ = 0;                     // both: used by the runner's own thread
  std::atomic<uint64_t> passed_bytes_{0};  // bytes of answered calls and of snapshots
  std::atomic<CallId> next_call_{1};
  std::atomic<uint64_t> queue_depth_{0};
  std::atomic<uint64_t> events_{0};
  std::atomic<uint64_t> journal_records_{0};
  std::atomic<uint64_t> journal_bytes_{0};
  std::atomic<bool> journal_ok_{true};
  std::atomic<uint64_t> queued_bytes_{0};
  std::atomic<uint64_t> overloaded_{0};
  DurationHistogram fsync_seconds_;

  Mutex mu_;
  CondVar wake_;
  std::vector<Task> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<Task> spare_ ABSL_GUARDED_BY(mu_);  // an empty queue with memory
  bool applying_ ABSL_GUARDED_BY(mu_) = false;
  // When the thread wakes on its own; InfinitePast: it wants to be woken when applying ends.
  absl::Time armed_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool handed_over_ ABSL_GUARDED_BY(mu_) = false;  // the thread applies next
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<std::string> ends_for_good_ ABSL_GUARDED_BY(mu_);  // why
  bool ended_ ABSL_GUARDED_BY(mu_) = false;

  std::thread thread_;
  FanOut fan_out_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_CORE_RUNNER_H_
