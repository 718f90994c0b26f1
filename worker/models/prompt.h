#ifndef MUSTER_WORKER_MODELS_PROMPT_H_
#define MUSTER_WORKER_MODELS_PROMPT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/models/generate.h"
#include "worker/models/kv_cache.h"
#include "worker/models/prefill.h"
#include "worker/models/score_rules.h"
#include "worker/models/text_model.h"

namespace muster::models {

// Reads a prompt and the generated tokens with a model, token by token: positions, padding, cache.
class PromptReader {
 public:
  // Throws as Generate() for an invalid prompt. `room`: the number of tokens that may follow the
  // prompt. The rest is as in GenerateOptions.
  PromptReader(CausalLmImpl& model, const at::Tensor& input_ids, const at::Tensor& attention_mask,
               int64_t room, int64_t prefill_chunk_size = kPrefillChunkSize,
               bool run_idle_experts = false);

  // The tokens of each row, without padding.
  const std::vector<Tokens>& prompts() const { return prompts_; }

  // Returns the logits after the prompt, float32 [B, vocabulary].
  at::Tensor ReadPrompt();
  // From now on each row is present `times` times, one after another.
  void Repeat(int64_t times);
  // Row i continues what was row `rows[i]`.
  void Reorder(const std::vector<int64_t>& rows);
  // Returns the logits after one more token in each row.
  at::Tensor ReadNext(const std::vector<int64_t>& tokens);

 private:
  at::Tensor Read(TextBatch batch);

  CausalLmImpl& model_;
  const int64_t room_;
  const int64_t prefill_chunk_size_;
  const bool run_idle_experts_;
  at::Tensor input_ids_;
  // Undefined if there is no padding.
  at::Tensor mask_;
  // [B, 1]: the number of positions of each row, without padding.
  at::Tensor lengths_;
  std::vector<Tokens> prompts_;
  std::optional<KvCache> cache_;
};

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_PROMPT_H_
