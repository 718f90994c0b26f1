#include "worker/text/folder_tokens.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::text {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

FolderFiles Files() {
  FolderFiles files = {.folder = "dir"};
  files.tokenizer = {{"added_tokens",
                      {{{"id", 0},
                        {"content", "</s>"},
                        {"single_word", false},
                        {"lstrip", false},
                        {"rstrip", false},
                        {"normalized", false},
                        {"special", true}}}}};
  return files;
}

FolderTokens Read(const FolderFiles& files) {
  const absl::StatusOr<FolderTokens> tokens = TokensOfFolder(files);
  EXPECT_TRUE(tokens.ok()) << tokens.status();
  return tokens.value_or(FolderTokens());
}

// Returns the added tokens, in order, with the flags that are set.
std::vector<std::string> Added(const FolderTokens& tokens) {
  std::vector<std::string> all;
  for (const AddedToken& token : tokens.added) {
    all.push_back(token.content + (token.special ? " special" : "") +
                  (token.lstrip ? " lstrip" : "") + (token.normalized ? " normalized" : ""));
  }
  return all;
}

TEST(TokensOfFolder, NothingBesideTheFile_AddsNothing) {
  const FolderTokens tokens = Read(Files());
  EXPECT_THAT(tokens.roles, IsEmpty());
  EXPECT_THAT(tokens.added, IsEmpty());
}

TEST(TokensOfFolder, WithoutFlags_TokensOfFilesAreAddedOnceMore) {
  FolderFiles files = Files();
  const nlohmann::ordered_json stripped = {{"content", "<s>"}, {"lstrip", true}},
                               extra = {{"content", "<x>"}, {"special", false}},
                               plain = {{"content", "<y>"}, {"lstrip", true}};
  files.tokenizer_config = {{"bos_token", stripped},
                            {"extra_special_tokens", {extra}},
                            {"added_tokens_decoder", {{"5", plain}}}};
  const std::vector<std::string> before = Added(Read(files));
  files.without_flags = true;
  std::vector<std::string> wanted = before;
  wanted.insert(wanted.end(), {"<s> special", "<x> special"});
  EXPECT_EQ(Added(Read(files)), wanted);
}

TEST(TokensOfFolder, RolesOfTokensThatTheFileLacks_AreAddedInTransformersOrder) {
  FolderFiles files = Files();
  files.tokenizer_config = {{"zoo_token", "<zoo>"},
                            {"image_token", "<image>"},
                            {"pad_token", "<pad>"},
                            {"eos_token", "</s>"},
                            {"bos_token", {{"content", "<s>"}, {"lstrip", true}}},
                            {"add_bos_token", true},
                            {"extra_special_tokens", {"<tool>", "<pad>"}}};
  const FolderTokens tokens = Read(files);
  EXPECT_THAT(Added(tokens), ElementsAre("<s> special lstrip", "<pad> special", "<zoo> special",
                                         "<image> special", "<tool> special"));
  EXPECT_THAT(tokens.roles,
              UnorderedElementsAre(Pair("bos_token", "<s>"), Pair("eos_token", "</s>"),
                                   Pair("pad_token", "<pad>"), Pair("zoo_token", "<zoo>"),
                                   Pair("image_token", "<image>")));
}

TEST(TokensOfFolder, AddedTokensDecoder_AddsByIdAndCountsForKnownTokens) {
  FolderFiles files = Files();
  files.tokenizer_config = {
      {"added_tokens_decoder",
       {{"10", {{"content", "<b>"}, {"special", false}}},
        {"9", {{"content", "<a>"}, {"special", false}, {"normalized", false}}},
        {"0", {{"content", "</s>"}, {"special", true}, {"lstrip", true}}}}},
      {"pad_token", "<b>"}};
  // Without special_tokens_map.json, which is as old as a file without added_tokens_decoder.
  files.special_tokens_map = {{"eos_token", "</s>"}, {"unk_token", "<unk>"}};
  files.added_tokens = {{"<c>", 11}};
  const FolderTokens tokens = Read(files);
  EXPECT_THAT(Added(tokens), ElementsAre("</s> special lstrip", "<a>", "<b> special"));
  EXPECT_THAT(tokens.roles, UnorderedElementsAre(Pair("pad_token", "<b>")));
}

TEST(TokensOfFolder, OlderFiles_CountWithoutAddedTokensDecoder) {
  FolderFiles files = Files();
  files.tokenizer_config = {{"eos_token", "<end>"}, {"pad_token", "</s>"}};
  files.special_tokens_map = {
      {"eos_token", "</s>"}, {"pad_token", nullptr}, {"additional_special_tokens", {"<x>"}}};
  files.added_tokens = {{"<y>", 12}, {"<x>", 11}, {"</s>", 0}};
  const FolderTokens tokens = Read(files);
  EXPECT_THAT(Added(tokens), ElementsAre("<x> normalized", "<y> normalized"));
  EXPECT_THAT(tokens.roles, UnorderedElementsAre(Pair("eos_token", "</s>")));
  files.special_tokens_map = {{"extra_special_tokens", {"<x>"}}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<x> special", "<y> normalized", "<end> special"));
}

// The square of their number would take minutes.
TEST(TokensOfFolder, ManyTokensAndRoles_AreRead) {
  constexpr int kTokens = 100'000;
  FolderFiles files = Files();
  files.tokenizer_config = nlohmann::ordered_json::object();
  nlohmann::ordered_json extra = nlohmann::ordered_json::array();
  for (int i = 0; i < kTokens; ++i) extra.push_back("<extra_" + std::to_string(i) + ">");
  files.tokenizer_config["extra_special_tokens"] = std::move(extra);
  files.added_tokens = nlohmann::ordered_json::object();
  nlohmann::ordered_json::object_t::Container& members =
      files.added_tokens.get_ref<nlohmann::ordered_json::object_t&>();
  for (int i = 0; i < kTokens; ++i)
    members.emplace_back("<token_" + std::to_string(i) + ">", kTokens + i);
  const FolderTokens tokens = Read(files);
  EXPECT_EQ(tokens.added.size(), 2 * kTokens);
}

// As in transformers: tokens of objects in tokenizer_config.json are not known at that point.
TEST(TokensOfFolder, TokenOfAddedTokensJson_IsSpecialIfATextOrTheMapSaysSo) {
  FolderFiles files;
  files.added_tokens = {{"<a>", 8}, {"<b>", 9}, {"<c>", 10}, {"<d>", 11}};
  files.tokenizer_config = {{"extra_special_tokens", {"<a>", {{"content", "<b>"}}}}};
  files.special_tokens_map = {{"eos_token", {{"content", "<c>"}}}};
  EXPECT_THAT(Added(Read(files)),
              ElementsAre("<a> special", "<b> normalized", "<c> special", "<d> normalized"));
}

TEST(TokensOfFolder, IdThatTheTokenizerHas_IsTheTokenizers) {
  FolderFiles files;
  files.tokenizer = {{"added_tokens", {{{"id", 8}, {"content", "<x>"}, {"special", true}}}}};
  files.added_tokens = {{"<y>", 8}, {"<z>", 9}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<z> normalized"));
}

// As in transformers, which adds both, one after the other.
TEST(TokensOfFolder, ExtraTokenWithOtherFlagsThanItsRole_Counts) {
  FolderFiles files;
  files.tokenizer_config = {
      {"bos_token", "<s>"},
      {"extra_special_tokens",
       {{{"content", "<s>"}, {"lstrip", true}, {"special", false}, {"normalized", false}}, "<s>"}}};
  const auto tokens = TokensOfFolder(files);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_EQ(tokens->added.size(), 2u);
  EXPECT_FALSE(tokens->added[0].lstrip);
  EXPECT_TRUE(tokens->added[1].lstrip);
  EXPECT_TRUE(tokens->added[1].special);
}

TEST(TokensOfFolder, TokenOfTheFileThatHasARole_BecomesSpecial) {
  FolderFiles files = Files();
  files.tokenizer["added_tokens"][0]["special"] = false;
  files.tokenizer_config = {{"pad_token", "</s>"}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("</s> special"));
  files.tokenizer_config["added_tokens_decoder"] = nlohmann::ordered_json::object();
  EXPECT_THAT(Added(Read(files)), IsEmpty());
}

TEST(TokensOfFolder, SeveralListsOfExtraTokens_TheFirstCounts) {
  FolderFiles files = Files();
  files.tokenizer_config = {{"additional_special_tokens", {"<old>"}},
                            {"extra_special_tokens", {"<new>"}}};
  files.special_tokens_map = {{"additional_special_tokens", {"<map>"}}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<new> special"));
  files.tokenizer_config.erase("extra_special_tokens");
  EXPECT_THAT(Added(Read(files)), ElementsAre("<old> special"));
  files.tokenizer_config["additional_special_tokens"] = nullptr;
  EXPECT_THAT(Added(Read(files)), IsEmpty());
  files.tokenizer_config.erase("additional_special_tokens");
  EXPECT_THAT(Added(Read(files)), ElementsAre("<map> special"));
}

TEST(TokensOfFolder, ExtraTokensOfTheMap_ComeBehind) {
  FolderFiles files = Files();
  files.tokenizer_config = {{"extra_special_tokens", {"<new>"}}};
  files.special_tokens_map = {{"extra_special_tokens", {"<map>", "<new>"}},
                              {"additional_special_tokens", {"<old>"}}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<new> special", "<map> special"));
  files.special_tokens_map["extra_special_tokens"] = nullptr;
  EXPECT_THAT(Added(Read(files)), IsEmpty());
  files.special_tokens_map["extra_special_tokens"] = {{"own", "<own>"}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<own> special", "<old> special"));
}

TEST(TokensOfFolder, FlagsThatAnObjectLeavesOut_AreThoseOfTransformers) {
  using Json = nlohmann::ordered_json;
  const Json plain = {{"content", "<a>"}}, not_special = {{"content", "<b>"}, {"special", false}};
  const Json normalized = {{"content", "<c>"}, {"special", false}, {"normalized", true}};
  FolderFiles files = Files();
  files.tokenizer_config = {{"pad_token", not_special}, {"cls_token", normalized}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<b> special", "<c> special normalized"));
  std::swap(files.tokenizer_config, files.special_tokens_map);
  EXPECT_THAT(Added(Read(files)), ElementsAre("<b> special", "<c> special normalized"));
  files = Files();
  files.tokenizer_config = {{"extra_special_tokens", Json::array({plain, not_special, "<d>"})}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<a> normalized", "<b> normalized", "<d> special"));
  std::swap(files.tokenizer_config, files.special_tokens_map);
  EXPECT_THAT(Added(Read(files)), ElementsAre("<a> special", "<b> normalized", "<d> special"));
  // A role makes it special wherever else it is named.
  files = Files();
  files.tokenizer_config = {{"own_token", "<a>"}, {"added_tokens_decoder", {{"9", plain}}}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<a> special"));
  files.tokenizer_config.erase("added_tokens_decoder");
  files.added_tokens = {{"<a>", 9}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<a> special normalized"));
}

TEST(TokensOfFolder, OwnRoles_ComeInTransformersOrder) {
  using Json = nlohmann::ordered_json;
  const Json object = {{"__type", "AddedToken"}, {"content", "<object>"}, {"lstrip", true}};
  FolderFiles files = Files();
  files.tokenizer_config = {{"extra_special_tokens", {{"img", "<img>"}, {"eos_token", "<e>"}}},
                            {"b_token", "<b>"},
                            {"a_token", object},
                            {"eos_token", "</s>"}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<e> special", "<object> special lstrip",
                                              "<b> special", "<img> special"));
  EXPECT_EQ(Read(files).roles.at("a_token"), "<object>");
  // Own roles of the map count unless tokenizer_config.json names them as a text.
  files.special_tokens_map = {{"b_token", "<n>"},
                              {"c_token", {{"content", "<c>"}}},
                              {"a_token", "<m>"},
                              {"extra_special_tokens", {{"q", "<q>"}}}};
  EXPECT_THAT(Added(Read(files)), ElementsAre("<e> special", "<m> special", "<b> special",
                                              "<c> special", "<img> special", "<q> special"));
  // Values that are not tokens.
  files = Files();
  files.tokenizer_config = {{"d_token", {{"content", "<d>"}}}, {"e_token", true}};
  EXPECT_THAT(Added(Read(files)), IsEmpty());
}

TEST(TokensOfFolder, WhatIsWrong_NamesFileAndField) {
  const auto message = [](const char* config) {
    FolderFiles files = Files();
    files.tokenizer_config = nlohmann::ordered_json::parse(config);
    return std::string(TokensOfFolder(files).status().message());
  };
  EXPECT_THAT(message(R"({"eos_token": 7})"),
              HasSubstr("dir/tokenizer_config.json: eos_token: a token must be a text"));
  EXPECT_THAT(message(R"({"eos_token": {"content": "a", "lstrip": 1}})"),
              HasSubstr("eos_token.lstrip: must be true or false"));
  EXPECT_THAT(message(R"({"extra_special_tokens": 7})"), HasSubstr("must be a list of tokens"));
  EXPECT_THAT(message(R"({"extra_special_tokens": ["a", 7]})"),
              HasSubstr("extra_special_tokens[1]: a token must be"));
  EXPECT_THAT(message(R"({"added_tokens_decoder": []})"), HasSubstr("must be an object"));
  EXPECT_THAT(message(R"({"added_tokens_decoder": {"x": {"content": "a"}}})"),
              HasSubstr("\"x\" must be an id"));
  FolderFiles files = Files();
  files.added_tokens = {{"<a>", "1"}};
  EXPECT_THAT(std::string(TokensOfFolder(files).status().message()),
              HasSubstr("dir/added_tokens.json: the id of \"<a>\" is no number"));
}

TEST(TokensOfFolder, ValuesOfEveryKind_AreErrorsOrValid) {
  using Json = nlohmann::ordered_json;
  const std::vector<Json> values = {nullptr,
                                    true,
                                    -1,
                                    1e300,
                                    uint64_t{1} << 63,
                                    "",
                                    "</s>",
                                    Json::array(),
                                    Json::object(),
                                    {1, "a", nullptr},
                                    {{"content", ""}},
                                    {{"content", {{"content", 1}}}},
                                    {{"-1", {{"content", "a"}}}},
                                    {{"0", "a"}}};
  for (const Json& value : values) {
    for (const char* const name : {"eos_token", "own_token", "extra_special_tokens",
                                   "additional_special_tokens", "added_tokens_decoder"}) {
      FolderFiles files = Files();
      files.tokenizer_config = {{name, value}};
      (void)TokensOfFolder(files);
      std::swap(files.tokenizer_config, files.special_tokens_map);
      (void)TokensOfFolder(files);
    }
    FolderFiles files = Files();
    files.tokenizer = value;
    files.tokenizer_config = files.special_tokens_map = files.added_tokens = value;
    (void)TokensOfFolder(files);
    files.tokenizer = {{"added_tokens", value}};
    files.added_tokens = {{"a", value}};
    (void)TokensOfFolder(files);
  }
}

}  // namespace
}  // namespace muster::text
