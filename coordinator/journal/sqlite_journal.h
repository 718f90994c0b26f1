#ifndef MUSTER_COORDINATOR_JOURNAL_SQLITE_JOURNAL_H_
#define MUSTER_COORDINATOR_JOURNAL_SQLITE_JOURNAL_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

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
// A group commit is one row: all records that were appended while the commit before it was syncing.
// Each record is
//   length of the payload  u32   little-endian, as all numbers here
//   crc32c                 u32   of everything behind it
//   seq                    u64   1, 2, 3, ... without a gap
//   revision               u64
//   term                   u64
//   payload
// A snapshot is a row too. It is written, and the records before the previous snapshot deleted, in
// one transaction: SQLite makes it whole or not at all, which is what writing a temporary file,
// fsync, rename and fsync of the directory do for a file. Two snapshots are kept, the new one and
// the last that was good: when the newest has a wrong checksum, the one before it and the records
// since then give the same state.
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

  // So many terms may have begun between a backup and the loss of what came after it.
  static constexpr uint64_t kLostTerms = 65536;
  // Notes that `directory` is a copy of an earlier state: the next start begins kLostTerms later,
  // and its restored() says so. Returns what was done, for people. Errors: as Open; NOT_FOUND there
  // is no journal.
  static absl::StatusOr<std::string> MarkRestored(const std::string& directory);

  // Looks at everything in the journal of `directory`, and says what was found, for people. What it
  // holds stays as it is, except that a torn transaction is cut. `snapshot` and `record` get what
  // Replay would hand over, and their errors are errors. Errors: as Open and Replay; NOT_FOUND
  // there is none.
  using Check = std::function<absl::Status(uint64_t revision, absl::string_view bytes)>;
  static absl::StatusOr<std::string> Verify(const std::string& directory, const Check& snapshot,
                                            const Check& record);

  const std::string& cluster_id() const override { return cluster_id_; }
  uint64_t term() const override { return term_; }
  uint64_t restored() const override { return restored_; }
  const std::string& description() const override { return path_; }
  absl::Status Replay(
      const std::function<absl::Status(uint64_t, absl::string_view)>& snapshot,
      const std::function<absl::Status(uint64_t, absl::string_view)>& record) override;
  void Start(std::function<void(const Progress&)> progress) override;
  void Append(uint64_t revision, std::string record) override;
  void WriteSnapshot(uint64_t revision, std::string state,
                     std::function<void(absl::Status)> done) override;
  uint64_t records_since_snapshot() const override { return records_since_snapshot_; }
  uint64_t bytes_since_snapshot() const override { return bytes_since_snapshot_; }
  void Stop() override;

 private:
  struct Snapshot {
    uint64_t revision = 0;
    uint64_t seq = 0;
    uint64_t records = 0;  // since the one before
    uint64_t bytes = 0;
    std::string state;
    std::function<void(absl::Status)> done;
  };
  // Consecutive encoded records, and then perhaps a snapshot.
  struct Chunk {
    std::string encoded;
    uint64_t first_seq = 0;
    uint64_t last_seq = 0;
    uint64_t last_revision = 0;
    std::unique_ptr<Snapshot> snapshot;
  };

  SqliteJournal(const Options& options, std::unique_ptr<DataDirLock> lock);
  absl::Status OpenFile();
  absl::Status CheckSchema();
  absl::Status ReadMeta();
  absl::Status Exec(const char* sql);
  absl::Status Error(int rc, absl::string_view what) const;
  absl::StatusOr<sqlite3_stmt*> Prepare(const char* sql);
  absl::Status Insert(const Chunk& chunk);
  absl::Status Commit(const std::deque<Chunk>& chunks);
  absl::Status CommitSnapshot(const Snapshot& snapshot);
  absl::Status ReplayRecords(
      uint64_t after_seq, const std::function<absl::Status(uint64_t, absl::string_view)>& record);
  void Run();
  Chunk& TailLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after Open.
  const Options options_;
  const std::unique_ptr<DataDirLock> lock_;
  const std::string path_;
  std::string cluster_id_;
  uint64_t term_ = 0;
  uint64_t restored_ = 0;

  // Used by Open and Replay, then only by the writer thread.
  sqlite3* db_ = nullptr;
  sqlite3_stmt* insert_ = nullptr;
  std::function<void(const Progress&)> progress_;
  uint64_t durable_revision_ = 0;
  uint64_t good_seq_ = 0;  // of the last snapshot that was read or written whole; 0: none
  uint64_t bad_snapshots_ = 0;

  std::atomic<uint64_t> records_since_snapshot_{0};
  std::atomic<uint64_t> bytes_since_snapshot_{0};

  Mutex mu_;
  CondVar wake_;
  std::deque<Chunk> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t next_seq_ ABSL_GUARDED_BY(mu_) = 1;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;

  std::thread writer_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_SQLITE_JOURNAL_H_
