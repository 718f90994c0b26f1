#ifndef MUSTER_CLIENT_CLI_NODE_COMMANDS_H_
#define MUSTER_CLIENT_CLI_NODE_COMMANDS_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// `muster nodes`: the machines whose agents wait for jobs. Returns the exit code.
int RunNodesCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster cordon|drain|uncordon NODE`; `verb` is one of them.
int RunNodeControlCommand(const std::string& verb, const std::vector<std::string>& args,
                          const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_NODE_COMMANDS_H_
