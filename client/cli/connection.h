#ifndef MUSTER_CLIENT_CLI_CONNECTION_H_
#define MUSTER_CLIENT_CLI_CONNECTION_H_

#include <grpcpp/channel.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cli/command_line.h"

namespace muster::client {

// A command's connection to a coordinator.
struct Connection {
  std::string address;
  absl::Duration timeout = absl::Seconds(5);  // of each call
  std::shared_ptr<grpc::Channel> channel;
  std::string launch = {};  // the job of this user's launch that runs it here; empty: none
};

// The options that name a coordinator and the ways to reach it, and `more`.
std::vector<OptionSpec> ConnectionOptions(std::vector<OptionSpec> more);

// Connects to the coordinator that --coordinator or MUSTER_COORDINATOR names, else to that of this
// user's only launch, or of the launch whose job is the first word of the command. Blocks for
// --timeout. Returns -1, or after an error, which it has printed, the exit code.
int Dial(const CommandSpec& spec, const CommandLine& line, const CommandContext& context,
         Connection* connection);

// Connects to the coordinator that --coordinator or MUSTER_COORDINATOR names, else to that of this
// user's launch of `job`. nullopt: there is no such launch. Blocks for --timeout.
absl::StatusOr<std::optional<Connection>> FindCoordinator(const CommandLine& line,
                                                          const CommandContext& context,
                                                          const std::string& job);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_CONNECTION_H_
