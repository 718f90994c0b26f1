#ifndef MUSTER_RPC_FILES_H_
#define MUSTER_RPC_FILES_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::rpc {

// Returns the content of a PEM file. `what` names it in errors ("--tls_cert"). Errors: NOT_FOUND,
// PERMISSION_DENIED, or INVALID_ARGUMENT if it is not PEM.
absl::StatusOr<std::string> ReadPem(const std::string& path, absl::string_view what);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_FILES_H_
