#ifndef MUSTER_WORKER_CHECKPOINT_STAGING_FOLDER_H_
#define MUSTER_WORKER_CHECKPOINT_STAGING_FOLDER_H_

#include <string>

#include "absl/strings/string_view.h"

namespace muster {

// The folders beside a checkpoint DIR: DIR.tmp-<16 hexadecimal digits>, in which one is written, or
// is removed if the digits begin with "dead"; DIR.old-..., which it replaces. A live writer keeps
// its folder locked (flock). Thread-safe.

inline constexpr absl::string_view kStagingMark = ".tmp-";
inline constexpr absl::string_view kReplacedMark = ".old-";

// Whether `name` is STEM + mark + 16 hexadecimal digits.
bool HasMark(absl::string_view name, absl::string_view stem, absl::string_view mark);

// The part before the mark; all of `name` without one.
absl::string_view StemOf(absl::string_view name, absl::string_view mark);

// A new name for what is to become the checkpoint `dir`, and one for what it was.
std::string NewStagingPath(absl::string_view dir);
std::string NewDoomedPath(absl::string_view dir);
bool IsDoomed(absl::string_view path);

// Takes the lock that says that a live process writes into the folder: its descriptor, which frees
// it when it is closed, or -1 if another process has it or the folder cannot be locked.
int LockFolder(const std::string& path);

enum class FolderWriter {
  kAlive,    // a process has locked it
  kGone,     // nobody has, and nobody else could: no other machine writes to this file system
  kUnknown,  // it cannot be told here
};

// Who writes into the folder. Asks without getting in the way of a writer that is about to lock it.
FolderWriter WriterOf(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_STAGING_FOLDER_H_
