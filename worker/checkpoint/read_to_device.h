#ifndef MUSTER_WORKER_CHECKPOINT_READ_TO_DEVICE_H_
#define MUSTER_WORKER_CHECKPOINT_READ_TO_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "c10/core/Device.h"
#include "worker/checkpoint/device_uploads.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/state_dict.h"

namespace muster {

// Smaller tensors stay on the host, and so do those of integers: code reads their values.
inline constexpr size_t kLeastOnDevice = size_t{64} << 10;

// Of one file or of several, one after the other. Blocks for as many threads as read a file.
std::unique_ptr<DeviceUploads> UploadsTo(const c10::Device& device);

// What ReadToDevice() needs of the device's memory for a file; 0 for one that it reads to the host.
uint64_t BytesToDevice(const StateReader& reader, absl::string_view name);

// As StateReader::Read, with the large floating-point tensors on the device of `uploads`, parts of
// one piece of its memory: blocks are copied there while others are read, and the host needs memory
// for a few blocks instead of for the file: also of a checkpoint in memory. Nothing is under way
// when it returns, with an error too. What is of one block, or more than the device has memory for,
// is read as by StateReader::Read, to the host. Errors: those of that, and of `uploads`. Throws
// c10::Error if the device has failed.
absl::StatusOr<StateDict> ReadToDevice(const StateReader& reader, absl::string_view name,
                                       DeviceUploads& uploads);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_READ_TO_DEVICE_H_
