#include "agent/coordination_values.h"

#include <optional>
#include <random>
#include <string>

#include "base/mutate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

RestartCounts Counts() {
  RestartCounts counts;
  counts.total = 4;
  v1::ClassCount* const one = counts.by_class.Add();
  one->set_end_class(v1::END_CLASS_OUT_OF_MEMORY);
  one->set_count(2);
  counts.last = {"rank 0 exited with code 2", {"usage:"}};
  counts.last.end_class = v1::END_CLASS_USER_ERROR;
  return counts;
}

void ExpectCounts(const RestartCounts& counts) {
  EXPECT_EQ(counts.total, 4);
  ASSERT_EQ(counts.by_class.size(), 1);
  EXPECT_EQ(counts.by_class[0].end_class(), v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(counts.by_class[0].count(), 2);
  EXPECT_EQ(counts.last.why, "rank 0 exited with code 2");
  EXPECT_THAT(counts.last.last_lines, ElementsAre("usage:"));
  EXPECT_EQ(counts.last.end_class, v1::END_CLASS_USER_ERROR);
}

TEST(EndValueTest, End_IsTheSameAfterwards) {
  for (const AttemptEnd::Cause cause :
       {AttemptEnd::Cause::kFailed, AttemptEnd::Cause::kMachineLost,
        AttemptEnd::Cause::kMachineLeft, AttemptEnd::Cause::kMachineCame}) {
    for (const bool restarts : {true, false}) {
      AttemptEnd end = {"rank 1 died", {"a", "b"}, cause};
      end.restarts = restarts;
      end.end_class = v1::END_CLASS_HANG;
      const AttemptEnd read = EndFromValue(EndToValue(end));
      EXPECT_EQ(read.why, "rank 1 died");
      EXPECT_THAT(read.last_lines, ElementsAre("a", "b"));
      EXPECT_EQ(read.cause, cause);
      EXPECT_EQ(read.restarts, restarts);
      EXPECT_EQ(read.end_class, v1::END_CLASS_HANG);
    }
  }
}

// Older versions wrote no more than this.
TEST(EndValueTest, OnlyReasonAndLines_IsAFailureOfUnknownClass) {
  const AttemptEnd end = EndFromValue(R"({"why": "rank 1 died", "last_lines": ["a"]})");
  EXPECT_EQ(end.why, "rank 1 died");
  EXPECT_EQ(end.cause, AttemptEnd::Cause::kFailed);
  EXPECT_EQ(end.end_class, v1::END_CLASS_UNSPECIFIED);
  EXPECT_FALSE(end.restarts);
}

TEST(EndValueTest, ProgramWroteWhatIsNotUtf8_IsReplaced) {
  const AttemptEnd end = EndFromValue(EndToValue({"rank 0 wrote \xff", {"caf\xe9"}}));
  EXPECT_EQ(end.why, "rank 0 wrote \xef\xbf\xbd");
  EXPECT_THAT(end.last_lines, ElementsAre("caf\xef\xbf\xbd"));
}

TEST(EndValueTest, ValuesThatAreNoneOfOurs_ReasonOrNothing) {
  for (const char* const text : {"", "{", "[]", "7", "null", "\xff\xfe"}) {
    EXPECT_EQ(EndFromValue(text).why, text);
  }
  EXPECT_EQ(EndFromValue(R"({"why": 3})").why, "");
  EXPECT_THAT(EndFromValue(R"({"why": ["a"], "last_lines": {}})").last_lines, ElementsAre());
  EXPECT_THAT(EndFromValue(R"({"last_lines": [1, null, "x"]})").last_lines, ElementsAre("x"));
  for (const char* const cause : {"-1", "4", "1.0", "\"1\"", "18446744073709551615"}) {
    EXPECT_EQ(EndFromValue(std::string(R"({"cause": )") + cause + "}").cause,
              AttemptEnd::Cause::kFailed)
        << cause;
  }
  EXPECT_FALSE(EndFromValue(R"({"restarts": 1})").restarts);
}

TEST(CountedValueTest, Counts_AreTheSameAfterwards) {
  const std::optional<CountedValue> read = CountedFromValue(CountedToValue({5, Counts(), "l7"}));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->attempt, 5);
  EXPECT_EQ(read->launch, "l7");
  ExpectCounts(read->counted);
}

TEST(CountedValueTest, NothingHappened_SaysSoBriefly) {
  EXPECT_EQ(CountedToValue({}), R"({"attempt":0,"counted":0})");
}

TEST(CountedValueTest, WhatIsNotACount_IsZero) {
  for (const char* const count : {"-1", "1000000001", "18446744073709551615", "1.0", "\"3\""}) {
    const std::string text = count;
    const std::optional<CountedValue> read =
        CountedFromValue(R"({"attempt": )" + text + R"(, "counted": )" + text +
                         R"(, "classes": {"HANG": )" + text + "}}");
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(read->attempt, 0) << count;
    EXPECT_EQ(read->counted.total, 0) << count;
    EXPECT_EQ(read->counted.by_class.size(), 0) << count;
  }
  for (const char* const text : {"", "{", "[]", "7"}) {
    EXPECT_FALSE(CountedFromValue(text).has_value()) << text;
  }
}

TEST(CountedValueTest, LastEndIsLong_NewestLinesAreKept) {
  RestartCounts counts;
  counts.last = {std::string(100'000, 'w'), {"oldest", std::string(100'000, 'x'), "newest"}};
  const std::string value = CountedToValue({.attempt = 1, .counted = counts});
  EXPECT_LT(value.size(), 10'000u);
  EXPECT_THAT(value, HasSubstr("newest"));
  for (int i = 0; i < 100; ++i) counts.last.last_lines.push_back(std::string(100, 'y'));
  EXPECT_THAT(CountedToValue({.attempt = 1, .counted = counts}), Not(HasSubstr("oldest")));
  // Another machine may write a name of any length.
  EXPECT_EQ(CountedFromValue(CountedToValue({.launch = std::string(1000, 'l')}))->launch.size(),
            64u);
}

TEST(SettingsValueTest, Settings_AreTheSameAfterwards) {
  const SettingsValue settings = {.settings = "num_processes 2",
                                  .debug = "true",
                                  .master_addr = "10.0.0.1",
                                  .master_port = 1234,
                                  .launch = "l7",
                                  .attempt = 5,
                                  .counted = Counts()};
  std::optional<SettingsValue> read =
      SettingsFromValue(SettingsToValue(settings, /*with_counts=*/true));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->settings, "num_processes 2");
  EXPECT_EQ(read->debug, "true");
  EXPECT_EQ(read->master_addr, "10.0.0.1");
  EXPECT_EQ(read->master_port, 1234);
  EXPECT_EQ(read->launch, "l7");
  EXPECT_EQ(read->attempt, 5);
  ExpectCounts(read->counted);

  const std::string without = SettingsToValue(settings, /*with_counts=*/false);
  EXPECT_THAT(without, Not(HasSubstr("attempt")));
  EXPECT_THAT(without, Not(HasSubstr("counted")));
  read = SettingsFromValue(without);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->attempt, 0);
  EXPECT_EQ(read->counted.last.why, "");
}

TEST(SettingsValueTest, ValuesThatAreNoneOfOurs_AreAbsent) {
  for (const char* const text : {"", "{", "[]", "7"}) {
    EXPECT_FALSE(SettingsFromValue(text).has_value()) << text;
  }
  const std::optional<SettingsValue> read = SettingsFromValue(
      R"({"settings": 7, "debug": [], "master_addr": 4, "master_port": "x", "launch": {}})");
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->settings, "");
  EXPECT_EQ(read->debug, "");
  EXPECT_EQ(read->master_addr, "");
  EXPECT_EQ(read->master_port, 0);
  EXPECT_EQ(read->launch, "");
}

TEST(CoordinationValuesTest, MutatedValues_AreReadWithoutACrash) {
  std::mt19937 random(20261122);
  const std::string end = EndToValue(Counts().last);
  const std::string counted = CountedToValue({5, Counts(), "l7"});
  const std::string settings =
      SettingsToValue({.settings = "s", .counted = Counts()}, /*with_counts=*/true);
  for (int i = 0; i < 5'000; ++i) {
    // What was read can be written.
    EndToValue(EndFromValue(Mutate(end, random)));
    if (const auto read = CountedFromValue(Mutate(counted, random))) {
      EXPECT_GE(read->counted.total, 0);
      CountedToValue(*read);
    }
    if (const auto read = SettingsFromValue(Mutate(settings, random))) {
      EXPECT_GE(read->attempt, 0);
      SettingsToValue(*read, /*with_counts=*/true);
    }
  }
}

}  // namespace
}  // namespace muster::agent
