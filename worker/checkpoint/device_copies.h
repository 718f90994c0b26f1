#ifndef MUSTER_WORKER_CHECKPOINT_DEVICE_COPIES_H_
#define MUSTER_WORKER_CHECKPOINT_DEVICE_COPIES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"

namespace muster {

// Returns this process's stream for copies between the host and a device, which run beside the
// other streams.
c10::Stream CopyStream(const c10::Device& device);

// Returns the error for a tensor that was changed while its copy was being made.
absl::Status WasChangedDuringItsCopy(const std::string& name);

// Copies of tensors from devices into memory of the host, which a device makes on a stream of its
// own while it computes. They begin after the work that the thread that calls Start() has queued by
// then. Code that is about to queue a change of the tensors calls LetChange() first: then the
// device, not the host, waits for the copies. A change that was queued nevertheless is detected by
// the tensor's version, which every operation in place counts; a change through data() is not.
//
// Copies into pinned memory need no thread of the host once they are queued. A copy into other
// memory is made by the call that queues it.
class DeviceCopies {
 public:
  // Queues a copy on the current stream.
  using QueueCopy = std::function<void(char* to, const at::Tensor& from)>;

  // Whether the tensor is on a device, its data are laid out as in a file, and its changes are
  // counted.
  static bool Takes(const at::Tensor& tensor);

  DeviceCopies();
  explicit DeviceCopies(QueueCopy queue);
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;
  // Waits for the copies that are queued.
  ~DeviceCopies();

  // Must be called before Start(), by one thread: `source` is to go to `offset` bytes after the
  // base. `name` is for messages.
  void Add(std::string name, at::Tensor source, size_t offset);
  bool empty() const { return streams_.empty(); }

  // Must be called once, before the methods below. The copies wait for everything that the calling
  // thread's streams have queued so far. Throws c10::Error if the device has failed.
  void Start(char* base);

  // The following methods are thread-safe.

  // Makes the tensors' device the current one of the calling thread, for good. For a thread that
  // has set no device: LibTorch allocates memory for a thread on its current device, which is the
  // first one of the machine unless the thread sets another.
  void SetDeviceOfThisThread() const;

  // Queues the copies that no other thread has queued; when it returns, all are queued.
  void Queue();
  // Makes everything that is queued on the calling thread's streams from now on wait for the
  // copies. Throws c10::Error if the device has failed.
  void LetChange();
  // Returns when the copies are made.
  void Wait();

  // Call it after Wait(). FAILED_PRECONDITION if a tensor was changed before its copy was complete,
  // INTERNAL if the device failed.
  absl::Status status() const;

 private:
  struct Copied {
    std::string name;
    at::Tensor source;
    size_t offset;
    int64_t version;
    size_t stream;  // in streams_
  };
  struct DeviceStream {
    c10::Device device;
    c10::Stream stream;
    std::unique_ptr<c10::Event> copied;  // recorded once all copies are queued
  };

  size_t NumberOfStream(const c10::Device& device);
  void CheckVersions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const QueueCopy queue_;
  char* base_ = nullptr;
  size_t count_ = 0;             // number of tensors at Start()
  std::vector<Copied> tensors_;  // empty once they are copied
  std::vector<DeviceStream> streams_;
  std::atomic<size_t> next_{0};
  mutable Mutex mu_;
  mutable CondVar changed_;
  size_t queued_ ABSL_GUARDED_BY(mu_) = 0;
  bool all_queued_ ABSL_GUARDED_BY(mu_) = false;
  bool checked_ ABSL_GUARDED_BY(mu_) = false;
  bool waiting_ ABSL_GUARDED_BY(mu_) = false;  // a thread waits for the device
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DEVICE_COPIES_H_
