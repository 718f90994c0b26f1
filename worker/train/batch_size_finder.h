#ifndef MUSTER_WORKER_TRAIN_BATCH_SIZE_FINDER_H_
#define MUSTER_WORKER_TRAIN_BATCH_SIZE_FINDER_H_

#include <cstdint>
#include <exception>
#include <functional>

#include "worker/process/comm.h"

namespace muster {

struct BatchSizeOptions {
  int64_t starting_batch_size = 128;
  // The next size to try; must be smaller than its argument. Empty: floor(0.9 * size).
  std::function<int64_t(int64_t)> reduce = nullptr;
};

// Finds the largest batch size, of those tried, that fits into memory on every rank: calls
// `attempt` with the starting size and, as long as some rank runs out of memory, with smaller ones.
// After each attempt the ranks agree (a collective), so that all try the same sizes and return the
// same one.
//
// `attempt` itself must not contain collectives: a rank out of memory would leave the others
// waiting in them. A forward and backward pass and an optimizer step without data parallelism is
// the thing to try.
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
