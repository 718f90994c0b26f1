#include "worker/train/slot_memory.h"

#include <sys/mman.h>

#include <cstdint>

#include "ATen/ops/empty_like.h"

namespace muster {

at::Tensor SlotToReuse(const at::Tensor& slot, size_t references, const at::Tensor& parameter,
                       const at::Tensor& source) {
  if (!slot.defined() || slot.use_count() != references || slot.layout() != at::kStrided ||
      slot.is_inference() || slot.requires_grad() || !slot.storage() ||
      slot.storage().use_count() != 1 || slot.storage().nbytes() < slot.nbytes()) {
    return {};
  }
  const bool fits =
      slot.scalar_type() == parameter.scalar_type() && slot.device() == parameter.device() &&
      slot.sizes() == parameter.sizes() && slot.strides() == parameter.strides() &&
      parameter.is_non_overlapping_and_dense() && source.layout() == at::kStrided &&
      source.sizes() == slot.sizes() &&
      // A converting copy to a GPU needs memory there, and may fail.
      (slot.is_cpu() ||
       (source.scalar_type() == slot.scalar_type() && source.strides() == slot.strides()));
  return fits ? slot : at::Tensor();
}

at::Tensor NewSlot(const at::Tensor& parameter) {
  at::Tensor slot = at::empty_like(parameter).detach();
  if (!slot.is_cpu()) return slot;
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(slot.data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + slot.nbytes()) / kHugePage * kHugePage;
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return slot;
}

}  // namespace muster
