#include "worker/checkpoint/device_uploads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/StreamGuard.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/test_left_copies.h"
#include "worker/collective/fake_streams.h"

namespace muster {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using Point = FakeStreams::Point;

constexpr size_t kBlockBytes = 4 * kDirectAlignment;

FakeStreams& Streams() { return FakeDevice(); }

// A device that does nothing before a thread waits for it.
class DeviceUploadsTest : public testing::Test {
 protected:
  ~DeviceUploadsTest() override { Streams().Break(false); }

  std::unique_ptr<DeviceUploads> Uploads(int blocks, const HostPinning* pinning = nullptr) {
    return std::make_unique<DeviceUploads>(
        Streams().device(),
        DeviceUploads::Room{.block_bytes = kBlockBytes, .threads = blocks - 1, .blocks = blocks},
        [this](char* to, const char* from, size_t bytes) {
          MutexLock lock(&mu_);
          TORCH_CHECK(++queued_ != fails_, "out of order");
          EXPECT_NE(Streams().Current(), program_) << "a stream of its own";
          copies_.Leave(to, from, bytes);
          points_.push_back(Streams().Operate());
        },
        pinning);
  }
  size_t left() const { return copies_.size(); }
  // The work of a reading thread.
  static absl::Status Upload(DeviceUploads& uploads, char value, char* to) {
    const absl::StatusOr<char*> block = uploads.Take();
    if (!block.ok()) return block.status();
    std::memset(*block, value, kBlockBytes);
    return uploads.Queue(*block, {{.offset = 0, .bytes = kBlockBytes, .to = to}});
  }

  const c10::Stream program_ = Streams().getNewStream(Streams().device(), 0);
  const c10::StreamGuard guard_{program_};
  Mutex mu_;
  LeftCopies copies_{Streams()};
  std::vector<Point> points_ ABSL_GUARDED_BY(mu_);
  int queued_ ABSL_GUARDED_BY(mu_) = 0;
  int fails_ ABSL_GUARDED_BY(mu_) = 0;  // number of the copy that fails, from 1
};

TEST_F(DeviceUploadsTest, Blocks_AreUsedAgainOnceTheirCopiesAreMade) {
  constexpr int kCount = 20;
  std::vector<char> memory(kCount * kBlockBytes);
  const auto uploads = Uploads(/*blocks=*/3);
  std::set<const char*> blocks;
  for (int i = 0; i < kCount; ++i) {
    const absl::StatusOr<char*> block = uploads->Take();
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_TRUE(IsDirectAligned(*block));
    blocks.insert(*block);
    std::memset(*block, 'a' + i, kBlockBytes);
    char* const to = memory.data() + i * kBlockBytes;
    // The two halves the other way around.
    ASSERT_TRUE(
        uploads
            ->Queue(*block, {{.offset = 0, .bytes = kBlockBytes / 2, .to = to + kBlockBytes / 2},
                             {.offset = kBlockBytes / 2, .bytes = kBlockBytes / 2, .to = to}})
            .ok());
  }
  EXPECT_EQ(blocks.size(), 3u);
  ASSERT_TRUE(uploads->Wait().ok());
  EXPECT_EQ(left(), 0u);
  for (int i = 0; i < kCount; ++i) {
    const std::vector<char> block(memory.begin() + i * kBlockBytes,
                                  memory.begin() + (i + 1) * kBlockBytes);
    EXPECT_THAT(block, Each('a' + i));
  }
}

TEST_F(DeviceUploadsTest, FewerBlocksThanTheThreadsNeed_AreRefused) {
  const auto error = [](int threads, int blocks) -> std::string {
    try {
      DeviceUploads(Streams().device(),
                    {.block_bytes = kBlockBytes, .threads = threads, .blocks = blocks});
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_EQ(error(3, 4), "");
  EXPECT_THAT(error(3, 3), HasSubstr("by 3 threads have 3 blocks of memory: give them at least one "
                                     "more than there are threads"));
  EXPECT_THAT(error(0, 2), HasSubstr("one thread or more"));
}

TEST_F(DeviceUploadsTest, ThreadsThatTakeMoreBlocksThanThereAre_TakeTurns) {
  constexpr int kThreads = 6, kEach = 5;
  std::vector<char> memory(kThreads * kEach * kBlockBytes);
  const auto uploads = Uploads(/*blocks=*/kThreads + 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = t * kEach; i < (t + 1) * kEach; ++i) {
        const absl::Status status =
            Upload(*uploads, static_cast<char>(i), memory.data() + i * kBlockBytes);
        EXPECT_TRUE(status.ok()) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(uploads->Wait().ok());
  for (size_t i = 0; i < memory.size(); ++i) {
    ASSERT_EQ(memory[i], static_cast<char>(i / kBlockBytes)) << i;
  }
}

TEST_F(DeviceUploadsTest, Copies_FollowWhatTheProgramHasQueued) {
  std::vector<char> memory(kBlockBytes);
  const auto uploads = Uploads(2);
  const Point before = Streams().Operate();
  uploads->Follow();
  const Point beside = Streams().Operate();
  ASSERT_TRUE(Upload(*uploads, 'x', memory.data()).ok());
  MutexLock lock(&mu_);
  ASSERT_EQ(points_.size(), 1u);
  EXPECT_FALSE(Streams().IsBefore(points_[0])) << "the program goes on";
  const c10::StreamGuard on(
      c10::Stream(c10::Stream::UNSAFE, Streams().device(), points_[0].stream));
  EXPECT_TRUE(Streams().IsBefore(before));
  EXPECT_FALSE(Streams().IsBefore(beside));
}

TEST_F(DeviceUploadsTest, CopyThatFails_IsTheErrorAndTheOthersEnd) {
  std::vector<char> memory(2 * kBlockBytes);
  const auto uploads = Uploads(2);
  ASSERT_TRUE(Upload(*uploads, 'x', memory.data()).ok());
  {
    MutexLock lock(&mu_);
    fails_ = 2;
  }
  const absl::Status failed = Upload(*uploads, 'y', memory.data() + kBlockBytes);
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("out of order"));
  EXPECT_EQ(uploads->Take().status(), failed);
  EXPECT_EQ(left(), 1u);
  EXPECT_EQ(uploads->Wait(), failed);
  EXPECT_EQ(left(), 0u);
  EXPECT_EQ(memory.front(), 'x');
  // A device that works again is used with all blocks.
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Upload(*uploads, 'z', memory.data()).ok());
  ASSERT_TRUE(uploads->Wait().ok());
  EXPECT_EQ(memory.front(), 'z');
}

TEST_F(DeviceUploadsTest, DeviceThatIsLost_IsWaitedForBeforeMemoryGoes) {
  std::vector<char> memory(kBlockBytes);
  const auto uploads = Uploads(2);
  Streams().Break(true);
  EXPECT_EQ(Upload(*uploads, 'x', memory.data()).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(left(), 1u);
  EXPECT_EQ(uploads->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(left(), 0u) << "no event tells the end of a copy that was queued";
}

TEST_F(DeviceUploadsTest, BlocksOfThreadsThatFailed_AreFreeAgain) {
  const auto uploads = Uploads(2);
  for (int round = 0; round < 3; ++round) {
    const absl::StatusOr<char*> first = uploads->Take(), second = uploads->Take();
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_NE(*first, *second);
    ASSERT_TRUE(uploads->Wait().ok());
  }
}

TEST_F(DeviceUploadsTest, Blocks_ArePinnedOnceAndUnpinnedWhenTheCopiesHaveEnded) {
  std::vector<char> memory(8 * kBlockBytes);
  std::set<const void*> pinned;
  int pins = 0;
  const HostPinning pinning{.pin =
                                [&](void* data, size_t bytes) {
                                  EXPECT_GE(bytes, kBlockBytes);
                                  ++pins;
                                  return pinned.insert(data).second;
                                },
                            .unpin =
                                [&](void* data) {
                                  EXPECT_EQ(left(), 0u) << "the device still reads";
                                  pinned.erase(data);
                                }};
  auto uploads = Uploads(2, &pinning);
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(Upload(*uploads, 'x', memory.data() + i * kBlockBytes).ok());
  }
  EXPECT_EQ(pins, 2);
  EXPECT_EQ(pinned.size(), 2u);
  EXPECT_GT(left(), 0u);
  uploads.reset();
  EXPECT_TRUE(pinned.empty());
  EXPECT_THAT(memory, Each('x'));
}

TEST_F(DeviceUploadsTest, MemoryOfDevicesThatDoNotTell_CountsAsNone) {
  EXPECT_EQ(DeviceMemoryLeft(Streams().device()), 0u);
}

}  // namespace
}  // namespace muster
