#ifndef MUSTER_CLIENT_CLI_CONFIG_COMMAND_H_
#define MUSTER_CLIENT_CLI_CONFIG_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// `muster config [default|show|validate]`: asks for the settings of `muster launch` and writes them
// to its config file; or writes, explains or checks that file without questions. The questions are
// answered with single keys if both standard input and output are a terminal that can move its
// cursor, and by lines otherwise.
int RunConfigCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_CONFIG_COMMAND_H_
