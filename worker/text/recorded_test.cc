// The recorded results of the tokenizers library for tokenizers that were put together at random
// (tests/testdata/tokenizers).
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "base/log.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/text/tokenizer.h"

namespace muster {
namespace {

using Json = nlohmann::json;

// Returns the result of `tokenizer` for a case, in the case's form.
Json AnswerOf(const Tokenizer& tokenizer, const Json& test_case) {
  const std::string text = test_case.at("text");
  const EncodeOptions options = {.add_special_tokens = test_case.at("special")};
  const auto encoding =
      test_case.contains("pair")
          ? tokenizer.EncodePair(text, test_case.at("pair").get<std::string>(), options)
          : tokenizer.Encode(text, options);
  if (!encoding.ok()) return encoding.status().ToString();
  Json answer = test_case;
  answer["ids"] = encoding->ids;
  answer["tokens"] = encoding->tokens;
  answer["offsets"] = Json::array();
  for (const auto& [begin, end] : encoding->offsets) answer["offsets"].push_back({begin, end});
  if (test_case.contains("type_ids")) answer["type_ids"] = encoding->type_ids;
  if (test_case.contains("decoded")) {
    const auto decoded = tokenizer.Decode(encoding->ids, false);
    answer["decoded"] = decoded.ok() ? *decoded : decoded.status().ToString();
  }
  return answer;
}

TEST(Recorded, TokenizersPutTogetherAtRandom_DoWhatThePeerDid) {
  SetLogLevel(LogLevel::kError);
  std::ifstream file(testing_support::TestdataPath("tokenizers/cases.jsonl"));
  std::map<std::string, Json> models;
  int64_t cases = 0;
  for (std::string line; std::getline(file, line);) {
    const Json json = Json::parse(line);
    if (json.contains("json")) {
      models[json.at("model")] = json.at("json");
      continue;
    }
    Json whole = json.at("tokenizer");
    whole["model"] = models.at(whole.at("model"));
    whole["model"].update(json.at("settings"));
    const auto tokenizer = Tokenizer::FromJson(whole.dump(), "recorded");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status() << " of " << json.at("tokenizer");
    for (const Json& test_case : json.at("cases")) {
      ++cases;
      ASSERT_EQ(AnswerOf(*tokenizer, test_case), test_case) << json.at("tokenizer");
    }
  }
  EXPECT_GT(cases, 1'000);
}

// Returns the result of a folder's tokenizer for a text, in the case's form.
Json AnswerOfFolder(const Tokenizer& tokenizer, const Json& test_case) {
  const std::string text = test_case.at("text"), pair = test_case.at("pair");
  const auto ids = tokenizer.EncodeIds(text), plain = tokenizer.EncodeIds(text, false);
  const auto both = tokenizer.EncodePair(text, pair);
  if (!ids.ok() || !plain.ok() || !both.ok()) return ids.status().ToString();
  const auto decoded = tokenizer.Decode(*ids, false), skipped = tokenizer.Decode(*ids, true);
  return {{"text", text},
          {"pair", pair},
          {"ids", *ids},
          {"plain", *plain},
          {"both", both->ids},
          {"decoded", decoded.value_or(decoded.status().ToString())},
          {"decoded_skip", skipped.value_or(skipped.status().ToString())}};
}

// Checks the folders of a file of cases; `variable` may name another file.
void ExpectFolders(const std::string& cases_file, const char* variable) {
  SetLogLevel(LogLevel::kError);
  const char* const others = std::getenv(variable);
  std::ifstream file(others != nullptr ? others : testing_support::TestdataPath(cases_file));
  int64_t cases = 0;
  for (std::string line; std::getline(file, line);) {
    // Their order matters in the folder's files.
    const auto json = nlohmann::ordered_json::parse(line);
    SCOPED_TRACE(json.at("id").dump() + " " + json.at("files").dump());
    const TestFolder folder;
    std::string model;
    ASSERT_TRUE(absl::Base64Unescape(json.at("model").get<std::string>(), &model));
    if (!model.empty()) std::ofstream(folder.Path("tokenizer.model")) << model;
    for (const auto& [name, content] : json.at("files").items()) {
      std::ofstream file_of_folder(folder.Path(name));
      if (content.is_string()) {
        file_of_folder << content.get<std::string>();
      } else {
        file_of_folder << content;
      }
    }
    const auto tokenizer = Tokenizer::FromFolder(folder.path());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(tokenizer->VocabSize(), json.at("vocab_size"));
    const SpecialTokens& roles = tokenizer->special_tokens();
    for (const auto& [role, token] : {std::pair("bos_token", roles.bos),
                                      {"eos_token", roles.eos},
                                      {"unk_token", roles.unk},
                                      {"pad_token", roles.pad}}) {
      EXPECT_EQ(token.has_value() ? Json(*token) : Json(), Json(json.at("roles").at(role))) << role;
    }
    for (const Json test_case : json.at("texts")) {
      ++cases;
      EXPECT_EQ(AnswerOfFolder(*tokenizer, test_case), test_case);
    }
  }
  EXPECT_GT(cases, 100);
}

TEST(Recorded, FoldersWithTokenizerModel_DoWhatTransformersDid) {
  ExpectFolders("tokenizers/sentence_pieces.jsonl", "MUSTER_SENTENCE_PIECE_CASES");
}

TEST(Recorded, FoldersWithFilesBesideTokenizerJson_DoWhatTransformersDid) {
  ExpectFolders("tokenizers/folders.jsonl", "MUSTER_FOLDER_CASES");
}

}  // namespace
}  // namespace muster
