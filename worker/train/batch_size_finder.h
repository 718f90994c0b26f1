#ifndef MUSTER_WORKER_TRAIN_BATCH_SIZE_FINDER_H_
#define MUSTER_WORKER_TRAIN_BATCH_SIZE_FINDER_H_

#include <cstdint>
#include <exception>
#include <functional>

#include "worker/collective/comm.h"

namespace muster {

struct BatchSizeOptions {
  int64_t starting_batch_size = 128;
  // The next size to try; must be smaller than its argument. Empty: floor(0.9 * size).
  std::function<int64_t(int64_t)> reduce = nullptr;
  // Called on every rank after an attempt that did not fit on some rank, before the next one: drops
  // what the attempt has left behind. Not called after the last.
  std::function<void()> forget = nullptr;
};

// Finds the largest batch size, of those tried, that fits into memory on every rank: calls
// `attempt` with the starting size and, as long as some rank runs out of memory, with smaller ones.
// After each attempt the ranks agree (a collective), so that all try the same sizes and return the
// same one. Everything that a failed attempt held is destroyed before the next one begins, its
// exception included.
//
// `attempt` may be a step to try or a whole training. If it contains collectives, all ranks must
// run out of memory at the same place in it, as equal ranks with equal batches do: a rank that runs
// out alone leaves the others waiting in theirs, until that times out or fails.
//
// Errors, on every rank alike: c10::Error if no size fits ("no executable batch size found, reached
// zero"), and, where an attempt fails for another reason, that exception on the rank it happened on
// and a c10::Error naming that rank elsewhere.
int64_t FindExecutableBatchSize(Comm& comm, const BatchSizeOptions& options,
                                const std::function<void(int64_t)>& attempt);

// Whether the exception means that memory ran out: c10::OutOfMemoryError, std::bad_alloc, or the
// words of LibTorch's CPU allocator, CUDA, cuBLAS and cuDNN.
bool IsOutOfMemory(const std::exception& error);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_BATCH_SIZE_FINDER_H_
