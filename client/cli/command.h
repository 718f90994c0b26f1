#ifndef MUSTER_CLIENT_CLI_COMMAND_H_
#define MUSTER_CLIENT_CLI_COMMAND_H_

#include <functional>
#include <istream>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/command_line.h"
#include "client/jobs/program_runner.h"

namespace muster::client {

// The environment of a command.
struct CommandContext {
  std::map<std::string, std::string> variables;
  std::ostream& out;
  std::ostream& err;
  // If set, commands only describe themselves: Begin passes it their specification.
  std::function<void(const CommandSpec&)> describe = nullptr;
  // Runs the commands of another system, for commands that use them. Null: not available.
  ProgramRunner run_program = nullptr;
  // The input from which a command that asks questions reads the answers. Null: none.
  std::istream* in = nullptr;
  bool in_is_terminal = false;
  // The width of the terminal that `out` is; 0: `out` is not a terminal.
  size_t columns = 0;
};

// Returns an environment variable; empty if it is not set.
std::string Variable(const std::map<std::string, std::string>& variables, const std::string& name);

// Reads a command's arguments, and handles --help and mistakes. Returns -1, or the exit code if
// nothing more is to be done.
int Begin(const CommandSpec& spec, const std::vector<std::string>& args,
          const CommandContext& context, CommandLine* line);

// Returns whether the disk, or the user's quota on it, is full, and no other resource is exhausted.
bool IsDiskFull(const absl::Status& status);

// Prints one line: the command and the error. Returns `code`; in place of kExitInternal, kExitLimit
// if the disk is full.
int Fail(const CommandSpec& spec, const CommandContext& context, const absl::Status& status,
         int code);

// Does the same as Fail, with the code that fits an error of a coordinator or of SLURM: the error's
// reason distinguishes a limit from something missing, and a job in another state from a wrong
// option.
int FailCall(const CommandSpec& spec, const CommandContext& context, const absl::Status& status);

// Returns `status` with "; did you mean NAME?" if one of `names` is similar to `name`. Unchanged if
// `name` is one of them: then something else is missing.
absl::Status SuggestName(const absl::Status& status, const std::string& name,
                         const std::vector<std::string>& names);

// Formats JSON as commands print it; bytes that are not UTF-8 are replaced.
std::string Dump(const nlohmann::ordered_json& value);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_COMMAND_H_
