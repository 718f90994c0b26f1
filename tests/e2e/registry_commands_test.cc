// `muster checkpoints` beside a coordinator that knows the job: registered, pin, unpin, promote,
// hold-back, and what list, verify and prune make of that.
#include <sys/stat.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "coordinator/service/server.h"
#include "gmock/gmock.h"
#include "proto/muster/v1/checkpoint.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/e2e/launch_fixture.h"
#include "tests/support/command.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/seal.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class RegistryCommandsTest : public LaunchFixture {
 protected:
  void SetUp() override {
    LaunchFixture::SetUp();
    const std::string key = Temp("key.pem");
    const auto made = testing_support::MakeSigningKey(key, Temp("public.pem"));
    ASSERT_EQ(made.exit_code, 0) << made.output;
    coordinator::CoordinatorServer::Options options;
    options.rpc.listen = "127.0.0.1:0";
    options.rpc.insecure = true;
    options.checkpoint_key = key;
    auto server = coordinator::CoordinatorServer::Start(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = *rpc::Connect(server_->address(), {});
    v1::JoinRequest join;
    join.mutable_fence()->set_job_id("night");
    join.mutable_fence()->set_worker_id("w0");
    join.mutable_fence()->set_incarnation(1);
    join.mutable_spec()->set_min_workers(1);
    join.mutable_spec()->set_max_workers(1);
    join.mutable_spec()->mutable_lease()->set_seconds(3600);
    join.mutable_topology()->set_host("h");
    join.mutable_topology()->set_local_world_size(1);
    v1::JoinReply reply;
    Call<v1::Rendezvous>(&v1::Rendezvous::Stub::Join, join, &reply);
    fence_ = join.fence();
    fence_.set_generation(reply.generation());
  }

  template <typename Service, typename Request, typename Reply>
  void Call(grpc::Status (Service::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
            const Request& request, Reply* reply) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Seconds(60));
    const absl::Status status =
        rpc::FromGrpc((Service::NewStub(channel_).get()->*method)(&context, request, reply));
    ASSERT_TRUE(status.ok()) << status;
  }

  std::string Numbered(int i) const { return Temp(absl::StrCat("run/checkpoints/checkpoint_", i)); }

  // Saves as a worker does: a checkpoint of one file, sealed by the coordinator.
  void Save(int number, bool hold_back = false, const std::string& registered_path = "",
            bool publishes = true) {
    const std::string dir = Numbered(number);
    auto staging = Staging::Create(dir);
    ASSERT_TRUE(staging.ok()) << staging.status();
    ASSERT_TRUE(WriteFileAtomically(JoinPath(staging->path(), "scaler.json"), "{}").ok());
    Manifest manifest;
    manifest.info.step = 10 * number;
    manifest.info.iteration = number;
    manifest.created = "2026-01-01T00:00:00Z";
    manifest.files = {{.name = "scaler.json", .rank = 0, .digest = DigestBytes("{}")}};
    ASSERT_TRUE(staging->Complete(manifest).ok());

    v1::BeginCheckpointRequest begin;
    *begin.mutable_fence() = fence_;
    begin.set_path(registered_path.empty() ? dir : registered_path);
    begin.set_staging(staging->path());
    begin.set_iteration(number);
    begin.set_step(manifest.info.step);
    begin.set_ranks(1);
    begin.set_hold_back(hold_back);
    v1::BeginCheckpointReply begun;
    Call<v1::Checkpoints>(&v1::Checkpoints::Stub::Begin, begin, &begun);
    v1::ReportShardsRequest report;
    *report.mutable_fence() = fence_;
    report.set_checkpoint_id(begun.checkpoint_id());
    report.set_last(true);
    for (const char* name : {"manifest.json", "scaler.json"}) {
      const FileDigest digest = *DigestFile(JoinPath(staging->path(), name));
      v1::ShardFile* const file = report.add_files();
      file->set_name(name);
      file->set_bytes(digest.bytes);
      file->set_xxh3(digest.xxh3);
    }
    v1::ReportShardsReply reported;
    Call<v1::Checkpoints>(&v1::Checkpoints::Stub::ReportShards, report, &reported);
    v1::SealCheckpointRequest seal;
    *seal.mutable_fence() = fence_;
    seal.set_checkpoint_id(begun.checkpoint_id());
    v1::SealCheckpointReply sealed;
    Call<v1::Checkpoints>(&v1::Checkpoints::Stub::Seal, seal, &sealed);
    const v1::CheckpointRecord& of_it = sealed.checkpoint();
    RegisteredCheckpoint record;
    record.job = "night";
    record.id = of_it.checkpoint_id();
    record.path = of_it.path();
    record.iteration = of_it.iteration();
    record.step = of_it.step();
    record.ranks = of_it.ranks();
    record.promoted = of_it.promoted();
    record.created_us = of_it.created_unix_us();
    record.files = of_it.files();
    record.bytes = of_it.bytes();
    record.files_sha256 = absl::BytesToHexString(of_it.files_sha256());
    record.previous_sha256 = absl::BytesToHexString(of_it.previous_sha256());
    record.sha256 = absl::BytesToHexString(of_it.sha256());
    record.signature = absl::BytesToHexString(of_it.signature());
    ASSERT_TRUE(WriteSeal(staging->path(), record).ok());
    ASSERT_TRUE(staging->Rename().ok());
    if (!publishes) return;
    v1::PublishCheckpointRequest publish;
    *publish.mutable_fence() = fence_;
    publish.set_checkpoint_id(begun.checkpoint_id());
    v1::PublishCheckpointReply published;
    Call<v1::Checkpoints>(&v1::Checkpoints::Stub::Publish, publish, &published);
  }

  // Runs `muster checkpoints ARGS --coordinator ...`; returns its standard output.
  std::string Run(std::vector<std::string> args, int code = 0, bool connected = true) {
    args.insert(args.begin(), "checkpoints");
    if (connected) args.insert(args.end(), {"--coordinator", server_->address()});
    auto command = Muster(args);
    EXPECT_EQ(command->Wait(), code) << command->err_text();
    error_ = command->err_text();
    return command->out_text();
  }
  Json RunJson(std::vector<std::string> args, bool connected = true) {
    args.insert(args.end(), {"-o", "json"});
    return Json::parse(Run(std::move(args), 0, connected));
  }

  std::unique_ptr<coordinator::CoordinatorServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  v1::Fence fence_;
  std::string error_;
};

// Its publication got no answer, but the folder has its name.
TEST_F(RegistryCommandsTest, MarksOfASealedOne_AreThoseOfTheFolder) {
  Save(1, /*hold_back=*/false, "", /*publishes=*/false);
  EXPECT_EQ(Run({"pin", "night", "checkpoint_1"}), Numbered(1) + " is pinned");
  EXPECT_EQ(Run({"hold-back", "night", "checkpoint_1"}), Numbered(1) + " is held back");
  const Json first = RunJson({"list", Temp("run")}, false)["checkpoints"][0]["registration"];
  EXPECT_EQ(first["by"], "seal.json");
  EXPECT_EQ(first["pinned"], true);
  EXPECT_EQ(first["promoted"], false);
}

TEST_F(RegistryCommandsTest, Marks_AreTheCoordinatorsAndThoseOfTheFolder) {
  Save(1);
  Save(2);
  Save(3, /*hold_back=*/true);
  EXPECT_EQ(Run({"pin", "night", "checkpoint_1"}), Numbered(1) + " is pinned");
  // The path ends as a shell completes it.
  EXPECT_EQ(Run({"promote", "night", Numbered(3) + "/"}), Numbered(3) + " is promoted");
  const std::string relative = std::filesystem::relative(Numbered(2)).string();
  EXPECT_EQ(Run({"hold-back", "night", relative + "/"}), Numbered(2) + " is held back");

  const Json records = RunJson({"registered", "night"});
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0]["pinned"], true);
  EXPECT_EQ(records[1]["promoted"], false);
  EXPECT_EQ(records[2]["promoted"], true);
  EXPECT_EQ(records[0]["state"], "published");
  EXPECT_EQ(records[0]["signed"], true);
  EXPECT_THAT(Run({"registered", "night"}), HasSubstr("published, pinned, signed, step 10"));

  for (const bool connected : {true, false}) {
    const Json list = RunJson({"list", Temp("run")}, connected)["checkpoints"];
    ASSERT_EQ(list.size(), 3u);
    const Json first = list[0]["registration"];
    EXPECT_EQ(first["by"], connected ? "coordinator" : "seal.json");
    EXPECT_EQ(first["state"], connected ? "published" : "sealed");
    EXPECT_EQ(first["job"], "night");
    EXPECT_EQ(first["pinned"], true);
    EXPECT_EQ(first["signed"], true);
    EXPECT_EQ(list[1]["registration"]["promoted"], false);
    EXPECT_EQ(list[2]["registration"]["promoted"], true);
  }
  EXPECT_THAT(Run({"list", Temp("run")}), AllOf(HasSubstr("published, promoted, pinned, signed"),
                                                HasSubstr("published, held back, signed")));

  // Retention by hand leaves the pinned one, and then takes it.
  const Json pruned = RunJson({"prune", Temp("run"), "--keep", "1"}, /*connected=*/false);
  EXPECT_EQ(pruned["removed"], Json::array({Numbered(2)}));
  EXPECT_EQ(pruned["pinned"], Json::array({Numbered(1)}));
  EXPECT_TRUE(PathExists(Numbered(1)));
  EXPECT_EQ(Run({"unpin", "night", "checkpoint_1"}), Numbered(1) + " is not pinned");
  EXPECT_EQ(RunJson({"prune", Temp("run"), "--keep", "1"}, false)["removed"],
            Json::array({Numbered(1)}));
}

TEST_F(RegistryCommandsTest, Verify_FindsThatTheCoordinatorSignedThem) {
  Save(1);
  Save(2);
  const std::vector<std::string> verify = {"verify", Temp("run"), "--public_key",
                                           Temp("public.pem")};
  EXPECT_THAT(Run(verify, 0, false), HasSubstr("checkpoint_2  ok, 1 file, 2 B, signed by the key"));
  RegisteredCheckpoint seal = *ReadSeal(Numbered(2));
  seal.signature[0] = seal.signature[0] == '0' ? '1' : '0';
  ASSERT_TRUE(WriteSeal(Numbered(2), seal).ok());
  EXPECT_THAT(Run(verify, 1, false), HasSubstr(Numbered(2) + " is not signed by the key of"));
}

TEST_F(RegistryCommandsTest, VerifyReport_TheCoordinatorRemembersTheVerdict) {
  Save(1);
  Save(2);
  ASSERT_TRUE(WriteFileAtomically(JoinPath(Numbered(2), "scaler.json"), "[]").ok());
  EXPECT_THAT(Run({"verify", Temp("run"), "--report"}, 1), HasSubstr("is damaged"));
  EXPECT_EQ(error_, "");
  Json records = RunJson({"registered", "night"});
  EXPECT_EQ(records[0]["verified"], "contents");
  EXPECT_EQ(records[0]["damage"], "");
  EXPECT_THAT(records[1]["damage"].get<std::string>(), HasSubstr("scaler.json: is damaged"));
  EXPECT_THAT(Run({"registered", "night"}), HasSubstr("DAMAGED ("));
  v1::ResolveCheckpointRequest resolve;
  resolve.mutable_fence()->set_job_id("night");
  v1::ResolveCheckpointReply resolved;
  Call<v1::Checkpoints>(&v1::Checkpoints::Stub::Resolve, resolve, &resolved);
  EXPECT_EQ(resolved.checkpoint().path(), Numbered(1));

  ASSERT_TRUE(WriteFileAtomically(JoinPath(Numbered(2), "scaler.json"), "{}").ok());
  Run({"verify", Numbered(2), "--report"});
  records = RunJson({"registered", "night"});
  EXPECT_EQ(records[1]["damage"], "");
  // Neither a job that is not there, nor a checkpoint that no coordinator has sealed, can be
  // reported.
  Run({"verify", Numbered(2), "--report", "--job", "day"}, 3);
  EXPECT_THAT(error_, HasSubstr("not reported: job \"day\""));
  ASSERT_TRUE(RemoveTree(JoinPath(Numbered(2), "seal.json")).ok());
  Run({"verify", Numbered(2), "--report"}, 3);
  EXPECT_THAT(error_, HasSubstr("only the coordinator that sealed a checkpoint"));
}

TEST_F(RegistryCommandsTest, MarkOfAFolderThatIsAnother_LeavesIt) {
  Save(1);
  RegisteredCheckpoint seal = *ReadSeal(Numbered(1));
  seal.sha256[0] = seal.sha256[0] == '0' ? '1' : '0';
  ASSERT_TRUE(WriteSeal(Numbered(1), seal).ok());
  EXPECT_EQ(Run({"pin", "night", "checkpoint_1"}), Numbered(1) + " is pinned");
  EXPECT_FALSE(ReadSeal(Numbered(1))->pinned);
  // A checkpoint that the coordinator does not know is not taken for registered either.
  EXPECT_EQ(RunJson({"list", Temp("run")})["checkpoints"][0]["registration"]["by"], "seal.json");
}

TEST_F(RegistryCommandsTest, Mistakes_AreOneLineEach) {
  Save(1);
  Run({"pin", "night", "checkpoint_7"}, 3);
  EXPECT_THAT(error_, HasSubstr("job night has no checkpoint checkpoint_7"));
  Run({"registered", "day"}, 3);
  EXPECT_THAT(error_, HasSubstr("day"));
  EXPECT_EQ(RunJson({"pin", "night", "checkpoint_1"})["pinned"], true);
  EXPECT_EQ(RunJson({"pin", "night", "checkpoint_1"})["pinned"], true) << "again";
  // Prints nothing that a script could take for an answer.
  for (const char* word : {"", " ", "0", "99999999999999999999", "checkpoint", "/", "\xff\n"}) {
    EXPECT_EQ(Run({"pin", "night", word, "-o", "json"}, 3), "") << word;
    EXPECT_THAT(error_, AllOf(HasSubstr("job night has no checkpoint "), Not(HasSubstr("\n"))));
  }
  EXPECT_EQ(Run({"pin", "night", "checkpoint_1", "-o", "yaml"}, 2), "");
  EXPECT_EQ(Run({"pin", "night", "checkpoint_1", "again"}, 2), "");
  EXPECT_EQ(RunJson({"unpin", "night", "checkpoint_1"})["pinned"], false);
  Run({"pin", "night"}, 2);
  EXPECT_THAT(error_, HasSubstr("write muster checkpoints pin JOB CHECKPOINT"));
  // A folder is pinned on its own.
  EXPECT_EQ(Run({"pin", Numbered(1)}, 0, false), Numbered(1) + " is pinned");
  EXPECT_TRUE(ReadSeal(Numbered(1))->pinned);
  EXPECT_EQ(Run({"unpin", Numbered(1)}, 0, false), Numbered(1) + " is not pinned");
  EXPECT_FALSE(ReadSeal(Numbered(1))->pinned);
  Run({"pin", Numbered(9)}, 3, false);
  EXPECT_THAT(error_, HasSubstr(Numbered(9) + " does not exist"));
  // Pinned so that no pin is left when the coordinator ends it.
  Run({"pin", Numbered(1)}, 0, false);
  Run({"unpin", "night", "checkpoint_1"});
  EXPECT_FALSE(ReadSeal(Numbered(1))->pinned);
  server_->Shutdown();
  Run({"registered", "night", "--timeout", "100ms"}, 7);
  Run({"list", Temp("run"), "--timeout", "100ms"}, 7);
  // Unless it is asked, list reports what the folder says.
  env_["MUSTER_COORDINATOR"] = server_->address();
  EXPECT_THAT(Run({"list", Temp("run"), "--timeout", "100ms"}, 0, false),
              HasSubstr("sealed, promoted, signed"));
  EXPECT_THAT(error_, HasSubstr("the coordinator of job night does not answer"));
}

TEST_F(RegistryCommandsTest, PathWithControlCharacters_DoesNotReachTheTerminal) {
  Save(1, false, "/data/\x1b[2Jcheckpoint_1\n");
  EXPECT_THAT(Run({"registered", "night"}),
              AllOf(HasSubstr("/data/\\x1b[2Jcheckpoint_1\\x0a"), Not(HasSubstr("\x1b"))));
  const std::string id = RunJson({"registered", "night"})[0]["id"].dump();
  EXPECT_EQ(Run({"pin", "night", id}), "/data/\\x1b[2Jcheckpoint_1\\x0a is pinned");
}

}  // namespace
}  // namespace muster
