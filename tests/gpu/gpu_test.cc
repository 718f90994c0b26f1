// What needs a GPU: NCCL and training on one process.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "examples/mnist/net.h"
#include "muster/accelerator.h"
#include "muster/optim.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/nccl.h"
#include "worker/collective/process_group.h"

namespace muster {
namespace {

class Gpu : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    // The plug-in of this build, not one that is installed.
    if (const char* const root = getenv("TEST_SRCDIR")) {
      const std::string plugin =
          std::string(root) + "/muster/worker/collective/nccl_plugin/libmuster_nccl.so";
      setenv("MUSTER_NCCL_PLUGIN", plugin.c_str(), 1);
    }
  }

  void SetUp() override {
    ASSERT_GT(VisibleGpus(), 0) << "this test is tagged gpu: it runs where one is";
    const absl::Status loaded = LoadCuda();
    ASSERT_TRUE(loaded.ok()) << loaded;
  }

  // Trains the example's net on one batch, which any loop must be able to learn by heart. Returns
  // the first and the last loss.
  static std::pair<double, double> Train(const std::string& precision) {
    AcceleratorOptions options;
    options.mixed_precision = precision;
    Accelerator accelerator(options);
    EXPECT_TRUE(accelerator.device().is_cuda()) << accelerator.device();
    torch::manual_seed(1);
    Net net;
    torch::optim::AdamW adamw(net->parameters(), /*lr=*/1e-3);
    auto [model, optimizer] = accelerator.prepare(net, adamw);
    const torch::Tensor images = torch::randn({64, 1, 28, 28}).to(accelerator.device());
    const torch::Tensor labels =
        torch::arange(64).remainder(10).to(accelerator.device(), torch::kInt64);
    double first = 0, last = 0;
    for (int step = 0; step < 60; ++step) {
      auto scope = accelerator.accumulate();
      const torch::Tensor loss = torch::nll_loss(model(images), labels);
      accelerator.backward(loss);
      accelerator.clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
      last = accelerator.reduce(loss.detach(), "mean").item<double>();
      if (step == 0) first = last;
    }
    return {first, last};
  }
};

TEST_F(Gpu, Nccl_OneRank_AllReducesAndTellsItsVersion) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = MakeGlooGroup(store, {});
  const c10::Device device(c10::kCUDA, 0);
  const absl::Status added = AddNcclBackend(group, store, device, std::chrono::minutes(1));
  ASSERT_TRUE(added.ok()) << added;
  const auto comm = MakeC10dComm(group);
  torch::Tensor x = torch::arange(1000, torch::TensorOptions(device).dtype(torch::kFloat32));
  comm->AllReduce(x, ReduceOp::kSum);
  EXPECT_EQ(x.sum().item<float>(), 999.0f * 500);
  torch::Tensor on_cpu = torch::ones({3});
  comm->AllReduce(on_cpu, ReduceOp::kSum);
  EXPECT_EQ(on_cpu.sum().item<float>(), 3) << "CPU tensors still go through Gloo";
  const auto version = NcclVersion();
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->substr(0, 2), "2.");
}

TEST_F(Gpu, StatesInTheMemoryOfTheCpu_TrainAsThoseOnTheGpu) {
  std::vector<std::vector<torch::Tensor>> runs;
  for (const Offload place : {Offload::kNone, Offload::kCpu}) {
    AcceleratorOptions options;
    options.sharding.emplace();
    options.sharding->offload_optimizer = place;
    Accelerator accelerator(options);
    torch::manual_seed(1);
    Net net;
    FusedAdamW adamw(net->parameters(), {.lr = 1e-3});
    auto [model, optimizer] = accelerator.prepare(net, adamw);
    const torch::Tensor images = torch::randn({64, 1, 28, 28}).to(accelerator.device());
    runs.emplace_back();
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(model(images).square().mean());
      // Not the gradients, which are summed in any order: the update is what is compared.
      for (const torch::Tensor& p : net->parameters()) {
        p.mutable_grad().copy_(torch::full_like(p, 0.01 * (step + 1)));
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& [name, slot] : adamw.SaveState().tensors) {
      if (!name.ends_with(".step")) {
        EXPECT_EQ(slot.is_cpu(), place == Offload::kCpu) << name;
      }
      runs.back().push_back(slot.cpu().clone());
    }
    for (const torch::Tensor& p : net->parameters()) runs.back().push_back(p.detach().cpu());
  }
  ASSERT_EQ(runs[0].size(), runs[1].size());
  for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(runs[0][i].equal(runs[1][i])) << i;
}

TEST_F(Gpu, MnistSteps_LearnTheBatch) {
  const auto [first, last] = Train("no");
  EXPECT_LT(last, first / 4);
}

TEST_F(Gpu, Autocast_Bf16_LearnsTheBatch) {
  const auto [first, last] = Train("bf16");
  EXPECT_LT(last, first / 4);
}

TEST_F(Gpu, Autocast_Fp16WithScaler_LearnsTheBatch) {
  const auto [first, last] = Train("fp16");
  EXPECT_LT(last, first / 4);
}

}  // namespace
}  // namespace muster
