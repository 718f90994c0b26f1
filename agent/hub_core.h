#ifndef MUSTER_AGENT_HUB_CORE_H_
#define MUSTER_AGENT_HUB_CORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "agent/arrivals.h"
#include "agent/incoming_stream.h"
#include "agent/op_sender.h"
#include "agent/upstream.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/session/agent_session.h"
#include "rpc/session/answer.h"

namespace muster::agent {

// The hub in an agent (docs/protocol.md, "Hubs"): other agents have their sessions here, and this
// node's own stream forwards their messages. It sits between this node's relay and that stream:
//
//   relay ---\                                              /--- other agents (IncomingStream)
//             > HubCore --- OpSender: the session stream   <
//   (own operations go through it too, so that arrivals meet)
//
// - To the agents it is a coordinator of the upstream's term and cluster. A session here is never
//   longer than the session of the upstream: when that one is replaced, all streams end with a
//   Goodbye that has retry_after, and the agents reconnect in new sessions. A session also ends at
//   Finish, and when this node itself moves behind a hub: then Goodbye has no retry_after.
// - Arrivals at one barrier instance become one operation (arrivals.h): sent when all participating
//   ranks known to be behind the hub have arrived, at the latest after a short window. Ranks are
//   known from joins and from arrivals at earlier barriers.
// - Each agent's beats are kept until the hub's own next one and forwarded once. Facts that are too
//   old by then renew no lease.
// - Directives go to the agent of the worker they concern, or to all agents with workers of the
//   job.
// - After each beat an agent gets a frame, if only an acknowledgement, so that it detects a stalled
//   hub; and a HubState whenever the upstream is lost or found.
// - No behavior of an agent makes the hub hold more than Limits: it refuses the excess, stops
//   reading the stream until the agent has accepted its answers, or ends the session.
//
// Agents' messages are treated as untrusted input. Pure: the owner has the clock, the streams (see
// HubServer) and the threads. Thread-safe; nothing blocks. No lock is held over a call to a link or
// the upstream. The owner calls Tick when due (see TimerThread).
class HubCore final : public OpSender, public IncomingStreamEvents {
 public:
  struct Limits {
    // The most agents with a session. Streams of further agents are refused.
    size_t agents = 1024;
    // The most operations of one agent that wait for their answer, and the most bytes of their
    // requests; then the same for all agents together, so that this node's own workers get a share
    // of what the stream holds.
    size_t calls_of_agent = 8192;
    size_t held_bytes_of_agent = 16 << 20;
    size_t calls = 49152;
    size_t held_bytes = 48 << 20;
    // The most bytes of answers that an agent's stream has not taken; beyond it, no frame of the
    // stream is read.
    size_t unsent_bytes = 8 << 20;
    // The most bytes of answers that an agent has not acknowledged; beyond it, its session ends.
    size_t unacknowledged_bytes = 32 << 20;
    // The most bytes of an agent's beats between two of the hub's; more end the stream. Then the
    // most of a beat of the hub: the rest waits for the next one.
    size_t beat_bytes_of_agent = 256 << 10;
    size_t beats_of_agent = 4096;  // most beats, likewise: an empty one takes 100s of bytes
    size_t beat_bytes = 2 << 20;
    // What the hub remembers of one agent. Exceeding it is harmless: arrivals wait for the window,
    // and directives go to more agents than need them.
    size_t workers_of_agent = 4096;
    size_t jobs_of_agent = 64;
    // Per job.
    size_t ranks_of_agent = 4096;
    size_t stacks_of_agent = 256;    // requested and not answered
    size_t stack_bytes = 512 << 10;  // of an answer; a larger one is dropped
  };
  struct Options {
    std::string node;
    uint64_t incarnation = 0;
    absl::Duration arrival_window = absl::Milliseconds(2);
    // How long an agent's session survives without a stream.
    absl::Duration resume_window = absl::Seconds(60);
    // Facts from an agent that are older than this are not forwarded with a beat.
    absl::Duration beat_fresh = absl::Seconds(3);
    // How long a stream that ends gets to take its Goodbye.
    absl::Duration goodbye_patience = absl::Seconds(1);
    Limits limits = {};
    // Returns the current peer of the stream. Called with a lock held: must not call back.
    std::function<Upstream()> upstream = nullptr;
    // Sends an agent's answer to CollectStack to the coordinator.
    std::function<void(v1::StackReply)> send_stack = nullptr;
    // Called when Tick is due earlier than it returned.
    std::function<void()> wake = nullptr;
    const Clock* clock = &Clock::Real();
  };

  // `upstream` is borrowed.
  HubCore(Options options, OpSender* upstream);
  ~HubCore() override;

  // Takes this node's own operations.
  uint64_t Submit(v1::Op op, Done done) override;
  void Forget(uint64_t op_id) override;

  // Does all due work and returns when to call again.
  absl::Time Tick();

  // Adds to this node's beat the facts that the agents have sent since the last one, and the list
  // of agents if that is due.
  void AddToBeat(v1::Beat* beat);
  // Called if the last beat was not sent: its facts from agents go into the next one, unless there
  // are newer ones.
  void TakeBack(const v1::Beat& beat);

  // Called when the result of Options::upstream has changed.
  void OnUpstream();
  // Forwards the part that concerns the agents. The caller handles this node's own part.
  void OnDirective(const v1::Directive& directive);

  // Ends all sessions with a Goodbye and accepts no more. Does not wait for the agents.
  void Finish();

  // Events of the agents' streams. A stream is never called again after its OnClosed.
  void OnFrame(const std::shared_ptr<IncomingStream>& link, const v1::AgentFrame& frame,
               size_t bytes) override;
  void OnWritten(const std::shared_ptr<IncomingStream>& link) override;
  void OnClosed(const std::shared_ptr<IncomingStream>& link) override;

  // Agents with a session, whether they have a stream or not. If there are any, the node should
  // beat every second.
  size_t agents() const { return agent_count_.load(std::memory_order_relaxed); }

 private:
  struct Agent;
  struct Call;
  struct Stream;
  struct Todo;
  // The ranks of an agent in a job, for the latest generation seen.
  struct JobRanks {
    uint64_t generation = 0;
    absl::flat_hash_set<int32_t> ranks;
  };
  using Ranks = absl::flat_hash_map<std::string, JobRanks>;

  void DoHello(const std::shared_ptr<Stream>& stream, const v1::Hello& hello, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckHello(const v1::Hello& hello) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DoFrame(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DoOp(const std::shared_ptr<Agent>& agent, const v1::Op& op, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status DoBeat(Agent* agent, const v1::Beat& beat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DoUpstream(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Answers these calls, except those that have ended.
  void Answered(const std::vector<uint64_t>& calls, const v1::OpResult& result);

  // Records what an operation reveals about the workers and ranks behind this hub.
  void LearnWorker(Agent* agent, const std::string& job_id, const std::string& worker_id,
                   uint64_t incarnation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LearnRank(Ranks* ranks, const std::string& job_id, uint64_t generation, int32_t rank)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LearnArrival(Ranks* ranks, const v1::Op& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // How many ranks behind this hub, as far as known, take part in this arrival's barrier.
  size_t Expected(const v1::Op& op) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The agents to which a directive must go.
  std::vector<std::shared_ptr<Agent>> Concerned(const v1::Directive& directive) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Starts a write if one can be started; ends the session of an agent that acknowledges nothing.
  void Pump(const std::shared_ptr<Agent>& agent, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The agent no longer has a stream.
  void Detach(std::shared_ptr<Stream> stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CloseStream(std::shared_ptr<Stream> stream, const absl::Status& status, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Deletes the session; its stream, if it has one, ends with `status`.
  void EndSession(std::shared_ptr<Agent> agent, const absl::Status& status, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Ends all sessions; their streams end after a Goodbye, which says whether the agents should
  // `come_back`.
  void EndAll(const std::string& reason, bool come_back, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run(Todo todo);
  void Submit(uint64_t call_id, v1::Op op, size_t expected);

  const Options options_;
  OpSender* const upstream_;

  mutable Mutex mu_;
  Upstream now_ ABSL_GUARDED_BY(mu_);  // the last result of Options::upstream
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool roster_due_ ABSL_GUARDED_BY(mu_) = false;
  bool roster_told_ ABSL_GUARDED_BY(mu_) = false;                              // on this stream
  std::map<std::string, std::shared_ptr<Agent>> agents_ ABSL_GUARDED_BY(mu_);  // by node
  // The size of agents_. Atomic, because the stream, whose lock others hold while they take ours,
  // reads it.
  std::atomic<size_t> agent_count_{0};
  absl::flat_hash_map<IncomingStream*, std::shared_ptr<Stream>> streams_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, Call> calls_ ABSL_GUARDED_BY(mu_);
  size_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_call_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t next_session_ ABSL_GUARDED_BY(mu_) = 1;
  std::string beat_after_ ABSL_GUARDED_BY(mu_);  // the agent whose beat was the last to find room
  // When the agents reported the facts that the last beat forwards, by job and worker: for
  // TakeBack.
  absl::flat_hash_map<std::pair<std::string, std::string>, absl::Time> heard_ ABSL_GUARDED_BY(mu_);
  absl::Time beat_made_ ABSL_GUARDED_BY(mu_);  // when the last beat was made
  // The answer to operations of a frame that exceed a limit.
  std::shared_ptr<const rpc::Answer> overloaded_ ABSL_GUARDED_BY(mu_);
  Ranks own_ ABSL_GUARDED_BY(mu_);  // this node's own

  ArrivalMerger arrivals_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_HUB_CORE_H_
