#ifndef MUSTER_WORKER_CHECKPOINT_READ_ERROR_H_
#define MUSTER_WORKER_CHECKPOINT_READ_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster {

// Returns the status for a system call that failed with `error` while something of a checkpoint, or
// of weights, was looked for or read: `message` and the system's words. NOT_FOUND only if it does
// not exist. Never DATA_LOSS, UNIMPLEMENTED or INVALID_ARGUMENT, which describe what is found in a
// file, except for a name that is too long: Abseil has these, and NOT_FOUND, also for devices and
// servers that are gone (ENODEV, ENXIO) or that refuse a call (EOPNOTSUPP, EINVAL), for which this
// returns UNAVAILABLE.
absl::Status ReadError(int error, absl::string_view message);

// Returns `status`, an error about the file at `path`, a path that tells people nothing
// (/proc/PID/fd/N), with `name` in its place.
absl::Status Renamed(const absl::Status& status, absl::string_view path, absl::string_view name);

// Whether this is an error of the disk, or of access to it, that another copy of the file would not
// have: EIO, ESTALE, EACCES, ENODEV and the like.
bool IsReadError(const absl::Status& status);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_READ_ERROR_H_
