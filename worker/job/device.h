#ifndef MUSTER_WORKER_JOB_DEVICE_H_
#define MUSTER_WORKER_JOB_DEVICE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "worker/collective/comm.h"
#include "worker/job/environment.h"

namespace muster {

// Returns the device of this process: the CPU if the environment asks for it or no GPU is visible
// (even in a job of several processes, which are still one job); otherwise GPU number local_rank,
// modulo the number of visible GPUs, because each process may see only its own. Loads CUDA in that
// case. A driver that fails counts as no GPU and causes a warning. Errors: those of LoadCuda.
absl::StatusOr<c10::Device> ChooseDevice(const Environment& environment);

// Returns why ChooseDevice finds no GPU: "no GPU is visible", or the error of the driver.
std::string WhyNoGpu();

// (collective) Checks that all ranks of `comm` are on GPUs, or all on the CPU, before they connect
// GPUs, because NCCL waits forever for a rank that does not come. `usable`: whether this rank can
// connect its GPU. Errors, on every rank: FAILED_PRECONDITION that names a rank on the CPU and one
// on a GPU, or a rank that is not usable and why; on this one `usable` itself; INVALID_ARGUMENT for
// two ranks on one GPU, which NCCL cannot share. Throws what the collective throws.
absl::Status AgreeOnDevices(Comm& comm, c10::Device device, const absl::Status& usable);

// Makes `device` the calling thread's current one if it is a GPU: tensors of plain "cuda", streams
// and allocations of libraries go there, and not to GPU 0. To be called after ChooseDevice. Throws
// c10::Error for a GPU that does not exist.
void MakeCurrent(c10::Device device);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_DEVICE_H_
