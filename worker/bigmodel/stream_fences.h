#ifndef MUSTER_WORKER_BIGMODEL_STREAM_FENCES_H_
#define MUSTER_WORKER_BIGMODEL_STREAM_FENCES_H_

#include <memory>

#include "c10/core/Device.h"
#include "c10/core/Stream.h"

namespace muster {

// Orders the copies to a device with its operators, which run later than the calls that queue them:
// memory must not be written while its last operator is still waiting in a stream. An interface, so
// that tests see the order without a device. Thread-safe.
class StreamFences {
 public:
  // A point in a stream.
  using Fence = std::shared_ptr<const void>;

  // Returns null for the CPU, where an operator has ended when its call returns.
  static std::unique_ptr<StreamFences> Of(const c10::Device& device);
  virtual ~StreamFences() = default;

  // The stream on which the calling thread queues operators.
  virtual c10::Stream Current() const = 0;
  // The stream on which weights are copied.
  virtual c10::Stream Copies() const = 0;
  // Returns a fence after the work that `stream` has now.
  virtual Fence After(const c10::Stream& stream) = 0;
  // Makes work that is queued on `stream` from now on wait for the fence.
  virtual void Wait(const c10::Stream& stream, const Fence& fence) = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_STREAM_FENCES_H_
