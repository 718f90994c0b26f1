#include "worker/train/host_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/memory_left.h"
#include "c10/core/StreamGuard.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Point = FakeStreams::Point;

constexpr int64_t kSize = 16;
constexpr uint64_t kBytes = kSize * sizeof(float);

FakeStreams& Streams() { return FakeDevice(); }

class HostPartsTest : public testing::Test {
 protected:
  HostPartsTest() { LimitFakeDevice(-1); }
  ~HostPartsTest() override { Streams().Break(false); }

  static at::Tensor Values(float value) {
    return OnFakeDevice(std::vector<float>(static_cast<size_t>(kSize), value));
  }
  static Point WriteOn(const c10::Stream& stream, HostParts& parts, uint64_t place, float value) {
    const c10::StreamGuard on(stream);
    parts.WriteFrom(place, Values(value));
    return CopiesFromFakeDevice().back();
  }
  static Point ReadOn(const c10::Stream& stream, HostParts& parts, uint64_t place, float value) {
    const c10::StreamGuard on(stream);
    const at::Tensor read = Values(-1);
    parts.ReadTo(place, read);
    EXPECT_THAT(ValuesOf(read), Each(value));
    return CopiesToFakeDevice().back();
  }
  // Whether `first` ends before the next operation on `stream`, or its last one.
  static bool IsBefore(const Point& first, const c10::Stream& stream) {
    const c10::StreamGuard on(stream);
    return Streams().IsBefore(first);
  }

  const c10::Stream first_ = Streams().getNewStream(Streams().device(), 0);
  const c10::Stream second_ = Streams().getNewStream(Streams().device(), 0);
  const c10::Stream third_ = Streams().getNewStream(Streams().device(), 0);
  const c10::StreamGuard guard_{first_};
  std::set<const void*> pinned_;
  const HostPinning pinning_{
      .pin = [this](void* data, size_t) { return pinned_.insert(data).second; },
      .unpin = [this](void* data) { pinned_.erase(data); }};
};

TEST_F(HostPartsTest, Parts_ComeBack) {
  HostParts parts(Streams().device(), 1, &pinning_);
  EXPECT_TRUE(parts.Takes(Streams().device()));
  EXPECT_FALSE(parts.Takes(at::kCPU));
  std::vector<uint64_t> places;
  for (int i = 0; i < 4; ++i) places.push_back(parts.Reserve(kBytes));
  EXPECT_TRUE(pinned_.empty()) << "nothing is taken yet";
  for (int i = 0; i < 4; ++i) WriteOn(first_, parts, places[i], static_cast<float>(i));
  EXPECT_EQ(pinned_.size(), 1u) << "they are taken together";
  // After the first use.
  const uint64_t last = parts.Reserve(kBytes);
  WriteOn(first_, parts, last, 9);
  EXPECT_EQ(pinned_.size(), 2u);
  for (int i = 0; i < 4; ++i) ReadOn(first_, parts, places[i], static_cast<float>(i));
  ReadOn(first_, parts, last, 9);
}

TEST_F(HostPartsTest, Read_ComesAfterTheLastWriteOfItsPlaceAlone) {
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t place = parts.Reserve(kBytes), other = parts.Reserve(kBytes);
  const Point write = WriteOn(first_, parts, place, 1);
  const Point other_write = WriteOn(third_, parts, other, 2);
  ReadOn(second_, parts, place, 1);
  EXPECT_TRUE(IsBefore(write, second_));
  EXPECT_FALSE(IsBefore(other_write, second_));
}

TEST_F(HostPartsTest, Write_ComesAfterTheReadsAndTheWriteBefore) {
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t place = parts.Reserve(kBytes);
  WriteOn(first_, parts, place, 1);
  const Point read = ReadOn(first_, parts, place, 1);
  const Point again = ReadOn(first_, parts, place, 1);
  const Point read_beside = ReadOn(second_, parts, place, 1);
  EXPECT_FALSE(IsBefore(read_beside, first_));
  const Point write = WriteOn(third_, parts, place, 2);
  EXPECT_TRUE(IsBefore(read, third_));
  EXPECT_TRUE(IsBefore(again, third_));
  EXPECT_TRUE(IsBefore(read_beside, third_));
  // Without a read between them.
  EXPECT_FALSE(IsBefore(write, first_));
  WriteOn(first_, parts, place, 3);
  EXPECT_TRUE(IsBefore(write, first_));
}

TEST_F(HostPartsTest, Copies_AreNotWaitedForByTheHost) {
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t place = parts.Reserve(kBytes);
  const int waits = Streams().host_waits();
  WriteOn(first_, parts, place, 1);
  ReadOn(second_, parts, place, 1);
  WriteOn(second_, parts, place, 2);
  EXPECT_EQ(Streams().host_waits(), waits);
}

TEST_F(HostPartsTest, Host_WaitsForTheCopiesOfAPlaceThatItUses) {
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t place = parts.Reserve(kBytes);
  WriteOn(first_, parts, place, 4);
  int waits = Streams().host_waits();
  std::vector<float> values(static_cast<size_t>(kSize));
  parts.Read(place, values.data(), kBytes);
  EXPECT_THAT(values, Each(4));
  EXPECT_GT(Streams().host_waits(), waits);
  ReadOn(first_, parts, place, 4);
  waits = Streams().host_waits();
  values.assign(values.size(), 5);
  parts.Write(place, values.data(), kBytes);
  EXPECT_GT(Streams().host_waits(), waits + 1) << "for the write and the read";
  ReadOn(first_, parts, place, 5);
}

TEST_F(HostPartsTest, End_WaitsForTheCopies_BeforeTheMemoryGoes) {
  int waits = 0;
  {
    int at_unpin = 0;
    const HostPinning noting{.pin = [](void*, size_t) { return true; },
                             .unpin = [&](void*) { at_unpin = Streams().host_waits(); }};
    auto parts = std::make_unique<HostParts>(Streams().device(), 1, &noting);
    const uint64_t written = parts->Reserve(kBytes), read = parts->Reserve(kBytes);
    WriteOn(first_, *parts, written, 1);
    WriteOn(first_, *parts, read, 1);
    ReadOn(second_, *parts, read, 1);
    waits = Streams().host_waits();
    parts.reset();
    EXPECT_EQ(at_unpin, waits + 3);
  }
}

TEST_F(HostPartsTest, MemoryThatCannotBePinned_IsCopiedByWaiting) {
  for (const bool fails : {false, true}) {
    const HostPinning failing{.pin = [](void*, size_t) { return false; }, .unpin = [](void*) {}};
    HostParts parts(Streams().device(), 1, fails ? &failing : nullptr);
    const uint64_t place = parts.Reserve(kBytes);
    const int waits = Streams().host_waits();
    WriteOn(first_, parts, place, 6);
    EXPECT_EQ(Streams().host_waits(), waits + 1);
    ReadOn(second_, parts, place, 6);
    EXPECT_EQ(Streams().host_waits(), waits + 2);
  }
}

TEST_F(HostPartsTest, MoreThanTheHostHas_IsRefused) {
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t place = parts.Reserve(kBytes);
  EXPECT_THAT(ErrorOf([&] { parts.Reserve(uint64_t{1} << 60); }),
              HasSubstr("offload them to a disk"));
  WriteOn(first_, parts, place, 1);
  ReadOn(first_, parts, place, 1);
}

TEST_F(HostPartsTest, Ranks_HaveAShareEachOfWhatTheHostHas) {
  // No memory is allocated.
  const uint64_t most = MemoryLeft() / 10 * 7;
  HostParts alone(Streams().device(), 1, &pinning_), one_of_two(Streams().device(), 2, &pinning_);
  alone.Reserve(most);
  EXPECT_THAT(ErrorOf([&] { one_of_two.Reserve(most); }),
              AllOf(HasSubstr("left for 2 processes"), HasSubstr("offload them to a disk")));
  // In several pieces.
  one_of_two.Reserve(most / 2);
  EXPECT_THAT(ErrorOf([&] { one_of_two.Reserve(most / 2); }), HasSubstr("left for 2 processes"));
}

TEST_F(HostPartsTest, Take_TakesWhatIsReserved) {
  HostParts parts(Streams().device(), 1, &pinning_);
  parts.Take();
  EXPECT_TRUE(pinned_.empty());
  const uint64_t place = parts.Reserve(kBytes);
  parts.Take();
  EXPECT_EQ(pinned_.size(), 1u);
  parts.Take();
  WriteOn(first_, parts, place, 1);
  EXPECT_EQ(pinned_.size(), 1u);
}

TEST_F(HostPartsTest, MemoryThatCannotBeTaken_IsAnErrorOfTake) {
  constexpr uint64_t kMany = uint64_t{512} << 20;
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t place = parts.Reserve(kMany);
  // The limit of the process, which is not that of the machine.
  uint64_t pages = 0;
  std::ifstream statm("/proc/self/statm");
  for (int field = 0; field < 6; ++field) statm >> pages;
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_DATA, &before), 0);
  const rlimit small = {pages * static_cast<uint64_t>(getpagesize()) + kMany / 2, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &small), 0);
  const std::string error = ErrorOf([&] { parts.Take(); });
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &before), 0);
  EXPECT_THAT(error, AllOf(HasSubstr("offload_parameters"), HasSubstr("ulimit -d")));
  parts.Take();
  WriteOn(first_, parts, place, 1);
  ReadOn(first_, parts, place, 1);
}

TEST_F(HostPartsTest, EmptyPlace_IsNotTheNextOne) {
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t empty = parts.Reserve(0), next = parts.Reserve(kBytes);
  EXPECT_NE(empty, next);
  const c10::StreamGuard on(third_);
  const at::Tensor none = OnFakeDevice({});
  parts.WriteFrom(empty, none);
  parts.ReadTo(empty, none);
  WriteOn(first_, parts, next, 1);
  ReadOn(first_, parts, next, 1);
}

TEST_F(HostPartsTest, DeviceThatFails_IsAnErrorAndNoHang) {
  HostParts parts(Streams().device(), 1, &pinning_);
  const uint64_t place = parts.Reserve(kBytes);
  WriteOn(first_, parts, place, 1);
  Streams().Break(true);
  EXPECT_THAT(ErrorOf([&] { WriteOn(second_, parts, place, 2); }), HasSubstr("broken"));
}

}  // namespace
}  // namespace muster
