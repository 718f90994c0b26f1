#ifndef MUSTER_AGENT_NODE_SERVICE_H_
#define MUSTER_AGENT_NODE_SERVICE_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/service_notifier.h"
#include "proto/muster/v1/node.pb.h"
#include "rpc/channel.h"
#include "rpc/own_address.h"

namespace muster::agent {

struct NodeServiceOptions {
  std::string coordinator;
  rpc::ChannelOptions channel = {};
  // Records of attempts, their logs and private folders; of mode 0700.
  std::string state_dir;
  std::string node;  // its name
  // What the node has. At least one CPU.
  v1::NodeInfo info;
  // The entry of CUDA_VISIBLE_DEVICES for each of info's GPUs, by which jobs get it.
  std::vector<std::string> gpus = {};
  // Where other nodes reach programs here; empty: the address that leads to the coordinator.
  std::string host = {};
  // The program that runs one attempt, with the flags that all runners have (to reach the
  // coordinator, except --token_file): this one, without --serve.
  std::vector<std::string> runner;
  std::map<std::string, std::string> environment;  // of runners
  // Of attempts, see NodeGroupsOptions.
  std::string control_groups = "auto";
  bool limit_cpus = false;
  ServiceNotifier::Options notify = {};  // the service manager that started it
  // Folders of attempts that the coordinator has forgotten are kept so long, for their logs.
  absl::Duration keep_logs = absl::Hours(24 * 7);
  // For processes that the kernel does not end, after an attempt.
  absl::Duration patience = absl::Seconds(10);
  // For tests.
  std::function<std::string(const rpc::Address& coordinator)> own_address = rpc::OwnAddressTowards;
  // Removes folders of attempts; for tests.
  std::function<absl::Status(const std::string& path)> remove_tree = RemoveTree;
};

// Waits for jobs and runs them until a signal of the job (job_signals.h, which must be blocked)
// ends it; running attempts continue, and the next service on this state_dir adopts them. Blocks.
// Logs one line on standard error for each event that concerns an operator.
//
// Errors: ALREADY_EXISTS another agent uses the state_dir; FAILED_PRECONDITION, NOT_FOUND a named
// control group cannot be used; those of the disk; as rpc::Connect;
// PERMISSION_DENIED, UNAUTHENTICATED, INVALID_ARGUMENT: the coordinator refuses this node. A
// coordinator that is away is none: it is tried again for ever.
absl::Status RunNodeService(const NodeServiceOptions& options);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NODE_SERVICE_H_
