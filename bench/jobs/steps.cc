// The program of bench/run_jobs: `steps FOLDER [elastic]`. Trains the MNIST net on random images
// until FOLDER/stop exists; each rank writes its process to FOLDER/pid_R, and rank 0 appends the
// time of each step to FOLDER/steps. With `elastic`, the survivors of a lost process keep theirs.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>

#include "examples/mnist/net.h"
#include "muster/muster.h"

namespace {

constexpr int64_t kBatch = 64, kBatches = 64;

double Now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

absl::Status Train(muster::Accelerator& accelerator, const std::string& folder) {
  const std::string pid = folder + "/pid_" + std::to_string(accelerator.process_index());
  std::ofstream(pid + ".new") << getpid();
  std::rename((pid + ".new").c_str(), pid.c_str());
  torch::manual_seed(0);
  Net net;
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-3));
  muster::TensorDataset<torch::Tensor, torch::Tensor> images(
      torch::randn({kBatch * kBatches, 1, 28, 28}),
      torch::randint(10, {kBatch * kBatches}, torch::kInt64));
  auto [model, optimizer, data] = accelerator.prepare(net, adamw, muster::batches(images, kBatch));
  std::ofstream steps;
  if (accelerator.is_main_process()) steps.open(folder + "/steps", std::ios::app);
  // Rank 0 decides, so that no rank waits for one that has left.
  const auto goes = [&] {
    const double stops = std::ifstream(folder + "/stop").good() ? 1 : 0;
    return accelerator.broadcast(torch::tensor(stops)).item<double>() == 0;
  };
  while (goes()) {
    for (auto& [x, y] : data) {
      accelerator.backward(torch::nll_loss(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
      if (accelerator.is_main_process()) steps << std::to_string(Now()) + "\n" << std::flush;
    }
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const bool elastic = argc == 3 && std::string(argv[2]) == "elastic";
  if (argc != 2 && !elastic) return 2;
  const std::string folder = argv[1];
  const auto train = [&](muster::Accelerator& accelerator) { return Train(accelerator, folder); };
  return elastic ? muster::run_elastic(argc, argv, train) : muster::run(argc, argv, train);
}
