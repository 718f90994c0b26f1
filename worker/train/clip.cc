#include "worker/train/clip.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_foreach_clamp_max.h"
#include "ATen/ops/_foreach_clamp_min.h"
#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_norm.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "worker/parallel/paged_storage.h"

namespace muster {
namespace {

// The foreach kernels are fast only on lists of one device and dtype.
using Kind = std::pair<c10::Device, at::ScalarType>;
struct KindLess {
  bool operator()(const Kind& a, const Kind& b) const {
    const auto key = [](const Kind& k) {
      return std::make_tuple(k.first.type(), k.first.index(), k.second);
    };
    return key(a) < key(b);
  }
};

template <typename Fn>
void ForEachKind(const std::vector<at::Tensor>& tensors, Fn fn) {
  bool uniform = true;
  for (const at::Tensor& t : tensors) {
    uniform =
        uniform && t.device() == tensors[0].device() && t.scalar_type() == tensors[0].scalar_type();
  }
  if (uniform) {
    if (!tensors.empty()) fn(tensors);
    return;
  }
  std::map<Kind, std::vector<at::Tensor>, KindLess> kinds;
  for (const at::Tensor& t : tensors) kinds[{t.device(), t.scalar_type()}].push_back(t);
  for (const auto& [kind, list] : kinds) fn(list);
}

// Calls fn for lists of one kind and one page, because no more needs to be in memory at a time.
template <typename Fn>
void ForEachList(const std::vector<at::Tensor>& tensors, const Fn& fn) {
  ForEachKind(tensors, [&](const std::vector<at::Tensor>& list) {
    ForEachPage(list, [&](const std::vector<at::Tensor>& group, const auto&) { fn(group); });
  });
}

}  // namespace

std::vector<at::Tensor> Gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> grads;
  std::vector<const void*> from;  // the parameters to which `grads` belong
  grads.reserve(parameters.size());
  from.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].grad().defined()) continue;
    at::Tensor values = parameters[i].grad().layout() == at::kStrided
                            ? parameters[i].grad()
                            : GradientValues(parameters[i], std::to_string(i));
    if (values.numel() == 0) continue;
    grads.push_back(std::move(values));
    from.push_back(parameters[i].unsafeGetTensorImpl());
  }
  std::vector<const void*> sorted = from;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end()) return grads;
  std::set<const void*> seen;
  size_t kept = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (seen.insert(from[i]).second) grads[kept++] = grads[i];
  }
  grads.resize(kept);
  return grads;
}

at::Tensor GradientValues(const at::Tensor& parameter, const std::string& what) {
  const at::Tensor& grad = parameter.grad();
  if (grad.layout() == at::kStrided) return grad;
  TORCH_CHECK(grad.layout() == at::kSparse, "the gradient of parameter ", what, " has layout ",
              grad.layout(), ", which cannot be scaled or clipped: make it dense or COO");
  at::NoGradGuard no_grad;
  if (!grad.is_coalesced()) parameter.mutable_grad() = grad.coalesce();
  return parameter.grad()._values();
}

at::Tensor TotalNorm(const std::vector<at::Tensor>& tensors, double norm_type) {
  TORCH_CHECK(!std::isnan(norm_type), "norm_type must be a number or infinity, got nan");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  norms.reserve(tensors.size());
  ForEachKind(tensors, [&](const std::vector<at::Tensor>& list) {
    const size_t first = norms.size();
    norms.resize(first + list.size());
    // Norms are stored in the order of `list`, in which they are added up.
    ForEachPage(list, [&](const std::vector<at::Tensor>& group, const std::vector<size_t>& places) {
      std::vector<at::Tensor> found = at::_foreach_norm(group, norm_type);
      for (size_t i = 0; i < found.size(); ++i) norms[first + places[i]] = std::move(found[i]);
    });
  });
  if (norms.empty()) {
    return tensors.empty() ? at::zeros({}) : at::zeros({}, tensors[0].options());
  }
  const c10::Device device = tensors[0].device();
  for (at::Tensor& norm : norms) {
    if (norm.device() != device) norm = norm.to(device);
  }
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

void ScaleToNorm(const std::vector<at::Tensor>& tensors, double max_norm,
                 const at::Tensor& total_norm) {
  TORCH_CHECK(max_norm >= 0, "max_norm must not be negative, got ", max_norm);
  if (std::isinf(max_norm) || tensors.empty()) return;
  at::NoGradGuard no_grad;
  const at::Tensor factor = total_norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
  const bool paged = std::any_of(tensors.begin(), tensors.end(), IsPaged);
  // Then the pages need not be read and written.
  if (paged && factor.item<double>() == 1) return;
  ForEachList(tensors, [&](const std::vector<at::Tensor>& list) {
    at::_foreach_mul_(list,
                      factor.device() == list[0].device() ? factor : factor.to(list[0].device()));
  });
}

at::Tensor ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                        double norm_type, bool error_if_nonfinite) {
  TORCH_CHECK(max_norm >= 0, "max_norm must not be negative, got ", max_norm);
  const std::vector<at::Tensor> grads = Gradients(parameters);
  for (const at::Tensor& parameter : parameters) {
    TORCH_CHECK(
        norm_type > 0 || !parameter.grad().defined() || parameter.grad().layout() == at::kStrided,
        "a norm of type ", norm_type, " counts zeros, which sparse gradients do not hold");
  }
  at::Tensor norm = TotalNorm(grads, norm_type);
  if (error_if_nonfinite) {
    const double value = norm.item<double>();
    TORCH_CHECK(std::isfinite(value), "the norm of the gradients is ", value,
                ", so they cannot be clipped: look for NaN or infinity in the loss, or lower the "
                "learning rate");
  }
  ScaleToNorm(grads, max_norm, norm);
  return norm;
}

at::Tensor ClipGradNorm(const std::vector<at::Tensor>& parameters,
                        const std::vector<at::Tensor>& shards, Comm& comm, double max_norm,
                        double norm_type) {
  TORCH_CHECK(max_norm >= 0, "max_norm must not be negative, got ", max_norm);
  TORCH_CHECK(norm_type > 0, "a norm of type ", norm_type,
              " is not taken over the parts of sharded parameters: use 1, 2 or infinity");
  if (shards.empty()) return ClipGradNorm(parameters, max_norm, norm_type);
  at::NoGradGuard no_grad;
  const bool is_max = std::isinf(norm_type);
  const at::Device device = shards.front().device();
  const auto norm_of = [&](const std::vector<at::Tensor>& tensors) {
    // Create it on the device: copying a number from the CPU would wait for a GPU.
    if (tensors.empty())
      return at::zeros({}, at::TensorOptions().device(device).dtype(at::kDouble));
    return TotalNorm(tensors, norm_type).to(device, at::kDouble);
  };
  std::vector<at::Tensor> grads = Gradients(shards);
  at::Tensor sharded = norm_of(grads);
  if (!is_max) sharded = sharded.pow(norm_type);
  comm.AllReduce(sharded, is_max ? ReduceOp::kMax : ReduceOp::kSum);
  const std::vector<at::Tensor> others = Gradients(parameters);
  at::Tensor whole = norm_of(others);
  whole =
      is_max ? at::maximum(whole, sharded) : whole.pow(norm_type).add_(sharded).pow_(1 / norm_type);
  const at::Tensor norm = whole.to(shards.front().scalar_type());
  grads.insert(grads.end(), others.begin(), others.end());
  ScaleToNorm(grads, max_norm, norm);
  return norm;
}

void ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value) {
  TORCH_CHECK(clip_value >= 0, "clip_value must not be negative, got ", clip_value);
  at::NoGradGuard no_grad;
  ForEachList(Gradients(parameters), [&](const std::vector<at::Tensor>& list) {
    at::_foreach_clamp_min_(list, -clip_value);
    at::_foreach_clamp_max_(list, clip_value);
  });
}

void ScaleGradients(const std::vector<at::Tensor>& parameters, double factor) {
  if (factor == 1) return;
  at::NoGradGuard no_grad;
  ForEachList(Gradients(parameters),
              [&](const std::vector<at::Tensor>& list) { at::_foreach_mul_(list, factor); });
}

}  // namespace muster
