#include "worker/job/environment.h"

#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <string>

#include "base/mutate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;
using Variables = std::map<std::string, std::string>;

Environment Read(const Variables& variables, const EnvironmentArguments& arguments = {}) {
  auto env = ReadEnvironment(variables, arguments);
  EXPECT_TRUE(env.ok()) << env.status();
  return env.ok() ? *env : Environment{};
}

std::string Error(const Variables& variables, const EnvironmentArguments& arguments = {}) {
  auto env = ReadEnvironment(variables, arguments);
  EXPECT_FALSE(env.ok());
  EXPECT_EQ(env.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(env.status().message());
  EXPECT_EQ(message.find('\n'), std::string::npos) << "one line only";
  return message;
}

void ExpectPlace(const Environment& env, int rank, int world, int local, int local_world, int node,
                 int nodes) {
  EXPECT_EQ(env.rank.value, rank);
  EXPECT_EQ(env.world_size.value, world);
  EXPECT_EQ(env.local_rank.value, local);
  EXPECT_EQ(env.local_world_size.value, local_world);
  EXPECT_EQ(env.node_rank.value, node);
  EXPECT_EQ(env.num_nodes.value, nodes);
}

const Variables kMuster = {{"MUSTER_RANK", "3"},
                           {"MUSTER_WORLD_SIZE", "4"},
                           {"MUSTER_LOCAL_RANK", "1"},
                           {"MUSTER_LOCAL_WORLD_SIZE", "2"},
                           {"MUSTER_NODE_RANK", "1"},
                           {"MUSTER_NUM_NODES", "2"},
                           {"MUSTER_COORDINATOR", "10.0.0.1:29400"},
                           {"MUSTER_JOB", "mnist-1"},
                           {"MUSTER_GENERATION", "7"},
                           {"MUSTER_INCARNATION", "18446744073709551615"},
                           {"MUSTER_WORKER_ID", "node1/1"}};

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"GROUP_RANK", "1"},
                             {"GROUP_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29501"}};

Variables With(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Variables Without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(Environment, NoVariables_OneProcessAlone) {
  const Environment env = Read({{"PATH", "/bin"}, {"RANK", ""}});
  EXPECT_EQ(env.launcher, Launcher::kNone);
  EXPECT_TRUE(env.seated);
  ExpectPlace(env, 0, 1, 0, 1, 0, 1);
  EXPECT_EQ(env.rank.source, "default");
  EXPECT_EQ(env.mixed_precision.value, "no");
  EXPECT_TRUE(env.warnings.empty());
}

TEST(Environment, MusterVariables_AllReadWithProvenance) {
  const Environment env = Read(kMuster);
  EXPECT_EQ(env.launcher, Launcher::kMuster);
  ExpectPlace(env, 3, 4, 1, 2, 1, 2);
  EXPECT_EQ(env.rank.source, "MUSTER_RANK");
  EXPECT_EQ(env.coordinator.value, "10.0.0.1:29400");
  EXPECT_EQ(env.job.value, "mnist-1");
  EXPECT_EQ(env.generation.value, 7);
  EXPECT_EQ(env.incarnation.value, 18446744073709551615u);
  EXPECT_EQ(env.worker_id.value, "node1/1");
  EXPECT_EQ(env.master_port.value, 0) << "not needed with a coordinator";
  EXPECT_THAT(Describe(env), AllOf(HasSubstr("rank 3 (from MUSTER_RANK)\n"),
                                   HasSubstr("coordinator 10.0.0.1:29400")));
}

TEST(Environment, CoordinatorWithoutRank_SeatComesFromTheRendezvous) {
  const Environment env = Read({{"MUSTER_COORDINATOR", "[::1]:5"}, {"MUSTER_WORKER_ID", "w"}});
  EXPECT_FALSE(env.seated);
  EXPECT_EQ(env.launcher, Launcher::kMuster);
}

TEST(Environment, TorchrunVariables_AreRead) {
  const Environment env = Read(kTorchrun);
  EXPECT_EQ(env.launcher, Launcher::kTorchrun);
  ExpectPlace(env, 3, 4, 1, 2, 1, 2);
  EXPECT_EQ(env.master_addr.value, "10.0.0.1");
  EXPECT_EQ(env.master_port.value, 29501);
}

TEST(Environment, AgentStoreRestartCountAndTls_AreRead) {
  const Environment env = Read(With(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                {"TORCHELASTIC_RESTART_COUNT", "2"},
                                                {"GLOO_SOCKET_IFNAME", "eth1"},
                                                {"MUSTER_RACK", "r7"},
                                                {"MUSTER_NVLINK_DOMAIN", "d2"},
                                                {"MUSTER_TLS_CA", "ca.pem"},
                                                {"MUSTER_TOKEN_FILE", "token"}}));
  EXPECT_EQ(env.interface.value, "eth1");
  EXPECT_TRUE(env.agent_store.value);
  EXPECT_EQ(env.restart_count.value, 2);
  EXPECT_EQ(env.rack.value, "r7");
  EXPECT_EQ(env.nvlink_domain.value, "d2");
  EXPECT_EQ(env.tls_ca.value, "ca.pem");
  EXPECT_EQ(env.token_file.value, "token");
}

TEST(Environment, D28_TorchrunWithoutAccelerator_IsOneJobNotManyMains) {
  for (const char* cpu : {"0", "1", ""}) {
    const Environment env =
        Read(With(kTorchrun, {{"MUSTER_CPU", cpu}, {"CUDA_VISIBLE_DEVICES", ""}}));
    EXPECT_EQ(env.world_size.value, 4);
    EXPECT_EQ(env.rank.value, 3);
  }
}

TEST(Environment, TorchrunNamesBesideMusters_MustAgree) {
  EXPECT_EQ(Read(With(kMuster, {{"RANK", "3"}, {"WORLD_SIZE", "4"}})).launcher, Launcher::kMuster);
  EXPECT_THAT(Error(With(kMuster, {{"RANK", "0"}, {"WORLD_SIZE", "4"}})),
              HasSubstr("MUSTER_RANK=3 but RANK=0: two launchers disagree"));
  EXPECT_THAT(Error(With(kMuster, {{"RANK", "3"}, {"WORLD_SIZE", "8"}})),
              HasSubstr("MUSTER_WORLD_SIZE=4 but WORLD_SIZE=8"));
}

TEST(ReadEnvironment, ValueOfAnyLengthOrWithControlCharacters_IsRefusedInOneShortLine) {
  for (const char* const name :
       {"MUSTER_CPU", "MUSTER_GRADIENT_ACCUMULATION_STEPS", "MUSTER_MIXED_PRECISION",
        "MUSTER_SHARDING", "MUSTER_SHARDING_REDUCE_DTYPE", "MUSTER_OFFLOAD_OPTIMIZER",
        "MUSTER_TIMEOUT", "MUSTER_LEASE", "MUSTER_OUTAGE_TOLERANCE", "MUSTER_COORDINATOR",
        "MUSTER_LOG_LEVEL", "MUSTER_LOG_FORMAT"}) {
    const std::string error = Error({{name, "a\nb" + std::string(100'000, 'x')}});
    EXPECT_THAT(error, HasSubstr(name));
    EXPECT_THAT(error, HasSubstr("a\\x0ab"));
    EXPECT_LT(error.size(), 500u) << name;
  }
}

TEST(ReadEnvironment, LogLevel_IsOneOfFour) {
  EXPECT_THAT(Error({{"MUSTER_LOG_LEVEL", "verbose"}}),
              HasSubstr("MUSTER_LOG_LEVEL='verbose' is not one of debug, info, warning, error"));
  EXPECT_TRUE(ReadEnvironment({{"MUSTER_LOG_LEVEL", "Debug"}}).ok());
  EXPECT_TRUE(ReadEnvironment({{"MUSTER_LOG_LEVEL", ""}}).ok());
}

TEST(ReadEnvironment, UnknownLogFormat_IsRefused) {
  EXPECT_THAT(Error({{"MUSTER_LOG_FORMAT", "xml"}}),
              HasSubstr("MUSTER_LOG_FORMAT='xml' is not one of text, json"));
}

TEST(Environment, HalfAFamily_IsRefused) {
  EXPECT_THAT(Error({{"RANK", "1"}}), HasSubstr("RANK is set but WORLD_SIZE is not"));
  EXPECT_THAT(Error({{"WORLD_SIZE", "2"}}), HasSubstr("WORLD_SIZE is set but RANK is not"));
  EXPECT_THAT(Error(Without(kMuster, "MUSTER_WORLD_SIZE")),
              HasSubstr("MUSTER_RANK is set but MUSTER_WORLD_SIZE is not"));
  EXPECT_THAT(Error(Without(kTorchrun, "LOCAL_RANK")),
              HasSubstr("LOCAL_WORLD_SIZE is set but LOCAL_RANK is not"));
  EXPECT_THAT(Error({{"OMPI_COMM_WORLD_RANK", "1"}}), HasSubstr("OMPI_COMM_WORLD_SIZE is not"));
}

TEST(Environment, LoneWorldSizeOfOne_IsAloneProcess) {
  EXPECT_EQ(Read({{"WORLD_SIZE", "1"}}).launcher, Launcher::kNone);
}

TEST(Environment, ValuesOutsideTheirWorld_AreRefused) {
  EXPECT_THAT(Error(With(kTorchrun, {{"RANK", "4"}})),
              HasSubstr("RANK=4 is outside the world of 4 processes (WORLD_SIZE)"));
  EXPECT_THAT(Error(With(kTorchrun, {{"RANK", "-1"}})), HasSubstr("RANK='-1' is not an integer"));
  EXPECT_THAT(Error(With(kTorchrun, {{"RANK", "one"}})), HasSubstr("RANK='one'"));
  EXPECT_THAT(Error(With(kTorchrun, {{"RANK", "99999999999999999999"}})), HasSubstr("RANK="));
  EXPECT_THAT(Error(With(kTorchrun, {{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE='0'"));
  EXPECT_THAT(Error(With(kTorchrun, {{"LOCAL_RANK", "2"}})), HasSubstr("LOCAL_RANK=2 is outside"));
  EXPECT_THAT(Error(With(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})),
              HasSubstr("LOCAL_WORLD_SIZE=9 is more than"));
  EXPECT_THAT(Error(With(kTorchrun, {{"GROUP_WORLD_SIZE", "5"}})), HasSubstr("GROUP_WORLD_SIZE=5"));
  EXPECT_THAT(Error(With(kTorchrun, {{"GROUP_RANK", "2"}})), HasSubstr("GROUP_RANK=2"));
  EXPECT_THAT(Error(With(kTorchrun, {{"MASTER_PORT", "70000"}})), HasSubstr("MASTER_PORT=70000"));
  EXPECT_THAT(Error(With(kMuster, {{"MUSTER_COORDINATOR", "somewhere"}})),
              HasSubstr("MUSTER_COORDINATOR='somewhere' is not host:port"));
  EXPECT_THAT(Error(With(kMuster, {{"MUSTER_GENERATION", "x"}})),
              HasSubstr("MUSTER_GENERATION='x'"));
}

TEST(Environment, AgentsSocket_IsACoordinatorToo) {
  EXPECT_EQ(Read(With(kMuster, {{"MUSTER_COORDINATOR", "unix:/tmp/m/relay"}})).coordinator.value,
            "unix:/tmp/m/relay");
  EXPECT_THAT(Error(With(kMuster, {{"MUSTER_COORDINATOR", "unix:relay"}})),
              HasSubstr("is not host:port"));
}

TEST(Environment, RankAndWorldSizeOnly_OneProcessPerNode) {
  const Environment env =
      Read({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "job-master-0"}});
  ExpectPlace(env, 1, 2, 0, 1, 1, 2);
  EXPECT_EQ(env.master_port.value, 29500);
}

TEST(Environment, SeveralNodesAndNowhereToMeet_IsRefused) {
  EXPECT_THAT(Error(Without(kTorchrun, "MASTER_ADDR")),
              AllOf(HasSubstr("no address to meet at"),
                    HasSubstr("to run one process alone, unset RANK and WORLD_SIZE")));
}

TEST(Environment, OneNodeWithoutMasterAddr_MeetsOnLoopback) {
  const Environment env = Read({{"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(env.launcher, Launcher::kMpi);
  ExpectPlace(env, 1, 2, 1, 2, 0, 1);
  EXPECT_EQ(env.master_addr.value, "127.0.0.1");
  EXPECT_EQ(env.master_port.value, 29500);
}

TEST(Environment, IntelMpiAndMvapich_AreRead) {
  ExpectPlace(Read({{"PMI_RANK", "1"},
                    {"PMI_SIZE", "2"},
                    {"MPI_LOCALRANKID", "1"},
                    {"MPI_LOCALNRANKS", "2"}}),
              1, 2, 1, 2, 0, 1);
  ExpectPlace(Read({{"MV2_COMM_WORLD_RANK", "2"},
                    {"MV2_COMM_WORLD_SIZE", "4"},
                    {"MV2_COMM_WORLD_LOCAL_RANK", "0"},
                    {"MV2_COMM_WORLD_LOCAL_SIZE", "2"},
                    {"MASTER_ADDR", "a"}}),
              2, 4, 0, 2, 1, 2);
}

const Variables kSlurm = {{"SLURM_JOB_ID", "1234567"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "4"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_NNODES", "3"},
                          {"SLURM_TASKS_PER_NODE", "1(x2),2"},
                          {"SLURM_JOB_NODELIST", "gpu[03-05]"}};

TEST(Environment, SlurmStep_IsRead) {
  const Environment env = Read(With(kSlurm, {{"SLURM_LOCALID", "1"}}));
  EXPECT_EQ(env.launcher, Launcher::kSlurm);
  ExpectPlace(env, 3, 4, 1, 2, 2, 3);
  EXPECT_EQ(env.master_addr.value, "gpu03");
  EXPECT_EQ(env.master_port.value, 15000 + 4567);
  EXPECT_EQ(env.master_port.source, "SLURM_JOB_ID");
}

// Like the variables that srun --mpi=pmi2 and `export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS`
// set.
TEST(Environment, RankAndSizeThatAreSlurms_DoNotHideTheNode) {
  for (const Variables& same : {Variables{{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}},
                                Variables{{"RANK", "3"}, {"WORLD_SIZE", "4"}}}) {
    const Environment env = Read(With(With(kSlurm, {{"SLURM_LOCALID", "1"}}), same));
    EXPECT_EQ(env.launcher, Launcher::kSlurm);
    ExpectPlace(env, 3, 4, 1, 2, 2, 3);
    EXPECT_EQ(env.master_addr.value, "gpu03");
  }
  // mpirun within a step: its own processes, or its own knowledge of the node.
  EXPECT_EQ(
      Read(With(kSlurm, {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MASTER_ADDR", "a"}})).launcher,
      Launcher::kMpi);
  EXPECT_EQ(
      Read(With(kSlurm, {{"PMI_RANK", "3"}, {"PMI_SIZE", "8"}, {"MASTER_ADDR", "a"}})).launcher,
      Launcher::kMpi);
  const Environment hydra = Read(With(
      kSlurm,
      {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "3"}, {"MPI_LOCALNRANKS", "4"}}));
  EXPECT_EQ(hydra.launcher, Launcher::kMpi);
  EXPECT_EQ(hydra.local_rank.value, 3);
}

TEST(Environment, SlurmSingleTask_RunsAloneWithoutWarning) {
  const Environment env =
      Read({{"SLURM_JOB_ID", "1"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}});
  EXPECT_EQ(env.launcher, Launcher::kNone);
  EXPECT_EQ(env.world_size.value, 1);
  EXPECT_TRUE(env.warnings.empty());
}

TEST(Environment, SlurmBatchScriptOfSeveralTasks_RunsAloneAndSaysSo) {
  const Environment env = Read(Without(kSlurm, "SLURM_STEP_ID"));
  EXPECT_EQ(env.world_size.value, 1);
  ASSERT_THAT(env.warnings, SizeIs(1));
  EXPECT_THAT(env.warnings[0], HasSubstr("Start it with srun"));
}

TEST(Environment, SlurmWithUnreadableTasksPerNode_IsRefused) {
  EXPECT_THAT(Error(With(kSlurm, {{"SLURM_TASKS_PER_NODE", "1(y2"}})),
              HasSubstr("SLURM_TASKS_PER_NODE='1(y2'"));
}

// Sums of the longest duration and the present time overflow: waits would end at once.
TEST(Environment, WaitWithoutEnd_IsAYear) {
  const absl::Duration year = absl::Hours(24 * 365);
  const Environment env = Read({{"MUSTER_TIMEOUT", "inf"},
                                {"MUSTER_OUTAGE_TOLERANCE", "inf"},
                                {"MUSTER_LEASE", "9999999h"}});
  EXPECT_EQ(env.timeout.value, year);
  EXPECT_EQ(env.outage_tolerance.value, year);
  EXPECT_EQ(env.lease.value, year);
  EXPECT_EQ(Read({}, {.timeout = absl::InfiniteDuration()}).timeout.value, year);
}

TEST(Environment, NearerLauncherWins_TorchrunOverMpiOverSlurm) {
  EXPECT_EQ(Read(With(kSlurm, kTorchrun)).launcher, Launcher::kTorchrun);
  const Variables mpi = {{"OMPI_COMM_WORLD_RANK", "0"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(Read(With(kSlurm, mpi)).launcher, Launcher::kMpi);
  EXPECT_EQ(Read(With(mpi, kTorchrun)).launcher, Launcher::kTorchrun);
}

TEST(Environment, D37_ArgumentBeatsVariableBeatsDefault) {
  const Variables variables = {{"MUSTER_GRADIENT_ACCUMULATION_STEPS", "4"},
                               {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2"},
                               {"MUSTER_MIXED_PRECISION", "bf16"},
                               {"MUSTER_CPU", "yes"},
                               {"MUSTER_DEBUG", "on"},
                               {"MUSTER_PROJECT_DIR", "runs"},
                               {"MUSTER_TIMEOUT", "90s"}};
  Environment env = Read(variables);
  EXPECT_EQ(env.gradient_accumulation_steps.value, 4);
  EXPECT_EQ(env.gradient_accumulation_steps.source, "MUSTER_GRADIENT_ACCUMULATION_STEPS");
  EXPECT_EQ(env.mixed_precision.value, "bf16");
  EXPECT_TRUE(env.use_cpu.value);
  EXPECT_TRUE(env.debug.value);
  EXPECT_EQ(env.project_dir.value, "runs");
  EXPECT_EQ(env.timeout.value, absl::Seconds(90));

  env = Read(variables, {.mixed_precision = "no",
                         .use_cpu = false,
                         .gradient_accumulation_steps = 8,
                         .debug = false,
                         .project_dir = "",
                         .timeout = absl::Minutes(1)});
  EXPECT_EQ(env.gradient_accumulation_steps.value, 8);
  EXPECT_EQ(env.gradient_accumulation_steps.source, "argument");
  EXPECT_EQ(env.mixed_precision.value, "no");
  EXPECT_FALSE(env.use_cpu.value);
  EXPECT_FALSE(env.debug.value);
  EXPECT_EQ(env.timeout.value, absl::Minutes(1));
}

TEST(Environment, WishThatTheProgramOverrides_IsNamedUnlessItIsALaunchersDefault) {
  const Variables wishes = {{"MUSTER_GRADIENT_ACCUMULATION_STEPS", "4"},
                            {"ACCELERATE_MIXED_PRECISION", "bf16"}};
  EXPECT_THAT(Read(wishes, {.mixed_precision = "no", .gradient_accumulation_steps = 8}).warnings,
              UnorderedElementsAre(
                  "MUSTER_GRADIENT_ACCUMULATION_STEPS=4 has no effect: the program itself sets 8",
                  "ACCELERATE_MIXED_PRECISION=bf16 has no effect: the program itself sets no"));
  EXPECT_THAT(Read(wishes, {.mixed_precision = "bf16", .gradient_accumulation_steps = 4}).warnings,
              IsEmpty());
  EXPECT_THAT(Read({{"MUSTER_GRADIENT_ACCUMULATION_STEPS", "1"}, {"MUSTER_MIXED_PRECISION", "no"}},
                   {.mixed_precision = "bf16", .gradient_accumulation_steps = 8})
                  .warnings,
              IsEmpty());
}

TEST(Environment, AccelerateWishes_AreUnderstood) {
  const Environment env = Read({{"ACCELERATE_MIXED_PRECISION", "fp16"},
                                {"ACCELERATE_USE_CPU", "true"},
                                {"ACCELERATE_DEBUG_MODE", "1"}});
  EXPECT_EQ(env.mixed_precision.value, "fp16");
  EXPECT_EQ(env.mixed_precision.source, "ACCELERATE_MIXED_PRECISION");
  EXPECT_TRUE(env.use_cpu.value);
  EXPECT_TRUE(env.debug.value);
}

TEST(Environment, DeviceOfAccelerates_IsTakenOrRefused) {
  const Environment env = Read({{"ACCELERATE_TORCH_DEVICE", "cpu"}});
  EXPECT_TRUE(env.use_cpu.value);
  EXPECT_EQ(env.use_cpu.source, "ACCELERATE_TORCH_DEVICE");
  for (const char* device : {"cuda", "cuda:1", "mps"}) {
    EXPECT_THAT(Error({{"ACCELERATE_TORCH_DEVICE", device}}),
                HasSubstr("ACCELERATE_TORCH_DEVICE=" + std::string(device) + ": "));
  }
}

TEST(Environment, VariablesThatOnlyAccelerateObeys_AreNamedInOneWarning) {
  EXPECT_THAT(Read({{"ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"},
                    {"ACCELERATE_CPU_AFFINITY", "1"},
                    {"ACCELERATE_LOG_LEVEL", "debug"}})
                  .warnings,
              ElementsAre("ACCELERATE_DYNAMO_BACKEND (there is no Python code to compile), "
                          "ACCELERATE_CPU_AFFINITY (bind the processes with numactl or taskset), "
                          "ACCELERATE_LOG_LEVEL (MUSTER_LOG_LEVEL sets it) have no effect on a "
                          "program written with Muster"));
  for (const char* name : {"ACCELERATE_INIT_INCLUDE_BUFFERS", "ACCELERATE_BYPASS_DEVICE_MAP"}) {
    EXPECT_THAT(Read({{name, "true"}}).warnings, ElementsAre(HasSubstr(name)));
  }
  // As its launcher always sets them.
  EXPECT_THAT(Read({{"ACCELERATE_DYNAMO_BACKEND", "no"},
                    {"ACCELERATE_CPU_AFFINITY", "False"},
                    {"ACCELERATE_BYPASS_DEVICE_MAP", "0"}})
                  .warnings,
              IsEmpty());
}

// A launcher of Accelerate that asks for an engine that is not supported: plain data parallelism
// instead would go unnoticed.
TEST(Environment, D34_EnginesOfAccelerates_AreRefusedByName) {
  for (const char* name : {"ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG"}) {
    EXPECT_THAT(Error({{name, "true"}}), HasSubstr(name));
    EXPECT_EQ(Read({{name, "false"}}).world_size.value, 1);
  }
}

TEST(Environment, D34_FsdpAndDeepSpeed_AreKeptForTheSharding) {
  const std::map<std::string, std::string> variables = {{"FSDP_SHARDING_STRATEGY", "HYBRID_SHARD"},
                                                        {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"}};
  EXPECT_TRUE(Read(variables).engine_variables.empty());
  for (const char* name : {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"}) {
    auto with = variables;
    with[name] = "yes";
    const Environment env = Read(with);
    EXPECT_EQ(env.engine_variables.at(name), "true");
    EXPECT_EQ(env.engine_variables.at("FSDP_SHARDING_STRATEGY"), "HYBRID_SHARD");
    EXPECT_EQ(env.engine_variables.at("ACCELERATE_DEEPSPEED_ZERO_STAGE"), "2");
  }
  EXPECT_THAT(Error({{"ACCELERATE_USE_FSDP", "1"}, {"ACCELERATE_USE_DEEPSPEED", "1"}}),
              HasSubstr("both true"));
}

TEST(Environment, Sharding_IsReadWithItsUnits) {
  EXPECT_EQ(Read({}).sharding.value, "no_shard");
  const Environment env =
      Read({{"MUSTER_SHARDING", "zero3"}, {"MUSTER_SHARDING_UNITS", "Block, Head,"}});
  EXPECT_EQ(env.sharding.value, "zero3");
  EXPECT_THAT(env.sharding_units.value, ::testing::ElementsAre("Block", "Head"));
  const Environment kept = Read({{"MUSTER_SHARDING_NO_SPLIT", "Experts, blocks.0"},
                                 {"MUSTER_SHARDING_IGNORED_MODULES", "head"},
                                 {"MUSTER_SHARDING_IGNORED_PARAMETERS", ".*\\.bias"}});
  EXPECT_THAT(kept.sharding_no_split.value, ::testing::ElementsAre("Experts", "blocks.0"));
  EXPECT_EQ(kept.sharding_ignored_modules.value, "head");
  EXPECT_EQ(kept.sharding_ignored_parameters.value, ".*\\.bias");
  const Environment shaped = Read({{"MUSTER_SHARDING_UNIT_NAMES", "blocks.0, head"},
                                   {"MUSTER_SHARDING_MIN_UNIT_PARAMETERS", "3000000000"},
                                   {"MUSTER_SHARDING_GROUP_SIZE", "4"},
                                   {"MUSTER_SHARDING_RESHARD_GROUP_SIZE", "2"},
                                   {"MUSTER_SHARDING_RESHARD_AFTER_FORWARD", "no"},
                                   {"MUSTER_SHARDING_PARAMETER_DTYPE", "bf16"},
                                   {"MUSTER_SHARDING_REDUCE_DTYPE", "fp16"},
                                   {"MUSTER_SHARDING_OUTPUT_DTYPE", "fp32"},
                                   {"MUSTER_SHARDING_BUFFER_DTYPE", "bf16"}});
  EXPECT_THAT(shaped.sharding_unit_names.value, ::testing::ElementsAre("blocks.0", "head"));
  EXPECT_EQ(shaped.sharding_min_unit_parameters.value, 3000000000);
  EXPECT_EQ(shaped.sharding_group_size.value, 4);
  EXPECT_EQ(shaped.sharding_reshard_group_size.value, 2);
  EXPECT_FALSE(shaped.sharding_reshard_after_forward.value);
  EXPECT_TRUE(env.sharding_reshard_after_forward.value);
  EXPECT_EQ(shaped.sharding_parameter_dtype.value, "bf16");
  EXPECT_EQ(shaped.sharding_reduce_dtype.value, "fp16");
  EXPECT_EQ(env.sharding_reduce_dtype.value, "fp32");
  EXPECT_EQ(shaped.sharding_output_dtype.value, "fp32");
  EXPECT_EQ(shaped.sharding_buffer_dtype.value, "bf16");
  EXPECT_TRUE(env.sharding_output_dtype.is_default());
  EXPECT_TRUE(env.sharding_buffer_dtype.is_default());
  for (const char* name :
       {"MUSTER_SHARDING_MIN_UNIT_PARAMETERS", "MUSTER_SHARDING_GROUP_SIZE",
        "MUSTER_SHARDING_RESHARD_GROUP_SIZE", "MUSTER_SHARDING_RESHARD_AFTER_FORWARD",
        "MUSTER_SHARDING_PARAMETER_DTYPE", "MUSTER_SHARDING_REDUCE_DTYPE",
        "MUSTER_SHARDING_OUTPUT_DTYPE", "MUSTER_SHARDING_BUFFER_DTYPE"}) {
    EXPECT_THAT(Error({{name, "-1"}}), HasSubstr(name));
  }
  EXPECT_FALSE(env.sharding_overlap.value);
  EXPECT_TRUE(Read({{"MUSTER_SHARDING_OVERLAP", "yes"}}).sharding_overlap.value);
  EXPECT_THAT(Error({{"MUSTER_SHARDING_OVERLAP", "perhaps"}}),
              HasSubstr("MUSTER_SHARDING_OVERLAP"));
  EXPECT_FALSE(env.optimizer_in_backward.value);
  EXPECT_TRUE(Read({{"MUSTER_OPTIMIZER_IN_BACKWARD", "yes"}}).optimizer_in_backward.value);
  EXPECT_THAT(Error({{"MUSTER_OPTIMIZER_IN_BACKWARD", "perhaps"}}),
              HasSubstr("MUSTER_OPTIMIZER_IN_BACKWARD"));
}

TEST(Environment, Offload_IsAPlace) {
  EXPECT_EQ(Read({}).offload_optimizer.value, "none");
  EXPECT_EQ(Read({}).offload_gradients.value, "none");
  const Environment env = Read({{"MUSTER_OFFLOAD_OPTIMIZER", "disk:/scratch"},
                                {"MUSTER_OFFLOAD_GRADIENTS", "disk:/more"},
                                {"MUSTER_OFFLOAD_PARAMETERS", "cpu"}});
  EXPECT_EQ(env.offload_optimizer.value, "disk:/scratch");
  EXPECT_EQ(env.offload_gradients.value, "disk:/more");
  EXPECT_EQ(env.offload_parameters.value, "cpu");
  for (const char* text : {"disk", "disk:", "nvme"}) {
    EXPECT_THAT(Error({{"MUSTER_OFFLOAD_PARAMETERS", text}}),
                AllOf(HasSubstr("(from MUSTER_OFFLOAD_PARAMETERS)"), HasSubstr("disk:FOLDER")))
        << text;
    EXPECT_THAT(Error({{"MUSTER_OFFLOAD_GRADIENTS", text}}),
                HasSubstr("(from MUSTER_OFFLOAD_GRADIENTS)"));
  }
}

TEST(Environment, ActivationCheckpointing_IsReadWithItsBlocksAndPlace) {
  EXPECT_FALSE(Read({}).activation_checkpointing.value);
  const Environment env = Read({{"MUSTER_ACTIVATION_CHECKPOINTING", "yes"},
                                {"MUSTER_ACTIVATION_BLOCKS", "Block, Head"},
                                {"MUSTER_OFFLOAD_ACTIVATIONS", "disk:/scratch"}});
  EXPECT_TRUE(env.activation_checkpointing.value);
  EXPECT_THAT(env.activation_blocks.value, ::testing::ElementsAre("Block", "Head"));
  EXPECT_EQ(env.offload_activations.value, "disk:/scratch");
  EXPECT_THAT(Error({{"MUSTER_ACTIVATION_CHECKPOINTING", "perhaps"}}),
              HasSubstr("MUSTER_ACTIVATION_CHECKPOINTING"));
  EXPECT_THAT(
      Error({{"MUSTER_ACTIVATION_CHECKPOINTING", "yes"}, {"MUSTER_OFFLOAD_ACTIVATIONS", "nvme"}}),
      HasSubstr("(from MUSTER_OFFLOAD_ACTIVATIONS)"));
  // Alone they would have no effect.
  for (const char* name : {"MUSTER_ACTIVATION_BLOCKS", "MUSTER_OFFLOAD_ACTIVATIONS"}) {
    EXPECT_THAT(Error({{name, "cpu"}}),
                AllOf(HasSubstr(name), HasSubstr("but nothing enables it")));
  }
}

TEST(Environment, BadWishes_AreRefusedByName) {
  EXPECT_THAT(Error({{"MUSTER_SHARDING", "zero4"}}),
              HasSubstr("sharding 'zero4' (from MUSTER_SHARDING) is not one of no_shard, zero1"));
  EXPECT_THAT(Error({{"MUSTER_MIXED_PRECISION", "fp12"}}),
              HasSubstr("mixed precision 'fp12' (from MUSTER_MIXED_PRECISION)"));
  EXPECT_THAT(Error({}, {.mixed_precision = "half"}), HasSubstr("'half' (from argument)"));
  EXPECT_THAT(Error({{"MUSTER_CPU", "maybe"}}), HasSubstr("MUSTER_CPU='maybe'"));
  EXPECT_THAT(Error({{"MUSTER_GRADIENT_ACCUMULATION_STEPS", "0"}}),
              HasSubstr("MUSTER_GRADIENT_ACCUMULATION_STEPS='0'"));
  EXPECT_THAT(Error({}, {.gradient_accumulation_steps = 0}),
              HasSubstr("gradient_accumulation_steps=0"));
  EXPECT_THAT(Error({{"MUSTER_TIMEOUT", "90"}}), HasSubstr("MUSTER_TIMEOUT='90'"));
  EXPECT_THAT(Error({{"MUSTER_OUTAGE_TOLERANCE", "-1s"}}),
              HasSubstr("MUSTER_OUTAGE_TOLERANCE='-1s'"));
  EXPECT_THAT(Error({{"MUSTER_LEASE", "2s"}}), HasSubstr("not a duration of at least 4s"));
  EXPECT_THAT(Error({}, {.timeout = absl::ZeroDuration()}), HasSubstr("timeout"));
}

TEST(ReadEnvironment, MutatedVariables_AreReadOrRefusedInOneLine) {
  const std::map<std::string, std::string> samples[] = {
      {{"MUSTER_COORDINATOR", "10.0.0.1:29400"},
       {"MUSTER_JOB", "job"},
       {"MUSTER_WORKER_ID", "w0"},
       {"MUSTER_RANK", "1"},
       {"MUSTER_WORLD_SIZE", "4"},
       {"MUSTER_LOCAL_RANK", "1"},
       {"MUSTER_LOCAL_WORLD_SIZE", "2"},
       {"MUSTER_INCARNATION", "18446744073709551615"},
       {"MUSTER_TIMEOUT", "90s"},
       {"MUSTER_OUTAGE_TOLERANCE", "2m"},
       {"MUSTER_LEASE", "20s"},
       {"MUSTER_DEBUG", "1"}},
      {{"RANK", "0"},
       {"WORLD_SIZE", "2"},
       {"LOCAL_RANK", "0"},
       {"LOCAL_WORLD_SIZE", "2"},
       {"MASTER_ADDR", "127.0.0.1"},
       {"MASTER_PORT", "29500"},
       {"TORCHELASTIC_RESTART_COUNT", "1"},
       {"TORCHELASTIC_RUN_ID", "x"}},
      {{"SLURM_JOB_ID", "123"},
       {"SLURM_PROCID", "3"},
       {"SLURM_NTASKS", "8"},
       {"SLURM_LOCALID", "1"},
       {"SLURM_NODEID", "1"},
       {"SLURM_NNODES", "2"},
       {"SLURM_TASKS_PER_NODE", "4(x2)"},
       {"SLURM_STEP_NODELIST", "gpu[03-05,9],login"},
       {"SLURM_JOB_NODELIST", "gpu[03-05,9],login"}},
      {{"OMPI_COMM_WORLD_RANK", "1"},
       {"OMPI_COMM_WORLD_SIZE", "2"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
       {"MASTER_ADDR", "::1"},
       {"MASTER_PORT", "1"}}};
  std::mt19937_64 random(20261121);
  int read = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::map<std::string, std::string> variables = samples[random() % 4];
    for (uint64_t changes = 1 + random() % 2; changes > 0; --changes) {
      auto it = std::next(variables.begin(), random() % variables.size());
      it->second = Mutate(it->second, random);
      // The way a shell passes them on.
      it->second = it->second.substr(0, it->second.find('\0'));
    }
    const absl::StatusOr<Environment> env = ReadEnvironment(variables);
    if (env.ok()) {
      ++read;
      ASSERT_GE(env->rank.value, 0);
      ASSERT_LT(env->rank.value, env->world_size.value);
      ASSERT_GE(env->local_rank.value, 0);
      ASSERT_FALSE(Describe(*env).empty());
    } else {
      ASSERT_EQ(env.status().code(), absl::StatusCode::kInvalidArgument);
      ASSERT_FALSE(env.status().message().empty());
    }
  }
  EXPECT_GT(read, 1000);
}

}  // namespace
}  // namespace muster
