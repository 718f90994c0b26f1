#include "worker/parallel/weight_changes.h"

#include <thread>

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(WeightChanges, ChangesOfAnyThread_Count) {
  const uint64_t before = WeightChanges();
  NoteWeightChange();
  std::thread([] { NoteWeightChange(); }).join();
  EXPECT_EQ(WeightChanges(), before + 2);
}

}  // namespace
}  // namespace muster
