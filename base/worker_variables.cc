#include "base/worker_variables.h"

namespace muster {
namespace {

constexpr WorkerVariable kVariables[] = {
    {"MUSTER_RANK", ""},
    {"MUSTER_WORLD_SIZE", ""},
    {"MUSTER_LOCAL_RANK", ""},
    {"MUSTER_LOCAL_WORLD_SIZE", ""},
    {"MUSTER_NODE_RANK", ""},
    {"MUSTER_NUM_NODES", ""},
    {"MUSTER_COORDINATOR", ""},
    {"MUSTER_JOB", ""},
    {"MUSTER_WORKER_ID", ""},
    {"MUSTER_INCARNATION", ""},
    {"MUSTER_GENERATION", ""},
    {"MUSTER_RESTART_COUNT", ""},
    {"MUSTER_PROCESS_TREE", ""},
    {"MUSTER_MEMORY_SOCKET", ""},
    {"MUSTER_AGENT_TELLS", ""},
    {"MUSTER_TLS_CA", "tls_ca"},
    {"MUSTER_TLS_CERT", "tls_cert"},
    {"MUSTER_TLS_KEY", "tls_key"},
    {"MUSTER_TOKEN_FILE", "token_file"},
    {"MUSTER_OUTAGE_TOLERANCE", "outage_tolerance"},
    {"MUSTER_LEASE", "lease"},
    {"MUSTER_MIXED_PRECISION", "mixed_precision"},
    {"ACCELERATE_MIXED_PRECISION", "mixed_precision"},
    {"MUSTER_CPU", "cpu"},
    {"ACCELERATE_USE_CPU", "cpu"},
    {"MUSTER_DEBUG", "debug"},
    {"ACCELERATE_DEBUG_MODE", "debug"},
    {"RANK", ""},
    {"WORLD_SIZE", ""},
    {"LOCAL_RANK", ""},
    {"LOCAL_WORLD_SIZE", ""},
    {"GROUP_RANK", ""},
    {"GROUP_WORLD_SIZE", ""},
    {"ROLE_RANK", ""},
    {"ROLE_WORLD_SIZE", ""},
    {"ROLE_NAME", ""},
    {"MASTER_ADDR", ""},
    {"MASTER_PORT", ""},
    {"TORCHELASTIC_RESTART_COUNT", ""},
    {"TORCHELASTIC_MAX_RESTARTS", ""},
    {"TORCHELASTIC_RUN_ID", ""},
    {"TORCHELASTIC_USE_AGENT_STORE", ""},
};

}  // namespace

const WorkerVariable* FindWorkerVariable(absl::string_view name) {
  for (const WorkerVariable& variable : kVariables) {
    if (variable.name == name) return &variable;
  }
  return nullptr;
}

}  // namespace muster
