#include "client/config/accelerate_launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::client {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

using Launcher = AccelerateLaunch::Launcher;

absl::StatusOr<AccelerateLaunch> Plan(const std::string& file,
                                      const std::vector<std::string>& args = {},
                                      const std::map<std::string, std::string>& variables = {},
                                      const AccelerateMachine& machine = {}) {
  if (file.empty()) return PlanAccelerateLaunch(nullptr, args, variables, machine);
  const absl::StatusOr<AccelerateConfig> config = ParseAccelerateConfig(file, "default.yaml");
  if (!config.ok()) return config.status();
  return PlanAccelerateLaunch(&*config, args, variables, machine);
}

std::string Error(const std::string& file, const std::vector<std::string>& args = {}) {
  const auto plan = Plan(file, args);
  return plan.ok() ? "no error" : std::string(plan.status().message());
}

// The wizard writes other names than its launcher reads.
TEST(AccelerateLaunch, D25_KeysOfTheWizard_Count) {
  const auto plan = Plan(
      "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\nfp8_config:\n"
      "  backend: TE\n  amax_history_length: 32\n  amax_compute_algorithm: max\n"
      "  optimization_level: O1\n",
      {}, {}, {.fp8 = true});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->env, Contains(Pair("ACCELERATE_FP8_AMAX_HISTORY_LEN", "32")));
  EXPECT_THAT(plan->env, Contains(Pair("ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "max")));
  EXPECT_THAT(plan->env, Contains(Pair("ACCELERATE_FP8_OPT_LEVEL", "O1")));
  EXPECT_THAT(plan->env, Not(Contains(Key("ACCELERATE_FP8_AMAX_HISTORY_LENGTH"))));
}

TEST(AccelerateLaunch, D26_SeveralProcessesOnTheCpu_AreAllStarted) {
  for (const char* file : {"", "distributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n"}) {
    SCOPED_TRACE(file);
    const auto plan = Plan(file, {"--cpu", "--num_processes=3"});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->launcher, Launcher::kTorchrun);
    const auto processes = ProcessVariables(*plan, 0);
    ASSERT_EQ(processes.size(), 3u);
    EXPECT_EQ(processes[2].at("RANK"), "2");
    EXPECT_EQ(processes[2].at("WORLD_SIZE"), "3");
    EXPECT_EQ(processes[2].at("ACCELERATE_USE_CPU"), "True");
  }
}

// As in the original: threads follow the file's use_cpu, and a file without it means false.
TEST(AccelerateLaunch, CpuFlagWithAFileThatDoesNotSayUseCpu_GivesOneThread) {
  for (const auto& [line, threads] : {std::pair("", "1"), std::pair("use_cpu: true\n", "8")}) {
    SCOPED_TRACE(line);
    const auto plan = Plan(std::string("distributed_type: 'NO'\nnum_processes: 1\n") + line,
                           {"--cpu"}, {}, {.physical_cores = 8});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_THAT(plan->env, Contains(Pair("ACCELERATE_USE_CPU", "True")));
    EXPECT_THAT(plan->env, Contains(Pair("OMP_NUM_THREADS", threads)));
  }
}

TEST(AccelerateLaunch, D27_ProcessesThatDoNotDivide_AreRefused) {
  EXPECT_THAT(Error("distributed_type: MULTI_GPU\nnum_processes: 7\nnum_machines: 2\n"
                    "main_process_ip: 10.0.0.1\n"),
              HasSubstr("7 processes cannot be divided evenly among 2 machines"));
}

// To the original, the flag's word is a text, and every text is true.
TEST(AccelerateLaunch, D31_VariableSequenceLengthFalse_IsFalse) {
  const auto plan = Plan("", {"--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config",
                              "--num_processes", "2", "--parallelism_config_sp_size", "2",
                              "--parallelism_config_sp_seq_length_is_variable", "False"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  // The original's processes compare the variable with "true", in any case.
  EXPECT_EQ(plan->env.at("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"), "False");
  EXPECT_EQ(plan->env.at("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"), "sdpa");
}

TEST(AccelerateLaunch, SectionKeysWithoutTheirPrefix_Count) {
  const auto plan = Plan(
      "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  version: 2\n"
      "  min_num_params: 7\ndynamo_config: {backend: inductor}\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("FSDP_VERSION"), "2");
  EXPECT_EQ(plan->env.at("FSDP_MIN_NUM_PARAMS"), "7");
  EXPECT_EQ(plan->env.at("ACCELERATE_DYNAMO_BACKEND"), "INDUCTOR");
}

// The release's launcher sets no variable for them, although its plugin reads them.
TEST(AccelerateLaunch, PathsToOffloadTo_AreAmongWhatTheReleaseLeavesOut) {
  const auto plan = Plan(
      "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"
      "  offload_param_device: nvme\n  offload_param_nvme_path: /a\n",
      {"--offload_optimizer_nvme_path", "/b"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->left_out,
              ElementsAre(Pair("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/b"),
                          Pair("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/a")));
  for (const auto& [name, path] : plan->left_out) {
    EXPECT_THAT(plan->env, Not(Contains(Key(name))));
  }
}

TEST(AccelerateLaunch, KeysThatNobodyReads_AreFoundInEverySection) {
  const auto unread = [](const std::string& section) {
    const auto config =
        ParseAccelerateConfig("distributed_type: 'NO'\n" + section + "\n", "c.yaml");
    EXPECT_TRUE(config.ok()) << config.status();
    std::vector<std::string> found;
    for (const UnreadKey& key : UnreadKeys(*config)) found.push_back(key.key + ">" + key.nearest);
    return found;
  };
  EXPECT_THAT(unread("deepspeed_config: {gradient_cliping: 1.0, zero_stag: 3, zero_optimization: 1,"
                     " num_processes: 2, old: null}"),
              UnorderedElementsAre("gradient_cliping>gradient_clipping", "zero_stag>zero_stage",
                                   "zero_optimization>", "num_processes>"));
  EXPECT_THAT(
      unread("fsdp_config: {fsdp_sharding_stratgy: NO_SHARD, fsdp_backward_prefetch_policy: "
             "NO_PREFETCH, min_num_param: 7}"),
      UnorderedElementsAre("fsdp_sharding_stratgy>fsdp_sharding_strategy",
                           "fsdp_backward_prefetch_policy>", "min_num_param>fsdp_min_num_params"));
  EXPECT_THAT(unread("parallelism_config: {tp_siz: 2}"),
              ElementsAre("tp_siz>parallelism_config_tp_size"));
  EXPECT_THAT(unread("mpirun_config: {mpirun_ccl: '1'}"), ElementsAre("mpirun_ccl>"));
  for (const char* const section :
       {"deepspeed_config: {gradient_accumulation_steps: 1, gradient_clipping: 1.0, zero_stage: 2, "
        "offload_param_nvme_path: /a, zero3_init_flag: true, deepspeed_config_file: c.json, "
        "deepspeed_hostfile: h, deepspeed_moe_layer_cls_names: A}",
        "fsdp_config: {fsdp_version: 2, fsdp_ignored_modules: a, offload_params: true}",
        "fp8_config: {backend: TE, amax_history_length: 1, amax_compute_algorithm: max, "
        "optimization_level: O1, fp8_format: HYBRID, use_autocast_during_eval: true}",
        "dynamo_config: {dynamo_backend: INDUCTOR, mode: default, use_fullgraph: true}",
        "megatron_lm_config: {megatron_lm_tp_degree: 1}",
        "parallelism_config: {parallelism_config_tp_size: 2}"}) {
    EXPECT_THAT(unread(section), IsEmpty()) << section;
  }
}

TEST(AccelerateLaunch, PlainNoAsDynamoBackend_IsNo) {
  for (const char* key : {"dynamo_backend", "backend"}) {
    const auto plan = Plan(std::string("distributed_type: MULTI_GPU\nnum_processes: 2\n") +
                           "dynamo_config:\n  " + key + ": NO\n");
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->env.at("ACCELERATE_DYNAMO_BACKEND"), "NO");
  }
}

TEST(AccelerateLaunch, NumbersOfSectionsInQuotes_AreNumbers) {
  const auto plan = Plan(
      "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"
      "parallelism_config: {parallelism_config_cp_size: '2'}\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("PARALLELISM_CONFIG_CP_SIZE"), "2");
  EXPECT_THAT(plan->env, Contains(Key("PARALLELISM_CONFIG_CP_COMM_STRATEGY")));
}

TEST(AccelerateLaunch, NumbersOfFlags_AreReadAsInPython) {
  const auto plan = Plan("", {"--use_deepspeed", "--num_processes", "2", "--zero_stage= 0_2",
                              "--gradient_clipping=1_0.5"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("ACCELERATE_DEEPSPEED_ZERO_STAGE"), "2");
  EXPECT_EQ(plan->env.at("ACCELERATE_GRADIENT_CLIPPING"), "10.5");
}

TEST(AccelerateLaunch, SectionOnOneLine_KeepsTheOrderOfDeepspeedFields) {
  const auto plan = Plan(
      "distributed_type: DEEPSPEED\nnum_processes: 2\n"
      "deepspeed_config: {zero_stage: 2, gradient_clipping: 1.0,\n  a: 1}\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("ACCELERATE_CONFIG_DS_FIELDS"), "zero_stage,gradient_clipping,a");
}

TEST(AccelerateLaunch, MegatronFlags_AreWrittenAsTheirTypesAre) {
  const auto plan = Plan(
      "distributed_type: MEGATRON_LM\nnum_processes: 2\nmegatron_lm_config:\n"
      "  megatron_lm_gradient_clipping: 1.0e+15\n  megatron_lm_other: 3\n",
      {"--megatron_lm_attention_dropout", "1", "--megatron_lm_hidden_dropout=1e-5",
       "--megatron_lm_recompute_num_layers=+2", "--megatron_lm_no_load_optim", "true",
       "--megatron_lm_no_save_optim", "false"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("MEGATRON_LM_ATTENTION_DROPOUT"), "1.0");
  EXPECT_EQ(plan->env.at("MEGATRON_LM_HIDDEN_DROPOUT"), "1e-05");
  EXPECT_EQ(plan->env.at("MEGATRON_LM_RECOMPUTE_NUM_LAYERS"), "2");
  EXPECT_EQ(plan->env.at("MEGATRON_LM_NO_LOAD_OPTIM"), "True");
  EXPECT_EQ(plan->env.at("MEGATRON_LM_NO_SAVE_OPTIM"), "False");
  EXPECT_EQ(plan->env.at("MEGATRON_LM_GRADIENT_CLIPPING"), "1000000000000000.0");
  EXPECT_THAT(plan->env, Not(Contains(Key("MEGATRON_LM_OTHER"))));
}

TEST(AccelerateLaunch, SequenceLength_MayBeAWord) {
  const auto plan = Plan(
      "", {"--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", "--num_processes", "2",
           "--parallelism_config_sp_size", "2", "--parallelism_config_sp_seq_length", "auto"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("PARALLELISM_CONFIG_SP_SEQ_LENGTH"), "auto");
}

TEST(AccelerateLaunch, PortZeroForDeepspeedsRunner_IsAFreeOne) {
  const auto plan = Plan(
      "distributed_type: DEEPSPEED\nnum_processes: 4\nnum_machines: 2\nmain_process_ip: node\n"
      "main_process_port: 0\ndeepspeed_config: {deepspeed_hostfile: hosts}\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->command, Contains("<any>"));
}

TEST(AccelerateLaunch, NumbersInQuotes_AreNumbers) {
  const auto plan = Plan(
      "distributed_type: MULTI_GPU\nnum_processes: '4'\nnum_machines: '2'\n"
      "main_process_ip: node\nmain_process_port: '29511'\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->agent.at("nproc_per_node"), "2");
  EXPECT_EQ(plan->agent.at("rdzv_endpoint"), "node:29511");
}

TEST(AccelerateLaunch, ZeroAndOne_AreNoAndYes) {
  const auto plan = Plan("distributed_type: 'NO'\nuse_cpu: 1\ndebug: 0\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("ACCELERATE_USE_CPU"), "True");
  EXPECT_THAT(plan->env, Not(Contains(Key("ACCELERATE_DEBUG_MODE"))));
  EXPECT_THAT(Error("distributed_type: 'NO'\nuse_cpu: 2\n"), HasSubstr("true or false"));
}

TEST(AccelerateLaunch, OneMachineByAFlag_LeavesThePlaceAmongSeveralOut) {
  const std::string file =
      "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\nmachine_rank: 1\n"
      "main_process_ip: node\n";
  const auto plan = Plan(file, {"--num_machines", "1"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->machine_rank, 0);
  EXPECT_THAT(Error(file, {"--num_machines=1", "--machine_rank=1"}),
              HasSubstr("it must be from 0 to 0"));
}

TEST(AccelerateLaunch, Json_KeepsTheOrderOfDeepspeedFields) {
  const auto config = ParseAccelerateConfig(
      R"({"distributed_type": "DEEPSPEED", "num_processes": 2,
          "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}})",
      "c.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const auto plan = PlanAccelerateLaunch(&*config, {}, {}, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->env.at("ACCELERATE_CONFIG_DS_FIELDS"), "zero_stage,gradient_clipping");
}

TEST(AccelerateLaunch, BadFile_NamesFileKeyAndWayOut) {
  EXPECT_THAT(Error("distributed_type: NO\nnum_procesess: 2\n"),
              HasSubstr("default.yaml: the file has unknown keys (num_procesess for "
                        "num_processes?)"));
  EXPECT_THAT(Error("num_processes: 2\ncompute_environment: LOCAL_MACHINE\n"),
              HasSubstr("distributed_type must be specified"));
  EXPECT_THAT(Error("distributed_type: MULTI_GPU\nnum_processes: two\n"),
              HasSubstr("num_processes: \"two\" is not allowed: it must be a whole number"));
  EXPECT_THAT(Error("distributed_type: MULTI_GPU\nuse_cpu: maybe\n"), HasSubstr("true or false"));
  EXPECT_THAT(Error("distributed_type: FSDP\nfsdp_config: 3\n"), HasSubstr("a section"));
  EXPECT_THAT(Error("distributed_type: [NO]\n"), HasSubstr("it must be text"));
  EXPECT_THAT(Error("distributed_type: null\n"), HasSubstr("distributed_type: null"));
  EXPECT_THAT(Error("- a\n"), HasSubstr("list of KEY: VALUE"));
  EXPECT_THAT(Error("distributed_type: 'NO'\n  x: 1\n"), HasSubstr("default.yaml:2"));
  EXPECT_THAT(Error("compute_environment: AMAZON_SAGEMAKER\n"), HasSubstr("SAGEMAKER"));
  for (const char* environment : {"LOCAL_MACHIN", "local_machine", "3", "null"}) {
    EXPECT_THAT(Error(std::string("distributed_type: 'NO'\ncompute_environment: ") + environment),
                HasSubstr("is unknown: it must be LOCAL_MACHINE"));
  }
  EXPECT_THAT(Error("distributed_type: XLA\nnum_processes: 8\n"), HasSubstr("TPUs"));
  EXPECT_THAT(Error("distributed_type: MULTI_CPU\nnum_processes: 4\nmpirun_config:\n"
                    "  mpirun_hostfile: hosts\n"),
              HasSubstr("mpirun_hostfile is not supported"));
  EXPECT_THAT(Error("distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: 3\n"),
              HasSubstr("Less than two GPU ids"));
  EXPECT_THAT(Error("distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\n"),
              HasSubstr("main_process_ip is missing"));
  EXPECT_THAT(Error("distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\n"
                    "machine_rank: 2\n"),
              HasSubstr("it must be from 0 to 1"));
  EXPECT_THAT(Error("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTRO}\n"),
              HasSubstr("Unknown dynamo backend: INDUCTRO; did you mean INDUCTOR?"));
  EXPECT_THAT(Error("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\n"),
              HasSubstr("FP8 is not available on this machine"));
}

TEST(AccelerateLaunch, SizesOfParallelismThatAreNoNumbers_AreNamed) {
  const std::string file =
      "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
      "parallelism_config:\n  parallelism_config_";
  for (const char* key : {"dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"}) {
    for (const char* value : {"None", "null", "two", "1.5", "[2]"}) {
      EXPECT_THAT(Error(file + key + ": " + value + "\n"),
                  HasSubstr(std::string("parallelism_config_") + key + ": "))
          << value;
    }
    EXPECT_EQ(Error(file + key + ": '2'\n"), "no error");
  }
}

TEST(AccelerateLaunch, CountsInVariables_AreReadAsInPythonAndNamed) {
  const std::string file = "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n";
  const auto threads = [&](const std::map<std::string, std::string>& variables) {
    const auto plan = Plan(file, {}, variables, {.physical_cores = 8});
    return plan.ok() ? plan->env.at("OMP_NUM_THREADS") : std::string(plan.status().message());
  };
  EXPECT_EQ(threads({}), "4");
  EXPECT_EQ(threads({{"OMP_NUM_THREADS", " 3 "}}), "3");
  EXPECT_EQ(threads({{"OMP_NUM_THREADS", "-1"}}), "4");
  EXPECT_EQ(threads({{"MPI_LOCALNRANKS", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"}}), "2");
  EXPECT_EQ(threads({{"MPI_LOCALNRANKS", "-1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), "4");
  for (const char* word : {"x", "", "2.0"}) {
    EXPECT_THAT(threads({{"OMP_NUM_THREADS", word}}),
                HasSubstr(std::string("OMP_NUM_THREADS: ") + word + " is not allowed"));
    EXPECT_THAT(threads({{"MPI_LOCALNRANKS", word}}), HasSubstr("MPI_LOCALNRANKS"));
  }
}

TEST(AccelerateLaunch, ShortFlagsInOneWord_AreSeveral) {
  EXPECT_EQ(Error("", {"-qm", "--num_processes", "2"}), "no error");
  EXPECT_EQ(Error("", {"-t3", "--num_processes", "2"}), "no error");
  EXPECT_THAT(Error("", {"-mq", "--no_python", "--num_processes", "2"}),
              HasSubstr("--module and --no_python cannot be used together"));
  EXPECT_THAT(Error("", {"-qx"}), HasSubstr("-x: expected a flag"));
}

TEST(AccelerateLaunch, BadFlags_AreNamed) {
  EXPECT_THAT(Error("", {"--nmu_processes", "2"}), HasSubstr("did you mean --num_processes?"));
  EXPECT_THAT(Error("", {"--fsdp", "2"}), HasSubstr("it may be --fsdp_activation_checkpointing"));
  EXPECT_THAT(Error("", {"--num_processes"}), HasSubstr("--num_processes expects a value"));
  EXPECT_THAT(Error("", {"--num_processes", "x"}), HasSubstr("it must be a whole number"));
  EXPECT_THAT(Error("", {"--cpu=1"}), HasSubstr("--cpu takes no value"));
  EXPECT_THAT(Error("", {"train.py"}), HasSubstr("expected a flag"));
  EXPECT_THAT(Error("", {"--mixed_precision", "fp17"}), HasSubstr("one of no, fp16, bf16, fp8"));
  EXPECT_THAT(Error("", {"--fp8_override_linear_precision", "true,false"}),
              HasSubstr("three times"));
  EXPECT_THAT(Error("", {"--use_parallelism_config"}), HasSubstr("--fsdp_version=2"));
  EXPECT_THAT(Error("", {"--num_proc", "1"}), HasSubstr("it may be --num_processes"));
  EXPECT_THAT(Error("", {"--role", "-x"}), HasSubstr("--role expects a value"));
  EXPECT_THAT(Error("", {"--machine_rank", "-1"}), HasSubstr("machine_rank: -1"));
  EXPECT_THAT(Error("", {"--num_processes", "4294967298"}),
              HasSubstr("num_processes: 4294967298 is not allowed"));
  EXPECT_THAT(Error("", {"--num_machines", "4294967297"}),
              HasSubstr("num_machines: 4294967297 is not allowed"));
  EXPECT_THAT(Error("", {"--machine_rank", "4294967296"}), HasSubstr("must be from 0 to 0"));
}

}  // namespace
}  // namespace muster::client
