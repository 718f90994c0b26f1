#include "worker/checkpoint/mapped_file.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "worker/checkpoint/cached_pages.h"

namespace muster {
namespace {

// Since Linux 5.14; not in the headers of older systems.
constexpr int kPopulateRead = 22;

}  // namespace

absl::StatusOr<MappedFile> MappedFile::Of(int fd, uint64_t bytes) {
  if (bytes == 0) return MappedFile(nullptr, 0, false);
  // Only for reading: it counts neither as memory of the process (ulimit -d) nor as committed
  // memory (vm.overcommit_memory = 2), and the kernel may drop every page of it.
  void* const data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (error != ENOMEM) return absl::ErrnoToStatus(error, "cannot be mapped into memory");
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot be mapped into memory: the process does not get ",
                     HumanBytes(static_cast<int64_t>(bytes)),
                     " of addresses; raise the limit (ulimit -v), or leave mmap out"));
  }
  return MappedFile(static_cast<char*>(data), bytes, MayAskForCachedPages(fd));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      may_ask_(other.may_ask_) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

bool MappedFile::IsInMemory(uint64_t begin, uint64_t bytes) const {
  if (bytes == 0) return true;
  return may_ask_ && begin < size_ && bytes <= size_ - begin &&
         PagesAreInMemory(data_ + begin, bytes);
}

absl::Status MappedFile::LoadPages(uint64_t begin, uint64_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  if (begin >= size_ || bytes > size_ - begin) {
    return absl::OutOfRangeError(absl::StrCat("has no bytes ", begin, " to ", begin + bytes));
  }
  const uint64_t before = begin % PageBytes();
  char* const first = data_ + (begin - before);
  const size_t length = before + bytes;
  int error = 0;
  do {
    error = madvise(first, length, kPopulateRead) == 0 ? 0 : errno;
  } while (error == EINTR);
  switch (error) {
    case 0:
      return absl::OkStatus();
    case EINVAL:
      // An older kernel reads the pages ahead, but does not report when they are there.
      (void)madvise(first, length, MADV_WILLNEED);
      return absl::OkStatus();
    case EFAULT:
    case EHWPOISON:
      return absl::DataLossError(absl::StrCat("bytes ", begin, " to ", begin + bytes,
                                              " cannot be read: the file has become shorter, or "
                                              "the disk or the memory has an error"));
    case ENOMEM:
      return absl::ResourceExhaustedError("no memory for pages of the file");
    default:
      return absl::ErrnoToStatus(error, "cannot read pages of the file");
  }
}

}  // namespace muster
