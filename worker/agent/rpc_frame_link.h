#ifndef MUSTER_WORKER_AGENT_RPC_FRAME_LINK_H_
#define MUSTER_WORKER_AGENT_RPC_FRAME_LINK_H_

#include <grpcpp/channel.h>

#include <memory>

#include "base/mutex.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "worker/agent/frame_link.h"

namespace muster::agent {

// Session.Attach over gRPC.
class RpcFrameTransport final : public FrameTransport {
 public:
  explicit RpcFrameTransport(const std::shared_ptr<grpc::Channel>& channel);
  // Waits until all links have closed: close them first.
  ~RpcFrameTransport() override;

  std::shared_ptr<FrameLink> Open(std::shared_ptr<FrameEvents> events) override;

 private:
  class Link;
  void Ended();

  const std::unique_ptr<v1::Session::Stub> stub_;
  Mutex mu_;
  CondVar changed_;
  int open_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace muster::agent

#endif  // MUSTER_WORKER_AGENT_RPC_FRAME_LINK_H_
