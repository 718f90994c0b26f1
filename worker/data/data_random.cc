#include "worker/data/data_random.h"

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/boxing/KernelFunction.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/jit_type.h"
#include "torch/library.h"

namespace muster {
namespace {

// A key that no tensor has and no backend uses: LibTorch reserves it for modes in tests. It comes
// before autograd and every backend.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local DataGenerator* current = nullptr;

// Runs an operator with the reader's generator if it is called without one.
class WithGenerator : public c10::OperatorKernel {
 public:
  // The generator is the argument at this distance from the end of the last one.
  explicit WithGenerator(size_t from_end) : from_end_(from_end) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    // Factory functions have no tensor yet: they call one of the functions that fill it.
    if (current != nullptr && keys.highestBackendKey() == c10::BackendComponent::CPUBit) {
      c10::IValue& generator = (*stack)[stack->size() - from_end_];
      if (generator.isNone()) generator = current->generator();
    }
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  }

 private:
  const size_t from_end_;
};

bool IsOptionalGenerator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

}  // namespace

uint64_t DataGenerator::SampleSeed() const {
  // The finalizer of SplitMix64.
  uint64_t mixed = seed_ + 0x9e3779b97f4a7c15U * sample_;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31);
}

const at::Generator& DataGenerator::generator() {
  if (!generator_.defined()) {
    generator_ = at::detail::createCPUGenerator(seed_);
  } else if (fresh_) {
    generator_.set_current_seed(seed_);
  }
  fresh_ = false;
  return generator_;
}

uint64_t data_seed() {
  if (current == nullptr) return at::detail::getDefaultCPUGenerator().current_seed();
  return current->SampleSeed();
}

void SetDataSample(int64_t number) {
  if (current != nullptr) current->set_sample(static_cast<uint64_t>(number) + 1);
}

DataRandomScope::DataRandomScope(DataGenerator* generator, bool for_torch)
    : outer_(std::exchange(current, generator)),
      included_(c10::impl::tls_is_dispatch_key_included(kKey)),
      for_torch_(for_torch) {
  if (for_torch_ != included_) c10::impl::tls_set_dispatch_key_included(kKey, for_torch_);
}

DataRandomScope::~DataRandomScope() {
  if (for_torch_ != included_) c10::impl::tls_set_dispatch_key_included(kKey, included_);
  current = outer_;
}

void RegisterDataRandom() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Lives as long as the process, like the operators.
    static auto* const fallback =
        new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    static auto* const kernels =
        new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    fallback->fallback(torch::CppFunction::makeFallthrough());
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != "aten") continue;
      const auto op = dispatcher.findSchema(name);
      if (!op.has_value()) continue;
      const std::vector<c10::Argument>& arguments = op->schema().arguments();
      for (size_t i = 0; i < arguments.size(); ++i) {
        if (!IsOptionalGenerator(arguments[i])) continue;
        const std::string full =
            name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
        kernels->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                        std::make_unique<WithGenerator>(arguments.size() - i)));
        break;
      }
    }
  });
}

}  // namespace muster
