// The runner's answers to recorded `training` cases. tests/parity trains them in real processes.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/conformance/handlers.h"
#include "tests/parity/expect_trajectory.h"
#include "tests/testdata/golden.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

TEST(Training, EveryRecordedCase_FollowsAccelerate) {
  const std::string folder = testing_support::GoldenFolder();
  for (const Json& test_case : testing_support::GoldenCases("training")) {
    SCOPED_TRACE(test_case["id"].get<std::string>());
    Json asked = test_case;
    asked.erase("out");
    for (const char* field : {"initial_weights", "data"}) {
      asked["in"][field] = folder + "/" + asked["in"][field].get<std::string>();
    }
    const Json answer = Json::parse(AnswerLine(asked.dump()));
    ASSERT_TRUE(answer.contains("out")) << answer.dump();
    parity::ExpectTrajectory(answer["out"], test_case, folder);
  }
}

TEST(Training, CaseThatDoesNotFit_IsAnError) {
  Json asked = testing_support::GoldenCases("training").front();
  asked["in"]["initial_weights"] = "/no/such/file.safetensors";
  const Json answer = Json::parse(AnswerLine(asked.dump()));
  ASSERT_TRUE(answer.contains("error")) << answer.dump();
  EXPECT_NE(answer["error"].get<std::string>().find("/no/such/file.safetensors"), std::string::npos)
      << answer;
}

}  // namespace
}  // namespace muster::conformance
