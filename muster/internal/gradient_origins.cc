#include "muster/internal/gradient_origins.h"

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "muster/internal/parameter_sets.h"
#include "muster/internal/slots.h"
#include "worker/parallel/ddp.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/activation_policy.h"

namespace muster::internal {

void GradientOrigins::CheckPlainPasses(const OptimizerSlot& slot, bool used_as_they_are) const {
  if (!passes_.any_plain()) return;
  for (const auto& model : registry_.models()) {
    if (model->activation_policy() == nullptr || model->watch() == nullptr) continue;
    model->activation_policy()->CheckCalled(
        [&model](const at::Tensor& parameter) { return model->watch()->Plain(parameter); });
  }
  if (used_as_they_are) return;
  const std::unordered_set<const void*> own = SetOf(slot.handle_->parameters());
  for (const auto& model : registry_.models()) {
    if (model->watch() == nullptr) continue;
    for (const auto& seen : model->watch()->all()) {
      TORCH_CHECK(
          !seen->plain ||
              own.count(AtOptimizer(*model, seen->parameter).unsafeGetTensorImpl()) == 0,
          "optimizer.step(): the gradients of this window come from loss.backward(), at least in "
          "part (that of parameter '",
          seen->name,
          "'), which neither divides them for the accumulation window nor scales them for fp16: "
          "call accelerator.backward(loss), for each loss");
    }
  }
}

void GradientOrigins::ForgetPlainPasses(
    const std::function<bool(ModelSlot&, BackwardWatch::Seen&)>& forgotten) const {
  bool any = false;
  for (const auto& model : registry_.models()) {
    if (model->watch() == nullptr) continue;
    for (const auto& seen : model->watch()->all()) {
      if (seen->plain && forgotten(*model, *seen)) seen->plain = false;
      any = any || seen->plain;
    }
  }
  if (!any) passes_.ForgetPlain();
}

void GradientOrigins::ForgetPlainPasses(const OptimizerSlot& slot) const {
  if (!passes_.any_plain()) return;
  const std::unordered_set<const void*> own = SetOf(slot.handle_->parameters());
  ForgetPlainPasses([&own](ModelSlot& model, BackwardWatch::Seen& seen) {
    return own.count(AtOptimizer(model, seen.parameter).unsafeGetTensorImpl()) > 0;
  });
}

void GradientOrigins::ForgetPlainPassesWithoutGradients() const {
  if (!passes_.any_plain()) return;
  ForgetPlainPasses([](ModelSlot& model, BackwardWatch::Seen& seen) {
    return HoldsNothing(AtOptimizer(model, seen.parameter).grad());
  });
}

void GradientOrigins::ForgetAllPlainPasses() const {
  ForgetPlainPasses([](ModelSlot&, BackwardWatch::Seen&) { return true; });
}

void GradientOrigins::FindOwners(OptimizerSlot& slot) const {
  const bool alone = process_.size() == 1;
  const std::vector<at::Tensor>& parameters = slot.handle().parameters();
  // The following looks at every parameter.
  const int64_t version = slot.handle().parameters_version();
  if (slot.checked_parameters_ == version && slot.checked_models_ == registry_.models_version()) {
    return;
  }
  slot.checked_parameters_ = version;
  slot.checked_models_ = registry_.models_version();
  // Models may share tensors.
  std::unordered_map<const void*, std::vector<std::shared_ptr<ModelSlot>>> owners;
  for (const auto& model : registry_.models()) {
    if (model->evaluation()) continue;
    if (!alone) {
      if (model->sharded() != nullptr) {
        for (const at::Tensor& shard : model->sharded()->shards()) {
          owners[shard.unsafeGetTensorImpl()].push_back(model);
        }
        for (size_t i = 0; i < parameters.size(); ++i) {
          TORCH_CHECK(!model->sharded()->ShardOf(parameters[i]).defined(),
                      "optimizer.step(): parameter ", NameOf(parameters[i], i, registry_.models()),
                      " of a sharded model was added to the optimizer after both were prepared: "
                      "give the optimizer all its parameters before prepare()");
        }
        continue;
      }
      // The exchange does not know parameters that the module got after prepare().
      if (model->ddp() == nullptr) continue;
      for (const at::Tensor& parameter : model->ddp()->parameters()) {
        owners[parameter.unsafeGetTensorImpl()].push_back(model);
      }
      continue;
    }
    for (const auto& [name, parameter] : model->source().parameters()) {
      owners[parameter.unsafeGetTensorImpl()].push_back(model);
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
      continue;
    }
    for (const std::shared_ptr<ModelSlot>& model : owner->second) {
      if (!seen.insert(model.get()).second) continue;
      slot.models_.push_back(model);
      slot.forwards_at_step_.push_back(0);
    }
  }
}

namespace {

// For an optimizer none of whose `tensors` tensors belongs to a prepared model: throws if a sharded
// model has gradients that belong to no optimizer, because this one was probably meant to have
// them.
void CheckHoldsOthers(const Registry& registry, size_t tensors) {
  std::unordered_set<const void*> held;
  for (const auto& optimizer : registry.optimizers()) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) {
      held.insert(parameter.unsafeGetTensorImpl());
    }
  }
  for (const auto& model : registry.models()) {
    if (model->sharded() == nullptr) continue;
    const auto parameters = model->source().parameters();
    const auto is_held = [&](const auto& named) {
      const at::Tensor shard = model->sharded()->ShardOf(named.second);
      return shard.defined() && held.count(shard.unsafeGetTensorImpl()) > 0;
    };
    // Training only a part of a model is a choice, and not a mistake.
    if (std::any_of(parameters.begin(), parameters.end(), is_held)) continue;
    for (const auto& [name, parameter] : parameters) {
      // For each trained parameter, even if this rank has no part of it.
      if (!parameter.grad().defined() || !model->sharded()->ShardOf(parameter).defined()) continue;
      TORCH_CHECK(
          false, "optimizer.step(): none of the ", tensors,
          " tensors of this optimizer belongs to a prepared model or has a gradient, and no "
          "prepared optimizer has parameter '",
          name,
          "' of a sharded model, which has one: the optimizer was created with other tensors, such "
          "as those of a copy of the model; create it with net->parameters() of the module that "
          "you pass to prepare()");
    }
  }
}

}  // namespace

void GradientOrigins::CheckExchanged(OptimizerSlot& slot) const {
  FindOwners(slot);
  const std::vector<at::Tensor>& parameters = slot.handle_->parameters();
  for (const size_t i : slot.local_) {
    TORCH_CHECK(
        !parameters[i].grad().defined(), "optimizer.step(): parameter ",
        NameOf(parameters[i], i, registry_.models()),
        " belongs to no model that was prepared for training, or was added to its model after "
        "prepare(), so its gradient is not averaged over the processes: complete the model and "
        "then "
        "prepare it, or, if you average the gradient yourself, set "
        "options.allow_local_gradients");
  }
  if (slot.local_.size() == parameters.size()) CheckHoldsOthers(registry_, parameters.size());
  std::vector<std::pair<std::shared_ptr<ModelSlot>, std::unordered_set<std::string>>> missed_by;
  bool any = false;
  for (const auto& owner : slot.models_) {
    const std::shared_ptr<ModelSlot> model = owner.lock();
    if (model == nullptr) continue;
    std::vector<std::string> missed;
    if (model->sharded() != nullptr) {
      missed = model->sharded()->UnexchangedGradients();
    } else if (model->ddp() != nullptr) {
      missed = model->ddp()->UnexchangedGradients();
    }
    any = any || !missed.empty();
    missed_by.emplace_back(model, std::unordered_set<std::string>(missed.begin(), missed.end()));
  }
  if (!any) return;
  // The other parameters may belong to another optimizer, which steps at another time. If models
  // share a parameter, the model that was called exchanges its gradient.
  const std::unordered_set<const void*> own = SetOf(parameters);
  std::unordered_set<const void*> exchanged;
  std::vector<std::pair<std::string, const void*>> missed;
  for (const auto& [model, names] : missed_by) {
    const std::unordered_set<const void*> known =
        model->ddp() == nullptr ? own : SetOf(model->ddp()->parameters());
    for (const auto& [name, parameter] : model->source().parameters()) {
      const void* const tensor = AtOptimizer(*model, parameter).unsafeGetTensorImpl();
      if (own.count(tensor) == 0) continue;
      if (names.count(name) > 0) {
        missed.emplace_back(name, tensor);
      } else if (known.count(tensor) > 0) {
        exchanged.insert(tensor);
      }
    }
  }
  std::erase_if(missed, [&](const auto& one) { return exchanged.count(one.second) > 0; });
  TORCH_CHECK(
      missed.empty(), "optimizer.step(): the gradient of parameter '",
      missed.empty() ? "" : missed.front().first, "'",
      missed.size() > 1 ? absl::StrCat(" (and of ", missed.size() - 1, " more)") : "",
      " holds something that was not averaged over the processes: a backward pass through "
      "model->forward(...) or another method of the module, through a second graph of one "
      "forward pass, or in a micro-step of this window after which the parameter was frozen or the "
      "model was not called again; call model(...), or model.call(&Net::method, ...) for other "
      "methods, in the last micro-step of each window");
}

void GradientOrigins::CheckForwards(OptimizerSlot& slot) const {
  FindOwners(slot);
  std::vector<std::shared_ptr<ModelSlot>> silent, heard;
  for (size_t m = 0; m < slot.models_.size(); ++m) {
    const std::shared_ptr<ModelSlot> model = slot.models_[m].lock();
    if (model == nullptr) continue;
    (model->forwards_ > slot.forwards_at_step_[m] ? heard : silent).push_back(model);
  }
  if (silent.empty()) return;
  std::unordered_set<const void*> called;  // tensors of models that have been
  for (const std::shared_ptr<ModelSlot>& model : heard) {
    for (const auto& [name, parameter] : model->source().parameters()) {
      called.insert(parameter.unsafeGetTensorImpl());
    }
  }
  const std::unordered_set<const void*> own = SetOf(slot.handle_->parameters());
  for (const std::shared_ptr<ModelSlot>& model : silent) {
    for (const auto& [name, parameter] : model->source().parameters()) {
      const void* const tensor = parameter.unsafeGetTensorImpl();
      if (!parameter.grad().defined() || own.count(tensor) == 0 || called.count(tensor) > 0) {
        continue;
      }
      const BackwardWatch::Seen* const seen =
          model->watch() == nullptr ? nullptr : model->watch()->Find(parameter);
      // No pass has added to gradients that were zeroed in place or are left from an earlier step.
      if (seen != nullptr && seen->pass <= slot.pass_at_step_ && !seen->plain) continue;
      TORCH_CHECK(false, "optimizer.step(): the gradient of parameter '", name,
                  "' comes from a forward pass around the prepared model, which runs without mixed "
                  "precision: call model(...) instead of model->forward(...), and "
                  "model.call(&Net::method, ...) for other methods");
    }
  }
}

}  // namespace muster::internal
