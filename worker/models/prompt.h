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

// A model reading a prompt and what it says itself, token by token: positions, padding, cache.
class PromptReader {
 public:
  // Throws as Generate() for a prompt that is not valid. `room`: tokens that come after the prompt.
  // The rest is as in GenerateOptions.
  PromptReader(CausalLmImpl& model, const at::Tensor& input_ids, const at::Tensor& attention_mask,
               int64_t room, int64_t prefill_chunk_size = kPrefillChunkSize,
               bool run_idle_experts = false);

  // The tokens of each row, without padding.
  const std::vector<Tokens>& prompts() const { return prompts_; }

  // Logits float32 [B, vocabulary] after the prompt.
  at::Tensor ReadPrompt();
  // From now on each row is there `times` times, one below the other.
  void Repeat(int64_t times);
  // Row i goes on as what row `rows[i]` was.
  void Reorder(const std::vector<int64_t>& rows);
  // Logits after one more token in each row.
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
  // [B, 1]: positions that a row has, without padding.
  at::Tensor lengths_;
  std::vector<Tokens> prompts_;
  std::optional<KvCache> cache_;
};

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_PROMPT_H_
