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

// The identity of the file at `path` now, at the end of links. It changes when another file takes
// its place. nullopt: there is none, or it cannot be examined. Thread-safe.
std::optional<std::string> FileIdentityAt(const std::string& path);

// For files that other processes may replace at any moment: calls `look` until it returns true,
// that is, until what it read was not replaced meanwhile; at most three times. Returns false if it
// never did.
bool RetryUntilUnchanged(absl::FunctionRef<bool()> look);

}  // namespace muster

#endif  // MUSTER_BASE_FILE_IDENTITY_H_
