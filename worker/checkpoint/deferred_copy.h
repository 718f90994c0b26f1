#ifndef MUSTER_WORKER_CHECKPOINT_DEFERRED_COPY_H_
#define MUSTER_WORKER_CHECKPOINT_DEFERRED_COPY_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "worker/checkpoint/device_copies.h"
#include "worker/checkpoint/digest.h"

namespace muster {

// Copies of tensors that are made while training goes on, because nothing changes the tensors
// before the optimizer steps. Code that is about to change them calls Run() first. If a tensor was
// changed nevertheless, that is detected: by its version, which every operation in place counts,
// and by some of its bytes, for changes that are not counted (through data() or a pointer). On a
// device it is detected only by the version; there the device waits for the copy, not the thread.
class DeferredCopy {
 public:
  // Whether a copy of the tensor can wait: its data are laid out as in a file, its changes are
  // counted, and on the CPU it is large enough to be worth it.
  static bool Takes(const at::Tensor& tensor);

  DeferredCopy() = default;
  // For tests: CPU tensors for which `on_device` is true count as being on a device; `queue` queues
  // their copies.
  DeferredCopy(std::function<bool(const at::Tensor&)> on_device, DeviceCopies::QueueCopy queue)
      : on_device_(std::move(on_device)), device_(std::move(queue)) {}
  DeferredCopy(const DeferredCopy&) = delete;
  DeferredCopy& operator=(const DeferredCopy&) = delete;

  // Must be called before Start(), by one thread. The data of `source`, a tensor for which Takes()
  // is true and that must not change from now on, go to `offset` bytes after the base. `name` is
  // for messages.
  void Add(std::string name, at::Tensor source, size_t offset);
  // A range of the destination that is digested, in blocks, while the copies are made. The bytes
  // that no copy covers are there already.
  struct Digested {
    size_t offset = 0;
    size_t bytes = 0;
  };
  static constexpr size_t kBlockBytes = size_t{1} << 20;
  // Sets the destination of the copies. Must be called once, before the methods below. If `files`
  // are given, they contain all copies and do not overlap.
  void Start(char* base, const std::vector<Digested>& files = {});
  // Call it in a thread that does nothing but such copies, before it starts: see DeviceCopies.
  void SetDeviceOfThisThread() const { device_.SetDeviceOfThisThread(); }
  bool empty() const { return parts_.empty() && device_.empty(); }

  // Copies and digests what no other thread is working on, and returns when everything is done.
  // Thread-safe.
  void Run();

  // Returns when everything is copied; leaves the copies on the CPU to other threads.
  void Wait();

  // Call it after Run() or Wait(). FAILED_PRECONDITION, naming the tensor, if one was changed after
  // its Add() and before its copy was complete: the copy is useless.
  absl::Status status() const;

  // The digests of the files given to Start(), in their order. Call it after Run() or Wait().
  const std::vector<BlockDigests>& digests() const { return digests_; }

  // Makes later work on devices wait for their copies, and makes the copies on the CPU. Counts the
  // time that training waits, unless only digests are left to compute.
  void RunWhileTrainingWaits(const Clock& clock);
  // How long training has waited.
  absl::Duration waited() const;
  // The CPU time that copies and digests have taken in all threads together. Call it after Run() or
  // Wait().
  absl::Duration cpu() const;

 private:
  // The number of words that are compared, spread over the tensor.
  static constexpr size_t kSamples = 16;
  using Samples = std::array<uint64_t, kSamples>;

  struct Copied {
    std::string name;
    at::Tensor source;
    const char* from;
    size_t offset, bytes;
    int64_t version;
    Samples samples;
  };
  // A range of the destination that one thread fills.
  struct Part {
    size_t begin, end;
    size_t tensor;               // the first one that may be in it
    uint64_t* digest = nullptr;  // of the range, if it is wanted
  };

  static Samples SamplesOf(const char* data, size_t bytes);
  absl::Status Check(const Copied& copied) const;
  // Returns when no part is left to copy.
  void CopyParts();
  void Fill(const Part& part, BlockDigester* digester) const;

  std::function<bool(const at::Tensor&)> on_device_ = [](const at::Tensor& tensor) {
    return !tensor.is_cpu();
  };
  DeviceCopies device_;
  char* base_ = nullptr;
  bool copies_ = false;          // there were tensors at Start()
  std::vector<Copied> tensors_;  // by offset, after Start()
  std::vector<BlockDigests> digests_;
  std::vector<Part> parts_;
  std::atomic<size_t> next_{0};
  mutable Mutex mu_;
  mutable CondVar changed_;
  size_t copied_ ABSL_GUARDED_BY(mu_) = 0;  // parts
  bool parts_done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  absl::Duration waited_ ABSL_GUARDED_BY(mu_);
  absl::Duration cpu_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DEFERRED_COPY_H_
