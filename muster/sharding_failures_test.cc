// Failures of one rank of a sharded model alone: every rank learns of them, and none continues
// with, or saves, a mixture. Threads of this process over Gloo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using Weights = std::map<std::string, at::Tensor>;

AcceleratorOptions Options(const std::string& strategy, bool in_backward = false) {
  AcceleratorOptions options;
  options.sharding = ParseSharding(strategy, 2);
  options.sharding->optimizer_in_backward = in_backward;
  return options;
}

int RanksOf(const std::string& strategy) { return strategy == "hybrid" ? 4 : 2; }

void ExpectEqual(const Weights& a, const Weights& b) {
  ASSERT_FALSE(a.empty());
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
}

// Fails in the update of its `fails_in`th group.
struct FailingAdamW : FusedAdamW {
  using FusedAdamW::FusedAdamW;
  void Update(int64_t group, const Lists& lists, const std::optional<at::Tensor>& grad_scale,
              const std::optional<at::Tensor>& found_inf) const override {
    TORCH_CHECK(fails_in == 0 || --fails_in > 0, "the optimizer fails");
    FusedAdamW::Update(group, lists, grad_scale, found_inf);
  }
  OptimizerState SaveState() const override {
    TORCH_CHECK(!fails_to_save, "the state cannot be read");
    return FusedAdamW::SaveState();
  }
  mutable std::atomic<int> fails_in{0};
  bool fails_to_save = false;
};

class ShardingFailures : public testing::Test {
 protected:
  const TestFolder folder_;
};

TEST_F(ShardingFailures, UpdateOfAStepWithClosure_IsAnErrorOnEveryRankUntilALoad) {
  for (const std::string strategy : {"zero1", "zero2", "zero3", "hybrid"}) {
    const int ranks = RanksOf(strategy);
    Weights want, got;
    for (const int failing : {0, 1, ranks}) {  // the number of failing ranks, the last ones
      SCOPED_TRACE(testing::Message() << strategy << ", failing " << failing);
      const std::string dir = folder_.Path("before");
      std::vector<std::string> errors(ranks), next(2 * ranks);
      RunAccelerators(ranks, Options(strategy), [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        FailingAdamW adam({{{net->parameters()[0], net->parameters()[2]}, {.lr = 0.01}},
                           {{net->parameters()[1], net->parameters()[3], net->parameters()[4],
                             net->parameters()[5]},
                            {.lr = 0.02}}});
        auto [model, optimizer] = a.prepare(net, adam);
        const auto step = [&, &model = model, &optimizer = optimizer] {
          optimizer.step([&] {
            optimizer.zero_grad();
            const at::Tensor loss = model(Random({4, 5}, 1)).square().mean();
            a.backward(loss);
            return loss;
          });
        };
        step();
        if (failing > 0) {
          ASSERT_TRUE(a.save_state(dir).ok());
          const int mine = a.process_index();
          // Each fails at a different place in the step.
          if (mine >= ranks - failing) adam.fails_in = mine == 0 ? 2 : 1;
          errors[mine] = ErrorOf(step);
          next[mine] = ErrorOf(step);
          next[ranks + mine] = std::string(a.save_state(folder_.Path("never")).message());
          const absl::Status loaded = a.load_state(dir);
          ASSERT_TRUE(loaded.ok()) << loaded;
        }
        step();
        const Weights all = WeightsOf(a, model);
        if (a.is_main_process()) (failing == 0 ? want : got) = all;
      });
      if (failing == 0) continue;
      EXPECT_THAT(errors.back(), HasSubstr("the optimizer fails"));
      EXPECT_THAT(next,
                  Each(AllOf(HasSubstr("has failed in a step of an optimizer"),
                             HasSubstr("the optimizer fails"), HasSubstr("call load_state()"))));
      ExpectEqual(got, want);
    }
  }
}

// The place in a closure.
enum class Where { kBefore, kInForward, kBetween, kBehind };

// No rank has stepped, so none has to load.
TEST_F(ShardingFailures, ClosureOfOneRank_IsAnErrorOnEveryRankAndTrainingGoesOn) {
  for (const std::string strategy : {"zero1", "zero2", "zero3", "hybrid"}) {
    const int ranks = RanksOf(strategy);
    for (const bool clips : {false, true}) {
      AcceleratorOptions options = Options(strategy);
      if (clips) options.gradient_clipping = 0.1;
      Weights want;
      const auto run = [&](int failing, Where where) {
        std::vector<std::string> errors(ranks);
        Weights got;
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          torch::nn::Sequential net = MakeNet();
          FusedAdamW adam(net->parameters(), {.lr = 0.01});
          auto [model, optimizer] = a.prepare(net, adam);
          const auto step = [&, &model = model, &optimizer = optimizer](bool fails) {
            const auto fail = [&](Where here) {
              TORCH_CHECK(!fails || here != where, "the closure fails");
            };
            optimizer.step([&] {
              fail(Where::kBefore);
              optimizer.zero_grad();
              const at::Tensor loss = model.call([&](torch::nn::SequentialImpl& layers) {
                const at::Tensor x =
                    layers[0]->as<torch::nn::Linear>()->forward(Random({4, 5}, 1)).tanh();
                fail(Where::kInForward);
                const at::Tensor y = layers[2]->as<torch::nn::Linear>()->forward(x).tanh();
                return layers[4]->as<torch::nn::Linear>()->forward(y).square().mean();
              });
              fail(Where::kBetween);
              a.backward(loss);
              fail(Where::kBehind);
              return loss;
            });
          };
          step(false);
          if (failing > 0) {
            errors[a.process_index()] =
                ErrorOf([&] { step(a.process_index() >= ranks - failing); });
          }
          for (int i = 0; i < 3; ++i) step(false);
          EXPECT_TRUE(a.save_state(folder_.Path("after")).ok());
          const Weights all = WeightsOf(a, model);
          if (a.is_main_process()) got = all;
        });
        if (failing == 0) {
          want = got;
        } else {
          ExpectEqual(got, want);
        }
        return errors;
      };
      run(0, Where::kBehind);
      for (const int failing : {1, ranks}) {
        for (const Where where :
             {Where::kBefore, Where::kInForward, Where::kBetween, Where::kBehind}) {
          SCOPED_TRACE(testing::Message() << strategy << clips << ", failing " << failing << ", "
                                          << static_cast<int>(where));
          // The other groups continue to their backward pass, and learn of it a step later.
          if (strategy == "hybrid" && failing == 1 && where == Where::kInForward) continue;
          const std::vector<std::string> errors = run(failing, where);
          EXPECT_THAT(errors.back(), HasSubstr("the closure fails"));
          // A rank that waits in a gather does not know the cause.
          const char* const instead = where == Where::kInForward
                                          ? "ranks disagree about a collective"
                                          : "the closure fails";
          EXPECT_THAT(errors, Each(AnyOf(HasSubstr("the closure fails"), HasSubstr(instead))));
          EXPECT_EQ(errors[0].find("no rank has stepped") != std::string::npos,
                    failing == 1 && where == Where::kBehind);
        }
      }
    }
  }
}

// A hook of load_state() may use the weights, which a failed step has left as a mixture.
TEST_F(ShardingFailures, LoadHookThatUsesTheWeights_DoesNotKeepAnyoneFromLoading) {
  for (const bool in_backward : {false, true}) {
    for (const bool known : {false, true}) {  // whether all ranks know of it
      SCOPED_TRACE(testing::Message() << in_backward << known);
      const std::string dir = folder_.Path("before");
      Weights want, got;
      for (const bool fails : {false, true}) {
        RunAccelerators(2, Options("zero3", in_backward), [&](Accelerator& a) {
          torch::nn::Sequential net = MakeNet();
          FailingAdamW adam(net->parameters(), {.lr = 0.01});
          auto [model, optimizer] = a.prepare(net, adam);
          bool refuses = false;
          a.register_load_state_pre_hook(
              [&, &model = model](std::vector<NamedTensors>&, const StateReader&) {
                a.summon_full_params(model, [] {});
                a.get_state_dict(model);
                TORCH_CHECK(!refuses, "the hook refuses");
              });
          a.register_for_checkpointing(
              [] { return PlainState(); },
              [&, &model = model](const PlainState&) { a.summon_full_params(model, [] {}); });
          const auto step = [&, &model = model, &optimizer = optimizer] {
            a.backward(model(Random({4, 5}, 1)).square().mean());
            optimizer.step();
            optimizer.zero_grad();
          };
          step();
          step();
          if (fails) {
            ASSERT_TRUE(a.save_state(dir).ok());
            if (a.process_index() == 1) adam.fails_in = 1;
            ErrorOf(step);
            const std::string again = known ? ErrorOf(step) : "";
            EXPECT_NE(again, "no error");
            // A load that has replaced nothing leaves the failure unchanged.
            refuses = true;
            EXPECT_THAT(std::string(a.load_state(dir).message()), HasSubstr("the hook refuses"));
            EXPECT_NE(ErrorOf(step), "no error");
            refuses = false;
            const absl::Status loaded = a.load_state(dir);
            ASSERT_TRUE(loaded.ok()) << loaded;
            optimizer.zero_grad();
          }
          step();
          const Weights all = WeightsOf(a, model);
          if (a.is_main_process()) (fails ? got : want) = all;
        });
      }
      ExpectEqual(got, want);
    }
  }
}

// Values that one rank has dropped in a separate step may still be gathered on another.
TEST_F(ShardingFailures, LoadThatEvaluatesAfterAStepOfOneRank_LeavesNoneWaiting) {
  for (const std::string strategy : {"zero1", "zero2", "zero3", "hybrid"}) {
    for (const bool evaluates : {false, true}) {  // before the step, too
      SCOPED_TRACE(testing::Message() << strategy << evaluates);
      const std::string dir = folder_.Path("before");
      RunAccelerators(RanksOf(strategy), Options(strategy), [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        FusedAdamW adam(net->parameters(), {.lr = 0.01});
        auto [model, optimizer] = a.prepare(net, adam);
        const auto evaluate = [&, &model = model] {
          const at::NoGradGuard no_grad;
          model(Random({4, 5}, 1));
        };
        a.register_for_checkpointing([] { return PlainState(); },
                                     [&](const PlainState&) { evaluate(); });
        const auto step = [&, &model = model, &optimizer = optimizer](bool steps) {
          a.backward(model(Random({4, 5}, 1)).square().mean());
          if (!steps && evaluates) evaluate();
          if (steps || a.is_main_process()) optimizer.step();
          optimizer.zero_grad();
        };
        step(true);
        ASSERT_TRUE(a.save_state(dir).ok());
        step(false);
        const absl::Status loaded = a.load_state(dir);
        ASSERT_TRUE(loaded.ok()) << loaded;
        step(true);
        step(true);
      });
    }
  }
}

// The inner load also forgets the failure that the outer load has forgotten, and does not restore
// it.
TEST_F(ShardingFailures, FailedLoadInAHookOfALoad_DoesNotKeepTheHookFromTheWeights) {
  for (const bool in_backward : {false, true}) {
    SCOPED_TRACE(in_backward);
    const std::string dir = folder_.Path("before");
    std::vector<std::string> read(2), after(2);
    RunAccelerators(2, Options("zero3", in_backward), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FailingAdamW adam(net->parameters(), {.lr = 0.01});
      auto [model, optimizer] = a.prepare(net, adam);
      const int mine = a.process_index();
      bool refuses = true;
      const auto step = [&, &model = model, &optimizer = optimizer] {
        a.backward(model(Random({4, 5}, 1)).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      };
      step();
      step();
      ASSERT_TRUE(a.save_state(dir).ok());
      a.register_load_state_pre_hook(
          [&, &model = model](std::vector<NamedTensors>&, const StateReader&) {
            EXPECT_FALSE(a.load_state(folder_.Path("missing")).ok());
            read[mine] = ErrorOf([&] { a.get_state_dict(model); });
            TORCH_CHECK(!refuses, "the hook refuses");
          });
      if (mine == 1) adam.fails_in = 1;
      ErrorOf(step);
      EXPECT_FALSE(a.load_state(dir).ok());
      // Nothing has been replaced.
      after[mine] = ErrorOf([&, &model = model] { a.get_state_dict(model); });
      refuses = false;
      const absl::Status loaded = a.load_state(dir);
      ASSERT_TRUE(loaded.ok()) << loaded;
      step();
    });
    EXPECT_THAT(read, Each("no error"));
    EXPECT_THAT(after, Each(Not("no error")));
  }
}

// Other ways to give weights to the program, or to load only weights: the optimizer's state would
// stay a mixture.
TEST_F(ShardingFailures, ReadingWeightsAndLoadingThemAlone_SayOnEveryRankThatAStateIsToBeLoaded) {
  for (const std::string strategy : {"zero1", "zero3", "hybrid"}) {
    const int ranks = RanksOf(strategy);
    for (const bool by_failure : {true, false}) {  // else by a step that one rank leaves out
      for (const int first : {0, 1, 2}) {
        SCOPED_TRACE(testing::Message() << strategy << by_failure << first);
        const std::string dir = folder_.Path("before");
        std::vector<std::string> errors(3 * ranks);
        RunAccelerators(ranks, Options(strategy), [&](Accelerator& a) {
          torch::nn::Sequential net = MakeNet();
          FailingAdamW adam(net->parameters(), {.lr = 0.01});
          auto [model, optimizer] = a.prepare(net, adam);
          a.backward(model(Random({4, 5}, 1)).square().mean());
          optimizer.step();
          optimizer.zero_grad();
          ASSERT_TRUE(a.save_state(dir).ok());
          a.backward(model(Random({4, 5}, 1)).square().mean());
          const int mine = a.process_index();
          const bool last = mine == ranks - 1;
          if (by_failure && last) adam.fails_in = 1;
          if (by_failure || !last) {
            ErrorOf([&, &optimizer = optimizer] { optimizer.step(); });
          }
          const auto use = [&, &model = model](int what) {
            if (what == 0) a.get_state_dict(model);
            absl::Status status;
            if (what == 1) status = a.save_model(model, folder_.Path("never"));
            if (what == 2) status = a.load_weights(dir).status();
            TORCH_CHECK(status.ok(), status.message());
          };
          for (int i = 0; i < 3; ++i) {
            errors[static_cast<size_t>(i * ranks + mine)] = ErrorOf([&] { use((first + i) % 3); });
          }
          const absl::Status loaded = a.load_state(dir);
          ASSERT_TRUE(loaded.ok()) << loaded;
          optimizer.zero_grad();
          for (int i = 0; i < 3; ++i) use(i);
        });
        EXPECT_THAT(errors,
                    Each(AllOf(HasSubstr("call load_state()"),
                               HasSubstr(by_failure ? "the optimizer fails" : "equally often"))));
      }
    }
  }
}

// The others are in the backward pass that this rank has left, in exchanges of their groups.
TEST_F(ShardingFailures, SaveOfARankThatHasLeftABackwardPassOfGroups_IsAnErrorOnEveryRank) {
  for (const bool shared_memory : {false, true}) {
    for (const int fails_at : {0, 2}) {
      SCOPED_TRACE(testing::Message() << shared_memory << fails_at);
      std::vector<std::string> errors(4);
      std::string saved;
      const auto store = c10::make_intrusive<c10d::HashStore>();
      (shared_memory ? RunShmRanks : RunGlooRanks)(
          4,
          [&](Comm& comm) {
            Accelerator a(CoreOn(comm, Options("hybrid"), store));
            torch::nn::Sequential net;
            for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(8, 8));
            FusedAdamW adam(net->parameters());
            auto [model, optimizer] = a.prepare(net, adam);
            const int mine = a.process_index();
            errors[mine] = ErrorOf([&, &model = model, &optimizer = optimizer] {
              for (int i = 0; i < 4; ++i) {
                a.backward(model.call([&](torch::nn::SequentialImpl& layers) {
                  at::Tensor x = at::full({1, 8}, 0.1);
                  for (size_t l = 0; l < layers.size(); ++l) {
                    if (l == 2 && i == fails_at && mine == 3) {
                      x.register_hook([](at::Tensor) { TORCH_CHECK(false, "a hook throws"); });
                    }
                    x = layers[l]->as<torch::nn::Linear>()->forward(x);
                  }
                  return x.square().mean();
                }));
                optimizer.step();
                optimizer.zero_grad();
              }
            });
            if (mine == 3) saved = std::string(a.save_state(folder_.Path("never")).message());
          },
          {});
      EXPECT_THAT(errors[3], HasSubstr("a hook throws"));
      EXPECT_THAT(errors, Each(Not("no error")));
      EXPECT_NE(saved, "");
    }
  }
}

// The ranks of its group meet it first. Programs do this rarely, but may: a state on a disk that
// cannot be mapped.
TEST_F(ShardingFailures, SaveOfAStateThatOneRankCannotRead_IsAnErrorOnEveryRank) {
  for (const std::string strategy : {"zero1", "zero3", "hybrid"}) {
    const int ranks = RanksOf(strategy);
    std::vector<std::string> errors(ranks);
    RunAccelerators(ranks, Options(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet(), other = MakeNet();
      FailingAdamW adam(net->parameters()), second(other->parameters());
      auto [model, optimizer, model2, optimizer2] = a.prepare(net, adam, other, second);
      const auto step = [&] {
        a.backward(at::mse_loss(model(Random({4, 5}, 1)), Random({4, 3}, 2)));
        optimizer.step();
        optimizer.zero_grad();
        a.backward(at::mse_loss(model2(Random({4, 5}, 1)), Random({4, 3}, 2)));
        optimizer2.step();
        optimizer2.zero_grad();
      };
      step();
      adam.fails_to_save = a.process_index() == 1;
      const std::string dir = folder_.Path(strategy);
      errors[a.process_index()] = a.save_state(dir).ToString();
      adam.fails_to_save = false;
      // The ranks are still in step.
      step();
      const absl::Status saved = a.save_state(dir);
      ASSERT_TRUE(saved.ok()) << saved;
      const absl::Status loaded = a.load_state(dir);
      ASSERT_TRUE(loaded.ok()) << loaded;
    });
    EXPECT_THAT(errors, Each(HasSubstr("rank 1: the state cannot be read"))) << strategy;
  }
}

TEST_F(ShardingFailures, SaveOfARankThatHasDroppedItsShardedModel_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(4);
  RunAccelerators(4, Options("hybrid"), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters());
    auto prepared = std::make_optional(a.prepare(net, adam));
    if (a.process_index() == 3) {
      prepared.reset();
      net = torch::nn::Sequential();
    }
    errors[a.process_index()] = std::string(a.save_state(folder_.Path("never")).message());
  });
  EXPECT_THAT(errors, Each(HasSubstr("on rank 3 than on rank 0")));
}

// All ranks have left it, and none waits.
TEST_F(ShardingFailures, SaveOfAllRanksAfterABackwardPassOfGroupsThatTheyHaveLeft_Succeeds) {
  RunAccelerators(4, Options("hybrid"), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters());
    auto [model, optimizer] = a.prepare(net, adam);
    at::Tensor x = Random({4, 5}, 1).requires_grad_();
    const at::Tensor loss = model(x).square().mean();
    x.register_hook([](at::Tensor) { TORCH_CHECK(false, "a hook throws"); });
    EXPECT_THROW(a.backward(loss), c10::Error);
    optimizer.zero_grad();
    const absl::Status saved = a.save_state(folder_.Path("after"));
    EXPECT_TRUE(saved.ok()) << saved;
  });
}

}  // namespace
}  // namespace muster
