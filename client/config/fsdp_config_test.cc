#include "client/config/fsdp_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::client {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;
using Variables = std::map<std::string, std::string>;

FsdpSettings Resolved(const Json& arguments, const Variables& variables,
                      const std::string& mode = "no") {
  auto settings = ResolveFsdp(arguments, variables, mode);
  EXPECT_TRUE(settings.ok()) << settings.status();
  return settings.ok() ? *std::move(settings) : FsdpSettings();
}

std::string Error(const Json& arguments, const Variables& variables,
                  const std::string& mode = "no") {
  const auto settings = ResolveFsdp(arguments, variables, mode);
  return settings.ok() ? "accepted" : std::string(settings.status().message());
}

TEST(ResolveFsdp, NothingGiven_IsFullShardingOfVersion1) {
  const FsdpSettings settings = Resolved(nullptr, {});
  EXPECT_EQ(settings.version, 1);
  EXPECT_EQ(settings.strategy, FsdpSettings::Strategy::kFullShard);
  EXPECT_FALSE(settings.precision);
  EXPECT_TRUE(settings.notes.empty());
}

TEST(ResolveFsdp, ReshardAfterForwardInVersion1_IsTheStrategyUnlessOneIsChosen) {
  EXPECT_EQ(Resolved(nullptr, {{"FSDP_SHARDING_STRATEGY", "FULL_SHARD"},
                               {"FSDP_RESHARD_AFTER_FORWARD", "shard_grad_op"}})
                .strategy,
            FsdpSettings::Strategy::kShardGradOp);
  const FsdpSettings settings = Resolved(
      nullptr,
      {{"FSDP_SHARDING_STRATEGY", "NO_SHARD"}, {"FSDP_RESHARD_AFTER_FORWARD", "SHARD_GRAD_OP"}});
  EXPECT_EQ(settings.strategy, FsdpSettings::Strategy::kNoShard);
  EXPECT_EQ(settings.notes.size(), 1u);
  EXPECT_EQ(Resolved({{"reshard_after_forward", "SHARD_GRAD_OP"}},
                     {{"FSDP_SHARDING_STRATEGY", "NO_SHARD"}})
                .strategy,
            FsdpSettings::Strategy::kShardGradOp);
  // The launcher's default for version 2 is no strategy.
  EXPECT_EQ(Resolved(nullptr, {{"FSDP_RESHARD_AFTER_FORWARD", "true"}}).strategy,
            FsdpSettings::Strategy::kFullShard);
}

// For example null in an Accelerate file, which becomes the word none.
TEST(ResolveFsdp, VariableThatIsNoStrategyInVersion1_IsNoted) {
  for (const char* word : {"none", "", "FULL_SHRD", "7"}) {
    SCOPED_TRACE(word);
    const FsdpSettings settings = Resolved(nullptr, {{"FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP"},
                                                     {"FSDP_RESHARD_AFTER_FORWARD", word}});
    EXPECT_EQ(settings.strategy, FsdpSettings::Strategy::kShardGradOp);
    ASSERT_EQ(settings.notes.size(), 1u);
    EXPECT_THAT(settings.notes[0], HasSubstr("FSDP_RESHARD_AFTER_FORWARD="));
  }
  EXPECT_THAT(Error({{"reshard_after_forward", "none"}}, {}), HasSubstr("NONE"));
}

TEST(ResolveFsdp, StrategyOfVersion1InVersion2_IsNotedUnlessItIsTheSame) {
  for (const char* word : {"SHARD_GRAD_OP", "2", "NO_SHARD", "HYBRID_SHARD", "FULL_SHRD"}) {
    SCOPED_TRACE(word);
    const FsdpSettings settings =
        Resolved(nullptr, {{"FSDP_VERSION", "2"}, {"FSDP_SHARDING_STRATEGY", word}});
    EXPECT_FALSE(settings.strategy);
    ASSERT_EQ(settings.notes.size(), 1u);
    EXPECT_THAT(settings.notes[0], HasSubstr("FSDP_SHARDING_STRATEGY="));
  }
  EXPECT_TRUE(Resolved(nullptr, {{"FSDP_VERSION", "2"},
                                 {"FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP"},
                                 {"FSDP_RESHARD_AFTER_FORWARD", "false"}})
                  .notes.empty());
  // The launcher sets it if the user chose none.
  EXPECT_TRUE(Resolved(nullptr, {{"FSDP_VERSION", "2"},
                                 {"FSDP_SHARDING_STRATEGY", "FULL_SHARD"},
                                 {"FSDP_RESHARD_AFTER_FORWARD", "false"}})
                  .notes.empty());
}

TEST(ResolveFsdp, NumbersOfTorch_MayHaveLeadingZeros) {
  EXPECT_EQ(Resolved(nullptr, {{"FSDP_SHARDING_STRATEGY", "02"}}).strategy,
            FsdpSettings::Strategy::kShardGradOp);
  FsdpSettings settings = Resolved(nullptr, {{"FSDP_STATE_DICT_TYPE", "003"}});
  EXPECT_EQ(settings.state_dict, FsdpSettings::StateDict::kSharded);
  EXPECT_TRUE(SetStateDictType("01", settings).ok());
  for (const char* number : {"0", "06", "+2", " 2", "2.0"}) {
    EXPECT_THAT(Error(nullptr, {{"FSDP_SHARDING_STRATEGY", number}}), HasSubstr("not a valid"));
  }
}

TEST(ResolveFsdp, NameOfTorchWithItsUnderscore_IsTheStrategyWhereverItStands) {
  const char* const name = "_hybrid_shard_zero2";
  const auto strategy = FsdpSettings::Strategy::kHybridShardZero2;
  EXPECT_EQ(Resolved({{"sharding_strategy", name}}, {}).strategy, strategy);
  EXPECT_EQ(Resolved({{"reshard_after_forward", name}}, {}).strategy, strategy);
  EXPECT_EQ(Resolved(nullptr, {{"FSDP_SHARDING_STRATEGY", name}}).strategy, strategy);
  EXPECT_EQ(Resolved(nullptr, {{"FSDP_RESHARD_AFTER_FORWARD", name}}).strategy, strategy);
  const FsdpSettings second = Resolved(
      {{"fsdp_version", 2}, {"sharding_strategy", name}, {"reshard_after_forward", true}}, {});
  EXPECT_EQ(second.strategy, strategy);
  EXPECT_THAT(Error({{"backward_prefetch", "_BACKWARD_PRE"}}, {}), HasSubstr("_BACKWARD_PRE"));
}

TEST(ResolveFsdp, WrongValues_AreNamedWithTheirSource) {
  EXPECT_THAT(Error({{"sharding_stratgy", "NO_SHARD"}}, {}),
              HasSubstr("did you mean sharding_strategy?"));
  EXPECT_THAT(Error(nullptr, {{"FSDP_SHARDING_STRATEGY", "FULL_SHRD"}}),
              HasSubstr("did you mean FULL_SHARD?"));
  EXPECT_THAT(Error({{"use_orig_params", 7}}, {}), HasSubstr("use_orig_params: must be true"));
  EXPECT_THAT(Error(nullptr, {{"FSDP_OFFLOAD_PARAMS", "cpu"}}),
              HasSubstr("invalid truth value cpu"));
  EXPECT_THAT(Error(nullptr, {}, "fp4"), HasSubstr("fp4"));
  EXPECT_THAT(Error(Json::array(), {}), HasSubstr("must be an object"));
  EXPECT_THAT(Error({{"fsdp_version", UINT64_MAX}}, {}), HasSubstr("must be an integer"));
  EXPECT_THAT(
      Error({{"activation_checkpointing", true}, {"activation_checkpointing_offload", true}}, {}),
      HasSubstr("fsdp_version=2"));
  EXPECT_THAT(Error({{"mixed_precision_policy",
                      {{"param_dtype", "float16"},
                       {"reduce_dtype", "float16"},
                       {"output_dtype", "float16"}}}},
                    {}),
              HasSubstr("buffer_dtype"));
}

TEST(ResolveFsdp, ForwardPrefetchInVersion2_IsRefusedFromEverySource) {
  EXPECT_THAT(Error(nullptr, {{"FSDP_VERSION", "2"}, {"FSDP_FORWARD_PREFETCH", "true"}}),
              HasSubstr("FSDP_FORWARD_PREFETCH"));
  EXPECT_THAT(Error({{"fsdp_version", 2}, {"forward_prefetch", false}}, {}),
              HasSubstr("forward_prefetch"));
  for (const char* no_wish : {"false", "none"}) {
    EXPECT_EQ(Error(nullptr, {{"FSDP_VERSION", "2"}, {"FSDP_FORWARD_PREFETCH", no_wish}}),
              "accepted");
  }
}

// Arguments that Accelerate does not check, it keeps: the fields are the same, and MapFsdp()
// decides.
TEST(ResolveFsdp, ArgumentsThatNothingReads_StayAsTheyAre) {
  const auto field = [](const Json& arguments, const char* name) {
    return FsdpFields(Resolved(arguments, {}))[name];
  };
  EXPECT_EQ(field({{"transformer_cls_names_to_wrap", "A,B"}}, "transformer_cls_names_to_wrap"),
            "A,B");
  EXPECT_EQ(field({{"transformer_cls_names_to_wrap", "A,B"},
                   {"auto_wrap_policy", "transformer_based_wrap"}},
                  "transformer_cls_names_to_wrap"),
            Json({"A", "B"}));
  EXPECT_EQ(field({{"sharding_strategy", 2}}, "sharding_strategy"), 2);
  EXPECT_EQ(Resolved({{"sharding_strategy", 2}}, {}).strategy,
            FsdpSettings::Strategy::kShardGradOp);
  EXPECT_EQ(field({{"sharding_strategy", "2"}}, "sharding_strategy"), "SHARD_GRAD_OP");
  for (const Json& strategy : {Json("full_shard"), Json("2"), Json(4), Json("FULL_SHRD")}) {
    EXPECT_EQ(
        field(
            {{"fsdp_version", 2}, {"reshard_after_forward", true}, {"sharding_strategy", strategy}},
            "sharding_strategy"),
        strategy);
  }
}

// Accelerate keeps the word unchanged, and every word is true.
TEST(ResolveFsdp, WordForABooleanArgument_IsRefused) {
  for (const char* name : {"cpu_offload", "use_orig_params", "sync_module_states",
                           "forward_prefetch", "limit_all_gathers", "activation_checkpointing",
                           "activation_checkpointing_offload", "cpu_ram_efficient_loading"}) {
    for (const char* word : {"no", "true"}) {
      EXPECT_THAT(Error({{name, word}}, {}),
                  HasSubstr(std::string(name) + ": must be true or false, not " + word));
    }
  }
}

TEST(ResolveFsdp, NamesOfClasses_AreTrimmed) {
  EXPECT_EQ(*Resolved(nullptr, {{"FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"},
                                {"FSDP_TRANSFORMER_CLS_TO_WRAP", "A, B"}})
                 .transformer_classes,
            std::vector<std::string>({"A", "B"}));
}

TEST(SetStateDictType, OtherType_HasItsOwnConfiguration) {
  FsdpSettings settings = Resolved(nullptr, {{"FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"}});
  EXPECT_FALSE(settings.state_dict_config->rank0_only);
  ASSERT_TRUE(SetStateDictType("full_state_dict", settings).ok());
  EXPECT_EQ(settings.state_dict_config->rank0_only, true);
  ASSERT_TRUE(SetStateDictType("LOCAL_STATE_DICT", settings).ok());
  EXPECT_FALSE(settings.state_dict_config);
  EXPECT_FALSE(SetStateDictType("STATE", settings).ok());
  ASSERT_TRUE(SetStateDictType("3", settings).ok()) << "torch's number";
  EXPECT_EQ(settings.state_dict, FsdpSettings::StateDict::kSharded);
  EXPECT_FALSE(SetStateDictType("4", settings).ok());
}

TEST(ResolveFsdp, UnderscoresBetweenDigits_AreRead) {
  const Variables sizes = {{"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"},
                           {"FSDP_MIN_NUM_PARAMS", "100_000_000"}};
  EXPECT_EQ(Resolved(nullptr, sizes).min_num_params, 100'000'000);
  for (const char* wrong : {"1__0", "_1", "1_", "_"}) {
    EXPECT_THAT(Error(nullptr, {{"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"},
                                {"FSDP_MIN_NUM_PARAMS", wrong}}),
                HasSubstr("must be an integer"))
        << wrong;
  }
}

// No value of any kind ends the process.
TEST(ResolveFsdp, StrangeValues_AreReadOrRefused) {
  for (const std::string& name : FsdpArgumentNames()) {
    for (const Json& value : {Json(-5), Json(1.5), Json(""), Json("x"), Json(true), Json::array(),
                              Json::object(), Json({{"param_dtype", 7}}), Json({1, "a"})}) {
      for (int version : {1, 2}) {
        Json arguments = {{"fsdp_version", version}};
        arguments[name] = value;
        const auto settings = ResolveFsdp(arguments, {}, "bf16");
        EXPECT_EQ(settings.ok() ? FsdpFields(*settings).size() : 20u, 20u);
      }
    }
  }
}

}  // namespace
}  // namespace muster::client
