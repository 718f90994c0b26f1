// A job that saves every five steps: `slurm_worker [STEPS] FOLDER`. Without STEPS, the first run in
// a SLURM job says so in FOLDER/holds after step 12 and trains on until it is stopped, and the next
// trains eight steps more. At its end it prints its weights.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/optim.h"
#include "torch/nn/modules/linear.h"

namespace {

constexpr int64_t kEvery = 5, kHolds = 12, kMore = 8;

absl::Status Train(muster::Accelerator& accelerator, const muster::Arguments& arguments) {
  at::manual_seed(3);
  torch::nn::Linear net(4, 4);
  muster::FusedAdamW adamw(net->parameters(), {.lr = 0.1});
  auto [model, optimizer] = accelerator.prepare(net, adamw);
  if (absl::Status loaded = accelerator.load_state(); !loaded.ok()) {
    if (!absl::IsNotFound(loaded)) return loaded;
  } else {
    accelerator.print("resumed after step %" PRId64 "\n", accelerator.global_step());
  }
  const char* const restarts = std::getenv("SLURM_RESTART_COUNT");
  const bool holds = arguments.size() == 1 && (restarts == nullptr || std::string(restarts) == "0");
  const int64_t steps =
      arguments.size() > 1 ? std::stoll(arguments[0]) : accelerator.global_step() + kMore;
  while (holds || accelerator.global_step() < steps) {
    const auto step = static_cast<double>(accelerator.global_step());
    const at::Tensor x = at::full({2, 4}, 1 + step + accelerator.process_index(), at::kFloat).sin();
    accelerator.backward(at::mse_loss(model(x), x.cos()));
    optimizer.step();
    optimizer.zero_grad();
    if (accelerator.should_stop()) return accelerator.save_state();
    const int64_t now = accelerator.global_step();
    if (now == kHolds && holds && accelerator.is_main_process()) {
      std::ofstream(arguments[0] + "/holds") << "now\n";
    }
    if (now % kEvery != 0 || now > kHolds) continue;
    if (absl::Status saved = accelerator.save_state(); !saved.ok()) return saved;
  }
  accelerator.print("weights after step %" PRId64 ": %.9g\n", accelerator.global_step(),
                    net->weight.to(at::kDouble).abs().sum().item<double>());
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  muster::AcceleratorOptions options;
  options.project.directory = argv[argc - 1];
  return muster::run(argc, argv, options, Train);
}
