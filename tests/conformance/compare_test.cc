#include "tests/conformance/compare.h"

#include <gtest/gtest.h>

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

TEST(Difference, SameValuesInOtherKeyOrder_Agree) {
  EXPECT_EQ(Difference(Json::parse(R"({"a":1,"b":[1.0,"inf"]})"),
                       Json::parse(R"({"b":[1,"inf"],"a":1})"), {}),
            "");
}

TEST(Difference, FloatsWithinTolerance_AgreeAndBeyondIt_DoNot) {
  EXPECT_EQ(Difference(Json(1.0000005), Json(1.0), {}), "");
  EXPECT_NE(Difference(Json(1.00001), Json(1.0), {}), "");
  EXPECT_NE(Difference(Json("nan"), Json(1.0), {}), "");
  EXPECT_EQ(Difference(Json("nan"), Json("nan"), {}), "");
}

TEST(Difference, IntegersOffByOne_NamesThePlace) {
  EXPECT_EQ(Difference(Json::parse("[[1],[2]]"), Json::parse("[[1],[3]]"), {}),
            "out[1][0]: got 2, want 3");
}

TEST(Difference, MissingAndSurplusKeys_AreReported) {
  EXPECT_EQ(Difference(Json::parse("{}"), Json::parse(R"({"a":1})"), {}), "out.a: missing");
  EXPECT_EQ(Difference(Json::parse(R"({"a":1})"), Json::parse("{}"), {}), "out.a: not wanted");
}

}  // namespace
}  // namespace muster::conformance
