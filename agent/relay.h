#ifndef MUSTER_AGENT_RELAY_H_
#define MUSTER_AGENT_RELAY_H_

#include <grpcpp/channel.h>
#include <grpcpp/impl/codegen/service_type.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "agent/op_sender.h"
#include "rpc/server.h"

namespace muster::agent {

// Offers the coordinator's services (Rendezvous, Barrier, KeyValueStore, Triggers, Membership) to
// the workers of this node, on a unix socket that only processes of this user can reach: it lies in
// a fresh folder with mode 0700, and the kernel reports each peer's user. The destructor removes
// the folder; the next agent removes what a killed one left. Each call becomes an operation of
// `upstream`. A call that its caller cancels ends at once; its operation continues, and may or may
// not take effect, as with any call over a network (Admin.Status is cancelled with its caller).
// Thread-safe.
class Relay {
 public:
  struct Options {
    // Where the folder is made; empty: $TMPDIR or /tmp, the first that will do.
    std::string parent = {};
    // To the coordinator, for Admin.Status, which is no operation; null: not offered.
    std::shared_ptr<grpc::Channel> coordinator = nullptr;
  };

  // `upstream` is borrowed and must not call back any more when this ends. Errors: UNAVAILABLE,
  // naming the folders that were tried.
  static absl::StatusOr<std::unique_ptr<Relay>> Start(const Options& options, OpSender* upstream);
  // Answers what still waits with CANCELLED.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // What workers connect to: "unix:PATH".
  const std::string& address() const { return server_->address(); }

 private:
  Relay() = default;

  std::string folder_;
  int lock_ = -1;  // on the folder, so that others see that it is in use
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::unique_ptr<rpc::Server> server_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_RELAY_H_
