#ifndef MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_
#define MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_

#include <cstdint>

#include "worker/models/model_config.h"

namespace muster::models {

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
  // Of adapters beside the weights; 0: there are none. Any layer may have one.
  int64_t adapter_rank = 0;
};

// Bytes.
struct GenerationMemory {
  // Keys and values of all positions.
  int64_t cache = 0;
  // An upper bound of what is computed in between, and not much more than what a run takes: the
  // prompt is read in one pass, whose widest layer decides.
  int64_t activations = 0;
};

// What Generate() takes beside the weights, for models on the CPU, without the memory that
// kernels have for themselves. Numbers beyond int64 count as its maximum. Pure.
GenerationMemory PlanGenerationMemory(const ModelConfig& config, const GenerationShape& shape);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_
