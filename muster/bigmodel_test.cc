#include "muster/bigmodel.h"

#include <string>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muster/weights.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/checkpoint/model_files.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

NamedTensors ParametersOf(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

// The names of Accelerate, and what they do together. The file has no buffers.
TEST(BigModel, EmptyModel_IsPlannedLoadedAndRun) {
  TextNet whole(40, 64, 3);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), ParametersOf(*whole)).ok());
  auto net = init_empty_weights([] { return TextNet(40, 64, 3); });
  const auto sizes = compute_module_sizes(*net);
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_GT(sizes->at(""), 400'000);
  const auto limits = get_max_memory("cpu=300KB");
  ASSERT_TRUE(limits.ok()) << limits.status();
  const auto map = infer_auto_device_map(*net, {.max_memory = *limits, .no_split = {"Block"}});
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_TRUE(check_device_map(*net, map->devices).ok());
  EXPECT_TRUE(get_balanced_memory(*net, {.max_memory = *limits}).ok());
  const torch::NoGradGuard no_grad;
  const at::Tensor ids = at::arange(12).view({1, 12});
  const at::Tensor expected = whole->forward(ids);
  for (const DeviceMapChoice& choice : {DeviceMapChoice("auto"), DeviceMapChoice(map->devices),
                                        DeviceMapChoice(DeviceEntries{{"", "disk"}})}) {
    auto empty = init_empty_weights([] { return TextNet(40, 64, 3); });
    const auto model = load_checkpoint_and_dispatch(empty, folder.path(), choice,
                                                    {.max_memory = *limits, .no_split = {"Block"}});
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(at::equal(empty->forward(ids), expected));
    EXPECT_GT(model->stats().offloaded_bytes, 0u);
  }
  const auto offloaded = cpu_offload(whole, at::kCPU);
  ASSERT_TRUE(offloaded.ok()) << offloaded.status();
  EXPECT_TRUE(at::equal(whole->forward(ids), expected));
}

// With a type, tensors got memory of their own; without, what was in the ring was overwritten or
// the operator refused it.
TEST(BigModel, LoadModelIntoAnOffloadedModel_IsRefusedAndChangesNothing) {
  const torch::NoGradGuard no_grad;
  TextNet other(40, 64, 3), net(40, 64, 3);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), ParametersOf(*other)).ok());
  const at::Tensor ids = at::arange(12).view({1, 12});
  const at::Tensor expected = net->forward(ids);
  const auto offloaded = cpu_offload(net, at::kCPU);
  ASSERT_TRUE(offloaded.ok()) << offloaded.status();
  // None of it is in the ring, and then all.
  for (const bool is_used : {false, true}) {
    if (is_used) net->forward(ids);
    for (const std::optional<at::ScalarType> type :
         {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
      const auto loaded = load_model(net, folder.path(), {.strict = false, .dtype = type});
      EXPECT_EQ(loaded.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(loaded.status().message()),
                  HasSubstr("head is offloaded or sharded"));
    }
  }
  EXPECT_TRUE(at::equal(net->forward(ids), expected));
}

TEST(BigModel, DispatchAndDiskOffload_TakeModelsWithWeights) {
  const torch::NoGradGuard no_grad;
  const TestFolder folder;
  TextNet net(40, 64, 2);
  const at::Tensor ids = at::arange(5).view({1, 5});
  const at::Tensor expected = net->forward(ids);
  {
    DispatchOptions options;
    options.offload_folder = folder.Path("offload");
    const auto model = dispatch_model(net, {{"", "cpu"}, {"layers.1", "disk"}}, options);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(at::equal(net->forward(ids), expected));
  }
  TextNet other(40, 64, 2);
  const at::Tensor of_other = other->forward(ids);
  const auto model = disk_offload(other, folder.Path("other"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(at::equal(other->forward(ids), of_other));
}

// The type in which it is loaded counts, not the smaller one that it has before.
TEST(BigModel, BalancedMemory_IsThatOfTheTypeToLoad) {
  auto net = init_empty_weights([] { return TextNet(40, 64, 3); });
  net->to(at::kBFloat16);
  const DeviceLimits gpus = {{"0", 1e9}, {"1", 1e9}};
  const auto own = get_balanced_memory(*net, {.max_memory = gpus});
  const auto wide = get_balanced_memory(*net, {.max_memory = gpus, .dtype = at::kFloat});
  ASSERT_TRUE(own.ok()) << own.status();
  ASSERT_TRUE(wide.ok()) << wide.status();
  EXPECT_GT(wide->at(0).second, 1.9 * own->at(0).second);
}

TEST(BigModel, MaxMemoryThatIsNotThere_IsNamed) {
  EXPECT_THAT(std::string(get_max_memory("88=1GB").status().message()), HasSubstr("device 88"));
  EXPECT_TRUE(get_max_memory().ok());
}

}  // namespace
}  // namespace muster
