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

// Returns the token in a file, without the white space around it. `what` names the file's flag or
// variable in errors. The file must belong to this user and be closed to all others (mode 0600);
// one owned by root may be readable by a group (0640), like those that a cluster mounts into
// containers. Root may use any user's file that is closed. Errors: NOT_FOUND; PERMISSION_DENIED,
// also for a file that others can read; INVALID_ARGUMENT if it is empty, too long, or has
// characters that a header cannot carry.
absl::StatusOr<std::string> ReadToken(const std::string& path, absl::string_view what);

// Returns the token in the text of such a file. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::string> ParseToken(absl::string_view text, absl::string_view what);

// Returns a new token: 256 bits from the system's random source.
std::string NewToken();

// Returns OK if a call with this metadata is admitted. Takes equally long wherever the two tokens
// differ. Errors: UNAUTHENTICATED / BAD_TOKEN that names the flag.
absl::Status CheckToken(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                        absl::string_view token);

// Returns the token of a call; nullopt if it has none.
std::optional<absl::string_view> BearerToken(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata);
// Returns whether two secrets are equal. Takes equally long wherever they differ, but may reveal
// the length of `wanted`.
bool SameSecret(absl::string_view given, absl::string_view wanted);
// Returns UNAUTHENTICATED / BAD_TOKEN that names the flag, for a call with a wrong token or without
// one.
absl::Status BadToken(bool has_token);

// Sends `token` with every call of a channel.
std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface> SendToken(
    absl::string_view token);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_TOKEN_H_
