#include "muster/bigmodel.h"

#include <map>
#include <optional>
#include <string>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muster/accelerator.h"
#include "muster/test_ranks.h"
#include "muster/weights.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/checkpoint/model_files.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

NamedTensors ParametersOf(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

// The functions under Accelerate's names, used together. The file has no buffers.
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

// With a type, tensors got memory of their own; without one, the contents of the ring were
// overwritten or the operator refused.
TEST(BigModel, LoadModelIntoAnOffloadedModel_IsRefusedAndChangesNothing) {
  const torch::NoGradGuard no_grad;
  TextNet other(40, 64, 3), net(40, 64, 3);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), ParametersOf(*other)).ok());
  const at::Tensor ids = at::arange(12).view({1, 12});
  const at::Tensor expected = net->forward(ids);
  const auto offloaded = cpu_offload(net, at::kCPU);
  ASSERT_TRUE(offloaded.ok()) << offloaded.status();
  // First none of it is in the ring, then all.
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

// Not as one of another sharded model, which it is not.
TEST(BigModel, OffloadedModel_IsNotPrepared) {
  for (const int ranks : {1, 2}) {
    for (const bool evaluation : {false, true}) {
      const auto errors = ErrorsOf(ranks, {}, [&](Accelerator& a) {
        TextNet net(40, 64, 2);
        const auto offloaded = cpu_offload(net, at::kCPU);
        ASSERT_TRUE(offloaded.ok()) << offloaded.status();
        (void)a.prepare_model(net, evaluation);
      });
      EXPECT_THAT(errors, Each(AllOf(HasSubstr("is offloaded (by disk_offload()"),
                                     HasSubstr("do not prepare such a model"))))
          << ranks << evaluation;
    }
  }
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

// The type in which it is loaded counts, not the smaller type that it has before.
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

// As in Accelerate, the special type wins over `dtype`, even if it is wider, and over the tensor's
// own, even if that is an integer; without `dtype` the others keep their own.
TEST(BigModel, SpecialDtypes_CountInsteadOfDtypeAndOfTheTensorsOwn) {
  TextNet net = init_empty_weights([] { return TextNet(40, 64, 1); });
  net->register_buffer("steps", at::zeros({8}, at::kLong));
  const std::map<std::string, at::ScalarType> special = {
      {"head", at::kFloat}, {"layers.0.up.bias", at::kDouble}, {"steps", at::kChar}};
  const auto bytes = [&](const std::optional<at::ScalarType>& dtype, const std::string& name) {
    const auto sizes = compute_module_sizes(*net, dtype, special);
    EXPECT_TRUE(sizes.ok()) << sizes.status();
    return sizes.ok() ? sizes->at(name) : -1;
  };
  EXPECT_EQ(bytes(at::kHalf, "head"), 40 * 64 * 4);
  EXPECT_EQ(bytes(at::kHalf, "embed"), 40 * 64 * 2);
  EXPECT_EQ(bytes(at::kHalf, "steps"), 8);
  EXPECT_EQ(bytes(at::kHalf, "layers.0.up"), 256 * 64 * 2 + 256 * 8);
  EXPECT_EQ(bytes(std::nullopt, "embed"), 40 * 64 * 4);
  EXPECT_EQ(bytes(std::nullopt, "layers.0.up"), 256 * 64 * 4 + 256 * 8);
  // Not smaller than requested: the smaller of both types counts.
  EXPECT_EQ(bytes(at::kDouble, "embed"), 40 * 64 * 4);
}

// A head that stays in float, while the rest is in half.
TEST(BigModel, SpecialDtypes_DecidePlansAndShares) {
  TextNet net = init_empty_weights([] { return TextNet(40, 64, 2); });
  const int64_t half = compute_module_sizes(*net, at::kHalf)->at("");
  DevicePlanOptions options = {.max_memory = {{"cpu", static_cast<double>(half)}},
                               .dtype = at::kHalf};
  const auto whole = infer_auto_device_map(*net, options);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->devices, (DeviceEntries{{"", "cpu"}}));
  options.special_dtypes = {{"head", at::kFloat}};
  const auto divided = infer_auto_device_map(*net, options);
  ASSERT_TRUE(divided.ok()) << divided.status();
  EXPECT_EQ(divided->devices.back().second, "disk");
  // The share of a GPU is half of the total: of the head's new bytes, and of the margin.
  options.max_memory = {{"0", 1e9}, {"1", 1e9}};
  const auto wide = get_balanced_memory(*net, options);
  options.special_dtypes.clear();
  const auto narrow = get_balanced_memory(*net, options);
  ASSERT_TRUE(wide.ok() && narrow.ok());
  EXPECT_GE(wide->at(0).second, narrow->at(0).second + 40 * 64 * 2 / 2);
}

TEST(BigModel, SpecialDtypeOfNoTensor_IsRefusedByName) {
  TextNet net = init_empty_weights([] { return TextNet(40, 64, 1, /*tied=*/true); });
  const auto named = HasSubstr("special_dtypes names \"haed\", which is no parameter or buffer");
  const std::map<std::string, at::ScalarType> wrong = {{"haed", at::kFloat}};
  EXPECT_THAT(std::string(compute_module_sizes(*net, at::kHalf, wrong).status().message()), named);
  EXPECT_THAT(
      std::string(infer_auto_device_map(*net, {.special_dtypes = wrong}).status().message()),
      named);
  EXPECT_THAT(std::string(get_balanced_memory(*net, {.special_dtypes = wrong}).status().message()),
              named);
  // Both names of a tied tensor are valid; its first one counts.
  const auto sizes = compute_module_sizes(*net, std::nullopt, {{"embed.weight", at::kHalf}});
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_EQ(sizes->at("head"), 40 * 64 * 4);
  const auto first = compute_module_sizes(*net, std::nullopt, {{"head", at::kHalf}});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->at("head"), 40 * 64 * 2);
}

TEST(BigModel, MaxMemoryThatIsNotThere_IsNamed) {
  EXPECT_THAT(std::string(get_max_memory("88=1GB").status().message()), HasSubstr("device 88"));
  EXPECT_TRUE(get_max_memory().ok());
}

}  // namespace
}  // namespace muster
