#include "coordinator/journal/sqlite_journal.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/thread_priority.h"
#include "coordinator/journal/backup_file.h"
#include "coordinator/journal/record_format.h"
#include "coordinator/journal/snapshot_file.h"
#include "coordinator/journal/wal_check.h"

namespace muster::coordinator {
namespace {

// Returns whether a snapshot is damaged, so that the one before it is taken in its place. Other
// errors (no descriptor, no memory, a disk that does not answer) say nothing about it, and may be
// over a moment later.
bool IsDamage(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsNotFound(status);
}

// Returns a random id that is never 0.
uint64_t NewRestoreId() {
  uint64_t id = 0;
  while (id == 0) MUSTER_CHECK(absl::SimpleHexAtoi(RandomHex(), &id));
  return id;
}

// One row is at most about this long, so that replay needs little memory; a commit may have many
// rows.
constexpr size_t kRowBytes = 4 << 20;

// How much the committing thread reads or deletes for a snapshot before it checks for a commit
// again.
constexpr size_t kStepBytes = 1 << 20;
constexpr int kStepRows = 256;
// A snapshot is synced after this many bytes, so that no sync of the log waits for much of it.
constexpr size_t kSyncBytes = 4 << 20;
constexpr char kSnapshotPrefix[] = "snapshot-";
// Below the threads that answer, which matters if cores are few; not so low that a busy machine
// starves it.
constexpr int kSnapshotNice = 5;

class Statement {
 public:
  explicit Statement(sqlite3_stmt* statement) : statement_(statement) {}
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;
  sqlite3_stmt* get() const { return statement_; }

 private:
  sqlite3_stmt* const statement_;
};

absl::string_view Blob(sqlite3_stmt* statement, int column) {
  const void* data = sqlite3_column_blob(statement, column);
  return absl::string_view(static_cast<const char*>(data),
                           data == nullptr ? 0 : sqlite3_column_bytes(statement, column));
}

// The journal holds what users keep in it: only its owner reads it. Makes the file, as SQLite would
// make it readable for all; the log beside it gets the same mode.
absl::Status MakePrivate(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("journal: cannot open '", path, "'"));
  struct stat info;
  const bool open_to_others = fstat(fd, &info) == 0 && (info.st_mode & 07) != 0;
  if (open_to_others &&
      (fchmod(fd, 0600) != 0 || (chmod((path + "-wal").c_str(), 0600) != 0 && errno != ENOENT))) {
    MUSTER_LOG(Warning) << "journal '" << path
                        << "' can be read by other users, and its mode cannot be "
                        << "changed (" << std::strerror(errno) << "): make it 0600";
  }
  close(fd);
  return absl::OkStatus();
}

absl::Status CheckThere(const std::string& directory) {
  const std::string path = directory + "/journal.db";
  struct stat info;
  if (stat(path.c_str(), &info) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("no journal at '", path, "'"));
}

int LastErrnoOfLog(sqlite3* db) {
  sqlite3_file* log = nullptr;
  int error = 0;
  if (sqlite3_file_control(db, "main", SQLITE_FCNTL_JOURNAL_POINTER, &log) == SQLITE_OK &&
      log != nullptr && log->pMethods != nullptr) {
    log->pMethods->xFileControl(log, SQLITE_FCNTL_LAST_ERRNO, &error);
  }
  return error;
}

}  // namespace

SqliteJournal::SqliteJournal(const Options& options, std::unique_ptr<DataDirLock> lock)
    : options_(options), lock_(std::move(lock)), path_(options.directory + "/journal.db") {}

SqliteJournal::~SqliteJournal() {
  Stop();
  sqlite3_finalize(insert_);
  sqlite3_close_v2(db_);
}

absl::Status SqliteJournal::Error(int rc, absl::string_view what) const {
  // For a script, the beginning of the first statement is enough.
  const std::string text = absl::StrCat("journal '", path_, "': ", what.substr(0, 60), ": ",
                                        db_ == nullptr ? sqlite3_errstr(rc) : sqlite3_errmsg(db_));
  switch (rc & 0xFF) {
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(text);
    case SQLITE_IOERR:
      // SQLite does not know quotas: report one as a full disk. Only if a write failed with that
      // error, because after a failed sync the contents of the disk are unknown.
      if (rc == SQLITE_IOERR_WRITE && LastErrnoOfLog(db_) == EDQUOT)
        return absl::ResourceExhaustedError(absl::StrCat(text, " (", std::strerror(EDQUOT), ")"));
      return absl::UnavailableError(text);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(
          absl::StrCat(text, "; restore a copy of the directory and mark it with --restored"));
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
    case SQLITE_READONLY:
      return absl::PermissionDeniedError(text);
    default:
      return absl::UnavailableError(text);
  }
}

absl::Status SqliteJournal::Exec(const char* sql) {
  const int rc = sqlite3_exec(db_, sql, nullptr, nullptr, nullptr);
  return rc == SQLITE_OK ? absl::OkStatus() : Error(rc, sql);
}

absl::StatusOr<sqlite3_stmt*> SqliteJournal::Prepare(const char* sql) {
  sqlite3_stmt* statement = nullptr;
  const int rc = sqlite3_prepare_v2(db_, sql, -1, &statement, nullptr);
  if (rc != SQLITE_OK) return Error(rc, sql);
  return statement;
}

absl::Status SqliteJournal::OpenFile() {
  MUSTER_RETURN_IF_ERROR(MakePrivate(path_));
  MUSTER_ASSIGN_OR_RETURN(const WalReport wal, CheckWal(path_ + "-wal"));
  if (wal.torn_tail_bytes > 0) {
    MUSTER_LOG(Warning)
        << "journal '" << path_ << "': cut " << wal.torn_tail_bytes
        << " bytes of a transaction that a crash left unfinished (it was never acknowledged)";
  }
  int rc = sqlite3_open_v2(path_.c_str(), &db_,
                           SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX,
                           options_.vfs);
  if (rc != SQLITE_OK) return Error(rc, "open");
  sqlite3_extended_result_codes(db_, 1);
  // Exclusive: the lock file already keeps others out, and the WAL index then needs no shared
  // memory file.
  MUSTER_RETURN_IF_ERROR(Exec("PRAGMA locking_mode=EXCLUSIVE"));
  MUSTER_RETURN_IF_ERROR(Exec("PRAGMA journal_mode=WAL"));
  MUSTER_RETURN_IF_ERROR(Exec("PRAGMA synchronous=FULL"));
  MUSTER_RETURN_IF_ERROR(Exec("PRAGMA wal_autocheckpoint=4000"));
  MUSTER_RETURN_IF_ERROR(Exec("PRAGMA cache_size=-8000"));
  // Starts a new log with new salts, so that CheckWal never meets leftovers of a torn transaction.
  MUSTER_RETURN_IF_ERROR(Exec("PRAGMA wal_checkpoint(TRUNCATE)"));
  return absl::OkStatus();
}

absl::Status SqliteJournal::MakeTables() {
  return Exec(
      "CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);"
      "CREATE TABLE IF NOT EXISTS batches(first_seq INTEGER PRIMARY KEY, last_seq "
      "INTEGER NOT NULL, data BLOB NOT NULL);"
      "CREATE TABLE IF NOT EXISTS snapshots(seq INTEGER PRIMARY KEY, revision "
      "INTEGER NOT NULL, crc INTEGER NOT NULL, "
      "state BLOB NOT NULL);"
      "CREATE TABLE IF NOT EXISTS snapshot_files(seq INTEGER PRIMARY KEY, revision "
      "INTEGER NOT NULL, parts INTEGER NOT NULL, bytes INTEGER NOT NULL);");
}

absl::StatusOr<std::unique_ptr<SqliteJournal>> SqliteJournal::Open(const Options& options) {
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<DataDirLock> lock, DataDirLock::Take(options.directory));
  std::unique_ptr<SqliteJournal> journal(new SqliteJournal(options, std::move(lock)));
  MUSTER_FAILPOINT_STATUS("journal.open");
  MUSTER_RETURN_IF_ERROR(journal->OpenFile());
  MUSTER_RETURN_IF_ERROR(journal->Exec("BEGIN IMMEDIATE"));
  MUSTER_RETURN_IF_ERROR(journal->MakeTables());
  MUSTER_RETURN_IF_ERROR(journal->Exec(  // Rows of schema 1 are large, and no caller waits here.
      "DELETE FROM snapshots WHERE (SELECT COUNT(*) FROM snapshot_files) >= 2 AND "
      "seq < (SELECT MIN(seq) FROM snapshot_files);"
      "INSERT OR IGNORE INTO meta VALUES('schema', '1');"
      "INSERT OR IGNORE INTO meta VALUES('term', '0');"
      "UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE name = 'term';"));
  {
    MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw,
                            journal->Prepare("INSERT OR IGNORE INTO meta VALUES('cluster_id', ?)"));
    const Statement insert(raw);
    const std::string id = absl::StrCat(RandomHex(), RandomHex());
    sqlite3_bind_text(insert.get(), 1, id.data(), static_cast<int>(id.size()), SQLITE_STATIC);
    if (const int rc = sqlite3_step(insert.get()); rc != SQLITE_DONE)
      return journal->Error(rc, "write cluster_id");
  }
  MUSTER_RETURN_IF_ERROR(journal->CheckSchema());
  MUSTER_RETURN_IF_ERROR(journal->ReadMeta());
  MUSTER_FAILPOINT_STATUS("journal.term_bump");
  MUSTER_RETURN_IF_ERROR(journal->Exec("COMMIT"));
  MUSTER_FAILPOINT_STATUS("journal.term_durable");
  {
    MUSTER_ASSIGN_OR_RETURN(const std::vector<Snapshot> snapshots, journal->ListSnapshots());
    journal->RemoveLeftFiles(snapshots);
  }
  MUSTER_RETURN_IF_ERROR(SyncDirectory(options.directory));
  MUSTER_FAILPOINT_STATUS("journal.opened");
  return journal;
}

absl::Status SqliteJournal::ReadMeta() {
  MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw, Prepare("SELECT name, value FROM meta"));
  const Statement select(raw);
  int rc;
  while ((rc = sqlite3_step(select.get())) == SQLITE_ROW) {
    const std::string name(reinterpret_cast<const char*>(sqlite3_column_text(select.get(), 0)));
    const std::string value(reinterpret_cast<const char*>(sqlite3_column_text(select.get(), 1)));
    if (name == "cluster_id") cluster_id_ = value;
    const auto number = [&](uint64_t* to) {
      if (absl::SimpleAtoi(value, to)) return absl::OkStatus();
      return absl::DataLossError(
          absl::StrCat("journal '", path_, "': ", name, " '", value, "' is not a number"));
    };
    if (name == "term") MUSTER_RETURN_IF_ERROR(number(&term_));
    if (name == "restored") MUSTER_RETURN_IF_ERROR(number(&restored_));
    if (name == "restore_id") MUSTER_RETURN_IF_ERROR(number(&restore_id_));
  }
  return rc == SQLITE_DONE ? absl::OkStatus() : Error(rc, "read meta");
}

std::string SqliteJournal::SnapshotPath(uint64_t seq) const {
  return absl::StrFormat("%s/%s%020d", options_.directory, kSnapshotPrefix, seq);
}

absl::StatusOr<std::vector<SqliteJournal::Snapshot>> SqliteJournal::ListSnapshots() {
  std::vector<Snapshot> snapshots;
  MUSTER_ASSIGN_OR_RETURN(
      sqlite3_stmt * raw,
      // Snapshots of schema 1 come first; it has no files.
      Prepare(schema_ == 1 ? "SELECT seq, revision, 0, 0, 1 FROM snapshots ORDER BY seq DESC"
                           : "SELECT seq, revision, 0, 0, 1 FROM snapshots UNION ALL "
                             "SELECT seq, revision, parts, bytes, 0 FROM snapshot_files "
                             "ORDER BY 1 DESC"));
  const Statement select(raw);
  const auto number = [&](int column) {
    return static_cast<uint64_t>(sqlite3_column_int64(select.get(), column));
  };
  int rc;
  while ((rc = sqlite3_step(select.get())) == SQLITE_ROW) {
    snapshots.push_back({.seq = number(0),
                         .revision = number(1),
                         .in_row = number(4) != 0,
                         .parts = number(2),
                         .bytes = number(3)});
  }
  if (rc != SQLITE_DONE) return Error(rc, "list snapshots");
  return snapshots;
}

// Removes what a crash left of snapshots that never became current, or that were replaced.
void SqliteJournal::RemoveLeftFiles(const std::vector<Snapshot>& snapshots) const {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(options_.directory);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, kSnapshotPrefix)) continue;
    const std::string path = JoinPath(options_.directory, name);
    const bool current =
        std::any_of(snapshots.begin(), snapshots.end(), [&](const Snapshot& snapshot) {
          return !snapshot.in_row && SnapshotPath(snapshot.seq) == path;
        });
    if (!current && unlink(path.c_str()) != 0)
      MUSTER_LOG(Warning) << "journal: cannot remove '" << path << "': " << std::strerror(errno);
  }
}

absl::Status SqliteJournal::ReadSnapshotRow(const Snapshot& snapshot, Part part) {
  MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw,
                          Prepare("SELECT crc, state FROM snapshots WHERE seq = ?"));
  const Statement select(raw);
  sqlite3_bind_int64(select.get(), 1, static_cast<sqlite3_int64>(snapshot.seq));
  if (const int rc = sqlite3_step(select.get()); rc != SQLITE_ROW)
    return Error(rc, "read snapshot");
  const absl::string_view state = Blob(select.get(), 1);
  if (Crc32c(state) != static_cast<uint32_t>(sqlite3_column_int64(select.get(), 0))) {
    return absl::DataLossError(absl::StrCat("journal '", path_, "': the snapshot after record ",
                                            snapshot.seq, " has a wrong checksum"));
  }
  return part(state);
}

absl::Status SqliteJournal::DecodeRow(uint64_t first_seq, uint64_t last_seq, absl::string_view data,
                                      uint64_t last, uint64_t* next, Record record) const {
  uint64_t seq = first_seq;
  size_t offset = 0;
  const auto corrupt = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat("journal '", path_, "' is corrupt at record ", seq,
                                            " (row ", first_seq, ", offset ", offset, "): ", what,
                                            "; restore the directory from a copy, or start with an "
                                            "empty one"));
  };
  while (offset < data.size()) {
    if (seq > last) return absl::OkStatus();
    const absl::StatusOr<DecodedRecord> decoded = DecodeRecord(data.substr(offset), seq);
    if (!decoded.ok()) return corrupt(decoded.status().message());
    if (seq >= *next) {
      if (seq != *next)
        return corrupt(absl::StrCat("records ", *next, " to ", seq - 1, " are missing"));
      MUSTER_RETURN_IF_ERROR(record(decoded->revision, decoded->payload));
      ++*next;
    }
    offset += decoded->bytes;
    ++seq;
  }
  return seq == last_seq + 1 ? absl::OkStatus() : corrupt("its row is short");
}

absl::Status SqliteJournal::ReplayRecords(uint64_t after_seq, Record record) {
  MUSTER_ASSIGN_OR_RETURN(
      sqlite3_stmt * raw,
      Prepare(
          "SELECT first_seq, last_seq, data FROM batches WHERE last_seq > ? ORDER BY first_seq"));
  const Statement select(raw);
  sqlite3_bind_int64(select.get(), 1, static_cast<sqlite3_int64>(after_seq));
  uint64_t next = after_seq + 1;
  uint64_t bytes = 0;
  int rc;
  while ((rc = sqlite3_step(select.get())) == SQLITE_ROW) {
    MUSTER_RETURN_IF_ERROR(
        DecodeRow(static_cast<uint64_t>(sqlite3_column_int64(select.get(), 0)),
                  static_cast<uint64_t>(sqlite3_column_int64(select.get(), 1)),
                  Blob(select.get(), 2), std::numeric_limits<uint64_t>::max(), &next,
                  [&](uint64_t revision, absl::string_view payload) -> absl::Status {
                    MUSTER_RETURN_IF_ERROR(record(revision, payload));
                    durable_revision_ = revision;
                    bytes += payload.size();
                    MUSTER_FAILPOINT_STATUS("journal.replay_record");
                    return absl::OkStatus();
                  }));
  }
  if (rc != SQLITE_DONE) return Error(rc, "read records");
  records_since_snapshot_ = next - 1 - after_seq;
  bytes_since_snapshot_ = bytes;
  durable_seq_ = next - 1;
  MutexLock lock(&mu_);
  next_seq_ = next;
  return absl::OkStatus();
}

absl::Status SqliteJournal::ReadWhole(const Snapshot& snapshot, Part part) {
  if (snapshot.in_row) {
    std::string state;
    MUSTER_RETURN_IF_ERROR(BetweenCommits([&] {
      return ReadSnapshotRow(snapshot, [&](absl::string_view bytes) {
        state = std::string(bytes);
        return absl::OkStatus();
      });
    }));
    return part(state);
  }
  const std::string path = SnapshotPath(snapshot.seq);
  MUSTER_RETURN_IF_ERROR(
      ReadSnapshotFile(path, snapshot.revision, snapshot.parts, snapshot.bytes,
                       [&](absl::string_view) { return Pause(absl::ZeroDuration()); }));
  return ReadSnapshotFile(path, snapshot.revision, snapshot.parts, snapshot.bytes, part);
}

absl::Status SqliteJournal::Replay(
    const std::function<absl::Status(uint64_t, absl::string_view)>& snapshot,
    const std::function<absl::Status(uint64_t, absl::string_view)>& record) {
  MUSTER_FAILPOINT_STATUS("journal.replay_start");
  uint64_t after_seq = 0;
  MUSTER_ASSIGN_OR_RETURN(snapshots_, ListSnapshots());
  for (const Snapshot& one : snapshots_) {
    absl::Status refused;  // by `snapshot`
    const auto part = [&](absl::string_view bytes) {
      return refused = snapshot(one.revision, bytes);
    };
    const absl::Status status = one.in_row ? ReadSnapshotRow(one, part) : ReadWhole(one, part);
    MUSTER_RETURN_IF_ERROR(refused);
    if (!status.ok()) {
      if (!IsDamage(status)) return status;
      ++bad_snapshots_;
      MUSTER_LOG(Warning) << status.message() << "; using the one before it";
      continue;
    }
    after_seq = good_seq_ = one.seq;
    durable_revision_ = one.revision;
    snapshot_bytes_ = one.bytes;
    break;
  }
  {
    MutexLock lock(&mu_);
    files_ = snapshots_;
  }
  // If no snapshot is good, the next one deletes no record, so after it alone everything can still
  // be replayed from the start.
  MUSTER_RETURN_IF_ERROR(ReplayRecords(after_seq, record));
  MUSTER_FAILPOINT_STATUS("journal.replay_end");
  return absl::OkStatus();
}

void SqliteJournal::Start(std::function<void(const Progress&)> progress) {
  progress_ = std::move(progress);
  writer_ = std::thread([this] { Run(); });
  snapshot_writer_ = std::thread([this] { RunSnapshots(); });
}

SqliteJournal::Chunk& SqliteJournal::TailLocked() {
  if (queue_.empty() || queue_.back().encoded.size() >= kRowBytes) {
    queue_.emplace_back();
    queue_.back().first_seq = next_seq_;
    queue_.back().last_seq = next_seq_ - 1;
  }
  return queue_.back();
}

void SqliteJournal::Append(uint64_t revision, std::string record) {
  MUSTER_FAILPOINT("journal.before_append");
  ++records_since_snapshot_;
  bytes_since_snapshot_ += record.size();
  bool wake;
  {
    MutexLock lock(&mu_);
    wake = queue_.empty();
    Chunk& tail = TailLocked();
    EncodeRecord(tail.encoded, next_seq_, revision, term_, record);
    tail.last_seq = next_seq_++;
    tail.last_revision = revision;
  }
  if (wake) wake_.Signal();
  MUSTER_FAILPOINT("journal.after_append");
}

void SqliteJournal::WriteSnapshot(uint64_t revision, std::unique_ptr<Replica> replica,
                                  std::function<void(absl::Status)> done) {
  auto task = std::make_unique<Task>();
  task->revision = revision;
  task->records = records_since_snapshot_.exchange(0);
  task->bytes = bytes_since_snapshot_.exchange(0);
  task->replica = std::move(replica);
  task->done = std::move(done);
  {
    MutexLock lock(&mu_);
    MUSTER_CHECK(task_ == nullptr) << "a snapshot begins before the previous one is done";
    task->seq = next_seq_ - 1;
    task_ = std::move(task);
  }
  snapshot_wake_.SignalAll();
}

absl::Status SqliteJournal::Insert(const Chunk& chunk) {
  if (insert_ == nullptr) {
    MUSTER_ASSIGN_OR_RETURN(insert_, Prepare("INSERT INTO batches VALUES(?, ?, ?)"));
  }
  sqlite3_bind_int64(insert_, 1, static_cast<sqlite3_int64>(chunk.first_seq));
  sqlite3_bind_int64(insert_, 2, static_cast<sqlite3_int64>(chunk.last_seq));
  sqlite3_bind_blob64(insert_, 3, chunk.encoded.data(), chunk.encoded.size(), SQLITE_STATIC);
  const int rc = sqlite3_step(insert_);
  const absl::Status status = rc == SQLITE_DONE ? absl::OkStatus() : Error(rc, "append");
  sqlite3_reset(insert_);
  sqlite3_clear_bindings(insert_);
  return status;
}

absl::Status SqliteJournal::Commit(const std::deque<Chunk>& chunks) {
  const auto write = [&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(Exec("BEGIN IMMEDIATE"));
    MUSTER_FAILPOINT_STATUS("journal.commit_begin");
    for (const Chunk& chunk : chunks) {
      if (!chunk.encoded.empty()) MUSTER_RETURN_IF_ERROR(Insert(chunk));
    }
    MUSTER_FAILPOINT_STATUS("journal.before_fsync");
    return Exec("COMMIT");
  };
  const absl::Status status = write();
  // Some errors roll back already; then this fails, which is fine.
  if (!status.ok()) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
  return status;
}

void SqliteJournal::Run() {
  std::deque<Chunk> batch;  // taken from the queue and not yet durable
  absl::Status last_status;
  absl::Status broken;  // not OK: nothing is written any more
  while (true) {
    const absl::FunctionRef<absl::Status()>* step;
    {
      MutexLock lock(&mu_);
      while (batch.empty() && queue_.empty() && step_ == nullptr && !stop_) wake_.Wait(&mu_);
      if (batch.empty() && queue_.empty() && step_ == nullptr) return;
      while (!queue_.empty()) {
        batch.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
      step = std::exchange(step_, nullptr);
    }
    if (!broken.ok()) batch.clear();
    Progress progress;
    if (!batch.empty()) {
      for (const Chunk& chunk : batch) {
        progress.records += chunk.last_seq - chunk.first_seq + 1;
        progress.bytes += chunk.encoded.size();
      }
      const absl::Time start = Clock::Real().Now();
      progress.status = Commit(batch);
      progress.took = Clock::Real().Now() - start;
      MUSTER_FAILPOINT("journal.after_fsync");
      if (progress.status.ok()) {
        durable_revision_ = batch.back().last_revision;
        durable_seq_ = batch.back().last_seq;
        batch.clear();
      }
      progress.durable_revision = durable_revision_;
      if (progress.status.code() != last_status.code()) {
        if (progress.status.ok()) {
          MUSTER_LOG(Info) << "journal '" << path_ << "' can be written again";
        } else {
          MUSTER_LOG(Error) << progress.status.message()
                            << "; nothing is acknowledged until this ends";
        }
        last_status = progress.status;
      }
      progress_(progress);
      MUSTER_FAILPOINT("journal.after_progress");
    }
    // After a failed write or fsync the contents of the disk are unknown: this process must not
    // acknowledge anything any longer. A full disk is tried again.
    if (!progress.status.ok() && progress.status.code() != absl::StatusCode::kResourceExhausted)
      broken = progress.status;
    if (step != nullptr) {
      const absl::Status status = broken.ok() ? (*step)() : broken;
      MutexLock lock(&mu_);
      step_status_ = status;
      step_done_ = true;
      snapshot_wake_.SignalAll();
    }
    if (broken.ok() && !progress.status.ok()) {
      MutexLock lock(&mu_);
      if (stop_) {
        broken = progress.status;
      } else if (step_ == nullptr) {
        wake_.WaitWithTimeout(&mu_, options_.retry_full);
      }
    }
  }
}

absl::Status SqliteJournal::BetweenCommits(absl::FunctionRef<absl::Status()> step) {
  MutexLock lock(&mu_);
  if (stop_) return absl::CancelledError("the journal is stopping");
  step_ = &step;
  step_done_ = false;
  wake_.Signal();
  while (!step_done_) snapshot_wake_.Wait(&mu_);
  return step_status_;
}

absl::Status SqliteJournal::Pause(absl::Duration length) {
  const absl::Time end = Clock::Real().Now() + length;
  MutexLock lock(&mu_);
  while (!stop_) {
    const absl::Duration left = end - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) return absl::OkStatus();
    snapshot_wake_.WaitWithTimeout(&mu_, left);
  }
  return absl::CancelledError("the journal is stopping");
}

void SqliteJournal::RunSnapshots() {
  LowerThreadPriority(kSnapshotNice);
  while (true) {
    std::unique_ptr<Task> task;
    {
      MutexLock lock(&mu_);
      while (task_ == nullptr && !stop_) snapshot_wake_.Wait(&mu_);
      if (task_ == nullptr) return;
      task = std::move(task_);
    }
    const absl::Status status = WriteSnapshotOf(task.get());
    task->replica = nullptr;
    if (!status.ok()) {
      // The records that the snapshot would have replaced are still to be replayed.
      records_since_snapshot_ += task->records;
      bytes_since_snapshot_ += task->bytes;
    }
    task->done(status);
  }
}

absl::Status SqliteJournal::WriteSnapshotOf(Task* task) {
  MUSTER_FAILPOINT_STATUS("journal.snapshot_begin");
  MUSTER_RETURN_IF_ERROR(BetweenCommits([&] {
    return durable_seq_ >= task->seq
               ? absl::OkStatus()
               : absl::ResourceExhaustedError(absl::StrCat(
                     "journal '", path_, "': the records before the snapshot cannot be written"));
  }));
  MUSTER_ASSIGN_OR_RETURN(const bool is_new, BuildState(task));
  if (!is_new) return absl::OkStatus();
  MUSTER_FAILPOINT_STATUS("journal.snapshot_built");
  Snapshot snapshot{.seq = task->seq, .revision = task->revision};
  const std::string path = SnapshotPath(snapshot.seq);
  {
    MUSTER_ASSIGN_OR_RETURN(SnapshotWriter file,
                            SnapshotWriter::Create(path, snapshot.revision, term_));
    uint64_t synced = 0;
    absl::Time start = Clock::Real().Now();
    MUSTER_RETURN_IF_ERROR(task->replica->Write([&](absl::string_view part) -> absl::Status {
      MUSTER_RETURN_IF_ERROR(Pause(absl::ZeroDuration()));
      MUSTER_RETURN_IF_ERROR(file.Append(part));
      MUSTER_FAILPOINT_STATUS("journal.snapshot_part");
      if (file.bytes() < synced + kSyncBytes) return absl::OkStatus();
      MUSTER_RETURN_IF_ERROR(file.Sync());
      synced = file.bytes();
      MUSTER_RETURN_IF_ERROR(Pause(Clock::Real().Now() - start));
      start = Clock::Real().Now();
      return absl::OkStatus();
    }));
    // The memory of the replica is no longer needed.
    task->replica = nullptr;
    MUSTER_FAILPOINT_STATUS("journal.snapshot_written");
    MUSTER_RETURN_IF_ERROR(file.Commit());
    snapshot.parts = file.parts();
    snapshot.bytes = file.bytes();
  }
  MUSTER_FAILPOINT_STATUS("journal.snapshot_named");
  if (const absl::Status status = BetweenCommits([&] { return Publish(snapshot); }); !status.ok()) {
    // After other errors the snapshot may be current, so its file stays.
    if (absl::IsResourceExhausted(status)) unlink(path.c_str());
    return status;
  }
  MUSTER_FAILPOINT("journal.snapshot_durable");
  snapshot_bytes_ = snapshot.bytes;
  std::vector<Snapshot> kept = {snapshot};
  for (const Snapshot& one : snapshots_) {
    if (one.seq == snapshot.seq) continue;
    if (one.seq == good_seq_ || one.in_row) {
      kept.push_back(one);
    } else if (unlink(SnapshotPath(one.seq).c_str()) != 0 && errno != ENOENT) {
      MUSTER_LOG(Warning) << "journal: cannot remove '" << SnapshotPath(one.seq)
                          << "': " << std::strerror(errno);
    }
  }
  snapshots_ = std::move(kept);
  {
    MutexLock lock(&mu_);
    files_ = snapshots_;
  }
  if (const absl::Status status = DeleteOldRecords(); !status.ok() && !absl::IsCancelled(status)) {
    MUSTER_LOG(Warning) << "old records stay until the next snapshot: " << status.message();
  }
  good_seq_ = snapshot.seq;
  return absl::OkStatus();
}

absl::StatusOr<bool> SqliteJournal::BuildState(Task* task) {
  if (!task->replica->NeedsHistory()) return true;
  good_seq_ = 0;
  for (const Snapshot& one : snapshots_) {
    absl::Status refused;  // by the replica, or it is time to stop
    const absl::Status status = ReadWhole(one, [&](absl::string_view part) {
      refused = Pause(absl::ZeroDuration());
      if (refused.ok()) refused = task->replica->Restore(part);
      return refused;
    });
    MUSTER_RETURN_IF_ERROR(refused);
    if (!status.ok()) {
      if (!IsDamage(status)) return status;
      MUSTER_LOG(Warning) << status.message() << "; using the one before it";
      continue;
    }
    good_seq_ = one.seq;
    break;
  }
  // A new snapshot of the same state would only take the place of a good one.
  if (good_seq_ == task->seq && good_seq_ != 0) return false;
  MUSTER_RETURN_IF_ERROR(ReplayForSnapshot(good_seq_, task->seq, task->replica.get()));
  return true;
}

absl::Status SqliteJournal::ReplayForSnapshot(uint64_t after_seq, uint64_t to_seq,
                                              Replica* replica) {
  uint64_t next = after_seq + 1;
  while (next <= to_seq) {
    const uint64_t from = next;
    std::vector<Row> rows;
    MUSTER_RETURN_IF_ERROR(BetweenCommits([&] { return ReadRows(from, &rows); }));
    for (const Row& row : rows) {
      MUSTER_RETURN_IF_ERROR(
          DecodeRow(row.first_seq, row.last_seq, row.data, to_seq, &next,
                    [&](uint64_t, absl::string_view record) { return replica->Replay(record); }));
    }
    if (next == from) {
      return absl::DataLossError(absl::StrCat("journal '", path_, "' is corrupt: records ", next,
                                              " to ", to_seq, " are missing"));
    }
  }
  return absl::OkStatus();
}

absl::Status SqliteJournal::ReadRows(uint64_t from_seq, std::vector<Row>* rows) {
  MUSTER_ASSIGN_OR_RETURN(
      sqlite3_stmt * raw,
      Prepare("SELECT first_seq, last_seq, data FROM batches WHERE first_seq >= (SELECT "
              "COALESCE(MAX(first_seq), 0) FROM batches WHERE first_seq <= ?) ORDER BY first_seq"));
  const Statement select(raw);
  sqlite3_bind_int64(select.get(), 1, static_cast<sqlite3_int64>(from_seq));
  size_t bytes = 0;
  while (bytes < kStepBytes && rows->size() < kStepRows) {
    const int rc = sqlite3_step(select.get());
    if (rc == SQLITE_DONE) break;
    if (rc != SQLITE_ROW) return Error(rc, "read records");
    rows->push_back({.first_seq = static_cast<uint64_t>(sqlite3_column_int64(select.get(), 0)),
                     .last_seq = static_cast<uint64_t>(sqlite3_column_int64(select.get(), 1)),
                     .data = std::string(Blob(select.get(), 2))});
    bytes += rows->back().data.size();
  }
  return absl::OkStatus();
}

absl::Status SqliteJournal::Publish(const Snapshot& snapshot) {
  const auto write = [&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(Exec("BEGIN IMMEDIATE"));
    // The one kept in addition to the new one is the last known good one: a damaged one would be
    // useless when it is needed.
    MUSTER_RETURN_IF_ERROR(
        Exec(absl::StrCat("DELETE FROM snapshot_files WHERE seq <> ", good_seq_,
                          "; INSERT OR REPLACE INTO snapshot_files VALUES(", snapshot.seq, ", ",
                          snapshot.revision, ", ", snapshot.parts, ", ", snapshot.bytes,
                          "); UPDATE meta SET value = '2' WHERE name = 'schema'")
                 .c_str()));
    MUSTER_FAILPOINT_STATUS("journal.snapshot_publish");
    return Exec("COMMIT");
  };
  const absl::Status status = write();
  if (!status.ok()) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
  if (status.ok()) schema_ = 2;
  return status;
}

absl::Status SqliteJournal::DeleteOldRecords() {
  // Deletes what is before the older of the two snapshots; if there is none, nothing: see Replay.
  bool more = good_seq_ > 0;
  while (more) {
    const absl::Time start = Clock::Real().Now();
    MUSTER_RETURN_IF_ERROR(BetweenCommits([&]() -> absl::Status {
      MUSTER_ASSIGN_OR_RETURN(more, DeleteSomeRecords(good_seq_));
      return absl::OkStatus();
    }));
    MUSTER_FAILPOINT("journal.snapshot_truncated");
    // Leaves the disk to the commits for as long again.
    if (more) MUSTER_RETURN_IF_ERROR(Pause(Clock::Real().Now() - start));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> SqliteJournal::DeleteSomeRecords(uint64_t up_to_seq) {
  uint64_t last = 0;  // of the records to delete
  bool more = false;
  {
    MUSTER_ASSIGN_OR_RETURN(
        sqlite3_stmt * raw,
        Prepare("SELECT last_seq, length(data) FROM batches ORDER BY first_seq"));
    const Statement select(raw);
    uint64_t bytes = 0;
    for (int rows = 0;; ++rows) {
      const int rc = sqlite3_step(select.get());
      if (rc == SQLITE_DONE) break;
      if (rc != SQLITE_ROW) return Error(rc, "look for old records");
      const auto last_of_row = static_cast<uint64_t>(sqlite3_column_int64(select.get(), 0));
      if (last_of_row > up_to_seq) break;
      if (rows == kStepRows || bytes >= kStepBytes) {
        more = true;
        break;
      }
      last = last_of_row;
      bytes += static_cast<uint64_t>(sqlite3_column_int64(select.get(), 1));
    }
  }
  if (last == 0) return false;
  MUSTER_RETURN_IF_ERROR(
      Exec(absl::StrCat("DELETE FROM batches WHERE first_seq <= ", last).c_str()));
  return more;
}

void SqliteJournal::Stop() {
  MUSTER_FAILPOINT("journal.stop");
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  wake_.SignalAll();
  snapshot_wake_.SignalAll();
  if (snapshot_writer_.joinable()) snapshot_writer_.join();
  if (writer_.joinable()) writer_.join();
}

absl::Status SqliteJournal::CheckSchema() {
  MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw,
                          Prepare("SELECT value FROM meta WHERE name = 'schema'"));
  const Statement select(raw);
  const int rc = sqlite3_step(select.get());
  if (rc != SQLITE_ROW && rc != SQLITE_DONE) return Error(rc, "read meta");
  const std::string schema(rc == SQLITE_ROW ? Blob(select.get(), 0) : "(none)");
  if (absl::SimpleAtoi(schema, &schema_) && (schema_ == 1 || schema_ == 2)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("journal '", path_, "' has schema ", schema,
                   ", this program knows 1 and 2: use the program that wrote it"));
}

absl::StatusOr<std::string> SqliteJournal::MarkRestored(const std::string& directory) {
  MUSTER_RETURN_IF_ERROR(CheckThere(directory));
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<DataDirLock> lock, DataDirLock::Take(directory));
  SqliteJournal journal({.directory = directory}, std::move(lock));
  MUSTER_RETURN_IF_ERROR(journal.OpenFile());
  MUSTER_RETURN_IF_ERROR(journal.CheckSchema());
  MUSTER_RETURN_IF_ERROR(journal.ReadMeta());
  const uint64_t copied = journal.term_;
  journal.restored_ = copied + kLostTerms;
  MUSTER_RETURN_IF_ERROR(journal.Exec(
      absl::StrCat("BEGIN IMMEDIATE; UPDATE meta SET value = '", journal.restored_,
                   "' WHERE name = 'term'; INSERT OR REPLACE INTO meta VALUES('restored', '",
                   journal.restored_, "'), ('restore_id', '", NewRestoreId(), "'); COMMIT")
          .c_str()));
  return absl::StrCat(journal.path_, ": marked as restored from a copy made in term ", copied,
                      "; the next start begins term ", journal.restored_ + 1,
                      " and ends every generation that the copy holds");
}

absl::StatusOr<Journal::BackupPart> SqliteJournal::ReadBackup(uint64_t revision, uint64_t offset,
                                                              size_t most) const {
  Snapshot snapshot{.seq = std::numeric_limits<uint64_t>::max()};
  {
    MutexLock lock(&mu_);
    for (const Snapshot& one : files_) {
      if (one.revision == revision && !one.in_row) snapshot = one;
    }
  }
  const std::string path = SnapshotPath(snapshot.seq);
  const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.open() && errno == ENOENT) {
    return absl::NotFoundError(absl::StrCat("there is no snapshot of revision ", revision,
                                            " (any more): begin the backup again"));
  }
  struct stat info;
  if (!file.open() || fstat(file.get(), &info) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open '", path, "'"));
  const std::string header = EncodeBackupHeader({.cluster_id = cluster_id_,
                                                 .term = term_,
                                                 .revision = revision,
                                                 .seq = snapshot.seq,
                                                 .parts = snapshot.parts,
                                                 .bytes = snapshot.bytes,
                                                 .made = info.st_mtim.tv_sec});
  BackupPart part = {.bytes = header.size() + snapshot.bytes};
  if (offset < header.size()) {
    part.data = header.substr(offset, most);
    return part;
  }
  if (offset >= part.bytes) return part;
  part.data.resize(std::min<uint64_t>(most, part.bytes - offset));
  for (size_t at = 0; at < part.data.size();) {
    const ssize_t got = pread(file.get(), part.data.data() + at, part.data.size() - at,
                              static_cast<off_t>(offset - header.size() + at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read '", path, "'"));
    if (got == 0) return absl::DataLossError(absl::StrCat("snapshot '", path, "' is truncated"));
    at += static_cast<size_t>(got);
  }
  return part;
}

absl::StatusOr<SqliteJournal::Former> SqliteJournal::ReadFormer(const std::string& directory) {
  Former former;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  for (const std::string& name : names) {
    uint64_t seq = 0;
    if (absl::StartsWith(name, kSnapshotPrefix) &&
        absl::SimpleAtoi(name.substr(strlen(kSnapshotPrefix)), &seq)) {
      former.next_seq = std::max(former.next_seq, seq + 1);
      former.files.push_back(name);
    }
  }
  if (!CheckThere(directory).ok()) return former;
  former.there = true;
  const auto read = [&]() -> absl::Status {
    SqliteJournal journal({.directory = directory}, nullptr);
    MUSTER_RETURN_IF_ERROR(journal.OpenFile());
    MUSTER_RETURN_IF_ERROR(journal.CheckSchema());
    MUSTER_RETURN_IF_ERROR(journal.ReadMeta());
    former.cluster_id = journal.cluster_id_;
    former.term = journal.term_;
    return absl::OkStatus();
  };
  former.readable = read();
  if (!former.readable.ok() && !absl::IsDataLoss(former.readable)) return former.readable;
  // The log is behind the file only if it could not be read.
  for (const char* name : {"journal.db", "journal.db-wal"}) {
    if (PathExists(JoinPath(directory, name))) former.files.emplace_back(name);
  }
  return former;
}

absl::StatusOr<std::string> SqliteJournal::KeepFormer(const std::string& directory,
                                                      const Former& former, absl::Time now) {
  const std::string folder = JoinPath(
      directory, former.readable.ok() ? absl::StrCat("lost-", former.term)
                                      : absl::StrCat("lost-damaged-", absl::ToUnixSeconds(now)));
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make '", folder, "'"));
  for (const std::string& name : former.files) {
    const std::string from = JoinPath(directory, name), to = JoinPath(folder, name);
    if (link(from.c_str(), to.c_str()) != 0 && errno != EEXIST)
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot keep '", from, "' as '", to, "'"));
  }
  MUSTER_RETURN_IF_ERROR(SyncDirectory(folder));
  MUSTER_RETURN_IF_ERROR(SyncDirectory(directory));
  return folder;
}

absl::Status SqliteJournal::MakeRestored(const std::string& directory,
                                         const std::string& cluster_id, uint64_t term,
                                         const Snapshot& snapshot) {
  MUSTER_RETURN_IF_ERROR(RemoveTree(directory));
  if (mkdir(directory.c_str(), 0700) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make '", directory, "'"));
  SqliteJournal journal({.directory = directory}, nullptr);
  MUSTER_RETURN_IF_ERROR(journal.OpenFile());
  MUSTER_RETURN_IF_ERROR(journal.MakeTables());
  MUSTER_RETURN_IF_ERROR(journal.Exec(
      absl::StrCat("BEGIN IMMEDIATE; INSERT INTO meta VALUES('schema', '2'), ('cluster_id', '",
                   cluster_id, "'), ('term', '", term, "'), ('restored', '", term,
                   "'), ('restore_id', '", NewRestoreId(), "'); INSERT INTO snapshot_files VALUES(",
                   snapshot.seq, ", ", snapshot.revision, ", ", snapshot.parts, ", ",
                   snapshot.bytes, "); COMMIT")
          .c_str()));
  // The file alone then has everything.
  return journal.Exec("PRAGMA journal_mode=DELETE");
}

absl::StatusOr<std::string> SqliteJournal::Restore(const std::string& backup,
                                                   const std::string& directory, const Check& state,
                                                   absl::Time now) {
  MUSTER_ASSIGN_OR_RETURN(const BackupFile file, OpenBackup(backup));
  const BackupHeader& header = file.header;
  MUSTER_RETURN_IF_ERROR(ReadBackupState(
      backup, file, [&](absl::string_view part) { return state(header.revision, part); }));
  MUSTER_ASSIGN_OR_RETURN(const std::unique_ptr<DataDirLock> lock, DataDirLock::Take(directory));
  MUSTER_ASSIGN_OR_RETURN(const Former former, ReadFormer(directory));
  if (!former.cluster_id.empty() && former.cluster_id != header.cluster_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", directory, "' has the journal of another cluster (", former.cluster_id,
        "), and the backup is of ", header.cluster_id, ": restore it into another directory"));
  }
  const int64_t minutes = std::clamp<int64_t>((absl::ToUnixSeconds(now) - header.made) / 60, 0,
                                              static_cast<int64_t>(8 * kLostTerms));
  const uint64_t term =
      std::max(header.term, former.term) + kLostTerms + static_cast<uint64_t>(minutes);
  const Snapshot snapshot{.seq = std::max(header.seq, former.next_seq),
                          .revision = header.revision,
                          .parts = header.parts,
                          .bytes = header.bytes};
  const std::string path = absl::StrFormat("%s/%s%020d", directory, kSnapshotPrefix, snapshot.seq);
  {
    const OwnedFd from(open(backup.c_str(), O_RDONLY | O_CLOEXEC));
    if (!from.open()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open '", backup, "'"));
    MUSTER_ASSIGN_OR_RETURN(AtomicFile to, AtomicFile::Create(path, 0600));
    std::string bytes(kStepBytes, '\0');
    for (uint64_t at = 0; at < header.bytes;) {
      const ssize_t got =
          pread(from.get(), bytes.data(), bytes.size(), static_cast<off_t>(file.snapshot_at + at));
      if (got <= 0) {
        return absl::ErrnoToStatus(got < 0 ? errno : EIO,
                                   absl::StrCat("cannot read '", backup, "'"));
      }
      MUSTER_RETURN_IF_ERROR(to.Append(absl::string_view(bytes.data(), static_cast<size_t>(got))));
      at += static_cast<uint64_t>(got);
    }
    MUSTER_RETURN_IF_ERROR(to.Commit());
  }
  const std::string made = JoinPath(directory, "restoring");
  MUSTER_RETURN_IF_ERROR(MakeRestored(made, header.cluster_id, term, snapshot));
  std::string kept;
  if (former.there) {
    MUSTER_ASSIGN_OR_RETURN(kept, KeepFormer(directory, former, now));
    // The unreadable part of the old log would be mistaken for that of the new file.
    const std::string log = directory + "/journal.db-wal";
    if (unlink(log.c_str()) != 0 && errno != ENOENT)
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove '", log, "'"));
  }
  const std::string current = directory + "/journal.db";
  if (rename((made + "/journal.db").c_str(), current.c_str()) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot replace '", current, "'"));
  MUSTER_RETURN_IF_ERROR(SyncDirectory(directory));
  MUSTER_RETURN_IF_ERROR(RemoveTree(made));
  return absl::StrCat(directory, ": restored revision ", header.revision,
                      " from a backup made in term ", header.term, "; the next start begins term ",
                      term + 1, " and ends every generation that the backup holds",
                      kept.empty() ? "" : absl::StrCat("; the journal that was there is in ", kept),
                      former.readable.ok()
                          ? ""
                          : absl::StrCat(" and could not be read: ", former.readable.message()));
}

absl::StatusOr<std::string> SqliteJournal::VerifyBackup(const std::string& backup,
                                                        const Check& state) {
  MUSTER_ASSIGN_OR_RETURN(const BackupFile file, OpenBackup(backup));
  MUSTER_RETURN_IF_ERROR(ReadBackupState(
      backup, file, [&](absl::string_view part) { return state(file.header.revision, part); }));
  return absl::StrCat(
      backup, ": ok; backup of cluster ", file.header.cluster_id, ", made in term ",
      file.header.term, " at ",
      absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromUnixSeconds(file.header.made),
                       absl::UTCTimeZone()),
      "; revision ", file.header.revision, " (", file.header.bytes, " bytes)");
}

absl::StatusOr<std::string> SqliteJournal::Verify(const std::string& directory,
                                                  const Check& snapshot, const Check& record) {
  const std::string path = directory + "/journal.db";
  MUSTER_RETURN_IF_ERROR(CheckThere(directory));
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<DataDirLock> lock, DataDirLock::Take(directory));
  MUSTER_ASSIGN_OR_RETURN(const WalReport wal, CheckWal(path + "-wal"));
  SqliteJournal journal({.directory = directory}, std::move(lock));
  MUSTER_RETURN_IF_ERROR(journal.OpenFile());
  {
    MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw, journal.Prepare("PRAGMA integrity_check(1)"));
    const Statement check(raw);
    const int rc = sqlite3_step(check.get());
    if (rc != SQLITE_ROW) return journal.Error(rc, "integrity check");
    const std::string text(reinterpret_cast<const char*>(sqlite3_column_text(check.get(), 0)));
    if (text != "ok")
      return absl::DataLossError(absl::StrCat("journal '", path, "' is corrupt: ", text));
  }
  MUSTER_RETURN_IF_ERROR(journal.CheckSchema());
  uint64_t snapshot_revision = 0, snapshot_bytes = 0, records = 0, bytes = 0;
  MUSTER_RETURN_IF_ERROR(journal.Replay(
      [&](uint64_t revision, absl::string_view state) {
        snapshot_revision = revision;
        snapshot_bytes += state.size();
        return snapshot(revision, state);
      },
      [&](uint64_t revision, absl::string_view payload) {
        ++records;
        bytes += payload.size();
        return record(revision, payload);
      }));
  return absl::StrCat(
      path, ": ok; snapshot of revision ", snapshot_revision, " (", snapshot_bytes, " bytes), ",
      records, " records after it (", bytes, " bytes), last revision ", journal.durable_revision_,
      wal.torn_tail_bytes > 0
          ? absl::StrCat("; cut an unfinished transaction of ", wal.torn_tail_bytes, " bytes")
          : "",
      journal.bad_snapshots_ > 0
          ? absl::StrCat("; passed over ", journal.bad_snapshots_, " damaged snapshots")
          : "");
}

}  // namespace muster::coordinator
