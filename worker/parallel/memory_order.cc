#include "worker/parallel/memory_order.h"

#include <algorithm>

#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace muster {

c10::Stream MemoryOrder::Current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void MemoryOrder::Follow(const c10::Stream& behind, const c10::Stream& ahead) const {
  if (behind == ahead) return;
  c10::Event event(device_.type());
  event.record(ahead);
  event.block(behind);
}

void MemoryOrder::Begin() {
  own_ = Current();
  others_.clear();
}

void MemoryOrder::Use() {
  const c10::Stream here = Current();
  if (here == *own_ || std::find(others_.begin(), others_.end(), here) != others_.end()) return;
  Follow(here, *own_);
  others_.push_back(here);
}

void MemoryOrder::Copy(const std::function<void()>& copy) {
  const c10::Stream here = Current();
  Follow(here, *own_);
  for (const c10::Stream& other : others_) Follow(here, other);
  copy();
  Follow(*own_, here);
  for (const c10::Stream& other : others_) Follow(other, here);
}

void MemoryOrder::End(const std::function<void()>& last) {
  for (const c10::Stream& other : others_) Follow(*own_, other);
  const c10::Stream here = Current();
  {
    const c10::StreamGuard on(*own_);
    last();
  }
  Follow(here, *own_);
  others_.clear();
}

}  // namespace muster
