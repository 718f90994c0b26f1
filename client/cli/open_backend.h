#ifndef MUSTER_CLIENT_CLI_OPEN_BACKEND_H_
#define MUSTER_CLIENT_CLI_OPEN_BACKEND_H_

#include <memory>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/command_line.h"
#include "client/jobs/job_backend.h"

namespace muster::client {

// The options of a command about submitted jobs: those that name a coordinator, --on, and `more`.
std::vector<OptionSpec> JobOptions(std::vector<OptionSpec> more);

// Whether --on or MUSTER_ON names SLURM.
bool IsOnSlurm(const CommandLine& line, const CommandContext& context);

// Opens the backend that --on, MUSTER_ON and the options of the connection select. Blocks as Dial
// does. Returns null after an error, which it has printed, with the exit code. `keeps_jobs`:
// refuses a launch's coordinator, which keeps no jobs.
std::unique_ptr<JobBackend> OpenBackend(const CommandSpec& spec, const CommandLine& line,
                                        const CommandContext& context, int* code,
                                        bool keeps_jobs = false);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_OPEN_BACKEND_H_
