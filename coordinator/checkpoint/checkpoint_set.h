#ifndef MUSTER_COORDINATOR_CHECKPOINT_CHECKPOINT_SET_H_
#define MUSTER_COORDINATOR_CHECKPOINT_CHECKPOINT_SET_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "coordinator/checkpoint/coverage.h"
#include "proto/muster/v1/checkpoint.pb.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/journal.pb.h"

namespace muster::coordinator {

// The memory that the reports of all jobs may take.
struct ReportBudget {
  size_t of_all = 256 << 20;
  size_t used = 0;
};

// The checkpoints of one job: which are whole, which one a resume takes, which may be deleted.
// proto/muster/v1/checkpoint.proto has the states. Not thread-safe; pure.
//
// The records have what must survive a crash: that a checkpoint began, is sealed, published,
// marked, about to be deleted, gone. They lack what ranks report of a checkpoint that is being
// prepared: after a restart the ranks report it again.
//
// Every method that changes a record appends to `changes`; the caller journals these before it
// answers.
class CheckpointSet {
 public:
  static constexpr size_t kMaxPath = 4096;
  static constexpr size_t kMaxFileName = 255;
  static constexpr size_t kMaxRecords = 4096;  // for one job; beyond it Begin() forgets the oldest
  static constexpr size_t kMaxPreparing = 4;   // at a time
  static constexpr int kMaxRanks = 1 << 20;
  static constexpr int kMaxParts = 1 << 20;
  static constexpr size_t kMaxDamage = 1024;
  static constexpr int kListLimit = 256;    // records of a page
  static constexpr int kDeleteLimit = 128;  // asked for in one reply
  // The limit of all reports of one checkpoint that is being prepared.
  static constexpr size_t kMaxReportBytes = 48 << 20;
  static constexpr size_t kMaxPartBytes = 1 << 20;  // for one report

  // Deliberate faults, see Mutants.
  struct Faults {
    bool seals_before_coverage = false;
    bool deletes_last_resumable = false;
    bool resumes_from_damaged = false;
    bool resumes_from_held_back = false;
    bool deletes_before_seal = false;  // counts one that is being prepared as one that is kept
    bool deletes_pinned = false;
    bool forgets_damage = false;           // when the coordinator starts again
    bool sizes_clear_damage = false;       // that a deep look has found
    bool sizes_count_as_contents = false;  // a look at the sizes is kept as a deep one
  };
  // Signs the hash of a record: the same signature for the same hash.
  using Signer = std::function<std::string(absl::string_view sha256)>;
  // `budget` (null: unlimited) must outlive this. `sign`: null if records are not signed.
  CheckpointSet(std::string job_id, ReportBudget* budget, Faults faults, Signer sign = nullptr);
  explicit CheckpointSet(std::string job_id)
      : CheckpointSet(std::move(job_id), nullptr, Faults()) {}

  using Changes = std::vector<v1::CheckpointChanged>;
  using Error = std::optional<v1::OpError>;

  // Begins a checkpoint. `id` is a new one, used unless a checkpoint of this path, step and plan
  // exists. A job that keeps all of its checkpoints, or whose folders others delete, saves for
  // months: beyond kMaxRecords the oldest records are forgotten, and their folders stay. Errors:
  // BAD_FIELD, LIMIT; CHECKPOINT_CONFLICT if another plan or step is being prepared for the path.
  Error Begin(const v1::BeginCheckpointRequest& request, uint64_t generation, uint64_t id,
              v1::BeginCheckpointReply* reply, Changes* changes);
  // Keeps nothing of a part that it refuses, which can be sent again. Errors: BAD_FIELD, LIMIT;
  // NO_CHECKPOINT.
  Error Report(const v1::ReportShardsRequest& request);
  // Errors: NO_CHECKPOINT; SHARDS_MISSING; NOT_COVERED.
  Error Seal(const v1::SealCheckpointRequest& request, v1::SealCheckpointReply* reply,
             Changes* changes);
  // Errors: NO_CHECKPOINT; CHECKPOINT_CONFLICT for a checkpoint that is not sealed, or whose name a
  // newer one has.
  Error Publish(const v1::PublishCheckpointRequest& request, v1::PublishCheckpointReply* reply,
                Changes* changes);
  // Drops a checkpoint that is being prepared; one that is gone is no error. Errors:
  // CHECKPOINT_CONFLICT for one that is sealed.
  Error Abort(uint64_t id, Changes* changes);
  // Notes that the caller has deleted the files. Ids that are gone are no error. Errors:
  // CHECKPOINT_CONFLICT for a checkpoint without a deletion order.
  Error Deleted(const v1::CheckpointDeletedRequest& request, Changes* changes);
  Error Mark(const v1::MarkCheckpointRequest& request, v1::MarkCheckpointReply* reply,
             Changes* changes);
  // Keeps what a reader of the files found. Errors: BAD_FIELD; NO_CHECKPOINT; CHECKPOINT_CONFLICT
  // for one that is not sealed, if the reader compared with another record, or if the record itself
  // is damaged.
  Error Verify(const v1::VerifyCheckpointRequest& request, v1::VerifyCheckpointReply* reply,
               Changes* changes);
  // Selects what retention lets go; with dry_run nothing changes. Errors: BAD_FIELD.
  Error Collect(const v1::CollectCheckpointsRequest& request, v1::CollectCheckpointsReply* reply,
                Changes* changes);
  // Errors: NO_CHECKPOINT.
  Error Resolve(const v1::ResolveCheckpointRequest& request,
                v1::ResolveCheckpointReply* reply) const;
  void List(const v1::ListCheckpointsRequest& request, v1::ListCheckpointsReply* reply) const;
  // Returns what a resume takes if its files are whole: the newest promoted checkpoint that is
  // sealed, whether published or not, and directly in `folder` (empty: anywhere). Null: there is
  // none.
  const v1::CheckpointRecord* NewestPromoted(absl::string_view folder) const;

  // Takes over the checkpoints of the former job of this name, or of its former attempt. Sealed
  // ones keep the name of the job that their digests have. Called before anything else.
  void Adopt(CheckpointSet* former);

  // Drops the checkpoints in preparation: the process that prepared them was replaced by one that
  // may write other bytes.
  void DropPreparing(Changes* changes);

  // Restores a record, at replay or from a snapshot.
  void Restore(const v1::CheckpointChanged& change);
  // Calls f(const v1::CheckpointChanged&) for each record, by id, then for the head of the chain.
  template <typename F>
  void ForEach(F f) const {
    v1::CheckpointChanged change;
    change.set_job_id(job_id_);
    for (const auto& [id, entry] : entries_) {
      *change.mutable_record() = entry.record;
      f(change);
    }
    if (head_.empty()) return;
    change.clear_record();
    change.set_head_sha256(head_);
    f(change);
  }
  size_t size() const { return entries_.size(); }
  // The size of the reports that are kept.
  size_t report_bytes() const;
  const std::string& head_sha256() const { return head_; }

 private:
  struct Entry {
    v1::CheckpointRecord record;
    // The reports on a checkpoint that is being prepared.
    struct Reports {
      explicit Reports(ReportBudget* whose) : budget(whose) {}
      ~Reports() {
        if (budget != nullptr) budget->used -= charged;
      }
      Reports(const Reports&) = delete;
      Reports& operator=(const Reports&) = delete;
      // Brings the budget up to date with bytes_of_all().
      void Charge() {
        const size_t now = bytes_of_all();
        if (budget != nullptr) budget->used += now - charged;
        charged = now;
      }
      size_t bytes_of_all() const { return bytes + coverage.bytes() + parts.size() * 64; }

      ReportBudget* const budget;
      size_t charged = 0;
      // The answer of FirstProblem() about what has been reported; nullopt: not asked since.
      std::optional<std::string> problem;
      Coverage coverage;
      // Files by name, without their slices.
      absl::btree_map<std::string, std::pair<v1::ShardFile, int>>
          files;                  // and the rank that reported it
      std::vector<int> parts;     // by rank: the number of the next part
      absl::btree_set<int> open;  // ranks without `last`
      size_t bytes = 0;
    };
    std::unique_ptr<Reports> reports;
  };

  Entry* Find(uint64_t id);
  Error NoCheckpoint(uint64_t id) const;
  // Returns an error if a checkpoint is neither sealed nor published and so cannot be `done`.
  static Error CheckWhole(const v1::CheckpointRecord& record, absl::string_view done);
  void Changed(const v1::CheckpointRecord& record, Changes* changes) const;
  void Remove(uint64_t id, Changes* changes);
  // Returns the ids of the checkpoints in `folder` that `keep` and `keep_every` let go, oldest
  // first. Retention of one project leaves the folders of others alone.
  std::vector<uint64_t> Superfluous(absl::string_view folder, int keep, int64_t keep_every) const;
  // Returns which record may go to make room for another: the oldest that is published and that no
  // resume would take now; pinned ones last. Its folder stays, as one that the registry does not
  // know.
  std::optional<uint64_t> Forgettable() const;
  void StartReports(Entry* entry) const;
  Error CheckPart(const v1::ReportShardsRequest& request, const Entry& entry, size_t* bytes) const;

  const std::string job_id_;
  ReportBudget* const budget_;
  const Faults faults_;
  const Signer sign_;
  absl::btree_map<uint64_t, Entry> entries_;  // by id: in the order of their beginning
  std::string head_;                          // sha256 of the checkpoint that was sealed last
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CHECKPOINT_CHECKPOINT_SET_H_
