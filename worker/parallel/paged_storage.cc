#include "worker/parallel/paged_storage.h"

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "base/mutex.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/ScalarTypeToTypeMeta.h"
#include "c10/core/StorageImpl.h"
#include "c10/core/TensorImpl.h"
#include "c10/util/Exception.h"
#include "torch/library.h"
#include "worker/parallel/running_statistics.h"

namespace muster {

// Pages in use by one operator.
class Pins {
 public:
  Pins() = default;
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (Page* page : pages_) page->pins_.fetch_sub(1, std::memory_order_release);
  }

  void Add(Page* page) {
    page->pins_.fetch_add(1, std::memory_order_acq_rel);
    pages_.push_back(page);
  }

 private:
  std::vector<Page*> pages_;
};

namespace {

// The key is meant for tests of LibTorch itself, which do not run in one process with Muster: no
// other key above autograd is free (docs/decisions/0028).
constexpr c10::DispatchKey kPagedKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

class PageTable {
 public:
  void Add(const c10::StorageImpl* storage, Page* page) {
    MutexLock lock(&mu_);
    pages_[storage] = page;
  }
  void Remove(const c10::StorageImpl* storage) {
    MutexLock lock(&mu_);
    pages_.erase(storage);
  }
  Page* Find(const c10::StorageImpl* storage) {
    MutexLock lock(&mu_);
    const auto it = pages_.find(storage);
    return it == pages_.end() ? nullptr : it->second;
  }

 private:
  Mutex mu_;
  std::unordered_map<const c10::StorageImpl*, Page*> pages_ ABSL_GUARDED_BY(mu_);
};

PageTable& Table() {
  static auto& table = *new PageTable;
  return table;
}

struct Use {
  Page* page;
  bool write;
};

struct Taken {
  Page* page;
  at::Tensor tensor;
  bool write;
};

void AddUse(const at::Tensor& tensor, bool write, const char* op, std::vector<Use>* uses,
            std::vector<Taken>* taken) {
  if (!tensor.defined() || !IsPaged(tensor)) return;
  Page* const page = Table().Find(tensor.storage().unsafeGetStorageImpl());
  TORCH_CHECK(page != nullptr, op,
              ": a parameter of a sharded or offloaded model, or its gradient, is used after what "
              "holds its values is "
              "gone; keep the Accelerator (or save_model() before it ends), or the model that "
              "dispatch returned. Or it has been given other memory (torch::load(module), set_()): "
              "load weights before prepare() or with accelerator.load_weights(), or copy_() them "
              "inside accelerator.summon_full_params()");
  page->Allow(tensor, write, op);
  taken->push_back({page, tensor, write});
  for (Use& use : *uses) {
    if (use.page != page) continue;
    use.write |= write;
    return;
  }
  uses->push_back({page, write});
}

// Whether an operator only reads an argument that its schema allows it to write: a fused optimizer
// writes gradients only when it unscales them. Otherwise their page would be written back for
// nothing.
bool OnlyReads(const c10::FunctionSchema& schema, const std::string& argument,
               const c10::IValue* arguments) {
  if (argument != "grads" || schema.name().rfind("aten::_fused_", 0) != 0) return false;
  const std::optional<int> scale = schema.argumentIndexWithName("grad_scale");
  return scale.has_value() && arguments[*scale].isNone();
}

void Fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::vector<c10::Argument>& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  const char* const name = schema.name().c_str();
  std::vector<Use> uses;
  std::vector<Taken> taken;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    // A result that is an alias of the argument asks its page when it is used.
    if (alias != nullptr && !alias->isWrite()) continue;
    const bool write = alias != nullptr
                           ? !OnlyReads(schema, arguments[i].name(), stack->data() + first)
                           : IsUndeclaredStatistic(arguments[i]) &&
                                 WritesUndeclaredStatistics(schema, stack->data() + first);
    const c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      AddUse(value.toTensor(), write, name, &uses, &taken);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        AddUse(tensor, write, name, &uses, &taken);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor.has_value()) AddUse(*tensor, write, name, &uses, &taken);
      }
    }
  }
  // No page may be freed while another one is read, or before the operator has ended.
  Pins pins;
  for (const Use& use : uses) pins.Add(use.page);
  for (const Use& use : uses) use.page->Require(use.write, name);
  // Bringing the contents may have ended the permission.
  for (const Taken& one : taken) one.page->Allow(one.tensor, one.write, name);
  taken.clear();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey), stack);
}

void RegisterFallback() {
  static auto& library = *[] {
    auto* const all = new torch::Library(torch::Library::IMPL, "_", kPagedKey, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
    return all;
  }();
  // set_data() calls this operator to compare the kinds of two tensors, for which no contents are
  // needed. Without the fallthrough, a tensor that becomes a paged one would ask its page during
  // the page's construction.
  static auto& kinds = *[] {
    auto* const aten =
        new torch::Library(torch::Library::IMPL, "aten", kPagedKey, __FILE__, __LINE__);
    aten->impl("_has_compatible_shallow_copy_type", torch::CppFunction::makeFallthrough());
    return aten;
  }();
  (void)library;
  (void)kinds;
}

}  // namespace

PageRegistration::PageRegistration(at::Tensor flat, Page* page) : flat_(std::move(flat)) {
  RegisterFallback();
  Table().Add(flat_.storage().unsafeGetStorageImpl(), page);
}

PageRegistration::~PageRegistration() { Table().Remove(flat_.storage().unsafeGetStorageImpl()); }

at::Tensor PagedView(const at::Tensor& flat, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset) {
  return PagedView(flat, flat.scalar_type(), sizes, strides, offset);
}

at::Tensor PagedView(const at::Tensor& flat, at::ScalarType type, at::IntArrayRef sizes,
                     at::IntArrayRef strides, int64_t offset) {
  c10::Storage storage = flat.storage();
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage),
                                                   flat.key_set() | c10::DispatchKeySet(kPagedKey),
                                                   c10::scalarTypeToTypeMeta(type));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(impl));
}

bool IsPaged(const at::Tensor& tensor) { return tensor.key_set().has(kPagedKey); }

bool IsOffloadedWeight(const at::Tensor& tensor) {
  if (!IsPaged(tensor)) return false;
  const Page* const page = Table().Find(tensor.storage().unsafeGetStorageImpl());
  return page != nullptr && page->holds_offloaded_weights();
}

std::vector<std::vector<size_t>> GroupsByPage(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<size_t>> groups;
  std::unordered_map<const void*, size_t> of_page;  // null: no page
  const void* last = nullptr;
  size_t group_of_last = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const void* const page =
        IsPaged(tensors[i]) ? tensors[i].storage().unsafeGetStorageImpl() : nullptr;
    // The usual case; always, for an ordinary model.
    if (i == 0 || page != last) {
      const auto [group, is_new] = of_page.try_emplace(page, groups.size());
      if (is_new) groups.emplace_back();
      last = page;
      group_of_last = group->second;
    }
    groups[group_of_last].push_back(i);
  }
  return groups;
}

void FreeMemory(const at::Tensor& flat) {
  c10::StorageImpl* const storage = flat.storage().unsafeGetStorageImpl();
  // The storage keeps its nominal size, which views are checked against.
  storage->set_data_ptr_noswap(storage->allocator()->allocate(0));
}

void AllocateMemory(const at::Tensor& flat) {
  c10::StorageImpl* const storage = flat.storage().unsafeGetStorageImpl();
  // An allocator for GPUs allocates on the thread's current GPU.
  const c10::DeviceGuard guard(flat.device());
  storage->set_data_ptr_noswap(storage->allocator()->allocate(storage->nbytes()));
}

void TakeMemory(const at::Tensor& flat, const at::Tensor& from) {
  c10::StorageImpl* const source = from.storage().unsafeGetStorageImpl();
  TORCH_CHECK(source->nbytes() == flat.storage().nbytes(), "TakeMemory: ", source->nbytes(),
              " bytes for a tensor of ", flat.storage().nbytes());
  flat.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      source->set_data_ptr(c10::DataPtr(nullptr, from.device())));
}

}  // namespace muster
