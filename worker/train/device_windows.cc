#include "worker/train/device_windows.h"

#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "base/log.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace muster {
namespace {

c10::Stream StreamOf(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

void DeviceWindows::Ticket::Wait() const {
  // A CUDA call goes to the thread's current device, for which it would create a context.
  const c10::DeviceGuard on(device_);
  event_->synchronize();
}

DeviceWindows::Window::Window(c10::Stream stream, at::Tensor tensor)
    : stream_(stream), tensor_(std::move(tensor)), arrived_(new Ticket(stream.device())) {}

DeviceWindows::Window::~Window() {
  try {
    arrived_->event_->block(stream_);
    if (left_ != nullptr) left_->event_->block(stream_);
  } catch (const std::exception& error) {
    // The next operation on the device reports the failure, too.
    MUSTER_LOG(Error) << "the device " << stream_.device().str() << " has failed: " << error.what();
  }
}

DeviceWindows::DeviceWindows(c10::Device device)
    : device_(device), in_(StreamOf(device)), out_(StreamOf(device)) {}

DeviceWindows::~DeviceWindows() {
  try {
    Wait();
  } catch (const std::exception& error) {
    MUSTER_LOG(Error) << "the device " << device_.str() << " has failed: " << error.what();
  }
}

c10::Stream DeviceWindows::Current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void DeviceWindows::Follow() {
  if (last_out_ != nullptr) Follow(*last_out_);
}

void DeviceWindows::Follow(const Ticket& ticket) { ticket.event_->block(in_); }

std::unique_ptr<DeviceWindows::Window> DeviceWindows::Fetch(at::Tensor room,
                                                            const at::Tensor& host) {
  const at::NoGradGuard no_grad;
  std::unique_ptr<Window> window(new Window(Current(), std::move(room)));
  // Earlier uses of the memory have ended by then.
  c10::Event free(device_.type());
  free.record(window->stream_);
  free.block(in_);
  if (host.defined()) {
    const c10::StreamGuard on(in_);
    window->tensor_.copy_(host, /*non_blocking=*/true);
  }
  window->arrived_->event_->record(in_);
  last_in_ = window->arrived_;
  return window;
}

void DeviceWindows::Use(Window& window) { window.arrived_->event_->block(Current()); }

std::shared_ptr<DeviceWindows::Ticket> DeviceWindows::Return(Window& window,
                                                             const at::Tensor& host) {
  const at::NoGradGuard no_grad;
  c10::Event updated(device_.type());
  updated.record(Current());
  updated.block(out_);
  {
    const c10::StreamGuard on(out_);
    host.copy_(window.tensor_, /*non_blocking=*/true);
  }
  std::shared_ptr<Ticket> left(new Ticket(device_));
  left->event_->record(out_);
  window.left_ = last_out_ = left;
  return left;
}

void DeviceWindows::Wait() {
  for (std::shared_ptr<Ticket>* const last : {&last_in_, &last_out_}) {
    if (*last != nullptr) (*last)->Wait();
    *last = nullptr;
  }
}

}  // namespace muster
