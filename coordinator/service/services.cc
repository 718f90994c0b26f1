#include "coordinator/service/services.h"

#include <grpcpp/support/server_callback.h>

#include <deque>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "base/mutex.h"
#include "coordinator/service/agent_link.h"
#include "coordinator/service/unary_call.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "proto/muster/v1/watch.grpc.pb.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// One method of a service that the core answers.
#define MUSTER_CORE_METHOD(Name, member)                                                     \
 public:                                                                                     \
  ServerUnaryReactor* Name(CallbackServerContext* context, const v1::Name##Request* request, \
                           v1::Name##Reply* reply) override {                                \
    return UnaryCall<v1::Name##Request, v1::Name##Reply>::Start(                             \
        engine_, Name##_metrics_, context, request, reply, &v1::Op::mutable_##member,        \
        &v1::OpResult::member);                                                              \
  }                                                                                          \
                                                                                             \
 private:                                                                                    \
  MethodMetrics* const Name##_metrics_ = metrics_.Add(Contract::service_full_name(), #Name, "unary")

// As above, where the messages are not named after the method.
#define MUSTER_CORE_METHOD_NAMED(Name, Message, member)                                         \
 public:                                                                                        \
  ServerUnaryReactor* Name(CallbackServerContext* context, const v1::Message##Request* request, \
                           v1::Message##Reply* reply) override {                                \
    return UnaryCall<v1::Message##Request, v1::Message##Reply>::Start(                          \
        engine_, Name##_metrics_, context, request, reply, &v1::Op::mutable_##member,           \
        &v1::OpResult::member);                                                                 \
  }                                                                                             \
                                                                                                \
 private:                                                                                       \
  MethodMetrics* const Name##_metrics_ = metrics_.Add(Contract::service_full_name(), #Name, "unary")

class RendezvousService final : public v1::Rendezvous::CallbackService {
  using Contract = v1::Rendezvous;

 public:
  RendezvousService(Engine& engine, RpcMetrics& metrics) : engine_(engine), metrics_(metrics) {}

 private:
  Engine& engine_;
  RpcMetrics& metrics_;
  MUSTER_CORE_METHOD(Join, join);
  MUSTER_CORE_METHOD(GetRankTable, get_rank_table);
  MUSTER_CORE_METHOD(Leave, leave);
  MUSTER_CORE_METHOD(EndGeneration, end_generation);
};

class BarrierService final : public v1::Barrier::CallbackService {
  using Contract = v1::Barrier;

 public:
  BarrierService(Engine& engine, RpcMetrics& metrics) : engine_(engine), metrics_(metrics) {}

 private:
  Engine& engine_;
  RpcMetrics& metrics_;
  MUSTER_CORE_METHOD(Arrive, arrive);
  MUSTER_CORE_METHOD_NAMED(Cancel, CancelBarrier, cancel_barrier);
  MUSTER_CORE_METHOD_NAMED(Describe, DescribeBarrier, describe_barrier);
  MUSTER_CORE_METHOD_NAMED(List, ListBarriers, list_barriers);
  MUSTER_CORE_METHOD(StragglerReport, straggler_report);
};

class KeyValueService final : public v1::KeyValueStore::CallbackService {
  using Contract = v1::KeyValueStore;

 public:
  KeyValueService(Engine& engine, RpcMetrics& metrics) : engine_(engine), metrics_(metrics) {}

 private:
  Engine& engine_;
  RpcMetrics& metrics_;
  MUSTER_CORE_METHOD(Txn, txn);
  MUSTER_CORE_METHOD(Wait, wait);
};

class TriggersService final : public v1::Triggers::CallbackService {
  using Contract = v1::Triggers;

 public:
  TriggersService(Engine& engine, RpcMetrics& metrics) : engine_(engine), metrics_(metrics) {}

 private:
  Engine& engine_;
  RpcMetrics& metrics_;
  MUSTER_CORE_METHOD_NAMED(Raise, RaiseTrigger, raise_trigger);
  MUSTER_CORE_METHOD_NAMED(Poll, PollTriggers, poll_triggers);
};

class MembershipService final : public v1::Membership::CallbackService {
  using Contract = v1::Membership;

 public:
  MembershipService(Engine& engine, RpcMetrics& metrics) : engine_(engine), metrics_(metrics) {}

 private:
  Engine& engine_;
  RpcMetrics& metrics_;
  MUSTER_CORE_METHOD(Heartbeat, heartbeat);
  MUSTER_CORE_METHOD(ReportExit, report_exit);
  MUSTER_CORE_METHOD(GetMembers, get_members);
  MUSTER_CORE_METHOD(AgreeAlive, agree_alive);
  MUSTER_CORE_METHOD(Quarantine, quarantine);
};

// A unary call that is answered outside of the core's operations. The engine calls back on its own
// thread or the journal's.
class SimpleCall final : public grpc::ServerUnaryReactor {
 public:
  explicit SimpleCall(MethodMetrics* metrics) : metrics_(metrics) { metrics->Started(); }
  void Done(const absl::Status& status) {
    metrics_->Handled(static_cast<int>(status.code()), absl::Now() - start_);
    order_.Mark();
    Finish(rpc::ToGrpc(status));
  }
  void OnDone() override {
    order_.Mark();
    delete this;
  }

 private:
  MethodMetrics* const metrics_;
  const absl::Time start_ = absl::Now();
  ThreadOrder order_;
};

class AdminService final : public v1::Admin::CallbackService {
  using Contract = v1::Admin;

 public:
  AdminService(Engine& engine, RpcMetrics& metrics, absl::Time started)
      : engine_(engine),
        started_(started),
        status_metrics_(metrics.Add(Contract::service_full_name(), "Status", "unary")),
        snapshot_metrics_(metrics.Add(Contract::service_full_name(), "Snapshot", "unary")) {}

  ServerUnaryReactor* Status(CallbackServerContext* context, const v1::StatusRequest*,
                             v1::StatusReply* reply) override {
    auto* call = new SimpleCall(status_metrics_);
    if (const absl::Status status = CheckDeadline(*context); !status.ok()) {
      call->Done(status);
      return call;
    }
    engine_.WithCore([this, call, reply](Core* core) {
      if (core == nullptr) {
        call->Done(rpc::ErrorWithReason(absl::StatusCode::kUnavailable,
                                        "the coordinator is stopping", v1::ERROR_REASON_STOPPING,
                                        true));
        return;
      }
      core->FillStatus(reply);
      reply->set_version(kVersion);
      reply->mutable_uptime()->set_seconds(absl::ToInt64Seconds(absl::Now() - started_));
      reply->set_agents(static_cast<int32_t>(engine_.agents()));
      reply->set_journal(engine_.journal().description());
      call->Done(absl::OkStatus());
    });
    return call;
  }

  ServerUnaryReactor* Snapshot(CallbackServerContext* context, const v1::SnapshotRequest*,
                               v1::SnapshotReply* reply) override {
    auto* call = new SimpleCall(snapshot_metrics_);
    if (const absl::Status status = CheckDeadline(*context); !status.ok()) {
      call->Done(status);
      return call;
    }
    engine_.Snapshot([call, reply](absl::StatusOr<uint64_t> revision) {
      if (revision.ok()) reply->set_revision(*revision);
      call->Done(revision.status());
    });
    return call;
  }

 private:
  Engine& engine_;
  const absl::Time started_;
  MethodMetrics* const status_metrics_;
  MethodMetrics* const snapshot_metrics_;
};

// A watch stream. gRPC owns one share of it (until OnDone), the engine another.
class WatchStream final : public grpc::ServerWriteReactor<v1::WatchBatch>,
                          public WatchLink,
                          public std::enable_shared_from_this<WatchStream> {
 public:
  WatchStream(Engine& engine, MethodMetrics* metrics) : engine_(engine), metrics_(metrics) {
    metrics->Started();
  }

  void Open(const v1::WatchRequest& request) {
    self_ = shared_from_this();
    order_.Mark();
    engine_.WatchOpen(self_, request);
  }

  void Write(v1::WatchBatch batch) override {
    MutexLock lock(&mu_);
    if (finished_) return;
    batch_ = std::move(batch);
    StartWrite(&batch_);
  }
  void Close(const absl::Status& status) override {
    MutexLock lock(&mu_);
    if (finished_) return;
    finished_ = true;
    metrics_->Handled(static_cast<int>(status.code()), absl::Now() - start_);
    Finish(rpc::ToGrpc(status));
  }

 private:
  void OnWriteDone(bool ok) override {
    order_.Mark();
    if (ok) {
      engine_.WatchWritable(self_);
    } else {
      Close(absl::CancelledError("the watcher went away"));
    }
  }
  void OnCancel() override {
    order_.Mark();
    Close(absl::CancelledError("the watcher went away"));
  }
  void OnDone() override {
    order_.Mark();
    engine_.WatchClosed(self_);
    { MutexLock lock(&mu_); }  // after the last Write or Close, also for ThreadSanitizer
    const std::shared_ptr<WatchStream> last = std::move(self_);
  }

  Engine& engine_;
  MethodMetrics* const metrics_;
  const absl::Time start_ = absl::Now();
  std::shared_ptr<WatchStream> self_;
  ThreadOrder order_;
  Mutex mu_;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  v1::WatchBatch batch_;  // while a write is in flight, gRPC's
};

class WatchService final : public v1::Watch::CallbackService {
  using Contract = v1::Watch;

 public:
  WatchService(Engine& engine, RpcMetrics& metrics)
      : engine_(engine),
        metrics_(metrics.Add(Contract::service_full_name(), "Watch", "server_stream")) {}

  grpc::ServerWriteReactor<v1::WatchBatch>* Watch(CallbackServerContext*,
                                                  const v1::WatchRequest* request) override {
    auto stream = std::make_shared<WatchStream>(engine_, metrics_);
    stream->Open(*request);
    return stream.get();
  }

 private:
  Engine& engine_;
  MethodMetrics* const metrics_;
};

// An agent's stream, in raw bytes: frames come in parsed on gRPC's threads and go out as the bytes
// the engine made.
class AgentStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                          public AgentLink,
                          public std::enable_shared_from_this<AgentStream> {
 public:
  AgentStream(Engine& engine, MethodMetrics* metrics, std::string peer)
      : engine_(engine), metrics_(metrics), peer_(std::move(peer)) {
    metrics->Started();
  }

  void Open() {
    self_ = shared_from_this();
    order_.Mark();
    StartRead(&in_);
  }

  void Bind(std::shared_ptr<FrameSource> source) override {
    MutexLock lock(&mu_);
    source_ = std::move(source);
  }
  bool TryWrite(absl::FunctionRef<grpc::ByteBuffer()> next) override {
    MutexLock lock(&mu_);
    if (finished_ || writing_) return false;
    writing_ = true;
    out_ = next();
    StartWrite(&out_);
    return true;
  }
  void Close(const absl::Status& status) override {
    MutexLock lock(&mu_);
    if (finished_) return;
    finished_ = true;
    metrics_->Handled(static_cast<int>(status.code()), absl::Now() - start_);
    Finish(rpc::ToGrpc(status));
  }

 private:
  void OnReadDone(bool ok) override {
    order_.Mark();
    if (!ok) {
      engine_.AgentClosed(self_);
      Close(absl::OkStatus());
      return;
    }
    auto frame = std::make_unique<v1::AgentFrame>();
    const grpc::Status parsed =
        grpc::SerializationTraits<v1::AgentFrame>::Deserialize(&in_, frame.get());
    if (!parsed.ok()) {
      engine_.AgentClosed(self_);
      Close(rpc::ErrorWithReason(absl::StatusCode::kInvalidArgument, "a frame is not an AgentFrame",
                                 v1::ERROR_REASON_BAD_FIELD));
      return;
    }
    engine_.AgentFrame(self_, std::move(frame), peer_);
    in_.Clear();
    order_.Mark();
    StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    order_.Mark();
    std::shared_ptr<FrameSource> source;
    {
      MutexLock lock(&mu_);
      writing_ = false;
      if (ok) source = source_;
    }
    // Not under the lock: it comes back through TryWrite.
    if (source != nullptr) source->Writable();
  }
  void OnDone() override {
    order_.Mark();
    engine_.AgentClosed(self_);
    std::shared_ptr<FrameSource> source;
    {
      MutexLock lock(&mu_);
      source.swap(source_);
    }
    const std::shared_ptr<AgentStream> last = std::move(self_);
  }

  Engine& engine_;
  MethodMetrics* const metrics_;
  const std::string peer_;
  const absl::Time start_ = absl::Now();
  std::shared_ptr<AgentStream> self_;
  ThreadOrder order_;
  grpc::ByteBuffer in_;  // gRPC's while a read is in flight
  Mutex mu_;
  std::shared_ptr<FrameSource> source_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  grpc::ByteBuffer out_ ABSL_GUARDED_BY(mu_);
};

class SessionService final
    : public v1::Session::WithRawCallbackMethod_Attach<v1::Session::Service> {
 public:
  SessionService(Engine& engine, RpcMetrics& metrics)
      : engine_(engine),
        metrics_(metrics.Add(v1::Session::service_full_name(), "Attach", "bidi_stream")) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Attach(
      CallbackServerContext* context) override {
    auto stream = std::make_shared<AgentStream>(engine_, metrics_, context->peer());
    stream->Open();
    return stream.get();
  }

 private:
  Engine& engine_;
  MethodMetrics* const metrics_;
};

}  // namespace

std::vector<std::unique_ptr<grpc::Service>> MakeServices(Engine* engine, RpcMetrics* metrics,
                                                         absl::Time started) {
  std::vector<std::unique_ptr<grpc::Service>> services;
  services.push_back(std::make_unique<SessionService>(*engine, *metrics));
  services.push_back(std::make_unique<RendezvousService>(*engine, *metrics));
  services.push_back(std::make_unique<BarrierService>(*engine, *metrics));
  services.push_back(std::make_unique<KeyValueService>(*engine, *metrics));
  services.push_back(std::make_unique<TriggersService>(*engine, *metrics));
  services.push_back(std::make_unique<MembershipService>(*engine, *metrics));
  services.push_back(std::make_unique<WatchService>(*engine, *metrics));
  services.push_back(std::make_unique<AdminService>(*engine, *metrics, started));
  return services;
}

}  // namespace muster::coordinator
