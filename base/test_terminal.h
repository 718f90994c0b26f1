#ifndef MUSTER_BASE_TEST_TERMINAL_H_
#define MUSTER_BASE_TEST_TERMINAL_H_

#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "base/log.h"
#include "base/owned_fd.h"

namespace muster {

// A pseudo terminal of 24 rows and 80 columns for tests.
class TestTerminal {
 public:
  TestTerminal() : user_(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    MUSTER_CHECK(user_.open());
    MUSTER_CHECK(grantpt(user()) == 0);
    MUSTER_CHECK(unlockpt(user()) == 0);
    program_ = OwnedFd(open(ptsname(user()), O_RDWR | O_NOCTTY | O_CLOEXEC));
    MUSTER_CHECK(program_.open());
    const winsize size = {.ws_row = 24, .ws_col = 80, .ws_xpixel = 0, .ws_ypixel = 0};
    MUSTER_CHECK(ioctl(program(), TIOCSWINSZ, &size) == 0);
  }

  // The end of the user, who reads what is shown and writes keys.
  int user() const { return user_.get(); }
  // The end of the program. It stays open, so that the terminal outlives a command, as the terminal
  // of a shell does.
  int program() const { return program_.get(); }

  termios Mode() const {
    termios mode = {};
    MUSTER_CHECK(tcgetattr(program(), &mode) == 0);
    return mode;
  }

 private:
  OwnedFd user_, program_;
};

}  // namespace muster

#endif  // MUSTER_BASE_TEST_TERMINAL_H_
