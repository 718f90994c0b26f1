#ifndef MUSTER_AGENT_MEMORY_READER_H_
#define MUSTER_AGENT_MEMORY_READER_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace muster::agent {

// The memory of a process, by its own addresses.
class MemoryReader {
 public:
  virtual ~MemoryReader() = default;

  // All `size` bytes at `address`, or false: not all of them can be read.
  virtual bool Read(uint64_t address, void* to, size_t size) const = 0;

  // The value at `address`; `*to` stays as it is if that cannot be read.
  template <typename T>
  bool ReadValue(uint64_t address, T* to) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return Read(address, to, sizeof(T));
  }
};

// Of a running process, as the kernel lets a debugger read it; the process need not be stopped, and
// nothing in it is touched. Thread-safe.
class ProcessMemory final : public MemoryReader {
 public:
  explicit ProcessMemory(pid_t pid) : pid_(pid) {}
  bool Read(uint64_t address, void* to, size_t size) const override;

 private:
  const pid_t pid_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MEMORY_READER_H_
