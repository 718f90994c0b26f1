#ifndef MUSTER_RPC_ACCEPTOR_H_
#define MUSTER_RPC_ACCEPTOR_H_

#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "rpc/address.h"

namespace muster::rpc {

// Accepts the connections of one TCP port on a thread of its own and hands them to a gRPC server.
// gRPC (1.51) closes its own listener for good when accept() fails once for want of descriptors;
// here newcomers wait in the kernel's queue until one is free.
class Acceptor {
 public:
  // Binds and listens; connections wait until Start. Errors as of Server::Start.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const Address& address);
  // Ends the thread and closes the port.
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int port() const { return port_; }

  // Once. `sink` belongs to a server that has been started.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> sink);

 private:
  Acceptor(int listener, int stop, int port) : listener_(listener), stop_(stop), port_(port) {}
  void Run();

  const int listener_;
  const int stop_;  // an eventfd, readable when it is time to end
  const int port_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> sink_;
  std::thread thread_;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_ACCEPTOR_H_
