#ifndef MUSTER_RPC_TOKEN_H_
#define MUSTER_RPC_TOKEN_H_

#include <grpcpp/impl/codegen/client_interceptor.h>
#include <grpcpp/impl/codegen/string_ref.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::rpc {

// A token is a secret that all callers of one coordinator share. It lies in a file and travels with
// every call and stream as metadata, `authorization: Bearer TOKEN`. All functions are thread-safe.

// The token in a file, without the white space around it. `what` names the file's flag or variable
// in errors. The file must be this user's and closed to all others (mode 0600); one owned by root
// may be readable by a group (0640), as those that a cluster mounts into containers are. Root may
// use any user's that is closed. Errors: NOT_FOUND; PERMISSION_DENIED, also for a file that others
// can read; INVALID_ARGUMENT if it is empty, too long, or has characters that a header cannot
// carry.
absl::StatusOr<std::string> ReadToken(const std::string& path, absl::string_view what);

// The token in the text of such a file. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::string> ParseToken(absl::string_view text, absl::string_view what);

// A new one: 256 bits from the system's random source.
std::string NewToken();

// Whether a call with this metadata is admitted. Takes equally long wherever the two tokens differ.
// Errors: UNAUTHENTICATED / BAD_TOKEN that names the flag.
absl::Status CheckToken(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                        absl::string_view token);

// The token of a call; nullopt: it has none.
std::optional<absl::string_view> BearerToken(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata);
// Whether two secrets are equal. Takes equally long wherever they differ; how long `wanted` is may
// be found out.
bool SameSecret(absl::string_view given, absl::string_view wanted);
// UNAUTHENTICATED / BAD_TOKEN for a call without a token, or with a wrong one, that names the flag.
absl::Status BadToken(bool has_token);

// Sends `token` with every call of a channel.
std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface> SendToken(
    absl::string_view token);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_TOKEN_H_
