#include "client/config/deepspeed_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

TEST(DeepSpeedPlan, OtherAutos_AreRefused) {
  EXPECT_THAT(Error(R"(, "optimizer": {"type": "AdamW", "params": {"betas": "auto"}})"),
              HasSubstr("optimizer.params.betas"));
}

TEST(DeepSpeedPlan, FileThatDisagreesWithTheProcess_IsRefused) {
  EXPECT_TRUE(Plan(R"(, "gradient_accumulation_steps": 2, "bf16": {"enabled": true})").ok());
  EXPECT_THAT(Error(R"(, "gradient_accumulation_steps": 4)"),
              HasSubstr("has gradient_accumulation_steps 4, and the process 2"));
  EXPECT_THAT(Error(R"(, "bf16": {"enabled": false})"), HasSubstr("the process has bf16"));
}

}  // namespace
}  // namespace muster::client
