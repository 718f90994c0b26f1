#include "worker/models/text_model.h"

#include "ATen/TensorOperators.h"
#include "ATen/autocast_mode.h"
#include "ATen/ops/aminmax.h"
#include "ATen/ops/constant_pad_nd.h"
#include "worker/models/attention.h"
#include "worker/models/file_names.h"
#include "worker/models/layers.h"
#include "worker/train/guard.h"

namespace muster::models {
namespace {

constexpr int64_t kNoLabel = -100;

// Moves labels [B, T] to the positions where they are predicted. The last position predicts none:
// cutting its logits off would copy all of them.
at::Tensor NextLabels(const TextBatch& batch) {
  const int64_t length = batch.labels.size(1);
  const at::Tensor next =
      at::constant_pad_nd(batch.labels.narrow(1, 1, length - 1), {0, 1}, kNoLabel);
  const at::Tensor padding = PaddingMask(batch.attention_mask);
  if (!padding.defined()) return next;
  return next.masked_fill(padding.cumsum(1) == 0, kNoLabel);
}

}  // namespace

TextModelImpl::TextModelImpl(ModelConfig config) : config_(std::move(config)) {
  ThrowIfError(ValidateConfig(config_));
}

std::string TextModelImpl::ParameterName(const std::string& name_in_file) const {
  return ParameterNameOf(config_, name_in_file);
}

std::vector<std::string> TextModelImpl::PartsOf(const std::string& name_in_file) const {
  return models::PartsOf(config_, name_in_file);
}

void TextModelImpl::InitWeights() {
  const double deviation = Common(config_).initializer_range;
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* const linear = module->as<LinearImpl>()) linear->InitWeights(deviation);
    if (auto* const linear = module->as<Conv1DImpl>()) linear->InitWeights(deviation);
    if (auto* const embedding = module->as<EmbeddingImpl>()) embedding->InitWeights(deviation);
    if (auto* const norm = module->as<LayerNormImpl>()) norm->InitWeights();
    if (auto* const norm = module->as<RmsNormImpl>()) norm->InitWeights();
  }
}

ModelOutput CausalLmImpl::forward(const TextBatch& batch) {
  CheckBatch(batch, Common(config()), /*past=*/0);
  const Hidden run = Run(batch, nullptr, /*run_idle_experts=*/true);
  ModelOutput output = {.logits = Head(run.hidden), .aux_loss = run.aux_loss};
  if (!batch.labels.defined()) return output;
  TORCH_CHECK(batch.labels.sizes() == batch.input_ids.sizes(), "labels have the shape ",
              batch.labels.sizes(), ", input_ids ", batch.input_ids.sizes());
  TORCH_CHECK(batch.input_ids.size(1) > 1,
              "rows of one token have no next token: leave the labels out");
  const at::Tensor wide = output.logits.to(c10::kFloat);
  output.loss = CrossEntropy(wide.flatten(0, 1), NextLabels(batch).flatten());
  // The result of a prepared model is float32 anyway, so this avoids a second copy of it.
  if (at::autocast::is_autocast_enabled(wide.device().type()) &&
      output.logits.element_size() < wide.element_size()) {
    output.logits = wide;
  }
  if (output.aux_loss.defined()) {
    output.loss = output.loss + aux_loss_coefficient() * output.aux_loss;
  }
  return output;
}

at::Tensor CausalLmImpl::NextLogits(const TextBatch& batch, KvCache* cache, int64_t num_logits,
                                    bool run_idle_experts) {
  CheckBatch(batch, Common(config()), cache == nullptr ? 0 : cache->length());
  const at::Tensor hidden = Run(batch, cache, run_idle_experts).hidden;
  if (num_logits == 0) return {};
  return Head(hidden.narrow(1, hidden.size(1) - num_logits, num_logits));
}

at::Tensor TextsOf(const TextBatch& batch) {
  // As in transformers with use_cache=False: with a mask, the row is one text.
  if (!batch.position_ids.defined() || batch.attention_mask.defined()) return {};
  return PackedTexts(batch.position_ids);
}

void CheckBatch(const TextBatch& batch, const CommonConfig& config, int64_t past) {
  const at::Tensor& ids = batch.input_ids;
  TORCH_CHECK(ids.defined() && ids.dim() == 2 && ids.size(0) > 0 && ids.size(1) > 0,
              "input_ids must be [rows, tokens] and not empty",
              ids.defined() ? c10::str("; they are ", ids.sizes()) : std::string());
  TORCH_CHECK(ids.scalar_type() == c10::kLong, "input_ids must be int64, not ", ids.scalar_type());
  const int64_t length = past + ids.size(1);
  if (batch.attention_mask.defined()) {
    TORCH_CHECK(batch.attention_mask.sizes() == at::IntArrayRef({ids.size(0), length}),
                "attention_mask has the shape ", batch.attention_mask.sizes(), ", not [",
                ids.size(0), ", ", length, "]");
  }
  for (const auto& [name, tensor] :
       {std::pair<const char*, const at::Tensor&>("token_type_ids", batch.token_type_ids),
        {"position_ids", batch.position_ids}}) {
    if (!tensor.defined()) continue;
    TORCH_CHECK(tensor.dim() == 2 && tensor.size(1) == ids.size(1) &&
                    (tensor.size(0) == 1 || tensor.size(0) == ids.size(0)),
                name, " has the shape ", tensor.sizes(), ", input_ids ", ids.sizes());
  }
  if (ids.is_cpu()) {
    // On a GPU the error would come later, and with another message.
    const auto [least, most] = at::aminmax(ids);
    const int64_t bad = least.item<int64_t>() < 0 ? least.item<int64_t>() : most.item<int64_t>();
    TORCH_CHECK_INDEX(bad >= 0 && bad < config.vocab_size, "token ", bad,
                      " is beyond the vocabulary of ", config.vocab_size,
                      ": the tokenizer is not the model's");
  }
  // A table limits the positions; rotary ones continue, with less and less meaning.
  const bool has_table = config.architecture == Architecture::kGpt2LMHeadModel ||
                         config.architecture == Architecture::kBertForMaskedLM ||
                         config.architecture == Architecture::kBertForSequenceClassification;
  // The same architectures have token types.
  TORCH_CHECK(has_table || !batch.token_type_ids.defined(), "a ",
              std::string(ArchitectureName(config.architecture)),
              " has no types of tokens: leave token_type_ids out");
  TORCH_CHECK(!has_table || batch.position_ids.defined() || length <= config.max_positions,
              "rows of ", length, " tokens are longer than the ", config.max_positions,
              " positions that the model has: shorten them");
}

}  // namespace muster::models
