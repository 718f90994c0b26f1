// GCC 12 takes variables that <regex> moves for uninitialized when it builds for sanitizers.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "client/config/launch_config.h"

#include <algorithm>
#include <optional>
#include <regex>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/bool_word.h"
#include "base/defaults.h"
#include "base/file.h"
#include "base/home_path.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "base/text.h"
#include "base/worker_variables.h"
#include "base/yaml.h"
#include "client/config/accelerate_launch.h"
#include "proto/failure_policy.h"
#include "proto/job_limits.h"
#include "rpc/address.h"

namespace muster::client {
namespace {

using Type = SettingSpec::Type;
using nlohmann::json;

constexpr int kMaxCount = 1'000'000;

std::vector<std::string> AllKeys() {
  std::vector<std::string> keys = {"coordinator", "env"};
  for (const SettingSpec& spec : LaunchSettings()) keys.push_back(spec.name);
  return keys;
}

// Whether a key of Accelerate's config file means nothing in one of ours.
bool IsAcceleratesOnly(absl::string_view key) {
  static const char* const kKeys[] = {
      "downcast_bf16",      "enable_cpu_affinity", "main_training_function",
      "rdzv_backend",       "same_network",        "tpu_env",
      "tpu_use_cluster",    "tpu_use_sudo",        "deepspeed_config",
      "fsdp_config",        "megatron_lm_config",  "dynamo_config",
      "parallelism_config", "mpirun_config",       "fp8_config"};
  return std::find(std::begin(kKeys), std::end(kKeys), key) != std::end(kKeys);
}

absl::Status BadValue(absl::string_view name, const Given& given, absl::string_view must) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": ", given.text.empty() ? "an empty value" : Printable(given.text),
                   " (from ", given.source, ") is not allowed: it must be ", must));
}

constexpr char kPlaceRule[] = "none, cpu or disk:FOLDER";
constexpr char kDiskPlace[] = "disk:";
bool IsPlace(absl::string_view text) {
  return text == "none" || text == "cpu" ||
         (absl::ConsumePrefix(&text, kDiskPlace) && !text.empty());
}

// The syntax that programs read (worker/parallel/shard_plan.cc).
constexpr char kPatternRule[] = "a regular expression for whole names, such as head|.*\\.bias";
bool IsPattern(absl::string_view text) {
  try {
    (void)std::regex(text.begin(), text.end());
    return true;
  } catch (const std::regex_error&) {
    return false;
  }
}

// The rule for a text, if not any text is valid. An empty text means not set.
struct TextRule {
  const char* setting;
  const char* rule;
  bool (*fits)(absl::string_view text);
};
constexpr TextRule kTextRules[] = {
    {"gpu_ids", "all, or numbers or names of GPUs such as 0,1; --cpu uses none",
     [](absl::string_view text) {
       if (text == "all") return true;
       const std::vector<absl::string_view> ids = SplitGpuIds(text);
       return std::all_of(ids.begin(), ids.end(), [](absl::string_view id) {
         int number = 0;
         id = absl::StripAsciiWhitespace(id);
         return absl::StartsWith(id, "GPU-") || absl::StartsWith(id, "MIG-") ||
                (absl::SimpleAtoi(id, &number) && number >= 0);
       });
     }},
    {"offload_activations", kPlaceRule, &IsPlace},
    {"offload_optimizer", kPlaceRule, &IsPlace},
    {"offload_gradients", kPlaceRule, &IsPlace},
    {"offload_parameters", kPlaceRule, &IsPlace},
    {"sharding_ignored_modules", kPatternRule, &IsPattern},
    {"sharding_ignored_parameters", kPatternRule, &IsPattern},
    {"hub_listen", "an address of this machine, IP:PORT",
     [](absl::string_view text) {
       const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(text);
       return address.ok() && !address->is_unix();
     }},
    {"job_name", "at most 200 characters on one line",
     [](absl::string_view text) {
       return text.size() <= 200 && IsValidUtf8(text) &&
              std::none_of(text.begin(), text.end(),
                           [](unsigned char c) { return absl::ascii_iscntrl(c); });
     }},
};
const TextRule* RuleOfText(absl::string_view setting) {
  for (const TextRule& one : kTextRules) {
    if (setting == one.setting) return &one;
  }
  return nullptr;
}

absl::Status CheckValue(const SettingSpec& spec, const Given& given) {
  if (FitsRule(spec, given.text)) return absl::OkStatus();
  // The rule in words omits the upper limit, which no real setting reaches: a larger number gets
  // its own message.
  int64_t number = 0;
  if (spec.type == Type::kInt && absl::SimpleAtoi(given.text, &number) && number > spec.max) {
    return BadValue(spec.name, given,
                    absl::StrCat("a whole number from ", spec.min, " to ", spec.max));
  }
  return BadValue(spec.name, given, ValueRule(spec));
}

std::optional<std::vector<int>> ParseExitCodes(absl::string_view text) {
  std::vector<int> codes;
  for (const absl::string_view word : absl::StrSplit(text, ',')) {
    int code = 0;
    if (!absl::SimpleAtoi(word, &code) || code < 1 || code > 255) return std::nullopt;
    codes.push_back(code);
  }
  return codes;
}

// Converts a map or list to the text that a flag would have; nullopt if the setting takes none.
std::optional<std::string> CollectionText(const SettingSpec& spec, const json& value) {
  std::vector<std::string> words;
  if (spec.type == Type::kPolicy && value.is_object()) {
    for (const auto& [name, count] : value.items()) {
      words.push_back(absl::StrCat(name, "=", count.dump()));
    }
  } else if (spec.type == Type::kExitCodes && value.is_array()) {
    for (const json& code : value) words.push_back(code.dump());
  } else {
    return std::nullopt;
  }
  return absl::StrJoin(words, ",");
}

// Converts a scalar to the text that a flag would have; nullopt for null and for other types.
std::optional<std::string> ScalarText(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number()) return value.dump();
  return std::nullopt;
}

class Resolver {
 public:
  explicit Resolver(const std::vector<Layer>& layers) : layers_(layers) {}

  Given Get(const std::string& name) const {
    for (const Layer& layer : layers_) {
      const auto it = layer.settings.find(name);
      if (it != layer.settings.end()) return it->second;
    }
    return {FindSetting(name)->fallback, "default"};
  }
  bool Has(const std::string& name) const { return Get(name).source != "default"; }
  // Whether `name` is given in a layer that has precedence over the one that gives `other`.
  bool IsAbove(const std::string& name, const std::string& other) const {
    for (const Layer& layer : layers_) {
      if (layer.settings.contains(other)) return false;
      if (layer.settings.contains(name)) return true;
    }
    return false;
  }
  std::string Text(const std::string& name) const { return Get(name).text; }
  int Int(const std::string& name) const {
    int value = 0;
    return absl::SimpleAtoi(Text(name), &value) ? value : 0;
  }
  bool Bool(const std::string& name) const { return ParseBool(Text(name)).value_or(false); }
  absl::Duration Duration(const std::string& name) const {
    absl::Duration value;
    return absl::ParseDuration(Text(name), &value) ? value : absl::ZeroDuration();
  }

 private:
  const std::vector<Layer>& layers_;
};

// Checks that the coordinator can authenticate its callers. If only processes of this machine's
// user are meant, the launcher takes care of it, by a private socket or its own token.
absl::Status CheckCallersAreKnown(const LaunchConfig& config, const Resolver& values) {
  bool local = config.coordinator_ip.empty();
  if (!local) {
    const bool v6 = absl::StrContains(config.coordinator_ip, ':');
    const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(absl::StrCat(
        v6 ? "[" : "", config.coordinator_ip, v6 ? "]:" : ":", config.coordinator_port));
    if (!address.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("main_process_ip: ", address.status().message(), " (from ",
                       values.Get("main_process_ip").source, ")"));
    }
    local = address->is_loopback();
  }
  if (local && config.num_machines == 1) return absl::OkStatus();
  const bool certificates = !config.tls.ca.empty() && !config.tls.cert.empty();
  const bool token = !config.token_file.empty();
  const bool tls = !config.tls.ca.empty() && (config.machine_rank != 0 || !config.tls.cert.empty());
  if (certificates || (token && (local || tls))) return absl::OkStatus();
  const std::string where = absl::StrCat(
      config.num_machines > 1 ? absl::StrCat("num_machines: ", values.Text("num_machines"),
                                             " (from ", values.Get("num_machines").source, ")")
                              : absl::StrCat("coordinator: ", config.coordinator_ip, " (from ",
                                             values.Get("main_process_ip").source, ")"));
  if (local) {
    return absl::InvalidArgumentError(
        absl::StrCat(where,
                     " needs a coordinator that authenticates its callers: give --token_file, the "
                     "same for all, or --tls_ca, --tls_cert and --tls_key"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      where, " needs ",
      !token                  ? "a coordinator that authenticates its callers"
      : config.tls.ca.empty() ? "TLS in addition to the token, which would travel in clear text"
                              : "a certificate of machine 0, which serves TLS",
      ": give --tls_ca, --tls_cert and --tls_key, or --token_file with --tls_ca (and "
      "--tls_cert and --tls_key on machine 0)"));
}

std::string YamlScalar(const SettingSpec& spec, const std::string& text) {
  if (spec.type == Type::kInt || spec.type == Type::kBool) return text;
  if (spec.type == Type::kMachines && !absl::StrContains(text, ':')) return text;
  return JsonQuote(text);
}

}  // namespace

const std::vector<SettingSpec>& LaunchSettings() {
  static const auto* const settings = new std::vector<SettingSpec>{
      {.name = "num_processes",
       .variable = "MUSTER_NUM_PROCESSES",
       .type = Type::kInt,
       .min = 1,
       .max = kMaxCount,
       .value_name = "N",
       .help = "Processes of the whole job. Default: one for each GPU, else one for each machine"},
      {.name = "cpu",
       .alias = "use_cpu",
       .variable = "MUSTER_CPU",
       .type = Type::kBool,
       .fallback = "false",
       .help = "Train on the CPU, even if there are GPUs"},
      {.name = "gpu_ids",
       .variable = "MUSTER_GPU_IDS",
       .value_name = "LIST",
       .help = "GPUs of this machine to use, for example 0,2 (sets CUDA_VISIBLE_DEVICES)"},
      {.name = "mixed_precision",
       .variable = "MUSTER_MIXED_PRECISION",
       .type = Type::kChoice,
       .choices = {"no", "bf16", "fp16"},
       .fallback = "no",
       .value_name = "no|bf16|fp16",
       .help = "Precision of the forward pass"},
      {.name = "sharding",
       .variable = "MUSTER_SHARDING",
       .type = Type::kChoice,
       .choices = {"no_shard", "zero1", "zero2", "zero3", "hybrid"},
       .value_name = "NAME",
       .help = "What the processes shard: no_shard (nothing), zero1 (optimizer states), zero2 "
               "(also gradients), zero3 (also parameters), hybrid (as zero3, within each machine). "
               "Default: nothing. A program that sets options.sharding overrides this"},
      {.name = "sharding_units",
       .variable = "MUSTER_SHARDING_UNITS",
       .value_name = "CLASSES",
       .help = "Comma-separated module classes that are units, which are gathered and freed "
               "together. Default: the entries of every ModuleList and Sequential",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_unit_names",
       .variable = "MUSTER_SHARDING_UNIT_NAMES",
       .value_name = "NAMES",
       .help = "Comma-separated names of modules that are units, instead of classes. "
               "Default: none",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_min_unit_parameters",
       .variable = "MUSTER_SHARDING_MIN_UNIT_PARAMETERS",
       .type = Type::kInt,
       .min = 0,
       .max = 2'000'000'000,
       .value_name = "N",
       .help = "Make every module with at least this many parameters a unit, instead of naming "
               "classes. Default: 0, off",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_group_size",
       .variable = "MUSTER_SHARDING_GROUP_SIZE",
       .type = Type::kInt,
       .min = 0,
       .max = kMaxCount,
       .value_name = "N",
       .help = "Number of processes in each group that shards one copy of the model; 0: all "
               "processes. Default: 0; with hybrid the processes of one machine",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_reshard_after_forward",
       .variable = "MUSTER_SHARDING_RESHARD_AFTER_FORWARD",
       .type = Type::kBool,
       .help = "With zero3 and hybrid: free parameters after the forward pass too, not only after "
               "the backward pass. Default: yes",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_reshard_group_size",
       .variable = "MUSTER_SHARDING_RESHARD_GROUP_SIZE",
       .type = Type::kInt,
       .min = 0,
       .max = kMaxCount,
       .value_name = "N",
       .help = "Number of processes in each group that keeps one copy of the parameters, divided "
               "among them, from the forward pass to the backward pass. Default: 0, off",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_parameter_dtype",
       .variable = "MUSTER_SHARDING_PARAMETER_DTYPE",
       .type = Type::kChoice,
       .choices = {"fp32", "bf16", "fp16"},
       .value_name = "TYPE",
       .help = "Type in which parameters are gathered: fp32, or the type of mixed_precision (bf16 "
               "or fp16). "
               "Default: fp32",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_reduce_dtype",
       .variable = "MUSTER_SHARDING_REDUCE_DTYPE",
       .type = Type::kChoice,
       .choices = {"fp32", "bf16", "fp16"},
       .value_name = "TYPE",
       .help = "Type in which gradients are reduced: fp32, bf16 or fp16. Default: the type of the "
               "parameters",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_output_dtype",
       .variable = "MUSTER_SHARDING_OUTPUT_DTYPE",
       .type = Type::kChoice,
       .choices = {"fp32", "bf16", "fp16"},
       .value_name = "TYPE",
       .help = "Type to which the model's floating-point outputs are converted: fp32, bf16 or "
               "fp16. Default: fp32 under mixed precision, otherwise not converted",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_buffer_dtype",
       .variable = "MUSTER_SHARDING_BUFFER_DTYPE",
       .type = Type::kChoice,
       .choices = {"fp32", "bf16", "fp16"},
       .value_name = "TYPE",
       .help = "Type to which the model's floating-point buffers are converted: fp32, bf16 or "
               "fp16. Default: not converted",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_no_split",
       .variable = "MUSTER_SHARDING_NO_SPLIT",
       .value_name = "NAMES",
       .help = "Comma-separated classes or names of modules that are not divided into units. "
               "Default: none",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_ignored_modules",
       .variable = "MUSTER_SHARDING_IGNORED_MODULES",
       .value_name = "PATTERN",
       .help = "Regular expression that matches the full names of modules that every process keeps "
               "whole. "
               "Default: none",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_ignored_parameters",
       .variable = "MUSTER_SHARDING_IGNORED_PARAMETERS",
       .value_name = "PATTERN",
       .help = "The same for the full names of parameters. Default: none",
       .for_workers = true,
       .of_sharding = true},
      {.name = "sharding_overlap",
       .variable = "MUSTER_SHARDING_OVERLAP",
       .type = Type::kBool,
       .help = "Communicate while the program computes; useful on slow links. Default: no",
       .for_workers = true,
       .of_sharding = true},
      {.name = "optimizer_in_backward",
       .variable = "MUSTER_OPTIMIZER_IN_BACKWARD",
       .type = Type::kBool,
       .help = "Update each unit inside the backward pass, so that only a few gradients exist at a "
               "time; works on one process too. Default: no",
       .for_workers = true,
       .of_sharding = true},
      {.name = "offload_optimizer",
       .variable = "MUSTER_OFFLOAD_OPTIMIZER",
       .value_name = "PLACE",
       .help = "Where optimizer states are kept between steps, with or without sharding: none, cpu "
               "or disk:FOLDER. Default: none",
       .for_workers = true},
      {.name = "offload_gradients",
       .variable = "MUSTER_OFFLOAD_GRADIENTS",
       .value_name = "PLACE",
       .help = "Where reduced gradients are kept until the step, with any sharding: none, cpu or "
               "disk:FOLDER. Default: none; with offload_parameters the same place",
       .for_workers = true,
       .of_sharding = true},
      {.name = "offload_parameters",
       .variable = "MUSTER_OFFLOAD_PARAMETERS",
       .value_name = "PLACE",
       .help = "Where the parameters of zero3 and hybrid are kept while nothing uses them: none, "
               "cpu or "
               "disk:FOLDER. Default: none",
       .for_workers = true,
       .of_sharding = true},
      {.name = "activation_checkpointing",
       .variable = "MUSTER_ACTIVATION_CHECKPOINTING",
       .type = Type::kBool,
       .help = "Blocks keep only their inputs for the backward pass, and run again there. Default: "
               "no. A program that sets options.activation_checkpointing overrides this"},
      {.name = "activation_blocks",
       .variable = "MUSTER_ACTIVATION_BLOCKS",
       .value_name = "CLASSES",
       .help = "With activation_checkpointing: comma-separated module classes to checkpoint. "
               "Default: the units of sharding"},
      {.name = "offload_activations",
       .variable = "MUSTER_OFFLOAD_ACTIVATIONS",
       .value_name = "PLACE",
       .help = "With activation_checkpointing: where the inputs of these blocks are kept between "
               "the passes: none, cpu or disk:FOLDER. Default: none"},
      {.name = "gradient_accumulation_steps",
       .variable = "MUSTER_GRADIENT_ACCUMULATION_STEPS",
       .type = Type::kInt,
       .min = 1,
       .max = kMaxCount,
       .value_name = "N",
       .help =
           "Backward passes per optimizer step. Default: 1. A program that sets it overrides this"},
      {.name = "num_cpu_threads_per_process",
       .variable = "MUSTER_NUM_CPU_THREADS_PER_PROCESS",
       .type = Type::kInt,
       .min = 1,
       .max = kMaxCount,
       .value_name = "N",
       .help = "OMP_NUM_THREADS of each process. Default: the inherited value, else an equal share "
               "of the cores"},
      {.name = "num_machines",
       .variable = "MUSTER_NUM_MACHINES",
       .type = Type::kMachines,
       .max = kMaxCount,
       .fallback = "1",
       .value_name = "M|MIN:MAX",
       .help = "Number of machines; start the same command on each. MIN:MAX: the job starts with "
               "the machines that have joined, and restarts when one joins or is lost"},
      {.name = "machine_rank",
       .variable = "MUSTER_MACHINE_RANK",
       .type = Type::kInt,
       .min = -1,
       .max = kMaxCount,
       .value_name = "R",
       .help =
           "Index of this machine: 0 to M-1. Machine 0 hosts the coordinator. -1: machine 0 is the "
           "one that has the coordinator's address, and the others are numbered as they join. "
           "Default: 0; with MIN:MAX machines -1"},
      {.name = "last_call",
       .variable = "MUSTER_LAST_CALL",
       .type = Type::kDuration,
       .fallback = "30s",
       .value_name = "TIME",
       .help = "With MIN:MAX machines: how long to wait for more machines once MIN have joined"},
      {.name = "grow_after",
       .variable = "MUSTER_GROW_AFTER",
       .type = Type::kDuration,
       .fallback = "0",
       .value_name = "TIME",
       .help = "With MIN:MAX machines: how long the processes must have run before they restart to "
               "include a new machine; inf: a new machine waits for the next restart"},
      {.name = "main_process_ip",
       .variable = "MUSTER_MAIN_PROCESS_IP",
       .value_name = "IP",
       .help =
           "Numeric address of machine 0. Default with one machine: a private socket, no address"},
      {.name = "main_process_port",
       .variable = "MUSTER_MAIN_PROCESS_PORT",
       .type = Type::kInt,
       .min = 0,
       .max = 65535,
       .value_name = "PORT",
       .help =
           "Port of the coordinator on machine 0. Default with one machine: none, or a free one"},
      {.name = "max_restarts",
       .variable = "MUSTER_MAX_RESTARTS",
       .type = Type::kInt,
       .min = 0,
       .max = kMaxCount,
       .fallback = "0",
       .value_name = "N",
       .help = "How often to restart all processes after one has failed"},
      {.name = "failure_policy",
       .variable = "MUSTER_FAILURE_POLICY",
       .type = Type::kPolicy,
       .value_name = "CLASS=N,...",
       .help =
           "Restarts after each class of end: failed, oom, hang, and node_lost, which counts "
           "against no other limit; max_restarts=N sets the total. Default: no limits by class"},
      {.name = "user_error_codes",
       .variable = "MUSTER_USER_ERROR_CODES",
       .type = Type::kExitCodes,
       .value_name = "CODE,...",
       .help = "Exit codes that never lead to a restart, besides 2, 126 and 127. Default: none"},
      {.name = "log_dir",
       .variable = "MUSTER_LOG_DIR",
       .value_name = "FOLDER",
       .help =
           "Write each process's output to FOLDER/attempt_A/rank_R.log instead of the terminal; "
           "logs of an earlier launch are moved to FOLDER/before_N"},
      {.name = "log_max_mib",
       .variable = "MUSTER_LOG_MAX_MIB",
       .type = Type::kInt,
       .min = 0,
       .max = kMaxCount,
       .fallback = "128",
       .value_name = "N",
       .help = "Size in MiB at which a file in log_dir is rotated to rank_R.log.1; 0: no limit"},
      {.name = "log_files",
       .variable = "MUSTER_LOG_FILES",
       .type = Type::kInt,
       .min = 1,
       .max = kMaxCount,
       .fallback = "8",
       .value_name = "N",
       .help = "How many log files to keep per process and attempt; the oldest is removed"},
      {.name = "tee",
       .variable = "MUSTER_TEE",
       .type = Type::kBool,
       .fallback = "false",
       .help = "With --log_dir: write to the terminal as well"},
      {.name = "prefix",
       .variable = "MUSTER_PREFIX",
       .type = Type::kBool,
       .help =
           "Prefix each line with [rank]: if several processes write. Default: only on a terminal"},
      {.name = "job_name",
       .variable = "MUSTER_JOB_NAME",
       .value_name = "NAME",
       .help = "Name of the job. Default: generated; with several machines: launch"},
      {.name = "stop_grace",
       .variable = "MUSTER_STOP_GRACE",
       .type = Type::kDuration,
       .fallback = "10s",
       .value_name = "TIME",
       .help = "Time between SIGTERM and SIGKILL when you stop the job"},
      {.name = "join_timeout",
       .variable = "MUSTER_JOIN_TIMEOUT",
       .type = Type::kDuration,
       .fallback = "10m",
       .value_name = "TIME",
       .help = "How long to wait for the other machines"},
      {.name = "outage_tolerance",
       .variable = "MUSTER_OUTAGE_TOLERANCE",
       .type = Type::kDuration,
       .fallback = absl::StrCat(absl::ToInt64Seconds(kDefaultOutageTolerance), "s"),
       .value_name = "TIME",
       .help = "How long the coordinator may be unreachable before the job fails"},
      {.name = "hang_timeout",
       .variable = "MUSTER_HANG_TIMEOUT",
       .type = Type::kDuration,
       .fallback = "0",
       .value_name = "TIME",
       .help = "After the first finished step: how long no process may show progress before the "
               "job fails or restarts. At least 10s; 0: never"},
      {.name = "hub_listen",
       .value_name = "IP:PORT",
       .help = "Address at which this machine's agent offers to be a hub for other agents, useful "
               "beyond 64 machines; port 0 selects a free port. Default: none"},
      {.name = "lease",
       .variable = "MUSTER_LEASE",
       .type = Type::kDuration,
       .fallback = absl::StrCat(absl::ToInt64Seconds(kDefaultLease), "s"),
       .value_name = "TIME",
       .help = "How long a machine or worker may be silent, while others are not, before it counts "
               "as lost"},
      {.name = "debug",
       .variable = "MUSTER_DEBUG",
       .type = Type::kBool,
       .fallback = "false",
       .help = "Check every collective across processes before it runs"},
      {.name = "tls_ca",
       .variable = "MUSTER_TLS_CA",
       .value_name = "FILE",
       .help = "CA certificates that sign the coordinator's certificate (and its clients')"},
      {.name = "tls_cert",
       .variable = "MUSTER_TLS_CERT",
       .value_name = "FILE",
       .help = "Certificate of this machine"},
      {.name = "tls_key",
       .variable = "MUSTER_TLS_KEY",
       .value_name = "FILE",
       .help = "Private key of --tls_cert"},
      {.name = "token_file",
       .variable = "MUSTER_TOKEN_FILE",
       .value_name = "FILE",
       .help = "File with the token that all callers of the coordinator send; the same on all "
               "machines, readable only by its owner. Replaces client certificates"},
      {.name = "checkpoint_key",
       .variable = "MUSTER_CHECKPOINT_KEY",
       .value_name = "FILE",
       .help = "Private Ed25519 key (PEM), readable only by its owner, with which the coordinator "
               "on machine 0 signs its records of checkpoints"},
  };
  return *settings;
}

std::vector<absl::string_view> SplitGpuIds(absl::string_view text) {
  return absl::StrSplit(absl::StripSuffix(absl::StripAsciiWhitespace(text), ","), ',');
}

std::optional<MachineCount> ParseMachines(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  MachineCount count;
  if (parts.size() > 2 || !absl::SimpleAtoi(parts.front(), &count.least) ||
      !absl::SimpleAtoi(parts.back(), &count.most) || count.least < 1 || count.most < count.least ||
      count.most > kMaxCount) {
    return std::nullopt;
  }
  return count;
}

const SettingSpec* FindSetting(absl::string_view name) {
  for (const SettingSpec& spec : LaunchSettings()) {
    if (spec.name == name || (!spec.alias.empty() && spec.alias == name)) return &spec;
  }
  return nullptr;
}

std::string ValueRule(const SettingSpec& spec) {
  switch (spec.type) {
    case Type::kInt:
      return spec.max == kMaxCount
                 ? absl::StrCat("a whole number of at least ", spec.min)
                 : absl::StrCat("a whole number from ", spec.min, " to ", spec.max);
    case Type::kBool:
      return "true or false";
    case Type::kChoice:
      return absl::StrCat("one of ", absl::StrJoin(spec.choices, ", "));
    case Type::kDuration:
      return "a duration with a unit, such as 30s or 10m";
    case Type::kMachines:
      return absl::StrCat("a number of machines from 1 to ", kMaxCount, ", or a range such as 1:4");
    case Type::kPolicy:
      return "restarts by class of failed, oom, hang and node_lost, such as max_restarts=3,oom=1";
    case Type::kExitCodes:
      return "exit codes from 1 to 255, such as 3,4";
    case Type::kText: {
      const TextRule* const rule = RuleOfText(spec.name);
      return rule == nullptr ? "" : rule->rule;
    }
  }
  return "";
}

bool FitsRule(const SettingSpec& spec, absl::string_view text) {
  switch (spec.type) {
    case Type::kInt: {
      int value = 0;
      return absl::SimpleAtoi(text, &value) && value >= spec.min && value <= spec.max;
    }
    case Type::kBool:
      return ParseBool(text).ok();
    case Type::kChoice:
      return std::find(spec.choices.begin(), spec.choices.end(), text) != spec.choices.end();
    case Type::kDuration: {
      absl::Duration value;
      return absl::ParseDuration(text, &value) && value >= absl::ZeroDuration();
    }
    case Type::kMachines:
      return ParseMachines(text).has_value();
    case Type::kPolicy: {
      // Nothing preempts a launch.
      const std::optional<FailurePolicy> policy = ParseFailurePolicy(text);
      return policy.has_value() && !policy->class_limits.contains("preempted");
    }
    case Type::kExitCodes:
      return ParseExitCodes(text).has_value();
    case Type::kText: {
      const TextRule* const rule = RuleOfText(spec.name);
      return rule == nullptr || text.empty() || rule->fits(text);
    }
  }
  return true;
}

absl::StatusOr<bool> ParseBool(absl::string_view text) {
  if (const std::optional<bool> value = ParseBoolWord(text)) return *value;
  return absl::InvalidArgumentError(absl::StrCat(text, " is neither true nor false"));
}

absl::Status AddCoordinator(absl::string_view text, const std::string& source, Layer* layer) {
  const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(text);
  if (!address.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("coordinator: ", address.status().message(), " (from ", source, ")"));
  }
  if (address->is_unix()) {
    return absl::InvalidArgumentError(absl::StrCat("coordinator: ", text, " (from ", source,
                                                   ") is not allowed: it must be host:port"));
  }
  layer->settings["main_process_ip"] = {address->host, source};
  layer->settings["main_process_port"] = {absl::StrCat(address->port), source};
  return absl::OkStatus();
}

namespace {

// A section of an Accelerate file for which the file's distributed_type has to call.
struct AccelerateSection {
  const char* name;
  const char* flag;      // the flag that calls for it, too
  const char* variable;  // of the programs that get it
  const char* type;      // the type that calls for it
};
constexpr AccelerateSection kAccelerateSections[] = {
    {"fsdp_config", "use_fsdp", "ACCELERATE_USE_FSDP", "FSDP"},
    {"deepspeed_config", "use_deepspeed", "ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"},
    {"megatron_lm_config", "use_megatron_lm", "ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM"},
    {"parallelism_config", "use_parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG",
     "MULTI_GPU, FSDP or DEEPSPEED"},
};
bool AsksForSomething(const nlohmann::ordered_json& section) {
  if (!section.is_object()) return false;
  for (const auto& [name, value] : section.items()) {
    // A size of 1 divides nothing.
    if (!value.is_null() && (!absl::EndsWith(name, "_size") || value != 1)) return true;
  }
  return false;
}

// Returns the settings of an Accelerate config file, and the variables that Accelerate's own
// programs read from the rest of it. `lines`: those of the keys.
absl::StatusOr<Layer> LayerOfAccelerate(const AccelerateConfig& config,
                                        const std::map<std::string, int>& lines) {
  const std::string& source = config.source;
  const auto place = [&](const std::string& pointer) {
    const auto it = lines.find(pointer);
    return it == lines.end() ? source : absl::StrCat(source, ":", it->second);
  };
  Layer layer;
  const auto set = [&](const std::string& name, const std::string& pointer) {
    const json value(config.values.value(nlohmann::ordered_json::json_pointer(pointer),
                                         nlohmann::ordered_json()));
    const std::optional<std::string> scalar = ScalarText(value);
    if (value.is_null() || !scalar.has_value()) return absl::OkStatus();
    const Given given = {*scalar, place(pointer)};
    MUSTER_RETURN_IF_ERROR(CheckValue(*FindSetting(name), given));
    layer.settings[name] = given;
    return absl::OkStatus();
  };
  const nlohmann::ordered_json& values = config.values;
  // -1 means: given on the command line.
  if (values.value("num_processes", -1) != -1) {
    MUSTER_RETURN_IF_ERROR(set("num_processes", "/num_processes"));
  }
  for (const char* name : {"num_machines", "machine_rank", "mixed_precision", "debug"}) {
    MUSTER_RETURN_IF_ERROR(set(name, absl::StrCat("/", name)));
  }
  MUSTER_RETURN_IF_ERROR(set("cpu", "/use_cpu"));
  if (values["distributed_type"] == "MULTI_CPU") {
    layer.settings["cpu"] = {"true", place("/distributed_type")};
  }
  if (values.value("gpu_ids", "all") != "all") {
    MUSTER_RETURN_IF_ERROR(set("gpu_ids", "/gpu_ids"));
  }
  // The processes of one machine need no address: the launcher chooses free ports.
  if (values.value("num_machines", 1) > 1) {
    MUSTER_RETURN_IF_ERROR(set("main_process_ip", "/main_process_ip"));
    MUSTER_RETURN_IF_ERROR(set("main_process_port", "/main_process_port"));
  }
  const std::string accumulation = "/deepspeed_config/gradient_accumulation_steps";
  if (values["distributed_type"] == "DEEPSPEED" &&
      values.value(nlohmann::ordered_json::json_pointer(accumulation), nlohmann::ordered_json()) !=
          "auto") {
    MUSTER_RETURN_IF_ERROR(set("gradient_accumulation_steps", accumulation));
  }
  for (const UnreadKey& unread : UnreadKeys(config)) {
    const std::string where = place(absl::StrCat("/", unread.section, "/", unread.key));
    if (!unread.nearest.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": unknown key ", unread.key, " in ",
                                                     unread.section, "; did you mean ",
                                                     unread.nearest, "?"));
    }
    layer.notes.push_back(absl::StrCat(where, ": ", unread.section, ".", unread.key,
                                       " has no effect: this section has no such key"));
  }

  // Counts and devices are checked with the settings of other layers: here they must only fit.
  const int machines = std::max(1, values.value("num_machines", 1));
  const std::vector<std::string> flags = {"--num_processes",   absl::StrCat(2 * machines),
                                          "--machine_rank",    "0",
                                          "--gpu_ids",         "all",
                                          "--main_process_ip", "127.0.0.1"};
  absl::StatusOr<AccelerateLaunch> launch = PlanAccelerateLaunch(&config, flags, {}, {.fp8 = true});
  if (!launch.ok()) {
    return absl::Status(launch.status().code(),
                        absl::StrCat(source, ": ", launch.status().message()));
  }
  launch->env.merge(launch->left_out);
  const auto& env = launch->env;
  for (const AccelerateSection& section : kAccelerateSections) {
    if (env.contains(section.variable) || !values.contains(section.name) ||
        !AsksForSomething(values[section.name])) {
      continue;
    }
    layer.unused_sections.push_back({.name = section.name,
                                     .flag = section.flag,
                                     .type = section.type,
                                     .given = ScalarText(values["distributed_type"]).value_or(""),
                                     .place = place(absl::StrCat("/", section.name))});
  }
  for (const auto& [name, value] : env) {
    // Defaults that have no meaning.
    if (absl::StartsWith(name, "ACCELERATE_DYNAMO_") && !values.contains("dynamo_config")) continue;
    // Variables that the launcher sets itself, from its own settings.
    static const auto* const kOwn =
        new std::set<std::string>{"ACCELERATE_MIXED_PRECISION",
                                  "ACCELERATE_USE_CPU",
                                  "ACCELERATE_DEBUG_MODE",
                                  "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
                                  "OMP_NUM_THREADS",
                                  "KMP_AFFINITY",
                                  "KMP_BLOCKTIME",
                                  "MASTER_ADDR",
                                  "MASTER_PORT"};
    if (!kOwn->contains(name)) layer.env[name] = {value, source};
  }
  return layer;
}

}  // namespace

absl::StatusOr<Layer> ParseConfig(absl::string_view text, absl::string_view source) {
  YamlDocument document;
  const bool is_json = absl::EndsWith(source, ".json");
  if (is_json) {
    MUSTER_ASSIGN_OR_RETURN(document.value, ParseJson(text, source));
  } else {
    MUSTER_ASSIGN_OR_RETURN(document, ParseYaml(text, source));
  }
  Layer layer;
  if (document.value.is_null()) return layer;
  if (IsAccelerateConfig(document.value)) {
    // Without lines, a JSON document has lost the order of its keys.
    MUSTER_ASSIGN_OR_RETURN(
        const AccelerateConfig config,
        is_json ? ParseAccelerateConfig(text, source) : ReadAccelerateConfig(document, source));
    return LayerOfAccelerate(config, document.lines);
  }
  if (!document.value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": the file must be a list of KEY: VALUE"));
  }
  const auto place = [&](const std::string& pointer) {
    const auto it = document.lines.find(pointer);
    return it == document.lines.end() ? std::string(source) : absl::StrCat(source, ":", it->second);
  };
  for (const auto& [key, value] : document.value.items()) {
    const std::string where = place(absl::StrCat("/", key));
    if (key == "env") {
      if (value.is_null()) continue;
      if (!value.is_object()) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, ": env must be a map of NAME: VALUE"));
      }
      for (const auto& [name, entry] : value.items()) {
        const std::string pointer = absl::StrCat("/env/", name);
        const std::string at = place(pointer);
        // As in a job file: 1.10, off and 010 would lose their spelling.
        if (!entry.is_string() &&
            (!entry.is_number_integer() || document.rewritten.contains(pointer))) {
          return absl::InvalidArgumentError(
              absl::StrCat(at, ": env.", name, " must be text, in quotes"));
        }
        layer.env[name] = {*ScalarText(entry), at};
      }
      continue;
    }
    const SettingSpec* const spec = FindSetting(key);
    if (spec == nullptr && key != "coordinator") {
      if (IsAcceleratesOnly(key)) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, ": unknown key ", key,
                         ": it is a key of Accelerate's files, and this file has no "
                         "distributed_type: remove the key, or add that"));
      }
      return absl::InvalidArgumentError(absl::StrCat(where, ": unknown key ", key,
                                                     DidYouMean(key, AllKeys()),
                                                     " (muster config default writes all keys)"));
    }
    if (value.is_null()) continue;
    std::optional<std::string> scalar = ScalarText(value);
    if (!scalar.has_value() && spec != nullptr) scalar = CollectionText(*spec, value);
    if (!scalar.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": ", key, " must be one value, not a list or a map"));
    }
    if (spec == nullptr) {
      MUSTER_RETURN_IF_ERROR(AddCoordinator(*scalar, where, &layer));
      continue;
    }
    // YAML 1.1 reads a plain `no` as false.
    if (spec->type == Type::kChoice && value.is_boolean() && !value.get<bool>()) scalar = "no";
    const Given given = {*scalar, where};
    // An empty text means not set, as in a file written by `muster config default`.
    if (given.text.empty()) continue;
    MUSTER_RETURN_IF_ERROR(CheckValue(*spec, given));
    layer.settings[spec->name] = given;
  }
  return layer;
}

std::string DescribeUnused(const UnusedSection& section) {
  return absl::StrCat(section.place, ": ", section.name,
                      " has no effect with distributed_type: ", section.given,
                      ": to use it, write distributed_type: ", section.type);
}

Layer LayerFromVariables(const std::map<std::string, std::string>& variables) {
  Layer layer;
  for (const SettingSpec& spec : LaunchSettings()) {
    const auto it = variables.find(spec.variable);
    if (it != variables.end() && !it->second.empty()) {
      layer.settings[spec.name] = {it->second, spec.variable};
    }
  }
  return layer;
}

std::string WithHome(absl::string_view path, const std::map<std::string, std::string>& variables) {
  const auto home = variables.find("HOME");
  return muster::WithHome(path, home == variables.end() ? absl::string_view() : home->second);
}

absl::Status ReplaceHome(const std::map<std::string, std::string>& variables, Layer* layer) {
  for (auto& [name, given] : layer->settings) {
    const SettingSpec* const spec = FindSetting(name);
    if (spec == nullptr) continue;
    const absl::string_view kind = spec->value_name;
    absl::string_view path = given.text;
    // In a place only the folder is a path.
    if (kind == "PLACE" ? !absl::ConsumePrefix(&path, kDiskPlace)
                        : kind != "FILE" && kind != "FOLDER") {
      continue;
    }
    if (!BeginsAtHome(path)) continue;
    const std::string whole = WithHome(path, variables);
    if (whole == path) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, ": ", given.text, " (from ", given.source, ") needs HOME, which is not set"));
    }
    given.text = absl::StrCat(given.text.substr(0, given.text.size() - path.size()), whole);
  }
  return absl::OkStatus();
}

std::string DefaultConfigPath(const std::map<std::string, std::string>& variables) {
  const auto get = [&](const char* name) {
    const auto it = variables.find(name);
    return it == variables.end() ? std::string() : it->second;
  };
  if (const std::string home = get("XDG_CONFIG_HOME"); !home.empty())
    return home + "/muster/config.yaml";
  if (const std::string home = get("HOME"); !home.empty())
    return home + "/.config/muster/config.yaml";
  return "";
}

ConfigPath FindConfig(absl::string_view flag, const std::map<std::string, std::string>& variables) {
  if (!flag.empty()) return {WithHome(flag, variables), "--config_file", true};
  const auto it = variables.find("MUSTER_CONFIG");
  if (it != variables.end() && !it->second.empty()) {
    return {WithHome(it->second, variables), "MUSTER_CONFIG", true};
  }
  const std::string path = DefaultConfigPath(variables);
  if (path.empty() || !PathExists(path)) return {};
  return {path, "default place", false};
}

absl::StatusOr<Layer> LoadConfig(const ConfigPath& path) {
  if (path.path.empty()) return Layer();
  absl::StatusOr<std::string> text = ReadFile(path.path, /*max_bytes=*/1 << 20);
  if (!text.ok()) {
    if (absl::IsNotFound(text.status())) {
      if (!path.required) return Layer();
      return absl::NotFoundError(absl::StrCat("config file ", path.path, " (from ", path.source,
                                              ") does not exist; muster config writes one"));
    }
    return text.status();
  }
  return ParseConfig(*text, path.path);
}

bool NamesGpus(const std::vector<Layer>& layers) {
  const std::string ids = Resolver(layers).Text("gpu_ids");
  return !ids.empty() && ids != "all";
}

absl::StatusOr<int> CountGpus(const std::vector<Layer>& layers, const MachineFacts& machine) {
  if (!NamesGpus(layers)) return machine.gpus;
  const Resolver values(layers);
  const Given ids = values.Get("gpu_ids");
  const int gpus = static_cast<int>(SplitGpuIds(ids.text).size());
  // A file for GPUs may be tried with --cpu on a machine without GPUs.
  if (gpus > machine.gpus && !values.Bool("cpu")) {
    return absl::InvalidArgumentError(absl::StrCat("gpu_ids: ", ids.text, " (from ", ids.source,
                                                   ") names ", gpus, gpus == 1 ? " GPU" : " GPUs",
                                                   ", but this machine has ", machine.gpus));
  }
  return gpus;
}

namespace {

// Takes over the settings that need no computation.
LaunchConfig TakeSettings(const Resolver& values) {
  LaunchConfig config;
  const MachineCount machines = ParseMachines(values.Text("num_machines")).value_or(MachineCount());
  config.num_machines = machines.most;
  config.min_machines = machines.least;
  config.machine_rank = values.Int("machine_rank");
  if (!values.Has("machine_rank") && machines.least < machines.most) config.machine_rank = -1;
  if (config.num_machines == 1 && config.machine_rank == -1) config.machine_rank = 0;
  config.last_call = values.Duration("last_call");
  config.grow_after = values.Duration("grow_after");
  config.gpu_ids = absl::StrJoin(SplitGpuIds(values.Text("gpu_ids")), ",");
  config.mixed_precision = values.Text("mixed_precision");
  config.sharding = values.Text("sharding");
  if (values.Has("activation_checkpointing")) {
    config.activation_checkpointing = values.Bool("activation_checkpointing");
  }
  config.activation_blocks = values.Text("activation_blocks");
  config.offload_activations = values.Text("offload_activations");
  config.gradient_accumulation_steps = values.Int("gradient_accumulation_steps");
  config.threads_per_process = values.Int("num_cpu_threads_per_process");
  config.coordinator_ip = values.Text("main_process_ip");
  config.coordinator_port = values.Int("main_process_port");
  config.debug = values.Bool("debug");
  config.max_restarts = values.Int("max_restarts");
  if (values.Has("failure_policy")) {
    FailurePolicy policy = *ParseFailurePolicy(values.Text("failure_policy"));
    // A file of `muster config` has max_restarts: 0 even if the user has not asked for it.
    if (values.IsAbove("max_restarts", "failure_policy") ||
        (config.max_restarts > 0 && !policy.max_restarts.has_value())) {
      policy.max_restarts = config.max_restarts;
    }
    CompletePolicy(&policy);
    config.max_restarts = policy.max_restarts.value_or(0);
    config.class_limits = std::move(policy.class_limits);
  }
  if (values.Has("user_error_codes")) {
    config.user_error_codes = *ParseExitCodes(values.Text("user_error_codes"));
  }
  config.job_name = values.Text("job_name");
  config.log_dir = values.Text("log_dir");
  config.log_max_mib = values.Int("log_max_mib");
  config.log_files = values.Int("log_files");
  config.tee = values.Bool("tee");
  if (values.Has("prefix")) config.prefix = values.Bool("prefix");
  config.stop_grace = values.Duration("stop_grace");
  config.join_timeout = values.Duration("join_timeout");
  config.outage_tolerance = values.Duration("outage_tolerance");
  config.hang_timeout = values.Duration("hang_timeout");
  config.hub_listen = values.Text("hub_listen");
  config.lease = values.Duration("lease");
  config.tls.ca = values.Text("tls_ca");
  config.tls.cert = values.Text("tls_cert");
  config.tls.key = values.Text("tls_key");
  config.token_file = values.Text("token_file");
  config.checkpoint_key = values.Text("checkpoint_key");
  return config;
}

// Returns whether to train on the CPU, with the source of that decision.
absl::StatusOr<Given> ChooseDevice(const Resolver& values, int gpus, LaunchConfig* config) {
  Given cpu = values.Get("cpu");
  config->cpu = values.Bool("cpu");
  if (!config->cpu && gpus == 0) {
    // A file may be for many machines, but a flag is meant for this one.
    if (cpu.source == "--cpu") {
      return absl::InvalidArgumentError(
          "cpu: false (from --cpu), but this machine has no usable GPU: leave it out to "
          "train on the CPU (muster env shows what was found)");
    }
    config->cpu = true;
    cpu = {"true", "this machine has no GPU"};
  }
  return cpu;
}

// Returns the number of processes, with its source.
Given ChooseProcesses(const Resolver& values, int gpus, LaunchConfig* config) {
  Given processes = values.Get("num_processes");
  if (values.Has("num_processes")) {
    config->num_processes = values.Int("num_processes");
  } else {
    config->num_processes = config->num_machines * (config->cpu ? 1 : gpus);
    processes = {absl::StrCat(config->num_processes),
                 config->cpu ? "one for each machine" : "one for each GPU"};
  }
  return processes;
}

absl::Status CheckCounts(const LaunchConfig& config, const Resolver& values, int gpus,
                         const Given& processes) {
  if (config.machine_rank >= config.num_machines) {
    return absl::InvalidArgumentError(absl::StrCat(
        "machine_rank: ", config.machine_rank, " (from ", values.Get("machine_rank").source,
        ") is not below num_machines ", config.num_machines, " (from ",
        values.Get("num_machines").source, "): machines are numbered from 0"));
  }
  if (config.num_processes % config.num_machines != 0) {
    const int below = config.num_processes / config.num_machines * config.num_machines;
    return absl::InvalidArgumentError(
        absl::StrCat("num_processes: ", config.num_processes, " (from ", processes.source,
                     ") cannot be divided evenly among ", config.num_machines, " machines (from ",
                     values.Get("num_machines").source, "): use ",
                     below > 0 ? absl::StrCat(below, " or ") : "", below + config.num_machines));
  }
  const int processes_here = config.num_processes / config.num_machines;
  if (!config.cpu && processes_here > gpus) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_processes: ", processes_here, " on this machine (from ", processes.source,
                     "), but it has ", gpus, gpus == 1 ? " GPU" : " GPUs", " to use: use ",
                     gpus * config.num_machines, " or --cpu"));
  }
  return absl::OkStatus();
}

// Checks settings that require others, and that agents can keep the lease.
absl::Status CheckRequirements(const LaunchConfig& config, const Resolver& values) {
  if (config.num_machines > 1 && (config.coordinator_ip.empty() || config.coordinator_port == 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_machines: ", values.Text("num_machines"), " (from ", values.Get("num_machines").source,
        ") needs --coordinator IP:PORT, an address of machine 0 that all machines reach"));
  }
  if (config.lease < kShortestLease) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease: ", values.Text("lease"), " (from ", values.Get("lease").source, ") is too short: ",
        "give at least ", absl::FormatDuration(kShortestLease), ", agents beat every 2 s"));
  }
  if (config.hang_timeout != absl::ZeroDuration() && config.hang_timeout < kLeastHangTimeout) {
    return absl::InvalidArgumentError(
        absl::StrCat("hang_timeout: ", values.Text("hang_timeout"), " (from ",
                     values.Get("hang_timeout").source, ") is too short: give at least ",
                     absl::FormatDuration(kLeastHangTimeout), ", or 0 for none"));
  }
  if (config.tee && config.log_dir.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tee: true (from ", values.Get("tee").source, ") needs --log_dir FOLDER"));
  }
  if (config.tls.cert.empty() != config.tls.key.empty()) {
    return absl::InvalidArgumentError(
        config.tls.key.empty()
            ? absl::StrCat("tls_cert (from ", values.Get("tls_cert").source, ") needs tls_key")
            : absl::StrCat("tls_key (from ", values.Get("tls_key").source, ") needs tls_cert"));
  }
  return CheckCallersAreKnown(config, values);
}

// Whether something other than the setting of that name requests sharding: --env, an Accelerate
// file or its flags.
bool VariablesAskForSharding(const std::vector<Layer>& layers) {
  for (const char* variable :
       {"MUSTER_SHARDING", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"}) {
    for (const Layer& layer : layers) {
      const auto given = layer.env.find(variable);
      if (given == layer.env.end()) continue;
      const std::string& text = given->second.text;
      const bool asks =
          absl::StartsWith(variable, "MUSTER_") ? !text.empty() : ParseBool(text).value_or(false);
      if (asks) return true;
      break;
    }
  }
  return false;
}

// If nothing is divided, settings about how to divide would be silently ignored: a program that
// divides its model by options.sharding has these settings there, too.
absl::Status CheckSharding(const std::vector<Layer>& layers, const Resolver& values) {
  if (values.Has("sharding") || VariablesAskForSharding(layers)) return absl::OkStatus();
  for (const SettingSpec& spec : LaunchSettings()) {
    const Given given = values.Get(spec.name);
    if (!spec.of_sharding || given.source == "default" || given.text.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        spec.name, ": ", Printable(given.text), " (from ", given.source,
        ") refines sharding, but nothing enables it: add --sharding NAME, or leave this out"));
  }
  return absl::OkStatus();
}

// Returns the layers for a launch on one machine, even if one of them is for several: then its
// machine number and address are ignored.
std::vector<Layer> ForOneMachine(std::vector<Layer> layers) {
  bool one = false;
  for (Layer& layer : layers) {
    const auto given = layer.settings.find("num_machines");
    if (given == layer.settings.end()) continue;
    const bool several = ParseMachines(given->second.text).value_or(MachineCount()).most > 1;
    if (several && !one) break;
    one = true;
    if (!several) continue;
    for (const char* name : {"machine_rank", "main_process_ip", "main_process_port"}) {
      layer.settings.erase(name);
    }
  }
  return layers;
}

// OMP_NUM_THREADS in `env` and num_cpu_threads_per_process are the same setting: keeps the value of
// the first layer that has one of them, and removes the other from the layers below. If a file has
// both and they differ, the setting counts, with a note. INVALID_ARGUMENT: they differ on the
// command line.
absl::Status TakeOneNumberOfThreads(std::vector<Layer>* layers) {
  constexpr char kVariable[] = "OMP_NUM_THREADS", kSetting[] = "num_cpu_threads_per_process";
  bool variable_counts = false, setting_counts = false;
  for (Layer& layer : *layers) {
    if (variable_counts) layer.settings.erase(kSetting);
    if (setting_counts) layer.env.erase(kVariable);
    if (variable_counts || setting_counts) continue;
    const auto variable = layer.env.find(kVariable);
    const auto setting = layer.settings.find(kSetting);
    variable_counts = variable != layer.env.end() && !variable->second.text.empty();
    setting_counts = setting != layer.settings.end();
    // An empty variable means not set, as in the environment.
    if (!variable_counts) layer.env.erase(kVariable);
    if (!variable_counts || !setting_counts || variable->second.text == setting->second.text) {
      continue;
    }
    const std::string differ =
        absl::StrCat("env: ", kVariable, ": ", Printable(variable->second.text), " (from ",
                     variable->second.source, ") differs from ", kSetting, ": ",
                     Printable(setting->second.text), " (from ", setting->second.source, ")");
    if (absl::StartsWith(variable->second.source, "--")) {
      return absl::InvalidArgumentError(absl::StrCat(differ, ": leave one out"));
    }
    // Only a note, because files with both used to work.
    layer.notes.push_back(absl::StrCat(differ, ", which counts: leave one out"));
    layer.env.erase(variable);
    variable_counts = false;
  }
  return absl::OkStatus();
}

// Adds the variables of the workers that are settings.
void AddVariablesOfSettings(const Resolver& values, LaunchConfig* config) {
  for (const SettingSpec& spec : LaunchSettings()) {
    if (!spec.for_workers || !values.Has(spec.name)) continue;
    config->env[spec.variable] = spec.type == Type::kBool
                                     ? (values.Bool(spec.name) ? "true" : "false")
                                     : values.Text(spec.name);
  }
}

// Whether a setting, if given, replaces its variable for the processes.
bool ReplacesVariable(const SettingSpec& spec) {
  static constexpr const char* kNames[] = {"sharding", "activation_checkpointing",
                                           "activation_blocks", "offload_activations",
                                           "gradient_accumulation_steps"};
  return spec.for_workers ||
         std::find(std::begin(kNames), std::end(kNames), spec.name) != std::end(kNames);
}

// Refuses a variable with the same or higher precedence than the setting that replaces it, because
// it would be lost.
absl::Status CheckVariablesOfSettings(const std::vector<Layer>& layers) {
  for (const SettingSpec& spec : LaunchSettings()) {
    if (!ReplacesVariable(spec)) continue;
    const bool is_bool = spec.type == Type::kBool;
    const auto same = [is_bool](const std::string& a, const std::string& b) {
      return a == b ||
             (is_bool && ParseBoolWord(a).has_value() && ParseBoolWord(a) == ParseBoolWord(b));
    };
    std::vector<std::string> names = {spec.variable};
    if (spec.name == "gradient_accumulation_steps") {
      names.push_back("ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
    }
    const Given* variable = nullptr;
    std::string of;
    for (const Layer& layer : layers) {
      for (const std::string& name : names) {
        const auto found = layer.env.find(name);
        if (variable != nullptr || found == layer.env.end()) continue;
        variable = &found->second;
        of = name;
      }
      const auto setting = layer.settings.find(spec.name);
      if (setting == layer.settings.end()) continue;
      if (variable == nullptr || same(variable->text, setting->second.text)) break;
      return absl::InvalidArgumentError(absl::StrCat(
          "env: ", of, ": ", Printable(variable->text), " (from ", variable->source,
          ") differs from ", spec.name, ": ", Printable(setting->second.text), " (from ",
          setting->second.source, "): leave the variable out, and write --", spec.name, " VALUE"));
    }
  }
  return absl::OkStatus();
}

// The variables of all layers; the first layer that has one wins.
absl::Status AddVariables(const std::vector<Layer>& layers, LaunchConfig* config) {
  std::map<std::string, Given> env;
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    for (const auto& [name, given] : layer->env) env[name] = given;
  }
  MUSTER_RETURN_IF_ERROR(CheckVariablesOfSettings(layers));
  for (const auto& [name, given] : env) {
    if (name.empty() || absl::StrContains(name, '=')) {
      return absl::InvalidArgumentError(absl::StrCat(
          "env: ", Printable(name), " (from ", given.source, ") is not a valid variable name"));
    }
    if (const WorkerVariable* const set = FindWorkerVariable(name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "env: ", name, " (from ", given.source, ") cannot be set: ",
          set->setting.empty()
              ? "muster launch sets it for each process according to its place in the job"
              : absl::StrCat("write --", set->setting, ", or ", set->setting,
                             ": in the file, which sets it for all processes")));
    }
    config->env[name] = given.text;
    config->provenance.emplace_back("env." + name, given);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LaunchConfig> ResolveLaunch(const std::vector<Layer>& layers,
                                           const MachineFacts& machine) {
  std::vector<Layer> counted = ForOneMachine(layers);
  MUSTER_RETURN_IF_ERROR(TakeOneNumberOfThreads(&counted));
  const Resolver values(counted);
  for (const SettingSpec& spec : LaunchSettings()) {
    const Given given = values.Get(spec.name);
    if (given.source != "default") MUSTER_RETURN_IF_ERROR(CheckValue(spec, given));
  }
  LaunchConfig config = TakeSettings(values);
  MUSTER_ASSIGN_OR_RETURN(const int gpus, CountGpus(layers, machine));
  MUSTER_ASSIGN_OR_RETURN(const Given cpu, ChooseDevice(values, gpus, &config));
  const Given processes = ChooseProcesses(values, gpus, &config);
  MUSTER_RETURN_IF_ERROR(CheckCounts(config, values, gpus, processes));
  config.processes_here = config.num_processes / config.num_machines;
  MUSTER_RETURN_IF_ERROR(CheckRequirements(config, values));
  MUSTER_RETURN_IF_ERROR(CheckSharding(layers, values));
  for (const SettingSpec& spec : LaunchSettings()) {
    Given given = values.Get(spec.name);
    if (spec.name == "cpu") given = cpu;
    if (spec.name == "num_processes") given = processes;
    if (spec.name == "machine_rank" && !values.Has("machine_rank")) {
      given.text = absl::StrCat(config.machine_rank);
    }
    config.provenance.emplace_back(spec.name, std::move(given));
  }
  MUSTER_RETURN_IF_ERROR(AddVariables(counted, &config));
  AddVariablesOfSettings(values, &config);
  for (const Layer& layer : counted) {
    for (const UnusedSection& section : layer.unused_sections) {
      config.notes.push_back(DescribeUnused(section));
    }
    config.notes.insert(config.notes.end(), layer.notes.begin(), layer.notes.end());
  }
  return config;
}

std::string DefaultConfigText(const std::map<std::string, std::string>& given,
                              const std::map<std::string, std::string>& env) {
  std::string text =
      "# Settings of `muster launch` that neither a flag nor a variable overrides.\n"
      "# A commented-out line shows a key whose value is computed at launch.\n";
  for (const SettingSpec& spec : LaunchSettings()) {
    absl::StrAppend(&text, "\n# ", spec.help, ".\n");
    const auto it = given.find(spec.name);
    const std::string value = it == given.end() ? spec.fallback : it->second;
    if (value.empty()) {
      absl::StrAppend(&text, "# ", spec.name, ":\n");
    } else {
      absl::StrAppend(&text, spec.name, ": ", YamlScalar(spec, value), "\n");
    }
  }
  absl::StrAppend(&text, "\n# Variables for all processes, NAME: \"value\".\nenv:",
                  env.empty() ? " {}\n" : "\n");
  for (const auto& [name, value] : env) {
    absl::StrAppend(&text, "  ", JsonQuote(name), ": ", JsonQuote(value), "\n");
  }
  return text;
}

}  // namespace muster::client
