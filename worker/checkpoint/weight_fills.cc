#include "worker/checkpoint/weight_fills.h"

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "base/status_macros.h"
#include "c10/core/ScalarType.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/transfer.h"

namespace muster {
namespace {

bool IsInMemory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_conj() && !tensor.is_neg();
}

absl::Status FillOnHost(const WeightFiles& files, const std::vector<WeightFill>& weights,
                        int threads) {
  std::vector<WeightFiles::Reading> in_place;
  std::vector<const WeightFill*> converted;
  for (const WeightFill& weight : weights) {
    MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarType(weight.from->tensor.type));
    if (type != weight.to.scalar_type()) {
      converted.push_back(&weight);
      continue;
    }
    // An operation would count as a change.
    weight.to.unsafeGetTensorImpl()->bump_version();
    in_place.push_back({.entry = weight.from, .to = static_cast<char*>(weight.to.data_ptr())});
  }
  MUSTER_RETURN_IF_ERROR(files.ReadAll(in_place, threads));
  for (const WeightFill* const weight : converted) {
    MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarType(weight->from->tensor.type));
    const at::Tensor read = at::empty(weight->to.sizes(), type);
    MUSTER_RETURN_IF_ERROR(files.ReadAll(
        {{.entry = weight->from, .to = static_cast<char*>(read.data_ptr())}}, threads));
    at::Tensor(weight->to).copy_(read);
  }
  return absl::OkStatus();
}

}  // namespace

bool IsFillable(const WeightEntry& from, const at::Tensor& to) {
  if (!from.tensor.strides.empty() || from.tensor.extent_bytes == 0) return false;
  const absl::StatusOr<at::ScalarType> type = ToScalarType(from.tensor.type);
  if (!type.ok()) return false;
  if (!to.is_cpu()) return TakesUpload(to, *type, from.tensor.extent_bytes);
  return IsInMemory(to) &&
         (*type == to.scalar_type() ||
          (c10::isFloatingType(*type) && c10::isFloatingType(to.scalar_type()))) &&
         from.tensor.extent_bytes == static_cast<uint64_t>(to.numel()) * c10::elementSize(*type);
}

absl::Status FillWeights(const WeightFiles& files, const std::vector<WeightFill>& weights,
                         const TensorUploadOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<WeightFill> on_host;
  std::vector<TensorUpload> uploads;
  for (const WeightFill& weight : weights) {
    if (weight.to.is_cpu()) {
      on_host.push_back(weight);
      continue;
    }
    const WeightEntry* const entry = weight.from;
    MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarType(entry->tensor.type));
    uploads.push_back(
        {.to = weight.to,
         .type = type,
         .bytes = entry->tensor.extent_bytes,
         .fetch = [&files, entry](uint64_t begin, size_t bytes,
                                  char* block) { return files.Fetch(*entry, begin, bytes, block); },
         .remainder = static_cast<size_t>(entry->tensor.begin % kDirectAlignment)});
  }
  MUSTER_RETURN_IF_ERROR(
      FillOnHost(files, on_host, options.threads > 0 ? options.threads : ReadingThreads()));
  return uploads.empty() ? absl::OkStatus() : UploadTensors(uploads, options);
}

}  // namespace muster
