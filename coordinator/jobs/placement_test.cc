#include "coordinator/jobs/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "proto/name_value.h"

namespace muster::coordinator {
namespace {

class PlacementTest : public testing::Test {
 protected:
  void AddNode(const std::string& name, int cpus, int gpus, const std::string& rack = "",
               int64_t memory = int64_t{64} << 30) {
    v1::NodeInfo& info = infos_.emplace_back();
    info.set_rack(rack);
    for (int i = 0; i < gpus; ++i) info.add_gpus("gpu");
    CandidateNode node{.info = &info, .uid = 7, .space = {}};
    node.space.cpus = cpus;
    node.space.memory = memory;
    for (int i = 0; i < gpus; ++i) node.space.gpus.insert(i);
    nodes_[name] = node;
  }
  static v1::JobSpec Spec(int min, int max, int gpus = 0, int cpus = 1) {
    v1::JobSpec spec;
    spec.set_min_processes(min);
    spec.set_max_processes(max);
    spec.mutable_per_process()->set_gpus(gpus);
    spec.mutable_per_process()->set_cpus(cpus);
    return spec;
  }
  PlacementDecision Run(const v1::JobSpec& spec) { return Place(spec, {}, nodes_); }
  static std::vector<std::string> Names(const PlacementDecision& decision) {
    std::vector<std::string> names;
    for (const v1::Placement& placement : decision.placements) names.push_back(placement.node());
    return names;
  }

  std::deque<v1::NodeInfo> infos_;
  CandidateNodes nodes_;
};

TEST_F(PlacementTest, Job_FitsOneNode_IsNotSpread) {
  AddNode("a", 4, 0);
  AddNode("b", 8, 0);
  const PlacementDecision decision = Run(Spec(8, 8));
  ASSERT_EQ(Names(decision), std::vector<std::string>{"b"});
  EXPECT_EQ(decision.placements[0].processes(), 8);
  EXPECT_EQ(decision.processes, 8);
}

TEST_F(PlacementTest, GpuThatTheNodeHasNoLonger_IsNotGivenBack) {
  AddNode("a", 4, 2);
  NodeSpace& space = nodes_["a"].space;
  space.info = nodes_["a"].info;
  v1::Placement placement;
  for (const int gpu : {0, 1, 2}) placement.add_gpus(gpu);
  placement.set_processes(3);
  space.Take(placement, Spec(3, 3, 1).per_process());
  EXPECT_TRUE(space.gpus.empty());
  space.Give(placement, Spec(3, 3, 1).per_process());
  EXPECT_EQ(space.gpus, (absl::btree_set<int>{0, 1}));
  EXPECT_EQ(space.cpus, 4);
}

TEST_F(PlacementTest, Job_SmallerThanTwoNodes_TakesTheFullerOne) {
  AddNode("a", 64, 0);
  AddNode("b", 2, 0);
  EXPECT_EQ(Names(Run(Spec(2, 2))), std::vector<std::string>{"b"});
}

TEST_F(PlacementTest, Job_OfSeveralNodes_HasTheSameNumberOnEach) {
  AddNode("a", 3, 0);
  AddNode("b", 3, 0);
  AddNode("c", 2, 0);
  const PlacementDecision decision = Run(Spec(6, 6));
  ASSERT_EQ(Names(decision), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(decision.placements[1].processes(), 3);
  EXPECT_EQ(decision.placements[1].node_rank(), 1);
  // 8 fit in all, but not evenly.
  EXPECT_TRUE(Run(Spec(8, 8)).placements.empty());
}

TEST_F(PlacementTest, ElasticJob_GetsAsManyAsFit) {
  AddNode("a", 3, 0);
  AddNode("b", 2, 0);
  const PlacementDecision decision = Run(Spec(2, 16));
  EXPECT_EQ(decision.processes, 4);
  EXPECT_EQ(decision.placements.size(), 2u);
  EXPECT_EQ(Run(Spec(5, 16)).why, "room for 5 to 16 processes with 1 CPU each: 4 fit");
}

TEST_F(PlacementTest, Job_WithProcessesPerNode_KeepsIt) {
  AddNode("a", 8, 0);
  AddNode("b", 8, 0);
  v1::JobSpec spec = Spec(4, 4);
  spec.set_processes_per_node(2);
  const PlacementDecision decision = Run(spec);
  ASSERT_EQ(decision.placements.size(), 2u);
  EXPECT_EQ(decision.placements[0].processes(), 2);
}

TEST_F(PlacementTest, Gpus_AreGivenByIndex) {
  AddNode("a", 64, 4);
  nodes_["a"].space.gpus = {1, 3};
  const PlacementDecision decision = Run(Spec(2, 2, /*gpus=*/1));
  ASSERT_EQ(decision.placements.size(), 1u);
  EXPECT_EQ(decision.placements[0].gpus(0), 1);
  EXPECT_EQ(decision.placements[0].gpus(1), 3);
  EXPECT_TRUE(Run(Spec(3, 3, 1)).placements.empty());
}

TEST_F(PlacementTest, GpuMemory_OnlyGpusThatHaveItAreTaken) {
  AddNode("a", 64, 4);
  for (const int64_t gib : {80, 40, 80, 0}) infos_[0].add_gpu_memory_bytes(gib << 30);
  AddNode("b", 64, 8);  // does not report the memory of its GPUs
  for (auto& [name, node] : nodes_) node.space.info = node.info;
  v1::JobSpec spec = Spec(1, 4, /*gpus=*/1);
  spec.mutable_per_process()->set_gpu_memory_bytes(int64_t{60} << 30);
  const PlacementDecision decision = Run(spec);
  ASSERT_EQ(Names(decision), std::vector<std::string>{"a"});
  ASSERT_EQ(decision.placements[0].gpus_size(), 2);
  EXPECT_EQ(decision.placements[0].gpus(0), 0);
  EXPECT_EQ(decision.placements[0].gpus(1), 2);
  spec.set_min_processes(3);
  EXPECT_EQ(Run(spec).why, "room for 3 to 4 processes with 1 GPU of 61440 MiB, 1 CPU each: 2 fit");
}

TEST_F(PlacementTest, Nodes_OfOneRack_ComeFirst) {
  AddNode("a", 1, 0, "r1");
  AddNode("b", 1, 0, "r2");
  AddNode("c", 1, 0, "r1");
  AddNode("d", 1, 0, "r2");
  AddNode("e", 1, 0, "r2");
  EXPECT_EQ(Names(Run(Spec(2, 2))), (std::vector<std::string>{"a", "c"}));
  EXPECT_EQ(Names(Run(Spec(3, 3))), (std::vector<std::string>{"b", "d", "e"}));
}

TEST_F(PlacementTest, Labels_ThatNoNodeHas_AreNamed) {
  AddNode("a", 1, 0);
  v1::JobSpec spec = Spec(1, 1);
  AddNameValue("gpu", "h200", spec.mutable_node_labels());
  EXPECT_EQ(Run(spec).why,
            "room for 1 process with 1 CPU on nodes with gpu=h200: no node has these labels");
  AddNameValue("gpu", "h200", infos_[0].mutable_labels());
  EXPECT_FALSE(Run(spec).placements.empty());
}

// Cordoned, drained and lost nodes are not candidates, so other nodes may exist although there is
// no candidate.
TEST_F(PlacementTest, NoCandidate_SaysThatNoNodeTakesJobs) {
  EXPECT_EQ(Run(Spec(1, 1)).why,
            "room for 1 process with 1 CPU: no node takes jobs (muster nodes shows why)");
}

TEST_F(PlacementTest, JobWithFiles_RunsOnlyWhereAgentsTakeThem) {
  AddNode("a", 4, 0);
  AddNode("b", 2, 0);
  v1::JobSpec spec = Spec(1, 2);
  spec.set_spare_nodes(1);
  spec.add_files()->set_path("config.yaml");
  EXPECT_EQ(Run(spec).why,
            "room for 1 to 2 processes with 1 CPU each: no node has it (2 nodes have agents that "
            "are too old for a job with files: update them)");
  infos_[0].set_takes_files(true);
  const PlacementDecision decision = Run(spec);
  ASSERT_EQ(decision.placements.size(), 1u);
  EXPECT_EQ(decision.placements[0].node(), "a");
  EXPECT_TRUE(decision.spares.empty());
}

TEST_F(PlacementTest, Memory_IsCounted) {
  AddNode("a", 64, 0, "", int64_t{10} << 30);
  v1::JobSpec spec = Spec(1, 8);
  spec.mutable_per_process()->set_memory_bytes(int64_t{4} << 30);
  EXPECT_EQ(Run(spec).processes, 2);
}

TEST_F(PlacementTest, AvoidedNode_IsNotTaken_AndIsNamed) {
  AddNode("a", 1, 0);
  v1::JobRecord record;
  record.add_avoided_nodes("a");
  EXPECT_EQ(Place(Spec(1, 1), record.avoided_nodes(), nodes_).why,
            "room for 1 process with 1 CPU: no node has it (1 node is avoided: it could not start "
            "the job)");
}

// For any demand and any nodes: a placement fits, has as many processes as promised and is evenly
// divided; a refused demand could not have been placed.
TEST_F(PlacementTest, RandomJobs_OnRandomNodes_FitExactly) {
  std::mt19937 random(1);
  const auto up_to = [&](int n) { return static_cast<int>(random() % (n + 1)); };
  for (int round = 0; round < 2000; ++round) {
    infos_.clear();
    nodes_.clear();
    for (int i = up_to(6); i > 0; --i) {
      AddNode(std::string(1, static_cast<char>('a' + i)), up_to(8), up_to(4),
              std::string(1, static_cast<char>('r' + up_to(2))));
    }
    v1::JobSpec spec = Spec(1 + up_to(6), 0, up_to(2), 1 + up_to(2));
    spec.set_max_processes(spec.min_processes() + up_to(6));
    if (up_to(2) == 0) spec.set_processes_per_node(1 + up_to(3));
    const PlacementDecision decision = Run(spec);
    // Tries every layout.
    int best = 0;
    for (int each = 1; each <= 8; ++each) {
      if (spec.processes_per_node() > 0 && each != spec.processes_per_node()) continue;
      int count = 0;
      for (const auto& [name, node] : nodes_) {
        count += node.space.Fits(spec.per_process()) >= each;
        while (count * each > spec.max_processes()) --count;
      }
      if (count * each >= spec.min_processes()) best = std::max(best, count * each);
    }
    ASSERT_EQ(decision.processes, best) << spec.ShortDebugString();
    int total = 0;
    for (const v1::Placement& placement : decision.placements) {
      NodeSpace space = nodes_.at(placement.node()).space;
      const size_t gpus = space.gpus.size();
      space.Take(placement, spec.per_process());
      EXPECT_GE(space.cpus, 0);
      EXPECT_EQ(space.gpus.size() + placement.gpus_size(), gpus);
      EXPECT_EQ(placement.gpus_size(), placement.processes() * spec.per_process().gpus());
      EXPECT_EQ(placement.processes(), decision.placements[0].processes());
      total += placement.processes();
    }
    ASSERT_EQ(total, best);
  }
}

}  // namespace
}  // namespace muster::coordinator
