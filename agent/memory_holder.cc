#include "agent/memory_holder.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace muster::agent {
namespace {

// A worker that is stopped in mid-request must not keep the others waiting for long.
constexpr timeval kPatience = {1, 0};
constexpr int kBacklog = 128;
constexpr int kRetryMilliseconds = 100;

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryHolder>> MemoryHolder::Start(
    std::function<std::string(pid_t)> worker_of) {
  // The name is no secret: who connects is asked of the kernel.
  const std::string address = absl::StrCat("muster-memory-", RandomHex());
  sockaddr_un name;
  const size_t size = AbstractAddress(address, &name);
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.open() || bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), size) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    return absl::UnavailableError(absl::StrCat("no socket: ", std::strerror(errno)));
  }
  return std::unique_ptr<MemoryHolder>(
      new MemoryHolder(address, std::move(fd), std::move(worker_of)));
}

MemoryHolder::MemoryHolder(std::string address, OwnedFd socket,
                           std::function<std::string(pid_t)> worker_of)
    : address_(std::move(address)), socket_(std::move(socket)), worker_of_(std::move(worker_of)) {
  thread_ = std::thread([this] { Run(); });
}

MemoryHolder::~MemoryHolder() {
  shutdown(socket_.get(), SHUT_RDWR);
  thread_.join();
}

void MemoryHolder::Run() {
  while (true) {
    const OwnedFd connection(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.open()) {
      Serve(connection.get());
      continue;
    }
    if (errno == EINVAL) return;  // it is being destroyed
    if (errno == EINTR || errno == ECONNABORTED) continue;
    // The process has no descriptor left, for the moment.
    poll(nullptr, 0, kRetryMilliseconds);
  }
}

void MemoryHolder::Serve(int connection) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience));
  HeldMemoryMessage done;
  done.kind = HeldMemoryMessage::kDone;
  const auto answer = [&](const absl::Status& status) {
    done.code = static_cast<int32_t>(status.code());
    done.set_text(std::string(status.message()));
    (void)SendHeldMemoryMessage(connection, done);
  };
  const std::string worker = peer.uid == geteuid() ? worker_of_(peer.pid) : "";
  if (worker.empty()) {
    return answer(absl::PermissionDeniedError(absl::StrCat(
        "process ", peer.pid, " of user ", peer.uid, " is not a worker of this agent")));
  }
  OwnedFd fd;
  const absl::StatusOr<HeldMemoryMessage> request = ReceiveHeldMemoryMessage(connection, &fd);
  if (!request.ok()) return answer(request.status());
  switch (request->kind) {
    case HeldMemoryMessage::kHold: {
      const absl::Status fits = CheckHoldableMemory(fd.get());
      if (fits.ok()) held_[{worker, request->slot}] = std::move(fd);
      return answer(fits);
    }
    case HeldMemoryMessage::kTake:
      for (const auto& [key, memory] : held_) {
        HeldMemoryMessage piece;
        piece.kind = HeldMemoryMessage::kMemory;
        piece.slot = key.second;
        piece.set_text(key.first);
        if (!SendHeldMemoryMessage(connection, piece, memory.get()).ok()) return;
      }
      return answer(absl::OkStatus());
    default:
      return answer(absl::InvalidArgumentError("the agent does not accept messages of this kind"));
  }
}

}  // namespace muster::agent
