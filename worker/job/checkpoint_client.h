#ifndef MUSTER_WORKER_JOB_CHECKPOINT_CLIENT_H_
#define MUSTER_WORKER_JOB_CHECKPOINT_CLIENT_H_

#include <memory>

#include "worker/checkpoint/registrar.h"
#include "worker/job/coordinator_client.h"

namespace muster {

// Makes the registry of a job that has a coordinator, which this process has joined.
std::unique_ptr<CheckpointRegistrar> MakeCoordinatorRegistrar(
    std::shared_ptr<CoordinatorClient> client);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_CHECKPOINT_CLIENT_H_
