#include "muster/internal/step_controller.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <string>
#include <unordered_set>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "muster/internal/backward_updates.h"
#include "muster/internal/parameter_sets.h"
#include "worker/collective/collective_error.h"
#include "worker/collective/nested_collectives.h"
#include "worker/collective/on_all.h"
#include "worker/parallel/ddp.h"
#include "worker/parallel/meeting.h"
#include "worker/parallel/shard_unit.h"
#include "worker/parallel/sharded_model.h"
#include "worker/parallel/sync_batch_norm.h"
#include "worker/train/activation_policy.h"
#include "worker/train/clip.h"
#include "worker/train/sync_state.h"

namespace muster::internal {

namespace {

AccumulationOptions WithSteps(AccumulationOptions options, int64_t steps) {
  options.num_steps = steps;
  return options;
}

// Whether processes exchange the gradients of an unsharded model.
bool IsTrained(ModelSlot& model) {
  if (model.ddp() == nullptr) return false;
  const std::vector<at::Tensor>& parameters = model.ddp()->parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const at::Tensor& parameter) { return parameter.requires_grad(); });
}

}  // namespace

StepController::StepController(const Process& process, Registry& registry, LoopTracker& loops)
    : process_(process),
      registry_(registry),
      loops_(loops),
      accumulation_(WithSteps(process.options().accumulation,
                              AccumulationSteps(process.options(), process.environment()))),
      statistics_ranks_(std::make_unique<StatisticsRanks>(process.comm())),
      strays_(process, registry, *passes_),
      origins_(process, registry, *passes_),
      samples_(process, registry),
      empty_losses_(registry) {
  if (NeedsGradScaler(process.precision()) && process.grad_scaler().enabled) {
    // Each process sees the gradients of its own shards only.
    const bool sharded =
        process.size() > 1 && process.sharding().strategy != ShardingStrategy::kNone;
    scaler_ =
        std::make_unique<GradScaler>(process.grad_scaler(), sharded ? &process.comm() : nullptr);
  }
  if (!process.sharding().optimizer_in_backward) return;
  TORCH_CHECK(scaler_ == nullptr,
              "options.sharding.optimizer_in_backward with fp16: whether a step is skipped is "
              "known only once all gradients exist, and by then the optimizer has used them. Use "
              "mixed_precision \"bf16\", or leave the option out");
  TORCH_CHECK(process.gradient_clipping() == 0,
              "options.sharding.optimizer_in_backward with options.gradient_clipping (or "
              "gradient_clipping of a DeepSpeed config): the norm is known only once all gradients "
              "exist, and by then the optimizer has used them. Leave one of them out");
  updates_ = std::make_shared<BackwardUpdates>(registry, [this] { return BeginUpdates(); });
}

StepController::~StepController() = default;

std::optional<double> StepController::BeginUpdates() {
  if (!sync_gradients()) return std::nullopt;
  TORCH_CHECK(in_backward_ || (accumulation_.current().divisor == 1 &&
                               accumulation_.current().gradient_factor == 1),
              "loss.backward() with gradient accumulation and "
              "options.sharding.optimizer_in_backward: it does not divide the loss for the window; "
              "call accelerator.backward(loss)");
  TORCH_CHECK(averaged_depth_ == 0,
              "backward() inside ema.apply() with options.sharding.optimizer_in_backward, where "
              "the model's weights are the average: train before or after that scope");
  // The pass is about to change what before_change_ protects, such as a save that is still copying.
  if (before_change_) before_change_();
  return WindowFactor();
}

void StepController::CheckStepped(const char* what) const {
  if (updates_ == nullptr) return;
  for (const auto& optimizer : registry_.optimizers()) updates_->CheckStepped(*optimizer, what);
}

AccumulateScope StepController::Accumulate() {
  // With loops side by side, it matters which one is meant only if it can end a window.
  const bool by_end =
      gradient_accumulation_steps() > 1 && accumulation_.options().sync_with_dataloader;
  const BatchInfo* batch = by_end ? loops_.BatchOfMicroStep() : loops_.current_batch();
  if (batch != nullptr) return Accumulate(*batch);
  return Accumulate(std::optional<BatchFacts>());
}

AccumulateScope StepController::Accumulate(const BatchInfo& info) {
  return Accumulate(BatchFacts{.is_last = info.is_last, .batches_left = info.batches_left});
}

AccumulateScope StepController::Accumulate(const std::optional<BatchFacts>& facts) {
  TORCH_CHECK(!in_micro_step_,
              "accumulate() inside of accumulate(): the scope of the previous micro-step is still "
              "alive; end it before the next one begins");
  if (accumulation_.at_boundary()) BeginWindow();
  if (join_ == nullptr) {
    accumulation_.Begin(facts);
  } else {
    const UnevenInputs::Decision decision =
        join_->MicroStep(accumulation_.WouldSync(facts), accumulation_.options().sync_each_batch);
    accumulation_.Begin(facts, decision.sync);
    join_factor_ = decision.gradient_factor;
    join_exchanged_ = false;
  }
  in_micro_step_ = true;
  exceptions_ = std::uncaught_exceptions();
  outside_loops_ = !facts.has_value();
  left_out_at_.reset();
  process_.progress().SetPhase("forward");
  loops_.MarkTrained();
  return AccumulateScope(this);
}

void StepController::ChangeLocal(int by) {
  for (const auto& model : registry_.models()) {
    TORCH_CHECK(by < 0 || model->sharded() == nullptr,
                "LocalSGD with a sharded model: a process has only its part of the weights and "
                "cannot train apart from the others; train without sharding, or without LocalSGD");
  }
  local_depth_ += by;
  apart_ = true;
}

void StepController::AboutToChange(const ModelSlot* only) {
  strays_.Forget();
  for (const auto& model : registry_.models()) {
    if (model->sharded() == nullptr || (only != nullptr && model.get() != only)) continue;
    model->sharded()->Expire();
  }
  if (before_change_) before_change_();
}

void StepController::ChangeAveraged(int by) {
  averaged_depth_ += by;
  strays_.Forget();
}

std::vector<ShardedModel*> StepController::ShardedModelsOf(const OptimizerSlot& slot) const {
  // Looks at all parameters of the optimizer, because its parts of a model may all be empty on this
  // rank.
  const std::vector<at::Tensor>& parameters = slot.handle_->parameters();
  std::vector<ShardedModel*> models;
  for (const auto& model : registry_.models()) {
    ShardedModel* const sharded = model->sharded();
    if (sharded == nullptr) continue;
    const bool has = std::any_of(
        parameters.begin(), parameters.end(),
        [&](const at::Tensor& parameter) { return sharded->NameOf(parameter) != nullptr; });
    if (has) models.push_back(sharded);
  }
  return models;
}

void StepController::AnnounceStep(const OptimizerSlot& slot,
                                  const std::vector<ShardedModel*>& models) const {
  for (ShardedModel* const model : models) model->ExpireStepped(slot.handle_->parameters());
  if (before_change_) before_change_();
}

void StepController::BeginWindow() {
  window_factor_.reset();
  window_backwards_ = 0;
  if (scaler_ != nullptr && scaler_->pending()) UpdateScale();
  bool given_up = false;
  for (const auto& optimizer : registry_.optimizers()) {
    // If zero_at_end_ is set, the previous window has ended without a step, or with one that was
    // made after the last micro-step's scope.
    if (!optimizer->zero_at_end_.has_value()) {
      optimizer->witness_.reset();
    } else {
      given_up = given_up || !optimizer->consumed_;
      ZeroNow(*optimizer, *optimizer->zero_at_end_);
    }
    optimizer->waits_ = optimizer->pending_losses_ != OptimizerSlot::Losses::kNone;
  }
  if (std::exchange(window_broken_, false) && given_up) {
    MUSTER_LOG(Warning) << "an exception has left the last micro-step of an accumulation window "
                           "before its optimizer.step(): the gradients of that window are given "
                           "up";
  }
}

void StepController::BreakWindow() {
  // If optimizers use gradients inside the pass, nothing is left over, and step() says what is
  // missing.
  if (updates_ != nullptr) return;
  for (const auto& optimizer : registry_.optimizers()) {
    // One with gradients of earlier windows steps less often than others: it keeps them.
    if (optimizer->consumed_ || optimizer->waits_ ||
        optimizer->pending_losses_ == OptimizerSlot::Losses::kNone) {
      continue;
    }
    // zero_at_end_ leaves the gradients as they are, because a step may still follow after the
    // scope.
    if (!optimizer->zero_at_end_.has_value()) optimizer->zero_at_end_ = true;
    window_broken_ = true;
  }
}

void StepController::EndMicroStep() {
  // Zeroing gradients may throw: it comes last, so that the next micro-step finds this one ended.
  in_micro_step_ = false;
  for (const auto& model : registry_.models()) model->armed_ = ModelSlot::Armed::kNo;
  process_.progress().SetPhase("between steps");
  if (std::uncaught_exceptions() > exceptions_) {
    // Gradients that earlier micro-steps have added must not enter another window.
    if (sync_gradients()) BreakWindow();
    return;
  }
  for (const auto& optimizer : registry_.optimizers()) {
    // If there was no step yet, one may follow after the scope: BeginWindow() then zeroes the
    // gradients.
    if (optimizer->zero_at_end_.has_value() && optimizer->consumed_) {
      ZeroNow(*optimizer, *optimizer->zero_at_end_);
    }
  }
}

void StepController::CheckLoss(const at::Tensor& loss, const std::optional<double>& weight) const {
  TORCH_CHECK(loss.defined(), "backward() got an undefined loss");
  TORCH_CHECK(loss.numel() == 1, "backward() needs a loss of one element, got shape ", loss.sizes(),
              ": reduce it to its mean or sum first");
  TORCH_CHECK(
      loss.requires_grad(),
      "backward() got a loss that depends on no parameter: was it computed under NoGradGuard?");
  TORCH_CHECK(scaler_ == nullptr || !registry_.optimizers().empty(),
              "backward() under fp16 without a prepared optimizer: no optimizer would unscale the "
              "gradients; pass the optimizer to prepare()");
  if (registry_.optimizers().empty()) {
    TORCH_CHECK(!process_.configured().optimizer.has_value() || registry_.models().empty(),
                "backward() with the section \"optimizer\" of a DeepSpeed config and without a "
                "prepared optimizer: make it by accelerator.make_optimizer(parameters) and pass it "
                "to prepare(), or remove the section");
    TORCH_CHECK(process_.gradient_clipping() == 0,
                "backward() with options.gradient_clipping (or gradient_clipping of a DeepSpeed "
                "config) and without a prepared optimizer: no step would clip; pass the optimizer "
                "to prepare(), or remove the setting and call clip_grad_norm_()");
    for (const auto& model : registry_.models()) {
      TORCH_CHECK(model->sharded() == nullptr,
                  "backward() through a sharded model without a prepared optimizer: an optimizer "
                  "that is not prepared never gets the gradients, because each process has only "
                  "those of its own part of the parameters; pass the optimizer to prepare()");
    }
  }
  TORCH_CHECK(
      !in_micro_step_ || gradient_accumulation_steps() == 1 || registry_.models().empty() ||
          !registry_.optimizers().empty(),
      "backward() in accumulate() with gradient_accumulation_steps=", gradient_accumulation_steps(),
      " and no prepared optimizer: an optimizer that is not prepared does not wait for the end of "
      "the window; pass it to prepare()");
  TORCH_CHECK(
      join_ == nullptr || !weight.has_value(),
      "weighted losses inside join_uneven_inputs() would need an exchange that processes without "
      "batches do not take part in: use one or the other");
  if (!join_exchanged_ || !communicate()) return;
  std::string model = "a prepared model";
  for (size_t i = 0; i < registry_.models().size(); ++i) {
    if (!IsTrained(*registry_.models()[i])) continue;
    model = absl::StrCat("prepared model ", i, " (whose first parameter is '",
                         registry_.models()[i]->source().parameters().front().first, "')");
  }
  TORCH_CHECK(
      false,
      in_micro_step_ ? "a second backward() of one accumulate() inside join_uneven_inputs(): the "
                       "first one has exchanged the gradients of "
                     : "backward() after the scope of accumulate() inside join_uneven_inputs(): "
                       "one within it has exchanged the gradients of ",
      model,
      ", and a process that has run out of batches takes part in one exchange for each "
      "accumulate(), so the others would wait for it in this one. Add the losses up before one "
      "backward(), or begin a micro-step (accumulate()) for each; or train outside of this scope, "
      "with as many batches on every process (options.data_loader.even_batches)");
}

void StepController::NoteJoinedExchange() {
  // A pass that reaches no parameter of a model exchanges nothing, such as one that computes the
  // gradient of its input.
  for (const auto& model : registry_.models()) {
    if (model->ddp() == nullptr) continue;
    const std::vector<at::Tensor>& parameters = model->ddp()->parameters();
    join_exchanged_ =
        join_exchanged_ ||
        std::any_of(parameters.begin(), parameters.end(), [&model](const at::Tensor& parameter) {
          return parameter.requires_grad() && model->watch()->InLastPass(parameter);
        });
  }
}

void StepController::CheckFinite(const at::Tensor& loss, bool empty) const {
  // The mean over no items is NaN, which is no fault of the batch.
  const double value = empty ? 0 : loss.item<double>();
  // All ranks agree on the result, so that no rank continues into a collective that the others have
  // left.
  at::Tensor bad = at::full({process_.size()}, 0, at::kDouble);
  if (!std::isfinite(value)) bad[process_.rank()] = 1;
  // Processes that ran out of batches take no part in this exchange.
  if (process_.size() > 1 && join_ == nullptr) {
    bad = bad.to(process_.device());
    process_.comm().AllReduce(bad, ReduceOp::kMax);
    bad = bad.cpu();
  }
  std::string ranks;
  for (int r = 0; r < process_.size(); ++r) {
    if (bad[r].item<double>() != 0) absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", r);
  }
  TORCH_CHECK(ranks.empty(), "the loss is NaN or infinite on rank ", ranks, " at step ",
              registry_.global_step(), " (here: ", value,
              "); lower the learning rate or look at the batch");
}

void StepController::Backward(const at::Tensor& loss, std::optional<double> weight,
                              const BackwardOptions& how) {
  CheckNoStepFailed("backward()");
  CheckLoss(loss, weight);
  const bool empty = weight == 0.0;
  if (process_.options().check_finite_loss) CheckFinite(loss, empty);
  TellWindowsOfNoSync(/*begins=*/no_sync_depth_ > 0);
  if (!in_micro_step_ || window_backwards_ == 0) CheckPendingLosses(weight.has_value());
  // Outside of accumulate() every call is a window of its own, divided as Accelerate does.
  if (!in_micro_step_) {
    BeginWindow();
    accumulation_.BeginAlone();
    loops_.MarkTrained();
  }
  if (updates_ != nullptr) {
    CheckStepped("another backward()");
    TORCH_CHECK(!weight.has_value(),
                "backward(loss, weight) with options.sharding.optimizer_in_backward: the divisor "
                "of the gradients is known only at the end of the window, and by then the "
                "optimizer has used them. Leave one of them out");
  }
  CheckWitnesses();
  if (StepsKnowMore()) strays_.Check(scaler_ != nullptr);
  origins_.ForgetPlainPassesWithoutGradients();
  for (const auto& model : registry_.models()) {
    if (model->activation_policy() != nullptr) model->activation_policy()->BeginBackward();
  }
  const double divisor =
      weight.has_value() ? accumulation_.WeightedDivisor(*weight) : accumulation_.PlainDivisor();
  for (const auto& optimizer : registry_.optimizers()) {
    using Losses = OptimizerSlot::Losses;
    optimizer->pending_losses_ = weight.has_value() ? Losses::kWeighted : Losses::kPlain;
  }
  at::Tensor scaled = divisor == 1 ? loss : loss / divisor;
  if (scaler_ != nullptr) scaled = scaler_->Scale(scaled);
  for (const auto& optimizer : registry_.optimizers()) {
    if (optimizer->gradients_finished_) ReopenGradients(*optimizer);
  }
  const bool exchange = process_.size() > 1 && communicate();
  process_.progress().SetPhase(exchange ? "backward and gradient exchange" : "backward");
  if (exchange) ArmAgain(how);
  if (exchange && scaler_ != nullptr) {
    for (const auto& model : registry_.models()) {
      if (model->ddp() != nullptr) model->ddp()->set_loss_scale(scaler_->scale_tensor());
    }
  }
  for (const auto& model : registry_.models()) {
    if (model->armed_ == ModelSlot::Armed::kYes) model->armed_ = ModelSlot::Armed::kUsed;
  }
  try {
    const BackwardPasses::Scope pass(*passes_);
    std::optional<EmptyLosses::Scope> adds_nothing;
    if (empty) adds_nothing.emplace(empty_losses_);
    struct InBackward {
      explicit InBackward(bool& flag) : flag(flag) { flag = true; }
      ~InBackward() { flag = false; }
      bool& flag;
    } in_backward(in_backward_);
    scaled.backward({}, how.retain_graph || how.create_graph, how.create_graph,
                    how.inputs.empty() ? std::nullopt : std::optional<at::TensorList>(how.inputs));
  } catch (...) {
    if (!exchange) throw;
    RethrowExplained(process_.joined().explain);
  }
  ++window_backwards_;
  if (join_ != nullptr && exchange) NoteJoinedExchange();
  if (no_sync_depth_ > 0) holds_back_ = true;
  for (const auto& model : registry_.models()) {
    if (model->activation_policy() == nullptr) continue;
    model->activation_policy()->EndBackward(
        [&model](const at::Tensor& parameter) { return model->watch()->InLastPass(parameter); });
  }
  if (StepsKnowMore()) strays_.Record(sync_gradients());
  if (updates_ == nullptr && !in_closure_) samples_.Record(scaler_ != nullptr);
  if (!sync_gradients()) {
    for (const auto& optimizer : registry_.optimizers()) {
      if (optimizer->witness_.defined()) continue;
      for (const at::Tensor& parameter : optimizer->handle().parameters()) {
        if (!parameter.grad().defined()) continue;
        optimizer->witness_ = parameter;
        break;
      }
    }
  }
  process_.progress().SetPhase("after backward");
}

void StepController::ArmAgain(const BackwardOptions& how) const {
  for (const auto& model : registry_.models()) {
    DataParallel* const ddp = model->ddp();
    if (ddp == nullptr || model->armed_ == ModelSlot::Armed::kNo) continue;
    if (!how.inputs.empty()) {
      size_t wanted = 0, trained = 0;
      for (const at::Tensor& parameter : ddp->parameters()) {
        if (!parameter.requires_grad()) continue;
        ++trained;
        for (const at::Tensor& input : how.inputs) wanted += input.is_same(parameter) ? 1 : 0;
      }
      TORCH_CHECK(wanted == 0 || wanted == trained, "backward() got ", wanted, " of the ", trained,
                  " trained parameters of a model as "
                  "inputs: several processes exchange the gradients of a whole model; give all of "
                  "them, or set requires_grad(false) on those that are not to be trained");
    }
    // This is a second backward pass after one forward pass (retain_graph) or two.
    if (model->armed_ == ModelSlot::Armed::kUsed) ddp->ArmAgain();
  }
}

void StepController::CheckWitnesses() const {
  if (accumulation_.current().window_length == 1) return;
  for (const auto& optimizer : registry_.optimizers()) {
    TORCH_CHECK(
        !optimizer->witness_.defined() || optimizer->witness_.grad().defined(),
        "the gradients of this accumulation window are gone: something other than the prepared "
        "optimizer has zeroed them (model->zero_grad(), or zero_grad() of the optimizer that was "
        "given to prepare()); use zero_grad() of what prepare() returned, which waits for the end "
        "of "
        "the window");
  }
}

double StepController::WindowFactor() {
  if (window_factor_.has_value()) return *window_factor_;
  window_factor_ = accumulation_.current().gradient_factor * join_factor_;
  if (accumulation_.weighted()) {
    at::Tensor total = at::full({1}, accumulation_.local_weight(), at::kDouble);
    // A tensor on the CPU uses the CPU's connections, so that nothing waits for a GPU.
    if (process_.size() > 1) process_.comm().AllReduce(total, ReduceOp::kSum);
    window_factor_ =
        accumulation_.WeightedFactor(total.item<double>(), process_.size()) * join_factor_;
  }
  return *window_factor_;
}

namespace {

// Throws if `optimizer` shares a gradient with `finished`: it would be divided again.
void CheckNoneIsFinished(const OptimizerHandle& optimizer, const OptimizerHandle& finished,
                         bool fp16) {
  const std::unordered_set<const void*> others = SetOf(finished.parameters());
  const std::vector<at::Tensor>& parameters = optimizer.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(
        !parameters[i].grad().defined() || others.count(parameters[i].unsafeGetTensorImpl()) == 0,
        "two prepared optimizers have the same parameter (number ", i,
        " of the second one, of shape ", parameters[i].sizes(), "), and its gradient has been ",
        fp16 ? "divided by the loss scale of fp16" : "corrected for its accumulation window",
        " for the first one: it would be divided again for the second one, in step(), "
        "clip_grad_norm_() or unscale_gradients(). Give each parameter to one optimizer; or, for "
        "losses of their own, zero_grad() between the step of one and backward() for the other, "
        "without clip_grad_norm_() and unscale_gradients()");
  }
}

}  // namespace

void StepController::FinishGradients(OptimizerSlot* only) {
  if (!sync_gradients()) return;
  const double factor = WindowFactor();
  for (const auto& optimizer : registry_.optimizers()) {
    if (only != nullptr && optimizer.get() != only) continue;
    TORCH_CHECK(!optimizer->gradients_torn_,
                "the gradients of an optimizer were partly scaled or clipped when that failed (a "
                "disk that they are offloaded to, or memory): call its zero_grad(), or "
                "load_state()");
    if (optimizer->gradients_finished_) continue;
    if (scaler_ != nullptr || factor != 1) {
      for (const auto& other : registry_.optimizers()) {
        if (other == optimizer || !other->gradients_finished_) continue;
        CheckNoneIsFinished(optimizer->handle(), other->handle(), scaler_ != nullptr);
      }
    }
    optimizer->gradients_torn_ = true;
    if (scaler_ != nullptr) scaler_->Unscale(optimizer->handle());
    ScaleGradients(optimizer->handle().parameters(), factor);
    optimizer->gradients_torn_ = false;
    optimizer->gradients_finished_ = true;
  }
}

void StepController::ReopenGradients(OptimizerSlot& slot) const {
  const bool torn = std::exchange(slot.gradients_torn_, true);
  if (scaler_ != nullptr) scaler_->Rescale(slot.handle());
  // If this window has no factor yet, the gradients are those of an earlier window and stay
  // unchanged.
  const double factor = window_factor_.value_or(1);
  if (factor != 0) ScaleGradients(slot.handle().parameters(), 1 / factor);
  slot.gradients_torn_ = torn;
  slot.gradients_finished_ = false;
}

void StepController::CheckPendingLosses(bool weighted) const {
  using Losses = OptimizerSlot::Losses;
  // If optimizers use gradients inside the pass, no loss has a weight.
  if (updates_ != nullptr) return;
  for (const auto& optimizer : registry_.optimizers()) {
    const Losses pending = optimizer->pending_losses_;
    if (pending == Losses::kNone || (pending == Losses::kPlain && !weighted)) continue;
    // These gradients are about to be zeroed.
    if (optimizer->zero_at_end_.has_value()) continue;
    // A gradient that no pass has reached since the last step holds no pending loss: the losses
    // since then were those of other optimizers, and it is zeroed before the next one that reaches
    // it.
    const auto added = AddedTo(registry_.models(), optimizer->pass_at_step_);
    const std::vector<at::Tensor>& parameters = optimizer->handle().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto known = added.find(parameters[i].unsafeGetTensorImpl());
      if (known != added.end() && !known->second) continue;
      TORCH_CHECK(
          HoldsNothing(parameters[i].grad()), "backward() of a loss with", weighted ? "" : "out",
          " a weight, and parameter ", NameOf(parameters[i], i, registry_.models()),
          " has a gradient from an earlier loss with", pending == Losses::kWeighted ? "" : "out",
          " one that no optimizer.step() has used and no optimizer.zero_grad() cleared: "
          "gradients of weighted losses become the mean over the items (tokens) of one "
          "window; accumulate inside accelerator.accumulate(), with a weight for each loss "
          "or for none, or add the losses up before one backward()");
    }
  }
}

void StepController::CheckGradients(OptimizerSlot& slot) const {
  CheckWitnesses();
  origins_.CheckPlainPasses(slot, scaler_ == nullptr && accumulation_.current().divisor == 1 &&
                                      !accumulation_.weighted());
  // Check the gradients of tensors that belong to no model.
  if (window_backwards_ == 0 && !in_closure_ &&
      (scaler_ != nullptr || accumulation_.current().divisor != 1)) {
    for (const at::Tensor& parameter : slot.handle().parameters()) {
      TORCH_CHECK(!parameter.grad().defined(),
                  "optimizer.step(): the gradients of this window come from loss.backward(), which "
                  "neither divides them for the accumulation window nor scales them for fp16: call "
                  "accelerator.backward(loss)");
    }
  }
  const bool alone = process_.size() == 1;
  const bool unchecked = alone ? !process_.autocast_on()
                               : local_depth_ > 0 || process_.options().allow_local_gradients;
  if (unchecked) return;
  if (alone) {
    origins_.CheckForwards(slot);
  } else {
    origins_.CheckExchanged(slot);
  }
}

bool StepController::StepsKnowMore() const {
  return scaler_ != nullptr || process_.gradient_clipping() > 0 ||
         gradient_accumulation_steps() > 1;
}

namespace {

// Multiplies the gradients that optimizers have for `parameters` and those that sharded models have
// not reduced yet.
void ScaleWaiting(const Registry& registry, const std::vector<at::Tensor>& parameters,
                  double factor) {
  if (factor == 1) return;
  ScaleGradients(parameters, factor);
  const std::unordered_set<const void*> scaled = SetOf(parameters);
  for (const auto& model : registry.models()) {
    if (model->sharded() == nullptr) continue;
    for (const auto& unit : model->sharded()->units()) {
      for (const ShardUnit::Slice& slice : unit->slices()) {
        if (!slice.pending.defined() || !scaled.contains(slice.shard.unsafeGetTensorImpl())) {
          continue;
        }
        const at::NoGradGuard no_grad;
        slice.pending.mul_(factor);
      }
    }
  }
}

}  // namespace

void StepController::ChangeScale(absl::FunctionRef<void()> change) {
  // The gradients of an optimizer that steps less often than others must have the common scale, as
  // those that the next passes add to them have. Each gradient is scaled once, and none that
  // another optimizer has unscaled.
  const auto waits = [](const auto& optimizer) {
    return !optimizer->gradients_finished_ &&
           optimizer->pending_losses_ != OptimizerSlot::Losses::kNone;
  };
  const auto& optimizers = registry_.optimizers();
  std::vector<at::Tensor> waiting;
  if (std::any_of(optimizers.begin(), optimizers.end(), waits)) {
    std::unordered_set<const void*> seen;
    for (const auto& optimizer : optimizers) {
      if (optimizer->gradients_finished_) seen.merge(SetOf(optimizer->handle().parameters()));
    }
    for (const auto& optimizer : optimizers) {
      if (!waits(optimizer)) continue;
      for (const at::Tensor& parameter : optimizer->handle().parameters()) {
        if (seen.insert(parameter.unsafeGetTensorImpl()).second) waiting.push_back(parameter);
      }
    }
  }
  const double before = waiting.empty() ? 1 : scaler_->scale();
  change();
  if (!waiting.empty()) ScaleWaiting(registry_, waiting, scaler_->scale() / before);
}

void StepController::TakeScale(const PlainState& state) {
  ChangeScale([&] {
    scaler_->LoadState(state);
    scaler_->Reset();
  });
}

void StepController::UpdateScale() {
  ChangeScale([this] { scaler_->Update(); });
  for (const auto& optimizer : registry_.optimizers()) optimizer->stepped_at_scale_ = false;
  // Reading the scale waits for a GPU; so it is read only if a step was skipped, an answer that has
  // waited already.
  TORCH_CHECK(!optimizer_step_was_skipped() || scaler_->scale() > 0,
              "the gradients were infinite or NaN at every loss scale of fp16, which has dropped "
              "to 0, so no further optimizer.step() would take effect: look for NaN or "
              "infinity in the loss or in the batches, go back to a checkpoint from before by "
              "load_state(), or train in bf16");
}

namespace {

// Returns the optimizers that hold any of `parameters`.
std::vector<OptimizerSlot*> OwnersOf(const Registry& registry,
                                     const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  std::vector<OptimizerSlot*> owners;
  for (const auto& optimizer : registry.optimizers()) {
    const std::vector<at::Tensor>& held = optimizer->handle().parameters();
    if (std::any_of(held.begin(), held.end(), [&](const at::Tensor& parameter) {
          return wanted.count(parameter.unsafeGetTensorImpl()) > 0;
        })) {
      owners.push_back(optimizer.get());
    }
  }
  return owners;
}

}  // namespace

void StepController::FinishGradientsOf(const std::vector<at::Tensor>& parameters) {
  const std::vector<OptimizerSlot*> owners = OwnersOf(registry_, parameters);
  for (OptimizerSlot* const optimizer : owners) FinishGradients(optimizer);
  TORCH_CHECK(!owners.empty() || parameters.empty() ||
                  (scaler_ == nullptr && !accumulation_.weighted() &&
                   accumulation_.current().gradient_factor == 1),
              "these parameters belong to no prepared optimizer, so their gradients still hold the "
              "loss scale or the weights of their window: pass the optimizer to prepare()");
}

StepController::Resolved StepController::Resolve(const std::vector<at::Tensor>& parameters) const {
  Resolved resolved;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor shard;
    bool divided = false;
    for (const auto& model : registry_.models()) {
      ShardedModel* const sharded = model->sharded();
      if (sharded == nullptr) continue;
      shard = sharded->NameOf(parameter) != nullptr ? parameter : sharded->ShardOf(parameter);
      if (!shard.defined()) continue;
      divided = !sharded->IsWhole(shard);
      if (divided) resolved.comm = &sharded->shard_comm();
      break;
    }
    (divided ? resolved.shards : resolved.whole).push_back(shard.defined() ? shard : parameter);
  }
  return resolved;
}

void StepController::CheckGradientsThere(const Resolved& resolved, const char* what) const {
  if (updates_ == nullptr) return;
  BackwardUpdates::CheckGradientsThere(resolved.whole, what);
  BackwardUpdates::CheckGradientsThere(resolved.shards, what);
}

at::Tensor StepController::ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                                        double norm_type) {
  TORCH_CHECK(sync_gradients(),
              "clip_grad_norm_ in the middle of an accumulation window would clip partial "
              "gradients: call it "
              "only where accelerator.sync_gradients()");
  const Resolved resolved = Resolve(parameters);
  CheckGradientsThere(resolved, "clip_grad_norm_()");
  FinishGradientsOf(resolved.whole);
  if (!resolved.shards.empty()) FinishGradientsOf(resolved.shards);
  const auto clip = [&resolved, norm_type](double norm) {
    if (resolved.shards.empty()) return muster::ClipGradNorm(resolved.whole, norm, norm_type);
    return muster::ClipGradNorm(resolved.whole, resolved.shards, *resolved.comm, norm, norm_type);
  };
  const double in_step = process_.gradient_clipping();
  if (in_step == 0) {
    const at::Tensor norm = clip(std::numeric_limits<double>::infinity());
    ScaleToNorm({}, max_norm, norm);  // throws if max_norm is invalid
    // Use the order in which step() clips.
    std::vector<at::Tensor> all = resolved.shards;
    all.insert(all.end(), resolved.whole.begin(), resolved.whole.end());
    const std::vector<OptimizerSlot*> owners = OwnersOf(registry_, all);
    for (OptimizerSlot* const optimizer : owners) optimizer->gradients_torn_ = true;
    ScaleToNorm(Gradients(all), max_norm, norm);
    for (OptimizerSlot* const optimizer : owners) optimizer->gradients_torn_ = false;
    return norm;
  }
  // Gradients that no prepared optimizer has are clipped by no step().
  std::unordered_set<const void*> in_steps;
  for (const auto& optimizer : registry_.optimizers()) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) {
      in_steps.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<at::Tensor> others;
  for (const std::vector<at::Tensor>& list : {resolved.whole, resolved.shards}) {
    for (const at::Tensor& parameter : list) {
      if (in_steps.count(parameter.unsafeGetTensorImpl()) == 0) others.push_back(parameter);
    }
  }
  if (others.size() < resolved.whole.size() + resolved.shards.size()) {
    if ((max_norm != in_step || norm_type != 2) && !said_who_clips_ && process_.rank() == 0) {
      MUSTER_LOG(Warning) << "clip_grad_norm_(" << max_norm
                          << ") leaves the gradients of prepared optimizers: step() clips them to "
                          << in_step
                          << " (options.gradient_clipping, or gradient_clipping of a DeepSpeed "
                             "config)";
      said_who_clips_ = true;
    }
  }
  const at::Tensor norm = clip(std::numeric_limits<double>::infinity());
  if (!others.empty()) ScaleToNorm(Gradients(others), max_norm, norm);
  strays_.NoteClipped(others);
  return norm;
}

void StepController::ClipInStep(OptimizerSlot& slot) {
  if (process_.gradient_clipping() == 0) return;
  const Resolved resolved = Resolve(slot.handle_->parameters());
  slot.gradients_torn_ = true;
  if (resolved.shards.empty()) {
    muster::ClipGradNorm(resolved.whole, process_.gradient_clipping());
  } else {
    muster::ClipGradNorm(resolved.whole, resolved.shards, *resolved.comm,
                         process_.gradient_clipping());
  }
  slot.gradients_torn_ = false;
}

void StepController::ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value) {
  TORCH_CHECK(sync_gradients(),
              "clip_grad_value_ in the middle of an accumulation window would clip partial "
              "gradients: call it "
              "only where accelerator.sync_gradients()");
  const Resolved resolved = Resolve(parameters);
  CheckGradientsThere(resolved, "clip_grad_value_()");
  muster::ClipGradValue({}, clip_value);  // throws if clip_value is invalid
  for (const std::vector<at::Tensor>& list : {resolved.whole, resolved.shards}) {
    FinishGradientsOf(list);
    const std::vector<OptimizerSlot*> owners = OwnersOf(registry_, list);
    for (OptimizerSlot* const optimizer : owners) optimizer->gradients_torn_ = true;
    muster::ClipGradValue(list, clip_value);
    for (OptimizerSlot* const optimizer : owners) optimizer->gradients_torn_ = false;
  }
  strays_.NoteClipped(resolved.whole);
}

bool StepController::optimizer_step_was_skipped() const {
  for (const auto& optimizer : registry_.optimizers()) {
    if (optimizer->step_was_skipped()) return true;
  }
  return false;
}

void StepController::BeginJoin(bool even_batches) {
  TORCH_CHECK(join_ == nullptr, "join_uneven_inputs() is active already: scopes do not nest");
  TORCH_CHECK(no_sync_depth_ == 0 && local_depth_ == 0, "join_uneven_inputs() inside ",
              local_depth_ > 0 ? "LocalSGD" : "no_sync()",
              ": processes that have run out of batches would wait for gradient exchanges that the "
              "others skip; end that scope first");
  // Models that the program has released are no longer trained.
  if (between_windows()) registry_.ForgetUnheld();
  std::vector<DataParallel*> models;
  int trained = 0;
  for (const auto& model : registry_.models()) {
    TORCH_CHECK(
        model->sharded() == nullptr,
        "join_uneven_inputs() with a sharded model: a process without batches could not contribute "
        "its part of the parameters; use even_batches, or train without sharding");
    if (model->ddp() == nullptr) continue;
    models.push_back(model->ddp());
    trained += IsTrained(*model) ? 1 : 0;
    if (model->source().module() == nullptr) continue;
    for (const auto& part : model->source().module()->modules()) {
      TORCH_CHECK(
          part->as<SyncBatchNormImpl>() == nullptr,
          "join_uneven_inputs() with a SyncBatchNorm in the model: processes that have run "
          "out of batches have no statistics for the others; use BatchNorm, or even batches");
    }
  }
  TORCH_CHECK(
      trained <= 1, "join_uneven_inputs() with ", trained,
      " prepared models: a process that has run out of batches cannot know which of them the "
      "others train in a step, and in which order they exchange the gradients. Prepare one module "
      "that holds them; freeze the parameters of those that this scope does not train "
      "(requires_grad_(false)), or prepare those for evaluation (prepare_model(model, true)); or "
      "use even batches");
  join_ = std::make_unique<UnevenInputs>(process_.comm(), models);
  for (const auto& loader : registry_.loaders()) loader->OverrideEvenBatches(even_batches);
}

void StepController::EndJoin(bool finish) {
  const std::unique_ptr<UnevenInputs> join = std::move(join_);
  join_factor_ = 1;
  join_exchanged_ = false;
  for (const auto& loader : registry_.loaders()) loader->OverrideEvenBatches(std::nullopt);
  if (!finish) {
    apart_ = true;
    // A later pass is none of a micro-step that processes without batches take part in.
    for (const auto& model : registry_.models()) {
      if (model->ddp() != nullptr) model->ddp()->set_buffer_root(0);
    }
    return;
  }
  AboutToChange();
  join->Finish([&](int root) {
    // A process that ran out of batches early has missed steps: it takes over the state of the
    // longest-trained process.
    for (const auto& optimizer : registry_.optimizers()) {
      BroadcastOptimizerState(process_.comm(), optimizer->handle(), root);
      optimizer->set_steps(BroadcastObject(process_.comm(), optimizer->steps(), root));
      ZeroNow(*optimizer, /*set_to_none=*/true);
    }
    for (const auto& scheduler : registry_.schedulers()) {
      scheduler->LoadState(BroadcastPlainState(process_.comm(), scheduler->SaveState(), root));
    }
    if (scaler_ != nullptr) {
      scaler_->LoadState(BroadcastPlainState(process_.comm(), scaler_->SaveState(), root));
      scaler_->Reset();
    }
    // The gradients of an open window are gone.
    accumulation_ = Accumulation(accumulation_.options());
    window_factor_.reset();
    window_backwards_ = 0;
  });
}

void StepController::Stepped(OptimizerSlot& slot) {
  if (!in_micro_step()) {
    // After loss.backward() nothing else has recorded that the batch was trained on.
    loops_.MarkTrained();
  }
  if (slot.step_was_skipped_ && local_depth_ > 0) ++slot.skipped_apart_;
  if (!slot.step_was_skipped_) {
    ++slot.steps_;
    ++slot.steps_here_;
    registry_.NoteStep();
    // Only after the second step: later, the warning would come too late and cost time in every
    // step.
    if (slot.steps_here_ == 2) {
      for (const auto& scheduler : registry_.schedulers()) {
        if (scheduler->optimizer().get() == &slot) scheduler->WarnIfLeftOut(/*at_end=*/false);
      }
    }
  }
  slot.consumed_ = true;
  slot.left_to_no_sync_ = false;
  slot.zero_in_no_sync_.reset();
  holds_back_ = false;
  slot.pending_losses_ = OptimizerSlot::Losses::kNone;
  slot.pass_at_step_ = passes_->last();
  origins_.ForgetPlainPasses(slot);
  for (size_t m = 0; m < slot.models_.size(); ++m) {
    const std::shared_ptr<ModelSlot> model = slot.models_[m].lock();
    if (model == nullptr) continue;
    slot.forwards_at_step_[m] = model->forwards_;
    if (!in_micro_step()) model->armed_ = ModelSlot::Armed::kNo;
  }
  process_.progress().SetStep(registry_.global_step());
  process_.progress().SetPhase("after optimizer step");
  if (slot.step_was_skipped_) return;
  // Last, because it writes offloaded parts, which may fail.
  for (const auto& model : registry_.models()) {
    if (model->sharded() != nullptr) model->sharded()->MarkChanged(slot.handle_->parameters());
  }
}

void StepController::LeaveOutStep() {
  const BatchInfo* const batch = loops_.current_batch();
  if (!in_micro_step_ || !outside_loops_ || batch == nullptr) return;
  const auto at = std::make_pair(batch->iteration, batch->index);
  TORCH_CHECK(!left_out_at_.has_value() || left_out_at_->first != at.first || *left_out_at_ == at,
              "one accumulate() covers several batches, so none of their optimizer.step() takes "
              "effect: begin the scope inside the loop over the batches, where it is one "
              "micro-step");
  left_out_at_ = at;
}

namespace {

void CheckNotAveraged(const StepController& steps) {
  TORCH_CHECK(!steps.averaged(),
              "optimizer.step() inside ema.apply(), where the model's weights are the average: "
              "step before or after that scope");
}

}  // namespace

void StepController::Step(OptimizerSlot& slot) {
  if (!sync_gradients()) {
    if (accumulation_.sync_gradients()) slot.left_to_no_sync_ = true;
    return LeaveOutStep();
  }
  CheckRemembered(slot);
  CheckNotAveraged(*this);
  TORCH_CHECK(
      !slot.handle_->needs_closure(),
      "this optimizer evaluates the loss several times in a step (LBFGS): call "
      "optimizer.step(closure) with a function that zeroes the gradients, computes the loss, "
      "calls accelerator.backward(loss) and returns it");
  CheckNoStepFailed("optimizer.step()");
  process_.progress().SetPhase("optimizer step");
  CheckScheduled(slot);
  const bool updated = updates_ != nullptr && updates_->Updated(slot);
  if (updates_ != nullptr) updates_->CheckWhole();
  if (updated) updates_->CheckRates(slot);
  CheckGradients(slot);
  const std::vector<ShardedModel*> sharded = ShardedModelsOf(slot);
  for (const ShardedModel* const model : sharded) model->CheckHasValues();
  if (!updated) {
    WarnIfNoGradients(slot);
    samples_.WarnIfChanged(slot, scaler_ != nullptr,
                           slot.gradients_finished_ || passes_->any_plain());
    try {
      FinishGradients(&slot);
      ClipInStep(slot);
    } catch (...) {
      if (sharded.empty()) NoteFailedStep();
      throw;
    }
  }
  // Check all of them before any changes.
  for (const ShardedModel* const model : sharded) model->CheckNotSummoned();
  for (ShardedModel* const model : sharded) model->AwaitReaders();
  try {
    AnnounceStep(slot, sharded);
    MUSTER_FAILPOINT("worker.step");
    if (scaler_ != nullptr) {
      // The gradients are unscaled, maybe by the scale before its last change.
      scaler_->StepUnscaled(*slot.handle_);
      slot.step_was_skipped_ = scaler_->step_was_skipped(*slot.handle_);
      slot.stepped_at_scale_ = true;
      const auto& all = registry_.optimizers();
      if (std::all_of(all.begin(), all.end(), [](const auto& o) { return o->stepped_at_scale_; })) {
        UpdateScale();
      }
    } else if (updated) {
      updates_->FinishStep(slot, WindowFactor());
    } else {
      slot.handle_->Step();
    }
    Stepped(slot);
  } catch (...) {
    // Other ranks may have stepped.
    for (ShardedModel* const model : sharded) model->NoteFailedStep(std::current_exception());
    if (sharded.empty()) NoteFailedStep();
    throw;
  }
}

void StepController::CheckRemembered(const OptimizerSlot& slot) const {
  const auto& optimizers = registry_.optimizers();
  TORCH_CHECK(std::any_of(optimizers.begin(), optimizers.end(),
                          [&slot](const auto& known) { return known.get() == &slot; }),
              "optimizer.step(): this Accelerator has forgotten the optimizer, in free_memory() or "
              "after a failed attempt of find_executable_batch_size(): pass the model and the "
              "optimizer, not their handles, to prepare() again");
}

void StepController::NoteFailedStep() {
  if (process_.size() == 1) return;
  failed_step_ = TextOf(std::current_exception());
}

void StepController::NoteFailedLoad(const char* call) {
  if (process_.size() == 1) return;
  failed_load_ = call;
}

void StepController::CheckNoLoadFailed(const char* what) const {
  TORCH_CHECK(failed_load_.empty(), what, " after a ", failed_load_,
              " that failed halfway: each process has a different mixture of old and new weights; "
              "call load_state(), or end the program");
}

void StepController::CheckNoStepFailed(const char* what) const {
  CheckNoLoadFailed(what);
  TORCH_CHECK(failed_step_.empty(), what, " after an optimizer.step() that failed on rank ",
              process_.rank(), " (", failed_step_,
              "): its weights may differ from those of the other processes now; call "
              "load_state(), or end the program");
}

void StepController::WarnIfNoGradients(OptimizerSlot& slot) const {
  if (slot.had_gradients_) return;
  slot.had_gradients_ = true;
  // If the program freezes the model's parameters, requires_grad of their shards, which the
  // optimizer has, does not change.
  std::unordered_set<const void*> frozen;
  for (const auto& model : registry_.models()) {
    for (const auto& [name, parameter] : model->source().parameters()) {
      if (parameter.requires_grad()) continue;
      frozen.insert(AtOptimizer(*model, parameter).unsafeGetTensorImpl());
    }
  }
  const auto added = AddedTo(registry_.models(), slot.pass_at_step_);
  bool trained = false;
  bool divided = false;
  for (const at::Tensor& parameter : slot.handle_->parameters()) {
    // This rank may have no part of a sharded model's gradient while others do.
    if (parameter.numel() == 0) {
      divided = true;
      const auto known = added.find(parameter.unsafeGetTensorImpl());
      if (known != added.end() && known->second) return;
      continue;
    }
    if (parameter.grad().defined()) return;
    trained =
        trained || (parameter.requires_grad() && !frozen.contains(parameter.unsafeGetTensorImpl()));
  }
  // Frozen parameters may be unfrozen later.
  if (!trained || process_.rank() != 0) return;
  MUSTER_LOG(Warning) << "optimizer.step(): no parameter of this optimizer has a gradient"
                      << (divided ? " where this process has a part of it" : "")
                      << ", so nothing is updated" << (divided ? " here" : "")
                      << ": call accelerator.backward(loss) before step(), and zero_grad() after "
                         "it or before backward()";
}

void StepController::CheckScheduled(const OptimizerSlot& slot) const {
  if (!process_.configured().scheduler.has_value()) return;
  const auto& schedulers = registry_.schedulers();
  TORCH_CHECK(
      std::any_of(schedulers.begin(), schedulers.end(),
                  [&](const auto& scheduler) { return scheduler->optimizer().get() == &slot; }),
      "optimizer.step() with the section \"scheduler\" of a DeepSpeed config and without a "
      "schedule of this optimizer: pass accelerator.make_scheduler(optimizer) to prepare() "
      "with the optimizer, and call step() of what it returns, or remove the section");
}

at::Tensor StepController::StepWithClosure(OptimizerSlot& slot,
                                           const std::function<at::Tensor()>& closure) {
  TORCH_CHECK(closure != nullptr, "step(closure) got an empty function");
  CheckNotAveraged(*this);
  TORCH_CHECK(updates_ == nullptr,
              "step(closure) with options.sharding.optimizer_in_backward: the closure's backward "
              "pass would update the parameters itself. Call backward() and step(), or leave the "
              "option out");
  TORCH_CHECK(
      gradient_accumulation_steps() == 1,
      "step(closure) evaluates the loss itself, so its gradients cannot be accumulated over "
      "several micro-steps: set gradient_accumulation_steps to 1");
  TORCH_CHECK(
      scaler_ == nullptr,
      "step(closure) under fp16 would compare losses and gradients of different scales: use "
      "mixed_precision \"bf16\" or \"no\"");
  TORCH_CHECK(!joining(),
              "step(closure) inside join_uneven_inputs(): processes without batches cannot follow "
              "its evaluations");
  CheckRemembered(slot);
  CheckScheduled(slot);
  CheckNoStepFailed("optimizer.step()");
  TORCH_CHECK(!in_closure_, "step(closure) inside of a closure of step()");
  const std::vector<ShardedModel*> sharded = ShardedModelsOf(slot);
  for (const ShardedModel* const model : sharded) model->CheckHasValues();
  const std::function<void(bool)> set_inside = [&](bool inside) {
    in_closure_ = inside;
    for (ShardedModel* const model : sharded) model->SetInClosure(inside);
  };
  struct InClosure {
    explicit InClosure(const std::function<void(bool)>& set) : set(set) { set(true); }
    ~InClosure() { set(false); }
    const std::function<void(bool)>& set;
  };
  bool evaluated = false;
  const auto evaluate = [&] {
    at::Tensor loss;
    std::exception_ptr thrown;
    try {
      {
        const InClosure inside(set_inside);
        loss = closure();
      }
      TORCH_CHECK(loss.defined() && loss.numel() == 1,
                  "the closure of step() must return the loss, a tensor of one element");
      CheckGradients(slot);
    } catch (...) {
      thrown = std::current_exception();
      // Other ranks may wait in the pass that the exception has ended, or have failed in the same
      // exchange.
      const bool interrupted =
          std::any_of(sharded.begin(), sharded.end(),
                      [](const ShardedModel* model) { return model->Interrupted(); });
      if (sharded.empty() || interrupted || IsOfRanksApart(thrown)) throw;
    }
    // No rank may update its part if another one has failed or still reads it. They agree before
    // the calls below, which exchange gradients.
    if (!sharded.empty()) sharded.front()->AgreeOnClosure(thrown);
    window_factor_.reset();
    slot.gradients_finished_ = false;
    FinishGradients(&slot);
    ClipInStep(slot);
    evaluated = true;
    // If ranks train apart, their gradients differ, and so does how often an optimizer evaluates.
    if (local_depth_ > 0) return loss.detach();
    // The optimizer decides by the loss, and all processes must decide alike.
    return process_.MeanOfAll(loss.detach());
  };
  slot.step_was_skipped_ = false;
  // Check all of them before any changes.
  for (const ShardedModel* const model : sharded) model->CheckNotSummoned();
  at::Tensor loss;
  try {
    AnnounceStep(slot, sharded);
    loss = slot.handle_->StepWithClosure(evaluate);
    // The optimizer has changed parameters after the backward passes of the closure.
    AnnounceStep(slot, sharded);
    Stepped(slot);
  } catch (...) {
    for (ShardedModel* const model : sharded) {
      model->NoteFailedClosure(/*changed=*/evaluated);
      // Other ranks may have stepped.
      if (evaluated) model->NoteFailedStep(std::current_exception());
    }
    if (sharded.empty() && evaluated) NoteFailedStep();
    throw;
  }
  return loss;
}

void StepController::ZeroNow(OptimizerSlot& slot, bool set_to_none) {
  if (updates_ != nullptr) {
    updates_->CheckStepped(slot, "optimizer.zero_grad()");
    BackwardUpdates::ForgetGradients(slot);
  }
  samples_.Forget(slot);
  slot.zero_at_end_.reset();
  slot.zero_in_no_sync_.reset();
  slot.witness_.reset();
  slot.left_to_no_sync_ = false;
  slot.consumed_ = slot.gradients_torn_ = slot.gradients_finished_ = slot.waits_ = false;
  slot.pending_losses_ = OptimizerSlot::Losses::kNone;
  const auto& all = registry_.optimizers();
  if (std::all_of(all.begin(), all.end(), [](const auto& optimizer) {
        return optimizer->pending_losses_ == OptimizerSlot::Losses::kNone;
      })) {
    holds_back_ = false;
  }
  if (scaler_ != nullptr) scaler_->Reopen(slot.handle());
  origins_.ForgetPlainPasses(slot);
  for (const auto& model : registry_.models()) {
    if (model->sharded() != nullptr) model->sharded()->ForgetPending(slot.handle_->parameters());
  }
  // This also applies to gradients that are views of buckets: the next backward pass moves them
  // back there, which costs less than zeroing and adding in place.
  if (set_to_none) {
    slot.handle_->ZeroGrad(GradZeroing::kSetToNone);
    return;
  }
  slot.handle_->ZeroGrad(GradZeroing::kInPlace);
  for (const auto& owner : slot.models_) {
    const std::shared_ptr<ModelSlot> model = owner.lock();
    if (model != nullptr && model->ddp() != nullptr) {
      model->ddp()->ForgetPending(slot.handle_->parameters());
    }
  }
}

// Zeroes gradients where plain LibTorch would, unless those of earlier micro-steps would be lost:
// programs call this at the head of a step as well as at its end.
void StepController::ZeroGrad(OptimizerSlot& slot, bool set_to_none) {
  if (in_closure_) return ZeroNow(slot, set_to_none);
  // A program that makes its windows with no_sync() calls this with each step, and it is left out
  // like the steps until one of them takes effect.
  if (slot.left_to_no_sync_ && !slot.consumed_) {
    if (!sync_gradients()) return;
    // After the pass that ends the window, and before its step: the program gives the window up.
    const auto added = AddedTo(registry_.models(), held_back_pass_);
    for (const at::Tensor& parameter : slot.handle().parameters()) {
      const auto known = added.find(parameter.unsafeGetTensorImpl());
      if (known != added.end() && known->second) return ZeroNow(slot, set_to_none);
    }
    // The call is at the head of the micro-step that ends the window, or gives the window up.
    slot.zero_in_no_sync_ = set_to_none;
    return;
  }
  if (!in_micro_step()) {
    // Otherwise, a program that uses no_sync() itself has no window to lose: this call is at the
    // head of one.
    if (slot.consumed_ || accumulation_.sync_gradients()) ZeroNow(slot, set_to_none);
    return;
  }
  const bool sync = sync_gradients();
  if (slot.consumed_ || window_backwards_ == 0 || (sync && micro_step().window_length == 1)) {
    return ZeroNow(slot, set_to_none);
  }
  // The window is about to end, with a step of this optimizer or, if the program leaves that out,
  // without one.
  if (sync) slot.zero_at_end_ = set_to_none;
}

void StepController::ChangeNoSync(int by) {
  // Before the count changes, because this may throw out of the scope's constructor.
  if (by > 0 && no_sync_depth_ == 0) TellWindowsOfNoSync(/*begins=*/true);
  no_sync_depth_ += by;
  if (no_sync_depth_ == 0) held_back_pass_ = passes_->last();
}

void StepController::TellWindowsOfNoSync(bool begins) {
  for (const auto& optimizer : registry_.optimizers()) {
    const std::optional<bool> zero = std::exchange(optimizer->zero_in_no_sync_, std::nullopt);
    // The previous window was given up.
    if (zero.has_value() && begins) ZeroNow(*optimizer, *zero);
  }
}

void StepController::CheckAllTakePart(const char* call) const {
  TORCH_CHECK(
      join_ == nullptr || process_.size() == 1, call,
      " inside join_uneven_inputs(): processes that have run out of batches take no part in "
      "it, and the others would wait for them; keep the values and exchange them after the "
      "scope");
}

void StepController::OptimizerForgotten() {
  samples_.ForgetAll();
  if (scaler_ == nullptr) return;
  if (scaler_->pending()) UpdateScale();
  const auto& all = registry_.optimizers();
  if (std::any_of(all.begin(), all.end(), [](const auto& o) { return o->gradients_finished_; })) {
    // Their steps ask the scaler for what it has found in their gradients.
    scaler_->Reset();
  } else {
    scaler_->ForgetOptimizers();
  }
}

void StepController::Reset() {
  failed_step_.clear();
  failed_load_.clear();
  samples_.ForgetAll();
  if (updates_ != nullptr) {
    updates_->Reset();
    for (const auto& optimizer : registry_.optimizers()) {
      BackwardUpdates::ForgetGradients(*optimizer);
    }
  }
  for (const auto& optimizer : registry_.optimizers()) {
    optimizer->gradients_finished_ = optimizer->gradients_torn_ = false;
    optimizer->stepped_at_scale_ = false;
    optimizer->step_was_skipped_ = false;
    optimizer->zero_at_end_.reset();
    optimizer->zero_in_no_sync_.reset();
    optimizer->left_to_no_sync_ = false;
    optimizer->witness_.reset();
    optimizer->consumed_ = optimizer->waits_ = false;
    optimizer->pending_losses_ = OptimizerSlot::Losses::kNone;
  }
  strays_.Forget();
  origins_.ForgetAllPlainPasses();
  accumulation_ = Accumulation(accumulation_.options());
  window_factor_.reset();
  window_backwards_ = 0;
  holds_back_ = window_broken_ = false;
  if (scaler_ != nullptr) scaler_->ForgetOptimizers();
}

}  // namespace muster::internal
