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

// Four times the size for fp32, twice the size of fp32 for fp16, as Accelerate's command says.
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

}  // namespace
}  // namespace muster::client
