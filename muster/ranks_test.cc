// The Accelerator on several ranks: threads of this process over Gloo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/test_model.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/schedulers/lr_scheduler.h"
#include "torch/optim/sgd.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// --- What must work ---

// This happens if the driver of one machine fails.
TEST(Ranks, DevicesOfTwoKinds_AreNamedOnEveryRank) {
  std::vector<std::string> errors(3);
  RunGlooRanks(3, [&](Comm& comm) {
    try {
      CoreOn(comm, {}, nullptr, comm.rank() == 1 ? c10::kMeta : c10::kCPU);
    } catch (const c10::Error& error) {
      errors[comm.rank()] = error.what_without_backtrace();
    }
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1 computes on meta ("),
                                 HasSubstr("and rank 0 on cpu ("), HasSubstr("no GPU is visible"),
                                 HasSubstr("need the same kind of device"))));
}

TEST(Ranks, D01_MainThrowsInItsBlock_TheOthersAreReleased) {
  std::vector<int> entered(3, 0);
  const auto errors = ErrorsOf(3, {}, [&](Accelerator& a) {
    auto first = a.main_process_first();
    TORCH_CHECK(!a.is_main_process(), "in the block");
    entered[a.process_index()] = 1;
  });
  EXPECT_THAT(errors, ElementsAre(HasSubstr("in the block"), "", ""));
  EXPECT_THAT(entered, ElementsAre(0, 1, 1));
}

TEST(Ranks, MainCallsACollectiveInItsBlock_TheRanksStayInStep) {
  RunAccelerators(3, {}, [](Accelerator& a) {
    try {
      auto first = a.main_process_first();
      if (a.is_main_process()) (void)a.gather(at::ones({1}));
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 0 called AllGather"));
    }
    EXPECT_EQ(a.gather(at::full({1}, a.process_index())).sum().item<int64_t>(), 3);
  });
}

TEST(Ranks, StructureWithAnUndefinedTensor_KeepsIt) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    const std::pair<at::Tensor, at::Tensor> mine = {at::full({1}, a.process_index()), {}};
    const auto group = a.new_group({0, 1});
    for (const auto& value : {a.broadcast(mine, 1), group.broadcast(mine, 1)}) {
      EXPECT_EQ(value.first.item<int64_t>(), 1);
      EXPECT_FALSE(value.second.defined());
    }
    auto loader = a.prepare(batches(TensorDataset(at::arange(4)), 2));
    for (auto& batch : loader) {
      const auto all = a.gather_for_metrics(std::pair{batch.value(), at::Tensor()});
      EXPECT_EQ(all.first.numel(), 4);
      EXPECT_FALSE(all.second.defined());
    }
  });
}

TEST(Ranks, Numbers_AreReducedAndBroadcast) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    const auto group = a.new_group({0, 1});
    EXPECT_EQ(a.reduce(a.process_index() + 0.5, "mean"), 1);
    EXPECT_EQ(group.reduce(a.process_index() + 1), 3);
    EXPECT_EQ(a.broadcast(a.process_index() + 5, 1), 6);
    EXPECT_EQ(group.broadcast(std::pair{a.process_index(), at::ones({1})}, 1).first, 1);
  });
}

TEST(Ranks, GatherForMetrics_TakesListsOfObjectsToo) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    auto loader = a.prepare(batches(TensorDataset(at::arange(7)), 2));
    std::vector<std::string> names;
    std::vector<int64_t> ids;
    for (auto& batch : loader) {
      std::vector<std::string> mine;
      for (int64_t i = 0; i < batch.value().numel(); ++i) {
        mine.push_back("s" + std::to_string(batch.value()[i].template item<int64_t>()));
      }
      for (const std::string& name : a.gather_for_metrics(mine)) names.push_back(name);
      const auto [rows, same_names] = a.gather_for_metrics(std::pair{batch.value(), mine});
      EXPECT_EQ(static_cast<size_t>(rows.numel()), same_names.size());
      EXPECT_EQ(a.gather_for_metrics_of(batch, mine), same_names);
      const auto [all, counts] = a.gather_for_metrics(batch.value(), a.process_index());
      ids.insert(ids.end(), all.template data_ptr<int64_t>(),
                 all.template data_ptr<int64_t>() + all.numel());
      EXPECT_THAT(counts, ElementsAre(0, 1));
    }
    EXPECT_THAT(names, ElementsAre("s0", "s1", "s2", "s3", "s4", "s5", "s6"));
    EXPECT_THAT(ids, ElementsAre(0, 1, 2, 3, 4, 5, 6));
  });
}

TEST(Ranks, LocalSgd_TrainsApartAndAveragesParameters) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    std::vector<double> weights;
    {
      LocalSGD local(a, model, 2);
      for (int i = 0; i < 3; ++i) {
        auto scope = a.accumulate();
        a.backward(Loss(model(at::full({1, 1}, a.process_index(), at::kFloat))));
        optimizer.step();
        optimizer.zero_grad();
        EXPECT_EQ(local.step(), i == 1);
        weights.push_back(net->weight.item<double>());
      }
    }
    weights.push_back(net->weight.item<double>());
    // Separate steps, an average after the second one, a separate step, an average at the end.
    if (a.is_main_process()) {
      EXPECT_THAT(weights, ElementsAre(0, 1, 1, 1.5));
    } else {
      EXPECT_THAT(weights, ElementsAre(1, 1, 2, 1.5));
    }
  });
}

// Options with accumulation windows of two micro-steps.
AcceleratorOptions InWindowsOfTwo() {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = 2;
  options.accumulation.sync_with_dataloader = false;
  return options;
}

// Makes a step of OneWeight() on a batch of `x`.
template <typename Model, typename Optimizer>
void TrainOn(double x, Accelerator& a, Model& model, Optimizer& optimizer) {
  a.backward(Loss(model(at::full({1, 1}, x))));
  optimizer.step();
  optimizer.zero_grad();
}

// Otherwise equal gradients would make the ranks differ again, silently.
TEST(Ranks, LocalSgdEnds_WithOneOptimizerStateAndRateOnAllRanks) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0, .momentum = 0.5});
    auto [model, optimizer, schedule] = a.prepare(net, sgd, StepLR(1, 0.5));
    const auto step = [&](double x) { TrainOn(x, a, model, optimizer); };
    {
      LocalSGD local(a, model, 8);
      step(a.process_index());
      if (a.is_main_process()) schedule.step();
    }
    EXPECT_EQ(net->weight.item<double>(), 0.5);
    step(1);
    EXPECT_EQ(net->weight.item<double>(), 1);
  });
}

// One rank's gradients overflow while it trains separately.
TEST(Ranks, LocalSgdUnderFp16_EndsWithOneLossScaleOnAllRanks) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  RunAccelerators(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    const auto step = [&](double x) { TrainOn(x, a, model, optimizer); };
    {
      LocalSGD local(a, model, 8);
      step(a.is_main_process() ? 0 : std::numeric_limits<double>::infinity());
      EXPECT_EQ(a.optimizer_step_was_skipped(), !a.is_main_process());
      // The step at which a trigger takes effect.
      EXPECT_EQ(a.core().trigger_step(), 1);
    }
    EXPECT_EQ(a.core().trigger_step(), 1);
    EXPECT_EQ(optimizer.steps(), 1);
    step(1);
    EXPECT_EQ(net->weight.item<double>(), 1);
  });
}

// The loss scale changes when all optimizers have stepped with it, not when only some have, and
// another one did inside LocalSGD.
TEST(Ranks, LocalSgdUnderFp16_EndsWithNoOptimizerThatHasSteppedAtTheNewScale) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  RunAccelerators(2, options, [](Accelerator& a) {
    torch::nn::Linear first = OneWeight(), second = OneWeight();
    FusedSGD first_sgd(first->parameters(), {.lr = 1.0});
    FusedSGD second_sgd(second->parameters(), {.lr = 1.0});
    auto [first_model, second_model, first_optimizer, second_optimizer] =
        a.prepare(first, second, first_sgd, second_sgd);
    const auto backward = [&](double x, double y) {
      a.backward(Loss(first_model(at::full({1, 1}, x))) + Loss(second_model(at::full({1, 1}, y))));
    };
    {
      LocalSGD local(a, first_model, 8);
      backward(0, 0);
      first_optimizer.step();
    }
    first_optimizer.zero_grad();
    second_optimizer.zero_grad();
    const double before = first->weight.item<double>();
    backward(1, std::numeric_limits<double>::infinity());
    second_optimizer.step();
    first_optimizer.step();
    EXPECT_EQ(std::abs(first->weight.item<double>() - before), 1);
  });
}

TEST(Ranks, LocalSgdUnderFp16ThatEndsInAWindow_KeepsItsGradientsInTheScaleOfAll) {
  AcceleratorOptions options = InWindowsOfTwo();
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  RunAccelerators(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    const auto micro_step = [&](double x) {
      auto scope = a.accumulate();
      TrainOn(x, a, model, optimizer);
    };
    {
      LocalSGD local(a, model, 8);
      // Halves the loss scale of one rank.
      for (int i = 0; i < 2; ++i) {
        micro_step(a.is_main_process() ? 0 : std::numeric_limits<double>::infinity());
      }
      micro_step(1);
    }
    micro_step(1);
    EXPECT_EQ(net->weight.item<double>(), 1);
  });
}

TEST(Ranks, LocalSgdUnderFp16_KeepsGradientsThatWaitByHandInTheScaleOfAll) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  RunAccelerators(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    {
      LocalSGD local(a, model, 8);
      // Halves the loss scale of one rank.
      TrainOn(a.is_main_process() ? 0 : std::numeric_limits<double>::infinity(), a, model,
              optimizer);
      const auto scope = a.no_sync();
      a.backward(Loss(model(at::full({1, 1}, 1.0))));
    }
    TrainOn(1, a, model, optimizer);
    EXPECT_EQ(net->weight.item<double>(), 2);
  });
}

// A schedule of the program's: it cannot go back.
struct HalvingLr : torch::optim::LRScheduler {
  explicit HalvingLr(torch::optim::Optimizer& optimizer) : LRScheduler(optimizer) {}
  std::vector<double> get_lrs() override {
    std::vector<double> rates = get_current_lrs();
    for (double& rate : rates) rate /= 2;
    return rates;
  }
};

TEST(Ranks, LocalSgdUnderFp16WithAScheduleThatCannotGoBack_EndsWithTheFurthest) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  for (const bool main_is_behind : {true, false}) {
    RunAccelerators(2, options, [&](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      torch::optim::SGD sgd(net->parameters(), 1.0);
      HalvingLr halving(sgd);
      auto [model, optimizer, schedule] = a.prepare(net, sgd, halving);
      {
        LocalSGD local(a, model, 8);
        for (int i = 0; i < 3; ++i) {
          const bool overflows = i > 0 && a.is_main_process() == main_is_behind;
          TrainOn(overflows ? std::numeric_limits<double>::infinity() : 0, a, model, optimizer);
          schedule.step();
        }
      }
      // That of rank 0, if the other rank can follow.
      EXPECT_EQ(schedule.step_count(), 3) << main_is_behind;
      EXPECT_EQ(schedule.last_lr(), 0.125) << main_is_behind;
    });
  }
}

// A loss scale of 0 makes every gradient zero: silently, no step would ever follow.
TEST(Ranks, GradientsThatAreNeverFiniteUnderFp16_AreAnErrorWhenTheLossScaleIsZero) {
  AcceleratorOptions options;
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 4e-45;
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int i = 0; i < 4; ++i) {
      TrainOn(std::numeric_limits<double>::infinity(), a, model, optimizer);
      EXPECT_TRUE(a.optimizer_step_was_skipped());
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr("infinite or NaN at every loss scale of fp16")));
}

// A rank that has run out of batches would keep its average.
TEST(JoinUnevenInputs, AverageOfWeights_IsRefused) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    Ema ema(a, model, {.decay = 0.5});
    auto join = a.join_uneven_inputs();
    auto scope = a.accumulate();
    a.backward(Loss(model(at::ones({1, 1}))));
    optimizer.step();
    ema.update();
  });
  EXPECT_THAT(errors,
              Each(HasSubstr("an average of weights is updated inside join_uneven_inputs()")));
}

// A rank without batches cannot know which of them the others train, and in which order.
TEST(JoinUnevenInputs, SeveralModelsThatAreTrained_AreRefused) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    auto first = a.prepare(OneWeight());
    auto second = a.prepare(OneWeight());
    auto join = a.join_uneven_inputs();
    auto scope = a.accumulate();
    a.backward(Loss(second(first(at::ones({1, 1})))));
  });
  EXPECT_THAT(errors, Each(HasSubstr("join_uneven_inputs() with 2 prepared models")));
}

TEST(JoinUnevenInputs, SecondBackwardOfAMicroStep_IsRefused) {
  for (const bool one_graph : {false, true}) {
    const auto errors = ErrorsOf(2, {}, [&](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      FusedSGD sgd(net->parameters(), {.lr = 1.0});
      auto [model, optimizer] = a.prepare(net, sgd);
      auto join = a.join_uneven_inputs();
      for (int i = 0; i < (a.is_main_process() ? 1 : 2); ++i) {
        auto scope = a.accumulate();
        at::Tensor loss = Loss(model(at::ones({1, 1})));
        a.backward(loss, {.retain_graph = one_graph});
        if (!one_graph) loss = Loss(model(at::ones({1, 1})));
        a.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    EXPECT_THAT(
        errors,
        Each(AllOf(HasSubstr("a second backward() of one accumulate() inside "
                             "join_uneven_inputs(): the first one has exchanged the gradients of "
                             "prepared model 0 (whose first parameter is 'weight')"),
                   HasSubstr("or begin a micro-step (accumulate()) for each"),
                   HasSubstr("train outside of this scope"))));
  }
}

// The scope covers the first of two losses only.
TEST(JoinUnevenInputs, BackwardBehindAMicroStep_IsNotTakenForOneOfIt) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    auto join = a.join_uneven_inputs();
    at::Tensor out;
    {
      auto scope = a.accumulate();
      out = model(at::ones({1, 1}));
      a.backward(Loss(out), {.retain_graph = true});
    }
    a.backward(Loss(out * 2));
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("backward() after the scope of accumulate() inside "
                                           "join_uneven_inputs()"),
                                 HasSubstr("prepared model 0 (whose first parameter is 'weight')"),
                                 Not(HasSubstr("a second backward() of one accumulate()")))));
}

// The way out that the error names.
TEST(JoinUnevenInputs, MicroStepForEachOfTwoLosses_Trains) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    {
      auto join = a.join_uneven_inputs();
      for (int i = 0; i < (a.is_main_process() ? 1 : 2); ++i) {
        for (const double x : {1, 2}) {
          auto scope = a.accumulate();
          TrainOn(x, a, model, optimizer);
        }
      }
    }
    EXPECT_EQ(net->weight.item<double>(), 3 + 1.5);
  });
}

TEST(JoinUnevenInputs, ModelsThatAreNotTrained_TakeNoPart) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight(), frozen = OneWeight(), other = OneWeight();
    frozen->weight.requires_grad_(false);
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    auto teacher = a.prepare(frozen);
    // Of another phase, which is over.
    auto earlier = a.prepare(other);
    a.backward(Loss(earlier(at::ones({1, 1}))));
    other->weight.requires_grad_(false);
    {
      auto join = a.join_uneven_inputs();
      for (int i = 0; i < (a.is_main_process() ? 1 : 3); ++i) {
        auto scope = a.accumulate();
        a.backward(Loss(model(at::ones({1, 1})) + teacher(at::ones({1, 1}))));
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    // The mean over all ranks, of which one had nothing twice.
    EXPECT_EQ(net->weight.item<double>(), 2);
  });
}

// As adversarial training computes the gradient of its input first.
TEST(JoinUnevenInputs, PassToTheInputAlone_IsNoExchange) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    {
      auto join = a.join_uneven_inputs();
      for (int i = 0; i < (a.is_main_process() ? 1 : 2); ++i) {
        auto scope = a.accumulate();
        const at::Tensor x = at::ones({1, 1}).requires_grad_(true);
        a.backward(Loss(model(x)), {.inputs = {x}});
        EXPECT_TRUE(x.grad().defined());
        a.backward(Loss(model(at::ones({1, 1}))));
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_EQ(net->weight.item<double>(), 1.5);
  });
}

// As for the discriminator while a generator trains that is not prepared. The process without
// batches has not frozen it.
TEST(JoinUnevenInputs, ModelThatIsFrozenInTheLoop_IsFollowedByProcessesWithoutBatches) {
  for (const bool in_scope : {false, true}) {
    RunAccelerators(2, {}, [&](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      FusedSGD sgd(net->parameters(), {.lr = 1.0});
      auto [model, optimizer] = a.prepare(net, sgd);
      const auto step = [&] {
        a.backward(Loss(model(at::ones({1, 1}).requires_grad_(true))));
        optimizer.step();
        optimizer.zero_grad();
      };
      {
        auto join = a.join_uneven_inputs();
        for (int i = 0; i < (a.is_main_process() ? 1 : 4); ++i) {
          if (i == 1 && !in_scope) net->weight.set_requires_grad(false);
          auto scope = a.accumulate();
          if (i == 1 && in_scope) net->weight.set_requires_grad(false);
          step();
        }
      }
      EXPECT_FALSE(net->weight.requires_grad());
      EXPECT_EQ(net->weight.item<double>(), 1);
      net->weight.set_requires_grad(true);
      step();
      EXPECT_EQ(net->weight.item<double>(), 2);
    });
  }
}

// In a window only its end exchanges.
TEST(JoinUnevenInputs, BackwardsThatExchangeNothing_AreNotCounted) {
  RunAccelerators(2, InWindowsOfTwo(), [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    {
      auto join = a.join_uneven_inputs();
      for (int i = 0; i < 4; ++i) {
        auto scope = a.accumulate();
        for (int pass = a.sync_gradients() ? 1 : 0; pass < 2; ++pass) {
          a.backward(Loss(model(at::ones({1, 1}))));
        }
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_EQ(net->weight.item<double>(), 3);
  });
}

TEST(JoinUnevenInputs, WindowThatIsOpenAtItsEnd_IsGivenUpOnAllRanks) {
  RunAccelerators(2, InWindowsOfTwo(), [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    const auto micro_step = [&] {
      auto scope = a.accumulate();
      TrainOn(1, a, model, optimizer);
    };
    {
      auto join = a.join_uneven_inputs();
      for (int i = 0; i < (a.is_main_process() ? 2 : 3); ++i) micro_step();
    }
    EXPECT_EQ(net->weight.item<double>(), 1);
    micro_step();
    EXPECT_EQ(net->weight.item<double>(), 1);
    micro_step();
    EXPECT_EQ(net->weight.item<double>(), 2);
  });
}

TEST(Ranks, ModelForEvaluation_ExchangesNothing) {
  RunAccelerators(2, {}, [](Accelerator& a) {
    auto model = a.prepare_model(OneWeight(), /*evaluation_mode=*/true);
    EXPECT_EQ(model.slot()->ddp(), nullptr);
    // Only one rank, because an exchange would wait for the other.
    if (a.is_main_process()) {
      Loss(model(at::ones({1, 1}))).backward();
      EXPECT_EQ(model->weight.grad().item<double>(), -1);
    }
  });
}

struct Counter {
  int64_t value = 0;
  at::Tensor row = at::zeros({2});
  StateDict state_dict() const {
    StateDict state;
    state.SetInt("value", value);
    state.SetTensor("row", row);
    return state;
  }
  void load_state_dict(const StateDict& state) {
    value = *state.GetInt("value");
    row = *state.GetTensor("row");
  }
};

TEST(Ranks, LoadWeights_ThatFitOnOneRankOnly_AreTheSameErrorOnAllAndChangeNone) {
  AcceleratorOptions options;
  options.project.directory = TestDir("weights_on_two");
  std::vector<std::string> errors(2);
  RunAccelerators(2, options, [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    const auto fill = [&](double value) {
      at::NoGradGuard no_grad;
      model->weight.fill_(value);
    };
    fill(3);
    ASSERT_TRUE(a.save_state().ok());
    fill(5);
    LoadWeightsOptions rules;
    if (a.process_index() == 1) rules.rename = [](const std::string&) { return "other"; };
    const auto refused = a.load_weights("", rules);
    errors[a.process_index()] = refused.status().ToString();
    EXPECT_EQ(model->weight.item<double>(), 5);
    const auto loaded = a.load_weights();
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(model->weight.item<double>(), 3);
    EXPECT_THAT(loaded->left_out,
                ElementsAre("random_states_0.safetensors", "random_states_1.safetensors"));
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1: "), HasSubstr("missing: weight"))));
  EXPECT_EQ(errors[0], errors[1]);
}

// A checkpoint of another program; one of its models fits.
TEST(Ranks, LoadState_OneOfTwoModelsDoesNotFit_ChangesNeither_AndTrainingGoesOn) {
  AcceleratorOptions options;
  options.project.directory = TestDir("another_model");
  RunAccelerators(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [first, second, optimizer] = a.prepare(net, torch::nn::Linear(2, 3), sgd);
    const at::NoGradGuard no_grad;
    first->weight.fill_(3);
    ASSERT_TRUE(a.save_state().ok());
  });
  std::vector<std::string> errors(2);
  RunAccelerators(2, options, [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [first, second, optimizer] = a.prepare(net, torch::nn::Linear(2, 4), sgd);
    {
      const at::NoGradGuard no_grad;
      first->weight.fill_(5);
    }
    errors[a.process_index()] = a.load_state_if_present().ToString();
    EXPECT_EQ(net->weight.item<double>(), 5);
    a.backward(Loss(first(at::ones({1, 1}))));
    optimizer.step();
    EXPECT_NE(net->weight.item<double>(), 5);
    EXPECT_TRUE(a.save_state().ok());
  });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_THAT(errors[0], AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("model_1.safetensors"),
                               HasSubstr("different: ")));
}

// Trains on `ranks` ranks from the newest checkpoint, if any, until optimizer step `until`; returns
// the samples in the order of the epoch.
std::vector<int64_t> TrainUntil(int ranks, const std::string& root, int64_t until, int64_t per_rank,
                                const std::string& precision = "no") {
  AcceleratorOptions options;
  options.mixed_precision = precision;
  options.grad_scaler.init_scale = 16;
  options.project.directory = root;
  options.data_loader.data_seed = 3;
  options.gradient_accumulation_steps = 2;
  std::vector<int64_t> seen;
  RunAccelerators(ranks, options, [&](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedAdamW adamw(net->parameters());
    auto [model, optimizer, loader] = a.prepare(
        net, adamw,
        batches(TensorDataset(at::arange(32, at::kFloat).unsqueeze(1)), per_rank).shuffle(true));
    Counter counter;
    a.register_for_checkpointing(counter);
    const absl::Status loaded = a.load_state_if_present();
    EXPECT_TRUE(loaded.ok()) << loaded;
    EXPECT_EQ(counter.value, a.global_step());
    for (auto& batch : loader) {
      auto scope = a.accumulate();
      // D22: the ranks agree on the ends of windows, including the ranks that are new.
      EXPECT_EQ(a.reduce(at::full({}, a.sync_gradients() ? 1 : 0), "sum").item<int64_t>() % ranks,
                0);
      const at::Tensor all = a.gather_for_metrics(batch.value()).to(at::kLong);
      if (a.is_main_process()) {
        seen.insert(seen.end(), all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel());
      }
      a.backward(Loss(model(batch.value())));
      optimizer.step();
      optimizer.zero_grad();
      counter.value = a.global_step();
      counter.row.fill_(static_cast<double>(counter.value));
      if (a.global_step() == until && a.sync_gradients()) break;
    }
    EXPECT_EQ(counter.row[0].item<double>(), a.global_step());
    const absl::Status saved = a.save_state();
    EXPECT_TRUE(saved.ok()) << saved;
  });
  return seen;
}

TEST(Ranks, D22_ResumedOnMoreRanks_KeepStepsTogetherAndTheOrder) {
  const std::vector<int64_t> whole = TrainUntil(1, TestDir("whole"), -1, 4);
  ASSERT_EQ(whole.size(), 32u);
  std::vector<int64_t> parts = TrainUntil(1, TestDir("grown"), 2, 4);
  for (const int64_t id : TrainUntil(2, TestDir("grown"), 3, 2)) parts.push_back(id);
  for (const int64_t id : TrainUntil(3, TestDir("grown"), -1, 1)) parts.push_back(id);
  EXPECT_EQ(parts, whole);
}

TEST(Ranks, D20_PlaceInTheData_IsWrittenAndComesBack) {
  TrainUntil(2, TestDir("place"), 2, 2);
  const auto reader = StateReader::Open(TestDir("place") + "/checkpoints/checkpoint_0");
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE(reader->Has(SamplerFileName(0)));
  EXPECT_EQ(TrainUntil(2, TestDir("place"), -1, 2).size(), 32u - 2 * 2 * 4);
}

TEST(Ranks, D21_EveryRanksFiles_HaveTheirOwnNames) {
  TrainUntil(2, TestDir("names"), 2, 2, "fp16");
  const auto reader = StateReader::Open(TestDir("names") + "/checkpoints/checkpoint_0");
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::vector<std::string> names;
  for (const ManifestFile& file : reader->manifest().files) {
    EXPECT_EQ(file.rank, file.name == RandomStatesFileName(1) ? 1 : 0) << file.name;
    names.push_back(file.name);
  }
  // The loss scale, which all ranks have, too: of one of them.
  EXPECT_EQ(std::count(names.begin(), names.end(), ScalerFileName(0)), 1);
  EXPECT_EQ(std::count(names.begin(), names.end(), RandomStatesFileName(1)), 1);
}

// One process alone has the same batches either way.
TEST(Ranks, D40_SplitBatches_IsNeverIgnored) {
  for (const bool split : {false, true}) {
    AcceleratorOptions options;
    options.data_loader.split_batches = split;
    RunAccelerators(2, options, [&](Accelerator& a) {
      auto loader = a.prepare(batches(TensorDataset(at::ones({8, 1})), 4));
      EXPECT_EQ(a.split_batches(), split);
      EXPECT_EQ(loader.total_batch_size(), split ? 4 : 8);  // of all processes together
      EXPECT_EQ(loader.size(), split ? 2 : 1);
      for (auto& batch : loader) EXPECT_EQ(batch.value().size(0), split ? 2 : 4);
    });
  }
}

TEST(Ranks, SaveHooks_ChangeWhatIsWrittenAndLoaded) {
  AcceleratorOptions options;
  options.project.directory = TestDir("hooks");
  RunAccelerators(2, options, [](Accelerator& a) {
    auto [first, second] = a.prepare(OneWeight(), OneWeight());
    {
      at::NoGradGuard no_grad;
      first->weight.fill_(1);
      second->weight.fill_(2);
    }
    auto saving = a.register_save_state_pre_hook(
        [&](std::vector<NamedTensors>& weights, StateWriter& writer) {
          weights[1].clear();
          StateDict mine;
          mine.SetInt("rank", a.process_index());
          const absl::Status status =
              writer.Write("own_" + std::to_string(a.process_index()) + ".json", mine);
          EXPECT_TRUE(status.ok()) << status;
        });
    int64_t loaded_rank = -1;
    auto loading = a.register_load_state_pre_hook(
        [&](std::vector<NamedTensors>& weights, const StateReader& reader) {
          EXPECT_EQ(weights[0].size(), 1u);
          EXPECT_THAT(weights[1], IsEmpty());
          loaded_rank =
              *reader.Read("own_" + std::to_string(a.process_index()) + ".json")->GetInt("rank");
        });
    ASSERT_TRUE(a.save_state().ok());
    EXPECT_EQ(a.save_iteration(), 1);
    {
      at::NoGradGuard no_grad;
      first->weight.fill_(7);
      second->weight.fill_(8);
    }
    ASSERT_TRUE(a.load_state().ok());
    EXPECT_EQ(loaded_rank, a.process_index());
    EXPECT_EQ(first->weight.item<double>(), 1);
    EXPECT_EQ(second->weight.item<double>(), 8);

    // Loads only the weights: the hook decides here, too.
    {
      at::NoGradGuard no_grad;
      first->weight.fill_(7);
    }
    const auto weights = a.load_weights();
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(first->weight.item<double>(), 1);
    EXPECT_EQ(second->weight.item<double>(), 8);
    EXPECT_THAT(weights->models[1].missing, ElementsAre("weight"));

    // Without the hook, a model that the checkpoint lacks is an error.
    loading.remove();
    loading.remove();
    EXPECT_THAT(a.load_state().ToString(), HasSubstr("weight"));
    saving.remove();
    ASSERT_TRUE(a.save_state().ok());
    EXPECT_TRUE(a.load_state().ok());
  });
}

// With hooks all ranks load sharded models together. The first model of the second program fits,
// the second one does not: only on rank 1, or on both.
TEST(Ranks, ShardedModelOfAHook_ThatDoesNotFit_IsAnErrorOnAllRanks_AndNothingChanges) {
  const std::string dir = TestDir("sharded_misfit");
  AcceleratorOptions options;
  options.sharding = ParseSharding("zero3", 2);
  const auto filled = [](double value) {
    torch::nn::Linear net(torch::nn::LinearOptions(2, 2).bias(false));
    at::NoGradGuard no_grad;
    net->weight.fill_(value);
    return net;
  };
  RunAccelerators(2, options, [&](Accelerator& a) {
    auto [first, second] = a.prepare(filled(1), filled(2));
    ASSERT_TRUE(a.save_state(dir).ok());
  });
  for (const std::string how : {"misfit on rank 1", "misfit on all", "empty on rank 1"}) {
    RunAccelerators(2, options, [&](Accelerator& a) {
      auto [first, second] = a.prepare(filled(7), filled(8));
      auto loading = a.register_load_state_pre_hook(
          [&](std::vector<NamedTensors>& weights, const StateReader&) {
            if (how != "misfit on all" && a.is_main_process()) return;
            if (how == "empty on rank 1") {
              weights[1].clear();
            } else {
              weights[1][0].second = at::zeros({2, 3});
            }
          });
      EXPECT_THAT(a.load_state(dir).ToString(),
                  HasSubstr(how == "empty on rank 1" ? "a hook of load_state() on rank 1"
                                                     : "model_1.safetensors"))
          << how;
      const auto now = WeightsOf(a, first);
      if (a.is_main_process()) {
        EXPECT_TRUE(at::equal(now.at("weight"), at::full({2, 2}, 7))) << how;
      }
      // All ranks continue together.
      loading.remove();
      EXPECT_TRUE(a.load_state(dir).ok()) << how;
    });
  }
}

TEST(Ranks, OptimizerThatDoesNotFit_IsAnErrorBeforeModelsChange) {
  using Group = ParamGroup<SGDOptions>;
  const std::string dir = TestDir("optimizer_misfit");
  for (const bool save : {true, false}) {
    RunAccelerators(2, {}, [&](Accelerator& a) {
      torch::nn::Linear net(torch::nn::LinearOptions(1, 1));
      {
        at::NoGradGuard no_grad;
        net->weight.fill_(save ? 3 : 5);
      }
      const SGDOptions sgd_options = {.lr = 1.0};
      FusedSGD sgd(
          save ? std::vector<Group>{{net->parameters(), sgd_options}}
               : std::vector<Group>{{{net->weight}, sgd_options}, {{net->bias}, sgd_options}});
      auto [model, optimizer] = a.prepare(net, sgd);
      if (save) {
        ASSERT_TRUE(a.save_state(dir).ok());
        return;
      }
      EXPECT_THAT(a.load_state(dir).ToString(), HasSubstr("optimizer.safetensors: "));
      EXPECT_EQ(model->weight.item<double>(), 5);
    });
  }
}

// A program with one object that differs from the saved one.
struct Program {
  SGDOptions optimizer = {.lr = 1.0, .momentum = 0.9};
  int64_t samples = 8;
  bool plateau = false;
};

TEST(Ranks, WhatDoesNotFit_IsNamedBeforeAnythingChanges) {
  const std::string dir = TestDir("misfits");
  const auto run = [&](const Program& program, const std::string& misfit) {
    RunAccelerators(2, {}, [&](Accelerator& a) {
      torch::nn::Linear net = OneWeight();
      FusedSGD sgd(net->parameters(), program.optimizer);
      auto [model, optimizer, loader] = a.prepare(
          net, sgd,
          batches(TensorDataset(at::arange(program.samples, at::kFloat).unsqueeze(1)), 1));
      std::optional<AcceleratedScheduler> schedule;
      std::optional<AcceleratedPlateau> plateau;
      if (program.plateau) {
        plateau = a.prepare_scheduler(optimizer, PlateauSchedule({.factor = 0.5}));
      } else {
        schedule = a.prepare_scheduler(optimizer, StepLR(1, 0.5));
      }
      Counter counter;
      a.register_for_checkpointing(counter);
      // One batch, so that every object has a state.
      for (auto& batch : loader) {
        auto scope = a.accumulate();
        a.backward(Loss(model(batch.value())));
        optimizer.step();
        break;
      }
      counter.value = misfit.empty() ? 3 : 5;
      const at::NoGradGuard no_grad;
      net->weight.fill_(misfit.empty() ? 3 : 5);
      sgd.set_lr(0, misfit.empty() ? 0.25 : 0.125);
      if (misfit.empty()) {
        ASSERT_TRUE(a.save_state(dir).ok());
        return;
      }
      const absl::Status loaded = a.load_state(dir);
      EXPECT_THAT(loaded.ToString(), HasSubstr(misfit + ": "));
      EXPECT_EQ(net->weight.item<double>(), 5);
      EXPECT_EQ(sgd.lr(0), 0.125);
      EXPECT_EQ(counter.value, 5);
    });
  };
  run({}, "");
  run({.optimizer = {.lr = 1.0}}, "optimizer.safetensors");
  run({.samples = 12}, "sampler.safetensors");
  run({.plateau = true}, "scheduler.json");
}

TEST(Ranks, SaveModel_IsWrittenOnceAndReadByName) {
  const std::string directory = TestDir("model");
  RunAccelerators(2, {}, [&](Accelerator& a) {
    auto model = a.prepare(torch::nn::Linear(3, 2));
    EXPECT_TRUE(a.save_model(model, directory).ok());
    const auto read = LoadTensors(directory + "/model.safetensors");
    const auto state = a.get_state_dict(model);
    ASSERT_EQ(read.size(), state.size());
    for (const auto& [name, tensor] : state) EXPECT_TRUE(at::equal(read.at(name), tensor)) << name;
    // The next save replaces what the other rank may still read.
    a.wait_for_everyone();
    EXPECT_THAT(a.save_model(model, directory, "many").ToString(), HasSubstr("many"));
    EXPECT_TRUE(a.save_model(model, directory, "0.024KB").ok());
    EXPECT_EQ(LoadTensors(directory + "/model-00001-of-00002.safetensors").size(), 1u);
    // /proc is not writable; the error of rank 0 reaches all ranks.
    EXPECT_FALSE(a.save_model(model, "/proc/nowhere").ok());
    EXPECT_TRUE(a.save(state, TestDir("tensors.safetensors")).ok());
    // Not in place of files that a manifest describes, but beside them.
    const std::string checkpoint = TestDir("a checkpoint");
    ASSERT_TRUE(a.save_state(checkpoint).ok());
    const absl::Status refused = a.save(state, checkpoint + "/model.safetensors");
    EXPECT_EQ(absl::IsAlreadyExists(refused), a.is_main_process()) << refused;
    EXPECT_TRUE(a.save(state, checkpoint + "/more.safetensors").ok());
    a.wait_for_everyone();
    const absl::Status loaded = a.load_state(checkpoint);
    EXPECT_TRUE(loaded.ok()) << loaded;
  });
  EXPECT_EQ(LoadTensors(TestDir("tensors.safetensors")).size(), 2u);
}

TEST(Ranks, FindExecutableBatchSize_IsAgreed) {
  std::vector<int64_t> sizes(2);
  RunAccelerators(2, {}, [&](Accelerator& a) {
    sizes[a.process_index()] = find_executable_batch_size(
        a, 16,
        [&](int64_t size) { TORCH_CHECK(size <= (a.is_main_process() ? 16 : 4), "out of memory"); },
        [](int64_t size) { return size / 2; });
  });
  EXPECT_THAT(sizes, ElementsAre(4, 4));
}

TEST(Ranks, RegisteredInAnAttemptThatFailedOnAnotherRank_IsNotSaved) {
  const std::string dir = TestDir("attempts");
  RunAccelerators(2, {}, [&](Accelerator& a) {
    int saves = 0;  // of this rank's objects
    find_executable_batch_size(
        a, 2,
        [&](int64_t size) {
          a.register_save_state_pre_hook([&](auto&, auto&) { ++saves; });
          if (size == 2) {
            TORCH_CHECK(a.is_main_process(), "out of memory");
            return;
          }
          const absl::Status saved = a.save_state(dir);
          EXPECT_TRUE(saved.ok()) << saved;
        },
        [](int64_t size) { return size / 2; });
    EXPECT_EQ(saves, 1) << "the hook of the first attempt has ended with it";
  });
}

// --- Bad input: the same clear error on every rank, and none waits ---

TEST(BadInput, ShapesThatDiffer_AreNamedOnEveryRank) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    (void)a.gather(at::ones({2, a.process_index() + 3}));
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("[2, 3]"), HasSubstr("[2, 4]"),
                                 HasSubstr("pad_across_processes"))));
  EXPECT_THAT(
      ErrorsOf(2, {}, [](Accelerator& a) { (void)a.reduce(at::ones({a.process_index() + 1})); }),
      Each(HasSubstr("rank 1")));
}

TEST(BadInput, DifferentCollectives_AreNamedOnEveryRank) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    if (a.is_main_process()) {
      (void)a.gather(at::ones({2}));
    } else {
      (void)a.reduce(at::ones({2}));
    }
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("AllGather"), HasSubstr("AllReduce"))));
}

// A change of the options of one rank, and its name in the message.
using Changes = std::vector<std::pair<std::string, std::function<void(AcceleratorOptions&)>>>;

// Expects that each of `changes`, on rank 1 alone, is named on every rank.
void ExpectNamed(const Changes& changes, const AcceleratorOptions& usual = {}) {
  for (const auto& [name, change] : changes) {
    std::vector<std::string> errors(2);
    RunGlooRanks(2, [&, &change = change](Comm& comm) {
      AcceleratorOptions options = usual;
      if (comm.rank() == 1) change(options);
      try {
        Accelerator accelerator(CoreOn(comm, options));
      } catch (const c10::Error& error) {
        errors[comm.rank()] = error.what_without_backtrace();
      }
    });
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1 has "), HasSubstr(" " + name + " "),
                                   HasSubstr("give all processes of a job the same settings"))));
  }
}

// Settings that would make the weights of the ranks differ silently, or leave one waiting for an
// exchange.
TEST(BadInput, SettingsOfStepsThatDiffer_AreNamedOnEveryRank) {
  AcceleratorOptions fp16;
  fp16.mixed_precision = "fp16";
  ExpectNamed(
      {{"gradient_clipping=0.5", [](auto& o) { o.gradient_clipping = 0.5; }},
       {"grad_scaler.init_scale=4096.0", [](auto& o) { o.grad_scaler.init_scale = 4096; }},
       {"grad_scaler.growth_interval=7", [](auto& o) { o.grad_scaler.growth_interval = 7; }},
       {"grad_scaler.enabled=false", [](auto& o) { o.grad_scaler.enabled = false; }},
       {"accumulation.sync_with_dataloader=false",
        [](auto& o) { o.accumulation.sync_with_dataloader = false; }},
       {"accumulation.sync_each_batch=true",
        [](auto& o) { o.accumulation.sync_each_batch = true; }},
       {"accumulation.adjust_scheduler=true",
        [](auto& o) { o.accumulation.adjust_scheduler = true; }},
       {"accumulation.short_window=kLikeAccelerate",
        [](auto& o) { o.accumulation.short_window = ShortWindow::kLikeAccelerate; }},
       {"check_finite_loss=true", [](auto& o) { o.check_finite_loss = true; }},
       {"step_scheduler_with_optimizer=false",
        [](auto& o) { o.step_scheduler_with_optimizer = false; }},
       {"scheduler_units=kProcesses",
        [](auto& o) { o.scheduler_units = SchedulerUnits::kProcesses; }}},
      fp16);
  // Without fp16 nothing has a loss scale.
  RunGlooRanks(2, [](Comm& comm) {
    AcceleratorOptions options;
    options.grad_scaler.init_scale = comm.rank() + 1;
    EXPECT_NO_THROW(CoreOn(comm, options));
  });
}

// Ranks that save in different ways would wait for each other.
TEST(BadInput, CheckpointsThatDiffer_AreNamedOnEveryRank) {
  ExpectNamed({
      {"checkpoint.asynchronous=true", [](auto& o) { o.checkpoint.asynchronous = true; }},
      {"checkpoint.memory=true", [](auto& o) { o.checkpoint.memory = true; }},
      {"checkpoint.mirror=false", [](auto& o) { o.checkpoint.mirror = false; }},
      {"checkpoint.disk_every=3", [](auto& o) { o.checkpoint.disk_every = 3; }},
      {"checkpoint.keep=2", [](auto& o) { o.checkpoint.keep = 2; }},
      {"checkpoint.keep_every=5", [](auto& o) { o.checkpoint.keep_every = 5; }},
      {"checkpoint.promote=false", [](auto& o) { o.checkpoint.promote = false; }},
      {"project.total_limit=4", [](auto& o) { o.project.total_limit = 4; }},
      {"project.save_on_each_node=true", [](auto& o) { o.project.save_on_each_node = true; }},
  });
}

using GiveDirectory = std::function<absl::Status(Accelerator&, const std::string&)>;

// Returns the messages of two ranks; one is given a directory, the other another directory or none.
std::vector<std::string> ErrorsOfDirectories(const GiveDirectory& call,
                                             const std::vector<std::string>& directories) {
  std::vector<std::string> errors(2);
  AcceleratorOptions options;
  options.project.directory = TestDir("directories");
  RunAccelerators(2, options, [&](Accelerator& a) {
    auto model = a.prepare(torch::nn::Linear(1, 1));
    const absl::Status status = call(a, directories[a.process_index()]);
    errors[a.process_index()] = std::string(status.message());
  });
  return errors;
}

TEST(BadInput, DirectoryOfOneRankAlone_IsToldToEveryRank) {
  const std::vector<std::pair<std::string, GiveDirectory>> calls = {
      {"save_state()", [](Accelerator& a, const auto& dir) { return a.save_state(dir); }},
      {"load_state()", [](Accelerator& a, const auto& dir) { return a.load_state(dir); }},
      {"load_state_if_present()",
       [](Accelerator& a, const auto& dir) { return a.load_state_if_present(dir); }},
      {"load_weights()",
       [](Accelerator& a, const auto& dir) { return a.load_weights(dir).status(); }},
  };
  const std::string dir = TestDir("of_one_rank");
  for (const auto& [name, call] : calls) {
    EXPECT_THAT(
        ErrorsOfDirectories(call, {dir, ""}),
        Each(HasSubstr(name + ": rank 1 gives no directory, and rank 0 " + dir + ": give all")));
    EXPECT_THAT(
        ErrorsOfDirectories(call, {"", dir}),
        Each(HasSubstr(name + ": rank 1 gives " + dir + ", and rank 0 no directory: give all")));
  }
}

// As a program saves without an Accelerator: under `if (is_main_process())`.
TEST(BadInput, CallOnTheMainProcessAlone_IsNamed) {
  const std::string dir = TestDir("on_main_alone");
  for (const auto& [name, call] : std::vector<std::pair<std::string, GiveDirectory>>{
           {"save_state()", [](Accelerator&a, const auto&to) { return a.save_state(to); }},
           {"load_state()", [](Accelerator&a, const auto&from) { return a.load_state(from); }},
           {"load_weights()",
            [](Accelerator&a, const auto&from) { return a.load_weights(from).status(); }}}) {
    absl::Status status;
    RunAccelerators(2, {}, [&, &call = call](Accelerator& a) {
      auto model = a.prepare(OneWeight());
      if (a.is_main_process()) {
        status = call(a, dir);
      } else {
        EXPECT_THROW((void)a.gather(at::ones({3})), c10::Error);
      }
    });
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(name + ": "), HasSubstr("ranks disagree about a collective"),
                      HasSubstr("every process has to call " + name)));
  }
}

// Rank 0's directory would be written, and the other rank's last checkpoint would be a folder that
// does not exist.
TEST(BadInput, SaveToAnotherDirectoryOnOneRank_IsToldToEveryRank) {
  const std::string one = TestDir("saved_as_one"), other = TestDir("saved_as_other");
  const auto save_state = [](Accelerator& a, const auto& dir) { return a.save_state(dir); };
  EXPECT_THAT(ErrorsOfDirectories(save_state, {one, other}),
              Each(HasSubstr("save_state(): rank 1 gives " + other + ", and rank 0 " + one +
                             ": give all processes the directory of one checkpoint")));
  EXPECT_FALSE(std::filesystem::exists(one));
}

TEST(BadInput, OtherCheckpointOnOneRank_IsToldToEveryRank) {
  const std::string one = TestDir("one_checkpoint"), other = TestDir("other_checkpoint");
  RunAccelerators(2, {}, [&](Accelerator& a) {
    auto model = a.prepare(torch::nn::Linear(1, 1));
    ASSERT_TRUE(a.save_state(one).ok());
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.add_(1);
    ASSERT_TRUE(a.save_state(other).ok());
  });
  const auto load_state = [](Accelerator& a, const auto& dir) { return a.load_state(dir); };
  const auto load_weights = [](Accelerator& a, const auto& dir) {
    return a.load_weights(dir).status();
  };
  for (const GiveDirectory& call : std::vector<GiveDirectory>{load_state, load_weights}) {
    EXPECT_THAT(ErrorsOfDirectories(call, {one, other}),
                Each(HasSubstr("rank 1 opens " + other + ", and rank 0 " + one +
                               ", which is another checkpoint")));
    const std::string none = one + "_that_is_not_there";
    EXPECT_THAT(ErrorsOfDirectories(call, {one, none}),
                Each(AllOf(HasSubstr("rank 1: "), HasSubstr(none),
                           HasSubstr("rank 0 sees all of " + one))));
  }
}

TEST(BadInput, LoadThatOneRankCannotMake_IsToldToEveryRank) {
  const auto load_or_not = [](Accelerator& a, const auto& dir) {
    return a.is_main_process() ? a.load_state(dir) : a.load_state_if_present(dir);
  };
  EXPECT_THAT(ErrorsOfDirectories(load_or_not, {"", ""}),
              Each(HasSubstr("rank 1 calls load_state_if_present(), and rank 0 load_state()")));
  const auto other_options = [](Accelerator& a, const auto& dir) {
    LoadWeightsOptions options;
    if (!a.is_main_process()) options.dtype = at::kBFloat16;
    return a.load_weights(dir, options).status();
  };
  const std::string dir = TestDir("of_all_ranks");
  EXPECT_THAT(ErrorsOfDirectories(other_options, {dir, dir}),
              Each(AllOf(HasSubstr("rank 1: "), HasSubstr("options.dtype"))));
}

TEST(BadInput, ModelsThatDiffer_AreNamedOnEveryRank) {
  const auto errors = ErrorsOf(
      2, {}, [](Accelerator& a) { (void)a.prepare(torch::nn::Linear(2, a.process_index() + 1)); });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1"), HasSubstr("weight"))));
}

struct OneParameter : torch::nn::Module {
  explicit OneParameter(at::Device device)
      : weight(at::ones({1, 1}, device)), offset(at::zeros({1}, device)) {
    register_parameter("weight", weight);
    // Only the buffers of a sharded model must have values.
    register_buffer("offset", offset);
  }
  at::Tensor forward(const at::Tensor& x) { return at::mm(x, weight) + offset; }
  at::Tensor weight, offset;
};

TEST(BadInput, ModelThatOneRankCannotPrepare_IsToldToEveryRank) {
  for (const char* const strategy : {"", "zero3"}) {
    AcceleratorOptions options;
    if (*strategy != '\0') options.sharding = ParseSharding(strategy, 2);
    const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
      const auto net = std::make_shared<OneParameter>(a.is_main_process() ? at::kCPU : at::kMeta);
      auto model = a.prepare(net);
    });
    EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1 cannot prepare the model"),
                                 HasSubstr("is on the meta device")));
    EXPECT_THAT(errors[1], HasSubstr("is on the meta device"));
  }
}

struct OneParameterOrNone : torch::nn::Module {
  explicit OneParameterOrNone(bool one) {
    if (one) weight = register_parameter("weight", at::ones({1, 1}));
  }
  at::Tensor forward(const at::Tensor& x) { return weight.defined() ? at::mm(x, weight) : x; }
  at::Tensor weight;
};

TEST(BadInput, ModelWithParametersOnSomeRanksOnly_IsToldToEveryRank) {
  for (const char* const strategy : {"", "zero3"}) {
    AcceleratorOptions options;
    if (*strategy != '\0') options.sharding = ParseSharding(strategy, 2);
    const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
      auto model = a.prepare(std::make_shared<OneParameterOrNone>(a.is_main_process()));
    });
    EXPECT_THAT(errors, Each(HasSubstr("rank 0 has 1 parameters and rank 1 has 0")));
  }
}

// Each process would clip by the norm of its part, and under fp16 by that of scaled gradients.
TEST(BadInput, GradientsChangedByLibTorch_WhereTheyAreNotThemselves_IsWarnedOf) {
  const auto warned = [](const std::string& how, const char* strategy, bool fp16) {
    AcceleratorOptions options;
    if (*strategy != '\0') options.sharding = ParseSharding(strategy, 2);
    if (fp16) options.mixed_precision = "fp16";
    testing::internal::CaptureStderr();
    RunAccelerators(2, options, [&](Accelerator& a) {
      torch::nn::Linear net(4, 4);
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
      auto [model, optimizer] = a.prepare(net, sgd);
      torch::nn::Linear other_net(4, 4);
      torch::optim::SGD other_sgd(other_net->parameters(), torch::optim::SGDOptions(0.1));
      auto [other_model, other_optimizer] = a.prepare(other_net, other_sgd);
      // More steps than are compared.
      for (int step = 0; step < 10; ++step) {
        a.backward(other_model(at::full({2, 4}, step + 1.0)).sum());
        other_optimizer.step();
        other_optimizer.zero_grad();
        a.backward(model(at::full({2, 4}, step + 1.0)).sum());
        const std::vector<at::Tensor> parameters = sgd.param_groups()[0].params();
        if (how == "ours") a.clip_grad_norm_(parameters, 0.01);
        if (how == "unscaled") a.unscale_gradients();
        if (how == "theirs" || how == "unscaled") {
          torch::nn::utils::clip_grad_norm_(parameters, 0.01);
        }
        if (how == "zeroed" && parameters[0].grad().defined()) parameters[0].mutable_grad().zero_();
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    const std::string text = testing::internal::GetCapturedStderr();
    const std::string words = "gradients have changed between backward() and optimizer.step()";
    const size_t first = text.find(words);
    EXPECT_EQ(text.find(words, first + 1), std::string::npos) << "once: " << text;
    return first != std::string::npos;
  };
  EXPECT_TRUE(warned("theirs", "zero3", false));
  EXPECT_TRUE(warned("theirs", "zero2", false));
  EXPECT_TRUE(warned("theirs", "", true));
  // Gradients that are complete and not scaled, or functions that are not LibTorch's.
  EXPECT_FALSE(warned("theirs", "", false));
  EXPECT_FALSE(warned("unscaled", "", true));
  for (const char* const how : {"ours", "none", "zeroed"}) {
    EXPECT_FALSE(warned(how, "zero3", false)) << how;
    EXPECT_FALSE(warned(how, "", true)) << how;
  }
}

// The other ranks have stepped: the weights of this one would stay different.
TEST(BadInput, StepThatFailsOnOneRank_EndsTrainingUntilALoad) {
  AcceleratorOptions options;
  options.project.directory = TestDir("bad step");
  std::vector<std::string> steps(2), passes(2), again(2), saves(2);
  std::vector<double> weights(2);
  RunAccelerators(2, options, [&](Accelerator& a) {
    const int rank = a.process_index();
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    ASSERT_TRUE(a.save_state().ok());
    const auto backward = [&] { a.backward(Loss(model(at::ones({1, 1})))); };
    backward();
    // A gradient that no fused optimizer takes.
    const at::Tensor gradient = net->weight.grad();
    if (rank == 1) net->weight.mutable_grad() = gradient.to(at::kDouble);
    steps[rank] = ErrorOf([&] { optimizer.step(); });
    if (rank == 1) {
      net->weight.mutable_grad() = gradient;
      passes[rank] = ErrorOf([&] { backward(); });
      again[rank] = ErrorOf([&] { optimizer.step(); });
    }
    saves[rank] = a.save_state().ToString();
    const absl::Status loaded = a.load_state();
    ASSERT_TRUE(loaded.ok()) << loaded;
    backward();
    optimizer.step();
    weights[rank] = net->weight.item<double>();
    const absl::Status saved = a.save_state();
    EXPECT_TRUE(saved.ok()) << saved;
  });
  EXPECT_THAT(steps, ElementsAre("no error", HasSubstr("its gradient")));
  EXPECT_THAT(passes[1], AllOf(HasSubstr("optimizer.step() that failed on rank 1"),
                               HasSubstr("call load_state()")));
  EXPECT_EQ(again[1].substr(again[1].find(" after ")), passes[1].substr(passes[1].find(" after ")));
  EXPECT_THAT(saves[0], AllOf(HasSubstr("rank 1: save_state() after an optimizer.step()")));
  EXPECT_THAT(saves[1], HasSubstr("save_state() after an optimizer.step()"));
  EXPECT_THAT(weights, ElementsAre(1, 1));
}

TEST(BadInput, BatchSizeThatDoesNotDivide_IsAnErrorOnEveryRank) {
  AcceleratorOptions options;
  options.data_loader.split_batches = true;
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    (void)a.prepare(batches(TensorDataset(at::ones({9, 1})), 3));
  });
  EXPECT_THAT(errors, Each(HasSubstr("batch size")));
}

TEST(BadInput, NanLossOnOneRank_IsNamedOnEveryRank) {
  AcceleratorOptions options;
  options.check_finite_loss = true;
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    const double bad = std::numeric_limits<double>::quiet_NaN();
    auto scope = a.accumulate();
    a.backward(Loss(model(at::full({1, 1}, a.is_main_process() ? 1.0 : bad))));
  });
  EXPECT_THAT(errors, Each(HasSubstr("NaN or infinite on rank 1 at step 0")));
}

TEST(BadInput, SaveHookThatThrowsOnOneRank_IsToldToEveryRank) {
  AcceleratorOptions options;
  options.project.directory = TestDir("bad hook");
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    auto hook = a.register_save_state_pre_hook([&](std::vector<NamedTensors>&, StateWriter&) {
      TORCH_CHECK(a.is_main_process(), "no room for mine");
    });
    const absl::Status status = a.save_state();
    TORCH_CHECK(status.ok(), status.ToString());
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1"), HasSubstr("no room for mine"))));
}

TEST(BadInput, RegisteredObjectThatThrowsOnOneRank_IsToldToEveryRank) {
  AcceleratorOptions options;
  options.project.directory = TestDir("bad object");
  const auto errors = ErrorsOf(2, options, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = a.prepare(net, sgd);
    a.register_for_checkpointing(
        [] {
          return PlainState{{"x", {1.0}}};
        },
        [&](const PlainState&) { TORCH_CHECK(a.is_main_process(), "cannot take it"); });
    ASSERT_TRUE(a.save_state().ok());
    {
      const at::NoGradGuard no_grad;
      net->weight.fill_(5);
      sgd.set_lr(0, 0.5);
    }
    const absl::Status status = a.load_state();
    EXPECT_EQ(net->weight.item<double>(), 5);
    EXPECT_EQ(sgd.lr(0), 0.5);
    TORCH_CHECK(status.ok(), status.ToString());
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1"), HasSubstr("cannot take it"),
                               HasSubstr("and nothing else has")));
  EXPECT_THAT(errors[1], HasSubstr("cannot take it"));
}

TEST(BadInput, SettingsThatDifferBetweenRanks_AreNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunGlooRanks(2, [&](Comm& comm) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = comm.rank() + 1;
    try {
      CoreOn(comm, options);
    } catch (const c10::Error& error) {
      errors[comm.rank()] = error.what_without_backtrace();
    }
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1"), HasSubstr("accumulation_steps=2"))));
}

TEST(BadInput, ScheduleForAForgottenOptimizer_IsRefused) {
  const auto errors = ErrorsOf(2, {}, [](Accelerator& a) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto optimizer = a.prepare(sgd);
    a.free_memory();
    (void)a.prepare_scheduler(optimizer, StepLR(1));
  });
  EXPECT_THAT(errors, Each(HasSubstr("did not prepare")));
}

TEST(BadInput, WrongOrderOfCalls_IsRefusedOnEveryRankTheSame) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = 2;
  options.project.directory = TestDir("order");
  const auto refused = [&](const std::function<void(Accelerator&)>& function) {
    return ErrorsOf(2, options, function);
  };
  EXPECT_THAT(refused([](Accelerator& a) {
                a.log({{"loss", 1.0}});
              }),
              Each(HasSubstr("before init_trackers()")));
  EXPECT_THAT(refused([](Accelerator& a) {
                auto model = a.prepare(OneWeight());
                auto scope = a.accumulate();
                a.clip_grad_norm_(model->parameters(), 1.0);
              }),
              Each(HasSubstr("only where accelerator.sync_gradients()")));
  EXPECT_THAT(refused([](Accelerator& a) {
                auto model = a.prepare(OneWeight());
                auto scope = a.accumulate();
                const absl::Status status = a.save_state();
                TORCH_CHECK(status.ok(), status.ToString());
              }),
              Each(HasSubstr("middle of an accumulation window")));
  // One rank cannot save, and no other rank waits for it.
  EXPECT_THAT(refused([](Accelerator& a) {
                auto model = a.prepare(OneWeight());
                const auto in_a_window = [&] {
                  auto scope = a.accumulate();
                  return a.save_state();
                };
                const absl::Status status = a.process_index() == 1 ? in_a_window() : a.save_state();
                TORCH_CHECK(status.ok(), status.ToString());
              }),
              Each(HasSubstr("middle of an accumulation window")));
  EXPECT_THAT(refused([](Accelerator& a) { (void)a.prepare(StepLR(1)); }),
              Each(HasSubstr("in one call with its optimizer")));
  EXPECT_THAT(refused([](Accelerator& a) {
                const absl::Status status = a.load_state();
                TORCH_CHECK(status.ok(), status.ToString());
              }),
              Each(HasSubstr("NOT_FOUND")));
}

}  // namespace
}  // namespace muster
