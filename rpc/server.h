#ifndef MUSTER_RPC_SERVER_H_
#define MUSTER_RPC_SERVER_H_

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "rpc/acceptor.h"
#include "rpc/tls_files.h"

namespace muster::rpc {

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // see ParseAddress; port 0 takes a free one
  // TLS is on if `tls.cert` and `tls.key` are set. With `tls.ca`, clients must show a certificate
  // that descends from it.
  TlsFiles tls = {};
  // Clients need not show a certificate; one that they show must descend from `tls.ca`. Only for
  // services that authenticate their callers in another way (`checks_token`).
  bool certificate_optional = false;
  // Certificates that have been replaced are used within this time, for connections that are made
  // from then on (rpc/certificates.h).
  absl::Duration tls_look = absl::Minutes(1);
  // For a unix socket: only processes of this user may connect.
  std::optional<uid_t> only_user = {};
  int max_message_bytes = 4 << 20;
  // `services` refuse every call that does not carry their token (rpc/token.h).
  bool checks_token = false;
  // Any process that reaches the address may call: on the loopback interface that is every user of
  // this machine, so it must be requested explicitly. Refused off the loopback interface.
  bool insecure = false;
  bool health = true;  // gRPC's own health service, on its own threads
  // Lists the services, for grpcurl and similar tools. Calls need no token. Once a server of this
  // process has reflection, later servers of the process have it, too.
  bool reflection = false;
  // How long a connection may take to be set up, TLS and HTTP/2 together, and how long it may be
  // without a call. After that it is closed, and clients connect again automatically. A unix
  // socket, which serves one user, waits for calls without a limit.
  absl::Duration setup_timeout = absl::Seconds(20);
  absl::Duration idle_timeout = absl::Minutes(5);
};

// Returns INVALID_ARGUMENT, one line with the ways out, for options under which a server would not
// know its callers (see Server) or a secret would travel in clear text; or for a bad address. For
// callers that have work to do before the start.
absl::Status CheckCallersAreKnown(const ServerOptions& options);

// A running gRPC server. It knows its callers in one of three ways: a unix socket, which has an
// owner and a mode; client certificates; or a token. Off the loopback interface it needs TLS as
// well. Thread-safe.
class Server {
 public:
  // Starts serving `services`, which must outlive the server. Errors, each one line that names the
  // address or file: INVALID_ARGUMENT bad address or TLS files, or no way to authenticate callers;
  // ALREADY_EXISTS the port is taken; PERMISSION_DENIED or UNAVAILABLE it cannot be bound.
  // `prepare` may add to the server before it is built, such as a generic service with its queue.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const ServerOptions& options, const std::vector<grpc::Service*>& services,
      absl::FunctionRef<void(grpc::ServerBuilder&)> prepare = [](grpc::ServerBuilder&) {});
  ~Server();

  // The bound port; 0 for a unix socket.
  int port() const { return port_; }
  // The address for clients, with the bound port.
  const std::string& address() const { return address_; }

  // The standard health service's status for every service. Starts as serving.
  void SetServing(bool serving);

  // Accepts no more calls, cancels those that run after `grace`, and waits for all of them to end.
  // Repeatable.
  void Shutdown(absl::Duration grace);

 private:
  Server() = default;

  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;
  int port_ = 0;
  std::string address_;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SERVER_H_
