// LibTorch's own modules, and uses that the engine does not expect.
#include "worker/bigmodel/standard_modules.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/bigmodel/empty_weights.h"
#include "worker/bigmodel/module_description.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

NamedTensors Saved(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& [name, tensor] : TensorsOf(module)) {
    if (tensor.defined()) tensors.emplace_back(name, tensor.detach().clone());
  }
  return tensors;
}

class StandardModules : public ::testing::Test {
 protected:
  std::string Write(const torch::nn::Module& module, const std::string& name) {
    const std::string path = folder_.Path(name + ".safetensors");
    EXPECT_TRUE(WriteSafetensors(path, Saved(module)).ok());
    return path;
  }
  const TestFolder folder_;
  const at::NoGradGuard no_grad_;
};

TEST_F(StandardModules, EmptyThenOffloaded_ComputeTheSameBits) {
  for (const StandardModule& test : StandardModuleCases()) {
    SCOPED_TRACE(test.name);
    const std::shared_ptr<torch::nn::Module> whole = test.make();
    whole->eval();
    const at::Tensor expected = test.run(*whole);
    const std::string path = Write(*whole, test.name);
    for (const std::string device : {"disk", "cpu"}) {
      SCOPED_TRACE(device);
      const auto empty = InitEmptyWeights([&] { return test.make(); });
      for (const at::Tensor& parameter : empty->parameters()) EXPECT_TRUE(parameter.is_meta());
      empty->eval();
      LoadCheckpointOptions options;
      options.dispatch.offload_buffers = device == "disk";
      options.dispatch.ring_bytes = 4096;
      const auto model = LoadCheckpointAndDispatch(*empty, path, {{"", device}}, options);
      ASSERT_TRUE(model.ok()) << model.status();
      for (int pass = 0; pass < 3; ++pass) {
        EXPECT_TRUE(at::equal(test.run(*empty), expected)) << "pass " << pass;
      }
    }
    const std::shared_ptr<torch::nn::Module> again = test.make();
    again->eval();
    ASSERT_TRUE(LoadWeights(path, TensorsOf(*again)).ok());
    const auto offloaded = CpuOffload(*again, at::kCPU);
    ASSERT_TRUE(offloaded.ok()) << offloaded.status();
    EXPECT_TRUE(at::equal(test.run(*again), expected));
    const c10::InferenceMode inference;
    EXPECT_TRUE(at::equal(test.run(*again), expected));
  }
}

class OddImpl : public torch::nn::Module {
 public:
  OddImpl()
      : nothing(register_parameter("nothing", at::empty({0, 4}))),
        scale(register_parameter("scale", at::full({}, 3.0))),
        flags(register_buffer("flags", at::ones({5}, at::kBool))),
        ids(register_buffer("ids", at::arange(3))),
        half(register_parameter("half", at::ones({3}).to(at::kBFloat16))) {
    register_parameter("absent", {}, false);
    none = register_buffer("none", {});
  }
  at::Tensor forward() {
    return at::cat({nothing.view({-1}), scale.view({1}), flags.to(at::kFloat), ids.to(at::kFloat),
                    half.to(at::kFloat)});
  }
  at::Tensor nothing, scale, flags, ids, half, none;
};
TORCH_MODULE(Odd);

TEST_F(StandardModules, EmptyScalarAndUndefinedTensors_AreOffloaded) {
  Odd odd;
  const at::Tensor expected = odd->forward();
  const std::string path = Write(*odd, "odd");
  for (const bool buffers : {false, true}) {
    Odd empty = InitEmptyWeights([] { return Odd(); }, {.include_buffers = buffers});
    LoadCheckpointOptions options;
    options.dispatch.offload_buffers = buffers;
    const auto model = LoadCheckpointAndDispatch(*empty, path, {{"", "disk"}}, options);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(at::equal(empty->forward(), expected));
    EXPECT_TRUE(at::equal(empty->forward(), expected));
  }
}

TEST_F(StandardModules, ModelThatIsDispatchedAlready_IsRefusedByName) {
  // Blocks of equal structure that are units of their own.
  TextNet net(20, 256, 3);
  const std::string path = Write(*net, "net");
  const auto first = LoadCheckpointAndDispatch(*net, path, {{"", "disk"}});
  ASSERT_TRUE(first.ok());
  const auto second = LoadCheckpointAndDispatch(*net, path, {{"", "disk"}});
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.status().message(), HasSubstr("offloaded or sharded already"));
  EXPECT_FALSE(DispatchModel(*net, {{"", "cpu"}}).ok());
  EXPECT_FALSE(CpuOffload(*net, at::kCPU).ok());
  const at::Tensor ids = at::arange(4).view({1, 4});
  EXPECT_TRUE(net->forward(ids).defined()) << "the first still works";
}

TEST_F(StandardModules, ManyThreadsAndAFailingDisk_GiveBitsOrErrors) {
  TextNet net(50, 64, 6);
  const at::Tensor ids = at::arange(8).view({1, 8});
  const at::Tensor expected = net->forward(ids);
  const std::string path = Write(*net, "threads");
  TextNet empty = InitEmptyWeights([] { return TextNet(50, 64, 6); });
  LoadCheckpointOptions options;
  options.dispatch.ring_bytes = 1 << 18;
  const auto model = LoadCheckpointAndDispatch(*empty, path, {{"", "disk"}}, options);
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<std::thread> threads;
  std::atomic<int> equal = 0, wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const at::NoGradGuard no_grad;
      for (int i = 0; i < 30; ++i) {
        ++(at::equal(empty->forward(ids), expected) ? equal : wrong);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, 120);
  EXPECT_EQ(wrong, 0);
}

TEST_F(StandardModules, StateOfADispatchedModel_IsItsValues) {
  TextNet net(20, 8, 2);
  const NamedTensors before = Saved(*net);
  const auto model = DiskOffload(*net, folder_.Path("offload"), at::kCPU);
  ASSERT_TRUE(model.ok()) << model.status();
  const NamedTensors after = Saved(*net);
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(before[i].second, after[i].second)) << before[i].first;
  }
}

// Like muster::load_model.
TEST_F(StandardModules, LoadingIntoAnOffloadedModel_IsAnErrorAndChangesNothing) {
  TextNet net(20, 256, 3);
  const std::string path = Write(*net, "net");
  const at::Tensor ids = at::arange(4).view({1, 4});
  const at::Tensor expected = net->forward(ids);
  const auto model = LoadCheckpointAndDispatch(*net, path, {{"", "disk"}});
  ASSERT_TRUE(model.ok());
  std::string why;
  const absl::Status guarded = Guard([&] {
    const auto loaded = LoadWeights(path, TensorsOf(*net));
    why = loaded.ok() ? "" : std::string(loaded.status().message());
  });
  EXPECT_THAT(why + std::string(guarded.message()), HasSubstr("offloaded"));
  EXPECT_TRUE(at::equal(net->forward(ids), expected));
}

// The order of the first pass is wrong for the second.
TEST_F(StandardModules, BranchesThatChange_ComputeTheSameBits) {
  TextNet net(20, 256, 6);
  const std::string path = Write(*net, "net");
  const auto run = [](TextNet& model, int64_t seed) {
    at::Tensor x = at::ones({2, 256});
    for (int64_t i = 0; i < 12; ++i) {
      x = model->layers->ptr(static_cast<size_t>((seed * i * i + i) % 6))
              ->as<BlockImpl>()
              ->forward(x);
    }
    return x;
  };
  TextNet empty = InitEmptyWeights([] { return TextNet(20, 256, 6); });
  for (const bool prefetch : {false, true}) {
    TextNet fresh = InitEmptyWeights([] { return TextNet(20, 256, 6); });
    LoadCheckpointOptions options;
    options.dispatch.ring_bytes = uint64_t{3} << 20;
    options.dispatch.prefetch = prefetch;
    const auto model = LoadCheckpointAndDispatch(*fresh, path, {{"", "disk"}}, options);
    ASSERT_TRUE(model.ok()) << model.status();
    for (int64_t seed = 0; seed < 7; ++seed) {
      EXPECT_TRUE(at::equal(run(fresh, seed), run(net, seed))) << seed;
    }
  }
}

TEST_F(StandardModules, RingThatEndsWhileItReadsAhead_EndsCleanly) {
  TextNet net(20, 256, 6);
  const std::string path = Write(*net, "net");
  for (int i = 0; i < 20; ++i) {
    TextNet fresh = InitEmptyWeights([] { return TextNet(20, 256, 6); });
    LoadCheckpointOptions options;
    options.dispatch.ring_bytes = uint64_t{6} << 20;
    auto model = LoadCheckpointAndDispatch(*fresh, path, {{"", "disk"}}, options);
    ASSERT_TRUE(model.ok()) << model.status();
    fresh->embed(at::arange(i % 5 + 1));
    fresh->layers->ptr(0)->as<BlockImpl>()->forward(at::ones({1, 256}));
    if (i % 2 == 0) *model = DispatchedModel();
  }
}

}  // namespace
}  // namespace muster
