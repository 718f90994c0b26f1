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

// Which tensors a checkpoint has to hold, by file: a few bytes for each file, however many tensors
// there are. The plan puts each tensor into exactly one file, so if every planned file is there
// once and has the tensors that were planned for it, each tensor is there exactly once. Pure.

// The tensors of one file, in any order.
class TensorList {
 public:
  void Add(absl::string_view name, absl::string_view type, absl::Span<const int64_t> shape);
  size_t size() const { return lines_.size(); }
  // "3 tensors, 99aa...": their number and the XXH3-128 of their names, types and shapes.
  std::string Summary() const;

 private:
  std::vector<std::string> lines_;
};

// What a rank plans and what it has written: summaries by the name of the file.
struct FileReport {
  std::map<std::string, std::string> planned;  // by any rank, as far as this one knows
  std::map<std::string, std::string> held;     // by this rank

  std::string Encode() const;
  static absl::StatusOr<FileReport> Parse(const std::string& text);
};

// Whether every file that a rank plans is held by exactly one rank and has what was planned.
// `ranks`: of all. Errors: INVALID_ARGUMENT naming the first file.
absl::Status CheckPlannedFiles(const std::vector<FileReport>& ranks);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_PLANNED_FILES_H_
