#include "worker/bigmodel/empty_weights.h"

#include <malloc.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/init.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
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
  // The member and the registered tensor are the same.
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

// A module that reads values while it is constructed.
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

// A module that fills its buffers from memory that ends with the constructor, and from a row that
// is used again.
class BorrowingImpl : public torch::nn::Module {
 public:
  BorrowingImpl() {
    const at::NoGradGuard no_grad;
    std::vector<float> values = {1, 2, 3, 4};
    table = register_buffer("table", at::empty({4}));
    table.copy_(at::from_blob(values.data(), {4}));
    rows = register_buffer("rows", at::empty({3, 4}));
    weight = register_parameter("weight", at::empty({3, 4}));
    const at::Tensor row = at::empty({4}, at::kCPU);
    for (int64_t i = 0; i < 3; ++i) {
      row.fill_(i);
      rows[i].copy_(row);
      weight.index_put_({at::tensor(i, at::TensorOptions(at::kLong).device(at::kCPU))}, row);
    }
    spread = register_buffer("spread", at::empty({2, 4}));
    spread.copy_(row.expand({2, 4}));
    // The next owner of the memory.
    std::fill(values.begin(), values.end(), -1.0F);
    row.fill_(-1);
  }
  at::Tensor table, rows, weight, spread;
};
TORCH_MODULE(Borrowing);

TEST(EmptyWeights, BufferFromMemoryOfTheConstructor_HasItsValues) {
  const Borrowing whole, net = InitEmptyWeights([] { return Borrowing(); });
  EXPECT_TRUE(net->weight.is_meta());
  for (const auto& buffer : whole->named_buffers()) {
    EXPECT_TRUE(at::equal(net->named_buffers()[buffer.key()], buffer.value())) << buffer.key();
  }
}

// A number without dimensions does not determine a type: results keep the type of the other
// operand.
TEST(EmptyWeights, NumberThatBecomesATensor_StaysOne) {
  EmptyWeightsScope scope;
  const at::Tensor number = at::scalar_tensor(2.5, at::TensorOptions(at::kDouble).device(at::kCPU));
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  const at::Tensor half = at::ones({2}, at::kHalf).mul(number);
  EXPECT_EQ(half.scalar_type(), at::kHalf);
  number.fill_(1);
  const at::Tensor value = scope.ValueOf(half);
  EXPECT_EQ(value.scalar_type(), at::kHalf);
  EXPECT_EQ(value[0].item<float>(), 2.5);
}

TEST(EmptyWeights, BroadcastSource_IsKeptOnce) {
  EmptyWeightsScope scope;
  const at::Tensor wide = at::empty({int64_t{1} << 20, 1000});
  const at::Tensor row = at::ones({1000}, at::kCPU);
  const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
  wide.copy_(row.expand_as(wide));
  EXPECT_LT(mallinfo2().uordblks + mallinfo2().hblkhd - before, size_t{1} << 20);
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

// What a constructor may do with its parameters: initialize them twice, in place, through a view,
// from another one, and with a number that depends on a value.
struct PeculiarImpl : torch::nn::Module {
  PeculiarImpl() {
    a = register_parameter("a", at::empty({7, 5}));
    torch::nn::init::kaiming_uniform_(a, 1.0);
    b = register_parameter("b", at::randn({20}));
    {
      at::NoGradGuard no_grad;
      a.narrow(0, 2, 3).normal_(0, 2);
      b.mul_(a.sum());
    }
    c = register_parameter("c", torch::nn::init::orthogonal_(at::empty({6, 6})));
    scale = 1 + a.sum().item<double>();
    d = register_parameter("d", at::rand({4}) * scale);
    e = register_parameter("e", at::full({3}, 2.0));
    frozen = register_parameter("frozen", at::randperm(9).to(at::kFloat), false);
    layers = register_module(
        "layers", torch::nn::Sequential(
                      torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4),
                      torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).padding_idx(3))));
    apply([](torch::nn::Module& module) {
      at::NoGradGuard no_grad;
      if (auto* linear = module.as<torch::nn::Linear>()) linear->weight.normal_(0, 0.02);
    });
  }
  at::Tensor a, b, c, d, e, frozen;
  double scale = 0;
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Peculiar);

TEST(DeferredInit, Values_AreThoseOfAnOrdinaryConstruction_InAnyOrder) {
  at::manual_seed(11);
  const Peculiar want;
  const at::Tensor after = at::randn({3});
  at::manual_seed(11);
  const Peculiar got = DeferredInit([] { return Peculiar(); });
  EXPECT_TRUE(at::equal(at::randn({3}), after)) << "the generator goes on elsewhere";
  EXPECT_EQ(got->scale, want->scale);
  const at::Tensor state = RandomState();
  const auto wanted = want->named_parameters();
  std::vector<std::string> names = wanted.keys();
  std::reverse(names.begin(), names.end());
  for (const std::string& name : names) {
    const at::Tensor parameter = got->named_parameters()[name];
    // The meta device has no randperm().
    EXPECT_EQ(HasDeferredValues(parameter), name != "frozen") << name;
    Materialize(parameter, at::kCPU, name);
    EXPECT_TRUE(at::equal(parameter, wanted[name])) << name;
    EXPECT_EQ(parameter.requires_grad(), wanted[name].requires_grad()) << name;
    EXPECT_EQ(parameter.storage().nbytes(), parameter.nbytes()) << name;
    EXPECT_EQ(parameter.unsafeGetTensorImpl()->get_backend_meta(), nullptr) << name;
  }
  EXPECT_TRUE(at::equal(state, RandomState())) << "the generator has moved";
  EXPECT_TRUE(at::equal(got->a, want->a)) << "the member is the parameter";
  for (const auto& buffer : want->named_buffers()) {
    EXPECT_TRUE(at::equal(got->named_buffers()[buffer.key()], buffer.value())) << buffer.key();
  }
}

struct WithHolesImpl : torch::nn::Module {
  WithHolesImpl() { weight = register_parameter("weight", at::ones({4, 6}).narrow(1, 0, 3).t()); }
  at::Tensor weight;
};
TORCH_MODULE(WithHoles);

// Ranks without the values must lay them out like the rank that has them.
TEST(EmptyWeights, BuffersOfOneDraw_BelongTogether) {
  struct Permutation : torch::nn::Module {
    Permutation() {
      const at::Tensor noise = at::rand({50});
      order = register_buffer("order", noise.argsort());
      inverse = register_buffer("inverse", order.argsort());
      first = noise.argmin().item<int64_t>();
      other = register_buffer("other", at::rand({50}));
    }
    at::Tensor order, inverse, other;
    int64_t first = -1;
  };
  at::manual_seed(5);
  const auto net = InitEmptyWeights([] { return std::make_shared<Permutation>(); });
  EXPECT_TRUE(at::equal(net->order.index_select(0, net->inverse), at::arange(50)));
  EXPECT_EQ(net->order[0].item<int64_t>(), net->first);
  EXPECT_FALSE(at::equal(net->other.argsort(), net->order)) << "each draw has its own numbers";
  const at::Tensor state = RandomState();
  const auto next = InitEmptyWeights([] { return std::make_shared<Permutation>(); });
  EXPECT_FALSE(at::equal(next->order, net->order));
  EXPECT_FALSE(at::equal(state, RandomState())) << "the generator goes on";
}

TEST(DeferredInit, SourceThatChangesLater_CountsAsItWasThen) {
  const Borrowing whole, net = DeferredInit([] { return Borrowing(); });
  ASSERT_TRUE(net->weight.is_meta());
  Materialize(net->weight, at::kCPU, "weight");
  EXPECT_TRUE(at::equal(net->weight, whole->weight));
}

TEST(DeferredInit, StridesOfAParameterWithHoles_AreTheSameWithAndWithoutValues) {
  const WithHoles with = DeferredInit([] { return WithHoles(); });
  const WithHoles without = DeferredInit([] { return WithHoles(); });
  Materialize(with->weight, at::kCPU, "weight", /*with_values=*/true);
  Materialize(without->weight, at::kCPU, "weight", /*with_values=*/false);
  EXPECT_EQ(with->weight.strides(), without->weight.strides());
  EXPECT_EQ(without->weight.storage().nbytes(), without->weight.nbytes());
}

TEST(DeferredInit, Module_ThatIsDropped_LeavesNothing) {
  std::weak_ptr<PeculiarImpl> dropped;
  c10::weak_intrusive_ptr<c10::BackendMeta> record(c10::intrusive_ptr<c10::BackendMeta>{});
  {
    const Peculiar net = DeferredInit([] { return Peculiar(); });
    record = c10::weak_intrusive_ptr<c10::BackendMeta>(
        net->a.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
    EXPECT_FALSE(record.expired());
  }
  EXPECT_TRUE(record.expired());
}

TEST(DeferredInit, DataThatIsExchanged_CountsAsItIsAtTheEnd) {
  const auto make = [] {
    torch::nn::Linear net(4, 4);
    net->to(at::kBFloat16);
    net->bias.set_data(at::randn({4}));
    at::NoGradGuard no_grad;
    net->bias.mul_(2);
    return net;
  };
  at::manual_seed(3);
  const torch::nn::Linear want = make();
  at::manual_seed(3);
  const torch::nn::Linear got = DeferredInit(make);
  for (const auto& item : got->named_parameters()) {
    Materialize(item.value(), at::kCPU, item.key());
    EXPECT_TRUE(at::equal(item.value(), want->named_parameters()[item.key()])) << item.key();
  }
  // After the construction the values are lost, and that is reported.
  torch::nn::Linear late = DeferredInit([] { return torch::nn::Linear(4, 4); });
  late->to(at::kBFloat16);
  EXPECT_THAT(ErrorOf([&] { Materialize(late->weight, at::kCPU, "weight"); }),
              HasSubstr("and change its type inside of it"));
}

TEST(DeferredInit, ChangeWithoutMemory_IsRefused) {
  torch::nn::Linear net = DeferredInit([] { return torch::nn::Linear(2, 2); });
  {
    at::NoGradGuard no_grad;
    net->weight.fill_(1);
  }
  EXPECT_THAT(ErrorOf([&] { Materialize(net->weight, at::kCPU, "weight"); }),
              HasSubstr("'weight' was written after deferred_init()"));
  const torch::nn::Linear empty = InitEmptyWeights([] { return torch::nn::Linear(2, 2); });
  EXPECT_FALSE(HasDeferredValues(empty->weight));
  EXPECT_THAT(ErrorOf([&] { Materialize(empty->weight, at::kCPU, "weight"); }),
              HasSubstr("'weight' is on the meta device and has no values"));
}

struct OverlappingImpl : torch::nn::Module {
  OverlappingImpl() {
    const at::Tensor flat = at::randn({4});
    register_parameter("low", flat.narrow(0, 0, 3));
    register_parameter("high", flat.narrow(0, 1, 3));
  }
};

TEST(DeferredInit, ParametersInOneMemory_AreRefused) {
  EXPECT_THAT(ErrorOf([] { DeferredInit([] { return std::make_shared<OverlappingImpl>(); }); }),
              HasSubstr("'low' and 'high' share memory"));
}

}  // namespace
}  // namespace muster
