#ifndef MUSTER_COORDINATOR_JOURNAL_DATA_DIR_LOCK_H_
#define MUSTER_COORDINATOR_JOURNAL_DATA_DIR_LOCK_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace muster::coordinator {

// Holds a data directory for this process: flock() on its file LOCK, which also carries the
// holder's pid. The kernel gives it back when the process ends, however it ends.
class DataDirLock {
 public:
  // Makes the directory if it is missing (one level). Errors: ALREADY_EXISTS naming the pid that
  // holds it; NOT_FOUND, PERMISSION_DENIED and the like, naming the path.
  static absl::StatusOr<std::unique_ptr<DataDirLock>> Take(const std::string& directory);
  ~DataDirLock();
  DataDirLock(const DataDirLock&) = delete;
  DataDirLock& operator=(const DataDirLock&) = delete;

 private:
  explicit DataDirLock(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_DATA_DIR_LOCK_H_
