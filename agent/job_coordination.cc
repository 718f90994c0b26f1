#include "agent/job_coordination.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace muster::agent {

std::string WorkerEnd::ToString() const {
  return absl::StrCat("rank ", rank, " (pid ", pid, " on ", host, ") ", exit.ToString(),
                      killed_because.empty() ? "" : ", because ", killed_because,
                      memory_kill.empty() ? "" : ", by the kernel ", memory_kill);
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
