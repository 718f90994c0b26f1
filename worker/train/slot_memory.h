#ifndef MUSTER_WORKER_TRAIN_SLOT_MEMORY_H_
#define MUSTER_WORKER_TRAIN_SLOT_MEMORY_H_

#include <cstddef>

#include "ATen/core/Tensor.h"

namespace muster {

// Memory for an optimizer's state that is being loaded: new pages cost several times as much as the
// copy into them.

// Returns `slot`, the tensor that now holds this state of `parameter`, if the values of `source`
// fit there and only the optimizer uses its memory: all references to the tensor are the
// `references` of the optimizer, including this one. Undefined: it cannot be reused.
at::Tensor SlotToReuse(const at::Tensor& slot, size_t references, const at::Tensor& parameter,
                       const at::Tensor& source);

// Returns a tensor like `parameter`, with undefined values, in huge pages if the machine has them.
at::Tensor NewSlot(const at::Tensor& parameter);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_SLOT_MEMORY_H_
