#include "muster/internal/engine_settings.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::internal {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

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

// Version 1 has a dtype of buffers, version 2 one of outputs.
TEST(ReadEngineSettings, FsdpUnderMixedPrecision_ConvertsBuffersOrOutputs) {
  for (const auto& [precision, dtype] :
       {std::pair{"bf16", c10::ScalarType::BFloat16}, std::pair{"fp16", c10::ScalarType::Half}}) {
    const absl::StatusOr<EngineSettings> one = Read({{"ACCELERATE_USE_FSDP", "true"}}, precision);
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_EQ(one->sharding.buffer_dtype, dtype);
    EXPECT_FALSE(one->sharding.output_dtype.has_value());
    const absl::StatusOr<EngineSettings> two =
        Read({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_VERSION", "2"}}, precision);
    ASSERT_TRUE(two.ok()) << two.status();
    EXPECT_EQ(two->sharding.output_dtype, dtype);
    EXPECT_FALSE(two->sharding.buffer_dtype.has_value());
    for (const auto& settings : {*one, *two}) {
      EXPECT_THAT(settings.notes, testing::Each(testing::Not(testing::HasSubstr("dtype"))));
      EXPECT_THAT(settings.notes, testing::Each(testing::Not(testing::HasSubstr("float32"))));
    }
  }
  const ShardingOptions plain = Options({{"ACCELERATE_USE_FSDP", "true"}});
  EXPECT_FALSE(plain.buffer_dtype.has_value());
  EXPECT_FALSE(plain.output_dtype.has_value());
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
  EXPECT_EQ(options.offload_gradients, Offload::kNone) << "they go with the parameters";
  options = Options({{"ACCELERATE_USE_DEEPSPEED", "true"},
                     {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"}});
  EXPECT_EQ(options.offload_parameters, Offload::kNone);
  EXPECT_EQ(options.offload_optimizer, Offload::kCpu);
  EXPECT_EQ(options.offload_gradients, Offload::kCpu);
  options = Options({{"ACCELERATE_USE_DEEPSPEED", "true"},
                     {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme"},
                     {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/disk"}});
  EXPECT_EQ(options.offload_gradients, Offload::kDisk);
  EXPECT_EQ(options.offload_gradients_path, "/disk");
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
  EXPECT_EQ(settings->sharding.offload_gradients, Offload::kCpu);
  EXPECT_THAT(settings->notes, Contains(HasSubstr("Parameters are not offloaded")));
  EXPECT_THAT(settings->notes, Not(Contains(HasSubstr("gradients stay on the device"))));
}

TEST(ReadEngineSettings, OffloadOfGradientsThatStayWhole_IsSaidToHaveNoEffect) {
  const absl::StatusOr<EngineSettings> settings = Read({{"ACCELERATE_USE_FSDP", "true"},
                                                        {"FSDP_SHARDING_STRATEGY", "NO_SHARD"},
                                                        {"FSDP_OFFLOAD_PARAMS", "true"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->sharding.offload_gradients, Offload::kNone);
  EXPECT_THAT(settings->notes, Contains(HasSubstr("gradients stay on the device")));
}

TEST(ReadEngineSettings, IgnoredModules_AreAPattern) {
  EXPECT_EQ(Options({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_IGNORED_MODULES", "head|norm.*"}})
                .ignored_modules,
            "head|norm.*");
}

// Returns the result of Read() for a DeepSpeed config of stage 2 and `rest`.
absl::StatusOr<EngineSettings> ReadFile(const std::string& rest,
                                        const std::string& mixed_precision = "no") {
  const std::string file = TestPath("deepspeed.json");
  std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 1, )"
                      << R"("zero_optimization": {"stage": 2})" << rest << "}";
  return Read({{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_DEEPSPEED_CONFIG_FILE", file}},
              mixed_precision);
}

std::string ErrorOfFile(const std::string& rest) {
  return std::string(ReadFile(rest).status().message());
}

TEST(ReadEngineSettings, ActivationCheckpointing_IsOfTheUnits) {
  absl::StatusOr<EngineSettings> settings =
      Read({{"ACCELERATE_USE_FSDP", "true"},
            {"FSDP_VERSION", "2"},
            {"FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"},
            {"FSDP_TRANSFORMER_CLS_TO_WRAP", "Block"},
            {"FSDP_ACTIVATION_CHECKPOINTING", "true"},
            {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_TRUE(settings->activation_checkpointing);
  EXPECT_TRUE(settings->activation_offload);
  EXPECT_THAT(settings->sharding.unit_types, ElementsAre("Block"));
  settings = Read({{"ACCELERATE_USE_FSDP", "true"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_FALSE(settings->activation_checkpointing);
  EXPECT_FALSE(settings->activation_offload);
}

TEST(ReadEngineSettings, GradientClipping_IsThatOfTheConfig) {
  absl::StatusOr<EngineSettings> settings =
      Read({{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_GRADIENT_CLIPPING", "0.5"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->gradient_clipping, 0.5);
  settings = ReadFile(R"(, "gradient_clipping": 2)");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->gradient_clipping, 2);
  settings = ReadFile(R"(, "gradient_clipping": "auto")");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->gradient_clipping, 1.0);
  settings = ReadFile("");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_FALSE(settings->gradient_clipping.has_value());
}

TEST(ReadEngineSettings, MoeLayersOfDeepSpeed_StayInOnePiece) {
  const absl::StatusOr<EngineSettings> settings =
      Read({{"ACCELERATE_USE_DEEPSPEED", "true"},
            {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
            {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "SparseBlock"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_THAT(settings->sharding.no_split, ElementsAre("SparseBlock"));
}

TEST(ReadEngineSettings, LossScale_IsThatOfDeepSpeed) {
  absl::StatusOr<EngineSettings> settings = ReadFile(R"(, "fp16": {"enabled": true})", "fp16");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->grad_scaler,
            (GradScalerOptions{
                .init_scale = 65536, .growth_interval = 1000, .hysteresis = 2, .min_scale = 1}));
  settings = ReadFile(R"(, "fp16": {"enabled": true, "loss_scale": 0, )"
                      R"("initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 4, )"
                      R"("min_loss_scale": 2})",
                      "fp16");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->grad_scaler,
            (GradScalerOptions{
                .init_scale = 256, .growth_interval = 50, .hysteresis = 4, .min_scale = 2}));
  settings = ReadFile(R"(, "fp16": {"enabled": true, "loss_scale": 128})", "fp16");
  ASSERT_TRUE(settings.ok()) << settings.status();
  ASSERT_TRUE(settings->grad_scaler.has_value());
  EXPECT_FALSE(settings->grad_scaler->dynamic);
  EXPECT_EQ(settings->grad_scaler->init_scale, 128);
  settings = ReadFile(R"(, "bf16": {"enabled": true})", "bf16");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_FALSE(settings->grad_scaler.has_value());
}

TEST(ReadEngineSettings, PrecisionOfDeepSpeed_IsThatOfOutputs) {
  absl::StatusOr<EngineSettings> settings =
      ReadFile(R"(, "bf16": {"enabled": true}, "data_types": {"buffer_dtype": "bf16"})", "bf16");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->sharding.output_dtype, c10::ScalarType::BFloat16);
  EXPECT_EQ(settings->sharding.buffer_dtype, c10::ScalarType::BFloat16);
  settings = ReadFile("", "no");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_FALSE(settings->sharding.output_dtype.has_value());
}

TEST(ReadEngineSettings, WhatTheEngineDoesNotHave_IsRefusedWithTheWayOut) {
  EXPECT_THAT(Error({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_SHARDING_STRATEGY", "9"}}),
              HasSubstr("9"));
  EXPECT_THAT(ErrorOfFile(R"(, "optimizer": {"type": "OneBitAdam"})"), HasSubstr("set AdamW"));
  EXPECT_THAT(ErrorOfFile(R"(, "optimizer": {"type": "AdamW", "params": {"amsgrad": true}})"),
              HasSubstr("optimizer.params.amsgrad"));
  EXPECT_THAT(ErrorOfFile(R"(, "scheduler": {"type": "OneCycle"})"), HasSubstr("WarmupDecayLR"));
  // Accelerate leaves such an "auto" unfilled.
  EXPECT_THAT(ErrorOfFile(R"(, "optimizer": {"type": "AdamW", "params": {"eps": "auto"}})"),
              HasSubstr("optimizer.params.eps"));
}

// DeepSpeed takes these settings from its config; here the process has them from elsewhere.
TEST(ReadEngineSettings, LoopThatTheConfigSaysOtherwise_IsRefused) {
  EXPECT_THAT(ErrorOfFile(R"(, "gradient_accumulation_steps": 4)"),
              HasSubstr("has gradient_accumulation_steps 4, and the process has 1"));
  EXPECT_TRUE(ReadFile(R"(, "gradient_accumulation_steps": "auto")").ok());
  EXPECT_TRUE(ReadFile(R"(, "gradient_accumulation_steps": 1)").ok());
  EXPECT_THAT(
      ErrorOfFile(R"(, "fp16": {"enabled": true})"),
      HasSubstr("mixed precision fp16 (fp16.enabled, bf16.enabled), and the process has no"));
  EXPECT_THAT(std::string(ReadFile(R"(, "bf16": {"enabled": false})", "bf16").status().message()),
              HasSubstr("asks for mixed precision no"));
  EXPECT_TRUE(ReadFile(R"(, "bf16": {"enabled": "auto"})", "bf16").ok());
  EXPECT_TRUE(ReadFile("", "bf16").ok());
  // As always, an option of the program wins over a variable.
  EXPECT_TRUE(
      Read({{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"}})
          .ok());
}

TEST(ReadEngineSettings, WhatHasNoEffect_IsSaid) {
  const std::string file = TestPath("deepspeed.json");
  std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 3, "zero_optimization": )"
                      << R"({"stage": 3, "stage3_param_persistence_threshold": 100, )"
                      << R"("reduce_bucket_size": 1000}})";
  const absl::StatusOr<EngineSettings> settings =
      Read({{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_DEEPSPEED_CONFIG_FILE", file}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_THAT(settings->notes, Contains(HasSubstr("reduce_bucket_size has no effect")));
  EXPECT_THAT(settings->notes, Contains(HasSubstr("persistence_threshold has no effect")));
  EXPECT_THAT(settings->notes, Contains(HasSubstr("Batches are as large as")));
}

// The variables of Accelerate's launcher for FSDP: a different value of any of them either changes
// the result or is noted.
TEST(ReadEngineSettings, NoVariableOfFsdp_IsIgnoredInSilence) {
  const auto words = [](const Variables& more) {
    Variables all = {{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_ACTIVATION_CHECKPOINTING", "true"}};
    for (const auto& [name, value] : more) all[name] = value;
    const absl::StatusOr<EngineSettings> settings = Read(all, "bf16");
    EXPECT_TRUE(settings.ok()) << settings.status();
    const ShardingOptions& sharding = settings->sharding;
    return absl::StrCat(static_cast<int>(sharding.strategy), " ", sharding.group_size, " ",
                        sharding.reshard_after_forward, " ",
                        static_cast<int>(sharding.offload_parameters), " ",
                        absl::StrJoin(sharding.unit_types, ","), " ", sharding.min_unit_parameters,
                        " ", sharding.ignored_modules, " ", settings->activation_checkpointing,
                        settings->activation_offload, " ", absl::StrJoin(settings->notes, "\n"));
  };
  struct Setting {
    Variables one, other;
  };
  for (const Setting& setting : std::vector<Setting>{
           {{{"FSDP_SHARDING_STRATEGY", "FULL_SHARD"}},
            {{"FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP"}}},
           {{{"FSDP_VERSION", "2"}, {"FSDP_RESHARD_AFTER_FORWARD", "true"}},
            {{"FSDP_VERSION", "2"}, {"FSDP_RESHARD_AFTER_FORWARD", "false"}}},
           {{{"FSDP_OFFLOAD_PARAMS", "true"}}, {{"FSDP_OFFLOAD_PARAMS", "false"}}},
           {{{"FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"}}, {}},
           {{{"FSDP_FORWARD_PREFETCH", "true"}}, {{"FSDP_FORWARD_PREFETCH", "false"}}},
           {{{"FSDP_USE_ORIG_PARAMS", "true"}}, {{"FSDP_USE_ORIG_PARAMS", "false"}}},
           {{{"FSDP_SYNC_MODULE_STATES", "true"}, {"FSDP_CPU_RAM_EFFICIENT_LOADING", "false"}},
            {{"FSDP_SYNC_MODULE_STATES", "false"}, {"FSDP_CPU_RAM_EFFICIENT_LOADING", "false"}}},
           {{{"FSDP_CPU_RAM_EFFICIENT_LOADING", "true"}, {"FSDP_SYNC_MODULE_STATES", "true"}},
            {{"FSDP_CPU_RAM_EFFICIENT_LOADING", "false"}, {"FSDP_SYNC_MODULE_STATES", "true"}}},
           {{{"FSDP_AUTO_WRAP_POLICY", "NO_WRAP"}},
            {{"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"}, {"FSDP_MIN_NUM_PARAMS", "5"}}},
           {{{"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"}, {"FSDP_MIN_NUM_PARAMS", "0"}},
            {{"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"}, {"FSDP_MIN_NUM_PARAMS", "5"}}},
           {{{"FSDP_IGNORED_MODULES", "head"}}, {}},
           {{{"FSDP_ACTIVATION_CHECKPOINTING", "true"}},
            {{"FSDP_ACTIVATION_CHECKPOINTING", "false"}}}}) {
    EXPECT_NE(words(setting.one), words(setting.other)) << setting.one.rbegin()->first;
  }
  // Both kinds of checkpoint are the same here, so a note names both.
  for (const char* type : {"FULL_STATE_DICT", "SHARDED_STATE_DICT"}) {
    EXPECT_THAT(words({{"FSDP_STATE_DICT_TYPE", type}}),
                HasSubstr("state_dict_type has no effect"));
  }
}

TEST(ReadEngineSettings, OptimizerAndScheduler_AreForTheProgramToMake) {
  absl::StatusOr<EngineSettings> settings = ReadFile(
      R"(, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}, )"
      R"("scheduler": {"type": "WarmupDecayLR", )"
      R"("params": {"warmup_num_steps": 10, "total_num_steps": "auto"}})");
  ASSERT_TRUE(settings.ok()) << settings.status();
  ASSERT_TRUE(settings->configured.optimizer.has_value());
  EXPECT_EQ(settings->configured.optimizer->type, "AdamW");
  EXPECT_EQ(settings->configured.optimizer->beta2, 0.95);
  EXPECT_FALSE(settings->configured.optimizer->lr.has_value());
  ASSERT_TRUE(settings->configured.scheduler.has_value());
  EXPECT_EQ(settings->configured.scheduler->warmup_steps, 10);
  EXPECT_THAT(settings->configured.autos,
              ElementsAre("optimizer.params.lr", "scheduler.params.total_num_steps"));
  settings = ReadFile("");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_FALSE(settings->configured.optimizer.has_value());
  EXPECT_FALSE(settings->configured.scheduler.has_value());
}

}  // namespace
}  // namespace muster::internal
