#include "worker/train/activation_store.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <string>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty_strided.h"
#include "absl/strings/str_cat.h"
#include "c10/core/TensorImpl.h"
#include "c10/core/UndefinedTensorImpl.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// Smaller tensors are not worth a transfer; also the minimum for direct I/O.
constexpr uint64_t kLeastBytes = 4096;
// The alignment of LibTorch's allocations. Tensors with another alignment might take a different
// code path in kernels.
constexpr uintptr_t kTensorAlignment = 64;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

std::string WhatOf(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

}  // namespace

// What parked tensors need until the last of them is gone, even after the store's end.
struct ActivationStore::Shared {
  explicit Shared(std::unique_ptr<PartStore> file) : file(std::move(file)) {}

  // Returns a place of `bytes` bytes: the first free one, or a new one. Throws if there is none.
  uint64_t TakePlace(uint64_t bytes, uint64_t* size) {
    bytes = (bytes + kLeastBytes - 1) / kLeastBytes * kLeastBytes;
    *size = bytes;
    {
      MutexLock lock(&mu);
      for (auto at = free_places.begin(); at != free_places.end(); ++at) {
        if (at->second < bytes) continue;
        const auto [place, room] = *at;
        free_places.erase(at);
        if (room > bytes) free_places.emplace(place + bytes, room - bytes);
        return place;
      }
    }
    // Called only by the store's thread.
    const uint64_t place = file->Reserve(bytes);
    MutexLock lock(&mu);
    reserved += bytes;
    return place;
  }
  // Joins the place to its free neighbours, so that inputs of other sizes find room in the next
  // pass: after a backward pass the whole file is one place.
  void GiveBack(uint64_t place, uint64_t size) {
    MutexLock lock(&mu);
    auto after = free_places.lower_bound(place);
    if (after != free_places.end() && after->first == place + size) {
      size += after->second;
      after = free_places.erase(after);
    }
    if (after != free_places.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == place) {
        before->second += size;
        return;
      }
    }
    free_places.emplace(place, size);
  }

  const std::unique_ptr<PartStore> file;
  mutable Mutex mu;
  std::map<uint64_t, uint64_t> free_places ABSL_GUARDED_BY(mu);  // place to size
  uint64_t reserved ABSL_GUARDED_BY(mu) = 0;
};

class ActivationStore::Parked {
 public:
  Parked(std::shared_ptr<Shared> shared, const at::Tensor& tensor)
      : shared(std::move(shared)),
        original(tensor.getIntrusivePtr()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        options(tensor.options().requires_grad(false)),
        bytes(tensor.nbytes()),
        version(tensor.is_inference() ? 0 : tensor._version()) {}
  ~Parked() {
    if (has_place) shared->GiveBack(place, place_size);
  }
  Parked(const Parked&) = delete;
  Parked& operator=(const Parked&) = delete;

  // Whether `tensor`, from which this was made, still has the same values.
  bool IsOf(const at::Tensor& tensor) const {
    return !original.expired() && !tensor.is_inference() && tensor._version() == version;
  }

  const std::shared_ptr<Shared> shared;
  const WeakTensor original;
  const std::vector<int64_t> sizes, strides;
  const at::TensorOptions options;
  const uint64_t bytes;
  const int64_t version;
  // Guarded by the store's lock, except for what its thread alone touches while `queued`.
  at::Tensor memory;  // a copy until it is written; without a file, permanently
  std::shared_ptr<DeviceWindows::Ticket> left;  // for a device: reached when `memory` has the
                                                // values; set once
  bool queued = false;
  bool has_place = false;
  uint64_t place = 0, place_size = 0;
  at::Tensor read;                               // read ahead, until it is asked for
  std::unique_ptr<DeviceWindows::Window> there;  // the same, on its device
  bool wanted = true;                            // false: the tensor being read is no longer needed
  std::string error;
};

ActivationStore::ActivationStore(std::unique_ptr<PartStore> file)
    : shared_(std::make_shared<Shared>(std::move(file))) {}

ActivationStore::~ActivationStore() {
  std::thread thread;
  {
    MutexLock lock(&mu_);
    stop_ = true;
    thread = std::move(thread_);
    changed_.SignalAll();
  }
  if (thread.joinable()) thread.join();
}

uint64_t ActivationStore::NewGroup() {
  MutexLock lock(&mu_);
  return next_group_++;
}

std::shared_ptr<ActivationStore::Parked> ActivationStore::Park(const at::Tensor& tensor,
                                                               uint64_t group) {
  if ((tensor.is_cpu() && shared_->file == nullptr) || !tensor.is_floating_point() ||
      tensor.layout() != at::kStrided || tensor.nbytes() < kLeastBytes ||
      !tensor.is_non_overlapping_and_dense() || tensor.is_neg()) {
    return nullptr;
  }
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kTensorAlignment != 0) return nullptr;
  {
    MutexLock lock(&mu_);
    const auto known = by_tensor_.find(tensor.unsafeGetTensorImpl());
    if (known != by_tensor_.end()) {
      const std::shared_ptr<Parked> parked = known->second.lock();
      // Another tensor may have been allocated at the same address.
      if (parked != nullptr && parked->IsOf(tensor)) return parked;
    }
    // Reserve the bytes before the copy is made.
    if (shared_->file != nullptr) {
      while (pending_bytes_ > 0 && pending_bytes_ + tensor.nbytes() > kPendingBytes) {
        changed_.Wait(&mu_);
      }
      pending_bytes_ += tensor.nbytes();
    }
  }
  try {
    std::shared_ptr<Parked> parked = Copy(tensor, group);
    MutexLock lock(&mu_);
    by_tensor_[tensor.unsafeGetTensorImpl()] = parked;
    groups_[group].push_back(parked);
    ForgetWhatIsGone();
    if (shared_->file != nullptr) Enqueue(parked);
    return parked;
  } catch (...) {  // no memory, or no thread
    MutexLock lock(&mu_);
    if (shared_->file != nullptr) pending_bytes_ -= tensor.nbytes();
    changed_.SignalAll();
    throw;
  }
}

std::shared_ptr<ActivationStore::Parked> ActivationStore::Copy(const at::Tensor& tensor,
                                                               uint64_t group) {
  auto parked = std::make_shared<Parked>(shared_, tensor);
  const at::TensorOptions host = at::TensorOptions().dtype(tensor.scalar_type());
  // A copy, because the program may write to the tensor while the thread or the device reads it.
  if (tensor.is_cpu()) {
    parked->memory = at::empty_strided(parked->sizes, parked->strides, host);
    parked->memory.copy_(tensor.detach());
    return parked;
  }
  parked->memory =
      at::empty_strided(parked->sizes, parked->strides, host.pinned_memory(tensor.is_cuda()));
  std::deque<Leaving> gone;
  MutexLock lock(&mu_);
  // The stream waits for the copies of the groups before the last one, whose memory is then free.
  while (!leaving_.empty() && leaving_.front().group + 1 < group) {
    gone.push_back(std::move(leaving_.front()));
    leaving_.pop_front();
  }
  gone.clear();
  const at::NoGradGuard no_grad;
  at::Tensor there;
  try {
    there = at::empty_strided(parked->sizes, parked->strides, parked->options);
    there.copy_(tensor.detach());
  } catch (const c10::OutOfMemoryError&) {
    // Then copy from the tensor itself; the stream's next operations wait for that.
    leaving_.clear();
    there = tensor.detach();
  }
  DeviceWindows& copies = CopiesOf(tensor.device());
  std::unique_ptr<DeviceWindows::Window> window = copies.Fetch(there, at::Tensor());
  parked->left = copies.Return(*window, parked->memory);
  if (!there.is_alias_of(tensor)) {
    leaving_.push_back({.group = group, .window = std::move(window)});
  }
  return parked;
}

DeviceWindows& ActivationStore::CopiesOf(const c10::Device& device) {
  for (const auto& copies : copies_) {
    if (copies->device() == device) return *copies;
  }
  return *copies_.emplace_back(std::make_unique<DeviceWindows>(device));
}

std::unique_ptr<DeviceWindows::Window> ActivationStore::Fetch(const Parked& parked,
                                                              const at::Tensor& values) {
  DeviceWindows& copies = CopiesOf(parked.options.device());
  if (parked.left != nullptr) copies.Follow(*parked.left);
  return copies.Fetch(at::empty_strided(parked.sizes, parked.strides, parked.options), values);
}

void ActivationStore::ForgetWhatIsGone() {
  if (groups_.size() + by_tensor_.size() < forget_at_) return;
  for (auto& [group, list] : groups_) {
    std::erase_if(list, [](const auto& parked) { return parked.expired(); });
  }
  std::erase_if(groups_, [](const auto& group) { return group.second.empty(); });
  std::erase_if(by_tensor_, [](const auto& entry) { return entry.second.expired(); });
  // Doubling the limit keeps the cost for each tensor small.
  forget_at_ = std::max(kLeastRecords, 2 * (groups_.size() + by_tensor_.size()));
}

void ActivationStore::Enqueue(std::shared_ptr<Parked> parked) {
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  parked->queued = true;
  queue_.push_back(std::move(parked));
  changed_.SignalAll();
}

void ActivationStore::Run() {
  MutexLock lock(&mu_);
  while (true) {
    while (queue_.empty() && !stop_) changed_.Wait(&mu_);
    if (stop_) return;
    std::shared_ptr<Parked> parked = queue_.front();
    const bool writes = !parked->has_place;
    at::Tensor done;
    std::string failure;
    mu_.Unlock();
    // Its events may end with it, which restores the thread's previous device: for that CUDA would
    // allocate memory on another device.
    if (const c10::Device device = parked->options.device(); !device.is_cpu()) {
      c10::impl::VirtualGuardImpl(device.type()).uncheckedSetDevice(device);
    }
    // Only the queue and this thread hold it: the graph is gone. (What is not written stays in
    // memory.)
    const bool forgotten = parked.use_count() <= 2;
    if (!forgotten) {
      try {
        if (writes) {
          parked->place = shared_->TakePlace(parked->bytes, &parked->place_size);
          parked->has_place = true;
          if (parked->left != nullptr) parked->left->Wait();
          shared_->file->Write(parked->place, parked->memory.const_data_ptr(), parked->bytes);
        } else {
          done = at::empty_strided(parked->sizes, parked->strides,
                                   at::TensorOptions()
                                       .dtype(parked->options.dtype())
                                       .pinned_memory(parked->options.device().is_cuda()));
          shared_->file->Read(parked->place, done.data_ptr(), parked->bytes);
        }
      } catch (const std::exception& error) {
        failure = absl::StrCat(
            "activation_checkpoint: the input of a block, ", parked->bytes,
            " bytes that were offloaded, could not be ", writes ? "written" : "read",
            "; free space on the disk, or switch the offload of activations off. ", WhatOf(error));
      }
    }
    at::Tensor gone;
    mu_.Lock();
    queue_.pop_front();
    parked->queued = false;
    if (!failure.empty()) parked->error = std::move(failure);
    if (writes) {
      pending_bytes_ -= parked->bytes;
      if (!forgotten) {
        gone = std::move(parked->memory);
        parked->memory = at::Tensor();
      }
    } else if (parked->wanted) {
      parked->read = std::move(done);
    }
    frees_ = true;
    changed_.SignalAll();
    mu_.Unlock();
    gone = at::Tensor();
    done = at::Tensor();
    parked.reset();
    mu_.Lock();
    frees_ = false;
    changed_.SignalAll();
  }
}

at::Tensor ActivationStore::Get(const std::shared_ptr<Parked>& parked) {
  const bool on_device = !parked->options.device().is_cpu();
  std::unique_ptr<DeviceWindows::Window> there;
  MutexLock lock(&mu_);
  if (on_device && parked->there != nullptr) {
    there = std::move(parked->there);
    DeviceWindows& copies = CopiesOf(parked->options.device());
    if (there->stream() == copies.Current()) {
      copies.Use(*there);
      return there->tensor();
    }
    // Its memory belongs to another stream, which would have to wait for this one.
    there.reset();
  }
  // The values are still in memory if they are not written yet.
  at::Tensor values = parked->memory;
  while (!values.defined()) {
    TORCH_CHECK(parked->error.empty(), parked->error);
    values = std::exchange(parked->read, at::Tensor());
    if (values.defined()) break;
    // Another thread may take the values when they arrive, or drop them (ReadAhead).
    parked->wanted = true;
    if (!parked->queued) Enqueue(parked);
    changed_.Wait(&mu_);
    values = parked->memory;
  }
  if (!on_device) return values;
  there = Fetch(*parked, values);
  CopiesOf(parked->options.device()).Use(*there);
  return there->tensor();
}

void ActivationStore::ReadAhead(uint64_t group) {
  std::vector<at::Tensor> dropped;
  std::deque<Leaving> gone;
  MutexLock lock(&mu_);
  std::swap(gone, leaving_);
  gone.clear();
  std::vector<std::shared_ptr<Parked>> before;
  for (auto at = groups_.lower_bound(group); at != groups_.begin();) {
    --at;
    for (const std::weak_ptr<Parked>& weak : at->second) {
      if (std::shared_ptr<Parked> parked = weak.lock()) before.push_back(std::move(parked));
    }
    if (!before.empty()) break;
    at = groups_.erase(at);
  }
  // If a pass does not use what was read ahead for it, at most one group is left behind.
  for (const std::weak_ptr<Parked>& weak : ahead_) {
    const std::shared_ptr<Parked> parked = weak.lock();
    if (parked == nullptr || std::find(before.begin(), before.end(), parked) != before.end()) {
      continue;
    }
    parked->wanted = false;
    dropped.push_back(std::move(parked->read));
    parked->read = at::Tensor();
    parked->there.reset();
  }
  ahead_.clear();
  for (const std::shared_ptr<Parked>& parked : before) {
    ahead_.push_back(parked);
    if (!parked->options.device().is_cpu() && parked->memory.defined() &&
        parked->there == nullptr) {
      try {
        parked->there = Fetch(*parked, parked->memory);
      } catch (const c10::OutOfMemoryError&) {
        // It is fetched when it is asked for, once the group after it is gone.
      }
    }
    if (parked->queued || !parked->error.empty() || !parked->has_place) continue;
    if (parked->memory.defined() || parked->read.defined()) continue;
    parked->wanted = true;
    Enqueue(parked);
  }
}

void ActivationStore::WaitUntilIdle() {
  MutexLock lock(&mu_);
  while (!queue_.empty() || frees_) changed_.Wait(&mu_);
}

uint64_t ActivationStore::bytes_reserved() const {
  MutexLock lock(&shared_->mu);
  return shared_->reserved;
}

size_t ActivationStore::records() const {
  MutexLock lock(&mu_);
  return groups_.size() + by_tensor_.size();
}

int64_t ActivationStore::tensors_in_memory() const {
  MutexLock lock(&mu_);
  int64_t count = 0;
  for (const auto& [group, list] : groups_) {
    for (const std::weak_ptr<Parked>& weak : list) {
      const std::shared_ptr<Parked> parked = weak.lock();
      if (parked != nullptr && (parked->memory.defined() || parked->read.defined())) ++count;
    }
  }
  return count;
}

}  // namespace muster
