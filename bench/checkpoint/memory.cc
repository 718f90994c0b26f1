// What checkpoints in memory cost: steps with a save in memory each against steps without, in
// turns, and the time from a crash of this process to the end of the next step. One JSON line. To
// be started by
//   muster launch --cpu --num_processes N --max_restarts 1 -- bench/checkpoint/memory
// since the agent of the launch holds the memory. With --device cuda (and a launch without --cpu)
// the model is on a GPU, and times end when the GPU has done what it was given. The disk is not
// used. Two launches play two machines, which mirror each other's saves:
//   muster launch --cpu --num_machines 2 --num_processes 2 --coordinator 127.0.0.1:PORT
//       --token_file FILE --machine_rank 0 (and 1) -- bench/checkpoint/memory --no_crash
#include <signal.h>
#include <sys/resource.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/file.h"
#include "bench/load_average.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "muster/muster.h"

namespace {

double Now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// The CPU time of this process with all its threads.
struct Cpu {
  double user = 0;
  double system = 0;
  Cpu operator-(const Cpu& other) const { return {user - other.user, system - other.system}; }
};

Cpu CpuNow() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return {usage.ru_utime.tv_sec + usage.ru_utime.tv_usec * 1e-6,
          usage.ru_stime.tv_sec + usage.ru_stime.tv_usec * 1e-6};
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

struct Settings {
  int64_t megabytes = 100;
  int64_t batch = 64;
  int rounds = 5;
  int steps = 4;  // of each kind in a round
  bool mirror = true;
  bool crash = true;
  std::string device = "cpu";
  std::string dir = "checkpoint-memory-bench";
};

// Returns the time when the device has done what it was given; on the CPU, at once.
double NowIdle(const torch::Device& device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
  return Now();
}

absl::Status Measure(muster::Accelerator& a, const Settings& settings) {
  if (a.device().is_cpu() != (settings.device == "cpu")) {
    return absl::FailedPreconditionError("this process sees no GPU; measure with --device cpu");
  }
  const char* const restarts = std::getenv("MUSTER_RESTART_COUNT");
  const bool first = restarts == nullptr || std::string(restarts) == "0";
  const std::string died = settings.dir + "/died";
  // Layers of 4 MiB.
  muster::set_seed(1);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < std::max<int64_t>(1, settings.megabytes / 4); ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false)));
  }
  muster::FusedAdamW adamw(net->parameters(), {.lr = 1e-5});
  auto [model, optimizer] = a.prepare(net, adamw);
  const torch::Tensor x = torch::randn({settings.batch, 1024}).to(a.device());
  const auto step = [&, &model = model, &optimizer = optimizer] {
    auto scope = a.accumulate();
    a.backward(model(x).pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
  };
  const double before_load = Now();
  if (absl::Status s = a.load_state_if_present(); !s.ok()) return s;
  if (!first) {
    const double loaded = NowIdle(a.device());
    step();
    const double stepped = NowIdle(a.device());
    const auto text = muster::ReadFile(died);
    if (!text.ok()) return text.status();
    if (a.is_main_process()) {
      std::printf(
          "{\"bench\": \"checkpoint_memory\", \"crash_to_next_step_s\": %.3f, \"load_s\": %.4f, "
          "\"step_s\": %.4f, \"at_step\": "
          "%ld, \"load\": %.2f}\n",
          stepped - std::stod(*text), loaded - before_load, stepped - loaded,
          static_cast<long>(a.global_step()), muster::bench::LoadAverage());
    }
    return absl::OkStatus();
  }
  std::vector<double> without, with, call, ratios, user, system;
  for (int i = 0; i < 4; ++i) {
    step();
    if (absl::Status s = a.save_state(); !s.ok()) return s;
  }
  for (int round = 0; round < settings.rounds; ++round) {
    step();  // what the last save left to copy
    double start = NowIdle(a.device());
    Cpu begin = CpuNow();
    for (int i = 0; i < settings.steps; ++i) step();
    without.push_back((NowIdle(a.device()) - start) / settings.steps);
    const Cpu plain = CpuNow() - begin;
    start = Now();
    begin = CpuNow();
    for (int i = 0; i < settings.steps; ++i) {
      step();
      const double begun = Now();
      if (absl::Status s = a.save_state(); !s.ok()) return s;
      call.push_back(Now() - begun);
    }
    // Includes what is left to copy: the next step pays for it.
    step();
    with.push_back((NowIdle(a.device()) - start - without.back()) / settings.steps);
    const Cpu saved = CpuNow() - begin;
    user.push_back((saved.user - plain.user * (settings.steps + 1) / settings.steps) /
                   settings.steps);
    system.push_back((saved.system - plain.system * (settings.steps + 1) / settings.steps) /
                     settings.steps);
    ratios.push_back(with.back() / without.back());
  }
  if (a.is_main_process()) {
    std::printf(
        "{\"bench\": \"checkpoint_memory\", \"ranks\": %d, \"model_mb\": %ld, \"batch\": %ld, "
        "\"step_s\": %.4f, "
        "\"step_with_save_s\": %.4f, \"ratio\": %.3f, \"save_state_s\": %.5f, "
        "\"mirror\": %s, \"save_user_s\": %.4f, \"save_system_s\": %.4f, \"load\": %.2f}\n",
        static_cast<int>(a.num_processes()), static_cast<long>(settings.megabytes),
        static_cast<long>(settings.batch), Median(without), Median(with), Median(ratios),
        Median(call), settings.mirror ? "true" : "false", Median(user), Median(system),
        muster::bench::LoadAverage());
    std::fflush(stdout);
  }
  if (!settings.crash) return absl::OkStatus();
  if (absl::Status s = a.save_state(); !s.ok()) return s;
  step();
  a.wait_for_everyone();
  if (a.is_main_process()) {
    if (absl::Status s = muster::MakeDirectories(settings.dir); !s.ok()) return s;
    if (absl::Status s = muster::WriteFileAtomically(died, std::to_string(Now())); !s.ok())
      return s;
    raise(SIGKILL);
  }
  a.wait_for_everyone();
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("What checkpoints in memory cost.");
  app.add_option("--megabytes", settings.megabytes, "of parameters");
  app.add_option("--batch", settings.batch);
  app.add_option("--rounds", settings.rounds);
  app.add_option("--steps", settings.steps, "of each kind in a round");
  app.add_option("--device", settings.device, "where the model is")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dir", settings.dir, "a folder for the time of the crash");
  app.add_flag("!--no_mirror", settings.mirror, "save without a copy on another machine");
  app.add_flag("!--no_crash", settings.crash, "end without a crash");
  CLI11_PARSE(app, argc, argv);
  muster::AcceleratorOptions options;
  options.cpu = settings.device == "cpu";
  options.checkpoint.memory = true;
  options.checkpoint.disk_every = 1'000'000'000;
  options.checkpoint.mirror = settings.mirror;
  options.project.directory = settings.dir;
  return muster::run(argc, argv, options,
                     [&](muster::Accelerator& a) { return Measure(a, settings); });
}
