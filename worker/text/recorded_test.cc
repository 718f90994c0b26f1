// What the tokenizers library did with tokenizers put together at random
// (tests/testdata/tokenizers).
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/log.h"
#include "tests/testdata/golden.h"
#include "worker/text/tokenizer.h"

namespace muster {
namespace {

using Json = nlohmann::json;

// What `tokenizer` gives for a case, in the case's form.
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

}  // namespace
}  // namespace muster
