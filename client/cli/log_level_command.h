#ifndef MUSTER_CLIENT_CLI_LOG_LEVEL_COMMAND_H_
#define MUSTER_CLIENT_CLI_LOG_LEVEL_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// `muster log-level`: shows or sets how much a running coordinator logs.
int RunLogLevelCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_LOG_LEVEL_COMMAND_H_
