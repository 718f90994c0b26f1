// The weights of every recorded model of transformers: load_model takes them, and saving them again
// changes nothing.
#include "muster/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "torch/nn/module.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {
namespace {

using ::testing::IsEmpty;
using testing_support::GoldenCases;
using testing_support::GoldenPath;

// A module of modules, made for the dotted names.
void Register(torch::nn::Module& root, const std::string& name, const at::Tensor& tensor) {
  const std::vector<std::string> path = absl::StrSplit(name, '.');
  torch::nn::Module* at = &root;
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    const auto children = at->named_children();
    const auto* const child = children.find(path[i]);
    at = child != nullptr
             ? child->get()
             : at->register_module(path[i], std::make_shared<torch::nn::Module>()).get();
  }
  at->register_parameter(path.back(), tensor, /*requires_grad=*/false);
}

NamedTensors TensorsOf(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

TEST(RecordedWeights, EveryModel_LoadsAndSavesAgainIdentically) {
  const std::string folder = TestPath("weights");
  for (const nlohmann::json& recorded : GoldenCases("hf_models")) {
    const std::string dir = recorded["in"]["dir"];
    SCOPED_TRACE(dir);
    const auto files = WeightFiles::Open(GoldenPath(dir));
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(files->Files().size(), recorded["out"]["num_shards"]);
    torch::nn::Module model;
    int64_t total = 0;
    for (const std::string name : recorded["out"]["tensors"]) {
      const WeightFiles::Entry* const entry = files->Find(name);
      ASSERT_NE(entry, nullptr) << name;
      const std::vector<int64_t> shape(entry->tensor.shape.begin(), entry->tensor.shape.end());
      const at::Tensor tensor = at::zeros(shape, *ToScalarType(entry->tensor.type));
      total += tensor.nbytes();
      Register(model, name, tensor);
    }
    EXPECT_EQ(total, recorded["out"]["total_size"]);
    const auto loaded = load_model(model, GoldenPath(dir));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->loaded.size(), recorded["out"]["tensors"].size());
    EXPECT_THAT(loaded->unexpected, IsEmpty());

    for (const int64_t limit : {int64_t{1} << 40, total / 3}) {
      const std::string to = JoinPath(folder, dir);
      ASSERT_TRUE(SaveModelFiles(to, TensorsOf(model), limit).ok());
      const auto saved = WeightFiles::Open(to);
      ASSERT_TRUE(saved.ok()) << saved.status();
      ASSERT_EQ(saved->entries().size(), files->entries().size());
      for (const WeightFiles::Entry& entry : files->entries()) {
        const WeightFiles::Entry* const again = saved->Find(entry.tensor.name);
        ASSERT_NE(again, nullptr) << entry.tensor.name;
        EXPECT_EQ(again->tensor.type, entry.tensor.type);
        EXPECT_EQ(again->tensor.shape, entry.tensor.shape);
        std::string first(entry.tensor.extent_bytes, '\0'), second = first;
        ASSERT_EQ(again->tensor.extent_bytes, first.size());
        ASSERT_TRUE(files->Read(entry, first.data()).ok());
        ASSERT_TRUE(saved->Read(*again, second.data()).ok());
        EXPECT_TRUE(first == second) << entry.tensor.name;
      }
    }
  }
  EXPECT_TRUE(RemoveTree(folder).ok());
}

}  // namespace
}  // namespace muster
