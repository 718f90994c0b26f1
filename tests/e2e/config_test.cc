// `muster config` with keys, on a pseudo terminal, as a user has it.
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_terminal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/command.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::RunCommand;

constexpr char kUp[] = "\x1b[A", kDown[] = "\x1b[B", kEscape[] = "\x1b";

std::string Muster() {
  const char* const root = getenv("TEST_SRCDIR");
  return root == nullptr ? "bazel-bin/client/cli/muster"
                         : absl::StrCat(root, "/muster/client/cli/muster");
}

class ConfigOnATerminal : public ::testing::Test {
 protected:
  void TearDown() override {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  // Starts `muster config` on a terminal of this kind.
  void Start(const std::string& kind = "xterm") { Run({Muster(), "config"}, kind); }
  void Run(std::vector<std::string> args, const std::string& kind) {
    std::vector<std::string> env = {absl::StrCat("HOME=", folder_.path()),
                                    absl::StrCat("TERM=", kind), "PATH=/usr/bin:/bin",
                                    "CUDA_VISIBLE_DEVICES="};
    std::vector<char*> argv, variables;
    for (std::string& arg : args) argv.push_back(arg.data());
    for (std::string& variable : env) variables.push_back(variable.data());
    argv.push_back(nullptr);
    variables.push_back(nullptr);
    pid_ = fork();
    ASSERT_GE(pid_, 0);
    if (pid_ == 0) {
      setsid();
      ioctl(terminal_, TIOCSCTTY, 0);
      for (int fd = 0; fd < 3; ++fd) dup2(terminal_, fd);
      execve(argv[0], argv.data(), variables.data());
      _exit(127);
    }
  }

  // Blocks until `text` has been shown after what was shown before.
  void See(const std::string& text) {
    for (size_t at; (at = shown_.find(text, seen_)) == std::string::npos;) {
      char buffer[4096];
      const ssize_t n = read(user_, buffer, sizeof(buffer));
      ASSERT_GT(n, 0) << "no " << text << " in " << shown_.substr(seen_);
      shown_.append(buffer, n);
    }
    seen_ = shown_.find(text, seen_) + text.size();
  }
  void Press(const std::string& bytes) {
    ASSERT_EQ(write(user_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  void Answer(const std::string& question, const std::string& bytes) {
    See(question);
    Press(bytes + "\r");
  }
  // Returns the exit code; -N: signal N.
  int Wait() {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  void ExpectTerminalAsBefore() {
    termios now;
    ASSERT_EQ(tcgetattr(terminal_, &now), 0);
    EXPECT_EQ(now.c_iflag, before_.c_iflag);
    EXPECT_EQ(now.c_oflag, before_.c_oflag);
    EXPECT_EQ(now.c_lflag, before_.c_lflag);
    EXPECT_EQ(memcmp(now.c_cc, before_.c_cc, sizeof(now.c_cc)), 0);
  }
  bool AsBefore() const {
    termios now;
    return tcgetattr(terminal_, &now) == 0 && now.c_lflag == before_.c_lflag;
  }
  std::string Path() const { return folder_.Path(".config/muster/config.yaml"); }

  const TestFolder folder_;
  const TestTerminal pseudo_;
  const int user_ = pseudo_.user(), terminal_ = pseudo_.program();
  const termios before_ = pseudo_.Mode();
  pid_t pid_ = -1;
  std::string shown_;
  size_t seen_ = 0;
};

TEST_F(ConfigOnATerminal, ArrowsNumbersAndText_WriteAFileThatALaunchTakes) {
  Start();
  Answer("1. Where do the processes", kDown);
  Answer("2. How many machines?", "x");
  See("x is no answer: write a whole number of at least 2");
  Press("\x7f");
  Press(kEscape);  // back to the layout
  Answer("1. Where do the processes", kUp);
  Answer("2. What do the processes train on?", "2");
  Answer("3. How many processes?", "2");
  Answer("4. How many threads", "");
  Answer("5. In which precision", "2");
  Answer("6. How many backward passes", "4");
  Answer("7. What do the processes shard", "5");
  Answer("8. Which classes of modules", "Block");
  Answer("9. How often do all processes", "");
  Answer("10. In which folder", "");
  Answer("11. Is every collective", "");
  Answer("12. Are there other settings", "");
  Answer("13. Write the file?", "");
  See(absl::StrCat("written: ", Path()));
  EXPECT_EQ(Wait(), 0);
  ExpectTerminalAsBefore();
  const std::string set =
      absl::StrCat("HOME=", folder_.path(), " CUDA_VISIBLE_DEVICES= ", Muster());
  EXPECT_EQ(RunCommand(set + " config validate").exit_code, 0);
  const auto dry_run = RunCommand(set + " launch --dry_run -- true 2>&1");
  EXPECT_EQ(dry_run.exit_code, 0) << dry_run.output;
  EXPECT_THAT(dry_run.output, AllOf(testing::ContainsRegex("num_processes +2 "), HasSubstr("bf16"),
                                    testing::ContainsRegex("sharding +zero3 "),
                                    testing::ContainsRegex("sharding_units +Block ")));
}

TEST_F(ConfigOnATerminal, CtrlC_LeavesNothingAndPutsTheTerminalBack) {
  Start();
  Answer("1. Where do the processes", "");
  See("2. What do the processes");
  EXPECT_FALSE(AsBefore());
  Press("\x03");
  See("nothing is written");
  EXPECT_EQ(Wait(), 130);
  ExpectTerminalAsBefore();
  EXPECT_THAT(shown_, HasSubstr("\x1b[?25h")) << "the cursor is shown again";
  EXPECT_FALSE(PathExists(folder_.Path(".config")));
}

TEST_F(ConfigOnATerminal, Signals_LeaveNothingAndPutTheTerminalBack) {
  for (const int signal : {SIGTERM, SIGHUP, SIGINT}) {
    Start();
    See("1. Where do the processes");
    kill(pid_, signal);
    See("nothing is written");
    EXPECT_EQ(Wait(), 128 + signal);
    ExpectTerminalAsBefore();
  }
  EXPECT_FALSE(PathExists(folder_.Path(".config")));
}

// Runs in a shell, because a process without one cannot be stopped so.
TEST_F(ConfigOnATerminal, CtrlZ_StopsItUntilTheShellContinuesIt) {
  Run({"/bin/bash", "--norc", "--noprofile", "-i"}, "xterm");
  Press(absl::StrCat(Muster(), " config\n"));
  See("1. Where do the processes");
  Press("\x1a");
  See("Stopped");
  EXPECT_FALSE(PathExists(folder_.Path(".config")));
  Press("fg\n");
  Answer("1. Where do the processes", "");
  See("2. What do the processes");
  Press("\x03");
  See("nothing is written");
  Press("echo code $?\n");
  See("code 130");
  Press("exit\n");
  EXPECT_EQ(Wait(), 0);
}

TEST_F(ConfigOnATerminal, DumbTerminal_IsAskedByLines) {
  Start("dumb");
  See("1. Where do the processes");
  See("number or word [one]: ");
  Press("nowhere\n");
  See("nowhere is no answer");
  See("number or word [one]: ");
  EXPECT_TRUE(AsBefore());
  Press("\x03");
  EXPECT_EQ(Wait(), -SIGINT);
  EXPECT_FALSE(PathExists(folder_.Path(".config")));
}

}  // namespace
}  // namespace muster
