// Steps per second of the MNIST loop: under Muster (--mode muster) or in raw LibTorch with
// hand-written all-reduce (--mode raw). Both train the same net on the same synthetic images of
// MNIST's shape with torch::optim::AdamW, or, with --fused, Muster's. With --width W, they train
// four layers Linear(W) instead, with the fused optimizer. Run under a launcher that sets RANK,
// WORLD_SIZE, MASTER_ADDR and MASTER_PORT; bench/run_train_step does it for both and pairs the
// runs. Rank 0 prints one JSON line.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "bench/load_average.h"
#include "examples/mnist/net.h"
#include "muster/muster.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace {

struct Flags {
  std::string mode = "muster";
  int64_t batch_size = 64;
  int64_t warmup = 20;
  int64_t steps = 200;
  bool fused = false;
  int64_t width = 0;
  bool bucket_view = false;
};

struct LinearsImpl : torch::nn::Module {
  explicit LinearsImpl(int64_t width) {
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(width, width));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i = 0; i < layers->size(); ++i) {
      x = layers[i]->as<torch::nn::Linear>()->forward(i == 0 ? x : torch::relu(x));
    }
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Linears);

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return t.tv_sec + t.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Times `step` and prints the figures of this process.
template <class Step>
void Measure(const Flags& flags, int rank, int size, const Step& step) {
  for (int64_t i = 0; i < flags.warmup; ++i) step(i);
  const double cpu = CpuSeconds();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < flags.steps; ++i) step(flags.warmup + i);
  const double wall =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (rank != 0) return;
  std::printf(
      "{\"bench\":\"train_step\",\"mode\":\"%s\",\"processes\":%d,\"steps_per_s\":%.2f,\"cpu_us_"
      "per_step\":%.1f,\"load\":%.2f}\n",
      flags.mode.c_str(), size, flags.steps / wall, (CpuSeconds() - cpu) / flags.steps * 1e6,
      muster::bench::LoadAverage());
  std::fflush(stdout);
}

int64_t FromEnv(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

std::pair<torch::Tensor, torch::Tensor> Data(const Flags& flags, int64_t batches, int64_t rank) {
  torch::manual_seed(1234 + rank);
  return {torch::randn({batches * flags.batch_size, 1, 28, 28}),
          torch::randint(10, {batches * flags.batch_size}, torch::kInt64)};
}

// Trains as a careful user does without Muster: the pattern of LibTorch's own distributed example.
void Raw(const Flags& flags) {
  const int rank = FromEnv("RANK", 0), size = FromEnv("WORLD_SIZE", 1);
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  if (size > 1) {
    c10d::TCPStoreOptions options;
    options.port = FromEnv("MASTER_PORT", 29500);
    options.isServer = rank == 0;
    options.numWorkers = size;
    auto store = c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options);
    auto gloo = c10d::ProcessGroupGloo::Options::create();
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    group = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>("bench", store), rank, size, gloo);
  }
  torch::manual_seed(0);
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  auto [images, labels] = Data(flags, flags.warmup + flags.steps, rank);
  Measure(flags, rank, size, [&](int64_t i) {
    const torch::Tensor x = images.narrow(0, i * flags.batch_size, flags.batch_size);
    const torch::Tensor y = labels.narrow(0, i * flags.batch_size, flags.batch_size);
    optimizer.zero_grad();
    torch::nll_loss(net(x), y).backward();
    if (size > 1) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (auto& parameter : net->parameters()) {
        std::vector<at::Tensor> grad{parameter.grad()};
        works.push_back(group->allreduce(grad));
      }
      for (auto& work : works) work->wait();
      for (auto& parameter : net->parameters()) parameter.mutable_grad().div_(size);
    }
    optimizer.step();
  });
}

void UnderMuster(const Flags& flags) {
  muster::Accelerator accelerator;
  const int rank = accelerator.process_index(), size = accelerator.num_processes();
  torch::manual_seed(0);
  Net net;
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-3));
  muster::FusedAdamW fused(net->parameters(), {.lr = 1e-3});
  const int64_t batches = flags.warmup + flags.steps;
  auto [images, labels] = Data(flags, batches * size, 0);
  muster::TensorDataset data(images, labels);
  auto [model, loader] = accelerator.prepare(net, muster::batches(data, flags.batch_size));
  muster::AcceleratedOptimizer optimizer =
      flags.fused ? accelerator.prepare(fused) : accelerator.prepare(adamw);
  auto it = loader.begin();
  Measure(flags, rank, size, [&](int64_t) {
    auto& [x, y] = *it;
    {
      auto scope = accelerator.accumulate();
      accelerator.backward(torch::nll_loss(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
    }
    ++it;
  });
}

void UnderMusterLinears(const Flags& flags) {
  muster::AcceleratorOptions options;
  options.data_parallel.gradient_as_bucket_view = flags.bucket_view;
  muster::Accelerator accelerator(options);
  torch::manual_seed(0);
  Linears net(flags.width);
  muster::FusedAdamW adamw(net->parameters(), {.lr = 1e-3});
  torch::manual_seed(accelerator.process_index());
  const torch::Tensor x = torch::randn({flags.batch_size, flags.width}), y = torch::randn_like(x);
  auto [model, optimizer] = accelerator.prepare(net, adamw);
  Measure(flags, accelerator.process_index(), accelerator.num_processes(), [&](int64_t) {
    accelerator.backward(torch::mse_loss(model(x), y));
    optimizer.step();
    optimizer.zero_grad();
  });
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Steps per second of the MNIST loop.");
  app.add_option("--mode", flags.mode)->check(CLI::IsMember({"raw", "muster"}));
  app.add_option("--batch_size", flags.batch_size)->check(CLI::PositiveNumber);
  app.add_option("--warmup", flags.warmup);
  app.add_option("--steps", flags.steps)->check(CLI::PositiveNumber);
  app.add_flag("--fused", flags.fused, "Muster's fused AdamW instead of torch::optim's");
  app.add_option("--width", flags.width, "four layers Linear(W) under Muster")
      ->check(CLI::PositiveNumber);
  app.add_flag("--bucket_view", flags.bucket_view, "gradients are views of their buckets");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  if (flags.width > 0) {
    UnderMusterLinears(flags);
    return 0;
  }
  flags.mode == "raw" ? Raw(flags) : UnderMuster(flags);
  return 0;
}
