#ifndef MUSTER_CLIENT_CLI_JOB_COMMANDS_H_
#define MUSTER_CLIENT_CLI_JOB_COMMANDS_H_

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace muster::client {

// Commands for submitted jobs (docs/jobs.md). Each returns the exit code.

// `muster submit [job.yaml] [FLAGS] [-- PROGRAM ARGS]`.
int RunSubmitCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster list`.
int RunListCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster describe JOB`.
int RunDescribeCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster incidents JOB`.
int RunIncidentsCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster watch JOB`: ends with the job, and with its exit code.
int RunWatchCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster logs JOB`.
int RunLogsCommand(const std::vector<std::string>& args, const CommandContext& context);
// `muster cancel|suspend|resume|retry JOB`; `verb` is one of them.
int RunControlCommand(const std::string& verb, const std::vector<std::string>& args,
                      const CommandContext& context);
// `muster resize JOB --processes N|MIN:MAX`.
int RunResizeCommand(const std::vector<std::string>& args, const CommandContext& context);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_JOB_COMMANDS_H_
