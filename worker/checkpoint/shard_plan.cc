#include "worker/checkpoint/shard_plan.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster {

absl::StatusOr<ShardPlan> PlanShards(const std::vector<TensorToShard>& tensors,
                                     const ShardPlanOptions& options) {
  if (options.max_shard_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_shard_size is ", options.max_shard_bytes, "; it must not be negative"));
  }
  const uint64_t limit = options.max_shard_bytes;
  ShardPlan plan;
  std::vector<std::vector<std::string>> files;
  std::vector<std::string> current;
  uint64_t current_bytes = 0;
  absl::flat_hash_map<std::string, int> names;
  // The further names of each storage, by its first name.
  absl::flat_hash_map<std::string, std::vector<std::string>> aliases;
  absl::flat_hash_map<std::string, std::string> first_name;
  for (const TensorToShard& tensor : tensors) {
    if (++names[tensor.name] > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", Printable(tensor.name), "\": the name occurs twice"));
    }
    if (!tensor.storage.empty()) {
      const auto [first, is_first] = first_name.emplace(tensor.storage, tensor.name);
      if (!is_first) {
        if (!options.keep_first_name_only) aliases[first->second].push_back(tensor.name);
        continue;
      }
    }
    plan.total_bytes += tensor.bytes;
    if (tensor.bytes > limit) {
      files.push_back({tensor.name});
      continue;
    }
    if (current_bytes + tensor.bytes > limit) {
      files.push_back(std::move(current));
      current.clear();
      current_bytes = 0;
    }
    current.push_back(tensor.name);
    current_bytes += tensor.bytes;
  }
  if (!current.empty() || files.empty()) files.push_back(std::move(current));
  for (size_t i = 0; i < files.size(); ++i) {
    ShardPlan::File file;
    file.name = files.size() == 1 ? absl::StrCat(options.stem, options.extension)
                                  : absl::StrFormat("%s-%05d-of-%05d%s", options.stem, i + 1,
                                                    files.size(), options.extension);
    for (std::string& name : files[i]) {
      const auto more = aliases.find(name);
      file.tensors.push_back(std::move(name));
      if (more != aliases.end()) {
        file.tensors.insert(file.tensors.end(), more->second.begin(), more->second.end());
      }
    }
    plan.files.push_back(std::move(file));
  }
  if (files.size() > 1) {
    plan.index_name = absl::StrCat(options.stem, options.extension, ".index.json");
  }
  return plan;
}

std::string EncodeShardIndex(const ShardPlan& plan) {
  nlohmann::json index = {{"metadata", {{"total_size", plan.total_bytes}}},
                          {"weight_map", nlohmann::json::object()}};
  for (const ShardPlan::File& file : plan.files) {
    for (const std::string& name : file.tensors) index["weight_map"][name] = file.name;
  }
  // Names that are not UTF-8 may be replaced here, because the file of such a tensor is refused.
  return index.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

namespace {

// Returns what a JSON file beside a model's weights is, if its name tells.
absl::string_view KindOf(absl::string_view source) {
  static constexpr std::pair<absl::string_view, absl::string_view> kKinds[] = {
      {"adapter_config.json", "the configuration of an adapter"},
      {"config.json", "the configuration of a model"},
      {"generation_config.json", "the settings of a model's generation"},
      {"manifest.json", "the manifest of a checkpoint"},
      {"scheduler.json", "the state of a schedule"},
      {"seal.json", "the coordinator's record of a checkpoint"},
      {"special_tokens_map.json", "the special tokens of a tokenizer"},
      {"tokenizer.json", "a tokenizer"},
      {"tokenizer_config.json", "the settings of a tokenizer"},
      {"vocab.json", "the vocabulary of a tokenizer"},
  };
  const absl::string_view name = source.substr(source.rfind('/') + 1);
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  return "";
}

// Whether a bare map, which Accelerate reads, too, maps names to files of weights.
bool MapsToWeights(const nlohmann::json& object) {
  return std::any_of(object.begin(), object.end(), [](const auto& file) {
    if (!file.is_string()) return false;
    const std::string& name = file.template get_ref<const std::string&>();
    return absl::EndsWith(name, ".safetensors") || absl::EndsWith(name, ".bin") ||
           absl::EndsWith(name, ".pt") || absl::EndsWith(name, ".pth");
  });
}

}  // namespace

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseShardIndex(
    absl::string_view text, absl::string_view source) {
  MUSTER_ASSIGN_OR_RETURN(const nlohmann::json index, ParseJson(text, source));
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", why));
  };
  const absl::string_view kind = KindOf(source);
  if (!index.is_object() ||
      (!index.contains("weight_map") && (!kind.empty() || !MapsToWeights(index)))) {
    return bad(absl::StrCat("is ", kind.empty() ? "" : absl::StrCat(kind, ", "),
                            "no index of weights, which has \"weight_map\": name the folder with "
                            "the weights, its *.index.json, or a file of weights"));
  }
  const nlohmann::json& map = index.contains("weight_map") ? index["weight_map"] : index;
  if (!map.is_object()) return bad("weight_map: is not an object");
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& [name, file] : map.items()) {
    if (!file.is_string()) {
      return bad(absl::StrCat("weight_map: the file of \"", Printable(name), "\" is not text"));
    }
    const std::string& path = file.get_ref<const std::string&>();
    if (path.empty() || path == "." || path == ".." || path.find('/') != std::string::npos ||
        path.find('\0') != std::string::npos) {
      return bad(absl::StrCat("weight_map: the file of \"", Printable(name), "\" is \"",
                              Printable(path), "\", not a name in this folder"));
    }
    files.emplace_back(name, path);
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool IsShardFileName(absl::string_view name, absl::string_view stem, absl::string_view extension) {
  if (name == absl::StrCat(stem, extension) ||
      name == absl::StrCat(stem, extension, ".index.json")) {
    return true;
  }
  const auto number = [](absl::string_view text) { return text.size() >= 5 && IsDigits(text); };
  if (!absl::ConsumePrefix(&name, absl::StrCat(stem, "-")) ||
      !absl::ConsumeSuffix(&name, extension)) {
    return false;
  }
  const size_t of = name.find("-of-");
  return of != absl::string_view::npos && number(name.substr(0, of)) && number(name.substr(of + 4));
}

}  // namespace muster
