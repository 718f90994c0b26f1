#ifndef MUSTER_WORKER_CHECKPOINT_STAGING_FOLDER_H_
#define MUSTER_WORKER_CHECKPOINT_STAGING_FOLDER_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// The folders beside a checkpoint DIR: DIR.tmp-<16 hexadecimal digits>, in which one is written, or
// is removed if the digits begin with "dead"; DIR.old-..., which it replaces. A live writer keeps
// its folder locked (flock). Thread-safe.

inline constexpr absl::string_view kStagingMark = ".tmp-";
inline constexpr absl::string_view kReplacedMark = ".old-";

// Whether `name` is STEM + mark + 16 hexadecimal digits.
bool HasMark(absl::string_view name, absl::string_view stem, absl::string_view mark);

// Returns the part before the mark; all of `name` if there is no mark.
absl::string_view StemOf(absl::string_view name, absl::string_view mark);

// Return a new name for a folder that is to become the checkpoint `dir`, and one for a folder that
// was it.
std::string NewStagingPath(absl::string_view dir);
std::string NewDoomedPath(absl::string_view dir);
bool IsDoomed(absl::string_view path);

// Takes the lock that says that a live process writes into the folder. Returns the lock's
// descriptor, which releases it when it is closed, or -1 if another process has the lock or the
// folder cannot be locked. `shared`: how long to wait for processes that check the lock or load
// from the folder; a check takes microseconds, unless it is interrupted.
int LockFolder(const std::string& path, absl::Duration shared = absl::Seconds(30));

// The same, but waits up to 10 s for others that have it locked. Returns -1 if others load from
// there, or the file system has no locks. Errors: ABORTED, naming the process, if one still has the
// lock of a writer, and so may rename or remove the folder at any moment; those of opening it.
absl::StatusOr<int> LockFolderPatiently(const std::string& path);
// Sets that time, and returns the former one. For tests.
absl::Duration SetLockPatience(absl::Duration patience);

// Returns the process that has the lock of a writer, for messages: "process 4711 (train) on gpu-1",
// or words for a process of another machine or container, which is not visible here.
std::string LockHolderOf(const std::string& path);

// Turns the lock of a writer, or what is left of it, into one for loading from the folder.
void ShareLock(int lock);
// Turns it into the lock of a writer again; false: others load from the folder.
bool UnshareLock(int lock);

// Keeps other processes from naming or removing a folder from which this process loads, until
// ReleaseInPlace(). False: another process is about to do so.
bool HoldInPlace(const std::string& path);
void ReleaseInPlace();

enum class FolderWriter {
  kAlive,    // a process has locked it
  kGone,     // no process has it locked, and no other machine can write to this file system
  kUnknown,  // cannot be determined on this machine
};

// Returns whether a writer of the folder is alive. Does not get in the way of a writer that is
// about to lock it.
FolderWriter WriterOf(const std::string& path);

// After this long without a change, a writer on another machine counts as dead, and its files are
// removed.
inline constexpr absl::Duration kQuietTime = absl::Hours(2);

// Whether a writer on another machine may be writing to the folder, which no process on this
// machine has locked.
bool MayHaveDistantWriter(const std::string& path);

// A folder of which this process is the writer.
struct WriterFolder {
  std::string path;
  int lock = -1;  // from LockFolder(); -1: there are no locks
};
// Makes a folder with the first name from `new_path` that no other process treats as abandoned
// before it is locked. Errors: those of the disk; UNAVAILABLE if others keep doing so.
absl::StatusOr<WriterFolder> MakeWriterFolder(absl::FunctionRef<std::string()> new_path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_STAGING_FOLDER_H_
