#ifndef MUSTER_WORKER_TRAIN_GRAD_SCALER_H_
#define MUSTER_WORKER_TRAIN_GRAD_SCALER_H_

#include <cstdint>
#include <map>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"
#include "worker/train/optimizer_handle.h"
#include "worker/train/options.h"
#include "worker/train/plain_state.h"

namespace muster {

// Loss scaling for fp16, with PyTorch's rules. Per optimizer step:
//
//   loss = scaler.Scale(loss); backward;   scaler.Unscale(opt) [optional];   scaler.Step(opt);
//   scaler.Update()
//
//   each optimizer:  ready --Unscale--> unscaled --Step--> stepped --Update--> ready
//                      ^--------------Reopen---------------------'
//
// An optimizer whose gradients hold an inf or NaN is not stepped, and the scale backs off at
// Update(). Unlike PyTorch's, a second Unscale() of an optimizer in one step does nothing, so
// clipping twice (or clipping parts) is no error. Works on CPU and CUDA. On CUDA nothing here waits
// for the device except step_was_skipped() and the state, as long as the optimizer
// supports_scaled_step(); with a hysteresis or a min_scale Update() waits, too. Not thread-safe.
// Errors are c10::Error.
class GradScaler {
 public:
  // With `comm`, an overflow on any rank counts on all of them: needed where ranks hold different
  // gradients (sharded), not for plain data parallelism. Unscale() or Step() is then a collective.
  // `comm` is borrowed and may be null.
  explicit GradScaler(const GradScalerOptions& options = {}, Comm* comm = nullptr);

  bool enabled() const { return options_.enabled; }

  // Returns loss * scale.
  at::Tensor Scale(const at::Tensor& loss);

  // Divides the gradients of `optimizer` by the scale and looks for inf and NaN. Once per step;
  // later calls do nothing.
  void Unscale(OptimizerHandle& optimizer);

  // Makes the next Unscale() of `optimizer` apply to other gradients. An overflow so far still
  // counts in Update().
  void Reopen(const OptimizerHandle& optimizer);
  // Calls Reopen() and multiplies the gradients of `optimizer`, which must be unscaled, by the
  // scale. Needed before a backward pass of a scaled loss adds to them, so that Unscale() is right
  // for the sum.
  void Rescale(OptimizerHandle& optimizer);

  // Steps `optimizer` unless its gradients overflowed; unscales them first if that has not been
  // done yet.
  void Step(OptimizerHandle& optimizer);
  // The same for gradients that Unscale() has divided, without a Reopen() since. Unlike Step(), it
  // does not divide them again if an Update() came in between; an overflow that this Update() has
  // counted skips the step but does not count again.
  void StepUnscaled(OptimizerHandle& optimizer);

  // Whether the last Step() of `optimizer` was skipped. Stays until its next Step(). May wait for
  // the device.
  bool step_was_skipped(const OptimizerHandle& optimizer) const;

  // Ends the step: grows or backs off the scale. Errors: no Step() or Unscale() before; an overflow
  // at the smallest scale that the options allow.
  void Update();

  // Whether some optimizer was unscaled or stepped since the last Update().
  bool pending() const;
  // Forgets such steps, because a state is loaded. StepUnscaled() still knows of overflows.
  void Reset();
  // Forgets all that is known of optimizers. The scale stays.
  void ForgetOptimizers() { optimizers_.clear(); }

  double scale() const;
  // The scale as a 0-d F32 tensor on its device, so that nothing waits to read it; Update() changes
  // it in place.
  const at::Tensor& scale_tensor() const { return scale_; }
  int64_t growth_tracker() const;

  // Saves the state as it will be after Update(), if one is due. Errors: those of Update().
  PlainState SaveState() const;
  // Throws for a state that LoadState() would refuse. Changes nothing.
  void CheckState(const PlainState& state) const;
  // Loads a state. Errors: those of CheckState().
  void LoadState(const PlainState& state);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct PerOptimizer {
    Stage stage = Stage::kReady;
    at::Tensor found_inf;       // 0-d F32, of this step
    at::Tensor earlier_inf;     // of steps before Reopen(), since the last Update()
    at::Tensor last_found_inf;  // of the last Step()
    at::Tensor unscaled_inf;    // of the last Unscale(), until Reopen()
  };

  const GradScalerOptions options_;
  Comm* const comm_;
  at::Tensor scale_;                             // 0-d F32; on the device of the first loss
  at::Tensor tracker_;                           // 0-d I32: good steps in a row
  int64_t patience_;                             // overflows until the scale backs off
  std::map<uint64_t, PerOptimizer> optimizers_;  // by OptimizerHandle::id()

  void EnsureOn(c10::Device device);
  // Multiplies the gradients by `factor`, 0-d F32, and returns whether one holds an inf or NaN.
  static at::Tensor Multiply(OptimizerHandle& optimizer, const at::Tensor& factor);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_GRAD_SCALER_H_
