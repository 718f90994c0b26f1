#ifndef MUSTER_WORKER_CHECKPOINT_FAKE_DEVICE_H_
#define MUSTER_WORKER_CHECKPOINT_FAKE_DEVICE_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/fake_streams.h"

namespace muster {

// A device for tests, whose memory is the host's, of a type for which LibTorch for CPUs implements
// nothing. Its streams are FakeStreams: work that is queued is done at once, and the streams record
// whether it was ordered.
FakeStreams& FakeDevice();

// Makes a tensor on the device, with memory of its own.
at::Tensor OnFakeDevice(const std::vector<float>& values);
// Returns the tensor's values, without an operation.
std::vector<float> ValuesOf(const at::Tensor& tensor);
// Writes values as an operator does: counted as a change, and queued on the current stream.
void SetValues(const at::Tensor& tensor, float value);

// The copies from the device to the host, and to the device, since the process began, each with the
// stream that was current.
std::vector<FakeStreams::Point> CopiesFromFakeDevice();
std::vector<FakeStreams::Point> CopiesToFakeDevice();

// The bytes that the device's allocator (of at::empty(), at::empty_strided(), clone()) has given
// out: now, and the most since LimitFakeDevice(). They hold nothing that a test would take for a
// value.
struct FakeDeviceMemory {
  int64_t now = 0, peak = 0;
};
FakeDeviceMemory MemoryOfFakeDevice();
// Makes allocations beyond `bytes` bytes throw c10::OutOfMemoryError from now on; negative: never.
void LimitFakeDevice(int64_t bytes);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FAKE_DEVICE_H_
