#include "worker/models/file_names.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace muster::models {

std::string DecoderParameterName(const DecoderConfig& config, const std::string& name_in_file) {
  // Older files hold the frequencies of the rotation.
  if (absl::EndsWith(name_in_file, ".rotary_emb.inv_freq")) return "";
  if (name_in_file == "lm_head.weight") return config.tie_word_embeddings ? "" : name_in_file;
  // As the model in the memory of transformers 5 has it.
  const std::string mlp = ".mlp.";
  const size_t at = name_in_file.find(mlp);
  if (config.num_experts > 0 && at != std::string::npos) {
    return DecoderParameterName(config,
                                absl::StrCat(name_in_file.substr(0, at), ".block_sparse_moe.",
                                             name_in_file.substr(at + mlp.size())));
  }
  // Files of the decoder without its head.
  if (absl::StartsWith(name_in_file, "embed_tokens.") ||
      absl::StartsWith(name_in_file, "layers.") || absl::StartsWith(name_in_file, "norm.")) {
    return absl::StrCat("model.", name_in_file);
  }
  return name_in_file;
}

std::vector<std::string> DecoderPartsOf(const DecoderConfig& config,
                                        const std::string& name_in_file) {
  absl::string_view experts = name_in_file;
  std::vector<const char*> names;
  if (absl::ConsumeSuffix(&experts, ".experts.gate_up_proj")) {
    names = {"w1", "w3"};
  } else if (absl::ConsumeSuffix(&experts, ".experts.down_proj")) {
    names = {"w2"};
  }
  std::vector<std::string> parts;
  for (int64_t i = 0; i < config.num_experts; ++i) {
    for (const char* const name : names) {
      parts.push_back(absl::StrCat(experts, ".experts.", i, ".", name, ".weight"));
    }
  }
  return parts;
}

}  // namespace muster::models
