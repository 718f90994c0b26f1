#ifndef MUSTER_WORKER_COLLECTIVE_NCCL_H_
#define MUSTER_WORKER_COLLECTIVE_NCCL_H_

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace muster {

// Returns the number of GPUs that this process may use (CUDA_VISIBLE_DEVICES counts); 0 without a
// driver. Loads nothing.
int VisibleGpus();

// Opens LibTorch's CUDA half, after which CUDA tensors work in this process; if the machine has a
// GPU and MUSTER_CPU is not set, this is done before main(). Only the first call does it; later
// calls return the same result. Thread-safe, takes 0.3 s. Errors: FAILED_PRECONDITION without a
// GPU, or if LibTorch was asked for CUDA without it; NOT_FOUND naming the library that is missing
// and the remedy.
absl::Status LoadCuda();

// Adds NCCL to `group` for CUDA tensors and makes it the default. Collective: blocks until all
// ranks have joined. Errors: those of LoadCuda; NOT_FOUND if libmuster_nccl.so is in none of the
// searched places ($MUSTER_NCCL_PLUGIN, beside the program, ../lib, beside libmuster.so);
// FAILED_PRECONDITION for a plug-in of another build; UNAVAILABLE with NCCL's message.
absl::Status AddNcclBackend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            const c10::intrusive_ptr<c10d::Store>& store, c10::Device device,
                            std::chrono::milliseconds timeout, const std::string& name = "world");

// Sets how NCCL groups of this process end from here on, when their last user releases them. True:
// they first send what other ranks have yet to receive, which needs all ranks to be there. False,
// as at the start: at once. Thread-safe.
void FlushNcclAtEnd(bool flush);

// Returns a text such as "2.28.9". Errors: as AddNcclBackend.
absl::StatusOr<std::string> NcclVersion();

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_NCCL_H_
