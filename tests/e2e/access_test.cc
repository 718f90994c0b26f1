// Access control with the real programs: only its user can list, join and stop a launch, and a
// coordinator admits only authenticated callers.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "agent/job_coordination.h"
#include "base/file.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "tests/e2e/launch_fixture.h"
#include "tests/support/command.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr char kWorkUntilTold[] =
    "trap 'exit 0' TERM; echo pid $$; while :; do sleep 1000 & wait; done";

class AccessTest : public ClusterFixture {
 protected:
  void SetUp() override {
    ClusterFixture::SetUp();
    env_.erase("MUSTER_PREFIX");
  }
  void TearDown() override {
    EXPECT_TRUE(open_.empty() || RemoveTree(open_).ok());
    ClusterFixture::TearDown();
  }
  // Starts a job that runs until it is stopped.
  std::unique_ptr<Command> Job(const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--job_name", name, "--cpu"});
    auto launch = Launch(std::move(more), kWorkUntilTold);
    launch->WaitForLine("pid ");
    return launch;
  }
  void Stop(Command& launch) {
    launch.Signal(SIGTERM);
    EXPECT_EQ(launch.Wait(), 143) << launch.err_text();
  }
  // Returns the address of a launch that `muster status` lists, by job.
  std::string AddressOf(const std::string& job) {
    const auto status = Muster({"status"});
    EXPECT_EQ(status->Wait(), 2);
    const std::string begin = absl::StrCat("  job ", job, ", pid "), before = ", --coordinator ";
    for (const std::string& line : status->err()) {
      const size_t at = line.find(before);
      if (absl::StartsWith(line, begin) && at != std::string::npos) {
        return line.substr(at + before.size());
      }
    }
    ADD_FAILURE() << "no job " << job << " in\n" << status->err_text();
    return "";
  }
  std::unique_ptr<Command> Run(std::vector<std::string> argv) {
    return std::make_unique<Command>(*host_, std::move(argv), env_);
  }
  // Starts a program (the last part of its path) that knows no launch; as another user if the test
  // runs as root.
  std::unique_ptr<Command> AsAnother(std::vector<std::string> argv) {
    if (open_.empty()) {
      // A place where every user can reach the programs.
      open_ = absl::StrCat(runtime_, "-open");
      EXPECT_TRUE(MakeDirectories(open_).ok());
      EXPECT_EQ(chmod(open_.c_str(), 0755), 0);
      for (const char* path : {"client/cli/muster", "agent/cmd/muster-agent"}) {
        std::filesystem::copy_file(std::filesystem::canonical(Runfile(path)),
                                   absl::StrCat(open_, "/", BaseName(path)));
      }
    }
    argv[0] = absl::StrCat(open_, "/", argv[0]);
    if (geteuid() == 0) {
      argv.insert(argv.begin(), {"/usr/bin/setpriv", "--reuid=65534", "--regid=65534",
                                 "--clear-groups", "--inh-caps=-all"});
    }
    return std::make_unique<Command>(
        *host_, std::move(argv),
        std::map<std::string, std::string>{{"PATH", "/usr/bin:/bin"},
                                           {"HOME", "/"},
                                           {"CUDA_VISIBLE_DEVICES", ""},
                                           {"MUSTER_RUNTIME_DIR", absl::StrCat(open_, "/none")}});
  }
  std::unique_ptr<Command> Coordinator(std::vector<std::string> args) {
    args.insert(args.begin(), Runfile("coordinator/cmd/muster-coordinator"));
    return Run(std::move(args));
  }
  // Makes a certificate for the test: nothing that expires is kept in the tree.
  void MakeCertificate() {
    const auto made = testing_support::RunCommand(absl::StrCat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "
        "/CN=muster.test -addext subjectAltName=IP:127.0.0.1 -keyout ",
        Temp("key.pem"), " -out ", Temp("cert.pem"), " 2>&1"));
    ASSERT_EQ(made.exit_code, 0) << made.output;
  }
  std::vector<std::string> Certificate(bool with_ca) {
    std::vector<std::string> flags = {"--tls_cert", Temp("cert.pem"), "--tls_key", Temp("key.pem")};
    if (with_ca) flags.insert(flags.end(), {"--tls_ca", Temp("cert.pem")});
    return flags;
  }
  static std::vector<std::string> Plus(std::vector<std::string> a,
                                       const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  std::string open_;
};

TEST_F(AccessTest, OneLaunch_IsFoundWithoutAnAddress) {
  const auto job = Job("digits");
  const auto status = Muster({"status", "--json"});
  EXPECT_EQ(status->Wait(), 0) << status->err_text();
  EXPECT_THAT(status->out_text(), HasSubstr(absl::StrCat("unix:", runtime_, "/")));
  // All of these commands find it: they reach its coordinator, which knows the job by its workers
  // only.
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"trigger", "digits", "stop"},
        {"barrier", "digits"},
        {"quarantine", "digits", "host"}}) {
    const auto command = Muster(args);
    EXPECT_THAT(command->Wait(), testing::AnyOf(0, 3)) << command->err_text();
  }
  Stop(*job);
  EXPECT_THAT(*ListDirectory(runtime_), IsEmpty()) << "a launch leaves nothing behind";
  const auto nobody = Muster({"status"});
  EXPECT_EQ(nobody->Wait(), 7);
  EXPECT_THAT(nobody->err(), ElementsAre(AllOf(StartsWith("muster status: no launch of yours"),
                                               HasSubstr(runtime_), HasSubstr("--coordinator"))));
}

TEST_F(AccessTest, TwoLaunches_AreListedAndOneIsChosenByItsJobOrItsAddress) {
  const auto first = Job("first");
  const auto second = Job("second", {"--coordinator", "127.0.0.1:0"});
  const auto list = Muster({"status"});
  EXPECT_EQ(list->Wait(), 2);
  EXPECT_THAT(
      list->err(),
      ElementsAre(AllOf(HasSubstr("2 launches of yours"), HasSubstr("--coordinator")),
                  AllOf(HasSubstr(absl::StrCat("job first, pid ", first->pid(), ", started 2")),
                        HasSubstr(absl::StrCat("--coordinator unix:", runtime_, "/"))),
                  AllOf(HasSubstr(absl::StrCat("job second, pid ", second->pid(), ", started 2")),
                        HasSubstr("--coordinator 127.0.0.1:"))));
  EXPECT_THAT(list->out(), IsEmpty());
  for (const char* job : {"first", "second"}) {
    const std::string address = AddressOf(job);
    // Only its own coordinator can say that no worker of it has come.
    const auto by_job = Muster({"status", job});
    EXPECT_EQ(by_job->Wait(), 3);
    EXPECT_THAT(by_job->err_text(), HasSubstr(absl::StrCat("the coordinator at ", address)));
    // The address finds the launch with a token too: its file lies where the same user finds it.
    const auto by_address = Muster({"status", "--coordinator", address});
    EXPECT_EQ(by_address->Wait(), 0) << by_address->err_text();
  }
  Stop(*first);
  Stop(*second);
}

TEST_F(AccessTest, StoppedLaunch_CommandsSayWhoseCoordinatorDoesNotAnswer) {
  const auto stopped = Job("stopped");
  stopped->Signal(SIGSTOP);
  const std::string stat = absl::StrCat("/proc/", stopped->pid(), "/stat");
  WaitUntil([&] { return absl::StrContains(ReadFile(stat, 4096).value_or(""), ") T "); });
  const auto status = Muster({"status", "--timeout", "300ms"});
  EXPECT_EQ(status->Wait(), 7);
  EXPECT_THAT(status->err(),
              ElementsAre(AllOf(HasSubstr("(1 try in 300ms, no reply): is it running? It is that "
                                          "of your launch stopped (pid "),
                                HasSubstr("which may be stopped or about to end"))));
  stopped->Signal(SIGCONT);
  Stop(*stopped);
}

TEST_F(AccessTest, KilledLaunch_IsNotListedAndItsFilesGoWithTheNextOne) {
  const auto killed = Job("killed");
  killed->Signal(SIGKILL);
  EXPECT_EQ(killed->Wait(), -SIGKILL);
  EXPECT_THAT(*ListDirectory(runtime_), SizeIs(2));  // the socket and the note
  const auto next = Job("next");
  EXPECT_THAT(*ListDirectory(runtime_), SizeIs(2));
  const auto status = Muster({"status"});
  EXPECT_EQ(status->Wait(), 0) << status->err_text();
  Stop(*next);
}

// The caller is on the same machine, but is neither this user nor in possession of a token.
TEST_F(AccessTest, AnotherUser_CanNeitherListNorJoinNorStopALaunch) {
  const auto quiet = Job("quiet");
  const auto tcp = Job("tcp", {"--coordinator", "127.0.0.1:0"});
  const std::string socket = AddressOf("quiet"), port = AddressOf("tcp");
  // Without a token, callers on the port are refused by name, also as the same user.
  const struct {
    std::vector<std::string> args;
  } kRefused[] = {
      {{"muster", "status", "--coordinator", port}},
      {{"muster", "trigger", "tcp", "stop", "--coordinator", port}},
      {{"muster", "barrier", "tcp", "--coordinator", port}},
      {{"muster", "quarantine", "tcp", "host", "--coordinator", port}},
      {{"muster-agent", "--coordinator", port, "--job_name", "tcp", "--cpu", "--", "/bin/true"}},
  };
  for (const auto& c : kRefused) {
    const auto command = AsAnother(c.args);
    EXPECT_EQ(command->Wait(), 8) << absl::StrJoin(c.args, " ") << ": " << command->err_text();
    EXPECT_THAT(command->err(), ElementsAre(HasSubstr("--token_file")));
  }
  // Another user cannot even reach the socket, nor read the token.
  if (geteuid() == 0) {
    const std::pair<std::vector<std::string>, int> kUnreachable[] = {
        {{"muster", "status"}, 7},
        {{"muster", "status", "--coordinator", socket}, 8},
        {{"muster", "trigger", "quiet", "stop", "--coordinator", socket}, 8},
        {{"muster-agent", "--coordinator", socket, "--job_name", "quiet", "--cpu", "--join_timeout",
          "300ms", "--", "/bin/true"},
         7},
    };
    for (const auto& [args, code] : kUnreachable) {
      const auto command = AsAnother(args);
      EXPECT_EQ(command->Wait(), code) << absl::StrJoin(args, " ") << ": " << command->err_text();
    }
    std::string token;
    const std::vector<std::string> names = *ListDirectory(runtime_);
    for (const std::string& name : names) {
      if (absl::EndsWith(name, ".token")) token = absl::StrCat(runtime_, "/", name);
    }
    const auto thief =
        AsAnother({"muster", "status", "--coordinator", port, "--token_file", token});
    EXPECT_EQ(thief->Wait(), 8) << thief->err_text();
    EXPECT_THAT(thief->err_text(), HasSubstr("cannot open"));
  }
  // Both run as if nothing had happened.
  Stop(*quiet);
  Stop(*tcp);
}

// The system removes the folder at logout.
TEST_F(AccessTest, RuntimeFolderRemoved_JobGoesOnToItsEnd) {
  const auto launch =
      Launch({"--cpu"}, absl::StrCat("echo up; while test -e ", runtime_, "; do :; done; exit 0"));
  launch->WaitForLine("up");
  ASSERT_TRUE(RemoveTree(runtime_).ok());
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_THAT(launch->err(), IsEmpty());
}

TEST_F(AccessTest, RuntimeFolderOfAnotherUser_IsRefusedInOneLine) {
  ASSERT_EQ(chmod(runtime_.c_str(), 0755), 0);
  const auto launch = Launch({}, "exit 0");
  EXPECT_EQ(launch->Wait(), 8);
  EXPECT_THAT(launch->err(), ElementsAre(AllOf(StartsWith("muster launch: "), HasSubstr(runtime_),
                                               HasSubstr("MUSTER_RUNTIME_DIR"))));
}

TEST_F(AccessTest, LaunchesToken_IsNoArgumentAndNoVariableOfItOrItsWorkers) {
  const auto launch =
      Launch({"--coordinator", "127.0.0.1:0"},
             "cat /proc/$PPID/environ /proc/$PPID/cmdline /proc/$$/cmdline | tr '\\0' '\\n'; env");
  EXPECT_EQ(launch->Wait(), 0) << launch->err_text();
  EXPECT_THAT(launch->out(), Contains(StartsWith("MUSTER_COORDINATOR=unix:")));
  EXPECT_THAT(launch->out(), Contains("launch"));
  EXPECT_THAT(launch->out_text(), AllOf(Not(HasSubstr("MUSTER_TOKEN")), Not(HasSubstr(".token"))));
}

TEST_F(AccessTest, SeveralMachines_WithoutCertificatesOrATokenAreRefusedWithBothWays) {
  const auto refused = [&](std::vector<std::string> args) {
    const auto launch = Launch(Plus({"--num_machines", "2", "--cpu"}, args), "exit 0");
    EXPECT_EQ(launch->Wait(), 2);
    EXPECT_THAT(launch->err(), ElementsAre(AllOf(HasSubstr("--token_file"), HasSubstr("--tls_ca"),
                                                 HasSubstr("--tls_cert"))));
    return launch->err_text();
  };
  EXPECT_THAT(refused({"--coordinator", "10.0.0.5:29400"}), HasSubstr("authenticates its callers"));
  EXPECT_THAT(refused({"--coordinator", "10.0.0.5:29400", "--token_file", TokenFile()}),
              HasSubstr("travel in clear"));
  EXPECT_THAT(refused({"--coordinator", "127.0.0.1:29400"}),
              HasSubstr("authenticates its callers"));
}

TEST_F(AccessTest, TwoMachinesWithATokenOverTls_OneCertificateIsEnough) {
  MakeCertificate();
  const auto token = std::vector<std::string>{"--token_file", TokenFile()};
  const std::vector<std::string> common = Plus({"--num_machines", "2", "--cpu", "--coordinator",
                                                absl::StrCat("127.0.0.1:", *agent::FindFreePort())},
                                               token);
  const auto first =
      Launch(Plus(Plus(common, {"--machine_rank", "0"}), Certificate(true)), "echo rank $RANK");
  const auto second = Launch(Plus(common, {"--machine_rank", "1", "--tls_ca", Temp("cert.pem")}),
                             "echo rank $RANK");
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  EXPECT_THAT(second->out(), ElementsAre("rank 1"));
}

TEST_F(AccessTest, CoordinatorThatWouldLetAnybodyIn_IsRefusedWithTheWays) {
  MakeCertificate();
  for (const std::vector<std::string>& args : {std::vector<std::string>{},
                                               {"--listen", "127.0.0.1:0"},
                                               {"--listen", "[::1]:0"},
                                               Certificate(false)}) {
    const auto coordinator = Coordinator(args);
    EXPECT_EQ(coordinator->Wait(), 2);
    EXPECT_THAT(coordinator->err(),
                ElementsAre(AllOf(HasSubstr("--token_file"), HasSubstr("--tls_ca"),
                                  HasSubstr("unix:PATH"), HasSubstr("--insecure"))));
  }
  for (const std::vector<std::string>& args :
       {Plus({"--insecure"}, Certificate(true)), {"--insecure", "--token_file", TokenFile()}}) {
    const auto coordinator = Coordinator(args);
    EXPECT_EQ(coordinator->Wait(), 2);
    EXPECT_THAT(coordinator->err(), ElementsAre(HasSubstr("exclude each other")));
  }
}

TEST_F(AccessTest, CoordinatorOnASocket_NeedsNothingElse) {
  const std::string address = absl::StrCat("unix:", runtime_, "/own");
  const auto coordinator = Coordinator({"--listen", address});
  coordinator->WaitForLine("unix:");
  const auto status = Muster({"status", "--coordinator", address});
  EXPECT_EQ(status->Wait(), 0) << status->err_text();
  address_ = address;
  const auto agent = Agent("j", 1, 2, {"/bin/sh", "-c", "echo $MASTER_ADDR"});
  EXPECT_EQ(agent->Wait(), 0) << agent->err_text();
  EXPECT_THAT(agent->out(), ElementsAre("[0]: 127.0.0.1", "[1]: 127.0.0.1"));
  // No other user reaches the folder.
  const std::vector<std::string> as_other = {"muster", "list", "--coordinator", address};
  const auto outsider = AsAnother(as_other);
  if (geteuid() == 0) {
    EXPECT_EQ(outsider->Wait(), 8) << outsider->err_text();
    EXPECT_THAT(
        outsider->err(),
        ElementsAre(AllOf(HasSubstr("user 65534 may not connect to the coordinator's socket"),
                          HasSubstr(runtime_), HasSubstr("run this as the user"))));
  } else {
    EXPECT_EQ(outsider->Wait(), 0) << outsider->err_text();
  }
  // Even if other users can open it, it asks the kernel for their identity.
  ASSERT_EQ(chmod(runtime_.c_str(), 0755), 0);
  ASSERT_EQ(chmod((runtime_ + "/own").c_str(), 0777), 0);
  const auto other =
      AsAnother({"muster", "status", "--coordinator", address, "--timeout", "300ms"});
  EXPECT_EQ(other->Wait(), geteuid() == 0 ? 8 : 0) << other->err_text();
  coordinator->Signal(SIGTERM);
  EXPECT_EQ(coordinator->Wait(), 0);
}

TEST_F(AccessTest, CoordinatorOnASocketWithAToken_LetsInOthersWhoBringIt) {
  const std::string address = absl::StrCat("unix:", runtime_, "/shared");
  const auto coordinator = Coordinator({"--listen", address, "--token_file", TokenFile()});
  coordinator->WaitForLine("unix:");
  ASSERT_EQ(chmod(runtime_.c_str(), 0755), 0);
  ASSERT_EQ(chmod((runtime_ + "/shared").c_str(), 0777), 0);
  const std::vector<std::string> status = {"muster", "status", "--coordinator", address};
  const auto stranger = AsAnother(status);
  EXPECT_EQ(stranger->Wait(), 8);
  EXPECT_THAT(stranger->err(), ElementsAre(HasSubstr("--token_file")));
  // A copy of their own.
  const std::string copy = absl::StrCat(open_, "/token");
  std::filesystem::copy_file(Temp("token"), copy);
  ASSERT_TRUE(geteuid() != 0 || chown(copy.c_str(), 65534, 65534) == 0);
  const auto friendly = AsAnother(Plus(status, {"--token_file", copy}));
  EXPECT_EQ(friendly->Wait(), 0) << friendly->err_text();
}

TEST_F(AccessTest, CoordinatorsToken_LetsInWhoBringsItAndNobodyElse) {
  const std::string token = TokenFile();
  const auto coordinator = StartCoordinator({"--log_level", "error"}, {"--token_file", token});
  const auto refused = Muster({"status", "--coordinator", address_});
  EXPECT_EQ(refused->Wait(), 8);
  EXPECT_THAT(refused->err(), ElementsAre(HasSubstr("--token_file")));
  const auto stranger = Agent("j", 1, 1, {"/bin/true"});
  EXPECT_EQ(stranger->Wait(), 8);
  EXPECT_THAT(stranger->err(), ElementsAre(HasSubstr("--token_file")));
  for (const bool by_variable : {false, true}) {
    std::vector<std::string> flags;
    if (by_variable) {
      env_["MUSTER_TOKEN_FILE"] = token;
    } else {
      flags = {"--token_file", token};
    }
    const auto status = Muster(Plus({"status", "--coordinator", address_}, flags));
    EXPECT_EQ(status->Wait(), 0) << status->err_text();
    const auto agent = Agent("j", 1, 1, {"/bin/sh", "-c", "echo ${MUSTER_TOKEN_FILE-none}"}, flags);
    EXPECT_EQ(agent->Wait(), 0) << agent->err_text();
    EXPECT_THAT(agent->out(), ElementsAre("none")) << "workers go through the agent";
  }
  ASSERT_EQ(chmod(token.c_str(), 0644), 0);
  const auto open = Muster({"status", "--coordinator", address_});
  EXPECT_EQ(open->Wait(), 8);
  EXPECT_THAT(open->err(), ElementsAre(AllOf(HasSubstr(token), HasSubstr("chmod 600"))));
}

TEST_F(AccessTest, MissingFiles_AreWrongOptionsAndNoMissingProgram) {
  const std::string agent = Runfile("agent/cmd/muster-agent");
  const std::string muster = Runfile("client/cli/muster");
  for (const char* flag : {"--token_file", "--tls_ca"}) {
    for (const std::vector<std::string>& argv :
         {std::vector<std::string>{agent, "--coordinator", "127.0.0.1:1", flag, "/nowhere", "--"},
          {muster, "launch", "--coordinator", "127.0.0.1:0", "--tls_cert", "/no", "--tls_key",
           "/no", flag, "/nowhere"},
          {muster, "status", "--coordinator", "127.0.0.1:1", flag, "/nowhere"}}) {
      const bool status = argv[1] == "status";
      const auto command = Run(status ? argv : Plus(argv, {"/bin/true"}));
      EXPECT_EQ(command->Wait(), 2) << absl::StrJoin(argv, " ");
      EXPECT_THAT(command->err(), ElementsAre(HasSubstr("/no")));
    }
  }
}

TEST_F(AccessTest, CoordinatorWithClientCertificates_LetsInWhoShowsOne) {
  MakeCertificate();
  const auto coordinator = StartCoordinator({"--log_level", "error"}, Certificate(true));
  const auto known = Muster(Plus({"status", "--coordinator", address_}, Certificate(true)));
  EXPECT_EQ(known->Wait(), 0) << known->err_text();
  const auto stranger = Muster(
      {"status", "--coordinator", address_, "--tls_ca", Temp("cert.pem"), "--timeout", "300ms"});
  EXPECT_EQ(stranger->Wait(), 7) << stranger->out_text();
  env_["MUSTER_COORDINATOR"] = address_;
  env_["MUSTER_TLS_CA"] = env_["MUSTER_TLS_CERT"] = Temp("cert.pem");
  env_["MUSTER_TLS_KEY"] = Temp("key.pem");
  const auto by_variables = Muster({"status"});
  EXPECT_EQ(by_variables->Wait(), 0) << by_variables->err_text();
}

TEST_F(AccessTest, AgentsWithoutAJobName_AreJobsOfTheirOwn) {
  const auto coordinator = StartCoordinator();
  const auto bare = [&](const std::string& script) {
    return Run({Runfile("agent/cmd/muster-agent"), "--coordinator", address_, "--cpu", "--",
                "/bin/sh", "-c", script});
  };
  const auto first = bare(absl::StrCat("echo job $MUSTER_JOB; ", kWorkUntilTold));
  const std::string job = first->WaitForLine("job ");
  first->WaitForLine("pid ");
  const auto second = bare("echo job $MUSTER_JOB");
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  EXPECT_NE(second->WaitForLine("job "), job);
  // The first launch has not noticed.
  Stop(*first);
  const auto two = Run({Runfile("agent/cmd/muster-agent"), "--coordinator", address_,
                        "--num_machines", "2", "--", "/bin/true"});
  EXPECT_EQ(two->Wait(), 2);
  EXPECT_THAT(two->err(), ElementsAre(HasSubstr("--job_name is required")));
}

TEST_F(AccessTest, DescriptorLimit_IsRaisedInTheLauncherAndAsItWasInTheWorkers) {
  const auto launch =
      Run({"/bin/sh", "-c",
           absl::StrCat("ulimit -Sn 200; exec ", Runfile("client/cli/muster"),
                        " launch --cpu -- /bin/sh -c 'echo soft $(ulimit -Sn) hard $(ulimit -Hn) "
                        "launcher $(grep \"open files\" /proc/$PPID/limits)'")});
  EXPECT_EQ(launch->Wait(), 0) << launch->err_text();
  const std::vector<int> numbers = Numbers(launch->out_text());
  ASSERT_THAT(numbers, SizeIs(4)) << launch->out_text();
  EXPECT_EQ(numbers[0], 200);
  EXPECT_EQ(numbers[2], numbers[1]) << "the launcher's soft limit is the hard one";
}

// Without descriptors gRPC aborts, or waits forever.
TEST_F(AccessTest, TooFewDescriptors_AreOneLine) {
  for (const char* limit : {"8", "16", "20", "24", "50"}) {
    const auto launch =
        Run({"/bin/sh", "-c",
             absl::StrCat("ulimit -n ", limit, "; exec ", Runfile("client/cli/muster"),
                          " launch --cpu -- /bin/true")});
    EXPECT_EQ(launch->Wait(), 70) << limit;
    EXPECT_THAT(launch->err_text(),
                AllOf(HasSubstr(absl::StrCat("may have ", limit, " open files")),
                      HasSubstr("1 process needs 54")));
  }
}

}  // namespace
}  // namespace muster
