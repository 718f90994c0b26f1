#include "worker/checkpoint/tensor_uploads.h"

#include <algorithm>
#include <cstring>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "base/status_macros.h"
#include "c10/core/DeviceGuard.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/for_each.h"
#include "worker/checkpoint/memory_ranges.h"
#include "worker/checkpoint/transfer.h"

namespace muster {
namespace {

// The number of bytes that a thread fetches and queues at a time. Less than a block of a
// checkpoint, so that bytes from the page cache, or from memory, are still in the processor's cache
// when they are sent.
constexpr size_t kBlockBytes = size_t{2} << 20;

// A part of a tensor.
struct Piece {
  const TensorUpload* from;
  uint64_t begin, bytes;
  char* to;
};

// Copies that are made together.
struct Batch {
  std::vector<Piece> pieces;
  // The tensors that get values of another type, and those values on the device.
  std::vector<std::pair<at::Tensor, at::Tensor>> converted;
  size_t converted_bytes = 0;
};

absl::Status Upload(const Piece& piece, DeviceUploads& uploads) {
  MUSTER_ASSIGN_OR_RETURN(char* const block, uploads.Take());
  MUSTER_ASSIGN_OR_RETURN(const size_t offset, piece.from->fetch(piece.begin, piece.bytes, block));
  return uploads.Queue(block, {{.offset = offset, .bytes = piece.bytes, .to = piece.to}});
}

absl::Status Run(Batch batch, DeviceUploads& uploads) {
  // The batch's memory may belong to tensors that the device still has to read.
  uploads.Follow();
  absl::Status status = ForEach(batch.pieces.size(), {.threads = uploads.threads()},
                                [&](uint64_t i) { return Upload(batch.pieces[i], uploads); });
  status.Update(uploads.Wait());
  MUSTER_RETURN_IF_ERROR(status);
  for (auto& [to, from] : batch.converted) to.copy_(from);
  return absl::OkStatus();
}

absl::Status UploadTo(const c10::Device& device, const std::vector<TensorUpload>& tensors,
                      const TensorUploadOptions& options) {
  const at::NoGradGuard no_grad;
  // Set the device of this thread, too, because it may fetch.
  const c10::DeviceGuard on_device(device);
  const int threads = options.threads > 0 ? options.threads : ReadingThreads();
  const std::unique_ptr<DeviceUploads> uploads =
      options.uploads != nullptr
          ? options.uploads(device)
          : std::make_unique<DeviceUploads>(
                device, DeviceUploads::Room{
                            .block_bytes = kBlockBytes, .threads = threads, .blocks = 2 * threads});
  Batch batch;
  MemoryRanges written;
  for (const TensorUpload& tensor : tensors) {
    if (tensor.to.device() != device) continue;
    if (written.Overlap(tensor.to)) {
      MUSTER_RETURN_IF_ERROR(Run(std::exchange(batch, Batch()), *uploads));
      written.Clear();
    }
    written.Add(tensor.to);
    at::Tensor to = tensor.to;
    if (tensor.type != to.scalar_type()) {
      if (batch.converted_bytes > 0 &&
          batch.converted_bytes + tensor.bytes > options.converted_bytes) {
        MUSTER_RETURN_IF_ERROR(Run(std::exchange(batch, Batch()), *uploads));
      }
      to = at::empty(to.sizes(), at::TensorOptions(device).dtype(tensor.type));
      batch.converted.emplace_back(tensor.to, to);
      batch.converted_bytes += tensor.bytes;
    } else {
      // Count a change, as an operation would.
      to.unsafeGetTensorImpl()->bump_version();
    }
    auto* const there = static_cast<char*>(to.data_ptr());
    // All but the first begin where a block of the disk does.
    for (uint64_t begin = 0; begin < tensor.bytes;) {
      const uint64_t most = uploads->block_bytes() - (begin == 0 ? tensor.remainder : 0);
      const uint64_t bytes = std::min(most, tensor.bytes - begin);
      batch.pieces.push_back(
          {.from = &tensor, .begin = begin, .bytes = bytes, .to = there + begin});
      begin += bytes;
    }
  }
  return Run(std::move(batch), *uploads);
}

// Uploads pairs as CopyTensors() gets them, all of which can be uploaded.
absl::Status UploadInMemory(const std::vector<std::pair<at::Tensor, at::Tensor>>& tensors,
                            const TensorUploadOptions& options) {
  std::vector<TensorUpload> uploads;
  for (const auto& [to, from] : tensors) {
    uploads.push_back(
        {.to = to,
         .type = from.scalar_type(),
         .bytes = from.nbytes(),
         .fetch = [data = static_cast<const char*>(from.const_data_ptr())](
                      uint64_t begin, size_t size, char* block) -> absl::StatusOr<size_t> {
           std::memcpy(block, data + begin, size);
           return 0;
         }});
  }
  return UploadTensors(uploads, options);
}

// Whether its elements lie one after the other, in order.
bool IsDense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && tensor.storage().data() != nullptr;
}

}  // namespace

bool TakesValues(const at::Tensor& to, at::ScalarType type, uint64_t bytes) {
  return bytes > 0 && !to.is_meta() && IsDense(to) &&
         (type == to.scalar_type() ||
          (c10::isFloatingType(type) && c10::isFloatingType(to.scalar_type()))) &&
         bytes == static_cast<uint64_t>(to.numel()) * c10::elementSize(type);
}

bool TakesUpload(const at::Tensor& to, at::ScalarType type, uint64_t bytes) {
  return !to.is_cpu() && TakesValues(to, type, bytes);
}

absl::Status UploadTensors(const std::vector<TensorUpload>& tensors,
                           const TensorUploadOptions& options) {
  std::vector<c10::Device> devices;
  for (const TensorUpload& tensor : tensors) {
    const c10::Device device = tensor.to.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  for (const c10::Device& device : devices) {
    MUSTER_RETURN_IF_ERROR(UploadTo(device, tensors, options));
  }
  return absl::OkStatus();
}

absl::Status CopyTensors(const std::vector<std::pair<at::Tensor, at::Tensor>>& tensors,
                         const TensorUploadOptions& options) {
  const at::NoGradGuard no_grad;
  const auto is_uploaded = [](const at::Tensor& to, const at::Tensor& from) {
    // Not with a conversion, which would need memory of the device.
    return from.is_cpu() && IsDense(from) && from.sizes() == to.sizes() &&
           from.scalar_type() == to.scalar_type() &&
           TakesUpload(to, from.scalar_type(), from.nbytes());
  };
  uint64_t bytes = 0;
  for (const auto& [to, from] : tensors) bytes += is_uploaded(to, from) ? from.nbytes() : 0;
  bool uploads_any = bytes > 0 && bytes >= options.least_bytes;
  std::vector<std::pair<at::Tensor, at::Tensor>> waiting;
  MemoryRanges written, read;
  const auto upload = [&]() -> absl::Status {
    const absl::Status status = UploadInMemory(waiting, options);
    // If the host has no memory for blocks, copy_() still works.
    if (!status.ok() && !absl::IsResourceExhausted(status)) return status;
    if (!status.ok()) {
      uploads_any = false;
      for (const auto& [to, from] : waiting) at::Tensor(to).copy_(from);
    }
    waiting.clear();
    written.Clear();
    read.Clear();
    return absl::OkStatus();
  };
  for (const auto& [to, from] : tensors) {
    if (uploads_any && is_uploaded(to, from)) {
      waiting.emplace_back(to, from);
      written.Add(to);
      read.Add(from);
      continue;
    }
    // Memory that is written or read in one batch must not overlap another copy.
    if (written.Overlap(to) || written.Overlap(from) || read.Overlap(to)) {
      MUSTER_RETURN_IF_ERROR(upload());
    }
    at::Tensor(to).copy_(from);
  }
  return upload();
}

}  // namespace muster
