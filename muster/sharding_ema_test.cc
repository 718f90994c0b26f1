// Averages of sharded models: the same numbers as those of whole models, to the last bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/state_dict.h"

namespace muster {
namespace {

using testing::Each;
using testing::HasSubstr;

using Weights = std::map<std::string, at::Tensor>;

constexpr int kSamples = 12;  // in a step, on all ranks

struct Kind {
  std::string name;
  int ranks = 2;
  AcceleratorOptions options;
};

Kind Of(const std::string& strategy, int ranks) {
  Kind kind{strategy + " on " + std::to_string(ranks), ranks, {}};
  if (strategy != "one") kind.options.sharding = ParseSharding(strategy, 2);
  return kind;
}

std::vector<Kind> Kinds(const std::string& scratch) {
  std::vector<Kind> kinds = {Of("no_shard", 2), Of("zero1", 2), Of("zero2", 3),
                             Of("zero3", 2),    Of("zero3", 3), Of("hybrid", 4)};
  kinds.push_back(Of("zero3", 2));
  kinds.back().name += " with parts on the disk";
  kinds.back().options.sharding->offload_parameters = Offload::kDisk;
  kinds.back().options.sharding->offload_parameters_path = scratch;
  kinds.push_back(Of("zero2", 2));
  kinds.back().name += " with ignored ones";
  kinds.back().options.sharding->ignored_parameters = ".*bias";
  kinds.push_back(Of("zero3", 2));
  kinds.back().name += " in bf16";
  kinds.back().options.mixed_precision = "bf16";
  kinds.back().options.sharding->parameter_dtype = at::kBFloat16;
  return kinds;
}

template <class Model, class Optimizer>
void TrainStep(Accelerator& a, Model& model, Optimizer& optimizer, int step) {
  const auto mine = [&](const at::Tensor& t) {
    return t.chunk(a.num_processes())[a.process_index()];
  };
  auto scope = a.accumulate();
  const at::Tensor out = model(mine(Random({kSamples, 5}, 100 + step)));
  a.backward(at::mse_loss(out, mine(Random({kSamples, 3}, 200 + step))));
  optimizer.step();
  optimizer.zero_grad();
}

void ExpectEqual(const Weights& got, const Weights& want) {
  EXPECT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
  }
}

constexpr EmaOptions kOptions = {.decay = 0.7, .warmup = true, .update_after_step = 1};

TEST(ShardingEma, AverageOfParts_IsThatOfWholeWeightsToTheBit) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    SCOPED_TRACE(kind.name);
    RunAccelerators(kind.ranks, kind.options, [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adamw(net->parameters(), {.lr = 0.05});
      auto [model, optimizer] = a.prepare(net, adamw);
      Ema ema(a, model, kOptions);
      // Whole weights on process 0, averaged as one process averages them.
      std::optional<EmaWeights> whole;
      EmaWeights::Named whole_weights;
      const auto take = [&] {
        const at::NoGradGuard no_grad;
        const Weights weights = WeightsOf(a, model);
        if (!a.is_main_process()) return;
        if (!whole.has_value()) {
          for (const auto& [name, tensor] : weights) whole_weights.emplace_back(name, tensor);
          whole.emplace(whole_weights, kOptions);
        }
        for (auto& [name, tensor] : whole_weights) tensor.copy_(weights.at(name));
      };
      take();
      for (int step = 0; step < 6; ++step) {
        TrainStep(a, model, optimizer, step);
        EXPECT_TRUE(ema.update());
        take();
        if (whole.has_value()) whole->Update();
      }
      const Weights trained = WeightsOf(a, model);
      Weights want;
      if (whole.has_value()) {
        for (const auto& [name, average] : whole->averages()) want[name] = average;
      }
      {
        auto averaged = ema.apply();
        const Weights got = WeightsOf(a, model);
        // Summoned to be read.
        a.summon_full_params(model, [&] { EXPECT_TRUE(net->parameters()[0].defined()); });
        const at::NoGradGuard no_grad;
        const at::Tensor out = model(Random({2, 5}, 1));
        if (a.is_main_process()) {
          ExpectEqual(got, want);
          EXPECT_FALSE(at::equal(got.at("0.weight"), trained.at("0.weight")));
        }
        torch::nn::Sequential other = MakeNet();
        ema.copy_to(*other);
        if (kind.options.mixed_precision.value_or("no") == "no") {
          EXPECT_TRUE(at::allclose(out, other->forward(Random({2, 5}, 1)), 1e-5, 1e-6));
        }
        for (const auto& item : other->named_parameters()) {
          if (want.empty()) continue;  // only process 0 knows it
          EXPECT_TRUE(at::equal(item.value(), want.at(item.key()))) << item.key();
        }
        const std::string folder = scratch.path() + "/average";
        ASSERT_TRUE(a.save_model(model, folder).ok());
        if (a.is_main_process()) {
          const absl::StatusOr<StateDict> saved = ReadStateDict(folder + "/model.safetensors");
          ASSERT_TRUE(saved.ok()) << saved.status();
          for (const auto& [name, tensor] : saved->tensors()) {
            EXPECT_TRUE(at::equal(tensor, want.at(name))) << name;
          }
        }
        a.wait_for_everyone();
      }
      const Weights back = WeightsOf(a, model);
      if (a.is_main_process()) ExpectEqual(back, trained);
      // Training continues.
      TrainStep(a, model, optimizer, 6);
      // The whole state, by hand.
      const StateDict state = ema.state_dict();
      if (a.is_main_process()) {
        for (const auto& [name, average] : want) {
          EXPECT_TRUE(at::equal(*state.GetTensor("average." + name), average)) << name;
        }
      }
      // Permanently.
      ema.copy_to(*net);
      const Weights averages = WeightsOf(a, model);
      if (a.is_main_process()) ExpectEqual(averages, want);
    });
  }
}

// Trains steps [first, last) with a registered average, from and to a checkpoint; returns the
// average on process 0 at the end.
Weights TrainFrom(const Kind& kind, int first, int last, const std::string& from,
                  const std::string& to, bool hooks = false) {
  Weights averages;
  RunAccelerators(kind.ranks, kind.options, [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    Ema ema(a, model, kOptions);
    a.register_for_checkpointing(ema);
    if (hooks) {
      a.register_save_state_pre_hook([](std::vector<NamedTensors>&, StateWriter&) {});
      a.register_load_state_pre_hook([](std::vector<NamedTensors>&, const StateReader&) {});
    }
    if (!from.empty()) {
      const absl::Status loaded = a.load_state(from);
      ASSERT_TRUE(loaded.ok()) << loaded;
      EXPECT_EQ(ema.updates(), first - 1);
    }
    for (int step = first; step < last; ++step) {
      TrainStep(a, model, optimizer, step);
      ema.update();
    }
    if (!to.empty()) {
      const absl::Status saved = a.save_state(to);
      ASSERT_TRUE(saved.ok()) << saved;
    }
    auto averaged = ema.apply();
    const Weights whole = WeightsOf(a, model);
    if (a.is_main_process()) averages = whole;
  });
  return averages;
}

TEST(ShardingEma, SavedUnderOneStrategy_ContinuesUnderAnother) {
  const TestFolder scratch;
  const Kind one = Of("one", 1);
  const Weights want = TrainFrom(one, 0, 6, "", "");
  std::vector<Kind> kinds = Kinds(scratch.path());
  kinds.pop_back();  // bf16
  kinds.push_back(one);
  for (const bool hooks : {false, true}) {
    for (size_t i = 0; i < kinds.size(); ++i) {
      const Kind &first = kinds[i], &then = kinds[(i + 1 + (hooks ? 2 : 0)) % kinds.size()];
      SCOPED_TRACE(first.name + ", then " + then.name);
      const std::string folder = scratch.path() + "/" + std::to_string(i) + (hooks ? "h" : "");
      const Weights saved = TrainFrom(first, 0, 3, "", folder, hooks);
      // The loaded values equal the saved ones, to the bit.
      ExpectEqual(TrainFrom(then, 3, 3, folder, "", hooks), saved);
      const Weights got = TrainFrom(then, 3, 6, folder, "", hooks);
      for (const auto& [name, tensor] : want) {
        EXPECT_TRUE(at::allclose(got.at(name), tensor, 1e-5, 1e-6)) << name;
      }
    }
  }
}

TEST(ShardingEma, OfASharded_IsWrittenByAllProcesses) {
  const TestFolder scratch;
  const std::string folder = scratch.path() + "/saved";
  TrainFrom(Of("zero3", 2), 0, 2, "", folder);
  const absl::StatusOr<Manifest> manifest = ReadManifest(folder);
  ASSERT_TRUE(manifest.ok());
  int parts = 0;
  for (const ManifestFile& file : manifest->files) {
    parts += file.name.find("custom_checkpoint_0-") == 0 ? 1 : 0;
  }
  EXPECT_GE(parts, 2);
}

TEST(ShardingEma, WhatChangesTheAverageInItsScope_IsAnErrorOnEveryRank) {
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    SCOPED_TRACE(strategy);
    const auto errors = [&](const std::function<void(Accelerator&, torch::nn::Sequential&,
                                                     AcceleratedModel<torch::nn::Sequential>&,
                                                     AcceleratedOptimizer&)>& body) {
      return ErrorsOf(2, Of(strategy, 2).options, [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        FusedSGD sgd(net->parameters(), {.lr = 0.1});
        auto [model, optimizer] = a.prepare(net, sgd);
        TrainStep(a, model, optimizer, 0);
        Ema ema(a, model);
        const Weights trained = WeightsOf(a, model);
        std::string error;
        try {
          auto averaged = ema.apply();
          body(a, net, model, optimizer);
        } catch (const c10::Error& thrown) {
          error = thrown.what_without_backtrace();
        }
        const Weights back = WeightsOf(a, model);
        if (a.is_main_process()) ExpectEqual(back, trained);
        TORCH_CHECK(error.empty(), error);
      });
    };
    EXPECT_THAT(errors([](auto& a, auto& net, auto& model, auto&) {
                  a.summon_full_params(model, [&] {
                    const at::NoGradGuard no_grad;
                    net->parameters()[0].mul_(2);
                  });
                }),
                Each(HasSubstr("'0.weight' was changed while the weights were their average")));
    EXPECT_THAT(errors([](auto& a, auto&, auto& model, auto& optimizer) {
                  TrainStep(a, model, optimizer, 1);
                }),
                Each(HasSubstr("optimizer.step() inside ema.apply()")));
    EXPECT_THAT(errors([](auto& a, auto&, auto&, auto&) {
                  const absl::Status saved = a.save_state(TestPath("in_scope"));
                  TORCH_CHECK(saved.ok(), saved.message());
                }),
                Each(HasSubstr("save_state inside ema.apply()")));
  }
}

// A graph of the averages is unrelated to the weights that are trained.
TEST(ShardingEma, BackwardThroughAGraphOfTheAverage_Throws) {
  for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
    EXPECT_THAT(ErrorsOf(2, Of(strategy, 2).options,
                         [&](Accelerator& a) {
                           torch::nn::Sequential net = MakeNet();
                           FusedSGD sgd(net->parameters(), {.lr = 0.1});
                           auto [model, optimizer] = a.prepare(net, sgd);
                           TrainStep(a, model, optimizer, 0);
                           Ema ema(a, model);
                           at::Tensor loss;
                           {
                             auto averaged = ema.apply();
                             loss = model(Random({2, 5}, 1)).mean();
                           }
                           a.backward(loss);
                         }),
                Each(HasSubstr("modified by an inplace operation")))
        << strategy;
  }
}

TEST(ShardingEma, OfAModelThatIsGone_IsRefused) {
  EXPECT_THAT(ErrorsOf(2, Of("zero3", 2).options,
                       [&](Accelerator& a) {
                         std::optional<Ema> ema;
                         {
                           auto model = a.prepare(MakeNet());
                           ema.emplace(a, model);
                         }
                         a.free_memory();
                         auto averaged = ema->apply();
                       }),
              Each(HasSubstr("no longer exists")));
}

}  // namespace
}  // namespace muster
