#ifndef MUSTER_WORKER_CHECKPOINT_POLITE_PACE_H_
#define MUSTER_WORKER_CHECKPOINT_POLITE_PACE_H_

#include <optional>
#include <thread>

#include "absl/time/time.h"

namespace muster {

// Limits the CPU time that a background thread takes while training wants all cores. A thread of
// low priority still has its share of a core, and the other threads of a parallel loop wait for the
// one that it is taken from. So such a thread rests between its pieces of work, if it had to wait
// for a core in the last ones: if cores are idle, nothing is slowed down. Pure. Not thread-safe.
class PolitePace {
 public:
  // Of the thread, since it began: how long it was on a core, and for how long it was ready to and
  // waited for one.
  struct CpuTimes {
    absl::Duration ran, waited;
  };
  // Those of the calling thread, as the kernel counts them. Nothing if it does not.
  static std::optional<CpuTimes> OfThisThread();

  // `share`: of one core, while cores are wanted.
  explicit PolitePace(double share) : share_(share) {}

  // A piece of work begins at `now`, after something else.
  void Begin(const CpuTimes& times, absl::Time now);

  // After a piece of work, at `now`: how long to rest. The next piece begins after that. Without
  // Begin() the first one began with the thread. `also`: what the same work has taken of the cores
  // elsewhere, for which nobody has rested. `most`: what it may rest.
  absl::Duration Rest(const CpuTimes& times, absl::Time now,
                      absl::Duration also = absl::ZeroDuration(),
                      absl::Duration most = absl::InfiniteDuration());

 private:
  const double share_;
  CpuTimes last_ = {};
  CpuTimes lately_ = {};                      // of the last pieces, the later ones more
  absl::Time rested_ = absl::InfinitePast();  // the end of the last rest
};

// What each thread that writes a save takes, so that all of them together take one share. One
// thread goes through the files: it writes alone what goes through the page cache and what is a
// single block, and starts threads for the rest (DirectFileOptions::wrote). Thread-safe after
// WriteFromThisThread().
class PoliteWriters {
 public:
  // `share`: of one core, for all of them. `threads`: those that are started at a time.
  PoliteWriters(double share, int threads);

  // This is the thread that goes through the files. Call it before any other thread writes.
  void WriteFromThisThread() { main_ = std::this_thread::get_id(); }

  // How many write at a time where this thread does.
  int Threads() const;
  // For PolitePace.
  double ShareOfThisThread() const { return share_ / Threads(); }

 private:
  const double share_;
  const int threads_;
  std::thread::id main_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_POLITE_PACE_H_
