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

DecoderConfig TiedDecoder() {
  DecoderConfig config;
  config.tie_word_embeddings = true;
  return config;
}

BertConfig Masked(bool tied) {
  BertConfig config;
  config.architecture = Architecture::kBertForMaskedLM;
  config.tie_word_embeddings = tied;
  return config;
}

TEST(ParameterNameOf, OlderAndNewerNamesOfDecoders_AreTheModels) {
  const auto name = [](const std::string& in_file) { return ParameterNameOf(Experts(2), in_file); };
  EXPECT_EQ(name("layers.0.mlp.gate.weight"), "model.layers.0.block_sparse_moe.gate.weight");
  EXPECT_EQ(name("embed_tokens.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(name("model.layers.0.self_attn.rotary_emb.inv_freq"), "");
  EXPECT_EQ(name("model.rotary_emb.inv_freq"), "");
  EXPECT_EQ(name("rotary_emb.inv_freq"), "");
  EXPECT_EQ(name("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(ParameterNameOf(Experts(0), "model.layers.0.mlp.up_proj.weight"),
            "model.layers.0.mlp.up_proj.weight");
}

TEST(ParameterNameOf, TiedHead_IsNotNeeded) {
  EXPECT_EQ(ParameterNameOf(TiedDecoder(), "lm_head.weight"), "");
}

TEST(ParameterNameOf, OlderNamesOfGpt2_AreTheModels) {
  const auto name = [](const std::string& in_file) {
    return ParameterNameOf(Gpt2Config(), in_file);
  };
  EXPECT_EQ(name("wte.weight"), "transformer.wte.weight");
  EXPECT_EQ(name("transformer.h.0.attn.c_attn.bias"), "transformer.h.0.attn.c_attn.bias");
  EXPECT_EQ(name("h.0.attn.c_attn.bias"), "transformer.h.0.attn.c_attn.bias");
  EXPECT_EQ(name("h.0.attn.bias"), "");
  EXPECT_EQ(name("transformer.h.11.attn.masked_bias"), "");
}

TEST(ParameterNameOf, OlderNamesOfBert_AreTheModels) {
  const auto name = [](const std::string& in_file) {
    return ParameterNameOf(Masked(/*tied=*/true), in_file);
  };
  EXPECT_EQ(name("bert.embeddings.LayerNorm.gamma"), "bert.embeddings.LayerNorm.weight");
  EXPECT_EQ(name("encoder.layer.0.output.LayerNorm.beta"),
            "bert.encoder.layer.0.output.LayerNorm.bias");
  EXPECT_EQ(name("cls.predictions.transform.LayerNorm.gamma"),
            "cls.predictions.transform.LayerNorm.weight");
  for (const char* const unused :
       {"bert.embeddings.position_ids", "embeddings.position_ids", "bert.pooler.dense.weight",
        "pooler.dense.bias", "cls.seq_relationship.weight", "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias"}) {
    EXPECT_EQ(name(unused), "") << unused;
  }
  EXPECT_EQ(ParameterNameOf(Masked(/*tied=*/false), "cls.predictions.decoder.bias"),
            "cls.predictions.decoder.bias");
  EXPECT_EQ(ParameterNameOf(Masked(/*tied=*/false), "cls.predictions.bias"),
            "cls.predictions.bias");
  BertConfig classes;
  classes.architecture = Architecture::kBertForSequenceClassification;
  EXPECT_EQ(ParameterNameOf(classes, "pooler.dense.bias"), "bert.pooler.dense.bias");
}

TEST(IsUnused, BiasBesideAHeadThatIsNotTied_IsTheOnlyOne) {
  EXPECT_TRUE(IsUnused(Masked(/*tied=*/false), "cls.predictions.bias"));
  EXPECT_FALSE(IsUnused(Masked(/*tied=*/true), "cls.predictions.bias"));
  EXPECT_FALSE(IsUnused(Masked(/*tied=*/false), "cls.predictions.decoder.bias"));
  EXPECT_FALSE(IsUnused(TiedDecoder(), "cls.predictions.bias"));
}

TEST(NamesOfFiles, TiedWeightUnderTheHeadsNameAlone_IsTheEmbedding) {
  const auto both =
      NamesOfFiles(TiedDecoder(), {"lm_head.weight", "embed_tokens.weight", "norm.weight"});
  EXPECT_EQ(both("lm_head.weight"), "");
  const auto alone = NamesOfFiles(TiedDecoder(), {"lm_head.weight", "model.norm.weight"});
  EXPECT_EQ(alone("lm_head.weight"), "model.embed_tokens.weight");
  const auto bert = NamesOfFiles(Masked(/*tied=*/true), {"cls.predictions.decoder.bias"});
  EXPECT_EQ(bert("cls.predictions.decoder.bias"), "cls.predictions.bias");
}

TEST(PartsOf, FusedExperts_AreTheMatricesOfEach) {
  const auto parts = [](const std::string& in_file) { return PartsOf(Experts(2), in_file); };
  EXPECT_THAT(parts("m.experts.gate_up_proj"),
              ElementsAre("m.experts.0.w1.weight", "m.experts.0.w3.weight", "m.experts.1.w1.weight",
                          "m.experts.1.w3.weight"));
  EXPECT_THAT(parts("m.experts.down_proj"),
              ElementsAre("m.experts.0.w2.weight", "m.experts.1.w2.weight"));
  EXPECT_THAT(parts("m.experts.0.w1.weight"), IsEmpty());
  EXPECT_THAT(PartsOf(Experts(0), "m.experts.down_proj"), IsEmpty());
  EXPECT_THAT(PartsOf(Gpt2Config(), "m.experts.down_proj"), IsEmpty());
}

}  // namespace
}  // namespace muster::models
