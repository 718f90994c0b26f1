#include "client/checkpoints/plan_command.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class PlanCommandTest : public ::testing::Test {
 protected:
  // A Llama of four blocks of 2048 bytes, embedding and head of 1024.
  void SetUp() override {
    std::vector<SafetensorsEntry> tensors;
    std::vector<std::string> bytes;
    const auto add = [&](const std::string& name, std::vector<uint64_t> shape, size_t size) {
      tensors.push_back({.name = name, .type = SafetensorsType::kBF16, .shape = std::move(shape)});
      bytes.push_back(std::string(size, '\0'));
    };
    add("lm_head.weight", {16, 32}, 1024);
    add("model.embed_tokens.weight", {16, 32}, 1024);
    for (int i = 0; i < 4; ++i) {
      add(absl::StrCat("model.layers.", i, ".down.weight"), {32, 16}, 1024);
      add(absl::StrCat("model.layers.", i, ".up.weight"), {16, 32}, 1024);
    }
    add("model.norm.weight", {32}, 64);
    ASSERT_TRUE(WriteFileAtomically(folder_.Path("model.safetensors"),
                                    *EncodeSafetensors(tensors, bytes, std::nullopt))
                    .ok());
    ASSERT_TRUE(
        WriteFileAtomically(folder_.Path("config.json"), R"({"model_type": "llama"})").ok());
  }

  int Run(std::vector<std::string> args) {
    out_.str("");
    err_.str("");
    args.insert(args.begin(), folder_.path());
    return RunPlanCommand(args, {{}, out_, err_});
  }

  const TestFolder folder_;
  std::ostringstream out_, err_;
};

TEST_F(PlanCommandTest, Json_PlacesPartsInTheirOrder) {
  ASSERT_EQ(Run({"--max_memory", "0=6KB,cpu=7KB", "--device_map", "sequential", "-o", "json"}),
            kExitOk)
      << err_.str();
  const Json json = Json::parse(out_.str());
  EXPECT_EQ(json["bytes"], 4 * 2048 + 2 * 1024 + 64);
  EXPECT_EQ(json["no_split"], Json({"LlamaDecoderLayer"}));
  EXPECT_EQ(json["device_map"]["model.embed_tokens"], "0");
  EXPECT_EQ(json["device_map"]["model.layers.0"], "0");
  EXPECT_EQ(json["device_map"]["model.layers.2"], "cpu");
  EXPECT_EQ(json["main_device"], "0");
  EXPECT_EQ(json["devices"][0]["bytes"], 3072);
  int64_t sum = 0;
  for (const Json& device : json["devices"]) sum += device["bytes"].get<int64_t>();
  EXPECT_EQ(sum, json["bytes"]);
}

TEST_F(PlanCommandTest, Text_NamesDevicesAndWhatIsOffloaded) {
  ASSERT_EQ(Run({"--max_memory", "cpu=6KB"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("kept whole: LlamaDecoderLayer"),
                                HasSubstr("model.embed_tokens, model.layers.0"), HasSubstr("disk"),
                                HasSubstr("come to device cpu")));
  ASSERT_EQ(Run({"--max_memory", "cpu=1GB"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("the whole model"), HasSubstr("All weights stay")));
  ASSERT_EQ(Run({}), kExitOk) << err_.str();
}

TEST_F(PlanCommandTest, Dtype_ChangesSizes) {
  ASSERT_EQ(Run({"--max_memory", "cpu=1GB", "--dtype", "float16", "-o", "json"}), kExitOk);
  EXPECT_EQ(Json::parse(out_.str())["bytes"], 4 * 2048 + 2 * 1024 + 64);
  ASSERT_EQ(Run({"--max_memory", "cpu=1GB", "--dtype", "float32", "-o", "json"}), kExitOk);
  EXPECT_EQ(Json::parse(out_.str())["bytes"], 2 * (4 * 2048 + 2 * 1024 + 64));
  EXPECT_EQ(Run({"--dtype", "int3"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("--dtype int3"));
}

TEST_F(PlanCommandTest, WhatCannotBe_IsNamed) {
  EXPECT_NE(Run({"--max_memory", "0=1.5KB,cpu=1.5KB"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("LlamaDecoderLayer model.layers.0 is not to be divided"));
  EXPECT_NE(Run({"--max_memory", "cpu=0.5KB", "--no_split", "none"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("more than any device has"));
  EXPECT_EQ(Run({"--max_memory", "cuda:0=1GB"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("\"cuda:0\" is not recognized"));
  EXPECT_EQ(Run({"--max_memory", "cpu=lots"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("--max_memory: device cpu"));
  EXPECT_NE(Run({"--no_split", "GPTBlock", "--max_memory", "cpu=1GB"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("the class GPTBlock"));
  EXPECT_EQ(Run({"--device_map", "best"}), kExitUsage);
  std::ostringstream none;
  EXPECT_EQ(RunPlanCommand({folder_.Path("nothing")}, {{}, out_, err_}),
            RunPlanCommand({folder_.Path("nothing")}, {{}, none, none}));
  EXPECT_THAT(none.str(), HasSubstr("nothing"));
}

}  // namespace
}  // namespace muster::client
