#include "worker/checkpoint/save_progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fake_clock.h"

namespace muster {
namespace {

TEST(SaveProgressTest, OldestSave_IsReportedWithWhatItHasWritten) {
  FakeClock clock;
  SaveProgress progress(clock);
  EXPECT_FALSE(progress.Read().has_value());
  auto first = progress.Begin("/c/0", 7, /*asynchronous=*/true, /*logs=*/false);
  first->Expect(100);
  clock.Advance(absl::Seconds(2));
  auto second = progress.Begin("/c/1", 8, true, false);
  first->Begin(40);
  first->Wrote(30);
  const std::optional<RunningSave> running = progress.Read();
  ASSERT_TRUE(running.has_value());
  EXPECT_EQ(running->path, "/c/0");
  EXPECT_EQ(running->step, 7);
  EXPECT_TRUE(running->asynchronous);
  EXPECT_EQ(running->written, 30u);
  EXPECT_EQ(running->bytes, 100u);
  EXPECT_EQ(running->elapsed, absl::Seconds(2));
  // More than was expected.
  first->Begin(80);
  EXPECT_EQ(progress.Read()->bytes, 120u);
  first.reset();
  EXPECT_EQ(progress.Read()->path, "/c/1");
  second.reset();
  EXPECT_FALSE(progress.Read().has_value());
}

TEST(SaveProgressTest, SaveThatTrainingWaitsFor_GivesSignsOfProgress) {
  FakeClock clock;
  SaveProgress progress(clock);
  auto beside = progress.Begin("/c/0", 7, /*asynchronous=*/true, false);
  beside->Wrote(1);
  // An asynchronous save continues while training hangs, so it is no sign of progress.
  EXPECT_EQ(progress.signs(), 0u);
  auto waited_for = progress.Begin("/c/1", 8, /*asynchronous=*/false, false);
  waited_for->Wrote(1);
  EXPECT_EQ(progress.signs(), 1u);
}

TEST(SaveProgressTest, LongSave_SaysInTheLogHowFarItIs) {
  FakeClock clock;
  SaveProgress progress(clock);
  const auto logged = [&](bool asynchronous, bool logs) {
    auto save = progress.Begin("/c/0", 7, asynchronous, logs);
    save->Expect(uint64_t{4} << 30);
    testing::internal::CaptureStderr();
    for (int second = 0; second < 30; ++second) {
      save->Wrote(100 << 20);
      clock.Advance(absl::Seconds(1));
    }
    return testing::internal::GetCapturedStderr();
  };
  const std::string log = logged(false, true);
  EXPECT_THAT(log, testing::HasSubstr("saving /c/0: rank 0 has written 600 MiB of 4.00 GiB, 120 "
                                      "MiB/s, for 5"));
  EXPECT_THAT(log, testing::HasSubstr("1.56 GiB of 4.00 GiB"));
  EXPECT_THAT(log, testing::Not(testing::HasSubstr("for 4")));
  EXPECT_EQ(logged(true, true), "");
  EXPECT_EQ(logged(false, false), "");
}

}  // namespace
}  // namespace muster
