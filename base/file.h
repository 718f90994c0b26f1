#ifndef MUSTER_BASE_FILE_H_
#define MUSTER_BASE_FILE_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// Files that exist whole or not at all. All functions block on the disk; none is locked against
// other callers on the same path, but two writers of one path leave one whole file. Errors carry
// the path and the system's message, with the code that absl::ErrnoToStatus gives (NOT_FOUND,
// PERMISSION_DENIED, RESOURCE_EXHAUSTED for a full disk, ...).

// Returns the whole file. RESOURCE_EXHAUSTED if it is larger than `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes = int64_t{1} << 30);

// Writes `contents` under a temporary name next to `path`, syncs it, renames it to `path` and syncs
// the folder.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents);

// Makes the folder and its parents. OK if it exists already.
absl::Status MakeDirectories(const std::string& path);

// Makes renames and removals inside the folder durable.
absl::Status SyncDirectory(const std::string& path);

// The names in a folder, sorted, without "." and "..".
absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path);

// Removes a file or a whole tree. OK if there is nothing at `path`.
absl::Status RemoveTree(const std::string& path);

// Whether the path names anything.
bool PathExists(const std::string& path);

// Whether the path names a folder, at the end of links; false also if it cannot be examined.
bool IsFolder(const std::string& path);

// "a/b" for ("a", "b") and ("a/", "b"); an absolute `name` is returned as is.
std::string JoinPath(absl::string_view folder, absl::string_view name);

// The folder of a path ("." if it names none) and its last part.
std::string ParentPath(absl::string_view path);
std::string BaseName(absl::string_view path);

// 16 hexadecimal digits from the system's random source, for temporary names.
std::string RandomHex();

// A file that is written under a temporary name and appears at `path` only by Commit. Without
// Commit it is removed when destroyed. Not thread-safe. Movable.
class AtomicFile {
 public:
  // `mode` is reduced by the umask.
  static absl::StatusOr<AtomicFile> Create(const std::string& path, mode_t mode = 0666);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) noexcept;
  ~AtomicFile();

  // Appends all bytes.
  absl::Status Append(absl::string_view bytes);

  // Returns once the appended bytes are on disk, still under the temporary name.
  absl::Status Sync();

  // Syncs, closes, renames over `path`, and syncs the folder. Nothing may be called after it.
  absl::Status Commit();

  // Closes and renames over `path` without waiting for the disk: a loss of power may undo it, or
  // leave an empty file. Nothing may be called after it.
  absl::Status Publish();

 private:
  AtomicFile(int fd, std::string path, std::string temporary);
  void Discard();

  int fd_;
  std::string path_;
  std::string temporary_;
};

}  // namespace muster

#endif  // MUSTER_BASE_FILE_H_
