#include "worker/checkpoint/read_error.h"

#include <errno.h>

#include "absl/strings/str_replace.h"

namespace muster {

absl::Status ReadError(int error, absl::string_view message) {
  const absl::Status status = absl::ErrnoToStatus(error, message);
  if (error == ENOENT || error == ENOTDIR || error == EISDIR || error == ENAMETOOLONG) {
    return status;
  }
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kDataLoss:
      return absl::UnavailableError(status.message());
    default:
      return status;
  }
}

absl::Status Renamed(const absl::Status& status, absl::string_view path, absl::string_view name) {
  if (status.ok() || path.empty()) return status;
  return absl::Status(status.code(), absl::StrReplaceAll(status.message(), {{path, name}}));
}

bool IsReadError(const absl::Status& status) {
  return absl::IsUnknown(status) || absl::IsAborted(status) || absl::IsPermissionDenied(status) ||
         absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace muster
