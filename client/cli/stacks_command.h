#ifndef MUSTER_CLIENT_CLI_STACKS_COMMAND_H_
#define MUSTER_CLIENT_CLI_STACKS_COMMAND_H_

#include <string>
#include <vector>

#include "client/cli/command.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::client {

// `muster stacks JOB`: the stacks of a running job's processes. Returns the exit code.
int RunStacksCommand(const std::vector<std::string>& args, const CommandContext& context);

// Ranks whose threads are in the same functions; groups are in the order of their first ranks. Ids
// of processes and threads, states, and how many threads are at a place are ignored.
struct StackGroup {
  std::vector<int> rows;  // indices into the stacks
};
std::vector<StackGroup> GroupStacks(const std::vector<v1::RankStack>& stacks);

// Formats sorted numbers for people: "0-2,5".
std::string RanksText(const std::vector<int>& ranks);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_STACKS_COMMAND_H_
