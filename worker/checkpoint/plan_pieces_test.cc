#include "worker/checkpoint/plan_pieces.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

SafetensorsPlan PlanOf(const NamedTensors& tensors) {
  absl::StatusOr<SafetensorsPlan> plan = PlanSafetensors("m.safetensors", tensors, {});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

TEST(PlanPieces, File_IsThatOfWriteSafetensors) {
  const TestFolder folder;
  const NamedTensors tensors = {
      {"a", at::arange(1000)}, {"empty", at::zeros({0, 2})}, {"b", at::ones({3})}};
  const SafetensorsPlan plan = PlanOf(tensors);
  const std::optional<PlanPieces> pieces = PlanPieces::Of(plan);
  ASSERT_TRUE(pieces.has_value());
  const auto written = pieces->Write(folder.Path("m.safetensors"), "", {});
  ASSERT_TRUE(written.ok()) << written.status();
  ASSERT_TRUE(WriteSafetensors(folder.Path("other.safetensors"), tensors).ok());
  EXPECT_EQ(*ReadFile(folder.Path("m.safetensors")), *ReadFile(folder.Path("other.safetensors")));
}

TEST(PlanPieces, ElementsThatAreNotInARow_AreNoPieces) {
  const SafetensorsPlan plan = PlanOf({{"t", at::ones({3, 4}).t()}});
  EXPECT_FALSE(PlanPieces::Of(plan).has_value());
}

TEST(PlanPieces, TensorThatChanges_IsNamedWithTheRule) {
  const TestFolder folder;
  const at::Tensor tensor = at::ones({5});
  const SafetensorsPlan plan = PlanOf({{"other", at::ones({6})}, {"w", tensor}});
  const std::optional<PlanPieces> pieces = PlanPieces::Of(plan);
  ASSERT_TRUE(pieces.has_value());
  tensor.add_(1);
  const auto written = pieces->Write(folder.Path("m.safetensors"), "let it be", {});
  EXPECT_TRUE(absl::IsFailedPrecondition(written.status()));
  EXPECT_EQ(written.status().message(),
            "tensor \"w\" of m.safetensors changed while it was saved: let it be");
}

}  // namespace
}  // namespace muster
