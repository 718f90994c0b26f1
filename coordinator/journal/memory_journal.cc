#include "coordinator/journal/memory_journal.h"

#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace muster::coordinator {

std::string NewClusterId() { return absl::StrCat(RandomHex(), RandomHex()); }

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
