#ifndef MUSTER_CLIENT_CHECKPOINTS_ESTIMATE_COMMAND_H_
#define MUSTER_CLIENT_CHECKPOINTS_ESTIMATE_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// `muster estimate-memory`: the memory for loading and training a model, from the headers of its
// files.
int RunEstimateMemoryCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_ESTIMATE_COMMAND_H_
