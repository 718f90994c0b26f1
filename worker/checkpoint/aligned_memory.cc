#include "worker/checkpoint/aligned_memory.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/memory_file.h"
#include "base/memory_left.h"
#include "base/units.h"

namespace muster {
namespace {

// The size of a huge page: sizes are multiples of it, so that growing leaves no small remainders.
constexpr size_t kUnit = size_t{2} << 20;

std::atomic<uint64_t> pinned_bytes{0};

// Returns the "ulimit -l" of this process.
std::string LockedMemoryLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return absl::StrCat(limit.rlim_cur / 1024, " KiB");
}

// Warns once per process, because later memory is slower for the same reason.
void WarnOfUnpinned(size_t bytes) {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  const size_t left = MemoryLeft();
  MUSTER_LOG(Warning)
      << "cannot pin " << HumanBytes(bytes)
      << " of the host's memory for a GPU, so that copies to and from it take longer, and keep "
         "threads of the host busy; free memory of this machine ("
      << (left == SIZE_MAX ? "unknown" : HumanBytes(left))
      << " left), or raise the limit of locked memory (ulimit -l, " << LockedMemoryLimit()
      << " now). Other memory that cannot be pinned is not mentioned again";
}

}  // namespace

const HostPinning* HostPinning::Cuda() {
  // Looked up at run time, since programs are built without CUDA's headers and run with and without
  // its libraries. `flags` 1: for all of its contexts.
  using Register = int (*)(void* data, size_t bytes, unsigned int flags);
  using Unregister = int (*)(void* data);
  using LastError = int (*)();
  static const HostPinning* const cuda = []() -> const HostPinning* {
    const auto pin = reinterpret_cast<Register>(dlsym(RTLD_DEFAULT, "cudaHostRegister"));
    const auto unpin = reinterpret_cast<Unregister>(dlsym(RTLD_DEFAULT, "cudaHostUnregister"));
    // A failure stays the thread's last error, which the next kernel launch would mistake for its
    // own.
    const auto forget = reinterpret_cast<LastError>(dlsym(RTLD_DEFAULT, "cudaGetLastError"));
    if (pin == nullptr || unpin == nullptr || forget == nullptr) return nullptr;
    return new HostPinning{.pin =
                               [pin, forget](void* data, size_t bytes) {
                                 if (pin(data, bytes, 1) == 0) return true;
                                 (void)forget();
                                 return false;
                               },
                           .unpin =
                               [unpin, forget](void* data) {
                                 if (unpin(data) != 0) (void)forget();
                               }};
  }();
  return cuda;
}

AlignedMemory::AlignedMemory(AlignedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)),
      pinned_(std::exchange(other.pinned_, nullptr)),
      unpinnable_(other.unpinnable_) {}

AlignedMemory& AlignedMemory::operator=(AlignedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  std::swap(pinned_, other.pinned_);
  std::swap(unpinnable_, other.unpinnable_);
  return *this;
}

void AlignedMemory::Pin(const HostPinning& pinning) {
  if (pinned_ != nullptr || unpinnable_ || data_ == nullptr) return;
  if (pinning.pin(data_, size_)) {
    pinned_ = &pinning;
    pinned_bytes += size_;
  } else {
    unpinnable_ = true;
    WarnOfUnpinned(size_);
  }
}

void AlignedMemory::Unpin() {
  if (pinned_ == nullptr) return;
  pinned_->unpin(data_);
  pinned_ = nullptr;
  pinned_bytes -= size_;
}

uint64_t AlignedMemory::PinnedBytes() { return pinned_bytes; }

AlignedMemory::~AlignedMemory() {
  Unpin();
  if (data_ != nullptr) munmap(data_, size_);
}

absl::StatusOr<AlignedMemory> AlignedMemory::OfFile(int fd) {
  AlignedMemory memory;
  memory.fd_ = fd;
  struct stat info;
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, "cannot examine a file in memory");
  const size_t bytes = static_cast<size_t>(info.st_size);
  if (bytes == 0) return memory;
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map a file in memory");
  memory.data_ = static_cast<char*>(mapped);
  memory.size_ = bytes;
  return memory;
}

absl::Status AlignedMemory::Reserve(size_t bytes) const {
  if (const absl::Status fits = CheckMemoryFileSize(bytes); !fits.ok()) return fits;
  if (const size_t left = MemoryLeft(); bytes - size_ > left) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this machine or its cgroup has ", left, " bytes left"));
  }
  int failed;
  do {
    failed = fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) return absl::ResourceExhaustedError(std::strerror(errno));
  return absl::OkStatus();
}

absl::Status AlignedMemory::Grow(size_t bytes) {
  if (bytes <= size_) return absl::OkStatus();
  const size_t rounded = bytes > SIZE_MAX - kUnit ? 0 : (bytes + kUnit - 1) / kUnit * kUnit;
  void* grown = MAP_FAILED;
  errno = ENOMEM;
  if (rounded > 0 && fd_ >= 0) {
    // Reserve now: if memory is missing when a page is first touched, the process gets a signal.
    if (const absl::Status reserved = Reserve(rounded); !reserved.ok()) {
      return absl::Status(reserved.code(), absl::StrCat("cannot get ", bytes,
                                                        " bytes of memory: ", reserved.message()));
    }
  }
  if (rounded > 0) {
    // Pinned pages cannot move.
    Unpin();
    const int flags = fd_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    grown = data_ == nullptr ? mmap(nullptr, rounded, PROT_READ | PROT_WRITE, flags, fd_, 0)
                             : mremap(data_, size_, rounded, MREMAP_MAYMOVE);
  }
  if (grown == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot get ", bytes, " bytes of memory: ", std::strerror(errno)));
  }
  // Only advice: small pages work, too.
  (void)madvise(grown, rounded, MADV_HUGEPAGE);
  data_ = static_cast<char*>(grown);
  size_ = rounded;
  return absl::OkStatus();
}

}  // namespace muster
