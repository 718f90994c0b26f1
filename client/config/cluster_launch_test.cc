#include "client/config/cluster_launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <random>

#include "base/mutate.h"

namespace muster::client {
namespace {

using testing::HasSubstr;
using testing::Not;
using Variables = std::map<std::string, std::string>;

Variables Step() {
  return {{"SLURM_JOB_ID", "1042"},
          {"SLURM_STEP_ID", "3"},
          {"SLURM_PROCID", "2"},
          {"SLURM_NODEID", "2"},
          {"SLURM_NNODES", "8"},
          {"SLURM_STEP_NUM_NODES", "4"},
          {"SLURM_STEP_NUM_TASKS", "4"},
          {"SLURM_STEP_TASKS_PER_NODE", "1(x4)"},
          {"SLURM_STEP_NODELIST", "gpu[07-09,12]"},
          {"SLURM_JOB_NODELIST", "gpu[01-12]"}};
}

Variables With(Variables variables, const Variables& others) {
  for (const auto& [name, value] : others) variables[name] = value;
  return variables;
}

std::string Text(const Variables& variables, const std::string& setting) {
  const absl::StatusOr<Layer> layer = LayerFromCluster(variables);
  EXPECT_TRUE(layer.ok()) << layer.status();
  if (!layer.ok()) return "";
  const auto it = layer->settings.find(setting);
  return it == layer->settings.end() ? "" : it->second.text;
}

std::string Error(const Variables& variables) {
  const absl::StatusOr<Layer> layer = LayerFromCluster(variables);
  EXPECT_FALSE(layer.ok());
  return std::string(layer.status().message());
}

TEST(LayerFromCluster, SlurmStepWithATaskOnEachNode_IsALaunchOnThem) {
  EXPECT_EQ(Text(Step(), "num_machines"), "4");
  EXPECT_EQ(Text(Step(), "machine_rank"), "2");
  EXPECT_EQ(Text(Step(), "main_process_ip"), "gpu07");
  EXPECT_EQ(Text(Step(), "main_process_port"), "26225");
  const absl::StatusOr<Layer> layer = LayerFromCluster(Step());
  ASSERT_TRUE(layer.ok());
  EXPECT_EQ(layer->settings.at("machine_rank").source, "SLURM_NODEID");
  // Another step, and another job, on the same nodes.
  EXPECT_NE(Text(With(Step(), {{"SLURM_STEP_ID", "4"}}), "main_process_port"), "26225");
  EXPECT_NE(Text(With(Step(), {{"SLURM_JOB_ID", "1043"}}), "main_process_port"), "26225");
}

TEST(LayerFromCluster, OneTask_IsALaunchOnThisMachine) {
  const Variables one =
      With(Step(),
           {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_NODEID", "0"}});
  EXPECT_EQ(Text(one, "num_machines"), "");
  EXPECT_EQ(Text({}, "num_machines"), "");
  EXPECT_EQ(Text({{"SLURM_JOB_ID", "7"}, {"SLURM_NNODES", "1"}}, "num_machines"), "");
  EXPECT_EQ(Text({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, "num_machines"),
            "");
}

TEST(LayerFromCluster, SeveralTasksOnANode_AreRefused) {
  EXPECT_THAT(
      Error(With(Step(), {{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_STEP_TASKS_PER_NODE", "2(x4)"}})),
      testing::AllOf(HasSubstr("srun has started this command 2 times on this machine"),
                     HasSubstr("SLURM_STEP_TASKS_PER_NODE=2(x4)"),
                     HasSubstr("srun --ntasks-per-node=1")));
  EXPECT_THAT(Error({{"OMPI_COMM_WORLD_RANK", "0"},
                     {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
              HasSubstr("mpirun --map-by ppr:1:node"));
}

TEST(LayerFromCluster, BatchScriptOfSeveralNodes_IsRefusedWithoutSrun) {
  EXPECT_THAT(Error({{"SLURM_JOB_ID", "7"}, {"SLURM_NNODES", "4"}, {"SLURM_NTASKS", "4"}}),
              testing::AllOf(HasSubstr("the SLURM job has 4 nodes"),
                             HasSubstr("srun --ntasks-per-node=1 muster launch"),
                             HasSubstr("--num_machines 1")));
}

TEST(LayerFromCluster, Mpirun_SaysWhichMachineButNotWhereTheFirstIs) {
  const Variables mpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
  EXPECT_EQ(Text(mpi, "num_machines"), "3");
  EXPECT_EQ(Text(mpi, "machine_rank"), "1");
  EXPECT_EQ(Text(mpi, "main_process_ip"), "");
  // Its daemons are a step of the allocation.
  EXPECT_EQ(Text(With(Step(), mpi), "machine_rank"), "1");
  // The variables of srun --mpi=pmi2.
  EXPECT_EQ(Text(With(Step(), {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}), "main_process_ip"), "gpu07");
  EXPECT_EQ(Text({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "1"}}, "machine_rank"),
            "2");
}

TEST(AddressOfHost, NamesThatOthersCannotReach_AreRefused) {
  EXPECT_EQ(AddressOfHost("192.0.2.7").value(), "192.0.2.7");
  EXPECT_EQ(AddressOfHost("2001:db8::7").value(), "2001:db8::7");
  for (const char* const loopback : {"localhost", "127.0.1.1", "::1"}) {
    EXPECT_THAT(std::string(AddressOfHost(loopback).status().message()),
                testing::AllOf(HasSubstr("loopback"), HasSubstr("--main_process_ip")));
  }
  EXPECT_THAT(std::string(AddressOfHost("no.such.host.invalid").status().message()),
              HasSubstr("host no.such.host.invalid has no address here"));
}

TEST(LayerFromCluster, NumbersThatAreNone_AreNamed) {
  EXPECT_THAT(Error(With(Step(), {{"SLURM_NODEID", "two"}})), HasSubstr("SLURM_NODEID=two"));
  EXPECT_THAT(Error(With(Step(), {{"SLURM_STEP_NUM_TASKS", "-4"}})),
              HasSubstr("SLURM_STEP_NUM_TASKS=-4"));
  EXPECT_THAT(Error(With(Step(), {{"SLURM_STEP_NUM_NODES", "99999999999999999999"}})),
              HasSubstr("SLURM_STEP_NUM_NODES"));
  EXPECT_THAT(Error(With(Step(), {{"SLURM_STEP_NUM_NODES", "0"}})),
              HasSubstr("SLURM_STEP_NUM_NODES=0 is not a number from 1 to 2147483647"));
}

TEST(LayerFromCluster, MutatedVariables_AreReadOrRefusedInOneLine) {
  const Variables samples[] = {Step(),
                               {{"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_SIZE", "3"},
                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}};
  std::mt19937 random(7);
  for (int round = 0; round < 20'000; ++round) {
    Variables variables = samples[round % 2];
    auto changed = variables.begin();
    std::advance(changed, round / 2 % variables.size());
    changed->second = Mutate(changed->second, random);
    const absl::StatusOr<Layer> layer = LayerFromCluster(variables);
    EXPECT_THAT(std::string(layer.status().message()), Not(HasSubstr("\n")));
  }
}

}  // namespace
}  // namespace muster::client
