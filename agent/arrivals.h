#ifndef MUSTER_AGENT_ARRIVALS_H_
#define MUSTER_AGENT_ARRIVALS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/time/time.h"
#include "agent/op_sender.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// Merges the arrivals at one barrier instance into one ArriveMany, for a relay (arrivals of its
// workers) and a hub (of its agents).
//
// - Arrivals wait until the expected ranks have arrived, at most for a window after the first, or
//   until their total size reaches a limit. The message carries each rank's lateness.
// - Arrivals that differ in call site, payload (present or absent), timeout or step, and those that
//   name one rank with two incarnations, are sent separately, so that the coordinator detects the
//   difference.
// - If a joint message is refused because of one rank, each arrival is sent as its caller made it,
//   and gets its own answer.
//
// Thread-safe; nothing blocks. No lock is held over a call. The owner calls Tick when due.
class ArrivalMerger {
 public:
  struct Arrival {
    v1::Op op;  // arrive or arrive_many
    OpSender::Done done;
    uint64_t tag = 0;  // the owner's identifier for it
    size_t bytes = 0;
    absl::Time at;
  };
  struct Options {
    std::string node;  // the node that the joint messages name
    uint64_t incarnation = 0;
    absl::Duration window;
    size_t max_bytes = 1 << 20;  // of a joint message
    // Answers all of these arrivals at once. Null: the `done` of each is called.
    std::function<void(const std::vector<Arrival>&, const v1::OpResult&)> answer = nullptr;
    // Called when Tick is due earlier than it returned.
    std::function<void()> wake = nullptr;
    const Clock* clock = &Clock::Real();
  };

  // `upstream` is borrowed.
  ArrivalMerger(Options options, OpSender* upstream);

  // `op` is an arrive or arrive_many. It is sent, with others for the same instance, as soon as
  // `expected` ranks have arrived.
  void Add(v1::Op op, OpSender::Done done, size_t expected, uint64_t tag = 0);
  // Sends arrivals that have waited long enough; returns when to call again.
  absl::Time Tick();
  // The callers of these arrivals are gone, so none is answered. Operations that were already sent
  // may take effect.
  void Drop(const absl::flat_hash_set<uint64_t>& tags);

 private:
  // job, generation, barrier, counter
  using Instance = std::tuple<std::string, uint64_t, std::string, uint64_t>;
  struct Group {
    absl::Time due;
    std::vector<Arrival> arrivals;
    absl::flat_hash_set<int32_t> ranks;
    size_t bytes = 0;
  };
  struct Sent {
    uint64_t op_id = 0;  // set once it is known
    bool dropped = false;
    std::vector<Arrival> arrivals;
  };

  void Send(std::vector<Arrival> arrivals);
  void SendOne(std::vector<Arrival> arrivals);
  void OnAnswer(uint64_t serial, const v1::OpResult& result);

  const Options options_;
  OpSender* const upstream_;

  Mutex mu_;
  std::map<Instance, Group> groups_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, Sent> sent_ ABSL_GUARDED_BY(mu_);
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ARRIVALS_H_
