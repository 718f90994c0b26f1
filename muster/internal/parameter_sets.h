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

// For messages: the parameter's name in a prepared model, or where it is in its optimizer.
std::string NameOf(const at::Tensor& parameter, size_t index,
                   const std::vector<std::shared_ptr<ModelSlot>>& models);

// The tensor that an optimizer has for a parameter of `model`: of a sharded model the shard.
at::Tensor AtOptimizer(ModelSlot& model, const at::Tensor& parameter);

// Whether a gradient is undefined, or all zeros. Waits for a GPU.
bool HoldsNothing(const at::Tensor& grad);

// For each tensor that optimizers have for the parameters of `models`: whether a backward pass
// after pass `since` has added to its gradient.
std::unordered_map<const void*, bool> AddedTo(const std::vector<std::shared_ptr<ModelSlot>>& models,
                                              int64_t since);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_PARAMETER_SETS_H_
