#ifndef MUSTER_WORKER_PARALLEL_COUNTING_ALLOCATOR_H_
#define MUSTER_WORKER_PARALLEL_COUNTING_ALLOCATOR_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/core/CPUAllocator.h"

namespace muster {

// For tests of memory: LibTorch's allocator for the CPU, counting the bytes that are allocated and
// not freed. Thread-safe.
class CountingAllocator : public c10::Allocator {
 public:
  // Replaces LibTorch's allocator at the first call, whose argument is the size of large pieces, in
  // bytes.
  static CountingAllocator& Get(size_t large = std::numeric_limits<size_t>::max()) {
    static auto& allocator = *[large] {
      auto* const made = new CountingAllocator(c10::GetDefaultCPUAllocator(), large);
      c10::SetCPUAllocator(made, /*priority=*/255);
      return made;
    }();
    return allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr inner = inner_->allocate(bytes);
    void* const data = inner.get();
    if (data == nullptr) return inner;
    inner.release_context();
    MutexLock lock(&mu_);
    sizes_[data] = bytes;
    live_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, live_);
    if (bytes >= large_bytes_) large_peak_ = std::max(large_peak_, ++large_);
    return {data, data, &Delete, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

  int64_t live() const {
    MutexLock lock(&mu_);
    return live_;
  }
  int64_t peak() const {
    MutexLock lock(&mu_);
    return peak_;
  }
  // Large pieces.
  int64_t large_peak() const {
    MutexLock lock(&mu_);
    return large_peak_;
  }
  void ResetPeak() {
    MutexLock lock(&mu_);
    peak_ = live_;
    large_peak_ = large_;
  }

 private:
  CountingAllocator(c10::Allocator* inner, size_t large) : inner_(inner), large_bytes_(large) {}

  static void Delete(void* data) {
    CountingAllocator& self = Get();
    {
      MutexLock lock(&self.mu_);
      const auto it = self.sizes_.find(data);
      self.live_ -= static_cast<int64_t>(it->second);
      if (it->second >= self.large_bytes_) --self.large_;
      self.sizes_.erase(it);
    }
    self.inner_->raw_deleter()(data);
  }

  c10::Allocator* const inner_;
  const size_t large_bytes_;
  mutable Mutex mu_;
  std::unordered_map<void*, size_t> sizes_ ABSL_GUARDED_BY(mu_);
  int64_t live_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t peak_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t large_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t large_peak_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_COUNTING_ALLOCATOR_H_
