#ifndef MUSTER_WORKER_CHECKPOINT_READ_ERROR_H_
#define MUSTER_WORKER_CHECKPOINT_READ_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster {

// The status of a system call that failed with `error` while something of a checkpoint, or of
// weights, was looked for or read: `message` and the system's words. NOT_FOUND only if it does not
// exist. Never DATA_LOSS, UNIMPLEMENTED or INVALID_ARGUMENT, which are what is found in a file, but
// for a name that is too long: Abseil has these, and NOT_FOUND, also for devices and servers that
// are gone (ENODEV, ENXIO) or that refuse a call (EOPNOTSUPP, EINVAL), which is UNAVAILABLE here.
absl::Status ReadError(int error, absl::string_view message);

// `status` of something that was done with the file at `path`, which says nothing to people
// (/proc/PID/fd/N), with `name` in its place.
absl::Status Renamed(const absl::Status& status, absl::string_view path, absl::string_view name);

// Whether this is an error of the disk, or of the way to it, that another copy of the file does not
// have: EIO, ESTALE, EACCES, ENODEV and the like.
bool IsReadError(const absl::Status& status);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_READ_ERROR_H_
