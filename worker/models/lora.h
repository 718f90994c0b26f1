#ifndef MUSTER_WORKER_MODELS_LORA_H_
#define MUSTER_WORKER_MODELS_LORA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/models/text_model.h"

namespace muster::models {

// Fine-tuning of low-rank adapters in place of all weights (LoRA, Hu et al., 2021), in PEFT's
// files.

struct LoraOptions {
  int64_t rank = 8;
  // The adapter's result counts alpha / rank times, or, rank-stabilized, alpha / sqrt(rank) times.
  double alpha = 16;
  bool rank_stabilized = false;
  double dropout = 0;
  // The last parts of the names of the linear layers that get one. Empty: as PEFT's default for the
  // model, the queries and values of attention.
  std::vector<std::string> target_modules = {};
};

// Adds adapters that change nothing yet, and freezes all other parameters. Before prepare() and
// before the optimizer is made, which gets the parameters that LoraParameters() gives. Throws
// c10::Error that names a target that no layer has.
void AddLora(TextModelImpl& model, const LoraOptions& options = {});

// What there is to train.
std::vector<at::Tensor> LoraParameters(const TextModelImpl& model);

// Writes adapter_config.json and adapter_model.safetensors, which PEFT loads. `base` is what the
// config names as the model that the adapters are for. FAILED_PRECONDITION without adapters.
absl::Status SaveLora(const TextModelImpl& model, const std::string& dir,
                      const LoraOptions& options, const std::string& base = "");

// Adds the adapters of a folder that PEFT or SaveLora wrote, and returns their options. Errors:
// UNIMPLEMENTED that names a kind of adapter or a setting that Muster does not have;
// INVALID_ARGUMENT that names a layer or shape that is not the model's.
absl::StatusOr<LoraOptions> LoadLora(TextModelImpl& model, const std::string& dir);

// Adds the adapters to the weights that they are for: the model computes the same without them, but
// for rounding, and its parameters train again.
void MergeLora(TextModelImpl& model);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_LORA_H_
