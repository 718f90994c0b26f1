#ifndef MUSTER_CLIENT_CLI_LAUNCH_PLAN_H_
#define MUSTER_CLIENT_CLI_LAUNCH_PLAN_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/config/launch_config.h"
#include "client/jobs/program_runner.h"

namespace muster::client {

// Everything that is needed to run a job on this machine.
struct LaunchPlan {
  LaunchConfig config;
  std::vector<std::string> argv;
  std::map<std::string, std::string> variables;  // inherited by the workers
  int cores = 1;
  // Connect to config.coordinator_ip:port instead of hosting the coordinator on machine 0.
  bool coordinator_runs = false;
};

struct LaunchOutcome {
  enum class Kind { kSucceeded, kFailed, kStopped, kRefused };
  Kind kind = Kind::kSucceeded;
  std::string why;                      // kFailed: one line that names the worker
  std::vector<std::string> last_lines;  // of that worker
  absl::Status status;                  // kRefused: why nothing was run
  int signal = 0;                       // kStopped: the signal
  int restarts = 0;
};

// Runs jobs and programs for a command. The binary's main provides it, because commands know
// neither agents nor coordinators.
struct LaunchBackend {
  // Finds the path of a program. Errors: NOT_FOUND, PERMISSION_DENIED.
  std::function<absl::StatusOr<std::string>(absl::string_view program, absl::string_view path)>
      find_program;
  // Runs the job. Blocks until it has ended.
  std::function<LaunchOutcome(const LaunchPlan& plan)> run;
  // Runs a program in place of this process; argv[0] is its path. Returns only if that failed.
  std::function<absl::Status(const std::vector<std::string>& argv)> replace_process = nullptr;
  ProgramRunner run_program = nullptr;
};

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_LAUNCH_PLAN_H_
