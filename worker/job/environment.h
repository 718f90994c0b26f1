#ifndef MUSTER_WORKER_JOB_ENVIRONMENT_H_
#define MUSTER_WORKER_JOB_ENVIRONMENT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/defaults.h"

namespace muster {

// A value and its source: the name of a variable ("RANK"), "argument", "default", or a rule such as
// "MASTER_ADDR of one node".
template <typename T>
struct Setting {
  T value{};
  std::string source = "default";

  bool is_default() const { return source == "default"; }
};

// The launcher of this process, according to its variables.
enum class Launcher { kNone, kMuster, kTorchrun, kMpi, kSlurm };

// "no launcher", "muster", "torchrun", "mpi" or "slurm".
const char* LauncherName(Launcher launcher);

// This process's place in its job, and the settings from its environment. A plain value.
//
// docs/environment.md lists every variable, the precedence of the families, and what happens when
// they disagree.
struct Environment {
  Launcher launcher = Launcher::kNone;

  // False: MUSTER_COORDINATOR is set but no rank is. The rendezvous assigns this process its seat;
  // before that, rank, world_size and the related fields are 0, 1, ...
  bool seated = true;

  Setting<int> rank{0};
  Setting<int> world_size{1};
  Setting<int> local_rank{0};
  Setting<int> local_world_size{1};
  Setting<int> node_rank{0};
  Setting<int> num_nodes{1};

  // "host:port" of the coordinator, or "unix:/PATH" of the agent that speaks for this node; empty
  // if there is none.
  Setting<std::string> coordinator;
  Setting<std::string> job;
  Setting<std::string> worker_id;
  Setting<int64_t> generation{0};
  // 0: not given; the worker draws one at random.
  Setting<uint64_t> incarnation{0};
  // The socket of the agent that holds memory for its workers; empty: no agent does.
  Setting<std::string> memory_socket;

  // The address of the TCPStore if there is no coordinator. Empty and 0 if it is not needed.
  Setting<std::string> master_addr;
  Setting<int> master_port{0};

  // The network interface that Gloo uses ("eth0"); empty: the one that routes to the meeting point.
  Setting<std::string> interface;
  // torchrun's agent serves the TCPStore itself; rank 0 is a client like the others.
  Setting<bool> agent_store{false};
  // How often the launcher has restarted this process; keeps keys of different attempts apart.
  Setting<int> restart_count{0};

  // This machine's location, which determines the order of ranks; empty: unknown.
  Setting<std::string> rack;
  Setting<std::string> nvlink_domain;

  // Files for TLS to the coordinator; empty: no TLS.
  Setting<std::string> tls_ca;
  Setting<std::string> tls_cert;
  Setting<std::string> tls_key;
  // File with the coordinator's token; empty: none.
  Setting<std::string> token_file;

  // "no", "fp16" or "bf16".
  Setting<std::string> mixed_precision{"no"};
  // "no_shard", "zero1", "zero2", "zero3" or "hybrid", and the module classes that are units.
  Setting<std::string> sharding{"no_shard"};
  Setting<std::vector<std::string>> sharding_units;
  // Instead of these classes: names of modules, or the minimum number of parameters of a unit.
  Setting<std::vector<std::string>> sharding_unit_names;
  Setting<int64_t> sharding_min_unit_parameters{0};
  // How many ranks share one copy of the model, and how many one copy of what is kept for the
  // backward pass; 0: as `sharding` determines, and none. Whether parameters are freed after the
  // forward pass.
  Setting<int> sharding_group_size{0};
  Setting<int> sharding_reshard_group_size{0};
  Setting<bool> sharding_reshard_after_forward{true};
  // The types in which parameters are gathered and gradients reduced: "fp32", "bf16" or "fp16".
  Setting<std::string> sharding_parameter_dtype{"fp32"};
  Setting<std::string> sharding_reduce_dtype{"fp32"};
  // Empty: the same as without the setting.
  Setting<std::string> sharding_output_dtype;
  Setting<std::string> sharding_buffer_dtype;
  // Classes or names of modules that are not divided into units, and patterns for the names of
  // modules and parameters that are not sharded at all.
  Setting<std::vector<std::string>> sharding_no_split;
  Setting<std::string> sharding_ignored_modules;
  Setting<std::string> sharding_ignored_parameters;
  // Whether communication of sharded training overlaps with its computation.
  Setting<bool> sharding_overlap{false};
  Setting<bool> optimizer_in_backward{false};
  // "none", "cpu" or "disk:FOLDER": where the optimizer's states, the gradients and the parameters
  // are kept while they are not in use.
  Setting<std::string> offload_optimizer{"none"};
  Setting<std::string> offload_gradients{"none"};
  Setting<std::string> offload_parameters{"none"};
  // Whether blocks keep only their inputs for the backward pass; the module classes that are
  // blocks; and where those inputs are kept meanwhile: "none", "cpu" or "disk:FOLDER".
  Setting<bool> activation_checkpointing{false};
  Setting<std::vector<std::string>> activation_blocks;
  Setting<std::string> offload_activations{"none"};
  // The variables of Accelerate's launcher for FSDP or DeepSpeed, if it requests one of them;
  // otherwise empty.
  std::map<std::string, std::string> engine_variables;
  Setting<bool> use_cpu{false};
  Setting<int64_t> gradient_accumulation_steps{1};
  Setting<bool> debug{false};
  // Whether the ranks of a job on one node exchange CPU tensors through shared memory rather than
  // Gloo's sockets.
  Setting<bool> shared_memory{true};
  Setting<std::string> project_dir;
  // Timeout of collectives and of the rendezvous at the start.
  Setting<absl::Duration> timeout{absl::Minutes(10)};
  // How long the coordinator may be unreachable before calls fail.
  Setting<absl::Duration> outage_tolerance{kDefaultOutageTolerance};
  // How long this process may be silent, while others are not, before it counts as lost.
  Setting<absl::Duration> lease{kDefaultLease};

  // Settings that are legal but probably unintended, one line each, for the caller to log.
  std::vector<std::string> warnings;
};

// The program's own settings. A field that is set takes precedence over every variable.
struct EnvironmentArguments {
  std::optional<std::string> mixed_precision = std::nullopt;
  std::optional<bool> use_cpu = std::nullopt;
  std::optional<int64_t> gradient_accumulation_steps = std::nullopt;
  std::optional<bool> debug = std::nullopt;
  std::optional<std::string> project_dir = std::nullopt;
  std::optional<absl::Duration> timeout = std::nullopt;
};

// Determines the environment from `variables` (names to values; an empty value counts as not set).
// Pure. Errors: INVALID_ARGUMENT, one line that names the variable, its value and the remedy: not a
// number, a rank outside its world, half a family (RANK without WORLD_SIZE), two launchers that
// contradict each other, no address to meet at, an unknown precision.
absl::StatusOr<Environment> ReadEnvironment(const std::map<std::string, std::string>& variables,
                                            const EnvironmentArguments& arguments = {});

// Returns one line per field, such as "rank 3 (from RANK)", which programs log at level debug.
std::string Describe(const Environment& environment);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_ENVIRONMENT_H_
