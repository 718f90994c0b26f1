#include "worker/train/device_windows.h"

#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "base/log.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace muster {
namespace {

c10::Stream StreamOf(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

at::Tensor HostBytes(const char* host, int64_t bytes) {
  // from_blob() takes no memory as const; a source is only read.
  return at::from_blob(const_cast<char*>(host), {bytes}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

DeviceWindows::Window::Window(const DeviceWindows& on, at::Tensor memory)
    : on_(on), memory_(std::move(memory)), arrived_(new Ticket(on.device_)) {}

DeviceWindows::Window::~Window() {
  try {
    arrived_->event_->block(on_.Current());
    if (left_ != nullptr) left_->event_->block(on_.Current());
  } catch (const std::exception& error) {
    // The next operation on the device says so, too.
    MUSTER_LOG(Error) << "the device " << on_.device_.str() << " has failed: " << error.what();
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

void DeviceWindows::Begin() {
  // The step before may have been on another stream; windows of it may still be on their way.
  if (last_out_ != nullptr) last_out_->event_->block(in_);
}

std::unique_ptr<DeviceWindows::Window> DeviceWindows::Fetch(const char* host, uint64_t bytes) {
  const at::NoGradGuard no_grad;
  const auto size = static_cast<int64_t>(bytes);
  std::unique_ptr<Window> window(
      new Window(*this, at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device_))));
  // What has used the memory before has ended by then.
  c10::Event free(device_.type());
  free.record(Current());
  free.block(in_);
  if (host != nullptr && bytes > 0) {
    const c10::StreamGuard on(in_);
    window->memory_.copy_(HostBytes(host, size), /*non_blocking=*/true);
  }
  window->arrived_->event_->record(in_);
  last_in_ = window->arrived_;
  return window;
}

void DeviceWindows::Use(Window& window) { window.arrived_->event_->block(Current()); }

std::shared_ptr<DeviceWindows::Ticket> DeviceWindows::Return(Window& window, char* host) {
  const at::NoGradGuard no_grad;
  c10::Event updated(device_.type());
  updated.record(Current());
  updated.block(out_);
  const int64_t bytes = window.memory_.numel();
  if (bytes > 0) {
    const c10::StreamGuard on(out_);
    HostBytes(host, bytes).copy_(window.memory_, /*non_blocking=*/true);
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
