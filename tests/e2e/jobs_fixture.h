#ifndef MUSTER_TESTS_E2E_JOBS_FIXTURE_H_
#define MUSTER_TESTS_E2E_JOBS_FIXTURE_H_

#include <sys/types.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/e2e/launch_fixture.h"

namespace muster {

// A coordinator, agents that wait for jobs, and `muster`. The test depends on the three programs.
class JobsFixture : public ClusterFixture {
 protected:
  void SetUp() override;

  // Returns what a muster command prints or, if it fails, its errors. It has to end with `code`.
  std::string Run(std::vector<std::string> args, int code = 0);
  // The same as Run, for errors that are one line.
  std::string OneLine(std::vector<std::string> args, int code);
  // Starts the agent of a node with two CPUs. It may not have reached the coordinator yet.
  std::unique_ptr<Command> StartAgent(const std::string& name,
                                      const std::vector<std::string>& options = {});
  // The same, but waits until the coordinator has it.
  std::unique_ptr<Command> StartNode(const std::string& name,
                                     const std::vector<std::string>& options = {});
  std::string NodeState(const std::string& name);
  // Submits a job named "job" of a shell script. Returns its id.
  std::string Submit(std::vector<std::string> options, const std::string& script);
  nlohmann::json Get(const std::string& job);
  static bool HasEnded(const std::string& state);
  std::string StateOf(const std::string& job) { return Get(job)["state"]; }
  void WaitForState(const std::string& job, const std::string& state);
  // Makes the coordinator lose a silent node within the time of a test, from now on.
  void ShortenNodeLease();
  static void WaitForText(const std::string& path, const std::string& text);
  // Returns the runners of the attempts that this node has kept, of one job or of all; some may
  // have ended.
  std::vector<pid_t> RunnersOn(const std::string& node, const std::string& job = "");
  // Returns the runner of the only one of these attempts; 0: there is not exactly one.
  pid_t RunnerOn(const std::string& node, const std::string& job = "");
  // Returns the process that a rank has written to its file.
  pid_t PidIn(const std::string& file);

  std::unique_ptr<Command> coordinator_;
};

}  // namespace muster

#endif  // MUSTER_TESTS_E2E_JOBS_FIXTURE_H_
