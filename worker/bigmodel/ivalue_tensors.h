#ifndef MUSTER_WORKER_BIGMODEL_IVALUE_TENSORS_H_
#define MUSTER_WORKER_BIGMODEL_IVALUE_TENSORS_H_

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"

namespace muster {

// Calls `visit` for each tensor in `value`.
template <class Visit>
void VisitTensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor.has_value()) visit(*tensor);
    }
  }
}

// Returns `value` with each tensor replaced by change(tensor).
template <class Change>
c10::IValue WithTensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorList()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      changed.push_back(tensor.has_value() ? std::optional(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_IVALUE_TENSORS_H_
