// The mixed-precision policy of sharding: dtypes of outputs and of buffers, on several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "c10/util/Exception.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/test_model.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "muster/weights.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/collective/gloo_ranks.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

AcceleratorOptions Sharded(const std::string& name) {
  AcceleratorOptions options;
  options.sharding = ParseSharding(name, 2);
  return options;
}

// Two blocks with a residual, which is fp32 under autocast, and buffers of all kinds.
struct ResidualImpl : torch::nn::Module {
  ResidualImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return x + linear(x); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Residual);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : blocks(register_module("blocks", torch::nn::ModuleList(Residual(), Residual()))),
        norm(register_module("norm", torch::nn::BatchNorm1d(5))),
        scale(register_buffer("scale", Random({5}, 30))),
        ids(register_buffer("ids", at::arange(5))) {
    const at::NoGradGuard no_grad;
    uint64_t seed = 70;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(Random(parameter.sizes(), ++seed).div_(3));
    }
  }
  at::Tensor forward(at::Tensor x) {
    seen.clear();
    for (const auto& block : *blocks) {
      x = by_hand.has_value() ? block->as<Residual>()->forward(x).to(*by_hand)
                              : muster::call(block->as<Residual>(), x);
      seen.push_back(x.scalar_type());
    }
    return norm(x.to(at::kFloat)) * scale;
  }
  torch::nn::ModuleList blocks;
  torch::nn::BatchNorm1d norm;
  at::Tensor scale, ids;
  // The type to which this module itself converts blocks, without muster::call().
  std::optional<at::ScalarType> by_hand;
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Net);

at::Tensor LossOf(const at::Tensor& out, int step) {
  return at::mse_loss(out.to(at::kFloat), Random({4, out.size(1)}, 500 + step));
}

// Returns the weights after a few steps, with the same batches on all ranks, and the last outputs.
template <class Module, class Convert>
std::map<std::string, at::Tensor> Train(Accelerator& a, Module net, const Convert& convert) {
  FusedSGD sgd(net->parameters(), {.lr = 0.1});
  auto [model, optimizer] = a.prepare(net, sgd);
  at::Tensor out;
  for (int step = 0; step < 3; ++step) {
    auto scope = a.accumulate();
    out = convert(model(Random({4, 5}, 400 + step)));
    a.backward(LossOf(out, step));
    optimizer.step();
    optimizer.zero_grad();
  }
  std::map<std::string, at::Tensor> weights = WeightsOf(a, model);
  weights["last output"] = out.detach();
  {
    const at::NoGradGuard no_grad;
    weights["output without gradients"] = convert(model(Random({4, 5}, 410)));
  }
  return weights;
}

void ExpectEqual(const std::map<std::string, at::Tensor>& got,
                 const std::map<std::string, at::Tensor>& want, const std::string& what) {
  for (const auto& [name, tensor] : want) {
    ASSERT_EQ(got.count(name), 1u) << name << " " << what;
    EXPECT_EQ(got.at(name).scalar_type(), tensor.scalar_type()) << name << " " << what;
    EXPECT_TRUE(at::equal(got.at(name), tensor)) << name << " " << what;
  }
}

TEST(ShardingDtypes, OutputDtype_IsTheCastByHandUnderEveryStrategy) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3", "hybrid"}) {
      for (const int ranks : {1, 2, 4}) {
        if (ranks == 1 && std::string(strategy) == "hybrid") continue;
        const std::string what = c10::str(strategy, " on ", ranks, " to ", c10::toString(dtype));
        std::map<std::string, at::Tensor> want;
        RunAccelerators(ranks, Sharded(strategy), [&](Accelerator& a) {
          auto got = Train(a, MakeNet(), [&](const at::Tensor& out) { return out.to(dtype); });
          if (a.is_main_process()) want = std::move(got);
        });
        AcceleratorOptions options = Sharded(strategy);
        options.sharding->output_dtype = dtype;
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          const auto got = Train(a, MakeNet(), [](const at::Tensor& out) { return out; });
          if (a.is_main_process()) ExpectEqual(got, want, what);
        });
      }
    }
  }
}

TEST(ShardingDtypes, OutputDtype_ConvertsFloatingPointTensorsOfAStructure) {
  for (const char* precision : {"no", "bf16"}) {
    AcceleratorOptions options = Sharded("zero3");
    options.mixed_precision = precision;
    options.sharding->output_dtype = at::kHalf;
    RunAccelerators(2, options, [&](Accelerator& a) {
      auto model = a.prepare(MakeNet());
      const auto [out, whole, more] = model.call([](torch::nn::SequentialImpl& net) {
        const at::Tensor y = net.forward(Random({2, 5}, 1));
        return std::make_tuple(
            y, y.argmax(1),
            std::map<std::string, at::Tensor>{
                {"double", y.to(at::kDouble)}, {"mask", y > 0}, {"none", at::Tensor()}});
      });
      EXPECT_EQ(out.scalar_type(), at::kHalf);
      EXPECT_EQ(whole.scalar_type(), at::kLong);
      EXPECT_EQ(more.at("double").scalar_type(), at::kHalf);
      EXPECT_EQ(more.at("mask").scalar_type(), at::kBool);
      EXPECT_FALSE(more.at("none").defined());
    });
  }
}

TEST(ShardingDtypes, OutputDtypeUnderMixedPrecision_ConvertsWhatUnitsReturn) {
  for (const bool again : {false, true}) {
    for (const char* strategy : {"zero1", "zero3"}) {
      for (const int ranks : {1, 2}) {
        const std::string what = c10::str(strategy, " on ", ranks, again ? " run again" : "");
        AcceleratorOptions options = Sharded(strategy);
        options.mixed_precision = "bf16";
        std::map<std::string, at::Tensor> want;
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          Net net;
          net->by_hand = at::kBFloat16;
          auto got = Train(a, net, [](const at::Tensor& out) { return out.to(at::kBFloat16); });
          if (a.is_main_process()) want = std::move(got);
        });
        options.sharding->output_dtype = at::kBFloat16;
        if (again) options.activation_checkpointing.emplace().enabled = true;
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          Net net;
          const auto got = Train(a, net, [](const at::Tensor& out) { return out; });
          EXPECT_THAT(net->seen, ElementsAre(at::kBFloat16, at::kBFloat16)) << what;
          if (a.is_main_process()) ExpectEqual(got, want, what);
        });
        // Without a policy: the type that autocast gives a residual.
        options.sharding->output_dtype.reset();
        RunAccelerators(ranks, options, [&](Accelerator& a) {
          Net net;
          const auto got = Train(a, net, [](const at::Tensor& out) { return out; });
          EXPECT_THAT(net->seen, ElementsAre(at::kFloat, at::kFloat)) << what;
        });
      }
    }
  }
  // The policy of a destroyed model no longer affects its module.
  EXPECT_EQ(Net()->forward(Random({4, 5}, 1)).scalar_type(), at::kFloat);
}

// As for generate() or an export, while parameters are whole.
TEST(ShardingDtypes, OutputDtypeOfUnits_LeavesPassesOfTheBareModuleAlone) {
  for (const bool again : {false, true}) {
    for (const int ranks : {1, 2}) {
      AcceleratorOptions options = Sharded("zero1");
      options.mixed_precision = "bf16";
      options.sharding->output_dtype = at::kBFloat16;
      if (again) options.activation_checkpointing.emplace().enabled = true;
      Net plain;
      plain->eval();
      const at::Tensor want = plain->forward(Random({4, 5}, 1)).detach();
      RunAccelerators(ranks, options, [&](Accelerator& a) {
        Net net;
        auto model = a.prepare(net);
        a.summon_full_params(model, [&] {
          const at::NoGradGuard no_grad;
          net->eval();
          EXPECT_TRUE(at::equal(a.unwrap_model(model)->forward(Random({4, 5}, 1)), want));
          EXPECT_THAT(net->seen, ElementsAre(at::kFloat, at::kFloat));
        });
        model(Random({4, 5}, 1));
        EXPECT_THAT(net->seen, ElementsAre(at::kBFloat16, at::kBFloat16));
      });
    }
  }
}

TEST(ShardingDtypes, BufferDtype_IsTheCastByHandUnderEveryStrategy) {
  for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3", "hybrid"}) {
    for (const int ranks : {1, 2, 4}) {
      if (ranks == 1 && std::string(strategy) == "hybrid") continue;
      const std::string what = c10::str(strategy, " on ", ranks);
      std::map<std::string, at::Tensor> want;
      RunAccelerators(ranks, Sharded(strategy), [&](Accelerator& a) {
        Net net;
        net->scale.set_data(net->scale.to(at::kBFloat16));
        auto got = Train(a, net, [](const at::Tensor& out) { return out; });
        if (a.is_main_process()) want = std::move(got);
      });
      AcceleratorOptions options = Sharded(strategy);
      options.sharding->buffer_dtype = at::kBFloat16;
      RunAccelerators(ranks, options, [&](Accelerator& a) {
        Net net;
        const auto got = Train(a, net, [](const at::Tensor& out) { return out; });
        EXPECT_EQ(net->scale.scalar_type(), at::kBFloat16) << what;
        EXPECT_EQ(net->ids.scalar_type(), at::kLong) << what;
        EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kFloat) << what;
        EXPECT_EQ(net->norm->running_var.scalar_type(), at::kFloat) << what;
        if (a.is_main_process()) ExpectEqual(got, want, what);
      });
    }
  }
}

TEST(ShardingDtypes, BuffersOfIgnoredModulesAndOfModelsForEvaluation_StayAsTheyAre) {
  for (const char* strategy : {"no_shard", "zero3"}) {
    AcceleratorOptions options = Sharded(strategy);
    options.sharding->buffer_dtype = options.sharding->output_dtype = at::kHalf;
    options.sharding->ignored_modules = "1";
    RunAccelerators(2, options, [&](Accelerator& a) {
      const auto make = [] { return torch::nn::Sequential(Net(), Net()); };
      torch::nn::Sequential net = make(), teacher = make();
      auto model = a.prepare(net);
      EXPECT_EQ(net[0]->as<Net>()->scale.scalar_type(), at::kHalf);
      EXPECT_EQ(net[1]->as<Net>()->scale.scalar_type(), at::kFloat);
      auto judge = a.prepare_model(teacher, /*evaluation_mode=*/true);
      EXPECT_EQ(teacher[0]->as<Net>()->scale.scalar_type(), at::kFloat);
      EXPECT_EQ(judge(Random({4, 5}, 1)).scalar_type(), at::kFloat);
    });
  }
}

// A tensor is both a parameter and a buffer, and a buffer is both inside and outside an ignored
// module.
struct SharesImpl : torch::nn::Module {
  SharesImpl() : net(register_module("net", Net())), outer(register_module("outer", Net())) {
    weight = register_parameter("weight", Random({5}, 40));
    outer->register_buffer("weight", weight);
    register_buffer("scale", net->scale);
  }
  at::Tensor forward(const at::Tensor& x) { return outer(net(x)) * weight; }
  Net net, outer;
  at::Tensor weight;
};
TORCH_MODULE(Shares);

TEST(ShardingDtypes, TensorThatIsAlsoAParameterOrIgnored_IsNotConverted) {
  for (const int ranks : {1, 2}) {
    const std::string what = c10::str(ranks, " ranks");
    AcceleratorOptions options = Sharded("no_shard");  // other strategies refuse such a parameter
    std::map<std::string, at::Tensor> want;
    RunAccelerators(ranks, options, [&](Accelerator& a) {
      Shares shares;
      shares->outer->scale.set_data(shares->outer->scale.to(at::kBFloat16));
      auto got = Train(a, shares, [](const at::Tensor& out) { return out; });
      if (a.is_main_process()) want = std::move(got);
    });
    options.sharding->buffer_dtype = at::kBFloat16;
    options.sharding->ignored_modules = "net";
    RunAccelerators(ranks, options, [&](Accelerator& a) {
      Shares shares;
      const auto got = Train(a, shares, [](const at::Tensor& out) { return out; });
      EXPECT_EQ(shares->weight.scalar_type(), at::kFloat) << what;
      EXPECT_EQ(shares->net->scale.scalar_type(), at::kFloat) << what;
      EXPECT_EQ(shares->outer->scale.scalar_type(), at::kBFloat16) << what;
      if (a.is_main_process()) ExpectEqual(got, want, what);
    });
  }
}

// Loads into a model with another policy, or none, and back.
TEST(ShardingDtypes, Checkpoints_HoldBuffersAsTheyAreAndConvertOnTheWayIn) {
  for (const char* strategy : {"no_shard", "zero3"}) {
    AcceleratorOptions with = Sharded(strategy);
    with.sharding->buffer_dtype = at::kBFloat16;
    const std::string low = TestDir(std::string("low_") + strategy),
                      high = TestDir(std::string("high_") + strategy),
                      model_folder = TestDir(std::string("model_") + strategy);
    const at::Tensor scale = Random({5}, 31), rounded = scale.to(at::kBFloat16);
    const auto run = [&](int ranks, const AcceleratorOptions& options,
                         const std::function<void(Accelerator&, Net&)>& check) {
      RunAccelerators(ranks, options, [&](Accelerator& a) {
        Net net;
        FusedSGD sgd(net->parameters(), {.lr = 0.1});
        auto prepared = a.prepare(net, sgd);
        check(a, net);
      });
    };
    run(2, with, [&](Accelerator& a, Net& net) {
      net->scale.copy_(scale);
      ASSERT_TRUE(a.save_state(low).ok());
    });
    run(2, Sharded(strategy), [&](Accelerator& a, Net& net) {
      net->scale.copy_(scale);
      ASSERT_TRUE(a.save_state(high).ok());
    });
    for (const int ranks : {1, 2}) {
      run(ranks, with, [&](Accelerator& a, Net& net) {
        for (const std::string& folder : {low, high}) {
          net->scale.zero_();
          ASSERT_TRUE(a.load_state(folder).ok());
          EXPECT_EQ(net->scale.scalar_type(), at::kBFloat16);
          EXPECT_TRUE(at::equal(net->scale, rounded)) << folder;
        }
      });
      run(ranks, Sharded(strategy), [&](Accelerator& a, Net& net) {
        ASSERT_TRUE(a.load_state(low).ok());
        EXPECT_TRUE(at::equal(net->scale, rounded.to(at::kFloat)));
        ASSERT_TRUE(a.load_state(high).ok());
        EXPECT_TRUE(at::equal(net->scale, scale));
      });
    }
  }
}

TEST(ShardingDtypes, DtypeThatIsNoFloatingPoint_IsRefusedByName) {
  const auto error = [](const std::function<void(ShardingOptions&)>& set) -> std::string {
    AcceleratorOptions options = Sharded("zero3");
    set(*options.sharding);
    try {
      RunAccelerators(1, options, [](Accelerator&) {});
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_THAT(error([](ShardingOptions& o) { o.output_dtype = at::kLong; }),
              AllOf(HasSubstr("options.sharding.output_dtype is Long"), HasSubstr("kBFloat16")));
  EXPECT_THAT(error([](ShardingOptions& o) { o.buffer_dtype = at::kBool; }),
              HasSubstr("options.sharding.buffer_dtype is Bool"));
  EXPECT_THAT(error([](ShardingOptions& o) { o.reduce_dtype = at::kInt; }),
              HasSubstr("options.sharding.reduce_dtype is Int"));
  EXPECT_THAT(error([](ShardingOptions& o) { o.buffer_dtype = at::kComplexFloat; }),
              HasSubstr("options.sharding.buffer_dtype is ComplexFloat"));
}

TEST(ShardingDtypes, DifferentPoliciesOnTwoRanks_AreRefusedOnBoth) {
  for (const char* strategy : {"no_shard", "zero3"}) {
    for (const bool buffers : {false, true}) {
      std::vector<std::string> errors(2);
      const auto store = c10::make_intrusive<c10d::HashStore>();
      RunGlooRanks(2, [&](Comm& comm) {
        AcceleratorOptions options = Sharded(strategy);
        (buffers ? options.sharding->buffer_dtype : options.sharding->output_dtype) =
            comm.rank() == 0 ? at::kBFloat16 : at::kHalf;
        try {
          Accelerator accelerator(CoreOn(comm, options, store));
        } catch (const c10::Error& error) {
          errors[comm.rank()] = error.what_without_backtrace();
        }
      });
      EXPECT_THAT(errors,
                  Each(AllOf(HasSubstr(buffers ? "buffer_dtype=BFloat16" : "output_dtype=BFloat16"),
                             HasSubstr("dtype=Half"))));
    }
  }
}

}  // namespace
}  // namespace muster
