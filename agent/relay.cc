#include "agent/relay.h"

#include <fcntl.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/server_callback.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/checkpoint.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// One call of a worker, between gRPC and its operation. Either the answer or the end of the caller
// may come first. gRPC keeps a reference until OnDone.
class Call : public ServerUnaryReactor, public std::enable_shared_from_this<Call> {
 public:
  // Ends the call unless it has ended; first, `fill` writes the reply.
  template <typename Fill>
  void End(const grpc::Status& status, Fill fill) {
    MutexLock lock(&mu_);
    if (std::exchange(ended_, true)) return;
    fill();
    Finish(status);
  }
  void OnCancel() override {
    End(grpc::Status(grpc::StatusCode::CANCELLED, "the caller disconnected"), [] {});
  }
  void OnDone() final {
    std::shared_ptr<Call> self;
    MutexLock lock(&mu_);  // waits for Finish
    self = std::move(self_);
  }

 protected:
  void Begin() {
    MutexLock lock(&mu_);
    self_ = shared_from_this();
  }

 private:
  Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<Call> self_ ABSL_GUARDED_BY(mu_);
};

// Whether nothing depends on `op` once its caller has gone away. During an outage the agent would
// otherwise keep every poll of every worker, to send them all when the outage is over.
bool IsForItsCallerAlone(const v1::Op& op) {
  switch (op.kind_case()) {
    case v1::Op::kTxn:
      return OnlyReads(op.txn());
    case v1::Op::kPollTriggers:
      return op.poll_triggers().acked_size() == 0 && op.poll_triggers().pending_size() == 0;
    case v1::Op::kWait:
    case v1::Op::kGetRankTable:
    case v1::Op::kDescribeBarrier:
    case v1::Op::kListBarriers:
    case v1::Op::kStragglerReport:
    case v1::Op::kGetMembers:
    case v1::Op::kCaptureStacks:
    case v1::Op::kResolveCheckpoint:
    case v1::Op::kListCheckpoints:
      return true;
    default:
      return false;
  }
}

template <typename Request, typename Reply>
class RelayedCall final : public Call {
 public:
  using Put = Request* (v1::Op::*)();
  using Get = const Reply& (v1::OpResult::*)() const;

  static ServerUnaryReactor* Start(OpSender& upstream, const Request* request, Reply* reply,
                                   Put put, Get get) {
    auto call = std::make_shared<RelayedCall>();
    call->Begin();
    v1::Op op;
    *(op.*put)() = *request;
    const bool forget = IsForItsCallerAlone(op);
    const uint64_t op_id =
        upstream.Submit(std::move(op), [call, reply, get](const v1::OpResult& result) {
          const bool failed = result.has_error();
          call->End(failed ? rpc::OpErrorToGrpc(result.error()) : grpc::Status::OK, [&] {
            if (!failed) *reply = (result.*get)();
          });
        });
    // gRPC calls OnCancel only once the reactor has been returned.
    if (forget) {
      call->upstream_ = &upstream;
      call->op_id_ = op_id;
    }
    return call.get();
  }
  void OnCancel() override {
    Call::OnCancel();
    if (upstream_ != nullptr) upstream_->Forget(op_id_);
  }

 private:
  OpSender* upstream_ = nullptr;  // null: the operation continues without its caller
  uint64_t op_id_ = 0;
};

#define MUSTER_RELAYED_NAMED(Name, Message, member)                                     \
  ServerUnaryReactor* Name(CallbackServerContext*, const v1::Message##Request* request, \
                           v1::Message##Reply* reply) override {                        \
    return RelayedCall<v1::Message##Request, v1::Message##Reply>::Start(                \
        upstream_, request, reply, &v1::Op::mutable_##member, &v1::OpResult::member);   \
  }
#define MUSTER_RELAYED(Name, member) MUSTER_RELAYED_NAMED(Name, Name, member)

class RendezvousRelay final : public v1::Rendezvous::CallbackService {
 public:
  explicit RendezvousRelay(OpSender& upstream) : upstream_(upstream) {}
  MUSTER_RELAYED(Join, join)
  MUSTER_RELAYED(GetRankTable, get_rank_table)
  MUSTER_RELAYED(Leave, leave)
  MUSTER_RELAYED(EndGeneration, end_generation)

 private:
  OpSender& upstream_;
};

class BarrierRelay final : public v1::Barrier::CallbackService {
 public:
  explicit BarrierRelay(OpSender& upstream) : upstream_(upstream) {}
  MUSTER_RELAYED(Arrive, arrive)
  MUSTER_RELAYED_NAMED(Cancel, CancelBarrier, cancel_barrier)
  MUSTER_RELAYED_NAMED(Describe, DescribeBarrier, describe_barrier)
  MUSTER_RELAYED_NAMED(List, ListBarriers, list_barriers)
  MUSTER_RELAYED(StragglerReport, straggler_report)

 private:
  OpSender& upstream_;
};

class KeyValueRelay final : public v1::KeyValueStore::CallbackService {
 public:
  explicit KeyValueRelay(OpSender& upstream) : upstream_(upstream) {}
  MUSTER_RELAYED(Txn, txn)
  MUSTER_RELAYED(Wait, wait)

 private:
  OpSender& upstream_;
};

class TriggersRelay final : public v1::Triggers::CallbackService {
 public:
  explicit TriggersRelay(OpSender& upstream) : upstream_(upstream) {}
  MUSTER_RELAYED_NAMED(Raise, RaiseTrigger, raise_trigger)
  MUSTER_RELAYED_NAMED(Poll, PollTriggers, poll_triggers)

 private:
  OpSender& upstream_;
};

class CheckpointsRelay final : public v1::Checkpoints::CallbackService {
 public:
  explicit CheckpointsRelay(OpSender& upstream) : upstream_(upstream) {}
  MUSTER_RELAYED_NAMED(Begin, BeginCheckpoint, begin_checkpoint)
  MUSTER_RELAYED(ReportShards, report_shards)
  MUSTER_RELAYED_NAMED(Seal, SealCheckpoint, seal_checkpoint)
  MUSTER_RELAYED_NAMED(Publish, PublishCheckpoint, publish_checkpoint)
  MUSTER_RELAYED_NAMED(Abort, AbortCheckpoint, abort_checkpoint)
  MUSTER_RELAYED_NAMED(Deleted, CheckpointDeleted, checkpoint_deleted)
  MUSTER_RELAYED_NAMED(Resolve, ResolveCheckpoint, resolve_checkpoint)
  MUSTER_RELAYED_NAMED(List, ListCheckpoints, list_checkpoints)
  MUSTER_RELAYED_NAMED(Mark, MarkCheckpoint, mark_checkpoint)
  MUSTER_RELAYED_NAMED(Verify, VerifyCheckpoint, verify_checkpoint)
  MUSTER_RELAYED_NAMED(Collect, CollectCheckpoints, collect_checkpoints)

 private:
  OpSender& upstream_;
};

class MembershipRelay final : public v1::Membership::CallbackService {
 public:
  explicit MembershipRelay(OpSender& upstream) : upstream_(upstream) {}
  MUSTER_RELAYED(Heartbeat, heartbeat)
  MUSTER_RELAYED(ReportExit, report_exit)
  MUSTER_RELAYED(GetMembers, get_members)
  MUSTER_RELAYED(AgreeAlive, agree_alive)
  MUSTER_RELAYED(CaptureStacks, capture_stacks)
  MUSTER_RELAYED(Quarantine, quarantine)

 private:
  OpSender& upstream_;
};

// A call that is forwarded to the coordinator unchanged.
class ForwardedStatus final : public Call {
 public:
  static ServerUnaryReactor* Start(v1::Admin::Stub& stub, const CallbackServerContext& context,
                                   const v1::StatusRequest& request, v1::StatusReply* reply) {
    auto call = std::make_shared<ForwardedStatus>();
    call->Begin();
    call->request_ = request;
    call->upstream_.set_deadline(
        std::min(context.deadline(), std::chrono::system_clock::now() + kLongestStatus));
    stub.async()->Status(&call->upstream_, &call->request_, &call->reply_,
                         [call, reply](const grpc::Status& status) {
                           call->End(status, [&] { reply->Swap(&call->reply_); });
                         });
    return call.get();
  }
  void OnCancel() override {
    upstream_.TryCancel();
    Call::OnCancel();
  }

 private:
  static constexpr std::chrono::seconds kLongestStatus{60};

  grpc::ClientContext upstream_;
  v1::StatusRequest request_;
  v1::StatusReply reply_;  // the caller's reply is destroyed with the caller
};

// Admin.Status, for `muster status` in a worker's environment.
class AdminRelay final : public v1::Admin::CallbackService {
 public:
  explicit AdminRelay(const std::shared_ptr<grpc::Channel>& channel)
      : stub_(v1::Admin::NewStub(channel)) {}
  ServerUnaryReactor* Status(CallbackServerContext* context, const v1::StatusRequest* request,
                             v1::StatusReply* reply) override {
    return ForwardedStatus::Start(*stub_, *context, *request, reply);
  }

 private:
  const std::unique_ptr<v1::Admin::Stub> stub_;
};

#undef MUSTER_RELAYED
#undef MUSTER_RELAYED_NAMED

constexpr char kPrefix[] = "muster-";
constexpr char kSuffix[] = "XXXXXX";
constexpr char kSocket[] = "relay";

// Returns -1 if it cannot be locked.
int LockFolder(const std::string& folder, int how) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd >= 0 && flock(fd, how) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

// Removes the folders below `parent` that killed agents of this user left.
void RemoveAbandoned(const std::string& parent) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, kPrefix) ||
        name.size() != std::strlen(kPrefix) + std::strlen(kSuffix)) {
      continue;
    }
    const std::string folder = JoinPath(parent, name);
    const int lock = LockFolder(folder, LOCK_EX | LOCK_NB);
    if (lock < 0) continue;
    struct stat of_folder, of_socket;
    // A folder without a socket may belong to another agent that is still making it.
    if (fstat(lock, &of_folder) == 0 && of_folder.st_uid == geteuid() &&
        fstatat(lock, kSocket, &of_socket, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISSOCK(of_socket.st_mode) && unlinkat(lock, kSocket, 0) == 0) {
      rmdir(folder.c_str());
    }
    close(lock);
  }
}

// Makes a new folder below `parent` that only this user may enter; returns an empty text and sets
// `why` if that fails.
std::string MakePrivateFolder(const std::string& parent, std::string* why) {
  std::string folder = absl::StrCat(parent, "/", kPrefix, kSuffix);
  sockaddr_un address;
  if (folder.size() + 1 + std::strlen(kSocket) >= sizeof(address.sun_path)) {
    absl::StrAppend(why, why->empty() ? "" : "; ", parent, ": the path is too long for a socket");
    return "";
  }
  // mkdtemp gives mode 0700.
  if (mkdtemp(folder.data()) == nullptr) {
    absl::StrAppend(why, why->empty() ? "" : "; ", parent, ": ", std::strerror(errno));
    return "";
  }
  return folder;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Relay>> Relay::Start(const Options& options, OpSender* upstream) {
  std::unique_ptr<Relay> relay(new Relay());
  std::vector<std::string> parents;
  if (!options.parent.empty()) {
    parents.push_back(options.parent);
  } else {
    // Not XDG_RUNTIME_DIR: it is removed when the user logs out, and jobs continue.
    const char* const value = getenv("TMPDIR");
    if (value != nullptr && value[0] == '/') parents.push_back(value);
    parents.push_back("/tmp");
  }
  std::string why;
  for (const std::string& parent : parents) {
    RemoveAbandoned(parent);
    const std::string folder = MakePrivateFolder(parent, &why);
    if (folder.empty()) continue;
    // Waits at most for a process that checks whether the folder is abandoned, and finds no socket.
    const int lock = LockFolder(folder, LOCK_EX);
    relay->services_.clear();
    relay->services_.push_back(std::make_unique<RendezvousRelay>(*upstream));
    relay->services_.push_back(std::make_unique<BarrierRelay>(*upstream));
    relay->services_.push_back(std::make_unique<KeyValueRelay>(*upstream));
    relay->services_.push_back(std::make_unique<TriggersRelay>(*upstream));
    relay->services_.push_back(std::make_unique<CheckpointsRelay>(*upstream));
    relay->services_.push_back(std::make_unique<MembershipRelay>(*upstream));
    if (options.coordinator != nullptr) {
      relay->services_.push_back(std::make_unique<AdminRelay>(options.coordinator));
    }
    std::vector<grpc::Service*> services;
    for (const auto& service : relay->services_) services.push_back(service.get());
    rpc::ServerOptions server;
    server.listen = absl::StrCat("unix:", JoinPath(folder, kSocket));
    server.only_user = geteuid();
    absl::StatusOr<std::unique_ptr<rpc::Server>> started = rpc::Server::Start(server, services);
    if (started.ok()) {
      relay->folder_ = folder;
      relay->lock_ = lock;
      relay->server_ = *std::move(started);
      return relay;
    }
    // Not every file system supports sockets.
    absl::StrAppend(&why, why.empty() ? "" : "; ", parent, ": ", started.status().message());
    rmdir(folder.c_str());
    if (lock >= 0) close(lock);
  }
  return absl::UnavailableError(
      absl::StrCat("no folder for the agent's socket: ", why,
                   " (set TMPDIR, of a submitted job that of its node's agent, to a "
                   "folder that can be written)"));
}

Relay::~Relay() {
  if (server_ != nullptr) server_->Shutdown(absl::ZeroDuration());
  if (folder_.empty()) return;
  unlink(JoinPath(folder_, kSocket).c_str());
  rmdir(folder_.c_str());
  if (lock_ >= 0) close(lock_);
}

}  // namespace muster::agent
