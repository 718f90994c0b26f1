#ifndef MUSTER_WORKER_TRAIN_DISK_PARTS_H_
#define MUSTER_WORKER_TRAIN_DISK_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/core/Device.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/scratch_file.h"
#include "worker/parallel/part_store.h"

namespace muster {

// As ScratchFile::Create, whose errors it throws.
std::shared_ptr<ScratchFile> MakeScratchFile(const std::string& folder);

// Parts of parameters in a file, bypassing the page cache, through blocks of memory suitable for
// direct I/O, one for each thread at work. A GPU copies from and to the blocks, which are pinned,
// and the host waits for that. Thread-safe, except for Reserve().
class DiskParts : public PartStore {
 public:
  // Makes the file in `folder` when the first place is reserved.
  explicit DiskParts(std::string folder);
  explicit DiskParts(std::shared_ptr<ScratchFile> file);

  bool Takes(const c10::Device& /*device*/) const override { return true; }
  uint64_t Reserve(uint64_t bytes) override;
  void Read(uint64_t place, void* to, uint64_t bytes) override;
  void Write(uint64_t place, const void* from, uint64_t bytes) override;
  void ReadTo(uint64_t place, const at::Tensor& to) override;
  void WriteFrom(uint64_t place, const at::Tensor& from) override;

 private:
  // For copies with `device`.
  AlignedMemory TakeBlock(uint64_t bytes, const c10::Device& device);
  void GiveBack(AlignedMemory block);

  // Calls copy(block, done, size) for each block that was read from the file.
  template <typename Copy>
  void ReadBlocks(uint64_t place, uint64_t bytes, const c10::Device& device, const Copy& copy);
  // The same for each block before it is written.
  template <typename Copy>
  void WriteBlocks(uint64_t place, uint64_t bytes, const c10::Device& device, const Copy& copy);

  const std::string folder_;
  std::shared_ptr<ScratchFile> file_;
  Mutex mu_;
  std::vector<AlignedMemory> idle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_DISK_PARTS_H_
