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

// A process of a worker, started by this agent.
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
//   processes without a seat. A worker's last facts are sent again when it leaves or its process
//   ends, because the beat that has them may still be on its way then, and would come too late.
//
// Everything else is forwarded. Beats omit workers whose process is stopped or a zombie, and silent
// workers whose process cannot be seen here: their leases expire.
//
// Thread-safe; nothing blocks except reading /proc when a worker joins. The owner calls Tick when
// due (see TimerThread).
class RelayCore final : public OpSender {
 public:
  struct Options {
    std::string node;
    std::string host = {};  // its name for people
    uint64_t incarnation = 0;
    absl::Duration arrival_window = absl::Milliseconds(1);
    absl::Duration heard_within = absl::Seconds(6);
    // Returns the process of a worker that reports `claimed` as its process id; 0: it cannot be
    // seen (see WorkerProcesses). Null: the id is believed.
    std::function<int64_t(const std::string& job, const std::string& worker_id,
                          uint64_t incarnation, int64_t claimed)>
        process_of = nullptr;
    // Returns the processes of this node's workers, whether they have joined or not. May be null.
    std::function<std::vector<LocalProcess>()> processes = nullptr;
    // Returns the state of a process of this machine, see process_state.h; empty or "gone": it
    // cannot be seen.
    std::function<std::string(int64_t pid)> process_state = nullptr;
    // Adds newer facts to the beat of a worker, if there are any.
    std::function<void(v1::WorkerBeat*)> refresh = nullptr;
    // Whether the stream to the coordinator is open.
    std::function<bool()> connected = nullptr;
    // Called when Tick is due earlier than it returned.
    std::function<void()> wake = nullptr;
    const Clock* clock = &Clock::Real();
  };

  // `upstream` is borrowed.
  RelayCore(Options options, OpSender* upstream);

  // Takes an operation of a worker. The returned id is 0 if nothing was sent yet.
  uint64_t Submit(v1::Op op, Done done) override;
  void Forget(uint64_t op_id) override;

  // Sends arrivals that have waited long enough; returns when to call again.
  absl::Time Tick();

  v1::Beat MakeBeat();

  // Event of the stream: it is connected.
  void Connected(uint64_t term);
  void GenerationEnded(const v1::GenerationEnded& ended);
  // Reports that the process is gone. Sends the worker's last facts before the caller reports the
  // exit.
  void WorkerEnded(const std::string& job_id, const std::string& worker_id, uint64_t incarnation);

  // Returns the process of the seated local worker of that name that was reported to the
  // coordinator as `pid`, else of one without a seat; an empty `job_id` means any job. nullopt:
  // there is no such worker; 0: its process cannot be seen.
  std::optional<int64_t> ProcessOf(const std::string& job_id, const std::string& worker_id,
                                   int64_t pid) const;

 private:
  using WorkerKey = std::pair<std::string, std::string>;  // job, worker
  struct Worker {
    uint64_t incarnation = 0;
    uint64_t generation = 0;
    int32_t rank = 0;
    int64_t claimed_pid = 0;  // as the worker reports it
    int64_t told_pid = 0;     // as reported to the coordinator
    v1::WorkerBeat beat;      // the last facts that it reported
    bool has_spoken = false;  // it has reported anything
    absl::Time heard;
    // For rank 0, as it reported; InfinitePast: not yet.
    absl::Time restored = absl::InfinitePast(), first_step = absl::InfinitePast();
    bool checked = false;       // the coordinator has confirmed the seat since the last connection
    bool told_stopped = false;  // the coordinator knows that the process is stopped
    bool ended = false;         // its generation has ended
    std::string why_ended;
  };

  uint64_t Join(v1::Op op, Done done);
  uint64_t Leave(v1::Op op, Done done);
  // Sends the last facts that the worker reported, if any.
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
  // How many of the barrier's participants are local.
  size_t LocalRanks(const v1::ArriveRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  OpSender* const upstream_;

  mutable Mutex mu_;
  std::map<WorkerKey, Worker> workers_ ABSL_GUARDED_BY(mu_);
  v1::ReplyHeader header_ ABSL_GUARDED_BY(mu_);  // the header of answers that are made here

  ArrivalMerger arrivals_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_RELAY_CORE_H_
