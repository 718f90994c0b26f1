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

// Values for a tensor of a device, contiguous as it is, that lie elsewhere.
struct TensorUpload {
  at::Tensor to;
  // Of the values: that of the tensor, or another floating-point type that converts to it.
  at::ScalarType type = at::kFloat;
  uint64_t bytes = 0;
  // Puts bytes of the values somewhere into a block of DeviceUploads, and returns where. It may
  // take as much of the block before and after them as fills their first and last kDirectAlignment.
  std::function<absl::StatusOr<size_t>(uint64_t begin, size_t size, char* block)> fetch;
  // The offset of the first byte of the values, modulo kDirectAlignment.
  size_t remainder = 0;
};

struct TensorUploadOptions {
  // That fetch; 0: as many as read a file of a checkpoint.
  int threads = 0;
  // Memory of the device for tensors that get values of another type, at a time.
  size_t converted_bytes = size_t{256} << 20;
  // Tensors in memory of fewer bytes in all are copied without; see CopyTensors().
  uint64_t least_bytes = uint64_t{16} << 20;
  // Null: those of the process. Others say by themselves how many threads fetch.
  std::function<std::unique_ptr<DeviceUploads>(const c10::Device&)> uploads = nullptr;
};

// Whether so many bytes of values of a type can be written where a tensor has its memory, on the
// host or on a device: contiguous, not empty, and of its type or of another floating-point one that
// converts to it. Parameters of offloaded models have no memory.
bool TakesValues(const at::Tensor& to, at::ScalarType type, uint64_t bytes);
// The same, of a tensor on a device: it can be the target of an upload.
bool TakesUpload(const at::Tensor& to, at::ScalarType type, uint64_t bytes);

// Fetches values in several threads, each of which leaves the copies to the device and fetches on.
// Where two targets overlap, the later one wins. The values are there when it returns; after an
// error some of them may be, and nothing is under way.
// Errors: those of `fetch` and of DeviceUploads. Throws c10::Error for memory that the device has
// not.
absl::Status UploadTensors(const std::vector<TensorUpload>& tensors,
                           const TensorUploadOptions& options = {});

// Copies each second tensor to the first, with the result of copy_() for one pair after the other.
// What goes from the host's memory to a device in large amounts is uploaded: copy_() would leave it
// to one thread and a buffer of the driver. Errors: those of DeviceUploads. Throws what copy_()
// throws.
absl::Status CopyTensors(const std::vector<std::pair<at::Tensor, at::Tensor>>& tensors,
                         const TensorUploadOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TENSOR_UPLOADS_H_
