#ifndef MUSTER_INTERNAL_CONTEXT_H_
#define MUSTER_INTERNAL_CONTEXT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "worker/process/comm.h"
#include "worker/process/coordinator_client.h"
#include "worker/process/environment.h"

namespace muster::internal {

// A process's seat in its job, with the means to talk to the others.
struct ProcessContext {
  Environment environment;  // with the seat that the coordinator gave, if there is one
  c10::Device device{c10::kCPU};
  std::shared_ptr<CoordinatorClient> coordinator;  // null without a coordinator
  std::unique_ptr<Comm> comm;                      // LocalComm in a job of one process
};

// Joins the job that the environment describes (collective, blocking): reads the variables, takes a seat at the
// coordinator or meets the others at MASTER_ADDR, chooses the device and builds the process groups.
// Errors: INVALID_ARGUMENT (the environment, one line), UNAVAILABLE (no coordinator), DEADLINE_EXCEEDED (naming who is
// missing), FAILED_PRECONDITION (a GPU was asked for and there is none).
absl::StatusOr<std::unique_ptr<ProcessContext>> OpenProcessContext(const EnvironmentArguments& arguments);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_CONTEXT_H_
