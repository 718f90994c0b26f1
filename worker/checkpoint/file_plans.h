#ifndef MUSTER_WORKER_CHECKPOINT_FILE_PLANS_H_
#define MUSTER_WORKER_CHECKPOINT_FILE_PLANS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {

// Remembers how the safetensors files of successive saves are laid out. A file that has the same
// tensors as the last time, by name, type and shape, in the same order, is not laid out again: only
// the metadata in its header are new. Holds no tensors. Not thread-safe.
class FilePlans {
 public:
  // Plans a file as PlanSafetensors does. A file is identified by the last part of its path.
  absl::StatusOr<SafetensorsPlan> Plan(const std::string& path, const NamedTensors& tensors,
                                       const WriteSafetensorsOptions& options);

  // Begins a save: forgets files that the last one did not have.
  void BeginSave();

  // The number of files that were laid out, and of those whose layout was reused.
  int64_t made() const { return made_; }
  int64_t reused() const { return reused_; }

 private:
  struct File {
    // The tensors for which it was laid out, in the order of the caller's list.
    std::vector<SafetensorsEntry> given;
    // The position of each tensor of `layout` in that list.
    std::vector<size_t> order;
    SafetensorsLayout layout;
    bool used = true;
  };
  static bool Fits(const File& file, const NamedTensors& tensors);

  std::map<std::string, File> files_;  // by the last part of the path
  int64_t made_ = 0;
  int64_t reused_ = 0;
};

// Plans a file by `plans`, or by PlanSafetensors if that is null.
absl::StatusOr<SafetensorsPlan> PlanFile(FilePlans* plans, const std::string& path,
                                         const NamedTensors& tensors,
                                         const WriteSafetensorsOptions& options);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FILE_PLANS_H_
