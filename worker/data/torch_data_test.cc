#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/data/datasets/base.h"
#include "torch/data/datasets/map.h"
#include "torch/data/datasets/tensor.h"
#include "torch/data/samplers/random.h"
#include "torch/data/transforms/stack.h"
#include "torch/data/transforms/tensor.h"
#include "worker/data/loader.h"

// LibTorch's own data sets, transforms and samplers, as they are, through our loaders.

namespace muster {
namespace {

using ::testing::ElementsAre;

class Squares : public torch::data::datasets::Dataset<Squares> {
 public:
  torch::data::Example<> get(size_t index) override {
    const int64_t i = static_cast<int64_t>(index);
    return {torch::full({1, 2, 2}, i, torch::kFloat), torch::tensor(i * i)};
  }
  std::optional<size_t> size() const override { return 7; }
};

template <class R>
std::vector<int64_t> Targets(const R& recipe) {
  std::vector<int64_t> targets;
  for (auto& [data, target] : PrepareLoader(recipe, {}, nullptr)) {
    EXPECT_EQ(data.dim(), 4);
    const at::Tensor list = target.contiguous();
    targets.insert(targets.end(), list.const_data_ptr<int64_t>(),
                   list.const_data_ptr<int64_t>() + list.numel());
  }
  return targets;
}

TEST(TorchData, Dataset_IsCollated) {
  EXPECT_THAT(Targets(batches(Squares(), 3)), ElementsAre(0, 1, 4, 9, 16, 25, 36));
  EXPECT_THAT(Targets(batches(Squares(), 3).workers(2)), ElementsAre(0, 1, 4, 9, 16, 25, 36));
}

TEST(TorchData, TransformsAndStack_AreApplied) {
  auto normalized = Squares().map(torch::data::transforms::Normalize<>(1.0, 2.0));
  auto stacked = normalized.map(torch::data::transforms::Stack<>());
  EXPECT_THAT(Targets(batches(normalized, 3)), ElementsAre(0, 1, 4, 9, 16, 25, 36));
  EXPECT_THAT(Targets(batches(stacked, 3).workers(2)), ElementsAre(0, 1, 4, 9, 16, 25, 36));
  for (auto& batch : PrepareLoader(batches(stacked, 7), {}, nullptr)) {
    EXPECT_EQ(batch->data[3].mean().item<float>(), 1.0F);
  }
}

TEST(TorchData, TensorDatasetAndSampler_AreTaken) {
  torch::data::datasets::TensorDataset rows(torch::arange(6, torch::kLong));
  auto loader =
      PrepareLoader(batches(rows, 4).sampler(torch::data::samplers::RandomSampler(6)), {}, nullptr);
  int64_t sum = 0;
  for (auto& [row] : loader) sum += row.sum().item<int64_t>();
  EXPECT_EQ(sum, 15);
  EXPECT_EQ(loader.size(), 2);
}

}  // namespace
}  // namespace muster
