#include "coordinator/journal/sqlite_journal.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "coordinator/journal/wal_check.h"

namespace muster::coordinator {
namespace {

constexpr size_t kRecordHeaderBytes = 4 + 4 + 8 + 8 + 8;
// One row is at most about this long, so that replay needs little memory; a commit may have many
// rows.
constexpr size_t kRowBytes = 4 << 20;

template <typename T>
void PutLittle(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

template <typename T>
T GetLittle(const char* p) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value |= static_cast<T>(static_cast<unsigned char>(p[i])) << (8 * i);
  return value;
}

void EncodeRecord(std::string& out, uint64_t seq, uint64_t revision, uint64_t term,
                  absl::string_view payload) {
  PutLittle<uint32_t>(out, static_cast<uint32_t>(payload.size()));
  const size_t crc_at = out.size();
  PutLittle<uint32_t>(out, 0);
  PutLittle<uint64_t>(out, seq);
  PutLittle<uint64_t>(out, revision);
  PutLittle<uint64_t>(out, term);
  out.append(payload.data(), payload.size());
  const uint32_t crc = Crc32c(absl::string_view(out).substr(crc_at + 4));
  for (size_t i = 0; i < 4; ++i) out[crc_at + i] = static_cast<char>(crc >> (8 * i));
}

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

std::string NewId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x%08x%08x", random(), random(), random(), random());
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
    MUSTER_LOG(Warning) << "journal '" << path << "' can be read by others, and its mode cannot be "
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
  const std::string text = absl::StrCat("journal '", path_, "': ", what, ": ",
                                        db_ == nullptr ? sqlite3_errstr(rc) : sqlite3_errmsg(db_));
  switch (rc & 0xFF) {
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(text);
    case SQLITE_IOERR:
      // A quota is a full disk, which SQLite does not know. Only if a write said so: after a failed
      // sync nobody knows what is there.
      if (rc == SQLITE_IOERR_WRITE && LastErrnoOfLog(db_) == EDQUOT)
        return absl::ResourceExhaustedError(absl::StrCat(text, " (", std::strerror(EDQUOT), ")"));
      return absl::UnavailableError(text);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(text);
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

absl::StatusOr<std::unique_ptr<SqliteJournal>> SqliteJournal::Open(const Options& options) {
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<DataDirLock> lock, DataDirLock::Take(options.directory));
  std::unique_ptr<SqliteJournal> journal(new SqliteJournal(options, std::move(lock)));
  MUSTER_FAILPOINT_STATUS("journal.open");
  MUSTER_RETURN_IF_ERROR(journal->OpenFile());
  MUSTER_RETURN_IF_ERROR(journal->Exec("BEGIN IMMEDIATE"));
  MUSTER_RETURN_IF_ERROR(
      journal->Exec("CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);"
                    "CREATE TABLE IF NOT EXISTS batches(first_seq INTEGER PRIMARY KEY, last_seq "
                    "INTEGER NOT NULL, data BLOB NOT NULL);"
                    "CREATE TABLE IF NOT EXISTS snapshots(seq INTEGER PRIMARY KEY, revision "
                    "INTEGER NOT NULL, crc INTEGER NOT NULL, "
                    "state BLOB NOT NULL);"
                    "INSERT OR IGNORE INTO meta VALUES('schema', '1');"
                    "INSERT OR IGNORE INTO meta VALUES('term', '0');"
                    "UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE name = 'term';"));
  {
    MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw,
                            journal->Prepare("INSERT OR IGNORE INTO meta VALUES('cluster_id', ?)"));
    const Statement insert(raw);
    const std::string id = NewId();
    sqlite3_bind_text(insert.get(), 1, id.data(), static_cast<int>(id.size()), SQLITE_STATIC);
    if (const int rc = sqlite3_step(insert.get()); rc != SQLITE_DONE)
      return journal->Error(rc, "write cluster_id");
  }
  MUSTER_RETURN_IF_ERROR(journal->CheckSchema());
  MUSTER_RETURN_IF_ERROR(journal->ReadMeta());
  MUSTER_FAILPOINT_STATUS("journal.term_bump");
  MUSTER_RETURN_IF_ERROR(journal->Exec("COMMIT"));
  MUSTER_FAILPOINT_STATUS("journal.term_durable");
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
          absl::StrCat("journal '", path_, "': ", name, " '", value, "' is no number"));
    };
    if (name == "term") MUSTER_RETURN_IF_ERROR(number(&term_));
    if (name == "restored") MUSTER_RETURN_IF_ERROR(number(&restored_));
  }
  return rc == SQLITE_DONE ? absl::OkStatus() : Error(rc, "read meta");
}

absl::Status SqliteJournal::ReplayRecords(
    uint64_t after_seq, const std::function<absl::Status(uint64_t, absl::string_view)>& record) {
  MUSTER_ASSIGN_OR_RETURN(
      sqlite3_stmt * raw,
      Prepare(
          "SELECT first_seq, last_seq, data FROM batches WHERE last_seq > ? ORDER BY first_seq"));
  const Statement select(raw);
  sqlite3_bind_int64(select.get(), 1, static_cast<sqlite3_int64>(after_seq));
  uint64_t next = after_seq + 1;
  uint64_t records = 0, bytes = 0;
  int rc;
  while ((rc = sqlite3_step(select.get())) == SQLITE_ROW) {
    const uint64_t first = static_cast<uint64_t>(sqlite3_column_int64(select.get(), 0));
    const uint64_t last = static_cast<uint64_t>(sqlite3_column_int64(select.get(), 1));
    const absl::string_view data = Blob(select.get(), 2);
    uint64_t seq = first;
    size_t offset = 0;
    const auto corrupt = [&](absl::string_view what) {
      return absl::DataLossError(absl::StrCat(
          "journal '", path_, "' is corrupt at record ", seq, " (row ", first, ", offset ", offset,
          "): ", what, "; restore the directory from a copy, or start with an empty one"));
    };
    while (offset < data.size()) {
      if (data.size() - offset < kRecordHeaderBytes) return corrupt("its header is cut off");
      const char* p = data.data() + offset;
      const uint32_t length = GetLittle<uint32_t>(p);
      if (data.size() - offset - kRecordHeaderBytes < length) return corrupt("it is cut off");
      const absl::string_view covered(p + 8, kRecordHeaderBytes - 8 + length);
      if (Crc32c(covered) != GetLittle<uint32_t>(p + 4)) return corrupt("its checksum is wrong");
      if (GetLittle<uint64_t>(p + 8) != seq) return corrupt("it has another number");
      if (seq >= next) {
        if (seq != next)
          return corrupt(absl::StrCat("records ", next, " to ", seq - 1, " are missing"));
        const uint64_t revision = GetLittle<uint64_t>(p + 16);
        MUSTER_RETURN_IF_ERROR(record(revision, absl::string_view(p + kRecordHeaderBytes, length)));
        durable_revision_ = revision;
        MUSTER_FAILPOINT_STATUS("journal.replay_record");
        ++next;
        ++records;
        bytes += length;
      }
      offset += kRecordHeaderBytes + length;
      ++seq;
    }
    if (seq != last + 1) return corrupt("its row is short");
  }
  if (rc != SQLITE_DONE) return Error(rc, "read records");
  records_since_snapshot_ = records;
  bytes_since_snapshot_ = bytes;
  MutexLock lock(&mu_);
  next_seq_ = next;
  return absl::OkStatus();
}

absl::Status SqliteJournal::Replay(
    const std::function<absl::Status(uint64_t, absl::string_view)>& snapshot,
    const std::function<absl::Status(uint64_t, absl::string_view)>& record) {
  MUSTER_FAILPOINT_STATUS("journal.replay_start");
  uint64_t after_seq = 0;
  {
    MUSTER_ASSIGN_OR_RETURN(
        sqlite3_stmt * raw,
        Prepare("SELECT seq, revision, crc, state FROM snapshots ORDER BY seq DESC"));
    const Statement select(raw);
    int rc;
    bool found = false;
    while (!found && (rc = sqlite3_step(select.get())) == SQLITE_ROW) {
      const uint64_t seq = static_cast<uint64_t>(sqlite3_column_int64(select.get(), 0));
      const uint64_t revision = static_cast<uint64_t>(sqlite3_column_int64(select.get(), 1));
      const absl::string_view state = Blob(select.get(), 3);
      if (Crc32c(state) != static_cast<uint32_t>(sqlite3_column_int64(select.get(), 2))) {
        ++bad_snapshots_;
        MUSTER_LOG(Warning) << "journal '" << path_ << "': the snapshot after record " << seq
                            << " has a wrong checksum; using the one before it";
        continue;
      }
      MUSTER_RETURN_IF_ERROR(snapshot(revision, state));
      after_seq = good_seq_ = seq;
      durable_revision_ = revision;
      found = true;
    }
    if (!found && rc != SQLITE_DONE) return Error(rc, "read snapshots");
    // Without a good one: the first snapshot deletes no record, so after it alone everything can
    // still be replayed from the start.
  }
  MUSTER_RETURN_IF_ERROR(ReplayRecords(after_seq, record));
  MUSTER_FAILPOINT_STATUS("journal.replay_end");
  return absl::OkStatus();
}

void SqliteJournal::Start(std::function<void(const Progress&)> progress) {
  progress_ = std::move(progress);
  writer_ = std::thread([this] { Run(); });
}

SqliteJournal::Chunk& SqliteJournal::TailLocked() {
  if (queue_.empty() || queue_.back().snapshot != nullptr ||
      queue_.back().encoded.size() >= kRowBytes) {
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

void SqliteJournal::WriteSnapshot(uint64_t revision, std::string state,
                                  std::function<void(absl::Status)> done) {
  const uint64_t records = records_since_snapshot_.exchange(0);
  const uint64_t bytes = bytes_since_snapshot_.exchange(0);
  {
    MutexLock lock(&mu_);
    Chunk& tail = TailLocked();
    tail.snapshot = std::make_unique<Snapshot>(Snapshot{.revision = revision,
                                                        .seq = next_seq_ - 1,
                                                        .records = records,
                                                        .bytes = bytes,
                                                        .state = std::move(state),
                                                        .done = std::move(done)});
  }
  wake_.Signal();
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
  // Some errors roll back by themselves; then this says so, and that is fine.
  if (!status.ok()) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
  return status;
}

absl::Status SqliteJournal::CommitSnapshot(const Snapshot& snapshot) {
  const auto write = [&]() -> absl::Status {
    MUSTER_FAILPOINT_STATUS("journal.snapshot_begin");
    MUSTER_RETURN_IF_ERROR(Exec("BEGIN IMMEDIATE"));
    // The one that is kept beside the new one is the last that is known to be good: a damaged one
    // would be worth nothing when it is needed. Of the same state, the new one replaces that alone.
    if (snapshot.seq != good_seq_) {
      MUSTER_RETURN_IF_ERROR(Exec(absl::StrCat("DELETE FROM batches WHERE last_seq <= ", good_seq_,
                                               "; DELETE FROM snapshots WHERE seq <> ", good_seq_)
                                      .c_str()));
    }
    MUSTER_FAILPOINT_STATUS("journal.snapshot_truncated");
    {
      MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw,
                              Prepare("INSERT OR REPLACE INTO snapshots VALUES(?, ?, ?, ?)"));
      const Statement insert(raw);
      sqlite3_bind_int64(insert.get(), 1, static_cast<sqlite3_int64>(snapshot.seq));
      sqlite3_bind_int64(insert.get(), 2, static_cast<sqlite3_int64>(snapshot.revision));
      sqlite3_bind_int64(insert.get(), 3, Crc32c(snapshot.state));
      sqlite3_bind_blob64(insert.get(), 4, snapshot.state.data(), snapshot.state.size(),
                          SQLITE_STATIC);
      if (const int rc = sqlite3_step(insert.get()); rc != SQLITE_DONE)
        return Error(rc, "write snapshot");
    }
    MUSTER_FAILPOINT_STATUS("journal.snapshot_written");
    return Exec("COMMIT");
  };
  const absl::Status status = write();
  if (status.ok()) {
    good_seq_ = snapshot.seq;
  } else {
    sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
  }
  return status;
}

void SqliteJournal::Run() {
  std::deque<Chunk> batch;  // taken from the queue and not yet durable
  absl::Status last_status;
  while (true) {
    {
      MutexLock lock(&mu_);
      while (batch.empty() && queue_.empty() && !stop_) wake_.Wait(&mu_);
      if (batch.empty() && queue_.empty()) return;
      while (!queue_.empty() && (batch.empty() || batch.back().snapshot == nullptr)) {
        batch.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
    }
    Progress progress;
    uint64_t last_revision = durable_revision_;
    for (const Chunk& chunk : batch) {
      if (chunk.encoded.empty()) continue;
      progress.records += chunk.last_seq - chunk.first_seq + 1;
      progress.bytes += chunk.encoded.size();
      last_revision = chunk.last_revision;
    }
    if (progress.records > 0) {
      const absl::Time start = Clock::Real().Now();
      progress.status = Commit(batch);
      progress.took = Clock::Real().Now() - start;
      MUSTER_FAILPOINT("journal.after_fsync");
      if (progress.status.ok()) durable_revision_ = last_revision;
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
    if (!progress.status.ok()) {
      const bool again = progress.status.code() == absl::StatusCode::kResourceExhausted;
      if (again) {
        MutexLock lock(&mu_);
        if (!stop_) {
          wake_.WaitWithTimeout(&mu_, options_.retry_full);
          continue;
        }
      }
      // After a failed write or fsync nobody knows what is on disk: this process must not
      // acknowledge anything more.
      while (true) {
        for (const Chunk& chunk : batch)
          if (chunk.snapshot != nullptr) chunk.snapshot->done(progress.status);
        batch.clear();
        MutexLock lock(&mu_);
        while (queue_.empty() && !stop_) wake_.Wait(&mu_);
        if (queue_.empty()) return;
        batch.swap(queue_);
      }
    }
    const std::unique_ptr<Snapshot> snapshot = std::move(batch.back().snapshot);
    batch.clear();
    if (snapshot != nullptr) {
      const absl::Status status = CommitSnapshot(*snapshot);
      if (!status.ok()) {
        // What it would have stood for is still to be replayed.
        records_since_snapshot_ += snapshot->records;
        bytes_since_snapshot_ += snapshot->bytes;
      }
      MUSTER_FAILPOINT("journal.snapshot_durable");
      snapshot->done(status);
    }
  }
}

void SqliteJournal::Stop() {
  MUSTER_FAILPOINT("journal.stop");
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  wake_.SignalAll();
  if (writer_.joinable()) writer_.join();
}

absl::Status SqliteJournal::CheckSchema() {
  MUSTER_ASSIGN_OR_RETURN(sqlite3_stmt * raw,
                          Prepare("SELECT value FROM meta WHERE name = 'schema'"));
  const Statement select(raw);
  const int rc = sqlite3_step(select.get());
  if (rc != SQLITE_ROW && rc != SQLITE_DONE) return Error(rc, "read meta");
  const std::string schema(rc == SQLITE_ROW ? Blob(select.get(), 0) : "(none)");
  if (schema == "1") return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("journal '", path_, "' has schema ", schema,
                   ", this program writes 1: use the program that wrote it"));
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
                   journal.restored_, "'); COMMIT")
          .c_str()));
  return absl::StrCat(journal.path_, ": marked as restored from a copy made in term ", copied,
                      "; the next start begins term ", journal.restored_ + 1,
                      " and ends every generation that the copy holds");
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
        snapshot_bytes = state.size();
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
