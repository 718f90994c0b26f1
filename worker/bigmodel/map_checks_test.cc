#include "worker/bigmodel/map_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

PlannedModel Model() {
  PlannedModel model;
  model.root.class_name = "Net";
  model.root.children = {
      {"up", "Linear", {{"weight", "F32", {10, 10}}}, {}, {}},
      {"up2", "Block", {{"weight", "F32", {100, 10}}}, {{"table", "F32", {5}}}, {}}};
  return model;
}

std::string Error(const DeviceEntries& devices) {
  return std::string(CheckDeviceMap(Model(), devices).message());
}

// D14: one grammar of sizes, in every reader; see Sizes.D14 in base/size_option_test.cc.
TEST(ParseMaxMemory, D14_LimitsOfDevices_AreInOrder) {
  const auto limits = ParseMaxMemory("cpu=1.5GiB, 1=20GB,0=1TB");
  ASSERT_TRUE(limits.ok()) << limits.status();
  EXPECT_THAT(*limits, ElementsAre(Pair("0", 1e12), Pair("1", 20e9), Pair("cpu", 1610612736.0)));
  EXPECT_THAT(std::string(ParseMaxMemory("0=10Gb").status().message()),
              HasSubstr("device 0: size \"10Gb\" may mean bits or bytes"));
  EXPECT_THAT(std::string(ParseMaxMemory("cpu").status().message()),
              HasSubstr("\"cpu\" is not a limit"));
  EXPECT_THAT(std::string(ParseMaxMemory("cpu=10").status().message()), HasSubstr("device cpu"));
  EXPECT_THAT(std::string(ParseMaxMemory("cuda:0=1GB").status().message()),
              HasSubstr("\"cuda:0\" is not recognized"));
  EXPECT_THAT(std::string(ParseMaxMemory("0=1GB,0=2GB").status().message()),
              HasSubstr("two limits"));
}

TEST(FindDevice, LongestEntry_Counts) {
  const DeviceEntries devices = {{"", "disk"}, {"a", "0"}, {"a.b", "cpu"}};
  EXPECT_EQ(*FindDevice(devices, "a.b.weight"), "cpu");
  EXPECT_EQ(*FindDevice(devices, "a.bc"), "0");
  EXPECT_EQ(*FindDevice(devices, "ab"), "disk");
  EXPECT_EQ(FindDevice({{"a", "0"}}, "b"), nullptr);
}

TEST(CheckDeviceMap, WhatIsWrong_IsNamed) {
  EXPECT_TRUE(CheckDeviceMap(Model(), {{"", "cpu"}}).ok());
  EXPECT_TRUE(CheckDeviceMap(Model(), {{"up", "0"}, {"up2.weight", "disk"}, {"up2", "cpu"}}).ok());
  EXPECT_THAT(Error({{"up", "cpu"}}), HasSubstr("no device for up2.table, up2.weight"));
  EXPECT_THAT(Error({{"", "cpu"}, {"upp", "0"}}),
              AllOf(HasSubstr("\"upp\", which is no module"), HasSubstr("up, up2")));
  EXPECT_THAT(Error({{"", "cuda:0"}}), HasSubstr("\"cuda:0\" is not recognized"));
  EXPECT_THAT(Error({{"", "cpu"}, {"", "disk"}}), HasSubstr("twice"));
}

TEST(CheckUndivided, BlockLargerThanEveryDevice_IsNamed) {
  DeviceMapOptions options;
  options.no_split = {"Block"};
  EXPECT_TRUE(CheckUndivided(Model(), {{"cpu", 5000}}, options).ok());
  EXPECT_TRUE(CheckUndivided(Model(), {{"0", 100}, {"cpu", 5000}}, options).ok());
  const absl::Status status = CheckUndivided(Model(), {{"0", 100}, {"cpu", 3000}}, options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("Block up2 is not to be divided"), HasSubstr("2.93 KiB"),
                    HasSubstr("leave Block out of no_split")));
}

// The remedy for a person differs from that for a program.
TEST(CheckUndivided, BlockLargerThanEveryDevice_SaysWhichFlagDividesIt) {
  DeviceMapOptions options;
  options.no_split = {"Block"};
  const DeviceLimits limits = {{"cpu", 3000}};
  EXPECT_THAT(std::string(CheckUndivided(Model(), limits, options, "--no_split").message()),
              HasSubstr("divide it (--no_split none)"));
  options.no_split = {"Block", "Linear"};
  EXPECT_THAT(std::string(CheckUndivided(Model(), limits, options, "--no_split").message()),
              HasSubstr("divide it (--no_split Linear)"));
}

TEST(CheckUndivided, TensorLargerThanEveryDevice_IsNamed) {
  EXPECT_THAT(std::string(CheckUndivided(Model(), {{"0", 100}, {"cpu", 3999}}, {}).message()),
              HasSubstr("up2.weight takes 4000 B, more than any device has (3999 B)"));
  EXPECT_TRUE(CheckUndivided(Model(), {{"disk", 0}}, {}).ok());
}

TEST(CheckUndivided, ClassThatIsNotThere_IsNamed) {
  DeviceMapOptions options;
  options.no_split = {"Blok"};
  EXPECT_THAT(std::string(CheckUndivided(Model(), {{"cpu", 5000}}, options).message()),
              AllOf(HasSubstr("the class Blok"), HasSubstr("Block, Linear, Net")));
}

}  // namespace
}  // namespace muster
