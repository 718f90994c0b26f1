#ifndef MUSTER_AGENT_MEMORY_READER_H_
#define MUSTER_AGENT_MEMORY_READER_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace muster::agent {

// Reads the memory of a process, by the process's addresses.
class MemoryReader {
 public:
  virtual ~MemoryReader() = default;

  // Reads all `size` bytes at `address`; returns false if not all of them can be read.
  virtual bool Read(uint64_t address, void* to, size_t size) const = 0;

  // Reads the value at `address`; `*to` stays unchanged if that cannot be read.
  template <typename T>
  bool ReadValue(uint64_t address, T* to) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return Read(address, to, sizeof(T));
  }
};

// Reads the memory of a running process, as the kernel lets a debugger read it; the process need
// not be stopped, and nothing in it is changed. Thread-safe.
class ProcessMemory final : public MemoryReader {
 public:
  explicit ProcessMemory(pid_t pid) : pid_(pid) {}
  bool Read(uint64_t address, void* to, size_t size) const override;

 private:
  const pid_t pid_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MEMORY_READER_H_
