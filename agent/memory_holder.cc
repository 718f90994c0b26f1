#include "agent/memory_holder.h"

#include <fcntl.h>
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

// A worker that is stopped in the middle of a request must not keep the others waiting for long.
constexpr timeval kPatience = {1, 0};
constexpr int kBacklog = 128;
constexpr int kRetryMilliseconds = 100;

void Answer(int connection, const absl::Status& status) {
  HeldMemoryMessage done;
  done.kind = HeldMemoryMessage::kDone;
  done.code = static_cast<int32_t>(status.code());
  done.set_text(status.message());
  (void)SendHeldMemoryMessage(connection, done);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryHolder>> MemoryHolder::Start(Options options) {
  // The name need not be secret: the kernel says which process connects.
  if (options.address.empty()) options.address = absl::StrCat("muster-memory-", RandomHex());
  sockaddr_un name;
  const size_t size = AbstractAddress(options.address, &name);
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.open() || bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), size) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    return absl::UnavailableError(absl::StrCat("no socket: ", std::strerror(errno)));
  }
  return std::unique_ptr<MemoryHolder>(new MemoryHolder(std::move(options), std::move(fd)));
}

absl::StatusOr<std::unique_ptr<MemoryHolder>> MemoryHolder::Start(
    std::function<std::string(pid_t)> worker_of) {
  return Start(std::move(worker_of), Options());
}

absl::StatusOr<std::unique_ptr<MemoryHolder>> MemoryHolder::Start(
    std::function<std::string(pid_t)> worker_of, Options options) {
  options.client_of = [worker_of = std::move(worker_of)](pid_t pid) -> std::optional<Client> {
    std::string worker = worker_of(pid);
    if (worker.empty()) return std::nullopt;
    return Client{.job = "", .worker = std::move(worker)};
  };
  return Start(std::move(options));
}

MemoryHolder::MemoryHolder(Options options, OwnedFd socket)
    : options_(std::move(options)), socket_(std::move(socket)) {
  thread_ = std::thread([this] { Run(); });
}

MemoryHolder::~MemoryHolder() {
  shutdown(socket_.get(), SHUT_RDWR);
  thread_.join();
}

void MemoryHolder::Add(const std::string& job, HeldMemory piece) {
  MutexLock lock(&mu_);
  held_[job][{std::move(piece.worker_id), piece.slot}] = std::move(piece.fd);
}

std::vector<HeldMemory> MemoryHolder::Held(const std::string& job) const {
  std::vector<HeldMemory> all;
  MutexLock lock(&mu_);
  const auto it = held_.find(job);
  if (it == held_.end()) return all;
  for (const auto& [key, fd] : it->second) {
    OwnedFd copy(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy.open()) continue;
    all.push_back({.worker_id = key.first, .slot = key.second, .fd = std::move(copy)});
  }
  return all;
}

void MemoryHolder::Drop(const std::string& job) {
  MutexLock lock(&mu_);
  held_.erase(job);
}

std::vector<std::string> MemoryHolder::Jobs() const {
  std::vector<std::string> jobs;
  MutexLock lock(&mu_);
  for (const auto& [job, held] : held_) jobs.push_back(job);
  return jobs;
}

void MemoryHolder::Run() {
  while (true) {
    const OwnedFd connection(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.open()) {
      Serve(connection.get());
      continue;
    }
    if (errno == EINVAL) return;  // the holder is being destroyed
    if (errno == EINTR || errno == ECONNABORTED) continue;
    // The process has no free descriptor at the moment.
    poll(nullptr, 0, kRetryMilliseconds);
  }
}

void MemoryHolder::Serve(int connection) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience));
  std::optional<Client> client;
  if (peer.uid == geteuid()) client = options_.client_of(peer.pid);
  if (!client.has_value()) {
    return Answer(connection, absl::PermissionDeniedError(
                                  absl::StrCat("process ", peer.pid, " of user ", peer.uid,
                                               " is not a worker of this agent")));
  }
  OwnedFd fd;
  const absl::StatusOr<HeldMemoryMessage> request = ReceiveHeldMemoryMessage(connection, &fd);
  if (!request.ok()) return Answer(connection, request.status());
  switch (request->kind) {
    case HeldMemoryMessage::kHold:
      return Hold(connection, *client, *request, std::move(fd));
    case HeldMemoryMessage::kTake:
      return Give(connection, *client);
    case HeldMemoryMessage::kDrop: {
      {
        MutexLock lock(&mu_);
        held_[client->job].erase({request->text, request->slot});
      }
      Answer(connection, absl::OkStatus());
      if (options_.on_dropped != nullptr) options_.on_dropped(request->text, request->slot);
      return;
    }
    case HeldMemoryMessage::kReentry:
      if (options_.on_reentry != nullptr && !client->worker.empty() &&
          request->slot <= static_cast<int32_t>(Reentry::kReturned)) {
        options_.on_reentry(client->worker, static_cast<Reentry>(request->slot));
        return Answer(connection, absl::OkStatus());
      }
      return Answer(connection, absl::InvalidArgumentError("this agent does not use re-entry"));
    default:
      return Answer(connection,
                    absl::InvalidArgumentError("the agent does not accept messages of this kind"));
  }
}

void MemoryHolder::Hold(int connection, const Client& client, const HeldMemoryMessage& request,
                        OwnedFd fd) {
  HeldMemory piece = {.worker_id = client.worker.empty() ? request.text : client.worker,
                      .slot = request.slot,
                      .fd = std::move(fd)};
  absl::Status fits = CheckHoldableMemory(piece.fd.get());
  if (piece.worker_id.empty()) {
    fits = absl::InvalidArgumentError("the message does not name the owner of the memory");
  }
  OwnedFd copy;
  if (fits.ok()) {
    if (options_.on_held != nullptr) copy = OwnedFd(fcntl(piece.fd.get(), F_DUPFD_CLOEXEC, 0));
    Add(client.job, {.worker_id = piece.worker_id, .slot = piece.slot, .fd = std::move(piece.fd)});
  }
  Answer(connection, fits);
  if (!copy.open()) return;
  piece.fd = std::move(copy);
  options_.on_held(piece);
}

void MemoryHolder::Give(int connection, const Client& client) {
  for (const HeldMemory& held : Held(client.job)) {
    HeldMemoryMessage piece;
    piece.kind = HeldMemoryMessage::kMemory;
    piece.slot = held.slot;
    piece.set_text(held.worker_id);
    if (!SendHeldMemoryMessage(connection, piece, held.fd.get()).ok()) return;
  }
  Answer(connection, absl::OkStatus());
}

}  // namespace muster::agent
