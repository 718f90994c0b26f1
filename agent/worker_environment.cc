#include "agent/worker_environment.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace muster::agent {
namespace {

const char* YesNo(bool value) { return value ? "true" : "false"; }
std::optional<std::string> Text(std::optional<bool> value) {
  return value.has_value() ? std::optional<std::string>(YesNo(*value)) : std::nullopt;
}

// Variables of an outer launcher: true for the process that it started, wrong for each of our
// workers.
bool IsPlaceOfOtherLauncher(const std::string& name) {
  for (const char* prefix : {"OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL"}) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  return false;
}

}  // namespace

std::map<std::string, std::string> MakeWorkerVariables(
    const WorkerEnvironment& worker, const std::map<std::string, std::string>& inherited) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : inherited) {
    if (!IsPlaceOfOtherLauncher(name)) out[name] = value;
  }
  for (const auto& [name, value] : worker.extra) out[name] = value;
  const auto set = [&out](const char* name, const auto& value) { out[name] = absl::StrCat(value); };
  const auto set_if = [&](const char* name, const std::string& value) {
    if (value.empty()) {
      out.erase(name);
    } else {
      out[name] = value;
    }
  };
  // A value for one of the two counts for both, so neither gets the default then.
  const auto set_both = [&](const char* name, const char* of_accelerate,
                            const std::optional<std::string>& value, const char* fallback) {
    if (!value.has_value() && out.contains(name))
      return void(out.emplace(of_accelerate, out[name]));
    if (!value.has_value() && out.contains(of_accelerate))
      return void(out[name] = out[of_accelerate]);
    out[name] = out[of_accelerate] = value.value_or(fallback);
  };

  const Place& place = worker.place;
  set("MUSTER_RANK", place.rank);
  set("MUSTER_WORLD_SIZE", place.world_size);
  set("MUSTER_LOCAL_RANK", place.local_rank);
  set("MUSTER_LOCAL_WORLD_SIZE", place.local_world_size);
  set("MUSTER_NODE_RANK", place.node_rank);
  set("MUSTER_NUM_NODES", place.num_nodes);
  set_if("MUSTER_COORDINATOR", worker.coordinator);
  set_if("MUSTER_TLS_CA", worker.tls.ca);
  set_if("MUSTER_TLS_CERT", worker.tls.cert);
  set_if("MUSTER_TLS_KEY", worker.tls.key);
  set_if("MUSTER_TOKEN_FILE", worker.token_file);
  if (!worker.rack.empty()) set("MUSTER_RACK", worker.rack);
  if (!worker.nvlink_domain.empty()) set("MUSTER_NVLINK_DOMAIN", worker.nvlink_domain);
  set("MUSTER_JOB", worker.job);
  set("MUSTER_WORKER_ID", worker.worker_id);
  set("MUSTER_INCARNATION", worker.incarnation);
  out.erase("MUSTER_GENERATION");
  set("MUSTER_RESTART_COUNT", worker.restart_count);
  set("MUSTER_OUTAGE_TOLERANCE", absl::FormatDuration(worker.outage_tolerance));
  set("MUSTER_LEASE", absl::FormatDuration(worker.lease));

  set_both("MUSTER_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION", worker.mixed_precision, "no");
  if (!worker.sharding.empty()) set("MUSTER_SHARDING", worker.sharding);
  if (worker.activation_checkpointing.has_value()) {
    set("MUSTER_ACTIVATION_CHECKPOINTING", YesNo(*worker.activation_checkpointing));
  }
  if (!worker.activation_blocks.empty()) set("MUSTER_ACTIVATION_BLOCKS", worker.activation_blocks);
  if (!worker.offload_activations.empty()) {
    set("MUSTER_OFFLOAD_ACTIVATIONS", worker.offload_activations);
  }
  set_both("MUSTER_CPU", "ACCELERATE_USE_CPU", Text(worker.cpu), "false");
  // In Accelerate, the variable wins over the program.
  if (worker.gradient_accumulation_steps > 0) {
    set("MUSTER_GRADIENT_ACCUMULATION_STEPS", worker.gradient_accumulation_steps);
    set("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", worker.gradient_accumulation_steps);
  }
  set_both("MUSTER_DEBUG", "ACCELERATE_DEBUG_MODE", Text(worker.debug), "false");
  set("MUSTER_AGENT_TELLS", YesNo(worker.agent_tells));
  set_if("MUSTER_MEMORY_SOCKET", worker.memory_socket);

  set("RANK", place.rank);
  set("WORLD_SIZE", place.world_size);
  set("LOCAL_RANK", place.local_rank);
  set("LOCAL_WORLD_SIZE", place.local_world_size);
  set("GROUP_RANK", place.node_rank);
  set("GROUP_WORLD_SIZE", place.num_nodes);
  set("ROLE_RANK", place.rank);
  set("ROLE_WORLD_SIZE", place.world_size);
  set("ROLE_NAME", "default");
  set("MASTER_ADDR", worker.master_addr);
  set("MASTER_PORT", worker.master_port);
  set("TORCHELASTIC_RESTART_COUNT", worker.restart_count);
  set("TORCHELASTIC_MAX_RESTARTS", worker.max_restarts);
  set("TORCHELASTIC_RUN_ID", worker.job);
  // "True" would make torch assume that the launcher already serves a TCPStore at MASTER_PORT.
  set("TORCHELASTIC_USE_AGENT_STORE", "False");

  if (worker.threads > 0) {
    set("OMP_NUM_THREADS", worker.threads);
  } else if (const auto it = out.find("OMP_NUM_THREADS"); it == out.end() || it->second.empty()) {
    set("OMP_NUM_THREADS", std::max(1, worker.cores / std::max(1, place.local_world_size)));
  }
  return out;
}

std::vector<std::string> ToEnvironmentBlock(const std::map<std::string, std::string>& variables) {
  std::vector<std::string> block;
  for (const auto& [name, value] : variables) block.push_back(absl::StrCat(name, "=", value));
  return block;
}

}  // namespace muster::agent
