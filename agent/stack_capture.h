#ifndef MUSTER_AGENT_STACK_CAPTURE_H_
#define MUSTER_AGENT_STACK_CAPTURE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "agent/stack_source.h"
#include "base/mutex.h"

namespace muster::agent {

struct StackCaptureOptions {
  // Beyond each limit, the text says how much was left out.
  size_t max_bytes = 64 << 10;
  int max_threads = 256;
  int max_frames = 64;  // native and Python frames each
  // How long one thread may take to stop. One that ignores signals (state D) never does.
  absl::Duration stop_timeout = absl::Milliseconds(200);
  // How long the destructor waits for captures beyond their budget: inspecting a process that is
  // blocked in the kernel can block the inspecting thread.
  absl::Duration end_timeout = absl::Seconds(2);
  // Replaces ptrace(PTRACE_SEIZE) in tests; returns an errno. Tests refuse with it.
  std::function<int(pid_t)> seize = nullptr;
  // The file in which the kernel says who may trace whom; tests replace it.
  std::string ptrace_scope_path = "/proc/sys/kernel/yama/ptrace_scope";
  // Replaces the start of the thread that looks in tests; throws std::system_error as that does.
  std::function<std::thread(std::function<void()>)> start_thread = nullptr;
  // Replaces ProcessState::started of a process in tests.
  std::function<uint64_t(int64_t pid)> started = nullptr;
};

// Takes the stacks of a running process as a debugger does: stops one thread after the other for as
// long as its frames take to walk (a millisecond or so), then resumes it; a process that was
// stopped before stays stopped. Nothing is written to the process, and no signal is delivered to
// it, except to a Python of unknown layout that has asked for one (agent/faulthandler.h). System
// calls that restart automatically do; a few others (epoll_wait, semop) may return EINTR, as they
// may at any time.
//
// The text has a line on the process and then the threads, the main one first; threads at the same
// place are listed together:
//
//   pid 4242 (train), sleeping in futex (futex_wait_queue), 3 threads
//   thread 4242 (train), sleeping in clock_nanosleep:
//     #0 clock_nanosleep (libc.so.6)
//     #1 Augment(Image const&) augment.cc:41 (train)
//   threads 4243 (grpc), 4244 (grpc), sleeping in futex:
//     #0 ...
//
// For a process that runs CPython (3.9 to 3.13) the threads show their Python frames first, read
// from the interpreter's memory at the same stop; a thread that does not stop shows them, too.
// Another version is named, and its frames are not shown:
//
//   pid 4242 (python3), running, 1 thread, Python 3.11.2
//   thread 4242 (python3), running:
//     py#0 Trainer.step (/srv/train.py:41)
//     py#1 <module> (/srv/train.py:90)
//     #0 _PyEval_EvalFrameDefault (python3.11)
//
// Names come from the symbol tables of the program and its libraries, demangled; lines if the
// program has its own debug information. Nothing is fetched over the network.
//
// If the stack is not available (the kernel refuses ptrace, another debugger is attached, it is
// this process, the process has ended), the text gives the reason, and still lists the state,
// system call and kernel function of each thread from /proc.
//
// Each look has its own thread. If none can be started, or the last look at the same process has
// not ended, or eight others have not (the kernel may hold threads that look at a process that it
// holds), the text is the line on the process and that reason.
//
// Thread-safe. Must run in the parent of the process, or with the right to trace it.
class StackCapture final : public StackSource {
 public:
  explicit StackCapture(StackCaptureOptions options = {});
  // Waits for captures that outran their budget, within limits: the rest end on their own.
  ~StackCapture() override;

  StackSnapshot Capture(int64_t pid, absl::Duration budget) override;

  // Joins the threads of captures that outran their budget and have ended since, of this object and
  // others; returns how many have not ended.
  static int CollectLate();

 private:
  struct Job;
  struct Late;

  const std::shared_ptr<const StackCaptureOptions> options_;  // captures may outlive this
  Mutex mu_;
  std::list<std::shared_ptr<Job>> late_jobs_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_STACK_CAPTURE_H_
