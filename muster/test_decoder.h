#ifndef MUSTER_MUSTER_TEST_DECODER_H_
#define MUSTER_MUSTER_TEST_DECODER_H_

#include <cstdint>
#include <string>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "muster/models.h"

namespace muster {

// For tests: writes a decoder with random weights into `folder`, in blocks of 1.5 MiB: more than
// the memory that the tests give it.
inline absl::Status WriteTestDecoder(const std::string& folder, int64_t layers) {
  models::DecoderConfig config;
  config.vocab_size = 512;
  config.max_positions = 64;
  config.initializer_range = 0.1;
  config.hidden_size = 192;
  config.intermediate_size = 384;
  config.num_layers = layers;
  config.num_heads = config.num_key_value_heads = 4;
  config.head_dim = 48;
  config.sliding_windows.assign(layers, 0);
  at::manual_seed(3);
  const models::TextModel model = models::MakeModel(config);
  return save_pretrained(model, folder);
}

// Two rows of its tokens.
inline at::Tensor TestDecoderIds() {
  return at::tensor({1, 5, 9, 2, 40, 17, 8, 3}, c10::kLong).view({2, 4});
}

}  // namespace muster

#endif  // MUSTER_MUSTER_TEST_DECODER_H_
