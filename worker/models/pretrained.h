#ifndef MUSTER_WORKER_MODELS_PRETRAINED_H_
#define MUSTER_WORKER_MODELS_PRETRAINED_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/core/ScalarType.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/models/model_config.h"
#include "worker/models/text_model.h"

namespace muster::models {

struct LoadPretrainedOptions {
  // The type that the weights are converted to. float32 by default, whatever the files hold: a
  // model with bfloat16 weights trains badly.
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::Device(c10::kCPU);
  // Refuse files that lack a tensor of the model or hold one that it does not have. Otherwise
  // missing tensors get random weights (a new classifier on an encoder that predicted masked
  // tokens), and both kinds are listed in the report.
  bool strict = true;
  // How config.json is read; `architecture` selects another class.
  ReadConfigOptions config = {};
};

// Creates a model from its config, with random weights (TextModelImpl::InitWeights). Throws
// c10::Error for an invalid config.
TextModel MakeModel(const ModelConfig& config, c10::ScalarType dtype = c10::kFloat,
                    c10::Device device = c10::Device(c10::kCPU));

// Creates a model whose weights are on the meta device, for load_checkpoint_and_dispatch()
// (muster/bigmodel.h). In evaluation mode. Throws as MakeModel.
TextModel MakeEmptyModel(const ModelConfig& config, c10::ScalarType dtype = c10::kFloat);

// Loads a model from a folder in the format of transformers' save_pretrained and the Hub:
// config.json and safetensors or torch.save files, sharded or not. Names and shapes are compared
// before memory is allocated; at most one tensor is in memory besides the model. The model is in
// evaluation mode. `report`, if not null, lists how each tensor was handled. Blocks on the disk.
//
// Errors: those of ReadModelConfig and LoadWeights; INVALID_ARGUMENT lists tensors that are
// missing, unexpected or of another shape than config.json says; FAILED_PRECONDITION for a device
// that does not exist.
absl::StatusOr<TextModel> LoadPretrained(const std::string& path,
                                         const LoadPretrainedOptions& options = {},
                                         LoadedWeights* report = nullptr);

// The same for models that predict the next token. INVALID_ARGUMENT for another architecture.
absl::StatusOr<CausalLm> LoadCausalLm(const std::string& path,
                                      const LoadPretrainedOptions& options = {},
                                      LoadedWeights* report = nullptr);

// Maps a tensor's name in the files to its name in the model; empty: the model does not need it.
using NameInModel = std::function<std::string(const std::string& name_in_file)>;

// Returns the names for files that are not read by LoadPretrained, which does the same:
// TextModelImpl's ParameterName, except that a tied weight that the files hold only under the
// head's name becomes the embedding's. INVALID_ARGUMENT lists tensors of another shape than the
// model's, and names both tensors if the files have separate values for a head that config.json
// ties to the embedding (transformers 4 ignores them, transformers 5 uses them); errors of
// WeightFiles. Reads both tensors if the files have both.
absl::StatusOr<NameInModel> NamesInFiles(const std::string& path, const TextModelImpl& model);

// Writes a folder that transformers and LoadPretrained can load: config.json and safetensors in
// shards of at most `max_shard_bytes`. Not for a sharded model: save that with
// Accelerator::save_model and its config with SaveConfig. FAILED_PRECONDITION: the model has
// adapters that are not merged.
absl::Status SavePretrained(const TextModelImpl& model, const std::string& dir,
                            int64_t max_shard_bytes = 10'000'000'000);
absl::Status SaveConfig(const TextModelImpl& model, const std::string& dir);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_PRETRAINED_H_
