#ifndef MUSTER_WORKER_COLLECTIVE_SHM_POOL_H_
#define MUSTER_WORKER_COLLECTIVE_SHM_POOL_H_

#include <cstdint>
#include <map>
#include <memory>

#include "ATen/core/Tensor.h"
#include "base/mutex.h"

namespace muster {

// The place of data in a rank's pool, in bytes of its file.
struct ShmPlace {
  uint64_t region = 0;  // 0: in no pool
  uint64_t region_bytes = 0;
  uint64_t data = 0;
  explicit operator bool() const { return region != 0; }
};

// Allocates the memory for part of a memory file now, so that a lack of memory is not a SIGBUS at a
// later write. False: there is none.
bool ReserveShm(int fd, uint64_t offset, uint64_t bytes);

// Tensors of one rank that the other ranks of its host read and write in place: a memory file
// (memfd) that they open under /proc. A region of it holds one tensor, and no part of the file is
// used twice, so a peer's mapping never shows another tensor. The memory of a destroyed tensor
// returns to the system at once (a hole in the file), even while peers have it mapped. Thread-safe.
class ShmPool : public std::enable_shared_from_this<ShmPool> {
 public:
  // Returns null if this system cannot provide such memory.
  static std::shared_ptr<ShmPool> Create();
  ~ShmPool();
  ShmPool(const ShmPool&) = delete;
  ShmPool& operator=(const ShmPool&) = delete;

  // For peers: they open the file under /proc, and compare the nonce with that in the file.
  int fd() const { return fd_; }
  uint64_t nonce() const { return nonce_; }

  // Returns a tensor of one dimension in the pool, all zero; its storage keeps the pool alive.
  // Undefined if the pool cannot grow: use other memory then. `options`: dense, on the CPU.
  at::Tensor Allocate(int64_t numel, const at::TensorOptions& options);
  // Returns no place unless all of `bytes` from `data` is in one region.
  ShmPlace Find(const void* data, uint64_t bytes) const;

 private:
  struct Region {
    uint64_t begin = 0;  // in the file
    uint64_t bytes = 0;
  };
  ShmPool() = default;
  void Free(char* mapped);

  int fd_ = -1;
  uint64_t nonce_ = 0;
  void* first_page_ = nullptr;
  mutable Mutex mu_;
  uint64_t end_ ABSL_GUARDED_BY(mu_) = 0;                       // the file's size
  std::map<const char*, Region> regions_ ABSL_GUARDED_BY(mu_);  // by address
};

// Another rank's pool. One thread at a time.
class ShmPeerPool {
 public:
  // Takes ownership of `fd`. Returns null if it is not the pool with this nonce.
  static std::unique_ptr<ShmPeerPool> Open(int fd, uint64_t nonce);
  ~ShmPeerPool();
  ShmPeerPool(const ShmPeerPool&) = delete;
  ShmPeerPool& operator=(const ShmPeerPool&) = delete;

  // Returns the address of `place` in this process; maps it at the first use. Throws c10::Error if
  // that fails.
  char* At(const ShmPlace& place);
  // The number of regions that are mapped here.
  size_t mapped() const { return mapped_.size(); }

 private:
  struct Mapping {
    char* base;
    uint64_t bytes;
  };
  explicit ShmPeerPool(int fd) : fd_(fd) {}
  // Unmaps regions that their owner has freed.
  void Sweep();

  const int fd_;
  void* first_page_ = nullptr;
  uint64_t freed_seen_ = 0;
  std::map<uint64_t, Mapping> mapped_;  // by the region's begin
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_SHM_POOL_H_
