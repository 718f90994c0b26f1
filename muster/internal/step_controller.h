#ifndef MUSTER_INTERNAL_STEP_CONTROLLER_H_
#define MUSTER_INTERNAL_STEP_CONTROLLER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "muster/internal/backward_watch.h"
#include "muster/internal/empty_losses.h"
#include "muster/internal/gradient_origins.h"
#include "muster/internal/gradient_samples.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/scopes.h"
#include "muster/internal/stray_gradients.h"
#include "muster/options.h"
#include "worker/data/batch.h"
#include "worker/parallel/uneven_inputs.h"
#include "worker/train/accumulation.h"
#include "worker/train/grad_scaler.h"
#include "worker/train/plain_state.h"

namespace muster {
class ShardedModel;
class StatisticsRanks;
}  // namespace muster

namespace muster::internal {

class BackwardUpdates;

// The training step: groups micro-steps into windows, exchanges, scales, checks and clips
// gradients, and decides when optimizers may step. Not thread-safe.
class StepController {
 public:
  // Borrows all arguments.
  StepController(const Process& process, Registry& registry, LoopTracker& loops);
  ~StepController();
  StepController(const StepController&) = delete;
  StepController& operator=(const StepController&) = delete;

  const Process& process() const { return process_; }
  const std::shared_ptr<BackwardPasses>& passes() const { return passes_; }
  // The ranks that prepared models bind their SyncBatchNorms to; these modules may live longer.
  const StatisticsRanks& statistics_ranks() const { return *statistics_ranks_; }
  // Null if optimizers step only between backward passes.
  const std::shared_ptr<BackwardUpdates>& updates() const { return updates_; }
  // Throws if a backward pass has updated parameters and step() has not followed yet. `what`: the
  // call that would come between them, such as a save.
  void CheckStepped(const char* what) const;
  // Throws if a step of an unsharded model has failed on this process: the others do not know of
  // the failure and may have stepped. Also throws after NoteFailedLoad(). Both until Reset().
  void CheckNoStepFailed(const char* what) const;
  // Records that `call` has failed on every process after the first weight had changed, when the
  // processes had read different parts. CheckNoLoadFailed() then throws until Reset().
  void NoteFailedLoad(const char* call);
  void CheckNoLoadFailed(const char* what) const;

  // Begins a micro-step with the batch of the current loop or with the given facts of a batch.
  AccumulateScope Accumulate();
  AccumulateScope Accumulate(const std::optional<BatchFacts>& facts);
  AccumulateScope Accumulate(const BatchInfo& info);
  void EndMicroStep();
  bool in_micro_step() const { return in_micro_step_; }
  const MicroStep& micro_step() const { return accumulation_.current(); }
  bool at_boundary() const { return accumulation_.at_boundary(); }
  // Whether backward() under no_sync() has left gradients that no step has used and no zero_grad()
  // has cleared.
  bool holds_back() const { return holds_back_; }
  // Whether no micro-step and no window of accumulate() is open. For windows that the program makes
  // with no_sync(), see holds_back().
  bool between_windows() const { return !in_micro_step_ && at_boundary(); }
  bool sync_gradients() const { return no_sync_depth_ == 0 && accumulation_.sync_gradients(); }
  bool communicate() const {
    return no_sync_depth_ == 0 && local_depth_ == 0 &&
           (!in_micro_step_ || accumulation_.current().communicate);
  }
  int64_t gradient_accumulation_steps() const { return accumulation_.num_steps(); }
  void set_gradient_accumulation_steps(int64_t steps) { accumulation_.set_num_steps(steps); }

  // Enters (+1) or leaves (-1) a no_sync().
  void ChangeNoSync(int by);
  void ChangeLocal(int by);
  // Whether the weights and optimizer states of unsharded models may differ between processes. A
  // gradient_hook of the program may give each process its own gradients.
  bool trained_apart() const {
    return apart_ || process_.options().allow_local_gradients ||
           process_.options().data_parallel.gradient_hook != nullptr;
  }
  // Sets the function that is called before Muster itself changes the weights or the state of
  // prepared optimizers.
  void SetBeforeChange(std::function<void()> function) { before_change_ = std::move(function); }
  // Announces such a change. `only`: the prepared model whose weights are going to change; null:
  // those of any model.
  void AboutToChange(const ModelSlot* only = nullptr);
  // Adds `by` to the number of scopes in which the model's weights are an average instead of the
  // trained ones.
  void ChangeAveraged(int by);
  bool averaged() const { return averaged_depth_ > 0; }

  void BeginJoin(bool even_batches);
  // With `finish`, waits for the processes that still have batches.
  void EndJoin(bool finish);
  bool joining() const { return join_ != nullptr; }
  // Throws if processes that have run out of batches would not take part in `call`.
  void CheckAllTakePart(const char* call) const;

  // Takes the loss scale from `state`, the state of a scaler, and rescales gradients that wait for
  // a step. scaler() must not be null.
  void TakeScale(const PlainState& state);

  void Backward(const at::Tensor& loss, std::optional<double> weight = std::nullopt,
                const BackwardOptions& how = {});
  // Makes the gradients of this window final for `only`, or for all optimizers if it is null:
  // unscales them and corrects them for a short or weighted window. Does so once per window and
  // optimizer; later calls do nothing.
  void FinishGradients(OptimizerSlot* only = nullptr);
  at::Tensor ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                          double norm_type);
  void ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value);

  // Implement the methods of OptimizerSlot with these names.
  void Step(OptimizerSlot& slot);
  at::Tensor StepWithClosure(OptimizerSlot& slot, const std::function<at::Tensor()>& closure);
  void ZeroGrad(OptimizerSlot& slot, bool set_to_none);
  bool optimizer_step_was_skipped() const;

  // Handles an optimizer that the registry has forgotten: the step ends with those that remain.
  void OptimizerForgotten();
  // Gives up the open window, because a state was loaded or all objects are forgotten.
  void Reset();
  // Null without loss scaling.
  GradScaler* scaler() { return scaler_.get(); }

 private:
  // Parameters, with those of sharded models replaced by this process's shards of them.
  struct Resolved {
    std::vector<at::Tensor> whole, shards;
    Comm* comm = nullptr;  // of the processes that hold the shards; null without shards
  };
  Resolved Resolve(const std::vector<at::Tensor>& parameters) const;
  void CheckGradientsThere(const Resolved& resolved, const char* what) const;

  // Returns the factor by which gradients of a reducing backward pass are multiplied before
  // optimizers use them inside the pass; nullopt if optimizers do not use them there.
  std::optional<double> BeginUpdates();
  void BeginWindow();
  // Handles an exception that leaves the last micro-step of a window: unless a step still follows,
  // the next window begins without the gradients of this one.
  void BreakWindow();
  double WindowFactor();
  void CheckLoss(const at::Tensor& loss, const std::optional<double>& weight) const;
  // `empty`: this process's loss is a mean over no items.
  void CheckFinite(const at::Tensor& loss, bool empty) const;
  // After a backward pass that may have exchanged gradients inside the JoinScope.
  void NoteJoinedExchange();
  // Arms the exchange again for models whose last graph a backward pass has already used.
  void ArmAgain(const BackwardOptions& how) const;
  void CheckWitnesses() const;
  // Called before the first loss of a window: throws if it would be added to gradients of an
  // earlier loss and either loss has a weight, because they need different factors.
  void CheckPendingLosses(bool weighted) const;
  // Records that a step is left out because the window has not ended. Throws if the micro-step
  // spans several batches, because none of their steps would ever take effect.
  void LeaveOutStep();
  // Whether prepared optimizers process gradients in a way that other optimizers do not: see
  // StrayGradients.
  bool StepsKnowMore() const;
  // Warns, at the first step, if no parameter of the optimizer has a gradient.
  void WarnIfNoGradients(OptimizerSlot& slot) const;
  // Throws if a configuration asks for a schedule and `slot` has none.
  void CheckScheduled(const OptimizerSlot& slot) const;
  // Returns the sharded models that own some parameters of `slot`: the same ones on every rank.
  std::vector<ShardedModel*> ShardedModelsOf(const OptimizerSlot& slot) const;
  // Announces that `slot` changes its parameters of these models. Other gathered parameters stay
  // valid.
  void AnnounceStep(const OptimizerSlot& slot, const std::vector<ShardedModel*>& models) const;
  // Finishes the gradients of the optimizers that own some of `parameters`.
  void FinishGradientsOf(const std::vector<at::Tensor>& parameters);
  // Throws if `slot` is about to step on a wrong gradient: one that was not exchanged, comes from a
  // pass around the prepared model, or was cleared within its window.
  void CheckGradients(OptimizerSlot& slot) const;
  // Clips the gradients of `slot` as options.gradient_clipping says.
  void ClipInStep(OptimizerSlot& slot);
  // Undoes FinishGradients() for `slot`, because a backward pass is about to add to its gradients.
  void ReopenGradients(OptimizerSlot& slot) const;
  // Runs `change`, which changes the loss scale, and scales gradients that wait for a step to it.
  void ChangeScale(absl::FunctionRef<void()> change);
  // Updates the loss scale: once all optimizers have stepped, or when the next window begins.
  void UpdateScale();
  void Stepped(OptimizerSlot& slot);
  // Throws for an optimizer that the registry has forgotten: its gradients were not corrected for
  // their window, unscaled or zeroed along with those of the others.
  void CheckRemembered(const OptimizerSlot& slot) const;
  // Records the current exception as a failed step of unsharded models. Call it in a catch block.
  void NoteFailedStep();
  // Decides what a ZeroGrad() with steps left out for no_sync() meant. If a window `begins`,
  // because no_sync() is entered again, ZeroGrad() is done now; otherwise, at a backward pass, it
  // came at the head of the window's last micro-step and is ignored.
  void TellWindowsOfNoSync(bool begins);
  void ZeroNow(OptimizerSlot& slot, bool set_to_none);

  const Process& process_;
  Registry& registry_;
  LoopTracker& loops_;
  Accumulation accumulation_;
  std::unique_ptr<GradScaler> scaler_;
  const std::unique_ptr<StatisticsRanks> statistics_ranks_;
  const std::shared_ptr<BackwardPasses> passes_ = std::make_shared<BackwardPasses>();
  const StrayGradients strays_;
  const GradientOrigins origins_;
  GradientSamples samples_;
  EmptyLosses empty_losses_;

  std::shared_ptr<BackwardUpdates> updates_;

  std::function<void()> before_change_;
  std::string failed_step_;  // why a step has failed; empty if none has
  std::string failed_load_;  // the call that has failed; empty if none has
  int no_sync_depth_ = 0;
  int64_t held_back_pass_ = 0;  // the last backward pass when the last no_sync() ended
  bool holds_back_ = false;
  int local_depth_ = 0;
  int averaged_depth_ = 0;
  bool apart_ = false;  // there was a LocalScope, or a JoinScope that was left early
  bool in_micro_step_ = false;
  int exceptions_ = 0;  // those that were on their way when the micro-step began
  // Whether the micro-step has begun outside of any loop, so that it can span several batches.
  bool outside_loops_ = false;
  // The iteration and index of the last batch in which a step was left out.
  std::optional<std::pair<uint64_t, int64_t>> left_out_at_;
  bool in_backward_ = false;            // inside accelerator.backward()
  bool in_closure_ = false;             // inside the closure of an optimizer's step
  int64_t window_backwards_ = 0;        // backward passes in this window
  bool window_broken_ = false;          // BreakWindow() has left gradients to the next window
  std::unique_ptr<UnevenInputs> join_;  // while a JoinScope lives
  double join_factor_ = 1;
  // Whether a backward pass of the micro-step has exchanged gradients inside the JoinScope.
  bool join_exchanged_ = false;
  // The factor that FinishGradients() multiplies by; nullopt before it is known.
  std::optional<double> window_factor_;
  bool said_who_clips_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_STEP_CONTROLLER_H_
