#include "worker/text/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::text {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

TEST(Settings, FieldsOfTheRightKind_AreRead) {
  const Json json = {{"b", true}, {"s", "x"}, {"c", "▁"}, {"n", 7}, {"w", "two"}, {"l", {1, 2}}};
  Settings settings(json, "file.part");
  EXPECT_TRUE(settings.Bool("b"));
  EXPECT_FALSE(settings.Bool("none", false));
  EXPECT_EQ(settings.String("s"), "x");
  EXPECT_EQ(settings.Character("c"), "▁");
  EXPECT_EQ(settings.Count("n", 10), 7);
  EXPECT_EQ(settings.Choice("w", {"one", "two"}), 1u);
  EXPECT_EQ(settings.Choice("none", {"one", "two"}, 1), 1u);
  EXPECT_EQ(settings.List("l").size(), 2u);
  EXPECT_TRUE(settings.Finish().ok()) << settings.Finish();
}

TEST(Settings, TheFirstFault_IsNamedWithItsPath) {
  const Json json = {{"b", 1}, {"c", "ab"}, {"n", -1}};
  Settings settings(json, "file.part");
  settings.Bool("b");
  settings.Character("c");
  EXPECT_EQ(settings.Finish().message(), "file.part.b: must be true or false, is number");
  Settings number(json, "p");
  number.Count("n", 5);
  EXPECT_THAT(std::string(number.status().message()), HasSubstr("p.n: must be a whole number"));
  Settings missing(json, "p");
  missing.String("s");
  EXPECT_EQ(missing.status().message(), "p.s: is missing");
}

TEST(Settings, WhatIsNotKnown_IsRefusedByName) {
  const Json json = {{"type", "X"}, {"surprise", 1}};
  Settings settings(json, "p");
  EXPECT_EQ(settings.Type(), "X");
  EXPECT_EQ(settings.Finish().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(settings.Finish().message()), HasSubstr("'surprise'"));
  const Json word = {{"w", "three"}};
  Settings choice(word, "p");
  choice.Choice("w", {"one", "two"});
  EXPECT_THAT(std::string(choice.status().message()), HasSubstr("p.w: 'three' is not supported"));
  Settings list(Json::array(), "p");
  EXPECT_EQ(list.status().message(), "p: must be an object, is array");
}

}  // namespace
}  // namespace muster::text
