#include "agent/worker_environment.h"

#include "base/worker_variables.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

WorkerEnvironment Third() {
  WorkerEnvironment worker;
  worker.place = {.rank = 3,
                  .world_size = 4,
                  .local_rank = 1,
                  .local_world_size = 2,
                  .node_rank = 1,
                  .num_nodes = 2};
  worker.job = "digits";
  worker.worker_id = "w3";
  worker.incarnation = 18446744073709551615u;
  worker.coordinator = "127.0.0.1:29400";
  worker.master_addr = "127.0.0.1";
  worker.master_port = 4242;
  worker.restart_count = 1;
  worker.max_restarts = 5;
  worker.mixed_precision = "bf16";
  worker.sharding = "zero3";
  worker.activation_checkpointing = true;
  worker.activation_blocks = "Block,Head";
  worker.offload_activations = "disk:/scratch";
  worker.cpu = true;
  worker.gradient_accumulation_steps = 8;
  worker.cores = 16;
  return worker;
}

TEST(MakeWorkerVariables, MusterAndTorchrunNames_SayTheSame) {
  const auto variables = MakeWorkerVariables(Third(), {{"PATH", "/bin"}});
  const std::map<std::string, std::string> expected = {
      {"PATH", "/bin"},
      {"MUSTER_RANK", "3"},
      {"MUSTER_WORLD_SIZE", "4"},
      {"MUSTER_LOCAL_RANK", "1"},
      {"MUSTER_LOCAL_WORLD_SIZE", "2"},
      {"MUSTER_NODE_RANK", "1"},
      {"MUSTER_NUM_NODES", "2"},
      {"MUSTER_COORDINATOR", "127.0.0.1:29400"},
      {"MUSTER_JOB", "digits"},
      {"MUSTER_WORKER_ID", "w3"},
      {"MUSTER_INCARNATION", "18446744073709551615"},
      {"MUSTER_OUTAGE_TOLERANCE", "1m30s"},
      {"MUSTER_LEASE", "6s"},
      {"MUSTER_RESTART_COUNT", "1"},
      {"MUSTER_MIXED_PRECISION", "bf16"},
      {"MUSTER_SHARDING", "zero3"},
      {"MUSTER_ACTIVATION_CHECKPOINTING", "true"},
      {"MUSTER_ACTIVATION_BLOCKS", "Block,Head"},
      {"MUSTER_OFFLOAD_ACTIVATIONS", "disk:/scratch"},
      {"MUSTER_CPU", "true"},
      {"MUSTER_GRADIENT_ACCUMULATION_STEPS", "8"},
      {"MUSTER_DEBUG", "false"},
      {"MUSTER_AGENT_TELLS", "false"},
      {"ACCELERATE_MIXED_PRECISION", "bf16"},
      {"ACCELERATE_USE_CPU", "true"},
      {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8"},
      {"ACCELERATE_DEBUG_MODE", "false"},
      {"RANK", "3"},
      {"WORLD_SIZE", "4"},
      {"LOCAL_RANK", "1"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"GROUP_RANK", "1"},
      {"GROUP_WORLD_SIZE", "2"},
      {"ROLE_RANK", "3"},
      {"ROLE_WORLD_SIZE", "4"},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", "4242"},
      {"TORCHELASTIC_RESTART_COUNT", "1"},
      {"TORCHELASTIC_MAX_RESTARTS", "5"},
      {"TORCHELASTIC_RUN_ID", "digits"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"OMP_NUM_THREADS", "8"},
  };
  EXPECT_EQ(variables, expected);
}

TEST(MakeWorkerVariables, SettingsThatNobodyHasMade_LeaveTheVariablesThatTheUserGave) {
  WorkerEnvironment worker = Third();
  worker.sharding = worker.activation_blocks = worker.offload_activations = "";
  worker.activation_checkpointing = std::nullopt;
  worker.gradient_accumulation_steps = 0;
  worker.extra = {{"MUSTER_SHARDING", "zero1"},
                  {"MUSTER_GRADIENT_ACCUMULATION_STEPS", "4"},
                  {"MUSTER_ACTIVATION_CHECKPOINTING", "yes"},
                  {"MUSTER_ACTIVATION_BLOCKS", "Head"},
                  {"MUSTER_OFFLOAD_ACTIVATIONS", "cpu"}};
  const auto variables = MakeWorkerVariables(worker, {});
  for (const auto& [name, value] : worker.extra)
    EXPECT_THAT(variables, Contains(Pair(name, value)));
}

// In Accelerate, the variable wins over the argument of the program.
TEST(MakeWorkerVariables, DefaultAccumulation_OverridesNoProgram) {
  const auto variables = MakeWorkerVariables({}, {});
  EXPECT_THAT(variables, Not(Contains(Key("MUSTER_GRADIENT_ACCUMULATION_STEPS"))));
  EXPECT_THAT(variables, Not(Contains(Key("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"))));
}

TEST(MakeWorkerVariables, OuterLaunchers_DoNotSayWhereThisProcessStands) {
  const auto variables = MakeWorkerVariables(Third(), {{"RANK", "9"},
                                                       {"MUSTER_GENERATION", "4"},
                                                       {"OMPI_COMM_WORLD_RANK", "0"},
                                                       {"PMI_SIZE", "1"}});
  EXPECT_THAT(variables, Contains(Pair("RANK", "3")));
  EXPECT_THAT(variables, Not(Contains(Key("MUSTER_GENERATION"))));
  EXPECT_THAT(variables, Not(Contains(Key("OMPI_COMM_WORLD_RANK"))));
  EXPECT_THAT(variables, Not(Contains(Key("PMI_SIZE"))));
}

TEST(MakeWorkerVariables, Threads_GivenThenInheritedThenSharedOut) {
  WorkerEnvironment worker = Third();
  EXPECT_THAT(MakeWorkerVariables(worker, {{"OMP_NUM_THREADS", "3"}}),
              Contains(Pair("OMP_NUM_THREADS", "3")));
  worker.threads = 5;
  EXPECT_THAT(MakeWorkerVariables(worker, {{"OMP_NUM_THREADS", "3"}}),
              Contains(Pair("OMP_NUM_THREADS", "5")));
  worker.threads = 0;
  worker.cores = 1;
  EXPECT_THAT(MakeWorkerVariables(worker, {}), Contains(Pair("OMP_NUM_THREADS", "1")));
}

TEST(MakeWorkerVariables, Extra_WinsOverInheritedButNotOverThePlace) {
  WorkerEnvironment worker = Third();
  worker.extra = {{"A", "new"}, {"RANK", "0"}};
  const auto variables = MakeWorkerVariables(worker, {{"A", "old"}});
  EXPECT_THAT(variables, Contains(Pair("A", "new")));
  EXPECT_THAT(variables, Contains(Pair("RANK", "3")));
}

// A user's value for one of them is refused before; no other given variable is lost.
TEST(MakeWorkerVariables, WhatItSetsWhateverIsGiven_AreTheWorkerVariables) {
  WorkerEnvironment worker;
  worker.place = Third().place;
  worker.job = "digits";
  worker.mixed_precision = "bf16";
  worker.cpu = worker.debug = true;
  auto given = MakeWorkerVariables(worker, {});
  for (const char* const name :
       {"MUSTER_COORDINATOR", "MUSTER_TLS_CA", "MUSTER_TLS_CERT", "MUSTER_TLS_KEY",
        "MUSTER_TOKEN_FILE", "MUSTER_GENERATION", "MUSTER_MEMORY_SOCKET", "MUSTER_SHARDING",
        "MUSTER_GRADIENT_ACCUMULATION_STEPS", "MUSTER_RACK", "A"}) {
    given[name] = "";
  }
  for (auto& [name, value] : given) value = "given";
  worker.extra = given;
  const auto variables = MakeWorkerVariables(worker, {});
  for (const auto& [name, value] : given) {
    const auto set = variables.find(name);
    EXPECT_EQ(set != variables.end() && set->second == "given", FindWorkerVariable(name) == nullptr)
        << name;
  }
}

// As with muster-agent, whose own environment has it.
TEST(MakeWorkerVariables, PrecisionThatNobodySet_LeavesTheUsersVariable) {
  const auto given = MakeWorkerVariables(
      {},
      {{"MUSTER_MIXED_PRECISION", "bf16"}, {"ACCELERATE_USE_CPU", "yes"}, {"MUSTER_DEBUG", "1"}});
  EXPECT_THAT(given, Contains(Pair("MUSTER_MIXED_PRECISION", "bf16")));
  EXPECT_THAT(given, Contains(Pair("ACCELERATE_USE_CPU", "yes")));
  EXPECT_THAT(given, Contains(Pair("MUSTER_DEBUG", "1")));
  // Muster's variable would override it.
  EXPECT_THAT(given, Contains(Pair("MUSTER_CPU", "yes")));
  const auto none = MakeWorkerVariables({}, {});
  EXPECT_THAT(none, Contains(Pair("MUSTER_MIXED_PRECISION", "no")));
  EXPECT_THAT(none, Contains(Pair("ACCELERATE_MIXED_PRECISION", "no")));
  EXPECT_THAT(none, Contains(Pair("MUSTER_CPU", "false")));
  WorkerEnvironment worker;
  worker.cpu = false;
  EXPECT_THAT(MakeWorkerVariables(worker, {{"MUSTER_CPU", "true"}}),
              Contains(Pair("MUSTER_CPU", "false")));
}

TEST(ToEnvironmentBlock, KeepsValuesAsTheyAre) {
  EXPECT_THAT(ToEnvironmentBlock({{"A", "1 2=3"}, {"B", ""}}),
              ::testing::ElementsAre("A=1 2=3", "B="));
}

}  // namespace
}  // namespace muster::agent
