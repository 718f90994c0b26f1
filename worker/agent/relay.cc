#include "worker/agent/relay.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/server_callback.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// One call of a worker, between gRPC and the operation that it became. Either side may be first:
// the answer, or the caller that goes away.
template <typename Request, typename Reply>
class RelayedCall final : public ServerUnaryReactor {
 public:
  using Put = Request* (v1::Op::*)();
  using Get = const Reply& (v1::OpResult::*)() const;

  static RelayedCall* Start(OpSender& upstream, const Request* request, Reply* reply, Put put,
                            Get get) {
    auto* const call = new RelayedCall(reply);
    v1::Op op;
    *(op.*put)() = *request;
    upstream.Submit(std::move(op), [slot = call->slot_, get](const v1::OpResult& result) {
      MutexLock lock(&slot->mu);
      if (slot->call == nullptr) return;
      if (!result.has_error()) *slot->call->reply_ = (result.*get)();
      slot->Finish(result.has_error() ? rpc::OpErrorToGrpc(result.error()) : grpc::Status::OK);
    });
    return call;
  }

  void OnCancel() override {
    MutexLock lock(&slot_->mu);
    if (slot_->call != nullptr) {
      slot_->Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller went away"));
    }
  }
  void OnDone() override {
    { MutexLock lock(&slot_->mu); }  // after Finish
    delete this;
  }

 private:
  struct Slot {
    void Finish(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
      RelayedCall* const finished = std::exchange(call, nullptr);
      finished->ServerUnaryReactor::Finish(status);
    }
    Mutex mu;
    RelayedCall* call ABSL_GUARDED_BY(mu) = nullptr;  // null once it is finished
  };

  explicit RelayedCall(Reply* reply) : reply_(reply) {
    MutexLock lock(&slot_->mu);
    slot_->call = this;
  }

  Reply* const reply_;
  const std::shared_ptr<Slot> slot_ = std::make_shared<Slot>();
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

class MembershipRelay final : public v1::Membership::CallbackService {
 public:
  explicit MembershipRelay(OpSender& upstream) : upstream_(upstream) {}
  MUSTER_RELAYED(Heartbeat, heartbeat)
  MUSTER_RELAYED(ReportExit, report_exit)
  MUSTER_RELAYED(GetMembers, get_members)
  MUSTER_RELAYED(AgreeAlive, agree_alive)
  MUSTER_RELAYED(Quarantine, quarantine)

 private:
  OpSender& upstream_;
};

// `muster status` in a worker's surroundings.
class AdminRelay final : public v1::Admin::CallbackService {
 public:
  explicit AdminRelay(const std::shared_ptr<grpc::Channel>& channel)
      : stub_(v1::Admin::NewStub(channel)) {}
  ServerUnaryReactor* Status(CallbackServerContext* context, const v1::StatusRequest* request,
                             v1::StatusReply* reply) override {
    ServerUnaryReactor* const reactor = context->DefaultReactor();
    auto call = std::make_shared<grpc::ClientContext>();
    call->set_deadline(context->deadline());
    stub_->async()->Status(call.get(), request, reply, [call, reactor](const grpc::Status& status) {
      reactor->Finish(status);
    });
    return reactor;
  }

 private:
  const std::unique_ptr<v1::Admin::Stub> stub_;
};

#undef MUSTER_RELAYED
#undef MUSTER_RELAYED_NAMED

// A fresh folder below `parent` that only this user may enter; empty and `why` if that fails.
std::string MakePrivateFolder(const std::string& parent, std::string* why) {
  std::string folder = absl::StrCat(parent, "/muster-XXXXXX");
  sockaddr_un address;
  if (folder.size() + std::strlen("/relay") >= sizeof(address.sun_path)) {
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
    // Not XDG_RUNTIME_DIR: it is removed when the user logs out, and jobs go on.
    const char* const value = getenv("TMPDIR");
    if (value != nullptr && value[0] == '/') parents.push_back(value);
    parents.push_back("/tmp");
  }
  std::string why;
  for (const std::string& parent : parents) {
    const std::string folder = MakePrivateFolder(parent, &why);
    if (folder.empty()) continue;
    relay->services_.clear();
    relay->services_.push_back(std::make_unique<RendezvousRelay>(*upstream));
    relay->services_.push_back(std::make_unique<BarrierRelay>(*upstream));
    relay->services_.push_back(std::make_unique<KeyValueRelay>(*upstream));
    relay->services_.push_back(std::make_unique<TriggersRelay>(*upstream));
    relay->services_.push_back(std::make_unique<MembershipRelay>(*upstream));
    if (options.coordinator != nullptr) {
      relay->services_.push_back(std::make_unique<AdminRelay>(options.coordinator));
    }
    std::vector<grpc::Service*> services;
    for (const auto& service : relay->services_) services.push_back(service.get());
    rpc::ServerOptions server;
    server.listen = absl::StrCat("unix:", folder, "/relay");
    absl::StatusOr<std::unique_ptr<rpc::Server>> started = rpc::Server::Start(server, services);
    if (started.ok()) {
      relay->folder_ = folder;
      relay->server_ = *std::move(started);
      return relay;
    }
    // Not every file system takes sockets.
    absl::StrAppend(&why, why.empty() ? "" : "; ", parent, ": ", started.status().message());
    rmdir(folder.c_str());
  }
  return absl::UnavailableError(absl::StrCat("no folder for the agent's socket: ", why,
                                             " (set TMPDIR to a folder that can be written)"));
}

Relay::~Relay() {
  if (server_ != nullptr) server_->Shutdown(absl::ZeroDuration());
  if (folder_.empty()) return;
  unlink(absl::StrCat(folder_, "/relay").c_str());
  rmdir(folder_.c_str());
}

}  // namespace muster::agent
