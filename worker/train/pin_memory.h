#ifndef MUSTER_WORKER_TRAIN_PIN_MEMORY_H_
#define MUSTER_WORKER_TRAIN_PIN_MEMORY_H_

#include "c10/core/Device.h"
#include "c10/core/DeviceGuard.h"
#include "worker/checkpoint/aligned_memory.h"

namespace muster {

// Pins memory that `device` copies to and from, if it is a GPU.
inline void PinFor(const c10::Device& device, AlignedMemory* memory) {
  if (!device.is_cuda()) return;
  const HostPinning* const cuda = HostPinning::Cuda();
  if (cuda == nullptr) return;
  // The calling thread may have a different current device, which CUDA would use.
  const c10::DeviceGuard on(device);
  memory->Pin(*cuda);
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_PIN_MEMORY_H_
