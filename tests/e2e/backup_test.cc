// A backup of a coordinator under load, the loss of what came after the backup, and the way back:
// no term and no revision that a client has seen comes again.
#include <sys/stat.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/watch.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The state that a client of the coordinator has seen.
struct Seen {
  uint64_t term = 0;
  uint64_t revision = 0;
  uint64_t version = 0;  // of the key
  std::string value = {};
};

class BackupTest : public ClusterFixture {
 protected:
  void Connect() { channel_ = *rpc::Connect(address_); }
  // Makes the job, as its only worker.
  void Join() {
    v1::JoinRequest request;
    request.mutable_fence()->set_job_id("j");
    request.mutable_fence()->set_worker_id("w");
    request.mutable_fence()->set_incarnation(1);
    request.mutable_spec()->set_min_workers(1);
    request.mutable_spec()->set_max_workers(1);
    v1::JoinReply reply;
    grpc::ClientContext call;
    rpc::SetTimeout(call, absl::Minutes(1));
    const absl::Status status =
        rpc::FromGrpc(v1::Rendezvous::NewStub(channel_)->Join(&call, request, &reply));
    ASSERT_TRUE(status.ok()) << status;
  }

  // Runs one transaction; its last result is a read of the key.
  Seen Run(v1::TxnRequest request) {
    request.mutable_fence()->set_job_id("j");
    request.add_then()->mutable_get()->set_key("k");
    v1::TxnReply reply;
    grpc::ClientContext call;
    rpc::SetTimeout(call, absl::Minutes(1));
    const absl::Status status =
        rpc::FromGrpc(v1::KeyValueStore::NewStub(channel_)->Txn(&call, request, &reply));
    EXPECT_TRUE(status.ok()) << status;
    Seen seen{.term = reply.header().term(), .revision = reply.header().revision()};
    if (reply.results().empty()) return seen;
    const v1::KvOpResult& read = reply.results(reply.results_size() - 1);
    if (read.kvs_size() == 0) return seen;
    seen.value = read.kvs(0).value();
    seen.version = read.kvs(0).version();
    return seen;
  }
  Seen Add() {
    v1::TxnRequest request;
    v1::AddOp& add = *request.add_then()->mutable_add();
    add.set_key("k");
    add.set_delta(1);
    add.set_klass(v1::KV_CLASS_DURABLE);
    return Run(std::move(request));
  }
  Seen Look() { return Run({}); }
  // Returns whether the key still has the version that a client has seen.
  bool HasVersion(uint64_t version) {
    v1::TxnRequest request;
    request.mutable_fence()->set_job_id("j");
    v1::Compare& compare = *request.add_compares();
    compare.set_key("k");
    compare.set_target(v1::Compare::VERSION);
    compare.set_number(version);
    v1::TxnReply reply;
    grpc::ClientContext call;
    rpc::SetTimeout(call, absl::Minutes(1));
    EXPECT_TRUE(v1::KeyValueStore::NewStub(channel_)->Txn(&call, request, &reply).ok());
    return reply.succeeded();
  }
  absl::Status WatchFrom(uint64_t revision) {
    v1::WatchRequest request;
    request.set_job_id("j");
    request.set_key_prefix("k");
    request.set_from_revision(revision);
    request.set_keys(true);
    grpc::ClientContext call;
    rpc::SetTimeout(call, absl::Minutes(1));
    auto reader = v1::Watch::NewStub(channel_)->Watch(&call, request);
    v1::WatchBatch batch;
    while (reader->Read(&batch)) {
    }
    return rpc::FromGrpc(reader->Finish());
  }

  std::unique_ptr<Command> Backup(const std::string& file) {
    return Muster({"backup", "--coordinator", address_, "--out", file});
  }
  std::unique_ptr<Command> Offline(std::vector<std::string> args) {
    args.insert(args.begin(), Runfile("coordinator/cmd/muster-coordinator"));
    return std::make_unique<Command>(*host_, std::move(args), env_);
  }

  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(BackupTest, TakenUnderLoadAndRestoredInPlace_NothingSeenComesAgain) {
  const std::string file = Temp("state.backup"), journal = Temp("journal");
  auto coordinator = StartCoordinator({"--log_level", "warning", "--audit_log", Temp("audit")});
  Connect();
  Join();
  ASSERT_EQ(Add().value, "1");
  std::atomic<bool> stop{false};
  std::thread load([&] {
    while (!stop) Add();
  });
  const Seen before = Add();
  auto backup = Backup(file);
  EXPECT_EQ(backup->Wait(), 0) << backup->err_text();
  EXPECT_THAT(backup->out_text(), HasSubstr(file + ": revision "));
  stop = true;
  load.join();
  EXPECT_THAT(ReadFile(Temp("audit")).value_or(""),
              HasSubstr("\"call\":\"back up the journal\",\"result\":\"OK\""));
  struct stat info;
  ASSERT_EQ(stat(file.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  auto again = Backup(file);
  EXPECT_EQ(again->Wait(), kExitConflict);
  EXPECT_THAT(again->err_text(), HasSubstr("a backup does not replace files"));

  // The coordinator continues, and dies.
  Add();
  const Seen lost = Add();
  coordinator->Signal(SIGKILL);
  coordinator->Wait();

  auto verify = Offline({"--verify", file});
  EXPECT_EQ(verify->Wait(), 0) << verify->err_text();
  EXPECT_THAT(verify->out_text(), HasSubstr(": ok; backup of cluster "));
  auto restore = Offline({"--restore", file, "--data_dir", journal});
  EXPECT_EQ(restore->Wait(), 0) << restore->err_text();
  EXPECT_THAT(restore->out_text(),
              AllOf(HasSubstr("the next start begins term "), HasSubstr(journal + "/lost-1")));
  EXPECT_TRUE(PathExists(journal + "/lost-1/journal.db"));
  auto whole = Offline({"--verify", journal});
  EXPECT_EQ(whole->Wait(), 0) << whole->err_text();

  coordinator = StartCoordinator();
  Connect();
  const Seen after = Look();
  int value = 0, value_before = 0, value_lost = 0;
  ASSERT_TRUE(absl::SimpleAtoi(after.value, &value) &&
              absl::SimpleAtoi(before.value, &value_before) &&
              absl::SimpleAtoi(lost.value, &value_lost));
  EXPECT_GE(value, value_before) << "what was acknowledged before the backup is in it";
  EXPECT_LT(value, value_lost);
  EXPECT_GT(after.term, lost.term + 65535);
  EXPECT_GT(Add().revision, lost.revision);
  EXPECT_GT(after.version, lost.version);
  EXPECT_FALSE(HasVersion(lost.version));
  const absl::Status watch = WatchFrom(lost.revision);
  EXPECT_EQ(rpc::GetReason(watch), v1::ERROR_REASON_COMPACTED) << watch;

  // The same backup once more: what the first restored coordinator issued does not come again.
  const Seen second = Add();
  coordinator->Signal(SIGTERM);
  EXPECT_EQ(coordinator->Wait(), 0);
  auto twice = Offline({"--restore", file, "--data_dir", journal});
  EXPECT_EQ(twice->Wait(), 0) << twice->err_text();
  coordinator = StartCoordinator();
  Connect();
  const Seen third = Look();
  EXPECT_EQ(third.value, after.value);
  EXPECT_GT(third.term, second.term + 65535);
  EXPECT_GT(third.version, second.version);
  EXPECT_GT(Add().revision, second.revision);
}

TEST_F(BackupTest, Mistakes_AreOneLineEach) {
  auto coordinator = StartCoordinator({"--log_level", "error"});
  const std::string file = Temp("b");
  auto backup = Backup(file);
  ASSERT_EQ(backup->Wait(), 0) << backup->err_text() << ", of a state without records";
  std::string bytes = ReadFile(file).value();
  ASSERT_TRUE(WriteFileAtomically(Temp("short"), bytes.substr(0, bytes.size() - 1)).ok());
  bytes[bytes.size() - 1] ^= 1;
  ASSERT_TRUE(WriteFileAtomically(Temp("flipped"), bytes).ok());
  ASSERT_TRUE(WriteFileAtomically(Temp("text"), "hello\n").ok());
  const struct {
    std::unique_ptr<Command> command;
    int code;
    std::string text;
  } kCases[] = {
      {Muster({"backup", "--coordinator", address_}), kExitUsage, "--out FILE"},
      {Muster({"backup", "--coordinator", address_, "--out", Temp("x"), "--within", "soon"}),
       kExitUsage, "--within soon"},
      {Muster({"backup", "--coordinator", address_, "--out", "/nowhere/x"}), kExitNotFound,
       "/nowhere/x"},
      {Offline({"--restore", file}), kExitUsage, "--data_dir"},
      {Offline({"--restore", file, "--data_dir", Temp("journal")}), kExitCannotServe,
       "is in use by process"},
      {Offline({"--restore", Temp("none"), "--data_dir", Temp("d")}), kExitCannotServe, "none"},
      {Offline({"--restore", Temp("text"), "--data_dir", Temp("d")}), kExitUsage,
       "is not a backup"},
      {Offline({"--restore", Temp("short"), "--data_dir", Temp("d")}), kExitJournalCorrupt,
       "bytes behind its header"},
      {Offline({"--verify", Temp("flipped")}), kExitJournalCorrupt, "damaged in part"},
      {Offline({"--verify", Temp("text")}), kExitUsage, "is not a backup"},
  };
  for (const auto& c : kCases) {
    EXPECT_EQ(c.command->Wait(), c.code) << c.text << ": " << c.command->err_text();
    EXPECT_THAT(c.command->err_text(), HasSubstr(c.text));
    EXPECT_EQ(c.command->err().size(), 1u);
  }
  EXPECT_FALSE(PathExists(Temp("d"))) << "nothing is made of a bad backup";
}

TEST_F(BackupTest, UserWhoIsNoAdmin_IsDenied) {
  auto token = Muster({"token", "eve", "submit", "--out", Temp("eve")});
  ASSERT_EQ(token->Wait(), 0) << token->err_text();
  ASSERT_TRUE(WriteFileAtomically(Temp("users"), token->out_text() + "\n").ok());
  ASSERT_EQ(chmod(Temp("users").c_str(), 0600), 0);
  auto coordinator = StartCoordinator({"--log_level", "error"}, {"--users_file", Temp("users")});
  auto backup = Muster(
      {"backup", "--coordinator", address_, "--token_file", Temp("eve"), "--out", Temp("b")});
  EXPECT_EQ(backup->Wait(), kExitDenied) << backup->err_text();
  EXPECT_FALSE(PathExists(Temp("b")));
}

TEST_F(BackupTest, CoordinatorWithoutADataDir_HasNothingToBackUp) {
  auto coordinator = Offline({"--insecure", "--log_level", "error"});
  address_ = absl::StrCat("127.0.0.1:", coordinator->WaitForLine("127.0.0.1:"));
  auto backup = Backup(Temp("b"));
  EXPECT_EQ(backup->Wait(), kExitUsage);
  EXPECT_THAT(backup->err_text(), HasSubstr("without --data_dir"));
  EXPECT_THAT(ListDirectory(temp_).value(), testing::Not(testing::Contains(HasSubstr(".part"))));
}

}  // namespace
}  // namespace muster
