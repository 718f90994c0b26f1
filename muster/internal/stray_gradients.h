#ifndef MUSTER_INTERNAL_STRAY_GRADIENTS_H_
#define MUSTER_INTERNAL_STRAY_GRADIENTS_H_

#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/backward_watch.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"

namespace muster::internal {

// Gradients of unsharded prepared models whose parameters belong to no prepared optimizer. An
// optimizer that is not prepared uses them as backward() has left them: with the loss scale, before
// their window has ended, unclipped.
class StrayGradients {
 public:
  // All are borrowed.
  StrayGradients(const Process& process, const Registry& registry, const BackwardPasses& passes)
      : process_(process), registry_(registry), passes_(passes) {}

  // After a backward pass: records the parameters' current values. `whole`: the pass was the last
  // one of its window.
  void Record(bool whole) const;
  // Before the next pass: throws, naming a parameter, if an optimizer that is not prepared has
  // stepped on gradients that were unfit for it. `scaled`: they hold the loss scale of fp16.
  void Check(bool scaled) const;
  // The loop has clipped the gradients of these parameters.
  void NoteClipped(const std::vector<at::Tensor>& parameters) const;
  // Call it when the weights have changed, but not by training.
  void Forget() const;

 private:
  void Visit(const std::function<void(BackwardWatch::Seen&)>& visit) const;
  // AreAverages(): whether the changed values come from averaging with another prepared model,
  // IsCopyOfStepped(): from tensors that a prepared optimizer steps on, rather than from gradients
  // of their own.
  bool AreAverages(const std::vector<const BackwardWatch::Seen*>& changed) const;
  bool IsCopyOfStepped(const BackwardWatch::Seen& changed) const;

  const Process& process_;
  const Registry& registry_;
  const BackwardPasses& passes_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_STRAY_GRADIENTS_H_
