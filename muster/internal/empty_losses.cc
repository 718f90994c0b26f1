#include "muster/internal/empty_losses.h"

#include "ATen/ops/zeros_like.h"

namespace muster::internal {

void EmptyLosses::Hook() {
  std::erase_if(hooked_, [](const auto& parameter) { return parameter.second.expired(); });
  for (const auto& model : registry_.models()) {
    for (const auto& [name, parameter] : model->source().parameters()) Hook(parameter);
  }
  // Optimizers may also have parameters of models that are not prepared.
  for (const auto& optimizer : registry_.optimizers()) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) Hook(parameter);
  }
}

void EmptyLosses::Hook(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return;
  const Weak weak(parameter.getIntrusivePtr());
  if (!hooked_.try_emplace(parameter.unsafeGetTensorImpl(), weak).second) return;
  parameter.register_hook([empty = empty_](at::Tensor gradient) {
    return *empty && gradient.defined() ? at::zeros_like(gradient) : gradient;
  });
}

}  // namespace muster::internal
