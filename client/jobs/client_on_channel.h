#ifndef MUSTER_CLIENT_JOBS_CLIENT_ON_CHANNEL_H_
#define MUSTER_CLIENT_JOBS_CLIENT_ON_CHANNEL_H_

#include <grpcpp/channel.h>

#include <memory>

#include "absl/time/time.h"
#include "client/jobs/job_client.h"

namespace muster::client {

// A client that makes its calls on `channel`; see ClientOptions for the times.
Client ClientOn(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout,
                absl::Duration retry_for);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_CLIENT_ON_CHANNEL_H_
