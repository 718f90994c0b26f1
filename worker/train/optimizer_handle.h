#ifndef MUSTER_WORKER_TRAIN_OPTIMIZER_HANDLE_H_
#define MUSTER_WORKER_TRAIN_OPTIMIZER_HANDLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/plain_state.h"

namespace torch::optim {
class Optimizer;
}

namespace muster {

class ScratchFile;

// An optimizer's state for a checkpoint.
struct OptimizerState {
  // "<parameter>.<slot>", where the parameter is its name, or its number over all groups if it has
  // none. Slots are torch's: step (0-d F32), exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer,
  // sum, square_avg, grad_avg. Parameters that never had a gradient have none. Tensors other than
  // `step` are the live ones: copy them before the next step. An optimizer that is saved by its own
  // save() has one tensor, "archive": the bytes (1-d U8) of its torch::serialize archive.
  std::map<std::string, at::Tensor> tensors;
  // "<group>.<hyper-parameter>", e.g. "0.lr" or "0.betas".
  PlainState groups;
};

enum class GradZeroing {
  kSetToNone,  // the next backward pass allocates new ones
  kInPlace,    // keeps the memory: gradients that are views of reduction buckets stay so
};

// The training step's interface to an optimizer of any type: FusedAdamW and its sisters
// (optimizer.h) are ones, WrapTorchOptimizer (torch_optimizer.h) makes one of any torch::optim
// optimizer. Not thread-safe. Errors are c10::Error.
class OptimizerHandle : public LrTarget {
 public:
  // A number that no other handle of this process has or had. Another number at the same address
  // means another optimizer. A copy gets its own.
  uint64_t id() const { return id_.value; }

  // Whether this is a handle on `optimizer`, and on that very one: a new optimizer at the address
  // of one that is gone has another type, lacks some parameter that this handle has seen, or lost
  // the state that this handle's steps made. Uses only its argument and the handle's own state, so
  // the wrapped optimizer may be dead.
  virtual bool Wraps(const torch::optim::Optimizer& /*optimizer*/) const { return false; }

  // Whether both hold the same tensors in the same order.
  bool SameParameters(const OptimizerHandle& other) const;

  // One update from the gradients that are there; parameters without one are left alone.
  virtual void Step() = 0;

  // As Step(), without waiting for a device: gradients are divided by `grad_scale` (if defined) and
  // nothing changes if `found_inf` is not 0. Both 0-d F32 on the device of the parameters. Only
  // where supports_scaled_step().
  virtual bool supports_scaled_step() const { return false; }
  virtual void StepScaled(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  // Whether the update must evaluate the loss itself (LBFGS): Step() then throws.
  virtual bool needs_closure() const { return false; }
  // torch's step(closure): `closure` zeroes the gradients, runs the forward and the backward pass
  // and returns the loss. It is called with grad mode on, once, or as often as the optimizer wants.
  // Returns the loss of the first call.
  virtual at::Tensor StepWithClosure(const std::function<at::Tensor()>& closure);

  // All parameters that the optimizer holds at this moment, group after group; a group that was
  // added since is in it. The reference is good until the optimizer is given other parameters.
  // Looks at every parameter: take it out of loops.
  const std::vector<at::Tensor>& parameters() const {
    Refresh();
    return parameters_;
  }
  // Grows whenever parameters() has changed.
  int64_t parameters_version() const {
    Refresh();
    return version_;
  }

  // Has the optimizer update other tensors in place of some of its parameters, of the same group
  // and under the same name: `replacement(p)`; p stays where that is undefined. Throws, with
  // nothing changed, if the optimizer has state or stepped already, or if its update is not known
  // to treat every element by itself, as those of LBFGS and of classes that are not LibTorch's.
  virtual void ReplaceParameters(const std::function<at::Tensor(const at::Tensor&)>& replacement);

  // Keeps the tensors of the state, but not `step`, in `file` between steps (scratch_file.h), or,
  // if that is null, in the memory of the CPU; a step takes them to the parameters in windows, one
  // after the other. Before the first step; no effect if they are offloaded already. SaveState()
  // then returns tensors in mapped memory, which come from the file when they are read: copy them
  // before the next step. Throws, with nothing changed, if this optimizer cannot do it or has state
  // already. A step throws if the file fails; so do the steps and saves after it, until
  // LoadState().
  virtual void OffloadState(std::shared_ptr<ScratchFile> file);

  // Never detaches a gradient, which torch::optim's zero_grad does and a bucket view forbids.
  void ZeroGrad(GradZeroing how = GradZeroing::kSetToNone);

  // Names for the state's tensors, one per parameter, all different. Parameters keep them; those
  // that the optimizer is given later get their numbers.
  void set_parameter_names(std::vector<std::string> names);
  const std::vector<std::string>& parameter_names() const {
    Refresh();
    return names_;
  }

  // Why SaveState() and LoadState() are going to throw, in one line with the way out; empty if they
  // are not.
  virtual std::string CannotSave() const { return ""; }
  virtual OptimizerState SaveState() const = 0;
  // Throws what LoadState() would throw for a name, a shape, a number or a group that does not fit.
  // Changes nothing. What the load() of a class refuses that is not LibTorch's is not known here.
  virtual void CheckState(const OptimizerState& state) const = 0;
  // Copies the values in, after CheckState().
  virtual void LoadState(const OptimizerState& state) = 0;

 protected:
  // Calls SetParameters() if the optimizer's parameters are not seen_parameters() any more.
  virtual void Refresh() const {}
  const std::vector<at::Tensor>& seen_parameters() const { return parameters_; }

  // To be called by the constructor of a subclass, and whenever parameters have changed. Throws,
  // with nothing changed, for a tensor that cannot be optimized: undefined, no leaf, twice in the
  // list, or with elements that share memory.
  void SetParameters(std::vector<at::Tensor> parameters) const;

  // SetParameters for the same number of parameters, which keep their names.
  void ExchangeParameters(std::vector<at::Tensor> parameters) const;

  // The slots of parameter `i` in a state to load: slot name to tensor. Checks that every tensor of
  // `state` belongs to a parameter and a slot in `known`, and that all but `step` have the
  // parameter's shape.
  std::vector<std::map<std::string, at::Tensor>> Slots(const OptimizerState& state,
                                                       const std::vector<std::string>& known) const;

 private:
  struct Id {
    Id();
    Id(const Id&) : Id() {}
    Id& operator=(const Id&) { return *this; }
    uint64_t value;
  };
  Id id_;
  // The facts about the optimizer's parameters; Refresh() updates them.
  mutable std::vector<at::Tensor> parameters_;
  mutable std::vector<std::string> names_;
  mutable bool named_ = false;  // by set_parameter_names
  mutable int64_t version_ = 0;
};

// To be called when weights have changed. Inside an autocast scope that began earlier, LibTorch
// would continue to use its low-precision copies of the old ones.
void ForgetCastWeights();

// Throws unless `groups` is of `size` parameter groups.
void CheckGroupCount(const PlainState& groups, int64_t size);

// The row "<group>.<name>" of `groups`, of `size` numbers. Throws if it is not there.
const std::vector<double>& GroupRow(const PlainState& groups, int64_t group,
                                    const std::string& name, size_t size);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OPTIMIZER_HANDLE_H_
