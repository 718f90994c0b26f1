#include "worker/checkpoint/shared_elements.h"

#include <algorithm>
#include <cstdint>

#include "ATen/MemoryOverlap.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "worker/checkpoint/tensor_memory.h"

namespace muster {
namespace {

using Read = absl::FunctionRef<absl::StatusOr<at::Tensor>(size_t)>;

// A target's memory: from its first element to the end of its last one.
struct Span {
  size_t place;
  const char *begin, *end;
};

Span SpanOf(size_t place, const at::Tensor& target) {
  int64_t last = 0;
  for (int64_t i = 0; i < target.dim(); ++i) last += (target.size(i) - 1) * target.stride(i);
  const auto* const begin = static_cast<const char*>(target.const_data_ptr());
  return {.place = place,
          .begin = begin,
          .end = begin + (last + 1) * static_cast<int64_t>(target.element_size())};
}

// Compares targets whose spans, ordered by their beginning, overlap, with copies into other memory.
absl::Status CompareOverlapping(absl::string_view what, const NamedTensors& targets,
                                const std::vector<Span>& spans, Read read,
                                std::vector<size_t>* replaced) {
  const at::ScalarType type = targets[spans[0].place].second.scalar_type();
  const auto width = static_cast<int64_t>(c10::elementSize(type));
  int64_t bytes = 0;
  for (const Span& span : spans) {
    const at::Tensor& target = targets[span.place].second;
    // These cannot be compared: a target with internal overlap cannot be copied to, and elements of
    // other types or at other offsets do not correspond.
    if (at::has_internal_overlap(target) == at::MemOverlap::Yes || target.scalar_type() != type ||
        (span.begin - spans[0].begin) % width != 0) {
      return absl::OkStatus();
    }
    bytes = std::max(bytes, span.end - spans[0].begin);
  }
  absl::Status status;
  MUSTER_RETURN_IF_ERROR(WithMemory(
      PlaceOfTensor(what, targets[spans[0].place].first), 3 * static_cast<uint64_t>(bytes),
      absl::StrCat("to be compared with ", spans.size() - 1,
                   " others that share its memory here: a machine with more memory may load it"),
      [&] {
        status = [&]() -> absl::Status {
          const at::NoGradGuard no_grad;
          const at::Tensor memory = at::empty({bytes / width}, at::TensorOptions().dtype(type));
          const auto view = [&](const Span& span) {
            const at::Tensor& target = targets[span.place].second;
            const at::Tensor part = memory.as_strided(target.sizes(), target.strides(),
                                                      (span.begin - spans[0].begin) / width);
            const at::Tensor plain = target.is_conj() ? part.conj() : part;
            return target.is_neg() ? plain._neg_view() : plain;
          };
          for (const Span& span : spans) {
            MUSTER_ASSIGN_OR_RETURN(const at::Tensor value, read(span.place));
            view(span).copy_(value);
          }
          for (const Span& span : spans) {
            MUSTER_ASSIGN_OR_RETURN(const at::Tensor value, read(span.place));
            if (!SameBytes(view(span), value, type)) replaced->push_back(span.place);
          }
          return absl::OkStatus();
        }();
      }));
  return status;
}

}  // namespace

bool HasMemory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_meta() && tensor.numel() > 0 &&
         tensor.has_storage() && tensor.storage().data() != nullptr;
}

std::string TensorIdentity(const at::Tensor& tensor) {
  if (!HasMemory(tensor)) {
    return absl::StrCat(reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()));
  }
  return absl::StrCat(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), " ",
                      tensor.device().str(), " ", c10::toString(tensor.scalar_type()), " ",
                      absl::StrJoin(tensor.sizes(), ","), " ", absl::StrJoin(tensor.strides(), ","),
                      tensor.is_conj() ? " conj" : "", tensor.is_neg() ? " neg" : "");
}

absl::StatusOr<std::vector<size_t>> ElementsReplaced(absl::string_view what,
                                                     const NamedTensors& targets, Read read) {
  std::vector<Span> spans;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (HasMemory(targets[i].second)) spans.push_back(SpanOf(i, targets[i].second));
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<size_t> replaced;
  std::vector<Span> overlapping;
  const char* end = nullptr;
  const auto compare = [&] {
    return overlapping.size() < 2 ? absl::OkStatus()
                                  : CompareOverlapping(what, targets, overlapping, read, &replaced);
  };
  for (const Span& span : spans) {
    if (!overlapping.empty() && span.begin >= end) {
      MUSTER_RETURN_IF_ERROR(compare());
      overlapping.clear();
    }
    end = overlapping.empty() ? span.end : std::max(end, span.end);
    overlapping.push_back(span);
  }
  MUSTER_RETURN_IF_ERROR(compare());
  return replaced;
}

}  // namespace muster
