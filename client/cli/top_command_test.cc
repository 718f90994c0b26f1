#include "client/cli/top_command.h"

#include <algorithm>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "client/cli/job_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

const absl::Time kStart = absl::FromUnixSeconds(1000);

// Two ranks of "mnist" at these steps.
TopSample Sample(absl::Time at, int64_t step0, int64_t step1, uint64_t generation = 1) {
  TopSample sample;
  sample.at = sample.wall = at;
  sample.status.set_agents(1);
  sample.status.set_version("0.1.0");
  v1::JobStatus* const job = sample.status.add_jobs();
  job->set_job_id("mnist");
  job->set_rendezvous_state("SEALED");
  job->set_generation(generation);
  job->set_world_size(2);
  job->set_min_step(std::min(step0, step1));
  job->set_max_step(std::max(step0, step1));
  sample.group = "mnist";
  sample.members.set_generation(generation);
  for (const int64_t step : {step0, step1}) {
    v1::Member* const member = sample.members.add_members();
    member->set_rank(sample.members.members_size() - 1);
    member->set_host("h");
    member->set_state(v1::WORKER_STATE_RUNNING);
    member->set_last_step(step);
    member->set_phase("training");
  }
  return sample;
}

TEST(TopLines, JobsThatHaveEnded_AreCountedAndLeaveRoomForTheOthers) {
  TopSample sample = Sample(kStart, 5, 5);
  for (int i = 0; i < 30; ++i) {
    v1::JobStatus* const job = sample.status.add_jobs();
    job->set_job_id(absl::StrCat("old-", i));
    job->set_rendezvous_state("CLOSED");
    job->set_world_size(2);
  }
  const std::vector<std::string> lines = TopLines(sample, nullptr, 100, 24);
  EXPECT_THAT(lines[0], HasSubstr("31 jobs, 30 of them ended"));
  EXPECT_THAT(lines, Not(testing::Contains(HasSubstr("old-"))));
  EXPECT_THAT(lines, testing::Contains(HasSubstr("slowest first")));
}

// The groups would hide that only one job runs, whose ranks are of interest.
TEST(RemoveAgentGroups, OfWorkersThatAreKnown_AndNoOthers) {
  v1::StatusReply reply;
  for (const char* name : {"mnist-1.1.agents", "mnist-1.1", "python-2.1.agents", ".agents"}) {
    reply.add_jobs()->set_job_id(name);
  }
  RemoveAgentGroups(&reply);
  std::vector<std::string> left;
  for (const v1::JobStatus& job : reply.jobs()) left.push_back(job.job_id());
  EXPECT_THAT(left, testing::ElementsAre("mnist-1.1", "python-2.1.agents", ".agents"));
}

TEST(TopLines, Rates_AreStepsSinceTheSampleBefore) {
  const TopSample before = Sample(kStart, 10, 12);
  const TopSample now = Sample(kStart + absl::Seconds(2), 30, 17);
  const std::vector<std::string> lines = TopLines(now, &before, 0, 0);
  ASSERT_THAT(lines, SizeIs(9));
  EXPECT_THAT(lines[0], HasSubstr("1 agent, 1 job"));
  EXPECT_THAT(lines[3], ContainsRegex("mnist +1 +SEALED +2 +17-30 +3.50"));
  // The slowest first.
  EXPECT_THAT(lines[7], ContainsRegex("^1 +h +RUNNING +17 +2.50 .*training"));
  EXPECT_THAT(lines[8], ContainsRegex("^0 +h +RUNNING +30 +10.00 "));
}

// Like a time server's correction between two samples.
TEST(TopLines, WallClockThatIsSet_ChangesNoRate) {
  const TopSample before = Sample(kStart, 10, 12);
  TopSample now = Sample(kStart + absl::Seconds(2), 30, 17);
  now.wall = kStart - absl::Hours(1);
  const std::vector<std::string> lines = TopLines(now, &before, 0, 0);
  EXPECT_THAT(lines[0], HasSubstr(absl::FormatTime("%H:%M:%S", now.wall, absl::LocalTimeZone())));
  EXPECT_THAT(lines[3], ContainsRegex("mnist +1 +SEALED +2 +17-30 +3.50"));
  EXPECT_THAT(lines[8], ContainsRegex("^0 +h +RUNNING +30 +10.00 "));
}

TEST(TopLines, FirstPictureAndNewGeneration_HaveNoRates) {
  const TopSample before = Sample(kStart, 10, 12);
  const TopSample now = Sample(kStart + absl::Seconds(2), 30, 30, 2);
  for (const TopSample* other : {static_cast<const TopSample*>(nullptr), &before}) {
    const std::vector<std::string> lines = TopLines(now, other, 0, 0);
    EXPECT_THAT(lines[3], ContainsRegex("2 +30 +- "));
    EXPECT_THAT(lines[7], ContainsRegex("RUNNING +30 +- "));
  }
}

TEST(TopLines, SmallTerminal_CutsLinesAndSaysHowMany) {
  TopSample sample = Sample(kStart, 1, 1);
  sample.members.mutable_members(0)->set_phase("\xc3\xa4\x1b[31mred");
  const std::vector<std::string> lines = TopLines(sample, nullptr, 20, 5);
  ASSERT_THAT(lines, SizeIs(5));
  EXPECT_THAT(lines[4], HasSubstr("... 5 more lines"));
  for (const std::string& line : TopLines(sample, nullptr, 0, 0)) {
    EXPECT_THAT(line, Not(HasSubstr("\x1b")));
  }
  for (const std::string& line : lines) EXPECT_LE(line.size(), 20u);
}

TEST(TopLines, RankThatHasFailed_SaysHow) {
  TopSample sample = Sample(kStart, 1, 1);
  v1::Member* const member = sample.members.mutable_members(1);
  member->set_state(v1::WORKER_STATE_EXITED);
  member->mutable_exit()->set_message("killed by signal 9");
  v1::StragglerRow* const late = sample.stragglers.add_rows();
  late->set_rank(0);
  late->set_barriers(3);
  late->mutable_mean_lateness()->set_seconds(2);
  const std::vector<std::string> lines = TopLines(sample, nullptr, 0, 0);
  EXPECT_THAT(lines[7], AllOf(HasSubstr("2 s"), HasSubstr("training")));
  EXPECT_THAT(lines[8], AllOf(HasSubstr("EXITED"), HasSubstr("killed by signal 9")));
}

TEST(TopCommand, WrongOptions_AreNamed) {
  const auto run = [](const std::vector<std::string>& args) {
    std::ostringstream out, err;
    const CommandContext context = {.variables = {}, .out = out, .err = err};
    EXPECT_EQ(RunTopCommand(args, context), kExitUsage);
    return err.str();
  };
  EXPECT_THAT(run({"--interval", "0"}), HasSubstr("--interval 0: write"));
  EXPECT_THAT(run({"--count", "0"}), HasSubstr("--count 0: write"));
  EXPECT_THAT(run({"a", "b"}), HasSubstr("b"));
}

}  // namespace
}  // namespace muster::client
