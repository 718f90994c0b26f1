#ifndef MUSTER_WORKER_MODELS_PREFILL_H_
#define MUSTER_WORKER_MODELS_PREFILL_H_

#include <cstdint>

#include "worker/models/model_config.h"

namespace muster::models {

// A model reads a long prompt chunk by chunk, so that the memory of its activations is not
// proportional to the prompt.

// The default of the most positions of a chunk. That many keep a CPU busy while the next weights
// come from the disk, and shorter prompts give the same bits as in one pass.
inline constexpr int64_t kPrefillChunkSize = 2048;

// Returns how many positions of a prompt of `prompt_tokens` the model reads in each pass except the
// last, which may be shorter: at most `most`, and equally many in each. 0: all of them. Also all of
// them if the rotary positions of all tokens depend on their number ("dynamic" and "longrope"
// beyond the positions that the model was made for). Pure.
int64_t PrefillChunk(const ModelConfig& config, int64_t prompt_tokens, int64_t most);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_PREFILL_H_
