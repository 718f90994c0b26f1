#include "worker/train/optimizer_handle.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_foreach_zero.h"
#include "c10/util/Exception.h"

namespace muster {

void OptimizerHandle::StepScaled(const at::Tensor& /*grad_scale*/,
                                 const at::Tensor& /*found_inf*/) {
  TORCH_CHECK(false, "this optimizer cannot step on scaled gradients: unscale them first");
}

void OptimizerHandle::SetParameters(std::vector<at::Tensor> parameters) {
  std::set<const void*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(parameters[i].defined(), "parameter ", i, " of the optimizer is undefined");
    TORCH_CHECK(
        parameters[i].is_leaf(), "parameter ", i,
        " of the optimizer is not a leaf: pass the tensors that require gradients, not results "
        "of operations on them");
    TORCH_CHECK(seen.insert(parameters[i].unsafeGetTensorImpl()).second, "parameter ", i,
                " is in the optimizer twice");
  }
  parameters_ = std::move(parameters);
  names_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) names_.push_back(std::to_string(i));
}

void OptimizerHandle::set_parameter_names(std::vector<std::string> names) {
  TORCH_CHECK(names.size() == parameters_.size(), "got ", names.size(), " names for the ",
              parameters_.size(), " parameters of the optimizer");
  const std::set<std::string> unique(names.begin(), names.end());
  TORCH_CHECK(unique.size() == names.size(), "the names of an optimizer's parameters must differ");
  names_ = std::move(names);
}

void OptimizerHandle::ZeroGrad(GradZeroing how) {
  if (how == GradZeroing::kSetToNone) {
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
    return;
  }
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  grads.reserve(parameters_.size());
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  }
  if (!grads.empty()) at::_foreach_zero_(grads);
}

std::vector<std::map<std::string, at::Tensor>> OptimizerHandle::Slots(
    const OptimizerState& state, const std::vector<std::string>& known) const {
  std::unordered_map<std::string, size_t> index;
  for (size_t i = 0; i < names_.size(); ++i) index[names_[i]] = i;
  std::vector<std::map<std::string, at::Tensor>> slots(parameters_.size());
  for (const auto& [name, tensor] : state.tensors) {
    const size_t dot = name.rfind('.');
    TORCH_CHECK(dot != std::string::npos, "optimizer state '", name, "' is not <parameter>.<slot>");
    const std::string slot = name.substr(dot + 1);
    const auto it = index.find(name.substr(0, dot));
    TORCH_CHECK(it != index.end(), "optimizer state '", name,
                "' belongs to no parameter of this optimizer: was it saved for another model?");
    TORCH_CHECK(std::find(known.begin(), known.end(), slot) != known.end(), "optimizer state '",
                name, "' is of no use to this optimizer: was it saved by another kind?");
    if (slot == "step") {
      TORCH_CHECK(tensor.numel() == 1, "optimizer state '", name, "' must be one number");
    } else {
      TORCH_CHECK(tensor.sizes() == parameters_[it->second].sizes(), "optimizer state '", name,
                  "' has shape ", tensor.sizes(), ", its parameter ",
                  parameters_[it->second].sizes());
    }
    slots[it->second][slot] = tensor;
  }
  return slots;
}

const std::vector<double>& GroupRow(const PlainState& groups, int64_t group,
                                    const std::string& name, size_t size) {
  const auto it = groups.find(std::to_string(group) + "." + name);
  TORCH_CHECK(it != groups.end() && it->second.size() == size, "optimizer state has no '", name,
              "' for parameter group ", group);
  return it->second;
}

}  // namespace muster
