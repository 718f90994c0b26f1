// What a save costs two or more ranks that have the same model, by whether rank 0 writes it or all
// of them do (options.checkpoint.divide_above). Run it under `muster launch`; rank 0 prints one
// JSON line: how long save_state() takes, how long an asynchronous one makes training wait, how
// long it takes to be on disk, and what CPU it costs rank 0. With --tensors the state is in many
// small tensors, where planning costs more than writing.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "muster/muster.h"

namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of this process, all threads, user and system.
double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::Status Measure(muster::Accelerator& accelerator, double gib, int rounds, int64_t tensors) {
  // As many layers as the parameters' third of the state has room for, of 16 MiB, or `tensors`.
  const int64_t layers =
      tensors > 0 ? tensors : std::max<int64_t>(1, static_cast<int64_t>(gib * 64 / 3 + 0.5));
  const int64_t width =
      tensors > 0
          ? std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(gib * (1 << 30) / 12 / layers)))
          : 2048;
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  muster::FusedAdamW adamw(net->parameters());
  auto [model, optimizer] = accelerator.prepare(net, adamw);
  std::vector<double> calls, ends, call_cpu, cpu;
  // The first takes memory, and is not counted.
  for (int round = 0; round <= rounds; ++round) {
    accelerator.backward(model(torch::ones({1, width})).mean());
    optimizer.step();
    optimizer.zero_grad();
    accelerator.wait_for_everyone();
    const auto start = std::chrono::steady_clock::now();
    const double cpu_before = CpuSeconds();
    if (absl::Status saved = accelerator.save_state(); !saved.ok()) return saved;
    const double cpu_after = CpuSeconds();
    accelerator.wait_for_everyone();
    const double call = SecondsSince(start);
    if (absl::Status written = accelerator.wait_for_checkpoint(); !written.ok()) return written;
    if (round == 0) continue;
    calls.push_back(call);
    ends.push_back(SecondsSince(start));
    call_cpu.push_back(cpu_after - cpu_before);
    cpu.push_back(CpuSeconds() - cpu_before);
  }
  double load[1] = {0};
  (void)getloadavg(load, 1);
  accelerator.print(
      "{\"bench\":\"checkpoint_divided\",\"ranks\":%d,\"gib\":%.2f,\"divided\":%s,"
      "\"asynchronous\":%s,\"tensors\":%lld,\"call_s\":%.4f,\"durable_s\":%.4f,\"call_cpu_s\":%.4f,"
      "\"cpu_s\":%.4f,\"load_average\":%.1f}\n",
      accelerator.num_processes(), gib,
      accelerator.options().checkpoint.divide_above == 0 ? "true" : "false",
      accelerator.options().checkpoint.asynchronous ? "true" : "false",
      static_cast<long long>(layers), Median(calls), Median(ends), Median(call_cpu), Median(cpu),
      load[0]);
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  double gib = 1;
  int rounds = 5;
  int64_t tensors = 0;
  bool divided = false, asynchronous = false;
  std::string folder;
  CLI::App app("Saves of a model that every rank has.");
  app.add_option("--gib", gib, "of state: parameters and two moments")->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--tensors", tensors, "parameters; 0: of 16 MiB each")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--folder", folder, "on the disk that is measured")->required();
  app.add_flag("--divided", divided, "all ranks write");
  app.add_flag("--asynchronous", asynchronous, "beside training, everything copied in the call");
  CLI11_PARSE(app, argc, argv);
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.project.directory = folder;
  options.checkpoint.keep = 1;
  options.checkpoint.asynchronous = asynchronous;
  options.checkpoint.lazy = false;
  options.checkpoint.divide_above = divided ? 0 : INT64_MAX;
  return muster::run(argc, argv, options, [&](muster::Accelerator& accelerator) {
    return Measure(accelerator, gib, rounds, tensors);
  });
}
