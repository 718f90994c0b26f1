#include "worker/checkpoint/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

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
#include "worker/checkpoint/cached_pages.h"
#include "worker/checkpoint/direct_pieces.h"
#include "worker/checkpoint/for_each.h"
#include "worker/checkpoint/read_error.h"

namespace muster {
namespace {

// The number of bytes that are digested and then copied while they are still in the core's cache.
constexpr size_t kCachedBytes = size_t{64} << 10;

const DirectFileSystem& SystemOf(const DirectFileOptions& options) {
  return options.system == nullptr ? DirectFileSystem::Real() : *options.system;
}

absl::Status BlockFailpoint() {
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_block");
  return absl::OkStatus();
}

// Writes a block. The last block of the file may end anywhere: its last part is written as a page
// that is filled up with zeros, and the file is truncated afterwards.
absl::Status WriteBlock(DirectFile& file, absl::string_view block, uint64_t at) {
  MUSTER_RETURN_IF_ERROR(BlockFailpoint());
  const size_t tail = file.direct() ? block.size() % kDirectAlignment : 0;
  MUSTER_RETURN_IF_ERROR(file.Write(block.substr(0, block.size() - tail), at));
  if (tail == 0) return absl::OkStatus();
  alignas(kDirectAlignment) char page[kDirectAlignment] = {};
  std::memcpy(page, block.data() + block.size() - tail, tail);
  return file.Write(absl::string_view(page, sizeof(page)), at + block.size() - tail);
}

// Makes an empty file with room for `bytes` bytes.
absl::StatusOr<DirectFile> CreateFile(const std::string& path, uint64_t bytes, bool direct,
                                      const DirectFileOptions& options) {
  const DirectFileSystem& system = SystemOf(options);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
  MUSTER_ASSIGN_OR_RETURN(DirectFile file,
                          DirectFile::Open(system, path, kFlags, direct && bytes > 0));
  if (IsInMemory(file.fd(), options)) {
    (void)file.GiveUpDirect();
    // Do not reserve: reserved pages would be looked up once more when they are written.
    return file;
  }
  // With reserved room, a full disk is found before anything is written, and blocks that extend the
  // file in any order do not wait for one another.
  const uint64_t rounded = DirectAlignedUp(bytes);
  if (bytes > 0 && TEMP_FAILURE_RETRY(system.allocate(file.fd(), rounded)) != 0 &&
      errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
    return absl::ErrnoToStatus(errno,
                               absl::StrCat("cannot reserve ", rounded, " bytes for ", path));
  }
  return file;
}

// After all blocks are written, gives the file its size and syncs it.
absl::Status EndFile(const DirectFileSystem& system, const DirectFile& file,
                     const std::string& path, uint64_t bytes) {
  if (TEMP_FAILURE_RETRY(ftruncate(file.fd(), static_cast<off_t>(bytes))) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot set the size of ", path));
  }
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_sync");
  if (TEMP_FAILURE_RETRY(system.fsync(file.fd())) != 0) {
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

// Must be called before a block is written. Returns CANCELLED if the file is abandoned.
absl::Status CheckWanted(const DirectFileOptions& options, const std::string& path) {
  if (options.abandoned == nullptr || !options.abandoned->load()) return absl::OkStatus();
  return absl::CancelledError(
      absl::StrCat(path, ": cancelled, because nothing waits for it any more"));
}

// Must be called after a block is written.
void TellWrote(const DirectFileOptions& options, uint64_t bytes) {
  if (options.wrote != nullptr) options.wrote(bytes);
}

uint64_t BlocksOf(uint64_t bytes, uint64_t block_bytes) {
  return bytes / block_bytes + (bytes % block_bytes == 0 ? 0 : 1);
}

// Bytes that lie in several places of memory, in order.
class Parts {
 public:
  explicit Parts(absl::Span<const absl::string_view> parts) : parts_(parts) {
    ends_.reserve(parts.size());
    for (const absl::string_view part : parts) ends_.push_back(bytes_ += part.size());
  }

  uint64_t bytes() const { return bytes_; }

  // Calls `take` for the pieces of a range, in order, none larger than `most`, until it fails.
  absl::Status Take(const FileRange& range, size_t most,
                    absl::FunctionRef<absl::Status(absl::string_view)> take) const {
    uint64_t at = range.begin;
    for (size_t i = PartAt(at); at < range.end; ++i) {
      const uint64_t begin = ends_[i] - parts_[i].size();
      for (const uint64_t end = std::min(ends_[i], range.end); at < end;) {
        const size_t size = std::min<uint64_t>(end - at, most);
        MUSTER_RETURN_IF_ERROR(take(parts_[i].substr(at - begin, size)));
        at += size;
      }
    }
    return absl::OkStatus();
  }

  // Returns a range, which is not empty, as one piece, if it is one.
  std::optional<absl::string_view> Whole(const FileRange& range) const {
    const size_t i = PartAt(range.begin);
    if (range.end > ends_[i]) return std::nullopt;
    return parts_[i].substr(range.begin - (ends_[i] - parts_[i].size()), range.end - range.begin);
  }

 private:
  size_t PartAt(uint64_t at) const {
    return std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin();
  }

  const absl::Span<const absl::string_view> parts_;
  std::vector<uint64_t> ends_;
  uint64_t bytes_ = 0;
};

FileRange BlockAt(uint64_t i, uint64_t block_bytes, uint64_t bytes) {
  return {.begin = i * block_bytes, .end = std::min((i + 1) * block_bytes, bytes)};
}

// Memory for blocks, which threads borrow.
class BlockBuffers {
 public:
  absl::StatusOr<AlignedMemory> Take(size_t bytes) {
    AlignedMemory memory;
    {
      MutexLock lock(&mu_);
      if (!idle_.empty()) {
        memory = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    MUSTER_RETURN_IF_ERROR(memory.Grow(DirectAlignedUp(bytes)));
    return memory;
  }
  void GiveBack(AlignedMemory memory) {
    MutexLock lock(&mu_);
    idle_.push_back(std::move(memory));
  }

 private:
  Mutex mu_;
  std::vector<AlignedMemory> idle_ ABSL_GUARDED_BY(mu_);
};

// Writes blocks from several threads while this one digests the whole.
absl::Status WritePastCache(DirectFile& file, const Parts& parts, const DirectFileOptions& options,
                            DirectFileWritten* written) {
  const DirectFileSystem& system = SystemOf(options);
  const uint64_t count = written->blocks.xxh3.size();
  const auto in_place = [&](const FileRange& range) -> std::optional<absl::string_view> {
    const std::optional<absl::string_view> whole = parts.Whole(range);
    return whole.has_value() && IsDirectAligned(whole->data()) ? whole : std::nullopt;
  };
  bool copies = false;
  for (uint64_t i = 0; i < count && !copies; ++i) {
    copies = !in_place(BlockAt(i, options.block_bytes, parts.bytes())).has_value();
  }
  BlockBuffers buffers;
  const auto write = [&](uint64_t i) -> absl::Status {
    const FileRange range = BlockAt(i, options.block_bytes, parts.bytes());
    const auto write_out = [&](absl::string_view block) -> absl::Status {
      WaitForTurn(system, options.limiter, block.size());
      MUSTER_RETURN_IF_ERROR(CheckWanted(options, file.path()));
      MUSTER_RETURN_IF_ERROR(WriteBlock(file, block, range.begin));
      TellWrote(options, block.size());
      return absl::OkStatus();
    };
    if (const std::optional<absl::string_view> block = in_place(range); block.has_value()) {
      written->blocks.xxh3[i] = DigestBlock(*block);
      return write_out(*block);
    }
    const size_t size = range.end - range.begin;
    MUSTER_ASSIGN_OR_RETURN(AlignedMemory memory, buffers.Take(size));
    BlockDigester digester;
    char* to = memory.data();
    MUSTER_RETURN_IF_ERROR(parts.Take(range, kCachedBytes, [&](absl::string_view piece) {
      std::memcpy(to, piece.data(), piece.size());
      digester.Update(absl::string_view(to, piece.size()));
      to += piece.size();
      return absl::OkStatus();
    }));
    written->blocks.xxh3[i] = digester.Finish();
    MUSTER_RETURN_IF_ERROR(write_out(absl::string_view(memory.data(), size)));
    buffers.GiveBack(std::move(memory));
    return absl::OkStatus();
  };
  const auto digest = [&] {
    Digester digester;
    (void)parts.Take({.begin = 0, .end = parts.bytes()}, parts.bytes(),
                     [&](absl::string_view piece) {
                       digester.Update(piece);
                       return absl::OkStatus();
                     });
    written->digest = digester.Finish();
  };
  return ForEach(
      count, {.threads = std::max(options.in_flight, 1) + (copies ? 1 : 0), .meanwhile = digest},
      write);
}

// Writes a range that is not direct from the memory of its bytes. Small pieces are joined.
absl::Status WritePieces(DirectFile& file, const Parts& parts, const FileRange& range,
                         std::string* gathered) {
  MUSTER_RETURN_IF_ERROR(BlockFailpoint());
  uint64_t at = range.begin;
  const auto write = [&](absl::string_view bytes) -> absl::Status {
    if (!bytes.empty()) MUSTER_RETURN_IF_ERROR(file.Write(bytes, at));
    at += bytes.size();
    return absl::OkStatus();
  };
  gathered->clear();
  MUSTER_RETURN_IF_ERROR(
      parts.Take(range, range.end - range.begin, [&](absl::string_view piece) -> absl::Status {
        const bool small = piece.size() < kCachedBytes;
        if (small) absl::StrAppend(gathered, piece);
        if (small && gathered->size() < kCachedBytes) return absl::OkStatus();
        MUSTER_RETURN_IF_ERROR(write(*gathered));
        gathered->clear();
        return small ? absl::OkStatus() : write(piece);
      }));
  return write(*gathered);
}

// A file system accepts a file's bytes from one thread at a time, and lets others spin, so this
// thread writes, and another one digests.
absl::Status WriteThroughCache(DirectFile& file, const Parts& parts,
                               const DirectFileOptions& options, DirectFileWritten* written) {
  const DirectFileSystem& system = SystemOf(options);
  const uint64_t count = written->blocks.xxh3.size();
  std::atomic<bool> failed{false};
  const auto write = [&]() -> absl::Status {
    std::string gathered;
    for (uint64_t i = 0; i < count; ++i) {
      const FileRange range = BlockAt(i, options.block_bytes, parts.bytes());
      WaitForTurn(system, options.limiter, range.end - range.begin);
      absl::Status status = CheckWanted(options, file.path());
      if (status.ok()) status = WritePieces(file, parts, range, &gathered);
      if (status.ok()) {
        TellWrote(options, range.end - range.begin);
        continue;
      }
      failed = true;
      return status;
    }
    return absl::OkStatus();
  };
  const auto digest = [&] {
    Digester digester;
    BlockDigester of_block;
    for (uint64_t i = 0; i < count && !failed; ++i) {
      (void)parts.Take(BlockAt(i, options.block_bytes, parts.bytes()), kCachedBytes,
                       [&](absl::string_view piece) {
                         digester.Update(piece);
                         of_block.Update(piece);
                         return absl::OkStatus();
                       });
      written->blocks.xxh3[i] = of_block.Finish();
    }
    written->digest = digester.Finish();
  };
  // A thread for a single block would only cost time.
  if (count > 1) {
    if (std::optional<std::thread> thread = TryStartThread(digest); thread.has_value()) {
      const absl::Status status = write();
      thread->join();
      return status;
    }
  }
  digest();
  return write();
}

absl::StatusOr<DirectFileWritten> WriteParts(const std::string& path, const Parts& parts,
                                             bool direct, const DirectFileOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(DirectFile file, CreateFile(path, parts.bytes(), direct, options));
  DirectFileWritten written;
  written.blocks.block_bytes = options.block_bytes;
  written.blocks.xxh3.resize(BlocksOf(parts.bytes(), options.block_bytes));
  MUSTER_RETURN_IF_ERROR(file.direct() ? WritePastCache(file, parts, options, &written)
                                       : WriteThroughCache(file, parts, options, &written));
  MUSTER_RETURN_IF_ERROR(EndFile(SystemOf(options), file, path, parts.bytes()));
  written.direct = file.direct();
  return written;
}

// Reads `size` bytes at `at`, both suitable for direct I/O except at the end of the file.
absl::Status ReadBlock(const DirectFileSystem& system, DirectFile& direct, DirectFile& cached,
                       const CachedPages& pages, const std::string& path, char* to, size_t size,
                       uint64_t at) {
  const bool from_cache = !direct.direct() || pages.Has(at, size);
  size_t done = 0;
  while (done < size) {
    // A direct read ends at a multiple of the alignment or at the end of the file; if it ends
    // anywhere else, the rest is read through the cache.
    const bool past_cache = !from_cache && direct.direct() && IsDirectAligned(done);
    const size_t rest = size - done;
    const size_t asked = past_cache ? DirectAlignedUp(rest) : rest;
    const ssize_t n =
        system.pread(past_cache ? direct.fd() : cached.fd(), to + done, asked, at + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && past_cache && (direct.GiveUpDirect() || !direct.direct())) {
      continue;
    }
    if (n < 0) {
      return ReadError(errno, absl::StrCat("cannot read ", path, " at byte ", at + done));
    }
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(path, ": ends at byte ", at + done, ", but at least ",
                                              at + size, " bytes are expected"));
    }
    done += n;
  }
  return absl::OkStatus();
}

}  // namespace

bool IsInMemory(int fd, const DirectFileOptions& options) {
  if (options.system != nullptr) return false;
  struct statfs info;
  if (fstatfs(fd, &info) != 0) return false;
  return info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC;
}

absl::StatusOr<DirectFileWritten> WriteDirectFile(const std::string& path,
                                                  absl::string_view contents,
                                                  const DirectFileOptions& options) {
  return WriteParts(path, Parts(absl::MakeConstSpan(&contents, 1)),
                    IsDirectAligned(contents.data()), options);
}

absl::StatusOr<DirectFileWritten> WriteDirectPieces(const std::string& path,
                                                    absl::Span<const absl::string_view> pieces,
                                                    const DirectFileOptions& options) {
  return WriteParts(path, Parts(pieces), /*direct=*/true, options);
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
    // Each block has its own element, so no lock is needed.
    written.blocks.xxh3[block.at / options.block_bytes] =
        DigestBlock(absl::string_view(block.memory.data(), block.size));
    WaitForTurn(calls, options.limiter, block.size);
    MUSTER_RETURN_IF_ERROR(CheckWanted(options, path));
    MUSTER_RETURN_IF_ERROR(
        WriteBlock(file, absl::string_view(block.memory.data(), block.size), block.at));
    TellWrote(options, block.size);
    return absl::OkStatus();
  }

  // The function of a thread: writes blocks until no more come.
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
    if (options.pinning != nullptr) filling.memory.Pin(*options.pinning);
    filling.at = appended;
    filling.size = 0;
    return absl::OkStatus();
  }

  // Returns false if the system gives no more threads.
  bool StartThread() {
    if (calls.gives_thread != nullptr && !calls.gives_thread()) return false;
    std::optional<std::thread> thread = TryStartThread([this] { Write(); });
    if (thread.has_value()) threads.push_back(*std::move(thread));
    return thread.has_value();
  }

  // For a file that is not direct, threads would wait for one another.
  size_t most_threads() const {
    return file.direct() ? static_cast<size_t>(std::max(options.in_flight, 1)) : 1;
  }

  // Ends the block under way, which is full.
  absl::Status End() {
    Block block = std::exchange(filling, Block());
    // A thread for a single block would only cost time.
    if (bytes <= options.block_bytes) {
      const absl::Status status = WriteOut(block);
      MutexLock lock(&mu);
      first.Update(status);
      return first;
    }
    if (threads.size() < most_threads() && !StartThread() && threads.empty()) {
      const absl::Status status = WriteOut(block);
      MutexLock lock(&mu);
      first.Update(status);
      // Give the memory back here, because no thread does, and Begin() waits for a block beyond
      // in_flight.
      idle.push_back(std::move(block.memory));
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
  Block filling;   // has memory once its first byte arrives
  int blocks = 0;  // number of blocks whose memory was allocated
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
  MUSTER_ASSIGN_OR_RETURN(DirectFile file, CreateFile(path, bytes, /*direct=*/true, options));
  auto state = std::make_unique<State>(path, bytes, options, std::move(file));
  state->written.blocks.block_bytes = options.block_bytes;
  state->written.blocks.xxh3.resize(BlocksOf(bytes, options.block_bytes));
  return absl::WrapUnique(new DirectFileStream(std::move(state)));
}

absl::Status DirectFileStream::Append(absl::string_view bytes) {
  return AppendBy(bytes.size(), [bytes](char* to, uint64_t offset, size_t size) {
    std::memcpy(to, bytes.data() + offset, size);
  });
}

absl::Status DirectFileStream::AppendBy(
    uint64_t bytes, absl::FunctionRef<void(char* to, uint64_t offset, size_t size)> fill) {
  State& state = *state_;
  if (bytes > state.bytes - state.appended) {
    return absl::InvalidArgumentError(absl::StrCat(state.path, ": got more than the ", state.bytes,
                                                   " bytes that were announced"));
  }
  for (uint64_t done = 0; done < bytes;) {
    if (state.filling.memory.data() == nullptr) MUSTER_RETURN_IF_ERROR(state.Begin());
    const size_t part =
        std::min<uint64_t>(bytes - done, state.options.block_bytes - state.filling.size);
    char* const to = state.filling.memory.data() + state.filling.size;
    fill(to, done, part);
    // Digest the copy, which is in the processor's cache.
    state.digester.Update(absl::string_view(to, part));
    state.filling.size += part;
    state.appended += part;
    done += part;
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

namespace {

// The blocks that a range touches.
struct BlockRun {
  uint64_t first = 0;
  uint64_t count = 0;
};

absl::StatusOr<BlockRun> BlocksIn(const std::string& path, uint64_t bytes,
                                  const BlockDigests& blocks,
                                  const std::optional<FileRange>& range) {
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
  if (wanted.begin == wanted.end) return BlockRun();
  const uint64_t first = wanted.begin / block_bytes;
  return BlockRun{.first = first, .count = BlocksOf(wanted.end, block_bytes) - first};
}

absl::Status CheckBlock(const std::string& path, const BlockDigests& blocks, uint64_t block,
                        absl::string_view found) {
  const uint64_t digest = DigestBlock(found), at = block * blocks.block_bytes;
  if (digest == blocks.xxh3[block]) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "%s: is damaged: block %d of %d (bytes %d to %d) has the digest %016x, but the manifest "
      "says %016x; use an earlier checkpoint",
      path, block, blocks.xxh3.size(), at, at + found.size(), digest, blocks.xxh3[block]));
}

}  // namespace

absl::Status ReadDirectFile(
    const std::string& path, uint64_t bytes, const BlockDigests& blocks,
    const std::optional<FileRange>& range,
    absl::FunctionRef<absl::Status(uint64_t offset, absl::string_view block)> take,
    const DirectFileOptions& options) {
  const DirectFileSystem& system = SystemOf(options);
  // O_NONBLOCK: a pipe that has the name of a file is not waited for; it has another size.
  constexpr int kReads = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  const uint64_t block_bytes = blocks.block_bytes;
  MUSTER_ASSIGN_OR_RETURN(const BlockRun run, BlocksIn(path, bytes, blocks, range));
  if (run.count == 0) return absl::OkStatus();
  MUSTER_ASSIGN_OR_RETURN(DirectFile cached, DirectFile::Open(system, path, kReads, false));
  MUSTER_ASSIGN_OR_RETURN(
      DirectFile direct, DirectFile::Open(system, path, kReads, !IsInMemory(cached.fd(), options)));
  struct stat info;
  if (fstat(cached.fd(), &info) != 0) {
    return ReadError(errno, absl::StrCat("cannot examine ", path));
  }
  if (static_cast<uint64_t>(info.st_size) != bytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": has ", info.st_size, " bytes, but the manifest says ", bytes));
  }
  const CachedPages pages(cached.fd(), direct.direct() ? bytes : 0);
  BlockBuffers buffers;
  const auto read = [&](uint64_t i) -> absl::Status {
    const uint64_t block = run.first + i;
    const uint64_t at = block * block_bytes;
    const size_t size = std::min(block_bytes, bytes - at);
    AlignedMemory memory;
    char* to = options.place == nullptr ? nullptr : options.place(at);
    const bool places = to != nullptr;
    if (!places) {
      MUSTER_ASSIGN_OR_RETURN(memory, buffers.Take(size));
      to = memory.data();
    }
    MUSTER_RETURN_IF_ERROR(ReadBlock(system, direct, cached, pages, path, to, size, at));
    const absl::string_view found(to, size);
    MUSTER_RETURN_IF_ERROR(CheckBlock(path, blocks, block, found));
    MUSTER_RETURN_IF_ERROR(take(at, found));
    if (!places) buffers.GiveBack(std::move(memory));
    return absl::OkStatus();
  };
  return ForEach(run.count, {.threads = options.in_flight}, read);
}

absl::Status CheckBlocks(const std::string& path, absl::string_view contents,
                         const BlockDigests& blocks, const std::optional<FileRange>& range,
                         int threads) {
  MUSTER_ASSIGN_OR_RETURN(const BlockRun run, BlocksIn(path, contents.size(), blocks, range));
  return ForEach(run.count, {.threads = threads}, [&](uint64_t i) {
    const uint64_t block = run.first + i;
    return CheckBlock(path, blocks, block,
                      contents.substr(block * blocks.block_bytes, blocks.block_bytes));
  });
}

}  // namespace muster
