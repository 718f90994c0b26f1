#include "client/jobs/slurm_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/fake_clock.h"
#include "base/file.h"
#include "base/mutate.h"
#include "base/test_folder.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;

// SLURM, whose commands print what the test has written.
class SlurmBackendTest : public ::testing::Test {
 protected:
  SlurmBackendTest() { Start(/*project=*/""); }
  void Start(const std::string& project, const std::string& partition = "") {
    backend_ = SlurmBackend(
        {.folder = Folder(),
         .muster = "/opt/muster",
         .user = "ann",
         .partition = partition,
         .here = "/home/ann",
         .project = project,
         .find_checkpoint =
             [this](const std::string& folder, PlannedCheckpoint* checkpoint) {
               if (folder != has_checkpoint_) return;
               checkpoint->path = folder + "/checkpoint_3";
               checkpoint->step = 300;
             },
         .run = [this](const auto& argv, const auto& without) { return Run(argv, without); },
         .poll = absl::Milliseconds(1)});
    answers_["sinfo"] = {0, "n0|2|1000|(null)|all*|idle\nn1|2|1000|(null)|all*|mix\n", ""};
    answers_["sbatch"] = {0, "12\n", ""};
    answers_["sacct"] = {1, "", "Slurm accounting storage is disabled\n"};
  }
  std::string Folder() { return folder_.Path("records"); }

  absl::StatusOr<ProgramOutput> Run(const std::vector<std::string>& argv,
                                    const std::vector<std::string>& without) {
    commands_.push_back(absl::StrJoin(argv, " "));
    if (argv[0] == "sbatch") without_ = without;
    if (argv[0] == "squeue") without_of_squeue_ = without;
    if (missing_) return absl::NotFoundError("no such program");
    if (argv[0] == "sbatch") script_ = ReadFile(argv.back()).value_or("");
    if (argv[0] == "squeue") {
      // A call that asks for comments gets the script's.
      const bool comment = absl::StrContains(argv.back(), "%k");
      ProgramOutput output = squeue_;
      if (comment) output.out = comments_;
      if (!next_.empty() && !comment) {
        squeue_.out = next_.front();
        next_.erase(next_.begin());
      }
      return output;
    }
    return answers_[argv[0]];
  }
  static JobSpec Spec(int processes = 4) {
    JobSpec spec;
    spec.name = "train";
    spec.command = {"./train"};
    spec.min_processes = spec.max_processes = processes;
    spec.env = {{"TOKEN", "secret"}};
    return spec;
  }
  void Submit() {
    squeue_.out = "12|PENDING||Resources\n";
    const auto made = backend_->submit(Spec(), {});
    ASSERT_TRUE(made.ok()) << made.status();
    commands_.clear();
  }
  void Event(const std::string& line) {
    std::ofstream(Folder() + "/12.events", std::ios::app) << line << "\n";
  }
  void Log(int restart, int attempt, int rank, const std::string& text) {
    const std::string folder = absl::StrCat(Folder(), "/12.logs/", restart, "/attempt_", attempt);
    ASSERT_TRUE(MakeDirectories(folder).ok());
    std::ofstream(absl::StrCat(folder, "/rank_", rank, ".log"), std::ios::app) << text;
  }
  JobState State() {
    const auto job = backend_->get("train-12");
    EXPECT_TRUE(job.ok()) << job.status();
    return job.ok() ? job->state : JobState::kUnknown;
  }

  TestFolder folder_;
  std::map<std::string, ProgramOutput> answers_;
  ProgramOutput squeue_;
  std::vector<std::string> next_;  // output of squeue, after squeue_
  std::string comments_, script_;
  std::vector<std::string> commands_;
  std::vector<std::string> without_;  // variables removed for sbatch
  std::vector<std::string> without_of_squeue_;
  bool missing_ = false;
  std::string has_checkpoint_;  // a folder with a checkpoint
  std::unique_ptr<JobBackend> backend_;
};

TEST_F(SlurmBackendTest, Submit_GivesTheScriptToSbatch_AndKeepsARecordThatOthersCannotRead) {
  squeue_.out = "12|PENDING||Resources\n";
  const auto made = backend_->submit(Spec(), {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->job.id, "train-12");
  EXPECT_EQ(made->job.state, JobState::kQueued);
  EXPECT_EQ(made->job.why, "SLURM: Resources");
  EXPECT_THAT(script_, HasSubstr("#SBATCH --nodes=2\n"));
  EXPECT_THAT(script_, HasSubstr("    TOKEN=secret\n"));
  struct stat folder {
  }, record{};
  ASSERT_EQ(stat(Folder().c_str(), &folder), 0);
  ASSERT_EQ(stat((Folder() + "/12.job").c_str(), &record), 0);
  EXPECT_EQ(folder.st_mode & 0777, 0700u);
  EXPECT_EQ(record.st_mode & 0777, 0600u);
  EXPECT_THAT(*ListDirectory(Folder()), ElementsAre("12.events", "12.job"));
  const auto job = backend_->get("12");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->spec.env.at("TOKEN"), "secret");
  EXPECT_EQ(job->spec.max_processes, 4);
}

// For sbatch they take precedence over the options in the script.
TEST_F(SlurmBackendTest, Submit_VariablesThatWouldChangeTheScriptsOptions_AreNotForSbatch) {
  Submit();
  EXPECT_THAT(without_, IsSupersetOf({"SBATCH_ARRAY_INX", "SBATCH_EXPORT", "SBATCH_NO_REQUEUE",
                                      "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_SIGNAL",
                                      "SBATCH_WAIT", "SBATCH_CLUSTERS", "SLURM_CLUSTERS"}));
  EXPECT_THAT(without_of_squeue_, ElementsAre("SLURM_CLUSTERS"));
  EXPECT_THAT(without_, Not(Contains("SBATCH_PARTITION")));
  EXPECT_THAT(without_, Not(Contains("SBATCH_TIMELIMIT")));
  JobSpec spec = Spec();
  spec.time_limit = absl::Hours(1);
  without_.clear();
  answers_["sbatch"] = {0, "", "sbatch: Job 13 to start at noon\n"};
  ASSERT_TRUE(backend_->submit(spec, {.dry_run = true}).ok());
  EXPECT_THAT(without_, IsSupersetOf({"SBATCH_EXPORT", "SBATCH_TIMELIMIT"}));
}

// Not a bug in Muster: `muster submit` ends as if a disk were full.
TEST_F(SlurmBackendTest, Submit_RecordThatCannotBeWritten_SaysWhyAndHowToEndTheJob) {
  ASSERT_TRUE(MakeDirectories(Folder()).ok());
  const std::string events = Folder() + "/12.events";
  ASSERT_EQ(symlink("/dev/full", events.c_str()), 0);
  absl::StatusOr<Submission> made = backend_->submit(Spec(), {});
  EXPECT_TRUE(absl::IsResourceExhausted(made.status())) << made.status();
  EXPECT_THAT(std::string(made.status().message()),
              AllOf(HasSubstr("SLURM has job 12, but its record cannot be kept: "),
                    HasSubstr("12.events: No space left on device; scancel 12 ends it")));
  ASSERT_EQ(unlink(events.c_str()), 0);
  ASSERT_TRUE(MakeDirectories(Folder() + "/12.job/in").ok());
  made = backend_->submit(Spec(), {});
  EXPECT_FALSE(absl::IsInternal(made.status())) << made.status();
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("its record cannot be kept: "));
}

TEST_F(SlurmBackendTest, Submit_ThatSbatchRefuses_KeepsNothingAndSaysWhy) {
  answers_["sbatch"] = {1, "", "sbatch: error: invalid partition specified: x\nmore\n"};
  const auto made = backend_->submit(Spec(), {});
  EXPECT_EQ(made.status().message(), "SLURM: sbatch: error: invalid partition specified: x");
  EXPECT_THAT(*ListDirectory(Folder()), IsEmpty());
  EXPECT_FALSE(backend_->submit(Spec(5), {}).ok());
  JobSpec spec = Spec();
  spec.priority = 3;
  EXPECT_THAT(backend_->submit(spec, {}).status().message(), HasSubstr("priority"));
  EXPECT_FALSE(backend_->submit(Spec(), {.idempotency_key = "a|b"}).ok());
}

TEST_F(SlurmBackendTest, Submit_WhoseAnswerIsLost_FindsTheJobByItsKey) {
  answers_["sbatch"] = {1, "", "sbatch: error: Socket timed out on send/recv operation\n"};
  squeue_.out = "12|PENDING||None\n";
  // Its comment has a digest of the job, too.
  (void)backend_->submit(Spec(), {.idempotency_key = "mine"});
  const size_t at = script_.find("--comment=") + 10;
  const std::string comment = script_.substr(at, script_.find('\n', at) - at);
  EXPECT_THAT(comment, HasSubstr("muster:mine:"));
  comments_ = absl::StrCat("11|muster:other:0\n12|", comment, "\n");
  JobSpec other = Spec();
  other.command = {"./other"};
  EXPECT_EQ(rpc::GetReason(backend_->submit(other, {.idempotency_key = "mine"}).status()),
            v1::ERROR_REASON_KEY_REUSED);
  const auto made = backend_->submit(Spec(), {.idempotency_key = "mine"});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->job.id, "train-12");
  const auto again = backend_->submit(Spec(), {.idempotency_key = "mine"});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->existed);
  EXPECT_EQ(again->job.id, "train-12");
  EXPECT_EQ(rpc::GetReason(backend_->submit(Spec(2), {.idempotency_key = "mine"}).status()),
            v1::ERROR_REASON_KEY_REUSED);
  comments_ = "";
  EXPECT_TRUE(absl::IsUnavailable(backend_->submit(Spec(), {}).status()));
}

// A layout of nodes that the job does not get would wait forever, or be refused by SLURM.
TEST_F(SlurmBackendTest, Nodes_AreThoseOfTheJobsPartition_ThatTakeJobs) {
  answers_["sinfo"].out =
      "n0|2|1000|(null)|main*|idle\nn0|2|1000|(null)|both|idle\nn1|2|1000|(null)|main*|drain\n"
      "n2|4|1000|(null)|big|idle\nn3|2|1000|(null)|big|idle\nn4|2|1000|(null)|both|idle\n"
      "n4|2|1000|(null)|main*|idle\nn5|2|1000|(null)|main*|down*\n";
  squeue_.out = "12|PENDING||Resources\n";
  const auto nodes_of = [&](int processes) {
    script_.clear();
    const auto made = backend_->submit(Spec(processes), {});
    if (!made.ok()) return std::string(made.status().message());
    const size_t at = script_.find("--nodes=");
    return script_.substr(at, script_.find('\n', at) - at);
  };
  EXPECT_EQ(nodes_of(4), "--nodes=2");
  // More than the nodes that are up: the job waits.
  EXPECT_EQ(nodes_of(6), "--nodes=3");
  EXPECT_THAT(nodes_of(10), HasSubstr("larger than SLURM's nodes"));
  Start(/*project=*/"", /*partition=*/"big");
  answers_["sinfo"].out = "n2|4|1000|(null)|big|idle\n";
  EXPECT_EQ(nodes_of(4), "--nodes=1");
  EXPECT_THAT(commands_, Contains(AllOf(HasSubstr("sinfo"), HasSubstr("--partition=big"))));
}

// A user who accepts fewer processes does not ask for fewer: the other nodes may be back when the
// job starts.
TEST_F(SlurmBackendTest, RangeOfProcesses_IsNotCappedByNodesThatAreDown) {
  answers_["sinfo"].out =
      "n0|2|1000|(null)|all*|idle\nn1|2|1000|(null)|all*|down*\nn2|2|1000|(null)|all*|drain\n";
  squeue_.out = "12|PENDING||Resources\n";
  JobSpec spec = Spec();
  spec.min_processes = 2;
  const auto made = backend_->submit(spec, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_THAT(script_, HasSubstr("#SBATCH --nodes=1-2\n"));
  // The node that is up has room for the whole job.
  answers_["sinfo"].out = "n0|4|1000|(null)|all*|idle\nn1|8|1000|(null)|all*|down*\n";
  ASSERT_TRUE(backend_->submit(spec, {}).ok());
  EXPECT_THAT(script_, HasSubstr("#SBATCH --cpus-per-task=4\n"));
}

TEST_F(SlurmBackendTest, DryRun_ShowsSlurmsAnswerAndTheScript) {
  answers_["sbatch"] = {0, "", "sbatch: Job 9 to start at noon on nodes n[0-1] in partition all\n"};
  const auto plan = backend_->submit(Spec(), {.dry_run = true});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->plan.why, HasSubstr("to start at noon"));
  EXPECT_EQ(plan->plan.script, script_);
  EXPECT_THAT(*ListDirectory(Folder()), IsEmpty());
}

TEST_F(SlurmBackendTest, DryRun_SaysFromWhichCheckpointTheJobWouldResume) {
  JobSpec spec = Spec();
  const auto plan = [&] {
    const auto planned = backend_->submit(spec, {.dry_run = true});
    EXPECT_TRUE(planned.ok()) << planned.status();
    return planned.ok() ? planned->plan.checkpoint : PlannedCheckpoint();
  };
  // The folder in which sbatch is called, unless the job names another one.
  EXPECT_EQ(plan().folder, "/home/ann/muster-run/checkpoints");
  EXPECT_EQ(plan().decided_by, "program");
  EXPECT_EQ(plan().path, "");
  has_checkpoint_ = "/data/muster-run/checkpoints";
  spec.workdir = "/data";
  EXPECT_EQ(plan().path, "/data/muster-run/checkpoints/checkpoint_3");
  EXPECT_EQ(plan().step, 300);
  // The variables of the submission are passed on, and the job's own win.
  Start("run");
  EXPECT_EQ(plan().folder, "/data/run/checkpoints");
  spec.env["MUSTER_PROJECT_DIR"] = "/data/muster-run";
  EXPECT_EQ(plan().step, 300);
}

TEST_F(SlurmBackendTest, State_IsThatOfTheQueue_ThenOfTheScript_ThenOfTheAccounts) {
  Submit();
  for (const auto& [line, state] : std::map<std::string, JobState>{
           {"12|PENDING||Priority", JobState::kQueued},
           {"12|PENDING||JobHeldUser", JobState::kSuspended},
           {"12|PENDING||job requeued in held state", JobState::kSuspended},
           {"12|CONFIGURING|n0|None", JobState::kStarting},
           {"12|RUNNING|n[0-1]|None", JobState::kRunning},
           {"12|COMPLETING|n[0-1]|None", JobState::kStopping},
           {"12|COMPLETED|n[0-1]|None", JobState::kSucceeded},
           {"12|CANCELLED|n[0-1]|None", JobState::kCancelled},
           {"12|TIMEOUT|n[0-1]|TimeLimit", JobState::kFailed}}) {
    squeue_.out = line + "\n";
    EXPECT_EQ(State(), state) << line;
  }
  squeue_.out = "";
  EXPECT_EQ(State(), JobState::kUnknown);
  answers_["sacct"] = {0, "CANCELLED by 0|n[0-1]\n", ""};
  EXPECT_EQ(State(), JobState::kCancelled);
  Event("start\t1000\t0\tn0,n1");
  Event("end\t1060\t0\t0 over");
  EXPECT_EQ(State(), JobState::kSucceeded);
}

TEST_F(SlurmBackendTest, RecordOfManyStarts_IsReadToItsEnd) {
  Submit();
  std::string nodes = "n0";
  for (int n = 1; n < 1000; ++n) absl::StrAppend(&nodes, ",node-of-a-rack-", n);
  for (int restart = 0; restart < 80; ++restart) {
    Event(absl::StrCat("start\t1000\t", restart, "\t", nodes));
    Event(absl::StrCat("end\t1001\t", restart, "\t143 stopped before its end"));
  }
  const auto job = backend_->get("train-12");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->attempts, 80);
}

TEST_F(SlurmBackendTest, Attempts_AreTheStartsThatTheScriptHasNoted) {
  Submit();
  squeue_.out = "12|RUNNING|n1|None\n";
  Event("start\t1000\t0\tn0,n1");
  Event("end\t1060\t0\t143 stopped before its end");
  Event("start\t1100\t1\tn0,n1");
  Event("garbage");
  Event("start\t1200\t2\tn1");
  const auto job = backend_->get("train-12");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->attempts, 3);
  ASSERT_EQ(job->history.size(), 3u);
  EXPECT_EQ(job->history[0].end_class, "PREEMPTED");
  EXPECT_EQ(job->history[0].placements[1].node, "n1");
  EXPECT_EQ(job->history[0].placements[1].processes, 2);
  EXPECT_EQ(job->history[1].end_class, "NODE_LOST");
  EXPECT_FALSE(job->history[2].has_end);
  squeue_.out = "";
  Event("end\t1260\t2\t1 over");
  std::ofstream(Folder() + "/12.log")
      << "x\nmuster launch: rank 1 exited with code 7\n  all of it\n"
      << "srun: error: task 1: Exited with exit code 1\n";
  const auto failed = backend_->get("train-12");
  EXPECT_EQ(failed->state, JobState::kFailed);
  EXPECT_EQ(failed->why, "exit code 1: muster launch: rank 1 exited with code 7");
  EXPECT_EQ(failed->history[2].end_class, "PROCESS_FAILED");
}

TEST_F(SlurmBackendTest, Actions_AreSlurmsCommands) {
  Submit();
  EXPECT_TRUE(backend_->suspend("train-12", "").ok());
  EXPECT_THAT(commands_, ::testing::Contains("scontrol hold 12"));
  squeue_.out = "12|PENDING||JobHeldUser\n";
  EXPECT_TRUE(backend_->resume("train-12").ok());
  EXPECT_THAT(commands_, ::testing::Contains("scontrol release 12"));
  EXPECT_FALSE(PathExists(Folder() + "/12.suspend"));
  squeue_.out = "12|RUNNING|n[0-1]|None\n";
  const auto stopping = backend_->suspend("train-12", "");
  EXPECT_THAT(commands_, ::testing::Contains("scancel --batch --signal=TERM 12"));
  EXPECT_EQ(stopping->state, JobState::kStopping);
  const std::string secrets = Folder() + "/run/12";
  ASSERT_TRUE(MakeDirectories(secrets).ok());
  EXPECT_TRUE(backend_->cancel("12", "why not").ok());
  EXPECT_TRUE(PathExists(secrets)) << "the script still runs";
  EXPECT_THAT(commands_, ::testing::Contains("scancel 12"));
  EXPECT_EQ(rpc::GetReason(backend_->remove("train-12")), v1::ERROR_REASON_JOB_STATE);
  squeue_.out = "12|CANCELLED|n[0-1]|None\n";
  EXPECT_TRUE(backend_->cancel("train-12", "").ok());
  EXPECT_FALSE(PathExists(secrets)) << "of a script that was killed";
  ASSERT_EQ(rmdir((Folder() + "/run").c_str()), 0);
  EXPECT_THAT(backend_->resume("train-12").status().message(), HasSubstr("retry it"));
  EXPECT_TRUE(backend_->retry("train-12").ok());
  EXPECT_THAT(commands_, ::testing::Contains("scontrol requeue 12"));
  EXPECT_TRUE(absl::IsUnimplemented(backend_->resize("train-12", 2, 2, "").status()));
  squeue_.out = "12|COMPLETED|n[0-1]|None\n";
  EXPECT_EQ(rpc::GetReason(backend_->retry("train-12").status()), v1::ERROR_REASON_JOB_STATE);
  EXPECT_THAT(backend_->resume("train-12").status().message(), HasSubstr("submit it again"));
  EXPECT_TRUE(backend_->remove("train-12").ok());
  EXPECT_THAT(*ListDirectory(Folder()), IsEmpty());
  EXPECT_TRUE(absl::IsNotFound(backend_->get("train-12").status()));
}

TEST_F(SlurmBackendTest, UnknownJobs_OtherNamesAndOtherFiles_AreNotFound) {
  Submit();
  for (const char* const name :
       {"", "-", "x", "train-13", "other-12", "train-12x", "../12", "-12"}) {
    EXPECT_TRUE(absl::IsNotFound(backend_->get(name).status())) << name;
  }
}

TEST_F(SlurmBackendTest, WithoutSlurm_OneLineSaysSo) {
  missing_ = true;
  const absl::Status status = backend_->submit(Spec(), {}).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_EQ(status.message(),
            "sinfo of SLURM is not on this machine: use a login node of the cluster");
  // Nothing was ever submitted, so no command is needed.
  EXPECT_TRUE(backend_->list({})->empty());
  missing_ = false;
  Submit();
  squeue_ = {1, "",
             "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"};
  EXPECT_TRUE(absl::IsUnavailable(backend_->list({}).status()));
}

TEST_F(SlurmBackendTest, Logs_OfARank_AreThoseOfAllRestartsInPlace) {
  Submit();
  EXPECT_TRUE(absl::IsNotFound(backend_->read_log("train-12", {}).status()));
  squeue_.out = "12|RUNNING|n[0-1]|None\n";
  Event("start\t1000\t0\tn0,n1");
  EXPECT_EQ(backend_->read_log("train-12", {})->data, "");
  Log(0, 0, 3, "one\ntwo\n");
  Log(0, 10, 3, "last\n");
  Log(0, 2, 3, "three\n");
  const auto all = backend_->read_log("train-12", {.rank = 3});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->data, "one\ntwo\nthree\nlast\n");
  EXPECT_FALSE(all->ended);
  EXPECT_EQ(backend_->read_log("train-12", {.rank = 3, .offset = 6})->data, "o\nthree\nlast\n");
  const LogOptions tail = {.rank = 3, .offset = -1, .tail_lines = 2};
  EXPECT_EQ(backend_->read_log("train-12", tail)->data, "three\nlast\n");
  EXPECT_EQ(backend_->read_log("train-12", {.rank = 3, .offset = 1000})->data, "");
  EXPECT_FALSE(backend_->read_log("train-12", {.rank = 4}).ok());
  EXPECT_FALSE(backend_->read_log("train-12", {.attempt = 2}).ok());
}

TEST_F(SlurmBackendTest, Tail_LongerThanAnAnswer_BeginsAtTheRightLine) {
  Submit();
  squeue_.out = "12|RUNNING|n[0-1]|None\n";
  Event("start\t1000\t0\tn0,n1");
  constexpr int kLines = 40000;
  const std::string filling(80, 'x');
  for (const int restart : {0, 1}) {
    std::string text;
    for (int i = 0; i < kLines / 2; ++i) {
      absl::StrAppendFormat(&text, "%06d %s\n", restart * kLines / 2 + i, filling);
    }
    Log(0, restart, 3, text);
  }
  for (const int lines : {1, 15000, 30000, kLines, kLines + 1}) {
    const auto read =
        backend_->read_log("train-12", {.rank = 3, .offset = -1, .tail_lines = lines});
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->offset, std::max(0, kLines - lines) * int64_t{88}) << lines;
    EXPECT_EQ(read->data.substr(0, 6), absl::StrFormat("%06d", std::max(0, kLines - lines)));
  }
}

TEST_F(SlurmBackendTest, FollowLog_GoesOnThroughRequeuesToTheEnd) {
  Submit();
  squeue_.out = "12|RUNNING|n[0-1]|None\n";
  Event("start\t1000\t0\tn0,n1");
  Event("end\t1060\t0\t143 stopped before its end");
  Event("start\t1100\t1\tn0,n1");
  Event("end\t1160\t1\t0 over");
  Log(0, 0, 0, "first\n");
  Log(1, 0, 0, "second\n");
  std::string text;
  const auto add = [&](const LogChunk& chunk) {
    text += chunk.data;
    return true;
  };
  next_ = {"12|RUNNING|n[0-1]|None\n", "12|RUNNING|n[0-1]|None\n", "12|COMPLETED|n[0-1]|None\n"};
  EXPECT_TRUE(backend_->follow_log("train-12", {.attempt = 1}, add).ok());
  EXPECT_EQ(text, "first\n");
  EXPECT_TRUE(backend_->follow_log("train-12", {}, add).ok());
  EXPECT_EQ(text, "first\nsecond\n");
}

TEST_F(SlurmBackendTest, LogsOfManyRanks_ShareWhatSlurmAnswers) {
  Submit();
  squeue_.out = "12|RUNNING|n[0-1]|None\n";
  Event("start\t1000\t0\tn0,n1");
  const auto start = [&] {
    backend_ = SlurmBackend(
        {.folder = Folder(),
         .run = [this](const auto& argv, const auto& without) { return Run(argv, without); },
         .poll = absl::Hours(1)});
    commands_.clear();
  };
  start();
  for (int rank = 0; rank < 4; ++rank) {
    Log(0, 0, rank, "text\n");
    EXPECT_EQ(backend_->read_log("train-12", {.rank = rank})->data, "text\n");
    std::string text;
    const auto take = [&](const LogChunk& chunk) {
      text += chunk.data;
      return false;
    };
    EXPECT_TRUE(backend_->follow_log("train-12", {.rank = rank}, take).ok());
    EXPECT_EQ(text, "text\n");
  }
  EXPECT_EQ(commands_.size(), 1u) << absl::StrJoin(commands_, "\n");
  // The answer to a person's request is not older than the request.
  squeue_.out = "12|COMPLETING|n[0-1]|None\n";
  EXPECT_EQ(State(), JobState::kStopping);
  // A start that was recorded after the answer would seem to be over.
  squeue_.out = "12|PENDING||None\n";
  start();
  EXPECT_TRUE(backend_->read_log("train-12", {.offset = 5})->ended);
  squeue_.out = "12|RUNNING|n[0-1]|None\n";
  EXPECT_FALSE(backend_->read_log("train-12", {.offset = 5})->ended);
}

TEST_F(SlurmBackendTest, LogsOfManyRanks_ShareThatSlurmIsAway) {
  Submit();
  constexpr int kRanks = 6;
  std::atomic<int> begun{0}, calls{0};
  backend_ = SlurmBackend({.folder = Folder(),
                           .run =
                               [&](const auto&, const auto&) {
                                 ++calls;
                                 while (begun < kRanks) std::this_thread::yield();
                                 return ProgramOutput{1, "", "Unable to contact slurm controller"};
                               },
                           .poll = absl::Hours(1)});
  // A thread that comes after another has asked asks again, for all that have come until then; not
  // all of them ask at once.
  bool shared = false;
  for (int round = 0; round < 1000 && !shared; ++round) {
    begun = calls = 0;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        ++begun;
        EXPECT_TRUE(absl::IsUnavailable(backend_->read_log("train-12", {.rank = rank}).status()));
      });
    }
    for (std::thread& rank : ranks) rank.join();
    shared = calls < kRanks;
  }
  EXPECT_TRUE(shared);
}

TEST_F(SlurmBackendTest, Watch_ReportsEachChangeOnce) {
  Submit();
  next_ = {"12|PENDING||Resources\n", "12|RUNNING|n0|None\n", "12|RUNNING|n0|None\n",
           "12|COMPLETED|n0|None\n"};
  std::vector<JobState> states;
  const auto end = backend_->watch(
      "train-12",
      [&](const Job& job) {
        states.push_back(job.state);
        return true;
      },
      absl::InfiniteDuration());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_THAT(states, ElementsAre(JobState::kQueued, JobState::kRunning, JobState::kSucceeded));
}

TEST_F(SlurmBackendTest, AnyRecord_IsReadOrRefused) {
  Submit();
  std::mt19937_64 random(11);
  const std::string events =
      "submit\t1000\t0\tkey 2\nstart\t1000\t0\tn0,n1\nend\t1060\t0\t143 stopped\n"
      "start\t1100\t1\tn0\nend\t1160\t1\t0 over\n";
  for (int i = 0; i < 500; ++i) {
    std::string text = events, queue = "12|RUNNING|n[0-1]|None\n";
    text = Mutate(text, random);
    queue = Mutate(queue, random);
    std::ofstream(Folder() + "/12.events") << text;
    squeue_.out = i % 2 == 0 ? queue : "12|RUNNING|n[0-1]|None\n";
    (void)backend_->get("train-12");
    (void)backend_->read_log("train-12", {.rank = 1});
  }
}

TEST_F(SlurmBackendTest, JobThatNoRecordCanHold_IsRefusedBeforeSbatch) {
  JobSpec spec = Spec();
  spec.command.emplace_back(200'000, 'x');
  EXPECT_THAT(backend_->submit(spec, {}).status().message(), HasSubstr("at most 131072"));
  spec = Spec();
  spec.command.emplace_back("\xff");
  EXPECT_FALSE(backend_->submit(spec, {}).ok());
  spec = Spec();
  spec.env[std::string(1500, 'A')] = "1";
  EXPECT_FALSE(backend_->submit(spec, {}).ok());
  EXPECT_THAT(commands_, IsEmpty());
}

TEST_F(SlurmBackendTest, ActionThatSlurmRefuses_LeavesNoMark) {
  Submit();
  squeue_.out = "12|RUNNING|n[0-1]|None\n";
  answers_["scancel"] = {1, "", "scancel: error: Unable to contact slurm controller\n"};
  EXPECT_FALSE(backend_->cancel("train-12", "").ok());
  EXPECT_FALSE(backend_->suspend("train-12", "").ok());
  EXPECT_EQ(State(), JobState::kRunning);
  // A job that has started since is asked to stop.
  squeue_.out = "12|PENDING||Resources\n";
  answers_["scontrol"] = {1, "", "Job is no longer pending execution\n"};
  answers_["scancel"] = {0, "", ""};
  EXPECT_TRUE(backend_->suspend("train-12", "").ok());
  EXPECT_EQ(commands_[commands_.size() - 2], "scancel --batch --signal=TERM 12");
}

TEST_F(SlurmBackendTest, EndThatSlurmHasForgotten_IsWhatTheScriptHasNoted) {
  Submit();
  squeue_.out = "";
  for (const auto& [end, state] :
       std::map<std::string, JobState>{{"2 openssl cannot make a key", JobState::kFailed},
                                       {"143 ended", JobState::kCancelled},
                                       {"0 ended", JobState::kCancelled},
                                       {"0 over", JobState::kSucceeded},
                                       {"137 failed with exit code 137", JobState::kUnknown}}) {
    std::ofstream(Folder() + "/12.events")
        << "submit\t1\t0\tk 2\nstart\t2\t0\tn0\nend\t3\t0\t" << end << "\n";
    EXPECT_EQ(State(), state) << end;
  }
  // No more output comes, as a reader that follows the log learns.
  Event("start\t4\t1\tn0");
  const absl::Status followed =
      backend_->follow_log("train-12", {}, [](const LogChunk&) { return true; });
  EXPECT_TRUE(absl::IsUnavailable(followed)) << followed;
}

TEST_F(SlurmBackendTest, Watch_OutlivesARestartOfTheController) {
  Submit();
  squeue_ = {1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"};
  int calls = 0;
  backend_ = SlurmBackend({.folder = Folder(),
                           .run =
                               [&](const auto& argv, const auto& without) {
                                 if (++calls == 3) squeue_ = {0, "12|COMPLETED|n0|None\n", ""};
                                 return Run(argv, without);
                               },
                           .poll = absl::Milliseconds(1)});
  const auto end = backend_->watch(
      "train-12", [](const Job&) { return true; }, absl::InfiniteDuration());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->state, JobState::kSucceeded);
}

// A step of the wall clock, such as NTP makes, neither ends nor lengthens a wait.
TEST_F(SlurmBackendTest, Waits_TakeTheirTimeFromTheMonotonicClock) {
  Submit();
  FakeClock clock;
  int calls = 0;
  absl::Duration of_a_call = absl::Minutes(2);
  backend_ = SlurmBackend({.folder = Folder(),
                           .run =
                               [&](const auto& argv, const auto& without) {
                                 if (argv[0] == "squeue") {
                                   ++calls;
                                   clock.Advance(of_a_call);
                                 }
                                 return Run(argv, without);
                               },
                           .poll = absl::Milliseconds(1),
                           .patience = absl::Minutes(5),
                           .clock = &clock});
  squeue_ = {1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"};
  const auto all = [](const JobUpdate&) { return true; };
  const auto one = [](const Job&) { return true; };
  EXPECT_TRUE(absl::IsUnavailable(backend_->watch_all({}, all)));
  EXPECT_EQ(std::exchange(calls, 0), 3);
  EXPECT_TRUE(
      absl::IsUnavailable(backend_->watch("train-12", one, absl::InfiniteDuration()).status()));
  EXPECT_EQ(std::exchange(calls, 0), 3);
  squeue_ = {0, "12|RUNNING|n0|None\n", ""};
  EXPECT_TRUE(absl::IsDeadlineExceeded(backend_->watch("train-12", one, absl::Hours(1)).status()));
  EXPECT_EQ(calls, 30);
}

}  // namespace
}  // namespace muster::client
