#include "client/checkpoints/memory_estimate.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;

ModelSize Llama() {
  return SizeOf({{"embed.weight", 1000, 4000, true},
                 {"layers.0.attn.q.weight", 300, 1200, true},
                 {"layers.0.mlp.weight", 900, 3600, true},
                 {"layers.1.attn.q.weight", 300, 1200, true},
                 {"layers.1.mlp.weight", 901, 3604, true},
                 {"layers.1.mlp.experts.7.weight", 0, 0, true},
                 {"ids", 10, 80, false},
                 {"head.weight", 1000, 4000, true}});
}

TEST(SizeOf, LargestPart_IsABlockOrAModule) {
  const ModelSize size = Llama();
  EXPECT_EQ(size.tensors, 8);
  EXPECT_EQ(size.elements, 4401);
  EXPECT_EQ(size.other_bytes, 80);
  EXPECT_EQ(size.largest, "layers.1");
  EXPECT_EQ(size.largest_elements, 1201);
  EXPECT_EQ(SizeOf({}).largest_elements, 0);
  EXPECT_EQ(SizeOf({{"weight", 3, 12, true}}).largest, "");
}

// Four times the size for fp32, twice the fp32 size for fp16, as in Accelerate's command.
TEST(EstimateDtype, Training_IsFourTimesTheType) {
  const ModelSize size = Llama();
  EXPECT_EQ(EstimateDtype(size, "float32")->total, 4 * 4401 + 80);
  EXPECT_EQ(EstimateDtype(size, "float32")->training, 16 * 4401 + 80);
  EXPECT_EQ(EstimateDtype(size, "bfloat16")->training, 8 * 4401 + 80);
  EXPECT_EQ(EstimateDtype(size, "int8")->largest, 1201);
  EXPECT_EQ(EstimateDtype(size, "int4")->largest, 601);
  EXPECT_LT(EstimateDtype(size, "int4")->training, 0);
  EXPECT_THAT(std::string(EstimateDtype(size, "fp9").status().message()), HasSubstr("fp9"));
}

TEST(EstimateStrategies, EachDividesMoreThanTheOneBefore) {
  const ModelSize size = SizeOf({{"layers.0.w", 1000, 4000, true},
                                 {"layers.1.w", 1000, 4000, true},
                                 {"layers.2.w", 1000, 4000, true},
                                 {"layers.3.w", 1000, 4000, true},
                                 {"layers.4.w", 1000, 4000, true}});
  const auto all = EstimateStrategies(size, /*processes=*/4, /*group_size=*/2, 8);
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(all[0].total(), 16 * 5000);
  EXPECT_EQ(all[1].parameters, 20000);
  EXPECT_EQ(all[1].gradients + all[1].gathered, 20000);
  EXPECT_EQ(all[1].states, 10000);
  EXPECT_EQ(all[2].total(), 20000 + 5000 + 10000 + 3 * 4000);
  EXPECT_EQ(all[3].strategy, "zero3");
  EXPECT_EQ(all[3].total(), 16 * 5000 / 4 + 3 * 4000);
  EXPECT_EQ(all[4].strategy, "hybrid");
  EXPECT_EQ(all[4].total(), 16 * 5000 / 2 + 3 * 4000);
  EXPECT_EQ(EstimateStrategies(size, 1, 1, 8).size(), 1u);
  EXPECT_EQ(EstimateStrategies(size, 4, 4, 8).size(), 4u);
}

TEST(EstimateStrategies, OptimizerInBackward_HasGradientsOfThreeUnits) {
  ModelSize size;
  size.elements = 1000;
  size.largest_elements = 40;
  const auto all = EstimateStrategies(size, 4, 2, 8, {.optimizer_in_backward = true});
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(all[0].gradients, 4000);  // no_shard
  for (const int row : {1, 2, 3}) EXPECT_EQ(all[row].gradients, 3 * 40) << all[row].strategy;
  EXPECT_EQ(all[4].gradients, 3 * 80);
  EXPECT_EQ(all[1].gathered, 3 * 160);
  const auto one = EstimateStrategies(size, 1, 1, 8, {.optimizer_in_backward = true});
  ASSERT_EQ(one.size(), 2u);
  EXPECT_EQ(one[1].strategy, "zero2");
  EXPECT_EQ(one[1].gradients + one[1].gathered, 4 * 160);
  EXPECT_EQ(one[1].states, 8000);
}

// As in transformers: no part of them is larger than the layer.
TEST(SizeOf, EmbeddingsOfWordsAndPositions_AreOnePart) {
  const auto tensor = [](const std::string& name, int64_t elements) {
    return EstimatedTensor{.name = name, .elements = elements, .bytes = 4 * elements};
  };
  const std::vector<EstimatedTensor> bert = {
      tensor("bert.embeddings.word_embeddings.weight", 60),
      tensor("bert.embeddings.position_embeddings.weight", 30),
      tensor("bert.embeddings.LayerNorm.weight", 5), tensor("bert.embeddings_project.weight", 1),
      tensor("bert.encoder.layer.0.w", 70)};
  EXPECT_EQ(SizeOf(bert).largest, "bert.embeddings");
  EXPECT_EQ(SizeOf(bert).largest_elements, 95);
  // Without word embeddings it is not such a module.
  EXPECT_EQ(SizeOf({tensor("embeddings.a.weight", 3), tensor("embeddings.b.weight", 4)}).largest,
            "embeddings.b");
}

// Blocks of 100 million elements in two tensors each: states of 0.8 GB a block.
TEST(EstimateStrategies, Offload_TakesStatesAndPartsAway) {
  std::vector<EstimatedTensor> tensors = {{"ids", 2, 16, false}};
  for (const char* const name : {"layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"}) {
    tensors.push_back({name, 50'000'000, 200'000'000, true});
  }
  const ModelSize size = SizeOf(tensors);
  constexpr int64_t kWhole = 800'000'000, kStates = 2 * kWhole, kUnit = 400'000'000;
  using Place = EstimatedOffload::Place;
  auto all = EstimateStrategies(size, 1, 1, 8, {.optimizer = Place::kDisk});
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].offloaded, kStates);
  EXPECT_EQ(all[0].states, 3 * 400'000'000);  // those of the largest parameter are more than 64 MiB
  all = EstimateStrategies(size, 1, 1, 8, {.optimizer = Place::kCpu});
  EXPECT_EQ(all[0].states, 400'000'000);
  all = EstimateStrategies(size, 1, 1, 8, {.optimizer = Place::kDisk, .parameters = Place::kDisk});
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].parameters, kWhole + 16);
  EXPECT_EQ(all[1].strategy, "zero3");
  EXPECT_EQ(all[1].offloaded, kStates + 2 * kWhole);
  EXPECT_EQ(all[1].parameters, 2 * kUnit + 16);
  EXPECT_EQ(all[1].gradients, 2 * kUnit);  // not more than exist
  EXPECT_EQ(all[1].gathered, 3 * kUnit);
  all = EstimateStrategies(size, 40, 4, 8, {.optimizer = Place::kDisk, .parameters = Place::kDisk});
  ASSERT_EQ(all.size(), 5u);
  // States of a part: 20 MB of a unit, less than a window, and all of them less than three windows.
  EXPECT_EQ(all[1].states, kStates / 40);
  EXPECT_EQ(all[1].offloaded, kStates / 40);
  EXPECT_EQ(all[3].offloaded, (kStates + 2 * kWhole) / 40);
  EXPECT_EQ(all[3].parameters, kWhole / 40 + 16);
  EXPECT_EQ(all[4].offloaded, (kStates + 2 * kWhole) / 4);
  EXPECT_EQ(all[4].parameters, 2 * kUnit / 4 + 16);
  all = EstimateStrategies(size, 1, 1, 8,
                           {.parameters = Place::kDisk, .optimizer_in_backward = true});
  EXPECT_EQ(all[2].offloaded, 2 * kWhole);
  all = EstimateStrategies(size, 1, 1, 8, {.gradients = Place::kDisk});
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].offloaded, 0) << "whole gradients are not divided";
  EXPECT_EQ(all[1].strategy, "zero2");
  EXPECT_EQ(all[1].offloaded, kWhole);
  // Eight blocks as large as one of these.
  ModelSize deep;
  deep.elements = 8 * kUnit / 4;
  deep.largest_elements = kUnit / 4;
  all = EstimateStrategies(deep, 4, 4, 8, {.parameters = Place::kDisk});
  EXPECT_EQ(all[3].parameters, 2 * kUnit / 4);
  EXPECT_EQ(all[3].gradients, 3 * kUnit / 4);
  EXPECT_EQ(all[3].offloaded, 2 * 8 * kUnit / 4);
  EXPECT_EQ(all[2].gradients, 8 * kUnit / 4);
  all = EstimateStrategies(deep, 4, 2, 8, {.gradients = Place::kCpu});
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(all[0].gradients, 4 * 8 * kUnit / 4);
  for (const size_t row : {1, 2, 3}) {
    EXPECT_EQ(all[row].gradients, 3 * kUnit / 4) << row;
    EXPECT_EQ(all[row].offloaded, 8 * kUnit / 4) << row;
  }
  EXPECT_EQ(all[4].gradients, 3 * kUnit / 2);
  EXPECT_EQ(all[4].offloaded, 8 * kUnit / 2);
  // The gradients of zero1 are whole until the end of the backward pass.
  EXPECT_EQ(all[1].gradients + all[1].gathered, 4 * 8 * kUnit / 4);
  EXPECT_EQ(all[3].parameters, 8 * kUnit / 4);
  // Together with the parameters they have one place.
  all = EstimateStrategies(deep, 4, 4, 8, {.gradients = Place::kDisk, .parameters = Place::kDisk});
  EXPECT_EQ(all[3].offloaded, 2 * 8 * kUnit / 4);
  EXPECT_EQ(all[2].offloaded, 8 * kUnit / 4);
}

}  // namespace
}  // namespace muster::client
