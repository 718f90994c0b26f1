#ifndef MUSTER_CLIENT_CHECKPOINTS_MODEL_HEADERS_H_
#define MUSTER_CLIENT_CHECKPOINTS_MODEL_HEADERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/checkpoints/model_tree.h"
#include "client/cli/command_line.h"
#include "worker/bigmodel/device_map.h"
#include "worker/models/model_config.h"

namespace muster::client {

// The facts that commands learn about a model without reading its weights.

struct ModelTensors {
  std::vector<TreeTensor> tensors = {};
  std::vector<int64_t> bytes = {};  // of each tensor, as stored
  // A line for people if these are the weights that config.json asks for, because not all files are
  // there. Else empty.
  std::string note = "";
};

// Returns the tensors of a model's folder, index or file, from the headers of its files. If one
// file is missing, or all are (an index may exist), returns those of config.json, if it describes a
// model that Muster has. `ignore_settings`: as in models::ReadConfigOptions; if it has names,
// config.json counts even if the weights exist. Blocks on the disk. Errors: those of
// WeightFiles::Open, also that one of several files is missing, and of models::ReadModelConfig and
// WeightShapes; INVALID_ARGUMENT if two tensors are one weight of the model, or one has another
// shape than config.json asks for; NOT_FOUND if there is no tensor that the model needs.
absl::StatusOr<ModelTensors> ReadModelTensors(const std::string& path,
                                              const std::vector<std::string>& ignore_settings = {});

// The model's modules, with the head tied to the embedding if config.json beside the weights says
// so. Errors: those of ReadModelTensors and TreeOf, and for a config.json that is not a JSON
// object.
struct ModelTree {
  PlannedModel model = {};
  std::string note = "";  // as in ModelTensors
};
absl::StatusOr<ModelTree> ReadModelTree(const std::string& path,
                                        const std::vector<std::string>& ignore_settings = {});

// Returns `path` if it is a folder, else the folder that contains the file.
std::string FolderOf(const std::string& path);

// Reads config.json in the folder `path`, or beside the file `path`. Errors: those of
// models::ReadModelConfig, which name the flag of a command.
absl::StatusOr<models::ModelConfig> ConfigOf(const std::string& path,
                                             const std::vector<std::string>& ignore_settings);

// The option --ignore_settings of commands that read a model; below, the names that it lists.
OptionSpec IgnoreSettingsOption();
std::vector<std::string> IgnoredSettings(const CommandLine& line);

// Formats rows of text under a line of headings: the first column is left-aligned, the others
// right.
std::string Table(const std::vector<std::vector<std::string>>& rows);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MODEL_HEADERS_H_
