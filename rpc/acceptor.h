#ifndef MUSTER_RPC_ACCEPTOR_H_
#define MUSTER_RPC_ACCEPTOR_H_

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "rpc/address.h"

namespace muster::rpc {

// Accepts the connections of one TCP port or unix socket on its own thread and hands them to a gRPC
// server. gRPC (1.51) permanently closes its own listener when accept() fails once for lack of
// descriptors; here new connections wait in the kernel's queue until one is free.
class Acceptor {
 public:
  // Binds and listens; connections wait until Start. With `only_user`, a connection to a unix
  // socket by a process of another user is closed at once (SO_PEERCRED). Errors as of
  // Server::Start.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const Address& address,
                                                          std::optional<uid_t> only_user = {});
  // Ends the thread, closes the port and removes the socket's file.
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int port() const { return port_; }

  // Starts accepting. Call it once. `sink` belongs to a server that has been started.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> sink);

 private:
  Acceptor(int listener, int stop, int port, std::string path, std::optional<std::string> file,
           std::optional<uid_t> only_user)
      : listener_(listener),
        stop_(stop),
        port_(port),
        path_(std::move(path)),
        file_(std::move(file)),
        only_user_(only_user) {}
  void Run();
  bool MayEnter(int fd);
  // Returns whether this process has a descriptor for another connection.
  bool HasRoom() const;

  const int listener_;
  const int stop_;                         // an eventfd, readable when it is time to end
  const int port_;                         // 0: a unix socket
  const std::string path_;                 // the path of a unix socket
  const std::optional<std::string> file_;  // at that path (FileIdentityAt); none: removed already
  const std::optional<uid_t> only_user_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> sink_;
  // Used only by thread_: when it last logged a refusal, and how many it has refused since.
  absl::Time last_refusal_log_ = absl::InfinitePast();
  int refusals_ = 0;
  std::thread thread_;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_ACCEPTOR_H_
