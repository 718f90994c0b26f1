#ifndef MUSTER_AGENT_PROCESS_H_
#define MUSTER_AGENT_PROCESS_H_

#include <sys/epoll.h>
#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "agent/descriptors.h"

namespace muster::agent {

// How a process ended.
struct ProcessExit {
  int exit_code = 0;  // if it exited by itself
  int signal = 0;     // if a signal ended it; else 0
  bool core_dumped = false;
  // Set if the process has not ended: its state when it was given up, long after SIGKILL
  // ("uninterruptible in openat (rpc_wait_bit_killable)"). Empty: it has ended.
  std::string stuck = "";
  // When the end became known, by the wall clock.
  absl::Time at = absl::InfinitePast();

  bool ok() const { return exit_code == 0 && signal == 0 && stuck.empty(); }
  // "exited with code 3", "was killed by signal 9 (SIGKILL)" or "does not end after SIGKILL:
  // uninterruptible in openat".
  std::string ToString() const;
};

// Returns "SIGKILL" for 9; "signal 77" for a number without a name.
std::string SignalName(int signal);

enum class OutputStream { kStdout, kStderr };

struct ProcessOptions {
  // argv[0] is a path, or a name looked up in the PATH of `env`. No shell is involved.
  std::vector<std::string> argv;
  // The whole environment, "NAME=value" each.
  std::vector<std::string> env;
  // Empty: the directory of this process when the host was started.
  std::string working_directory;
  // Standard input, borrowed for the call. -1: /dev/null.
  int stdin_fd = -1;
  // The folder of the control group in which it starts, borrowed for the call. -1: this process's.
  int group_fd = -1;
  // Gives the process a pseudo-terminal instead of a pipe, so that it writes line by line and shows
  // progress bars as if the user had started it by hand. Without echo, and "\n" does not become
  // "\r\n".
  bool stdout_terminal = false;
  bool stderr_terminal = false;
  // How many of its last lines (both streams, in order of arrival) LastLines() keeps, each cut to 4
  // KiB.
  int kept_lines = 20;

  // All four are called on the host's thread, must not block, and must not call Process::Wait.
  // A finished line, without its end.
  std::function<void(OutputStream, absl::string_view)> on_line;
  // The current text of an unfinished line (progress bars, prompts).
  std::function<void(OutputStream, absl::string_view)> on_partial;
  // The process still exists some seconds after SIGKILL, with its state (see ProcessExit::stuck).
  std::function<void(absl::string_view)> on_deaf = nullptr;
  // Called once, after the last line.
  std::function<void(const ProcessExit&)> on_exit;
};

// Looks `program` up as execvp does: unchanged if it has a slash, else in `path` ("dir:dir").
// Errors: NOT_FOUND no such file; PERMISSION_DENIED a directory or not executable. The message says
// what to do.
absl::StatusOr<std::string> FindProgram(absl::string_view program, absl::string_view path);

// A running or ended child process. Thread-safe. A handle may outlive its host (then the process
// has ended).
class Process {
 public:
  virtual ~Process() = default;

  virtual pid_t pid() const = 0;

  // Sends `signal` to the process and all others of its group. No effect after its end.
  virtual void Signal(int signal) = 0;

  // Sends SIGTERM (and SIGCONT, so that a stopped process receives it) to the group now, and
  // SIGKILL after `grace` unless the process has ended. Does not block. A second call can only make
  // the end come sooner.
  virtual void Stop(absl::Duration grace) = 0;

  // Blocks until the process has ended and on_exit has returned.
  virtual ProcessExit Wait() = 0;
  // Does the same as Wait for at most `timeout`; returns nullopt if the process still runs.
  virtual std::optional<ProcessExit> WaitFor(absl::Duration timeout) = 0;

  // The newest lines it wrote, oldest first.
  virtual std::vector<std::string> LastLines() const = 0;
};

struct ProcessHostOptions {
  // For a process that the kernel does not end (a dead file server, a driver), on_deaf is called
  // this long after SIGKILL. After the second span the host gives up: Wait returns, and the process
  // is left to the kernel.
  absl::Duration deaf_after = absl::Seconds(5);
  absl::Duration give_up_after = absl::Seconds(30);
  // How long a process may take to reach its program, which may be on a dead file server.
  absl::Duration start_timeout = absl::Seconds(30);
  // Called on the host's thread when a new guard replaces a killed one.
  std::function<void(pid_t)> on_new_guard = nullptr;
  // Replaces the system calls in tests.
  CloseRangeCall close_range = SystemCloseRange;
  int (*kill)(pid_t, int) = nullptr;
  int (*epoll_ctl)(int, int, int, epoll_event*) = nullptr;
};

// Starts processes and watches them. Thread-safe. One thread does all the work: a pidfd reports
// each end at once, without polling.
//
// Nothing that the host started outlives it, whatever happens:
//  - Each process leads its own session and group. When the leader ends, the rest of the group is
//    killed.
//  - A keeper (see Keeper) is the parent of the processes and the subreaper of all they start. When
//    the host's process dies, in any way, the keeper kills all of its descendants, including those
//    that have left their session and cleared their environment. If the keeper is killed, the
//    kernel kills the processes with it (PR_SET_PDEATHSIG), and the next process gets a new keeper.
//  - A guard, a small forked process in a session of its own, waits for the end of the host's
//    process (or of the host) and then kills all groups, and every process that carries the host's
//    mark in its environment (MUSTER_PROCESS_TREE): the fallback if the keeper is killed together
//    with the host's process. A killed guard is replaced.
//  - The end of the host also ends the processes that a killed keeper has left to this process, see
//    Orphans.
//
// A process starts with every signal at its default, except that SIGHUP, SIGINT and SIGQUIT stay
// ignored if this process ignores them, as under nohup and in background jobs of shells.
class ProcessHost {
 public:
  // Errors: INTERNAL or RESOURCE_EXHAUSTED when the kernel refuses a descriptor, a process or a
  // thread. SIGCHLD gets its default action if it was ignored: otherwise exits could not be
  // detected. Standard descriptors that are closed are opened on /dev/null.
  static absl::StatusOr<std::unique_ptr<ProcessHost>> Start(ProcessHostOptions options = {});

  // Kills everything that still runs, waits for it, and for the guard.
  virtual ~ProcessHost() = default;

  // Starts a process. Blocks until it runs its program (so every start error is reported here).
  // Errors: INVALID_ARGUMENT empty argv; NOT_FOUND and PERMISSION_DENIED as FindProgram, or for the
  // working directory; FAILED_PRECONDITION the file is not a program (bad format), or the kernel
  // does not get to it; RESOURCE_EXHAUSTED no more processes or descriptors; INTERNAL its control
  // group does not accept it.
  virtual absl::StatusOr<std::shared_ptr<Process>> Spawn(ProcessOptions options) = 0;

  // While paused nothing is read from the processes (they block once their pipes are full), except
  // the remaining output of one that has ended. For callers whose own output cannot keep up.
  virtual void PauseOutput(bool paused) = 0;

  // The process id of the guard; -1 while there is none.
  virtual pid_t guard_pid() const = 0;

  // The host's part of the mark: processes that carry it belong to the host.
  virtual const std::string& mark() const = 0;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PROCESS_H_
