#include "worker/models/generation_memory.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <variant>

#include "worker/models/few_rows.h"

namespace muster::models {
namespace {

// The sizes that determine the memory of a layer, for any model.
struct Widths {
  double hidden = 0, inner = 0, queries = 0, keys = 0, layers = 0, experts = 0, head_dim = 0;
  // The outputs of the widest attention layer.
  double projected = 0;
  Activation activation = Activation::kSilu;
  // Whether the feed-forward layers have a gate.
  bool is_gated = false;
  // Whether the linear layers are those of GPT-2, which have no special kernel for few rows.
  bool has_conv1d = false;
  // The distinct windows of the layers.
  std::set<int64_t> windows = {0};
};

Widths WidthsOf(const ModelConfig& config) {
  if (const auto* const decoder = std::get_if<DecoderConfig>(&config)) {
    const auto head_dim = static_cast<double>(decoder->head_dim);
    const double queries = static_cast<double>(decoder->num_heads) * head_dim;
    return {.hidden = static_cast<double>(decoder->hidden_size),
            .inner = static_cast<double>(decoder->intermediate_size),
            .queries = queries,
            .keys = static_cast<double>(decoder->num_key_value_heads) * head_dim,
            .layers = static_cast<double>(decoder->num_layers),
            .experts =
                decoder->num_experts > 0 ? static_cast<double>(decoder->num_experts_per_token) : 0,
            .head_dim = head_dim,
            .projected = queries,
            .activation = decoder->activation,
            .is_gated = true,
            .windows = {decoder->sliding_windows.begin(), decoder->sliding_windows.end()}};
  }
  if (const auto* const gpt2 = std::get_if<Gpt2Config>(&config)) {
    const auto hidden = static_cast<double>(gpt2->hidden_size);
    return {.hidden = hidden,
            .inner = static_cast<double>(gpt2->inner_size),
            .queries = hidden,
            .keys = hidden,
            .layers = static_cast<double>(gpt2->num_layers),
            .projected = 3 * hidden,
            .activation = gpt2->activation,
            .has_conv1d = true};
  }
  return {};
}

// The number of tensors of its input's size that are alive at once in Activate(), including its
// input and its result. Each intermediate result lives until the end of its statement.
int ActivationTensors(Activation activation, bool rounds) {
  switch (activation) {
    case Activation::kGeluNew:
      return rounds ? 8 : 2;
    case Activation::kGeluFast:
      return rounds ? 9 : 2;
    case Activation::kGeluErf:
      return rounds ? 6 : 2;
    case Activation::kLaplace:
      return 6;
    case Activation::kQuickGelu:
      return 4;
    case Activation::kGeluClipped:
    case Activation::kRelu2:
    case Activation::kSqrtSoftplus:
      return 3;
    default:
      return 2;
  }
}

// The bytes per token of a layer's adapter, beside the layer's input and its result: the narrow
// product, the wide one, the scaled one and the sum; if these are wider than the layer, also its
// input and its result in that width.
double AdapterBytes(double in, double out, int64_t rank, double e) {
  if (rank == 0) return 0;
  return static_cast<double>(rank) * 4 + 3 * out * 4 + (e < 4 ? (in + out) * 4 : 0);
}

// The bytes of one token in a layer: what attention holds at once, and the maximum of all parts.
struct LayerBytes {
  double attention = 0, most = 0;
};

// `e`: bytes of an element. The counts are those of the tensors that are alive together in the
// layers' forward().
LayerBytes TokenBytes(const Widths& widths, double e, const AdapterRanks& ranks) {
  // The residual stream, and what the layer has added to it so far.
  const double stream = 2 * widths.hidden * e;
  // In float32 the input, its square and the scaled input; and the result.
  const double norm = 3 * widths.hidden * 4 + widths.hidden * e;
  // Queries, keys and values; one of the first two with both rotated halves; and the result.
  const double attention =
      widths.hidden * e + (5 * widths.queries + 2 * widths.keys) * e +
      AdapterBytes(std::max(widths.hidden, widths.queries),
                   std::max(widths.hidden, widths.projected), ranks.attention, e);
  // The gate, its activation, the other input, their product and the result; in any order.
  const int gates = widths.is_gated ? 1 : 0;
  const int activated =
      std::max(2 + 2 * gates, gates + ActivationTensors(widths.activation, e < 4));
  const double feed_forward =
      2 * widths.hidden * e +
      std::max({activated * widths.inner * e,
                (1 + 2 * gates) * widths.inner * e +
                    AdapterBytes(widths.hidden, widths.inner, ranks.widening, e),
                (2 + 2 * gates) * widths.inner * e +
                    AdapterBytes(widths.inner, widths.hidden, ranks.narrowing, e)});
  double mixed = 0;
  if (widths.experts > 0) {
    // Each token once for each of its experts: gathered, computed, joined, and weighted in float32.
    const double copies = widths.experts * widths.hidden;
    mixed = std::max(copies * (2 * e) + feed_forward, copies * (3 * e + 8));
  }
  return {.attention = stream + attention,
          .most = stream + std::max({norm, attention, widths.experts > 0 ? mixed : feed_forward})};
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
  // For the prompts, before they are repeated `times` times.
  const double cache = rows * positions * widths.layers * 2 * widths.keys * e;

  const AdapterRanks& ranks = shape.adapters;
  const auto vocabulary = static_cast<double>(Common(config).vocab_size);
  // With 16 bits, kernels make a copy of a weight in another order or type; of the head only if
  // there are more rows than the kernel for few rows takes.
  const auto copied = [&](double largest) { return e < 4 ? largest * widths.hidden * 4 : 0; };
  const double layer_copy = copied(std::max(widths.inner, widths.projected));
  const auto head_copy = [&](double count) {
    return count > static_cast<double>(kFewRows) ? copied(vocabulary) : 0;
  };
  const double head_bytes =
      vocabulary * (e + 4) + AdapterBytes(widths.hidden, vocabulary, ranks.head, e);

  // The positions of the prompt that are read in one pass.
  const int64_t chunk_tokens = PrefillChunk(config, shape.prompt_tokens, shape.prefill_chunk_size);
  const auto chunk = static_cast<double>(chunk_tokens);
  const bool has_chunks = chunk_tokens < shape.prompt_tokens;
  const LayerBytes token = TokenBytes(widths, e, ranks);
  // Tokens, positions, and the tensors they are compared with.
  double shared = layer_copy + rows * prompt * 4 * sizeof(int64_t);
  // The cosines and sines of the positions, and the tables from which they are made.
  shared += chunk * widths.head_dim * (4 + 2 * e) * (shape.is_padded ? rows : 1);
  // The mask of each kind of window. A window longer than the prompt counts as none, and without a
  // window there is no mask unless there is padding, or a chunk before this one.
  const auto is_window = [&](int64_t window) { return window > 0 && window < shape.prompt_tokens; };
  const auto num_windows = std::count_if(widths.windows.begin(), widths.windows.end(), is_window);
  const auto masks = static_cast<double>(shape.is_padded || has_chunks
                                             ? static_cast<int64_t>(widths.windows.size())
                                             : int64_t{num_windows});
  double reading = rows * chunk * token.most + shared;
  if (masks > 0) {
    // As numbers during construction, then in the kernel's format.
    const double pairs = chunk * prompt * (shape.is_padded ? rows : 1);
    reading = std::max({chunk * prompt * (num_windows > 0 ? 10 : 1) + (masks + 2) * pairs,
                        reading + pairs * masks,
                        rows * chunk * token.attention + shared + pairs * (masks + 1 + e)});
  }
  // The scores of the last position, while the residual stream is alive.
  reading =
      std::max(reading, rows * (chunk * 2 * widths.hidden * e + head_bytes) + head_copy(rows));
  // A few rows are computed in float32. Scores: unchanged, changed by rules, and as probabilities
  // in double.
  const double scores = vocabulary * (shape.do_sample ? 44 : 16) +
                        AdapterBytes(widths.hidden, vocabulary, ranks.head, e);
  double next = rows * times * (TokenBytes(widths, std::max(e, 4.0), ranks).most + scores);
  const bool is_few = rows * times <= static_cast<double>(kFewRows);
  next += std::max(is_few && !widths.has_conv1d ? 0 : layer_copy, head_copy(rows * times));
  // Reordering beams copies the keys of one layer.
  if (times > 1) next += rows * times * static_cast<double>(shape.new_tokens) * widths.keys * e;
  // The prompt's cache lives until each row has its own, tensor by tensor.
  const double repeating = times > 1 ? cache + cache * times / (2 * widths.layers) : 0;
  return {.cache = ToBytes(cache * times),
          .activations = ToBytes(std::max({reading - cache * (times - 1), repeating, next}))};
}

}  // namespace muster::models
