#include "worker/models/weight_shapes.h"

#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster::models {
namespace {

class Shapes {
 public:
  void Add(std::string name, std::vector<int64_t> shape) {
    all_.push_back({.name = std::move(name), .shape = std::move(shape)});
  }
  void AddLinear(const std::string& name, int64_t in, int64_t out, bool bias) {
    Add(absl::StrCat(name, ".weight"), {out, in});
    if (bias) Add(absl::StrCat(name, ".bias"), {out});
  }
  // GPT-2's layers are stored transposed.
  void AddConv1D(const std::string& name, int64_t in, int64_t out) {
    Add(absl::StrCat(name, ".weight"), {in, out});
    Add(absl::StrCat(name, ".bias"), {out});
  }
  void AddLayerNorm(const std::string& name, int64_t width) {
    Add(absl::StrCat(name, ".weight"), {width});
    Add(absl::StrCat(name, ".bias"), {width});
  }
  std::vector<WeightShape> Take() { return std::move(all_); }

 private:
  std::vector<WeightShape> all_;
};

void AddDecoderLayer(const DecoderConfig& config, const std::string& name, Shapes& shapes) {
  const int64_t width = config.hidden_size, inner = config.intermediate_size;
  const int64_t queries = config.num_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  const std::string attention = absl::StrCat(name, ".self_attn.");
  shapes.AddLinear(attention + "q_proj", width, queries, config.qkv_bias);
  shapes.AddLinear(attention + "k_proj", width, keys, config.qkv_bias);
  shapes.AddLinear(attention + "v_proj", width, keys, config.qkv_bias);
  shapes.AddLinear(attention + "o_proj", queries, width, config.attention_output_bias);
  if (config.num_experts == 0) {
    const std::string mlp = absl::StrCat(name, ".mlp.");
    shapes.AddLinear(mlp + "gate_proj", width, inner, config.mlp_bias);
    shapes.AddLinear(mlp + "up_proj", width, inner, config.mlp_bias);
    shapes.AddLinear(mlp + "down_proj", inner, width, config.mlp_bias);
  } else {
    const std::string experts = absl::StrCat(name, ".block_sparse_moe.");
    shapes.AddLinear(experts + "gate", width, config.num_experts, false);
    for (int64_t i = 0; i < config.num_experts; ++i) {
      const std::string expert = absl::StrCat(experts, "experts.", i, ".");
      shapes.AddLinear(expert + "w1", width, inner, config.mlp_bias);
      shapes.AddLinear(expert + "w3", width, inner, config.mlp_bias);
      shapes.AddLinear(expert + "w2", inner, width, config.mlp_bias);
    }
  }
  shapes.Add(absl::StrCat(name, ".input_layernorm.weight"), {width});
  shapes.Add(absl::StrCat(name, ".post_attention_layernorm.weight"), {width});
}

void AddAll(const DecoderConfig& config, Shapes& shapes) {
  shapes.Add("model.embed_tokens.weight", {config.vocab_size, config.hidden_size});
  for (int64_t i = 0; i < config.num_layers; ++i) {
    AddDecoderLayer(config, absl::StrCat("model.layers.", i), shapes);
  }
  shapes.Add("model.norm.weight", {config.hidden_size});
  if (!config.tie_word_embeddings) {
    shapes.AddLinear("lm_head", config.hidden_size, config.vocab_size, false);
  }
}

void AddAll(const Gpt2Config& config, Shapes& shapes) {
  const int64_t width = config.hidden_size;
  shapes.Add("transformer.wte.weight", {config.vocab_size, width});
  shapes.Add("transformer.wpe.weight", {config.max_positions, width});
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = absl::StrCat("transformer.h.", i, ".");
    shapes.AddLayerNorm(layer + "ln_1", width);
    shapes.AddConv1D(layer + "attn.c_attn", width, 3 * width);
    shapes.AddConv1D(layer + "attn.c_proj", width, width);
    shapes.AddLayerNorm(layer + "ln_2", width);
    shapes.AddConv1D(layer + "mlp.c_fc", width, config.inner_size);
    shapes.AddConv1D(layer + "mlp.c_proj", config.inner_size, width);
  }
  shapes.AddLayerNorm("transformer.ln_f", width);
  if (!config.tie_word_embeddings) shapes.AddLinear("lm_head", width, config.vocab_size, false);
}

void AddAll(const BertConfig& config, Shapes& shapes) {
  const int64_t width = config.hidden_size, inner = config.intermediate_size;
  shapes.Add("bert.embeddings.word_embeddings.weight", {config.vocab_size, width});
  shapes.Add("bert.embeddings.position_embeddings.weight", {config.max_positions, width});
  shapes.Add("bert.embeddings.token_type_embeddings.weight", {config.type_vocab_size, width});
  shapes.AddLayerNorm("bert.embeddings.LayerNorm", width);
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = absl::StrCat("bert.encoder.layer.", i, ".");
    for (const char* const part : {"query", "key", "value"}) {
      shapes.AddLinear(absl::StrCat(layer, "attention.self.", part), width, width, true);
    }
    shapes.AddLinear(layer + "attention.output.dense", width, width, true);
    shapes.AddLayerNorm(layer + "attention.output.LayerNorm", width);
    shapes.AddLinear(layer + "intermediate.dense", width, inner, true);
    shapes.AddLinear(layer + "output.dense", inner, width, true);
    shapes.AddLayerNorm(layer + "output.LayerNorm", width);
  }
  if (config.architecture == Architecture::kBertForSequenceClassification) {
    shapes.AddLinear("bert.pooler.dense", width, width, true);
    shapes.AddLinear("classifier", width, config.num_labels, true);
    return;
  }
  shapes.Add("cls.predictions.bias", {config.vocab_size});
  shapes.AddLinear("cls.predictions.transform.dense", width, width, true);
  shapes.AddLayerNorm("cls.predictions.transform.LayerNorm", width);
  if (!config.tie_word_embeddings) {
    shapes.AddLinear("cls.predictions.decoder", width, config.vocab_size, true);
  }
}

}  // namespace

absl::StatusOr<std::vector<WeightShape>> WeightShapes(const ModelConfig& config) {
  MUSTER_RETURN_IF_ERROR(ValidateConfig(config));
  Shapes shapes;
  std::visit([&](const auto& each) { AddAll(each, shapes); }, config);
  return shapes.Take();
}

}  // namespace muster::models
