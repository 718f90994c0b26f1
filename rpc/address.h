#ifndef MUSTER_RPC_ADDRESS_H_
#define MUSTER_RPC_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::rpc {

// The address at which a server listens or a client connects. Numeric only, so that no caller ever
// waits for a name server.
struct Address {
  std::string host;  // "127.0.0.1" or "::1" (without brackets); empty for a unix socket
  int port = 0;
  std::string path;  // the path of a unix socket; else empty

  bool is_unix() const { return !path.empty(); }
  // Returns whether no other machine can reach it.
  bool is_loopback() const;
  // "127.0.0.1:29400", "[::1]:29400", "unix:/run/muster.sock".
  std::string ToString() const;
};

// Reads "127.0.0.1:29400", "[::1]:29400", "localhost:29400" (meaning 127.0.0.1) or "unix:PATH".
// Port 0 is allowed. Errors: INVALID_ARGUMENT with the text and what is wrong with it.
absl::StatusOr<Address> ParseAddress(absl::string_view text);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_ADDRESS_H_
