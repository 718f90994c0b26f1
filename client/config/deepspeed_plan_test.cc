#include "client/config/deepspeed_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace muster::client {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

absl::StatusOr<DeepSpeedPlan> Plan(const std::string& more) {
  return PlanDeepSpeed(
      {{"ACCELERATE_USE_DEEPSPEED", "true"},
       {"ACCELERATE_DEEPSPEED_CONFIG_FILE", "{\"zero_optimization\": {\"stage\": 2}" + more + "}"}},
      {.mixed_precision = "bf16", .gradient_accumulation_steps = 2});
}
std::string Error(const std::string& more) { return std::string(Plan(more).status().message()); }

TEST(DeepSpeedPlan, WhatTheProgramFillsIn_IsTakenOutAndNamed) {
  const auto planned = Plan(
      R"(, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
          "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})");
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_THAT(planned->autos,
              ElementsAre("optimizer.params.lr", "scheduler.params.total_num_steps"));
  EXPECT_FALSE(planned->plan.optimizer->lr.has_value());
  EXPECT_EQ(planned->plan.optimizer->weight_decay, 0.1);
}

// The usual files for ZeRO stages 2 and 3.
TEST(DeepSpeedPlan, SizesThatAreAutoOrHaveAnExponent_AreTaken) {
  const auto plan = [](const std::string& section) {
    return PlanDeepSpeed(
        {{"ACCELERATE_DEEPSPEED_CONFIG_FILE", "{\"zero_optimization\": {" + section + "}}"}}, {});
  };
  auto planned = plan(R"("stage": 2, "reduce_bucket_size": 2e8, "allgather_bucket_size": 2e8)");
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->plan.sharding.strategy, ShardingSettings::Strategy::kGradients);
  EXPECT_THAT(planned->plan.notes, Contains(HasSubstr("reduce_bucket_size has no effect")));
  planned = plan(
      R"("stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9)");
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->plan.sharding.strategy, ShardingSettings::Strategy::kFull);
}

TEST(DeepSpeedPlan, AutoClipping_Is1InAFileAndNoneWithoutOne) {
  EXPECT_EQ(Plan(R"(, "gradient_clipping": "auto")")->plan.gradient_clipping, 1.0);
  EXPECT_EQ(Plan(R"(, "gradient_clipping": 0.5)")->plan.gradient_clipping, 0.5);
  EXPECT_EQ(Plan("")->plan.gradient_clipping, std::nullopt);
  const auto from = [](std::map<std::string, std::string> variables) {
    variables["ACCELERATE_USE_DEEPSPEED"] = "true";
    return PlanDeepSpeed(variables, {})->plan.gradient_clipping;
  };
  EXPECT_EQ(from({}), std::nullopt);
  EXPECT_EQ(from({{"ACCELERATE_GRADIENT_CLIPPING", "auto"}}), std::nullopt);
  EXPECT_EQ(from({{"ACCELERATE_GRADIENT_CLIPPING", "0.7"}}), 0.7);
  // A number from outside of the file fills in its "auto", as with Accelerate.
  EXPECT_EQ(from({{"ACCELERATE_GRADIENT_CLIPPING", "0.7"},
                  {"ACCELERATE_DEEPSPEED_CONFIG_FILE",
                   R"({"zero_optimization": {}, "gradient_clipping": "auto"})"}}),
            0.7);
}

TEST(DeepSpeedPlan, FlagToDivideTheModelWhereItIsMade_IsNoted) {
  const auto notes = [](const std::string& flag) {
    return PlanDeepSpeed({{"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
                          {"ACCELERATE_DEEPSPEED_ZERO3_INIT", flag},
                          {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", flag}},
                         {})
        ->plan.notes;
  };
  EXPECT_THAT(notes("true"), Contains(HasSubstr("zero3_init_flag has no effect")));
  EXPECT_THAT(notes("true"), Contains(HasSubstr("weights_on_model_save has no effect")));
  EXPECT_THAT(notes("false"), Not(Contains(HasSubstr("zero3_init_flag"))));
  EXPECT_THAT(notes("false"), Not(Contains(HasSubstr("weights_on_model_save"))));
}

TEST(DeepSpeedPlan, MoeLayers_StayInOnePiece) {
  const auto planned = PlanDeepSpeed(
      {{"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
       {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "MixtralSparseMoeBlock, JetMoEBlock"}},
      {});
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_THAT(planned->plan.sharding.no_split, ElementsAre("MixtralSparseMoeBlock", "JetMoEBlock"));
}

TEST(DeepSpeedPlan, OtherAutos_AreRefused) {
  EXPECT_THAT(Error(R"(, "optimizer": {"type": "AdamW", "params": {"betas": "auto"}})"),
              HasSubstr("optimizer.params.betas"));
}

TEST(DeepSpeedPlan, FileThatDisagreesWithTheProcess_IsRefused) {
  EXPECT_TRUE(Plan(R"(, "gradient_accumulation_steps": 2, "bf16": {"enabled": true})").ok());
  EXPECT_THAT(Error(R"(, "gradient_accumulation_steps": 4)"),
              HasSubstr("has gradient_accumulation_steps 4, and the process has 2"));
  EXPECT_THAT(Error(R"(, "bf16": {"enabled": false})"), HasSubstr("the process has bf16"));
}

// Accelerate silently trains such a job in fp32.
TEST(DeepSpeedPlan, NullSectionOfTheProcesssPrecision_IsRefused) {
  EXPECT_THAT(Error(R"(, "bf16": null)"),
              HasSubstr("asks for mixed precision no (fp16.enabled, bf16.enabled), and the process "
                        "has bf16"));
  EXPECT_TRUE(Plan(R"(, "gradient_accumulation_steps": 2, "fp16": null)").ok());
}

TEST(DeepSpeedPlan, ClippingThatIsNotFinite_IsNoneOrRefused) {
  const auto plan = [](const std::string& clipping) {
    return PlanDeepSpeed({{"ACCELERATE_GRADIENT_CLIPPING", clipping}}, {});
  };
  ASSERT_TRUE(plan("inf").ok()) << plan("inf").status();
  EXPECT_FALSE(plan("inf")->plan.gradient_clipping.has_value());
  EXPECT_THAT(plan("nan").status().message(), HasSubstr("gradient_clipping must be a number"));
}

// With Accelerate, only the file counts, silently.
TEST(DeepSpeedPlan, FlagThatTheFileContradicts_IsRefused) {
  const auto error = [](const std::string& variable, const std::string& value,
                        const std::string& more) {
    return std::string(PlanDeepSpeed({{"ACCELERATE_DEEPSPEED_CONFIG_FILE",
                                       R"({"zero_optimization": {"stage": 2)" + more},
                                      {variable, value}},
                                     {})
                           .status()
                           .message());
  };
  EXPECT_EQ(error("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", "}}"),
            "the DeepSpeed config has 2 as zero_optimization/stage, and --zero_stage "
            "(ACCELERATE_DEEPSPEED_ZERO_STAGE) is 3: leave that out, or write it or \"auto\" into "
            "the config");
  EXPECT_EQ(error("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2", "}}"), "");
  const char* const kClipping = "ACCELERATE_GRADIENT_CLIPPING";
  EXPECT_THAT(error(kClipping, "1.0", "}}"), HasSubstr("has 0 as gradient_clipping"));
  EXPECT_EQ(error(kClipping, "1.0", R"(}, "gradient_clipping": 1})"), "");
  EXPECT_EQ(error(kClipping, "1.0", R"(}, "gradient_clipping": "auto"})"), "");
  EXPECT_EQ(error(kClipping, "0", "}}"), "");
  const char* const kDevice = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE";
  EXPECT_THAT(error(kDevice, "cpu", "}}"), HasSubstr("has \"none\" as"));
  EXPECT_EQ(error(kDevice, "cpu", R"(, "offload_optimizer": {"device": "cpu"}}})"), "");
  EXPECT_EQ(error(kDevice, "none", R"(, "offload_optimizer": null}})"), "");
}

}  // namespace
}  // namespace muster::client
