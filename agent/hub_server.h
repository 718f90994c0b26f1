#ifndef MUSTER_AGENT_HUB_SERVER_H_
#define MUSTER_AGENT_HUB_SERVER_H_

#include <grpcpp/impl/codegen/service_type.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "agent/incoming_stream.h"
#include "rpc/server.h"

namespace muster::agent {

// Session.Attach for the agents behind this hub, over gRPC. Each stream becomes an IncomingStream
// with one frame at a time on its way to the core, and one write in flight. Thread-safe.
class HubServer {
 public:
  struct Options {
    rpc::ServerOptions server = {};
    std::string token = {};  // that streams must carry; empty: none
    // A stream that sends nothing for this long ends with DEADLINE_EXCEEDED.
    absl::Duration first_message = absl::Seconds(30);
    // The most streams that have sent nothing yet; further ones are refused with OVERLOADED.
    size_t silent_streams = 1024;
  };

  // `hub` is borrowed. Errors: as rpc::Server::Start.
  static absl::StatusOr<std::unique_ptr<HubServer>> Start(const Options& options,
                                                          IncomingStreamEvents* hub);
  // Does the same as Shutdown without a grace.
  ~HubServer();
  HubServer(const HubServer&) = delete;
  HubServer& operator=(const HubServer&) = delete;

  // The address at which agents reach it, with the bound port.
  const std::string& address() const { return server_->address(); }

  // Accepts no more streams, cancels those that are open after `grace`, and waits for all of them
  // to end: the core has been told the end of each. Repeatable.
  void Shutdown(absl::Duration grace);

 private:
  class Service;
  class Stream;
  HubServer();

  std::unique_ptr<Service> service_;
  std::unique_ptr<rpc::Server> server_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_HUB_SERVER_H_
