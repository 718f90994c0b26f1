// Mutated tokenizers and texts: whatever the input is, nothing crashes (memory errors show in the
// asan build), every range lies within its text, and a stream gives the same as Decode.
// MUSTER_FUZZ_CASES sets the number of tokenizers (and of ten times as many texts),
// MUSTER_FUZZ_SEED where they begin.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "base/log.h"
#include "base/mutate.h"
#include "base/peak_growth.h"
#include "base/text.h"
#include "worker/text/tokenizer.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using Random = std::mt19937_64;

constexpr int64_t kMostMemory = int64_t{256} << 20;

int64_t Variable(const char* name, int64_t otherwise) {
  const char* const wanted = std::getenv(name);
  EXPECT_TRUE(wanted == nullptr || absl::SimpleAtoi(wanted, &otherwise)) << wanted;
  return otherwise;
}
int64_t Cases() { return Variable("MUSTER_FUZZ_CASES", 20'000); }
Random Seeded(uint64_t kind) {
  return Random(static_cast<uint64_t>(Variable("MUSTER_FUZZ_SEED", 1)) * 100 + kind);
}

Json Parsed(const char* text) { return Json::parse(text); }

Json Template() {
  return Parsed(R"({"type":"TemplateProcessing","single":[
      {"SpecialToken":{"id":"<s>","type_id":0}},
      {"Sequence":{"id":"A","type_id":0}}],
      "pair":[{"Sequence":{"id":"A","type_id":0}},
      {"SpecialToken":{"id":"<s>","type_id":1}},{"Sequence":{"id":"B","type_id":1}}],
      "special_tokens":{"<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]}}})");
}

Json With(Json normalizer, Json pre_tokenizer, Json model, Json decoder, Json post_processor) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", Parsed(R"([
              {"id":1,"content":"<s>","single_word":false,"lstrip":true,"rstrip":false,
               "normalized":false,"special":true},
              {"id":40,"content":"Ab","single_word":true,"lstrip":false,"rstrip":true,
               "normalized":true,"special":false}])")},
          {"normalizer", std::move(normalizer)},
          {"pre_tokenizer", std::move(pre_tokenizer)},
          {"model", std::move(model)},
          {"decoder", std::move(decoder)},
          {"post_processor", std::move(post_processor)}};
}

Json Bpe() {
  Json model = Parsed(R"({"type":"BPE","dropout":null,"unk_token":"?","byte_fallback":true,
      "continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":true,
      "ignore_merges":false,"vocab":{"?":0,"<s>":1,"a":2,"b":3,"ab":4,"▁":5,"▁a":6,"<0x41>":7,
      "c":8,"abc":9},"merges":[["a","b"],["▁","a"],["ab","c"]]})");
  return model;
}

// Returns a byte-level model with every letter of the alphabet.
Json Bytes() {
  Json model = Parsed(R"({"type":"BPE","vocab":{"<s>":1},"merges":[["a","b"],["Ġ","a"]]})");
  int id = 2;
  for (char32_t c = '!'; c < 0x144; ++c) {
    std::string text;
    AppendUtf8(text, c);
    model["vocab"][text] = id++;
  }
  model["vocab"]["ab"] = id++;
  model["vocab"]["Ġa"] = id++;
  return model;
}

const std::vector<Json>& Seeds() {
  static const auto* const seeds = new std::vector<Json>{
      With(Parsed(R"({"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},
          {"type":"Replace","pattern":{"String":" "},"content":"▁"}]})"),
           nullptr, Bpe(),
           Parsed(R"({"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},
          "content":" "},{"type":"ByteFallback"},{"type":"Fuse"},
          {"type":"Strip","content":" ","start":1,"stop":1}]})"),
           Template()),
      With(Parsed(R"({"type":"NFC"})"),
           Parsed(R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":
          {"Regex":"(?i:'s|'t)|\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}]+|\\s+(?!\\S)|\\s+"},
          "behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":true,
          "trim_offsets":true,"use_regex":false}]})"),
           Bytes(), Parsed(R"({"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true})"),
           Parsed(R"({"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true})")),
      With(Parsed(R"({"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,
          "strip_accents":null,"lowercase":true})"),
           Parsed(R"({"type":"BertPreTokenizer"})"),
           Parsed(R"({"type":"WordPiece","unk_token":"?","continuing_subword_prefix":"##",
          "max_input_chars_per_word":8,"vocab":{"?":0,"<s>":1,"a":2,"##a":3,"##b":4,"ab":5}})"),
           Parsed(R"({"type":"WordPiece","prefix":"##","cleanup":true})"),
           Parsed(R"({"type":"RobertaProcessing","sep":["<s>",1],"cls":["?",0],"trim_offsets":true,
          "add_prefix_space":true})")),
      With(Parsed(R"({"type":"Sequence","normalizers":[{"type":"Nmt"},{"type":"NFKD"},
          {"type":"StripAccents"},{"type":"Strip","strip_left":true,"strip_right":true},
          {"type":"Replace","pattern":{"Regex":" {2,}"},"content":" "}]})"),
           Parsed(R"({"type":"Sequence","pretokenizers":[{"type":"WhitespaceSplit"},
          {"type":"Digits","individual_digits":true},{"type":"Punctuation"},
          {"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}]})"),
           Parsed(
               R"({"type":"Unigram","unk_id":0,"byte_fallback":false,"vocab":[["?",0.0],["<s>",0.0],
          ["▁",-2.0],["▁a",-1.5],["a",-3.0],["ab",-2.5],["b",-3.5]]})"),
           Parsed(
               R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true})"),
           Template()),
  };
  return *seeds;
}

// Returns a value that some reader may misread.
Json AnyValue(Random& random) {
  const Json values[] = {nullptr,
                         true,
                         -1,
                         0,
                         1,
                         2,
                         std::numeric_limits<uint64_t>::max(),
                         0.5,
                         1e300,
                         "",
                         "a",
                         "▁",
                         "A",
                         "B",
                         "(",
                         "a*",
                         "\\s+|",
                         "ByteLevel",
                         "Sequence",
                         "NFC",
                         "Isolated",
                         "Removed",
                         Json::array(),
                         Json::object(),
                         Json{{"type", "Fuse"}},
                         Json{{"String", ""}},
                         Json{{"Regex", "(a|b)*"}},
                         Json::array({"a", "b"})};
  return values[random() % std::size(values)];
}

// Replaces a value somewhere in the tree, removes a part, or repeats it elsewhere.
void MutateTree(Json& json, Random& random) {
  Json* at = &json;
  while (at->is_structured() && !at->empty() && random() % 6 != 0) {
    at = &*std::next(at->begin(), static_cast<int64_t>(random() % at->size()));
  }
  switch (random() % 4) {
    case 0:
      *at = AnyValue(random);
      break;
    case 1:
      if (at->is_structured() && !at->empty()) {
        at->erase(std::next(at->begin(), static_cast<int64_t>(random() % at->size())));
      } else if (at->is_boolean()) {
        *at = !at->get<bool>();
      }
      break;
    case 2:
      if (at->is_array()) {
        at->push_back(at->empty() ? AnyValue(random) : Json(at->front()));
      } else if (at->is_string()) {
        std::string text = Mutate(at->get<std::string>(), random);
        if (IsValidUtf8(text)) *at = std::move(text);
      }
      break;
    default: {
      // Put a component of another seed in the place of this one.
      const Json& other = Seeds()[random() % Seeds().size()];
      const char* const names[] = {"normalizer", "pre_tokenizer", "decoder", "post_processor",
                                   "model"};
      const char* const name = names[random() % std::size(names)];
      if (json.is_object() && json.contains(name)) json[name] = other.at(name);
    }
  }
}

std::string AnyText(Random& random) {
  static const std::vector<std::string> parts = {"a",
                                                 "b",
                                                 "ab",
                                                 "c",
                                                 " ",
                                                 "  ",
                                                 "\n",
                                                 "\r\n",
                                                 "é",
                                                 "e\xCC\x81",
                                                 "中",
                                                 "<s>",
                                                 "Ab",
                                                 "'s",
                                                 "12",
                                                 "▁",
                                                 "\xF0\x9F\x98\x80",
                                                 std::string(1, '\0'),
                                                 "\xEF\xBF\xBD",
                                                 "Ġ",
                                                 "ß",
                                                 "\xC4\xB0",
                                                 "한"};
  std::string text;
  for (uint64_t i = random() % 16; i > 0; --i) text += parts[random() % parts.size()];
  return random() % 6 == 0 ? Mutate(std::move(text), random) : text;
}

void Exercise(const Tokenizer& tokenizer, Random& random) {
  const std::string text = AnyText(random);
  const std::string pair = AnyText(random);
  EncodeOptions options;
  options.add_special_tokens = random() % 2 == 0;
  if (random() % 2 == 0) {
    options.truncation =
        Truncation{.max_length = static_cast<int64_t>(random() % 8),
                   .stride = static_cast<int64_t>(random() % 3),
                   .strategy = static_cast<Truncation::Strategy>(random() % 3),
                   .direction = random() % 2 == 0 ? TextSide::kLeft : TextSide::kRight};
  }
  if (random() % 2 == 0) options.padding = Padding{.pad_to_multiple_of = 4};
  const auto encoding = random() % 2 == 0 ? tokenizer.Encode(text, options)
                                          : tokenizer.EncodePair(text, pair, options);
  if (!encoding.ok()) return;
  ASSERT_TRUE(IsValidUtf8(text));
  ASSERT_EQ(encoding->tokens.size(), encoding->size());
  ASSERT_EQ(encoding->offsets.size(), encoding->size());
  ASSERT_EQ(encoding->type_ids.size(), encoding->size());
  for (const std::string& token : encoding->tokens) ASSERT_TRUE(IsValidUtf8(token));
  for (const auto& [begin, end] : encoding->offsets) ASSERT_LE(begin, end);
  const bool skip = random() % 2 == 0;
  const auto decoded = tokenizer.Decode(encoding->ids, skip);
  if (!decoded.ok()) return;  // a template may name ids that no vocabulary has
  ASSERT_TRUE(IsValidUtf8(*decoded));
  StreamDecoder stream = tokenizer.Stream(skip);
  std::string streamed;
  for (const int64_t id : encoding->ids) {
    const auto part = stream.Push(id);
    ASSERT_TRUE(part.ok()) << part.status();
    ASSERT_TRUE(IsValidUtf8(*part));
    streamed += *part;
  }
  const auto rest = stream.Finish();
  ASSERT_TRUE(rest.ok()) << rest.status();
  ASSERT_EQ(streamed + *rest, *decoded);
}

TEST(TokenizerFuzz, MutatedTokenizers_AreRefusedOrWork) {
  SetLogLevel(LogLevel::kError);  // wrong ids in the file cause warnings
  Random random = Seeded(1);
  int64_t taken = 0;
  const int64_t cases = Cases();
  const PeakGrowth growth;
  for (int64_t i = 0; i < cases; ++i) {
    Json json = Seeds()[random() % Seeds().size()];
    for (uint64_t n = random() % 3 + 1; n > 0; --n) MutateTree(json, random);
    std::string text = json.dump();
    if (random() % 8 == 0) text = Mutate(std::move(text), random);
    const auto tokenizer = Tokenizer::FromJson(text, "fuzz");
    if (!tokenizer.ok()) {
      ASSERT_TRUE(IsValidUtf8(std::string(tokenizer.status().message()))) << text;
      continue;
    }
    ++taken;
    Exercise(*tokenizer, random);
    if (HasFatalFailure()) FAIL() << text;
    ASSERT_TRUE(growth.IsAtMost(kMostMemory)) << "case " << i << ": " << text;
  }
  EXPECT_GT(taken, cases / 10);
}

TEST(TokenizerFuzz, AnyTexts_AreTokenizedOrRefused) {
  Random random = Seeded(2);
  std::vector<Tokenizer> tokenizers;
  for (const Json& seed : Seeds()) {
    const auto tokenizer = Tokenizer::FromJson(seed.dump(), "seed");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizers.push_back(*tokenizer);
  }
  const int64_t cases = 10 * Cases();
  for (int64_t i = 0; i < cases; ++i) {
    Exercise(tokenizers[random() % tokenizers.size()], random);
    ASSERT_FALSE(HasFatalFailure()) << "case " << i;
  }
}

TEST(TokenizerFuzz, AnyIds_StreamAsTheyDecode) {
  Random random = Seeded(3);
  for (const Json& seed : Seeds()) {
    const auto tokenizer = Tokenizer::FromJson(seed.dump(), "seed");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (int64_t i = 0; i < Cases() / 4; ++i) {
      std::vector<int64_t> ids;
      for (uint64_t n = random() % 12; n > 0; --n) {
        ids.push_back(static_cast<int64_t>(random() % 300) - 2);
      }
      StreamDecoder stream = tokenizer->Stream();
      std::string streamed;
      std::vector<int64_t> known;
      for (const int64_t id : ids) {
        const auto part = stream.Push(id);
        ASSERT_EQ(part.ok(), tokenizer->IdToToken(id).has_value()) << id;
        if (!part.ok()) continue;
        known.push_back(id);
        ASSERT_TRUE(IsValidUtf8(*part));
        streamed += *part;
      }
      const auto rest = stream.Finish();
      const auto decoded = tokenizer->Decode(known);
      ASSERT_TRUE(rest.ok() && decoded.ok());
      ASSERT_EQ(streamed + *rest, *decoded);
    }
  }
}

}  // namespace
}  // namespace muster
