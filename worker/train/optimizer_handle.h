#ifndef MUSTER_WORKER_TRAIN_OPTIMIZER_HANDLE_H_
#define MUSTER_WORKER_TRAIN_OPTIMIZER_HANDLE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/plain_state.h"

namespace muster {

// An optimizer's state for a checkpoint.
struct OptimizerState {
  // "<parameter>.<slot>", where the parameter is its name, or its number over all groups if it has
  // none. Slots are torch's: step (0-d F32), exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer,
  // sum, square_avg, grad_avg. Parameters that never had a gradient have none. Tensors other than
  // `step` are the live ones: copy them before the next step.
  std::map<std::string, at::Tensor> tensors;
  // "<group>.<hyper-parameter>", e.g. "0.lr" or "0.betas".
  PlainState groups;
};

enum class GradZeroing {
  kSetToNone,  // the next backward pass allocates new ones
  kInPlace,    // keeps the memory: gradients that are views of reduction buckets stay so
};

// What the training step needs of an optimizer, whatever its type: FusedAdamW and its sisters
// (optimizer.h) are ones, WrapTorchOptimizer (torch_optimizer.h) makes one of any torch::optim
// optimizer. Not thread-safe. Errors are c10::Error.
class OptimizerHandle : public LrTarget {
 public:
  // One update from the gradients that are there; parameters without one are left alone.
  virtual void Step() = 0;

  // As Step(), without waiting for a device: gradients are divided by `grad_scale` (if defined) and
  // nothing changes if `found_inf` is not 0. Both 0-d F32 on the device of the parameters. Only
  // where supports_scaled_step().
  virtual bool supports_scaled_step() const { return false; }
  virtual void StepScaled(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  // All parameters, group after group.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  // Never detaches a gradient, which torch::optim's zero_grad does and a bucket view forbids.
  void ZeroGrad(GradZeroing how = GradZeroing::kSetToNone);

  // Names for the state's tensors, one per parameter, all different.
  void set_parameter_names(std::vector<std::string> names);
  const std::vector<std::string>& parameter_names() const { return names_; }

  virtual OptimizerState SaveState() const = 0;
  // Copies the values in. Everything is checked first: a name, a shape or a group that does not fit
  // is refused with nothing changed.
  virtual void LoadState(const OptimizerState& state) = 0;

 protected:
  // To be called by the constructor of a subclass.
  void SetParameters(std::vector<at::Tensor> parameters);

  // The slots of parameter `i` in a state to load: slot name to tensor. Checks that every tensor of
  // `state` belongs to a parameter and a slot in `known`, and that all but `step` have the
  // parameter's shape.
  std::vector<std::map<std::string, at::Tensor>> Slots(const OptimizerState& state,
                                                       const std::vector<std::string>& known) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
};

// The row "<group>.<name>" of `groups`, of `size` numbers. Throws if it is not there.
const std::vector<double>& GroupRow(const PlainState& groups, int64_t group,
                                    const std::string& name, size_t size);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OPTIMIZER_HANDLE_H_
