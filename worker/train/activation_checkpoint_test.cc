#include "worker/train/activation_checkpoint.h"

#include <errno.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/any.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/scratch_file.h"
#include "worker/train/activation_policy.h"
#include "worker/train/activation_store.h"
#include "worker/train/autocast.h"
#include "worker/train/disk_parts.h"

namespace muster {
namespace {

using torch::autograd::grad;

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : in(register_module("in", torch::nn::Linear(8, 32))),
        out(register_module("out", torch::nn::Linear(32, 8))),
        dropout(register_module("dropout", torch::nn::Dropout(0.3))) {}

  at::Tensor forward(const at::Tensor& x) {
    ++runs;
    return x + out(dropout(at::gelu(in(x))));
  }

  int runs = 0;
  torch::nn::Linear in, out;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Block);

struct Outcome {
  at::Tensor output;
  std::vector<at::Tensor> gradients;
  at::Tensor next_random;
};

// Trains two blocks, checkpointed or not, from the same random state.
Outcome Train(bool checkpointed, MixedPrecision precision = MixedPrecision::kNo) {
  at::manual_seed(3);
  Block first, second;
  const at::Tensor x = at::randn({4, 8}).requires_grad_();
  at::Tensor y;
  {
    const AutocastGuard autocast(precision, c10::kCPU);
    y = checkpointed ? activation_checkpoint(second, activation_checkpoint(first, x))
                     : second(first(x));
  }
  y.to(at::kFloat).square().sum().backward();
  EXPECT_EQ(first->runs, checkpointed ? 2 : 1);
  EXPECT_EQ(second->runs, checkpointed ? 2 : 1);
  Outcome outcome{.output = y, .gradients = {x.grad()}, .next_random = at::rand({3})};
  for (const Block& block : {first, second}) {
    for (const at::Tensor& parameter : block->parameters()) {
      outcome.gradients.push_back(parameter.grad());
    }
  }
  return outcome;
}

void ExpectEqual(const Outcome& a, const Outcome& b) {
  EXPECT_TRUE(a.output.equal(b.output));
  EXPECT_TRUE(a.next_random.equal(b.next_random)) << "the random state is another afterwards";
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    EXPECT_TRUE(a.gradients[i].equal(b.gradients[i])) << i;
  }
}

std::string ErrorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(ActivationCheckpoint, WithDropout_OutputsAndGradientsAreThoseOfAPlainCall) {
  ExpectEqual(Train(true), Train(false));
}

TEST(ActivationCheckpoint, UnderAutocast_TheSecondRunIsInTheSamePrecision) {
  ExpectEqual(Train(true, MixedPrecision::kBf16), Train(false, MixedPrecision::kBf16));
}

TEST(ActivationCheckpoint, Activations_AreFreedUntilTheBackwardPass) {
  const at::Tensor x = at::randn({4}).requires_grad_();
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> hidden;
  const auto function = [&hidden](const at::Tensor& in) {
    const at::Tensor y = in.exp();
    hidden.emplace_back(y.getIntrusivePtr());
    return y.sin().exp();
  };
  const at::Tensor plain = function(x);
  EXPECT_FALSE(hidden[0].expired());
  const at::Tensor y = activation_checkpoint(function, x);
  EXPECT_TRUE(hidden[1].expired());
  y.sum().backward();
  ASSERT_EQ(hidden.size(), 3u);
  EXPECT_TRUE(hidden[2].expired());
  EXPECT_TRUE(x.grad().equal(grad({plain.sum()}, {x})[0]));
}

TEST(ActivationCheckpoint, SecondRun_StopsWhenAllIsThere) {
  int last = 0;
  at::Tensor x = at::ones({2}).requires_grad_();
  // The result of the last operator is not needed, so the operator is not run again.
  const at::Tensor y = activation_checkpoint(
      [&last](const at::Tensor& in) {
        const at::Tensor result = in.exp().sin() + 1;
        ++last;
        return result;
      },
      x);
  y.sum().backward();
  EXPECT_EQ(last, 1);
}

TEST(ActivationCheckpoint, GradientsOff_IsAPlainCall) {
  at::NoGradGuard no_grad;
  Block block;
  activation_checkpoint(block, at::ones({1, 8}));
  EXPECT_EQ(block->runs, 1);
}

TEST(ActivationCheckpoint, InsideOfAnother_IsRunTwiceInAll) {
  Block block;
  const at::Tensor x = at::ones({1, 8}).requires_grad_();
  activation_checkpoint([&](const at::Tensor& in) { return activation_checkpoint(block, in); }, x)
      .sum()
      .backward();
  EXPECT_EQ(block->runs, 2);
  EXPECT_TRUE(block->in->weight.grad().defined());
}

TEST(ActivationCheckpoint, RetainedGraph_IsRunAgainForEachBackwardPass) {
  Block block;
  block->eval();
  const at::Tensor x = at::ones({1, 8}).requires_grad_();
  const at::Tensor y = activation_checkpoint(block, x).sum();
  const at::Tensor once = grad({y}, {x}, {}, /*retain_graph=*/true)[0];
  EXPECT_TRUE(once.equal(grad({y}, {x})[0]));
  EXPECT_EQ(block->runs, 3);
}

TEST(ActivationCheckpoint, GradientsOfGradients_AreThoseOfAPlainCall) {
  const at::Tensor x = at::full({3}, 0.5).requires_grad_();
  const auto function = [](const at::Tensor& in) { return in.exp().sin().pow(2); };
  const auto second = [&](const at::Tensor& y) {
    const at::Tensor first = grad({y.sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    return grad({first.square().sum()}, {x})[0];
  };
  EXPECT_TRUE(at::allclose(second(activation_checkpoint(function, x)), second(function(x))));
}

TEST(ActivationCheckpoint, StructuresAndSharedModules_GoThrough) {
  struct Pair {
    at::Tensor a, b;
  };
  const at::Tensor x = at::ones({2}).requires_grad_();
  const Pair result = activation_checkpoint(
      [](const Pair& in, double scale, const std::string&) {
        return Pair{in.a.exp().sin() * scale, in.b.cos()};
      },
      Pair{x, x * 2}, 3.0, "text");
  (result.a + result.b).sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), 3 * x.exp() * x.exp().cos() - 2 * (x * 2).sin()));
  const auto module = std::make_shared<BlockImpl>();
  activation_checkpoint(module, at::ones({1, 8})).sum().backward();
  EXPECT_EQ(module->runs, 2);
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  activation_checkpoint(net, x).sum().backward();
  EXPECT_TRUE(net[0]->parameters()[0].grad().defined());
}

TEST(ActivationCheckpoint, RunningStatistics_AreUpdatedOnce) {
  const auto net = [] {
    at::manual_seed(5);
    return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4),
                                 torch::nn::Linear(4, 4));
  };
  torch::nn::Sequential plain = net(), checkpointed = net();
  const at::Tensor x = at::randn({6, 4});
  for (int step = 0; step < 3; ++step) {
    plain->forward(x + step).square().sum().backward();
    activation_checkpoint(checkpointed, x + step).square().sum().backward();
  }
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(plain->parameters()[i].grad().equal(checkpointed->parameters()[i].grad())) << i;
  }
  const auto expected = plain->named_buffers();
  for (const auto& buffer : checkpointed->named_buffers()) {
    EXPECT_TRUE(buffer.value().equal(expected[buffer.key()])) << buffer.key();
  }
}

// Keeps positions in a buffer that grows with the longest input.
struct CacheImpl : torch::nn::Module {
  explicit CacheImpl(bool resizes) : resizes(resizes) {
    weight = register_parameter("weight", at::ones({8}));
    cache = register_buffer("cache", at::zeros({0}));
  }
  at::Tensor forward(const at::Tensor& x) {
    while (cache.size(0) < x.size(0)) {
      const int64_t n = cache.size(0);
      const at::Tensor grown = at::cat({cache, at::full({1}, static_cast<double>(n))});
      resizes ? void(cache.resize_({n + 1}).copy_(grown)) : cache.set_data(grown);
      ++grows;
    }
    return (x * weight).sin() * cache.narrow(0, 0, x.size(0)).unsqueeze(1);
  }
  const bool resizes;
  int grows = 0;
  at::Tensor weight, cache;
};
TORCH_MODULE(Cache);

TEST(ActivationCheckpoint, BufferThatGrows_IsAsInThePlainCall) {
  for (const bool resizes : {false, true}) {
    Cache plain(resizes), checkpointed(resizes);
    for (const int64_t rows : {3, 2, 5}) {
      const at::Tensor x = at::randn({rows, 8});
      plain->forward(x).sum().backward();
      const at::Tensor y = activation_checkpoint(checkpointed, x);
      const void* const memory = checkpointed->cache.data_ptr();
      y.sum().backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(plain->weight.grad().equal(checkpointed->weight.grad()));
      EXPECT_TRUE(plain->cache.equal(checkpointed->cache));
      EXPECT_EQ(checkpointed->cache.data_ptr(), memory);
      EXPECT_TRUE(grad({y.sum()}, {checkpointed->weight})[0].defined());
    }
    // The second runs have grown their own buffer.
    EXPECT_GT(checkpointed->grows, plain->grows);
  }
}

TEST(ActivationCheckpoint, SparseBuffer_IsCompared) {
  torch::nn::Sequential net(torch::nn::Linear(3, 3));
  net->register_buffer("graph", at::eye(3).to_sparse());
  const at::Tensor y = activation_checkpoint(net, at::ones({1, 3}));
  y.sum().backward();
  EXPECT_TRUE(net->parameters()[0].grad().defined());
}

TEST(ActivationCheckpoint, ErrorAtTheEndOfTheFirstRun_IsThrown) {
  torch::nn::Sequential net(torch::nn::Linear(3, 3));
  // Values of this type cannot be compared.
  net->register_buffer("bits", at::zeros({3}, at::kByte).view(at::kBits8));
  EXPECT_NE(ErrorOf([&] { activation_checkpoint(net, at::ones({1, 3})); }), "no error");
  // The failed call leaves nothing behind.
  Block block;
  activation_checkpoint(block, at::ones({1, 8})).sum().backward();
  EXPECT_EQ(block->runs, 2);
}

TEST(ActivationCheckpoint, BackwardThroughAFunctionThatHasThrown_Throws) {
  at::Tensor kept;
  const at::Tensor x = at::ones({4}).requires_grad_();
  const auto function = [&](const at::Tensor& in) {
    kept = in.exp().sin();
    TORCH_CHECK(false, "out of luck");
    return kept;
  };
  const std::string error = ErrorOf([&] { activation_checkpoint(function, x); });
  EXPECT_NE(error.find("out of luck"), std::string::npos) << error;
  const std::string later = ErrorOf([&] { kept.sum().backward(); });
  EXPECT_NE(later.find("the function has thrown an exception"), std::string::npos) << later;
}

TEST(ActivationCheckpoint, FunctionWithoutAResult_Runs) {
  at::Tensor out;
  const at::Tensor x = at::ones({4}).requires_grad_();
  activation_checkpoint([&out](const at::Tensor& in) { out = in.exp().sin(); }, x);
  out.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(ActivationCheckpoint, BuffersOfAModuleInsideOfAFunction_AreRefused) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 4));
  const at::Tensor y = activation_checkpoint([&](const at::Tensor& in) { return net->forward(in); },
                                             at::randn({6, 4}));
  const std::string error = ErrorOf([&] { y.sum().backward(); });
  EXPECT_NE(error.find("give the module itself"), std::string::npos) << error;
}

TEST(ActivationCheckpoint, ParameterOrInputChangedInBetween_Throws) {
  Block block;
  const at::Tensor x = at::ones({1, 8});
  at::Tensor y = activation_checkpoint(block, x);
  {
    at::NoGradGuard no_grad;
    block->out->weight.add_(1);
  }
  std::string error = ErrorOf([&] { y.sum().backward(); });
  EXPECT_NE(error.find("of the module, of shape [8, 32], was changed"), std::string::npos) << error;
  y = activation_checkpoint(block, x);
  x.add_(1);
  error = ErrorOf([&] { y.sum().backward(); });
  EXPECT_NE(error.find("tensor 0 of the inputs, of shape [1, 8]"), std::string::npos) << error;
}

TEST(ActivationCheckpoint, FunctionThatDoesSomethingElse_Throws) {
  int run = 0;
  const at::Tensor x = at::ones({4}).requires_grad_();
  const auto fails = [&](auto function) {
    run = 0;
    const at::Tensor y = activation_checkpoint(function, x);
    return ErrorOf([&] { y.sum().backward(); });
  };
  const std::string other_shape =
      fails([&](const at::Tensor& in) { return in.narrow(0, 0, ++run).exp().sin(); });
  EXPECT_NE(other_shape.find("tensor 0 was Float [1] on cpu in the first run and is Float [2]"),
            std::string::npos)
      << other_shape;
  const std::string fewer =
      fails([&](const at::Tensor& in) { return ++run == 1 ? in.exp().sin().exp() : in.exp(); });
  EXPECT_NE(fewer.find("the second only"), std::string::npos) << fewer;
  const std::string thrown = fails([&](const at::Tensor& in) {
    TORCH_CHECK(++run == 1, "out of luck");
    return in.exp();
  });
  EXPECT_NE(thrown.find("out of luck"), std::string::npos) << thrown;
}

TEST(ActivationCheckpoint, BackwardPassInsideOfTheFunction_IsRefused) {
  const at::Tensor x = at::ones({4}).requires_grad_();
  const std::string error = ErrorOf([&] {
    activation_checkpoint([](const at::Tensor& in) { return grad({in.exp().sum()}, {in})[0]; }, x);
  });
  EXPECT_NE(error.find("take this part out of the function"), std::string::npos) << error;
}

TEST(ActivationCheckpoint, FunctionThatThrows_LeavesLaterCallsAlone) {
  const at::Tensor x = at::ones({4}).requires_grad_();
  EXPECT_NE(ErrorOf([&] {
              activation_checkpoint(
                  [](const at::Tensor& in) -> at::Tensor {
                    const at::Tensor y = in.exp().sin();
                    TORCH_CHECK(false, "out of luck");
                    return y;
                  },
                  x);
            }).find("out of luck"),
            std::string::npos);
  const at::Tensor y = x.exp().sin();
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(ActivationCheckpoint, GraphThatIsDropped_FreesFunctionAndInputs) {
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = token;
  {
    const at::Tensor x = at::ones({4}).requires_grad_();
    const at::Tensor y = activation_checkpoint(
        [token = std::move(token)](const at::Tensor& in) { return in.exp().sin(); }, x);
    EXPECT_FALSE(alive.expired());
    y.sum().backward();
    EXPECT_TRUE(alive.expired()) << "the backward pass is over";
  }
}

// A module that reads a buffer and then writes it.
struct DecayingImpl : torch::nn::Module {
  DecayingImpl()
      : scale(register_buffer("scale", at::ones({3}))),
        count(register_buffer("count", at::zeros({}, at::kLong))),
        mask(register_buffer("mask", at::ones({3}).expand({4, 3}))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = (x * scale.clone()).exp() * mask;
    const at::NoGradGuard no_grad;
    scale.mul_(0.5);
    count.add_(1);
    return y;
  }
  at::Tensor scale, count, mask;
};
TORCH_MODULE(Decaying);

TEST(ActivationCheckpoint, BuffersOfTheModule_AreThoseOfTheFirstRun) {
  Decaying plain, checkpointed;
  const at::Tensor x = at::full({3}, 0.5).requires_grad_();
  // Two forward passes before the backward pass.
  const at::Tensor want = grad({(plain(x) + plain(x)).sum()}, {x})[0];
  const at::Tensor got = grad(
      {(activation_checkpoint(checkpointed, x) + activation_checkpoint(checkpointed, x)).sum()},
      {x})[0];
  EXPECT_TRUE(got.equal(want));
  EXPECT_TRUE(checkpointed->scale.equal(plain->scale));
  EXPECT_EQ(checkpointed->count.item<int>(), 2);
}

TEST(ActivationCheckpoint, BufferThatOthersUse_IsNotTouched) {
  Block block;
  block->register_buffer("rope", at::arange(8, at::kFloat));
  const at::Tensor rope = block->named_buffers()["rope"];
  const at::Tensor x = at::ones({2, 8}).requires_grad_();
  const at::Tensor plain = x * rope;  // autograd saves it
  const at::Tensor y = activation_checkpoint(block, plain) * rope;
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

// Its values cannot be read by the host, like those of a GPU, which must not be read in the middle
// of a forward pass.
struct OnMetaImpl : torch::nn::Module {
  OnMetaImpl() {
    const at::TensorOptions meta = at::TensorOptions().device(at::kMeta);
    weight = register_parameter("weight", at::ones({3}, meta));
    count = register_buffer("count", at::zeros({}, meta.dtype(at::kLong)));
    statistics = register_buffer("statistics", at::zeros({3}, meta));
    row = register_buffer("row", at::zeros({1}, meta).expand({3}));
    table = register_buffer("table", at::zeros({300, 300}, meta));
  }
  at::Tensor forward(const at::Tensor& x) {
    count.add_(1);
    return (x * weight).sin();
  }
  at::Tensor weight, count, statistics, row, table;
};
TORCH_MODULE(OnMeta);

TEST(ActivationCheckpoint, BuffersOfAnotherDevice_AreNotReadByTheHost) {
  OnMeta net;
  const at::Tensor x = at::ones({2, 3}, at::TensorOptions().device(at::kMeta)).requires_grad_(true);
  const at::Tensor y = activation_checkpoint(net, activation_checkpoint(net, x));
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(net->weight.grad().defined());
}

TEST(ActivationCheckpoint, FrozenParameterOrBiasThatChanged_Throws) {
  for (const bool frozen : {true, false}) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Tanh());
    if (frozen) net->parameters()[0].set_requires_grad(false);
    const at::Tensor y = activation_checkpoint(net, at::ones({1, 4}).requires_grad_());
    {
      const at::NoGradGuard no_grad;
      net->parameters()[frozen ? 0 : 1].add_(1);
    }
    const std::string error = ErrorOf([&] { y.sum().backward(); });
    EXPECT_NE(error.find("a parameter of the module, of shape"), std::string::npos) << error;
  }
  // In a lambda it is noticed if autograd saves it.
  const at::Tensor weight = at::ones({4});
  const at::Tensor x = at::ones({4}).requires_grad_();
  const at::Tensor y =
      activation_checkpoint([weight](const at::Tensor& in) { return (in * weight).exp(); }, x);
  weight.add_(1);
  const std::string error = ErrorOf([&] { y.sum().backward(); });
  EXPECT_NE(error.find("was changed in place: a parameter"), std::string::npos) << error;
}

TEST(ActivationCheckpoint, SavedTensorThatTheFunctionWrites_ThrowsAsAPlainCall) {
  const at::Tensor x = at::ones({4}).requires_grad_();
  const auto function = [](const at::Tensor& in) {
    at::Tensor h = (in * 2).sigmoid();
    h.mul_(2);
    return h.exp().sin();
  };
  EXPECT_NE(ErrorOf([&] { function(x).sum().backward(); }), "no error");
  const std::string error = ErrorOf([&] { activation_checkpoint(function, x).sum().backward(); });
  EXPECT_NE(error.find("an operator in it that writes to it"), std::string::npos) << error;
}

TEST(ActivationCheckpoint, InputThatTheFunctionWrites_ThrowsAndIsNotKept) {
  std::weak_ptr<int> alive;
  {
    auto token = std::make_shared<int>(1);
    alive = token;
    const at::Tensor x = at::ones({4}).requires_grad_() * 2;
    const at::Tensor y = activation_checkpoint(
        [token = std::move(token)](at::Tensor in) { return in.sigmoid_().exp(); }, x);
    const std::string error = ErrorOf([&] { y.sum().backward(); });
    EXPECT_NE(error.find("changes tensor 0 of the inputs"), std::string::npos) << error;
  }
  EXPECT_TRUE(alive.expired());
}

TEST(ActivationCheckpoint, RandomState_OfAFunctionWithoutRandomNumbersIsLeftAlone) {
  const at::Tensor x = at::ones({4}).requires_grad_();
  at::Tensor drawn;
  const at::Tensor y = activation_checkpoint(
      [&drawn, runs = std::make_shared<int>(0)](const at::Tensor& in) {
        const at::Tensor z = in.exp();
        // Another thread would do this.
        if (++*runs == 2) drawn = at::rand({3});
        return z.sin().exp();
      },
      x);
  y.sum().backward();
  EXPECT_FALSE(at::rand({3}).equal(drawn)) << "numbers that were drawn meanwhile come again";
}

TEST(ActivationCheckpoint, TensorsInMembersAndNan_AreNoMistakes) {
  struct LoggingImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
      logged.clear();
      const at::Tensor p = x.exp();
      logged.push_back((p * p.log()).sum());  // not in the loss
      return at::where(target.isnan(), p, p - target).sin().exp();
    }
    std::vector<at::Tensor> logged;
  };
  const auto net = std::make_shared<LoggingImpl>();
  const at::Tensor target = at::full({4}, std::numeric_limits<float>::quiet_NaN());
  const at::Tensor x = at::ones({4}).requires_grad_();
  activation_checkpoint(net, x, target).sum().backward();
  activation_checkpoint([&](const at::Tensor& in) { return (in * target).exp(); }, x)
      .sum()
      .backward();
  EXPECT_TRUE(x.grad().defined());
  net->logged.clear();
}

// --- muster::call() and policies ---

std::vector<ActivationPolicy::Block> Named(const std::vector<Block>& blocks) {
  std::vector<ActivationPolicy::Block> named;
  for (const Block& block : blocks) {
    named.push_back({"blocks." + std::to_string(named.size()), block.ptr()});
  }
  return named;
}

TEST(Call, WithoutAPolicy_IsAPlainCall) {
  Block block;
  call(block, at::ones({1, 8})).sum().backward();
  call(block.ptr(), at::ones({1, 8})).sum().backward();
  call(block.get(), at::ones({1, 8})).sum().backward();
  torch::nn::AnyModule any(block);
  call(any, at::ones({1, 8})).sum().backward();
  EXPECT_EQ(block->runs, 4);
}

TEST(Call, ModulesThatAPolicySelects_AreCheckpointedAsLongAsItLives) {
  Block selected, other;
  {
    const ActivationPolicy policy(Named({selected}), nullptr);
    torch::nn::AnyModule any(selected);
    at::Tensor x = call(selected, at::ones({1, 8}));
    x = call(any, call(selected.ptr(), call(selected.get(), x)));
    call(other, x).sum().backward();
    EXPECT_EQ(selected->runs, 8);
    EXPECT_EQ(other->runs, 1);
  }
  call(selected, at::ones({1, 8})).sum().backward();
  EXPECT_EQ(selected->runs, 9);
}

TEST(Call, TwoPoliciesForOneModule_LastAsLongAsOneOfThem) {
  Block block;
  auto first = std::make_unique<ActivationPolicy>(Named({block}), nullptr);
  const ActivationPolicy second(Named({block}), nullptr);
  first.reset();
  call(block, at::ones({1, 8})).sum().backward();
  EXPECT_EQ(block->runs, 2);
}

// Whether a backward pass from `root` gave a parameter its first gradient.
ActivationPolicy::HasGradient Gradients() {
  return [](const at::Tensor& parameter) { return parameter.grad().defined(); };
}

// Returns the policy's error for a backward pass from `root`.
std::string ErrorOfBackward(ActivationPolicy& policy, const at::Tensor& root) {
  policy.BeginBackward();
  root.backward();
  return ErrorOf([&] { policy.EndBackward(Gradients()); });
}

TEST(ActivationPolicy, BlockThatIsCalledByItself_IsNamed) {
  Block first, second;
  ActivationPolicy policy(Named({first, second}), nullptr);
  // A block that a step leaves out has kept nothing.
  EXPECT_EQ(ErrorOfBackward(policy, call(first, at::ones({1, 8})).sum()), "no error");
  const std::string error = ErrorOfBackward(policy, second(call(first, at::ones({1, 8}))).sum());
  EXPECT_NE(error.find("'blocks.1'"), std::string::npos) << error;
  EXPECT_NE(error.find("1 block(s)"), std::string::npos) << error;
  EXPECT_NE(error.find("muster::call(block, inputs...)"), std::string::npos) << error;
  EXPECT_EQ(ErrorOfBackward(policy, call(second, at::ones({1, 8})).sum()), "no error");
}

TEST(ActivationPolicy, BlockThatIsCalledByItselfLater_IsNamedInAWarningOnce) {
  Block first, second;
  ActivationPolicy policy(Named({first, second}), nullptr);
  const auto said = [&](const at::Tensor& root) {
    first->zero_grad();
    second->zero_grad();
    testing::internal::CaptureStderr();
    EXPECT_EQ(ErrorOfBackward(policy, root), "no error");
    return testing::internal::GetCapturedStderr();
  };
  const at::Tensor x = at::ones({1, 8});
  EXPECT_EQ(said(call(second, call(first, x)).sum()), "");
  // Two graphs that exist at the same time.
  const at::Tensor one = call(first, x).sum(), other = call(first, x).sum();
  EXPECT_EQ(said(one), "");
  EXPECT_EQ(said(other), "");
  const std::string warning = said(second(call(first, x)).sum());
  EXPECT_NE(warning.find("'blocks.1'"), std::string::npos) << warning;
  EXPECT_EQ(warning.find("'blocks.0'"), std::string::npos) << warning;
  EXPECT_EQ(said(second(call(first, x)).sum()), "");
}

TEST(ActivationPolicy, FrozenBlocks_AreNoMistake) {
  Block frozen, trained;
  for (const at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  ActivationPolicy policy(Named({frozen, trained}), nullptr);
  testing::internal::CaptureStderr();
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(ErrorOfBackward(policy, call(trained, frozen(at::ones({1, 8}))).sum()), "no error");
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(ActivationPolicy, BlocksInsideOfBlocks_CountAsThose) {
  struct OuterImpl : torch::nn::Module {
    OuterImpl() : inner(register_module("inner", Block())) {}
    at::Tensor forward(const at::Tensor& x) { return inner(x); }
    Block inner;
  };
  const auto outer = std::make_shared<OuterImpl>();
  ActivationPolicy policy({{"outer.inner", outer->inner.ptr()}, {"outer", outer}}, nullptr);
  EXPECT_EQ(ErrorOfBackward(policy, call(outer, at::ones({1, 8})).sum()), "no error");
}

TEST(ActivationPolicy, TiedWeights_AreNoSign) {
  Block first, second;
  second->in->weight = first->in->weight;
  second->unregister_module("in");
  second->in = first->in;
  second->register_module("in", first->in);
  ActivationPolicy policy(Named({first, second}), nullptr);
  EXPECT_EQ(ErrorOfBackward(policy, call(first, at::ones({1, 8})).sum()), "no error");
}

TEST(ActivationPolicy, ASecondOneForTheSameBlocks_MakesNoStore) {
  Block block, another;
  int made = 0;
  const ActivationPolicy::MakeStore make = [&] {
    ++made;
    return std::make_shared<ActivationStore>(nullptr);
  };
  const ActivationPolicy first(Named({block}), make);
  const ActivationPolicy second(Named({block}), make);
  EXPECT_EQ(made, 1);
  const ActivationPolicy third(Named({block, another}), make);
  EXPECT_EQ(made, 2);
}

// --- Offloaded inputs ---

std::shared_ptr<ActivationStore> StoreIn(const TestFolder& folder,
                                         const DirectFileSystem* system = nullptr) {
  absl::StatusOr<std::shared_ptr<ScratchFile>> file = ScratchFile::Create(folder.path(), system);
  EXPECT_TRUE(file.ok()) << file.status();
  return std::make_shared<ActivationStore>(std::make_unique<DiskParts>(*file));
}

// Returns the gradients of four blocks, one after the other, with inputs that the store takes.
// `kept`: how many inputs of blocks are in memory before the backward pass.
std::vector<at::Tensor> TrainOffloaded(const std::shared_ptr<ActivationStore>& store,
                                       int* kept = nullptr) {
  at::manual_seed(11);
  std::vector<Block> blocks(4);
  const ActivationPolicy policy(Named(blocks), [&store] { return store; });
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> inputs;
  torch::nn::Linear first(8, 8);
  at::Tensor x = first(at::randn({512, 8}));
  for (Block& block : blocks) {
    inputs.emplace_back(x.getIntrusivePtr());
    // An operator that writes, so that versions are not those of new tensors.
    x = call(block, x);
    x.mul_(1.5);
  }
  const at::Tensor loss = x.sum();
  x = at::Tensor();
  if (store != nullptr) store->WaitUntilIdle();
  if (kept != nullptr) {
    *kept = 0;
    for (const auto& input : inputs) *kept += input.expired() ? 0 : 1;
  }
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const Block& block : blocks) {
    EXPECT_EQ(block->runs, 2);
    for (const at::Tensor& parameter : block->parameters()) gradients.push_back(parameter.grad());
  }
  for (const at::Tensor& parameter : first->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

TEST(ActivationOffload, OnADisk_HasTheSameBitsAndHoldsNoInput) {
  int kept = -1;
  const std::vector<at::Tensor> want = TrainOffloaded(nullptr, &kept);
  EXPECT_EQ(kept, 4);
  const TestFolder folder;
  const std::vector<at::Tensor> got = TrainOffloaded(StoreIn(folder), &kept);
  EXPECT_EQ(kept, 0);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(want[i])) << i;
}

TEST(ActivationOffload, RetainedGraphAndStructures_GoThrough) {
  const TestFolder folder;
  struct Pair {
    at::Tensor a, b;
  };
  struct NetImpl : torch::nn::Module {
    NetImpl() : scale(register_parameter("scale", at::ones({2000}))) {}
    at::Tensor forward(const Pair& in, double factor) {
      return in.a.exp().sin() * scale * factor + in.b.cos();
    }
    at::Tensor scale;
  };
  const auto net = std::make_shared<NetImpl>();
  const at::Tensor x = at::randn({2000}).requires_grad_();
  const Pair in{x * 2, x * 3};
  const at::Tensor want = grad({net->forward(in, 0.5).sum()}, {x}, {}, /*retain_graph=*/true)[0];
  const ActivationPolicy policy({{"net", net}}, [&] { return StoreIn(folder); });
  const at::Tensor y = call(net, in, 0.5).sum();
  for (int pass = 0; pass < 2; ++pass) {
    EXPECT_TRUE(grad({y}, {x}, {}, /*retain_graph=*/true)[0].equal(want)) << pass;
  }
}

TEST(ActivationOffload, InputThatIsChangedInPlaceLater_HasTheValuesBefore) {
  const TestFolder folder;
  Block block;
  block->eval();
  const ActivationPolicy policy(Named({block}), [&] { return StoreIn(folder); });
  const at::Tensor leaf = at::randn({512, 8}).requires_grad_();
  const at::Tensor want = grad({block(leaf * 2).sum()}, {leaf})[0];
  at::Tensor x = leaf * 2;
  const at::Tensor y = call(block, x);
  x.mul_(3);
  EXPECT_TRUE(grad({y.sum()}, {leaf})[0].equal(want));
}

TEST(ActivationOffload, DiskThatFails_ThrowsInTheBackwardPass) {
  const TestFolder folder;
  DirectFileSystem system;
  system.pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  const std::shared_ptr<ActivationStore> store = StoreIn(folder, &system);
  const std::string error = ErrorOf([&] { TrainOffloaded(store); });
  EXPECT_NE(error.find("could not be written"), std::string::npos) << error;
  EXPECT_NE(error.find(folder.path()), std::string::npos) << error;
}

}  // namespace
}  // namespace muster
