#include "worker/checkpoint/aligned_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
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

}  // namespace
}  // namespace muster
