#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "base/test_folder.h"
#include "muster/models.h"
#include "muster/offload.h"
#include "muster/test_decoder.h"
#include "tests/testdata/golden.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

// Whole text models, and one that is larger than the memory for its weights.

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::GoldenPath;

constexpr uint64_t kMiB = uint64_t{1} << 20;

constexpr const char* kLanguageModels[] = {
    "hf_models/gpt2_shared",        "hf_models/llama_shared",
    "hf_models/qwen2_shared",       "hf_models/mixtral_shared",
    "hf_generate/gpt2_shared",      "hf_generate/llama_rope_llama3_shared",
    "hf_generate/mixtral_4_shared", "hf_generate/llama_tied_head_dim_shared"};

// One thread, because the models are small, and waits of threads for each other on a busy machine
// are long.
[[maybe_unused]] const bool one_thread = [] {
  at::set_num_threads(1);
  return true;
}();

at::Tensor Logits(models::TextModelImpl& model) {
  const at::NoGradGuard no_grad;
  return model.forward({.input_ids = TestDecoderIds()}).logits;
}

// Returns greedy and sampled tokens, with a cache.
at::Tensor Tokens(models::CausalLm& model) {
  const at::Tensor greedy = generate(model, TestDecoderIds(), {}, {.max_new_tokens = 6}).tokens;
  return at::cat({greedy, generate(model, TestDecoderIds(), {},
                                   {.max_new_tokens = 6, .do_sample = true, .seed = 5})
                              .tokens},
                 1);
}

// A folder with a model of 14 MiB in blocks of 1.5 MiB, for cases with more weights than memory.
class LargerThanItsMemory : public ::testing::Test {
 protected:
  LargerThanItsMemory() { EXPECT_TRUE(WriteTestDecoder(folder_.path(), /*layers=*/10).ok()); }

  OffloadedCausalLm Load(uint64_t memory, BigModelOptions options = {}) {
    options.ring_bytes = memory;
    auto loaded = load_offloaded_causal_lm(folder_.path(), DeviceEntries{{"", "disk"}}, options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *std::move(loaded);
  }
  models::CausalLm Whole(c10::ScalarType dtype = c10::kFloat) {
    auto loaded = load_causal_lm(folder_.path(), {.dtype = dtype});
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *loaded;
  }
  std::string File() const { return folder_.Path("model.safetensors"); }

  const TestFolder folder_;
};

TEST(OffloadedModels, RecordedModels_SayTheSameFromTheDisk) {
  for (const char* const name : kLanguageModels) {
    SCOPED_TRACE(name);
    auto whole = load_causal_lm(GoldenPath(name));
    ASSERT_TRUE(whole.ok()) << whole.status();
    auto loaded = load_offloaded_causal_lm(GoldenPath(name));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(at::equal(Logits(*loaded->model), Logits(**whole)));
    EXPECT_TRUE(at::equal(Tokens(loaded->model), Tokens(*whole)));
    EXPECT_GT(loaded->weights->stats().read_bytes, 0);
  }
}

TEST(OffloadedModels, RecordedModels_SayTheSameFromHostMemory) {
  for (const char* const name : kLanguageModels) {
    SCOPED_TRACE(name);
    auto model = load_causal_lm(GoldenPath(name));
    ASSERT_TRUE(model.ok()) << model.status();
    const at::Tensor logits = Logits(**model), tokens = Tokens(*model);
    const auto offloaded = cpu_offload(*model, c10::kCPU);
    ASSERT_TRUE(offloaded.ok()) << offloaded.status();
    EXPECT_TRUE(at::equal(Logits(**model), logits));
    EXPECT_TRUE(at::equal(Tokens(*model), tokens));
    EXPECT_GT(offloaded->stats().read_bytes, 0);
  }
}

TEST_F(LargerThanItsMemory, Ring_BoundsWhatIsInMemory) {
  models::CausalLm whole = Whole();
  for (const bool prefetch : {false, true}) {
    SCOPED_TRACE(prefetch);
    OffloadedCausalLm loaded = Load(4 * kMiB, {.prefetch = prefetch});
    EXPECT_TRUE(at::equal(Tokens(loaded.model), Tokens(whole)));
    const OffloadStats stats = loaded.weights->stats();
    EXPECT_LE(stats.ring_bytes, 4 * kMiB);
    EXPECT_EQ(stats.overflow_bytes, 0);
    EXPECT_GT(stats.offloaded_bytes, 3 * stats.ring_bytes);
    EXPECT_GT(stats.read_bytes, stats.offloaded_bytes) << "weights came more than once";
  }
}

// If the largest tensor hardly fits, an operator's other weights and gaps between units are added,
// and reported.
TEST_F(LargerThanItsMemory, MemoryForOneTensor_IsEnough) {
  models::CausalLm whole = Whole();
  OffloadedCausalLm loaded = Load(400 << 10);
  EXPECT_TRUE(at::equal(Tokens(loaded.model), Tokens(whole)));
  const OffloadStats stats = loaded.weights->stats();
  EXPECT_LE(stats.ring_bytes, 400 << 10);
  EXPECT_LE(stats.overflow_bytes, 400 << 10);
}

TEST_F(LargerThanItsMemory, Prefetch_KnowsTheOrderAfterTheFirstPass) {
  OffloadedCausalLm loaded = Load(4 * kMiB);
  // Two passes teach the order, including the step from the end to the beginning.
  for (int pass = 0; pass < 2; ++pass) Logits(*loaded.model);
  const int64_t before = loaded.weights->stats().waits;
  for (int pass = 0; pass < 3; ++pass) Logits(*loaded.model);
  EXPECT_EQ(loaded.weights->stats().waits, before) << "units that nothing had asked for";
}

TEST_F(LargerThanItsMemory, OtherType_IsConvertedOnTheWay) {
  models::CausalLm whole = Whole(c10::kBFloat16);
  OffloadedCausalLm loaded = Load(4 * kMiB, {.dtype = c10::kBFloat16});
  EXPECT_TRUE(at::equal(Logits(*loaded.model), Logits(*whole)));
  EXPECT_TRUE(at::equal(Tokens(loaded.model), Tokens(whole)));
}

TEST_F(LargerThanItsMemory, MapThatNamesNoModule_IsRefused) {
  const auto loaded = load_offloaded_causal_lm(
      folder_.path(), DeviceEntries{{"", "disk"}, {"model.layer.0", "cpu"}});
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(loaded.status().message()), HasSubstr("model.layer.0"));
}

// Later contents of the file may be another model's: only loading it again helps.
TEST_F(LargerThanItsMemory, FileThatIsCutOff_IsNamedUntilTheModelIsLoadedAgain) {
  const at::Tensor want = Logits(*Whole());
  for (const bool prefetch : {false, true}) {
    SCOPED_TRACE(prefetch);
    OffloadedCausalLm loaded = Load(4 * kMiB, {.prefetch = prefetch});
    EXPECT_TRUE(at::equal(Logits(*loaded.model), want));
    const auto size = std::filesystem::file_size(File());
    std::string tail(size / 2, '\0');
    {
      std::ifstream file(File(), std::ios::binary);
      file.seekg(static_cast<std::streamoff>(size - tail.size()));
      file.read(tail.data(), static_cast<std::streamsize>(tail.size()));
    }
    std::filesystem::resize_file(File(), size - tail.size());
    const auto is_refused = [&] {
      EXPECT_THAT(ErrorOf([&] { Logits(*loaded.model); }),
                  AllOf(HasSubstr(File()), HasSubstr("tensor \"model."),
                        HasSubstr("changed while it is used")));
    };
    is_refused();
    is_refused();
    {
      std::ofstream file(File(), std::ios::binary | std::ios::app);
      file.write(tail.data(), static_cast<std::streamsize>(tail.size()));
    }
    is_refused();
    loaded = Load(4 * kMiB, {.prefetch = prefetch});
    EXPECT_TRUE(at::equal(Logits(*loaded.model), want));
  }
}

TEST_F(LargerThanItsMemory, PassThatKeepsGradients_IsRefused) {
  OffloadedCausalLm loaded = Load(4 * kMiB);
  EXPECT_THAT(ErrorOf([&] { loaded.model->forward({.input_ids = TestDecoderIds()}); }),
              HasSubstr("offloaded weights are for inference"));
  EXPECT_TRUE(at::equal(Logits(*loaded.model), Logits(*Whole())));
}

TEST_F(LargerThanItsMemory, UseAfterItsWeights_IsAnError) {
  models::CausalLm model = nullptr;
  {
    OffloadedCausalLm loaded = Load(4 * kMiB);
    Logits(*loaded.model);
    model = loaded.model;
  }
  EXPECT_THAT(ErrorOf([&] { Logits(*model); }), HasSubstr("is gone"));
}

TEST(LoadOffloadedCausalLm, ModelThatDoesNotPredictTheNextToken_IsRefused) {
  const auto loaded = load_offloaded_causal_lm(GoldenPath("hf_models/bert_shared"));
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace muster
