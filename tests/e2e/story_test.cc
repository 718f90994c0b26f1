// A job as a user meets it: examples/mnist, submitted from a file to two nodes, followed, watched,
// asked to save, and cancelled.
#include <sys/stat.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "tests/e2e/jobs_fixture.h"
#include "tests/support/mnist_images.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class StoryTest : public JobsFixture {};

TEST_F(StoryTest, MnistExample_IsSubmittedFollowedWatchedAskedToSaveAndCancelled) {
  env_["OMP_NUM_THREADS"] = "1";
  const auto a = StartNode("a"), b = StartNode("b");
  ASSERT_EQ(mkdir(Temp("data").c_str(), 0700), 0);
  testing_support::WriteMnistImages(Temp("data"), "train", 640);
  testing_support::WriteMnistImages(Temp("data"), "t10k", 64);
  ASSERT_TRUE(WriteFileAtomically(
                  Temp("job.yaml"),
                  absl::StrCat("name: mnist\ncommand: [", Runfile("examples/mnist/mnist"),
                               ", --data_root, ", Temp("data"), ", --output_dir, ", Temp("out"),
                               ", --epochs, \"100000\"]\n"
                               "processes: 2\nprocesses_per_node: 1\ncpu: true\n"))
                  .ok());
  EXPECT_EQ(Run({"submit", Temp("job.yaml")}), "mnist-1");
  const auto follow = Muster({"logs", "--coordinator", address_, "mnist-1", "-f"});
  follow->WaitForLine("epoch 0: test accuracy");
  EXPECT_THAT(Run({"list", "-o", "wide"}), ContainsRegex("mnist-1 +RUNNING +2 .*a,b"));

  EXPECT_THAT(Run({"top", "mnist-1", "--count", "2", "--interval", "300ms"}),
              AllOf(HasSubstr("mnist-1.1, slowest first:"),
                    ContainsRegex("mnist-1\\.1 +[0-9]+ +SEALED +2 +[0-9-]+ +[0-9]+\\.[0-9][0-9]")));
  const Json status = Json::parse(Run({"status", "mnist-1", "-o", "json"}));
  ASSERT_EQ(status["jobs"].size(), 1u);
  EXPECT_EQ(status["jobs"][0]["job_id"], "mnist-1.1");
  EXPECT_EQ(status["jobs"][0]["world_size"], 2);
  EXPECT_GT(status["jobs"][0]["max_step"], 0);
  EXPECT_THAT(Run({"status", "-o", "name"}), HasSubstr("mnist-1.1"));
  EXPECT_THAT(Run({"logs", "mnist-1", "--since", "1h", "--grep", "epoch 0: test"}),
              HasSubstr("epoch 0: test accuracy"));
  EXPECT_THAT(Run({"logs", "mnist-1", "--since", "lately"}, 2), HasSubstr("write how long ago"));

  EXPECT_THAT(Run({"trigger", "mnist-1", "checkpoint"}), HasSubstr("raised checkpoint"));
  WaitUntil([&] {
    return absl::StrContains(Run({"logs", "mnist-1", "--grep", "^step [0-9]+ saved"}), "saved");
  });
  EXPECT_THAT(Run({"cancel", "mnist-1", "--why", "seen enough"}), HasSubstr("mnist-1 "));
  WaitForState("mnist-1", "CANCELLED");
  EXPECT_EQ(follow->Wait(), 0) << follow->err_text();
  EXPECT_THAT(follow->out_text(), HasSubstr("; stopping"));
  EXPECT_THAT(Run({"incidents", "mnist-1"}), HasSubstr("it was cancelled: seen enough"));
}

}  // namespace
}  // namespace muster
