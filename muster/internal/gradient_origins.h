#ifndef MUSTER_INTERNAL_GRADIENT_ORIGINS_H_
#define MUSTER_INTERNAL_GRADIENT_ORIGINS_H_

#include <functional>

#include "muster/internal/backward_watch.h"
#include "muster/internal/model_slot.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"

namespace muster::internal {

// Which passes the gradients that an optimizer uses come from: forward passes of prepared models
// and accelerator.backward(), or passes that bypass these.
class GradientOrigins {
 public:
  // All are borrowed.
  GradientOrigins(const Process& process, const Registry& registry, BackwardPasses& passes)
      : process_(process), registry_(registry), passes_(passes) {}

  // Throws, naming one, if a parameter of `slot` has gradients of loss.backward() that are not
  // divided or scaled as those of accelerator.backward() are. `used_as_they_are`: the latter are
  // neither divided nor scaled; then only gradients of checkpointed blocks that were never called
  // with muster::call() throw.
  void CheckPlainPasses(const OptimizerSlot& slot, bool used_as_they_are) const;
  // Call it when `slot` has used or lost its gradients.
  void ForgetPlainPasses(const OptimizerSlot& slot) const;
  void ForgetPlainPassesWithoutGradients() const;
  void ForgetAllPlainPasses() const;

  // For several processes: throws, naming one, if a gradient of `slot` was not exchanged.
  void CheckExchanged(OptimizerSlot& slot) const;
  // For one process with autocast: throws, naming one, if a gradient of `slot` comes from a forward
  // pass that bypassed the prepared model.
  void CheckForwards(OptimizerSlot& slot) const;

 private:
  void ForgetPlainPasses(
      const std::function<bool(ModelSlot&, BackwardWatch::Seen&)>& forgotten) const;
  // Finds the models that have the parameters of `slot`. Looks again only if one of them has
  // changed.
  void FindOwners(OptimizerSlot& slot) const;

  const Process& process_;
  const Registry& registry_;
  BackwardPasses& passes_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_GRADIENT_ORIGINS_H_
