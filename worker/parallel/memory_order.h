#ifndef MUSTER_WORKER_PARALLEL_MEMORY_ORDER_H_
#define MUSTER_WORKER_PARALLEL_MEMORY_ORDER_H_

#include <functional>
#include <optional>
#include <vector>

#include "c10/core/Device.h"
#include "c10/core/Stream.h"

namespace muster {

// Keeps the streams of a device in order that use memory which is allocated and freed while they
// run. LibTorch's caching allocator gives memory that the host frees to the next allocation on the
// stream of the first one, whatever other streams still do with it. So that stream waits for all
// the others before the memory is freed. The host waits for nothing.
//
// Not thread-safe; the threads that call it may have different current streams. Throws c10::Error
// if the device has failed.
class MemoryOrder {
 public:
  explicit MemoryOrder(c10::Device device) : device_(device) {}

  // The memory was allocated on the current stream.
  void Begin();
  // The current stream is about to use the memory: it waits for what is queued on the stream of
  // Begin().
  void Use();
  // Calls `copy`, which reads the memory on the current stream, after everything that its users
  // have queued so far, and before what they queue next.
  void Copy(const std::function<void()>& copy);
  // Calls `last` with the stream of Begin() as the current one, behind everything that its users
  // have queued. The memory can be freed afterwards: later work on this stream and on the caller's
  // comes after that. If `last` throws, nothing has ended.
  void End(const std::function<void()>& last);

 private:
  c10::Stream Current() const;
  void Follow(const c10::Stream& behind, const c10::Stream& ahead) const;

  const c10::Device device_;
  std::optional<c10::Stream> own_;   // of Begin()
  std::vector<c10::Stream> others_;  // that have used the memory since Begin()
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_MEMORY_ORDER_H_
