#include "worker/checkpoint/streamed_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/checkpoint/read_error.h"

namespace muster {
namespace {

// Opens the open file again for direct I/O, rather than another one that has taken its name. Not
// open: the file system refuses, or there is no /proc.
OwnedFd OpenDirect(const DirectFileSystem& system, int fd) {
  return OwnedFd(system.open(absl::StrCat("/proc/self/fd/", fd).c_str(),
                             O_RDONLY | O_CLOEXEC | O_DIRECT, /*mode=*/0));
}

absl::Status Ends(uint64_t at, uint64_t needed) {
  return absl::DataLossError(absl::StrCat("it ends at byte ", at, ", before byte ", needed,
                                          ": it was changed while it is used"));
}

}  // namespace

StreamedFile::StreamedFile(int fd, uint64_t bytes, const DirectFileSystem& system)
    : system_(system),
      cached_(fd),
      direct_(OpenDirect(system, fd)),
      pages_(fd, bytes),
      is_direct_(direct_.open()) {}

absl::Status StreamedFile::Read(uint64_t begin, size_t bytes, char* to,
                                AlignedMemory& scratch) const {
  if (bytes == 0) return absl::OkStatus();
  if (IsFromCache(begin, bytes)) return ReadFrom(cached_, begin, bytes, bytes, to);
  const auto through_scratch = [&](size_t offset, size_t size) -> absl::Status {
    if (size == 0) return absl::OkStatus();
    MUSTER_RETURN_IF_ERROR(scratch.Grow(RoomFor(begin + offset, size)));
    MUSTER_ASSIGN_OR_RETURN(const size_t at, Fetch(begin + offset, size, scratch.data()));
    std::memcpy(to + offset, scratch.data() + at, size);
    return absl::OkStatus();
  };
  const uint64_t first = DirectAlignedUp(begin);
  const uint64_t last = (begin + bytes) / kDirectAlignment * kDirectAlignment;
  if (first >= last || !IsDirectAligned(to + (first - begin))) return through_scratch(0, bytes);
  MUSTER_RETURN_IF_ERROR(through_scratch(0, first - begin));
  MUSTER_RETURN_IF_ERROR(
      ReadFrom(direct_.get(), first, last - first, last - first, to + (first - begin)));
  return through_scratch(last - begin, begin + bytes - last);
}

absl::StatusOr<size_t> StreamedFile::Fetch(uint64_t begin, size_t bytes, char* block) const {
  if (bytes == 0) return 0;
  if (IsFromCache(begin, bytes)) {
    MUSTER_RETURN_IF_ERROR(ReadFrom(cached_, begin, bytes, bytes, block));
    return 0;
  }
  const uint64_t first = begin / kDirectAlignment * kDirectAlignment;
  // The file may end before the last block does.
  MUSTER_RETURN_IF_ERROR(
      ReadFrom(direct_.get(), first, begin + bytes - first, RoomFor(begin, bytes), block));
  return begin - first;
}

absl::Status StreamedFile::ReadFrom(int fd, uint64_t at, size_t needed, size_t most,
                                    char* to) const {
  size_t done = 0;
  while (done < needed) {
    // The kernel reads 2 GiB at a time at most.
    const size_t asked = std::min(most - done, size_t{1} << 30);
    const ssize_t got = system_.pread(fd, to + done, asked, static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && fd != cached_) {
      is_direct_ = false;
      return ReadFrom(cached_, at, needed, needed, to);
    }
    if (got < 0) return ReadError(errno, absl::StrCat("cannot read at byte ", at + done));
    if (got == 0) return Ends(at + done, at + needed);
    done += static_cast<size_t>(got);
    // If a direct read stops inside of a block, it has met the end of the file, or the file system
    // stops anywhere (FUSE, NFS): a read through the cache finds out, and can continue from there.
    if (fd != cached_ && done < needed && !IsDirectAligned(done)) {
      return ReadFrom(cached_, at + done, needed - done, needed - done, to + done);
    }
  }
  return absl::OkStatus();
}

}  // namespace muster
