#ifndef MUSTER_AGENT_SESSION_CLIENT_H_
#define MUSTER_AGENT_SESSION_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "agent/op_sender.h"
#include "agent/outgoing_stream.h"
#include "agent/upstream.h"
#include "base/clock.h"
#include "base/defaults.h"
#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// This node's one stream to the coordinator, or to the hub that speaks for this node there
// (docs/protocol.md): operations of all local workers are merged into as few frames as the stream
// takes, and each gets its result once, however often the stream breaks, moves or the coordinator
// restarts.
//
// - Every operation is held until its result arrives. A resumed session resends, under the same
//   numbers, the frames that the server has not seen. A new session (the coordinator dropped this
//   agent's, or was restarted) resends all held operations; their request ids and counters prevent
//   a second effect. An operation that has neither and was sent before is answered UNAVAILABLE
//   instead.
// - A coordinator that shuts down in order answers pending operations with STOPPING: they are still
//   held, for the next coordinator.
// - To a coordinator of a new term it first reports how the latest instance of each barrier ended,
//   as this node saw it.
// - A frame is written as soon as the previous write has finished; operations submitted meanwhile
//   go into the next frame.
// - Beats renew the leases of the local workers.
// - Streams that break soon after they were opened do not reset the backoff, so that reconnecting
//   agents do not overload a coordinator that crashes repeatedly.
// - An operation with a string that is not UTF-8 is answered INVALID_ARGUMENT / BAD_FIELD, which
//   names the field, and never sent: the coordinator could not parse the frame, and it would be
//   sent again forever.
// - The coordinator's messages are treated as untrusted input: an answer of another kind than the
//   operation is an INTERNAL error, never a success.
// - While the coordinator is away nothing fails until the tolerance has passed: then all held
//   operations fail with one line that names the address and the length of the outage. The client
//   keeps trying, and works again when the coordinator is back.
// - On UseHub, it waits for the operations in flight that cannot be repeated, says Bye and opens a
//   new session at the hub. A hub that has lost the coordinator counts as a coordinator that is
//   away. If the hub fails, the client returns to the coordinator and names the hub; while neither
//   answers, it tries the two in turn.
//
// Thread-safe; nothing blocks. Callbacks run without locks, those for frames in the order of the
// frames. The owner calls Tick when due (see TimerThread).
class SessionClient final : public OpSender {
 public:
  struct Options {
    std::string node;     // unique among the agents of this coordinator
    std::string address;  // the coordinator's, for messages
    uint64_t incarnation = 0;
    std::string host = {};
    std::string version = {};
    absl::Duration beat_period = absl::Seconds(2);
    // The wait between attempts: random up to the backoff, which doubles from the first to the last
    // value, but never more than a third of the lease.
    absl::Duration first_backoff = absl::Milliseconds(50);
    absl::Duration last_backoff = absl::Seconds(5);
    // How long the coordinator may be away after the first connection. Infinite: forever.
    absl::Duration outage_tolerance = kDefaultOutageTolerance;
    // How long a move to a hub waits for operations that cannot be repeated, and for its Bye.
    absl::Duration move_patience = absl::Seconds(1);
    // How long a move first waits for workers that wait for seats, because they would lose their
    // place in the queue. The coordinator gives up on a move after 30 s.
    absl::Duration seat_patience = absl::Seconds(20);
    // Beyond these, Submit answers UNAVAILABLE / OVERLOADED.
    size_t max_held_ops = 65536;
    size_t max_held_bytes = 64 << 20;
    size_t max_op_bytes =
        (4 << 20) - 1024;          // INVALID_ARGUMENT / LIMIT: a message has at most 4 MiB
    size_t frame_bytes = 1 << 20;  // of a frame with several operations
    // Makes the next beat; called from Tick.
    std::function<v1::Beat()> beat = nullptr;
    // Called if a beat was not sent: the stream broke, or a newer one, which is requested next,
    // replaces it.
    std::function<void(const v1::Beat&)> on_unsent_beat = nullptr;
    std::function<void(const v1::Directive&)> on_directive = nullptr;
    // A stream is open. `resumed`: the session continues, nothing was missed.
    std::function<void(uint64_t term, bool resumed)> on_connected = nullptr;
    // Returns whether this agent is the hub of others now: then it ignores UseHub, and a
    // coordinator that does not answer its beats counts as away. Called under a lock: must neither
    // block nor call back. Null: it is no hub.
    std::function<bool()> is_hub = nullptr;
    // Called when the result of upstream() has changed.
    std::function<void()> on_upstream = nullptr;
    // Called once for each outage beyond the tolerance, and once if the coordinator refuses this
    // agent or has ended permanently.
    std::function<void(const absl::Status&)> on_lost = nullptr;
    // Called when Tick is due earlier than it returned.
    std::function<void()> wake = nullptr;
    std::function<double()> random = nullptr;  // in [0, 1); null: its own generator
    const Clock* clock = &Clock::Real();
  };

  // `transport` is borrowed.
  SessionClient(Options options, StreamOpener* transport);
  // Closes the stream. Drops held operations and makes no more callbacks.
  ~SessionClient() override;
  SessionClient(const SessionClient&) = delete;
  SessionClient& operator=(const SessionClient&) = delete;

  uint64_t Submit(v1::Op op, Done done) override;
  void Forget(uint64_t op_id) override;
  // Sends the answer to a CollectStack directive. Dropped if the coordinator has forgotten the
  // question.
  void SendStack(v1::StackReply reply);

  // Announces that other agents reach this one as their hub at `address`. Call it before the first
  // Tick.
  void OfferHub(std::string address);
  // Changes Options::beat_period, from now on.
  void SetBeatPeriod(absl::Duration period);

  // Does all due work and returns when to call again. Call at the start, then at that time and when
  // woken.
  absl::Time Tick();

  // Ends the session in order: after all held operations have been answered, or at `deadline` (real
  // time), says Bye to the coordinator. Blocks until the coordinator has closed the stream or until
  // `deadline`; only briefly if there is no stream. Submit nothing afterwards.
  void Finish(absl::Time deadline);

  // Whether a stream is open now that leads to the coordinator, and (the next function) whether a
  // stream ever was open.
  bool connected() const;
  bool ever_connected() const;
  // Whether the coordinator has said that it does not return: no further attempt is made.
  bool ended() const;
  // Blocks until a stream has been open and the coordinator has not been away beyond the tolerance
  // since, or `timeout` of real time has passed, or the coordinator refused this agent or has
  // ended. Errors: UNAVAILABLE that names the address, or the coordinator's refusal.
  absl::Status WaitUntilConnected(absl::Duration timeout);
  // The error of the last connection attempt; empty: none failed, or there is a stream.
  std::string last_error() const;
  // Why everything fails now: the status of on_lost. OK: nothing fails.
  absl::Status lost() const;
  uint64_t term() const;
  Upstream upstream() const;
  size_t held_ops() const;

 private:
  class Guard;
  class Attempt;
  enum class State { kIdle, kOpening, kOpen };
  struct Held {
    v1::Op op;
    Done done;
    size_t bytes = 0;
    absl::Time since;  // when its caller began to wait
    bool sent = false;
    bool again = false;  // the answer was that the coordinator stops: for the next stream
  };
  using Item = std::variant<uint64_t, v1::StackReply>;  // an op_id, or
  struct Sent {
    uint64_t seq = 0;
    std::vector<Item> items;
  };
  struct SeenJob {
    uint64_t generation = 0;
    std::map<std::string, std::pair<uint64_t, v1::BarrierState>> barriers;
  };
  struct Hub {
    std::string node;
    std::string address;
  };
  // What to do after the lock is released.
  struct Todo;

  void OnWritten(const Attempt* attempt);
  void OnFrame(const Attempt* attempt, const v1::CoordinatorFrame& frame);
  void OnClosed(const Attempt* attempt, const absl::Status& status);

  void Welcomed(const v1::Welcome& welcome, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Why this agent does not talk to that server; empty: it does.
  std::string WhyRefused(const v1::Welcome& welcome) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The session continues: what the server has not received is sent again, before anything else.
  void Acknowledged(uint64_t seq) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Resume(uint64_t last_received_seq) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The server knows nothing of the previous session: operations that may be repeated are sent
  // again, the others fail.
  void BeginSession(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Received(const v1::CoordinatorFrame& frame, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void QueueRecalls() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteBarrier(const v1::Op& op, const v1::OpResult& result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Ends this attempt; the next one comes after the backoff, or at once if it moves to a hub.
  void Drop(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Chooses the target of the next attempt, after a stream that was `open` or not and has `lasted`
  // or not.
  void ChooseNext(bool open, bool lasted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Notes that the coordinator is back, as far as is known.
  void Back() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Since when the coordinator counts as away, if it turns out now that it is.
  absl::Time AwayFrom(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteError(absl::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void UseHub(const v1::UseHub& use, bool wait_for_seats, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MoveAfterSeats(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HoldsSentJoin() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeHubState(const v1::HubState& state, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeGoodbye(const v1::Goodbye& goodbye, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The due work: opening, moving, watching the hub.
  void CheckStream(absl::Time now, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns a fraction of the lease.
  absl::Duration Patience(int part) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FailAll(const absl::Status& status, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Drops all that is held.
  void Clear() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Starts a write if one can be started.
  void Pump(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool NextFrame(v1::AgentFrame* frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Time NextDeadline() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run(Todo todo);

  const Options options_;
  StreamOpener* const transport_;
  const std::shared_ptr<Guard> guard_;

  mutable Mutex mu_;
  CondVar changed_;
  State state_ ABSL_GUARDED_BY(mu_) = State::kIdle;
  std::shared_ptr<Attempt> attempt_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<OutgoingStream> link_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool hello_due_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time next_attempt_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Duration backoff_ ABSL_GUARDED_BY(mu_);
  absl::Duration max_backoff_ ABSL_GUARDED_BY(mu_);
  absl::Time opened_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  absl::Duration retry_after_ ABSL_GUARDED_BY(mu_);  // for which the coordinator asked
  absl::Duration beat_period_ ABSL_GUARDED_BY(mu_);
  absl::Time next_beat_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  std::optional<v1::Beat> beat_ ABSL_GUARDED_BY(mu_);
  absl::Time away_since_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  bool ever_connected_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status lost_ ABSL_GUARDED_BY(mu_);  // why everything fails now
  std::string last_error_ ABSL_GUARDED_BY(mu_);
  bool refused_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;  // the coordinator has ended permanently
  enum class Bye { kNo, kDue, kWriting, kSent };
  Bye bye_ ABSL_GUARDED_BY(mu_) = Bye::kNo;

  std::string hub_address_ ABSL_GUARDED_BY(mu_);
  // The hub to use. Kept while the coordinator is tried instead, until the coordinator welcomes
  // this agent.
  std::optional<Hub> hub_ ABSL_GUARDED_BY(mu_);
  bool at_hub_ ABSL_GUARDED_BY(mu_) = false;       // target of this attempt, else the next
  bool in_turn_ ABSL_GUARDED_BY(mu_) = false;      // both have failed since either answered
  std::string failed_hub_ ABSL_GUARDED_BY(mu_);    // to be reported to the coordinator
  std::string away_hub_ ABSL_GUARDED_BY(mu_);      // left because it had lost the coordinator
  bool logged_left_ ABSL_GUARDED_BY(mu_) = false;  // logged in this outage
  int hub_breaks_ ABSL_GUARDED_BY(mu_) = 0;        // consecutive streams that did not last
  absl::Time open_by_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // if there are two targets
  // For the open stream, to a hub or of a hub:
  absl::Time answer_by_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // to a beat
  bool coordinator_answers_ ABSL_GUARDED_BY(mu_) = false;               // the beats that ask for it
  // For a stream to the hub:
  bool hub_away_ ABSL_GUARDED_BY(mu_) = false;  // it has lost the coordinator
  absl::Time leave_by_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // if it stays away
  enum class Left { kNo, kEnds, kFailed, kAway };
  Left left_ ABSL_GUARDED_BY(mu_) = Left::kNo;
  // A hub reports only after its welcome that the coordinator is away; until then, the length of
  // the outage does not change.
  absl::Time away_before_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  absl::Time doubt_until_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  // A move to a hub that waits until the workers have their seats.
  std::optional<v1::UseHub> after_seats_ ABSL_GUARDED_BY(mu_);
  absl::Time seats_by_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  // A move to a hub that is under way.
  std::optional<Hub> moving_to_ ABSL_GUARDED_BY(mu_);
  std::set<uint64_t> waited_for_ ABSL_GUARDED_BY(mu_);  // operations that cannot be repeated
  absl::Time move_by_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  bool leaving_ ABSL_GUARDED_BY(mu_) = false;  // Bye is written: the coordinator ends the stream

  std::string session_id_ ABSL_GUARDED_BY(mu_);
  std::string session_hub_ ABSL_GUARDED_BY(mu_);  // the session's hub; empty: coordinator
  uint64_t sessions_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Duration lease_ ABSL_GUARDED_BY(mu_);
  std::string cluster_id_ ABSL_GUARDED_BY(mu_);
  uint64_t term_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t received_ ABSL_GUARDED_BY(mu_) = 0;       // the last frame of the coordinator
  uint64_t last_sent_ack_ ABSL_GUARDED_BY(mu_) = 0;  // the last received_ that was sent
  uint64_t next_seq_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t next_op_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<uint64_t, Held> held_ ABSL_GUARDED_BY(mu_);
  size_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mu_);    // to be sent
  size_t stacks_ ABSL_GUARDED_BY(mu_) = 0;         // in queue_ and unacked_
  std::deque<Sent> unacked_ ABSL_GUARDED_BY(mu_);  // by seq
  std::map<std::string, SeenJob> seen_ ABSL_GUARDED_BY(mu_);
  std::minstd_rand random_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_SESSION_CLIENT_H_
