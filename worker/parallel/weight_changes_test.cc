#include "worker/parallel/weight_changes.h"

#include <thread>

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(WeightChanges, EachThread_CountsItsOwn) {
  const uint64_t before = WeightChanges();
  NoteWeightChange();
  std::thread([] { NoteWeightChange(); }).join();
  EXPECT_EQ(WeightChanges(), before + 1);
}

}  // namespace
}  // namespace muster
