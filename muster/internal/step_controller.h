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

// The training step: windows of micro-steps, where gradients are exchanged, scaled, checked and
// clipped, and when optimizers may step. Not thread-safe.
class StepController {
 public:
  // All are borrowed.
  StepController(const Process& process, Registry& registry, LoopTracker& loops);
  ~StepController();
  StepController(const StepController&) = delete;
  StepController& operator=(const StepController&) = delete;

  const Process& process() const { return process_; }
  const std::shared_ptr<BackwardPasses>& passes() const { return passes_; }
  // The ranks that prepared models bind their SyncBatchNorms to; these modules may live longer.
  const StatisticsRanks& statistics_ranks() const { return *statistics_ranks_; }
  // Null where optimizers step between backward passes alone.
  const std::shared_ptr<BackwardUpdates>& updates() const { return updates_; }
  // The program is about to save: throws between a backward pass that has updated and step().
  void CheckStepped(const char* what) const;
  // Throws after a step of an unsharded model that has failed on this process: the others do not
  // know of it, and may have stepped. Until Reset().
  void CheckNoStepFailed(const char* what) const;
  // `call`, on every process, has failed after the first weight had changed: the processes have
  // read different parts. CheckNoStepFailed() throws that too, until Reset().
  void NoteFailedLoad(const char* call);
  void CheckNoLoadFailed(const char* what) const;

  // Begins a micro-step, by the loop under way or by the facts of a batch.
  AccumulateScope Accumulate();
  AccumulateScope Accumulate(const std::optional<BatchFacts>& facts);
  AccumulateScope Accumulate(const BatchInfo& info);
  void EndMicroStep();
  bool in_micro_step() const { return in_micro_step_; }
  const MicroStep& micro_step() const { return accumulation_.current(); }
  bool at_boundary() const { return accumulation_.at_boundary(); }
  // backward() under no_sync() has left gradients that no step has used and no zero_grad() cleared.
  bool holds_back() const { return holds_back_; }
  // Muster's own windows have no gradients on their way to a step.
  bool between_windows() const { return !in_micro_step_ && at_boundary(); }
  bool sync_gradients() const { return no_sync_depth_ == 0 && accumulation_.sync_gradients(); }
  bool communicate() const {
    return no_sync_depth_ == 0 && local_depth_ == 0 &&
           (!in_micro_step_ || accumulation_.current().communicate);
  }
  int64_t gradient_accumulation_steps() const { return accumulation_.num_steps(); }
  void set_gradient_accumulation_steps(int64_t steps) { accumulation_.set_num_steps(steps); }

  void ChangeNoSync(int by) { no_sync_depth_ += by; }
  void ChangeLocal(int by);
  // Whether the weights and optimizer states of unsharded models may differ between processes. A
  // gradient_hook of the program's may give each its own gradients.
  bool trained_apart() const {
    return apart_ || process_.options().allow_local_gradients ||
           process_.options().data_parallel.gradient_hook != nullptr;
  }
  // `function` is called before Muster itself changes the weights or the state of prepared
  // optimizers.
  void SetBeforeChange(std::function<void()> function) { before_change_ = std::move(function); }
  // `only`: the prepared model whose weights are going to change; null: those of any.
  void AboutToChange(const ModelSlot* only = nullptr);
  // The model's weights are, for a time, not those that are trained.
  void ChangeAveraged(int by);
  bool averaged() const { return averaged_depth_ > 0; }

  void BeginJoin(bool even_batches);
  // `finish`: wait for the processes that still have batches.
  void EndJoin(bool finish);
  bool joining() const { return join_ != nullptr; }
  // Throws where processes that have run out of batches would not take part in `call`.
  void CheckAllTakePart(const char* call) const;

  // The loss scale becomes that of this state of a scaler, and gradients that wait for a step
  // follow it. Only where scaler() is not null.
  void TakeScale(const PlainState& state);

  void Backward(const at::Tensor& loss, std::optional<double> weight = std::nullopt,
                const BackwardOptions& how = {});
  // Makes the gradients of this window final: unscaled, and corrected for a short or weighted
  // window. Once per window and optimizer; of all optimizers if `only` is null.
  void FinishGradients(OptimizerSlot* only = nullptr);
  at::Tensor ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                          double norm_type);
  void ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value);

  // What an OptimizerSlot does with its optimizer.
  void Step(OptimizerSlot& slot);
  at::Tensor StepWithClosure(OptimizerSlot& slot, const std::function<at::Tensor()>& closure);
  void ZeroGrad(OptimizerSlot& slot, bool set_to_none);
  bool optimizer_step_was_skipped() const;

  // An optimizer is left out: the step ends with those that remain.
  void OptimizerForgotten();
  // The window that is open is given up: a state was loaded, or everything is forgotten.
  void Reset();
  // Null without loss scaling.
  GradScaler* scaler() { return scaler_.get(); }

 private:
  // Parameters of sharded models as this process's shards of them.
  struct Resolved {
    std::vector<at::Tensor> whole, shards;
    Comm* comm = nullptr;  // of the processes that divide them; null without shards
  };
  Resolved Resolve(const std::vector<at::Tensor>& parameters) const;
  void CheckGradientsThere(const Resolved& resolved, const char* what) const;

  // The factor by which gradients of a reducing backward pass are multiplied before optimizers use
  // them inside the pass; nothing: optimizers do not use them there.
  std::optional<double> BeginUpdates();
  void BeginWindow();
  // An exception leaves the last micro-step of a window: unless a step follows nevertheless, the
  // next window begins without the gradients of this one.
  void BreakWindow();
  double WindowFactor();
  void CheckLoss(const at::Tensor& loss, const std::optional<double>& weight) const;
  // `empty`: this process's loss is one of no items.
  void CheckFinite(const at::Tensor& loss, bool empty) const;
  // Arms the exchange of models whose graph a backward pass has been through before.
  void ArmAgain(const BackwardOptions& how) const;
  void CheckWitnesses() const;
  // Before the first loss of a window, weighted or not: the gradients that it adds to must be
  // multiplied alike.
  void CheckPendingLosses(bool weighted) const;
  // A step is left out, for the window has not ended. Throws where the micro-step spans batches,
  // none of which would ever be stepped on.
  void LeaveOutStep();
  // Whether prepared optimizers do to gradients what others would not: see StrayGradients.
  bool StepsKnowMore() const;
  // At the first step.
  void WarnIfNoGradients(OptimizerSlot& slot) const;
  // Throws if a configuration asks for a schedule, and `slot` has none.
  void CheckScheduled(const OptimizerSlot& slot) const;
  // The sharded models that some parameters of `slot` are of: the same on every rank.
  std::vector<ShardedModel*> ShardedModelsOf(const OptimizerSlot& slot) const;
  // An optimizer of these changes them. What is gathered of others stays.
  void AnnounceStep(const OptimizerSlot& slot, const std::vector<ShardedModel*>& models) const;
  // Of the optimizers that own some of `parameters`.
  void FinishGradientsOf(const std::vector<at::Tensor>& parameters);
  // Throws, naming one, if `slot` is about to step on a gradient that is not what training needs:
  // not exchanged, of a pass around the prepared model, or emptied within its window.
  void CheckGradients(OptimizerSlot& slot) const;
  // As options.gradient_clipping says.
  void ClipInStep(OptimizerSlot& slot);
  // A backward pass is about to add to finished gradients, if `slot` has any: makes them what they
  // would be if they had not been finished.
  void ReopenGradients(OptimizerSlot& slot) const;
  // Runs `change`, which changes the loss scale, and scales gradients that wait for a step to it.
  void ChangeScale(absl::FunctionRef<void()> change);
  // Once all optimizers have stepped, or when the next window begins.
  void UpdateScale();
  void Stepped(OptimizerSlot& slot);
  // Throws for an optimizer that the registry has forgotten: its gradients were not corrected for
  // their window, unscaled or zeroed with those of the others.
  void CheckRemembered(const OptimizerSlot& slot) const;
  // In a catch block: of models that are not sharded.
  void NoteFailedStep();
  // At a backward pass: whether ZeroGrad() was called at the head of a window's last micro-step.
  void TellWindowsOfNoSync();
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
  std::string failed_step_;  // why a step has failed; empty: none has
  std::string failed_load_;  // which call; empty: none
  int no_sync_depth_ = 0;
  bool holds_back_ = false;
  int local_depth_ = 0;
  int averaged_depth_ = 0;
  bool apart_ = false;  // a LocalScope has been there, or a JoinScope that was left early
  bool in_micro_step_ = false;
  // The micro-step has begun outside of any loop, so it can span several batches: the last one in
  // which a step was left out.
  bool outside_loops_ = false;
  std::optional<std::pair<uint64_t, int64_t>> left_out_at_;
  bool in_backward_ = false;            // of accelerator.backward()
  bool in_closure_ = false;             // of an optimizer's step
  int64_t window_backwards_ = 0;        // backward passes in this window
  bool window_broken_ = false;          // BreakWindow() has left gradients to the next one
  std::unique_ptr<UnevenInputs> join_;  // while a JoinScope lives
  double join_factor_ = 1;
  // A backward pass of the micro-step has exchanged gradients with processes without batches.
  bool join_exchanged_ = false;
  // What FinishGradients multiplies by; nothing before it is known.
  std::optional<double> window_factor_;
  bool said_who_clips_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_STEP_CONTROLLER_H_
