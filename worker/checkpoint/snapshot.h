#ifndef MUSTER_WORKER_CHECKPOINT_SNAPSHOT_H_
#define MUSTER_WORKER_CHECKPOINT_SNAPSHOT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "c10/core/Device.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/deferred_copy.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/state_dict.h"

namespace muster {

class FilePlans;

// One rank's files of a checkpoint in memory, byte for byte as they go to the disk: each begins at
// a multiple of kDirectAlignment, and so do the data of each safetensors file. The memory is used
// again by the next save, and never shrinks. After KeepBy(), tensors are where that function has
// put them. Not thread-safe.
class Snapshot {
 public:
  struct Kept;
  struct File {
    std::string name;
    size_t offset = 0;
    size_t bytes = 0;
    // The tensors that are not in this object's memory; null: all are.
    std::shared_ptr<const Kept> kept = nullptr;
  };
  // Returns what `tensor` holds now, on the CPU, contiguous, in memory that does not change: a
  // copy, or `tensor` itself. Must not throw.
  using KeepTensor = std::function<absl::StatusOr<at::Tensor>(const at::Tensor& tensor)>;

  Snapshot() = default;
  // For a save that stays in this memory, whose first `reserved` bytes (a multiple of
  // kDirectAlignment) are the caller's.
  Snapshot(AlignedMemory memory, size_t reserved)
      : memory_(std::move(memory)), reserved_(reserved), stays_in_memory_(true) {}

  // Makes `keep` keep the tensors of files that are added later, until Clear(); none of them is
  // copied later. For a state that does not fit into memory. Its errors become those of Add().
  void KeepBy(KeepTensor keep) { keep_ = std::move(keep); }

  // Declares, for files that are added later, that the tensor does not change before the result of
  // TakeDeferred(), which copies it, has run.
  void CopyLater(const at::Tensor& tensor);

  // Copies a file into the memory; afterwards the tensors may change, except those of CopyLater().
  // Blocks until copies from devices are done, except those of CopyLater() and, beside such, those
  // of small tensors. Errors: those of WriteSafetensors and WriteStateDict, except those of the
  // disk; RESOURCE_EXHAUSTED if there is no memory. Throws c10::Error if a copy from a device
  // fails. `plans`: earlier layouts of the files; null: not known.
  absl::Status Add(const std::string& name, const NamedTensors& tensors,
                   WriteSafetensorsOptions options, FilePlans* plans = nullptr);
  absl::Status Add(const std::string& name, const StateDict& state, SharedTensors shared,
                   FilePlans* plans = nullptr);
  absl::Status AddText(const std::string& name, const std::string& text);

  // Returns the copies that are left to make, once all files are added; Contents() is complete
  // after they are made. They write into this object's memory and, for a save that stays in memory,
  // also digest files().
  std::unique_ptr<DeferredCopy> TakeDeferred();

  const std::vector<File>& files() const { return files_; }
  // The contents of a file that is not kept elsewhere.
  absl::string_view Contents(const File& file) const {
    return absl::string_view(memory_.data() + file.offset, file.bytes);
  }
  // Writes one of files() to `path`; all copies must be made. Thread-safe if nothing is added.
  // Errors: those of WriteDirectFile; FAILED_PRECONDITION naming a tensor that KeepBy() has kept in
  // place and that has changed nevertheless.
  absl::StatusOr<DirectFileWritten> Write(const File& file, const std::string& path,
                                          const DirectFileOptions& options) const;
  uint64_t bytes() const;

  // The memory of the files. Grows when files are added.
  AlignedMemory& memory() { return memory_; }

  // Pins the memory if it has received tensors of a GPU, which takes up to a second for some GB:
  // the next copies from there are made by the device, without a thread of the host. All copies
  // must be done.
  void PinIfFromGpu();

  // Forgets the files and keeps the memory.
  void Clear();

 private:
  // Makes room for a file of `bytes` bytes at the end.
  absl::StatusOr<char*> Append(const std::string& name, size_t bytes);
  // Returns a clone, on its device, of a tensor that changes, to be copied from there later;
  // undefined: the tensor is copied at once.
  at::Tensor Clone(const at::Tensor& source);
  absl::Status AddTensors(const std::string& name, const SafetensorsPlan& plan);
  absl::Status AddKept(const std::string& name, const SafetensorsPlan& plan);

  AlignedMemory memory_;
  const size_t reserved_ = 0;
  const bool stays_in_memory_ = false;
  std::optional<c10::Device> gpu_ = std::nullopt;  // the GPU from which it has received tensors
  size_t cloned_ = 0;                              // bytes, in this save
  std::vector<File> files_;
  absl::flat_hash_set<const void*> later_;  // the data pointers of tensors of CopyLater()
  KeepTensor keep_;                         // null: copies are in memory_
  std::unique_ptr<DeferredCopy> left_ = std::make_unique<DeferredCopy>();
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SNAPSHOT_H_
