#ifndef MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
#define MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_

#include <cstdint>

namespace muster {

// How often Muster's own code has changed weights in this process, whichever they are. Versions of
// tensors do not tell: LibTorch's fused kernels of optimizers leave them alone. Thread-safe.
uint64_t WeightChanges();
void NoteWeightChange();

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
