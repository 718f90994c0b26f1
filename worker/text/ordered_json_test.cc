#include "worker/text/ordered_json.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::text {
namespace {

using ::testing::HasSubstr;

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

// The square of their number would take minutes.
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
}  // namespace muster::text
