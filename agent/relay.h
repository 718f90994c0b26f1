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
// the workers of this node, on a unix socket that only processes of this user can reach: it is in a
// new folder with mode 0700, and the kernel reports each peer's user. The destructor removes the
// folder; that of a killed agent is removed by the next one. Each call becomes an operation of
// `upstream`. A call that its caller cancels ends at once; its operation continues, and may or may
// not take effect, as with any call over a network (Admin.Status is cancelled with its caller).
// Thread-safe.
class Relay {
 public:
  struct Options {
    // Where the folder is made; empty: the first of $TMPDIR and /tmp that is usable.
    std::string parent = {};
    // The channel to the coordinator for Admin.Status, which is not an operation; null: not
    // offered.
    std::shared_ptr<grpc::Channel> coordinator = nullptr;
  };

  // `upstream` is borrowed and must no longer call back when the relay is destroyed. Errors:
  // UNAVAILABLE, naming the folders that were tried.
  static absl::StatusOr<std::unique_ptr<Relay>> Start(const Options& options, OpSender* upstream);
  // Answers the calls that still wait with CANCELLED.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // The address to which workers connect: "unix:PATH".
  const std::string& address() const { return server_->address(); }

 private:
  Relay() = default;

  std::string folder_;
  int lock_ = -1;  // a lock on the folder, so that others see that it is in use
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::unique_ptr<rpc::Server> server_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_RELAY_H_
