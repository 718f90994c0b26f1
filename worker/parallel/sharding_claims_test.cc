// The claims of docs/sharding.md about every strategy, number of ranks and policy: random programs
// train as one process does, runs repeat to the bit, and the bytes on the wire are those of the
// table.
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/comm_thread.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/sharded_model.h"
#include "worker/parallel/test_net.h"
#include "worker/train/optimizer.h"
#include "worker/train/optimizer_handle.h"

namespace muster {
namespace {

using Values = std::map<std::string, at::Tensor>;

// Counts what a rank sends: tensors and, separately, the messages by which ranks meet and agree.
class CountingComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    // In a ring: a reduction of parts, and a gather of them.
    bytes += 2 * tensor.nbytes() * (size() - 1) / size();
    BorrowedComm::AllReduce(tensor, op);
  }
  void AllGatherParts(at::Tensor& flat) override {
    bytes += flat.nbytes() / size() * (size() - 1);
    BorrowedComm::AllGatherParts(flat);
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    bytes += flat.nbytes() / size() * (size() - 1);
    return BorrowedComm::ReduceScatter(flat, op);
  }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    bytes += tensor.nbytes() * (size() - 1);
    return BorrowedComm::AllGather(tensor);
  }
  void Broadcast(at::Tensor& tensor, int root) override {
    bytes += tensor.nbytes();
    BorrowedComm::Broadcast(tensor, root);
  }
  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    for (const at::Tensor& part : parts) bytes += part.nbytes();
    BorrowedComm::Scatter(parts, out, root);
  }
  std::vector<std::string> AllGatherBytes(const std::string& text) override {
    ++messages;
    message_bytes += text.size() * (size() - 1);
    return BorrowedComm::AllGatherBytes(text);
  }
  std::string BroadcastBytes(const std::string& text, int root) override {
    ++messages;
    message_bytes += text.size() * (size() - 1);
    return BorrowedComm::BroadcastBytes(text, root);
  }
  void Reset() { bytes = messages = message_bytes = 0; }

  size_t bytes = 0, messages = 0, message_bytes = 0;
};

// The groups of a model's ranks, for each rank: `world` and, with groups of `group` ranks, those
// that divide one copy and those that hold the same part.
struct Groups {
  std::vector<std::vector<std::unique_ptr<Comm>>> shard, replicas;

  Groups(int ranks, int group) {
    for (int first = 0; first < ranks; first += group) shard.push_back(MakeThreadComms(group));
    for (int i = 0; i < group; ++i) replicas.push_back(MakeThreadComms(ranks / group));
  }
  Comm& ShardOf(int rank, int group) { return *shard[rank / group][rank % group]; }
  Comm& ReplicasOf(int rank, int group) { return *replicas[rank % group][rank / group]; }
};

std::unique_ptr<Comm> InOrder(Comm* comm, const std::shared_ptr<CommThread>& thread) {
  if (comm == nullptr) return nullptr;
  auto borrowed = std::make_unique<BorrowedComm>(*comm);
  if (thread == nullptr) return borrowed;
  return MakeOrderedComm(std::move(borrowed), thread);
}

std::vector<NamedParameter> ParametersOf(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.push_back({item.key(), item.value()});
  }
  return parameters;
}

// A sharded model and its optimizer on one rank. `shard`, `replicas`, `reshard`: null for none.
struct Sharded {
  Sharded(torch::nn::Module& net, const ShardingOptions& options, Comm& all, Comm* part = nullptr,
          Comm* copies = nullptr, Comm* node = nullptr)
      : thread(options.overlap ? std::make_shared<CommThread>() : nullptr),
        world(InOrder(&all, thread)),
        shard(InOrder(part, thread)),
        replicas(InOrder(copies, thread)),
        reshard(InOrder(node, thread)),
        model(*world, shard == nullptr ? *world : *shard, replicas.get(), &net, ParametersOf(net),
              {}, options, true, thread, nullptr, nullptr, reshard.get()),
        sgd(model.shards(), {.lr = 0.1, .momentum = 0.9}) {}

  void Step() {
    model.Expire();
    sgd.Step();
    sgd.ZeroGrad();
  }
  Values Full() {
    Values values;
    for (auto& [name, tensor] : model.FullParameters([](const std::string&) { return true; })) {
      values.emplace(name, tensor);
    }
    return values;
  }

  const std::shared_ptr<CommThread> thread;
  const std::unique_ptr<Comm> world, shard, replicas, reshard;
  ShardedModel model;
  FusedSGD sgd;
};

// Bytes on the wire.

constexpr int kLayers = 6;
constexpr int64_t kWidth = 192;  // parts of a layer for 2, 3 and 4 ranks need no padding
constexpr size_t kLayerBytes = 4 * (kWidth * kWidth + kWidth);
constexpr size_t kModelBytes = kLayers * kLayerBytes;

torch::nn::Sequential Layers(int64_t width = kWidth) {
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(width, width));
  const at::NoGradGuard no_grad;
  uint64_t seed = 3;
  for (at::Tensor& parameter : net->parameters()) {
    parameter.copy_(Randn(parameter.sizes(), ++seed).div_(width));
  }
  return net;
}

struct Traffic {
  size_t shard = 0, replicas = 0, reshard = 0;
  // The totals of all ranks.
  size_t messages = 0, message_bytes = 0;
};

// Measures what each rank sends in a step of `micro_steps` after the first ones, in which ranks
// agree on an order. `evaluations`: forward passes after each micro-step and after the step.
Traffic Measure(int ranks, ShardingOptions options, int micro_steps = 1, bool sync_each = true,
                int evaluations = 0, int64_t width = kWidth) {
  Traffic traffic;
  const int group = options.group_size == 0 ? ranks : static_cast<int>(options.group_size);
  const int node = static_cast<int>(options.reshard_group_size);
  Groups groups(ranks, group), nodes(ranks, node == 0 ? ranks : node);
  RunRanks(ranks, [&](Comm& inner) {
    CountingComm world(inner);
    CountingComm shard(groups.ShardOf(world.rank(), group));
    CountingComm replicas(groups.ReplicasOf(world.rank(), group));
    CountingComm reshard(nodes.ShardOf(world.rank(), node == 0 ? ranks : node));
    torch::nn::Sequential net = Layers(width);
    Sharded trained(*net, options, world, &shard, group == ranks ? nullptr : &replicas,
                    node == 0 ? nullptr : &reshard);
    for (const auto& unit : trained.model.units()) {
      if (width != kWidth) break;
      EXPECT_EQ(static_cast<size_t>(unit->full_bytes()), kLayerBytes) << "without padding";
    }
    const auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      for (int e = 0; e < evaluations; ++e) {
        trained.model.BeginForward(true, /*step_follows=*/false);
        net->forward(Randn({1, width}, 8));
        trained.model.EndForward();
      }
    };
    for (int step = 0; step < 3; ++step) {
      for (CountingComm* each : {&world, &shard, &replicas, &reshard}) each->Reset();
      evaluate();
      for (int m = 0; m < micro_steps; ++m) {
        const bool last = m + 1 == micro_steps;
        trained.model.BeginForward(sync_each || last, last);
        // The first layer passes on a gradient, too.
        const at::Tensor x = Randn({1, width}, 7).requires_grad_();
        const at::Tensor loss = net->forward(x).sum();
        trained.model.EndForward();
        loss.backward();
        if (!last) evaluate();
      }
      trained.Step();
    }
    EXPECT_EQ(world.bytes, 0U);
    if (world.rank() != 0) return;
    traffic = {shard.bytes, replicas.bytes, reshard.bytes};
    for (CountingComm* each : {&world, &shard, &replicas, &reshard}) {
      traffic.messages += each->messages;
      traffic.message_bytes += each->message_bytes;
    }
  });
  return traffic;
}

TEST(ShardingTraffic, EveryStrategyOn2To4Ranks_IsTheTableToTheByte) {
  for (const int ranks : {2, 3, 4}) {
    const auto f = [&](size_t bytes) { return bytes / ranks * (ranks - 1); };
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, overlap " << overlap);
      const auto shard = [&](ShardingStrategy strategy, bool reshard, int micro_steps,
                             bool sync_each, int evaluations = 0) {
        const Traffic traffic = Measure(
            ranks, {.strategy = strategy, .reshard_after_forward = reshard, .overlap = overlap},
            micro_steps, sync_each, evaluations);
        EXPECT_EQ(traffic.replicas + traffic.reshard, 0U);
        return traffic.shard;
      };
      // With k micro-steps, of which each is reduced, or only the last one.
      for (const int k : {1, 3}) {
        for (const ShardingStrategy whole :
             {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients}) {
          // Parameters are gathered once for a step, however often they are used until then.
          for (const int evaluations : {0, 2}) {
            EXPECT_EQ(shard(whole, true, k, false, evaluations), 2 * f(kModelBytes));
            EXPECT_EQ(shard(whole, true, k, true, evaluations), (k + 1) * f(kModelBytes));
          }
        }
        // The backward pass does not gather again the two units that the forward pass has left.
        EXPECT_EQ(shard(ShardingStrategy::kFull, true, k, true),
                  k * (3 * f(kModelBytes) - 2 * f(kLayerBytes)));
      }
      // Freed after the backward pass anyway.
      for (const int k : {1, 3}) {
        EXPECT_EQ(shard(ShardingStrategy::kFull, false, k, true), 2 * k * f(kModelBytes));
      }
    }
  }
}

TEST(ShardingTraffic, HybridAndSmallerGroups_AreTheTableToTheByte) {
  // Two copies, each divided among two ranks: f = 1/2 inside a copy, and an all-reduce of half the
  // model between the two.
  const Traffic hybrid = Measure(4, {.strategy = ShardingStrategy::kFull, .group_size = 2});
  EXPECT_EQ(hybrid.shard, (3 * kModelBytes - 2 * kLayerBytes) / 2);
  EXPECT_EQ(hybrid.replicas, 2 * (kModelBytes / 2) / 2);
  const Traffic gradients = Measure(4, {.strategy = ShardingStrategy::kGradients, .group_size = 2});
  EXPECT_EQ(gradients.shard, 2 * kModelBytes / 2);
  EXPECT_EQ(gradients.replicas, 2 * (kModelBytes / 2) / 2);
  // The gathers of the backward pass are inside pairs.
  const Traffic pairs = Measure(4, {.strategy = ShardingStrategy::kFull, .reshard_group_size = 2});
  EXPECT_EQ(pairs.shard, 2 * kModelBytes / 4 * 3);
  EXPECT_EQ(pairs.reshard, (kModelBytes - 2 * kLayerBytes) / 2);
}

// The messages of ranks beside tensors depend neither on the size of the model nor on whether its
// collectives overlap: only the table's bytes grow.
TEST(ShardingTraffic, MessagesOfAStep_AreFewAndDoNotGrowWithTheModel) {
  for (const int ranks : {2, 3, 4}) {
    for (const ShardingStrategy strategy :
         {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
      for (const bool overlap : {false, true}) {
        for (const int64_t group : {0, 2}) {
          if (group > 0 && ranks != 4) continue;
          SCOPED_TRACE(testing::Message()
                       << ranks << " ranks, strategy " << static_cast<int>(strategy) << ", overlap "
                       << overlap << ", group " << group);
          const ShardingOptions options = {
              .strategy = strategy, .group_size = group, .overlap = overlap};
          const Traffic small = Measure(ranks, options, 1, true, 0, 96);
          const Traffic large = Measure(ranks, options, 1, true, 0, 192);
          EXPECT_GT(large.messages, 0U);
          EXPECT_LE(large.messages, 6U);
          EXPECT_LE(large.message_bytes, 300U * (ranks - 1));
          EXPECT_EQ(small.messages, large.messages);
          EXPECT_EQ(small.message_bytes, large.message_bytes);
        }
      }
    }
  }
}

// Also if an evaluation between the backward pass and the step has gathered the old values, and if
// ranks see different changes in their groups.
TEST(ShardingTraffic, StepAfterAnEvaluation_IsSeenByEveryRank) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    for (const bool in_another_thread : {false, true}) {
      std::vector<double> losses(4);
      Groups groups(4, 2);
      RunRanks(4, [&](Comm& world) {
        torch::nn::Sequential net = Layers();
        // Under kFull the evaluation leaves all units gathered.
        Sharded trained(
            *net, {.strategy = strategy, .group_size = 2, .reshard_after_forward = false}, world,
            &groups.ShardOf(world.rank(), 2), &groups.ReplicasOf(world.rank(), 2));
        const auto forward = [&] {
          trained.model.BeginForward(true);
          const at::Tensor loss = net->forward(Randn({1, kWidth}, 7)).square().mean();
          trained.model.EndForward();
          return loss;
        };
        forward().backward();
        {
          const at::NoGradGuard no_grad;
          forward();
        }
        if (in_another_thread) {
          std::thread([&] { trained.sgd.Step(); }).join();
        } else {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& shard : trained.model.shards()) shard.mul_(0.5);
        }
        // This does not concern other ranks, and must not make ranks disagree.
        if (world.rank() == 0) ForgetCastWeights();
        losses[world.rank()] = forward().item<double>();
        const double again = forward().item<double>();
        EXPECT_EQ(again, losses[world.rank()]);
        // Nothing that was gathered before was used.
        trained.model.Expire();
        EXPECT_EQ(forward().item<double>(), again);
      });
      for (const double loss : losses) EXPECT_EQ(loss, losses[0]);
    }
  }
}

// After an unannounced step, all parameters are gathered again.
TEST(ShardingTraffic, StepsThatNobodyAnnounces_AreSeenByEveryRank) {
  for (const bool unseen : {false, true}) {
    std::vector<size_t> bytes;
    RunRanks(2, [&](Comm& world) {
      CountingComm comm(world);
      torch::nn::Sequential net = Layers();
      Sharded trained(*net, {.strategy = ShardingStrategy::kGradients}, comm);
      if (unseen) trained.model.ExpectUnseenSteps();
      const auto gathered = [&] {
        comm.bytes = 0;
        trained.model.BeginForward(true, /*step_follows=*/false);
        const at::Tensor loss = net->forward(Randn({1, kWidth}, 7)).sum();
        trained.model.EndForward();
        const size_t of_forward = comm.bytes;
        loss.backward();
        return of_forward;
      };
      std::vector<size_t> mine = {gathered(), gathered()};
      trained.sgd.Step();
      mine.push_back(gathered());
      mine.push_back(gathered());
      // By an operator, on one rank: the others have no part of what it changes.
      if (world.rank() == 1) {
        const at::NoGradGuard no_grad;
        trained.model.shards().back().mul_(2);
      }
      mine.push_back(gathered());
      if (world.rank() == 0) bytes = mine;
    });
    const size_t all = kModelBytes / 2;
    EXPECT_EQ(bytes, (std::vector<size_t>{all, unseen ? all : 0, all, unseen ? all : 0, all}));
  }
}

// Another model's optimizer does not invalidate the gathered values, and another optimizer of the
// same memory does.
TEST(ShardingTraffic, StepsOfAnotherModel_GatherNothing) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    SCOPED_TRACE(testing::Message() << "strategy " << static_cast<int>(strategy));
    std::vector<size_t> bytes;
    RunRanks(2, [&](Comm& world) {
      CountingComm comm(world);
      torch::nn::Sequential net = Layers();
      Sharded trained(*net, {.strategy = strategy, .reshard_after_forward = false}, comm);
      const auto step_on = [](std::vector<at::Tensor> weights) {
        for (at::Tensor& weight : weights) {
          weight = weight.variable_data().requires_grad_();
          weight.mutable_grad() = at::ones_like(weight);
        }
        FusedSGD(weights, {.lr = 0.1}).Step();
      };
      const auto gathered = [&](bool train) {
        comm.bytes = 0;
        const at::AutoGradMode mode(train);
        trained.model.BeginForward(true, /*step_follows=*/false);
        const at::Tensor loss = net->forward(Randn({1, kWidth}, 7)).sum();
        trained.model.EndForward();
        const size_t of_forward = comm.bytes;
        if (train) loss.backward();
        return of_forward;
      };
      std::vector<size_t> mine;
      gathered(true);
      // As long as it is unannounced, a step of this model may be that of another one.
      if (strategy != ShardingStrategy::kFull) {
        step_on({at::ones({3})});
        mine.push_back(gathered(true));
      }
      trained.Step();
      gathered(false);
      step_on({at::ones({3})});
      mine.push_back(gathered(false));
      if (strategy != ShardingStrategy::kFull) gathered(true);
      step_on(world.rank() == 1 ? trained.model.shards() : std::vector{at::ones({3})});
      mine.push_back(gathered(false));
      if (world.rank() == 0) bytes = mine;
    });
    const size_t all = kModelBytes / 2;
    EXPECT_EQ(bytes, strategy == ShardingStrategy::kFull ? (std::vector<size_t>{0, all})
                                                         : (std::vector<size_t>{0, 0, all}));
  }
}

TEST(ShardingTraffic, HalfTheBytesInBfloat16) {
  ShardingOptions options = {.strategy = ShardingStrategy::kGradients};
  options.reduce_dtype = at::kBFloat16;
  EXPECT_EQ(Measure(2, options).shard, kModelBytes / 2 + kModelBytes / 4);
}

// Random programs.

// With a weight of its own, or another module's.
struct AffineImpl : torch::nn::Module {
  explicit AffineImpl(int64_t width, const at::Tensor& tied = {}) {
    weight = register_parameter("weight", tied.defined() ? tied : at::empty({width, width}));
    bias = register_parameter("bias", at::empty({width}));
  }
  at::Tensor Apply(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Affine);

struct BranchImpl : torch::nn::Module {
  BranchImpl(int64_t width, int experts, bool norm, bool tied) {
    if (norm) {
      norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    }
    inner_ = register_module("inner", torch::nn::Linear(width, width + 3));
    outer_ = register_module("outer", torch::nn::Linear(width + 3, width));
    experts_ = register_module("experts", torch::nn::ModuleList());
    at::Tensor weight;
    for (int i = 0; i < experts; ++i) {
      const Affine expert(width, weight);
      if (tied) weight = expert->weight;
      experts_->push_back(expert);
    }
  }
  // Uses the experts for which `used` has a bit.
  at::Tensor Apply(at::Tensor x, unsigned used) {
    const at::ScalarType type = x.scalar_type();
    x = x.to(inner_->weight.scalar_type());
    at::Tensor y = norm_.is_empty() ? x : norm_(x);
    y = outer_(at::tanh(inner_(y)));
    for (size_t i = 0; i < experts_->size(); ++i) {
      if ((used >> i & 1) != 0) y = y + 0.1 * experts_[i]->as<AffineImpl>()->Apply(x);
    }
    return (x + y).to(type);
  }
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear inner_{nullptr}, outer_{nullptr};
  torch::nn::ModuleList experts_{nullptr};
};
TORCH_MODULE(Branch);

constexpr int64_t kSide = 6;
constexpr int kSamples = 24;  // in a step, on all ranks

// All random choices of a program, from one seed.
struct Program {
  explicit Program(uint32_t number) : seed(number), draw(number) {
    ranks = Pick({1, 2, 3, 4});
    strategy = Pick({ShardingStrategy::kOptimizer, ShardingStrategy::kGradients,
                     ShardingStrategy::kFull, ShardingStrategy::kFull});
    options.strategy = strategy;
    options.overlap = Pick({false, false, true});
    options.reshard_after_forward = Pick({true, true, false});
    if (ranks == 4) options.group_size = Pick({0, 2});
    blocks = Pick({1, 2, 4});
    experts = Pick({0, 2, 3});
    norm = Pick({false, true});
    tied = Pick({0, 0, 1, 2});
    doubles = Pick({-1, -1, 0, 1});
    frozen = Pick({-1, -1, 0, 2, 5});
    micro_steps = Pick({1, 1, 2});
    sync_each = Pick({false, true});
    DrawPolicy();
  }

  template <class T>
  T Pick(std::initializer_list<T> of) {
    return of.begin()[draw() % of.size()];
  }

  void DrawPolicy() {
    switch (draw() % 7) {
      case 0:
        options.unit_types = {"Branch"};
        break;
      case 1:
        options.unit_types = {"Branch", "Linear", "Affine"};  // nested
        break;
      case 2:
        options.unit_names = {"blocks.0", "blocks.0.inner", "head"};
        break;
      case 3:
        options.min_unit_parameters = Pick({20, 45, 100});
        break;
      case 4:
        options.no_split = {Pick({"Branch", "blocks.0", "blocks", "head"})};
        break;
      case 5:
        options.unit_names = {"words"};
        break;
      default:
        break;
    }
    options.ignored_parameters = Pick({"", "", ".*bias", "blocks\\.0\\..*weight", "head.*", ".*"});
    options.ignored_modules = Pick({"", "", "blocks\\.0\\.outer", "words|head"});
  }

  std::string Text() const {
    std::string text = c10::str(
        "program ", seed, ": ", ranks, " ranks, strategy ", static_cast<int>(strategy),
        ", groups of ", options.group_size, ", overlap ", options.overlap, ", reshard ",
        options.reshard_after_forward, ", ", blocks, " blocks of ", experts, " experts, tied ",
        tied, ", doubles ", doubles, ", frozen ", frozen, ", micro-steps ", micro_steps, " each ",
        sync_each, ", ignored '", options.ignored_parameters, "' '", options.ignored_modules,
        "', at least ", options.min_unit_parameters, ", no_split");
    for (const std::string& name : options.no_split) text += " " + name;
    text += ", units";
    for (const auto* const list : {&options.unit_types, &options.unit_names}) {
      for (const std::string& name : *list) text += " " + name;
    }
    return text;
  }

  const uint32_t seed;
  std::mt19937 draw;
  ShardingOptions options;
  ShardingStrategy strategy;
  int ranks, blocks, experts, tied, doubles, frozen, micro_steps;
  bool norm, sync_each;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Program& program) : program_(program) {
    using Options = torch::nn::LinearOptions;
    words = register_module("words", torch::nn::Linear(Options(kSide, kSide).bias(false)));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < program.blocks; ++i) {
      Branch branch(kSide, program.experts, program.norm, program.tied == 2);
      if (i == program.doubles) branch->to(at::kDouble);
      blocks->push_back(branch);
    }
    head = register_module("head", Affine(kSide, program.tied == 1 ? words->weight : at::Tensor()));
    unused = register_module("unused", torch::nn::Linear(2, 2));
    const at::NoGradGuard no_grad;
    uint64_t seed = program.seed;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(Randn(parameter.sizes(), ++seed).div_(4));
    }
    if (program.frozen >= 0) {
      parameters()[static_cast<size_t>(program.frozen) % parameters().size()].requires_grad_(false);
    }
  }
  // The same submodules on every rank, depending on the step.
  at::Tensor Loss(const at::Tensor& x, int step) {
    at::Tensor y = words(x.to(words->weight.scalar_type()));
    std::mt19937 draw(program_.seed * 131 + static_cast<uint32_t>(step));
    for (const auto& block : *blocks) {
      const auto used = static_cast<unsigned>(draw());
      if (program_.blocks > 2 && used % 5 == 0) continue;  // not used in this step
      y = block->as<BranchImpl>()->Apply(y, used >> 8);
    }
    return head->Apply(y).square().mean();
  }

  const Program& program_;
  torch::nn::Linear words{nullptr}, unused{nullptr};
  Affine head{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Net);

constexpr int kSteps = 5;

at::Tensor Inputs(const Program& program, int step) {
  return Randn({kSamples, kSide}, program.seed * 1000 + static_cast<uint64_t>(step));
}

Values ValuesOf(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    values.emplace(item.key(), item.value().detach().clone());
  }
  return values;
}

Values OneProcess(const Program& program) {
  Net net(program);
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : net->parameters()) {
    bool known = false;
    for (const at::Tensor& other : parameters) known = known || other.is_same(parameter);
    if (!known) parameters.push_back(parameter);
  }
  FusedSGD sgd(parameters, {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < kSteps; ++step) {
    net->Loss(Inputs(program, step), step).backward();
    sgd.Step();
    sgd.ZeroGrad();
  }
  return ValuesOf(*net);
}

Values Train(const Program& program, const ShardingOptions& options) {
  Values result;
  const int group = options.group_size == 0 ? program.ranks : static_cast<int>(options.group_size);
  Groups groups(program.ranks, group);
  RunRanks(program.ranks, [&](Comm& world) {
    const bool hybrid = group < program.ranks;
    Net net(program);
    Sharded trained(*net, options, world, &groups.ShardOf(world.rank(), group),
                    hybrid ? &groups.ReplicasOf(world.rank(), group) : nullptr);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor mine = Inputs(program, step).chunk(world.size())[world.rank()];
      const std::vector<at::Tensor> parts = mine.chunk(program.micro_steps);
      for (int m = 0; m < program.micro_steps; ++m) {
        const bool last = m + 1 == program.micro_steps;
        trained.model.BeginForward(program.sync_each || last, last);
        const at::Tensor loss = net->Loss(parts[m], step);
        trained.model.EndForward();
        loss.div(program.micro_steps).backward();
      }
      trained.Step();
    }
    Values values = trained.Full();
    if (world.rank() == 0) result = std::move(values);
  });
  return result;
}

TEST(ShardingPrograms, RandomOnes_TrainAsOneProcess) {
  constexpr uint32_t kPrograms = 48;
  int refused = 0;
  for (uint32_t seed = 0; seed < kPrograms; ++seed) {
    Program program(seed);
    SCOPED_TRACE(program.Text());
    const Values want = OneProcess(program), start = ValuesOf(*Net(program));
    Values got;
    try {
      got = Train(program, program.options);
    } catch (const c10::Error& error) {
      // Policies that are drawn independently may exclude each other.
      const std::string text = error.what_without_backtrace();
      EXPECT_TRUE(text.find("options.sharding.") != std::string::npos) << text;
      ++refused;
      continue;
    }
    double off = 0, moved = 0;
    for (const auto& [name, tensor] : got) {
      off += (tensor - want.at(name)).to(at::kDouble).square().sum().item<double>();
      moved += (want.at(name) - start.at(name)).to(at::kDouble).square().sum().item<double>();
    }
    EXPECT_LE(std::sqrt(off / moved), 1e-6);
  }
  EXPECT_LT(refused, static_cast<int>(kPrograms) / 4);
}

// Parameters in bfloat16: the strategies differ only in where things are.
TEST(ShardingPrograms, RandomOnesInBfloat16_AreTheSameUnderEveryStrategy) {
  int compared = 0;
  for (uint32_t seed = 1000; seed < 1012; ++seed) {
    Program program(seed);
    program.doubles = -1;
    ShardingOptions options = program.options;
    options.parameter_dtype = at::kBFloat16;
    options.ignored_modules = options.ignored_parameters = "";
    SCOPED_TRACE(program.Text());
    std::vector<Values> runs;
    try {
      for (const ShardingStrategy strategy :
           {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
        options.strategy = strategy;
        runs.push_back(Train(program, options));
      }
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_TRUE(text.find("options.sharding.") != std::string::npos) << text;
      continue;
    }
    ++compared;
    for (const auto& [name, tensor] : runs[0]) {
      EXPECT_TRUE(at::equal(tensor, runs[1].at(name))) << name;
      EXPECT_TRUE(at::equal(tensor, runs[2].at(name))) << name;
    }
  }
  EXPECT_GE(compared, 6);
}

// Repeated runs.

TEST(ShardingRuns, EveryStrategyOn1To4Ranks_AreEqualToTheBit) {
  for (const auto& run_ranks : {RunGlooRanks, RunShmRanks}) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const ShardingStrategy strategy :
           {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
        SCOPED_TRACE(testing::Message()
                     << ranks << " ranks, strategy " << static_cast<int>(strategy));
        std::vector<Values> runs;
        for (int run = 0; run < 2; ++run) {
          run_ranks(ranks,
                    [&](Comm& comm) {
                      torch::nn::Sequential net = Layers();
                      // Two runs with different orders of events.
                      Sharded trained(*net, {.strategy = strategy, .overlap = run == 1}, comm);
                      for (int step = 0; step < 4; ++step) {
                        trained.model.BeginForward(true);
                        const at::Tensor x =
                            Randn({2, kWidth}, static_cast<uint64_t>(10 * step + comm.rank()));
                        const at::Tensor loss = at::tanh(net->forward(x)).square().mean();
                        trained.model.EndForward();
                        loss.backward();
                        trained.Step();
                      }
                      Values values = trained.Full();
                      if (comm.rank() == 0) runs.push_back(std::move(values));
                    },
                    {});
        }
        for (const auto& [name, tensor] : runs[0]) {
          EXPECT_TRUE(at::equal(tensor, runs[1].at(name))) << name;
        }
      }
    }
  }
}

TEST(ShardingRuns, Hybrid_AreEqualToTheBit) {
  Program program(7);
  program.ranks = 4;
  ShardingOptions options = {.strategy = ShardingStrategy::kFull, .group_size = 2};
  const Values first = Train(program, options), second = Train(program, options);
  for (const auto& [name, tensor] : first) {
    EXPECT_TRUE(at::equal(tensor, second.at(name))) << name;
  }
}

}  // namespace
}  // namespace muster
