// What `muster test` runs, for real and on several numbers of processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/job_coordination.h"
#include "tests/e2e/launch_fixture.h"
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

// 17: no process has more than one sample of a batch.
INSTANTIATE_TEST_SUITE_P(Processes, Checks, testing::Values(1, 2, 3, 17));

// Two launches on one host, of which neither sees the other's disk, play two machines.
class ChecksOnMachines : public LaunchFixture {};

TEST_F(ChecksOnMachines, DisksOfTheirOwn_Pass) {
  const auto port = agent::FindFreePort();
  ASSERT_TRUE(port.ok()) << port.status();
  env_["CHECKS"] = Runfile("muster/muster-checks");
  std::vector<std::unique_ptr<Command>> machines;
  for (const char* rank : {"0", "1"}) {
    env_["TMPDIR"] = Temp(absl::StrCat("disk", rank));
    ASSERT_EQ(mkdir(env_["TMPDIR"].c_str(), 0700), 0);
    machines.push_back(Launch(
        {"--num_machines", "2", "--num_processes", "4", "--cpu", "--coordinator",
         absl::StrCat("127.0.0.1:", *port), "--token_file", TokenFile(), "--machine_rank", rank},
        "exec $CHECKS"));
  }
  for (const auto& machine : machines) {
    EXPECT_EQ(machine->Wait(), 0) << machine->out_text() << machine->err_text();
  }
  EXPECT_THAT(machines[0]->out_text(), testing::HasSubstr("ok: save and load"));
  EXPECT_THAT(machines[0]->out_text(), testing::HasSubstr("Test is a success!"));
}

}  // namespace
}  // namespace muster
