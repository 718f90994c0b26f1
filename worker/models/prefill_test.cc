#include "worker/models/prefill.h"

#include <gtest/gtest.h>

#include <limits>

namespace muster::models {
namespace {

TEST(PrefillChunk, PromptThatFits_IsReadInOnePass) {
  EXPECT_EQ(PrefillChunk(DecoderConfig(), 2048, 2048), 2048);
  EXPECT_EQ(PrefillChunk(DecoderConfig(), 1, 2048), 1);
  EXPECT_EQ(PrefillChunk(Gpt2Config(), 5000, 0), 5000);
}

TEST(PrefillChunk, LongerPrompt_IsDividedEvenly) {
  EXPECT_EQ(PrefillChunk(DecoderConfig(), 2049, 2048), 1025);
  EXPECT_EQ(PrefillChunk(Gpt2Config(), 4096, 2048), 2048);
  EXPECT_EQ(PrefillChunk(DecoderConfig(), 10, 3), 3);
  EXPECT_EQ(PrefillChunk(DecoderConfig(), 5, 1), 1);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(PrefillChunk(DecoderConfig(), kMost, kMost - 1), kMost / 2 + 1);
}

TEST(PrefillChunk, PositionsThatDependOnTheLength_AreReadInOnePass) {
  DecoderConfig config;
  config.rope.original_max_positions = 4096;
  for (const auto kind : {RopeConfig::Kind::kDynamic, RopeConfig::Kind::kLongRope}) {
    config.rope.kind = kind;
    EXPECT_EQ(PrefillChunk(config, 4097, 2048), 4097);
    EXPECT_EQ(PrefillChunk(config, 4096, 2048), 2048);
  }
  config.rope.kind = RopeConfig::Kind::kYarn;
  EXPECT_EQ(PrefillChunk(config, 4097, 2048), 1366);
}

}  // namespace
}  // namespace muster::models
