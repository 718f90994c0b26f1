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
  // The weights become this type. float32 by default, whatever the files hold: a model whose
  // weights are bfloat16 trains badly.
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::Device(c10::kCPU);
  // Refuse files that leave a tensor of the model without a value or hold one that it does not
  // have. Otherwise what is missing gets random weights (a new classifier on an encoder that
  // predicted masked tokens), and both are listed in the report.
  bool strict = true;
  // How config.json is read; `architecture` makes another class of it.
  ReadConfigOptions config = {};
};

// A model from its config, with random weights (TextModelImpl::InitWeights). Throws c10::Error for
// a config that is not valid.
TextModel MakeModel(const ModelConfig& config, c10::ScalarType dtype = c10::kFloat,
                    c10::Device device = c10::Device(c10::kCPU));

// A model whose weights are on the meta device, for load_checkpoint_and_dispatch()
// (muster/bigmodel.h). In evaluation mode. Throws as MakeModel.
TextModel MakeEmptyModel(const ModelConfig& config, c10::ScalarType dtype = c10::kFloat);

// A model from a folder as transformers' save_pretrained and the Hub have it: config.json and
// safetensors or torch.save files, sharded or not. Names and shapes are compared before memory is
// allocated; no more than one tensor is in memory besides the model. The model is in evaluation
// mode. `report`, if not null, says what became of each tensor. Blocks on the disk.
//
// Errors: those of ReadModelConfig and LoadWeights; INVALID_ARGUMENT that lists what is missing,
// unexpected or of another shape than config.json says; FAILED_PRECONDITION for a device that is
// not there.
absl::StatusOr<TextModel> LoadPretrained(const std::string& path,
                                         const LoadPretrainedOptions& options = {},
                                         LoadedWeights* report = nullptr);

// The same for models that predict the next token. INVALID_ARGUMENT for another architecture.
absl::StatusOr<CausalLm> LoadCausalLm(const std::string& path,
                                      const LoadPretrainedOptions& options = {},
                                      LoadedWeights* report = nullptr);

// The model's name of a tensor of its files; empty: it does not need it.
using NameInModel = std::function<std::string(const std::string& name_in_file)>;

// For files that are read otherwise than by LoadPretrained, which does the same: TextModelImpl's
// ParameterName, and where the files hold a tied weight under the head's name alone, that one is
// the embedding's. INVALID_ARGUMENT lists tensors of another shape
// than the model's, and names both tensors if the files give a head that config.json ties to the
// embedding values of its own (transformers 4 computes without them, transformers 5 with them);
// errors of WeightFiles. Reads both tensors where files have both.
absl::StatusOr<NameInModel> NamesInFiles(const std::string& path, const TextModelImpl& model);

// Writes a folder that transformers and LoadPretrained load: config.json and safetensors in shards
// of at most `max_shard_bytes`. Not for a model whose parameters are divided among processes: save
// that with Accelerator::save_model and its config with SaveConfig.
absl::Status SavePretrained(const TextModelImpl& model, const std::string& dir,
                            int64_t max_shard_bytes = 10'000'000'000);
absl::Status SaveConfig(const TextModelImpl& model, const std::string& dir);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_PRETRAINED_H_
