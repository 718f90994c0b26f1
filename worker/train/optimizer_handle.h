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
  // Keys are "<parameter>.<slot>", where <parameter> is the parameter's name or, if it has none,
  // its number over all groups. Slots are torch's: step (0-d F32), exp_avg, exp_avg_sq,
  // max_exp_avg_sq, momentum_buffer, sum, square_avg, grad_avg. Parameters that never had a
  // gradient have none. Tensors other than `step` are the live ones: copy them before the next
  // step. An optimizer that is saved with its own save() has one tensor, "archive": the bytes (1-d
  // U8) of its torch::serialize archive.
  std::map<std::string, at::Tensor> tensors;
  // Keys are "<group>.<hyper-parameter>", e.g. "0.lr" or "0.betas", and "<group>.params": how many
  // parameters the group has.
  PlainState groups;
};

enum class GradZeroing {
  kSetToNone,  // the next backward pass allocates new ones
  kInPlace,    // keeps the memory: gradients that are views of reduction buckets stay so
};

// The training step's interface to an optimizer of any type. FusedAdamW and its siblings
// (optimizer.h) implement it; WrapTorchOptimizer (torch_optimizer.h) wraps any torch::optim
// optimizer in one. Not thread-safe. Errors are c10::Error.
class OptimizerHandle : public LrTarget {
 public:
  // A number that no other handle in this process has or had. A different number at the same
  // address means another optimizer. A copy gets its own number.
  uint64_t id() const { return id_.value; }

  // Whether this handle wraps exactly `optimizer`. A new optimizer at the address of a deleted one
  // has another type, lacks a parameter that this handle has seen, or lacks the state that this
  // handle's steps made. Uses only its argument and the handle's own state, so the wrapped
  // optimizer may already be deleted.
  virtual bool Wraps(const torch::optim::Optimizer& /*optimizer*/) const { return false; }

  // Whether both hold the same tensors in the same order.
  bool SameParameters(const OptimizerHandle& other) const;

  // Makes one update from the existing gradients; parameters without a gradient are left unchanged.
  virtual void Step() = 0;

  // Like Step(), without waiting for a device: divides gradients by `grad_scale` (if defined) and
  // changes nothing if `found_inf` is not 0. Both are 0-d F32 on the parameters' device. Only if
  // supports_scaled_step().
  virtual bool supports_scaled_step() const { return false; }
  virtual void StepScaled(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  // Whether the update must evaluate the loss itself (LBFGS): Step() then throws.
  virtual bool needs_closure() const { return false; }
  // torch's step(closure): `closure` zeroes the gradients, runs the forward and the backward pass
  // and returns the loss. It is called with grad mode on, once or as often as the optimizer needs.
  // Returns the loss of the first call.
  virtual at::Tensor StepWithClosure(const std::function<at::Tensor()>& closure);

  // All parameters that the optimizer holds now, group by group, including groups added later. The
  // reference is valid until the optimizer gets other parameters. Looks at every parameter, so
  // hoist it out of loops.
  const std::vector<at::Tensor>& parameters() const {
    Refresh();
    return parameters_;
  }
  // Increases whenever parameters() has changed.
  int64_t parameters_version() const {
    Refresh();
    return version_;
  }

  // Makes the optimizer update `replacement(p)` in place of each parameter p, in the same group and
  // under the same name; where that is undefined, p stays. Throws, with nothing changed, if the
  // optimizer already has state or has stepped, or if its update is not known to be elementwise, as
  // for LBFGS and classes that are not LibTorch's.
  virtual void ReplaceParameters(const std::function<at::Tensor(const at::Tensor&)>& replacement);

  // Keeps the state tensors except `step` in `file` (scratch_file.h) between steps or, if that is
  // null, in CPU memory; a step moves them to the parameters in windows, one after another. Call it
  // before the first step; no effect if they are already offloaded. SaveState() then returns
  // tensors in mapped memory, which are read from the file on access: copy them before the next
  // step. Throws, with nothing changed, if this optimizer does not support it or already has state.
  // A step throws if the file fails; so do all later steps and saves, until LoadState().
  virtual void OffloadState(std::shared_ptr<ScratchFile> file);

  // Bytes of CPU memory that the next step takes for states that are offloaded there, of the
  // parameters for which counted(p).
  virtual uint64_t HostBytesToTake(
      const std::function<bool(const at::Tensor& parameter)>& /*counted*/) const {
    return 0;
  }

  // Never detaches a gradient, as torch::optim's zero_grad does, because a bucket view forbids it.
  void ZeroGrad(GradZeroing how = GradZeroing::kSetToNone);

  // Sets names for the state's tensors, one per parameter, all different. Parameters keep them;
  // parameters added later use their numbers.
  void set_parameter_names(std::vector<std::string> names);
  const std::vector<std::string>& parameter_names() const {
    Refresh();
    return names_;
  }

  // Returns why SaveState() and LoadState() would throw, in one line with the remedy; empty if they
  // would not.
  virtual std::string CannotSave() const { return ""; }
  virtual OptimizerState SaveState() const = 0;
  // The sizes and hyper-parameters among SaveState().groups, without a look at any state. Of LBFGS
  // and of classes that are not LibTorch's only the sizes and, where they have one, the rates.
  virtual PlainState SaveGroups() const = 0;
  // Throws what LoadState() would throw for a name, a shape, a number or a group that does not fit.
  // Changes nothing. It cannot know what the load() of a class outside LibTorch refuses.
  virtual void CheckState(const OptimizerState& state) const = 0;
  // Copies the values in, after CheckState().
  virtual void LoadState(const OptimizerState& state) = 0;

 protected:
  // Calls SetParameters() if the optimizer's parameters no longer equal seen_parameters().
  virtual void Refresh() const {}
  const std::vector<at::Tensor>& seen_parameters() const { return parameters_; }

  // Subclasses call it in their constructor and whenever parameters have changed. Throws, with
  // nothing changed, for a tensor that cannot be optimized: undefined, not a leaf, twice in the
  // list, or with elements that share memory.
  void SetParameters(std::vector<at::Tensor> parameters) const;

  // The same for as many parameters as before, which keep their names.
  void ExchangeParameters(std::vector<at::Tensor> parameters) const;

  // Returns the slots of each parameter in a state to load, as slot name to tensor. Checks that
  // every tensor of `state` belongs to a parameter and a slot in `known`, and that all except
  // `step` have the parameter's shape.
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

// Call it when weights have changed. Otherwise LibTorch would continue to use its low-precision
// copies of the old weights inside an autocast scope that began earlier.
void ForgetCastWeights();

// Adds the row "<group>.params" for each group: how many parameters it has.
void PutGroupSizes(const std::vector<size_t>& sizes, PlainState* groups);

// Throws unless `groups` describes parameter groups of these sizes. Rows of older states have no
// sizes: then only how many groups there are counts.
void CheckGroupSizes(const PlainState& groups, const std::vector<size_t>& sizes);

// Returns the row "<group>.<name>" of `groups`, of `size` numbers. Throws if there is none.
const std::vector<double>& GroupRow(const PlainState& groups, int64_t group,
                                    const std::string& name, size_t size);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OPTIMIZER_HANDLE_H_
