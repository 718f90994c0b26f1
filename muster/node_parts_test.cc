// options.project.save_on_each_node with sharded models: nodes in one process, each with its own
// folder, whose ranks load what they need from the files of all nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/file.h"
#include "muster/accelerator.h"
#include "muster/internal/core.h"
#include "muster/optim.h"
#include "muster/test_model.h"
#include "muster/test_ranks.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/job/join_job.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kWidth = 1024, kLayers = 5;  // 4 MiB each

struct Nodes {
  std::string name;
  int nodes = 2;
  int ranks = 2;  // on each node
  std::string Disk(int node) const { return TestDir(name) + "/node_" + std::to_string(node); }
  std::string Checkpoint(int node, int number) const {
    return Disk(node) + "/checkpoints/checkpoint_" + std::to_string(number);
  }
};

using Wrap = std::function<std::unique_ptr<Comm>(Comm&)>;

AcceleratorOptions Sharded(const std::string& strategy = "zero3") {
  AcceleratorOptions options;
  options.cpu = true;
  options.sharding = ParseSharding(strategy, 1);
  options.project.save_on_each_node = true;
  return options;
}

void RunNodes(
    const Nodes& nodes, const AcceleratorOptions& options,
    const std::function<void(Accelerator&)>& function,
    const Wrap& wrap = [](Comm& comm) { return std::make_unique<BorrowedComm>(comm); }) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunGlooRanks(nodes.nodes * nodes.ranks, [&](Comm& comm) {
    JoinedProcess process;
    process.environment.rank.value = comm.rank();
    process.environment.node_rank.value = comm.rank() / nodes.ranks;
    process.environment.local_rank.value = comm.rank() % nodes.ranks;
    process.environment.world_size.value = comm.size();
    process.environment.local_world_size.value = nodes.ranks;
    process.environment.num_nodes.value = nodes.nodes;
    process.environment.master_addr.value = "127.0.0.1";
    process.environment.master_port.value = 29400;
    process.environment.mixed_precision.value = "no";
    process.environment.project_dir.value = nodes.Disk(comm.rank() / nodes.ranks);
    process.store = store;
    process.comm = wrap(comm);
    Accelerator accelerator(std::make_shared<internal::Core>(options, std::move(process)));
    function(accelerator);
  });
}

struct Trained {
  torch::nn::Sequential net;
  FusedAdamW adamw;
  Trained() : net(MakeLayers()), adamw(net->parameters(), {.lr = 1e-2}) {}
  static torch::nn::Sequential MakeLayers() {
    const at::NoGradGuard no_grad;
    torch::nn::Sequential layers;
    for (int64_t i = 0; i < kLayers; ++i) {
      torch::nn::Linear layer(kWidth, kWidth);
      layer->weight.copy_(
          at::arange(kWidth * kWidth, at::kFloat).add(i).sin().div(32).view({kWidth, kWidth}));
      layer->bias.zero_();
      layers->push_back(layer);
    }
    return layers;
  }
};

using Weights = std::map<std::string, at::Tensor>;

template <class Model, class Optimizer>
void Steps(Accelerator& a, Model& model, Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    // The same on all ranks, so that their number has no influence.
    const at::Tensor x = at::arange(2 * kWidth, at::kFloat).add(step).cos().view({2, kWidth});
    auto scope = a.accumulate();
    a.backward(model(x).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
}

// Loads the existing checkpoint, trains from step `first` up to `last` and saves; returns the
// weights then.
Weights Train(
    const Nodes& nodes, const AcceleratorOptions& options, int first, int last,
    const Wrap& wrap = [](Comm& comm) { return std::make_unique<BorrowedComm>(comm); }) {
  Weights weights;
  RunNodes(
      nodes, options,
      [&](Accelerator& a) {
        Trained trained;
        auto [model, optimizer] = a.prepare(trained.net, trained.adamw);
        const absl::Status loaded = a.load_state_if_present();
        ASSERT_TRUE(loaded.ok()) << loaded;
        ASSERT_EQ(optimizer.steps(), first);
        Steps(a, model, optimizer, first, last);
        const absl::Status saved = a.save_state();
        ASSERT_TRUE(saved.ok()) << saved;
        Weights mine = WeightsOf(a, model);
        if (a.is_main_process()) weights = std::move(mine);
      },
      wrap);
  return weights;
}

TEST(NodeParts, SaveOfTensors_WritesOnTheFirstProcessOfEachNode) {
  const Nodes nodes{.name = "tensors"};
  for (const bool on_each_node : {false, true}) {
    AcceleratorOptions options = Sharded();
    options.project.save_on_each_node = on_each_node;
    const std::string name = on_each_node ? "/of_each_" : "/of_main_";
    RunNodes(nodes, options, [&](Accelerator& a) {
      const int rank = a.process_index();
      const std::string disk = nodes.Disk(rank / nodes.ranks);
      ASSERT_TRUE(MakeDirectories(disk).ok());
      const absl::Status saved =
          a.save({{"x", at::full({2}, rank)}}, disk + name + std::to_string(rank));
      EXPECT_TRUE(saved.ok()) << saved;
    });
    for (int rank = 0; rank < nodes.nodes * nodes.ranks; ++rank) {
      EXPECT_EQ(PathExists(nodes.Disk(rank / nodes.ranks) + name + std::to_string(rank)),
                rank == 0 || (on_each_node && rank == 2))
          << rank;
    }
  }
}

// Returns the status of each rank's load of the newest checkpoint.
std::vector<absl::Status> Load(
    const Nodes& nodes, const AcceleratorOptions& options, int64_t* steps = nullptr,
    const Wrap& wrap = [](Comm& comm) { return std::make_unique<BorrowedComm>(comm); }) {
  std::vector<absl::Status> statuses(nodes.nodes * nodes.ranks);
  RunNodes(
      nodes, options,
      [&](Accelerator& a) {
        Trained trained;
        auto [model, optimizer] = a.prepare(trained.net, trained.adamw);
        statuses[a.process_index()] = a.load_state();
        if (a.is_main_process() && steps != nullptr) *steps = optimizer.steps();
      },
      wrap);
  return statuses;
}

void ExpectEqual(const Weights& got, const Weights& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) EXPECT_TRUE(got.at(name).equal(tensor)) << name;
}

std::vector<std::string> Listed(const std::string& dir) {
  return ListDirectory(dir).value_or(std::vector<std::string>());
}

// Returns the largest file of the node that has more than one block.
std::string LargeFileOf(const std::string& dir) {
  const auto manifest = ReadManifest(dir);
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  const ManifestFile* large = nullptr;
  for (const ManifestFile& file : manifest->files) {
    if (file.blocks.empty() || !PathExists(dir + "/" + file.name)) continue;
    if (large == nullptr || file.digest.bytes > large->digest.bytes) large = &file;
  }
  EXPECT_NE(large, nullptr) << "it has blocks";
  return large == nullptr ? "" : dir + "/" + large->name;
}

void FlipMiddle(const std::string& path) {
  absl::StatusOr<std::string> bytes = ReadFile(path);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  (*bytes)[bytes->size() / 2] ^= 1;
  ASSERT_TRUE(WriteFileAtomically(path, *bytes).ok());
}

TEST(NodeParts, Resume_ContinuesBitForBit_AndFoldersStayAsTheyWere) {
  for (const std::string strategy : {"zero3", "zero1"}) {
    const Weights whole = Train({.name = "whole-" + strategy}, Sharded(strategy), 0, 4);
    const Nodes nodes{.name = "parts-" + strategy};
    Train(nodes, Sharded(strategy), 0, 2);
    std::vector<std::vector<std::string>> before;
    for (int node = 0; node < 2; ++node) {
      LargeFileOf(nodes.Checkpoint(node, 0));
      before.push_back(Listed(nodes.Checkpoint(node, 0)));
    }
    EXPECT_NE(before[0], before[1]);
    ExpectEqual(Train(nodes, Sharded(strategy), 2, 4), whole);
    for (int node = 0; node < 2; ++node) {
      EXPECT_EQ(Listed(nodes.Checkpoint(node, 0)), before[node]);
      EXPECT_THAT(Listed(nodes.Disk(node) + "/checkpoints"),
                  ElementsAre("checkpoint_0", "checkpoint_1"));
    }
  }
}

TEST(NodeParts, OtherNumbersOfNodesAndRanks_ContinueAndSaveAndRotate) {
  AcceleratorOptions options = Sharded();
  options.project.total_limit = 1;
  const Weights whole = Train({.name = "size-whole", .nodes = 1, .ranks = 1}, Sharded(), 0, 4);
  Train({.name = "size", .nodes = 2, .ranks = 1}, options, 0, 2);
  const Nodes three{.name = "size", .nodes = 3, .ranks = 2};
  const Weights then = Train(three, options, 2, 4);
  for (const auto& [name, tensor] : whole) {
    EXPECT_TRUE(then.at(name).allclose(tensor, 1e-5, 1e-6)) << name;
  }
  // The third node has nothing of the first one, whose data it gets from the others anyway:
  // otherwise these would need room for one more.
  for (int node = 0; node < 3; ++node) {
    EXPECT_THAT(Listed(three.Disk(node) + "/checkpoints"), ElementsAre("checkpoint_1")) << node;
  }
  EXPECT_FALSE(Train(three, options, 4, 5).empty());
  for (int node = 0; node < 3; ++node) {
    EXPECT_THAT(Listed(three.Disk(node) + "/checkpoints"), ElementsAre("checkpoint_2")) << node;
  }
}

TEST(NodeParts, OffloadedStates_GoThroughFilesWithoutNames) {
  const Weights whole = Train({.name = "offload-whole"}, Sharded(), 0, 4);
  const Nodes nodes{.name = "offload"};
  AcceleratorOptions options = Sharded();
  Train(nodes, options, 0, 2);
  const std::vector<std::string> before = Listed(nodes.Checkpoint(0, 0));
  options.sharding->offload_optimizer = Offload::kDisk;
  options.sharding->offload_optimizer_path = TestDir("offload-states");
  ExpectEqual(Train(nodes, options, 2, 4), whole);
  EXPECT_EQ(Listed(nodes.Checkpoint(0, 0)), before);
  for (const std::string& name : Listed(nodes.Disk(0) + "/checkpoints")) {
    EXPECT_EQ(name.rfind("checkpoint_", 0), 0u) << name;
  }
  EXPECT_THAT(Listed(TestDir("offload-states")), IsEmpty());
}

TEST(NodeParts, WeightsAlone_AreLoadedToo) {
  const Nodes nodes{.name = "weights"};
  const Weights saved = Train(nodes, Sharded(), 0, 2);
  const std::vector<std::string> before = Listed(nodes.Checkpoint(1, 0));
  RunNodes(nodes, Sharded(), [&](Accelerator& a) {
    Trained trained;
    auto [model, optimizer] = a.prepare(trained.net, trained.adamw);
    const auto loaded = a.load_weights("");
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const Weights mine = WeightsOf(a, model);
    if (a.is_main_process()) ExpectEqual(mine, saved);
  });
  EXPECT_EQ(Listed(nodes.Checkpoint(1, 0)), before);
}

TEST(NodeParts, NodeThatIsMissing_IsNamedOnEveryRank) {
  const Nodes nodes{.name = "missing"};
  Train(nodes, Sharded(), 0, 1);
  ASSERT_TRUE(RemoveTree(nodes.Disk(1)).ok());
  for (const absl::Status& status : Load(nodes, Sharded())) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("(ranks 2, 3) wrote"), HasSubstr("start the job with that node")));
  }
}

TEST(NodeParts, DamagedBlock_IsNamedAndTheOneBeforeIsTakenByAll) {
  const Nodes nodes{.name = "damaged"};
  Train(nodes, Sharded(), 0, 1);
  Train(nodes, Sharded(), 1, 2);
  const std::string damaged = LargeFileOf(nodes.Checkpoint(1, 1));
  FlipMiddle(damaged);
  int64_t steps = -1;
  for (const absl::Status& status : Load(nodes, Sharded(), &steps)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(steps, 1);
  ASSERT_TRUE(RemoveTree(nodes.Checkpoint(0, 0)).ok());
  ASSERT_TRUE(RemoveTree(nodes.Checkpoint(1, 0)).ok());
  for (const absl::Status& status : Load(nodes, Sharded())) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(damaged));
  }
}

// A process that ends before an exchange of bytes among all ranks; never, unless a number is set.
class EndingComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    if (left == 0) throw std::runtime_error("this process ends");
    if (left > 0) --left;
    return BorrowedComm::AllGatherBytes(bytes);
  }
  int left = -1;
};

TEST(NodeParts, PeerThatEndsAtAnyMoment_IsAnErrorOfTheOthers_AndNothingIsLost) {
  const Nodes nodes{.name = "ended", .nodes = 2, .ranks = 1};
  Train(nodes, Sharded(), 0, 1);
  std::vector<std::vector<std::string>> before;
  for (int node = 0; node < 2; ++node) before.push_back(Listed(nodes.Checkpoint(node, 0)));
  bool ended = true;
  int moment = 0;
  for (; ended && moment < 400; moment += 9) {
    SCOPED_TRACE(moment);
    EndingComm* ending = nullptr;  // on the second node
    absl::Status other;
    ended = false;
    const auto wrap = [&](Comm& comm) -> std::unique_ptr<Comm> {
      auto wrapped = std::make_unique<EndingComm>(comm);
      if (comm.rank() == 1) ending = wrapped.get();
      return wrapped;
    };
    try {
      RunNodes(
          nodes, Sharded(),
          [&](Accelerator& a) {
            Trained trained;
            auto [model, optimizer] = a.prepare(trained.net, trained.adamw);
            if (!a.is_main_process()) ending->left = moment;
            const absl::Status loaded = a.load_state();
            if (a.is_main_process()) other = loaded;
            if (!a.is_main_process()) ending->left = -1;
            if (!loaded.ok()) throw std::runtime_error("it has ended");
          },
          wrap);
    } catch (const std::exception&) {
      ended = true;
      EXPECT_FALSE(other.ok() || absl::IsNotFound(other) || absl::IsDataLoss(other)) << other;
    }
    for (int node = 0; node < 2; ++node) {
      EXPECT_EQ(Listed(nodes.Checkpoint(node, 0)), before[node]);
      EXPECT_THAT(Listed(nodes.Disk(node) + "/checkpoints"), ElementsAre("checkpoint_0"));
    }
  }
  EXPECT_FALSE(ended) << "it has loaded in the end";
  EXPECT_GT(moment, 30);
  for (const absl::Status& status : Load(nodes, Sharded())) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace muster
