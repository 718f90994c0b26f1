#ifndef MUSTER_WORKER_CHECKPOINT_WEIGHT_UPLOADS_H_
#define MUSTER_WORKER_CHECKPOINT_WEIGHT_UPLOADS_H_

#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "worker/checkpoint/device_uploads.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {

// A tensor of files, and the tensor that gets it.
struct WeightUpload {
  const WeightEntry* from = nullptr;
  at::Tensor to;
};

// Whether UploadWeights() takes it: contiguous there and here, on a device, and not empty. Its type
// may be another one here, floating as in the file.
bool IsUploadable(const WeightEntry& from, const at::Tensor& to);

struct UploadWeightsOptions {
  // That read; 0: as many as read a file of a checkpoint.
  int threads = 0;
  // Memory of the device for tensors that have another type in the files, at a time.
  size_t converted_bytes = size_t{256} << 20;
  // Null: those of the process.
  std::function<std::unique_ptr<DeviceUploads>(const c10::Device&)> uploads = nullptr;
};

// Reads weights in several threads, each of which leaves the copies to the device and reads on.
// They are there when it returns; after an error some of them may be, and nothing is under way.
// Errors: those of WeightFiles::Read and DeviceUploads. Throws c10::Error for memory that the
// device has not.
absl::Status UploadWeights(const WeightFiles& files, const std::vector<WeightUpload>& weights,
                           const UploadWeightsOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_UPLOADS_H_
