#include "worker/models/prefill.h"

#include <variant>

namespace muster::models {
namespace {

bool PositionsDependOnLength(const ModelConfig& config, int64_t length) {
  const auto* const decoder = std::get_if<DecoderConfig>(&config);
  if (decoder == nullptr) return false;
  const RopeConfig& rope = decoder->rope;
  const bool may =
      rope.kind == RopeConfig::Kind::kDynamic || rope.kind == RopeConfig::Kind::kLongRope;
  return may && length > rope.original_max_positions;
}

}  // namespace

int64_t PrefillChunk(const ModelConfig& config, int64_t prompt_tokens, int64_t most) {
  if (most <= 0 || prompt_tokens <= most || PositionsDependOnLength(config, prompt_tokens)) {
    return prompt_tokens;
  }
  // Avoids a sum that may overflow.
  const auto over = [](int64_t n, int64_t by) { return n / by + (n % by == 0 ? 0 : 1); };
  return over(prompt_tokens, over(prompt_tokens, most));
}

}  // namespace muster::models
