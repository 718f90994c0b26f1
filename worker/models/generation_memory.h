#ifndef MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_
#define MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_

#include <cstdint>

#include "worker/models/model_config.h"
#include "worker/models/prefill.h"

namespace muster::models {

// The ranks of the adapters beside the weights, of any layer the largest; 0: there are none.
struct AdapterRanks {
  int64_t attention = 0;
  // What makes the input of a feed-forward layer wide, and what makes it narrow again.
  int64_t widening = 0, narrowing = 0;
  int64_t head = 0;
};

// What is to be generated.
struct GenerationShape {
  int64_t rows = 1;           // prompts
  int64_t prompt_tokens = 1;  // of the longest one
  int64_t new_tokens = 1;
  // Beams, or draws, of each row.
  int64_t times = 1;
  // The prompts differ in length.
  bool is_padded = false;
  bool do_sample = false;
  // Of an element of weights and activations.
  int64_t element_bytes = 4;
  // As in GenerateOptions.
  int64_t prefill_chunk_size = kPrefillChunkSize;
  AdapterRanks adapters = {};
};

// Bytes.
struct GenerationMemory {
  // Keys and values of all positions.
  int64_t cache = 0;
  // An upper bound of what is computed in between, and not much more than what a run takes: the
  // widest layer decides, in the pass that reads the last chunk of the prompt.
  int64_t activations = 0;
};

// What Generate() takes beside the weights, for models on the CPU, without the memory that
// kernels have for themselves. Numbers beyond int64 count as its maximum. Pure.
GenerationMemory PlanGenerationMemory(const ModelConfig& config, const GenerationShape& shape);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_
