#ifndef MUSTER_AGENT_WORKER_ENVIRONMENT_H_
#define MUSTER_AGENT_WORKER_ENVIRONMENT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/defaults.h"
#include "base/place.h"
#include "rpc/tls_files.h"

namespace muster::agent {

// The settings that a worker gets through its environment.
struct WorkerEnvironment {
  Place place;
  std::string job;
  std::string worker_id;
  uint64_t incarnation = 0;
  std::string coordinator;  // "host:port"
  // The location of this node; empty: unknown.
  std::string rack;
  std::string nvlink_domain;
  // TLS files for the connection to the coordinator; empty: none.
  rpc::TlsFiles tls;
  std::string token_file;
  // For programs that meet like those of torchrun: rank 0 may listen there.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  // In an attempt of a submitted job: the restarts before it, and how many the job may have. The
  // agent adds its own.
  int restart_count = 0;
  int max_restarts = 0;
  absl::Duration outage_tolerance = kDefaultOutageTolerance;
  absl::Duration lease = kDefaultLease;

  std::optional<std::string> mixed_precision;  // nullopt: its variables stay, else "no"
  std::string sharding;                        // empty: the variable stays unchanged
  std::optional<bool> activation_checkpointing;
  std::string activation_blocks, offload_activations;  // empty: the variables stay unchanged
  std::optional<bool> cpu;                             // nullopt: its variables stay, else false
  int gradient_accumulation_steps = 0;                 // 0: the variables stay as they are
  std::optional<bool> debug;                           // nullopt: its variables stay, else false
  // Whether the reader of the workers' output also reads the agent's messages.
  bool agent_tells = false;
  // The socket of the agent's MemoryHolder; empty: none.
  std::string memory_socket;
  // OMP_NUM_THREADS. 0: the inherited value, or an even share of `cores`.
  int threads = 0;
  int cores = 1;
  // Variables that the user gave for all workers; they override inherited ones, but not those of
  // base/worker_variables.h.
  std::map<std::string, std::string> extra;
};

// Returns the whole environment of one worker, sorted: `inherited` without the variables in which
// other launchers state the place of the process they started, then `extra`, then Muster's
// variables (docs/environment.md), torchrun's, and Accelerate's for the settings. Pure.
std::map<std::string, std::string> MakeWorkerVariables(
    const WorkerEnvironment& worker, const std::map<std::string, std::string>& inherited);

// "NAME=value" each.
std::vector<std::string> ToEnvironmentBlock(const std::map<std::string, std::string>& variables);
}  // namespace muster::agent

#endif  // MUSTER_AGENT_WORKER_ENVIRONMENT_H_
