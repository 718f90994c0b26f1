#ifndef MUSTER_WORKER_COLLECTIVE_FAKE_STREAMS_H_
#define MUSTER_WORKER_COLLECTIVE_FAKE_STREAMS_H_

#include <cstdint>
#include <functional>
#include <map>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/core/Device.h"
#include "c10/core/Stream.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"

namespace muster {

// For tests: streams and events of a device type, without a device. Nothing is executed: clocks
// record the order in which a device would have to execute operations, so that a test can ask
// whether two operations are ordered, independently of their speed. Each thread begins on a stream
// of its own. Thread-safe.
class FakeStreams final : public c10::impl::DeviceGuardImplInterface {
 public:
  // Replaces the implementation of `type` in this process, permanently. With kCPU, operators of
  // LibTorch have these streams.
  static FakeStreams& Install(c10::DeviceType type);

  // An operation: its stream and its number there.
  struct Point {
    c10::StreamId stream;
    uint64_t number;
  };
  // Queues an operation on the current stream of the caller's thread.
  Point Operate();
  // Whether the operation ends before the next one on the current stream begins.
  bool IsBefore(const Point& point) const;

  c10::Stream Current() const { return getStream(device()); }
  c10::Device device() const;
  // How often a thread has waited for the device, and how many events are left.
  int host_waits() const;
  int events() const;
  // From now on, queued operations end only when a thread waits for them: then `end`, which does
  // the work of the device, is run first. Null: they end at once.
  void LeaveUntilWaitedFor(std::function<void()> end);
  // From now on events cannot be recorded, as after an error of a device.
  void Break(bool broken);

  c10::DeviceType type() const override { return type_; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override;
  c10::Stream getDefaultStream(c10::Device) const override { return Current(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high_priority) const override;
  c10::Stream getNewStream(c10::Device, int priority) const override;
  c10::Stream exchangeStream(c10::Stream stream) const override;
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override;
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override;
  void block(void* event, const c10::Stream& stream) const override;
  bool queryEvent(void*) const override;
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override;
  void synchronizeEvent(void*) const override;
  void synchronizeDevice(c10::DeviceIndex) const override;
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

 private:
  // For each stream, its last operation that comes before something.
  using Clock = std::map<c10::StreamId, uint64_t>;

  explicit FakeStreams(c10::DeviceType type) : type_(type) {}
  void WaitOnHost() const;
  c10::StreamId CurrentId() const;
  c10::Stream StreamOf(c10::StreamId id) const;

  const c10::DeviceType type_;
  mutable Mutex mu_;
  mutable c10::StreamId last_id_ ABSL_GUARDED_BY(mu_) = 0;
  mutable std::map<c10::StreamId, Clock> clocks_ ABSL_GUARDED_BY(mu_);
  mutable int host_waits_ ABSL_GUARDED_BY(mu_) = 0;
  mutable int events_ ABSL_GUARDED_BY(mu_) = 0;
  std::function<void()> end_ ABSL_GUARDED_BY(mu_);
  bool broken_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_FAKE_STREAMS_H_
