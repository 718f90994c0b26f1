#include "client/checkpoints/model_headers.h"

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/json.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/models/file_names.h"
#include "worker/models/model_config.h"
#include "worker/models/weight_shapes.h"

namespace muster::client {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

// Whether a model has a head that its files may omit because it is the embedding, by the rules of
// transformers.
absl::StatusOr<bool> HasTiedHead(const std::string& path) {
  const std::string file = JoinPath(FolderOf(path), "config.json");
  if (!PathExists(file)) return false;
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(file, kMaxConfigBytes));
  MUSTER_ASSIGN_OR_RETURN(const nlohmann::json config, ParseJson(text, file));
  if (!config.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": is no JSON object"));
  }
  const auto tied = config.find("tie_word_embeddings");
  if (tied != config.end() && tied->is_boolean() && !tied->get<bool>()) return false;
  const auto architectures = config.find("architectures");
  if (architectures == config.end() || !architectures->is_array() || architectures->empty() ||
      !architectures->front().is_string()) {
    return tied != config.end();
  }
  const std::string architecture = architectures->front().get<std::string>();
  return absl::EndsWith(architecture, "ForCausalLM") ||
         absl::EndsWith(architecture, "LMHeadModel") || architecture == "BertForMaskedLM";
}

// Returns the files of the folder that may hold weights. If there are any, their errors are
// reported, not only what config.json asks for.
std::vector<std::string> FindWeightFiles(const std::string& folder) {
  absl::StatusOr<std::vector<std::string>> files = ListDirectory(folder);
  if (!files.ok()) return {};
  const auto is_other = [](const std::string& name) {
    // Excludes training_args.bin and optimizer.bin.
    return !((absl::StartsWith(name, "model") && absl::EndsWith(name, ".safetensors")) ||
             (absl::StartsWith(name, "pytorch_model") && absl::EndsWith(name, ".bin")));
  };
  files->erase(std::remove_if(files->begin(), files->end(), is_other), files->end());
  return *std::move(files);
}

// Returns a function from the tensor names in the model's files to those of the model; empty for a
// tensor that it does not need. Muster knows the names of its own models, and for others the one
// rule of transformers that applies to all.
std::function<std::string(const std::string&)> NamesIn(
    const WeightFiles& files, const absl::StatusOr<models::ModelConfig>& config) {
  if (!config.ok()) return models::WithoutGammaAndBeta;
  std::set<std::string> names;
  for (const WeightFiles::Entry& entry : files.entries()) names.insert(entry.tensor.name);
  return models::NamesOfFiles(*config, names);
}

// Whether the config gives the sizes of the model: if it leaves them to the class's defaults, the
// sizes of the files count.
bool HasSizes(const models::ModelConfig& config) {
  const std::string& text = models::Common(config).source_json;
  return absl::StrContains(text, "\"hidden_size\"") || absl::StrContains(text, "\"n_embd\"");
}

// Returns the error that a load would return: the files are of another model, or config.json was
// changed.
absl::Status CheckShapes(const std::string& path, const ModelTensors& model,
                         const models::ModelConfig& config) {
  const absl::StatusOr<std::vector<models::WeightShape>> asked = models::WeightShapes(config);
  if (!asked.ok()) return absl::OkStatus();  // sizes are not taken from an invalid config
  std::map<std::string, const std::vector<int64_t>*> by_name;
  for (const models::WeightShape& each : *asked) by_name[each.name] = &each.shape;
  for (const TreeTensor& tensor : model.tensors) {
    const auto found = by_name.find(tensor.name);
    if (found == by_name.end() || *found->second == tensor.shape) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": ", Printable(tensor.name), " is [", absl::StrJoin(tensor.shape, ", "),
        "] in the file, [", absl::StrJoin(*found->second, ", "),
        "] by config.json: the files are of another model, or the config was changed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelTensors> TensorsOfFiles(const std::string& path,
                                            const std::vector<std::string>& ignore_settings) {
  MUSTER_ASSIGN_OR_RETURN(WeightFiles files, WeightFiles::Open(path));
  const absl::StatusOr<models::ModelConfig> config = ConfigOf(path, ignore_settings);
  // Without the list, the sizes of the files count, whatever the model is.
  if (!ignore_settings.empty()) MUSTER_RETURN_IF_ERROR(config.status());
  if (config.ok()) {
    MUSTER_RETURN_IF_ERROR(files.Divide(
        [&config](const std::string& in_file) { return models::PartsOf(*config, in_file); }));
  }
  if (files.entries().empty()) {
    return absl::NotFoundError(absl::StrCat(path, " holds no tensors"));
  }
  ModelTensors model;
  const auto name_in_model = NamesIn(files, config);
  std::map<std::string, std::string> in_file;  // by the model's name
  for (const WeightFiles::Entry& entry : files.entries()) {
    const std::string name = name_in_model(entry.tensor.name);
    if (name.empty()) continue;
    const auto [before, is_new] = in_file.emplace(name, entry.tensor.name);
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": \"", Printable(before->second), "\" and \"", Printable(entry.tensor.name),
          "\" are one weight of the model, \"", Printable(name), "\"; remove one of them"));
    }
    TreeTensor tensor{.name = name,
                      .dtype = std::string(SafetensorsTypeName(entry.tensor.type)),
                      .file = entry.file,
                      .storage = files.StorageOf(entry)};
    for (const uint64_t size : entry.tensor.shape) {
      tensor.shape.push_back(static_cast<int64_t>(size));
    }
    model.tensors.push_back(std::move(tensor));
    model.bytes.push_back(static_cast<int64_t>(WeightFiles::BytesOf(entry)));
  }
  if (model.tensors.empty()) {
    return absl::NotFoundError(absl::StrCat(path, " holds no weights of the model"));
  }
  if (config.ok() && HasSizes(*config)) {
    MUSTER_RETURN_IF_ERROR(CheckShapes(path, model, *config));
  }
  return model;
}

absl::StatusOr<ModelTensors> TensorsOfConfig(const std::string& path,
                                             const std::vector<std::string>& ignore_settings) {
  MUSTER_ASSIGN_OR_RETURN(const models::ModelConfig config, ConfigOf(path, ignore_settings));
  MUSTER_ASSIGN_OR_RETURN(const std::vector<models::WeightShape> shapes,
                          models::WeightShapes(config));
  const std::string& type = models::Common(config).dtype;
  const bool is_half = type == "bfloat16" || type == "float16";
  const std::string dtype = type == "bfloat16" ? "BF16" : type == "float16" ? "F16" : "F32";
  ModelTensors model;
  for (const models::WeightShape& each : shapes) {
    model.tensors.push_back({.name = each.name, .dtype = dtype, .shape = each.shape});
    model.bytes.push_back(is_half ? 2 : 4);
    for (const int64_t size : each.shape) model.bytes.back() *= size;
  }
  return model;
}

}  // namespace

std::string FolderOf(const std::string& path) { return IsFolder(path) ? path : ParentPath(path); }

absl::StatusOr<models::ModelConfig> ConfigOf(const std::string& path,
                                             const std::vector<std::string>& ignore_settings) {
  absl::StatusOr<models::ModelConfig> config =
      models::ReadModelConfig(FolderOf(path), {.ignore_settings = ignore_settings});
  if (config.ok()) return config;
  return absl::Status(config.status().code(),
                      absl::StrReplaceAll(config.status().message(),
                                          {{" in ignore_settings", " with --ignore_settings"}}));
}

absl::StatusOr<ModelTensors> ReadModelTensors(const std::string& path,
                                              const std::vector<std::string>& ignore_settings) {
  absl::StatusOr<ModelTensors> found = TensorsOfFiles(path, ignore_settings);
  if (!absl::IsNotFound(found.status()) || !PathExists(path) ||
      !PathExists(JoinPath(FolderOf(path), "config.json"))) {
    return found;
  }
  const std::vector<std::string> files = FindWeightFiles(FolderOf(path));
  if (!files.empty()) {
    // One of several files is missing, and the config describes a known model.
    const absl::StatusOr<models::ModelConfig> config = ConfigOf(path, ignore_settings);
    if (!absl::IsNotFound(WeightFiles::Open(path).status()) || !config.ok() || !HasSizes(*config)) {
      return found;
    }
    // The existing files must be of the model that the config describes.
    for (const std::string& name : files) {
      MUSTER_RETURN_IF_ERROR(
          TensorsOfFiles(JoinPath(FolderOf(path), name), ignore_settings).status());
    }
  }
  absl::StatusOr<ModelTensors> model = TensorsOfConfig(path, ignore_settings);
  if (!model.ok()) {
    return absl::Status(model.status().code(),
                        absl::StrCat(found.status().message(), "; and sizes cannot be taken from ",
                                     model.status().message()));
  }
  model->note = files.empty() ? "No weights are there: sizes are those that config.json asks for."
                              : absl::StrCat("Sizes are those that config.json asks for: ",
                                             found.status().message(), ".");
  return model;
}

absl::StatusOr<ModelTree> ReadModelTree(const std::string& path,
                                        const std::vector<std::string>& ignore_settings) {
  MUSTER_ASSIGN_OR_RETURN(const ModelTensors tensors, ReadModelTensors(path, ignore_settings));
  ModelTree tree{.note = tensors.note};
  MUSTER_ASSIGN_OR_RETURN(tree.model, TreeOf(tensors.tensors));
  MUSTER_ASSIGN_OR_RETURN(const bool tied, HasTiedHead(path));
  if (tied) TieHead(&tree.model);
  return tree;
}

OptionSpec IgnoreSettingsOption() {
  return {.name = "ignore_settings",
          .value_name = "NAMES",
          .help =
              "Settings of config.json that Muster does not know, or auto_map, if they change "
              "nothing"};
}

std::vector<std::string> IgnoredSettings(const CommandLine& line) {
  const std::string names = line.Get("ignore_settings");
  std::vector<std::string> settings = absl::StrSplit(names, ',', absl::SkipWhitespace());
  for (std::string& setting : settings) absl::StripAsciiWhitespace(&setting);
  return settings;
}

std::string Table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const int width = static_cast<int>(widths[i]);
      // Names to the left, amounts to the right.
      absl::StrAppend(
          &text, i == 0 ? "  " : "   ",
          i == 0 ? absl::StrFormat("%-*s", width, row[i]) : absl::StrFormat("%*s", width, row[i]));
    }
    text += "\n";
  }
  return text;
}

}  // namespace muster::client
