// Tests that need a GPU: NCCL, streams, and training on one process.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/test_folder.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "examples/mnist/net.h"
#include "muster/accelerator.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "tests/gpu/gpu_environment.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/comm_stream.h"
#include "worker/collective/nccl.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/process_group.h"
#include "worker/parallel/part_store.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/batch_size_finder.h"
#include "worker/train/disk_parts.h"
#include "worker/train/host_parts.h"

namespace muster {
namespace {

// The first test of the file: LibTorch is asked for CUDA before an Accelerator is made.
TEST(BeforeTheGpu, SeedAndBackwardOnTheCpu_LeaveLaterOnesTheGpu) {
  torch::manual_seed(1);
  const auto gradient = [](c10::Device device) {
    const torch::Tensor x = torch::ones({2}, torch::TensorOptions(device)).requires_grad_();
    x.mul(3).sum().backward();
    return x.grad().sum().item<float>();
  };
  EXPECT_EQ(gradient(torch::kCPU), 6);
  testing_support::FindPlugin();
  Accelerator accelerator;
  ASSERT_TRUE(accelerator.device().is_cuda());
  EXPECT_EQ(gradient(accelerator.device()), 6);
}

class Gpu : public testing::Test {
 protected:
  void SetUp() override { testing_support::NeedGpu(); }

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

const c10::Device kDevice(c10::kCUDA, 0);

// Returns one rank over NCCL.
std::unique_ptr<Comm> NcclComm() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = MakeGlooGroup(store, {});
  const absl::Status added = AddNcclBackend(group, store, kDevice, std::chrono::minutes(1));
  EXPECT_TRUE(added.ok()) << added;
  return MakeC10dComm(group);
}

// Records an event on the current stream, whose time can be read.
std::unique_ptr<c10::Event> Mark() {
  auto event = std::make_unique<c10::Event>(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  event->record(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(kDevice));
  return event;
}

// Gathers that take much longer than the forward pass of a unit.
class SlowGathers : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  void AllGatherParts(torch::Tensor& flat) override {
    begins.push_back(Mark());
    for (int i = 0; i < 40; ++i) at::mm_out(product_, factor_, factor_);
    BorrowedComm::AllGatherParts(flat);
    ends.push_back(Mark());
  }
  std::vector<std::unique_ptr<c10::Event>> begins, ends;

 private:
  const torch::Tensor factor_ = torch::ones({4096, 4096}, torch::TensorOptions(kDevice)).div_(4096);
  torch::Tensor product_ = torch::empty_like(factor_);
};

// A model of linear layers, each a unit, with its parts on one rank.
struct ShardedOnGpu {
  ShardedOnGpu(Comm& comm, int units, int64_t width, bool overlap,
               std::unique_ptr<PartStore> store = nullptr,
               std::unique_ptr<PartStore> gradients = nullptr)
      : queue(overlap ? std::make_shared<CommStream>(kDevice) : nullptr),
        world(InOrder(comm)),
        net(MakeNet(units, width)),
        model(*world, *world, nullptr, net.get(), ParametersOf(*net), {},
              {.strategy = ShardingStrategy::kFull, .overlap = overlap}, true, queue, nullptr,
              std::move(store), /*reshard=*/nullptr, std::move(gradients)),
        adamw(model.shards(), {.lr = 1e-3}) {}

  std::unique_ptr<Comm> InOrder(Comm& comm) const {
    auto borrowed = std::make_unique<BorrowedComm>(comm);
    if (queue == nullptr) return borrowed;
    return MakeOrderedComm(std::move(borrowed), queue);
  }
  static torch::nn::Sequential MakeNet(int units, int64_t width) {
    torch::manual_seed(1);
    torch::nn::Sequential net;
    for (int i = 0; i < units; ++i) net->push_back(torch::nn::Linear(width, width));
    net->to(kDevice);
    return net;
  }
  static std::vector<NamedParameter> ParametersOf(const torch::nn::Module& module) {
    std::vector<NamedParameter> parameters;
    for (const auto& item : module.named_parameters()) {
      parameters.push_back({item.key(), item.value()});
    }
    return parameters;
  }
  torch::Tensor Layer(int i, const torch::Tensor& x) {
    return net[i]->as<torch::nn::Linear>()->forward(x);
  }
  void Update() {
    model.Expire();
    adamw.Step();
    model.MarkChanged(model.shards());
    adamw.ZeroGrad();
  }

  const std::shared_ptr<CommStream> queue;
  const std::unique_ptr<Comm> world;
  torch::nn::Sequential net;
  ShardedModel model;
  FusedAdamW adamw;
};

TEST_F(Gpu, ShardingOnAStreamOfItsOwn_HasTheBitsWithoutIt) {
  std::vector<std::vector<torch::Tensor>> runs;
  for (const bool overlap : {false, true}) {
    const std::unique_ptr<Comm> comm = NcclComm();
    constexpr int kUnits = 6;
    ShardedOnGpu trained(*comm, kUnits, 512, overlap);
    runs.emplace_back();
    for (int step = 0; step < 8; ++step) {
      torch::manual_seed(100 + step);
      torch::Tensor x = torch::randn({256, 512}).to(kDevice);
      trained.model.BeginForward(true);
      for (int i = 0; i < kUnits; ++i) x = torch::tanh(trained.Layer(i, x));
      trained.model.EndForward();
      const torch::Tensor loss = x.square().mean();
      loss.backward();
      // Only in every second step, so that the host also runs ahead of the device.
      if (step % 2 == 0) runs.back().push_back(loss.detach().cpu());
      trained.Update();
    }
    for (const auto& [name, value] :
         trained.model.FullParameters([](const std::string&) { return true; })) {
      runs.back().push_back(value);
    }
  }
  ASSERT_EQ(runs[0].size(), runs[1].size());
  for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(runs[0][i].equal(runs[1][i])) << i;
}

int64_t BytesOnTheGpu() {
  return at::getDeviceAllocator(torch::kCUDA)
      ->getDeviceStats(kDevice.index())
      .allocated_bytes[0]
      .current;
}

TEST_F(Gpu, PartsThatAreElsewhere_HaveTheBitsOfThoseOnTheGpu_AndLeaveItsMemory) {
  constexpr int kUnits = 6;
  constexpr int64_t kWidth = 1024;
  constexpr int64_t kUnitBytes = 4 * (kWidth * kWidth + kWidth);
  enum class Place { kGpu, kHost, kDisk, kGradientsOnHost, kGradientsOnDisk };
  std::vector<torch::Tensor> want;
  for (const Place place : {Place::kGpu, Place::kHost, Place::kDisk, Place::kGradientsOnHost,
                            Place::kGradientsOnDisk}) {
    const bool only_gradients =
        place == Place::kGradientsOnHost || place == Place::kGradientsOnDisk;
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(place)) + (overlap ? " overlaps" : ""));
      const std::unique_ptr<Comm> comm = NcclComm();
      const TestFolder folder;
      const int64_t before = BytesOnTheGpu();
      std::unique_ptr<PartStore> store, gradients;
      if (place == Place::kGradientsOnHost) {
        gradients = std::make_unique<HostParts>(kDevice, 1, HostParts::Contents::kGradients);
      }
      if (place == Place::kGradientsOnDisk) {
        gradients = std::make_unique<DiskParts>(MakeScratchFile(folder.path()));
      }
      if (place == Place::kHost) store = std::make_unique<HostParts>(kDevice, 1);
      if (place == Place::kDisk) {
        store = std::make_unique<DiskParts>(MakeScratchFile(folder.path()));
      }
      ShardedOnGpu trained(*comm, kUnits, kWidth, overlap, std::move(store), std::move(gradients));
      if (place != Place::kGpu) trained.adamw.OffloadState(nullptr);
      std::vector<torch::Tensor> run;
      int64_t bytes = 0;
      for (int step = 0; step < 8; ++step) {
        torch::manual_seed(100 + step);
        torch::Tensor x = torch::randn({256, kWidth}).to(kDevice);
        trained.model.BeginForward(true);
        for (int i = 0; i < kUnits; ++i) x = torch::tanh(trained.Layer(i, x));
        trained.model.EndForward();
        const torch::Tensor loss = x.square().mean();
        loss.backward();
        bytes = BytesOnTheGpu() - before;
        // Only in every fourth step, so that the host also runs ahead of the device.
        if (step % 4 == 0) run.push_back(loss.detach().cpu());
        trained.Update();
      }
      for (const auto& [name, value] :
           trained.model.FullParameters([](const std::string&) { return true; })) {
        run.push_back(value);
      }
      if (place == Place::kGpu) {
        // Values, gradients and two states.
        EXPECT_GE(bytes, 4 * kUnits * kUnitBytes);
      } else if (!only_gradients) {
        // Holds gathered units and gradients of a few.
        EXPECT_LE(bytes, 12 * kUnitBytes);
      }
      if (want.empty()) want = run;
      ASSERT_EQ(run.size(), want.size());
      for (size_t i = 0; i < run.size(); ++i) EXPECT_TRUE(run[i].equal(want[i])) << i;
    }
  }
}

TEST_F(Gpu, GatherOnAStreamOfItsOwn_RunsWhileTheUnitBeforeComputes) {
  constexpr int kUnits = 4;
  for (const bool overlap : {false, true}) {
    const std::unique_ptr<Comm> comm = NcclComm();
    SlowGathers slow(*comm);
    ShardedOnGpu trained(slow, kUnits, 4096, overlap);
    const torch::Tensor input = torch::randn({4096, 4096}).to(kDevice);
    std::unique_ptr<c10::Event> begin;
    std::vector<std::unique_ptr<c10::Event>> computed;
    // The first step finds the order in which units come.
    for (int step = 0; step < 2; ++step) {
      slow.begins.clear();
      slow.ends.clear();
      computed.clear();
      begin = Mark();
      torch::Tensor x = input;
      trained.model.BeginForward(true);
      for (int i = 0; i < kUnits; ++i) {
        x = trained.Layer(i, x);
        computed.push_back(Mark());
      }
      trained.model.EndForward();
      x.mean().backward();
      trained.Update();
    }
    const std::unique_ptr<c10::Event> end = Mark();
    end->synchronize();
    ASSERT_GE(slow.ends.size(), static_cast<size_t>(kUnits));
    const auto time = [&](const std::unique_ptr<c10::Event>& event) {
      event->synchronize();
      return begin->elapsedTime(*event);
    };
    for (int i = 0; i + 1 < kUnits; ++i) {
      if (overlap) {
        EXPECT_LT(time(slow.begins[i + 1]), time(computed[i])) << i;
        EXPECT_LT(time(computed[i]), time(slow.ends[i + 1])) << i;
      } else {
        EXPECT_LE(time(computed[i]), time(slow.begins[i + 1])) << i;
      }
    }
  }
}

TEST_F(Gpu, Nccl_OneRank_AllReducesAndTellsItsVersion) {
  std::unique_ptr<Comm> comm = NcclComm();
  torch::Tensor x = torch::arange(1000, torch::TensorOptions(kDevice).dtype(torch::kFloat32));
  comm->AllReduce(x, ReduceOp::kSum);
  EXPECT_EQ(x.sum().item<float>(), 999.0f * 500);
  torch::Tensor on_cpu = torch::ones({3});
  comm->AllReduce(on_cpu, ReduceOp::kSum);
  EXPECT_EQ(on_cpu.sum().item<float>(), 3) << "CPU tensors still go through Gloo";
  const auto version = NcclVersion();
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->substr(0, 2), "2.");
  // Flushes as at the end of a job.
  FlushNcclAtEnd(true);
  comm->AllReduce(x, ReduceOp::kSum);
  comm.reset();
  FlushNcclAtEnd(false);
  EXPECT_EQ(x.sum().item<float>(), 999.0f * 500);
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
      // The gradients are not compared, because they are summed in any order; the update is.
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

// Gives the device work for a second, so that the host is ahead of it.
void KeepBusy() {
  const torch::NoGradGuard no_grad;
  const torch::Tensor factor = torch::ones({8192, 8192}, torch::TensorOptions(kDevice));
  torch::Tensor product = torch::empty_like(factor);
  for (int i = 0; i < 40; ++i) at::mm_out(product, factor, factor);
}

// A linear layer that is trained and saved at the same time.
class SavedBesideTraining : public Gpu {
 protected:
  static AcceleratorOptions Options(const std::string& folder) {
    AcceleratorOptions options;
    options.checkpoint.asynchronous = true;
    options.project.directory = folder;
    return options;
  }
};

TEST_F(SavedBesideTraining, NoThreadOfTrainingWaitsForTheDevice) {
  const TestFolder folder;
  Accelerator a(Options(folder.path()));
  torch::nn::Linear layer(4096, 4096);
  FusedAdamW adamw(layer->parameters(), {.lr = 1e-3});
  auto [model, optimizer] = a.prepare(layer, adamw);
  const torch::Tensor x = torch::ones({8, 4096}, torch::TensorOptions(kDevice));
  const auto step = [&, &model = model, &optimizer = optimizer] {
    a.backward(model(x).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  };
  // Twice: memory for two saves is taken and pinned.
  for (int i = 0; i < 3; ++i) {
    step();
    ASSERT_TRUE(a.save_state().ok());
  }
  ASSERT_TRUE(a.wait_for_checkpoint().ok());
  step();
  torch::Tensor want = torch::empty_like(layer->weight.detach());
  KeepBusy();
  const std::unique_ptr<c10::Event> busy = Mark();
  {
    const torch::NoGradGuard no_grad;
    want.copy_(layer->weight);
  }
  ASSERT_TRUE(a.save_state().ok());
  EXPECT_FALSE(busy->query()) << "save_state() has waited for the device";
  step();
  EXPECT_FALSE(busy->query()) << "the optimizer's step has waited for the device";
  ASSERT_TRUE(a.wait_for_checkpoint().ok());
  EXPECT_FALSE(torch::equal(layer->weight, want));
  ASSERT_TRUE(a.load_state().ok());
  EXPECT_TRUE(torch::equal(layer->weight, want));
}

TEST_F(SavedBesideTraining, ProgramThatChangesAParameter_LosesThatSaveAndNoOther) {
  const TestFolder folder;
  Accelerator a(Options(folder.path()));
  torch::nn::Linear layer(512, 512);
  FusedAdamW adamw(layer->parameters(), {.lr = 1e-3});
  auto [model, optimizer] = a.prepare(layer, adamw);
  a.backward(model(torch::ones({8, 512}, torch::TensorOptions(kDevice))).square().mean());
  optimizer.step();
  optimizer.zero_grad();
  KeepBusy();
  ASSERT_TRUE(a.save_state().ok());
  {
    const torch::NoGradGuard no_grad;
    layer->weight.fill_(1);
  }
  const absl::Status lost = a.wait_for_checkpoint();
  EXPECT_EQ(lost.code(), absl::StatusCode::kFailedPrecondition) << lost;
  ASSERT_TRUE(a.save_state().ok());
  const absl::Status written = a.wait_for_checkpoint();
  EXPECT_TRUE(written.ok()) << written;
}

TEST_F(Gpu, BatchThatDoesNotFit_IsTriedSmallerWithTheMemoryBack) {
  Accelerator accelerator;
  constexpr int64_t kRow = int64_t{1} << 30;
  std::vector<int64_t> tried;
  const int64_t rows = find_executable_batch_size(
      accelerator, 1024,
      [&](int64_t batch) {
        tried.push_back(batch);
        // Allocated in two parts, so that a batch that fails holds memory at that time.
        const auto bytes = torch::TensorOptions(accelerator.device()).dtype(torch::kUInt8);
        const torch::Tensor first = torch::empty({batch / 2 * kRow}, bytes);
        const torch::Tensor second = torch::empty({batch / 2 * kRow}, bytes);
        second.fill_(1);
      },
      [](int64_t batch) { return batch / 2; });
  EXPECT_GE(rows, 8);
  EXPECT_LT(rows, 1024);
  EXPECT_GT(tried.size(), 1u);
}

// Takes memory until less than `left` bytes are free.
std::vector<torch::Tensor> Fill(int64_t left) {
  std::vector<torch::Tensor> taken;
  for (int64_t bytes = int64_t{8} << 30; bytes >= left;) {
    try {
      taken.push_back(torch::empty({bytes}, torch::TensorOptions(kDevice).dtype(torch::kUInt8)));
    } catch (const c10::OutOfMemoryError&) {
      bytes /= 2;
    }
  }
  return taken;
}

TEST_F(Gpu, GatherWithoutMemory_NamesTheUnitAndTrainingGoesOnOnceThereIsSome) {
  for (const bool overlap : {false, true}) {
    const std::unique_ptr<Comm> comm = NcclComm();
    constexpr int kUnits = 3;
    constexpr int64_t kWidth = 8192;  // 256 MiB for a unit
    ShardedOnGpu trained(*comm, kUnits, kWidth, overlap);
    const torch::Tensor input = torch::randn({16, kWidth}).to(kDevice);
    const auto step = [&] {
      torch::Tensor x = input;
      trained.model.BeginForward(true);
      for (int i = 0; i < kUnits; ++i) x = trained.Layer(i, x);
      trained.model.EndForward();
      x.square().mean().backward();
      trained.Update();
    };
    step();
    at::getDeviceAllocator(torch::kCUDA)->emptyCache();
    std::vector<torch::Tensor> ballast = Fill(int64_t{16} << 20);
    try {
      const torch::NoGradGuard no_grad;
      trained.model.BeginForward(false);
      trained.Layer(0, input);
      ADD_FAILURE() << "there was memory";
    } catch (const std::exception& error) {
      EXPECT_TRUE(IsOutOfMemory(error)) << error.what();
      EXPECT_NE(std::string(error.what()).find("'0'"), std::string::npos) << error.what();
    }
    ballast.clear();
    trained.model.EndForward();
    trained.model.Expire();
    step();
    for (const auto& [name, value] :
         trained.model.FullParameters([](const std::string&) { return true; })) {
      EXPECT_TRUE(value.isfinite().all().item<bool>()) << name;
    }
  }
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
