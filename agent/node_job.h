#ifndef MUSTER_AGENT_NODE_JOB_H_
#define MUSTER_AGENT_NODE_JOB_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "agent/agent.h"
#include "agent/hang_core.h"
#include "agent/log_file.h"
#include "base/defaults.h"
#include "rpc/channel.h"

namespace muster::agent {

// One node's part of one job, as a separate process of `muster launch` or `muster-agent`.
struct NodeJobOptions {
  AgentOptions agent;  // worker.coordinator is where to connect
  rpc::ChannelOptions channel = {};
  int num_nodes = 1;
  // If not 0, the number of nodes varies: see GrpcJobCoordinationOptions.
  int min_nodes = 0;
  absl::Duration last_call = absl::Seconds(30);
  absl::Duration grow_after = absl::ZeroDuration();
  int node_rank = -1;              // -1: any
  bool another_is_first = false;   // see GrpcJobCoordinationOptions
  bool hosts_coordinator = false;  // likewise
  std::string host = "127.0.0.1";
  absl::Duration join_timeout = absl::Minutes(10);
  // How long the coordinator may be away before the job fails.
  absl::Duration outage_tolerance = kDefaultOutageTolerance;
  // How long a machine or worker may be silent, while others are not, before it counts as lost.
  absl::Duration lease = kDefaultLease;
  // How long no rank may make progress once a step was finished (hang_core.h). 0: no limit.
  absl::Duration hang_timeout = absl::ZeroDuration();
  std::string hub_listen = {};  // see NodeUplink::Options
  // The socket of the node's agent, which holds memory between attempts of the job; empty: none
  // does.
  std::string memory_socket = {};
  bool show_output = true;    // the workers' lines, on standard output and standard error
  bool prefix = true;         // if several workers write
  LogLimits log_limits = {};  // for the files in agent.log_dir
};

struct NodeJobResult {
  JobResult job;
  int signal = 0;  // the signal that stopped it
  // The last hang for which this node has ended an attempt.
  std::optional<HangReport> hang = std::nullopt;
};

// Runs the job on the terminal: the workers' lines go to standard output and standard error. The
// signals of the job, which BlockJobSignals has held back, stop it; one that comes a second or more
// after the first kills it; and one that comes when the workers are done ends the wait for a reader
// that does not read. Blocks until nothing of the job is left. Afterwards signals are still held
// back: call EndByJobSignals when nothing is left to be written. `host` is borrowed and should have
// been started before any other thread of the process.
NodeJobResult RunNodeJob(NodeJobOptions options, ProcessHost& host);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NODE_JOB_H_
