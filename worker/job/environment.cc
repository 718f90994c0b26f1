#include "worker/job/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>
#include <optional>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/bool_word.h"
#include "base/log_variables.h"
#include "base/slurm_hosts.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster {
namespace {

using Variables = std::map<std::string, std::string>;

constexpr int kDefaultMasterPort = 29500;

// The variables in which one kind of launcher passes rank and world size. An empty name: that
// launcher does not set it.
struct Family {
  Launcher launcher;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  const char* node_rank;
  const char* num_nodes;
};

// In order of preference: the closer the launcher is to Muster, the earlier. MPI comes before SLURM
// because an mpirun inside an allocation hands every process the SLURM variables of the batch
// script.
constexpr Family kFamilies[] = {
    {Launcher::kMuster, "MUSTER_RANK", "MUSTER_WORLD_SIZE", "MUSTER_LOCAL_RANK",
     "MUSTER_LOCAL_WORLD_SIZE", "MUSTER_NODE_RANK", "MUSTER_NUM_NODES"},
    {Launcher::kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
     "GROUP_WORLD_SIZE"},
    {Launcher::kMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "", ""},
    {Launcher::kMpi, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", "", ""},
    {Launcher::kMpi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""},
};

const std::string* Find(const Variables& variables, const std::string& name) {
  if (name.empty()) return nullptr;
  const auto it = variables.find(name);
  return it == variables.end() || it->second.empty() ? nullptr : &it->second;
}

template <typename T>
absl::StatusOr<T> ParseNumber(const std::string& name, const std::string& text, T min) {
  T value;
  if (!absl::SimpleAtoi(text, &value) || value < min) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, "='", Printable(text), "' is not an integer of at least ", min));
  }
  return value;
}

// Leaves `setting` unchanged if the variable is not set.
template <typename T>
absl::Status ReadNumber(const Variables& variables, const std::string& name, T min,
                        Setting<T>* setting) {
  const std::string* text = Find(variables, name);
  if (text == nullptr) return absl::OkStatus();
  MUSTER_ASSIGN_OR_RETURN(setting->value, ParseNumber<T>(name, *text, min));
  setting->source = name;
  return absl::OkStatus();
}

void ReadText(const Variables& variables, const std::string& name, Setting<std::string>* setting) {
  if (const std::string* text = Find(variables, name)) *setting = {*text, name};
}

// Reads words separated by commas.
void ReadList(const Variables& variables, const std::string& name,
              Setting<std::vector<std::string>>* setting) {
  const std::string* text = Find(variables, name);
  if (text == nullptr) return;
  for (const absl::string_view word : absl::StrSplit(*text, ',', absl::SkipWhitespace())) {
    setting->value.emplace_back(absl::StripAsciiWhitespace(word));
  }
  setting->source = name;
}

absl::Status ReadBool(const Variables& variables, const std::string& name, Setting<bool>* setting) {
  const std::string* text = Find(variables, name);
  if (text == nullptr) return absl::OkStatus();
  if (const std::optional<bool> value = ParseBoolWord(*text)) {
    *setting = {*value, name};
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, "='", Printable(*text), "' is neither true nor false (write 1 or 0)"));
}

// The longest timeout: code that waits adds it to the current time, in nanoseconds, without
// overflow.
constexpr absl::Duration kLongest = absl::Hours(24 * 365);

// `what`: the expected value, for an error.
absl::Status ReadDuration(const Variables& variables, const std::string& name, absl::Duration least,
                          absl::string_view what, Setting<absl::Duration>* setting) {
  const std::string* text = Find(variables, name);
  if (text == nullptr) return absl::OkStatus();
  absl::Duration duration;
  if (!absl::ParseDuration(*text, &duration) || duration < least) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, "='", Printable(*text), "' is not a duration ", what));
  }
  *setting = {std::min(duration, kLongest), name};
  return absl::OkStatus();
}

// Returns the number of tasks of a node: "2(x3),1" with node 3 gives 1; 0 if it cannot be read.
int TasksOnNode(const std::string& tasks_per_node, int node) {
  int first = 0;
  for (absl::string_view part : absl::StrSplit(tasks_per_node, ',')) {
    const std::vector<std::string> pieces = absl::StrSplit(part, "(x");
    int tasks = 0;
    int nodes = 1;
    if (!absl::SimpleAtoi(pieces[0], &tasks)) return 0;
    if (pieces.size() == 2 &&
        (pieces[1].empty() || pieces[1].back() != ')' ||
         !absl::SimpleAtoi(pieces[1].substr(0, pieces[1].size() - 1), &nodes))) {
      return 0;
    }
    if (node < first + nodes) return tasks;
    first += nodes;
  }
  return 0;
}

absl::Status ReadFamily(const Variables& variables, const Family& family, Environment* env) {
  env->launcher = family.launcher;
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, family.world_size, 1, &env->world_size));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, family.rank, 0, &env->rank));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, family.local_rank, 0, &env->local_rank));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, family.local_world_size, 1, &env->local_world_size));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, family.node_rank, 0, &env->node_rank));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, family.num_nodes, 1, &env->num_nodes));
  if (env->local_rank.is_default() != env->local_world_size.is_default() &&
      env->world_size.value > 1) {
    const bool rank_missing = env->local_rank.is_default();
    return absl::InvalidArgumentError(
        absl::StrCat(rank_missing ? family.local_world_size : family.local_rank, " is set but ",
                     rank_missing ? family.local_rank : family.local_world_size,
                     " is not: set both or neither"));
  }
  return absl::OkStatus();
}

absl::Status ReadSlurm(const Variables& variables, Environment* env) {
  // Only a task that srun started has a step; a batch script or an interactive shell inherits the
  // other variables.
  Setting<int> tasks{1};
  const bool in_step = Find(variables, "SLURM_STEP_ID") != nullptr ||
                       Find(variables, "SLURM_STEP_NUM_TASKS") != nullptr;
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "SLURM_NTASKS", 1, &tasks));
  if (in_step) MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "SLURM_STEP_NUM_TASKS", 1, &tasks));
  if (tasks.value == 1) return absl::OkStatus();
  if (!in_step || Find(variables, "SLURM_PROCID") == nullptr) {
    env->warnings.push_back(absl::StrCat("SLURM allocated ", tasks.value,
                                         " tasks but did not start this process as one of them: it "
                                         "runs alone. Start it with srun."));
    return absl::OkStatus();
  }
  env->launcher = Launcher::kSlurm;
  env->world_size = tasks;
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "SLURM_PROCID", 0, &env->rank));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "SLURM_NODEID", 0, &env->node_rank));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "SLURM_NNODES", 1, &env->num_nodes));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "SLURM_STEP_NUM_NODES", 1, &env->num_nodes));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "SLURM_LOCALID", 0, &env->local_rank));
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const std::string* text = Find(variables, name);
    if (text == nullptr) continue;
    const int tasks_here = TasksOnNode(*text, env->node_rank.value);
    if (tasks_here < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, "='", Printable(*text), "' says nothing about node ", env->node_rank.value));
    }
    env->local_world_size = {tasks_here, name};
    break;
  }
  if (env->local_world_size.is_default() && env->num_nodes.value == 1) {
    env->local_world_size = env->world_size;
  }
  return absl::OkStatus();
}

// Whether a family without a node says no more than SLURM says of this task: srun --mpi=pmi2 sets
// PMI_RANK and PMI_SIZE, and scripts export RANK and WORLD_SIZE from SLURM's.
bool IsSlurmsPlace(const Variables& variables, const Family& family) {
  const std::string* const place = Find(variables, "SLURM_PROCID");
  const std::string* tasks = Find(variables, "SLURM_STEP_NUM_TASKS");
  if (tasks == nullptr && Find(variables, "SLURM_STEP_ID") != nullptr) {
    tasks = Find(variables, "SLURM_NTASKS");
  }
  return family.launcher != Launcher::kMuster && place != nullptr && tasks != nullptr &&
         *place == *Find(variables, family.rank) && *tasks == *Find(variables, family.world_size) &&
         Find(variables, family.local_rank) == nullptr &&
         Find(variables, family.local_world_size) == nullptr;
}

absl::Status ReadPlace(const Variables& variables, Environment* env) {
  for (const Family& family : kFamilies) {
    const std::string* rank = Find(variables, family.rank);
    const std::string* world = Find(variables, family.world_size);
    if (rank == nullptr && world == nullptr) continue;
    if (rank != nullptr && world != nullptr) {
      if (IsSlurmsPlace(variables, family)) break;
      MUSTER_RETURN_IF_ERROR(ReadFamily(variables, family, env));
      break;
    }
    // Many containers set only WORLD_SIZE=1, which says that this process is alone.
    if (world != nullptr && *world == "1") continue;
    return absl::InvalidArgumentError(absl::StrCat(
        rank != nullptr ? family.rank : family.world_size, " is set but ",
        rank != nullptr ? family.world_size : family.rank,
        " is not: without both, every process would run alone. Set both, or unset it"));
  }
  if (env->launcher == Launcher::kNone) MUSTER_RETURN_IF_ERROR(ReadSlurm(variables, env));

  // A Muster agent also sets torchrun's names, to the same values. Other values mean a second
  // launcher in between.
  if (env->launcher == Launcher::kMuster) {
    const Family& ours = kFamilies[0];
    const Family& theirs = kFamilies[1];
    const struct {
      const char* our_name;
      const char* their_name;
      int our_value;
    } pairs[] = {{ours.rank, theirs.rank, env->rank.value},
                 {ours.world_size, theirs.world_size, env->world_size.value}};
    for (const auto& pair : pairs) {
      const std::string* text = Find(variables, pair.their_name);
      if (text == nullptr) continue;
      MUSTER_ASSIGN_OR_RETURN(const int value, ParseNumber<int>(pair.their_name, *text, 0));
      if (value != pair.our_value) {
        return absl::InvalidArgumentError(
            absl::StrCat(pair.our_name, "=", pair.our_value, " but ", pair.their_name, "=", value,
                         ": two launchers disagree; start the program with one of them, or unset "
                         "the other's variables"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPlace(Environment* env) {
  if (env->rank.value >= env->world_size.value) {
    return absl::InvalidArgumentError(
        absl::StrCat(env->rank.source, "=", env->rank.value, " is outside the world of ",
                     env->world_size.value, " processes (", env->world_size.source,
                     "); ranks count from 0. To run one process alone, unset both"));
  }
  if (env->local_rank.value >= env->local_world_size.value) {
    return absl::InvalidArgumentError(
        absl::StrCat(env->local_rank.source, "=", env->local_rank.value, " is outside the ",
                     env->local_world_size.value, " processes of this node (",
                     env->local_world_size.source, ")"));
  }
  if (env->local_world_size.value > env->world_size.value) {
    return absl::InvalidArgumentError(absl::StrCat(
        env->local_world_size.source, "=", env->local_world_size.value, " is more than the ",
        env->world_size.value, " processes of the whole job (", env->world_size.source, ")"));
  }
  const bool even = env->world_size.value % env->local_world_size.value == 0;
  if (env->num_nodes.is_default() && even) {
    const int nodes = env->world_size.value / env->local_world_size.value;
    if (nodes > 1) env->num_nodes = {nodes, "world size / local world size"};
    if (env->node_rank.is_default() && nodes > 1) {
      env->node_rank = {env->rank.value / env->local_world_size.value, "rank / local world size"};
    }
  }
  if (env->num_nodes.value > env->world_size.value) {
    return absl::InvalidArgumentError(absl::StrCat(env->num_nodes.source, "=", env->num_nodes.value,
                                                   " nodes for ", env->world_size.value,
                                                   " processes: a node would be empty"));
  }
  if (env->node_rank.value >= env->num_nodes.value) {
    return absl::InvalidArgumentError(absl::StrCat(env->node_rank.source, "=", env->node_rank.value,
                                                   " is outside the ", env->num_nodes.value,
                                                   " nodes of the job"));
  }
  return absl::OkStatus();
}

absl::Status ReadMeetingPoint(const Variables& variables, Environment* env) {
  if (!env->coordinator.value.empty() && !absl::StartsWith(env->coordinator.value, "unix:/")) {
    const std::string& address = env->coordinator.value;
    const size_t colon = address.rfind(':');
    int port = 0;
    if (colon == std::string::npos || colon == 0 ||
        !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
      return absl::InvalidArgumentError(absl::StrCat(env->coordinator.source, "='",
                                                     Printable(address),
                                                     "' is not host:port, such as 10.0.0.1:29400"));
    }
  }
  ReadText(variables, "MASTER_ADDR", &env->master_addr);
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "MASTER_PORT", 1, &env->master_port));
  if (env->master_port.value > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("MASTER_PORT=", env->master_port.value, " is not a port (1 to 65535)"));
  }
  if (env->world_size.value == 1 || !env->coordinator.value.empty()) return absl::OkStatus();

  if (env->master_addr.value.empty() && env->launcher == Launcher::kSlurm) {
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      const std::string* list = Find(variables, name);
      if (list == nullptr) continue;
      env->master_addr = {FirstSlurmHost(*list), name};
      if (!env->master_addr.value.empty()) break;
    }
  }
  if (env->master_addr.value.empty() && env->local_world_size.value == env->world_size.value) {
    env->master_addr = {"127.0.0.1", "all processes are on this node"};
  }
  if (env->master_addr.value.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the ", env->world_size.value,
                     " processes have no address to meet at: set MUSTER_COORDINATOR, or "
                     "MASTER_ADDR and MASTER_PORT, "
                     "or start them with `muster launch`; to run one process alone, unset ",
                     env->rank.source, " and ", env->world_size.source));
  }
  if (env->master_port.value == 0) {
    // Two jobs of one user on one node must not meet each other.
    int64_t job = 0;
    const std::string* id = Find(variables, "SLURM_JOB_ID");
    if (env->launcher == Launcher::kSlurm && id != nullptr && absl::SimpleAtoi(*id, &job) &&
        job >= 0) {
      env->master_port = {static_cast<int>(15000 + job % 10000), "SLURM_JOB_ID"};
    } else {
      env->master_port = {kDefaultMasterPort, "default"};
    }
  }
  return absl::OkStatus();
}

// A program that ignored the device would compute on another one.
absl::Status ReadAccelerateDevice(const Variables& variables, Environment* env) {
  constexpr char kName[] = "ACCELERATE_TORCH_DEVICE";
  const std::string* const device = Find(variables, kName);
  if (device == nullptr) return absl::OkStatus();
  if (*device != "cpu") {
    return absl::InvalidArgumentError(absl::StrCat(
        kName, "=", Printable(*device),
        ": a process computes on the GPU of its local rank if there are any, else on the CPU: "
        "unset it; CUDA_VISIBLE_DEVICES (`muster launch --gpu_ids`) chooses the GPUs"));
  }
  env->use_cpu = {true, kName};
  return absl::OkStatus();
}

// Names the variables that Accelerate's library obeys and this one does not.
void WarnOfUnreadVariables(const Variables& variables, Environment* env) {
  const auto is_on = [](const std::string& text) { return ParseBoolWord(text).value_or(false); };
  const auto is_backend = [](const std::string& text) {
    return !absl::EqualsIgnoreCase(text, "no");
  };
  const auto is_given = [](const std::string&) { return true; };
  struct Unread {
    const char* name;
    bool (*asks)(const std::string& text);
    const char* remedy;
  };
  const Unread kUnread[] = {
      {"ACCELERATE_DYNAMO_BACKEND", is_backend, "there is no Python code to compile"},
      {"ACCELERATE_CPU_AFFINITY", is_on, "bind the processes with numactl or taskset"},
      {"ACCELERATE_LOG_LEVEL", is_given, "MUSTER_LOG_LEVEL sets it"},
      {"ACCELERATE_INIT_INCLUDE_BUFFERS", is_on, "init_empty_weights() has an option for it"},
      {"ACCELERATE_BYPASS_DEVICE_MAP", is_on, "the program calls the function that it needs"},
  };
  std::vector<std::string> found;
  for (const Unread& variable : kUnread) {
    const std::string* const text = Find(variables, variable.name);
    if (text == nullptr || !variable.asks(*text)) continue;
    found.push_back(absl::StrCat(variable.name, " (", variable.remedy, ")"));
  }
  if (found.empty()) return;
  env->warnings.push_back(absl::StrCat(absl::StrJoin(found, ", "),
                                       found.size() == 1 ? " has" : " have",
                                       " no effect on a program written with Muster"));
}

// Muster's own name takes precedence over Accelerate's, which is read so that programs started by
// its launcher work.
absl::Status ReadWishes(const Variables& variables, const EnvironmentArguments& arguments,
                        Environment* env) {
  // A program that ignored them would train differently than requested.
  for (const auto& [name, what] :
       {std::pair<const char*, const char*>{"ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"},
        {"ACCELERATE_USE_PARALLELISM_CONFIG", "tensor, context and sequence parallelism"}}) {
    Setting<bool> asked;
    MUSTER_RETURN_IF_ERROR(ReadBool(variables, name, &asked));
    if (!asked.value) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        name, " asks for ", what,
        ", which this program does not have: it would train with plain "
        "data parallelism. Remove the section from the config file, or unset the variable"));
  }
  for (const char* name : {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"}) {
    Setting<bool> asked;
    MUSTER_RETURN_IF_ERROR(ReadBool(variables, name, &asked));
    if (!asked.value) continue;
    if (!env->engine_variables.empty()) {
      return absl::InvalidArgumentError(
          "ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both true: unset one of them");
    }
    for (const auto& [other, value] : variables) {
      if (absl::StartsWith(other, "FSDP_") || absl::StartsWith(other, "ACCELERATE_")) {
        env->engine_variables[other] = value;
      }
    }
    env->engine_variables[name] = "true";
  }
  ReadText(variables, "ACCELERATE_MIXED_PRECISION", &env->mixed_precision);
  ReadText(variables, "MUSTER_MIXED_PRECISION", &env->mixed_precision);
  ReadText(variables, "MUSTER_SHARDING", &env->sharding);
  ReadList(variables, "MUSTER_SHARDING_UNITS", &env->sharding_units);
  ReadList(variables, "MUSTER_SHARDING_UNIT_NAMES", &env->sharding_unit_names);
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "MUSTER_SHARDING_MIN_UNIT_PARAMETERS", int64_t{0},
                                    &env->sharding_min_unit_parameters));
  MUSTER_RETURN_IF_ERROR(
      ReadNumber(variables, "MUSTER_SHARDING_GROUP_SIZE", 0, &env->sharding_group_size));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "MUSTER_SHARDING_RESHARD_GROUP_SIZE", 0,
                                    &env->sharding_reshard_group_size));
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "MUSTER_SHARDING_RESHARD_AFTER_FORWARD",
                                  &env->sharding_reshard_after_forward));
  ReadText(variables, "MUSTER_SHARDING_PARAMETER_DTYPE", &env->sharding_parameter_dtype);
  ReadText(variables, "MUSTER_SHARDING_REDUCE_DTYPE", &env->sharding_reduce_dtype);
  ReadText(variables, "MUSTER_SHARDING_OUTPUT_DTYPE", &env->sharding_output_dtype);
  ReadText(variables, "MUSTER_SHARDING_BUFFER_DTYPE", &env->sharding_buffer_dtype);
  ReadList(variables, "MUSTER_SHARDING_NO_SPLIT", &env->sharding_no_split);
  ReadText(variables, "MUSTER_SHARDING_IGNORED_MODULES", &env->sharding_ignored_modules);
  ReadText(variables, "MUSTER_SHARDING_IGNORED_PARAMETERS", &env->sharding_ignored_parameters);
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "MUSTER_SHARDING_OVERLAP", &env->sharding_overlap));
  MUSTER_RETURN_IF_ERROR(
      ReadBool(variables, "MUSTER_OPTIMIZER_IN_BACKWARD", &env->optimizer_in_backward));
  ReadText(variables, "MUSTER_OFFLOAD_OPTIMIZER", &env->offload_optimizer);
  ReadText(variables, "MUSTER_OFFLOAD_GRADIENTS", &env->offload_gradients);
  ReadText(variables, "MUSTER_OFFLOAD_PARAMETERS", &env->offload_parameters);
  MUSTER_RETURN_IF_ERROR(
      ReadBool(variables, "MUSTER_ACTIVATION_CHECKPOINTING", &env->activation_checkpointing));
  ReadList(variables, "MUSTER_ACTIVATION_BLOCKS", &env->activation_blocks);
  ReadText(variables, "MUSTER_OFFLOAD_ACTIVATIONS", &env->offload_activations);
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "ACCELERATE_USE_CPU", &env->use_cpu));
  MUSTER_RETURN_IF_ERROR(ReadAccelerateDevice(variables, env));
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "MUSTER_CPU", &env->use_cpu));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int64_t{1},
                                    &env->gradient_accumulation_steps));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "MUSTER_GRADIENT_ACCUMULATION_STEPS", int64_t{1},
                                    &env->gradient_accumulation_steps));
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "ACCELERATE_DEBUG_MODE", &env->debug));
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "MUSTER_DEBUG", &env->debug));
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "MUSTER_SHM", &env->shared_memory));
  ReadText(variables, "MUSTER_PROJECT_DIR", &env->project_dir);
  WarnOfUnreadVariables(variables, env);
  MUSTER_RETURN_IF_ERROR(CheckLogVariables(variables));
  MUSTER_RETURN_IF_ERROR(ReadDuration(variables, "MUSTER_TIMEOUT", absl::Nanoseconds(1),
                                      "such as 90s or 10m", &env->timeout));
  MUSTER_RETURN_IF_ERROR(ReadDuration(variables, "MUSTER_OUTAGE_TOLERANCE", absl::ZeroDuration(),
                                      "such as 60s or 5m", &env->outage_tolerance));
  MUSTER_RETURN_IF_ERROR(ReadDuration(
      variables, "MUSTER_LEASE", kShortestLease,
      absl::StrCat("of at least ", absl::FormatDuration(kShortestLease), ", such as 6s or 1m"),
      &env->lease));

  const Environment defaults{};
  // The program's arguments take precedence over the user's variables, with a warning. A variable
  // with its default value causes no warning, because launchers set these variables even if the
  // user has asked for nothing.
  const auto take = [&](const auto& argument, const auto& fallback, auto* setting) {
    if (!argument) return;
    if (setting->value != *argument && setting->value != fallback.value) {
      env->warnings.push_back(absl::StrCat(setting->source, "=",
                                           Printable(absl::StrCat(setting->value)),
                                           " has no effect: the program itself sets ", *argument));
    }
    *setting = {*argument, "argument"};
  };
  take(arguments.mixed_precision, defaults.mixed_precision, &env->mixed_precision);
  take(arguments.gradient_accumulation_steps, defaults.gradient_accumulation_steps,
       &env->gradient_accumulation_steps);
  if (arguments.use_cpu) env->use_cpu = {*arguments.use_cpu, "argument"};
  if (arguments.debug) env->debug = {*arguments.debug, "argument"};
  if (arguments.project_dir) env->project_dir = {*arguments.project_dir, "argument"};
  if (arguments.timeout) env->timeout = {*arguments.timeout, "argument"};

  const std::string& precision = env->mixed_precision.value;
  if (precision != "no" && precision != "fp16" && precision != "bf16") {
    return absl::InvalidArgumentError(absl::StrCat("mixed precision '", Printable(precision),
                                                   "' (from ", env->mixed_precision.source,
                                                   ") is not one of no, fp16, bf16"));
  }
  constexpr std::array<absl::string_view, 5> kShardings = {"no_shard", "zero1", "zero2", "zero3",
                                                           "hybrid"};
  if (absl::c_find(kShardings, env->sharding.value) == kShardings.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("sharding '", Printable(env->sharding.value), "' (from ", env->sharding.source,
                     ") is not one of ", absl::StrJoin(kShardings, ", ")));
  }
  for (const auto& [name, dtype] :
       {std::pair{"sharding_parameter_dtype", &env->sharding_parameter_dtype},
        {"sharding_reduce_dtype", &env->sharding_reduce_dtype},
        {"sharding_output_dtype", &env->sharding_output_dtype},
        {"sharding_buffer_dtype", &env->sharding_buffer_dtype}}) {
    if (dtype->is_default()) continue;
    if (dtype->value != "fp32" && dtype->value != "bf16" && dtype->value != "fp16") {
      return absl::InvalidArgumentError(absl::StrCat(name, " '", Printable(dtype->value),
                                                     "' (from ", dtype->source,
                                                     ") is not one of fp32, bf16, fp16"));
    }
  }
  for (const auto& [name, offload] : {std::pair{"offload_optimizer", &env->offload_optimizer},
                                      {"offload_gradients", &env->offload_gradients},
                                      {"offload_parameters", &env->offload_parameters},
                                      {"offload_activations", &env->offload_activations}}) {
    const std::string& place = offload->value;
    if (place != "none" && place != "cpu" &&
        (!absl::StartsWith(place, "disk:") || place.size() == 5)) {
      return absl::InvalidArgumentError(absl::StrCat(name, " '", Printable(place), "' (from ",
                                                     offload->source,
                                                     ") is not one of none, cpu, disk:FOLDER"));
    }
  }
  // These settings would have no effect and be ignored silently.
  for (const std::string& source :
       {env->activation_blocks.source, env->offload_activations.source}) {
    if (!absl::StartsWith(source, "MUSTER_") || !env->activation_checkpointing.is_default()) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(source,
                     " refines activation checkpointing, but nothing enables it: set "
                     "MUSTER_ACTIVATION_CHECKPOINTING=yes as well, or unset it"));
  }
  if (env->gradient_accumulation_steps.value < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient_accumulation_steps=", env->gradient_accumulation_steps.value,
                     " (from ", env->gradient_accumulation_steps.source, ") is not at least 1"));
  }
  if (env->timeout.value <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("the timeout (from argument) must be positive");
  }
  env->timeout.value = std::min(env->timeout.value, kLongest);
  return absl::OkStatus();
}

}  // namespace

const char* LauncherName(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "no launcher";
    case Launcher::kMuster:
      return "muster";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kMpi:
      return "mpi";
    case Launcher::kSlurm:
      return "slurm";
  }
  return "unknown";
}

absl::StatusOr<Environment> ReadEnvironment(const std::map<std::string, std::string>& variables,
                                            const EnvironmentArguments& arguments) {
  Environment env;
  ReadText(variables, "MUSTER_COORDINATOR", &env.coordinator);
  ReadText(variables, "MUSTER_JOB", &env.job);
  ReadText(variables, "MUSTER_WORKER_ID", &env.worker_id);
  ReadText(variables, "MUSTER_MEMORY_SOCKET", &env.memory_socket);
  MUSTER_RETURN_IF_ERROR(ReadNumber<int64_t>(variables, "MUSTER_GENERATION", 0, &env.generation));
  MUSTER_RETURN_IF_ERROR(
      ReadNumber<uint64_t>(variables, "MUSTER_INCARNATION", 0, &env.incarnation));
  MUSTER_RETURN_IF_ERROR(ReadBool(variables, "TORCHELASTIC_USE_AGENT_STORE", &env.agent_store));
  MUSTER_RETURN_IF_ERROR(
      ReadNumber(variables, "TORCHELASTIC_RESTART_COUNT", 0, &env.restart_count));
  MUSTER_RETURN_IF_ERROR(ReadNumber(variables, "MUSTER_RESTART_COUNT", 0, &env.restart_count));
  ReadText(variables, "GLOO_SOCKET_IFNAME", &env.interface);
  ReadText(variables, "MUSTER_INTERFACE", &env.interface);
  ReadText(variables, "MUSTER_RACK", &env.rack);
  ReadText(variables, "MUSTER_NVLINK_DOMAIN", &env.nvlink_domain);
  ReadText(variables, "MUSTER_TLS_CA", &env.tls_ca);
  ReadText(variables, "MUSTER_TLS_CERT", &env.tls_cert);
  ReadText(variables, "MUSTER_TLS_KEY", &env.tls_key);
  ReadText(variables, "MUSTER_TOKEN_FILE", &env.token_file);
  MUSTER_RETURN_IF_ERROR(ReadPlace(variables, &env));
  MUSTER_RETURN_IF_ERROR(CheckPlace(&env));
  MUSTER_RETURN_IF_ERROR(ReadMeetingPoint(variables, &env));
  MUSTER_RETURN_IF_ERROR(ReadWishes(variables, arguments, &env));
  if (env.launcher == Launcher::kNone && !env.coordinator.value.empty()) {
    env.launcher = Launcher::kMuster;
    env.seated = false;
  }
  return env;
}

std::string Describe(const Environment& env) {
  std::string text = absl::StrCat("launcher ", LauncherName(env.launcher), "\n");
  const auto add = [&text](absl::string_view name, const auto& value, const std::string& source) {
    absl::StrAppend(&text, name, " ", value, " (from ", source, ")\n");
  };
  if (!env.seated) {
    absl::StrAppend(&text, "rank and world_size: given by the rendezvous\n");
  } else {
    add("rank", env.rank.value, env.rank.source);
    add("world_size", env.world_size.value, env.world_size.source);
    add("local_rank", env.local_rank.value, env.local_rank.source);
    add("local_world_size", env.local_world_size.value, env.local_world_size.source);
    add("node_rank", env.node_rank.value, env.node_rank.source);
    add("num_nodes", env.num_nodes.value, env.num_nodes.source);
  }
  for (const auto& [name, setting] :
       {std::pair<const char*, const Setting<std::string>*>{"coordinator", &env.coordinator},
        {"job", &env.job},
        {"worker_id", &env.worker_id},
        {"memory_socket", &env.memory_socket},
        {"master_addr", &env.master_addr},
        {"project_dir", &env.project_dir}}) {
    if (!setting->value.empty()) add(name, setting->value, setting->source);
  }
  if (env.master_port.value != 0) add("master_port", env.master_port.value, env.master_port.source);
  if (!env.generation.is_default()) add("generation", env.generation.value, env.generation.source);
  if (!env.incarnation.is_default()) {
    add("incarnation", env.incarnation.value, env.incarnation.source);
  }
  add("mixed_precision", env.mixed_precision.value, env.mixed_precision.source);
  if (!env.sharding.is_default()) add("sharding", env.sharding.value, env.sharding.source);
  for (const auto& [name, offload] : {std::pair{"offload_optimizer", &env.offload_optimizer},
                                      {"offload_gradients", &env.offload_gradients},
                                      {"offload_parameters", &env.offload_parameters},
                                      {"offload_activations", &env.offload_activations}}) {
    if (!offload->is_default()) add(name, offload->value, offload->source);
  }
  if (!env.activation_checkpointing.is_default()) {
    add("activation_checkpointing", env.activation_checkpointing.value ? "yes" : "no",
        env.activation_checkpointing.source);
  }
  add("cpu", env.use_cpu.value ? "yes" : "no", env.use_cpu.source);
  add("gradient_accumulation_steps", env.gradient_accumulation_steps.value,
      env.gradient_accumulation_steps.source);
  add("debug", env.debug.value ? "yes" : "no", env.debug.source);
  add("shared_memory", env.shared_memory.value ? "yes" : "no", env.shared_memory.source);
  add("timeout", absl::FormatDuration(env.timeout.value), env.timeout.source);
  if (!env.outage_tolerance.is_default()) {
    add("outage_tolerance", absl::FormatDuration(env.outage_tolerance.value),
        env.outage_tolerance.source);
  }
  if (!env.lease.is_default())
    add("lease", absl::FormatDuration(env.lease.value), env.lease.source);
  return text;
}

}  // namespace muster
