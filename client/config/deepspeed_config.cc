#include "client/config/deepspeed_config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bool_word.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "client/config/python_values.h"

namespace muster::client {
namespace {

using Json = nlohmann::json;
using Variables = std::map<std::string, std::string>;

constexpr char kAuto[] = "auto";
constexpr char kZero[] = "zero_optimization";
constexpr char kSteps[] = "gradient_accumulation_steps";
constexpr char kClipping[] = "gradient_clipping";
constexpr char kMicro[] = "train_micro_batch_size_per_gpu";
constexpr char kTrain[] = "train_batch_size";

// The plugin's fields that a config may have, too, and where.
const std::vector<std::pair<std::string, std::string>>& FieldsInConfig() {
  static const auto* const fields = new std::vector<std::pair<std::string, std::string>>{
      {kSteps, kSteps},
      {kClipping, kClipping},
      {"zero_stage", "zero_optimization.stage"},
      {"offload_optimizer_device", "zero_optimization.offload_optimizer.device"},
      {"offload_param_device", "zero_optimization.offload_param.device"},
      {"offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"},
      {"offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"},
      {"zero3_save_16bit_model", "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
  };
  return *fields;
}

std::string Shown(const Json& value) {
  const std::string text = value.is_string()
                               ? value.get<std::string>()
                               : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.substr(0, 200);
}

absl::Status Wrong(absl::string_view name, const Json& value, absl::string_view must) {
  return absl::InvalidArgumentError(absl::StrCat(name, " must be ", must, ", not ", Shown(value)));
}

std::optional<std::string> Variable(const Variables& variables, const std::string& name) {
  const auto at = variables.find(name);
  if (at == variables.end()) return std::nullopt;
  return at->second;
}

// Returns the value at a dotted key; null if it or a section on the way is missing.
const Json* At(const Json& config, absl::string_view key) {
  const Json* node = &config;
  for (absl::string_view part : absl::StrSplit(key, '.')) {
    if (!node->is_object()) return nullptr;
    const auto at = node->find(std::string(part));
    if (at == node->end()) return nullptr;
    node = &*at;
  }
  return node;
}

Json* At(Json& config, absl::string_view key) {
  return const_cast<Json*>(At(std::as_const(config), key));
}

bool IsAuto(const Json& config, absl::string_view key) {
  const Json* value = At(config, key);
  return value != nullptr && *value == kAuto;
}

void FillAuto(Json& config, absl::string_view key, const Json& value) {
  Json* at = At(config, key);
  if (at != nullptr && *at == kAuto) *at = value;
}

// "auto", or a whole number of at least `least`.
absl::StatusOr<Json> NumberOrAuto(const std::string& name, const Json& value) {
  if (value == kAuto) return value;
  if (value.is_number_integer()) return value;
  if (value.is_string()) {
    const std::optional<int64_t> number = ParsePythonInt(value.get<std::string>());
    if (number.has_value()) return Json(*number);
  }
  return Wrong(name, value, "a whole number or auto");
}

absl::StatusOr<Json> FloatOrAuto(const std::string& name, const Json& value) {
  if (value == kAuto || value.is_number()) return value;
  if (value.is_string()) {
    const std::optional<double> number = ParsePythonFloat(value.get<std::string>());
    if (number.has_value() && std::isfinite(*number)) return Json(*number);
    // JSON has no such numbers, so they are written as the usual texts.
    if (number.has_value()) return Json(std::isnan(*number) ? "nan" : *number > 0 ? "inf" : "-inf");
  }
  return Wrong(name, value, "a number or auto");
}

absl::StatusOr<Json> Number(const std::string& name, const Json& value) {
  MUSTER_ASSIGN_OR_RETURN(Json number, NumberOrAuto(name, value));
  if (number == kAuto) return Wrong(name, value, "a whole number");
  return number;
}

absl::StatusOr<Json> Text(const std::string& name, const Json& value) {
  if (value.is_string()) return value;
  return Wrong(name, value, "text");
}

// A variable is true if it says so. An argument must be a boolean: Accelerate keeps a word
// unchanged, so that "no" is true there.
absl::StatusOr<Json> Truth(const std::string& name, const Json& value) {
  if (value.is_boolean()) return value;
  if (value.is_string() && absl::StartsWith(name, "ACCELERATE_")) {
    return Json(absl::AsciiStrToLower(value.get<std::string>()) == "true");
  }
  return Wrong(name, value, "true or false");
}

// The plugin's fields that the environment has, too, with their defaults.
struct Field {
  const char* name;
  const char* variable;
  Json otherwise;
  absl::StatusOr<Json> (*read)(const std::string& name, const Json& value);
};
const std::vector<Field>& Fields() {
  static const auto* const fields = new std::vector<Field>{
      {kSteps, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", kAuto, NumberOrAuto},
      {kClipping, "ACCELERATE_GRADIENT_CLIPPING", kAuto, FloatOrAuto},
      {"zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", 2, Number},
      {"offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none", Text},
      {"offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none", Text},
      {"offload_optimizer_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "none",
       Text},
      {"offload_param_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "none", Text},
      {"zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", false, Truth},
  };
  return *fields;
}

bool Given(const Json& arguments, const char* name) {
  const auto at = arguments.find(name);
  return at != arguments.end() && !at->is_null();
}

absl::Status CheckArguments(const Json& arguments) {
  if (!arguments.is_object() && !arguments.is_null()) {
    return absl::InvalidArgumentError("the arguments of the DeepSpeed plugin must be an object");
  }
  const std::vector<std::string>& names = DeepSpeedArgumentNames();
  for (const auto& [name, value] : arguments.items()) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the DeepSpeed plugin has no argument ", name, DidYouMean(name, names)));
    }
  }
  return absl::OkStatus();
}

// Checks the form of a config, before any code walks through it.
absl::Status CheckSections(const Json& config) {
  if (!config.is_object()) return Wrong("a DeepSpeed config", config, "a JSON object");
  for (const char* key : {kZero, "zero_optimization.offload_optimizer",
                          "zero_optimization.offload_param", "fp16", "bf16"}) {
    const Json* section = At(config, key);
    // Null means absent.
    if (section != nullptr && !section->is_null() && !section->is_object()) {
      return Wrong(absl::StrCat("the section ", key, " of a DeepSpeed config"), *section,
                   "an object");
    }
  }
  return absl::OkStatus();
}

void ProcessSection(Json& section, const std::string& prefix,
                    const std::map<std::string, Json>& values, bool must_match,
                    std::vector<std::string>& unfilled, std::vector<std::string>& mismatches) {
  for (auto& [name, value] : section.items()) {
    const std::string key = prefix + name;
    if (value.is_object()) {
      ProcessSection(value, key + ".", values, must_match, unfilled, mismatches);
      continue;
    }
    const auto given = values.find(key);
    if (value == kAuto) {
      if (given == values.end()) {
        unfilled.push_back(key);
      } else {
        value = given->second;
      }
    } else if (must_match && !value.is_null() && given != values.end() &&
               !IsPythonEqual(value, given->second)) {
      mismatches.push_back(absl::StrCat(key, " is ", Shown(value), " in the config and ",
                                        Shown(given->second), " in the code"));
    }
  }
}

// Returns the product, or an error that names `what` if it does not fit.
absl::StatusOr<int64_t> Times(int64_t a, int64_t b, absl::string_view what) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is too large: ", a, " times ", b));
  }
  return product;
}

absl::StatusOr<std::optional<int64_t>> BatchNumber(const Json& config, const char* key) {
  const Json* value = At(config, key);
  if (value == nullptr || value->is_null()) return std::optional<int64_t>();
  // 8.0 is a whole number, too.
  if (value->is_number_float()) {
    const double number = value->get<double>();
    if (number == std::floor(number) && number > 0 && number < 9e18) {
      return std::optional<int64_t>(static_cast<int64_t>(number));
    }
  }
  if (!value->is_number_integer() ||
      (value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))) {
    return Wrong(key, *value, "a whole number");
  }
  if (value->get<int64_t>() <= 0) return Wrong(key, *value, "greater than 0");
  return std::optional<int64_t>(value->get<int64_t>());
}

}  // namespace

absl::StatusOr<Json> ReadDeepSpeedConfig(absl::string_view text) {
  const std::string path(text);
  std::string json = path;
  std::string source = "ACCELERATE_DEEPSPEED_CONFIG_FILE";
  if (const auto content = ReadFile(path); content.ok()) {
    json = *content;
    source = path;
  } else if (absl::StatusOr<Json> parsed = ParseJson(json, source); parsed.ok()) {
    return parsed;
  } else if (!absl::WebSafeBase64Unescape(text, &json) || !ParseJson(json, source).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected a string path to an existing DeepSpeed config, or its JSON, or that as a base64 "
        "encoded string, not ",
        path.substr(0, 200)));
  }
  return ParseJson(json, source);
}

absl::StatusOr<DeepSpeedConfig> DeepSpeedConfig::Resolve(const Json& config, const Json& arguments,
                                                         const Variables& variables,
                                                         DeepSpeedContext context) {
  DeepSpeedConfig resolved;
  resolved.context_ = std::move(context);
  MUSTER_RETURN_IF_ERROR(resolved.Init(config, arguments, variables));
  return resolved;
}

absl::Status DeepSpeedConfig::Init(const Json& config, const Json& arguments,
                                   const Variables& variables) {
  MUSTER_RETURN_IF_ERROR(CheckArguments(arguments));
  fields_ = Json::object();
  for (const Field& field : Fields()) {
    const std::optional<std::string> variable = Variable(variables, field.variable);
    Json value = field.otherwise;
    if (Given(arguments, field.name)) {
      MUSTER_ASSIGN_OR_RETURN(value, field.read(field.name, arguments[field.name]));
    } else if (variable) {
      MUSTER_ASSIGN_OR_RETURN(value, field.read(field.variable, *variable));
    }
    fields_[field.name] = value;
  }
  fields_["is_train_batch_min"] = true;
  if (Given(arguments, "is_train_batch_min")) {
    MUSTER_ASSIGN_OR_RETURN(fields_["is_train_batch_min"],
                            Truth("is_train_batch_min", arguments["is_train_batch_min"]));
  }
  if (Given(arguments, "transformer_moe_cls_names")) {
    MUSTER_RETURN_IF_ERROR(
        Text("transformer_moe_cls_names", arguments["transformer_moe_cls_names"]).status());
  }
  // The Accelerator reads the same variable, which wins over the argument there, too.
  if (const auto steps = Variable(variables, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")) {
    MUSTER_ASSIGN_OR_RETURN(const Json number,
                            NumberOrAuto("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", *steps));
    if (number != kAuto) context_.gradient_accumulation_steps = number.get<int64_t>();
  }

  config_ = config;
  if (config_.is_null() && Given(arguments, "hf_ds_config")) config_ = arguments["hf_ds_config"];
  if (config_.is_null()) {
    const auto file = Variable(variables, "ACCELERATE_DEEPSPEED_CONFIG_FILE");
    if (file && *file != "none") config_ = *file;
  }
  if (config_.is_string() && config_ == "none") config_ = nullptr;
  if (config_.is_string()) {
    MUSTER_ASSIGN_OR_RETURN(config_, ReadDeepSpeedConfig(config_.get<std::string>()));
    if (config_.is_null()) return Wrong("a DeepSpeed config", config_, "a JSON object");
  }
  if (config_.is_null()) {
    FromFields();
  } else {
    MUSTER_RETURN_IF_ERROR(FromConfig(variables, fields_[kSteps] != kAuto));
  }
  config_["steps_per_print"] = "inf";
  MUSTER_RETURN_IF_ERROR(SetInitFlag(arguments, variables));
  MUSTER_RETURN_IF_ERROR(SetMsAmp(arguments, variables));
  return SetMixedPrecision();
}

absl::Status DeepSpeedConfig::FromConfig(const Variables& variables, bool given_steps) {
  MUSTER_RETURN_IF_ERROR(CheckSections(config_));
  if (!config_.contains(kZero)) {
    return absl::InvalidArgumentError(
        "the DeepSpeed config has no section zero_optimization: add it, with its stage");
  }
  // Accelerate writes 1 here, and so ignores the program's value.
  if (!config_.contains(kSteps)) {
    config_[kSteps] = given_steps ? fields_[kSteps] : Json(context_.gradient_accumulation_steps);
  }
  std::vector<std::string> ignored;
  for (const auto& [field, key] : FieldsInConfig()) ignored.push_back(field);
  ignored.push_back("mixed_precision");
  const std::string launcher = Variable(variables, "ACCELERATE_CONFIG_DS_FIELDS").value_or("");
  std::vector<std::string> twice;
  for (absl::string_view name : absl::StrSplit(launcher, ',')) {
    if (std::find(ignored.begin(), ignored.end(), name) != ignored.end()) twice.emplace_back(name);
  }
  if (!twice.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "with a DeepSpeed config file, these fields of the Accelerate config would be ignored: ",
        absl::StrJoin(twice, ", "), "; set them in the DeepSpeed config only"));
  }
  for (const auto& [field, key] : FieldsInConfig()) FillAuto(config_, key, fields_[field]);
  for (const auto& [field, key] : FieldsInConfig()) {
    const Json* value = At(config_, key);
    if (value != nullptr && !value->is_null() && *value != kAuto) fields_[field] = *value;
  }
  return absl::OkStatus();
}

void DeepSpeedConfig::FromFields() {
  const auto path = [&](const char* device, const char* name) {
    return fields_[device] == "nvme" ? fields_[name] : Json();
  };
  config_ = {{kTrain, kAuto},
             {kMicro, kAuto},
             {kSteps, fields_[kSteps]},
             {kZero,
              {{"stage", fields_["zero_stage"]},
               {"offload_optimizer",
                {{"device", fields_["offload_optimizer_device"]},
                 {"nvme_path", path("offload_optimizer_device", "offload_optimizer_nvme_path")}}},
               {"offload_param",
                {{"device", fields_["offload_param_device"]},
                 {"nvme_path", path("offload_param_device", "offload_param_nvme_path")}}},
               {"stage3_gather_16bit_weights_on_model_save", fields_["zero3_save_16bit_model"]}}}};
  if (fields_[kClipping] != 0) config_[kClipping] = fields_[kClipping];
  clipping_is_asked_for_ = fields_[kClipping] != kAuto;
}

absl::Status DeepSpeedConfig::SetInitFlag(const Json& arguments, const Variables& variables) {
  const Json* stage = At(config_, "zero_optimization.stage");
  const bool zero3 = stage != nullptr && *stage == 3;
  bool flag = zero3;
  if (Given(arguments, "zero3_init_flag")) {
    MUSTER_ASSIGN_OR_RETURN(const Json given,
                            Truth("zero3_init_flag", arguments["zero3_init_flag"]));
    flag = given.get<bool>();
  } else if (const auto word = Variable(variables, "ACCELERATE_DEEPSPEED_ZERO3_INIT")) {
    const std::optional<bool> truth = ParseBoolWord(*word);
    if (!truth) {
      return absl::InvalidArgumentError(absl::StrCat(
          "ACCELERATE_DEEPSPEED_ZERO3_INIT: invalid truth value ", absl::AsciiStrToLower(*word)));
    }
    flag = *truth;
  }
  fields_["zero3_init_flag"] = flag && zero3;
  return absl::OkStatus();
}

absl::Status DeepSpeedConfig::SetMsAmp(const Json& arguments, const Variables& variables) {
  msamp_ = Variable(variables, "ACCELERATE_FP8_BACKEND") == "MSAMP";
  if (Given(arguments, "enable_msamp")) {
    MUSTER_ASSIGN_OR_RETURN(const Json given, Truth("enable_msamp", arguments["enable_msamp"]));
    msamp_ = given.get<bool>();
  }
  msamp_level_ = Variable(variables, "ACCELERATE_FP8_OPT_LEVEL").value_or("O1");
  if (Given(arguments, "msamp_opt_level")) msamp_level_ = Shown(arguments["msamp_opt_level"]);
  if (!msamp_ || config_.contains("msamp")) return absl::OkStatus();
  if (fields_["zero_stage"] == 3) {
    return absl::InvalidArgumentError(
        "MS-AMP is not supported for ZeRO stage 3: set zero_stage to 0, 1 or 2");
  }
  if (msamp_level_ != "O1" && msamp_level_ != "O2") {
    return absl::InvalidArgumentError(
        absl::StrCat("invalid optimization level for MS-AMP: ", msamp_level_, "; O1 or O2"));
  }
  config_["msamp"] = {{"enabled", true}, {"opt_level", msamp_level_}};
  return absl::OkStatus();
}

absl::Status DeepSpeedConfig::SetMixedPrecision() {
  const std::string mode = absl::AsciiStrToLower(context_.mixed_precision);
  const bool bf16 = mode == "bf16" || mode == "fp8";
  if (mode != "no" && mode != "fp16" && !bf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown mixed_precision mode: ", mode, "; allowed: no, fp8, fp16, bf16"));
  }
  if (mode == "fp16" && !config_.contains("fp16")) {
    config_["fp16"] = {{"enabled", true}, {"auto_cast", true}};
  }
  if (bf16 && !config_.contains("bf16")) config_["bf16"] = {{"enabled", true}};
  if (mode != "no") {
    const std::string other = mode == "fp16" ? "bf16" : "fp16";
    const Json* enabled = At(config_, other + ".enabled");
    if (enabled != nullptr && absl::AsciiStrToLower(Shown(*enabled)) == "true") {
      return absl::InvalidArgumentError(absl::StrCat("mixed_precision cannot be ", mode, " when ",
                                                     other, " is enabled in the DeepSpeed config"));
    }
  }
  for (const char* section : {"fp16", "bf16"}) {
    if (!config_.contains(section)) config_[section] = {{"enabled", false}};
  }
  FillAuto(config_, "fp16.enabled", mode == "fp16");
  FillAuto(config_, "bf16.enabled", bf16);
  return absl::OkStatus();
}

absl::Status DeepSpeedConfig::Process(const std::map<std::string, Json>& values, bool must_match) {
  std::vector<std::string> unfilled;
  std::vector<std::string> mismatches;
  ProcessSection(config_, "", values, must_match, unfilled, mismatches);
  if (!unfilled.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"auto\" in the DeepSpeed config, but nothing gives the value: ",
                     absl::StrJoin(unfilled, ", "), "; write it into the config"));
  }
  if (!mismatches.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the DeepSpeed config contradicts the program: ", absl::StrJoin(mismatches, "; "),
        "; set these values to \"auto\""));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<int64_t>> DeepSpeedConfig::MicroBatchSize(
    const DeepSpeedObjects& objects) const {
  std::vector<int64_t> sizes;
  const int64_t ranks = context_.num_processes;
  for (const std::optional<int64_t>& size : objects.batch_sizes) {
    // Because each loader is divided, whether or not its batch size counts.
    if (!size && context_.split_batches) {
      return absl::InvalidArgumentError(
          "split_batches needs a batch_size, but a loader has None as batch size");
    }
    if (size && context_.split_batches && ranks > 1 && *size % ranks != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "split_batches: the batch size (", *size,
          ") of a loader must be a multiple of the number of processes (", ranks, ")"));
    }
    if (size) sizes.push_back(context_.split_batches ? *size / ranks : *size);
  }
  if (!IsAuto(config_, kMicro)) return BatchNumber(config_, kMicro);
  if (objects.batch_sizes.empty()) {
    return absl::InvalidArgumentError(
        "train_micro_batch_size_per_gpu is \"auto\": prepare a loader with a batch size too, or "
        "write a number into the DeepSpeed config");
  }
  if (sizes.size() != objects.batch_sizes.size()) {
    return absl::InvalidArgumentError(
        "a loader has None as batch size: write a number for train_micro_batch_size_per_gpu into "
        "the DeepSpeed config");
  }
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  return std::optional<int64_t>(fields_["is_train_batch_min"].get<bool>() ? *least : *most);
}

absl::Status DeepSpeedConfig::CheckPlaceholders(const DeepSpeedObjects& objects) {
  const auto& optimizer = objects.optimizer;
  const auto& scheduler = objects.scheduler;
  if (optimizer && !optimizer->placeholder) {
    if (config_.contains("optimizer")) {
      return absl::InvalidArgumentError(
          "the DeepSpeed config and the program both have an optimizer: remove the section "
          "optimizer, or prepare a placeholder (DummyOptim)");
    }
    config_["zero_allow_untested_optimizer"] = true;
  } else if (optimizer && !config_.contains("optimizer")) {
    return absl::InvalidArgumentError(
        "a placeholder (DummyOptim) needs the section optimizer in the DeepSpeed config");
  }
  if (!scheduler) return absl::OkStatus();
  if (!scheduler->placeholder && config_.contains("scheduler")) {
    return absl::InvalidArgumentError(
        "the DeepSpeed config and the program both have a scheduler: remove the section "
        "scheduler, or prepare a placeholder (DummyScheduler)");
  }
  if (scheduler->placeholder && !scheduler->with_callable && !config_.contains("scheduler")) {
    return absl::InvalidArgumentError(
        "a placeholder (DummyScheduler) needs the section scheduler in the DeepSpeed config, or "
        "an lr_scheduler_callable: specify a scheduler");
  }
  if (optimizer && optimizer->placeholder && !scheduler->placeholder) {
    return absl::InvalidArgumentError(
        "beside a placeholder optimizer (DummyOptim) the scheduler must be one too: you can only "
        "specify a DummyScheduler");
  }
  return absl::OkStatus();
}

void DeepSpeedConfig::SettleClipping() {
  if (!IsAuto(config_, kClipping)) return;
  if (clipping_is_asked_for_) {
    config_[kClipping] = 1.0;
  } else {
    config_.erase(kClipping);
  }
}

absl::Status DeepSpeedConfig::Prepare(const DeepSpeedObjects& objects) {
  MUSTER_ASSIGN_OR_RETURN(const std::optional<int64_t> micro, MicroBatchSize(objects));
  FillAuto(config_, kSteps, context_.gradient_accumulation_steps);
  MUSTER_ASSIGN_OR_RETURN(const std::optional<int64_t> steps, BatchNumber(config_, kSteps));
  if (!steps) return Wrong(kSteps, Json(), "a whole number");
  context_.gradient_accumulation_steps = *steps;

  std::map<std::string, Json> values = {
      {"zero_optimization.stage3_gather_16bit_weights_on_model_save", false}};
  if (micro) {
    MUSTER_ASSIGN_OR_RETURN(const int64_t window, Times(*micro, *steps, kTrain));
    MUSTER_ASSIGN_OR_RETURN(const int64_t train, Times(window, context_.num_processes, kTrain));
    values[kMicro] = *micro;
    values[kTrain] = train;
    const Json* said = At(config_, kTrain);
    if (said != nullptr && said->is_number() && *said != train) {
      return absl::InvalidArgumentError(absl::StrCat(
          "train_batch_size is ", Shown(*said), ", but train_micro_batch_size_per_gpu ", *micro,
          " x gradient_accumulation_steps ", *steps, " x ", context_.num_processes,
          " processes is ", train, "; set train_batch_size to \"auto\""));
    }
  }
  MUSTER_RETURN_IF_ERROR(CheckPlaceholders(objects));
  if (!objects.model) return absl::OkStatus();

  std::vector<std::string> by_size;
  for (const char* name : {"reduce_bucket_size", "stage3_prefetch_bucket_size",
                           "stage3_param_persistence_threshold"}) {
    const std::string key = absl::StrCat(kZero, ".", name);
    if (IsAuto(config_, key)) by_size.push_back(key);
  }
  if (!by_size.empty()) {
    if (!objects.model->hidden_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          objects.model->has_config ? "neither `model.config.hidden_size` nor "
                                      "`model.config.hidden_sizes` is there"
                                    : "there is no `model.config` with a hidden_size",
          " to fill \"auto\" of ", absl::StrJoin(by_size, ", "), ": write whole numbers instead"));
    }
    const int64_t size = *objects.model->hidden_size;
    MUSTER_ASSIGN_OR_RETURN(const int64_t square, Times(size, size, "hidden_size"));
    values["zero_optimization.reduce_bucket_size"] = square;
    // The order of the roundings is Python's.
    values["zero_optimization.stage3_prefetch_bucket_size"] =
        static_cast<int64_t>(0.9 * static_cast<double>(size) * static_cast<double>(size));
    MUSTER_ASSIGN_OR_RETURN(values["zero_optimization.stage3_param_persistence_threshold"],
                            Times(10, size, "hidden_size"));
  }
  const auto& optimizer = objects.optimizer;
  if (optimizer && optimizer->placeholder) {
    values["optimizer.params.lr"] = optimizer->lr;
    values["optimizer.params.weight_decay"] = optimizer->weight_decay;
  }
  const auto& scheduler = objects.scheduler;
  if (scheduler && scheduler->placeholder && !scheduler->with_callable) {
    values["scheduler.params.warmup_min_lr"] = 0;
    values["scheduler.params.warmup_max_lr"] = optimizer ? Json(optimizer->lr) : Json();
    values["scheduler.params.warmup_num_steps"] = std::max<int64_t>(1, scheduler->warmup_num_steps);
    if (const std::optional<int64_t>& total = scheduler->total_num_steps) {
      const int64_t ranks = context_.num_processes;
      values["scheduler.params.total_num_steps"] =
          context_.split_batches ? *total : *total / ranks + (*total % ranks > 0 ? 1 : 0);
    }
  }
  SettleClipping();
  MUSTER_RETURN_IF_ERROR(Process(values, false));

  const Json* device = At(config_, "zero_optimization.offload_optimizer.device");
  const Json* force = At(config_, "zero_force_ds_cpu_optimizer");
  cpu_optimizer_ = optimizer && !optimizer->placeholder && device != nullptr && *device != "none" &&
                   (force == nullptr || IsPythonTrue(*force));
  return absl::OkStatus();
}

absl::StatusOr<DeepSpeedBatchSizes> DeepSpeedBatch(const Json& config, int64_t num_processes) {
  if (!config.is_object()) return Wrong("a DeepSpeed config", config, "a JSON object");
  if (num_processes < 1) return Wrong("the number of processes", num_processes, "at least 1");
  MUSTER_ASSIGN_OR_RETURN(const auto train, BatchNumber(config, kTrain));
  MUSTER_ASSIGN_OR_RETURN(const auto micro, BatchNumber(config, kMicro));
  MUSTER_ASSIGN_OR_RETURN(const auto steps, BatchNumber(config, kSteps));
  DeepSpeedBatchSizes sizes{train.value_or(0), micro.value_or(0), steps.value_or(1)};
  if (train && micro) {
    if (!steps) sizes.accumulation = *train / *micro / num_processes;
  } else if (train) {
    sizes.micro = *train / num_processes / sizes.accumulation;
  } else if (micro) {
    MUSTER_ASSIGN_OR_RETURN(const int64_t window, Times(*micro, sizes.accumulation, kTrain));
    MUSTER_ASSIGN_OR_RETURN(sizes.train, Times(window, num_processes, kTrain));
  } else {
    return absl::InvalidArgumentError(
        "either train_batch_size or train_micro_batch_size_per_gpu needs to be provided");
  }
  if (sizes.micro <= 0) return Wrong(kMicro, sizes.micro, "greater than 0");
  if (sizes.accumulation <= 0) return Wrong(kSteps, sizes.accumulation, "greater than 0");
  MUSTER_ASSIGN_OR_RETURN(const int64_t window, Times(sizes.micro, sizes.accumulation, kTrain));
  MUSTER_ASSIGN_OR_RETURN(const int64_t product, Times(window, num_processes, kTrain));
  if (sizes.train != product) {
    return absl::InvalidArgumentError(absl::StrCat(
        "check the batch sizes: train_batch_size ", sizes.train,
        " is not train_micro_batch_size_per_gpu ", sizes.micro, " x gradient_accumulation_steps ",
        sizes.accumulation, " x ", num_processes, " processes"));
  }
  return sizes;
}

const std::vector<std::string>& DeepSpeedArgumentNames() {
  static const auto* const names = new std::vector<std::string>{"hf_ds_config",
                                                                kSteps,
                                                                kClipping,
                                                                "zero_stage",
                                                                "is_train_batch_min",
                                                                "offload_optimizer_device",
                                                                "offload_param_device",
                                                                "offload_optimizer_nvme_path",
                                                                "offload_param_nvme_path",
                                                                "zero3_init_flag",
                                                                "zero3_save_16bit_model",
                                                                "transformer_moe_cls_names",
                                                                "enable_msamp",
                                                                "msamp_opt_level"};
  return *names;
}

}  // namespace muster::client
