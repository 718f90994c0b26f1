#ifndef MUSTER_CLIENT_CLI_MUSTER_COMMAND_H_
#define MUSTER_CLIENT_CLI_MUSTER_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/launch_command.h"
#include "client/cli/launch_plan.h"

namespace muster::client {

// The `muster` command: `args` are the words after its name, `self` is the binary's path. Returns
// the exit code.
int RunMuster(const std::vector<std::string>& args, const CommandContext& context,
              const LaunchBackend& backend, const std::string& self);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_MUSTER_COMMAND_H_
