#include "worker/bigmodel/empty_weights.h"

#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty_strided.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/library.h"
#include "torch/nn/module.h"

namespace muster {
namespace {

// LibTorch keeps it free for recordings of this kind, above autograd.
constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

thread_local EmptyWeightsScope* current_scope = nullptr;

// Calls `visit` for each tensor in `value`.
template <class Visit>
void VisitTensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor.has_value()) visit(*tensor);
    }
  }
}

// The same with each tensor exchanged for change(tensor).
template <class Change>
c10::IValue WithTensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorList()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      changed.push_back(tensor.has_value() ? std::optional(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

bool AnyMeta(const std::vector<c10::IValue>& values) {
  bool any = false;
  for (const c10::IValue& value : values) {
    VisitTensors(value, [&](const at::Tensor& tensor) { any = any || tensor.is_meta(); });
  }
  return any;
}

const void* StorageOf(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool WritesMeta(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments) {
  bool any = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    VisitTensors(arguments[i], [&](const at::Tensor& tensor) { any = any || tensor.is_meta(); });
  }
  return any;
}

}  // namespace

// What the operators of a scope did, in order.
class EmptyWeightsScope::Tape {
 public:
  struct Step {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments, results;
  };

  void Add(Step step) { steps_.push_back(std::move(step)); }

  at::Tensor ValueOf(const at::Tensor& wanted) {
    if (!wanted.is_meta()) return wanted;
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard not_recorded(kKey);
    Replay replay;
    for (const size_t index : StepsFor(wanted)) replay.Run(steps_[index]);
    return replay.Find(wanted);
  }

 private:
  class Replay {
   public:
    void Run(const Step& step) {
      torch::jit::Stack stack;
      for (const c10::IValue& argument : step.arguments) {
        stack.push_back(
            WithTensors(argument, [this](const at::Tensor& tensor) { return Find(tensor); }));
      }
      step.op.callBoxed(&stack);
      for (size_t i = 0; i < step.results.size(); ++i) {
        std::vector<at::Tensor> real;
        VisitTensors(stack[i], [&](const at::Tensor& tensor) { real.push_back(tensor); });
        size_t next = 0;
        VisitTensors(step.results[i], [&](const at::Tensor& tensor) {
          const at::Tensor& value = real[next++];
          real_.insert_or_assign(tensor.unsafeGetTensorImpl(), value);
          by_storage_.try_emplace(StorageOf(tensor), value);
        });
      }
    }

    at::Tensor Find(const at::Tensor& tensor) {
      if (!tensor.is_meta()) return tensor;
      const auto it = real_.find(tensor.unsafeGetTensorImpl());
      if (it != real_.end()) return it->second;
      // data() makes a tensor that no operator has made, in the same memory.
      const auto base = by_storage_.find(StorageOf(tensor));
      TORCH_CHECK(base != by_storage_.end(),
                  "a tensor on the meta device has no values: it was not created in this scope of "
                  "init_empty_weights()");
      return base->second.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }

   private:
    std::unordered_map<const void*, at::Tensor> real_;  // by the TensorImpl
    std::unordered_map<const void*, at::Tensor> by_storage_;
  };

  // Numbers of the steps that `wanted` depends on, in order.
  std::vector<size_t> StepsFor(const at::Tensor& wanted) const {
    std::unordered_set<const void*> needed = {StorageOf(wanted)};
    std::vector<size_t> steps;
    for (size_t i = steps_.size(); i-- > 0;) {
      const Step& step = steps_[i];
      bool relevant = false;
      const auto check = [&](const at::Tensor& tensor) {
        relevant = relevant || (tensor.is_meta() && needed.contains(StorageOf(tensor)));
      };
      for (const c10::IValue& result : step.results) VisitTensors(result, check);
      for (size_t a = 0; a < step.arguments.size(); ++a) {
        const c10::AliasInfo* const alias = step.op.schema().arguments()[a].alias_info();
        if (alias != nullptr && alias->isWrite()) VisitTensors(step.arguments[a], check);
      }
      if (!relevant) continue;
      steps.push_back(i);
      for (const c10::IValue& argument : step.arguments) {
        VisitTensors(argument, [&](const at::Tensor& tensor) {
          if (tensor.is_meta()) needed.insert(StorageOf(tensor));
        });
      }
    }
    return {steps.rbegin(), steps.rend()};
  }

  std::vector<Step> steps_;
};

struct EmptyWeightsMode {
  static void Fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
    const c10::FunctionSchema& schema = op.schema();
    const size_t count = schema.arguments().size();
    const size_t first = stack->size() - count;
    std::vector<c10::IValue> arguments(stack->begin() + static_cast<int64_t>(first), stack->end());
    bool has_tensors = false;
    for (const c10::IValue& argument : arguments) {
      VisitTensors(argument, [&](const at::Tensor&) { has_tensors = true; });
    }
    if (!has_tensors) {
      for (size_t i = 0; i < count; ++i) {
        if (schema.arguments()[i].name() != "device" || !arguments[i].isNone()) continue;
        (*stack)[first + i] = c10::Device(at::kMeta);
      }
    }
    // What an operator is made of is not recorded again.
    const c10::impl::ExcludeDispatchKeyGuard inside(kKey);
    const c10::DispatchKeySet below =
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
    try {
      op.redispatchBoxed(below, stack);
    } catch (const c10::Error&) {
      // The values count (item(), nonzero(), a copy to a device that was named): from the record.
      if (!AnyMeta(arguments) || WritesMeta(schema, arguments)) throw;
      stack->resize(first);
      for (const c10::IValue& argument : arguments) {
        stack->push_back(WithTensors(argument, [](const at::Tensor& tensor) {
          return current_scope->tape_->ValueOf(tensor);
        }));
      }
      op.callBoxed(stack);
      return;
    }
    std::vector<c10::IValue> results(stack->begin() + static_cast<int64_t>(first), stack->end());
    if (AnyMeta(arguments) || AnyMeta(results)) {
      current_scope->tape_->Add({op, std::move(arguments), std::move(results)});
    }
  }

  static void Register() {
    static auto& library = *[] {
      auto* const all = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
      all->fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
      return all;
    }();
    (void)library;
  }
};

EmptyWeightsScope::EmptyWeightsScope(const EmptyWeightsOptions& options)
    : options_(options), tape_(std::make_unique<Tape>()), outer_(current_scope) {
  EmptyWeightsMode::Register();
  current_scope = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

EmptyWeightsScope::~EmptyWeightsScope() {
  current_scope = outer_;
  c10::impl::tls_set_dispatch_key_included(kKey, outer_ != nullptr);
}

at::Tensor EmptyWeightsScope::ValueOf(const at::Tensor& tensor) { return tape_->ValueOf(tensor); }

void EmptyWeightsScope::Finish(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard not_recorded(kKey);
  const auto empty = [](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_meta()) return;
    PlaceTensor(tensor, at::empty_strided(tensor.sizes(), tensor.strides(),
                                          tensor.options().device(at::kMeta)));
  };
  for (const at::Tensor& parameter : module.parameters()) empty(parameter);
  for (const auto& buffer : module.named_buffers()) {
    if (options_.include_buffers) {
      empty(buffer.value());
    } else if (buffer.value().defined() && buffer.value().is_meta()) {
      try {
        PlaceTensor(buffer.value(), tape_->ValueOf(buffer.value()));
      } catch (c10::Error& error) {
        error.add_context(c10::str("while computing buffer '", buffer.key(),
                                   "' of a module without weights; construct it with "
                                   "{.include_buffers = true} to leave buffers empty, too"));
        throw;
      }
    }
  }
}

void PlaceTensor(const at::Tensor& tensor, const at::Tensor& value) {
  const bool same_kind =
      tensor.device() == value.device() && tensor.scalar_type() == value.scalar_type();
  TORCH_CHECK(same_kind || !tensor.grad().defined(), "a tensor of a module becomes ",
              value.scalar_type(), " on ", value.device(), " while it has a gradient that is ",
              tensor.scalar_type(), " on ", tensor.device(), ": zero_grad() first");
  // What set_data() does, without its operators: they would ask for contents that are away.
  auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && !same_kind) meta->grad_accumulator_.reset();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
}

}  // namespace muster
