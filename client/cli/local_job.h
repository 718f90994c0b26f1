#ifndef MUSTER_CLIENT_CLI_LOCAL_JOB_H_
#define MUSTER_CLIENT_CLI_LOCAL_JOB_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/launch_plan.h"
#include "rpc/tls_files.h"

namespace muster::client {

// A coordinator inside this process; it ends when destroyed.
class EmbeddedCoordinator {
 public:
  virtual ~EmbeddedCoordinator() = default;
  // The address to which workers connect, with the port that was bound.
  virtual std::string address() const = 0;
  // Stops serving. Tells the agents of other machines that it does not return, and why.
  virtual void End(const std::string& why) = 0;
};

struct EmbeddedCoordinatorOptions {
  std::string listen;  // "127.0.0.1:0", "unix:PATH"
  // Paths of files; empty: none. See rpc::ServerOptions and CoordinatorServer::Options.
  rpc::TlsFiles tls = {};
  std::string token_file = {};
  std::string checkpoint_key = {};
};

using CoordinatorFactory = std::function<absl::StatusOr<std::unique_ptr<EmbeddedCoordinator>>(
    const EmbeddedCoordinatorOptions&)>;

// Runs jobs in this process: a coordinator from `start_coordinator` on machine 0, and an agent.
// This is the only place where the client's side uses an agent (main provides the coordinator).
LaunchBackend LocalBackend(CoordinatorFactory start_coordinator);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_LOCAL_JOB_H_
