#ifndef MUSTER_WORKER_CHECKPOINT_TEST_LEFT_COPIES_H_
#define MUSTER_WORKER_CHECKPOINT_TEST_LEFT_COPIES_H_

#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "worker/collective/fake_streams.h"

namespace muster {

// The copies of a device that does nothing before a thread waits for it. Thread-safe.
class LeftCopies {
 public:
  explicit LeftCopies(FakeStreams& device) : device_(device) {
    device_.LeaveUntilWaitedFor([this] { Finish(); });
  }
  ~LeftCopies() { device_.LeaveUntilWaitedFor(nullptr); }
  LeftCopies(const LeftCopies&) = delete;
  LeftCopies& operator=(const LeftCopies&) = delete;

  void Leave(char* to, const char* from, size_t bytes) {
    MutexLock lock(&mu_);
    left_.emplace_back([to, from, bytes] { std::memcpy(to, from, bytes); });
  }
  void Finish() {
    MutexLock lock(&mu_);
    for (const auto& copy : left_) copy();
    left_.clear();
  }
  size_t size() const {
    MutexLock lock(&mu_);
    return left_.size();
  }

 private:
  FakeStreams& device_;
  mutable Mutex mu_;
  std::vector<std::function<void()>> left_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TEST_LEFT_COPIES_H_
