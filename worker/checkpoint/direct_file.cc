#include "worker/checkpoint/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/failpoint.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/checkpoint/aligned_memory.h"

namespace muster {
namespace {

const DirectFileSystem& RealSystem() {
  static const DirectFileSystem* const system = new DirectFileSystem;
  return *system;
}

const DirectFileSystem& SystemOf(const DirectFileOptions& options) {
  return options.system == nullptr ? RealSystem() : *options.system;
}

absl::Status FailedAt(absl::string_view what, const std::string& path, uint64_t offset) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path, " at byte ", offset));
}

uint64_t RoundUp(uint64_t number) {
  return (number + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

bool IsAligned(uint64_t number) { return number % kDirectAlignment == 0; }
bool IsAligned(const void* address) { return IsAligned(reinterpret_cast<uintptr_t>(address)); }

// An open file that turns to the page cache for good when the file system refuses direct I/O.
class File {
 public:
  // As open(2), direct if `direct`; not direct if the file system refuses.
  static absl::StatusOr<File> Open(const DirectFileSystem& system, const std::string& path,
                                   int flags, bool direct) {
    int fd = -1;
    if (direct) {
      fd = system.open(path.c_str(), flags | O_DIRECT, 0666);
      direct = fd >= 0;
      if (fd < 0 && errno != EINVAL && errno != EOPNOTSUPP) {
        return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
      }
    }
    if (fd < 0) fd = system.open(path.c_str(), flags, 0666);
    if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
    return File(fd, direct);
  }

  File(File&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), direct_(other.direct_.load(std::memory_order_relaxed)) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  bool direct() const { return direct_.load(std::memory_order_relaxed); }

  // After EINVAL: some file systems refuse at the first transfer only. Whether to try again.
  bool GiveUpDirect() {
    if (!direct()) return false;
    const int flags = fcntl(fd_, F_GETFL);
    if (flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) return false;
    direct_.store(false, std::memory_order_relaxed);
    return true;
  }

 private:
  File(int fd, bool direct) : fd_(fd), direct_(direct) {}

  int fd_;
  std::atomic<bool> direct_;
};

// Writes all of `bytes`, which is aligned if the file is direct, at `at`.
absl::Status WriteAll(const DirectFileSystem& system, File& file, const std::string& path,
                      absl::string_view bytes, uint64_t at) {
  size_t done = 0;
  while (done < bytes.size()) {
    // Whether another thread has given up direct I/O meanwhile does not change what EINVAL means.
    const bool direct = file.direct();
    const ssize_t n = system.pwrite(file.fd(), bytes.data() + done, bytes.size() - done, at + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && direct && (file.GiveUpDirect() || !file.direct())) continue;
    if (n < 0) return FailedAt("write", path, at + done);
    if (n == 0) {
      errno = ENOSPC;
      return FailedAt("write", path, at + done);
    }
    done += n;
    // A short write may end anywhere; the next one begins where direct I/O can.
    if (done < bytes.size() && file.direct()) {
      const size_t before = done - n;
      done -= done % kDirectAlignment;
      // Less than can be repeated from there: the file system has no room, or does not mean it.
      if (done <= before && !file.GiveUpDirect() && file.direct()) {
        errno = ENOSPC;
        return FailedAt("write", path, at + done);
      }
    }
  }
  return absl::OkStatus();
}

// The block that ends the file may end anywhere: its last part goes out as a page that is filled up
// with zeros, which the file is then cut off.
absl::Status WriteBlock(const DirectFileSystem& system, File& file, const std::string& path,
                        absl::string_view block, uint64_t at) {
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_block");
  const size_t tail = file.direct() ? block.size() % kDirectAlignment : 0;
  MUSTER_RETURN_IF_ERROR(WriteAll(system, file, path, block.substr(0, block.size() - tail), at));
  if (tail == 0) return absl::OkStatus();
  alignas(kDirectAlignment) char page[kDirectAlignment] = {};
  std::memcpy(page, block.data() + block.size() - tail, tail);
  return WriteAll(system, file, path, absl::string_view(page, sizeof(page)),
                  at + block.size() - tail);
}

// Calls `work` for each number below `count` from `threads` threads until one call fails, and
// `meanwhile` from this one. Returns when all have ended.
absl::Status ForEach(uint64_t count, int threads, absl::FunctionRef<absl::Status(uint64_t)> work,
                     absl::FunctionRef<void()> meanwhile) {
  std::atomic<uint64_t> next{0};
  Mutex mu;
  absl::Status first;
  const auto run = [&] {
    while (true) {
      const uint64_t i = next.fetch_add(1);
      if (i >= count) return;
      if (const absl::Status status = work(i); !status.ok()) {
        next.store(count);
        MutexLock lock(&mu);
        first.Update(status);
        return;
      }
    }
  };
  threads = static_cast<int>(std::min<uint64_t>(std::max(threads, 1), count));
  if (threads <= 1) {
    meanwhile();
    run();
    return first;
  }
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) running.emplace_back(run);
  meanwhile();
  for (std::thread& thread : running) thread.join();
  return first;
}

uint64_t BlocksOf(uint64_t bytes, uint64_t block_bytes) {
  return bytes / block_bytes + (bytes % block_bytes == 0 ? 0 : 1);
}

// Whether all of the range is in the page cache, from where it comes faster than from the disk.
bool IsCached(int fd, uint64_t at, size_t size) {
  void* const address = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, at);
  if (address == MAP_FAILED) return false;
  std::vector<unsigned char> resident(size / sysconf(_SC_PAGESIZE) + 1, 1);
  const bool known = mincore(address, size, resident.data()) == 0;
  munmap(address, size);
  return known && std::all_of(resident.begin(), resident.end(),
                              [](unsigned char page) { return (page & 1) != 0; });
}

// Reads `size` bytes at `at`, both fit for direct I/O but for the end of the file.
absl::Status ReadBlock(const DirectFileSystem& system, File& direct, File& cached,
                       const std::string& path, char* to, size_t size, uint64_t at) {
  const bool from_cache = !direct.direct() || IsCached(cached.fd(), at, size);
  size_t done = 0;
  while (done < size) {
    // A direct read ends at a multiple of the alignment or at the end of the file; what comes after
    // one that was cut short anywhere else is read through the cache.
    const bool past_cache = !from_cache && direct.direct() && IsAligned(done);
    const size_t rest = size - done;
    const size_t asked = past_cache ? RoundUp(rest) : rest;
    const ssize_t n =
        system.pread(past_cache ? direct.fd() : cached.fd(), to + done, asked, at + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && past_cache && (direct.GiveUpDirect() || !direct.direct())) {
      continue;
    }
    if (n < 0) return FailedAt("read", path, at + done);
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(path, ": ends at byte ", at + done, ", but at least ",
                                              at + size, " bytes are expected"));
    }
    done += n;
  }
  return absl::OkStatus();
}

}  // namespace

DirectFileSystem::DirectFileSystem()
    : open([](const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }),
      allocate([](int fd, off_t size) { return ::fallocate(fd, 0, 0, size); }),
      wait([](absl::Duration duration) {
        Notification().WaitForNotificationWithTimeout(duration);
      }) {}

absl::StatusOr<DirectFileWritten> WriteDirectFile(const std::string& path,
                                                  absl::string_view contents,
                                                  const DirectFileOptions& options) {
  const DirectFileSystem& system = SystemOf(options);
  MUSTER_ASSIGN_OR_RETURN(File file,
                          File::Open(system, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC,
                                     IsAligned(contents.data()) && !contents.empty()));
  // A disk that is too full says so before anything is written, and blocks that end the file in any
  // order do not wait for one another to extend it.
  const uint64_t rounded = RoundUp(contents.size());
  if (!contents.empty() && system.allocate(file.fd(), rounded) != 0 && errno != EOPNOTSUPP &&
      errno != ENOSYS && errno != EINVAL) {
    return absl::ErrnoToStatus(errno,
                               absl::StrCat("cannot reserve ", rounded, " bytes for ", path));
  }
  DirectFileWritten written;
  written.blocks.block_bytes = options.block_bytes;
  const uint64_t count = BlocksOf(contents.size(), options.block_bytes);
  written.blocks.xxh3.resize(count);
  MUSTER_RETURN_IF_ERROR(ForEach(
      count, options.in_flight,
      [&](uint64_t i) {
        const uint64_t at = i * options.block_bytes;
        const absl::string_view block = contents.substr(at, options.block_bytes);
        written.blocks.xxh3[i] = DigestBlock(block);
        if (options.limiter != nullptr) {
          const absl::Duration wait = options.limiter->Reserve(block.size());
          if (wait > absl::ZeroDuration()) system.wait(wait);
        }
        return WriteBlock(system, file, path, block, at);
      },
      [&] { written.digest = DigestBytes(contents); }));
  if (ftruncate(file.fd(), contents.size()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot set the size of ", path));
  }
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_sync");
  while (system.fsync(file.fd()) != 0) {
    if (errno == EINTR) continue;
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot sync ", path));
  }
  written.direct = file.direct();
  return written;
}

absl::Status ReadDirectFile(
    const std::string& path, uint64_t bytes, const BlockDigests& blocks,
    const std::optional<FileRange>& range,
    absl::FunctionRef<absl::Status(uint64_t offset, absl::string_view block)> take,
    const DirectFileOptions& options) {
  const DirectFileSystem& system = SystemOf(options);
  const uint64_t block_bytes = blocks.block_bytes;
  if (!IsAligned(block_bytes) || block_bytes == 0 ||
      blocks.xxh3.size() != BlocksOf(bytes, block_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", blocks.xxh3.size(),
                                                   " digests of blocks of ", block_bytes,
                                                   " bytes do not fit ", bytes, " bytes"));
  }
  const FileRange wanted = range.value_or(FileRange{0, bytes});
  if (wanted.begin > wanted.end || wanted.end > bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": has no bytes ", wanted.begin, " to ", wanted.end, ", only ", bytes));
  }
  if (wanted.begin == wanted.end) return absl::OkStatus();
  MUSTER_ASSIGN_OR_RETURN(File direct, File::Open(system, path, O_RDONLY | O_CLOEXEC, true));
  MUSTER_ASSIGN_OR_RETURN(File cached, File::Open(system, path, O_RDONLY | O_CLOEXEC, false));
  struct stat info;
  if (fstat(cached.fd(), &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot examine ", path));
  }
  if (static_cast<uint64_t>(info.st_size) != bytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": has ", info.st_size, " bytes, but the manifest says ", bytes));
  }
  const uint64_t first = wanted.begin / block_bytes;
  const uint64_t count = BlocksOf(wanted.end, block_bytes) - first;
  // Buffers that no thread uses; never more of them than threads.
  Mutex mu;
  std::vector<AlignedMemory> idle;
  const auto read = [&](uint64_t i) -> absl::Status {
    const uint64_t block = first + i;
    const uint64_t at = block * block_bytes;
    const size_t size = std::min(block_bytes, bytes - at);
    AlignedMemory memory;
    {
      MutexLock lock(&mu);
      if (!idle.empty()) {
        memory = std::move(idle.back());
        idle.pop_back();
      }
    }
    MUSTER_RETURN_IF_ERROR(memory.Grow(RoundUp(size)));
    MUSTER_RETURN_IF_ERROR(ReadBlock(system, direct, cached, path, memory.data(), size, at));
    const absl::string_view found(memory.data(), size);
    if (const uint64_t digest = DigestBlock(found); digest != blocks.xxh3[block]) {
      return absl::DataLossError(absl::StrFormat(
          "%s: is damaged: block %d of %d (bytes %d to %d) has the digest %016x, but the manifest "
          "says %016x; use an earlier checkpoint",
          path, block, blocks.xxh3.size(), at, at + size, digest, blocks.xxh3[block]));
    }
    MUSTER_RETURN_IF_ERROR(take(at, found));
    MutexLock lock(&mu);
    idle.push_back(std::move(memory));
    return absl::OkStatus();
  };
  return ForEach(count, options.in_flight, read, [] {});
}

}  // namespace muster
