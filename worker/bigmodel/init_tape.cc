#include "worker/bigmodel/init_tape.h"

#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/enum_tag.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/set.h"
#include "base/malloc_tuning.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "c10/util/Exception.h"
#include "worker/bigmodel/ivalue_tensors.h"

namespace muster {
namespace {

// Drawing this many bytes takes longer than returning their memory.
constexpr size_t kLargeBytes = size_t{1} << 20;

const void* StorageOf(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool IsWritten(const c10::FunctionSchema& schema, size_t argument) {
  const c10::AliasInfo* const alias = schema.arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

// Returns a copy of an argument as it is now: its owner may write to it later, or free its memory.
at::Tensor CopyOf(const at::Tensor& tensor) {
  if (tensor.is_meta()) return tensor.detach();
  at::Tensor once = tensor;
  if (tensor.layout() == at::kStrided) {
    // Expanded dimensions share one copy of the numbers.
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.stride(i) == 0 && tensor.size(i) > 1) once = once.narrow(i, 0, 1);
    }
  }
  at::Tensor copy = once.clone();
  if (!copy.sizes().equals(tensor.sizes())) copy = copy.expand(tensor.sizes());
  // This flag determines the type of results.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// Returns the generator from which the step draws.
at::Generator GeneratorOf(const InitTape::Step& step) {
  const std::vector<c10::Argument>& arguments = step.op.schema().arguments();
  for (size_t i = 0; i < step.arguments.size(); ++i) {
    if (arguments[i].name() == "generator" && step.arguments[i].isGenerator()) {
      return step.arguments[i].toGenerator();
    }
  }
  return at::detail::getDefaultCPUGenerator();
}

at::Tensor StateOf(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void SetState(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// Puts a generator into an earlier state as long as it exists.
class ScopedState {
 public:
  ScopedState(const at::Generator& generator, const at::Tensor& state)
      : generator_(generator), now_(StateOf(generator)) {
    SetState(generator_, state);
  }
  ~ScopedState() { SetState(generator_, now_); }
  ScopedState(const ScopedState&) = delete;
  ScopedState& operator=(const ScopedState&) = delete;

 private:
  const at::Generator generator_;
  const at::Tensor now_;
};

}  // namespace

class InitTape::Replay {
 public:
  void Run(const Step& step) {
    torch::jit::Stack stack;
    for (const c10::IValue& argument : step.arguments) {
      stack.push_back(
          WithTensors(argument, [this](const at::Tensor& tensor) { return Find(tensor); }));
    }
    if (step.generator_state.defined()) {
      const ScopedState again(GeneratorOf(step), step.generator_state);
      step.op.callBoxed(&stack);
    } else {
      // Remember the state, so that other tensors that depend on this step get the same numbers.
      if (step.op.hasTag(at::Tag::nondeterministic_seeded)) {
        step.generator_state = StateOf(GeneratorOf(step));
      }
      step.op.callBoxed(&stack);
    }
    for (size_t i = 0; i < step.results.size(); ++i) {
      std::vector<at::Tensor> real;
      VisitTensors(stack[i], [&](const at::Tensor& tensor) { real.push_back(tensor); });
      size_t next = 0;
      VisitTensors(step.results[i],
                   [&](const at::Tensor& tensor) { Keep(tensor, real[next++], step); });
    }
  }

  at::Tensor Find(const at::Tensor& tensor) const {
    if (!tensor.is_meta()) return tensor;
    const auto it = real_.find(StorageOf(tensor));
    TORCH_CHECK(it != real_.end(),
                "a tensor on the meta device has no values: it was not created in this scope of "
                "init_empty_weights()");
    const at::Tensor& base = it->second;
    if (SamePlace(base, tensor) && base.scalar_type() == tensor.scalar_type()) return base;
    return at::empty({0}, tensor.options().device(base.device()))
        .set_(base.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  }

 private:
  static bool SamePlace(const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && a.strides() == b.strides() &&
           a.storage_offset() == b.storage_offset();
  }

  // `value` is the real tensor for `tensor`.
  void Keep(const at::Tensor& tensor, const at::Tensor& value, const Step& step) {
    // A view, or a tensor that was written in place: its memory is known.
    if (!tensor.is_meta() || real_.contains(StorageOf(tensor))) return;
    at::Tensor base = value;
    if (!SamePlace(base, tensor)) {
      TORCH_CHECK(base.sizes() == tensor.sizes() && tensor.storage_offset() == 0,
                  step.op.schema().name(), " gives ", base.sizes(),
                  " where it was recorded to give ", tensor.sizes(),
                  ": the construction of this module cannot be repeated");
      base = at::empty_strided(tensor.sizes(), tensor.strides(), base.options()).copy_(base);
    }
    real_.emplace(StorageOf(tensor), std::move(base));
  }

  // by the memory of the tensors that they replace
  std::unordered_map<const void*, at::Tensor> real_;
};

void InitTape::Add(Step step) {
  const at::NoGradGuard no_grad;
  const auto alias = [](const at::Tensor& tensor) {
    return tensor.is_meta() ? tensor.detach() : tensor;
  };
  for (c10::IValue& argument : step.arguments) argument = WithTensors(argument, CopyOf);
  for (c10::IValue& result : step.results) result = WithTensors(result, alias);
  steps_.push_back(std::move(step));
}

void InitTape::AddAndDraw(Step step) {
  if (step.op.hasTag(at::Tag::nondeterministic_seeded)) {
    const at::NoGradGuard no_grad;
    // Otherwise the heap grows to the size of the model, a tensor at a time.
    std::optional<ScopedGiveBackFreedMemory> memory_goes;
    step.generator_state = StateOf(GeneratorOf(step));
    torch::jit::Stack stack;
    for (size_t i = 0; i < step.arguments.size(); ++i) {
      const bool written = IsWritten(step.op.schema(), i);
      // Only the shape of a written tensor matters; the contents of a read one may decide how much
      // is drawn.
      stack.push_back(WithTensors(step.arguments[i], [&](const at::Tensor& tensor) {
        if (!written || !tensor.is_meta()) return ValueOf(tensor);
        if (tensor.nbytes() >= kLargeBytes) memory_goes.emplace();
        return at::empty_strided(tensor.sizes(), tensor.strides(),
                                 tensor.options().device(at::kCPU));
      }));
    }
    step.op.callBoxed(&stack);
  }
  Add(std::move(step));
}

at::Tensor InitTape::ValueOf(const at::Tensor& wanted) const {
  if (!wanted.is_meta()) return wanted;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard not_recorded(c10::DispatchKey::DeferredInit);
  Replay replay;
  for (const size_t index : StepsFor(wanted)) replay.Run(steps_[index]);
  return replay.Find(wanted);
}

std::vector<size_t> InitTape::StepsFor(const at::Tensor& wanted) const {
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
      if (IsWritten(step.op.schema(), a)) VisitTensors(step.arguments[a], check);
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

}  // namespace muster
