#ifndef MUSTER_WORKER_JOB_DEVICE_H_
#define MUSTER_WORKER_JOB_DEVICE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "worker/collective/comm.h"
#include "worker/job/environment.h"

namespace muster {

// The device of this process: the CPU if the environment asks for it or no GPU is visible (in a job
// of several processes too: they are still one job), else GPU number local_rank of those that it
// sees, counted round: each process may see its own alone. Loads CUDA in that case. A driver that
// fails is no GPU, too, and a warning. Errors: those of LoadCuda.
absl::StatusOr<c10::Device> ChooseDevice(const Environment& environment);

// Where ChooseDevice finds no GPU: "no GPU is visible", or the error of the driver.
std::string WhyNoGpu();

// (collective) Makes sure that all ranks of `comm` are on GPUs, or all on the CPU, before they
// connect GPUs: NCCL waits for good for a rank that does not come. `usable`: whether this rank can
// connect its own. Errors, on every rank: FAILED_PRECONDITION that names a rank on the CPU and one
// on a GPU, or a rank that is not usable and why; on this one `usable` itself; INVALID_ARGUMENT for
// two ranks on one GPU, which NCCL cannot share. Throws what the collective throws.
absl::Status AgreeOnDevices(Comm& comm, c10::Device device, const absl::Status& usable);

// Makes `device` the calling thread's current one if it is a GPU: tensors of plain "cuda", streams
// and allocations of libraries go there, and not to GPU 0. After ChooseDevice. Throws c10::Error
// for a GPU that is not there.
void MakeCurrent(c10::Device device);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_DEVICE_H_
