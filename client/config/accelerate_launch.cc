#include "client/config/accelerate_launch.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/bool_word.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "base/yaml.h"
#include "client/config/python_values.h"

namespace muster::client {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;
using Launcher = AccelerateLaunch::Launcher;

constexpr char kAny[] = "<any>";
constexpr int kTooMany = 1'000'000'000;  // the limit of any count
constexpr char kDefaultPort[] = "29500";

// Keys of a config file, with their type in it.
enum class KeyType { kText, kInt, kBool, kBoolOrText, kSection, kList };
const std::map<std::string, KeyType>& FileKeys() {
  static const auto* const keys = new std::map<std::string, KeyType>{
      {"compute_environment", KeyType::kText},
      {"distributed_type", KeyType::kText},
      {"mixed_precision", KeyType::kText},
      {"use_cpu", KeyType::kBool},
      {"debug", KeyType::kBool},
      {"num_processes", KeyType::kInt},
      {"machine_rank", KeyType::kInt},
      {"num_machines", KeyType::kInt},
      {"gpu_ids", KeyType::kText},
      {"main_process_ip", KeyType::kText},
      {"main_process_port", KeyType::kInt},
      {"rdzv_backend", KeyType::kText},
      {"same_network", KeyType::kBool},
      {"main_training_function", KeyType::kText},
      {"enable_cpu_affinity", KeyType::kBool},
      {"fp8_config", KeyType::kSection},
      {"deepspeed_config", KeyType::kSection},
      {"fsdp_config", KeyType::kSection},
      {"parallelism_config", KeyType::kSection},
      {"megatron_lm_config", KeyType::kSection},
      {"mpirun_config", KeyType::kSection},
      {"dynamo_config", KeyType::kSection},
      {"downcast_bf16", KeyType::kBoolOrText},
      {"tpu_name", KeyType::kText},
      {"tpu_zone", KeyType::kText},
      {"tpu_use_cluster", KeyType::kBool},
      {"tpu_use_sudo", KeyType::kBool},
      {"command_file", KeyType::kText},
      {"commands", KeyType::kList},
      {"tpu_vm", KeyType::kList},
      {"tpu_env", KeyType::kList},
  };
  return *keys;
}

// The distributed types, and whether torchrun starts one process for each of several devices.
const std::map<std::string, bool>& DistributedTypes() {
  static const auto* const types = new std::map<std::string, bool>{
      {"NO", false},       {"MULTI_CPU", false},   {"MULTI_GPU", true},  {"MULTI_NPU", true},
      {"MULTI_MLU", true}, {"MULTI_SDAA", true},   {"MULTI_MUSA", true}, {"MULTI_XPU", true},
      {"MULTI_HPU", true}, {"MULTI_NEURON", true}, {"DEEPSPEED", false}, {"FSDP", false},
      {"XLA", false},      {"MEGATRON_LM", false},
  };
  return *types;
}

const std::vector<std::string>& Precisions() {
  static const auto* const all = new std::vector<std::string>{"no", "fp8", "fp16", "bf16"};
  return *all;
}

const std::vector<std::string>& DynamoBackends() {
  static const auto* const all = new std::vector<std::string>{"NO",
                                                              "EAGER",
                                                              "AOT_EAGER",
                                                              "INDUCTOR",
                                                              "AOT_TS_NVFUSER",
                                                              "NVPRIMS_NVFUSER",
                                                              "CUDAGRAPHS",
                                                              "OFI",
                                                              "FX2TRT",
                                                              "ONNXRT",
                                                              "TENSORRT",
                                                              "AOT_TORCHXLA_TRACE_ONCE",
                                                              "TORCHXLA_TRACE_ONCE",
                                                              "TVM",
                                                              "HPU_BACKEND"};
  return *all;
}

// A flag of `accelerate launch`.
struct Flag {
  enum class Type { kTrue, kInt, kFloat, kText, kBool, kBoolWord, kBoolWords };
  Type type = Type::kText;
  Json fallback = nullptr;
  std::vector<std::string> choices = {};
};

const std::map<std::string, Flag>& Flags() {
  using T = Flag::Type;
  static const auto* const flags = [] {
    auto* const all = new std::map<std::string, Flag>{
        {"quiet", {T::kTrue, false}},
        {"module", {T::kTrue, false}},
        {"no_python", {T::kTrue, false}},
        {"debug", {T::kTrue, false}},
        {"cpu", {T::kTrue, false}},
        {"multi_gpu", {T::kTrue, false}},
        {"tpu", {T::kTrue, false}},
        {"use_deepspeed", {T::kTrue, false}},
        {"use_fsdp", {T::kTrue, false}},
        {"use_parallelism_config", {T::kTrue, false}},
        {"use_megatron_lm", {T::kTrue, false}},
        {"same_network", {T::kTrue, false}},
        {"enable_cpu_affinity", {T::kTrue, false}},
        {"dynamo_use_fullgraph", {T::kTrue, false}},
        {"dynamo_use_dynamic", {T::kTrue, false}},
        {"dynamo_use_regional_compilation", {T::kTrue, false}},
        {"tpu_cluster", {T::kTrue, false}},
        {"no_tpu_cluster", {T::kTrue, false}},
        {"tpu_use_sudo", {T::kTrue, false}},
        {"downcast_bf16", {T::kTrue, false}},
        {"fp8_use_autocast_during_eval", {T::kTrue, false}},
        {"mixed_precision", {T::kText, nullptr, {"no", "fp16", "bf16", "fp8"}}},
        {"dynamo_mode", {T::kText, "default", {"default", "reduce-overhead", "max-autotune"}}},
        {"num_processes", {T::kInt}},
        {"num_machines", {T::kInt}},
        {"num_cpu_threads_per_process", {T::kInt}},
        {"machine_rank", {T::kInt}},
        {"main_process_port", {T::kInt}},
        {"max_restarts", {T::kInt, 0}},
        {"monitor_interval", {T::kFloat, 0.1}},
        {"rdzv_backend", {T::kText, "static"}},
        {"rdzv_conf", {T::kText, ""}},
        {"role", {T::kText, "default"}},
        {"tee", {T::kText, "0"}},
        {"zero_stage", {T::kInt}},
        {"gradient_accumulation_steps", {T::kInt}},
        {"gradient_clipping", {T::kFloat}},
        {"fsdp_version", {T::kText, "1", {"1", "2"}}},
        {"fsdp_offload_params", {T::kText, "false"}},
        {"fsdp_min_num_params", {T::kInt, 100'000'000}},
        {"fsdp_sharding_strategy", {T::kText, "FULL_SHARD"}},
        {"fsdp_reshard_after_forward", {T::kText, "true"}},
        {"fsdp_forward_prefetch", {T::kText, "false"}},
        {"fsdp_use_orig_params", {T::kText, "true"}},
        {"fsdp_cpu_ram_efficient_loading", {T::kText, "true"}},
        {"fsdp_sync_module_states", {T::kText, "true"}},
        {"fsdp_activation_checkpointing", {T::kText, "false"}},
        {"fsdp_activation_checkpointing_offload", {T::kText, "false"}},
        {"megatron_lm_tp_degree", {T::kInt, 1}},
        {"megatron_lm_pp_degree", {T::kInt, 1}},
        {"megatron_lm_num_micro_batches", {T::kInt}},
        {"megatron_lm_gradient_clipping", {T::kFloat, 1.0}},
        {"megatron_lm_decoder_last_pipeline_num_layers", {T::kInt}},
        {"megatron_lm_recompute_num_layers", {T::kInt}},
        {"megatron_lm_expert_model_parallel_size", {T::kInt}},
        {"megatron_lm_expert_tensor_parallel_size", {T::kInt}},
        {"megatron_lm_context_parallel_size", {T::kInt}},
        {"megatron_lm_attention_dropout", {T::kFloat}},
        {"megatron_lm_hidden_dropout", {T::kFloat}},
        {"fp8_backend", {T::kText, nullptr, {"ao", "te", "msamp"}}},
        {"fp8_margin", {T::kInt, 0}},
        {"fp8_interval", {T::kInt, 1}},
        {"fp8_format", {T::kText, "HYBRID", {"E4M3", "E5M2", "HYBRID"}}},
        {"fp8_amax_history_len", {T::kInt, 1024}},
        {"fp8_amax_compute_algo", {T::kText, "most_recent", {"max", "most_recent"}}},
        {"fp8_override_linear_precision", {T::kBoolWords, {false, false, false}}},
        {"fp8_opt_level", {T::kText, "O2", {"O1", "O2"}}},
        {"fp8_enable_fsdp_float8_all_gather", {T::kBoolWord, 1}},
        {"fp8_pad_inner_dim", {T::kBoolWord, 1}},
        {"parallelism_config_dp_replicate_size", {T::kInt, 1}},
        {"parallelism_config_dp_shard_size", {T::kInt, 1}},
        {"parallelism_config_tp_size", {T::kInt, 1}},
        {"parallelism_config_cp_size", {T::kInt, 1}},
        {"parallelism_config_cp_backend", {T::kText, "torch", {"torch"}}},
        {"parallelism_config_cp_comm_strategy", {T::kText, "allgather"}},
        {"parallelism_config_sp_size", {T::kInt, 1}},
        {"parallelism_config_sp_backend", {T::kText, "deepspeed", {"deepspeed"}}},
        {"parallelism_config_sp_seq_length", {T::kText}},
        {"parallelism_config_sp_seq_length_is_variable", {T::kBool, true}},
        {"parallelism_config_sp_attn_implementation", {T::kText, "sdpa"}},
    };
    Flag& backend = (*all)["dynamo_backend"];
    for (const std::string& name : DynamoBackends()) {
      backend.choices.push_back(absl::AsciiStrToLower(name));
    }
    for (const char* name : {"config_file",
                             "gpu_ids",
                             "main_process_ip",
                             "log_dir",
                             "main_training_function",
                             "deepspeed_config_file",
                             "offload_optimizer_device",
                             "offload_param_device",
                             "offload_optimizer_nvme_path",
                             "offload_param_nvme_path",
                             "zero3_init_flag",
                             "zero3_save_16bit_model",
                             "deepspeed_hostfile",
                             "deepspeed_exclusion_filter",
                             "deepspeed_inclusion_filter",
                             "deepspeed_multinode_launcher",
                             "deepspeed_moe_layer_cls_names",
                             "fsdp_auto_wrap_policy",
                             "fsdp_transformer_layer_cls_to_wrap",
                             "fsdp_backward_prefetch",
                             "fsdp_state_dict_type",
                             "megatron_lm_sequence_parallelism",
                             "megatron_lm_recompute_activations",
                             "megatron_lm_use_distributed_optimizer",
                             "megatron_lm_recompute_granularity",
                             "megatron_lm_recompute_method",
                             "megatron_lm_attention_backend",
                             "megatron_lm_attention_softmax_in_fp32",
                             "megatron_lm_calculate_per_token_loss",
                             "megatron_lm_use_rotary_position_embeddings",
                             "aws_access_key_id",
                             "aws_secret_access_key",
                             "mpirun_hostfile",
                             "vm",
                             "env"}) {
      (*all)[name] = Flag();
    }
    for (const char* name :
         {"megatron_lm_use_custom_fsdp", "megatron_lm_no_load_optim", "megatron_lm_no_save_optim",
          "megatron_lm_eod_mask_loss", "megatron_lm_overlap_cpu_optimizer_d2h_h2d",
          "megatron_lm_optimizer_cpu_offload", "megatron_lm_use_precision_aware_optimizer"}) {
      (*all)[name] = Flag{T::kBool, false};
    }
    return all;
  }();
  return *flags;
}

bool IsEngineFlag(absl::string_view name) {
  // DeepSpeed's own runner does not exist here.
  for (const char* runner : {"deepspeed_hostfile", "deepspeed_exclusion_filter",
                             "deepspeed_inclusion_filter", "deepspeed_multinode_launcher"}) {
    if (name == runner) return false;
  }
  for (const char* prefix : {"fsdp_", "deepspeed_", "zero", "offload_"}) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  return name == "use_fsdp" || name == "use_deepspeed" || name == "gradient_clipping";
}

// Formats as Python's repr() does: the shortest digits, with an exponent below 1e-4 and from 1e16.
std::string PythonFloat(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  const double size = std::fabs(value);
  const auto format = value == 0 || (size >= 1e-4 && size < 1e16) ? std::chars_format::fixed
                                                                  : std::chars_format::scientific;
  char buffer[64];
  const auto end = std::to_chars(std::begin(buffer), std::end(buffer), value, format).ptr;
  std::string text(buffer, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string PythonText(const Json& value);

// Formats as Python does inside a list.
std::string InList(const Json& value) {
  return value.is_string() ? absl::StrCat("'", value.get<std::string>(), "'") : PythonText(value);
}

// Formats as Python's str() does.
std::string PythonText(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_number_float()) return PythonFloat(value.get<double>());
  if (value.is_array()) {
    std::vector<std::string> parts;
    for (const Json& entry : value) parts.push_back(InList(entry));
    return absl::StrCat("[", absl::StrJoin(parts, ", "), "]");
  }
  if (value.is_object()) {
    std::vector<std::string> parts;
    for (const auto& [key, entry] : value.items()) {
      parts.push_back(absl::StrCat("'", key, "': ", InList(entry)));
    }
    return absl::StrCat("{", absl::StrJoin(parts, ", "), "}");
  }
  return value.dump();
}

std::string LowerText(const Json& value) { return absl::AsciiStrToLower(PythonText(value)); }

// Adds the section's prefix to a key that is written without it.
std::string FlagOfKey(absl::string_view section, absl::string_view key) {
  static const auto* const kPrefixes = new std::map<std::string, std::string>{
      {"fsdp_config", "fsdp_"},
      {"fp8_config", "fp8_"},
      {"dynamo_config", "dynamo_"},
      {"megatron_lm_config", "megatron_lm_"},
      {"parallelism_config", "parallelism_config_"},
      {"mpirun_config", "mpirun_"},
  };
  const auto prefix = kPrefixes->find(std::string(section));
  std::string name(key);
  if (prefix != kPrefixes->end() && !absl::StartsWith(key, prefix->second)) {
    name = absl::StrCat(prefix->second, key);
  }
  // These names are written by `accelerate config`, but not read by its launcher (D25).
  if (name == "fp8_amax_history_length") return "fp8_amax_history_len";
  if (name == "fp8_amax_compute_algorithm") return "fp8_amax_compute_algo";
  if (name == "fp8_optimization_level") return "fp8_opt_level";
  return name;
}

// Whether a flag, or a name like a flag's, is a key of a section.
bool IsKeyOf(const std::string& section, const std::string& name) {
  if (section != "deepspeed_config") {
    return name == "fsdp_ignored_modules"
               ? section == "fsdp_config"
               : Flags().contains(name) && FlagOfKey(section, name) == name;
  }
  for (const char* prefix : {"deepspeed_", "zero", "offload_", "gradient_"}) {
    if (absl::StartsWith(name, prefix)) return Flags().contains(name);
  }
  return false;
}

class Planner {
 public:
  Planner(const AccelerateConfig* config, const std::map<std::string, std::string>& variables,
          const AccelerateMachine& machine)
      : config_(config), variables_(variables), machine_(machine) {
    for (const auto& [name, flag] : Flags()) values_[name] = flag.fallback;
  }

  absl::StatusOr<AccelerateLaunch> Run(const std::vector<std::string>& args) {
    MUSTER_RETURN_IF_ERROR(ReadFlags(args));
    MUSTER_RETURN_IF_ERROR(CheckFlags());
    if (config_ != nullptr) {
      MUSTER_RETURN_IF_ERROR(AddFile());
    } else {
      AddDefaults();
    }
    MUSTER_RETURN_IF_ERROR(CheckCounts());
    MUSTER_RETURN_IF_ERROR(SetThreads());
    const bool cpu = IsPythonTrue(values_["cpu"]);
    if (IsPythonTrue(values_["module"]) && IsPythonTrue(values_["no_python"])) {
      return absl::InvalidArgumentError("--module and --no_python cannot be used together");
    }
    absl::Status status;
    if (!cpu && IsPythonTrue(values_["use_deepspeed"])) {
      status = Deepspeed();
    } else if (!cpu &&
               (IsPythonTrue(values_["use_fsdp"]) || IsPythonTrue(values_["use_megatron_lm"]) ||
                IsPythonTrue(values_["multi_gpu"]))) {
      status = MultiDevice();
    } else if (!cpu && IsPythonTrue(values_["tpu"])) {
      status = absl::UnimplementedError(
          "TPUs (distributed_type: XLA, --tpu) are not supported: use GPUs or --cpu");
    } else {
      status = Simple();
    }
    if (!status.ok()) return status;
    launch_.num_processes = Int("num_processes");
    launch_.num_machines = Int("num_machines");
    launch_.machine_rank = Int("machine_rank");
    launch_.role = Text("role");
    return std::move(launch_);
  }

 private:
  int Int(const std::string& name) {
    const Json& value = values_[name];
    int64_t number = 0;  // a quoted number, in a section
    if (value.is_number()) {
      number = value.get<int64_t>();
    } else if (value.is_string() && !absl::SimpleAtoi(value.get<std::string>(), &number)) {
      return 0;
    }
    return static_cast<int>(std::clamp<int64_t>(number, -kTooMany, kTooMany));
  }
  std::string Text(const std::string& name) { return PythonText(values_[name]); }
  void Export(const std::string& variable, std::string text) {
    launch_.env[variable] = std::move(text);
  }

  // Names may have "-" for "_", but are not abbreviated.
  static absl::StatusOr<std::string> FlagOf(absl::string_view word) {
    std::string name = absl::StrReplaceAll(word, {{"-", "_"}});
    if (Flags().contains(name)) return name;
    std::vector<std::string> near, all;
    for (const auto& [flag, unused] : Flags()) {
      all.push_back(flag);
      if (absl::StartsWith(flag, name)) near.push_back(flag);
    }
    return absl::InvalidArgumentError(
        absl::StrCat("--", word, " is not a flag of accelerate launch",
                     near.empty() ? DidYouMean(name, all, "--")
                                  : absl::StrCat(": it may be --", absl::StrJoin(near, ", --"))));
  }

  // A negative number is a value.
  static bool LooksLikeAFlag(absl::string_view word) {
    double number = 0;
    return word.size() > 1 && word[0] == '-' && !absl::SimpleAtod(word, &number);
  }

  // "-qm" is "-q -m", and "-t3" is "-t 3".
  static std::vector<std::string> Separated(const std::vector<std::string>& args) {
    std::vector<std::string> separate;
    for (std::string word : args) {
      while (word.size() > 2 && word[0] == '-' &&
             (word[1] == 'q' || word[1] == 'm' || word[1] == 't')) {
        const bool takes_value = word[1] == 't';
        separate.push_back(word.substr(0, 2));
        word = takes_value ? word.substr(2) : absl::StrCat("-", word.substr(2));
      }
      separate.push_back(std::move(word));
    }
    return separate;
  }

  absl::Status ReadFlags(const std::vector<std::string>& given) {
    const std::vector<std::string> args = Separated(given);
    static const auto* const kShort =
        new std::map<std::string, std::string>{{"-m", "module"}, {"-q", "quiet"}, {"-t", "tee"}};
    for (size_t i = 0; i < args.size(); ++i) {
      std::string name;
      std::optional<std::string> text;
      if (const auto it = kShort->find(args[i]); it != kShort->end()) {
        name = it->second;
      } else if (absl::StartsWith(args[i], "--")) {
        const std::vector<std::string> parts =
            absl::StrSplit(absl::string_view(args[i]).substr(2), absl::MaxSplits('=', 1));
        MUSTER_ASSIGN_OR_RETURN(name, FlagOf(parts[0]));
        if (parts.size() == 2) text = parts[1];
      } else {
        return absl::InvalidArgumentError(
            absl::StrCat(args[i], ": expected a flag of accelerate launch (--NAME)"));
      }
      const Flag& flag = Flags().at(name);
      if (flag.type == Flag::Type::kTrue) {
        if (text.has_value()) {
          return absl::InvalidArgumentError(absl::StrCat("--", name, " takes no value"));
        }
        values_[name] = true;
      } else {
        if (!text.has_value()) {
          if (i + 1 == args.size() || LooksLikeAFlag(args[i + 1])) {
            return absl::InvalidArgumentError(absl::StrCat("--", name, " expects a value"));
          }
          text = args[++i];
        }
        MUSTER_ASSIGN_OR_RETURN(values_[name], ValueOf(name, flag, *text));
      }
      typed_.insert(name);
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<Json> ValueOf(const std::string& name, const Flag& flag,
                                      const std::string& text) {
    const auto bad = [&](absl::string_view must) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " ", text, " is not allowed: it must be ", must));
    };
    if (!flag.choices.empty() &&
        std::find(flag.choices.begin(), flag.choices.end(), text) == flag.choices.end()) {
      return bad(absl::StrCat("one of ", absl::StrJoin(flag.choices, ", ")));
    }
    switch (flag.type) {
      case Flag::Type::kInt: {
        const std::optional<int64_t> value = ParsePythonInt(text);
        if (!value.has_value()) return bad("a whole number");
        return Json(*value);
      }
      case Flag::Type::kFloat: {
        const std::optional<double> value = ParsePythonFloat(text);
        if (!value.has_value()) return bad("a number");
        return Json(*value);
      }
      case Flag::Type::kBool:
      case Flag::Type::kBoolWord: {
        const std::optional<bool> value = ParseBoolWord(text);
        if (!value.has_value()) return bad("true or false");
        if (flag.type == Flag::Type::kBool) return Json(*value);
        return Json(*value ? 1 : 0);  // the form in which the release writes it
      }
      case Flag::Type::kBoolWords: {
        Json list = Json::array();
        for (const absl::string_view word : absl::StrSplit(text, ',')) {
          const std::optional<bool> value = ParseBoolWord(word);
          if (!value.has_value()) return bad("true or false, three times, with commas");
          list.push_back(*value ? 1 : 0);
        }
        if (list.size() != 3) return bad("true or false, three times, with commas");
        return list;
      }
      default:
        return Json(text);
    }
  }

  absl::Status CheckFlags() {
    int paradigms = 0;
    for (const char* name : {"multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp"}) {
      if (IsPythonTrue(values_[name])) ++paradigms;
    }
    if (paradigms > 1) {
      return absl::InvalidArgumentError(
          "You can only use one of --cpu, --multi_gpu, --tpu, --use_deepspeed, --use_fsdp at a "
          "time");
    }
    if (IsPythonTrue(values_["multi_gpu"]) && typed_.contains("num_processes") &&
        Int("num_processes") < 2) {
      return absl::InvalidArgumentError(
          "--multi_gpu needs at least 2 processes: raise --num_processes, or leave --multi_gpu "
          "out");
    }
    // The release intends to check the version, too, but compares a text with a number.
    if (IsPythonTrue(values_["use_parallelism_config"]) &&
        (!IsPythonTrue(values_["use_fsdp"]) || values_["fsdp_version"] == "1")) {
      return absl::InvalidArgumentError(
          "--use_parallelism_config needs --use_fsdp and --fsdp_version=2");
    }
    return absl::OkStatus();
  }

  // Takes settings that no flag gives from the file.
  absl::Status AddFile() {
    const OrderedJson& file = config_->values;
    const std::string type = file.at("distributed_type");
    const auto chosen = [this](const char* name) { return IsPythonTrue(values_[name]); };
    if (!chosen("multi_gpu") && !chosen("tpu") && !chosen("use_deepspeed") && !chosen("use_fsdp") &&
        !chosen("use_megatron_lm")) {
      values_["use_deepspeed"] = type == "DEEPSPEED";
      values_["multi_gpu"] = DistributedTypes().at(type);
      values_["tpu"] = type == "XLA";
      values_["use_fsdp"] = type == "FSDP";
      values_["use_megatron_lm"] = type == "MEGATRON_LM";
      values_["use_parallelism_config"] =
          file.contains("parallelism_config") && !file["parallelism_config"].empty();
    }
    for (const auto& [key, value] : file.items()) {
      if (value.is_object()) {
        for (const auto& [name, entry] : value.items()) {
          const std::string flag = FlagOfKey(key, name);
          if (!typed_.contains(flag)) values_[flag] = Json(entry);
        }
      } else if (key != "compute_environment" && key != "distributed_type" &&
                 key != "mixed_precision" && key != "debug" && !typed_.contains(key)) {
        values_[key] = Json(value);
      }
    }
    // If a flag says that there is one machine, the file's place among several is ignored.
    if (typed_.contains("num_machines") && Int("num_machines") == 1 &&
        !typed_.contains("machine_rank")) {
      values_["machine_rank"] = 0;
    }
    if (values_["gpu_ids"].is_null()) values_["gpu_ids"] = "all";
    if (!typed_.contains("debug")) values_["debug"] = file.value("debug", false);
    if (!typed_.contains("mixed_precision") && file.contains("mixed_precision") &&
        !file["mixed_precision"].is_null()) {
      values_["mixed_precision"] = Json(file["mixed_precision"]);
      precision_of_file_ = true;
    }
    for (const auto& [name, value] : {std::pair<const char*, int>{"machine_rank", 0},
                                      {"num_machines", 1},
                                      {"num_processes", -1}}) {
      if (values_[name].is_null()) values_[name] = value;
    }
    if (values_["use_cpu"].is_null()) values_["use_cpu"] = false;
    AddDefaults();
    if (Int("num_processes") == -1) {
      return absl::InvalidArgumentError(absl::StrCat(
          config_->source, ": the file has no num_processes: set it, or give --num_processes N"));
    }
    const std::string ids = Text("gpu_ids");
    if (ids != "all" && !absl::StrContains(ids, ',') && IsPythonTrue(values_["multi_gpu"]) &&
        Int("num_machines") <= 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("gpu_ids: ", ids,
                       ": Less than two GPU ids for a job on several GPUs: list two or more, "
                       "or \"all\""));
    }
    return absl::OkStatus();
  }

  void AddDefaults() {
    if (values_["use_cpu"].is_null()) values_["use_cpu"] = values_["cpu"];
    if (values_["num_machines"].is_null()) values_["num_machines"] = 1;
    if (values_["machine_rank"].is_null()) values_["machine_rank"] = 0;
    // As many as there are devices; a machine without devices starts one process.
    if (values_["num_processes"].is_null()) values_["num_processes"] = 0;
    if (values_["mixed_precision"].is_null()) values_["mixed_precision"] = "no";
    if (values_["dynamo_backend"].is_null()) values_["dynamo_backend"] = "no";
  }

  absl::Status CheckCounts() {
    const int machines = Int("num_machines"), rank = Int("machine_rank");
    for (const char* name : {"num_processes", "num_machines"}) {
      if (Int(name) < kTooMany) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": ", Text(name), " is not allowed: it must be below ", kTooMany));
    }
    if (machines < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("num_machines: ", machines, " is not allowed: it must be at least 1"));
    }
    if (Int("num_processes") < 0) {
      return absl::InvalidArgumentError(absl::StrCat("num_processes: ", Int("num_processes"),
                                                     " is not allowed: it must be at least 1"));
    }
    if (rank < 0 || rank >= machines) {
      return absl::InvalidArgumentError(
          absl::StrCat("machine_rank: ", rank, " is not allowed: with num_machines ", machines,
                       " it must be from 0 to ", machines - 1));
    }
    // The release silently drops the rest (D27).
    if (machines > 1 && Int("num_processes") % machines != 0) {
      return absl::InvalidArgumentError(absl::StrCat("num_processes: ", Int("num_processes"),
                                                     " processes cannot be divided evenly among ",
                                                     machines, " machines"));
    }
    return absl::OkStatus();
  }

  // Returns a count; none if the variable is not set or negative.
  absl::StatusOr<std::optional<int>> Variable(const char* name) const {
    const auto it = variables_.find(name);
    if (it == variables_.end()) return std::optional<int>();
    const std::optional<int64_t> value = ParsePythonInt(it->second);
    if (!value.has_value() || *value >= kTooMany) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": ", it->second, " is not allowed: it must be a whole number"));
    }
    return *value < 0 ? std::nullopt : std::optional<int>(static_cast<int>(*value));
  }

  absl::Status SetThreads() {
    Json& threads = values_["num_cpu_threads_per_process"];
    if (!threads.is_null()) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(const std::optional<int> given, Variable("OMP_NUM_THREADS"));
    threads = given.value_or(1);
    if (!IsPythonTrue(values_["use_cpu"]) || Int("num_processes") < 1 || given.value_or(0) != 0) {
      return absl::OkStatus();
    }
    int local = std::max(Int("num_processes") / Int("num_machines"), 1);
    // The first one that is set counts.
    for (const char* name :
         {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"}) {
      MUSTER_ASSIGN_OR_RETURN(const std::optional<int> ranks, Variable(name));
      if (!ranks.has_value()) continue;
      local = std::max(*ranks, 1);
      break;
    }
    if (machine_.physical_cores / local > 1) threads = machine_.physical_cores / local;
    return absl::OkStatus();
  }

  absl::Status Common() {
    if (IsPythonTrue(values_["debug"])) Export("ACCELERATE_DEBUG_MODE", "true");
    if (!values_["gpu_ids"].is_null() && Text("gpu_ids") != "all") {
      Export("CUDA_VISIBLE_DEVICES", Text("gpu_ids"));
    }
    const std::string precision = LowerText(values_["mixed_precision"]);
    if (std::find(Precisions().begin(), Precisions().end(), precision) == Precisions().end()) {
      return absl::InvalidArgumentError(absl::StrCat("mixed_precision: ", precision,
                                                     " is unknown: it must be one of ",
                                                     absl::StrJoin(Precisions(), ", ")));
    }
    Export("ACCELERATE_MIXED_PRECISION", precision);
    if (precision == "fp8") MUSTER_RETURN_IF_ERROR(Fp8());
    if (IsPythonTrue(values_["enable_cpu_affinity"])) Export("ACCELERATE_CPU_AFFINITY", "1");
    return absl::OkStatus();
  }

  absl::Status Fp8() {
    if (!machine_.fp8) {
      return absl::FailedPreconditionError(
          "mixed_precision: fp8: FP8 is not available on this machine: it needs Transformer "
          "Engine, "
          "MS-AMP or torchao");
    }
    for (const auto& [name, value] : values_) {
      if (!absl::StartsWith(name, "fp8_") || value.is_null()) continue;
      if (name != "fp8_override_linear_precision") {
        Export(absl::StrCat("ACCELERATE_", absl::AsciiStrToUpper(name)), PythonText(value));
        continue;
      }
      if (!value.is_array() || value.size() != 3) {
        return absl::InvalidArgumentError(
            absl::StrCat("fp8_override_linear_precision: ", PythonText(value),
                         " is not allowed: it must be true or false, three times"));
      }
      Export("ACCELERATE_FP8_OVERRIDE_FPROP", PythonText(value[0]));
      Export("ACCELERATE_FP8_OVERRIDE_DGRAD", PythonText(value[1]));
      Export("ACCELERATE_FP8_OVERRIDE_WGRAD", PythonText(value[2]));
    }
    return absl::OkStatus();
  }

  absl::Status Dynamo() {
    const std::string backend = absl::AsciiStrToUpper(Text("dynamo_backend"));
    const auto& all = DynamoBackends();
    if (std::find(all.begin(), all.end(), backend) == all.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("dynamo_backend: Unknown dynamo backend: ", backend,
                       DidYouMean(backend, all), "; it must be one of ", absl::StrJoin(all, ", ")));
    }
    Export("ACCELERATE_DYNAMO_BACKEND", backend);
    Export("ACCELERATE_DYNAMO_MODE", Text("dynamo_mode"));
    for (const char* name : {"use_fullgraph", "use_dynamic", "use_regional_compilation"}) {
      const std::string flag = absl::StrCat("dynamo_", name);
      Export(absl::StrCat("ACCELERATE_", absl::AsciiStrToUpper(flag)), Text(flag));
    }
    return absl::OkStatus();
  }

  absl::Status Simple() {
    const bool cpu = IsPythonTrue(values_["cpu"]) || IsPythonTrue(values_["use_cpu"]);
    const int processes = Int("num_processes"), machines = Int("num_machines");
    if (values_.contains("mpirun_hostfile") && !values_["mpirun_hostfile"].is_null()) {
      return absl::UnimplementedError(
          "mpirun_hostfile is not supported: start `muster launch` with mpirun, or without it and "
          "with --num_machines");
    }
    if (machines > 1 && values_["main_process_ip"].is_null()) {
      return absl::InvalidArgumentError(
          "main_process_ip is missing: several machines need the main process IP");
    }
    if (machines > 1 && values_["main_process_port"].is_null()) {
      return absl::InvalidArgumentError(
          "main_process_port is missing: several machines need the main process port");
    }
    MUSTER_RETURN_IF_ERROR(Common());
    MUSTER_RETURN_IF_ERROR(Dynamo());
    Export("ACCELERATE_USE_CPU", cpu ? "True" : "False");
    if (cpu) {
      Export("KMP_AFFINITY", "granularity=fine,compact,1,0");
      Export("KMP_BLOCKTIME", "1");
    }
    Export("OMP_NUM_THREADS", Text("num_cpu_threads_per_process"));
    if (cpu && processes > 1) {
      // The release starts one process only, without a rank (D26).
      launch_.launcher = Launcher::kTorchrun;
      return Agent();
    }
    if (processes > 1 || machines > 1) {
      Export("MASTER_ADDR",
             values_["main_process_ip"].is_null() ? "127.0.0.1" : Text("main_process_ip"));
      Export("MASTER_PORT",
             values_["main_process_port"].is_null() ? kDefaultPort : Text("main_process_port"));
    }
    return absl::OkStatus();
  }

  // 0: chooses a free one.
  std::string Port() {
    if (values_["main_process_port"].is_null()) return kDefaultPort;
    return Int("main_process_port") == 0 ? kAny : Text("main_process_port");
  }

  absl::Status Agent() {
    const int machines = Int("num_machines");
    const std::string port = Port();
    auto& agent = launch_.agent;
    agent["nproc_per_node"] = absl::StrCat(Int("num_processes") / machines);
    if (machines > 1) {
      if (values_["main_process_ip"].is_null()) {
        return absl::InvalidArgumentError(
            "main_process_ip is missing: several machines need the main process IP");
      }
      agent["nnodes"] = absl::StrCat(machines);
      agent["node_rank"] = absl::StrCat(Int("machine_rank"));
      if (IsPythonTrue(values_["same_network"])) {
        agent["master_addr"] = Text("main_process_ip");
        agent["master_port"] = port;
      } else {
        agent["rdzv_endpoint"] = absl::StrCat(Text("main_process_ip"), ":", port);
      }
    } else {
      agent["master_port"] = port;
    }
    agent["rdzv_backend"] = Text("rdzv_backend");
    if (!Text("rdzv_conf").empty()) agent["rdzv_conf"] = Text("rdzv_conf");
    agent["max_restarts"] = Text("max_restarts");
    return absl::OkStatus();
  }

  absl::Status MultiDevice() {
    launch_.launcher = Launcher::kTorchrun;
    MUSTER_RETURN_IF_ERROR(Agent());
    MUSTER_RETURN_IF_ERROR(Common());
    MUSTER_RETURN_IF_ERROR(Dynamo());
    if (IsPythonTrue(values_["use_fsdp"])) MUSTER_RETURN_IF_ERROR(Fsdp());
    if (IsPythonTrue(values_["use_megatron_lm"])) Megatron();
    Export("OMP_NUM_THREADS", Text("num_cpu_threads_per_process"));
    return Parallelism();
  }

  absl::Status Fsdp() {
    const std::string version = Text("fsdp_version");
    if (version != "1" && version != "2") {
      return absl::InvalidArgumentError(
          absl::StrCat("fsdp_version: ", version, " is not allowed: it must be 1 or 2"));
    }
    // Version 2 no longer has this setting.
    if (version == "1" && IsPythonTrue(values_["fsdp_cpu_ram_efficient_loading"]) &&
        !IsPythonTrue(values_["fsdp_sync_module_states"])) {
      return absl::InvalidArgumentError(
          "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: true, since only one "
          "process loads the weights");
    }
    Export("ACCELERATE_USE_FSDP", "true");
    Export("FSDP_VERSION", version);
    Export("FSDP_SHARDING_STRATEGY", Text("fsdp_sharding_strategy"));
    Export("FSDP_MIN_NUM_PARAMS", Text("fsdp_min_num_params"));
    for (const char* name : {"reshard_after_forward", "offload_params", "forward_prefetch",
                             "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states",
                             "activation_checkpointing", "activation_checkpointing_offload"}) {
      Export(absl::StrCat("FSDP_", absl::AsciiStrToUpper(name)),
             LowerText(values_[absl::StrCat("fsdp_", name)]));
    }
    for (const auto& [name, variable] :
         {std::pair<const char*, const char*>{"auto_wrap_policy", "AUTO_WRAP_POLICY"},
          {"transformer_layer_cls_to_wrap", "TRANSFORMER_CLS_TO_WRAP"},
          {"backward_prefetch", "BACKWARD_PREFETCH"},
          {"state_dict_type", "STATE_DICT_TYPE"},
          {"ignored_modules", "IGNORED_MODULES"}}) {
      const Json& value = values_[absl::StrCat("fsdp_", name)];
      if (!value.is_null()) Export(absl::StrCat("FSDP_", variable), PythonText(value));
    }
    return absl::OkStatus();
  }

  void Megatron() {
    Export("ACCELERATE_USE_MEGATRON_LM", "true");
    constexpr absl::string_view kPrefix = "megatron_lm_";
    for (const auto& [name, value] : values_) {
      // A section may have other keys, which the release does not pass on.
      if (!absl::StartsWith(name, kPrefix) || !Flags().contains(name) || value.is_null()) continue;
      Export(absl::AsciiStrToUpper(name), PythonText(value));
    }
  }

  absl::Status Parallelism() {
    if (!IsPythonTrue(values_["use_parallelism_config"])) return absl::OkStatus();
    // Accelerate compares some of them with 1, and its processes read the others as numbers.
    for (const char* name : {"dp_replicate", "dp_shard", "tp", "cp", "sp"}) {
      const std::string flag = absl::StrCat("parallelism_config_", name, "_size");
      if (!ParsePythonInt(Text(flag)).has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat(flag, ": ", Text(flag), " is not allowed: it must be a whole number"));
      }
    }
    Export("ACCELERATE_USE_PARALLELISM_CONFIG", "true");
    std::vector<absl::string_view> names = {"dp_replicate_size", "dp_shard_size", "tp_size",
                                            "cp_size",           "cp_backend",    "sp_size",
                                            "sp_backend"};
    if (Int("parallelism_config_cp_size") > 1) names.push_back("cp_comm_strategy");
    if (Int("parallelism_config_sp_size") > 1) {
      names.insert(names.end(),
                   {"sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"});
    }
    for (const absl::string_view name : names) {
      const std::string flag = absl::StrCat("parallelism_config_", name);
      Export(absl::AsciiStrToUpper(flag), Text(flag));
    }
    return absl::OkStatus();
  }

  absl::Status Deepspeed() {
    launch_.launcher = Launcher::kTorchrun;
    const bool many = Int("num_machines") > 1;
    const std::string runner = values_["deepspeed_multinode_launcher"].is_null()
                                   ? "pdsh"
                                   : Text("deepspeed_multinode_launcher");
    if (many && runner != "standard") {
      MUSTER_RETURN_IF_ERROR(DeepspeedCommand(runner));
    } else {
      MUSTER_RETURN_IF_ERROR(Agent());
    }
    MUSTER_RETURN_IF_ERROR(Common());
    std::vector<std::string> fields;
    if (config_ != nullptr && config_->values.contains("deepspeed_config")) {
      for (const auto& [name, value] : config_->values["deepspeed_config"].items()) {
        fields.push_back(absl::AsciiStrToLower(name));
      }
    }
    if (precision_of_file_) fields.push_back("mixed_precision");
    Export("ACCELERATE_CONFIG_DS_FIELDS", absl::StrJoin(fields, ","));
    Export("ACCELERATE_USE_DEEPSPEED", "true");
    struct Variable {
      const char* setting;
      const char* name;
      bool lower;
    };
    for (const Variable& variable : {
             Variable{"zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", false},
             {"gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", false},
             {"gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", true},
             {"offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", true},
             {"offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", true},
             {"zero3_init_flag", "ACCELERATE_DEEPSPEED_ZERO3_INIT", true},
             {"zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", true},
             {"deepspeed_config_file", "ACCELERATE_DEEPSPEED_CONFIG_FILE", false},
             {"deepspeed_moe_layer_cls_names", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", false},
         }) {
      const Json& value = values_[variable.setting];
      if (value.is_null()) continue;
      Export(variable.name, variable.lower ? LowerText(value) : PythonText(value));
    }
    for (const char* setting : {"offload_optimizer_nvme_path", "offload_param_nvme_path"}) {
      if (values_[setting].is_null()) continue;
      launch_.left_out[absl::StrCat("ACCELERATE_DEEPSPEED_", absl::AsciiStrToUpper(setting))] =
          Text(setting);
    }
    return Parallelism();
  }

  absl::Status DeepspeedCommand(const std::string& runner) {
    if (values_["deepspeed_hostfile"].is_null()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "deepspeed_hostfile is missing: deepspeed_multinode_launcher ", runner, " needs it"));
    }
    launch_.launcher = Launcher::kDeepspeed;
    auto& command = launch_.command;
    command = {"deepspeed", "--hostfile", Text("deepspeed_hostfile")};
    const auto add = [&command](std::vector<std::string> words) {
      command.insert(command.end(), words.begin(), words.end());
    };
    if (runner == "nossh") {
      add({"--node_rank", Text("machine_rank"), "--no_ssh"});
    } else {
      add({"--no_local_rank", "--launcher", runner});
    }
    if (!values_["deepspeed_exclusion_filter"].is_null()) {
      add({"--exclude", Text("deepspeed_exclusion_filter")});
    } else if (!values_["deepspeed_inclusion_filter"].is_null()) {
      add({"--include", Text("deepspeed_inclusion_filter")});
    } else {
      add({"--num_gpus", absl::StrCat(Int("num_processes") / Int("num_machines"))});
    }
    if (!values_["main_process_ip"].is_null()) add({"--master_addr", Text("main_process_ip")});
    add({"--master_port", Port()});
    if (IsPythonTrue(values_["module"])) add({"--module"});
    if (IsPythonTrue(values_["no_python"])) add({"--no_python"});
    add({"<script>"});
    return absl::OkStatus();
  }

  const AccelerateConfig* const config_;
  const std::map<std::string, std::string>& variables_;
  const AccelerateMachine machine_;
  std::map<std::string, Json> values_;
  std::set<std::string> typed_;  // given as flags
  bool precision_of_file_ = false;
  AccelerateLaunch launch_;
};

// Returns the document with the keys in the order of the file.
OrderedJson InOrder(const Json& value, const std::string& pointer,
                    const std::map<std::string, int>& order) {
  if (!value.is_object()) return OrderedJson(value);
  std::vector<std::pair<int, std::string>> keys;
  for (const auto& [key, entry] : value.items()) {
    const auto at = order.find(absl::StrCat(pointer, "/", key));
    keys.push_back({at == order.end() ? 0 : at->second, key});
  }
  std::sort(keys.begin(), keys.end());
  OrderedJson ordered = OrderedJson::object();
  for (const auto& [at, key] : keys) {
    ordered[key] = InOrder(value[key], absl::StrCat(pointer, "/", key), order);
  }
  return ordered;
}

absl::Status WrongType(const AccelerateConfig& config, absl::string_view key, const Json& value,
                       absl::string_view must) {
  return absl::InvalidArgumentError(absl::StrCat(config.source, ": ", key, ": ", value.dump(),
                                                 " is not allowed: it must be ", must));
}

absl::Status CheckKey(const AccelerateConfig& config, const std::string& key, KeyType type,
                      OrderedJson* value) {
  if (value->is_null()) return absl::OkStatus();
  switch (type) {
    case KeyType::kInt:
      if (value->is_string()) {  // "2", in quotes
        int64_t number = 0;
        if (absl::SimpleAtoi(value->get<std::string>(), &number)) *value = number;
      }
      if (!value->is_number_integer()) return WrongType(config, key, *value, "a whole number");
      break;
    case KeyType::kBool:
      // Files of old releases have quoted words.
      if (value->is_string()) {
        const std::optional<bool> word = ParseBoolWord(value->get<std::string>());
        if (word.has_value()) *value = *word;
      }
      if (*value == 0 || *value == 1) *value = *value == 1;
      if (!value->is_boolean()) return WrongType(config, key, *value, "true or false");
      break;
    case KeyType::kText:
      // `gpu_ids: 3`; or a plain NO or no, which YAML 1.1 reads as false.
      if (value->is_number_integer()) *value = value->dump();
      if (*value == false && (key == "distributed_type" || key == "mixed_precision")) {
        *value = key == "distributed_type" ? "NO" : "no";
      }
      if (!value->is_string()) return WrongType(config, key, *value, "text");
      break;
    case KeyType::kSection:
      if (!value->is_object()) return WrongType(config, key, *value, "a section of KEY: VALUE");
      break;
    case KeyType::kList:
    case KeyType::kBoolOrText:
      break;
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<UnreadKey> UnreadKeys(const AccelerateConfig& config) {
  std::vector<UnreadKey> unread;
  for (const auto& [section, keys] : config.values.items()) {
    if (!keys.is_object()) continue;
    std::vector<std::string> known;
    for (const auto& [flag, unused] : Flags()) {
      if (IsKeyOf(section, flag)) known.push_back(flag);
    }
    for (const auto& [key, value] : keys.items()) {
      const std::string flag = FlagOfKey(section, key);
      if (value.is_null() || IsKeyOf(section, flag)) continue;
      // A name from old releases, whose setting changes no result.
      const bool old = flag == "fsdp_backward_prefetch_policy";
      unread.push_back({section, key, old ? std::string() : Nearest(flag, known)});
    }
  }
  return unread;
}

bool IsAccelerateConfig(const nlohmann::json& document) {
  return document.is_object() &&
         (document.contains("distributed_type") || document.contains("compute_environment"));
}

namespace {

// Checks the keys and values of a file, and converts old names.
absl::StatusOr<AccelerateConfig> CheckConfig(OrderedJson file, absl::string_view source) {
  AccelerateConfig config = {.values = std::move(file), .source = std::string(source)};
  OrderedJson& values = config.values;
  if (!values.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": the file must be a list of KEY: VALUE"));
  }
  const OrderedJson environment = values.value("compute_environment", OrderedJson("LOCAL_MACHINE"));
  if (environment == "AMAZON_SAGEMAKER") {
    return absl::UnimplementedError(
        absl::StrCat(source,
                     ": compute_environment: AMAZON_SAGEMAKER is not supported: submit the "
                     "job to machines of your own, with LOCAL_MACHINE"));
  }
  if (environment != "LOCAL_MACHINE") {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": compute_environment: ", PythonText(Json(environment)),
                     " is unknown: it must be LOCAL_MACHINE"));
  }
  if (!values.contains("distributed_type")) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": a distributed_type must be specified (such as 'NO' or MULTI_GPU)"));
  }
  if (values.contains("fp16")) {
    if (!values.contains("mixed_precision") && IsPythonTrue(Json(values["fp16"]))) {
      values["mixed_precision"] = "fp16";
    }
    values.erase("fp16");
  }
  if (values.contains("dynamo_backend")) {
    const OrderedJson backend = values["dynamo_backend"];
    values.erase("dynamo_backend");
    values["dynamo_config"] = OrderedJson::object();
    if (backend != "NO" && backend != false) values["dynamo_config"]["dynamo_backend"] = backend;
  }
  // A plain NO or no, which YAML 1.1 reads as false.
  for (const char* key : {"dynamo_backend", "backend"}) {
    if (!values.contains("dynamo_config") || !values["dynamo_config"].is_object()) break;
    OrderedJson& section = values["dynamo_config"];
    if (section.contains(key) && section[key] == false) section[key] = "NO";
  }
  std::vector<std::string> unknown, known;
  for (const auto& [key, type] : FileKeys()) known.push_back(key);
  for (auto& [key, value] : values.items()) {
    const auto type = FileKeys().find(key);
    if (type == FileKeys().end()) {
      const std::string nearest = Nearest(key, known);
      unknown.push_back(nearest.empty() ? key : absl::StrCat(key, " for ", nearest, "?"));
      continue;
    }
    MUSTER_RETURN_IF_ERROR(CheckKey(config, key, type->second, &value));
  }
  if (!unknown.empty()) {
    std::sort(unknown.begin(), unknown.end());
    return absl::InvalidArgumentError(absl::StrCat(source, ": the file has unknown keys (",
                                                   absl::StrJoin(unknown, ", "),
                                                   "): correct or remove them"));
  }
  OrderedJson given_values = OrderedJson::object();
  for (const auto& [key, value] : values.items()) {
    if (!value.is_null()) given_values[key] = value;
  }
  values = std::move(given_values);
  if (!values.contains("distributed_type") ||
      !DistributedTypes().contains(values["distributed_type"].get<std::string>())) {
    std::vector<std::string> types;
    for (const auto& [name, many] : DistributedTypes()) types.push_back(name);
    const std::string given = values.value("distributed_type", std::string("null"));
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": distributed_type: ", given, " is unknown", DidYouMean(given, types),
                     "; it must be one of ", absl::StrJoin(types, ", ")));
  }
  if (!values.contains("num_processes") && values["distributed_type"] == "NO") {
    values["num_processes"] = 1;
  }
  return config;
}

}  // namespace

absl::StatusOr<AccelerateConfig> ReadAccelerateConfig(const YamlDocument& document,
                                                      absl::string_view source) {
  return CheckConfig(InOrder(document.value, "", document.order), source);
}

absl::StatusOr<AccelerateConfig> ParseAccelerateConfig(absl::string_view text,
                                                       absl::string_view source) {
  if (absl::EndsWith(source, ".json")) {
    MUSTER_RETURN_IF_ERROR(ParseJson(text, source).status());
    return CheckConfig(OrderedJson::parse(text.begin(), text.end()), source);
  }
  MUSTER_ASSIGN_OR_RETURN(const YamlDocument document, ParseYaml(text, source));
  return ReadAccelerateConfig(document, source);
}

const std::vector<AccelerateFlag>& AccelerateFlags() {
  static const auto& all = *[] {
    auto* const flags = new std::vector<AccelerateFlag>;
    for (const auto& [name, flag] : Flags()) {
      flags->push_back({name, flag.type != Flag::Type::kTrue, flag.choices});
    }
    return flags;
  }();
  return all;
}

const std::vector<AccelerateFlag>& AccelerateEngineFlags() {
  static const auto& engine = *[] {
    auto* const flags = new std::vector<AccelerateFlag>;
    for (const AccelerateFlag& flag : AccelerateFlags()) {
      if (IsEngineFlag(flag.name)) flags->push_back(flag);
    }
    return flags;
  }();
  return engine;
}

absl::StatusOr<AccelerateLaunch> PlanAccelerateLaunch(
    const AccelerateConfig* config, const std::vector<std::string>& args,
    const std::map<std::string, std::string>& variables, const AccelerateMachine& machine) {
  return Planner(config, variables, machine).Run(args);
}

std::vector<std::map<std::string, std::string>> ProcessVariables(const AccelerateLaunch& launch,
                                                                 int machine_rank) {
  if (launch.launcher != Launcher::kTorchrun) return {launch.env};
  const auto parameter = [&launch](const std::string& name, const std::string& fallback) {
    const auto it = launch.agent.find(name);
    return it == launch.agent.end() ? fallback : it->second;
  };
  std::string address = parameter("master_addr", "127.0.0.1");
  std::string port = parameter("master_port", kDefaultPort);
  const std::string endpoint = parameter("rdzv_endpoint", "");
  if (!endpoint.empty()) {
    const size_t colon = endpoint.rfind(':');
    address = endpoint.substr(0, colon);
    port = endpoint.substr(colon + 1);
  }
  if (parameter("rdzv_backend", "static") != "static") address = port = kAny;
  const int local_world = launch.num_processes / launch.num_machines;
  std::vector<std::map<std::string, std::string>> processes;
  for (int local = 0; local < local_world; ++local) {
    const int rank = machine_rank * local_world + local;
    std::map<std::string, std::string> env = launch.env;
    env["RANK"] = env["ROLE_RANK"] = absl::StrCat(rank);
    env["WORLD_SIZE"] = env["ROLE_WORLD_SIZE"] = absl::StrCat(launch.num_processes);
    env["LOCAL_RANK"] = absl::StrCat(local);
    env["LOCAL_WORLD_SIZE"] = absl::StrCat(local_world);
    env["GROUP_RANK"] = absl::StrCat(machine_rank);
    env["GROUP_WORLD_SIZE"] = absl::StrCat(launch.num_machines);
    env["ROLE_NAME"] = launch.role;
    env["MASTER_ADDR"] = address;
    env["MASTER_PORT"] = port;
    env["TORCHELASTIC_RESTART_COUNT"] = "0";
    env["TORCHELASTIC_MAX_RESTARTS"] = parameter("max_restarts", "0");
    processes.push_back(std::move(env));
  }
  return processes;
}

}  // namespace muster::client
