// Core: the training step.
#include <algorithm>
#include <cmath>
#include <exception>
#include <unordered_map>
#include <unordered_set>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "muster/internal/averaged_scope.h"
#include "muster/internal/core.h"
#include "worker/collective/collective_error.h"
#include "worker/collective/nested_collectives.h"
#include "worker/parallel/sync_batch_norm.h"
#include "worker/train/clip.h"
#include "worker/train/sync_state.h"

namespace muster::internal {

AccumulateScope Core::Accumulate() {
  const BatchInfo* batch = BatchOfMicroStep();
  if (batch != nullptr) return Accumulate(*batch);
  return Accumulate(std::optional<BatchFacts>());
}

AccumulateScope Core::Accumulate(const BatchInfo& info) {
  return Accumulate(BatchFacts{.is_last = info.is_last, .batches_left = info.batches_left});
}

AccumulateScope Core::Accumulate(const std::optional<BatchFacts>& facts) {
  TORCH_CHECK(!in_micro_step_,
              "accumulate() inside of accumulate(): the scope of the micro-step before is still "
              "alive; end it before the next one begins");
  if (accumulation_.at_boundary()) BeginWindow();
  if (join_ == nullptr) {
    accumulation_.Begin(facts);
  } else {
    const UnevenInputs::Decision decision =
        join_->MicroStep(accumulation_.WouldSync(facts), accumulation_.options().sync_each_batch);
    accumulation_.Begin(facts, decision.sync);
    join_factor_ = decision.gradient_factor;
  }
  in_micro_step_ = true;
  progress().SetPhase("forward");
  MarkTrained();
  return AccumulateScope(this);
}

void Core::BeginWindow() {
  window_factor_.reset();
  window_backwards_ = 0;
  if (scaler_ != nullptr && scaler_->pending()) scaler_->Update();
  scaler_steps_ = 0;
  for (const auto& optimizer : optimizers_) {
    optimizer->gradients_finished_ = false;
    // The window before has ended without a step, or with one that was made after the last
    // micro-step's scope.
    if (optimizer->zero_at_end_.has_value()) optimizer->ZeroNow(*optimizer->zero_at_end_);
    optimizer->witness_.reset();
  }
}

void Core::EndMicroStep() {
  in_micro_step_ = false;
  for (const auto& optimizer : optimizers_) {
    // Without a step so far, one may follow after the scope: the next window sees to it.
    if (optimizer->zero_at_end_.has_value() && optimizer->consumed_ &&
        std::uncaught_exceptions() == 0) {
      optimizer->ZeroNow(*optimizer->zero_at_end_);
    }
  }
  for (const auto& model : models_) model->armed_ = ModelSlot::Armed::kNo;
  progress().SetPhase("between steps");
}

void Core::CheckLoss(const at::Tensor& loss, const std::optional<double>& weight) const {
  TORCH_CHECK(loss.defined(), "backward() got an undefined loss");
  TORCH_CHECK(loss.numel() == 1, "backward() needs a loss of one element, got shape ", loss.sizes(),
              ": reduce it to its mean or sum first");
  TORCH_CHECK(
      loss.requires_grad(),
      "backward() got a loss that depends on no parameter: was it computed under NoGradGuard?");
  TORCH_CHECK(
      scaler_ == nullptr || !optimizers_.empty(),
      "backward() under fp16 without a prepared optimizer: nobody would take the loss scale "
      "out of the gradients again; pass the optimizer to prepare()");
  TORCH_CHECK(
      !in_micro_step_ || gradient_accumulation_steps() == 1 || models_.empty() ||
          !optimizers_.empty(),
      "backward() in accumulate() with gradient_accumulation_steps=", gradient_accumulation_steps(),
      " and no prepared optimizer: one that is not prepared does not wait for the end of "
      "the window; pass it to prepare()");
  TORCH_CHECK(
      join_ == nullptr || !weight.has_value(),
      "weighted losses inside join_uneven_inputs() would need an exchange that processes without "
      "batches do not take part in: use one or the other");
}

void Core::CheckFinite(const at::Tensor& loss) {
  const double value = loss.item<double>();
  // Agreed over all ranks, so that no rank goes on into a collective that the others have left.
  at::Tensor bad = at::full({size()}, 0, at::kDouble);
  if (!std::isfinite(value)) bad[rank()] = 1;
  // Processes that ran out of batches take no part in this exchange.
  if (size() > 1 && join_ == nullptr) {
    bad = bad.to(device_);
    comm().AllReduce(bad, ReduceOp::kMax);
    bad = bad.cpu();
  }
  std::string ranks;
  for (int r = 0; r < size(); ++r) {
    if (bad[r].item<double>() != 0) absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", r);
  }
  TORCH_CHECK(ranks.empty(), "the loss is NaN or infinite on rank ", ranks, " at step ",
              global_step(), " (here: ", value, "); lower the learning rate or look at the batch");
}

void Core::Backward(const at::Tensor& loss, std::optional<double> weight,
                    const BackwardOptions& how) {
  CheckLoss(loss, weight);
  if (options_.check_finite_loss) CheckFinite(loss);
  // Outside of accumulate() every call is a window of its own, divided as Accelerate does.
  if (!in_micro_step_) {
    BeginWindow();
    accumulation_.BeginAlone();
    MarkTrained();
  }
  CheckWitnesses();
  const double divisor =
      weight.has_value() ? accumulation_.WeightedDivisor(*weight) : accumulation_.current().divisor;
  at::Tensor scaled = divisor == 1 ? loss : loss / divisor;
  if (scaler_ != nullptr) scaled = scaler_->Scale(scaled);
  const bool exchange = size() > 1 && communicate();
  progress().SetPhase(exchange ? "backward and gradient exchange" : "backward");
  if (exchange) ArmAgain(how);
  for (const auto& model : models_) {
    if (model->armed_ == ModelSlot::Armed::kYes) model->armed_ = ModelSlot::Armed::kUsed;
  }
  try {
    scaled.backward({}, how.retain_graph || how.create_graph, how.create_graph,
                    how.inputs.empty() ? std::nullopt : std::optional<at::TensorList>(how.inputs));
  } catch (...) {
    if (!exchange) throw;
    RethrowExplained(process_.explain);
  }
  ++window_backwards_;
  if (!sync_gradients()) {
    for (const auto& optimizer : optimizers_) {
      if (optimizer->witness_.defined()) continue;
      for (const at::Tensor& parameter : optimizer->handle().parameters()) {
        if (!parameter.grad().defined()) continue;
        optimizer->witness_ = parameter;
        break;
      }
    }
  }
  progress().SetPhase("after backward");
}

void Core::ArmAgain(const BackwardOptions& how) {
  for (const auto& model : models_) {
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
    // A second backward pass after one forward pass (retain_graph), or after two.
    if (model->armed_ == ModelSlot::Armed::kUsed) ddp->ArmAgain();
  }
}

void Core::CheckWitnesses() const {
  if (accumulation_.current().window_length == 1) return;
  for (const auto& optimizer : optimizers_) {
    TORCH_CHECK(
        !optimizer->witness_.defined() || optimizer->witness_.grad().defined(),
        "the gradients of this accumulation window are gone: something other than the prepared "
        "optimizer has zeroed them (model->zero_grad(), or zero_grad() of the optimizer that was "
        "given to prepare()); use zero_grad() of what prepare() returned, which waits for the end "
        "of "
        "the window");
  }
}

double Core::WindowFactor() {
  if (window_factor_.has_value()) return *window_factor_;
  window_factor_ = accumulation_.current().gradient_factor * join_factor_;
  if (accumulation_.weighted()) {
    at::Tensor total = at::full({1}, accumulation_.local_weight(), at::kDouble);
    if (size() > 1) {
      total = total.to(device_);
      comm().AllReduce(total, ReduceOp::kSum);
    }
    window_factor_ = accumulation_.WeightedFactor(total.item<double>(), size()) * join_factor_;
  }
  return *window_factor_;
}

void Core::FinishGradients(OptimizerSlot* only) {
  if (!sync_gradients()) return;
  const double factor = WindowFactor();
  for (const auto& optimizer : optimizers_) {
    if ((only != nullptr && optimizer.get() != only) || optimizer->gradients_finished_) continue;
    optimizer->gradients_finished_ = true;
    if (scaler_ != nullptr) scaler_->Unscale(optimizer->handle());
    ScaleGradients(optimizer->handle().parameters(), factor);
  }
}

namespace {

// For messages: the parameter's name in a prepared model, or where it is in its optimizer.
std::string NameOf(const at::Tensor& parameter, size_t index,
                   const std::vector<std::shared_ptr<ModelSlot>>& models) {
  for (const auto& model : models) {
    for (const auto& [name, tensor] : model->source().parameters()) {
      if (tensor.is_same(parameter)) return absl::StrCat("'", name, "'");
    }
  }
  return c10::str("number ", index, " of the optimizer, of shape ", parameter.sizes(), ",");
}

bool Holds(const std::vector<at::Tensor>& list, const at::Tensor& tensor) {
  return std::any_of(list.begin(), list.end(),
                     [&](const at::Tensor& other) { return other.is_same(tensor); });
}

}  // namespace

void Core::CheckGradients(OptimizerSlot& slot) {
  CheckWitnesses();
  if (window_backwards_ == 0 && !in_closure_ &&
      (scaler_ != nullptr || accumulation_.current().divisor != 1)) {
    for (const at::Tensor& parameter : slot.handle().parameters()) {
      TORCH_CHECK(!parameter.grad().defined(),
                  "optimizer.step(): the gradients of this window come from loss.backward(), which "
                  "neither divides them for the accumulation window nor scales them for fp16: call "
                  "accelerator.backward(loss)");
    }
  }
  const bool alone = size() == 1;
  if (alone ? !autocast_on() : local_depth_ > 0 || options_.allow_local_gradients) return;
  const std::vector<at::Tensor>& parameters = slot.handle().parameters();
  // Looks at every parameter.
  const int64_t version = slot.handle().parameters_version();
  if (slot.checked_parameters_ != version || slot.checked_models_ != models_version_) {
    slot.checked_parameters_ = version;
    slot.checked_models_ = models_version_;
    std::unordered_map<const void*, std::shared_ptr<ModelSlot>> owners;
    for (const auto& model : models_) {
      if (model->evaluation()) continue;
      if (!alone) {
        // What the module has got after prepare(), the exchange does not know.
        if (model->ddp() == nullptr) continue;
        for (const at::Tensor& parameter : model->ddp()->parameters()) {
          owners[parameter.unsafeGetTensorImpl()] = model;
        }
        continue;
      }
      for (const auto& [name, parameter] : model->source().parameters()) {
        owners[parameter.unsafeGetTensorImpl()] = model;
      }
    }
    slot.local_.clear();
    slot.models_.clear();
    slot.forwards_at_step_.clear();
    std::unordered_set<const ModelSlot*> seen;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto owner = owners.find(parameters[i].unsafeGetTensorImpl());
      if (owner == owners.end()) {
        slot.local_.push_back(i);
      } else if (seen.insert(owner->second.get()).second) {
        slot.models_.push_back(owner->second);
        slot.forwards_at_step_.push_back(0);
      }
    }
  }
  if (!alone) {
    for (const size_t i : slot.local_) {
      TORCH_CHECK(
          !parameters[i].grad().defined(), "optimizer.step(): parameter ",
          NameOf(parameters[i], i, models_),
          " belongs to no model that was prepared for training, or was added to its model after "
          "prepare(), so its gradient is not averaged over the processes: complete the model and "
          "then "
          "prepare it, or, if you average the gradient yourself, set "
          "options.allow_local_gradients");
    }
    for (const auto& owner : slot.models_) {
      const std::shared_ptr<ModelSlot> model = owner.lock();
      if (model == nullptr || model->ddp() == nullptr) continue;
      std::vector<std::string> missed = model->ddp()->UnexchangedGradients();
      if (!missed.empty()) {
        // Another optimizer may have the others, and step on them at another time.
        std::unordered_set<std::string> own;
        for (const auto& [name, parameter] : model->source().parameters()) {
          if (Holds(parameters, parameter)) own.insert(name);
        }
        std::erase_if(missed, [&](const std::string& name) { return own.count(name) == 0; });
      }
      TORCH_CHECK(
          missed.empty(), "optimizer.step(): the gradient of parameter '",
          missed.empty() ? "" : missed.front(), "'",
          missed.size() > 1 ? absl::StrCat(" (and of ", missed.size() - 1, " more)") : "",
          " holds something that was not averaged over the processes: a backward pass through "
          "model->forward(...) or another method of the module, through a second graph of one "
          "forward pass, or in a micro-step of this window after which the model was not called "
          "again; call model(...), or model.call(&Net::method, ...) for other methods, in the last "
          "micro-step of each window");
    }
    return;
  }
  for (size_t m = 0; m < slot.models_.size(); ++m) {
    const std::shared_ptr<ModelSlot> model = slot.models_[m].lock();
    if (model == nullptr || model->forwards_ > slot.forwards_at_step_[m]) continue;
    for (const auto& [name, parameter] : model->source().parameters()) {
      if (!parameter.grad().defined()) continue;
      TORCH_CHECK(!Holds(parameters, parameter), "optimizer.step(): the gradient of parameter '",
                  name,
                  "' comes from a forward pass around the prepared model, which runs without mixed "
                  "precision: call model(...) instead of model->forward(...), and "
                  "model.call(&Net::method, ...) for other methods");
    }
  }
}

void Core::EndScalerStep() {
  if (++scaler_steps_ < optimizers_.size()) return;
  scaler_->Update();
  scaler_steps_ = 0;
}

void Core::FinishGradientsOf(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  bool owned = false;
  for (const auto& optimizer : optimizers_) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) {
      if (wanted.count(parameter.unsafeGetTensorImpl()) == 0) continue;
      FinishGradients(optimizer.get());
      owned = true;
      break;
    }
  }
  TORCH_CHECK(owned || wanted.empty() ||
                  (scaler_ == nullptr && !accumulation_.weighted() &&
                   accumulation_.current().gradient_factor == 1),
              "these parameters belong to no prepared optimizer, so their gradients still hold the "
              "loss scale or the weights of their window: pass the optimizer to prepare()");
}

at::Tensor Core::ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                              double norm_type) {
  TORCH_CHECK(sync_gradients(),
              "clip_grad_norm_ in the middle of an accumulation window would clip partial "
              "gradients: call it "
              "only where accelerator.sync_gradients()");
  FinishGradientsOf(parameters);
  return muster::ClipGradNorm(parameters, max_norm, norm_type);
}

void Core::ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value) {
  TORCH_CHECK(sync_gradients(),
              "clip_grad_value_ in the middle of an accumulation window would clip partial "
              "gradients: call it "
              "only where accelerator.sync_gradients()");
  FinishGradientsOf(parameters);
  muster::ClipGradValue(parameters, clip_value);
}

bool Core::optimizer_step_was_skipped() const {
  for (const auto& optimizer : optimizers_) {
    if (optimizer->step_was_skipped()) return true;
  }
  return false;
}

void Core::BeginJoin(bool even_batches) {
  TORCH_CHECK(join_ == nullptr, "join_uneven_inputs() is active already: scopes do not nest");
  std::vector<DataParallel*> models;
  for (const auto& model : models_) {
    if (model->ddp() == nullptr) continue;
    models.push_back(model->ddp());
    if (model->source().module() == nullptr) continue;
    for (const auto& part : model->source().module()->modules()) {
      TORCH_CHECK(
          part->as<SyncBatchNormImpl>() == nullptr,
          "join_uneven_inputs() with a SyncBatchNorm in the model: processes that have run "
          "out of batches have no statistics for the others; use BatchNorm, or even batches");
    }
  }
  join_ = std::make_unique<UnevenInputs>(comm(), models);
  for (const auto& loader : loaders_) loader->OverrideEvenBatches(even_batches);
}

void Core::EndJoin(bool finish) {
  const std::unique_ptr<UnevenInputs> join = std::move(join_);
  join_factor_ = 1;
  for (const auto& loader : loaders_) loader->OverrideEvenBatches(std::nullopt);
  if (!finish) return;
  join->Finish([&](int root) {
    // Whoever ran out of batches early missed steps: it takes over what the longest-trained process
    // has.
    for (const auto& optimizer : optimizers_) {
      BroadcastOptimizerState(comm(), optimizer->handle(), root);
      optimizer->set_steps(BroadcastObject(comm(), optimizer->steps(), root));
      optimizer->handle().ZeroGrad();
    }
    for (const auto& scheduler : schedulers_) {
      scheduler->LoadState(BroadcastPlainState(comm(), scheduler->SaveState(), root));
    }
    if (scaler_ != nullptr) {
      scaler_->LoadState(BroadcastPlainState(comm(), scaler_->SaveState(), root));
    }
    accumulation_.LoadState(BroadcastPlainState(comm(), accumulation_.SaveState(), root));
  });
}

void ModelSlot::BeforeForward() {
  if (!at::GradMode::is_enabled()) {
    if (ddp_ != nullptr) ddp_->BeforeForward(core_->communicate());
    return;
  }
  ++forwards_;
  if (ddp_ == nullptr) return;
  TORCH_CHECK(!core_->joining() || core_->in_micro_step(),
              "inside join_uneven_inputs() every training step needs accelerator.accumulate(): it "
              "tells the "
              "processes that ran out of batches what to take part in");
  armed_ = core_->communicate() ? Armed::kYes : Armed::kNo;
  ddp_->BeforeForward(core_->communicate());
}

std::vector<at::Tensor> ModelSlot::PassOutputs(std::vector<at::Tensor> outputs) {
  return ddp_->PassOutputs(std::move(outputs));
}

void ModelSlot::SyncInBackward() {
  if (ddp_ != nullptr) ddp_->ArmBackward();
}

bool ModelSlot::autocast_on() const { return core_->autocast_on(); }
AutocastGuard ModelSlot::Autocast() const { return core_->Autocast(core_->options().autocast); }

OptimizerSlot::OptimizerSlot(Core* core, OptimizerHandle* handle,
                             std::unique_ptr<OptimizerHandle> owned)
    : core_(core), owned_(std::move(owned)), handle_(handle) {}

void OptimizerSlot::Stepped() {
  // After loss.backward() nothing else has told that the batch is trained on.
  if (!core_->in_micro_step()) core_->MarkTrained();
  if (!step_was_skipped_) {
    ++steps_;
    ++core_->total_steps_;
  }
  consumed_ = true;
  gradients_finished_ = false;
  for (size_t m = 0; m < models_.size(); ++m) {
    const std::shared_ptr<ModelSlot> model = models_[m].lock();
    if (model == nullptr) continue;
    forwards_at_step_[m] = model->forwards_;
    if (!core_->in_micro_step()) model->armed_ = ModelSlot::Armed::kNo;
  }
  core_->progress().SetStep(core_->global_step());
  core_->progress().SetPhase("after optimizer step");
}

void OptimizerSlot::Step() {
  if (!core_->sync_gradients()) return;
  TORCH_CHECK(
      core_->averaged_depth_ == 0,
      "optimizer.step() inside ema.apply(), where the model's weights are the average: step "
      "before or after that scope");
  TORCH_CHECK(
      !handle_->needs_closure(),
      "this optimizer evaluates the loss several times in a step (LBFGS): call "
      "optimizer.step(closure) with a function that zeroes the gradients, computes the loss, "
      "calls accelerator.backward(loss) and returns it");
  core_->progress().SetPhase("optimizer step");
  core_->CheckGradients(*this);
  core_->FinishGradients(this);
  MUSTER_FAILPOINT("worker.step");
  if (core_->scaler() != nullptr) {
    core_->scaler()->Step(*handle_);
    step_was_skipped_ = core_->scaler()->step_was_skipped(*handle_);
    core_->EndScalerStep();
  } else {
    handle_->Step();
  }
  Stepped();
}

at::Tensor OptimizerSlot::StepWithClosure(const std::function<at::Tensor()>& closure) {
  TORCH_CHECK(closure != nullptr, "step(closure) got an empty function");
  TORCH_CHECK(
      core_->gradient_accumulation_steps() == 1,
      "step(closure) evaluates the loss itself, so its gradients cannot be accumulated over "
      "several micro-steps: set gradient_accumulation_steps to 1");
  TORCH_CHECK(
      core_->scaler() == nullptr,
      "step(closure) under fp16 would compare losses and gradients of different scales: use "
      "mixed_precision \"bf16\" or \"no\"");
  TORCH_CHECK(!core_->joining(),
              "step(closure) inside join_uneven_inputs(): processes without batches cannot follow "
              "its evaluations");
  TORCH_CHECK(!core_->in_closure_, "step(closure) inside of a closure of step()");
  struct InClosure {
    explicit InClosure(bool& flag) : flag(flag) { flag = true; }
    ~InClosure() { flag = false; }
    bool& flag;
  };
  const auto evaluate = [&] {
    const at::Tensor loss = [&] {
      const InClosure inside(core_->in_closure_);
      return closure();
    }();
    TORCH_CHECK(loss.defined() && loss.numel() == 1,
                "the closure of step() must return the loss, a tensor of one element");
    core_->CheckGradients(*this);
    core_->window_factor_.reset();
    gradients_finished_ = false;
    core_->FinishGradients(this);
    // What the optimizer decides by it, all processes must decide alike.
    return core_->MeanOfAll(loss.detach());
  };
  step_was_skipped_ = false;
  const at::Tensor loss = handle_->StepWithClosure(evaluate);
  Stepped();
  return loss;
}

void OptimizerSlot::ZeroNow(bool set_to_none) {
  zero_at_end_.reset();
  witness_.reset();
  consumed_ = false;
  if (set_to_none && !core_->options().data_parallel.gradient_as_bucket_view) {
    handle_->ZeroGrad(GradZeroing::kSetToNone);
    return;
  }
  handle_->ZeroGrad(GradZeroing::kInPlace);
  for (const auto& owner : models_) {
    const std::shared_ptr<ModelSlot> model = owner.lock();
    if (model != nullptr && model->ddp() != nullptr) {
      model->ddp()->ForgetPending(handle_->parameters());
    }
  }
}

// Where plain LibTorch would zero, unless gradients of micro-steps before would be lost: programs
// call this at the head of a step as well as at its end.
void OptimizerSlot::ZeroGrad(bool set_to_none) {
  if (core_->in_closure_) return ZeroNow(set_to_none);
  if (!core_->in_micro_step()) {
    if (core_->sync_gradients()) ZeroNow(set_to_none);
    return;
  }
  const bool sync = core_->sync_gradients();
  if (consumed_ || core_->window_backwards_ == 0 ||
      (sync && core_->micro_step().window_length == 1)) {
    return ZeroNow(set_to_none);
  }
  // The window is about to end, in a step of this optimizer or, where the program leaves that out,
  // without one.
  if (sync) zero_at_end_ = set_to_none;
}

AccumulateScope::~AccumulateScope() {
  if (core_ != nullptr) core_->EndMicroStep();
}

NoSyncScope::NoSyncScope(Core* core) : core_(core) {
  TORCH_CHECK(!core_->joining(),
              "no_sync() inside join_uneven_inputs() would leave the processes without batches "
              "waiting: use "
              "gradient_accumulation_steps");
  core_->ChangeNoSync(+1);
}
NoSyncScope::~NoSyncScope() { core_->ChangeNoSync(-1); }

LocalScope::LocalScope(Core* core) : core_(core) {
  TORCH_CHECK(!core_->joining(),
              "LocalSGD inside join_uneven_inputs(): there is no exchange to take part in");
  core_->ChangeLocal(+1);
}
LocalScope::~LocalScope() { core_->ChangeLocal(-1); }

AveragedScope::AveragedScope(Core* core, EmaWeights& ema) : core_(core), scope_(ema) {
  core_->ChangeAveraged(+1);
}
AveragedScope::~AveragedScope() noexcept(false) { core_->ChangeAveraged(-1); }

JoinScope::JoinScope(Core* core, bool even_batches)
    : core_(core), exceptions_(std::uncaught_exceptions()) {
  core_->BeginJoin(even_batches);
}
JoinScope::~JoinScope() noexcept(false) {
  core_->EndJoin(/*finish=*/std::uncaught_exceptions() == exceptions_);
}

}  // namespace muster::internal
