#ifndef MUSTER_WORKER_MODELS_LORA_H_
#define MUSTER_WORKER_MODELS_LORA_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/models/text_model.h"

namespace muster::models {

// Fine-tuning of low-rank adapters instead of all weights (LoRA, Hu et al., 2021), with PEFT's file
// format.

struct AdapterRanks;  // worker/models/generation_memory.h

struct LoraOptions {
  int64_t rank = 8;
  // The adapter's result is scaled by alpha / rank or, if rank-stabilized, by alpha / sqrt(rank).
  double alpha = 16;
  bool rank_stabilized = false;
  double dropout = 0;
  // The last name components of the linear layers that get an adapter. Empty: PEFT's default for
  // the model, the queries and values of attention.
  std::vector<std::string> target_modules = {};
};

// Adds adapters that change nothing yet, in float32 if the weights have 16 bits, and freezes all
// other parameters. Call it before prepare() and before creating the optimizer, which takes the
// parameters from LoraParameters(). Throws a c10::Error that names a target that no layer has, or a
// layer that has an adapter already; then nothing has changed.
void AddLora(TextModelImpl& model, const LoraOptions& options = {});

// The ranks of the model's adapters, for PlanGenerationMemory().
AdapterRanks AdapterRanksOf(const TextModelImpl& model);

// Returns the parameters to train.
std::vector<at::Tensor> LoraParameters(const TextModelImpl& model);

// Writes adapter_config.json and adapter_model.safetensors, which PEFT loads. `options` are those
// of AddLora or LoadLora, `base` is the name of the base model in the config. Errors:
// FAILED_PRECONDITION without adapters; INVALID_ARGUMENT names an adapter that the options do not
// describe, because another program would compute something else with them. Nothing is written
// then.
absl::Status SaveLora(const TextModelImpl& model, const std::string& dir,
                      const LoraOptions& options, const std::string& base = "");

// Whether a parameter of this name belongs to an adapter: the filter for get_state_dict() of a
// sharded model.
bool IsLoraParameter(const std::string& name);

// SaveLora() for a sharded model, whose parameters are divided: `values` are those of the adapters
// by name, such as accelerator.get_state_dict(model, muster::models::IsLoraParameter) returns on
// process 0. Call it only there. Additional errors: INVALID_ARGUMENT names an adapter that `values`
// lacks, that the model lacks, or that has another shape there.
absl::Status SaveLora(const TextModelImpl& model, const std::map<std::string, at::Tensor>& values,
                      const std::string& dir, const LoraOptions& options,
                      const std::string& base = "");

// Adds the adapters of a folder that PEFT or SaveLora wrote, and returns their options. Errors:
// UNIMPLEMENTED names a kind of adapter or a setting that Muster does not support; INVALID_ARGUMENT
// names a layer or shape that does not match the model, or a layer that has an adapter already.
// After an error nothing has changed.
absl::StatusOr<LoraOptions> LoadLora(TextModelImpl& model, const std::string& dir);

// Merges the adapters into their weights: the model then computes the same without them, except for
// rounding, and its parameters are trainable again.
void MergeLora(TextModelImpl& model);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_LORA_H_
