#ifndef MUSTER_RPC_CHANNEL_H_
#define MUSTER_RPC_CHANNEL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "rpc/tls_files.h"

namespace muster::rpc {

struct ChannelOptions {
  // TLS is on if `tls.ca` is set. The certificate and key authenticate the client, if the server
  // requires it.
  TlsFiles tls = {};
  // Certificates that have been replaced are used within this time, by connections that are made
  // from then on (rpc/certificates.h).
  absl::Duration tls_look = absl::Minutes(1);
  // The name in the server's certificate, if it is not the address.
  std::string tls_server_name = {};
  // File with the coordinator's token, which goes with every call (rpc/token.h).
  std::string token_file = {};
  std::string token = {};  // in place of the file, the token itself
  absl::Duration keepalive = absl::Seconds(30);
  absl::Duration max_backoff = absl::Seconds(5);  // between attempts to connect
  int max_message_bytes = 4 << 20;
  // A connection without calls for this long, or twice as long, is closed, and reopened for the
  // next call; at least a second. By default sooner than servers do it (ServerOptions), which cuts
  // off a call that is on its way.
  absl::Duration idle_timeout = absl::Minutes(2);
  // Channels with the same options and address share a connection unless this is set.
  bool own_connection = false;
};

// A channel to `address` ("127.0.0.1:29400", "[::1]:29400", "unix:/path"). Returns at once: the
// connection is made on first use, and made again with a backoff of 50 ms to 5 s with jitter for as
// long as the channel lives. The channel is thread-safe. Errors: INVALID_ARGUMENT for a bad
// address, or one off the loopback interface without TLS, or without a certificate or a token: no
// Muster server answers there, and a token must not travel in clear text; or names the error of a
// file.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(absl::string_view address,
                                                       const ChannelOptions& options = {});

// The error of the last attempt to connect: "Connection refused". Empty: there was none, or it
// succeeded. Blocks for at most a second.
std::string WhyNotConnected(const std::shared_ptr<grpc::Channel>& channel);

// Blocks until the channel is connected. Errors: PERMISSION_DENIED at once for a unix socket that
// this user may not connect to, or whose process serves another user alone; UNAVAILABLE after
// `timeout`, naming `address`, how often the connection was found to have failed in that time, and
// the error of the last attempt.
absl::Status WaitUntilConnected(grpc::Channel& channel, absl::string_view address,
                                absl::Duration timeout);

// Every call needs a deadline: the coordinator refuses a unary call without one. `timeout` must be
// positive; it is cut at one year.
void SetTimeout(grpc::ClientContext& context, absl::Duration timeout);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_CHANNEL_H_
