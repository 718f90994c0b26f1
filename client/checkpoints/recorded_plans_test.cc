// muster estimate-memory and muster plan give the same results for folders of transformers' models,
// with weights and without, as Accelerate (tests/testdata/plans/README.md).
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "client/checkpoints/estimate_command.h"
#include "client/checkpoints/plan_command.h"
#include "gtest/gtest.h"
#include "tests/testdata/golden.h"
#include "worker/bigmodel/map_checks.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster::client {
namespace {

using Json = nlohmann::json;

template <typename Command>
Json Say(Command command, std::vector<std::string> args) {
  std::ostringstream out, err;
  args.insert(args.end(), {"-o", "json"});
  EXPECT_EQ(command(args, {{}, out, err}), kExitOk) << err.str();
  return out.str().empty() ? Json::object() : Json::parse(out.str());
}

void WriteConfig(const TestFolder& folder, const Json& test_case) {
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), test_case["config"].dump()).ok());
}

void WriteWeights(const TestFolder& folder, const Json& test_case) {
  const bool is_half = test_case["config"]["dtype"] == "bfloat16";
  const Json& shards = test_case["shards"];
  Json index = {{"weight_map", Json::object()}};
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string file = shards.size() == 1 ? std::string("model.safetensors")
                                                : absl::StrFormat("model-%05d.safetensors", i);
    std::vector<SafetensorsEntry> entries;
    std::vector<std::string> bytes;
    for (const std::string name : shards[i]) {
      entries.push_back({.name = name,
                         .type = is_half ? SafetensorsType::kBF16 : SafetensorsType::kF32,
                         .shape = test_case["tensors"][name]});
      size_t size = is_half ? 2 : 4;
      for (const uint64_t each : entries.back().shape) size *= each;
      bytes.emplace_back(size, '\0');
      index["weight_map"][name] = file;
    }
    ASSERT_TRUE(
        WriteFileAtomically(folder.Path(file), *EncodeSafetensors(entries, bytes, std::nullopt))
            .ok());
  }
  if (shards.size() == 1) return;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("model.safetensors.index.json"), index.dump()).ok());
}

// Returns the same weights with the names of older files, and with the other tensors of such files.
Json AsInOlderFiles(const Json& test_case) {
  Json older = test_case;
  older["tensors"] = Json::object();
  for (Json& shard : older["shards"]) {
    for (Json& name : shard) {
      std::string as = name;
      for (const char* const prefix : {"bert.", "transformer.", "model."}) {
        if (as.rfind(prefix, 0) == 0) as = as.substr(std::string(prefix).size());
      }
      as = absl::StrReplaceAll(
          as, {{"LayerNorm.weight", "LayerNorm.gamma"}, {"LayerNorm.bias", "LayerNorm.beta"}});
      older["tensors"][as] = test_case["tensors"][name.get<std::string>()];
      name = as;
    }
  }
  const auto add = [&older](const std::string& name, const std::vector<uint64_t>& shape) {
    older["tensors"][name] = shape;
    older["shards"][0].push_back(name);
  };
  const Json& config = test_case["config"];
  const bool tied = config["tie_word_embeddings"];
  if (config["model_type"] == "gpt2") {
    add("h.0.attn.bias", {1, 1, 8, 8});
    add("h.0.attn.masked_bias", {});
    if (tied) add("lm_head.weight", older["tensors"]["wte.weight"]);
  } else if (config["model_type"] != "bert") {
    add("layers.0.self_attn.rotary_emb.inv_freq", {2});
    if (tied) add("lm_head.weight", older["tensors"]["embed_tokens.weight"]);
  } else {
    add("embeddings.position_ids", {1, 64});
    if (config["architectures"][0] == "BertForMaskedLM") {
      add("pooler.dense.bias", {config["hidden_size"].get<uint64_t>()});
      add("cls.seq_relationship.bias", {2});
      if (tied)
        add("cls.predictions.decoder.weight",
            older["tensors"]["embeddings.word_embeddings.weight"]);
    }
  }
  return older;
}

void ExpectEstimate(const std::string& path, const Json& want) {
  const Json said = Say(RunEstimateMemoryCommand, {path});
  const int64_t total = want["total"], largest = want["largest"];
  // The conversions of estimate_command.
  for (const auto& [place, divisor] : {std::pair(0, 1), {1, 2}, {2, 4}, {3, 8}}) {
    const Json& row = said["dtypes"][place];
    EXPECT_EQ(row.at("total"), (total + divisor - 1) / divisor) << row;
    EXPECT_EQ(row.at("largest_part"), (largest + divisor - 1) / divisor) << row;
  }
  EXPECT_EQ(said["dtypes"][0]["training"], 4 * total);
  EXPECT_EQ(said["dtypes"][1]["training"], 2 * total);
  const std::vector<std::string> names = want["names"];
  EXPECT_TRUE(std::find(names.begin(), names.end(), said["largest_part"]) != names.end())
      << said["largest_part"] << " is none of " << want["names"];
}

DeviceEntries EntriesOf(const Json& map) {
  DeviceEntries entries;
  for (const auto& [name, device] : map.items()) entries.emplace_back(name, device);
  return entries;
}

void ExpectPlan(const std::string& path, const std::set<std::string>& tensors, const Json& want) {
  std::vector<std::string> args = want["args"];
  SCOPED_TRACE(want["args"].dump());
  args.insert(args.begin(), path);
  const Json said = Say(RunPlanCommand, args);
  EXPECT_EQ(said["bytes"], want["bytes"]);
  for (const Json& device : said["devices"]) {
    if (device["limit"].is_null()) continue;
    EXPECT_EQ(device["limit"], want["limits"].at(device["device"].get<std::string>())) << device;
  }
  // Entries differ: a model of transformers has modules without weights.
  const DeviceEntries got = EntriesOf(said["device_map"]), expected = EntriesOf(want["map"]);
  for (const std::string& name : tensors) {
    const std::string* const here = FindDevice(got, name);
    const std::string* const there = FindDevice(expected, name);
    ASSERT_NE(here, nullptr) << name;
    ASSERT_NE(there, nullptr) << name;
    EXPECT_EQ(*here, *there) << name;
  }
}

TEST(RecordedPlans, EveryFolder_IsPlannedAsAccelerateDoes) {
  const char* const others = std::getenv("MUSTER_PLAN_CASES");
  std::ifstream file(others != nullptr ? others
                                       : testing_support::TestdataPath("plans/cases.jsonl"));
  int count = 0;
  for (std::string line; std::getline(file, line); ++count) {
    const Json test_case = Json::parse(line);
    const TestFolder folder;
    WriteConfig(folder, test_case);
    std::set<std::string> tensors;
    for (const auto& [name, shape] : test_case["tensors"].items()) tensors.insert(name);
    if (test_case["config"]["tie_word_embeddings"] && tensors.contains("transformer.wte.weight")) {
      tensors.insert("lm_head.weight");
    }
    for (const char* const files : {"config.json alone", "weights", "older weights"}) {
      const bool has_weights = files != std::string("config.json alone");
      if (has_weights) {
        const bool older = files == std::string("older weights");
        WriteWeights(folder, older ? AsInOlderFiles(test_case) : test_case);
      }
      SCOPED_TRACE(absl::StrCat(test_case["id"].get<std::string>(), ", ", files));
      ExpectEstimate(folder.path(), test_case["estimate"]);
      for (const Json& plan : test_case["plans"]) ExpectPlan(folder.path(), tensors, plan);
    }
  }
  EXPECT_GT(count, 0);
}

}  // namespace
}  // namespace muster::client
