#include "worker/train/activation_store.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/record_function.h"
#include "base/test_folder.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/scratch_file.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/test_error.h"
#include "worker/train/disk_parts.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class ActivationStoreTest : public ::testing::Test {
 protected:
  void Make() {
    absl::StatusOr<std::shared_ptr<ScratchFile>> file =
        ScratchFile::Create(folder_.path(), &system_);
    ASSERT_TRUE(file.ok()) << file.status();
    store_ = std::make_unique<ActivationStore>(std::make_unique<DiskParts>(*file));
  }
  std::shared_ptr<ActivationStore::Parked> Park(const at::Tensor& tensor) {
    return store_->Park(tensor, store_->NewGroup());
  }

  const TestFolder folder_;
  DirectFileSystem system_;
  std::unique_ptr<ActivationStore> store_;
};

TEST_F(ActivationStoreTest, Tensors_ComeBackWithTheirStridesAndTypes) {
  Make();
  std::vector<at::Tensor> tensors = {
      at::randn({100, 33}), at::randn({70, 50}).t(), at::randn({2, 3, 40, 40}).to(at::kBFloat16),
      at::randn({2, 3, 40, 40}).contiguous(at::MemoryFormat::ChannelsLast),
      at::randn({3'000'001}).to(at::kDouble)};
  std::vector<at::Tensor> want;
  std::vector<std::shared_ptr<ActivationStore::Parked>> parked;
  for (const at::Tensor& tensor : tensors) {
    want.push_back(tensor.clone());
    parked.push_back(Park(tensor));
    ASSERT_NE(parked.back(), nullptr);
  }
  tensors.clear();
  store_->WaitUntilIdle();
  EXPECT_EQ(store_->tensors_in_memory(), 0);
  // Twice, because a graph may be kept for another backward pass.
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t i = want.size(); i-- > 0;) {
      const at::Tensor got = store_->Get(parked[i]);
      EXPECT_TRUE(got.equal(want[i])) << i;
      EXPECT_EQ(got.strides(), want[i].strides()) << i;
      EXPECT_EQ(got.scalar_type(), want[i].scalar_type()) << i;
    }
  }
}

TEST_F(ActivationStoreTest, WhatIsNotWorthATransferOrHasGaps_StaysWhereItIs) {
  Make();
  EXPECT_EQ(Park(at::ones({4})), nullptr);
  EXPECT_EQ(Park(at::ones({5000}, at::kLong)), nullptr);
  EXPECT_EQ(Park(at::ones({100, 100}).slice(1, 0, 50)), nullptr);
  EXPECT_EQ(Park(at::ones({1, 100}).expand({100, 100})), nullptr);
  // A device's copy would be negated on the host, before it has arrived.
  EXPECT_EQ(Park(at::_neg_view(at::ones({5000}))), nullptr);
  ActivationStore memory(nullptr);
  EXPECT_EQ(memory.Park(at::ones({5000}), memory.NewGroup()), nullptr);
}

TEST_F(ActivationStoreTest, ReadAhead_HoldsTheGroupBeforeAlone) {
  Make();
  std::vector<std::shared_ptr<ActivationStore::Parked>> parked;
  std::vector<uint64_t> groups;
  for (int i = 0; i < 5; ++i) {
    groups.push_back(store_->NewGroup());
    parked.push_back(store_->Park(at::full({5000}, i, at::kFloat), groups.back()));
  }
  store_->WaitUntilIdle();
  for (int i = 4; i >= 0; --i) {
    EXPECT_EQ(store_->Get(parked[i])[17].item<int>(), i);
    store_->ReadAhead(groups[i]);
    store_->WaitUntilIdle();
    EXPECT_EQ(store_->tensors_in_memory(), i > 0 ? 1 : 0);
  }
  // A pass that takes another way frees what was read ahead for it.
  store_->ReadAhead(groups[4]);
  store_->ReadAhead(groups[2]);
  store_->WaitUntilIdle();
  EXPECT_EQ(store_->tensors_in_memory(), 1);
  EXPECT_EQ(store_->Get(parked[1])[0].item<int>(), 1);
  EXPECT_EQ(store_->tensors_in_memory(), 0);
}

TEST_F(ActivationStoreTest, TheSameTensorTwice_IsParkedOnce) {
  Make();
  const at::Tensor tensor = at::ones({5000});
  const auto first = Park(tensor);
  EXPECT_EQ(Park(tensor), first);
  tensor.add_(1);
  EXPECT_NE(Park(tensor), first);
}

// Two backward threads do this with one input of two blocks.
TEST_F(ActivationStoreTest, OneTensorForTwoThreads_ComesBackToBoth) {
  Make();
  const at::Tensor want = at::randn({2000});
  const auto parked = Park(want.clone());
  store_->WaitUntilIdle();
  std::latch begin(2);
  std::vector<int> missed(2);
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      begin.arrive_and_wait();
      for (int i = 0; i < 2000; ++i) {
        const at::Tensor got = store_->Get(parked);
        if (!got.defined() || !got.equal(want)) ++missed[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(missed, (std::vector<int>{0, 0}));
}

TEST_F(ActivationStoreTest, PlacesOfTensorsThatAreGone_AreUsedAgain) {
  Make();
  for (int step = 0; step < 10; ++step) {
    std::vector<std::shared_ptr<ActivationStore::Parked>> parked;
    for (int block = 0; block < 4; ++block) parked.push_back(Park(at::ones({5000 - step})));
    store_->WaitUntilIdle();
  }
  EXPECT_LE(store_->bytes_reserved(), 8 * 5000 * sizeof(float));
}

TEST_F(ActivationStoreTest, PlacesOfTensorsThatAreGone_TakeLargerOnesTogether) {
  Make();
  constexpr int64_t kLast = 22'000;
  for (int64_t size = 2000; size <= kLast; size += 1000) {
    std::vector<std::shared_ptr<ActivationStore::Parked>> parked;
    for (int block = 0; block < 4; ++block)
      parked.push_back(Park(at::full({size}, block, at::kFloat)));
    store_->WaitUntilIdle();
    for (int block = 0; block < 4; ++block) {
      EXPECT_TRUE(store_->Get(parked[block]).equal(at::full({size}, block, at::kFloat))) << size;
    }
    // Not in the order in which they were parked.
    for (const int block : {2, 0, 3, 1}) parked[block].reset();
  }
  // As much as is present at once, plus one tensor that did not fit at the end of the file.
  EXPECT_LE(store_->bytes_reserved(), 5 * (kLast * sizeof(float) + 4096));
}

TEST_F(ActivationStoreTest, TensorsThatAreGone_LeaveNoRecords) {
  Make();
  for (int i = 0; i < 2000; ++i) {
    Park(at::ones({1024}));
    if (i % 10 == 0) store_->WaitUntilIdle();
  }
  EXPECT_LE(store_->records(), 256u);
}

// Counts the existing copies whenever a store makes one.
class CopyWatch {
 public:
  explicit CopyWatch(const ActivationStore* store) {
    watched = store;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) {
          if (std::string(function.name()) == "aten::empty_strided") {
            most = std::max(most, watched->tensors_in_memory());
          }
          return std::unique_ptr<at::ObserverContext>();
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CopyWatch() { at::removeCallback(handle_); }
  static const ActivationStore* watched;
  static int64_t most;

 private:
  at::CallbackHandle handle_;
};
const ActivationStore* CopyWatch::watched = nullptr;
int64_t CopyWatch::most = 0;

TEST_F(ActivationStoreTest, CopiesThatWaitToBeWritten_AreNoMoreThanTheBoundWithTheNewest) {
  std::latch open(1);
  system_.pwrite = [&open](int fd, const void* from, size_t bytes, off_t at) {
    open.wait();
    return ::pwrite(fd, from, bytes, at);
  };
  Make();
  const at::Tensor tensor = at::zeros({int64_t{24} << 18});  // 24 MiB
  std::vector<std::shared_ptr<ActivationStore::Parked>> parked;
  for (int i = 0; i < 5; ++i) {
    if (i == 2) open.count_down();
    {
      const CopyWatch watch(store_.get());
      parked.push_back(Park(tensor));
    }
    tensor.add_(1);
  }
  static_assert(3 * (uint64_t{24} << 20) > ActivationStore::kPendingBytes);
  EXPECT_EQ(CopyWatch::most, 1);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(store_->Get(parked[i])[7].item<int>(), i);
}

TEST_F(ActivationStoreTest, TensorsThatAreGoneBeforeTheyAreWritten_AreForgotten) {
  Make();
  for (int i = 0; i < 100; ++i) Park(at::ones({5000}));
  store_->WaitUntilIdle();
  EXPECT_EQ(store_->tensors_in_memory(), 0);
}

TEST_F(ActivationStoreTest, TensorThatIsChangedLater_ComesBackAsItWas) {
  Make();
  const at::Tensor tensor = at::ones({5000});
  const auto parked = Park(tensor);
  tensor.add_(1);
  EXPECT_TRUE(store_->Get(parked).equal(at::ones({5000})));
  store_->WaitUntilIdle();
  EXPECT_TRUE(store_->Get(parked).equal(at::ones({5000})));
}

TEST_F(ActivationStoreTest, DiskThatFails_ThrowsWhenTheTensorIsAskedFor) {
  system_.pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  Make();
  const auto parked = Park(at::ones({5000}));
  store_->WaitUntilIdle();
  for (int i = 0; i < 2; ++i) {
    const std::string error = ErrorOf([&] { store_->Get(parked); });
    EXPECT_THAT(error, HasSubstr("could not be written"));
    EXPECT_THAT(error, HasSubstr(folder_.path()));
  }
}

TEST_F(ActivationStoreTest, FullDisk_ThrowsWhenTheTensorIsAskedFor) {
  system_.allocate = [](int, off_t) {
    errno = ENOSPC;
    return -1;
  };
  Make();
  const auto parked = Park(at::ones({5000}));
  store_->WaitUntilIdle();
  EXPECT_THAT(ErrorOf([&] { store_->Get(parked); }), HasSubstr("free space on the disk"));
}

TEST_F(ActivationStoreTest, DiskThatCannotBeRead_ThrowsWhenTheTensorIsAskedFor) {
  system_.pread = [](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  Make();
  const auto parked = Park(at::ones({5000}));
  store_->WaitUntilIdle();
  EXPECT_THAT(ErrorOf([&] { store_->Get(parked); }), HasSubstr("could not be read"));
}

// Tensors on a device with streams.
class ActivationsOfADevice : public ActivationStoreTest {
 protected:
  using Point = FakeStreams::Point;
  static constexpr int64_t kNumbers = 2048;
  static constexpr auto kBytes = static_cast<int64_t>(kNumbers * sizeof(float));

  ActivationsOfADevice() { LimitFakeDevice(-1); }
  ~ActivationsOfADevice() override { LimitFakeDevice(-1); }

  void MakeOn(bool disk) {
    if (disk) {
      Make();
    } else {
      store_ = std::make_unique<ActivationStore>(nullptr);
    }
  }
  static at::Tensor TensorOf(float value) {
    return OnFakeDevice(std::vector<float>(kNumbers, value));
  }
  static std::vector<float> Numbers(float value) { return std::vector<float>(kNumbers, value); }
  // Parks the inputs of blocks 0, 1, ...; what they were computed from is gone.
  void Forward(int blocks) {
    for (int i = 0; i < blocks; ++i) {
      groups_.push_back(store_->NewGroup());
      parked_.push_back(store_->Park(TensorOf(static_cast<float>(i)), groups_.back()));
      ASSERT_NE(parked_.back(), nullptr);
    }
  }

  const c10::Stream program_ = FakeDevice().getNewStream(FakeDevice().device(), 0);
  const c10::StreamGuard guard_{program_};
  std::vector<uint64_t> groups_;
  std::vector<std::shared_ptr<ActivationStore::Parked>> parked_;
};

TEST_F(ActivationsOfADevice, Tensors_ComeBackToIt) {
  for (const bool disk : {false, true}) {
    MakeOn(disk);
    Forward(4);
    // Twice, because a graph may be kept for another backward pass.
    for (int pass = 0; pass < 2; ++pass) {
      for (int i = 3; i >= 0; --i) {
        const at::Tensor got = store_->Get(parked_[i]);
        store_->ReadAhead(groups_[i]);
        EXPECT_EQ(got.device(), FakeDevice().device());
        EXPECT_EQ(ValuesOf(got), Numbers(static_cast<float>(i)));
        store_->WaitUntilIdle();
      }
    }
    parked_.clear();
    groups_.clear();
    EXPECT_EQ(MemoryOfFakeDevice().now, 0);
  }
}

TEST_F(ActivationsOfADevice, Copy_IsMadeBesideTheProgramFromWhatTheTensorWas) {
  MakeOn(false);
  const int waits = FakeDevice().host_waits();
  const at::Tensor tensor = TensorOf(3);
  const auto parked = Park(tensor);
  const Point out = CopiesFromFakeDevice().back();
  EXPECT_FALSE(FakeDevice().IsBefore(out)) << "the program goes on";
  SetValues(tensor, 4);
  const at::Tensor got = store_->Get(parked);
  EXPECT_EQ(ValuesOf(got), Numbers(3));
  const Point in = CopiesToFakeDevice().back();
  EXPECT_TRUE(FakeDevice().IsBefore(in));
  {
    const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, FakeDevice().device(), in.stream));
    EXPECT_TRUE(FakeDevice().IsBefore(out)) << "it comes back from what has left";
  }
  EXPECT_EQ(FakeDevice().host_waits(), waits);
}

TEST_F(ActivationsOfADevice, CopiesThatGo_AreOfTwoGroups) {
  MakeOn(false);
  const size_t out = CopiesFromFakeDevice().size();
  Forward(5);
  EXPECT_EQ(MemoryOfFakeDevice().now, 2 * kBytes);
  const auto copies = CopiesFromFakeDevice();
  ASSERT_EQ(copies.size(), out + 5);
  EXPECT_TRUE(FakeDevice().IsBefore(copies[out + 2])) << "its memory is the program's";
  EXPECT_FALSE(FakeDevice().IsBefore(copies[out + 3]));
  EXPECT_EQ(MemoryOfFakeDevice().peak, 2 * kBytes);
}

TEST_F(ActivationsOfADevice, GroupBefore_ComesWhileOneIsComputed) {
  MakeOn(false);
  Forward(4);
  const int waits = FakeDevice().host_waits();
  for (int i = 3; i >= 0; --i) {
    const size_t in = CopiesToFakeDevice().size();
    at::Tensor got = store_->Get(parked_[i]);
    EXPECT_EQ(CopiesToFakeDevice().size(), in + (i == 3 ? 1 : 0)) << "it was fetched ahead";
    EXPECT_TRUE(FakeDevice().IsBefore(CopiesToFakeDevice().back()));
    store_->ReadAhead(groups_[i]);
    if (i > 0) {
      EXPECT_FALSE(FakeDevice().IsBefore(CopiesToFakeDevice().back()));
    }
    EXPECT_EQ(MemoryOfFakeDevice().now, (i > 0 ? 2 : 1) * kBytes) << "this one and the next one";
    FakeDevice().Operate();
    got.reset();
    parked_[i].reset();
  }
  EXPECT_EQ(FakeDevice().host_waits(), waits);
  EXPECT_EQ(MemoryOfFakeDevice().now, 0);
}

TEST_F(ActivationsOfADevice, GraphThatIsGone_GivesBackWhatCameAhead) {
  MakeOn(false);
  Forward(2);
  store_->Get(parked_[1]);
  store_->ReadAhead(groups_[1]);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_FALSE(FakeDevice().IsBefore(in));
  parked_.clear();
  EXPECT_TRUE(FakeDevice().IsBefore(in)) << "its memory is the program's";
  EXPECT_EQ(MemoryOfFakeDevice().now, 0);
}

TEST_F(ActivationsOfADevice, BackwardPassOnAnotherStream_TakesMemoryOfItsOwn) {
  MakeOn(false);
  Forward(2);
  store_->Get(parked_[1]);
  store_->ReadAhead(groups_[1]);
  const Point ahead = CopiesToFakeDevice().back();
  {
    const c10::StreamGuard other(FakeDevice().getNewStream(FakeDevice().device(), 0));
    EXPECT_EQ(ValuesOf(store_->Get(parked_[0])), Numbers(0));
    EXPECT_TRUE(FakeDevice().IsBefore(CopiesToFakeDevice().back()));
  }
  EXPECT_TRUE(FakeDevice().IsBefore(ahead));
}

TEST_F(ActivationsOfADevice, DeviceWithoutRoom_CopiesFromTheTensorAndNothingAhead) {
  for (const bool disk : {false, true}) {
    MakeOn(disk);
    LimitFakeDevice(0);
    const at::Tensor tensor = TensorOf(1);
    const auto first = store_->NewGroup();
    const auto parked = store_->Park(tensor, first);
    EXPECT_TRUE(FakeDevice().IsBefore(CopiesFromFakeDevice().back())) << "it may be written to";
    store_->WaitUntilIdle();
    store_->ReadAhead(store_->NewGroup());
    store_->WaitUntilIdle();
    LimitFakeDevice(kBytes);
    EXPECT_EQ(ValuesOf(store_->Get(parked)), Numbers(1));
  }
}

TEST_F(ActivationsOfADevice, WrittenTensor_HasLeftTheDeviceBefore) {
  int before_write = -1;
  system_.pwrite = [&](int fd, const void* from, size_t bytes, off_t at) {
    before_write = FakeDevice().host_waits();
    return ::pwrite(fd, from, bytes, at);
  };
  MakeOn(true);
  const int waits = FakeDevice().host_waits();
  const auto parked = Park(TensorOf(5));
  store_->WaitUntilIdle();
  EXPECT_EQ(before_write, waits + 1) << "the thread waits, not the program";
}

}  // namespace
}  // namespace muster
