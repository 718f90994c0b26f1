#include "worker/checkpoint/cached_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace muster {

uint64_t PageBytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

bool MayAskForCachedPages(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) return false;
  char path[64];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  return info.st_uid == geteuid() || faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) == 0;
}

bool PagesAreInMemory(const char* begin, uint64_t bytes) {
  const uint64_t before = reinterpret_cast<uintptr_t>(begin) % PageBytes();
  std::vector<unsigned char> resident((before + bytes + PageBytes() - 1) / PageBytes());
  return mincore(const_cast<char*>(begin) - before, before + bytes, resident.data()) == 0 &&
         std::all_of(resident.begin(), resident.end(),
                     [](unsigned char it) { return (it & 1) != 0; });
}

CachedPages::CachedPages(int fd, uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0 || !MayAskForCachedPages(fd)) return;
  void* const address = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (address != MAP_FAILED) base_ = static_cast<char*>(address);
}

CachedPages::~CachedPages() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

bool CachedPages::Has(uint64_t begin, uint64_t bytes) const {
  if (base_ == nullptr || begin >= bytes_) return false;
  return PagesAreInMemory(base_ + begin, std::min(bytes, bytes_ - begin));
}

}  // namespace muster
