#include "tests/support/command.h"

#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <sstream>

#include "base/test_folder.h"

namespace muster::testing_support {

std::string CommandResult::last_line() const {
  const std::string text = output.substr(0, output.find_last_not_of('\n') + 1);
  return text.substr(text.rfind('\n') + 1);
}

std::vector<std::string> CommandResult::after(const std::string& words) const {
  std::vector<std::string> found;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find(words);
    if (at != std::string::npos) found.push_back(line.substr(at + words.size()));
  }
  return found;
}

CommandResult RunCommand(const std::string& command_line) {
  CommandResult result;
  FILE* pipe = popen(command_line.c_str(), "r");
  if (pipe == nullptr) return result;
  char buffer[1 << 14];
  size_t read = 0;
  while ((read = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0)
    result.output.append(buffer, read);
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

std::string MakeTestDir(const std::string& name) {
  std::string path = TestPath(name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

CommandResult MakeSigningKey(const std::string& key, const std::string& public_key) {
  return RunCommand("umask 077; openssl genpkey -algorithm ed25519 -out " + key +
                    " 2>&1 && openssl pkey -in " + key + " -pubout -out " + public_key + " 2>&1");
}

}  // namespace muster::testing_support
