#ifndef MUSTER_AGENT_RELAY_CORE_H_
#define MUSTER_AGENT_RELAY_CORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "agent/arrivals.h"
#include "agent/op_sender.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// A process of a worker that this agent has started.
struct LocalProcess {
  std::string job;
  std::string worker_id;
  uint64_t incarnation = 0;
  int rank = 0;
  int64_t pid = 0;
};

// Connects the workers of one node with its stream to the coordinator.
//
// - Arrivals of several local workers at one barrier become one operation: it is sent when the last
//   of them arrives, or when a short window after the first ends.
// - Heartbeats are answered here, from the coordinator's directives. After each reconnect the first
//   heartbeat of each worker is forwarded, to recover missed directives.
// - It tracks the seated workers and their latest progress: MakeBeat. The beat also names the
//   processes without a seat. What a worker has said last is sent again when it leaves or its
//   process ends: the beat that has it may still be on its way then, and would come too late.
//
// Everything else is forwarded. Beats omit workers whose process is stopped or a zombie, and silent
// workers without a process that is visible here: their leases expire.
//
// Thread-safe; nothing blocks but a look into /proc when a worker joins. The owner calls Tick when
// due (see TimerThread).
class RelayCore final : public OpSender {
 public:
  struct Options {
    std::string node;
    std::string host = {};  // its name for people
    uint64_t incarnation = 0;
    absl::Duration arrival_window = absl::Milliseconds(1);
    absl::Duration heard_within = absl::Seconds(6);
    // The process of a worker that says its number is `claimed`; 0: none to be seen (see
    // WorkerProcesses). Null: the number is believed.
    std::function<int64_t(const std::string& job, const std::string& worker_id,
                          uint64_t incarnation, int64_t claimed)>
        process_of = nullptr;
    // The workers' processes of this node, whether they have joined or not. May be null.
    std::function<std::vector<LocalProcess>()> processes = nullptr;
    // Of a process of this machine, see process_state.h; empty or "gone": none to be seen.
    std::function<std::string(int64_t pid)> process_state = nullptr;
    // Adds newer facts to the beat of a worker, if there are any.
    std::function<void(v1::WorkerBeat*)> refresh = nullptr;
    // Whether the stream to the coordinator is open.
    std::function<bool()> connected = nullptr;
    // Tick is due earlier than it said.
    std::function<void()> wake = nullptr;
    const Clock* clock = &Clock::Real();
  };

  // `upstream` is borrowed.
  RelayCore(Options options, OpSender* upstream);

  // An operation of a worker. The returned id is 0 if nothing was sent yet.
  uint64_t Submit(v1::Op op, Done done) override;
  void Forget(uint64_t op_id) override;

  // Sends arrivals that have waited long enough; returns when to call again.
  absl::Time Tick();

  v1::Beat MakeBeat();

  // From the stream.
  void Connected(uint64_t term);
  void GenerationEnded(const v1::GenerationEnded& ended);
  // The process is gone. Sends what it has said last, before the caller reports the exit.
  void WorkerEnded(const std::string& job_id, const std::string& worker_id, uint64_t incarnation);

  // The process of the seated local worker of that name that was reported to the coordinator as
  // `pid`, else of one without a seat; `job_id` is empty: of any job. Nothing: there is no such
  // worker; 0: its process cannot be seen.
  std::optional<int64_t> ProcessOf(const std::string& job_id, const std::string& worker_id,
                                   int64_t pid) const;

 private:
  using WorkerKey = std::pair<std::string, std::string>;  // job, worker
  struct Worker {
    uint64_t incarnation = 0;
    uint64_t generation = 0;
    int32_t rank = 0;
    int64_t claimed_pid = 0;  // by itself
    int64_t told_pid = 0;     // to the coordinator
    v1::WorkerBeat beat;      // what it last said
    bool has_spoken = false;  // it has said anything
    absl::Time heard;
    // Of rank 0, as it said; InfinitePast: not yet.
    absl::Time restored = absl::InfinitePast(), first_step = absl::InfinitePast();
    bool checked = false;       // the coordinator has agreed since the last connection
    bool told_stopped = false;  // the coordinator knows that the process is stopped
    bool ended = false;         // its generation has ended
    std::string why_ended;
  };

  uint64_t Join(v1::Op op, Done done);
  uint64_t Leave(v1::Op op, Done done);
  // Sends what the worker has said last, if anything.
  void SendLastWords(const std::string& job_id, const std::string& worker_id, uint64_t incarnation);
  void Drop(const std::string& job_id, const std::string& worker_id, uint64_t incarnation);
  uint64_t Heartbeat(v1::Op op, Done done);
  uint64_t Arrive(v1::Op op, Done done);
  int64_t ProcessOf(const WorkerKey& key, uint64_t incarnation, int64_t claimed) const;
  bool HasSeat(const LocalProcess& process) const;
  void AddUnseated(v1::Beat* beat);
  std::optional<int64_t> UnseatedProcessOf(const std::string& job_id,
                                           const std::string& worker_id) const;
  void Seated(const v1::JoinRequest& request, int64_t told_pid, const v1::JoinReply& reply);
  // Of the barrier's participants, those that are local.
  size_t LocalRanks(const v1::ArriveRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  OpSender* const upstream_;

  mutable Mutex mu_;
  std::map<WorkerKey, Worker> workers_ ABSL_GUARDED_BY(mu_);
  v1::ReplyHeader header_ ABSL_GUARDED_BY(mu_);  // of what is answered here

  ArrivalMerger arrivals_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_RELAY_CORE_H_
