#ifndef MUSTER_CLIENT_CLI_STACKS_COMMAND_H_
#define MUSTER_CLIENT_CLI_STACKS_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::client {

// `muster stacks JOB`: where the processes of a running job are. Returns the exit code.
int RunStacksCommand(const std::vector<std::string>& args, const CommandContext& context);

// Ranks whose threads are in the same functions, in the order of the first of each. Numbers of
// processes and threads, states, and how many threads are at a place make no difference.
struct StackGroup {
  std::vector<int> rows;  // indices into the stacks
};
std::vector<StackGroup> GroupStacks(const std::vector<v1::RankStack>& stacks);

// "0-2,5": sorted numbers as people write them.
std::string RanksText(const std::vector<int>& ranks);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_STACKS_COMMAND_H_
