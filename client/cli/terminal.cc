#include "client/cli/terminal.h"

#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace muster::client {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
constexpr int kEscapeMillis = 50;  // in which the rest of a key's bytes arrives

volatile sig_atomic_t g_signal = 0;

void NoteSignal(int signal) { g_signal = signal; }

}  // namespace

absl::StatusOr<std::unique_ptr<Terminal>> Terminal::Open(int in, int out) {
  termios mode;
  if (tcgetattr(in, &mode) != 0 || isatty(out) == 0) {
    return absl::FailedPreconditionError("input and output are not a terminal");
  }
  return std::unique_ptr<Terminal>(new Terminal(in, out, mode));
}

Terminal::Terminal(int in, int out, const termios& mode) : in_(in), out_(out), mode_(mode) {
  g_signal = 0;
  // Blocked except while Read waits, so that no signal is missed between a check and the wait.
  sigset_t blocked;
  sigemptyset(&blocked);
  for (const int signal : kSignals) sigaddset(&blocked, signal);
  pthread_sigmask(SIG_BLOCK, &blocked, &mask_);
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], nullptr, &actions_[i]);
    if (actions_[i].sa_handler == SIG_IGN) continue;
    struct sigaction action = {};
    action.sa_handler = NoteSignal;
    sigaction(kSignals[i], &action, nullptr);
  }
  Enter();
}

Terminal::~Terminal() {
  Leave();
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &actions_[i], nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
}

void Terminal::Enter() {
  termios raw = mode_;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG | IEXTEN);
  raw.c_iflag &= ~static_cast<tcflag_t>(ICRNL | INLCR | IGNCR | IXON);
  raw.c_cc[VMIN] = 1;
  raw.c_cc[VTIME] = 0;
  tcsetattr(in_, TCSADRAIN, &raw);
}

void Terminal::Leave() {
  Write("\x1b[?25h");  // shows the cursor
  tcsetattr(in_, TCSADRAIN, &mode_);
}

void Terminal::Write(const std::string& bytes) {
  for (absl::string_view rest = bytes; !rest.empty();) {
    const ssize_t written = write(out_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the reader is gone, as Read will notice
    rest.remove_prefix(written);
  }
}

Terminal::Input Terminal::Read() {
  for (;;) {
    if (std::optional<Key> key = keys_.Next(/*complete=*/false)) return {std::move(key)};
    pollfd wait = {in_, POLLIN, 0};
    const timespec soon = {0, kEscapeMillis * 1'000'000L};
    const int ready = ppoll(&wait, 1, keys_.pending() ? &soon : nullptr, &mask_);
    if (g_signal != 0) return {std::nullopt, g_signal};
    if (ready == 0) {
      if (std::optional<Key> key = keys_.Next(/*complete=*/true)) return {std::move(key)};
      continue;
    }
    if (ready < 0) {
      if (errno == EINTR) continue;
      return {std::nullopt};
    }
    char bytes[256];
    const ssize_t count = read(in_, bytes, sizeof(bytes));
    if (count > 0) {
      keys_.Add(absl::string_view(bytes, count));
    } else if (count == 0 || errno != EINTR) {
      return {std::nullopt};
    }
  }
}

size_t Terminal::columns() const {
  winsize size = {};
  return ioctl(out_, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1 : 79;
}

size_t Terminal::rows() const {
  winsize size = {};
  return ioctl(out_, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 ? size.ws_row : 24;
}

std::string Terminal::Erased() {
  std::string bytes = "\r";
  if (cursor_row_ > 0) absl::StrAppend(&bytes, "\x1b[", cursor_row_, "A");
  absl::StrAppend(&bytes, "\x1b[J");
  cursor_row_ = 0;
  return bytes;
}

void Terminal::Draw(const std::vector<PromptLine>& lines, std::optional<Prompt::Place> cursor) {
  std::string bytes = absl::StrCat("\x1b[?25l", Erased());
  for (size_t i = 0; i < lines.size(); ++i) {
    absl::StrAppend(&bytes, i > 0 ? "\r\n" : "", lines[i].strong ? "\x1b[1m" : "", lines[i].text,
                    lines[i].strong ? "\x1b[0m" : "");
  }
  cursor_row_ = lines.empty() ? 0 : lines.size() - 1;
  if (cursor.has_value()) {
    if (cursor->row < cursor_row_) absl::StrAppend(&bytes, "\x1b[", cursor_row_ - cursor->row, "A");
    absl::StrAppend(&bytes, "\r\x1b[", cursor->column, "C\x1b[?25h");
    cursor_row_ = cursor->row;
  }
  Write(bytes);
}

void Terminal::Settle(const std::string& text) {
  std::string bytes = Erased();
  if (!text.empty()) absl::StrAppend(&bytes, text, "\n");  // the terminal's mode makes "\r\n" of it
  Write(bytes);
}

void Terminal::Suspend() {
  Settle("");
  Leave();
  raise(SIGTSTP);
  Enter();
}

}  // namespace muster::client
