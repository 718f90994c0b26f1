#include "worker/train/host_parts.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/status/status.h"
#include "base/log.h"
#include "base/memory_left.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// Places begin at pages: a device copies whole pages best, and no two places share one.
constexpr uint64_t kPageBytes = 4096;

uint64_t RoundedUp(uint64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

}  // namespace

HostParts::HostParts(c10::Device device, int ranks, Contents contents)
    : HostParts(device, ranks, device.is_cuda() ? HostPinning::Cuda() : nullptr, contents) {}

HostParts::HostParts(c10::Device device, int ranks, const HostPinning* pinning, Contents contents)
    : device_(device), ranks_(ranks), contents_(contents), pins_(pinning != nullptr) {
  if (!pins_) return;
  pinning_ = {.pin = [this, pinning](void* data,
                                     size_t bytes) { return pinned_ = pinning->pin(data, bytes); },
              .unpin = pinning->unpin};
}

HostParts::~HostParts() {
  MutexLock lock(&mu_);
  for (const auto& [number, place] : places_) {
    try {
      Wait(place);
    } catch (const std::exception& error) {
      MUSTER_LOG(Error) << "the device " << device_.str() << " has failed: " << error.what();
    }
  }
}

uint64_t HostParts::Reserve(uint64_t bytes) {
  MutexLock lock(&mu_);
  // An empty place gets a distinct number, too.
  const uint64_t room = RoundedUp(std::max<uint64_t>(bytes, 1));
  // Pinning allocates all pages, and the kernel kills a process that takes too much memory. The
  // machine's other ranks need about as much, and have not allocated it yet.
  const uint64_t left = MemoryLeft();
  TORCH_CHECK(reserved_ - taken_ + room <= left / ranks_, option(),
              " to the memory of the host (cpu) needs ", reserved_ - taken_ + room,
              " bytes or more for this process's parts of the ",
              contents_ == Contents::kParameters ? "parameters and their gradients" : "gradients",
              ", and this machine or its cgroup has ", left, " left for ", ranks_,
              ranks_ == 1 ? " process" : " processes",
              ": offload them to a disk, or use more machines");
  const uint64_t place = reserved_;
  reserved_ += room;
  return place;
}

bool HostParts::Pin(AlignedMemory* memory) {
  if (!pins_) return false;
  // The thread may have a different current device, which CUDA would use.
  const c10::DeviceGuard on(device_);
  pinned_ = false;
  memory->Pin(pinning_);
  return pinned_;
}

void HostParts::Take() {
  MutexLock lock(&mu_);
  if (taken_ < reserved_) TakeMemory();
}

void HostParts::TakeMemory() {
  Block block;
  block.first = taken_;
  block.last = reserved_;
  const absl::Status grown = block.memory.Grow(reserved_ - taken_);
  TORCH_CHECK(
      grown.ok(), option(), " to the memory of the host (cpu): ", grown.message(),
      "; raise the limits of the process (ulimit -v, ulimit -d), offload them to a disk, or "
      "use more machines");
  block.pinned = Pin(&block.memory);
  if (!block.pinned) {
    static const bool said = [&] {
      MUSTER_LOG(Warning) << option() << ": " << reserved_ - taken_
                          << " bytes of memory of the host cannot be pinned, so each copy to and "
                             "from "
                          << device_.str()
                          << " is slower and waited for: raise the limit of locked memory "
                             "(ulimit -l), or leave more memory free";
      return true;
    }();
    (void)said;
  }
  taken_ = reserved_;
  blocks_.push_back(std::move(block));
}

HostParts::Place& HostParts::PlaceAt(uint64_t place) {
  MutexLock lock(&mu_);
  if (place >= taken_) TakeMemory();
  Place& found = places_[place];
  if (found.data == nullptr) {
    for (const Block& block : blocks_) {
      if (place < block.first || place >= block.last) continue;
      found.data = block.memory.data() + (place - block.first);
      found.pinned = block.pinned;
    }
  }
  return found;
}

c10::Stream HostParts::Current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void HostParts::Wait(const Place& place) const {
  // A CUDA call goes to the thread's current device, for which it would create a context.
  const c10::DeviceGuard on(device_);
  if (place.written != nullptr) place.written->synchronize();
  for (const auto& [stream, read] : place.read) read->synchronize();
}

at::Tensor HostParts::HostTensor(const Place& place, const at::Tensor& like) {
  return at::from_blob(place.data, like.sizes(), at::TensorOptions().dtype(like.scalar_type()));
}

void HostParts::Read(uint64_t place, void* to, uint64_t bytes) {
  const Place& from = PlaceAt(place);
  Wait(from);
  std::memcpy(to, from.data, bytes);
}

void HostParts::Write(uint64_t place, const void* from, uint64_t bytes) {
  const Place& to = PlaceAt(place);
  Wait(to);
  std::memcpy(to.data, from, bytes);
}

void HostParts::ReadTo(uint64_t place, const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  Place& from = PlaceAt(place);
  const c10::Stream here = Current();
  if (from.written != nullptr) from.written->block(here);
  to.copy_(HostTensor(from, to), /*non_blocking=*/from.pinned);
  for (const auto& [stream, read] : from.read) {
    if (stream == here) return read->record(here);
  }
  auto read = std::make_unique<c10::Event>(device_.type());
  read->record(here);
  from.read.emplace_back(here, std::move(read));
}

void HostParts::WriteFrom(uint64_t place, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  Place& to = PlaceAt(place);
  const c10::Stream here = Current();
  if (to.written != nullptr) to.written->block(here);
  for (const auto& [stream, read] : to.read) read->block(here);
  HostTensor(to, from).copy_(from, /*non_blocking=*/to.pinned);
  if (to.written == nullptr) to.written = std::make_unique<c10::Event>(device_.type());
  to.written->record(here);
  to.read.clear();
}

char* HostParts::DataOf(uint64_t place) { return PlaceAt(place).data; }

}  // namespace muster
