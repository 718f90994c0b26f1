// The programs of examples/loops, alone and on two processes. Each ends with an error if it has not
// learned enough, or if its processes end with different weights.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/support/command.h"

namespace muster {
namespace {

using testing_support::CommandResult;
using testing_support::MakeTestDir;
using testing_support::RunCommand;

struct Program {
  const char* name;
  // How far the results of one process and of two may be apart; negative: as far as they like.
  double tolerance;
};

class Examples : public testing::TestWithParam<Program> {
 protected:
  static std::string Path() { return std::string("examples/loops/") + GetParam().name; }
  // Runs a command in a folder of its own, for programs that save.
  static CommandResult Run(const std::string& command) {
    const std::string directory = MakeTestDir(std::string("run_") + GetParam().name);
    // Runs with one thread: the same sums on machines of any number of cores, alone and under
    // launch.
    return RunCommand("OMP_NUM_THREADS=1 MUSTER_CPU=1 MUSTER_PROJECT_DIR=" + directory + " " +
                      command + " 2>&1");
  }
  static CommandResult Launch(int processes) {
    return Run("client/cli/muster launch --cpu --num_processes " + std::to_string(processes) +
               " -- " + Path());
  }
  // Returns the number in the line "MEASURE NUMBER, the same weights on N process(es)".
  static double Result(const CommandResult& run) {
    const size_t comma = run.output.find(", the same weights on ");
    if (comma == std::string::npos) return -1;
    const size_t number = run.output.rfind(' ', comma) + 1;
    return std::atof(run.output.substr(number, comma - number).c_str());
  }
};

TEST_P(Examples, AloneAndOnTwoProcesses_LearnTheSameWithEqualWeights) {
  const CommandResult alone = Run(Path());
  ASSERT_EQ(alone.exit_code, 0) << alone.output;
  const CommandResult two = Launch(2);
  ASSERT_EQ(two.exit_code, 0) << two.output;
  EXPECT_NE(two.output.find("the same weights on 2 process(es)"), std::string::npos) << two.output;
  ASSERT_GE(Result(alone), 0) << alone.output;
  ASSERT_GE(Result(two), 0) << two.output;
  if (GetParam().tolerance < 0) return;
  EXPECT_NEAR(Result(alone), Result(two), GetParam().tolerance) << alone.output << two.output;
}

INSTANTIATE_TEST_SUITE_P(Loops, Examples,
                         testing::Values(Program{"collate", 1e-3}, Program{"folds", 1e-3},
                                         Program{"gan", -1}, Program{"language_model", 5e-3},
                                         Program{"lbfgs", 1e-3}, Program{"shared_ptr_model", 1e-3},
                                         Program{"torchscript", 2e-3}, Program{"unfreezing", 2e-3}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster
