#include "client/config/torchrun_flags.h"

#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "client/config/python_values.h"

namespace muster::client {
namespace {

using Flags = std::map<std::string, std::string>;

// The port of torchrun, for addresses without one.
constexpr char kRendezvousPort[] = "29400";
constexpr char kMasterPort[] = "29500";

std::string Written(const std::string& name) {
  return absl::StrCat(name.size() == 1 ? "-" : "--", name);
}

absl::Status Wrong(const std::string& name, absl::string_view value, absl::string_view remedy) {
  return absl::InvalidArgumentError(
      absl::StrCat(Written(name), value.empty() ? "" : " ", value, ": ", remedy));
}

// Returns the value in the first layer that has it; null if none does.
const Given* FirstGiven(const std::vector<Layer>& layers, const std::string& name) {
  for (const Layer& layer : layers) {
    const auto it = layer.settings.find(name);
    if (it != layer.settings.end()) return &it->second;
  }
  return nullptr;
}

// Returns the number of machines. ResolveLaunch reports a wrong number, with all the other
// settings.
int NumMachines(const std::vector<Layer>& layers) {
  const Given* const given = FirstGiven(layers, "num_machines");
  return given == nullptr ? 1 : ParseMachines(given->text).value_or(MachineCount()).most;
}

absl::Status CheckRivals(const TorchrunFlag& flag, const Flags& given) {
  for (const std::string& rival : flag.rivals) {
    if (given.count(rival) == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(Written(flag.name), " and ", Written(rival),
                                                   " mean the same: give only one of them"));
  }
  return absl::OkStatus();
}

// Removes flags without a value that are switched off.
absl::StatusOr<Flags> WithoutFalse(Flags given) {
  for (const TorchrunFlag& flag : TorchrunFlags()) {
    const auto it = given.find(flag.name);
    if (it == given.end() || !flag.value_name.empty()) continue;
    const absl::StatusOr<bool> on = ParseBool(it->second);
    if (!on.ok()) return Wrong(flag.name, it->second, "it must be true or false");
    if (!*on) given.erase(it);
  }
  return given;
}

absl::Status ApplyMachines(const std::string& value, Layer* flags) {
  const std::optional<MachineCount> count = ParseMachines(value);
  if (!count.has_value()) {
    return Wrong("nnodes", value, "write the number of machines, 1 or more, or a range, MIN:MAX");
  }
  flags->settings["num_machines"] = {count->least == count->most
                                         ? absl::StrCat(count->most)
                                         : absl::StrCat(count->least, ":", count->most),
                                     absl::StrCat("--nnodes ", value)};
  return absl::OkStatus();
}

// Applies KEY=VALUE,...: the keys of torchrun's c10d and static backends.
absl::Status ApplyConf(const std::string& value, Layer* flags) {
  for (const absl::string_view part : absl::StrSplit(value, ',')) {
    const std::pair<std::string, std::string> entry = absl::StrSplit(part, absl::MaxSplits('=', 1));
    const std::string& key = entry.first;
    const std::string source = absl::StrCat("--rdzv_conf ", key);
    const std::string setting = key == "timeout" || key == "join_timeout" ? "join_timeout"
                                : key == "last_call_timeout"              ? "last_call"
                                                                          : "";
    if (key == "is_host") {
      const absl::StatusOr<bool> is_host = ParseBool(entry.second);
      if (!is_host.ok()) return Wrong("rdzv_conf", part, "is_host must be true or false");
      // Machine 0 is the host; the coordinator numbers the others.
      if (*is_host) flags->settings["machine_rank"] = {"0", source};
      continue;
    }
    if (setting.empty()) {
      return Wrong("rdzv_conf", part,
                   "of its keys a launch has timeout, join_timeout, last_call_timeout and is_host; "
                   "the coordinator has its own settings for the others: leave it out");
    }
    const std::optional<double> seconds = ParsePythonFloat(entry.second);
    if (!seconds.has_value() || !(*seconds > 0) || *seconds > 1e9) {
      return Wrong("rdzv_conf", part, absl::StrCat(key, " must be a number of seconds"));
    }
    flags->settings[setting] = {absl::FormatDuration(absl::Seconds(*seconds)), source};
  }
  return absl::OkStatus();
}

absl::Status ApplyEndpoint(const std::string& value, Layer* flags) {
  const bool has_port = absl::StrContains(value, ':') && !absl::EndsWith(value, "]");
  return AddCoordinator(has_port ? value : absl::StrCat(value, ":", kRendezvousPort),
                        "--rdzv_endpoint", flags);
}

absl::Status ApplyMaster(const Flags& given, Layer* flags) {
  const auto address = given.find("master_addr");
  const auto port = given.find("master_port");
  if (address != given.end()) {
    const bool v6 = absl::StrContains(address->second, ':');
    const std::string ip = v6 ? absl::StrCat("[", address->second, "]") : address->second;
    MUSTER_RETURN_IF_ERROR(
        AddCoordinator(absl::StrCat(ip, ":", kMasterPort), "--master_addr", flags));
  }
  // ResolveLaunch checks its range, with all the other settings.
  if (port != given.end()) {
    flags->settings["main_process_port"] = {port->second, "--master_port"};
  }
  return absl::OkStatus();
}

// Sets one machine, whatever variables and the config file say.
absl::Status ApplyStandalone(Layer* flags) {
  const std::pair<const char*, const char*> fixed[] = {{"num_machines", "1"},
                                                       {"machine_rank", "0"},
                                                       {"main_process_ip", ""},
                                                       {"main_process_port", "0"}};
  for (const auto& [name, value] : fixed) {
    const auto it = flags->settings.find(name);
    if (it == flags->settings.end()) {
      flags->settings[name] = {value, "--standalone"};
    } else if (it->second.text != value) {
      return absl::InvalidArgumentError(
          absl::StrCat("--standalone runs one machine without an address, but ", it->second.source,
                       " was given too: leave one of them out"));
    }
  }
  return absl::OkStatus();
}

absl::Status ApplyProcesses(const std::string& value, const MachineFacts& machine,
                            std::vector<Layer>* layers) {
  MUSTER_ASSIGN_OR_RETURN(const int gpus, CountGpus(*layers, machine));
  Layer& flags = layers->front();
  const std::string source = absl::StrCat("--nproc_per_node ", value);
  int here = 0;
  if (value == "gpu") {
    if (gpus == 0) {
      return Wrong("nproc_per_node", value,
                   "this machine has no usable GPU (muster env shows what was found): write a "
                   "number, auto or cpu");
    }
    here = gpus;
  } else if (value == "cpu") {
    const auto cpu = flags.settings.find("cpu");
    if (cpu != flags.settings.end() && !ParseBool(cpu->second.text).value_or(true)) {
      return Wrong("nproc_per_node", value,
                   "it trains on the CPU, but --cpu is false: leave one of them out");
    }
    flags.settings["cpu"] = {"true", source};
    here = machine.cores;
  } else if (value == "auto") {
    const Given* const cpu = FirstGiven(*layers, "cpu");
    const bool on_cpu = cpu != nullptr && ParseBool(cpu->text).value_or(false);
    here = gpus > 0 && !on_cpu ? gpus : machine.cores;
  } else if (!absl::SimpleAtoi(value, &here) || here < 1) {
    return Wrong("nproc_per_node", value,
                 "write the processes of each machine, 1 or more, or auto, gpu or cpu");
  }
  flags.settings["num_processes"] = {absl::StrCat(int64_t{here} * NumMachines(*layers)), source};
  return absl::OkStatus();
}

absl::Status ApplyBackend(const std::string& backend, std::vector<Layer>* layers) {
  if (backend != "c10d" && backend != "static") {
    return Wrong("rdzv_backend", backend,
                 "the machines of a launch meet at Muster's coordinator: write c10d or static, or "
                 "leave it out");
  }
  if (backend == "c10d" && NumMachines(*layers) > 1 &&
      FirstGiven(*layers, "machine_rank") == nullptr) {
    layers->front().settings["machine_rank"] = {"-1", "--rdzv_backend c10d"};
  }
  return absl::OkStatus();
}

}  // namespace

const std::vector<TorchrunFlag>& TorchrunFlags() {
  static const auto* const flags = new std::vector<TorchrunFlag>{
      {.name = "nproc_per_node",
       .value_name = "N|auto|gpu|cpu",
       .help = "num_processes, as N per machine. gpu: one per GPU; cpu: one per core, on the CPU; "
               "auto: gpu if the machine has GPUs, else one per core",
       .choices = {"auto", "gpu", "cpu"},
       .rivals = {"num_processes"}},
      {.name = "nnodes",
       .value_name = "M|MIN:MAX",
       .help = "num_machines",
       .rivals = {"num_machines"}},
      {.name = "node_rank", .value_name = "R", .help = "machine_rank", .rivals = {"machine_rank"}},
      {.name = "rdzv_endpoint",
       .value_name = "IP[:PORT]",
       .help = absl::StrCat("coordinator; default port: ", kRendezvousPort),
       .rivals = {"coordinator", "main_process_ip", "main_process_port", "master_addr",
                  "master_port"}},
      {.name = "rdzv_backend",
       .value_name = "c10d|static",
       .help = "Accepted; Muster's coordinator replaces both. c10d: machine_rank defaults to -1",
       .choices = {"c10d", "static"}},
      {.name = "rdzv_id", .value_name = "NAME", .help = "job_name", .rivals = {"job_name"}},
      {.name = "master_addr",
       .value_name = "IP",
       .help = absl::StrCat("main_process_ip; default port: ", kMasterPort),
       .rivals = {"coordinator", "main_process_ip", "main_process_port"}},
      {.name = "master_port",
       .value_name = "PORT",
       .help = "main_process_port",
       .rivals = {"coordinator", "main_process_port"}},
      {.name = "standalone",
       .help = "One machine on a private socket; overrides variables and the config file"},
      {.name = "no_python",
       .help = "Accepted without effect: muster launch always runs PROGRAM itself"},
      {.name = "module",
       .letter = "m",
       .refusal = "a launch runs programs: write -- python3 -m MODULE"},
      {.name = "run_path", .refusal = "a launch runs programs: write -- python3 PATH"},
      {.name = "rdzv_conf",
       .value_name = "KEY=SECONDS,...",
       .help = "timeout, join_timeout: join_timeout; last_call_timeout: last_call; is_host=1: "
               "machine_rank 0"},
      {.name = "role",
       .value_name = "NAME",
       .refusal = "all processes of a launch have the role default: leave it out"},
      {.name = "monitor_interval",
       .value_name = "SECONDS",
       .refusal = "the launcher hears of an exit at once and does not poll: leave it out"},
      {.name = "start_method",
       .value_name = "METHOD",
       .refusal = "every process is a new program: leave it out"},
      {.name = "event_log_handler",
       .value_name = "NAME",
       .refusal = "a launch has no event handlers: leave it out; muster status shows the job"},
      {.name = "redirects",
       .value_name = "STREAMS",
       .letter = "r",
       .refusal = "both streams go to files together: write --log_dir FOLDER"},
      {.name = "t",
       .value_name = "STREAMS",
       .letter = "t",
       .refusal = "both streams are shown together: write --log_dir FOLDER --tee"},
      {.name = "local_ranks_filter",
       .value_name = "RANKS",
       .refusal = "the output of all processes is shown: write --log_dir FOLDER for one file each"},
      {.name = "duplicate_stdout_filters",
       .value_name = "FILTERS",
       .refusal = "output is not filtered: write --log_dir FOLDER for one file each"},
      {.name = "duplicate_stderr_filters",
       .value_name = "FILTERS",
       .refusal = "output is not filtered: write --log_dir FOLDER for one file each"},
      {.name = "logs_specs",
       .value_name = "NAME",
       .refusal = "a launch has no plug-ins for logs: write --log_dir FOLDER"},
      {.name = "local_addr",
       .value_name = "IP",
       .refusal = "a machine needs no address of its own, only the coordinator's: leave it out"},
      {.name = "numa_binding",
       .value_name = "MODE",
       .refusal = "a launch binds no process to a NUMA node: start PROGRAM through numactl"},
      {.name = "signals_to_handle",
       .value_name = "SIGNALS",
       .refusal = "a launch stops its processes on SIGTERM, SIGINT and SIGHUP: leave it out"},
      {.name = "virtual_local_rank",
       .refusal = "LOCAL_RANK is the index of the process on its machine: leave it out"},
  };
  return *flags;
}

absl::Status ApplyTorchrunFlags(const std::map<std::string, std::string>& all,
                                const MachineFacts& machine, std::vector<Layer>* layers) {
  MUSTER_ASSIGN_OR_RETURN(const Flags given, WithoutFalse(all));
  for (const TorchrunFlag& flag : TorchrunFlags()) {
    const auto it = given.find(flag.name);
    if (it == given.end()) continue;
    if (!flag.refusal.empty()) {
      const bool has_value = !flag.value_name.empty();
      return Wrong(flag.name, has_value ? it->second : "", flag.refusal);
    }
    MUSTER_RETURN_IF_ERROR(CheckRivals(flag, given));
  }
  Layer& flags = layers->front();
  const auto value = [&](const char* name) {
    const auto it = given.find(name);
    return it == given.end() ? nullptr : &it->second;
  };
  if (const auto* nodes = value("nnodes")) MUSTER_RETURN_IF_ERROR(ApplyMachines(*nodes, &flags));
  if (const auto* rank = value("node_rank")) {
    flags.settings["machine_rank"] = {*rank, "--node_rank"};
  }
  if (const auto* conf = value("rdzv_conf")) MUSTER_RETURN_IF_ERROR(ApplyConf(*conf, &flags));
  if (const auto* endpoint = value("rdzv_endpoint")) {
    MUSTER_RETURN_IF_ERROR(ApplyEndpoint(*endpoint, &flags));
  }
  MUSTER_RETURN_IF_ERROR(ApplyMaster(given, &flags));
  if (const auto* id = value("rdzv_id")) flags.settings["job_name"] = {*id, "--rdzv_id"};
  if (value("standalone") != nullptr) MUSTER_RETURN_IF_ERROR(ApplyStandalone(&flags));
  // These need the number of machines.
  if (const auto* backend = value("rdzv_backend")) {
    MUSTER_RETURN_IF_ERROR(ApplyBackend(*backend, layers));
  }
  if (const auto* processes = value("nproc_per_node")) {
    MUSTER_RETURN_IF_ERROR(ApplyProcesses(*processes, machine, layers));
  }
  return absl::OkStatus();
}

}  // namespace muster::client
