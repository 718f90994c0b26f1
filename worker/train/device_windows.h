#ifndef MUSTER_WORKER_TRAIN_DEVICE_WINDOWS_H_
#define MUSTER_WORKER_TRAIN_DEVICE_WINDOWS_H_

#include <memory>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"

namespace muster {

// Copies tensors, windows of the host's data, to a device and back while it computes:
//
//   stream in     window 0 | window 1 | window 2 | ...
//   the program            | update 0 | update 1 | update 2 | ...
//   stream out                        | window 0 | window 1 | ...
//
// The device waits for the copies; the host waits for none of them. Memory of the device is
// allocated by LibTorch's allocator on the current stream and freed when that stream waits for the
// last copy, so the allocator may reuse it at once, and no more is needed than in a program that
// waits for each copy.
//
// The host's memory must be pinned, or the copies do not overlap with anything, and must live until
// they are done. Not thread-safe, except for tickets and windows. Errors are c10::Error.
class DeviceWindows {
 public:
  // Reached when a copy is done. Any thread may wait for it.
  class Ticket {
   public:
    // Blocks. Throws if the device has failed.
    void Wait() const;

   private:
    friend class DeviceWindows;
    explicit Ticket(c10::Device device)
        : device_(device), event_(std::make_unique<c10::Event>(device.type())) {}
    const c10::Device device_;
    const std::unique_ptr<c10::Event> event_;
  };

  // A window that is on the device until this object's end: then the stream that was current when
  // it was fetched waits for its copies. It may outlive the DeviceWindows.
  class Window {
   public:
    ~Window();
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    const at::Tensor& tensor() const { return tensor_; }
    // The stream on which it may be returned to the allocator.
    const c10::Stream& stream() const { return stream_; }

   private:
    friend class DeviceWindows;
    Window(c10::Stream stream, at::Tensor tensor);

    const c10::Stream stream_;
    const at::Tensor tensor_;
    std::shared_ptr<Ticket> arrived_, left_;
  };

  // Takes two streams from the device's pool.
  explicit DeviceWindows(c10::Device device);
  // Waits for the copies.
  ~DeviceWindows();
  DeviceWindows(const DeviceWindows&) = delete;
  DeviceWindows& operator=(const DeviceWindows&) = delete;

  c10::Device device() const { return device_; }

  // The stream on which the calling thread queues operations.
  c10::Stream Current() const;
  // Later copies to the device come after the copies from it that are queued so far: all of them,
  // or those up to `ticket`.
  void Follow();
  void Follow(const Ticket& ticket);
  // Queues the copy of `host`, or none if it is undefined, to `room`, a tensor of the same layout
  // on the device that was allocated on the current stream.
  std::unique_ptr<Window> Fetch(at::Tensor room, const at::Tensor& host);
  // Later operations on the current stream may use the window.
  void Use(Window& window);
  // Queues the copy back, after what the current stream has.
  std::shared_ptr<Ticket> Return(Window& window, const at::Tensor& host);
  // Returns when no copy is under way.
  void Wait();

 private:
  const c10::Device device_;
  const c10::Stream in_, out_;
  // The last copy in either direction; null: the host has waited for it.
  std::shared_ptr<Ticket> last_in_, last_out_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_DEVICE_WINDOWS_H_
