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

// A terminal that delivers each key and on which a picture is drawn again and again. Its mode, its
// cursor and the signals' actions are restored when it is destroyed, and while it is suspended. One
// at a time in a process, and only in its main thread: it handles SIGINT, SIGTERM, SIGHUP and
// SIGQUIT unless they are ignored.
class Terminal {
 public:
  // Errors: FAILED_PRECONDITION if one of the descriptors is not a terminal.
  static absl::StatusOr<std::unique_ptr<Terminal>> Open(int in, int out);
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  struct Input {
    std::optional<Key> key;  // nullopt: there are no more keys
    int signal = 0;          // the signal that ended the input; 0: the terminal is gone
  };
  // Blocks until a key is pressed or a signal arrives.
  Input Read();

  // The usable size; the last column stays free.
  size_t columns() const;
  size_t rows() const;

  // Draws over the previous picture.
  void Draw(const std::vector<PromptLine>& lines, std::optional<Prompt::Place> cursor);
  // Replaces the picture by text that stays.
  void Settle(const std::string& text);

  // Stops this process as Ctrl-Z does, with the terminal restored. Returns when the process
  // continues.
  void Suspend();

 private:
  Terminal(int in, int out, const termios& mode);
  void Enter();
  void Leave();
  void Write(const std::string& bytes);
  // Returns the text that removes the picture, with the cursor at the beginning of its first line.
  std::string Erased();

  const int in_, out_;
  const termios mode_;  // the original mode
  struct sigaction actions_[4];
  sigset_t mask_;  // the original mask
  KeyReader keys_;
  size_t cursor_row_ = 0;  // the line of the picture in which the cursor is
};

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_TERMINAL_H_
