#include "client/checkpoints/checkpoint_commands.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/signature.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "client/checkpoints/seal_marks.h"
#include "client/checkpoints/weight_diff.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/sealing.h"
#include "worker/checkpoint/staging_folder.h"

namespace {

// Runs before a file is read whose path contains `part`.
struct BeforeRead {
  char part[256] = "";
  std::function<void()> run;
  int left = 0;  // how often
};
BeforeRead before_read;

bool IsRead(int fd) {
  if (before_read.left == 0 || !muster::PathHas(fd, before_read.part)) return false;
  --before_read.left;
  before_read.run();
  return false;
}

void OnRead(const std::string& part, int times, std::function<void()> run) {
  snprintf(before_read.part, sizeof(before_read.part), "%s", part.c_str());
  before_read.run = std::move(run);
  before_read.left = times;
}

}  // namespace

MUSTER_REPLACE_READS(IsRead)

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing_support::GoldenPath;
using testing_support::TestdataPath;
using Json = nlohmann::json;

std::string Tensor(const std::string& name, const std::vector<float>& values,
                   const std::optional<SafetensorsMetadata>& metadata = std::nullopt) {
  const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  return *EncodeSafetensors(
      {{.name = name, .type = SafetensorsType::kF32, .shape = {values.size()}}}, {bytes}, metadata);
}

class CheckpointCommandsTest : public testing::Test {
 protected:
  ~CheckpointCommandsTest() override { before_read.left = 0; }
  std::string Path(const std::string& name) const { return JoinPath(root_, name); }
  std::string Numbered(int i) const { return Path("checkpoints/checkpoint_" + std::to_string(i)); }

  // Saves a checkpoint of a model and a schedule.
  void Save(const std::string& dir, const std::vector<float>& weights, int step) {
    SaveFiles(dir, step, {{"model.safetensors", Tensor("w", weights)}, {"scheduler.json", "{}"}});
  }
  void SaveFiles(const std::string& dir, int step,
                 const std::vector<std::pair<std::string, std::string>>& files) {
    auto staging = Staging::Create(dir);
    ASSERT_TRUE(staging.ok()) << staging.status();
    Manifest manifest;
    manifest.info.step = step;
    manifest.created = "2026-01-01T00:00:00Z";
    for (const auto& [name, bytes] : files) {
      ASSERT_TRUE(WriteFileAtomically(JoinPath(staging->path(), name), bytes).ok());
      manifest.files.push_back({.name = name, .rank = 0, .digest = DigestBytes(bytes)});
    }
    ASSERT_TRUE(staging->Publish(manifest).ok());
  }
  // Seals like a coordinator; signed by the key of this PEM, if any.
  RegisteredCheckpoint Seal(const std::string& dir, const std::string& key, bool promoted = true,
                            bool pinned = false) {
    const Manifest manifest = *ReadManifest(dir);
    RegisteredCheckpoint record;
    record.job = "night";
    record.promoted = promoted;
    record.pinned = pinned;
    record.path = dir;
    record.step = manifest.info.step;
    record.iteration = manifest.info.iteration;
    std::string lines;
    const FileDigest own = *DigestFile(JoinPath(dir, kManifestName));
    absl::StrAppend(&lines, "manifest.json\t", own.bytes, "\t", own.xxh3, "\n");
    for (const ManifestFile& file : manifest.files) {
      absl::StrAppend(&lines, file.name, "\t", file.digest.bytes, "\t", file.digest.xxh3, "\n");
    }
    record.files_sha256 = absl::BytesToHexString(Sha256(lines));
    const std::string sha256 = Sha256(SealText(record));
    record.sha256 = absl::BytesToHexString(sha256);
    if (!key.empty()) {
      record.signature = absl::BytesToHexString(SigningKey::Parse(key, "key")->Sign(sha256));
    }
    EXPECT_TRUE(WriteSeal(dir, record).ok());
    return record;
  }
  // Returns the PEM of a new private key; its public key is in the file `public_file`.
  std::string NewKey(const std::string& public_file) {
    const std::string file = Path("key.pem");
    const std::string make = "openssl genpkey -algorithm ed25519 -out " + file +
                             " && openssl pkey -in " + file + " -pubout -out " + public_file;
    EXPECT_EQ(std::system(make.c_str()), 0);
    return *ReadFile(file);
  }
  void Damage(const std::string& path) {
    std::string bytes = *ReadFile(path);
    bytes.back() ^= 1;
    ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
  }

  int Run(const std::vector<std::string>& args) {
    out_.str("");
    err_.str("");
    const CommandContext context{{}, out_, err_};
    if (args[0] == "merge-weights") {
      return RunMergeWeightsCommand({args.begin() + 1, args.end()}, context);
    }
    return RunCheckpointsCommand(args, context);
  }
  Json RunJson(std::vector<std::string> args, int code = kExitOk) {
    args.insert(args.end(), {"-o", "json"});
    EXPECT_EQ(Run(args), code) << err_.str();
    return Json::parse(out_.str());
  }
  // Expects one line that names the command and contains `words`.
  void ExpectRefused(const std::vector<std::string>& args, int code, const std::string& words) {
    EXPECT_EQ(Run(args), code) << out_.str();
    const std::string text = err_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_THAT(text, HasSubstr(words));
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.path();
  std::ostringstream out_, err_;
};

TEST_F(CheckpointCommandsTest, List_ShowsEachWithItsState) {
  Save(Numbered(1), {1}, 10);
  Save(Numbered(2), {2}, 20);
  ASSERT_TRUE(MakeDirectories(Numbered(3)).ok());
  ASSERT_TRUE(RemoveTree(JoinPath(Numbered(1), "scheduler.json")).ok());
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_2  step 20  epoch 0  1 process  2 files  "));
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_1  damaged: "));
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_3  incomplete: "));
  const Json json = RunJson({"list", Path("checkpoints")});
  ASSERT_EQ(json["checkpoints"].size(), 3u);
  EXPECT_EQ(json["checkpoints"][1]["step"], 20);
  EXPECT_EQ(json["checkpoints"][1]["state"], "complete");
  ExpectRefused({"list", Path("nothing")}, kExitNotFound, "does not exist");
}

// For options.project.save_on_each_node: files on other nodes are not damage.
TEST_F(CheckpointCommandsTest, PartOfANode_IsNotDamaged_AndPruneLeavesIt) {
  const std::string model = Tensor("w", {1, 2}), random = Tensor("cpu", {3});
  // `node`: 0 has the model, 1 the random state of rank 1.
  const auto save_part = [&](const std::string& dir, int node) {
    auto staging = Staging::Create(dir);
    ASSERT_TRUE(staging.ok()) << staging.status();
    const Manifest manifest = {
        .info = {.world_size = 2, .step = 5},
        .created = "2026-01-01T00:00:00Z",
        .files = {{.name = "model.safetensors", .rank = 0, .digest = DigestBytes(model)},
                  {.name = "random_states_1.safetensors",
                   .rank = 1,
                   .digest = DigestBytes(random)}},
        .nodes = {{.host = "gpu-1", .ranks = {0}}, {.host = "gpu-2", .ranks = {1}}}};
    const ManifestFile& file = manifest.files[node];
    ASSERT_TRUE(
        WriteFileAtomically(JoinPath(staging->path(), file.name), node == 0 ? model : random).ok());
    const auto here = [&](const ManifestFile& one) { return one.name == file.name; };
    ASSERT_TRUE(staging->Prepare(manifest, here).ok());
    ASSERT_TRUE(staging->Commit().ok());
    ASSERT_TRUE(staging->Finish().ok());
  };
  save_part(Numbered(0), 0);
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("step 5  epoch 0  2 processes  1 of 2 files"));
  EXPECT_THAT(out_.str(), HasSubstr("; node gpu-2 (rank 1) has the others\n"));
  EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
  EXPECT_THAT(out_.str(), HasSubstr("  ok, 1 of 2 files, "));
  EXPECT_EQ(Run({"verify", root_, "-o", "json"}), kExitOk);
  const Json verified = Json::parse(out_.str())["checkpoints"][0];
  EXPECT_EQ(verified["state"], "part");
  EXPECT_EQ(verified["files"], 1);
  EXPECT_EQ(verified["elsewhere"]["files"], Json::array({"random_states_1.safetensors"}));
  EXPECT_EQ(Run({"inspect", Numbered(0)}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("by rank 1, not here\nmodel.safetensors: w  F32 [2]\n"));
  EXPECT_EQ(Run({"diff", Numbered(0), Numbered(0)}), kExitOk) << out_.str();
  EXPECT_EQ(Run({"prune", root_, "--keep", "1"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("is one node's part of a checkpoint"));
  EXPECT_THAT(err_.str(), Not(HasSubstr("remove this checkpoint first")));
  // The model is in this part.
  EXPECT_EQ(Run({"export", Numbered(0), Path("out")}), kExitOk) << err_.str();
  Damage(JoinPath(Numbered(0), "model.safetensors"));
  EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr("model.safetensors: is damaged"));

  save_part(Path("other"), 1);
  EXPECT_EQ(Run({"verify", Path("other")}), kExitOk);
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"export", Path("other"), Path("out2")},
        {"merge-weights", Path("other"), Path("out2")}}) {
    EXPECT_EQ(Run(command), kExitUsage);
    EXPECT_THAT(err_.str(), HasSubstr("it lacks model.safetensors, which node gpu-1 (rank 0) "
                                      "wrote to a disk of its own"));
    EXPECT_THAT(err_.str(), Not(HasSubstr("earlier checkpoint")));
  }
}

// As after save_state("epoch_0"), and "step_5" beside numbered checkpoints.
TEST_F(CheckpointCommandsTest, NamesOfTheProgram_AreListedAndVerified) {
  Save(Path("run/step_20"), {1}, 20);
  Save(Path("run/epoch_0"), {1}, 10);
  ASSERT_TRUE(MakeDirectories(Path("run/step_30.tmp-0123456789abcdef")).ok());
  ASSERT_TRUE(MakeDirectories(Path("run/logs")).ok());
  const auto names = [&](const std::string& command) {
    const Json json = RunJson({command, Path("run")});
    std::vector<std::string> names;
    for (const Json& checkpoint : json["checkpoints"]) {
      names.push_back(std::string(BaseName(checkpoint["path"].get<std::string>())));
    }
    return names;
  };
  EXPECT_THAT(names("list"), ElementsAre("epoch_0", "step_20"));
  EXPECT_THAT(names("verify"), ElementsAre("epoch_0", "step_20"));
  Save(Path("run/checkpoints/checkpoint_0"), {1}, 15);
  EXPECT_THAT(names("list"), ElementsAre("checkpoint_0", "epoch_0", "step_20"));
  // Retention counts only numbered checkpoints, and removes no other one beside them.
  Save(Path("run/checkpoints/best"), {1}, 5);
  Save(Path("run/checkpoints/epoch_999"), {1}, 15);
  Save(Path("run/checkpoints/checkpoint_1"), {1}, 25);
  EXPECT_EQ(RunJson({"prune", Path("run"), "--keep", "1"})["removed"],
            Json({Path("run/checkpoints/checkpoint_0")}));
  EXPECT_THAT(names("list"), ElementsAre("checkpoint_1", "epoch_0", "step_20"));
  EXPECT_TRUE(PathExists(Path("run/checkpoints/best/manifest.json")));
  EXPECT_TRUE(PathExists(Path("run/checkpoints/epoch_999/manifest.json")));
  Damage(Path("run/epoch_0/model.safetensors"));
  EXPECT_EQ(Run({"verify", Path("run")}), kExitJobFailed);
}

TEST_F(CheckpointCommandsTest, RunningSave_IsListedButIsNoCheckpoint) {
  ASSERT_TRUE(MakeDirectories(root_).ok());
  ExpectRefused({"list", root_}, kExitNotFound, "holds no checkpoint_0");
  std::optional<Staging> first(*Staging::Create(Numbered(0)));
  // The first save of a run.
  EXPECT_EQ(Run({"list", root_}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_0.tmp-"));
  ExpectRefused({"verify", root_}, kExitNotFound, "holds no checkpoint_0");
  ExpectRefused({"prune", root_, "--keep", "1"}, kExitNotFound, "holds no checkpoint_0");
  first.reset();

  for (int i = 0; i < 2; ++i) Save(Numbered(i), {1}, i);
  EXPECT_EQ(RunJson({"list", root_})["unfinished"], Json::array());
  auto staging = Staging::Create(Numbered(2));
  ASSERT_TRUE(staging.ok()) << staging.status();
  ASSERT_TRUE(
      WriteFileAtomically(JoinPath(staging->path(), "scheduler.json"), std::string(9000, ' '))
          .ok());
  for (const std::string& path : {root_, Path("checkpoints")}) {
    const Json json = RunJson({"list", path});
    ASSERT_EQ(json["checkpoints"].size(), 2u);
    ASSERT_EQ(json["unfinished"].size(), 1u);
    const Json save = json["unfinished"][0];
    EXPECT_EQ(save["path"], staging->path());
    EXPECT_EQ(save["checkpoint"], Numbered(2));
    EXPECT_EQ(save["state"], "saving");
    EXPECT_EQ(save["sealed"], false);
    EXPECT_GE(save["bytes"], 9000);
    EXPECT_GE(save["age_s"], 0);
  }
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr(staging->path() + "  no checkpoint yet, being saved  "));
  // Nothing else takes it for a checkpoint, and nothing removes it.
  EXPECT_EQ(RunJson({"verify", root_})["checkpoints"].size(), 2u);
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "1"})["removed"], Json({Numbered(0)}));
  EXPECT_TRUE(PathExists(JoinPath(staging->path(), "scheduler.json")));
  Manifest manifest;
  manifest.files = {{.name = "scheduler.json",
                     .rank = 0,
                     .digest = *DigestFile(JoinPath(staging->path(), "scheduler.json"))}};
  ASSERT_TRUE(staging->Publish(manifest).ok());
  const Json json = RunJson({"list", root_});
  EXPECT_EQ(json["checkpoints"].size(), 2u);
  EXPECT_EQ(json["unfinished"], Json::array());
}

TEST_F(CheckpointCommandsTest, SaveOfAnotherName_IsListedByIt) {
  auto staging = Staging::Create(Path("best"));
  ASSERT_TRUE(staging.ok()) << staging.status();
  EXPECT_EQ(RunJson({"list", Path("best")})["unfinished"][0]["path"], staging->path());
  Save(Path("best"), {1}, 1);
  const Json json = RunJson({"list", Path("best")});
  EXPECT_EQ(json["checkpoints"].size(), 1u);
  EXPECT_EQ(json["unfinished"].size(), 1u);
}

// Nothing else ever shows that it exists.
TEST_F(CheckpointCommandsTest, NamedSaveThatAsksForItsSeal_IsListedForItsFolder) {
  const std::string left = Path("best.tmp-0123456789abcdef");
  ASSERT_TRUE(MakeDirectories(left).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(left, "scheduler.json"), "{}").ok());
  EXPECT_EQ(Run({"list", Path("best")}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("; the next save of best removes it  "));
  ASSERT_TRUE(WriteFileAtomically(JoinPath(left, kSealingName), "{}").ok());
  const Json save = RunJson({"list", root_})["unfinished"][0];
  EXPECT_EQ(save["path"], left);
  EXPECT_EQ(save["asked"], true);
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("of that job asks; where there is none any more, remove it by "
                                    "hand  "));
  for (int i = 0; i < 3; ++i) Save(Numbered(i), {1}, i);
  Run({"prune", root_, "--keep", "1"});
  EXPECT_TRUE(PathExists(left));
}

// No load, save or prune renames a save whose name the program chose, except a load whose
// coordinator has its record.
TEST_F(CheckpointCommandsTest, SealedSaveOfANamedOne_ListSaysHowToLoadIt) {
  const std::string left = Path("best.tmp-0123456789abcdef");
  Save(Path("best"), {1}, 1);
  Seal(Path("best"), "");
  ASSERT_EQ(rename(Path("best").c_str(), left.c_str()), 0);
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr(left + "  no checkpoint yet, abandoned: its process has ended; "
                                           "it is sealed: load it by this folder, or rename that "
                                           "to best  "));
}

TEST_F(CheckpointCommandsTest, AbandonedSave_IsListedWithItsAge_AndPruneLeavesIt) {
  Save(Numbered(0), {1}, 0);
  const std::string left = Numbered(1) + ".tmp-0123456789abcdef";
  ASSERT_TRUE(MakeDirectories(left).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(left, "scheduler.json"), "{}").ok());
  const timespec hours_ago = absl::ToTimespec(absl::Now() - absl::Minutes(125));
  const timespec times[2] = {hours_ago, hours_ago};
  for (const std::string& path : {JoinPath(left, "scheduler.json"), left}) {
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  }
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr(left + "  no checkpoint yet, abandoned: its process has ended; "
                                           "the next save removes it  "));
  EXPECT_THAT(out_.str(), HasSubstr("changed 2h05m ago\n"));
  EXPECT_EQ(RunJson({"list", root_})["unfinished"][0]["state"], "abandoned");
  ASSERT_TRUE(WriteFileAtomically(JoinPath(left, kSealName), "{}").ok());
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(),
              HasSubstr("it is sealed: the next load or save, or muster checkpoints prune, may "
                        "give it its name"));
  EXPECT_EQ(Run({"prune", root_, "--keep", "1"}), kExitOk) << err_.str();
  EXPECT_THAT(err_.str(), HasSubstr("which it does not get: " + left +
                                    " is not a complete checkpoint: it has no manifest.json"));
  EXPECT_TRUE(PathExists(left));
}

// Its process ended between the seal and the rename, and a load may never happen.
TEST_F(CheckpointCommandsTest, SealedOneThatLacksItsName_IsVerified_AndNamedByPrune) {
  const auto take_name_away = [&](int number, const std::string& digits) {
    Seal(Numbered(number), "");
    const std::string left = Numbered(number) + ".tmp-" + digits;
    EXPECT_EQ(rename(Numbered(number).c_str(), left.c_str()), 0);
    return left;
  };
  for (int i = 0; i < 3; ++i) Save(Numbered(i), {1}, i);
  const std::string left = take_name_away(2, "0123456789abcdef");
  EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
  EXPECT_THAT(out_.str(), HasSubstr(left + "  ok, 2 files, "));
  EXPECT_THAT(out_.str(), HasSubstr(", lacks only the name " + Numbered(2) + "\n"));
  Json json = RunJson({"verify", root_});
  EXPECT_EQ(json["checkpoints"].size(), 3u);
  EXPECT_EQ(json["checkpoints"][2]["path"], left);
  EXPECT_EQ(json["checkpoints"][2]["lacks_name"], Numbered(2));
  // By its final name, too.
  EXPECT_EQ(Run({"verify", Numbered(2)}), kExitOk) << err_.str();
  Damage(JoinPath(left, "model.safetensors"));
  EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr(left + "  damaged: "));
  EXPECT_EQ(Run({"prune", root_, "--keep", "3"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("does not get: " + left + "/model.safetensors: is damaged"));
  Damage(JoinPath(left, "model.safetensors"));

  // Not while its process lives.
  {
    const OwnedFd lock(LockFolder(left));
    ASSERT_TRUE(lock.open());
    EXPECT_EQ(RunJson({"verify", root_})["checkpoints"].size(), 2u);
    EXPECT_EQ(RunJson({"prune", root_, "--keep", "3"})["named"].size(), 0u);
    EXPECT_TRUE(PathExists(left));
  }
  EXPECT_EQ(Run({"prune", root_, "--keep", "2", "--dry_run"}), kExitOk);
  EXPECT_EQ(out_.str(), "would name " + Numbered(2) +
                            ", which was sealed when its process ended\n" + "would remove " +
                            Numbered(0) + "\n");
  EXPECT_TRUE(PathExists(left));
  json = RunJson({"prune", root_, "--keep", "2"});
  EXPECT_EQ(json["named"], Json({Numbered(2)}));
  EXPECT_EQ(json["removed"], Json({Numbered(0)}));
  EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
  EXPECT_TRUE(PathExists(Numbered(2)));

  // Another program has saved under that name.
  const std::string again = take_name_away(1, "fedcba9876543210");
  Save(Numbered(1), {2}, 7);
  Manifest older = *ReadManifest(Numbered(1));
  older.created = "1999-01-01T00:00:00Z";
  ASSERT_TRUE(
      WriteFileAtomically(JoinPath(Numbered(1), kManifestName), *EncodeManifest(older)).ok());
  EXPECT_EQ(Run({"prune", root_, "--keep", "2"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("does not get: another checkpoint has that name"));
  EXPECT_EQ(ReadManifest(Numbered(1))->info.step, 7);
  EXPECT_TRUE(PathExists(again));
}

// Concurrent loads wait only some seconds for a writer, and reading a large checkpoint takes
// minutes.
TEST_F(CheckpointCommandsTest, Prune_LocksNothingWhileItReads) {
  Save(Numbered(0), {1}, 0);
  Seal(Numbered(0), "");
  const std::string left = Numbered(0) + ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(Numbered(0).c_str(), left.c_str()), 0);
  int read = 0;
  OnRead("/model.safetensors", 1000, [&] {
    ++read;
    EXPECT_TRUE(!PathExists(left) || WriterOf(left) == FolderWriter::kGone);
  });
  EXPECT_EQ(Run({"prune", root_, "--keep", "1"}), kExitOk) << err_.str();
  EXPECT_GT(read, 0);
  EXPECT_TRUE(PathExists(Numbered(0)));
}

TEST_F(CheckpointCommandsTest, SealedOneThatGetsItsNameWhileOthersAreRead_IsVerified) {
  const std::string left = Numbered(2) + ".tmp-0123456789abcdef";
  const auto take_name_away = [&] { ASSERT_EQ(rename(Numbered(2).c_str(), left.c_str()), 0); };
  const auto give_name = [&] { ASSERT_EQ(rename(left.c_str(), Numbered(2).c_str()), 0); };
  Save(Numbered(2), {2}, 2);
  Seal(Numbered(2), "");
  for (const bool alone : {true, false}) {
    SCOPED_TRACE(alone);
    if (!alone) Save(Numbered(1), {1}, 1);
    for (const char* moment : {".tmp-0123456789abcdef/manifest.json", "checkpoint_1/"}) {
      if (alone && moment != std::string(".tmp-0123456789abcdef/manifest.json")) continue;
      SCOPED_TRACE(moment);
      take_name_away();
      OnRead(moment, 1, give_name);
      const Json json = RunJson({"verify", root_})["checkpoints"];
      EXPECT_EQ(before_read.left, 0);
      ASSERT_EQ(json.size(), alone ? 1u : 2u);
      EXPECT_EQ(json.back()["path"], Numbered(2));
      EXPECT_EQ(json.back()["state"], "complete");
      // It is read in its current place.
      Damage(JoinPath(Numbered(2), "model.safetensors"));
      take_name_away();
      OnRead(moment, 1, give_name);
      EXPECT_EQ(Run({"verify", root_}), kExitJobFailed) << out_.str();
      Damage(JoinPath(Numbered(2), "model.safetensors"));
    }
  }
  // Nothing is left to verify.
  ASSERT_TRUE(RemoveTree(Numbered(1)).ok());
  take_name_away();
  OnRead(".tmp-0123456789abcdef/manifest.json", 1, [&] { (void)RemoveTree(left); });
  ExpectRefused({"verify", root_}, kExitNotFound, "were removed while they were read");
}

TEST_F(CheckpointCommandsTest, PruneDryRun_SaysWhatIsNamed) {
  const auto take_name_away = [&](const std::string& digits) {
    Seal(Numbered(1), "");
    const std::string left = Numbered(1) + ".tmp-" + digits;
    EXPECT_EQ(rename(Numbered(1).c_str(), left.c_str()), 0);
    return left;
  };
  // There is no other checkpoint.
  Save(Numbered(1), {1}, 1);
  const std::string left = take_name_away("0123456789abcdef");
  const Json only = RunJson({"prune", root_, "--keep", "1", "--dry_run"});
  EXPECT_EQ(only["named"], Json({Numbered(1)}));
  EXPECT_EQ(only["removed"], Json::array());
  // Two saves have the same number: one gets the name.
  Save(Path("again"), {2}, 2);
  ASSERT_EQ(rename(Path("again").c_str(), Numbered(1).c_str()), 0);
  take_name_away("fedcba9876543210");
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "1", "--dry_run"})["named"], Json({Numbered(1)}));
  EXPECT_THAT(err_.str(), HasSubstr("another checkpoint has that name"));
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "1"})["named"], Json({Numbered(1)}));
}

// Done by a job that continues to train.
TEST_F(CheckpointCommandsTest, RemovedOrReplacedWhileItIsRead_IsNoDamage) {
  for (int number = 0; number < 3; ++number) Save(Numbered(number), {1.0f * number}, number);
  OnRead("checkpoint_0/model", 1, [&] { EXPECT_TRUE(RemoveCheckpoint(Numbered(0)).ok()); });
  EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
  EXPECT_THAT(out_.str(), Not(HasSubstr("checkpoint_0")));
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_2  ok"));
  // Numbered checkpoints are read after the others.
  const std::string best = Path("best"), next = Path("elsewhere/next");
  for (const std::string part : {"best/manifest", "best/model", "checkpoint_2/model"}) {
    SCOPED_TRACE(part);
    Save(best, {4}, 4);
    Seal(best, "");
    Save(next, {5, 6}, 5);
    Seal(next, "");
    OnRead(part, 1, [&] { EXPECT_TRUE(PutInPlace(next, best).ok()); });
    EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
    EXPECT_THAT(out_.str(), HasSubstr("best  ok"));
  }
  // The record is compared with the folder when all have been read.
  for (int number = 0; number < 3; ++number) {
    Save(Numbered(number), {1.0f * number}, number);
    Seal(Numbered(number), "");
  }
  OnRead("checkpoint_2/model", 1, [&] { EXPECT_TRUE(RemoveCheckpoint(Numbered(1)).ok()); });
  EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_0  ok"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("checkpoint_1")));
}

// For example on a read-only disk: it is the only copy.
TEST_F(CheckpointCommandsTest, OneThatIsAsideAndCannotBePutBack_IsNotLeftOut) {
  Save(Numbered(0), {1}, 1);
  std::string aside;
  for (const char* const digits : {"0123456789abcdef", "fedcba9876543210"}) {
    Save(Path("former"), {7}, 7);
    aside = absl::StrCat(Numbered(1), ".old-", digits);
    ASSERT_EQ(rename(Path("former").c_str(), aside.c_str()), 0);
  }
  // It cannot be read which of the two is newer.
  const std::string manifest = JoinPath(aside, kManifestName);
  ASSERT_EQ(unlink(manifest.c_str()), 0);
  ASSERT_EQ(symlink(kManifestName, manifest.c_str()), 0);
  EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_1  "));
  EXPECT_NE(Run({"prune", root_, "--keep", "1"}), kExitOk);
}

// No coordinator may ever be asked whether it is sealed.
TEST_F(CheckpointCommandsTest, OneThatOnlyACoordinatorKnows_GoesWithTheCheckpointsOfItsAge) {
  for (int number = 0; number < 4; ++number) Save(Numbered(number), {1.0f * number}, number);
  const std::string left = Numbered(1) + ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(Numbered(1).c_str(), left.c_str()), 0);
  ASSERT_TRUE(BeginSealing(left, {.job = "launch", .id = 7}, 10).ok());
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "3"})["removed"], Json::array());
  EXPECT_TRUE(PathExists(left));
  const Json removed = {Numbered(0), left};
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "2", "--dry_run"})["removed"], removed);
  EXPECT_TRUE(PathExists(left));
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "2"})["removed"], removed);
  EXPECT_FALSE(PathExists(left));
}

// It was to replace that checkpoint when it crashed.
TEST_F(CheckpointCommandsTest, Prune_GivesNoNameOfOneThatIsAside) {
  Save(Numbered(1), {1}, 1);
  Seal(Numbered(1), "");
  const std::string left = Numbered(1) + ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(Numbered(1).c_str(), left.c_str()), 0);
  Save(Path("former"), {7}, 7);
  const std::string aside = Numbered(1) + ".old-0123456789abcdef";
  ASSERT_EQ(rename(Path("former").c_str(), aside.c_str()), 0);
  EXPECT_EQ(Run({"prune", root_, "--keep", "1"}), kExitOk) << err_.str();
  EXPECT_THAT(err_.str(), HasSubstr("does not get: " + aside));
  EXPECT_TRUE(PathExists(left));
  EXPECT_EQ(ReadManifest(Numbered(1))->info.step, 7) << "it was put back";
}

TEST_F(CheckpointCommandsTest, VerifyWithAPublicKey_WantsEveryCheckpointSignedByIt) {
  const std::string key = NewKey(Path("public.pem")), other = NewKey(Path("other.pem"));
  Save(Numbered(0), {1}, 10);
  Save(Numbered(1), {2}, 20);
  Seal(Numbered(0), key);
  Seal(Numbered(1), key);
  const std::vector<std::string> verify = {"verify", root_, "--public_key", Path("public.pem")};
  EXPECT_EQ(Run(verify), kExitOk) << out_.str() << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_1  ok, 2 files, "));
  EXPECT_THAT(out_.str(), HasSubstr("signed by the key of " + Path("public.pem")));
  EXPECT_EQ(RunJson(verify)["checkpoints"][0]["signed_by_key"], true);

  Seal(Numbered(1), "");
  EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
  EXPECT_EQ(Run(verify), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr(Numbered(1) + "  untrusted: " + Numbered(1) +
                                    " is not signed: the coordinator that sealed it had no key"));
  const Json json = RunJson(verify, kExitJobFailed);
  EXPECT_EQ(json["checkpoints"][0]["signed_by_key"], true);
  EXPECT_EQ(json["checkpoints"][1]["signed_by_key"], false);
  EXPECT_EQ(json["checkpoints"][1]["state"], "untrusted");

  Seal(Numbered(1), other);
  EXPECT_EQ(Run(verify), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr(Numbered(1) + " is not signed by the key of "));
  ASSERT_TRUE(RemoveTree(JoinPath(Numbered(1), kSealName)).ok());
  EXPECT_EQ(Run(verify), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr(Numbered(1) + " is not signed: it has no seal.json"));

  ExpectRefused({"verify", root_, "--public_key", Path("key.pem")}, kExitUsage,
                "holds the private key");
  ExpectRefused({"verify", root_, "--public_key", Path("nothing")}, kExitNotFound, "nothing");
  // This has nothing to do with the room on the disk.
  ASSERT_TRUE(WriteFileAtomically(Path("large.pem"), std::string(1 << 20, 'x')).ok());
  ExpectRefused({"verify", root_, "--public_key", Path("large.pem")}, kExitUsage, "is larger than");
}

TEST_F(CheckpointCommandsTest, Verify_FindsARecordThatWasChangedOrIsOfAnotherCheckpoint) {
  Save(Numbered(0), {1}, 10);
  Save(Numbered(1), {2}, 20);
  Seal(Numbered(0), "");
  RegisteredCheckpoint record = Seal(Numbered(1), "");
  EXPECT_EQ(Run({"verify", root_}), kExitOk) << out_.str();
  record.step = 30;
  ASSERT_TRUE(WriteSeal(Numbered(1), record).ok());
  EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr(JoinPath(Numbered(1), kSealName) + " was changed"));
  ASSERT_TRUE(WriteSeal(Numbered(1), *ReadSeal(Numbered(0))).ok());
  EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr(Numbered(1) + " is not the checkpoint that its seal.json"));
  ASSERT_TRUE(WriteFileAtomically(JoinPath(Numbered(1), kSealName), "{").ok());
  EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr("untrusted: " + JoinPath(Numbered(1), kSealName)));
}

TEST_F(CheckpointCommandsTest, Inspect_ShowsFilesAndTensorsOfEveryFormat) {
  Save(Numbered(0), {1, 2, 3}, 5);
  const Json json = RunJson({"inspect", Numbered(0)});
  EXPECT_EQ(json["files"].size(), 2u);
  EXPECT_EQ(json["tensors"][0], Json({{"file", "model.safetensors"},
                                      {"name", "w"},
                                      {"dtype", "F32"},
                                      {"shape", {3}},
                                      {"bytes", 12}}));
  EXPECT_EQ(Run({"inspect", TestdataPath("torch_files/layouts.bin")}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("layouts.bin: transposed  F32 [6, 4]\n"));
  ExpectRefused({"inspect", TestdataPath("torch_files/evil.bin")}, kExitUsage, "posix.system");
}

// The files may come from anyone.
TEST_F(CheckpointCommandsTest, NamesInFiles_DoNotControlTheTerminal) {
  SaveFiles(Numbered(0), 1, {{"model.safetensors", Tensor("\x1b[2Jw", {1})}});
  SaveFiles(Numbered(1), 1, {{"model.safetensors", Tensor("\x1b[2Jv", {1})}});
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"inspect", Numbered(0)}, {"diff", Numbered(0), Numbered(1)}}) {
    Run(args);
    EXPECT_THAT(out_.str(), HasSubstr("model.safetensors: \\x1b[2Jw"));
    EXPECT_THAT(out_.str(), Not(HasSubstr("\x1b")));
  }
  EXPECT_EQ(RunJson({"inspect", Numbered(0)})["tensors"][0]["name"], "\x1b[2Jw");
}

TEST_F(CheckpointCommandsTest, Verify_NamesTheDamagedFile) {
  Save(Numbered(0), {1}, 1);
  Save(Numbered(1), {2}, 2);
  EXPECT_EQ(Run({"verify", root_}), kExitOk);
  Damage(JoinPath(Numbered(1), "model.safetensors"));
  EXPECT_EQ(Run({"verify", root_, "--sizes"}), kExitOk);
  EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr("checkpoint_0  ok, 2 files"));
  EXPECT_THAT(out_.str(), HasSubstr("model.safetensors: is damaged"));
  EXPECT_EQ(RunJson({"verify", Numbered(1)}, kExitJobFailed)["checkpoints"][0]["state"], "damaged");
}

TEST_F(CheckpointCommandsTest, Diff_CountsElementsAndTheLargestDistance) {
  Save(Numbered(0), {1, 2, 3}, 1);
  Save(Numbered(1), {1, 2.5, 2}, 2);
  EXPECT_EQ(Run({"diff", Numbered(0), Numbered(0)}), kExitOk);
  EXPECT_EQ(Run({"diff", Numbered(0), Numbered(1)}), kExitJobFailed);
  EXPECT_THAT(out_.str(),
              HasSubstr("model.safetensors: w  2 of 3 elements differ, by at most 1\n"));
  const Json json = RunJson({"diff", Numbered(0), Numbered(1)}, kExitJobFailed);
  EXPECT_EQ(json["differences"][0]["largest"], 1);
  // Weights alone, on either side, are compared with the model.
  const std::string model = JoinPath(Numbered(1), "model.safetensors");
  EXPECT_EQ(Run({"diff", Numbered(1), model}), kExitOk) << out_.str();
  EXPECT_EQ(Run({"diff", model, Numbered(0)}), kExitJobFailed);
  EXPECT_EQ(Run({"diff", TestdataPath("torch_files/types.bin"),
                 TestdataPath("torch_files/types.safetensors")}),
            kExitOk)
      << out_.str();
  EXPECT_EQ(Run({"diff", TestdataPath("torch_files/types.bin"), model}), kExitJobFailed);
  EXPECT_THAT(out_.str(), HasSubstr("w  only in the second"));
}

// A few bytes may claim to be terabytes.
TEST_F(CheckpointCommandsTest, Diff_OfAViewThatRepeatsItself_TakesNoTimeAndNoMemory) {
  const std::string expanded = TestdataPath("torch_files/expanded.bin");
  EXPECT_EQ(Run({"diff", expanded, expanded}), kExitOk) << err_.str();
  const auto files = WeightFiles::Open(expanded);
  ASSERT_TRUE(files.ok()) << files.status();
  const WeightFiles::Entry& view = files->entries()[0];
  WeightFiles::Entry other = view;
  other.tensor.strides.clear();
  EXPECT_TRUE(CompareTensors(*files, view, *files, view)->equal);
  const auto difference = CompareTensors(*files, view, *files, other);
  ASSERT_TRUE(difference.ok()) << difference.status();
  EXPECT_FALSE(difference->equal);
  EXPECT_THAT(difference->not_compared, HasSubstr("not compared: a view of"));
}

std::string Little(uint64_t value, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i, value >>= 8) bytes += static_cast<char>(value & 0xff);
  return bytes;
}

// Returns a file of torch.save with views, with these strides, each dimension of size 64, of 190
// numbers that equal `value`.
std::string TorchFile(const std::vector<std::pair<std::string, std::vector<uint64_t>>>& views,
                      char value) {
  const auto text = [](const std::string& name) { return "X" + Little(name.size(), 4) + name; };
  const auto tuple = [](const std::vector<uint64_t>& values) {
    std::string bytes = "(";
    for (const uint64_t one : values) bytes += "K" + Little(one, 1);
    return bytes + "t";
  };
  std::string pickle = "\x80\x02}(";
  for (const auto& [name, strides] : views) {
    pickle += text(name) + "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") +
              "ctorch\nByteStorage\n" + text("0") + text("cpu") + "K\xbetQK";
    pickle += '\0';
    pickle += tuple(std::vector<uint64_t>(strides.size(), 64)) + tuple(strides) +
              "\x89"
              "ccollections\nOrderedDict\n)RtR";
  }
  pickle += "u.";
  const std::string members[2][2] = {{"a/data.pkl", pickle}, {"a/data/0", std::string(190, value)}};
  std::string file, directory;
  for (const auto& [name, contents] : members) {
    const std::string sizes = Little(0, 16) + Little(contents.size(), 4) +
                              Little(contents.size(), 4) + Little(name.size(), 2);
    directory += "PK\x01\x02" + Little(0, 2) + sizes.substr(2) + Little(0, 12) +
                 Little(file.size(), 4) + name;
    file += "PK\x03\x04" + sizes.substr(2) + Little(0, 2) + name + contents;
  }
  return file + directory + "PK\x05\x06" + Little(0, 4) + Little(2, 2) + Little(2, 2) +
         Little(directory.size(), 4) + Little(file.size(), 4) + Little(0, 2);
}

// One tensor that cannot be compared does not keep the others from being compared.
TEST_F(CheckpointCommandsTest, Diff_OfOneViewBeyondMeasure_SaysSoOfThatOneAndComparesTheOthers) {
  const std::vector<uint64_t> first = {1, 0, 1, 0, 1, 0}, last = {0, 1, 0, 1, 0, 1};
  const std::string a = Path("a.bin"), b = Path("b.bin");
  ASSERT_TRUE(WriteFileAtomically(a, TorchFile({{"view", first}, {"w", {1}}, {"x", {0}}}, 1)).ok());
  ASSERT_TRUE(WriteFileAtomically(b, TorchFile({{"view", last}, {"w", {1}}, {"x", {1}}}, 1)).ok());
  EXPECT_EQ(Run({"diff", a, b}), kExitJobFailed) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("view  not compared: a view of 68719476736 bytes, of which "));
  EXPECT_THAT(out_.str(), HasSubstr("2 tensors equal, 1 difference\n"));
  const Json json = RunJson({"diff", a, b}, kExitJobFailed);
  EXPECT_EQ(json["equal"], false);
  EXPECT_EQ(json["differences"][0]["what"], "not_compared");
  EXPECT_EQ(json["differences"][0]["name"], "view");
}

// In any order of memory, and larger than one part.
TEST_F(CheckpointCommandsTest, Diff_OfLargeTensors_GoesPartByPart) {
  std::vector<float> values(600'000, 1);
  Save(Numbered(0), values, 1);
  values.back() = 3;
  Save(Numbered(1), values, 1);
  EXPECT_EQ(Run({"diff", Numbered(0), Numbered(0)}), kExitOk);
  EXPECT_EQ(Run({"diff", Numbered(0), Numbered(1)}), kExitJobFailed);
  EXPECT_THAT(out_.str(),
              HasSubstr("model.safetensors: w  1 of 600000 elements differ, by at most 2\n"));
}

// A checkpoint that cannot be removed does not keep the others from it, and is reported.
TEST_F(CheckpointCommandsTest, Prune_OneThatCannotBeRemoved_KeepsNoOther) {
  for (int i = 0; i < 4; ++i) Save(Numbered(i), {1}, i);
  ASSERT_TRUE(ArmFailpoints("worker.checkpoint_doomed=error:UNAVAILABLE", "", "").ok());
  const int code = Run({"prune", root_, "--keep", "1"});
  ASSERT_TRUE(ArmFailpoints("", "", "").ok());
  EXPECT_NE(code, kExitOk);
  EXPECT_NE(err_.str(), "");
  EXPECT_EQ(out_.str(), absl::StrCat("removed ", Numbered(1), "\nremoved ", Numbered(2), "\n"));
  EXPECT_TRUE(PathExists(Numbered(3)));
}

// Values that are not tensors also make two checkpoints differ.
TEST_F(CheckpointCommandsTest, Diff_ComparesTheNumbersAndTextsOfTheState) {
  const auto optimizer = [](const std::string& scalars) {
    return Tensor("m", {1}, SafetensorsMetadata{{"muster.scalars", scalars}});
  };
  SaveFiles(Numbered(0), 1,
            {{"optimizer.safetensors", optimizer(R"({"lr":0.5,"steps":3})")},
             {"scaler.json", R"({"scalars":{"scale":2}})"},
             {"scheduler.json", R"({"scalars":{"last_epoch":1,"name":"step"}})"}});
  SaveFiles(Numbered(1), 1,
            {{"optimizer.safetensors", optimizer(R"({"lr":0.5,"steps":4})")},
             {"scheduler.json", R"({"scalars":{"last_epoch":1,"extra":"\u001b[2J"}})"}});
  EXPECT_EQ(Run({"diff", Numbered(0), Numbered(0)}), kExitOk) << out_.str();
  EXPECT_EQ(Run({"diff", Numbered(0), Numbered(1)}), kExitJobFailed);
  EXPECT_EQ(out_.str(),
            "optimizer.safetensors: steps  3 and 4\n"
            "scaler.json  only in the first\n"
            "scheduler.json: extra  nothing and \"\\u001b[2J\"\n"
            "scheduler.json: name  \"step\" and nothing\n"
            "1 tensor equal, 4 differences\n");
  const Json json = RunJson({"diff", Numbered(0), Numbered(1)}, kExitJobFailed);
  EXPECT_EQ(json["equal"], false);
  EXPECT_EQ(json["differences"][0], Json({{"what", "scalar"},
                                          {"file", "optimizer.safetensors"},
                                          {"name", "steps"},
                                          {"first", 3},
                                          {"second", 4}}));
  EXPECT_EQ(json["differences"][3]["second"], nullptr);
}

TEST_F(CheckpointCommandsTest, Diff_OddInput_IsOneLineOrSaidInJson) {
  Save(Numbered(0), {1, 2}, 1);
  Save(Numbered(1), {1, std::numeric_limits<float>::quiet_NaN()}, 1);
  EXPECT_EQ(
      RunJson({"diff", Numbered(0), Numbered(1)}, kExitJobFailed)["differences"][0]["largest"],
      "inf");
  EXPECT_EQ(RunJson({"diff", Numbered(1), Numbered(1)})["equal"], true);
  Save(Numbered(2), {1, 2, 3}, 1);
  EXPECT_EQ(RunJson({"diff", Numbered(0), Numbered(2)}, kExitJobFailed)["differences"][0]["shapes"],
            "F32 [2] and F32 [3]");
  // Missing files, a path with a byte that is not text, and incomplete checkpoints.
  ExpectRefused({"diff", Numbered(0), Path("nothing"), "-o", "json"}, kExitNotFound, "nothing");
  ExpectRefused({"diff", Path("n\xff"), Numbered(0), "-o", "json"}, kExitNotFound, "n");
  ASSERT_TRUE(MakeDirectories(Numbered(3)).ok());
  ExpectRefused({"diff", Numbered(3), Numbered(0)}, kExitNotFound, "holds no weights");
  ASSERT_TRUE(RemoveTree(JoinPath(Numbered(2), "scheduler.json")).ok());
  ExpectRefused({"diff", Numbered(0), Numbered(2)}, kExitJobFailed, "scheduler.json: is missing");
  for (const char* scalars : {"[]", "{", "7"}) {
    SaveFiles(Numbered(4), 1, {{"scheduler.json", absl::StrCat("{\"scalars\":", scalars, "}")}});
    EXPECT_NE(Run({"diff", Numbered(4), Numbered(4)}), kExitOk);
    EXPECT_THAT(err_.str(), HasSubstr("scheduler.json"));
  }
}

TEST_F(CheckpointCommandsTest, Export_OddInput_IsOneLine) {
  Save(Numbered(0), {1, 2}, 1);
  for (const char* model : {"-1", "x", "99999999999999999999", ""}) {
    ExpectRefused({"export", Numbered(0), Path("out"), "--model", model, "-o", "json"}, kExitUsage,
                  "write its number, from 0 to 2147483647");
  }
  ExpectRefused({"export", Path("nothing"), Path("out"), "-o", "json"}, kExitNotFound,
                "does not exist");
  ExpectRefused({"export", root_, Path("out"), "-o", "json"}, kExitNotFound,
                "is not a complete checkpoint");
  ASSERT_TRUE(WriteFileAtomically(Path("file"), "mine").ok());
  for (const std::string& to : {Path("file"), Path("file/below"), Path("file/below.safetensors"),
                                std::string("/proc/out"), std::string("")}) {
    EXPECT_NE(Run({"export", Numbered(0), to, "-o", "json"}), kExitOk) << to;
    const std::string text = err_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_EQ(out_.str(), "");
  }
  EXPECT_EQ(*ReadFile(Path("file")), "mine");
  const Json json = RunJson({"export", Numbered(0), Path("n\xff")});
  EXPECT_EQ(json["files"], Json({"model.safetensors"}));
  EXPECT_TRUE(PathExists(Path("n\xff/model.safetensors")));
}

TEST_F(CheckpointCommandsTest, Diff_UnderstandsHalves) {
  const auto file = [&](const std::string& name, SafetensorsType type, const std::string& bytes) {
    const std::string text = *EncodeSafetensors(
        {{.name = "t", .type = type, .shape = {bytes.size() / 2}}}, {bytes}, std::nullopt);
    EXPECT_TRUE(WriteFileAtomically(Path(name), text).ok());
    return *WeightFiles::Open(Path(name));
  };
  const auto largest = [&](SafetensorsType type, const std::string& x, const std::string& y) {
    const WeightFiles a = file("a.safetensors", type, x), b = file("b.safetensors", type, y);
    return *CompareTensors(a, *a.Find("t"), b, *b.Find("t"))->largest;
  };
  // 1.0 and 1.5; 2^-24 and 0; -2 and infinity.
  EXPECT_EQ(largest(SafetensorsType::kF16, std::string("\x00\x3c", 2), std::string("\x00\x3e", 2)),
            0.5);
  EXPECT_EQ(largest(SafetensorsType::kF16, std::string("\x01\x00", 2), std::string("\x00\x00", 2)),
            0x1p-24);
  EXPECT_EQ(largest(SafetensorsType::kF16, std::string("\x00\xc0", 2), std::string("\x00\x7c", 2)),
            std::numeric_limits<double>::infinity());
  EXPECT_EQ(largest(SafetensorsType::kBF16, std::string("\x80\x3f", 2), std::string("\xc0\xbf", 2)),
            2.5);
}

TEST_F(CheckpointCommandsTest, Export_WritesTheModelAndRefusesADamagedOne) {
  Save(Numbered(0), {1, 2}, 1);
  EXPECT_EQ(Run({"export", Numbered(0), Path("out")}), kExitOk) << err_.str();
  EXPECT_THAT(*ListDirectory(Path("out")), ElementsAre("model.safetensors"));
  EXPECT_EQ(Run({"diff", Numbered(0), Path("out")}), kExitOk);
  ExpectRefused({"export", Numbered(0), Path("out"), "--model", "1"}, kExitNotFound,
                "holds no model_1.safetensors");
  Damage(JoinPath(Numbered(0), "model.safetensors"));
  ExpectRefused({"export", Numbered(0), Path("other")}, kExitJobFailed, "is damaged");
  EXPECT_FALSE(PathExists(Path("other")));
}

// As sharded training writes it.
TEST_F(CheckpointCommandsTest, ModelInParts_IsOneModel) {
  const std::string dir = Numbered(0);
  auto staging = Staging::Create(dir);
  ASSERT_TRUE(staging.ok()) << staging.status();
  Manifest manifest;
  manifest.created = "2026-01-01T00:00:00Z";
  int rank = 0;
  for (const auto& [name, bytes] : std::vector<std::pair<std::string, std::string>>{
           {"model-00001-of-00002.safetensors", Tensor("a", {1, 2})},
           {"model-00002-of-00002.safetensors", Tensor("b", {3})},
           {"model.safetensors.index.json",
            R"({"weight_map": {"a": "model-00001-of-00002.safetensors",)"
            R"( "b": "model-00002-of-00002.safetensors"}})"}}) {
    ASSERT_TRUE(WriteFileAtomically(JoinPath(staging->path(), name), bytes).ok());
    manifest.files.push_back({.name = name, .rank = rank++, .digest = DigestBytes(bytes)});
  }
  ASSERT_TRUE(staging->Publish(manifest).ok());
  EXPECT_EQ(Run({"verify", dir}), kExitOk) << err_.str();
  const Json tensors = RunJson({"inspect", dir})["tensors"];
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[1]["file"], "model.safetensors");
  for (const char* command : {"export", "merge-weights"}) {
    EXPECT_EQ(Run({command, dir, Path(command)}), kExitOk) << err_.str();
    EXPECT_THAT(*ListDirectory(Path(command)), ElementsAre("model.safetensors"));
    EXPECT_EQ(Run({"diff", dir, Path(command)}), kExitOk) << out_.str() << err_.str();
  }
  Damage(JoinPath(dir, "model-00002-of-00002.safetensors"));
  for (const char* command : {"export", "merge-weights"}) {
    ExpectRefused({command, dir, Path("other")}, kExitJobFailed, "model-00002-of-00002");
  }
  EXPECT_FALSE(PathExists(Path("other")));
}

TEST_F(CheckpointCommandsTest, Prune_KeepsTheNewestAndWhatIsIncomplete) {
  for (int i = 0; i < 4; ++i) Save(Numbered(i), {1}, i);
  ASSERT_TRUE(MakeDirectories(Numbered(4)).ok());
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "2", "--dry_run"})["removed"],
            Json({Numbered(0), Numbered(1)}));
  EXPECT_EQ(ListDirectory(Path("checkpoints"))->size(), 5u);
  ASSERT_TRUE(RemoveTree(JoinPath(Numbered(3), "scheduler.json")).ok());
  ExpectRefused({"prune", root_, "--keep", "2"}, kExitUsage, "nothing was removed");
  Save(Numbered(3), {1}, 3);
  EXPECT_EQ(Run({"prune", root_, "--keep", "2"}), kExitOk) << err_.str();
  EXPECT_THAT(*ListDirectory(Path("checkpoints")),
              ElementsAre("checkpoint_2", "checkpoint_3", "checkpoint_4"));
  EXPECT_EQ(Run({"prune", root_, "--keep", "2"}), kExitOk);
  EXPECT_EQ(out_.str(), "nothing to remove\n");
  ExpectRefused({"prune", root_}, kExitUsage, "--keep N");
  // A number larger than that of the checkpoints keeps them all.
  EXPECT_EQ(Run({"prune", root_, "--keep", "99999999999"}), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "nothing to remove\n");
  for (const char* const keep : {"0", "-1", "two", "9223372036854775808"}) {
    ExpectRefused({"prune", root_, "--keep", keep}, kExitUsage,
                  absl::StrCat("--keep ", keep, ": write a number from 1 to 9223372036854775807"));
  }
}

// Pinned by hand, without a coordinator and without a record.
TEST_F(CheckpointCommandsTest, PinOfAFolder_IsListed_AndPruneLeavesIt) {
  for (int i = 0; i < 4; ++i) Save(Numbered(i), {1}, i);
  Seal(Numbered(1), "");
  for (const int i : {0, 1}) {
    ASSERT_TRUE(PinFolder(Numbered(i), true).ok());
    ASSERT_TRUE(PinFolder(Numbered(i), true).ok()) << "again";
  }
  EXPECT_EQ(Run({"list", root_}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("not registered, pinned"));
  EXPECT_THAT(out_.str(), HasSubstr("sealed, promoted, pinned"));
  EXPECT_EQ(RunJson({"list", root_})["checkpoints"][0]["pinned"], true);
  const Json pruned = RunJson({"prune", root_, "--keep", "1"});
  EXPECT_EQ(pruned["removed"], Json({Numbered(2)}));
  EXPECT_EQ(pruned["pinned"], Json({Numbered(0), Numbered(1)}));
  for (const int i : {0, 1}) {
    ASSERT_TRUE(PinFolder(Numbered(i), false).ok());
    ASSERT_TRUE(PinFolder(Numbered(i), false).ok()) << "again";
  }
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "1"})["removed"], Json({Numbered(0), Numbered(1)}));
  EXPECT_TRUE(absl::IsNotFound(PinFolder(Numbered(0), true)));
}

// The pin was left by a coordinator that is gone.
TEST_F(CheckpointCommandsTest, UnpinOfAFolder_EndsThePinOfItsRecord) {
  Save(Numbered(0), {1}, 0);
  Seal(Numbered(0), "", /*promoted=*/true, /*pinned=*/true);
  ASSERT_TRUE(PinFolder(Numbered(0), false).ok());
  EXPECT_FALSE(ReadSeal(Numbered(0))->pinned);
}

// The record of one checkpoint must not get into the folder of the other.
TEST_F(CheckpointCommandsTest, MarkOfACheckpointThatIsReplacedMeanwhile_StaysWithIt) {
  Save(Path("best"), {1}, 1);
  Save(Path("next"), {2}, 2);
  const std::string before = Seal(Path("best"), "").sha256, after = Seal(Path("next"), "").sha256;
  OnRead("best/seal.json", 1, [&] {
    ASSERT_EQ(rename(Path("best").c_str(), Path("aside").c_str()), 0);
    ASSERT_EQ(rename(Path("next").c_str(), Path("best").c_str()), 0);
  });
  EXPECT_TRUE(*NoteMarks(Path("best"), before, /*promoted=*/false, /*pinned=*/true));
  EXPECT_EQ(ReadSeal(Path("best"))->sha256, after);
  EXPECT_FALSE(ReadSeal(Path("best"))->pinned);
  EXPECT_TRUE(ReadSeal(Path("aside"))->pinned);
}

TEST_F(CheckpointCommandsTest, MarksOfTwoCommandsAtOnce_AreThoseOfTheCoordinatorAfterBoth) {
  Save(Path("best"), {1}, 1);
  const std::string sha256 = Seal(Path("best"), "").sha256;
  const Marks pinned = {.promoted = true, .pinned = true}, unpinned = {.promoted = true};
  // The coordinator has received `pin` first, but its command writes last.
  ASSERT_TRUE(*NoteMarks(Path("best"), sha256, unpinned.promoted, unpinned.pinned));
  ASSERT_TRUE(*NoteMarks(Path("best"), sha256, pinned.promoted, pinned.pinned));
  int asked = 0;
  const auto note = [&](const Marks& marks) {
    return NoteMarks(Path("best"), sha256, marks.promoted, marks.pinned).status();
  };
  const auto recorded = [&]() -> absl::StatusOr<Marks> {
    ++asked;
    return unpinned;
  };
  EXPECT_TRUE(FollowMarks(pinned, recorded, note).ok());
  EXPECT_FALSE(ReadSeal(Path("best"))->pinned);
  EXPECT_EQ(asked, 2) << "again after the change";
  const auto changing = [&]() -> absl::StatusOr<Marks> {
    return Marks{.promoted = true, .pinned = ++asked % 2 == 0};
  };
  EXPECT_TRUE(absl::IsAborted(FollowMarks(pinned, changing, note)));
  const auto gone = []() -> absl::StatusOr<Marks> { return absl::UnavailableError("gone"); };
  EXPECT_EQ(FollowMarks(pinned, gone, note), absl::UnavailableError("gone"));
}

TEST_F(CheckpointCommandsTest, MarkOfARecord_IsThatOfTheCoordinatorWhereverItsFolderIs) {
  const std::string staging = Path("best.tmp-0123456789abcdef");
  Save(Path("best"), {1}, 1);
  const std::string sha256 = Seal(Path("best"), "").sha256;
  ASSERT_EQ(rename(Path("best").c_str(), staging.c_str()), 0);
  const RecordedFolder folder = {.path = Path("best"), .staging = staging, .sha256 = sha256};
  const Marks pinned = {.promoted = true, .pinned = true}, unpinned = {.promoted = true};
  EXPECT_TRUE(MarkRecordedFolder(folder, pinned, false, [&] { return pinned; }).ok());
  EXPECT_TRUE(ReadSeal(staging)->pinned);
  // It gets its name before the command that the coordinator received last follows the marks.
  const auto named = [&]() -> absl::StatusOr<Marks> {
    (void)rename(staging.c_str(), Path("best").c_str());
    return unpinned;
  };
  EXPECT_TRUE(MarkRecordedFolder(folder, pinned, false, named).ok());
  EXPECT_FALSE(ReadSeal(Path("best"))->pinned);
  // Or while the command looks for it, first under that name.
  ASSERT_EQ(rename(Path("best").c_str(), staging.c_str()), 0);
  OnRead("best.tmp-0123456789abcdef", 1,
         [&] { ASSERT_EQ(rename(staging.c_str(), Path("best").c_str()), 0); });
  EXPECT_TRUE(MarkRecordedFolder(folder, pinned, false, [&] { return pinned; }).ok());
  EXPECT_TRUE(ReadSeal(Path("best"))->pinned);
  ASSERT_TRUE(PinFolder(Path("best"), true).ok());
  EXPECT_TRUE(MarkRecordedFolder(folder, unpinned, true, [&] { return unpinned; }).ok());
  EXPECT_FALSE(ReadSeal(Path("best"))->pinned);
  EXPECT_FALSE(PathExists(JoinPath(Path("best"), kPinName)));
}

TEST_F(CheckpointCommandsTest, MarkOfARecord_ErrorSaysWhatTheFolderSays) {
  Save(Path("best"), {1}, 1);
  const RecordedFolder folder = {.path = Path("best"), .sha256 = Seal(Path("best"), "").sha256};
  const Marks pinned = {.promoted = true, .pinned = true}, unpinned = {.promoted = true};
  const absl::Status lost = MarkRecordedFolder(
      folder, pinned, false,
      []() -> absl::StatusOr<Marks> { return absl::UnavailableError("the coordinator restarts"); });
  EXPECT_TRUE(absl::IsUnavailable(lost));
  EXPECT_THAT(std::string(lost.message()),
              testing::StartsWith("the folder says so, too, but whether another command"));
  EXPECT_TRUE(ReadSeal(Path("best"))->pinned);
  const absl::Status gone = MarkRecordedFolder(folder, pinned, false, [&] {
    (void)RemoveTree(Path("best"));
    return unpinned;
  });
  EXPECT_TRUE(absl::IsNotFound(gone));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("best is not there any more"));
  // This machine does not see the folder.
  EXPECT_TRUE(MarkRecordedFolder(folder, pinned, false, [&] { return pinned; }).ok());
}

TEST_F(CheckpointCommandsTest, PinOfAFolderThatIsReplacedMeanwhile_SaysSo) {
  Save(Path("best"), {1}, 1);
  Save(Path("next"), {2}, 2);
  Seal(Path("best"), "");
  OnRead("best/seal.json", 1, [&] {
    ASSERT_EQ(rename(Path("best").c_str(), Path("aside").c_str()), 0);
    ASSERT_EQ(rename(Path("next").c_str(), Path("best").c_str()), 0);
  });
  const absl::Status unpinned = PinFolder(Path("best"), /*pinned=*/false);
  EXPECT_TRUE(absl::IsAborted(unpinned)) << unpinned;
  EXPECT_THAT(std::string(unpinned.message()), HasSubstr("best is another checkpoint now"));
  EXPECT_TRUE(PinFolder(Path("best"), /*pinned=*/true).ok());
}

TEST_F(CheckpointCommandsTest, MarkOfAFolderThatIsLocked_WaitsAndNamesIt) {
  Save(Path("best"), {1}, 1);
  const std::string sha256 = Seal(Path("best"), "").sha256;
  const absl::Duration patience = SetLockPatience(absl::Milliseconds(5));
  {
    const OwnedFd lock(LockFolder(Path("best")));
    const absl::Status marked = NoteMarks(Path("best"), sha256, true, true).status();
    EXPECT_TRUE(absl::IsAborted(marked)) << marked;
    EXPECT_THAT(std::string(marked.message()), HasSubstr(Path("best") + ": process "));
  }
  SetLockPatience(patience);
  EXPECT_TRUE(*NoteMarks(Path("best"), sha256, true, true));
  EXPECT_FALSE(*NoteMarks(Path("nothing"), sha256, true, true));
}

TEST_F(CheckpointCommandsTest, Prune_ReadsWhatStaysBeforeAnythingGoes) {
  for (int i = 0; i < 3; ++i) Save(Numbered(i), {1}, i);
  // Its size is right.
  Damage(JoinPath(Numbered(2), "model.safetensors"));
  for (const char* keep : {"1", "2"}) {
    ExpectRefused({"prune", root_, "--keep", keep}, kExitUsage,
                  "model.safetensors: is damaged: its contents have the digest ");
    EXPECT_THAT(err_.str(), HasSubstr("nothing was removed: remove this checkpoint first"));
  }
  EXPECT_EQ(ListDirectory(Path("checkpoints"))->size(), 3u);
  // A checkpoint that is removed may be damaged.
  Save(Numbered(3), {1}, 3);
  EXPECT_EQ(Run({"prune", root_, "--keep", "1"}), kExitOk) << err_.str();
  EXPECT_THAT(*ListDirectory(Path("checkpoints")), ElementsAre("checkpoint_3"));
}

TEST_F(CheckpointCommandsTest, Prune_LeavesWhatAResumeTakes_HoweverManyWereHeldBackSince) {
  for (int i = 0; i < 4; ++i) Save(Numbered(i), {1}, i);
  for (int i = 2; i < 4; ++i) {
    RegisteredCheckpoint record = Seal(Numbered(i), "");
    record.promoted = false;
    ASSERT_TRUE(WriteSeal(Numbered(i), record).ok());
  }
  EXPECT_EQ(RunJson({"prune", root_, "--keep", "1"})["removed"], Json({Numbered(0), Numbered(2)}));
  EXPECT_THAT(*ListDirectory(Path("checkpoints")), ElementsAre("checkpoint_1", "checkpoint_3"));
  EXPECT_EQ(Run({"prune", root_, "--keep", "1"}), kExitOk);
  EXPECT_EQ(out_.str(), "nothing to remove\n");
}

TEST_F(CheckpointCommandsTest, ExportIntoACheckpoint_IsRefused) {
  Save(Numbered(0), {1}, 0);
  Save(Numbered(1), {2}, 1);
  const auto before = *ListDirectory(Numbered(0));
  const std::string model = *ReadFile(JoinPath(Numbered(0), "model.safetensors"));
  for (const std::vector<std::string>& args : {
           std::vector<std::string>{"export", Numbered(1), Numbered(0)},
           {"export", Numbered(1), JoinPath(Numbered(0), "model.safetensors")},
           {"merge-weights", JoinPath(Numbered(1), "model.safetensors"), Numbered(0)},
       }) {
    ExpectRefused(args, kExitConflict, Numbered(0) + " is a checkpoint, which this would damage");
  }
  EXPECT_EQ(*ListDirectory(Numbered(0)), before);
  EXPECT_EQ(*ReadFile(JoinPath(Numbered(0), "model.safetensors")), model);
}

TEST_F(CheckpointCommandsTest, MergeWeights_ReadsShardsAndPickles) {
  const Json merged =
      RunJson({"merge-weights", GoldenPath("hf_models/gpt2_shared"), Path("gpt2.safetensors")});
  EXPECT_EQ(merged["files"], Json({"gpt2.safetensors"}));
  EXPECT_EQ(Run({"diff", GoldenPath("hf_models/gpt2_shared"), Path("gpt2.safetensors")}), kExitOk);
  EXPECT_EQ(Run({"merge-weights", TestdataPath("torch_files/pytorch_model.bin"), Path("bin")}),
            kExitOk);
  EXPECT_EQ(out_.str(),
            "wrote 6 tensors, 116 B, to " + Path("bin") +
                " (1 file)\nleft out head.weight, the same tensor under another name\n");
  ExpectRefused({"merge-weights", Path("bin"), Path("bin")}, kExitConflict, "files that are read");
  ExpectRefused({"merge-weights", Path("bin"), Path("x"), "--max_shard_size", "many"}, kExitUsage,
                "many");
  ExpectRefused({"merge-weights", Path("bin")}, kExitUsage, "write muster merge-weights FROM TO");
}

TEST_F(CheckpointCommandsTest, MergeToAFileOfAnotherFormat_IsRefused) {
  const std::string from = TestdataPath("torch_files/pytorch_model.bin");
  for (const char* const name : {"x.bin", "x.pt", "x.pth", "x.ckpt"}) {
    ExpectRefused({"merge-weights", from, Path(name)}, kExitUsage,
                  Path(name) +
                      ": only safetensors are written: TO is a folder, or a file "
                      "*.safetensors");
    EXPECT_FALSE(PathExists(Path(name)));
  }
  // A folder may have any name.
  ASSERT_TRUE(MakeDirectories(Path("x.bin")).ok());
  EXPECT_EQ(Run({"merge-weights", from, Path("x.bin")}), kExitOk) << err_.str();
}

// Files of torch.save may have any names.
TEST_F(CheckpointCommandsTest, MergeWeightsOfAReservedName_NamesTheFileAndTheTensor) {
  std::string bytes = *ReadFile(TestdataPath("torch_files/pytorch_model.bin"));
  const std::string name = "embed.weight", reserved = "__metadata__";
  ASSERT_NE(bytes.find(name), std::string::npos);
  bytes.replace(bytes.find(name), name.size(), reserved);
  ASSERT_TRUE(WriteFileAtomically(Path("model.bin"), bytes).ok());
  for (const std::string& to : {Path("out"), Path("out.safetensors")}) {
    ExpectRefused({"merge-weights", Path("model.bin"), to}, kExitUsage,
                  Path("model.bin") +
                      ": tensor \"__metadata__\": the name is reserved: safetensors "
                      "files cannot hold it; save it there under another name");
    EXPECT_FALSE(PathExists(to));
  }
}

// A name that merge-weights has left out is no difference: its tensor has another name.
TEST_F(CheckpointCommandsTest, DiffOfTiedNames_ComparesTheNameThatBothHave) {
  const std::string tied = TestdataPath("torch_files/pytorch_model.bin");
  ASSERT_EQ(Run({"merge-weights", tied, Path("merged")}), kExitOk) << err_.str();
  for (const bool tied_first : {true, false}) {
    const std::vector<std::string> both = {tied_first ? tied : Path("merged"),
                                           tied_first ? Path("merged") : tied};
    EXPECT_EQ(Run({"diff", both[0], both[1]}), kExitOk);
    EXPECT_EQ(out_.str(),
              absl::StrCat("head.weight  the same tensor as embed.weight, a name that only the ",
                           tied_first ? "first" : "second", " has\n",
                           "6 tensors equal, 0 differences\n"));
    const Json json = RunJson({"diff", both[0], both[1]});
    EXPECT_EQ(json["equal"], true);
    EXPECT_EQ(json["tied"], Json::parse(R"([{"file": "", "name": "head.weight",
                                             "same_as": "embed.weight"}])"));
  }
}

TEST_F(CheckpointCommandsTest, InspectOfAFileWithoutTensors_SaysSo) {
  ASSERT_TRUE(
      WriteFileAtomically(Path("empty.safetensors"), LayOutSafetensors({}, std::nullopt)->prefix)
          .ok());
  EXPECT_EQ(Run({"inspect", Path("empty.safetensors")}), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), Path("empty.safetensors") + ": no tensors\n");
}

TEST_F(CheckpointCommandsTest, MergeWeightsOfACheckpointCutShort_SaysThatItIsDamaged) {
  Save(Numbered(0), {1, 2}, 1);
  const std::string model = JoinPath(Numbered(0), "model.safetensors");
  const std::string bytes = *ReadFile(model);
  ASSERT_TRUE(WriteFileAtomically(model, bytes.substr(0, bytes.size() - 1)).ok());
  for (const std::string& from : {Numbered(0), model}) {
    ExpectRefused({"merge-weights", from, Path("out")}, kExitJobFailed,
                  "use the weights of an earlier checkpoint");
  }
  EXPECT_FALSE(PathExists(Path("out")));
}

TEST_F(CheckpointCommandsTest, FolderOfARunOrAnotherJson_IsCalledWhatItIs) {
  Save(Numbered(0), {1}, 1);
  for (const std::vector<std::string>& args : {std::vector<std::string>{"inspect", root_},
                                               {"diff", root_, Numbered(0)},
                                               {"export", root_, Path("x")},
                                               {"merge-weights", root_, Path("x")}}) {
    ExpectRefused(args, kExitNotFound,
                  "it holds checkpoints: name one, such as " + Numbered(0) +
                      " (`muster checkpoints list " + root_ + "` shows all)");
  }
  ASSERT_TRUE(WriteFileAtomically(Path("config.json"), R"({"model_type": "gpt2"})").ok());
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"inspect", Path("config.json")},
        {"merge-weights", Path("config.json"), Path("x")}}) {
    ExpectRefused(args, kExitUsage, "config.json: is the configuration of a model");
  }
  EXPECT_FALSE(PathExists(Path("x")));
}

// A file of two kilobytes whose tensor repeats four bytes 2^50 times.
TEST_F(CheckpointCommandsTest, WeightsBeyondTheDisk_AreRefusedBeforeAnythingIsWritten) {
  ASSERT_TRUE(MakeDirectories(Path("to")).ok());
  for (const char* to : {"to", "to/all.safetensors"}) {
    ExpectRefused({"merge-weights", TestdataPath("torch_files/expanded.bin"), Path(to)}, kExitLimit,
                  "the tensors take 4503599627370496 bytes, but the disk of ");
    EXPECT_THAT(*ListDirectory(Path("to")), ElementsAre());
  }
  ExpectRefused({"merge-weights", TestdataPath("torch_files/expanded.bin"), Path("new/to")},
                kExitLimit, "the tensors take 4503599627370496 bytes");
  EXPECT_FALSE(PathExists(Path("new"))) << "no empty folder is left";
  EXPECT_EQ(Run({"merge-weights", TestdataPath("torch_files/pytorch_model.bin"),
                 Path("new/../bin/all.safetensors")}),
            kExitOk)
      << err_.str();
  EXPECT_TRUE(PathExists(Path("bin/all.safetensors")));
  EXPECT_FALSE(PathExists(Path("new"))) << "it leads back";
}

// A user who may write to a folder must not be able to block its readers.
TEST_F(CheckpointCommandsTest, PipesInThePlaceOfFiles_AreNotWaitedFor) {
  for (const char* name : {"manifest.json", "seal.json", "model.safetensors"}) {
    Save(Numbered(0), {1}, 0);
    const std::string path = JoinPath(Numbered(0), name);
    ASSERT_TRUE(RemoveTree(path).ok());
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    EXPECT_EQ(Run({"verify", root_}), kExitJobFailed);
    EXPECT_THAT(out_.str(), HasSubstr(absl::StrCat(path, ": is not a file")));
    EXPECT_EQ(Run({"list", root_}), kExitOk) << err_.str();
    ExpectRefused({"prune", root_, "--keep", "1"}, kExitUsage, ": is not a file");
    ASSERT_TRUE(RemoveTree(Numbered(0)).ok());
  }
  ASSERT_EQ(mkfifo(Path("pipe.safetensors").c_str(), 0600), 0);
  ExpectRefused({"merge-weights", Path("pipe.safetensors"), Path("out")}, kExitUsage,
                "is not a file");
}

TEST_F(CheckpointCommandsTest, CheckpointOfANewerFormat_IsNeitherDamagedNorToBeRemoved) {
  for (int i = 0; i < 2; ++i) Save(Numbered(i), {1}, i);
  const std::string path = JoinPath(Numbered(1), "manifest.json");
  Json manifest = Json::parse(*ReadFile(path));
  manifest["version"] = 99;
  manifest.erase("digest");
  manifest["digest"] = DigestBytes(manifest.dump()).xxh3;
  ASSERT_TRUE(WriteFileAtomically(path, manifest.dump()).ok());
  EXPECT_EQ(RunJson({"list", root_})["checkpoints"][1]["state"], "newer");
  EXPECT_EQ(RunJson({"verify", root_}, kExitJobFailed)["checkpoints"][1]["state"], "newer");
  ExpectRefused({"inspect", Numbered(1)}, kExitUsage, "use a newer Muster");
  ExpectRefused({"prune", root_, "--keep", "1"}, kExitUsage,
                "nothing was removed, since it may be one to keep");
  EXPECT_EQ(ListDirectory(Path("checkpoints"))->size(), 2u);
}

TEST_F(CheckpointCommandsTest, HelpAndMistakes_AreThoseOfOtherCommands) {
  EXPECT_EQ(Run({"--help"}), kExitOk);
  for (const char* name : {"list", "inspect", "verify", "diff", "export", "prune"}) {
    EXPECT_THAT(out_.str(), HasSubstr(std::string("  ") + name));
  }
  for (const char* name : {"list", "inspect", "verify", "diff", "export", "prune"}) {
    EXPECT_EQ(Run({name, "--help"}), kExitOk);
    EXPECT_THAT(out_.str(), HasSubstr(std::string("\nUsage: muster checkpoints ") + name));
    EXPECT_THAT(out_.str(), HasSubstr("-o,--output FORMAT"));
  }
  ExpectRefused({"lst"}, kExitUsage, "unknown command lst");
  ExpectRefused({"list", "-o", "yaml"}, kExitUsage, "--output yaml: write text or json");
  ExpectRefused({"list", "-x"}, kExitUsage, "unknown option -x");
}

}  // namespace
}  // namespace muster::client
