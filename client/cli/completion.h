#ifndef MUSTER_CLIENT_CLI_COMPLETION_H_
#define MUSTER_CLIENT_CLI_COMPLETION_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"

namespace muster::client {

// The shells that CompletionScript knows: bash, zsh, fish.
const std::vector<std::string>& CompletionShells();

// Returns a script with which `shell` completes the words of `muster`: commands, flags, and the
// values of flags that take one of a few. `commands`: all of them ("muster launch", "muster
// checkpoints", "muster checkpoints list"), a group before its members. Pure.
std::string CompletionScript(absl::string_view shell, const std::vector<CommandSpec>& commands);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_COMPLETION_H_
