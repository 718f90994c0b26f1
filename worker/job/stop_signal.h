#ifndef MUSTER_WORKER_JOB_STOP_SIGNAL_H_
#define MUSTER_WORKER_JOB_STOP_SIGNAL_H_

#include <cstdint>

namespace muster {

// SIGTERM as a request for an orderly stop: the first one is recorded; one that arrives a second or
// more later kills as usual. One that arrives earlier counts as the same request, because SLURM and
// systemd signal every process of a job, and so does the launcher that they have signalled.
// Signals, and so this class, affect the whole process.
class StopSignal {
 public:
  static constexpr int64_t kSameRequest = 1'000'000'000;  // ns

  // Takes effect once, or again after Release(). False: the program handles or ignores SIGTERM
  // itself, and continues to do so. `monotonic_ns`, for tests: an async-signal-safe clock, never 0;
  // null: CLOCK_MONOTONIC.
  static bool Install(int64_t (*monotonic_ns)() = nullptr);
  // Makes SIGTERM end the process at once again, until the next Install(). False: one has already
  // arrived, as a request to stop. Does nothing if Install() has not taken effect.
  static bool Release();
  // Whether the signal has arrived since. Async-signal-safe.
  static bool Received();
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_STOP_SIGNAL_H_
