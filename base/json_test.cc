#include "base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/mutate.h"
#include "base/ordered_json.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

std::string Error(absl::string_view text) {
  const auto value = ParseJson(text, "f.json");
  return value.ok() ? "accepted" : std::string(value.status().message());
}

TEST(ParseJson, ExactIntegers_Survive) {
  const auto value = ParseJson("{\"a\":18446744073709551615,\"b\":-9223372036854775808}", "f");
  ASSERT_TRUE(value.ok());
  EXPECT_EQ((*value)["a"].get<uint64_t>(), UINT64_MAX);
  EXPECT_EQ((*value)["b"].get<int64_t>(), INT64_MIN);
}

TEST(ParseJson, Malformed_NamesLineAndColumn) {
  EXPECT_THAT(Error("{\n  \"a\": 1,\n}"), HasSubstr("f.json:3:1: "));
  EXPECT_THAT(Error("[1] 2"), HasSubstr("f.json:1:5: "));
  EXPECT_THAT(Error(absl::string_view("{}\0", 3)), HasSubstr("zero byte"));
  EXPECT_THAT(Error("\xEF\xBB\xBF{}"), HasSubstr("byte order mark"));
  EXPECT_THAT(Error("{\"a\":\"\xff\"}"), HasSubstr("UTF-8"));
  EXPECT_THAT(Error("{\"a\":1e999}"), HasSubstr("f.json: number overflow parsing"));
  EXPECT_NE(Error("[NaN]"), "accepted");
  EXPECT_NE(Error("[1] // x"), "accepted");
}

TEST(ParseJson, NameTwice_IsRefusedAtEveryLevel) {
  EXPECT_THAT(Error("{\"a\":1,\"a\":2}"), HasSubstr("\"a\" occurs twice"));
  EXPECT_THAT(Error("[{\"a\":{\"b\":1,\"b\":2}}]"), HasSubstr("\"b\" occurs twice"));
  EXPECT_EQ(Error("[{\"a\":1},{\"a\":{\"a\":2}}]"), "accepted");
}

TEST(ParseJson, BeyondLimits_IsRefusedWithoutGrowth) {
  EXPECT_THAT(Error(std::string(1'000'000, '[')), HasSubstr("64 levels"));
  EXPECT_EQ(ParseJson("[1,2]", "f", {.max_bytes = 4}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// Linear in the number of objects: it takes a fraction of a second.
TEST(ParseJson, ManyObjects_AreRead) {
  std::string text = "[{}";
  for (int i = 1; i < 200'000; ++i) text += ",{\"a\":1}";
  const auto json = ParseJson(text + "]", "f");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->size(), 200'000u);
  EXPECT_EQ((*json)[199'999]["a"], 1);
}

TEST(ParseJson, ValuesOfAllKinds_AreThoseOfTheLibrary) {
  const std::string text =
      R"({"n":null,"t":true,"i":-3,"u":18446744073709551615,"f":1.5,"s":"x","a":[1,[],{}],)"
      R"("o":{"a":[{"b":[[2]]},3]},"e":{}})";
  EXPECT_EQ(*ParseJson(text, "f"), nlohmann::json::parse(text));
  EXPECT_EQ(*ParseJson(" 7 ", "f"), 7);
  EXPECT_FALSE(ParseJson("1e400", "f").ok());
}

TEST(ParseJson, MutatedTexts_AreReadOrRefused) {
  std::mt19937_64 random(20261121);
  int read = 0;
  for (int round = 0; round < 20'000; ++round) {
    const std::string text =
        Mutate(R"({"a": [1, -2.5e3, true, null], "b": {"c": "\u00e9\n", "d": {}}})", random);
    const auto json = ParseJson(text, "f");
    if (!json.ok()) continue;
    ++read;
    ASSERT_TRUE(ParseJson(json->dump(), "f").ok()) << text;
  }
  EXPECT_GT(read, 100);
}

TEST(ParseOrderedJson, ValuesOfEveryKind_StayInTheirOrder) {
  for (const std::string text :
       {R"({"z":{"b":[1,-2,{"y":null,"x":{}},[]],"a":""},"m":[],"c":{"q":{"p":true},"o":0.5}})",
        "[[],{},[{\"b\":1,\"a\":2}],\"\xC3\xA9\",18446744073709551615]", "7", "null", "\"a\""}) {
    const auto json = ParseOrderedJson(text, "f.json");
    ASSERT_TRUE(json.ok()) << json.status();
    EXPECT_EQ(json->dump(), text);
  }
}

TEST(ParseOrderedJson, WhatParseJsonRefuses_IsRefused) {
  EXPECT_THAT(std::string(ParseOrderedJson("{\"a\":1,\"a\":2}", "f.json").status().message()),
              HasSubstr("occurs twice"));
  EXPECT_THAT(std::string(ParseOrderedJson("{\"a\":1}}", "f.json").status().message()),
              HasSubstr("f.json:1:8"));
  EXPECT_EQ(ParseOrderedJson("[[1]]", "f.json", {.max_depth = 1}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ParseOrderedJson("[1]", "f.json", {.max_bytes = 2}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// Time that grows with the square of the number of names would be minutes.
TEST(ParseOrderedJson, ManyNames_AreRead) {
  std::string text = "{";
  for (int i = 500'000; i > 0; --i) absl::StrAppend(&text, "\"<token_", i, ">\":", i, ",");
  text.back() = '}';
  const auto json = ParseOrderedJson(text, "f.json");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->size(), 500'000);
  EXPECT_EQ(json->begin().key(), "<token_500000>");
}

}  // namespace
}  // namespace muster
