// Runs what `muster test` runs, for real and on several numbers of processes.
#include <gtest/gtest.h>

#include <string>

#include "tests/support/command.h"

namespace muster {
namespace {

class Checks : public testing::TestWithParam<int> {};

TEST_P(Checks, AllPass) {
  const auto run =
      testing_support::RunCommand("client/cli/muster launch --cpu --num_processes " +
                                  std::to_string(GetParam()) + " -- muster/muster-checks 2>&1");
  EXPECT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(run.output.find("Test is a success!"), std::string::npos) << run.output;
}

// With 17, no process has more than one sample of a batch.
INSTANTIATE_TEST_SUITE_P(Processes, Checks, testing::Values(1, 2, 3, 17));

}  // namespace
}  // namespace muster
