#include "worker/bigmodel/arena.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

constexpr uint64_t kUnit = Arena::kUnit;

TEST(Arena, Gaps_AreFilledFromTheBeginning) {
  Arena arena(10 * kUnit + 5);
  EXPECT_EQ(arena.bytes(), 10 * kUnit);
  EXPECT_EQ(arena.Take(3 * kUnit), 0u);
  EXPECT_EQ(arena.Take(kUnit + 1), 3 * kUnit);
  EXPECT_EQ(arena.Take(5 * kUnit), 5 * kUnit);
  EXPECT_EQ(arena.Take(1), std::nullopt);
  EXPECT_EQ(arena.taken(), 10 * kUnit);
  arena.Give(3 * kUnit);
  EXPECT_EQ(arena.Take(3 * kUnit), std::nullopt);
  EXPECT_EQ(arena.Take(kUnit), 3 * kUnit);
  arena.Give(0);
  EXPECT_EQ(arena.Take(0), 0u);
  EXPECT_EQ(arena.Take(2 * kUnit), kUnit);
  EXPECT_EQ(arena.taken(), 9 * kUnit);
}

TEST(Arena, MoreThanThereIs_IsRefused) {
  Arena arena(2 * kUnit);
  EXPECT_EQ(arena.Take(2 * kUnit + 1), std::nullopt);
  EXPECT_EQ(arena.Take(~uint64_t{0}), std::nullopt);
  EXPECT_EQ(arena.Take(2 * kUnit), 0u);
}

}  // namespace
}  // namespace muster
