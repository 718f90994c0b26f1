#include "client/cli/connection.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "client/cli/running_launch.h"
#include "rpc/address.h"
#include "rpc/channel.h"

namespace muster::client {
namespace {

// Chooses the launch of this user whose coordinator is meant: the only one, or the only one that
// runs `job`. Returns the exit code if there is none, else -1.
int ChooseLaunch(const CommandSpec& spec, const CommandContext& context, const std::string& job,
                 RunningLaunch* chosen) {
  std::vector<std::string> looked_in;
  const std::vector<RunningLaunch> launches = ListRunningLaunches(context.variables, &looked_in);
  if (launches.empty()) {
    return Fail(spec, context,
                absl::UnavailableError(
                    absl::StrCat("no launch of yours runs on this machine (looked into ",
                                 absl::StrJoin(looked_in, " and "),
                                 "); name a coordinator with --coordinator IP:PORT or "
                                 "MUSTER_COORDINATOR, or start one: muster coordinator --listen "
                                 "IP:PORT")),
                kExitUnreachable);
  }
  const RunningLaunch* found = launches.size() == 1 ? &launches[0] : nullptr;
  if (found == nullptr) {
    int fitting = 0;
    for (const RunningLaunch& launch : launches) {
      if (launch.job != job) continue;
      found = &launch;
      ++fitting;
    }
    if (fitting != 1) found = nullptr;
  }
  if (found != nullptr) {
    *chosen = *found;
    return -1;
  }
  context.err << spec.name << ": " << launches.size()
              << " launches of yours run on this machine: choose one by its job's name, or by "
                 "--coordinator and its address\n";
  for (const RunningLaunch& launch : launches) {
    context.err << "  job " << launch.job << ", pid " << launch.pid << ", started "
                << absl::FormatTime("%Y-%m-%d %H:%M:%S", launch.started, absl::LocalTimeZone())
                << ", --coordinator " << launch.address << "\n";
  }
  return kExitUsage;
}

// Returns the credentials for a coordinator at `address`, if a launch of this user runs it.
RunningLaunch LaunchAt(const CommandContext& context, const std::string& address) {
  const absl::StatusOr<rpc::Address> wanted = rpc::ParseAddress(address);
  if (!wanted.ok()) return {};
  for (RunningLaunch& launch : ListRunningLaunches(context.variables)) {
    if (launch.address == wanted->ToString()) return std::move(launch);
  }
  return {};
}

// Returns what to do if nothing answers at `address`.
std::string Remedy(const CommandLine& line, const RunningLaunch& launch,
                   const std::string& address) {
  if (!launch.address.empty()) {
    return absl::StrCat("It is that of your launch ", launch.job, " (pid ", launch.pid,
                        "), which may be stopped or about to end");
  }
  const bool by_flag = !line.Get("coordinator").empty();
  return absl::StrCat("Start it with muster coordinator --listen ", address,
                      ", or correct the address, which ",
                      by_flag ? "--coordinator sets" : "MUSTER_COORDINATOR sets");
}

struct DialError {
  absl::Status status;
  int code;
};

// Connects to connection->address as the options say; `launch`: this user's, if one runs it.
std::optional<DialError> Connect(const CommandLine& line, const CommandContext& context,
                                 const RunningLaunch& launch, Connection* connection) {
  const std::string& address = connection->address;
  connection->launch = launch.job;
  if (line.Has("timeout") && (!absl::ParseDuration(line.Get("timeout"), &connection->timeout) ||
                              connection->timeout <= absl::ZeroDuration())) {
    return DialError{absl::InvalidArgumentError(
                         absl::StrCat("--timeout ", line.Get("timeout"), ": write 5s or 1m")),
                     kExitUsage};
  }
  rpc::ChannelOptions options = {.tls = launch.tls, .token_file = launch.token_file};
  // The flag or, unless the coordinator belongs to this user's own launch, the variable.
  const bool is_own = !launch.address.empty();
  const auto file = [&](const char* flag, const char* variable) {
    return line.Has(flag) || is_own ? line.Get(flag) : Variable(context.variables, variable);
  };
  if (!is_own || line.Has("tls_ca") || line.Has("tls_cert") || line.Has("tls_key")) {
    options.tls = {file("tls_ca", "MUSTER_TLS_CA"), file("tls_cert", "MUSTER_TLS_CERT"),
                   file("tls_key", "MUSTER_TLS_KEY")};
  }
  if (!is_own || line.Has("token_file")) {
    options.token_file = file("token_file", "MUSTER_TOKEN_FILE");
  }
  auto channel = rpc::Connect(address, options);
  if (!channel.ok()) {
    return DialError{channel.status(),
                     absl::IsPermissionDenied(channel.status()) ? kExitDenied : kExitUsage};
  }
  connection->channel = *std::move(channel);
  const absl::Status status =
      rpc::WaitUntilConnected(*connection->channel, address, connection->timeout);
  if (absl::IsPermissionDenied(status)) return DialError{status, kExitDenied};
  if (!status.ok()) {
    return DialError{
        absl::UnavailableError(absl::StrCat(status.message(), " ", Remedy(line, launch, address))),
        kExitUnreachable};
  }
  return std::nullopt;
}

// Returns the address from the options or the environment; empty if there is none.
std::string NamedAddress(const CommandLine& line, const CommandContext& context) {
  const std::string address = line.Get("coordinator");
  return address.empty() ? Variable(context.variables, "MUSTER_COORDINATOR") : address;
}

}  // namespace

std::vector<OptionSpec> ConnectionOptions(std::vector<OptionSpec> more) {
  std::vector<OptionSpec> options = {
      {.name = "coordinator",
       .value_name = "ADDRESS",
       .help = "IP:PORT or unix:PATH. Default: $MUSTER_COORDINATOR, else your running launch on "
               "this machine"},
      {.name = "tls_ca",
       .value_name = "FILE",
       .help = "CA certificates that sign the coordinator's certificate. Default: those of your "
               "launch at this address, else $MUSTER_TLS_CA"},
      {.name = "tls_cert",
       .value_name = "FILE",
       .help = "Client certificate. Default: as --tls_ca, $MUSTER_TLS_CERT"},
      {.name = "tls_key",
       .value_name = "FILE",
       .help = "Private key of --tls_cert. Default: as --tls_ca, $MUSTER_TLS_KEY"},
      {.name = "token_file",
       .value_name = "FILE",
       .help =
           "File with the token to send. Default: the token of your launch at this address, else "
           "$MUSTER_TOKEN_FILE"},
      {.name = "timeout",
       .value_name = "TIME",
       .help = "How long to wait for an answer (default 5s)"}};
  for (OptionSpec& option : more) options.push_back(std::move(option));
  return options;
}

int Dial(const CommandSpec& spec, const CommandLine& line, const CommandContext& context,
         Connection* connection) {
  connection->address = NamedAddress(line, context);
  RunningLaunch launch;
  if (!connection->address.empty()) {
    launch = LaunchAt(context, connection->address);
  } else {
    const std::string job = line.words.empty() ? "" : line.words[0];
    if (const int code = ChooseLaunch(spec, context, job, &launch); code >= 0) return code;
    connection->address = launch.address;
  }
  const std::optional<DialError> error = Connect(line, context, launch, connection);
  return error.has_value() ? Fail(spec, context, error->status, error->code) : -1;
}

absl::StatusOr<std::optional<Connection>> FindCoordinator(const CommandLine& line,
                                                          const CommandContext& context,
                                                          const std::string& job) {
  Connection connection;
  connection.address = NamedAddress(line, context);
  RunningLaunch launch;
  if (!connection.address.empty()) {
    launch = LaunchAt(context, connection.address);
  } else {
    for (RunningLaunch& running : ListRunningLaunches(context.variables)) {
      if (running.job == job) launch = std::move(running);
    }
    if (launch.address.empty()) return std::optional<Connection>();
    connection.address = launch.address;
  }
  const std::optional<DialError> error = Connect(line, context, launch, &connection);
  if (error.has_value()) return error->status;
  return std::optional<Connection>(std::move(connection));
}

}  // namespace muster::client
