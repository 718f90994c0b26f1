#ifndef MUSTER_TESTS_CHAOS_WEIGHTS_H_
#define MUSTER_TESTS_CHAOS_WEIGHTS_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace muster::chaos {

// The training of chaos_worker, which has no tensors: in each round every rank brings to a barrier
// a value made from its number and the weights of the round before, and all ranks make the weights
// of this round from these values. A worker that missed or doubled an update has different weights
// from then on.

inline uint64_t FoldWeights(uint64_t weights, absl::string_view brought) {
  for (const char c : brought) weights = (weights ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return weights;
}

inline constexpr uint64_t kFirstWeights = 14695981039346656037u;

inline std::string ChaosPayload(int rank, int round, uint64_t weights) {
  return absl::StrCat("r", rank, " round ", round, " from ", absl::Hex(weights));
}

// Returns the weights of a run that nothing disturbs.
inline std::string ChaosWeights(int world_size, int rounds) {
  uint64_t weights = kFirstWeights;
  for (int round = 0; round < rounds; ++round) {
    uint64_t next = weights;
    for (int rank = 0; rank < world_size; ++rank) {
      next = FoldWeights(next, ChaosPayload(rank, round, weights));
    }
    weights = next;
  }
  return absl::StrCat(absl::Hex(weights));
}

}  // namespace muster::chaos

#endif  // MUSTER_TESTS_CHAOS_WEIGHTS_H_
