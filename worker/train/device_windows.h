#ifndef MUSTER_WORKER_TRAIN_DEVICE_WINDOWS_H_
#define MUSTER_WORKER_TRAIN_DEVICE_WINDOWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"

namespace muster {

// Takes windows of memory of the host to a device and back, beside what the device computes:
//
//   stream in     window 0 | window 1 | window 2 | ...
//   the program            | update 0 | update 1 | update 2 | ...
//   stream out                        | window 0 | window 1 | ...
//
// The device waits for the copies, the host for none of them. Memory of the device comes from
// LibTorch's allocator on the current stream and goes back there once that stream waits for the
// last copy, so the allocator may hand it on at once, and no more is taken than a program would see
// that waits for each copy.
//
// The host's memory has to be pinned for the copies to run beside anything. Not thread-safe, but
// for Wait() of a Ticket. Errors are c10::Error.
class DeviceWindows {
 public:
  // Reached when a window is back in the memory of the host. Any thread may wait for it.
  class Ticket {
   public:
    // Blocks. Throws if the device has failed.
    void Wait() const { event_->synchronize(); }

   private:
    friend class DeviceWindows;
    explicit Ticket(c10::Device device) : event_(std::make_unique<c10::Event>(device.type())) {}
    std::unique_ptr<c10::Event> event_;
  };

  // A window that is on the device, until its end: then the current stream waits for its copies.
  class Window {
   public:
    ~Window();
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    char* data() const { return static_cast<char*>(memory_.data_ptr()); }

   private:
    friend class DeviceWindows;
    Window(const DeviceWindows& on, at::Tensor memory);

    const DeviceWindows& on_;
    at::Tensor memory_;
    std::shared_ptr<Ticket> arrived_, left_;
  };

  // Takes two streams from the device's pool.
  explicit DeviceWindows(c10::Device device);
  // Waits for the copies.
  ~DeviceWindows();
  DeviceWindows(const DeviceWindows&) = delete;
  DeviceWindows& operator=(const DeviceWindows&) = delete;

  c10::Device device() const { return device_; }

  // What was queued until now is before the copies that follow, in both directions. Once before the
  // windows of a step.
  void Begin();
  // Queues the copy of `bytes` bytes, or, with null, makes room for them only. Throws
  // c10::OutOfMemoryError, with nothing queued.
  std::unique_ptr<Window> Fetch(const char* host, uint64_t bytes);
  // What the current stream gets from now on may use it.
  void Use(Window& window);
  // Queues the copy back, behind what the current stream has.
  std::shared_ptr<Ticket> Return(Window& window, char* host);
  // Returns when no copy is under way any more.
  void Wait();

 private:
  c10::Stream Current() const;

  const c10::Device device_;
  const c10::Stream in_, out_;
  // The last copy of either direction; null: the host has waited for it.
  std::shared_ptr<Ticket> last_in_, last_out_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_DEVICE_WINDOWS_H_
