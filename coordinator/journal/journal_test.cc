#include "coordinator/journal/journal.h"

#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "coordinator/journal/memory_journal.h"
#include "coordinator/journal/sqlite_journal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// The reports of a journal, for waiting on them.
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
        content.snapshot += std::string(state);
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

// The records and parts from which a replica was built.
struct Built {
  std::string restored;
  std::vector<std::string> replayed;
};

// Writes the state that it is given, whatever it is built from.
class FakeReplica final : public Replica {
 public:
  explicit FakeReplica(std::vector<std::string> parts, Built* built = nullptr)
      : parts_(std::move(parts)), built_(built) {}
  bool NeedsHistory() const override { return needs_history; }
  absl::Status Restore(absl::string_view part) override {
    if (built_ != nullptr) built_->restored += std::string(part);
    return absl::OkStatus();
  }
  absl::Status Replay(absl::string_view record) override {
    if (on_replay) on_replay();
    if (built_ != nullptr) built_->replayed.push_back(std::string(record));
    return absl::OkStatus();
  }
  absl::Status Write(absl::FunctionRef<absl::Status(absl::string_view)> part) override {
    do {
      for (const std::string& one : parts_) {
        if (absl::Status status = part(one); !status.ok()) return status;
        if (on_part) on_part();
      }
    } while (endless);
    return absl::OkStatus();
  }

  bool needs_history = true;
  bool endless = false;  // its parts come again and again
  std::function<void()> on_replay;
  std::function<void()> on_part;  // after each

 private:
  const std::vector<std::string> parts_;
  Built* const built_;
};

// Writes a snapshot and waits for the result.
absl::Status WriteSnapshot(Journal& journal, uint64_t revision, std::unique_ptr<Replica> replica) {
  absl::Status result;
  Notification done;
  journal.WriteSnapshot(revision, std::move(replica), [&](const absl::Status& status) {
    result = status;
    done.Notify();
  });
  done.WaitForNotification();
  return result;
}
absl::Status WriteSnapshot(Journal& journal, uint64_t revision, const std::string& state,
                           Built* built = nullptr) {
  return WriteSnapshot(journal, revision,
                       std::make_unique<FakeReplica>(std::vector<std::string>{state}, built));
}

std::vector<std::string> SnapshotFiles(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename().string().rfind("snapshot-", 0) == 0)
      names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void Execute(const std::string& directory, const std::string& sql) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((directory + "/journal.db").c_str(), &db), SQLITE_OK);
  char* error = nullptr;
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, &error), SQLITE_OK) << error;
  sqlite3_close(db);
}

int64_t Number(const std::string& directory, const std::string& sql) {
  sqlite3* db = nullptr;
  sqlite3_stmt* statement = nullptr;
  EXPECT_EQ(sqlite3_open((directory + "/journal.db").c_str(), &db), SQLITE_OK);
  EXPECT_EQ(sqlite3_prepare_v2(db, sql.c_str(), -1, &statement, nullptr), SQLITE_OK);
  EXPECT_EQ(sqlite3_step(statement), SQLITE_ROW);
  const int64_t number = sqlite3_column_int64(statement, 0);
  sqlite3_finalize(statement);
  sqlite3_close(db);
  return number;
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
  void SetUp() override { g_fail_code = SQLITE_OK; }

  std::unique_ptr<SqliteJournal> Open(const char* vfs = nullptr) { return OpenAt(dir_, vfs); }
  static std::unique_ptr<SqliteJournal> OpenAt(const std::string& dir, const char* vfs = nullptr) {
    auto journal =
        SqliteJournal::Open({.directory = dir, .vfs = vfs, .retry_full = absl::Milliseconds(1)});
    EXPECT_TRUE(journal.ok()) << journal.status();
    return journal.ok() ? *std::move(journal) : nullptr;
  }
  // Copies the files as a power cut now would leave them, while the process runs.
  std::string CopyOfDisk(const std::string& name) {
    const fs::path to = dir_ + "_" + name;
    fs::remove_all(to);
    fs::create_directory(to);
    for (const auto& entry : fs::directory_iterator(dir_)) {
      if (entry.path().filename() != "LOCK")
        fs::copy_file(entry.path(), to / entry.path().filename());
    }
    return to;
  }
  // Makes `commits` group commits of `each` records; the process then "loses power".
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

  const TestFolder folder_;
  const std::string dir_ = folder_.Path("journal");
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
  journal.WriteSnapshot(7, std::make_unique<FakeReplica>(std::vector<std::string>{"s"}),
                        [&](absl::Status status) { done = status; });
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

// SQLite alone would silently drop the flipped transaction and all after it.
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
    journal->WriteSnapshot(10,
                           std::make_unique<FakeReplica>(std::vector<std::string>{"state of 10"}),
                           [&](const absl::Status& status) {
                             EXPECT_TRUE(status.ok()) << status;
                             done.Notify();
                           });
    for (uint64_t r = 11; r <= 15; ++r) journal->Append(r, Payload(r, 50));
    done.WaitForNotification();
    EXPECT_EQ(journal->records_since_snapshot(), 5u);
    EXPECT_GT(journal->snapshot_bytes(), 10u);
  }
  auto journal = Open();
  const auto content = Read(*journal);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->snapshot_revision, 10u);
  EXPECT_EQ(content->snapshot, "state of 10");
  ExpectRecords(*content, 11, 15);
  journal.reset();
  EXPECT_THAT(*Verify(dir_), HasSubstr("ok; snapshot of revision 10 (11 bytes)"));
}

// Ten records, a snapshot, and so on.
class SnapshotsTest : public SqliteJournalTest {
 protected:
  void Begin(const std::string& dir, const char* vfs = nullptr) {
    journal_ = OpenAt(dir, vfs);
    ASSERT_TRUE(Read(*journal_).ok());
    journal_->Start(listener_.Callback());
  }
  void TearDown() override {
    ASSERT_TRUE(ArmFailpoints("", "", "").ok());
    SqliteJournalTest::TearDown();
  }
  void Append(int records = 10, size_t bytes = 50) {
    for (int i = 0; i < records; ++i) {
      ++last_;
      journal_->Append(last_, Payload(last_, bytes));
      listener_.WaitDurable(last_);
    }
  }
  static std::string State(uint64_t revision) {
    return "snapshot-state-" + std::to_string(revision);
  }
  void Snapshots(int times) {
    for (int i = 0; i < times; ++i) {
      Append();
      const absl::Status status = WriteSnapshot(*journal_, last_, State(last_));
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  // Expects what a start now would find.
  static void ExpectState(const std::string& dir, uint64_t snapshot, uint64_t last,
                          size_t bytes = 50) {
    auto journal = OpenAt(dir);
    const auto content = Read(*journal);
    ASSERT_TRUE(content.ok()) << content.status();
    EXPECT_EQ(content->snapshot, snapshot == 0 ? "" : State(snapshot));
    ExpectRecords(*content, snapshot + 1, last, bytes);
  }
  std::string FileOf(uint64_t revision) const {
    for (const std::string& name : SnapshotFiles(dir_)) {
      if (Slurp(dir_ + "/" + name).find(State(revision)) != std::string::npos)
        return dir_ + "/" + name;
    }
    ADD_FAILURE() << "no file has the snapshot of " << revision;
    return "";
  }
  void Damage(uint64_t revision) {
    const std::string path = FileOf(revision);
    std::string bytes = Slurp(path);
    bytes[bytes.find("snapshot-state")] ^= 1;
    Spill(path, bytes);
  }

  Listener listener_;
  uint64_t last_ = 0;
  std::unique_ptr<SqliteJournal> journal_;
};

TEST_F(SnapshotsTest, Snapshot_IsBuiltFromTheOneBeforeAndTheRecordsSince) {
  Begin(dir_);
  Snapshots(1);
  Append();
  Built built;
  ASSERT_TRUE(WriteSnapshot(*journal_, 20, State(20), &built).ok());
  EXPECT_EQ(built.restored, State(10));
  ASSERT_EQ(built.replayed.size(), 10u);
  for (uint64_t r = 11; r <= 20; ++r) EXPECT_EQ(built.replayed[r - 11], Payload(r, 50));
  // The same holds after a restart, and across what the journal has not written yet.
  journal_.reset();
  Begin(dir_);
  for (int i = 0; i < 5; ++i) {
    ++last_;
    journal_->Append(last_, Payload(last_, 50));
  }
  built = Built();
  ASSERT_TRUE(WriteSnapshot(*journal_, 25, State(25), &built).ok());
  EXPECT_EQ(built.restored, State(20));
  EXPECT_EQ(built.replayed.size(), 5u);
}

TEST_F(SnapshotsTest, CommitsGoOn_WhileASnapshotIsBuiltAndWritten) {
  Begin(dir_);
  Append();
  Notification building, built, writing, written, done;
  auto replica = std::make_unique<FakeReplica>(std::vector<std::string>{State(10), ""});
  replica->on_replay = [&] {
    if (building.HasBeenNotified()) return;
    building.Notify();
    built.WaitForNotification();
  };
  replica->on_part = [&] {
    if (writing.HasBeenNotified()) return;
    writing.Notify();
    written.WaitForNotification();
  };
  journal_->WriteSnapshot(10, std::move(replica), [&](const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
    done.Notify();
  });
  building.WaitForNotification();
  Append();  // durable, each
  built.Notify();
  writing.WaitForNotification();
  Append();
  EXPECT_FALSE(done.HasBeenNotified());
  ExpectState(CopyOfDisk("crashed"), 0, 30);
  written.Notify();
  done.WaitForNotification();
  EXPECT_EQ(journal_->records_since_snapshot(), 20u);
  journal_.reset();
  ExpectState(dir_, 10, 30);
}

TEST_F(SnapshotsTest, LargeSnapshot_IsReadBackPartByPart) {
  std::vector<std::string> parts;
  std::string all;
  for (int i = 0; i < 23; ++i) {
    parts.push_back(std::string(700'000 + i, static_cast<char>('a' + i)));
    all += parts.back();
  }
  Begin(dir_);
  Append();
  ASSERT_TRUE(WriteSnapshot(*journal_, 10, std::make_unique<FakeReplica>(parts)).ok());
  journal_.reset();
  auto journal = Open();
  std::vector<size_t> sizes;
  ASSERT_TRUE(journal
                  ->Replay(
                      [&](uint64_t, absl::string_view part) {
                        sizes.push_back(part.size());
                        return absl::OkStatus();
                      },
                      [](uint64_t, absl::string_view) { return absl::OkStatus(); })
                  .ok());
  ASSERT_EQ(sizes.size(), parts.size());
  EXPECT_EQ(sizes[22], parts[22].size());
  EXPECT_TRUE(Read(*journal)->snapshot == all);  // not printed
}

TEST_F(SnapshotsTest, RecordsBeforeTheOlderOne_AreDeletedWhateverTheirSize) {
  Begin(dir_);
  // More rows, and more bytes, than one step deletes.
  Append(600);
  Append(5, 3 << 20);
  ASSERT_TRUE(WriteSnapshot(*journal_, last_, State(last_)).ok());
  Append();
  EXPECT_EQ(Number(CopyOfDisk("one"), "SELECT COUNT(*) FROM batches"), 615) << "all, beside one";
  ASSERT_TRUE(WriteSnapshot(*journal_, last_, State(last_)).ok());
  Append();
  journal_.reset();
  EXPECT_EQ(Number(dir_, "SELECT MIN(first_seq) FROM batches"), 606);
  EXPECT_EQ(SnapshotFiles(dir_).size(), 2u);
  ExpectState(dir_, 615, 625);
}

TEST_F(SnapshotsTest, BadNewestSnapshot_FallsBackToTheOneBefore) {
  Begin(dir_);
  Snapshots(3);
  journal_.reset();
  EXPECT_EQ(SnapshotFiles(dir_).size(), 2u);
  const std::string newest = FileOf(30);
  Damage(30);
  ExpectState(dir_, 20, 30);
  EXPECT_THAT(*Verify(dir_), HasSubstr("passed over 1 damaged snapshots"));
  fs::resize_file(newest, fs::file_size(newest) - 1);
  ExpectState(dir_, 20, 30);
  fs::remove(newest);
  ExpectState(dir_, 20, 30);
  fs::remove(FileOf(20));
  auto journal = Open();
  const absl::Status status = Read(*journal).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("records 1 to 20 are missing"));
}

TEST_F(SnapshotsTest, BadNewestSnapshot_IsReplacedByTheNextAndTheGoodOneKept) {
  Begin(dir_);
  Snapshots(2);
  journal_.reset();
  Damage(20);
  Begin(dir_);
  Built built;
  Append();
  ASSERT_TRUE(WriteSnapshot(*journal_, 30, State(30), &built).ok());
  EXPECT_EQ(built.restored, State(10));
  EXPECT_EQ(built.replayed.size(), 20u);
  journal_.reset();
  EXPECT_THAT(*Verify(dir_), HasSubstr("snapshot of revision 30"));
  // The newest is damaged again: the one of 10 is still there, with all records since.
  Damage(30);
  EXPECT_THAT(*Verify(dir_), HasSubstr("passed over 1 damaged snapshots"));
  ExpectState(dir_, 10, 30);
}

TEST_F(SnapshotsTest, DamageWhileItRuns_IsNoticedAndASnapshotOfTheWholeStateHelps) {
  Begin(dir_);
  Snapshots(2);
  Append();
  Damage(10);
  Damage(20);
  const absl::Status status = WriteSnapshot(*journal_, 30, State(30));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  auto whole = std::make_unique<FakeReplica>(std::vector<std::string>{State(30)});
  whole->needs_history = false;
  ASSERT_TRUE(WriteSnapshot(*journal_, 30, std::move(whole)).ok());
  Append();
  ExpectState(CopyOfDisk("again"), 30, 40);
  ASSERT_TRUE(WriteSnapshot(*journal_, 40, State(40)).ok());
  journal_.reset();
  EXPECT_EQ(SnapshotFiles(dir_).size(), 2u);
  ExpectState(dir_, 40, 40);
}

TEST_F(SnapshotsTest, SnapshotOfTheSameState_LeavesTheOneBefore) {
  Begin(dir_);
  Snapshots(2);
  ASSERT_TRUE(WriteSnapshot(*journal_, 20, "not written").ok());
  journal_.reset();
  ExpectState(dir_, 20, 20);
  Damage(20);
  Begin(dir_);
  // The new snapshot takes the place of a damaged one.
  ASSERT_TRUE(WriteSnapshot(*journal_, 20, State(20)).ok());
  journal_.reset();
  ExpectState(dir_, 20, 20);
  Damage(20);
  ExpectState(dir_, 10, 20);
}

TEST_F(SnapshotsTest, SnapshotInARow_OfAnEarlierVersion_IsReadAndReplaced) {
  {
    Begin(dir_);
    Append(20);
    journal_.reset();
  }
  const std::string state = "snapshot-state-10";
  Execute(dir_,
          absl::StrCat("INSERT INTO snapshots VALUES(10, 10, ", Crc32c(state), ", CAST('", state,
                       "' AS BLOB)); DELETE FROM batches WHERE last_seq <= 5; "
                       "DROP TABLE snapshot_files"));
  EXPECT_THAT(*Verify(dir_), HasSubstr("snapshot of revision 10"));
  ExpectState(dir_, 10, 20);
  Begin(dir_);
  Built built;
  ASSERT_TRUE(WriteSnapshot(*journal_, 20, State(20), &built).ok());
  EXPECT_EQ(built.restored, state);
  EXPECT_EQ(built.replayed.size(), 10u);
  journal_.reset();
  // The row is the older of the two now.
  Damage(20);
  ExpectState(dir_, 10, 20);
  EXPECT_EQ(Number(dir_, "SELECT value FROM meta WHERE name = 'schema'"), 2)
      << "earlier versions must refuse it";
  Begin(dir_);
  Snapshots(2);
  journal_.reset();
  Open().reset();
  EXPECT_EQ(Number(dir_, "SELECT COUNT(*) FROM snapshots"), 0);
  ExpectState(dir_, 40, 40);
}

TEST_F(SnapshotsTest, ErrorAtAnyStep_LosesNothingAndTheNextOneSucceeds) {
  Begin(dir_);
  Snapshots(2);
  for (const char* step : {"begin", "built", "part", "written", "named", "publish"}) {
    SCOPED_TRACE(step);
    Append();
    const uint64_t good = last_ - 10;
    ASSERT_TRUE(
        ArmFailpoints(absl::StrCat("journal.snapshot_", step, "=error:RESOURCE_EXHAUSTED"), "", "")
            .ok());
    EXPECT_EQ(WriteSnapshot(*journal_, last_, State(last_)).code(),
              absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(journal_->records_since_snapshot(), 10u);
    EXPECT_GT(journal_->bytes_since_snapshot(), 500u);
    const std::string copy = CopyOfDisk(step);
    ExpectState(copy, good, last_);
    EXPECT_EQ(SnapshotFiles(copy).size(), 2u) << "a start removes what was left";
    EXPECT_TRUE(WriteSnapshot(*journal_, last_, State(last_)).ok());
    EXPECT_EQ(SnapshotFiles(dir_).size(), 2u);
  }
}

TEST_F(SnapshotsTest, PowerCutAtAnyMoment_LosesNothing) {
  Begin(dir_);
  Snapshots(2);
  Append();
  auto replica = std::make_unique<FakeReplica>(std::vector<std::string>{State(30), "", ""});
  int parts = 0;
  replica->on_part = [&] {
    const std::string copy = CopyOfDisk(absl::StrCat("part", ++parts));
    ExpectState(copy, 20, 30);
    EXPECT_EQ(SnapshotFiles(copy).size(), 2u);
  };
  ASSERT_TRUE(WriteSnapshot(*journal_, 30, std::move(replica)).ok());
  EXPECT_EQ(parts, 3);
  ExpectState(CopyOfDisk("done"), 30, 30);
}

TEST_F(SnapshotsTest, Stop_GivesUpTheOneThatIsBeingWritten) {
  Begin(dir_);
  Snapshots(1);
  Append();
  Notification writing;
  absl::Status result;
  auto replica = std::make_unique<FakeReplica>(std::vector<std::string>{State(20)});
  replica->endless = true;
  replica->on_part = [&] {
    if (!writing.HasBeenNotified()) writing.Notify();
  };
  journal_->WriteSnapshot(20, std::move(replica),
                          [&](const absl::Status& status) { result = status; });
  writing.WaitForNotification();
  journal_->Stop();
  EXPECT_EQ(result.code(), absl::StatusCode::kCancelled);
  journal_.reset();
  EXPECT_EQ(SnapshotFiles(dir_).size(), 1u);
  ExpectState(dir_, 10, 20);
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
  const mode_t umask_of_test = umask(0);
  ASSERT_TRUE(WriteSnapshot(*journal, 1, "state").ok());
  umask(umask_of_test);
  int files = 0;
  for (const auto& entry : fs::directory_iterator(dir_)) {
    EXPECT_EQ(mode(entry.path()), owner_only) << entry.path();
    ++files;
  }
  EXPECT_EQ(files, 4) << "the journal, its log, the snapshot, the lock";
  journal.reset();
  // A file of an earlier version is closed to others; a mode that its owner chose for a group
  // stays.
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
    EXPECT_NE(journal->restore_id(), 0u);
    ExpectRecords(*Read(*journal), 1, 4);
    EXPECT_EQ(SqliteJournal::MarkRestored(copy).status().code(), absl::StatusCode::kAlreadyExists)
        << "it is in use";
  }
  EXPECT_EQ(Open()->restored(), 0u);
  EXPECT_EQ(Open()->restore_id(), 0u);
}

TEST_F(SqliteJournalTest, MarkRestored_DrawsAnIdThatNoOtherCopyHas) {
  const std::string copy = CrashedWith(2, 2), again = folder_.Path("again");
  fs::copy(copy, again, fs::copy_options::recursive);
  ASSERT_TRUE(SqliteJournal::MarkRestored(copy).ok());
  ASSERT_TRUE(SqliteJournal::MarkRestored(again).ok());
  const uint64_t first = OpenAt(copy)->restore_id(), second = OpenAt(again)->restore_id();
  EXPECT_NE(first, 0u);
  EXPECT_NE(first, second);
  EXPECT_EQ(OpenAt(copy)->restore_id(), first) << "it is kept";
  ASSERT_TRUE(SqliteJournal::MarkRestored(copy).ok());
  EXPECT_NE(OpenAt(copy)->restore_id(), first);
}

// A backup of revision 4, of a journal that continues to revision 6.
class RestoreTest : public SqliteJournalTest {
 protected:
  void SetUp() override {
    SqliteJournalTest::SetUp();
    auto journal = Open();
    ASSERT_TRUE(Read(*journal).ok());
    Listener listener;
    journal->Start(listener.Callback());
    for (uint64_t r = 1; r <= 4; ++r) journal->Append(r, Payload(r, 50));
    ASSERT_TRUE(WriteSnapshot(*journal, 4, "state of 4").ok());
    EXPECT_TRUE(absl::IsNotFound(journal->ReadBackup(3, 0, 10).status()));
    std::string bytes;
    for (;;) {
      const auto part = journal->ReadBackup(4, bytes.size(), 7);
      ASSERT_TRUE(part.ok()) << part.status();
      if (part->data.empty()) break;
      EXPECT_LE(part->data.size(), 7u);
      bytes += part->data;
      EXPECT_LE(bytes.size(), part->bytes);
    }
    Spill(backup_, bytes);
    for (uint64_t r = 5; r <= 6; ++r) journal->Append(r, Payload(r, 50));
    listener.WaitDurable(6);
  }
  absl::StatusOr<std::string> Restore(const std::string& directory, absl::Time now = absl::Now()) {
    return SqliteJournal::Restore(
        backup_, directory, [](uint64_t, absl::string_view) { return absl::OkStatus(); }, now);
  }
  // Returns the term of the restored journal, which holds what the backup does.
  uint64_t ExpectRestored(const std::string& directory) {
    auto journal = OpenAt(directory);
    const auto content = Read(*journal);
    EXPECT_TRUE(content.ok()) << content.status();
    EXPECT_EQ(content->snapshot, "state of 4");
    EXPECT_EQ(content->snapshot_revision, 4u);
    EXPECT_TRUE(content->records.empty());
    EXPECT_EQ(journal->restored(), journal->term() - 1);
    // The journal continues from there.
    Listener listener;
    journal->Start(listener.Callback());
    journal->Append(100, Payload(100, 50));
    listener.WaitDurable(100);
    EXPECT_TRUE(WriteSnapshot(*journal, 100, "more").ok());
    return journal->term();
  }

  const std::string backup_ = folder_.Path("backup");
};

TEST_F(RestoreTest, IntoANewDirectory_BeginsALaterTerm) {
  const std::string other = folder_.Path("new");
  const auto done = Restore(other);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(ExpectRestored(other), 65538u);
  EXPECT_TRUE(Verify(other).ok());
  const uint64_t first = OpenAt(other)->restore_id();
  EXPECT_NE(first, 0u);
  // Restored again at once, from the same backup: even states with the same terms can be told
  // apart.
  fs::remove_all(other);
  ASSERT_TRUE(Restore(other).ok());
  EXPECT_NE(OpenAt(other)->restore_id(), 0u);
  EXPECT_NE(OpenAt(other)->restore_id(), first);
  // Restored months later, from the same backup: terms that the first may have used do not come
  // again.
  fs::remove_all(other);
  ASSERT_TRUE(Restore(other, absl::Now() + absl::Hours(24 * 60)).ok());
  EXPECT_GT(ExpectRestored(other), 65538u + 80'000);
}

TEST_F(RestoreTest, InPlace_IsBeyondTheTermsOfWhatWasThereAndKeepsIt) {
  for (int start = 0; start < 3; ++start) Open();
  const auto done = Restore(dir_);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_THAT(*done, HasSubstr(dir_ + "/lost-4"));
  EXPECT_EQ(ExpectRestored(dir_), 4 + 65536 + 1u);
  EXPECT_TRUE(Verify(dir_ + "/lost-4").ok());
  ExpectRecords(*Read(*OpenAt(dir_ + "/lost-4")), 5, 6);
  ASSERT_TRUE(Restore(dir_).ok());
  EXPECT_EQ(ExpectRestored(dir_), 4 + 2 * 65536 + 2u);
  EXPECT_FALSE(fs::exists(dir_ + "/restoring"));
}

TEST_F(RestoreTest, InPlaceOfADamagedJournal_TakesItsPlace) {
  Open();
  {
    std::fstream file(dir_ + "/journal.db", std::ios::in | std::ios::out | std::ios::binary);
    file.write("damaged damaged damaged", 23);
  }
  Spill(dir_ + "/journal.db-wal", "damaged");
  const auto done = Restore(dir_);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_THAT(*done, HasSubstr("could not be read"));
  EXPECT_EQ(ExpectRestored(dir_), 65538u);
}

TEST_F(RestoreTest, CrashBeforeTheLastStep_LeavesWhatWasThereAndCanBeRepeated) {
  fs::create_directory(dir_ + "/restoring");
  Spill(dir_ + "/restoring/journal.db", "half");
  Spill(dir_ + "/snapshot-00000000000000000005", "half");
  {
    auto journal = Open();
    EXPECT_TRUE(Read(*journal).ok());
  }
  ASSERT_TRUE(Restore(dir_).ok());
  ExpectRestored(dir_);
}

TEST_F(RestoreTest, OfAnotherCluster_IsRefused) {
  const std::string other = folder_.Path("other");
  OpenAt(other);
  const auto refused = Restore(other);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("of another cluster"));
  EXPECT_EQ(OpenAt(other)->restored(), 0u);
}

TEST_F(SqliteJournalTest, SnapshotThatFails_CountsItsRecordsAgain) {
  auto journal = Open(FaultyVfs());
  ASSERT_TRUE(Read(*journal).ok());
  Listener listener;
  journal->Start(listener.Callback());
  for (uint64_t r = 1; r <= 5; ++r) journal->Append(r, Payload(r, 50));
  listener.WaitDurable(5);
  g_fail_code = SQLITE_FULL;
  EXPECT_EQ(WriteSnapshot(*journal, 5, "state").code(), absl::StatusCode::kResourceExhausted);
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
    EXPECT_EQ(WriteSnapshot(*journal, 3, "state").code(), absl::StatusCode::kUnavailable);
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
  ASSERT_EQ(sqlite3_exec(db, "UPDATE meta SET value = '3' WHERE name = 'schema'", nullptr, nullptr,
                         nullptr),
            SQLITE_OK);
  sqlite3_close(db);
  for (const absl::Status& status :
       {SqliteJournal::Open({.directory = dir_}).status(), Verify(dir_).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("schema 3"));
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

TEST_F(SqliteJournalTest, DirectoryWithoutParents_IsMadeWithThem) {
  const std::string deep = dir_ + "/of/this/cluster";
  const auto journal = SqliteJournal::Open({.directory = deep});
  EXPECT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ(fs::status(deep).permissions(), fs::perms::owner_all);
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
