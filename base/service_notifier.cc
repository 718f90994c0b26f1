#include "base/service_notifier.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/owned_fd.h"

namespace muster {
namespace {

std::string Take(const char* name) {
  const char* const value = getenv(name);
  std::string taken = value == nullptr ? "" : value;
  unsetenv(name);
  return taken;
}

}  // namespace

ServiceNotifier::Options ServiceNotifier::TakeFromEnvironment() {
  Options options;
  options.socket = Take("NOTIFY_SOCKET");
  const std::string microseconds = Take("WATCHDOG_USEC"), pid = Take("WATCHDOG_PID");
  int64_t parsed = 0;
  const bool ours = pid.empty() || (absl::SimpleAtoi(pid, &parsed) && parsed == getpid());
  if (ours && absl::SimpleAtoi(microseconds, &parsed) && parsed > 0) {
    options.watchdog = absl::Microseconds(parsed);
  }
  return options;
}

absl::Duration ServiceNotifier::period() const {
  // Half of it is what the manager's own manual asks for; a third leaves room for a slow round.
  return active() && options_.watchdog > absl::ZeroDuration() ? options_.watchdog / 3
                                                              : absl::InfiniteDuration();
}

void ServiceNotifier::Ready(absl::string_view status) {
  status_ = OneLine(status);
  Send(absl::StrCat("READY=1\nSTATUS=", status_));
}

void ServiceNotifier::Status(absl::string_view status) {
  std::string line = OneLine(status);
  if (line == status_) return;
  status_ = std::move(line);
  Send(absl::StrCat("STATUS=", status_));
}

void ServiceNotifier::Stopping(absl::string_view status) {
  status_ = OneLine(status);
  Send(absl::StrCat("STOPPING=1\nSTATUS=", status_));
}

void ServiceNotifier::Alive(absl::Time now) {
  // A busy loop need not send it thousands of times a second.
  if (period() == absl::InfiniteDuration() || now - last_alive_ < period() / 2) return;
  last_alive_ = now;
  Send("WATCHDOG=1");
}

void ServiceNotifier::Send(absl::string_view message) {
  if (!active()) return;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string& name = options_.socket;
  int error = ENAMETOOLONG;
  // An abstract name needs no terminating NUL.
  if ((name[0] == '/' && name.size() < sizeof(address.sun_path)) ||
      (name[0] == '@' && name.size() <= sizeof(address.sun_path))) {
    memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    const OwnedFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    if (fd.open() && sendto(fd.get(), message.data(), message.size(), MSG_NOSIGNAL,
                            reinterpret_cast<sockaddr*>(&address), size) >= 0) {
      return;
    }
    error = errno;
  } else if (name[0] != '/' && name[0] != '@') {
    error = EAFNOSUPPORT;
  }
  if (std::exchange(warned_, true)) return;
  MUSTER_LOG(Warning) << "the service manager at NOTIFY_SOCKET=" << OneLine(name)
                      << " does not take messages: " << strerror(error);
}

}  // namespace muster
