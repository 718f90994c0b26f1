#include "worker/bigmodel/device_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

PlannedTensor Floats(const std::string& name, int64_t count) { return {name, "F32", {count}}; }

PlannedModule Leaf(const std::string& name, int64_t floats) {
  return {name, "Linear", {Floats("weight", floats)}, {}, {}};
}

bool Covers(const std::string& entry, const std::string& tensor) {
  return entry.empty() || entry == tensor || absl::StartsWith(tensor, entry + ".");
}

// Returns every tensor of a model by full name, with its bytes.
std::map<std::string, int64_t> Tensors(const PlannedModel& model) {
  const auto sizes = ModuleSizes(model, {});
  EXPECT_TRUE(sizes.ok()) << sizes.status();
  std::map<std::string, int64_t> tensors;
  const std::function<void(const PlannedModule&, const std::string&)> add =
      [&](const PlannedModule& module, const std::string& path) {
        for (const auto* part : {&module.parameters, &module.buffers}) {
          for (const PlannedTensor& tensor : *part) {
            const std::string name = path + tensor.name;
            const auto it = sizes->find(name);
            tensors[name] = it == sizes->end() ? 0 : it->second;
          }
        }
        for (const PlannedModule& child : module.children) add(child, path + child.name + ".");
      };
  add(model.root, "");
  return tensors;
}

TEST(InferDeviceMap, D15_BuffersOfADividedModule_AreInTheMap) {
  PlannedModel model;
  model.root.children = {
      {"block", "Block", {}, {Floats("rope", 10)}, {Leaf("up", 100), Leaf("down", 100)}},
      Leaf("head", 10)};
  const auto map = InferDeviceMap(model, {{"0", 900}, {"cpu", 10'000}}, {});
  ASSERT_TRUE(map.ok()) << map.status();
  for (const auto& [tensor, bytes] : Tensors(model)) {
    EXPECT_TRUE(std::any_of(map->devices.begin(), map->devices.end(), [&](const auto& entry) {
      return Covers(entry.first, tensor);
    })) << tensor;
  }
}

TEST(InferDeviceMap, EverythingFits_IsOneEntry) {
  PlannedModel model;
  model.root.children = {Leaf("a", 10), Leaf("b", 10)};
  const auto map = InferDeviceMap(model, {{"0", 1000}}, {});
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_THAT(map->devices, ElementsAre(Pair("", "0")));
}

// A parameter whose name begins with another name is not inside of it.
TEST(InferDeviceMap, ModuleWhoseNameBeginsAnothers_DoesNotHoldItsTensors) {
  PlannedModel model;
  model.root.children = {Leaf("lin", 20),
                         {"lin_sub", "Sub", {}, {}, {Leaf("lin", 20)}},
                         Leaf("tail", 20),
                         Leaf("tail2", 20)};
  model.tied = {{"lin.weight", "lin_sub.lin.weight"}};
  const auto map = InferDeviceMap(model, {{"0", 170}, {"cpu", 10'000}}, {});
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_THAT(map->devices, ElementsAre(Pair("lin", "0"), Pair("lin_sub", "0"), Pair("tail", "cpu"),
                                        Pair("tail2", "cpu")));
}

// As in Accelerate, `b` counts once for each of the two tensors that it shares with `a`.
TEST(InferDeviceMap, AModuleWithSeveralTiedTensors_CountsForEachOfThem) {
  PlannedModel model;
  model.root.children = {
      {"a", "A", {Floats("w1", 10), Floats("w2", 10)}, {}, {}},
      {"b", "B", {Floats("w1", 10), Floats("w2", 10), Floats("own", 20)}, {}, {}}};
  model.tied = {{"a.w1", "b.w1"}, {"a.w2", "b.w2"}};
  DeviceMapOptions options;
  options.clean_result = false;
  for (const auto& [limit, device] : {std::pair(300.0, "cpu"), std::pair(320.0, "0")}) {
    const auto map = InferDeviceMap(model, {{"0", limit}, {"cpu", 10'000}}, options);
    ASSERT_TRUE(map.ok()) << map.status();
    EXPECT_THAT(map->devices, ElementsAre(Pair("a", device), Pair("b", device)));
  }
}

TEST(ModuleSizes, TypesAndTies_CountAsDocumented) {
  PlannedModel model;
  model.root.children = {{"a", "A", {Floats("weight", 10), {"mask", "BOOL", {3}}}, {}, {}},
                         {"b", "B", {Floats("weight", 10)}, {{"steps", "I64", {}}}, {}}};
  model.tied = {{"a.weight", "b.weight"}};
  auto sizes = ModuleSizes(model, {});
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_EQ(sizes->at(""), 40 + 3 + 8);
  EXPECT_EQ(sizes->at("b"), 8);
  sizes = ModuleSizes(model, {.dtype = "F16", .special_dtypes = {}});
  EXPECT_EQ(sizes->at(""), 20 + 3 + 8);
  sizes = ModuleSizes(model, {.dtype = "F64", .special_dtypes = {{"a.weight", "I8"}}});
  EXPECT_EQ(sizes->at(""), 10 + 3 + 8);
}

TEST(BalanceMemory, DeviceNumbersWithAGap_AreBalanced) {
  PlannedModel model;
  model.root.children = {Leaf("a", 100), Leaf("b", 100), Leaf("c", 100)};
  const auto limits =
      BalanceMemory(model, {{"0", 5000}, {"2", 5000}, {"3", 5000}}, {{}, {}, /*low_zero=*/true});
  ASSERT_TRUE(limits.ok()) << limits.status();
  // A share of 600 and 500 for the largest layer.
  EXPECT_THAT(*limits, ElementsAre(Pair("0", 0), Pair("2", 1100), Pair("3", 5000)));
}

// As many modules as the experts of the largest models. Comparing each pair would take far longer
// than this test may.
TEST(BalanceMemory, TensOfThousandsOfModules_TakeSeconds) {
  PlannedModel model;
  for (int i = 0; i < 200; ++i) {
    PlannedModule layer = {absl::StrCat(i), "Layer", {}, {}, {}};
    for (int j = 0; j < 256; ++j) layer.children.push_back(Leaf(absl::StrCat(j), 4));
    model.root.children.push_back(std::move(layer));
  }
  const int64_t total = 200 * 256 * 16;
  const auto balanced = BalanceMemory(model, {{"0", 1e9}, {"1", 1e9}}, {});
  ASSERT_TRUE(balanced.ok()) << balanced.status();
  // Half of the model, and a quarter more than the mean module.
  EXPECT_THAT(*balanced, ElementsAre(Pair("0", total / 2 + 20), Pair("1", 1e9)));
}

// transformers 5 keeps the experts of a layer in one module. GPUs get the mean module in addition
// to their share if it is larger than a block.
TEST(BalanceMemory, ExpertListsThatCountWhole_LeaveTheMeanModuleAsThePeersIs) {
  PlannedModule moe = {"block_sparse_moe", "SparseExperts", {}, {}, {Leaf("gate", 10)}};
  moe.children.push_back({"experts", "ModuleList", {}, {}, {}});
  for (const char* const expert : {"0", "1"}) {
    moe.children.back().children.push_back(
        {expert, "Expert", {}, {}, {Leaf("w1", 20), Leaf("w2", 20), Leaf("w3", 20)}});
  }
  PlannedModel model;
  model.root.children = {Leaf("embed", 1000), {"block", "Block", {}, {}, {moe}}};
  EXPECT_THAT(ExpertLists(model), ElementsAre("block.block_sparse_moe.experts"));
  BalanceOptions options;
  options.no_split = {"Block"};
  const DeviceLimits limits = {{"0", 1e6}, {"1", 1e6}};
  // Half of 1130 floats, and a quarter more than the mean of embed, gate and six matrices ...
  EXPECT_THAT(*BalanceMemory(model, limits, options),
              ElementsAre(Pair("0", 2260 + 706), Pair("1", 1e6)));
  // ... or of embed, gate and experts.
  options.counted_whole = ExpertLists(model);
  EXPECT_THAT(*BalanceMemory(model, limits, options),
              ElementsAre(Pair("0", 2260 + 1882), Pair("1", 1e6)));
}

TEST(BadInput, IsRefusedByName) {
  PlannedModel model;
  model.root.children = {Leaf("a", 10)};
  const auto error = [&](const PlannedModel& of, const DeviceLimits& limits,
                         const DeviceMapOptions& options = {}) {
    const auto map = InferDeviceMap(of, limits, options);
    return map.ok() ? "no error" : std::string(map.status().message());
  };
  EXPECT_THAT(error(model, {{"cuda:0", 1}}), HasSubstr("device \"cuda:0\" is not recognized"));
  EXPECT_THAT(error(model, {{"0", 1}, {"0", 2}}), HasSubstr("device 0 has two limits"));
  EXPECT_THAT(error(model, {{"cpu", -1}}), HasSubstr("limit of device cpu is negative"));
  DeviceMapOptions options;
  options.dtype = "F31";
  EXPECT_THAT(error(model, {{"0", 1}}, options), HasSubstr("unknown dtype \"F31\""));
  PlannedModel twice = model;
  twice.root.children.push_back(Leaf("a", 10));
  EXPECT_THAT(error(twice, {}), HasSubstr("two tensors a.weight"));
  PlannedModel negative = model;
  negative.root.children[0].parameters[0].shape = {-1};
  EXPECT_THAT(error(negative, {}), HasSubstr("a.weight has a negative dimension, -1"));
  negative.root.children[0].parameters[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_THAT(error(negative, {}), HasSubstr("more than 2^53 elements"));
}

PlannedModule RandomModule(std::mt19937_64& random, const std::string& name, int depth) {
  const auto below = [&random](int n) { return static_cast<int>(random() % n); };
  PlannedModule module;
  module.name = name;
  module.class_name = absl::StrCat("C", below(4));
  for (int i = below(3); i > 0; --i) {
    module.parameters.push_back(Floats(absl::StrCat("p", i), below(60)));
  }
  for (int i = below(2); i > 0; --i) {
    module.buffers.push_back(Floats(absl::StrCat("b", i), below(20)));
  }
  if (depth > 0) {
    for (int i = 1 + below(3); i > 0; --i) {
      module.children.push_back(RandomModule(random, absl::StrCat("m", i), depth - 1));
    }
  }
  return module;
}

TEST(InferDeviceMap, AnyModel_IsCoveredOnceWithinTheLimitsAndUndividedWhereItMustBe) {
  std::mt19937_64 random(20261122);
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    PlannedModel model = {RandomModule(random, "", 3), {}};
    std::vector<std::string> parameters;
    for (const auto& [name, bytes] : Tensors(model)) {
      if (absl::StrContains(name, "p")) parameters.push_back(name);
    }
    if (parameters.size() > 4) {
      std::shuffle(parameters.begin(), parameters.end(), random);
      model.tied = {{parameters[0], parameters[1]}, {parameters[2], parameters[3]}};
    }
    const std::map<std::string, int64_t> tensors = Tensors(model);
    DeviceLimits limits;
    for (int gpu = 0; gpu < static_cast<int>(random() % 4); ++gpu) {
      limits.push_back({absl::StrCat(gpu), static_cast<double>(random() % 1500)});
    }
    if (random() % 2 == 0) limits.push_back({"cpu", static_cast<double>(random() % 3000)});
    DeviceMapOptions options;
    if (random() % 2 == 0) options.no_split = {"C1"};
    options.fallback_allocation = random() % 2 == 0;
    options.clean_result = random() % 2 == 0;
    const auto map = InferDeviceMap(model, limits, options);
    ASSERT_TRUE(map.ok()) << map.status();
    std::map<std::string, double> used;
    for (const auto& [tensor, bytes] : tensors) {
      int covered = 0;
      for (const auto& [entry, device] : map->devices) {
        if (!Covers(entry, tensor)) continue;
        ++covered;
        used[device] += static_cast<double>(bytes);
      }
      EXPECT_EQ(covered, 1) << tensor;
    }
    for (const auto& [device, limit] : limits) EXPECT_LE(used[device], limit) << device;
  }
}

TEST(InferDeviceMap, OrderOfTheTiedGroups_ChangesNothing) {
  std::mt19937_64 random(20261130);
  int with_ties = 0;
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    PlannedModel model = {RandomModule(random, "", 3), {}};
    std::vector<std::string> parameters;
    for (const auto& [name, bytes] : Tensors(model)) {
      if (absl::StrContains(name, "p")) parameters.push_back(name);
    }
    if (parameters.size() < 6) continue;
    ++with_ties;
    std::shuffle(parameters.begin(), parameters.end(), random);
    model.tied = {{parameters[0], parameters[1]},
                  {parameters[2], parameters[3]},
                  {parameters[4], parameters[5]}};
    const DeviceLimits limits = {{"0", static_cast<double>(random() % 1500)},
                                 {"cpu", static_cast<double>(random() % 3000)}};
    const auto map = InferDeviceMap(model, limits, {});
    std::reverse(model.tied.begin(), model.tied.end());
    const auto reversed = InferDeviceMap(model, limits, {});
    ASSERT_TRUE(map.ok() && reversed.ok());
    EXPECT_EQ(map->devices, reversed->devices);
  }
  EXPECT_GT(with_ties, 1000);
}

}  // namespace
}  // namespace muster
