#include "muster/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "tests/testdata/golden.h"

namespace {

using muster::testing_support::TestdataPath;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The model of tests/testdata/torch_files/make.py.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const torch::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  torch::Tensor weight;
};

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : embed(register_module("embed", torch::nn::Embedding(5, 3))),
        norm(register_module("norm", torch::nn::BatchNorm1d(3))),
        head(register_module("head", std::make_shared<HeadImpl>(embed->weight))) {}
  torch::Tensor forward(torch::Tensor ids) {
    return torch::matmul(norm(embed(ids)), head->weight.t());
  }
  torch::nn::Embedding embed;
  torch::nn::BatchNorm1d norm;
  std::shared_ptr<HeadImpl> head;
};
TORCH_MODULE(Tied);

TEST(LoadModel, EveryKindOfModel_TakesTheSameFile) {
  const std::string path = TestdataPath("torch_files/pytorch_model.bin");
  const torch::Tensor wanted =
      muster::LoadTensors(TestdataPath("torch_files/pytorch_model.safetensors"))["embed.weight"];
  Tied holder;
  const auto pointer = std::make_shared<TiedImpl>();
  TiedImpl plain;
  torch::nn::AnyModule any{Tied()};
  for (const auto& loaded : {muster::load_model(holder, path), muster::load_model(pointer, path),
                             muster::load_model(plain, path), muster::load_model(any, path),
                             muster::load_checkpoint_in_model(Tied(), path)}) {
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->loaded.size(), 7u);
    EXPECT_THAT(loaded->missing, IsEmpty());
  }
  EXPECT_TRUE(holder->head->weight.equal(wanted));
  EXPECT_TRUE(pointer->embed->weight.equal(wanted));
  EXPECT_TRUE(plain.embed->weight.equal(wanted));
  EXPECT_TRUE(any.ptr()->named_parameters()["embed.weight"].equal(wanted));
  EXPECT_TRUE(holder->embed->weight.is_same(holder->head->weight)) << "still one tensor";
}

// The default is Accelerate's.
TEST(LoadCheckpointInModel, WithOptions_IsStillNotStrict) {
  Tied model;
  const std::string path = TestdataPath("torch_files/nested.pt");
  const auto loaded = muster::load_checkpoint_in_model(model, path, {.dtype = torch::kDouble});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(loaded->missing, testing::Contains("embed.weight"));
  EXPECT_THAT(loaded->unexpected, testing::Contains("state_dict.embed.weight"));
  EXPECT_EQ(model->embed->weight.scalar_type(), torch::kDouble);
  const auto part = muster::load_checkpoint_in_model(model, path, {.prefix = "state_dict."});
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_THAT(part->missing, IsEmpty());
  EXPECT_FALSE(muster::load_checkpoint_in_model(model, path, {.strict = true}).ok());
  const muster::LoadWeightsOptions of_load_model;
  EXPECT_FALSE(muster::load_checkpoint_in_model(model, path, of_load_model).ok());
}

TEST(LoadModel, NestedCheckpoint_IsReadByItsPrefix) {
  Tied model;
  const std::string path = TestdataPath("torch_files/nested.pt");
  const auto whole = muster::load_model(model, path);
  EXPECT_THAT(whole.status().message(), HasSubstr("unexpected: state_dict.embed.weight"));
  const auto part =
      muster::load_model(model, path, {.prefix = "state_dict.", .dtype = torch::kDouble});
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_THAT(part->ignored, ElementsAre("parameter", "optimizer.state.0.step"));
  EXPECT_EQ(model->head->weight.scalar_type(), torch::kDouble);
  EXPECT_EQ(model->norm->num_batches_tracked.scalar_type(), torch::kLong);
}

TEST(LoadModel, WhatSaveModelWrote_ComesBackInOneAndInShards) {
  muster::AcceleratorOptions options;
  options.cpu = true;
  muster::Accelerator accelerator(options);
  Tied trained;
  auto model = accelerator.prepare(trained);
  const std::string folder = muster::TestPath("save_model_comes_back");
  for (const char* limit : {"10GB", "0.07KB"}) {
    ASSERT_TRUE(accelerator.save_model(model, folder, limit).ok());
    Tied fresh;
    const auto loaded = muster::load_model(fresh, folder);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(fresh->embed->weight.equal(trained->embed->weight));
    EXPECT_TRUE(fresh->norm->running_var.equal(trained->norm->running_var));
  }
  EXPECT_TRUE(muster::load_model(model, folder).ok()) << "a prepared model loads too";
  std::filesystem::remove_all(folder);
}

}  // namespace
