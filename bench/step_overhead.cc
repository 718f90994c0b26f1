// CPU microseconds that the Accelerator adds to a training step of a model of 72 small parameters,
// over the same step in raw LibTorch. Both use the same optimizer and the same clipping, so what is
// left is Muster's own: accumulate(), the prepared loader, model, backward, optimizer and schedule.
// Does the same for sharded models: what their hooks, plans and gathers cost without a link, with
// each layer a unit. Interleaves all in one process; prints one JSON line.
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "bench/load_average.h"
#include "muster/muster.h"
#include "worker/collective/local_comm.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/clip.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 36; ++i) layers->push_back(torch::nn::Linear(8, 8));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : *layers) x = layer->as<torch::nn::Linear>()->forward(x);
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Net);

std::vector<muster::NamedParameter> ParametersOf(const torch::nn::Module& net) {
  std::vector<muster::NamedParameter> parameters;
  for (const auto& item : net.named_parameters()) parameters.push_back({item.key(), item.value()});
  return parameters;
}

// A model that is divided among one rank, with its optimizer.
struct Sharded {
  explicit Sharded(muster::ShardingStrategy strategy)
      : model(comm, comm, nullptr, net.get(), ParametersOf(*net), {}, {.strategy = strategy}),
        adamw(model.shards()),
        schedule(adamw, muster::LinearWithWarmup(10, 1'000'000)) {}

  void Step(const torch::Tensor& x, const torch::Tensor& y) {
    model.BeginForward(/*communicate=*/true);
    const torch::Tensor loss = torch::mse_loss(net(x), y);
    model.EndForward();
    loss.backward();
    muster::ClipGradNorm(model.shards(), 1.0);
    model.AwaitReaders();
    model.Expire();
    adamw.Step();
    model.MarkChanged(model.shards());
    schedule.Step();
    adamw.ZeroGrad();
  }

  muster::LocalComm comm;
  Net net;
  muster::ShardedModel model;
  muster::FusedAdamW adamw;
  muster::LrScheduler schedule;
  std::vector<double> micros;
};

double CpuMicros() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  int64_t steps = 500, rounds = 9;
  CLI::App app("CPU microseconds per step that the Accelerator adds.");
  app.add_option("--steps", steps, "per round")->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);

  muster::AcceleratorOptions options;
  options.cpu = true;
  muster::Accelerator accelerator(options);
  torch::Tensor xs = torch::randn({steps * 4, 8}), ys = torch::randn({steps * 4, 8});
  muster::TensorDataset data(xs, ys);

  Net raw_net, net;
  muster::FusedAdamW raw_adamw(raw_net->parameters()), adamw(net->parameters());
  muster::LrScheduler raw_schedule(raw_adamw, muster::LinearWithWarmup(10, 1'000'000));
  auto [model, optimizer, loader, schedule] = accelerator.prepare(
      net, adamw, muster::batches(data, 4), muster::LinearWithWarmup(10, 1'000'000));

  std::vector<std::unique_ptr<Sharded>> sharded;
  for (const auto strategy :
       {muster::ShardingStrategy::kOptimizer, muster::ShardingStrategy::kGradients,
        muster::ShardingStrategy::kFull}) {
    sharded.push_back(std::make_unique<Sharded>(strategy));
  }

  std::vector<double> raw, ours;
  for (int64_t round = 0; round <= rounds; ++round) {
    double start = CpuMicros();
    for (int64_t i = 0; i < steps; ++i) {
      const torch::Tensor x = xs.narrow(0, i * 4, 4), y = ys.narrow(0, i * 4, 4);
      torch::mse_loss(raw_net(x), y).backward();
      muster::ClipGradNorm(raw_net->parameters(), 1.0);
      raw_adamw.Step();
      raw_schedule.Step();
      raw_adamw.ZeroGrad();
    }
    const double raw_micros = (CpuMicros() - start) / steps;
    start = CpuMicros();
    for (auto& [x, y] : loader) {
      auto scope = accelerator.accumulate();
      accelerator.backward(torch::mse_loss(model(x), y));
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
    }
    const double our_micros = (CpuMicros() - start) / steps;
    for (const auto& one : sharded) {
      start = CpuMicros();
      for (int64_t i = 0; i < steps; ++i) one->Step(xs.narrow(0, i * 4, 4), ys.narrow(0, i * 4, 4));
      if (round > 0) one->micros.push_back((CpuMicros() - start) / steps - raw_micros);
    }
    if (round == 0) continue;  // warm-up
    raw.push_back(raw_micros);
    ours.push_back(our_micros);
  }
  std::vector<double> added;
  for (size_t i = 0; i < raw.size(); ++i) added.push_back(ours[i] - raw[i]);
  std::printf(
      "{\"bench\":\"step_overhead\",\"parameters\":72,\"raw_cpu_us\":%.1f,\"muster_cpu_us\":%.1f,"
      "\"added_cpu_us\":%.1f,\"zero1_added_cpu_us\":%.1f,\"zero2_added_cpu_us\":%.1f,"
      "\"zero3_added_cpu_us\":%.1f,\"load\":%.2f}\n",
      Median(raw), Median(ours), Median(added), Median(sharded[0]->micros),
      Median(sharded[1]->micros), Median(sharded[2]->micros), muster::bench::LoadAverage());
  return 0;
}
