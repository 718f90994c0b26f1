#ifndef MUSTER_CLIENT_CLI_TOKEN_COMMAND_H_
#define MUSTER_CLIENT_CLI_TOKEN_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// `muster token NAME ROLE`: makes a user's token, and its line for the coordinator's users file
// (docs/security.md). Calls no coordinator. Returns the exit code.
int RunTokenCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_TOKEN_COMMAND_H_
