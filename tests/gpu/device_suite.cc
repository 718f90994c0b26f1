// What a program does on one device: built once, run on the CPU everywhere and on a GPU if there is
// one, so that what a GPU is asked to do is known to be right elsewhere.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "absl/status/status.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/bigmodel.h"
#include "muster/data.h"
#include "muster/models.h"
#include "muster/nn.h"
#include "muster/offload.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "muster/weights.h"
#include "tests/gpu/gpu_environment.h"
#include "tests/testdata/golden.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/nccl.h"
#include "worker/collective/process_group.h"
#include "worker/models/layers.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/offloaded_state.h"

namespace muster {
namespace {

using testing_support::GoldenPath;

constexpr int64_t kWidth = 96;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    in = register_module("in", torch::nn::Linear(kWidth, 2 * kWidth));
    drop = register_module("drop", torch::nn::Dropout(0.1));
    out = register_module("out", torch::nn::Linear(2 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return x + out(drop(at::gelu(in(x)))); }
  torch::nn::Linear in = nullptr, out = nullptr;
  torch::nn::Dropout drop = nullptr;
};
TORCH_MODULE(Block);

struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    torch::manual_seed(1);
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Block& block : blocks) x = call(block, x);
    return x;
  }
  std::vector<Block> blocks;
};
TORCH_MODULE(Tower);

class Device : public testing::Test {
 protected:
  void SetUp() override {
    if (on_gpu()) testing_support::NeedGpu();
  }

  static bool on_gpu() {
    const char* const device = getenv("MUSTER_TEST_DEVICE");
    return device != nullptr && std::string(device) == "gpu";
  }
  static c10::Device device() {
    return on_gpu() ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU);
  }
  // The name of the device in a device map.
  static std::string place() { return on_gpu() ? "0" : "cpu"; }
  static AcceleratorOptions Options() {
    AcceleratorOptions options;
    options.cpu = !on_gpu();
    options.data_loader.data_seed = 3;
    return options;
  }
};

// Returns six batches of four rows.
auto Rows() {
  return TensorDataset(
      at::arange(24 * kWidth, at::kFloat).view({24, kWidth}).remainder(11).div(11));
}

// Trains from the newest checkpoint, if any, until step `until`, saving every third step. Returns
// the weights on the CPU.
std::map<std::string, at::Tensor> TrainUntil(const AcceleratorOptions& options, int64_t until) {
  Accelerator a(options);
  Tower net;
  FusedAdamW adamw(net->parameters(), {.lr = 1e-2});
  torch::manual_seed(5);  // dropout
  auto [model, optimizer, loader] = a.prepare(net, adamw, batches(Rows(), 4).shuffle(true));
  absl::Status status = a.load_state_if_present();
  EXPECT_TRUE(status.ok()) << status;
  for (int64_t epoch : a.epochs(2)) {
    (void)epoch;
    for (auto& batch : loader) {
      EXPECT_EQ(batch.value().device().type(), a.device().type());
      auto scope = a.accumulate();
      a.backward(model(batch.value()).square().mean());
      optimizer.step();
      optimizer.zero_grad();
      if (a.global_step() % 3 == 0) {
        status = a.save_state();
        EXPECT_TRUE(status.ok()) << status;
      }
      if (a.global_step() == until) break;
    }
    if (a.global_step() == until) break;
  }
  EXPECT_EQ(a.global_step(), until);
  a.end_training();
  std::map<std::string, at::Tensor> weights;
  for (const auto& [name, tensor] : a.get_state_dict(model)) weights[name] = tensor.cpu().clone();
  return weights;
}

TEST_F(Device, Checkpoints_ContinueBitForBit) {
  for (const char* const precision : {"no", "bf16", "fp16"}) {
    for (const bool asynchronous : {false, true}) {
      SCOPED_TRACE(std::string(precision) + (asynchronous ? ", asynchronous" : ""));
      const TestFolder whole, parts;
      AcceleratorOptions options = Options();
      options.mixed_precision = precision;
      options.checkpoint.asynchronous = asynchronous;
      options.project.directory = whole.path();
      const auto want = TrainUntil(options, 9);
      options.project.directory = parts.path();
      TrainUntil(options, 3);
      const auto got = TrainUntil(options, 9);
      ASSERT_EQ(got.size(), want.size());
      for (const auto& [name, tensor] : want) {
        EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
      }
    }
  }
}

TEST_F(Device, StateThatChangesRightAfterAnAsynchronousSave_IsNotInTheCheckpoint) {
  const TestFolder folder;
  AcceleratorOptions options = Options();
  options.project.directory = folder.path();
  options.checkpoint.asynchronous = true;
  Accelerator a(options);
  auto model = a.prepare(torch::nn::Linear(512, 512));
  const at::NoGradGuard no_grad;
  for (int i = 0; i < 4; ++i) {
    model->weight.fill_(i);
    ASSERT_TRUE(a.save_state().ok());
    model->weight.fill_(-1);
  }
  for (int i = 0; i < 4; ++i) {
    const absl::Status loaded =
        a.load_state(folder.path() + "/checkpoints/checkpoint_" + std::to_string(i));
    ASSERT_TRUE(loaded.ok()) << loaded;
    EXPECT_EQ(model->weight.device().type(), device().type());
    EXPECT_TRUE(at::equal(model->weight.cpu(), at::full({512, 512}, i, at::kFloat))) << i;
  }
}

// A file of several blocks, which a GPU copies while others are read.
class LargeState : public Device {
 protected:
  AcceleratorOptions Options() const {
    AcceleratorOptions options = Device::Options();
    options.project.directory = folder_.path();
    return options;
  }
  std::string checkpoint() const { return folder_.path() + "/checkpoints/checkpoint_0"; }

  const TestFolder folder_;
};

TEST_F(LargeState, ReadFromACheckpoint_IsWhatWasSaved) {
  Accelerator a(Options());
  torch::nn::Linear layer(2048, 2049);
  FusedAdamW adamw(layer->parameters(), {.lr = 1e-2});
  auto [model, optimizer] = a.prepare(layer, adamw);
  const at::Tensor x = at::ones({2, 2048}, a.device());
  const auto step = [&, &model = model, &optimizer = optimizer] {
    a.backward(model(x).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  ASSERT_TRUE(a.save_state().ok());
  step();
  const at::Tensor want = layer->weight.detach().clone();
  const at::Tensor bias = layer->bias.detach().clone();
  // Runs twice: into state that is there, and into memory that is used again.
  for (int i = 0; i < 2; ++i) {
    const absl::Status loaded = a.load_state(checkpoint());
    ASSERT_TRUE(loaded.ok()) << loaded;
    EXPECT_FALSE(at::equal(layer->weight, want));
    step();
    EXPECT_TRUE(at::equal(layer->weight, want)) << "weights or moments are others";
    EXPECT_TRUE(at::equal(layer->bias, bias));
  }
  // Then without any moments yet.
  Accelerator b(Options());
  torch::nn::Linear other(2048, 2049);
  FusedAdamW fresh(other->parameters(), {.lr = 1e-2});
  auto [again, restored] = b.prepare(other, fresh);
  const absl::Status loaded = b.load_state(checkpoint());
  ASSERT_TRUE(loaded.ok()) << loaded;
  b.backward(again(x).square().mean());
  restored.step();
  EXPECT_TRUE(at::equal(other->weight, want));
  // Then the weights alone.
  Accelerator c(Options());
  auto weights = c.prepare(torch::nn::Linear(2048, 2049));
  const auto taken = c.load_weights(checkpoint());
  ASSERT_TRUE(taken.ok()) << taken.status();
  ASSERT_TRUE(a.load_state(checkpoint()).ok());
  EXPECT_TRUE(at::equal(weights->weight, layer->weight));
}

TEST_F(LargeState, DamagedBlock_LeavesTheStateAsItWas) {
  Accelerator a(Options());
  auto model = a.prepare(torch::nn::Linear(2048, 2048));
  ASSERT_TRUE(a.save_state().ok());
  const std::string path = checkpoint() + "/model.safetensors";
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  char byte = 0;
  ASSERT_EQ(pread(fd, &byte, 1, 15'000'000), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(pwrite(fd, &byte, 1, 15'000'000), 1);
  close(fd);
  const at::NoGradGuard no_grad;
  model->weight.fill_(3);
  const absl::Status loaded = a.load_state(checkpoint());
  EXPECT_EQ(loaded.code(), absl::StatusCode::kDataLoss) << loaded;
  EXPECT_EQ(model->weight.min().item<float>(), 3);
  EXPECT_EQ(model->weight.max().item<float>(), 3);
}

TEST_F(LargeState, WeightsOfAFile_ComeInTheTypeOfTheModel) {
  Accelerator a(Options());
  auto model = a.prepare(torch::nn::Linear(2048, 1536));
  ASSERT_TRUE(a.save_model(model, folder_.Path("weights")).ok());
  torch::nn::Linear same(2048, 1536), half(2048, 1536);
  same->to(device());
  half->to(device());
  ASSERT_TRUE(load_model(same, folder_.Path("weights")).ok());
  ASSERT_TRUE(load_model(half, folder_.Path("weights"), {.dtype = at::kBFloat16}).ok());
  EXPECT_TRUE(at::equal(same->weight, model->weight));
  EXPECT_TRUE(at::equal(half->weight, model->weight.to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(half->bias, model->bias.to(at::kBFloat16)));
  EXPECT_EQ(half->weight.device().type(), device().type());
}

// A model with everything that a checkpoint treats differently: weights that only the optimizer
// changes, and statistics that each forward pass changes.
struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(int64_t width) {
    torch::manual_seed(1);
    in = register_module("in", torch::nn::Linear(width, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    out = register_module("out", torch::nn::Linear(width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return out(at::gelu(norm(in(x)))); }
  torch::nn::Linear in = nullptr, out = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(Normed);

using Values = std::map<std::string, at::Tensor>;

// Returns copies of all of a model and of its optimizer, where they are, ordered as an operation of
// the device.
Values StateOf(torch::nn::Module& model, FusedOptimizer& optimizer) {
  const at::NoGradGuard no_grad;
  Values values;
  for (const auto& item : model.named_parameters()) {
    values[item.key()] = item.value().detach().clone();
  }
  for (const auto& item : model.named_buffers()) values[item.key()] = item.value().clone();
  for (const auto& [name, tensor] : optimizer.SaveState().tensors) {
    values["optimizer." + name] = tensor.clone();
  }
  return values;
}

void ExpectSame(const Values& got, const Values& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) {
    ASSERT_EQ(got.count(name), 1u) << name;
    EXPECT_TRUE(at::equal(got.at(name).cpu(), tensor.cpu())) << name;
  }
}

TEST_F(Device, AsynchronousSavesBesideTraining_HoldTheStateOfTheirStep) {
  // Large enough for a copy to last while the host is ahead, on a GPU.
  const int64_t width = on_gpu() ? 2048 : 64;
  for (const bool lazy : {true, false}) {
    SCOPED_TRACE(lazy);
    const TestFolder folder;
    AcceleratorOptions options = Options();
    options.checkpoint.asynchronous = true;
    options.checkpoint.lazy = lazy;
    options.project.directory = folder.path();
    Accelerator a(options);
    Normed net(width);
    FusedAdamW adamw(net->parameters(), {.lr = 1e-2});
    auto [model, optimizer] = a.prepare(net, adamw);
    const at::Tensor x = at::randn({256, width}).to(a.device());
    std::vector<Values> want;
    for (int step = 0; step < 6; ++step) {
      a.backward(model(x).square().mean());
      optimizer.step();
      optimizer.zero_grad();
      want.push_back(StateOf(*net, adamw));
      const absl::Status saved = a.save_state();
      ASSERT_TRUE(saved.ok()) << saved;
    }
    const absl::Status written = a.wait_for_checkpoint();
    ASSERT_TRUE(written.ok()) << written;
    for (size_t step = 0; step < want.size(); ++step) {
      SCOPED_TRACE(step);
      const absl::Status loaded =
          a.load_state(folder.path() + "/checkpoints/checkpoint_" + std::to_string(step));
      ASSERT_TRUE(loaded.ok()) << loaded;
      ExpectSame(StateOf(*net, adamw), want[step]);
    }
  }
}

TEST_F(Device, MemoryOfAsynchronousSaves_IsPinnedForAGpu) {
  const TestFolder folder;
  AcceleratorOptions options = Options();
  options.checkpoint.asynchronous = true;
  options.project.directory = folder.path();
  {
    Accelerator a(options);
    auto model = a.prepare(torch::nn::Linear(1024, 1024));
    for (int save = 0; save < 3; ++save) {
      ASSERT_TRUE(a.save_state().ok());
      ASSERT_TRUE(a.wait_for_checkpoint().ok());
      if (on_gpu()) {
        EXPECT_GE(AlignedMemory::PinnedBytes(), model->weight.nbytes()) << save;
      } else {
        EXPECT_EQ(AlignedMemory::PinnedBytes(), 0u);
      }
    }
  }
  EXPECT_EQ(AlignedMemory::PinnedBytes(), 0u);
}

TEST_F(Device, CheckpointOfTheCpu_ContinuesHereAndBack) {
  const TestFolder folder;
  AcceleratorOptions there = Options(), here = Options();
  there.cpu = true;
  there.project.directory = here.project.directory = folder.path();
  const at::Tensor x = at::randn({32, 64});
  Values want;
  // Each one continues what the former one saved.
  for (const AcceleratorOptions& options : {there, here, there}) {
    SCOPED_TRACE(*options.cpu);
    Accelerator a(options);
    Normed net(64);
    FusedAdamW adamw(net->parameters(), {.lr = 1e-2});
    auto [model, optimizer] = a.prepare(net, adamw);
    const absl::Status loaded = a.load_state_if_present();
    ASSERT_TRUE(loaded.ok()) << loaded;
    if (!want.empty()) ExpectSame(StateOf(*net, adamw), want);
    for (int step = 0; step < 2; ++step) {
      a.backward(model(x.to(a.device())).square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const at::Tensor& p : net->parameters()) {
      EXPECT_EQ(p.device().type(), a.device().type());
    }
    want = StateOf(*net, adamw);
    ASSERT_TRUE(a.save_state().ok());
    a.end_training();
  }
}

TEST_F(Device, PartOfACheckpoint_LoadsIntoTheModelHere) {
  const TestFolder folder;
  AcceleratorOptions options = Options();
  options.project.directory = folder.path();
  Values saved;
  {
    Accelerator a(options);
    Normed net(64);
    FusedAdamW adamw(net->parameters());
    auto [model, optimizer] = a.prepare(net, adamw);
    saved = StateOf(*net, adamw);
    ASSERT_TRUE(a.save_state().ok());
  }
  Accelerator a(options);
  auto model = a.prepare(torch::nn::Linear(64, 64));
  const absl::StatusOr<LoadedState> loaded = a.load_weights("", {.prefix = "out."});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(model->weight.device().type(), device().type());
  EXPECT_TRUE(at::equal(model->weight, saved.at("out.weight")));
  EXPECT_TRUE(at::equal(model->bias, saved.at("out.bias")));
}

// Runs those of the engine's cases that do not need more than one process to divide.
TEST_F(Device, CheckpointOfOneKindOfUnits_ContinuesUnderAnother) {
  const at::Tensor x = at::randn({32, kWidth});
  // Returns the last of all steps saved, step by step, under one strategy after the other.
  const auto train = [&](bool changes, bool asynchronous, bool overlap) {
    const TestFolder folder, parts;
    Values weights;
    for (int part = 0; part < 4; ++part) {
      AcceleratorOptions options = Options();
      options.project.directory = folder.path();
      options.checkpoint.asynchronous = asynchronous;
      options.sharding.emplace();
      if (changes && part > 0) {
        options.sharding->strategy =
            part == 2 ? ShardingStrategy::kGradients : ShardingStrategy::kFull;
        const bool from_disk = part != 2;
        options.sharding->optimizer_in_backward = part > 1;
        if (from_disk) options.sharding->offload_parameters = Offload::kDisk;
        options.sharding->offload_parameters_path = parts.path();
      }
      options.sharding->overlap = overlap;
      options.sharding->unit_types = {"Block"};
      Accelerator a(options);
      Tower net;
      FusedSGD sgd(net->parameters(), {.lr = 1e-2, .momentum = 0.9});
      auto [model, optimizer] = a.prepare(net, sgd);
      model->eval();  // without dropout
      const absl::Status loaded = a.load_state_if_present();
      EXPECT_TRUE(loaded.ok()) << loaded;
      for (const auto& [name, tensor] : a.get_state_dict(model)) {
        if (part == 0) continue;
        EXPECT_TRUE(at::equal(weights.at(name), tensor.cpu())) << part << " " << name;
      }
      for (int step = 0; step < 3; ++step) {
        a.backward(model(x.to(a.device())).square().mean());
        optimizer.step();
        optimizer.zero_grad();
        // One save is loaded, and training continues beside the other.
        if (step > 0) {
          const absl::Status saved = a.save_state();
          EXPECT_TRUE(saved.ok()) << saved;
        }
      }
      const absl::Status written = a.wait_for_checkpoint();
      EXPECT_TRUE(written.ok()) << written;
      weights.clear();
      for (const auto& [name, tensor] : a.get_state_dict(model)) {
        weights[name] = tensor.cpu().clone();
      }
    }
    return weights;
  };
  const Values want = train(false, false, false);
  for (const bool asynchronous : {false, true}) {
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(asynchronous);
      SCOPED_TRACE(overlap);
      const Values got = train(true, asynchronous, overlap);
      ASSERT_EQ(got.size(), want.size());
      for (const auto& [name, tensor] : want) {
        EXPECT_LE((got.at(name) - tensor).abs().max().item<double>(), 1e-5) << name;
      }
    }
  }
}

TEST_F(Device, ActivationCheckpointing_HasTheGradientsWithoutIt) {
  std::vector<std::vector<at::Tensor>> runs;
  for (const std::optional<Offload> offload :
       {std::optional<Offload>(), std::optional(Offload::kNone), std::optional(Offload::kCpu),
        std::optional(Offload::kDisk)}) {
    const TestFolder folder;
    AcceleratorOptions options = Options();
    if (offload.has_value()) {
      options.activation_checkpointing = {
          .block_types = {"Block"}, .offload = *offload, .offload_path = folder.path()};
    }
    Accelerator a(options);
    Tower net;
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    runs.emplace_back();
    for (int step = 0; step < 3; ++step) {
      torch::manual_seed(20 + step);  // the same dropout
      const at::Tensor x = at::randn({32, kWidth}).to(a.device());
      a.backward(model(x).square().mean());
      for (const at::Tensor& p : net->parameters()) runs.back().push_back(p.grad().cpu().clone());
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  for (size_t run = 1; run < runs.size(); ++run) {
    ASSERT_EQ(runs[run].size(), runs[0].size());
    for (size_t i = 0; i < runs[0].size(); ++i) {
      EXPECT_TRUE(at::equal(runs[run][i], runs[0][i])) << run << " " << i;
    }
  }
}

// Layers that keep a GPU busy for a while, so that copies overlap with computation.
struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(int64_t width) {
    torch::manual_seed(1);
    for (int i = 0; i < 6; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (torch::nn::Linear& layer : layers) x = x + at::gelu(call(layer, x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Layers);

struct Offloaded {
  Offload optimizer = Offload::kNone;
  Offload parameters = Offload::kNone;
  std::optional<Offload> activations = std::nullopt;  // of checkpointed layers
  bool in_backward = false;
  std::string precision = "no";
  bool overlap = false;
  double max_norm = 0;  // 0: gradients are not clipped
  Offload gradients = Offload::kNone;
};

// Trains six steps, none of which waits for the device, with a save beside them; then the same from
// that save. Returns the weights of both.
std::pair<Values, Values> TrainOffloaded(AcceleratorOptions options, const Offloaded& offloaded,
                                         int64_t width, int64_t rows) {
  constexpr int kSteps = 6, kSaved = 3;
  const TestFolder project, scratch;
  options.project.directory = project.path();
  options.checkpoint.asynchronous = true;
  options.mixed_precision = offloaded.precision;
  options.sharding.emplace();
  if (offloaded.in_backward) options.sharding->strategy = ShardingStrategy::kGradients;
  options.sharding->optimizer_in_backward = offloaded.in_backward;
  options.sharding->offload_optimizer = offloaded.optimizer;
  options.sharding->offload_optimizer_path = scratch.path();
  if (offloaded.parameters != Offload::kNone) {
    options.sharding->strategy = ShardingStrategy::kFull;
    options.sharding->unit_types = {"Linear"};
    options.sharding->overlap = offloaded.overlap;
  }
  options.sharding->offload_parameters = offloaded.parameters;
  options.sharding->offload_parameters_path = scratch.path();
  if (offloaded.gradients != Offload::kNone) {
    options.sharding->strategy = ShardingStrategy::kGradients;
    options.sharding->unit_types = {"Linear"};
  }
  options.sharding->offload_gradients = offloaded.gradients;
  options.sharding->offload_gradients_path = scratch.path();
  if (offloaded.activations.has_value()) {
    options.activation_checkpointing = {.block_types = {"Linear"},
                                        .offload = *offloaded.activations,
                                        .offload_path = scratch.path()};
  }
  const auto run = [&](int from) {
    Accelerator a(options);
    Layers net(width);
    FusedAdamW adamw(net->parameters(), {.lr = 1e-3});
    auto [model, optimizer] = a.prepare(net, adamw);
    torch::manual_seed(4);
    const at::Tensor x = at::randn({rows, width}).to(a.device());
    if (from > 0) {
      const absl::Status loaded = a.load_state();
      EXPECT_TRUE(loaded.ok()) << loaded;
    }
    for (int step = from; step < kSteps; ++step) {
      a.backward(model(x + step).square().mean());
      if (offloaded.max_norm > 0) a.clip_grad_norm_(model->parameters(), offloaded.max_norm);
      optimizer.step();
      optimizer.zero_grad();
      if (from == 0 && step + 1 == kSaved) {
        const absl::Status saved = a.save_state();
        EXPECT_TRUE(saved.ok()) << saved;
      }
    }
    Values values;
    for (const auto& [name, tensor] : a.get_state_dict(model)) values[name] = tensor.cpu().clone();
    // The states have other names if units have them.
    for (const auto& [name, tensor] : adamw.SaveState().tensors) {
      const bool divided =
          offloaded.parameters != Offload::kNone || offloaded.gradients != Offload::kNone;
      if (offloaded.in_backward || divided) continue;
      values["optimizer." + name] = tensor.cpu().clone();
    }
    a.end_training();
    return values;
  };
  Values whole = run(0);
  return {std::move(whole), run(kSaved)};
}

// The state of a layer's weight is a window of its own.
class OffloadedOnDevice : public Device {
 protected:
  void SetUp() override {
    Device::SetUp();
    OffloadedState::SetDefaultWindowBytes(static_cast<uint64_t>(2 * width_ * width_) *
                                          sizeof(float));
  }
  void TearDown() override { OffloadedState::SetDefaultWindowBytes(OffloadedState::kWindowBytes); }

  const int64_t width_ = on_gpu() ? 1024 : 48;
  const int64_t rows_ = on_gpu() ? 4096 : 32;
};

TEST_F(OffloadedOnDevice, States_TrainAndContinueAsThoseOnTheDevice) {
  for (const std::string precision : {"no", "bf16", "fp16"}) {
    for (const bool in_backward : {false, true}) {
      // With a scaler, it is known only after the backward pass whether there is a step.
      if (in_backward && precision == "fp16") continue;
      const auto [want, unused] = TrainOffloaded(
          Options(), {.in_backward = in_backward, .precision = precision}, width_, rows_);
      for (const Offload place : {Offload::kCpu, Offload::kDisk}) {
        SCOPED_TRACE(precision + (in_backward ? ", in the backward pass, " : ", ") +
                     (place == Offload::kCpu ? "CPU" : "disk"));
        const auto [whole, continued] = TrainOffloaded(
            Options(), {.optimizer = place, .in_backward = in_backward, .precision = precision},
            width_, rows_);
        ExpectSame(whole, want);
        ExpectSame(continued, want);
      }
    }
  }
}

Values WithoutStates(Values values) {
  std::erase_if(values, [](const auto& item) { return item.first.starts_with("optimizer."); });
  return values;
}

// Gradients on the CPU leave its memory only for a disk.
TEST_F(OffloadedOnDevice, Gradients_TrainAndContinueAsThoseOnTheDevice) {
  for (const std::string precision : {"no", "fp16"}) {
    const auto [want, unused] =
        TrainOffloaded(Options(), {.precision = precision, .max_norm = 0.5}, width_, rows_);
    for (const Offload gradients : {Offload::kCpu, Offload::kDisk}) {
      for (const Offload optimizer : {Offload::kNone, gradients}) {
        SCOPED_TRACE(precision + (gradients == Offload::kCpu ? ", CPU" : ", disk") +
                     (optimizer == Offload::kNone ? "" : ", with states"));
        const auto [whole, continued] = TrainOffloaded(Options(),
                                                       {.optimizer = optimizer,
                                                        .precision = precision,
                                                        .max_norm = 0.5,
                                                        .gradients = gradients},
                                                       width_, rows_);
        ExpectSame(WithoutStates(whole), WithoutStates(want));
        ExpectSame(WithoutStates(continued), WithoutStates(want));
      }
    }
  }
}

// The same holds for parameters.
TEST_F(OffloadedOnDevice, Parameters_TrainAndContinueAsThoseOnTheDevice) {
  for (const std::string precision : {"no", "bf16", "fp16"}) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && precision == "fp16") continue;
      const double max_norm = in_backward ? 0 : 0.5;
      const auto [want, unused] =
          TrainOffloaded(Options(), {.precision = precision, .max_norm = max_norm}, width_, rows_);
      for (const Offload parameters : {Offload::kCpu, Offload::kDisk}) {
        for (const Offload optimizer : {Offload::kNone, parameters}) {
          for (const bool overlap : {false, true}) {
            if (overlap && optimizer == Offload::kNone) continue;
            SCOPED_TRACE(precision + (in_backward ? ", in the backward pass, " : ", ") +
                         (parameters == Offload::kCpu ? "CPU" : "disk") +
                         (optimizer == Offload::kNone ? "" : ", with states") +
                         (overlap ? ", overlaps" : ""));
            const auto [whole, continued] = TrainOffloaded(Options(),
                                                           {.optimizer = optimizer,
                                                            .parameters = parameters,
                                                            .in_backward = in_backward,
                                                            .precision = precision,
                                                            .overlap = overlap,
                                                            .max_norm = max_norm},
                                                           width_, rows_);
            ExpectSame(WithoutStates(whole), WithoutStates(want));
            ExpectSame(WithoutStates(continued), WithoutStates(want));
          }
        }
      }
    }
  }
}

TEST_F(OffloadedOnDevice, InputsOfBlocks_TrainAsThoseOnTheDevice) {
  const auto [want, unused] = TrainOffloaded(Options(), {}, width_, rows_);
  for (const Offload activations : {Offload::kNone, Offload::kCpu, Offload::kDisk}) {
    for (const Offload optimizer : {Offload::kNone, Offload::kCpu}) {
      SCOPED_TRACE(static_cast<int>(activations));
      SCOPED_TRACE(static_cast<int>(optimizer));
      const auto [whole, continued] = TrainOffloaded(
          Options(), {.optimizer = optimizer, .activations = activations}, width_, rows_);
      ExpectSame(whole, want);
      ExpectSame(continued, want);
    }
  }
}

// Returns one rank, over NCCL on a GPU.
std::unique_ptr<Comm> OneRank(c10::Device device) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = MakeGlooGroup(store, {});
  if (device.is_cuda()) {
    const absl::Status added = AddNcclBackend(group, store, device, std::chrono::minutes(1));
    EXPECT_TRUE(added.ok()) << added;
  }
  return MakeC10dComm(group);
}

TEST_F(Device, EachStrategy_TrainsAsThePlainModel) {
  const auto train = [&](std::optional<ShardingOptions> sharding) {
    const std::unique_ptr<Comm> comm = OneRank(device());
    Tower net;
    net->to(device());
    std::vector<NamedParameter> named;
    for (const auto& item : net->named_parameters()) named.push_back({item.key(), item.value()});
    std::vector<at::Tensor> trained = net->parameters();
    std::unique_ptr<ShardedModel> model;
    if (sharding.has_value()) {
      sharding->unit_types = {"Block"};
      model = std::make_unique<ShardedModel>(*comm, *comm, nullptr, net.get(), named,
                                             std::vector<at::Tensor>(), *sharding);
      trained = model->shards();
    }
    FusedAdamW adamw(trained, {.lr = 1e-2});
    for (int step = 0; step < 6; ++step) {
      torch::manual_seed(40 + step);
      const at::Tensor x = at::randn({32, kWidth}).to(device());
      if (model != nullptr) model->BeginForward(true);
      const at::Tensor loss = net(x).square().mean();
      if (model != nullptr) model->EndForward();
      loss.backward();
      if (model != nullptr) model->Expire();
      adamw.Step();
      adamw.ZeroGrad();
    }
    std::map<std::string, at::Tensor> weights;
    if (model == nullptr) {
      for (const auto& [name, value] : named) weights[name] = value.detach().cpu();
    } else {
      for (const auto& [name, value] :
           model->FullParameters([](const std::string&) { return true; })) {
        weights[name] = value.cpu();
      }
    }
    return weights;
  };
  const auto want = train(std::nullopt);
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(strategy)) + (reshard ? " reshards" : " keeps"));
      const auto got =
          train(ShardingOptions{.strategy = strategy, .reshard_after_forward = reshard});
      ASSERT_EQ(got.size(), want.size());
      for (const auto& [name, tensor] : want) {
        EXPECT_LE((got.at(name) - tensor).abs().max().item<double>(), 1e-6) << name;
      }
    }
  }
}

constexpr const char* kFolders[] = {"hf_models/gpt2_shared", "hf_models/llama_shared",
                                    "hf_models/mixtral_shared", "hf_models/qwen2_shared",
                                    "hf_models/bert_shared"};

at::Tensor Logits(models::TextModelImpl& model, c10::Device at) {
  const at::NoGradGuard no_grad;
  return model
      .forward({.input_ids = at::tensor({1, 2, 3, 4, 5, 6, 7, 8}, at::kLong).view({2, 4}).to(at)})
      .logits.cpu();
}

TEST_F(Device, ModelsOfTheHub_SayWhatTheySayOnTheCpu) {
  for (const char* const folder : kFolders) {
    SCOPED_TRACE(folder);
    auto on_cpu = load_text_model(GoldenPath(folder));
    auto here = load_text_model(GoldenPath(folder), {.device = device()});
    ASSERT_TRUE(on_cpu.ok() && here.ok()) << on_cpu.status() << here.status();
    const at::Tensor want = Logits(**on_cpu, at::kCPU), got = Logits(**here, device());
    EXPECT_LE((got - want).abs().max().item<double>(), 1e-4);
  }
}

TEST_F(Device, Generation_HasTheTokensOfTheCpu) {
  for (const char* const folder : kFolders) {
    if (std::string(folder).find("bert") != std::string::npos) continue;
    SCOPED_TRACE(folder);
    auto on_cpu = load_causal_lm(GoldenPath(folder));
    auto here = load_causal_lm(GoldenPath(folder), {.device = device()});
    ASSERT_TRUE(on_cpu.ok() && here.ok()) << on_cpu.status() << here.status();
    // Two rows, the second one padded on the left.
    const at::Tensor ids = at::tensor({5, 6, 7, 8, 0, 0, 9, 10}, at::kLong).view({2, 4});
    const at::Tensor mask = at::tensor({1, 1, 1, 1, 0, 0, 1, 1}, at::kLong).view({2, 4});
    models::GenerateOptions greedy = {.max_new_tokens = 8, .eos_token_ids = std::vector<int64_t>()};
    models::GenerateOptions sampled = greedy, beams = greedy, in_chunks = greedy;
    sampled.do_sample = true;
    sampled.seed = 3;
    beams.num_beams = 3;
    // Later chunks see keys of the cache, and of their own part.
    in_chunks.prefill_chunk_size = 3;
    for (const models::GenerateOptions& options : {greedy, sampled, beams, in_chunks}) {
      const at::Tensor want = generate(*on_cpu, ids, mask, options).tokens;
      const at::Tensor got = generate(*here, ids.to(device()), mask.to(device()), options).tokens;
      EXPECT_TRUE(at::equal(got, want)) << got << want;
    }
    // Without padding: 7 tokens in chunks of 3, 3 and 1.
    const at::Tensor row = at::tensor({5, 6, 7, 8, 9, 10, 11}, at::kLong).view({1, 7});
    const at::Tensor want = generate(*on_cpu, row, {}, greedy).tokens;
    EXPECT_TRUE(at::equal(generate(*here, row.to(device()), {}, in_chunks).tokens, want));
  }
}

TEST_F(Device, ModelDividedAmongDeviceMemoryAndDisk_HasTheBitsOfTheWholeOne) {
  for (const char* const folder : kFolders) {
    if (std::string(folder).find("bert") != std::string::npos) continue;
    SCOPED_TRACE(folder);
    const std::string path = GoldenPath(folder);
    auto whole = load_causal_lm(path, {.device = device()});
    ASSERT_TRUE(whole.ok()) << whole.status();
    const at::Tensor want = Logits(**whole, device());
    const auto sizes = compute_module_sizes(**whole);
    ASSERT_TRUE(sizes.ok()) << sizes.status();
    const auto all = static_cast<double>(sizes->at(""));
    std::vector<DeviceLimits> divisions = {{{place(), 0.6 * all}}};
    if (on_gpu()) {
      divisions = {{{"0", 0.6 * all}, {"cpu", 0}}, {{"0", 0.5 * all}, {"cpu", 0.4 * all}}};
    }
    for (const DeviceLimits& limits : divisions) {
      for (const bool prefetch : {true, false}) {
        const auto divided =
            load_offloaded_causal_lm(path, "auto", {.max_memory = limits, .prefetch = prefetch});
        ASSERT_TRUE(divided.ok()) << divided.status();
        EXPECT_GT(divided->weights->stats().offloaded_bytes, 0) << "all of it fits";
        // Runs two passes: the second one knows the order.
        for (int pass = 0; pass < 2; ++pass) {
          EXPECT_TRUE(at::equal(Logits(*divided->model.ptr(), device()), want)) << pass;
        }
      }
    }
  }
}

// The host queues passes without a wait, so that copies and operators meet only in their streams.
TEST_F(Device, WeightsOfTheHost_ManyPassesInARow_HaveTheBitsOfResidentOnes) {
  constexpr int kLayers = 12, kPasses = 6;
  constexpr int64_t kWide = 512;
  const at::NoGradGuard no_grad;
  torch::manual_seed(1);
  torch::nn::Sequential resident, offloaded;
  for (int i = 0; i < kLayers; ++i) {
    torch::nn::Linear layer(kWide, kWide), same(kWide, kWide);
    same->weight.copy_(layer->weight);
    same->bias.copy_(layer->bias);
    resident->push_back(layer);
    offloaded->push_back(same);
  }
  resident->to(device());
  const uint64_t layer_bytes = kWide * (kWide + 1) * sizeof(float);
  const auto weights = cpu_offload(offloaded, device(), {.ring_bytes = 4 * layer_bytes});
  ASSERT_TRUE(weights.ok()) << weights.status();
  // Enough rows for a GPU to compute for as long as it copies.
  const at::Tensor x = at::randn({on_gpu() ? 8192 : 8, kWide}).to(device());
  std::vector<at::Tensor> want, got;
  for (int pass = 0; pass < kPasses; ++pass) got.push_back(offloaded->forward(x + pass));
  for (int pass = 0; pass < kPasses; ++pass) want.push_back(resident->forward(x + pass));
  for (int pass = 0; pass < kPasses; ++pass) EXPECT_TRUE(at::equal(got[pass], want[pass])) << pass;
  EXPECT_GT(weights->stats().read_bytes, kPasses / 2 * weights->stats().offloaded_bytes);
}

// If no gradients are kept, a GPU takes LibTorch's own kernel.
TEST_F(Device, RmsNormWithoutGradients_RoundsAsWithThem) {
  at::manual_seed(1);
  for (const c10::ScalarType type : {c10::kFloat, c10::kBFloat16, c10::kHalf, c10::kDouble}) {
    SCOPED_TRACE(c10::toString(type));
    models::RmsNorm norm(64, 1e-5);
    {
      const at::NoGradGuard no_grad;
      norm->weight.uniform_(0.5, 1.5);
    }
    norm->to(device(), type);
    const at::Tensor x = at::randn({3, 5, 64}).to(device(), type);
    const at::Tensor want = norm(x).detach();
    const at::NoGradGuard no_grad;
    const at::Tensor got = norm(x);
    EXPECT_EQ(got.scalar_type(), want.scalar_type());
    EXPECT_TRUE(at::allclose(got.to(at::kDouble), want.to(at::kDouble), 1e-6, 1e-6))
        << (got - want).abs().max().item<double>();
  }
}

TEST_F(Device, Collectives_StayOnTheDevice) {
  Accelerator a(Options());
  const at::Tensor x = at::arange(6, at::kFloat).view({2, 3}).to(a.device());
  for (const at::Tensor& same : {a.gather(x), a.reduce(x, "mean"), a.broadcast(x),
                                 a.pad_across_processes(x), a.gather_for_metrics(x)}) {
    EXPECT_EQ(same.device().type(), device().type());
    EXPECT_TRUE(at::equal(same, x));
  }
  const at::Tensor norm = a.clip_grad_norm_({x.clone().requires_grad_()}, 1.0);
  EXPECT_EQ(norm.item<double>(), 0);
}

TEST_F(Device, SavedModel_LoadsStraightToTheDevice) {
  const TestFolder folder;
  Accelerator a(Options());
  Tower net;
  auto model = a.prepare(net);
  ASSERT_TRUE(a.save_model(model, folder.path()).ok());
  Tower again;
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : again->parameters()) p.zero_();
  }
  again->to(device());
  const absl::StatusOr<LoadedWeights> loaded = load_model(again, folder.path());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const auto want = net->parameters(), got = again->parameters();
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].device().type(), device().type());
    EXPECT_TRUE(at::equal(got[i], want[i])) << i;
  }
}

}  // namespace
}  // namespace muster
