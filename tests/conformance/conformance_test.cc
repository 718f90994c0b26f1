// Runs every recorded case (tests/testdata) of the kinds that the runner must know, and compares
// the answers with the expected ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/conformance/compare.h"
#include "tests/conformance/handlers.h"
#include "tests/testdata/golden.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;
using testing_support::GoldenCases;
using testing_support::TestdataPath;

struct Kind {
  const char* name;
  Tolerance tolerance;
};

class GoldenKind : public testing::TestWithParam<Kind> {};

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Returns the answer to a case without what it expects.
Json AnswerTo(Json test_case) {
  test_case.erase("out");
  test_case.erase("error");
  return Json::parse(AnswerLine(test_case.dump()));
}

// Compares the answer to a case with what the case expects.
void ExpectAnswer(const Json& test_case, const Tolerance& tolerance) {
  SCOPED_TRACE(test_case["id"].get<std::string>());
  const Json out = test_case.value("out", Json());
  const Json error = test_case.value("error", Json());
  const Json answer = AnswerTo(test_case);
  if (!error.is_null()) {
    ASSERT_TRUE(answer.contains("error")) << "must be rejected: " << answer.dump().substr(0, 300);
    EXPECT_NE(Lower(answer["error"]).find(Lower(error["contains"])), std::string::npos)
        << answer["error"] << " does not contain " << error["contains"];
    return;
  }
  ASSERT_TRUE(answer.contains("out")) << answer.dump();
  EXPECT_EQ(Difference(answer["out"], out, tolerance), "");
}

TEST_P(GoldenKind, EveryRecordedCase_GivesTheExpectedAnswer) {
  for (const Json& test_case : GoldenCases(GetParam().name)) {
    ExpectAnswer(test_case, GetParam().tolerance);
  }
}

TEST(SettingsAtRandom, EachIsResolvedAsByAccelerate) {
  std::ifstream cases(TestdataPath("settings/cases.jsonl"));
  int read = 0;
  for (std::string line; std::getline(cases, line); ++read) ExpectAnswer(Json::parse(line), {});
  EXPECT_GT(read, 200);
}

// Pickles are other files here (docs/accelerate.md), so only their names are compared.
TEST(SaveStateLayout, EveryRecordedCase_HasTheFilesAndTheWeights) {
  for (const Json& test_case : GoldenCases("save_state_layout")) {
    SCOPED_TRACE(test_case["id"].get<std::string>());
    const Json& out = test_case["out"];
    const Json answer = AnswerTo(test_case);
    ASSERT_TRUE(answer.contains("out")) << answer.dump();
    EXPECT_EQ(answer["out"]["files"], out["files"]);
    EXPECT_EQ(answer["out"]["contents"].size(), out["contents"].size());
    for (const auto& [name, content] : out["contents"].items()) {
      ASSERT_TRUE(answer["out"]["contents"].contains(name)) << name;
      if (content["format"] != "safetensors") continue;
      EXPECT_EQ(Difference(answer["out"]["contents"][name], content, {}), "") << name;
    }
  }
}

// If the peer's order depends on hashing, and for merged entries, only the set counts.
TEST(InferAutoDeviceMap, EveryRecordedCase_GivesTheExpectedMap) {
  const auto sorted = [](const Json& map) {
    std::vector<Json> entries(map.begin(), map.end());
    std::sort(entries.begin(), entries.end());
    return entries;
  };
  for (const Json& test_case : GoldenCases("infer_auto_device_map")) {
    SCOPED_TRACE(test_case["id"].get<std::string>());
    const Json out = test_case.value("out", Json());
    const Json error = test_case.value("error", Json());
    const Json answer = AnswerTo(test_case);
    if (!error.is_null()) {
      ASSERT_TRUE(answer.contains("error")) << answer.dump();
      EXPECT_NE(answer["error"].get<std::string>().find(error["contains"]), std::string::npos)
          << answer["error"];
      continue;
    }
    ASSERT_TRUE(answer.contains("out")) << answer.dump();
    EXPECT_EQ(answer["out"]["buffer_warning"], out["buffer_warning"]);
    const bool in_order =
        out.value("order_stable", true) && !test_case["in"]["clean_result"].get<bool>();
    if (in_order) {
      EXPECT_EQ(answer["out"]["device_map"], out["device_map"]);
    } else {
      EXPECT_EQ(sorted(answer["out"]["device_map"]), sorted(out["device_map"]));
    }
  }
}

Json Answer(const std::string& line) { return Json::parse(AnswerLine(line)); }

TEST(AnswerLine, WhateverTheLine_IsOneLineThatSaysWhy) {
  for (const char* line :
       {"{", "", "null", "[]", "7", "{\"id\": 1}", "\xff", R"({"id": "a", "kind": 5, "in": {}})",
        R"({"id": "a", "kind": "clip_grad"})", R"({"id": "a", "kind": "clip_grad", "in": null})",
        R"({"id": "a", "kind": "clip_grad", "in": {"dtype": "Q7", "grads": []}})"}) {
    const std::string answer = AnswerLine(line);
    EXPECT_EQ(answer.find('\n'), std::string::npos) << line;
    EXPECT_NE(Json::parse(answer).value("error", ""), "") << line;
  }
  EXPECT_EQ(Answer(R"({"id": "a", "kind": "no_such_kind", "in": {}})"),
            Json({{"id", "a"}, {"unsupported", true}}));
  EXPECT_EQ(Answer(R"({"id": [1], "kind": "no_such_kind"})")["id"], Json({1}));
}

// A case may hold anything in place of a field's value: it must neither end the runner nor hang it.
TEST(AnswerLine, FieldsOfTheWrongKind_AreErrorsNotCrashes) {
  const std::vector<Json> strange = {nullptr,        -5,    1.5,          "x", true, Json::array(),
                                     Json::object(), 1e300, {{1}, {2, 3}}};
  for (const auto& [kind, handler] : Handlers()) {
    const std::vector<Json> cases = GoldenCases(kind);
    for (size_t i = 0; i < std::min<size_t>(cases.size(), 3); ++i) {
      for (const auto& [field, ignored] : cases[i]["in"].items()) {
        for (const Json& value : strange) {
          Json in = cases[i]["in"];
          in[field] = value;
          const Json line = {{"id", kind}, {"kind", kind}, {"in", in}};
          const Json answer = Answer(line.dump());
          EXPECT_TRUE(answer.contains("error") || answer.contains("out")) << line;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Recorded, GoldenKind,
    testing::Values(Kind{"batch_sampler_shard", {}}, Kind{"iterable_dataset_shard", {}},
                    Kind{"gather_for_metrics", {}}, Kind{"skip_first_batches", {}},
                    Kind{"split_between_processes", {}}, Kind{"pad_across_processes", {}},
                    Kind{"lr_scheduler", {1e-9, 1e-9}}, Kind{"grad_accumulation", {}},
                    Kind{"clip_grad", {1e-12, 2e-6}}, Kind{"size_parsing", {}},
                    Kind{"safetensors_write", {}}, Kind{"config_yaml", {}}, Kind{"fsdp_config", {}},
                    Kind{"deepspeed_config", {}}, Kind{"balanced_memory", {1e-9, 1e-9}},
                    Kind{"hf_tokenizer", {}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster::conformance
