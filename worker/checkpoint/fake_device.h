#ifndef MUSTER_WORKER_CHECKPOINT_FAKE_DEVICE_H_
#define MUSTER_WORKER_CHECKPOINT_FAKE_DEVICE_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/fake_streams.h"

namespace muster {

// For tests: a device whose memory is the host's, of a type that LibTorch for CPUs implements
// nothing for. Its streams are FakeStreams: what it is given is done at once, and is known to be
// ordered or not.
FakeStreams& FakeDevice();

// A tensor there, with memory of its own.
at::Tensor OnFakeDevice(const std::vector<float>& values);
// Its values, without an operation.
std::vector<float> ValuesOf(const at::Tensor& tensor);
// Writes them as an operator does: counted as a change, and queued on the current stream.
void SetValues(const at::Tensor& tensor, float value);

// Copies from the device to the host, and to the device, since the process began, each on the
// stream that was current.
std::vector<FakeStreams::Point> CopiesFromFakeDevice();
std::vector<FakeStreams::Point> CopiesToFakeDevice();

// Bytes that the device's allocator (of at::empty(), at::empty_strided(), clone()) has given: now,
// and the most since LimitFakeDevice(). They hold nothing that a test would take for a value.
struct FakeDeviceMemory {
  int64_t now = 0, peak = 0;
};
FakeDeviceMemory MemoryOfFakeDevice();
// From now on they throw c10::OutOfMemoryError beyond so many bytes; negative: never.
void LimitFakeDevice(int64_t bytes);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FAKE_DEVICE_H_
