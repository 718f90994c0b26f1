#include "client/checkpoints/plan_command.h"

#include <unistd.h>

#include <cstdio>
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

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class PlanCommandTest : public ::testing::Test {
 protected:
  // An embedding of 800 bytes, four layers of 400, and a norm of 8, in fp32.
  void SetUp() override {
    std::vector<SafetensorsEntry> tensors;
    std::vector<std::string> bytes;
    const auto add = [&](const std::string& name, std::vector<uint64_t> shape, size_t elements) {
      tensors.push_back({.name = name, .type = SafetensorsType::kF32, .shape = std::move(shape)});
      bytes.push_back(std::string(4 * elements, '\0'));
    };
    add("model.embed_tokens.weight", {20, 10}, 200);
    for (int i = 0; i < 4; ++i) {
      add(absl::StrCat("model.layers.", i, ".mlp.up_proj.weight"), {5, 10}, 50);
      add(absl::StrCat("model.layers.", i, ".mlp.down_proj.weight"), {10, 5}, 50);
    }
    add("model.norm.weight", {2}, 2);
    ASSERT_TRUE(WriteFileAtomically(folder_.Path("model.safetensors"),
                                    *EncodeSafetensors(tensors, bytes, std::nullopt))
                    .ok());
    WriteConfig(R"({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true})");
  }

  void WriteConfig(const std::string& text) {
    ASSERT_TRUE(WriteFileAtomically(folder_.Path("config.json"), text).ok());
  }

  int Run(std::vector<std::string> args) {
    out_.str("");
    err_.str("");
    return RunPlanCommand(args, {{}, out_, err_});
  }

  Json JsonOf(std::vector<std::string> args) {
    args.insert(args.begin(), folder_.path());
    args.insert(args.end(), {"-o", "json"});
    EXPECT_EQ(Run(args), kExitOk) << err_.str();
    return Json::parse(out_.str());
  }

  const TestFolder folder_;
  std::ostringstream out_, err_;
};

TEST_F(PlanCommandTest, Json_SaysWhereEachPartGoes) {
  // The CPU keeps room for one layer; the embedding, together with the head, fits beside two.
  const Json plan = JsonOf({"--max_memory", "cpu=2.1KB"});
  EXPECT_EQ(plan["bytes"], 2408);
  EXPECT_EQ(plan["largest_undivided_bytes"], 400);
  EXPECT_EQ(plan["device_map"]["model.embed_tokens"], "cpu");
  EXPECT_EQ(plan["device_map"]["lm_head"], "cpu");
  EXPECT_EQ(plan["device_map"]["model.layers.0"], "cpu");
  EXPECT_EQ(plan["device_map"]["model.layers.3"], "disk");
  EXPECT_EQ(plan["main_device"], "cpu");
  EXPECT_EQ(plan["offloaded"], plan["devices"][1]["bytes"]);
  EXPECT_EQ(plan["largest_offloaded_bytes"], 200);
  ASSERT_EQ(plan["devices"].size(), 2u);
  EXPECT_EQ(plan["devices"][0]["limit"], 2100);
  EXPECT_TRUE(plan["devices"][1]["limit"].is_null());
  EXPECT_EQ(plan["devices"][0]["bytes"].get<int>() + plan["devices"][1]["bytes"].get<int>(), 2408);
}

TEST_F(PlanCommandTest, Dtype_CountsInIt) {
  const Json plan = JsonOf({"--max_memory", "cpu=10KB", "--dtype", "bfloat16"});
  EXPECT_EQ(plan["bytes"], 1204);
  EXPECT_EQ(plan["device_map"], Json({{"", "cpu"}}));
  EXPECT_EQ(JsonOf({"--max_memory", "cpu=10KB", "--dtype", "float64"})["bytes"], 4816);
}

TEST_F(PlanCommandTest, Gpus_AreBalancedUnlessSequential) {
  const Json balanced = JsonOf({"--max_memory", "0=5KB,1=5KB"});
  EXPECT_GT(balanced["devices"][1]["bytes"], 0);
  EXPECT_EQ(balanced["absent_gpus"], Json({"0", "1"}));
  const Json sequential = JsonOf({"--max_memory", "0=5KB,1=5KB", "--device_map", "sequential"});
  EXPECT_EQ(sequential["devices"][1]["bytes"], 0);
}

// The GPU keeps room for a layer, and then has none for anything else.
TEST_F(PlanCommandTest, GpuThatHoldsNothing_IsNotWhereWeightsCome) {
  const Json on_cpu = JsonOf({"--max_memory", "0=0.5KB,cpu=10KB"});
  EXPECT_EQ(on_cpu["device_map"], Json({{"", "cpu"}}));
  EXPECT_EQ(on_cpu["main_device"], "cpu");
  EXPECT_EQ(on_cpu["offloaded"], 0);
  const Json on_second =
      JsonOf({"--max_memory", "0=0.5KB,1=2.1KB,cpu=10KB", "--device_map", "sequential"});
  EXPECT_EQ(on_second["devices"][0]["bytes"], 0);
  EXPECT_EQ(on_second["main_device"], "1");
  EXPECT_GT(on_second["offloaded"], 0);
}

TEST_F(PlanCommandTest, Text_IsATableWithRanges) {
  ASSERT_EQ(Run({folder_.path(), "--max_memory", "cpu=2.1KB"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("kept whole: layers (up to 400 B, model.layers.0)"));
  EXPECT_THAT(out_.str(), HasSubstr("model.layers."));
  EXPECT_THAT(out_.str(), HasSubstr("come to device cpu when they are used"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("no GPU")));
  ASSERT_EQ(Run({folder_.path(), "--max_memory", "0=1KB"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("This machine has no GPU 0"));
  ASSERT_EQ(Run({folder_.path(), "--max_memory", "cpu=1GB"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("the whole model"));
  EXPECT_THAT(out_.str(), HasSubstr("All weights stay on their devices"));
}

TEST_F(PlanCommandTest, BlockLargerThanEveryDevice_IsNamed) {
  EXPECT_NE(Run({folder_.path(), "--max_memory", "0=300,cpu=0.2KB"}), kExitOk);
  EXPECT_NE(Run({folder_.path(), "--max_memory", "cpu=0.3KB"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("model.layers.0"));
  EXPECT_THAT(err_.str(), HasSubstr("400 B"));
  EXPECT_EQ(Run({folder_.path(), "--max_memory", "cpu=0.3KB", "--no_split", "none"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("model.embed_tokens"));
  EXPECT_NE(Run({folder_.path(), "--max_memory", "cpu=0.3KB", "--no_split", "LlamaDecoderLayer"}),
            kExitOk);
}

TEST_F(PlanCommandTest, Generation_CountsBesideTheWeights) {
  ASSERT_EQ(unlink(folder_.Path("model.safetensors").c_str()), 0);
  WriteConfig(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 512, "vocab_size": 100,
                  "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "max_position_embeddings": 4096})");
  EXPECT_FALSE(JsonOf({"--max_memory", "cpu=1GB"}).contains("generation"));
  const auto planned = [&](std::vector<std::string> args) {
    args.insert(args.end(), {"--max_memory", "cpu=1GB"});
    return JsonOf(args)["generation"];
  };
  const Json one = planned({"--prompt_tokens", "3000", "--max_new_tokens", "96"});
  // Keys and values of 2 layers of 2 heads of 128 numbers.
  EXPECT_EQ(one["cache"], 3096 * 2 * 2 * 2 * 128 * 4);
  EXPECT_GT(one["activations"], 1500 * 2048 * 4);
  EXPECT_EQ(one["batch_size"], 1);
  const Json two =
      planned({"--prompt_tokens", "3000", "--max_new_tokens", "96", "--batch_size", "2"});
  EXPECT_EQ(two["cache"], 2 * one["cache"].get<int64_t>());
  const Json whole =
      planned({"--prompt_tokens", "3000", "--max_new_tokens", "96", "--prefill_chunk_size", "0"});
  EXPECT_GT(whole["activations"], one["activations"]);
  const Json half =
      planned({"--prompt_tokens", "3000", "--max_new_tokens", "96", "--dtype", "bfloat16"});
  EXPECT_EQ(half["cache"], one["cache"].get<int64_t>() / 2);
  // As `muster generate` does by default.
  EXPECT_EQ(planned({"--prompt_tokens", "10"})["max_new_tokens"], 256);
  EXPECT_EQ(planned({"--prompt_tokens", "4000"})["max_new_tokens"], 96);
  EXPECT_EQ(planned({"--num_beams", "3"})["prompt_tokens"], 1);
  ASSERT_TRUE(
      WriteFileAtomically(folder_.Path("generation_config.json"),
                          R"({"max_new_tokens": 1000, "num_beams": 4, "num_return_sequences": 2,
                                      "temperature": "?"})")
          .ok());
  const Json of_folder = planned({"--prompt_tokens", "10"});
  EXPECT_EQ(of_folder["max_new_tokens"], 1000);
  EXPECT_EQ(of_folder["sequences_per_prompt"], 4);
  EXPECT_EQ(planned({"--prompt_tokens", "4000"})["max_new_tokens"], 96);
  EXPECT_EQ(planned({"--num_beams", "1"})["sequences_per_prompt"], 2);
  EXPECT_EQ(planned({"--prompt_tokens", "10", "--max_new_tokens", "5"})["max_new_tokens"], 5);
  EXPECT_THAT(out_.str(), Not(HasSubstr("beams")));
  ASSERT_EQ(unlink(folder_.Path("generation_config.json").c_str()), 0);
  ASSERT_EQ(Run({folder_.path(), "--max_memory", "cpu=1GB", "--batch_size", "2"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("Generating 256 tokens after 2 prompts of 1, takes beside the "
                                    "weights: keys and values "));
}

// As in `muster generate`: a CPU has no arithmetic for float16.
TEST_F(PlanCommandTest, GenerationOfAFloat16Model_IsInFloat32UnlessItsTypeIsGiven) {
  ASSERT_EQ(unlink(folder_.Path("model.safetensors").c_str()), 0);
  const auto cache = [&](const std::string& of_config, std::vector<std::string> args) {
    WriteConfig(absl::StrCat(
        R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 100,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 512, "torch_dtype": ")",
        of_config, "\"}"));
    args.insert(args.end(), {"--max_memory", "cpu=1GB", "--prompt_tokens", "100"});
    return JsonOf(args)["generation"]["cache"].get<int64_t>();
  };
  const int64_t wide = cache("float32", {});
  EXPECT_EQ(cache("float16", {}), wide);
  EXPECT_EQ(cache("float16", {"--dtype", "float16"}), wide / 2);
  EXPECT_EQ(cache("bfloat16", {}), wide / 2);
  EXPECT_EQ(cache("bfloat16", {"--dtype", "float32"}), wide);
}

TEST_F(PlanCommandTest, Mistakes_AreNamed) {
  const auto expect = [&](std::vector<std::string> args, int code, const std::string& words) {
    EXPECT_EQ(Run(std::move(args)), code);
    EXPECT_THAT(err_.str(), HasSubstr(words));
  };
  const std::string path = folder_.path();
  expect({}, kExitUsage, "PATH");
  expect({path, "--max_memory", "cuda:0=1GB"}, kExitUsage, "cuda:0");
  expect({path, "--max_memory", "cpu=1GB,cpu=2GB"}, kExitUsage, "cpu");
  expect({path, "--max_memory", "20GB"}, kExitUsage, "20GB");
  expect({path, "--max_memory", "cpu=plenty"}, kExitUsage, "plenty");
  expect({path, "--dtype", "int3"}, kExitUsage, "int3");
  expect({path, "--device_map", "best"}, kExitUsage, "best");
  expect({path, "-o", "yaml"}, kExitUsage, "yaml");
  expect({path, "--max_memory", "cpu=1GB", "--no_split", "Blok"}, kExitUsage, "Blok");
  for (const char* const option :
       {"--prompt_tokens", "--max_new_tokens", "--batch_size", "--num_beams"}) {
    expect({path, "--max_memory", "cpu=1GB", option, "0"}, kExitUsage, option);
  }
  expect({path, "--max_memory", "cpu=1GB", "--prompt_tokens", "4000"}, kExitUsage,
         "positions of the model");
  expect({folder_.Path("none")}, kExitNotFound, "none");
  WriteConfig("[]");
  EXPECT_NE(Run({path, "--max_memory", "cpu=1GB"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("config.json"));
}

// In a folder with weights, names are read as those of the model; without, the model is known.
TEST_F(PlanCommandTest, SettingThatMusterDoesNotKnow_CanBeIgnored) {
  const char* const kSize = R"("model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 1,
      "vocab_size": 10, "n_positions": 6)";
  WriteConfig(
      absl::StrCat(R"({"architectures": ["GPT2LMHeadModel"], "own_setting": 7,)", kSize, "}"));
  const std::string path = folder_.path();
  const std::vector<std::string> ignoring = {"--max_memory", "cpu=1GB", "--ignore_settings",
                                             "own_setting"};
  ASSERT_TRUE(WriteFileAtomically(
                  folder_.Path("model.safetensors"),
                  *EncodeSafetensors(
                      {{.name = "wte.weight", .type = SafetensorsType::kF32, .shape = {10, 4}},
                       {.name = "h.0.attn.bias", .type = SafetensorsType::kF32, .shape = {6, 6}}},
                      {std::string(160, '\0'), std::string(144, '\0')}, std::nullopt))
                  .ok());
  EXPECT_EQ(JsonOf({"--max_memory", "cpu=1GB"})["bytes"], 304);
  EXPECT_EQ(JsonOf(ignoring)["bytes"], 160);
  ASSERT_EQ(std::remove(folder_.Path("model.safetensors").c_str()), 0);
  EXPECT_EQ(Run({path, "--max_memory", "cpu=1GB"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("name it with --ignore_settings"));
  EXPECT_EQ(JsonOf(ignoring)["device_map"], Json({{"", "cpu"}}));
  // A wrong name in the list is reported, even if the weights exist.
  const auto expect_refused = [&](const std::string& names, const std::string& words) {
    EXPECT_NE(Run({path, "--max_memory", "cpu=1GB", "--ignore_settings", names}), kExitOk);
    EXPECT_THAT(err_.str(), HasSubstr(words));
  };
  for (const bool has_weights : {false, true}) {
    if (has_weights) SetUp();
    WriteConfig(
        absl::StrCat(R"({"architectures": ["GPT2LMHeadModel"], "own_setting": 7,)", kSize, "}"));
    expect_refused("own_setting,n_embd",
                   "\"n_embd\", named with --ignore_settings, is a setting that Muster knows");
    expect_refused("own_setting,other",
                   "\"other\", named with --ignore_settings, is no setting of this file");
  }
}

// They are kept whole, like a layer, and may be the largest part.
TEST_F(PlanCommandTest, EmbeddingsOfBertLargerThanEveryDevice_HaveAWayOut) {
  ASSERT_EQ(std::remove(folder_.Path("model.safetensors").c_str()), 0);
  WriteConfig(R"({"architectures": ["BertForSequenceClassification"], "model_type": "bert",
      "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4,
      "vocab_size": 100, "max_position_embeddings": 90})");
  EXPECT_EQ(Run({folder_.path(), "--max_memory", "cpu=2KB"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("embeddings bert.embeddings is not to be divided"));
  EXPECT_THAT(err_.str(), HasSubstr("3.03 KiB"));
  EXPECT_THAT(err_.str(), HasSubstr("divide it (--no_split layer)"));
  EXPECT_EQ(Run({folder_.path(), "--max_memory", "cpu=2KB", "--no_split", "layer"}), kExitOk)
      << err_.str();
}

// As transformers 5 has them in memory: a program reads each expert from its part of the file.
TEST_F(PlanCommandTest, ExpertsInOneTensor_ArePlannedAsThoseThatAreApart) {
  WriteConfig(R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
      "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
      "intermediate_size": 6, "vocab_size": 10, "num_local_experts": 3, "num_experts_per_tok": 1,
      "tie_word_embeddings": false})");
  const auto write = [&](const char* block, bool fused) {
    std::vector<SafetensorsEntry> tensors;
    std::vector<std::string> bytes;
    const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
      size_t size = 4;
      for (const uint64_t each : shape) size *= each;
      tensors.push_back({.name = name, .type = SafetensorsType::kF32, .shape = std::move(shape)});
      bytes.emplace_back(size, '\0');
    };
    add("model.embed_tokens.weight", {10, 4});
    for (int i = 0; i < 2; ++i) {
      const std::string layer = absl::StrCat("model.layers.", i, ".");
      for (const char* const name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
        add(absl::StrCat(layer, "self_attn.", name, ".weight"), {4, 4});
      }
      add(absl::StrCat(layer, block, ".gate.weight"), {3, 4});
      if (fused) {
        add(absl::StrCat(layer, block, ".experts.gate_up_proj"), {3, 12, 4});
        add(absl::StrCat(layer, block, ".experts.down_proj"), {3, 4, 6});
      }
      for (int expert = 0; !fused && expert < 3; ++expert) {
        const std::string name = absl::StrCat(layer, block, ".experts.", expert, ".");
        add(name + "w1.weight", {6, 4});
        add(name + "w2.weight", {4, 6});
        add(name + "w3.weight", {6, 4});
      }
      add(layer + "input_layernorm.weight", {4});
      add(layer + "post_attention_layernorm.weight", {4});
    }
    add("model.norm.weight", {4});
    add("lm_head.weight", {10, 4});
    ASSERT_TRUE(WriteFileAtomically(folder_.Path("model.safetensors"),
                                    *EncodeSafetensors(tensors, bytes, std::nullopt))
                    .ok());
  };
  for (const char* const limits : {"0=1KB,cpu=1.5KB", "0=0.9KB,cpu=0.9KB", "cpu=1.2KB"}) {
    SCOPED_TRACE(limits);
    const std::vector<std::string> args = {"--max_memory", limits, "--no_split", "none"};
    write("block_sparse_moe", /*fused=*/false);
    const Json apart = JsonOf(args);
    write("mlp", /*fused=*/true);
    EXPECT_EQ(JsonOf(args), apart);
  }
}

TEST_F(PlanCommandTest, ExpertsInATensorThatDoesNotFit_AreNamed) {
  WriteConfig(R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
      "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
      "intermediate_size": 6, "vocab_size": 10, "num_local_experts": 3,
      "num_experts_per_tok": 1})");
  const std::vector<SafetensorsEntry> tensors = {{.name = "model.layers.0.mlp.experts.down_proj",
                                                  .type = SafetensorsType::kF32,
                                                  .shape = {2, 4, 6}}};
  ASSERT_TRUE(
      WriteFileAtomically(folder_.Path("model.safetensors"),
                          *EncodeSafetensors(tensors, {std::string(192, '\0')}, std::nullopt))
          .ok());
  EXPECT_EQ(Run({folder_.path(), "--max_memory", "cpu=1GB"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("experts.down_proj"));
}

// config.json would give the sizes of the weights, but the folder is damaged.
TEST_F(PlanCommandTest, ShardThatIsMissing_IsNamed) {
  ASSERT_TRUE(WriteFileAtomically(
                  folder_.Path("model.safetensors.index.json"),
                  R"({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}})")
                  .ok());
  const std::string index = folder_.Path("model.safetensors.index.json");
  EXPECT_EQ(Run({index, "--max_memory", "cpu=1GB"}), kExitNotFound);
  EXPECT_THAT(err_.str(), HasSubstr("model-00002.safetensors"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("No weights are there")));
}

// Names come from other people's files, and are shown on a terminal.
TEST_F(PlanCommandTest, NameWithControlCharacters_IsShownWithoutThem) {
  std::vector<SafetensorsEntry> tensors;
  std::vector<std::string> bytes;
  for (const char* const name : {"\x1b[31mred.0.w", "\x1b[31mred.1.w", "other.w"}) {
    tensors.push_back({.name = name, .type = SafetensorsType::kF32, .shape = {50}});
    bytes.push_back(std::string(200, '\0'));
  }
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("odd.safetensors"),
                                  *EncodeSafetensors(tensors, bytes, std::nullopt))
                  .ok());
  EXPECT_EQ(Run({folder_.Path("odd.safetensors"), "--max_memory", "cpu=0.5KB"}), kExitOk)
      << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("x1b[31mred"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("\x1b")));
  EXPECT_NE(Run({folder_.Path("odd.safetensors"), "--max_memory", "cpu=0.1KB"}), kExitOk);
  EXPECT_THAT(err_.str(), Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace muster::client
