#include "worker/checkpoint/weight_fills.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/transfer.h"

namespace muster {
namespace {

// The number of elements that a thread converts at a time: fewer than LibTorch divides among
// threads of its own.
constexpr int64_t kConvertedAtATime = 32'000;

// Converts elements of a file, from byte `begin` on, into another type at `to`. The modes of the
// starting thread (no_grad, inference) do not apply to this one, which sees memory, not the model's
// tensor.
absl::Status Convert(char* to, at::ScalarType to_type, at::ScalarType type, uint64_t begin,
                     absl::string_view piece) {
  try {
    const at::NoGradGuard no_grad;
    const auto width = static_cast<int64_t>(c10::elementSize(type));
    const auto to_width = static_cast<int64_t>(c10::elementSize(to_type));
    const int64_t count = static_cast<int64_t>(piece.size()) / width;
    char* const first = to + static_cast<int64_t>(begin) / width * to_width;
    // If the length of a file's header is odd, its values are not aligned for their type.
    const bool aligned = reinterpret_cast<uintptr_t>(piece.data()) % width == 0;
    at::Tensor moved;
    if (!aligned) moved = at::empty({std::min(kConvertedAtATime, count)}, type);
    for (int64_t at = 0; at < count; at += kConvertedAtATime) {
      const int64_t some = std::min(kConvertedAtATime, count - at);
      const char* values = piece.data() + at * width;
      if (!aligned) {
        std::memcpy(moved.data_ptr(), values, some * width);
        values = static_cast<const char*>(moved.const_data_ptr());
      }
      const at::Tensor from = at::from_blob(const_cast<char*>(values), {some}, type);
      at::from_blob(first + at * to_width, {some}, to_type).copy_(from);
    }
    return absl::OkStatus();
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    // Returned, because a thread must not throw.
    return absl::InternalError(error.what());
  }
}

absl::Status FillOnHost(const WeightFiles& files, const std::vector<WeightFill>& weights,
                        int threads) {
  std::vector<WeightFiles::Reading> readings;
  MemoryRanges filled;
  for (const WeightFill& weight : weights) {
    if (filled.Overlap(weight.to)) {
      MUSTER_RETURN_IF_ERROR(files.ReadAll(std::exchange(readings, {}), threads));
      filled.Clear();
    }
    filled.Add(weight.to);
    MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarType(weight.from->tensor.type));
    // Count a change, as an operation would.
    weight.to.unsafeGetTensorImpl()->bump_version();
    auto* const to = static_cast<char*>(weight.to.data_ptr());
    if (type == weight.to.scalar_type()) {
      readings.push_back({.entry = weight.from, .to = to});
    } else {
      readings.push_back({.entry = weight.from,
                          .take = [to, to_type = weight.to.scalar_type(), type](
                                      uint64_t begin, absl::string_view piece) {
                            return Convert(to, to_type, type, begin, piece);
                          }});
    }
  }
  return files.ReadAll(readings, threads);
}

}  // namespace

bool IsFillable(const WeightEntry& from, const at::Tensor& to) {
  if (!from.tensor.strides.empty()) return false;
  const absl::StatusOr<at::ScalarType> type = ToScalarType(from.tensor.type);
  return type.ok() && TakesValues(to, *type, from.tensor.extent_bytes);
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

void WeightFills::Add(WeightFill weight) {
  targets_.Add(weight.to);
  left_.push_back(std::move(weight));
}

absl::Status WeightFills::MakeBefore(const at::Tensor& copied) {
  return targets_.Overlap(copied) ? Make() : absl::OkStatus();
}

absl::Status WeightFills::Make() {
  targets_.Clear();
  if (left_.empty()) return absl::OkStatus();
  return FillWeights(files_, std::exchange(left_, {}));
}

}  // namespace muster
