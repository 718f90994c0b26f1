#include "worker/models/file_names.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::models {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

DecoderConfig Experts(int64_t count) {
  DecoderConfig config;
  config.num_experts = count;
  return config;
}

TEST(DecoderParameterName, OlderAndNewerNames_AreTheModels) {
  const auto name = [](const std::string& in_file) {
    return DecoderParameterName(Experts(2), in_file);
  };
  EXPECT_EQ(name("layers.0.mlp.gate.weight"), "model.layers.0.block_sparse_moe.gate.weight");
  EXPECT_EQ(name("embed_tokens.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(name("model.layers.0.self_attn.rotary_emb.inv_freq"), "");
  EXPECT_EQ(name("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(DecoderParameterName(Experts(0), "model.layers.0.mlp.up_proj.weight"),
            "model.layers.0.mlp.up_proj.weight");
}

TEST(DecoderParameterName, TiedHead_IsNotNeeded) {
  DecoderConfig config;
  config.tie_word_embeddings = true;
  EXPECT_EQ(DecoderParameterName(config, "lm_head.weight"), "");
}

TEST(DecoderPartsOf, FusedExperts_AreTheMatricesOfEach) {
  const auto parts = [](const std::string& in_file) { return DecoderPartsOf(Experts(2), in_file); };
  EXPECT_THAT(parts("m.experts.gate_up_proj"),
              ElementsAre("m.experts.0.w1.weight", "m.experts.0.w3.weight", "m.experts.1.w1.weight",
                          "m.experts.1.w3.weight"));
  EXPECT_THAT(parts("m.experts.down_proj"),
              ElementsAre("m.experts.0.w2.weight", "m.experts.1.w2.weight"));
  EXPECT_THAT(parts("m.experts.0.w1.weight"), IsEmpty());
  EXPECT_THAT(DecoderPartsOf(Experts(0), "m.experts.down_proj"), IsEmpty());
}

}  // namespace
}  // namespace muster::models
