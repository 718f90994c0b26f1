#include "base/yaml.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace muster {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

Json Parsed(absl::string_view text) {
  const auto document = ParseYaml(text, "f.yaml");
  EXPECT_TRUE(document.ok()) << document.status();
  return document.ok() ? document->value : Json("failed");
}

std::string Error(absl::string_view text) {
  const auto document = ParseYaml(text, "f.yaml");
  return document.ok() ? "accepted" : std::string(document.status().message());
}

TEST(ParseYaml, PlainWords_ResolveAsYaml11) {
  EXPECT_EQ(Parsed("[yes, Off, TRUE, no, 'no', y, ~, null, '']"),
            Json({true, false, true, false, "no", "y", nullptr, nullptr, ""}));
  EXPECT_EQ(Parsed("[7, -8, 0x1F, 0b101, 017, 1_000, 0, 18446744073709551615, 12:30, 1e3, 08]"),
            Json({7, -8, 31, 5, 15, 1000, 0, UINT64_MAX, "12:30", "1e3", "08"}));
  EXPECT_EQ(Parsed("[1.5, -.5, 1., 1.5e+3, 1.5.2, v1.0]"),
            Json({1.5, -0.5, 1.0, 1500.0, "1.5.2", "v1.0"}));
  EXPECT_EQ(Parsed("[!!str 7, !!int '7', !!float 7]"), Json({"7", 7, 7.0}));
}

TEST(ParseYaml, Empty_IsNull) {
  EXPECT_TRUE(Parsed("").is_null());
  EXPECT_TRUE(Parsed("# only a comment\n").is_null());
}

TEST(ParseYaml, Lines_AreToldByPointer) {
  const auto document = ParseYaml("a: 1\nb:\n  c/d: 2\n  e:\n  - 3\n  - 4\n", "f");
  ASSERT_TRUE(document.ok());
  EXPECT_EQ(document->lines.at("/a"), 1);
  EXPECT_EQ(document->lines.at("/b/c~1d"), 3);
  EXPECT_EQ(document->lines.at("/b/e/1"), 6);
}

TEST(ParseYaml, Order_IsThatOfTheTextOnOneLineToo) {
  const auto document = ParseYaml("b: {z: 1, a: {y: 2, x: 3}, m: 4}\na: 5\n", "f");
  ASSERT_TRUE(document.ok());
  const auto& order = document->order;
  EXPECT_LT(order.at("/b"), order.at("/a"));
  EXPECT_LT(order.at("/b/z"), order.at("/b/a"));
  EXPECT_LT(order.at("/b/a"), order.at("/b/m"));
  EXPECT_LT(order.at("/b/a/y"), order.at("/b/a/x"));
}

TEST(ParseYaml, IntegersNotWrittenAsTheyPrint_AreKeptAsWritten) {
  const auto file =
      ParseYaml("a: 010\nb: [8, 0x10, 1_000]\nc: '010'\nd: !!int 010\ne: {f: +5, g: -5}\n", "f");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->value["a"], 8);
  const std::map<std::string, std::string> expected = {
      {"/a", "010"}, {"/b/1", "0x10"}, {"/b/2", "1_000"}, {"/e/f", "+5"}};
  EXPECT_EQ(file->rewritten, expected);
}

TEST(ParseYaml, KeyTwice_NamesLineAndKey) {
  EXPECT_THAT(Error("a: 1\nb: 2\na: 3\n"), HasSubstr("f.yaml:3:1: the key \"a\" occurs twice"));
}

TEST(ParseYaml, BooleanLookingKeys_StayAsWritten) {
  EXPECT_EQ(Parsed("no: 1\n7: 2\n"), Json({{"no", 1}, {"7", 2}}));
}

TEST(ParseYaml, AnchorsAndMerges_AreExpanded) {
  EXPECT_EQ(Parsed("base: &b {x: 1, y: 2}\nnew:\n  <<: *b\n  y: 3\n")["new"],
            Json({{"x", 1}, {"y", 3}}));
  EXPECT_THAT(Error("a:\n  <<: 7\n"), HasSubstr("only maps"));
}

TEST(ParseYaml, Malformed_NamesThePlace) {
  EXPECT_THAT(Error("a: [1, 2\nb: 3"), HasSubstr("f.yaml:2:"));
  EXPECT_THAT(Error("a: 1\n---\nb: 2\n"), HasSubstr("more than one document"));
  EXPECT_THAT(Error("? [1, 2]\n: 3\n"), HasSubstr("plain text"));
  EXPECT_THAT(Error("a: !!python/object x\n"), HasSubstr("not supported"));
  EXPECT_THAT(Error("a: !!int x\n"), HasSubstr("is no int"));
  EXPECT_THAT(Error("a: 99999999999999999999\n"), HasSubstr("64 bits"));
  EXPECT_THAT(Error("a: \xff\n"), HasSubstr("UTF-8"));
  EXPECT_THAT(Error("a: *b\n"), HasSubstr("f.yaml:1:"));
  EXPECT_THAT(Error("~: 1\n"), HasSubstr("null"));
}

TEST(ParseYaml, Bombs_AreRefused) {
  std::string laughs = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n";
  for (int i = 1; i < 12; ++i) {
    const std::string last = "*a" + std::to_string(i - 1);
    laughs += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + last;
    for (int k = 0; k < 9; ++k) laughs += "," + last;
    laughs += "]\n";
  }
  EXPECT_THAT(Error(laughs), HasSubstr("values allowed"));
  EXPECT_THAT(Error(std::string(40, '[') + std::string(40, ']')), HasSubstr("levels allowed"));
  EXPECT_NE(Error(std::string(5000, '[')), "accepted");
  EXPECT_EQ(ParseYaml("abc", "f", {.max_bytes = 2}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(ParseYaml, RandomBytesOfYaml_NeverCrash) {
  const std::string seed_text =
      "a: &x [1, 'two', \"three\"]\nb: {c: *x, <<: {d: |\n  text\n}}\n- ? !!str\n";
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::string text = seed_text;
    const int edits = 1 + random() % 6;
    for (int i = 0; i < edits; ++i) {
      const size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = "[]{}:,-&*!?|>'\"\n #%~<"[random() % 21];
          break;
        case 1:
          text.erase(at, 1 + random() % 4);
          text += ' ';
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 8));
      }
    }
    (void)ParseYaml(text, "f").ok();
  }
}

}  // namespace
}  // namespace muster
