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
  // Called on every rank after an attempt that did not fit on some rank, before the next attempt,
  // to drop what the attempt left behind. Not called after the last one.
  std::function<void()> forget = nullptr;
};

// Returns the largest batch size tried that fits into memory on every rank. Calls `attempt` with
// the starting size and, as long as some rank runs out of memory, with smaller ones. After each
// attempt the ranks agree (a collective), so that all try the same sizes and return the same one.
// Everything that a failed attempt held, including its exception, is destroyed before the next one
// begins.
//
// `attempt` may be a trial step or a whole training run. If it contains collectives, all ranks must
// run out of memory at the same place in it, as equal ranks with equal batches do: a rank that runs
// out alone leaves the others waiting in a collective until that times out or fails.
//
// Errors, on every rank: c10::Error if no size fits ("no executable batch size found, reached
// zero"). If an attempt fails for another reason: that exception on the failing rank, and a
// c10::Error naming that rank on the others. c10::Error, too, if ranks try different sizes.
int64_t FindExecutableBatchSize(Comm& comm, const BatchSizeOptions& options,
                                const std::function<void(int64_t)>& attempt);

// Whether the exception means that memory ran out: c10::OutOfMemoryError, std::bad_alloc, or the
// messages of LibTorch's CPU allocator, CUDA, cuBLAS and cuDNN.
bool IsOutOfMemory(const std::exception& error);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_BATCH_SIZE_FINDER_H_
