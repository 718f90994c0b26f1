// Coordinator and agents as services: what they report to a service manager, and where their
// settings come from.
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// systemd's end of NOTIFY_SOCKET.
class ServiceManager {
 public:
  explicit ServiceManager(const std::string& path)
      : fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  // Returns the next message; "" if none comes within `timeout`.
  std::string Next(absl::Duration timeout = absl::Minutes(1)) {
    pollfd event = {fd_.get(), POLLIN, 0};
    char text[4096];
    if (poll(&event, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) != 1) return "";
    const ssize_t size = recv(fd_.get(), text, sizeof(text), 0);
    return size > 0 ? std::string(text, size) : "";
  }
  // Returns the first message with `text`.
  std::string Await(const std::string& text) {
    std::string message;
    do {
      message = Next();
    } while (!message.empty() && !absl::StrContains(message, text));
    return message;
  }
  void Drain() {
    while (!Next(absl::ZeroDuration()).empty()) {
    }
  }

 private:
  const OwnedFd fd_;
};

class ServiceTest : public ClusterFixture {
 protected:
  void SetUp() override {
    ClusterFixture::SetUp();
    plain_ = env_;
    manager_ = std::make_unique<ServiceManager>(runtime_ + "/notify");
    env_["NOTIFY_SOCKET"] = runtime_ + "/notify";
  }

  std::string File(const std::string& name, const std::string& text) {
    EXPECT_TRUE(WriteFileAtomically(Temp(name), text).ok());
    return Temp(name);
  }

  std::map<std::string, std::string> plain_;  // without a service manager
  std::unique_ptr<ServiceManager> manager_;
};

TEST_F(ServiceTest, Coordinator_TellsWhenItServes_AndWhenItStops) {
  const auto coordinator = StartCoordinator();
  EXPECT_THAT(manager_->Next(), AllOf(HasSubstr("READY=1\nSTATUS=serving on " + address_),
                                      HasSubstr("the journal is written")));
  coordinator->Signal(SIGTERM);
  EXPECT_THAT(manager_->Await("STOPPING=1"), HasSubstr("STATUS="));
  EXPECT_EQ(coordinator->Wait(), 0);
}

TEST_F(ServiceTest, CoordinatorThatAppliesNothing_IsNotAlive) {
  env_["WATCHDOG_USEC"] = "600000";
  env_["MUSTER_FAILPOINTS"] = "engine.apply=delay:10s";
  const auto coordinator = StartCoordinator();
  EXPECT_THAT(manager_->Await("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
  EXPECT_THAT(manager_->Await("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
  // The core hangs in this call.
  env_ = plain_;
  const absl::Time start = absl::Now();
  const auto list = Muster({"list", "--coordinator", address_});
  // At most one message is on its way when the core begins to hang.
  absl::Duration longest;
  for (absl::Time last = start; absl::Now() < start + absl::Seconds(9);) {
    manager_->Next(start + absl::Seconds(9) - absl::Now());
    longest = std::max(longest, absl::Now() - last);
    last = absl::Now();
  }
  EXPECT_GT(longest, absl::Seconds(3));
  list->Wait();  // its own timeout is shorter
  manager_->Drain();
  EXPECT_THAT(manager_->Await("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
}

TEST_F(ServiceTest, Agent_TellsWhatItDoes_AndItsJobsDoNotSpeakForIt) {
  env_ = plain_;
  const auto coordinator = StartCoordinator();
  env_["NOTIFY_SOCKET"] = runtime_ + "/notify";
  env_["WATCHDOG_USEC"] = "600000";
  env_["MUSTER_AGENT_COORDINATOR"] = address_;
  Command agent(
      *host_,
      {Runfile("agent/cmd/muster-agent"), "--serve", "--state_dir", Temp("state"), "--node", "a"},
      env_);
  EXPECT_THAT(manager_->Next(), HasSubstr("READY=1\nSTATUS=node a: 0 attempts run"));
  EXPECT_THAT(manager_->Await("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
  EXPECT_THAT(manager_->Await("answers"), HasSubstr("the coordinator at " + address_));
  env_ = plain_;
  const auto job =
      Muster({"submit", "--coordinator", address_, "--wait", "--name", "job", "--", "/bin/sh", "-c",
              "[ -z \"$NOTIFY_SOCKET$WATCHDOG_USEC$MUSTER_AGENT_COORDINATOR\" ]"});
  EXPECT_THAT(manager_->Await("1 attempt runs"), HasSubstr("node a"));
  EXPECT_EQ(job->Wait(), 0) << job->err_text();
  agent.Signal(SIGTERM);
  EXPECT_THAT(manager_->Await("STOPPING=1"), HasSubstr("STATUS="));
  EXPECT_EQ(agent.Wait(), 0);
}

TEST_F(ServiceTest, ConfigFiles_StartBoth) {
  env_ = plain_;
  Command coordinator(
      *host_,
      {Runfile("coordinator/cmd/muster-coordinator"), "--config",
       File("coordinator.yaml",
            absl::StrCat("listen: unix:", runtime_, "/c\ndata_dir: ", Temp("data"), "\n"))},
      env_);
  coordinator.WaitForLine("unix:");
  const std::string config = File(
      "agent.yaml", absl::StrCat("coordinator: unix:", runtime_, "/c\nstate_dir: ", Temp("state"),
                                 "\nnode: b\ncpus: 3\nlabel: [pool=x, disk=y]\n"));
  env_["MUSTER_AGENT_CPUS"] = "4";
  Command agent(
      *host_, {Runfile("agent/cmd/muster-agent"), "--serve", "--config", config, "--node=c"}, env_);
  env_ = plain_;
  const auto nodes = [&] {
    const auto command =
        Muster({"nodes", "--coordinator", absl::StrCat("unix:", runtime_, "/c"), "-o", "wide"});
    EXPECT_EQ(command->Wait(), 0) << command->err_text();
    return command->out_text();
  };
  WaitUntil([&] { return absl::StrContains(nodes(), "READY"); });
  // Settings come from the flag, the variable and the file.
  EXPECT_THAT(nodes(), ::testing::ContainsRegex("\nc +READY +0/4 .*disk=y,pool=x"));
}

TEST_F(ServiceTest, PrintConfig_ShowsSources) {
  env_ = plain_;
  env_["MUSTER_COORDINATOR_LEASE"] = "7.5";
  const std::string config = File("c.yaml", "data_dir: /data\nnode_lease: 40\n");
  Command print(*host_,
                {Runfile("coordinator/cmd/muster-coordinator"), "--config", config, "--insecure",
                 "--print_config"},
                env_);
  EXPECT_EQ(print.Wait(), 0) << print.err_text();
  EXPECT_THAT(print.out_text(),
              AllOf(::testing::ContainsRegex("\nlease: \"7.5\" +# MUSTER_COORDINATOR_LEASE\n"),
                    ::testing::ContainsRegex("\ndata_dir: \"/data\" +# " + config + ":1\n"),
                    ::testing::ContainsRegex("\nnode_lease: 40 +# " + config + ":2\n"),
                    ::testing::ContainsRegex("\ninsecure: true +# --insecure\n"),
                    ::testing::ContainsRegex("\nmax_message_mib: 4 +# default\n")));
}

TEST_F(ServiceTest, Agent_ReadsTheVariablesOfCommandsAndWorkers) {
  env_ = plain_;
  env_["MUSTER_TLS_CA"] = "/ca.pem";
  env_["MUSTER_TLS_CERT"] = "/of_commands.pem";
  env_["MUSTER_AGENT_TLS_CERT"] = "/own.pem";
  Command print(*host_,
                {Runfile("agent/cmd/muster-agent"), "--serve", "--coordinator", "127.0.0.1:1",
                 "--state_dir", "state", "--print_config"},
                env_);
  EXPECT_EQ(print.Wait(), 0) << print.err_text();
  EXPECT_THAT(print.out_text(),
              AllOf(::testing::ContainsRegex("tls_ca: \"/ca.pem\" +# MUSTER_TLS_CA\n"),
                    ::testing::ContainsRegex("tls_cert: \"/own.pem\" +# MUSTER_AGENT_TLS_CERT\n")));
  const std::tuple<std::string, std::string, std::string> kCases[] = {
      {"MUSTER_LEASE", "1s", "--lease (or MUSTER_LEASE) is 1s: give at least"},
      {"MUSTER_OUTAGE_TOLERANCE", "90", "--outage_tolerance"},
      {"MUSTER_TLS_CA", "/nowhere.pem", "/nowhere.pem"}};
  for (const auto& [name, value, message] : kCases) {
    env_ = plain_;
    env_[name] = value;
    Command agent(
        *host_,
        {Runfile("agent/cmd/muster-agent"), "--coordinator", "127.0.0.1:1", "--", "/bin/true"},
        env_);
    EXPECT_NE(agent.Wait(), 0) << name;
    EXPECT_THAT(agent.err_text(), HasSubstr(message));
  }
}

TEST_F(ServiceTest, Mistakes_NameFileLineAndKey) {
  env_ = plain_;
  const auto fails = [&](const std::string& text, const std::string& message) {
    Command coordinator(
        *host_, {Runfile("coordinator/cmd/muster-coordinator"), "--config", File("c.yaml", text)},
        env_);
    EXPECT_EQ(coordinator.Wait(), kExitUsage);
    ASSERT_EQ(coordinator.err().size(), 1u) << coordinator.err_text();
    EXPECT_THAT(coordinator.err()[0], HasSubstr(message));
  };
  fails("insecure: true\ndata_dri: /x\n", "c.yaml:2: unknown key data_dri; did you mean data_dir?");
  fails("lease: 0\n", "c.yaml:1: lease: Value 0 not in range");
  fails("insecure: true\ntoken_file: t\n", "exclude each other");
}

TEST_F(ServiceTest, ConfigFileOfOneJob_IsRefusedWithTheWayOut) {
  for (const char* const flag : {"--config=a.yaml", "--print-config"}) {
    Command agent(*host_, {Runfile("agent/cmd/muster-agent"), flag, "--", "/bin/true"}, plain_);
    EXPECT_EQ(agent.Wait(), kExitUsage);
    EXPECT_THAT(agent.err_text(), AllOf(HasSubstr(" works only with --serve"),
                                        HasSubstr("muster launch --config_file")));
  }
}

// Reads what deploy/systemd gives to its units.
TEST_F(ServiceTest, ExampleFiles_AreRead) {
  env_ = plain_;
  for (const auto& [program, file] :
       {std::pair{"coordinator/cmd/muster-coordinator", "deploy/systemd/coordinator.yaml"},
        std::pair{"agent/cmd/muster-agent", "deploy/systemd/agent.yaml"}}) {
    std::vector<std::string> args = {Runfile(program)};
    if (absl::StrContains(program, "agent")) args.push_back("--serve");
    args.insert(args.end(), {"--config", Runfile(file), "--print_config"});
    Command print(*host_, args, env_);
    EXPECT_EQ(print.Wait(), 0) << print.err_text();
    EXPECT_THAT(print.out_text(), HasSubstr(file));
  }
}

}  // namespace
}  // namespace muster
