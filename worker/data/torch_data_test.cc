#include <map>
#include <numeric>
#include <set>
#include <string>
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

// LibTorch's own data sets, transforms and samplers, unchanged, through our loaders.

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

class Noisy : public torch::data::datasets::Dataset<Noisy> {
 public:
  torch::data::Example<> get(size_t) override {
    const int64_t seed = static_cast<int64_t>(data_seed() >> 1);
    return {torch::rand({1, 2, 2}), torch::tensor(seed)};
  }
  std::optional<size_t> size() const override { return 12; }
};

TEST(TorchData, RandomTransforms_AreTheSameForAnyNumberOfWorkers) {
  const auto read = [](auto& loader) {
    std::vector<at::Tensor> images;
    for (auto& [data, target] : loader) images.push_back(data.clone());
    return torch::cat(images);
  };
  const auto prepare = [](int workers) {
    return PrepareLoader(batches(Noisy(), 3).seed(1).workers(workers), {}, nullptr);
  };
  auto one = prepare(1);
  auto three = prepare(3);
  const at::Tensor first = read(one);
  EXPECT_TRUE(first.equal(read(three)));
  const at::Tensor second = read(one);
  EXPECT_FALSE(first.equal(second));
  EXPECT_TRUE(second.equal(read(three)));
  // Every sample has its own seed.
  std::set<int64_t> seeds;
  for (const int64_t seed : Targets(batches(Noisy(), 3).workers(2))) seeds.insert(seed);
  EXPECT_EQ(seeds.size(), 12U);
}

// One process is stopped inside an epoch, and another one continues with what it saved.
TEST(TorchData, RandomSamplerStoppedInsideAnEpoch_GoesOnInTheSamePermutation) {
  const auto ids = [] {
    std::vector<int64_t> all(20);
    std::iota(all.begin(), all.end(), 0);
    return all;
  };
  const auto prepare = [&] {
    return PrepareLoader(batches(ids(), 3).sampler(torch::data::samplers::RandomSampler(20)), {},
                         nullptr);
  };
  const auto read = [](auto& loader, int most) {
    std::vector<int64_t> seen;
    for (auto& batch : loader) {
      for (int64_t i = 0; i < batch->numel(); ++i)
        seen.push_back((*batch)[i].template item<int64_t>());
      if (--most == 0) break;
    }
    return seen;
  };
  torch::manual_seed(1);
  auto first = prepare();
  read(first, -1);
  std::vector<int64_t> seen = read(first, 3);
  const std::string place = first.state_dict().ToString();
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : first.state_tensors()) tensors[name] = tensor.clone();

  torch::manual_seed(2);
  auto second = prepare();
  second.load_state(*LoaderState::FromString(place), tensors);
  const LoaderState again = second.state_dict();
  EXPECT_EQ(again.ToString(), place);
  const std::vector<int64_t> rest = read(second, -1);
  seen.insert(seen.end(), rest.begin(), rest.end());
  EXPECT_THAT(seen, ::testing::UnorderedElementsAreArray(ids()));

  // Without the order the loader must not continue, neither silently nor at the place.
  torch::manual_seed(3);
  auto third = prepare();
  third.load_state(*LoaderState::FromString(place));
  EXPECT_THROW(read(third, -1), c10::Error);
  LoaderState old = *LoaderState::FromString(place);
  old.order.clear();
  old.order_digest.clear();
  EXPECT_THROW(prepare().load_state(old), c10::Error);
  // A damaged order is noticed, too.
  tensors["order"][0] = (tensors["order"][0].item<int64_t>() + 1) % 20;
  EXPECT_THROW(prepare().load_state(*LoaderState::FromString(place), tensors), c10::Error);
}

}  // namespace
}  // namespace muster
