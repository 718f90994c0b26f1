// Random programs under sharding, each compared with the same program on one process that has the
// whole model and all samples. `MUSTER_FUZZ_CASES` and `MUSTER_FUZZ_SEED` select others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"
#include "worker/train/offloaded_state.h"

namespace muster {
namespace {

using Values = std::map<std::string, at::Tensor>;

constexpr int64_t kWords = 7;

int64_t Variable(const char* name, int64_t otherwise) {
  const char* const wanted = std::getenv(name);
  EXPECT_TRUE(wanted == nullptr || absl::SimpleAtoi(wanted, &otherwise)) << wanted;
  return otherwise;
}

struct Block : torch::nn::Module {
  Block(int64_t width, int64_t hidden)
      : in(register_module("in", torch::nn::Linear(width, hidden))),
        out(register_module("out", torch::nn::Linear(hidden, width))),
        scale(register_parameter("scale", at::ones({width}))),
        down(register_module("down", torch::nn::Linear(width, 3))),
        up(register_module("up", torch::nn::Linear(3, width))) {}
  std::vector<at::Tensor> Base() const {
    return {in->weight, in->bias, out->weight, out->bias, scale};
  }
  at::Tensor forward(const at::Tensor& x, bool scaled, bool adapted) {
    at::Tensor y = out(at::tanh(in(x)));
    if (scaled) y = y * scale;
    if (adapted) y = y + up(down(x));
    return y;
  }
  torch::nn::Linear in, out;
  at::Tensor scale;
  torch::nn::Linear down, up;
};

// The path of a forward pass: the same blocks on all ranks.
struct Way {
  int64_t blocks = 0;  // a bit for each
  bool reversed = false;
  int64_t scaled = 0, adapted = 0;
};

struct Shape {
  int64_t width = 5, hidden = 6, blocks = 3;
  bool tied = false, checkpointed = false;
};

struct Net : torch::nn::Module {
  explicit Net(const Shape& shape) : shape(shape) {
    words = register_module("words", torch::nn::Embedding(kWords, shape.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < shape.blocks; ++i) {
      blocks->push_back(std::make_shared<Block>(shape.width, shape.hidden));
    }
    if (shape.tied) {
      register_parameter("head", words->weight);
      head = words->weight;
    } else {
      head = register_parameter("head", at::empty({kWords, shape.width}));
    }
    to(at::kDouble);
    head = named_parameters()["head"];
    const at::NoGradGuard no_grad;
    uint64_t seed = 60;
    for (at::Tensor& parameter : parameters()) {
      const auto fan = static_cast<double>(std::max<int64_t>(parameter.size(-1), 4));
      parameter.copy_(Random(parameter.sizes(), ++seed).div_(std::sqrt(fan)));
    }
  }
  std::shared_ptr<Block> At(size_t i) const { return blocks->ptr<Block>(i); }
  at::Tensor Forward(const at::Tensor& ids, const Way& way) {
    at::Tensor x = words(ids);
    for (int64_t n = 0; n < shape.blocks; ++n) {
      const int64_t i = way.reversed ? shape.blocks - 1 - n : n;
      if ((way.blocks >> i & 1) == 0) continue;
      const auto block = At(static_cast<size_t>(i));
      const bool scaled = (way.scaled >> i & 1) != 0, adapted = (way.adapted >> i & 1) != 0;
      x = x + (shape.checkpointed ? activation_checkpoint(block, x, scaled, adapted)
                                  : block->forward(x, scaled, adapted));
    }
    return at::linear(x, head);
  }
  const Shape shape;
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  at::Tensor head;
};

struct Judge : torch::nn::Module {
  Judge() {
    first = register_module("first", torch::nn::Linear(kWords, 6));
    second = register_module("second", torch::nn::Linear(6, 2));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    uint64_t seed = 90;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(Random(parameter.sizes(), ++seed).div_(2));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

enum class Kind { kAdamW, kAdam, kSgd, kAdagrad, kTorchAdamW, kTorchSgd };

struct Micro {
  std::vector<Way> ways;  // one for each rank
  uint64_t seed = 0;
  bool twice = false;  // two forward passes before one backward pass
  bool unused_forward = false;
  bool evaluates_before_step = false;
};

// An accumulation window, and what follows it.
struct Window {
  std::vector<Micro> micro;
  bool leaves_out[2] = {false, false};  // the step of each optimizer
  bool again = false;                   // a second step on the same gradients
  bool by_program = false;              // steps by the optimizers that the program gave to
                                        // prepare()
  bool in_place = false;                // how gradients are zeroed
  bool zeroes = true;
  double rate = 0;  // 0: unchanged
  bool judged = false, freezes_judge = false;
  int64_t freezes = -1, unfreezes = -1;  // the number of a block
  bool evaluates = false, averages = false, writes = false, saves = false, loads = false;
};

struct Plan {
  int ranks = 2;
  bool shared_memory = false;
  AcceleratorOptions options;
  Shape shape;
  int64_t frozen = 0;            // a bit for the base of each block
  bool frozen_are_held = false;  // by an optimizer
  std::vector<Kind> kinds;
  double decay = 0;
  double clip = 0;
  bool clips_a_part = false;
  bool judge = false;
  bool zeroes_at_head = false;
  std::vector<Window> windows;
  std::string text;
};

class Chooser {
 public:
  explicit Chooser(uint64_t seed) : random_(seed) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool OneIn(int64_t n) { return Below(n) == 0; }

 private:
  std::mt19937_64 random_;
};

Plan MakePlan(uint64_t seed, const std::string& folder) {
  Chooser choose(seed);
  Plan plan;
  constexpr const char* kStrategies[] = {"zero1", "zero2", "zero3", "zero3", "hybrid"};
  const std::string strategy = kStrategies[choose.Below(5)];
  plan.ranks = strategy == "hybrid" ? 4 : static_cast<int>(1 + choose.Below(4));
  plan.shared_memory = choose.OneIn(3);
  AcceleratorOptions& options = plan.options;
  options.sharding = ParseSharding(strategy, 2);
  const bool full = options.sharding->strategy == ShardingStrategy::kFull;
  options.sharding->overlap = choose.OneIn(2);
  const bool in_backward = options.sharding->optimizer_in_backward = choose.OneIn(3);
  if (full && choose.OneIn(3)) options.sharding->reshard_after_forward = false;
  if (full && options.sharding->reshard_after_forward && plan.ranks == 4 && strategy != "hybrid" &&
      choose.OneIn(3)) {
    options.sharding->reshard_group_size = 2;
  }
  if (choose.OneIn(3)) {
    options.sharding->offload_optimizer = Offload::kDisk;
    options.sharding->offload_optimizer_path = folder + "/optimizer";
  }
  if (full && choose.OneIn(3)) {
    options.sharding->offload_parameters = Offload::kDisk;
    options.sharding->offload_parameters_path = folder + "/parameters";
  }
  if (choose.OneIn(4)) options.sharding->min_unit_parameters = 60;
  if (choose.OneIn(5)) options.sharding->ignored_parameters = ".*scale";
  const int micro_steps = static_cast<int>(1 + choose.Below(3));
  options.gradient_accumulation_steps = micro_steps;
  options.accumulation.sync_each_batch = choose.OneIn(3);
  plan.shape.blocks = 2 + choose.Below(4);
  plan.shape.tied = choose.OneIn(2);
  plan.shape.checkpointed = choose.OneIn(2);
  if (plan.shared_memory && choose.OneIn(2)) {
    // Parts that ranks share in memory.
    plan.shape.width = 160;
    plan.shape.hidden = 416;
    plan.shape.blocks = 2;
  } else {
    plan.shape.width = 4 + choose.Below(5);
    plan.shape.hidden = 3 + choose.Below(9);
  }
  if (choose.OneIn(2)) plan.frozen = choose.Below(1 << plan.shape.blocks);
  plan.frozen_are_held = choose.OneIn(2);
  const bool fused =
      in_backward || options.sharding->offload_optimizer == Offload::kDisk || choose.OneIn(2);
  for (int64_t i = 0; i <= choose.Below(2); ++i) {
    plan.kinds.push_back(static_cast<Kind>(choose.Below(fused ? 4 : 6)));
  }
  plan.decay = choose.OneIn(2) ? 0.1 : 0;
  if (!in_backward && choose.OneIn(2)) {
    plan.clip = 0.05;
    plan.clips_a_part = choose.OneIn(3);
    if (choose.OneIn(3)) options.gradient_clipping = 0.07;
  }
  // The rules for names and sizes apply to each model.
  plan.judge = !in_backward && options.sharding->min_unit_parameters == 0 &&
               options.sharding->ignored_parameters.empty() && choose.OneIn(3);
  plan.zeroes_at_head = !in_backward && choose.OneIn(4);
  bool saved = false;
  const int64_t windows = 4 + choose.Below(4);
  const auto some = [&] { return choose.Below(1 << plan.shape.blocks); };
  // Usual choices, so that an order of units recurs.
  const int64_t usual_blocks = (1 << plan.shape.blocks) - 1;
  for (int64_t w = 0; w < windows; ++w) {
    Window& window = plan.windows.emplace_back();
    for (int m = 0; m < micro_steps; ++m) {
      Micro& micro = window.micro.emplace_back();
      micro.seed = 10000 + static_cast<uint64_t>(100 * w + 10 * m);
      Way way = {.blocks = usual_blocks, .scaled = usual_blocks, .adapted = usual_blocks};
      // An optimizer in the backward pass needs the order of the first step.
      if (choose.OneIn(in_backward ? 20 : 4)) way.blocks = some();
      if (!in_backward && choose.OneIn(6)) way.reversed = true;
      if (choose.OneIn(4)) way.adapted = some();
      for (int r = 0; r < plan.ranks; ++r) {
        micro.ways.push_back(way);
        // A rank may leave out a parameter, but not all parameters of a unit.
        const bool apart =
            !in_backward && !plan.judge && options.sharding->min_unit_parameters == 0;
        if (apart && choose.OneIn(4)) micro.ways.back().scaled = some();
      }
      micro.twice = choose.OneIn(5);
      micro.unused_forward = choose.OneIn(8);
      micro.evaluates_before_step = !in_backward && choose.OneIn(6);
    }
    if (!in_backward) {
      window.leaves_out[0] = choose.OneIn(8);
      window.leaves_out[1] = choose.OneIn(5);
      window.again = choose.OneIn(8);
      window.by_program = plan.clip == 0 && !options.gradient_clipping.has_value() &&
                          micro_steps == 1 && choose.OneIn(4);
      window.in_place = choose.OneIn(5);
      window.zeroes = !choose.OneIn(8);
    }
    if (choose.OneIn(5)) window.rate = 0.005 * static_cast<double>(1 + choose.Below(5));
    window.judged = plan.judge && choose.OneIn(2);
    window.freezes_judge = choose.OneIn(2);
    if (choose.OneIn(6)) window.freezes = choose.Below(plan.shape.blocks);
    if (choose.OneIn(6)) window.unfreezes = choose.Below(plan.shape.blocks);
    window.evaluates = choose.OneIn(3);
    window.averages = choose.OneIn(4);
    window.writes = choose.OneIn(6);
    window.loads = saved && choose.OneIn(3);
    window.saves = choose.OneIn(4);
    saved = saved || window.saves;
  }
  // Last, so that plans of earlier versions stay the same.
  if (choose.OneIn(3)) {
    options.sharding->offload_gradients = Offload::kDisk;
    options.sharding->offload_gradients_path = folder + "/gradients";
  }
  plan.text = absl::StrCat(
      "seed ", seed, ": ", strategy, " on ", plan.ranks, ", shared memory ", plan.shared_memory,
      ", overlap ", options.sharding->overlap, ", in backward ", in_backward, ", reshard ",
      options.sharding->reshard_after_forward, " ", options.sharding->reshard_group_size,
      ", states on disk ", options.sharding->offload_optimizer == Offload::kDisk,
      ", parameters on disk ", options.sharding->offload_parameters == Offload::kDisk,
      ", gradients on disk ", options.sharding->offload_gradients == Offload::kDisk,
      ", micro-steps ", micro_steps, " each exchanged ", options.accumulation.sync_each_batch,
      ", width ", plan.shape.width, ", units from ", options.sharding->min_unit_parameters,
      ", ignored ", options.sharding->ignored_parameters, ", blocks ", plan.shape.blocks, ", tied ",
      plan.shape.tied, ", checkpointed ", plan.shape.checkpointed, ", frozen ", plan.frozen,
      " held ", plan.frozen_are_held, ", optimizers ", plan.kinds.size(), " of kind ",
      static_cast<int>(plan.kinds[0]), ", clip ", plan.clip, ", judge ", plan.judge,
      ", zeroes at head ", plan.zeroes_at_head);
  for (size_t w = 0; w < plan.windows.size(); ++w) {
    const Window& window = plan.windows[w];
    absl::StrAppend(&plan.text, "\n", w, ": left out ", window.leaves_out[0], window.leaves_out[1],
                    ", again ", window.again, ", by program ", window.by_program, ", zeroes ",
                    window.zeroes, " in place ", window.in_place, ", rate ", window.rate,
                    ", judged ", window.judged, " frozen ", window.freezes_judge, ", freezes ",
                    window.freezes, ", unfreezes ", window.unfreezes, ", averages ",
                    window.averages, ", writes ", window.writes, ", loads ", window.loads,
                    ", saves ", window.saves, "; micro-steps");
    for (const Micro& micro : window.micro) {
      absl::StrAppend(&plan.text, " [", micro.ways[0].blocks, " reversed ", micro.ways[0].reversed,
                      ", adapted ", micro.ways[0].adapted, ", scaled");
      for (const Way& way : micro.ways) absl::StrAppend(&plan.text, " ", way.scaled);
      absl::StrAppend(&plan.text, ", twice ", micro.twice, ", unused ", micro.unused_forward,
                      ", evaluates ", micro.evaluates_before_step, "]");
    }
  }
  return plan;
}

struct Optimizer {
  std::shared_ptr<void> inner;
  std::function<void()> step_inner;
  AcceleratedOptimizer prepared;
};

template <class T>
Optimizer Prepared(Accelerator& a, std::shared_ptr<T> inner) {
  Optimizer optimizer;
  optimizer.prepared = a.prepare(*inner);
  optimizer.step_inner = [inner] {
    if constexpr (requires { inner->Step(); }) {
      inner->Step();
    } else {
      inner->step();
    }
  };
  optimizer.inner = std::move(inner);
  return optimizer;
}

Optimizer MakeOptimizer(Accelerator& a, Kind kind, const std::vector<at::Tensor>& p, double decay) {
  switch (kind) {
    case Kind::kAdamW:
      return Prepared(a, std::make_shared<FusedAdamW>(
                             p, AdamWOptions{.lr = 0.02, .eps = 1e-2, .weight_decay = decay}));
    case Kind::kAdam:
      return Prepared(a, std::make_shared<FusedAdam>(
                             p, AdamOptions{.lr = 0.02, .eps = 1e-2, .weight_decay = decay}));
    case Kind::kSgd:
      return Prepared(a, std::make_shared<FusedSGD>(
                             p, SGDOptions{.lr = 0.02, .momentum = 0.9, .weight_decay = decay}));
    case Kind::kAdagrad:
      return Prepared(a, std::make_shared<FusedAdagrad>(
                             p, AdagradOptions{.lr = 0.05, .weight_decay = decay, .eps = 1e-2}));
    case Kind::kTorchAdamW:
      return Prepared(a, std::make_shared<torch::optim::AdamW>(
                             p, torch::optim::AdamWOptions(0.02).eps(1e-2).weight_decay(decay)));
    case Kind::kTorchSgd:
      return Prepared(a, std::make_shared<torch::optim::SGD>(
                             p, torch::optim::SGDOptions(0.02).momentum(0.9).weight_decay(decay)));
  }
  return {};
}

at::Tensor Ids(uint64_t seed) {
  return Random({4}, seed).abs().mul(4).to(at::kLong).clamp(0, kWords - 1);
}

void Freeze(const std::vector<at::Tensor>& parameters, bool frozen) {
  for (at::Tensor parameter : parameters) parameter.set_requires_grad(!frozen);
}

// Returns the final values of process 0, and those that it has seen on the way. `all`: on one
// process, for all ranks.
Values Execute(Accelerator& a, const Plan& plan, bool all, const std::string& folder) {
  Values seen;
  const auto net = std::make_shared<Net>(plan.shape);
  std::vector<std::vector<at::Tensor>> lists(plan.kinds.size());
  for (int64_t i = 0; i < plan.shape.blocks; ++i) {
    if ((plan.frozen >> i & 1) != 0) Freeze(net->At(static_cast<size_t>(i))->Base(), true);
  }
  size_t number = 0;
  std::vector<at::Tensor> listed;
  for (const at::Tensor& parameter : net->parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::any_of(listed.begin(), listed.end(), same)) continue;  // tied
    listed.push_back(parameter);
    if (!parameter.requires_grad() && !plan.frozen_are_held) continue;
    lists[number++ / 3 % lists.size()].push_back(parameter);
  }
  auto model = a.prepare(net);
  std::vector<Optimizer> optimizers;
  for (size_t i = 0; i < lists.size(); ++i) {
    optimizers.push_back(MakeOptimizer(a, plan.kinds[i], lists[i], plan.decay));
  }
  const auto judge_net = std::make_shared<Judge>();
  std::optional<decltype(a.prepare(judge_net))> judge;
  std::optional<Optimizer> of_judge;
  if (plan.judge) {
    judge.emplace(a.prepare(judge_net));
    of_judge = MakeOptimizer(a, Kind::kAdamW, judge_net->parameters(), plan.decay);
  }
  Ema ema(a, model, {.decay = 0.7});
  a.register_for_checkpointing(ema);
  const int ranks = all ? plan.ranks : 1;
  const auto mean = [&](const std::function<at::Tensor(int rank)>& of_rank) {
    at::Tensor sum;
    for (int r = 0; r < ranks; ++r) {
      const at::Tensor one = of_rank(all ? r : a.process_index());
      sum = sum.defined() ? sum + one : one;
    }
    return sum / ranks;
  };
  const auto evaluate = [&](const std::string& name) {
    const at::NoGradGuard no_grad;
    const int64_t blocks = (1 << plan.shape.blocks) - 1;
    seen[name] =
        model
            .call(&Net::Forward, Ids(5), Way{.blocks = blocks, .scaled = blocks, .adapted = blocks})
            .clone();
  };
  const auto zero = [&](const Window& window) {
    for (Optimizer& optimizer : optimizers) optimizer.prepared.zero_grad(!window.in_place);
    if (of_judge.has_value()) of_judge->prepared.zero_grad(!window.in_place);
  };
  const std::string dir = folder + (all ? "/whole" : "/parts");
  for (size_t w = 0; w < plan.windows.size(); ++w) {
    const Window& window = plan.windows[w];
    const auto set_frozen = [&](int64_t block, bool frozen) {
      if (block < 0 || (plan.frozen >> block & 1) != 0) return;
      Freeze(net->At(static_cast<size_t>(block))->Base(), frozen);
    };
    set_frozen(window.unfreezes, false);
    set_frozen(window.freezes, true);
    if (window.rate > 0) {
      for (Optimizer& optimizer : optimizers) optimizer.prepared.set_lr(window.rate);
    }
    if (plan.zeroes_at_head && window.zeroes) zero(window);
    for (const Micro& micro : window.micro) {
      auto scope = a.accumulate();
      const auto forward = [&](int rank, uint64_t more) {
        return model.call(&Net::Forward,
                          Ids(micro.seed + 1000 * static_cast<uint64_t>(rank) + more),
                          micro.ways[static_cast<size_t>(rank)]);
      };
      if (micro.unused_forward) mean([&](int rank) { return forward(rank, 7).square().mean(); });
      if (window.judged) {
        a.backward(mean([&](int rank) {
          at::Tensor fake;
          {
            const at::NoGradGuard no_grad;
            fake = forward(rank, 3);
          }
          return (*judge)(fake).square().mean();
        }));
        of_judge->prepared.step();
        if (window.freezes_judge) Freeze(judge_net->parameters(), true);
      }
      a.backward(mean([&](int rank) {
        const at::Tensor out = forward(rank, 0);
        at::Tensor loss = out.square().mean();
        if (window.judged) loss = loss + (*judge)(out).mean().square();
        if (micro.twice) loss = loss + at::tanh(forward(rank, 5)).mean();
        return loss;
      }));
      if (window.judged) Freeze(judge_net->parameters(), false);
      if (micro.evaluates_before_step) evaluate(absl::StrCat("before step ", w, " ", micro.seed));
      if (a.sync_gradients() && plan.clip > 0) {
        a.clip_grad_norm_(plan.clips_a_part ? net->At(0)->parameters() : net->parameters(),
                          plan.clip);
      }
      for (int i = 0; i < (window.again ? 2 : 1); ++i) {
        for (size_t o = 0; o < optimizers.size(); ++o) {
          if (window.leaves_out[o]) continue;
          if (window.by_program) {
            optimizers[o].step_inner();
          } else {
            optimizers[o].prepared.step();
          }
        }
      }
      if (!plan.zeroes_at_head && window.zeroes) zero(window);
    }
    ema.update();
    if (window.evaluates) evaluate(absl::StrCat("after ", w));
    if (window.averages) {
      const auto averaged = ema.apply();
      evaluate(absl::StrCat("average after ", w));
    }
    if (window.writes) {
      a.summon_full_params(model, [&] {
        const at::NoGradGuard no_grad;
        net->At(0)->in->weight.mul_(0.9);
        net->head.add_(0.01);
      });
    }
    if (window.loads) {
      const absl::Status loaded = a.load_state(dir);
      EXPECT_TRUE(loaded.ok()) << loaded;
    }
    if (window.saves) {
      const absl::Status saved = a.save_state(dir);
      EXPECT_TRUE(saved.ok()) << saved;
    }
  }
  evaluate("at the end");
  for (const auto& [name, tensor] : WeightsOf(a, model)) seen["weight " + name] = tensor;
  if (plan.judge) {
    for (const auto& [name, tensor] : WeightsOf(a, *judge)) seen["judge " + name] = tensor;
  }
  return seen;
}

TEST(ShardingRandom, Program_EndsAsOnOneProcess) {
  // Makes several windows of offloaded states.
  OffloadedState::SetDefaultWindowBytes(512);
  const int64_t cases = Variable("MUSTER_FUZZ_CASES", 20);
  const int64_t first = Variable("MUSTER_FUZZ_SEED", 1);
  int64_t refused = 0;
  for (int64_t i = 0; i < cases; ++i) {
    const TestFolder folder;
    const Plan plan = MakePlan(static_cast<uint64_t>(first + i), folder.Path(""));
    SCOPED_TRACE(plan.text);
    Values want, got;
    AcceleratorOptions plain;
    plain.gradient_accumulation_steps = plan.options.gradient_accumulation_steps;
    plain.gradient_clipping = plan.options.gradient_clipping;
    RunAccelerators(
        1, plain, [&](Accelerator& a) { want = Execute(a, plan, /*all=*/true, folder.Path("")); });
    const auto store = c10::make_intrusive<c10d::HashStore>();
    try {
      (plan.shared_memory ? RunShmRanks : RunGlooRanks)(
          plan.ranks,
          [&](Comm& comm) {
            Accelerator a(CoreOn(comm, plan.options, store));
            Values mine = Execute(a, plan, /*all=*/false, folder.Path(""));
            if (a.is_main_process()) got = std::move(mine);
          },
          {});
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      ++refused;
      EXPECT_NE(text.find("after the optimizer had updated it"), std::string::npos) << text;
      continue;
    }
    ASSERT_EQ(got.size(), want.size());
    std::string differ;
    for (const auto& [name, tensor] : want) {
      // The training has diverged.
      if (!tensor.isfinite().all().item<bool>()) continue;
      const double off = (got.at(name) - tensor).abs().max().item<double>();
      if (off <= 1e-9 * (1 + tensor.abs().max().item<double>())) continue;
      absl::StrAppend(&differ, name, " by ", off, "; ");
    }
    EXPECT_EQ(differ, "");
  }
  OffloadedState::SetDefaultWindowBytes(OffloadedState::kWindowBytes);
  EXPECT_LE(refused, 1 + cases / 10);
}

}  // namespace
}  // namespace muster
