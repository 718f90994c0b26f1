#ifndef MUSTER_MODELS_H_
#define MUSTER_MODELS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/models/generate.h"
#include "worker/models/lora.h"
#include "worker/models/pretrained.h"
#include "worker/models/text_generator.h"
#include "worker/models/text_model.h"

// Text models from Hugging Face Hub folders: GPT-2, Llama, Mistral, Mixtral, Qwen2, BERT. They are
// torch::nn modules: prepare() takes them, under every strategy.
//
//   auto model = muster::load_causal_lm("Llama-3.2-1B");
//   if (!model.ok()) return model.status();
//   auto [net, optimizer] = accelerator.prepare(*model, adamw);
//   auto output = net(muster::models::TextBatch{.input_ids = ids, .labels = ids});
//   accelerator.backward(output.loss);
//
// See docs/models.md.
namespace muster {

// Load a model that predicts the next token, or any model, from a folder with config.json and
// weights. The rules and errors are those of LoadPretrained in worker/models/pretrained.h. Not
// collective: call it on every process, before prepare(). Blocks on the disk.
inline absl::StatusOr<models::CausalLm> load_causal_lm(
    const std::string& path, const models::LoadPretrainedOptions& options = {},
    LoadedWeights* report = nullptr) {
  return models::LoadCausalLm(path, options, report);
}
inline absl::StatusOr<models::TextModel> load_text_model(
    const std::string& path, const models::LoadPretrainedOptions& options = {},
    LoadedWeights* report = nullptr) {
  return models::LoadPretrained(path, options, report);
}

// Generates the continuation of a prompt; see Generate in worker/models/generate.h. `model`: a
// CausalLm, a pointer to one, or what prepare() returned for it. If the model is sharded, all
// processes must call it at the same time with the same prompt and options, because they gather its
// parameters together.
template <class M>
requires requires(M& model) { static_cast<models::CausalLmImpl&>(*model); }
models::Generated generate(M& model, const at::Tensor& input_ids,
                           const at::Tensor& attention_mask = {},
                           models::GenerateOptions options = {}) {
  const auto run = [&](models::CausalLmImpl& module) {
    return models::Generate(module, input_ids, attention_mask, options);
  };
  if constexpr (requires { model.call(run); }) {
    options.run_idle_experts = true;
    // Generation needs no gradients.
    const at::NoGradGuard no_grad;
    return model.call(run);
  } else {
    return run(static_cast<models::CausalLmImpl&>(*model));
  }
}

// Writes config.json and weights, as transformers does. Call it on one process; for a prepared
// model that is sharded, use Accelerator::save_model and save_config. FAILED_PRECONDITION: LoRA
// adapters are not merged.
template <class M>
requires requires(M& model) { static_cast<const models::TextModelImpl&>(*model); }
absl::Status save_pretrained(M& model, const std::string& dir,
                             int64_t max_shard_bytes = 10'000'000'000) {
  return models::SavePretrained(static_cast<const models::TextModelImpl&>(*model), dir,
                                max_shard_bytes);
}
// Writes config.json only.
template <class M>
requires requires(M& model) { static_cast<const models::TextModelImpl&>(*model); }
absl::Status save_config(M& model, const std::string& dir) {
  return models::SaveConfig(static_cast<const models::TextModelImpl&>(*model), dir);
}

}  // namespace muster

#endif  // MUSTER_MODELS_H_
