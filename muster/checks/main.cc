// The program behind `muster test`: proves that a job works on the processes and devices that
// `muster launch` would use. Each check runs on every process; the first that fails ends the
// program with a line that names it. Contains the checks of `accelerate test`, in its order, and
// more.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/internal/core.h"
#include "muster/utils.h"
#include "torch/nn/modules/linear.h"
#include "worker/collective/borrowed_comm.h"

namespace {

using muster::Accelerator;
using muster::AcceleratorOptions;

#define EXPECT(condition, ...) TORCH_CHECK(condition, "expected " #condition ". ", __VA_ARGS__)

// A second Accelerator of the same processes, with different options.
std::unique_ptr<Accelerator> Another(Accelerator& a, const AcceleratorOptions& options) {
  muster::JoinedProcess process;
  process.environment = a.environment();
  if (options.mixed_precision.has_value()) {
    process.environment.mixed_precision.value = *options.mixed_precision;
  }
  process.device = a.device();
  process.comm = std::make_unique<muster::BorrowedComm>(a.comm());
  return std::make_unique<Accelerator>(
      std::make_shared<muster::internal::Core>(options, std::move(process)));
}

void CheckState(Accelerator& a) {
  EXPECT(a.process_index() >= 0 && a.process_index() < a.num_processes(), "process ",
         a.process_index());
  EXPECT(a.comm().size() == a.num_processes(), a.comm().size());
  a.print("  %d process(es), device %s, precision %s\n", a.num_processes(),
          a.device().str().c_str(), a.mixed_precision().c_str());
  AcceleratorOptions options;
  options.gradient_accumulation_steps = 3;
  const auto second = Another(a, options);
  EXPECT(second->process_index() == a.process_index() &&
             second->num_processes() == a.num_processes() && second->device() == a.device(),
         "a second Accelerator has another place");
}

// A path on this host's own disk, the same for all processes of the host.
std::string PathOfHost(Accelerator& a, const char* name) {
  const std::string run = a.gather_object(std::to_string(getpid())).front();
  return (std::filesystem::temp_directory_path() / ("muster-test-" + run + "-" + name)).string();
}

// Removes `path` on every host, once all processes are done with it. It may be gone already, since
// hosts may share a disk.
void RemoveOnAllHosts(Accelerator& a, const std::string& path) {
  a.wait_for_everyone();
  std::error_code ignored;
  if (a.is_local_main_process()) std::filesystem::remove_all(path, ignored);
}

void CheckProcessExecution(Accelerator& a) {
  const std::string file = PathOfHost(a, "order");
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
  RemoveOnAllHosts(a, file);

  EXPECT(a.on_main_process([] {})() == a.is_main_process(), "on_main_process");
  EXPECT(a.on_local_main_process([] {})() == a.is_local_main_process(), "on_local_main_process");
  EXPECT(a.on_last_process([] {})() == a.is_last_process(), "on_last_process");
  for (int i = 0; i < a.environment().local_world_size.value; ++i) {
    EXPECT(a.on_local_process(i, [] {})() == (i == a.local_process_index()), "on_local_process(", i,
           ")");
  }
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
      EXPECT(padded.back() <= length - 1 && padded.size() >= mine.size(), "padded ", length);
      const at::Tensor rows = a.split_between_processes(all, /*apply_padding=*/true);
      EXPECT(rows.size(0) == (length + n - 1) / n && rows.size(1) == 2, "padded tensor of ",
             length);
    }
  }
  const std::map<std::string, std::vector<int>> dict = {{"a", {1, 2, 3}}, {"b", {4, 5, 6}}};
  const auto part = a.split_between_processes(dict);
  EXPECT(part.at("a").size() == part.at("b").size(), "a map is split alike");
  const auto nest = std::make_tuple(std::vector<int>{1, 2, 3, 4}, std::string("a text"),
                                    at::arange(4).reshape({4, 1}));
  const auto [list, text, tensor] = a.split_between_processes(nest);
  EXPECT(static_cast<int64_t>(list.size()) == tensor.size(0), "a structure is split alike");
  EXPECT(text == "a text", "a text is nothing to split");
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
  // With rng_types, the states are the same at the beginning of every pass over a loader.
  AcceleratorOptions options;
  options.rng_types = {"generator", "torch"};
  const auto synchronized = Another(a, options);
  auto loader = synchronized->prepare(muster::batches(muster::TensorDataset(at::arange(8)), 1));
  for (int pass = 0; pass < 2; ++pass) {
    at::manual_seed(7 + a.process_index());
    for (auto& batch : loader) {
      (void)batch;
      break;
    }
    const at::Tensor drawn = a.gather(at::rand({4}).to(a.device())).cpu().reshape({-1, 4});
    for (int i = 0; i < a.num_processes(); ++i) {
      EXPECT(at::equal(drawn[i], drawn[0]), "process ", i, " draws other numbers in pass ", pass);
    }
  }
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(99 + a.process_index());
  muster::synchronize_rng_states(a, generator);
  const at::Tensor own = a.gather(at::rand({4}, generator).to(a.device())).cpu().reshape({-1, 4});
  for (int i = 0; i < a.num_processes(); ++i) {
    EXPECT(at::equal(own[i], own[0]), "process ", i, "'s own generator draws other numbers");
  }
  if (a.device().is_cuda()) {
    const at::Tensor gpu =
        a.gather(at::rand({4}, at::TensorOptions(a.device()))).cpu().reshape({-1, 4});
    for (int i = 0; i < a.num_processes(); ++i) {
      EXPECT(at::equal(gpu[i], gpu[0]), "process ", i, "'s GPU draws other numbers");
    }
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

void CheckBatchSampler(Accelerator& a) {
  // Batches of 2, 3, 4 ...: a program's own sampler keeps its batches.
  const int64_t count = 2 * a.num_processes();
  const auto make = [&](int64_t) {
    std::vector<std::vector<int64_t>> all;
    int64_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
      all.emplace_back();
      for (int64_t k = 0; k < 2 + i % 3; ++k) all.back().push_back(next++);
    }
    return all;
  };
  const std::vector<std::vector<int64_t>> expected = make(0);
  muster::TensorDataset data(at::arange(expected.back().back() + 1));
  muster::LoaderOptions options = a.core().loader_options();
  options.split_batches = false;
  options.dispatch_batches = false;
  auto loader =
      muster::PrepareLoader(muster::batches(data).batch_sampler(make), options, &a.comm());
  int64_t round = 0;
  for (auto& batch : loader) {
    const std::vector<int64_t>& mine = expected[round * a.num_processes() + a.process_index()];
    EXPECT(at::equal(batch.value().cpu(), at::tensor(mine)), "batch ", round, " is ",
           batch.value());
    ++round;
  }
  EXPECT(round == count / a.num_processes(), "the number of batches is ", round);
}

void CheckSeeds(Accelerator& a) {
  const int64_t length = 16 * a.num_processes();
  EXPECT(Ids(a, length, true, false, false, 7, 3) == Ids(a, length, true, false, false, 7, 3),
         "the same seed gives the same three epochs");
  EXPECT(Ids(a, length, true, false, false, 7) != Ids(a, length, true, false, false, 8),
         "another seed gives another order");
  const std::vector<int64_t> two = Ids(a, length, true, false, false, 7, 2);
  EXPECT(!std::equal(two.begin(), two.begin() + length, two.begin() + length), "two epochs differ");

  // set_seed() and set_epoch(0) begin the same orders again: those of a generator seeded with seed
  // + epoch, whatever the number of processes.
  const auto three_epochs = [&] {
    muster::set_seed(42);
    muster::LoaderOptions options = a.core().loader_options();
    options.split_batches = options.dispatch_batches.emplace(false);
    options.data_seed.reset();
    options.use_seedable_sampler = true;
    muster::TensorDataset data(at::arange(length));
    auto loader = muster::PrepareLoader(muster::batches(data, 4).shuffle(true), options, &a.comm());
    std::vector<int64_t> ids;
    loader.set_epoch(0);
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      for (auto& batch : loader) {
        const at::Tensor all = a.gather_for_metrics_of(batch, batch.value()).cpu();
        ids.insert(ids.end(), all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel());
      }
    }
    return ids;
  };
  const std::vector<int64_t> ids = three_epochs();
  EXPECT(ids == three_epochs(), "set_seed() repeats the order");
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    const std::vector<int64_t> order(ids.begin() + epoch * length,
                                     ids.begin() + (epoch + 1) * length);
    EXPECT(at::equal(at::tensor(order), muster::ShuffledOrder(length, 42 + epoch)), "epoch ", epoch,
           " is not in the order of seed + epoch");
  }
}

constexpr uint64_t kOrderSeed = 5;

// Three epochs of a linear regression over `a`'s processes; returns weight and bias. With `alone`,
// a plain loop in this process sees all of the data of each step.
at::Tensor Regression(Accelerator& a, bool split, bool shuffle, bool alone) {
  const int64_t n = a.num_processes();
  const int64_t per_process = std::max<int64_t>(16 / n, 1), batch = per_process * n;
  const int64_t samples = std::max<int64_t>(64, 4 * batch);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(42);
  const at::Tensor x = at::randn({samples, 1}, generator);
  const at::Tensor y = 2 * x + 1 + 0.1 * at::randn({samples, 1}, generator);
  torch::nn::Linear net(1, 1);
  {
    at::NoGradGuard no_grad;
    net->weight.fill_(0.5);
    net->bias.fill_(-0.5);
  }
  muster::FusedSGD sgd(net->parameters(), {.lr = 0.1});
  if (alone) {
    net->to(a.device());
    for (int epoch = 0; epoch < 3; ++epoch) {
      const at::Tensor order = shuffle ? muster::ShuffledOrder(samples, kOrderSeed + epoch)
                                       : at::arange(samples, at::kLong);
      for (int64_t i = 0; i + batch <= samples; i += batch) {
        const at::Tensor ids = order.narrow(0, i, batch);
        sgd.ZeroGrad();
        at::mse_loss(net(x.index_select(0, ids).to(a.device())),
                     y.index_select(0, ids).to(a.device()))
            .backward();
        sgd.Step();
      }
    }
  } else {
    muster::TensorDataset data(x, y);
    muster::LoaderOptions options = a.core().loader_options();
    options.split_batches = split;
    options.data_seed = kOrderSeed;
    auto [model, optimizer] = a.prepare(net, sgd);
    auto loader = muster::PrepareLoader(
        muster::batches(data, split ? batch : per_process).shuffle(shuffle).drop_last(), options,
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
  for (const std::string precision : {"no", "bf16", "fp16"}) {
    AcceleratorOptions options;
    options.mixed_precision = precision;
    options.grad_scaler.init_scale = 1024;  // no step of this task overflows
    const auto trainer = Another(a, options);
    // Products in 8 (11) bits of fraction, summed over 12 steps. Sums over many processes round
    // more often.
    const double exact = a.num_processes() > 16 ? 1e-5 : 1e-6;
    const double tolerance = precision == "no" ? exact : 5e-2;
    for (const bool shuffle : {false, true}) {
      const at::Tensor alone = Regression(*trainer, false, shuffle, true);
      for (const bool split : {false, true}) {
        const at::Tensor together = Regression(*trainer, split, shuffle, false);
        EXPECT(at::allclose(alone, together, tolerance, tolerance), "precision ", precision,
               ", split ", split, ", shuffled ", shuffle, ": one process ends with ", alone,
               ", all with ", together);
        const at::Tensor all =
            a.gather(together.to(a.device())).cpu().reshape({a.num_processes(), -1});
        for (int i = 0; i < a.num_processes(); ++i) {
          EXPECT(at::equal(all[i], all[0]), "process ", i, " ends with other weights");
        }
      }
    }
  }
}

// A mistake is an error with the same message on every process, and the job continues.
void CheckMistakes(Accelerator& a) {
  const auto refused = [&](const char* what, const char* words, const auto& function) {
    std::string error;
    try {
      function();
    } catch (const c10::Error& e) {
      error = e.what_without_backtrace();
    }
    EXPECT(error.find(words) != std::string::npos, what, " gives \"", error, "\"");
    a.wait_for_everyone();
  };
  refused("a schedule without an optimizer", "prepare()",
          [&] { (void)a.prepare(muster::StepLR(1)); });
  refused("an unknown reduction", "sum, mean, max",
          [&] { (void)a.reduce(at::ones({1}), "total"); });
  if (a.num_processes() > 1) {
    refused("a gather of different shapes", "pad_across_processes", [&] {
      (void)a.gather(at::ones({a.process_index() + 1}, at::TensorOptions().device(a.device())));
    });
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
  EXPECT(!a.check_trigger(), "a trigger that was seen has disappeared");
}

void CheckCheckpoint(Accelerator& a) {
  const std::string directory = PathOfHost(a, "state");
  // Any cluster has folders of each host's own, but perhaps no shared one.
  std::unique_ptr<Accelerator> several;
  if (a.environment().num_nodes.value > 1) {
    AcceleratorOptions options;
    options.project.save_on_each_node = true;
    several = Another(a, options);
  }
  Accelerator& trainer = several == nullptr ? a : *several;
  torch::nn::Linear net(2, 2);
  muster::FusedAdamW adamw(net->parameters());
  auto [model, optimizer] = trainer.prepare(net, adamw);
  const auto step = [&, &model = model, &optimizer = optimizer] {
    trainer.backward(model(at::ones({1, 2}, at::TensorOptions().device(a.device()))).sum());
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  const absl::Status saved = trainer.save_state(directory);
  TORCH_CHECK(saved.ok(), saved.ToString());
  step();
  const at::Tensor after = net->weight.detach().clone();
  const absl::Status loaded = trainer.load_state(directory);
  TORCH_CHECK(loaded.ok(), loaded.ToString());
  step();
  EXPECT(at::equal(after, net->weight.detach()), "a resumed step gives the same bits");
  RemoveOnAllHosts(a, directory);
  trainer.free_memory();
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
        {"batch samplers of the program's own", CheckBatchSampler},
        {"seeds of shuffled loaders", CheckSeeds},
        {"training equals one process", CheckTraining},
        {"triggers", CheckTrigger},
        {"save and load", CheckCheckpoint},
        {"mistakes are reported", CheckMistakes},
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
