#include "worker/checkpoint/shared_elements.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Returns those of targets `a`, `b` that would not keep `values`.
std::vector<size_t> Replaced(const NamedTensors& targets, const std::vector<at::Tensor>& values,
                             int* reads = nullptr) {
  const auto replaced = ElementsReplaced("m", targets, [&](size_t place) {
    if (reads != nullptr) ++*reads;
    return absl::StatusOr<at::Tensor>(values[place]);
  });
  EXPECT_TRUE(replaced.ok()) << replaced.status();
  return replaced.value_or(std::vector<size_t>());
}

TEST(ElementsReplacedTest, ViewsOfOtherStrides_MustGetTheSameElements) {
  const at::Tensor square = at::zeros({2, 2}), values = at::arange(4, at::kFloat).view({2, 2});
  const NamedTensors transposed = {{"a", square}, {"b", square.t()}};
  EXPECT_THAT(Replaced(transposed, {values, values.t()}), IsEmpty());
  EXPECT_THAT(Replaced(transposed, {values, values}), ElementsAre(0));
  EXPECT_THAT(Replaced({{"b", square[1]}, {"a", square}}, {values[0], values}), ElementsAre(1));
  EXPECT_EQ(square.sum().item<double>(), 0);
}

TEST(ElementsReplacedTest, ConjugatedView_GetsConjugatedValues) {
  const at::Tensor a = at::zeros({3}, at::kComplexFloat);
  const at::Tensor values = at::full({3}, c10::complex<float>(1, 2), at::kComplexFloat);
  const NamedTensors targets = {{"a", a}, {"b", a.conj()}};
  EXPECT_THAT(Replaced(targets, {values, values.conj()}), IsEmpty());
  EXPECT_THAT(Replaced(targets, {values, values}), ElementsAre(0));
}

TEST(ElementsReplacedTest, ColumnsOfOneMatrix_ShareNothing) {
  const at::Tensor square = at::zeros({2, 2}), values = at::arange(2, at::kFloat);
  EXPECT_THAT(
      Replaced({{"a", square.select(1, 0)}, {"b", square.select(1, 1)}}, {values, values.add(1)}),
      IsEmpty());
}

TEST(ElementsReplacedTest, MemoryOfItsOwn_IsNotRead) {
  const at::Tensor whole = at::zeros({4});
  const at::Tensor meta = at::zeros({2}, at::kMeta);
  int reads = 0;
  EXPECT_THAT(
      Replaced({{"a", whole.slice(0, 0, 2)}, {"b", whole.slice(0, 2, 4)}, {"c", meta}, {"d", meta}},
               std::vector<at::Tensor>(4), &reads),
      IsEmpty());
  EXPECT_EQ(reads, 0);
}

TEST(ElementsReplacedTest, ErrorOfReading_IsReturned) {
  const at::Tensor square = at::zeros({2, 2});
  const auto replaced = ElementsReplaced(
      "m", {{"a", square}, {"b", square.t()}},
      [](size_t) -> absl::StatusOr<at::Tensor> { return absl::DataLossError("the disk fails"); });
  EXPECT_EQ(replaced.status(), absl::DataLossError("the disk fails"));
}

TEST(TensorIdentity, NamesOfOneTensor_AreEqualAndViewsWithOtherValuesAreNot) {
  const at::Tensor tensor = at::zeros({2, 2}, at::kComplexFloat);
  EXPECT_EQ(TensorIdentity(tensor), TensorIdentity(tensor.view({2, 2})));
  EXPECT_NE(TensorIdentity(tensor), TensorIdentity(tensor.conj()));
  EXPECT_NE(TensorIdentity(tensor), TensorIdentity(tensor.t()));
  EXPECT_NE(TensorIdentity(tensor), TensorIdentity(tensor[0]));
  EXPECT_NE(TensorIdentity(at::zeros({0})), TensorIdentity(at::zeros({0})));
}

}  // namespace
}  // namespace muster
