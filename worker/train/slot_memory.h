#ifndef MUSTER_WORKER_TRAIN_SLOT_MEMORY_H_
#define MUSTER_WORKER_TRAIN_SLOT_MEMORY_H_

#include <cstddef>

#include "ATen/core/Tensor.h"

namespace muster {

// Memory for the state of an optimizer that is loaded: new pages cost several times what the copy
// into them does.

// Returns `slot`, the tensor that holds this state of `parameter` now, if the values of `source`
// fit there and only the optimizer uses its memory: all `references` to the tensor, this one
// included, are the optimizer's. Undefined: it cannot be reused.
at::Tensor SlotToReuse(const at::Tensor& slot, size_t references, const at::Tensor& parameter,
                       const at::Tensor& source);

// A tensor like `parameter`, of undefined values, in huge pages where the machine has them.
at::Tensor NewSlot(const at::Tensor& parameter);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_SLOT_MEMORY_H_
