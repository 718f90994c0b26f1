#include "worker/train/optimizer_handle.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <unordered_map>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_foreach_zero.h"
#include "c10/util/Exception.h"
#include "worker/parallel/paged_storage.h"
#include "worker/parallel/weight_changes.h"

namespace muster {
namespace {

// Whether several elements may share memory. If not, each dimension, from the smallest stride on,
// steps over everything below it.
bool MayOverlap(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.numel() < 2 ||
      tensor.is_non_overlapping_and_dense()) {
    return false;
  }
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dimensions.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dimensions) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

}  // namespace

OptimizerHandle::Id::Id() {
  static std::atomic<uint64_t> last = 0;
  value = ++last;
}

bool OptimizerHandle::SameParameters(const OptimizerHandle& other) const {
  return std::equal(parameters().begin(), parameters().end(), other.parameters().begin(),
                    other.parameters().end(),
                    [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
}

void OptimizerHandle::StepScaled(const at::Tensor& /*grad_scale*/,
                                 const at::Tensor& /*found_inf*/) {
  TORCH_CHECK(false, "this optimizer cannot step on scaled gradients: unscale them first");
}

at::Tensor OptimizerHandle::StepWithClosure(const std::function<at::Tensor()>& closure) {
  at::Tensor loss;
  {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  Step();
  return loss;
}

void OptimizerHandle::SetParameters(std::vector<at::Tensor> parameters) const {
  std::unordered_map<const void*, size_t> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    TORCH_CHECK(parameter.defined(), "parameter ", i, " of the optimizer is undefined");
    TORCH_CHECK(
        parameter.is_leaf(), "parameter ", i,
        " of the optimizer is not a leaf: pass the tensors that require gradients, not results "
        "of operations on them");
    TORCH_CHECK(
        seen.emplace(parameter.unsafeGetTensorImpl(), i).second, "parameter ", i,
        " is in the optimizer twice (a tied weight is listed by each module that has it): pass "
        "every tensor once");
    TORCH_CHECK(!MayOverlap(parameter), "parameter ", i, " of the optimizer, of shape ",
                parameter.sizes(), " and strides ", parameter.strides(),
                ", has elements that share memory, so an update would change several at once: make "
                "it a contiguous copy");
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters.size(); ++i) names.push_back(std::to_string(i));
  if (named_) {
    std::set<std::string> taken;
    std::vector<bool> keeps(parameters.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto it = seen.find(parameters_[i].unsafeGetTensorImpl());
      if (it == seen.end()) continue;
      names[it->second] = names_[i];
      keeps[it->second] = true;
      taken.insert(names_[i]);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      while (!keeps[i] && !taken.insert(names[i]).second) names[i] += "'";
    }
  }
  parameters_ = std::move(parameters);
  names_ = std::move(names);
  ++version_;
}

void OptimizerHandle::ExchangeParameters(std::vector<at::Tensor> parameters) const {
  std::vector<std::string> names = names_;
  SetParameters(std::move(parameters));
  names_ = std::move(names);
}

void OptimizerHandle::OffloadState(std::shared_ptr<ScratchFile> /*file*/) {
  TORCH_CHECK(false,
              "the state of this optimizer cannot be offloaded: use muster::FusedAdamW, FusedAdam, "
              "FusedSGD or FusedAdagrad, or leave offload_optimizer out");
}

void OptimizerHandle::ReplaceParameters(
    const std::function<at::Tensor(const at::Tensor&)>& /*replacement*/) {
  TORCH_CHECK(false,
              "this optimizer is not known to update every element of a parameter by itself, so it "
              "cannot update parts of parameters: with sharding use FusedAdamW, FusedAdam, "
              "FusedSGD, FusedAdagrad, or LibTorch's AdamW, Adam, SGD, Adagrad or RMSprop");
}

void OptimizerHandle::set_parameter_names(std::vector<std::string> names) {
  Refresh();
  TORCH_CHECK(names.size() == parameters_.size(), "got ", names.size(), " names for the ",
              parameters_.size(), " parameters of the optimizer");
  const std::set<std::string> unique(names.begin(), names.end());
  TORCH_CHECK(unique.size() == names.size(), "the names of an optimizer's parameters must differ");
  names_ = std::move(names);
  named_ = true;
}

void OptimizerHandle::ZeroGrad(GradZeroing how) {
  Refresh();
  if (how == GradZeroing::kSetToNone) {
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
    return;
  }
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  grads.reserve(parameters_.size());
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    if (grad.layout() == at::kStrided) {
      grads.push_back(grad);
    } else {
      parameter.mutable_grad().reset();  // no bucket holds it
    }
  }
  ForEachPage(grads,
              [](const std::vector<at::Tensor>& list, const auto&) { at::_foreach_zero_(list); });
}

std::vector<std::map<std::string, at::Tensor>> OptimizerHandle::Slots(
    const OptimizerState& state, const std::vector<std::string>& known) const {
  Refresh();
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

void ForgetCastWeights() { NoteWeightChange(); }

void PutGroupSizes(const std::vector<size_t>& sizes, PlainState* groups) {
  for (size_t g = 0; g < sizes.size(); ++g) {
    (*groups)[std::to_string(g) + ".params"] = {static_cast<double>(sizes[g])};
  }
}

void CheckGroupSizes(const PlainState& groups, const std::vector<size_t>& sizes) {
  const auto size = static_cast<int64_t>(sizes.size());
  int64_t saved = 0;
  for (const auto& [name, row] : groups) {
    saved = std::max<int64_t>(saved, std::strtoll(name.c_str(), nullptr, 10) + 1);
  }
  TORCH_CHECK(saved == size, "the optimizer state has ", saved,
              " parameter groups and this optimizer ", size,
              ": add the groups that were added in training before the state is loaded");
  // If parameters have moved between groups, their numbers name other parameters.
  for (size_t g = 0; g < sizes.size(); ++g) {
    const auto row = groups.find(std::to_string(g) + ".params");
    if (row == groups.end()) continue;
    TORCH_CHECK(row->second == std::vector<double>{static_cast<double>(sizes[g])},
                "parameter group ", g, " of the optimizer was saved with ",
                row->second.empty() ? 0 : row->second[0], " parameters and has ", sizes[g],
                " here, so that their states would go to other parameters: give the optimizer the "
                "parameters that it had, in the same groups and order");
  }
}

const std::vector<double>& GroupRow(const PlainState& groups, int64_t group,
                                    const std::string& name, size_t size) {
  const auto it = groups.find(std::to_string(group) + "." + name);
  TORCH_CHECK(it != groups.end() && it->second.size() == size, "optimizer state has no '", name,
              "' for parameter group ", group);
  return it->second;
}

}  // namespace muster
