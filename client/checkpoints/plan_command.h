#ifndef MUSTER_CLIENT_CHECKPOINTS_PLAN_COMMAND_H_
#define MUSTER_CLIENT_CHECKPOINTS_PLAN_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// `muster plan`: where the parts of a model are placed when its memory is limited, from the headers
// of its files.
int RunPlanCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_PLAN_COMMAND_H_
