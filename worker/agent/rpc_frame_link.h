#ifndef MUSTER_WORKER_AGENT_RPC_FRAME_LINK_H_
#define MUSTER_WORKER_AGENT_RPC_FRAME_LINK_H_

#include <grpcpp/channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <memory>

#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"
#include "worker/agent/frame_link.h"

namespace muster::agent {

// Session.Attach over gRPC. A message that is no frame ends the stream with DATA_LOSS.
class RpcFrameTransport final : public FrameTransport {
 public:
  explicit RpcFrameTransport(const std::shared_ptr<grpc::Channel>& channel);
  // Waits until all links have closed: close them first.
  ~RpcFrameTransport() override;

  std::shared_ptr<FrameLink> Open(std::shared_ptr<FrameEvents> events) override;

 private:
  class Link;
  void Ended();

  // gRPC's own stub would stop reading at bytes that it cannot parse, and leave the stream open.
  grpc::TemplatedGenericStub<v1::AgentFrame, grpc::ByteBuffer> stub_;
  Mutex mu_;
  CondVar changed_;
  int open_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace muster::agent

#endif  // MUSTER_WORKER_AGENT_RPC_FRAME_LINK_H_
