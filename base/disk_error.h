#ifndef MUSTER_BASE_DISK_ERROR_H_
#define MUSTER_BASE_DISK_ERROR_H_

#include <errno.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster {

// The status of an errno of a disk, as absl::ErrnoToStatus; but a device or server that is gone is
// UNAVAILABLE. Abseil has NOT_FOUND for the first, as for a file that does not exist, and
// FAILED_PRECONDITION for the second.
inline absl::Status DiskError(int error, absl::string_view message) {
  switch (error) {
    case ENODEV:
    case ENOTCONN:
    case ESHUTDOWN:
      return absl::UnavailableError(absl::ErrnoToStatus(error, message).message());
    default:
      return absl::ErrnoToStatus(error, message);
  }
}

}  // namespace muster

#endif  // MUSTER_BASE_DISK_ERROR_H_
