#ifndef MUSTER_CLIENT_CLI_INFO_COMMANDS_H_
#define MUSTER_CLIENT_CLI_INFO_COMMANDS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/command.h"
#include "client/cli/command_line.h"

namespace muster::client {

// `muster env`: prints this machine, this installation and this configuration.
int RunEnvCommand(const std::vector<std::string>& args, const CommandContext& context);

// `muster status`: the jobs and workers of a running coordinator.
int RunStatusCommand(const std::vector<std::string>& args, const CommandContext& context);

// `muster trigger`: raises a trigger as an operator.
int RunTriggerCommand(const std::vector<std::string>& args, const CommandContext& context);

// `muster barrier`: shows a job's barriers and their late ranks, or cancels a barrier.
int RunBarrierCommand(const std::vector<std::string>& args, const CommandContext& context);

// `muster quarantine`: keeps a host out of a job's next generations, or lets it in again.
int RunQuarantineCommand(const std::vector<std::string>& args, const CommandContext& context);

// `muster remove`: removes a job that has ended.
int RunRemoveCommand(const std::vector<std::string>& args, const CommandContext& context);

// `muster checkpoints registered|pin|unpin|promote|hold-back`: what a coordinator knows about a
// job's checkpoints. `verb`, one of RegistryVerbs, is the second word.
std::vector<std::string> RegistryVerbs();
int RunRegistryCommand(const std::string& verb, const std::vector<std::string>& args,
                       const CommandContext& context);

// A coordinator's facts about one checkpoint of a job.
struct RegisteredState {
  std::string sha256;  // of its record, in hexadecimal digits; empty while it is being prepared
  std::string state;   // "sealed", "published", ...
  bool promoted = false;
  bool pinned = false;
};
// Asks the coordinator that --coordinator or MUSTER_COORDINATOR names, else that of this user's
// launch of the job. Returns nothing if there is no such coordinator, or it does not know the job.
// Blocks for --timeout.
absl::StatusOr<std::vector<RegisteredState>> FindRegisteredStates(const CommandLine& line,
                                                                  const CommandContext& context,
                                                                  const std::string& job);

// The result of checking the files of a checkpoint, for its coordinator.
struct FoundState {
  uint64_t id = 0;
  std::string sha256;     // of its record, in hexadecimal digits
  bool contents = false;  // every byte was read
  std::string damage;     // empty: it is whole
};
// Reports it to the coordinator that FindRegisteredStates() asks. Errors: NOT_FOUND if there is
// none; those of the call.
absl::Status ReportFoundState(const CommandLine& line, const CommandContext& context,
                              const std::string& job, const FoundState& found);

// `muster version`.
int RunVersionCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_INFO_COMMANDS_H_
