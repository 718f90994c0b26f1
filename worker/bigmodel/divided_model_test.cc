#include "worker/bigmodel/divided_model.h"

#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/grad_mode.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/library.h"
#include "worker/bigmodel/fake_gpus.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/collective/test_error.h"
#include "worker/train/activation_checkpoint.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocabulary = 20, kWidth = 16, kBlocks = 4;

at::Tensor On(int gpu, const at::Tensor& host) { return host.to(FakeGpu(gpu)); }
at::Tensor Row(int gpu) { return On(gpu, at::arange(1, 5, at::kFloat)); }

class DividedModelTest : public testing::Test {
 protected:
  DividedModelTest() { InstallFakeGpus(); }

  // Makes parameters on these GPUs, which belong to the model from here on.
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
  // Also through a view of the weight, and in a list.
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

TEST_F(DividedModelTest, RunningStatistics_AreWrittenWhereTheyAre) {
  const auto weights = Weights({0, 1});
  const at::Tensor mean = On(1, at::zeros({4})), variance = On(2, at::ones({4}));
  const DividedModel buffers({}, {mean, variance});
  at::Tensor host_mean = at::zeros({4}), host_variance = at::ones({4});
  const at::NoGradGuard no_grad;
  const at::Tensor input = at::arange(32, at::kFloat).view({8, 4});
  const at::Tensor x = at::matmul(On(0, input), weights[0]);
  for (const bool training : {false, true, false, true, false}) {
    SCOPED_TRACE(training);
    const at::Tensor found = at::batch_norm(x, {}, {}, mean, variance, training, 0.1, 1e-5, false);
    const at::Tensor expected =
        at::batch_norm(input, {}, {}, host_mean, host_variance, training, 0.1, 1e-5, false);
    EXPECT_TRUE(at::equal(found.cpu(), expected));
    EXPECT_TRUE(at::equal(mean.cpu(), host_mean));
    EXPECT_TRUE(at::equal(variance.cpu(), host_variance));
  }
  const at::Tensor wide = x.view({2, 4, 4}), host_wide = input.view({2, 4, 4});
  at::instance_norm(wide, {}, {}, mean, variance, true, 0.1, 1e-5, false);
  at::instance_norm(host_wide, {}, {}, host_mean, host_variance, true, 0.1, 1e-5, false);
  EXPECT_TRUE(at::equal(mean.cpu(), host_mean));
  EXPECT_TRUE(at::equal(variance.cpu(), host_variance));
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
  // Also through an existing view, and by new contents.
  mask.narrow(0, 0, 1).zero_();
  EXPECT_TRUE(at::equal((x * mask).cpu(), (x.cpu() * mask.cpu())));
  mask.set_data(On(0, at::full({4}, 7.0F)));
  EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * 7));
  EXPECT_EQ(Copies() - before, 4u);
}

// Changes of a tensor that do not change its version.
TEST_F(DividedModelTest, SharedTensor_IsCopiedAgainForOtherContents) {
  const auto weights = Weights({0, 1});
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::matmul(On(1, at::ones({2, 4})), weights[1]).narrow(1, 0, 2);
  const at::Tensor all = On(0, at::arange(8, at::kFloat));
  at::Tensor mask = On(0, at::empty({2, 2}));
  const auto expect_current = [&] {
    EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * mask.cpu()));
  };
  mask.set_data(all.narrow(0, 0, 4).view({2, 2}));
  expect_current();
  mask.set_data(all.narrow(0, 4, 4).view({2, 2}));
  expect_current();
  mask.set_data(all.as_strided({2, 2}, {1, 2}, 4));
  expect_current();
}

TEST_F(DividedModelTest, SharedTensor_IsCopiedAgainInTheNextStay) {
  const auto weights = Weights({0, 1, 1});
  const at::NoGradGuard no_grad;
  at::Tensor mask = Row(0);
  const auto expect_pass = [&](const std::vector<size_t>& layers) {
    at::Tensor x = Row(1), expected = x.cpu();
    for (const size_t layer : layers) {
      x = at::matmul(x, weights[layer]) * mask;
      expected = at::matmul(expected, weights[layer].cpu()) * mask.cpu();
    }
    EXPECT_TRUE(at::equal(x.cpu(), expected));
  };
  expect_pass({1, 2});
  // No version counts these changes.
  mask.data().fill_(5);
  expect_pass({1, 2});
  mask.variable_data().fill_(6);
  expect_pass({2});
  mask.data().fill_(7);
  expect_pass({2});
  mask.data().fill_(8);
  expect_pass({0, 1, 2, 0, 1});
  const uint64_t before = Copies();
  expect_pass({0, 1, 2});
  EXPECT_EQ(Copies() - before, 3u) << "the input, the state between two GPUs, and the mask";
}

TEST_F(DividedModelTest, SharedCopies_EndWithTheirStayAndThread) {
  const auto weights = Weights({0, 1});
  const at::NoGradGuard no_grad;
  const at::Tensor mask = Row(0);
  const at::Tensor x = at::matmul(Row(1), weights[1]);
  const int64_t before = BytesOnFakeGpu(1);
  (void)(x * mask);
  EXPECT_GT(BytesOnFakeGpu(1), before);
  (void)at::matmul(Row(0), weights[0]);
  EXPECT_EQ(BytesOnFakeGpu(1), before);
  std::thread([&] {
    const at::NoGradGuard off;
    (void)(x * mask);
  }).join();
  EXPECT_EQ(BytesOnFakeGpu(1), before);
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
  EXPECT_EQ(BytesOnFakeGpu(1), before) << "the end of the model gives them back";
}

TEST_F(DividedModelTest, ResultThatShowsACopy_MayBeWritten) {
  const auto weights = Weights({0, 1});
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::matmul(On(1, at::ones({3, 4})), weights[1]);
  const at::Tensor row = Row(0);
  const at::Tensor shown = at::meshgrid({row, x[0]}, "ij")[0];
  EXPECT_EQ(shown.device(), FakeGpu(1));
  shown.select(1, 0).zero_();
  EXPECT_TRUE(at::equal((x[0] * row).cpu(), 2 * row.cpu()));
}

// The operator's schema does not say that it returns views.
TEST_F(DividedModelTest, BroadcastTensors_AreViewsOfTheirOwn) {
  const auto weights = Weights({0, 1});
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::matmul(On(1, at::ones({3, 4})), weights[1]);
  const at::Tensor row = Row(0);
  at::broadcast_tensors({row, x})[0][0].zero_();
  EXPECT_TRUE(at::equal(row.cpu(), at::zeros({4})));
  EXPECT_TRUE(at::atleast_2d({row, x})[0].is_alias_of(row));
}

TEST_F(DividedModelTest, ExpandedTensor_IsCopiedOnceAndNotItsRepetitions) {
  const auto weights = Weights({0, 1});
  const at::Tensor row = Row(0);
  const auto copied = [&](bool inference) {
    const c10::InferenceMode mode(inference);
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::matmul(On(1, at::ones({8, 16, 4})), weights[1]);
    const at::Tensor mask = (inference ? row + 0 : row).expand({8, 16, 4});
    const uint64_t before = CrossingsSoFar().copied_bytes;
    const at::Tensor product = x * mask;
    EXPECT_EQ(product.device(), FakeGpu(1));
    EXPECT_TRUE(at::equal(product.cpu(), x.cpu() * mask.cpu()));
    return CrossingsSoFar().copied_bytes - before;
  };
  EXPECT_EQ(copied(false), row.nbytes());
  EXPECT_EQ(copied(true), row.nbytes());
}

TEST_F(DividedModelTest, SparseWeight_MovesLikeOthers) {
  const at::Tensor sparse = at::eye(4).to_sparse();
  { const DividedModel model({sparse, at::Tensor()}, {at::Tensor()}); }
  EXPECT_TRUE(MovesOperators(sparse));
  EXPECT_TRUE(at::equal(at::mm(sparse, at::ones({4, 2})), at::ones({4, 2})));
}

TEST_F(DividedModelTest, WithoutAModel_NothingIsShared) {
  const auto weights = Weights({0, 1});
  const at::NoGradGuard no_grad;
  const at::Tensor mask = Row(0);
  const at::Tensor x = at::matmul(Row(1), weights[1]);
  model_.reset();
  const int64_t before = BytesOnFakeGpu(1);
  EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * mask.cpu()));
  EXPECT_EQ(BytesOnFakeGpu(1), before);
}

TEST_F(DividedModelTest, InferenceMode_ComputesTheSame) {
  const auto weights = Weights({0, 1});
  const c10::InferenceMode inference;
  at::Tensor mask = Row(0);
  const at::Tensor x = at::matmul(Row(1), weights[1]);
  EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * mask.cpu()));
  // Its changes are not counted here.
  mask.add_(1);
  EXPECT_TRUE(at::equal((x * mask).cpu(), x.cpu() * mask.cpu()));
}

TEST_F(DividedModelTest, CopyOfInferenceMode_ServesAPassWithGradients) {
  const auto weights = Weights({0, 1, 1});
  const at::Tensor mask = Row(0);
  {
    const c10::InferenceMode inference;
    (void)(at::matmul(Row(1), weights[1]) * mask);
  }
  at::Tensor input = Row(1).requires_grad_();
  (at::matmul(input, weights[2]) * mask).sum().backward();
  EXPECT_TRUE(at::equal(input.grad().cpu(), 2 * mask.cpu()));
}

TEST_F(DividedModelTest, CopyWithoutGradient_IsNotTakenForOneWith) {
  const auto weights = Weights({0, 1, 1});
  at::Tensor input = Row(0).requires_grad_();
  {
    const at::NoGradGuard no_grad;
    (void)at::matmul(input, weights[1]);
  }
  at::matmul(input, weights[2]).sum().backward();
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
  // Like optimizers.
  const at::NoGradGuard no_grad;
  at::_foreach_add_({weights[0], weights[1]}, {weights[0].grad(), weights[1].grad()}, -0.5);
  EXPECT_EQ(weights[1].device(), FakeGpu(1));
  EXPECT_EQ(at::stack(at::_foreach_norm({weights[0].grad(), weights[1].grad()})).numel(), 2);
}

// Runs it as an operator, which TorchScript calls.
void Backward(const at::Tensor& loss, const std::vector<at::Tensor>& inputs) {
  torch::jit::Stack stack = {loss, c10::List<at::Tensor>(inputs), c10::IValue(), c10::IValue(),
                             false};
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::_backward", "").callBoxed(&stack);
}

// A rerun happens inside of the backward pass.
TEST_F(DividedModelTest, CheckpointedFunction_MovesInItsRerunToo) {
  const auto weights = Weights({0, 1, 2});
  const auto run = [&](bool checkpoints) {
    at::Tensor input = Row(0).requires_grad_();
    const auto block = [&](const at::Tensor& x) {
      const at::Tensor first = at::matmul(x, weights[1]).square();
      return first + at::matmul(first, weights[2]) + at::matmul(x, weights[0]);
    };
    const at::Tensor out = checkpoints ? activation_checkpoint(block, input) : block(input);
    Backward(out.sum(), {input});
    return input.grad().cpu();
  };
  EXPECT_TRUE(at::equal(run(true), run(false)));
}

// It runs where the preceding weights were, which the thread of the second run does not know.
TEST_F(DividedModelTest, CheckpointedFunctionThatBeginsWithoutAWeight_RunsWhereItRanFirst) {
  const auto weights = Weights({0, 1});
  for (const size_t last : {0, 1}) {
    at::Tensor near = Row(0).requires_grad_(), far = Row(1).requires_grad_();
    const at::Tensor first = at::matmul(near, weights[0]);
    at::Tensor second = at::matmul(far, weights[1]);
    if (last == 0) (void)at::matmul(Row(0), weights[0]);
    const at::Tensor out = activation_checkpoint(
        [](const at::Tensor& a, const at::Tensor& b) { return (a * b).square(); }, first, second);
    EXPECT_EQ(out.device(), FakeGpu(static_cast<int>(last)));
    Backward(out.sum(), {near, far});
    const at::Tensor row = at::arange(1, 5, at::kFloat);
    EXPECT_TRUE(at::allclose(near.grad().cpu(), 8 * row.pow(3)));
    EXPECT_TRUE(at::allclose(far.grad().cpu(), 8 * row.pow(3)));
  }
}

TEST_F(DividedModelTest, BackwardOfNamedInputs_GivesThemTheirGradients) {
  const auto weights = Weights({0, 1});
  at::Tensor near = Row(0).requires_grad_(), far = Row(1).requires_grad_();
  const at::Tensor loss = (at::matmul(near, weights[0]) + at::matmul(far, weights[1])).sum();
  Backward(loss, {near, far});
  EXPECT_TRUE(at::equal(near.grad().cpu(), at::ones({4})));
  EXPECT_TRUE(at::equal(far.grad().cpu(), at::full({4}, 2.0F)));
}

// A program's operator that consists of others, with weights of its own on each GPU.
TEST_F(DividedModelTest, CompositeOperatorOfTheProgram_IsLeftToItsParts) {
  static auto& library = *new torch::Library(torch::Library::FRAGMENT, "muster_test", std::nullopt,
                                             __FILE__, __LINE__);
  static const bool defined = [] {
    library.def("two_layers(Tensor x, Tensor first, Tensor second) -> Tensor",
                [](const at::Tensor& x, const at::Tensor& first, const at::Tensor& second) {
                  return at::matmul(at::matmul(x, first), second);
                });
    return true;
  }();
  ASSERT_TRUE(defined);
  const auto weights = Weights({0, 1});
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("muster_test::two_layers", "")
                      .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  const uint64_t before = Copies();
  const at::Tensor out = op.call(Row(0), weights[0], weights[1]);
  EXPECT_EQ(out.device(), FakeGpu(1));
  EXPECT_TRUE(at::equal(out.cpu(), at::arange(1, 5, at::kFloat) * 2));
  EXPECT_EQ(Copies() - before, 1u) << "of what is between the layers";
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
