// A job whose processes are killed: `reentry_worker FOLDER MODE KILLS`. It trains two epochs and
// saves every four steps. KILLS: "RANK@STEP,...": such a process kills itself before that step,
// once. MODE, words joined by commas: "elastic" (run_elastic), "async" (asynchronous saves),
// "memory" (saves in memory), "zero3", "error" (rank 1 throws an error of its own before step 6),
// "keeps" (the model outlives the function), "stops" (asks should_stop()), "holds" (a process that
// is started again does nothing), "worker.group_begin" and "worker.group_built" (the first one that
// is started again is killed there, between its seat and its function).
//
// Each process prints "begin RANK PID STEP" when training begins, and rank 0 appends "STEP LOSS" to
// FOLDER/losses and prints at its end whether each epoch had every sample once.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "c10/util/Exception.h"
#include "muster/accelerator.h"
#include "muster/data.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "tests/e2e/trained_samples.h"
#include "tests/e2e/worker_talk.h"
#include "torch/nn/modules/linear.h"

namespace {

constexpr int64_t kSamples = 48, kEvery = 4, kEpochs = 2;

std::vector<torch::nn::Linear> g_kept;

struct Settings {
  std::string folder;
  std::string mode;
  std::vector<std::string> kills;

  bool Has(const std::string& word) const {
    const std::vector<std::string> words = absl::StrSplit(mode, ',');
    return std::find(words.begin(), words.end(), word) != words.end();
  }
  // Kills the process once in the job's life.
  void KillIfTold(int rank, int64_t step) const {
    const std::string here = absl::StrCat(rank, "@", step);
    if (std::find(kills.begin(), kills.end(), here) == kills.end()) return;
    const std::string done = absl::StrCat(folder, "/killed_", here);
    if (muster::PathExists(done)) return;
    std::ofstream(done).close();
    kill(getpid(), SIGKILL);
  }
  // Makes rank 0 wait before a step that has a pipe, until there is a byte in it.
  void WaitAtGate(int rank, int64_t step) const {
    const std::string gate = absl::StrCat(folder, "/gate_", step);
    if (rank != 0 || !muster::PathExists(gate)) return;
    muster::Say("at the gate");
    const int fd = open(gate.c_str(), O_RDONLY | O_CLOEXEC);
    char byte;
    TORCH_CHECK(read(fd, &byte, 1) == 1, "the gate is broken");
    close(fd);
  }
};

absl::Status Train(muster::Accelerator& accelerator, const Settings& settings) {
  const int rank = accelerator.process_index();
  torch::nn::Linear net(1, 4);
  if (settings.Has("keeps")) g_kept.push_back(net);
  muster::FusedAdamW adamw(net->parameters(), {.lr = 0.01});
  const at::Tensor ids = at::arange(kSamples, at::kFloat).unsqueeze(1);
  auto [model, optimizer, loader] =
      accelerator.prepare(net, adamw, muster::batches(muster::TensorDataset(ids), 2).shuffle(true));
  muster::TrainedSamples seen(accelerator);
  if (absl::Status loaded = accelerator.load_state_if_present(); !loaded.ok()) return loaded;
  muster::Say(absl::StrCat("begin ", rank, " ", getpid(), " ", accelerator.global_step()));
  for ([[maybe_unused]] const int64_t epoch : accelerator.epochs(kEpochs)) {
    for (auto& batch : loader) {
      settings.KillIfTold(rank, accelerator.global_step());
      settings.WaitAtGate(rank, accelerator.global_step());
      TORCH_CHECK(!settings.Has("error") || rank != 1 || accelerator.global_step() != 6,
                  "the loss is NaN");
      auto scope = accelerator.accumulate();
      const at::Tensor loss = model(batch.value() / kSamples).pow(2).mean();
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      seen.Add(batch.value());
      const double mean = accelerator.reduce(loss.detach().to(at::kDouble), "mean").item<double>();
      if (rank == 0) {
        std::ofstream(settings.folder + "/losses", std::ios::app)
            << accelerator.global_step() << " " << absl::StrFormat("%.17g", mean) << "\n";
      }
      if (settings.Has("stops") && accelerator.should_stop()) return accelerator.save_state();
      if (accelerator.global_step() % kEvery != 0) continue;
      if (absl::Status saved = accelerator.save_state(); !saved.ok()) return saved;
    }
  }
  accelerator.print("%" PRId64 " inexact epochs of %zu\n", seen.InexactEpochs(kSamples),
                    seen.size() / kSamples);
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const Settings settings = {argv[1], argv[2], absl::StrSplit(argv[3], ',')};
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.project.directory = settings.folder;
  options.checkpoint.keep = 3;
  options.checkpoint.asynchronous = settings.Has("async");
  options.checkpoint.memory = settings.Has("memory");
  if (settings.Has("zero3")) {
    options.sharding.emplace();
    options.sharding->strategy = muster::ShardingStrategy::kFull;
  }
  // A process that the agent has started again never reaches the others.
  if (settings.Has("holds") && muster::Variable("MUSTER_RESTART_COUNT") != "0") {
    while (true) pause();
  }
  for (const std::string place : {"worker.group_begin", "worker.group_built"}) {
    if (settings.Has(place) && muster::Variable("MUSTER_RESTART_COUNT") == "1") {
      setenv("MUSTER_FAILPOINTS", (place + "=kill").c_str(), 1);
    }
  }
  // Not done in Train: a process that continues begins with the same random numbers as a new one.
  muster::set_seed(7);
  const auto train = [&](muster::Accelerator& accelerator) { return Train(accelerator, settings); };
  return settings.Has("elastic") ? muster::run_elastic(argc, argv, options, train)
                                 : muster::run(argc, argv, options, train);
}
