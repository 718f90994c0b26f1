// Bytes of weights per second of a forward pass through a model that is offloaded to the disk,
// against what the disk itself gives in the same run. bench/run_offload pairs it with Accelerate's.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "muster/bigmodel.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/bigmodel/offload_ring.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/safetensors.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPart = size_t{4} << 20;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

torch::nn::Sequential Net(int64_t width, int64_t layers) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  return net;
}

// The file leaves the page cache, or comes into it.
void SetCached(const std::string& path, bool cached) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (cached) {
    std::vector<char> part(kPart);
    while (read(file, part.data(), part.size()) > 0) {
    }
  } else {
    fdatasync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  }
  close(file);
}

// Seconds for all of the file into `into` bytes of memory in turn, by as many threads as the ring
// has, past the page cache or through it.
double ReadAll(const std::string& path, int threads, bool direct, size_t into) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
  std::barrier<> ready(threads + 1);
  std::vector<std::thread> readers;
  for (int t = 0; t < threads; ++t) {
    readers.emplace_back([=, &ready] {
      muster::AlignedMemory memory;
      const size_t parts = std::max(into / kPart / static_cast<size_t>(threads), size_t{1});
      if (!memory.Grow(parts * kPart).ok()) std::abort();
      std::memset(memory.data(), 0, parts * kPart);
      ready.arrive_and_wait();
      size_t part = 0;
      for (off_t at = static_cast<off_t>(kPart) * t;; at += static_cast<off_t>(kPart) * threads) {
        if (pread(file, memory.data() + part++ % parts * kPart, kPart, at) <= 0) return;
      }
    });
  }
  ready.arrive_and_wait();
  const auto start = Clock::now();
  for (std::thread& reader : readers) reader.join();
  const double seconds = SecondsSince(start);
  close(file);
  return seconds;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bytes per second of one pass.
double Forward(torch::nn::Sequential& net, const at::Tensor& x,
               const muster::DispatchedModel& model) {
  model.ring()->WaitUntilIdle();
  const uint64_t before = model.stats().read_bytes;
  const auto start = Clock::now();
  net->forward(x);
  // The ring reads ahead into the next pass: what it has read counts once it is there.
  model.ring()->WaitUntilIdle();
  return static_cast<double>(model.stats().read_bytes - before) / SecondsSince(start);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Forward passes of a model that is offloaded to the disk");
  std::string folder;
  int64_t width = 4096, layers = 16, batch = 1, ring = int64_t{256} << 20;
  int rounds = 5, readers = 8;
  uint64_t alignment = muster::kSafetensorsAlignment;
  bool make = false;
  app.add_option("--folder", folder, "of the model")->required();
  app.add_flag("--make", make, "write the model, and do nothing else");
  app.add_option("--alignment", alignment, "of the data in the file that --make writes");
  app.add_option("--width", width, "of a layer: width x width fp32 weights");
  app.add_option("--layers", layers, "");
  app.add_option("--batch", batch, "rows of the input");
  app.add_option("--ring", ring, "bytes");
  app.add_option("--readers", readers, "threads that read");
  app.add_option("--rounds", rounds, "of which the median counts");
  CLI11_PARSE(app, argc, argv);
  const at::NoGradGuard no_grad;
  if (make) {
    torch::nn::Sequential net = Net(width, layers);
    muster::NamedTensors tensors;
    for (const auto& item : net->named_parameters()) tensors.emplace_back(item.key(), item.value());
    const absl::Status saved =
        muster::WriteSafetensors(folder + "/model.safetensors", tensors,
                                 {.metadata = {{{"format", "pt"}}}, .data_alignment = alignment})
            .status();
    if (!saved.ok()) std::fprintf(stderr, "%s\n", saved.ToString().c_str());
    return saved.ok() ? 0 : 1;
  }
  const std::string path = folder + "/model.safetensors";
  auto net = muster::init_empty_weights([&] { return Net(width, layers); });
  const auto setup = Clock::now();
  muster::BigModelOptions options;
  options.ring_bytes = static_cast<uint64_t>(ring);
  options.readers = readers;
  auto model = muster::load_checkpoint_and_dispatch(net, folder,
                                                    muster::DeviceEntries{{"", "disk"}}, options);
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", std::string(model.status().message()).c_str());
    return 1;
  }
  const double setup_seconds = SecondsSince(setup);
  const at::Tensor x = at::randn({batch, width});
  const double bytes =
      4.0 * static_cast<double>(width) * static_cast<double>(width) * static_cast<double>(layers);
  net->forward(x);
  std::vector<double> disk, cold, ratio, cache, warm;
  for (int i = 0; i < rounds; ++i) {
    SetCached(path, false);
    disk.push_back(bytes / ReadAll(path, readers, /*direct=*/true, static_cast<size_t>(ring)));
    SetCached(path, false);
    cold.push_back(Forward(net, x, *model));
    ratio.push_back(cold.back() / disk.back());
  }
  SetCached(path, true);
  for (int i = 0; i < rounds; ++i) {
    cache.push_back(bytes / ReadAll(path, readers, /*direct=*/false, static_cast<size_t>(ring)));
    warm.push_back(Forward(net, x, *model));
  }
  std::printf(
      "{\"bench\": \"offload\", \"weights_bytes\": %.0f, \"ring_bytes\": %ld, \"readers\": %d, "
      "\"batch\": %ld, \"setup_s\": %.3f, \"disk_gbps\": %.3f, \"cold_gbps\": %.3f, "
      "\"cold_of_disk\": %.3f, \"cache_gbps\": %.3f, \"warm_gbps\": %.3f, \"waits\": %ld}\n",
      bytes, ring, readers, batch, setup_seconds, Median(disk) / 1e9, Median(cold) / 1e9,
      Median(ratio), Median(cache) / 1e9, Median(warm) / 1e9, model->stats().waits);
  return 0;
}
