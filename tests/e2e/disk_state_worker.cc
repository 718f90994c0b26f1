// Trains a model whose state is 480 MiB and offloaded to the disk, saves it, and loads it again:
// disk_state_worker STRATEGY FOLDER [beside]
// STRATEGY: zero3 offloads parameters, too; none offloads only the states of the optimizer. beside:
// saves beside training, twice in a row. Prints a line of JSON: the most memory, in MiB, that was
// held in training, by the save and by the load, and how far the loaded weights are from those that
// were saved.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"

namespace muster {
namespace {

constexpr int64_t kWidth = 1024, kLayers = 40;  // 4 MiB each
constexpr int64_t kRows = 8;

// Returns the memory that the kernel cannot take back: of no file, or shared with other processes.
int64_t HeldMiB() {
  std::ifstream status("/proc/self/status");
  int64_t kib = 0;
  for (std::string name; status >> name;) {
    int64_t value = 0;
    if (name == "RssAnon:" || name == "RssShmem:") {
      status >> value;
      kib += value;
    }
  }
  return kib >> 10;
}

// Returns the most memory that is held while `work` runs, measured all the time.
template <typename Work>
int64_t MostHeld(const Work& work) {
  std::atomic<bool> done = false;
  int64_t most = 0;
  std::thread watch([&] {
    while (!done) {
      most = std::max(most, HeldMiB());
      std::this_thread::yield();
    }
  });
  work();
  done = true;
  watch.join();
  return most;
}

void Check(const absl::Status& status) { TORCH_CHECK(status.ok(), status.ToString()); }

torch::nn::Sequential Net() {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < kLayers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  return net;
}

void Run(const std::string& strategy, const std::string& folder, bool beside) {
  AcceleratorOptions options;
  options.cpu = true;
  options.checkpoint.asynchronous = beside;
  options.sharding = ParseSharding(strategy == "none" ? "no_shard" : strategy, 1);
  options.sharding->offload_optimizer = Offload::kDisk;
  options.sharding->offload_optimizer_path = folder + "/states";
  if (strategy == "zero3") {
    options.sharding->offload_parameters = Offload::kDisk;
    options.sharding->offload_parameters_path = folder + "/parameters";
  }
  Accelerator accelerator(options);
  set_seed(1);
  torch::nn::Sequential net = deferred_init([] { return Net(); });
  FusedAdamW adamw(net->parameters(), AdamWOptions{.lr = 1e-3});
  auto [model, optimizer] = accelerator.prepare(net, adamw);
  const auto step = [&, &model = model, &optimizer = optimizer] {
    accelerator.backward(model(at::ones({kRows, kWidth})).square().sum());
    optimizer.step();
    optimizer.zero_grad();
  };
  const auto output = [&, &model = model] {
    const at::NoGradGuard no_grad;
    return model(at::ones({kRows, kWidth})).clone();
  };
  const int64_t training = MostHeld([&] {
    step();
    step();
  });
  const std::string dir = folder + "/checkpoint";
  const int64_t save = MostHeld([&] {
    if (beside) Check(accelerator.save_state(dir));
    Check(accelerator.save_state(dir));
    Check(accelerator.wait_for_checkpoint());
  });
  const at::Tensor saved = output();
  step();
  const at::Tensor next = output();
  const int64_t load = MostHeld([&] { Check(accelerator.load_state(dir)); });
  const double weights = (output() - saved).abs().max().item<double>();
  step();  // with the states that were loaded
  const double states = (output() - next).abs().max().item<double>();
  std::printf(
      "{\"training_mib\":%ld,\"save_mib\":%ld,\"load_mib\":%ld,\"weights_off\":%g,"
      "\"states_off\":%g}\n",
      static_cast<long>(training), static_cast<long>(save), static_cast<long>(load), weights,
      states);
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) return 2;
  try {
    muster::Run(argv[1], argv[2], /*beside=*/argc == 4);
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  }
  return 1;
}
