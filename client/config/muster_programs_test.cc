#include "client/config/muster_programs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "client/config/launch_config.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Returns the notes for an Accelerate file.
MusterProgramNotes NotesOf(const std::string& type, const std::string& more,
                           const std::string& precision = "mixed_precision: bf16\n") {
  const auto layer = ParseConfig(
      "distributed_type: " + type + "\nnum_processes: 2\n" + precision + more, "c.yaml");
  EXPECT_TRUE(layer.ok()) << layer.status();
  if (!layer.ok()) return {};
  const auto config = ResolveLaunch({*layer}, {.gpus = 2, .cores = 2});
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? NotesForMusterPrograms(*config) : MusterProgramNotes();
}
MusterProgramNotes Notes(const std::string& more) { return NotesOf("MULTI_GPU", more); }

TEST(MusterPrograms, PlainFile_NeedsNoWord) {
  EXPECT_THAT(Notes("").refused, IsEmpty());
  EXPECT_THAT(Notes("").no_effect, IsEmpty());
}

TEST(MusterPrograms, EnginesThatAreNotHere_AreNamed) {
  EXPECT_THAT(NotesOf("MEGATRON_LM", "megatron_lm_config: {megatron_lm_tp_degree: 2}\n").refused,
              ElementsAre(HasSubstr("Megatron-LM, which they do not have")));
  EXPECT_THAT(Notes("parallelism_config: {parallelism_config_tp_size: 2}\n").refused,
              ElementsAre(HasSubstr("parallelism_config")));
}

TEST(MusterPrograms, SettingsOfFsdpAndDeepSpeed_AreThoseThatProgramsTake) {
  const std::string fsdp =
      "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_state_dict_type: ";
  EXPECT_THAT(NotesOf("FSDP", fsdp + "SHARDED_STATE_DICT}\n").refused, IsEmpty());
  EXPECT_THAT(NotesOf("FSDP", fsdp + "LOCAL_STATE_DICT}\n").refused,
              ElementsAre(HasSubstr("LOCAL_STATE_DICT")));
  EXPECT_THAT(NotesOf("DEEPSPEED", "deepspeed_config: {zero_stage: 3}\n").refused, IsEmpty());
}

// With the program's refusals, see engine_settings_test.
TEST(MusterPrograms, FilesOfDeepSpeed_AreReadAsTheProgramReadsThem) {
  const TestFolder folder;
  const auto refused = [&](const std::string& more) {
    const std::string path = folder.Path("ds.json");
    EXPECT_TRUE(
        WriteFileAtomically(path, "{\"zero_optimization\": {\"stage\": 2}" + more + "}").ok());
    // With such a file, the precision is the file's.
    return NotesOf("DEEPSPEED", "deepspeed_config: {deepspeed_config_file: " + path + "}\n", "")
        .refused;
  };
  const std::string params = R"(, "optimizer": {"type": "AdamW", "params": )";
  EXPECT_THAT(refused(params + R"({"lr": "auto"}})"), IsEmpty());
  EXPECT_THAT(refused(params + R"({"betas": "auto"}})"), ElementsAre(HasSubstr("params.betas")));
  EXPECT_THAT(refused(R"(, "gradient_accumulation_steps": 4)"),
              ElementsAre(HasSubstr("gradient_accumulation_steps 4, and the process has 1")));
  EXPECT_THAT(refused(R"(, "fp16": {"enabled": true})"), ElementsAre(HasSubstr("fp16")));
  EXPECT_THAT(refused(R"(, "fp16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto")"),
              IsEmpty());
}

TEST(MusterPrograms, SettingsOfPythonAlone_HaveNoEffect) {
  const MusterProgramNotes notes =
      Notes("dynamo_config: {dynamo_backend: INDUCTOR}\nenable_cpu_affinity: true\n");
  EXPECT_THAT(notes.refused, IsEmpty());
  EXPECT_THAT(notes.no_effect,
              ElementsAre(HasSubstr("dynamo_config"), HasSubstr("enable_cpu_affinity")));
  EXPECT_THAT(Notes("dynamo_config: {dynamo_backend: 'NO'}\n").no_effect, IsEmpty());
}

}  // namespace
}  // namespace muster::client
