#include "worker/data/sampler_shard.h"

#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using Batches = std::vector<std::vector<int64_t>>;

TEST(BatchSamplerShard, EveryConfiguration_RealSamplesCoverTheOrderOnce) {
  for (int world : {1, 2, 3, 5}) {
    for (int64_t per_rank : {1, 2, 4}) {
      for (int64_t length : {0, 1, 2, 7, 8, 24, 25, 61}) {
        for (int mode = 0; mode < 16; ++mode) {
          ShardOptions options;
          options.world_size = world;
          options.split_batches = mode & 1;
          options.even_batches = mode & 2;
          options.drop_last = mode & 4;
          options.dispatch = mode & 8;
          const int64_t batch_size = options.split_batches ? per_rank * world : per_rank;
          const auto shard = BatchSamplerShard::Create(options, length, batch_size);
          ASSERT_TRUE(shard.ok()) << shard.status();
          std::vector<int> seen(static_cast<size_t>(length), 0);
          for (int64_t round = 0; round < shard->NumRounds(); ++round) {
            int64_t real = 0;
            for (int rank = 0; rank < world; ++rank) {
              const BatchSlice slice = shard->Slice(rank, round);
              EXPECT_EQ(round<shard->NumBatches(rank), slice.size()> 0);
              std::vector<int64_t> positions;
              slice.AppendPositions(&positions);
              for (int64_t i = 0; i < slice.real; ++i) ++seen[static_cast<size_t>(positions[i])];
              for (int64_t position : positions) EXPECT_LT(position, length);
              real += slice.real;
              if (TailRuleOf(options) != TailRule::kShort) {
                EXPECT_EQ(slice.size(), shard->Slice(0, round).size());
              }
            }
            EXPECT_EQ(real, shard->RealSamples(round));
          }
          const int64_t global = per_rank * world;
          const int64_t expected = options.drop_last ? length / global * global : length;
          for (int64_t i = 0; i < length; ++i) {
            EXPECT_EQ(seen[static_cast<size_t>(i)], i < expected ? 1 : 0);
          }
        }
      }
    }
  }
}

TEST(BatchSamplerShard, PassFromAPosition_ContinuesWhereTheOtherWorldStopped) {
  ShardOptions four;
  four.world_size = 4;
  const auto before = BatchSamplerShard::Create(four, 50, 3);
  ASSERT_TRUE(before.ok());
  const int64_t position = before->Skip(2);
  EXPECT_EQ(position, 24);
  ShardOptions two;
  two.world_size = 2;
  const auto after = BatchSamplerShard::Create(two, 50, 5);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(after->NumRounds(position), 3);
  EXPECT_EQ(after->Slice(1, 0, position).begin, 29);
  EXPECT_EQ(after->Slice(0, 2, position).real, 5);
  EXPECT_EQ(after->Slice(1, 2, position).real, 1);
  // Padding is the same as without the restart: the first samples of the epoch.
  std::vector<int64_t> positions;
  after->Slice(1, 2, position).AppendPositions(&positions);
  EXPECT_EQ(positions, (std::vector<int64_t>{49, 0, 1, 2, 3}));
  EXPECT_EQ(after->NumRounds(50), 0);
  EXPECT_EQ(after->Skip(1LL << 40, position), 50);
}

TEST(BatchSamplerShard, CustomBatches_TailRulesAndPositions) {
  const Batches batches = {{9, 8}, {7}, {6, 5, 4}, {3}, {2, 1}};
  ShardOptions options;
  options.world_size = 2;
  EXPECT_EQ(*ShardCustomBatches(options, 1, batches), (Batches{{7}, {3}, {9, 8}}));
  options.even_batches = false;
  EXPECT_EQ(*ShardCustomBatches(options, 1, batches), (Batches{{7}, {3}}));
  options.dispatch = true;  // round 2 holds {6, 5, 4, 3}, round 3 {2, 1}
  EXPECT_EQ(*ShardCustomBatches(options, 1, batches), (Batches{{7, 9}, {4, 3}, {1}}));

  const auto shard = BatchSamplerShard::CreateCustom(options, {2, 1, 3, 1, 2});
  ASSERT_TRUE(shard.ok());
  EXPECT_EQ(shard->Skip(1), 3);
  EXPECT_EQ(shard->NumRounds(3), 2);
  EXPECT_EQ(shard->RealSamples(0, 3), 4);
  EXPECT_FALSE(shard->round_size().has_value());
}

// Accelerate drops an empty batch of a round that is not full, for some ranks only.
TEST(ShardCustomBatches, EmptyBatches_CountAsBatchesOnEveryRank) {
  const Batches batches = {{0, 1}, {}, {2}, {}};
  const ShardOptions options = {.world_size = 3};
  EXPECT_EQ(*ShardCustomBatches(options, 0, batches), (Batches{{0, 1}, {}}));
  EXPECT_EQ(*ShardCustomBatches(options, 1, batches), (Batches{{}, {0, 1}}));
  EXPECT_EQ(*ShardCustomBatches(options, 2, batches), (Batches{{2}, {}}));
}

TEST(BatchSamplerShard, BadArguments_AreNamed) {
  ShardOptions options;
  options.world_size = 2;
  EXPECT_THAT(BatchSamplerShard::Create(options, 5, 0).status().message(),
              HasSubstr("batch_size is 0"));
  EXPECT_THAT(BatchSamplerShard::Create(options, -1, 1).status().message(),
              HasSubstr("length is -1"));
  EXPECT_THAT(ShardStream({}, 0, -1, 2).status().message(), HasSubstr("length is -1"));
  EXPECT_THAT(BatchSamplerShard::Create({.world_size = 4}, 9, std::numeric_limits<int64_t>::max())
                  .status()
                  .message(),
              HasSubstr("too large for 4 processes"));
  EXPECT_THAT(BatchSamplerShard::CreateCustom(options, {3, 2, 3}, 3).status().message(),
              HasSubstr("batch 1 of the batch sampler has 2 samples"));
  options.split_batches = true;
  EXPECT_THAT(BatchSamplerShard::CreateCustom(options, {3, 2, 3}).status().message(),
              HasSubstr("has no batch size"));
  options.world_size = 0;
  EXPECT_THAT(BatchSamplerShard::Create(options, 5, 1).status().message(),
              HasSubstr("world_size is 0"));
}

}  // namespace
}  // namespace muster
