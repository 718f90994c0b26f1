#include "base/held_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster {
namespace {

// The agent answers from memory.
constexpr timeval kPatience = {10, 0};

absl::StatusOr<OwnedFd> Connect(const std::string& name) {
  sockaddr_un address;
  const size_t size = AbstractAddress(name, &address);
  if (size == 0) return absl::InvalidArgumentError(absl::StrCat(name, " is too long for a socket"));
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.open()) return absl::UnavailableError(std::strerror(errno));
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return absl::UnavailableError(
        absl::StrCat("the agent's memory (", name, ") cannot be reached: ", std::strerror(errno)));
  }
  // Once the agent is dead, any user may take its name.
  ucred agent = {};
  socklen_t credentials = sizeof(agent);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &agent, &credentials) != 0 ||
      (agent.uid != geteuid() && agent.uid != 0)) {
    return absl::UnavailableError(
        absl::StrCat("the agent's memory (", name, ") is served by user ", agent.uid));
  }
  return fd;
}

absl::Status StatusOf(const HeldMemoryMessage& done) {
  if (done.code == 0) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(done.code), done.text);
}

// Sends a request to which the answer is only a status.
absl::Status Ask(const std::string& socket, const HeldMemoryMessage& request, int fd) {
  MUSTER_ASSIGN_OR_RETURN(const OwnedFd agent, Connect(socket));
  // An agent that refuses this process answers without reading.
  const absl::Status sent = SendHeldMemoryMessage(agent.get(), request, fd);
  OwnedFd none;
  const absl::StatusOr<HeldMemoryMessage> done = ReceiveHeldMemoryMessage(agent.get(), &none);
  if (!done.ok()) return sent.ok() ? done.status() : sent;
  return StatusOf(*done);
}

}  // namespace

absl::StatusOr<OwnedFd> CreateHoldableMemory(const std::string& name) {
  OwnedFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.open() || fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the kernel does not create a file in memory: ", std::strerror(errno)));
  }
  return fd;
}

absl::Status CheckHoldableMemory(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat info;
  if (seals < 0 || fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError("it is not a file in memory");
  }
  if ((seals & F_SEAL_SHRINK) == 0 || (seals & F_SEAL_SEAL) == 0) {
    return absl::InvalidArgumentError("the file in memory is not sealed against shrinking");
  }
  return absl::OkStatus();
}

void HeldMemoryMessage::set_text(absl::string_view value) {
  const size_t size = std::min(value.size(), sizeof(text) - 1);
  std::memset(text, 0, sizeof(text));
  std::copy_n(value.data(), size, text);
}

bool IsWellFormed(const HeldMemoryMessage& message) {
  return message.magic == HeldMemoryMessage::kMagic && message.kind >= HeldMemoryMessage::kHold &&
         message.kind <= HeldMemoryMessage::kReentry && message.slot >= 0 &&
         message.slot < kHeldSlots && message.code >= 0 && message.code <= 16 &&
         memchr(message.text, '\0', sizeof(message.text)) != nullptr;
}

absl::Status SendHeldMemoryMessage(int socket, const HeldMemoryMessage& message, int fd) {
  iovec data = {const_cast<HeldMemoryMessage*>(&message), sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(sizeof(message))) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the agent's memory: ", std::strerror(errno)));
}

absl::StatusOr<HeldMemoryMessage> ReceiveHeldMemoryMessage(int socket, OwnedFd* fd) {
  HeldMemoryMessage message;
  iovec data = {&message, sizeof(message)};
  // Room for several descriptors: a hostile peer may send more than one, and all must be received
  // to be closed.
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t got;
  bool reset = false;  // the other side has closed without reading; its last message may be there
  do {
    got = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (got <= 0) {
    return absl::UnavailableError(absl::StrCat(
        "the agent's memory: ", got == 0 ? "the connection was closed" : std::strerror(errno)));
  }
  int fds = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i, ++fds) {
      int received;
      std::memcpy(&received, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      *fd = OwnedFd(received);
    }
  }
  if (got != sizeof(message) || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || fds > 1 ||
      !IsWellFormed(message)) {
    return absl::InvalidArgumentError("this is not a message about held memory");
  }
  return message;
}

size_t AbstractAddress(const std::string& name, void* sockaddr_un_out) {
  auto* const address = static_cast<sockaddr_un*>(sockaddr_un_out);
  *address = {};
  address->sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof(address->sun_path)) return 0;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

absl::Status HoldMemory(const std::string& socket, int slot, int fd, const std::string& worker_id) {
  HeldMemoryMessage request;
  request.kind = HeldMemoryMessage::kHold;
  request.slot = slot;
  request.set_text(worker_id);
  return Ask(socket, request, fd);
}

absl::Status DropHeldMemory(const std::string& socket, const std::string& worker_id, int slot) {
  HeldMemoryMessage request;
  request.kind = HeldMemoryMessage::kDrop;
  request.slot = slot;
  request.set_text(worker_id);
  return Ask(socket, request, -1);
}

absl::Status TellReentry(const std::string& socket, Reentry reentry) {
  HeldMemoryMessage request;
  request.kind = HeldMemoryMessage::kReentry;
  request.slot = static_cast<int32_t>(reentry);
  return Ask(socket, request, -1);
}

absl::StatusOr<std::vector<HeldMemory>> TakeHeldMemory(const std::string& socket) {
  MUSTER_ASSIGN_OR_RETURN(const OwnedFd agent, Connect(socket));
  HeldMemoryMessage request;
  request.kind = HeldMemoryMessage::kTake;
  const absl::Status sent = SendHeldMemoryMessage(agent.get(), request);
  std::vector<HeldMemory> held;
  while (true) {
    OwnedFd fd;
    const absl::StatusOr<HeldMemoryMessage> answer = ReceiveHeldMemoryMessage(agent.get(), &fd);
    if (!answer.ok()) return sent.ok() ? answer.status() : sent;
    if (answer->kind != HeldMemoryMessage::kMemory) {
      MUSTER_RETURN_IF_ERROR(StatusOf(*answer));
      return held;
    }
    MUSTER_RETURN_IF_ERROR(CheckHoldableMemory(fd.get()));
    held.push_back({.worker_id = answer->text, .slot = answer->slot, .fd = std::move(fd)});
  }
}

}  // namespace muster
