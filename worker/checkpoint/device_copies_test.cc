#include "worker/checkpoint/device_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "c10/core/StreamGuard.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/collective/fake_streams.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using Point = FakeStreams::Point;

FakeStreams& Streams() { return FakeDevice(); }

class DeviceCopiesTest : public testing::Test {
 protected:
  static constexpr int64_t kNumbers = 6;

  DeviceCopiesTest() { Streams().Break(false); }
  ~DeviceCopiesTest() override { Streams().Break(false); }

  const c10::Stream program_ = Streams().getNewStream(Streams().device(), 0);
  const c10::StreamGuard guard_{program_};
  std::vector<float> first_ = std::vector<float>(kNumbers, 1), second_ = {2, 3, 4};
  std::vector<float> memory_ = std::vector<float>(kNumbers + 3);
  std::vector<Point> made_;
  std::optional<int> fails_;  // number of the copy that fails
  DeviceCopies copies_{[this](char* to, const at::Tensor& from) {
    if (fails_.has_value() && *fails_ == static_cast<int>(made_.size())) {
      TORCH_CHECK(false, "out of order");
    }
    EXPECT_NE(Streams().Current(), program_) << "a stream of its own";
    std::memcpy(to, from.const_data_ptr(), from.nbytes());
    made_.push_back(Streams().Operate());
  }};
};

TEST_F(DeviceCopiesTest, Takes_WhatIsLaidOutAsInAFile) {
  const at::Tensor tensor = OnFakeDevice(first_);
  EXPECT_TRUE(DeviceCopies::Takes(tensor));
  EXPECT_FALSE(DeviceCopies::Takes(at::ones({3})));
  EXPECT_FALSE(DeviceCopies::Takes(at::ones({3}, at::kMeta)));
}

TEST_F(DeviceCopiesTest, Copies_AreBetweenWhatWasQueuedAndWhatChangesTheTensors) {
  copies_.Add("a", OnFakeDevice(first_), 0);
  copies_.Add("b", OnFakeDevice(second_), kNumbers * sizeof(float));
  EXPECT_FALSE(copies_.empty());
  const Point before = Streams().Operate();
  copies_.Start(reinterpret_cast<char*>(memory_.data()));
  const Point beside = Streams().Operate();
  std::thread([&] {
    copies_.Queue();
    copies_.Queue();
  }).join();
  ASSERT_EQ(made_.size(), 2u);
  EXPECT_EQ(memory_, (std::vector<float>{1, 1, 1, 1, 1, 1, 2, 3, 4}));
  for (const Point& copy : made_) EXPECT_FALSE(Streams().IsBefore(copy)) << "training goes on";
  const int waits = Streams().host_waits();
  copies_.LetChange();
  for (const Point& copy : made_) EXPECT_TRUE(Streams().IsBefore(copy));
  EXPECT_EQ(Streams().host_waits(), waits) << "the device waits, not the thread";
  {
    const c10::StreamGuard on(
        c10::Stream(c10::Stream::UNSAFE, Streams().device(), made_[0].stream));
    EXPECT_TRUE(Streams().IsBefore(before));
    EXPECT_FALSE(Streams().IsBefore(beside));
  }
  copies_.Wait();
  EXPECT_EQ(Streams().host_waits(), waits + 1);
  EXPECT_TRUE(copies_.status().ok()) << copies_.status();
  copies_.Wait();
  copies_.LetChange();
  EXPECT_EQ(Streams().host_waits(), waits + 1);
}

TEST_F(DeviceCopiesTest, SecondSave_UsesTheSameStream) {
  copies_.Add("a", OnFakeDevice(first_), 0);
  copies_.Start(reinterpret_cast<char*>(memory_.data()));
  copies_.Wait();
  c10::StreamId other = 0;
  DeviceCopies next([&](char*, const at::Tensor&) { other = Streams().Operate().stream; });
  next.Add("a", OnFakeDevice(first_), 0);
  next.Start(reinterpret_cast<char*>(memory_.data()));
  next.Wait();
  EXPECT_EQ(other, made_.at(0).stream);
}

TEST_F(DeviceCopiesTest, ChangeBeforeLetChange_IsDetectedAndNamed) {
  const at::Tensor tensor = OnFakeDevice(first_);
  copies_.Add("a", tensor, 0);
  copies_.Start(reinterpret_cast<char*>(memory_.data()));
  tensor.unsafeGetTensorImpl()->bump_version();
  copies_.LetChange();
  copies_.Wait();
  EXPECT_EQ(copies_.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(copies_.status().message()), HasSubstr("a was changed by the program"));
}

TEST_F(DeviceCopiesTest, ChangeAfterLetChange_IsTheOptimizers) {
  const at::Tensor tensor = OnFakeDevice(first_);
  copies_.Add("a", tensor, 0);
  copies_.Start(reinterpret_cast<char*>(memory_.data()));
  copies_.LetChange();
  tensor.unsafeGetTensorImpl()->bump_version();
  copies_.Wait();
  EXPECT_TRUE(copies_.status().ok()) << copies_.status();
}

TEST_F(DeviceCopiesTest, Tensors_AreKeptUntilTheyAreCopied) {
  at::Tensor tensor = OnFakeDevice(first_);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
  copies_.Add("a", tensor, 0);
  tensor.reset();
  copies_.Start(reinterpret_cast<char*>(memory_.data()));
  copies_.LetChange();
  EXPECT_FALSE(storage.expired());
  copies_.Wait();
  EXPECT_TRUE(storage.expired());
}

TEST_F(DeviceCopiesTest, CopyThatFails_IsAnErrorAndNobodyWaitsForever) {
  fails_ = 1;
  copies_.Add("a", OnFakeDevice(first_), 0);
  copies_.Add("b", OnFakeDevice(second_), kNumbers * sizeof(float));
  copies_.Start(reinterpret_cast<char*>(memory_.data()));
  std::thread([&] { copies_.LetChange(); }).join();
  copies_.Wait();
  EXPECT_EQ(copies_.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(copies_.status().message()),
              HasSubstr("copies from a device for a checkpoint failed: out of order"));
}

TEST_F(DeviceCopiesTest, DeviceThatFailsAfterTheyAreQueued_IsAnError) {
  copies_.Add("a", OnFakeDevice(first_), 0);
  copies_.Start(reinterpret_cast<char*>(memory_.data()));
  Streams().Break(true);
  copies_.LetChange();
  copies_.Wait();
  EXPECT_EQ(copies_.status().code(), absl::StatusCode::kInternal) << copies_.status();
}

TEST_F(DeviceCopiesTest, Destructor_WaitsForWhatIsQueued) {
  const int waits = Streams().host_waits();
  {
    DeviceCopies unused([](char*, const at::Tensor&) { FAIL(); });
    unused.Add("a", OnFakeDevice(first_), 0);
    unused.Start(reinterpret_cast<char*>(memory_.data()));
  }
  EXPECT_EQ(Streams().host_waits(), waits);
  {
    DeviceCopies queued([](char*, const at::Tensor&) {});
    queued.Add("a", OnFakeDevice(first_), 0);
    queued.Start(reinterpret_cast<char*>(memory_.data()));
    queued.Queue();
  }
  EXPECT_EQ(Streams().host_waits(), waits + 1);
}

}  // namespace
}  // namespace muster
