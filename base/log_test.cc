#include "base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::HasSubstr;
using ::testing::internal::CaptureStderr;
using ::testing::internal::GetCapturedStderr;

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override { SetLogLevel(LogLevel::kInfo); }
  void TearDown() override {
    SetLogJson(false);
    SetLogIdentity("");
    SetLogLevel(LogLevel::kInfo);
  }
};

TEST_F(LogTest, BelowTheLevel_WritesNothingAndEvaluatesNothing) {
  int evaluated = 0;
  CaptureStderr();
  MUSTER_LOG(Debug) << ++evaluated;
  EXPECT_EQ(GetCapturedStderr(), "");
  EXPECT_EQ(evaluated, 0);
}

TEST_F(LogTest, Text_IsOneLineWithLevelPlaceAndWho) {
  SetLogIdentity("rank 3");
  CaptureStderr();
  MUSTER_LOG(Warning) << "disk " << 97 << " % full";
  const std::string line = GetCapturedStderr();
  EXPECT_EQ(line.front(), 'W');
  EXPECT_THAT(line, HasSubstr("[rank 3] log_test.cc:"));
  EXPECT_THAT(line, HasSubstr("] disk 97 % full\n"));
}

TEST_F(LogTest, Json_EscapesWhatTheMessageHolds) {
  SetLogJson(true);
  SetLogIdentity("a\"b");
  CaptureStderr();
  MUSTER_LOG(Error) << "two\nlines\\ \x01";
  const std::string line = GetCapturedStderr();
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  EXPECT_THAT(line, HasSubstr(R"("level":"error","who":"a\"b","file":"log_test.cc")"));
  EXPECT_THAT(line, HasSubstr(R"("message":"two\nlines\\ \u0001"})"));
}

TEST_F(LogTest, Json_IsUtf8WhateverTheMessageHolds) {
  SetLogJson(true);
  CaptureStderr();
  MUSTER_LOG(Info)
      << "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 \xff \xc3 \xc0\x80 \xed\xa0\x80 \xf0\x9f";
  EXPECT_THAT(GetCapturedStderr(),
              HasSubstr("\"message\":\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 � � �� ��� ��\"}"));
}

TEST_F(LogTest, Text_OfOthersCannotForgeALineOrReachTheTerminal) {
  SetLogIdentity("rank 1\nE");
  CaptureStderr();
  MUSTER_LOG(Info)
      << "job a\nE 01-01 00:00:00.000 log.cc:1] forged\r\t\x1b[2J\x7f \xc2\x9b \xe2\x80\xa8 \xff";
  const std::string line = GetCapturedStderr();
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  EXPECT_THAT(line, HasSubstr("[rank 1\\nE] "));
  EXPECT_THAT(line, HasSubstr("] job a\\nE 01-01 00:00:00.000 log.cc:1] forged\\r\\t\\x1b[2J\\x7f "
                              "\\xc2\\x9b \\xe2\\x80\\xa8 \\xff\n"));
}

TEST_F(LogTest, OneLine_LeavesWordsOfAnyLanguageAlone) {
  EXPECT_EQ(OneLine("h\xc3\xb6he \xe2\x82\xac \xf0\x9f\x98\x80 \"a\\b\""),
            "h\xc3\xb6he \xe2\x82\xac \xf0\x9f\x98\x80 \"a\\b\"");
}

TEST_F(LogTest, LevelNames_AreReadInAnyCase) {
  LogLevel level = LogLevel::kError;
  EXPECT_TRUE(ParseLogLevel("Debug", &level));
  EXPECT_EQ(level, LogLevel::kDebug);
  EXPECT_TRUE(ParseLogLevel("WARN", &level));
  EXPECT_EQ(level, LogLevel::kWarning);
  EXPECT_FALSE(ParseLogLevel("loud", &level));
  EXPECT_EQ(level, LogLevel::kWarning);
}

using CheckDeathTest = LogTest;

TEST_F(CheckDeathTest, BrokenInvariant_EndsTheProcessWithTheCondition) {
  const int seats = 2;
  MUSTER_CHECK(seats == 2) << "not printed";
  EXPECT_DEATH(MUSTER_CHECK(seats == 3) << "seats " << seats,
               "log_test.cc:.*broken invariant: seats == 3 seats 2");
}

}  // namespace
}  // namespace muster
