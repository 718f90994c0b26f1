#include "worker/models/lora.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/json.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/lasting_folder.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/models/generation_memory.h"
#include "worker/models/layers.h"
#include "worker/train/guard.h"

namespace muster::models {
namespace {

using Json = nlohmann::json;

// PEFT puts the model into two wrappers.
constexpr char kPrefix[] = "base_model.model.";
constexpr char kConfigFile[] = "adapter_config.json";
constexpr char kWeightsFile[] = "adapter_model.safetensors";

std::vector<std::string> DefaultTargets(const TextModelImpl& model) {
  if (std::holds_alternative<Gpt2Config>(model.config())) return {"c_attn"};
  if (std::holds_alternative<BertConfig>(model.config())) return {"query", "value"};
  return {"q_proj", "v_proj"};
}

double ScaleOf(const LoraOptions& options) {
  const auto rank = static_cast<double>(options.rank);
  return options.alpha / (options.rank_stabilized ? std::sqrt(rank) : rank);
}

bool IsAdapter(absl::string_view name) {
  return absl::EndsWith(name, ".lora_A") || absl::EndsWith(name, ".lora_B");
}

using Layers = std::map<std::string, std::shared_ptr<AdaptableLayer>>;

// Returns the model's own linear layers by name.
Layers LayersOf(const TextModelImpl& model) {
  Layers layers;
  for (const auto& item : model.named_modules()) {
    auto layer = std::dynamic_pointer_cast<AdaptableLayer>(item.value());
    if (layer != nullptr && !IsAdapter(item.key())) layers.emplace(item.key(), std::move(layer));
  }
  return layers;
}

// Returns these layers' names for "target_modules": the last component of their names or, if other
// layers of the model share that, the whole name, because PEFT would otherwise adapt those, too.
std::vector<std::string> TargetsOf(const Layers& all, const std::set<std::string>& adapted) {
  const auto end = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
  std::set<std::string> ends_of_others;
  for (const auto& [name, layer] : all) {
    if (!adapted.contains(name)) ends_of_others.insert(end(name));
  }
  std::set<std::string> targets;
  for (const std::string& name : adapted) {
    targets.insert(ends_of_others.contains(end(name)) ? name : end(name));
  }
  return {targets.begin(), targets.end()};
}

void Freeze(TextModelImpl& model) {
  for (const auto& item : model.named_parameters()) {
    const bool is_adapter = absl::StrContains(item.key(), ".lora_");
    at::Tensor parameter = item.value();
    parameter.requires_grad_(is_adapter);
  }
}

NamedTensors AdaptersOf(const TextModelImpl& model) {
  NamedTensors adapters;
  for (const auto& item : model.named_parameters()) {
    if (IsLoraParameter(item.key())) adapters.emplace_back(item.key(), item.value());
  }
  return adapters;
}

// Returns the layer of an adapter's parameter.
std::string LayerOf(const std::string& parameter) {
  return parameter.substr(0, parameter.find(".lora_"));
}

// Settings that Muster reads, and those that only describe how adapters were made, not what they
// compute.
bool IsHarmless(const std::string& name) {
  static const auto* const names = new std::set<std::string>{"auto_mapping",
                                                             "base_model_name_or_path",
                                                             "ensure_weight_tying",
                                                             "exclude_modules",
                                                             "fan_in_fan_out",
                                                             "inference_mode",
                                                             "layers_pattern",
                                                             "layers_to_transform",
                                                             "lora_alpha",
                                                             "lora_dropout",
                                                             "megatron_core",
                                                             "peft_type",
                                                             "peft_version",
                                                             "qalora_group_size",
                                                             "r",
                                                             "revision",
                                                             "runtime_config",
                                                             "target_modules",
                                                             "task_type",
                                                             "use_rslora"};
  return names->contains(name);
}

// Refuses settings that may change the result: each version of PEFT has more of them. A setting
// that is switched off is null, false or empty.
absl::Status CheckSettings(const Json& json, const std::string& path) {
  // "none" for biases; initializations of adapters that leave the model's own weights unchanged.
  static const auto* const neutral = new std::map<std::string, std::set<Json>>{
      {"bias", {"none"}}, {"init_lora_weights", {true, "gaussian", "orthogonal", "eva"}}};
  for (const auto& [name, value] : json.items()) {
    if (IsHarmless(name)) continue;
    const bool is_off = value.is_null() || value == false || (!value.is_string() && value.empty());
    const auto found = neutral->find(name);
    if (is_off || (found != neutral->end() && found->second.contains(value))) continue;
    // How "eva" finds the initial values.
    if (name == "eva_config" && json.value("init_lora_weights", Json()) == "eva") continue;
    return absl::UnimplementedError(
        absl::StrCat(path, ": \"", Printable(name, 60), "\" is ",
                     Printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60),
                     ", which Muster does not have"));
  }
  return absl::OkStatus();
}

absl::StatusOr<LoraOptions> ParseConfig(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path, int64_t{16} << 20));
  MUSTER_ASSIGN_OR_RETURN(const Json json, ParseJson(text, path));
  if (!json.is_object() || json.value("peft_type", Json()) != "LORA") {
    return absl::UnimplementedError(absl::StrCat(path, ": \"peft_type\" is not \"LORA\""));
  }
  MUSTER_RETURN_IF_ERROR(CheckSettings(json, path));
  LoraOptions options;
  const Json rank = json.value("r", Json()), alpha = json.value("lora_alpha", Json());
  const bool is_valid = rank.is_number_unsigned() && rank.get<uint64_t>() > 0 &&
                        rank.get<uint64_t>() < (1U << 20) && alpha.is_number();
  if (!is_valid) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": \"r\" and \"lora_alpha\" must be numbers, \"r\" from 1"));
  }
  options.rank = rank.get<int64_t>();
  options.alpha = alpha.get<double>();
  options.rank_stabilized = json.value("use_rslora", Json(false)) == true;
  const Json dropout = json.value("lora_dropout", Json(0.0));
  if (!dropout.is_number() || !(dropout.get<double>() >= 0 && dropout.get<double>() < 1)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": \"lora_dropout\" is not from 0 to 1"));
  }
  options.dropout = dropout.get<double>();
  return options;
}

// Returns the layers for which a file has adapters: "NAME.lora_A.weight" without the suffix.
absl::StatusOr<std::set<std::string>> TargetsIn(const SafetensorsReader& file) {
  std::set<std::string> targets;
  for (const SafetensorsEntry& entry : file.header().tensors) {
    absl::string_view name = entry.name;
    const bool is_known =
        absl::ConsumePrefix(&name, kPrefix) && (absl::ConsumeSuffix(&name, ".lora_A.weight") ||
                                                absl::ConsumeSuffix(&name, ".lora_B.weight"));
    if (!is_known) {
      return absl::UnimplementedError(absl::StrCat(file.path(), ": ", Printable(entry.name),
                                                   " is no part of a plain LoRA adapter"));
    }
    targets.insert(std::string(name));
  }
  return targets;
}

// Checks that `options` describe all of these adapters: a config has only one rank and one scale.
absl::Status CheckDescribes(const LoraOptions& options, const Layers& layers) {
  for (const auto& [name, layer] : layers) {
    if (!layer->has_adapter()) continue;
    const bool is_same = layer->adapter_rank() == options.rank &&
                         layer->adapter_scale() == ScaleOf(options) &&
                         layer->adapter_dropout() == options.dropout;
    if (is_same) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the options say rank ", options.rank, ", scale ", ScaleOf(options), " and dropout ",
        options.dropout, ", but the adapter of ", name, " has rank ", layer->adapter_rank(),
        ", scale ", layer->adapter_scale(), " and dropout ", layer->adapter_dropout(),
        ": save with the options that AddLora was called with or LoadLora returned, the same for "
        "all adapters; the scale is alpha / rank or, if rank-stabilized, alpha / sqrt(rank)"));
  }
  return absl::OkStatus();
}

// Adds an adapter to all of them or, if it throws, to none.
void AddAdapters(const Layers& layers, const LoraOptions& options) {
  std::vector<AdaptableLayer*> added;
  try {
    for (const auto& [name, layer] : layers) {
      layer->AddAdapter(options.rank, ScaleOf(options), options.dropout);
      added.push_back(layer.get());
    }
  } catch (...) {
    for (AdaptableLayer* const layer : added) layer->DropAdapter();
    throw;
  }
}

absl::StatusOr<LoraOptions> Load(TextModelImpl& model, const std::string& dir) {
  MUSTER_ASSIGN_OR_RETURN(LoraOptions options, ParseConfig(absl::StrCat(dir, "/", kConfigFile)));
  const std::string path = absl::StrCat(dir, "/", kWeightsFile);
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsReader file, SafetensorsReader::Open(path));
  MUSTER_ASSIGN_OR_RETURN(const std::set<std::string> targets, TargetsIn(file));
  const Layers layers = LayersOf(model);
  Layers adapted;
  for (const std::string& target : targets) {
    const auto layer = layers.find(target);
    if (layer == layers.end()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": the model has no linear layer ",
                                                     Printable(target),
                                                     "; is it the adapters' model?"));
    }
    adapted.insert(*layer);
  }
  options.target_modules = TargetsOf(layers, targets);
  std::vector<std::pair<at::Tensor, bool>> trained;
  for (const at::Tensor& parameter : model.parameters()) {
    trained.emplace_back(parameter, parameter.requires_grad());
  }
  AddAdapters(adapted, options);
  absl::Status loaded;
  const absl::Status thrown = Guard([&] {
    Freeze(model);
    // Layers that had adapters before keep them.
    NamedTensors added = AdaptersOf(model);
    std::erase_if(added, [&](const auto& item) { return !targets.contains(LayerOf(item.first)); });
    loaded = LoadWeights(path, added, {.prefix = kPrefix}).status();
  });
  loaded.Update(thrown);
  if (!loaded.ok()) {
    // Restore everything. Some adapters may have their values already: they are dropped, not
    // merged.
    for (const auto& [name, layer] : adapted) layer->DropAdapter();
    for (auto& [parameter, was_trained] : trained) parameter.requires_grad_(was_trained);
    return loaded;
  }
  return options;
}

}  // namespace

void AddLora(TextModelImpl& model, const LoraOptions& options) {
  const std::vector<std::string> targets =
      options.target_modules.empty() ? DefaultTargets(model) : options.target_modules;
  const Layers layers = LayersOf(model);
  Layers adapted;
  for (const std::string& target : targets) {
    bool is_there = false;
    for (const auto& [name, layer] : layers) {
      if (name != target && !absl::EndsWith(name, absl::StrCat(".", target))) continue;
      adapted.emplace(name, layer);
      is_there = true;
    }
    TORCH_CHECK_VALUE(is_there, "no linear layer of the model is called ", target,
                      "; there are for example ",
                      layers.empty() ? std::string("none") : layers.begin()->first);
  }
  AddAdapters(adapted, options);
  Freeze(model);
}

AdapterRanks AdapterRanksOf(const TextModelImpl& model) {
  AdapterRanks ranks;
  for (const auto& item : model.named_parameters()) {
    absl::string_view name = item.key();
    if (!absl::ConsumeSuffix(&name, ".lora_A.weight")) continue;
    const bool narrows = absl::EndsWith(name, ".down_proj") || absl::EndsWith(name, ".w2") ||
                         absl::EndsWith(name, ".mlp.c_proj");
    int64_t& rank = name == "lm_head"                  ? ranks.head
                    : absl::StrContains(name, "attn.") ? ranks.attention
                    : narrows                          ? ranks.narrowing
                                                       : ranks.widening;
    rank = std::max(rank, item.value().size(0));
  }
  return ranks;
}

std::vector<at::Tensor> LoraParameters(const TextModelImpl& model) {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : AdaptersOf(model)) parameters.push_back(tensor);
  return parameters;
}

bool IsLoraParameter(const std::string& name) { return absl::StrContains(name, ".lora_"); }

absl::Status SaveLora(const TextModelImpl& model, const std::string& dir,
                      const LoraOptions& options, const std::string& base) {
  std::map<std::string, at::Tensor> values;
  for (const auto& [name, tensor] : AdaptersOf(model)) values.emplace(name, tensor);
  return SaveLora(model, values, dir, options, base);
}

absl::Status SaveLora(const TextModelImpl& model, const std::map<std::string, at::Tensor>& values,
                      const std::string& dir, const LoraOptions& options, const std::string& base) {
  NamedTensors adapters;
  std::set<std::string> adapted, own;
  for (const auto& [name, tensor] : AdaptersOf(model)) {
    own.insert(name);
    const auto value = values.find(name);
    if (value == values.end()) {
      return absl::InvalidArgumentError(absl::StrCat("the values lack that of ", name));
    }
    if (value->second.sizes() != tensor.sizes()) {
      return absl::InvalidArgumentError(c10::str("the value of ", name, " has shape ",
                                                 value->second.sizes(), ", but the adapter has ",
                                                 tensor.sizes()));
    }
    adapters.emplace_back(absl::StrCat(kPrefix, name), value->second.detach());
    adapted.insert(LayerOf(name));
  }
  for (const auto& [name, value] : values) {
    if (own.contains(name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the values hold ", Printable(name), ", which is no adapter of the model"));
  }
  if (adapters.empty()) {
    return absl::FailedPreconditionError("the model has no adapters: call AddLora first");
  }
  const Layers layers = LayersOf(model);
  MUSTER_RETURN_IF_ERROR(CheckDescribes(options, layers));
  const Json config = {
      {"peft_type", "LORA"},
      {"auto_mapping", nullptr},
      {"base_model_name_or_path", base.empty() ? Json() : Json(base)},
      {"bias", "none"},
      {"fan_in_fan_out", std::holds_alternative<Gpt2Config>(model.config())},
      {"inference_mode", true},
      {"init_lora_weights", true},
      {"lora_alpha", options.alpha},
      {"lora_dropout", options.dropout},
      {"modules_to_save", nullptr},
      {"r", options.rank},
      {"target_modules", TargetsOf(layers, adapted)},
      {"task_type",
       std::holds_alternative<BertConfig>(model.config()) ? Json() : Json("CAUSAL_LM")},
      {"use_rslora", options.rank_stabilized}};
  MUSTER_RETURN_IF_ERROR(MakeLastingFolder(dir));
  absl::Status written;
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    written = WriteSafetensors(absl::StrCat(dir, "/", kWeightsFile), adapters,
                               {.metadata = SafetensorsMetadata{{"format", "pt"}}})
                  .status();
  }));
  MUSTER_RETURN_IF_ERROR(written);
  return WriteFileAtomically(absl::StrCat(dir, "/", kConfigFile),
                             absl::StrCat(config.dump(2), "\n"));
}

absl::StatusOr<LoraOptions> LoadLora(TextModelImpl& model, const std::string& dir) {
  absl::StatusOr<LoraOptions> options = absl::UnknownError("");
  MUSTER_RETURN_IF_ERROR(Guard([&] { options = Load(model, dir); }));
  return options;
}

void MergeLora(TextModelImpl& model) {
  for (const auto& [name, layer] : LayersOf(model)) layer->MergeAdapter();
  for (at::Tensor& parameter : model.parameters()) parameter.requires_grad_(true);
}

}  // namespace muster::models
