#ifndef MUSTER_WORKER_COLLECTIVE_ALL_TO_ALL_H_
#define MUSTER_WORKER_COLLECTIVE_ALL_TO_ALL_H_

#include <cstdint>
#include <vector>

#include "worker/collective/comm.h"

namespace muster {

// Collective. Sends bytes to each rank and receives bytes from each: all ranks at the same time if
// they have a process group, else one sender after the other. `sent` holds the bytes for rank 0,
// those for rank 1, and so on, to[r] bytes for rank r; `received` gets the bytes of all ranks in
// the same way, from[r] bytes from rank r. Both are 1-D byte tensors on the CPU, contiguous, with
// at least as many elements. Element r of `from` on rank s is element s of `to` on rank r. Blocks
// until everything has arrived. Throws c10::Error; the group is unusable then.
void AllToAllBytes(Comm& comm, const at::Tensor& sent, const std::vector<int64_t>& to,
                   at::Tensor& received, const std::vector<int64_t>& from);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_ALL_TO_ALL_H_
