#include "worker/text/decoders.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/text.h"
#include "worker/text/test_parts.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using Texts = std::vector<std::string>;

// Returns the text that each token produces, and the text at the end.
Texts Stream(const Json& json, const Texts& tokens) {
  const Decoder decoder = Ok(Decoder::Make(json, "decoder"));
  DecodeChain chain = decoder.NewChain();
  Texts out;
  for (const std::string& token : tokens) {
    chain.Push(token, false);
    out.push_back(Ok(chain.Take()));
    EXPECT_TRUE(IsValidUtf8(out.back()));
  }
  chain.Finish();
  out.push_back(Ok(chain.Take()));
  return out;
}

std::string Decoded(const Json& json, const Texts& tokens) {
  std::string whole;
  for (const std::string& part : Stream(json, tokens)) whole += part;
  return whole;
}

Json Of(const char* type) { return {{"type", type}}; }
Json Replace(Json pattern, const char* content) {
  return {{"type", "Replace"}, {"pattern", std::move(pattern)}, {"content", content}};
}
Json Strip(int start, int stop) {
  return {{"type", "Strip"}, {"content", " "}, {"start", start}, {"stop", stop}};
}
Json Llama() {
  return {
      {"type", "Sequence"},
      {"decoders", {Replace({{"String", "▁"}}, " "), Of("ByteFallback"), Of("Fuse"), Strip(1, 0)}}};
}

TEST(Decoders, Text_ComesAsSoonAsItIsSure) {
  EXPECT_EQ(Stream(Of("ByteLevel"), {"Ġhi", "ä¸", "Ń", "ä"}),
            (Texts{" hi", "", "中", "", "\xEF\xBF\xBD"}));
  EXPECT_EQ(Stream(Llama(), {"▁hi", "▁you", "<0xE4>", "<0xB8>", "<0xAD>", "!", "<0xE4>"}),
            (Texts{"hi", " you", "", "", "", "中!", "", "\xEF\xBF\xBD"}));
  EXPECT_EQ(Stream(nullptr, {"a", "b"}), (Texts{"a", " b", ""}));
}

TEST(Decoders, Tokens_BecomeTextAsInThePeer) {
  EXPECT_EQ(Decoded(Of("ByteLevel"), {"a b", "Ġ中"}), "a bĠ中");
  EXPECT_EQ(Decoded(Llama(), {"<0xE4>", "<0xB8>", "x"}), "\xEF\xBF\xBD\xEF\xBF\xBDx");
  EXPECT_EQ(Decoded({{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}},
                    {"it", "'", "##s", "un", "##able", ".", "do", "n't"}),
            "it 's unable. don't");
  EXPECT_EQ(Decoded({{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", false}}, {"##a", "."}),
            "##a .");
  const Json metaspace = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}};
  EXPECT_EQ(Decoded(metaspace, {"▁a▁", "b▁", "▁c"}), "ab  c");
  Json never = metaspace;
  never["prepend_scheme"] = "never";
  EXPECT_EQ(Decoded(never, {"▁a"}), " a");
  EXPECT_EQ(Decoded({{"type", "BPEDecoder"}, {"suffix", "</w>"}}, {"a", "b</w>", "c</w>"}), "ab c");
  EXPECT_EQ(Decoded({{"type", "CTC"},
                     {"pad_token", "<pad>"},
                     {"word_delimiter_token", "|"},
                     {"cleanup", true}},
                    {"h", "h", "<pad>", "h", "i", "|", "|", "y"}),
            "hhi y");
  EXPECT_EQ(Decoded(Replace({{"Regex", "[ab]+"}}, "x"), {"abc", "a"}), "xcx");
  EXPECT_EQ(Decoded(Strip(1, 2), {"  a   ", " "}), " a ");
  EXPECT_EQ(Decoded(Of("Fuse"), {}), "");
}

TEST(Decoders, ReplacedText_MayBeSpreadOverTokens) {
  const Json json = {{"type", "Sequence"},
                     {"decoders", {Of("Fuse"), Replace({{"String", "aab"}}, "X")}}};
  EXPECT_EQ(Stream(json, {"a", "a", "a", "b", "aa", "c"}),
            (Texts{"", "", "a", "X", "", "aac", ""}));
}

TEST(Decoders, AddedTokens_AreTheirOwnText) {
  const Decoder decoder = Ok(Decoder::Make(Of("ByteLevel"), "decoder"));
  DecodeChain chain = decoder.NewChain();
  chain.Push("é", true);
  chain.Push("Ã©", false);
  chain.Finish();
  EXPECT_EQ(Ok(chain.Take()), "éé");
}

TEST(Decoders, TextThatGrowsWithoutEnd_IsAnError) {
  for (const Json& pattern : {Json{{"String", "a"}}, Json{{"Regex", "a|"}}}) {
    Json parts = Json::array();
    for (int i = 0; i < 30; ++i) parts.push_back(Replace(pattern, "aaaaaaaaaa"));
    const Decoder decoder = Ok(Decoder::Make({{"type", "Sequence"}, {"decoders", parts}}, "d"));
    DecodeChain chain = decoder.NewChain();
    chain.Push("a", false);
    chain.Finish();
    EXPECT_EQ(chain.Take().status().code(), absl::StatusCode::kResourceExhausted);
  }
}

TEST(Decoders, WhatIsWrong_IsNamed) {
  const auto message = [](const Json& json) {
    return std::string(Decoder::Make(json, "f.decoder").status().message());
  };
  EXPECT_THAT(message(Of("X")), HasSubstr("f.decoder: type 'X' is not supported"));
  EXPECT_THAT(message({{"type", "Sequence"}, {"decoders", {Of("Fuse"), Of("Y")}}}),
              HasSubstr("f.decoder.decoders[1]: type 'Y'"));
  EXPECT_THAT(message({{"type", "WordPiece"}, {"prefix", "#"}}), HasSubstr("f.decoder.cleanup"));
  EXPECT_THAT(message({{"type", "Fuse"}, {"x", 1}}), HasSubstr("'x'"));
}

}  // namespace
}  // namespace muster::text
