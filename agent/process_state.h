#ifndef MUSTER_AGENT_PROCESS_STATE_H_
#define MUSTER_AGENT_PROCESS_STATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::agent {

// The kernel's facts about one process or thread.
struct ProcessState {
  // "running", "sleeping", "uninterruptible" (in the kernel, deaf to signals: a disk, a driver, a
  // dead NFS server), "stopped" (SIGSTOP), "traced" (a debugger), "zombie" (ended, not yet
  // collected), "gone" (no such process), "unknown" (a letter of another kernel).
  std::string name = "gone";
  // The system call it is in, "futex"; a number if the name is unknown here; empty: none, or not
  // available.
  std::string syscall;
  // The kernel function it sleeps in; empty: none, or not available.
  std::string wchan;
  std::string command;  // as in ps
  std::string held_by;  // "process 71 (gdb)", if it is traced; only from ReadStuckState
  int threads = 0;      // 0 for a thread's own state
  int64_t parent = 0;   // process ids; 0: none that can be seen here
  int64_t session = 0;
  // In ticks since the machine started: unique together with the process id. 0: unknown.
  uint64_t started = 0;
  // As from waitpid; -1: none, or not available. Always 0 for another user's process.
  int wait_status = -1;

  bool exists() const { return name != "gone"; }
  // "sleeping in futex (futex_wait_queue)"; "traced by process 71 (gdb)".
  std::string ToString() const;
};

// Reads /proc; takes microseconds, never blocks on the process. Works for processes of the same
// user; fields that may not be read are empty.
ProcessState ReadProcessState(int64_t pid);
ProcessState ReadThreadState(int64_t pid, int64_t tid);
// Leaves out `syscall` and `wchan`: reads one file, for callers that read many processes.
ProcessState ReadProcessStat(int64_t pid);
// Reads the state of the first thread of `pid` that keeps a killed process from ending: an
// uninterruptible one, else one that a debugger holds; else of the process.
ProcessState ReadStuckState(int64_t pid);
// A process that has ended while its tracer hides that from the parent.
struct HeldEnd {
  std::optional<int> wait_status;  // as from waitpid; none: this process may not read it
  std::string tracer;              // "process 71 (gdb)"; empty: none that can be seen
};
HeldEnd ReadHeldEnd(int64_t pid);

// Returns the ids of all processes that can be seen. Empty if /proc does not belong to this
// process's own pid namespace: its numbers would name other processes here.
std::vector<int64_t> ListProcesses();
// Returns the children of all threads of `pid`, without reading other processes. Empty in the same
// case as ListProcesses; nullopt: this kernel does not provide them.
std::optional<std::vector<int64_t>> ListChildren(int64_t pid);

// Returns whether `pid` is `ancestor` or, over at most 64 generations, a descendant of it.
bool Descends(int64_t pid, int64_t ancestor);

// Parses the texts of /proc/PID/stat, wchan and syscall, with any contents; the state is "gone" if
// `stat` is malformed.
ProcessState ParseProcessState(const std::string& stat, const std::string& wchan,
                               const std::string& syscall);

// Returns "futex"; the number itself if this table has no name for it.
std::string SyscallName(int64_t number);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PROCESS_STATE_H_
