#include "bench/coordinator/rawsocket_peer.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"

namespace muster::bench {
namespace {

constexpr size_t kMessage = 8;

void NoDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void Watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

[[noreturn]] void Serve(int listener, int ranks) {
  const int epoll = epoll_create1(0);
  std::vector<int> sockets;
  while (static_cast<int>(sockets.size()) < ranks) {
    const int fd = accept(listener, nullptr, nullptr);
    if (fd < 0) _exit(1);
    NoDelay(fd);
    Watch(epoll, fd);
    sockets.push_back(fd);
  }
  std::vector<epoll_event> events(1024);
  char buffer[64];
  int arrived = 0;
  while (true) {
    const int n = epoll_wait(epoll, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < n; ++i) {
      const ssize_t got = read(events[i].data.fd, buffer, sizeof(buffer));
      if (got <= 0) _exit(0);
      ++arrived;
    }
    if (arrived == ranks) {
      arrived = 0;
      for (const int fd : sockets) {
        if (write(fd, buffer, kMessage) != static_cast<ssize_t>(kMessage)) _exit(1);
      }
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<absl::Duration>> RawSocketBarriers(int ranks, int rounds) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 4096) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return absl::ErrnoToStatus(errno, "raw sockets: listen");
  }
  const pid_t server = fork();
  if (server < 0) return absl::ErrnoToStatus(errno, "fork");
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Serve(listener, ranks);
  }
  close(listener);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  std::vector<int> sockets;
  const auto cleanup = absl::MakeCleanup([&] {
    for (const int fd : sockets) close(fd);
    close(epoll);
    kill(server, SIGKILL);
    waitpid(server, nullptr, 0);
  });
  for (int i = 0; i < ranks; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return absl::ErrnoToStatus(errno, "raw sockets: socket");
    sockets.push_back(fd);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      return absl::ErrnoToStatus(errno, "raw sockets: connect");
    }
    NoDelay(fd);
    Watch(epoll, fd);
  }
  std::vector<absl::Duration> times;
  std::vector<epoll_event> events(1024);
  char buffer[64] = {};
  for (int round = 0; round < rounds; ++round) {
    const absl::Time start = absl::Now();
    for (const int fd : sockets) {
      if (write(fd, buffer, kMessage) != static_cast<ssize_t>(kMessage)) {
        return absl::ErrnoToStatus(errno, "raw sockets: write");
      }
    }
    for (int told = 0; told < ranks;) {
      const int n = epoll_wait(epoll, events.data(), static_cast<int>(events.size()), 30'000);
      if (n <= 0) return absl::DeadlineExceededError("raw sockets: no answer");
      for (int i = 0; i < n; ++i) {
        if (read(events[i].data.fd, buffer, sizeof(buffer)) <= 0)
          return absl::UnavailableError("raw sockets: closed");
      }
      told += n;
    }
    times.push_back(absl::Now() - start);
  }
  return times;
}

}  // namespace muster::bench
