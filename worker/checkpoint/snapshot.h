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
// again by the next save, and never shrinks. After KeepBy() tensors are where that has put them
// instead. Not thread-safe.
class Snapshot {
 public:
  struct Kept;
  struct File {
    std::string name;
    size_t offset = 0;
    size_t bytes = 0;
    // What is not in this object's memory; null: all of it is.
    std::shared_ptr<const Kept> kept = nullptr;
  };
  // Returns what `tensor` holds now, on the CPU, contiguous, in memory that does not change: a
  // copy, or `tensor` itself. Does not throw.
  using KeepTensor = std::function<absl::StatusOr<at::Tensor>(const at::Tensor& tensor)>;

  Snapshot() = default;
  // For a save that stays in this memory, whose first `reserved` bytes (a multiple of
  // kDirectAlignment) are the caller's.
  Snapshot(AlignedMemory memory, size_t reserved)
      : memory_(std::move(memory)), reserved_(reserved), stays_in_memory_(true) {}

  // Tensors of files that are added after this are kept by `keep` until Clear(), and none is copied
  // later: for a state that memory has no room for. Its errors are those of Add().
  void KeepBy(KeepTensor keep) { keep_ = std::move(keep); }

  // Of files that are added after this: the tensor does not change before the result of
  // TakeDeferred() runs, which copies it.
  void CopyLater(const at::Tensor& tensor);

  // Copies a file in; the tensors may change then, except those of CopyLater(). Blocks until copies
  // from devices are done, but for those of CopyLater() and, beside such, of small tensors. Errors:
  // as WriteSafetensors and WriteStateDict, but for those of the disk; RESOURCE_EXHAUSTED if there
  // is no memory. Throws c10::Error if a copy from a device fails. `plans`: how files were laid out
  // before; null: not known.
  absl::Status Add(const std::string& name, const NamedTensors& tensors,
                   WriteSafetensorsOptions options, FilePlans* plans = nullptr);
  absl::Status Add(const std::string& name, const StateDict& state, SharedTensors shared,
                   FilePlans* plans = nullptr);
  absl::Status AddText(const std::string& name, const std::string& text);

  // Once all files are added: the copies that are left to make; Contents() is complete then. It
  // writes into this object's memory. Of a save that stays in memory it digests files(), too.
  std::unique_ptr<DeferredCopy> TakeDeferred();

  const std::vector<File>& files() const { return files_; }
  // Of a file that is not kept elsewhere.
  absl::string_view Contents(const File& file) const {
    return absl::string_view(memory_.data() + file.offset, file.bytes);
  }
  // Writes one of files() to `path`; all copies must be made. Thread-safe if nothing is added.
  // Errors: as WriteDirectFile; FAILED_PRECONDITION, naming a tensor that KeepBy() has kept as it
  // is and that has changed nevertheless.
  absl::StatusOr<DirectFileWritten> Write(const File& file, const std::string& path,
                                          const DirectFileOptions& options) const;
  uint64_t bytes() const;

  // Where it is. Grows when files are added.
  AlignedMemory& memory() { return memory_; }

  // Pins the memory once it has got tensors of a GPU, which takes up to a second for some GB: the
  // next copies from there are made by the device, without a thread of the host. All copies must be
  // done.
  void PinIfFromGpu();

  // Forgets the files and keeps the memory.
  void Clear();

 private:
  // Room for a file of `bytes` at the end.
  absl::StatusOr<char*> Append(const std::string& name, size_t bytes);
  // A clone, on its device, of a tensor that changes, to be copied from there later; undefined: it
  // is copied at once.
  at::Tensor Clone(const at::Tensor& source);
  absl::Status AddTensors(const std::string& name, const SafetensorsPlan& plan);
  absl::Status AddKept(const std::string& name, const SafetensorsPlan& plan);

  AlignedMemory memory_;
  const size_t reserved_ = 0;
  const bool stays_in_memory_ = false;
  std::optional<c10::Device> gpu_ = std::nullopt;  // that it has got tensors of
  size_t cloned_ = 0;                              // bytes, of this use
  std::vector<File> files_;
  absl::flat_hash_set<const void*> later_;  // where the data of such tensors begin
  KeepTensor keep_;                         // null: copies are in memory_
  std::unique_ptr<DeferredCopy> left_ = std::make_unique<DeferredCopy>();
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SNAPSHOT_H_
