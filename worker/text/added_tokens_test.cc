#include "worker/text/added_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/text/test_parts.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using Texts = std::vector<std::string>;

Json Token(uint32_t id, const char* content, const std::vector<std::string>& flags = {}) {
  Json token = {{"id", id}, {"content", content}};
  for (const char* const name : {"single_word", "lstrip", "rstrip", "normalized", "special"}) {
    token[name] = std::find(flags.begin(), flags.end(), name) != flags.end();
  }
  return token;
}

// Returns the spans of a text; added tokens are preceded by their id.
Texts Cut(const Json& tokens, absl::string_view text, const Normalizer* normalizer = nullptr) {
  const AddedTokens added = Ok(AddedTokens::Make(tokens, "added_tokens", Vocabulary(), normalizer));
  const SplitText split = Ok(added.Extract(text, normalizer));
  Texts texts;
  for (const Span& span : split.spans) {
    texts.push_back(std::string(span.added_id < 0 ? "" : std::to_string(span.added_id) + ":") +
                    std::string(split.TextOf(span)));
  }
  return texts;
}

TEST(AddedTokens, TheLongestFromTheLeft_IsCutOut) {
  const Json tokens = {Token(0, "ab"), Token(1, "abc"), Token(2, "<s>")};
  EXPECT_EQ(Cut(tokens, "xabcab<s>"), (Texts{"x", "1:abc", "0:ab", "2:<s>"}));
  EXPECT_EQ(Cut(tokens, "<s"), Texts{"<s"});
  EXPECT_EQ(Cut(tokens, ""), Texts{});
}

TEST(AddedTokens, Flags_TakeBlanksAndMindWords) {
  EXPECT_EQ(Cut(Json::array({Token(0, "<l>", {"lstrip"})}), "a  <l> b"),
            (Texts{"a", "0:  <l>", " b"}));
  EXPECT_EQ(Cut(Json::array({Token(0, "<r>", {"rstrip"})}), "a <r>\t b"),
            (Texts{"a ", "0:<r>\t ", "b"}));
  EXPECT_EQ(Cut(Json::array({Token(0, "ab", {"single_word"})}), "ab abc _ab ab"),
            (Texts{"0:ab", " abc _ab ", "0:ab"}));
  // The second one finds no more blanks to take.
  EXPECT_EQ(Cut(Json::array({Token(0, "<b>", {"lstrip", "rstrip"})}), "<b> <b>"),
            (Texts{"0:<b> ", "0:<b>"}));
}

TEST(AddedTokens, NormalizedOnes_AreLookedForInNormalizedText) {
  const auto lowercase = Ok(MakeNormalizer({{"type", "Lowercase"}}, "n"));
  const Json tokens = {Token(0, "ABC", {"normalized"}), Token(1, "XYZ")};
  EXPECT_EQ(Cut(tokens, "aBcXYZxyz", lowercase.get()), (Texts{"0:abc", "1:XYZ", "xyz"}));
}

TEST(AddedTokens, Spans_KnowTheirOriginal) {
  const auto lowercase = Ok(MakeNormalizer({{"type", "Lowercase"}}, "n"));
  const AddedTokens added = Ok(AddedTokens::Make(Json::array({Token(0, "<s>")}), "added_tokens",
                                                 Vocabulary(), lowercase.get()));
  const SplitText split = Ok(added.Extract("\xC4\xB0<s>B", lowercase.get()));
  EXPECT_EQ(TextsOf(split), (Texts{"i\xCC\x87", "<s>", "b"}));
  EXPECT_EQ(split.spans[0].original, (ByteRange{0, 2}));
  EXPECT_EQ(split.spans[1].original, (ByteRange{2, 5}));
  EXPECT_EQ(split.spans[2].original, (ByteRange{5, 6}));
}

TEST(AddedTokens, Ids_AreTheModelsOrTheNextFree) {
  Vocabulary vocabulary;
  vocabulary.Add("a", 0);
  vocabulary.Add("b", 1);
  const AddedTokens added =
      Ok(AddedTokens::Make({Token(1, "b"), Token(9, "c"), Token(3, "d", {"special"})},
                           "added_tokens", vocabulary, nullptr));
  EXPECT_EQ(added.Find("b")->id, 1u);
  EXPECT_EQ(added.Find("c")->id, 2u);
  EXPECT_EQ(added.Find(int64_t{3})->content, "d");
  EXPECT_TRUE(added.Find(int64_t{3})->special);
  EXPECT_EQ(added.Find(int64_t{9}), nullptr);
}

TEST(AddedTokens, WhatIsWrong_IsNamed) {
  const auto message = [](const Json& json) {
    return std::string(
        AddedTokens::Make(json, "f.added_tokens", Vocabulary(), nullptr).status().message());
  };
  Json token = Token(0, "a");
  token["color"] = "red";
  EXPECT_THAT(message(Json::array({token})), HasSubstr("'color'"));
  EXPECT_THAT(message(Json::array({{{"id", 0}}})),
              HasSubstr("f.added_tokens[0].content: is missing"));
  EXPECT_THAT(message(7), HasSubstr("must be a list"));
}

}  // namespace
}  // namespace muster::text
