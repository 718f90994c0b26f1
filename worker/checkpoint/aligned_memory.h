#ifndef MUSTER_WORKER_CHECKPOINT_ALIGNED_MEMORY_H_
#define MUSTER_WORKER_CHECKPOINT_ALIGNED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// Locks pages in memory, so that a GPU copies to and from them at full speed.
struct HostPinning {
  std::function<bool(void* data, size_t bytes)> pin;
  std::function<void(void* data)> unpin;

  // Returns the pinning of the CUDA that this process has loaded; null if it has none. Thread-safe.
  static const HostPinning* Cuda();
};

// Memory in pages of its own, as direct I/O needs it: begins at a page boundary, is zero at first,
// and uses huge pages where the kernel has them. Movable. Not thread-safe.
class AlignedMemory {
 public:
  AlignedMemory() = default;
  // Maps a memory file (memfd) that may grow, with its present contents; other processes see the
  // same bytes. Borrows `fd`. Growing reserves the memory.
  static absl::StatusOr<AlignedMemory> OfFile(int fd);
  AlignedMemory(AlignedMemory&& other) noexcept;
  AlignedMemory& operator=(AlignedMemory&& other) noexcept;
  ~AlignedMemory();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  absl::string_view view() const { return absl::string_view(data_, size_); }

  // Makes the memory at least `bytes` large. Its contents stay, possibly at another address.
  // Returns RESOURCE_EXHAUSTED, and changes nothing, if the system does not have that much memory.
  absl::Status Grow(size_t bytes);

  // Pins the memory until it grows. Borrows `pinning`. If pinning fails, the memory stays unpinned,
  // which is slower, and pinning is not tried again; the first failure in a process is logged as a
  // warning. Does nothing if the memory is pinned already, or empty.
  void Pin(const HostPinning& pinning);

  // Returns the bytes that all objects of this process have pinned at the moment. Thread-safe.
  static uint64_t PinnedBytes();

 private:
  void Unpin();

  // Reserves the memory of the file.
  absl::Status Reserve(size_t bytes) const;

  char* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
  const HostPinning* pinned_ = nullptr;
  bool unpinnable_ = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_ALIGNED_MEMORY_H_
