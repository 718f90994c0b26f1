#include "worker/checkpoint/aligned_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <utility>

namespace muster {
namespace {

TEST(AlignedMemoryTest, Growing_KeepsWhatIsThereAndAddsZeros) {
  AlignedMemory memory;
  EXPECT_EQ(memory.size(), 0u);
  ASSERT_TRUE(memory.Grow(10).ok());
  EXPECT_GE(memory.size(), 10u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
  memory.data()[9] = 'x';
  const size_t before = memory.size();
  ASSERT_TRUE(memory.Grow(64 << 20).ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
  EXPECT_EQ(memory.data()[9], 'x');
  EXPECT_EQ(memory.data()[before], 0);
  EXPECT_EQ(memory.data()[(64 << 20) - 1], 0);
  ASSERT_TRUE(memory.Grow(1).ok());
  EXPECT_GE(memory.size(), size_t{64} << 20);

  AlignedMemory moved = std::move(memory);
  EXPECT_EQ(moved.data()[9], 'x');
}

TEST(AlignedMemoryTest, MoreThanThereIs_IsAnErrorAndChangesNothing) {
  AlignedMemory memory;
  ASSERT_TRUE(memory.Grow(1).ok());
  memory.data()[0] = 'x';
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX / 2}) {
    const absl::Status status = memory.Grow(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(memory.data()[0], 'x');
  }
}

TEST(AlignedMemoryTest, Pinned_StaysSoUntilItGrowsAlsoWhenItMoves) {
  std::map<void*, size_t> pinned;
  int failures = 0;
  const HostPinning pinning = {.pin =
                                   [&](void* data, size_t bytes) {
                                     if (failures > 0) return --failures > 0;
                                     return pinned.emplace(data, bytes).second;
                                   },
                               .unpin = [&](void* data) { EXPECT_EQ(pinned.erase(data), 1u); }};
  const auto of = [](const AlignedMemory& memory) {
    return std::map<void*, size_t>{{memory.data(), memory.size()}};
  };
  {
    AlignedMemory memory;
    memory.Pin(pinning);
    EXPECT_TRUE(pinned.empty()) << "there is nothing yet";
    ASSERT_TRUE(memory.Grow(1).ok());
    memory.Pin(pinning);
    EXPECT_EQ(pinned, of(memory));
    memory.Pin(pinning);
    ASSERT_TRUE(memory.Grow(1).ok());
    EXPECT_EQ(pinned, of(memory));
    EXPECT_EQ(AlignedMemory::PinnedBytes(), memory.size());
    ASSERT_TRUE(memory.Grow(64 << 20).ok());
    EXPECT_TRUE(pinned.empty());
    EXPECT_EQ(AlignedMemory::PinnedBytes(), 0u);
    memory.Pin(pinning);
    AlignedMemory moved = std::move(memory);
    memory = AlignedMemory();
    EXPECT_EQ(pinned, of(moved));
    // Pinning fails: slower, but no error, and not tried again.
    ASSERT_TRUE(moved.Grow(128 << 20).ok());
    failures = 1;
    moved.Pin(pinning);
    moved.Pin(pinning);
    EXPECT_TRUE(pinned.empty());
    ASSERT_TRUE(moved.Grow(256 << 20).ok());
  }
  EXPECT_TRUE(pinned.empty());
  EXPECT_EQ(AlignedMemory::PinnedBytes(), 0u);
  EXPECT_EQ(HostPinning::Cuda(), HostPinning::Cuda());
}

// Must be the first in its process, because the warning is logged only once.
TEST(AlignedMemoryDeathTest, MemoryThatCannotBePinned_IsSaidOnceWithWhatToDo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto pin_in_vain = [] {
    const HostPinning pinning = {.pin = [](void*, size_t) { return false; }, .unpin = [](void*) {}};
    for (int i = 0; i < 3; ++i) {
      AlignedMemory memory;
      if (!memory.Grow(8 << 20).ok()) _exit(1);
      memory.Pin(pinning);
      memory.Pin(pinning);
    }
    fprintf(stderr, "end\n");
    _exit(0);
  };
  // The warning is a single line.
  EXPECT_EXIT(pin_in_vain(), testing::ExitedWithCode(0),
              "^[^\n]*cannot pin 8.00 MiB of the host's memory for a GPU[^\n]*ulimit -l[^\n]*\n"
              "end\n$");
}

}  // namespace
}  // namespace muster
