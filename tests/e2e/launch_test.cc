#include <sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "agent/job_coordination.h"
#include "base/identity.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "rpc/test_listener.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

using LaunchTest = LaunchFixture;

// Waits as a well-behaved program does: it handles SIGTERM while it works.
constexpr char kWorkUntilTold[] =
    "trap 'echo told to stop; exit 0' TERM; echo pid $$; while :; do sleep 1000 & wait; done";

TEST_F(LaunchTest, OneProcess_PassesItsOutputAndExitCodeThrough) {
  auto ok = Launch({}, "echo out; echo err >&2");
  EXPECT_EQ(ok->Wait(), 0);
  EXPECT_THAT(ok->out(), ElementsAre("out"));
  EXPECT_THAT(ok->err(), ElementsAre("err"));
  auto failed = Launch({}, "echo oops >&2; exit 42");
  EXPECT_EQ(failed->Wait(), 1);
  EXPECT_THAT(
      failed->err_text(),
      ContainsRegex("rank 0 \\(pid [0-9]+ on .+\\) exited with code 42; the job has failed"));
}

TEST_F(LaunchTest, Workers_SeeTheirPlaceInMustersAndTorchrunsVariables) {
  env_["KEPT"] = "as it is";
  auto launch = Launch(
      {"--num-processes", "2", "--cpu", "--mixed_precision=bf16", "--gradient_accumulation_steps",
       "4", "--env", "GIVEN=by flag", "--max_restarts", "7", "--job_name", "digits"},
      "env");
  EXPECT_EQ(launch->Wait(), 0);
  std::map<std::string, std::map<std::string, std::string>> seen;
  for (const std::string& line : launch->out()) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(": ", 1));
    ASSERT_EQ(parts.size(), 2u) << line;
    const std::vector<std::string> variable = absl::StrSplit(parts[1], absl::MaxSplits('=', 1));
    if (variable.size() == 2) seen[parts[0]][variable[0]] = variable[1];
  }
  ASSERT_THAT(seen, SizeIs(2));
  for (int rank = 0; rank < 2; ++rank) {
    auto& env = seen[absl::StrCat("[", rank, "]")];
    const std::string text = absl::StrCat(rank);
    for (const char* name :
         {"MUSTER_RANK", "RANK", "MUSTER_LOCAL_RANK", "LOCAL_RANK", "ROLE_RANK"}) {
      EXPECT_EQ(env[name], text) << name;
    }
    for (const char* name : {"MUSTER_WORLD_SIZE", "WORLD_SIZE", "MUSTER_LOCAL_WORLD_SIZE",
                             "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"}) {
      EXPECT_EQ(env[name], "2") << name;
    }
    for (const char* name : {"MUSTER_NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"})
      EXPECT_EQ(env[name], "0");
    for (const char* name : {"MUSTER_NUM_NODES", "GROUP_WORLD_SIZE"})
      EXPECT_EQ(env[name], "1") << name;
    EXPECT_EQ(env["MUSTER_CPU"], "true");
    EXPECT_EQ(env["MUSTER_MIXED_PRECISION"], "bf16");
    EXPECT_EQ(env["MUSTER_GRADIENT_ACCUMULATION_STEPS"], "4");
    EXPECT_EQ(env["MUSTER_DEBUG"], "false");
    EXPECT_EQ(env["MUSTER_AGENT_TELLS"], "true");
    EXPECT_EQ(env["MUSTER_JOB"], "digits");
    EXPECT_EQ(env["MUSTER_WORKER_ID"], "w" + text);
    EXPECT_EQ(env["TORCHELASTIC_RUN_ID"], "digits");
    EXPECT_EQ(env["TORCHELASTIC_MAX_RESTARTS"], "7");
    EXPECT_EQ(env["MASTER_ADDR"], "127.0.0.1");
    EXPECT_EQ(env["GIVEN"], "by flag");
    EXPECT_EQ(env["KEPT"], "as it is");
    EXPECT_NE(env["OMP_NUM_THREADS"], "");
    EXPECT_THAT(env["MUSTER_COORDINATOR"], StartsWith("unix:/"));
  }
  EXPECT_EQ(seen["[0]"]["MASTER_PORT"], seen["[1]"]["MASTER_PORT"]);
  EXPECT_NE(seen["[0]"]["MUSTER_INCARNATION"], seen["[1]"]["MUSTER_INCARNATION"]);
}

TEST_F(LaunchTest, ProgramThatKnowsOnlyTorchrun_Runs) {
  auto launch =
      Muster({"launch", "--num_processes", "3", "--cpu", Runfile("tests/e2e/launch_meet")});
  EXPECT_EQ(launch->Wait(), 0) << launch->err_text();
  EXPECT_THAT(launch->out(), ElementsAre("[0]: sum of ranks 3"));
}

// The flags are as in a script for torchrun.
TEST_F(LaunchTest, TorchrunsFlags_StartTheSameProcesses) {
  auto launch = Launch({"--standalone", "--nnodes=1", "--nproc-per-node=3", "--rdzv_id=night"},
                       "echo $RANK of $WORLD_SIZE in $TORCHELASTIC_RUN_ID");
  EXPECT_EQ(launch->Wait(), 0) << launch->err_text();
  EXPECT_THAT(launch->out(), UnorderedElementsAre("[0]: 0 of 3 in night", "[1]: 1 of 3 in night",
                                                  "[2]: 2 of 3 in night"));
}

TEST_F(LaunchTest, D26_ProcessesOnTheCpu_ReallyRun) {
  auto launch = Launch({"--cpu", "--num_processes", "3"}, "echo $RANK");
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->out(), UnorderedElementsAre("[0]: 0", "[1]: 1", "[2]: 2"));
}

TEST_F(LaunchTest, D28_NoGpu_ProcessesKnowThatTheyAreOneCpuJob) {
  auto launch = Launch({"--num_processes", "2"}, "echo $MUSTER_CPU $WORLD_SIZE");
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->out(), UnorderedElementsAre("[0]: true 2", "[1]: true 2"));
}

TEST_F(LaunchTest, NoPrefix_LinesAreAsWritten) {
  auto launch = Launch({"--num_processes", "2", "--no_prefix"}, "echo line");
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->out(), ElementsAre("line", "line"));
}

TEST_F(LaunchTest, PrefixByDefault_OnATerminalOnly) {
  env_.erase("MUSTER_PREFIX");
  auto piped = Launch({"--num_processes", "2"}, "echo line");
  EXPECT_EQ(piped->Wait(), 0);
  EXPECT_THAT(piped->out(), ElementsAre("line", "line"));
  auto shown = Launch({"--num_processes", "2"}, "echo line", /*terminal=*/true);
  EXPECT_EQ(shown->Wait(), 0);
  EXPECT_THAT(shown->out(), UnorderedElementsAre("[0]: line", "[1]: line"));
}

TEST_F(LaunchTest, StandardInput_GoesToTheFirstProcess) {
  auto launch = Muster({"launch", "--num_processes", "2", "sh", "-c", "cat; echo end"});
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->out(), UnorderedElementsAre("[0]: end", "[1]: end"));
}

// Some daemons start programs this way. The numbers would go to what the launcher opens for itself.
TEST_F(LaunchTest, StartedWithoutStandardInput_ProcessesHaveAnEmptyOne) {
  Command launch(*host_,
                 {"/bin/sh", "-c",
                  absl::StrCat("exec ", Runfile("client/cli/muster"),
                               " launch -- readlink /proc/self/fd/0 <&-")},
                 env_);
  EXPECT_EQ(launch.Wait(), 0);
  EXPECT_THAT(launch.out(), ElementsAre("/dev/null"));
}

TEST_F(LaunchTest, Terminal_ProcessesSeeOne) {
  auto launch = Launch({}, "test -t 1 && test -t 2 && printf '10%%\\r20%%\\r' && echo done",
                       /*terminal=*/true);
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->out_text(), HasSubstr("done"));
}

TEST_F(LaunchTest, WorkerKilled_LaunchNamesItAndLeavesNothing) {
  // Each worker has a child in its group and one that left for a session of its own.
  auto launch = Launch({"--num_processes", "2"},
                       "sleep 1000 & a=$!; setsid sleep 1000 & b=$!; echo step 7 of rank $RANK; "
                       "echo pids $$ $a $b; wait");
  const std::vector<int> first = Numbers(launch->WaitForLine("[0]: pids "));
  const std::vector<int> second = Numbers(launch->WaitForLine("[1]: pids "));
  ASSERT_THAT(first, SizeIs(3));
  ASSERT_THAT(second, SizeIs(3));
  kill(second[0], SIGKILL);
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_THAT(
      launch->err_text(),
      AllOf(HasSubstr(absl::StrCat("muster launch: rank 1 (pid ", second[0], " on ", HostName(),
                                   ") was killed by signal 9 (SIGKILL); the job has failed")),
            HasSubstr("| step 7 of rank 1")));
  for (const int pid : first) EXPECT_TRUE(WaitUntilEnded(pid)) << pid;
  for (const int pid : second) EXPECT_TRUE(WaitUntilEnded(pid)) << pid;
}

TEST_F(LaunchTest, WorkerKilled_OtherThatIgnoresTermIsKilledToo) {
  auto launch =
      Launch({"--num_processes", "2"}, "trap '' TERM; echo pid $$; while :; do sleep 1000; done");
  const std::vector<int> survivor = Numbers(launch->WaitForLine("[0]: pid"));
  const std::vector<int> victim = Numbers(launch->WaitForLine("[1]: pid"));
  kill(victim.at(0), SIGKILL);
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_TRUE(WaitUntilEnded(survivor.at(0)));
}

class StopTest : public LaunchFixture, public ::testing::WithParamInterface<int> {};

TEST_P(StopTest, Signal_WorkersCleanUpAndTheExitCodeTells) {
  auto launch = Launch({"--num_processes", "2"}, kWorkUntilTold);
  const std::vector<int> pids = {Numbers(launch->WaitForLine("[0]: pid")).at(0),
                                 Numbers(launch->WaitForLine("[1]: pid")).at(0)};
  launch->Signal(GetParam());
  EXPECT_EQ(launch->Wait(), 128 + GetParam());
  EXPECT_THAT(launch->out(), AllOf(Contains("[0]: told to stop"), Contains("[1]: told to stop")));
  EXPECT_THAT(launch->err_text(),
              HasSubstr(absl::StrCat("muster: stopping (", agent::SignalName(GetParam()), ")")));
  for (const int pid : pids) EXPECT_TRUE(WaitUntilEnded(pid));
}

INSTANTIATE_TEST_SUITE_P(Signals, StopTest, ::testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& info) { return agent::SignalName(info.param); });

// SIGKILL does not end this process: a debugger that asked for the stop at exit holds it.
TEST_F(LaunchTest, WorkerHeldByADebugger_IsNamedAndTheJobEndsWhenItLetsGo) {
  auto launch = Launch({"--num_processes", "2", "--cpu"}, "echo pid $$; exec sleep 1000");
  const int held = Numbers(launch->WaitForLine("[1]: pid")).at(0);
  const int killed = Numbers(launch->WaitForLine("[0]: pid")).at(0);
  ASSERT_EQ(ptrace(PTRACE_SEIZE, held, nullptr, PTRACE_O_TRACEEXIT), 0) << strerror(errno);
  kill(killed, SIGKILL);
  EXPECT_THAT(launch->WaitForLine("muster: rank 1 on "),
              HasSubstr(absl::StrCat("has not ended after SIGKILL: traced by process ", getpid(),
                                     " (launch_test)")));
  EXPECT_EQ(ptrace(PTRACE_DETACH, held, nullptr, nullptr), 0) << strerror(errno);
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_THAT(launch->err_text(), HasSubstr(absl::StrCat("rank 0 (pid ", killed, " on ")));
  EXPECT_TRUE(WaitUntilEnded(held));
}

TEST_F(LaunchTest, StopTwice_KillsWorkersThatDoNotListen) {
  auto launch = Launch({"--stop_grace", "1h"},
                       "trap 'echo no' TERM; echo pid $$; while :; do sleep 1000 & wait; done");
  const int pid = Numbers(launch->WaitForLine("pid")).at(0);
  launch->Signal(SIGINT);
  launch->WaitForLine("no");
  // Within the first second it counts as the same request.
  do {
    launch->Signal(SIGINT);
  } while (!launch->EndsWithin(absl::Milliseconds(100)));
  EXPECT_EQ(launch->Wait(), 130);
  EXPECT_TRUE(WaitUntilEnded(pid));
}

// Signals are ignored by nohup, and INT by the background jobs of shells.
TEST_F(LaunchTest, SignalsInheritedAsIgnored_StayIgnored) {
  for (const int ignored : {SIGHUP, SIGINT}) {
    const auto before = signal(ignored, SIG_IGN);
    auto launch = Launch({}, kWorkUntilTold);
    signal(ignored, before);
    const int pid = Numbers(launch->WaitForLine("pid")).at(0);
    launch->Signal(ignored);
    kill(pid, ignored);
    launch->Signal(SIGTERM);
    EXPECT_EQ(launch->Wait(), 143);
    EXPECT_THAT(launch->err_text(), HasSubstr("muster: stopping (SIGTERM)"));
    EXPECT_THAT(launch->out(), Contains("told to stop"));
  }
}

// Returns whether a signal waits for the process.
bool HasPendingSignal(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (absl::StartsWith(line, "ShdPnd:"))
      return line.find_first_of("123456789abcdef", 7) != line.npos;
  }
  return false;
}

// timeout(1) signals the command and then its group; systemd sends a second signal after the first.
TEST_F(LaunchTest, TwoSignalsAtOnce_AreOneWishAndWorkersSave) {
  ASSERT_EQ(mkfifo(Temp("go").c_str(), 0600), 0);
  auto launch =
      Launch({"--stop_grace", "1h"}, absl::StrCat("trap 'read go < ", Temp("go"),
                                                  "; echo saved; exit 0' TERM; echo pid $$; "
                                                  "while :; do sleep 1000 & wait; done"));
  launch->WaitForLine("pid");
  // Both signals are there when it looks.
  kill(launch->pid(), SIGSTOP);
  kill(launch->pid(), SIGTERM);
  kill(launch->pid(), SIGHUP);
  kill(launch->pid(), SIGCONT);
  launch->WaitForLine("muster: stopping");
  WaitUntil([&] { return !HasPendingSignal(launch->pid()); });
  // Opened for reading, too: that does not wait for a worker that was killed.
  std::fstream go(Temp("go"));
  go << "go\n" << std::flush;
  EXPECT_THAT(launch->Wait(), ::testing::AnyOf(128 + SIGTERM, 128 + SIGHUP));
  EXPECT_THAT(launch->out(), Contains("saved"));
}

// Once the workers are done, nothing is left to stop but the wait for the reader.
TEST_F(LaunchTest, ReaderThatDoesNotRead_SignalEndsTheLauncher) {
  ASSERT_EQ(mkfifo(Temp("fifo").c_str(), 0600), 0);
  auto launch =
      Launch({}, absl::StrCat("echo $MUSTER_COORDINATOR > ", Temp("fifo"), "; read go < ",
                              Temp("fifo"), "; yes ", std::string(999, 'y'), " | head -n 400"));
  std::string relay;
  std::ifstream(Temp("fifo")) >> relay;
  const int watch = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  relay.copy(address.sun_path, sizeof(address.sun_path) - 1, strlen("unix:"));
  ASSERT_EQ(connect(watch, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0) << relay;
  host_->PauseOutput(true);
  std::ofstream(Temp("fifo")) << "go\n";
  // The agent hangs up when the workers are done.
  char buffer[4096];
  while (read(watch, buffer, sizeof(buffer)) > 0) {
  }
  close(watch);
  launch->Signal(SIGTERM);
  EXPECT_EQ(launch->Wait(), 143);
}

// A daemon that does not show where it comes from.
TEST_F(LaunchTest, CleanedDaemon_EndsWithTheJob) {
  auto launch = Launch({},
                       "(env -i setsid sh -c 'echo stray $$; exec sleep 1000 </dev/null "
                       ">/dev/null 2>&1' &); trap 'exit 0' TERM; while :; do sleep 1000 & "
                       "wait; done");
  const int stray = Numbers(launch->WaitForLine("stray")).at(0);
  launch->Signal(SIGTERM);
  EXPECT_EQ(launch->Wait(), 143);
  EXPECT_TRUE(WaitUntilEnded(stray));
}

// The daemon ends even if the launcher can no longer act.
TEST_F(LaunchTest, LauncherKilled_CleanedDaemonEndsToo) {
  auto launch = Launch({},
                       "(env -i setsid sh -c 'echo stray $$; exec sleep 1000 </dev/null "
                       ">/dev/null 2>&1' &); exec sleep 1000");
  const int stray = Numbers(launch->WaitForLine("stray")).at(0);
  kill(launch->pid(), SIGKILL);
  EXPECT_EQ(launch->Wait(), -SIGKILL);
  EXPECT_TRUE(WaitUntilEnded(stray));
}

TEST_F(LaunchTest, GrandchildThatKeepsWriting_DoesNotKeepTheLauncher) {
  auto launch = Launch({}, absl::StrCat("(setsid yes ", std::string(9999, 'y'), " &); exit 0"));
  EXPECT_EQ(launch->Wait(), 0);
}

// Only a job is stopped in an orderly way.
TEST_F(LaunchTest, OtherCommandThatWaits_EndsByCtrlC) {
  const rpc::TestListener silent;
  auto status = Muster(
      {"status", "--coordinator", absl::StrCat("127.0.0.1:", silent.port()), "--timeout", "1h"});
  const int connection = accept(silent.fd(), nullptr, nullptr);
  status->Signal(SIGINT);
  EXPECT_EQ(status->Wait(), -SIGINT);
  close(connection);
}

TEST_F(LaunchTest, StopGraceUsedUp_Kills) {
  auto launch =
      Launch({"--stop_grace", "10ms"}, "trap '' TERM; echo pid $$; while :; do sleep 1000; done");
  const int pid = Numbers(launch->WaitForLine("pid")).at(0);
  launch->Signal(SIGTERM);
  EXPECT_EQ(launch->Wait(), 143);
  EXPECT_TRUE(WaitUntilEnded(pid));
}

TEST_F(LaunchTest, LauncherKilled_NothingSurvives) {
  auto launch =
      Launch({"--num_processes", "2"},
             "trap '' TERM; sleep 1000 & a=$!; setsid sleep 1000 & echo pids $$ $a $!; wait; wait");
  const std::vector<int> first = Numbers(launch->WaitForLine("[0]: pids"));
  const std::vector<int> second = Numbers(launch->WaitForLine("[1]: pids"));
  kill(launch->pid(), SIGKILL);
  EXPECT_EQ(launch->Wait(), -SIGKILL);
  for (const int pid : first) EXPECT_TRUE(WaitUntilEnded(pid)) << pid;
  for (const int pid : second) EXPECT_TRUE(WaitUntilEnded(pid)) << pid;
}

TEST_F(LaunchTest, Success_LeavesNothingBehindEither) {
  auto launch = Launch({}, "setsid sleep 1000 & echo stray $!");
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_TRUE(WaitUntilEnded(Numbers(launch->WaitForLine("stray")).at(0)));
}

TEST_F(LaunchTest, MaxRestarts_AllStartAgainAsNewIncarnations) {
  auto launch =
      Launch({"--num_processes", "2", "--max_restarts", "2"},
             "echo start $TORCHELASTIC_RESTART_COUNT $MUSTER_RESTART_COUNT $MUSTER_INCARNATION; "
             "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then exit 3; fi; "
             "if [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then exec sleep 1000; fi");
  EXPECT_EQ(launch->Wait(), 0);
  std::set<std::string> incarnations;
  std::vector<std::string> counts;
  for (const std::string& line : launch->out()) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    ASSERT_THAT(words, SizeIs(5)) << line;
    EXPECT_EQ(words[2], words[3]);
    counts.push_back(words[2]);
    incarnations.insert(words[4]);
  }
  std::sort(counts.begin(), counts.end());
  EXPECT_EQ(counts.back(), "2");
  EXPECT_THAT(incarnations, SizeIs(counts.size()));
  EXPECT_THAT(launch->err_text(),
              AllOf(HasSubstr("exited with code 3; starting all workers again (restart 1 of 2)"),
                    HasSubstr("(restart 2 of 2)")));
}

TEST_F(LaunchTest, MaxRestartsUsedUp_Fails) {
  auto launch = Launch({"--max_restarts", "1"}, "exit 3");
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_THAT(launch->err_text(), HasSubstr("the job has failed after 1 restart"));
}

TEST_F(LaunchTest, LogDir_HasAFileForEachRank) {
  auto quiet =
      Launch({"--num_processes", "2", "--log_dir", Temp("logs")}, "echo out $RANK; echo err >&2");
  EXPECT_EQ(quiet->Wait(), 0);
  EXPECT_THAT(quiet->out(), IsEmpty());
  EXPECT_EQ(ReadFile(Temp("logs/attempt_0/rank_0.log")).value(), "out 0\nerr\n");
  EXPECT_EQ(ReadFile(Temp("logs/attempt_0/rank_1.log")).value(), "out 1\nerr\n");
  auto tee = Launch({"--log_dir", Temp("logs"), "--tee"}, "echo again");
  EXPECT_EQ(tee->Wait(), 0);
  EXPECT_THAT(tee->out(), ElementsAre("again"));
  EXPECT_EQ(ReadFile(Temp("logs/attempt_0/rank_0.log")).value(), "again\n");
}

TEST_F(LaunchTest, SecondRunWithTheSameLogDir_LosesNoLogOfTheFirst) {
  auto first = Launch({"--num_processes", "2", "--max_restarts", "1", "--log_dir", Temp("logs")},
                      "echo first $RANK; exit 1");
  EXPECT_EQ(first->Wait(), 1);
  auto second = Launch({"--log_dir", Temp("logs")}, "echo second");
  EXPECT_EQ(second->Wait(), 0);
  EXPECT_THAT(second->err_text(),
              HasSubstr("the logs of an earlier launch are in " + Temp("logs/before_1") + " now"));
  EXPECT_THAT(ListDirectory(Temp("logs")).value(),
              ElementsAre(".launch", ".runs", "attempt_0", "before_1"));
  EXPECT_THAT(ListDirectory(Temp("logs/before_1")).value(), ElementsAre("attempt_0", "attempt_1"));
  EXPECT_EQ(ReadFile(Temp("logs/attempt_0/rank_0.log")).value(), "second\n");
  EXPECT_FALSE(PathExists(Temp("logs/attempt_0/rank_1.log")));
  EXPECT_EQ(ReadFile(Temp("logs/before_1/attempt_1/rank_1.log")).value(), "first 1\n");
}

TEST_F(LaunchTest, ConfigFile_IsUsedAndFlagsWin) {
  ASSERT_TRUE(
      WriteFileAtomically(Temp("c.yaml"), "num_processes: 2\nenv:\n  FROM_FILE: yes it is\n").ok());
  auto launch = Launch({"--config_file", Temp("c.yaml")}, "echo $WORLD_SIZE $FROM_FILE");
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->out(), UnorderedElementsAre("[0]: 2 yes it is", "[1]: 2 yes it is"));
  env_["MUSTER_CONFIG"] = Temp("c.yaml");
  auto flag = Launch({"--num_processes", "1"}, "echo $WORLD_SIZE");
  EXPECT_EQ(flag->Wait(), 0);
  EXPECT_THAT(flag->out(), ElementsAre("1"));
}

TEST_F(LaunchTest, DefaultConfigFile_IsFoundWithoutBeingNamed) {
  auto write = Muster({"config", "default", "--mixed_precision", "bf16", "--num_processes", "2"});
  EXPECT_EQ(write->Wait(), 0);
  EXPECT_THAT(write->out(), ElementsAre(Temp(".config/muster/config.yaml")));
  auto launch = Launch({}, "echo $WORLD_SIZE $MUSTER_MIXED_PRECISION");
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->out(), UnorderedElementsAre("[0]: 2 bf16", "[1]: 2 bf16"));
}

// Each mistake is one line on standard error that names the thing, and an exit code of its own
// kind.
TEST_F(LaunchTest, Mistakes_AreOneLineEach) {
  ASSERT_TRUE(WriteFileAtomically(Temp("bad.yaml"), "num_proceses: 2\n").ok());
  ASSERT_TRUE(WriteFileAtomically(Temp("plain"), "hello\n").ok());
  ASSERT_EQ(chmod(Temp("plain").c_str(), 0644), 0);
  ASSERT_TRUE(WriteFileAtomically(Temp("text"), "hello\n").ok());
  ASSERT_EQ(chmod(Temp("text").c_str(), 0755), 0);
  const rpc::TestListener taken;
  const std::string port = absl::StrCat(taken.port());

  const struct {
    std::vector<std::string> args;
    int code;
    std::string text;
  } kCases[] = {
      {{"launch", "--num_proceses", "2", "true"}, 2, "did you mean --num_processes?"},
      {{"launch"}, 2, "no program to launch"},
      {{"launch", "--num_processes", "0", "true"}, 2, "num_processes: 0"},
      {{"launch", "--num_processes", "3", "--num_machines", "2", "--coordinator", "127.0.0.1:1",
        "true"},
       2,
       "use 2 or 4"},
      {{"launch", "--coordinator", "127.0.0.1:" + port, "true"}, 4, port},
      {{"launch", "--config_file", Temp("bad.yaml"), "true"}, 2, "unknown key num_proceses"},
      {{"launch", "--config_file", Temp("none.yaml"), "true"}, 2, "none.yaml"},
      {{"launch", Temp("none")}, 127, "not found"},
      {{"launch", "no-such-program"}, 127, "not found in PATH"},
      {{"launch", Temp("plain")}, 126, "not executable"},
      {{"launch", temp_}, 126, "is a directory"},
      {{"launch", Temp("text")}, 126, "#!"},
      {{"launch", "--env", "RANK=3", "true"}, 2, "RANK"},
      {{"launch", "--log_dir", "/proc/nowhere", "true"}, 2, "/proc/nowhere"},
      {{"lanch", "true"}, 2, "did you mean muster launch?"},
      {{"config", "shew"}, 2, "did you mean show?"},
      {{"config", "validate", Temp("bad.yaml")}, 2, "unknown key"},
      {{"status", "--coordinator", "127.0.0.1:1", "--timeout", "100ms"}, 7, "127.0.0.1:1"},
      {{"status"}, 7, "--coordinator"},
      {{"status", "--coordinator", "10.0.0.5:29400"}, 2, "without TLS"},
      {{"env", "--jsn"}, 2, "did you mean --json?"},
  };
  for (const auto& c : kCases) {
    auto command = Muster(c.args);
    EXPECT_EQ(command->Wait(), c.code) << absl::StrJoin(c.args, " ") << "\n" << command->err_text();
    EXPECT_THAT(command->err(), SizeIs(1)) << absl::StrJoin(c.args, " ") << "\n"
                                           << command->err_text();
    EXPECT_THAT(command->err_text(), HasSubstr(c.text));
    EXPECT_THAT(command->out(), IsEmpty());
  }
}

// A table on a full disk must not pass for whole.
TEST_F(LaunchTest, OutputThatCannotBeWritten_IsAnError) {
  for (const char* args : {"version", "env --json", "launch --help", "config show"}) {
    const auto full = std::make_unique<Command>(
        *host_,
        std::vector<std::string>{
            "/bin/sh", "-c", absl::StrCat(Runfile("client/cli/muster"), " ", args, " > /dev/full")},
        env_);
    EXPECT_EQ(full->Wait(), 70) << args;
    EXPECT_THAT(full->err(), ElementsAre(HasSubstr("standard output cannot be written"))) << args;
  }
  const auto job = std::make_unique<Command>(
      *host_,
      std::vector<std::string>{
          "/bin/sh", "-c",
          absl::StrCat(Runfile("client/cli/muster"), " launch --cpu -- echo lost > /dev/full")},
      env_);
  EXPECT_EQ(job->Wait(), 0) << "the job itself is well";
  EXPECT_THAT(job->err(), ElementsAre(HasSubstr("standard output cannot be written")));
}

TEST_F(LaunchTest, Help_IsEverywhere) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{"--help"},
                                             {"launch", "--help"},
                                             {"test", "--help"},
                                             {"config", "--help"},
                                             {"env", "--help"},
                                             {"status", "--help"},
                                             {"version", "--help"}}) {
    auto command = Muster(args);
    EXPECT_EQ(command->Wait(), 0);
    EXPECT_THAT(command->out_text(), HasSubstr("Usage: muster")) << args[0];
    EXPECT_THAT(command->err(), IsEmpty());
  }
}

TEST_F(LaunchTest, Env_IsOneJsonObject) {
  auto command = Muster({"env", "--json"});
  EXPECT_EQ(command->Wait(), 0);
  const auto facts = nlohmann::json::parse(command->out_text(), nullptr, false);
  ASSERT_TRUE(facts.is_object()) << command->out_text();
  EXPECT_FALSE(facts["muster"].get<std::string>().empty());
  EXPECT_FALSE(facts["grpc"].get<std::string>().empty());
  EXPECT_GE(facts["cores"].get<int>(), 1);
}

TEST_F(LaunchTest, ConfigShow_NamesTheSources) {
  env_["MUSTER_MIXED_PRECISION"] = "bf16";
  auto command = Muster({"config", "show", "--num_processes", "2", "--json"});
  EXPECT_EQ(command->Wait(), 0);
  const auto config = nlohmann::json::parse(command->out_text(), nullptr, false);
  EXPECT_EQ(config["settings"]["num_processes"]["source"], "--num_processes");
  EXPECT_EQ(config["settings"]["mixed_precision"]["source"], "MUSTER_MIXED_PRECISION");
}

TEST_F(LaunchTest, Status_ReachesTheEmbeddedCoordinatorThroughTheAgent) {
  auto launch = Launch({}, absl::StrCat("echo at $MUSTER_COORDINATOR; ", kWorkUntilTold));
  const std::string address = launch->WaitForLine("at ");
  launch->WaitForLine("pid");
  auto status = Muster({"status", "--coordinator", address, "--json"});
  EXPECT_EQ(status->Wait(), 0) << status->err_text();
  EXPECT_EQ(nlohmann::json::parse(status->out_text(), nullptr, false)["coordinator"], address);
  launch->Signal(SIGTERM);
  EXPECT_EQ(launch->Wait(), 143);
}

TEST_F(LaunchTest, TestCommand_RunsTheChecksProgramAsLaunchWould) {
  ASSERT_TRUE(
      WriteFileAtomically(Temp("checks"), "#!/bin/sh\necho checked by $RANK of $WORLD_SIZE\n")
          .ok());
  ASSERT_EQ(chmod(Temp("checks").c_str(), 0755), 0);
  env_["MUSTER_CHECKS"] = Temp("checks");
  auto test = Muster({"test", "--num_processes", "2"});
  EXPECT_EQ(test->Wait(), 0);
  EXPECT_THAT(test->out(),
              UnorderedElementsAre("[0]: checked by 0 of 2", "[1]: checked by 1 of 2"));
}

}  // namespace
}  // namespace muster
