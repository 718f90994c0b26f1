#ifndef MUSTER_RPC_ECHO_TRIGGERS_H_
#define MUSTER_RPC_ECHO_TRIGGERS_H_

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"

namespace muster::rpc {

// A service for tests of servers and channels: Raise answers with the step that it was sent; a
// trigger of the name "stale" fails.
class EchoTriggers final : public v1::Triggers::CallbackService {
  grpc::ServerUnaryReactor* Raise(grpc::CallbackServerContext* context,
                                  const v1::RaiseTriggerRequest* request,
                                  v1::RaiseTriggerReply* reply) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reply->set_effective_step(request->step());
    if (request->name() == "stale") {
      reactor->Finish(ToGrpc(ErrorWithReason(absl::StatusCode::kFailedPrecondition, "old",
                                             v1::ERROR_REASON_STALE_GENERATION)));
    } else {
      reactor->Finish(grpc::Status::OK);
    }
    return reactor;
  }
};

// Calls Raise, and returns the step.
inline absl::StatusOr<int64_t> Raise(const std::shared_ptr<grpc::Channel>& channel,
                                     const std::string& name, int64_t step) {
  auto stub = v1::Triggers::NewStub(channel);
  grpc::ClientContext context;
  SetTimeout(context, absl::Seconds(30));
  context.set_wait_for_ready(true);
  v1::RaiseTriggerRequest request;
  request.set_name(name);
  request.set_step(step);
  v1::RaiseTriggerReply reply;
  const grpc::Status status = stub->Raise(&context, request, &reply);
  if (!status.ok()) return FromGrpc(status);
  return reply.effective_step();
}

}  // namespace muster::rpc

#endif  // MUSTER_RPC_ECHO_TRIGGERS_H_
