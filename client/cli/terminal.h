#ifndef MUSTER_CLIENT_CLI_TERMINAL_H_
#define MUSTER_CLIENT_CLI_TERMINAL_H_

#include <signal.h>
#include <termios.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/prompt.h"

namespace muster::client {

// A terminal that hands over each key and on which a picture is drawn again and again. The mode,
// the cursor and the signals' actions are put back when it is destroyed, and while it is suspended.
// One at a time in a process, and only in its main thread: it handles SIGINT, SIGTERM, SIGHUP and
// SIGQUIT unless they are ignored.
class Terminal {
 public:
  // Errors: FAILED_PRECONDITION if one of the descriptors is no terminal.
  static absl::StatusOr<std::unique_ptr<Terminal>> Open(int in, int out);
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  struct Input {
    std::optional<Key> key;  // nullopt: there is none any more
    int signal = 0;          // because of this one; 0: the terminal is gone
  };
  // Blocks until a key is pressed or a signal arrives.
  Input Read();

  // What there is room for; the last column stays free.
  size_t columns() const;
  size_t rows() const;

  // Draws over the picture before.
  void Draw(const std::vector<PromptLine>& lines, std::optional<Prompt::Place> cursor);
  // Replaces the picture by text that stays.
  void Settle(const std::string& text);

  // Stops this process as Ctrl-Z does, with the terminal put back. Returns when it goes on.
  void Suspend();

 private:
  Terminal(int in, int out, const termios& mode);
  void Enter();
  void Leave();
  void Write(const std::string& bytes);
  // What removes the picture, with the cursor at the beginning of its first line.
  std::string Erased();

  const int in_, out_;
  const termios mode_;  // as it was
  struct sigaction actions_[4];
  sigset_t mask_;  // as it was
  KeyReader keys_;
  size_t cursor_row_ = 0;  // the line of it in which the cursor is
};

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_TERMINAL_H_
