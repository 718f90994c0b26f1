#include "worker/bigmodel/offloaded_weights.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/model_files.h"
#include "worker/collective/test_error.h"
#include "worker/models/generate.h"
#include "worker/models/pretrained.h"

namespace muster {
namespace {

using models::TextModel;
using testing_support::GoldenPath;

constexpr const char* kFolders[] = {"hf_models/bert_shared", "hf_models/gpt2_shared",
                                    "hf_models/llama_shared", "hf_models/mixtral_shared",
                                    "hf_models/qwen2_shared"};

struct Offloaded {
  TextModel model;
  std::unique_ptr<OffloadedWeights> weights;
};

NamedTensors TensorsOf(const TextModel& model) {
  NamedTensors all;
  for (const auto& item : model->named_parameters()) all.emplace_back(item.key(), item.value());
  return all;
}

absl::StatusOr<Offloaded> Offload(const std::string& path, OffloadOptions options = {},
                                  c10::ScalarType dtype = c10::kFloat) {
  const auto config = models::ReadModelConfig(path);
  if (!config.ok()) return config.status();
  Offloaded out = {.model = models::MakeEmptyModel(*config, dtype), .weights = nullptr};
  const models::TextModelImpl& names = *out.model;
  options.rename = [&names](const std::string& name) { return names.ParameterName(name); };
  auto weights = OffloadedWeights::Create(path, TensorsOf(out.model), options);
  if (!weights.ok()) return weights.status();
  out.weights = *std::move(weights);
  return out;
}

at::Tensor Logits(TextModel& model) {
  const at::NoGradGuard no_grad;
  return model->forward({.input_ids = at::arange(8, c10::kLong).view({2, 4})}).logits;
}

int64_t LargestUnit(const std::string& path) {
  int64_t too_little = 0, enough = int64_t{1} << 24;
  while (enough - too_little > 1) {
    const int64_t between = (too_little + enough) / 2;
    (Offload(path, {.memory_bytes = between}).ok() ? enough : too_little) = between;
  }
  return enough;
}

TEST(OffloadedWeights, EveryFamily_SaysTheSameToTheLastBitWithAnyMemory) {
  for (const char* const name : kFolders) {
    SCOPED_TRACE(name);
    const std::string path = GoldenPath(name);
    const auto whole = models::LoadPretrained(path);
    ASSERT_TRUE(whole.ok()) << whole.status();
    TextModel reference = *whole;
    const at::Tensor want = Logits(reference);
    const int64_t least = LargestUnit(path);
    for (const bool prefetch : {false, true}) {
      for (const int64_t memory : {least, 2 * least, 3 * least, int64_t{1} << 30}) {
        auto offloaded = Offload(path, {.memory_bytes = memory, .prefetch = prefetch});
        ASSERT_TRUE(offloaded.ok()) << offloaded.status();
        EXPECT_EQ(offloaded->weights->figures().resident_bytes, 0);
        for (int pass = 0; pass < 4; ++pass) {
          EXPECT_TRUE(at::equal(Logits(offloaded->model), want));
        }
        const OffloadFigures figures = offloaded->weights->figures();
        EXPECT_LE(figures.peak_bytes, memory);
        if (memory > figures.total_bytes) {
          EXPECT_EQ(figures.bytes_read, figures.total_bytes);
        }
      }
    }
  }
}

TEST(OffloadedWeights, Generation_SaysTheSameTokens) {
  for (const char* const name : {"hf_generate/mixtral_4_shared", "hf_generate/gpt2_shared"}) {
    const std::string path = GoldenPath(name);
    auto whole = models::LoadCausalLm(path);
    auto offloaded = Offload(path, {.memory_bytes = 2 * LargestUnit(path)});
    ASSERT_TRUE(whole.ok() && offloaded.ok());
    auto& model = dynamic_cast<models::CausalLmImpl&>(*offloaded->model);
    const at::Tensor prompt = at::arange(5, c10::kLong).unsqueeze(0);
    const models::GenerateOptions options = {.max_new_tokens = 12, .eos_token_ids = {{}}};
    EXPECT_TRUE(at::equal(models::Generate(**whole, prompt, {}, options).tokens,
                          models::Generate(model, prompt, {}, options).tokens));
    EXPECT_GT(offloaded->weights->figures().num_prefetched, 0);
  }
}

TEST(OffloadedWeights, OtherType_IsConverted) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  auto whole = models::LoadPretrained(path, {.dtype = c10::kBFloat16});
  auto offloaded = Offload(path, {}, c10::kBFloat16);
  ASSERT_TRUE(whole.ok() && offloaded.ok());
  EXPECT_TRUE(at::equal(Logits(*whole), Logits(offloaded->model)));
}

// What is used again last goes first: with memory for half of the units, a pass reads half of them.
TEST(OffloadedWeights, MemoryForAPart_KeepsThatPart) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  auto all = Offload(path);
  ASSERT_TRUE(all.ok());
  Logits(all->model);
  const int64_t total = all->weights->figures().total_bytes;
  auto half = Offload(path, {.memory_bytes = total * 3 / 4, .prefetch = false});
  ASSERT_TRUE(half.ok()) << half.status();
  Logits(half->model);
  Logits(half->model);
  const int64_t before = half->weights->figures().bytes_read;
  Logits(half->model);
  EXPECT_LT(half->weights->figures().bytes_read - before, total * 3 / 4);
}

TEST(OffloadedWeights, WhatDoesNotFit_IsNamedAndChangesNothing) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  EXPECT_NE(Offload(path, {.memory_bytes = 2000}).status().message().find("memory_bytes is 2000"),
            std::string::npos);
  TextModel model = *models::LoadPretrained(path);
  NamedTensors targets = TensorsOf(model);
  targets.emplace_back("extra.weight", at::ones({2}));
  const auto missing = OffloadedWeights::Create(path, targets, {});
  EXPECT_NE(missing.status().message().find("missing: extra.weight"), std::string::npos);
  targets.pop_back();
  targets.erase(targets.begin());
  const auto unexpected = OffloadedWeights::Create(path, targets, {});
  EXPECT_NE(unexpected.status().message().find("unexpected: model.embed_tokens.weight"),
            std::string::npos)
      << unexpected.status();
  EXPECT_TRUE(Logits(model).isfinite().all().item<bool>());
}

TEST(OffloadedWeights, Writing_IsRefused) {
  auto offloaded = Offload(GoldenPath("hf_models/gpt2_shared"));
  ASSERT_TRUE(offloaded.ok());
  const at::NoGradGuard no_grad;
  EXPECT_NE(ErrorOf([&] { offloaded->model->parameters()[0].zero_(); }).find("cannot be written"),
            std::string::npos);
}

TEST(OffloadedWeights, FileThatBecomesShorter_IsNamedAndTriedAgain) {
  const TestFolder folder;
  const std::string from = GoldenPath("hf_generate/gpt2_shared/");
  const std::string weights = ReadFile(from + "model.safetensors").value_or("");
  const std::string path = folder.Path("model.safetensors");
  ASSERT_TRUE(WriteFileAtomically(path, weights).ok());
  ASSERT_TRUE(
      WriteFileAtomically(folder.Path("config.json"), ReadFile(from + "config.json").value_or(""))
          .ok());
  for (const bool prefetch : {false, true}) {
    auto offloaded = Offload(folder.path(), {.prefetch = prefetch});
    ASSERT_TRUE(offloaded.ok()) << offloaded.status();
    // In place, as a file that is open.
    ASSERT_EQ(truncate(path.c_str(), 4096), 0);
    const std::string error = ErrorOf([&] { Logits(offloaded->model); });
    EXPECT_NE(error.find("model.safetensors"), std::string::npos) << error;
    FILE* const file = fopen(path.c_str(), "r+");
    ASSERT_NE(file, nullptr);
    EXPECT_EQ(fwrite(weights.data(), 1, weights.size(), file), weights.size());
    fclose(file);
    EXPECT_TRUE(Logits(offloaded->model).isfinite().all().item<bool>());
  }
}

TEST(OffloadedWeights, ModelThatOutlivesThem_Throws) {
  auto offloaded = Offload(GoldenPath("hf_models/gpt2_shared"));
  ASSERT_TRUE(offloaded.ok());
  offloaded->weights.reset();
  EXPECT_NE(ErrorOf([&] { Logits(offloaded->model); }).find("or the OffloadedWeights"),
            std::string::npos);
}

// Gradients of what is computed with them, as adapters need, are those of the whole model.
TEST(OffloadedWeights, GradientsOfInputs_AreThoseOfTheWholeModel) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  const auto gradient = [](TextModel& model) {
    for (at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
    at::Tensor weight;
    for (const auto& item : model->named_parameters()) {
      if (item.key() == "model.norm.weight") weight = item.value();
    }
    // The last norm's weight stands for an adapter: it gets memory of its own.
    weight.set_data(at::ones({48}));
    weight.requires_grad_(true);
    const at::Tensor ids = at::arange(8, c10::kLong).view({2, 4});
    model->forward({.input_ids = ids, .labels = ids}).loss.backward();
    return weight.grad().clone();
  };
  TextModel whole = *models::LoadPretrained(path);
  auto offloaded = Offload(path, {.memory_bytes = 2 * LargestUnit(path)});
  ASSERT_TRUE(offloaded.ok());
  EXPECT_TRUE(at::equal(gradient(offloaded->model), gradient(whole)));
}

}  // namespace
}  // namespace muster
