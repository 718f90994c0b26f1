// Runs every shared golden case of the kinds the runner must know, and holds the answers against
// the expected ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/conformance/compare.h"
#include "tests/conformance/handlers.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

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

TEST_P(GoldenKind, EverySharedCase_GivesTheExpectedAnswer) {
  const char* directory = std::getenv("MUSTER_GOLDEN");
  ASSERT_NE(directory, nullptr)
      << "MUSTER_GOLDEN must name the directory of the golden cases (tools/test sets it)";
  std::ifstream file(std::string(directory) + "/" + GetParam().name + ".jsonl");
  ASSERT_TRUE(file.good()) << "no cases of kind " << GetParam().name << " in " << directory;
  int cases = 0;
  for (std::string line; std::getline(file, line);) {
    Json test_case = Json::parse(line);
    const Json out = test_case.value("out", Json());
    const Json error = test_case.value("error", Json());
    test_case.erase("out");
    test_case.erase("error");
    const Json answer = Json::parse(AnswerLine(test_case.dump()));
    SCOPED_TRACE(test_case["id"].get<std::string>());
    ++cases;
    if (!error.is_null()) {
      ASSERT_TRUE(answer.contains("error")) << "must be rejected: " << answer.dump().substr(0, 300);
      EXPECT_NE(Lower(answer["error"]).find(Lower(error["contains"])), std::string::npos)
          << answer["error"] << " does not contain " << error["contains"];
      continue;
    }
    if (!answer.contains("out")) {
      ADD_FAILURE() << answer.dump();
      continue;
    }
    EXPECT_EQ(Difference(answer["out"], out, GetParam().tolerance), "");
  }
  EXPECT_GT(cases, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Shared, GoldenKind,
    testing::Values(Kind{"batch_sampler_shard", {}}, Kind{"iterable_dataset_shard", {}},
                    Kind{"gather_for_metrics", {}}, Kind{"skip_first_batches", {}},
                    Kind{"split_between_processes", {}}, Kind{"pad_across_processes", {}},
                    Kind{"lr_scheduler", {1e-9, 1e-9}}, Kind{"grad_accumulation", {}},
                    Kind{"clip_grad", {1e-12, 2e-6}}, Kind{"size_parsing", {}},
                    Kind{"safetensors_write", {}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster::conformance
