#ifndef MUSTER_COORDINATOR_SERVICE_CORE_RUNNER_H_
#define MUSTER_COORDINATOR_SERVICE_CORE_RUNNER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "coordinator/core.h"
#include "coordinator/journal/journal.h"
#include "coordinator/service/agent_stream.h"
#include "coordinator/web/histogram.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// Who waits for the answer of one call. Called exactly once, on the apply thread, and must not
// block.
class CallSink {
 public:
  virtual ~CallSink() = default;
  virtual void OnAnswer(const std::shared_ptr<const Answer>& answer) = 0;
};

// A watch stream, as the runner sees it. Thread-safe.
class WatchStream {
 public:
  virtual ~WatchStream() = default;
  // Writes `batch`; WatchWritable() is called when it has been written. Never called while a write
  // is in flight.
  virtual void Write(v1::WatchBatch batch) = 0;
  virtual void Close(const absl::Status& status) = 0;
};

// Owns the core and its journal, and is the one thread that touches them. Network threads hand
// events over by a queue; answers go back through sinks and streams. A call that waits holds no
// thread, only an entry in a table.
//
// An answer that depends on a record is held back until the record is durable. If the journal
// fails, it becomes UNAVAILABLE / JOURNAL_FAILED, and operations that would need the journal are
// refused before they change anything.
//
// Nothing that a client does makes it keep more than Limits says: what goes beyond is refused with
// OVERLOADED before it changes anything, or the stream is not read from until it has taken its
// answers.
//
// All public methods are thread-safe and do not block, except Start and Stop.
class CoreRunner {
 public:
  struct Limits {
    // Of a message that goes out. In place of a larger answer goes LIMIT, or RESULT_TOO_LARGE if
    // the operation has changed something.
    size_t answer_bytes = (4 << 20) - 1024;
    // Calls that wait for their answer, of everybody and of one agent. A hub is one agent here:
    // with 400 workers behind it, each has room for 160 calls, and for 160 KiB of requests below,
    // where a worker seldom has more than a barrier and a wait at a time.
    size_t calls = 1 << 20;
    size_t calls_of_agent = 1 << 16;
    // Bytes of the requests of those calls: the core keeps what it needs of them (keys waited for,
    // payloads of barriers). Of all agents, of one, and of all who call by themselves, who then
    // cannot take the agents' share. Small calls, as those of a rendezvous are, may go to twice as
    // much.
    size_t held_bytes_of_agents = 512 << 20;
    size_t held_bytes_of_agent = 64 << 20;
    size_t held_bytes_of_callers = 128 << 20;
    // Requests of unary calls that wait to be applied. An agent has at most one frame there.
    size_t queued_bytes = 64 << 20;
    // Answers that an agent's stream has not taken: from then on no frame of it is read.
    size_t unsent_bytes = 8 << 20;
    // Answers that an agent has not acknowledged: its session ends.
    size_t unacknowledged_bytes = 64 << 20;
    // Records that the disk has not taken. Beyond it, operations that need the journal are refused;
    // beyond twice as much, all that change anything.
    size_t journal_backlog_bytes = 64 << 20;
    // Open watches.
    size_t watchers = 1 << 16;
  };
  struct Options {
    CoreOptions core;
    // How long an agent's session survives without a stream before its calls are abandoned.
    absl::Duration resume_window = absl::Seconds(60);
    // After so many records or bytes of them a snapshot is written, and later if the last one had
    // more bytes than that: see SnapshotDue.
    uint64_t snapshot_records = 64 * 1024;
    uint64_t snapshot_bytes = 64 << 20;
    Limits limits;
    // The cores' notices for operators. Whoever runs the coordinator inside of a job's launcher
    // hears of all of it from the launcher.
    bool log_notices = true;
    const Clock* clock = &Clock::Real();
  };

  // `journal` has been opened and not replayed.
  CoreRunner(const Options& options, std::unique_ptr<Journal> journal);
  ~CoreRunner();

  // Replays the journal, makes the new term durable, and begins to apply. Blocks on the disk.
  // Errors: DATA_LOSS corrupt journal; RESOURCE_EXHAUSTED or UNAVAILABLE it cannot be written.
  absl::Status Start();

  // Tells the agents, when Stop comes, that this coordinator does not come back, and why.
  void SetEndsForGood(const std::string& why);
  // Answers everything that waits with UNAVAILABLE / STOPPING, ends all streams, writes what is
  // queued to the journal. Blocks. Repeatable. Calls that come later are answered the same way.
  void Stop();

  // Whether the answer of `op` may wait for somebody else's operation, and what is counted of it
  // meanwhile if its message has `bytes`.
  static bool MayBeHeld(const v1::Op& op);
  static size_t HeldBytes(const v1::Op& op, size_t bytes);
  // Calls of so many bytes may be held until twice as many bytes are as limits say.
  static constexpr size_t kSmallCall = 2048;

  CallId NewCallId() { return next_call_.fetch_add(1, std::memory_order_relaxed); }
  // `sink` is let go of once it was answered. `bytes` is the size of the request.
  void Call(CallId id, std::unique_ptr<v1::Op> op, size_t bytes, std::shared_ptr<CallSink> sink);
  // The caller has gone away. The sink is answered with CANCELLED unless it was answered before.
  void Abandon(CallId id);

  // The frames of an agent's stream, in order; the first is a Hello. Ends with Closed. `bytes` is
  // the size of the frame.
  void AgentFrame(const std::shared_ptr<AgentStream>& stream,
                  std::shared_ptr<const v1::AgentFrame> frame, size_t bytes = 0);
  void AgentClosed(const std::shared_ptr<AgentStream>& stream);

  // A watch, until WatchClosed. The stream stays valid until then.
  void WatchOpen(std::shared_ptr<WatchStream> stream, v1::WatchRequest request);
  void WatchWritable(const std::shared_ptr<WatchStream>& stream);
  void WatchClosed(const std::shared_ptr<WatchStream>& stream);

  // Writes a snapshot; `done` gets its revision once it is durable. Errors: UNAVAILABLE with
  // JOURNAL_FAILED, STOPPING, or OVERLOADED (one is being written); those of
  // Journal::WriteSnapshot.
  void Snapshot(std::function<void(absl::StatusOr<uint64_t>)> done);
  // All that had come to this process at `asked` has been handed over: see set_on_catch_up.
  void CaughtUp(absl::Time asked);
  // Runs `task` with the core, in turn with all other events. After Stop, or when stopping, it is
  // run with nullptr.
  void WithCore(absl::AnyInvocable<void(Core*)> task);

  // Called once, by whoever applies, when a caller has seen a newer coordinator. Set before Start.
  void set_on_deposed(std::function<void()> callback) { on_deposed_ = std::move(callback); }
  // Called on changes of the journal's health, with Journal::Progress::status, by whoever applies.
  // Set before Start.
  void set_on_journal_health(std::function<void(const absl::Status&)> callback) {
    on_journal_health_ = std::move(callback);
  }

  // Called when a lease has run out, before anybody is given up, so that what the worker has sent
  // is not left unread: read what has come, hand it over, then call CaughtUp(asked). At most one
  // such call is under way. By whoever applies; must not block. Without it what is queued here
  // counts as all that has come. Set before Start.
  void set_on_catch_up(std::function<void(absl::Time asked)> callback) {
    on_catch_up_ = std::move(callback);
  }

  // For the metrics page.
  const DurationHistogram& fsync_seconds() const { return fsync_seconds_; }
  // From an operation's turn to its answer, by the number of its field in Op; calls and operations
  // of agents' streams alike.
  static constexpr int kOpKinds = v1::Op::kGetMembers + 1;
  const DurationHistogram& op_seconds(int kind) const { return op_seconds_[kind]; }
  uint64_t queue_depth() const { return queue_depth_.load(std::memory_order_relaxed); }
  uint64_t events() const { return events_.load(std::memory_order_relaxed); }
  uint64_t journal_records() const { return journal_records_.load(std::memory_order_relaxed); }
  uint64_t journal_bytes() const { return journal_bytes_.load(std::memory_order_relaxed); }
  uint64_t journal_backlog_bytes() const { return backlog_bytes_.load(std::memory_order_relaxed); }
  uint64_t overloaded() const { return overloaded_.load(std::memory_order_relaxed); }
  bool journal_ok() const { return journal_ok_.load(std::memory_order_relaxed); }
  // Of agents, and of those who call by themselves.
  uint64_t held_bytes(bool agents) const {
    return held_bytes_[agents ? 1 : 0].load(std::memory_order_relaxed);
  }
  // False: the last snapshot could not be written. The journal grows until one can.
  bool snapshot_ok() const { return snapshot_ok_.load(std::memory_order_relaxed); }
  uint64_t snapshots() const { return snapshots_.load(std::memory_order_relaxed); }
  uint64_t snapshot_failures() const { return snapshot_failures_.load(std::memory_order_relaxed); }
  // Of the last one that was written, or read at the start.
  uint64_t snapshot_bytes() const { return journal_->snapshot_bytes(); }
  // How long the last one took that was written; zero: none was.
  absl::Duration snapshot_took() const {
    return absl::Nanoseconds(snapshot_nanoseconds_.load(std::memory_order_relaxed));
  }
  // Watches looked at because something of their job had changed.
  uint64_t watchers_visited() const { return watchers_visited_.load(std::memory_order_relaxed); }
  uint64_t open_calls() const { return open_calls_.load(std::memory_order_relaxed); }
  uint64_t agents() const { return agents_.load(std::memory_order_relaxed); }
  uint64_t watchers() const { return watcher_count_.load(std::memory_order_relaxed); }
  const Journal& journal() const { return *journal_; }

 private:
  struct Session;
  struct Writes;
  struct OpenCall {
    std::shared_ptr<CallSink> sink;    // of a unary call, or
    std::shared_ptr<Session> session;  // the stream it came on
    uint64_t op_id = 0;
    size_t bytes = 0;  // of the request
    v1::Op::KindCase kind = v1::Op::KIND_NOT_SET;
    bool changes = false;  // it may have had an effect
    absl::Time begun = absl::InfinitePast();
  };
  struct Watcher {
    std::shared_ptr<WatchStream> stream;
    v1::WatchRequest request;
    uint64_t next = 0;
    uint64_t told = 0;  // the `next` that it knows
    bool writing = false;
    bool greeted = false;
  };
  using Task = absl::AnyInvocable<void()>;

  enum class By { kCaller, kThread };
  // `task` is applied by the caller if nobody is applying and `by` allows it, else by another
  // thread. False, and `task` is not kept, once the runner has ended.
  bool Post(Task&& task, By by = By::kCaller);
  void Run();
  // Applies until the queue is empty, or hands over to the thread: to write a snapshot, to stop, or
  // because it has gone on for long. Requires applying_, set by this thread.
  void ApplyAll();
  void ApplyBatch(std::vector<Task>& tasks);
  absl::Time NextDeadline() const;
  bool SnapshotDue() const;
  void MaybeTrim(absl::Time now);

  // All below: whoever is applying.
  void DoCall(CallId id, const v1::Op& op, absl::string_view node, OpenCall call);
  void DoFrame(const std::shared_ptr<AgentStream>& stream, const v1::AgentFrame& frame,
               size_t bytes);
  void DoHello(const std::shared_ptr<AgentStream>& stream, const v1::Hello& hello);
  void DoClosed(const std::shared_ptr<AgentStream>& stream);
  void EndSession(const std::shared_ptr<Session>& session);
  void DoProgress(const Journal::Progress& progress);
  void DoWatch(Watcher& watcher);
  void ForgetWatcher(WatchStream* stream);
  // Looks at the watchers of `job_id` in this batch, and again when all that has happened to it is
  // durable.
  void WatchersOf(const std::string& job_id);
  void SnapshotDone(const absl::Status& status);
  // Hands over what the core put out.
  void Drain();
  void Deliver(CallId id, std::shared_ptr<const Answer> answer);
  // Takes an open call off the books.
  void Close(const OpenCall& call);
  // Whether `op` is refused because something has grown too large; nullptr: it is not.
  // `bytes` is what is counted of the call.
  std::shared_ptr<const Answer> Refusal(const v1::Op& op, const Session* session, size_t bytes);
  void Direct(const NodeDirective& directive);
  void ReleaseDurable();
  void MarkDirty(const std::shared_ptr<Session>& session);
  // Whether a session ended, which may have put something out.
  bool FlushSessions();
  // Has every one of them write. If they are many, another thread takes some, and may be at its
  // last few when this returns.
  void WriteAll(std::vector<std::shared_ptr<Session>> sessions);
  void RunWriter();
  void ServeWatchers();
  void TakeSnapshot();
  void AnswerSnapshot(const absl::StatusOr<uint64_t>& result);
  void CheckSessions(absl::Time now);
  void StopAll();

  const Options options_;
  const std::unique_ptr<Journal> journal_;
  std::function<void()> on_deposed_;
  std::function<void(const absl::Status&)> on_journal_health_;
  std::function<void(absl::Time)> on_catch_up_;
  std::shared_ptr<const Answer> journal_failed_;
  std::shared_ptr<const Answer> stopping_answer_;
  std::shared_ptr<const Answer> cancelled_;
  std::shared_ptr<const Answer> too_many_calls_;
  std::shared_ptr<const Answer> too_many_bytes_;
  std::shared_ptr<const Answer> too_many_watchers_;
  std::shared_ptr<const Answer> snapshot_busy_;
  std::shared_ptr<const Answer> journal_behind_;

  // Whoever is applying; also read under mu_ while nobody is.
  Core core_;
  Output out_;
  uint64_t durable_revision_ = 0;
  absl::Status journal_status_;
  bool catching_up_ = false;
  bool snapshot_running_ = false;
  bool snapshot_of_core_ = false;  // the next one is taken from core_: the journal has damage
  absl::Time snapshot_begun_ = absl::InfinitePast();
  std::function<void(absl::StatusOr<uint64_t>)>
      snapshot_done_;                 // who asked for the next, or for it
  uint64_t snapshot_not_before_ = 0;  // records since the last one; set when one has failed
  bool stopped_ = false;
  absl::flat_hash_map<CallId, OpenCall> calls_;
  std::deque<std::pair<uint64_t, size_t>> backlog_;  // revision and size of records on their way
  std::multimap<uint64_t, Reply> held_replies_;
  std::multimap<uint64_t, NodeDirective> held_directives_;
  absl::flat_hash_map<std::string, std::shared_ptr<Session>> sessions_;  // by node
  absl::flat_hash_map<AgentStream*, std::shared_ptr<Session>> streams_;
  std::vector<std::shared_ptr<Session>> dirty_;
  // Streams whose frame was applied; without a session if it has none (any more).
  std::vector<std::pair<std::shared_ptr<Session>, std::shared_ptr<AgentStream>>> read_next_;
  std::multimap<absl::Time, std::weak_ptr<Session>> expiring_;
  absl::flat_hash_map<WatchStream*, Watcher> watchers_;
  absl::flat_hash_map<std::string, absl::flat_hash_set<WatchStream*>> watchers_of_;  // by job
  std::vector<std::string> changed_jobs_;  // of this batch
  // Jobs with events that were not durable, and the revision up to which the journal must be.
  absl::btree_set<std::pair<uint64_t, std::string>> undurable_jobs_;

  std::atomic<std::thread::id> applier_{};
  absl::Time last_trim_ = absl::InfinitePast();
  int trims_left_ = 0;
  std::atomic<uint64_t> passed_bytes_{0};  // of calls answered and of snapshots
  std::atomic<CallId> next_call_{1};
  std::atomic<uint64_t> queue_depth_{0};
  std::atomic<uint64_t> events_{0};
  std::atomic<uint64_t> journal_records_{0};
  std::atomic<uint64_t> journal_bytes_{0};
  std::atomic<bool> journal_ok_{true};
  std::atomic<bool> snapshot_ok_{true};
  std::atomic<uint64_t> snapshots_{0};
  std::atomic<uint64_t> snapshot_failures_{0};
  std::atomic<int64_t> snapshot_nanoseconds_{0};
  std::atomic<uint64_t> watchers_visited_{0};
  std::atomic<uint64_t> queued_bytes_{0};
  std::atomic<uint64_t> backlog_bytes_{0};
  std::atomic<uint64_t> overloaded_{0};
  std::atomic<uint64_t> open_calls_{0};
  // Of the requests of open calls, those of agents second; written by whoever applies.
  std::array<std::atomic<uint64_t>, 2> held_bytes_{};
  std::atomic<uint64_t> agents_{0};
  std::atomic<uint64_t> watcher_count_{0};
  DurationHistogram fsync_seconds_;
  std::array<DurationHistogram, kOpKinds> op_seconds_;

  Mutex mu_;
  CondVar wake_;
  std::vector<Task> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<Task> spare_ ABSL_GUARDED_BY(mu_);  // an empty queue with memory
  bool applying_ ABSL_GUARDED_BY(mu_) = false;
  // When the thread wakes by itself; InfinitePast: it wants to be woken when applying ends.
  absl::Time armed_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool handed_over_ ABSL_GUARDED_BY(mu_) = false;  // the thread applies next
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<std::string> ends_for_good_ ABSL_GUARDED_BY(mu_);  // why
  bool ended_ ABSL_GUARDED_BY(mu_) = false;

  std::thread thread_;

  Mutex writer_mu_;
  CondVar writer_wake_;
  std::shared_ptr<Writes> writes_ ABSL_GUARDED_BY(writer_mu_);  // for the writer to help with
  bool writer_stop_ ABSL_GUARDED_BY(writer_mu_) = false;
  std::thread writer_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_CORE_RUNNER_H_
