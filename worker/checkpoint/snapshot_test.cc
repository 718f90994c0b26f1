#include "worker/checkpoint/snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <string>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "c10/core/StreamGuard.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/fake_device.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class SnapshotTest : public testing::Test {
 protected:
  // Writes all files as they are.
  void WriteOut(const Snapshot& snapshot) {
    for (const Snapshot::File& file : snapshot.files()) {
      EXPECT_EQ(file.offset % kDirectAlignment, 0u);
      ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, file.name), snapshot.Contents(file)).ok());
    }
  }

  const TestFolder test_folder_;
  const std::string dir_ = test_folder_.path();
};

TEST_F(SnapshotTest, Files_AreThoseOfASynchronousSaveWithAlignedData) {
  Snapshot snapshot;
  const NamedTensors tensors = {{"b", at::arange(10, at::kLong)},
                                {"a", at::arange(12, at::kFloat).view({3, 4}).t()},
                                {"empty", at::ones({0, 3})},
                                {"flag", at::full({}, true, at::kBool)}};
  ASSERT_TRUE(
      snapshot
          .Add("model.safetensors", tensors, {.metadata = SafetensorsMetadata{{"format", "pt"}}})
          .ok());
  StateDict state;
  state.SetTensor("t", at::ones({5}, at::kHalf));
  state.SetInt("n", 7);
  ASSERT_TRUE(snapshot.Add("optimizer.safetensors", state, SharedTensors::kWriteAll).ok());
  StateDict scalars;
  scalars.SetDouble("x", 0.5);
  ASSERT_TRUE(snapshot.Add("scheduler.json", scalars, SharedTensors::kWriteAll).ok());
  WriteOut(snapshot);

  const auto header = ReadSafetensorsHeader(JoinPath(dir_, "model.safetensors"));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ((8 + header->header_bytes) % kDirectAlignment, 0u);
  const auto model = ReadStateDict(JoinPath(dir_, "model.safetensors"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->metadata().at("format"), "pt");
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(model->GetTensor(name)->equal(tensor));
  const auto optimizer = ReadStateDict(JoinPath(dir_, "optimizer.safetensors"));
  EXPECT_TRUE(optimizer->GetTensor("t")->equal(at::ones({5}, at::kHalf)));
  EXPECT_EQ(*optimizer->GetInt("n"), 7);
  EXPECT_EQ(*ReadStateDict(JoinPath(dir_, "scheduler.json"))->GetDouble("x"), 0.5);
  EXPECT_EQ(snapshot.bytes(), (ReadFile(JoinPath(dir_, "model.safetensors"))->size() +
                               ReadFile(JoinPath(dir_, "optimizer.safetensors"))->size() +
                               ReadFile(JoinPath(dir_, "scheduler.json"))->size()));
}

TEST_F(SnapshotTest, KeptTensors_TakeNoMemoryAndAreWrittenAsTheyWere) {
  Snapshot snapshot;
  std::vector<at::Tensor> kept;
  snapshot.KeepBy([&](const at::Tensor& tensor) {
    kept.push_back(tensor.contiguous().clone());
    return kept.back();
  });
  const at::Tensor tensor = at::ones({1000, 1000});
  snapshot.CopyLater(tensor);
  const NamedTensors tensors = {{"a", tensor}, {"again", tensor}, {"t", at::arange(6).t()}};
  ASSERT_TRUE(snapshot.Add("m.safetensors", tensors, {.shared = SharedTensors::kWriteAll}).ok());
  ASSERT_TRUE(snapshot.AddText("m.json", "{}").ok());
  EXPECT_EQ(kept.size(), 2u) << "one tensor under two names is kept once";
  EXPECT_LT(snapshot.memory().size(), tensor.nbytes()) << "only text is in memory";
  EXPECT_TRUE(snapshot.TakeDeferred()->empty());
  tensor.fill_(2);
  for (const Snapshot::File& file : snapshot.files()) {
    const auto written = snapshot.Write(file, JoinPath(dir_, file.name), {});
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(written->digest.bytes, file.bytes);
  }
  const auto model = ReadStateDict(JoinPath(dir_, "m.safetensors"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(model->GetTensor("a")->equal(at::ones({1000, 1000})));
  EXPECT_TRUE(model->GetTensor("again")->equal(at::ones({1000, 1000})));
  EXPECT_TRUE(model->GetTensor("t")->equal(at::arange(6)));
  EXPECT_EQ(*ReadFile(JoinPath(dir_, "m.json")), "{}");

  kept[1].fill_(3);
  EXPECT_THAT(
      std::string(snapshot.Write(snapshot.files()[0], JoinPath(dir_, "m.safetensors"), {})
                      .status()
                      .message()),
      HasSubstr("tensor \"a\" of m.safetensors changed while it was saved: what save_state() "));
  snapshot.KeepBy([](const at::Tensor&) -> absl::StatusOr<at::Tensor> {
    return absl::ResourceExhaustedError("the disk is full");
  });
  const absl::Status full = snapshot.Add("n.safetensors", NamedTensors{{"a", tensor}}, {});
  EXPECT_TRUE(absl::IsResourceExhausted(full));
  EXPECT_EQ(full.message(), "cannot copy n.safetensors for an asynchronous save: the disk is full");
  // The next save is in memory again.
  snapshot.Clear();
  ASSERT_TRUE(snapshot.Add("m.safetensors", NamedTensors{{"a", tensor}}, {}).ok());
  EXPECT_EQ(kept.size(), 2u);
  EXPECT_GE(snapshot.memory().size(), tensor.nbytes());
}

TEST_F(SnapshotTest, TensorsThatChangeLater_AreNotInTheFile) {
  Snapshot snapshot;
  const at::Tensor tensor = at::ones({1000});
  ASSERT_TRUE(snapshot.Add("m.safetensors", NamedTensors{{"t", tensor}}, {}).ok());
  tensor.fill_(2);
  WriteOut(snapshot);
  EXPECT_TRUE(
      ReadStateDict(JoinPath(dir_, "m.safetensors"))->GetTensor("t")->equal(at::ones(1000)));
}

TEST_F(SnapshotTest, TensorsToCopyLater_AreCopiedByTheirRun) {
  Snapshot snapshot;
  const at::Tensor later = at::arange(5000, at::kFloat), small = at::ones({3}),
                   now = at::ones({5000}), filler = at::ones({3'000'000});
  snapshot.CopyLater(later);
  snapshot.CopyLater(small);
  snapshot.CopyLater(at::Tensor());
  ASSERT_TRUE(
      snapshot
          .Add("m.safetensors", NamedTensors{{"later", later}, {"small", small}, {"now", now}}, {})
          .ok());
  // The memory moves as it grows.
  ASSERT_TRUE(snapshot.Add("n.safetensors", NamedTensors{{"filler", filler}}, {}).ok());
  now.fill_(-1);
  small.fill_(-1);
  const std::unique_ptr<DeferredCopy> deferred = snapshot.TakeDeferred();
  ASSERT_FALSE(deferred->empty());
  deferred->Run();
  EXPECT_TRUE(deferred->status().ok()) << deferred->status();
  WriteOut(snapshot);
  const auto file = ReadStateDict(JoinPath(dir_, "m.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->GetTensor("later")->equal(later));
  EXPECT_TRUE(file->GetTensor("small")->equal(at::ones({3})));
  EXPECT_TRUE(file->GetTensor("now")->equal(at::ones({5000})));
  // Copies that are left belong to one save.
  snapshot.Clear();
  ASSERT_TRUE(snapshot.Add("m.safetensors", NamedTensors{{"later", later}}, {}).ok());
  EXPECT_TRUE(snapshot.TakeDeferred()->empty());
}

TEST_F(SnapshotTest, TensorsOfADevice_AreCopiedBesideTraining) {
  const c10::StreamGuard training(FakeDevice().getNewStream(FakeDevice().device(), 0));
  const size_t copies = CopiesFromFakeDevice().size();
  const int waits = FakeDevice().host_waits();
  Snapshot snapshot;
  const std::vector<float> values(5000, 3);
  const at::Tensor later = OnFakeDevice(values), buffer = OnFakeDevice({1, 2});
  snapshot.CopyLater(later);
  ASSERT_TRUE(
      snapshot.Add("m.safetensors", NamedTensors{{"later", later}, {"buffer", buffer}}, {}).ok());
  const std::unique_ptr<DeferredCopy> deferred = snapshot.TakeDeferred();
  // The program may change tensors that it did not promise to leave alone.
  SetValues(buffer, -1);
  EXPECT_EQ(FakeDevice().host_waits(), waits) << "save_state() does not wait for the device";
  deferred->RunWhileTrainingWaits(Clock::Real());
  const std::vector<FakeStreams::Point> made = CopiesFromFakeDevice();
  ASSERT_EQ(made.size(), copies + 2);
  for (size_t i = copies; i < made.size(); ++i) EXPECT_TRUE(FakeDevice().IsBefore(made[i])) << i;
  EXPECT_EQ(FakeDevice().host_waits(), waits) << "nor does the optimizer's step on the host";
  SetValues(later, -1);
  deferred->Wait();
  EXPECT_TRUE(deferred->status().ok()) << deferred->status();
  EXPECT_EQ(FakeDevice().host_waits(), waits + 1);
  WriteOut(snapshot);
  const auto file = ReadStateDict(JoinPath(dir_, "m.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(ValuesOf(*file->GetTensor("later")), values);
  EXPECT_EQ(ValuesOf(*file->GetTensor("buffer")), (std::vector<float>{1, 2}));
}

TEST_F(SnapshotTest, DeviceWithoutRoomForAClone_HasTheTensorCopiedAtOnce) {
  Snapshot snapshot;
  const at::Tensor later = OnFakeDevice({3, 4}), buffer = OnFakeDevice({1, 2});
  snapshot.CopyLater(later);
  LimitFakeDevice(0);
  const absl::Status added =
      snapshot.Add("m.safetensors", NamedTensors{{"later", later}, {"buffer", buffer}}, {});
  LimitFakeDevice(-1);
  ASSERT_TRUE(added.ok()) << added;
  SetValues(buffer, -1);
  const std::unique_ptr<DeferredCopy> deferred = snapshot.TakeDeferred();
  deferred->RunWhileTrainingWaits(Clock::Real());
  deferred->Wait();
  WriteOut(snapshot);
  const auto file = ReadStateDict(JoinPath(dir_, "m.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(ValuesOf(*file->GetTensor("buffer")), (std::vector<float>{1, 2}));
}

TEST_F(SnapshotTest, TensorsOfADeviceWithoutAPromise_AreCopiedAtOnceWithOneWait) {
  const int waits = FakeDevice().host_waits();
  Snapshot snapshot;
  const at::Tensor a = OnFakeDevice({1, 2}), b = OnFakeDevice({3});
  ASSERT_TRUE(snapshot.Add("m.safetensors", NamedTensors{{"a", a}, {"b", b}}, {}).ok());
  EXPECT_EQ(FakeDevice().host_waits(), waits + 1);
  SetValues(a, -1);
  EXPECT_TRUE(snapshot.TakeDeferred()->empty());
  WriteOut(snapshot);
  const auto file = ReadStateDict(JoinPath(dir_, "m.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(ValuesOf(*file->GetTensor("a")), (std::vector<float>{1, 2}));
  EXPECT_EQ(ValuesOf(*file->GetTensor("b")), (std::vector<float>{3}));
}

TEST_F(SnapshotTest, SecondUse_HoldsTheNewFilesOnly) {
  Snapshot snapshot;
  ASSERT_TRUE(snapshot.Add("a.safetensors", NamedTensors{{"t", at::ones({100})}}, {}).ok());
  const char* const before = snapshot.Contents(snapshot.files()[0]).data();
  snapshot.Clear();
  EXPECT_EQ(snapshot.bytes(), 0u);
  ASSERT_TRUE(snapshot.Add("b.safetensors", NamedTensors{{"t", at::ones({7})}}, {}).ok());
  EXPECT_EQ(snapshot.Contents(snapshot.files()[0]).data(), before);
  WriteOut(snapshot);
  EXPECT_FALSE(PathExists(JoinPath(dir_, "a.safetensors")));
  EXPECT_TRUE(ReadStateDict(JoinPath(dir_, "b.safetensors"))->GetTensor("t")->equal(at::ones(7)));
}

TEST_F(SnapshotTest, WhatNoFileCanHold_IsRefusedAsBySaves) {
  Snapshot snapshot;
  const absl::Status status = snapshot.Add("m.safetensors", NamedTensors{{"t", at::Tensor()}}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor \"t\": is undefined"));
  StateDict state;
  state.SetTensor("t", at::ones({1}));
  EXPECT_THAT(std::string(snapshot.Add("m.json", state, SharedTensors::kWriteAll).message()),
              HasSubstr("a .json file cannot hold the tensor"));
  EXPECT_EQ(snapshot.files().size(), 0u);
}

// The remedy for one is not that for the other.
TEST_F(SnapshotTest, NoMemory_NamesTheKindOfSave) {
  const OwnedFd fd(memfd_create("snapshot_test", MFD_CLOEXEC));
  Snapshot snapshot(*AlignedMemory::OfFile(fd.get()), /*reserved=*/4096);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status =
      snapshot.Add("m.safetensors", NamedTensors{{"t", at::ones({5000})}}, {});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::StartsWith("cannot copy m.safetensors for a save in memory: cannot get "));
}

}  // namespace
}  // namespace muster
