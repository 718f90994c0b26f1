#ifndef MUSTER_COORDINATOR_JOURNAL_JOURNAL_H_
#define MUSTER_COORDINATOR_JOURNAL_JOURNAL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster::coordinator {

// The state that results from the records of a journal, built separately from the serving one, so
// that its snapshot blocks no caller. Used by one thread at a time.
class Replica {
 public:
  virtual ~Replica() = default;
  // Returns false if it has the whole state already, and is only asked to write it.
  virtual bool NeedsHistory() const { return true; }
  // The parts of the last snapshot, then the records after it, in order.
  virtual absl::Status Restore(absl::string_view part) = 0;
  virtual absl::Status Replay(absl::string_view record) = 0;
  // Hands over the state in parts of a few MiB. Stops at the first error of `part` and returns it.
  virtual absl::Status Write(absl::FunctionRef<absl::Status(absl::string_view)> part) = 0;
};

// The durable log of the coordinator: records in order, and occasionally a snapshot that replaces
// all records up to its revision. It does not interpret them.
//
// Order of use: construct (see the implementations), Replay(), Start(), then Append() and
// WriteSnapshot() from one thread, Stop(). Callbacks run on the journal's own threads, never inside
// a call, and must not block.
class Journal {
 public:
  // Called after each group commit.
  struct Progress {
    uint64_t durable_revision = 0;  // every record up to this one is on disk
    // OK, or why no record can be written: RESOURCE_EXHAUSTED disk full (it is tried again; a later
    // OK says that it works again), UNAVAILABLE an I/O error (final: what a failed fsync left on
    // disk is unknown, so nothing is acknowledged until a restart has replayed it). Nothing after
    // durable_revision has been acknowledged.
    absl::Status status;
    absl::Duration took;   // the duration of the commit with its fsync; zero if there was none
    uint64_t records = 0;  // in this commit
    uint64_t bytes = 0;
  };

  virtual ~Journal() = default;

  // Returns the id that was made at the first start. 32 hex digits.
  virtual const std::string& cluster_id() const = 0;
  // Returns the term, which is higher at each start, usually by one; durable before the constructor
  // returned.
  virtual uint64_t term() const = 0;
  // Returns the term below which an operator said that this is a copy of an earlier state, whose
  // later part is lost; 0: never. A start whose state does not reflect that yet must apply it.
  virtual uint64_t restored() const { return 0; }
  // Returns the id drawn when the operator said so; 0: never, or an older version did not draw one.
  virtual uint64_t restore_id() const { return 0; }
  // "memory", or the file.
  virtual const std::string& description() const = 0;

  // Hands over the newest snapshot, if there is one, part by part, then every record after it, in
  // order. Stops at the first error of a callback and returns it. Errors: DATA_LOSS naming the file
  // and the place.
  virtual absl::Status Replay(
      const std::function<absl::Status(uint64_t revision, absl::string_view part)>& snapshot,
      const std::function<absl::Status(uint64_t revision, absl::string_view record)>& record) = 0;

  // Begins to write. `progress` is called after every group commit.
  virtual void Start(std::function<void(const Progress&)> progress) = 0;

  // Queues one record; never blocks. Revisions rise. While one commit is syncing, all that is
  // appended is collected for the next.
  virtual void Append(uint64_t revision, std::string record) = 0;

  // Begins a snapshot of the state after `revision`, which replaces all records appended so far.
  // `replica` is brought to that state from the last snapshot and the records after it, and
  // written, on a thread of the journal, while Append and commits continue; then it is destroyed.
  // `done` is called when the snapshot is durable and the records before the previous one are
  // deleted, or with the error (then nothing is deleted): DATA_LOSS if what the journal holds
  // cannot be read (a replica that needs no history can still be written), CANCELLED by Stop. One
  // at a time: the next one after `done`.
  virtual void WriteSnapshot(uint64_t revision, std::unique_ptr<Replica> replica,
                             std::function<void(absl::Status)> done) = 0;

  // The records and bytes that were appended since the last snapshot (or ever).
  virtual uint64_t records_since_snapshot() const = 0;
  virtual uint64_t bytes_since_snapshot() const = 0;
  // Bytes of the last snapshot; 0: there is none.
  virtual uint64_t snapshot_bytes() const { return 0; }

  // Reads a part of the backup (backup_file.h) that the snapshot of `revision` is: at most `most`
  // bytes from `offset`. May be called by any thread at any time. Blocks on the disk. Errors:
  // NOT_FOUND there is no such snapshot, or no longer; FAILED_PRECONDITION the journal keeps
  // nothing.
  struct BackupPart {
    uint64_t bytes = 0;     // size of the whole
    std::string data = {};  // empty at the end
  };
  virtual absl::StatusOr<BackupPart> ReadBackup(uint64_t revision, uint64_t offset,
                                                size_t most) const {
    (void)revision, (void)offset, (void)most;
    return absl::FailedPreconditionError(
        "this coordinator keeps nothing on disk that could be backed up: it runs without "
        "--data_dir");
  }

  // Writes queued records, then stops. Abandons a snapshot that is being written. Blocks.
  // Repeatable.
  virtual void Stop() = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_JOURNAL_H_
