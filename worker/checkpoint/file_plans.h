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

// How the safetensors files of one save after the other are laid out. A file that has the tensors
// that it had the last time, by name, type and shape, in the same order, is not laid out again:
// only the metadata in its header are new. Holds no tensors. Not thread-safe.
class FilePlans {
 public:
  // As PlanSafetensors. A file is known by the last part of its path.
  absl::StatusOr<SafetensorsPlan> Plan(const std::string& path, const NamedTensors& tensors,
                                       const WriteSafetensorsOptions& options);

  // A save begins: forgets files that the last one did not have.
  void BeginSave();

  // Files that were laid out, and those that were laid out before.
  int64_t made() const { return made_; }
  int64_t reused() const { return reused_; }

 private:
  struct File {
    // What it was laid out for, in the order of the caller's list.
    std::vector<SafetensorsEntry> given;
    // Where each tensor of `layout` is in that list.
    std::vector<size_t> order;
    SafetensorsLayout layout;
    bool used = true;
  };
  static bool Fits(const File& file, const NamedTensors& tensors);

  std::map<std::string, File> files_;  // by the last part of the path
  int64_t made_ = 0;
  int64_t reused_ = 0;
};

// By `plans`, or where that is null by PlanSafetensors.
absl::StatusOr<SafetensorsPlan> PlanFile(FilePlans* plans, const std::string& path,
                                         const NamedTensors& tensors,
                                         const WriteSafetensorsOptions& options);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FILE_PLANS_H_
