#include "worker/train/param_groups.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/modules/rnn.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Returns the names of `tensors` in `module`.
std::vector<std::string> NamesOf(const torch::nn::Module& module,
                                 const std::vector<at::Tensor>& tensors) {
  std::vector<std::string> names;
  for (const at::Tensor& tensor : tensors) {
    for (const auto& [name, parameter] : NamedParametersOf(module)) {
      if (parameter.is_same(tensor)) names.push_back(name);
    }
  }
  return names;
}

struct Net : torch::nn::Module {
  Net() {
    register_module("words", torch::nn::Embedding(5, 4));
    register_module("layers",
                    torch::nn::Sequential(torch::nn::Linear(4, 4),
                                          torch::nn::LayerNorm(torch::nn::LayerNormOptions({4}))));
    register_module("rnn", torch::nn::GRU(4, 4));
    register_module("head", torch::nn::Linear(4, 5));
  }
};

TEST(SplitForDecay, BiasesAndNorms_AreNotDecayed) {
  const Net net;
  const DecayLists lists = SplitForDecay(net);
  EXPECT_THAT(NamesOf(net, lists.decayed),
              ElementsAre("words.weight", "layers.0.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0",
                          "head.weight"));
  EXPECT_THAT(NamesOf(net, lists.others),
              ElementsAre("layers.0.bias", "layers.1.weight", "layers.1.bias", "rnn.bias_ih_l0",
                          "rnn.bias_hh_l0", "head.bias"));
  EXPECT_THAT(
      NamesOf(net, SplitForDecay(net, "words.*").decayed),
      ElementsAre("layers.0.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "head.weight"));
  // The model itself is a norm.
  const torch::nn::BatchNorm1d norm(3);
  EXPECT_THAT(SplitForDecay(*norm).others, SizeIs(2));
}

TEST(SplitForDecay, NamesAlone_SayBiasesAndNorms) {
  NamedParameters parameters;
  const std::vector<std::string> others = {"bias",
                                           "a.bias",
                                           "a.in_proj_bias",
                                           "rnn.bias_hh_l1",
                                           "ln.weight",
                                           "h.0.ln_1.weight",
                                           "transformer.ln_f.bias",
                                           "bn2.weight",
                                           "bn_1.gamma",
                                           "final_layernorm.weight",
                                           "blocks.0.norm1.weight",
                                           "m.LayerNorm.scale"};
  const std::vector<std::string> decayed = {
      "weight", "norm", "a.weight", "lnx.weight", "h.0.mlp.biased.weight", "abnormal"};
  for (const auto* const names : {&others, &decayed}) {
    for (const std::string& name : *names) parameters.emplace_back(name, at::ones({1}));
  }
  EXPECT_THAT(SplitForDecay(parameters).others, SizeIs(others.size()));
  EXPECT_THAT(SplitForDecay(parameters).decayed, SizeIs(decayed.size()));
}

TEST(SplitByName, FirstPatternCounts_AndTheRestIsLast) {
  const Net net;
  const std::vector<std::vector<at::Tensor>> lists =
      SplitByName(NamedParametersOf(net), {"head\\..*", ".*bias.*"});
  ASSERT_THAT(lists, SizeIs(3));
  EXPECT_THAT(NamesOf(net, lists[0]), ElementsAre("head.weight", "head.bias"));
  EXPECT_THAT(NamesOf(net, lists[1]),
              ElementsAre("layers.0.bias", "layers.1.bias", "rnn.bias_ih_l0", "rnn.bias_hh_l0"));
  EXPECT_THAT(lists[2], SizeIs(5));
}

TEST(SplitByName, TiedWeights_AreOneParameterOfOneGroup) {
  const at::Tensor tied = at::ones({2}), other = at::ones({2});
  const NamedParameters parameters = {
      {"words.weight", tied}, {"a.weight", other}, {"head.weight", tied}};
  EXPECT_THAT(SplitByName(parameters, {"words.*|head.*"})[0], SizeIs(1));
  EXPECT_THAT(SplitForDecay(parameters).decayed, SizeIs(2));
  EXPECT_THAT(ErrorOf([&] { SplitByName(parameters, {"head.*"}); }),
              AllOf(HasSubstr("'words.weight' and 'head.weight' are one tensor"),
                    HasSubstr("of the rest"), HasSubstr("'head.*'")));
  EXPECT_THAT(ErrorOf([&] { SplitForDecay(parameters, "words.*"); }), HasSubstr("the same group"));
}

TEST(SplitByName, PatternWithoutAMatch_IsNamed) {
  const Net net;
  EXPECT_THAT(ErrorOf([&] { SplitByName(NamedParametersOf(net), {"heads.*"}); }),
              AllOf(HasSubstr("no parameter's name is 'heads.*'"), HasSubstr("head.weight")));
  EXPECT_THAT(ErrorOf([&] { SplitForDecay(net, "position.*"); }), HasSubstr("'position.*'"));
  EXPECT_THAT(ErrorOf([&] { SplitForDecay(net, "("); }), HasSubstr("no regular expression"));
}

TEST(DecayGroups, OfMusterAndLibTorch_HaveTheOptions) {
  const Net net;
  const auto fused = DecayGroups(net, AdamWOptions{.lr = 0.5, .weight_decay = 0.25});
  ASSERT_THAT(fused, SizeIs(2));
  EXPECT_EQ(fused[0].options.weight_decay, 0.25);
  EXPECT_EQ(fused[1].options.weight_decay, 0);
  EXPECT_EQ(fused[1].options.lr, 0.5);
  const torch::optim::AdamW adamw(
      DecayGroups(net, torch::optim::AdamWOptions(0.5).weight_decay(0.25), "words.*"));
  ASSERT_THAT(adamw.param_groups(), SizeIs(2));
  const auto decay = [&](size_t group) {
    return static_cast<const torch::optim::AdamWOptions&>(adamw.param_groups()[group].options())
        .weight_decay();
  };
  EXPECT_EQ(decay(0), 0.25);
  EXPECT_EQ(decay(1), 0);
  EXPECT_THAT(adamw.param_groups()[1].params(), SizeIs(7));
}

TEST(DecayGroups, EmptyOnes_AreLeftOut) {
  const torch::nn::Linear linear(torch::nn::LinearOptions(2, 2).bias(false));
  EXPECT_THAT(DecayGroups(*linear, SGDOptions{.weight_decay = 1}), SizeIs(1));
  EXPECT_THAT(ErrorOf([] { DecayGroups(NamedParameters(), SGDOptions{}); }),
              HasSubstr("no parameters"));
  EXPECT_THAT(SplitForDecay(NamedParameters()).others, IsEmpty());
}

}  // namespace
}  // namespace muster
