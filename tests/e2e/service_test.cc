// Coordinator and agents as services: what they tell a service manager.
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/owned_fd.h"
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
  // The next message; "" if none comes within `timeout`.
  std::string Next(absl::Duration timeout = absl::Minutes(1)) {
    pollfd event = {fd_.get(), POLLIN, 0};
    char text[4096];
    if (poll(&event, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) != 1) return "";
    const ssize_t size = recv(fd_.get(), text, sizeof(text), 0);
    return size > 0 ? std::string(text, size) : "";
  }
  // The first message with `text`.
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
  env_["MUSTER_FAILPOINTS"] = "engine.apply=delay:6s";
  const auto coordinator = StartCoordinator();
  EXPECT_THAT(manager_->Await("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
  EXPECT_THAT(manager_->Await("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
  // The core hangs in this call.
  env_ = plain_;
  const absl::Time start = absl::Now();
  const auto list = Muster({"list", "--coordinator", address_});
  // At most one message is on its way when it begins to.
  absl::Duration longest;
  for (absl::Time last = start; absl::Now() < start + absl::Seconds(5);) {
    manager_->Next(start + absl::Seconds(5) - absl::Now());
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
  Command agent(*host_,
                {Runfile("agent/cmd/muster-agent"), "--serve", "--coordinator", address_,
                 "--state_dir", Temp("state"), "--node", "a"},
                env_);
  EXPECT_THAT(manager_->Next(), HasSubstr("READY=1\nSTATUS=node a: 0 attempts run"));
  EXPECT_THAT(manager_->Await("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
  EXPECT_THAT(manager_->Await("answers"), HasSubstr("the coordinator at " + address_));
  env_ = plain_;
  const auto job = Muster({"submit", "--coordinator", address_, "--wait", "--name", "job", "--",
                           "/bin/sh", "-c", "[ -z \"$NOTIFY_SOCKET$WATCHDOG_USEC\" ]"});
  EXPECT_THAT(manager_->Await("1 attempt runs"), HasSubstr("node a"));
  EXPECT_EQ(job->Wait(), 0) << job->err_text();
  agent.Signal(SIGTERM);
  EXPECT_THAT(manager_->Await("STOPPING=1"), HasSubstr("STATUS="));
  EXPECT_EQ(agent.Wait(), 0);
}

}  // namespace
}  // namespace muster
