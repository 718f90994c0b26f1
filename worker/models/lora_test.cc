#include "worker/models/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/models/pretrained.h"

namespace muster::models {
namespace {

using ::testing::HasSubstr;

constexpr const char* kFolders[] = {"hf_models/gpt2_shared", "hf_models/llama_shared",
                                    "hf_models/bert_shared"};

TextModel Load(const std::string& folder) {
  auto model = LoadPretrained(testing_support::GoldenPath(folder));
  EXPECT_TRUE(model.ok()) << model.status();
  return *model;
}

at::Tensor Logits(TextModel& model) {
  const at::NoGradGuard no_grad;
  return model->forward({.input_ids = at::tensor({1, 2, 3, 4}, c10::kLong).view({2, 2})}).logits;
}

// Changes the adapters as training would.
void Disturb(TextModel& model) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& adapter : LoraParameters(*model)) adapter.normal_(0, 0.2);
}

std::map<std::string, at::Tensor> ReadAll(const std::string& path) {
  const auto reader = SafetensorsReader::Open(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  const auto tensors = reader->ReadAll();
  EXPECT_TRUE(tensors.ok()) << tensors.status();
  return {tensors->begin(), tensors->end()};
}

std::string ReplaceIn(const std::string& path, const std::string& name,
                      const nlohmann::json& value) {
  nlohmann::json json = nlohmann::json::parse(*ReadFile(path));
  json[name] = value;
  EXPECT_TRUE(WriteFileAtomically(path, json.dump()).ok());
  return path;
}

TEST(AddLora, NewAdapters_ChangeNothingAndAreWhatTrains) {
  for (const char* const folder : kFolders) {
    TextModel model = Load(folder);
    const at::Tensor before = Logits(model);
    AddLora(*model);
    EXPECT_TRUE(at::equal(Logits(model), before));
    EXPECT_FALSE(LoraParameters(*model).empty());
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(item.value().requires_grad(), item.key().find("lora_") != std::string::npos);
    }
  }
}

// As in PEFT: a step of 1e-5 changes no bfloat16 of a usual size.
TEST(AddLora, ModelOf16Bits_TrainsAdaptersOfFloat32) {
  for (const char* const folder : kFolders) {
    SCOPED_TRACE(folder);
    TextModel model = Load(folder);
    model->to(c10::kBFloat16);
    const at::Tensor before = Logits(model);
    AddLora(*model);
    EXPECT_TRUE(at::equal(Logits(model), before));
    const std::vector<at::Tensor> adapters = LoraParameters(*model);
    for (const at::Tensor& adapter : adapters) EXPECT_EQ(adapter.scalar_type(), c10::kFloat);
    const at::Tensor inputs = at::tensor({1, 2, 3, 4}, c10::kLong).view({2, 2});
    const at::Tensor logits = model->forward({.input_ids = inputs}).logits;
    EXPECT_EQ(logits.scalar_type(), c10::kBFloat16);
    logits.to(c10::kFloat).square().sum().backward();
    for (const at::Tensor& adapter : adapters) {
      ASSERT_TRUE(adapter.grad().defined());
      EXPECT_EQ(adapter.grad().scalar_type(), c10::kFloat);
    }
    Disturb(model);
    const TestFolder to;
    ASSERT_TRUE(SaveLora(*model, to.path(), {}, "base").ok());
    TextModel again = Load(folder);
    again->to(c10::kBFloat16);
    ASSERT_TRUE(LoadLora(*again, to.path()).ok());
    EXPECT_TRUE(at::equal(Logits(again), Logits(model)));
  }
}

TEST(SaveLora, LoadedIntoTheBaseModel_SaysTheSame) {
  for (const char* const folder : kFolders) {
    SCOPED_TRACE(folder);
    TextModel model = Load(folder);
    const LoraOptions options = {.rank = 3, .alpha = 5, .rank_stabilized = true};
    AddLora(*model, options);
    Disturb(model);
    const TestFolder to;
    ASSERT_TRUE(SaveLora(*model, to.path(), options, "base").ok());
    TextModel again = Load(folder);
    const auto loaded = LoadLora(*again, to.path());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->rank, 3);
    EXPECT_TRUE(at::equal(Logits(again), Logits(model)));
    EXPECT_FALSE(at::allclose(Logits(again), [&] {
      TextModel base = Load(folder);
      return Logits(base);
    }()));
  }
}

TEST(SaveLora, ValuesByName_AreSavedInsteadOfTheModelsOwn) {
  TextModel model = Load(kFolders[1]);
  AddLora(*model, {});
  std::map<std::string, at::Tensor> values;
  for (const auto& item : model->named_parameters()) {
    if (IsLoraParameter(item.key())) values[item.key()] = at::full_like(item.value(), 0.5);
  }
  EXPECT_EQ(values.size(), LoraParameters(*model).size());
  const TestFolder to;
  ASSERT_TRUE(SaveLora(*model, values, to.path(), {}).ok());
  TextModel again = Load(kFolders[1]);
  ASSERT_TRUE(LoadLora(*again, to.path()).ok());
  for (const at::Tensor& adapter : LoraParameters(*again)) {
    EXPECT_TRUE(at::equal(adapter, at::full_like(adapter, 0.5)));
  }

  const auto error_of = [&](const std::map<std::string, at::Tensor>& wrong) {
    return std::string(SaveLora(*model, wrong, to.path(), {}).message());
  };
  std::map<std::string, at::Tensor> wrong = values;
  wrong.erase(wrong.begin());
  EXPECT_THAT(error_of(wrong), HasSubstr("lack that of " + values.begin()->first));
  wrong = values;
  wrong.begin()->second = at::zeros({1});
  EXPECT_THAT(error_of(wrong), HasSubstr(values.begin()->first + " has shape [1], but"));
  wrong = values;
  wrong["norm.weight"] = at::zeros({1});
  EXPECT_THAT(error_of(wrong), HasSubstr("norm.weight, which is no adapter"));
}

// The config decides what another program computes with the tensors.
TEST(SaveLora, OptionsOfOtherAdapters_AreRefusedAndNothingIsWritten) {
  const LoraOptions right = {.rank = 3, .alpha = 6, .dropout = 0.25};
  TextModel model = Load("hf_models/llama_shared");
  AddLora(*model, right);
  const TestFolder folder;
  const std::string to = folder.Path("adapters");
  const LoraOptions wrong[] = {{},
                               {.rank = 6, .alpha = 12, .dropout = 0.25},
                               {.rank = 3, .alpha = 3, .dropout = 0.25},
                               {.rank = 3, .alpha = 6, .rank_stabilized = true, .dropout = 0.25},
                               {.rank = 3, .alpha = 6}};
  for (const LoraOptions& options : wrong) {
    const absl::Status status = SaveLora(*model, to, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("self_attn.q_proj has rank 3, scale 2 and dropout 0.25"),
              std::string::npos)
        << status;
    EXPECT_FALSE(PathExists(to));
  }
  EXPECT_TRUE(SaveLora(*model, to, right).ok());
  // One config cannot describe adapters of two ranks.
  AddLora(*model, {.rank = 4, .alpha = 8, .dropout = 0.25, .target_modules = {"k_proj"}});
  EXPECT_NE(SaveLora(*model, folder.Path("both"), right).message().find("k_proj has rank 4"),
            std::string::npos);
}

// PEFT adapts all layers with the same name.
TEST(SaveLora, AdaptersOfSomeLayersOfAName_NameThemWhole) {
  const TestFolder folder;
  const std::string layer = "model.layers.0.self_attn.q_proj";
  TextModel model = Load("hf_models/llama_shared");
  AddLora(*model, {.target_modules = {layer, "v_proj"}});
  ASSERT_TRUE(SaveLora(*model, folder.path(), {}).ok());
  const auto config = nlohmann::json::parse(*ReadFile(folder.Path("adapter_config.json")));
  EXPECT_EQ(config.at("target_modules"), nlohmann::json({layer, "v_proj"}));
  TextModel again = Load("hf_models/llama_shared");
  const auto loaded = LoadLora(*again, folder.path());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->target_modules, (std::vector<std::string>{layer, "v_proj"}));
}

TEST(MergeLora, Merged_SaysTheSameWithoutAdapters) {
  for (const char* const folder : kFolders) {
    TextModel model = Load(folder);
    AddLora(*model, {.target_modules = {
                         std::string(folder).find("bert") != std::string::npos   ? "dense"
                         : std::string(folder).find("gpt2") != std::string::npos ? "c_proj"
                                                                                 : "down_proj"}});
    Disturb(model);
    const at::Tensor before = Logits(model);
    MergeLora(*model);
    EXPECT_TRUE(LoraParameters(*model).empty());
    EXPECT_TRUE(at::allclose(Logits(model), before, 1e-4, 1e-4));
    EXPECT_TRUE(model->parameters()[0].requires_grad());
  }
}

// Otherwise training would wait for its gradient.
TEST(MergeLora, TensorThatNothingComputesWith_IsNotTrained) {
  ModelConfig config = Load("hf_models/bert_shared")->config();
  Common(config).tie_word_embeddings = false;
  TextModel model = MakeModel(config);
  AddLora(*model, {.target_modules = {"dense"}});
  MergeLora(*model);
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
    EXPECT_NE(item.key(), "cls.predictions.bias");
  }
  EXPECT_FALSE(model->named_buffers()["cls.predictions.bias"].requires_grad());
}

TEST(AddLora, TargetThatNoLayerHas_IsNamed) {
  TextModel model = Load(kFolders[0]);
  try {
    AddLora(*model, {.target_modules = {"q_proj"}});
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("no linear layer of the model is called q_proj"),
              std::string::npos);
  }
}

TEST(AddLora, TargetsThatAreRefused_ChangeNothing) {
  TextModel model = Load(kFolders[1]);
  const std::vector<std::string> refused[] = {{"q_proj", "nothing"}, {"q_proj", "k_proj"}};
  for (const auto& targets : refused) {
    const bool adapted = targets[1] == "k_proj";
    if (adapted) AddLora(*model, {.target_modules = {"q_proj"}});
    const size_t before = LoraParameters(*model).size();
    EXPECT_THROW(AddLora(*model, {.target_modules = targets}), c10::Error);
    EXPECT_EQ(LoraParameters(*model).size(), before);
    EXPECT_EQ(model->parameters()[0].requires_grad(), !adapted);
  }
}

TEST(AddLora, LayerThatTwoTargetsName_GetsOneAdapter) {
  TextModel once = Load(kFolders[1]), twice = Load(kFolders[1]);
  AddLora(*once, {.target_modules = {"q_proj"}});
  AddLora(*twice, {.target_modules = {"q_proj", "self_attn.q_proj", "q_proj"}});
  EXPECT_EQ(LoraParameters(*twice).size(), LoraParameters(*once).size());
}

TEST(LoadLora, LayerThatHasAnAdapterAlready_ChangesNothing) {
  const TestFolder folder;
  TextModel other = Load(kFolders[1]);
  AddLora(*other, {.target_modules = {"k_proj", "q_proj"}});
  ASSERT_TRUE(SaveLora(*other, folder.path(), {}).ok());
  TextModel model = Load(kFolders[1]);
  AddLora(*model, {.target_modules = {"q_proj"}});
  const size_t before = LoraParameters(*model).size();
  const auto loaded = LoadLora(*model, folder.path());
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(loaded.status().message().find("has an adapter already"), std::string::npos);
  EXPECT_EQ(LoraParameters(*model).size(), before);
}

TEST(LoadLora, AdaptersOfOtherLayers_StayBesideThoseThatAreThere) {
  const TestFolder queries, values;
  for (const auto& [target, folder] : {std::pair{"q_proj", &queries}, {"v_proj", &values}}) {
    TextModel model = Load(kFolders[1]);
    AddLora(*model, {.target_modules = {target}});
    Disturb(model);
    ASSERT_TRUE(SaveLora(*model, folder->path(), {}).ok());
  }
  TextModel model = Load(kFolders[1]);
  ASSERT_TRUE(LoadLora(*model, queries.path()).ok());
  const auto loaded = LoadLora(*model, values.path());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  std::map<std::string, at::Tensor> saved = ReadAll(queries.Path("adapter_model.safetensors"));
  saved.merge(ReadAll(values.Path("adapter_model.safetensors")));
  const auto parameters = model->named_parameters();
  EXPECT_EQ(LoraParameters(*model).size(), saved.size());
  for (const auto& [name, tensor] : saved) {
    const at::Tensor& parameter = parameters[name.substr(std::string("base_model.model.").size())];
    EXPECT_TRUE(at::equal(parameter, tensor)) << name;
    EXPECT_TRUE(parameter.requires_grad()) << name;
  }
}

// transformers would load the model without them.
TEST(SavePretrained, AdaptersThatAreNotMerged_AreRefused) {
  const TestFolder folder;
  TextModel model = Load(kFolders[1]);
  AddLora(*model);
  for (const absl::Status& status :
       {SavePretrained(*model, folder.path()), SaveConfig(*model, folder.path())}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("MergeLora"), std::string::npos) << status;
  }
  EXPECT_TRUE(ListDirectory(folder.path())->empty());
  MergeLora(*model);
  EXPECT_TRUE(SavePretrained(*model, folder.path()).ok());
}

TEST(MergeLora, WeightsOfFloat64_KeepTheirDigits) {
  auto model = LoadPretrained(testing_support::GoldenPath(kFolders[1]), {.dtype = c10::kDouble});
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<at::Tensor> before;
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : (*model)->parameters()) {
      before.push_back(parameter.add_(1e-12).clone());
    }
  }
  AddLora(**model);
  MergeLora(**model);
  const std::vector<at::Tensor> merged = (*model)->parameters();
  ASSERT_EQ(merged.size(), before.size());
  for (size_t i = 0; i < merged.size(); ++i) EXPECT_TRUE(at::equal(merged[i], before[i])) << i;
}

TEST(LoadLora, WhatMusterDoesNotHave_IsRefusedAndChangesNothing) {
  TextModel model = Load(kFolders[1]);
  AddLora(*model);
  const TestFolder folder;
  ASSERT_TRUE(SaveLora(*model, folder.path(), {}).ok());
  const std::string config = folder.Path("adapter_config.json");
  const auto error = [&] {
    TextModel base = Load(kFolders[1]);
    base->parameters()[0].requires_grad_(false);
    const at::Tensor before = Logits(base);
    const auto loaded = LoadLora(*base, folder.path());
    EXPECT_TRUE(LoraParameters(*base).empty());
    EXPECT_FALSE(base->parameters()[0].requires_grad());
    EXPECT_TRUE(base->parameters()[1].requires_grad());
    EXPECT_TRUE(at::equal(Logits(base), before));
    return std::string(loaded.status().message());
  };
  ReplaceIn(config, "use_dora", true);
  EXPECT_NE(error().find("\"use_dora\" is true"), std::string::npos);
  ReplaceIn(config, "use_dora", false);
  // A setting that a later version of PEFT may have.
  ReplaceIn(config, "use_novelty", {{"kind", "new"}});
  EXPECT_NE(error().find("\"use_novelty\" is {"), std::string::npos);
  ReplaceIn(config, "use_novelty", nlohmann::json());
  ReplaceIn(config, "init_lora_weights", "pissa");
  EXPECT_NE(error().find("\"init_lora_weights\" is \"pissa\""), std::string::npos);
  ReplaceIn(config, "init_lora_weights", "orthogonal");
  ReplaceIn(config, "peft_type", "IA3");
  EXPECT_NE(error().find("\"peft_type\" is not \"LORA\""), std::string::npos);
  ReplaceIn(config, "peft_type", "LORA");
  ReplaceIn(config, "r", 4);
  EXPECT_NE(error().find("lora_A.weight"), std::string::npos) << error();
  ReplaceIn(config, "r", 0);
  EXPECT_NE(error().find("\"r\" and \"lora_alpha\""), std::string::npos);
}

// tests/testdata/peft/README.md: files that PEFT wrote, and the outputs of its models.
TEST(LoadLora, AdaptersOfPeft_SayWhatTheySayThere) {
  const std::pair<const char*, const char*> cases[] = {{"llama", "llama_shared"},
                                                       {"llama_rank_stabilized", "llama_shared"},
                                                       {"gpt2", "gpt2_shared"},
                                                       {"qwen2", "qwen2_shared"},
                                                       {"bert", "bert_shared"}};
  for (const auto& [name, base] : cases) {
    SCOPED_TRACE(name);
    const std::string folder = testing_support::TestdataPath(std::string("peft/") + name);
    TextModel model = Load(std::string("hf_models/") + base);
    const auto options = LoadLora(*model, folder);
    ASSERT_TRUE(options.ok()) << options.status();
    const std::map<std::string, at::Tensor> tensors = ReadAll(folder + "/expected.safetensors");
    const at::NoGradGuard no_grad;
    const at::Tensor logits = model->forward({.input_ids = tensors.at("input_ids")}).logits;
    EXPECT_TRUE(at::allclose(logits, tensors.at("logits"), 1e-4, 1e-4))
        << (logits - tensors.at("logits")).abs().max();
    // Written again, they are the same files for PEFT.
    const TestFolder again;
    ASSERT_TRUE(SaveLora(*model, again.path(), *options, base).ok());
    const auto theirs = ReadAll(folder + "/adapter_model.safetensors");
    const auto ours = ReadAll(again.Path("adapter_model.safetensors"));
    ASSERT_EQ(ours.size(), theirs.size());
    for (const auto& [tensor, value] : theirs) EXPECT_TRUE(at::equal(ours.at(tensor), value));
    const auto config = nlohmann::json::parse(*ReadFile(again.Path("adapter_config.json")));
    const auto peft = nlohmann::json::parse(*ReadFile(folder + "/adapter_config.json"));
    for (const char* const key :
         {"r", "lora_alpha", "use_rslora", "fan_in_fan_out", "bias", "peft_type", "task_type"}) {
      EXPECT_EQ(config.at(key), peft.at(key)) << key;
    }
    MergeLora(*model);
    EXPECT_TRUE(at::allclose(model->forward({.input_ids = tensors.at("input_ids")}).logits,
                             tensors.at("logits"), 1e-4, 1e-4));
  }
}

TEST(LoadLora, AdaptersOfAnotherModel_NameTheLayer) {
  TextModel llama = Load(kFolders[1]);
  AddLora(*llama);
  const TestFolder folder;
  ASSERT_TRUE(SaveLora(*llama, folder.path(), {}).ok());
  TextModel gpt2 = Load(kFolders[0]);
  EXPECT_NE(LoadLora(*gpt2, folder.path())
                .status()
                .message()
                .find("the model has no linear layer model.layers.0.self_attn.q_proj"),
            std::string::npos);
}

}  // namespace
}  // namespace muster::models
