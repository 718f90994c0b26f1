#include "worker/checkpoint/state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>

#include "ATen/ops/arange.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "base/test_held_report.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/disposal.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StateTest : public testing::Test {
 protected:
  const TestFolder folder_;
  const std::string root_ = folder_.path();
};

// Writes like an accelerator: rank 0 what is the same everywhere, every rank its own random state.
absl::Status WriteAll(StateWriter& writer, double value) {
  if (writer.rank() == 0) {
    const absl::Status model = writer.WriteModel(ModelFileName(0), {{"w", at::full({3}, value)}});
    if (!model.ok()) return model;
    StateDict scheduler;
    scheduler.SetInt("last_epoch", 4);
    const absl::Status status = writer.Write(SchedulerFileName(0), scheduler);
    if (!status.ok()) return status;
  }
  StateDict random;
  random.SetTensor("cpu", at::full({2}, writer.rank()));
  return writer.Write(RandomStatesFileName(writer.rank()), random);
}

TEST_F(StateTest, ThreeRanks_SaveTogetherAndReadBack) {
  const std::string dir = JoinPath(root_, "ckpt");
  RunRanks(3, [&](Comm& comm) {
    const absl::Status saved = SaveCheckpoint(
        comm, dir, {.iteration = 0, .step = 9, .epoch = 1, .cursor = {{"samples", 5}}},
        [](StateWriter& writer) { return WriteAll(writer, 1.5); });
    ASSERT_TRUE(saved.ok()) << saved;
    const auto reader = OpenCheckpoint(comm, dir, CheckpointFolder(""));
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->info().world_size, 3);
    EXPECT_EQ(reader->info().step, 9);
    EXPECT_EQ(reader->info().cursor.at("samples"), 5);
    EXPECT_EQ(reader->Read(ModelFileName(0))->GetTensor("w")->sum().item<float>(), 4.5);
    EXPECT_EQ(reader->Read(ModelFileName(0))->metadata().at("format"), "pt");
    EXPECT_EQ(*reader->Read(SchedulerFileName(0))->GetInt("last_epoch"), 4);
    EXPECT_EQ(
        reader->Read(RandomStatesFileName(comm.rank()))->GetTensor("cpu")->sum().item<float>(),
        2 * comm.rank());
    EXPECT_EQ(reader->Count(ModelFileName), 1);
    EXPECT_EQ(reader->Count(OptimizerFileName), 0);
    EXPECT_THAT(std::string(reader->Read("optimizer.safetensors").status().message()),
                HasSubstr("has no optimizer.safetensors (it has model.safetensors, random"));
  });
  EXPECT_THAT(*ListDirectory(dir),
              ElementsAre("manifest.json", "model.safetensors", "random_states_0.safetensors",
                          "random_states_1.safetensors", "random_states_2.safetensors",
                          "scheduler.json", kSealName));
}

TEST_F(StateTest, FilesOfManyBlocks_HaveTheirDigestsAndAlignedData) {
  const std::string dir = JoinPath(root_, "ckpt");
  // Three blocks, and a tensor that must be laid out first.
  const at::Tensor large = at::arange(5'000'000, at::kFloat);
  const at::Tensor turned = at::arange(12, at::kFloat).view({3, 4}).t();
  RunRanks(1, [&](Comm& comm) {
    const absl::Status saved = SaveCheckpoint(comm, dir, {}, [&](StateWriter& writer) {
      return writer.WriteModel(ModelFileName(0), {{"large", large}, {"turned", turned}});
    });
    ASSERT_TRUE(saved.ok()) << saved;
  });
  const std::string path = JoinPath(dir, ModelFileName(0));
  const auto header = ReadSafetensorsHeader(path);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ((8 + header->header_bytes) % kDirectAlignment, 0u);
  const auto reader = StateReader::Open(dir);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const ManifestFile* const file = reader->manifest().Find(ModelFileName(0));
  EXPECT_EQ(file->blocks.xxh3.size(), 3u);
  EXPECT_EQ(*DigestFile(path), file->digest);
  EXPECT_TRUE(VerifyCheckpoint(dir, VerifyLevel::kContents).ok());
  const auto model = reader->Read(ModelFileName(0));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(model->GetTensor("large")->equal(large));
  EXPECT_TRUE(model->GetTensor("turned")->equal(turned));
}

TEST_F(StateTest, TensorsOnADevice_AreCopiedBlockByBlockIntoTheSameFile) {
  // Blocks contain the end of one tensor and the beginning of the next.
  std::vector<float> first(3'000'000), second(2'500'001);
  for (size_t i = 0; i < first.size(); ++i) first[i] = static_cast<float>(i % 1021);
  for (size_t i = 0; i < second.size(); ++i) second[i] = static_cast<float>(i % 509);
  const at::Tensor on_host = at::arange(12, at::kFloat).view({3, 4}).t();
  const auto save = [&](const std::string& dir, const at::Tensor& a, const at::Tensor& b) {
    RunRanks(1, [&](Comm& comm) {
      const absl::Status saved = SaveCheckpoint(comm, dir, {}, [&](StateWriter& writer) {
        return writer.WriteModel(ModelFileName(0), {{"a", a}, {"b", b}, {"host", on_host}});
      });
      ASSERT_TRUE(saved.ok()) << saved;
    });
  };
  const size_t before = CopiesFromFakeDevice().size();
  save(JoinPath(root_, "there"), OnFakeDevice(first), OnFakeDevice(second));
  // A copy for each block of a tensor: the header's block has the first part of "a".
  EXPECT_EQ(CopiesFromFakeDevice().size() - before, 4u);
  save(JoinPath(root_, "here"), at::from_blob(first.data(), {3'000'000}, at::kFloat),
       at::from_blob(second.data(), {2'500'001}, at::kFloat));
  const auto file = [&](const char* dir) {
    return DigestFile(JoinPath(JoinPath(root_, dir), ModelFileName(0)));
  };
  EXPECT_EQ(*file("there"), *file("here"));
  EXPECT_TRUE(VerifyCheckpoint(JoinPath(root_, "there"), VerifyLevel::kContents).ok());
}

TEST_F(StateTest, OneRankFails_AllRanksSeeWhoAndOldCheckpointStays) {
  const std::string dir = JoinPath(root_, "ckpt");
  RunRanks(2, [&](Comm& comm) {
    const auto save = [&](auto fail) {
      return SaveCheckpoint(comm, dir, {}, [&](StateWriter& writer) {
        if (writer.rank() == 1) fail();
        return WriteAll(writer, 7);
      });
    };
    ASSERT_TRUE(save([] {}).ok());
    const absl::Status thrown = save([] { throw std::runtime_error("disk on fire\nstack"); });
    EXPECT_EQ(std::string(thrown.message()), "rank 1: disk on fire");
    const auto reader = StateReader::Open(dir);
    ASSERT_TRUE(reader.ok());
    EXPECT_EQ(reader->Read(ModelFileName(0))->GetTensor("w")->sum().item<float>(), 21);
    comm.Barrier();
  });
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt")) << "no staging folder is left";
}

TEST_F(StateTest, Progress_CountsWhatThisRankHasWritten) {
  const std::string dir = JoinPath(root_, "ckpt");
  RunRanks(2, [&](Comm& comm) {
    SaveProgress progress;
    const absl::Status saved = SaveCheckpoint(
        comm, dir, {.step = 7}, PublishOptions{.progress = &progress}, [&](StateWriter& writer) {
          writer.Expect(1 << 20);
          absl::Status written = WriteAll(writer, 1);
          const std::optional<RunningSave> running = progress.Read();
          EXPECT_EQ(running->path, dir);
          EXPECT_EQ(running->step, 7);
          EXPECT_FALSE(running->asynchronous);
          uint64_t bytes = 0;
          for (const ManifestFile& file : writer.files()) bytes += file.digest.bytes;
          EXPECT_EQ(running->written, bytes);
          EXPECT_EQ(running->bytes, uint64_t{1} << 20);
          return written;
        });
    ASSERT_TRUE(saved.ok()) << saved;
    EXPECT_FALSE(progress.Read().has_value());
    EXPECT_GT(progress.signs(), 0u);
  });
}

TEST_F(StateTest, NoSpaceAtAnyMoment_IsTheSameErrorOnAllRanks_AndTheNextSaveGoesOn) {
  const std::string dir = JoinPath(root_, "ckpt");
  const auto save = [&](double value) {
    std::vector<absl::Status> saved(2);
    RunRanks(2, [&](Comm& comm) {
      saved[comm.rank()] = SaveCheckpoint(
          comm, dir, {}, [&](StateWriter& writer) { return WriteAll(writer, value); });
    });
    EXPECT_EQ(saved[0], saved[1]);
    return saved[0];
  };
  const auto value_there = [&] {
    EXPECT_TRUE(VerifyCheckpoint(dir, VerifyLevel::kContents).ok());
    return StateReader::Open(dir)
        ->Read(ModelFileName(0))
        ->GetTensor("w")
        ->select(0, 0)
        .item<double>();
  };
  double value = 1;
  ASSERT_TRUE(save(value).ok());
  int moments = 0;
  for (const char* const where : {"block", "sync", "staged", "publish"}) {
    for (int pass = 1;; ++pass) {
      SCOPED_TRACE(std::string(where) + " " + std::to_string(pass));
      ASSERT_LT(pass, 50);
      ASSERT_TRUE(ArmFailpoints("worker.checkpoint_" + std::string(where) +
                                    "=error:RESOURCE_EXHAUSTED@" + std::to_string(pass),
                                "", "")
                      .ok());
      const absl::Status full = save(value + 1);
      ASSERT_TRUE(ArmFailpoints("", "", "").ok());
      if (full.ok()) {
        // A save does not reach that moment.
        value += 1;
        break;
      }
      ++moments;
      EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
      EXPECT_EQ(value_there(), value);
      EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
      value += 2;
      ASSERT_TRUE(save(value).ok());
      EXPECT_EQ(value_there(), value);
    }
  }
  // Four files of two ranks are written and synced.
  EXPECT_GE(moments, 10);
}

TEST_F(StateTest, BadPlaceOrCheckpoint_IsTheSameErrorOnAllRanks_AndTheNextSaveGoesOn) {
  const auto save = [&](Comm& comm, const std::string& dir) {
    return SaveCheckpoint(comm, dir, {}, [&](StateWriter& writer) { return WriteAll(writer, 3); });
  };
  const std::string file = JoinPath(root_, "file"), good = JoinPath(root_, "good");
  ASSERT_TRUE(WriteFileAtomically(file, "mine").ok());
  std::vector<std::vector<absl::Status>> errors(2);
  RunRanks(2, [&](Comm& comm) {
    std::vector<absl::Status>& mine = errors[comm.rank()];
    // No user can create anything in /proc.
    for (const std::string& dir : {file, JoinPath(file, "ckpt"), std::string("/proc/ckpt")}) {
      mine.push_back(save(comm, dir));
      EXPECT_FALSE(mine.back().ok()) << dir;
      EXPECT_THAT(std::string(mine.back().message()), HasSubstr(ParentPath(dir)));
    }
    ASSERT_TRUE(save(comm, good).ok());
    // One of a newer program, one without one of its files, and one whose manifest is not a
    // checkpoint's.
    const std::string newer = JoinPath(root_, "newer"), missing = JoinPath(root_, "missing");
    ASSERT_TRUE(save(comm, newer).ok());
    ASSERT_TRUE(save(comm, missing).ok());
    if (comm.rank() == 0) {
      auto manifest = nlohmann::json::parse(*ReadFile(JoinPath(newer, kManifestName)));
      manifest["version"] = 2;
      manifest.erase("digest");
      manifest["digest"] = DigestBytes(manifest.dump()).xxh3;
      ASSERT_TRUE(WriteFileAtomically(JoinPath(newer, kManifestName), manifest.dump()).ok());
      ASSERT_EQ(unlink(JoinPath(missing, RandomStatesFileName(1)).c_str()), 0);
    }
    comm.Barrier();
    for (const auto& [dir, code] : {std::pair{newer, absl::StatusCode::kUnimplemented},
                                    {missing, absl::StatusCode::kDataLoss},
                                    {file, absl::StatusCode::kFailedPrecondition}}) {
      const auto opened = OpenCheckpoint(comm, dir, CheckpointFolder(""));
      EXPECT_EQ(opened.status().code(), code) << opened.status();
      mine.push_back(opened.status());
    }
    ASSERT_TRUE(save(comm, good).ok());
    EXPECT_TRUE(OpenCheckpoint(comm, good, CheckpointFolder("")).ok());
  });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(*ReadFile(file), "mine");
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("file", "good", "missing", "newer"));
}

TEST_F(StateTest, TensorThatAThreadChangesMeanwhile_IsNamed_AndTheOldCheckpointStays) {
  const std::string dir = JoinPath(root_, "ckpt");
  at::Tensor weight = at::full({3'000'000}, 1.0);
  RunRanks(1, [&](Comm& comm) {
    const auto save = [&] {
      return SaveCheckpoint(comm, dir, {}, [&](StateWriter& writer) {
        return writer.WriteModel(ModelFileName(0), {{"w", weight}});
      });
    };
    ASSERT_TRUE(save().ok());
    const std::string report = JoinPath(root_, "report");
    HeldReport held(report);
    ASSERT_TRUE(ArmFailpoints("worker.checkpoint_block=report", "", report).ok());
    std::thread changes([&] {
      held.WaitUntilHeld();
      weight.add_(1);
      held.Release();
    });
    const absl::Status status = save();
    changes.join();
    ASSERT_TRUE(ArmFailpoints("", "", "").ok());
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("tensor \"w\" of model.safetensors changed"));
    const auto reader = StateReader::Open(dir);
    ASSERT_TRUE(reader.ok());
    EXPECT_EQ(reader->Read(ModelFileName(0))->GetTensor("w")->max().item<float>(), 1);
    EXPECT_TRUE(save().ok());
  });
}

TEST_F(StateTest, D21_TwoRanksWithOneFileName_IsAnErrorOnAllRanks) {
  RunRanks(2, [&](Comm& comm) {
    const absl::Status saved = SaveCheckpoint(
        comm, JoinPath(root_, "c"), {},
        [](StateWriter& writer) { return writer.Write(ScalerFileName(0), StateDict()); });
    EXPECT_THAT(std::string(saved.message()),
                HasSubstr("scaler.json was written by rank 0 and by rank 1"));
  });
  EXPECT_TRUE(ListDirectory(root_)->empty());
}

// A rank of another machine, whose folders differ from rank 0's.
class ElsewhereComm : public BorrowedComm {
 public:
  explicit ElsewhereComm(Comm& comm) : BorrowedComm(comm) {}
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    const std::string got = BorrowedComm::BroadcastBytes(bytes, root);
    return got.find(std::string(kStagingMark)) == std::string::npos ? got : got + "-elsewhere";
  }
};

// Like a sharded model, whose parts the ranks exchange before they write.
TEST_F(StateTest, FolderThatOneRankDoesNotSee_IsAnErrorOfAllAndKeepsNoneInAnExchange) {
  RunRanks(2, [&](Comm& comm) {
    ElsewhereComm elsewhere(comm);
    Comm& here = comm.rank() == 1 ? elsewhere : comm;
    const absl::Status saved =
        SaveCheckpoint(here, JoinPath(root_, "c"), {}, [&](StateWriter& writer) {
          EXPECT_EQ(comm.AllGatherBytes("a part").size(), 2u);
          return WriteAll(writer, 1);
        });
    EXPECT_EQ(saved.code(), absl::StatusCode::kNotFound) << saved;
    EXPECT_THAT(std::string(saved.message()),
                AllOf(HasSubstr("rank 1: "), HasSubstr("is not visible here")));
  });
  EXPECT_TRUE(ListDirectory(root_)->empty());
}

TEST_F(StateTest, D18_OldCheckpointGoesOnlyAfterTheNewOneIsThere) {
  const CheckpointFolder folder(root_);
  RunRanks(2, [&](Comm& comm) {
    const auto save = [&](int64_t iteration, bool fail) {
      return SaveNumberedCheckpoint(comm, folder, {.iteration = iteration}, /*total_limit=*/1,
                                    [&](StateWriter& writer) -> absl::Status {
                                      EXPECT_TRUE(iteration == 0 || folder.Newest().ok())
                                          << "something to resume from at every moment";
                                      if (fail) return absl::ResourceExhaustedError("disk full");
                                      return WriteAll(writer, iteration);
                                    });
    };
    ASSERT_TRUE(save(0, false).ok());
    EXPECT_EQ(save(1, true).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(*folder.Newest(), folder.PathOf(0));
    comm.Barrier();
    ASSERT_TRUE(save(1, false).ok());
    EXPECT_EQ(save(1, false).code(), absl::StatusCode::kAlreadyExists);
  });
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_1"));
}

TEST_F(StateTest, OldCheckpointThatIsRemovedLater_IsWaitedForByTheNextSaveOnly) {
  const CheckpointFolder folder(root_);
  Notification go;
  std::atomic<bool> gone{false};
  Disposal disposal([&](const std::string& path) {
    go.WaitForNotification();
    // Longer than it takes a save to begin.
    for (int i = 0; i < 300; ++i) {
      EXPECT_TRUE(WriteFileAtomically(JoinPath(path, "more"), "bytes").ok());
    }
    const absl::Status removed = RemoveTree(path);
    gone = true;
    return removed;
  });
  RunRanks(2, [&](Comm& comm) {
    const auto save = [&](int64_t iteration, bool removed) {
      const PublishOptions options{.keep = 1, .disposal = comm.rank() == 0 ? &disposal : nullptr};
      return SaveNumberedCheckpoint(comm, folder, {.iteration = iteration}, options,
                                    [&](StateWriter& writer) -> absl::Status {
                                      EXPECT_EQ(gone, removed);
                                      return WriteAll(writer, iteration);
                                    });
    };
    ASSERT_TRUE(save(0, false).ok());
    ASSERT_TRUE(save(1, false).ok());
    EXPECT_EQ(*folder.Newest(), folder.PathOf(1));
    EXPECT_FALSE(gone);
    comm.Barrier();
    if (comm.rank() == 1) go.Notify();
    ASSERT_TRUE(save(2, true).ok());
  });
  disposal.Wait();
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_2"));
}

TEST_F(StateTest, D19_IterationIsRestored_SoTheNextSaveHasTheNextNumber) {
  const CheckpointFolder folder(root_);
  RunRanks(2, [&](Comm& comm) {
    for (int64_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(
          SaveNumberedCheckpoint(comm, folder, {.iteration = i}, 0, [](StateWriter& writer) {
            return WriteAll(writer, 1);
          }).ok());
    }
    const auto reader = OpenCheckpoint(comm, "", folder);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->dir(), folder.PathOf(2));
    EXPECT_EQ(reader->info().iteration + 1, 3);
    EXPECT_TRUE(SaveNumberedCheckpoint(comm, folder, {.iteration = reader->info().iteration + 1}, 0,
                                       [](StateWriter& writer) { return WriteAll(writer, 1); })
                    .ok());
  });
}

TEST_F(StateTest, NoCheckpoint_IsTheSameErrorOnAllRanks) {
  RunRanks(2, [&](Comm& comm) {
    const auto reader = OpenCheckpoint(comm, "", CheckpointFolder(root_));
    EXPECT_EQ(reader.status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(OpenCheckpoint(comm, JoinPath(root_, "x"), CheckpointFolder("")).status().code(),
              absl::StatusCode::kNotFound);
  });
}

TEST_F(StateTest, CheckpointThatSomeRanksDoNotSee_IsNeitherNoneNorDamaged) {
  const std::string whole = JoinPath(root_, "whole"), part = JoinPath(root_, "part");
  RunRanks(2, [&](Comm& comm) {
    for (const std::string& dir : {whole, part}) {
      ASSERT_TRUE(SaveCheckpoint(comm, dir, {}, [&](StateWriter& writer) {
                    return WriteAll(writer, 3);
                  }).ok());
    }
    if (comm.rank() == 0) {
      ASSERT_EQ(unlink(JoinPath(part, RandomStatesFileName(1)).c_str()), 0);
    }
    comm.Barrier();
    for (const std::string& other : {JoinPath(root_, "nothing"), part}) {
      const absl::Status status =
          OpenCheckpoint(comm, comm.rank() == 0 ? whole : other, CheckpointFolder("")).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("rank 1: " + other), HasSubstr("save_on_each_node")));
    }
  });
}

TEST_F(StateTest, WriterUsedTwiceForAName_IsRefused) {
  StateWriter writer(root_, 0);
  EXPECT_TRUE(writer.Write("a.json", StateDict()).ok());
  EXPECT_FALSE(writer.Write("a.json", StateDict()).ok());
  EXPECT_FALSE(writer.Write("../a.json", StateDict()).ok());
  EXPECT_FALSE(writer.Write("manifest.json", StateDict()).ok());
}

}  // namespace
}  // namespace muster
