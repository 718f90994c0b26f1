#include "worker/checkpoint/device_copies.h"

#include <exception>
#include <map>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace muster {
namespace {

void QueueOnCurrentStream(char* to, const at::Tensor& from) {
  at::from_blob(to, from.sizes(), at::TensorOptions().dtype(from.scalar_type()))
      .copy_(from, /*non_blocking=*/true);
}

absl::Status Failed(const std::exception& error) {
  return absl::InternalError(
      absl::StrCat("copies from a device for a checkpoint failed: ", error.what()));
}

}  // namespace

// One stream per device: those of a pool are few, and the work of other libraries would wait in
// them.
c10::Stream CopyStream(const c10::Device& device) {
  struct Streams {
    Mutex mu;
    std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, c10::Stream> of ABSL_GUARDED_BY(mu);
  };
  static auto* const streams = new Streams();
  const auto key = std::make_pair(device.type(), device.index());
  MutexLock lock(&streams->mu);
  const auto found = streams->of.find(key);
  if (found != streams->of.end()) return found->second;
  const c10::Stream made = c10::impl::VirtualGuardImpl(device.type())
                               .getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  streams->of.emplace(key, made);
  return made;
}

absl::Status WasChangedDuringItsCopy(const std::string& name) {
  return absl::FailedPreconditionError(absl::StrCat(
      name,
      " was changed by the program after save_state() and before the optimizer's next step, while "
      "its copy was still being made; set options.checkpoint.lazy = false, or change it right "
      "after the step"));
}

bool DeviceCopies::Takes(const at::Tensor& tensor) {
  return !tensor.is_cpu() && !tensor.is_meta() && tensor.layout() == at::kStrided &&
         tensor.numel() > 0 && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_inference();
}

DeviceCopies::DeviceCopies() : DeviceCopies(QueueOnCurrentStream) {}

DeviceCopies::DeviceCopies(QueueCopy queue) : queue_(std::move(queue)) {}

DeviceCopies::~DeviceCopies() {
  {
    MutexLock lock(&mu_);
    // Copies that have not been queued yet are not needed.
    if (next_ == 0 || done_) return;
  }
  Wait();
}

size_t DeviceCopies::NumberOfStream(const c10::Device& device) {
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].device == device) return i;
  }
  streams_.push_back({.device = device, .stream = CopyStream(device), .copied = nullptr});
  return streams_.size() - 1;
}

void DeviceCopies::Add(std::string name, at::Tensor source, size_t offset) {
  Copied copied{.name = std::move(name),
                // Keeps the memory, and counts the changes.
                .source = source.detach(),
                .offset = offset,
                .version = 0,
                .stream = NumberOfStream(source.device())};
  copied.version = copied.source._version();
  tensors_.push_back(std::move(copied));
}

void DeviceCopies::Start(char* base) {
  base_ = base;
  count_ = tensors_.size();
  for (const DeviceStream& on : streams_) {
    c10::Event given(on.device.type());
    given.record(c10::impl::VirtualGuardImpl(on.device.type()).getStream(on.device));
    given.block(on.stream);
  }
}

void DeviceCopies::SetDeviceOfThisThread() const {
  if (streams_.empty()) return;
  const c10::Device& device = streams_.front().device;
  c10::impl::VirtualGuardImpl(device.type()).uncheckedSetDevice(device);
}

void DeviceCopies::Queue() {
  const at::NoGradGuard no_grad;
  size_t mine = 0;
  absl::Status failed;
  for (size_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
    ++mine;
    // The remaining tensors are counted, too, because a thread waits for the count.
    if (!failed.ok()) continue;
    try {
      const Copied& copied = tensors_[i];
      const c10::StreamGuard on(streams_[copied.stream].stream);
      queue_(base_ + copied.offset, copied.source);
    } catch (const std::exception& error) {
      failed = Failed(error);
    }
  }
  MutexLock lock(&mu_);
  status_.Update(failed);
  queued_ += mine;
  if (mine > 0 && queued_ == count_) {
    try {
      for (DeviceStream& on : streams_) {
        auto copied = std::make_unique<c10::Event>(on.device.type());
        copied->record(on.stream);
        on.copied = std::move(copied);
      }
    } catch (const std::exception& error) {
      status_.Update(Failed(error));
    }
    all_queued_ = true;
    changed_.SignalAll();
  }
  while (count_ > 0 && !all_queued_) changed_.Wait(&mu_);
}

void DeviceCopies::CheckVersions() {
  if (std::exchange(checked_, true)) return;
  for (const Copied& copied : tensors_) {
    if (copied.source._version() != copied.version) {
      status_.Update(WasChangedDuringItsCopy(copied.name));
    }
  }
}

void DeviceCopies::LetChange() {
  Queue();
  {
    MutexLock lock(&mu_);
    if (done_) return;
    CheckVersions();
  }
  for (const DeviceStream& on : streams_) {
    // If there is no event, the device has failed, which its next operation reports.
    if (on.copied == nullptr) continue;
    on.copied->block(c10::impl::VirtualGuardImpl(on.device.type()).getStream(on.device));
  }
}

void DeviceCopies::Wait() {
  Queue();
  {
    MutexLock lock(&mu_);
    while (waiting_) changed_.Wait(&mu_);
    if (done_ || count_ == 0) return;
    waiting_ = true;
  }
  absl::Status failed;
  for (const DeviceStream& on : streams_) {
    try {
      if (on.copied != nullptr) {
        on.copied->synchronize();
      } else {
        c10::impl::VirtualGuardImpl(on.device.type()).synchronizeStream(on.stream);
      }
    } catch (const std::exception& error) {
      failed.Update(Failed(error));
    }
  }
  // The tensors may be large, and their module may be gone. They are released without the lock.
  std::vector<Copied> gone;
  MutexLock lock(&mu_);
  status_.Update(failed);
  CheckVersions();
  std::swap(gone, tensors_);
  done_ = true;
  waiting_ = false;
  changed_.SignalAll();
}

absl::Status DeviceCopies::status() const {
  MutexLock lock(&mu_);
  return status_;
}

}  // namespace muster
