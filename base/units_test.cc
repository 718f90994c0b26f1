#include "base/units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/testdata/golden.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(ParseMemorySize, DecimalAndBinaryUnits_AreDifferent) {
  EXPECT_EQ(*ParseMemorySize("1GB"), 1'000'000'000);
  EXPECT_EQ(*ParseMemorySize("1GiB"), 1'073'741'824);
  EXPECT_EQ(*ParseMemorySize("1e3MB"), 1'000'000'000);
  EXPECT_EQ(*ParseMemorySize(" +5. KB"), 5'000);
  EXPECT_EQ(*ParseMemorySize(".5kib"), 512);
  EXPECT_EQ(*ParseMemorySize("8Gb"), 1'000'000'000);
}

TEST(ParseMemorySize, FractionsOfAByte_AreCutOff) {
  EXPECT_EQ(*ParseMemorySize("0.0019KB"), 1);
  EXPECT_EQ(*ParseMemorySize("0.015Kb"), 1);
}

TEST(ParseMemorySize, Malformed_NamesTextAndUnits) {
  for (const char* text :
       {"", "GB", "5", "5TB", "5B", "1.2.3GB", "-1GB", "0x10GB", "infMB", "nanMB", "1_000MB",
        "1e400GB", "1e30GB", "3MB ", "e3MB", "1eMB", "5\0GB"}) {
    const auto size = ParseMemorySize(text);
    ASSERT_FALSE(size.ok()) << text;
    EXPECT_EQ(size.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(size.status().message()), HasSubstr("GiB"));
  }
}

TEST(ParseShardSize, BlanksAndTerabytes_AreUnderstood) {
  EXPECT_EQ(*ParseShardSize(" 2 TB "), 2'000'000'000'000);
  EXPECT_EQ(*ParseShardSize("10Gb"), 10'000'000'000);
}

TEST(ParseShardSize, BinaryUnitsAndBareNumbers_AreRefused) {
  for (const char* text : {"", "5", "10", "5GiB", "big", "-5GB", "1_000MB", "infKB"}) {
    EXPECT_FALSE(ParseShardSize(text).ok()) << text;
  }
}

TEST(HumanBytes, Scales_KeepThreeDigits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes(int64_t{1} << 40), "1.00 TiB");
  EXPECT_EQ(HumanBytes(-2048), "-2.00 KiB");
  EXPECT_EQ(HumanBytes(INT64_MIN), "-8.00 EiB");
  EXPECT_EQ(HumanBytes(1023 * 1024), "1.00 MiB");
}

TEST(HumanDuration, Scales_KeepTheTwoLargestParts) {
  EXPECT_EQ(HumanDuration(absl::Microseconds(350)), "350 us");
  EXPECT_EQ(HumanDuration(absl::Microseconds(12'500)), "12.5 ms");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(3200)), "3.2 s");
  EXPECT_EQ(HumanDuration(absl::Seconds(125)), "2m05s");
  EXPECT_EQ(HumanDuration(absl::Minutes(62)), "1h02m");
  EXPECT_EQ(HumanDuration(absl::Hours(76)), "3d04h");
  EXPECT_EQ(HumanDuration(-absl::Seconds(2)), "-2 s");
  EXPECT_EQ(HumanDuration(absl::InfiniteDuration()), "inf");
}

TEST(HumanDuration, JustBelowAUnit_IsThatUnit) {
  EXPECT_EQ(HumanDuration(absl::Milliseconds(999)), "999 ms");
  EXPECT_EQ(HumanDuration(absl::Microseconds(999'499)), "999 ms");
  EXPECT_EQ(HumanDuration(absl::Microseconds(999'500)), "1 s");
  EXPECT_EQ(HumanDuration(absl::Microseconds(999'999)), "1 s");
  EXPECT_EQ(HumanDuration(absl::Nanoseconds(999'949)), "999.9 us");
  EXPECT_EQ(HumanDuration(absl::Nanoseconds(999'950)), "1 ms");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(59'999)), "60 s");
}

TEST(ClockDuration, HoursAppearWhenNeeded) {
  EXPECT_EQ(ClockDuration(absl::Seconds(7)), "00:07");
  EXPECT_EQ(ClockDuration(absl::Seconds(3723)), "1:02:03");
  EXPECT_EQ(ClockDuration(absl::InfiniteDuration()), "?");
}

TEST(Sizes, GoldenCases_Match) {
  int cases = 0;
  for (const nlohmann::json& item : testing_support::GoldenCases("size_parsing")) {
    ++cases;
    const auto& size = item["in"]["size"];
    if (!size.is_string()) continue;
    const auto got = item["in"]["function"] == "hub" ? ParseShardSize(size.get<std::string>())
                                                     : ParseMemorySize(size.get<std::string>());
    ASSERT_EQ(got.ok(), item.contains("out")) << item;
    if (got.ok()) {
      EXPECT_EQ(*got, item["out"]["bytes"].get<int64_t>()) << item;
    }
  }
  EXPECT_GE(cases, 50);
}

}  // namespace
}  // namespace muster
