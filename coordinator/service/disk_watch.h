#ifndef MUSTER_COORDINATOR_SERVICE_DISK_WATCH_H_
#define MUSTER_COORDINATOR_SERVICE_DISK_WATCH_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/timer_thread.h"

namespace muster::coordinator {

// The bytes of a directory, and those that its file system has left for this user.
struct DiskSizes {
  int64_t used = 0;
  int64_t free = 0;
};
// Bytes; 0: no limit.
struct DiskLimits {
  int64_t size_warning = int64_t{4} << 30;  // warns when the directory has more
  int64_t free_warning = int64_t{1} << 30;  // warns when less is free
  // When less is free, no job can be submitted: the rest is for the records of jobs that are
  // submitted already.
  int64_t free_least = int64_t{256} << 20;
};
struct DiskJudgement {
  std::vector<std::string> warnings;  // for people
  std::string no_room;                // why no job can be submitted; empty: one can
};

// Pure.
DiskJudgement JudgeDisk(const std::string& directory, const DiskSizes& sizes,
                        const DiskLimits& limits);

// Blocks on the disk. Errors: those of the file system, naming the directory.
absl::StatusOr<DiskSizes> MeasureDisk(const std::string& directory);

// Measures the coordinator's data directory from time to time, and logs when the judgement changes.
// Thread-safe.
class DiskWatch {
 public:
  static constexpr absl::Duration kPeriod = absl::Seconds(10);

  struct Options {
    std::string directory;
    DiskLimits limits;
    std::function<absl::StatusOr<DiskSizes>()> measure = nullptr;  // null: MeasureDisk
    // Called after each measurement; must not block, nor call this object.
    std::function<void(const DiskJudgement&)> on_judged;
    const Clock* clock = &Clock::Real();
  };

  explicit DiskWatch(Options options);
  ~DiskWatch() { Stop(); }

  // Measures for the first time before it returns, and then on a thread.
  void Start();
  // Repeatable; the destructor does it too.
  void Stop() { timer_.Stop(); }
  // Measures; returns when to do it again. Its thread calls it.
  absl::Time Tick();

  // The results of the last measurement.
  DiskSizes sizes() const;
  bool has_room() const;

 private:
  const Options options_;
  mutable Mutex mu_;
  DiskSizes sizes_ ABSL_GUARDED_BY(mu_);
  bool has_room_ ABSL_GUARDED_BY(mu_) = true;
  size_t warnings_ ABSL_GUARDED_BY(mu_) = 0;
  bool failed_ ABSL_GUARDED_BY(mu_) = false;  // the last measurement failed
  TimerThread timer_;                         // last: it uses the rest
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_DISK_WATCH_H_
