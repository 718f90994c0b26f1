#ifndef MUSTER_INTERNAL_GRADIENT_SAMPLES_H_
#define MUSTER_INTERNAL_GRADIENT_SAMPLES_H_

#include <unordered_map>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"

namespace muster::internal {

// Warns if a loop itself changes gradients between backward() and step() that are probably not what
// it expects: they hold a loss scale or are a part of the whole. Checks only the first steps, since
// comparing waits for a GPU, and never reads gradients from a disk.
class GradientSamples {
 public:
  // All are borrowed.
  GradientSamples(const Process& process, const Registry& registry)
      : process_(process), registry_(registry) {}

  // Call it after accelerator.backward(). `scaled`: gradients hold the loss scale of fp16.
  void Record(bool scaled);
  // Call it in the step of `slot`. `taken_over`: the accelerator has clipped or unscaled its
  // gradients, or loss.backward() has added to them.
  void WarnIfChanged(const OptimizerSlot& slot, bool scaled, bool taken_over);
  void Forget(const OptimizerSlot& slot) { samples_.erase(&slot); }
  void ForgetAll() { samples_.clear(); }

 private:
  const Process& process_;
  const Registry& registry_;
  std::unordered_map<const OptimizerSlot*, std::vector<at::Tensor>> samples_;
  int left_ = 8;  // comparisons
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_GRADIENT_SAMPLES_H_
