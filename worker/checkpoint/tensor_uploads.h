#ifndef MUSTER_WORKER_CHECKPOINT_TENSOR_UPLOADS_H_
#define MUSTER_WORKER_CHECKPOINT_TENSOR_UPLOADS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/core/ScalarType.h"
#include "worker/checkpoint/device_uploads.h"

namespace muster {

// Values, stored elsewhere, for a contiguous tensor of a device.
struct TensorUpload {
  at::Tensor to;
  // The type of the values: that of the tensor, or another floating-point type that converts to it.
  at::ScalarType type = at::kFloat;
  uint64_t bytes = 0;
  // Puts bytes of the values somewhere into a block of DeviceUploads, and returns where. It may
  // also overwrite as much of the block before and after them as their first and last
  // kDirectAlignment bytes take.
  std::function<absl::StatusOr<size_t>(uint64_t begin, size_t size, char* block)> fetch;
  // The offset of the first byte of the values, modulo kDirectAlignment.
  size_t remainder = 0;
};

struct TensorUploadOptions {
  // The number of threads that fetch; 0: as many as read a file of a checkpoint.
  int threads = 0;
  // Device memory, at a time, for values that are converted to a tensor's type.
  size_t converted_bytes = size_t{256} << 20;
  // Tensors in memory with fewer bytes in all are copied without uploads; see CopyTensors().
  uint64_t least_bytes = uint64_t{16} << 20;
  // Makes the uploads. Null: those of the process. Others determine themselves how many threads
  // fetch.
  std::function<std::unique_ptr<DeviceUploads>(const c10::Device&)> uploads = nullptr;
};

// Whether `bytes` bytes of values of a type can be written to the memory of a tensor, on the host
// or on a device: it is contiguous, not empty, and of that type or of another floating-point type
// to which values convert. Parameters of offloaded models have no memory.
bool TakesValues(const at::Tensor& to, at::ScalarType type, uint64_t bytes);
// The same, for a tensor on a device: it can be the target of an upload.
bool TakesUpload(const at::Tensor& to, at::ScalarType type, uint64_t bytes);

// Fetches values in several threads, each of which leaves the copies to the device and fetches on.
// If two targets overlap, the later one wins. The values are there when it returns; after an error
// some of them may be, and nothing is under way. Errors: those of `fetch` and of DeviceUploads.
// Throws c10::Error for memory that the device does not have.
absl::Status UploadTensors(const std::vector<TensorUpload>& tensors,
                           const TensorUploadOptions& options = {});

// Copies each second tensor to the first, with the result of copy_() for one pair after the other.
// Large amounts that go from the host's memory to a device are uploaded, because copy_() would use
// one thread and a buffer of the driver for them. Errors: those of DeviceUploads. Throws what
// copy_() throws.
absl::Status CopyTensors(const std::vector<std::pair<at::Tensor, at::Tensor>>& tensors,
                         const TensorUploadOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TENSOR_UPLOADS_H_
