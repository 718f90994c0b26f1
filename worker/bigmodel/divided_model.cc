#include "worker/bigmodel/divided_model.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/grad_mode.h"
#include "base/mutex.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/StorageImpl.h"
#include "c10/core/TensorImpl.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "c10/util/SmallVector.h"
#include "worker/bigmodel/deferred_init_key.h"
#include "worker/bigmodel/ivalue_tensors.h"
#include "worker/parallel/paged_storage.h"

namespace muster {
namespace {

constexpr c10::DispatchKey kKey = kDeferredInitKey;

// Operators that take tensors of several devices by themselves, or look at no contents.
constexpr const char* kLeftAlone[] = {
    "aten::copy_",        "aten::set_",        "aten::set_data",
    "aten::type_as",      "aten::resize_as_",  "aten::is_set_to",
    "aten::is_same_size", "aten::result_type", "aten::_has_compatible_shallow_copy_type",
};

bool BeginsWith(const std::string& text, const char* prefix) {
  return std::strncmp(text.c_str(), prefix, std::strlen(prefix)) == 0;
}

// One tensor of each list at a time, whose devices are its own.
bool TakesListsApart(const std::string& op) {
  return BeginsWith(op, "aten::_foreach_") || BeginsWith(op, "aten::_amp_foreach_");
}

bool IsLeftAlone(const std::string& op) {
  return std::any_of(std::begin(kLeftAlone), std::end(kLeftAlone),
                     [&](const char* name) { return op == name; });
}

bool IsOnGpu(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_cpu() && !tensor.is_meta();
}

const c10::StorageImpl* StorageOf(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// LibTorch adds a key to a tensor only where it is made.
struct Keys : c10::TensorImpl {
  static void Add(c10::TensorImpl& impl) {
    constexpr c10::DispatchKeySet c10::TensorImpl::*keys = &Keys::key_set_;
    impl.*keys = (impl.*keys).add(kKey);
  }
};

void Mark(const at::Tensor& tensor) {
  if (tensor.defined() && !MovesOperators(tensor)) Keys::Add(*tensor.unsafeGetTensorImpl());
}

// Memory of parameters. An address is not given to another storage while it is here.
class Weights {
 public:
  void Add(const at::Tensor& tensor) {
    MutexLock lock(&mu_);
    Entry& entry = storages_.try_emplace(StorageOf(tensor), tensor.storage().getWeakStorageImpl())
                       .first->second;
    ++entry.models;
  }
  void Remove(const void* storage) {
    MutexLock lock(&mu_);
    const auto found = storages_.find(storage);
    if (--found->second.models == 0) storages_.erase(found);
  }
  bool Contains(const void* storage) {
    MutexLock lock(&mu_);
    return storages_.contains(storage);
  }

 private:
  struct Entry {
    explicit Entry(c10::weak_intrusive_ptr<c10::StorageImpl> weak) : storage(std::move(weak)) {}
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int models = 0;
  };
  Mutex mu_;
  std::unordered_map<const void*, Entry> storages_ ABSL_GUARDED_BY(mu_);
};

Weights& TheWeights() {
  static auto& weights = *new Weights;
  return weights;
}

at::Tensor CopyTo(const at::Tensor& tensor, const c10::Device& device) {
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true);
}

// What is on another GPU than its source, for the next operator that takes it there.
class SharedCopies {
 public:
  at::Tensor On(const at::Tensor& tensor, const c10::Device& device) {
    const bool needs_gradient = c10::GradMode::is_enabled() && tensor.requires_grad();
    // The contents of pages change without a version.
    const bool is_shared = !needs_gradient && !tensor.is_inference() && tensor.has_storage() &&
                           !IsPaged(tensor) && tensor.nbytes() <= kSharedCopyBytes;
    if (!is_shared) {
      Count(tensor);
      return CopyTo(tensor, device);
    }
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    std::vector<Entry> gone;  // freed without the lock
    if (at::Tensor found = Find(tensor, stream, &gone); found.defined()) return found;
    Count(tensor);
    Entry entry = {.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                   .storage = tensor.storage().getWeakStorageImpl(),
                   .data = tensor.storage().data(),
                   .version = tensor._version(),
                   .stream = stream,
                   .copy = {}};
    {
      // A pass with gradients may be the next that takes it.
      const c10::InferenceMode off(false);
      const at::NoGradGuard no_grad;
      entry.copy = CopyTo(tensor, device);
    }
    at::Tensor copy = entry.copy;
    Add(std::move(entry), &gone);
    return copy;
  }

  // A result shows its memory, which somebody may write from now on.
  void Forget(const c10::StorageImpl* storage) {
    std::vector<Entry> gone;
    MutexLock lock(&mu_);
    Drop([&](const Entry& entry) { return StorageOf(entry.copy) == storage; }, &gone);
  }

  void Clear() {
    std::vector<Entry> gone;
    MutexLock lock(&mu_);
    Drop([](const Entry&) { return true; }, &gone);
  }

  DeviceCrossings crossings() {
    MutexLock lock(&mu_);
    return crossings_;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    int64_t version;
    c10::Stream stream;  // in whose order the copy was made
    at::Tensor copy;
  };

  void Count(const at::Tensor& tensor) {
    MutexLock lock(&mu_);
    ++crossings_.copies;
    crossings_.copied_bytes += tensor.nbytes();
  }

  template <typename Condition>
  void Drop(const Condition& condition, std::vector<Entry>* gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto end = std::stable_partition(entries_.begin(), entries_.end(),
                                           [&](const Entry& entry) { return !condition(entry); });
    gone->insert(gone->end(), std::make_move_iterator(end),
                 std::make_move_iterator(entries_.end()));
    entries_.erase(end, entries_.end());
  }

  at::Tensor Find(const at::Tensor& tensor, const c10::Stream& stream, std::vector<Entry>* gone) {
    MutexLock lock(&mu_);
    Drop([](const Entry& entry) { return entry.tensor.expired() || entry.storage.expired(); },
         gone);
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = entries_[i];
      if (entry.tensor._unsafe_get_target() != tensor.unsafeGetTensorImpl() ||
          entry.stream != stream) {
        continue;
      }
      if (entry.storage._unsafe_get_target() != StorageOf(tensor) ||
          entry.data != tensor.storage().data() || entry.version != tensor._version()) {
        gone->push_back(std::move(entries_[i]));
        entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(i));
        break;
      }
      ++crossings_.shared;
      at::Tensor copy = entry.copy;
      // The last are the ones that were used last.
      std::rotate(entries_.begin() + static_cast<ptrdiff_t>(i),
                  entries_.begin() + static_cast<ptrdiff_t>(i) + 1, entries_.end());
      return copy;
    }
    return {};
  }

  void Add(Entry entry, std::vector<Entry>* gone) {
    MutexLock lock(&mu_);
    entries_.push_back(std::move(entry));
    uint64_t bytes = 0;
    for (const Entry& each : entries_) bytes += each.copy.nbytes();
    size_t superfluous = 0;
    while (entries_.size() - superfluous > kSharedCopies || bytes > kSharedCopyBytes) {
      bytes -= entries_[superfluous++].copy.nbytes();
    }
    const auto end = entries_.begin() + static_cast<ptrdiff_t>(superfluous);
    gone->insert(gone->end(), std::make_move_iterator(entries_.begin()),
                 std::make_move_iterator(end));
    entries_.erase(entries_.begin(), end);
  }

  Mutex mu_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mu_);
  DeviceCrossings crossings_ ABSL_GUARDED_BY(mu_);
};

SharedCopies& TheCopies() {
  static auto& copies = *new SharedCopies;
  return copies;
}

// Where the thread's last operator with a weight ran.
thread_local std::optional<c10::Device> last_device;

// Where an operator runs, by the tensors that it takes.
class Choice {
 public:
  void See(const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return;
    if (!IsOnGpu(tensor)) {
      writes_host_ |= write;
      return;
    }
    const bool is_marked = MovesOperators(tensor);
    if (!is_marked && !write) others_.push_back(tensor.unsafeGetTensorImpl());
    const c10::Device device = tensor.device();
    is_mixed_ |= any_.has_value() && *any_ != device;
    any_ = device;
    if (write) {
      writes_several_ |= written_.has_value() && *written_ != device;
      written_ = device;
    }
    const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    if (is_marked && bytes > weight_bytes_ && TheWeights().Contains(StorageOf(tensor))) {
      weight_bytes_ = bytes;
      weight_ = device;
    }
    // A number does not say where the rest is.
    if (tensor.dim() == 0) return;
    has_last_ |= last_device == device;
    if (bytes > largest_bytes_) {
      largest_bytes_ = bytes;
      largest_ = device;
    }
  }

  bool is_mixed() const { return is_mixed_; }
  bool can_move() const { return !writes_host_ && !writes_several_; }
  bool has_weight() const { return weight_.has_value(); }
  // Of an operator with a tensor on a GPU.
  c10::Device device() const {
    if (written_.has_value()) return *written_;
    if (weight_.has_value()) return *weight_;
    if (has_last_) return *last_device;
    return largest_.value_or(*any_);
  }
  bool is_any() const { return any_.has_value(); }
  // A tensor without the key that the operator only reads.
  bool IsOther(const at::Tensor& tensor) const {
    return std::find(others_.begin(), others_.end(), tensor.unsafeGetTensorImpl()) != others_.end();
  }

 private:
  bool is_mixed_ = false, writes_host_ = false, writes_several_ = false, has_last_ = false;
  std::optional<c10::Device> any_, written_, weight_, largest_;
  int64_t weight_bytes_ = -1, largest_bytes_ = -1;
  c10::SmallVector<const c10::TensorImpl*, 4> others_;
};

void Fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::vector<c10::Argument>& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Choice choice;
  bool is_view = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    is_view |= alias != nullptr && !alias->isWrite();
    VisitTensors((*stack)[first + i], [&](const at::Tensor& tensor) {
      choice.See(tensor, alias != nullptr && alias->isWrite());
    });
  }
  const std::string& name = schema.name();
  const bool is_own = BeginsWith(name, "aten::");
  // Its parts choose by themselves.
  const bool is_apart =
      is_own ? TakesListsApart(name)
             : op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (choice.has_weight()) last_device = choice.device();
  c10::SmallVector<const c10::StorageImpl*, 4> copies;
  if (choice.is_mixed() && choice.can_move() && !is_view && !is_apart && !IsLeftAlone(name)) {
    const c10::Device device = choice.device();
    const c10::impl::ExcludeDispatchKeyGuard not_again(kKey);
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack)[first + i];
      bool is_away = false;
      VisitTensors(value, [&](const at::Tensor& tensor) {
        is_away |= IsOnGpu(tensor) && tensor.device() != device;
      });
      if (!is_away) continue;
      value = WithTensors(value, [&](const at::Tensor& tensor) {
        if (!IsOnGpu(tensor) || tensor.device() == device) return tensor;
        at::Tensor copy = TheCopies().On(tensor, device);
        copies.push_back(StorageOf(copy));
        return copy;
      });
    }
  }
  {
    // What LibTorch's own operators are made of has its tensors on one device now.
    std::optional<c10::impl::ExcludeDispatchKeyGuard> not_again;
    if (is_own && !is_apart) not_again.emplace(kKey);
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  }
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - std::min(results, stack->size()); i < stack->size(); ++i) {
    VisitTensors((*stack)[i], [&](const at::Tensor& result) {
      if (!IsOnGpu(result)) return;
      if (std::find(copies.begin(), copies.end(), StorageOf(result)) != copies.end()) {
        TheCopies().Forget(StorageOf(result));
      }
      // Another thread may be using what comes back as it was.
      if (!choice.IsOther(result)) Mark(result);
    });
  }
}

}  // namespace

DividedModel::DividedModel(const std::vector<at::Tensor>& parameters,
                           const std::vector<at::Tensor>& buffers) {
  SetFallbackOfTensors(&Fallback);
  for (const at::Tensor& parameter : parameters) {
    Mark(parameter);
    TheWeights().Add(parameter);
    storages_.push_back(StorageOf(parameter));
  }
  for (const at::Tensor& buffer : buffers) Mark(buffer);
}

DividedModel::~DividedModel() {
  for (const void* const storage : storages_) TheWeights().Remove(storage);
  TheCopies().Clear();
}

bool MovesOperators(const at::Tensor& tensor) { return tensor.key_set().has(kKey); }

DeviceCrossings CrossingsSoFar() { return TheCopies().crossings(); }

}  // namespace muster
