#include "worker/checkpoint/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/failpoint.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/checkpoint/aligned_memory.h"

namespace muster {
namespace {

const DirectFileSystem& SystemOf(const DirectFileOptions& options) {
  return options.system == nullptr ? DirectFileSystem::Real() : *options.system;
}

// The block that ends the file may end anywhere: its last part goes out as a page that is filled up
// with zeros, which the file is then cut off.
absl::Status WriteBlock(DirectFile& file, absl::string_view block, uint64_t at) {
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_block");
  const size_t tail = file.direct() ? block.size() % kDirectAlignment : 0;
  MUSTER_RETURN_IF_ERROR(file.Write(block.substr(0, block.size() - tail), at));
  if (tail == 0) return absl::OkStatus();
  alignas(kDirectAlignment) char page[kDirectAlignment] = {};
  std::memcpy(page, block.data() + block.size() - tail, tail);
  return file.Write(absl::string_view(page, sizeof(page)), at + block.size() - tail);
}

// Makes an empty file with room for `bytes` bytes.
absl::StatusOr<DirectFile> CreateFile(const DirectFileSystem& system, const std::string& path,
                                      uint64_t bytes, bool direct) {
  MUSTER_ASSIGN_OR_RETURN(DirectFile file,
                          DirectFile::Open(system, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC,
                                           direct && bytes > 0));
  // A disk that is too full says so before anything is written, and blocks that end the file in any
  // order do not wait for one another to extend it.
  const uint64_t rounded = DirectAlignedUp(bytes);
  if (bytes > 0 && system.allocate(file.fd(), rounded) != 0 && errno != EOPNOTSUPP &&
      errno != ENOSYS && errno != EINVAL) {
    return absl::ErrnoToStatus(errno,
                               absl::StrCat("cannot reserve ", rounded, " bytes for ", path));
  }
  return file;
}

// All blocks are written: gives the file its size and syncs it.
absl::Status EndFile(const DirectFileSystem& system, const DirectFile& file,
                     const std::string& path, uint64_t bytes) {
  if (ftruncate(file.fd(), static_cast<off_t>(bytes)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot set the size of ", path));
  }
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_sync");
  while (system.fsync(file.fd()) != 0) {
    if (errno == EINTR) continue;
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot sync ", path));
  }
  return absl::OkStatus();
}

void WaitForTurn(const DirectFileSystem& system, RateLimiter* limiter, size_t bytes) {
  if (limiter == nullptr) return;
  const absl::Duration wait = limiter->Reserve(static_cast<int64_t>(bytes));
  if (wait <= absl::ZeroDuration()) return;
  if (system.wait != nullptr) {
    system.wait(wait);
  } else {
    limiter->Wait(wait);
  }
}

// Before a block is written.
absl::Status CheckWanted(const DirectFileOptions& options, const std::string& path) {
  if (options.abandoned == nullptr || !options.abandoned->load()) return absl::OkStatus();
  return absl::CancelledError(absl::StrCat(path, ": nobody waits for it any more"));
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
absl::Status ReadBlock(const DirectFileSystem& system, DirectFile& direct, DirectFile& cached,
                       const std::string& path, char* to, size_t size, uint64_t at) {
  const bool from_cache = !direct.direct() || IsCached(cached.fd(), at, size);
  size_t done = 0;
  while (done < size) {
    // A direct read ends at a multiple of the alignment or at the end of the file; what comes after
    // one that was cut short anywhere else is read through the cache.
    const bool past_cache = !from_cache && direct.direct() && IsDirectAligned(done);
    const size_t rest = size - done;
    const size_t asked = past_cache ? DirectAlignedUp(rest) : rest;
    const ssize_t n =
        system.pread(past_cache ? direct.fd() : cached.fd(), to + done, asked, at + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && past_cache && (direct.GiveUpDirect() || !direct.direct())) {
      continue;
    }
    if (n < 0) return DirectIoError("read", path, at + done);
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(path, ": ends at byte ", at + done, ", but at least ",
                                              at + size, " bytes are expected"));
    }
    done += n;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DirectFileWritten> WriteDirectFile(const std::string& path,
                                                  absl::string_view contents,
                                                  const DirectFileOptions& options) {
  const DirectFileSystem& system = SystemOf(options);
  MUSTER_ASSIGN_OR_RETURN(
      DirectFile file, CreateFile(system, path, contents.size(), IsDirectAligned(contents.data())));
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
        WaitForTurn(system, options.limiter, block.size());
        MUSTER_RETURN_IF_ERROR(CheckWanted(options, path));
        return WriteBlock(file, block, at);
      },
      [&] { written.digest = DigestBytes(contents); }));
  MUSTER_RETURN_IF_ERROR(EndFile(system, file, path, contents.size()));
  written.direct = file.direct();
  return written;
}

struct DirectFileStream::State {
  State(const std::string& file_path, uint64_t file_bytes, const DirectFileOptions& file_options,
        DirectFile open_file)
      : path(file_path),
        bytes(file_bytes),
        options(file_options),
        calls(SystemOf(options)),
        file(std::move(open_file)) {}
  ~State() { Join(); }

  struct Block {
    AlignedMemory memory;
    uint64_t at = 0;
    size_t size = 0;
  };

  absl::Status WriteOut(const Block& block) {
    WaitForTurn(calls, options.limiter, block.size);
    MUSTER_RETURN_IF_ERROR(CheckWanted(options, path));
    return WriteBlock(file, absl::string_view(block.memory.data(), block.size), block.at);
  }

  // Of a thread: writes blocks until no more come.
  void Write() {
    while (true) {
      Block block;
      {
        MutexLock lock(&mu);
        while (full.empty() && !ended) changed.Wait(&mu);
        if (full.empty()) return;
        block = std::move(full.front());
        full.pop_front();
      }
      const absl::Status status = WriteOut(block);
      MutexLock lock(&mu);
      first.Update(status);
      idle.push_back(std::move(block.memory));
      changed.SignalAll();
    }
  }

  void Join() {
    {
      MutexLock lock(&mu);
      ended = true;
      changed.SignalAll();
    }
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  // Takes memory for the block that begins at `appended`.
  absl::Status Begin() {
    const size_t size = std::min<uint64_t>(options.block_bytes, bytes - appended);
    {
      MutexLock lock(&mu);
      while (first.ok() && idle.empty() && blocks > std::max(options.in_flight, 1)) {
        changed.Wait(&mu);
      }
      MUSTER_RETURN_IF_ERROR(first);
      if (!idle.empty()) {
        filling.memory = std::move(idle.back());
        idle.pop_back();
      } else {
        ++blocks;
      }
    }
    MUSTER_RETURN_IF_ERROR(filling.memory.Grow(DirectAlignedUp(size)));
    filling.at = appended;
    filling.size = 0;
    return absl::OkStatus();
  }

  // False: the system gives no more threads.
  bool StartThread() {
    try {
      threads.emplace_back([this] { Write(); });
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  // The block under way is full.
  absl::Status End() {
    written.blocks.xxh3.push_back(
        DigestBlock(absl::string_view(filling.memory.data(), filling.size)));
    Block block = std::exchange(filling, Block());
    // A thread for a single block would only cost time.
    if (bytes <= options.block_bytes) {
      const absl::Status status = WriteOut(block);
      MutexLock lock(&mu);
      first.Update(status);
      return first;
    }
    if (threads.size() < static_cast<size_t>(std::max(options.in_flight, 1)) && !StartThread() &&
        threads.empty()) {
      const absl::Status status = WriteOut(block);
      MutexLock lock(&mu);
      first.Update(status);
      return first;
    }
    MutexLock lock(&mu);
    full.push_back(std::move(block));
    changed.SignalAll();
    return first;
  }

  const std::string path;
  const uint64_t bytes;
  const DirectFileOptions options;
  const DirectFileSystem& calls;
  DirectFile file;
  Digester digester;
  DirectFileWritten written;
  uint64_t appended = 0;
  Block filling;   // its memory is there from its first byte on
  int blocks = 0;  // whose memory was taken
  Mutex mu;
  CondVar changed;
  std::deque<Block> full ABSL_GUARDED_BY(mu);
  std::vector<AlignedMemory> idle ABSL_GUARDED_BY(mu);
  absl::Status first ABSL_GUARDED_BY(mu);
  bool ended ABSL_GUARDED_BY(mu) = false;
  std::vector<std::thread> threads;
};

DirectFileStream::DirectFileStream(std::unique_ptr<State> state) : state_(std::move(state)) {}
DirectFileStream::~DirectFileStream() = default;

absl::StatusOr<std::unique_ptr<DirectFileStream>> DirectFileStream::Create(
    const std::string& path, uint64_t bytes, const DirectFileOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(DirectFile file, CreateFile(SystemOf(options), path, bytes, true));
  auto state = std::make_unique<State>(path, bytes, options, std::move(file));
  state->written.blocks.block_bytes = options.block_bytes;
  return absl::WrapUnique(new DirectFileStream(std::move(state)));
}

absl::Status DirectFileStream::Append(absl::string_view bytes) {
  State& state = *state_;
  if (bytes.size() > state.bytes - state.appended) {
    return absl::InvalidArgumentError(absl::StrCat(state.path, ": got more than the ", state.bytes,
                                                   " bytes that were announced"));
  }
  while (!bytes.empty()) {
    if (state.filling.memory.data() == nullptr) MUSTER_RETURN_IF_ERROR(state.Begin());
    const absl::string_view part = bytes.substr(0, state.options.block_bytes - state.filling.size);
    char* const to = state.filling.memory.data() + state.filling.size;
    std::memcpy(to, part.data(), part.size());
    // From the copy, which is in the processor's cache.
    state.digester.Update(absl::string_view(to, part.size()));
    state.filling.size += part.size();
    state.appended += part.size();
    bytes.remove_prefix(part.size());
    if (state.filling.size == state.options.block_bytes || state.appended == state.bytes) {
      MUSTER_RETURN_IF_ERROR(state.End());
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<DirectFileWritten> DirectFileStream::Finish() {
  State& state = *state_;
  state.Join();
  {
    MutexLock lock(&state.mu);
    MUSTER_RETURN_IF_ERROR(state.first);
  }
  if (state.appended != state.bytes) {
    return absl::InvalidArgumentError(absl::StrCat(state.path, ": got ", state.appended, " of the ",
                                                   state.bytes, " bytes that were announced"));
  }
  MUSTER_RETURN_IF_ERROR(EndFile(state.calls, state.file, state.path, state.bytes));
  state.written.digest = state.digester.Finish();
  state.written.direct = state.file.direct();
  return std::move(state.written);
}

absl::Status ReadDirectFile(
    const std::string& path, uint64_t bytes, const BlockDigests& blocks,
    const std::optional<FileRange>& range,
    absl::FunctionRef<absl::Status(uint64_t offset, absl::string_view block)> take,
    const DirectFileOptions& options) {
  const DirectFileSystem& system = SystemOf(options);
  const uint64_t block_bytes = blocks.block_bytes;
  if (!IsDirectAligned(block_bytes) || block_bytes == 0 ||
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
  MUSTER_ASSIGN_OR_RETURN(DirectFile direct,
                          DirectFile::Open(system, path, O_RDONLY | O_CLOEXEC, true));
  MUSTER_ASSIGN_OR_RETURN(DirectFile cached,
                          DirectFile::Open(system, path, O_RDONLY | O_CLOEXEC, false));
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
    if (options.place == nullptr) {
      MutexLock lock(&mu);
      if (!idle.empty()) {
        memory = std::move(idle.back());
        idle.pop_back();
      }
    }
    if (options.place == nullptr) MUSTER_RETURN_IF_ERROR(memory.Grow(DirectAlignedUp(size)));
    char* const to = options.place == nullptr ? memory.data() : options.place(at);
    MUSTER_RETURN_IF_ERROR(ReadBlock(system, direct, cached, path, to, size, at));
    const absl::string_view found(to, size);
    if (const uint64_t digest = DigestBlock(found); digest != blocks.xxh3[block]) {
      return absl::DataLossError(absl::StrFormat(
          "%s: is damaged: block %d of %d (bytes %d to %d) has the digest %016x, but the manifest "
          "says %016x; use an earlier checkpoint",
          path, block, blocks.xxh3.size(), at, at + size, digest, blocks.xxh3[block]));
    }
    MUSTER_RETURN_IF_ERROR(take(at, found));
    if (options.place != nullptr) return absl::OkStatus();
    MutexLock lock(&mu);
    idle.push_back(std::move(memory));
    return absl::OkStatus();
  };
  return ForEach(count, options.in_flight, read, [] {});
}

}  // namespace muster
