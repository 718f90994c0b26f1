#include "worker/bigmodel/module_description.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/bigmodel/empty_weights.h"
#include "worker/bigmodel/test_nets.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(DescribeModule, NamesClassesAndTies_AreThere) {
  const TextNet net = InitEmptyWeights([] { return TextNet(20, 8, 2, /*tied=*/true); });
  const auto model = DescribeModule(*net);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->root.class_name, "TextNet");
  ASSERT_EQ(model->root.children.size(), 3u);
  EXPECT_EQ(model->root.children[0].name, "embed");
  const PlannedModule& block = model->root.children[1].children[1];
  EXPECT_EQ(block.name, "1");
  EXPECT_EQ(block.class_name, "Block");
  ASSERT_EQ(block.buffers.size(), 1u);
  EXPECT_EQ(block.buffers[0].name, "table");
  EXPECT_THAT(model->tied, ElementsAre(ElementsAre("head", "embed.weight")));
  const auto sizes = ModuleSizes(*model, {});
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_EQ(sizes->at("head"), 20 * 8 * 4);
  EXPECT_EQ(sizes->at("layers.0.up"), (8 * 32 + 32) * 4);
}

TEST(DescribeModule, RealModule_IsPlannedByItsClasses) {
  const TextNet net(20, 8, 2);
  const auto model = DescribeModule(*net);
  ASSERT_TRUE(model.ok()) << model.status();
  DeviceMapOptions options;
  options.no_split = ShortClassNames({"muster::BlockImpl"});
  const auto map = InferDeviceMap(*model, {{"cpu", 5900}}, options);
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_THAT(map->devices,
              ElementsAre(Pair("head", "cpu"), Pair("embed", "cpu"), Pair("layers.0", "cpu"),
                          Pair("layers.1", "disk"), Pair("norm", "disk")));
}

TEST(ShortClassName, OfHoldersAndTemplates_IsWhatPeopleWrite) {
  EXPECT_EQ(ShortClassName("torch::nn::LinearImpl"), "Linear");
  EXPECT_EQ(ShortClassName("(anonymous namespace)::Net"), "Net");
  EXPECT_EQ(ShortClassName("a::Box<b::Impl>"), "Box<b::Impl>");
  EXPECT_EQ(ShortClassName("Impl"), "Impl");
}

}  // namespace
}  // namespace muster
