#include "worker/checkpoint/cached_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace muster {

CachedPages::CachedPages(int fd, uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
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
