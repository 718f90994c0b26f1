// The weights of every recorded model of transformers: load_model takes them, saving them again
// changes nothing, and Python's libraries read what was saved. MUSTER_TEST_TORCH_PYTHON names a
// Python that has these; without it python3 is tried.
#include "muster/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/support/command.h"
#include "tests/support/python.h"
#include "tests/testdata/golden.h"
#include "torch/nn/module.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {
namespace {

using ::testing::IsEmpty;
using testing_support::GoldenCases;
using testing_support::GoldenPath;
using testing_support::RunCommand;

// Registers a module of modules, made for the dotted names.
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

// Returns the model of `recorded` with its own weights.
std::unique_ptr<torch::nn::Module> LoadedModel(const nlohmann::json& recorded) {
  const std::string dir = recorded["in"]["dir"];
  auto model = std::make_unique<torch::nn::Module>();
  const auto files = WeightFiles::Open(GoldenPath(dir));
  EXPECT_TRUE(files.ok()) << files.status();
  for (const std::string name : recorded["out"]["tensors"]) {
    const WeightFiles::Entry* const entry = files->Find(name);
    EXPECT_NE(entry, nullptr) << name;
    const std::vector<int64_t> shape(entry->tensor.shape.begin(), entry->tensor.shape.end());
    Register(*model, name, at::zeros(shape, *ToScalarType(entry->tensor.type)));
  }
  const auto loaded = load_model(*model, GoldenPath(dir));
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  if (!loaded.ok()) return model;
  EXPECT_EQ(loaded->loaded.size(), recorded["out"]["tensors"].size());
  EXPECT_THAT(loaded->unexpected, IsEmpty());
  return model;
}

TEST(RecordedWeights, EveryModel_LoadsAndSavesAgainIdentically) {
  const std::string folder = TestPath("weights");
  for (const nlohmann::json& recorded : GoldenCases("hf_models")) {
    const std::string dir = recorded["in"]["dir"];
    SCOPED_TRACE(dir);
    const auto files = WeightFiles::Open(GoldenPath(dir));
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(files->Files().size(), recorded["out"]["num_shards"]);
    const std::unique_ptr<torch::nn::Module> model = LoadedModel(recorded);
    int64_t total = 0;
    for (const auto& [name, tensor] : TensorsOf(*model)) {
      total += static_cast<int64_t>(tensor.nbytes());
    }
    EXPECT_EQ(total, recorded["out"]["total_size"]);

    for (const int64_t limit : {int64_t{1} << 40, total / 3}) {
      const std::string to = JoinPath(folder, dir);
      ASSERT_TRUE(SaveModelFiles(to, TensorsOf(*model), limit).ok());
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

// Prints for pairs of folders whether the libraries find the same tensors in both, and the same
// model.
constexpr char kCompare[] = R"(
import glob, sys, torch, transformers
from safetensors.torch import load_file


def tensors(folder):
    files = glob.glob(folder + "/model*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def model(folder, architecture):
    model, info = getattr(transformers, architecture).from_pretrained(
        folder, output_loading_info=True, dtype="auto", local_files_only=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], info
    return model.state_dict()


def same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


for architecture, recorded, saved in zip(*[iter(sys.argv[1:])] * 3):
    same(tensors(recorded), tensors(saved))
    same(model(recorded, architecture), model(saved, architecture))
print("all the same")
)";

TEST(RecordedWeights, PythonsLibraries_ReadWhatWasSaved) {
  const std::string python = testing_support::PythonWith("torch, safetensors, transformers");
  if (python.empty()) return;
  const std::string folder = testing_support::MakeTestDir("read_by_python");
  ASSERT_TRUE(WriteFileAtomically(JoinPath(folder, "compare.py"), kCompare).ok());
  std::string command =
      absl::StrCat("HF_HUB_OFFLINE=1 HF_HOME=", folder, " ", python, " -B ", folder, "/compare.py");
  for (const nlohmann::json& recorded : GoldenCases("hf_models")) {
    const std::string dir = recorded["in"]["dir"];
    const std::unique_ptr<torch::nn::Module> model = LoadedModel(recorded);
    for (const int64_t limit : {int64_t{1} << 40, int64_t{100'000}}) {
      const std::string to = JoinPath(folder, absl::StrCat(dir, "-", limit));
      ASSERT_TRUE(MakeDirectories(to).ok());
      ASSERT_TRUE(SaveModelFiles(to, TensorsOf(*model), limit).ok());
      const auto config = ReadFile(JoinPath(GoldenPath(dir), "config.json"));
      ASSERT_TRUE(config.ok()) << config.status();
      ASSERT_TRUE(WriteFileAtomically(JoinPath(to, "config.json"), *config).ok());
      absl::StrAppend(&command, " ", recorded["in"]["architecture"].get<std::string>(), " ",
                      GoldenPath(dir), " ", to);
    }
  }
  const testing_support::CommandResult result = RunCommand(command + " 2>&1");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(result.last_line(), "all the same") << result.output;
}

}  // namespace
}  // namespace muster
