#ifndef MUSTER_AGENT_KEEPER_H_
#define MUSTER_AGENT_KEEPER_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/descriptors.h"

namespace muster::agent {

// What a child writes to ChildPlan::error_fd when it cannot start its program; exec closes that.
struct StartError {
  enum Stage : int32_t { kSetUp, kDirectory, kExec, kGroup };
  int32_t stage;
  int32_t error;
};

// How a program starts. The descriptors are borrowed.
struct ChildPlan {
  std::string path;
  std::vector<std::string> argv;
  std::vector<std::string> env;
  std::string directory;  // empty: that of this process when the keeper started
  int stdin_fd = -1, stdout_fd = -1, stderr_fd = -1, error_fd = -1;
  int group_fd = -1;  // the folder of its control group; -1: this process's
};

// How a child ended, with the values of siginfo_t.
struct ChildEnd {
  int32_t code = 0;
  int32_t status = 0;
};

// A small forked process, in its own session, that is the parent of a host's processes and their
// subreaper: every descendant stays below it, even if it leaves its session or clears its
// environment. When the process that started it ends, or closes its connection, the keeper kills
// everything below it. So a kill -9 of the launcher leaves nothing behind.
//
// When the keeper itself is killed, its children end with it (PR_SET_PDEATHSIG), and the processes
// that they leave behind become children of this process.
//
// Not thread-safe.
class Keeper {
 public:
  // `kill` replaces the system call in tests; null: the system call.
  static absl::StatusOr<std::unique_ptr<Keeper>> Start(const std::string& mark,
                                                       CloseRangeCall close_range,
                                                       int (*kill)(pid_t, int) = nullptr);
  // Ends everything below the keeper, and the keeper. Processes that the kernel does not end, or
  // that belong to another user, become children of this process.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  pid_t pid() const { return pid_; }
  // Readable when the keeper has ended.
  int pidfd() const { return pidfd_; }

  // Forks a child, which begins its own session. Errors: UNAVAILABLE the keeper has ended; else
  // what the kernel refuses, in words.
  absl::StatusOr<pid_t> Fork(const ChildPlan& plan);
  // Takes the end of a child that has ended. Until then its id is not reused. Blocks for half a
  // second at most: then DEADLINE_EXCEEDED, because a tracer withholds the end; the keeper collects
  // the child once it can. UNAVAILABLE: the keeper has ended, and the child belongs to this
  // process.
  absl::StatusOr<ChildEnd> Collect(pid_t child);
  // Tells the keeper that the caller will not collect this child: the keeper does as soon as it
  // ends.
  void Release(pid_t child);

 private:
  Keeper(std::string mark, pid_t pid, int socket);
  // Returns UNAVAILABLE, once the kernel has passed on the keeper's children.
  absl::Status Gone();

  const std::string mark_;
  const pid_t pid_;
  int socket_;
  int pidfd_;
};

// Returns an error for a system call that failed with errno `error`: RESOURCE_EXHAUSTED if this
// machine has run out of something, else INTERNAL. The message is "what: the system's message".
absl::Status ErrnoStatus(absl::string_view what, int error);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_KEEPER_H_
