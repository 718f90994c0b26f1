#ifndef MUSTER_CLIENT_CLI_JOB_COMMANDS_H_
#define MUSTER_CLIENT_CLI_JOB_COMMANDS_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// The commands for submitted jobs and the nodes that run them (docs/jobs.md). Each returns its exit
// code; errors are one line on context.err.

// `muster submit [JOB.yaml] [OPTIONS] [-- PROGRAM ARGS...]`
int RunSubmitCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster list`
int RunListCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster describe JOB`
int RunDescribeCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster watch JOB`: prints each change until the job ends; its exit code is that of the job.
int RunWatchCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster logs JOB`
int RunLogsCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster cancel|suspend|resume|retry|forget JOB`
int RunJobActionCommand(const std::string& verb, const std::vector<std::string>& args,
                        const CommandContext& context);
// `muster nodes`, `muster cordon|drain|uncordon NODE`
int RunNodesCommand(const std::vector<std::string>& args, const CommandContext& context);
int RunNodeActionCommand(const std::string& verb, const std::vector<std::string>& args,
                         const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_JOB_COMMANDS_H_
