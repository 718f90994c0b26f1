#include "worker/bigmodel/stream_fences.h"

#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace muster {
namespace {

// Uses c10's interface to devices, which the CUDA part of LibTorch implements if it is loaded.
class DeviceFences final : public StreamFences {
 public:
  explicit DeviceFences(const c10::Device& device)
      : device_(device),
        guard_(device.type()),
        copies_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

  c10::Stream Current() const override { return guard_.getStream(device_); }
  c10::Stream Copies() const override { return copies_; }
  Fence After(const c10::Stream& stream) override {
    auto event = std::make_shared<c10::Event>(device_.type());
    event->record(stream);
    return event;
  }
  void Wait(const c10::Stream& stream, const Fence& fence) override {
    static_cast<const c10::Event*>(fence.get())->block(stream);
  }

 private:
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream copies_;
};

}  // namespace

std::unique_ptr<StreamFences> StreamFences::Of(const c10::Device& device) {
  if (device.is_cpu()) return nullptr;
  return std::make_unique<DeviceFences>(device);
}

}  // namespace muster
