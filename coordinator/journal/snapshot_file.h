#ifndef MUSTER_COORDINATOR_JOURNAL_SNAPSHOT_FILE_H_
#define MUSTER_COORDINATOR_JOURNAL_SNAPSHOT_FILE_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file.h"

namespace muster::coordinator {

// A snapshot in a file: its parts, each framed as a record (record_format.h) of the snapshot's
// revision and numbered from 1. The reader knows their number and sizes. All functions block on the
// disk.

// Writes a snapshot under a temporary name. Only its owner can read it. Not thread-safe.
class SnapshotWriter {
 public:
  static absl::StatusOr<SnapshotWriter> Create(const std::string& path, uint64_t revision,
                                               uint64_t term);

  absl::Status Append(absl::string_view part);
  // Returns once the appended bytes are on disk.
  absl::Status Sync() { return file_.Sync(); }
  // Returns once the file is on disk under its name. Only parts() and bytes() may be called after
  // it.
  absl::Status Commit() { return file_.Commit(); }

  uint64_t parts() const { return parts_; }
  uint64_t bytes() const { return bytes_; }

 private:
  SnapshotWriter(AtomicFile file, uint64_t revision, uint64_t term)
      : file_(std::move(file)), revision_(revision), term_(term) {}

  AtomicFile file_;
  uint64_t revision_;
  uint64_t term_;
  uint64_t parts_ = 0;
  uint64_t bytes_ = 0;
};

// Hands over every part, in order, as it is read, including the parts before a damaged one. Stops
// at the first error of `part` and returns it. The snapshot begins at byte `from` of the file.
// Errors: DATA_LOSS naming the file and the place; those of the disk.
absl::Status ReadSnapshotFile(const std::string& path, uint64_t revision, uint64_t parts,
                              uint64_t bytes,
                              absl::FunctionRef<absl::Status(absl::string_view)> part,
                              uint64_t from = 0);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_SNAPSHOT_FILE_H_
