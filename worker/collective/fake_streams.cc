#include "worker/collective/fake_streams.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "c10/util/Exception.h"

namespace muster {
namespace {

// The current stream of this thread; 0: none yet. One type is installed in a process.
thread_local c10::StreamId current = 0;

}  // namespace

FakeStreams& FakeStreams::Install(c10::DeviceType type) {
  static FakeStreams& streams = *new FakeStreams(type);
  TORCH_CHECK(streams.type_ == type, "FakeStreams: one type for each process");
  static const c10::impl::DeviceGuardImplRegistrar registrar(type, &streams);
  return streams;
}

c10::Device FakeStreams::device() const {
  // CPU tensors have device index -1.
  return {type_, static_cast<c10::DeviceIndex>(type_ == c10::DeviceType::CPU ? -1 : 0)};
}

c10::Stream FakeStreams::StreamOf(c10::StreamId id) const {
  return c10::Stream(c10::Stream::UNSAFE, device(), id);
}

c10::StreamId FakeStreams::CurrentId() const {
  if (current == 0) {
    MutexLock lock(&mu_);
    current = ++last_id_;
  }
  return current;
}

FakeStreams::Point FakeStreams::Operate() {
  const c10::StreamId stream = CurrentId();
  MutexLock lock(&mu_);
  return {stream, ++clocks_[stream][stream]};
}

bool FakeStreams::IsBefore(const Point& point) const {
  const c10::StreamId stream = CurrentId();
  MutexLock lock(&mu_);
  return clocks_[stream][point.stream] >= point.number;
}

int FakeStreams::host_waits() const {
  MutexLock lock(&mu_);
  return host_waits_;
}

int FakeStreams::events() const {
  MutexLock lock(&mu_);
  return events_;
}

void FakeStreams::Break(bool broken) {
  MutexLock lock(&mu_);
  broken_ = broken;
}

c10::Stream FakeStreams::getStream(c10::Device) const { return StreamOf(CurrentId()); }

c10::Stream FakeStreams::getStreamFromGlobalPool(c10::Device, bool /*high_priority*/) const {
  MutexLock lock(&mu_);
  return StreamOf(++last_id_);
}

c10::Stream FakeStreams::getNewStream(c10::Device device, int /*priority*/) const {
  return getStreamFromGlobalPool(device, false);
}

c10::Stream FakeStreams::exchangeStream(c10::Stream stream) const {
  const c10::StreamId before = CurrentId();
  current = stream.id();
  return StreamOf(before);
}

void FakeStreams::destroyEvent(void* event, c10::DeviceIndex) const noexcept {
  delete static_cast<Clock*>(event);
  MutexLock lock(&mu_);
  --events_;
}

void FakeStreams::record(void** event, const c10::Stream& stream, c10::DeviceIndex,
                         c10::EventFlag) const {
  MutexLock lock(&mu_);
  TORCH_CHECK(!broken_, "the device is broken");
  if (*event == nullptr) {
    *event = new Clock;
    ++events_;
  }
  *static_cast<Clock*>(*event) = clocks_[stream.id()];
}

void FakeStreams::block(void* event, const c10::Stream& stream) const {
  MutexLock lock(&mu_);
  TORCH_CHECK(!broken_, "the device is broken");
  Clock& clock = clocks_[stream.id()];
  for (const auto& [other, number] : *static_cast<const Clock*>(event)) {
    clock[other] = std::max(clock[other], number);
  }
}

void FakeStreams::LeaveUntilWaitedFor(std::function<void()> end) {
  MutexLock lock(&mu_);
  end_ = std::move(end);
}

bool FakeStreams::queryEvent(void*) const {
  MutexLock lock(&mu_);
  return end_ == nullptr;
}

void FakeStreams::WaitOnHost() const {
  std::function<void()> end;
  {
    MutexLock lock(&mu_);
    ++host_waits_;
    end = end_;
  }
  if (end != nullptr) end();
}

void FakeStreams::synchronizeStream(const c10::Stream&) const { WaitOnHost(); }

void FakeStreams::synchronizeEvent(void*) const { WaitOnHost(); }

void FakeStreams::synchronizeDevice(c10::DeviceIndex) const { WaitOnHost(); }

}  // namespace muster
