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

// The least bytes of a tensor that goes to the device. Smaller ones stay on the host, and so do
// tensors of integers: code reads their values.
inline constexpr size_t kLeastOnDevice = size_t{64} << 10;

// Makes the uploads for one file or for several, one after the other. They have blocks for as many
// threads as read a file.
std::unique_ptr<DeviceUploads> UploadsTo(const c10::Device& device);

// Returns how much of the device's memory ReadToDevice() needs for a file; 0 for one that it reads
// to the host.
uint64_t BytesToDevice(const StateReader& reader, absl::string_view name);

// Like StateReader::Read, but puts the large floating-point tensors on the device of `uploads`, as
// parts of one piece of its memory: blocks are copied there while others are read, so the host
// needs memory for a few blocks instead of for the file, also for a checkpoint in memory. Nothing
// is under way when it returns, even with an error. A file of one block, or larger than the device
// has memory for, is read to the host by StateReader::Read. Errors: those of StateReader::Read and
// of `uploads`. Throws c10::Error if the device has failed.
absl::StatusOr<StateDict> ReadToDevice(const StateReader& reader, absl::string_view name,
                                       DeviceUploads& uploads);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_READ_TO_DEVICE_H_
