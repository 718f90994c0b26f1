#ifndef MUSTER_WORKER_COLLECTIVE_SHM_POOL_H_
#define MUSTER_WORKER_COLLECTIVE_SHM_POOL_H_

#include <cstdint>
#include <map>
#include <memory>

#include "ATen/core/Tensor.h"
#include "base/mutex.h"

namespace muster {

// Where data lie in a rank's pool, in bytes of its file.
struct ShmPlace {
  uint64_t region = 0;  // 0: in no pool
  uint64_t region_bytes = 0;
  uint64_t data = 0;
  explicit operator bool() const { return region != 0; }
};

// Memory for part of a file in memory, now rather than by SIGBUS when it is written. False: there
// is none.
bool ReserveShm(int fd, uint64_t offset, uint64_t bytes);

// Tensors of one rank that the other ranks of its host read and write in place: a file in memory
// (memfd) that they open under /proc. A region of it holds one tensor, and no part of the file is
// used twice, so what a peer has mapped is never something else. The memory of a tensor that ends
// returns to the system at once (a hole in the file), also while peers have it mapped.
// Thread-safe.
class ShmPool : public std::enable_shared_from_this<ShmPool> {
 public:
  // Null: this system has no such memory to give.
  static std::shared_ptr<ShmPool> Create();
  ~ShmPool();
  ShmPool(const ShmPool&) = delete;
  ShmPool& operator=(const ShmPool&) = delete;

  // For peers: they open it under /proc, and compare the nonce with that of the file.
  int fd() const { return fd_; }
  uint64_t nonce() const { return nonce_; }

  // A tensor of one dimension in the pool, all zero; its storage keeps the pool. An undefined one
  // where the pool cannot grow: use other memory then. `options`: dense, on the CPU.
  at::Tensor Allocate(int64_t numel, const at::TensorOptions& options);
  // None unless all of `bytes` from `data` is in one region.
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
  uint64_t end_ ABSL_GUARDED_BY(mu_) = 0;                       // of the file
  std::map<const char*, Region> regions_ ABSL_GUARDED_BY(mu_);  // by where they are mapped
};

// Another rank's pool. One thread at a time.
class ShmPeerPool {
 public:
  // Takes `fd` over. Null if it is not the pool with this nonce.
  static std::unique_ptr<ShmPeerPool> Open(int fd, uint64_t nonce);
  ~ShmPeerPool();
  ShmPeerPool(const ShmPeerPool&) = delete;
  ShmPeerPool& operator=(const ShmPeerPool&) = delete;

  // Where `place` is in this process; mapped at its first use. Throws c10::Error if it cannot be.
  char* At(const ShmPlace& place);
  // Regions that are mapped here.
  size_t mapped() const { return mapped_.size(); }

 private:
  struct Mapping {
    char* base;
    uint64_t bytes;
  };
  explicit ShmPeerPool(int fd) : fd_(fd) {}
  // Unmaps what its owner has freed.
  void Sweep();

  const int fd_;
  void* first_page_ = nullptr;
  uint64_t freed_seen_ = 0;
  std::map<uint64_t, Mapping> mapped_;  // by where the region begins
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_SHM_POOL_H_
