#ifndef MUSTER_WORKER_PARALLEL_MEMORY_ORDER_H_
#define MUSTER_WORKER_PARALLEL_MEMORY_ORDER_H_

#include <functional>
#include <optional>
#include <vector>

#include "c10/core/Device.h"
#include "c10/core/Stream.h"

namespace muster {

// Keeps streams of a device in order that use memory which comes and goes while they run.
// LibTorch's caching allocator hands memory that the host frees to the next one that asks on the
// stream that it was taken on, whatever other streams still do with it. So that stream comes after
// all of them before the memory is freed. The host waits for nothing.
//
// Not thread-safe; the threads that call it may have different current streams. Errors are
// c10::Error: the device has failed.
class MemoryOrder {
 public:
  explicit MemoryOrder(c10::Device device) : device_(device) {}

  // The memory has been taken on the current stream.
  void Begin();
  // The current stream is about to use it: after what the stream of Begin() has queued before.
  void Use();
  // Calls `copy`, which reads it on the current stream: after all that its users have queued, and
  // before what they queue next.
  void Copy(const std::function<void()>& copy);
  // Calls `last` with the stream of Begin() as the current one, behind all that its users have
  // queued. The memory can be freed afterwards: what this stream and the caller's get from then on
  // comes after that. If `last` throws, nothing has ended.
  void End(const std::function<void()>& last);

 private:
  c10::Stream Current() const;
  void Follow(const c10::Stream& behind, const c10::Stream& ahead) const;

  const c10::Device device_;
  std::optional<c10::Stream> own_;   // of Begin()
  std::vector<c10::Stream> others_;  // that have used it since
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_MEMORY_ORDER_H_
