#ifndef MUSTER_WORKER_COLLECTIVE_TEST_LOST_MEMORY_H_
#define MUSTER_WORKER_COLLECTIVE_TEST_LOST_MEMORY_H_

#include <sys/mman.h>

#include <cstdint>
#include <stdexcept>

namespace muster {

// For tests that lose a connection in the middle of messages: a rank that receives into ShortMemory
// loses it, and other messages of LongMemory::kBytes on that connection are not complete by then.

// Zeros that take no memory before something writes there.
class LongMemory {
 public:
  static constexpr int64_t kBytes = int64_t{2} << 30;

  LongMemory()
      : data_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (data_ == MAP_FAILED) throw std::runtime_error("no memory for a test");
  }
  ~LongMemory() { munmap(data_, kBytes); }
  LongMemory(const LongMemory&) = delete;
  LongMemory& operator=(const LongMemory&) = delete;

  void* data() const { return data_; }

 private:
  void* const data_;
};

// The kernel writes to the first bytes only.
class ShortMemory : public LongMemory {
 public:
  ShortMemory() {
    constexpr int64_t kWritten = int64_t{32} << 20;
    if (mprotect(static_cast<char*>(data()) + kWritten, kBytes - kWritten, PROT_NONE) != 0) {
      throw std::runtime_error("no memory for a test");
    }
  }
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_TEST_LOST_MEMORY_H_
