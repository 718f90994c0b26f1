#ifndef MUSTER_TESTS_E2E_HUB_FOLDER_H_
#define MUSTER_TESTS_E2E_HUB_FOLDER_H_

#include <cstdint>
#include <string>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "muster/models.h"
#include "tests/testdata/golden.h"

namespace muster {

// Writes a folder as on the Hub: a Llama with random weights, or with `experts` a Mixtral, and a
// recorded tokenizer.
inline absl::Status WriteHubFolder(const std::string& folder, int64_t width = 32,
                                   int64_t layers = 2, int64_t max_positions = 64,
                                   int64_t experts = 0) {
  models::DecoderConfig config;
  if (experts > 0) config.architecture = models::Architecture::kMixtralForCausalLM;
  config.num_experts = experts;
  config.num_experts_per_token = 2;
  config.vocab_size = 1203;
  config.max_positions = max_positions;
  config.initializer_range = 0.3;
  config.hidden_size = width;
  config.intermediate_size = 2 * width;
  config.num_layers = layers;
  config.num_heads = config.num_key_value_heads = 4;
  config.head_dim = width / 4;
  config.sliding_windows.assign(layers, 0);
  at::manual_seed(2);
  const models::TextModel model = models::MakeModel(config);
  const absl::Status saved = save_pretrained(model, folder);
  if (!saved.ok()) return saved;
  const std::string tokenizer =
      testing_support::GoldenPath("hf_tokenizer/llama2_shared/tokenizer.json");
  return WriteFileAtomically(absl::StrCat(folder, "/tokenizer.json"),
                             ReadFile(tokenizer).value_or(""));
}

}  // namespace muster

#endif  // MUSTER_TESTS_E2E_HUB_FOLDER_H_
