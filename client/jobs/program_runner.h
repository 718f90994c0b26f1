#ifndef MUSTER_CLIENT_JOBS_PROGRAM_RUNNER_H_
#define MUSTER_CLIENT_JOBS_PROGRAM_RUNNER_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::client {

struct ProgramOutput {
  int exit_code = 0;  // 128 + the number of the signal that ended it
  std::string out = {};
  std::string err = {};
};

// Runs a program to its end, without a shell, and returns its output; argv[0] is a path or a name
// in PATH. The program gets the environment of this process except the variables `without`. Blocks.
// Errors: NOT_FOUND no such program; PERMISSION_DENIED it cannot be run; others if the machine has
// no process left.
using ProgramRunner = std::function<absl::StatusOr<ProgramOutput>(
    const std::vector<std::string>& argv, const std::vector<std::string>& without)>;

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_PROGRAM_RUNNER_H_
