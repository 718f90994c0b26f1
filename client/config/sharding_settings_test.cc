#include "client/config/sharding_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/mutate.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;
using Use = SettingUse::Use;
using Strategy = ShardingSettings::Strategy;

// Returns everything that a plan contains.
std::string Words(const ShardingPlan& plan) {
  const ShardingSettings& s = plan.sharding;
  Json j = {static_cast<int>(s.strategy),
            s.reshard_after_forward,
            s.overlap,
            static_cast<int>(s.wrap),
            s.wrap_types,
            s.min_parameters,
            s.ignored_modules.value_or(""),
            static_cast<int>(s.offload_parameters),
            s.offload_parameters_path,
            static_cast<int>(s.offload_optimizer),
            s.offload_optimizer_path,
            s.activation_checkpointing,
            s.activation_offload,
            s.parameter_dtype.value_or(""),
            s.reduce_dtype.value_or(""),
            s.output_dtype.value_or(""),
            s.buffer_dtype.value_or(""),
            plan.mixed_precision,
            plan.gradient_clipping.value_or(-1),
            plan.gradient_accumulation_steps.value_or(-1),
            plan.micro_batch_size.value_or(-1),
            plan.train_batch_size.value_or(-1)};
  if (const auto& l = plan.loss_scale) {
    j.push_back({l->fixed, l->initial_power, l->window, l->hysteresis, l->minimum});
  }
  if (const auto& o = plan.optimizer) {
    j.push_back({o->type, o->lr.value_or(-1), o->weight_decay.value_or(-1), o->eps.value_or(-1),
                 o->beta1.value_or(-1), o->beta2.value_or(-1), o->momentum.value_or(-1),
                 o->nesterov.value_or(false)});
  }
  if (const auto& c = plan.scheduler) {
    j.push_back({c->type, c->logarithmic, c->min_lr.value_or(-1), c->max_lr.value_or(-1),
                 c->min_ratio.value_or(-1), c->cosine_min_ratio.value_or(-1),
                 c->warmup_steps.value_or(-1), c->total_steps.value_or(-1)});
  }
  return j.dump();
}

// Returns a config that is valid with any one of the known keys, with `key` set to `value`.
Json With(const std::string& key, const Json& value) {
  Json config = {{"zero_optimization",
                  {{"stage", 3},
                   {"offload_param", {{"device", "nvme"}, {"nvme_path", "/a"}}},
                   {"offload_optimizer", {{"device", "nvme"}, {"nvme_path", "/a"}}}}},
                 {"fp16", {{"enabled", key != "bf16.enabled"}}},
                 {"optimizer", {{"type", "AdamW"}, {"params", Json::object()}}},
                 {"scheduler", {{"type", "WarmupLR"}, {"params", Json::object()}}}};
  if (key == "optimizer.params.adam_w_mode") config["optimizer"]["type"] = "Adam";
  if (key == "optimizer.params.momentum" || key == "optimizer.params.nesterov") {
    config["optimizer"]["type"] = "SGD";
  }
  Json* node = &config;
  size_t from = 0;
  for (size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.', from)) {
    node = &(*node)[key.substr(from, dot - from)];
    from = dot + 1;
  }
  (*node)[key.substr(from)] = value;
  return config;
}

// Values of which at least one is valid for each mapped setting.
const std::vector<Json>& Values() {
  static const auto* const values = new std::vector<Json>{
      true,  5, 0.25, "cpu", "/path", "bf16", "linear", "SGD", "WarmupCosineLR", Json({0.5, 0.75}),
      false, 1};
  return *values;
}

TEST(MapDeepSpeed, WhatAccelerateAddsItself_IsNotNoted) {
  const auto plan = MapDeepSpeed(With("steps_per_print", "inf"));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->notes, testing::Not(testing::Contains(HasSubstr("steps_per_print"))));
}

TEST(MapDeepSpeed, EveryKnownKey_IsMappedNotedOrRefused) {
  std::set<std::string> keys;
  for (const SettingUse& use : DeepSpeedUses()) {
    SCOPED_TRACE(use.key);
    EXPECT_TRUE(keys.insert(use.key).second) << "twice";
    if (use.use == Use::kSection) continue;
    EXPECT_FALSE(use.text.empty());
    if (use.use == Use::kRefused) {
      const auto plan = MapDeepSpeed(With(use.key, 12345));
      ASSERT_FALSE(plan.ok());
      EXPECT_THAT(plan.status().message(), HasSubstr(use.key));
      EXPECT_THAT(plan.status().message(), HasSubstr(use.text));
      EXPECT_EQ(MapDeepSpeed(With(use.key, false)).ok(), use.off != true);
      EXPECT_TRUE(MapDeepSpeed(With(use.key, use.off)).ok());
    } else if (use.use == Use::kNoEffect) {
      const auto plan = MapDeepSpeed(With(use.key, 12345));
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_THAT(plan->notes, testing::Contains(HasSubstr(use.key)));
    } else if (use.key == "data_types.param_dtype") {
      // It changes nothing, but must agree with fp16 and bf16.
      EXPECT_TRUE(MapDeepSpeed(With(use.key, "fp16")).ok());
      EXPECT_FALSE(MapDeepSpeed(With(use.key, "bf16")).ok());
    } else {
      const auto without = MapDeepSpeed(With(use.key, nullptr));
      int effects = without.ok() ? 0 : 1;
      for (const Json& value : Values()) {
        const auto plan = MapDeepSpeed(With(use.key, value));
        if (plan.ok() && without.ok()) effects += Words(*plan) != Words(*without);
      }
      EXPECT_GT(effects, 0) << "ignored";
    }
  }
}

TEST(MapFsdp, EveryArgument_IsMappedNotedOrRefused) {
  std::vector<std::string> keys;
  const std::vector<Json> values = {true,
                                    false,
                                    5,
                                    1,
                                    "NO_SHARD",
                                    "fp16",
                                    "SIZE_BASED_WRAP",
                                    "lm_head",
                                    "BACKWARD_PRE",
                                    "SHARDED_STATE_DICT",
                                    "FULL_STATE_DICT",
                                    "Block"};
  for (const SettingUse& use : FsdpUses()) {
    SCOPED_TRACE(use.key);
    keys.push_back(use.key);
    int effects = 0;
    for (int version : {1, 2}) {
      Json base = {{"fsdp_version", version}, {"activation_checkpointing", true}};
      if (use.key == "auto_wrap_policy") base["min_num_params"] = 7;
      if (use.key == "min_num_params") base["auto_wrap_policy"] = "SIZE_BASED_WRAP";
      if (use.key == "transformer_cls_names_to_wrap") {
        base["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP";
      }
      // For a mapped setting returns the plan, for one without effect the notes on it.
      const auto mapped = [&use](const Json& arguments) -> std::string {
        const auto settings = ResolveFsdp(arguments, {}, "no");
        if (!settings.ok()) return "refused";
        const auto plan = MapFsdp(*settings);
        if (!plan.ok()) return "refused";
        std::vector<std::string> notes = plan->notes;
        if (use.use == Use::kNoEffect) {
          const auto is_of_another = [&use](const std::string& note) {
            return note.find(use.key + " has no effect") == std::string::npos;
          };
          notes.erase(std::remove_if(notes.begin(), notes.end(), is_of_another), notes.end());
          return Json(notes).dump();
        }
        // The version only decides which of the other settings count, as the notes say.
        return Words(*plan) + (use.key == "fsdp_version" ? Json(notes).dump() : "");
      };
      const std::string before = use.use == Use::kNoEffect ? "[]" : mapped(base);
      for (const Json& value : values) {
        Json arguments = base;
        arguments[use.key] = value;
        const std::string after = mapped(arguments);
        effects += after != before && after != "refused";
      }
    }
    EXPECT_GT(effects, 0) << "ignored";
  }
  EXPECT_THAT(keys, testing::UnorderedElementsAreArray(FsdpArgumentNames()));
}

TEST(MapFsdp, WhatTheEngineDoesInItsOwnWay_IsNoted) {
  const auto notes = [](const Json& arguments) {
    const auto plan = MapFsdp(ResolveFsdp(arguments, {}, "no").value());
    return plan.ok() ? plan->notes : std::vector<std::string>{plan.status().ToString()};
  };
  using testing::Contains;
  using testing::Not;
  for (const char* type : {"FULL_STATE_DICT", "SHARDED_STATE_DICT"}) {
    EXPECT_THAT(notes({{"state_dict_type", type}}),
                Contains(HasSubstr("state_dict_type has no effect: checkpoints hold whole")));
  }
  EXPECT_THAT(notes({{"sync_module_states", false}, {"cpu_ram_efficient_loading", false}}),
              Contains(HasSubstr("sync_module_states has no effect: all processes start")));
  EXPECT_THAT(notes({{"sync_module_states", true}, {"cpu_ram_efficient_loading", false}}),
              Not(Contains(HasSubstr("sync_module_states"))));
  EXPECT_THAT(notes({{"cpu_ram_efficient_loading", true}, {"sync_module_states", true}}),
              Contains(HasSubstr("cpu_ram_efficient_loading has no effect: each process")));
  EXPECT_THAT(notes({{"auto_wrap_policy", "NO_WRAP"}}),
              Contains(HasSubstr("entries of the model's lists")));
  EXPECT_THAT(notes({{"auto_wrap_policy", "SIZE_BASED_WRAP"}, {"min_num_params", 0}}),
              Contains(HasSubstr("entries of the model's lists")));
}

TEST(MapFsdp, Strategies_AreOurs) {
  FsdpSettings settings;
  const std::vector<Strategy> want = {Strategy::kFull, Strategy::kGradients, Strategy::kNone,
                                      Strategy::kHybrid, Strategy::kHybridGradients};
  for (int i = 0; i < 5; ++i) {
    settings.strategy = static_cast<FsdpSettings::Strategy>(i + 1);
    EXPECT_EQ(MapFsdp(settings)->sharding.strategy, want[i]);
  }
  settings = FsdpSettings();
  settings.version = 2;
  settings.reshard_after_forward = false;
  EXPECT_EQ(MapFsdp(settings)->sharding.strategy, Strategy::kFull);
  EXPECT_FALSE(MapFsdp(settings)->sharding.reshard_after_forward);
}

// Accelerate keeps each of them without checking it.
TEST(MapFsdp, ArgumentsThatNothingReads_AreRefusedByName) {
  const auto error = [](const Json& arguments) {
    const auto settings = ResolveFsdp(arguments, {}, "no");
    return settings.ok() ? std::string(MapFsdp(*settings).status().message())
                         : absl::StrCat("not resolved: ", settings.status().message());
  };
  EXPECT_THAT(error({{"transformer_cls_names_to_wrap", "A"}}),
              HasSubstr("set auto_wrap_policy to TRANSFORMER_BASED_WRAP"));
  const auto version2 = [&](const Json& strategy) {
    return error(
        {{"fsdp_version", 2}, {"reshard_after_forward", true}, {"sharding_strategy", strategy}});
  };
  EXPECT_THAT(version2("FULL_SHRD"), HasSubstr("sharding_strategy: \"FULL_SHRD\""));
  EXPECT_THAT(version2(9), HasSubstr("sharding_strategy: 9"));
  EXPECT_EQ(version2("full_shard"), "");
  EXPECT_EQ(version2(2), "");
}

TEST(MapFsdp, LocalStateDict_IsRefusedByName) {
  FsdpSettings settings;
  settings.state_dict = FsdpSettings::StateDict::kLocal;
  EXPECT_THAT(MapFsdp(settings).status().message(), HasSubstr("SHARDED_STATE_DICT"));
}

TEST(MapDeepSpeed, UnknownKeys_AreRefusedWithASuggestion) {
  EXPECT_THAT(MapDeepSpeed({{"gradient_cliping", 1.0}}).status().message(),
              HasSubstr("did you mean gradient_clipping?"));
  EXPECT_THAT(MapDeepSpeed({{"zero_optimization", {{"stag", 1}}}}).status().message(),
              HasSubstr("did you mean zero_optimization.stage?"));
}

TEST(MapDeepSpeed, Values_AreChecked) {
  const auto error = [](const Json& config) {
    return std::string(MapDeepSpeed(config).status().message());
  };
  EXPECT_THAT(error({{"zero_optimization", {{"stage", 4}}}}), HasSubstr("0, 1, 2 or 3"));
  EXPECT_THAT(
      error({{"zero_optimization", {{"stage", 2}, {"offload_param", {{"device", "cpu"}}}}}}),
      HasSubstr("needs zero_optimization.stage 3"));
  EXPECT_THAT(
      error({{"zero_optimization", {{"stage", 3}, {"offload_param", {{"device", "nvme"}}}}}}),
      HasSubstr("nvme_path"));
  EXPECT_THAT(error({{"optimizer", {{"type", "Lamb"}}}}), HasSubstr("set AdamW"));
  const auto adam = [](const Json& correction) -> Json {
    return {{"optimizer", {{"type", "Adam"}, {"params", {{"bias_correction", correction}}}}}};
  };
  EXPECT_THAT(error(adam(false)), HasSubstr("optimizer.params.bias_correction: false cannot be"));
  EXPECT_EQ(error(adam(true)), "");
  EXPECT_THAT(error({{"scheduler", {{"type", "OneCycle"}}}}), HasSubstr("WarmupDecayLR"));
  EXPECT_THAT(error({{"fp16", {{"enabled", true}}}, {"bf16", {{"enabled", true}}}}),
              HasSubstr("choose one"));
  EXPECT_THAT(error({{"train_batch_size", 0}}), HasSubstr("at least 1"));
  EXPECT_THAT(error({{"gradient_clipping", "auto"}}), HasSubstr("gradient_clipping must be a"));
  EXPECT_THAT(error({{"optimizer", {{"type", "AdamW"}, {"params", {{"lr", "auto"}}}}}}),
              HasSubstr("optimizer.params.lr"));
  EXPECT_THAT(error(7), HasSubstr("an object"));
}

// There the parameters have this type and nothing casts the outputs; buffers stay.
TEST(MapDeepSpeed, MixedPrecision_IsThatOfOutputsAndNotOfBuffers) {
  const auto sharding = [](const Json& config) {
    const auto plan = MapDeepSpeed(config);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? plan->sharding : ShardingSettings();
  };
  for (const int stage : {0, 1, 2, 3}) {
    const ShardingSettings bf16 =
        sharding({{"zero_optimization", {{"stage", stage}}}, {"bf16", {{"enabled", true}}}});
    EXPECT_EQ(bf16.output_dtype, "bfloat16");
    EXPECT_FALSE(bf16.buffer_dtype.has_value());
  }
  EXPECT_EQ(sharding({{"fp16", {{"enabled", true}}}}).output_dtype, "float16");
  EXPECT_FALSE(sharding({{"bf16", {{"enabled", false}}}}).output_dtype.has_value());
  for (const char* name : {"bf16", "bfloat16", "torch.bfloat16"}) {
    EXPECT_EQ(sharding({{"data_types", {{"buffer_dtype", name}}}}).buffer_dtype, "bfloat16");
  }
  const auto error = [](const Json& types) {
    return std::string(
        MapDeepSpeed({{"bf16", {{"enabled", true}}}, {"data_types", types}}).status().message());
  };
  EXPECT_THAT(error({{"buffer_dtype", "int8"}}), HasSubstr("must be fp32, fp16 or bf16"));
  EXPECT_THAT(error({{"param_dtype", "fp32"}}), HasSubstr("that of fp16.enabled or bf16.enabled"));
  EXPECT_EQ(error({{"param_dtype", "bf16"}, {"keep_in_fp32_modules", "auto"}}), "");
  EXPECT_EQ(error({{"keep_in_fp32_modules", Json::array()}}), "");
  EXPECT_THAT(error({{"keep_in_fp32_modules", Json({"rotary"})}}), HasSubstr("remove it"));
}

// DeepSpeed skips steps in bf16 whose gradients are not finite, unless the config says otherwise.
TEST(MapDeepSpeed, StepsInBf16ThatAreNotSkipped_AreNoted) {
  const auto notes = [](const Json& section) {
    const auto plan = MapDeepSpeed({{"bf16", section}});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? plan->notes : std::vector<std::string>();
  };
  const auto is_said = testing::Contains(HasSubstr("bf16.check_grad_overflow has no effect"));
  EXPECT_THAT(notes({{"enabled", true}}), is_said);
  EXPECT_THAT(notes({{"enabled", true}, {"check_grad_overflow", false}}), testing::Not(is_said));
  EXPECT_THAT(notes({{"enabled", false}}), testing::Not(is_said));
  EXPECT_FALSE(MapDeepSpeed({{"bf16", {{"enabled", true}, {"check_grad_overflow", true}}}}).ok());
}

// Accelerate adds a section bf16, so that DeepSpeed does not read the one with the former name.
TEST(MapDeepSpeed, FormerNameOfBf16_IsRefusedByName) {
  EXPECT_THAT(MapDeepSpeed({{"bfloat16", {{"enabled", true}}}}).status().message(),
              HasSubstr("bfloat16: {\"enabled\":true} cannot be honoured; its name is bf16"));
  EXPECT_TRUE(MapDeepSpeed({{"bfloat16", {{"enabled", false}}}}).ok());
}

TEST(MapDeepSpeed, ClippingWithoutEnd_ClipsNothingAndNoNumberIsRefused) {
  const auto plan = MapDeepSpeed({{"gradient_clipping", "inf"}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->gradient_clipping.has_value());
  for (const char* number : {"nan", "-inf"}) {
    EXPECT_THAT(MapDeepSpeed({{"gradient_clipping", number}}).status().message(),
                HasSubstr("gradient_clipping must be a number of at least 0"));
  }
}

TEST(MapDeepSpeed, NullSections_AreAbsentExceptThatOfZero) {
  for (const char* section : {"fp16", "bf16", "data_types", "optimizer", "scheduler"}) {
    EXPECT_TRUE(MapDeepSpeed({{section, nullptr}}).ok()) << section;
  }
  EXPECT_THAT(MapDeepSpeed({{"zero_optimization", nullptr}}).status().message(),
              HasSubstr("zero_optimization must be an object with its stage"));
}

TEST(MapDeepSpeed, AutoBatchSizes_AreLeftOpen) {
  const auto plan = MapDeepSpeed({{"train_batch_size", "auto"}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->train_batch_size);
}

// People write 5e8 and 1e3, which JSON reads as floats.
TEST(MapDeepSpeed, WholeNumbersWithAnExponent_AreWholeNumbers) {
  const auto plan = MapDeepSpeed(
      {{"train_batch_size", 64.0},
       {"fp16", {{"enabled", true}, {"loss_scale_window", 1e3}, {"initial_scale_power", 16.0}}},
       {"scheduler", {{"type", "WarmupDecayLR"}, {"params", {{"total_num_steps", 1e4}}}}}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->train_batch_size, 64);
  EXPECT_EQ(plan->loss_scale->window, 1000);
  EXPECT_EQ(plan->loss_scale->initial_power, 16);
  EXPECT_EQ(plan->scheduler->total_steps, 10'000);
  for (const double broken : {1000.5, 1e300}) {
    EXPECT_THAT(MapDeepSpeed({{"train_batch_size", broken}}).status().message(),
                HasSubstr("train_batch_size must be a whole number"));
  }
}

TEST(MapDeepSpeed, MutatedConfigs_AreMappedOrRefused) {
  const std::string seed = With("gradient_clipping", 1.0).dump();
  std::mt19937_64 random(20261123);
  int mapped = 0;
  for (int round = 0; round < 5000; ++round) {
    const Json config = Json::parse(Mutate(seed, random), nullptr, false);
    if (!config.is_discarded()) mapped += MapDeepSpeed(config).ok() ? 1 : 0;
  }
  EXPECT_GT(mapped, 0);
}

}  // namespace
}  // namespace muster::client
