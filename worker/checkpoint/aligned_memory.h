#ifndef MUSTER_WORKER_CHECKPOINT_ALIGNED_MEMORY_H_
#define MUSTER_WORKER_CHECKPOINT_ALIGNED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// How pages are locked in memory, so that a GPU copies to and from them at full speed.
struct HostPinning {
  std::function<bool(void* data, size_t bytes)> pin;
  std::function<void(void* data)> unpin;

  // That of the CUDA that this process has loaded; null: it has none. Thread-safe.
  static const HostPinning* Cuda();
};

// Memory of its own pages, as direct I/O needs it: begins at a page, zero at first, in huge pages
// where the kernel has them. Movable. Not thread-safe.
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

  // Makes it at least `bytes` large. What it holds stays, possibly at another address.
  // RESOURCE_EXHAUSTED if the system has no such memory; nothing changes then.
  absl::Status Grow(size_t bytes);

  // Pins it until it grows. Borrows `pinning`. Where that fails it stays as it is, which is slower,
  // and is not tried again; the first time in a process is a warning in the log. Nothing happens if
  // it is pinned, or empty.
  void Pin(const HostPinning& pinning);

  // What all objects of this process have pinned at the moment. Thread-safe.
  static uint64_t PinnedBytes();

 private:
  void Unpin();

  // Of the file.
  absl::Status Reserve(size_t bytes) const;

  char* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
  const HostPinning* pinned_ = nullptr;
  bool unpinnable_ = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_ALIGNED_MEMORY_H_
