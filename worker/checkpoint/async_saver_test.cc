#include "worker/checkpoint/async_saver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_threads.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class AsyncSaverTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(ArmFailpoints("", "", "").ok()); }

  // Runs `fn` on `ranks` ranks, each with a saver.
  void RunSavers(int ranks, const std::function<void(Comm&, AsyncSaver&)>& fn) {
    std::vector<std::unique_ptr<Comm>> background = MakeThreadComms(ranks);
    RunRanks(ranks, [&](Comm& comm) {
      AsyncSaver saver(std::move(background[comm.rank()]), {.lazy = lazy_});
      fn(comm, saver);
    });
  }

  const TestFolder folder_;
  const std::string root_ = folder_.path(), dir_ = folder_.Path("ckpt");
  bool lazy_ = false;
};

// Rank 0 writes what is the same everywhere, every rank its own state; all values are `value`.
absl::Status WriteAll(StateWriter& writer, const at::Tensor& value) {
  if (writer.rank() == 0) {
    const absl::Status model = writer.WriteModel(ModelFileName(0), {{"w", value}});
    if (!model.ok()) return model;
  }
  StateDict random;
  random.SetTensor("cpu", value.select(0, 0).add(writer.rank()));
  return writer.Write(RandomStatesFileName(writer.rank()), random);
}

float WeightIn(const std::string& dir) {
  const auto reader = StateReader::Open(dir);
  if (!reader.ok()) return -1;
  return reader->Read(ModelFileName(0))->GetTensor("w")->select(0, 0).item<float>();
}

TEST_F(AsyncSaverTest, ThreeRanks_SaveWhatWasThereWhenTheCallReturned) {
  RunSavers(3, [&](Comm& comm, AsyncSaver& saver) {
    const at::Tensor value = at::full({5000}, 1.5);
    std::vector<AsyncSaver::Outcome> earlier;
    const absl::Status begun = saver.Begin(
        comm, {.dir = dir_, .info = {.step = 9}},
        [&](StateWriter& writer) { return WriteAll(writer, value); }, &earlier);
    ASSERT_TRUE(begun.ok()) << begun;
    value.fill_(7);
    EXPECT_TRUE(earlier.empty());
    const std::vector<AsyncSaver::Outcome> outcomes = saver.Wait();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_TRUE(outcomes[0].status.ok()) << outcomes[0].status;
    EXPECT_EQ(outcomes[0].path, dir_);
    EXPECT_GT(outcomes[0].bytes, 0u);
    EXPECT_FALSE(saver.busy());
    EXPECT_TRUE(saver.Wait().empty());

    const auto reader = StateReader::Open(dir_);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->info().world_size, 3);
    EXPECT_EQ(reader->info().step, 9);
    EXPECT_EQ(WeightIn(dir_), 1.5);
    EXPECT_EQ(reader->Read(RandomStatesFileName(comm.rank()))->GetTensor("cpu")->item<float>(),
              1.5 + comm.rank());
    EXPECT_TRUE(VerifyCheckpoint(dir_, VerifyLevel::kContents).ok());
  });
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
}

TEST_F(AsyncSaverTest, KeptState_IsWhatWasThereWhenTheCallReturned) {
  lazy_ = true;
  RunSavers(2, [&](Comm& comm, AsyncSaver& saver) {
    const at::Tensor value = at::full({5000}, 1.5);
    std::vector<at::Tensor> kept;
    std::vector<AsyncSaver::Outcome> earlier;
    const absl::Status begun = saver.Begin(
        comm,
        {.dir = dir_,
         .keep =
             [&](const at::Tensor& tensor) {
               kept.push_back(tensor.clone());
               return kept.back();
             }},
        [&](StateWriter& writer) {
          writer.CopyLater(value);
          return WriteAll(writer, value);
        },
        &earlier);
    ASSERT_TRUE(begun.ok()) << begun;
    EXPECT_FALSE(kept.empty());
    value.fill_(7);
    const std::vector<AsyncSaver::Outcome> outcomes = saver.Wait();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_TRUE(outcomes[0].status.ok()) << outcomes[0].status;
    EXPECT_EQ(WeightIn(dir_), 1.5);
    EXPECT_TRUE(VerifyCheckpoint(dir_, VerifyLevel::kContents).ok());
    for (const at::Tensor& tensor : kept) EXPECT_EQ(tensor.use_count(), 1) << "it is let go";
  });
}

TEST_F(AsyncSaverTest, NoThread_IsAnErrorOfTheConstructor) {
  for (const int threads : {0, 1}) {
    const ThreadsLeft left(threads);
    EXPECT_THROW(AsyncSaver(std::make_unique<LocalComm>(), {.lazy = true}), std::system_error);
  }
}

TEST_F(AsyncSaverTest, StateOfADevice_IsSavedAsItWasBesideStepsAndWithoutThem) {
  lazy_ = true;
  RunSavers(1, [&](Comm& comm, AsyncSaver& saver) {
    const at::Tensor weight = OnFakeDevice(std::vector<float>(5000, 0));
    for (int save = 1; save <= 6; ++save) {
      // The optimizer steps, except at every third save.
      if (save % 3 != 0) {
        saver.WaitForCopy();
        SetValues(weight, static_cast<float>(save));
      }
      std::vector<AsyncSaver::Outcome> earlier;
      const absl::Status begun = saver.Begin(
          comm, {.dir = absl::StrCat(dir_, save)},
          [&](StateWriter& writer) {
            writer.CopyLater(weight);
            return writer.WriteModel(ModelFileName(0), {{"w", weight}});
          },
          &earlier);
      ASSERT_TRUE(begun.ok()) << begun;
      for (const AsyncSaver::Outcome& outcome : earlier) {
        EXPECT_TRUE(outcome.status.ok()) << outcome.status;
      }
    }
    saver.WaitForCopy();
    SetValues(weight, -1);
    for (const AsyncSaver::Outcome& outcome : saver.Wait()) {
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    }
    for (int save = 1; save <= 6; ++save) {
      const auto reader = StateReader::Open(absl::StrCat(dir_, save));
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ(ValuesOf(*reader->Read(ModelFileName(0))->GetTensor("w")),
                std::vector<float>(5000, static_cast<float>(save % 3 == 0 ? save - 1 : save)));
    }
  });
}

TEST_F(AsyncSaverTest, Destroyed_FinishesWhatHasBegun) {
  RunSavers(2, [&](Comm& comm, AsyncSaver& saver) {
    std::vector<AsyncSaver::Outcome> earlier;
    for (int i = 1; i <= 3; ++i) {
      ASSERT_TRUE(saver
                      .Begin(
                          comm, {.dir = dir_},
                          [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, i)); },
                          &earlier)
                      .ok());
    }
  });
  EXPECT_EQ(WeightIn(dir_), 3);
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
}

TEST_F(AsyncSaverTest, RankThatCannotWrite_FailsTheSaveOnAllRanksAndTheOldOneStays) {
  RunSavers(2, [&](Comm& comm, AsyncSaver& saver) {
    const auto save = [&](double value) {
      std::vector<AsyncSaver::Outcome> earlier;
      const absl::Status begun = saver.Begin(
          comm, {.dir = dir_},
          [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, value)); }, &earlier);
      EXPECT_TRUE(begun.ok()) << begun;
      const std::vector<AsyncSaver::Outcome> outcomes = saver.Wait();
      return outcomes.empty() ? absl::InternalError("no outcome") : outcomes[0].status;
    };
    EXPECT_TRUE(save(1).ok());
    if (comm.rank() == 0) {
      ASSERT_TRUE(ArmFailpoints("worker.checkpoint_block=error:RESOURCE_EXHAUSTED", "", "").ok());
    }
    comm.Barrier();
    const absl::Status status = save(2);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), StartsWith("rank "));
    // Both ranks get the same error.
    const std::vector<std::string> all = comm.AllGatherBytes(std::string(status.message()));
    EXPECT_EQ(all[0], all[1]);
    EXPECT_EQ(WeightIn(dir_), 1);
    comm.Barrier();
    EXPECT_TRUE(save(3).ok());
    EXPECT_EQ(WeightIn(dir_), 3);
  });
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
}

TEST_F(AsyncSaverTest, RankThatCannotCopy_FailsTheCallOnAllRanks) {
  RunSavers(2, [&](Comm& comm, AsyncSaver& saver) {
    std::vector<AsyncSaver::Outcome> earlier;
    for (int i = 0; i < 3; ++i) {  // more saves than there is memory for
      const absl::Status status = saver.Begin(
          comm, {.dir = dir_},
          [&](StateWriter& writer) -> absl::Status {
            if (writer.rank() == 1) throw std::runtime_error("no copy");
            return WriteAll(writer, at::full({10}, 1));
          },
          &earlier);
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      EXPECT_EQ(status.message(), "rank 1: no copy");
    }
    EXPECT_TRUE(saver.Wait().empty());
  });
  EXPECT_TRUE(ListDirectory(root_)->empty());
}

TEST_F(AsyncSaverTest, FolderOfOthers_IsRefusedAtOnce) {
  ASSERT_TRUE(WriteFileAtomically(JoinPath(root_, "mine"), "x").ok());
  RunSavers(2, [&](Comm& comm, AsyncSaver& saver) {
    std::vector<AsyncSaver::Outcome> earlier;
    const absl::Status status = saver.Begin(
        comm, {.dir = root_},
        [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, 1)); }, &earlier);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("holds other files and no checkpoint"));
  });
}

TEST_F(AsyncSaverTest, NumberedSaves_RotateOnceTheNewOneIsThere) {
  const CheckpointFolder folder(root_);
  RunSavers(2, [&](Comm& comm, AsyncSaver& saver) {
    std::vector<AsyncSaver::Outcome> ended;
    const auto save = [&](int64_t number) {
      return saver.Begin(
          comm, {.folder = folder, .total_limit = 2, .info = {.iteration = number}},
          [&](StateWriter& writer) {
            return WriteAll(writer, at::full({10}, static_cast<double>(number)));
          },
          &ended);
    };
    for (int64_t number = 0; number < 4; ++number) ASSERT_TRUE(save(number).ok());
    for (AsyncSaver::Outcome& outcome : saver.Wait()) ended.push_back(std::move(outcome));
    ASSERT_EQ(ended.size(), 4u);
    for (size_t i = 0; i < ended.size(); ++i) {
      EXPECT_TRUE(ended[i].status.ok()) << ended[i].status;
      EXPECT_EQ(ended[i].path, folder.PathOf(static_cast<int64_t>(i)));
    }
    EXPECT_EQ(save(3).code(), absl::StatusCode::kAlreadyExists);
  });
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_2", "checkpoint_3"));
  EXPECT_EQ(WeightIn(folder.PathOf(3)), 3);
}

// A Comm of one rank on which nothing is published before `gate`.
class GatedComm : public LocalComm {
 public:
  explicit GatedComm(Notification* gate) : gate_(gate) {}
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    gate_->WaitForNotification();
    return LocalComm::AllGatherBytes(bytes);
  }

 private:
  Notification* const gate_;
};

TEST_F(AsyncSaverTest, ThirdSave_WaitsUntilTheFirstIsWritten) {
  Notification gate;
  LocalComm comm;
  AsyncSaver saver(std::make_unique<GatedComm>(&gate), {});
  std::vector<AsyncSaver::Outcome> earlier;
  const auto save = [&](double value) {
    return saver.Begin(
        comm, {.dir = dir_},
        [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, value)); }, &earlier);
  };
  // Two saves do not wait for the disk.
  ASSERT_TRUE(save(1).ok());
  ASSERT_TRUE(save(2).ok());
  EXPECT_TRUE(saver.busy());
  EXPECT_TRUE(earlier.empty());
  EXPECT_FALSE(PathExists(dir_));
  std::thread opener([&] { gate.Notify(); });
  ASSERT_TRUE(save(3).ok());
  ASSERT_GE(earlier.size(), 1u);
  EXPECT_TRUE(earlier[0].status.ok()) << earlier[0].status;
  opener.join();
  saver.Wait();
  EXPECT_EQ(WeightIn(dir_), 3);
}

TEST_F(AsyncSaverTest, LostPeer_FailsTheSave) {
  std::vector<std::unique_ptr<Comm>> background = MakeThreadComms(2);
  background[1].reset();
  RunRanks(1, [&](Comm& comm) {
    AsyncSaver saver(std::move(background[0]), {});
    std::vector<AsyncSaver::Outcome> earlier;
    ASSERT_TRUE(saver
                    .Begin(
                        comm, {.dir = dir_},
                        [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, 1)); },
                        &earlier)
                    .ok());
    const std::vector<AsyncSaver::Outcome> outcomes = saver.Wait();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_FALSE(outcomes[0].status.ok());
  });
  EXPECT_TRUE(ListDirectory(root_)->empty());
}

TEST_F(AsyncSaverTest, End_IsLoggedBeforeAnybodyAsks) {
  testing::internal::CaptureStderr();
  {
    LocalComm comm;
    AsyncSaver saver(std::make_unique<LocalComm>(), {});
    std::vector<AsyncSaver::Outcome> earlier;
    const auto save = [&](const std::string& dir) {
      return saver.Begin(
          comm, {.dir = dir},
          [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, 1)); }, &earlier);
    };
    ASSERT_TRUE(ArmFailpoints("worker.checkpoint_sync=error:RESOURCE_EXHAUSTED", "", "").ok());
    ASSERT_TRUE(save(dir_).ok());
    while (saver.busy()) std::this_thread::yield();
    EXPECT_TRUE(saver.failed());
    ASSERT_TRUE(ArmFailpoints("", "", "").ok());
    ASSERT_TRUE(save(dir_ + "-2").ok());
    EXPECT_EQ(earlier.size(), 1);
    EXPECT_FALSE(saver.failed());
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("the asynchronous save of " + dir_ + " failed: "),
                    HasSubstr("worker.checkpoint_sync"),
                    HasSubstr("saved " + dir_ + "-2: training waited ")));
}

TEST_F(AsyncSaverTest, LazySave_HoldsWhatWasThereBeforeTheChange) {
  // The copier is late: the code that changes the tensor makes the copy.
  ASSERT_TRUE(ArmFailpoints("worker.checkpoint_copy=delay:200ms", "", "").ok());
  LocalComm comm;
  AsyncSaver saver(std::make_unique<LocalComm>(), {.lazy = true});
  const at::Tensor weight = at::zeros({5000});
  std::vector<AsyncSaver::Outcome> outcomes;
  for (int i = 0; i < 4; ++i) {
    weight.fill_(i);
    ASSERT_TRUE(saver
                    .Begin(
                        comm, {.dir = JoinPath(root_, std::to_string(i))},
                        [&](StateWriter& writer) {
                          writer.CopyLater(weight);
                          return writer.WriteModel(ModelFileName(0), {{"w", weight}});
                        },
                        &outcomes)
                    .ok());
    saver.WaitForCopy();
    weight.fill_(-1);
  }
  for (AsyncSaver::Outcome& outcome : saver.Wait()) outcomes.push_back(std::move(outcome));
  ASSERT_EQ(outcomes.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(outcomes[i].status.ok()) << outcomes[i].status;
    const auto reader = StateReader::Open(JoinPath(root_, std::to_string(i)));
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_TRUE(reader->Read(ModelFileName(0))->GetTensor("w")->equal(at::full({5000}, double(i))));
  }
}

TEST_F(AsyncSaverTest, LazySaveOfAChangedTensor_FailsOnAllRanksAndTheOldOneStays) {
  lazy_ = true;
  RunSavers(2, [&](Comm& comm, AsyncSaver& saver) {
    const at::Tensor weight = at::ones({5000});
    const auto save = [&](bool change) {
      std::vector<AsyncSaver::Outcome> earlier;
      const absl::Status begun = saver.Begin(
          comm, {.dir = dir_},
          [&](StateWriter& writer) -> absl::Status {
            if (writer.rank() == 0) return absl::OkStatus();
            writer.CopyLater(weight);
            const absl::Status written = writer.WriteModel(ModelFileName(0), {{"w", weight}});
            if (change) weight.fill_(2);
            return written;
          },
          &earlier);
      EXPECT_TRUE(begun.ok()) << begun;
      return saver.Wait().at(0).status;
    };
    EXPECT_TRUE(save(false).ok());
    const absl::Status status = save(true);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                StartsWith("rank 1: \"w\" of model.safetensors was changed by the program"));
    weight.fill_(1);
    EXPECT_TRUE(save(false).ok());
  });
  EXPECT_EQ(WeightIn(dir_), 1);
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
}

TEST_F(AsyncSaverTest, SaveThatBeginsWhileOneIsPublished_LeavesWhatThatOneKeeps) {
  RunSavers(1, [&](Comm& comm, AsyncSaver& saver) {
    std::vector<AsyncSaver::Outcome> outcomes;
    const auto save = [&](int step) {
      return saver.Begin(
          comm, {.dir = dir_, .info = {.step = step}},
          [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, step)); }, &outcomes);
    };
    ASSERT_TRUE(save(1).ok());
    EXPECT_TRUE(saver.Wait().at(0).status.ok());
    ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, "notes.txt"), "mine").ok());
    // The old checkpoint is aside and not locked, while the foreign file is still to be moved.
    ASSERT_TRUE(ArmFailpoints("worker.checkpoint_replaced=delay:200ms@1", "", "").ok());
    ASSERT_TRUE(save(2).ok());
    while (StateReader::Open(dir_)->info().step != 2) std::this_thread::yield();
    ASSERT_TRUE(save(3).ok());
    for (const AsyncSaver::Outcome& outcome : saver.Wait()) {
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    }
  });
  EXPECT_EQ(ReadFile(JoinPath(dir_, "notes.txt")).value_or("lost"), "mine");
  EXPECT_EQ(WeightIn(dir_), 3);
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
}

TEST_F(AsyncSaverTest, SaveThatIsWaitedFor_IsNotHeldBackByItsRateLimit) {
  // Writing the save takes a day; training does not wait for that.
  LocalComm comm;
  AsyncSaver saver(std::make_unique<LocalComm>(), {.max_bytes_per_second = 1});
  std::vector<AsyncSaver::Outcome> outcomes;
  const auto save = [&](double value) {
    return saver.Begin(
        comm, {.dir = dir_},
        [&](StateWriter& writer) { return WriteAll(writer, at::full({20'000}, value)); },
        &outcomes);
  };
  ASSERT_TRUE(save(1).ok());
  EXPECT_TRUE(saver.Wait().at(0).status.ok());
  ASSERT_TRUE(save(2).ok());
  EXPECT_TRUE(saver.Wait().at(0).status.ok());
  EXPECT_EQ(WeightIn(dir_), 2);
}

TEST_F(AsyncSaverTest, SavesThatTheNextOneWaitsFor_AreNotHeldBackByTheRateLimit) {
  // As above, each save takes a day; there is memory for two.
  LocalComm comm;
  AsyncSaver saver(std::make_unique<LocalComm>(), {.max_bytes_per_second = 1});
  std::vector<AsyncSaver::Outcome> outcomes;
  for (const double value : {1, 2, 3, 4, 5}) {
    ASSERT_TRUE(
        saver
            .Begin(
                comm, {.dir = dir_},
                [&](StateWriter& writer) { return WriteAll(writer, at::full({20'000}, value)); },
                &outcomes)
            .ok());
  }
  saver.Wait();
  EXPECT_EQ(WeightIn(dir_), 5);
}

TEST_F(AsyncSaverTest, Progress_IsThatOfTheSaveThatIsWritten) {
  SaveProgress progress;
  LocalComm comm;
  AsyncSaver saver(std::make_unique<LocalComm>(), {.max_bytes_per_second = 1});
  std::vector<AsyncSaver::Outcome> outcomes;
  const at::Tensor large = at::full({5 << 20}, 2.0);
  ASSERT_TRUE(saver
                  .Begin(
                      comm, {.dir = dir_, .publish = {.progress = &progress}, .info = {.step = 7}},
                      [&](StateWriter& writer) { return WriteAll(writer, large); }, &outcomes)
                  .ok());
  // Its second block has to wait for a day.
  const std::optional<RunningSave> running = progress.Read();
  ASSERT_TRUE(running.has_value());
  EXPECT_EQ(running->path, dir_);
  EXPECT_EQ(running->step, 7);
  EXPECT_TRUE(running->asynchronous);
  EXPECT_LT(running->written, running->bytes);
  EXPECT_GT(running->bytes, large.nbytes());
  ASSERT_TRUE(saver.Wait().at(0).status.ok());
  EXPECT_FALSE(progress.Read().has_value());
}

TEST_F(AsyncSaverTest, AbandonedSave_EndsAfterABlock_AndTheOldOneStays) {
  RunSavers(1, [&](Comm& comm, AsyncSaver& saver) {
    std::vector<AsyncSaver::Outcome> earlier;
    const auto begin = [&](double value) {
      return saver.Begin(
          comm, {.dir = dir_},
          [&](StateWriter& writer) { return WriteAll(writer, at::full({10}, value)); }, &earlier);
    };
    ASSERT_TRUE(begin(1).ok());
    EXPECT_TRUE(saver.Wait()[0].status.ok());
  });
  RunRanks(1, [&](Comm& comm) {
    // At a byte per second it takes years.
    AsyncSaver saver(std::move(MakeThreadComms(1)[0]), {.max_bytes_per_second = 1});
    std::vector<AsyncSaver::Outcome> earlier;
    // More than a block.
    const at::Tensor large = at::full({5 << 20}, 2.0);
    ASSERT_TRUE(saver
                    .Begin(
                        comm, {.dir = dir_},
                        [&](StateWriter& writer) { return WriteAll(writer, large); }, &earlier)
                    .ok());
    saver.Abandon();
    const std::vector<AsyncSaver::Outcome> outcomes = saver.Wait();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_EQ(outcomes[0].status.code(), absl::StatusCode::kCancelled) << outcomes[0].status;
  });
  EXPECT_EQ(WeightIn(dir_), 1);
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
}

TEST_F(AsyncSaverTest, FileOfManyBlocks_ComesBackAndAFlippedBitIsNamedByItsBlock) {
  // Three blocks, with tensors across their borders.
  const at::Tensor large = at::arange(5'000'000, at::kFloat);
  const at::Tensor small = at::arange(333, at::kLong);
  RunSavers(1, [&](Comm& comm, AsyncSaver& saver) {
    std::vector<AsyncSaver::Outcome> earlier;
    ASSERT_TRUE(
        saver
            .Begin(
                comm, {.dir = dir_},
                [&](StateWriter& writer) {
                  return writer.WriteModel(ModelFileName(0), {{"large", large}, {"small", small}});
                },
                &earlier)
            .ok());
    saver.Wait();
  });
  const auto reader = StateReader::Open(dir_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->manifest().Find("model.safetensors")->blocks.xxh3.size(), 3u);
  const auto model = reader->Read(ModelFileName(0));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(model->GetTensor("large")->equal(large));
  EXPECT_TRUE(model->GetTensor("small")->equal(small));
  EXPECT_EQ(model->metadata().at("format"), "pt");
  EXPECT_TRUE(VerifyCheckpoint(dir_, VerifyLevel::kContents).ok());
  // The digest of the whole file is also right: readers that ignore blocks use it.
  EXPECT_EQ(*DigestFile(JoinPath(dir_, "model.safetensors")),
            reader->manifest().Find("model.safetensors")->digest);

  const std::string path = JoinPath(dir_, "model.safetensors");
  std::string bytes = *ReadFile(path);
  bytes[9'000'000] ^= 1;
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
  const std::string where = absl::StrCat(path, ": is damaged: block 1 of 3 (bytes 8388608 to ");
  EXPECT_THAT(std::string(reader->Read(ModelFileName(0)).status().message()), HasSubstr(where));
  const absl::Status verified = VerifyCheckpoint(dir_, VerifyLevel::kContents).status();
  EXPECT_EQ(verified.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(verified.message()), HasSubstr(where));
}

}  // namespace
}  // namespace muster
