#include "base/last_lines.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

int64_t Find(const std::string& text, int64_t begin, int lines) {
  return FindLastLines(begin, static_cast<int64_t>(text.size()), lines,
                       [&](int64_t offset, int64_t bytes) -> absl::StatusOr<std::string> {
                         return text.substr(offset, bytes);
                       })
      .value_or(-1);
}

TEST(FindLastLines, Newlines_SeparateLines) {
  EXPECT_EQ(Find("a\nbb\nccc\n", 0, 0), 9);
  EXPECT_EQ(Find("a\nbb\nccc\n", 0, 1), 5);
  EXPECT_EQ(Find("a\nbb\nccc\n", 0, 2), 2);
  EXPECT_EQ(Find("a\nbb\nccc", 0, 2), 2);
  EXPECT_EQ(Find("a\nbb\n", 0, 100), 0);
  EXPECT_EQ(Find("a\nbb\n", 1, 100), 1);
  EXPECT_EQ(Find("", 0, 1), 0);
}

TEST(FindLastLines, LinesLongerThanABlock_AreFound) {
  const std::string line = std::string(700'000, 'x') + "\n";
  EXPECT_EQ(Find(line + line + line, 0, 2), 700'001);
}

TEST(FindLastLines, ErrorOfReading_IsReturned) {
  const auto fails = [](int64_t, int64_t) -> absl::StatusOr<std::string> {
    return absl::UnavailableError("gone");
  };
  EXPECT_EQ(FindLastLines(0, 5, 1, fails).status(), absl::UnavailableError("gone"));
}

}  // namespace
}  // namespace muster
