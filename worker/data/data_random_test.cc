#include "worker/data/data_random.h"

#include <functional>
#include <map>
#include <string>
#include <thread>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

at::Tensor DefaultState() { return at::detail::getDefaultCPUGenerator().get_state(); }

// LibTorch's random functions, by name.
std::map<std::string, std::function<at::Tensor()>> Functions() {
  const at::Tensor half = at::full({64}, 0.5);
  return {
      {"rand", [] { return at::rand({64}); }},
      {"randn", [] { return at::randn({64}); }},
      {"randint", [] { return at::randint(1000000, {64}); }},
      {"randperm", [] { return at::randperm(64); }},
      {"rand_like", [=] { return at::rand_like(half); }},
      {"randn_like", [=] { return at::randn_like(half); }},
      {"randint_like", [=] { return at::randint_like(half, 1000000); }},
      {"bernoulli", [=] { return at::bernoulli(half); }},
      {"multinomial", [=] { return at::multinomial(half, 32); }},
      {"normal", [=] { return at::normal(half, 2.0); }},
      {"poisson", [=] { return at::poisson(half.mul(40)); }},
      {"binomial", [=] { return at::binomial(half.mul(200), half); }},
      {"dropout", [=] { return at::dropout(half, 0.5, true); }},
      {"alpha_dropout", [=] { return at::alpha_dropout(half, 0.5, true); }},
      {"rrelu", [=] { return at::rrelu(half.neg(), 0.1, 0.3, true); }},
      {"uniform_", [=] { return half.clone().uniform_(); }},
      {"normal_", [=] { return half.clone().normal_(); }},
      {"exponential_", [=] { return half.clone().exponential_(); }},
      {"geometric_", [=] { return half.clone().geometric_(0.01); }},
      {"cauchy_", [=] { return half.clone().cauchy_(); }},
      {"log_normal_", [=] { return half.clone().log_normal_(); }},
      {"random_", [=] { return half.clone().random_(1000000); }},
      {"_standard_gamma", [=] { return at::_standard_gamma(half); }},
      {"_sample_dirichlet", [=] { return at::_sample_dirichlet(half); }},
      {"rand of a transposed double",
       [] {
         return at::rand({8, 8}, at::kDouble).t().contiguous().view(-1);
       }},
  };
}

TEST(DataRandomScope, EveryRandomFunction_DrawsFromTheReadersGenerator) {
  RegisterDataRandom();
  for (const auto& [name, function] : Functions()) {
    SCOPED_TRACE(name);
    DataGenerator generator;
    const at::Tensor before = DefaultState();
    const auto draw = [&](uint64_t seed) {
      generator.Reseed(seed);
      DataRandomScope scope(&generator, true);
      return function();
    };
    const at::Tensor one = draw(1);
    const at::Tensor two = draw(2);
    EXPECT_TRUE(one.equal(draw(1)));
    EXPECT_FALSE(one.equal(two));
    EXPECT_TRUE(before.equal(DefaultState())) << "drew from the default generator";
    // Outside the scope, everything is as before.
    function();
    EXPECT_FALSE(before.equal(DefaultState()));
  }
}

TEST(DataRandomScope, NumbersWithinAScope_AreThoseOfATorchGenerator) {
  RegisterDataRandom();
  DataGenerator generator;
  generator.Reseed(7);
  DataRandomScope scope(&generator, true);
  const at::Tensor first = at::rand({5});
  const at::Tensor second = at::rand({5});
  at::Generator expected = at::detail::createCPUGenerator(7);
  EXPECT_TRUE(first.equal(at::rand({5}, expected)));
  EXPECT_TRUE(second.equal(at::rand({5}, expected)));
}

TEST(DataRandomScope, GivenGenerator_IsUsed) {
  RegisterDataRandom();
  DataGenerator generator;
  generator.Reseed(7);
  DataRandomScope scope(&generator, true);
  const at::Tensor mine = at::rand({5}, at::detail::createCPUGenerator(3));
  EXPECT_TRUE(mine.equal(at::rand({5}, at::detail::createCPUGenerator(3))));
}

TEST(DataRandomScope, Gradients_FlowThroughRandomFunctions) {
  RegisterDataRandom();
  DataGenerator generator;
  DataRandomScope scope(&generator, true);
  const at::Tensor x = at::ones({8}).requires_grad_();
  at::dropout(x, 0.5, true).sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(DataRandomScope, OtherThreads_KeepTheDefaultGenerator) {
  RegisterDataRandom();
  DataGenerator generator;
  DataRandomScope scope(&generator, true);
  const at::Tensor before = DefaultState();
  std::thread([] { at::rand({3}); }).join();
  EXPECT_FALSE(before.equal(DefaultState()));
}

TEST(DataSeed, EachSampleAndBatch_HasItsOwn) {
  DataGenerator generator;
  generator.Reseed(5);
  const uint64_t outside = data_seed();
  {
    DataRandomScope scope(&generator, false);
    const uint64_t batch = data_seed();
    SetDataSample(0);
    const uint64_t sample = data_seed();
    SetDataSample(1);
    EXPECT_NE(batch, sample);
    EXPECT_NE(sample, data_seed());
    SetDataSample(0);
    EXPECT_EQ(sample, data_seed());
    const at::Tensor before = DefaultState();
    at::rand({3});
    EXPECT_FALSE(before.equal(DefaultState()));
  }
  EXPECT_EQ(data_seed(), outside);
}

}  // namespace
}  // namespace muster
