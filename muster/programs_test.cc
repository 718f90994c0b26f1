// Loops as people write them: folds, epochs with several loops, beginnings and ends of steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "muster/accelerator.h"
#include "muster/internal/core.h"
#include "muster/test_model.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/optim/adamw.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/schedulers/reduce_on_plateau_scheduler.h"
#include "torch/optim/schedulers/step_lr.h"
#include "torch/optim/sgd.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

AcceleratorOptions Accumulating(int64_t steps) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = steps;
  return options;
}

at::Tensor Rows(int64_t n) { return at::arange(n, at::kFloat).unsqueeze(1); }

// --- zero_grad ---

enum class Zero { kHead, kTail, kBoth };

double WeightAfter(Zero where, int64_t accumulation, int ranks) {
  double weight = 0;
  RunAccelerators(ranks, Accumulating(accumulation), [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1.0).momentum(0.5));
    auto [model, optimizer, loader] = a.prepare(net, sgd, batches(TensorDataset(Rows(10)), 1));
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : loader) {
        auto scope = a.accumulate();
        if (where != Zero::kTail) optimizer.zero_grad();
        a.backward(Loss(model(batch.value())));
        optimizer.step();
        if (where != Zero::kHead) optimizer.zero_grad();
      }
    }
    if (a.is_main_process()) weight = net->weight.item<double>();
  });
  return weight;
}

TEST(ZeroGrad, AtTheHeadOfAMicroStep_IsAsGoodAsAtItsEnd) {
  for (const int ranks : {1, 2}) {
    for (const int64_t accumulation : {1, 2, 3}) {
      const double tail = WeightAfter(Zero::kTail, accumulation, ranks);
      EXPECT_NEAR(WeightAfter(Zero::kHead, accumulation, ranks), tail, 1e-5);
      EXPECT_NEAR(WeightAfter(Zero::kBoth, accumulation, ranks), tail, 1e-5);
      EXPECT_GT(tail, 0);
    }
  }
}

using MicroStepOf = std::function<void(AcceleratedOptimizer&, Accelerator&, int i,
                                       const std::function<void()>& backward)>;

// Windows of four micro-steps by hand, as in a program for DDP: each complete one adds 10 to the
// weight. `windows`: how many micro-steps each has; a shorter one is abandoned. `between`: called
// after each window.
double WeightAfterNoSync(
    const std::string& strategy, int ranks, const std::vector<int>& windows,
    const MicroStepOf& micro_step,
    const std::function<void(AcceleratedOptimizer&)>& between = [](AcceleratedOptimizer&) {}) {
  AcceleratorOptions options;
  options.sharding = ParseSharding(strategy, ranks);
  double weight = 0;
  RunAccelerators(ranks, options, [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    for (const int micro_steps : windows) {
      for (int i = 0; i < micro_steps; ++i) {
        const auto run = [&] {
          micro_step(optimizer, a, i, [&] { a.backward(Loss(model(at::full({1, 1}, 1.0 + i)))); });
        };
        if (i == 3) {
          run();
          continue;
        }
        auto scope = a.no_sync();
        run();
      }
      between(optimizer);
    }
    const auto weights = WeightsOf(a, model);
    if (a.is_main_process()) weight = weights.at("weight").item<double>();
  });
  return weight;
}

TEST(ZeroGrad, AtTheHeadOfAWindowOfNoSync_ForgetsTheGradientsOfTheOneBefore) {
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
      const double weight = WeightAfterNoSync(
          strategy, ranks, {4, 4, 2, 4}, [](auto& optimizer, auto&, int i, const auto& backward) {
            if (i == 0) optimizer.zero_grad();
            backward();
            if (i == 3) optimizer.step();
          });
      EXPECT_EQ(weight, 30) << strategy << " " << ranks;
    }
  }
}

TEST(ZeroGrad, WithAStepInNoSync_IsLeftOutAsTheStepIs) {
  for (const int ranks : {1, 2}) {
    const double weight = WeightAfterNoSync("no_shard", ranks, {4, 4, 4},
                                            [](auto& optimizer, auto&, int, const auto& backward) {
                                              backward();
                                              optimizer.step();
                                              optimizer.zero_grad();
                                            });
    EXPECT_EQ(weight, 30) << ranks;
  }
}

TEST(ZeroGrad, AtTheHeadWithAStepInNoSync_KeepsTheWindow) {
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero2"}) {
      for (const bool scoped : {false, true}) {
        const double weight = WeightAfterNoSync(
            strategy, ranks, {4, 4, 4}, [&](auto& optimizer, auto& a, int, const auto& backward) {
              std::optional<internal::AccumulateScope> scope;
              if (scoped) scope.emplace(a.accumulate());
              optimizer.zero_grad();
              backward();
              optimizer.step();
            });
        EXPECT_EQ(weight, 30) << strategy << " " << ranks << scoped;
      }
    }
  }
}

TEST(ZeroGrad, OutsideOfNoSyncBeforeANewWindow_GivesUpTheOneWithoutAStep) {
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero2"}) {
      const double weight = WeightAfterNoSync(
          strategy, ranks, {4, 2, 4, 4},
          [&](auto& optimizer, auto&, int, const auto& backward) {
            optimizer.zero_grad();
            backward();
            optimizer.step();
          },
          [](auto& optimizer) { optimizer.zero_grad(); });
      EXPECT_EQ(weight, 30) << strategy << " " << ranks;
    }
  }
}

TEST(SaveState, BetweenAPassOfNoSyncAndItsStep_WarnsThatItsGradientsAreNotSaved) {
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero2", "zero3"}) {
      AcceleratorOptions options;
      options.sharding = ParseSharding(strategy, ranks);
      const std::string folder = TestDir("no_sync");
      RunAccelerators(ranks, options, [&](Accelerator& a) {
        SCOPED_TRACE(strategy);
        torch::nn::Linear net = OneWeight();
        torch::optim::SGD sgd(net->parameters(), 1.0);
        auto [model, optimizer] = a.prepare(net, sgd);
        const auto backward = [&, &model = model](bool in_no_sync) {
          std::optional<internal::NoSyncScope> scope;
          if (in_no_sync) scope.emplace(&a.core());
          a.backward(Loss(model(at::full({1, 1}, 1.0))));
        };
        ASSERT_TRUE(a.save_state(folder).ok());
        backward(/*in_no_sync=*/true);
        if (a.is_main_process()) testing::internal::CaptureStderr();
        a.wait_for_everyone();
        EXPECT_TRUE(a.save_state(folder).ok());
        a.wait_for_everyone();
        if (a.is_main_process()) {
          EXPECT_THAT(testing::internal::GetCapturedStderr(),
                      HasSubstr("save_state between backward() under no_sync() and the step"));
        }
        EXPECT_THAT(a.load_weights(folder).status().ToString(),
                    HasSubstr("load_weights between backward() under no_sync() and the step"));
        optimizer.zero_grad();
        EXPECT_TRUE(a.save_state(folder).ok());
        backward(/*in_no_sync=*/true);
        backward(/*in_no_sync=*/false);
        optimizer.step();
        EXPECT_TRUE(a.save_state(folder).ok());
        backward(/*in_no_sync=*/true);
        EXPECT_TRUE(a.load_state(folder).ok());
        EXPECT_TRUE(a.save_state(folder).ok());
      });
    }
  }
}

TEST(ZeroGrad, WindowThatIsGivenUp_LeavesNothingForTheNext) {
  RunAccelerators(1, Accumulating(2), [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int i = 0; i < 4; ++i) {
      auto scope = a.accumulate();
      a.backward(Loss(model(at::full({1, 1}, i < 2 ? 100.0 : 1.0))));
      if (i == 1) {
        optimizer.zero_grad();
        continue;
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(net->weight.item<double>(), 1);
  });
}

TEST(ZeroGrad, OfTheModuleInTheMiddleOfAWindow_IsRefused) {
  const auto errors = ErrorsOf(1, Accumulating(2), [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int i = 0; i < 2; ++i) {
      auto scope = a.accumulate();
      model->zero_grad();
      a.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr("gradients of this accumulation window are gone")));
}

TEST(ZeroGrad, TwoOptimizersInOneMicroStep_ForgetEachTheirOwn) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    torch::nn::Linear g = OneWeight(), d = OneWeight();
    torch::optim::SGD sgd_g(g->parameters(), 1.0), sgd_d(d->parameters(), 1.0);
    auto [generator, critic, step_g, step_d] = a.prepare(g, d, sgd_g, sgd_d);
    {
      at::NoGradGuard no_grad;
      d->weight.fill_(1);
      g->weight.fill_(1);
    }
    for (int i = 0; i < 2; ++i) {
      auto scope = a.accumulate();
      step_d.zero_grad();
      // Not detached: the gradients that it leaves in the generator must be forgotten.
      a.backward(critic(generator(at::ones({1, 1}))).mean() * 0.5);
      step_d.step();
      step_g.zero_grad();
      a.backward(-generator(at::ones({1, 1})).mean());
      step_g.step();
    }
    EXPECT_EQ(g->weight.item<double>(), 3);
  });
}

double WeightWithStepAfterTheBlock(bool zero_at_the_head) {
  double weight = 0;
  RunAccelerators(1, Accumulating(2), [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int i = 0; i < 6; ++i) {
      {
        auto scope = a.accumulate();
        if (zero_at_the_head) optimizer.zero_grad();
        a.backward(Loss(model(at::full({1, 1}, 1.0 + i))));
      }
      if (a.sync_gradients()) {
        optimizer.step();
        if (!zero_at_the_head) optimizer.zero_grad();
      }
    }
    weight = net->weight.item<double>();
  });
  return weight;
}

TEST(ZeroGrad, AtTheHeadWithTheStepAfterTheBlock_LosesNothing) {
  EXPECT_NEAR(WeightWithStepAfterTheBlock(true), 10.5, 1e-5);
  EXPECT_NEAR(WeightWithStepAfterTheBlock(false), 10.5, 1e-5);
}

// --- loss.backward() ---

TEST(RawBackward, WhereItWouldTrainWrongly_IsRefused) {
  const auto train = [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int64_t i = 0; i < a.gradient_accumulation_steps(); ++i) {
      auto scope = a.accumulate();
      Loss(model(at::ones({1, 1}))).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(net->weight.item<double>(), 1);
  };
  EXPECT_THAT(ErrorsOf(2, {}, train), Each(""));
  EXPECT_THAT(ErrorsOf(2, Accumulating(2), train), Each(HasSubstr("accelerator.backward(loss)")));
  AcceleratorOptions half;
  half.mixed_precision = "fp16";
  EXPECT_THAT(ErrorsOf(1, half, train), Each(HasSubstr("accelerator.backward(loss)")));
}

// One backward pass through the accelerator and one that bypasses it.
TEST(RawBackward, BesideBackward_IsRefusedWhereItWouldTrainWrongly) {
  const auto train = [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 0.25});
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int64_t i = 0; i < a.gradient_accumulation_steps(); ++i) {
      auto scope = a.accumulate();
      a.backward(Loss(model(at::ones({1, 1}))));
      Loss(model(at::ones({1, 1}))).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  const auto wrong = HasSubstr("come from loss.backward(), at least in part (that of parameter");
  AcceleratorOptions half;
  half.mixed_precision = "fp16";
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
      AcceleratorOptions plain = {}, accumulating = Accumulating(2), scaled = half;
      for (AcceleratorOptions* options : {&plain, &accumulating, &scaled}) {
        options->sharding = ParseSharding(strategy, ranks);
      }
      // Data parallelism averages once per forward pass.
      if (ranks == 1 || strategy != std::string("no_shard")) {
        EXPECT_THAT(ErrorsOf(ranks, plain, train), Each("")) << strategy << ranks;
      }
      EXPECT_THAT(ErrorsOf(ranks, accumulating, train), Each(wrong)) << strategy << ranks;
      EXPECT_THAT(ErrorsOf(ranks, scaled, train), Each(wrong)) << strategy << ranks;
    }
  }
}

// Two optimizers, one of which has losses that bypass backward(): an earlier step of the other one
// does not hide that. Also outside accumulate().
TEST(RawBackward, OfTheSecondOfTwoModels_IsRefusedUnderFp16) {
  AcceleratorOptions half;
  half.mixed_precision = "fp16";
  for (const int ranks : {1, 2}) {
    EXPECT_THAT(ErrorsOf(ranks, half,
                         [](Accelerator& a) {
                           torch::nn::Linear first = OneWeight(), second = OneWeight();
                           FusedSGD of_first(first->parameters(), {.lr = 0.25});
                           FusedSGD of_second(second->parameters(), {.lr = 0.25});
                           auto [one, two, optimizer, other] =
                               a.prepare(first, second, of_first, of_second);
                           a.backward(Loss(one(at::ones({1, 1}))));
                           optimizer.step();
                           optimizer.zero_grad();
                           Loss(two(at::ones({1, 1}))).backward();
                           other.step();
                         }),
                Each(HasSubstr("come from loss.backward()")))
        << ranks;
  }
}

TEST(RawBackward, ThatLeavesNoGradients_IsNoMistake) {
  RunAccelerators(1, Accumulating(2), [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 0.25});
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor x = at::ones({1, 1}).requires_grad_();
    for (int i = 0; i < 2; ++i) {
      auto scope = a.accumulate();
      // A penalty on the gradient of the input, which adds to no parameter's gradient.
      (void)torch::autograd::grad({Loss(model(x))}, {x}, {}, std::nullopt, /*create_graph=*/true);
      if (i == 0) {
        Loss(model(x)).backward();  // to look at the gradients
        net->zero_grad();
      }
      a.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(optimizer.steps(), 1);
  });
}

// --- An optimizer that was not prepared, beside one that was ---

// Returns the error of the last backward pass after some steps. `micro_steps`: the other optimizer
// steps after each of them, and not only at the ends of windows.
std::string ErrorOfStray(const AcceleratorOptions& options, bool clips = false,
                         bool micro_steps = false) {
  return ErrorsOf(2, options, [&](Accelerator& a) {
    torch::nn::Sequential net(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1));
    FusedSGD last(net[1]->parameters(), {.lr = 0.01});
    torch::optim::SGD stray(net[0]->parameters(), 0.01);
    auto [model, optimizer] = a.prepare(net, last);
    for (int step = 0; step < 4; ++step) {
      auto scope = a.accumulate();
      a.backward(Loss(model(at::ones({1, 1}))));
      if (clips && a.sync_gradients()) a.clip_grad_norm_(net->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
      if (a.sync_gradients() || micro_steps) {
        stray.step();
        stray.zero_grad();
      }
    }
  })[0];
}

TEST(OptimizerThatIsNotPrepared, StepsOnGradientsThatAreNotWhole_AndIsRefused) {
  EXPECT_EQ(ErrorOfStray({}), "");
  AcceleratorOptions half;
  half.mixed_precision = "fp16";
  EXPECT_THAT(ErrorOfStray(half), AllOf(HasSubstr("parameter '0.weight' of a prepared model"),
                                        HasSubstr("hold the loss scale")));
  AcceleratorOptions clipping;
  clipping.gradient_clipping = 1;
  EXPECT_THAT(ErrorOfStray(clipping), HasSubstr("options.gradient_clipping"));
  EXPECT_EQ(ErrorOfStray(clipping, /*clips=*/true), "");
  EXPECT_EQ(ErrorOfStray(Accumulating(2)), "");
  EXPECT_THAT(ErrorOfStray(Accumulating(2), false, /*micro_steps=*/true),
              HasSubstr("a part of the accumulation window"));
}

// Trains the second of two layers, with clipping, and calls `between` after each of three steps.
void TrainTheLast(
    const std::function<void(Accelerator&, torch::nn::Sequential&, int step)>& between) {
  AcceleratorOptions clipping;
  clipping.gradient_clipping = 1;
  RunAccelerators(1, clipping, [&](Accelerator& a) {
    torch::nn::Sequential net(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1));
    FusedSGD last(net[1]->parameters(), {.lr = 0.01});
    auto [model, optimizer] = a.prepare(net, last);
    for (int step = 0; step < 3; ++step) {
      a.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
      optimizer.zero_grad();
      between(a, net, step);
    }
  });
}

// Weights that are not trained may change: by a checkpoint, by an average.
TEST(OptimizerThatIsNotPrepared, LoadedState_IsNotTakenForItsStep) {
  const std::string dir = TestDir("stray");
  TrainTheLast([&](Accelerator& a, torch::nn::Sequential&, int step) {
    if (step == 0) {
      ASSERT_TRUE(a.save_state(dir).ok());
    }
    if (step == 1) {
      ASSERT_TRUE(a.load_state(dir).ok());
    }
  });
}

TEST(OptimizerThatIsNotPrepared, LoadedWeights_AreNotTakenForItsStep) {
  const std::string dir = TestDir("stray_weights");
  RunAccelerators(1, {}, [&](Accelerator& a) {
    auto model = a.prepare(torch::nn::Sequential(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1)));
    ASSERT_TRUE(a.save_state(dir).ok());
  });
  TrainTheLast([&](Accelerator& a, torch::nn::Sequential& net, int step) {
    if (step != 1) return;
    const at::Tensor before = net[0]->parameters()[0].clone();
    const auto loaded = a.load_weights(dir);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_FALSE(net[0]->parameters()[0].equal(before));
  });
}

TEST(OptimizerThatIsNotPrepared, ValuesThatArePutBack_AreNotTakenForItsStep) {
  TrainTheLast([](Accelerator&, torch::nn::Sequential& net, int) {
    // An average, for example, that is evaluated in place of the weights.
    const at::NoGradGuard no_grad;
    at::Tensor weight = net[0]->parameters()[0];
    const at::Tensor backup = weight.clone();
    weight.zero_();
    weight.copy_(backup);
  });
}

TEST(OptimizerThatIsNotPrepared, GradientsClippedByValue_MayBeSteppedOn) {
  AcceleratorOptions clipping;
  clipping.gradient_clipping = 1;
  RunAccelerators(1, clipping, [](Accelerator& a) {
    torch::nn::Sequential net(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1));
    FusedSGD last(net[1]->parameters(), {.lr = 0.01});
    torch::optim::SGD stray(net[0]->parameters(), 0.01);
    auto [model, optimizer] = a.prepare(net, last);
    for (int step = 0; step < 3; ++step) {
      a.backward(Loss(model(at::ones({1, 1}))));
      a.clip_grad_value_(net[0]->parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
      stray.step();
      stray.zero_grad();
    }
  });
}

AcceleratorOptions HalfAndClipping() {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.gradient_clipping = 1;
  return options;
}

// Teacher and student in one loss; `after_step` acts on the teacher after each step.
std::string ErrorOfTeacher(
    const std::function<void(std::vector<at::Tensor>& teacher,
                             const std::vector<at::Tensor>& student)>& follow) {
  return ErrorsOf(2, HalfAndClipping(), [&](Accelerator& a) {
    torch::nn::Sequential student(torch::nn::Linear(4, 3), torch::nn::Linear(3, 1));
    torch::nn::Sequential teacher(torch::nn::Linear(4, 3), torch::nn::Linear(3, 1));
    FusedSGD sgd(student->parameters(), {.lr = 0.01});
    auto [model, averaged, optimizer] = a.prepare(student, teacher, sgd);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = at::ones({2, 4}) * (step + 1);
      // The teacher gets gradients, too, which are never used.
      a.backward(Loss(model(x)) + Loss(averaged(x)));
      optimizer.step();
      optimizer.zero_grad();
      teacher->zero_grad();
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> followers = teacher->parameters();
      follow(followers, student->parameters());
    }
  })[0];
}

TEST(OptimizerThatIsNotPrepared, AverageOfTheModel_IsNotTakenForItsStep) {
  for (const double weight : {0.001, 0.5, 1.0}) {
    EXPECT_EQ(ErrorOfTeacher([&](auto& teacher, const auto& student) {
                for (size_t i = 0; i < teacher.size(); ++i) teacher[i].lerp_(student[i], weight);
              }),
              "");
  }
  EXPECT_EQ(ErrorOfTeacher([&](auto& teacher, const auto& student) {
              for (size_t i = 0; i < teacher.size(); ++i) {
                teacher[i].mul_(0.9).add_(student[i], 0.1);
              }
            }),
            "");
  EXPECT_THAT(ErrorOfTeacher([&](auto& teacher, const auto&) {
                for (at::Tensor& parameter : teacher) parameter.sub_(0.01);
              }),
              HasSubstr("that was not given to prepare()"));
}

// Two critics and their targets, and a model on which a stray optimizer may step.
std::string ErrorOfTargets(bool stray) {
  return ErrorsOf(1, HalfAndClipping(), [&](Accelerator& a) {
    std::vector<torch::nn::Linear> critics, targets;
    for (int i = 0; i < 2; ++i) {
      critics.emplace_back(4, 3);
      targets.emplace_back(4, 3);
    }
    torch::nn::Bilinear other(2, 2, 2);
    std::vector<at::Tensor> trained = critics[0]->parameters();
    for (const at::Tensor& parameter : critics[1]->parameters()) trained.push_back(parameter);
    FusedSGD sgd(trained, {.lr = 0.01});
    auto [target0, target1, one, critic0, critic1, optimizer] =
        a.prepare(targets[0], targets[1], other, critics[0], critics[1], sgd);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = at::ones({2, 4}), y = at::ones({2, 2});
      a.backward(Loss(critic0(x)) + Loss(critic1(x)) + Loss(target0(x)) + Loss(target1(x)) +
                 Loss(one(y, y)));
      optimizer.step();
      optimizer.zero_grad();
      const at::NoGradGuard no_grad;
      for (int i = 0; i < 2; ++i) {
        targets[i]->zero_grad();
        targets[i]->weight.lerp_(critics[i]->weight, 0.1);
        targets[i]->bias.lerp_(critics[i]->bias, 0.1);
      }
      other->zero_grad();
      if (stray) other->weight.sub_(0.01);
    }
  })[0];
}

TEST(OptimizerThatIsNotPrepared, IsNamedBesideAverages_OfWhichEachModelHasItsOwn) {
  EXPECT_EQ(ErrorOfTargets(false), "");
  EXPECT_THAT(ErrorOfTargets(true), HasSubstr("parameter 'weight' of a prepared model"));
}

TEST(OptimizerThatIsNotPrepared, CopyOfOwnMasterWeights_IsNotTakenForItsStep) {
  RunAccelerators(1, HalfAndClipping(), [](Accelerator& a) {
    torch::nn::Linear net(4, 3);
    std::vector<at::Tensor> masters;
    for (const at::Tensor& parameter : net->parameters()) {
      masters.push_back(parameter.detach().to(at::kDouble).clone().requires_grad_());
    }
    FusedSGD sgd(masters, {.lr = 0.01});
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor before = net->weight.detach().clone();
    for (int step = 0; step < 4; ++step) {
      a.backward(Loss(model(at::ones({2, 4}))));
      std::vector<at::Tensor> parameters = net->parameters();
      for (size_t i = 0; i < masters.size(); ++i) {
        masters[i].mutable_grad() = parameters[i].grad().to(at::kDouble);
        parameters[i].mutable_grad().reset();
      }
      optimizer.step();
      optimizer.zero_grad();
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < masters.size(); ++i) parameters[i].copy_(masters[i]);
    }
    EXPECT_FALSE(at::equal(net->weight, before));
  });
}

TEST(TwoOptimizers, OfGeneratorAndDiscriminator_AreNoStrays) {
  EXPECT_EQ(ErrorsOf(2, HalfAndClipping(),
                     [](Accelerator& a) {
                       torch::nn::Linear generator(3, 4), discriminator(4, 1);
                       FusedSGD of_generator(generator->parameters(), {.lr = 0.01});
                       FusedSGD of_discriminator(discriminator->parameters(), {.lr = 0.01});
                       auto [g, d, g_optimizer, d_optimizer] =
                           a.prepare(generator, discriminator, of_generator, of_discriminator);
                       for (int step = 0; step < 3; ++step) {
                         const at::Tensor fake = g(at::ones({2, 3}));
                         a.backward(Loss(d(fake.detach())));
                         d_optimizer.step();
                         d_optimizer.zero_grad();
                         a.backward(Loss(d(fake)));
                         g_optimizer.step();
                         g_optimizer.zero_grad();
                         d_optimizer.zero_grad();
                       }
                     })[0],
            "");
}

// One optimizer steps in every iteration, and its first step overflows; the other one has added to
// its gradients meanwhile, here or in no_sync().
TEST(TwoOptimizers, Fp16ScaleThatChangesForOne_IsThatOfTheGradientsOfTheOther) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;  // a gradient of 1 fits into fp16, and one of 100 does not
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero2"}) {
      for (const bool local : {false, true}) {
        options.sharding = ParseSharding(strategy, ranks);
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          torch::nn::Linear one = OneWeight(), other = OneWeight();
          FusedSGD sgd_one(one->parameters(), {.lr = 1}), sgd_other(other->parameters(), {.lr = 1});
          auto [often, seldom, step_often, step_seldom] = a.prepare(one, other, sgd_one, sgd_other);
          if (local) {
            auto scope = a.no_sync();
            a.backward(Loss(seldom(at::ones({1, 1}))));
          } else {
            a.backward(Loss(seldom(at::ones({1, 1}))));
          }
          a.backward(Loss(often(at::full({1, 1}, 100.0))));
          step_often.step();
          EXPECT_TRUE(step_often.step_was_skipped());
          step_often.zero_grad();
          a.backward(Loss(seldom(at::ones({1, 1}))));
          step_seldom.step();
          EXPECT_FALSE(step_seldom.step_was_skipped());
          EXPECT_EQ(a.core().steps().scaler()->scale(), 512);
          const auto weights = WeightsOf(a, seldom);
          if (!a.is_main_process()) return;
          EXPECT_EQ(weights.at("weight").item<double>(), 2) << strategy << " " << ranks << local;
        });
      }
    }
  }
}

// The second one steps twice: once alone, and once behind the first one, whose step is then the
// last at that scale, and changes it.
TEST(TwoOptimizers, Fp16ScaleThatChangesAfterClipping_LeavesWhatWasClippedAsItIs) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero2"}) {
      for (const bool overflows : {false, true}) {
        options.sharding = ParseSharding(strategy, ranks);
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          torch::nn::Linear one = OneWeight(), other = OneWeight();
          FusedSGD sgd_one(one->parameters(), {.lr = 1}), sgd_other(other->parameters(), {.lr = 1});
          auto [first, second, step_first, step_second] = a.prepare(one, other, sgd_one, sgd_other);
          auto scope = a.accumulate();
          a.backward(Loss(second(at::ones({1, 1}))));
          step_second.step();
          step_second.zero_grad();
          a.backward(Loss(first(at::full({1, 1}, overflows ? 100.0 : 1.0))) +
                     Loss(second(at::ones({1, 1}))));
          a.unscale_gradients();
          step_first.step();
          EXPECT_EQ(step_first.step_was_skipped(), overflows);
          EXPECT_EQ(a.core().steps().scaler()->scale(), overflows ? 512 : 1024);
          step_second.step();
          EXPECT_FALSE(step_second.step_was_skipped());
          const auto weights = WeightsOf(a, second);
          if (!a.is_main_process()) return;
          EXPECT_EQ(weights.at("weight").item<double>(), 2) << strategy << ranks << overflows;
        });
      }
    }
  }
}

TEST(Fp16, TwoStepsOnTheSameGradients_AreEqualOnes) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;  // the usual one overflows in the gradient of the output
  for (const int ranks : {1, 2}) {
    RunAccelerators(ranks, options, [](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      FusedSGD sgd(net->parameters(), {.lr = 1});
      auto [model, optimizer] = a.prepare(net, sgd);
      a.backward(Loss(model(at::full({1, 1}, 0.25))));
      optimizer.step();
      optimizer.step();
      EXPECT_EQ(net->weight.item<double>(), 0.5);
      optimizer.zero_grad();
      a.backward(Loss(model(at::full({1, 1}, 0.25))));
      optimizer.step();
      EXPECT_EQ(net->weight.item<double>(), 0.75);
    });
  }
}

TEST(PlainBackward, ZeroedInPlace_IsForgotten) {
  RunAccelerators(1, Accumulating(2), [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 0.01});
    auto [model, optimizer] = a.prepare(net, sgd);
    model(at::ones({1, 1})).sum().backward();  // to look at its gradient
    net->zero_grad(/*set_to_none=*/false);
    for (int step = 0; step < 2; ++step) {
      auto scope = a.accumulate();
      a.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

// --- Folds ---

TEST(Folds, OptimizersAtOneAddress_AreTheirOwn) {
  for (const int ranks : {1, 2}) {
    RunAccelerators(ranks, {}, [&](Accelerator& a) {
      for (int fold = 0; fold < 3; ++fold) {
        torch::nn::Linear net = OneWeight();
        torch::optim::SGD sgd(net->parameters(), 1.0);
        auto [model, optimizer, loader] =
            a.prepare(net, sgd, batches(TensorDataset(at::ones({4, 1})), 2));
        for (auto& batch : loader) {
          auto scope = a.accumulate();
          a.backward(Loss(model(batch.value())));
          optimizer.step();
          optimizer.zero_grad();
        }
        EXPECT_EQ(optimizer.steps(), 2 / ranks);
        EXPECT_EQ(net->weight.item<double>(), 2 / ranks);
        // The objects of earlier folds are gone: they are neither written nor in the way.
        const std::string dir = TestDir("fold" + std::to_string(fold));
        const absl::Status saved = a.save_state(dir);
        ASSERT_TRUE(saved.ok()) << saved;
        EXPECT_FALSE(std::filesystem::exists(dir + "/model_1.safetensors"));
        EXPECT_FALSE(std::filesystem::exists(dir + "/optimizer_1.safetensors"));
        EXPECT_TRUE(a.load_state(dir).ok());
      }
    });
  }
}

TEST(Folds, HandlesThatAreAssignedAgain_FollowTheNewOptimizer) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    AcceleratedOptimizer optimizer;
    for (int fold = 0; fold < 2; ++fold) {
      torch::nn::Linear net = OneWeight();
      torch::optim::AdamW adamw(net->parameters(), 1e-2);
      auto model = a.prepare(net);
      optimizer = a.prepare(adamw);
      a.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
      EXPECT_EQ(optimizer.steps(), 1);
      EXPECT_NE(net->weight.item<double>(), 0);
    }
  });
}

// --- State ---

TEST(State, WithoutTheModelThatWasTrained_IsRefused) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto optimizer = a.prepare(sgd);
    a.backward(Loss(net(at::ones({1, 1}))));
    optimizer.step();
    const absl::Status status = a.save_state(TestDir("no_model"));
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("no model"));
    EXPECT_FALSE(std::filesystem::exists(TestDir("no_model")));
  });
}

TEST(State, FolderNameWithASlash_IsTheFolder) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    auto model = a.prepare(net);
    for (int i = 0; i < 2; ++i) {
      const absl::Status saved = a.save_state(TestDir("slash") + "/");
      ASSERT_TRUE(saved.ok()) << saved;
    }
    EXPECT_TRUE(a.load_state(TestDir("slash") + "/./").ok());
    EXPECT_TRUE(a.save_model(model, TestDir("weights") + "//").ok());
  });
}

TEST(State, FolderOfARun_NamesItsCheckpoints) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    auto model = a.prepare(net);
    const std::string run = TestDir("a_run"), checkpoint = run + "/checkpoints/checkpoint_3";
    ASSERT_TRUE(a.save_state(checkpoint).ok());
    const absl::Status loaded = a.load_state(run);
    EXPECT_EQ(loaded.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(loaded.message()),
                HasSubstr("it holds checkpoints: name one, such as " + checkpoint));
  });
}

TEST(State, ProjectFolderThatCannotBeMade_IsRefusedAtPrepare) {
  const std::string file = TestDir("a_file");
  {
    FILE* f = fopen(file.c_str(), "w");
    fclose(f);
  }
  AcceleratorOptions options;
  options.project.directory = file + "/run";
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto prepared = a.prepare(net, sgd);
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("a_file"), HasSubstr("project folder"))));
}

TEST(State, ProjectFolderBelowAFile_IsAFailedPreconditionOfALoad) {
  const std::string file = TestDir("another_file");
  fclose(fopen(file.c_str(), "w"));
  AcceleratorOptions options;
  options.project.directory = file + "/run";
  const auto errors = ErrorsOf(2, options, [&](Accelerator& a) {
    const absl::Status loaded = a.load_state_if_present();
    EXPECT_EQ(loaded.code(), absl::StatusCode::kFailedPrecondition) << loaded;
    EXPECT_THAT(std::string(loaded.message()), HasSubstr(file + "/run: Not a directory"));
  });
  EXPECT_THAT(errors, Each(""));
}

// Trains over `data` with `body` until it returns false, first from the start, then resumed from
// the state it saved; returns all samples seen, in order.
struct Trainer {
  Accelerator& a;
  torch::nn::Linear net = OneWeight();
  torch::optim::SGD sgd{net->parameters(), 0.1};
  AcceleratedModel<torch::nn::Linear> model;
  AcceleratedOptimizer optimizer;
  std::vector<std::string>* seen;

  Trainer(Accelerator& accelerator, std::vector<std::string>* log) : a(accelerator), seen(log) {
    std::tie(model, optimizer) = a.prepare(net, sgd);
  }
  template <class Loader>
  void Train(Loader& loader, const std::string& name) {
    for (auto& batch : loader) Step(batch, name);
  }
  template <class Batch>
  void Step(Batch& batch, const std::string& name) {
    auto scope = a.accumulate();
    const at::Tensor all = a.gather_for_metrics(batch.value());
    for (int64_t i = 0; i < all.size(0); ++i) {
      seen->push_back(name + std::to_string(all[i].template item<int64_t>()));
    }
    a.backward(Loss(model(batch.value())));
    optimizer.step();
    optimizer.zero_grad();
  }
};

// Runs `program` to its end without a stop, and with one at the first call of `stop(n)` that
// returns true (n counts its calls); both must see the same samples in the same order.
void ExpectResumesExactly(
    int ranks,
    const std::function<void(Accelerator&, Trainer&, const std::function<bool()>& stop)>& program,
    int stops, const std::string& label = "") {
  const auto run = [&](const std::string& root, int stop_at, std::vector<std::string>* seen) {
    AcceleratorOptions options;
    options.project.directory = root;
    options.data_loader.data_seed = 5;
    RunAccelerators(ranks, options, [&](Accelerator& a) {
      std::vector<std::string> mine;
      Trainer trainer(a, &mine);
      int calls = 0;
      program(a, trainer, [&] {
        if (calls++ != stop_at) return false;
        const absl::Status saved = a.save_state();
        EXPECT_TRUE(saved.ok()) << saved;
        return true;
      });
      if (a.is_main_process()) seen->insert(seen->end(), mine.begin(), mine.end());
    });
  };
  std::vector<std::string> whole;
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name() + label;
  run(TestDir(name + "_whole" + std::to_string(ranks)), -1, &whole);
  ASSERT_FALSE(whole.empty());
  for (int stop = 0; stop < stops; ++stop) {
    const std::string root = TestDir(name + std::to_string(ranks) + "_" + std::to_string(stop));
    std::vector<std::string> parts;
    run(root, stop, &parts);
    EXPECT_LT(parts.size(), whole.size()) << "stop " << stop << " did not stop";
    run(root, -1, &parts);
    EXPECT_EQ(parts, whole) << "stopped at " << stop;
  }
}

TEST(Epochs, StopAtTheHeadOfAnEpoch_LosesNone) {
  for (const int ranks : {1, 2}) {
    ExpectResumesExactly(
        ranks,
        [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
          auto loader = a.prepare(batches(TensorDataset(Rows(8)), 2).shuffle(true));
          ASSERT_TRUE(a.load_state_if_present().ok());
          for (int64_t epoch : a.epochs(3)) {
            (void)epoch;
            if (stop()) return;
            t.Train(loader, "a");
          }
        },
        3);
  }
}

TEST(Epochs, EvaluationFirst_LosesNone) {
  ExpectResumesExactly(
      2,
      [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        auto [loader, evaluation] = a.prepare(batches(TensorDataset(Rows(8)), 2).shuffle(true),
                                              batches(TensorDataset(Rows(6)), 2));
        ASSERT_TRUE(a.load_state_if_present().ok());
        for (int64_t epoch : a.epochs(2)) {
          (void)epoch;
          for (auto& batch : evaluation) (void)batch;
          if (stop()) return;
          t.Train(loader, "a");
          if (stop()) return;
        }
      },
      3);
}

TEST(Epochs, TwoTrainingLoops_AreBothResumed) {
  for (const int ranks : {1, 2}) {
    ExpectResumesExactly(
        ranks,
        [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
          auto [first, second] =
              a.prepare(batches(TensorDataset(Rows(8)), 2).shuffle(true),
                        batches(TensorDataset(at::arange(100, 106, at::kFloat).unsqueeze(1)), 1)
                            .shuffle(true));
          ASSERT_TRUE(a.load_state_if_present().ok());
          for (int64_t epoch : a.epochs(2)) {
            (void)epoch;
            if (stop()) return;
            t.Train(first, "a");
            if (stop()) return;
            t.Train(second, "b");
          }
        },
        4);
  }
}

TEST(Epochs, OrdinaryBackwardWithoutBlocks_IsSeenAsTraining) {
  for (const int ranks : {1, 2}) {
    ExpectResumesExactly(
        ranks,
        [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
          auto loader = a.prepare(batches(TensorDataset(Rows(8)), 2).shuffle(true));
          ASSERT_TRUE(a.load_state_if_present().ok());
          for (int64_t epoch : a.epochs(2)) {
            (void)epoch;
            for (auto& batch : loader) {
              t.optimizer.zero_grad();
              const at::Tensor all = a.gather_for_metrics(batch.value());
              for (int64_t i = 0; i < all.size(0); ++i) {
                t.seen->push_back(std::to_string(all[i].item<int64_t>()));
              }
              Loss(t.model(batch.value())).backward();
              t.optimizer.step();
              if (batch.info().index == 0 && stop()) return;
            }
            if (stop()) return;
          }
        },
        3);
  }
}

TEST(Epochs, ShortLastBatchThatIsPassedOver_EndsTheEpoch) {
  ExpectResumesExactly(
      1,
      [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        auto loader = a.prepare(batches(TensorDataset(Rows(7)), 2).shuffle(true));
        ASSERT_TRUE(a.load_state_if_present().ok());
        for (int64_t epoch : a.epochs(3)) {
          (void)epoch;
          for (auto& batch : loader) {
            if (batch.value().size(0) < 2) continue;
            t.Step(batch, "a");
          }
          if (stop()) return;
        }
      },
      2);
}

TEST(Epochs, OneLoaderTwiceInAnEpoch_IsResumedFromTheSecondEpochOn) {
  ExpectResumesExactly(
      1,
      [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        auto loader = a.prepare(batches(TensorDataset(Rows(6)), 2).shuffle(true));
        ASSERT_TRUE(a.load_state_if_present().ok());
        for (int64_t epoch : a.epochs(3)) {
          t.Train(loader, "a");
          if (epoch > 0 && stop()) return;
          t.Train(loader, "b");
        }
      },
      2);
}

TEST(Epochs, StopAtTheHeadOfABatch_GetsThatBatchAgain) {
  for (const int ranks : {1, 2}) {
    ExpectResumesExactly(
        ranks,
        [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
          auto loader = a.prepare(batches(TensorDataset(Rows(8)), 2).shuffle(true));
          ASSERT_TRUE(a.load_state_if_present().ok());
          for (int64_t epoch : a.epochs(2)) {
            (void)epoch;
            for (auto& batch : loader) {
              if (stop()) return;
              t.Step(batch, "a");
            }
          }
        },
        4);
  }
}

// Numbers that get() draws from LibTorch's default generator, as with workers(0).
struct RandomRows {
  size_t size() const { return 8; }
  at::Tensor get(size_t i) const { return at::rand({1}) + static_cast<double>(i); }
};

// The batch has drawn its numbers when the state is saved, and draws them again in the next run.
TEST(Epochs, SaveAtTheHeadOfABatch_ContinuesBitForBit) {
  for (const int workers : {0, 2}) {
    // At the head of step `stop`, or behind it.
    const auto run = [&](const std::string& root, int stop, bool head, bool resume) {
      AcceleratorOptions options;
      options.project.directory = root;
      double weight = 0;
      RunAccelerators(1, options, [&](Accelerator& a) {
        set_seed(resume ? 8 : 7);
        torch::nn::Linear net = OneWeight();
        torch::optim::SGD sgd(net->parameters(), 0.1);
        auto [model, optimizer, loader] =
            a.prepare(net, sgd, batches(RandomRows(), 2).shuffle(true).seed(3).workers(workers));
        if (resume) {
          ASSERT_TRUE(a.load_state().ok());
        }
        for (int64_t epoch : a.epochs(2)) {
          (void)epoch;
          for (auto& batch : loader) {
            const bool here = optimizer.steps() == stop;
            if (here && head) {
              ASSERT_TRUE(a.save_state().ok());
              return;
            }
            const at::Tensor kept = at::dropout(batch.value(), 0.5, /*train=*/true);
            a.backward(Loss(model(kept)));
            optimizer.step();
            optimizer.zero_grad();
            if (here) {
              ASSERT_TRUE(a.save_state().ok());
              return;
            }
          }
        }
        weight = net->weight.item<double>();
      });
      return weight;
    };
    const double whole = run(TestDir("bits_whole" + std::to_string(workers)), -1, false, false);
    EXPECT_NE(whole, 0);
    for (const bool head : {true, false}) {
      for (const int stop : {0, 2, 4, 6}) {
        const std::string root =
            TestDir(absl::StrCat("bits", workers, head ? "head" : "tail", stop));
        run(root, stop, head, false);
        EXPECT_EQ(run(root, -1, false, true), whole) << root;
      }
    }
  }
}

TEST(Epochs, StopAfterTheLastBatchInsideTheLoop_ThenAtTheEndOfTheEpoch) {
  AcceleratorOptions options;
  options.project.directory = TestDir("last_batch");
  std::vector<std::string> seen;
  std::vector<int64_t> epochs;
  for (int run = 0; run < 3; ++run) {
    RunAccelerators(1, options, [&](Accelerator& a) {
      Trainer t(a, &seen);
      auto loader = a.prepare(batches(TensorDataset(Rows(4)), 2));
      ASSERT_TRUE(a.load_state_if_present().ok());
      for (int64_t epoch : a.epochs(2)) {
        epochs.push_back(epoch);
        for (auto& batch : loader) {
          t.Step(batch, "a");
          if (run == 0 && batch.info().is_last) {
            ASSERT_TRUE(a.save_state().ok());
            return;
          }
        }
        if (run == 1) {
          ASSERT_TRUE(a.save_state().ok());
          return;
        }
      }
    });
  }
  EXPECT_EQ(seen.size(), 8u);
  EXPECT_THAT(epochs, ElementsAre(0, 0, 1));
}

TEST(Epochs, LoadersPreparedInTheEpoch_GoOnWhereTheLastOneWas) {
  for (const int ranks : {1, 2}) {
    ExpectResumesExactly(
        ranks,
        [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
          ASSERT_TRUE(a.load_state_if_present().ok());
          std::set<std::vector<std::string>> orders;
          for (int64_t epoch : a.epochs(3)) {
            (void)epoch;
            auto loader = a.prepare(batches(TensorDataset(Rows(16)), 2).shuffle(true));
            const size_t before = t.seen->size();
            for (auto& batch : loader) {
              t.Step(batch, "a");
              if (stop()) return;
            }
            orders.insert({t.seen->begin() + before, t.seen->end()});
          }
          // No permutation occurs twice.
          EXPECT_GE(orders.size(), 2u);
        },
        6);
  }
}

// A handle outlives the epoch, and still has the loader of the previous epoch while the next one is
// prepared; loaders differ from epoch to epoch. `up_front`: the first one is prepared before the
// loop.
void ExpectOneLoaderOfAllEpochs(const std::string& label, int ranks, int stops, bool up_front,
                                const std::function<int64_t(int64_t)>& batch_size,
                                const std::function<std::optional<int64_t>(int64_t)>& seed) {
  const auto recipe = [&](int64_t epoch) {
    auto made = batches(TensorDataset(Rows(8)), batch_size(epoch)).shuffle(true);
    if (const std::optional<int64_t> own = seed(epoch)) made.seed(*own);
    return made;
  };
  ExpectResumesExactly(
      ranks,
      [&](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        decltype(a.prepare(recipe(0))) loader;
        if (up_front) loader = a.prepare(recipe(0));
        ASSERT_TRUE(a.load_state_if_present().ok());
        const bool whole = a.last_checkpoint().empty();
        std::set<std::vector<std::string>> orders;
        for (int64_t epoch : a.epochs(3)) {
          if (!up_front || epoch > 0) loader = a.prepare(recipe(epoch));
          const size_t before = t.seen->size();
          for (auto& batch : loader) {
            t.Step(batch, "a");
            if (stop()) return;
          }
          orders.insert({t.seen->begin() + before, t.seen->end()});
          if (stop()) return;
        }
        // Each epoch has a permutation of its own.
        if (whole) {
          EXPECT_EQ(orders.size(), 3u);
        }
        EXPECT_EQ(a.core().registry().loaders().size(), 1u);
      },
      stops, label + std::to_string(ranks));
}

TEST(Epochs, LoadersAssignedInTheEpoch_GoOnWhereTheLastOneWas) {
  const auto no_seed = [](int64_t) { return std::optional<int64_t>(); };
  const auto two = [](int64_t) { return 2; };
  for (const bool up_front : {false, true}) {
    const std::string label = up_front ? "_up_front" : "";
    ExpectOneLoaderOfAllEpochs("_alike" + label, 1, 13, up_front, two, no_seed);
    ExpectOneLoaderOfAllEpochs("_alike" + label, 2, 7, up_front, two, no_seed);
    const auto growing = [](int64_t epoch) { return int64_t{2} << epoch; };
    ExpectOneLoaderOfAllEpochs("_growing" + label, 1, 8, up_front, growing, no_seed);
    const auto own_seed = [](int64_t epoch) { return std::optional<int64_t>(1000 * epoch); };
    ExpectOneLoaderOfAllEpochs("_seeds" + label, 1, 13, up_front, two, own_seed);
  }
}

// A replay buffer does this.
TEST(Epochs, LoadersOfDataThatGrow_AreOnePlaceAndResume) {
  ExpectResumesExactly(
      1,
      [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        ASSERT_TRUE(a.load_state_if_present().ok());
        for (int64_t epoch : a.epochs(3)) {
          auto loader = a.prepare(batches(TensorDataset(Rows(4 + 2 * epoch)), 2).shuffle(true));
          loader.set_epoch(epoch);
          for (auto& batch : loader) {
            t.Step(batch, "a");
            if (stop()) return;
          }
          if (stop()) return;
        }
        EXPECT_EQ(a.core().registry().loaders().size(), 1u);
      },
      10);
}

TEST(Epochs, LoaderLikeOneThatIsStillHeld_IsWarnedOf) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    testing::internal::CaptureStderr();
    std::vector<decltype(a.prepare(batches(TensorDataset(Rows(4)), 2)))> loaders;
    for (int64_t epoch : a.epochs(2)) {
      (void)epoch;
      loaders.push_back(a.prepare(batches(TensorDataset(Rows(4)), 2)));
      for (auto& batch : loaders.back()) (void)batch;
    }
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                HasSubstr("that the program still holds: it does not continue that loader"));
  });
}

// The purpose of the second loader is not known at the ends of the first epochs.
TEST(Epochs, LoaderThatAnEpochLeavesOut_IsWarnedOfIfASaveCountsOnIt) {
  for (const bool both : {false, true}) {
    AcceleratorOptions options;
    options.project.directory = TestDir(both ? "both_loaders" : "curriculum");
    RunAccelerators(1, options, [&](Accelerator& a) {
      std::vector<std::string> seen;
      Trainer t(a, &seen);
      auto [easy, hard] = a.prepare(batches(TensorDataset(Rows(4)), 2).shuffle(true),
                                    batches(TensorDataset(Rows(4)), 2).shuffle(true));
      testing::internal::CaptureStderr();
      for (int64_t epoch : a.epochs(2)) {
        t.Train(both || epoch == 0 ? easy : hard, "a");
        const absl::Status saved = a.save_state();
        EXPECT_TRUE(saved.ok()) << saved;
        if (both) t.Train(hard, "b");
      }
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_EQ(said.find("runs the body of epoch 0 again") != std::string::npos, !both) << said;
    });
  }
}

TEST(Epochs, LookAtTheFirstBatch_CostsNothingAfterAResume) {
  ExpectResumesExactly(
      1,
      [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        auto loader = a.prepare(batches(TensorDataset(Rows(8)), 2));
        ASSERT_TRUE(a.load_state_if_present().ok());
        EXPECT_EQ((*loader.begin()).value().size(1), 1);
        for (int64_t epoch : a.epochs(2)) {
          (void)epoch;
          for (auto& batch : loader) {
            t.Step(batch, "a");
            if (stop()) return;
          }
        }
      },
      3);
}

TEST(Epochs, EvaluationLeftByABreak_BeginsAtItsStart) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    std::vector<std::string> seen;
    Trainer t(a, &seen);
    auto [loader, evaluation] =
        a.prepare(batches(TensorDataset(Rows(4)), 1), batches(TensorDataset(Rows(6)), 1));
    t.Train(loader, "a");
    for (auto& batch : evaluation) {
      if (batch.info().index == 2) break;
    }
    ASSERT_TRUE(a.save_state(TestDir("broken_off")).ok());
    ASSERT_TRUE(a.load_state(TestDir("broken_off")).ok());
    int64_t samples = 0;
    for (auto& batch : evaluation) samples += batch.info().size;
    EXPECT_EQ(samples, 6);
  });
}

TEST(Epochs, LoopLeftEarlyInEveryEpoch_IsWarnedOfWhereItIsSaved) {
  SetLogLevel(LogLevel::kInfo);
  for (const bool save : {true, false}) {
    testing::internal::CaptureStderr();
    RunAccelerators(1, {}, [&](Accelerator& a) {
      std::vector<std::string> seen;
      Trainer t(a, &seen);
      auto loader = a.prepare(batches(TensorDataset(Rows(8)), 2));
      for (int64_t epoch : a.epochs(2)) {
        for (auto& batch : loader) {
          t.Step(batch, "a");
          if (batch.info().index == 1) break;
        }
        if (save) {
          ASSERT_TRUE(a.save_state(TestDir(absl::StrCat("left_early_", epoch))).ok());
        }
      }
    });
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("left before its last batch") != std::string::npos, save) << log;
  }
}

// Returns the samples of a pair of loaders that are read together, where the shorter one begins
// again at its end; `step` trains on both.
template <class Long, class Short, class Step>
void TrainTogether(Long& longer, Short& shorter, bool begin_at_head, Step step) {
  auto it = shorter.begin();
  for (auto& batch : longer) {
    if (begin_at_head && it == shorter.end()) it = shorter.begin();
    if (!step(batch, *it)) return;
    if (++it == shorter.end() && !begin_at_head) it = shorter.begin();
  }
}

TEST(Epochs, ShorterLoaderThatBeginsAgainBesideALongerOne_IsResumed) {
  struct Case {
    int64_t length, shorter_length;
    bool say;            // which one decides
    bool begin_at_head;  // before the next batch, else at once
  };
  for (const auto& [length, shorter_length, say, begin_at_head] :
       std::vector<Case>{{14, 4, true, false},
                         {14, 4, false, false},
                         {12, 4, false, true},
                         {6, 2, false, true},
                         {4, 4, false, true}}) {
    SCOPED_TRACE(absl::StrCat(length, ", ", shorter_length, ", ", say));
    ExpectResumesExactly(
        1,
        [&](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
          auto [longer, shorter, last] =
              a.prepare(batches(TensorDataset(Rows(length)), 2).shuffle(true),
                        batches(TensorDataset(Rows(shorter_length)), 2).shuffle(true),
                        batches(TensorDataset(Rows(4)), 2).shuffle(true));
          ASSERT_TRUE(a.load_state_if_present().ok());
          for (int64_t epoch : a.epochs(2)) {
            (void)epoch;
            bool stopped = false;
            TrainTogether(longer, shorter, begin_at_head, [&](auto& x, auto& y) {
              auto scope = say ? a.accumulate(x) : a.accumulate();
              t.seen->push_back(absl::StrCat(x.value().sum().template item<int64_t>(), "+",
                                             y.value()[0].template item<int64_t>()));
              a.backward(Loss(t.model(x.value() + y.value())));
              t.optimizer.step();
              t.optimizer.zero_grad();
              stopped = stop();
              return !stopped;
            });
            if (stopped || stop()) return;
            for (auto& batch : last) {
              t.Step(batch, "c");
              if (stop()) return;
            }
            if (stop()) return;
          }
        },
        static_cast<int>(2 * (length / 2 + 4) - 2), absl::StrCat(length, shorter_length, say));
  }
}

TEST(Epochs, SaveWhileTheShorterLoaderIsInItsMiddle_BeginsTheNextEpochAnew) {
  ExpectResumesExactly(
      1,
      [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        auto [longer, shorter] = a.prepare(batches(TensorDataset(Rows(6)), 2).shuffle(true),
                                           batches(TensorDataset(Rows(4)), 2).shuffle(true));
        ASSERT_TRUE(a.load_state_if_present().ok());
        for (int64_t epoch : a.epochs(3)) {
          (void)epoch;
          auto it = shorter.begin();
          for (auto& batch : longer) {
            if (it == shorter.end()) it = shorter.begin();
            auto scope = a.accumulate(batch);
            t.seen->push_back(absl::StrCat((*it).value()[0].item<int64_t>()));
            a.backward(Loss(t.model(batch.value() + (*it).value())));
            t.optimizer.step();
            t.optimizer.zero_grad();
            ++it;
          }
          if (stop()) return;
        }
      },
      2);
}

TEST(Epochs, InnerTrainingLoop_IsResumedInItsPassOfTheOuterBatch) {
  ExpectResumesExactly(
      1,
      [](Accelerator& a, Trainer& t, const std::function<bool()>& stop) {
        auto [tasks, inner, last] = a.prepare(batches(TensorDataset(Rows(3)), 1).shuffle(true),
                                              batches(TensorDataset(Rows(6)), 2).shuffle(true),
                                              batches(TensorDataset(Rows(4)), 2).shuffle(true));
        ASSERT_TRUE(a.load_state_if_present().ok());
        for (int64_t epoch : a.epochs(2)) {
          (void)epoch;
          for (auto& task : tasks) {
            for (auto& batch : inner) {
              t.Step(batch, absl::StrCat("task ", task.value().item<int64_t>(), ": "));
              // At the first batch of both, tasks and batches may be side by side.
              if (task.info().index + batch.info().index > 0 && stop()) return;
            }
          }
          for (auto& batch : last) {
            t.Step(batch, "last ");
            if (stop()) return;
          }
        }
      },
      2 * (3 * 3 + 1) - 1);
}

// Stages and folds that each loop over epochs().
TEST(Epochs, SaveInASecondLoop_SaysThatACheckpointHasOneCount) {
  SetLogLevel(LogLevel::kInfo);
  for (const bool clear : {false, true}) {
    AcceleratorOptions options;
    options.project.directory = TestDir("stages");
    testing::internal::CaptureStderr();
    RunAccelerators(1, options, [&](Accelerator& a) {
      for (int stage = 0; stage < 2; ++stage) {
        std::vector<std::string> seen;
        Trainer t(a, &seen);
        auto loader = a.prepare(batches(TensorDataset(Rows(4)), 2));
        for (int64_t epoch : a.epochs(2)) {
          (void)epoch;
          t.Train(loader, "a");
          ASSERT_TRUE(a.save_state().ok());
        }
        // One stage after the other, like the attempts of find_executable_batch_size.
        if (clear) a.free_memory();
      }
    });
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("a second loop over epochs()") == std::string::npos, clear) << log;
  }
}

TEST(Epochs, NothingLeft_IsSaid) {
  SetLogLevel(LogLevel::kInfo);
  AcceleratorOptions options;
  options.project.directory = TestDir("finished");
  for (int run = 0; run < 2; ++run) {
    testing::internal::CaptureStderr();
    RunAccelerators(1, options, [&](Accelerator& a) {
      std::vector<std::string> seen;
      Trainer t(a, &seen);
      auto loader = a.prepare(batches(TensorDataset(Rows(4)), 2));
      ASSERT_TRUE(a.load_state_if_present().ok());
      for (int64_t epoch : a.epochs(2)) {
        (void)epoch;
        t.Train(loader, "a");
        ASSERT_TRUE(a.save_state().ok());
      }
      EXPECT_EQ(seen.empty(), run == 1);
    });
    const std::string log = testing::internal::GetCapturedStderr();
    if (run == 1) {
      EXPECT_THAT(log, HasSubstr("epoch 2 of 2: nothing left to do"));
    }
  }
}

// --- Loops side by side ---

TEST(SideBySide, LoadersOfDifferentLength_AskForTheBatchThatDecides) {
  const auto train = [](Accelerator& a, bool say) {
    std::vector<std::string> seen;
    Trainer t(a, &seen);
    auto [labelled, other] =
        a.prepare(batches(TensorDataset(Rows(8)), 1), batches(TensorDataset(Rows(5)), 1));
    auto it = other.begin();
    for (auto& batch : labelled) {
      auto scope = say ? a.accumulate(batch) : a.accumulate();
      a.backward(Loss(t.model(batch.value() + (*it).value())));
      t.optimizer.step();
      t.optimizer.zero_grad();
      if (++it == other.end()) it = other.begin();
    }
    EXPECT_EQ(t.optimizer.steps(), 4);
  };
  EXPECT_THAT(ErrorsOf(1, Accumulating(2), [&](Accelerator& a) { train(a, false); }),
              Each(HasSubstr("accelerator.accumulate(batch)")));
  EXPECT_THAT(ErrorsOf(1, Accumulating(2), [&](Accelerator& a) { train(a, true); }), Each(""));
}

// A contrastive loss: each row is compared with the rows of all processes.
TEST(Contrastive, LossOverTheRowsOfAllProcesses_TrainsAsOnOne) {
  const at::Tensor rows = at::linspace(-2, 2, 24).reshape({8, 3}).sin();
  const auto loss_of = [](const at::Tensor& z) {
    return -z.matmul(z.t()).log_softmax(1).diagonal().mean();
  };
  const auto make = [] {
    torch::nn::Linear net(3, 2);
    const at::NoGradGuard no_grad;
    net->weight.copy_(at::linspace(-0.5, 0.5, 6).reshape({2, 3}));
    net->bias.zero_();
    return net;
  };
  torch::nn::Linear alone = make();
  torch::optim::SGD sgd_alone(alone->parameters(), 0.5);
  for (int step = 0; step < 3; ++step) {
    sgd_alone.zero_grad();
    loss_of(alone(rows)).backward();
    sgd_alone.step();
  }
  RunAccelerators(2, {}, [&](Accelerator& a) {
    torch::nn::Linear net = make();
    torch::optim::SGD sgd(net->parameters(), 0.5);
    auto [model, optimizer, loader] = a.prepare(net, sgd, batches(TensorDataset(rows), 4));
    for (int step = 0; step < 3; ++step) {
      for (auto& batch : loader) {
        const at::Tensor z = model(batch.value());
        std::vector<at::Tensor> parts = a.gather(z.detach()).chunk(a.num_processes());
        parts[a.process_index()] = z;
        a.backward(loss_of(at::cat(parts)) * a.num_processes());
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_TRUE(at::allclose(net->weight, alone->weight, 1e-5, 1e-6))
        << net->weight << alone->weight;
  });
}

TEST(Accumulate, AroundTheLoop_IsRefusedAndNotLeftWithoutSteps) {
  const auto train = [](Accelerator& a) {
    std::vector<std::string> seen;
    Trainer t(a, &seen);
    auto loader = a.prepare(batches(TensorDataset(Rows(8)), 1));
    auto scope = a.accumulate();
    for (auto& batch : loader) {
      a.backward(Loss(t.model(batch.value())));
      t.optimizer.step();
      t.optimizer.zero_grad();
    }
  };
  EXPECT_THAT(ErrorsOf(2, Accumulating(2), train),
              Each(HasSubstr("one accumulate() covers several batches")));
  // Without accumulation each step takes effect.
  EXPECT_THAT(ErrorsOf(1, {}, train), Each(""));
}

// In its forward pass, in backward(), or behind that; the program goes on with the next window.
TEST(Accumulate, WindowWhoseLastMicroStepThrows_IsGivenUp) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  AcceleratorOptions options = Accumulating(4);
  options.check_finite_loss = true;
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero2"}) {
      for (const std::string where : {"forward", "backward", "behind"}) {
        SCOPED_TRACE(absl::StrCat(strategy, " on ", ranks, ": ", where));
        options.sharding = ParseSharding(strategy, ranks);
        testing::internal::CaptureStderr();
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          torch::nn::Linear net = OneWeight();
          torch::optim::SGD sgd(net->parameters(), 1.0);
          auto [model, optimizer] = a.prepare(net, sgd);
          int thrown = 0;
          for (int i = 0; i < 12; ++i) {
            try {
              auto scope = a.accumulate();
              TORCH_CHECK(i != 3 || where != "forward", "of the forward pass");
              const at::Tensor loss = Loss(model(at::full({1, 1}, i < 4 ? 100.0 : 1.0)));
              a.backward(i == 3 && where == "backward" ? loss * nan : loss);
              TORCH_CHECK(i != 3 || where != "behind", "behind the backward pass");
              optimizer.step();
              optimizer.zero_grad();
            } catch (const c10::Error&) {
              ++thrown;
            }
          }
          EXPECT_EQ(thrown, 1);
          const auto weights = WeightsOf(a, model);
          if (a.is_main_process()) {
            EXPECT_EQ(weights.at("weight").item<double>(), 2);
          }
        });
        EXPECT_THAT(testing::internal::GetCapturedStderr(),
                    HasSubstr("the gradients of that window are given up"));
      }
    }
  }
}

TEST(Accumulate, OptimizerThatIsNotDueWhenAMicroStepThrows_KeepsItsGradients) {
  RunAccelerators(1, {}, [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight(), rare = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0), sgd_rare(rare->parameters(), 1.0);
    auto [model, rare_model, optimizer, rare_optimizer] = a.prepare(net, rare, sgd, sgd_rare);
    for (int i = 0; i < 4; ++i) {
      try {
        auto scope = a.accumulate();
        a.backward(Loss(model(at::ones({1, 1}))) + Loss(rare_model(at::ones({1, 1}))));
        TORCH_CHECK(i != 2, "behind the backward pass");
        optimizer.step();
        optimizer.zero_grad();
        if (i < 3) continue;
        rare_optimizer.step();
        rare_optimizer.zero_grad();
      } catch (const c10::Error&) {
      }
    }
    EXPECT_EQ(net->weight.item<double>(), 3);
    EXPECT_EQ(rare->weight.item<double>(), 4);
  });
}

// A loop in a destructor, for example.
TEST(Accumulate, WindowsWhileAnotherExceptionIsOnItsWay_AreNotGivenUp) {
  struct TrainsAtTheEnd {
    std::function<void()> train;
    ~TrainsAtTheEnd() { train(); }
  };
  RunAccelerators(1, Accumulating(2), [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    try {
      const TrainsAtTheEnd last{[&, &model = model, &optimizer = optimizer] {
        for (int i = 0; i < 4; ++i) {
          auto scope = a.accumulate();
          a.backward(Loss(model(at::ones({1, 1}))));
          if (i < 3) continue;  // the step uses the gradients of two windows
          optimizer.step();
          optimizer.zero_grad();
        }
      }};
      TORCH_CHECK(false, "of the program");
    } catch (const c10::Error&) {
    }
    EXPECT_EQ(net->weight.item<double>(), 2);
    EXPECT_EQ(optimizer.steps(), 1);
  });
}

TEST(Accumulate, StepBehindAMicroStepThatThrows_StillTakesEffect) {
  testing::internal::CaptureStderr();
  RunAccelerators(1, Accumulating(2), [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int i = 0; i < 4; ++i) {
      try {
        auto scope = a.accumulate();
        a.backward(Loss(model(at::ones({1, 1}))));
        TORCH_CHECK(i != 1, "behind the backward pass");
      } catch (const c10::Error&) {
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(net->weight.item<double>(), 2);
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(), Not(HasSubstr("given up")));
}

// --- weights of losses ---

// The second micro-step of the last rank has none, as a batch of prompts alone.
TEST(WeightedLosses, OfNoItems_AddNothingThoughTheirMeanIsNaN) {
  AcceleratorOptions options = Accumulating(2);
  options.check_finite_loss = true;
  options.grad_scaler.init_scale = 1024;  // the usual one overflows in the gradient of the output
  for (const char* precision : {"no", "fp16"}) {
    options.mixed_precision = precision;
    for (const int ranks : {1, 2}) {
      for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
        SCOPED_TRACE(absl::StrCat(strategy, " on ", ranks, " ", precision));
        options.sharding = ParseSharding(strategy, ranks);
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          torch::nn::Linear net = OneWeight();
          torch::optim::SGD sgd(net->parameters(), 1.0);
          auto [model, optimizer] = a.prepare(net, sgd);
          for (int i = 0; i < 4; ++i) {
            auto scope = a.accumulate();
            const bool none = i % 2 == 1 && a.process_index() == ranks - 1;
            const at::Tensor mask = at::full({2, 1}, none ? 0.0 : 1.0);
            const at::Tensor items = mask.sum();
            const at::Tensor loss = -(model(at::full({2, 1}, 3.0)) * mask).sum() / items;
            EXPECT_EQ(std::isnan(loss.item<double>()), none);
            a.backward(loss, items.item<double>());
            optimizer.step();
            EXPECT_FALSE(a.optimizer_step_was_skipped());
            optimizer.zero_grad();
          }
          const auto weights = WeightsOf(a, model);
          if (a.is_main_process()) {
            EXPECT_EQ(weights.at("weight").item<double>(), 6);
          }
        });
      }
    }
  }
}

// Ranks without any, and a loss whose gradient is 0 as it is.
TEST(WeightedLosses, OfNoTargetsWithCheckFiniteLoss_AreRight) {
  AcceleratorOptions options;
  options.check_finite_loss = true;
  for (const int ranks : {1, 2}) {
    RunAccelerators(ranks, options, [&](Accelerator& a) {
      torch::nn::Linear net(2, 3);
      {
        at::NoGradGuard no_grad;
        net->weight.zero_();
        net->bias.zero_();
      }
      torch::optim::SGD sgd(net->parameters(), 1.0);
      auto [model, optimizer] = a.prepare(net, sgd);
      for (int i = 0; i < 2; ++i) {
        // Of the first step, all of them; of the second one, those of all ranks but one.
        const bool none = i == 0 || a.process_index() > 0;
        const at::Tensor targets = at::full({4}, none ? -100 : 1, at::kLong);
        auto scope = a.accumulate();
        const at::Tensor loss = at::cross_entropy_loss(model(at::ones({4, 2})), targets);
        a.backward(loss, none ? 0.0 : 4.0);
        optimizer.step();
        optimizer.zero_grad();
      }
      const at::Tensor want = at::full({3}, -1.0 / 3);
      want[1] = 2.0 / 3;
      EXPECT_TRUE(at::allclose(net->bias, want)) << net->bias;
      // With a weight it is the batch's fault.
      const double nan = std::numeric_limits<double>::quiet_NaN();
      auto scope = a.accumulate();
      EXPECT_THROW(a.backward(model(at::ones({1, 2})).sum() * nan, 1.0), c10::Error);
    });
  }
}

TEST(SideBySide, InnerTrainingLoops_EndWindowsAsEver) {
  RunAccelerators(1, Accumulating(4), [](Accelerator& a) {
    std::vector<std::string> seen;
    Trainer t(a, &seen);
    auto [tasks, inner] =
        a.prepare(batches(TensorDataset(Rows(3)), 1), batches(TensorDataset(Rows(6)), 1));
    for (auto& task : tasks) {
      (void)task;
      t.Train(inner, "a");
    }
    EXPECT_EQ(t.optimizer.steps(), 6);
  });
}

TEST(JoinUnevenInputs, CollectiveOfTheProgram_IsRefusedAtOnce) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    std::vector<std::string> seen;
    Trainer t(a, &seen);
    auto loader = a.prepare(batches(TensorDataset(Rows(4)), 1));
    auto join = a.join_uneven_inputs();
    t.Train(loader, "a");
  });
  EXPECT_THAT(errors, Each(HasSubstr("gather_for_metrics() inside join_uneven_inputs()")));
}

// Calls that all processes must make, but that a process without batches does not make.
TEST(JoinUnevenInputs, OtherCallsOfAllProcesses_AreRefusedAtOnce) {
  at::Generator generator = at::detail::createCPUGenerator(1);
  const std::vector<std::pair<std::string, std::function<void(Accelerator&)>>> calls = {
      {"main_process_first()", [](Accelerator& a) { auto first = a.main_process_first(); }},
      {"local_main_process_first()",
       [](Accelerator& a) { auto first = a.local_main_process_first(); }},
      {"check_trigger(name)", [](Accelerator& a) { a.check_trigger("checkpoint"); }},
      {"should_stop()", [](Accelerator& a) { a.should_stop(); }},
      {"synchronize_rng_states()", [](Accelerator& a) { synchronize_rng_states(a, {"torch"}); }},
      {"synchronize_rng_states()", [&](Accelerator& a) { synchronize_rng_states(a, generator); }},
      {"logging in order",
       [](Accelerator& a) {
         get_logger(a).Info("x", {.main_process_only = false, .in_order = true});
       }},
      {"find_executable_batch_size()",
       [](Accelerator& a) { find_executable_batch_size(a, 2, [](int64_t) {}); }},
      {"prepare()", [](Accelerator& a) { (void)a.prepare(OneWeight()); }},
      {"prepare()", [](Accelerator& a) { (void)a.prepare(batches(TensorDataset(Rows(4)), 1)); }}};
  for (const auto& entry : calls) {
    const auto errors = ErrorsOf(2, {}, [&](Accelerator& a) {
      auto join = a.join_uneven_inputs();
      entry.second(a);
    });
    EXPECT_THAT(errors, Each(HasSubstr(entry.first + " inside join_uneven_inputs()")));
  }
  const std::vector<std::pair<std::string, std::function<void(Subgroup&)>>> of_groups = {
      {"gather() of a group", [](Subgroup& group) { (void)group.gather(at::ones({1})); }},
      {"gather_object() of a group", [](Subgroup& group) { (void)group.gather_object(1); }},
      {"reduce() of a group", [](Subgroup& group) { (void)group.reduce(1); }},
      {"broadcast() of a group", [](Subgroup& group) { (void)group.broadcast(1); }},
      {"wait_for_everyone() of a group", [](Subgroup& group) { group.wait_for_everyone(); }}};
  for (const auto& entry : of_groups) {
    const auto errors = ErrorsOf(2, {}, [&](Accelerator& a) {
      auto group = a.new_group({0, 1});
      auto join = a.join_uneven_inputs();
      entry.second(group);
    });
    EXPECT_THAT(errors, Each(HasSubstr(entry.first + " inside join_uneven_inputs()")));
  }
}

TEST(JoinUnevenInputs, InsideScopesThatDoNotExchange_IsRefused) {
  EXPECT_THAT(ErrorsOf(2, {},
                       [](Accelerator& a) {
                         auto scope = a.no_sync();
                         auto join = a.join_uneven_inputs();
                       }),
              Each(HasSubstr("join_uneven_inputs() inside no_sync()")));
  EXPECT_THAT(ErrorsOf(2, {},
                       [](Accelerator& a) {
                         auto model = a.prepare(OneWeight());
                         LocalSGD local(a, model, 8);
                         auto join = a.join_uneven_inputs();
                       }),
              Each(HasSubstr("join_uneven_inputs() inside LocalSGD")));
}

// --- Schedules ---

TEST(Schedules, OfLibTorch_StepWithTheOptimizerAndComeBack) {
  const std::string dir = TestDir("torch_schedule");
  for (const bool resumed : {false, true}) {
    RunAccelerators(1, Accumulating(4), [&](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      torch::optim::SGD sgd(net->parameters(), 1.0);
      torch::optim::StepLR decay(sgd, 1, 0.5);
      auto [model, optimizer, schedule] = a.prepare(net, sgd, decay);
      if (resumed) {
        ASSERT_TRUE(a.load_state(dir).ok());
        EXPECT_EQ(optimizer.lr(), 0.25);
      }
      for (int i = 0; i < 12; ++i) {
        auto scope = a.accumulate();
        a.backward(Loss(model(at::ones({1, 1}))));
        optimizer.step();
        schedule.step();
        optimizer.zero_grad();
      }
      // Three steps, of which LibTorch's StepLR ignores the first.
      EXPECT_EQ(optimizer.lr(), resumed ? 0.03125 : 0.25);
      ASSERT_TRUE(a.save_state(dir).ok());
    });
  }
}

TEST(Schedules, RateSetByHand_IsNotUndone) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    auto [model, optimizer, schedule] = a.prepare(net, sgd, StepLR(1, 0.5));
    auto step = [&, m = model, o = optimizer, s = schedule]() mutable {
      a.backward(Loss(m(at::ones({1, 1}))));
      o.step();
      s.step();
      o.zero_grad();
    };
    step();
    EXPECT_EQ(optimizer.lr(), 0.5);
    optimizer.set_lr(0.1);
    step();
    EXPECT_NEAR(optimizer.lr(), 0.05, 1e-12);
  });
}

TEST(Schedules, SchedulerOfLibTorchThatIsGoneAtTheEnd_IsNotRead) {
  testing::internal::CaptureStderr();
  RunAccelerators(1, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    // Like a local variable of a function that has returned.
    alignas(torch::optim::StepLR) unsigned char memory[sizeof(torch::optim::StepLR)];
    auto* const step_lr = new (memory) torch::optim::StepLR(sgd, 1);
    auto [model, optimizer, schedule] = a.prepare(net, sgd, *step_lr);
    for (int i = 0; i < 3; ++i) {
      auto scope = a.accumulate();
      a.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
    }
    step_lr->~StepLR();
    std::fill(std::begin(memory), std::end(memory), 0);
    a.end_training();
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(), Not(HasSubstr("schedule")));
}

TEST(Schedules, LeftOutOrBeforeTheOptimizer_AreWarnedOf) {
  enum class When { kNever, kBefore, kAfter };
  const auto output = [](When when, int steps, const LrSchedulePtr& recipe, bool accumulates) {
    testing::internal::CaptureStderr();
    RunAccelerators(1, Accumulating(accumulates ? 2 : 1), [&](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      torch::optim::SGD sgd(net->parameters(), 1.0);
      auto [model, optimizer, schedule] = a.prepare(net, sgd, recipe);
      for (int i = 0; i < steps * (accumulates ? 2 : 1); ++i) {
        auto scope = a.accumulate();
        a.backward(Loss(model(at::ones({1, 1}))));
        if (when == When::kBefore) schedule.step();
        optimizer.step();
        if (when == When::kAfter) schedule.step();
        optimizer.zero_grad();
      }
      a.end_training();
    });
    return testing::internal::GetCapturedStderr();
  };
  const LrSchedulePtr warmup = LinearWithWarmup(4, 10), steps = StepLR(1, 0.5);
  for (const bool accumulates : {false, true}) {
    EXPECT_THAT(output(When::kNever, 2, warmup, accumulates),
                AllOf(HasSubstr("the learning rate is 0"), Not(HasSubstr("has never stepped"))));
    EXPECT_THAT(output(When::kNever, 2, steps, accumulates),
                HasSubstr("a prepared schedule has never stepped"));
    EXPECT_THAT(output(When::kBefore, 2, steps, accumulates),
                HasSubstr("comes before the first optimizer.step()"));
    for (const LrSchedulePtr& recipe : {warmup, steps}) {
      EXPECT_THAT(output(When::kAfter, 3, recipe, accumulates), Not(HasSubstr("schedule")));
      EXPECT_THAT(output(When::kNever, 1, recipe, accumulates), Not(HasSubstr("schedule")));
    }
  }
}

TEST(Schedules, OnePerGroup) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    torch::nn::Linear net(1, 1);
    std::vector<torch::optim::OptimizerParamGroup> groups = {{{net->weight}}, {{net->bias}}};
    torch::optim::SGD sgd(groups, torch::optim::SGDOptions(1.0));
    auto [model, optimizer, schedule] =
        a.prepare(net, sgd, std::vector<LrSchedulePtr>{StepLR(1, 0.5), ConstantLR(1.0, 1)});
    a.backward(model(at::ones({1, 1})).mean());
    optimizer.step();
    schedule.step();
    EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.5, 1.0));
  });
}

// Two optimizers with rate 1, one for Muster's schedule and one with LibTorch's, which halve
// without patience.
struct Plateaus {
  torch::nn::Linear one = OneWeight(), two = OneWeight();
  torch::optim::SGD sgd{one->parameters(), 1.0}, other{two->parameters(), 1.0};
  torch::optim::ReduceLROnPlateauScheduler of_torch{
      other, torch::optim::ReduceLROnPlateauScheduler::min, 0.5, /*patience=*/0};
};

TEST(Schedules, PlateauByTheMeanOfAllProcesses_ReducesAlike) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    Plateaus with;
    auto [model, optimizer, plateau] =
        a.prepare(with.one, with.sgd, PlateauSchedule({.factor = 0.5, .patience = 0}));
    auto [model2, optimizer2, plateau2] = a.prepare(with.two, with.other, with.of_torch);
    // On rank 0 the metric gets better, on rank 1 worse; the mean gets worse.
    for (int i = 0; i < 2; ++i) {
      const double metric = a.is_main_process() ? 10 - i : 10 + 3 * i;
      plateau.step(metric);
      plateau2.step(metric);
    }
    EXPECT_EQ(optimizer.lr(), 0.5);
    EXPECT_EQ(optimizer2.lr(), 0.5);
    ASSERT_TRUE(a.save_state(TestDir("plateau")).ok());
    optimizer.set_lr(1);
    ASSERT_TRUE(a.load_state(TestDir("plateau")).ok());
    EXPECT_EQ(optimizer.lr(), 0.5);
  });
}

// In the first epoch there is no metric yet, and a row of numbers may be empty.
TEST(Schedules, SavedBeforeTheFirstMetric_Continue) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    Plateaus with;
    auto [model, optimizer, plateau] =
        a.prepare(with.one, with.sgd, PlateauSchedule({.factor = 0.5, .patience = 0}));
    auto [model2, optimizer2, plateau2] = a.prepare(with.two, with.other, with.of_torch);
    PlainState mine = {{"losses", {}}, {"counts", {1, 2}}};
    a.register_for_checkpointing([&] { return mine; }, [&](const PlainState& s) { mine = s; });
    ASSERT_TRUE(a.save_state(TestDir("early")).ok());
    plateau.step(-5);
    plateau2.step(-5);
    mine = {};
    const absl::Status loaded = a.load_state(TestDir("early"));
    ASSERT_TRUE(loaded.ok()) << loaded;
    EXPECT_EQ(mine, (PlainState{{"losses", {}}, {"counts", {1, 2}}}));
    plateau.step(3);
    plateau2.step(3);
    EXPECT_EQ(optimizer.lr(), 1.0) << "the first metric is the best";
    EXPECT_EQ(optimizer2.lr(), 1.0);
  });
}

// --- Closures ---

TEST(Closure, Lbfgs_FindsTheMinimumOnAllRanksAlike) {
  for (const int ranks : {1, 2, 3}) {
    RunAccelerators(ranks, {}, [](Accelerator& a) {
      torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
      torch::optim::LBFGS lbfgs(
          net->parameters(),
          torch::optim::LBFGSOptions(0.5).max_iter(10).line_search_fn("strong_wolfe"));
      auto [model, optimizer] = a.prepare(net, lbfgs);
      const at::Tensor x = at::eye(2) * (1.0 + a.process_index());
      const at::Tensor y = x.matmul(at::tensor({1.0f, -2.0f}).unsqueeze(1));
      at::Tensor first, last;
      for (int i = 0; i < 4; ++i) {
        last = optimizer.step([&, m = model, o = optimizer]() mutable {
          o.zero_grad();
          at::Tensor loss = (m(x) - y).square().mean();
          a.backward(loss);
          return loss;
        });
        if (!first.defined()) first = last;
      }
      EXPECT_LT(last.item<double>(), 1e-4);
      EXPECT_EQ(optimizer.steps(), 4);
      const at::Tensor all = a.gather(net->weight.detach());
      for (int r = 1; r < a.num_processes(); ++r) EXPECT_TRUE(at::equal(all[r], all[0]));
      EXPECT_TRUE(a.save_state(TestDir("lbfgs")).ok());
      EXPECT_TRUE(a.load_state(TestDir("lbfgs")).ok());
      EXPECT_THROW(optimizer.step(), c10::Error);
    });
  }
}

// Each rank evaluates as often as its own gradients require, and waits for no other rank.
TEST(Closure, LbfgsInLocalSgd_EvaluatesApart) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
    torch::optim::LBFGS lbfgs(net->parameters(), torch::optim::LBFGSOptions(1).max_iter(20));
    auto [model, optimizer] = a.prepare(net, lbfgs);
    // Rank 0 is at its minimum, and rank 1 is far from it.
    const at::Tensor x = at::eye(2);
    const at::Tensor y = a.is_main_process() ? net->weight.detach().t().clone()
                                             : at::tensor({30.0f, -20.0f}).unsqueeze(1);
    int evaluations = 0;
    {
      LocalSGD local(a, model, 2);
      const at::Tensor loss = optimizer.step([&, m = model, o = optimizer]() mutable {
        ++evaluations;
        o.zero_grad();
        at::Tensor its = (m(x) - y).square().mean();
        a.backward(its);
        return its;
      });
      // Its own loss, not the mean.
      EXPECT_EQ(loss.item<double>() == 0, a.is_main_process());
    }
    if (a.is_main_process()) {
      EXPECT_EQ(evaluations, 1);
    } else {
      EXPECT_GT(evaluations, 1);
    }
    const at::Tensor all = a.gather(net->weight.detach());
    EXPECT_TRUE(at::equal(all[0], all[1]));
  });
}

TEST(Closure, InTheScopeOfAnAverage_IsRefused) {
  RunAccelerators(1, {}, [](Accelerator& a) {
    torch::nn::Linear net(torch::nn::LinearOptions(2, 1));
    FusedSGD sgd(net->parameters(), {.lr = 0.5});
    auto [model, optimizer] = a.prepare(net, sgd);
    Ema ema(a, model);
    const at::Tensor before = net->weight.detach().clone();
    {
      auto averaged = ema.apply();
      EXPECT_THROW(optimizer.step([&, m = model]() mutable {
        at::Tensor loss = m(at::ones({1, 2})).sum();
        a.backward(loss);
        return loss;
      }),
                   c10::Error);
    }
    EXPECT_TRUE(at::equal(net->weight, before));
  });
}

// --- main() ---

// Codes are meant for programs; an exception has none, and INTERNAL would blame Muster.
TEST(Run, ExceptionOfTheProgram_IsPrintedInItsOwnWords) {
  char name[] = "program";
  char* argv[] = {name, nullptr};
  AcceleratorOptions options;
  options.cpu = true;
  const auto output = [&](const std::function<absl::Status()>& body) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(run(1, argv, options, [&](Accelerator&) { return body(); }), 1);
    return testing::internal::GetCapturedStderr();
  };
  const std::string pid = absl::StrCat("program: pid ", getpid(), ": ");
  EXPECT_EQ(output([]() -> absl::Status { throw std::runtime_error("bad sample"); }),
            pid + "bad sample\n");
  EXPECT_EQ(output([]() -> absl::Status { throw 42; }),
            pid + "an exception that is not derived from std::exception, of type int\n");
  EXPECT_EQ(output([] { return absl::NotFoundError("no data"); }), pid + "NOT_FOUND: no data\n");
}

TEST(Run, TakesOptionsAndFunctionsOfAnyOrdinaryShape) {
  char name[] = "program";
  char* argv[] = {name, nullptr};
  AcceleratorOptions options;
  options.cpu = true;
  int calls = 0;
  EXPECT_EQ(run(1, argv, options, [&](Accelerator&) { ++calls; }), 0);
  EXPECT_EQ(run(1, argv, options,
                [&](Accelerator&) {
                  ++calls;
                  return absl::OkStatus();
                }),
            0);
  EXPECT_EQ(run(1, argv, options, [&](Accelerator&, const Arguments&) { ++calls; }), 0);
  EXPECT_EQ(run(1, argv,
                [&](Accelerator&) {
                  ++calls;
                  return absl::InternalError("no");
                }),
            1);
  EXPECT_EQ(calls, 4);
}

}  // namespace
}  // namespace muster
