#ifndef MUSTER_WORKER_TRACK_APPEND_FILE_H_
#define MUSTER_WORKER_TRACK_APPEND_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// A file that grows record by record; each Append is one write, so that a reader or a crash sees
// whole records, except perhaps the last. The part of a record that a failed write leaves is
// removed. Not thread-safe.
class AppendFile {
 public:
  AppendFile() = default;
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  // Opens or creates the file and its folder. With `lines`, first ends a last line that a crash
  // left unfinished.
  absl::Status Open(const std::string& path, bool lines);

  // FAILED_PRECONDITION if the file is not open, or no longer. Appends nothing if the part of an
  // earlier record whose write failed cannot be removed.
  absl::Status Append(absl::string_view bytes);

  absl::Status Close();

  // Keeps other processes, and other objects of this one, from using the file between Lock and
  // Unlock; blocks while they have it locked. Does nothing on a file system without locks.
  void Lock();
  void Unlock();

  // Whether the open file is still the one at its path.
  bool IsAtPath() const;

  // The size of the open file, and up to `size` bytes from `offset` on, fewer only at its end.
  absl::StatusOr<int64_t> Size() const;
  absl::StatusOr<std::string> Read(int64_t offset, size_t size) const;

  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }

 private:
  absl::Status RemovePart();

  int fd_ = -1;
  // The range of what a failed write left.
  int64_t part_begin_ = 0;
  int64_t part_end_ = 0;
  std::string path_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_APPEND_FILE_H_
