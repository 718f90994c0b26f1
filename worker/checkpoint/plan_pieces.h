#ifndef MUSTER_WORKER_CHECKPOINT_PLAN_PIECES_H_
#define MUSTER_WORKER_CHECKPOINT_PLAN_PIECES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {

// A planned file whose contents, its header and its tensors, lie in memory and are written from
// there. Thread-safe.
class PlanPieces {
 public:
  // Returns nothing if a tensor is on another device, or its elements are not contiguous. Borrows
  // `plan`.
  static std::optional<PlanPieces> Of(const SafetensorsPlan& plan);

  // Writes the file at `path`, whose last part names it in messages. Errors: those of
  // WriteDirectPieces; FAILED_PRECONDITION, with `rule`, if a tensor has changed since Of(): the
  // digest may then not match the contents.
  absl::StatusOr<DirectFileWritten> Write(const std::string& path, absl::string_view rule,
                                          const DirectFileOptions& options) const;

 private:
  explicit PlanPieces(const SafetensorsPlan& plan) : plan_(&plan) {}

  const SafetensorsPlan* plan_;
  std::vector<absl::string_view> pieces_;
  std::vector<int64_t> versions_;  // versions of the plan's sources
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_PLAN_PIECES_H_
