// What each of 2,816 ranks reads of a checkpoint that four ranks have written: the plan of a
// restart, on ranks whose peers are simulated.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "base/file.h"
#include "muster/accelerator.h"
#include "muster/internal/full_state.h"
#include "muster/optim.h"
#include "muster/test_model.h"
#include "muster/test_ranks.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/collective/local_comm.h"

namespace muster {
namespace {

constexpr int kRanks = 2816;
constexpr int64_t kWidth = 512, kLayers = 4;
constexpr int64_t kParameters = kLayers * (kWidth + 1) * kWidth;

// One of many ranks that all send and hold the same.
class OneOfMany : public LocalComm {
 public:
  explicit OneOfMany(int rank) : rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return kRanks; }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    return std::vector<at::Tensor>(kRanks, tensor.detach().clone());
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp) override {
    return flat.detach().chunk(kRanks)[rank_].clone();
  }
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    return std::vector<std::string>(kRanks, bytes);
  }

 private:
  const int rank_;
};

AcceleratorOptions FullSharding(const std::string& directory) {
  AcceleratorOptions options;
  options.cpu = true;
  options.project.directory = directory;
  options.sharding = ParseSharding("zero3", 1);
  return options;
}

struct Trained {
  torch::nn::Sequential net;
  FusedAdamW adamw;
  Trained() : net(MakeLayers()), adamw(net->parameters(), {.lr = 1e-3}) {}
  static torch::nn::Sequential MakeLayers() {
    torch::nn::Sequential layers;
    for (int64_t i = 0; i < kLayers; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    return layers;
  }
};

// A range of each file, in the order of the files.
using Plan = std::map<std::string, std::vector<FileRange>>;

Plan PlanOf(int rank, const std::map<std::string, SafetensorsHeader>& files) {
  OneOfMany comm(rank);
  Accelerator a(CoreOn(comm, FullSharding("")));
  Trained trained;
  auto [model, optimizer] = a.prepare(trained.net, trained.adamw);
  const internal::Models& models = a.core().registry().models();
  const internal::LoadedShards shards(*models[0]);
  const auto of_states =
      internal::LocalRanges(a.core().registry().optimizers()[0]->handle(), models);
  Plan plan;
  for (const auto& [name, header] : files) {
    plan[name] = absl::StartsWith(name, "model") ? shards.Ranges(header) : of_states(header);
  }
  return plan;
}

// Without the headers, which all ranks read.
int64_t DataBytes(const Plan& plan, const std::map<std::string, SafetensorsHeader>& files) {
  int64_t bytes = 0;
  for (const auto& [name, ranges] : plan) {
    const uint64_t data = 8 + files.at(name).header_bytes;
    for (const FileRange& range : ranges) {
      if (range.end > data) bytes += static_cast<int64_t>(range.end - std::max(range.begin, data));
    }
  }
  return bytes;
}

TEST(RestorePlan, EachOf2816Ranks_ReadsItsPartAlone) {
  const std::string project = TestDir("restore_plan");
  RunAccelerators(4, FullSharding(project), [](Accelerator& a) {
    Trained trained;
    auto [model, optimizer] = a.prepare(trained.net, trained.adamw);
    a.backward(model(at::ones({4, kWidth})).square().mean());
    optimizer.step();
    optimizer.zero_grad();
    ASSERT_TRUE(a.save_state().ok());
  });
  const std::string checkpoint = project + "/checkpoints/checkpoint_0";
  std::map<std::string, SafetensorsHeader> files;
  int64_t saved = 0;
  const auto names = ListDirectory(checkpoint);
  ASSERT_TRUE(names.ok()) << names.status();
  for (const std::string& name : *names) {
    if (!absl::EndsWith(name, ".safetensors") ||
        !(absl::StartsWith(name, "model") || absl::StartsWith(name, "optimizer"))) {
      continue;
    }
    const auto header = ReadSafetensorsHeader(JoinPath(checkpoint, name));
    ASSERT_TRUE(header.ok()) << header.status();
    saved += static_cast<int64_t>(header->data_bytes);
    files.emplace(name, *header);
  }
  ASSERT_GE(files.size(), 8u) << "each of the four has written a part of each";
  ASSERT_GE(saved, 3 * 4 * kParameters);

  // A part of a unit is rounded up to whole elements, and may begin in one tensor and end in the
  // next; beside the moments there are a few numbers.
  const int64_t share = 3 * 4 * (kParameters / kRanks + 2 * kLayers) + 1024;
  for (const int rank : {0, 1, 2, kRanks / 2, kRanks / 2 + 1, kRanks - 1}) {
    const Plan plan = PlanOf(rank, files);
    const int64_t bytes = DataBytes(plan, files);
    EXPECT_LE(bytes, share) << rank;
    EXPECT_LT(bytes, saved / 400) << rank;
    // The last rank may have less.
    if (rank < kRanks - 1) {
      EXPECT_GE(bytes, 3 * 4 * (kParameters / kRanks)) << rank;
    }
  }
}

}  // namespace
}  // namespace muster
