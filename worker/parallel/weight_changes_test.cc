#include "worker/parallel/weight_changes.h"

#include <thread>

#include "ATen/ops/zeros.h"
#include "c10/core/InferenceMode.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(WeightWatch, ChangesOfAWeightInAnyThread_Count) {
  const at::Tensor a = at::zeros({2}), b = at::zeros({2}), other = at::zeros({2});
  const WeightWatch watch({a, b});
  EXPECT_EQ(watch.changes(a), 0U);
  NoteWeightChange({other, b});
  std::thread([&] { NoteWeightChange({b}); }).join();
  EXPECT_EQ(watch.changes(a), 0U);
  EXPECT_EQ(watch.changes(b), 2U);
  NoteWeightChange();
  EXPECT_EQ(watch.changes(a), 1U);
  EXPECT_EQ(watch.changes(b), 3U);
}

TEST(WeightWatch, ChangesOfOtherWeights_DoNotCount) {
  const at::Tensor a = at::zeros({2}), other = at::zeros({2});
  const WeightWatch watch({a}), of_other({other});
  NoteWeightChange({other});
  NoteWeightChange({a.clone()});
  EXPECT_EQ(watch.changes(a), 0U);
  EXPECT_EQ(of_other.changes(other), 1U);
}

// An optimizer may hold another tensor of the same memory.
TEST(WeightWatch, ChangesThroughAnAlias_Count) {
  const at::Tensor a = at::zeros({2});
  const WeightWatch watch({a});
  NoteWeightChange({a.variable_data()});
  NoteWeightChange({a.narrow(0, 1, 1)});
  EXPECT_EQ(watch.changes(a), 2U);
}

TEST(WeightWatch, Step_ShowsInVersions) {
  const at::Tensor a = at::zeros({2}), b = at::zeros({2});
  const WeightWatch watch({a, b});
  const auto before = a._version(), other = b._version();
  NoteStep({a});
  EXPECT_GT(a._version(), before);
  EXPECT_EQ(b._version(), other);
  EXPECT_EQ(watch.changes(a), 1U);
  at::Tensor without;
  {
    const c10::InferenceMode inference;
    without = at::zeros({2});
  }
  NoteStep({without});
}

TEST(WeightWatch, ThatIsGone_IsNotTouched) {
  const at::Tensor a = at::zeros({2});
  { const WeightWatch watch({a}); }
  NoteWeightChange({a});
  NoteWeightChange();
}

}  // namespace
}  // namespace muster
