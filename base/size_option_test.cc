#include "base/size_option.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SizeOption, EveryUnit_IsUnderstood) {
  EXPECT_EQ(*ParseSizeOption("5.5GB"), 5'500'000'000);
  EXPECT_EQ(*ParseSizeOption(" 2 tb "), 2'000'000'000'000);
  EXPECT_EQ(*ParseSizeOption("1GiB"), 1'073'741'824);
  EXPECT_EQ(*ParseSizeOption("7kb"), 7'000);
  EXPECT_EQ(*ParseSizeOption("0MB"), 0);
}

TEST(SizeOption, Malformed_QuotesTheTextAndNamesTheUnits) {
  for (const char* text : {"", "10", "5B", "-1GB", "0x10GB", "1e30GB", "bigGb"}) {
    EXPECT_THAT(std::string(ParseSizeOption(text).status().message()),
                AllOf(HasSubstr(absl::StrCat("size \"", text, "\"")), HasSubstr("TB KiB")));
  }
}

TEST(SizeOption, BitsOrBytes_IsRefusedWithBothWays) {
  EXPECT_THAT(std::string(ParseSizeOption("10Gb").status().message()),
              AllOf(HasSubstr("size \"10Gb\" may mean bits or bytes"), HasSubstr("write 10GB")));
}

// Over all units in all cases: an option takes no text that the two grammars read differently.
TEST(Sizes, D14_EveryTextMeansTheSameOrIsRefused) {
  int differ = 0;
  for (const char prefix : {'k', 'm', 'g', 't'}) {
    for (const bool binary : {false, true}) {
      for (int cases = 0; cases < 8; ++cases) {
        std::string unit = {prefix, 'i', 'b'};
        for (int i = 0; i < 3; ++i) {
          if ((cases >> i) % 2 == 1) unit[i] = static_cast<char>(unit[i] - 'a' + 'A');
        }
        if (!binary) unit.erase(1, 1);
        const std::string text = "10" + unit;
        const auto memory = ParseMemorySize(text), shard = ParseShardSize(text);
        const auto option = ParseSizeOption(text);
        if (memory.ok() && shard.ok() && *memory != *shard) {
          ++differ;
          EXPECT_FALSE(option.ok()) << text;
        } else if (option.ok()) {
          EXPECT_EQ(*option, memory.ok() ? *memory : *shard) << text;
        } else {
          // Bits, or a unit of neither grammar.
          EXPECT_TRUE(!memory.ok()) << text;
        }
      }
    }
  }
  EXPECT_GT(differ, 0);
}

}  // namespace
}  // namespace muster
