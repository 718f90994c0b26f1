// A disk that fails at any moment of a save: before each call that makes, reserves, writes, syncs,
// renames or removes a file. Every rank gets the same error, the previous checkpoint or the new one
// is whole, and the next save, for which there is room, leaves nothing behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_failing_disk.h"
#include "base/test_folder.h"
#include "worker/checkpoint/async_saver.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/fake_registrar.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/node_checkpoints.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Kind {
  const char* name;
  int error;
  bool lasts;
  bool also_removals;
  bool asynchronous;
  bool divided = false;  // both ranks write a part of the model
};

absl::Status WriteAll(StateWriter& writer, int64_t value, bool divided) {
  if (divided) {
    const absl::Status part = writer.WriteModel(PartFileName(ModelFileName(0), writer.rank(), 2),
                                                {{"w", at::full({2000}, value)}});
    if (!part.ok()) return part;
  } else if (writer.rank() == 0) {
    const absl::Status model =
        writer.WriteModel(ModelFileName(0), {{"w", at::full({2000}, value)}});
    if (!model.ok()) return model;
  }
  StateDict random;
  random.SetTensor("cpu", at::full({3}, value));
  return writer.Write(RandomStatesFileName(writer.rank()), random);
}

class FullDiskTest : public testing::TestWithParam<Kind> {
 protected:
  ~FullDiskTest() override { disk_fault.Disarm(); }

  // Saves the next number on two ranks, which keeps only the newest.
  absl::Status Save() {
    const absl::StatusOr<int64_t> number = folder_.NextNumber();
    if (!number.ok()) return number.status();
    const CheckpointInfo info{.iteration = *number, .step = *number};
    const auto write = [&](StateWriter& writer) {
      return WriteAll(writer, *number, GetParam().divided);
    };
    std::vector<absl::Status> saved(2);
    std::vector<std::unique_ptr<Comm>> background = MakeThreadComms(2);
    RunRanks(2, [&](Comm& comm) {
      absl::Status& mine = saved[comm.rank()];
      if (!GetParam().asynchronous) {
        mine = SaveNumberedCheckpoint(comm, folder_, info,
                                      PublishOptions{.registrar = registrar_, .keep = 1}, write);
        return;
      }
      AsyncSaver saver(std::move(background[comm.rank()]), {});
      std::vector<AsyncSaver::Outcome> earlier;
      mine = saver.Begin(
          comm,
          {.folder = folder_, .total_limit = 1, .publish = {.registrar = registrar_}, .info = info},
          write, &earlier);
      if (mine.ok()) mine = saver.Wait().at(0).status;
    });
    EXPECT_EQ(saved[0], saved[1]);
    return saved[0];
  }

  // Returns the number of the newest one, after reading everything and checking the values.
  int64_t Newest() const {
    const absl::StatusOr<std::string> newest = folder_.Newest(VerifyLevel::kContents);
    EXPECT_TRUE(newest.ok()) << newest.status();
    if (!newest.ok()) return -1;
    const absl::StatusOr<StateReader> reader = StateReader::Open(*newest);
    EXPECT_TRUE(reader.ok()) << reader.status();
    const auto files = FilesOfModel(reader->manifest(), ModelFileName(0));
    EXPECT_TRUE(files.ok() && files->size() == (GetParam().divided ? 2 : 1));
    for (const std::string& file : *files) {
      const auto model = reader->Read(file);
      EXPECT_TRUE(model.ok()) << model.status();
      EXPECT_EQ(model->GetTensor("w")->min().item<double>(), reader->info().step);
    }
    return reader->info().iteration;
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.Path("failing_disk");
  const CheckpointFolder folder_{root_};
  CheckpointRegistrar* registrar_ = nullptr;
};

TEST_P(FullDiskTest, AnyMoment_IsTheSameErrorOnAllRanks_NothingIsLost_AndTheNextSaveGoesOn) {
  const Kind& kind = GetParam();
  ASSERT_TRUE(MakeDirectories(root_).ok());
  const absl::Status first = Save();
  ASSERT_TRUE(first.ok()) << first;
  const std::string words = std::strerror(kind.error);
  int moments = 0, failures = 0;
  for (long at = 1; !HasFailure(); ++at) {
    SCOPED_TRACE(absl::StrCat(kind.name, " ", at));
    ASSERT_LT(at, 500);
    const int64_t before = Newest();
    disk_fault.error = kind.error;
    disk_fault.lasts = kind.lasts;
    disk_fault.also_removals = kind.also_removals;
    disk_fault.Arm(at);
    const absl::Status saved = Save();
    disk_fault.Disarm();
    const int64_t after = Newest();
    if (saved.ok()) {
      // If anything failed, the checkpoint does not need it.
      EXPECT_EQ(after, before + 1);
    } else {
      ++failures;
      EXPECT_THAT(std::string(saved.message()), HasSubstr(words));
      EXPECT_TRUE(after == before || after == before + 1) << after << " after " << before;
    }
    if (!disk_fault.fired) break;
    ++moments;
    const absl::Status next = Save();
    ASSERT_TRUE(next.ok()) << next;
    // One that was sealed and could not be removed keeps its number: the next save renames it.
    const int64_t newest = Newest();
    EXPECT_TRUE(newest == after + 1 || (!saved.ok() && newest == after + 2)) << newest;
    EXPECT_THAT(*ListDirectory(root_), ElementsAre(absl::StrCat("checkpoint_", newest)));
  }
  std::printf("%s: %d moments, %d of them failed the save\n", kind.name, moments, failures);
  // Three files and the manifest are created, written and synced; three folders are synced.
  EXPECT_GE(failures, 12);
}

// With a coordinator, which has sealed it at some of these moments.
class SealedOnFullDiskTest : public FullDiskTest {
 protected:
  // The highest step that a registry knows as sealed.
  int64_t NewestSealed() const {
    int64_t newest = -1;
    for (const auto& [id, record] : records_.records) {
      if (!record.sha256.empty()) newest = std::max(newest, record.step);
    }
    return newest;
  }

  FakeRegistrar records_;
};

TEST_P(SealedOnFullDiskTest, AnyMoment_WhatIsSealedIsWhatTheNextLoadTakes) {
  ASSERT_TRUE(MakeDirectories(root_).ok());
  registrar_ = &records_;
  ASSERT_TRUE(Save().ok());
  int sealed_and_failed = 0;
  for (long at = 1; !HasFailure(); ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, 500);
    const int64_t before = NewestSealed();
    disk_fault.error = GetParam().error;
    disk_fault.lasts = GetParam().lasts;
    disk_fault.also_removals = GetParam().also_removals;
    disk_fault.Arm(at);
    const absl::Status saved = Save();
    disk_fault.Disarm();
    const int64_t sealed = NewestSealed();
    if (saved.ok()) {
      EXPECT_EQ(sealed, before + 1);
    } else if (sealed > before) {
      ++sealed_and_failed;
    }
    // Loads as the same job does, with a registry.
    const absl::StatusOr<std::string> found = FindCheckpointToResume(folder_, &records_);
    ASSERT_TRUE(found.ok()) << found.status();
    const absl::StatusOr<Manifest> manifest = VerifyCheckpoint(*found, VerifyLevel::kContents);
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    EXPECT_EQ(manifest->info.step, sealed) << saved;
    if (!disk_fault.fired) break;
    const absl::Status next = Save();
    ASSERT_TRUE(next.ok()) << next;
    EXPECT_THAT(*ListDirectory(root_), Each(Not(HasSubstr("."))));
  }
  // The record is synced and renamed in its room, and the folder is renamed.
  EXPECT_GE(sealed_and_failed, 3);
}

INSTANTIATE_TEST_SUITE_P(Disks, SealedOnFullDiskTest,
                         testing::Values(Kind{"FullFromThenOn", ENOSPC, true, false, false},
                                         Kind{"FailsOnce", EIO, false, true, false},
                                         Kind{"FullFromThenOnBesideTraining", ENOSPC, true, false,
                                              true}),
                         [](const auto& info) { return std::string(info.param.name); });

// Interrupted by a signal, such as the one that announces the end of the job: some file systems
// report it.
class InterruptedDiskTest : public FullDiskTest {};

TEST_P(InterruptedDiskTest, AnyCallOnAFile_IsMadeAgain) {
  ASSERT_TRUE(MakeDirectories(root_).ok());
  disk_fault.error = EINTR;
  disk_fault.lasts = disk_fault.also_removals = false;
  disk_fault.open_files = true;
  int moments = 0;
  for (long at = 1; !HasFailure(); ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, 500);
    disk_fault.Arm(at);
    const absl::Status saved = Save();
    disk_fault.Disarm();
    EXPECT_TRUE(saved.ok()) << saved;
    if (!disk_fault.fired) break;
    ++moments;
  }
  disk_fault.open_files = false;
  EXPECT_GE(moments, 12);
}

INSTANTIATE_TEST_SUITE_P(Disks, InterruptedDiskTest,
                         testing::Values(Kind{"Interrupted", EINTR, false, false, false}),
                         [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Disks, FullDiskTest,
    testing::Values(Kind{"FullFromThenOn", ENOSPC, true, false, false},
                    Kind{"FullForAMoment", ENOSPC, false, false, false},
                    Kind{"ReadOnlyFromThenOn", EROFS, true, true, false},
                    Kind{"FailsOnce", EIO, false, true, false},
                    Kind{"FullFromThenOnDivided", ENOSPC, true, false, false, true},
                    Kind{"FullFromThenOnBesideTraining", ENOSPC, true, false, true},
                    Kind{"ReadOnlyFromThenOnBesideTraining", EROFS, true, true, true}),
    [](const auto& info) { return std::string(info.param.name); });

// Without a shared file system: two nodes of two ranks, of which node 1, with the failing disk,
// fetches what only node 0 has.
class FetchOnFullDiskTest : public testing::TestWithParam<Kind> {
 protected:
  ~FetchOnFullDiskTest() override { disk_fault.Disarm(); }

  static int NodeOf(const Comm& comm) { return comm.rank() / 2; }
  std::string Disk(int node) const {
    return test_folder_.Path(node == 0 ? "disk_of_node_0" : "failing_disk");
  }
  std::string Dir(int node) const { return JoinPath(Disk(node), "ckpt"); }

  // Returns the results by rank.
  std::vector<absl::Status> Load() const {
    std::vector<absl::Status> loaded(4);
    RunRanks(4, [&](Comm& comm) {
      absl::Status& mine = loaded[comm.rank()];
      const auto groups = FindNodeGroups(comm, Disk(NodeOf(comm)), NodeOf(comm));
      mine = groups.status();
      if (!mine.ok()) return;
      const auto reader =
          OpenCheckpointOnNodes(comm, Dir(NodeOf(comm)), CheckpointFolder(""), *groups, nullptr);
      mine = reader.status();
      if (!mine.ok()) return;
      const auto model = reader->Read(ModelFileName(0));
      ASSERT_TRUE(model.ok()) << model.status();
      EXPECT_EQ(model->GetTensor("w")->min().item<double>(), 7);
    });
    return loaded;
  }

  const TestFolder test_folder_;
};

TEST_P(FetchOnFullDiskTest, AnyMoment_IsAnErrorOnAllRanks_NothingIsLost_AndTheNextLoadGoesOn) {
  const Kind& kind = GetParam();
  RunRanks(4, [&](Comm& comm) {
    const absl::Status saved = SaveCheckpoint(
        comm, Dir(NodeOf(comm)), {.step = 1},
        [](StateWriter& writer) { return WriteAll(writer, 7, /*divided=*/false); }, NodeOf(comm));
    ASSERT_TRUE(saved.ok()) << saved;
  });
  const std::vector<std::vector<std::string>> own = {*ListDirectory(Dir(0)),
                                                     *ListDirectory(Dir(1))};
  int failures = 0;
  for (long at = 1; !HasFailure(); ++at) {
    SCOPED_TRACE(absl::StrCat(kind.name, " ", at));
    ASSERT_LT(at, 500);
    disk_fault.error = kind.error;
    disk_fault.lasts = kind.lasts;
    disk_fault.also_removals = kind.also_removals;
    disk_fault.Arm(at);
    const std::vector<absl::Status> loaded = Load();
    disk_fault.Disarm();
    if (!loaded[0].ok()) {
      ++failures;
      EXPECT_THAT(std::string(loaded[0].message()), HasSubstr(std::strerror(kind.error)));
    }
    EXPECT_THAT(loaded, Each(loaded[0]));
    for (const int node : {0, 1}) {
      EXPECT_THAT(*ListDirectory(Dir(node)), testing::IsSupersetOf(own[node]));
    }
    if (!disk_fault.fired) {
      // It has fetched the files, and has removed what earlier loads could not.
      EXPECT_THAT(*ListDirectory(Disk(1)), ElementsAre("ckpt"));
      break;
    }
    EXPECT_THAT(Load(), Each(absl::OkStatus()));
    for (const int node : {0, 1}) {
      EXPECT_TRUE(VerifyCheckpoint(Dir(node), VerifyLevel::kContents).ok());
      const std::vector<std::string> now = *ListDirectory(Dir(node));
      for (const std::string& name : now) {
        if (std::find(own[node].begin(), own[node].end(), name) != own[node].end()) continue;
        ASSERT_EQ(std::remove(JoinPath(Dir(node), name).c_str()), 0);
      }
    }
  }
  std::printf("%s: %d moments failed the load\n", kind.name, failures);
  EXPECT_GE(failures, 5);
}

INSTANTIATE_TEST_SUITE_P(, FetchOnFullDiskTest,
                         testing::Values(Kind{"NoSpaceOnce", ENOSPC, false, false, false},
                                         Kind{"NoSpaceFromThenOn", ENOSPC, true, false, false},
                                         Kind{"DiskFails", EIO, true, true, false}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster
