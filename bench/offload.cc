// Bytes of weights per second of a forward pass through an offloaded model: from the disk, or from
// host memory to a GPU, against what the disk and the link themselves give in the same run.
// bench/run_offload pairs it with Accelerate's.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "base/status_macros.h"
#include "bench/load_average.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "muster/bigmodel.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/pimpl.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/bigmodel/offload_ring.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/collective/nccl.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kGiB = 1 << 30;
constexpr size_t kPart = size_t{4} << 20;
// The bytes of host memory for measuring the link's own rate.
constexpr int64_t kLinkBytes = int64_t{1} << 30;

struct Flags {
  std::string folder, device = "cpu", weights = "disk", dtype = "float32";
  int64_t width = 4096, layers = 16, batch = 1, ring = int64_t{256} << 20;
  int rounds = 5, readers = 8;
  uint64_t alignment = muster::kSafetensorsAlignment;
  bool make = false;

  at::ScalarType type() const { return dtype == "bfloat16" ? at::kBFloat16 : at::kFloat; }
  int64_t layer_bytes() const {
    return width * width * static_cast<int64_t>(c10::elementSize(type()));
  }
  double bytes() const { return static_cast<double>(layer_bytes()) * static_cast<double>(layers); }
};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns the factor for the sum of a row: layers differ, and three of them leave their input as it
// is.
double FactorOf(int64_t layer) { return std::exp2(static_cast<double>(layer % 3 - 1)); }

class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl(int64_t width, at::ScalarType type) {
    weight_ = register_parameter("weight", at::empty({width, width}, type));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight_); }
  void Fill(int64_t number) {
    weight_.fill_(FactorOf(number) / static_cast<double>(weight_.size(0)));
  }

 private:
  at::Tensor weight_;
};
TORCH_MODULE(Layer);

torch::nn::Sequential Net(const Flags& flags, bool has_values) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < flags.layers; ++i) {
    Layer layer(flags.width, flags.type());
    if (has_values) layer->Fill(i);
    net->push_back(layer);
  }
  return net;
}

// Removes the file from the page cache, or brings it in.
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

// Returns the seconds to read all of the file into `into` bytes of memory in turn, by as many
// threads as the ring has, past the page cache or through it.
double ReadAll(const std::string& path, int threads, bool direct, size_t into) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
  Clock::time_point start;
  std::barrier ready(threads, [&start]() noexcept { start = Clock::now(); });
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
  for (std::thread& reader : readers) reader.join();
  const double seconds = SecondsSince(start);
  close(file);
  return seconds;
}

// Returns the CPU time of all threads of the process.
double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void WaitFor(const at::Device& device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Measures the link to a GPU: copies of a layer's size out of pinned memory.
class Link {
 public:
  Link(const Flags& flags, const at::Device& device) : device_(device), copies_(flags.layers) {
    const auto options = at::TensorOptions().dtype(at::kByte);
    const int64_t count = std::clamp(kLinkBytes / flags.layer_bytes(), int64_t{2}, int64_t{64});
    for (int64_t i = 0; i < count; ++i) {
      from_.push_back(at::empty({flags.layer_bytes()}, options.pinned_memory(true)).fill_(1));
    }
    for (int i = 0; i < 2; ++i) {
      to_.push_back(at::empty({flags.layer_bytes()}, options.device(device)));
    }
  }

  // Returns bytes per second.
  double Measure() {
    WaitFor(device_);
    const auto start = Clock::now();
    for (int64_t i = 0; i < copies_; ++i) {
      to_[i % to_.size()].copy_(from_[i % from_.size()], /*non_blocking=*/true);
    }
    WaitFor(device_);
    const double seconds = SecondsSince(start);
    return static_cast<double>(copies_ * to_[0].numel()) / seconds;
  }

 private:
  const at::Device device_;
  const int64_t copies_;
  std::vector<at::Tensor> from_, to_;
};

class Bench {
 public:
  Bench(const Flags& flags, const at::Device& device) : flags_(flags), device_(device) {}

  absl::Status Run() {
    const auto setup = Clock::now();
    const bool on_disk = flags_.weights == "disk";
    if (on_disk) {
      MUSTER_ASSIGN_OR_RETURN(model_, LoadFromDisk(/*mmap=*/false));
    } else {
      MUSTER_RETURN_IF_ERROR(LoadFromMemory());
    }
    setup_s_ = SecondsSince(setup);
    x_ = at::ones({flags_.batch, flags_.width},
                  at::TensorOptions().dtype(flags_.type()).device(device_));
    Forward();
    std::printf("{\"bench\": \"offload\", \"device\": \"%s\", \"weights\": \"%s\", ",
                device_.str().c_str(), flags_.weights.c_str());
    std::printf("\"dtype\": \"%s\", \"weights_bytes\": %.0f, \"layer_bytes\": %ld, ",
                flags_.dtype.c_str(), flags_.bytes(), flags_.layer_bytes());
    MeasureMemory();
    if (on_disk) MUSTER_RETURN_IF_ERROR(MeasureDisk());
    const muster::OffloadStats stats = model_.weights.stats();
    std::printf("\"ring_bytes\": %lu, \"readers\": %d, \"batch\": %ld, \"setup_s\": %.3f, ",
                stats.ring_bytes, flags_.readers, flags_.batch, setup_s_);
    std::printf("\"waits\": %ld, \"correct\": %s, \"load\": %.2f}\n", stats.waits,
                correct_ ? "true" : "false", muster::bench::LoadAverage());
    return correct_ ? absl::OkStatus()
                    : absl::DataLossError("a pass gave other numbers than its weights have");
  }

 private:
  struct Model {
    torch::nn::Sequential net{nullptr};
    muster::DispatchedModel weights;
  };
  struct Rates {
    std::vector<double> gbps, cpu_ms_per_gib;
  };

  absl::StatusOr<Model> LoadFromDisk(bool mmap) const {
    Model model;
    model.net = muster::init_empty_weights([this] { return Net(flags_, /*has_values=*/false); });
    muster::DispatchOptions dispatch = Dispatch();
    dispatch.mmap = mmap;
    MUSTER_ASSIGN_OR_RETURN(
        model.weights, muster::LoadCheckpointAndDispatch(*model.net, flags_.folder, {{"", "disk"}},
                                                         {.dispatch = dispatch}));
    return model;
  }
  absl::Status LoadFromMemory() {
    model_.net = Net(flags_, /*has_values=*/true);
    MUSTER_ASSIGN_OR_RETURN(model_.weights, muster::cpu_offload(model_.net, device_, Dispatch()));
    return absl::OkStatus();
  }
  muster::DispatchOptions Dispatch() const {
    return {.main_device = device_,
            .ring_bytes = static_cast<uint64_t>(std::max(flags_.ring, flags_.layer_bytes())),
            .readers = flags_.readers};
  }

  // Returns bytes per second of one pass.
  double Forward() { return Forward(model_, nullptr); }
  double Forward(Model& model, Rates* rates) {
    model.weights.ring()->WaitUntilIdle();
    WaitFor(device_);
    const muster::OffloadStats before = model.weights.stats();
    const double cpu = CpuSeconds();
    const auto start = Clock::now();
    const at::Tensor y = model.net->forward(x_);
    // The ring reads ahead into the next pass: what it has read counts once it is there.
    model.weights.ring()->WaitUntilIdle();
    WaitFor(device_);
    const double seconds = SecondsSince(start);
    // Mapped weights are used once in a pass.
    const double bytes = static_cast<double>(model.weights.stats().read_bytes - before.read_bytes) +
                         static_cast<double>(before.mapped_bytes);
    if (rates != nullptr) {
      rates->gbps.push_back(bytes / seconds / 1e9);
      rates->cpu_ms_per_gib.push_back((CpuSeconds() - cpu) * 1e3 / (bytes / kGiB));
    }
    double factor = 1;
    for (int64_t i = 0; i < flags_.layers; ++i) factor *= FactorOf(i);
    correct_ = correct_ && (y.to(at::kDouble) / factor - 1).abs().max().item<double>() < 0.1;
    pass_s_.push_back(seconds);
    return bytes / seconds;
  }

  // Measures the link of a GPU, and passes whose weights are in host memory.
  void MeasureMemory() {
    std::optional<Link> link;
    if (!device_.is_cpu()) link.emplace(flags_, device_).Measure();
    std::vector<double> links, passes, shares;
    pass_s_.clear();
    for (int i = 0; i < flags_.rounds; ++i) {
      if (link.has_value()) links.push_back(link->Measure());
      if (flags_.weights == "disk") continue;
      passes.push_back(Forward());
      if (link.has_value()) shares.push_back(passes.back() / links.back());
    }
    if (!links.empty()) std::printf("\"link_gbps\": %.3f, ", Median(links) / 1e9);
    if (passes.empty()) return;
    std::printf("\"forward_gbps\": %.3f, \"pass_s\": %.4f, ", Median(passes) / 1e9,
                Median(pass_s_));
    if (!shares.empty()) std::printf("\"share\": %.3f, ", Median(shares));
  }

  static void Print(const std::string& name, const Rates& rates) {
    std::printf("\"%s_gbps\": %.3f, \"%s_cpu_ms_per_gib\": %.0f, ", name.c_str(),
                Median(rates.gbps), name.c_str(), Median(rates.cpu_ms_per_gib));
  }

  absl::Status MeasureDisk() {
    const std::string path = flags_.folder + "/model.safetensors";
    const auto ring = static_cast<size_t>(flags_.ring);
    const bool maps = device_.is_cpu();
    std::vector<double> disk, ratio, cache, mapped_ratio;
    Rates cold, warm, mapped_cold, mapped_warm;
    for (int i = 0; i < flags_.rounds; ++i) {
      SetCached(path, false);
      disk.push_back(flags_.bytes() / ReadAll(path, flags_.readers, /*direct=*/true, ring) / 1e9);
      SetCached(path, false);
      Forward(model_, &cold);
      ratio.push_back(cold.gbps.back() / disk.back());
      if (!maps) continue;
      SetCached(path, false);
      // Pages in use by a mapping do not leave the cache, so the mapping lasts for one pass.
      MUSTER_ASSIGN_OR_RETURN(Model mapped, LoadFromDisk(/*mmap=*/true));
      Forward(mapped, &mapped_cold);
    }
    SetCached(path, true);
    std::optional<Model> mapped;
    if (maps) {
      MUSTER_ASSIGN_OR_RETURN(mapped, LoadFromDisk(/*mmap=*/true));
      Forward(*mapped, nullptr);
    }
    for (int i = 0; i < flags_.rounds; ++i) {
      cache.push_back(flags_.bytes() / ReadAll(path, flags_.readers, /*direct=*/false, ring) / 1e9);
      Forward(model_, &warm);
      if (!maps) continue;
      Forward(*mapped, &mapped_warm);
      mapped_ratio.push_back(mapped_warm.gbps.back() / warm.gbps.back());
    }
    std::printf("\"disk_gbps\": %.3f, \"cold_of_disk\": %.3f, \"cache_gbps\": %.3f, ", Median(disk),
                Median(ratio), Median(cache));
    Print("cold", cold);
    Print("warm", warm);
    if (!maps) return absl::OkStatus();
    Print("mapped_cold", mapped_cold);
    Print("mapped_warm", mapped_warm);
    std::printf("\"mapped_bytes\": %lu, \"mapped_of_warm\": %.3f, ",
                mapped->weights.stats().mapped_bytes, Median(mapped_ratio));
    return absl::OkStatus();
  }

  const Flags flags_;
  const at::Device device_;
  Model model_;
  at::Tensor x_;
  double setup_s_ = 0;
  std::vector<double> pass_s_;
  bool correct_ = true;
};

absl::Status Make(const Flags& flags) {
  torch::nn::Sequential net = Net(flags, /*has_values=*/true);
  muster::NamedTensors tensors;
  for (const auto& item : net->named_parameters()) tensors.emplace_back(item.key(), item.value());
  return muster::WriteSafetensors(
             flags.folder + "/model.safetensors", tensors,
             {.metadata = {{{"format", "pt"}}}, .data_alignment = flags.alignment})
      .status();
}

absl::Status Main(const Flags& flags) {
  const at::NoGradGuard no_grad;
  if (flags.folder.empty() && (flags.make || flags.weights == "disk")) {
    return absl::InvalidArgumentError("name the model's folder: --folder");
  }
  if (flags.make) return Make(flags);
  at::Device device(at::kCPU);
  if (flags.device != "cpu") {
    int number = 0;
    if (!absl::SimpleAtoi(flags.device, &number) || number < 0) {
      return absl::InvalidArgumentError("--device is cpu, or the number of a GPU");
    }
    MUSTER_RETURN_IF_ERROR(muster::LoadCuda());
    device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(number));
  }
  return Bench(flags, device).Run();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Forward passes of a model that is offloaded to host memory or the disk");
  Flags flags;
  app.add_option("--folder", flags.folder, "of the model on the disk");
  app.add_flag("--make", flags.make, "write the model, and do nothing else");
  app.add_option("--alignment", flags.alignment, "of the data in the file that --make writes");
  app.add_option("--device", flags.device, "where it runs: cpu, or the number of a GPU");
  app.add_option("--weights", flags.weights, "where they are: disk, or cpu for host memory")
      ->check(CLI::IsMember({"disk", "cpu"}));
  app.add_option("--dtype", flags.dtype, "float32 or bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--width", flags.width, "of a layer: width x width weights");
  app.add_option("--layers", flags.layers, "");
  app.add_option("--batch", flags.batch, "rows of the input");
  app.add_option("--ring", flags.ring, "bytes; at least a layer's");
  app.add_option("--readers", flags.readers, "threads that read");
  app.add_option("--rounds", flags.rounds, "of which the median counts");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Main(flags);
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
