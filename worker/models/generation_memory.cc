#include "worker/models/generation_memory.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <variant>

namespace muster::models {
namespace {

// What decides how much a layer takes, of any decoder.
struct Widths {
  double hidden = 0, inner = 0, queries = 0, keys = 0, layers = 0, experts = 0, head_dim = 0;
  bool has_window = false;
};

Widths WidthsOf(const ModelConfig& config) {
  if (const auto* const decoder = std::get_if<DecoderConfig>(&config)) {
    const auto head_dim = static_cast<double>(decoder->head_dim);
    return {
        .hidden = static_cast<double>(decoder->hidden_size),
        .inner = static_cast<double>(decoder->intermediate_size),
        .queries = static_cast<double>(decoder->num_heads) * head_dim,
        .keys = static_cast<double>(decoder->num_key_value_heads) * head_dim,
        .layers = static_cast<double>(decoder->num_layers),
        .experts =
            decoder->num_experts > 0 ? static_cast<double>(decoder->num_experts_per_token) : 0,
        .head_dim = head_dim,
        .has_window = std::any_of(decoder->sliding_windows.begin(), decoder->sliding_windows.end(),
                                  [](int64_t window) { return window > 0; })};
  }
  if (const auto* const gpt2 = std::get_if<Gpt2Config>(&config)) {
    const auto hidden = static_cast<double>(gpt2->hidden_size);
    return {.hidden = hidden,
            .inner = static_cast<double>(gpt2->inner_size),
            .queries = hidden,
            .keys = hidden,
            .layers = static_cast<double>(gpt2->num_layers)};
  }
  return {};
}

// Of one token in a layer: the most of what its parts hold at once. `e`: bytes of an element. The
// counts are those of the tensors that the layers' forward() have alive together.
double TokenBytes(const Widths& widths, double e) {
  // The stream, and what the layer has added to it so far.
  const double stream = 2 * widths.hidden * e;
  // In float32: the input, its square, the scaled one; and the result.
  const double norm = 3 * widths.hidden * 4 + widths.hidden * e;
  // Queries, keys, values; one of the first two with both of its turned halves; and the result.
  const double attention = widths.hidden * e + (5 * widths.queries + 2 * widths.keys) * e;
  // Gate, its activation, the other input, their product, the result.
  const double feed_forward = (4 * widths.inner + 2 * widths.hidden) * e;
  double mixed = 0;
  if (widths.experts > 0) {
    // Each token once for each of its experts: gathered, computed, joined, weighted in float32.
    const double copies = widths.experts * widths.hidden;
    mixed = std::max(copies * (2 * e) + feed_forward, copies * (3 * e + 8));
  }
  return stream + std::max({norm, attention, widths.experts > 0 ? mixed : feed_forward});
}

int64_t ToBytes(double bytes) {
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  return bytes >= static_cast<double>(kMost) ? kMost : static_cast<int64_t>(std::ceil(bytes));
}

}  // namespace

GenerationMemory PlanGenerationMemory(const ModelConfig& config, const GenerationShape& shape) {
  const Widths widths = WidthsOf(config);
  const auto e = static_cast<double>(shape.element_bytes);
  const auto rows = static_cast<double>(shape.rows), times = static_cast<double>(shape.times);
  const auto prompt = static_cast<double>(shape.prompt_tokens);
  const double positions = prompt + static_cast<double>(shape.new_tokens);
  // Of the prompts before any has its `times`.
  const double cache = rows * positions * widths.layers * 2 * widths.keys * e;

  double reading = rows * prompt * TokenBytes(widths, e);
  // In 16 bits kernels make themselves a weight in another order or type.
  if (e < 4) reading += widths.hidden * std::max(widths.inner, widths.queries) * 4;
  // Cosines and sines of all positions, and the tables that they are made from.
  reading += prompt * widths.head_dim * (4 + 2 * e) * (shape.is_padded ? rows : 1);
  if (shape.is_padded || widths.has_window) {
    // Which position sees which: as numbers while it is made, then as the kernel wants it.
    const double pairs = prompt * prompt * (shape.is_padded ? rows : 1);
    reading = std::max(prompt * prompt * (widths.has_window ? 10 : 0) + 3 * pairs,
                       reading + pairs * (2 + e));
  }
  // A few rows are computed in float32. Scores: as they are, changed by rules, as probabilities in
  // double.
  const double scores =
      static_cast<double>(Common(config).vocab_size) * (shape.do_sample ? 44 : 16);
  double next = rows * times * (TokenBytes(widths, std::max(e, 4.0)) + scores);
  // Beams that change places take the keys of a layer along.
  if (times > 1) next += rows * times * static_cast<double>(shape.new_tokens) * widths.keys * e;
  // The prompt's cache is there until each row has its own, tensor by tensor.
  const double repeating = times > 1 ? cache + cache * times / (2 * widths.layers) : 0;
  return {.cache = ToBytes(cache * times),
          .activations = ToBytes(std::max({reading - cache * (times - 1), repeating, next}))};
}

}  // namespace muster::models
