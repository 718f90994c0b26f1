#include <sys/stat.h>

#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "agent/job_coordination.h"
#include "base/file.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

// Several launches on one host play several machines.
class NodesTest : public LaunchFixture {
 protected:
  void SetUp() override {
    LaunchFixture::SetUp();
    const auto port = agent::FindFreePort();
    ASSERT_TRUE(port.ok()) << port.status();
    address_ = absl::StrCat("127.0.0.1:", *port);
  }
  std::unique_ptr<Command> Machine(int rank, const std::string& script,
                                   std::vector<std::string> more = {}) {
    std::vector<std::string> args = {
        "--num_machines",  "2",      "--num_processes", "4",         "--cpu",
        "--coordinator",   address_, "--token_file",    TokenFile(), "--machine_rank",
        absl::StrCat(rank)};
    args.insert(args.end(), more.begin(), more.end());
    return Launch(std::move(args), script);
  }
  std::unique_ptr<Command> AgentProgram(std::vector<std::string> args, const std::string& script) {
    args.insert(args.begin(), Runfile("agent/cmd/muster-agent"));
    args.insert(args.end(), {"--", "/bin/sh", "-c", script});
    return std::make_unique<Command>(*host_, std::move(args), env_);
  }

  std::string address_;
};

constexpr char kWorkUntilTold[] =
    "trap 'exit 0' TERM; echo pid $$; while :; do sleep 1000 & wait; done";

TEST_F(NodesTest, TwoMachines_RanksGoOverBoth) {
  const std::string script =
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT";
  auto second = Machine(1, script);
  auto first = Machine(0, script);
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  ASSERT_THAT(first->out(), SizeIs(2));
  const std::string meet = first->out()[0].substr(first->out()[0].rfind(' '));
  EXPECT_THAT(first->out(), UnorderedElementsAre("[0]: 0/4 0 0/2" + meet, "[1]: 1/4 1 0/2" + meet));
  EXPECT_THAT(second->out(),
              UnorderedElementsAre("[2]: 2/4 0 1/2" + meet, "[3]: 3/4 1 1/2" + meet));
}

// Agents are heard for as long as they live, also if their programs never call.
TEST_F(NodesTest, ProgramsThatOutliveTheLeaseManyTimes_GoOn) {
  const std::string script = "read line < $PIPE; echo told $line";
  env_["PIPE"] = Temp("pipe0");
  ASSERT_EQ(mkfifo(Temp("pipe0").c_str(), 0600), 0);
  auto first = Machine(0, script, {"--lease", "4s"});
  env_["PIPE"] = Temp("pipe1");
  ASSERT_EQ(mkfifo(Temp("pipe1").c_str(), 0600), 0);
  auto second = Machine(1, script, {"--lease", "4s"});
  EXPECT_FALSE(first->EndsWithin(absl::Seconds(13))) << first->err_text();
  EXPECT_FALSE(second->EndsWithin(absl::ZeroDuration())) << second->err_text();
  for (const char* const pipe : {"pipe0", "pipe1"}) {
    std::ofstream(Temp(pipe)) << "now\nnow\n";
  }
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
}

TEST_F(NodesTest, WorkerKilledOnOneMachine_BothEndAndNameIt) {
  auto first = Machine(0, kWorkUntilTold);
  auto second = Machine(1, absl::StrCat("echo last words of $RANK; ", kWorkUntilTold));
  const std::vector<int> survivors = {Numbers(first->WaitForLine("[0]: pid")).at(0),
                                      Numbers(first->WaitForLine("[1]: pid")).at(0),
                                      Numbers(second->WaitForLine("[2]: pid")).at(0)};
  const int victim = Numbers(second->WaitForLine("[3]: pid")).at(0);
  kill(victim, SIGKILL);
  EXPECT_EQ(first->Wait(), 1);
  EXPECT_EQ(second->Wait(), 1);
  for (const Command* command : {first.get(), second.get()}) {
    EXPECT_THAT(command->err_text(),
                AllOf(HasSubstr(absl::StrCat("rank 3 (pid ", victim, " on ")),
                      HasSubstr("was killed by signal 9 (SIGKILL); the job has failed"),
                      HasSubstr("| last words of 3")));
  }
  for (const int pid : survivors) EXPECT_TRUE(WaitUntilEnded(pid));
}

// An agent's report of an end goes with what follows it, in one stream.
TEST_F(NodesTest, OutputThatIsNotUtf8_DoesNotKeepTheJobFromItsEnd) {
  const std::string script = "printf 'caf\\351\\n'; exit 0";
  auto second = Machine(1, script);
  auto first = Machine(0, script);
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  EXPECT_THAT(first->out(), UnorderedElementsAre("[0]: caf\xe9", "[1]: caf\xe9"));
}

TEST_F(NodesTest, MaxRestarts_AllMachinesStartAgain) {
  const std::string script =
      "echo start $TORCHELASTIC_RESTART_COUNT; if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then exit "
      "0; fi; "
      "if [ $RANK = 2 ]; then exit 5; fi; exec sleep 1000";
  auto first = Machine(0, script, {"--max_restarts", "1"});
  auto second = Machine(1, script, {"--max_restarts", "1"});
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  EXPECT_THAT(first->out(), AllOf(Contains("[0]: start 1"), Contains("[1]: start 1")));
  EXPECT_THAT(second->out(), AllOf(Contains("[2]: start 1"), Contains("[3]: start 1")));
  EXPECT_THAT(first->err_text(),
              ContainsRegex(
                  "rank 2 .* exited with code 5; starting all workers again \\(restart 1 of 1\\)"));
}

// The machines agree on the failure that was seen first, after which a restart could help.
TEST_F(NodesTest, UserErrorBesideAnEarlierFailureElsewhere_IsFollowedByNoOtherStart) {
  for (const char* const pipe : {"pipe0", "pipe2"}) {
    ASSERT_EQ(mkfifo(Temp(pipe).c_str(), 0600), 0);
  }
  const std::string script =
      absl::StrCat("echo pid $$ start $TORCHELASTIC_RESTART_COUNT; case $RANK in 0|2) read code < ",
                   temp_, "/pipe$RANK; exit $code;; esac; exec sleep 1000");
  auto first = Machine(0, script, {"--max_restarts", "3"});
  auto second = Machine(1, script, {"--max_restarts", "3"});
  first->WaitForLine("[0]: pid");
  first->WaitForLine("[1]: pid");
  second->WaitForLine("[3]: pid");
  const int wrong = Numbers(second->WaitForLine("[2]: pid")).at(0);
  // Its machine learns of the user error only after the other one has failed.
  second->Signal(SIGSTOP);
  std::ofstream(Temp("pipe2")) << "2\n";
  ASSERT_TRUE(WaitUntilEnded(wrong));
  std::ofstream(Temp("pipe0")) << "5\n";
  first->WaitForLine("muster: rank 0 ");
  second->Signal(SIGCONT);
  EXPECT_EQ(first->Wait(), 1) << first->err_text();
  EXPECT_EQ(second->Wait(), 1) << second->err_text();
  for (const Command* command : {first.get(), second.get()}) {
    EXPECT_THAT(command->err_text(), AllOf(HasSubstr(absl::StrCat("rank 2 (pid ", wrong, " on ")),
                                           HasSubstr("exited with code 2")));
    EXPECT_THAT(command->out(), Not(Contains(ContainsRegex("start 1"))));
  }
  EXPECT_THAT(first->err_text(), HasSubstr("a restart does not help after a user error"));
}

// A machine that has counted other ends adopts the counts of the others.
TEST_F(NodesTest, MachineThatComesAgain_CountsAsTheOthers) {
  const std::string script =
      "echo pid $$ start $TORCHELASTIC_RESTART_COUNT; trap 'exit 0' TERM; while :; do sleep 1000 & "
      "wait; done";
  const std::vector<std::string> policy = {"--failure_policy", "max_restarts=5,failed=2", "--lease",
                                           "4s"};
  auto first = Machine(0, script, policy);
  auto second = Machine(1, script, policy);
  const int victim = Numbers(first->WaitForLine("[0]: pid")).at(0);
  second->WaitForLine("[2]: pid");
  kill(victim, SIGKILL);
  EXPECT_THAT(second->WaitForLine("[2]: pid", 2), HasSubstr("start 1"));
  const int other = Numbers(first->WaitForLine("[0]: pid", 2)).at(0);
  // Its counts are lost with it.
  second->Signal(SIGKILL);
  EXPECT_EQ(second->Wait(), -SIGKILL);
  auto third = Machine(1, script, policy);
  EXPECT_THAT(third->WaitForLine("[2]: pid"), HasSubstr("start 2"));
  const int last = Numbers(first->WaitForLine("[0]: pid", 3)).at(0);
  EXPECT_NE(last, other);
  kill(last, SIGKILL);
  EXPECT_EQ(first->Wait(), 1) << first->err_text();
  EXPECT_EQ(third->Wait(), 1) << third->err_text();
  // A machine on its own would have started once more.
  EXPECT_THAT(third->err_text(), HasSubstr(absl::StrCat("rank 0 (pid ", last)));
}

TEST_F(NodesTest, StoppedOnOneMachine_TheOtherEndsToo) {
  auto first = Machine(0, kWorkUntilTold);
  auto second = Machine(1, kWorkUntilTold);
  first->WaitForLine("[0]: pid");
  first->WaitForLine("[1]: pid");
  second->WaitForLine("[2]: pid");
  second->WaitForLine("[3]: pid");
  second->Signal(SIGINT);
  EXPECT_EQ(second->Wait(), 130);
  EXPECT_EQ(first->Wait(), 1);
  EXPECT_THAT(first->err_text(), HasSubstr("the job was stopped on "));
}

TEST_F(NodesTest, OtherSettings_AreRefusedByName) {
  auto first = Machine(0, "exit 0");
  auto second = Machine(1, "exit 0", {"--mixed_precision", "bf16"});
  EXPECT_EQ(second->Wait(), 2);
  EXPECT_THAT(second->err_text(),
              AllOf(HasSubstr("machine 1 was launched with"), HasSubstr("mixed_precision bf16"),
                    HasSubstr("but machine 0 with"), HasSubstr("mixed_precision no")));
  EXPECT_EQ(first->Wait(), 1);
  EXPECT_THAT(first->err_text(), HasSubstr("machine 1 gave up"));
}

// Its processes would compare each collective with the others, which do not compare.
TEST_F(NodesTest, DebugOnOneMachineOnly_IsRefusedByName) {
  auto first = Machine(0, "exit 0");
  auto second = Machine(1, "exit 0", {"--debug"});
  EXPECT_EQ(second->Wait(), 2);
  EXPECT_THAT(second->err_text(), AllOf(HasSubstr("debug true"), HasSubstr("but machine 0 with"),
                                        HasSubstr("debug false")));
  EXPECT_EQ(first->Wait(), 1);
}

TEST_F(NodesTest, OtherMachineDoesNotCome_EndsAtTheTimeoutAndSaysWho) {
  auto first = Machine(0, "exit 0", {"--join_timeout", "300ms"});
  EXPECT_EQ(first->Wait(), 5);
  EXPECT_THAT(first->err_text(), HasSubstr("not all 2 machines arrived within 300ms"));
}

TEST_F(NodesTest, NoCoordinator_EndsAtTheTimeoutAndSaysWhere) {
  auto second = Machine(1, "exit 0", {"--join_timeout", "300ms"});
  EXPECT_EQ(second->Wait(), 7);
  EXPECT_THAT(second->err_text(),
              AllOf(HasSubstr(absl::StrCat("no coordinator answers at ", address_)),
                    HasSubstr("Connection refused")));
}

// The others need not learn it from an outage of 90 s.
TEST_F(NodesTest, MachineZeroStoppedBeforeAllCame_TheOthersLearnItAtOnce) {
  const auto machine_of_three = [&](const std::string& rank) {
    return Launch({"--num_machines", "3", "--num_processes", "3", "--cpu", "--coordinator",
                   address_, "--token_file", TokenFile(), "--machine_rank", rank},
                  "exit 0");
  };
  auto first = machine_of_three("0");
  auto second = machine_of_three("1");
  // Waits until the second one is there and waits for the third.
  for (bool there = false; !there;) {
    auto status =
        Muster({"status", "--coordinator", address_, "--token_file", TokenFile(), "--json"});
    status->Wait();
    there = absl::StrContains(absl::StrReplaceAll(status->out_text(), {{" ", ""}}), "\"agents\":2");
    ASSERT_FALSE(second->EndsWithin(absl::ZeroDuration())) << second->err_text();
  }
  first->Signal(SIGINT);
  EXPECT_EQ(first->Wait(), 130);
  EXPECT_EQ(second->Wait(), 7);
  EXPECT_THAT(second->err_text(),
              HasSubstr(absl::StrCat("the launch that held the coordinator at ", address_,
                                     " has ended: it was stopped by SIGINT")));
}

TEST_F(NodesTest, Agent_JoinsALaunchAsAnotherMachine) {
  auto first = Machine(0, "echo $RANK");
  auto second = AgentProgram({"--coordinator", address_, "--num-machines", "2", "--num_processes=4",
                              "--cpu", "--job_name", "launch", "--token_file", TokenFile()},
                             "echo $RANK of $WORLD_SIZE");
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  EXPECT_THAT(second->out(), UnorderedElementsAre("[2]: 2 of 4", "[3]: 3 of 4"));
}

using RacksTest = ClusterFixture;

TEST_F(RacksTest, AgentsWithoutARank_NeighboursGetNeighbouringRanks) {
  const auto coordinator = StartCoordinator();
  std::vector<std::unique_ptr<Command>> agents;
  // Alternating racks; one is set by a variable.
  for (const char* place : {"r10/a", "r9/b", "r10/b", "r9/a"}) {
    const std::vector<std::string> parts = absl::StrSplit(place, '/');
    std::vector<std::string> more = {"--nvlink_domain", parts[1]};
    if (agents.empty()) {
      env_["MUSTER_RACK"] = parts[0];
    } else {
      env_.erase("MUSTER_RACK");
      more.insert(more.end(), {"--rack", parts[0]});
    }
    agents.push_back(Agent("racks", 4, 4,
                           {"/bin/sh", "-c", "echo in $MUSTER_RACK/$MUSTER_NVLINK_DOMAIN"}, more));
  }
  for (const auto& agent : agents) EXPECT_EQ(agent->Wait(), 0) << agent->err_text();
  EXPECT_THAT(agents[3]->out(), UnorderedElementsAre("[0]: in r9/a"));
  EXPECT_THAT(agents[1]->out(), UnorderedElementsAre("[1]: in r9/b"));
  EXPECT_THAT(agents[0]->out(), UnorderedElementsAre("[2]: in r10/a"));
  EXPECT_THAT(agents[2]->out(), UnorderedElementsAre("[3]: in r10/b"));
}

// `--nnodes MIN:MAX`, as with torchrun: no machine has a number.
class ElasticNodesTest : public NodesTest {
 protected:
  std::unique_ptr<Command> Machine(const std::string& machines, const std::string& script,
                                   std::vector<std::string> more = {}) {
    std::vector<std::string> args = {"--nnodes",
                                     machines,
                                     "--nproc_per_node",
                                     "1",
                                     "--rdzv_backend",
                                     "c10d",
                                     "--rdzv_endpoint",
                                     address_,
                                     "--token_file",
                                     TokenFile(),
                                     "--cpu",
                                     "--rdzv_conf",
                                     "last_call_timeout=1"};
    args.insert(args.end(), more.begin(), more.end());
    return Launch(std::move(args), script);
  }
};

constexpr char kSayPlaceUntilTold[] =
    "trap 'exit 0' TERM; echo place $RANK of $WORLD_SIZE at $TORCHELASTIC_RESTART_COUNT pid $$; "
    "while [ ! -e $DONE ]; do sleep 0.05; done";

TEST_F(ElasticNodesTest, MachinesGoAndCome_TheJobShrinksAndGrows) {
  env_["DONE"] = Temp("done");
  auto first = Machine("1:3", kSayPlaceUntilTold);
  first->WaitForLine("[0]: place 0 of 1");
  auto second = Machine("1:3", kSayPlaceUntilTold);
  second->WaitForLine("[1]: place 1 of 2");
  first->WaitForLine("[0]: place 0 of 2");
  auto third = Machine("1:3", kSayPlaceUntilTold);
  third->WaitForLine("[2]: place 2 of 3");

  // The machine is lost with all that it has.
  kill(second->pid(), SIGKILL);
  first->WaitForLine("[0]: place 0 of 2", 2);
  third->WaitForLine("[1]: place 1 of 2");
  EXPECT_THAT(first->err_text(), HasSubstr("(not counted as a restart)"));
  auto back = Machine("1:3", kSayPlaceUntilTold);
  back->WaitForLine("[2]: place 2 of 3");
  third->WaitForLine("[1]: place 1 of 3");

  // The machine leaves on its own.
  back->Signal(SIGTERM);
  EXPECT_EQ(back->Wait(), 143);
  first->WaitForLine("[0]: place 0 of 2", 3);
  EXPECT_THAT(first->err_text(), HasSubstr("the launch was stopped on "));

  std::ofstream(env_["DONE"]) << "\n";
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(third->Wait(), 0) << third->err_text();
}

TEST_F(ElasticNodesTest, ProgramFails_IsCountedAndEndsAllMachines) {
  env_["DONE"] = Temp("done");
  const std::string script =
      absl::StrCat("[ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ] && exit 5; ",
                   "[ $RANK$TORCHELASTIC_RESTART_COUNT = 11 ] && exit 6; ", kSayPlaceUntilTold);
  auto first = Machine("2:3", script, {"--max_restarts", "1"});
  auto second = Machine("2:3", script, {"--max_restarts", "1"});
  EXPECT_EQ(first->Wait(), 1) << first->err_text();
  EXPECT_EQ(second->Wait(), 1) << second->err_text();
  const std::string err = first->err_text() + second->err_text();
  EXPECT_THAT(err, ContainsRegex("exited with code 5; starting all workers again \\(restart 1 of "
                                 "1\\)"));
  EXPECT_THAT(err, ContainsRegex("exited with code 6; the job has failed after 1 restart"));
}

// A machine that waits does not take the place of one that is slow to stop its process.
TEST_F(ElasticNodesTest, MoreMachinesThanPlaces_ThoseThatHadOneKeepIt) {
  env_["DONE"] = Temp("done");
  env_["FAIL"] = Temp("fail");
  const std::string script =
      "trap '[ $RANK = 0 ] && sleep 3; exit 0' TERM; "
      "echo place $RANK of $WORLD_SIZE at $TORCHELASTIC_RESTART_COUNT; "
      "while [ ! -e $DONE ]; do [ $RANK = 1 ] && rm $FAIL 2>/dev/null && exit 5; sleep 0.05; done";
  auto first = Machine("1:2", script, {"--max_restarts", "1"});
  first->WaitForLine("[0]: place 0 of 1 at ");
  auto second = Machine("1:2", script, {"--max_restarts", "1"});
  second->WaitForLine("[1]: place 1 of 2 at ");
  auto third = Machine("1:2", script, {"--max_restarts", "1"});
  EXPECT_FALSE(third->EndsWithin(absl::Seconds(2))) << third->err_text();
  std::ofstream(env_["FAIL"]) << "\n";
  first->WaitForLine("[0]: place 0 of 2 at ", 2);
  second->WaitForLine("[1]: place 1 of 2 at ", 2);
  third->Signal(SIGTERM);
  EXPECT_EQ(third->Wait(), 143) << third->err_text();
  EXPECT_EQ(third->out_text(), "");
  std::ofstream(env_["DONE"]) << "\n";
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
}

TEST_F(ElasticNodesTest, MachineThatCannotTakePartComes_TheOthersGoOn) {
  env_["DONE"] = Temp("done");
  auto first = Machine("1:3", kSayPlaceUntilTold);
  first->WaitForLine("[0]: place 0 of 1");
  // No machine starts again for it.
  auto other = Machine("1:3", kSayPlaceUntilTold, {"--mixed_precision", "bf16"});
  EXPECT_EQ(other->Wait(), 2);
  EXPECT_THAT(other->err_text(), AllOf(HasSubstr("this machine was launched with"),
                                       HasSubstr("mixed_precision bf16")));
  EXPECT_THAT(first->out(), SizeIs(1));
  auto broken = Machine("1:3", kSayPlaceUntilTold, {"--log_dir", "/dev/null/logs"});
  EXPECT_EQ(broken->Wait(), 2) << broken->err_text();
  first->WaitForLine("[0]: place 0 of 1", 2);
  std::ofstream(env_["DONE"]) << "\n";
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_THAT(first->err_text(), HasSubstr("(not counted as a restart)"));
}

// The group of the workers changes its size with the machines, and takes its checkpoints along.
TEST_F(ElasticNodesTest, TrainingLosesAMachineAndGetsOneBack_TrainsEverySampleOnce) {
  const std::string folder = Temp("elastic");
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  env_["MUSTER_PROJECT_DIR"] = Temp("project");
  const auto machine = [&] {
    return Muster({"launch", "--num_machines", "1:2", "--num_processes", "4", "--coordinator",
                   address_, "--token_file", TokenFile(), "--cpu", "--last_call", "1s",
                   Runfile("tests/e2e/elastic_worker"), folder});
  };
  const auto wait_for_sizes = [&](const std::string& end) {
    WaitUntil([&] { return absl::EndsWith(ReadFile(folder + "/sizes").value_or(""), end); });
  };
  auto first = machine();
  wait_for_sizes("2\n");
  auto second = machine();
  wait_for_sizes("4\n");
  kill(second->pid(), SIGKILL);
  wait_for_sizes("4\n2\n");
  ASSERT_TRUE(WriteFileAtomically(folder + "/grown", "").ok());
  auto third = machine();
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(third->Wait(), 0) << third->err_text();
  EXPECT_THAT(first->out_text(), HasSubstr("began after some samples; 0 inexact epochs of "));
}

// The number is fixed, but as with torchrun no machine has to know its own.
TEST_F(ElasticNodesTest, FixedNumber_MachinesAreNumberedAsTheyCome) {
  auto first = Machine("2", "echo $RANK of $WORLD_SIZE");
  auto second = Machine("2", "echo $RANK of $WORLD_SIZE");
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  EXPECT_THAT((std::vector<std::string>{first->out_text(), second->out_text()}),
              UnorderedElementsAre("[0]: 0 of 2", "[1]: 1 of 2"));
}

TEST_F(ElasticNodesTest, TooFewMachines_EndsAtTheTimeout) {
  auto first = Machine("2:3", "exit 0", {"--join_timeout", "300ms"});
  EXPECT_EQ(first->Wait(), 5);
  EXPECT_THAT(first->err_text(),
              HasSubstr("no place among the machines of job launch within 300ms, which needs 2 to "
                        "3"));
}

TEST_F(NodesTest, AgentMistakes_AreOneLineEach) {
  const struct {
    std::vector<std::string> args;
    int code;
    std::string text;
  } kCases[] = {
      {{}, 2, "--coordinator"},
      {{"--coordinator", "here"}, 2, "here"},
      {{"--coordinator", address_, "--wrong"}, 2, "--wrong"},
      {{"--coordinator", address_, "--num_machines", "2", "--num_processes", "3"}, 2, "evenly"},
      {{"--coordinator", address_, "--num_machines", "2"}, 2, "--job_name"},
      {{"--coordinator", address_, "--job_name", "caf\xe9"}, 2, "--job_name caf\\xe9 is not UTF-8"},
      {{"--coordinator", "10.0.0.5:29400"}, 2, "without TLS"},
      {{"--coordinator", address_, "--stop_grace", "-5s"}, 2, "--stop_grace"},
      {{"--coordinator", address_, "--num_machines", "2", "--job_name", "j", "--join_timeout",
        "100ms"},
       7,
       address_},
  };
  for (const auto& c : kCases) {
    auto agent = AgentProgram(c.args, "exit 0");
    EXPECT_EQ(agent->Wait(), c.code) << agent->err_text();
    EXPECT_THAT(agent->err(), SizeIs(1)) << agent->err_text();
    EXPECT_THAT(agent->err_text(), HasSubstr(c.text));
  }
}

}  // namespace
}  // namespace muster
