// Sharded training by real processes: the example `lm` under `muster launch --sharding`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/command.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using testing_support::CommandResult;
using testing_support::RunCommand;

class ShardingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream file(data_);
    for (int i = 0; i < 20000; ++i) file << "word " << i * i % 97 << (i % 5 == 0 ? ".\n" : ", ");
  }

  // Runs lm. `limit`: KiB of writable memory of each process; 0: no limit. `variables`: "NAME=VALUE
  // ".
  CommandResult Lm(const std::string& sharding, int processes, const std::string& flags,
                   int64_t limit = 0, const std::string& variables = "") {
    const std::string ulimit = limit == 0 ? "" : "ulimit -d " + std::to_string(limit) + "; ";
    return RunCommand(ulimit + variables +
                      "client/cli/muster launch --cpu --no_prefix --num_processes " +
                      std::to_string(processes) + " --sharding " + sharding +
                      " --num_cpu_threads_per_process 1 -- " + program_ + " --data " + data_ + " " +
                      flags + " 2>&1");
  }

  const std::string folder_ = testing_support::MakeTestDir("sharding");
  const std::string data_ = folder_ + "/text";
  std::string program_ = "examples/lm/lm";
};

TEST_F(ShardingTest, EveryStrategy_GivesTheSameLoss) {
  std::map<std::string, double> losses;
  for (const std::string sharding : {"no_shard", "zero1", "zero2", "zero3", "hybrid"}) {
    const CommandResult run =
        Lm(sharding, 2, "--steps 10 --width 64 --layers 3 --context 32 --batch_size 4");
    ASSERT_EQ(run.exit_code, 0) << run.output;
    losses[sharding] = Json::parse(run.last_line()).at("loss");
    EXPECT_NEAR(losses[sharding], losses["no_shard"], 1e-4) << sharding;
  }
}

TEST_F(ShardingTest, WrongFlagsOfTheExample_AreAUserErrorWithoutARestart) {
  const CommandResult run = RunCommand(program_ + " --nosuch 2>&1");
  EXPECT_EQ(run.exit_code, 2) << run.output;
  EXPECT_EQ(run.last_line(), run.output.substr(0, run.output.find('\n'))) << "one line";
  EXPECT_EQ(RunCommand(program_ + " --data " + data_ + " --steps 0 2>&1").exit_code, 2);
  EXPECT_EQ(RunCommand(program_ + " --help").exit_code, 0);
}

TEST_F(ShardingTest, Checkpoint_ContinuesUnderAnotherStrategyAndNumberOfProcesses) {
  const std::string model = "--width 64 --layers 2 --context 32 --batch_size 4 ";
  const std::string checkpoint = model + "--checkpoint " + folder_ + "/state --steps ";
  ASSERT_EQ(Lm("zero3", 2, checkpoint + "40 --asynchronous").exit_code, 0);
  const CommandResult more = Lm("zero1", 3, checkpoint + "41");
  ASSERT_EQ(more.exit_code, 0) << more.output;
  const CommandResult fresh = Lm("zero1", 3, model + "--steps 1");
  ASSERT_EQ(fresh.exit_code, 0) << fresh.output;
  EXPECT_LT(Json::parse(more.last_line()).at("loss").get<double>(),
            Json::parse(fresh.last_line()).at("loss").get<double>() - 0.5)
      << "it went on from step 40, and made one step";
  EXPECT_EQ(Json::parse(more.last_line()).at("steps"), 1);
}

TEST_F(ShardingTest, RunInTwoParts_IsTheRunInOne) {
  const std::string model = "--width 32 --layers 2 --context 16 --batch_size 4 --steps ";
  const CommandResult whole = Lm("zero3", 2, model + "9");
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  const std::string checkpoint = " --checkpoint " + folder_ + "/parts";
  ASSERT_EQ(Lm("zero3", 2, model + "6" + checkpoint).exit_code, 0);
  const CommandResult rest = Lm("zero1", 2, model + "9" + checkpoint);
  ASSERT_EQ(rest.exit_code, 0) << rest.output;
  EXPECT_NEAR(Json::parse(rest.last_line()).at("loss").get<double>(),
              Json::parse(whole.last_line()).at("loss").get<double>(), 1e-5)
      << "the batch of step 7 is the next one";
}

// In pid namespaces of their own, processes seem to be on hosts of their own: each reads the blocks
// that its parts are in, and what is not read would be zeros.
TEST_F(ShardingTest, ProcessesOfSeveralHosts_ReadTheirPartsOfACheckpoint) {
  if (std::getenv("MUSTER_CHAOS_WITHOUT_NAMESPACES") != nullptr) {
    std::printf("no pid namespaces here: not tested\n");
    return;
  }
  const std::string flags =
      "--width 1024 --layers 2 --context 16 --batch_size 1 --checkpoint " + folder_;
  ASSERT_EQ(Lm("zero3", 2, flags + "/saved --steps 2").exit_code, 0);
  ASSERT_EQ(RunCommand("cp -r " + folder_ + "/saved " + folder_ + "/apart").exit_code, 0);
  const CommandResult together = Lm("zero3", 3, flags + "/saved --steps 5");
  ASSERT_EQ(together.exit_code, 0) << together.output;
  program_ = "unshare --user --map-root-user --pid --fork --kill-child " + program_;
  const CommandResult apart =
      Lm("zero3", 3, flags + "/apart --steps 5", 0, "MUSTER_LOG_LEVEL=info ");
  ASSERT_EQ(apart.exit_code, 0) << apart.output;
  EXPECT_EQ(Json::parse(apart.last_line()).at("steps"), 3);
  EXPECT_NEAR(Json::parse(apart.last_line()).at("loss").get<double>(),
              Json::parse(together.last_line()).at("loss").get<double>(), 1e-5);
  double read = 0, all = 0;
  const size_t line = apart.output.find("this host has read ");
  ASSERT_NE(line, std::string::npos) << apart.output;
  ASSERT_EQ(std::sscanf(apart.output.c_str() + line, "this host has read %lf MiB of the %lf MiB",
                        &read, &all),
            2)
      << apart.output.substr(line, 100);
  EXPECT_LT(read, 0.7 * all) << "a third, and what else is in the same blocks of 8 MiB";
}

TEST_F(ShardingTest, ModelThatDoesNotFitEachProcess_FitsDivided) {
  // 101 million parameters: 1.6 GB with gradients and AdamW's state, half of it in each of two.
  // With MUSTER_LARGE_MODEL in the environment 553 million: 6.2 GiB of parameters and state, 8.8 GB
  // with gradients.
  const bool large = std::getenv("MUSTER_LARGE_MODEL") != nullptr;
  const std::string model =
      std::string(large ? "--width 2048 --layers 11" : "--width 1024 --layers 8") +
      " --context 16 --batch_size 1";
  const int64_t limit = large ? 6500000 : 1700000;
  const CommandResult whole = Lm("no_shard", 2, "--steps 2 " + model, limit);
  EXPECT_NE(whole.exit_code, 0);
  EXPECT_THAT(whole.output, HasSubstr("allocate memory"));
  const std::string state = " --checkpoint " + folder_ + "/large";
  const CommandResult divided = Lm("zero3", 2, "--steps 2 " + model + state, limit);
  EXPECT_EQ(divided.exit_code, 0) << divided.output;
  // No process holds the whole model, neither when it saves nor when it loads.
  const CommandResult more = Lm("zero3", 2, "--steps 3 " + model + state, limit);
  EXPECT_EQ(more.exit_code, 0) << more.output;
  EXPECT_EQ(Json::parse(more.last_line()).at("steps"), 1);
}

TEST_F(ShardingTest, ModelThatDoesNotFitOneProcess_FitsOffloaded) {
  const std::string flags = "--steps 2 --width 1024 --layers 8 --context 16 --batch_size 1";
  const std::string states = "MUSTER_OFFLOAD_OPTIMIZER=disk:" + folder_ + "/states ";
  const std::string parameters = "MUSTER_OFFLOAD_PARAMETERS=disk:" + folder_ + "/parameters ";
  const int64_t limit = 1700000;
  EXPECT_NE(Lm("no_shard", 1, flags, limit).exit_code, 0);
  const CommandResult without = Lm("no_shard", 1, flags);
  ASSERT_EQ(without.exit_code, 0) << without.output;
  const CommandResult with_states = Lm("no_shard", 1, flags, limit, states);
  ASSERT_EQ(with_states.exit_code, 0) << with_states.output;
  const CommandResult with_both = Lm("zero3", 1, flags, limit, states + parameters);
  ASSERT_EQ(with_both.exit_code, 0) << with_both.output;
  for (const CommandResult& run : {with_states, with_both}) {
    EXPECT_EQ(Json::parse(run.last_line()).at("loss"), Json::parse(without.last_line()).at("loss"));
  }
}

// The file has the ids of the bytes of a text: the loss is that of the text.
TEST_F(ShardingTest, FileOfTokens_TrainsAsTheTextUnderEveryStrategy) {
  std::ifstream text(data_, std::ios::binary);
  std::ofstream two(folder_ + "/two.bin"), four(folder_ + "/four.bin");
  for (char byte = 0; text.get(byte);) {
    two << byte << '\0';
    four << byte << '\0' << '\0' << '\0';
  }
  two.close();
  four.close();
  const std::string model = " --steps 6 --width 64 --layers 2 --context 32 --batch_size 4";
  const CommandResult of_text = Lm("no_shard", 2, model);
  ASSERT_EQ(of_text.exit_code, 0) << of_text.output;
  const double want = Json::parse(of_text.last_line()).at("loss");
  const std::string launch =
      "client/cli/muster launch --cpu --no_prefix --num_processes 2 "
      "--num_cpu_threads_per_process 1 --sharding ";
  for (const auto& [sharding, file] :
       std::map<std::string, std::string>{{"no_shard", "two.bin"},
                                          {"zero1", "two.bin --token_bytes 2"},
                                          {"zero2", "four.bin --token_bytes 4"},
                                          {"zero3", "four.bin --token_bytes 4"},
                                          {"hybrid", "two.bin"}}) {
    const CommandResult run =
        RunCommand(launch + sharding + " -- " + program_ + " --vocabulary 256 --tokens " + folder_ +
                   "/" + file + model + " 2>&1");
    ASSERT_EQ(run.exit_code, 0) << sharding << "\n" << run.output;
    EXPECT_NEAR(Json::parse(run.last_line()).at("loss").get<double>(), want, 1e-4) << sharding;
  }
}

TEST_F(ShardingTest, FileOfTokensThatCannotBeRead_IsRefusedWithThePlace) {
  const auto refused = [&](const std::string& flags) {
    const CommandResult run = RunCommand(program_ + " --context 2 " + flags + " 2>&1");
    EXPECT_NE(run.exit_code, 0) << run.output;
    return run.output;
  };
  const std::string file = folder_ + "/tokens.bin";
  std::ofstream(file, std::ios::binary) << std::string("\1\0\2\0\0\1\3\0\4\0\5\0", 12);
  const std::string tokens = " --tokens " + file;
  EXPECT_THAT(refused(tokens + " --vocabulary 256"),
              HasSubstr("token 2 (at byte 4) is 256, but --vocabulary is 256"));
  // The tokens are read as what they are not.
  EXPECT_THAT(refused(tokens + " --token_bytes 4"), HasSubstr("token 0 (at byte 0) is 131073"));
  std::ofstream(file, std::ios::app | std::ios::binary) << 'x';
  EXPECT_THAT(refused(tokens), HasSubstr("13 bytes are not a whole number of tokens of 2 bytes"));
  EXPECT_THAT(refused(tokens + " --token_bytes 3"), HasSubstr("--token_bytes"));
  EXPECT_THAT(refused(" --tokens " + folder_ + "/absent"), HasSubstr("cannot be read"));
  EXPECT_THAT(refused(tokens + " --data " + data_), HasSubstr("--tokens"));
  EXPECT_THAT(refused(""), HasSubstr("--tokens"));
}

// Runs real processes, each with random numbers of its own.
TEST_F(ShardingTest, ActivationCheckpointingWithDropout_ChangesNoBit) {
  for (const std::string sharding : {"no_shard", "zero2", "zero3"}) {
    for (const std::string words : {"", "windows", "static_graph", "static_graph windows"}) {
      // These cases matter only for data parallelism.
      if (sharding != "no_shard" && !words.empty()) continue;
      const CommandResult run = RunCommand(
          "client/cli/muster launch --cpu --num_processes 2 --num_cpu_threads_per_process 1 "
          "--sharding " +
          sharding + " -- tests/e2e/recompute_worker " + words + " 2>&1");
      EXPECT_EQ(run.exit_code, 0) << sharding << " " << words << "\n" << run.output;
      EXPECT_THAT(run.output, HasSubstr("equal: 14 tensors")) << sharding << " " << words;
    }
  }
}

// Settings that Accelerate's launcher has flags for, in a program that does not mention them.
TEST_F(ShardingTest, FsdpAndDeepSpeedSettings_AreDone) {
  const auto loss = [&](const std::string& launch, const std::string& program = "") {
    const CommandResult run = RunCommand(
        "client/cli/muster launch --cpu --no_prefix --num_processes 2 "
        "--num_cpu_threads_per_process 1 " +
        launch + " -- " + program_ + " --data " + data_ +
        " --steps 6 --width 64 --layers 3 --context 32 --batch_size 4 " + program + " 2>&1");
    EXPECT_EQ(run.exit_code, 0) << run.output;
    return run.exit_code == 0 ? Json::parse(run.last_line()).at("loss").get<double>() : 0;
  };
  const double plain = loss("--sharding zero3");
  const std::string fsdp =
      "--use_fsdp --fsdp_version 2 --fsdp_activation_checkpointing true --fsdp_auto_wrap_policy "
      "TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap ";
  EXPECT_EQ(loss(fsdp + "Block"), plain);
  EXPECT_EQ(loss("--sharding zero3", "--activation_checkpointing --activation_offload " + folder_),
            plain);
  EXPECT_EQ(
      loss("--sharding zero3 --activation_checkpointing --offload_activations disk:" + folder_),
      plain);
  // The program clips to 1 as well; it is not clipped twice.
  EXPECT_EQ(loss("--use_deepspeed --zero_stage 3 --gradient_clipping 1.0"), plain);
  EXPECT_NE(loss("--use_deepspeed --zero_stage 3 --gradient_clipping 0.01"), plain);
  // LayerNorm is called on its own.
  const CommandResult run =
      RunCommand("client/cli/muster launch --cpu --no_prefix --num_processes 2 " + fsdp +
                 "LayerNorm -- " + program_ + " --data " + data_ + " --steps 1 2>&1");
  EXPECT_NE(run.exit_code, 0);
  EXPECT_THAT(run.output, HasSubstr("muster::call(block, inputs...)"));
  const CommandResult by_flag = RunCommand(
      "client/cli/muster launch --cpu --no_prefix --num_processes 2 --activation_checkpointing "
      "--activation_blocks LayerNorm -- " +
      program_ + " --data " + data_ + " --steps 1 2>&1");
  EXPECT_NE(by_flag.exit_code, 0);
  EXPECT_THAT(by_flag.output, HasSubstr("muster::call(block, inputs...)"));
}

// Only the last micro-step of a window steps: the scale comes down in 20 to 30 steps.
TEST_F(ShardingTest, OverflowOfAnAccumulatedStep_CountsOnceTowardsTheEnd) {
  std::ofstream(folder_ + "/fp16.json") << R"({"fp16": {"enabled": true, "initial_scale_power": 40},
             "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "auto",
             "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"})";
  const CommandResult run = RunCommand(
      "client/cli/muster launch --cpu --no_prefix --num_processes 1 "
      "--num_cpu_threads_per_process 1 --use_deepspeed --deepspeed_config_file " +
      folder_ + "/fp16.json --mixed_precision fp16 --gradient_accumulation_steps 8 -- " + program_ +
      " --data " + data_ + " --steps 1 --width 64 --layers 1 --context 32 --batch_size 4 2>&1");
  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_GT(Json::parse(run.last_line()).at("steps").get<int>(), 100) << "which overflow";
}

// The launch sets options.sharding for a program that does not mention it.
TEST_F(ShardingTest, SettingsOfTheLaunch_AreDone) {
  const auto run = [&](const std::string& launch, const std::string& program = "") {
    return RunCommand(
        "client/cli/muster launch --cpu --no_prefix --num_processes 2 "
        "--num_cpu_threads_per_process 1 " +
        launch + " -- " + program_ + " --data " + data_ +
        " --steps 4 --width 64 --layers 3 --context 32 --batch_size 4 " + program + " 2>&1");
  };
  const auto loss = [&](const std::string& launch, const std::string& program = "") {
    const CommandResult result = run(launch, program);
    EXPECT_EQ(result.exit_code, 0) << result.output;
    return result.exit_code == 0 ? Json::parse(result.last_line()).at("loss").get<double>() : 0;
  };
  const double plain = loss("--sharding zero3", "--clip_norm 0");
  for (const char* flags :
       {"--sharding_units Block --sharding_overlap", "--sharding_unit_names blocks.0,blocks.2",
        "--sharding_min_unit_parameters 1000 --sharding_no_split Block",
        "--no_sharding_reshard_after_forward", "--sharding_group_size 2",
        "--sharding_ignored_parameters '.*bias' --sharding_ignored_modules norm",
        "--sharding_parameter_dtype fp32 --sharding_reduce_dtype fp32"}) {
    EXPECT_NEAR(loss(std::string("--sharding zero3 ") + flags, "--clip_norm 0"), plain, 1e-4)
        << flags;
  }
  EXPECT_EQ(loss("--sharding zero3 --optimizer_in_backward --offload_optimizer disk:" + folder_ +
                     " --offload_parameters disk:" + folder_,
                 "--clip_norm 0"),
            plain);
  EXPECT_EQ(loss("--sharding zero3 --offload_gradients disk:" + folder_, "--clip_norm 0"), plain);
  const auto error = [&](const std::string& launch) {
    const CommandResult result = run(launch);
    EXPECT_NE(result.exit_code, 0) << launch;
    return result.output;
  };
  EXPECT_THAT(error("--sharding zero3 --optimizer_in_backward"), HasSubstr("clip_grad_norm_()"));
  EXPECT_THAT(error("--sharding zero3 --sharding_unit_names nothing"),
              HasSubstr("options.sharding.unit_names: the model has no module 'nothing'"));
  EXPECT_THAT(error("--sharding zero3 --sharding_group_size 3"),
              HasSubstr("options.sharding.group_size is 3"));
  EXPECT_THAT(error("--sharding zero3 --sharding_parameter_dtype bf16"),
              HasSubstr("options.sharding.parameter_dtype is BFloat16"));
  EXPECT_THAT(error("--sharding_units Block"),
              HasSubstr("sharding_units: Block (from --sharding_units) refines sharding, "
                        "but nothing enables it"));
}

TEST_F(ShardingTest, UnknownPlaceToOffloadTo_IsRefusedByName) {
  const CommandResult run = Lm("zero3", 2, "", 0, "MUSTER_OFFLOAD_OPTIMIZER=nvme ");
  EXPECT_NE(run.exit_code, 0);
  EXPECT_THAT(run.output, HasSubstr("offload_optimizer: nvme (from MUSTER_OFFLOAD_OPTIMIZER)"));
}

TEST_F(ShardingTest, UnknownStrategy_IsRefusedByName) {
  const CommandResult run = Lm("zero4", 2, "");
  EXPECT_NE(run.exit_code, 0);
  EXPECT_THAT(run.output, HasSubstr("zero4"));
}

}  // namespace
}  // namespace muster
