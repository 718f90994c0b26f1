#include "coordinator/journal/memory_journal.h"

#include <random>

#include "absl/strings/str_format.h"

namespace muster::coordinator {

std::string NewClusterId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x%08x%08x", random(), random(), random(), random());
}

MemoryJournal::MemoryJournal() : cluster_id_(NewClusterId()) {}

absl::Status MemoryJournal::Replay(
    const std::function<absl::Status(uint64_t, absl::string_view)>&,
    const std::function<absl::Status(uint64_t, absl::string_view)>&) {
  return absl::OkStatus();
}

void MemoryJournal::Start(std::function<void(const Progress&)> progress) {
  progress_ = std::move(progress);
}

void MemoryJournal::Append(uint64_t revision, std::string record) {
  progress_({.durable_revision = revision,
             .status = absl::OkStatus(),
             .took = absl::ZeroDuration(),
             .records = 1,
             .bytes = record.size()});
}

void MemoryJournal::WriteSnapshot(uint64_t, std::unique_ptr<Replica>,
                                  std::function<void(absl::Status)> done) {
  done(absl::OkStatus());
}

}  // namespace muster::coordinator
