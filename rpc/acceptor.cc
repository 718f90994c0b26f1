#include "rpc/acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file_identity.h"
#include "base/log.h"

namespace muster::rpc {
namespace {

// The most that the kernel allows (net.core.somaxconn): a whole cluster may connect at once.
constexpr int kBacklog = 4096;
constexpr int kRetryMilliseconds = 50;
// A process reserves a share of its descriptors, up to this many, for its own work, so that a crowd
// of connections cannot keep a coordinator from writing its journal, or a launch from starting its
// processes.
constexpr uint64_t kKeptShare = 16, kMostKept = 64;

absl::Status CannotListen(const Address& address, int error) {
  const std::string what = absl::StrCat("cannot listen on ", address.ToString(), ": ");
  if (error == EADDRINUSE && address.is_unix()) {
    return absl::AlreadyExistsError(absl::StrCat(what, "another process is listening there"));
  }
  if (error == EACCES && address.is_unix()) {
    return absl::PermissionDeniedError(
        absl::StrCat(what, "user ", geteuid(), " may not create a socket there"));
  }
  if (error == EADDRINUSE) {
    return absl::AlreadyExistsError(
        absl::StrCat(what, "another process has the port; stop it, or use port 0 for a free one"));
  }
  if (error == EACCES) {
    return absl::PermissionDeniedError(
        absl::StrCat(what, "ports below 1024 need privileges; use a higher one"));
  }
  if (error == EADDRNOTAVAIL) {
    return absl::InvalidArgumentError(absl::StrCat(what, "this machine has no such address"));
  }
  return absl::UnavailableError(absl::StrCat(what, std::strerror(error)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const Address& address,
                                                           std::optional<uid_t> only_user) {
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (address.is_unix()) {
    auto* name = reinterpret_cast<sockaddr_un*>(&storage);
    name->sun_family = AF_UNIX;
    std::memcpy(name->sun_path, address.path.c_str(), address.path.size() + 1);
    length = sizeof(*name);
  } else if (auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
             inet_pton(AF_INET, address.host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(address.port));
    length = sizeof(*v4);
  } else {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
    std::memset(&storage, 0, sizeof(storage));
    inet_pton(AF_INET6, address.host.c_str(), &v6->sin6_addr);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(address.port));
    length = sizeof(*v6);
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return CannotListen(address, errno);
  if (!address.is_unix()) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    // Accepted sockets inherit it.
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  const int stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (stop < 0 || bind(fd, reinterpret_cast<sockaddr*>(&storage), length) != 0 ||
      listen(fd, kBacklog) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    const absl::Status status = CannotListen(address, errno);
    close(fd);
    if (stop >= 0) close(stop);
    return status;
  }
  if (address.is_unix()) {
    // The descriptor keeps the file's number from being given to another one.
    return std::unique_ptr<Acceptor>(
        new Acceptor(fd, stop, 0, address.path, FileIdentityAt(address.path), only_user));
  }
  const uint16_t port = storage.ss_family == AF_INET
                            ? reinterpret_cast<sockaddr_in*>(&storage)->sin_port
                            : reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port;
  return std::unique_ptr<Acceptor>(
      new Acceptor(fd, stop, ntohs(port), "", std::nullopt, only_user));
}

Acceptor::~Acceptor() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    while (write(stop_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
    thread_.join();
  }
  // Unlink before closing: without a listener, the next server would take this socket for a dead
  // one and put its own in its place.
  if (file_.has_value() && FileIdentityAt(path_) == file_) unlink(path_.c_str());
  close(listener_);
  close(stop_);
}

bool Acceptor::MayEnter(int fd) {
  if (!only_user_.has_value() || path_.empty()) return true;
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == *only_user_) {
    return true;
  }
  ++refusals_;
  // A process that retries again and again must not fill the log.
  const absl::Time now = absl::Now();
  if (now >= last_refusal_log_ && now < last_refusal_log_ + absl::Minutes(1)) return false;
  MUSTER_LOG(Warning) << "refused process " << peer.pid << " of user " << peer.uid << " at "
                      << path_ << ": only user " << *only_user_ << " may enter"
                      << (refusals_ > 1 ? absl::StrCat(" (", refusals_, " refused since the last ",
                                                       "such line; one a minute)")
                                        : "");
  last_refusal_log_ = now;
  refusals_ = 0;
  return false;
}

bool Acceptor::HasRoom() const {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return true;
  // The lowest free number: all below it are in use.
  const int next = fcntl(listener_, F_DUPFD_CLOEXEC, 0);
  if (next < 0) return false;
  close(next);
  const uint64_t most = limit.rlim_cur;
  return static_cast<uint64_t>(next) < most - std::min(most / kKeptShare, kMostKept);
}

void Acceptor::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> sink) {
  sink_ = std::move(sink);
  thread_ = std::thread([this] { Run(); });
}

void Acceptor::Run() {
  bool told = false;
  for (;;) {
    pollfd events[2] = {{stop_, POLLIN, 0}, {listener_, POLLIN, 0}};
    if (poll(events, 2, -1) < 0) continue;
    if (events[0].revents != 0) return;
    errno = EMFILE;
    const int fd =
        HasRoom() ? accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
    if (fd >= 0 && !MayEnter(fd)) {
      close(fd);
      continue;
    }
    if (fd >= 0) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.listener_fd = listener_;
      connection.fd = fd;
      sink_->HandleNewConnection(&connection);
      told = false;
      continue;
    }
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) continue;
    if (!told) {
      told = true;
      rlimit limit{};
      getrlimit(RLIMIT_NOFILE, &limit);
      MUSTER_LOG(Warning) << "no descriptor is left for a new connection (" << std::strerror(errno)
                          << "; this process may have " << limit.rlim_cur
                          << ", see ulimit -n): new connections wait until one is free";
    }
    pollfd stop = {stop_, POLLIN, 0};
    if (poll(&stop, 1, kRetryMilliseconds) > 0) return;
  }
}

}  // namespace muster::rpc
