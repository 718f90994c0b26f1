#include "worker/text/older_files.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/text/sentence_piece_model.pb.h"
#include "worker/text/tokenizer_core.h"

namespace muster::text {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

OlderFiles Gpt2() {
  OlderFiles files = {.beside = {.folder = "dir"}};
  files.config = {{"model_type", "gpt2"}};
  files.vocab_json = R"({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3})";
  files.merges_txt = "#version: 0.2\na b\n";
  return files;
}

OlderFiles Bert() {
  OlderFiles files = {.beside = {.folder = "dir"}};
  files.config = {{"model_type", "bert"}};
  files.vocab_txt = "[PAD]\n[UNK]\n[CLS]\r\n[SEP]\n[MASK]\nword \n##s";
  return files;
}

OlderFiles Llama() {
  SentencePieceModel model;
  model.mutable_trainer_spec()->set_model_type(SentencePieceModel::Trainer::BPE);
  for (const char* const piece : {"<unk>", "<s>", "</s>", "XY", "▁", "a", "b", "ab", "▁ab"}) {
    model.add_pieces()->set_piece(piece);
  }
  for (const int control : {1, 2}) {
    model.mutable_pieces(control)->set_type(SentencePieceModel::Piece::CONTROL);
  }
  model.mutable_pieces(3)->set_type(SentencePieceModel::Piece::USER_DEFINED);
  OlderFiles files = {.beside = {.folder = "dir"}};
  files.beside.tokenizer_config = {{"tokenizer_class", "LlamaTokenizer"}};
  files.tokenizer_model = model.SerializeAsString();
  return files;
}

OlderTokenizer Make(const OlderFiles& files) {
  auto made = TokenizerOfOlderFiles(files);
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? *std::move(made) : OlderTokenizer();
}

std::string Error(const OlderFiles& files) {
  return std::string(TokenizerOfOlderFiles(files).status().message());
}

TEST(TokenizerOfOlderFiles, Gpt2_IsByteLevelWithItsClassesRoles) {
  const OlderTokenizer made = Make(Gpt2());
  EXPECT_EQ(made.tokenizer["model"]["merges"].dump(), R"([["a","b"]])");
  EXPECT_EQ(made.tokenizer["model"]["vocab"]["ab"], 2);
  EXPECT_EQ(made.tokenizer["pre_tokenizer"]["add_prefix_space"], false);
  EXPECT_EQ(made.tokenizer["post_processor"]["single"].dump(),
            R"([{"Sequence":{"id":"A","type_id":0}}])");
  EXPECT_EQ(made.tokenizer_config["eos_token"], "<|endoftext|>");
  EXPECT_FALSE(made.tokenizer_config.contains("pad_token"));
}

TEST(TokenizerOfOlderFiles, SettingsOfTheFolder_Count) {
  OlderFiles files = Gpt2();
  files.beside.tokenizer_config = {{"tokenizer_class", "GPT2TokenizerFast"},
                                   {"add_prefix_space", true},
                                   {"add_bos_token", true},
                                   {"bos_token", "a"}};
  files.beside.special_tokens_map = {{"bos_token", {{"content", "b"}}}};
  const OlderTokenizer made = Make(files);
  EXPECT_EQ(made.tokenizer["pre_tokenizer"]["add_prefix_space"], true);
  EXPECT_EQ(made.tokenizer["post_processor"]["special_tokens"].dump(),
            R"({"b":{"id":"b","ids":[1],"tokens":["b"]}})");
  OlderFiles bert = Bert();
  bert.beside.tokenizer_config = {{"do_lower_case", false}, {"strip_accents", true}};
  const auto normalizer = Make(bert).tokenizer["normalizer"];
  EXPECT_EQ(normalizer["lowercase"], false);
  EXPECT_EQ(normalizer["strip_accents"], true);
}

// Qwen2's vocabulary has no token with a role.
TEST(TokenizerOfOlderFiles, RoleThatTheVocabularyLacks_HasTheIdThatItGets) {
  OlderFiles files = Gpt2();
  files.config = {{"model_type", "qwen2"}};
  files.vocab_json = R"({"a": 0, "b": 1, "ab": 2})";
  files.beside.tokenizer_config = {{"add_eos_token", true}, {"bos_token", "<s>"}};
  EXPECT_EQ(Make(files).tokenizer["post_processor"]["special_tokens"]["<|endoftext|>"]["ids"][0],
            4);
}

TEST(TokenizerOfOlderFiles, EntriesThatGetNoId_DoNotCount) {
  using Json = nlohmann::ordered_json;
  const Json x = {{"content", "<x>"}}, empty = {{"content", ""}};
  for (const Json& decoder : {Json{{"5", x}, {"6", x}}, Json{{"4", empty}, {"5", x}}}) {
    OlderFiles files = Gpt2();
    files.beside.tokenizer_config = {
        {"bos_token", "<s>"}, {"add_bos_token", true}, {"added_tokens_decoder", decoder}};
    EXPECT_EQ(Make(files).tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"][0], 5);
  }
}

TEST(TokenizerOfOlderFiles, Bert_IsWordPieceWithLinesForTokens) {
  const OlderTokenizer made = Make(Bert());
  EXPECT_EQ(made.tokenizer["model"]["vocab"].dump(),
            R"({"##s":6,"[CLS]":2,"[MASK]":4,"[PAD]":0,"[SEP]":3,"[UNK]":1,"word":5})");
  EXPECT_TRUE(made.tokenizer["normalizer"]["strip_accents"].is_null());
  EXPECT_EQ(made.tokenizer["post_processor"]["pair"].size(), 5);
  EXPECT_EQ(made.tokenizer_config["mask_token"], "[MASK]");
}

// transformers puts the text and the id of a missing token around a text.
TEST(TokenizerOfOlderFiles, BertWithoutAToken_HasNoneInItsPlace) {
  OlderFiles files = Bert();
  files.beside.tokenizer_config = {{"sep_token", nullptr}};
  const auto processor = Make(files).tokenizer["post_processor"];
  EXPECT_EQ(processor["single"][2]["SpecialToken"]["id"], "None");
  EXPECT_EQ(processor["special_tokens"]["None"]["ids"][0], 3);
  files.beside.tokenizer_config["cls_token"] = nullptr;
  EXPECT_EQ(Make(files).tokenizer["post_processor"]["special_tokens"].size(), 1u);
}

TEST(TokenizerOfOlderFiles, Qwen2_PassesOverTheClassAndFlagsOfItsFiles) {
  OlderFiles files = Gpt2();
  EXPECT_FALSE(Make(files).without_flags);
  files.config = {{"model_type", "qwen2"}};
  files.beside.tokenizer_config = {{"tokenizer_class", "LlamaTokenizer"}};
  const OlderTokenizer made = Make(files);
  EXPECT_TRUE(made.without_flags);
  EXPECT_EQ(made.tokenizer["normalizer"]["type"], "NFC");
  EXPECT_EQ(made.tokenizer_config["pad_token"], "<|endoftext|>");
}

TEST(FilesOf, Class_SaysWhatIsRead) {
  EXPECT_THAT(FilesOf(Gpt2()), ElementsAre("vocab.json", "merges.txt"));
  EXPECT_THAT(FilesOf(Bert()), ElementsAre("vocab.txt"));
  OlderFiles files = Llama();
  EXPECT_THAT(FilesOf(files), ElementsAre("tokenizer.model"));
  files.config = {{"model_type", "qwen2"}};
  EXPECT_THAT(FilesOf(files), ElementsAre("vocab.json", "merges.txt"));
  files.config = nullptr;
  files.beside.tokenizer_config = {{"tokenizer_class", "T5Tokenizer"}};
  EXPECT_THAT(FilesOf(files), IsEmpty());
}

TEST(TokenizerOfOlderFiles, LinesOfBert_EndBeforeAllBlanksOfUnicode) {
  OlderFiles files = Bert();
  *files.vocab_txt += "\nfoo\xC2\xA0\n\xE3\x80\x80\n \xC3\xA9\xC2\x85 \n";
  const auto vocabulary = Make(files).tokenizer["model"]["vocab"];
  EXPECT_EQ(vocabulary["foo"], 7);
  EXPECT_EQ(vocabulary[""], 8);
  EXPECT_EQ(vocabulary[" \xC3\xA9"], 9);
}

TEST(TokenizerOfOlderFiles, Llama_IsBpeOfItsPieces) {
  OlderFiles files = Llama();
  const OlderTokenizer made = Make(files);
  EXPECT_EQ(made.tokenizer["model"]["merges"].dump(), R"([["a","b"],["▁","ab"]])");
  EXPECT_EQ(made.tokenizer["model"]["vocab"]["▁ab"], 8);
  EXPECT_EQ(made.tokenizer["pre_tokenizer"]["prepend_scheme"], "first");
  EXPECT_EQ(made.tokenizer["decoder"]["decoders"].size(), 4u);
  EXPECT_EQ(made.tokenizer_config["eos_token"], "</s>");
  ASSERT_EQ(made.tokenizer_config["extra_special_tokens"].size(), 3u);
  EXPECT_EQ(made.tokenizer_config["extra_special_tokens"][2].dump(),
            R"({"content":"XY","special":false,"normalized":false})");
  auto& config = files.beside.tokenizer_config;
  config["legacy"] = config["add_bos_token"] = true;
  config["extra_special_tokens"] = nullptr;
  const OlderTokenizer legacy = Make(files);
  EXPECT_EQ(legacy.tokenizer["pre_tokenizer"]["prepend_scheme"], "always");
  EXPECT_EQ(legacy.tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"][0], 1);
  EXPECT_TRUE(legacy.tokenizer_config["extra_special_tokens"].is_null());
  config["add_prefix_space"] = false;
  EXPECT_EQ(Make(files).tokenizer["pre_tokenizer"]["prepend_scheme"], "never");
  EXPECT_EQ(Make(files).tokenizer["decoder"]["decoders"].size(), 3u);
}

TEST(TokenizerOfOlderFiles, PiecesOfLlama_CountWhereTheFolderNamesNoExtraTokens) {
  OlderFiles files = Llama();
  // The list of the map would be read at another time.
  files.beside.special_tokens_map = {{"additional_special_tokens", {"<x>"}}};
  EXPECT_EQ(Make(files).tokenizer_config["extra_special_tokens"].size(), 3u);
  files.beside.special_tokens_map = {{"extra_special_tokens", {"<x>"}}};
  EXPECT_FALSE(Make(files).tokenizer_config.contains("extra_special_tokens"));
  files.beside.tokenizer_config["added_tokens_decoder"] = nlohmann::ordered_json::object();
  EXPECT_EQ(Make(files).tokenizer_config["extra_special_tokens"].size(), 3u);
  files.beside.tokenizer_config["additional_special_tokens"] = {"<x>"};
  EXPECT_FALSE(Make(files).tokenizer_config.contains("extra_special_tokens"));
}

// transformers 5 ignores the class then, and omits the blank before a text.
TEST(TokenizerOfOlderFiles, LlamaTokenizerOfAMixtral_IsALlamas) {
  OlderFiles files = Llama();
  const OlderTokenizer llama = Make(files);
  files.config = {{"model_type", "mixtral"}};
  EXPECT_EQ(Make(files).tokenizer, llama.tokenizer);
  files.beside.tokenizer_config = nullptr;
  EXPECT_EQ(TokenizerOfOlderFiles(files).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Error(files), HasSubstr(R"("tokenizer_class": "LlamaTokenizer")"));
}

TEST(TokenizerOfOlderFiles, TokenizerModelThatIsNoLlamas_IsNotFound) {
  const auto error = [](const OlderFiles& files) {
    EXPECT_EQ(TokenizerOfOlderFiles(files).status().code(), absl::StatusCode::kNotFound);
    return Error(files);
  };
  OlderFiles files = Llama();
  SentencePieceModel model;
  ASSERT_TRUE(model.ParseFromString(*files.tokenizer_model));
  model.mutable_trainer_spec()->set_model_type(SentencePieceModel::Trainer::UNIGRAM);
  files.tokenizer_model = model.SerializeAsString();
  EXPECT_THAT(error(files), HasSubstr("is of BPE; this one is of UNIGRAM"));
  files.tokenizer_model = "IQ== 0\nIg== 1\n";
  EXPECT_THAT(error(files), HasSubstr("tokenizer.model is no model of SentencePiece"));
  files = Llama();
  files.beside.tokenizer_config["extra_special_tokens"] = {{"image_token", "<i>"}};
  EXPECT_THAT(error(files), HasSubstr("extra_special_tokens beside a tokenizer.model"));
  files.beside.tokenizer_config = {{"tokenizer_class", "T5Tokenizer"}};
  EXPECT_THAT(error(files), HasSubstr("T5Tokenizer"));
  files = Llama();
  files.tokenizer_model.reset();
  EXPECT_THAT(error(files), HasSubstr("a LlamaTokenizer has a tokenizer.model"));
}

TEST(TokenizerOfOlderFiles, ClassOrFileThatIsNotThere_IsNotFound) {
  OlderFiles files = Gpt2();
  files = Gpt2();
  files.merges_txt.reset();
  EXPECT_THAT(Error(files), HasSubstr("a GPT2Tokenizer has a merges.txt"));
  files = Bert();
  files.config = nullptr;
  EXPECT_THAT(Error(files), HasSubstr("no file says"));
}

TEST(TokenizerOfOlderFiles, WhatIsWrong_NamesFileAndPlace) {
  OlderFiles files = Gpt2();
  files.merges_txt = "#version: 0.2\na b\na b c\n";
  EXPECT_THAT(Error(files), HasSubstr("dir/merges.txt:3: must be two tokens"));
  files.merges_txt = "a b\n\xFF b\n";
  EXPECT_THAT(Error(files), HasSubstr("dir/merges.txt:2: is not UTF-8"));
  files = Gpt2();
  files.vocab_json = R"({"a": "0"})";
  EXPECT_THAT(Error(files), HasSubstr("dir/vocab.json: the id of \"a\" is no number"));
  files.vocab_json = "[]";
  EXPECT_THAT(Error(files), HasSubstr("must be an object"));
  files.vocab_json = "{";
  EXPECT_THAT(Error(files), HasSubstr("dir/vocab.json:1:"));
  files = Bert();
  files.beside.tokenizer_config = {{"do_lower_case", "yes"}};
  EXPECT_THAT(Error(files), HasSubstr("do_lower_case must be true or false"));
  files = Bert();
  *files.vocab_txt += "\n\xFF\nlast";
  EXPECT_THAT(Error(files), HasSubstr("dir/vocab.txt:8: is not UTF-8"));
  files = Llama();
  SentencePieceModel model;
  ASSERT_TRUE(model.ParseFromString(*files.tokenizer_model));
  model.add_pieces()->set_piece("ab");
  files.tokenizer_model = model.SerializeAsString();
  EXPECT_THAT(Error(files), HasSubstr("dir/tokenizer.model: piece 9 (\"ab\") is there twice"));
}

// Returns a text with some bytes changed, repeated, or removed.
std::string Mutated(std::string text, std::mt19937_64& random) {
  const auto below = [&random](size_t most) { return random() % (most + 1); };
  for (size_t count = below(3); count > 0 && !text.empty(); --count) {
    const size_t at = below(text.size() - 1), size = below(std::min<size_t>(text.size() - at, 5));
    if (below(2) == 0) {
      text[at] = static_cast<char>(below(255));
    } else if (below(1) == 0) {
      text.erase(at, size);
    } else {
      text.insert(at, text.substr(at, size));
    }
  }
  return text;
}

TEST(TokenizerOfOlderFiles, DamagedFiles_AreErrorsOrTokenizers) {
  int64_t cases = 5'000, made = 0;
  if (const char* const wanted = std::getenv("MUSTER_FUZZ_CASES")) cases = std::atoll(wanted);
  std::mt19937_64 random(1);
  for (int64_t i = 0; i < cases; ++i) {
    OlderFiles files = i % 3 == 0 ? Gpt2() : i % 3 == 1 ? Bert() : Llama();
    for (auto* const text :
         {&files.vocab_json, &files.merges_txt, &files.vocab_txt, &files.tokenizer_model}) {
      if (text->has_value()) *text = Mutated(**text, random);
    }
    const std::string config = Mutated(
        R"({"bos_token": "<s>", "cls_token": {"content": "[CLS]", "lstrip": true},
            "add_bos_token": true, "sep_token": "<z>",
            "added_tokens_decoder": {"4": {"content": "<x>", "special": false},
                                     "5": {"content": "<y>"}, "6": {"content": "<s>"},
                                     "7": {"content": "<y>"}, "8": {"content": ""}}})",
        random);
    files.beside.tokenizer_config = nlohmann::ordered_json::parse(config, nullptr, false);
    if (files.beside.tokenizer_config.is_discarded()) files.beside.tokenizer_config = nullptr;
    if (i % 3 == 2) files.config["tokenizer_class"] = "LlamaTokenizer";
    auto tokenizer = TokenizerOfOlderFiles(files);
    if (!tokenizer.ok()) continue;
    FolderFiles beside = files.beside;
    beside.tokenizer_config = tokenizer->tokenizer_config;
    beside.without_flags = tokenizer->without_flags;
    const auto tokens = TokensOfFolder(beside);
    ASSERT_TRUE(tokens.ok()) << tokens.status();
    const auto core = TokenizerCore::Make(tokenizer->tokenizer, "dir", tokens->added);
    if (!core.ok()) continue;
    ++made;
    for (const auto& token : tokenizer->tokenizer["post_processor"]["special_tokens"]) {
      EXPECT_EQ((*core)->TokenToId(token["id"].get<std::string>()), token["ids"][0].get<int64_t>())
          << config << " " << token;
    }
    (void)(*core)->EncodeIds("words ab<x> [CLS]", true);
  }
  EXPECT_GT(made, cases / 10);
}

}  // namespace
}  // namespace muster::text
