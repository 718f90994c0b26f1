#include "rpc/channel.h"

#include <fcntl.h>
#include <grpc/support/time.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "rpc/address.h"
#include "rpc/certificates.h"
#include "rpc/process.h"
#include "rpc/token.h"

namespace muster::rpc {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(100);
// Servers close a connection that they refuse at once.
constexpr int kRefusalMilliseconds = 200;

// Uses the monotonic clock: gRPC converts a deadline of the wall clock by reading that clock again,
// and a clock that jumps between the two would end the call at once.
gpr_timespec GrpcDeadline(absl::Duration timeout) {
  const absl::Duration bounded = std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365));
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(bounded), GPR_TIMESPAN));
}

absl::Status NotForThisUser(absl::string_view path) {
  return absl::PermissionDeniedError(absl::StrCat(
      "user ", geteuid(), " may not connect to the coordinator's socket ", path,
      ": run this as the user that the coordinator serves, or have it listen on an IP address "
      "with a token"));
}

// Fails at once for a socket that this user may not connect to: waiting would not help.
absl::Status CheckSocketIsOpen(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, "unix:")) return absl::OkStatus();
  const std::string path(address);
  if (faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0 || errno != EACCES) {
    return absl::OkStatus();
  }
  return NotForThisUser(path);
}

// Checks a connection that has failed: a server closes the connections of all users but its own,
// even root's, although the mode of the file lets root in.
absl::Status CheckSocketIsOurs(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, "unix:")) return absl::OkStatus();
  const std::string path(address);
  struct stat info;
  sockaddr_un name{};
  if (stat(path.c_str(), &info) != 0 || info.st_uid == geteuid() ||
      path.size() >= sizeof(name.sun_path)) {
    return absl::OkStatus();
  }
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size() + 1);
  const OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.open()) return absl::OkStatus();
  // A server that refuses us closes the connection; one that is starting or suspended sends
  // nothing.
  bool refuses = false;
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0) {
    pollfd event = {fd.get(), POLLIN, 0};
    char byte;
    refuses = poll(&event, 1, kRefusalMilliseconds) == 1 && read(fd.get(), &byte, 1) == 0;
  }
  return refuses ? NotForThisUser(path) : absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Credentials(const TlsFiles& tls,
                                                                      absl::Duration look) {
  if (tls.ca.empty()) {
    if (!tls.cert.empty() || !tls.key.empty()) {
      return absl::InvalidArgumentError(
          "a TLS certificate without tls_ca: name the certificates to trust");
    }
    return grpc::InsecureChannelCredentials();
  }
  if (tls.cert.empty() != tls.key.empty()) {
    return absl::InvalidArgumentError("tls_cert and tls_key go together");
  }
  return ChannelTls(tls, look);
}

grpc::ChannelArguments Arguments(const ChannelOptions& options) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
              static_cast<int>(absl::ToInt64Milliseconds(options.keepalive)));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // gRPC also takes this for the time that one attempt may take (connecting, TLS and HTTP/2
  // together); it delays no other attempt. On a loaded machine or a slow link that takes seconds.
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 10'000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS,
              static_cast<int>(absl::ToInt64Milliseconds(options.max_backoff)));
  args.SetInt(GRPC_ARG_CLIENT_IDLE_TIMEOUT_MS,
              static_cast<int>(absl::ToInt64Milliseconds(options.idle_timeout)));
  args.SetInt(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, options.max_message_bytes);
  args.SetInt(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, options.max_message_bytes);
  // Measuring the bandwidth costs a ping for each message of a quiet connection; a fixed window
  // does as well here.
  args.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  args.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
  // The address is numeric: a proxy in the environment or a service configuration in DNS can only
  // do harm.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  // Callers that know whether a retry is safe retry by themselves.
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  if (options.own_connection) args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (!options.tls_server_name.empty()) args.SetSslTargetNameOverride(options.tls_server_name);
  return args;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(absl::string_view address,
                                                       const ChannelOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const Address parsed, ParseAddress(address));
  if (!parsed.is_unix() && parsed.port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", address, "': cannot connect to port 0"));
  }
  if (!parsed.is_loopback()) {
    const bool shows_itself =
        !options.tls.cert.empty() || !options.token_file.empty() || !options.token.empty();
    if (options.tls.ca.empty() || !shows_itself) {
      return absl::InvalidArgumentError(absl::StrCat(
          "refusing to connect to ", parsed.ToString(),
          options.tls.ca.empty() ? " without TLS" : " without authentication",
          ": off the loopback interface a coordinator requires --tls_ca with --tls_cert and "
          "--tls_key, or --tls_ca with --token_file"));
    }
  }
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (!options.token_file.empty() || !options.token.empty()) {
    std::string token = options.token;
    if (token.empty()) {
      MUSTER_ASSIGN_OR_RETURN(token, ReadToken(options.token_file, "token_file"));
    }
    interceptors.push_back(SendToken(token));
  }
  MUSTER_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ChannelCredentials> credentials,
                          Credentials(options.tls, options.tls_look));
  PrepareProcess();
  const std::string target =
      parsed.is_unix()
          ? parsed.ToString()
          : absl::StrCat(parsed.host.find(':') == std::string::npos ? "ipv4:" : "ipv6:",
                         parsed.ToString());
  return grpc::experimental::CreateCustomChannelWithInterceptors(
      target, credentials, Arguments(options), std::move(interceptors));
}

std::string WhyNotConnected(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  SetTimeout(context, absl::Seconds(1));
  v1::StatusReply reply;
  const grpc::Status status = v1::Admin::NewStub(channel)->Status(&context, {}, &reply);
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return "";
  const std::string message = status.error_message();
  absl::string_view text = message;
  // gRPC puts its own layers in front of the system's error.
  for (const absl::string_view layer : {"last error: ", "Failed to connect to remote host: "}) {
    const size_t at = text.rfind(layer);
    if (at != absl::string_view::npos) text.remove_prefix(at + layer.size());
  }
  absl::ConsumePrefix(&text, "UNKNOWN: ");
  return std::string(text);
}

absl::Status WaitUntilConnected(grpc::Channel& channel, absl::string_view address,
                                absl::Duration timeout) {
  MUSTER_RETURN_IF_ERROR(CheckSocketIsOpen(address));
  // gRPC connects again by itself, with a backoff that is shorter than these pauses.
  absl::Duration pause = kFirstPause, left = timeout;
  int tries = 0;
  bool failed = false;
  do {
    pause = std::min(pause, left);
    if (channel.WaitForConnected(GrpcDeadline(pause))) return absl::OkStatus();
    failed = channel.GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_TRANSIENT_FAILURE;
    if (failed) {
      ++tries;
      MUSTER_RETURN_IF_ERROR(CheckSocketIsOurs(address));
    }
    left -= pause;
    pause *= 2;
  } while (left > absl::ZeroDuration());
  const std::string error = failed ? WhyNotConnected(channel.shared_from_this()) : "";
  absl::string_view why = error;
  absl::ConsumePrefix(&why, absl::StrCat(address, ": "));
  return absl::UnavailableError(absl::StrCat(
      "no coordinator answers at ", address, " (", std::max(tries, 1),
      tries > 1 ? " tries in " : " try in ", absl::FormatDuration(timeout), ", ",
      tries > 1 ? "the last: " : "", why.empty() ? "no reply" : why, "): is it running?"));
}

void SetTimeout(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(GrpcDeadline(timeout));
}

}  // namespace muster::rpc
