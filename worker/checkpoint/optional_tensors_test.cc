#include "worker/checkpoint/optional_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ATen/ops/ones.h"
#include "torch/nn/module.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

struct Head : torch::nn::Module, HasOptionalTensors {
  Head() {
    register_parameter("weight", at::ones({2}));
    register_buffer("spare", at::ones({2}));
  }
  std::vector<std::string> OptionalTensors() const override { return {"spare"}; }
};

struct Net : torch::nn::Module {
  Net() {
    register_module("head", std::make_shared<Head>());
    register_parameter("spare", at::ones({2}));
  }
};

TEST(OptionalTensorsOf, ModulesAtAnyDepth_NameTheirOwn) {
  EXPECT_THAT(OptionalTensorsOf(Net()), ElementsAre("head.spare"));
  EXPECT_THAT(OptionalTensorsOf(Head()), ElementsAre("spare"));
  EXPECT_THAT(OptionalTensorsOf(torch::nn::Module("plain")), IsEmpty());
}

TEST(RemoveOptional, TensorThatFilesLack_IsRemovedIfItIsOptional) {
  const auto left = [](const std::set<std::string>& given) {
    NamedTensors targets = {{"spare", {}}, {"head.weight", {}}, {"head.spare", {}}};
    RemoveOptional(Net(), given, &targets);
    std::vector<std::string> names;
    for (const auto& [name, unused] : targets) names.push_back(name);
    return names;
  };
  EXPECT_THAT(left({}), ElementsAre("spare", "head.weight"));
  EXPECT_THAT(left({"head.spare"}), ElementsAre("spare", "head.weight", "head.spare"));
}

TEST(NamesInModel, PrefixAndRename_MakeTheModelsNames) {
  EXPECT_THAT(NamesInModel({"net.a", "net.b", "other"}, "net.",
                           [](const std::string& name) { return name + "2"; }),
              UnorderedElementsAre("a2", "b2"));
  EXPECT_THAT(NamesInModel({"net.a"}, "", nullptr), ElementsAre("net.a"));
}

}  // namespace
}  // namespace muster
