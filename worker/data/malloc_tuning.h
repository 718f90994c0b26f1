#ifndef MUSTER_WORKER_DATA_MALLOC_TUNING_H_
#define MUSTER_WORKER_DATA_MALLOC_TUNING_H_

namespace muster {

// Makes glibc keep freed memory of the size of batches and activations instead of returning it to
// the kernel, which would have to map it again, page by page, for the next batch: shuffled token
// batches come 3 times faster. Costs at most 256 MiB of idle memory. Leaves everything alone if a
// MALLOC_ variable of glibc is set. Once per process.
void KeepFreedBatchMemory();

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_MALLOC_TUNING_H_
