// load_weights() into sharded models, including models that are given to prepare() without values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/bigmodel.h"
#include "muster/checkpoint.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "muster/weights.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/test_huge_file.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kSamples = 12, kSteps = 4;
using Weights = std::map<std::string, at::Tensor>;

// A model with a tied weight, a frozen one, one in another order of memory, and a buffer.
struct TiedNetImpl : torch::nn::Module {
  explicit TiedNetImpl(int64_t width = 9, bool tied = true)
      : in(torch::nn::Linear(5, width)),
        mid(torch::nn::Linear(width, width)),
        out(torch::nn::Linear(width, 3)) {
    register_module("in", in);
    register_module("mid", mid);
    register_module("out", out);
    again = register_parameter("again", tied ? mid->weight : mid->weight.detach().clone());
    frozen = register_parameter("frozen", at::ones({width}), /*requires_grad=*/false);
    turned = register_parameter("turned", at::zeros({width, 4}).t());
    scale = register_buffer("scale", at::full({width}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::tanh(mid->forward(at::tanh(in->forward(x)))) * scale + frozen;
    const at::Tensor more = at::linear(h, again) * 0.1;
    return out->forward(h + more) + at::linear(h, turned).mean(-1, /*keepdim=*/true);
  }
  torch::nn::Linear in, mid, out;
  at::Tensor again, frozen, turned, scale;
};
TORCH_MODULE(TiedNet);

// Returns the file's values.
Weights Values(int64_t width = 9) {
  const at::NoGradGuard no_grad;
  Weights values;
  const TiedNet net(width);
  uint64_t seed = 1;
  for (const auto& item : net->named_parameters()) {
    values[item.key()] = Random(item.value().sizes(), ++seed).div_(3);
  }
  values["scale"] = Random({width}, 77);
  values.erase("again");
  return values;
}

struct Case {
  const char* strategy;
  int ranks;
};
const Case kCases[] = {{"zero3", 1},  {"zero3", 2}, {"zero3", 3},
                       {"hybrid", 4}, {"zero1", 2}, {"zero2", 3}};

AcceleratorOptions Sharded(const std::string& name) {
  AcceleratorOptions options;
  options.sharding = ParseSharding(name, 2);
  return options;
}

TiedNet MakeEmpty(int64_t width = 9) {
  return init_empty_weights([&] { return TiedNet(width); });
}

// Returns each parameter once.
std::vector<at::Tensor> Parameters(const TiedNet& net) {
  std::vector<at::Tensor> parameters;
  for (const auto& item : net->named_parameters()) {
    if (item.key() != "again") parameters.push_back(item.value());
  }
  return parameters;
}

template <class Model, class Optimizer>
void Train(Accelerator& a, Model& model, Optimizer& optimizer) {
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor x = Random({kSamples, 5}, 100 + step), y = Random({kSamples, 3}, 200 + step);
    const auto mine = [&](const at::Tensor& t) {
      return t.chunk(a.num_processes())[a.process_index()];
    };
    a.backward(at::mse_loss(model(mine(x)), mine(y)));
    optimizer.step();
    optimizer.zero_grad();
  }
}

void ExpectEqual(const Weights& got, const Weights& want) {
  for (const auto& [name, tensor] : want) {
    ASSERT_TRUE(got.count(name) > 0) << name;
    EXPECT_TRUE(at::equal(got.at(name), tensor.to(at::kFloat))) << name;
  }
}

class ShardingWeights : public testing::Test {
 protected:
  // Writes a file with `values`.
  std::string File(const std::string& name, const Weights& values) {
    const std::string path = folder_.Path(name);
    EXPECT_TRUE(SaveTensors(path, values).ok());
    return path;
  }

  // Returns the weights of an unsharded model in one process, after training.
  Weights Trained(const std::string& path) {
    Weights weights;
    RunAccelerators(1, {}, [&](Accelerator& a) {
      TiedNet net;
      const auto loaded = load_model(net, path);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      FusedSGD sgd(Parameters(net), {.lr = 0.1, .momentum = 0.9});
      auto [model, optimizer] = a.prepare(net, sgd);
      Train(a, model, optimizer);
      weights = WeightsOf(a, model);
    });
    return weights;
  }

  TestFolder folder_;
};

TEST_F(ShardingWeights, FilesAndCheckpoints_LoadIntoShardsAndTrainAsUnsharded) {
  const Weights values = Values();
  Weights halves;
  for (const auto& [name, tensor] : values) halves[name] = tensor.to(at::kBFloat16);
  const std::string whole = File("whole.safetensors", values);
  const std::vector<std::string> sources = {whole, File("halves.safetensors", halves),
                                            folder_.Path("index"), folder_.Path("state")};
  RunAccelerators(1, {}, [&](Accelerator& a) {
    TiedNet net;
    ASSERT_TRUE(load_model(net, whole).ok());
    auto model = a.prepare(net);
    ASSERT_TRUE(a.save_model(model, sources[2], "0.5KB").ok());
    ASSERT_TRUE(a.save_state(sources[3]).ok());
  });
  ASSERT_TRUE(PathExists(sources[2] + "/model.safetensors.index.json"));
  for (const std::string& source : sources) {
    const bool half = absl::StrContains(source, "halves");
    const Weights& want = half ? halves : values;
    const Weights trained = Trained(source);
    for (const Case& one : kCases) {
      for (const bool empty : {false, true}) {
        SCOPED_TRACE(source + " " + one.strategy + " " + std::to_string(one.ranks) +
                     (empty ? " empty" : ""));
        RunAccelerators(one.ranks, Sharded(one.strategy), [&](Accelerator& a) {
          TiedNet net = empty ? MakeEmpty() : TiedNet();
          FusedSGD sgd(Parameters(net), {.lr = 0.1, .momentum = 0.9});
          auto [model, optimizer] = a.prepare(net, sgd);
          const auto loaded = a.load_weights(source);
          ASSERT_TRUE(loaded.ok()) << loaded.status();
          EXPECT_THAT(loaded->models[0].missing, IsEmpty());
          const Weights before = WeightsOf(a, model);
          if (a.is_main_process()) ExpectEqual(before, want);
          EXPECT_TRUE(at::equal(net->scale, want.at("scale").to(at::kFloat)));
          Train(a, model, optimizer);
          const Weights after = WeightsOf(a, model);
          if (!a.is_main_process()) return;
          for (const auto& [name, tensor] : after) {
            if (trained.count(name) == 0) continue;  // another name of a tensor that is there
            EXPECT_TRUE(at::allclose(tensor, trained.at(name), 1e-5, 1e-6)) << name;
          }
          if (one.ranks == 1) ExpectEqual(after, trained);
        });
      }
    }
  }
}

TEST_F(ShardingWeights, Rules_GiveTheListsOfAnUnshardedModel) {
  Weights values = Values(), renamed;
  values["again"] = values.at("mid.weight").clone();
  for (const auto& [name, tensor] : values) renamed["body." + name] = tensor;
  renamed["other"] = at::ones({2});
  renamed["body.more"] = at::ones({3});
  renamed["body.out.bias"] = at::ones({4});
  renamed["body.IN"] = renamed.at("body.in.weight");
  renamed.erase("body.in.weight");
  renamed.erase("body.in.bias");
  const std::string path = File("renamed.safetensors", renamed);
  const LoadWeightsOptions rules = {
      .strict = false,
      .skip_mismatched = true,
      .prefix = "body.",
      .rename = [](const std::string& name) { return name == "IN" ? "in.weight" : name; }};
  LoadedWeights want;
  RunAccelerators(1, {}, [&](Accelerator& a) {
    auto model = a.prepare(TiedNet());
    const auto loaded = a.load_weights(path, rules);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    want = loaded->models.at(0);
  });
  EXPECT_THAT(want.missing, ElementsAre("in.bias"));
  EXPECT_THAT(want.mismatched, ElementsAre(HasSubstr("out.bias")));
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    auto model = a.prepare(TiedNet());
    const auto loaded = a.load_weights(path, rules);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const LoadedWeights& got = loaded->models.at(0);
    EXPECT_EQ(got.loaded, want.loaded);
    EXPECT_EQ(got.missing, want.missing);
    EXPECT_EQ(got.unexpected, want.unexpected);
    EXPECT_EQ(got.mismatched, want.mismatched);
    EXPECT_EQ(got.ignored, want.ignored);
    const absl::Status strict = a.load_weights(path).status();
    EXPECT_EQ(strict.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(strict.message()), HasSubstr("missing: again, frozen"));
  });
}

TEST_F(ShardingWeights, TwoNamesOfATiedWeightThatDiffer_AreRefusedOnEveryRank) {
  Weights values = Values();
  values["again"] = values.at("mid.weight").clone();
  // In the part of one rank only.
  values["again"].view(-1)[0] += 1;
  const std::string path = File("differ.safetensors", values);
  RunAccelerators(3, Sharded("zero3"), [&](Accelerator& a) {
    auto model = a.prepare(MakeEmpty());
    EXPECT_THAT(std::string(a.load_weights(path).status().message()),
                HasSubstr("the same tensor as again here, but another one in the file"));
    const auto loaded = a.load_weights(path, {.skip_mismatched = true});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_THAT(loaded->models[0].mismatched, ElementsAre(HasSubstr("mid.weight")));
  });
}

// A model with a dimension of one element with an unusual stride, and a buffer under two names.
struct OddNetImpl : torch::nn::Module {
  explicit OddNetImpl(int64_t width = 3) {
    row = register_parameter("row", at::zeros({1001, 1}).t());
    scale = register_buffer("scale", at::ones({width}));
    again = register_buffer("scale_again", scale);
  }
  at::Tensor forward(const at::Tensor& x) { return x * row.sum() * scale.sum() + again.sum(); }
  at::Tensor row, scale, again;
};
TORCH_MODULE(OddNet);

TEST_F(ShardingWeights, ParameterWithAnUnusualStride_GetsItsValues) {
  const Weights values = {{"row", Random({1, 1001}, 3)}, {"scale", at::full({3}, 0.5)}};
  const std::string path = File("odd.safetensors", values);
  for (const int ranks : {1, 2, 3}) {
    RunAccelerators(ranks, Sharded("zero3"), [&](Accelerator& a) {
      OddNet net;
      ASSERT_EQ(net->row.strides(), at::IntArrayRef({1, 1}));
      auto model = a.prepare(net);
      const auto loaded = a.load_weights(path);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      const Weights got = WeightsOf(a, model);
      if (a.is_main_process()) ExpectEqual(got, values);
    });
  }
}

TEST_F(ShardingWeights, TwoNamesOfABufferThatDiffer_AreRefusedAsInAnUnshardedModel) {
  const std::string path = File("differ.safetensors", {{"row", at::ones({1, 1001})},
                                                       {"scale", at::ones({3})},
                                                       {"scale_again", at::full({3}, 2.0)}});
  for (const AcceleratorOptions& options : {AcceleratorOptions(), Sharded("zero3")}) {
    RunAccelerators(2, options, [&](Accelerator& a) {
      auto model = a.prepare(OddNet());
      EXPECT_THAT(std::string(a.load_weights(path).status().message()),
                  HasSubstr("scale_again (the same tensor as scale here, but another one in the "
                            "file)"));
    });
  }
}

TEST_F(ShardingWeights, TwoNamesWithoutMemoryToCompareThem_AreNamed) {
  constexpr int64_t kWide = int64_t{1} << 24;
  const auto half = at::TensorOptions().dtype(at::kBFloat16);
  const std::string path = File("wide.safetensors", {{"row", at::ones({1, 1001})},
                                                     {"scale", at::ones({kWide}, half)},
                                                     {"scale_again", at::ones({kWide}, half)}});
  RunAccelerators(1, Sharded("zero3"), [&](Accelerator& a) {
    auto model = a.prepare(OddNet(kWide));
    absl::Status status;
    {
      // Enough memory for both as they are in the file, but not for one of them in the model's
      // type.
      const AtMostMoreMemory scarce(2 * kWide * sizeof(at::BFloat16) + 3 * kWide);
      status = a.load_weights(path).status();
    }
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("tensor \"scale"), HasSubstr("needs 134217728 bytes"),
                      HasSubstr("to be compared, in Float, with scale")));
  });
}

TEST_F(ShardingWeights, RanksThatSeeOtherFiles_AreRefusedOnEveryRank) {
  const Weights values = Values();
  Weights revision = values, lacks = values;
  revision["out.weight"] = values.at("out.weight") + 1;
  lacks.erase("in.weight");
  struct Other {
    std::string path, error;
    LoadWeightsOptions options;
  };
  const std::string path = File("all.safetensors", values);
  const Other others[] = {
      {File("revision.safetensors", revision), "rank 1 would load other values than rank 0", {}},
      {File("lacks.safetensors", lacks),
       "rank 1 would load other tensors than rank 0",
       {.strict = false}}};
  for (const AcceleratorOptions& options : {AcceleratorOptions(), Sharded("zero3")}) {
    for (const Other& other : others) {
      RunAccelerators(3, options, [&](Accelerator& a) {
        auto model = a.prepare(TiedNet());
        const Weights before = WeightsOf(a, model);
        const auto loaded =
            a.load_weights(a.process_index() == 1 ? other.path : path, other.options);
        EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(loaded.status().message()),
                    AllOf(HasSubstr(other.error), HasSubstr(path)));
        ExpectEqual(WeightsOf(a, model), before);
      });
    }
  }
}

TEST_F(ShardingWeights, HookOfOneRankThatLeavesATensorOut_IsRefusedOnEveryRank) {
  const std::string state = folder_.Path("state");
  for (const AcceleratorOptions& options : {AcceleratorOptions(), Sharded("zero3")}) {
    RunAccelerators(2, options, [&](Accelerator& a) {
      auto model = a.prepare(TiedNet());
      ASSERT_TRUE(a.save_state(state).ok());
      auto hook = a.register_load_state_pre_hook(
          [&](std::vector<NamedTensors>& weights, const StateReader&) {
            if (!a.is_main_process()) weights[0].pop_back();
          });
      EXPECT_THAT(std::string(a.load_weights(state).status().message()),
                  HasSubstr("rank 1 would load other tensors than rank 0"));
      a.wait_for_everyone();
      if (a.is_main_process()) {
        ASSERT_TRUE(RemoveTree(state).ok());
      }
      a.wait_for_everyone();
    });
  }
}

TEST_F(ShardingWeights, HookOfLoadStateThatAddsANameAgain_ReplacesTheTensor) {
  const std::string state = folder_.Path("state");
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    TiedNet net;
    FusedSGD sgd(Parameters(net), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    ASSERT_TRUE(a.save_state(state).ok());
    {
      auto hook = a.register_load_state_pre_hook(
          [](std::vector<NamedTensors>& weights, const StateReader&) {
            weights[0].emplace_back("out.bias", at::full({3}, 7.0));
          });
      const absl::Status loaded = a.load_state(state);
      EXPECT_TRUE(loaded.ok()) << loaded;
    }
    const Weights got = WeightsOf(a, model);
    if (a.is_main_process()) {
      EXPECT_TRUE(at::equal(got.at("out.bias"), at::full({3}, 7.0)));
    }
  });
}

// Otherwise the last one would win silently.
TEST_F(ShardingWeights, CheckpointOfAnUntiedWeight_IsRefusedBeforeAnythingChanges) {
  const std::string untied = folder_.Path("untied");
  RunAccelerators(1, {}, [&](Accelerator& a) {
    TiedNet net(9, /*tied=*/false);
    {
      const at::NoGradGuard no_grad;
      // In the part of one rank only.
      net->again.view(-1)[0] += 1;
    }
    auto model = a.prepare(net);
    ASSERT_TRUE(a.save_state(untied).ok());
  });
  for (const Case& one : {Case{"zero3", 3}, Case{"", 2}}) {
    SCOPED_TRACE(one.strategy);
    const bool sharded = *one.strategy != '\0';
    RunAccelerators(one.ranks, sharded ? Sharded(one.strategy) : AcceleratorOptions(),
                    [&](Accelerator& a) {
                      auto model = a.prepare(TiedNet());
                      const Weights before = WeightsOf(a, model);
                      EXPECT_THAT(std::string(a.load_state(untied).message()),
                                  HasSubstr("here, but another one in the file"));
                      const Weights after = WeightsOf(a, model);
                      if (a.is_main_process()) ExpectEqual(after, before);
                    });
  }
}

// A download or another save does this, after all ranks have agreed on the file.
TEST_F(ShardingWeights, FileThatIsReplacedMeanwhile_IsReadAsItWas) {
  const Weights values = Values();
  const std::string path = File("replaced.safetensors", values);
  Weights others = values;
  for (auto& [name, value] : others) value = value + 1;
  bool replaced = false;
  RunAccelerators(1, {}, [&](Accelerator& a) {
    auto model = a.prepare(TiedNet());
    const auto loaded = a.load_weights(path, {.rename = [&](const std::string& name) {
                                         if (!std::exchange(replaced, true)) {
                                           File("replaced.safetensors", others);
                                         }
                                         return name;
                                       }});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(at::equal(WeightsOf(a, model).at("out.bias"), values.at("out.bias")));
  });
  EXPECT_TRUE(replaced);
}

TEST_F(ShardingWeights, HookOfLoadStateThatUntiesAWeight_IsRefusedBeforeAnythingChanges) {
  const std::string state = folder_.Path("state");
  RunAccelerators(3, Sharded("zero3"), [&](Accelerator& a) {
    TiedNet net;
    FusedSGD sgd(Parameters(net), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    ASSERT_TRUE(a.save_state(state).ok());
    Train(a, model, optimizer);
    const Weights before = WeightsOf(a, model);
    auto hook =
        a.register_load_state_pre_hook([](std::vector<NamedTensors>& weights, const StateReader&) {
          // In the part of one rank only.
          std::map<std::string, at::Tensor> known(weights[0].begin(), weights[0].end());
          const std::string name = known.count("again") > 0 ? "again" : "mid.weight";
          at::Tensor other = known.at(name).clone();
          other.view(-1)[0] += 1;
          weights[0].emplace_back(name == "again" ? "mid.weight" : "again", other);
        });
    EXPECT_THAT(std::string(a.load_state(state).message()), HasSubstr("the same tensor as"));
    const Weights after = WeightsOf(a, model);
    if (a.is_main_process()) ExpectEqual(after, before);
    Train(a, model, optimizer);
  });
}

// Each replica has read what its own disk returned.
TEST_F(ShardingWeights, UnshardedLoadThatFailsOnItsWay_IsNamedUntilLoadState) {
  const std::string state = folder_.Path("state");
  const Weights values = Values();
  const std::vector<std::string> paths = {File("0.safetensors", values),
                                          File("1.safetensors", values)};
  RunAccelerators(2, {}, [&](Accelerator& a) {
    TiedNet net;
    FusedSGD sgd(Parameters(net), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    ASSERT_TRUE(a.save_state(state).ok());
    const std::string& path = paths[a.process_index()];
    // The third joint request for names is the one before the weights are read.
    size_t asked = 0;
    const auto shorten = [&](const std::string& name) {
      if (a.process_index() == 1 && ++asked > 2 * values.size()) {
        std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
        asked = 0;
      }
      return name;
    };
    const absl::Status loaded = a.load_weights(path, {.rename = shorten}).status();
    EXPECT_THAT(std::string(loaded.message()), HasSubstr("rank 1: "));
    const auto throws = [](const absl::Status& status) {
      TORCH_CHECK(status.ok(), status.message());
    };
    const at::Tensor x = Random({2, 5}, 1);
    for (const std::string& error : {ErrorOf([&, &model = model] { model(x); }),
                                     ErrorOf([&, &optimizer = optimizer] { optimizer.step(); }),
                                     ErrorOf([&] { throws(a.save_state(folder_.Path("never"))); }),
                                     ErrorOf([&] { throws(a.load_weights(paths[0]).status()); })}) {
      EXPECT_THAT(error, HasSubstr("after a load_weights() that failed halfway"));
    }
    ASSERT_TRUE(a.load_state(state).ok());
    Train(a, model, optimizer);
  });
}

// The bytes that this process has read so far.
int64_t BytesRead() {
  std::ifstream file("/proc/self/io");
  std::string name;
  int64_t bytes = 0;
  file >> name >> bytes;
  EXPECT_EQ(name, "rchar:");
  return bytes;
}

TEST_F(ShardingWeights, RanksTogether_ReadTheModelOnce) {
  // A checkpoint's file of one block (16 MiB) is read whole.
  constexpr int64_t kWidth = 3000;
  const Weights values = Values(kWidth);
  int64_t bytes = 0;
  for (const auto& [name, tensor] : values) bytes += static_cast<int64_t>(tensor.nbytes());
  const std::string path = File("large.safetensors", values), state = folder_.Path("state");
  RunAccelerators(1, {}, [&](Accelerator& a) {
    TiedNet net(kWidth);
    ASSERT_TRUE(load_model(net, path).ok());
    auto model = a.prepare(net);
    ASSERT_TRUE(a.save_state(state).ok());
  });
  for (const std::string& source : {path, state}) {
    for (const bool empty : {false, true}) {
      int64_t before = 0;
      RunAccelerators(3, Sharded("zero3"), [&](Accelerator& a) {
        auto model = a.prepare(empty ? MakeEmpty(kWidth) : TiedNet(kWidth));
        a.wait_for_everyone();
        if (a.is_main_process()) before = BytesRead();
        a.wait_for_everyone();
        const auto loaded = a.load_weights(source);
        ASSERT_TRUE(loaded.ok()) << loaded.status();
        a.wait_for_everyone();
        if (!a.is_main_process()) return;
        // Each reads a third, plus headers and the ends of blocks: three times that much if each
        // read everything.
        EXPECT_LT(BytesRead() - before, bytes * 3 / 2) << source;
      });
    }
  }
}

TEST_F(ShardingWeights, ModelWithoutValues_IsRefusedByNameUntilItHasThem) {
  Weights values = Values(), first;
  first["out.weight"] = values.at("out.weight");
  const std::string part = File("part.safetensors", first);
  values.erase("in.weight");
  const std::string most = File("most.safetensors", values);
  const std::string all = File("all.safetensors", Values());
  for (const int ranks : {1, 2, 3}) {
    RunAccelerators(ranks, Sharded("zero3"), [&](Accelerator& a) {
      TiedNet net = MakeEmpty();
      FusedAdamW adam(Parameters(net), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, adam);
      const auto refusals = [&, &model = model, &optimizer = optimizer] {
        std::vector<std::string> errors;
        const auto check = [](const absl::Status& status) {
          TORCH_CHECK(status.ok(), status.message());
        };
        errors.push_back(ErrorOf([&] { model(Random({2, 5}, 1)); }));
        errors.push_back(ErrorOf([&] { optimizer.step(); }));
        errors.push_back(ErrorOf([&] { check(a.save_state(folder_.Path("never"))); }));
        errors.push_back(ErrorOf([&] { check(a.save_model(model, folder_.Path("never"))); }));
        errors.push_back(ErrorOf([&] { a.get_state_dict(model); }));
        errors.push_back(ErrorOf([&] { a.summon_full_params(model, [] {}); }));
        errors.push_back(ErrorOf([&] { Ema ema(a, model); }));
        return errors;
      };
      EXPECT_THAT(refusals(), Each(AllOf(HasSubstr("parameter 'again' of a sharded model has no "
                                                   "values, nor have 7 more"),
                                         HasSubstr("accelerator.load_weights()"))));
      // Tensors that do not fit are not loaded.
      EXPECT_FALSE(a.load_weights(most).ok());
      EXPECT_THAT(refusals(), Each(HasSubstr("'again'")));
      ASSERT_TRUE(a.load_weights(part, {.strict = false}).ok());
      EXPECT_THAT(refusals(),
                  Each(HasSubstr("'again' of a sharded model has no values, nor have 6")));
      const auto loaded = a.load_weights(most, {.strict = false});
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_THAT(loaded->models[0].missing, ElementsAre("in.weight"));
      EXPECT_THAT(refusals(),
                  Each(HasSubstr("parameter 'in.weight' of a sharded model has no values: ")));
      const std::string state = folder_.Path("state" + std::to_string(ranks));
      ASSERT_TRUE(a.load_weights(all).ok());
      a.backward(model(Random({2, 5}, 1)).sum());
      optimizer.step();
      optimizer.zero_grad();
      ASSERT_TRUE(a.save_state(state).ok());
    });
    // Loading a whole state helps, too.
    RunAccelerators(ranks, Sharded("zero3"), [&](Accelerator& a) {
      TiedNet net = MakeEmpty();
      FusedAdamW adam(Parameters(net), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, adam);
      const absl::Status loaded = a.load_state(folder_.Path("state" + std::to_string(ranks)));
      ASSERT_TRUE(loaded.ok()) << loaded;
      EXPECT_TRUE(model(Random({2, 5}, 1)).isfinite().all().item<bool>());
    });
  }
}

TEST_F(ShardingWeights, ValuesOfRankZero_AreThoseOfAll) {
  const std::string path = File("all.safetensors", Values());
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    TiedNet net = a.is_main_process() ? TiedNet() : MakeEmpty();
    if (a.is_main_process()) {
      ASSERT_TRUE(load_model(net, path).ok());
    }
    auto model = a.prepare(net);
    const Weights got = WeightsOf(a, model);
    if (a.is_main_process()) ExpectEqual(got, Values());
  });
}

TEST_F(ShardingWeights, WhatNothingLoadsAfterwards_IsRefusedByPrepare) {
  const auto empty = [](Accelerator& a) { auto model = a.prepare(MakeEmpty()); };
  for (const int ranks : {1, 2}) {
    EXPECT_THAT(ErrorsOf(ranks, {}, empty),
                Each(AllOf(HasSubstr("is on the meta device and has no values"),
                           HasSubstr("options.sharding"))));
    EXPECT_THAT(ErrorsOf(ranks, Sharded("zero3"),
                         [](Accelerator& a) {
                           auto model = a.prepare(init_empty_weights([] { return TiedNet(); },
                                                                     {.include_buffers = true}));
                         }),
                Each(HasSubstr("buffer 'scale' is on the meta device and has no values")));
  }
}

TEST_F(ShardingWeights, FilesBesideTheModel_AreNoWeightsAlone) {
  const std::string path = File("all.safetensors", Values()), state = folder_.Path("state");
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    TiedNet net;
    auto model = a.prepare(net);
    ASSERT_TRUE(a.save_state(state).ok());
    a.wait_for_everyone();
    if (a.is_main_process()) {
      ASSERT_TRUE(RemoveTree(state + "/manifest.json").ok());
    }
    a.wait_for_everyone();
    EXPECT_FALSE(a.load_weights(state).ok());
    auto second = a.prepare(torch::nn::Linear(2, 2));
    EXPECT_THAT(std::string(a.load_weights(path).status().message()),
                HasSubstr("holds the weights of one model, and 2 are prepared"));
  });
}

// Some files hold all experts of a layer in one tensor.
TEST_F(ShardingWeights, SeveralMatricesInOneTensor_AreTakenApart) {
  const at::Tensor both = Random({2, 9, 9}, 5);
  const std::string path = folder_.Path("fused.safetensors");
  const Weights fused = {{"both", both}, {"0.bias", Random({9}, 6)}, {"1.bias", Random({9}, 7)}};
  ASSERT_TRUE(SaveTensors(path, fused).ok());
  const LoadWeightsOptions options = {.parts = [](const std::string& name) {
    return name == "both" ? std::vector<std::string>{"0.weight", "1.weight"}
                          : std::vector<std::string>();
  }};
  std::vector<Case> cases(std::begin(kCases), std::end(kCases));
  cases.push_back({"no_shard", 2});
  for (const Case& test : cases) {
    SCOPED_TRACE(test.strategy);
    RunAccelerators(test.ranks, Sharded(test.strategy), [&](Accelerator& a) {
      torch::nn::Sequential net(torch::nn::Linear(9, 9), torch::nn::Linear(9, 9));
      auto model = a.prepare(net);
      EXPECT_FALSE(a.load_weights(path).ok());
      const auto loaded = a.load_weights(path, options);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      const Weights weights = a.get_state_dict(model);
      if (weights.empty()) return;
      EXPECT_TRUE(at::equal(weights.at("0.weight"), both[0]));
      EXPECT_TRUE(at::equal(weights.at("1.weight"), both[1]));
    });
  }
  torch::nn::Sequential net(torch::nn::Linear(9, 9), torch::nn::Linear(9, 9));
  ASSERT_TRUE(load_model(*net, path, options).ok());
  EXPECT_TRUE(at::equal(net->parameters()[2], both[1]));
}

TEST(StateDict, WithAFilter_HasTheWantedNamesAlone) {
  std::vector<Case> cases(std::begin(kCases), std::end(kCases));
  cases.push_back({"no_shard", 2});
  for (const Case& test : cases) {
    SCOPED_TRACE(test.strategy);
    RunAccelerators(test.ranks, Sharded(test.strategy), [&](Accelerator& a) {
      auto model = a.prepare(TiedNet());
      const Weights all = a.get_state_dict(model);
      // "again" is the first name of mid.weight.
      const std::set<std::string> filters[] = {
          {"mid.weight", "scale"}, {"again", "turned", "out.bias"}, {}};
      for (const std::set<std::string>& names : filters) {
        const Weights some =
            a.get_state_dict(model, [&](const std::string& name) { return names.contains(name); });
        const bool has_them = a.is_main_process() || std::string(test.strategy) == "no_shard";
        EXPECT_EQ(some.size(), has_them ? names.size() : 0);
        for (const auto& [name, value] : some) {
          EXPECT_TRUE(names.contains(name)) << name;
          EXPECT_TRUE(at::equal(value, all.at(name))) << name;
        }
      }
      EXPECT_ANY_THROW(a.get_state_dict(model, nullptr));
    });
  }
}

}  // namespace
}  // namespace muster
