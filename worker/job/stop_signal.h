#ifndef MUSTER_WORKER_JOB_STOP_SIGNAL_H_
#define MUSTER_WORKER_JOB_STOP_SIGNAL_H_

#include <cstdint>

namespace muster {

// SIGTERM as a request to stop in order: the first one is recorded; one that arrives a second or
// more later kills as usual. An earlier one counts as the same request: SLURM and systemd signal
// every process of a job, and so does the launcher that they signalled. For the whole process, as
// signals are.
class StopSignal {
 public:
  static constexpr int64_t kSameRequest = 1'000'000'000;  // ns

  // Takes effect once, or again after Release(). False: the program handles or ignores SIGTERM
  // itself, and this stays so. `monotonic_ns`, for tests: an async-signal-safe clock, never 0;
  // null: CLOCK_MONOTONIC.
  static bool Install(int64_t (*monotonic_ns)() = nullptr);
  // SIGTERM ends the process at once again, until the next Install(). False: one has arrived
  // already, as a request to stop. Does nothing where Install() has not.
  static bool Release();
  // Whether the signal has arrived since. Async-signal-safe.
  static bool Received();
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_STOP_SIGNAL_H_
