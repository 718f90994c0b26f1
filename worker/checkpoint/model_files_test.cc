#include "worker/checkpoint/model_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "ATen/ops/full.h"
#include "ATen/ops/randn.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ModelFilesTest : public testing::Test {
 protected:
  const TestFolder folder_;
  const std::string dir_ = folder_.Path("model");
};

NamedTensors Model(int tensors, double value = 1) {
  NamedTensors model;
  for (int i = 0; i < tensors; ++i) {
    model.emplace_back("layer." + std::to_string(i), at::full({10}, value + i));
  }
  return model;
}

TEST_F(ModelFilesTest, Shards_RoundTripThroughIndexFolderAndFile) {
  NamedTensors model = Model(5);
  model.emplace_back("tied", model[0].second);
  ASSERT_TRUE(SaveModelFiles(dir_, model, /*max_shard_bytes=*/80).ok());
  EXPECT_THAT(*ListDirectory(dir_),
              ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                          "model-00003-of-00003.safetensors", "model.safetensors.index.json"));
  for (const std::string& path : {dir_, JoinPath(dir_, "model.safetensors.index.json")}) {
    const auto files = ModelFiles::Open(path);
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(files->Names().size(), 5u) << "a tied name is written once";
    for (int i = 0; i < 5; ++i) {
      EXPECT_TRUE(files->Read(model[i].first)->equal(model[i].second));
      EXPECT_TRUE(files->Map(model[i].first)->equal(model[i].second));
    }
    EXPECT_THAT(std::string(files->Read("tied").status().message()), HasSubstr("in none"));
  }
}

TEST_F(ModelFilesTest, D17_StaleShardsAndIndex_DoNotSurviveANewSave) {
  ASSERT_TRUE(SaveModelFiles(dir_, Model(4), 40).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, "config.json"), "{}").ok());
  ASSERT_TRUE(SaveModelFiles(dir_, Model(1, 9)).ok());
  EXPECT_THAT(*ListDirectory(dir_), ElementsAre("config.json", "model.safetensors"));
  ASSERT_TRUE(SaveModelFiles(dir_, Model(2), 40).ok());
  EXPECT_THAT(*ListDirectory(dir_),
              ElementsAre("config.json", "model-00001-of-00002.safetensors",
                          "model-00002-of-00002.safetensors", "model.safetensors.index.json"));
}

TEST_F(ModelFilesTest, D38_SafetensorsWinOverPickles) {
  ASSERT_TRUE(SaveModelFiles(dir_, Model(1)).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, "pytorch_model.bin"), "pickle").ok());
  EXPECT_TRUE(ModelFiles::Open(dir_).ok());
}

TEST_F(ModelFilesTest, FailedSave_LeavesOldModel) {
  ASSERT_TRUE(SaveModelFiles(dir_, Model(1, 5)).ok());
  NamedTensors bad = Model(1);
  bad.emplace_back("undefined", at::Tensor());
  EXPECT_FALSE(SaveModelFiles(dir_, bad).ok());
  EXPECT_THAT(*ListDirectory(dir_), ElementsAre("model.safetensors"));
  EXPECT_EQ(ModelFiles::Open(dir_)->Read("layer.0")->sum().item<float>(), 50);
}

TEST_F(ModelFilesTest, NoTensors_IsOneEmptyFile) {
  ASSERT_TRUE(SaveModelFiles(dir_, {}).ok());
  EXPECT_TRUE(ModelFiles::Open(dir_)->Names().empty());
}

TEST_F(ModelFilesTest, HiddenIndex_IsNoneOfTheModel) {
  ASSERT_TRUE(SaveModelFiles(dir_, Model(2), 40).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, "._model.safetensors.index.json"), "x").ok());
  const auto files = ModelFiles::Open(dir_);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(files->Names().size(), 2u);
}

TEST_F(ModelFilesTest, WhatIsMissing_IsNamed) {
  const auto why = [&] { return std::string(ModelFiles::Open(dir_).status().message()); };
  EXPECT_THAT(why(), HasSubstr(dir_));
  ASSERT_TRUE(MakeDirectories(dir_).ok());
  EXPECT_THAT(why(), HasSubstr("neither model.safetensors nor an index"));
  ASSERT_TRUE(SaveModelFiles(dir_, Model(2), 40).ok());
  ASSERT_TRUE(RemoveTree(JoinPath(dir_, "model-00002-of-00002.safetensors")).ok());
  EXPECT_THAT(why(), HasSubstr("model-00002-of-00002.safetensors"));
  const std::string index = JoinPath(dir_, "model.safetensors.index.json");
  ASSERT_TRUE(WriteFileAtomically(
                  index, "{\"weight_map\":{\"other\":\"model-00001-of-00002.safetensors\"}}")
                  .ok());
  EXPECT_THAT(why(), HasSubstr("places tensor \"other\""));
  ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, "b.index.json"), "{}").ok());
  EXPECT_THAT(why(), HasSubstr("2 indexes"));
}

TEST_F(ModelFilesTest, GoldenModels_AreListedAsTheCasesSay) {
  for (const nlohmann::json& item : testing_support::GoldenCases("hf_models")) {
    const auto files = ModelFiles::Open(testing_support::GoldenPath(item["in"]["dir"]));
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(files->Names(), item["out"]["tensors"].get<std::vector<std::string>>());
  }
}

}  // namespace
}  // namespace muster
