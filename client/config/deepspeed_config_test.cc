#include "client/config/deepspeed_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "base/mutate.h"
#include "base/test_folder.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;
using Variables = std::map<std::string, std::string>;

std::string Error(const absl::StatusOr<DeepSpeedConfig>& config) {
  return config.ok() ? "accepted" : std::string(config.status().message());
}

TEST(ReadDeepSpeedConfig, PathJsonOrBase64_AreRead) {
  TestFolder folder;
  const Json config = {{"zero_optimization", {{"stage", 1}}}};
  ASSERT_TRUE(WriteFileAtomically(folder.Path("c.json"), config.dump()).ok());
  EXPECT_EQ(*ReadDeepSpeedConfig(folder.Path("c.json")), config);
  EXPECT_EQ(*ReadDeepSpeedConfig(config.dump()), config);
  EXPECT_EQ(*ReadDeepSpeedConfig("eyJhIjogMX0="), Json({{"a", 1}}));
  EXPECT_THAT(ReadDeepSpeedConfig("no/such.json").status().message(), HasSubstr("no/such.json"));
}

TEST(DeepSpeedConfig, ConfigWithoutAccumulation_TakesTheProgramsSteps) {
  const Json config = {{"zero_optimization", {{"stage", 2}}}};
  DeepSpeedContext context;
  EXPECT_EQ(DeepSpeedConfig::Resolve(config, nullptr, {}, context)
                ->config()["gradient_accumulation_steps"],
            1);
  context.gradient_accumulation_steps = 3;
  EXPECT_EQ(DeepSpeedConfig::Resolve(config, nullptr, {}, context)
                ->config()["gradient_accumulation_steps"],
            3);
  EXPECT_EQ(DeepSpeedConfig::Resolve(config, {{"gradient_accumulation_steps", 4}}, {}, context)
                ->config()["gradient_accumulation_steps"],
            4);
}

TEST(DeepSpeedConfig, WrongValues_AreNamedWithTheirSource) {
  const Json config = {{"zero_optimization", {{"stage", 2}}}};
  const auto error = [&](const Json& arguments, const Variables& variables) {
    return Error(DeepSpeedConfig::Resolve(config, arguments, variables, {}));
  };
  EXPECT_THAT(error({{"zero_stge", 1}}, {}), HasSubstr("did you mean zero_stage?"));
  EXPECT_THAT(error(nullptr, {{"ACCELERATE_DEEPSPEED_ZERO_STAGE", "two"}}), HasSubstr("two"));
  EXPECT_THAT(error(nullptr, {{"ACCELERATE_GRADIENT_CLIPPING", "much"}}), HasSubstr("much"));
  EXPECT_THAT(error(nullptr, {{"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "x4"}}), HasSubstr("x4"));
  EXPECT_THAT(error(nullptr, {{"ACCELERATE_DEEPSPEED_ZERO3_INIT", "Maybe"}}), HasSubstr("maybe"));
  EXPECT_THAT(error({{"enable_msamp", true}, {"msamp_opt_level", "O3"}}, {}), HasSubstr("MS-AMP"));
  EXPECT_THAT(Error(DeepSpeedConfig::Resolve({{"zero_optimization", 7}}, nullptr, {}, {})),
              HasSubstr("zero_optimization"));
  EXPECT_THAT(Error(DeepSpeedConfig::Resolve("[]", nullptr, {}, {})), HasSubstr("JSON object"));
}

// float() reads such numbers, and JSON has none.
TEST(DeepSpeedConfig, ClippingThatIsNotFinite_IsTheTextOfIt) {
  for (const auto& [word, text] : {std::pair{"inf", "inf"},
                                   {"Infinity", "inf"},
                                   {"1e999", "inf"},
                                   {"-inf", "-inf"},
                                   {"nan", "nan"},
                                   {"+NaN", "nan"}}) {
    SCOPED_TRACE(word);
    const Variables variables = {{"ACCELERATE_GRADIENT_CLIPPING", word}};
    auto config = DeepSpeedConfig::Resolve(nullptr, nullptr, variables, {});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->config()["gradient_clipping"], text);
    config = DeepSpeedConfig::Resolve(
        {{"zero_optimization", {{"stage", 2}}}, {"gradient_clipping", "auto"}}, nullptr, variables,
        {});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->config()["gradient_clipping"], text);
    EXPECT_EQ(config->fields()["gradient_clipping"], text);
  }
}

TEST(DeepSpeedConfig, NullSections_StayNull) {
  for (const char* mode : {"no", "fp16", "bf16"}) {
    const auto config = DeepSpeedConfig::Resolve(
        {{"zero_optimization", nullptr}, {"fp16", nullptr}, {"bf16", nullptr}}, nullptr, {},
        {.mixed_precision = mode});
    ASSERT_TRUE(config.ok()) << config.status();
    for (const char* section : {"zero_optimization", "fp16", "bf16"}) {
      EXPECT_TRUE(config->config()[section].is_null()) << section;
    }
    EXPECT_EQ(config->fields()["zero_stage"], 2);
  }
}

// Accelerate keeps the word unchanged, and every word is true.
TEST(DeepSpeedConfig, WordForABooleanArgument_IsRefused) {
  for (const char* name :
       {"zero3_init_flag", "zero3_save_16bit_model", "is_train_batch_min", "enable_msamp"}) {
    EXPECT_THAT(Error(DeepSpeedConfig::Resolve(nullptr, {{name, "no"}}, {}, {})),
                HasSubstr(std::string(name) + " must be true or false, not no"));
  }
  EXPECT_EQ(DeepSpeedConfig::Resolve(nullptr, nullptr,
                                     {{"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "True"}}, {})
                ->fields()["zero3_save_16bit_model"],
            true);
}

// In Python, true equals 1 and false equals 0.
TEST(DeepSpeedConfig, BooleansAndNumbers_CompareAsInPython) {
  auto config = DeepSpeedConfig::Resolve(
      {{"zero_optimization", {{"overlap_comm", true}}}, {"gradient_accumulation_steps", 1}},
      nullptr, {}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config
                  ->Process({{"zero_optimization.overlap_comm", 1},
                             {"gradient_accumulation_steps", true},
                             {"fp16.enabled", 0}},
                            true)
                  .ok());
  EXPECT_THAT(config->Process({{"zero_optimization.overlap_comm", 2}}, true).message(),
              HasSubstr("overlap_comm is true"));
  DeepSpeedObjects objects = {.model = DeepSpeedModel(),
                              .optimizer = DeepSpeedOptimizer(),
                              .scheduler = std::nullopt,
                              .batch_sizes = {4}};
  for (const auto& [force, on_cpu] : {std::pair<Json, bool>{true, true},
                                      {1, true},
                                      {false, false},
                                      {0, false},
                                      {nullptr, false}}) {
    SCOPED_TRACE(force);
    auto offloading = DeepSpeedConfig::Resolve(
        {{"zero_optimization", {{"stage", 2}, {"offload_optimizer", {{"device", "cpu"}}}}},
         {"zero_force_ds_cpu_optimizer", force}},
        nullptr, {}, {});
    ASSERT_TRUE(offloading.ok() && offloading->Prepare(objects).ok());
    EXPECT_EQ(offloading->cpu_optimizer(), on_cpu);
  }
}

TEST(DeepSpeedConfig, AutoThatNothingFills_NamesEveryKey) {
  auto config = DeepSpeedConfig::Resolve(
      {{"zero_optimization", {{"stage", 2}, {"x", "auto"}}}, {"y", "auto"}}, nullptr, {}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  const absl::Status status = config->Process({}, true);
  EXPECT_THAT(status.message(), HasSubstr("y, zero_optimization.x"));
}

TEST(DeepSpeedConfig, NoClippingAskedFor_ClipsNothing) {
  DeepSpeedObjects objects;
  objects.model.emplace();
  objects.batch_sizes = {4};
  auto config = DeepSpeedConfig::Resolve(nullptr, nullptr, {}, {});
  ASSERT_TRUE(config.ok() && config->Prepare(objects).ok());
  EXPECT_FALSE(config->config().contains("gradient_clipping"));
  auto asked = DeepSpeedConfig::Resolve(
      {{"zero_optimization", Json::object()}, {"gradient_clipping", "auto"}}, nullptr, {}, {});
  ASSERT_TRUE(asked.ok() && asked->Prepare(objects).ok());
  EXPECT_EQ(asked->config()["gradient_clipping"], 1.0);
}

TEST(DeepSpeedConfig, BatchSizesThatContradict_AreRefusedInPrepare) {
  DeepSpeedObjects objects;
  objects.model.emplace();
  objects.batch_sizes = {4};
  auto config = DeepSpeedConfig::Resolve({{"zero_optimization", {{"stage", 1}}},
                                          {"train_batch_size", 7},
                                          {"train_micro_batch_size_per_gpu", "auto"}},
                                         nullptr, {}, {});
  ASSERT_TRUE(config.ok());
  EXPECT_THAT(config->Prepare(objects).message(), HasSubstr("train_batch_size is 7"));
  objects.batch_sizes = {std::nullopt};
  EXPECT_THAT(config->Prepare(objects).message(), HasSubstr("None as batch size"));
}

TEST(DeepSpeedConfig, NullForAnOffloadSection_IsNoOffloading) {
  DeepSpeedObjects objects;
  objects.model.emplace();
  objects.optimizer = {false, 0.1, 0};
  objects.batch_sizes = {4};
  auto config = DeepSpeedConfig::Resolve(
      {{"zero_optimization",
        {{"stage", 3}, {"offload_optimizer", nullptr}, {"offload_param", nullptr}}}},
      nullptr, {}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_TRUE(config->Prepare(objects).ok());
  EXPECT_FALSE(config->cpu_optimizer());
}

TEST(DeepSpeedConfig, SplitBatchesOfALoaderWithoutABatchSize_AreRefused) {
  DeepSpeedObjects objects;
  objects.model.emplace();
  objects.batch_sizes = {std::nullopt};
  DeepSpeedContext context;
  const Json config = {{"zero_optimization", {{"stage", 1}}},
                       {"train_micro_batch_size_per_gpu", 2}};
  EXPECT_TRUE(DeepSpeedConfig::Resolve(config, nullptr, {}, context)->Prepare(objects).ok());
  context.split_batches = true;
  EXPECT_THAT(DeepSpeedConfig::Resolve(config, nullptr, {}, context)->Prepare(objects).message(),
              HasSubstr("batch_size"));
}

TEST(DeepSpeedBatch, WholeNumbersWithAPoint_AreWholeNumbers) {
  const auto sizes = DeepSpeedBatch({{"train_micro_batch_size_per_gpu", 4.0}}, 2);
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_EQ(sizes->train, 8);
  for (const double number : {4.5, 0.0, -4.0, 1e300}) {
    EXPECT_FALSE(DeepSpeedBatch({{"train_micro_batch_size_per_gpu", number}}, 2).ok()) << number;
  }
}

TEST(DeepSpeedBatch, NumbersThatDoNotFit_AreRefused) {
  for (const Json& config :
       {Json::object(), Json({{"train_batch_size", 0}}), Json({{"train_batch_size", 3}}),
        Json({{"train_batch_size", "auto"}}), Json({{"train_batch_size", UINT64_MAX}}),
        Json({{"train_micro_batch_size_per_gpu", INT64_MAX}, {"gradient_accumulation_steps", 2}}),
        Json({{"train_batch_size", 9}, {"train_micro_batch_size_per_gpu", 2}})}) {
    EXPECT_FALSE(DeepSpeedBatch(config, 4).ok()) << config;
  }
}

TEST(DeepSpeedConfig, MutatedTexts_AreReadOrRefused) {
  const std::string seed = R"({
      "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
      "fp16": {"enabled": "auto"},
      "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
                            "offload_param": {"device": "nvme", "nvme_path": "/n"}},
      "scheduler": {"params": {"warmup_max_lr": "auto"}}})";
  std::mt19937_64 random(20261123);
  DeepSpeedObjects objects;
  objects.model = {int64_t{16}, true};
  objects.optimizer = {false, 0.1, 0};
  objects.scheduler.emplace().placeholder = true;
  objects.batch_sizes = {4};
  int prepared = 0;
  for (int round = 0; round < 5000; ++round) {
    const std::string text = Mutate(seed, random);
    auto config = DeepSpeedConfig::Resolve(text, nullptr, {}, {});
    if (!config.ok()) continue;
    const bool ok = config->Prepare(objects).ok();
    prepared += ok ? 1 : 0;
    DeepSpeedBatch(config->config(), 2).IgnoreError();
  }
  EXPECT_GT(prepared, 10);
}

}  // namespace
}  // namespace muster::client
