#include "client/cli/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <termios.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "base/test_terminal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;

class TerminalTest : public ::testing::Test {
 protected:
  termios Mode() const { return pseudo_.Mode(); }
  void Type(const std::string& bytes) {
    ASSERT_EQ(write(user_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  // Returns what the user sees until `text` has come.
  std::string See(const std::string& text) {
    std::string seen;
    while (seen.find(text) == std::string::npos) {
      char buffer[4096];
      const ssize_t n = read(user_, buffer, sizeof(buffer));
      if (n <= 0) break;
      seen.append(buffer, n);
    }
    return seen;
  }

  const TestTerminal pseudo_;
  const int user_ = pseudo_.user(), program_ = pseudo_.program();
};

bool SameMode(const termios& a, const termios& b) {
  return a.c_iflag == b.c_iflag && a.c_oflag == b.c_oflag && a.c_cflag == b.c_cflag &&
         a.c_lflag == b.c_lflag && memcmp(a.c_cc, b.c_cc, sizeof(a.c_cc)) == 0;
}

TEST_F(TerminalTest, Keys_ArriveOneByOneAndTheModeIsPutBack) {
  const termios before = Mode();
  {
    auto terminal = Terminal::Open(program_, program_);
    ASSERT_TRUE(terminal.ok()) << terminal.status();
    EXPECT_FALSE(SameMode(Mode(), before));
    Type("a\x1b[A\x03\r");
    EXPECT_EQ((*terminal)->Read().key->text, "a");
    EXPECT_EQ((*terminal)->Read().key->kind, Key::Kind::kUp);
    EXPECT_EQ((*terminal)->Read().key->kind, Key::Kind::kInterrupt) << "a key, no signal";
    EXPECT_EQ((*terminal)->Read().key->kind, Key::Kind::kEnter);
    Type("\x1b");
    EXPECT_EQ((*terminal)->Read().key->kind, Key::Kind::kEscape);
  }
  EXPECT_TRUE(SameMode(Mode(), before));
}

TEST_F(TerminalTest, Signals_EndTheWaitAndTheirActionsArePutBack) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
    ::signal(signal, SIG_DFL);
    {
      auto terminal = Terminal::Open(program_, program_);
      ASSERT_TRUE(terminal.ok());
      kill(getpid(), signal);
      const Terminal::Input input = (*terminal)->Read();
      EXPECT_FALSE(input.key.has_value());
      EXPECT_EQ(input.signal, signal);
    }
    struct sigaction action;
    sigaction(signal, nullptr, &action);
    EXPECT_EQ(action.sa_handler, SIG_DFL);
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    EXPECT_EQ(sigismember(&mask, signal), 0);
  }
}

TEST_F(TerminalTest, IgnoredSignal_StaysIgnored) {
  ::signal(SIGHUP, SIG_IGN);
  {
    auto terminal = Terminal::Open(program_, program_);
    ASSERT_TRUE(terminal.ok());
    kill(getpid(), SIGHUP);
    Type("x");
    EXPECT_EQ((*terminal)->Read().key->text, "x");
  }
  struct sigaction action;
  sigaction(SIGHUP, nullptr, &action);
  EXPECT_EQ(action.sa_handler, SIG_IGN);
  ::signal(SIGHUP, SIG_DFL);
}

TEST_F(TerminalTest, Pictures_AreDrawnOverEachOther) {
  auto terminal = Terminal::Open(program_, program_);
  ASSERT_TRUE(terminal.ok());
  (*terminal)->Draw({{"one", true}, {"two"}, {"> "}}, Prompt::Place{2, 2});
  EXPECT_EQ(See("\x1b[?25h"),
            "\x1b[?25l\r\x1b[J\x1b[1mone\x1b[0m\r\r\ntwo\r\r\n> \r\x1b[2C\x1b[?25h");
  (*terminal)->Settle("done");
  EXPECT_EQ(See("done\r\n"), "\r\x1b[2A\x1b[Jdone\r\n") << "over all three lines";
  EXPECT_EQ((*terminal)->columns(), 79u) << "the last one stays free";
}

TEST_F(TerminalTest, NoTerminal_IsRefused) {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_THAT(std::string(Terminal::Open(null, program_).status().message()),
              HasSubstr("terminal"));
  EXPECT_FALSE(Terminal::Open(program_, null).ok());
  close(null);
}

}  // namespace
}  // namespace muster::client
