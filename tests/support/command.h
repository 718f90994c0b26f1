#ifndef MUSTER_TESTS_SUPPORT_COMMAND_H_
#define MUSTER_TESTS_SUPPORT_COMMAND_H_

#include <string>
#include <vector>

namespace muster::testing_support {

struct CommandResult {
  int exit_code = -1;  // -1: ended by a signal, or could not be started
  std::string output;  // standard output, and standard error where the command joins them
  // Returns the last line of the output that is not empty.
  std::string last_line() const;
  // Returns what follows `words` in each line of the output that has them.
  std::vector<std::string> after(const std::string& words) const;
};

// Runs a shell command line to its end. For tests only: product code never goes through a shell.
CommandResult RunCommand(const std::string& command_line);

// Makes a fresh folder under the test's own temporary directory.
std::string MakeTestDir(const std::string& name);

// Writes a new private Ed25519 key, of mode 0600, and its public one, both as PEM.
CommandResult MakeSigningKey(const std::string& key, const std::string& public_key);

}  // namespace muster::testing_support

#endif  // MUSTER_TESTS_SUPPORT_COMMAND_H_
