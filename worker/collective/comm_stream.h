#ifndef MUSTER_WORKER_COLLECTIVE_COMM_STREAM_H_
#define MUSTER_WORKER_COLLECTIVE_COMM_STREAM_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/core/Device.h"
#include "c10/core/Stream.h"
#include "worker/collective/comm_queue.h"

namespace muster {

// A stream of a device for collectives. Submit() runs the body in the caller's thread with that
// stream as the current one, and Wait() makes the then current stream wait for an event after it:
// so the device works on both at a time, and no thread blocks for the device (a Comm may block for
// other ranks).
//
// Memory comes from LibTorch's caching allocator, which gives memory freed on the host to the next
// allocation on the same stream, whatever other streams still do with it. Events order the accesses
// (docs/decisions/0066):
//   - A body comes after everything queued before Submit(), on the current stream and on those that
//     have waited for something since the previous Submit(). So outside bodies these streams may
//     free the memory that bodies and Allocate() return at any time.
//   - Other memory that a body uses must be kept until some Wait() for the body.
// So nothing is freed late, and as much memory is needed as with a single stream.
//
// Thread-safe; bodies run one at a time.
class CommStream : public CommQueue {
 public:
  // `device`: one with streams; takes a stream of high priority from its pool.
  explicit CommStream(c10::Device device);
  CommStream(const CommStream&) = delete;
  CommStream& operator=(const CommStream&) = delete;

  bool Suits(const c10::Device& device) const override { return device == stream_.device(); }
  bool on_stream() const override { return true; }
  // Must not be called in a body.
  Ticket Submit(std::function<void()> body) override;
  void Wait(const Ticket& ticket) override;
  bool WaitQuietly(const Ticket& ticket) override;
  void Drain() override;
  bool IsCurrent() const override;
  void Allocate(const std::function<void()>& allocate) override;

  const c10::Stream& stream() const { return stream_; }

 private:
  struct StreamWork;
  class InBody;

  c10::Stream Current() const;
  // Makes the stream wait for what other streams have queued.
  void Follow();
  // Makes the current stream wait for `work`, which may be null.
  void Join(const StreamWork* work);

  const c10::Stream stream_;
  Mutex mu_;
  CondVar changed_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;  // a body is running
  uint64_t submitted_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<StreamWork> last_ ABSL_GUARDED_BY(mu_);
  std::exception_ptr unseen_ ABSL_GUARDED_BY(mu_);
  // Streams that have waited since the last body, and may use its results.
  std::vector<c10::Stream> users_ ABSL_GUARDED_BY(mu_);
  // The last work that each stream has waited for; earlier work has ended then.
  std::unordered_map<c10::Stream, uint64_t> waited_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COMM_STREAM_H_
