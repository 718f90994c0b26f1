#ifndef MUSTER_WORKER_PARALLEL_UNIT_HISTORY_H_
#define MUSTER_WORKER_PARALLEL_UNIT_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "worker/parallel/packed_numbers.h"

namespace muster {

// The units of a sharded model that were gathered and reduced since the last comparison, in order.
// Ranks compare digests, and the events only if these differ, for the message. Only the first
// events are kept, since a program that never compares would otherwise keep more and more. Not
// thread-safe.
class UnitHistory {
 public:
  void AddGather(uint32_t unit) { Add(unit * 2); }
  void AddReduction(uint32_t unit) { Add(unit * 2 + 1); }
  void Clear() { *this = UnitHistory(); }

  uint32_t digest() const { return digest_.value(); }
  uint32_t size() const { return size_; }
  // The first events, for Difference().
  const std::vector<uint32_t>& events() const { return events_; }

  // Describes how the events() of ranks, of which some differ, differ: names the first event in
  // which a rank differs from rank 0. `name`: the name of a unit.
  static std::string Difference(const std::vector<std::vector<uint32_t>>& of_ranks,
                                const std::function<std::string(uint32_t unit)>& name);

 private:
  static constexpr size_t kListed = size_t{1} << 14;

  void Add(uint32_t event);

  std::vector<uint32_t> events_;
  uint32_t size_ = 0;
  NumberDigest digest_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_UNIT_HISTORY_H_
