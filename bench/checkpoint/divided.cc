// What a save costs two or more ranks that have the same model, depending on whether rank 0 writes
// it or all of them do (options.checkpoint.divide_above). Run it under `muster launch`; rank 0
// prints one JSON line: how long save_state() takes, how long an asynchronous one makes training
// wait, how long it takes to be on disk, and what CPU it costs rank 0. With --tensors the state is
// in many small tensors, for which planning costs more than writing. With --plain, in turns: a step
// without and after a save, a load by all ranks with a cold cache, and what the disk gives to plain
// O_DIRECT writes and reads of as many bytes, from ordinary and from huge pages.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/mutex.h"
#include "bench/checkpoint/plain_disk.h"
#include "bench/load_average.h"
#include "muster/muster.h"

namespace {

using muster::bench::Blocks;
using muster::bench::Check;
using muster::bench::DropFromCache;
using muster::bench::kBlock;
using muster::bench::Median;
using muster::bench::PlainBlocks;
using muster::bench::PlainRead;
using muster::bench::PlainWrite;
using muster::bench::Seconds;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Returns the CPU time of this process, all threads, user and system.
double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// What --plain adds, in seconds.
struct Plain {
  std::vector<double> step, step_after_save, write, read, huge_write, huge_read, load;
};

absl::Status Measure(muster::Accelerator& accelerator, double gib, int rounds, int64_t tensors,
                     bool with_plain) {
  // Makes as many layers of 16 MiB as the parameters' third of the state has room for, or
  // `tensors`.
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
  std::vector<double> calls, ends, removals, call_cpu, cpu;
  Plain plain;
  const auto step = [&, &model = model, &optimizer = optimizer] {
    accelerator.wait_for_everyone();
    return Seconds([&] {
      accelerator.backward(model(torch::ones({64, width})).mean());
      optimizer.step();
      optimizer.zero_grad();
      accelerator.wait_for_everyone();
    });
  };
  // Lets only rank 0 work, while the others wait.
  const auto alone = [&](const std::function<void()>& work) {
    double seconds = 0;
    accelerator.wait_for_everyone();
    if (accelerator.is_main_process()) seconds = Seconds(work);
    accelerator.wait_for_everyone(absl::Minutes(10));
    return seconds;
  };
  const std::string plain_file = accelerator.project_dir() + "/plain";
  const bool measures = with_plain && accelerator.is_main_process();
  const PlainBlocks small = measures ? Blocks(false) : PlainBlocks();
  const PlainBlocks huge = measures ? Blocks(true) : PlainBlocks();
  size_t bytes = 0;
  // The first round takes memory, and is not counted.
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
    // wait_for_checkpoint() also waits for the removal of the checkpoint before.
    while (accelerator.save_progress().has_value()) {
      (void)muster::Notification().WaitForNotificationWithTimeout(absl::Microseconds(500));
    }
    const double end = accelerator.options().checkpoint.asynchronous ? SecondsSince(start) : call;
    absl::Status written;
    const double removal = Seconds([&] { written = accelerator.wait_for_checkpoint(); });
    if (!written.ok()) return written;
    if (round == 0) continue;
    removals.push_back(removal);
    calls.push_back(call);
    ends.push_back(end);
    call_cpu.push_back(cpu_after - cpu_before);
    cpu.push_back(CpuSeconds() - cpu_before);
    if (!with_plain) continue;
    plain.step.push_back(step());
    if (absl::Status saved = accelerator.save_state(); !saved.ok()) return saved;
    plain.step_after_save.push_back(step());
    if (absl::Status written = accelerator.wait_for_checkpoint(); !written.ok()) return written;
    const std::string checkpoint = accelerator.last_checkpoint();
    alone([&] { bytes = (DropFromCache(checkpoint) + kBlock - 1) / kBlock * kBlock; });
    plain.write.push_back(alone([&] { PlainWrite(plain_file, small, bytes); }));
    plain.read.push_back(alone([&] { PlainRead(plain_file, small, bytes); }));
    alone([&] { Check(muster::RemoveTree(plain_file)); });
    plain.huge_write.push_back(alone([&] { PlainWrite(plain_file, huge, bytes); }));
    plain.huge_read.push_back(alone([&] { PlainRead(plain_file, huge, bytes); }));
    alone([&] {
      Check(muster::RemoveTree(plain_file));
      (void)DropFromCache(checkpoint);
    });
    const auto begin = std::chrono::steady_clock::now();
    if (absl::Status loaded = accelerator.load_state(checkpoint); !loaded.ok()) return loaded;
    accelerator.wait_for_everyone();
    plain.load.push_back(SecondsSince(begin));
  }
  accelerator.print(
      "{\"bench\":\"checkpoint_divided\",\"ranks\":%d,\"gib\":%.2f,\"divided\":%s,"
      "\"asynchronous\":%s,\"tensors\":%lld,\"call_s\":%.4f,\"durable_s\":%.4f,\"removal_s\":%.4f,"
      "\"call_cpu_s\":%.4f,"
      "\"cpu_s\":%.4f,\"load\":%.2f}\n",
      accelerator.num_processes(), gib,
      accelerator.options().checkpoint.divide_above == 0 ? "true" : "false",
      accelerator.options().checkpoint.asynchronous ? "true" : "false",
      static_cast<long long>(layers), Median(calls), Median(ends), Median(removals),
      Median(call_cpu), Median(cpu), muster::bench::LoadAverage());
  if (with_plain) {
    accelerator.print(
        "{\"bench\":\"checkpoint_ranks\",\"ranks\":%d,\"bytes\":%zu,\"asynchronous\":%s,"
        "\"durable_of_plain\":%.3f,\"plain_write_s\":%.3f,\"cold_load_s\":%.3f,"
        "\"plain_read_s\":%.3f,\"load_of_plain\":%.3f,\"plain_huge_write_s\":%.3f,"
        "\"plain_huge_read_s\":%.3f,\"step_s\":%.4f,\"step_after_save_s\":%.4f,\"load\":%.2f}\n",
        accelerator.num_processes(), bytes,
        accelerator.options().checkpoint.asynchronous ? "true" : "false",
        Median(plain.write) / Median(ends), Median(plain.write), Median(plain.load),
        Median(plain.read), Median(plain.read) / Median(plain.load), Median(plain.huge_write),
        Median(plain.huge_read), Median(plain.step), Median(plain.step_after_save),
        muster::bench::LoadAverage());
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  double gib = 1;
  int rounds = 5;
  int64_t tensors = 0;
  bool divided = false, asynchronous = false, lazy = false, plain = false;
  std::string folder;
  CLI::App app("Saves of a model that every rank has.");
  app.add_option("--gib", gib, "of state: parameters and two moments")->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--tensors", tensors, "parameters; 0: of 16 MiB each")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--folder", folder, "on the disk that is measured")->required();
  app.add_flag("--divided", divided, "all ranks write");
  app.add_flag("--asynchronous", asynchronous, "beside training, everything copied in the call");
  app.add_flag("--lazy", lazy, "with --asynchronous: copied during the next step");
  app.add_flag("--plain", plain, "also loads, steps, and the disk's plain writes and reads");
  CLI11_PARSE(app, argc, argv);
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.project.directory = folder;
  options.checkpoint.keep = 1;
  options.checkpoint.asynchronous = asynchronous;
  options.checkpoint.lazy = lazy;
  options.checkpoint.divide_above = divided ? 0 : INT64_MAX;
  return muster::run(argc, argv, options, [&](muster::Accelerator& accelerator) {
    return Measure(accelerator, gib, rounds, tensors, plain);
  });
}
