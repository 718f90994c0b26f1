#ifndef MUSTER_COORDINATOR_INCARNATIONS_H_
#define MUSTER_COORDINATOR_INCARNATIONS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace muster::coordinator {

// A job's memory of processes that no longer have a seat in it:
//
//   fenced    a newer start of the worker took over, or its agent has seen the end of it: nothing
//             that this incarnation says has an effect again
//   departed  the last incarnation of a worker that the current generation was sealed without: a
//             newer one fences it, and its keys and answers are still its own
//
// Both are bounded: the oldest workers are forgotten. Not thread-safe.
class Incarnations {
 public:
  static constexpr size_t kOfAWorker = 16;  // fenced incarnations
  static constexpr size_t kWorkers = 1024;  // and some for each seat of the job

  bool IsFenced(absl::string_view worker_id, uint64_t incarnation) const;
  // `seats`: how many seats the job has or may have.
  void Fence(absl::string_view worker_id, uint64_t incarnation, size_t seats);

  std::optional<uint64_t> Departed(absl::string_view worker_id) const;
  void Depart(const std::string& worker_id, uint64_t incarnation);
  // Notes that the worker has a seat again.
  void Return(absl::string_view worker_id) { departed_.erase(worker_id); }
  // Called after a seal: returns the workers that are forgotten now. O(departed).
  std::vector<std::string> ForgetOldest(size_t seats);

  // Calls f(worker_id, incarnation), oldest worker first.
  template <typename F>
  void ForEachFenced(F f) const {
    for (const std::string& worker_id : fenced_order_) {
      for (const uint64_t incarnation : fenced_.find(worker_id)->second) f(worker_id, incarnation);
    }
  }
  template <typename F>
  void ForEachDeparted(F f) const {
    for (const std::string& worker_id : departed_order_) {
      const auto it = departed_.find(worker_id);
      if (it != departed_.end()) f(worker_id, it->second);
    }
  }

 private:
  absl::flat_hash_map<std::string, std::vector<uint64_t>> fenced_;
  std::deque<std::string> fenced_order_;  // its keys, oldest first
  absl::flat_hash_map<std::string, uint64_t> departed_;
  std::deque<std::string> departed_order_;  // oldest first; may name some that came back
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_INCARNATIONS_H_
