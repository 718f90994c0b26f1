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
  // The folder for the records of attempts, their logs and private folders; of mode 0700.
  std::string state_dir;
  std::string node;  // the name of the node
  // The resources of the node, with at least one CPU.
  v1::NodeInfo info;
  // The entry of CUDA_VISIBLE_DEVICES for each of info's GPUs, by which jobs get it.
  std::vector<std::string> gpus = {};
  // The address at which other nodes reach programs on this node; empty: the address that leads to
  // the coordinator.
  std::string host = {};
  // The command that runs one attempt: this program without --serve, with the flags that all
  // runners share (those to reach the coordinator, except --token_file).
  std::vector<std::string> runner;
  std::map<std::string, std::string> environment;  // the environment of runners
  // The control groups of attempts, see NodeGroupsOptions.
  std::string control_groups = "auto";
  bool limit_cpus = false;
  ServiceNotifier::Options notify = {};  // the service manager that started it
  // How long the folders of attempts that the coordinator has forgotten are kept, for their logs.
  absl::Duration keep_logs = absl::Hours(24 * 7);
  // How long to wait after an attempt for processes that the kernel does not end.
  absl::Duration patience = absl::Seconds(10);
  // Finds this node's own address; replaced in tests.
  std::function<std::string(const rpc::Address& coordinator)> own_address = rpc::OwnAddressTowards;
  // Removes the folder of an attempt; replaced in tests.
  std::function<absl::Status(const std::string& path)> remove_tree = RemoveTree;
};

// Waits for jobs and runs them until a signal of the job (job_signals.h, which must be blocked)
// ends the service; running attempts continue, and the next service with this state_dir adopts
// them. Blocks. Logs one line on standard error for each event that concerns an operator.
//
// Errors: ALREADY_EXISTS if another agent uses the state_dir; FAILED_PRECONDITION, NOT_FOUND if a
// named control group cannot be used; those of the disk; those of rpc::Connect; PERMISSION_DENIED,
// UNAUTHENTICATED, INVALID_ARGUMENT if the coordinator refuses this node. An unreachable
// coordinator is not an error: the service retries forever.
absl::Status RunNodeService(const NodeServiceOptions& options);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NODE_SERVICE_H_
