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

// What commands learn about a model without reading its weights.

struct ModelTensors {
  std::vector<TreeTensor> tensors = {};
  std::vector<int64_t> bytes = {};  // of each tensor, as it is stored
  // If these are the weights that config.json asks for, because not all are there: a line that says
  // so. Else empty.
  std::string note = "";
};

// The tensors of a model's folder, index or file, from the headers of its files; if one of them
// is missing, or all (an index may be there), from config.json if it is of a model that Muster has.
// `ignore_settings`: as of models::ReadConfigOptions; names of them make config.json count even
// where weights are there. Blocks on the disk. Errors: those of WeightFiles::Open, also that one of
// several files is missing, and of models::ReadModelConfig and WeightShapes; INVALID_ARGUMENT if
// two tensors are one weight of the model, or one has another shape than config.json asks for;
// NOT_FOUND if there is no tensor that the model needs.
absl::StatusOr<ModelTensors> ReadModelTensors(const std::string& path,
                                              const std::vector<std::string>& ignore_settings = {});

// The model's modules, with the head tied to the embedding where config.json beside the weights
// says so. Errors: those of ReadModelTensors and TreeOf, and a config.json that is no JSON object.
struct ModelTree {
  PlannedModel model = {};
  std::string note = "";  // as of ModelTensors
};
absl::StatusOr<ModelTree> ReadModelTree(const std::string& path,
                                        const std::vector<std::string>& ignore_settings = {});

// The folder that `path` is or, of a file, is in.
std::string FolderOf(const std::string& path);

// config.json in the folder, or beside the file, that `path` is. Errors: those of
// models::ReadModelConfig, which name the flag of a command.
absl::StatusOr<models::ModelConfig> ConfigOf(const std::string& path,
                                             const std::vector<std::string>& ignore_settings);

// --ignore_settings of commands that read a model, and its names.
OptionSpec IgnoreSettingsOption();
std::vector<std::string> IgnoredSettings(const CommandLine& line);

// Rows of text under a line of headings: the first column to the left, the others to the right.
std::string Table(const std::vector<std::vector<std::string>>& rows);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MODEL_HEADERS_H_
