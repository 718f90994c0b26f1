// A job that changes its number of processes: `elastic_worker FOLDER`. It trains epochs of 480
// samples until FOLDER/grown is there and it has four processes, saves now and then, and keeps in
// its state which samples it has trained. Rank 0 appends its number of processes to FOLDER/sizes
// when training has begun, and prints at its end whether each epoch had every sample once.
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "ATen/Functions.h"
#include "base/file.h"
#include "muster/accelerator.h"
#include "muster/data.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "tests/e2e/trained_samples.h"
#include "torch/nn/modules/linear.h"

namespace {

constexpr int64_t kSamples = 480, kEvery = 50;

absl::Status Train(muster::Accelerator& accelerator, const std::string& folder) {
  muster::set_seed(accelerator, 7);
  torch::nn::Linear net(1, 4);
  muster::FusedAdamW adamw(net->parameters(), {.lr = 0.01});
  const at::Tensor ids = at::arange(kSamples, at::kFloat).unsqueeze(1);
  auto [model, optimizer, loader] =
      accelerator.prepare(net, adamw, muster::batches(muster::TensorDataset(ids), 2).shuffle(true));
  muster::TrainedSamples seen(accelerator);
  if (absl::Status loaded = accelerator.load_state_if_present(); !loaded.ok()) return loaded;
  const size_t begun = seen.size();
  for ([[maybe_unused]] const int64_t epoch : accelerator.epochs(1'000'000)) {
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate();
      accelerator.backward(model(batch.value() / kSamples).pow(2).mean());
      optimizer.step();
      optimizer.zero_grad();
      seen.Add(batch.value());
      if (accelerator.should_stop()) return accelerator.save_state();
      if (accelerator.global_step() % kEvery != 0) continue;
      if (absl::Status saved = accelerator.save_state(); !saved.ok()) return saved;
      if (accelerator.is_main_process() && seen.size() - begun < kEvery * 8 + 1) {
        std::ofstream(folder + "/sizes", std::ios::app) << accelerator.num_processes() << "\n";
      }
    }
    const bool grown = accelerator.num_processes() == 4 && muster::PathExists(folder + "/grown");
    const at::Tensor last = at::full({1}, grown ? 1 : 0);
    if (accelerator.reduce(last, "sum").item<double>() == 4) break;
  }
  accelerator.print("began after %s samples; %" PRId64 " inexact epochs of %zu\n",
                    begun > 0 ? "some" : "no", seen.InexactEpochs(kSamples),
                    seen.size() / kSamples);
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string folder = argv[1];
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.checkpoint.keep = 3;
  options.project.directory = folder + "/checkpoints";
  return muster::run(argc, argv, options,
                     [&](muster::Accelerator& accelerator) { return Train(accelerator, folder); });
}
