#ifndef MUSTER_WORKER_CHECKPOINT_PLANNED_FILES_H_
#define MUSTER_WORKER_CHECKPOINT_PLANNED_FILES_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace muster {

// Records which tensors a checkpoint must hold, by file: a few bytes for each file, however many
// tensors there are. The plan puts each tensor into exactly one file, so if every planned file
// exists once and has the tensors that were planned for it, each tensor exists exactly once. Pure.

// The tensors of one file, in any order.
class TensorList {
 public:
  void Add(absl::string_view name, absl::string_view type, absl::Span<const int64_t> shape);
  size_t size() const { return lines_.size(); }
  // Returns the number of tensors and the XXH3-128 of their names, types and shapes: "3 tensors,
  // 99aa...".
  std::string Summary() const;

 private:
  std::vector<std::string> lines_;
};

// The files that a rank plans and those that it has written: summaries by the name of the file.
struct FileReport {
  std::map<std::string, std::string> planned;  // by any rank, as far as this one knows
  std::map<std::string, std::string> held;     // by this rank

  std::string Encode() const;
  static absl::StatusOr<FileReport> Parse(const std::string& text);
};

// Checks that every file that a rank plans is held by exactly one rank and has what was planned.
// `ranks`: the reports of all ranks. Errors: INVALID_ARGUMENT naming the first file that does not.
absl::Status CheckPlannedFiles(const std::vector<FileReport>& ranks);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_PLANNED_FILES_H_
