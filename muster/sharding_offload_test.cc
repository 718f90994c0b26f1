// Offload of optimizer states, gradients and parameters through the Accelerator, on one rank and on
// several: threads of this process over Gloo.
#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/optim/adamw.h"
#include "worker/collective/test_error.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/offloaded_state.h"

namespace {

// Whether the disk to which gradients are offloaded is unreadable.
std::atomic<bool> gradients_are_lost{false};

bool FailsToRead(int fd) {
  if (!gradients_are_lost || !muster::PathHas(fd, "/gradients/")) return false;
  errno = EIO;
  return true;
}

}  // namespace

MUSTER_REPLACE_READS(FailsToRead)

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kSamples = 12;  // in a step, on all ranks

template <class Model, class Optimizer>
void Train(Accelerator& a, Model& model, Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    const auto mine = [&](const at::Tensor& t) {
      return t.chunk(a.num_processes())[a.process_index()];
    };
    auto scope = a.accumulate();
    a.backward(at::mse_loss(model(mine(Random({kSamples, 5}, 100 + step))),
                            mine(Random({kSamples, 3}, 200 + step))));
    if (a.sync_gradients()) a.clip_grad_norm_(model.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
}

using Weights = std::map<std::string, at::Tensor>;

class ShardingOffloadTest : public testing::Test {
 protected:
  // Makes windows of several parameters, and some of one.
  void SetUp() override { OffloadedState::SetDefaultWindowBytes(512); }
  void TearDown() override { OffloadedState::SetDefaultWindowBytes(OffloadedState::kWindowBytes); }

  AcceleratorOptions Options(const std::string& strategy, Offload optimizer,
                             Offload parameters = Offload::kNone,
                             Offload gradients = Offload::kNone) {
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 2);
    options.sharding->offload_optimizer = optimizer;
    options.sharding->offload_parameters = parameters;
    options.sharding->offload_gradients = gradients;
    if (gradients == Offload::kDisk) {
      options.sharding->offload_gradients_path = folder_.Path("gradients");
    }
    if (optimizer == Offload::kDisk) {
      options.sharding->offload_optimizer_path = folder_.Path("optimizer");
    }
    if (parameters == Offload::kDisk) {
      options.sharding->offload_parameters_path = folder_.Path("parameters");
    }
    return options;
  }

  // Returns the weights after six steps, with a checkpoint after three that another Accelerator
  // loads.
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
        auto [model, optimizer] = a.prepare(net, adam);
        if (continued) {
          const absl::Status loaded = a.load_state(dir);
          ASSERT_TRUE(loaded.ok()) << loaded;
        }
        Train(a, model, optimizer, continued ? 3 : 0, continued ? 6 : 3);
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

  void ExpectEqual(const Weights& a, const Weights& b) {
    ASSERT_EQ(a.size(), 6u);
    for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
  }

  const TestFolder folder_;
  int runs_ = 0;
};

TEST_F(ShardingOffloadTest, EveryStrategy_TrainsAsWithoutOffload) {
  for (const std::string strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
    for (const int ranks : {1, 2, 3}) {
      const AcceleratorOptions none = Options(strategy, Offload::kNone);
      const Weights want = Trained(ranks, none, none);
      std::vector<AcceleratorOptions> offloads = {Options(strategy, Offload::kDisk)};
      if (strategy == "zero3") {
        offloads.push_back(Options(strategy, Offload::kDisk, Offload::kDisk));
        offloads.push_back(Options(strategy, Offload::kNone, Offload::kDisk));
        offloads.push_back(Options(strategy, Offload::kDisk, Offload::kDisk, Offload::kDisk));
      }
      if (strategy != "no_shard") {
        offloads.push_back(Options(strategy, Offload::kNone, Offload::kNone, Offload::kDisk));
        offloads.push_back(Options(strategy, Offload::kDisk, Offload::kNone, Offload::kDisk));
      }
      for (const AcceleratorOptions& offload : offloads) {
        SCOPED_TRACE(strategy + " on " + std::to_string(ranks) + " ranks");
        ExpectEqual(Trained(ranks, offload, offload), want);
      }
      // Offload does not appear in a checkpoint.
      for (const AcceleratorOptions& offload : {offloads.front(), offloads.back()}) {
        ExpectEqual(Trained(ranks, offload, none), want);
        ExpectEqual(Trained(ranks, none, offload), want);
      }
    }
  }
}

TEST_F(ShardingOffloadTest, GradientsOfHybridSharding_TrainAsWithoutOffload) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    AcceleratorOptions none = Options("hybrid", Offload::kNone);
    AcceleratorOptions disk = Options("hybrid", Offload::kDisk, Offload::kNone, Offload::kDisk);
    none.sharding->strategy = disk.sharding->strategy = strategy;
    ExpectEqual(Trained(4, disk, disk), Trained(4, none, none));
  }
}

TEST_F(ShardingOffloadTest, OptimizerBeforeItsModel_IsOffloadedToo) {
  Weights with, without;
  for (const Offload place : {Offload::kNone, Offload::kDisk}) {
    RunAccelerators(2, Options("zero3", place), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adam(net->parameters());
      auto optimizer = a.prepare(adam);
      auto model = a.prepare(net);
      Train(a, model, optimizer, 0, 3);
      const Weights got = WeightsOf(a, model);
      if (a.is_main_process()) (place == Offload::kNone ? without : with) = got;
    });
  }
  ExpectEqual(with, without);
}

TEST_F(ShardingOffloadTest, PreparedAgain_KeepsItsStates) {
  const auto run = [&](Offload place) {
    std::vector<at::Tensor> values;
    RunAccelerators(1, Options("no_shard", place), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adam(net->parameters());
      for (int epoch = 0; epoch < 3; ++epoch) {
        auto [model, optimizer] = a.prepare(net, adam);
        Train(a, model, optimizer, epoch, epoch + 1);
        if (epoch == 1) a.free_memory();
      }
      for (const at::Tensor& p : net->parameters()) values.push_back(p.detach().clone());
    });
    return values;
  };
  const std::vector<at::Tensor> with = run(Offload::kDisk), without = run(Offload::kNone);
  for (size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(with[i].equal(without[i])) << i;
}

// The graph of a micro-step that does not exchange is run backward in one that does.
TEST_F(ShardingOffloadTest, OneProcess_LosesNoGradient) {
  RunAccelerators(1, Options("zero3", Offload::kNone, Offload::kDisk), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet(), plain = MakeNet();
    FusedSGD sgd(net->parameters(), {.lr = 0.1}), plain_sgd(plain->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor x = Random({4, 5}, 1);
    at::Tensor loss;
    {
      auto scope = a.no_sync();
      loss = model(x).square().sum();
    }
    a.backward(loss);
    optimizer.step();
    plain->forward(x).square().sum().backward();
    plain_sgd.Step();
    const Weights got = a.get_state_dict(model);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(got.at(item.key()).equal(item.value())) << item.key();
    }
  });
}

// Returns the contents of the files of models and optimizers.
std::map<std::string, std::string> FilesIn(const std::string& dir) {
  std::map<std::string, std::string> files;
  const std::vector<std::string> names = ListDirectory(dir).value_or(std::vector<std::string>());
  for (const std::string& name : names) {
    // This process's generators continue from run to run.
    if (!name.ends_with(".safetensors") || name.starts_with("random_states")) continue;
    files[name] = *ReadFile(JoinPath(dir, name));
  }
  return files;
}

TEST_F(ShardingOffloadTest, SavesBesideTraining_AreTheBytesOfThoseThatWait) {
  for (const std::string strategy : {"no_shard", "zero2", "zero3"}) {
    for (const int ranks : {1, 2}) {
      std::vector<std::map<std::string, std::string>> saved;
      for (const bool asynchronous : {false, true}) {
        AcceleratorOptions options = Options(strategy, Offload::kDisk,
                                             strategy == "zero3" ? Offload::kDisk : Offload::kNone);
        options.checkpoint.asynchronous = asynchronous;
        const std::string dir = folder_.Path("beside" + std::to_string(++runs_));
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          torch::nn::Sequential net = MakeNet();
          FusedAdamW adam(net->parameters(), {.lr = 0.01});
          auto [model, optimizer] = a.prepare(net, adam);
          // The tensors that a hook keeps belong to it.
          std::vector<NamedTensors> kept;
          a.register_save_state_pre_hook(
              [&](std::vector<NamedTensors>& weights, StateWriter&) { kept = weights; });
          Train(a, model, optimizer, 0, 3);
          const absl::Status begun = a.save_state(dir);
          ASSERT_TRUE(begun.ok()) << begun;
          Train(a, model, optimizer, 3, 6);
          const absl::Status waited = a.wait_for_checkpoint();
          ASSERT_TRUE(waited.ok()) << waited;
        });
        saved.push_back(FilesIn(dir));
      }
      EXPECT_FALSE(saved[0].empty());
      for (const auto& [name, bytes] : saved[0]) {
        const std::string& other = saved[1][name];
        size_t at = 0;
        while (at < bytes.size() && at < other.size() && bytes[at] == other[at]) ++at;
        EXPECT_TRUE(bytes == other)
            << strategy << " on " << ranks << ": " << name << " of " << bytes.size() << " and "
            << other.size() << " bytes, from byte " << at;
      }
      EXPECT_EQ(saved[0].size(), saved[1].size());
    }
  }
}

TEST_F(ShardingOffloadTest, SummonedParameters_AreReadAndWritten) {
  RunAccelerators(2, Options("zero3", Offload::kDisk, Offload::kDisk), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters());
    auto [model, optimizer] = a.prepare(net, adam);
    Train(a, model, optimizer, 0, 1);
    at::Tensor sum;
    const auto read = [&] {
      at::NoGradGuard no_grad;
      sum = net->parameters()[0].sum();
    };
    a.summon_full_params(model, read);
    const at::Tensor before = sum;
    a.summon_full_params(model, read);
    EXPECT_TRUE(sum.equal(before));
    a.summon_full_params(model, [&] {
      at::NoGradGuard no_grad;
      net->parameters()[0].mul_(2);
    });
    a.summon_full_params(model, read);
    EXPECT_TRUE(sum.equal(before * 2));
  });
}

TEST_F(ShardingOffloadTest, OneProcess_HasParametersOnTheDisk) {
  RunAccelerators(1, Options("zero3", Offload::kDisk, Offload::kDisk), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters());
    auto [model, optimizer] = a.prepare(net, adam);
    Train(a, model, optimizer, 0, 1);
    const ShardedModel* const sharded = model.slot()->sharded();
    ASSERT_NE(sharded, nullptr);
    at::NoGradGuard no_grad;
    model(Random({2, 5}, 1));
    for (const auto& unit : sharded->units()) EXPECT_FALSE(unit->part_is_present());
    // The files have no names.
    EXPECT_TRUE(ListDirectory(folder_.Path("optimizer"))->empty());
    EXPECT_TRUE(ListDirectory(folder_.Path("parameters"))->empty());
  });
}

TEST_F(ShardingOffloadTest, AccumulationInBf16_TrainsAsWithoutOffload) {
  for (const int ranks : {1, 2}) {
    for (const std::string strategy : {"zero2", "zero3"}) {
      for (const bool each : {false, true}) {
        const bool full = strategy == "zero3";
        AcceleratorOptions none = Options(strategy, Offload::kNone);
        AcceleratorOptions disk =
            Options(strategy, Offload::kDisk, full ? Offload::kDisk : Offload::kNone,
                    full ? Offload::kNone : Offload::kDisk);
        for (AcceleratorOptions* options : {&none, &disk}) {
          options->gradient_accumulation_steps = 3;
          options->accumulation.sync_each_batch = each;
          options->mixed_precision = "bf16";
        }
        ExpectEqual(Trained(ranks, disk, disk), Trained(ranks, none, none));
      }
    }
  }
}

// Gradients at the optimizer between backward() and step(): used by hand, scaled, clipped, zeroed
// in place, or taken by an optimizer of LibTorch that holds all of them at once.
TEST_F(ShardingOffloadTest, GradientsOnTheDisk_AreThoseInMemory) {
  struct Way {
    const char* precision;
    bool torchs_own, norm, value, by_hand, set_to_none, in_step;
    // With this strategy only gradients are offloaded; null: also the parameters.
    const char* strategy = nullptr;
    double norm_type = 2;
  };
  const Way ways[] = {
      {"no", false, false, true, true, true, false},
      {"fp16", false, true, false, true, false, false},
      {"bf16", true, true, false, true, true, false},
      {"no", true, false, true, false, false, false},
      {"fp16", true, false, false, false, true, false},
      {"no", false, false, false, true, false, true},
      {"no", false, false, true, true, true, false, "zero1"},
      {"fp16", false, true, false, true, false, false, "zero2"},
      {"bf16", true, true, false, true, true, false, "zero2", 1},
      {"no", true, true, false, false, false, false, "zero1", INFINITY},
      {"fp16", true, false, false, false, true, false, "zero3"},
      {"no", false, false, false, true, false, true, "zero2"},
  };
  for (const Way& way : ways) {
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << "way " << &way - ways << " on " << ranks << " ranks");
      std::vector<Weights> runs;
      std::vector<std::vector<double>> numbers;  // losses and values read from gradients
      for (const Offload place : {Offload::kNone, Offload::kDisk}) {
        const Offload states = way.torchs_own ? Offload::kNone : place;
        AcceleratorOptions options = way.strategy == nullptr
                                         ? Options("zero3", states, place)
                                         : Options(way.strategy, states, Offload::kNone, place);
        options.mixed_precision = way.precision;
        options.gradient_accumulation_steps = 2;
        if (way.in_step) options.gradient_clipping = 0.3;
        runs.emplace_back();
        numbers.emplace_back();
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          torch::nn::Sequential net = MakeNet();
          FusedAdamW fused(
              {{{net->parameters()[0], net->parameters()[2], net->parameters()[4]}, {.lr = 0.01}},
               {{net->parameters()[1], net->parameters()[3], net->parameters()[5]},
                {.lr = 0.02, .weight_decay = 0}}});
          torch::optim::AdamW own(net->parameters(), torch::optim::AdamWOptions(0.01));
          const auto train = [&](auto& model, auto& optimizer) {
            for (int step = 0; step < 8; ++step) {
              const auto mine = [&](const at::Tensor& t) {
                return t.chunk(ranks)[a.process_index()];
              };
              auto scope = a.accumulate();
              const at::Tensor loss =
                  at::mse_loss(model(mine(Random({kSamples, 5}, 100 + step))).to(at::kFloat),
                               mine(Random({kSamples, 3}, 200 + step)));
              a.backward(loss);
              if (a.sync_gradients() && way.norm) {
                a.clip_grad_norm_(model.parameters(), 0.5, way.norm_type);
              }
              if (a.sync_gradients() && way.value) a.clip_grad_value_(model.parameters(), 0.05);
              if (way.by_hand && a.sync_gradients()) {
                const at::NoGradGuard no_grad;
                double sum = 0;
                for (const at::Tensor& shard : optimizer.handle().parameters()) {
                  if (!shard.grad().defined()) continue;
                  sum += shard.grad().sum().item<double>();
                  shard.grad().mul_(1.25);
                }
                if (a.is_main_process()) numbers.back().push_back(sum);
              }
              if (a.is_main_process()) numbers.back().push_back(loss.item<double>());
              optimizer.step();
              optimizer.zero_grad(way.set_to_none);
            }
            const Weights got = WeightsOf(a, model);
            if (a.is_main_process()) runs.back() = got;
          };
          if (way.torchs_own) {
            auto [model, optimizer] = a.prepare(net, own);
            train(model, optimizer);
          } else {
            auto [model, optimizer] = a.prepare(net, fused);
            train(model, optimizer);
          }
        });
      }
      ExpectEqual(runs[0], runs[1]);
      EXPECT_EQ(numbers[0], numbers[1]);
    }
  }
}

TEST_F(ShardingOffloadTest, GradientsOnTheDisk_AreThoseOfTwoUnits) {
  struct Run {
    int ranks;
    AcceleratorOptions options;
  };
  for (const Run& run :
       {Run{2, Options("zero3", Offload::kDisk, Offload::kDisk)},
        Run{2, Options("zero2", Offload::kDisk, Offload::kNone, Offload::kDisk)},
        Run{2, Options("zero1", Offload::kNone, Offload::kNone, Offload::kDisk)},
        // In units, which a single process has only for this.
        Run{1, Options("zero2", Offload::kDisk, Offload::kNone, Offload::kDisk)},
        Run{1, Options("zero3", Offload::kNone, Offload::kNone, Offload::kDisk)}}) {
    RunAccelerators(run.ranks, run.options, [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adam(net->parameters());
      auto [model, optimizer] = a.prepare(net, adam);
      const ShardedModel& sharded = *model.slot()->sharded();
      ASSERT_EQ(sharded.units().size(), 3u);
      const auto present = [&] {
        int count = 0;
        for (const auto& unit : sharded.units()) count += unit->gradients_are_present() ? 1 : 0;
        return count;
      };
      for (int step = 0; step < 3; ++step) {
        a.backward(model(Random({2, 5}, 1)).square().sum());
        EXPECT_EQ(present(), 2);
        a.clip_grad_norm_(model.parameters(), 0.1);
        EXPECT_EQ(present(), 2);
        optimizer.step();
        EXPECT_EQ(present(), 2);
        optimizer.zero_grad();
      }
      const at::NoGradGuard no_grad;
      model(Random({2, 5}, 1));
      EXPECT_EQ(present(), 0);
    });
  }
}

TEST_F(ShardingOffloadTest, GradientsThatAreLost_DoNotFailTheLoadThatGivesThemUp) {
  const AcceleratorOptions options =
      Options("zero2", Offload::kNone, Offload::kNone, Offload::kDisk);
  const std::string dir = folder_.Path("state");
  for (const int ranks : {1, 2}) {
    Weights want;
    for (const bool lost : {false, true}) {
      RunAccelerators(ranks, options, [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        FusedAdamW adam(net->parameters(), {.lr = 0.01});
        auto [model, optimizer] = a.prepare(net, adam);
        Train(a, model, optimizer, 0, 2);
        const absl::Status saved = a.save_state(dir);
        ASSERT_TRUE(saved.ok()) << saved;
        if (lost) {
          a.backward(model(Random({2, 5}, 1)).square().sum());
          a.wait_for_everyone();
          gradients_are_lost = true;
          a.wait_for_everyone();
          const absl::Status loaded = a.load_state(dir);
          EXPECT_TRUE(loaded.ok()) << loaded;
          a.wait_for_everyone();
          gradients_are_lost = false;
          a.wait_for_everyone();
        }
        Train(a, model, optimizer, 2, 4);
        const Weights got = WeightsOf(a, model);
        if (!a.is_main_process()) return;
        if (lost) {
          ExpectEqual(got, want);
        } else {
          want = got;
        }
      });
    }
  }
}

// A zero_grad() before the step of a window happens where the scope of its last micro-step ends.
TEST_F(ShardingOffloadTest, ZeroGradThatFailsAtTheEndOfAMicroStep_IsAnError) {
  AcceleratorOptions options = Options("zero2", Offload::kNone, Offload::kNone, Offload::kDisk);
  options.gradient_accumulation_steps = 2;
  RunAccelerators(1, options, [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters(), {.lr = 0.01});
    auto [model, optimizer] = a.prepare(net, adam);
    const auto micro_step = [&, &model = model, &optimizer = optimizer](bool lost) {
      auto scope = a.accumulate();
      optimizer.zero_grad(/*set_to_none=*/false);
      a.backward(model(Random({2, 5}, 1)).square().sum());
      optimizer.step();
      gradients_are_lost = lost;
    };
    micro_step(false);
    EXPECT_THAT(ErrorOf([&] { micro_step(true); }), HasSubstr("/gradients at byte"));
    EXPECT_EQ(a.core().process().progress().Read().phase, "between steps");
    gradients_are_lost = false;
    optimizer.zero_grad();
    Train(a, model, optimizer, 0, 2);
    EXPECT_EQ(optimizer.steps(), 2);
  });
}

TEST_F(ShardingOffloadTest, WhatCannotBeOffloaded_IsRefusedOnEveryRank) {
  const auto prepare = [](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    torch::optim::AdamW adam(net->parameters());
    auto prepared = a.prepare(net, adam);
  };
  EXPECT_THAT(ErrorsOf(2, Options("zero1", Offload::kDisk), prepare),
              Each(HasSubstr("use muster::FusedAdamW")));
  // On the CPU there is nothing to do.
  EXPECT_THAT(ErrorsOf(2, Options("zero1", Offload::kCpu), prepare), Each(""));
  const auto stepped = [](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedAdamW adam(net->parameters());
    for (at::Tensor& p : net->parameters()) p.mutable_grad() = at::zeros_like(p);
    adam.Step();
    auto prepared = a.prepare(net, adam);
  };
  EXPECT_THAT(ErrorsOf(2, Options("no_shard", Offload::kDisk), stepped),
              Each(HasSubstr("has been stepped on already")));
  AcceleratorOptions in_a_file = Options("zero3", Offload::kDisk);
  in_a_file.sharding->offload_optimizer_path = folder_.Path("file");
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("file"), "").ok());
  EXPECT_THAT(ErrorsOf(2, in_a_file,
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         FusedAdamW adam(net->parameters());
                         auto prepared = a.prepare(net, adam);
                       }),
              Each(HasSubstr(folder_.Path("file"))));
}

TEST_F(ShardingOffloadTest, FolderThatOneRankCannotUse_IsAnErrorOfEveryRank) {
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("file"), "").ok());
  std::vector<std::string> errors(2);
  RunGlooRanks(2, [&](Comm& comm) {
    AcceleratorOptions options = Options("zero3", Offload::kNone, Offload::kDisk);
    if (comm.rank() == 1) options.sharding->offload_parameters_path = folder_.Path("file");
    Accelerator a(CoreOn(comm, options));
    errors[comm.rank()] = ErrorOf([&] {
      torch::nn::Sequential net = MakeNet();
      auto model = a.prepare(net);
    });
    a.wait_for_everyone();
  });
  EXPECT_THAT(errors, Each(HasSubstr(folder_.Path("file"))));
}

TEST_F(ShardingOffloadTest, FolderForStatesThatOneRankCannotUse_IsAnErrorOfEveryRank) {
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("file"), "").ok());
  for (const std::string strategy : {"zero1", "zero3"}) {
    std::vector<std::string> errors(2);
    RunGlooRanks(2, [&](Comm& comm) {
      AcceleratorOptions options = Options(strategy, Offload::kDisk);
      if (comm.rank() == 1) options.sharding->offload_optimizer_path = folder_.Path("file");
      Accelerator a(CoreOn(comm, options));
      errors[comm.rank()] = ErrorOf([&] {
        torch::nn::Sequential net = MakeNet();
        FusedAdamW adam(net->parameters());
        auto prepared = a.prepare(net, adam);
      });
      a.wait_for_everyone();
    });
    EXPECT_THAT(errors, Each(HasSubstr(folder_.Path("file"))));
    EXPECT_THAT(errors[0], HasSubstr("rank 1 cannot offload the state of an optimizer"));
  }
}

TEST_F(ShardingOffloadTest, OptionsThatMakeNoSense_AreRefused) {
  const auto error = [](const AcceleratorOptions& options) -> std::string {
    try {
      RunAccelerators(1, options, [](Accelerator&) {});
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  AcceleratorOptions options = Options("zero3", Offload::kDisk);
  options.sharding->offload_optimizer_path.clear();
  EXPECT_THAT(error(options), HasSubstr("offload_optimizer_path is empty"));
  options = Options("zero2", Offload::kNone);
  options.sharding->reshard_group_size = 2;
  EXPECT_THAT(error(options), HasSubstr("reshard_group_size needs the strategy kFull"));
  EXPECT_THAT(error(Options("no_shard", Offload::kDisk, Offload::kNone, Offload::kDisk)),
              AllOf(HasSubstr("offload_gradients needs a strategy"), HasSubstr("zero2")));
  options = Options("zero2", Offload::kNone, Offload::kNone, Offload::kDisk);
  options.sharding->offload_gradients_path.clear();
  EXPECT_THAT(error(options), HasSubstr("offload_gradients_path is empty"));
  EXPECT_THAT(error(Options("zero2", Offload::kNone, Offload::kDisk)),
              AllOf(HasSubstr("offload_parameters needs the strategy kFull"), HasSubstr("zero3")));
}

TEST_F(ShardingOffloadTest, Environment_CountsWhereTheProgramSaysNothing) {
  RunGlooRanks(1, [&](Comm& comm) {
    JoinedProcess process;
    process.environment.sharding = {"zero3", "MUSTER_SHARDING"};
    process.environment.offload_optimizer = {"disk:" + folder_.Path("a"),
                                             "MUSTER_OFFLOAD_OPTIMIZER"};
    process.environment.offload_parameters = {"cpu", "MUSTER_OFFLOAD_PARAMETERS"};
    process.environment.offload_gradients = {"disk:" + folder_.Path("b"),
                                             "MUSTER_OFFLOAD_GRADIENTS"};
    process.comm = std::make_unique<BorrowedComm>(comm);
    const internal::Core core({}, std::move(process));
    const ShardingOptions& sharding = core.process().sharding();
    EXPECT_EQ(sharding.offload_optimizer, Offload::kDisk);
    EXPECT_EQ(sharding.offload_optimizer_path, folder_.Path("a"));
    EXPECT_EQ(sharding.offload_parameters, Offload::kCpu);
    EXPECT_EQ(sharding.offload_gradients, Offload::kDisk);
    EXPECT_EQ(sharding.offload_gradients_path, folder_.Path("b"));
  });
}

TEST_F(ShardingOffloadTest, SettingsOfEngines_CountOnEachDevice) {
  const std::map<std::string, std::string> fsdp = {{"ACCELERATE_USE_FSDP", "true"},
                                                   {"FSDP_OFFLOAD_PARAMS", "true"}};
  const std::map<std::string, std::string> deepspeed = {
      {"ACCELERATE_USE_DEEPSPEED", "true"},
      {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
      {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme"},
      {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", folder_.Path("b")}};
  RunGlooRanks(1, [&](Comm& comm) {
    for (const c10::Device device :
         {c10::Device(c10::DeviceType::CPU), c10::Device(c10::DeviceType::PrivateUse1, 0)}) {
      for (const auto& variables : {fsdp, deepspeed}) {
        JoinedProcess process;
        process.environment.engine_variables = variables;
        process.comm = std::make_unique<BorrowedComm>(comm);
        process.device = device;
        const internal::Core core({}, std::move(process));
        const ShardingOptions& sharding = core.process().sharding();
        const bool to_cpu = variables == fsdp;
        EXPECT_EQ(sharding.strategy, ShardingStrategy::kFull);
        EXPECT_EQ(sharding.offload_parameters, to_cpu ? Offload::kCpu : Offload::kDisk) << device;
        EXPECT_EQ(sharding.offload_parameters_path, to_cpu ? "" : folder_.Path("b"));
        EXPECT_EQ(sharding.offload_optimizer, to_cpu ? Offload::kCpu : Offload::kNone);
      }
    }
  });
}

TEST_F(ShardingOffloadTest, OwnPlaceOfStates_TakesTheGradientsOfAnEngineAlong) {
  const auto sharding = [&](const std::string& states, const std::string& gradients) {
    ShardingOptions options;
    RunGlooRanks(1, [&](Comm& comm) {
      JoinedProcess process;
      process.environment.engine_variables = {
          {"ACCELERATE_USE_DEEPSPEED", "true"},
          {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"},
          {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"}};
      if (!states.empty()) {
        process.environment.offload_optimizer = {states, "MUSTER_OFFLOAD_OPTIMIZER"};
      }
      if (!gradients.empty()) {
        process.environment.offload_gradients = {gradients, "MUSTER_OFFLOAD_GRADIENTS"};
      }
      process.comm = std::make_unique<BorrowedComm>(comm);
      options = internal::Core({}, std::move(process)).process().sharding();
    });
    return options;
  };
  EXPECT_EQ(sharding("", "").offload_gradients, Offload::kCpu);
  EXPECT_EQ(sharding("none", "").offload_gradients, Offload::kNone);
  EXPECT_EQ(sharding("none", "cpu").offload_gradients, Offload::kCpu);
  EXPECT_EQ(sharding("", "none").offload_gradients, Offload::kNone);
  const ShardingOptions disk = sharding("disk:" + folder_.Path("a"), "");
  EXPECT_EQ(disk.offload_gradients, Offload::kDisk);
  EXPECT_EQ(disk.offload_gradients_path, folder_.Path("a"));
}

TEST_F(ShardingOffloadTest, ReshardedInSmallerGroups_TrainsAsWithout) {
  AcceleratorOptions grouped = Options("zero3", Offload::kNone);
  const Weights want = Trained(4, grouped, grouped);
  grouped.sharding->reshard_group_size = 2;
  ExpectEqual(Trained(4, grouped, grouped), want);
  grouped.sharding->reshard_group_size = 3;
  EXPECT_THAT(ErrorsOf(4, grouped,
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto prepared = a.prepare(net);
                       }),
              Each(HasSubstr("reshard_group_size is 3")));
}

TEST_F(ShardingOffloadTest, IgnoredModules_ClipAndContinueAsUndividedOnes) {
  AcceleratorOptions ignored = Options("zero3", Offload::kNone);
  ignored.sharding->ignored_modules = "0|4";
  const Weights want = Trained(2, Options("no_shard", Offload::kNone), ignored);
  for (const auto& [first, second] :
       {std::pair{ignored, ignored}, {ignored, Options("zero1", Offload::kNone)}}) {
    const Weights got = Trained(2, first, second);
    for (const auto& [name, tensor] : want) {
      EXPECT_LT((got.at(name) - tensor).abs().max().item<double>(), 1e-6) << name;
    }
  }
}

}  // namespace
}  // namespace muster
