#include "worker/bigmodel/divided_model.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ATen/core/LegacyTypeDispatch.h"
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
#include "worker/parallel/running_statistics.h"
#include "worker/train/thread_states.h"

namespace muster {
namespace {

constexpr c10::DispatchKey kKey = kDeferredInitKey;

// Operators that accept tensors of several devices, do not look at contents, or return a view of
// each tensor without a schema that says so. (meshgrid() needs one device, and gets copies.)
constexpr const char* kLeftAlone[] = {
    "aten::copy_",
    "aten::set_",
    "aten::set_data",
    "aten::type_as",
    "aten::resize_as_",
    "aten::is_set_to",
    "aten::is_same_size",
    "aten::result_type",
    "aten::_has_compatible_shallow_copy_type",
    "aten::broadcast_tensors",
    "aten::align_tensors",
    "aten::align_as",
    "aten::atleast_1d",
    "aten::atleast_2d",
    "aten::atleast_3d",
};

bool BeginsWith(const std::string& text, const char* prefix) {
  return std::strncmp(text.c_str(), prefix, std::strlen(prefix)) == 0;
}

// Whether the operator takes one tensor of each list at a time, each on its own device, or is a
// whole backward pass, which reruns forward passes of checkpointed blocks.
bool IsManyOperators(const std::string& op) {
  return BeginsWith(op, "aten::_foreach_") || BeginsWith(op, "aten::_amp_foreach_") ||
         op == "aten::_backward";
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

// Gives access to a tensor's keys, because LibTorch adds a key only when a tensor is made.
struct Keys : c10::TensorImpl {
  static void Add(c10::TensorImpl& impl) {
    constexpr c10::DispatchKeySet c10::TensorImpl::*keys = &Keys::key_set_;
    impl.*keys = (impl.*keys).add(kKey);
  }
};

void Mark(const at::Tensor& tensor) {
  if (tensor.defined() && !MovesOperators(tensor)) Keys::Add(*tensor.unsafeGetTensorImpl());
}

// The memory of parameters. While it is recorded here, its address is not given to another storage.
class Weights {
 public:
  // Adds a tensor that has memory.
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

// Returns `tensor` without the repetitions of expand().
at::Tensor Once(const at::Tensor& tensor) {
  at::Tensor once = tensor;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) == 0 && tensor.size(i) > 1) once = once.narrow(i, 0, 1);
  }
  return once;
}

// Returns the bytes of a tensor, also if it has no memory of its own, like sparse ones.
uint64_t BytesOf(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

// Copies of tensors on another GPU, for later operators of the same stay (below) that take them
// there. They are not kept for longer, because programs and graphs of a GPU also write memory in
// ways that change no version, especially between two passes.
class SharedCopies {
 public:
  // `stay`: that of the calling thread.
  at::Tensor On(const at::Tensor& tensor, const c10::Device& device, uint64_t stay) {
    const bool needs_gradient = c10::GradMode::is_enabled() && tensor.requires_grad();
    if (needs_gradient || tensor.layout() != at::kStrided || !tensor.has_storage()) {
      Count(BytesOf(tensor));
      return CopyTo(tensor, device);
    }
    const at::Tensor once = Once(tensor);
    const auto copy = [&] {
      Count(BytesOf(once));
      const at::Tensor there = CopyTo(once, device);
      return once.is_same(tensor) ? there : there.expand(tensor.sizes());
    };
    // The contents of paged storages change without a version.
    const bool is_shared =
        !tensor.is_inference() && !IsPaged(tensor) && BytesOf(once) <= kSharedCopyBytes;
    if (!is_shared) return copy();
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    std::vector<Entry> gone;  // freed without the lock
    if (at::Tensor found = Find(tensor, stay, stream, &gone); found.defined()) return found;
    Entry entry = {.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                   .storage = tensor.storage().getWeakStorageImpl(),
                   .data = tensor.storage().data(),
                   .sizes = tensor.sizes().vec(),
                   .strides = tensor.strides().vec(),
                   .offset = tensor.storage_offset(),
                   .type = tensor.scalar_type(),
                   .version = static_cast<int64_t>(tensor._version()),
                   .stay = stay,
                   .stream = stream,
                   .copy = {}};
    {
      // The next user may be a pass with gradients.
      const c10::InferenceMode off(false);
      const at::NoGradGuard no_grad;
      entry.copy = copy();
    }
    at::Tensor there = entry.copy;
    Add(std::move(entry), &gone);
    return there;
  }

  // Returns a copy for an operator that writes to it.
  at::Tensor OwnOn(const at::Tensor& tensor, const c10::Device& device) {
    Count(BytesOf(tensor));
    return CopyTo(tensor.detach(), device);
  }

  // Forgets copies of a storage whose contents have changed without a version.
  void ForgetSource(const c10::StorageImpl* storage) {
    std::vector<Entry> gone;
    MutexLock lock(&mu_);
    Drop([&](const Entry& entry) { return entry.storage._unsafe_get_target() == storage; }, &gone);
  }

  // Forgets a copy whose memory a result exposes, because the program may write to it from now on.
  void Forget(const c10::StorageImpl* storage) {
    std::vector<Entry> gone;
    MutexLock lock(&mu_);
    Drop([&](const Entry& entry) { return StorageOf(entry.copy) == storage; }, &gone);
  }

  void EndStay(uint64_t stay) {
    std::vector<Entry> gone;
    MutexLock lock(&mu_);
    Drop([&](const Entry& entry) { return entry.stay == stay; }, &gone);
  }

  // Shared copies are freed with the model, and none are made while there is no model.
  void AddModel() {
    MutexLock lock(&mu_);
    ++models_;
  }
  void RemoveModel() {
    std::vector<Entry> gone;
    MutexLock lock(&mu_);
    --models_;
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
    // Compared, because set_data() and in-place views change a tensor without its version.
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType type;
    int64_t version;
    uint64_t stay;
    c10::Stream stream;  // the stream on which the copy was made
    at::Tensor copy;

    bool IsOf(const at::Tensor& now) const {
      return storage._unsafe_get_target() == StorageOf(now) && data == now.storage().data() &&
             now.sizes() == at::IntArrayRef(sizes) && now.strides() == at::IntArrayRef(strides) &&
             offset == now.storage_offset() && type == now.scalar_type() &&
             version == static_cast<int64_t>(now._version());
    }
  };

  void Count(uint64_t bytes) {
    MutexLock lock(&mu_);
    ++crossings_.copies;
    crossings_.copied_bytes += bytes;
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

  at::Tensor Find(const at::Tensor& tensor, uint64_t stay, const c10::Stream& stream,
                  std::vector<Entry>* gone) {
    MutexLock lock(&mu_);
    Drop([](const Entry& entry) { return entry.tensor.expired() || entry.storage.expired(); },
         gone);
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = entries_[i];
      if (entry.tensor._unsafe_get_target() != tensor.unsafeGetTensorImpl() || entry.stay != stay ||
          entry.stream != stream) {
        continue;
      }
      if (!entry.IsOf(tensor)) {
        gone->push_back(std::move(entries_[i]));
        entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(i));
        break;
      }
      ++crossings_.shared;
      at::Tensor copy = entry.copy;
      // The most recently used entries are last.
      std::rotate(entries_.begin() + static_cast<ptrdiff_t>(i),
                  entries_.begin() + static_cast<ptrdiff_t>(i) + 1, entries_.end());
      return copy;
    }
    return {};
  }

  void Add(Entry entry, std::vector<Entry>* gone) {
    MutexLock lock(&mu_);
    // Results of a destroyed model still move.
    if (models_ == 0) return;
    entries_.push_back(std::move(entry));
    uint64_t bytes = 0;
    for (const Entry& each : entries_) bytes += each.copy.storage().nbytes();
    size_t superfluous = 0;
    while (entries_.size() - superfluous > kSharedCopies || bytes > kSharedCopyBytes) {
      bytes -= entries_[superfluous++].copy.storage().nbytes();
    }
    const auto end = entries_.begin() + static_cast<ptrdiff_t>(superfluous);
    gone->insert(gone->end(), std::make_move_iterator(entries_.begin()),
                 std::make_move_iterator(end));
    entries_.erase(entries_.begin(), end);
  }

  Mutex mu_;
  int models_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mu_);
  DeviceCrossings crossings_ ABSL_GUARDED_BY(mu_);
};

SharedCopies& TheCopies() {
  static auto& copies = *new SharedCopies;
  return copies;
}

// The period in which a thread computes on one GPU: from the first operator with a weight there up
// to the next one with a weight of another GPU, or with a weight that it has used already. So no
// stay extends into the next pass, whatever part of a model runs.
class Stay {
 public:
  Stay() = default;
  ~Stay() { End(); }
  Stay(const Stay&) = delete;
  Stay& operator=(const Stay&) = delete;

  // The device where the last operator with a weight ran.
  const std::optional<c10::Device>& device() const { return device_; }
  // The id of the stay, for a copy that is to be shared.
  uint64_t id() {
    has_copies_ = true;
    return id_;
  }

  // Notes that the next operator takes `weight`, and runs there. A view of a weight is not a use.
  void Use(const void* weight, const c10::Device& device, bool is_view) {
    const bool is_again = !is_view && !weights_.insert(weight).second;
    if (!is_again && device_ == device) return;
    Begin(device);
    if (!is_view) weights_.insert(weight);
  }

  void Begin(const std::optional<c10::Device>& device) {
    End();
    weights_.clear();
    device_ = device;
  }

 private:
  void End() {
    if (has_copies_) TheCopies().EndStay(id_);
    has_copies_ = false;
    id_ = NextId();
  }
  static uint64_t NextId() {
    static std::atomic<uint64_t> next = 0;
    return ++next;
  }

  uint64_t id_ = NextId();
  bool has_copies_ = false;
  std::optional<c10::Device> device_;
  std::unordered_set<const void*> weights_;
};

thread_local Stay this_stay;

// For the second run of a checkpointed function: its operators without weights follow the preceding
// weights, as in the first run. Shared copies are not taken along.
int64_t DeviceOfStay() {
  const std::optional<c10::Device>& device = this_stay.device();
  if (!device.has_value()) return -1;
  return static_cast<int64_t>(device->type()) << 8 | device->index();
}
void BeginStay(int64_t device) {
  if (device < 0) return this_stay.Begin(std::nullopt);
  this_stay.Begin(c10::Device(static_cast<c10::DeviceType>(device >> 8),
                              static_cast<c10::DeviceIndex>(device & 0xff)));
}

// Chooses the device on which an operator runs, by the tensors that it takes.
class Choice {
 public:
  void See(const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return;
    if (!IsOnGpu(tensor)) {
      writes_host_ |= write;
      return;
    }
    const bool is_marked = MovesOperators(tensor);
    if (!is_marked && !write) others_.emplace_back(tensor.getIntrusivePtr());
    const c10::Device device = tensor.device();
    is_mixed_ |= any_.has_value() && *any_ != device;
    any_ = device;
    if (write) {
      writes_several_ |= written_.has_value() && *written_ != device;
      written_ = device;
    }
    const auto bytes = static_cast<int64_t>(BytesOf(tensor));
    if (is_marked && bytes > weight_bytes_ && TheWeights().Contains(StorageOf(tensor))) {
      weight_bytes_ = bytes;
      weight_ = device;
      weight_memory_ = StorageOf(tensor);
    }
    // A number does not determine the device.
    if (tensor.dim() == 0) return;
    has_last_ |= this_stay.device() == device;
    if (bytes > largest_bytes_) {
      largest_bytes_ = bytes;
      largest_ = device;
    }
  }

  // Notes a running statistic that the operator writes: if they are on several devices, the first
  // one counts, and the others get their values back.
  void SeeStatistic(const at::Tensor& tensor) {
    See(tensor, /*write=*/false);
    if (IsOnGpu(tensor) && !statistic_.has_value()) statistic_ = tensor.device();
  }

  bool is_mixed() const { return is_mixed_; }
  bool can_move() const { return !writes_host_ && !writes_several_; }
  // Null if it takes no weight.
  const void* weight() const { return weight_memory_; }
  // The device of an operator with a tensor on a GPU.
  c10::Device device() const {
    if (written_.has_value()) return *written_;
    if (statistic_.has_value()) return *statistic_;
    if (weight_.has_value()) return *weight_;
    if (has_last_) return *this_stay.device();
    return largest_.value_or(*any_);
  }
  bool is_any() const { return any_.has_value(); }
  // Whether it is a tensor without the key that the operator only reads.
  bool IsOther(const at::Tensor& tensor) const {
    return std::any_of(others_.begin(), others_.end(), [&](const auto& other) {
      return other._unsafe_get_target() == tensor.unsafeGetTensorImpl();
    });
  }

 private:
  bool is_mixed_ = false, writes_host_ = false, writes_several_ = false, has_last_ = false;
  std::optional<c10::Device> any_, written_, statistic_, weight_, largest_;
  int64_t weight_bytes_ = -1, largest_bytes_ = -1;
  const void* weight_memory_ = nullptr;
  // Weak references, so that no result gets the address of a tensor that the operator has released.
  c10::SmallVector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>, 4> others_;
};

void Fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::vector<c10::Argument>& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Choice choice;
  bool is_view = false;
  c10::SmallVector<size_t, 2> statistics;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    is_view |= alias != nullptr && !alias->isWrite();
    if (IsUndeclaredStatistic(arguments[i]) && (*stack)[first + i].isTensor()) {
      statistics.push_back(i);
      continue;
    }
    VisitTensors((*stack)[first + i], [&](const at::Tensor& tensor) {
      choice.See(tensor, alias != nullptr && alias->isWrite());
    });
  }
  const bool writes_statistics =
      !statistics.empty() && WritesUndeclaredStatistics(schema, stack->data() + first);
  for (const size_t i : statistics) {
    const at::Tensor& tensor = (*stack)[first + i].toTensor();
    if (writes_statistics) {
      choice.SeeStatistic(tensor);
    } else {
      choice.See(tensor, /*write=*/false);
    }
  }
  const std::string& name = schema.name();
  const bool is_own = BeginsWith(name, "aten::");
  // The parts of such an operator choose their devices themselves.
  const bool is_apart =
      is_own ? IsManyOperators(name)
             : op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (choice.weight() != nullptr) this_stay.Use(choice.weight(), choice.device(), is_view);
  c10::SmallVector<const c10::StorageImpl*, 4> copies;
  // Statistics that the operator writes to copies on another device.
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> written_back;
  if (writes_statistics) {
    for (const size_t i : statistics) {
      const at::Tensor& tensor = (*stack)[first + i].toTensor();
      if (tensor.defined()) TheCopies().ForgetSource(StorageOf(tensor));
    }
  }
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
      if (writes_statistics && IsUndeclaredStatistic(arguments[i])) {
        const at::Tensor original = value.toTensor();
        written_back.emplace_back(original, TheCopies().OwnOn(original, device));
        value = written_back.back().second;
        continue;
      }
      value = WithTensors(value, [&](const at::Tensor& tensor) {
        if (!IsOnGpu(tensor) || tensor.device() == device) return tensor;
        at::Tensor copy = TheCopies().On(tensor, device, this_stay.id());
        copies.push_back(StorageOf(copy));
        return copy;
      });
    }
  }
  {
    // The inner operators of LibTorch's own ones now have their tensors on one device.
    std::optional<c10::impl::ExcludeDispatchKeyGuard> not_again;
    if (is_own && !is_apart) not_again.emplace(kKey);
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  }
  if (!written_back.empty()) {
    // Copy like the operator does: no version counts it.
    const c10::impl::ExcludeDispatchKeyGuard not_again(kKey);
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& [original, copy] : written_back) original.copy_(copy, /*non_blocking=*/true);
  }
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - std::min(results, stack->size()); i < stack->size(); ++i) {
    VisitTensors((*stack)[i], [&](const at::Tensor& result) {
      if (!IsOnGpu(result)) return;
      if (std::find(copies.begin(), copies.end(), StorageOf(result)) != copies.end()) {
        TheCopies().Forget(StorageOf(result));
      }
      // A tensor that is returned unchanged may be in use by another thread.
      if (!choice.IsOther(result)) Mark(result);
    });
  }
}

}  // namespace

void DividedModel::Register() {
  SetFallbackOfTensors(&Fallback);
  static std::once_flag once;
  std::call_once(once, [] { AddThreadState({&DeviceOfStay, &BeginStay}); });
}

DividedModel::DividedModel() {
  Register();
  TheCopies().AddModel();
}

// Because the delegated constructor completes the object, an exception from here on runs the
// destructor.
DividedModel::DividedModel(const std::vector<at::Tensor>& parameters,
                           const std::vector<at::Tensor>& buffers)
    : DividedModel() {
  storages_.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    Mark(parameter);
    if (!parameter.defined() || !parameter.has_storage()) continue;
    TheWeights().Add(parameter);
    storages_.push_back(StorageOf(parameter));
  }
  for (const at::Tensor& buffer : buffers) Mark(buffer);
}

DividedModel::~DividedModel() {
  for (const void* const storage : storages_) TheWeights().Remove(storage);
  TheCopies().RemoveModel();
}

bool MovesOperators(const at::Tensor& tensor) { return tensor.key_set().has(kKey); }

DeviceCrossings CrossingsSoFar() { return TheCopies().crossings(); }

}  // namespace muster
