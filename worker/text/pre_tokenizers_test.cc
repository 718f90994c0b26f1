#include "worker/text/pre_tokenizers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/text/test_parts.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using testing::Not;
using Texts = std::vector<std::string>;

Texts Cut(const Json& json, absl::string_view text) {
  SplitText split = Whole(text);
  EXPECT_TRUE(Ok(MakePreTokenizer(json, "pre_tokenizer"))->Split(split).ok());
  return TextsOf(split);
}

Json Of(const char* type) { return {{"type", type}}; }

Json SplitAt(Json pattern, const char* behavior, bool invert = false) {
  return {{"type", "Split"},
          {"pattern", std::move(pattern)},
          {"behavior", behavior},
          {"invert", invert}};
}

TEST(PreTokenizers, Split_HasAllBehaviors) {
  const Json dash = {{"String", "-"}};
  const std::string text = "a--b-";
  EXPECT_EQ(Cut(SplitAt(dash, "Removed"), text), (Texts{"a", "b"}));
  EXPECT_EQ(Cut(SplitAt(dash, "Isolated"), text), (Texts{"a", "-", "-", "b", "-"}));
  EXPECT_EQ(Cut(SplitAt(dash, "MergedWithPrevious"), text), (Texts{"a-", "-", "b-"}));
  EXPECT_EQ(Cut(SplitAt(dash, "MergedWithNext"), text), (Texts{"a", "-", "-b", "-"}));
  EXPECT_EQ(Cut(SplitAt(dash, "Contiguous"), text), (Texts{"a", "--", "b", "-"}));
  EXPECT_EQ(Cut(SplitAt({{"Regex", "[ab]+"}}, "Removed", true), text), (Texts{"a", "b"}));
}

TEST(PreTokenizers, Words_AreCutAsThePeerDoes) {
  EXPECT_EQ(Cut(Of("Whitespace"), "Hi, you_2 !?"), (Texts{"Hi", ",", "you_2", "!?"}));
  EXPECT_EQ(Cut(Of("WhitespaceSplit"), " Hi,\tyou "), (Texts{"Hi,", "you"}));
  EXPECT_EQ(Cut(Of("BertPreTokenizer"), "Hi, it's"), (Texts{"Hi", ",", "it", "'", "s"}));
  EXPECT_EQ(Cut({{"type", "Digits"}, {"individual_digits", false}}, "a12b"),
            (Texts{"a", "12", "b"}));
  EXPECT_EQ(Cut({{"type", "Digits"}, {"individual_digits", true}}, "a12"), (Texts{"a", "1", "2"}));
  EXPECT_EQ(Cut(Of("Punctuation"), "a!?"), (Texts{"a", "!", "?"}));
  EXPECT_EQ(Cut({{"type", "Punctuation"}, {"behavior", "Contiguous"}}, "a!?"), (Texts{"a", "!?"}));
  EXPECT_EQ(Cut({{"type", "CharDelimiterSplit"}, {"delimiter", "|"}}, "a|b||"), (Texts{"a", "b"}));
  EXPECT_EQ(Cut({{"type", "FixedLength"}, {"length", 2}}, "aéi"), (Texts{"aé", "i"}));
  EXPECT_EQ(Cut(Of("UnicodeScripts"), "どこで文 Apples"), (Texts{"どこで文 ", "Apples"}));
}

TEST(PreTokenizers, ByteLevel_WritesBytesInItsAlphabet) {
  const Json json = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}};
  EXPECT_EQ(Cut(json, "é it's"), (Texts{"ĠÃ©", "Ġit", "'s"}));
  EXPECT_EQ(Cut(json, " a"), (Texts{"Ġa"}));
  Json whole = json;
  whole["use_regex"] = false;
  EXPECT_EQ(Cut(whole, "a b"), (Texts{"ĠaĠb"}));
  SplitText split = Whole("é b");
  const auto made = Ok(MakePreTokenizer(json, "p"));
  ASSERT_NE(made->WithoutByteAlphabet(), nullptr);
  ASSERT_TRUE(made->WithoutByteAlphabet()->Split(split).ok());
  EXPECT_EQ(TextsOf(split), (Texts{" é", " b"}));
}

TEST(PreTokenizers, Metaspace_PutsItsMarkByScheme) {
  const auto metaspace = [](Json more) {
    Json json = {{"type", "Metaspace"}, {"replacement", "▁"}};
    json.update(more);
    return json;
  };
  EXPECT_EQ(Cut(metaspace({{"prepend_scheme", "always"}, {"split", true}}), "a b  c"),
            (Texts{"▁a", "▁b", "▁", "▁c"}));
  EXPECT_EQ(Cut(metaspace({{"prepend_scheme", "never"}, {"split", false}}), "a b"), (Texts{"a▁b"}));
  // Old files.
  EXPECT_EQ(Cut(metaspace({{"add_prefix_space", true}, {"str_rep", "▁"}}), "a"), (Texts{"▁a"}));
  EXPECT_EQ(Cut(metaspace({{"add_prefix_space", false}}), "a"), (Texts{"a"}));
  const auto both =
      MakePreTokenizer(metaspace({{"add_prefix_space", false}, {"prepend_scheme", "first"}}), "p");
  EXPECT_THAT(std::string(both.status().message()), HasSubstr("p.add_prefix_space"));
  // `first` is the start of the text, not of every part.
  SplitText split = Whole("ab");
  split.spans = {{0, 1, {0, 1}}, {1, 2, {1, 2}}};
  const Json first = metaspace({{"prepend_scheme", "first"}, {"split", false}});
  ASSERT_TRUE(Ok(MakePreTokenizer(first, "p"))->Split(split).ok());
  EXPECT_EQ(TextsOf(split), (Texts{"▁a", "b"}));
}

TEST(PreTokenizers, AddedTokens_AreLeftAlone) {
  SplitText split = Whole("a b");
  split.spans[0].added_id = 7;
  const Json json = {
      {"type", "Sequence"},
      {"pretokenizers",
       {Of("WhitespaceSplit"),
        {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}}}}};
  ASSERT_TRUE(Ok(MakePreTokenizer(json, "p"))->Split(split).ok());
  EXPECT_EQ(TextsOf(split), Texts{"a b"});
}

TEST(PreTokenizers, WhatIsNotSupported_IsNamed) {
  const auto message = [](const Json& json) {
    return std::string(MakePreTokenizer(json, "f.pre_tokenizer").status().message());
  };
  EXPECT_THAT(message(Of("a\x1b[2J")), Not(HasSubstr("\x1b")));
  EXPECT_THAT(message(Of("X")), HasSubstr("f.pre_tokenizer: type 'X' is not supported"));
  EXPECT_THAT(message(SplitAt({{"String", "-"}}, "Lost")), HasSubstr("'Lost' is not supported"));
  EXPECT_THAT(message({{"type", "FixedLength"}, {"length", 0}}), HasSubstr("at least 1"));
  EXPECT_THAT(message({{"type", "CharDelimiterSplit"}, {"delimiter", "ab"}}),
              HasSubstr("one character"));
  EXPECT_EQ(Ok(MakePreTokenizer(nullptr, "p")), nullptr);
}

}  // namespace
}  // namespace muster::text
