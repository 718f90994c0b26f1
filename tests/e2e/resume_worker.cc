// A training that is exact only if every part of its state comes back: `resume_worker UNTIL KILL
// [smooth]`. fp16 with a scaler, dropout, workers in the loader, a sampler of LibTorch;
// asynchronous saves every five steps. The loss scale grows after four steps and backs off at steps
// whose gradients overflow, unless smooth. KILL: each process ends by SIGKILL at optimizer step
// UNTIL. Else rank 0 prints a digest of the parameters with what the scaler has saved, what every
// process would draw next, and how often it had which row.
#include <signal.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/utils.h"
#include "tests/e2e/trained_samples.h"
#include "torch/data/samplers/random.h"
#include "torch/nn/functional/dropout.h"
#include "torch/nn/modules/linear.h"

namespace {

using muster::Accelerator;

absl::Status Train(Accelerator& a, int64_t until, bool kill_all, bool overflow) {
  constexpr int64_t kRows = 120;
  muster::set_seed(a, 7, /*device_specific=*/true);
  torch::nn::Linear net(16, 16);
  muster::FusedAdamW adamw(net->parameters(), {.lr = 0.05});
  // The last column is the row's number.
  const at::Tensor rows =
      at::cat({at::arange(16 * kRows, at::kFloat).view({kRows, 16}).remainder(13).div(13),
               at::arange(kRows, at::kFloat).view({kRows, 1})},
              1);
  muster::TrainedSamples samples(a);
  auto [model, optimizer, loader] =
      a.prepare(net, adamw,
                muster::batches(muster::TensorDataset(rows), 2)
                    .sampler(torch::data::samplers::RandomSampler(kRows))
                    .workers(2));
  if (absl::Status s = a.load_state_if_present(); !s.ok()) return s;
  if (a.is_main_process()) std::printf("begins at %ld\n", static_cast<long>(a.global_step()));
  std::fflush(stdout);
  for (int64_t epoch : a.epochs(1000)) {
    (void)epoch;
    for (auto& batch : loader) {
      auto scope = a.accumulate();
      samples.Add(batch.value().select(1, 16));
      const at::Tensor x = torch::nn::functional::dropout(batch.value().slice(1, 0, 16));
      // The gradients are finite, but overflow when they are scaled.
      const bool overflows =
          overflow && a.global_step() % 5 == 3 && !a.optimizer_step_was_skipped();
      a.backward(model(x).pow(2).mean() * (overflows ? 1e38 : 1.0));
      optimizer.step();
      optimizer.zero_grad();
      if (a.global_step() % 5 == 0) {
        if (absl::Status s = a.save_state(); !s.ok()) return s;
      }
      if (a.global_step() == until) break;
    }
    if (a.global_step() == until) break;
  }
  if (kill_all) {
    // Waits, so that there is something to resume from.
    if (absl::Status s = a.wait_for_checkpoint(); !s.ok()) return s;
    a.wait_for_everyone();
    raise(SIGKILL);
  }
  // The scaler's state, scale and steps since it changed, is in the last save, which is of now.
  if (absl::Status s = a.wait_for_checkpoint(); !s.ok()) return s;
  const at::Tensor next = a.gather(at::rand({1}, at::kDouble));
  if (a.is_main_process()) {
    uint64_t digest = 1469598103934665603u;
    for (const at::Tensor& parameter : net->parameters()) {
      const at::Tensor values = parameter.detach().contiguous();
      for (size_t i = 0; i < values.nbytes(); ++i) {
        digest =
            (digest ^ static_cast<const unsigned char*>(values.data_ptr())[i]) * 1099511628211u;
      }
    }
    std::ifstream file(a.last_checkpoint() + "/scaler.json");
    std::string scaler, word;
    while (file >> word) scaler += word;
    std::printf("scaler %s\n", scaler.c_str());
    std::printf("state %016lx %s", static_cast<unsigned long>(digest), scaler.c_str());
    for (int64_t rank = 0; rank < next.numel(); ++rank) {
      std::printf(" %.17g", next[rank].item<double>());
    }
    std::printf("\nrows %zu, inexact %ld\n", samples.size(),
                static_cast<long>(samples.InexactEpochs(kRows)));
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.mixed_precision = "fp16";
  options.autocast.enabled = false;  // not on every CPU; the scaler is there
  options.grad_scaler.init_scale = 1024;
  options.grad_scaler.growth_interval = 4;
  options.checkpoint.asynchronous = true;
  return muster::run(argc, argv, options, [&](Accelerator& a) {
    return Train(a, std::atoi(argv[1]), std::string(argv[2]) == "kill", argc == 3);
  });
}
