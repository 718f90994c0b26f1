#ifndef MUSTER_COORDINATOR_DEDUPE_H_
#define MUSTER_COORDINATOR_DEDUPE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace muster::coordinator {

// Answers already given, by (worker_id, incarnation, request_id), so that a repeated request has no
// second effect. For each worker, the latest `keep` requests are known, and the latest of their
// answers, `keep_bytes` together but at least one, are held. An id below all of these requests
// counts as forgotten; one among them that never came is new, because ids of a worker must grow but
// may overtake each other on the way. `Value` is the answer. Not thread-safe.
template <typename Value>
class Dedupe {
 public:
  enum class State { kNew, kKnown, kReused, kForgotten };

  Dedupe(size_t keep, size_t keep_bytes) : keep_(keep), keep_bytes_(keep_bytes) {}

  // kKnown: `*value` is the first answer. kReused: same id, other request. kForgotten: too old to
  // decide.
  State Find(absl::string_view worker_id, uint64_t incarnation, uint64_t request_id,
             uint64_t request_hash, Value* value) const {
    const auto it = workers_.find(worker_id);
    if (it == workers_.end() || it->second.incarnation != incarnation) return State::kNew;
    const auto at = it->second.answers.find(request_id);
    if (at == it->second.answers.end()) {
      return request_id <= it->second.forgotten ? State::kForgotten : State::kNew;
    }
    if (at->second.hash != request_hash) return State::kReused;
    if (at->second.dropped) return State::kForgotten;
    *value = at->second.value;
    return State::kKnown;
  }

  // `bytes` is about how much memory `value` takes. A new incarnation of a worker starts empty.
  void Store(absl::string_view worker_id, uint64_t incarnation, uint64_t request_id,
             uint64_t request_hash, Value value, size_t bytes) {
    Worker& worker = workers_[worker_id];
    if (worker.incarnation != incarnation) {
      worker = Worker();
      worker.incarnation = incarnation;
    }
    const auto [at, is_new] = worker.answers.try_emplace(request_id);
    if (at->second.dropped) return;
    worker.bytes += bytes - at->second.bytes;
    at->second = Stored{request_hash, bytes, false, std::move(value)};
    if (!is_new) return;
    worker.order.push_back(request_id);
    while (worker.bytes > keep_bytes_ && worker.order.size() - worker.dropped > 1) {
      Stored& oldest = worker.answers.find(worker.order[worker.dropped])->second;
      worker.bytes -= oldest.bytes;
      oldest = Stored{oldest.hash, 0, true, Value()};
      ++worker.dropped;
    }
    while (worker.order.size() > keep_) {
      const auto oldest = worker.answers.find(worker.order.front());
      worker.forgotten = std::max(worker.forgotten, worker.order.front());
      worker.bytes -= oldest->second.bytes;
      if (oldest->second.dropped) --worker.dropped;
      worker.answers.erase(oldest);
      worker.order.pop_front();
    }
  }

  void Forget(absl::string_view worker_id) { workers_.erase(worker_id); }
  bool Knows(absl::string_view worker_id) const { return workers_.contains(worker_id); }
  // Notes that ids of this worker up to this one that are not kept were answered once, as a
  // snapshot says. Smaller ones may be kept: the snapshot says so before or after this.
  void NoteForgotten(absl::string_view worker_id, uint64_t incarnation, uint64_t request_id) {
    Worker& worker = workers_[worker_id];
    if (worker.incarnation != incarnation) {
      worker = Worker();
      worker.incarnation = incarnation;
    }
    worker.forgotten = std::max(worker.forgotten, request_id);
  }
  // Forgets the answers to ids of this worker up to this one.
  void ForgetUpTo(absl::string_view worker_id, uint64_t incarnation, uint64_t request_id) {
    NoteForgotten(worker_id, incarnation, request_id);
    Worker& worker = workers_.find(worker_id)->second;
    std::deque<uint64_t> kept;
    for (const uint64_t id : std::exchange(worker.order, {})) {
      if (id > request_id) {
        kept.push_back(id);
        continue;
      }
      const auto at = worker.answers.find(id);
      worker.bytes -= at->second.bytes;
      if (at->second.dropped) --worker.dropped;
      worker.answers.erase(at);
    }
    worker.order = std::move(kept);
    if (worker.order.empty()) worker.answers = {};
  }

  // Calls f(worker_id, incarnation, request_id) for each worker with answers that are kept, with
  // the largest id of these.
  template <typename F>
  void ForEachNewest(F f) const {
    for (const auto& [worker_id, worker] : workers_) {
      if (worker.order.empty()) continue;
      f(worker_id, worker.incarnation, *std::max_element(worker.order.begin(), worker.order.end()));
    }
  }

  // Calls f(worker_id, incarnation, request_id) for each worker of which something was dropped,
  // with the largest dropped id: a core that knows only this takes every id up to it that is not
  // kept for forgotten.
  template <typename F>
  void ForEachForgotten(F f) const {
    for (const auto& [worker_id, worker] : workers_) {
      uint64_t last = worker.forgotten;
      for (size_t i = 0; i < worker.dropped; ++i) last = std::max(last, worker.order[i]);
      if (last > 0) f(worker_id, worker.incarnation, last);
    }
  }

  // Calls f(worker_id, incarnation, request_id, hash, value) in no particular order of workers,
  // oldest first in each.
  template <typename F>
  void ForEach(F f) const {
    for (const auto& [worker_id, worker] : workers_) {
      for (const uint64_t id : worker.order) {
        const Stored& stored = worker.answers.find(id)->second;
        if (stored.dropped) continue;
        f(worker_id, worker.incarnation, id, stored.hash, stored.value);
      }
    }
  }

 private:
  struct Stored {
    uint64_t hash = 0;
    size_t bytes = 0;
    bool dropped = false;  // `value` was
    Value value;
  };
  struct Worker {
    uint64_t incarnation = 0;
    uint64_t forgotten = 0;  // the largest id of which nothing is known any longer
    absl::flat_hash_map<uint64_t, Stored> answers;
    std::deque<uint64_t> order;
    size_t dropped = 0;  // how many at the front of `order` have lost their values
    size_t bytes = 0;
  };
  const size_t keep_;
  const size_t keep_bytes_;
  absl::flat_hash_map<std::string, Worker> workers_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_DEDUPE_H_
