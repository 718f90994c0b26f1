// A barrier that one rank never reaches, with real processes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "tests/support/command.h"

namespace muster {
namespace {

using testing_support::CommandResult;
using testing_support::RunCommand;

TEST(Barrier, RankThatNeverComes_IsNamedWithHostAndLastStep) {
  const CommandResult run =
      RunCommand("client/cli/muster launch --cpu --num_processes 2 -- tests/e2e/absent_rank 2>&1");
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  EXPECT_NE(run.exit_code, 0);
  EXPECT_NE(run.output.find("rank 1"), std::string::npos) << run.output;
  EXPECT_NE(run.output.find(host), std::string::npos) << run.output;
  EXPECT_NE(run.output.find("step 2"), std::string::npos) << run.output;
}

}  // namespace
}  // namespace muster
