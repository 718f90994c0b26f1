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

// The stream of this process for copies between the host and a device, beside the others.
c10::Stream CopyStream(const c10::Device& device);

// Of a tensor that was changed while its copy was being made.
absl::Status WasChangedDuringItsCopy(const std::string& name);

// Copies of tensors from devices into memory of the host, which a device makes on a stream of its
// own while it computes. They begin behind what the thread that calls Start() has queued by then.
// Code that is about to queue a change of the tensors calls LetChange() first: then the device, not
// the host, waits for the copies. A change that was queued nevertheless is detected by the tensor's
// version, which every operation in place counts; one through data() is not.
//
// Into pinned memory the copies need no thread of the host once they are queued. Into other memory
// a copy is made by the call that queues it.
class DeviceCopies {
 public:
  // Queues a copy on the current stream.
  using QueueCopy = std::function<void(char* to, const at::Tensor& from)>;

  // Whether it is on a device, its data are laid out as in a file, and its changes are counted.
  static bool Takes(const at::Tensor& tensor);

  DeviceCopies();
  explicit DeviceCopies(QueueCopy queue);
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;
  // Waits for the copies that are queued.
  ~DeviceCopies();

  // Before Start(), by one thread: `source` goes to `offset` bytes after the base. `name` is for
  // messages.
  void Add(std::string name, at::Tensor source, size_t offset);
  bool empty() const { return streams_.empty(); }

  // Once, before what follows. The copies wait for everything that the calling thread's streams
  // have queued so far. Throws c10::Error if the device has failed.
  void Start(char* base);

  // These are thread-safe.

  // For a thread that has no device of its own: makes that of the tensors its current one, for
  // good. LibTorch takes memory for a thread on its current device, which is the first one of the
  // machine unless the thread says otherwise.
  void SetDeviceOfThisThread() const;

  // Queues what no other thread has queued; when it returns, all is queued.
  void Queue();
  // Everything queued on the calling thread's streams from now on waits for the copies. Throws
  // c10::Error if the device has failed.
  void LetChange();
  // Returns when the copies are made.
  void Wait();

  // After Wait(). FAILED_PRECONDITION: a tensor was changed before its copy was complete. INTERNAL:
  // the device failed.
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
    std::unique_ptr<c10::Event> copied;  // once all is queued
  };

  size_t NumberOfStream(const c10::Device& device);
  void CheckVersions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const QueueCopy queue_;
  char* base_ = nullptr;
  size_t count_ = 0;             // of the tensors at Start()
  std::vector<Copied> tensors_;  // none once they are copied
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
