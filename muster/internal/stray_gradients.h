#ifndef MUSTER_INTERNAL_STRAY_GRADIENTS_H_
#define MUSTER_INTERNAL_STRAY_GRADIENTS_H_

#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/backward_watch.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"

namespace muster::internal {

// Gradients of unsharded prepared models whose parameters no prepared optimizer has. If another
// optimizer steps on them, it uses them as backward() has left them: with the loss scale, before
// their window has ended, unclipped.
class StrayGradients {
 public:
  // All are borrowed.
  StrayGradients(const Process& process, const Registry& registry, const BackwardPasses& passes)
      : process_(process), registry_(registry), passes_(passes) {}

  // After a backward pass: remembers what the parameters are. `whole`: it was the last one of its
  // window.
  void Record(bool whole) const;
  // Before the next one: throws, naming a parameter, if another optimizer has stepped on gradients
  // that were not what training needs. `scaled`: they hold the loss scale of fp16.
  void Check(bool scaled) const;
  // The loop has clipped the gradients of these.
  void NoteClipped(const std::vector<at::Tensor>& parameters) const;
  // The weights are changed, but not by training.
  void Forget() const;

 private:
  void Visit(const std::function<void(BackwardWatch::Seen&)>& visit) const;
  // Whether what these have changed to comes from no gradient of theirs: an average with another
  // prepared model, or values of tensors that a prepared optimizer steps on.
  bool AreAverages(const std::vector<const BackwardWatch::Seen*>& changed) const;
  bool IsCopyOfStepped(const BackwardWatch::Seen& changed) const;

  const Process& process_;
  const Registry& registry_;
  const BackwardPasses& passes_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_STRAY_GRADIENTS_H_
