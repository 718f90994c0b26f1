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

// Where a command runs.
struct CommandContext {
  std::map<std::string, std::string> variables;
  std::ostream& out;
  std::ostream& err;
  // If set, commands do nothing but say what they are: Begin passes it their specification.
  std::function<void(const CommandSpec&)> describe = nullptr;
  // For commands that use those of another system. Null: there are none.
  ProgramRunner run_program = nullptr;
  // Where a command that asks questions reads the answers. Null: no answers are available.
  std::istream* in = nullptr;
  bool in_is_terminal = false;
  // Of the terminal that `out` is; 0: it is none.
  size_t columns = 0;
};

// An environment variable; empty: it is not set.
std::string Variable(const std::map<std::string, std::string>& variables, const std::string& name);

// Reads a command's arguments, and answers --help and mistakes. Returns -1, or the exit code if
// there is nothing more to do.
int Begin(const CommandSpec& spec, const std::vector<std::string>& args,
          const CommandContext& context, CommandLine* line);

// Whether the disk, or the user's share of it, is full, and no other resource is exhausted.
bool IsDiskFull(const absl::Status& status);

// Prints one line: the command and the error. Returns `code`; in place of kExitInternal kExitLimit
// if the disk is full.
int Fail(const CommandSpec& spec, const CommandContext& context, const absl::Status& status,
         int code);

// As Fail, with the code that fits an error of a coordinator or of SLURM: the reason that it gives
// tells a limit from a lack, and a job in another state from a wrong option.
int FailCall(const CommandSpec& spec, const CommandContext& context, const absl::Status& status);

// `status` with "; did you mean NAME?" if one of `names` is like `name`. As it is if `name` is one
// of them: then something else is missing.
absl::Status SuggestName(const absl::Status& status, const std::string& name,
                         const std::vector<std::string>& names);

// JSON as commands print it; bytes that are no UTF-8 are replaced.
std::string Dump(const nlohmann::ordered_json& value);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_COMMAND_H_
