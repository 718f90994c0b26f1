#ifndef MUSTER_INTERNAL_PARAMETER_SETS_H_
#define MUSTER_INTERNAL_PARAMETER_SETS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/model_slot.h"

namespace muster::internal {

std::unordered_set<const void*> SetOf(const std::vector<at::Tensor>& tensors);

// Returns, for messages, the parameter's name in a prepared model, or its place in its optimizer.
std::string NameOf(const at::Tensor& parameter, size_t index,
                   const std::vector<std::shared_ptr<ModelSlot>>& models);

// Returns the tensor that an optimizer has for a parameter of `model`: the shard, if it is sharded.
at::Tensor AtOptimizer(ModelSlot& model, const at::Tensor& parameter);

// Returns whether a gradient is undefined or all zeros. Waits for a GPU.
bool HoldsNothing(const at::Tensor& grad);

// Returns, for each tensor that optimizers have for the parameters of `models`, whether a backward
// pass after pass `since` has added to its gradient.
std::unordered_map<const void*, bool> AddedTo(const std::vector<std::shared_ptr<ModelSlot>>& models,
                                              int64_t since);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_PARAMETER_SETS_H_
