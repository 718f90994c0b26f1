#include "base/log_level_control.h"

#include "base/fake_clock.h"
#include "base/test_wait.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

class LogLevelControlTest : public ::testing::Test {
 protected:
  LogLevelControlTest() { SetLogLevel(LogLevel::kWarning); }
  ~LogLevelControlTest() override { SetLogLevel(LogLevel::kInfo); }

  FakeClock clock_;
};

TEST_F(LogLevelControlTest, LevelWithATime_ReturnsToTheOneBefore) {
  LogLevelControl control(&clock_);
  EXPECT_EQ(control.Get().level, LogLevel::kWarning);
  EXPECT_EQ(control.Get().left, absl::InfiniteDuration());

  const LogLevelControl::State set = control.Set(LogLevel::kDebug, absl::Minutes(10));
  EXPECT_EQ(set.level, LogLevel::kDebug);
  EXPECT_EQ(set.next, LogLevel::kWarning);
  EXPECT_EQ(set.left, absl::Minutes(10));

  clock_.Advance(absl::Minutes(10) - absl::Milliseconds(1));
  control.Tick();
  EXPECT_EQ(GetLogLevel(), LogLevel::kDebug);
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_EQ(control.Tick(), absl::InfiniteFuture());
  EXPECT_EQ(GetLogLevel(), LogLevel::kWarning);
  EXPECT_EQ(control.Get().left, absl::InfiniteDuration());
}

TEST_F(LogLevelControlTest, SecondLevelWithATime_LeavesWhatReturns) {
  LogLevelControl control(&clock_);
  control.Set(LogLevel::kDebug, absl::Minutes(10));
  clock_.Advance(absl::Minutes(9));
  EXPECT_EQ(control.Set(LogLevel::kError, absl::Minutes(10)).next, LogLevel::kWarning);
  clock_.Advance(absl::Minutes(2));
  control.Tick();
  EXPECT_EQ(GetLogLevel(), LogLevel::kError);
  clock_.Advance(absl::Minutes(8));
  control.Tick();
  EXPECT_EQ(GetLogLevel(), LogLevel::kWarning);
}

TEST_F(LogLevelControlTest, LevelWithoutATime_Stays) {
  LogLevelControl control(&clock_);
  control.Set(LogLevel::kDebug, absl::Minutes(10));
  EXPECT_EQ(control.Set(LogLevel::kError, absl::InfiniteDuration()).next, LogLevel::kError);
  clock_.Advance(absl::Hours(1));
  control.Tick();
  EXPECT_EQ(GetLogLevel(), LogLevel::kError);
}

TEST_F(LogLevelControlTest, End_ReturnsToTheLevelBefore) {
  {
    LogLevelControl control(&clock_);
    control.Set(LogLevel::kDebug, absl::Hours(1));
  }
  EXPECT_EQ(GetLogLevel(), LogLevel::kWarning);
}

// With the thread and the machine's clock, so no call of State() is needed.
TEST_F(LogLevelControlTest, LevelWithATime_ReturnsByItself) {
  LogLevelControl control;
  control.Set(LogLevel::kDebug, absl::Milliseconds(1));
  WaitUntil([] { return GetLogLevel() == LogLevel::kWarning; });
}

}  // namespace
}  // namespace muster
