#include "worker/checkpoint/shard_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "base/units.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

TEST(PlanShards, GoldenCases_Match) {
  int cases = 0;
  for (const Json& item : testing_support::GoldenCases("shard_checkpoint")) {
    ++cases;
    const Json& in = item["in"];
    ShardPlanOptions options;
    const Json& size = in["max_shard_size"];
    if (size.is_string()) {
      const auto bytes = ParseShardSize(size.get<std::string>());
      ASSERT_EQ(bytes.ok(), !item.contains("error")) << item;
      if (!bytes.ok()) continue;
      options.max_shard_bytes = *bytes;
    } else {
      options.max_shard_bytes = size;
    }
    const bool safe = in["safe_serialization"];
    options.keep_first_name_only = safe && in["mode"] == "save_model";
    if (!safe) {
      options.stem = "pytorch_model";
      options.extension = ".bin";
    }
    std::vector<TensorToShard> tensors;
    for (const Json& tensor : in["tensors"]) {
      tensors.push_back(
          {.name = tensor["name"],
           .bytes = *SafetensorsBytes(*ParseSafetensorsType(tensor["dtype"].get<std::string>()),
                                      tensor["shape"]),
           .storage = tensor["storage"].is_null() ? "" : tensor["storage"].dump()});
    }
    const auto plan = PlanShards(tensors, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Json& out = item["out"];
    ASSERT_EQ(plan->files.size(), out["files"].size()) << item;
    for (size_t i = 0; i < plan->files.size(); ++i) {
      EXPECT_EQ(plan->files[i].name, out["files"][i][0].get<std::string>()) << item["id"];
      EXPECT_EQ(std::set<std::string>(plan->files[i].tensors.begin(), plan->files[i].tensors.end()),
                out["files"][i][1].get<std::set<std::string>>())
          << item["id"];
    }
    EXPECT_EQ(plan->total_bytes, out["total_size"].get<uint64_t>()) << item["id"];
    EXPECT_EQ(plan->index_name.has_value() ? Json(*plan->index_name) : Json(), out["index_file"]);
    const Json index = Json::parse(EncodeShardIndex(*plan));
    EXPECT_EQ(index["weight_map"], out["weight_map"]) << item["id"];
  }
  EXPECT_GE(cases, 30);
}

TEST(PlanShards, Quirks_AreDecidedOnPurpose) {
  // Empty tensors share nothing, and a model without tensors is one file.
  const auto plan = PlanShards({{"a", 0, ""}, {"b", 0, ""}, {"c", 12, ""}}, {});
  EXPECT_THAT(plan->files[0].tensors, ElementsAre("a", "b", "c"));
  const auto empty = PlanShards({}, {});
  ASSERT_EQ(empty->files.size(), 1u);
  EXPECT_EQ(empty->files[0].name, "model.safetensors");
}

TEST(PlanShards, BadInput_IsRefused) {
  EXPECT_FALSE(PlanShards({}, {.max_shard_bytes = -1}).ok());
  EXPECT_FALSE(PlanShards({{"a", 1, ""}, {"a", 1, ""}}, {}).ok());
}

TEST(ShardIndex, RoundTrip_AndForeignForms) {
  const auto plan = PlanShards({{"b", 10, ""}, {"a", 10, ""}}, {.max_shard_bytes = 10});
  const auto files = ParseShardIndex(EncodeShardIndex(*plan), "i");
  ASSERT_TRUE(files.ok());
  EXPECT_EQ((*files)[0],
            std::make_pair(std::string("a"), std::string("model-00002-of-00002.safetensors")));
  EXPECT_TRUE(ParseShardIndex("{\"w\": \"f.safetensors\"}", "i").ok());
  EXPECT_THAT(std::string(ParseShardIndex("{\"w\": \"../f.bin\"}", "i").status().message()),
              HasSubstr("\"../f.bin\", not a name in this folder"));
  EXPECT_FALSE(ParseShardIndex("{\"w\": 1}", "i").ok());
  // The reader of the weights reports a file of an unknown kind.
  EXPECT_TRUE(ParseShardIndex(R"({"w": "f.safetensors", "v": "f.ckpt"})", "i").ok());
  EXPECT_FALSE(ParseShardIndex("[]", "i").ok());
}

TEST(ParseShardIndex, JsonOfAnotherKind_IsCalledWhatItIs) {
  for (const char* text : {R"({"model_type": "gpt2", "n_layer": 2})", R"({"bos_token": "<s>"})",
                           R"({"base_model": "org/name"})", "{}", "[]"}) {
    EXPECT_EQ(ParseShardIndex(text, "gpt2/config.json").status().message(),
              "gpt2/config.json: is the configuration of a model, no index of weights, which has "
              "\"weight_map\": name the folder with the weights, its *.index.json, or a file of "
              "weights");
    EXPECT_THAT(std::string(ParseShardIndex(text, "other.json").status().message()),
                HasSubstr("other.json: is no index of weights"));
  }
}

TEST(IsShardFileName, OnlyFilesOfTheModel) {
  for (const char* name :
       {"model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}) {
    EXPECT_TRUE(IsShardFileName(name, "model", ".safetensors")) << name;
  }
  for (const char* name :
       {"model_1.safetensors", "model-1-of-2.safetensors", "my-model.safetensors",
        "model-00001-of-00002.bin", "model-00001-of-00002.safetensors.bak"}) {
    EXPECT_FALSE(IsShardFileName(name, "model", ".safetensors")) << name;
  }
}

}  // namespace
}  // namespace muster
