#ifndef MUSTER_UTILS_H_
#define MUSTER_UTILS_H_

#include <cstdint>
#include <functional>

#include "muster/accelerator.h"
#include "worker/train/batch_size_finder.h"
#include "worker/train/local_sgd.h"
#include "worker/train/seed.h"

namespace muster {

// Seeds LibTorch's generators, alike on every process, or each by its own number with
// `device_specific`. Call it before weights are made. `deterministic`: only kernels that give the
// same bits each time.
inline void set_seed(uint64_t seed, bool deterministic = false) {
  SetSeed(seed, 0, {.deterministic = deterministic});
}
inline void set_seed(const Accelerator& accelerator, uint64_t seed, bool device_specific,
                     bool deterministic = false) {
  SetSeed(seed, accelerator.process_index(),
          {.device_specific = device_specific, .deterministic = deterministic});
}

// (collective) Gives every process the random state of process 0.
inline void synchronize_rng_states(Accelerator& accelerator) {
  SynchronizeRng(accelerator.comm(), 0, accelerator.device().is_cuda());
}

// (collective) The largest batch size, of those tried, that fits into memory on every process: see
// FindExecutableBatchSize.
inline int64_t find_executable_batch_size(Accelerator& accelerator, int64_t starting_batch_size,
                                          const std::function<void(int64_t)>& attempt) {
  return FindExecutableBatchSize(accelerator.comm(), {.starting_batch_size = starting_batch_size},
                                 attempt);
}

}  // namespace muster

#endif  // MUSTER_UTILS_H_
