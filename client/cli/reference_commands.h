#ifndef MUSTER_CLIENT_CLI_REFERENCE_COMMANDS_H_
#define MUSTER_CLIENT_CLI_REFERENCE_COMMANDS_H_

#include <functional>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/command_line.h"

namespace muster::client {

// Returns every command, a group before its members.
using DescribeCommands = std::function<std::vector<CommandSpec>()>;

// `muster completion bash|zsh|fish`: prints the script with which a shell completes commands.
int RunCompletionCommand(const std::vector<std::string>& args, const CommandContext& context,
                         const DescribeCommands& describe);

// `muster man [COMMAND...]`: prints a page for man(1), or writes all pages into a folder.
int RunManCommand(const std::vector<std::string>& args, const CommandContext& context,
                  const DescribeCommands& describe);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_REFERENCE_COMMANDS_H_
