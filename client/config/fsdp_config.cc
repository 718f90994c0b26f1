#include "client/config/fsdp_config.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bool_word.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "base/text.h"
#include "client/config/python_values.h"

namespace muster::client {
namespace {

using Json = nlohmann::json;
using Strategy = FsdpSettings::Strategy;

// In the order of torch's numbers, from 1.
const std::vector<std::string>& Strategies() {
  static const auto* const names = new std::vector<std::string>{
      "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"};
  return *names;
}
const std::vector<std::string>& Prefetches() {
  static const auto* const names = new std::vector<std::string>{"BACKWARD_PRE", "BACKWARD_POST"};
  return *names;
}
const std::vector<std::string>& StateDicts() {
  static const auto* const names =
      new std::vector<std::string>{"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"};
  return *names;
}

// Returns the dtype in which a mixed precision mode computes; empty for a mode that does not exist.
std::string DtypeOfMode(absl::string_view mode) {
  if (mode == "fp16") return "float16";
  if (mode == "bf16" || mode == "fp8") return "bfloat16";
  if (mode == "fp32") return "float32";
  return "";
}

bool IsDtype(const Json& value) {
  return value == "float16" || value == "bfloat16" || value == "float32";
}

std::string Shown(const Json& value) {
  const std::string text = value.is_string()
                               ? value.get<std::string>()
                               : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.substr(0, 200);
}

// Returns the index of torch's number or of a name among `names`, in any case; -1 if it is neither.
int IndexOf(const std::string& text, const std::vector<std::string>& names) {
  std::string name = absl::AsciiStrToUpper(text);
  // Torch's name of the last strategy; no other list has a similar one.
  if (name == "_HYBRID_SHARD_ZERO2") name.erase(0, 1);
  const auto at = std::find(names.begin(), names.end(), name);
  if (at != names.end()) return static_cast<int>(at - names.begin());
  // Accepts "2" and "02", but not "+2", like Python's isdigit().
  size_t number = 0;
  const bool digits = IsDigits(name) && absl::SimpleAtoi(name, &number);
  return digits && number >= 1 && number <= names.size() ? static_cast<int>(number) - 1 : -1;
}

// Reads one plugin: for each setting the argument, else the variable, else the default.
class Resolver {
 public:
  Resolver(const Json& arguments, const std::map<std::string, std::string>& variables)
      : arguments_(arguments), variables_(variables) {}

  absl::StatusOr<FsdpSettings> Resolve(absl::string_view mixed_precision) {
    MUSTER_RETURN_IF_ERROR(CheckArguments());
    MUSTER_RETURN_IF_ERROR(Version());
    MUSTER_RETURN_IF_ERROR(Sharding());
    MUSTER_ASSIGN_OR_RETURN(settings_.cpu_offload, Flag("cpu_offload", "OFFLOAD_PARAMS"));
    MUSTER_RETURN_IF_ERROR(BackwardPrefetch());
    MUSTER_RETURN_IF_ERROR(StateDictType());
    MUSTER_RETURN_IF_ERROR(Wrapping());
    MUSTER_RETURN_IF_ERROR(VersionOneFlags());
    MUSTER_RETURN_IF_ERROR(Checkpointing());
    MUSTER_RETURN_IF_ERROR(Loading());
    MUSTER_RETURN_IF_ERROR(Precision(mixed_precision));
    return std::move(settings_);
  }

 private:
  struct Given {
    Json value;  // null if the setting is not given
    std::string source;
  };

  Given Find(const char* argument, const char* variable) const {
    if (const auto at = arguments_.find(argument); at != arguments_.end() && !at->is_null()) {
      return {*at, argument};
    }
    if (variable != nullptr) {
      const std::string name = absl::StrCat("FSDP_", variable);
      if (const auto at = variables_.find(name); at != variables_.end()) return {at->second, name};
    }
    return {Json(), argument};
  }

  absl::Status Wrong(const Given& given, absl::string_view why) const {
    return absl::InvalidArgumentError(absl::StrCat(given.source, ": ", why));
  }

  absl::Status CheckArguments() const {
    if (!arguments_.is_object() && !arguments_.is_null()) {
      return absl::InvalidArgumentError("the arguments of the FSDP plugin must be an object");
    }
    for (const auto& [name, value] : arguments_.items()) {
      const auto& names = FsdpArgumentNames();
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("the FSDP plugin has no argument ", name, DidYouMean(name, names)));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Truth(const Given& given) const {
    if (given.value.is_boolean()) return given.value.get<bool>();
    if (given.value.is_string()) {
      const std::string word = given.value.get<std::string>();
      if (const std::optional<bool> flag = ParseBoolWord(word)) return *flag;
      return Wrong(given, absl::StrCat("invalid truth value ", absl::AsciiStrToLower(word)));
    }
    return Wrong(given, absl::StrCat("must be true or false, not ", Shown(given.value)));
  }

  // An argument must be a boolean: Accelerate keeps a word unchanged, so that "no" is true there.
  absl::StatusOr<bool> Flag(const char* argument, const char* variable,
                            bool otherwise = false) const {
    const Given given = Find(argument, variable);
    if (given.value.is_null()) return otherwise;
    if (given.source == argument && !given.value.is_boolean()) {
      return Wrong(given, absl::StrCat("must be true or false, not ", Shown(given.value)));
    }
    return Truth(given);
  }

  absl::StatusOr<int64_t> Whole(const Given& given, absl::string_view what) const {
    if (given.value.is_number_integer() &&
        (!given.value.is_number_unsigned() ||
         given.value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX))) {
      return given.value.get<int64_t>();
    }
    if (absl::StartsWith(given.source, "FSDP_") && given.value.is_string()) {
      const std::optional<int64_t> number = ParsePythonInt(given.value.get<std::string>());
      if (number.has_value()) return *number;
    }
    return Wrong(given, absl::StrCat("`", what, "` must be an integer, not ", Shown(given.value)));
  }

  // Reads a name in any case, or torch's number. Returns the number, from 1.
  absl::StatusOr<int> Choice(const Given& given, const std::vector<std::string>& names,
                             absl::string_view what) const {
    const std::string text = absl::AsciiStrToUpper(Shown(given.value));
    if (given.value.is_string() || given.value.is_number_integer()) {
      const int index = IndexOf(text, names);
      if (index >= 0) return index + 1;
    }
    std::vector<std::string> allowed;
    for (size_t i = 0; i < names.size(); ++i) {
      allowed.push_back(absl::StrCat(names[i], " (", i + 1, ")"));
    }
    if (&names == &Prefetches()) allowed.push_back("NO_PREFETCH");
    return Wrong(given, absl::StrCat("\"", text, "\" is not a valid ", what, "; allowed: ",
                                     absl::StrJoin(allowed, ", "), DidYouMean(text, names)));
  }

  absl::Status Version() {
    const Given given = Find("fsdp_version", "VERSION");
    if (given.value.is_null()) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(const int64_t version, Whole(given, "fsdp_version"));
    if (version != 1 && version != 2) {
      return Wrong(given, absl::StrCat("fsdp_version ", version, " does not exist: 1 or 2"));
    }
    settings_.version = static_cast<int>(version);
    return absl::OkStatus();
  }

  absl::Status Sharding() { return settings_.version == 1 ? ShardingOf1() : ShardingOf2(); }

  // The launcher always sets the strategy, to FULL_SHARD if the user chose none; and `accelerate
  // config` writes the chosen one as reshard_after_forward. So a strategy named there wins over
  // FULL_SHARD in the environment.
  absl::Status ShardingOf1() {
    const Given given = Find("sharding_strategy", "SHARDING_STRATEGY");
    Given reshard = Find("reshard_after_forward", "RESHARD_AFTER_FORWARD");
    const bool reshard_is_argument = reshard.source == "reshard_after_forward";
    if (reshard.value.is_boolean()) {
      return Wrong(reshard, absl::StrCat("reshard_after_forward set to ", Shown(reshard.value),
                                         " is not supported with version 1: name a strategy (",
                                         absl::StrJoin(Strategies(), ", "), ")"));
    }
    // In version 1 the release ignores the variable.
    if (!reshard.value.is_null() && !reshard_is_argument) {
      const std::string word = reshard.value.get<std::string>();
      const std::optional<bool> truth = ParseBoolWord(word);
      if (truth.has_value() || IndexOf(word, Strategies()) < 0) {
        if (!truth.value_or(false)) {
          settings_.notes.push_back(
              absl::StrCat(reshard.source, "=", word,
                           " has no effect in version 1: set FSDP_SHARDING_STRATEGY (SHARD_GRAD_OP "
                           "for false)"));
        }
        reshard.value = nullptr;
      }
    }
    settings_.strategy = Strategy::kFullShard;
    if (!given.value.is_null()) {
      MUSTER_ASSIGN_OR_RETURN(const int number, Choice(given, Strategies(), "ShardingStrategy"));
      settings_.strategy = static_cast<Strategy>(number);
      if (given.value.is_number()) settings_.kept_strategy = given.value;
    }
    if (reshard.value.is_null()) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(const int number, Choice(reshard, Strategies(), "ShardingStrategy"));
    const auto wanted = static_cast<Strategy>(number);
    // An argument wins over the environment.
    const bool strategy_is_default =
        given.value.is_null() ||
        (given.source != "sharding_strategy" &&
         (reshard_is_argument || settings_.strategy == Strategy::kFullShard));
    if (strategy_is_default) {
      settings_.strategy = wanted;
    } else if (settings_.strategy != wanted) {
      settings_.notes.push_back(absl::StrCat(given.source, " wins over ", reshard.source));
    }
    return absl::OkStatus();
  }

  absl::Status ShardingOf2() {
    const Given strategy{Find("sharding_strategy", nullptr)};
    const bool no_reshard = Find("reshard_after_forward", nullptr).value.is_null();
    if (!strategy.value.is_null()) {
      if (no_reshard) {
        return Wrong(strategy,
                     "does not exist in FSDP2: set reshard_after_forward to a `bool` (true for "
                     "FULL_SHARD, false for SHARD_GRAD_OP)");
      }
      // Nothing reads it. MapFsdp() refuses a word that is not a strategy.
      const absl::StatusOr<int> number = Choice(strategy, Strategies(), "ShardingStrategy");
      if (number.ok()) settings_.strategy = static_cast<Strategy>(*number);
      settings_.kept_strategy = strategy.value;
      settings_.notes.push_back("sharding_strategy has no effect in FSDP2");
    }
    const Given given = Find("reshard_after_forward", "RESHARD_AFTER_FORWARD");
    settings_.reshard_after_forward = true;
    if (!given.value.is_null()) {
      if (!given.value.is_boolean() && !given.value.is_string()) {
        return Wrong(given, absl::StrCat("reshard_after_forward set to ", Shown(given.value),
                                         " is not supported with FSDP2: set it to a `bool`"));
      }
      MUSTER_ASSIGN_OR_RETURN(settings_.reshard_after_forward, Truth(given));
    }
    if (strategy.value.is_null()) NoteStrategyOf1();
    return absl::OkStatus();
  }

  // The release does not read the variable in version 2. The launcher always sets it, to FULL_SHARD
  // if the user chose none.
  void NoteStrategyOf1() {
    const Given variable = Find("sharding_strategy", "SHARDING_STRATEGY");
    if (variable.value.is_null()) return;
    const absl::StatusOr<int> number = Choice(variable, Strategies(), "ShardingStrategy");
    const Strategy here =
        *settings_.reshard_after_forward ? Strategy::kFullShard : Strategy::kShardGradOp;
    if (number.ok() && (static_cast<Strategy>(*number) == here ||
                        static_cast<Strategy>(*number) == Strategy::kFullShard)) {
      return;
    }
    settings_.notes.push_back(absl::StrCat(
        variable.source, "=", Shown(variable.value),
        " has no effect in version 2: set FSDP_RESHARD_AFTER_FORWARD (true for FULL_SHARD, false "
        "for SHARD_GRAD_OP), or MUSTER_SHARDING for another strategy"));
  }

  absl::Status BackwardPrefetch() {
    const Given given = Find("backward_prefetch", "BACKWARD_PREFETCH");
    if (given.value.is_null()) return absl::OkStatus();
    if (given.value.is_string() &&
        absl::EqualsIgnoreCase(given.value.get<std::string>(), "NO_PREFETCH")) {
      return absl::OkStatus();
    }
    MUSTER_ASSIGN_OR_RETURN(const int number, Choice(given, Prefetches(), "BackwardPrefetch"));
    if (settings_.version == 2) {
      settings_.notes.push_back("backward_prefetch has no effect in FSDP2");
    } else {
      settings_.backward_prefetch = static_cast<FsdpSettings::Prefetch>(number);
    }
    return absl::OkStatus();
  }

  absl::Status StateDictType() {
    const Given given = Find("state_dict_type", "STATE_DICT_TYPE");
    auto type =
        settings_.version == 1 ? FsdpSettings::StateDict::kFull : FsdpSettings::StateDict::kSharded;
    if (!given.value.is_null()) {
      MUSTER_ASSIGN_OR_RETURN(const int number, Choice(given, StateDicts(), "StateDictType"));
      type = static_cast<FsdpSettings::StateDict>(number);
    }
    return SetStateDictType(StateDicts()[static_cast<size_t>(type) - 1], settings_);
  }

  absl::Status Wrapping() {
    const Given given = Find("auto_wrap_policy", "AUTO_WRAP_POLICY");
    const std::string policy =
        given.value.is_null() ? "NO_WRAP" : absl::AsciiStrToUpper(Shown(given.value));
    if (policy == "TRANSFORMER_BASED_WRAP") {
      settings_.wrap = FsdpSettings::Wrap::kTransformer;
    } else if (policy == "SIZE_BASED_WRAP") {
      settings_.wrap = FsdpSettings::Wrap::kSize;
    } else if (policy != "NO_WRAP") {
      const std::vector<std::string> allowed = {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP",
                                                "NO_WRAP"};
      return Wrong(given, absl::StrCat("invalid auto wrap policy: ", Shown(given.value),
                                       "; allowed: ", absl::StrJoin(allowed, ", "),
                                       DidYouMean(policy, allowed)));
    }
    MUSTER_RETURN_IF_ERROR(WrappedClasses());
    // The variable counts only for its own policy, an argument always.
    const bool by_size = settings_.wrap == FsdpSettings::Wrap::kSize;
    const Given least = Find("min_num_params", by_size ? "MIN_NUM_PARAMS" : nullptr);
    if (!least.value.is_null()) {
      MUSTER_ASSIGN_OR_RETURN(settings_.min_num_params, Whole(least, "min_num_params"));
    } else if (by_size) {
      settings_.min_num_params = 0;
    }
    return absl::OkStatus();
  }

  absl::Status WrappedClasses() {
    const bool by_class = settings_.wrap == FsdpSettings::Wrap::kTransformer;
    const Given given =
        Find("transformer_cls_names_to_wrap", by_class ? "TRANSFORMER_CLS_TO_WRAP" : nullptr);
    if (given.value.is_null()) return absl::OkStatus();
    std::vector<std::string>& classes = settings_.transformer_classes.emplace();
    if (given.value.is_string() && !by_class) {
      classes.push_back(given.value.get<std::string>());
      settings_.classes_are_one_text = true;
      return absl::OkStatus();
    }
    if (given.value.is_string()) {
      for (absl::string_view name : absl::StrSplit(given.value.get<std::string>(), ',')) {
        classes.emplace_back(absl::StripAsciiWhitespace(name));
      }
      return absl::OkStatus();
    }
    if (given.value.is_array()) {
      for (const Json& name : given.value) {
        if (!name.is_string()) break;
        classes.push_back(name.get<std::string>());
      }
      if (classes.size() == given.value.size()) return absl::OkStatus();
    }
    return Wrong(given, absl::StrCat("must be names of classes, not ", Shown(given.value)));
  }

  absl::Status VersionOneFlags() {
    struct Field {
      const char* argument;
      const char* variable;
      std::optional<bool>* value;
    };
    for (const Field& field :
         {Field{"use_orig_params", "USE_ORIG_PARAMS", &settings_.use_orig_params},
          Field{"sync_module_states", "SYNC_MODULE_STATES", &settings_.sync_module_states}}) {
      if (settings_.version == 1) {
        MUSTER_ASSIGN_OR_RETURN(*field.value, Flag(field.argument, field.variable));
      } else if (!Find(field.argument, nullptr).value.is_null()) {
        settings_.notes.push_back(absl::StrCat(field.argument, " has no effect in FSDP2"));
      }
    }
    const Given given = Find("forward_prefetch", "FORWARD_PREFETCH");
    if (settings_.version == 1) {
      MUSTER_ASSIGN_OR_RETURN(settings_.forward_prefetch,
                              Flag("forward_prefetch", "FORWARD_PREFETCH"));
      return absl::OkStatus();
    }
    bool refused = given.source == "forward_prefetch" && !given.value.is_null();
    if (!refused && !given.value.is_null()) {
      // The launcher always sets the variable: false is no request, nor is "none", which it writes
      // for a null in the config file.
      const absl::StatusOr<bool> wished = Truth(given);
      refused = wished.ok() && *wished;
    }
    if (!refused) return absl::OkStatus();
    return Wrong(given,
                 "forward_prefetch is not implemented in FSDP2: leave it out or set "
                 "fsdp_version=1");
  }

  absl::Status Checkpointing() {
    MUSTER_ASSIGN_OR_RETURN(settings_.activation_checkpointing,
                            Flag("activation_checkpointing", "ACTIVATION_CHECKPOINTING"));
    MUSTER_ASSIGN_OR_RETURN(
        settings_.activation_checkpointing_offload,
        Flag("activation_checkpointing_offload", "ACTIVATION_CHECKPOINTING_OFFLOAD"));
    if (!settings_.activation_checkpointing_offload) return absl::OkStatus();
    if (!settings_.activation_checkpointing) {
      return absl::InvalidArgumentError(
          "`activation_checkpointing_offload=True` requires `activation_checkpointing=True`");
    }
    if (settings_.version != 2) {
      return absl::InvalidArgumentError(
          "`activation_checkpointing_offload=True` requires `fsdp_version=2`");
    }
    return absl::OkStatus();
  }

  absl::Status Loading() {
    const Given ignored = Find("ignored_modules", "IGNORED_MODULES");
    if (ignored.value.is_string()) {
      settings_.ignored_modules = ignored.value.get<std::string>();
    } else if (!ignored.value.is_null()) {
      return Wrong(ignored,
                   absl::StrCat("must be a pattern of module names, not ", Shown(ignored.value)));
    }
    MUSTER_ASSIGN_OR_RETURN(settings_.limit_all_gathers,
                            Flag("limit_all_gathers", nullptr, /*otherwise=*/true));
    MUSTER_ASSIGN_OR_RETURN(settings_.cpu_ram_efficient_loading,
                            Flag("cpu_ram_efficient_loading", "CPU_RAM_EFFICIENT_LOADING"));
    if (settings_.version == 1 && settings_.cpu_ram_efficient_loading &&
        !*settings_.sync_module_states) {
      settings_.notes.push_back(
          "sync_module_states is on, since cpu_ram_efficient_loading leaves the weights to rank 0");
      settings_.sync_module_states = true;
    }
    return absl::OkStatus();
  }

  absl::Status Precision(absl::string_view mode) {
    const std::string accelerator_mode = absl::AsciiStrToLower(mode);
    if (accelerator_mode != "no" && accelerator_mode != "fp16" && accelerator_mode != "bf16" &&
        accelerator_mode != "fp8") {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown mixed_precision mode: ", mode, "; allowed: no, fp8, fp16, bf16"));
    }
    const Given given = Find("mixed_precision_policy", nullptr);
    if (given.value.is_object()) return PolicyOf(given);
    if (!given.value.is_null()) {
      const std::string dtype = given.value.is_string() ? DtypeOfMode(Shown(given.value)) : "";
      if (dtype.empty()) {
        return Wrong(given, absl::StrCat("invalid mixed precision: ", Shown(given.value),
                                         "; allowed: fp8, fp16, bf16, fp32"));
      }
      settings_.precision = {dtype, dtype, dtype};
    } else if (accelerator_mode != "no") {
      const std::string dtype = DtypeOfMode(accelerator_mode);
      settings_.precision = {dtype, dtype, dtype};
    }
    return absl::OkStatus();
  }

  absl::Status PolicyOf(const Given& given) {
    const std::string last = settings_.version == 1 ? "buffer_dtype" : "output_dtype";
    const std::vector<std::string> keys = {"param_dtype", "reduce_dtype", last};
    bool valid = given.value.size() == keys.size();
    for (const std::string& key : keys) {
      valid = valid && given.value.contains(key) && IsDtype(given.value[key]);
    }
    if (!valid) {
      return Wrong(given, absl::StrCat("invalid mixed precision policy: ", Shown(given.value),
                                       "; it must have ", absl::StrJoin(keys, ", "),
                                       ", each float16, bfloat16 or float32"));
    }
    settings_.precision = {given.value["param_dtype"], given.value["reduce_dtype"],
                           given.value[last]};
    return absl::OkStatus();
  }

  const Json& arguments_;
  const std::map<std::string, std::string>& variables_;
  FsdpSettings settings_;
};

template <class T>
Json OrNull(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

}  // namespace

absl::StatusOr<FsdpSettings> ResolveFsdp(const Json& arguments,
                                         const std::map<std::string, std::string>& variables,
                                         absl::string_view mixed_precision) {
  return Resolver(arguments, variables).Resolve(mixed_precision);
}

absl::Status SetStateDictType(absl::string_view type, FsdpSettings& settings) {
  const auto& names = StateDicts();
  const int index = IndexOf(std::string(type), names);
  if (index < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("state_dict_type: \"", absl::AsciiStrToUpper(type),
                     "\" is not a valid StateDictType; allowed: ", absl::StrJoin(names, ", ")));
  }
  const auto chosen = static_cast<FsdpSettings::StateDict>(index + 1);
  if (settings.version == 2 && chosen == FsdpSettings::StateDict::kLocal) {
    return absl::InvalidArgumentError(
        "FSDP2 does not support LOCAL_STATE_DICT: set `fsdp_state_dict_type` to "
        "`SHARDED_STATE_DICT` or `FULL_STATE_DICT`");
  }
  settings.state_dict = chosen;
  settings.state_dict_config.reset();
  if (chosen == FsdpSettings::StateDict::kFull) settings.state_dict_config = {true, true};
  if (chosen == FsdpSettings::StateDict::kSharded) settings.state_dict_config.emplace();
  return absl::OkStatus();
}

Json FsdpFields(const FsdpSettings& settings) {
  Json fields;
  fields["fsdp_version"] = settings.version;
  fields["sharding_strategy"] =
      !settings.kept_strategy.is_null() ? settings.kept_strategy
      : settings.strategy ? Json(Strategies()[static_cast<size_t>(*settings.strategy) - 1])
                          : Json();
  fields["reshard_after_forward"] = OrNull(settings.reshard_after_forward);
  fields["backward_prefetch"] =
      settings.backward_prefetch
          ? Json(Prefetches()[static_cast<size_t>(*settings.backward_prefetch) - 1])
          : Json();
  fields["auto_wrap_policy"] =
      settings.wrap == FsdpSettings::Wrap::kTransformer ? Json("TRANSFORMER_BASED_WRAP")
      : settings.wrap == FsdpSettings::Wrap::kSize      ? Json("SIZE_BASED_WRAP")
                                                        : Json();
  fields["transformer_cls_names_to_wrap"] = settings.classes_are_one_text
                                                ? Json(settings.transformer_classes->front())
                                                : OrNull(settings.transformer_classes);
  fields["min_num_params"] = OrNull(settings.min_num_params);
  fields["cpu_offload"] = settings.cpu_offload;
  fields["mixed_precision_policy"] = nullptr;
  if (settings.precision) {
    fields["mixed_precision_policy"] = {
        {"param_dtype", settings.precision->param},
        {"reduce_dtype", settings.precision->reduce},
        {settings.version == 1 ? "buffer_dtype" : "output_dtype", settings.precision->last}};
  }
  fields["state_dict_type"] = StateDicts()[static_cast<size_t>(settings.state_dict) - 1];
  fields["state_dict_config"] = nullptr;
  fields["optim_state_dict_config"] = nullptr;
  if (settings.state_dict_config) {
    const bool full = settings.state_dict == FsdpSettings::StateDict::kFull;
    Json config = {{"offload_to_cpu", settings.state_dict_config->offload_to_cpu}};
    if (settings.state_dict_config->rank0_only) {
      config["rank0_only"] = *settings.state_dict_config->rank0_only;
    }
    config["class"] = full ? "FullStateDictConfig" : "ShardedStateDictConfig";
    fields["state_dict_config"] = config;
    config["class"] = full ? "FullOptimStateDictConfig" : "ShardedOptimStateDictConfig";
    fields["optim_state_dict_config"] = config;
  }
  fields["limit_all_gathers"] = settings.limit_all_gathers;
  fields["use_orig_params"] = OrNull(settings.use_orig_params);
  fields["sync_module_states"] = OrNull(settings.sync_module_states);
  fields["forward_prefetch"] = OrNull(settings.forward_prefetch);
  fields["activation_checkpointing"] = settings.activation_checkpointing;
  fields["activation_checkpointing_offload"] = settings.activation_checkpointing_offload;
  fields["cpu_ram_efficient_loading"] = settings.cpu_ram_efficient_loading;
  fields["ignored_modules"] = OrNull(settings.ignored_modules);
  return fields;
}

const std::vector<std::string>& FsdpArgumentNames() {
  static const auto* const names = new std::vector<std::string>{"fsdp_version",
                                                                "sharding_strategy",
                                                                "reshard_after_forward",
                                                                "backward_prefetch",
                                                                "mixed_precision_policy",
                                                                "auto_wrap_policy",
                                                                "cpu_offload",
                                                                "ignored_modules",
                                                                "state_dict_type",
                                                                "limit_all_gathers",
                                                                "use_orig_params",
                                                                "sync_module_states",
                                                                "forward_prefetch",
                                                                "activation_checkpointing",
                                                                "activation_checkpointing_offload",
                                                                "cpu_ram_efficient_loading",
                                                                "transformer_cls_names_to_wrap",
                                                                "min_num_params"};
  return *names;
}

const std::vector<std::string>& FsdpVariableNames() {
  static const auto* const names =
      new std::vector<std::string>{"FSDP_VERSION",
                                   "FSDP_SHARDING_STRATEGY",
                                   "FSDP_RESHARD_AFTER_FORWARD",
                                   "FSDP_OFFLOAD_PARAMS",
                                   "FSDP_BACKWARD_PREFETCH",
                                   "FSDP_STATE_DICT_TYPE",
                                   "FSDP_AUTO_WRAP_POLICY",
                                   "FSDP_TRANSFORMER_CLS_TO_WRAP",
                                   "FSDP_MIN_NUM_PARAMS",
                                   "FSDP_USE_ORIG_PARAMS",
                                   "FSDP_SYNC_MODULE_STATES",
                                   "FSDP_FORWARD_PREFETCH",
                                   "FSDP_ACTIVATION_CHECKPOINTING",
                                   "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
                                   "FSDP_IGNORED_MODULES",
                                   "FSDP_CPU_RAM_EFFICIENT_LOADING"};
  return *names;
}

}  // namespace muster::client
