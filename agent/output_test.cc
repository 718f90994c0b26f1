#include "agent/output.h"

#include <fcntl.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_terminal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr OutputStream kOut = OutputStream::kStdout;
constexpr OutputStream kErr = OutputStream::kStderr;

struct Pipe {
  Pipe() { EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0); }
  ~Pipe() {
    CloseWriter();
    close(fds[0]);
  }
  int writer() const { return fds[1]; }
  void CloseWriter() {
    if (fds[1] >= 0) close(fds[1]);
    fds[1] = -1;
  }
  std::string ReadAll() {
    CloseWriter();
    std::string all;
    char buffer[4096];
    for (ssize_t n; (n = read(fds[0], buffer, sizeof(buffer))) > 0;) all.append(buffer, n);
    return all;
  }
  int fds[2];
};

TEST(OutputMux, Prefix_NamesTheRankOnEachLine) {
  Pipe out, err;
  {
    OutputMux mux({.stdout_fd = out.writer(), .stderr_fd = err.writer(), .prefix = true});
    mux.Line(0, kOut, "a");
    mux.Line(12, kOut, "b");
    mux.Line(1, kErr, "c");
    mux.Note("muster: d");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  }
  EXPECT_EQ(out.ReadAll(), "[0]: a\n[12]: b\n");
  EXPECT_EQ(err.ReadAll(), "[1]: c\nmuster: d\n");
}

TEST(OutputMux, NotATerminal_NoProgressAndNoEscapes) {
  Pipe out, err;
  {
    OutputMux mux({.stdout_fd = out.writer(), .stderr_fd = err.writer()});
    mux.Partial(0, kErr, "10%");
    mux.Line(0, kErr, "100%");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  }
  EXPECT_EQ(err.ReadAll(), "100%\n");
}

TEST(OutputMux, Terminal_ProgressStaysBelowTheLinesOfOthers) {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_EQ(grantpt(master), 0);
  ASSERT_EQ(unlockpt(master), 0);
  const int terminal = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
  termios mode;
  ASSERT_EQ(tcgetattr(terminal, &mode), 0);
  mode.c_oflag &= ~OPOST;
  ASSERT_EQ(tcsetattr(terminal, TCSANOW, &mode), 0);
  {
    OutputMux mux({.stdout_fd = terminal, .stderr_fd = terminal});
    mux.Partial(0, kErr, "10%");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
    mux.Partial(1, kErr, "other bars are not shown");
    mux.Line(1, kOut, "line of 1");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
    mux.Line(0, kErr, "done");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  }
  std::string text;  // a terminal delivers it in pieces
  while (text.find("done\n") == std::string::npos) {
    char buffer[4096];
    const ssize_t n = read(master, buffer, sizeof(buffer));
    ASSERT_GT(n, 0);
    text.append(buffer, n);
  }
  const std::string clear = "\r\x1b[K";
  EXPECT_EQ(text, absl::StrCat(clear, "10%", clear, "line of 1\n", clear, "10%", clear, "done\n"));
  close(terminal);
  close(master);
}

TEST(OutputMux, ProgressOfWideCharacters_TakesOneRow) {
  const TestTerminal terminal;
  termios mode = terminal.Mode();
  mode.c_oflag &= ~OPOST;
  ASSERT_EQ(tcsetattr(terminal.program(), TCSANOW, &mode), 0);
  std::string bar, row;
  for (int i = 0; i < 79; ++i) absl::StrAppend(&bar, "数");
  for (int i = 0; i < 39; ++i) absl::StrAppend(&row, "数");
  {
    OutputMux mux({.stdout_fd = terminal.program(), .stderr_fd = terminal.program()});
    mux.Partial(0, kErr, bar);
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
    mux.Line(0, kErr, "done");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  }
  std::string text;
  while (text.find("done\n") == std::string::npos) {
    char buffer[4096];
    const ssize_t n = read(terminal.user(), buffer, sizeof(buffer));
    ASSERT_GT(n, 0);
    text.append(buffer, n);
  }
  const std::string clear = "\r\x1b[K";
  EXPECT_EQ(text, absl::StrCat(clear, row, clear, "done\n"));
}

TEST(OutputMux, LogFile_HasTheRanksLinesWithoutPrefix) {
  Pipe out;
  const std::string path = TestPath("rank_1.log");
  unlink(path.c_str());
  {
    OutputMux mux({.stdout_fd = out.writer(), .stderr_fd = -1, .prefix = true});
    ASSERT_TRUE(mux.AddLog(1, path).ok());
    mux.Line(0, kOut, "not here");
    mux.Line(1, kOut, "one");
    mux.Line(1, kErr, "two");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  }
  EXPECT_EQ(ReadFile(path).value_or(""), "one\ntwo\n");
  EXPECT_EQ(out.ReadAll(), "[0]: not here\n[1]: one\n");
  OutputMux mux({});
  EXPECT_THAT(std::string(mux.AddLog(1, "/nowhere/x.log").message()), HasSubstr("/nowhere/x.log"));
}

// Each attempt of a job has its own file, whatever happened to the previous ones, whose descriptors
// have the same numbers.
TEST(OutputMux, LogOfAnAttemptOnAFullDisk_NextAttemptsHaveTheirs) {
  Pipe err;
  const TestFolder folder;
  const std::string full = folder.Path("full.log");
  ASSERT_EQ(symlink("/dev/full", full.c_str()), 0);
  OutputMux mux({.stdout_fd = -1, .stderr_fd = err.writer()});
  ASSERT_TRUE(mux.AddLog(0, full).ok());
  mux.Line(0, kOut, "lost");
  for (int attempt = 1; attempt <= 4; ++attempt) {
    const std::string path = folder.Path(absl::StrCat("attempt_", attempt, ".log"));
    ASSERT_TRUE(mux.AddLog(0, path).ok());
    mux.Line(0, kOut, absl::StrCat("attempt ", attempt));
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
    EXPECT_EQ(ReadFile(path).value_or(""), absl::StrCat("attempt ", attempt, "\n"));
  }
  EXPECT_THAT(err.ReadAll(), HasSubstr("full.log cannot be written: No space left on device"));
}

TEST(OutputMux, OutputOnAFullDisk_GoesOnWhenThereIsRoom) {
  Pipe out, err;
  const int fd = open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  OutputMux mux({.stdout_fd = fd, .stderr_fd = err.writer()});
  mux.Line(0, kOut, "one");
  mux.Line(0, kOut, "two");
  EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  ASSERT_EQ(dup3(out.writer(), fd, O_CLOEXEC), fd);
  mux.Line(0, kOut, "three");
  mux.Line(0, kOut, "four");
  EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  close(fd);
  EXPECT_EQ(out.ReadAll(),
            "muster: 2 lines are missing here: No space left on device\nthree\nfour\n");
  // At once, and only once: there may never be room, and the exit code is the job's.
  EXPECT_EQ(err.ReadAll(),
            "muster: standard output cannot be written (No space left on device): the output of "
            "the processes is lost\n");
}

TEST(OutputMux, ReaderGone_TheRestGoesOn) {
  Pipe out, err;
  close(out.fds[0]);
  out.fds[0] = -1;
  {
    OutputMux mux({.stdout_fd = out.writer(), .stderr_fd = err.writer()});
    mux.Line(0, kOut, "lost");
    mux.Line(0, kErr, "kept");
    EXPECT_TRUE(mux.Flush(absl::InfiniteDuration()));
  }
  EXPECT_EQ(err.ReadAll(), "kept\n");
}

TEST(OutputMux, SlowReader_PressesBackAndReleases) {
  Pipe out;
  Notification pressed, released;
  OutputMux mux({.stdout_fd = out.writer(),
                 .max_queued_bytes = 100'000,
                 .on_backpressure = [&](bool on) { (on ? pressed : released).Notify(); }});
  const std::string line(999, 'x');
  for (int i = 0; i < 400; ++i) mux.Line(0, kOut, line);
  pressed.WaitForNotification();
  EXPECT_FALSE(released.HasBeenNotified());
  std::string all(400'000, ' ');
  size_t got = 0;
  while (got < all.size()) {
    const ssize_t n = read(out.fds[0], all.data() + got, all.size() - got);
    ASSERT_GT(n, 0);
    got += n;
  }
  released.WaitForNotification();
  EXPECT_THAT(all, Not(HasSubstr(" ")));
}

TEST(OutputMux, HurryFlush_EndsAFlushWithoutEnd) {
  Pipe out;
  OutputMux mux({.stdout_fd = out.writer()});
  for (int i = 0; i < 400; ++i) mux.Line(0, kOut, std::string(999, 'x'));
  std::thread flush([&] { EXPECT_FALSE(mux.Flush(absl::InfiniteDuration())); });
  mux.HurryFlush(absl::ZeroDuration());
  flush.join();
}

TEST(OutputMux, ReaderStandsStill_LogsAndOtherReadersGetAll) {
  Pipe out, err;
  const std::string path = TestPath("rank_0.log");
  std::string lines;
  {
    OutputMux mux({.stdout_fd = out.writer(), .stderr_fd = err.writer()});
    ASSERT_TRUE(mux.AddLog(0, path).ok());
    for (int i = 0; i < 5000; ++i) {
      const std::string line = absl::StrCat("a line of the process, number ", i);
      mux.Line(0, kOut, line);
      absl::StrAppend(&lines, line, "\n");
    }
    mux.Note("muster: stopping");
    EXPECT_FALSE(mux.Flush(absl::ZeroDuration()));
  }
  EXPECT_EQ(*ReadFile(path), lines);
  EXPECT_EQ(err.ReadAll(), "muster: stopping\n");
}

TEST(OutputMux, ReaderStandsStill_CanBeDestroyed) {
  Pipe out;
  OutputMux mux({.stdout_fd = out.writer()});
  for (int i = 0; i < 400; ++i) mux.Line(0, kOut, std::string(999, 'x'));
  EXPECT_FALSE(mux.Flush(absl::ZeroDuration()));
}

}  // namespace
}  // namespace muster::agent
