#ifndef MUSTER_CLIENT_CLI_BACKUP_COMMAND_H_
#define MUSTER_CLIENT_CLI_BACKUP_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// `muster backup`: writes the state of a running coordinator to a file.
int RunBackupCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_BACKUP_COMMAND_H_
