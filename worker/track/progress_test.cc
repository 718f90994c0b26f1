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

TEST_F(ProgressTest, Restart_CountsRateAndTimeFromThere) {
  Progress progress(options_);
  clock_.Advance(absl::Seconds(60));
  progress.Advance(7);
  progress.Restart(90);
  EXPECT_THAT(Written(), HasSubstr("90/100 [00:00<?, ?it/s]"));
  clock_.Advance(absl::Seconds(2));
  progress.Advance(4);
  EXPECT_THAT(progress.Line(80), HasSubstr("94/100 [00:02<00:03, 2it/s]"));
  clock_.Advance(absl::Seconds(2));
  progress.Advance(6);
  progress.Close();
  EXPECT_THAT(Written(), HasSubstr("100/100 [00:04<00:00, 2.5it/s]"));
}

TEST_F(ProgressTest, WideCharacters_TakeTwoColumns) {
  options_.description = "訓練の進み具合を示す棒線";
  Progress progress(options_);
  // 24 columns of text.
  EXPECT_THAT(progress.Line(26), EndsWith("線: "));
  EXPECT_THAT(progress.Line(24), EndsWith("線"));
  EXPECT_THAT(progress.Line(23), EndsWith("棒"));
  EXPECT_THAT(progress.Line(22), EndsWith("棒"));
  // The bar gets what is left.
  EXPECT_EQ(progress.Line(80),
            "訓練の進み具合を示す棒線:   0%|" + std::string(25, ' ') + "| 0/100 [00:00<?, ?it/s]");
  progress.SetDescription("e\u0301");
  EXPECT_EQ(progress.Line(1), "e\u0301");
}

TEST_F(ProgressTest, ControlCharacters_DoNotBreakTheLine) {
  options_.description = "a\nb";
  Progress progress(options_);
  progress.SetPostfix({{"x\r", std::string("\x1b[2J")}});
  EXPECT_THAT(progress.Line(80), StartsWith("a\\nb: "));
  EXPECT_THAT(progress.Line(80), Not(HasSubstr("\r")));
  EXPECT_THAT(progress.Line(80), Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace muster
