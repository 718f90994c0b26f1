// options.activation_checkpointing and options.gradient_clipping: their effects in a whole step,
// under each strategy.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muster/accelerator.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

using Weights = std::map<std::string, at::Tensor>;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    in = register_module("in", torch::nn::Linear(width, 4 * width));
    out = register_module("out", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++runs;
    inputs.emplace_back(x.getIntrusivePtr());
    const at::Tensor hidden = at::gelu(in(x));
    activations.emplace_back(hidden.getIntrusivePtr());
    return x + out(hidden);
  }
  int runs = 0;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> activations, inputs;
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  // `direct`: a block that is not called by muster::call(); -1: none.
  explicit NetImpl(int64_t width = 16, int direct = -1) : direct(direct) {
    first = register_module("first", torch::nn::Linear(6, width));
    torch::nn::ModuleList list = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back(width);
      list->push_back(blocks.back().ptr());
    }
    last = register_module("last", torch::nn::Linear(width, 3));
    at::NoGradGuard no_grad;
    uint64_t seed = 40;
    for (auto& item : named_parameters()) {
      item.value().copy_(Random(item.value().sizes(), ++seed).div_(4));
    }
  }
  at::Tensor forward(const at::Tensor& in) {
    at::Tensor x = first(in);
    for (int i = 0; i < 3; ++i) x = i == direct ? blocks[i](x) : call(blocks[i], x);
    return last(x);
  }
  // Another entry point, which does not checkpoint activations.
  at::Tensor forward_plainly(const at::Tensor& in) {
    at::Tensor x = first(in);
    for (Block& block : blocks) x = block(x);
    return last(x);
  }
  const int direct;
  std::vector<Block> blocks;
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

// The results of some steps of two micro-steps each: the weights on process 0, and how often block
// 0 ran there.
struct Outcome {
  Weights weights;
  int runs = 0;
  int inputs = 0;  // inputs of blocks that were in memory between forward and backward passes
};
Outcome Train(int processes, AcceleratorOptions options, const std::string& strategy,
              int64_t rows = 256) {
  options.sharding = ParseSharding(strategy, 2);
  options.gradient_accumulation_steps = 2;
  Outcome outcome;
  RunAccelerators(processes, options, [&](Accelerator& a) {
    Net net;
    FusedAdamW adam(net->parameters(), {.lr = 0.01});
    auto [model, optimizer] = a.prepare(net, adam);
    for (int step = 0; step < 6; ++step) {
      auto scope = a.accumulate();
      const at::Tensor x = Random({rows, 6}, 1000 + 10 * step + a.process_index());
      for (Block& block : net->blocks) block->inputs.clear();
      const at::Tensor loss = model(x).square().mean();
      for (const Block& block : net->blocks) {
        for (const auto& weak : block->inputs) {
          if (weak.lock() && a.is_main_process()) ++outcome.inputs;
        }
      }
      a.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
    const Weights weights = a.get_state_dict(model);
    if (!a.is_main_process()) return;
    for (const auto& [name, tensor] : weights) outcome.weights[name] = tensor.clone();
    outcome.runs = net->blocks[0]->runs;
  });
  return outcome;
}

void ExpectEqual(const Weights& got, const Weights& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (const auto& [name, tensor] : want) {
    EXPECT_TRUE(got.at(name).equal(tensor)) << what << ": " << name;
  }
}

TEST(ActivationCheckpointing, UnderEveryStrategy_HasTheSameBits) {
  const TestFolder folder;
  for (const char* precision : {"no", "bf16"}) {
    AcceleratorOptions options;
    options.mixed_precision = precision;
    AcceleratorOptions checkpointed = options, offloaded = options;
    checkpointed.activation_checkpointing.emplace();
    offloaded.activation_checkpointing = {
        .block_types = {"Block"}, .offload = Offload::kDisk, .offload_path = folder.path()};
    for (const int processes : {1, 2}) {
      for (const char* strategy : {"no_shard", "zero2", "zero3"}) {
        const std::string what =
            std::string(strategy) + " " + precision + " " + std::to_string(processes);
        if (what.find("bf16") != std::string::npos && what != "zero3 bf16 2") continue;
        const Outcome want = Train(processes, options, strategy);
        EXPECT_EQ(want.runs, 6) << what;
        const Outcome got = Train(processes, checkpointed, strategy);
        EXPECT_EQ(got.runs, 12) << what;
        EXPECT_EQ(got.inputs, 6 * 3) << what;
        ExpectEqual(got.weights, want.weights, what);
        const Outcome from_disk = Train(processes, offloaded, strategy);
        EXPECT_EQ(from_disk.runs, 12) << what;
        EXPECT_EQ(from_disk.inputs, 0) << what;
        ExpectEqual(from_disk.weights, want.weights, what + " on a disk");
      }
    }
  }
}

// Returns the bytes of activations inside blocks that are held between forward and backward.
int64_t HeldBytes(const AcceleratorOptions& options) {
  int64_t bytes = 0;
  RunAccelerators(1, options, [&](Accelerator& a) {
    Net net;
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    const at::Tensor loss = model(Random({128, 6}, 7)).square().mean();
    for (const Block& block : net->blocks) {
      for (const auto& weak : block->activations) {
        if (const auto tensor = weak.lock()) bytes += tensor->numel() * 4;
      }
    }
    a.backward(loss);
  });
  return bytes;
}

TEST(ActivationCheckpointing, ActivationsOfBlocks_AreNotHeldBetweenThePasses) {
  AcceleratorOptions options;
  EXPECT_EQ(HeldBytes(options), 3 * 128 * 64 * 4);
  options.activation_checkpointing.emplace();
  EXPECT_EQ(HeldBytes(options), 0);
  options.activation_checkpointing->enabled = false;
  EXPECT_EQ(HeldBytes(options), 3 * 128 * 64 * 4);
}

TEST(ActivationCheckpointing, APolicyThatMatchesNothing_IsRefusedAtPrepare) {
  AcceleratorOptions options;
  options.activation_checkpointing = {.block_types = {"Layer"}};
  const auto prepare = [](Accelerator& a) {
    Net net;
    (void)a.prepare(net);
  };
  EXPECT_THAT(ErrorsOf(2, options, prepare),
              Each(HasSubstr("options.activation_checkpointing.block_types: the model has no "
                             "module of class 'Layer'; it has Block")));
  options.activation_checkpointing.emplace();
  EXPECT_THAT(ErrorsOf(1, options,
                       [](Accelerator& a) {
                         torch::nn::Linear net(3, 3);
                         (void)a.prepare(net);
                       }),
              Each(HasSubstr("selects no module of the model")));
}

TEST(ActivationCheckpointing, ABlockThatIsNotCalledBySeam_IsRefusedAtBackward) {
  AcceleratorOptions options;
  options.activation_checkpointing.emplace();
  for (const char* strategy : {"no_shard", "zero3"}) {
    options.sharding = ParseSharding(strategy, 2);
    EXPECT_THAT(ErrorsOf(2, options,
                         [](Accelerator& a) {
                           Net net(16, /*direct=*/1);
                           FusedSGD sgd(net->parameters(), {.lr = 0.1});
                           auto [model, optimizer] = a.prepare(net, sgd);
                           a.backward(model(Random({4, 6}, 7)).mean());
                         }),
                Each(HasSubstr("1 block(s) of the model ran without it, 'blocks.1' first")))
        << strategy;
    // LibTorch calls its entries itself.
    EXPECT_THAT(ErrorsOf(2, options,
                         [](Accelerator& a) {
                           torch::nn::Sequential net(torch::nn::Linear(6, 6),
                                                     torch::nn::Linear(6, 3));
                           FusedSGD sgd(net->parameters(), {.lr = 0.1});
                           auto [model, optimizer] = a.prepare(net, sgd);
                           a.backward(model(Random({4, 6}, 7)).mean());
                         }),
                Each(HasSubstr("2 block(s) of the model ran without it")))
        << strategy;
  }
}

TEST(ActivationCheckpointing, AnEvaluationBySeam_DoesNotExcuseATrainingAroundIt) {
  AcceleratorOptions options;
  options.activation_checkpointing.emplace();
  EXPECT_THAT(
      ErrorsOf(2, options,
               [](Accelerator& a) {
                 Net net;
                 FusedSGD sgd(net->parameters(), {.lr = 0.1});
                 auto [model, optimizer] = a.prepare(net, sgd);
                 {
                   const at::NoGradGuard no_grad;
                   (void)model(Random({4, 6}, 7));
                 }
                 a.backward(model.call(&NetImpl::forward_plainly, Random({4, 6}, 7)).mean());
               }),
      Each(HasSubstr("3 block(s) of the model ran without it, 'blocks.0' first")));
}

TEST(ActivationCheckpointing, ABlockThatIsNotCalledBySeam_IsRefusedAtTheStepAfterPlainBackward) {
  AcceleratorOptions options;
  options.activation_checkpointing.emplace();
  for (const int processes : {1, 2}) {
    for (const char* strategy : {"no_shard", "zero2", "zero3"}) {
      options.sharding = ParseSharding(strategy, processes);
      for (const int direct : {1, -1}) {
        EXPECT_THAT(
            ErrorsOf(processes, options,
                     [direct](Accelerator& a) {
                       Net net(16, direct);
                       FusedSGD sgd(net->parameters(), {.lr = 0.1});
                       auto [model, optimizer] = a.prepare(net, sgd);
                       model(Random({4, 6}, 7)).mean().backward();
                       optimizer.step();
                     }),
            Each(direct < 0 ? ::testing::Matcher<std::string>(::testing::IsEmpty())
                            : HasSubstr("1 block(s) of the model ran without it, 'blocks.1'")))
            << processes << strategy;
      }
    }
  }
}

TEST(ActivationCheckpointing, ABlockThatIsCalledByItselfInALaterStep_IsNamed) {
  AcceleratorOptions options;
  options.activation_checkpointing.emplace();
  for (const char* strategy : {"no_shard", "zero3"}) {
    options.sharding = ParseSharding(strategy, 2);
    const auto said = [&](bool plainly) {
      testing::internal::CaptureStderr();
      RunAccelerators(2, options, [&](Accelerator& a) {
        Net net;
        FusedSGD sgd(net->parameters(), {.lr = 0.1});
        auto [model, optimizer] = a.prepare(net, sgd);
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = Random({4, 6}, 7);
          a.backward(
              (step == 1 && plainly ? model.call(&NetImpl::forward_plainly, x) : model(x)).mean());
          optimizer.step();
          optimizer.zero_grad();
        }
      });
      return testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(said(false), Not(HasSubstr("activation checkpointing"))) << strategy;
    EXPECT_THAT(said(true), HasSubstr("block 'blocks.2' of the model")) << strategy;
  }
}

// --- options.gradient_clipping ---

// Returns the weights after some steps; `in_loop`: the norm to which the loop clips; 0: it does not
// clip.
Weights TrainClipped(const std::string& strategy, const AcceleratorOptions& base, double in_loop,
                     std::vector<double>* norms = nullptr) {
  AcceleratorOptions options = base;
  options.sharding = ParseSharding(strategy, 2);
  options.gradient_accumulation_steps = 2;
  Weights result;
  RunAccelerators(2, options, [&](Accelerator& a) {
    Net net;
    FusedSGD sgd(net->parameters(), {.lr = 0.5, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    for (int step = 0; step < 6; ++step) {
      auto scope = a.accumulate();
      const at::Tensor x = Random({8, 6}, 1000 + 10 * step + a.process_index());
      a.backward(model(x).square().mean());
      if (in_loop > 0 && a.sync_gradients()) {
        const double norm = a.clip_grad_norm_(net->parameters(), in_loop).item<double>();
        if (norms != nullptr && a.is_main_process()) norms->push_back(norm);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    const Weights weights = a.get_state_dict(model);
    if (!a.is_main_process()) return;
    for (const auto& [name, tensor] : weights) result[name] = tensor.clone();
  });
  return result;
}

TEST(GradientClipping, InTheStep_HasTheBitsOfTheLoopThatClips) {
  for (const char* precision : {"no", "fp16"}) {
    AcceleratorOptions options;
    options.mixed_precision = precision;
    options.grad_scaler.init_scale = 256;
    AcceleratorOptions clipping = options;
    clipping.gradient_clipping = 0.05;
    for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
      const std::string what = std::string(strategy) + " " + precision;
      if (what == "zero1 fp16" || what == "zero2 fp16") continue;
      const Weights want = TrainClipped(strategy, options, 0.05);
      ASSERT_FALSE(want.empty());
      ExpectEqual(TrainClipped(strategy, clipping, 0), want, what);
      const Weights unclipped = TrainClipped(strategy, options, 0);
      EXPECT_FALSE(unclipped.at("last.weight").equal(want.at("last.weight"))) << what;
      // A loop that clips as well changes nothing, whatever its norm, and gets the norm before
      // clipping.
      std::vector<double> norms;
      ExpectEqual(TrainClipped(strategy, clipping, 0.001, &norms), want, what + ", the loop too");
      ASSERT_EQ(norms.size(), 3u);
      EXPECT_GT(norms[0], 0.05) << what;
    }
  }
}

// One optimizer is prepared, the other is not.
TEST(GradientClipping, WhatNoStepClips_TheLoopClips) {
  AcceleratorOptions options;
  options.gradient_clipping = 1;
  RunAccelerators(1, options, [](Accelerator& a) {
    Net net;
    FusedSGD head(net->last->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, head);
    a.backward(model(Random({8, 6}, 7)).square().mean());
    std::map<std::string, at::Tensor> before;
    for (const auto& item : net->named_parameters()) {
      before[item.key()] = item.value().grad().clone();
    }
    const at::Tensor norm = a.clip_grad_norm_(net->parameters(), 0.05);
    ASSERT_GT(norm.item<double>(), 0.1);
    for (const auto& item : net->named_parameters()) {
      const bool prepared = item.key().rfind("last", 0) == 0;
      const at::Tensor want =
          prepared ? before[item.key()] : before[item.key()] * (0.05 / (norm + 1e-6));
      EXPECT_TRUE(item.value().grad().allclose(want, 1e-5, 1e-9)) << item.key();
    }
  });
}

TEST(GradientClipping, WithoutAPreparedOptimizer_IsRefusedAtBackward) {
  AcceleratorOptions options;
  options.gradient_clipping = 1;
  EXPECT_THAT(ErrorsOf(1, options,
                       [](Accelerator& a) {
                         Net net;
                         auto model = a.prepare(net);
                         a.backward(model(Random({8, 6}, 7)).mean());
                       }),
              Each(HasSubstr("without a prepared optimizer: no step would clip")));
}

TEST(GradientClipping, AnotherNormInTheLoop_IsSaidOnceAlsoAfterTheSame) {
  AcceleratorOptions options;
  options.gradient_clipping = 1;
  testing::internal::CaptureStderr();
  RunAccelerators(1, options, [](Accelerator& a) {
    Net net;
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    for (const double norm : {1.0, 0.5, 0.25}) {
      a.backward(model(Random({8, 6}, 7)).square().mean());
      a.clip_grad_norm_(net->parameters(), norm);
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("clip_grad_norm_(0.5)"));
  EXPECT_THAT(log, Not(HasSubstr("clip_grad_norm_(0.25)")));
}

TEST(GradientClipping, NegativeNorm_IsRefused) {
  AcceleratorOptions options;
  options.cpu = true;
  options.gradient_clipping = -1;
  EXPECT_THAT(ErrorOf([&] { Accelerator accelerator(options); }),
              HasSubstr("options.gradient_clipping must not be negative"));
}

}  // namespace
}  // namespace muster
