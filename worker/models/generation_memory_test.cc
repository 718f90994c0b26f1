#include "worker/models/generation_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "c10/core/Allocator.h"
#include "c10/util/ThreadLocalDebugInfo.h"
#include "worker/models/generate.h"
#include "worker/models/lora.h"
#include "worker/models/pretrained.h"

namespace muster::models {
namespace {

// The most bytes of tensors that this thread has had allocated at once since construction.
class MostAllocated : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*ptr*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    now_ += bytes;
    most_ = std::max(most_, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t most() const { return most_; }

 private:
  int64_t now_ = 0, most_ = 0;
};

int64_t MostOf(CausalLm& model, const GenerationShape& shape) {
  const at::Tensor ids = at::ones({shape.rows, shape.prompt_tokens}, c10::kLong);
  at::Tensor mask = at::ones_like(ids);
  if (shape.is_padded) mask[0][0] = 0;
  GenerateOptions options = {.max_new_tokens = shape.new_tokens, .do_sample = shape.do_sample};
  options.eos_token_ids.emplace();
  options.prefill_chunk_size = shape.prefill_chunk_size;
  (shape.do_sample ? options.num_return_sequences : options.num_beams) = shape.times;
  const auto most = std::make_shared<MostAllocated>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, most);
    Generate(*model, ids, mask, options);
  }
  return most->most();
}

DecoderConfig Decoder() {
  DecoderConfig config;
  config.vocab_size = 1000;
  config.max_positions = 2048;
  config.hidden_size = 128;
  config.intermediate_size = 352;
  config.num_layers = 3;
  config.num_heads = config.num_key_value_heads = 4;
  config.head_dim = 32;
  config.sliding_windows.assign(3, 0);
  return config;
}

Gpt2Config Gpt2() {
  Gpt2Config gpt2;
  gpt2.architecture = Architecture::kGpt2LMHeadModel;
  gpt2.vocab_size = 1000;
  gpt2.max_positions = 2048;
  gpt2.hidden_size = 128;
  gpt2.inner_size = 512;
  gpt2.num_layers = 3;
  gpt2.num_heads = 4;
  return gpt2;
}

// Returns models of all families, with different layers as the widest.
std::vector<ModelConfig> Configs() {
  DecoderConfig grouped = Decoder();
  grouped.num_key_value_heads = 1;
  DecoderConfig wide = Decoder();
  wide.intermediate_size = 1024;
  DecoderConfig heads = Decoder();
  heads.head_dim = 128;
  DecoderConfig window = Decoder();
  window.sliding_windows = {0, 64, 64};
  DecoderConfig experts = Decoder();
  experts.architecture = Architecture::kMixtralForCausalLM;
  experts.num_experts = 4;
  experts.num_experts_per_token = 2;
  DecoderConfig windows = Decoder();
  windows.sliding_windows = {0, 64, 4096};
  DecoderConfig laplace = Decoder();
  laplace.activation = Activation::kLaplace;
  return {Decoder(), grouped, wide, heads, window, experts, Gpt2(), windows, laplace};
}

// Returns models with activations of several operations, which have more tensors at once in 16
// bits.
std::vector<ModelConfig> StepwiseConfigs() {
  std::vector<ModelConfig> configs;
  for (const Activation activation :
       {Activation::kGeluNew, Activation::kGeluFast, Activation::kGeluErf, Activation::kLaplace,
        Activation::kQuickGelu, Activation::kGeluClipped, Activation::kRelu2,
        Activation::kSqrtSoftplus, Activation::kMish}) {
    Gpt2Config gpt2 = Gpt2();
    gpt2.activation = activation;
    DecoderConfig decoder = Decoder();
    decoder.activation = activation;
    configs.emplace_back(gpt2);
    configs.emplace_back(decoder);
  }
  return configs;
}

CausalLm Made(const ModelConfig& config, c10::ScalarType type) {
  return CausalLm(std::dynamic_pointer_cast<CausalLmImpl>(MakeModel(config, type).ptr()));
}

int64_t Sum(const GenerationMemory& memory) { return memory.cache + memory.activations; }

TEST(PlanGenerationMemory, RunsOfAllFamilies_TakeAtMostWhatIsPlanned_AndMostOfIt) {
  const std::vector<GenerationShape> shapes = {
      {.prompt_tokens = 128, .new_tokens = 1},
      {.prompt_tokens = 600, .new_tokens = 4},
      {.rows = 3, .prompt_tokens = 300, .new_tokens = 4, .is_padded = true},
      {.rows = 2, .prompt_tokens = 200, .new_tokens = 6, .times = 4},
      {.rows = 2, .prompt_tokens = 64, .new_tokens = 6, .times = 3, .do_sample = true},
      {.prompt_tokens = 4, .new_tokens = 40}};
  at::set_num_threads(1);
  int number = 0;
  for (const ModelConfig& config : Configs()) {
    for (const bool is_wide : {true, false}) {
      CausalLm model = Made(config, is_wide ? c10::kFloat : c10::kBFloat16);
      for (size_t i = 0; i < shapes.size(); ++i) {
        // A machine may have to emulate 16 bits.
        if (!is_wide && i % 5 != 0) continue;
        SCOPED_TRACE(testing::Message()
                     << "config " << number << ", shape " << i << (is_wide ? "" : ", bfloat16"));
        GenerationShape shape = shapes[i];
        shape.element_bytes = is_wide ? 4 : 2;
        const int64_t planned = Sum(PlanGenerationMemory(config, shape));
        const int64_t most = MostOf(model, shape);
        EXPECT_LE(most, planned);
        if (is_wide) {
          EXPECT_GE(most, planned / 2);
        }
      }
    }
    ++number;
  }
}

TEST(PlanGenerationMemory, PromptsInChunks_TakeAtMostWhatIsPlanned_AndMostOfIt) {
  const std::vector<GenerationShape> shapes = {
      {.prompt_tokens = 1500, .new_tokens = 1, .prefill_chunk_size = 128},
      {.prompt_tokens = 900, .new_tokens = 4, .prefill_chunk_size = 200},
      {.rows = 3,
       .prompt_tokens = 400,
       .new_tokens = 4,
       .is_padded = true,
       .prefill_chunk_size = 96}};
  at::set_num_threads(1);
  int number = 0;
  for (const ModelConfig& config : Configs()) {
    for (const bool is_wide : {true, false}) {
      CausalLm model = Made(config, is_wide ? c10::kFloat : c10::kBFloat16);
      for (size_t i = 0; i < shapes.size(); ++i) {
        SCOPED_TRACE(testing::Message()
                     << "config " << number << ", shape " << i << (is_wide ? "" : ", bfloat16"));
        GenerationShape shape = shapes[i];
        shape.element_bytes = is_wide ? 4 : 2;
        const GenerationMemory planned = PlanGenerationMemory(config, shape);
        const int64_t most = MostOf(model, shape);
        EXPECT_LE(most, Sum(planned));
        if (is_wide) {
          EXPECT_GE(most, Sum(planned) / 2);
        }
        shape.prefill_chunk_size = 0;
        EXPECT_LT(planned.activations, PlanGenerationMemory(config, shape).activations / 2);
      }
    }
    ++number;
  }
}

TEST(PlanGenerationMemory, ActivationsOfSeveralOperations_TakeAtMostWhatIsPlanned) {
  at::set_num_threads(1);
  for (const ModelConfig& config : StepwiseConfigs()) {
    for (const c10::ScalarType type : {c10::kFloat, c10::kBFloat16}) {
      const auto activation =
          std::visit([](const auto& each) { return static_cast<int>(each.activation); }, config);
      SCOPED_TRACE(testing::Message()
                   << ArchitectureName(Common(config).architecture) << ", activation " << activation
                   << ", " << c10::toString(type));
      CausalLm model = Made(config, type);
      const GenerationShape shape = {.prompt_tokens = 400,
                                     .new_tokens = 2,
                                     .element_bytes = static_cast<int64_t>(c10::elementSize(type))};
      const int64_t planned = Sum(PlanGenerationMemory(config, shape));
      const int64_t most = MostOf(model, shape);
      EXPECT_LE(most, planned);
      EXPECT_GE(most, planned / 2);
    }
  }
}

TEST(PlanGenerationMemory, Adapters_TakeAtMostWhatIsPlanned) {
  at::set_num_threads(1);
  DecoderConfig wide = Decoder();
  wide.intermediate_size = 1024;
  DecoderConfig narrow = Decoder();
  narrow.intermediate_size = 64;
  for (const ModelConfig& config : {ModelConfig(wide), ModelConfig(narrow), ModelConfig(Gpt2())}) {
    const bool is_gpt2 = std::holds_alternative<Gpt2Config>(config);
    for (const c10::ScalarType type : {c10::kFloat, c10::kBFloat16}) {
      SCOPED_TRACE(testing::Message()
                   << ArchitectureName(Common(config).architecture) << ", " << c10::toString(type));
      CausalLm model = Made(config, type);
      AddLora(*model,
              {.rank = 8,
               .target_modules =
                   is_gpt2 ? std::vector<std::string>{"c_attn", "c_proj", "c_fc"}
                           : std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj",
                                                      "gate_proj", "up_proj", "down_proj"}});
      GenerationShape shape = {.prompt_tokens = 400,
                               .new_tokens = 2,
                               .element_bytes = static_cast<int64_t>(c10::elementSize(type)),
                               .adapters = AdapterRanksOf(*model)};
      const int64_t planned = Sum(PlanGenerationMemory(config, shape));
      const int64_t most = MostOf(model, shape);
      EXPECT_LE(most, planned);
      EXPECT_GE(most, planned / 2);
    }
  }
}

// PEFT's default: narrow layers, whose adapters take little memory.
TEST(PlanGenerationMemory, AdaptersOfAttentionAlone_TakeWhatIsPlanned) {
  at::set_num_threads(1);
  DecoderConfig config = Decoder();
  config.intermediate_size = 1024;
  for (const c10::ScalarType type : {c10::kFloat, c10::kBFloat16}) {
    SCOPED_TRACE(c10::toString(type));
    CausalLm model = Made(config, type);
    AddLora(*model, {.rank = 8});
    GenerationShape shape = {.prompt_tokens = 1000,
                             .new_tokens = 1,
                             .element_bytes = static_cast<int64_t>(c10::elementSize(type)),
                             .adapters = AdapterRanksOf(*model)};
    const int64_t planned = Sum(PlanGenerationMemory(config, shape));
    const int64_t most = MostOf(model, shape);
    EXPECT_LE(most, planned);
    EXPECT_GE(most, planned * 8 / 10);
  }
}

// Kernels for more rows copy the head in 16 bits, those for few do not.
TEST(PlanGenerationMemory, HeadOfManyRows_HasItsCopyIn16Bits) {
  DecoderConfig config = Decoder();
  config.vocab_size = 100'000;
  const auto planned = [&](GenerationShape shape) {
    shape.prompt_tokens = 4;
    return PlanGenerationMemory(config, shape).activations;
  };
  const int64_t copy = config.vocab_size * config.hidden_size * 4;
  const int64_t row = config.vocab_size * 20;
  EXPECT_LT(planned({.rows = 8, .element_bytes = 2}), copy);
  EXPECT_GT(planned({.rows = 9, .element_bytes = 2}), copy);
  EXPECT_GT(planned({.times = 9, .element_bytes = 2}), copy);
  EXPECT_LT(planned({.rows = 9, .element_bytes = 4}) - planned({.rows = 8, .element_bytes = 4}),
            row);
}

TEST(PlanGenerationMemory, WindowThatThePromptDoesNotFill_HasNoMask) {
  DecoderConfig config = Decoder();
  const GenerationShape shape = {.prompt_tokens = 1000};
  const int64_t without = PlanGenerationMemory(config, shape).activations;
  config.sliding_windows.assign(3, 1000);
  EXPECT_EQ(PlanGenerationMemory(config, shape).activations, without);
  config.sliding_windows.assign(3, 999);
  EXPECT_GT(PlanGenerationMemory(config, shape).activations, without + 1000 * 1000);
}

TEST(PlanGenerationMemory, MoreThanThereIs_IsTheMostThereIs) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const GenerationMemory plan =
      PlanGenerationMemory(Decoder(), {.rows = kMost, .prompt_tokens = kMost, .new_tokens = kMost});
  EXPECT_EQ(plan.cache, kMost);
  EXPECT_EQ(plan.activations, kMost);
}

}  // namespace
}  // namespace muster::models
