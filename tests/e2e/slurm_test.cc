// Jobs of a real SLURM: its controller and four nodes run on this machine, as this user.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "agent/job_coordination.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "tests/support/command.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing_support::CommandResult;
using testing_support::RunCommand;

constexpr int kNodes = 4;

std::string Shell(const std::string& command) {
  const CommandResult result = RunCommand(command + " 2>&1");
  EXPECT_EQ(result.exit_code, 0) << command << "\n" << result.output;
  return std::string(absl::StripAsciiWhitespace(result.output));
}

int FreePort() {
  static auto& given = *new std::set<int>;
  for (;;) {
    const absl::StatusOr<int> port = agent::FindFreePort();
    EXPECT_TRUE(port.ok()) << port.status();
    if (!port.ok()) return 0;
    if (given.insert(*port).second) return *port;
  }
}

class SlurmTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { cluster_ = new Cluster; }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }

  struct Cluster {
    Cluster() {
      const std::string user = Shell("id -un"), host = Shell("hostname -s");
      const std::string socket = folder.Path("munge");
      // All is in this folder, for this user: nothing of the machine's own munge or SLURM is
      // touched.
      Shell(absl::StrCat("head -c 1024 /dev/urandom > ", folder.Path("key"), " && chmod 600 ",
                         folder.Path("key")));
      Shell(absl::StrCat(
          "/usr/sbin/munged --force --socket=", socket, " --key-file=", folder.Path("key"),
          " --pid-file=", folder.Path("munge.pid"), " --log-file=", folder.Path("munge.log"),
          " --seed-file=", folder.Path("munge.seed")));
      std::ofstream config(conf);
      config << "ClusterName=muster\nSlurmctldHost=" << host << "(127.0.0.1)\nSlurmUser=" << user
             << "\nSlurmdUser=" << user << "\nAuthType=auth/munge\nAuthInfo=socket="
             << socket
             // A job that is put back into the queue waits until its old credentials have expired.
             << ",cred_expire=5\nSlurmctldPort=" << FreePort() << "\nSlurmdTimeout=10\n"
             << "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
             << "SwitchType=switch/none\nMpiDefault=none\nSelectType=select/cons_tres\n"
             << "SelectTypeParameters=CR_Core\nJobAcctGatherType=jobacct_gather/none\n"
             << "ReturnToService=2\nSchedulerParameters=sched_interval=1,bf_interval=1\n"
             << "KillWait=5\nMessageTimeout=20\n";
      for (const auto& [name, file] :
           std::vector<std::pair<std::string, std::string>>{{"StateSaveLocation", "state"},
                                                            {"SlurmdSpoolDir", "spool.%n"},
                                                            {"SlurmctldPidFile", "slurmctld.pid"},
                                                            {"SlurmdPidFile", "slurmd.%n.pid"},
                                                            {"SlurmctldLogFile", "slurmctld.log"},
                                                            {"SlurmdLogFile", "slurmd.%n.log"}}) {
        config << name << "=" << folder.Path(file) << "\n";
      }
      mkdir(folder.Path("state").c_str(), 0700);
      for (int n = 0; n < kNodes; ++n) {
        mkdir(folder.Path(absl::StrCat("spool.n", n)).c_str(), 0700);
        config << "NodeName=n" << n << " NodeHostname=" << host
               << " NodeAddr=127.0.0.1 Port=" << FreePort() << " CPUs=2 CoresPerSocket=2 "
               << "RealMemory=1000 State=UNKNOWN\n";
      }
      config << "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP "
                "OverSubscribe=FORCE:4\n";
      config.close();
      setenv("SLURM_CONF", conf.c_str(), 1);
      // All "machines" are this one: a loopback address, and no name that others would look up.
      mkdir(folder.Path("bin").c_str(), 0700);
      std::ofstream(folder.Path("bin/hostname")) << "#!/bin/sh\necho 127.0.0.1\n";
      chmod(folder.Path("bin/hostname").c_str(), 0700);
      setenv("PATH", absl::StrCat(folder.Path("bin"), ":", getenv("PATH")).c_str(), 1);
      setenv("MUSTER_CPU", "true", 1);
      Shell("/usr/sbin/slurmctld -c");
      for (int n = 0; n < kNodes; ++n) StartNode(n);
      WaitUntil([] { return Shell("sinfo -h -o '%D %t'") == absl::StrCat(kNodes, " idle"); });
    }

    ~Cluster() {
      Shell("scontrol shutdown");
      Shell(absl::StrCat("kill $(cat ", folder.Path("munge.pid"), ")"));
      for (const std::string& name :
           {std::string("slurmctld"), std::string("slurmd.n0"), std::string("slurmd.n1"),
            std::string("slurmd.n2"), std::string("slurmd.n3")}) {
        const absl::StatusOr<std::string> pid = ReadFile(folder.Path(name + ".pid"));
        if (pid.ok()) WaitUntilEnded(std::atoi(pid->c_str()));
      }
    }

    void StartNode(int n) const { Shell(absl::StrCat("/usr/sbin/slurmd -N n", n)); }

    const TestFolder folder = TestFolder::ForSockets();
    const std::string conf = folder.Path("slurm.conf");
  };

  static std::string Program(const std::string& path) { return JoinPath(WorkingDirectory(), path); }
  static std::string WorkingDirectory() { return Shell("pwd"); }

  // `sbatch train.sbatch slurm_worker FOLDER`, with a pipe through which the worker says that it
  // waits. Its output goes to FOLDER/out.
  struct Job {
    explicit Job(const std::string& name) : folder(TestPath(name)) {
      mkdir(folder.c_str(), 0700);
      EXPECT_EQ(mkfifo((folder + "/holds").c_str(), 0600), 0);
      submitted = std::thread([this] {
        // Returns when the job does.
        result = RunCommand(absl::StrCat("MUSTER=", Program("client/cli/muster"),
                                         " MUSTER_RUN_FOLDER=", folder, "/run",
                                         " sbatch --wait --nodes=2 --parsable --output=", folder,
                                         "/out ", Program("deploy/slurm/train.sbatch"), " ",
                                         Program("tests/e2e/slurm_worker"), " ", folder, " 2>&1"));
      });
    }
    ~Job() {
      if (submitted.joinable()) submitted.join();
    }
    // Blocks until the processes have reached the step at which they wait.
    void WaitUntilItHolds() const { EXPECT_EQ(Shell("cat " + folder + "/holds"), "now"); }
    // The job's number, once it runs.
    std::string Id() const { return Shell("squeue -h -t R -o %A"); }
    std::string Output() {
      submitted.join();
      EXPECT_EQ(result.exit_code, 0) << result.output;
      const absl::StatusOr<std::string> text = ReadFile(folder + "/out");
      EXPECT_TRUE(text.ok()) << text.status();
      return text.value_or("");
    }

    const std::string folder;
    std::thread submitted;
    CommandResult result;
  };

  // Returns the step after which the job of this output continued; expects that its weights are
  // then those of an undisturbed run.
  static int64_t StepOfResume(const std::string& output) {
    const std::string resumed = "resumed after step ";
    const size_t at = output.find(resumed);
    EXPECT_NE(at, std::string::npos) << output;
    if (at == std::string::npos) return -1;
    const int64_t step = std::atoll(output.c_str() + at + resumed.size());
    const std::string folder = TestPath(absl::StrCat("whole-", step));
    mkdir(folder.c_str(), 0700);
    const CommandResult whole = RunCommand(
        absl::StrCat("client/cli/muster launch --num_processes 2 -- tests/e2e/slurm_worker ",
                     step + 8, " ", folder, " 2>&1"));
    EXPECT_EQ(whole.exit_code, 0) << whole.output;
    const size_t weights = whole.output.find("weights after");
    EXPECT_NE(weights, std::string::npos) << whole.output;
    if (weights == std::string::npos) return -1;
    EXPECT_THAT(output, HasSubstr(whole.output.substr(
                            weights, whole.output.find('\n', weights) + 1 - weights)));
    return step;
  }

  // Returns what a muster command about jobs on SLURM prints, for a user whose variables would make
  // another job of it: one that SLURM does not put back into the queue, that gets no variables, of
  // an array.
  static std::string Muster(const std::string& command, int code = 0) {
    static const std::string& folder = *new std::string(TestPath("slurm"));
    const CommandResult result =
        RunCommand(absl::StrCat("MUSTER_ON=slurm SBATCH_NO_REQUEUE=1 SBATCH_EXPORT=NONE "
                                "SBATCH_ARRAY_INX=0-1 SBATCH_WAIT=1 SBATCH_OUTPUT=/dev/null "
                                "MUSTER_SLURM_FOLDER=",
                                folder, " ", Program("client/cli/muster"), " ", command, " 2>&1"));
    EXPECT_EQ(result.exit_code, code) << command << "\n" << result.output;
    return std::string(absl::StripAsciiWhitespace(result.output));
  }
  static void WaitForState(const std::string& job, const std::string& state) {
    WaitUntil([&] {
      return absl::StrContains(Muster("list " + job), absl::StrCat(job, "  ", state, " "));
    });
  }

  static Cluster* cluster_;
};

SlurmTest::Cluster* SlurmTest::cluster_ = nullptr;

TEST_F(SlurmTest, LaunchOnceANode_IsOneJob) {
  const std::string token = TestPath("token");
  Shell(absl::StrCat("umask 077; echo of-this-test > ", token));
  const std::string launch = absl::StrCat(
      " client/cli/muster launch --main_process_ip 127.0.0.1 --token_file ", token, " -- ");
  EXPECT_THAT(Shell(absl::StrCat("srun --nodes=4 --ntasks-per-node=1", launch,
                                 Program("tests/e2e/launch_meet"))),
              HasSubstr("sum of ranks 6"));
  // Each of two would start all processes of its machine.
  const CommandResult twice =
      RunCommand(absl::StrCat("srun --nodes=2 --ntasks-per-node=2", launch, "/bin/true 2>&1"));
  EXPECT_EQ(twice.exit_code, 2);
  EXPECT_THAT(twice.output, HasSubstr("srun --ntasks-per-node=1"));
  // This is in a batch script or a shell of an allocation, without srun.
  const CommandResult alone =
      RunCommand(absl::StrCat("salloc --nodes=2", launch, "/bin/true 2>&1"));
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_THAT(alone.output, HasSubstr("the SLURM job has 2 nodes"));
}

TEST_F(SlurmTest, StoppedJob_SavesAndContinuesFromItsCheckpoint) {
  Job job("stopped");
  job.WaitUntilItHolds();
  // SLURM does the same before the time limit, for which the script asks by --signal.
  Shell(absl::StrCat("scancel --batch --signal=TERM ", job.Id()));
  const std::string output = job.Output();
  EXPECT_THAT(output, HasSubstr("stopped before its end"));
  EXPECT_GT(StepOfResume(output), 11);
  EXPECT_THAT(Shell("ls " + job.folder + "/run"), "");
}

TEST_F(SlurmTest, CancelledJob_IsNotPutBackIntoTheQueue) {
  Job job("cancelled");
  job.WaitUntilItHolds();
  const std::string id = job.Id();
  Shell("scancel " + id);
  job.submitted.join();
  WaitUntil(
      [&] { return Shell(absl::StrCat("squeue -h -t all -j ", id, " -o %T")) == "CANCELLED"; });
  EXPECT_THAT(ReadFile(job.folder + "/out").value_or(""), Not(HasSubstr("goes back")));
}

TEST_F(SlurmTest, LostNode_JobContinuesOnOthers) {
  Job job("lost");
  job.WaitUntilItHolds();
  // The lost node, with all of its processes, is the one that does not run the script.
  const std::vector<std::string> hosts =
      absl::StrSplit(Shell("scontrol show hostnames $(squeue -h -t R -o %N)"), '\n');
  ASSERT_EQ(hosts.size(), 2u);
  const std::string lost = hosts[1];
  Shell(absl::StrCat("kill -9 $(cat ", cluster_->folder.Path("slurmd." + lost + ".pid"), ")"));
  Shell(absl::StrCat("for p in $(pgrep -f 'slurmstepd: \\[", job.Id(), "\\.0\\]'); do ",
                     "tr '\\0' '\\n' < /proc/$p/environ | grep -qx SLURMD_NODENAME=", lost,
                     " && kill -9 $p; done; true"));
  for (const std::string& pid : std::vector<std::string>(
           absl::StrSplit(Shell("pgrep -f 'muster launch' || true"), '\n', absl::SkipEmpty()))) {
    const CommandResult there = RunCommand(
        absl::StrCat("tr '\\0' '\\n' < /proc/", pid, "/environ | grep -qx SLURMD_NODENAME=", lost));
    if (there.exit_code == 0) kill(std::atoi(pid.c_str()), SIGKILL);
  }
  const std::string output = job.Output();
  EXPECT_THAT(output, HasSubstr("goes back into the queue"));
  EXPECT_EQ(StepOfResume(output), 10);
  cluster_->StartNode(lost.back() - '0');
}

TEST_F(SlurmTest, SubmittedJob_IsSuspendedAndResumed_AndContinuesFromItsCheckpoint) {
  const std::string folder = TestPath("submitted");
  mkdir(folder.c_str(), 0700);
  ASSERT_EQ(mkfifo((folder + "/holds").c_str(), 0600), 0);
  const std::string options =
      absl::StrCat("--processes 2 --processes_per_node 1 --name train --env WORD=\"it's here\" -- ",
                   Program("tests/e2e/slurm_worker"), " ", folder);
  EXPECT_THAT(Muster("submit --dry_run " + options),
              AllOf(HasSubstr("to start at"), HasSubstr("#SBATCH --nodes=2\n"),
                    HasSubstr("checkpoint: none; the program decides")));
  const std::string job = Muster("submit --idempotency_key once " + options);
  EXPECT_EQ(Muster("submit --idempotency_key once " + options), job);
  EXPECT_EQ(Shell("cat " + folder + "/holds"), "now");
  EXPECT_THAT(Muster("describe " + job),
              AllOf(HasSubstr("\"RUNNING\""), HasSubstr("WORD"), HasSubstr("\"processes\": 1")));
  Muster("suspend " + job);
  WaitForState(job, "SUSPENDED");
  EXPECT_THAT(Muster("incidents " + job), HasSubstr("PREEMPTED"));
  Muster("resume " + job);
  // Follows the job through the requeue, to the end.
  const std::string output = Muster("logs --follow " + job);
  EXPECT_THAT(Muster("watch " + job), HasSubstr("SUCCEEDED: all processes have succeeded"));
  EXPECT_GT(StepOfResume(output + "\n"), 11);
  EXPECT_THAT(Muster("logs --attempt 2 --tail 1 " + job), HasSubstr("weights after"));
  EXPECT_THAT(Muster("cancel " + job, 4), HasSubstr("has ended"));
  Muster("remove " + job);
  EXPECT_THAT(Muster("describe " + job, 3), HasSubstr("no job"));
}

TEST_F(SlurmTest, SubmittedJob_ThatIsCancelled_IsNotPutBackIntoTheQueue) {
  const std::string ready = TestPath("ready");
  ASSERT_EQ(mkfifo(ready.c_str(), 0600), 0);
  const std::string job =
      Muster("submit --name sleeper -- /bin/sh -c 'echo now > " + ready + "; sleep 1000'");
  EXPECT_EQ(Shell("cat " + ready), "now");
  Muster("cancel " + job);
  EXPECT_THAT(Muster("watch " + job, 1), HasSubstr("CANCELLED"));
  EXPECT_THAT(Shell("squeue -h -t all -j " + job.substr(job.rfind('-') + 1) + " -o %T"),
              HasSubstr("CANCELLED"));
}

TEST_F(SlurmTest, SubmittedJob_ThatFails_IsRestartedInPlace_AndItsEndIsKnown) {
  const std::string failed = Muster(
      "submit --name fails --processes 2 --max_restarts 1 --env WORD=w -- "
      "/bin/sh -c 'echo try $RANK $WORD; exit 7'");
  EXPECT_THAT(Muster("watch " + failed, 1), HasSubstr("exited with code 7"));
  EXPECT_EQ(Muster("logs --rank 1 " + failed), "try 1 w\ntry 1 w");
  EXPECT_THAT(Muster("incidents " + failed), HasSubstr("PROCESS_FAILED"));
  const std::string missing = Muster("submit --name missing -- no/such/program");
  EXPECT_THAT(Muster("watch " + missing, 1), HasSubstr("no/such/program"));
  EXPECT_THAT(Muster("incidents " + missing), HasSubstr("USER_ERROR"));
  EXPECT_THAT(Muster("submit --processes 9 -- true", 2), HasSubstr("larger than SLURM's nodes"));
  EXPECT_THAT(Muster("submit --sbatch=--partition=none -- true", 2), HasSubstr("none"));
}

TEST_F(SlurmTest, WrongProgram_EndsTheJobAtOnce) {
  const std::string out = TestPath("wrong");
  const CommandResult result = RunCommand(
      absl::StrCat("MUSTER=", Program("client/cli/muster"), " MUSTER_RUN_FOLDER=", TestPath("run"),
                   " sbatch --wait --nodes=2 --output=", out, " ",
                   Program("deploy/slurm/train.sbatch"), " no/such/program 2>&1"));
  EXPECT_EQ(result.exit_code, 127) << result.output;
  EXPECT_THAT(ReadFile(out).value_or(""), Not(HasSubstr("goes back into the queue")));
}

}  // namespace
}  // namespace muster
