#include "agent/job_coordination.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"

namespace muster::agent {

std::string WorkerEnd::ToString() const {
  return absl::StrCat("rank ", rank, " (pid ", pid, " on ", host, ") ", exit.ToString(),
                      killed_because.empty() ? "" : ", because ", killed_because,
                      memory_kill.empty() ? "" : ", by the kernel ", memory_kill);
}

v1::EndClass ClassOf(const AttemptEnd& end) {
  switch (end.cause) {
    case AttemptEnd::Cause::kFailed:
      return end.end_class == v1::END_CLASS_UNSPECIFIED ? v1::END_CLASS_PROCESS_FAILED
                                                        : end.end_class;
    case AttemptEnd::Cause::kMachineLost:
      return v1::END_CLASS_NODE_LOST;
    case AttemptEnd::Cause::kMachineLeft:
    case AttemptEnd::Cause::kMachineCame:
      break;
  }
  return v1::END_CLASS_UNSPECIFIED;
}

void RestartCounts::TakeLarger(const RestartCounts& other) {
  total = std::max(total, other.total);
  if (last.why.empty()) last = other.last;
  for (const v1::ClassCount& theirs : other.by_class) {
    const auto ours = std::find_if(by_class.begin(), by_class.end(), [&](const auto& one) {
      return one.end_class() == theirs.end_class();
    });
    if (ours == by_class.end()) {
      *by_class.Add() = theirs;
    } else {
      ours->set_count(std::max(ours->count(), theirs.count()));
    }
  }
}

absl::StatusOr<int> FindFreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::ErrnoToStatus(errno, "socket");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof(address);
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  close(fd);
  if (!bound) return absl::ErrnoToStatus(error, "no free port");
  return ntohs(address.sin_port);
}

}  // namespace muster::agent
