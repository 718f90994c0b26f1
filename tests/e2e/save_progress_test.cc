// What people and scripts see of a save while it runs: `muster status`, `muster checkpoints
// registered` and `muster checkpoints list`. The save is held up between two of its files.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/owned_fd.h"
#include "base/test_held_report.h"
#include "base/test_wait.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class RunningSaveTest : public LaunchFixture, public testing::WithParamInterface<const char*> {
 protected:
  std::string Run(std::vector<std::string> args) {
    const auto command = Muster(std::move(args));
    EXPECT_EQ(command->Wait(), 0) << command->err_text();
    return command->out_text();
  }
  Json RunJson(std::vector<std::string> args) {
    args.insert(args.end(), {"-o", "json"});
    return Json::parse(Run(std::move(args)));
  }
  Json Save() { return RunJson({"status", "night"})["jobs"][0]["save"]; }
};

TEST_P(RunningSaveTest, IsShownWithItsProgressUntilItIsACheckpoint) {
  const bool beside = std::string(GetParam()) == "beside";
  const std::string end = Temp("end"), report = Temp("report");
  ASSERT_EQ(mkfifo(end.c_str(), 0600), 0);
  HeldReport held(report);
  const auto plain = env_;
  env_["MUSTER_FAILPOINTS"] = "worker.checkpoint_sync=report";
  env_["MUSTER_FAILPOINTS_REPORT"] = report;
  env_["MUSTER_PROJECT_DIR"] = Temp("run");
  const auto job = Muster({"launch", "--cpu", "--num_processes", "2", "--no_prefix", "--job_name",
                           "night", "--", Runfile("tests/e2e/saving_worker"), GetParam(), end});
  env_ = plain;
  held.WaitUntilHeld();
  // Heartbeats report how far each rank is. Rank 0 has written the model, but not yet the
  // optimizer.
  Json save;
  WaitUntil([&] {
    save = Save();
    return !save.is_null() && save["ranks"] == 2 && save["written_bytes"] >= 256 * 256 * 4;
  });
  const std::string checkpoint = Temp("run/checkpoints/checkpoint_0");
  EXPECT_EQ(save["path"], checkpoint);
  EXPECT_EQ(save["step"], 1);
  EXPECT_EQ(save["asynchronous"], beside);
  EXPECT_LT(save["written_bytes"], save["bytes"]);
  EXPECT_GE(save["bytes"], 3 * 256 * 256 * 4);
  const auto line = AllOf(HasSubstr(absl::StrCat("saving ", checkpoint, " of step 1",
                                                 beside ? " beside training: " : ": ")),
                          HasSubstr(" by 2 ranks"));
  EXPECT_THAT(Run({"status", "night"}), line);
  EXPECT_THAT(Run({"checkpoints", "registered", "night"}), line);
  const Json records = RunJson({"checkpoints", "registered", "night"});
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0]["state"], "saving");
  EXPECT_EQ(records[0]["id"], nullptr);
  EXPECT_EQ(records[0]["promoted"], false);
  EXPECT_EQ(records[0]["path"], checkpoint);
  EXPECT_EQ(records[0]["save"]["bytes"], save["bytes"]);
  // Lists by the folder alone.
  const Json list = RunJson({"checkpoints", "list", Temp("run")});
  EXPECT_EQ(list["checkpoints"], Json::array());
  ASSERT_EQ(list["unfinished"].size(), 1u);
  EXPECT_EQ(list["unfinished"][0]["state"], "saving");
  EXPECT_EQ(list["unfinished"][0]["checkpoint"], checkpoint);

  held.Release();
  job->WaitForLine("saved", 2);
  WaitUntil([&] { return Save().is_null(); });
  EXPECT_THAT(Run({"status", "night"}), Not(HasSubstr("saving")));
  EXPECT_THAT(Run({"checkpoints", "registered", "night"}),
              AllOf(HasSubstr("published"), Not(HasSubstr("saving"))));
  const Json published = RunJson({"checkpoints", "registered", "night"});
  ASSERT_EQ(published.size(), 1u);
  EXPECT_EQ(published[0]["state"], "published");
  EXPECT_FALSE(published[0].contains("save"));
  EXPECT_EQ(RunJson({"checkpoints", "list", Temp("run")})["unfinished"], Json::array());

  const OwnedFd pipe(open(end.c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_EQ(write(pipe.get(), "..", 2), 2);
  EXPECT_EQ(job->Wait(), 0) << job->err_text();
}

INSTANTIATE_TEST_SUITE_P(Saves, RunningSaveTest, testing::Values("synchronous", "beside"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace muster
