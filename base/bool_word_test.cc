#include "base/bool_word.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(ParseBoolWord, Words_MeanWhatTheySay) {
  for (const char* yes : {"1", "y", "Yes", "T", "true", "TRUE", "on"}) {
    EXPECT_EQ(ParseBoolWord(yes), true) << yes;
  }
  for (const char* no : {"0", "n", "No", "F", "false", "FALSE", "off"}) {
    EXPECT_EQ(ParseBoolWord(no), false) << no;
  }
  for (const char* other : {"", "2", "maybe", "true "}) {
    EXPECT_EQ(ParseBoolWord(other), std::nullopt) << other;
  }
}

}  // namespace
}  // namespace muster
