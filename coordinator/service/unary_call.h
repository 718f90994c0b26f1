#ifndef MUSTER_COORDINATOR_SERVICE_UNARY_CALL_H_
#define MUSTER_COORDINATOR_SERVICE_UNARY_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "coordinator/service/engine.h"
#include "coordinator/service/rpc_metrics.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/status.h"

namespace muster::coordinator {

// gRPC calls a reactor's methods one after the other (construction first, OnDone last), on changing threads.
// ThreadSanitizer does not see into gRPC: marking those points says to it what holds anyway. Costs an atomic add.
class ThreadOrder {
 public:
  void Mark() { marks_.fetch_add(1, std::memory_order_acq_rel); }

 private:
  std::atomic<uint32_t> marks_{0};
};

// OK if the caller set a deadline, else INVALID_ARGUMENT / DEADLINE_REQUIRED.
absl::Status CheckDeadline(const grpc::CallbackServerContext& context);

// One unary call that the core answers: becomes an Op, waits in the engine's table, and finishes
// with the answer. A cancelled call is abandoned. Deletes itself when gRPC is done with it.
//
// `put` moves the request into an Op; `get` is the accessor of the reply in an OpResult, `has`
// whether it is there.
template <typename Request, typename Reply>
class UnaryCall final : public grpc::ServerUnaryReactor, public CallSink {
 public:
  using Put = Request* (v1::Op::*)();
  using Get = const Reply& (v1::OpResult::*)() const;

  static UnaryCall* Start(Engine& engine, MethodMetrics* metrics,
                          grpc::CallbackServerContext* context, const Request* request,
                          Reply* reply, Put put, Get get) {
    auto* call = new UnaryCall(engine, metrics, reply, get);
    metrics->Started();
    if (const absl::Status status = CheckDeadline(*context); !status.ok()) {
      call->Done(status);
      return call;
    }
    auto op = std::make_unique<v1::Op>();
    *((*op).*put)() = *request;
    call->engine_.Call(call->id_, std::move(op), context->peer(), call);
    return call;
  }

  void OnAnswer(const std::shared_ptr<const Answer>& answer) override {
    const v1::OpResult& result = answer->result();
    if (result.has_error()) {
      Done(rpc::FromOpError(result.error()));
      return;
    }
    *reply_ = (result.*get_)();
    Done(absl::OkStatus());
  }
  void OnCancel() override {
    order_.Mark();
    engine_.Abandon(id_);
  }
  void OnDone() override {
    order_.Mark();
    delete this;
  }

 private:
  UnaryCall(Engine& engine, MethodMetrics* metrics, Reply* reply, Get get)
      : engine_(engine), metrics_(metrics), reply_(reply), get_(get), id_(engine.NewCallId()) {
    order_.Mark();
  }

  void Done(const absl::Status& status) {
    metrics_->Handled(static_cast<int>(status.code()), absl::Now() - start_);
    order_.Mark();
    Finish(rpc::ToGrpc(status));
  }

  Engine& engine_;
  MethodMetrics* const metrics_;
  Reply* const reply_;
  const Get get_;
  const CallId id_;
  const absl::Time start_ = absl::Now();
  ThreadOrder order_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_UNARY_CALL_H_
