#ifndef MUSTER_COORDINATOR_RENDEZVOUS_H_
#define MUSTER_COORDINATOR_RENDEZVOUS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/answer.h"
#include "proto/muster/v1/rendezvous.pb.h"

namespace muster::coordinator {

enum class WaiterKind {
  kOrdinary,
  kSpare,       // takes a seat only if needed
  kLastResort,  // on an automatically quarantined host: only if nothing else helps
  kBlocked,     // on a host that an operator has quarantined
};

// A worker that waits for a seat in the next generation.
struct Waiter {
  v1::JoinRequest request;
  std::vector<CallId> calls;
  std::string node;                         // the agent that it last came through
  uint64_t order = 0;                       // place in the order of arrival
  absl::Time asked = absl::InfinitePast();  // when it last called
  absl::Time back = absl::InfinitePast();   // when it called after a silence: its own, or that of
                                            // the generation
  WaiterKind kind = WaiterKind::kOrdinary;
  absl::Time deadline = absl::InfiniteFuture();  // its own deadline; a spare has none
  std::string passed_over;  // why it got no seat in the generation that was last sealed
};

// The facts that decide whether the next generation is sealed.
struct SealQuestion {
  int min_workers = 1;
  int max_workers = 1;
  int divisible_by = 0;
  // The waiting workers.
  int ordinary = 0;
  int spares = 0;
  int last_resorts = 0;
  int blocked = 0;
  // The size of the last generation without the workers that left on purpose (0: there was none),
  // and whether all of its living workers wait.
  int former_world = 0;
  bool survivors_wait = false;
  absl::Duration last_call;  // how long to wait for more once there are enough
  absl::Time last_call_ends = absl::InfiniteFuture();  // infinite: it has not begun
  // How long living workers of the last generation that do not wait yet keep their claim to a seat.
  // In the past: there are none, or the others do not wait for them.
  absl::Time claims_end = absl::InfinitePast();
  absl::Time now;
};

struct SealDecision {
  bool seal = false;
  int world_size = 0;  // the size that is, or would be, sealed; 0: there are too few workers
  // The end of the last call that is in progress or begins now.
  absl::Time last_call_ends = absl::InfiniteFuture();
  // Words that follow "sealed because", or "waits for".
  std::string why;
};

// Decides whether to seal, or to wait and for which workers. There are enough workers if
// FeasibleWorld (seating.h) says so. Then the generation is sealed at once if the maximum number
// has joined, or if spares replace all workers that the last generation has lost and its survivors
// are back; otherwise when the last call ends. It is never sealed before `claims_end`.
SealDecision DecideSeal(const SealQuestion& question);

// The workers of one job that wait for a seat. Not thread-safe.
class Rendezvous {
 public:
  bool empty() const { return waiting_.empty(); }
  int size() const { return static_cast<int>(waiting_.size()); }
  int Count(WaiterKind kind) const { return counts_[static_cast<int>(kind)]; }
  bool Waits(absl::string_view worker_id) const { return waiting_.contains(worker_id); }
  bool Waits(absl::string_view worker_id, uint64_t incarnation) const {
    const Waiter* const waiter = Find(worker_id);
    return waiter != nullptr && waiter->request.fence().incarnation() == incarnation;
  }
  // Returns null if the worker does not wait.
  const Waiter* Find(absl::string_view worker_id) const {
    const auto it = waiting_.find(worker_id);
    return it == waiting_.end() ? nullptr : &it->second;
  }

  // Returns the place of a worker. If it has none yet, it gets a new one, at the end or where
  // `order` says. Valid until the next change; kind and deadline are changed by their setters only.
  Waiter* Place(const std::string& worker_id, std::optional<uint64_t> order);
  void SetKind(Waiter* waiter, WaiterKind kind);
  void SetDeadline(const std::string& worker_id, Waiter* waiter, absl::Time deadline);
  // Requires that the worker waits.
  Waiter Remove(absl::string_view worker_id);
  // Classifies all waiters again by f(request) -> WaiterKind.
  template <typename F>
  void Reclassify(F f) {
    for (auto& [worker_id, waiter] : waiting_) SetKind(&waiter, f(waiter.request));
  }

  // Calls f(worker_id, const Waiter&), in no particular order.
  template <typename F>
  void ForEach(F f) const {
    for (const auto& [worker_id, waiter] : waiting_) f(worker_id, waiter);
  }
  std::vector<const Waiter*> ByArrival() const;
  std::vector<std::string> ByName() const;

  // Decides, and keeps the decision. The question lacks the waiting workers and the last call.
  const SealDecision& Decide(SealQuestion question);
  // Decides nothing for now, because of `why` (words that follow "waits for").
  void Hold(std::string why);
  // Notes that a worker may have to be classified again at this time.
  void CheckAt(absl::Time when) { check_at_ = when; }
  void CheckBy(absl::Time when) { check_at_ = std::min(check_at_, when); }

  // The reason of the last decision, while a worker waits.
  const std::string& why() const { return decision_.why; }
  bool in_last_call() const { return decision_.last_call_ends != absl::InfiniteFuture(); }
  // Returns until when the workers wait at most: the end of the last call, or the first time that
  // one gives up.
  absl::Time waits_until() const;

  // Returns the first worker whose own time is up by `now`.
  std::optional<std::string> FirstExpired(absl::Time now) const;
  // Returns whether to decide again.
  bool IsDue(absl::Time now) const { return decision_.last_call_ends <= now || check_at_ <= now; }
  absl::Time NextDeadline() const;

 private:
  absl::flat_hash_map<std::string, Waiter> waiting_;
  std::array<int, 4> counts_ = {};  // by kind
  uint64_t next_order_ = 1;
  absl::btree_set<std::pair<absl::Time, std::string>> deadlines_;  // the deadlines of waiting_, by
                                                                   // worker_id
  SealDecision decision_;
  absl::Time check_at_ = absl::InfiniteFuture();
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RENDEZVOUS_H_
