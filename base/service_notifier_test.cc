#include "base/service_notifier.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

// A service manager's end.
class Manager {
 public:
  explicit Manager(const std::string& name) : fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    EXPECT_EQ(bind(fd_.get(), reinterpret_cast<sockaddr*>(&address),
                   static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size())),
              0)
        << strerror(errno);
  }
  // The next message; "" if there is none.
  std::string Next() {
    char text[4096];
    const ssize_t size = recv(fd_.get(), text, sizeof(text), MSG_DONTWAIT);
    return size > 0 ? std::string(text, size) : "";
  }

 private:
  const OwnedFd fd_;
};

TEST(ServiceNotifierTest, Messages_AreThoseOfTheProtocol) {
  const TestFolder folder = TestFolder::ForSockets();
  Manager manager(folder.Path("notify"));
  ServiceNotifier notifier({.socket = folder.Path("notify")});
  EXPECT_TRUE(notifier.active());
  notifier.Ready("serving on 127.0.0.1:1");
  EXPECT_EQ(manager.Next(), "READY=1\nSTATUS=serving on 127.0.0.1:1");
  notifier.Status("3 jobs");
  EXPECT_EQ(manager.Next(), "STATUS=3 jobs");
  notifier.Status("3 jobs");
  EXPECT_EQ(manager.Next(), "");
  // A status that contains another message stays one line.
  notifier.Status("job\nREADY=0");
  EXPECT_EQ(manager.Next(), "STATUS=job\\nREADY=0");
  notifier.Stopping("SIGTERM");
  EXPECT_EQ(manager.Next(), "STOPPING=1\nSTATUS=SIGTERM");
}

TEST(ServiceNotifierTest, AbstractName_IsReached) {
  const std::string name = absl::StrCat("@muster-test-", RandomHex());
  Manager manager(name);
  ServiceNotifier({.socket = name}).Ready("up");
  EXPECT_EQ(manager.Next(), "READY=1\nSTATUS=up");
  // The longest name: no NUL follows it.
  std::string longest = absl::StrCat("@", RandomHex());
  longest.resize(sizeof(sockaddr_un::sun_path), 'x');
  Manager other(longest);
  ServiceNotifier({.socket = longest}).Ready("up");
  EXPECT_EQ(other.Next(), "READY=1\nSTATUS=up");
}

TEST(ServiceNotifierTest, Watchdog_IsToldByTheLoop_AndNotMoreOftenThanNeeded) {
  const TestFolder folder = TestFolder::ForSockets();
  Manager manager(folder.Path("notify"));
  ServiceNotifier notifier({.socket = folder.Path("notify"), .watchdog = absl::Seconds(30)});
  EXPECT_EQ(notifier.period(), absl::Seconds(10));
  const absl::Time start = absl::FromUnixSeconds(1000);
  notifier.Alive(start);
  EXPECT_EQ(manager.Next(), "WATCHDOG=1");
  notifier.Alive(start + absl::Seconds(4));
  EXPECT_EQ(manager.Next(), "");
  notifier.Alive(start + absl::Seconds(5));
  EXPECT_EQ(manager.Next(), "WATCHDOG=1");
}

TEST(ServiceNotifierTest, WithoutAWatchdog_NothingIsTold) {
  const TestFolder folder = TestFolder::ForSockets();
  Manager manager(folder.Path("notify"));
  ServiceNotifier notifier({.socket = folder.Path("notify")});
  EXPECT_EQ(notifier.period(), absl::InfiniteDuration());
  notifier.Alive(absl::FromUnixSeconds(1000));
  EXPECT_EQ(manager.Next(), "");
}

TEST(ServiceNotifierTest, NobodyThere_IsSaidOnce_AndHoldsNothingUp) {
  for (const std::string& socket : {std::string("/no/such/socket"), std::string("vsock:2:1"),
                                    "/" + std::string(200, 'x'), std::string()}) {
    testing::internal::CaptureStderr();
    ServiceNotifier notifier({.socket = socket, .watchdog = absl::Seconds(3)});
    notifier.Ready("up");
    notifier.Alive(absl::FromUnixSeconds(1));
    notifier.Stopping("down");
    const std::string log = testing::internal::GetCapturedStderr();
    const size_t first = log.find("does not take messages");
    EXPECT_EQ(first == std::string::npos, socket.empty()) << log;
    EXPECT_EQ(log.find("does not take messages", first + 1), std::string::npos) << log;
  }
}

// The queue of a manager that does not read is full.
TEST(ServiceNotifierTest, ManagerThatDoesNotRead_HoldsNothingUp) {
  const TestFolder folder = TestFolder::ForSockets();
  Manager manager(folder.Path("notify"));
  ServiceNotifier notifier({.socket = folder.Path("notify")});
  for (int i = 0; i < 10'000; ++i) notifier.Status(absl::StrCat(i));
  EXPECT_EQ(manager.Next(), "STATUS=0");
}

TEST(ServiceNotifierTest, Environment_IsTaken) {
  const auto take = [](const char* socket, const char* microseconds, const std::string& pid) {
    setenv("NOTIFY_SOCKET", socket, 1);
    setenv("WATCHDOG_USEC", microseconds, 1);
    if (pid.empty()) {
      unsetenv("WATCHDOG_PID");
    } else {
      setenv("WATCHDOG_PID", pid.c_str(), 1);
    }
    const ServiceNotifier::Options options = ServiceNotifier::TakeFromEnvironment();
    EXPECT_EQ(getenv("NOTIFY_SOCKET"), nullptr);
    EXPECT_EQ(getenv("WATCHDOG_USEC"), nullptr);
    EXPECT_EQ(getenv("WATCHDOG_PID"), nullptr);
    return options;
  };
  EXPECT_EQ(take("/run/notify", "30000000", absl::StrCat(getpid())).socket, "/run/notify");
  EXPECT_EQ(take("/run/notify", "30000000", absl::StrCat(getpid())).watchdog, absl::Seconds(30));
  EXPECT_EQ(take("/run/notify", "30000000", "").watchdog, absl::Seconds(30));
  // The variables are meant for another process, such as the shell that started this one.
  EXPECT_EQ(take("/run/notify", "30000000", "1").watchdog, absl::ZeroDuration());
  EXPECT_EQ(take("/run/notify", "soon", "").watchdog, absl::ZeroDuration());
  EXPECT_EQ(ServiceNotifier::TakeFromEnvironment().socket, "");
}

}  // namespace
}  // namespace muster
