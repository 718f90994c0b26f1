#include "client/checkpoints/estimate_command.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class EstimateCommandTest : public ::testing::Test {
 protected:
  // Two blocks of 8 x 8 and a head of 4 x 8, in bf16, and ids.
  void SetUp() override {
    std::vector<SafetensorsEntry> tensors;
    std::vector<std::string> bytes;
    const auto add = [&](const std::string& name, SafetensorsType type, std::vector<uint64_t> shape,
                         size_t size) {
      tensors.push_back({.name = name, .type = type, .shape = std::move(shape)});
      bytes.push_back(std::string(size, '\0'));
    };
    add("head.weight", SafetensorsType::kBF16, {4, 8}, 64);
    add("layers.0.w", SafetensorsType::kBF16, {8, 8}, 128);
    add("layers.1.w", SafetensorsType::kBF16, {8, 8}, 128);
    add("ids", SafetensorsType::kI64, {2}, 16);
    file_ = folder_.Path("model.safetensors");
    ASSERT_TRUE(WriteFileAtomically(file_, *EncodeSafetensors(tensors, bytes, std::nullopt)).ok());
  }

  int Run(std::vector<std::string> args) {
    out_.str("");
    err_.str("");
    return RunEstimateMemoryCommand(args, {{}, out_, err_});
  }

  const TestFolder folder_;
  std::string file_;
  std::ostringstream out_, err_;
};

TEST_F(EstimateCommandTest, Json_HasBytesByTypeAndByStrategy) {
  ASSERT_EQ(Run({file_, "--num_processes", "4", "--group_size", "2", "-o", "json"}), kExitOk)
      << err_.str();
  const Json json = Json::parse(out_.str());
  EXPECT_EQ(json["parameters"], 160);
  EXPECT_EQ(json["largest_part"], "layers.0");
  EXPECT_EQ(json["dtypes"][0]["total"], 4 * 160 + 16);
  EXPECT_EQ(json["dtypes"][1]["training"], 8 * 160 + 16);
  EXPECT_TRUE(json["dtypes"][3]["training"].is_null());
  ASSERT_EQ(json["sharding"].size(), 5u);
  EXPECT_EQ(json["sharding"][3]["strategy"], "zero3");
  EXPECT_EQ(json["sharding"][3]["total"], 16 * 160 / 4 + 16 + 3 * 4 * 64);
}

TEST_F(EstimateCommandTest, Text_IsTwoTables) {
  ASSERT_EQ(Run({folder_.path(), "--optimizer", "sgd"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("160 parameters; the largest part is layers.0"));
  EXPECT_THAT(out_.str(), HasSubstr("float16"));
  EXPECT_THAT(out_.str(), HasSubstr("each of 1 process:"));
  EXPECT_THAT(out_.str(), HasSubstr("no_shard"));
}

TEST_F(EstimateCommandTest, FlagOfFalse_IsOff) {
  ASSERT_EQ(Run({file_, "-o", "json"}), kExitOk) << err_.str();
  const std::string without = out_.str();
  ASSERT_EQ(Run({file_, "--optimizer_in_backward=false", "-o", "json"}), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), without);
  ASSERT_EQ(Run({file_, "--optimizer_in_backward", "-o", "json"}), kExitOk) << err_.str();
  EXPECT_NE(out_.str(), without);
}

TEST_F(EstimateCommandTest, SettingThatMusterDoesNotKnow_CanBeIgnored) {
  const std::string config =
      *ReadFile(testing_support::GoldenPath("hf_train/bert_cls_shared/config.json"));
  const TestFolder folder;
  Json with_own = Json::parse(config);
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), config).ok());
  ASSERT_EQ(Run({folder.path(), "-o", "json"}), kExitOk) << err_.str();
  const Json want = Json::parse(out_.str());
  with_own["own_setting"] = 7;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), with_own.dump()).ok());
  EXPECT_NE(Run({folder.path()}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("name it with --ignore_settings"));
  ASSERT_EQ(Run({folder.path(), "--ignore_settings", "own_setting", "-o", "json"}), kExitOk)
      << err_.str();
  EXPECT_EQ(Json::parse(out_.str()), want);
  with_own["another"] = 8;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), with_own.dump()).ok());
  ASSERT_EQ(Run({folder.path(), "--ignore_settings", " own_setting, another ", "-o", "json"}),
            kExitOk)
      << err_.str();
  EXPECT_EQ(Json::parse(out_.str()), want);
}

TEST_F(EstimateCommandTest, ShardThatIsMissing_LeavesSizesToTheConfig) {
  const std::string config = testing_support::GoldenPath("hf_train/bert_cls_shared/config.json");
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), *ReadFile(config)).ok());
  ASSERT_EQ(Run({folder.path(), "-o", "json"}), kExitOk) << err_.str();
  Json want = Json::parse(out_.str());
  EXPECT_THAT(want["note"].get<std::string>(), HasSubstr("No weights are there"));
  ASSERT_TRUE(WriteFileAtomically(folder.Path("model-1.safetensors"), *ReadFile(file_)).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("model.safetensors.index.json"),
                                  R"({"weight_map": {"head.weight": "model-1.safetensors",
                                      "layers.0.w": "model-2.safetensors"}})")
                  .ok());
  ASSERT_EQ(Run({folder.path(), "-o", "json"}), kExitOk) << err_.str();
  Json got = Json::parse(out_.str());
  EXPECT_THAT(got["note"].get<std::string>(),
              HasSubstr("model-2.safetensors, which does not exist"));
  got.erase("note");
  want.erase("note");
  EXPECT_EQ(got, want);
  ASSERT_EQ(Run({folder.path()}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("Sizes are those that config.json asks for: "));
  EXPECT_THAT(out_.str(), HasSubstr("model-2.safetensors, which does not exist"));
  // An existing file must belong to the model, and contain what the index says.
  const std::string other =
      *ReadFile(testing_support::GoldenPath("hf_train/bert_cls_shared/model.safetensors"));
  Json larger = Json::parse(*ReadFile(config));
  larger["vocab_size"] = larger["vocab_size"].get<int64_t>() + 1;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), larger.dump()).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("model-1.safetensors"), other).ok());
  EXPECT_EQ(Run({folder.path()}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("which does not hold it"));
  const std::string words = "bert.embeddings.word_embeddings.weight";
  ASSERT_TRUE(WriteFileAtomically(
                  folder.Path("model.safetensors.index.json"),
                  Json({{"weight_map",
                         {{words, "model-1.safetensors"}, {"layers.0.w", "model-2.safetensors"}}}})
                      .dump())
                  .ok());
  EXPECT_EQ(Run({folder.path()}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr(words + " is ["));
  // For a model that Muster does not have, the headers of all files are needed.
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"),
                                  R"({"architectures": ["T5ForConditionalGeneration"]})")
                  .ok());
  EXPECT_NE(Run({folder.path()}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("model-2.safetensors, which does not exist"));
}

TEST_F(EstimateCommandTest, ShapeThatIsNotThatOfTheConfig_IsNamed) {
  Json config =
      Json::parse(*ReadFile(testing_support::GoldenPath("hf_train/bert_cls_shared/config.json")));
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), config.dump()).ok());
  const std::string file =
      *ReadFile(testing_support::GoldenPath("hf_train/bert_cls_shared/model.safetensors"));
  ASSERT_TRUE(WriteFileAtomically(folder.Path("model.safetensors"), file).ok());
  ASSERT_EQ(Run({folder.path()}), kExitOk) << err_.str();
  config["vocab_size"] = config["vocab_size"].get<int64_t>() + 1;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), config.dump()).ok());
  EXPECT_EQ(Run({folder.path()}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("bert.embeddings.word_embeddings.weight is ["));
  EXPECT_THAT(err_.str(), HasSubstr("by config.json"));
}

TEST_F(EstimateCommandTest, Offload_HasAColumnOfItsOwn) {
  ASSERT_EQ(
      Run({file_, "--offload_optimizer", "disk", "--offload_parameters", "disk", "-o", "json"}),
      kExitOk)
      << err_.str();
  const Json json = Json::parse(out_.str());
  ASSERT_EQ(json["sharding"].size(), 2u);
  EXPECT_EQ(json["sharding"][0]["offloaded"], 8 * 160);
  EXPECT_EQ(json["sharding"][1]["strategy"], "zero3");
  EXPECT_EQ(json["sharding"][1]["offloaded"], 16 * 160);
  ASSERT_EQ(Run({file_, "--offload_optimizer", "disk"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("on the disk"));
  ASSERT_EQ(Run({file_, "--offload_optimizer", "cpu"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("in the CPU's memory"));
  // The place of offloaded values changes no number.
  ASSERT_EQ(
      Run({file_, "--offload_optimizer", "disk", "--offload_parameters", "cpu", "-o", "json"}),
      kExitOk)
      << err_.str();
  EXPECT_EQ(Json::parse(out_.str()), json);
  ASSERT_EQ(Run({file_, "--offload_gradients", "disk", "-o", "json"}), kExitOk) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["sharding"][1]["strategy"], "zero2");
  EXPECT_EQ(Json::parse(out_.str())["sharding"][1]["offloaded"], 4 * 160);
  ASSERT_EQ(Run({file_, "--offload_gradients", "cpu"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("in the CPU's memory"));
  ASSERT_EQ(Run({file_, "--offload_parameters", "cpu"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("in the CPU's memory"));
  ASSERT_EQ(Run({file_, "--offload_optimizer", "disk", "--offload_parameters", "cpu"}), kExitOk)
      << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("elsewhere"));
  ASSERT_EQ(Run({file_}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), Not(HasSubstr("on the disk")));
}

TEST_F(EstimateCommandTest, Mistakes_AreNamed) {
  const auto expect = [&](std::vector<std::string> args, int code, const std::string& words) {
    EXPECT_EQ(Run(std::move(args)), code);
    EXPECT_THAT(err_.str(), HasSubstr(words));
  };
  expect({}, kExitUsage, "PATH");
  expect({file_, "--dtypes", "float32,fp8"}, kExitUsage, "--dtypes fp8");
  expect({file_, "--dtypes", ""}, kExitUsage, "--dtypes has no type");
  expect({file_, "--num_processes", "0"}, kExitUsage, "--num_processes 0");
  expect({file_, "--num_processes", "4", "--group_size", "3"}, kExitUsage, "--group_size 3");
  expect({file_, "--optimizer", "lion"}, kExitUsage, "--optimizer lion");
  expect({file_, "--offload_optimizer", "nvme"}, kExitUsage, "nvme");
  expect({file_, "--offload_gradients", "nvme"}, kExitUsage, "nvme");
  expect({file_, "--offload_parameters", "nvme"}, kExitUsage, "nvme");
  expect({file_, "-o", "yaml"}, kExitUsage, "yaml");
  expect({folder_.Path("none")}, kExitNotFound, "none");
  const std::string config = folder_.Path("config");
  ASSERT_TRUE(MakeDirectories(config).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(config, "config.json"), "{}").ok());
  EXPECT_NE(Run({config}), kExitOk);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("sizes cannot be taken"), HasSubstr("\"model_type\"")));
}

// An embedding of 5 x 3 that is also the head, and 12 numbers of a norm.
TEST_F(EstimateCommandTest, TiedTensor_CountsOnce) {
  ASSERT_EQ(Run({testing_support::TestdataPath("torch_files/pytorch_model.bin"), "-o", "json"}),
            kExitOk)
      << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["parameters"], 15 + 12);
}

// A GPT-2 with its older names.
TEST_F(EstimateCommandTest, NamesThatAreOneWeightOrNone_AreRefused) {
  const TestFolder folder;
  const auto write = [&folder](const std::vector<std::string>& names) {
    std::vector<SafetensorsEntry> tensors;
    for (const std::string& name : names) {
      tensors.push_back({.name = name, .type = SafetensorsType::kF32, .shape = {2}});
    }
    const std::vector<std::string> bytes(names.size(), std::string(8, '\0'));
    ASSERT_TRUE(WriteFileAtomically(folder.Path("model.safetensors"),
                                    *EncodeSafetensors(tensors, bytes, std::nullopt))
                    .ok());
  };
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), R"({"model_type": "gpt2"})").ok());
  write({"wte.weight", "transformer.wpe.weight", "h.0.attn.bias"});
  EXPECT_EQ(Run({folder.path()}), kExitOk) << err_.str();
  write({"wte.weight", "transformer.wte.weight"});
  EXPECT_NE(Run({folder.path()}), kExitOk);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("\"wte.weight\""), HasSubstr("are one weight"),
                                HasSubstr("\"transformer.wte.weight\"")));
  write({"h.0.attn.bias"});
  EXPECT_NE(Run({folder.path()}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("holds no weights of the model"));
}

// Folders of transformers look like this before their weights are downloaded, with or without the
// index.
TEST_F(EstimateCommandTest, ConfigAlone_SaysWhatTheWeightsWouldTake) {
  for (const char* const name : {"hf_models/llama_shared", "hf_models/mixtral_shared",
                                 "hf_models/gpt2_shared", "hf_train/bert_mlm_shared"}) {
    SCOPED_TRACE(name);
    const std::string whole = testing_support::GoldenPath(name);
    const TestFolder folder;
    const auto config = ReadFile(JoinPath(whole, "config.json"));
    ASSERT_TRUE(config.ok()) << config.status();
    ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), *config).ok());
    const auto index = ReadFile(JoinPath(whole, "model.safetensors.index.json"));
    for (const bool has_index : {false, true}) {
      if (has_index && !index.ok()) continue;
      if (has_index) {
        ASSERT_TRUE(WriteFileAtomically(folder.Path("model.safetensors.index.json"), *index).ok());
      }
      ASSERT_EQ(Run({folder.path()}), kExitOk) << err_.str();
      EXPECT_THAT(out_.str(), HasSubstr("No weights are there"));
      ASSERT_EQ(Run({folder.path(), "-o", "json"}), kExitOk) << err_.str();
      Json alone = Json::parse(out_.str());
      ASSERT_EQ(Run({whole, "-o", "json"}), kExitOk) << err_.str();
      EXPECT_THAT(alone["note"].get<std::string>(), HasSubstr("No weights are there"));
      alone.erase("note");
      alone["path"] = whole;
      EXPECT_EQ(alone, Json::parse(out_.str()));
    }
  }
}

}  // namespace
}  // namespace muster::client
