#include "worker/bigmodel/empty_weights.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/empty_strided.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/module.h"
#include "worker/bigmodel/deferred_init_key.h"
#include "worker/bigmodel/init_tape.h"
#include "worker/bigmodel/ivalue_tensors.h"

namespace muster {
namespace {

constexpr c10::DispatchKey kKey = kDeferredInitKey;

thread_local EmptyWeightsScope* current_scope = nullptr;

bool AnyMeta(const std::vector<c10::IValue>& values) {
  bool any = false;
  for (const c10::IValue& value : values) {
    VisitTensors(value, [&](const at::Tensor& tensor) { any = any || tensor.is_meta(); });
  }
  return any;
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

// Attached to a parameter of a deferred module: how its values are computed.
struct DeferredValues : c10::BackendMeta {
  std::shared_ptr<const InitTape> tape;
  at::Tensor on_tape;
  int64_t version = 0;
};

DeferredValues* DeferredValuesOf(const at::Tensor& tensor) {
  return dynamic_cast<DeferredValues*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace

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
    // The inner operators of an operator are not recorded again.
    const c10::impl::ExcludeDispatchKeyGuard inside(kKey);
    const c10::DispatchKeySet below =
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
    try {
      op.redispatchBoxed(below, stack);
    } catch (const c10::Error&) {
      // Either the values matter (item(), nonzero(), a copy to a device that was named), and are
      // computed from the record, or it is a factory that the meta device lacks (randperm), whose
      // tensor is allocated at once.
      if ((has_tensors && !AnyMeta(arguments)) || WritesMeta(schema, arguments)) throw;
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
      InitTape& tape = *current_scope->tape_;
      InitTape::Step step = {op, std::move(arguments), std::move(results)};
      current_scope->options_.deferred ? tape.AddAndDraw(std::move(step))
                                       : tape.Add(std::move(step));
    }
  }
};

EmptyWeightsScope::EmptyWeightsScope(const EmptyWeightsOptions& options)
    : options_(options), tape_(std::make_shared<InitTape>()), outer_(current_scope) {
  SetFallbackOfThreads(&EmptyWeightsMode::Fallback);
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
  if (!options_.deferred) {
    for (const at::Tensor& parameter : module.parameters()) empty(parameter);
  }
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
  if (options_.deferred) Defer(module);
}

void EmptyWeightsScope::Defer(torch::nn::Module& module) {
  std::map<const void*, std::pair<std::string, const void*>> known;  // by the storage
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined() || !parameter.is_meta()) continue;
    const auto& [name, object] = known
                                     .try_emplace(parameter.storage().unsafeGetStorageImpl(),
                                                  item.key(), parameter.unsafeGetTensorImpl())
                                     .first->second;
    TORCH_CHECK(object == parameter.unsafeGetTensorImpl(), "parameters '", name, "' and '",
                item.key(),
                "' share memory but are two tensors, which would get memory of their own: register "
                "one tensor under both names, or construct the module without deferred_init()");
    auto deferred = c10::make_intrusive<DeferredValues>();
    deferred->tape = tape_;
    deferred->on_tape = parameter.detach();
    deferred->version = parameter._version();
    parameter.unsafeGetTensorImpl()->set_backend_meta(std::move(deferred));
  }
}

bool HasDeferredValues(const at::Tensor& tensor) {
  return tensor.is_meta() && DeferredValuesOf(tensor) != nullptr;
}

void Materialize(const at::Tensor& tensor, at::Device device, const std::string& name,
                 bool with_values) {
  if (!tensor.is_meta()) return;
  const at::NoGradGuard no_grad;
  const DeferredValues* const deferred = DeferredValuesOf(tensor);
  TORCH_CHECK(
      deferred != nullptr, "'", name,
      "' is on the meta device and has no values: construct the module with "
      "muster::deferred_init(), and change its type inside of it, or load its weights first");
  TORCH_CHECK(deferred->version == tensor._version(), "'", name,
              "' was written after deferred_init(), when it had no memory: initialize it inside "
              "the function passed to deferred_init()");
  at::Tensor value;
  if (with_values) {
    value = deferred->tape->ValueOf(deferred->on_tape).to(tensor.options().device(device));
    // The value must not be a part of something larger.
    if (value.storage().nbytes() != value.nbytes()) value = value.clone();
  } else {
    // Use the strides of that clone, which has no holes.
    value = at::empty_like(tensor, tensor.options().device(device));
  }
  PlaceTensor(tensor, value);
  tensor.unsafeGetTensorImpl()->set_backend_meta(nullptr);
}

void PlaceTensor(const at::Tensor& tensor, const at::Tensor& value) {
  const bool same_kind =
      tensor.device() == value.device() && tensor.scalar_type() == value.scalar_type();
  TORCH_CHECK(same_kind || !tensor.grad().defined(), "a tensor of a module becomes ",
              value.scalar_type(), " on ", value.device(), " while it has a gradient that is ",
              tensor.scalar_type(), " on ", tensor.device(), ": zero_grad() first");
  // Does what set_data() does, but without its operators, which would request contents that are not
  // in memory.
  auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && !same_kind) meta->grad_accumulator_.reset();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
}

}  // namespace muster
