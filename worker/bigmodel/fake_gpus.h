#ifndef MUSTER_WORKER_BIGMODEL_FAKE_GPUS_H_
#define MUSTER_WORKER_BIGMODEL_FAKE_GPUS_H_

#include <cstdint>

#include "c10/core/Device.h"

namespace muster {

// Devices for tests, whose memory is the host's and whose operators are the CPU's. As on GPUs, an
// operator takes only tensors of one of them, besides numbers (tensors without dimensions) of the
// host. Operators end before their calls return; each device has one stream.
constexpr int kFakeGpus = 4;

// Installs the devices, which are the "0", "1", ... of device maps from then on.
void InstallFakeGpus();

c10::Device FakeGpu(int index);

// The bytes of its tensors.
int64_t BytesOnFakeGpu(int index);
// Limits its memory to `bytes` bytes from now on; negative: no limit.
void LimitFakeGpu(int index, int64_t bytes);
// The number of operators that it has computed.
int64_t OperatorsOnFakeGpu(int index);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_FAKE_GPUS_H_
