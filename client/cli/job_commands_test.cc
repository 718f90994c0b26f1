#include "client/cli/job_commands.h"

#include <algorithm>
#include <sstream>

#include "base/exit_code.h"
#include "client/cli/info_commands.h"
#include "client/cli/node_commands.h"
#include "client/jobs/fake_job_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class JobCommandsTest : public ::testing::Test {
 protected:
  FakeJobService fake_;
  std::ostringstream out_, err_;
  const CommandContext context_ = {
      .variables = {{"MUSTER_COORDINATOR", fake_.address()}, {"USER", "ann"}},
      .out = out_,
      .err = err_};
};

TEST_F(JobCommandsTest, Submit_Program_PrintsTheJob) {
  EXPECT_EQ(RunSubmitCommand({"--processes", "1:4", "--", "/opt/train", "--lr", "1"}, context_),
            kExitOk)
      << err_.str();
  EXPECT_EQ(out_.str(), "train-1\n");
  const auto calls = fake_.submitted();
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].owner(), "ann");
  EXPECT_EQ(calls[0].spec().max_processes(), 4);
  EXPECT_THAT(calls[0].spec().argv(), ElementsAre("/opt/train", "--lr", "1"));
}

TEST_F(JobCommandsTest, Submit_DryRun_PrintsSettingsAndPlan) {
  EXPECT_EQ(RunSubmitCommand({"--dry_run", "--processes", "2", "--", "train"}, context_), kExitOk);
  EXPECT_EQ(out_.str(),
            "command: train  (the command line)\nprocesses: 2  (--processes)\n"
            "starts now: fits now\n  a: 2 processes\n");
  EXPECT_TRUE(fake_.submitted()[0].dry_run());
}

TEST_F(JobCommandsTest, Submit_BadFlag_IsAUsageErrorBeforeAnyCall) {
  EXPECT_EQ(RunSubmitCommand({"--processes", "x", "--", "train"}, context_), kExitUsage);
  EXPECT_EQ(err_.str(), "muster submit: --processes x: write how many, 4, or a range, 1:4\n");
  EXPECT_TRUE(fake_.submitted().empty());
}

TEST_F(JobCommandsTest, List_Table_HasARowForEachJob) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1);
  job.set_why("waits for 2 GPUs");
  fake_.Add(job);
  fake_.Add(FakeJob("gpt-2", v1::JOB_STATE_RUNNING, 2));
  EXPECT_EQ(RunListCommand({}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(),
            "JOB      STATE    PROCESSES  RESTARTS  WHY\n"
            "mnist-1  QUEUED   2          0         waits for 2 GPUs\n"
            "gpt-2    RUNNING  2          0         -\n");
}

TEST_F(JobCommandsTest, List_StateAndName_PrintsOnlyThose) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1));
  fake_.Add(FakeJob("gpt-2", v1::JOB_STATE_RUNNING, 2));
  EXPECT_EQ(RunListCommand({"--state", "running", "-o", "name"}, context_), kExitOk);
  EXPECT_EQ(out_.str(), "gpt-2\n");
  EXPECT_EQ(RunListCommand({"--state", "runing"}, context_), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("did you mean RUNNING?"));
}

TEST_F(JobCommandsTest, NoCoordinator_EveryCommandSaysWhereHowOftenWhyAndWhatToDo) {
  const std::string flag = "unix:/nonexistent/flag";
  for (const auto& run : {RunListCommand, RunNodesCommand, RunStatusCommand}) {
    err_.str("");
    EXPECT_EQ(run({"--coordinator", flag, "--timeout", "100ms"}, context_), kExitUnreachable);
    const std::string text = err_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_THAT(
        text,
        ContainsRegex(
            "muster [a-z]+: no coordinator answers at unix:/nonexistent/flag \\([0-9]+ tr.* in "
            "100ms, .+\\): is it running\\? Start it with muster coordinator --listen "
            "unix:/nonexistent/flag, or correct the address, which --coordinator sets\n"));
  }
  err_.str("");
  const CommandContext variable = {{{"MUSTER_COORDINATOR", "unix:/nonexistent/v"}}, out_, err_};
  EXPECT_EQ(RunSubmitCommand({"--timeout", "50ms", "--", "train"}, variable), kExitUnreachable);
  EXPECT_THAT(err_.str(), HasSubstr("--listen unix:/nonexistent/v, or correct the address, which "
                                    "MUSTER_COORDINATOR sets\n"));
}

TEST_F(JobCommandsTest, Describe_UnknownJob_NamesASimilarOne) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1));
  EXPECT_EQ(RunDescribeCommand({"mnits-1"}, context_), kExitNotFound);
  EXPECT_THAT(err_.str(), HasSubstr("did you mean mnist-1?"));
  EXPECT_EQ(RunDescribeCommand({"mnist-1"}, context_), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("\"state\": \"QUEUED\""));
}

TEST_F(JobCommandsTest, Watch_FailedJob_PrintsChangesAndFails) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 1));
  v1::JobRecord end = FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1, 2);
  end.set_why("rank 1 exited with 3");
  fake_.Change(end);
  EXPECT_EQ(RunWatchCommand({"mnist-1"}, context_), kExitJobFailed);
  EXPECT_EQ(out_.str(), "mnist-1 RUNNING\nmnist-1 FAILED: rank 1 exited with 3\n");
}

TEST_F(JobCommandsTest, Logs_AllRanks_ArePrefixedAndFiltered) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1);
  job.set_attempts(1);
  fake_.Add(job);
  fake_.SetLog(1, 0, "epoch 0\nloss 1\n");
  fake_.SetLog(1, 1, "loss 2\nlast");
  EXPECT_EQ(RunLogsCommand({"mnist-1", "--rank", "all"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "[0]: epoch 0\n[0]: loss 1\n[1]: loss 2\n[1]: last\n");
  out_.str("");
  EXPECT_EQ(RunLogsCommand({"mnist-1", "--grep", "^loss"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "loss 1\n");
}

TEST_F(JobCommandsTest, Cancel_Job_SendsTheReason) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_STOPPING, 1));
  EXPECT_EQ(RunControlCommand("cancel", {"mnist-1", "--why", "old"}, context_), kExitOk);
  EXPECT_EQ(out_.str(), "mnist-1 STOPPING\n");
  EXPECT_THAT(fake_.actions(), ElementsAre("CANCEL mnist-1 old0"));
}

TEST_F(JobCommandsTest, Remove_SubmittedJob_IsRemovedThere) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1));
  EXPECT_EQ(RunRemoveCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "job mnist-1 is removed\n");
  EXPECT_THAT(fake_.actions(), ElementsAre("REMOVE mnist-1 0"));
}

TEST_F(JobCommandsTest, Nodes_Table_ShowsUse) {
  v1::NodeRecord node;
  node.set_node("a");
  node.mutable_info()->set_cpus(8);
  node.mutable_info()->set_memory_bytes(int64_t{4} << 30);
  node.set_used_cpus(2);
  node.add_jobs("mnist-1");
  fake_.AddNode(node);
  EXPECT_EQ(RunNodesCommand({}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(),
            "NODE  STATE  CPUS  GPUS  MEMORY          JOBS     WHY\n"
            "a     READY  2/8   0/0   0 B / 4.00 GiB  mnist-1  -\n");
  EXPECT_EQ(RunNodeControlCommand("drain", {"a", "--why", "disk"}, context_), kExitOk);
  EXPECT_THAT(fake_.actions(), ElementsAre("DRAIN a disk"));
}

TEST_F(JobCommandsTest, Commands_NoJobNamed_SayWhatToWrite) {
  EXPECT_EQ(RunWatchCommand({}, context_), kExitUsage);
  EXPECT_EQ(err_.str(), "muster watch: write muster watch JOB; muster list shows the jobs\n");
}

}  // namespace
}  // namespace muster::client
