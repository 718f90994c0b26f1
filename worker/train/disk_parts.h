#ifndef MUSTER_WORKER_TRAIN_DISK_PARTS_H_
#define MUSTER_WORKER_TRAIN_DISK_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/scratch_file.h"
#include "worker/parallel/part_store.h"

namespace muster {

// ScratchFile::Create, whose errors it throws.
std::shared_ptr<ScratchFile> MakeScratchFile(const std::string& folder);

// Parts of parameters in a file, past the page cache, through blocks of memory that direct I/O can
// use, one for each thread that is at it. Thread-safe but for Reserve().
class DiskParts : public PartStore {
 public:
  explicit DiskParts(std::shared_ptr<ScratchFile> file);

  uint64_t Reserve(uint64_t bytes) override;
  void Read(uint64_t place, void* to, uint64_t bytes) override;
  void Write(uint64_t place, const void* from, uint64_t bytes) override;

 private:
  AlignedMemory TakeBlock(uint64_t bytes);
  void GiveBack(AlignedMemory block);

  const std::shared_ptr<ScratchFile> file_;
  Mutex mu_;
  std::vector<AlignedMemory> idle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_DISK_PARTS_H_
