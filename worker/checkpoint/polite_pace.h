#ifndef MUSTER_WORKER_CHECKPOINT_POLITE_PACE_H_
#define MUSTER_WORKER_CHECKPOINT_POLITE_PACE_H_

#include <optional>
#include <thread>

#include "absl/time/time.h"

namespace muster {

// Limits the CPU time that a background thread takes while training wants all cores. Even a thread
// of low priority gets a share of a core, and the other threads of a parallel loop wait for the one
// whose core it takes. So such a thread rests between its pieces of work if it had to wait for a
// core during the last ones; if cores are idle, it slows nothing down. Pure. Not thread-safe.
class PolitePace {
 public:
  // The times of a thread since it began: how long it ran on a core, and how long it was ready to
  // run and waited for one.
  struct CpuTimes {
    absl::Duration ran, waited;
  };
  // Returns the times of the calling thread, as the kernel counts them; nothing if it does not.
  static std::optional<CpuTimes> OfThisThread();

  // `share`: the share of one core that the thread may take while cores are wanted.
  explicit PolitePace(double share) : share_(share) {}

  // Notes that a piece of work begins at `now`, after something else.
  void Begin(const CpuTimes& times, absl::Time now);

  // Returns how long to rest after a piece of work that ends at `now`. The next piece begins after
  // the rest. Without Begin(), the first one began with the thread. `also`: CPU time that the same
  // work has taken in other threads, which have not rested for it. `most`: the longest rest.
  absl::Duration Rest(const CpuTimes& times, absl::Time now,
                      absl::Duration also = absl::ZeroDuration(),
                      absl::Duration most = absl::InfiniteDuration());

 private:
  const double share_;
  CpuTimes last_ = {};
  CpuTimes lately_ = {};  // times of the last pieces, the later ones weighted more
  absl::Time rested_ = absl::InfinitePast();  // the end of the last rest
};

// Divides one share among the threads that write a save. One thread goes through the files: it
// alone writes files that go through the page cache and files of a single block, and starts threads
// for the rest (DirectFileOptions::wrote). Thread-safe after WriteFromThisThread().
class PoliteWriters {
 public:
  // `share`: of one core, for all threads together. `threads`: the number that are started at a
  // time.
  PoliteWriters(double share, int threads);

  // Declares that the calling thread is the one that goes through the files. Call it before any
  // other thread writes.
  void WriteFromThisThread() { main_ = std::this_thread::get_id(); }

  // Returns how many threads write at a time when the calling thread does.
  int Threads() const;
  // Returns the share for the calling thread's PolitePace.
  double ShareOfThisThread() const { return share_ / Threads(); }

 private:
  const double share_;
  const int threads_;
  std::thread::id main_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_POLITE_PACE_H_
