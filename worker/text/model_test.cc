#include "worker/text/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "base/text.h"
#include "worker/text/byte_alphabet.h"
#include "worker/text/test_parts.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// Returns "text[begin,end)" of each token, with the text of the vocabulary.
std::string Cut(const Model& model, absl::string_view word) {
  std::vector<Token> tokens;
  const auto scratch = model.NewScratch();
  // The second result comes from the cache.
  for (int i = 0; i < 2; ++i) {
    tokens.clear();
    const absl::Status status = model.Tokenize(word, *scratch, tokens);
    if (!status.ok()) return std::string(status.message());
  }
  std::string out;
  for (const Token& token : tokens) {
    const std::string* const text = model.vocabulary().Text(token.id);
    out += (out.empty() ? "" : " ") + (text == nullptr ? "?" : *text);
    if (token.unknown) out += "!";
    out += std::to_string(token.begin) + std::to_string(token.end);
  }
  return out;
}

std::string Cut(const Json& json, absl::string_view word) {
  return Cut(*Ok(MakeModel(json, "model")), word);
}

Json Bpe(Json more = Json::object()) {
  Json json = {
      {"type", "BPE"},
      {"vocab", {{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"abc", 4}, {"bc", 5}, {"?", 6}}},
      {"merges", Json::array({Json::array({"b", "c"}), Json::array({"a", "b"}),
                              Json::array({"ab", "c"}), Json::array({"a", "bc"})})}};
  json.update(more);
  return json;
}

TEST(Bpe, Merges_AreDoneInTheirOrderFromTheLeft) {
  EXPECT_EQ(Cut(Bpe(), "abc"), "abc03");
  EXPECT_EQ(Cut(Bpe(), "abab"), "ab02 ab24");
  EXPECT_EQ(Cut(Bpe(), "cab"), "c01 ab13");
  // Old files write "a b".
  EXPECT_EQ(Cut(Bpe({{"merges", {"#version: 0.2", "b c", "a b"}}}), "abc"), "a01 bc13");
}

TEST(Bpe, WhatIsUnknown_FollowsTheFlags) {
  EXPECT_EQ(Cut(Bpe(), "axb"), "ab02");  // ignored, as in the tokenizers library
  EXPECT_EQ(Cut(Bpe({{"unk_token", "?"}}), "axyb"), "a01 ?12 ?23 b34");
  EXPECT_EQ(Cut(Bpe({{"unk_token", "?"}, {"fuse_unk", true}}), "axyb"), "a01 ?13 b34");
  EXPECT_THAT(Cut(Bpe({{"unk_token", "none"}}), "x"),
              HasSubstr("\"none\" is not in its vocabulary"));
  Json bytes = Bpe({{"byte_fallback", true}, {"unk_token", "?"}});
  bytes["vocab"]["<0xC3>"] = 7;
  bytes["vocab"]["<0xA9>"] = 8;
  EXPECT_EQ(Cut(bytes, "aé"), "a01 <0xC3>12 <0xA9>23");
  EXPECT_EQ(Cut(bytes, "è"), "?02");
}

TEST(Bpe, PrefixSuffixAndWholeWords_AreLookedUp) {
  Json json = Bpe({{"continuing_subword_prefix", "##"}, {"merges", {"a ##b"}}});
  json["vocab"]["##b"] = 9;
  EXPECT_EQ(Cut(json, "ab"), "ab02");
  Json suffix = Bpe({{"end_of_word_suffix", "</w>"}, {"merges", Json::array()}});
  suffix["vocab"]["b</w>"] = 9;
  EXPECT_EQ(Cut(suffix, "ab"), "a01 b</w>12");
  Json whole = Bpe({{"ignore_merges", true}, {"merges", Json::array()}});
  EXPECT_EQ(Cut(whole, "abc"), "abc03");
  EXPECT_EQ(Cut(whole, "abcc"), "a01 b12 c23 c34");
}

// A model with all bytes and random merges, and the same model for bytes.
TEST(Bpe, OfBytes_GivesTheTokensOfTheAlphabet) {
  std::mt19937_64 random(5);
  Json json = {{"type", "BPE"}, {"vocab", Json::object()}, {"merges", Json::array()}};
  std::vector<std::string> tokens;
  for (const char32_t c : kByteAlphabet) {
    std::string text;
    AppendUtf8(text, c);
    json["vocab"][text] = tokens.size();
    tokens.push_back(text);
  }
  const std::string letters = "abcde";
  for (int i = 0; i < 200; ++i) {
    const auto pick = [&] {
      return random() % 2 == 0 ? std::string(1, letters[random() % letters.size()])
                               : tokens[random() % tokens.size()];
    };
    const std::string left = pick(), right = pick();
    if (json["vocab"].contains(left + right)) continue;
    json["vocab"][left + right] = tokens.size();
    json["merges"].push_back(Json::array({left, right}));
    tokens.push_back(left + right);
  }
  for (const bool ignore_merges : {false, true}) {
    json["ignore_merges"] = ignore_merges;
    const auto model = Ok(MakeModel(json, "model"));
    ASSERT_NE(model->OfBytes(), nullptr);
    const auto scratch = model->NewScratch(), of_bytes = model->OfBytes()->NewScratch();
    for (int i = 0; i < 3'000; ++i) {
      std::string word, written;
      // Beyond 64 symbols merging works by a heap.
      for (uint64_t n = random() % (i % 50 == 0 ? 400 : 12) + 1; n > 0; --n) {
        word += random() % 4 == 0 ? static_cast<char>(random()) : letters[random() % 5];
        AppendUtf8(written, CharacterOfByte(static_cast<unsigned char>(word.back())));
      }
      std::vector<Token> got, want;
      ASSERT_TRUE(model->OfBytes()->Tokenize(word, *of_bytes, got).ok());
      ASSERT_TRUE(model->Tokenize(written, *scratch, want).ok());
      ASSERT_EQ(got.size(), want.size());
      for (size_t t = 0; t < got.size(); ++t) {
        ASSERT_EQ(got[t].id, want[t].id);
        ASSERT_EQ(got[t].end - got[t].begin, CountCharacters(absl::string_view(written).substr(
                                                 want[t].begin, want[t].end - want[t].begin)));
      }
    }
  }
}

// The plain algorithm, for comparison.
std::vector<std::string> MergeSlowly(
    std::vector<std::string> parts,
    const std::vector<std::pair<std::string, std::string>>& merges) {
  for (;;) {
    size_t best = merges.size(), at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      for (size_t m = 0; m < best; ++m) {
        if (merges[m] == std::make_pair(parts[i], parts[i + 1])) best = m, at = i;
      }
    }
    if (best == merges.size()) return parts;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
}

TEST(Bpe, RandomMerges_AreThoseOfThePlainAlgorithm) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::string> tokens = {"a", "b", "c"};
    std::vector<std::pair<std::string, std::string>> merges;
    for (int i = 0; i < 12; ++i) {
      const std::string left = tokens[random() % tokens.size()];
      const std::string right = tokens[random() % tokens.size()];
      if (std::find(tokens.begin(), tokens.end(), left + right) == tokens.end()) {
        tokens.push_back(left + right);
      }
      if (std::find(merges.begin(), merges.end(), std::make_pair(left, right)) == merges.end()) {
        merges.emplace_back(left, right);
      }
    }
    Json json = {{"type", "BPE"}, {"vocab", Json::object()}, {"merges", Json::array()}};
    for (const std::string& token : tokens) json["vocab"][token] = json["vocab"].size();
    for (const auto& [left, right] : merges) json["merges"].push_back(Json::array({left, right}));
    const auto model = Ok(MakeModel(json, "model"));
    const auto scratch = model->NewScratch();
    for (int i = 0; i < 20; ++i) {
      std::string word;
      for (uint64_t n = random() % (i == 0 ? 150 : 20) + 1; n > 0; --n) {
        word += static_cast<char>('a' + random() % 3);
      }
      std::vector<std::string> letters;
      for (const char c : word) letters.emplace_back(1, c);
      std::vector<Token> got;
      ASSERT_TRUE(model->Tokenize(word, *scratch, got).ok());
      std::vector<std::string> texts;
      for (const Token& token : got) texts.push_back(*model->vocabulary().Text(token.id));
      ASSERT_EQ(texts, MergeSlowly(letters, merges)) << json << " of " << word;
    }
  }
}

Json Piece(const char* text, double score) { return Json::array({text, score}); }

Json Unigram(Json more = Json::object()) {
  Json json = {{"type", "Unigram"},
               {"unk_id", 0},
               {"vocab", Json::array({Piece("<unk>", 0.0), Piece("a", -1.0), Piece("b", -1.5),
                                      Piece("ab", -2.0), Piece("abc", -9.0), Piece("xy", -3.0)})}};
  json.update(more);
  return json;
}

TEST(Unigram, TheLargestSum_Wins) {
  EXPECT_EQ(Cut(Unigram(), "ab"), "ab02");
  EXPECT_EQ(Cut(Unigram(), "aba"), "ab02 a23");
  EXPECT_EQ(Cut(Unigram(), "abc"), "abc03");
  EXPECT_EQ(Cut(Unigram(), "azzb"), "a01 <unk>!13 b34");
  EXPECT_EQ(Cut(Unigram(), "xz"), "<unk>!02");
  EXPECT_THAT(Cut(Unigram({{"unk_id", nullptr}}), "az"), HasSubstr("no piece covers \"z\""));
}

// "d" is not a piece of its own, but "bd" makes a better way to its end than an unknown "d".
TEST(Unigram, WithoutUnknown_CharacterThatPiecesCover_IsNoError) {
  const Json json =
      Unigram({{"unk_id", nullptr},
               {"vocab", Json::array({Piece("<unk>", 0.0), Piece("b", -1.0), Piece("bd", -2.0),
                                      Piece("de", -3.0), Piece("e", -4.0)})}});
  EXPECT_EQ(Cut(json, "bd"), "bd02");
  EXPECT_EQ(Cut(json, "bde"), "b01 de13");
  EXPECT_THAT(Cut(json, "db"), HasSubstr("no piece covers \"d\""));
}

// As in the library: read exactly, "." and ".." have the same sum either way, and ".", ".." would
// win.
TEST(Unigram, ScoresOf17Digits_AreReadAsTheLibraryReadsThem) {
  const Json json = Unigram(
      {{"vocab", Json::array({Piece("?", 0.0), Piece("x", -8.850960501750528),
                              Piece(".", -9.134363953404701), Piece("..", -1.8518751701175704),
                              Piece("y", -1e-300), Piece("z", -5)})}});
  EXPECT_EQ(Cut(json, "x..."), "x01 ..13 .34");
  EXPECT_EQ(Cut(json, "yz"), "y01 z12");
}

TEST(Unigram, UnknownTextInBytes_IfTheyAreThere) {
  Json json = Unigram({{"byte_fallback", true}});
  json["vocab"].push_back(Piece("<0xC3>", 0.0));
  json["vocab"].push_back(Piece("<0xA9>", 0.0));
  EXPECT_EQ(Cut(json, "aé"), "a01 <0xC3>13 <0xA9>13");
  EXPECT_EQ(Cut(json, "è"), "<unk>!02");
}

Json WordPiece() {
  return {{"type", "WordPiece"},
          {"unk_token", "[UNK]"},
          {"continuing_subword_prefix", "##"},
          {"max_input_chars_per_word", 6},
          {"vocab", {{"[UNK]", 0}, {"un", 1}, {"##aff", 2}, {"##able", 3}, {"##a", 4}, {"é", 5}}}};
}

TEST(WordPiece, TheLongestPieces_FromTheLeft) {
  EXPECT_EQ(Cut(WordPiece(), "unaffa"), "un02 ##aff25 ##a56");
  EXPECT_EQ(Cut(WordPiece(), "unx"), "[UNK]03");
  EXPECT_EQ(Cut(WordPiece(), "unaffable"), "[UNK]09");  // too long
  EXPECT_EQ(Cut(WordPiece(), "é"), "é02");
  Json none = WordPiece();
  none["unk_token"] = "none";
  EXPECT_THAT(Cut(none, "x"), HasSubstr("neither is the unknown token \"none\""));
}

TEST(WordLevel, WholeWords_OrTheUnknownToken) {
  const Json json = {{"type", "WordLevel"}, {"unk_token", "?"}, {"vocab", {{"?", 0}, {"hi", 9}}}};
  EXPECT_EQ(Cut(json, "hi"), "hi02");
  EXPECT_EQ(Cut(json, "ho"), "?02");
}

TEST(MakeModel, OldFilesWithoutType_AreKnownByTheirFields) {
  Json bpe = Bpe(), unigram = Unigram(), piece = WordPiece();
  bpe.erase("type"), unigram.erase("type"), piece.erase("type");
  EXPECT_EQ(Cut(bpe, "ab"), "ab02");
  EXPECT_EQ(Cut(unigram, "ab"), "ab02");
  EXPECT_EQ(Cut(piece, "un"), "un02");
}

TEST(MakeModel, WhatIsWrong_IsNamed) {
  const auto message = [](const Json& json) {
    return std::string(MakeModel(json, "f.model").status().message());
  };
  EXPECT_THAT(message(Bpe({{"merges", {"a x"}}})), HasSubstr("f.model.merges[0]: \"x\" is not in"));
  EXPECT_THAT(message(Bpe({{"merges", {"a b c"}}})), HasSubstr("f.model.merges[0]: must be two"));
  EXPECT_THAT(message(Bpe({{"dropout", 0.1}})), HasSubstr("dropout"));
  EXPECT_EQ(message(Bpe({{"dropout", 0.0}})), "");
  EXPECT_THAT(message(Bpe({{"vocab", {{"a", -1}}}})), HasSubstr("the id of \"a\""));
  EXPECT_THAT(message(Unigram({{"unk_id", 77}})), HasSubstr("f.model.unk_id: is 77"));
  EXPECT_THAT(message(Unigram({{"vocab", Json::array({Json::array({"a"})})}})),
              HasSubstr("entry 0"));
  EXPECT_THAT(message({{"type", "Wave"}}), HasSubstr("type 'Wave' is not supported"));
  EXPECT_THAT(message(Bpe({{"cache", 1}})), HasSubstr("'cache'"));
}

TEST(Vocabulary, SparseIds_CostNoMemory) {
  Vocabulary vocabulary;
  vocabulary.Add("a", 0x7FFFFFFF);
  vocabulary.Add("b", 3);
  EXPECT_EQ(*vocabulary.Text(0x7FFFFFFF), "a");
  EXPECT_EQ(vocabulary.Text(2), nullptr);
  EXPECT_EQ(vocabulary.Text(0x7FFFFFFE), nullptr);
  EXPECT_EQ(vocabulary.Id("b"), 3u);
}

}  // namespace
}  // namespace muster::text
