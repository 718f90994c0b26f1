#include "worker/models/file_names.h"

#include <map>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace muster::models {
namespace {

// Whether `part` is the whole name or its last components.
bool EndsWithPart(absl::string_view name, absl::string_view part) {
  return absl::ConsumeSuffix(&name, part) && (name.empty() || absl::EndsWith(name, "."));
}

std::string NameInDecoder(const DecoderConfig& config, const std::string& name_in_file) {
  // Older files contain the frequencies of the rotation.
  if (EndsWithPart(name_in_file, "rotary_emb.inv_freq")) return "";
  if (name_in_file == "lm_head.weight") return config.tie_word_embeddings ? "" : name_in_file;
  // The layout of transformers 5's models in memory.
  const std::string mlp = ".mlp.";
  const size_t at = name_in_file.find(mlp);
  if (config.num_experts > 0 && at != std::string::npos) {
    return NameInDecoder(config, absl::StrCat(name_in_file.substr(0, at), ".block_sparse_moe.",
                                              name_in_file.substr(at + mlp.size())));
  }
  // Names in files of the decoder without its head.
  if (absl::StartsWith(name_in_file, "embed_tokens.") ||
      absl::StartsWith(name_in_file, "layers.") || absl::StartsWith(name_in_file, "norm.")) {
    return absl::StrCat("model.", name_in_file);
  }
  return name_in_file;
}

std::string NameInGpt2(const Gpt2Config& config, const std::string& name_in_file) {
  if (name_in_file == "lm_head.weight") return config.tie_word_embeddings ? "" : name_in_file;
  // Older files contain the causal mask.
  if (EndsWithPart(name_in_file, "attn.bias") || EndsWithPart(name_in_file, "attn.masked_bias")) {
    return "";
  }
  // OpenAI's original names have no prefix.
  return absl::StartsWith(name_in_file, "transformer.")
             ? name_in_file
             : absl::StrCat("transformer.", name_in_file);
}

std::string NameInBert(const BertConfig& config, const std::string& name_in_file) {
  const bool is_masked = config.architecture == Architecture::kBertForMaskedLM;
  // The classifier of pairs and the pooler, in files of BertForPreTraining.
  if (is_masked && (absl::StartsWith(name_in_file, "cls.seq_relationship.") ||
                    absl::StartsWith(name_in_file, "bert.pooler.") ||
                    absl::StartsWith(name_in_file, "pooler."))) {
    return "";
  }
  // A tied head has its bias beside the decoder, written twice; an untied one has both (IsUnused).
  if (is_masked && absl::StartsWith(name_in_file, "cls.predictions.decoder.")) {
    return config.tie_word_embeddings ? "" : name_in_file;
  }
  if (EndsWithPart(name_in_file, "embeddings.position_ids")) return "";
  std::string name = WithoutGammaAndBeta(name_in_file);
  // Names in files of the encoder without a head.
  for (const char* const part : {"embeddings.", "encoder.", "pooler."}) {
    if (absl::StartsWith(name, part)) return absl::StrCat("bert.", name);
  }
  return name;
}

std::vector<std::string> PartsInDecoder(const DecoderConfig& config,
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

}  // namespace

std::string WithoutGammaAndBeta(const std::string& name_in_file) {
  absl::string_view norm = name_in_file;
  if (absl::ConsumeSuffix(&norm, "LayerNorm.gamma")) return absl::StrCat(norm, "LayerNorm.weight");
  if (absl::ConsumeSuffix(&norm, "LayerNorm.beta")) return absl::StrCat(norm, "LayerNorm.bias");
  return name_in_file;
}

std::string ParameterNameOf(const ModelConfig& config, const std::string& name_in_file) {
  if (const auto* const decoder = std::get_if<DecoderConfig>(&config)) {
    return NameInDecoder(*decoder, name_in_file);
  }
  if (const auto* const gpt2 = std::get_if<Gpt2Config>(&config)) {
    return NameInGpt2(*gpt2, name_in_file);
  }
  return NameInBert(std::get<BertConfig>(config), name_in_file);
}

bool IsUnused(const ModelConfig& config, const std::string& parameter) {
  const CommonConfig& common = Common(config);
  return common.architecture == Architecture::kBertForMaskedLM && !common.tie_word_embeddings &&
         parameter == "cls.predictions.bias";
}

std::vector<std::pair<std::string, std::string>> TiedHeads(const ModelConfig& config) {
  if (!Common(config).tie_word_embeddings) return {};
  if (std::holds_alternative<DecoderConfig>(config)) {
    return {{"lm_head.weight", "model.embed_tokens.weight"}};
  }
  if (std::holds_alternative<Gpt2Config>(config)) {
    return {{"lm_head.weight", "transformer.wte.weight"}};
  }
  // A classifier has no such head: a file's tensors of one are ignored.
  if (Common(config).architecture != Architecture::kBertForMaskedLM) return {};
  return {{"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
          {"cls.predictions.decoder.bias", "cls.predictions.bias"}};
}

std::function<std::string(const std::string&)> NamesOfFiles(
    const ModelConfig& config, const std::set<std::string>& names_in_files) {
  std::set<std::string> given;
  for (const std::string& name : names_in_files) given.insert(ParameterNameOf(config, name));
  std::map<std::string, std::string> heads;
  for (const auto& [head, tied_to] : TiedHeads(config)) {
    if (given.count(tied_to) == 0) heads.emplace(head, tied_to);
  }
  return [config, heads](const std::string& in_file) {
    const auto head = heads.find(in_file);
    return head == heads.end() ? ParameterNameOf(config, in_file) : head->second;
  };
}

std::vector<std::string> PartsOf(const ModelConfig& config, const std::string& name_in_file) {
  const auto* const decoder = std::get_if<DecoderConfig>(&config);
  return decoder == nullptr ? std::vector<std::string>() : PartsInDecoder(*decoder, name_in_file);
}

}  // namespace muster::models
