// The program behind `muster test`: proves, on whatever processes and devices `muster launch` would
// use, that a job works. Each check runs on every process; the first that fails ends the program
// with a line that names it. Public API only.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/utils.h"
#include "torch/nn/modules/linear.h"

namespace {

using muster::Accelerator;
using muster::AcceleratorOptions;

#define EXPECT(condition, ...) TORCH_CHECK(condition, "expected " #condition ". ", __VA_ARGS__)

void CheckState(Accelerator& a) {
  EXPECT(a.process_index() >= 0 && a.process_index() < a.num_processes(), "process ",
         a.process_index());
  EXPECT(a.comm().size() == a.num_processes(), a.comm().size());
  a.print("  %d process(es), device %s, precision %s\n", a.num_processes(),
          a.device().str().c_str(), a.mixed_precision().c_str());
}

// A file that all processes of this host can append to.
std::string SharedFile(Accelerator& a, const char* name) {
  const std::string mine = (std::filesystem::temp_directory_path() /
                            ("muster-test-" + std::to_string(getpid()) + "-" + name))
                               .string();
  return a.gather_object(mine).front();
}

void CheckProcessExecution(Accelerator& a) {
  const std::string file = SharedFile(a, "order");
  {
    auto first = a.main_process_first();
    std::ofstream(file, std::ios::app) << (a.is_main_process() ? "main\n" : "other\n");
  }
  a.wait_for_everyone();
  std::ifstream stream(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  if (a.environment().num_nodes.value == 1) {
    EXPECT(static_cast<int>(lines.size()) == a.num_processes(), lines.size(), " processes wrote");
    EXPECT(lines.front() == "main", "the main process did not go first");
  }
  a.wait_for_everyone();
  if (a.is_main_process()) std::filesystem::remove(file);

  EXPECT(a.on_main_process([] {})() == a.is_main_process(), "on_main_process");
  EXPECT(a.on_local_main_process([] {})() == a.is_local_main_process(), "on_local_main_process");
  EXPECT(a.on_last_process([] {})() == a.is_last_process(), "on_last_process");
  for (int i = 0; i < a.num_processes(); ++i) {
    const std::optional<int> result = a.on_process(i, [](int x) { return x + 1; })(41);
    EXPECT(result.has_value() == (i == a.process_index()), "on_process(", i, ")");
    EXPECT(!result.has_value() || *result == 42, "the result of on_process");
  }
}

void CheckSplit(Accelerator& a) {
  const int n = a.num_processes();
  for (int length : {0, 1, 2 * n, 2 * n + 1, 17}) {
    std::vector<int> items(length);
    std::iota(items.begin(), items.end(), 0);
    const std::vector<int> mine = a.split_between_processes(items);
    const int quotient = length / n, remainder = length % n;
    EXPECT(static_cast<int>(mine.size()) == quotient + (a.process_index() < remainder ? 1 : 0) ||
               n == 1,
           "length ", length, ": got ", mine.size());
    const at::Tensor all = at::arange(length).unsqueeze(1).expand({length, 2}).contiguous();
    EXPECT(a.split_between_processes(all).size(0) == static_cast<int64_t>(mine.size()),
           "tensor of ", length);
    if (length > 0 && n > 1) {
      const auto padded = a.split_between_processes(items, /*apply_padding=*/true);
      EXPECT(static_cast<int>(padded.size()) == (length + n - 1) / n, "padded ", length);
    }
  }
  const std::map<std::string, std::vector<int>> dict = {{"a", {1, 2, 3}}, {"b", {4, 5, 6}}};
  const auto part = a.split_between_processes(dict);
  EXPECT(part.at("a").size() == part.at("b").size(), "a map is split alike");
  EXPECT(dict.at("a").size() == 3, "the input is left alone");
}

void CheckRandomStates(Accelerator& a) {
  muster::set_seed(1234 + a.process_index());
  muster::synchronize_rng_states(a);
  const at::Tensor mine = at::rand({4});
  const at::Tensor all = a.gather(mine.to(a.device())).cpu().reshape({-1, 4});
  for (int i = 0; i < a.num_processes(); ++i) {
    EXPECT(at::equal(all[i], all[0]), "process ", i, " draws other numbers after synchronisation");
  }
}

std::vector<int64_t> Ids(Accelerator& a, int64_t length, bool shuffle, bool split,
                         std::optional<bool> dispatch, uint64_t seed, int64_t epochs = 1) {
  muster::LoaderOptions options = a.core().loader_options();
  options.split_batches = split;
  options.dispatch_batches = dispatch;
  options.data_seed = seed;
  muster::TensorDataset data(at::arange(length));
  auto loader =
      muster::PrepareLoader(muster::batches(data, 8).shuffle(shuffle), options, &a.comm());
  std::vector<int64_t> ids;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (auto& batch : loader) {
      const at::Tensor all = a.gather_for_metrics_of(batch, batch.value()).cpu();
      ids.insert(ids.end(), all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel());
    }
  }
  return ids;
}

void CheckLoaders(Accelerator& a, std::optional<bool> dispatch) {
  const int64_t length = 32 * a.num_processes();
  std::vector<int64_t> in_order(length);
  std::iota(in_order.begin(), in_order.end(), 0);
  for (const bool split : {false, true}) {
    if (split && 8 % a.num_processes() != 0) continue;
    EXPECT(Ids(a, length, false, split, dispatch, 0) == in_order,
           "the order of an unshuffled loader, split ", split);
    std::vector<int64_t> shuffled = Ids(a, length, true, split, dispatch, 0);
    EXPECT(shuffled != in_order, "a shuffled loader is shuffled");
    std::sort(shuffled.begin(), shuffled.end());
    EXPECT(shuffled == in_order, "a shuffled loader gives every sample once, split ", split);
  }
  EXPECT(static_cast<int64_t>(Ids(a, length + 3, false, false, dispatch, 0).size()) == length + 3,
         "samples that only fill up the last batch are dropped when gathering for metrics");
}

void CheckSeeds(Accelerator& a) {
  const int64_t length = 16 * a.num_processes();
  EXPECT(Ids(a, length, true, false, false, 7, 3) == Ids(a, length, true, false, false, 7, 3),
         "the same seed gives the same three epochs");
  EXPECT(Ids(a, length, true, false, false, 7) != Ids(a, length, true, false, false, 8),
         "another seed gives another order");
  const std::vector<int64_t> two = Ids(a, length, true, false, false, 7, 2);
  EXPECT(!std::equal(two.begin(), two.begin() + length, two.begin() + length), "two epochs differ");
}

// Three epochs of a linear regression; returns weight and bias. `solo`: all of the data in this
// process, no exchange.
at::Tensor Regression(Accelerator& a, const std::string& precision, bool split, bool solo) {
  const int n = a.num_processes();
  at::manual_seed(42);
  const at::Tensor x = at::randn({64, 1}), y = 2 * x + 1 + 0.1 * at::randn({64, 1});
  torch::nn::Linear net(1, 1);
  {
    at::NoGradGuard no_grad;
    net->weight.fill_(0.5);
    net->bias.fill_(-0.5);
  }
  muster::FusedSGD sgd(net->parameters(), {.lr = 0.1});
  const int64_t per_process = 16 / n;
  if (solo) {
    net->to(a.device());
    muster::FusedSGD own(net->parameters(), {.lr = 0.1});
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (int64_t i = 0; i + per_process * n <= 64; i += per_process * n) {
        const at::Tensor bx = x.narrow(0, i, per_process * n).to(a.device()),
                         by = y.narrow(0, i, per_process * n).to(a.device());
        own.ZeroGrad();
        at::mse_loss(net(bx), by).backward();
        own.Step();
      }
    }
  } else {
    (void)precision;
    muster::TensorDataset data(x, y);
    muster::LoaderOptions options = a.core().loader_options();
    options.split_batches = split;
    auto [model, optimizer] = a.prepare(net, sgd);
    auto loader = muster::PrepareLoader(
        muster::batches(data, split ? per_process * n : per_process).drop_last(), options,
        &a.comm());
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (auto& [bx, by] : loader) {
        a.backward(at::mse_loss(model(bx), by));
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    a.free_memory();
  }
  return at::cat({net->weight.detach().flatten(), net->bias.detach()}).cpu();
}

void CheckTraining(Accelerator& a) {
  if (a.num_processes() > 16) return;
  const double tolerance = a.mixed_precision() == "no" ? 1e-6 : 5e-2;
  const at::Tensor alone = Regression(a, a.mixed_precision(), false, true);
  for (const bool split : {false, true}) {
    const at::Tensor together = Regression(a, a.mixed_precision(), split, false);
    EXPECT(at::allclose(alone, together, tolerance, tolerance), "one process: ", alone,
           " all: ", together);
    const at::Tensor all = a.gather(together.to(a.device())).cpu().reshape({a.num_processes(), -1});
    for (int i = 0; i < a.num_processes(); ++i) {
      EXPECT(at::equal(all[i], all[0]), "process ", i, " ends with other weights");
    }
  }
}

void CheckCollectives(Accelerator& a) {
  const at::Tensor mine =
      at::full({2}, a.process_index(), at::TensorOptions(at::kFloat).device(a.device()));
  const at::Tensor all = a.gather(mine).cpu();
  for (int i = 0; i < a.num_processes(); ++i) EXPECT(all[2 * i].item<int>() == i, "gather: ", all);
  const double sum = a.num_processes() * (a.num_processes() - 1) / 2.0;
  EXPECT(a.reduce(mine, "sum")[0].item<double>() == sum, "reduce sum");
  EXPECT(std::abs(a.reduce(mine, "mean")[0].item<double>() - sum / a.num_processes()) < 1e-6,
         "reduce mean");
  const at::Tensor ragged = at::ones({a.process_index() + 1}, mine.options());
  EXPECT(a.pad_across_processes(ragged).size(0) == a.num_processes(), "pad_across_processes");
  EXPECT(a.broadcast(mine)[0].item<int>() == 0, "broadcast");
  EXPECT(static_cast<int>(a.gather_object(std::string("x")).size()) == a.num_processes(),
         "gather_object");
}

void CheckTrigger(Accelerator& a) {
  EXPECT(!a.check_trigger(), "no trigger was set");
  if (a.is_main_process()) a.set_trigger();
  EXPECT(a.check_trigger(), "set on the main process, seen by all");
  EXPECT(!a.check_trigger(), "a trigger that was seen is gone");
}

void CheckCheckpoint(Accelerator& a) {
  const std::string directory = SharedFile(a, "state");
  torch::nn::Linear net(2, 2);
  muster::FusedAdamW adamw(net->parameters());
  auto [model, optimizer] = a.prepare(net, adamw);
  const auto step = [&, &model = model, &optimizer = optimizer] {
    a.backward(model(at::ones({1, 2}, at::TensorOptions().device(a.device()))).sum());
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  TORCH_CHECK(a.save_state(directory).ok(), "save_state");
  step();
  const at::Tensor after = net->weight.detach().clone();
  const absl::Status loaded = a.load_state(directory);
  TORCH_CHECK(loaded.ok(), loaded.ToString());
  step();
  EXPECT(at::equal(after, net->weight.detach()), "a resumed step gives the same bits");
  a.wait_for_everyone();
  if (a.is_main_process()) std::filesystem::remove_all(directory);
  a.free_memory();
}

}  // namespace

int main(int argc, char** argv) {
  return muster::run(argc, argv, [](Accelerator& a) -> absl::Status {
    const std::vector<std::pair<const char*, std::function<void(Accelerator&)>>> checks = {
        {"state", CheckState},
        {"process execution", CheckProcessExecution},
        {"split_between_processes", CheckSplit},
        {"random states", CheckRandomStates},
        {"collectives", CheckCollectives},
        {"loaders, each process reading for itself",
         [](Accelerator& x) { CheckLoaders(x, false); }},
        {"loaders, the main process reading for all",
         [](Accelerator& x) { CheckLoaders(x, true); }},
        {"seeds of shuffled loaders", CheckSeeds},
        {"training equals one process", CheckTraining},
        {"triggers", CheckTrigger},
        {"save and load", CheckCheckpoint},
    };
    for (const auto& [name, check] : checks) {
      try {
        check(a);
      } catch (const c10::Error& e) {
        return absl::InternalError(std::string("check '") + name +
                                   "' failed: " + e.what_without_backtrace());
      }
      a.wait_for_everyone();
      a.print("ok: %s\n", name);
    }
    a.print("Test is a success! You are ready for your distributed training!\n");
    return absl::OkStatus();
  });
}
