// Ordinary programs under sharding: each ends with the same weights as under data parallelism, or
// is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "c10/core/InferenceMode.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/test_model.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/modules/rnn.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"
#include "torch/utils.h"

namespace muster {
namespace {

using testing::Each;
using testing::HasSubstr;

using Weights = std::map<std::string, at::Tensor>;

void Fill(torch::nn::Module& net) {
  at::NoGradGuard no_grad;
  uint64_t seed = 40;
  for (auto& item : net.named_parameters()) {
    item.value().copy_(Random(item.value().sizes(), ++seed).div_(4));
  }
}

torch::nn::Sequential Layers() {
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8),
                            torch::nn::Tanh(), torch::nn::Linear(8, 3));
  Fill(*net);
  return net;
}

at::Tensor X(Accelerator& a, int step, at::IntArrayRef sizes = {4, 6}) {
  return Random(sizes, 1000 + 10 * step + a.process_index());
}

using Program = std::function<Weights(Accelerator&)>;

// Returns the weights on process 0 of two.
Weights RunProgram(const std::string& strategy, const Program& program,
                   AcceleratorOptions options = {}) {
  options.sharding = ParseSharding(strategy, 2);
  Weights result;
  RunAccelerators(2, options, [&](Accelerator& a) {
    Weights weights = program(a);
    if (!a.is_main_process()) return;
    for (auto& [name, tensor] : weights) result[name] = tensor.clone();
  });
  return result;
}

void ExpectAsUnderDataParallelism(const Program& program, const AcceleratorOptions& options = {},
                                  double tolerance = 1e-6) {
  const Weights want = RunProgram("no_shard", program, options);
  ASSERT_FALSE(want.empty());
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    const Weights got = RunProgram(strategy, program, options);
    ASSERT_EQ(got.size(), want.size()) << strategy;
    for (const auto& [name, tensor] : want) {
      if (!tensor.is_floating_point() || tensor.numel() == 0) {
        EXPECT_TRUE(at::equal(got.at(name), tensor)) << strategy << " " << name;
        continue;
      }
      const double off = (got.at(name) - tensor).abs().max().item<double>();
      EXPECT_LE(off, tolerance * (1 + tensor.abs().max().item<double>()))
          << strategy << " " << name;
    }
  }
}

template <class Model, class Optimizer, class Loss>
void Steps(Accelerator& a, Model& model, Optimizer& optimizer, int steps, const Loss& loss) {
  for (int step = 0; step < steps; ++step) {
    auto scope = a.accumulate();
    a.backward(loss(model, step));
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(ShardingPrograms, RecurrentNetworkWithFlatWeights) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      words = register_module(
          "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 6).padding_idx(0)));
      lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2)));
      head = register_module("head", torch::nn::Linear(5, 9));
      Fill(*this);
    }
    at::Tensor forward(const at::Tensor& ids) { return head(std::get<0>(lstm(words(ids)))); }
    torch::nn::Embedding words{nullptr};
    torch::nn::LSTM lstm{nullptr};
    torch::nn::Linear head{nullptr};
  };
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    auto net = std::make_shared<NetImpl>();
    FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    Steps(a, model, optimizer, 3, [&](auto& m, int step) {
      const at::Tensor ids = X(a, step, {7, 2}).abs().mul(4).to(at::kLong).clamp(0, 8);
      return at::cross_entropy_loss(m(ids).flatten(0, 1), ids.flatten());
    });
    return a.get_state_dict(model);
  });
}

TEST(ShardingPrograms, ConvolutionsInChannelsLastWithBatchNormAndBuffers) {
  ExpectAsUnderDataParallelism(
      [](Accelerator& a) {
        torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)),
                                  torch::nn::BatchNorm2d(4), torch::nn::ReLU(),
                                  torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 2, 3)));
        Fill(*net);
        for (at::Tensor& parameter : net->parameters()) {
          if (parameter.dim() == 4) {
            parameter.set_data(parameter.contiguous(at::MemoryFormat::ChannelsLast));
          }
        }
        FusedSGD sgd(net->parameters(), {.lr = 0.1});
        auto [model, optimizer] = a.prepare(net, sgd);
        Steps(a, model, optimizer, 3, [&](auto& m, int step) {
          return m(X(a, step, {2, 3, 8, 8})).square().mean();
        });
        return a.get_state_dict(model);
      },
      {}, 1e-5);
}

TEST(ShardingPrograms, AttentionDropoutAndParametersOfOtherDtypes) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      attention = register_module("attention", torch::nn::MultiheadAttention(8, 2));
      layers = register_module("layers", torch::nn::ModuleList(torch::nn::Linear(8, 8)));
      dropout = register_module("dropout", torch::nn::Dropout(0.5));
      scale = register_parameter("scale", at::ones({}));
      none = register_parameter("none", at::ones({0, 3}));
      precise = register_parameter("precise", at::ones({8}, at::kDouble));
      Fill(*this);
    }
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor y = std::get<0>(attention(x, x, x)) * scale;
      y = dropout(layers[0]->as<torch::nn::Linear>()->forward(y));
      return (y.to(at::kDouble) * precise).to(at::kFloat) + none.sum();
    }
    torch::nn::MultiheadAttention attention{nullptr};
    torch::nn::ModuleList layers{nullptr};
    torch::nn::Dropout dropout{nullptr};
    at::Tensor scale, none, precise;
  };
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    auto net = std::make_shared<NetImpl>();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    // Without dropout, because the ranks are threads and share its generator.
    net->eval();
    Steps(a, model, optimizer, 3, [&](auto& m, int step) {
      return m(X(a, step, {5, 2, 8})).square().mean();
    });
    return a.get_state_dict(model);
  });
}

// Equal to the bit, under each strategy: the second run computes the same as the first. Without
// dropout, because the ranks of this test are threads and share a random generator.
TEST(ShardingPrograms, ActivationCheckpointing) {
  struct NetImpl : torch::nn::Module {
    explicit NetImpl(bool checkpointed) : checkpointed(checkpointed) {
      first = register_module("first", torch::nn::Linear(6, 8));
      blocks = register_module("blocks", torch::nn::ModuleList());
      for (int i = 0; i < 3; ++i) {
        blocks->push_back(torch::nn::Sequential(torch::nn::Linear(8, 16),
                                                torch::nn::BatchNorm1d(16), torch::nn::GELU(),
                                                torch::nn::Linear(16, 8)));
      }
      Fill(*this);
    }
    at::Tensor forward(const at::Tensor& in) {
      at::Tensor x = first(in);
      for (const auto& each : *blocks) {
        auto* const block = each->as<torch::nn::SequentialImpl>();
        x = x + (checkpointed ? activation_checkpoint(block, x) : block->forward(x));
      }
      return x;
    }
    const bool checkpointed;
    torch::nn::Linear first{nullptr};
    torch::nn::ModuleList blocks{nullptr};
  };
  for (const char* precision : {"no", "bf16"}) {
    AcceleratorOptions options;
    options.mixed_precision = precision;
    for (const char* strategy : {"no_shard", "zero2", "zero3", "hybrid"}) {
      Weights results[2];
      for (const bool checkpointed : {false, true}) {
        results[checkpointed] = RunProgram(
            strategy,
            [&](Accelerator& a) {
              auto net = std::make_shared<NetImpl>(checkpointed);
              FusedAdamW adam(net->parameters(), {.lr = 0.01});
              auto [model, optimizer] = a.prepare(net, adam);
              Steps(a, model, optimizer, 3,
                    [&](auto& m, int step) { return m(X(a, step)).square().mean(); });
              return a.get_state_dict(model);
            },
            options);
      }
      ASSERT_FALSE(results[0].empty());
      for (const auto& [name, tensor] : results[0]) {
        EXPECT_TRUE(at::equal(results[1].at(name), tensor))
            << strategy << " " << precision << " " << name << " differs by "
            << (results[1].at(name) - tensor).abs().max().item<double>();
      }
    }
  }
}

TEST(ShardingPrograms, MoreProcessesThanElements) {
  std::vector<at::Tensor> results;
  for (const char* strategy : {"no_shard", "zero3"}) {
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 4);
    RunAccelerators(4, options, [&](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      FusedAdamW adam(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, adam);
      Steps(a, model, optimizer, 3, [&](auto& m, int step) {
        return Loss(m(at::full({1, 1}, 1.0 + a.process_index() + step)));
      });
      const absl::Status saved = a.save_state(TestDir(std::string("tiny_") + strategy));
      EXPECT_TRUE(saved.ok()) << saved;
      const Weights weights = a.get_state_dict(model);
      if (a.is_main_process()) results.push_back(weights.at("weight").clone());
    });
  }
  EXPECT_TRUE(at::allclose(results[0], results[1], 1e-6)) << results[0] << results[1];
}

TEST(ShardingPrograms, AdversarialTrainingWithTwoModelsAndTwoOptimizers) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential generator(torch::nn::Linear(3, 5), torch::nn::Tanh(),
                                    torch::nn::Linear(5, 6));
    torch::nn::Sequential judge = Layers();
    Fill(*generator);
    FusedSGD generator_sgd(generator->parameters(), {.lr = 0.1});
    FusedSGD judge_sgd(judge->parameters(), {.lr = 0.1});
    auto [g, g_step] = a.prepare(generator, generator_sgd);
    auto [j, j_step] = a.prepare(judge, judge_sgd);
    for (int step = 0; step < 3; ++step) {
      // The graph of `fake` is older than the judge's step, and not affected by it.
      const at::Tensor fake = g(X(a, step, {4, 3}));
      a.backward((j(fake.detach()).mean() - j(X(a, step)).mean()).square());
      j_step.step();
      j_step.zero_grad();
      a.backward(j(fake).square().mean());
      g_step.step();
      g_step.zero_grad();
      j_step.zero_grad();
    }
    Weights all = a.get_state_dict(g);
    for (auto& [name, tensor] : a.get_state_dict(j)) all["judge." + name] = tensor;
    return all;
  });
}

TEST(ShardingPrograms, BackwardTwiceThroughOneGraph) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int step = 0; step < 3; ++step) {
      auto scope = a.accumulate();
      const at::Tensor out = model(X(a, step));
      a.backward(out.mean(), {.retain_graph = true});
      a.backward(out.square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    return a.get_state_dict(model);
  });
}

// Recomputes its forward pass in backward, in a nested backward pass.
struct Again : torch::autograd::Function<Again> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            torch::nn::Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.get());
    return at::tanh(layer(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    at::AutoGradMode grad_mode(true);
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    auto* const layer =
        reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    at::tanh(layer->forward(x)).backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(ShardingPrograms, BackwardInsideOfBackward) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    AcceleratedOptimizer optimizer;
    auto [model, prepared] = a.prepare(net, sgd);
    optimizer = prepared;
    for (int step = 0; step < 3; ++step) {
      auto scope = a.accumulate();
      const at::Tensor out = model.call([&](torch::nn::SequentialImpl& layers) {
        at::Tensor x = X(a, step).requires_grad_();
        x = at::tanh(layers[0]->as<torch::nn::Linear>()->forward(x));
        x = a.core().process().sharding().strategy == ShardingStrategy::kNone
                ? at::tanh(layers[2]->as<torch::nn::Linear>()->forward(x))
                : Again::apply(
                      x, torch::nn::Linear(
                             std::dynamic_pointer_cast<torch::nn::LinearImpl>(layers.ptr(2))));
        return layers[4]->as<torch::nn::Linear>()->forward(x);
      });
      a.backward(out.square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    return a.get_state_dict(model);
  });
}

TEST(ShardingPrograms, FrozenAndUnfrozenAfterPrepare_TrainsOrIsRefused) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    const auto loss = [&](auto& m, int step) { return m(X(a, step)).square().mean(); };
    Steps(a, model, optimizer, 2, loss);
    for (at::Tensor& parameter : net[0]->parameters()) parameter.set_requires_grad(false);
    Steps(a, model, optimizer, 2, loss);
    for (at::Tensor& parameter : net[0]->parameters()) parameter.set_requires_grad(true);
    Steps(a, model, optimizer, 2, loss);
    return a.get_state_dict(model);
  });
  // Frozen before prepare() and trained later: no hook exists for it.
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 2);
    const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
      torch::nn::Sequential net = Layers();
      for (at::Tensor& parameter : net[0]->parameters()) parameter.set_requires_grad(false);
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      for (at::Tensor& parameter : net[0]->parameters()) parameter.set_requires_grad(true);
      Steps(a, model, optimizer, 1,
            [&](auto& m, int step) { return m(X(a, step)).square().mean(); });
    });
    EXPECT_THAT(errors, Each(HasSubstr("'0.weight' of a sharded model was frozen"))) << strategy;
  }
}

TEST(ShardingPrograms, ParameterFrozenWithinAWindow_IsNamedByTheStep) {
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = 2;
    options.sharding = ParseSharding(strategy, 2);
    const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
      torch::nn::Sequential net = Layers();
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      for (int step = 0; step < 2; ++step) {
        auto scope = a.accumulate();
        if (step == 1) net->parameters()[0].set_requires_grad(false);
        a.backward(model(X(a, step)).pow(2).mean());
        optimizer.step();
      }
    });
    EXPECT_THAT(errors, Each(HasSubstr("the gradient of parameter '0.weight' holds something")))
        << strategy;
  }
}

TEST(ShardingPrograms, ErrorInTheLoop_TrainingGoesOn) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    const auto loss = [&](auto& m, int step) { return m(X(a, step)).square().mean(); };
    Steps(a, model, optimizer, 1, loss);
    // A batch of a wrong shape, on all ranks.
    EXPECT_THROW(model(X(a, 1, {4, 5})), c10::Error);
    // A loss that is never used.
    const at::Tensor unused = loss(model, 5);
    Steps(a, model, optimizer, 2, loss);
    return a.get_state_dict(model);
  });
}

TEST(ShardingPrograms, EvaluationBetweenSteps) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    const auto loss = [&](auto& m, int step) { return m(X(a, step)).square().mean(); };
    for (int round = 0; round < 3; ++round) {
      Steps(a, model, optimizer, 1, loss);
      {
        at::NoGradGuard no_grad;
        const at::Tensor first = model(X(a, 7));
        EXPECT_TRUE(at::equal(model(X(a, 7)), first));
      }
      c10::InferenceMode inference;
      EXPECT_TRUE(std::isfinite(loss(model, 8).template item<double>()));
    }
    return a.get_state_dict(model);
  });
}

TEST(ShardingPrograms, GradientPenalty) {
  ExpectAsUnderDataParallelism(
      [](Accelerator& a) {
        torch::nn::Sequential net = Layers();
        FusedSGD sgd(net->parameters(), {.lr = 0.1});
        auto [model, optimizer] = a.prepare(net, sgd);
        Steps(a, model, optimizer, 3, [&](auto& m, int step) {
          at::Tensor x = X(a, step).requires_grad_();
          const at::Tensor out = m(x);
          const at::Tensor slope =
              torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true,
                                    /*create_graph=*/true)[0];
          return out.square().mean() + slope.square().mean();
        });
        return a.get_state_dict(model);
      },
      {}, 1e-5);
}

TEST(ShardingPrograms, ClippingOfEveryNorm) {
  for (const double norm_type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    ExpectAsUnderDataParallelism([norm_type](Accelerator& a) {
      torch::nn::Sequential net = Layers();
      FusedSGD sgd(net->parameters(), {.lr = 0.5});
      auto [model, optimizer] = a.prepare(net, sgd);
      for (int step = 0; step < 3; ++step) {
        auto scope = a.accumulate();
        a.backward(model(X(a, step)).square().mean());
        a.clip_grad_norm_(net->parameters(), 0.05, norm_type);
        // Only some of the parameters, however they are named.
        a.clip_grad_norm_(net[4]->parameters(), 0.01, norm_type);
        a.clip_grad_value_(model.parameters(), 0.02);
        optimizer.step();
        optimizer.zero_grad();
      }
      return a.get_state_dict(model);
    });
  }
}

template <class MakeOptimizer>
void ContinuesAcrossStrategies(const std::string& name, const MakeOptimizer& make) {
  const auto train = [&](Accelerator& a, const std::string& load, const std::string& save,
                         int from) {
    torch::nn::Sequential net = Layers();
    auto inner = make(net->parameters());
    auto [model, optimizer] = a.prepare(net, inner);
    if (!load.empty()) {
      const absl::Status loaded = a.load_state(load);
      EXPECT_TRUE(loaded.ok()) << loaded;
    }
    for (int step = from; step < from + 3; ++step) {
      auto scope = a.accumulate();
      a.backward(model(X(a, step)).square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    if (!save.empty()) {
      const absl::Status saved = a.save_state(save);
      EXPECT_TRUE(saved.ok()) << saved;
    }
    a.wait_for_everyone();
    return a.get_state_dict(model);
  };
  const std::string root = TestDir("across_" + name);
  RunProgram("no_shard", [&](Accelerator& a) { return train(a, "", root + "_whole", 0); });
  RunProgram("zero3", [&](Accelerator& a) { return train(a, "", root + "_zero3", 0); });
  const Weights want =
      RunProgram("no_shard", [&](Accelerator& a) { return train(a, root + "_whole", "", 3); });
  for (const auto& [strategy, from] : {std::pair<const char*, const char*>{"zero3", "_whole"},
                                       {"no_shard", "_zero3"},
                                       {"zero1", "_zero3"}}) {
    const Weights got =
        RunProgram(strategy, [&](Accelerator& a) { return train(a, root + from, "", 3); });
    for (const auto& [key, tensor] : want) {
      EXPECT_LE((got.at(key) - tensor).abs().max().template item<double>(), 1e-5)
          << name << " " << strategy << from << " " << key;
    }
  }
}

TEST(ShardingPrograms, OptimizersWithMoreState_ContinueAcrossStrategies) {
  ContinuesAcrossStrategies("amsgrad", [](std::vector<at::Tensor> parameters) {
    return torch::optim::Adam(parameters, torch::optim::AdamOptions(1e-3).amsgrad(true).eps(1e-3));
  });
  ContinuesAcrossStrategies("rmsprop", [](std::vector<at::Tensor> parameters) {
    return torch::optim::RMSprop(
        parameters, torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.9).eps(1e-2));
  });
  ContinuesAcrossStrategies("adagrad", [](std::vector<at::Tensor> parameters) {
    return FusedAdagrad(parameters, {.lr = 1e-3, .initial_accumulator_value = 0.1});
  });
}

// Groups by name, whichever way the optimizer is made, before prepare() or after it: the same as on
// one process.
TEST(ShardingPrograms, GroupsByName_SurviveEveryStrategy) {
  constexpr int kSteps = 5, kRows = 8;
  const auto layers = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                              torch::nn::Tanh(), torch::nn::Linear(8, 3));
    Fill(*net);
    return net;
  };
  const auto loss = [](const at::Tensor& out, int step, int part, int parts) {
    return at::mse_loss(out, Random({kRows, 3}, 300 + step).chunk(parts)[part]);
  };
  const AdamWOptions fused_options = {.lr = 0.02, .eps = 1e-3, .weight_decay = 0.5};
  const auto torch_options = torch::optim::AdamWOptions(0.02).eps(1e-3).weight_decay(0.5);
  const auto fused = [&](torch::nn::Sequential& net) {
    return FusedAdamW(DecayGroups(*net, fused_options, "3\\.weight"));
  };
  const auto torch_adamw = [&](torch::nn::Sequential& net) {
    return torch::optim::AdamW(DecayGroups(*net, torch_options, "3\\.weight"));
  };
  const auto one_process = [&](double decay_of_others) {
    torch::nn::Sequential net = layers();
    const std::vector<at::Tensor> all = net->parameters();
    // Only the first matrix.
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{all[0]},
                        std::make_unique<torch::optim::AdamWOptions>(torch_options));
    groups.emplace_back(
        std::vector<at::Tensor>(all.begin() + 1, all.end()),
        std::make_unique<torch::optim::AdamWOptions>(
            torch::optim::AdamWOptions(torch_options).weight_decay(decay_of_others)));
    torch::optim::AdamW adamw(groups);
    for (int step = 0; step < kSteps; ++step) {
      adamw.zero_grad();
      loss(net->forward(Random({kRows, 6}, 100 + step)), step, 0, 1).backward();
      adamw.step();
    }
    Weights weights;
    for (const auto& item : net->named_parameters()) weights[item.key()] = item.value().detach();
    return weights;
  };
  const Weights want = one_process(0);
  ASSERT_GT((one_process(0.5).at("1.weight") - want.at("1.weight")).abs().max().item<double>(),
            1e-2);
  const auto check = [&](const std::string& strategy, int ranks, bool after, const auto& make) {
    SCOPED_TRACE(testing::Message()
                 << strategy << " on " << ranks << ", after prepare() " << after);
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 2);
    RunAccelerators(ranks, options, [&](Accelerator& a) {
      torch::nn::Sequential net = layers();
      const auto train = [&](auto& model, auto& optimizer) {
        for (int step = 0; step < kSteps; ++step) {
          auto scope = a.accumulate();
          const at::Tensor x = Random({kRows, 6}, 100 + step).chunk(ranks)[a.process_index()];
          a.backward(loss(model(x), step, a.process_index(), ranks));
          optimizer.step();
          optimizer.zero_grad();
        }
        const auto weights = a.get_state_dict(model);
        if (!a.is_main_process()) return;
        for (const auto& [name, tensor] : weights) {
          EXPECT_LE((tensor - want.at(name)).abs().max().template item<double>(), 1e-5) << name;
        }
      };
      if (after) {
        auto model = a.prepare(net);
        auto inner = make(net);
        auto optimizer = a.prepare(inner);
        train(model, optimizer);
      } else {
        auto inner = make(net);
        auto [model, optimizer] = a.prepare(net, inner);
        train(model, optimizer);
      }
    });
  };
  for (const auto& [strategy, ranks] : {std::pair<const char*, int>{"no_shard", 1},
                                        {"no_shard", 2},
                                        {"zero1", 2},
                                        {"zero2", 2},
                                        {"zero3", 2},
                                        {"zero3", 4},
                                        {"hybrid", 4}}) {
    for (const bool after : {false, true}) {
      check(strategy, ranks, after, fused);
      check(strategy, ranks, after, torch_adamw);
    }
  }
}

// LibTorch's own loops do this.
TEST(ShardingPrograms, ZeroGradOfTheModule) {
  for (const bool between : {false, true}) {
    ExpectAsUnderDataParallelism([between](Accelerator& a) {
      torch::nn::Sequential net = Layers();
      FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
      auto [model, optimizer] = a.prepare(net, sgd);
      for (int step = 0; step < 4; ++step) {
        if (!between) net->zero_grad();
        const at::Tensor loss = model(X(a, step)).square().mean();
        if (between) net->zero_grad();
        a.backward(loss);
        optimizer.step();
      }
      return a.get_state_dict(model);
    });
  }
}

TEST(ShardingPrograms, GradientsOfTheModule_AreNotThere) {
  AcceleratorOptions options;
  options.sharding = ParseSharding("zero2", 2);
  const auto errors = [&](const std::function<void(torch::nn::Sequential&)>& body) {
    return ErrorsOf(2, options, [&](Accelerator& a) {
      torch::nn::Sequential net = Layers();
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      Steps(a, model, optimizer, 1,
            [&](auto& m, int step) { return m(X(a, step)).square().mean(); });
      body(net);
    });
  };
  const auto told = Each(HasSubstr("clip by accelerator.clip_grad_norm_()"));
  EXPECT_THAT(errors([](auto& net) { torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0); }),
              told);
  EXPECT_THAT(errors([](auto& net) { net->parameters()[0].grad().norm(); }), told);
  EXPECT_THAT(errors([](auto& net) { net->zero_grad(/*set_to_none=*/false); }), told);
  // In the middle of a window.
  options.gradient_accumulation_steps = 2;
  EXPECT_THAT(ErrorsOf(2, options,
                       [&](Accelerator& a) {
                         torch::nn::Sequential net = Layers();
                         FusedSGD sgd(net->parameters(), {.lr = 0.1});
                         auto [model, optimizer] = a.prepare(net, sgd);
                         for (int step = 0; step < 2; ++step) {
                           auto scope = a.accumulate();
                           net->zero_grad();
                           a.backward(model(X(a, step)).square().mean());
                           optimizer.step();
                         }
                       }),
              Each(HasSubstr("in this accumulation window is gone")));
}

TEST(ShardingPrograms, OptimizerThatWasGivenToPrepare_Steps) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01).eps(1e-3));
    auto [model, optimizer] = a.prepare(net, adam);
    for (int step = 0; step < 4; ++step) {
      a.backward(model(X(a, step)).square().mean());
      adam.step();
      adam.zero_grad();
    }
    return a.get_state_dict(model);
  });
}

// If all gradients are reduced in each micro-step, gathered parameters stay until some code has
// changed them: the program's own steps are noticed, even within a window.
TEST(ShardingPrograms, OptimizerThatWasGivenToPrepare_StepsWithinAWindow) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = 3;
  options.accumulation.sync_each_batch = true;
  const auto train = [](Accelerator& a, torch::nn::Sequential& net, auto& mine,
                        const auto& step_mine, const auto& zero_mine) {
    auto [model, optimizer] = a.prepare(net, mine);
    for (int step = 0; step < 6; ++step) {
      auto scope = a.accumulate();
      a.backward(model(X(a, step)).square().mean());
      step_mine(mine);
      if (a.sync_gradients()) zero_mine(mine);
    }
    return a.get_state_dict(model);
  };
  const auto of_torch = [&](const auto& make) {
    ExpectAsUnderDataParallelism(
        [&](Accelerator& a) {
          torch::nn::Sequential net = Layers();
          auto mine = make(net->parameters());
          return train(
              a, net, mine, [](auto& optimizer) { optimizer.step(); },
              [](auto& optimizer) { optimizer.zero_grad(); });
        },
        options);
  };
  using torch::optim::AdamOptions;
  of_torch([](auto p) { return torch::optim::Adam(p, AdamOptions(0.01).eps(1e-3)); });
  using torch::optim::AdamWOptions;
  of_torch([](auto p) { return torch::optim::AdamW(p, AdamWOptions(0.01).eps(1e-3)); });
  of_torch([](auto p) { return torch::optim::SGD(p, torch::optim::SGDOptions(0.1)); });
  using torch::optim::RMSpropOptions;
  of_torch([](auto p) { return torch::optim::RMSprop(p, RMSpropOptions(0.01).eps(1e-2)); });
  ExpectAsUnderDataParallelism(
      [&](Accelerator& a) {
        torch::nn::Sequential net = Layers();
        FusedSGD mine(net->parameters(), {.lr = 0.1, .momentum = 0.9});
        return train(
            a, net, mine, [](auto& optimizer) { optimizer.Step(); },
            [](auto& optimizer) { optimizer.ZeroGrad(GradZeroing::kSetToNone); });
      },
      options);
}

TEST(ShardingPrograms, EvaluationAfterAStepWithClosure) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    Weights outputs;
    for (int step = 0; step < 3; ++step) {
      optimizer.step([&, &optimizer = optimizer, &model = model] {
        optimizer.zero_grad();
        const at::Tensor loss = model(X(a, step)).square().mean();
        a.backward(loss);
        return loss;
      });
      const at::NoGradGuard no_grad;
      outputs[std::to_string(step)] = model(X(a, 7));
    }
    return outputs;
  });
}

TEST(ShardingPrograms, LoadInTheMiddleOfAWindow_DropsItsGradients) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = 2;
  const std::string root = TestDir("rollback");
  ExpectAsUnderDataParallelism(
      [&](Accelerator& a) {
        torch::nn::Sequential net = Layers();
        FusedSGD sgd(net->parameters(), {.lr = 0.1});
        auto [model, optimizer] = a.prepare(net, sgd);
        const auto loss = [&](auto& m, int step) { return m(X(a, step)).square().mean(); };
        Steps(a, model, optimizer, 2, loss);
        EXPECT_TRUE(a.save_state(root).ok());
        Steps(a, model, optimizer, 1, loss);
        EXPECT_TRUE(a.load_state(root).ok());
        Steps(a, model, optimizer, 2, loss);
        return a.get_state_dict(model);
      },
      options);
}

TEST(ShardingPrograms, MicroStepsInBfloat16_AreSummedInFloat) {
  AcceleratorOptions options;
  options.sharding = ParseSharding("zero3", 2);
  options.sharding->parameter_dtype = at::kBFloat16;
  options.mixed_precision = "bf16";
  options.gradient_accumulation_steps = 64;
  RunAccelerators(2, options, [](Accelerator& a) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    {
      const at::NoGradGuard no_grad;
      net->weight.zero_();
    }
    FusedSGD sgd(net->parameters(), {.lr = 1});
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int step = 0; step < 64; ++step) {
      auto scope = a.accumulate();
      // 4 once, and 1/64 in the other steps, which adding to 4 in bf16 would lose.
      a.backward(model(at::full({1, 1}, step == 0 ? 256.0 : 1.0)).sum());
      optimizer.step();
      optimizer.zero_grad();
    }
    const Weights weights = a.get_state_dict(model);
    if (!a.is_main_process()) return;
    EXPECT_NEAR(weights.at("weight").item<double>(), -(4 + 63.0 / 64), 1e-6);
  });
}

// The bias of a layer in the middle of the model, on only one process.
TEST(ShardingPrograms, ParameterThatOneProcessLeavesOut) {
  AcceleratorOptions options;
  options.data_parallel.find_unused_parameters = true;
  for (const int leaves_out : {0, 1}) {
    ExpectAsUnderDataParallelism(
        [leaves_out](Accelerator& a) {
          struct NetImpl : torch::nn::Module {
            NetImpl() {
              layers = register_module("layers", torch::nn::ModuleList());
              for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(6, 6));
              Fill(*this);
            }
            at::Tensor forward(at::Tensor x, bool with_bias) {
              for (int i = 0; i < 4; ++i) {
                auto* const layer = layers[i]->as<torch::nn::LinearImpl>();
                x = i == 0 || i == 2
                        ? at::linear(x, layer->weight, with_bias ? layer->bias : at::Tensor())
                        : layer->forward(x);
              }
              return x;
            }
            torch::nn::ModuleList layers{nullptr};
          };
          auto net = std::make_shared<NetImpl>();
          FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
          auto [model, optimizer] = a.prepare(net, sgd);
          Steps(a, model, optimizer, 4, [&](auto& m, int step) {
            return m(X(a, step), step == 3 || a.process_index() != leaves_out).square().mean();
          });
          return a.get_state_dict(model);
        },
        options);
  }
}

TEST(ShardingPrograms, SummonAndTrain) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    const auto loss = [&](auto& m, int step) { return m(X(a, step)).square().mean(); };
    Steps(a, model, optimizer, 1, loss);
    // Gradients while all parameters are gathered.
    a.summon_full_params(model, [&, &model = model] { a.backward(loss(model, 1)); });
    optimizer.step();
    optimizer.zero_grad();
    // Values that a body wrote before it threw are kept.
    EXPECT_THROW(a.summon_full_params(model,
                                      [&] {
                                        const at::NoGradGuard no_grad;
                                        net->parameters()[0].mul_(0.5);
                                        TORCH_CHECK(false, "a mistake");
                                      }),
                 c10::Error);
    Steps(a, model, optimizer, 2, loss);
    return a.get_state_dict(model);
  });
}

TEST(ShardingPrograms, SummonInsideOfASummon_SeesAndWritesTheSameValues) {
  ExpectAsUnderDataParallelism([](Accelerator& a) {
    torch::nn::Sequential net = Layers();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    a.summon_full_params(model, [&, &model = model] {
      const at::NoGradGuard no_grad;
      at::Tensor weight = net->parameters()[0];
      weight.mul_(2);
      a.summon_full_params(model, [&] { weight.add_(1); });
      weight.mul_(0.5);
    });
    Steps(a, model, optimizer, 2,
          [&](auto& net_of, int step) { return net_of(X(a, step)).pow(2).mean(); });
    return a.get_state_dict(model);
  });
}

TEST(ShardingPrograms, WhatRanksDoDifferently_IsRefused) {
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 2);
    EXPECT_THAT(
        ErrorsOf(2, options,
                 [](Accelerator& a) {
                   torch::nn::Sequential net = Layers();
                   FusedSGD sgd(net->parameters(), {.lr = 0.1});
                   auto [model, optimizer] = a.prepare(net, sgd);
                   if (a.process_index() == 1) net[0]->parameters()[1].set_requires_grad(false);
                   Steps(a, model, optimizer, 1,
                         [&](auto& m, int step) { return m(X(a, step)).square().mean(); });
                 }),
        Each(HasSubstr("'0.bias' of a sharded model is trained on rank 0 and frozen on rank 1")))
        << strategy;
  }
}

TEST(ShardingPrograms, WhatWouldGoWrong_IsRefused) {
  AcceleratorOptions options;
  options.sharding = ParseSharding("zero3", 2);
  // One parameter in two models.
  EXPECT_THAT(ErrorsOf(2, options,
                       [](Accelerator& a) {
                         torch::nn::Linear first(3, 3), second(3, 3);
                         auto one = a.prepare(first);
                         second->register_parameter("shared", first->weight);
                         auto two = a.prepare(second);
                       }),
              Each(HasSubstr("'shared' belongs to another sharded model")));
  // A step while the values are gathered.
  EXPECT_THAT(ErrorsOf(2, options,
                       [](Accelerator& a) {
                         torch::nn::Linear net(3, 3);
                         FusedSGD sgd(net->parameters(), {.lr = 0.1});
                         auto [model, optimizer] = a.prepare(net, sgd);
                         a.summon_full_params(model, [&, &model = model, &optimizer = optimizer] {
                           a.backward(model(X(a, 0, {2, 3})).sum());
                           optimizer.step();
                         });
                       }),
              Each(HasSubstr("inside of summon_full_params()")));
  // Two parameters in the same memory.
  EXPECT_THAT(ErrorsOf(2, options,
                       [](Accelerator& a) {
                         torch::nn::Sequential net(torch::nn::Linear(3, 3),
                                                   torch::nn::Linear(3, 3));
                         net[1]->parameters()[0].set_data(net[0]->parameters()[0]);
                         auto model = a.prepare(net);
                       }),
              Each(HasSubstr("'0.weight' and '1.weight' share memory")));
  // The module was converted to another dtype, or copied.
  EXPECT_THAT(ErrorsOf(2, options,
                       [](Accelerator& a) {
                         torch::nn::Linear net(3, 3);
                         auto model = a.prepare(net);
                         net->to(at::kDouble);
                       }),
              Each(HasSubstr("divided among the ranks")));
  EXPECT_THAT(ErrorsOf(2, options,
                       [](Accelerator& a) {
                         torch::nn::Linear net(3, 3);
                         auto model = a.prepare(net);
                         net->clone();
                       }),
              Each(HasSubstr("divided among the ranks")));
}

}  // namespace
}  // namespace muster
