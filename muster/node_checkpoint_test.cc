// options.project.save_on_each_node: two nodes in one process, each with its own folder.
#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/file.h"
#include "base/test_system_calls.h"
#include "muster/accelerator.h"
#include "muster/internal/core.h"
#include "muster/test_model.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/nn/modules/linear.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/job/join_job.h"

namespace {

// The file whose reads fail; 0: none. Set it while no thread reads.
ino_t unreadable = 0;
int read_error = 0;

bool CannotRead(int fd) {
  struct stat info;
  if (unreadable == 0 || fstat(fd, &info) != 0 || info.st_ino != unreadable) return false;
  errno = read_error;
  return true;
}

}  // namespace

MUSTER_REPLACE_READS(CannotRead)

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Disk(const std::string& name, int node) {
  return TestDir(name) + "/node_" + std::to_string(node);
}
std::string Checkpoint(const std::string& name, int node, int number) {
  return Disk(name, node) + "/checkpoints/checkpoint_" + std::to_string(number);
}

// Rank i is alone on node i. `wrap`: wraps its connection to the others. `one_host`: according to
// their names, all nodes are one host.
void RunNodes(
    const std::string& name, AcceleratorOptions options,
    const std::function<void(Accelerator&)>& function,
    const std::function<std::unique_ptr<Comm>(Comm&)>& wrap =
        [](Comm& comm) { return std::make_unique<BorrowedComm>(comm); },
    bool one_host = false) {
  options.project.save_on_each_node = true;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunGlooRanks(2, [&](Comm& comm) {
    JoinedProcess process;
    process.environment.rank.value = process.environment.node_rank.value = comm.rank();
    process.environment.world_size.value = process.environment.num_nodes.value = comm.size();
    if (one_host) {
      process.environment.node_rank.value = 0;
      process.environment.num_nodes.value = 1;
    }
    // Only determines the interface through which the ranks reach each other.
    process.environment.master_addr.value = "127.0.0.1";
    process.environment.master_port.value = 29400;
    process.environment.mixed_precision.value = "no";
    process.environment.project_dir.value = Disk(name, comm.rank());
    process.store = store;
    process.comm = wrap(comm);
    Accelerator accelerator(std::make_shared<internal::Core>(options, std::move(process)));
    function(accelerator);
  });
}

// Trains from the newest checkpoint until optimizer step `until`, saving every five steps.
at::Tensor TrainUntil(const std::string& name, const AcceleratorOptions& options, int64_t until) {
  at::Tensor weights;
  RunNodes(name, options, [&](Accelerator& a) {
    torch::nn::Linear net(4, 4);
    {
      const at::NoGradGuard no_grad;
      net->weight.copy_(at::arange(16, at::kFloat).view({4, 4}).div(16));
      net->bias.zero_();
    }
    FusedAdamW adamw(net->parameters(), {.lr = 0.1});
    const at::Tensor rows = at::arange(160, at::kFloat).view({40, 4}).remainder(7);
    auto [model, optimizer, loader] =
        a.prepare(net, adamw, batches(TensorDataset(rows), 2).shuffle(true));
    ASSERT_TRUE(a.load_state_if_present().ok());
    for (int64_t epoch : a.epochs(3)) {
      (void)epoch;
      for (auto& batch : loader) {
        auto scope = a.accumulate();
        a.backward(Loss(model(batch.value())));
        optimizer.step();
        optimizer.zero_grad();
        if (a.global_step() % 5 == 0) {
          const absl::Status saved = a.save_state();
          ASSERT_TRUE(saved.ok()) << saved;
        }
        if (a.global_step() == until) break;
      }
      if (a.global_step() == until) break;
    }
    EXPECT_EQ(a.global_step(), until);
    if (a.is_main_process()) weights = net->weight.detach().clone();
  });
  return weights;
}

TEST(NodeCheckpoint, TenAndTenSteps_AreTwentyBitForBit) {
  for (const bool asynchronous : {false, true}) {
    const std::string kind = asynchronous ? "async" : "sync";
    AcceleratorOptions options;
    options.data_loader.data_seed = 3;
    options.checkpoint.asynchronous = asynchronous;
    const at::Tensor whole = TrainUntil("whole-" + kind, options, 20);
    TrainUntil("parts-" + kind, options, 10);
    // Each node has the files that its process wrote.
    const auto first = ListDirectory(Checkpoint("parts-" + kind, 0, 1));
    const auto second = ListDirectory(Checkpoint("parts-" + kind, 1, 1));
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_THAT(*first,
                AllOf(Contains("model.safetensors"), Not(Contains("random_states_1.safetensors"))));
    EXPECT_THAT(*second,
                AllOf(Contains("random_states_1.safetensors"), Not(Contains("model.safetensors"))));
    EXPECT_TRUE(TrainUntil("parts-" + kind, options, 20).equal(whole)) << kind;
    EXPECT_EQ(*ListDirectory(Checkpoint("parts-" + kind, 0, 1)),
              *ListDirectory(Checkpoint("parts-" + kind, 1, 1)));
    EXPECT_TRUE(PathExists(Checkpoint("parts-" + kind, 1, 3)));
  }
}

TEST(NodeCheckpoint, DisksOfNodesWithOneHostName_AreTwo) {
  RunNodes(
      "one-name", {},
      [](Accelerator& a) {
        auto model = a.prepare(OneWeight());
        const absl::Status saved = a.save_state();
        ASSERT_TRUE(saved.ok()) << saved;
        EXPECT_TRUE(PathExists(a.last_checkpoint() + "/manifest.json")) << a.last_checkpoint();
      },
      [](Comm& comm) { return std::make_unique<BorrowedComm>(comm); }, /*one_host=*/true);
  EXPECT_THAT(*ListDirectory(Checkpoint("one-name", 1, 0)),
              AllOf(Contains("random_states_1.safetensors"), Not(Contains("model.safetensors"))));
}

// Each node's checkpoint would be taken for a copy of the other's, and the older one would be
// replaced.
TEST(NodeCheckpoint, OtherNamesOnTheNodes_AreAnErrorAndBothStay) {
  RunNodes("names", {}, [](Accelerator& a) {
    const std::string disk = Disk("names", a.process_index());
    auto model = a.prepare(OneWeight());
    for (const char* const name : {"/one", "/other"}) {
      ASSERT_TRUE(a.save_state(disk + name).ok());
    }
    const std::vector<std::string> before = *ListDirectory(disk);
    const std::string mine = disk + (a.is_main_process() ? "/one" : "/other");
    for (const absl::Status& status :
         {a.load_state(mine), a.load_weights(mine).status(), a.save_state(mine)}) {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("rank 1 gives " + Disk("names", 1) + "/other, and rank 0 " +
                            Disk("names", 0) + "/one: give all processes"));
    }
    EXPECT_EQ(*ListDirectory(disk), before);
    EXPECT_TRUE(a.load_state(disk + "/one").ok());
  });
}

TEST(NodeCheckpoint, NodeWithoutItsDisk_IsNamedOnEveryProcess) {
  AcceleratorOptions options;
  options.data_loader.data_seed = 3;
  TrainUntil("lost", options, 5);
  ASSERT_TRUE(RemoveTree(Disk("lost", 0)).ok());
  RunNodes("lost", options, [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    EXPECT_THAT(std::string(a.load_state().message()),
                AllOf(HasSubstr("no complete checkpoint"), HasSubstr("model.safetensors"),
                      HasSubstr("(rank 0) wrote")));
  });
}

TEST(NodeCheckpoint, FileThatANodeCannotReadNow_IsFetchedFromAnotherNodeOrNamed) {
  AcceleratorOptions options;
  options.data_loader.data_seed = 3;
  for (const int error : {EIO, ESTALE, EACCES, ENODEV}) {
    SCOPED_TRACE(error);
    const std::string name = "unreadable-" + std::to_string(error);
    TrainUntil(name, options, 10);
    const std::string file = Checkpoint(name, 1, 1) + "/random_states_1.safetensors";
    const auto hide = [&] {
      struct stat info;
      ASSERT_EQ(stat(file.c_str(), &info), 0);
      unreadable = info.st_ino;
      read_error = error;
    };
    const auto load = [&] {
      std::vector<absl::Status> statuses(2);
      RunNodes(name, options, [&](Accelerator& a) {
        torch::nn::Linear net(4, 4);
        FusedAdamW adamw(net->parameters(), {.lr = 0.1});
        auto [model, optimizer, loader] =
            a.prepare(net, adamw, batches(TensorDataset(at::zeros({40, 4})), 2).shuffle(true));
        statuses[a.process_index()] = a.load_state_if_present();
        EXPECT_EQ(a.global_step(), statuses[a.process_index()].ok() ? 10 : 0);
      });
      return statuses;
    };
    // No other node has the file.
    hide();
    for (const absl::Status& status : load()) {
      EXPECT_FALSE(status.ok() || absl::IsNotFound(status)) << status;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 1: "), HasSubstr(file)));
    }
    unreadable = 0;
    for (const absl::Status& status : load()) EXPECT_TRUE(status.ok()) << status;
    // All nodes have all files now.
    hide();
    for (const absl::Status& status : load()) EXPECT_TRUE(status.ok()) << status;
    unreadable = 0;
  }
}

// A process that ends when it should send the first piece of a file.
class EndingComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    if (rank() == root && !bytes.empty() && bytes[0] == 'D') ends = true;
    if (ends) throw std::runtime_error("this process ends");
    return BorrowedComm::BroadcastBytes(bytes, root);
  }
  bool ends = false;
};

TEST(NodeCheckpoint, PeerThatEndsWhileAFileIsFetched_IsAnErrorOfTheOther_AndNothingIsLost) {
  AcceleratorOptions options;
  options.data_loader.data_seed = 3;
  TrainUntil("ended", options, 10);
  const std::vector<std::string> before = *ListDirectory(Checkpoint("ended", 1, 1));
  absl::Status loaded;
  const auto load = [&](Accelerator& a) {
    torch::nn::Linear net(4, 4);
    FusedAdamW adamw(net->parameters(), {.lr = 0.1});
    auto [model, optimizer, loader] =
        a.prepare(net, adamw, batches(TensorDataset(at::zeros({40, 4})), 2).shuffle(true));
    const at::Tensor weight = net->weight.detach().clone();
    const absl::Status status = a.load_state_if_present();
    if (a.process_index() == 1) loaded = status;
    EXPECT_EQ(a.global_step(), status.ok() ? 10 : 0);
    EXPECT_EQ(net->weight.equal(weight), !status.ok());
    if (!status.ok() && a.process_index() == 0) throw std::runtime_error("it has ended");
  };
  EXPECT_ANY_THROW(RunNodes("ended", options, load,
                            [](Comm& comm) { return std::make_unique<EndingComm>(comm); }));
  EXPECT_FALSE(loaded.ok() || absl::IsNotFound(loaded) || absl::IsDataLoss(loaded)) << loaded;
  EXPECT_THAT(std::string(loaded.message()), HasSubstr("peer"));
  EXPECT_EQ(*ListDirectory(Checkpoint("ended", 1, 1)), before);
  EXPECT_EQ(ListDirectory(Disk("ended", 1) + "/checkpoints")->size(), 2u);
  RunNodes("ended", options, load);
  EXPECT_TRUE(loaded.ok()) << loaded;
}

TEST(NodeCheckpoint, SaveModel_WritesTheModelOnEveryNode) {
  RunNodes("model", {}, [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    const absl::Status saved =
        a.save_model(model, Disk("model", static_cast<int>(a.process_index())) + "/out");
    EXPECT_TRUE(saved.ok()) << saved;
  });
  EXPECT_TRUE(PathExists(Disk("model", 0) + "/out/model.safetensors"));
  EXPECT_TRUE(PathExists(Disk("model", 1) + "/out/model.safetensors"));
}

}  // namespace
}  // namespace muster
