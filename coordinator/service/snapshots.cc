#include "coordinator/service/snapshots.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace muster::coordinator {
namespace {

constexpr size_t kSnapshotPartBytes = 1 << 20;

// A second core, which has no callers: it becomes what a restart would make of the journal. Its
// memory is that of a thread of its own, so the allocator gives it back when it is freed;
// CoreRunner::MaybeTrim finds the rest (not that thread: with its low priority it would hold the
// allocator's locks for long).
class CoreReplica final : public Replica {
 public:
  CoreReplica(const CoreOptions& options, std::string hosts)
      : core_(options), hosts_(std::move(hosts)) {}
  absl::Status Restore(absl::string_view part) override { return core_.Restore(part); }
  absl::Status Replay(absl::string_view record) override { return core_.Replay(record); }
  absl::Status Write(absl::FunctionRef<absl::Status(absl::string_view)> part) override {
    MUSTER_RETURN_IF_ERROR(core_.RestoreHosts(hosts_));
    return core_.WriteSnapshot(kSnapshotPartBytes,
                               [&](const std::string& bytes) { return part(bytes); });
  }

 private:
  Core core_;
  const std::string hosts_;
};

// The state of a core at the time that this is made.
class WholeState final : public Replica {
 public:
  explicit WholeState(const Core& core) {
    (void)core.WriteSnapshot(kSnapshotPartBytes, [this](std::string part) {
      parts_.push_back(std::move(part));
      return absl::OkStatus();
    });
  }
  bool NeedsHistory() const override { return false; }
  absl::Status Restore(absl::string_view) override { return absl::OkStatus(); }
  absl::Status Replay(absl::string_view) override { return absl::OkStatus(); }
  absl::Status Write(absl::FunctionRef<absl::Status(absl::string_view)> part) override {
    for (const std::string& one : parts_) MUSTER_RETURN_IF_ERROR(part(one));
    return absl::OkStatus();
  }

 private:
  std::vector<std::string> parts_;
};

}  // namespace

bool Snapshots::Due() const {
  if (running_) return false;
  if (done_ != nullptr || of_core_) return true;
  // For a large state the next snapshot waits for half of its bytes, so that the cost per record
  // does not keep growing.
  const uint64_t times = 1 + journal_.snapshot_bytes() / std::max<uint64_t>(1, 2 * options_.bytes);
  const uint64_t records = journal_.records_since_snapshot();
  return records >= not_before_ && (records >= times * options_.records ||
                                    journal_.bytes_since_snapshot() >= times * options_.bytes);
}

bool Snapshots::Request(Done done) {
  if (running_ || done_ != nullptr) return false;
  done_ = std::move(done);
  return true;
}

void Snapshots::Answer(const absl::StatusOr<uint64_t>& result) {
  if (const auto done = std::exchange(done_, nullptr)) done(result);
}

void Snapshots::Take(const Core& core, std::function<void(const Written&)> written) {
  MUSTER_FAILPOINT("engine.snapshot");
  const uint64_t revision = core.last_record_revision();
  std::unique_ptr<Replica> replica;
  if (std::exchange(of_core_, false)) {
    replica = std::make_unique<WholeState>(core);
  } else {
    replica = std::make_unique<CoreReplica>(options_.core, core.SnapshotHosts());
  }
  running_ = true;
  begun_ = options_.clock->Now();
  const bool history = replica->NeedsHistory();
  journal_.WriteSnapshot(
      revision, std::move(replica),
      [revision, history, written = std::move(written)](const absl::Status& status) {
        const bool damaged = history && absl::IsDataLoss(status);
        if (!status.ok() && !absl::IsCancelled(status)) {
          MUSTER_LOG(Error) << "snapshot of revision " << revision
                            << " failed: " << status.message()
                            << (damaged ? "; the state in memory is written in its place"
                                        : "; the journal grows until one can be written");
        }
        written({.revision = revision, .status = status, .damaged = damaged});
      });
  MUSTER_FAILPOINT("engine.snapshot_queued");
}

void Snapshots::Ended(const Written& written) {
  const bool ok = written.status.ok();
  running_ = false;
  ok_ = ok;
  ++(ok ? written_ : failed_);
  if (ok) nanoseconds_ = absl::ToInt64Nanoseconds(options_.clock->Now() - begun_);
  // Tried again, but not for every record.
  not_before_ =
      ok ? 0 : journal_.records_since_snapshot() + std::max<uint64_t>(1, options_.records / 8);
  // Once there is a snapshot without the damaged part, that part is no longer needed. Taking it
  // from the core blocks all callers for a moment.
  of_core_ = written.damaged;
  if (!written.damaged) Answer(ok ? absl::StatusOr<uint64_t>(written.revision) : written.status);
}

}  // namespace muster::coordinator
