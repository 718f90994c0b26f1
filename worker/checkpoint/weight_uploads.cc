#include "worker/checkpoint/weight_uploads.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "base/status_macros.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/ScalarType.h"
#include "worker/checkpoint/for_each.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/transfer.h"

namespace muster {
namespace {

// What a thread reads and queues at a time. Less than a block of a checkpoint: files of weights
// come through the page cache, and a small block is still in the processor's when it is sent.
constexpr size_t kBlockBytes = size_t{2} << 20;

// Part of a tensor.
struct Piece {
  const WeightEntry* from;
  uint64_t begin, bytes;  // of its extent
  char* to;
};

// Copies that are made at a time.
struct Batch {
  std::vector<Piece> pieces;
  // The tensors that get a value of another type, and that on the device.
  std::vector<std::pair<at::Tensor, at::Tensor>> converted;
  size_t converted_bytes = 0;
};

absl::Status Upload(const WeightFiles& files, const Piece& piece, DeviceUploads& uploads) {
  MUSTER_ASSIGN_OR_RETURN(char* const block, uploads.Take());
  WeightEntry part{.tensor = {.name = piece.from->tensor.name,
                              .type = piece.from->tensor.type,
                              .begin = piece.from->tensor.begin + piece.begin,
                              .extent_bytes = piece.bytes},
                   .file = piece.from->file};
  MUSTER_RETURN_IF_ERROR(files.Read(part, block));
  return uploads.Queue(block, {{.offset = 0, .bytes = piece.bytes, .to = piece.to}});
}

absl::Status Run(const WeightFiles& files, Batch batch, int threads, DeviceUploads& uploads) {
  // Memory of the batch may be that of tensors which the device still has to read.
  uploads.Follow();
  absl::Status status = ForEach(batch.pieces.size(), {.threads = threads}, [&](uint64_t i) {
    return Upload(files, batch.pieces[i], uploads);
  });
  status.Update(uploads.Wait());
  MUSTER_RETURN_IF_ERROR(status);
  for (auto& [to, from] : batch.converted) to.copy_(from);
  return absl::OkStatus();
}

absl::Status UploadTo(const c10::Device& device, const WeightFiles& files,
                      const std::vector<WeightUpload>& weights,
                      const UploadWeightsOptions& options) {
  const at::NoGradGuard no_grad;
  // Of this thread, which may read, too.
  const c10::DeviceGuard on_device(device);
  const int threads = options.threads > 0 ? options.threads : ReadingThreads();
  const std::unique_ptr<DeviceUploads> uploads =
      options.uploads != nullptr
          ? options.uploads(device)
          : std::make_unique<DeviceUploads>(device, kBlockBytes, 2 * threads);
  Batch batch;
  for (const WeightUpload& weight : weights) {
    if (weight.to.device() != device) continue;
    const StoredTensor& stored = weight.from->tensor;
    MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarType(stored.type));
    at::Tensor to = weight.to;
    if (type != weight.to.scalar_type()) {
      if (batch.converted_bytes > 0 &&
          batch.converted_bytes + stored.extent_bytes > options.converted_bytes) {
        MUSTER_RETURN_IF_ERROR(Run(files, std::exchange(batch, Batch()), threads, *uploads));
      }
      to = at::empty(weight.to.sizes(), at::TensorOptions(device).dtype(type));
      batch.converted.emplace_back(weight.to, to);
      batch.converted_bytes += stored.extent_bytes;
    } else {
      // An operation would count as a change.
      to.unsafeGetTensorImpl()->bump_version();
    }
    auto* const there = static_cast<char*>(to.data_ptr());
    for (uint64_t begin = 0; begin < stored.extent_bytes; begin += uploads->block_bytes()) {
      batch.pieces.push_back(
          {.from = weight.from,
           .begin = begin,
           .bytes = std::min<uint64_t>(uploads->block_bytes(), stored.extent_bytes - begin),
           .to = there + begin});
    }
  }
  return Run(files, std::move(batch), threads, *uploads);
}

}  // namespace

bool IsUploadable(const WeightEntry& from, const at::Tensor& to) {
  if (to.is_cpu() || to.is_meta() || to.layout() != at::kStrided || !to.is_contiguous() ||
      to.is_conj() || to.is_neg() || !from.tensor.strides.empty() ||
      from.tensor.extent_bytes == 0) {
    return false;
  }
  const absl::StatusOr<at::ScalarType> type = ToScalarType(from.tensor.type);
  return type.ok() &&
         (*type == to.scalar_type() ||
          (c10::isFloatingType(*type) && c10::isFloatingType(to.scalar_type()))) &&
         from.tensor.extent_bytes == static_cast<uint64_t>(to.numel()) * c10::elementSize(*type);
}

absl::Status UploadWeights(const WeightFiles& files, const std::vector<WeightUpload>& weights,
                           const UploadWeightsOptions& options) {
  std::vector<c10::Device> devices;
  for (const WeightUpload& weight : weights) {
    const c10::Device device = weight.to.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  for (const c10::Device& device : devices) {
    MUSTER_RETURN_IF_ERROR(UploadTo(device, files, weights, options));
  }
  return absl::OkStatus();
}

}  // namespace muster
