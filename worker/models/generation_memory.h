#ifndef MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_
#define MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_

#include <cstdint>

#include "worker/models/model_config.h"
#include "worker/models/prefill.h"

namespace muster::models {

// The ranks of the adapters beside the weights, the largest of any layer; 0: there are none.
struct AdapterRanks {
  int64_t attention = 0;
  // The layers that make the input of a feed-forward layer wide, and the layer that makes it narrow
  // again.
  int64_t widening = 0, narrowing = 0;
  int64_t head = 0;
};

// The size of what is to be generated.
struct GenerationShape {
  int64_t rows = 1;           // prompts
  int64_t prompt_tokens = 1;  // of the longest one
  int64_t new_tokens = 1;
  // The beams, or draws, of each row.
  int64_t times = 1;
  // Whether the prompts differ in length.
  bool is_padded = false;
  bool do_sample = false;
  // The bytes of an element of weights and activations.
  int64_t element_bytes = 4;
  // As in GenerateOptions.
  int64_t prefill_chunk_size = kPrefillChunkSize;
  AdapterRanks adapters = {};
};

// The memory for a generation, in bytes.
struct GenerationMemory {
  // Keys and values of all positions.
  int64_t cache = 0;
  // An upper bound of the intermediate results, not much above what a run needs: the widest layer
  // decides, in the pass that reads the last chunk of the prompt.
  int64_t activations = 0;
};

// Returns the memory that Generate() needs beside the weights, for models on the CPU, without the
// kernels' own memory. Numbers beyond int64 count as its maximum. Pure.
GenerationMemory PlanGenerationMemory(const ModelConfig& config, const GenerationShape& shape);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_GENERATION_MEMORY_H_
