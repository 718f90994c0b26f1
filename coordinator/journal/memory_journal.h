#ifndef MUSTER_COORDINATOR_JOURNAL_MEMORY_JOURNAL_H_
#define MUSTER_COORDINATOR_JOURNAL_MEMORY_JOURNAL_H_

#include <functional>
#include <memory>
#include <string>

#include "coordinator/journal/journal.h"

namespace muster::coordinator {

// A journal that keeps nothing: every record counts as durable when it is appended. For laptops,
// where the job ends with its launcher, and for tests. Term 1. `progress` is called inside Append
// and WriteSnapshot, on the caller's thread: the one exception to Journal's rule, since there is
// nothing to wait for.
class MemoryJournal final : public Journal {
 public:
  MemoryJournal();

  const std::string& cluster_id() const override { return cluster_id_; }
  uint64_t term() const override { return 1; }
  const std::string& description() const override { return description_; }
  absl::Status Replay(
      const std::function<absl::Status(uint64_t, absl::string_view)>& snapshot,
      const std::function<absl::Status(uint64_t, absl::string_view)>& record) override;
  void Start(std::function<void(const Progress&)> progress) override;
  void Append(uint64_t revision, std::string record) override;
  void WriteSnapshot(uint64_t revision, std::unique_ptr<Replica> replica,
                     std::function<void(absl::Status)> done) override;
  uint64_t records_since_snapshot() const override { return 0; }
  uint64_t bytes_since_snapshot() const override { return 0; }
  void Stop() override {}

 private:
  const std::string cluster_id_;
  const std::string description_ = "memory";
  std::function<void(const Progress&)> progress_;
};

// 32 random hex digits.
std::string NewClusterId();

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_MEMORY_JOURNAL_H_
