#include "worker/models/stop_strings.h"

#include <gtest/gtest.h>

#include <random>

namespace muster::models {
namespace {

TEST(StopStrings, StringAcrossParts_EndsTheTextBeforeIt) {
  StopStrings stop({"\nUser:"});
  EXPECT_EQ(stop.Push("Hello\nUs"), "Hello");
  EXPECT_FALSE(stop.found());
  EXPECT_EQ(stop.Push("er: more"), "");
  EXPECT_TRUE(stop.found());
  EXPECT_EQ(stop.Push("x"), "");
  EXPECT_EQ(stop.Finish(), "");
}

TEST(StopStrings, BeginningThatGoesOnOtherwise_IsShownAfterAll) {
  StopStrings stop({"abcd"});
  EXPECT_EQ(stop.Push("xabc"), "x");
  EXPECT_EQ(stop.Push("ab"), "abc");
  EXPECT_EQ(stop.Finish(), "ab");
}

TEST(StopStrings, SeveralStrings_TheFirstInTheTextCounts) {
  StopStrings stop({"later", "soon", ""});
  EXPECT_EQ(stop.Push("1 soon 2 later"), "1 ");
}

// However the text is cut into parts, the result is the same.
TEST(StopStrings, Parts_DoNotMatter) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 30; ++i) text += static_cast<char>('a' + random() % 2);
    const std::vector<std::string> strings = {"aab", "bbba"};
    const size_t end = std::min(text.find(strings[0]), text.find(strings[1]));
    StopStrings stop(strings);
    std::string shown;
    for (size_t at = 0; at < text.size();) {
      const size_t count = 1 + random() % 5;
      shown += stop.Push(text.substr(at, count));
      at += count;
    }
    shown += stop.Finish();
    EXPECT_EQ(shown, text.substr(0, end));
    EXPECT_EQ(stop.found(), end != std::string::npos);
  }
}

}  // namespace
}  // namespace muster::models
