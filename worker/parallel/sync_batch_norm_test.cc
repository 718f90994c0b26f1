#include "worker/parallel/sync_batch_norm.h"

#include <optional>
#include <string>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/zeros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/test_net.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

constexpr int kChannels = 3;

std::vector<int64_t> Shape(int64_t batch, int64_t dims) {
  std::vector<int64_t> shape = {batch, kChannels};
  for (int64_t d = 2; d < dims; ++d) shape.push_back(d + 2);
  return shape;
}

double Distance(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  return a.numel() == 0 ? 0 : a.sub(b).abs().max().item<double>();
}

// Makes a module whose weights are not all alike.
template <typename Module>
Module Make(const torch::nn::BatchNormOptions& options) {
  Module module(options);
  if (options.affine()) {
    module->weight.data().copy_(Randn({kChannels}, 1));
    module->bias.data().copy_(Randn({kChannels}, 2));
  }
  return module;
}

// Trains three steps over batches of `sizes[r]` samples on rank r, against BatchNorm on all of
// them.
template <typename BatchNorm>
void ExpectAsOnJoinedBatch(void (*run)(int, const std::function<void(Comm&)>&), int64_t dims,
                           const std::vector<int64_t>& sizes,
                           const torch::nn::BatchNormOptions& options) {
  const int ranks = static_cast<int>(sizes.size());
  const auto input = [&](int step, int rank) {
    return Randn(Shape(sizes[rank], dims), 100 * step + rank).mul_(2).add_(5);
  };
  const auto coefficients = [&](int step, int rank) {
    return Randn(Shape(sizes[rank], dims), 1000 + 100 * step + rank);
  };
  std::vector<SyncBatchNorm> modules(ranks, nullptr);
  std::vector<std::vector<at::Tensor>> outputs(ranks), gradients(ranks);
  run(ranks, [&](Comm& comm) {
    const int rank = comm.rank();
    SyncBatchNorm module = Make<SyncBatchNorm>(options);
    const StatisticsRanks all(comm);
    module->Bind(all);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = input(step, rank).requires_grad_(true);
      const at::Tensor out = module(x);
      (out * coefficients(step, rank)).sum().backward();
      outputs[rank].push_back(out.detach());
      gradients[rank].push_back(x.grad());
    }
    modules[rank] = module;
  });
  BatchNorm joined = Make<BatchNorm>(options);
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> inputs, factors;
    for (int rank = 0; rank < ranks; ++rank) {
      inputs.push_back(input(step, rank));
      factors.push_back(coefficients(step, rank));
    }
    const at::Tensor x = at::cat(inputs).requires_grad_(true);
    const at::Tensor out = joined(x);
    (out * at::cat(factors)).sum().backward();
    int64_t offset = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LT(Distance(outputs[rank][step], out.narrow(0, offset, sizes[rank])), 1e-5);
      EXPECT_LT(Distance(gradients[rank][step], x.grad().narrow(0, offset, sizes[rank])), 1e-5);
      offset += sizes[rank];
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (options.track_running_stats()) {
      EXPECT_LT(Distance(modules[rank]->running_mean, joined->running_mean), 1e-5);
      EXPECT_LT(Distance(modules[rank]->running_var, joined->running_var), 1e-5);
      EXPECT_EQ(modules[rank]->num_batches_tracked.item<int64_t>(), 3);
    }
  }
  if (!options.affine()) return;
  at::Tensor weight = at::zeros({kChannels}), bias = at::zeros({kChannels});
  for (int rank = 0; rank < ranks; ++rank) {
    weight += modules[rank]->weight.grad();
    bias += modules[rank]->bias.grad();
  }
  EXPECT_LT(Distance(weight, joined->weight.grad()), 1e-4);
  EXPECT_LT(Distance(bias, joined->bias.grad()), 1e-4);
}

void Gloo(int n, const std::function<void(Comm&)>& fn) { RunGlooRanks(n, fn); }

TEST(SyncBatchNorm, UnevenBatches_EqualBatchNormOnAllOfThem) {
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm1d>(RunRanks, 2, {3, 5, 1}, kChannels);
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm2d>(RunRanks, 4, {2, 1}, kChannels);
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm2d>(Gloo, 4, {2, 3}, kChannels);
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm3d>(RunRanks, 5, {1, 2}, kChannels);
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm1d>(RunRanks, 2, {4, 0}, kChannels);
}

TEST(SyncBatchNorm, Options_AreFollowed) {
  using Options = torch::nn::BatchNormOptions;
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm2d>(RunRanks, 4, {2, 3},
                                                Options(kChannels).momentum(std::nullopt));
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm2d>(RunRanks, 4, {2, 3},
                                                Options(kChannels).affine(false).eps(1e-2));
  ExpectAsOnJoinedBatch<torch::nn::BatchNorm2d>(RunRanks, 4, {2, 3},
                                                Options(kChannels).track_running_stats(false));
}

TEST(SyncBatchNorm, EvaluationAndUnbound_AreLocal) {
  torch::nn::BatchNorm2d plain = Make<torch::nn::BatchNorm2d>(kChannels);
  SyncBatchNorm unbound = Make<SyncBatchNorm>(kChannels);
  const at::Tensor x = Randn(Shape(4, 4), 3);
  EXPECT_TRUE(plain(x).equal(unbound(x)));
  EXPECT_TRUE(plain->running_var.equal(unbound->running_var));
  RunRanks(2, [&](Comm& comm) {
    if (comm.rank() == 1) return;  // no peer to meet
    SyncBatchNorm module = Make<SyncBatchNorm>(kChannels);
    const StatisticsRanks ranks(comm);
    module->Bind(ranks);
    module->eval();
    EXPECT_EQ(module(x).sizes(), x.sizes());
  });
}

TEST(SyncBatchNorm, AfterItsRanks_IsLocal) {
  torch::nn::BatchNorm2d plain = Make<torch::nn::BatchNorm2d>(kChannels);
  const at::Tensor x = Randn(Shape(4, 4), 3);
  const at::Tensor expected = plain(x);
  std::vector<SyncBatchNorm> modules(2, nullptr);
  std::vector<at::Tensor> outputs(2);
  RunRanks(2, [&](Comm& comm) {
    SyncBatchNorm module = Make<SyncBatchNorm>(kChannels);
    const StatisticsRanks ranks(comm);
    module->Bind(ranks);
    outputs[comm.rank()] = module(x);
    modules[comm.rank()] = module;
  });
  for (SyncBatchNorm& module : modules) {
    const auto clone = std::static_pointer_cast<SyncBatchNormImpl>(module->clone());
    EXPECT_EQ(module->comm(), nullptr);
    EXPECT_EQ(clone->comm(), nullptr);
    EXPECT_TRUE(module(x).equal(expected));
    module->eval();
    EXPECT_EQ(module(x).sizes(), x.sizes());
  }
  EXPECT_THAT(ErrorOf([&] { outputs[0].sum().backward(); }), HasSubstr("Accelerator is gone"));
}

TEST(SyncBatchNorm, NamesAndHalfInputs_AreBatchNorms) {
  SyncBatchNorm module = Make<SyncBatchNorm>(kChannels);
  torch::nn::BatchNorm2d plain(kChannels);
  std::vector<std::string> names, expected;
  for (const auto& item : module->named_parameters()) names.push_back(item.key());
  for (const auto& item : module->named_buffers()) names.push_back(item.key());
  for (const auto& item : plain->named_parameters()) expected.push_back(item.key());
  for (const auto& item : plain->named_buffers()) expected.push_back(item.key());
  EXPECT_EQ(names, expected);
  RunRanks(2, [&](Comm& comm) {
    SyncBatchNorm half = Make<SyncBatchNorm>(kChannels);
    const StatisticsRanks ranks(comm);
    half->Bind(ranks);
    const at::Tensor x = Randn(Shape(4, 4), 3).to(at::kBFloat16).requires_grad_(true);
    const at::Tensor out = half(x);
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    out.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
    EXPECT_EQ(half->weight.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(std::static_pointer_cast<SyncBatchNormImpl>(half->clone())->comm(), &comm);
  });
}

TEST(SyncBatchNorm, WrongInputs_AreRefused) {
  SyncBatchNorm module(kChannels);
  EXPECT_THAT(ErrorOf([&] {
                module(at::zeros({4, 5, 2}));
              }),
              HasSubstr("SyncBatchNorm of 3 features got an input of shape [4, 5, 2]"));
  RunRanks(2, [&](Comm& comm) {
    SyncBatchNorm bound(kChannels);
    const StatisticsRanks ranks(comm);
    bound->Bind(ranks);
    EXPECT_THAT(ErrorOf([&] {
                  bound(at::zeros({comm.rank(), kChannels}));
                }),
                HasSubstr("needs more than one value per channel over all ranks"));
    const at::Tensor x = Randn({4, kChannels}, 3).requires_grad_(true);
    EXPECT_THAT(ErrorOf([&] { bound(x).sum().backward({}, std::nullopt, /*create_graph=*/true); }),
                HasSubstr("no second derivative"));
  });
}

}  // namespace
}  // namespace muster
