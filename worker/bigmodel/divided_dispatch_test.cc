// Maps with several GPUs, for modules that do not know of devices. The GPUs are fakes, which refuse
// tensors of two of them.
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/bigmodel/divided_model.h"
#include "worker/bigmodel/empty_weights.h"
#include "worker/bigmodel/fake_gpus.h"
#include "worker/bigmodel/module_description.h"
#include "worker/bigmodel/standard_modules.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/checkpoint/model_files.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kVocabulary = 50, kWidth = 64, kBlocks = 4;

at::Tensor Ids(int gpu = 0) {
  return at::arange(0, 24).remainder(kVocabulary).view({2, 12}).to(FakeGpu(gpu));
}

at::Tensor Compute(const TextNet& net, int gpu = 0) {
  const at::NoGradGuard no_grad;
  return TextNet(net)->forward(Ids(gpu));
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// A saved model, and its results on one GPU.
class DividedDispatch : public testing::Test {
 protected:
  DividedDispatch() {
    InstallFakeGpus();
    const TextNet net(kVocabulary, kWidth, kBlocks);
    EXPECT_TRUE(SaveModelFiles(folder_.path(), TensorsOf(*net), 40'000).ok());
    whole_ = Empty();
    on_one_ = Load(whole_, {{"", "0"}});
    expected_ = Compute(whole_);
    // Other kernels may add in another order.
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(expected_.cpu(), TextNet(net)->forward(Ids().cpu()), 1e-4, 1e-5));
    EXPECT_FALSE(MovesOperators(whole_->head_weight)) << "one GPU needs nothing of it";
  }

  static TextNet Empty() {
    return InitEmptyWeights([] { return TextNet(kVocabulary, kWidth, kBlocks); });
  }
  DispatchedModel Load(TextNet& net, const DeviceEntries& map, DispatchOptions options = {}) {
    LoadCheckpointOptions load;
    load.dispatch = std::move(options);
    auto loaded = LoadCheckpointAndDispatch(*net, folder_.path(), map, load);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return loaded.ok() ? *std::move(loaded) : DispatchedModel();
  }

  const TestFolder folder_;
  TextNet whole_{nullptr};
  DispatchedModel on_one_;
  at::Tensor expected_;
};

TEST_F(DividedDispatch, Placements_ComputeTheBitsOfOneGpu) {
  const std::vector<DeviceEntries> maps = {
      {{"", "1"}, {"embed", "0"}},
      {{"", "0"}, {"layers.1", "1"}, {"layers.2", "2"}, {"head", "3"}},
      // There and back again.
      {{"", "0"}, {"layers.1", "1"}, {"layers.3", "1"}},
      // Modules that are divided, down to the bias of a layer.
      {{"", "0"},
       {"layers.2.up.bias", "2"},
       {"layers.1.down.weight", "1"},
       {"layers.0.table", "3"}},
      {{"", "0"}, {"layers.1", "cpu"}, {"layers.2", "1"}, {"layers.3", "cpu"}, {"head", "disk"}},
      {{"", "disk"}, {"layers.1", "2"}, {"layers.2.norm", "1"}},
      {{"", "cpu"}, {"layers.2.up.weight", "2"}, {"layers.2.down.weight", "1"}},
  };
  for (const DeviceEntries& map : maps) {
    SCOPED_TRACE(testing::Message() << map.size() << " " << map[1].second);
    TextNet net = Empty();
    const DispatchedModel divided = Load(net, map, {.ring_bytes = 70'000});
    const int main = divided.main_device().index();
    for (int pass = 0; pass < 2; ++pass) {
      EXPECT_TRUE(at::equal(Compute(net, main).cpu(), expected_.cpu()));
    }
    const c10::InferenceMode inference;
    EXPECT_TRUE(at::equal(TextNet(net)->forward(Ids(main)).cpu(), expected_.cpu()));
  }
}

// Each GPU computes its own part, and a pass crosses each border once.
TEST_F(DividedDispatch, Blocks_ComputeWhereTheyAre) {
  TextNet net = Empty();
  const DispatchedModel divided = Load(net, {{"", "1"}, {"embed", "0"}, {"layers.0", "0"}});
  (void)Compute(net);
  const DeviceCrossings before = CrossingsSoFar();
  const int64_t first = OperatorsOnFakeGpu(0), second = OperatorsOnFakeGpu(1);
  const at::Tensor out = Compute(net);
  EXPECT_EQ(out.device(), FakeGpu(1));
  // The hidden states, once for the norm and the residual sum together.
  EXPECT_EQ(CrossingsSoFar().copies - before.copies, 1u);
  EXPECT_EQ(CrossingsSoFar().shared - before.shared, 1u);
  EXPECT_GT(OperatorsOnFakeGpu(1) - second, 2 * (OperatorsOnFakeGpu(0) - first));
}

TEST_F(DividedDispatch, Weights_AreWhereTheMapSays) {
  TextNet net = Empty();
  const int64_t first = BytesOnFakeGpu(0), second = BytesOnFakeGpu(1);
  const DispatchedModel divided = Load(net, {{"", "1"}, {"embed", "0"}});
  const int64_t embed = kVocabulary * kWidth * 4;
  EXPECT_EQ(BytesOnFakeGpu(0) - first, embed);
  int64_t rest = -embed;
  for (const auto& [name, tensor] : TensorsOf(*net)) {
    rest += static_cast<int64_t>(tensor.nbytes());
  }
  EXPECT_EQ(BytesOnFakeGpu(1) - second, rest);
  EXPECT_EQ(divided.resident(),
            (DeviceLimits{{"0", static_cast<double>(embed)}, {"1", static_cast<double>(rest)}}));
}

// Each GPU that runs offloaded parts has a ring, within its own limit.
TEST_F(DividedDispatch, Rings_AreBoundedByTheLimitsOfTheirGpus) {
  TextNet net = Empty();
  DispatchOptions options = {.readers = 1};
  options.max_memory = {{"0", 300'000}, {"1", 300'000}};
  const DispatchedModel divided =
      Load(net, {{"", "disk"}, {"embed", "0"}, {"layers.2.norm", "1"}}, options);
  EXPECT_TRUE(at::equal(Compute(net).cpu(), expected_.cpu()));
  EXPECT_LE(divided.stats().ring_bytes, 600'000u);
  EXPECT_EQ(divided.stats().overflow_bytes, 0u);
  EXPECT_EQ(net->layers->ptr(1)->as<BlockImpl>()->up->weight.device(), FakeGpu(0));
  EXPECT_EQ(net->layers->ptr(2)->as<BlockImpl>()->up->weight.device(), FakeGpu(1));
}

// Their buffers move with them.
TEST_F(DividedDispatch, OffloadedPartsWithoutRoomForARing_RunWhereThereIsRoom) {
  for (const auto& [first, third, at] :
       {std::tuple(400e3, 0.0, 0), std::tuple(20e3, 400e3, 2), std::tuple(20e3, 0.0, 1)}) {
    SCOPED_TRACE(at);
    TextNet net = Empty();
    DispatchOptions options;
    options.max_memory = {{"0", first}, {"1", 150e3}, {"2", third}};
    const DispatchedModel divided =
        Load(net, {{"", "disk"}, {"embed", "0"}, {"layers.0", "1"}, {"head", "0"}}, options);
    const BlockImpl& block = *net->layers->ptr(2)->as<BlockImpl>();
    EXPECT_EQ(block.up->weight.device(), FakeGpu(at));
    EXPECT_EQ(block.table.device(), FakeGpu(at));
    EXPECT_EQ(net->layers->ptr(0)->as<BlockImpl>()->up->weight.device(), FakeGpu(1));
    EXPECT_TRUE(at::equal(Compute(net).cpu(), expected_.cpu()));
  }
}

// The plan keeps room for offloaded parts on its first GPU, and fills the others.
TEST_F(DividedDispatch, PlansWithOffloadedParts_KeepTheLimitOfEachGpu) {
  constexpr int64_t kBlock = 135'000;
  int offloaded = 0;
  for (const int gpus : {2, 3}) {
    for (const int64_t limit : {2 * kBlock, 3 * kBlock}) {
      for (const char* const mode : {"auto", "sequential", "balanced_low_0"}) {
        for (const bool whole : {false, true}) {
          SCOPED_TRACE(testing::Message() << gpus << " GPUs of " << limit << ", " << mode
                                          << (whole ? ", whole blocks" : ""));
          TextNet net = Empty();
          DevicePlanOptions plan;
          for (int gpu = 0; gpu < gpus; ++gpu) {
            // The limit of the last one is smaller.
            const int64_t bytes = gpu == gpus - 1 ? kBlock + 20'000 : limit;
            plan.max_memory.emplace_back(std::to_string(gpu), bytes);
          }
          plan.max_memory.emplace_back("cpu", 1e9);
          if (whole) plan.no_split = {"Block"};
          const auto map = PlanDevices(*net, mode, plan);
          ASSERT_TRUE(map.ok()) << map.status();
          std::vector<int64_t> before;
          for (int gpu = 0; gpu < gpus; ++gpu) before.push_back(BytesOnFakeGpu(gpu));
          const DispatchedModel divided =
              Load(net, map->devices, {.max_memory = plan.max_memory, .readers = 1});
          for (int gpu = 0; gpu < gpus; ++gpu) {
            EXPECT_LE(static_cast<double>(BytesOnFakeGpu(gpu) - before[gpu]),
                      plan.max_memory[gpu].second)
                << "GPU " << gpu;
          }
          offloaded += divided.stats().offloaded_bytes > 0 ? 1 : 0;
          EXPECT_TRUE(
              at::equal(Compute(net, divided.main_device().index()).cpu(), expected_.cpu()));
        }
      }
    }
  }
  EXPECT_GT(offloaded, 5);
}

TEST_F(DividedDispatch, TiedHead_ComputesWhereTheEmbeddingIs) {
  TextNet tied(kVocabulary, kWidth, kBlocks, /*tied=*/true), again(nullptr);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), TensorsOf(*tied)).ok());
  const auto on_one = DispatchModel(*tied, {{"", "0"}});
  ASSERT_TRUE(on_one.ok()) << on_one.status();
  for (const char* const place : {"1", "cpu", "disk"}) {
    again = InitEmptyWeights([] { return TextNet(kVocabulary, kWidth, kBlocks, /*tied=*/true); });
    const auto divided = LoadCheckpointAndDispatch(
        *again, folder.path(), {{"", "0"}, {"layers.1", "2"}, {"layers.2", place}});
    ASSERT_TRUE(divided.ok()) << divided.status();
    const at::Tensor out = Compute(again);
    EXPECT_EQ(out.device(), FakeGpu(0));
    EXPECT_TRUE(at::equal(out, Compute(tied)));
  }
}

TEST_F(DividedDispatch, Gradients_FlowThroughFrozenWeightsOfAllPlaces) {
  const auto run = [&](const DeviceEntries& map) {
    TextNet net = Empty();
    const DispatchedModel model = Load(net, map, {.ring_bytes = 66'000});
    for (at::Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
    at::Tensor x = at::linspace(-1, 1, 3 * kWidth).view({3, kWidth}).to(FakeGpu(0));
    x.requires_grad_();
    at::Tensor y = x;
    for (const auto& layer : *net->layers) y = layer->as<BlockImpl>()->forward(y);
    at::linear(net->norm(y), net->head_weight).square().sum().backward();
    return x.grad().cpu();
  };
  const at::Tensor expected = run({{"", "0"}});
  EXPECT_TRUE(at::equal(run({{"", "1"}, {"embed", "0"}, {"layers.0", "0"}}), expected));
  EXPECT_TRUE(at::equal(run({{"", "0"}, {"layers.1", "1"}, {"layers.2", "disk"}, {"head", "2"}}),
                        expected));
}

TEST_F(DividedDispatch, WeightsInTraining_HaveTheGradientsOfOneGpu) {
  const auto gradients = [](TextNet& net) {
    net->forward(Ids()).square().mean().backward();
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_EQ(parameter.grad().device(), parameter.device());
      all.push_back(parameter.grad().cpu());
    }
    return all;
  };
  TextNet net = Empty();
  const DispatchedModel divided = Load(net, {{"", "0"}, {"layers.1", "1"}, {"head", "2"}});
  const std::vector<at::Tensor> expected = gradients(whole_), found = gradients(net);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
}

// Two modules with the same values: on one GPU, and on three, with neighboring tensors apart.
struct OneAndThree {
  std::shared_ptr<torch::nn::Module> whole, divided;
  DispatchedModel on_one, on_three;
};

OneAndThree MakeBoth(const StandardModule& test, bool training) {
  const at::NoGradGuard no_grad;
  OneAndThree both;
  both.whole = test.make();
  both.divided = test.make();
  both.whole->train(training);
  both.divided->train(training);
  DeviceEntries map = {{"", "0"}};
  int next = 0;
  const auto from = TensorsOf(*both.whole), to = TensorsOf(*both.divided);
  for (size_t i = 0; i < from.size(); ++i) {
    if (!from[i].second.defined()) continue;
    at::Tensor tensor = to[i].second;
    tensor.copy_(from[i].second);
    map.emplace_back(from[i].first, std::string(1, static_cast<char>('0' + next++ % 3)));
  }
  auto on_one = DispatchModel(*both.whole, {{"", "0"}});
  EXPECT_TRUE(on_one.ok()) << on_one.status();
  auto on_three = DispatchModel(*both.divided, map);
  EXPECT_TRUE(on_three.ok()) << on_three.status();
  if (on_one.ok()) both.on_one = *std::move(on_one);
  if (on_three.ok()) both.on_three = *std::move(on_three);
  return both;
}

TEST_F(DividedDispatch, StandardModules_ComputeTheBitsOfOneGpu) {
  const at::NoGradGuard no_grad;
  for (const StandardModule& test : StandardModuleCases()) {
    SCOPED_TRACE(test.name);
    const OneAndThree both = MakeBoth(test, /*training=*/false);
    EXPECT_TRUE(at::equal(test.run(*both.divided).cpu(), test.run(*both.whole).cpu()));
  }
}

// Includes running statistics, which operators write although their schemas do not say so.
TEST_F(DividedDispatch, StandardModulesInTraining_HaveTheResultsAndBuffersOfOneGpu) {
  for (const StandardModule& test : StandardModuleCases()) {
    SCOPED_TRACE(test.name);
    const OneAndThree both = MakeBoth(test, /*training=*/true);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor expected = test.run(*both.whole), found = test.run(*both.divided);
      EXPECT_TRUE(at::equal(found.cpu(), expected.cpu()));
    }
    const auto one = TensorsOf(*both.whole), three = TensorsOf(*both.divided);
    for (size_t i = 0; i < one.size(); ++i) {
      if (!one[i].second.defined()) continue;
      EXPECT_TRUE(at::equal(three[i].second.cpu(), one[i].second.cpu())) << one[i].first;
    }
    both.whole->eval();
    both.divided->eval();
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(test.run(*both.divided).cpu(), test.run(*both.whole).cpu()));
  }
}

TEST_F(DividedDispatch, ModelThatIsMovedToOneGpu_IsWholeThere) {
  TextNet net = Empty();
  DispatchedModel divided = Load(net, {{"", "0"}, {"layers.1", "1"}});
  net->to(FakeGpu(2));
  EXPECT_TRUE(at::equal(Compute(net, 2).cpu(), expected_.cpu()));
  divided = DispatchedModel();
  EXPECT_TRUE(at::equal(Compute(net, 2).cpu(), expected_.cpu()));
}

TEST_F(DividedDispatch, Plan_FillsSeveralGpusAndIsCarriedOut) {
  TextNet net = Empty();
  DevicePlanOptions plan;
  plan.max_memory = {{"0", 300'000}, {"1", 300'000}, {"cpu", 100'000}};
  plan.no_split = {"Block"};
  EXPECT_FALSE(PlanDevices(*net, "auto", {.max_memory = {{"7", 1e6}}}).ok());
  plan.no_split = {};
  const auto map = PlanDevices(*net, "auto", plan);
  ASSERT_TRUE(map.ok()) << map.status();
  const DispatchedModel divided = Load(net, map->devices, {.max_memory = plan.max_memory});
  EXPECT_GE(divided.resident().size(), 2u);
  EXPECT_TRUE(at::equal(Compute(net).cpu(), expected_.cpu()));
}

TEST_F(DividedDispatch, ReadersOfSeveralRings_AreAsManyAsAsked) {
  const auto threads = [] { return ListDirectory("/proc/self/task")->size(); };
  for (const auto& [asked, expected] : {std::pair(5, 5), std::pair(2, 2), std::pair(1, 2)}) {
    TextNet net = Empty();
    const size_t before = threads();
    const DispatchedModel divided =
        Load(net, {{"", "0"}, {"layers.0", "disk"}, {"layers.2", "1"}, {"layers.3", "disk"}},
             {.ring_bytes = 70'000, .readers = asked});
    EXPECT_EQ(threads() - before, static_cast<size_t>(expected));
  }
}

TEST_F(DividedDispatch, MainDeviceWithoutTheGpusOfTheMap_IsRefused) {
  TextNet net = Empty();
  const auto refused = DispatchModel(*net, {{"", "0"}}, {.main_device = at::kCPU});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(refused.status()),
              AllOf(HasSubstr("GPU 0"), HasSubstr("main device is the CPU")));
}

// The weights are copied to the GPU anyway. The folder does not change.
TEST_F(DividedDispatch, MmapOfWeightsThatRunOnAGpu_IsRefused) {
  const TestFolder offload;
  TextNet net(kVocabulary, kWidth, kBlocks);
  const auto refused = DiskOffload(*net, offload.path(), FakeGpu(1), {.mmap = true});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(refused.status()), AllOf(HasSubstr("mmap is for weights that run on the CPU"),
                                            HasSubstr("head runs on GPU 1")));
  EXPECT_THAT(*ListDirectory(offload.path()), testing::IsEmpty());
  // mmap does not concern what the map leaves on GPUs and in host memory.
  EXPECT_TRUE(DispatchModel(*net, {{"", "0"}, {"layers.1", "cpu"}}, {.mmap = true}).ok());
}

TEST_F(DividedDispatch, RingThatFindsNoMemory_LeavesTheModelAsItWas) {
  TextNet net(kVocabulary, kWidth, kBlocks);
  const DeviceEntries map = {{"", "0"}, {"layers.1", "1"}};
  const auto on_two = DispatchModel(*net, map);
  ASSERT_TRUE(on_two.ok()) << on_two.status();
  const at::Tensor expected = Compute(net);
  LimitFakeGpu(1, BytesOnFakeGpu(1) + 1'000);
  DeviceEntries more = map;
  more.insert(more.end(), {{"layers.0", "cpu"}, {"layers.2", "cpu"}});
  const auto refused = DispatchModel(*net, more);
  LimitFakeGpu(1, -1);
  EXPECT_THAT(Text(refused.status()), HasSubstr("fake GPU 1 has no room"));
  EXPECT_TRUE(at::equal(Compute(net).cpu(), expected.cpu()));
}

// A failure after the new file exists.
TEST_F(DividedDispatch, RingThatFindsNoMemory_LeavesTheFileOfAnEarlierModel) {
  const TestFolder offload;
  const std::string path = offload.Path("offload.safetensors");
  TextNet earlier(kVocabulary, kWidth, kBlocks), later(kVocabulary, kWidth, kBlocks);
  const auto first = DiskOffload(*earlier, offload.path(), FakeGpu(0));
  ASSERT_TRUE(first.ok()) << first.status();
  const at::Tensor expected = Compute(earlier);
  const std::string bytes = *ReadFile(path);
  LimitFakeGpu(1, BytesOnFakeGpu(1) + 10'000);
  const auto refused = DiskOffload(*later, offload.path(), FakeGpu(1));
  LimitFakeGpu(1, -1);
  EXPECT_THAT(Text(refused.status()), HasSubstr("fake GPU 1 has no room"));
  EXPECT_THAT(*ListDirectory(offload.path()), testing::ElementsAre("offload.safetensors"));
  EXPECT_EQ(*ReadFile(path), bytes);
  EXPECT_TRUE(at::equal(Compute(earlier), expected));
}

}  // namespace
}  // namespace muster
