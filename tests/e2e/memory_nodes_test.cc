// Checkpoints in memory on several machines, one of which is lost with all that runs there.
#include <signal.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "agent/job_coordination.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

// Several launches on one host play several machines.
class MemoryNodesTest : public LaunchFixture {
 protected:
  std::unique_ptr<Command> Machine(int rank, const std::string& arguments) {
    env_["MUSTER_PROJECT_DIR"] = Temp("project");
    return Launch({"--num_machines", "2", "--num_processes", "2", "--cpu", "--coordinator",
                   address_, "--token_file", TokenFile(), "--machine_rank", absl::StrCat(rank),
                   "--max_restarts", "1", "--lease", "5s"},
                  absl::StrCat("exec ", Runfile("tests/e2e/memory_worker"), " ", arguments));
  }
  // Returns the weights of a run that nothing disturbs.
  std::string Weights() {
    NewAddress();
    auto first = Machine(0, "none 20 0 1000");
    auto second = Machine(1, "none 20 0 1000");
    EXPECT_EQ(first->Wait(), 0) << first->err_text();
    EXPECT_EQ(second->Wait(), 0) << second->err_text();
    return first->WaitForLine("[0]: weights ");
  }
  void NewAddress() {
    const auto port = agent::FindFreePort();
    ASSERT_TRUE(port.ok()) << port.status();
    address_ = absl::StrCat("127.0.0.1:", *port);
  }

  std::string address_;
};

TEST_F(MemoryNodesTest, LostNode_TheJobContinuesFromItsPeersMemoryBitForBit) {
  const std::string weights = Weights();
  NewAddress();
  auto first = Machine(0, "wait 20 13 1000");
  auto second = Machine(1, "wait 20 13 1000");
  first->WaitForLine("[0]: waits at 13");
  second->Signal(SIGKILL);
  EXPECT_EQ(second->Wait(), -SIGKILL);
  // An empty machine takes its place.
  second = Machine(1, "wait 20 13 1000");
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  EXPECT_EQ(first->WaitForLine("[0]: begins at ", 2), "13");
  EXPECT_THAT(first->err_text(), HasSubstr("loaded the checkpoint of step 13 in memory"));
  EXPECT_EQ(first->WaitForLine("[0]: weights "), weights);
  EXPECT_FALSE(PathExists(Temp("project/checkpoints/checkpoint_0")));
}

}  // namespace
}  // namespace muster
