// Models of every kind that LibTorch programs use, and the ways to call them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/test_model.h"
#include "muster/test_ranks.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/jit/api/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/any.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(2, 3));
    second = register_module("second", torch::nn::Linear(3, 1));
  }
  at::Tensor encode(const at::Tensor& x) { return at::tanh(first->forward(x)); }
  at::Tensor forward(const at::Tensor& x) { return second->forward(encode(x)); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

// LibTorch allows this as well: a call operator instead of forward().
struct Callable : torch::nn::Module {
  Callable() { layer = register_module("layer", torch::nn::Linear(2, 1)); }
  at::Tensor operator()(const at::Tensor& x, double times) { return layer->forward(x) * times; }
  torch::nn::Linear layer{nullptr};
};

at::Tensor Inputs(const Accelerator& a) {
  return at::full({4, 2}, 1.0 + a.process_index()) + at::arange(8).reshape({4, 2}) / 10;
}

at::Tensor Flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& t : tensors) flat.push_back(t.detach().reshape({-1}).to(at::kFloat));
  return at::cat(flat);
}

// Expects that all ranks hold the same numbers, which differ from `before`.
void ExpectTrainedAlike(Accelerator& a, const at::Tensor& before, const at::Tensor& after) {
  const at::Tensor all = a.gather(after.unsqueeze(0));
  for (int rank = 1; rank < a.num_processes(); ++rank) EXPECT_TRUE(at::equal(all[rank], all[0]));
  EXPECT_FALSE(at::equal(before, after));
}

// Trains `module` by `call(model, x)` for two windows of two micro-steps on 1 to 3 ranks.
template <class Make, class Parameters, class Call>
void ExpectTrains(const Make& make, const Parameters& parameters_of, const Call& call) {
  for (const int ranks : {1, 2, 3}) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = 2;
    RunAccelerators(ranks, options, [&](Accelerator& a) {
      auto module = make();
      torch::optim::SGD sgd(parameters_of(module), torch::optim::SGDOptions(0.1));
      auto [model, optimizer] = a.prepare(module, sgd);
      const at::Tensor before = Flat(sgd.param_groups()[0].params());
      for (int i = 0; i < 4; ++i) {
        auto scope = a.accumulate();
        a.backward(call(model, Inputs(a)).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_EQ(optimizer.steps(), 2);
      ExpectTrainedAlike(a, before, Flat(sgd.param_groups()[0].params()));
      const std::string dir = TestDir("state_of_a_model");
      ASSERT_TRUE(a.save_state(dir).ok());
      if (a.is_main_process()) {
        EXPECT_TRUE(std::filesystem::exists(dir + "/model.safetensors"));
      }
      const at::Tensor trained = Flat(sgd.param_groups()[0].params());
      {
        at::NoGradGuard no_grad;
        for (at::Tensor& p : sgd.param_groups()[0].params()) p.zero_();
      }
      ASSERT_TRUE(a.load_state(dir).ok());
      EXPECT_TRUE(at::equal(trained, Flat(sgd.param_groups()[0].params())));
    });
  }
}

const auto kOwnParameters = [](auto& module) { return module->parameters(); };
const auto kForward = [](auto& model, const at::Tensor& x) { return model(x); };

TEST(Models, SharedPtrOfADerivedClass_Trains) {
  ExpectTrains([] { return std::make_shared<Net>(); }, kOwnParameters, kForward);
}

TEST(Models, SharedPtrOfAClassWithACallOperator_Trains) {
  ExpectTrains([] { return std::make_shared<Callable>(); }, kOwnParameters,
               [](auto& model, const at::Tensor& x) { return model(x, 2.0); });
}

TEST(Models, Sequential_Trains) {
  ExpectTrains(
      [] {
        return torch::nn::Sequential(torch::nn::Linear(2, 3), torch::nn::ReLU(),
                                     torch::nn::Linear(3, 1));
      },
      kOwnParameters, kForward);
}

TEST(Models, AnyModule_Trains) {
  ExpectTrains([] { return torch::nn::AnyModule(torch::nn::Linear(2, 1)); },
               [](torch::nn::AnyModule& module) { return module.ptr()->parameters(); }, kForward);
}

TEST(Models, TorchScript_Trains) {
  ExpectTrains(
      [] {
        torch::jit::Module module("net");
        module.register_parameter("weight", at::full({2, 1}, 0.5), /*is_buffer=*/false);
        module.define("def forward(self, x):\n    return x.matmul(self.weight)\n");
        for (const at::Tensor& p : module.parameters()) p.requires_grad_(true);
        return module;
      },
      [](torch::jit::Module& module) {
        std::vector<at::Tensor> parameters;
        for (const at::Tensor& p : module.parameters()) parameters.push_back(p);
        return parameters;
      },
      [](auto& model, const at::Tensor& x) { return model(x).toTensor(); });
}

TEST(Models, OtherMethods_ByCall_Train) {
  ExpectTrains(
      [] { return std::make_shared<Net>(); }, kOwnParameters,
      [](auto& model, const at::Tensor& x) {
        return model.call(
            [](Net& net, const at::Tensor& in) { return net.second->forward(net.encode(in)); }, x);
      });
  RunAccelerators(1, {}, [](Accelerator& a) {
    auto model = a.prepare(std::make_shared<Net>());
    EXPECT_EQ(model.call(&Net::encode, Inputs(a)).size(1), 3);
    EXPECT_EQ(model.forward(Inputs(a)).size(1), 1);
  });
}

TEST(Models, FunctionWithoutAResult_ByCall_Trains) {
  for (const char* precision : {"no", "bf16"}) {
    for (const int ranks : {1, 2}) {
      AcceleratorOptions options;
      options.mixed_precision = precision;
      RunAccelerators(ranks, options, [](Accelerator& a) {
        auto net = std::make_shared<Net>();
        torch::optim::SGD sgd(net->parameters(), 0.1);
        auto [model, optimizer] = a.prepare(net, sgd);
        const at::Tensor before = Flat(net->parameters());
        at::Tensor loss;
        model.call([&](Net& module) { loss = module.forward(Inputs(a)).mean(); });
        a.backward(loss);
        optimizer.step();
        ExpectTrainedAlike(a, before, Flat(net->parameters()));
      });
    }
  }
}

TEST(Models, FunctionWithoutAResult_IsRefusedWhereItsGraphIsSearched) {
  AcceleratorOptions options;
  options.data_parallel.find_unused_parameters = true;
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    auto model = a.prepare(std::make_shared<Net>());
    model.call([](Net&) {});
  });
  EXPECT_THAT(errors,
              Each(AllOf(HasSubstr("returns nothing"), HasSubstr("find_unused_parameters"))));
}

TEST(Models, SharedPtrToAnOptimizer_IsKeptAlive) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    auto net = std::make_shared<Net>();
    auto sgd = std::make_shared<torch::optim::SGD>(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    const std::weak_ptr<torch::optim::SGD> alive = sgd;
    sgd.reset();
    EXPECT_FALSE(alive.expired());
    a.backward(model(Inputs(a)).mean());
    optimizer.step();
  });
}

TEST(Models, HandlesAsMembers_AreEmptyUntilAssigned) {
  struct Trainer {
    AcceleratedModel<torch::nn::Linear> model;
    AcceleratedModel<std::shared_ptr<Net>> net;
    AcceleratedOptimizer optimizer;
    AcceleratedScheduler schedule;
  };
  Trainer trainer;
  EXPECT_THROW(trainer.optimizer.step(), c10::Error);
  EXPECT_THROW(trainer.model(at::ones({1, 1})), c10::Error);
  EXPECT_THROW(trainer.schedule.step(), c10::Error);
  RunAccelerators(1, {}, [](Accelerator& a) {
    Trainer own;
    FusedSGD sgd(OneWeight()->parameters(), {.lr = 1});
    torch::nn::Linear linear = OneWeight();
    FusedSGD steps(linear->parameters(), {.lr = 1});
    own.model = a.prepare(linear);
    own.optimizer = a.prepare(steps);
    a.backward(Loss(own.model(at::ones({1, 1}))));
    own.optimizer.step();
    EXPECT_EQ(linear->weight.item<double>(), 1);
  });
}

// --- Bypassing the prepared model ---

TEST(Bypass, ForwardOfTheModule_IsRefusedAtStepAndNamed) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    auto net = std::make_shared<Net>();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    a.backward(model->forward(Inputs(a)).mean());
    optimizer.step();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("first.weight"), HasSubstr("model.call"))));
}

TEST(Bypass, OneOfTwoPassesOfAWindow_IsRefused) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    auto net = std::make_shared<Net>();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    a.backward(model(Inputs(a)).mean());
    a.backward(model->encode(Inputs(a)).mean());
    optimizer.step();
  });
  // The second pass is exchanged as well, but has gradients for only a part of the model.
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("second.weight"), HasSubstr("got no gradient"))));
}

TEST(Bypass, ModelsInAlternateMicroSteps_AreRefused) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = 2;
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    torch::nn::Linear one(2, 1), two(2, 1);
    std::vector<at::Tensor> parameters = one->parameters();
    for (const at::Tensor& p : two->parameters()) parameters.push_back(p);
    torch::optim::SGD sgd(parameters, 0.1);
    auto [first, second, optimizer] = a.prepare(one, two, sgd);
    for (int i = 0; i < 2; ++i) {
      auto scope = a.accumulate();
      a.backward(i == 0 ? first(Inputs(a)).mean() : second(Inputs(a)).mean());
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr("weight")));
}

TEST(Bypass, MixedPrecision_IsRefusedOnOneProcessToo) {
  AcceleratorOptions options;
  options.mixed_precision = "bf16";
  const auto errors = ErrorsOf(1, options, [](Accelerator& a) {
    auto net = std::make_shared<Net>();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    a.backward(model->forward(Inputs(a)).mean());
    optimizer.step();
  });
  EXPECT_THAT(errors, Each(HasSubstr("mixed precision")));
}

// An actor or a critic on an encoder that both use.
struct Head : torch::nn::Module {
  explicit Head(torch::nn::Linear trunk)
      : encoder(register_module("encoder", std::move(trunk))),
        head(register_module("head", torch::nn::Linear(3, 1))) {}
  at::Tensor forward(const at::Tensor& x) { return head->forward(at::tanh(encoder->forward(x))); }
  torch::nn::Linear encoder, head;
};

std::vector<at::Tensor> ParametersOf(const std::vector<std::shared_ptr<Head>>& heads) {
  std::vector<at::Tensor> parameters = heads[0]->parameters();
  for (const at::Tensor& parameter : heads[1]->head->parameters()) parameters.push_back(parameter);
  return parameters;
}

TEST(Models, ThatShareAParameterAndTakeTurns_Train) {
  for (const char* precision : {"no", "bf16"}) {
    for (const int ranks : {1, 2}) {
      for (const bool one_optimizer : {true, false}) {
        for (const bool set_to_none : {true, false}) {
          AcceleratorOptions options;
          options.mixed_precision = precision;
          RunAccelerators(ranks, options, [&](Accelerator& a) {
            torch::nn::Linear trunk(2, 3);
            const std::vector<std::shared_ptr<Head>> heads = {std::make_shared<Head>(trunk),
                                                              std::make_shared<Head>(trunk)};
            torch::nn::Linear same_trunk(2, 3);
            const std::vector<std::shared_ptr<Head>> plain = {std::make_shared<Head>(same_trunk),
                                                              std::make_shared<Head>(same_trunk)};
            torch::optim::SGD both(ParametersOf(heads), 0.1), first(heads[0]->parameters(), 0.1),
                second(heads[1]->parameters(), 0.1), by_hand(ParametersOf(plain), 0.1);
            auto [actor, critic] = a.prepare(heads[0], heads[1]);
            std::vector<AcceleratedOptimizer> optimizers;
            if (one_optimizer) {
              optimizers.push_back(a.prepare(both));
            } else {
              optimizers.push_back(a.prepare(first));
              optimizers.push_back(a.prepare(second));
            }
            {
              const at::NoGradGuard no_grad;
              const std::vector<at::Tensor> from = ParametersOf(heads), to = ParametersOf(plain);
              for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
            }
            for (int step = 0; step < 4; ++step) {
              auto& model = step % 2 == 0 ? actor : critic;
              AcceleratedOptimizer& optimizer = optimizers[one_optimizer ? 0 : step % 2];
              auto scope = a.accumulate();
              a.backward(model(Inputs(a)).mean());
              optimizer.step();
              for (AcceleratedOptimizer& any : optimizers) any.zero_grad(set_to_none);
              by_hand.zero_grad();
              at::Tensor loss = at::zeros({});
              for (int rank = 0; rank < ranks; ++rank) {
                const at::Tensor x =
                    at::full({4, 2}, 1.0 + rank) + at::arange(8).reshape({4, 2}) / 10;
                loss = loss + plain[step % 2]->forward(x).mean() / ranks;
              }
              loss.backward();
              by_hand.step();
            }
            const double tolerance = std::string(precision) == "no" ? 1e-6 : 3e-2;
            EXPECT_TRUE(at::allclose(Flat(ParametersOf(heads)), Flat(ParametersOf(plain)),
                                     tolerance, tolerance))
                << precision << ranks << one_optimizer << set_to_none;
          });
        }
      }
    }
  }
}

TEST(Bypass, SharedParameterByForwardOfOneModule_IsRefused) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    torch::nn::Linear trunk(2, 3);
    auto one = std::make_shared<Head>(trunk), two = std::make_shared<Head>(trunk);
    torch::optim::SGD sgd(ParametersOf({one, two}), 0.1);
    auto [actor, critic, optimizer] = a.prepare(one, two, sgd);
    a.backward(actor->forward(Inputs(a)).mean());
    optimizer.step();
  });
  EXPECT_THAT(errors, Each(HasSubstr("not averaged over the processes")));
}

TEST(Bypass, TwoOptimizersOfOneModel_StepBoth) {
  for (const char* precision : {"no", "bf16"}) {
    for (const int ranks : {1, 2}) {
      AcceleratorOptions options;
      options.mixed_precision = precision;
      const auto errors = ErrorsOf(ranks, options, [](Accelerator& a) {
        auto net = std::make_shared<Net>();
        torch::optim::SGD one(net->first->parameters(), 0.1), two(net->second->parameters(), 0.1);
        auto [model, first, second] = a.prepare(net, one, two);
        for (int i = 0; i < 2; ++i) {
          a.backward(model(Inputs(a)).mean());
          first.step();
          second.step();
          first.zero_grad();
          second.zero_grad();
        }
      });
      EXPECT_THAT(errors, Each(""));
    }
  }
}

TEST(Bypass, ModuleAddedAfterPrepare_IsRefusedOnSeveralProcesses) {
  for (const int ranks : {1, 2}) {
    const auto errors = ErrorsOf(ranks, {}, [](Accelerator& a) {
      auto net = std::make_shared<Net>();
      auto model = a.prepare(net);
      net->second = net->replace_module("second", torch::nn::Linear(3, 1));
      torch::optim::SGD sgd(net->parameters(), 0.1);
      auto optimizer = a.prepare(sgd);
      a.backward(model.call([&](Net& n) { return n.forward(Inputs(a)); }).mean());
      optimizer.step();
    });
    if (ranks == 1) {
      EXPECT_THAT(errors, Each(""));
    } else {
      EXPECT_THAT(errors, Each(HasSubstr("after prepare()")));
    }
  }
}

TEST(Bypass, ParameterOfNoPreparedModel_IsRefusedOrAllowed) {
  for (const bool allowed : {false, true}) {
    AcceleratorOptions options;
    options.allow_local_gradients = allowed;
    const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
      auto net = std::make_shared<Net>();
      at::Tensor temperature = at::ones({3}).requires_grad_(true);
      std::vector<at::Tensor> parameters = net->parameters();
      parameters.push_back(temperature);
      torch::optim::SGD sgd(parameters, 0.1);
      auto [model, optimizer] = a.prepare(net, sgd);
      a.backward((model(Inputs(a)).mean() * temperature).sum());
      optimizer.step();
    });
    if (allowed) {
      EXPECT_THAT(errors, Each(""));
    } else {
      EXPECT_THAT(errors, Each(HasSubstr("of shape [3]")));
    }
  }
}

// --- Freezing ---

TEST(Freezing, UnfrozenAfterPrepare_IsExchanged) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    auto net = std::make_shared<Net>();
    for (at::Tensor& p : net->first->parameters()) p.requires_grad_(false);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor before = Flat(net->first->parameters());
    for (int i = 0; i < 3; ++i) {
      if (i == 1) {
        for (at::Tensor& p : net->first->parameters()) p.requires_grad_(true);
      }
      if (i == 2) {
        for (at::Tensor& p : net->second->parameters()) p.requires_grad_(false);
      }
      auto scope = a.accumulate();
      a.backward(model(Inputs(a)).square().mean());
      optimizer.step();
      optimizer.zero_grad();
      if (i == 0) {
        EXPECT_TRUE(at::equal(before, Flat(net->first->parameters())));
      }
    }
    ExpectTrainedAlike(a, before, Flat(net->first->parameters()));
    ExpectTrainedAlike(a, before, Flat(net->second->parameters()));
  });
}

TEST(Freezing, GroupAddedAfterPrepare_IsTrainedZeroedAndSaved) {
  for (const int ranks : {1, 2}) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = 2;
    RunAccelerators(ranks, options, [](Accelerator& a) {
      auto net = std::make_shared<Net>();
      torch::optim::SGD sgd(net->second->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      auto [model, optimizer] = a.prepare(net, sgd);
      sgd.add_param_group(torch::optim::OptimizerParamGroup(net->first->parameters()));
      const at::Tensor before = Flat(net->first->parameters());
      for (int i = 0; i < 4; ++i) {
        auto scope = a.accumulate();
        a.backward(model(Inputs(a)).square().mean());
        optimizer.step();
        optimizer.zero_grad();
        EXPECT_EQ(net->first->weight.grad().defined(), i % 2 == 0);
      }
      EXPECT_EQ(optimizer.num_groups(), 2);
      ExpectTrainedAlike(a, before, Flat(net->first->parameters()));
      EXPECT_TRUE(a.save_state(TestDir("groups")).ok());
    });
  }
}

// --- What LibTorch's programs do with one forward pass or two ---

TEST(Models, SyncBatchNormThatOutlivesItsAccelerator_IsLocal) {
  std::vector<torch::nn::Sequential> nets(2, nullptr);
  RunAccelerators(2, {}, [&](Accelerator& a) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), SyncBatchNorm(3));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    a.backward(model(Inputs(a)).square().mean());
    EXPECT_NE(net[1]->as<SyncBatchNormImpl>()->comm(), nullptr);
    nets[a.process_index()] = net;
  });
  for (torch::nn::Sequential& net : nets) {
    EXPECT_EQ(net[1]->as<SyncBatchNormImpl>()->comm(), nullptr);
    EXPECT_EQ(net->forward(at::ones({4, 2})).size(0), 4);
    net->eval();
    EXPECT_EQ(net->forward(at::ones({4, 2})).size(0), 4);
  }
}

TEST(Backward, RetainedGraph_IsReducedTwice) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor out = model(at::full({1, 1}, 1.0 + a.process_index()));
    a.backward(-out.mean(), {.retain_graph = true});
    a.backward(-2 * out.mean());
    optimizer.step();
    // The mean of x over the ranks is 1.5.
    EXPECT_NEAR(net->weight.item<double>(), 3 * 1.5, 1e-6);
  });
}

TEST(Backward, TwoForwardsThenTwoBackwards_AreReducedBoth) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor before = Flat(net->parameters());
    for (int i = 0; i < 2; ++i) {
      const at::Tensor real = model(Inputs(a)), fake = model(-2 * Inputs(a));
      a.backward((real * Inputs(a).sum(1, true)).mean());
      a.backward(fake.square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    ExpectTrainedAlike(a, before, Flat(net->parameters()));
    ExpectTrainedAlike(a, at::zeros({1}), Flat(net->buffers()));
  });
}

struct Anew : torch::nn::Module {
  Anew() {
    first = register_module("first", torch::nn::Linear(2, 3));
    second = register_module("second", torch::nn::Linear(3, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return activation_checkpoint(second, at::tanh(first->forward(x)));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

TEST(Backward, ThroughAGraphOfBeforeTheStep_Throws) {
  // With LibTorch's own SGD alone it would not be noticed.
  const auto expect = [](auto make_net, auto make_optimizer, const char* words) {
    for (const int ranks : {1, 2}) {
      const auto errors = ErrorsOf(ranks, {}, [&](Accelerator& a) {
        auto net = make_net();
        auto raw = make_optimizer(net->parameters());
        auto [model, optimizer] = a.prepare(net, raw);
        const at::Tensor loss = model(Inputs(a)).square().mean();
        a.backward(loss, {.retain_graph = true});
        optimizer.step();
        a.backward(loss);
      });
      EXPECT_THAT(errors, Each(HasSubstr(words)));
    }
  };
  const auto net = [] { return std::make_shared<Net>(); };
  const char* const words = "modified by an inplace operation";
  using Parameters = const std::vector<at::Tensor>&;
  expect(
      net, [](Parameters p) { return torch::optim::AdamW(p); }, words);
  expect(
      net, [](Parameters p) { return torch::optim::SGD(p, 0.1); }, words);
  expect(
      net, [](Parameters p) { return FusedAdamW(p); }, words);
  expect([] { return std::make_shared<Anew>(); }, [](Parameters p) { return FusedSGD(p); },
         "was changed in place");
}

TEST(Backward, OfTwoNetworksInTurns_IsOfTheGraphAfterTheStep) {
  for (const bool after_step : {true, false}) {
    const auto errors = ErrorsOf(1, {}, [&](Accelerator& a) {
      auto g = std::make_shared<Net>();
      torch::nn::Linear d(1, 1);
      FusedAdamW adam_g(g->parameters()), adam_d(d->parameters());
      auto [generator, critic, step_g, step_d] = a.prepare(g, d, adam_g, adam_d);
      for (int i = 0; i < 3; ++i) {
        const at::Tensor fake = generator(Inputs(a));
        step_d.zero_grad();
        a.backward(critic(fake.detach()).square().mean());
        at::Tensor judged;
        if (!after_step) judged = critic(fake);
        step_d.step();
        if (after_step) judged = critic(fake);
        step_g.zero_grad();
        a.backward(-judged.mean());
        step_g.step();
      }
    });
    if (after_step) {
      EXPECT_THAT(errors, Each(""));
    } else {
      EXPECT_THAT(errors, Each(HasSubstr("modified by an inplace operation")));
    }
  }
}

TEST(Backward, CreateGraph_GivesSecondDerivatives) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    const at::Tensor x = at::full({1}, 2.0).requires_grad_(true);
    a.backward((x * x * x).sum(), {.create_graph = true});
    const at::Tensor first = x.grad();
    const auto second = torch::autograd::grad({first.sum()}, {x});
    EXPECT_EQ(second[0].item<double>(), 12);
    x.mutable_grad().reset();
  });
}

TEST(Backward, Inputs_LeaveTheOtherModelAlone) {
  for (const int ranks : {1, 2}) {
    RunAccelerators(ranks, {}, [](Accelerator& a) {
      auto g = std::make_shared<Net>();
      torch::nn::Linear d(1, 1);
      torch::optim::SGD sgd_g(g->parameters(), 0.1), sgd_d(d->parameters(), 0.1);
      auto [generator, critic, step_g, step_d] = a.prepare(g, d, sgd_g, sgd_d);
      const at::Tensor before = Flat(g->parameters()), critic_before = Flat(d->parameters());
      for (int i = 0; i < 2; ++i) {
        a.backward(critic(generator(Inputs(a))).mean(), {.inputs = g->parameters()});
        EXPECT_FALSE(d->weight.grad().defined());
        step_g.step();
        step_g.zero_grad();
        a.backward(critic(generator(Inputs(a)).detach()).square().mean());
        step_d.step();
        step_d.zero_grad();
      }
      ExpectTrainedAlike(a, before, Flat(g->parameters()));
      ExpectTrainedAlike(a, critic_before, Flat(d->parameters()));
    });
  }
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    auto net = std::make_shared<Net>();
    auto model = a.prepare(net);
    a.backward(model(Inputs(a)).mean(), {.inputs = net->second->parameters()});
  });
  EXPECT_THAT(errors, Each(HasSubstr("2 of the 4 trained parameters")));
}

TEST(Sparse, EmbeddingGradients_AreAveraged) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    torch::optim::SGD sgd(table->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(table, sgd);
    const at::Tensor before = table->weight.detach().clone();
    a.backward(model(at::full({1}, a.process_index(), at::kLong)).sum());
    optimizer.step();
    // On both ranks, each rank's row has moved by half of its gradient.
    EXPECT_TRUE(at::allclose(table->weight.slice(0, 0, 2), before.slice(0, 0, 2) - 0.5));
    EXPECT_TRUE(at::equal(table->weight.slice(0, 2), before.slice(0, 2)));
  });
}

TEST(Buffers, SyncBatchNorm_IsBoundAtPrepareAndRefusedInAJoin) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear linear(2, 2);
    {
      at::NoGradGuard no_grad;
      linear->weight.copy_(at::tensor({0.5F, 0.2F, -0.3F, -0.4F}).view({2, 2}));
      linear->bias.zero_();
    }
    torch::nn::Sequential net(linear, SyncBatchNorm(2));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor out = model(Inputs(a));
    // Normalised over both ranks' batches: neither has the mean 0 by itself.
    EXPECT_GT(out.mean(0).abs().max().item<double>(), 0.1);
    EXPECT_NEAR(a.gather(out.detach()).mean(0).abs().max().item<double>(), 0, 1e-5);
    a.backward((out * Inputs(a)).mean());
    optimizer.step();
    EXPECT_THROW({ auto join = a.join_uneven_inputs(); }, c10::Error);
  });
}

TEST(Groups, HandleOfNoGroup_SaysSo) {
  Subgroup none;
  EXPECT_FALSE(none.is_member());
  EXPECT_THROW(none.num_processes(), c10::Error);
}

TEST(Buffers, AfterAStep_AreEqualInEvaluation) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::BatchNorm1d norm(2);
    torch::optim::SGD sgd(norm->parameters(), 0.1);
    auto [model, optimizer] = a.prepare(norm, sgd);
    a.backward((model(Inputs(a)) * Inputs(a)).mean());
    optimizer.step();
    model->eval();
    const at::Tensor out = model(at::ones({2, 2}));
    const at::Tensor all = a.gather(out.detach().unsqueeze(0));
    EXPECT_TRUE(at::equal(all[0], all[1]));
  });
}

}  // namespace
}  // namespace muster
