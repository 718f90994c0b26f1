#include "worker/checkpoint/cached_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace muster {

namespace {

// Whether mincore() tells the truth about a file (since Linux 5.2).
bool MayAskFor(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) return false;
  char path[64];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  return info.st_uid == geteuid() || faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) == 0;
}

}  // namespace

CachedPages::CachedPages(int fd, uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0 || !MayAskFor(fd)) return;
  void* const address = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (address != MAP_FAILED) base_ = static_cast<char*>(address);
}

CachedPages::~CachedPages() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

bool CachedPages::Has(uint64_t begin, uint64_t bytes) const {
  if (base_ == nullptr || begin >= bytes_) return false;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = begin / page * page;
  const uint64_t end = begin + std::min(bytes, bytes_ - begin);
  std::vector<unsigned char> resident((end - first + page - 1) / page);
  return mincore(base_ + first, end - first, resident.data()) == 0 &&
         std::all_of(resident.begin(), resident.end(),
                     [](unsigned char it) { return (it & 1) != 0; });
}

}  // namespace muster
