#ifndef MUSTER_CLIENT_CHECKPOINTS_CHECKPOINT_COMMANDS_H_
#define MUSTER_CLIENT_CHECKPOINTS_CHECKPOINT_COMMANDS_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// Commands on folders of checkpoints and weights. They need no coordinator and no torch; `list`
// asks a coordinator if one is reachable.

// `muster checkpoints list|inspect|verify|diff|export|prune`.
int RunCheckpointsCommand(const std::vector<std::string>& args, const CommandContext& context);

// `muster merge-weights`: writes weights of any format as safetensors.
int RunMergeWeightsCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_CHECKPOINT_COMMANDS_H_
