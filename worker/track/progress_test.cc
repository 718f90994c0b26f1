#include "worker/track/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/fake_clock.h"

namespace muster {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ProgressTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe2(pipe_, O_NONBLOCK), 0);
    options_ = {.description = "train",
                .total = 100,
                .fd = pipe_[1],
                .terminal = true,
                .columns = 80,
                .clock = &clock_};
  }
  void TearDown() override {
    close(pipe_[0]);
    close(pipe_[1]);
  }

  std::string Written() {
    char buffer[65536];
    const ssize_t n = read(pipe_[0], buffer, sizeof(buffer));
    return n > 0 ? std::string(buffer, n) : "";
  }

  FakeClock clock_;
  int pipe_[2];
  ProgressOptions options_;
};

TEST_F(ProgressTest, Line_ShowsShareRateTimeLeftAndPostfix) {
  Progress progress(options_);
  clock_.Advance(absl::Seconds(10));
  progress.SetPostfix(std::vector<std::pair<std::string, double>>{{"loss", 0.123456}});
  progress.Advance(45);
  EXPECT_EQ(
      progress.Line(100),
      "train:  45%|█████████████▌                | 45/100 [00:10<00:12, 4.5it/s, loss=0.1235]");
  EXPECT_THAT(Written(), EndsWith("\x1b[K"));
}

TEST_F(ProgressTest, SlowLoop_ShowsSecondsPerItem) {
  Progress progress(options_);
  clock_.Advance(absl::Seconds(8));
  progress.Advance(4);
  EXPECT_THAT(progress.Line(80), HasSubstr("[00:08<03:12, 2s/it]"));
}

TEST_F(ProgressTest, UnknownTotal_ShowsCountAndRate) {
  options_.total = 0;
  Progress progress(options_);
  clock_.Advance(absl::Seconds(2));
  progress.Advance(7);
  EXPECT_EQ(progress.Line(80), "train: 7it [00:02, 3.5it/s]");
}

TEST_F(ProgressTest, Period_LimitsRedraws) {
  Progress progress(options_);
  EXPECT_THAT(Written(), StartsWith("\rtrain:   0%|"));
  progress.Advance();
  clock_.Advance(absl::Milliseconds(50));
  progress.Advance();
  EXPECT_EQ(Written(), "");
  clock_.Advance(absl::Milliseconds(50));
  progress.Advance();
  EXPECT_THAT(Written(), HasSubstr(" 3/100 "));
}

TEST_F(ProgressTest, End_DrawsLastStateAndEndsLineOnce) {
  {
    Progress progress(options_);
    clock_.Advance(absl::Seconds(1));
    for (int i = 0; i < 100; ++i) progress.Advance();
    Written();
    progress.Close();
    EXPECT_THAT(Written(), EndsWith("100/100 [00:01<00:00, 100it/s]\x1b[K\n"));
    progress.Advance();
  }
  EXPECT_EQ(Written(), "");
}

TEST_F(ProgressTest, NoTerminalOrNotMain_WritesNothing) {
  options_.terminal.reset();  // A pipe is no terminal.
  {
    Progress progress(options_);
    clock_.Advance(absl::Seconds(1));
    progress.Advance();
    EXPECT_EQ(progress.done(), 1);
  }
  options_.terminal = true;
  options_.enabled = false;
  { Progress progress(options_); }
  EXPECT_EQ(Written(), "");
}

TEST_F(ProgressTest, NarrowTerminal_IsNeverWrapped) {
  options_.description = "описание ✓";
  options_.columns = 30;
  Progress progress(options_);
  for (int columns = 0; columns < 100; ++columns) {
    const std::string line = progress.Line(columns);
    int width = 0;
    for (const char c : line) width += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    EXPECT_LE(width, columns);
  }
}

TEST_F(ProgressTest, Resume_CountsRateFromWhereItStarted) {
  options_.initial = 50;
  Progress progress(options_);
  clock_.Advance(absl::Seconds(10));
  progress.Advance(10);
  EXPECT_THAT(progress.Line(80), HasSubstr("60/100 [00:10<00:40, 1it/s]"));
  EXPECT_THAT(Written(), Not(HasSubstr("\n")));
}

}  // namespace
}  // namespace muster
