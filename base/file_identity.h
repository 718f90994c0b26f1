#ifndef MUSTER_BASE_FILE_IDENTITY_H_
#define MUSTER_BASE_FILE_IDENTITY_H_

#include <sys/stat.h>

#include <optional>
#include <string>

#include "absl/functional/function_ref.h"

namespace muster {

// Identifies a file or folder among all that exist on this host at the time: its device and inode,
// from stat().
std::string FileIdentityOf(const struct stat& info);

// The same of what is at `path` now, at the end of links: another one if another file has taken its
// place. Nothing: there is none, or it cannot be examined. Thread-safe.
std::optional<std::string> FileIdentityAt(const std::string& path);

// Of files that other processes may replace at any moment: calls `look`, which says whether what it
// has looked at is still there, until that is so, three times at most. False: it never was.
bool LookUntilItStays(absl::FunctionRef<bool()> look);

}  // namespace muster

#endif  // MUSTER_BASE_FILE_IDENTITY_H_
