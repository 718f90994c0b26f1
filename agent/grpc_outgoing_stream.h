#ifndef MUSTER_AGENT_GRPC_OUTGOING_STREAM_H_
#define MUSTER_AGENT_GRPC_OUTGOING_STREAM_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "agent/outgoing_stream.h"
#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/channel.h"

namespace muster::agent {

// Session.Attach over gRPC. A message that is not a frame ends the stream with DATA_LOSS. Each
// stream to a hub has its own connection, which ends with it.
class GrpcStreamOpener final : public StreamOpener {
 public:
  // `channel` leads to the coordinator at `coordinator`; `options` are for connections to hubs, and
  // for new ones to the coordinator.
  explicit GrpcStreamOpener(std::shared_ptr<grpc::Channel> channel, std::string coordinator = "",
                            rpc::ChannelOptions options = {});
  // Waits until all streams have closed: close them first.
  ~GrpcStreamOpener() override;

  // Errors: as rpc::Connect.
  absl::StatusOr<std::shared_ptr<OutgoingStream>> Open(
      const std::string& hub, std::shared_ptr<OutgoingStreamEvents> events) override;
  void Reconnect() override;

 private:
  class Link;
  void Ended();

  const std::string coordinator_;
  const rpc::ChannelOptions options_;
  Mutex mu_;
  std::shared_ptr<grpc::Channel> channel_ ABSL_GUARDED_BY(mu_);
  CondVar changed_;
  int open_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_GRPC_OUTGOING_STREAM_H_
