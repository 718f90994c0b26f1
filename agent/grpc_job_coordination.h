#ifndef MUSTER_AGENT_GRPC_JOB_COORDINATION_H_
#define MUSTER_AGENT_GRPC_JOB_COORDINATION_H_

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "agent/job_coordination.h"
#include "agent/node_uplink.h"
#include "base/defaults.h"

namespace muster::agent {

struct GrpcJobCoordinationOptions {
  std::string coordinator;  // its address, for messages
  std::string job;
  int num_nodes = 1;
  // If not 0, the number of nodes varies from min_nodes to num_nodes. An attempt begins when
  // num_nodes have come, or `last_call` after min_nodes have. A node that is lost or leaves ends
  // the attempt; a new one does so once the attempt has lasted for `grow_after`. 0: always
  // num_nodes.
  int min_nodes = 0;
  absl::Duration last_call = absl::Seconds(30);
  absl::Duration grow_after = absl::ZeroDuration();
  int node_rank = -1;  // -1: any
  // Whether another launch, with node_rank 0, hosts the coordinator: if the number of nodes varies,
  // this one takes no place before that one has asked for its own.
  bool another_is_first = false;
  // This process hosts the coordinator: if the number of nodes varies, it continues to serve the
  // others when it gets no place among them.
  bool hosts_coordinator = false;
  // The agents count restarts themselves, so before each attempt they agree on their counts. They
  // always do if the number of nodes varies.
  bool counts_restarts = false;
  // The same for agents that may not restart: they tell their counts to those that may.
  bool counts_itself = false;
  // Settings that must be the same on all nodes, for example "num_processes 4, max_restarts 0".
  // Shown if they differ.
  std::string settings = {};
  // "true" or "false", which must also be the same on all nodes whose agents report it: those of
  // older versions do not. Empty: not compared.
  std::string debug = {};
  // The address at which the other nodes reach a program on this one.
  std::string host = "127.0.0.1";
  // The location of this node, if known: nodes without an assigned rank are numbered so that
  // neighbours get neighbouring ranks.
  std::string rack = {};
  std::string nvlink_domain = {};
  absl::Duration join_timeout = absl::Minutes(10);
  absl::Duration lease = kDefaultLease;
  absl::Duration outage_tolerance = kDefaultOutageTolerance;  // for the session
  // An agent that waits for a coordinator that has never answered logs it after the first span, and
  // again after each further one.
  absl::Duration tell_after = absl::Seconds(10);
  absl::Duration tell_again = absl::Seconds(30);
};

// A JobCoordination over this node's session. With several nodes, the agents form a job of their
// own, "JOB.agents": its rendezvous numbers the nodes, a key "end" in the generation records why an
// attempt ended, a barrier "finish" waits for all nodes, and each agent's lease shows whether its
// node still lives. `session` is borrowed; the link is its listener.
std::unique_ptr<JobCoordination> MakeGrpcJobCoordination(const GrpcJobCoordinationOptions& options,
                                                         NodeUplink* session);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_GRPC_JOB_COORDINATION_H_
