#ifndef MUSTER_WORKER_BIGMODEL_FAKE_GPUS_H_
#define MUSTER_WORKER_BIGMODEL_FAKE_GPUS_H_

#include <cstdint>

#include "c10/core/Device.h"

namespace muster {

// For tests: devices that compute, whose memory is the host's and whose operators are the CPU's. As
// on GPUs, an operator takes tensors of one of them alone, besides numbers (tensors without
// dimensions) of the host. Operators end before their calls return; there is one stream each.
constexpr int kFakeGpus = 4;

// They are there from here on, and are the "0", "1", ... of device maps.
void InstallFakeGpus();

c10::Device FakeGpu(int index);

// Bytes of its tensors.
int64_t BytesOnFakeGpu(int index);
// From now on it has no memory beyond so many bytes; negative: always.
void LimitFakeGpu(int index, int64_t bytes);
// Operators that it has computed.
int64_t OperatorsOnFakeGpu(int index);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_FAKE_GPUS_H_
