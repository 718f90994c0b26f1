#include "worker/bigmodel/empty_weights.h"

#include <malloc.h>

#include <string>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/batchnorm.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

at::Tensor RandomState() { return at::detail::getDefaultCPUGenerator().get_state(); }

TEST(EmptyWeights, Parameters_AreOnTheMetaDevice_BuffersHaveTheirValues) {
  const TextNet whole(20, 8, 2);
  const at::Tensor before = RandomState();
  const TextNet net = InitEmptyWeights([] { return TextNet(20, 8, 2); });
  EXPECT_TRUE(at::equal(before, RandomState())) << "random numbers were drawn";
  for (const auto& parameter : net->named_parameters()) {
    EXPECT_TRUE(parameter.value().is_meta()) << parameter.key();
    EXPECT_TRUE(parameter.value().requires_grad()) << parameter.key();
    EXPECT_EQ(parameter.value().sizes(), whole->named_parameters()[parameter.key()].sizes());
  }
  const auto buffers = whole->named_buffers();
  ASSERT_EQ(buffers.size(), 2);
  for (const auto& buffer : net->named_buffers()) {
    EXPECT_TRUE(at::equal(buffer.value(), buffers[buffer.key()])) << buffer.key();
  }
  // The member and what is registered are one tensor.
  EXPECT_FALSE(net->layers->ptr(0)->as<BlockImpl>()->table.is_meta());
}

TEST(EmptyWeights, IncludeBuffers_LeavesThemEmpty) {
  const TextNet net = InitEmptyWeights([] { return TextNet(20, 8, 1); }, {.include_buffers = true});
  for (const at::Tensor& buffer : net->buffers()) EXPECT_TRUE(buffer.is_meta());
}

TEST(EmptyWeights, BatchNorm_CountsFromItsInitialState) {
  torch::nn::BatchNorm1d norm = InitEmptyWeights([] { return torch::nn::BatchNorm1d(3); });
  EXPECT_TRUE(norm->weight.is_meta());
  EXPECT_TRUE(at::equal(norm->running_var, at::ones({3})));
  EXPECT_TRUE(at::equal(norm->running_mean, at::zeros({3})));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
}

TEST(EmptyWeights, TiedParameters_StayOne) {
  const TextNet net = InitEmptyWeights([] { return TextNet(20, 8, 1, /*tied=*/true); });
  EXPECT_TRUE(net->head_weight.is_same(net->embed->weight));
}

// Looks at values while it is constructed.
class CuriousImpl : public torch::nn::Module {
 public:
  CuriousImpl() {
    const at::Tensor rates = at::linspace(0, 1, 5);
    for (int64_t i = 0; i < 5; ++i) rate.push_back(rates[i].item<float>());
    const at::Tensor odd = at::arange(6).remainder(2);
    odd_places = register_buffer("odd_places", at::nonzero(odd).view({-1}));
    const at::Tensor listed = at::tensor(std::vector<float>{1, 2, 3}, at::kCPU);
    mixed = register_buffer("mixed", listed + at::arange(3));
    weight = register_parameter("weight", at::tensor(std::vector<float>{1, 2}, at::kCPU));
    counts = register_buffer("counts", at::zeros({4}));
    counts.data().select(0, 1).fill_(7);
  }
  std::vector<float> rate;
  at::Tensor odd_places, mixed, weight, counts;
};
TORCH_MODULE(Curious);

TEST(EmptyWeights, ConstructorThatNeedsValues_GetsThem) {
  const Curious net = InitEmptyWeights([] { return Curious(); });
  EXPECT_EQ(net->rate, (std::vector<float>{0, 0.25, 0.5, 0.75, 1}));
  EXPECT_TRUE(at::equal(net->odd_places, at::arange(1, 6, 2)));
  EXPECT_TRUE(at::equal(net->mixed, at::arange(1, 6, 2).to(at::kFloat)));
  EXPECT_TRUE(net->weight.is_meta());
  EXPECT_EQ(net->counts[1].item<float>(), 7);
  EXPECT_EQ(net->counts[0].item<float>(), 0);
}

TEST(EmptyWeights, AfterTheScope_TensorsHaveMemory) {
  {
    const EmptyWeightsScope scope;
    EXPECT_TRUE(at::empty({3}).is_meta());
    {
      const EmptyWeightsScope inner;
      EXPECT_TRUE(at::empty({3}).is_meta());
    }
    EXPECT_TRUE(at::empty({3}).is_meta());
  }
  EXPECT_FALSE(at::empty({3}).is_meta());
}

TEST(EmptyWeights, ValueOfATensorFromElsewhere_IsAnError) {
  const at::Tensor elsewhere = at::empty({2}, at::TensorOptions().device(at::kMeta));
  EmptyWeightsScope scope;
  EXPECT_THAT(ErrorOf([&] { scope.ValueOf(elsewhere); }), HasSubstr("not created in this scope"));
}

// 80 blocks of width 8192: 43 billion parameters in fp32, and the record of their construction.
TEST(EmptyWeights, FortyBillionParameters_TakeFewMegabytes) {
  const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
  const TextNet net = InitEmptyWeights([] { return TextNet(128000, 8192, 80); });
  const size_t after = mallinfo2().uordblks + mallinfo2().hblkhd;
  int64_t elements = 0;
  for (const at::Tensor& parameter : net->parameters()) elements += parameter.numel();
  EXPECT_GT(elements, int64_t{40'000'000'000});
  EXPECT_LT(after - before, size_t{20} << 20);
}

}  // namespace
}  // namespace muster
