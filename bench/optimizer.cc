// Time of one optimizer step: Muster's fused AdamW against torch::optim::AdamW, interleaved,
// median. Prints one JSON line for each set of parameters.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "bench/load_average.h"
#include "muster/optim.h"
#include "torch/optim/adamw.h"
#include "torch/utils.h"

namespace {

double Millis(const std::function<void()>& step) {
  const auto start = std::chrono::steady_clock::now();
  step();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

std::vector<at::Tensor> Parameters(int64_t count, int64_t size) {
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < count; ++i) {
    parameters.push_back(at::randn({size}).requires_grad_());
    parameters.back().mutable_grad() = at::randn({size});
  }
  return parameters;
}

void Compare(const char* name, int64_t count, int64_t size, int64_t rounds) {
  const std::vector<at::Tensor> ours = Parameters(count, size), theirs = Parameters(count, size);
  muster::FusedAdamW fused(ours);
  torch::optim::AdamW peer(theirs, torch::optim::AdamWOptions(1e-3));
  std::vector<double> fused_ms, peer_ms, ratios;
  for (int64_t i = 0; i <= rounds; ++i) {
    const double a = Millis([&] { fused.Step(); });
    const double b = Millis([&] { peer.step(); });
    if (i == 0) continue;  // state is made in the first step
    fused_ms.push_back(a);
    peer_ms.push_back(b);
    ratios.push_back(b / a);
  }
  std::printf(
      "{\"bench\":\"optimizer\",\"set\":\"%s\",\"muster_ms\":%.3f,\"torch_optim_ms\":%.3f,"
      "\"threads\":%d,\"ratio\":%.2f,\"load\":%.2f}\n",
      name, Median(fused_ms), Median(peer_ms), at::get_num_threads(), Median(ratios),
      muster::bench::LoadAverage());
}

}  // namespace

int main(int argc, char** argv) {
  int64_t rounds = 15;
  CLI::App app("One AdamW step, fused against torch::optim.");
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  Compare("50M_in_50_tensors", 50, 1'000'000, rounds);
  Compare("300_tiny_tensors", 300, 64, rounds * 10);
  return 0;
}
