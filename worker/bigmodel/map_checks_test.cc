#include "worker/bigmodel/map_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
              AllOf(HasSubstr("Block up2 is not to be divided"), HasSubstr("2.93 KiB")));
}

TEST(CheckUndivided, ClassThatIsNotThere_IsNamed) {
  DeviceMapOptions options;
  options.no_split = {"Blok"};
  EXPECT_THAT(std::string(CheckUndivided(Model(), {{"cpu", 5000}}, options).message()),
              AllOf(HasSubstr("the class Blok"), HasSubstr("Block, Linear, Net")));
}

}  // namespace
}  // namespace muster
