#include "muster/internal/engine_settings.h"

#include <fstream>

#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::internal {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

absl::StatusOr<EngineSettings> Read(const Variables& variables,
                                    const std::string& mixed_precision = "no") {
  return ReadEngineSettings(variables, mixed_precision, 1, 4, 2);
}

ShardingOptions Options(const Variables& variables, const std::string& mixed_precision = "no") {
  const absl::StatusOr<EngineSettings> settings = Read(variables, mixed_precision);
  EXPECT_TRUE(settings.ok()) << settings.status();
  return settings.ok() ? settings->sharding : ShardingOptions();
}

std::string Error(const Variables& variables) {
  const absl::StatusOr<EngineSettings> settings = Read(variables);
  return settings.ok() ? "no error" : std::string(settings.status().message());
}

TEST(ReadEngineSettings, Fsdp_BecomesSharding) {
  Variables fsdp = {{"ACCELERATE_USE_FSDP", "true"},
                    {"FSDP_SHARDING_STRATEGY", "FULL_SHARD"},
                    {"FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"},
                    {"FSDP_TRANSFORMER_CLS_TO_WRAP", "Block,Head"}};
  EXPECT_EQ(Options(fsdp).strategy, ShardingStrategy::kFull);
  EXPECT_THAT(Options(fsdp).unit_types, ElementsAre("Block", "Head"));
  EXPECT_EQ(Options(fsdp).group_size, 0);
  fsdp["FSDP_SHARDING_STRATEGY"] = "HYBRID_SHARD";
  EXPECT_EQ(Options(fsdp).group_size, 2);
  fsdp["FSDP_SHARDING_STRATEGY"] = "SHARD_GRAD_OP";
  EXPECT_EQ(Options(fsdp).strategy, ShardingStrategy::kGradients);
  fsdp["FSDP_SHARDING_STRATEGY"] = "NO_SHARD";
  EXPECT_EQ(Options(fsdp).strategy, ShardingStrategy::kNone);
  fsdp = {{"ACCELERATE_USE_FSDP", "true"},
          {"FSDP_VERSION", "2"},
          {"FSDP_RESHARD_AFTER_FORWARD", "false"},
          {"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"},
          {"FSDP_MIN_NUM_PARAMS", "1000"}};
  EXPECT_FALSE(Options(fsdp).reshard_after_forward);
  EXPECT_EQ(Options(fsdp).min_unit_parameters, 1000);
}

TEST(ReadEngineSettings, FsdpUnderBf16_GathersInBfloat16) {
  const ShardingOptions options = Options({{"ACCELERATE_USE_FSDP", "true"}}, "bf16");
  EXPECT_EQ(options.parameter_dtype, c10::ScalarType::BFloat16);
  EXPECT_EQ(options.reduce_dtype, c10::ScalarType::BFloat16);
  EXPECT_FALSE(Options({{"ACCELERATE_USE_FSDP", "true"}}).parameter_dtype.has_value());
}

TEST(ReadEngineSettings, DeepSpeedStages_BecomeStrategies) {
  const auto stage = [](const char* number) {
    return Options(
               {{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE", number}})
        .strategy;
  };
  EXPECT_EQ(stage("0"), ShardingStrategy::kNone);
  EXPECT_EQ(stage("1"), ShardingStrategy::kOptimizer);
  EXPECT_EQ(stage("2"), ShardingStrategy::kGradients);
  EXPECT_EQ(stage("3"), ShardingStrategy::kFull);
}

TEST(ReadEngineSettings, OverlapComm_IsOverlap) {
  const auto overlap = [](const std::string& zero) {
    const std::string file = TestPath("deepspeed.json");
    std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 1, )"
                        << R"("zero_optimization": {"stage": 3)" << zero << "}}";
    return Options(
               {{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_DEEPSPEED_CONFIG_FILE", file}})
        .overlap;
  };
  EXPECT_FALSE(overlap(""));
  EXPECT_TRUE(overlap(R"(, "overlap_comm": true)"));
  EXPECT_FALSE(overlap(R"(, "overlap_comm": false)"));
  EXPECT_FALSE(Options({{"ACCELERATE_USE_FSDP", "true"}}).overlap);
}

TEST(ReadEngineSettings, OffloadDevices_ArePlaces) {
  ShardingOptions options =
      Options({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_OFFLOAD_PARAMS", "true"}});
  EXPECT_EQ(options.offload_parameters, Offload::kCpu);
  EXPECT_EQ(options.offload_optimizer, Offload::kCpu);
  options = Options({{"ACCELERATE_USE_DEEPSPEED", "true"},
                     {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"}});
  EXPECT_EQ(options.offload_parameters, Offload::kNone);
  EXPECT_EQ(options.offload_optimizer, Offload::kCpu);
  options = Options({{"ACCELERATE_USE_DEEPSPEED", "true"},
                     {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/disk"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/other"}});
  EXPECT_EQ(options.offload_optimizer, Offload::kDisk);
  EXPECT_EQ(options.offload_optimizer_path, "/disk");
  EXPECT_EQ(options.offload_parameters, Offload::kDisk);
  EXPECT_EQ(options.offload_parameters_path, "/other");
}

TEST(ReadEngineSettings, OffloadOfParametersThatStayWhole_IsSaidToHaveNoEffect) {
  const absl::StatusOr<EngineSettings> settings = Read({{"ACCELERATE_USE_FSDP", "true"},
                                                        {"FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP"},
                                                        {"FSDP_OFFLOAD_PARAMS", "true"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->sharding.offload_parameters, Offload::kNone);
  EXPECT_EQ(settings->sharding.offload_optimizer, Offload::kCpu);
  EXPECT_THAT(settings->notes, Contains(HasSubstr("Parameters are not offloaded")));
}

TEST(ReadEngineSettings, IgnoredModules_AreAPattern) {
  EXPECT_EQ(Options({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_IGNORED_MODULES", "head|norm.*"}})
                .ignored_modules,
            "head|norm.*");
}

TEST(ReadEngineSettings, WhatTheEngineDoesNotHave_IsRefusedWithTheWayOut) {
  EXPECT_THAT(Error({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_ACTIVATION_CHECKPOINTING", "true"}}),
              HasSubstr("activation checkpointing"));
  EXPECT_THAT(
      Error({{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_GRADIENT_CLIPPING", "1.0"}}),
      HasSubstr("accelerator.clip_grad_norm_()"));
  EXPECT_THAT(Error({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_SHARDING_STRATEGY", "9"}}),
              HasSubstr("9"));
}

}  // namespace
}  // namespace muster::internal
