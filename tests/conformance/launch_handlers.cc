#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "client/config/accelerate_launch.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;
using Variables = std::map<std::string, std::string>;

// Returns the variables that a recorded environment shows.
Json Shown(const Variables& given, const Variables& launch) {
  static const auto* const kNames = new std::set<std::string>{"RANK",
                                                              "LOCAL_RANK",
                                                              "WORLD_SIZE",
                                                              "LOCAL_WORLD_SIZE",
                                                              "GROUP_RANK",
                                                              "GROUP_WORLD_SIZE",
                                                              "ROLE_RANK",
                                                              "ROLE_WORLD_SIZE",
                                                              "ROLE_NAME",
                                                              "MASTER_ADDR",
                                                              "MASTER_PORT",
                                                              "TORCHELASTIC_RESTART_COUNT",
                                                              "TORCHELASTIC_MAX_RESTARTS",
                                                              "OMP_NUM_THREADS",
                                                              "KMP_AFFINITY",
                                                              "KMP_BLOCKTIME",
                                                              "CUDA_VISIBLE_DEVICES"};
  Json shown = Json::object();
  for (const Variables* all : {&given, &launch}) {
    for (const auto& [name, value] : *all) {
      bool show = kNames->contains(name);
      for (const char* prefix : {"ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_"}) {
        show |= absl::StartsWith(name, prefix);
      }
      if (show) shown[name] = value;
    }
  }
  return shown;
}

Json ConfigYamlCase(const Json& in) {
  client::AccelerateMachine machine;
  machine.physical_cores = static_cast<int>(std::thread::hardware_concurrency());
  const Json assume = in.value("assume", Json::object());
  if (assume.contains("physical_cores")) machine.physical_cores = assume["physical_cores"];
  machine.fp8 = assume.value("fp8", false);
  client::AccelerateConfig config;
  const bool has_file = !in.at("config").is_null();
  if (has_file) {
    config = ValueOf(client::ParseAccelerateConfig(
        in["config"].get<std::string>(),
        in.value("config_format", "") == "json" ? "config.json" : "config.yaml"));
  }
  const auto variables = in.value("env", Variables());
  const std::vector<std::string> args = in.at("args");
  const auto plan = [&](const std::vector<std::string>& flags) {
    return ValueOf(
        client::PlanAccelerateLaunch(has_file ? &config : nullptr, flags, variables, machine));
  };
  const client::AccelerateLaunch launch = plan(args);
  using Launcher = client::AccelerateLaunch::Launcher;
  Json out;
  out["launcher"] = launch.launcher == Launcher::kSimple     ? "simple"
                    : launch.launcher == Launcher::kTorchrun ? "torchrun"
                                                             : "deepspeed";
  if (in.value("prepare_only", false) || launch.env.contains("ACCELERATE_USE_DEEPSPEED")) {
    out["env"] = Shown(variables, launch.env);
    if (!launch.agent.empty()) out["torchrun"] = launch.agent;
    if (!launch.command.empty()) out["command"] = launch.command;
    return out;
  }
  out["processes"] = Json::array();
  for (int node = 0; node < in.value("nodes", 1); ++node) {
    std::vector<std::string> flags = args;
    int machine_rank = launch.machine_rank;
    if (in.contains("nodes")) {
      flags.insert(flags.end(), {"--machine_rank", std::to_string(node)});
      machine_rank = node;
    }
    for (const Variables& process : client::ProcessVariables(plan(flags), machine_rank)) {
      out["processes"].push_back(Shown(variables, process));
    }
  }
  return out;
}

}  // namespace

std::map<std::string, Handler> LaunchHandlers() { return {{"config_yaml", ConfigYamlCase}}; }

}  // namespace muster::conformance
