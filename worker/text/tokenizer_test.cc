#include "worker/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "base/file.h"
#include "base/test_folder.h"
#include "worker/text/test_parts.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using text::Ok;
using Ids = std::vector<int64_t>;

// A model with the words of a small vocabulary in lower case, and a template like BERT's.
Json Words() {
  return {
      {"version", "1.0"},
      {"normalizer", {{"type", "Lowercase"}}},
      {"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
      {"added_tokens",
       {{{"id", 1},
         {"content", "[CLS]"},
         {"single_word", false},
         {"lstrip", false},
         {"rstrip", false},
         {"normalized", false},
         {"special", true}}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "[CLS]"}, {"type_id", 0}}}},
          {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair",
         {{{"SpecialToken", {{"id", "[CLS]"}, {"type_id", 0}}}},
          {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
          {{"Sequence", {{"id", "B"}, {"type_id", 1}}}}}},
        {"special_tokens", {{"[CLS]", {{"id", "[CLS]"}, {"ids", {1}}, {"tokens", {"[CLS]"}}}}}}}},
      {"decoder", nullptr},
      {"model",
       {{"type", "WordLevel"},
        {"unk_token", "?"},
        {"vocab", {{"?", 0}, {"[CLS]", 1}, {"one", 2}, {"two", 3}, {"élan", 4}}}}}};
}

Tokenizer Make(const Json& json) { return Ok(Tokenizer::FromJson(json.dump(), "words")); }

TEST(Tokenizer, Encode_GivesTokensRangesAndMasks) {
  const Encoding encoding = Ok(Make(Words()).Encode("Élan  ONE [CLS]three"));
  EXPECT_EQ(encoding.ids, (Ids{1, 4, 2, 1, 0}));
  EXPECT_EQ(encoding.tokens, (std::vector<std::string>{"[CLS]", "élan", "one", "[CLS]", "?"}));
  EXPECT_EQ(encoding.offsets,
            (std::vector<Encoding::Offsets>{{0, 0}, {0, 4}, {6, 9}, {10, 15}, {15, 20}}));
  EXPECT_EQ(encoding.special_tokens_mask, (Ids{1, 0, 0, 0, 0}));
  EXPECT_EQ(encoding.attention_mask, (Ids{1, 1, 1, 1, 1}));
}

TEST(Tokenizer, PairsAndBatches_AreTruncatedAndPadded) {
  const Tokenizer tokenizer = Make(Words());
  const Encoding pair = Ok(tokenizer.EncodePair("one", "two two"));
  EXPECT_EQ(pair.ids, (Ids{1, 2, 3, 3}));
  EXPECT_EQ(pair.type_ids, (Ids{0, 0, 1, 1}));
  EncodeOptions options;
  options.truncation = Truncation{.max_length = 3};
  options.padding = Padding{};
  const std::vector<TextInput> inputs = {"one", TextInput("one two one two")};
  const std::vector<Encoding> batch = Ok(tokenizer.EncodeBatch(inputs, options));
  EXPECT_EQ(batch[0].ids, (Ids{1, 2, 0}));
  EXPECT_EQ(batch[1].ids, (Ids{1, 2, 3}));
  ASSERT_EQ(batch[1].overflowing.size(), 1u);
  EXPECT_EQ(batch[1].overflowing[0].ids, (Ids{1, 2, 3}));
  options.truncation->max_length = 0;
  EXPECT_THAT(std::string(tokenizer.Encode("one", options).status().message()),
              HasSubstr("max_length is 0, but the template alone adds 1"));
  // One token, the template's: a text would be one window after it, whatever the stride.
  options.truncation->max_length = 1;
  options.truncation->stride = 1;
  EXPECT_THAT(std::string(tokenizer.Encode("one", options).status().message()),
              HasSubstr("a stride of 1 leaves no progress in windows of 0 tokens"));
  const std::vector<TextInput> bad = {"one", "\xFF"};
  EXPECT_THAT(std::string(tokenizer.EncodeBatch(bad).status().message()),
              HasSubstr("text 1 of the batch: the text is not UTF-8"));
}

TEST(Tokenizer, LimitsOfTheFile_CountUnlessOthersAreGiven) {
  Json json = Words();
  json["truncation"] = {
      {"max_length", 2}, {"stride", 0}, {"strategy", "LongestFirst"}, {"direction", "Right"}};
  json["padding"] = {
      {"strategy", {{"Fixed", 4}}}, {"direction", "Left"}, {"pad_id", 7},
      {"pad_type_id", 0},           {"pad_token", "?"},    {"pad_to_multiple_of", nullptr}};
  const Tokenizer tokenizer = Make(json);
  EXPECT_EQ(tokenizer.truncation()->max_length, 2);
  EXPECT_EQ(tokenizer.padding()->length, 4);
  EXPECT_EQ(Ok(tokenizer.Encode("one two")).ids, (Ids{7, 7, 1, 2}));
  EncodeOptions options;
  options.padding = Padding{};
  EXPECT_EQ(Ok(tokenizer.Encode("one two", options)).ids, (Ids{1, 2}));
  EXPECT_EQ(Ok(tokenizer.Encode("one two", {.limits_of_file = false})).ids, (Ids{1, 2, 3}));
}

// The library refuses a stride larger than the room for a single text, even if it then encodes
// pairs; in its file it accepts it. The tokens are the library's.
TEST(Tokenizer, StrideThatIsTooLargeForASingleText_IsRefusedUnlessTheFileSetsIt) {
  Json json = Words();
  const Json mark = {{"SpecialToken", {{"id", "[CLS]"}, {"type_id", 0}}}};
  const Json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  json["post_processor"]["single"] = {mark, mark, mark, text};
  const auto with_stride = [&json](int64_t max_length, int64_t stride) {
    Json limited = json;
    limited["truncation"] = {{"max_length", max_length},
                             {"stride", stride},
                             {"strategy", "OnlyFirst"},
                             {"direction", "Right"}};
    return Make(limited);
  };
  const Encoding pair = Ok(with_stride(6, 3).EncodePair("one two two one two one", "two"));
  EXPECT_EQ(pair.ids, (Ids{1, 2, 3, 3, 2, 3}));
  ASSERT_EQ(pair.overflowing.size(), 2u);
  EXPECT_EQ(pair.overflowing[0].ids, (Ids{1, 3, 3, 2, 3, 3}));
  EXPECT_EQ(pair.overflowing[1].ids, (Ids{1, 3, 2, 3, 2, 3}));
  // Only the special tokens fit: a window need not advance.
  EXPECT_EQ(Ok(with_stride(3, 3).Encode("one two")).ids, (Ids{1, 1, 1}));

  const Tokenizer tokenizer = Make(json);
  EncodeOptions options;
  options.truncation = Truncation{.max_length = 6, .stride = 4};
  EXPECT_THAT(
      std::string(tokenizer.EncodePair("one", "two", options).status().message()),
      HasSubstr("a stride of 4 leaves no progress in windows of 3 tokens (max_length 6 less "
                "3 special ones of a single text)"));
  options.truncation->stride = 3;
  EXPECT_TRUE(tokenizer.EncodePair("one", "two", options).ok());
  EXPECT_THAT(std::string(tokenizer.Encode("one", options).status().message()),
              HasSubstr("a stride of 3 leaves no progress in windows of 3 tokens"));
}

TEST(Tokenizer, IdsAlone_AreThoseOfEncode) {
  const Tokenizer tokenizer = Make(Words());
  for (const char* const text : {"", "one", "one TWO x [CLS]"}) {
    EXPECT_EQ(Ok(tokenizer.EncodeIds(text)), Ok(tokenizer.Encode(text)).ids);
    EXPECT_EQ(Ok(tokenizer.EncodeIds(text, false)),
              Ok(tokenizer.Encode(text, {.add_special_tokens = false})).ids);
  }
}

TEST(Tokenizer, Decode_SkipsSpecialTokensAndNamesUnknownIds) {
  const Tokenizer tokenizer = Make(Words());
  EXPECT_EQ(Ok(tokenizer.Decode(Ids{1, 2, 3})), "one two");
  EXPECT_EQ(Ok(tokenizer.Decode(Ids{1, 2, 3}, false)), "[CLS] one two");
  for (const int64_t id : {int64_t{5}, int64_t{-1}, int64_t{1} << 40}) {
    EXPECT_THAT(std::string(tokenizer.Decode(Ids{id}).status().message()),
                HasSubstr(std::to_string(id) + " is not in the vocabulary of 5 tokens"));
  }
  StreamDecoder stream = tokenizer.Stream();
  EXPECT_EQ(Ok(stream.Push(1)), "");
  EXPECT_EQ(Ok(stream.Push(2)), "one");
  EXPECT_EQ(Ok(stream.Push(3)), " two");
  EXPECT_FALSE(stream.Push(99).ok());
  EXPECT_EQ(Ok(stream.Finish()), "");
}

TEST(Tokenizer, Vocabulary_IsLookedUp) {
  const Tokenizer tokenizer = Make(Words());
  EXPECT_EQ(tokenizer.TokenToId("two"), 3);
  EXPECT_EQ(tokenizer.TokenToId("none"), std::nullopt);
  EXPECT_EQ(tokenizer.IdToToken(4), "élan");
  EXPECT_EQ(tokenizer.IdToToken(5), std::nullopt);
  EXPECT_EQ(tokenizer.VocabSize(), 5);
  EXPECT_EQ(tokenizer.VocabSize(false), 5);
}

TEST(Tokenizer, FromFolder_ReadsTheRolesOfTokens) {
  const TestFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    ASSERT_TRUE(WriteFileAtomically(folder.Path(name), text).ok());
  };
  write("tokenizer.json", Words().dump());
  EXPECT_EQ(Ok(Tokenizer::FromFolder(folder.path())).special_tokens().eos, std::nullopt);
  write("tokenizer_config.json",
        R"({"eos_token": "old", "bos_token": null, "pad_token": {"content": "[PAD]"}, "x": 1})");
  write("special_tokens_map.json", R"({"eos_token": {"content": "</s>"}})");
  const Tokenizer tokenizer = Ok(Tokenizer::FromFolder(folder.path()));
  EXPECT_EQ(tokenizer.special_tokens().eos, "</s>");
  EXPECT_EQ(tokenizer.special_tokens().pad, "[PAD]");
  EXPECT_EQ(tokenizer.special_tokens().bos, std::nullopt);
  write("tokenizer_config.json", R"({"eos_token": 7})");
  EXPECT_THAT(std::string(Tokenizer::FromFolder(folder.path()).status().message()),
              HasSubstr("eos_token: a token must be a text"));
  EXPECT_EQ(Tokenizer::FromFile(folder.Path("none.json")).status().code(),
            absl::StatusCode::kNotFound);
}

// Like transformers: the file knows five words.
TEST(Tokenizer, FromFolder_CutsOutTokensThatFilesBesideItName) {
  const TestFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    ASSERT_TRUE(WriteFileAtomically(folder.Path(name), text).ok());
  };
  write("tokenizer.json", Words().dump());
  write("tokenizer_config.json", R"({"pad_token": "<pad>", "extra_special_tokens": ["two"],
      "added_tokens_decoder": {"5": {"content": "<tool>", "special": false}}})");
  const Tokenizer tokenizer = Ok(Tokenizer::FromFolder(folder.path()));
  EXPECT_EQ(Ok(tokenizer.EncodeIds("<tool>two<pad>")), (Ids{1, 5, 3, 6}));
  EXPECT_EQ(Ok(tokenizer.Decode({5, 3, 6}, /*skip_special_tokens=*/true)), "<tool>");
  EXPECT_EQ(tokenizer.VocabSize(), 7);
  // A token that is special in tokenizer.json stays special, whatever its other flags become.
  write(
      "tokenizer_config.json",
      R"({"added_tokens_decoder": {"1": {"content": "[CLS]", "special": false, "lstrip": true}}})");
  const Tokenizer changed = Ok(Tokenizer::FromFolder(folder.path()));
  EXPECT_EQ(Ok(changed.Decode({1, 3}, /*skip_special_tokens=*/true)), "two");
  EXPECT_EQ(Ok(changed.Encode("two [CLS]")).offsets[2], (Encoding::Offsets{3, 9}));
}

TEST(Tokenizer, FromFolder_IdsThatDoNotHold_AreLogged) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("tokenizer.json"), Words().dump()).ok());
  const auto log = [&folder](const char* added) {
    EXPECT_TRUE(WriteFileAtomically(folder.Path("added_tokens.json"), added).ok());
    testing::internal::CaptureStderr();
    const Tokenizer tokenizer = Ok(Tokenizer::FromFolder(folder.path()));
    EXPECT_EQ(tokenizer.TokenToId("<x>"), 5);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(log(R"({"<x>": 5, "<y>": 6})"), "");
  const std::string text = log(R"({"<x>": 5, "<y>": 8, "<z>": 9})");
  EXPECT_THAT(text, HasSubstr("2 of 3 ids in added_tokens.json"));
  EXPECT_THAT(text, HasSubstr("\"<y>\" has id 8 there, but gets 6"));
}

TEST(Tokenizer, FromFolder_LinkToNothing_IsRefusedByName) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), R"({"model_type": "bert"})").ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("vocab.txt"), "[UNK]\n[CLS]\n[SEP]\n").ok());
  EXPECT_TRUE(Tokenizer::FromFolder(folder.path()).ok());
  ASSERT_EQ(symlink("../blobs/none", folder.Path("tokenizer.json").c_str()), 0);
  const absl::Status status = Tokenizer::FromFolder(folder.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("tokenizer.json is a link to a file that is not there"));
}

// Like a folder to which several tokenizers were saved.
TEST(Tokenizer, FromFolder_FileOfAnotherClass_IsNotRead) {
  for (const char* const name : {"tokenizer.model", "vocab.json"}) {
    SCOPED_TRACE(name);
    const TestFolder folder;
    ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), R"({"model_type": "bert"})").ok());
    ASSERT_TRUE(WriteFileAtomically(folder.Path("vocab.txt"), "[UNK]\n[CLS]\n[SEP]\n").ok());
    const std::string path = folder.Path(name);
    const auto load = [&folder] { return Tokenizer::FromFolder(folder.path()).status(); };
    ASSERT_EQ(symlink("../blobs/none", path.c_str()), 0);
    EXPECT_TRUE(load().ok()) << load();
    ASSERT_EQ(unlink(path.c_str()), 0);
    ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
    EXPECT_TRUE(load().ok()) << load();
    ASSERT_EQ(rmdir(path.c_str()), 0);
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    EXPECT_TRUE(load().ok()) << load();
    ASSERT_EQ(unlink(path.c_str()), 0);
    ASSERT_TRUE(WriteFileAtomically(path, std::string((16 << 20) + 1, ' ')).ok());
    EXPECT_TRUE(load().ok()) << load();
  }
}

TEST(Tokenizer, FromFolder_OlderFileThatIsALinkToNothing_IsRefusedByName) {
  for (const auto& [tokenizer_class, name] :
       {std::pair("LlamaTokenizer", "tokenizer.model"), {"BertTokenizer", "vocab.txt"}}) {
    const TestFolder folder;
    const nlohmann::json config = {{"tokenizer_class", tokenizer_class}};
    ASSERT_TRUE(WriteFileAtomically(folder.Path("tokenizer_config.json"), config.dump()).ok());
    ASSERT_EQ(symlink("../blobs/none", folder.Path(name).c_str()), 0);
    const absl::Status status = Tokenizer::FromFolder(folder.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(std::string(name) + " is a link to a file that is not there"));
  }
}

TEST(Tokenizer, FromFolder_FileBesideThatIsTooLarge_IsRefusedByName) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("tokenizer.json"), Words().dump()).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("added_tokens.json"),
                                  "{}" + std::string(size_t{16} << 20, ' '))
                  .ok());
  const absl::Status status = Tokenizer::FromFolder(folder.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("added_tokens.json"));
}

TEST(Tokenizer, FromFolder_WithoutTokenizerJson_ReadsOlderFiles) {
  const TestFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    ASSERT_TRUE(WriteFileAtomically(folder.Path(name), text).ok());
  };
  const auto error = [&] {
    return std::string(Tokenizer::FromFolder(folder.path()).status().message());
  };
  write("config.json", R"({"model_type": "llama"})");
  EXPECT_THAT(error(), HasSubstr("has no tokenizer.json, and Muster cannot make it"));
  write("config.json", R"({"model_type": "bert"})");
  EXPECT_THAT(error(), HasSubstr("(a BertTokenizer has a vocab.txt)"));
  write("vocab.txt", "[UNK]\n[CLS]\n[SEP]\nword\n##s\n");
  write("added_tokens.json", R"({"<x>": 5})");
  const Tokenizer bert = Ok(Tokenizer::FromFolder(folder.path()));
  EXPECT_EQ(Ok(bert.EncodeIds("Words <x>other")), (Ids{1, 3, 4, 5, 0, 2}));
  EXPECT_EQ(bert.special_tokens().pad, "[PAD]");
  write("tokenizer_config.json", R"({"tokenizer_class": "GPT2Tokenizer"})");
  write("vocab.json", R"({"a": 0, "Ġ": 1, "Ġa": 2, "<|endoftext|>": 3})");
  write("merges.txt", "#version: 0.2\nĠ a\n");
  const Tokenizer gpt2 = Ok(Tokenizer::FromFolder(folder.path()));
  EXPECT_EQ(Ok(gpt2.EncodeIds("a a<|endoftext|>")), (Ids{0, 2, 3}));
  EXPECT_EQ(gpt2.special_tokens().eos, "<|endoftext|>");
}

TEST(Tokenizer, WhatTheFileHasAndWeDoNot_IsNamed) {
  const auto message = [](const Json& json) {
    return std::string(Tokenizer::FromJson(json.dump(), "f.json").status().message());
  };
  Json json = Words();
  json["version"] = "2.0";
  EXPECT_THAT(message(json), HasSubstr("version '2.0' is not supported"));
  json = Words();
  json["surprise"] = 1;
  EXPECT_THAT(message(json), HasSubstr("f.json: the setting 'surprise'"));
  json = Words();
  json["padding"] = {{"strategy", "Most"}};
  EXPECT_THAT(message(json), HasSubstr("f.json.padding.strategy"));
  json = Words();
  json.erase("model");
  EXPECT_THAT(message(json), HasSubstr("f.json.model"));
  EXPECT_THAT(std::string(Tokenizer::FromJson("{", "f.json").status().message()),
              HasSubstr("f.json:1:"));
}

TEST(Tokenizer, ManyThreads_GiveTheSameTokens) {
  Json json = Words();
  json["pre_tokenizer"] = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}};
  json["normalizer"] = {{"type", "NFC"}};
  json["model"]["vocab"]["Ġtwo"] = 5;
  const Tokenizer tokenizer = Make(json);
  std::string text;
  for (int i = 0; i < 5'000; ++i) text += "one two\n";
  const std::vector<TextInput> inputs(8, TextInput(text));
  const Ids want = Ok(tokenizer.EncodeIds(text));
  for (const Encoding& encoding : Ok(tokenizer.EncodeBatch(inputs, {}, 4))) {
    EXPECT_EQ(encoding.ids, want);
  }
}

size_t MemoryInUse() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

// All of it is one word: models hold more for each of its characters than the text has bytes.
TEST(Tokenizer, LargeText_LeavesNoMemoryBehind) {
  Json json = Words();
  json["pre_tokenizer"] = nullptr;
  json["model"] = {
      {"type", "BPE"}, {"vocab", {{"?", 0}, {"[CLS]", 1}, {"o", 2}}}, {"merges", Json::array()}};
  Json unigram = json;
  unigram["model"] = {{"type", "Unigram"},
                      {"unk_id", 0},
                      {"vocab", Json::array({{"?", -9.0}, {"[CLS]", -9.0}, {"o", -1.0}})}};
  for (const Json& each : {json, unigram}) {
    const Tokenizer tokenizer = Make(each);
    const std::string text(2 << 20, 'o');
    ASSERT_TRUE(tokenizer.Encode("ooo").ok());
    const size_t before = MemoryInUse();
    EXPECT_EQ(Ok(tokenizer.Encode(text)).ids.size(), text.size() + 1);
    EXPECT_EQ(Ok(tokenizer.EncodeIds(text)).size(), text.size() + 1);
    EXPECT_LT(MemoryInUse(), before + (1 << 20));
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end such a process

// Limits the growth of the process's address space.
class SpaceLeft {
 public:
  explicit SpaceLeft(uint64_t bytes) {
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    const uint64_t pages = std::stoull(ReadFile("/proc/self/statm").value_or(""));
    const rlimit small = {.rlim_cur = pages * static_cast<uint64_t>(getpagesize()) + bytes,
                          .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_AS, &small), 0);
  }
  ~SpaceLeft() { EXPECT_EQ(setrlimit(RLIMIT_AS, &before_), 0); }
  SpaceLeft(const SpaceLeft&) = delete;
  SpaceLeft& operator=(const SpaceLeft&) = delete;

 private:
  rlimit before_ = {};
};

// The stacks of new threads.
class StackBytes {
 public:
  explicit StackBytes(size_t bytes) {
    EXPECT_EQ(pthread_getattr_default_np(&before_), 0);
    pthread_attr_t larger;
    EXPECT_EQ(pthread_getattr_default_np(&larger), 0);
    EXPECT_EQ(pthread_attr_setstacksize(&larger, bytes), 0);
    EXPECT_EQ(pthread_setattr_default_np(&larger), 0);
    pthread_attr_destroy(&larger);
  }
  ~StackBytes() {
    EXPECT_EQ(pthread_setattr_default_np(&before_), 0);
    pthread_attr_destroy(&before_);
  }
  StackBytes(const StackBytes&) = delete;
  StackBytes& operator=(const StackBytes&) = delete;

 private:
  pthread_attr_t before_;
};

TEST(Tokenizer, ThreadsThatTheSystemDoesNotGive_AreNotNeeded) {
  const Tokenizer tokenizer = Make(Words());
  std::string text;
  for (int i = 0; i < 5'000; ++i) text += "one two\n";
  const std::vector<TextInput> inputs(64, TextInput(text));
  const Ids want = Ok(tokenizer.Encode(text)).ids;
  std::vector<Encoding> encodings;
  {
    // The memory of one thread, and of the other needs of all threads.
    const StackBytes stacks(size_t{600} << 20);
    const SpaceLeft space(size_t{1} << 30);
    encodings = Ok(tokenizer.EncodeBatch(inputs, {}, 16));
  }
  for (const Encoding& encoding : encodings) EXPECT_EQ(encoding.ids, want);
}

TEST(Tokenizer, TextThatMemoryIsTooSmallFor_IsAnErrorOnEveryThread) {
  const Tokenizer tokenizer = Make(Words());
  std::string large;
  for (int i = 0; i < 4'000'000; ++i) large += "one two\n";
  const std::vector<TextInput> inputs(2, TextInput(large));
  absl::Status refused;
  {
    const SpaceLeft space(size_t{200} << 20);
    refused = tokenizer.EncodeBatch(inputs, {}, 2).status();
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("text 0 of the batch: out of host memory"));
}

#endif

}  // namespace
}  // namespace muster
