#include "worker/text/normalizers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/text/test_parts.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using testing::Not;

AlignedText Normalized(const Json& json, absl::string_view text) {
  const auto normalizer = Ok(MakeNormalizer(json, "normalizer"));
  AlignedText aligned = AlignedText::Of(text);
  EXPECT_TRUE(normalizer->Normalize(aligned, {0, static_cast<uint32_t>(text.size())}).ok());
  EXPECT_EQ(aligned.ranges.size(), aligned.text.size());
  return aligned;
}

Json Of(const char* type) { return {{"type", type}}; }

Json Bert(Json strip_accents, bool lowercase) {
  return {{"type", "BertNormalizer"},
          {"clean_text", true},
          {"handle_chinese_chars", true},
          {"strip_accents", std::move(strip_accents)},
          {"lowercase", lowercase}};
}

TEST(Normalizers, Texts_AreChangedAsThePeerDoes) {
  EXPECT_EQ(Normalized(Of("NFC"), "e\xCC\x81").text, "é");
  EXPECT_EQ(Normalized(Of("NFD"), "é").text, "e\xCC\x81");
  EXPECT_EQ(Normalized(Of("NFKC"), "ﬁ²").text, "fi2");
  EXPECT_EQ(Normalized(Of("NFKD"), "é½").text,
            "e\xCC\x81"
            "1\xE2\x81\x84"
            "2");
  EXPECT_EQ(Normalized(Of("Nmt"),
                       "a\x07\tb\xE2\x80\x8B"
                       "c")
                .text,
            "a b c");
  EXPECT_EQ(Normalized(Of("StripAccents"), "e\xCC\x81x").text, "ex");
  EXPECT_EQ(Normalized(Of("Lowercase"), "ÀB\xC4\xB0").text, "àbi\xCC\x87");
  EXPECT_EQ(Normalized(Of("ByteLevel"), " é").text, "ĠÃ©");
  EXPECT_EQ(Normalized({{"type", "Prepend"}, {"prepend", "▁"}}, "a").text, "▁a");
  EXPECT_EQ(Normalized({{"type", "Prepend"}, {"prepend", "▁"}}, "").text, "");
  EXPECT_EQ(
      Normalized({{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}}, " a ").text,
      "a ");
  EXPECT_EQ(
      Normalized({{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}}, " \t ").text,
      "");
  EXPECT_EQ(Normalized(Bert(nullptr, true), "\tÉ中\x01").text, " e 中 ");
  EXPECT_EQ(Normalized(Bert(false, true), "É").text, "é");
  EXPECT_EQ(Normalized(Bert(true, false), "É").text, "E");
}

TEST(Normalizers, SequenceAndReplace_KeepTheAlignment) {
  const Json json = {{"type", "Sequence"},
                     {"normalizers",
                      {{{"type", "Replace"}, {"pattern", {{"Regex", " {2,}"}}}, {"content", " "}},
                       {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}}}}};
  const AlignedText aligned = Normalized(json, "a   b c");
  EXPECT_EQ(aligned.text, "a▁b▁c");
  EXPECT_EQ(aligned.OriginalOf(1, 4), (ByteRange{3, 4}));
  EXPECT_EQ(aligned.OriginalOf(4, 5), (ByteRange{4, 5}));
}

TEST(Normalizers, ComposedCharacter_StandsForItsBase) {
  const AlignedText aligned = Normalized(Of("NFC"), "xe\xCC\x81y");
  EXPECT_EQ(aligned.text, "xéy");
  EXPECT_EQ(aligned.OriginalOf(1, 3), (ByteRange{1, 2}));
  EXPECT_EQ(aligned.OriginalOf(3, 4), (ByteRange{4, 5}));
}

TEST(Normalizers, WhatIsNotSupported_IsNamed) {
  const auto status = [](const Json& json) {
    return std::string(MakeNormalizer(json, "f.normalizer").status().message());
  };
  EXPECT_THAT(status(Of("a\x1b[2J")), Not(HasSubstr("\x1b")));
  EXPECT_THAT(status(Of("Cyrillic")), HasSubstr("f.normalizer: type 'Cyrillic' is not supported"));
  EXPECT_THAT(status({{"type", "NFC"}, {"form", 2}}), HasSubstr("'form'"));
  EXPECT_THAT(status({{"type", "Sequence"}, {"normalizers", {Of("NFC"), Of("X")}}}),
              HasSubstr("f.normalizer.normalizers[1]: type 'X'"));
  EXPECT_THAT(status({{"type", "Replace"}, {"pattern", {{"Regex", "("}}}, {"content", ""}}),
              HasSubstr("f.normalizer.pattern: the regular expression"));
  EXPECT_THAT(status({{"type", "Precompiled"}, {"precompiled_charsmap", "?"}}),
              HasSubstr("precompiled_charsmap"));
  Json deep = Of("NFC");
  for (int i = 0; i < 40; ++i) deep = {{"type", "Sequence"}, {"normalizers", {deep}}};
  EXPECT_THAT(status(deep), HasSubstr("nesting this deep"));
  EXPECT_EQ(Ok(MakeNormalizer(nullptr, "n")), nullptr);
}

TEST(Normalizers, TextThatDoublesManyTimes_IsRefused) {
  const Json parts(100, Of("ByteLevel"));
  const auto normalizer = Ok(MakeNormalizer({{"type", "Sequence"}, {"normalizers", parts}}, "n"));
  AlignedText text = AlignedText::Of("中中中中中中中中");
  EXPECT_EQ(normalizer->Normalize(text, {0, 24}).code(), absl::StatusCode::kResourceExhausted);
}

TEST(Normalizers, TextThatGrowsWithoutEnd_IsRefused) {
  Json parts = Json::array();
  for (int i = 0; i < 8; ++i) {
    parts.push_back(
        {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", std::string(1000, 'x')}});
  }
  const auto normalizer =
      Ok(MakeNormalizer({{"type", "Sequence"}, {"normalizers", parts}}, "normalizer"));
  AlignedText text = AlignedText::Of("abc");
  EXPECT_EQ(normalizer->Normalize(text, {0, 3}).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace muster::text
