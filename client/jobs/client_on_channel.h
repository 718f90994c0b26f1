#ifndef MUSTER_CLIENT_JOBS_CLIENT_ON_CHANNEL_H_
#define MUSTER_CLIENT_JOBS_CLIENT_ON_CHANNEL_H_

#include <grpcpp/channel.h>

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/jobs/job_client.h"

namespace muster::client {

// Returns a client that makes its calls on `channel`; see ClientOptions for the times.
Client ClientOn(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout,
                absl::Duration retry_for);

// A client whose calls another thread can end.
struct StoppableClient {
  Client client;
  // Ends the calls in progress, and all later ones, with CANCELLED. Thread-safe; valid as long as
  // `client`, which may be moved.
  std::function<void()> stop;
};
StoppableClient StoppableOn(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout,
                            absl::Duration retry_for);

// Returns a channel to a coordinator that has answered. Errors: those of Client::Connect.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const ClientOptions& options);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_CLIENT_ON_CHANNEL_H_
