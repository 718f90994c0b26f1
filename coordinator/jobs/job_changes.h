#ifndef MUSTER_COORDINATOR_JOBS_JOB_CHANGES_H_
#define MUSTER_COORDINATOR_JOBS_JOB_CHANGES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "absl/container/btree_set.h"

namespace muster::coordinator {

// The jobs that have changed since a revision: the last change of each job, and the latest
// removals. Not thread-safe; pure.
class JobChanges {
 public:
  static constexpr size_t kKeptRemovals = 1000;

  struct Removal {
    uint64_t revision;
    std::string job_id;
    std::string owner;
  };

  // Records that the job's last change, at revision `former` before, is now at `revision`. 0: it
  // has no change.
  void Changed(uint64_t sequence, uint64_t former, uint64_t revision) {
    changes_.erase({former, sequence});
    if (revision != 0) changes_.insert({revision, sequence});
  }
  void Removed(uint64_t sequence, uint64_t former, Removal removal) {
    Changed(sequence, former, 0);
    removals_.push_back(std::move(removal));
    if (removals_.size() <= kKeptRemovals) return;
    forgotten_ = removals_.front().revision;
    removals_.pop_front();
  }
  // Forgets the removals up to this revision. Called when a coordinator starts and does not know
  // them.
  void ForgetRemovals(uint64_t revision) {
    removals_.clear();
    forgotten_ = revision;
  }

  // Returns (revision, sequence), with each job once.
  const absl::btree_set<std::pair<uint64_t, uint64_t>>& changes() const { return changes_; }
  // Returns all removals after forgotten(), by revision.
  const std::deque<Removal>& removals() const { return removals_; }
  uint64_t forgotten() const { return forgotten_; }

 private:
  absl::btree_set<std::pair<uint64_t, uint64_t>> changes_;
  std::deque<Removal> removals_;
  uint64_t forgotten_ = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_JOB_CHANGES_H_
