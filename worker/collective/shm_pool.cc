#include "worker/collective/shm_pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "ATen/ops/from_blob.h"
#include "base/identity.h"
#include "base/memory_file.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMagic = 0x316c6f6f706d6873ULL;

// The file's first page.
struct PoolHeader {
  uint64_t magic;
  uint64_t nonce;
  std::atomic<uint64_t> freed;  // regions freed so far
};
// The first page of a region. A hole reads as zero, so the header of a freed region shows that.
struct RegionHeader {
  std::atomic<uint32_t> live;
};

uint64_t RoundUp(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void* MapShared(int fd, uint64_t offset, uint64_t bytes) {
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  return memory == MAP_FAILED ? nullptr : memory;
}

void Punch(int fd, uint64_t offset, uint64_t bytes) {
  // If this fails, the memory is not freed, and nothing else goes wrong.
  (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

}  // namespace

bool ReserveShm(int fd, uint64_t offset, uint64_t bytes) {
  // In pieces, because a signal undoes the current piece, and a process may get a thousand signals
  // a second (from a profiler).
  constexpr uint64_t kPiece = 1 << 20;
  for (const uint64_t end = offset + bytes; offset < end;) {
    const uint64_t piece = std::min(kPiece, end - offset);
    if (fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(piece)) == 0) {
      offset += piece;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

std::shared_ptr<ShmPool> ShmPool::Create() {
  std::shared_ptr<ShmPool> pool(new ShmPool);
  pool->fd_ = static_cast<int>(syscall(SYS_memfd_create, "muster-pool", 1u /* MFD_CLOEXEC */));
  if (pool->fd_ < 0 || !ResizeMemoryFile(pool->fd_, kPage).ok() ||
      !ReserveShm(pool->fd_, 0, kPage)) {
    return nullptr;
  }
  pool->first_page_ = MapShared(pool->fd_, 0, kPage);
  if (pool->first_page_ == nullptr) return nullptr;
  pool->nonce_ = RandomId();
  auto* const header = static_cast<PoolHeader*>(pool->first_page_);
  header->nonce = pool->nonce_;
  header->magic = kMagic;
  MutexLock lock(&pool->mu_);
  pool->end_ = kPage;
  return pool;
}

ShmPool::~ShmPool() {
  if (first_page_ != nullptr) munmap(first_page_, kPage);
  if (fd_ >= 0) close(fd_);
}

at::Tensor ShmPool::Allocate(int64_t numel, const at::TensorOptions& options) {
  const uint64_t bytes = RoundUp(numel * options.dtype().itemsize()) + kPage;
  char* mapped = nullptr;
  {
    MutexLock lock(&mu_);
    if (!ResizeMemoryFile(fd_, end_ + bytes).ok()) return {};
    if (ReserveShm(fd_, end_, bytes)) mapped = static_cast<char*>(MapShared(fd_, end_, bytes));
    if (mapped == nullptr) {
      Punch(fd_, end_, bytes);
      return {};
    }
    regions_[mapped] = {.begin = end_, .bytes = bytes};
    end_ += bytes;
  }
  reinterpret_cast<RegionHeader*>(mapped)->live.store(1);
  return at::from_blob(
      mapped + kPage, {numel}, [pool = shared_from_this(), mapped](void*) { pool->Free(mapped); },
      options);
}

void ShmPool::Free(char* mapped) {
  Region region;
  {
    MutexLock lock(&mu_);
    const auto found = regions_.find(mapped);
    region = found->second;
    regions_.erase(found);
  }
  munmap(mapped, region.bytes);
  Punch(fd_, region.begin, region.bytes);
  static_cast<PoolHeader*>(first_page_)->freed.fetch_add(1);
}

ShmPlace ShmPool::Find(const void* data, uint64_t bytes) const {
  const char* const begin = static_cast<const char*>(data);
  MutexLock lock(&mu_);
  auto next = regions_.upper_bound(begin);
  if (next == regions_.begin()) return {};
  const auto& [mapped, region] = *std::prev(next);
  if (begin < mapped + kPage || begin + bytes > mapped + region.bytes) return {};
  return {.region = region.begin,
          .region_bytes = region.bytes,
          .data = region.begin + static_cast<uint64_t>(begin - mapped)};
}

std::unique_ptr<ShmPeerPool> ShmPeerPool::Open(int fd, uint64_t nonce) {
  std::unique_ptr<ShmPeerPool> pool(new ShmPeerPool(fd));
  struct stat status = {};
  if (fd < 0 || fstat(fd, &status) != 0 || static_cast<uint64_t>(status.st_size) < kPage)
    return nullptr;
  pool->first_page_ = MapShared(fd, 0, kPage);
  if (pool->first_page_ == nullptr) return nullptr;
  const auto* const header = static_cast<const PoolHeader*>(pool->first_page_);
  if (header->magic != kMagic || header->nonce != nonce) return nullptr;
  pool->freed_seen_ = header->freed.load();
  return pool;
}

ShmPeerPool::~ShmPeerPool() {
  for (const auto& [begin, mapping] : mapped_) munmap(mapping.base, mapping.bytes);
  if (first_page_ != nullptr) munmap(first_page_, kPage);
  if (fd_ >= 0) close(fd_);
}

char* ShmPeerPool::At(const ShmPlace& place) {
  Sweep();
  auto found = mapped_.find(place.region);
  if (found == mapped_.end()) {
    auto* const base = static_cast<char*>(MapShared(fd_, place.region, place.region_bytes));
    TORCH_CHECK(base != nullptr, "memory of another rank cannot be mapped: ", std::strerror(errno));
    found = mapped_.emplace(place.region, Mapping{.base = base, .bytes = place.region_bytes}).first;
  }
  return found->second.base + (place.data - place.region);
}

void ShmPeerPool::Sweep() {
  const uint64_t freed = static_cast<const PoolHeader*>(first_page_)->freed.load();
  if (freed == freed_seen_) return;
  freed_seen_ = freed;
  for (auto it = mapped_.begin(); it != mapped_.end();) {
    if (reinterpret_cast<const RegionHeader*>(it->second.base)->live.load() != 0) {
      ++it;
      continue;
    }
    munmap(it->second.base, it->second.bytes);
    it = mapped_.erase(it);
  }
}

}  // namespace muster
