#include "coordinator/journal/journal.h"

#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "coordinator/journal/memory_journal.h"
#include "coordinator/journal/sqlite_journal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// What a journal told, for waiting on it.
class Listener {
 public:
  void On(const Journal::Progress& progress) {
    MutexLock lock(&mu_);
    last_ = progress;
    ++calls_;
    if (!progress.status.ok()) ++failures_;
    changed_.SignalAll();
  }
  void WaitDurable(uint64_t revision) {
    MutexLock lock(&mu_);
    while (last_.durable_revision < revision) changed_.Wait(&mu_);
  }
  absl::Status WaitFailure() {
    MutexLock lock(&mu_);
    while (failures_ == 0) changed_.Wait(&mu_);
    return last_.status;
  }
  uint64_t durable() {
    MutexLock lock(&mu_);
    return last_.durable_revision;
  }
  std::function<void(const Journal::Progress&)> Callback() {
    return [this](const Journal::Progress& progress) { On(progress); };
  }

 private:
  Mutex mu_;
  CondVar changed_;
  Journal::Progress last_ ABSL_GUARDED_BY(mu_);
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  int failures_ ABSL_GUARDED_BY(mu_) = 0;
};

struct Content {
  uint64_t snapshot_revision = 0;
  std::string snapshot;
  std::vector<std::pair<uint64_t, std::string>> records;
};

absl::StatusOr<Content> Read(Journal& journal) {
  Content content;
  const absl::Status status = journal.Replay(
      [&](uint64_t revision, absl::string_view state) {
        content.snapshot_revision = revision;
        content.snapshot = std::string(state);
        return absl::OkStatus();
      },
      [&](uint64_t revision, absl::string_view record) {
        content.records.emplace_back(revision, std::string(record));
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  return content;
}

absl::StatusOr<std::string> Verify(const std::string& directory) {
  const auto any = [](uint64_t, absl::string_view) { return absl::OkStatus(); };
  return SqliteJournal::Verify(directory, any, any);
}

// Faults below SQLite: its default file system with writes and syncs that fail on demand.
std::atomic<int> g_fail_code{SQLITE_OK};
const sqlite3_io_methods* g_real_methods = nullptr;
sqlite3_io_methods g_methods;
sqlite3_vfs* g_real_vfs = nullptr;

const char* FaultyVfs() {
  static sqlite3_vfs vfs = [] {
    sqlite3_initialize();
    g_real_vfs = sqlite3_vfs_find(nullptr);
    sqlite3_vfs copy = *g_real_vfs;
    copy.zName = "faulty";
    copy.pNext = nullptr;
    copy.xOpen = [](sqlite3_vfs*, const char* name, sqlite3_file* file, int flags, int* out_flags) {
      const int rc = g_real_vfs->xOpen(g_real_vfs, name, file, flags, out_flags);
      if (rc == SQLITE_OK && (flags & SQLITE_OPEN_WAL)) {
        g_real_methods = file->pMethods;
        g_methods = *g_real_methods;
        g_methods.xWrite = [](sqlite3_file* f, const void* data, int bytes, sqlite3_int64 offset) {
          const int fail = g_fail_code;
          return fail == SQLITE_FULL || fail == SQLITE_IOERR_WRITE
                     ? fail
                     : g_real_methods->xWrite(f, data, bytes, offset);
        };
        g_methods.xSync = [](sqlite3_file* f, int sync_flags) {
          const int fail = g_fail_code;
          return fail == SQLITE_IOERR_FSYNC ? fail : g_real_methods->xSync(f, sync_flags);
        };
        g_methods.xFileControl = [](sqlite3_file* f, int op, void* arg) {
          if (op != SQLITE_FCNTL_LAST_ERRNO || g_fail_code != SQLITE_IOERR_WRITE)
            return g_real_methods->xFileControl(f, op, arg);
          *static_cast<int*>(arg) = EDQUOT;  // what write(2) said
          return SQLITE_OK;
        };
        file->pMethods = &g_methods;
      }
      return rc;
    };
    return copy;
  }();
  static const int registered = sqlite3_vfs_register(&vfs, 0);
  return registered == SQLITE_OK ? "faulty" : nullptr;
}

class SqliteJournalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    g_fail_code = SQLITE_OK;
    dir_ = ::testing::TempDir() + "/journal_" +
           ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::unique_ptr<SqliteJournal> Open(const char* vfs = nullptr) { return OpenAt(dir_, vfs); }
  static std::unique_ptr<SqliteJournal> OpenAt(const std::string& dir, const char* vfs = nullptr) {
    auto journal =
        SqliteJournal::Open({.directory = dir, .vfs = vfs, .retry_full = absl::Milliseconds(1)});
    EXPECT_TRUE(journal.ok()) << journal.status();
    return journal.ok() ? *std::move(journal) : nullptr;
  }
  // As a power cut now would leave the files: a running process is copied away.
  std::string CopyOfDisk(const std::string& name) {
    const std::string to = dir_ + "_" + name;
    fs::remove_all(to);
    fs::create_directory(to);
    for (const char* file : {"journal.db", "journal.db-wal"}) {
      if (fs::exists(dir_ + "/" + file)) fs::copy_file(dir_ + "/" + file, to + "/" + file);
    }
    return to;
  }
  // `commits` group commits of `each` records; the process then "loses power".
  std::string CrashedWith(int commits, int each, size_t bytes = 50) {
    auto journal = Open();
    EXPECT_TRUE(Read(*journal).ok());
    Listener listener;
    journal->Start(listener.Callback());
    uint64_t revision = 0;
    for (int c = 0; c < commits; ++c) {
      for (int i = 0; i < each; ++i) {
        ++revision;
        journal->Append(revision, Payload(revision, bytes));
      }
      listener.WaitDurable(revision);
    }
    return CopyOfDisk("crashed");
  }
  static std::string Payload(uint64_t revision, size_t bytes) {
    return "record " + std::to_string(revision) +
           std::string(bytes, static_cast<char>('a' + revision % 26));
  }
  static void ExpectRecords(const Content& content, uint64_t from, uint64_t to, size_t bytes = 50) {
    ASSERT_EQ(content.records.size(), to - from + 1);
    for (uint64_t r = from; r <= to; ++r) {
      EXPECT_EQ(content.records[r - from].first, r);
      EXPECT_EQ(content.records[r - from].second, Payload(r, bytes));
    }
  }
  static std::string Slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  static void Spill(const std::string& path, const std::string& data) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << data;
  }

  std::string dir_;
};

TEST(MemoryJournal, Append_IsDurableAtOnce) {
  MemoryJournal journal;
  EXPECT_EQ(journal.cluster_id().size(), 32u);
  EXPECT_TRUE(Read(journal)->records.empty());
  Listener listener;
  journal.Start(listener.Callback());
  journal.Append(7, "x");
  EXPECT_EQ(listener.durable(), 7u);
  absl::Status done = absl::UnknownError("not called");
  journal.WriteSnapshot(7, "s", [&](absl::Status status) { done = status; });
  EXPECT_TRUE(done.ok());
}

TEST_F(SqliteJournalTest, Reopened_HasEverythingAndANewTerm) {
  std::string cluster;
  {
    auto journal = Open();
    EXPECT_EQ(journal->term(), 1u);
    cluster = journal->cluster_id();
    EXPECT_TRUE(Read(*journal)->records.empty());
    Listener listener;
    journal->Start(listener.Callback());
    for (uint64_t r = 1; r <= 1000; ++r) journal->Append(r, Payload(r, 50));
    EXPECT_EQ(journal->records_since_snapshot(), 1000u);
    journal->Stop();
    EXPECT_EQ(listener.durable(), 1000u);
  }
  auto journal = Open();
  EXPECT_EQ(journal->term(), 2u);
  EXPECT_EQ(journal->cluster_id(), cluster);
  ExpectRecords(*Read(*journal), 1, 1000);
  EXPECT_EQ(journal->records_since_snapshot(), 1000u);
}

TEST_F(SqliteJournalTest, PowerCut_KeepsWhatWasAcknowledged) {
  auto journal = OpenAt(CrashedWith(5, 7));
  ExpectRecords(*Read(*journal), 1, 35);
}

// Whatever prefix of the log a crash leaves, recovery gives whole commits, in order, from the
// first.
TEST_F(SqliteJournalTest, TornTail_IsCutAtEveryLength) {
  const std::string crashed = CrashedWith(8, 1);
  const std::string wal = Slurp(crashed + "/journal.db-wal");
  size_t last = 0;
  for (size_t length = 32; length <= wal.size(); length += 509) {
    const std::string copy = crashed + "_cut";
    fs::remove_all(copy);
    fs::create_directory(copy);
    fs::copy_file(crashed + "/journal.db", copy + "/journal.db");
    Spill(copy + "/journal.db-wal", wal.substr(0, length));
    auto journal = OpenAt(copy);
    ASSERT_NE(journal, nullptr);
    const auto content = Read(*journal);
    ASSERT_TRUE(content.ok()) << content.status();
    EXPECT_GE(content->records.size(), last);
    last = content->records.size();
    if (last > 0) ExpectRecords(*content, 1, last);
    fs::remove_all(copy);
  }
  EXPECT_GE(last, 7u);
}

TEST_F(SqliteJournalTest, AfterATornTail_AppendsGoOnAndSurvive) {
  const std::string crashed = CrashedWith(5, 1);
  const std::string wal = Slurp(crashed + "/journal.db-wal");
  Spill(crashed + "/journal.db-wal", wal.substr(0, wal.size() - 100));
  uint64_t kept;
  {
    auto journal = OpenAt(crashed);
    kept = Read(*journal)->records.size();
    EXPECT_EQ(kept, 4u);
    Listener listener;
    journal->Start(listener.Callback());
    for (uint64_t r = kept + 1; r <= kept + 10; ++r) {
      journal->Append(r, Payload(r, 50));
      listener.WaitDurable(r);
    }
  }
  auto journal = OpenAt(crashed);
  ExpectRecords(*Read(*journal), 1, kept + 10);
}

// SQLite alone would drop the flipped transaction and all after it without a word.
TEST_F(SqliteJournalTest, FlippedBitInTheMiddleOfTheLog_IsRefusedWithItsOffset) {
  const std::string crashed = CrashedWith(6, 2);
  std::string wal = Slurp(crashed + "/journal.db-wal");
  wal[wal.size() / 2] = static_cast<char>(wal[wal.size() / 2] ^ 0x10);
  Spill(crashed + "/journal.db-wal", wal);
  const absl::Status status = SqliteJournal::Open({.directory = crashed}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("corrupt at offset "));
  EXPECT_EQ(Verify(crashed).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(SqliteJournalTest, FlippedBitInARecord_IsRefusedWithItsPlace) {
  {
    auto journal = Open();
    ASSERT_TRUE(Read(*journal).ok());
    Listener listener;
    journal->Start(listener.Callback());
    for (uint64_t r = 1; r <= 50; ++r) journal->Append(r, Payload(r, 50));
    journal->Stop();
  }
  std::string db = Slurp(dir_ + "/journal.db");
  const size_t at = db.find("record 20");
  ASSERT_NE(at, std::string::npos);
  db[at + 12] ^= 1;
  Spill(dir_ + "/journal.db", db);
  auto journal = Open();
  const absl::Status status = Read(*journal).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("corrupt at record 20"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("offset"));
  journal.reset();
  EXPECT_THAT(std::string(Verify(dir_).status().message()), HasSubstr("corrupt at record 20"));
}

TEST_F(SqliteJournalTest, Snapshot_StandsForWhatWasBeforeIt) {
  {
    auto journal = Open();
    ASSERT_TRUE(Read(*journal).ok());
    Listener listener;
    journal->Start(listener.Callback());
    for (uint64_t r = 1; r <= 10; ++r) journal->Append(r, Payload(r, 50));
    Notification done;
    journal->WriteSnapshot(10, "state of 10", [&](absl::Status status) {
      EXPECT_TRUE(status.ok()) << status;
      done.Notify();
    });
    for (uint64_t r = 11; r <= 15; ++r) journal->Append(r, Payload(r, 50));
    done.WaitForNotification();
    EXPECT_EQ(journal->records_since_snapshot(), 5u);
  }
  auto journal = Open();
  const auto content = Read(*journal);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->snapshot_revision, 10u);
  EXPECT_EQ(content->snapshot, "state of 10");
  ExpectRecords(*content, 11, 15);
  journal.reset();
  EXPECT_THAT(*Verify(dir_), HasSubstr("ok; snapshot of revision 10"));
}

TEST_F(SqliteJournalTest, BadNewestSnapshot_FallsBackToTheOneBefore) {
  {
    auto journal = Open();
    ASSERT_TRUE(Read(*journal).ok());
    Listener listener;
    journal->Start(listener.Callback());
    for (uint64_t r = 1; r <= 30; ++r) {
      journal->Append(r, Payload(r, 50));
      if (r % 10 == 0) {
        journal->WriteSnapshot(r, "snapshot-state-" + std::to_string(r),
                               [](absl::Status status) { EXPECT_TRUE(status.ok()); });
      }
    }
    journal->Stop();
  }
  std::string db = Slurp(dir_ + "/journal.db");
  EXPECT_EQ(db.find("record 3a"), std::string::npos);
  const size_t at = db.find("snapshot-state-30");
  ASSERT_NE(at, std::string::npos);
  db[at] ^= 1;
  Spill(dir_ + "/journal.db", db);
  auto journal = Open();
  const auto content = Read(*journal);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->snapshot, "snapshot-state-20");
  ExpectRecords(*content, 21, 30);
}

// Damages the snapshot with this state, and nothing else.
void DamageSnapshot(const std::string& directory, const std::string& state) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((directory + "/journal.db").c_str(), &db), SQLITE_OK);
  const std::string sql =
      "UPDATE snapshots SET crc = crc + 1 WHERE CAST(state AS TEXT) = '" + state + "'";
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK);
  EXPECT_EQ(sqlite3_changes(db), 1);
  sqlite3_close(db);
}

TEST_F(SqliteJournalTest, BadNewestSnapshot_IsReplacedByTheNextAndTheGoodOneKept) {
  uint64_t last = 0;
  // Appends ten records and writes a snapshot of the last.
  const auto snapshot = [&](SqliteJournal& journal, int times) {
    Listener listener;
    journal.Start(listener.Callback());
    for (int i = 0; i < times; ++i) {
      for (int r = 0; r < 10; ++r) {
        ++last;
        journal.Append(last, Payload(last, 50));
      }
      journal.WriteSnapshot(last, "snapshot-state-" + std::to_string(last),
                            [](absl::Status status) { EXPECT_TRUE(status.ok()) << status; });
    }
    journal.Stop();
  };
  {
    auto journal = Open();
    ASSERT_TRUE(Read(*journal).ok());
    snapshot(*journal, 2);
  }
  DamageSnapshot(dir_, "snapshot-state-20");
  {
    auto journal = Open();
    EXPECT_EQ(Read(*journal)->snapshot, "snapshot-state-10");
    snapshot(*journal, 1);
  }
  EXPECT_THAT(*Verify(dir_), HasSubstr("snapshot of revision 30"));
  // The newest is damaged again: the one of 10 is still there, with all records since.
  DamageSnapshot(dir_, "snapshot-state-30");
  EXPECT_THAT(*Verify(dir_), HasSubstr("passed over 1 damaged snapshots"));
  auto journal = Open();
  const auto content = Read(*journal);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->snapshot, "snapshot-state-10");
  ExpectRecords(*content, 11, 30);
}

TEST_F(SqliteJournalTest, SnapshotOfTheSameState_LeavesTheOneBefore) {
  {
    auto journal = Open();
    ASSERT_TRUE(Read(*journal).ok());
    Listener listener;
    journal->Start(listener.Callback());
    const auto written = [](absl::Status status) { EXPECT_TRUE(status.ok()) << status; };
    journal->Append(1, Payload(1, 50));
    journal->WriteSnapshot(1, "snapshot-state-1", written);
    journal->Append(2, Payload(2, 50));
    journal->WriteSnapshot(2, "snapshot-state-2", written);
    journal->WriteSnapshot(2, "snapshot-state-2", written);
    journal->Stop();
  }
  DamageSnapshot(dir_, "snapshot-state-2");
  auto journal = Open();
  const auto content = Read(*journal);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->snapshot, "snapshot-state-1");
  ExpectRecords(*content, 2, 2);
}

TEST_F(SqliteJournalTest, Files_AreTheirOwnersOnly) {
  const auto mode = [](const std::string& path) {
    return fs::status(path).permissions() & fs::perms::all;
  };
  const auto owner_only = fs::perms::owner_read | fs::perms::owner_write;
  const mode_t umask_before = umask(0);
  auto journal = Open();
  umask(umask_before);
  ASSERT_TRUE(Read(*journal).ok());
  Listener listener;
  journal->Start(listener.Callback());
  journal->Append(1, Payload(1, 50));
  listener.WaitDurable(1);
  EXPECT_EQ(mode(dir_), owner_only | fs::perms::owner_exec);
  for (const char* file : {"/journal.db", "/journal.db-wal", "/LOCK"})
    EXPECT_EQ(mode(dir_ + file), owner_only) << file;
  journal.reset();
  // One of an earlier version is closed to others; a mode that its owner chose for a group stays.
  const auto all = owner_only | fs::perms::group_read | fs::perms::others_read;
  fs::permissions(dir_ + "/journal.db", all);
  Open().reset();
  EXPECT_EQ(mode(dir_ + "/journal.db"), owner_only);
  fs::permissions(dir_ + "/journal.db", owner_only | fs::perms::group_read);
  Open().reset();
  EXPECT_EQ(mode(dir_ + "/journal.db"), owner_only | fs::perms::group_read);
}

TEST_F(SqliteJournalTest, MarkRestored_RaisesTheTermOnce) {
  EXPECT_EQ(SqliteJournal::MarkRestored(dir_).status().code(), absl::StatusCode::kNotFound);
  const std::string copy = CrashedWith(2, 2);
  const auto done = SqliteJournal::MarkRestored(copy);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_THAT(*done, HasSubstr("the next start begins term 65538"));
  for (const uint64_t term : {65538, 65539}) {
    auto journal = OpenAt(copy);
    EXPECT_EQ(journal->term(), term);
    EXPECT_EQ(journal->restored(), 65537u);
    ExpectRecords(*Read(*journal), 1, 4);
    EXPECT_EQ(SqliteJournal::MarkRestored(copy).status().code(), absl::StatusCode::kAlreadyExists)
        << "it is in use";
  }
  EXPECT_EQ(Open()->restored(), 0u);
}

TEST_F(SqliteJournalTest, SnapshotThatFails_CountsItsRecordsAgain) {
  auto journal = Open(FaultyVfs());
  ASSERT_TRUE(Read(*journal).ok());
  Listener listener;
  journal->Start(listener.Callback());
  for (uint64_t r = 1; r <= 5; ++r) journal->Append(r, Payload(r, 50));
  listener.WaitDurable(5);
  g_fail_code = SQLITE_FULL;
  Notification done;
  journal->WriteSnapshot(5, "state", [&](absl::Status status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    done.Notify();
  });
  done.WaitForNotification();
  g_fail_code = SQLITE_OK;
  EXPECT_EQ(journal->records_since_snapshot(), 5u);
  EXPECT_GT(journal->bytes_since_snapshot(), 250u);
}

TEST_F(SqliteJournalTest, DiskFull_AcknowledgesNothingAndGoesOnLater) {
  auto journal = Open(FaultyVfs());
  ASSERT_TRUE(Read(*journal).ok());
  Listener listener;
  journal->Start(listener.Callback());
  journal->Append(1, Payload(1, 50));
  listener.WaitDurable(1);
  g_fail_code = SQLITE_FULL;
  journal->Append(2, Payload(2, 50));
  journal->Append(3, Payload(3, 50));
  const absl::Status status = listener.WaitFailure();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("journal.db"));
  EXPECT_EQ(listener.durable(), 1u);
  ExpectRecords(*Read(*OpenAt(CopyOfDisk("full"))), 1, 1);
  g_fail_code = SQLITE_OK;
  listener.WaitDurable(3);
  ExpectRecords(*Read(*OpenAt(CopyOfDisk("again"))), 1, 3);
}

TEST_F(SqliteJournalTest, QuotaUsedUp_IsAFullDisk) {
  auto journal = Open(FaultyVfs());
  ASSERT_TRUE(Read(*journal).ok());
  Listener listener;
  journal->Start(listener.Callback());
  g_fail_code = SQLITE_IOERR_WRITE;
  journal->Append(1, Payload(1, 50));
  const absl::Status status = listener.WaitFailure();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("quota"));
  g_fail_code = SQLITE_OK;
  listener.WaitDurable(1);
}

TEST_F(SqliteJournalTest, FailedFsync_IsFinal) {
  {
    auto journal = Open(FaultyVfs());
    ASSERT_TRUE(Read(*journal).ok());
    Listener listener;
    journal->Start(listener.Callback());
    journal->Append(1, Payload(1, 50));
    listener.WaitDurable(1);
    g_fail_code = SQLITE_IOERR_FSYNC;
    journal->Append(2, Payload(2, 50));
    EXPECT_EQ(listener.WaitFailure().code(), absl::StatusCode::kUnavailable);
    g_fail_code = SQLITE_OK;
    journal->Append(3, Payload(3, 50));
    absl::Status told;
    Notification answered;
    journal->WriteSnapshot(3, "state", [&](const absl::Status& status) {
      told = status;
      answered.Notify();
    });
    answered.WaitForNotification();
    EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable);
    journal->Stop();
    EXPECT_EQ(listener.durable(), 1u);
  }
  auto journal = Open();
  const auto content = Read(*journal);
  ASSERT_TRUE(content.ok()) << content.status();
  ASSERT_GE(content->records.size(), 1u);  // 2 may be there: it was not acknowledged either way
  EXPECT_EQ(content->records[0].second, Payload(1, 50));
}

TEST_F(SqliteJournalTest, Verify_TellsWhatItsReaderSays) {
  const std::string crashed = CrashedWith(1, 3);
  const auto any = [](uint64_t, absl::string_view) { return absl::OkStatus(); };
  const auto no_third = [](uint64_t revision, absl::string_view) {
    return revision == 3 ? absl::DataLossError("no") : absl::OkStatus();
  };
  EXPECT_EQ(SqliteJournal::Verify(crashed, any, no_third).status().message(), "no");
}

TEST_F(SqliteJournalTest, SchemaOfANewerProgram_IsRefused) {
  { auto journal = Open(); }
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((dir_ + "/journal.db").c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "UPDATE meta SET value = '2' WHERE name = 'schema'", nullptr, nullptr,
                         nullptr),
            SQLITE_OK);
  sqlite3_close(db);
  for (const absl::Status& status :
       {SqliteJournal::Open({.directory = dir_}).status(), Verify(dir_).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("schema 2"));
  }
}

TEST_F(SqliteJournalTest, SecondOnTheDirectory_IsRefusedWithThePid) {
  auto journal = Open();
  const absl::Status status = SqliteJournal::Open({.directory = dir_}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("in use by process " + std::to_string(getpid())));
  EXPECT_EQ(Verify(dir_).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(SqliteJournalTest, BadDirectory_IsNamed) {
  EXPECT_THAT(std::string(SqliteJournal::Open({.directory = "/proc/nowhere/x"}).status().message()),
              HasSubstr("/proc/nowhere/x"));
  EXPECT_EQ(Verify("/proc/nowhere").status().code(), absl::StatusCode::kNotFound);
  fs::create_directory(dir_);
  Spill(dir_ + "/journal.db", std::string(8192, 'x'));
  const absl::Status status = SqliteJournal::Open({.directory = dir_}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("journal.db"));
}

}  // namespace
}  // namespace muster::coordinator
