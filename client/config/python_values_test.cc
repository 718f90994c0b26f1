#include "client/config/python_values.h"

#include <gtest/gtest.h>

namespace muster::client {
namespace {

TEST(PythonValues, WholeNumbers_AreThoseOfPythonsInt) {
  EXPECT_EQ(ParsePythonInt("100_000_000"), 100'000'000);
  EXPECT_EQ(ParsePythonInt(" -7 "), -7);
  EXPECT_EQ(ParsePythonInt("+007"), 7);
  for (const char* text :
       {"", " ", "_1", "1_", "1__0", "1 0", "0x10", "5.0", "1e3", "9223372036854775808", "none"}) {
    EXPECT_EQ(ParsePythonInt(text), std::nullopt) << text;
  }
}

TEST(PythonValues, Floats_AreThoseOfPythonsFloat) {
  EXPECT_EQ(ParsePythonFloat("1_0.2_5"), 10.25);
  EXPECT_EQ(ParsePythonFloat(" .5 "), 0.5);
  EXPECT_EQ(ParsePythonFloat("1e-3"), 0.001);
  for (const char* text : {"", "_1", "1_.5", "1._5", "0x10", "one"}) {
    EXPECT_EQ(ParsePythonFloat(text), std::nullopt) << text;
  }
}

TEST(PythonValues, Truth_IsPythons) {
  using Json = nlohmann::json;
  for (const Json& value : {Json(true), Json(-1), Json(0.5), Json("false"), Json::array({0})}) {
    EXPECT_TRUE(IsPythonTrue(value)) << value;
  }
  for (const Json& value :
       {Json(false), Json(0), Json(0.0), Json(""), Json(), Json::array(), Json::object()}) {
    EXPECT_FALSE(IsPythonTrue(value)) << value;
  }
}

TEST(PythonValues, TrueIsOneAndFalseIsZero) {
  EXPECT_TRUE(IsPythonEqual(true, 1));
  EXPECT_TRUE(IsPythonEqual(1.0, true));
  EXPECT_TRUE(IsPythonEqual(false, 0));
  EXPECT_TRUE(IsPythonEqual({0, true}, {false, 1}));
  EXPECT_FALSE(IsPythonEqual(true, 2));
  EXPECT_FALSE(IsPythonEqual(true, "true"));
  EXPECT_FALSE(IsPythonEqual({1}, {1, 1}));
  EXPECT_FALSE(IsPythonEqual(false, nullptr));
}

}  // namespace
}  // namespace muster::client
