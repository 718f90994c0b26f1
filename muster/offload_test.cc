#include "muster/offload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/file.h"
#include "base/malloc_tuning.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/model_files.h"
#include "worker/models/generate.h"
#include "worker/models/pretrained.h"

namespace muster {
namespace {

using models::TextModel;
using ::testing::HasSubstr;
using testing_support::GoldenPath;

constexpr const char* kFolders[] = {"hf_models/bert_shared", "hf_models/gpt2_shared",
                                    "hf_models/llama_shared", "hf_models/mixtral_shared",
                                    "hf_models/qwen2_shared"};

struct Offloaded {
  TextModel model = nullptr;
  std::shared_ptr<DispatchedModel> weights;
};

absl::StatusOr<Offloaded> Offload(const std::string& path, const DeviceMapChoice& map,
                                  BigModelOptions options = {}) {
  const auto config = models::ReadModelConfig(path);
  if (!config.ok()) return config.status();
  Offloaded out;
  out.model = models::MakeEmptyModel(*config, options.dtype.value_or(at::kFloat));
  const models::TextModelImpl& names = *out.model;
  options.rename = [&names](const std::string& name) { return names.ParameterName(name); };
  auto weights = load_checkpoint_and_dispatch(out.model, path, map, options);
  if (!weights.ok()) return weights.status();
  out.weights = std::make_shared<DispatchedModel>(*std::move(weights));
  return out;
}

at::Tensor Logits(TextModel& model) {
  const at::NoGradGuard no_grad;
  return model->forward({.input_ids = at::arange(8, c10::kLong).view({2, 4})}).logits;
}

TEST(Offload, EveryFamily_SaysTheSameToTheLastBitInEachPlacement) {
  for (const char* const name : kFolders) {
    SCOPED_TRACE(name);
    const std::string path = GoldenPath(name);
    TextModel whole = *models::LoadPretrained(path);
    const at::Tensor want = Logits(whole);
    const auto sizes = compute_module_sizes(*whole);
    ASSERT_TRUE(sizes.ok()) << sizes.status();
    const auto half = static_cast<double>(sizes->at("")) * 0.7;
    struct Case {
      DeviceMapChoice map;
      BigModelOptions options;
    };
    const std::vector<Case> cases = {
        {DeviceEntries{{"", "cpu"}}, {}},
        {DeviceEntries{{"", "disk"}}, {}},
        {DeviceEntries{{"", "disk"}}, {.ring_bytes = 64 << 10}},
        {DeviceEntries{{"", "disk"}}, {.ring_bytes = 64 << 10, .prefetch = false}},
        {"auto", {.max_memory = {{"cpu", half}}}}};
    for (const Case& one : cases) {
      auto offloaded = Offload(path, one.map, one.options);
      ASSERT_TRUE(offloaded.ok()) << offloaded.status();
      for (int pass = 0; pass < 3; ++pass) {
        EXPECT_TRUE(at::equal(Logits(offloaded->model), want));
      }
    }
    EXPECT_TRUE(at::equal(Logits(whole), want));
  }
}

// The layout of transformers 5's models in memory; each expert is read from its part of the file.
TEST(Offload, ExpertsInOneTensor_SayTheSame) {
  const TestFolder folder;
  const TextModel whole = *models::LoadPretrained(GoldenPath("hf_models/mixtral_shared"));
  std::map<std::string, std::vector<at::Tensor>> fused;
  NamedTensors tensors;
  for (const auto& item : whole->named_parameters()) {
    std::string name = item.key();
    const size_t block = name.find(".block_sparse_moe.experts.");
    if (block == std::string::npos) {
      tensors.emplace_back(name, item.value());
      continue;
    }
    fused[name.substr(0, block) + ".mlp.experts." +
          (name.ends_with(".w2.weight") ? "down_proj" : "gate_up_proj")]
        .push_back(item.value().detach());
  }
  for (const auto& [name, parts] : fused) {
    const auto experts = std::get<models::DecoderConfig>(whole->config()).num_experts;
    tensors.emplace_back(name, at::cat(parts).view({experts, -1, parts[0].size(1)}));
  }
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  ASSERT_TRUE(
      WriteFileAtomically(folder.Path("config.json"), models::ToJson(whole->config())).ok());
  const auto offloaded = load_offloaded_causal_lm(folder.path());
  ASSERT_TRUE(offloaded.ok()) << offloaded.status();
  TextModel same(std::static_pointer_cast<models::TextModelImpl>(offloaded->model.ptr()));
  TextModel first(whole);
  EXPECT_TRUE(at::equal(Logits(same), Logits(first)));
}

TEST(Offload, Generation_SaysTheSameTokens) {
  for (const char* const name : {"hf_generate/mixtral_4_shared", "hf_generate/gpt2_shared"}) {
    const std::string path = GoldenPath(name);
    auto whole = models::LoadCausalLm(path);
    auto offloaded =
        load_offloaded_causal_lm(path, DeviceEntries{{"", "disk"}}, {.ring_bytes = 96 << 10});
    ASSERT_TRUE(whole.ok()) << whole.status();
    ASSERT_TRUE(offloaded.ok()) << offloaded.status();
    const at::Tensor prompt = at::arange(5, c10::kLong).unsqueeze(0);
    const models::GenerateOptions options = {.max_new_tokens = 12, .eos_token_ids = {{}}};
    EXPECT_TRUE(at::equal(models::Generate(**whole, prompt, {}, options).tokens,
                          models::Generate(*offloaded->model, prompt, {}, options).tokens));
    EXPECT_LT(offloaded->weights->stats().waits, offloaded->weights->stats().uses);
  }
}

// Tensors that a constructor computes are also there if any module may be constructed empty.
TEST(Offload, EmptyConstruction_OfAModelOfTheHub_IsTheSame) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  TextModel whole = *models::LoadPretrained(path);
  const auto config = models::ReadModelConfig(path);
  ASSERT_TRUE(config.ok());
  TextModel model = init_empty_weights([&] { return models::MakeModel(*config); });
  const models::TextModelImpl& names = *model;
  const auto weights = load_checkpoint_and_dispatch(
      model, path, DeviceEntries{{"", "disk"}},
      {.rename = [&names](const std::string& name) { return names.ParameterName(name); }});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_TRUE(at::equal(Logits(model), Logits(whole)));
}

// Gradients of results computed with offloaded weights, as adapters need, are those of the whole
// model.
TEST(Offload, GradientsOfAdapters_AreThoseOfTheWholeModel) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  const auto gradient = [](TextModel& model) {
    for (at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
    at::Tensor weight;
    for (const auto& item : model->named_parameters()) {
      if (item.key() == "model.norm.weight") weight = item.value();
    }
    // The last norm's weight stands for an adapter: it is placed separately.
    weight.requires_grad_(true);
    const at::Tensor ids = at::arange(8, c10::kLong).view({2, 4});
    model->forward({.input_ids = ids, .labels = ids}).loss.backward();
    return weight.grad().clone();
  };
  TextModel whole = *models::LoadPretrained(path);
  auto offloaded =
      Offload(path, DeviceEntries{{"", "disk"}, {"model.norm", "cpu"}}, {.ring_bytes = 64 << 10});
  ASSERT_TRUE(offloaded.ok()) << offloaded.status();
  EXPECT_TRUE(at::equal(gradient(offloaded->model), gradient(whole)));
}

// Each process decides how it keeps freed memory: loaders tune that after a load, too.
TEST(Offload, Load_LeavesTheTuningOfMemoryToTheProcess) {
  ASSERT_TRUE(load_offloaded_causal_lm(GoldenPath("hf_models/llama_shared")).ok());
  KeepFreedBatchMemory();
  const size_t mapped = mallinfo2().hblks;
  const std::unique_ptr<void, decltype(&std::free)> block(std::malloc(8 << 20), &std::free);
  ASSERT_NE(block, nullptr);
  // Kept memory comes from the heap, not from a separate mapping.
  EXPECT_EQ(mallinfo2().hblks, mapped);
}

TEST(Offload, RingThatIsTooSmall_IsNamed) {
  const auto offloaded = load_offloaded_causal_lm(
      GoldenPath("hf_models/llama_shared"), DeviceEntries{{"", "disk"}}, {.ring_bytes = 2000});
  EXPECT_EQ(offloaded.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(offloaded.status().message()), HasSubstr("ring of 1.95 KiB"));
}

}  // namespace
}  // namespace muster
