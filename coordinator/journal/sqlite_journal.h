#ifndef MUSTER_COORDINATOR_JOURNAL_SQLITE_JOURNAL_H_
#define MUSTER_COORDINATOR_JOURNAL_SQLITE_JOURNAL_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "coordinator/journal/data_dir_lock.h"
#include "coordinator/journal/journal.h"

struct sqlite3;
struct sqlite3_stmt;

namespace muster::coordinator {

// A journal in one SQLite file, DIRECTORY/journal.db, in WAL mode with synchronous=FULL: a commit
// has been fsynced when it returns, so what was acknowledged survives a power cut.
//
// A group commit is one row: all records that were appended while the commit before it was syncing,
// framed as record_format.h says.
//
// Snapshots are files of their own, DIRECTORY/snapshot-SEQ (snapshot_file.h). A second thread, next
// to the committing one, builds the state from the last snapshot and the records after it, and
// writes and syncs the file; a row that names it then makes it current, in one transaction that is
// as small as any. Two snapshots are kept, the new one and the last that was good: when the newest
// is damaged, the one before it and the records since then give the same state. Older records are
// deleted a few MiB at a time, between commits. A crash in between leaves files and records that
// are never read; the next start and the next snapshot remove them.
//
// Only the committing thread uses the database once it has started: for a snapshot it reads and
// deletes in steps of a few MiB, so that no commit waits for long.
//
// Earlier versions kept a snapshot in one row (schema 1). Those are read, and replaced by files;
// the schema is 2 from the first file on, so that those versions refuse it.
//
// On opening, a transaction that a crash tore off is cut; anything else that is wrong (see
// wal_check.h, a wrong checksum, a gap in seq) is refused with its place. A second process on the
// same directory is refused with the pid of the first.
class SqliteJournal final : public Journal {
 public:
  struct Options {
    std::string directory;      // made if missing
    const char* vfs = nullptr;  // of SQLite, for tests with faults; nullptr: the default one
    absl::Duration retry_full =
        absl::Milliseconds(500);  // how often a write is tried again on a full disk
  };

  // Takes the lock, opens or makes the file, and makes the new term durable. Blocks on the disk.
  // Errors: ALREADY_EXISTS another process has the directory; DATA_LOSS corrupt, with the place;
  // RESOURCE_EXHAUSTED, UNAVAILABLE, NOT_FOUND, PERMISSION_DENIED from the disk.
  static absl::StatusOr<std::unique_ptr<SqliteJournal>> Open(const Options& options);
  ~SqliteJournal() override;

  // The most terms that may have begun between a backup and the loss of later data.
  static constexpr uint64_t kLostTerms = 65536;
  // Notes that `directory` is a copy of an earlier state: the next start begins kLostTerms later,
  // its restored() says so, and its restore_id() is another one than that of any other copy.
  // Returns a description of the change, for people. Errors: as Open; NOT_FOUND there is no
  // journal.
  static absl::StatusOr<std::string> MarkRestored(const std::string& directory);

  // Puts the state of a backup (backup_file.h) into `directory`, which is made if it is missing, as
  // MarkRestored marks a copy: the next start begins a term that no process has seen. That is
  // kLostTerms, and a term for each minute since the backup was made, beyond the later of the
  // backup's and the directory's: two restores of one backup do not share terms. A journal that is
  // there is replaced in one step and kept, as hard links in DIRECTORY/lost-TERM. `state` gets the
  // parts of the state before anything is changed, and its errors are returned. Returns a
  // description for people. Errors: as Open, OpenBackup and ReadBackupState; FAILED_PRECONDITION
  // the directory is another cluster's.
  using Check = std::function<absl::Status(uint64_t revision, absl::string_view bytes)>;
  static absl::StatusOr<std::string> Restore(const std::string& backup,
                                             const std::string& directory, const Check& state,
                                             absl::Time now);

  // Reads a backup whole and returns a summary, for people. `state` as for Restore.
  static absl::StatusOr<std::string> VerifyBackup(const std::string& backup, const Check& state);

  // Reads everything in the journal of `directory` and returns a summary, for people. The contents
  // stay unchanged, except that a torn transaction is cut. `snapshot` and `record` get what Replay
  // would hand over, and their errors are returned. Errors: as Open and Replay; NOT_FOUND there is
  // no journal.
  static absl::StatusOr<std::string> Verify(const std::string& directory, const Check& snapshot,
                                            const Check& record);

  const std::string& cluster_id() const override { return cluster_id_; }
  uint64_t term() const override { return term_; }
  uint64_t restored() const override { return restored_; }
  uint64_t restore_id() const override { return restore_id_; }
  const std::string& description() const override { return path_; }
  absl::Status Replay(
      const std::function<absl::Status(uint64_t, absl::string_view)>& snapshot,
      const std::function<absl::Status(uint64_t, absl::string_view)>& record) override;
  void Start(std::function<void(const Progress&)> progress) override;
  void Append(uint64_t revision, std::string record) override;
  void WriteSnapshot(uint64_t revision, std::unique_ptr<Replica> replica,
                     std::function<void(absl::Status)> done) override;
  uint64_t records_since_snapshot() const override { return records_since_snapshot_; }
  uint64_t bytes_since_snapshot() const override { return bytes_since_snapshot_; }
  uint64_t snapshot_bytes() const override { return snapshot_bytes_; }
  absl::StatusOr<BackupPart> ReadBackup(uint64_t revision, uint64_t offset,
                                        size_t most) const override;
  void Stop() override;

 private:
  // A snapshot that the journal holds.
  struct Snapshot {
    uint64_t seq = 0;
    uint64_t revision = 0;
    bool in_row = false;  // written by schema 1
    uint64_t parts = 0;   // in the file
    uint64_t bytes = 0;
  };
  // A snapshot to be written.
  struct Task {
    uint64_t seq = 0;
    uint64_t revision = 0;
    uint64_t records = 0;  // since the snapshot before
    uint64_t bytes = 0;
    std::unique_ptr<Replica> replica;
    std::function<void(absl::Status)> done;
  };
  // Consecutive encoded records.
  struct Chunk {
    std::string encoded;
    uint64_t first_seq = 0;
    uint64_t last_seq = 0;
    uint64_t last_revision = 0;
  };
  struct Row {
    uint64_t first_seq = 0;
    uint64_t last_seq = 0;
    std::string data;
  };
  using Part = absl::FunctionRef<absl::Status(absl::string_view)>;
  using Record = absl::FunctionRef<absl::Status(uint64_t revision, absl::string_view payload)>;

  SqliteJournal(const Options& options, std::unique_ptr<DataDirLock> lock);
  absl::Status OpenFile();
  absl::Status MakeTables();
  // The contents of a directory before a backup is restored there.
  struct Former {
    bool there = false;
    absl::Status readable;  // not OK: it is damaged
    std::string cluster_id;
    uint64_t term = 0;
    uint64_t next_seq = 1;           // a number that no snapshot file has
    std::vector<std::string> files;  // names
  };
  static absl::StatusOr<Former> ReadFormer(const std::string& directory);
  static absl::StatusOr<std::string> KeepFormer(const std::string& directory, const Former& former,
                                                absl::Time now);
  static absl::Status MakeRestored(const std::string& directory, const std::string& cluster_id,
                                   uint64_t term, const Snapshot& snapshot);
  absl::Status CheckSchema();
  absl::Status ReadMeta();
  absl::Status Exec(const char* sql);
  absl::Status Error(int rc, absl::string_view what) const;
  absl::StatusOr<sqlite3_stmt*> Prepare(const char* sql);
  absl::Status Insert(const Chunk& chunk);
  absl::Status Commit(const std::deque<Chunk>& chunks);
  absl::StatusOr<std::vector<Snapshot>> ListSnapshots();
  std::string SnapshotPath(uint64_t seq) const;
  absl::Status ReadSnapshotRow(const Snapshot& snapshot, Part part);
  absl::Status ReplayRecords(uint64_t after_seq, Record record);
  // Hands over the records of one row from `*next` to `last`, and moves `*next` past them.
  absl::Status DecodeRow(uint64_t first_seq, uint64_t last_seq, absl::string_view data,
                         uint64_t last, uint64_t* next, Record record) const;
  void RemoveLeftFiles(const std::vector<Snapshot>& snapshots) const;
  void Run();
  Chunk& TailLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Run by the thread that writes snapshots.
  void RunSnapshots();
  absl::Status WriteSnapshotOf(Task* task);
  // Brings the replica to the state of the task. False: the newest snapshot has it already.
  absl::StatusOr<bool> BuildState(Task* task);
  // Hands over a snapshot only after reading it to its end, so that nothing of a damaged one is
  // handed over.
  absl::Status ReadWhole(const Snapshot& snapshot, Part part);
  absl::Status ReplayForSnapshot(uint64_t after_seq, uint64_t to_seq, Replica* replica);
  absl::Status DeleteOldRecords();
  // Has the thread that commits run `step` between two commits, and waits for it. Errors: those of
  // `step`; CANCELLED when stopping; why nothing can be written, once that is final.
  absl::Status BetweenCommits(absl::FunctionRef<absl::Status()> step);
  // Lets the disk serve others for as long as it has served us. CANCELLED when stopping.
  absl::Status Pause(absl::Duration length);
  // Run by the thread that commits.
  absl::Status ReadRows(uint64_t from_seq, std::vector<Row>* rows);
  absl::Status Publish(const Snapshot& snapshot);
  absl::StatusOr<bool> DeleteSomeRecords(uint64_t up_to_seq);

  // Constant after Open.
  const Options options_;
  const std::unique_ptr<DataDirLock> lock_;
  const std::string path_;
  std::string cluster_id_;
  uint64_t term_ = 0;
  uint64_t restored_ = 0;
  uint64_t restore_id_ = 0;

  // Used by Open and Replay, then only by the writer thread.
  sqlite3* db_ = nullptr;
  sqlite3_stmt* insert_ = nullptr;
  std::function<void(const Progress&)> progress_;
  int schema_ = 0;
  uint64_t durable_revision_ = 0;
  uint64_t durable_seq_ = 0;

  // Used by Replay, then only by the thread that writes snapshots.
  std::vector<Snapshot> snapshots_;  // newest first
  uint64_t good_seq_ = 0;            // the last one that was read or written whole; 0: none
  uint64_t bad_snapshots_ = 0;

  std::atomic<uint64_t> records_since_snapshot_{0};
  std::atomic<uint64_t> bytes_since_snapshot_{0};
  std::atomic<uint64_t> snapshot_bytes_{0};

  mutable Mutex mu_;
  std::vector<Snapshot> files_ ABSL_GUARDED_BY(mu_);  // snapshots_, for ReadBackup
  CondVar wake_;
  std::deque<Chunk> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t next_seq_ ABSL_GUARDED_BY(mu_) = 1;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<Task> task_ ABSL_GUARDED_BY(mu_);
  // Set while a step waits or runs.
  const absl::FunctionRef<absl::Status()>* step_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool step_done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status step_status_ ABSL_GUARDED_BY(mu_);
  CondVar snapshot_wake_;  // a task, the end of a step, or stop_

  std::thread writer_;
  std::thread snapshot_writer_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_SQLITE_JOURNAL_H_
