#include "client/config/engine_flags.h"

#include <iterator>
#include <set>

#include "client/config/accelerate_launch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;

using Flags = std::map<std::string, std::string>;

// Returns the variables, or the error under "".
Flags VariablesFor(const Flags& given, std::vector<Layer> layers = {{}, {}, {}}) {
  const absl::Status status = ApplyEngineFlags(given, &layers);
  if (!status.ok()) return {{"", std::string(status.message())}};
  Flags variables;
  for (const auto& [name, value] : layers[0].env) variables[name] = value.text;
  return variables;
}

TEST(EngineFlags, None_SetsNothing) {
  EXPECT_TRUE(VariablesFor({}).empty());
  EXPECT_TRUE(VariablesFor({{"num_processes", "2"}, {"use_fsdp", "false"}}).empty());
}

TEST(EngineFlags, Fsdp_IsWhatAcceleratesLauncherSets) {
  const Flags got = VariablesFor({{"use_fsdp", "true"},
                                  {"fsdp_version", "2"},
                                  {"fsdp_reshard_after_forward", "false"},
                                  {"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"},
                                  {"fsdp_transformer_layer_cls_to_wrap", "Block"}});
  EXPECT_EQ(got.count(""), 0u) << got.at("");
  EXPECT_EQ(got.at("ACCELERATE_USE_FSDP"), "true");
  EXPECT_EQ(got.at("FSDP_VERSION"), "2");
  EXPECT_EQ(got.at("FSDP_RESHARD_AFTER_FORWARD"), "false");
  EXPECT_EQ(got.at("FSDP_TRANSFORMER_CLS_TO_WRAP"), "Block");
  // No other variables that the launcher sets.
  EXPECT_EQ(got.count("ACCELERATE_MIXED_PRECISION"), 0u);
  EXPECT_EQ(got.count("ACCELERATE_DYNAMO_BACKEND"), 0u);
  EXPECT_EQ(got.count("MASTER_ADDR"), 0u);
}

TEST(EngineFlags, Deepspeed_IsWhatAcceleratesLauncherSets) {
  const Flags got = VariablesFor({{"use_deepspeed", "true"}, {"zero_stage", "3"}});
  EXPECT_EQ(got.count(""), 0u) << got.at("");
  EXPECT_EQ(got.at("ACCELERATE_USE_DEEPSPEED"), "true");
  EXPECT_EQ(got.at("ACCELERATE_DEEPSPEED_ZERO_STAGE"), "3");
}

TEST(EngineFlags, EveryFlag_ReachesTheProcesses) {
  for (const AccelerateFlag& flag : AccelerateEngineFlags()) {
    SCOPED_TRACE(flag.name);
    if (flag.name == "use_fsdp" || flag.name == "use_deepspeed") continue;
    const char* const engine = flag.name.rfind("fsdp_", 0) == 0 ? "use_fsdp" : "use_deepspeed";
    std::set<Flags> outcomes = {VariablesFor({{engine, "true"}})};
    for (const char* value : {"true", "false", "7", "2", "/nvme"}) {
      outcomes.insert(VariablesFor({{engine, "true"}, {flag.name, value}}));
    }
    for (auto outcome = outcomes.begin(); outcome != outcomes.end();) {
      outcome = outcome->count("") > 0 ? outcomes.erase(outcome) : std::next(outcome);
    }
    EXPECT_GT(outcomes.size(), 1u) << "lost";
  }
}

TEST(EngineFlags, PathsToOffloadTo_ReachTheProcesses) {
  const Flags got = VariablesFor({{"use_deepspeed", "true"},
                                  {"zero_stage", "3"},
                                  {"offload_param_device", "nvme"},
                                  {"offload_param_nvme_path", "/a"},
                                  {"offload_optimizer_device", "nvme"},
                                  {"offload_optimizer_nvme_path", "/b"}});
  EXPECT_EQ(got.count(""), 0u) << got.at("");
  EXPECT_EQ(got.at("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"), "/a");
  EXPECT_EQ(got.at("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"), "/b");
}

TEST(EngineFlags, WhatWouldBeIgnored_IsRefused) {
  const auto error = [](const Flags& given, std::vector<Layer> layers = {{}, {}, {}}) {
    const Flags got = VariablesFor(given, std::move(layers));
    return got.count("") > 0 ? got.at("") : "no error";
  };
  EXPECT_THAT(error({{"fsdp_version", "2"}}), HasSubstr("no effect without --use_fsdp"));
  EXPECT_THAT(error({{"zero_stage", "2"}}), HasSubstr("no effect without --use_deepspeed"));
  EXPECT_THAT(error({{"use_fsdp", "true"}, {"zero_stage", "2"}}),
              HasSubstr("--zero_stage is a setting of --use_deepspeed"));
  EXPECT_THAT(error({{"use_fsdp", "true"}, {"use_deepspeed", "true"}}), HasSubstr("one of them"));
  EXPECT_THAT(error({{"use_fsdp", "perhaps"}}), HasSubstr("--use_fsdp=perhaps"));
  EXPECT_THAT(error({{"use_fsdp", "true"}, {"fsdp_version", "3"}}), HasSubstr("fsdp_version"));
  Layer sharding, file;
  sharding.settings["sharding"] = {"zero3", "--sharding"};
  EXPECT_THAT(error({{"use_fsdp", "true"}}, {sharding, {}, {}}), HasSubstr("--sharding"));
  Layer below;
  below.settings["sharding"] = {"zero2", "c.yaml:3"};
  EXPECT_EQ(error({{"use_fsdp", "true"}}, {{}, {}, below}),
            "--use_fsdp: sharding: zero2 (from c.yaml:3) also sets what is sharded, and would "
            "replace it: leave one of them out");
  file.env["ACCELERATE_USE_FSDP"] = {"true", "c.yaml"};
  EXPECT_THAT(error({{"use_deepspeed", "true"}}, {{}, {}, file}), HasSubstr("c.yaml"));
}

// Accelerate's launcher takes the section of the engine that a flag requests.
TEST(EngineFlags, SectionOfTheFileThatTheTypeDoesNotCallFor_IsNotLost) {
  const absl::StatusOr<Layer> file =
      ParseConfig("distributed_type: 'NO'\nfsdp_config: {fsdp_version: 2}\n", "c.yaml");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(VariablesFor({{"use_fsdp", "true"}}, {{}, {}, *file}).at(""),
            "--use_fsdp: c.yaml:2: fsdp_config would be lost: write distributed_type: FSDP there "
            "in place of --use_fsdp, or leave the section out");
  // The other engine's section is ignored there, too.
  EXPECT_EQ(VariablesFor({{"use_deepspeed", "true"}}, {{}, {}, *file}).count(""), 0u);
}

}  // namespace
}  // namespace muster::client
