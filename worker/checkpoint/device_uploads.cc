#include "worker/checkpoint/device_uploads.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Allocator.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/checkpoint/device_copies.h"

namespace muster {
namespace {

absl::Status Failed(const std::exception& error) {
  return absl::InternalError(
      absl::StrCat("copies to a device from a checkpoint failed: ", error.what()));
}

DeviceUploads::QueueCopy CopyTo(const c10::Device& device) {
  return [device](char* to, const char* from, size_t bytes) {
    const at::NoGradGuard no_grad;
    const auto count = static_cast<int64_t>(bytes);
    const at::Tensor there = at::for_blob(to, {count})
                                 .options(at::TensorOptions().dtype(at::kByte).device(device))
                                 .target_device(device)
                                 .make_tensor();
    there.copy_(at::from_blob(const_cast<char*>(from), {count}, at::kByte), /*non_blocking=*/true);
  };
}

}  // namespace

size_t DeviceMemoryLeft(const c10::Device& device) {
  try {
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
    if (allocator == nullptr || !allocator->initialized()) return 0;
    const size_t free = allocator->getMemoryInfo(device.index()).first;
    const auto stats = allocator->getDeviceStats(device.index());
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const int64_t cached = stats.reserved_bytes[all].current - stats.allocated_bytes[all].current;
    return free + static_cast<size_t>(std::max<int64_t>(cached, 0));
  } catch (const c10::Error&) {
    return 0;
  }
}

DeviceUploads::DeviceUploads(const c10::Device& device, const Room& room)
    : DeviceUploads(device, room, CopyTo(device),
                    device.is_cuda() ? HostPinning::Cuda() : nullptr) {}

DeviceUploads::DeviceUploads(const c10::Device& device, const Room& room, QueueCopy queue,
                             const HostPinning* pinning)
    : device_(device),
      room_(room),
      queue_(std::move(queue)),
      pinning_(pinning),
      stream_(CopyStream(device)) {
  TORCH_CHECK(room_.threads >= 1 && room_.blocks > room_.threads, "uploads to ", device.str(),
              " by ", room_.threads, " threads have ", room_.blocks,
              " blocks of memory: give them at least one more than there are threads, and one "
              "thread or more");
}

DeviceUploads::~DeviceUploads() { Wait().IgnoreError(); }

void DeviceUploads::SetDeviceOfThisThread() const {
  c10::impl::VirtualGuardImpl(device_.type()).uncheckedSetDevice(device_);
}

void DeviceUploads::Follow() {
  c10::Event given(device_.type());
  given.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  given.block(stream_);
}

bool DeviceUploads::IsCopied(const Block& block) {
  try {
    return block.copied->query();
  } catch (const c10::Error&) {
    return false;  // the waiting caller gets the error
  }
}

absl::StatusOr<DeviceUploads::Block*> DeviceUploads::Make() {
  auto block = std::make_unique<Block>();
  if (absl::Status grown = block->memory.Grow(room_.block_bytes); !grown.ok()) return grown;
  if (pinning_ != nullptr) block->memory.Pin(*pinning_);
  MutexLock lock(&mu_);
  return blocks_.emplace_back(std::move(block)).get();
}

absl::StatusOr<char*> DeviceUploads::Take() {
  SetDeviceOfThisThread();
  Block* block = nullptr;
  bool makes = false, waits = false;
  {
    MutexLock lock(&mu_);
    while (block == nullptr && !makes) {
      if (!status_.ok()) return status_;
      if (!idle_.empty()) {
        block = idle_.back();
        idle_.pop_back();
        break;
      }
      const bool copied = !queued_.empty() && IsCopied(*queued_.front());
      makes = !copied && blocks_.size() + being_made_ < static_cast<size_t>(room_.blocks);
      if (makes) {
        ++being_made_;
      } else if (!queued_.empty()) {
        block = queued_.front();
        queued_.pop_front();
        waits = !copied;
      } else {
        changed_.Wait(&mu_);
      }
    }
  }
  absl::Status status;
  if (makes) {
    absl::StatusOr<Block*> made = Make();
    status = made.status();
    if (made.ok()) block = *made;
  } else if (waits) {
    try {
      block->copied->synchronize();
    } catch (const std::exception& error) {
      status = Failed(error);
    }
  }
  MutexLock lock(&mu_);
  if (makes) --being_made_;
  if (block != nullptr) taken_.emplace(block->memory.data(), block);
  if (status.ok()) return block->memory.data();
  status_.Update(status);
  changed_.SignalAll();
  return status;
}

absl::Status DeviceUploads::Queue(const char* block, absl::Span<const Piece> pieces) {
  SetDeviceOfThisThread();
  Block* taken = nullptr;
  {
    MutexLock lock(&mu_);
    if (!status_.ok()) return status_;
    taken = taken_.at(block);
  }
  absl::Status status;
  try {
    const c10::StreamGuard on(stream_);
    for (const Piece& piece : pieces) queue_(piece.to, block + piece.offset, piece.bytes);
  } catch (const std::exception& error) {
    status = Failed(error);
  }
  // Record the event even if a copy has failed, because others may be under way.
  bool told = pieces.empty();
  if (!told) {
    try {
      if (taken->copied == nullptr) taken->copied = std::make_unique<c10::Event>(device_.type());
      taken->copied->record(stream_);
      told = true;
    } catch (const std::exception& error) {
      status.Update(Failed(error));
    }
  }
  MutexLock lock(&mu_);
  status_.Update(status);
  if (told) {
    taken_.erase(block);
    if (pieces.empty()) {
      idle_.push_back(taken);
    } else {
      queued_.push_back(taken);
    }
  }
  untold_ = untold_ || !told;
  changed_.SignalAll();
  return status;
}

absl::Status DeviceUploads::Wait() {
  std::deque<Block*> queued;
  bool untold = false;
  {
    MutexLock lock(&mu_);
    queued.swap(queued_);
    untold = std::exchange(untold_, false);
  }
  absl::Status status;
  for (const Block* const block : queued) {
    try {
      block->copied->synchronize();
    } catch (const std::exception& error) {
      status.Update(Failed(error));
    }
  }
  if (untold) {
    try {
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeStream(stream_);
    } catch (const std::exception& error) {
      status.Update(Failed(error));
    }
  }
  MutexLock lock(&mu_);
  idle_.insert(idle_.end(), queued.begin(), queued.end());
  for (const auto& [unused, block] : taken_) idle_.push_back(block);
  taken_.clear();
  status_.Update(status);
  return std::exchange(status_, absl::OkStatus());
}

}  // namespace muster
