// A training that records each step: `curve_worker FOLDER`. Rank 0 appends a line to FOLDER/curve
// for each step: its number, the loss to the last bit, and the samples of all ranks. A step that is
// repeated after a restart has another line. The training ends after as many epochs as
// FOLDER/epochs says, and prints a digest of its weights. FOLDER/pid_R is the process of rank R.
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

#include "ATen/Functions.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/data.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"

namespace {

constexpr int64_t kSamples = 240, kEvery = 7, kNever = 1'000'000'000;

int64_t LastEpoch(const std::string& folder) {
  int64_t epochs = kNever;
  const bool given = absl::SimpleAtoi(muster::ReadFile(folder + "/epochs").value_or(""), &epochs);
  return given ? epochs : kNever;
}

absl::Status Train(muster::Accelerator& accelerator, const std::string& folder) {
  const int64_t rank = accelerator.process_index();
  if (absl::Status noted =
          muster::WriteFileAtomically(absl::StrCat(folder, "/pid_", rank), absl::StrCat(getpid()));
      !noted.ok()) {
    return noted;
  }
  muster::set_seed(accelerator, 7);
  // Dropout, because a resume has to continue the random numbers as well.
  torch::nn::Sequential net(torch::nn::Linear(1, 256), torch::nn::Dropout(0.2),
                            torch::nn::Linear(256, 512), torch::nn::Linear(512, 1));
  muster::FusedAdamW adamw(net->parameters(), {.lr = 0.001});
  const at::Tensor ids = at::arange(kSamples, at::kFloat).unsqueeze(1);
  auto [model, optimizer, loader] =
      accelerator.prepare(net, adamw, muster::batches(muster::TensorDataset(ids), 4).shuffle(true));
  if (absl::Status loaded = accelerator.load_state_if_present(); !loaded.ok()) return loaded;
  std::ofstream curve;
  if (accelerator.is_main_process()) curve.open(folder + "/curve", std::ios::app);
  for (const int64_t epoch : accelerator.epochs(kNever)) {
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate();
      const at::Tensor x = batch.value() / kSamples;
      const at::Tensor loss = (model(x) - x.sin()).pow(2).mean();
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      const auto mean = accelerator.reduce(loss.detach(), "mean").item<double>();
      const at::Tensor all = accelerator.gather_for_metrics(batch.value());
      std::string line = absl::StrFormat("%d %a", accelerator.global_step(), mean);
      for (int64_t i = 0; i < all.numel(); ++i) {
        absl::StrAppend(&line, " ", all.flatten()[i].item<int64_t>());
      }
      if (accelerator.is_main_process()) curve << line + "\n" << std::flush;
      const bool stop = accelerator.should_stop();
      if (!stop && accelerator.global_step() % kEvery != 0) continue;
      if (absl::Status saved = accelerator.save_state(); !saved.ok() || stop) return saved;
    }
    const at::Tensor last = at::full({1}, LastEpoch(folder) <= epoch + 1 ? 1 : 0);
    if (accelerator.reduce(last, "sum").item<int64_t>() == accelerator.num_processes()) break;
  }
  double squares = 0;
  for (const at::Tensor& parameter : net->parameters()) {
    squares += parameter.detach().to(at::kDouble).square().sum().item<double>();
  }
  accelerator.print("weights %a\n", squares);
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string folder = argv[1];
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.checkpoint.keep = 3;
  options.checkpoint.asynchronous = true;
  options.project.directory = folder + "/checkpoints";
  return muster::run(argc, argv, options,
                     [&](muster::Accelerator& accelerator) { return Train(accelerator, folder); });
}
