#include "rpc/server.h"

#include <dlfcn.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "rpc/acceptor.h"
#include "rpc/address.h"
#include "rpc/certificates.h"
#include "rpc/dead_socket.h"
#include "rpc/process.h"
#include "third_party/grpc_reflection.h"

namespace muster::rpc {
namespace {

// How long a server that has bound its socket gets to listen. That takes microseconds, but a loaded
// machine may stop the process between the two.
constexpr int kUntilItListensMilliseconds = 100;

}  // namespace

absl::Status CheckCallersAreKnown(const ServerOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const Address address, ParseAddress(options.listen));
  if (address.is_unix()) return absl::OkStatus();
  const bool tls = !options.tls.cert.empty();
  const bool known =
      (tls && !options.tls.ca.empty() && !options.certificate_optional) || options.checks_token;
  const char* const way_out =
      address.is_loopback()
          ? "every user of this machine could command its jobs; give --token_file, or --tls_cert, "
            "--tls_key and --tls_ca (client certificates), or listen on unix:PATH, or give "
            "--insecure if that is intended"
          : "anyone with access to it could control its jobs; give --tls_cert, --tls_key and "
            "--tls_ca "
            "(client certificates), or --tls_cert, --tls_key and --token_file, or listen on "
            "127.0.0.1";
  if (!address.is_loopback() && !tls) {
    return absl::InvalidArgumentError(absl::StrCat(
        "refusing to listen on ", address.ToString(), " without TLS: ",
        options.checks_token ? "the token would travel in clear text, and " : "", way_out));
  }
  if (known || (options.insecure && address.is_loopback())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("refusing to listen on ", address.ToString(),
                                                 " without authentication of callers: ", way_out));
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(
    const ServerOptions& options, const std::vector<grpc::Service*>& services,
    absl::FunctionRef<void(grpc::ServerBuilder&)> prepare) {
  PrepareProcess();
  MUSTER_ASSIGN_OR_RETURN(Address address, ParseAddress(options.listen));
  std::shared_ptr<grpc::ServerCredentials> credentials;
  if (options.tls.cert.empty() != options.tls.key.empty()) {
    return absl::InvalidArgumentError("tls_cert and tls_key go together: give both or none");
  }
  if (options.tls.cert.empty() && !options.tls.ca.empty()) {
    return absl::InvalidArgumentError(
        "tls_ca without tls_cert and tls_key: give all three to check clients");
  }
  MUSTER_RETURN_IF_ERROR(CheckCallersAreKnown(options));
  if (options.tls.cert.empty()) {
    credentials = grpc::InsecureServerCredentials();
  } else {
    MUSTER_ASSIGN_OR_RETURN(credentials,
                            ServerTls(options.tls, options.certificate_optional, options.tls_look));
  }
  if (address.is_unix()) {
    MUSTER_RETURN_IF_ERROR(
        RemoveDeadSocket(address, [] { poll(nullptr, 0, kUntilItListensMilliseconds); }));
  }
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<Acceptor> acceptor,
                          Acceptor::Listen(address, options.only_user));
  address.port = acceptor->port();

  grpc::EnableDefaultHealthCheckService(options.health);
  if (options.reflection && dlopen(kGrpcReflectionLibrary, RTLD_NOW | RTLD_LOCAL) == nullptr) {
    return absl::UnavailableError(absl::StrCat("no reflection: ", dlerror()));
  }
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1 << 20);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             static_cast<int>(absl::ToInt64Milliseconds(options.setup_timeout)));
  if (!address.is_unix()) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                               static_cast<int>(absl::ToInt64Milliseconds(options.idle_timeout)));
  }
  // For the same reason as in channel.cc.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
  // Less memory for each of a thousand connections: smaller buffers to read into, no history for
  // channelz.
  builder.AddChannelArgument(GRPC_ARG_TCP_READ_CHUNK_SIZE, 1024);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
  auto sink = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  for (grpc::Service* service : services) builder.RegisterService(service);
  prepare(builder);
  std::unique_ptr<Server> server(new Server());
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) {
    if (!options.tls.cert.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cannot serve TLS on ", address.ToString(), " with '", options.tls.cert, "' and '",
          options.tls.key, "': do the key and the certificate belong together?"));
    }
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.ToString()));
  }
  server->port_ = address.port;
  server->address_ = address.ToString();
  acceptor->Start(std::move(sink));
  server->acceptor_ = std::move(acceptor);
  return server;
}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

void Server::SetServing(bool serving) {
  if (auto* health = server_->GetHealthCheckService()) health->SetServingStatus(serving);
}

void Server::Shutdown(absl::Duration grace) {
  if (server_ == nullptr) return;
  acceptor_.reset();
  const absl::Duration bounded = std::clamp(grace, absl::ZeroDuration(), absl::Hours(1));
  server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(bounded));
  server_->Wait();
}

}  // namespace muster::rpc
