// Optimizers that update inside the backward pass: the same bits as those that step after it, on
// one rank and on several (threads of this process over Gloo), and an error if the difference would
// be visible.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/data.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adamw.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/counting_allocator.h"
#include "worker/parallel/shard_unit.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/offloaded_state.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kSamples = 12;  // in a step, on all ranks
constexpr char kOption[] = "optimizer_in_backward";

using Weights = std::map<std::string, at::Tensor>;

at::Tensor MineOf(const Accelerator& a, const at::Tensor& all) {
  return all.chunk(a.num_processes())[a.process_index()];
}

// Maps words to words with a tied weight, through some of its parts.
struct Branches : torch::nn::Module {
  Branches() {
    words = register_module("words", torch::nn::Embedding(7, 5));
    scale = register_parameter("scale", at::ones({5}));
    register_buffer("positions", at::arange(5));  // exchanged by the ranks at the end of each pass
    parts = register_module("parts", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) parts->push_back(torch::nn::Linear(5, 5));
    at::NoGradGuard no_grad;
    uint64_t seed = 20;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(Random(parameter.sizes(), ++seed).div_(3));
    }
  }
  // `which`: a bit for each part, and one for the scale, which is in the unit of the words.
  at::Tensor Forward(const at::Tensor& ids, int which) {
    at::Tensor x = words(ids);
    for (int i = 0; i < 3; ++i) {
      if ((which >> i & 1) != 0) x = at::tanh(parts[i]->as<torch::nn::Linear>()->forward(x));
    }
    if ((which >> 3 & 1) != 0) x = x * scale;
    return at::linear(x, words->weight);
  }

  torch::nn::Embedding words{nullptr};
  at::Tensor scale;
  torch::nn::ModuleList parts{nullptr};
};

class OptimizerInBackward : public testing::Test {
 protected:
  // Makes several windows of offloaded states.
  void SetUp() override { OffloadedState::SetDefaultWindowBytes(512); }
  void TearDown() override { OffloadedState::SetDefaultWindowBytes(OffloadedState::kWindowBytes); }

  static AcceleratorOptions Options(const std::string& strategy, bool in_backward = true,
                                    int64_t ranks_per_node = 2) {
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, ranks_per_node);
    options.sharding->optimizer_in_backward = in_backward;
    return options;
  }
  AcceleratorOptions OnDisk(AcceleratorOptions options, bool parameters) const {
    options.sharding->offload_optimizer = Offload::kDisk;
    options.sharding->offload_optimizer_path = folder_.Path("optimizer");
    if (parameters) {
      options.sharding->offload_parameters = Offload::kDisk;
      options.sharding->offload_parameters_path = folder_.Path("parameters");
    }
    return options;
  }

  // Returns the weights after seven batches, with a checkpoint after three that another Accelerator
  // loads. The learning rate changes in each step.
  Weights Trained(int ranks, const AcceleratorOptions& first, const AcceleratorOptions& second) {
    Weights weights;
    const std::string dir = folder_.Path("state" + std::to_string(++runs_));
    for (const bool continued : {false, true}) {
      RunAccelerators(ranks, continued ? second : first, [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        FusedAdamW adam({{{net->parameters()[0], net->parameters()[2]}, {.lr = 0.01}},
                         {{net->parameters()[1], net->parameters()[3], net->parameters()[4],
                           net->parameters()[5]},
                          {.lr = 0.02, .weight_decay = 0}}});
        auto [model, optimizer, scheduler] =
            a.prepare(net, adam, LambdaLR([](int64_t step) { return 1 / (1.0 + 0.3 * step); }));
        if (continued) {
          const absl::Status loaded = a.load_state(dir);
          ASSERT_TRUE(loaded.ok()) << loaded;
        }
        for (int step = continued ? 3 : 0; step < (continued ? 7 : 3); ++step) {
          auto scope = a.accumulate();
          a.backward(at::mse_loss(model(MineOf(a, Random({kSamples, 5}, 100 + step))),
                                  MineOf(a, Random({kSamples, 3}, 200 + step))));
          optimizer.step();
          scheduler.step();
          optimizer.zero_grad();
        }
        EXPECT_EQ(optimizer.steps(), (continued ? 7 : 3) / a.gradient_accumulation_steps());
        if (!continued) {
          const absl::Status saved = a.save_state(dir);
          ASSERT_TRUE(saved.ok()) << saved;
        }
        const Weights got = WeightsOf(a, model);
        if (continued && a.is_main_process()) weights = got;
      });
    }
    return weights;
  }

  // Sets the same values in each run.
  static void Fill(torch::nn::Module& net) {
    const at::NoGradGuard no_grad;
    uint64_t seed = 40;
    for (at::Tensor& parameter : net.parameters()) {
      parameter.copy_(Random(parameter.sizes(), ++seed).div_(parameter.size(0)));
    }
  }

  static void ExpectEqual(const Weights& a, const Weights& b) {
    ASSERT_FALSE(a.empty());
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
  }

  const TestFolder folder_;
  int runs_ = 0;
};

TEST_F(OptimizerInBackward, EveryStrategy_TrainsToTheSameBits) {
  for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
    for (const int ranks : {1, 2, 3}) {
      for (const bool overlap : {false, true}) {
        SCOPED_TRACE(strategy + " on " + std::to_string(ranks) + " ranks, overlap " +
                     std::to_string(static_cast<int>(overlap)));
        AcceleratorOptions off = Options(strategy, false), on = Options(strategy);
        off.sharding->overlap = on.sharding->overlap = overlap;
        if (overlap && ranks != 2) continue;
        const Weights want = Trained(ranks, off, off);
        ExpectEqual(Trained(ranks, on, on), want);
        if (overlap || ranks == 3) continue;
        // The option does not appear in a checkpoint.
        ExpectEqual(Trained(ranks, on, off), want);
        ExpectEqual(Trained(ranks, off, on), want);
      }
    }
  }
}

TEST_F(OptimizerInBackward, HybridSharding_TrainsToTheSameBits) {
  const AcceleratorOptions off = Options("hybrid", false);
  ExpectEqual(Trained(4, Options("hybrid"), Options("hybrid")), Trained(4, off, off));
}

TEST_F(OptimizerInBackward, OffloadedStatesAndParameters_TrainToTheSameBits) {
  for (const int ranks : {1, 2}) {
    for (const bool overlap : {false, true}) {
      AcceleratorOptions off = Options("zero3", false), on = Options("zero3");
      off.sharding->overlap = on.sharding->overlap = overlap;
      const Weights want = Trained(ranks, off, off);
      for (const bool parameters : {false, true}) {
        SCOPED_TRACE(std::to_string(ranks) + (parameters ? " ranks, parameters too" : " ranks"));
        ExpectEqual(Trained(ranks, OnDisk(on, parameters), OnDisk(on, parameters)), want);
      }
    }
  }
}

// The last of three windows has one batch: its gradients are multiplied.
TEST_F(OptimizerInBackward, Accumulation_UpdatesInTheLastMicroStepAlone) {
  for (const bool each_batch : {false, true}) {
    for (const int ranks : {1, 2}) {
      AcceleratorOptions off = Options("zero3", false), on = Options("zero3");
      for (AcceleratorOptions* options : {&off, &on}) {
        options->gradient_accumulation_steps = 3;
        options->accumulation.sync_each_batch = each_batch;
        options->mixed_precision = "bf16";
        options->sharding->reduce_dtype = at::kBFloat16;
      }
      ExpectEqual(Trained(ranks, on, on), Trained(ranks, off, off));
    }
  }
}

TEST_F(OptimizerInBackward, PreparedLoaderWithAShortWindow_TrainsToTheSameBits) {
  std::vector<Weights> runs;
  for (const bool in_backward : {false, true}) {
    AcceleratorOptions options = Options("zero2", in_backward);
    options.gradient_accumulation_steps = 2;
    RunAccelerators(2, options, [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9, .dampening = 0.1});
      std::vector<at::Tensor> samples;
      for (int i = 0; i < 6; ++i) samples.push_back(Random({2, 5}, 300 + i));
      auto [model, optimizer] = a.prepare(net, sgd);
      for (int i = 0; i < 6; i += 2) {
        BatchInfo info;
        info.index = i / 2;
        info.is_last = i == 4;
        info.batches_left = (4 - i) / 2;
        const Batch<at::Tensor> batch(samples[static_cast<size_t>(i + a.process_index())], info);
        auto scope = a.accumulate(batch);
        a.backward(model(batch.value()).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_EQ(optimizer.steps(), 2);
      const Weights got = WeightsOf(a, model);
      if (a.is_main_process()) runs.push_back(got);
    });
  }
  ExpectEqual(runs[1], runs[0]);
}

// Parts that no rank uses stay unchanged, those that one rank uses are trained on both; tied
// weights wait for both of their gradients, and so do two forward passes before one backward pass.
TEST_F(OptimizerInBackward, PartsThatAreNotUsedByAll_TrainToTheSameBits) {
  for (const std::string strategy : {"zero2", "zero3"}) {
    std::vector<Weights> runs;
    for (const bool in_backward : {false, true}) {
      RunAccelerators(2, Options(strategy, in_backward), [&](Accelerator& a) {
        auto net = std::make_shared<Branches>();
        FusedAdamW adam(net->parameters(), {.lr = 0.01, .weight_decay = 0.1});
        auto [model, optimizer] = a.prepare(net, adam);
        for (int step = 0; step < 8; ++step) {
          const at::Tensor ids = at::arange(7, at::kLong).add(step).remainder(7);
          // All parts; then without the second part; then only rank 1 without the scale; then no
          // rank with it.
          const int which = step < 2   ? 15
                            : step < 4 ? 13
                            : step < 6 ? (a.process_index() == 1 ? 7 : 15)
                                       : 7;
          const auto loss = [&](int times) {
            return model.call(&Branches::Forward, ids.roll(times), which).square().mean();
          };
          a.backward(step % 2 == 0 ? loss(0) : loss(0) + loss(1));
          optimizer.step();
          optimizer.zero_grad();
        }
        const Weights got = WeightsOf(a, model);
        if (a.is_main_process()) runs.push_back(got);
      });
    }
    ExpectEqual(runs[1], runs[0]);
  }
}

TEST_F(OptimizerInBackward, TwoOptimizersOfOneModel_EachUpdateTheirs) {
  std::vector<Weights> runs;
  for (const bool in_backward : {false, true}) {
    RunAccelerators(2, Options("zero3", in_backward), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      const std::vector<at::Tensor> p = net->parameters();
      FusedAdam adam({p[0], p[1], p[2]}, {.lr = 0.01});
      FusedAdagrad adagrad({p[3], p[4], p[5]}, {.lr = 0.1});
      auto [model, one, two] = a.prepare(net, adam, adagrad);
      for (int step = 0; step < 4; ++step) {
        a.backward(model(MineOf(a, Random({kSamples, 5}, 100 + step))).square().mean());
        one.step();
        two.step();
        one.zero_grad();
        two.zero_grad();
      }
      const Weights got = WeightsOf(a, model);
      if (a.is_main_process()) runs.push_back(got);
    });
  }
  ExpectEqual(runs[1], runs[0]);
}

// The gradients of the second model are all reduced before those of the first one arrive.
TEST_F(OptimizerInBackward, TwoModelsInOnePass_TrainToTheSameBits) {
  for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
    SCOPED_TRACE(strategy);
    std::vector<Weights> runs;
    for (const bool in_backward : {false, true}) {
      RunAccelerators(2, Options(strategy, in_backward), [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        torch::nn::Sequential head(torch::nn::Linear(3, 6), torch::nn::Linear(6, 2));
        {
          const at::NoGradGuard no_grad;
          for (at::Tensor& parameter : head->parameters())
            parameter.copy_(Random(parameter.sizes(), 4));
        }
        FusedAdamW adam(net->parameters(), {.lr = 0.01});
        FusedSGD sgd(head->parameters(), {.lr = 0.1, .momentum = 0.9});
        auto [body, one] = a.prepare(net, adam);
        auto [top, two] = a.prepare(head, sgd);
        for (int step = 0; step < 4; ++step) {
          a.backward(top(body(MineOf(a, Random({kSamples, 5}, 100 + step)))).square().mean());
          one.step();
          two.step();
          one.zero_grad();
          two.zero_grad();
        }
        const Weights of_body = a.get_state_dict(body), of_top = a.get_state_dict(top);
        if (!a.is_main_process()) return;
        runs.emplace_back();
        for (const auto& [name, tensor] : of_body) runs.back()[name] = tensor.clone();
        for (const auto& [name, tensor] : of_top) runs.back()["top." + name] = tensor.clone();
      });
    }
    ASSERT_EQ(runs.size(), 2U);
    ExpectEqual(runs[1], runs[0]);
  }
}

// A unit is then due before its gradients of this pass have arrived, with only those of the
// previous micro-step.
TEST_F(OptimizerInBackward, LastMicroStepWithMoreTurns_TrainsToTheSameBits) {
  std::vector<Weights> runs;
  for (const bool in_backward : {false, true}) {
    AcceleratorOptions options = Options("zero3", in_backward);
    options.gradient_accumulation_steps = 2;
    RunAccelerators(2, options, [&](Accelerator& a) {
      auto net = std::make_shared<Branches>();
      FusedAdamW adam(net->parameters(), {.lr = 0.01, .weight_decay = 0.1});
      auto [model, optimizer] = a.prepare(net, adam);
      for (int step = 0; step < 8; ++step) {
        auto scope = a.accumulate();
        const at::Tensor ids = at::arange(7, at::kLong).add(step + a.process_index()).remainder(7);
        const auto loss = [&](int times) {
          return model.call(&Branches::Forward, ids.roll(times), 15).square().mean();
        };
        a.backward(step != 3 ? loss(0) : loss(0) + loss(1));
        optimizer.step();
        optimizer.zero_grad();
      }
      const Weights got = WeightsOf(a, model);
      if (a.is_main_process()) runs.push_back(got);
    });
  }
  ASSERT_EQ(runs.size(), 2U);
  ExpectEqual(runs[1], runs[0]);
}

// Its gradients belong to an earlier micro-step and were reduced there. One rank has no part of
// what the optimizer updates, and must know of it anyway.
TEST_F(OptimizerInBackward, OptimizerOfAnEarlierMicroStep_TrainsToTheSameBits) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    std::vector<Weights> runs;
    for (const bool in_backward : {false, true}) {
      AcceleratorOptions options = Options("zero2", in_backward);
      options.gradient_accumulation_steps = 2;
      options.accumulation.sync_each_batch = true;
      RunAccelerators(ranks, options, [&](Accelerator& a) {
        auto net = std::make_shared<Branches>();
        std::vector<at::Tensor> others;
        const at::Tensor bias = net->parts[0]->as<torch::nn::Linear>()->bias;
        for (const at::Tensor& parameter : net->parameters()) {
          if (!parameter.is_same(bias)) others.push_back(parameter);
        }
        FusedAdamW adam({bias}, {.lr = 0.01, .weight_decay = 0.1});
        FusedSGD sgd(others, {.lr = 0.1});
        auto [model, one, two] = a.prepare(net, adam, sgd);
        for (int step = 0; step < 8; ++step) {
          auto scope = a.accumulate();
          const at::Tensor ids =
              at::arange(7, at::kLong).add(step + a.process_index()).remainder(7);
          // In the last window no micro-step uses it.
          const int which = step % 2 == 0 && step < 6 ? 15 : 14;
          a.backward(model.call(&Branches::Forward, ids, which).square().mean());
          one.step();
          two.step();
          one.zero_grad();
          two.zero_grad();
        }
        const Weights got = WeightsOf(a, model);
        if (a.is_main_process()) runs.push_back(got);
      });
    }
    ASSERT_EQ(runs.size(), 2U);
    ExpectEqual(runs[1], runs[0]);
  }
}

// Trains one step, and calls `then` in the second one, after its backward pass.
using Then = std::function<void(Accelerator&, AcceleratedModel<torch::nn::Sequential>&,
                                AcceleratedOptimizer&)>;
std::vector<std::string> ErrorsAfterBackward(const AcceleratorOptions& options, const Then& then) {
  return ErrorsOf(2, options, [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters());
    auto [model, optimizer] = a.prepare(net, adam);
    for (int step = 0; step < 2; ++step) {
      a.backward(model(Random({4, 5}, 1)).square().mean());
      if (step == 1) then(a, model, optimizer);
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST_F(OptimizerInBackward, WhatWouldShowTheDifference_IsAnErrorOnEveryRank) {
  const std::vector<std::pair<std::string, Then>> cases = {
      {"another backward",
       [](Accelerator& a, auto& model, auto&) {
         a.backward(model(Random({4, 5}, 1)).square().mean());
       }},
      {"optimizer.zero_grad() between", [](Accelerator&, auto&, auto& o) { o.zero_grad(); }},
      {"a forward pass between",
       [](Accelerator&, auto& model, auto&) {
         model(Random({4, 5}, 1));
       }},
      {"summon_full_params() between",
       [](Accelerator& a, auto& model, auto&) { a.summon_full_params(model, [] {}); }},
      {"reading the weights between",
       [](Accelerator& a, auto& model, auto&) { a.get_state_dict(model); }},
      {"save_state() between",
       [&](Accelerator& a, auto&, auto&) {
         const absl::Status saved = a.save_state(folder_.Path("never"));
         TORCH_CHECK(saved.ok(), saved.message());
       }},
      {"ema.update() between",
       [](Accelerator& a, auto& model, auto&) {
         Ema ema(a, model);
         ema.update();
       }},
      {"ema.copy_to() between",
       [](Accelerator& a, auto& model, auto&) {
         Ema ema(a, model);
         ema.copy_to(*model);
       }},
      {"load_weights() between",
       [&](Accelerator& a, auto&, auto&) {
         const absl::StatusOr<LoadedState> loaded = a.load_weights(folder_.Path("never"));
         TORCH_CHECK(loaded.ok(), loaded.status().message());
       }},
      {"learning rate or momentum was changed",
       [](Accelerator&, auto&, auto& o) { o.set_lr(0.5); }},
      {"clip_grad_norm_()",
       [](Accelerator& a, auto& model, auto&) { a.clip_grad_norm_(model.parameters(), 1.0); }},
      {"clip_grad_value_()",
       [](Accelerator& a, auto& model, auto&) { a.clip_grad_value_(model.parameters(), 1.0); }},
      {"uses a gradient that is gone",
       [](Accelerator&, auto&, auto& o) { o.handle().parameters()[0].grad().square(); }},
  };
  for (const std::string strategy : {"zero2", "zero3"}) {
    for (const auto& [what, then] : cases) {
      SCOPED_TRACE(strategy + ": " + what);
      std::vector<std::string> errors = ErrorsAfterBackward(Options(strategy), then);
      if (what.rfind("another", 0) == 0) {
        EXPECT_THAT(errors, Each(HasSubstr(kOption)));
        continue;
      }
      EXPECT_THAT(errors, Each(AllOf(HasSubstr(what), HasSubstr(kOption))));
    }
  }
}

TEST_F(OptimizerInBackward, GradientsThatAreNotZeroed_AreAnErrorOnEveryRank) {
  EXPECT_THAT(ErrorsOf(2, Options("zero3"),
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         FusedAdamW adam(net->parameters());
                         auto [model, optimizer] = a.prepare(net, adam);
                         for (int step = 0; step < 2; ++step) {
                           a.backward(model(Random({4, 5}, 1)).square().mean());
                           optimizer.step();
                         }
                       }),
              Each(AllOf(HasSubstr("optimizer.zero_grad() after each"), HasSubstr(kOption))));
  // Zeroing by the module works as well.
  EXPECT_THAT(ErrorsOf(2, Options("zero3"),
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         FusedAdamW adam(net->parameters());
                         auto [model, optimizer] = a.prepare(net, adam);
                         for (int step = 0; step < 3; ++step) {
                           a.backward(model(Random({4, 5}, 1)).square().mean());
                           optimizer.step();
                           model->zero_grad();
                         }
                       }),
              Each(""));
}

TEST_F(OptimizerInBackward, WhatNeedsAllGradientsFirst_IsRefusedByName) {
  const auto prepare = [](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    torch::optim::AdamW adam(net->parameters());
    auto prepared = a.prepare(net, adam);
  };
  EXPECT_THAT(ErrorsOf(2, Options("zero3"), prepare),
              Each(AllOf(HasSubstr(kOption), HasSubstr("muster::FusedAdamW"))));
  const auto error = [](const AcceleratorOptions& options) -> std::string {
    try {
      RunAccelerators(1, options, [](Accelerator&) {});
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  EXPECT_THAT(error(Options("no_shard")), AllOf(HasSubstr(kOption), HasSubstr("zero3")));
  AcceleratorOptions clipped = Options("zero3");
  clipped.gradient_clipping = 1.0;
  EXPECT_THAT(error(clipped), AllOf(HasSubstr(kOption), HasSubstr("gradient_clipping")));
  AcceleratorOptions scaled = Options("zero3");
  scaled.mixed_precision = "fp16";
  EXPECT_THAT(error(scaled), AllOf(HasSubstr(kOption), HasSubstr("fp16")));
  const auto train =
      [](const std::function<void(Accelerator&, const at::Tensor&, AcceleratedOptimizer&)>& step) {
        return [step](Accelerator& a) {
          torch::nn::Sequential net = MakeNet();
          FusedAdamW adam(net->parameters());
          auto [model, optimizer] = a.prepare(net, adam);
          step(a, model(Random({4, 5}, 1)).square().mean(), optimizer);
        };
      };
  EXPECT_THAT(
      ErrorsOf(2, Options("zero3"),
               train([](Accelerator& a, const at::Tensor& loss, auto&) { a.backward(loss, 2.0); })),
      Each(AllOf(HasSubstr(kOption), HasSubstr("weight"))));
  EXPECT_THAT(ErrorsOf(2, Options("zero3"),
                       train([](Accelerator&, const at::Tensor& loss, auto& optimizer) {
                         optimizer.step([&] { return loss; });
                       })),
              Each(AllOf(HasSubstr(kOption), HasSubstr("step(closure)"))));
  AcceleratorOptions accumulated = Options("zero3");
  accumulated.gradient_accumulation_steps = 2;
  EXPECT_THAT(ErrorsOf(2, accumulated,
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         FusedAdamW adam(net->parameters());
                         auto [model, optimizer] = a.prepare(net, adam);
                         for (int step = 0; step < 2; ++step) {
                           auto scope = a.accumulate();
                           model(Random({4, 5}, 1)).square().mean().backward();
                         }
                       }),
              Each(AllOf(HasSubstr(kOption), HasSubstr("accelerator.backward"))));
}

TEST_F(OptimizerInBackward, RanksWithOtherSettings_AreNamed) {
  std::vector<std::string> errors(2);
  RunGlooRanks(2, [&](Comm& comm) {
    try {
      Accelerator a(CoreOn(comm, Options("zero3", comm.rank() == 0)));
    } catch (const c10::Error& error) {
      errors[comm.rank()] = error.what_without_backtrace();
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr(kOption)));
}

// A backward pass that throws midway leaves a model that has changed in part.
TEST_F(OptimizerInBackward, PassThatThrows_NeedsACheckpoint) {
  const std::string dir = folder_.Path("before");
  Weights want, got, with_hook;
  for (Weights* const weights : {&want, &got, &with_hook}) {
    const bool fails = weights != &want;
    RunAccelerators(2, Options("zero2"), [&](Accelerator& a) {
      // With a hook, load_state() reads the weights that it is about to replace.
      if (weights == &with_hook) {
        a.register_load_state_pre_hook([](std::vector<NamedTensors>&, const StateReader&) {});
      }
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adam(net->parameters(), {.lr = 0.01});
      auto [model, optimizer] = a.prepare(net, adam);
      const auto step = [&, &model = model, &optimizer = optimizer](int i, bool throws = false) {
        const at::Tensor x = MineOf(a, Random({kSamples, 5}, 100 + i)).requires_grad_();
        at::Tensor loss = model(x).square().mean();
        if (throws) {
          x.register_hook([](at::Tensor) { TORCH_CHECK(false, "a hook throws"); });
        }
        a.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      };
      step(0);
      step(1);
      ASSERT_TRUE(a.save_state(dir).ok());
      if (fails) {
        EXPECT_THROW(step(2, /*throws=*/true), c10::Error);
        for (int again = 0; again < 2; ++again) {
          try {
            step(2);
            ADD_FAILURE() << "trains on";
          } catch (const c10::Error& error) {
            EXPECT_THAT(error.what_without_backtrace(), HasSubstr("changed in part"));
          }
        }
        EXPECT_FALSE(a.save_state(folder_.Path("never")).ok());
        const absl::Status loaded = a.load_state(dir);
        ASSERT_TRUE(loaded.ok()) << loaded;
        optimizer.zero_grad();
      }
      step(2);
      step(3);
      const Weights all = WeightsOf(a, model);
      if (a.is_main_process()) (*weights) = all;
    });
  }
  ExpectEqual(got, want);
  ExpectEqual(with_hook, want);
}

// Fails at the `fails_in`th update, on the thread of the updates.
struct FailingAdamW : FusedAdamW {
  using FusedAdamW::FusedAdamW;
  void Update(int64_t group, const Lists& lists, const std::optional<at::Tensor>& grad_scale,
              const std::optional<at::Tensor>& found_inf) const override {
    if (fails_in > 0 && --fails_in == 0) {
      if (memory) C10_THROW_ERROR(OutOfMemoryError, "can't allocate memory");
      TORCH_CHECK(false, "the optimizer fails");
    }
    FusedAdamW::Update(group, lists, grad_scale, found_inf);
  }
  mutable std::atomic<int> fails_in{0};
  bool memory = false;
};

// An error of one rank's optimizer, in the first pass, which allocates memory for states, or in a
// later one: for the first unit that it updates or for the last.
TEST_F(OptimizerInBackward, ErrorOfAUnitsOptimizerOnOneRank_IsAnErrorOnEveryRank) {
  constexpr int kLayers = 6;
  const std::string dir = folder_.Path("before");
  for (const bool shared_memory : {false, true}) {
    for (const std::string strategy : {"zero1", "zero2", "zero3", "zero3 overlapped"}) {
      AcceleratorOptions options = Options(strategy.substr(0, 5));
      options.sharding->overlap = strategy.size() > 5;
      Weights want;
      for (const int fails_at : {-1, 0, 2}) {  // the number of a step; -1: none
        for (const int fails_in : {1, kLayers}) {
          if (fails_at < 0 && fails_in > 1) continue;
          SCOPED_TRACE(testing::Message() << strategy << ", shared memory " << shared_memory
                                          << ", step " << fails_at << ", unit " << fails_in);
          std::vector<std::string> errors(2), saves(4), forwards(4);
          Weights got;
          const auto store = c10::make_intrusive<c10d::HashStore>();
          (shared_memory ? RunShmRanks : RunGlooRanks)(
              2,
              [&](Comm& comm) {
                Accelerator a(CoreOn(comm, options, store));
                torch::nn::Sequential net;
                // Parts that ranks share in memory.
                const int64_t width = shared_memory ? 520 : 8;
                for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(width, width));
                Fill(*net);
                FailingAdamW adam(net->parameters());
                adam.memory = fails_in == 1;
                auto [model, optimizer] = a.prepare(net, adam);
                const at::Tensor x = at::full({1, width}, 0.01);
                const auto step = [&, &model = model, &optimizer = optimizer] {
                  a.backward(model(x).square().mean());
                  optimizer.step();
                  optimizer.zero_grad();
                };
                for (int i = 0; i < 4; ++i) {
                  if (i != fails_at) {
                    step();
                    continue;
                  }
                  ASSERT_TRUE(a.save_state(dir).ok());
                  if (a.process_index() == 1) adam.fails_in = fails_in;
                  errors[a.process_index()] = ErrorOf(step);
                  for (const int again : {0, 2}) {
                    saves[again + a.process_index()] =
                        std::string(a.save_state(folder_.Path("never")).message());
                    forwards[again + a.process_index()] =
                        ErrorOf([&, &model = model] { model(x); });
                  }
                  const absl::Status loaded = a.load_state(dir);
                  ASSERT_TRUE(loaded.ok()) << loaded;
                  optimizer.zero_grad();
                  step();
                }
                const Weights all = WeightsOf(a, model);
                if (a.is_main_process()) (fails_at < 0 ? want : got) = all;
              },
              {});
          if (fails_at < 0) continue;
          ExpectEqual(got, want);
          EXPECT_THAT(errors,
                      Each(AllOf(HasSubstr("rank 1"), HasSubstr("call load_state()"),
                                 HasSubstr(fails_in == 1 ? "memory" : "the optimizer fails"))));
          EXPECT_THAT(saves, Each(HasSubstr("changed in part")));
          EXPECT_THAT(forwards, Each(HasSubstr("changed in part")));
        }
      }
    }
  }
}

// The optimizer's own step may fail on one rank, too, while the others have stepped; or each rank
// fails at a different place in it.
TEST_F(OptimizerInBackward, StepThatFails_IsAnErrorOnEveryRankUntilALoad) {
  for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
    Weights want;
    for (const int fails : {-1, 1, 2}) {  // rank 1; 2: both; -1: none
      for (const bool saves : {true, false}) {
        if (fails < 0 && saves) continue;
        SCOPED_TRACE(testing::Message() << strategy << ", fails " << fails << ", saves " << saves);
        const std::string dir = folder_.Path("before_step");
        std::vector<std::string> errors(2), next(4);
        Weights got;
        RunAccelerators(2, Options(strategy, /*in_backward=*/false), [&](Accelerator& a) {
          torch::nn::Sequential net = MakeNet();
          FailingAdamW adam({{{net->parameters()[0], net->parameters()[2]}, {.lr = 0.01}},
                             {{net->parameters()[1], net->parameters()[3], net->parameters()[4],
                               net->parameters()[5]},
                              {.lr = 0.02}}});
          if (fails > 0)
            a.register_load_state_pre_hook([](std::vector<NamedTensors>&, const StateReader&) {});
          auto [model, optimizer] = a.prepare(net, adam);
          const at::Tensor x = Random({4, 5}, 1);
          const auto step = [&, &model = model, &optimizer = optimizer] {
            a.backward(model(x).square().mean());
            optimizer.step();
            optimizer.zero_grad();
          };
          step();
          if (fails > 0) {
            ASSERT_TRUE(a.save_state(dir).ok());
            // It updates two groups.
            if (a.process_index() == 1) adam.fails_in = 1;
            if (a.process_index() == 0 && fails == 2) adam.fails_in = 2;
            errors[a.process_index()] = ErrorOf(step);
            for (const int again : {0, 2}) {
              next[again + a.process_index()] = ErrorOf([&] {
                if (!saves) return step();
                const absl::Status saved = a.save_state(folder_.Path("never"));
                TORCH_CHECK(saved.ok(), saved.message());
              });
            }
            const absl::Status loaded = a.load_state(dir);
            ASSERT_TRUE(loaded.ok()) << loaded;
            optimizer.zero_grad();
          }
          step();
          step();
          const Weights all = WeightsOf(a, model);
          if (a.is_main_process()) (fails < 0 ? want : got) = all;
        });
        if (fails < 0) continue;
        EXPECT_THAT(errors[0], HasSubstr(fails == 2 ? "the optimizer fails" : "no error"));
        EXPECT_THAT(errors[1], HasSubstr("the optimizer fails"));
        EXPECT_THAT(next,
                    Each(AllOf(HasSubstr("has failed in a step of an optimizer"),
                               HasSubstr("the optimizer fails"), HasSubstr("call load_state()"))));
        ExpectEqual(got, want);
      }
    }
  }
}

// Fails once, after the exchange at the end of a forward pass.
struct FailsBehindAForwardPass : BorrowedComm {
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    std::vector<std::string> all = BorrowedComm::AllGatherBytes(bytes);
    if (bytes.find("the end of a forward pass") != std::string::npos && armed) {
      armed = false;
      TORCH_CHECK(false, "the exchange fails");
    }
    return all;
  }
  bool armed = false;
};

// Such an error is thrown by the next use of the model: by the announcement of the step to the
// second model, after the announcement to the first one.
TEST_F(OptimizerInBackward, StepThatOneRankHasOnlyAnnounced_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2), next(4);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunShmRanks(2, [&](Comm& world) {
    FailsBehindAForwardPass comm(world);
    Accelerator a(CoreOn(comm, Options("zero3", /*in_backward=*/false), store));
    // Parts that ranks share in memory.
    constexpr int64_t kWidth = 520;
    torch::nn::Sequential one(torch::nn::Linear(kWidth, kWidth));
    torch::nn::Sequential two(torch::nn::Linear(kWidth, kWidth));
    std::vector<at::Tensor> parameters = one->parameters();
    for (const at::Tensor& parameter : two->parameters()) parameters.push_back(parameter);
    FusedSGD sgd(parameters, {.lr = 0.1});
    auto [first, second, optimizer] = a.prepare(one, two, sgd);
    const at::Tensor x = at::full({1, kWidth}, 0.01);
    a.backward((first(x) + second(x)).square().mean());
    comm.armed = comm.rank() == 1;
    second(x);
    errors[comm.rank()] = ErrorOf([&, &optimizer = optimizer] { optimizer.step(); });
    for (const int again : {0, 2}) {
      next[again + comm.rank()] = ErrorOf([&, &first = first] { first(x); });
    }
  });
  EXPECT_THAT(errors, ElementsAre("no error", HasSubstr("the exchange fails")));
  EXPECT_THAT(next, Each(AllOf(HasSubstr("rank 1 has failed in a step of an optimizer"),
                               HasSubstr("the exchange fails"))));
}

// Counts exchanges, and fails after one of them.
struct FailsLater : BorrowedComm {
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    ++exchanges;
    std::vector<std::string> all = BorrowedComm::AllGatherBytes(bytes);
    TORCH_CHECK(fails_in == 0 || --fails_in > 0, "the exchange fails");
    return all;
  }
  int fails_in = 0;
  int exchanges = 0;
};

// The program's own load() may use weights that a step has left as a mixture. A failure after it
// leaves another mixture.
TEST_F(OptimizerInBackward, LoadThatFailsOnItsWay_IsAnErrorUntilALoadThatDoesNot) {
  for (const std::string strategy : {"zero2", "zero3"}) {
    for (const int fails_in : {1, 2, 3}) {  // after registered objects, optimizers, models
      SCOPED_TRACE(testing::Message() << strategy << fails_in);
      const std::string dir = folder_.Path("before_load");
      std::vector<std::string> loads(2), next(4);
      const auto store = c10::make_intrusive<c10d::HashStore>();
      RunShmRanks(2, [&](Comm& world) {
        FailsLater comm(world);
        Accelerator a(CoreOn(comm, Options(strategy, /*in_backward=*/false), store));
        torch::nn::Sequential net = MakeNet();
        FailingAdamW adam(net->parameters(), {.lr = 0.01});
        auto [model, optimizer] = a.prepare(net, adam);
        int arms = 0;
        a.register_for_checkpointing([] { return PlainState(); },
                                     [&, &model = model](const PlainState&) {
                                       a.summon_full_params(model, [] {});
                                       comm.fails_in = std::exchange(arms, 0);
                                     });
        const at::Tensor x = Random({4, 5}, 1);
        const auto step = [&, &model = model, &optimizer = optimizer] {
          a.backward(model(x).square().mean());
          optimizer.step();
          optimizer.zero_grad();
        };
        step();
        ASSERT_TRUE(a.save_state(dir).ok());
        if (comm.rank() == 1) adam.fails_in = 1;
        ErrorOf(step);
        EXPECT_THAT(ErrorOf(step), HasSubstr("rank 1 has failed in a step"));
        arms = fails_in;
        loads[comm.rank()] = std::string(a.load_state(dir).message());
        next[comm.rank()] = ErrorOf(step);
        next[2 + comm.rank()] = std::string(a.save_state(folder_.Path("never")).message());
        const absl::Status loaded = a.load_state(dir);
        ASSERT_TRUE(loaded.ok()) << loaded;
        optimizer.zero_grad();
        step();
        EXPECT_TRUE(a.save_state(folder_.Path("after_load")).ok());
      });
      EXPECT_THAT(loads, Each(HasSubstr("the exchange fails")));
      EXPECT_THAT(next, Each(HasSubstr(fails_in == 1 ? "rank 1 has failed in a step"
                                                     : "load_state() has failed: the state is a "
                                                       "mixture of two now: call load_state()")));
    }
  }
}

// Refused before anything has changed, in either model.
TEST_F(OptimizerInBackward, StepOnTwoModelsInsideASummonOfOne_LeavesBothUsable) {
  RunAccelerators(2, Options("zero3", /*in_backward=*/false), [&](Accelerator& a) {
    torch::nn::Sequential one = MakeNet(), two = MakeNet();
    std::vector<at::Tensor> parameters = one->parameters();
    for (const at::Tensor& parameter : two->parameters()) parameters.push_back(parameter);
    FusedSGD sgd(parameters, {.lr = 0.1});
    auto [first, second, optimizer] = a.prepare(one, two, sgd);
    const at::Tensor x = Random({4, 5}, 1);
    const auto pass = [&, &first = first, &second = second] {
      a.backward((first(x) + second(x)).square().mean());
    };
    pass();
    EXPECT_THAT(ErrorOf([&, &second = second, &optimizer = optimizer] {
                  a.summon_full_params(second, [&] { optimizer.step(); });
                }),
                HasSubstr("inside of summon_full_params()"));
    optimizer.step();
    optimizer.zero_grad();
    pass();
    optimizer.step();
    EXPECT_TRUE(a.save_state(folder_.Path("two")).ok());
  });
}

// In hybrid sharding other ranks may wait for it in their own group.
TEST_F(OptimizerInBackward, SaveAfterAPassThatThrows_MeetsNoOtherRank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunShmRanks(2, [&](Comm& world) {
    FailsLater comm(world);
    Accelerator a(CoreOn(comm, Options("zero2"), store));
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters(), {.lr = 0.01});
    auto [model, optimizer] = a.prepare(net, adam);
    for (const bool throws : {false, false, true}) {
      const at::Tensor x = MineOf(a, Random({kSamples, 5}, 100)).requires_grad_();
      const at::Tensor loss = model(x).square().mean();
      if (throws) x.register_hook([](at::Tensor) { TORCH_CHECK(false, "a hook throws"); });
      const std::string error = ErrorOf([&, &optimizer = optimizer] {
        a.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      });
      EXPECT_THAT(error, HasSubstr(throws ? "a hook throws" : "no error"));
    }
    comm.exchanges = 0;
    EXPECT_THAT(std::string(a.save_state(folder_.Path("never")).message()),
                HasSubstr("changed in part"));
    EXPECT_EQ(comm.exchanges, 0);
  });
}

// A gradient is known to be complete only at the end of the pass, after the exchange there: the
// other rank's pass succeeds.
TEST_F(OptimizerInBackward, LastUpdateThatFailsOnOneRank_IsAnErrorOfTheNextUseOfAllUntilALoad) {
  enum class Next { kSave, kForward, kSummon, kLoadWeights };
  for (const std::string strategy : {"zero2", "zero3"}) {
    Weights want;
    for (const bool fails : {false, true}) {
      for (const Next what : {Next::kSave, Next::kForward, Next::kSummon, Next::kLoadWeights}) {
        if (!fails && what != Next::kSave) continue;
        SCOPED_TRACE(testing::Message() << strategy << static_cast<int>(what));
        const std::string dir = folder_.Path("before_last");
        std::vector<std::string> errors(2), next(4);
        Weights got;
        RunAccelerators(2, Options(strategy), [&](Accelerator& a) {
          auto net = std::make_shared<Branches>();
          FailingAdamW adam(net->parameters(), {.lr = 0.01});
          auto [model, optimizer] = a.prepare(net, adam);
          const at::Tensor ids = at::arange(7, at::kLong);
          // Rank 0, which has the values of the scale, has no gradient for it.
          const auto pass = [&, &model = model](bool all) {
            const int which = all || a.process_index() == 1 ? 15 : 7;
            a.backward(model.call(&Branches::Forward, ids, which).square().mean());
          };
          const auto step = [&, &optimizer = optimizer](bool all) {
            pass(all);
            optimizer.step();
            optimizer.zero_grad();
          };
          step(true);
          step(true);
          if (fails) {
            ASSERT_TRUE(a.save_state(dir).ok());
            if (a.process_index() == 0) adam.fails_in = 5;
            errors[a.process_index()] = ErrorOf([&] { pass(false); });
            // A program whose ranks agree on errors leaves the step out.
            if (what == Next::kLoadWeights && a.process_index() == 1) optimizer.step();
            for (const int again : {0, 2}) {
              next[again + a.process_index()] = ErrorOf([&, &model = model] {
                if (what == Next::kForward) pass(true);
                if (what == Next::kSummon) a.summon_full_params(model, [] {});
                absl::Status done;
                if (what == Next::kSave) done = a.save_state(folder_.Path("never"));
                if (what == Next::kLoadWeights) done = a.load_weights(dir).status();
                TORCH_CHECK(done.ok(), done.message());
              });
            }
            const absl::Status loaded = a.load_state(dir);
            ASSERT_TRUE(loaded.ok()) << loaded;
            optimizer.zero_grad();
          }
          step(false);
          step(true);
          const Weights all = WeightsOf(a, model);
          if (a.is_main_process()) (fails ? got : want) = all;
        });
        if (!fails) continue;
        EXPECT_THAT(errors, ElementsAre(HasSubstr("the optimizer fails"), "no error"));
        if (what == Next::kSave || what == Next::kLoadWeights) {
          EXPECT_THAT(next, Each(AnyOf(HasSubstr("between backward() and optimizer.step()"),
                                       HasSubstr("changed in part"))));
        } else {
          EXPECT_THAT(next, Each(HasSubstr("rank 0 has failed at the end of a backward pass")));
        }
        ExpectEqual(got, want);
      }
    }
  }
}

// Throws before anything is updated.
TEST_F(OptimizerInBackward, LossThatIsNotFiniteOnOneRank_ChangesNothingOnAny) {
  for (const std::string strategy : {"zero2", "zero3"}) {
    std::vector<Weights> runs;
    std::vector<std::string> errors(2);
    for (const bool fails : {false, true}) {
      AcceleratorOptions options = Options(strategy);
      options.check_finite_loss = true;
      RunAccelerators(2, options, [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        FusedAdamW adam(net->parameters());
        auto [model, optimizer] = a.prepare(net, adam);
        for (int step = 0; step < 4; ++step) {
          at::Tensor x = MineOf(a, Random({kSamples, 5}, 100 + step));
          if (fails && step == 2) {
            const double factor =
                a.process_index() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
            errors[a.process_index()] =
                ErrorOf([&, &model = model] { a.backward(model(x * factor).square().mean()); });
          }
          a.backward(model(x).square().mean());
          optimizer.step();
          optimizer.zero_grad();
        }
        const Weights all = WeightsOf(a, model);
        if (a.is_main_process()) runs.push_back(all);
      });
    }
    EXPECT_THAT(errors, Each(HasSubstr("the loss is NaN or infinite on rank 1")));
    ExpectEqual(runs[1], runs[0]);
  }
}

// One rank has the whole unit: the others have updated nothing.
TEST_F(OptimizerInBackward, PassThatThrowsAfterAnUpdateOfOneRank_HasChangedTheModelOnAll) {
  for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
    SCOPED_TRACE(strategy);
    std::vector<std::string> passes(2), next(2);
    RunAccelerators(2, Options(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4),
                                torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
      FusedAdamW adam(net->parameters());
      auto [model, optimizer] = a.prepare(net, adam);
      EXPECT_EQ(model.slot()->sharded()->units().back()->slices()[0].shard.numel(),
                a.process_index() == 0 ? 16 : 0);
      const auto step = [&, &model = model, &optimizer = optimizer](bool throws) {
        const at::Tensor loss = model.call([&](torch::nn::SequentialImpl& layers) {
          at::Tensor x = Random({2, 4}, 5);
          for (size_t i = 0; i < layers.size(); ++i) {
            // When the last unit is reduced and updated.
            if (i == 1 && throws) {
              x.register_hook([](at::Tensor) { TORCH_CHECK(false, "a hook throws"); });
            }
            x = layers[i]->as<torch::nn::Linear>()->forward(x);
          }
          return x.square().mean();
        });
        a.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      };
      step(false);
      step(false);
      passes[a.process_index()] = ErrorOf([&] { step(true); });
      next[a.process_index()] = ErrorOf([&] { step(false); });
      a.wait_for_everyone();
    });
    EXPECT_THAT(passes, Each(HasSubstr("a hook throws")));
    EXPECT_THAT(next, Each(HasSubstr("changed in part")));
  }
}

// The others are in the backward pass that this rank has left.
TEST_F(OptimizerInBackward, HookThatThrowsOnOneRank_IsAnErrorOnEveryRankAndNothingIsSaved) {
  for (const bool shared_memory : {false, true}) {
    for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
      for (const int fails_at : {0, 2}) {
        for (const bool saves : {true, false}) {
          SCOPED_TRACE(testing::Message() << strategy << ", shared memory " << shared_memory
                                          << ", step " << fails_at << ", saves " << saves);
          std::vector<std::string> errors(2);
          std::string saved;
          const auto store = c10::make_intrusive<c10d::HashStore>();
          (shared_memory ? RunShmRanks : RunGlooRanks)(
              2,
              [&](Comm& comm) {
                Accelerator a(CoreOn(comm, Options(strategy), store));
                torch::nn::Sequential net;
                const int64_t width = shared_memory ? 520 : 8;
                for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(width, width));
                FusedAdamW adam(net->parameters());
                auto [model, optimizer] = a.prepare(net, adam);
                errors[a.process_index()] = ErrorOf([&, &model = model, &optimizer = optimizer] {
                  for (int i = 0; i < 4; ++i) {
                    const at::Tensor loss = model.call([&](torch::nn::SequentialImpl& layers) {
                      at::Tensor x = at::full({1, width}, 0.01);
                      for (size_t l = 0; l < layers.size(); ++l) {
                        if (l == 2 && i == fails_at && a.process_index() == 1) {
                          x.register_hook([](at::Tensor) { TORCH_CHECK(false, "a hook throws"); });
                        }
                        x = layers[l]->as<torch::nn::Linear>()->forward(x);
                      }
                      return x.square().mean();
                    });
                    a.backward(loss);
                    optimizer.step();
                    optimizer.zero_grad();
                  }
                });
                if (a.process_index() != 1) return;
                if (saves) {
                  saved = std::string(a.save_state(folder_.Path("never")).message());
                } else {
                  saved = ErrorOf([&, &model = model] { model(at::full({1, width}, 0.01)); });
                }
              },
              {});
          EXPECT_THAT(errors[1], HasSubstr("a hook throws"));
          EXPECT_THAT(errors[0], AllOf(Not("no error"), HasSubstr("rank")));
          EXPECT_THAT(saved, Not(AnyOf("", "no error")));
        }
      }
    }
  }
}

// The first step updates at the end of the pass: nothing has changed before that.
TEST_F(OptimizerInBackward, PassThatThrowsBeforeAnUpdate_IsRepeatedAtAnotherRate) {
  Weights want, got;
  for (const bool fails : {false, true}) {
    RunAccelerators(2, Options("zero2"), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adam(net->parameters(), {.lr = fails ? 1.0 : 0.01});
      auto [model, optimizer] = a.prepare(net, adam);
      const at::Tensor x = MineOf(a, Random({kSamples, 5}, 100)).requires_grad_();
      if (fails) {
        const at::Tensor loss = model(x).square().mean();
        x.register_hook([](at::Tensor) { TORCH_CHECK(false, "a hook throws"); });
        EXPECT_THROW(a.backward(loss), c10::Error);
        optimizer.zero_grad();
        optimizer.set_lr(0.01);
      }
      for (int step = 0; step < 2; ++step) {
        a.backward(model(x.detach()).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      const Weights all = WeightsOf(a, model);
      if (a.is_main_process()) (fails ? got : want) = all;
    });
  }
  ExpectEqual(got, want);
}

// At most two units wait: when the first layer runs backward, the last ones are updated.
TEST_F(OptimizerInBackward, LastUnit_IsUpdatedWhileTheFirstOneGoesBackward) {
  constexpr int kLayers = 6;
  for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
    RunAccelerators(2, Options(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net;
      for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(8, 8));
      FusedAdamW adam(net->parameters());
      auto [model, optimizer] = a.prepare(net, adam);
      const ShardedModel& sharded = *model.slot()->sharded();
      const at::Tensor last = sharded.units().back()->slices().front().shard;
      for (int step = 0; step < 3; ++step) {
        bool updated = false;
        const at::Tensor loss = model.call([&](torch::nn::SequentialImpl& layers) {
          at::Tensor x = layers[0]->as<torch::nn::Linear>()->forward(Random({2, 8}, 5));
          x.register_hook(
              [&](at::Tensor) { updated = last.grad().is_same(ShardUnit::UsedGradientMark()); });
          for (size_t i = 1; i < layers.size(); ++i) {
            x = layers[i]->as<torch::nn::Linear>()->forward(x);
          }
          return x.square().mean();
        });
        a.backward(loss);
        // The first step determines the order in which gradients arrive.
        if (last.numel() > 0) {
          EXPECT_EQ(updated, step > 0) << strategy;
        }
        optimizer.step();
        optimizer.zero_grad();
      }
    });
  }
}

TEST_F(OptimizerInBackward, GradientsOfAFewUnits_ExistAtATime) {
  constexpr int kLayers = 24;
  constexpr int64_t kWidth = 128;
  constexpr int64_t kUnitBytes = 4 * (kWidth * kWidth + kWidth);
  CountingAllocator& memory = CountingAllocator::Get();
  for (const int ranks : {1, 2}) {
    // The bytes above those between steps, on all ranks.
    std::map<bool, int64_t> peak, after;
    for (const bool in_backward : {false, true}) {
      // Not over Gloo, whose threads hold tensors for a while after a collective has ended.
      RunRanks(ranks, [&](Comm& comm) {
        Accelerator a(CoreOn(comm, Options("zero2", in_backward)));
        torch::nn::Sequential net;
        for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
        FusedAdamW adam(net->parameters());
        auto [model, optimizer] = a.prepare(net, adam);
        int64_t before = 0;
        for (int step = 0; step < 3; ++step) {
          a.wait_for_everyone();
          if (a.is_main_process()) {
            memory.ResetPeak();
            before = memory.live();
          }
          a.wait_for_everyone();
          a.backward(model(Random({1, kWidth}, 5)).square().mean());
          a.wait_for_everyone();
          if (a.is_main_process()) {
            peak[in_backward] = memory.peak() - before;
            after[in_backward] = memory.live() - before;
          }
          a.wait_for_everyone();
          optimizer.step();
          optimizer.zero_grad();
        }
      });
    }
    SCOPED_TRACE(ranks);
    // All gradients of the model, in parts: together as large as one model.
    EXPECT_GE(after[false], kLayers * kUnitBytes - kUnitBytes / 4);
    EXPECT_LE(after[true], kUnitBytes / 4);
    // Whole gradients and copies of two units on each rank, and the parts of three, which are being
    // reduced, wait, or are being updated.
    EXPECT_LE(peak[true], (ranks * 4 + 4) * kUnitBytes);
  }
}

TEST_F(OptimizerInBackward, Environment_CountsWhereTheProgramSaysNothing) {
  RunGlooRanks(1, [&](Comm& comm) {
    JoinedProcess process;
    process.environment.sharding = {"zero3", "MUSTER_SHARDING"};
    process.environment.optimizer_in_backward = {true, "MUSTER_OPTIMIZER_IN_BACKWARD"};
    process.comm = std::make_unique<BorrowedComm>(comm);
    const internal::Core core({}, std::move(process));
    EXPECT_TRUE(core.process().sharding().optimizer_in_backward);
  });
}

}  // namespace
}  // namespace muster
