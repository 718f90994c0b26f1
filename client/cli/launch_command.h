#ifndef MUSTER_CLIENT_CLI_LAUNCH_COMMAND_H_
#define MUSTER_CLIENT_CLI_LAUNCH_COMMAND_H_

#include <map>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/command_line.h"
#include "client/cli/launch_plan.h"

namespace muster::client {

// `muster launch`: runs a program in several processes. Returns the exit code; every error is one
// line on `err`; that of a failed job is followed by the last lines of the worker that failed
// first.
int RunLaunchCommand(const std::vector<std::string>& args, const CommandContext& context,
                     const LaunchBackend& backend);

// `muster test`: runs the checks program that ships with Muster in the same way as `muster launch`
// runs any other. `self` is the path of this binary: the program is next to it.
int RunTestCommand(const std::vector<std::string>& args, const CommandContext& context,
                   const LaunchBackend& backend, const std::string& self);

// The options of both, for docs and tests.
CommandSpec LaunchCommandSpec();

// Works out the settings of a launch from flags, variables and the config file. `config_path` (may
// be null) receives the file's path.
absl::StatusOr<LaunchConfig> ReadLaunchConfig(const CommandLine& line,
                                              const std::map<std::string, std::string>& variables,
                                              ConfigPath* config_path);

// One line per setting: name, value, source.
std::string DescribeLaunch(const LaunchConfig& config);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_LAUNCH_COMMAND_H_
