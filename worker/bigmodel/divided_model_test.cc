#include "worker/bigmodel/divided_model.h"

#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/bigmodel/fake_gpus.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocabulary = 20, kWidth = 16, kBlocks = 4;

at::Tensor On(int gpu, const at::Tensor& host) { return host.to(FakeGpu(gpu)); }
at::Tensor Row(int gpu) { return On(gpu, at::arange(1, 5, at::kFloat)); }

class DividedModelTest : public testing::Test {
 protected:
  DividedModelTest() { InstallFakeGpus(); }

  // Parameters there, which the model has from here on.
  std::vector<at::Tensor> Weights(const std::vector<int>& gpus) {
    std::vector<at::Tensor> weights;
    for (const int gpu : gpus) weights.push_back(On(gpu, at::eye(4) * (gpu + 1)));
    model_.emplace(weights, std::vector<at::Tensor>());
    return weights;
  }
  uint64_t Copies() const { return CrossingsSoFar().copies - before_.copies; }

  const DeviceCrossings before_ = CrossingsSoFar();
  std::optional<DividedModel> model_;
};

TEST_F(DividedModelTest, TensorsWithoutAModel_AreRefusedByTheDevice) {
  EXPECT_THAT(ErrorOf([&] { at::add(Row(0), Row(1)); }), HasSubstr("device"));
  EXPECT_FALSE(MovesOperators(at::add(Row(0), Row(0))));
}

TEST_F(DividedModelTest, OperatorWithAWeight_RunsThere) {
  const auto weights = Weights({0, 1, 2});
  at::Tensor x = Row(3);
  for (int gpu = 0; gpu < 3; ++gpu) {
    x = at::matmul(x, weights[gpu]);
    EXPECT_EQ(x.device(), FakeGpu(gpu));
    EXPECT_TRUE(MovesOperators(x));
  }
  EXPECT_TRUE(at::equal(x.cpu(), at::arange(1, 5, at::kFloat) * 6));
  // By a view of the weight, and in a list.
  EXPECT_EQ(at::matmul(Row(3), weights[1].t()).device(), FakeGpu(1));
  EXPECT_EQ(at::cat({Row(3), weights[2][0]}).device(), FakeGpu(2));
}

TEST_F(DividedModelTest, OfSeveralWeights_TheLargestCounts) {
  const auto weights = Weights({0, 1});
  const at::Tensor bias = On(0, at::ones({4}));
  const DividedModel other({bias}, {});
  EXPECT_EQ(at::linear(Row(2), weights[1], bias).device(), FakeGpu(1));
}

TEST_F(DividedModelTest, ResidualSum_StaysWithTheLastWeight) {
  const auto weights = Weights({1, 0});
  const at::Tensor x = at::matmul(Row(0), weights[0]);
  const at::Tensor sum = x + at::matmul(x, weights[1]);
  EXPECT_EQ(sum.device(), FakeGpu(0));
  EXPECT_EQ((at::matmul(sum, weights[0]) + x + sum).device(), FakeGpu(1));
}

TEST_F(DividedModelTest, OperatorFarFromTheLastWeight_RunsWhereMostIs) {
  const auto weights = Weights({0, 1, 2});
  const at::Tensor small = at::matmul(Row(0), weights[0]);
  const at::Tensor large = at::matmul(On(1, at::ones({3, 4})), weights[1]);
  at::matmul(Row(2), weights[2]);
  EXPECT_EQ((small + large).device(), FakeGpu(1));
}

TEST_F(DividedModelTest, NumberWithoutDimensions_GoesToTheRest) {
  const auto weights = Weights({0, 1});
  const at::Tensor x = at::matmul(Row(0), weights[0]);
  const at::Tensor number = at::matmul(Row(1), weights[1]).sum();
  EXPECT_EQ((x * number).device(), FakeGpu(0));
  EXPECT_EQ((x * at::ones({})).device(), FakeGpu(0)) << "of the host";
}

TEST_F(DividedModelTest, WrittenTensor_IsWrittenAndNotACopy) {
  const auto weights = Weights({0, 1});
  const at::Tensor far = at::matmul(Row(1), weights[1]);
  at::Tensor near = Row(0);
  const at::Tensor view = near.narrow(0, 1, 2);
  near.add_(far);
  EXPECT_EQ(near.device(), FakeGpu(0));
  EXPECT_TRUE(at::equal(near.cpu(), at::arange(1, 5, at::kFloat) * 3));
  EXPECT_TRUE(at::equal(view.cpu(), at::arange(2, 4, at::kFloat) * 3));
  at::Tensor out = On(0, at::zeros({4}));
  at::mul_out(out, far, far);
  EXPECT_TRUE(at::equal(out.cpu(), at::arange(1, 5, at::kFloat).square() * 4));
  at::Tensor copy = On(0, at::zeros({4}));
  copy.copy_(far);
  EXPECT_TRUE(at::equal(copy.cpu(), at::arange(1, 5, at::kFloat) * 2));
  at::Tensor picked = On(0, at::zeros({4}));
  picked.index_put_({On(1, at::tensor({0, 2}))}, far.narrow(0, 0, 2));
  EXPECT_TRUE(at::equal(picked.cpu(), at::tensor({2.0F, 0.0F, 4.0F, 0.0F})));
}

TEST_F(DividedModelTest, View_IsOfItsOwnTensor) {
  const auto weights = Weights({0, 1});
  const at::Tensor far = at::matmul(On(1, at::ones({3, 4})), weights[1]);
  at::Tensor row = Row(0);
  at::Tensor wide = row.expand_as(far);
  EXPECT_EQ(wide.device(), FakeGpu(0));
  EXPECT_TRUE(wide.is_alias_of(row));
  EXPECT_EQ(row.type_as(far).device(), FakeGpu(1));
  EXPECT_EQ(row.to(far).device(), FakeGpu(1));
}

TEST_F(DividedModelTest, SharedTensor_IsCopiedOnceUntilItChanges) {
  const auto weights = Weights({0, 1});
  at::Tensor mask = Row(0);
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::matmul(Row(1), weights[1]);
  const uint64_t before = Copies();
  for (int i = 0; i < 5; ++i) EXPECT_EQ((x * mask).device(), FakeGpu(1));
  EXPECT_EQ(Copies() - before, 1u);
  mask.add_(1);
  EXPECT_TRUE(at::equal((x * mask).cpu(), (x.cpu() * mask.cpu())));
  EXPECT_EQ(Copies() - before, 2u);
  // Also by a view that is there already, and by new contents.
  mask.narrow(0, 0, 1).zero_();
  EXPECT_TRUE(at::equal((x * mask).cpu(), (x.cpu() * mask.cpu())));
  mask.set_data(On(0, at::full({4}, 7.0F)));
  EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * 7));
  EXPECT_EQ(Copies() - before, 4u);
}

TEST_F(DividedModelTest, SharedCopies_GoWithTheirSource) {
  const auto weights = Weights({0, 1});
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::matmul(Row(1), weights[1]);
  const int64_t before = BytesOnFakeGpu(1);
  for (int i = 0; i < 100; ++i) (void)(x * Row(0));
  EXPECT_LE(BytesOnFakeGpu(1) - before, 2 * 4 * 4);
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < 2 * kSharedCopies; ++i) {
    kept.push_back(Row(0));
    (void)(x * kept.back());
  }
  EXPECT_LE(BytesOnFakeGpu(1) - before, static_cast<int64_t>(kSharedCopies + 1) * 4 * 4);
  model_.reset();
  EXPECT_EQ(BytesOnFakeGpu(1) - before,
            -static_cast<int64_t>(weights[1].nbytes()) + static_cast<int64_t>(weights[1].nbytes()));
}

TEST_F(DividedModelTest, ResultThatShowsACopy_MayBeWritten) {
  const auto weights = Weights({0, 1});
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::matmul(On(1, at::ones({3, 4})), weights[1]);
  const at::Tensor row = Row(0);
  const at::Tensor shown = at::broadcast_tensors({row, x})[0];
  EXPECT_EQ(shown.device(), FakeGpu(1));
  shown[0].zero_();
  EXPECT_TRUE(at::equal((x[0] * row).cpu(), 2 * row.cpu()));
}

TEST_F(DividedModelTest, InferenceMode_ComputesTheSame) {
  const auto weights = Weights({0, 1});
  const c10::InferenceMode inference;
  at::Tensor mask = Row(0);
  const at::Tensor x = at::matmul(Row(1), weights[1]);
  EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * mask.cpu()));
  // Nobody counts its changes here.
  mask.add_(1);
  EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * mask.cpu()));
}

TEST_F(DividedModelTest, CopyOfInferenceMode_ServesAPassWithGradients) {
  const auto weights = Weights({0, 1});
  const at::Tensor mask = Row(0);
  {
    const c10::InferenceMode inference;
    (void)(at::matmul(Row(1), weights[1]) * mask);
  }
  at::Tensor input = Row(1).requires_grad_();
  (at::matmul(input, weights[1]) * mask).sum().backward();
  EXPECT_TRUE(at::equal(input.grad().cpu(), 2 * mask.cpu()));
}

TEST_F(DividedModelTest, CopyWithoutGradient_IsNotTakenForOneWith) {
  const auto weights = Weights({0, 1});
  at::Tensor input = Row(0).requires_grad_();
  {
    const at::NoGradGuard no_grad;
    (void)at::matmul(input, weights[1]);
  }
  at::matmul(input, weights[1]).sum().backward();
  EXPECT_TRUE(at::equal(input.grad().cpu(), at::full({4}, 2.0F)));
}

TEST_F(DividedModelTest, Gradients_FlowBackToEachDevice) {
  const auto weights = Weights({0, 1, 2});
  at::Tensor input = Row(0).requires_grad_();
  at::Tensor adapter = Row(1).requires_grad_();
  const at::Tensor first = at::matmul(input, weights[0]);
  const at::Tensor second = first + at::matmul(first, weights[1]) * adapter;
  const at::Tensor third = second + at::matmul(second, weights[2]).square();
  EXPECT_EQ(third.device(), FakeGpu(2));
  third.sum().backward();
  EXPECT_EQ(input.grad().device(), FakeGpu(0));
  EXPECT_EQ(adapter.grad().device(), FakeGpu(1));

  at::Tensor host_input = at::arange(1, 5, at::kFloat).requires_grad_();
  at::Tensor host_adapter = at::arange(1, 5, at::kFloat).requires_grad_();
  const at::Tensor a = at::matmul(host_input, at::eye(4));
  const at::Tensor b = a + at::matmul(a, at::eye(4) * 2) * host_adapter;
  (b + at::matmul(b, at::eye(4) * 3).square()).sum().backward();
  EXPECT_TRUE(at::equal(input.grad().cpu(), host_input.grad()));
  EXPECT_TRUE(at::equal(adapter.grad().cpu(), host_adapter.grad()));
}

TEST_F(DividedModelTest, TrainedWeights_GetTheirGradientsWhereTheyAre) {
  std::vector<at::Tensor> weights = Weights({0, 1});
  for (at::Tensor& weight : weights) weight.requires_grad_();
  at::matmul(at::matmul(Row(0), weights[0]), weights[1]).sum().backward();
  for (int gpu = 0; gpu < 2; ++gpu) EXPECT_EQ(weights[gpu].grad().device(), FakeGpu(gpu));
  // As optimizers do.
  const at::NoGradGuard no_grad;
  at::_foreach_add_({weights[0], weights[1]}, {weights[0].grad(), weights[1].grad()}, -0.5);
  EXPECT_EQ(weights[1].device(), FakeGpu(1));
  EXPECT_EQ(at::stack(at::_foreach_norm({weights[0].grad(), weights[1].grad()})).numel(), 2);
}

TEST_F(DividedModelTest, SeveralThreads_ComputeTheSame) {
  const auto weights = Weights({0, 1, 2});
  const at::Tensor mask = Row(0);
  const at::Tensor expected = at::arange(1, 5, at::kFloat) * 6 * mask.cpu();
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t i = 0; i < wrong.size(); ++i) {
    threads.emplace_back([&, i] {
      const at::NoGradGuard no_grad;
      for (int pass = 0; pass < 50; ++pass) {
        at::Tensor x = Row(0);
        for (const at::Tensor& weight : weights) x = at::matmul(x, weight);
        wrong[i] += at::equal((x * mask).cpu(), expected) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, testing::Each(0));
}

TEST_F(DividedModelTest, TensorsOfTheHost_StayThere) {
  const auto weights = Weights({0, 1});
  const at::Tensor x = at::matmul(Row(0), weights[0]);
  EXPECT_FALSE(MovesOperators(x.cpu()));
  EXPECT_THAT(ErrorOf([&] { (void)(x + at::ones({4})); }), HasSubstr("device"));
  EXPECT_EQ(at::index(x, {at::tensor({0, 2})}).numel(), 2);
  std::ostringstream text;
  text << x;
  EXPECT_THAT(text.str(), HasSubstr("{4}"));
}

}  // namespace
}  // namespace muster
