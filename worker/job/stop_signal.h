#ifndef MUSTER_WORKER_JOB_STOP_SIGNAL_H_
#define MUSTER_WORKER_JOB_STOP_SIGNAL_H_

#include <cstdint>

namespace muster {

// SIGTERM as a wish to end well: the first one is noted; one that comes a second or more after it
// kills as ever. What comes sooner is the same wish: SLURM and systemd signal every process of a
// job, and so does the launcher that they signalled. For the whole process, as signals are.
class StopSignal {
 public:
  static constexpr int64_t kSameWish = 1'000'000'000;  // ns

  // Takes effect once. False: the program handles or ignores SIGTERM itself, which stands.
  // `monotonic_ns`, for tests: an async-signal-safe clock, never 0; null: CLOCK_MONOTONIC.
  static bool Install(int64_t (*monotonic_ns)() = nullptr);
  // Whether the signal has come since. Async-signal-safe.
  static bool Received();
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_STOP_SIGNAL_H_
