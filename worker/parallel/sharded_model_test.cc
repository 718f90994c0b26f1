#include "worker/parallel/sharded_model.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/record_function.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/checked_comm.h"
#include "worker/collective/comm_thread.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/memory_parts.h"
#include "worker/parallel/test_net.h"
#include "worker/parallel/test_passes.h"
#include "worker/train/clip.h"
#include "worker/train/optimizer.h"
#include "worker/train/optimizer_handle.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr int kBlocks = 4;
constexpr int kSamples = 12;  // in a step of all ranks
constexpr int64_t kWidth = 10;
// Large enough that ranks share their parts, if they can.
constexpr int64_t kWide = 520;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    inner = register_module("inner", torch::nn::Linear(kWidth, 17));
    outer = register_module("outer", torch::nn::Linear(17, kWidth));
  }
  // Not called forward(), and in no container.
  at::Tensor Apply(const at::Tensor& x) { return x + outer(at::tanh(inner(norm(x)))); }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};
TORCH_MODULE(Block);

// Maps words to words, with one weight for both ends.
struct Net : torch::nn::Module {
  explicit Net(uint64_t seed = 3) {
    words = register_module("words", torch::nn::Embedding(11, kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    extra = register_module("extra", torch::nn::Linear(kWidth, 2));
    at::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters())
      parameter.copy_(Randn(parameter.sizes(), ++seed).div_(4));
  }
  at::Tensor Forward(const at::Tensor& ids, bool use_extra = false) {
    at::Tensor x = words(ids);
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->Apply(x);
    if (use_extra) return extra(x);
    return at::linear(x, words->weight);
  }
  at::Tensor Loss(const at::Tensor& ids) {
    return at::cross_entropy_loss(Forward(ids), (ids + 1).remainder(11));
  }

  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear extra{nullptr};
};

at::Tensor Ids(int step) {
  return at::randint(11, {kSamples},
                     at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step + 100)),
                     at::kLong);
}
at::Tensor IdsOf(int step, const Comm& comm) { return Ids(step).chunk(comm.size())[comm.rank()]; }

std::vector<NamedParameter> ParametersOf(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters())
    parameters.push_back({item.key(), item.value()});
  return parameters;
}

using Values = std::map<std::string, at::Tensor>;

Values ValuesOf(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters())
    values.emplace(item.key(), item.value().detach().clone());
  return values;
}

// Returns the result of one process, with all samples in one batch.
Values OneProcess(int steps) {
  Net net;
  FusedSGD sgd(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < steps; ++step) {
    net.Loss(Ids(step)).backward();
    sgd.Step();
    sgd.ZeroGrad();
  }
  return ValuesOf(net);
}

// ‖a - b‖ / ‖b - start‖ over all parameters.
double Distance(const Values& a, const Values& b, const Values& start) {
  double off = 0, moved = 0;
  for (const auto& [name, tensor] : b) {
    off += (a.at(name) - tensor).to(at::kDouble).square().sum().item<double>();
    moved += (tensor - start.at(name)).to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(off / moved);
}

// Returns `comm`, in order with `thread` if there is one.
std::unique_ptr<Comm> InOrder(Comm* comm, const std::shared_ptr<CommThread>& thread) {
  if (comm == nullptr) return nullptr;
  auto borrowed = std::make_unique<BorrowedComm>(*comm);
  if (thread == nullptr) return borrowed;
  return MakeOrderedComm(std::move(borrowed), thread);
}

void StepOn(ShardedModel& model, FusedSGD& sgd) {
  model.Expire();
  sgd.Step();
  sgd.ZeroGrad();
}

Values FullOf(ShardedModel& model) {
  Values values;
  for (auto& [name, tensor] : model.FullParameters([](const std::string&) { return true; }))
    values.emplace(name, tensor);
  return values;
}

// A model on one rank, with its optimizer.
struct Trained {
  Trained(Comm& all, const ShardingOptions& options, Comm* part = nullptr, Comm* copies = nullptr,
          std::unique_ptr<PartStore> store = nullptr, Comm* node = nullptr,
          std::unique_ptr<PartStore> gradients = nullptr)
      : thread(options.overlap ? std::make_shared<CommThread>() : nullptr),
        world(InOrder(&all, thread)),
        shard(InOrder(part, thread)),
        replicas(InOrder(copies, thread)),
        reshard(InOrder(node, thread)),
        model(*world, shard == nullptr ? *world : *shard, replicas.get(), &net, ParametersOf(net),
              {}, options, true, thread, nullptr, std::move(store), reshard.get(),
              std::move(gradients)),
        sgd(model.shards(), {.lr = 0.1, .momentum = 0.9}) {}

  at::Tensor Forward(const at::Tensor& ids, bool communicate = true) {
    model.BeginForward(communicate);
    const at::Tensor loss = net.Loss(ids);
    model.EndForward();
    return loss;
  }
  void Step() { StepOn(model, sgd); }
  void Load(const Values& values) {
    std::map<std::string, at::Tensor> parts;
    for (const auto& [name, value] : values) parts[name] = model.PartOf(name, value);
    model.LoadParts(parts);
    sgd.ZeroGrad();
  }
  Values Full() { return FullOf(model); }

  Net net;
  const std::shared_ptr<CommThread> thread;
  const std::unique_ptr<Comm> world, shard, replicas, reshard;
  ShardedModel model;
  FusedSGD sgd;
};

const ShardingStrategy kStrategies[] = {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients,
                                        ShardingStrategy::kFull};

void ExpectEqual(const Values& a, const Values& b) {
  for (const auto& [name, tensor] : a) EXPECT_TRUE(at::equal(tensor, b.at(name))) << name;
}

// Returns the result of 50 steps on rank 0; those of all ranks are close to that of one process.
using Runner = void (*)(int, const std::function<void(Comm&)>&);
Values FiftySteps(Runner run, int ranks, const ShardingOptions& options,
                  const std::function<std::pair<Comm*, Comm*>(int rank)>& groups = nullptr) {
  static const Values& want = *new Values(OneProcess(50));
  static const Values& start = *new Values(ValuesOf(Net()));
  Values first;
  run(ranks, [&](Comm& comm) {
    const auto [part, copies] = groups == nullptr ? std::pair<Comm*, Comm*>() : groups(comm.rank());
    Trained trained(comm, options, part, copies);
    for (int step = 0; step < 50; ++step) {
      trained.Forward(IdsOf(step, comm)).backward();
      trained.Step();
    }
    Values values = trained.Full();
    EXPECT_LE(Distance(values, want, start), 1e-6) << "rank " << comm.rank();
    if (comm.rank() == 0) first = std::move(values);
  });
  return first;
}

TEST(ShardedModel, EveryStrategyAndNumberOfRanks_EqualsOneProcess_RunsAreEqualToTheBit) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const ShardingStrategy strategy : kStrategies) {
      for (const bool reshard : {true, false}) {
        if (!reshard && strategy != ShardingStrategy::kFull) continue;
        SCOPED_TRACE(testing::Message() << ranks << " ranks, strategy "
                                        << static_cast<int>(strategy) << ", reshard " << reshard);
        std::vector<Values> runs;
        for (const bool overlap : {true, true, false}) {
          runs.push_back(FiftySteps(
              RunRanks, ranks,
              {.strategy = strategy, .reshard_after_forward = reshard, .overlap = overlap}));
        }
        ExpectEqual(runs[0], runs[1]);
        ExpectEqual(runs[0], runs[2]);
      }
    }
  }
}

// In groups of one, which is data parallelism; of all ranks, which is not hybrid; and of two.
TEST(ShardedModel, HybridOfEveryNumberOfRanks_EqualsOneProcess_RunsAreEqualToTheBit) {
  for (const auto& [ranks, group, strategy] :
       {std::tuple{2, 1, ShardingStrategy::kFull}, std::tuple{2, 2, ShardingStrategy::kFull},
        std::tuple{3, 3, ShardingStrategy::kFull}, std::tuple{4, 2, ShardingStrategy::kFull},
        std::tuple{4, 2, ShardingStrategy::kGradients}}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks in groups of " << group << ", strategy "
                                    << static_cast<int>(strategy));
    const auto run = [ranks = ranks, group = group, strategy = strategy] {
      std::vector<std::vector<std::unique_ptr<Comm>>> parts, copies;
      for (int i = 0; i < ranks / group; ++i) parts.push_back(MakeThreadComms(group));
      for (int i = 0; i < group; ++i) copies.push_back(MakeThreadComms(ranks / group));
      return FiftySteps(RunRanks, ranks, {.strategy = strategy, .group_size = group},
                        [&](int rank) {
                          return std::pair<Comm*, Comm*>(parts[rank / group][rank % group].get(),
                                                         copies[rank % group][rank / group].get());
                        });
    };
    ExpectEqual(run(), run());
  }
}

TEST(ShardedModel, OverGlooAndSharedMemory_TwoRunsAreEqualToTheBit) {
  const Runner gloo = [](int n, const std::function<void(Comm&)>& fn) { RunGlooRanks(n, fn); };
  const Runner shm = [](int n, const std::function<void(Comm&)>& fn) { RunShmRanks(n, fn); };
  for (const auto& [run, ranks] :
       {std::pair{gloo, 2}, std::pair{gloo, 3}, std::pair{shm, 3}, std::pair{shm, 4}}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks over " << (run == shm ? "shm" : "Gloo"));
    ExpectEqual(FiftySteps(run, ranks, {.strategy = ShardingStrategy::kFull}),
                FiftySteps(run, ranks, {.strategy = ShardingStrategy::kFull}));
  }
}

TEST(ShardedModel, OverTwoHosts_EqualsOneProcess_RunsAreEqualToTheBit) {
  const Values start = ValuesOf(Net());
  // Two hosts with two ranks; one rank on each; unequal hosts whose ranks are not consecutive.
  for (const std::string hosts : {"aabb", "ab", "aba"}) {
    for (const ShardingStrategy strategy : kStrategies) {
      // Long only once, for the most exchanges, because ranks on one machine wait for each other.
      const int steps = hosts == "aabb" && strategy == ShardingStrategy::kFull ? 50 : 8;
      const Values want = OneProcess(steps);
      std::vector<Values> runs;
      for (const bool overlap : {true, false}) {
        RunHostRanks(hosts, [&](Comm& comm) {
          Trained trained(comm, {.strategy = strategy, .overlap = overlap});
          for (int step = 0; step < steps; ++step) {
            trained.Forward(IdsOf(step, comm)).backward();
            trained.Step();
          }
          Values values = trained.Full();
          EXPECT_LE(Distance(values, want, start), 1e-6)
              << hosts << ", strategy " << static_cast<int>(strategy);
          if (comm.rank() == 0) runs.push_back(std::move(values));
        });
      }
      ExpectEqual(runs.front(), runs.back());
    }
  }
}

// Shards inside a host, through shared memory; replicas between hosts, one rank on each.
TEST(ShardedModel, HybridOverTwoHosts_EqualsOneProcess) {
  const Values want = OneProcess(50);
  const Values start = ValuesOf(Net());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  RunRanks(4, [&](Comm& thread) {
    const int rank = thread.rank();
    const int host = rank / 2, place = rank % 2;
    const auto world = MakeHostComm(store, "world", rank, 4, "aabb");
    const auto shard =
        MakeHostComm(store, c10::str("shard_", host), place, 2, std::string(2, "ab"[host]));
    const auto replicas = MakeHostComm(store, c10::str("replicas_", place), host, 2, "ab");
    Trained trained(*world, {.strategy = ShardingStrategy::kFull, .group_size = 2}, shard.get(),
                    replicas.get());
    for (int step = 0; step < 50; ++step) {
      trained.Forward(IdsOf(step, *world)).backward();
      trained.Step();
    }
    EXPECT_LE(Distance(trained.Full(), want, start), 1e-6);
    // No rank leaves while others still need it.
    world->Barrier();
  });
}

TEST(ShardedModel, PartsInAStore_EqualThoseInMemory) {
  for (const int ranks : {1, 2, 3}) {
    for (const bool overlap : {true, false}) {
      RunRanks(ranks, [&](Comm& comm) {
        const ShardingOptions options = {.strategy = ShardingStrategy::kFull, .overlap = overlap};
        Trained in_memory(comm, options);
        Trained in_store(comm, options, nullptr, nullptr, std::make_unique<MemoryParts>());
        for (int step = 0; step < 4; ++step) {
          in_memory.Forward(IdsOf(step, comm)).backward();
          in_memory.Step();
          const at::Tensor loss = in_store.Forward(IdsOf(step, comm));
          for (const auto& unit : in_store.model.units()) EXPECT_FALSE(unit->part_is_present());
          loss.backward();
          in_store.Step();
          in_store.model.MarkChanged(in_store.model.shards());
        }
        ExpectEqual(in_store.Full(), in_memory.Full());
        int present = 0;
        for (const auto& unit : in_store.model.units()) present += unit->part_is_present() ? 1 : 0;
        EXPECT_LE(present, 2) << "assembling them takes one after the other";
      });
    }
  }
}

int GradientsPresent(const ShardedModel& model) {
  int present = 0;
  for (const auto& unit : model.units()) present += unit->gradients_are_present() ? 1 : 0;
  return present;
}

void ExpectEqualGradients(const ShardedModel& a, const ShardedModel& b) {
  for (size_t i = 0; i < a.shards().size(); ++i) {
    const at::Tensor &mine = a.shards()[i].grad(), &other = b.shards()[i].grad();
    ASSERT_EQ(mine.defined(), other.defined()) << i;
    EXPECT_TRUE(!mine.defined() || at::equal(mine, other)) << i;
  }
}

// Gradients in a store with the parameters, or only gradients.
struct StoredKind {
  ShardingStrategy strategy;
  bool parameters;
};
const StoredKind kStoredKinds[] = {{ShardingStrategy::kFull, true},
                                   {ShardingStrategy::kFull, false},
                                   {ShardingStrategy::kGradients, false},
                                   {ShardingStrategy::kOptimizer, false}};

// Returns a model whose gradients are in `store`.
std::unique_ptr<Trained> InStore(Comm& comm, const StoredKind& kind, ShardingOptions options = {},
                                 std::unique_ptr<PartStore> store = nullptr) {
  options.strategy = kind.strategy;
  if (store == nullptr) store = std::make_unique<MemoryParts>();
  if (kind.parameters) {
    return std::make_unique<Trained>(comm, options, nullptr, nullptr, std::move(store));
  }
  return std::make_unique<Trained>(comm, options, nullptr, nullptr, nullptr, nullptr,
                                   std::move(store));
}

// All micro-steps reduce, so that gradients in the store are added to; both ways to zero.
void CheckGradientsInAStore(int ranks, const StoredKind& kind) {
  for (const GradZeroing how : {GradZeroing::kSetToNone, GradZeroing::kInPlace}) {
    for (const bool overlap : {true, false}) {
      // Gradients alone take the same path.
      if (!kind.parameters && overlap != (how == GradZeroing::kInPlace)) continue;
      RunRanks(ranks, [&](Comm& comm) {
        Trained in_memory(comm, {.strategy = kind.strategy, .overlap = overlap});
        const auto stored = InStore(comm, kind, {.overlap = overlap});
        Trained& in_store = *stored;
        for (int step = 0; step < 4; ++step) {
          for (Trained* trained : {&in_memory, &in_store}) {
            for (int micro = 0; micro < 2; ++micro) {
              trained->Forward(IdsOf(2 * step + micro, comm)).backward();
            }
          }
          EXPECT_LE(GradientsPresent(in_store.model), 2);
          ExpectEqualGradients(in_store.model, in_memory.model);
          EXPECT_LE(GradientsPresent(in_store.model), 2);
          for (Trained* trained : {&in_memory, &in_store}) {
            const at::Tensor norm = ClipGradNorm(trained->model.shards(), 0.1);
            EXPECT_LE(GradientsPresent(in_store.model), 2);
            trained->model.Expire();
            trained->sgd.Step();
            EXPECT_LE(GradientsPresent(in_store.model), 2);
            trained->sgd.ZeroGrad(how);
            trained->model.MarkChanged(trained->model.shards());
          }
          EXPECT_LE(GradientsPresent(in_store.model), 2);
        }
        EXPECT_EQ(GradientsPresent(in_memory.model), 0);
        ExpectEqual(in_store.Full(), in_memory.Full());
      });
    }
  }
}

TEST(ShardedModel, GradientsInAStore_EqualThoseInMemory_TwoUnitsAreThere) {
  for (const int ranks : {1, 2, 3}) {
    for (const StoredKind& kind : kStoredKinds) {
      SCOPED_TRACE(testing::Message() << "strategy " << static_cast<int>(kind.strategy)
                                      << ", with the parameters " << kind.parameters);
      CheckGradientsInAStore(ranks, kind);
    }
  }
}

void CheckGradientsThatAProgramKeeps(const StoredKind& kind) {
  RunRanks(2, [&](Comm& comm) {
    Trained in_memory(comm, {.strategy = kind.strategy});
    const auto stored = InStore(comm, kind);
    Trained& in_store = *stored;
    std::vector<at::Tensor> kept, want;
    for (int step = 0; step < 4; ++step) {
      for (Trained* trained : {&in_memory, &in_store}) {
        trained->Forward(IdsOf(step, comm)).backward();
        for (const at::Tensor& shard : trained->model.shards()) {
          if (step > 1 || !shard.grad().defined()) continue;
          if (trained == &in_store) {
            kept.push_back(shard.grad());
          } else {
            want.push_back(shard.grad().clone());
          }
        }
      }
      ExpectEqualGradients(in_store.model, in_memory.model);
      in_memory.Step();
      in_store.Step();
    }
    ASSERT_EQ(kept.size(), want.size());
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], want[i])) << i;
    // Once these tensors are gone, gradients are in the store again.
    kept.clear();
    in_store.Forward(IdsOf(4, comm)).backward();
    EXPECT_EQ(GradientsPresent(in_store.model), 2);
    in_memory.Forward(IdsOf(4, comm)).backward();
    ExpectEqualGradients(in_store.model, in_memory.model);
    in_memory.Step();
    in_store.Step();
    ExpectEqual(in_store.Full(), in_memory.Full());
  });
}

TEST(ShardedModel, GradientsInAStore_ThatAProgramKeeps_StayWhatTheyWere) {
  for (const StoredKind& kind : kStoredKinds) CheckGradientsThatAProgramKeeps(kind);
}

// For example by two optimizers that have parameters of one unit each.
void CheckGradientsOfWhichSomeAreZeroed(const StoredKind& kind) {
  RunRanks(2, [&](Comm& comm) {
    Trained in_memory(comm, {.strategy = kind.strategy});
    const auto stored = InStore(comm, kind);
    Trained& in_store = *stored;
    for (int step = 0; step < 4; ++step) {
      for (Trained* trained : {&in_memory, &in_store}) {
        trained->Forward(IdsOf(step, comm)).backward();
        trained->model.Expire();
        trained->sgd.Step();
        for (size_t i = 0; i < trained->model.shards().size(); ++i) {
          if (i % 3 != 0) trained->model.shards()[i].mutable_grad().reset();
        }
        trained->model.MarkChanged(trained->model.shards());
      }
      ExpectEqualGradients(in_store.model, in_memory.model);
    }
    ExpectEqual(in_store.Full(), in_memory.Full());
  });
}

TEST(ShardedModel, GradientsInAStore_SomeZeroed_EqualThoseInMemory) {
  for (const StoredKind& kind : kStoredKinds) CheckGradientsOfWhichSomeAreZeroed(kind);
}

void CheckGradientsInAStoreThatIsFull(const StoredKind& kind) {
  RunRanks(1, [&](Comm& comm) {
    Trained in_memory(comm, {.strategy = kind.strategy});
    auto store = std::make_unique<MemoryParts>();
    MemoryParts& parts = *store;
    const auto stored = InStore(comm, kind, {}, std::move(store));
    Trained& trained = *stored;
    at::Tensor loss = trained.Forward(IdsOf(0, comm));
    parts.full = true;
    EXPECT_THAT(ErrorOf([&] { loss.backward(); }),
                AllOf(HasSubstr("the disk is full"), HasSubstr("while writing the gradients of")));
    parts.full = false;
    trained.sgd.ZeroGrad();
    for (at::Tensor& parameter : trained.net.parameters()) parameter.mutable_grad().reset();
    for (Trained* again : {&in_memory, &trained}) {
      again->Forward(IdsOf(0, comm)).backward();
      again->Step();
    }
    ExpectEqual(trained.Full(), in_memory.Full());
  });
}

TEST(ShardedModel, GradientsInAStoreThatIsFull_ThrowNamingTheUnit) {
  for (const StoredKind& kind : kStoredKinds) CheckGradientsInAStoreThatIsFull(kind);
}

// At another place than the parameters.
TEST(ShardedModel, GradientsInAStoreOfTheirOwn_EqualThoseInMemory) {
  RunRanks(2, [](Comm& comm) {
    const ShardingOptions options = {.strategy = ShardingStrategy::kFull};
    Trained in_memory(comm, options);
    auto gradients = std::make_unique<MemoryParts>();
    MemoryParts& parts = *gradients;
    Trained in_stores(comm, options, nullptr, nullptr, std::make_unique<MemoryParts>(), nullptr,
                      std::move(gradients));
    for (int step = 0; step < 3; ++step) {
      for (Trained* trained : {&in_memory, &in_stores}) {
        trained->Forward(IdsOf(step, comm)).backward();
        trained->Step();
        trained->model.MarkChanged(trained->model.shards());
      }
    }
    ExpectEqual(in_stores.Full(), in_memory.Full());
    // Parts of parameters do not go to this store.
    parts.full = true;
    in_stores.model.LoadParameters(in_memory.Full());
    ExpectEqual(in_stores.Full(), in_memory.Full());
  });
}

// Although groups of the optimizer have parameters of all units.
TEST(ShardedModel, GradientsInAStore_AreReadOnceByAStepOfOffloadedStates) {
  class CountedParts : public MemoryParts {
   public:
    void Read(uint64_t place, void* to, uint64_t bytes) override {
      ++reads;
      MemoryParts::Read(place, to, bytes);
    }
    size_t reads = 0;
  };
  RunRanks(2, [](Comm& comm) {
    Net net;
    auto store = std::make_unique<CountedParts>();
    CountedParts& parts = *store;
    ShardedModel model(comm, comm, nullptr, &net, ParametersOf(net), {},
                       {.strategy = ShardingStrategy::kGradients}, true, nullptr, nullptr, nullptr,
                       nullptr, std::move(store));
    std::vector<ParamGroup<SGDOptions>> groups(2);
    for (size_t i = 0; i < model.shards().size(); ++i) {
      groups[i % 2].params.push_back(model.shards()[i]);
      groups[i % 2].options = {.lr = 0.1, .momentum = 0.9};
    }
    FusedSGD sgd(groups);
    sgd.OffloadByMemory();
    sgd.OffloadState(nullptr);
    for (int step = 0; step < 3; ++step) {
      model.BeginForward(true);
      const at::Tensor loss = net.Loss(IdsOf(step, comm));
      model.EndForward();
      loss.backward();
      parts.reads = 0;
      StepOn(model, sgd);
      EXPECT_GT(parts.reads, 0u);
      EXPECT_LE(parts.reads, model.units().size());
    }
  });
}

TEST(ShardedModel, StoreWithoutRoomForGradients_IsFoundOnEveryRank) {
  RunRanks(2, [](Comm& comm) {
    Net net;
    uint64_t bytes = 0;
    for (const at::Tensor& parameter : net.parameters()) bytes += parameter.nbytes();
    // Enough for the parameters.
    auto store = std::make_unique<MemoryParts>(comm.rank() == 0 ? bytes * 3 / 4 : 1 << 30);
    EXPECT_THAT(ErrorOf([&] {
                  Trained trained(comm, {.strategy = ShardingStrategy::kFull}, nullptr, nullptr,
                                  std::move(store));
                }),
                HasSubstr("the disk has no room"));
  });
}

TEST(ShardedModel, StoreThatOneRankCannotTake_IsFoundOnEveryRankAndChangesNothing) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    auto store = std::make_unique<MemoryParts>();
    store->taken = comm.rank() == 1;
    Net net;
    const Values before = ValuesOf(net);
    errors[comm.rank()] = ErrorOf([&] {
      ShardedModel model(comm, comm, nullptr, &net, ParametersOf(net), {},
                         {.strategy = ShardingStrategy::kFull}, true, nullptr, nullptr,
                         std::move(store));
    });
    ExpectEqual(ValuesOf(net), before);
  });
  EXPECT_THAT(errors, Each(HasSubstr("the disk is taken")));
}

TEST(ShardedModel, StoreOnOneRankAlone_IsNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    errors[comm.rank()] = ErrorOf([&] {
      Trained trained(comm, {.strategy = ShardingStrategy::kFull}, nullptr, nullptr,
                      comm.rank() == 0 ? std::make_unique<MemoryParts>() : nullptr);
    });
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("shard the model differently"),
                                 HasSubstr("the parts of its parameters elsewhere"),
                                 HasSubstr("the parts of its parameters on their device"))));
}

TEST(ShardedModel, StoreOfGradientsOnOneRankAlone_IsNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    errors[comm.rank()] = ErrorOf([&] {
      Trained trained(comm, {.strategy = ShardingStrategy::kGradients}, nullptr, nullptr, nullptr,
                      nullptr, comm.rank() == 0 ? std::make_unique<MemoryParts>() : nullptr);
    });
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("shard the model differently"),
                                 HasSubstr("the parts of its gradients elsewhere"))));
}

TEST(ShardedModel, PartsInAStore_AreWrittenBySummonAndLoad) {
  RunRanks(2, [](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull}, nullptr, nullptr,
                    std::make_unique<MemoryParts>());
    Values loaded = trained.Full();
    for (auto& [name, tensor] : loaded) tensor.mul_(2);
    trained.model.LoadParameters(loaded);
    ExpectEqual(trained.Full(), loaded);
    trained.model.Summon([&] {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : trained.net.parameters()) parameter.add_(1);
    });
    for (auto& [name, tensor] : loaded) tensor.add_(1);
    ExpectEqual(trained.Full(), loaded);
    std::map<std::string, at::Tensor> parts;
    for (const auto& [name, tensor] : loaded) parts[name] = trained.model.PartOf(name, tensor * 3);
    trained.model.LoadParts(parts);
    for (auto& [name, tensor] : loaded) tensor.mul_(3);
    ExpectEqual(trained.Full(), loaded);
    // By a caller that copies all of them in its own way.
    for (auto& [name, part] : parts) part.mul_(2);
    size_t copied = 0;
    trained.model.LoadParts(parts, [&](const auto& copies) {
      copied += copies.size();
      for (const auto& [to, from] : copies) at::Tensor(to).copy_(from);
    });
    EXPECT_EQ(copied, parts.size());
    for (auto& [name, tensor] : loaded) tensor.mul_(2);
    ExpectEqual(trained.Full(), loaded);
  });
}

TEST(ShardedModel, PartsInAStore_AreWrittenThroughPointersInASummon) {
  RunRanks(2, [](Comm& comm) {
    for (const bool low : {false, true}) {
      ShardingOptions options = {.strategy = ShardingStrategy::kFull};
      if (low) options.parameter_dtype = at::kBFloat16;
      Trained trained(comm, options, nullptr, nullptr, std::make_unique<MemoryParts>());
      Values wanted = trained.Full();
      for (auto& [name, tensor] : wanted) tensor.view({-1})[0] = 0.5;
      trained.model.Summon([&] {
        for (const at::Tensor& parameter : trained.net.parameters()) {
          if (low) {
            *parameter.data_ptr<c10::BFloat16>() = 0.5;
          } else {
            *parameter.data_ptr<float>() = 0.5;
          }
        }
      });
      ExpectEqual(trained.Full(), wanted);
    }
  });
}

TEST(ShardedModel, StoreThatFails_ThrowsNamingTheUse) {
  RunRanks(1, [](Comm& comm) {
    auto store = std::make_unique<MemoryParts>();
    MemoryParts& parts = *store;
    Trained trained(comm, {.strategy = ShardingStrategy::kFull}, nullptr, nullptr,
                    std::move(store));
    parts.broken = true;
    EXPECT_THAT(ErrorOf([&] { trained.Forward(IdsOf(0, comm)); }), HasSubstr("the disk is broken"));
    parts.broken = false;
    trained.Forward(IdsOf(0, comm)).backward();
    trained.Step();
  });
}

TEST(ShardedModel, IgnoredModules_AreWholeAndEqualOneProcess) {
  const Values want = OneProcess(5);
  const Values start = ValuesOf(Net());
  for (const int ranks : {1, 3}) {
    for (const ShardingStrategy strategy : kStrategies) {
      for (const bool overlap : {true, false}) {
        RunRanks(ranks, [&](Comm& comm) {
          Trained trained(
              comm,
              {.strategy = strategy, .overlap = overlap, .ignored_modules = "words|blocks\\.[12]"});
          for (const auto& [name, tensor] : want) {
            const bool ignored = name.find("extra") == std::string::npos &&
                                 name.find("blocks.0") == std::string::npos &&
                                 name.find("blocks.3") == std::string::npos;
            if (ignored) {
              EXPECT_EQ(trained.model.PartSize(name), tensor.numel()) << name;
            }
          }
          for (int step = 0; step < 5; ++step) {
            trained.Forward(IdsOf(step, comm)).backward();
            trained.Step();
          }
          EXPECT_LE(Distance(trained.Full(), want, start), 1e-6)
              << ranks << " ranks, strategy " << static_cast<int>(strategy);
          // As in data parallelism they can be read at any time.
          EXPECT_TRUE(at::equal(trained.net.words->weight, trained.Full().at("words.weight")));
          int whole = 0;
          for (const at::Tensor& shard : trained.model.shards()) {
            whole += trained.model.IsWhole(shard) ? 1 : 0;
          }
          EXPECT_EQ(whole, 1 + 2 * 6);
        });
      }
    }
  }
}

TEST(ShardedModel, IgnoredParameters_AreWholeAndEqualOneProcess) {
  const Values want = OneProcess(5);
  const Values start = ValuesOf(Net());
  for (const int ranks : {1, 3}) {
    for (const ShardingStrategy strategy : kStrategies) {
      for (const char* pattern : {".*norm\\..*|.*bias", ".*"}) {
        RunRanks(ranks, [&](Comm& comm) {
          Trained trained(comm, {.strategy = strategy, .ignored_parameters = pattern});
          const bool all = std::string(pattern) == ".*";
          for (const at::Tensor& shard : trained.model.shards()) {
            const std::string& name = *trained.model.NameOf(shard);
            const bool whole = all || name.find("norm") != std::string::npos ||
                               name.find("bias") != std::string::npos;
            EXPECT_EQ(trained.model.IsWhole(shard), whole) << name;
            if (whole) {
              EXPECT_EQ(shard.numel(), want.at(name).numel()) << name;
            }
          }
          for (int step = 0; step < 5; ++step) {
            const std::vector<at::Tensor> halves = IdsOf(step, comm).chunk(2);
            trained.Forward(halves[0], /*communicate=*/false).div(2).backward();
            trained.Forward(halves[1]).div(2).backward();
            trained.Step();
          }
          EXPECT_LE(Distance(trained.Full(), want, start), 1e-6)
              << ranks << " ranks, strategy " << static_cast<int>(strategy) << " " << pattern;
        });
      }
    }
  }
}

// Plans with equally many parameters, of which the first ones are the same.
TEST(ShardedModel, RanksThatIgnoreOtherParameters_AreNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    ShardingOptions options{.strategy = ShardingStrategy::kFull};
    options.ignored_parameters = comm.rank() == 0 ? "blocks\\.0\\.(norm\\.bias|outer\\.bias)"
                                                  : "blocks\\.0\\.(norm\\.bias|inner\\.weight)";
    errors[comm.rank()] = ErrorOf([&] { Trained trained(comm, options); });
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("shard the model differently"),
                                 HasSubstr("unit 'blocks.0' of 4 parameters"))));
}

TEST(ShardedModel, IgnoredModulesThatAreNone_AreRefused) {
  RunRanks(1, [](Comm& comm) {
    EXPECT_THAT(ErrorOf([&] {
                  Trained(comm,
                          {.strategy = ShardingStrategy::kFull, .ignored_modules = "blocks.9"});
                }),
                AllOf(HasSubstr("no module's name is 'blocks.9'"), HasSubstr("blocks.3.outer")));
    EXPECT_THAT(ErrorOf([&] {
                  Trained(comm,
                          {.strategy = ShardingStrategy::kFull, .ignored_modules = "blocks.("});
                }),
                HasSubstr("is no regular expression"));
  });
}

// Four ranks in groups of two: two copies of the model.
void RunHybrid(const std::function<void(Comm& world, Comm& shard, Comm& replicas)>& body) {
  std::vector<std::unique_ptr<Comm>> shard[2] = {MakeThreadComms(2), MakeThreadComms(2)};
  std::vector<std::unique_ptr<Comm>> replicas[2] = {MakeThreadComms(2), MakeThreadComms(2)};
  RunRanks(4, [&](Comm& world) {
    const int r = world.rank();
    body(world, *shard[r / 2][r % 2], *replicas[r % 2][r / 2]);
  });
}

TEST(ShardedModel, HybridWithIgnoredModules_EqualsOneProcess) {
  const Values want = OneProcess(50);
  const Values start = ValuesOf(Net());
  RunHybrid([&](Comm& world, Comm& shard, Comm& replicas) {
    Trained trained(world,
                    {.strategy = ShardingStrategy::kFull,
                     .group_size = 2,
                     .ignored_modules = "words|blocks\\.2"},
                    &shard, &replicas);
    for (int step = 0; step < 50; ++step) {
      trained.Forward(IdsOf(step, world)).backward();
      trained.Step();
    }
    EXPECT_LE(Distance(trained.Full(), want, start), 1e-6);
  });
}

// One of the ranks that share a parameter waits for the other, where both would wait for all.
TEST(ShardedModel, Hybrid_ChangeOnOneRankOnlyAfterAForwardPass_IsAnErrorOfThoseThatShare) {
  std::vector<std::string> errors(4);
  RunHybrid([&](Comm& world, Comm& shard, Comm& replicas) {
    Trained trained(world, {.strategy = ShardingStrategy::kGradients, .group_size = 2}, &shard,
                    &replicas);
    trained.Forward(IdsOf(0, world)).backward();
    trained.Step();
    const at::Tensor loss = trained.Forward(IdsOf(1, world));
    if (world.rank() > 1) return;
    if (world.rank() == 0) trained.model.Expire();
    errors[world.rank()] = ErrorOf([&] {
      if (world.rank() == 0) trained.Forward(IdsOf(1, world));
      loss.backward();
    });
  });
  EXPECT_THAT(errors[0], HasSubstr("ReduceScatter"));
  EXPECT_THAT(errors[1], HasSubstr("ReduceScatter"));
}

// Four ranks in pairs, which keep the parameters from the forward pass to the backward pass.
TEST(ShardedModel, ReshardedInSmallerGroups_EqualsOneProcess) {
  const Values want = OneProcess(8);
  const Values start = ValuesOf(Net());
  for (const bool overlap : {false, true}) {
    std::vector<std::unique_ptr<Comm>> pairs[2] = {MakeThreadComms(2), MakeThreadComms(2)};
    RunRanks(4, [&](Comm& world) {
      Trained trained(
          world, {.strategy = ShardingStrategy::kFull, .reshard_group_size = 2, .overlap = overlap},
          nullptr, nullptr, nullptr, pairs[world.rank() / 2][world.rank() % 2].get());
      const auto kept = [&] {
        int64_t bytes = 0;
        for (const auto& unit : trained.model.units()) bytes += unit->kept_bytes();
        return bytes;
      };
      for (int step = 0; step < 8; ++step) {
        const at::Tensor loss = trained.Forward(IdsOf(step, world));
        int64_t freed = 0;
        for (const auto& unit : trained.model.units()) {
          if (!unit->present()) freed += unit->full_bytes();
        }
        EXPECT_GT(freed, 0);
        EXPECT_GE(kept(), freed / 2) << "half of each is here";
        loss.backward();
        EXPECT_EQ(kept(), 0);
        trained.Step();
        const at::NoGradGuard no_grad;
        trained.Forward(IdsOf(step, world));
        EXPECT_EQ(kept(), 0) << "no backward pass follows";
      }
      EXPECT_LE(Distance(trained.Full(), want, start), 1e-6);
    });
  }
}

TEST(ShardedModel, MicroStepsWithoutCommunication_AreReducedAsTheirSum) {
  const Values want = OneProcess(6);
  const Values start = ValuesOf(Net());
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(2, [&](Comm& comm) {
      Trained trained(comm, {.strategy = strategy});
      for (int step = 0; step < 6; ++step) {
        const std::vector<at::Tensor> halves = IdsOf(step, comm).chunk(2);
        trained.Forward(halves[0], /*communicate=*/false).div(2).backward();
        EXPECT_THAT(trained.model.UnexchangedGradients(), Each(testing::Not(HasSubstr("extra"))));
        EXPECT_FALSE(trained.model.UnexchangedGradients().empty());
        trained.Forward(halves[1]).div(2).backward();
        EXPECT_THAT(trained.model.UnexchangedGradients(), IsEmpty());
        trained.Step();
      }
      EXPECT_LE(Distance(trained.Full(), want, start), 1e-6);
    });
  }
}

// A gradient that was zeroed in the middle of a window is none at its end.
TEST(ShardedModel, ParameterWhoseOnlyGradientWasZeroedBeforeTheReduction_HasNone) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(2, [&](Comm& comm) {
      Trained trained(comm, {.strategy = strategy});
      trained.model.BeginForward(/*communicate=*/false);
      const at::Tensor out = trained.net.Forward(IdsOf(0, comm), /*use_extra=*/true);
      trained.model.EndForward();
      out.sum().backward();
      trained.sgd.ZeroGrad();
      trained.model.ForgetPending(trained.model.shards());
      trained.Forward(IdsOf(1, comm)).backward();
      for (const at::Tensor& shard : trained.model.shards()) {
        const bool extra = trained.model.NameOf(shard)->rfind("extra", 0) == 0;
        EXPECT_EQ(shard.grad().defined(), !extra && shard.numel() > 0);
      }
    });
  }
}

TEST(ShardedModel, TwoForwardsBeforeOneBackward_AddUp) {
  const Values want = OneProcess(3);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    for (int step = 0; step < 3; ++step) {
      const std::vector<at::Tensor> halves = IdsOf(step, comm).chunk(2);
      const at::Tensor first = trained.Forward(halves[0]), second = trained.Forward(halves[1]);
      (first + second).div(2).backward();
      trained.Step();
    }
    EXPECT_LE(Distance(trained.Full(), want, ValuesOf(Net())), 1e-6);
  });
}

TEST(ShardedModel, UnusedParameter_HasNoGradientAndItsValuesStay) {
  RunRanks(2, [](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    trained.Forward(IdsOf(0, comm)).backward();
    for (const at::Tensor& shard : trained.model.shards()) {
      const bool extra = trained.model.NameOf(shard)->rfind("extra", 0) == 0;
      EXPECT_EQ(shard.grad().defined(), !extra && shard.numel() > 0);
    }
  });
}

// Its backward pass returns no gradient for the weight, as for an expert without tokens.
struct NoGradient : torch::autograd::Function<NoGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                            const at::Tensor&) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    return {grads[0], at::Tensor()};
  }
};

TEST(ShardedModel, ParameterWhoseFunctionReturnsNoGradient_HasNone) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(2, [&](Comm& comm) {
      Trained trained(comm, {.strategy = strategy});
      for (const bool communicate : {false, true}) {
        trained.model.BeginForward(communicate);
        const at::Tensor out =
            NoGradient::apply(trained.net.Forward(IdsOf(0, comm)), trained.net.extra->weight);
        trained.model.EndForward();
        out.sum().backward();
      }
      for (const at::Tensor& shard : trained.model.shards()) {
        const bool extra = trained.model.NameOf(shard)->rfind("extra", 0) == 0;
        EXPECT_EQ(shard.grad().defined(), !extra && shard.numel() > 0);
      }
    });
  }
}

TEST(ShardedModel, ParameterUsedOnOneRankOnly_IsReduced) {
  RunRanks(2, [](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kGradients});
    for (int step = 0; step < 2; ++step) {
      trained.model.BeginForward(true);
      const at::Tensor out = trained.net.Forward(IdsOf(0, comm), /*use_extra=*/comm.rank() == 1);
      trained.model.EndForward();
      out.sum().backward();
      for (const at::Tensor& shard : trained.model.shards()) {
        if (*trained.model.NameOf(shard) == "extra.bias" && shard.numel() > 0) {
          EXPECT_TRUE(
              at::equal(shard.grad(), at::full_like(shard, kSamples / 2 / 2.0 * (step + 1))));
        }
      }
    }
  });
}

// Counts the bytes that a rank sends.
class CountingComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  void AllGatherParts(at::Tensor& flat) override {
    ++gathers;
    bytes += flat.nbytes() / size() * (size() - 1);
    BorrowedComm::AllGatherParts(flat);
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    ++reduces;
    bytes += flat.nbytes() / size() * (size() - 1);
    return BorrowedComm::ReduceScatter(flat, op);
  }
  int gathers = 0, reduces = 0;
  size_t bytes = 0;
};

TEST(ShardedModel, BytesOnTheWire_AreThoseOfTheFormula) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const bool overlap : {true, false})
      RunRanks(2, [&](Comm& comm) {
        CountingComm counting(comm);
        Trained trained(counting, {.strategy = strategy, .overlap = overlap});
        // In the first backward pass the ranks agree on an order.
        for (int step = 0; step < 3; ++step) {
          counting.bytes = 0;
          counting.gathers = counting.reduces = 0;
          trained.Forward(IdsOf(step, comm)).backward();
          trained.Step();
        }
        size_t model = 0, rest = 0;  // N e f, with padding
        for (const auto& unit : trained.model.units()) {
          (unit->name() == "(rest)" ? rest : model) += unit->full_bytes() / 2;
        }
        EXPECT_EQ(counting.reduces, kBlocks + 1);
        if (strategy == ShardingStrategy::kFull) {
          // Forward: the ends of the model need (rest) twice. Backward: the last block is still
          // present.
          EXPECT_EQ(counting.gathers, kBlocks + 2 + kBlocks - 1);
          EXPECT_EQ(counting.bytes, 3 * model - model / kBlocks + 3 * rest);
        } else {
          EXPECT_EQ(counting.gathers, kBlocks + 1);
          EXPECT_EQ(counting.bytes, 2 * (model + rest));
        }
      });
  }
}

TEST(ShardedModel, ParametersInBfloat16_HalveTheGathersAndKeepTheBitsOfTheShards) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(2, [&](Comm& comm) {
      CountingComm counting(comm);
      Trained trained(
          counting,
          {.strategy = strategy, .parameter_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16});
      const Values start = ValuesOf(Net());
      counting.bytes = 0;
      trained.Forward(IdsOf(0, comm));
      size_t model = 0;
      for (const auto& unit : trained.model.units()) {
        if (unit->name() != "(rest)") model += unit->full_bytes() / 2;
      }
      EXPECT_EQ(trained.net.extra->weight.scalar_type(), at::kBFloat16);
      EXPECT_GE(counting.bytes, model);
      EXPECT_LT(counting.bytes, 2 * model);
      for (const at::Tensor& shard : trained.model.shards()) {
        EXPECT_EQ(shard.scalar_type(), at::kFloat);
      }
      // Reading and writing some parameters leaves the others unchanged, to the bit.
      trained.model.Expire();
      trained.model.Summon([&] {
        at::NoGradGuard no_grad;
        trained.net.extra->bias.fill_(0.5);
      });
      const Values full = trained.Full();
      EXPECT_TRUE(at::equal(full.at("words.weight"), start.at("words.weight")));
      EXPECT_TRUE(at::equal(full.at("extra.bias"), at::full({2}, 0.5)));
      // It learns as in fp32.
      double first = 0, last = 0;
      for (int step = 0; step < 30; ++step) {
        const at::Tensor loss = trained.Forward(IdsOf(step % 2, comm));
        (step == 0 ? first : last) = loss.item<double>();
        loss.backward();
        trained.Step();
      }
      EXPECT_LT(last, 0.7 * first);
    });
  }
}

// Counts operators of this thread: on a GPU each is at least one kernel.
class OperatorWatch {
 public:
  OperatorWatch() {
    counts.clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) {
          std::string name = function.name();
          if (name == "aten::zero_" && function.inputs()[0].toTensor().numel() == 0) {
            name = "zero_ of nothing";
          }
          ++counts[name];
          return std::unique_ptr<at::ObserverContext>();
        })
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorWatch() { at::removeCallback(handle_); }
  static thread_local std::map<std::string, int> counts;

 private:
  at::CallbackHandle handle_;
};
thread_local std::map<std::string, int> OperatorWatch::counts;

TEST(ShardedModel, GradientsOfAUnit_AreTakenByOneOperator) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const int ranks : {1, 2}) {
      RunRanks(ranks, [&](Comm& comm) {
        Trained trained(comm, {.strategy = strategy});
        const at::Tensor loss = trained.Forward(IdsOf(0, comm));
        const OperatorWatch watch;
        loss.backward();
        EXPECT_EQ(OperatorWatch::counts["aten::_foreach_copy_"], kBlocks + 1);
        EXPECT_EQ(OperatorWatch::counts["zero_ of nothing"], 0);
        // A single rank has the sum already.
        if (ranks == 1) {
          EXPECT_EQ(OperatorWatch::counts["aten::mul_"], 0);
        }
      });
    }
  }
}

TEST(ShardedModel, Full_HoldsTwoUnitsAtATimeAndNoneBetweenSteps) {
  RunRanks(2, [](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    const auto gathered = [&] {
      int count = 0;
      for (const auto& unit : trained.model.units()) count += unit->gathered() ? 1 : 0;
      return count;
    };
    EXPECT_EQ(gathered(), 0);
    const at::Tensor loss = trained.Forward(IdsOf(0, comm));
    EXPECT_EQ(gathered(), 2);
    loss.backward();
    EXPECT_EQ(gathered(), 0);
  });
}

TEST(ShardedModel, UseOutsideOfForward_ThrowsAndNamesTheUnit) {
  RunRanks(2, [](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    EXPECT_THAT(ErrorOf([&] { trained.net.words->weight.sum(); }),
                AllOf(HasSubstr("'(rest)'"), HasSubstr("outside of the model's forward")));
    at::NoGradGuard no_grad;
    EXPECT_THAT(ErrorOf([&] { trained.net.extra->bias.zero_(); }),
                AllOf(HasSubstr("aten::zero_"), HasSubstr("summon_full_params")));
  });
}

TEST(ShardedModel, Summon_ReadsAndWrites) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(3, [&](Comm& comm) {
      Trained trained(comm, {.strategy = strategy});
      const Values start = ValuesOf(Net());
      at::NoGradGuard no_grad;
      trained.model.Summon([&] {
        EXPECT_TRUE(at::equal(trained.net.words->weight, start.at("words.weight")));
        trained.net.words->weight.mul_(2);
      });
      EXPECT_TRUE(at::equal(trained.Full().at("words.weight"), start.at("words.weight") * 2));
      EXPECT_TRUE(at::equal(trained.Full().at("extra.bias"), start.at("extra.bias")));
    });
  }
}

TEST(ShardedModel, StateOfOneWorldSize_LoadsIntoAnother) {
  Values saved, momentum;
  RunRanks(3, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    for (int step = 0; step < 4; ++step) {
      trained.Forward(IdsOf(step, comm)).backward();
      trained.Step();
    }
    const Values full = trained.Full();
    trained.sgd.set_parameter_names([&] {
      std::vector<std::string> names;
      for (const at::Tensor& shard : trained.model.shards())
        names.push_back(*trained.model.NameOf(shard));
      return names;
    }());
    const OptimizerState state = trained.sgd.SaveState();
    const Values buffers = trained.model.Assemble(
        [&](const std::string& name) {
          const auto it = state.tensors.find(name + ".momentum_buffer");
          return it == state.tensors.end() ? at::Tensor() : it->second;
        },
        [&](const std::string&) { return comm.rank() == 0; });
    if (comm.rank() == 0) {
      saved = full;
      momentum = buffers;
    } else {
      EXPECT_THAT(buffers, IsEmpty());
    }
  });
  EXPECT_THAT(momentum, SizeIs(saved.size() - 2)) << "extra was never used";
  const Values want = OneProcess(8);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kGradients});
    trained.model.LoadParameters(saved);
    OptimizerState state = trained.sgd.SaveState();
    const auto names = [&] {
      std::vector<std::string> all;
      for (const at::Tensor& shard : trained.model.shards())
        all.push_back(*trained.model.NameOf(shard));
      return all;
    }();
    trained.sgd.set_parameter_names(names);
    for (const auto& [name, full] : momentum) {
      const at::Tensor part = trained.model.PartOf(name, full);
      if (part.numel() > 0) state.tensors[name + ".momentum_buffer"] = part;
    }
    trained.sgd.LoadState(state);
    for (int step = 4; step < 8; ++step) {
      trained.Forward(IdsOf(step, comm)).backward();
      trained.Step();
    }
    EXPECT_LE(Distance(trained.Full(), want, ValuesOf(Net())), 1e-6);
  });
}

// Returns what each of two ranks throws in its first three micro-steps. `windows`: the lengths of
// their accumulation windows; each micro-step reduces, or only the last one of a window.
std::vector<std::string> ErrorsOfWindows(const std::vector<int>& windows, ShardingStrategy strategy,
                                         bool sync_each) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = strategy});
    errors[comm.rank()] = ErrorOf([&] {
      for (int i = 1; i <= 3; ++i) {
        const bool last = i % windows[comm.rank()] == 0;
        trained.model.BeginForward(sync_each || last, last);
        const at::Tensor loss = trained.net.Loss(IdsOf(i, comm));
        trained.model.EndForward();
        loss.backward();
        if (last) trained.Step();
      }
    });
  });
  return errors;
}

TEST(ShardedModel, AccumulationWindowsThatDiffer_AreNamedOnEveryRank) {
  for (const ShardingStrategy strategy : kStrategies) {
    SCOPED_TRACE(static_cast<int>(strategy));
    EXPECT_THAT(ErrorsOfWindows({1, 2}, strategy, true),
                Each(AllOf(HasSubstr("disagree on a backward pass"),
                           HasSubstr("on rank 0 it reduces gradients for an optimizer's step, on "
                                     "rank 1 it reduces gradients within an accumulation window"),
                           HasSubstr("gradient_accumulation_steps"))));
    // The same on every rank.
    EXPECT_THAT(ErrorsOfWindows({2, 2}, strategy, true), Each("no error"));
    EXPECT_THAT(ErrorsOfWindows({2, 2}, strategy, false), Each("no error"));
  }
  EXPECT_THAT(ErrorsOfWindows({1, 2}, ShardingStrategy::kFull, false),
              Each(AllOf(HasSubstr("disagree on a backward pass"),
                         HasSubstr("on rank 0 it reduces gradients for an optimizer's step, on "
                                   "rank 1 it only adds gradients up"))));
}

TEST(ShardedModel, NextBackwardPassThatReducesOnOneRankOnly_IsNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    const at::Tensor loss = trained.Forward(IdsOf(0, comm), /*communicate=*/false);
    if (comm.rank() == 1) trained.model.Communicate();
    errors[comm.rank()] = ErrorOf([&] { loss.backward(); });
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("on rank 0 it only adds gradients up"),
                                 HasSubstr("on rank 1 it reduces gradients"))));
}

TEST(ShardedModel, StepOnOneRankOnly_IsNamedOnEveryRank) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const bool within_a_window : {false, true}) {
      for (const bool read : {false, true}) {
        std::vector<std::string> errors(2);
        RunRanks(2, [&](Comm& comm) {
          Trained trained(comm, {.strategy = strategy});
          trained.model.BeginForward(true, /*step_follows=*/!within_a_window);
          const at::Tensor loss = trained.net.Loss(IdsOf(0, comm));
          trained.model.EndForward();
          loss.backward();
          if (comm.rank() == 1) trained.Step();
          errors[comm.rank()] = ErrorOf([&] {
            if (read) return trained.model.Summon([] {});
            trained.Forward(IdsOf(1, comm));
          });
          // A program that continues does so on all ranks alike, with one model.
          EXPECT_NE(ErrorOf([&] { trained.Forward(IdsOf(1, comm)); }), "no error");
          trained.Load(ValuesOf(Net()));
          trained.Forward(IdsOf(1, comm)).backward();
          trained.Step();
          trained.Forward(IdsOf(2, comm));
        });
        EXPECT_THAT(errors, Each(HasSubstr("rank 0 0 times, rank 1 1 times")))
            << static_cast<int>(strategy) << within_a_window << read;
      }
    }
  }
}

// Its gathers and reductions return at once, as they do on a GPU, where their rank waits for other
// ranks later or never; it counts the gathers.
struct ComesLater : BorrowedComm {
  using BorrowedComm::BorrowedComm;
  void AllGatherParts(at::Tensor& /*flat*/) override { ++gathers; }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp) override {
    const int64_t part = flat.numel() / size();
    return flat.narrow(0, part * rank(), part).clone();
  }
  int gathers = 0;
};

// Nothing is compared between the forward passes of a step.
TEST(ShardedModel, ChangeOnOneRankOnlyAfterAForwardPass_IsNoticedBeforeTheGathersOfOneRank) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients}) {
    for (const bool before_backward : {false, true}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(strategy) << before_backward);
      std::vector<std::string> errors(2), again(2);
      std::vector<int> gathers(2);
      RunRanks(2, [&](Comm& world) {
        ComesLater comm(world);
        Trained trained(comm, {.strategy = strategy});
        trained.Forward(IdsOf(0, comm)).backward();
        trained.Step();
        at::Tensor loss = trained.Forward(IdsOf(1, comm));
        if (comm.rank() == 0) trained.model.Expire();
        comm.gathers = 0;
        errors[comm.rank()] = ErrorOf([&] {
          if (!before_backward) loss = trained.Forward(IdsOf(1, comm));
          loss.backward();
        });
        gathers[comm.rank()] = comm.gathers;
        again[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(1, comm)); });
        trained.Load(ValuesOf(Net()));
        trained.Forward(IdsOf(1, comm)).backward();
        trained.Step();
        trained.Forward(IdsOf(2, comm)).backward();
      });
      EXPECT_THAT(errors, Each(AllOf(HasSubstr("at different places"),
                                     HasSubstr("after a change of the parameters"),
                                     HasSubstr("the end of a backward pass"))));
      EXPECT_THAT(gathers, Each(0));
      EXPECT_THAT(again, Each(HasSubstr("rank 1 has failed at the end of a backward pass")));
    }
  }
}

TEST(ShardedModel, ChangeOnOneRankOnlyBeforeABackwardPassOfFull_IsNamedOnEveryRank) {
  for (const bool reshard : {true, false}) {
    std::vector<std::string> errors(2), again(2);
    std::vector<int> gathers(2);
    RunRanks(2, [&](Comm& world) {
      ComesLater comm(world);
      Trained trained(comm,
                      {.strategy = ShardingStrategy::kFull, .reshard_after_forward = reshard});
      trained.Forward(IdsOf(0, comm)).backward();
      trained.Step();
      const at::Tensor loss = trained.Forward(IdsOf(1, comm));
      if (comm.rank() == 1) trained.model.Expire();
      comm.gathers = 0;
      errors[comm.rank()] = ErrorOf([&] { loss.backward(); });
      gathers[comm.rank()] = comm.gathers;
      again[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(1, comm)); });
      trained.Load(ValuesOf(Net()));
      trained.Forward(IdsOf(1, comm)).backward();
      trained.Step();
    });
    for (const std::vector<std::string>& each : {errors, again}) {
      EXPECT_THAT(each, Each(HasSubstr("rank 0 0 times, rank 1 1 times")));
    }
    EXPECT_THAT(gathers, Each(0));
  }
}

// Each rank's part belongs to another model, whatever the program does next.
TEST(ShardedModel, ChangeOnOneRankOnly_IsAnErrorOfAllUsesUntilALoad) {
  enum class Next { kForward, kSummon, kRead, kSave };
  for (const ShardingStrategy strategy : kStrategies) {
    for (const Next what : {Next::kForward, Next::kSummon, Next::kRead, Next::kSave}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(strategy) << static_cast<int>(what));
      std::vector<std::string> next(2), again(4);
      RunRanks(2, [&](Comm& comm) {
        Trained trained(comm, {.strategy = strategy});
        trained.Forward(IdsOf(0, comm)).backward();
        if (comm.rank() == 0) trained.Step();
        next[comm.rank()] = ErrorOf([&] {
          if (what == Next::kSummon) trained.model.Summon([] {});
          if (what == Next::kRead) trained.Full();
          if (what == Next::kSave) {
            trained.model.CompareBeforeSave(comm.AllGatherBytes(trained.model.ChangesHere()));
          }
          if (what == Next::kForward) trained.Forward(IdsOf(1, comm));
        });
        again[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(1, comm)); });
        again[2 + comm.rank()] = ErrorOf([&] { trained.model.CheckNotMixedHere(); });
        trained.Load(ValuesOf(Net()));
        trained.Forward(IdsOf(1, comm)).backward();
        trained.Step();
      });
      for (const std::vector<std::string>& errors : {next, again}) {
        EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 0 1 times, rank 1 0 times"),
                                       HasSubstr("call load_state()"))));
      }
    }
  }
}

// Makes this rank fail alone at the end of a backward pass.
struct Failing : BorrowedComm {
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    std::vector<std::string> all = BorrowedComm::AllGatherBytes(bytes);
    if (armed && bytes.find("the end of a backward pass") != std::string::npos) {
      armed = false;
      throw std::bad_alloc();
    }
    return all;
  }
  bool armed = false;
};

// Whatever the exception is.
TEST(ShardedModel, RankThatFailsAloneAtTheEndOfABackwardPass_IsNamedOnEveryRank) {
  enum class Next { kForward, kSummon, kRead, kSave };
  for (const ShardingStrategy strategy : kStrategies) {
    for (const Next what : {Next::kForward, Next::kSummon, Next::kRead, Next::kSave}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(strategy) << static_cast<int>(what));
      std::vector<std::string> first(2), next(2), again(2);
      RunRanks(2, [&](Comm& world) {
        Failing comm(world);
        Trained trained(comm, {.strategy = strategy});
        trained.Forward(IdsOf(0, comm)).backward();
        trained.Step();
        comm.armed = comm.rank() == 1;
        first[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(1, comm)).backward(); });
        for (const at::Tensor& shard : trained.model.shards()) {
          EXPECT_TRUE(comm.rank() == 0 || !shard.grad().defined());
        }
        if (comm.rank() == 0) trained.Step();
        next[comm.rank()] = ErrorOf([&] {
          if (what == Next::kSummon) trained.model.Summon([] {});
          if (what == Next::kRead) trained.Full();
          if (what == Next::kSave) {
            trained.model.CompareBeforeSave(comm.AllGatherBytes(trained.model.ChangesHere()));
          }
          if (what == Next::kForward) trained.Forward(IdsOf(2, comm));
        });
        again[comm.rank()] = ErrorOf([&] {
          if (what == Next::kRead) trained.Full();
          if (what == Next::kSave) trained.model.CheckNotMixedHere();
          if (what == Next::kSummon) trained.model.Summon([] {});
          trained.Forward(IdsOf(2, comm));
        });
        trained.Load(ValuesOf(Net()));
        trained.Forward(IdsOf(2, comm)).backward();
        trained.Step();
      });
      EXPECT_THAT(first, ElementsAre("no error", HasSubstr("bad_alloc")));
      for (const std::vector<std::string>& errors : {next, again}) {
        EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1 has failed at the end of a backward pass"),
                                       HasSubstr("bad_alloc"), HasSubstr("call load_state()"))));
      }
    }
  }
}

// Fails after the first reduction after ranks have met at the end of a backward pass.
struct FailsLate : BorrowedComm {
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    ended = bytes.find("the end of a backward pass") != std::string::npos;
    return BorrowedComm::AllGatherBytes(bytes);
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    at::Tensor mine = BorrowedComm::ReduceScatter(flat, op);
    if (armed && ended) throw std::bad_alloc();
    return mine;
  }
  bool armed = false, ended = false;
};

// The parameters that an optimizer may change must be the same on every rank, so that ranks gather
// them at the same times.
TEST(ShardedModel, RankThatFailsInALateReduction_KnowsWhatWasTrainedAsTheOthersDo) {
  std::vector<std::string> errors(2);
  std::vector<std::vector<bool>> trained(2);
  RunRanks(2, [&](Comm& world) {
    FailsLate comm(world);
    torch::nn::ModuleList net;
    for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    ShardedModel model(comm, comm, nullptr, net.get(), ParametersOf(*net), {},
                       {.strategy = ShardingStrategy::kFull, .unit_names = {"0", "1", "2", "3"}});
    const auto pass = [&](const std::vector<int>& order) {
      model.BeginForward(/*communicate=*/true);
      at::Tensor x = Randn({2, kWidth}, 3);
      for (const int i : order) x = net[i]->as<torch::nn::Linear>()->forward(x);
      model.EndForward();
      x.sum().backward();
    };
    pass({0, 1, 2});
    model.Expire();
    comm.armed = comm.rank() == 1;
    // Unit 1 is due before its gradient has arrived.
    errors[comm.rank()] = ErrorOf([&] { pass({3, 1, 0, 2}); });
    for (const auto& unit : model.units()) trained[comm.rank()].push_back(unit->trained);
  });
  EXPECT_THAT(errors, ElementsAre("no error", HasSubstr("bad_alloc")));
  EXPECT_THAT(trained, Each(ElementsAre(true, true, true, true)));
}

TEST(ShardedModel, SomeParameters_AreExchangedAlone) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(3, [&](Comm& comm) {
      CountingComm counting(comm);
      Trained trained(counting, {.strategy = strategy});
      const Values all = trained.Full();
      const auto is_bias = [](const std::string& name) { return name.ends_with(".bias"); };
      counting.bytes = 0;
      const auto some = trained.model.SomeParameters(is_bias, comm.rank() == 0);
      const size_t sent = counting.bytes;
      size_t biases = 0, bytes = 0;
      for (const auto& [name, value] : all) {
        if (!is_bias(name)) continue;
        ++biases;
        bytes += value.nbytes();
      }
      ASSERT_GT(biases, 1u);
      // A rank that has a whole bias sends it; the others of the unit send as much.
      EXPECT_LE(sent, 2 * bytes);
      EXPECT_EQ(some.size(), comm.rank() == 0 ? biases : 0);
      for (const auto& [name, value] : some) {
        EXPECT_TRUE(at::equal(value, all.at(name))) << name;
      }
      for (const auto& [name, value] :
           trained.model.SomeParameters([](const auto&) { return true; }, /*keep=*/true)) {
        EXPECT_TRUE(at::equal(value, all.at(name))) << name;
      }
    });
  }
}

TEST(ShardedModel, FiltersThatDiffer_AreErrorsOnAllRanks) {
  std::vector<std::string> different(2), thrown(2), apart(2);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    const std::string last = trained.Full().rbegin()->first;
    different[comm.rank()] = ErrorOf([&] {
      trained.model.SomeParameters(
          [&](const std::string& name) { return comm.rank() == 1 && name == last; }, true);
    });
    thrown[comm.rank()] = ErrorOf([&] {
      trained.model.SomeParameters(
          [&](const std::string& name) {
            TORCH_CHECK(comm.rank() == 0, "no idea of ", name);
            return true;
          },
          true);
    });
    apart[comm.rank()] = ErrorOf([&] {
      if (comm.rank() == 0) {
        trained.Full();
      } else {
        trained.model.SomeParameters([](const auto&) { return true; }, true);
      }
    });
  });
  EXPECT_THAT(different, Each(HasSubstr("rank 1 reads parameter '")));
  EXPECT_THAT(different, Each(HasSubstr("and rank 0 does not")));
  EXPECT_THAT(thrown, ElementsAre(HasSubstr("rank 1 has failed in the filter that says which "
                                            "weights are read: no idea of"),
                                  HasSubstr("no idea of")));
  EXPECT_THAT(apart, Each(HasSubstr("reading some of the weights")));
}

// A rank without memory for the whole model does this.
TEST(ShardedModel, RankThatCannotKeepWhatItReads_StaysInStep) {
  std::vector<std::string> reads(2), states(2);
  RunRanks(2, [&](Comm& comm) {
    torch::nn::ModuleList net;
    for (int i = 0; i < 3; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    const Values want = ValuesOf(*net);
    ShardedModel model(comm, comm, nullptr, net.get(), ParametersOf(*net), {},
                       {.strategy = ShardingStrategy::kFull, .unit_names = {"0", "1", "2"}});
    const auto keep = [&](const std::string& name) {
      TORCH_CHECK(comm.rank() == 0 || name != "1.weight", "no memory");
      return true;
    };
    const auto part = [&](const std::string& name) { return model.PartOf(name, want.at(name)); };
    reads[comm.rank()] = ErrorOf([&] { model.FullParameters(keep); });
    states[comm.rank()] = ErrorOf([&] { model.Assemble(part, keep); });
    // If other exchanges follow.
    std::exception_ptr failure;
    model.FullParameters(keep, &failure);
    model.Assemble(part, keep, &failure);
    EXPECT_EQ(failure != nullptr, comm.rank() == 1);
    for (const auto& [name, value] : model.FullParameters([](const auto&) { return true; })) {
      EXPECT_EQ(value.numel(), want.at(name).numel());
    }
  });
  EXPECT_THAT(reads, ElementsAre("no error", "no memory"));
  EXPECT_THAT(states, ElementsAre("no error", "no memory"));
}

// Each rank has stepped up to the failure.
TEST(ShardedModel, StepsThatFailOnAllRanks_AreErrorsUntilALoad) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const bool reads : {false, true}) {
      std::vector<std::string> next(2), again(2), saves(2);
      RunRanks(2, [&](Comm& comm) {
        Trained trained(comm, {.strategy = strategy});
        trained.Forward(IdsOf(0, comm)).backward();
        trained.model.Expire();
        trained.model.NoteFailedStep(std::make_exception_ptr(std::bad_alloc()));
        saves[comm.rank()] = ErrorOf([&] { trained.model.CheckNotMixedHere(); });
        const auto next_use = [&] {
          if (reads) trained.Full();
          trained.Forward(IdsOf(1, comm));
        };
        next[comm.rank()] = ErrorOf(next_use);
        again[comm.rank()] = ErrorOf(next_use);
        trained.Load(ValuesOf(Net()));
        trained.Forward(IdsOf(1, comm)).backward();
        trained.Step();
      });
      EXPECT_THAT(saves, ElementsAre(HasSubstr("rank 0 has failed in a step"),
                                     HasSubstr("rank 1 has failed in a step")));
      EXPECT_THAT(next, Each(HasSubstr("rank 0 has failed in a step of an optimizer")));
      EXPECT_THAT(again, Each(HasSubstr("rank 0 has failed in a step of an optimizer")));
    }
  }
}

TEST(ShardedModel, StepOfOneProcessThatFails_SaysNothingOfOthers) {
  RunRanks(1, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    trained.Forward(IdsOf(0, comm)).backward();
    trained.model.Expire();
    trained.model.NoteFailedStep(std::make_exception_ptr(std::bad_alloc()));
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(ErrorOf([&] { trained.Forward(IdsOf(1, comm)); }),
                  AllOf(HasSubstr("bad_alloc"), HasSubstr("changed in part: call load_state()"),
                        Not(HasSubstr("other ranks"))));
    }
  });
}

// Failures and changes of one rank alone, which a load that replaces nothing leaves unchanged.
TEST(ShardedModel, FailuresThatAreForgottenAndRestored_AreErrorsAgain) {
  for (const bool in_step : {true, false}) {
    std::vector<std::string> errors(2);
    RunRanks(2, [&](Comm& comm) {
      Trained trained(comm, {.strategy = ShardingStrategy::kFull});
      trained.Forward(IdsOf(0, comm)).backward();
      if (comm.rank() == 1) {
        trained.model.Expire();
        if (in_step) trained.model.NoteFailedStep(std::make_exception_ptr(std::bad_alloc()));
      }
      const ShardedModel::Failures failures = trained.model.ForgetFailures();
      trained.model.Summon([] {});
      trained.model.RestoreFailures(failures);
      errors[comm.rank()] = ErrorOf([&] { trained.model.Summon([] {}); });
    });
    EXPECT_THAT(errors, Each(HasSubstr(in_step ? "rank 1 has failed in a step"
                                               : "rank 0 0 times, rank 1 1 times")));
  }
}

// Fills the disk when all ranks have come to the end of a backward pass.
struct FillsTheDisk : BorrowedComm {
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    std::vector<std::string> all = BorrowedComm::AllGatherBytes(bytes);
    if (parts != nullptr && bytes.find("the end of a backward pass") != std::string::npos) {
      parts->full = true;
    }
    return all;
  }
  MemoryParts* parts = nullptr;
};

// After the exchange at the end of the pass.
TEST(ShardedModel, LateGradientThatOneRankCannotStore_IsAnErrorOfItsPassAndOfTheNextUseOfAll) {
  std::vector<std::string> first(2), next(2);
  RunRanks(2, [&](Comm& world) {
    FillsTheDisk comm(world);
    auto store = std::make_unique<MemoryParts>();
    MemoryParts& parts = *store;
    Trained trained(comm, {.strategy = ShardingStrategy::kFull}, nullptr, nullptr,
                    std::move(store));
    const auto step = [&] {
      trained.Step();
      trained.model.MarkChanged(trained.model.shards());
    };
    const auto plain = [&] { trained.Forward(IdsOf(0, comm)).backward(); };
    plain();
    step();
    if (comm.rank() == 1) comm.parts = &parts;
    first[comm.rank()] = ErrorOf([&] {
      trained.model.BeginForward(true);
      const at::Tensor ids = IdsOf(0, comm);
      // The last block's gradients are complete after those of all others.
      at::Tensor x =
          trained.net.blocks[kBlocks - 1]->as<BlockImpl>()->Apply(trained.net.words(ids));
      for (const auto& block : *trained.net.blocks) x = block->as<BlockImpl>()->Apply(x);
      x = at::linear(x, trained.net.words->weight);
      trained.model.EndForward();
      at::cross_entropy_loss(x, ids).backward();
    });
    comm.parts = nullptr;
    parts.full = false;
    if (comm.rank() == 0) step();
    next[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(1, comm)); });
    trained.Load(ValuesOf(Net()));
    plain();
    step();
  });
  EXPECT_THAT(first, ElementsAre("no error", HasSubstr("the disk is full")));
  EXPECT_THAT(next, Each(AllOf(HasSubstr("rank 1 has failed at the end of a backward pass"),
                               HasSubstr("the disk is full"))));
}

TEST(ShardedModel, PartThatOneRankCannotStore_IsAnErrorOfAllAtTheNextForwardPass) {
  std::vector<std::string> next(2), again(2);
  RunRanks(2, [&](Comm& comm) {
    auto store = std::make_unique<MemoryParts>();
    MemoryParts& parts = *store;
    Trained trained(comm, {.strategy = ShardingStrategy::kFull}, nullptr, nullptr,
                    std::move(store));
    trained.Forward(IdsOf(0, comm)).backward();
    trained.Step();
    parts.full = comm.rank() == 1;
    for (std::vector<std::string>* errors : {&next, &again}) {
      (*errors)[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(1, comm)); });
    }
    parts.full = false;
    trained.Load(ValuesOf(Net()));
    trained.Forward(IdsOf(0, comm)).backward();
    trained.Step();
  });
  for (const std::vector<std::string>& errors : {next, again}) {
    EXPECT_THAT(errors,
                Each(AllOf(HasSubstr("rank 1 has failed at the beginning of a forward pass"),
                           HasSubstr("the disk is full"))));
  }
}

TEST(ShardedModel, RankThatFailsAlone_LoadOfAllParametersEndsIt) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const bool all : {true, false}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(strategy) << all);
      std::vector<std::string> next(2);
      RunRanks(2, [&](Comm& world) {
        Failing comm(world);
        Trained trained(comm, {.strategy = strategy});
        const Values start = trained.Full();
        comm.armed = comm.rank() == 1;
        ErrorOf([&] { trained.Forward(IdsOf(1, comm)).backward(); });
        if (comm.rank() == 0) trained.Step();
        std::map<std::string, at::Tensor> parts;
        for (const auto& [name, value] : start) parts[name] = trained.model.PartOf(name, value);
        if (!all) parts.erase(parts.begin());
        trained.model.LoadParts(parts);
        next[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(2, comm)); });
        if (!all) return;
        const Values loaded = trained.Full();
        for (const auto& [name, value] : start) EXPECT_TRUE(at::equal(loaded.at(name), value));
      });
      EXPECT_THAT(next, Each(all ? HasSubstr("no error")
                                 : HasSubstr("rank 1 has failed at the end of a backward pass")));
    }
  }
}

TEST(ShardedModel, PartWrittenBehindGatheredParameters_IsNamed) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients}) {
    std::vector<std::string> errors(2);
    RunRanks(2, [&](Comm& comm) {
      Trained trained(comm, {.strategy = strategy});
      const auto write = [&](int rank) {
        const at::NoGradGuard no_grad;
        if (comm.rank() == rank) trained.model.ShardOf(trained.net.words->weight).mul_(2);
      };
      trained.Forward(IdsOf(0, comm)).backward();
      trained.Step();
      // Before the first gather it is a change like any other.
      write(1);
      {
        const at::NoGradGuard no_grad;
        trained.Forward(IdsOf(1, comm));
      }
      errors[comm.rank()] = ErrorOf([&] {
        const at::Tensor loss = trained.Forward(IdsOf(1, comm));
        write(1);
        loss.backward();
      });
      // It counts from now on.
      const Values full = trained.Full();
      trained.Forward(IdsOf(1, comm)).backward();
      trained.model.Summon(
          [&] { EXPECT_TRUE(at::equal(trained.net.words->weight, full.at("words.weight"))); });
    });
    EXPECT_THAT(errors, Each(HasSubstr("rank 1 has changed its part of parameter 'words.weight'")));
  }
}

TEST(ShardedModel, PartsWrittenBehindGatheredParameters_OnAllRanks_CountInEvaluation) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients}) {
    for (const bool separate : {false, true}) {
      std::vector<double> losses(2);
      RunRanks(2, [&](Comm& comm) {
        ShardingOptions options = {.strategy = strategy};
        if (separate) options.parameter_dtype = at::kBFloat16;
        Trained trained(comm, options);
        const auto evaluate = [&] {
          const at::NoGradGuard no_grad;
          return trained.Forward(Ids(1)).item<double>();
        };
        trained.Forward(IdsOf(0, comm)).backward();
        trained.Step();
        const double before = evaluate();
        {
          const at::NoGradGuard no_grad;
          trained.model.ShardOf(trained.net.words->weight).mul_(2);
        }
        losses[comm.rank()] = evaluate();
        EXPECT_NE(losses[comm.rank()], before);
        EXPECT_EQ(evaluate(), losses[comm.rank()]);
        trained.model.Expire();
        EXPECT_EQ(evaluate(), losses[comm.rank()]);
      });
      EXPECT_EQ(losses[0], losses[1]);
    }
  }
}

// The others learn of it at their next meeting, whichever that is.
TEST(ShardedModel, PartWrittenBehindGatheredParameters_OnOneRank_IsAnErrorOfAllAfterAnEvaluation) {
  for (const bool program : {false, true}) {
    std::vector<std::string> errors(2);
    RunRanks(2, [&](Comm& world) {
      ComesLater comm(world);
      Trained trained(comm, {.strategy = ShardingStrategy::kGradients});
      trained.Forward(IdsOf(0, comm)).backward();
      trained.Step();
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        trained.Forward(IdsOf(1, comm));
      };
      evaluate();
      if (comm.rank() == 1) {
        const at::NoGradGuard no_grad;
        trained.model.ShardOf(trained.net.words->weight).mul_(2);
      }
      errors[comm.rank()] = ErrorOf([&] {
        evaluate();
        if (program) {
          at::Tensor metric = at::ones({1});
          comm.AllReduce(metric, ReduceOp::kSum);
        } else {
          trained.Forward(IdsOf(1, comm)).backward();
        }
      });
    });
    EXPECT_THAT(errors[1], HasSubstr("changed its part of parameter 'words.weight'"));
    EXPECT_THAT(errors[0], HasSubstr(program ? "AllGatherBytes"
                                             : "after it has changed its part of a parameter"));
  }
}

// Waits only 300 ms when a rank that has changed its part comes alone, and as long as any
// collective elsewhere.
struct Impatient : BorrowedComm {
  explicit Impatient(Comm& comm)
      : BorrowedComm(comm),
        hurried(MakeC10dComm(c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(
                                 comm.process_group()),
                             {.timeout = std::chrono::milliseconds(300)})) {}
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    const bool alone = bytes.find("after it has changed its part") != std::string::npos;
    return alone ? hurried->AllGatherBytes(bytes) : BorrowedComm::AllGatherBytes(bytes);
  }
  const std::unique_ptr<Comm> hurried;
};

// If the others come to no collective at all, the wait lasts as long as any other one.
TEST(ShardedModel, PartWrittenBehindGatheredParameters_OnOneRankThatWaitsInVain_TimesOut) {
  for (const auto& run_ranks : {RunGlooRanks, RunShmRanks}) {
    std::string error;
    Notification done;
    run_ranks(2,
              [&](Comm& world) {
                Impatient comm(world);
                Trained trained(comm, {.strategy = ShardingStrategy::kGradients});
                trained.Forward(IdsOf(0, comm)).backward();
                trained.Step();
                const auto evaluate = [&] {
                  const at::NoGradGuard no_grad;
                  trained.Forward(IdsOf(1, comm));
                };
                evaluate();
                // Alive, but elsewhere.
                if (comm.rank() == 0) return done.WaitForNotification();
                {
                  const at::NoGradGuard no_grad;
                  trained.model.ShardOf(trained.net.words->weight).mul_(2);
                }
                error = ErrorOf(evaluate);
                done.Notify();
              },
              {});
    EXPECT_THAT(error,
                AllOf(HasSubstr("timeout 300 ms"),
                      HasSubstr("of evaluation after it has changed its part of a parameter"),
                      HasSubstr("this rank has changed its part of parameter 'words.weight'"),
                      HasSubstr("summon_full_params()")));
  }
}

TEST(ShardedModel, PartWrittenBehindGatheredParameters_IsReadBySummon) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients}) {
    RunRanks(2, [&](Comm& comm) {
      // Separate shards, which the gathered values would overwrite.
      Trained trained(comm, {.strategy = strategy, .parameter_dtype = at::kBFloat16});
      {
        const at::NoGradGuard no_grad;
        trained.model.BeginForward(true);
        trained.net.words->weight.sum();
        trained.model.EndForward();
      }
      for (const at::Tensor& shard : trained.model.shards()) {
        const at::NoGradGuard no_grad;
        shard.fill_(0.5);
      }
      trained.model.Summon([] {});
      for (const auto& [name, tensor] : trained.Full()) {
        EXPECT_TRUE(at::equal(tensor, at::full_like(tensor, 0.5))) << name;
      }
    });
  }
}

// Returns the number of units with gradients that are not reduced yet.
int UnitsWithGradients(const ShardedModel& model) {
  int units = 0;
  for (const auto& unit : model.units()) {
    units += std::any_of(unit->slices().begin(), unit->slices().end(), ShardUnit::HasPending);
  }
  return units;
}

TEST(ShardedModel, FirstBackwardPass_HoldsTheGradientsOfAFewUnits) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    for (const auto& ranks : {RunGlooRanks, RunShmRanks}) {  // the latter in place
      for (const bool overlap : {false, true}) {
        ranks(2,
              [&](Comm& comm) {
                constexpr int kLayers = 8;
                const auto thread = overlap ? std::make_shared<CommThread>() : nullptr;
                const std::unique_ptr<Comm> ordered = InOrder(&comm, thread);
                torch::nn::Sequential net;
                for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWide, kWide));
                // Too small to be used in place.
                net->push_back(torch::nn::Linear(kWide, 2));
                ShardedModel model(*ordered, *ordered, nullptr, net.get(), ParametersOf(*net), {},
                                   {.strategy = strategy, .overlap = overlap}, true, thread);
                for (int step = 0; step < 2; ++step) {
                  int most = 0;
                  model.BeginForward(true);
                  at::Tensor x = Randn({1, kWide}, 7).requires_grad_();
                  for (auto& layer : *net) {
                    x.register_hook(
                        [&](at::Tensor) { most = std::max(most, UnitsWithGradients(model)); });
                    x = layer.forward(x);
                  }
                  model.EndForward();
                  x.sum().backward();
                  EXPECT_GE(most, 1);
                  EXPECT_LE(most, 3) << "strategy " << static_cast<int>(strategy) << ", overlap "
                                     << overlap << ", step " << step;
                  EXPECT_EQ(UnitsWithGradients(model), 0);
                }
              },
              {});
      }
    }
  }
}

// One rank turns to a unit that is present more often than the others do, and leaves parameters
// out.
TEST(ShardedModel, FirstBackwardPassWithOtherTurnsOnOneRank_EqualsOneProcess) {
  const auto forward = [](Net& net, const at::Tensor& ids, bool more, bool less) {
    at::Tensor x = net.words(ids);
    for (const auto& item : *net.blocks) {
      auto* const block = item->as<BlockImpl>();
      const at::Tensor bias = less ? at::Tensor() : block->outer->bias;
      x = x + at::linear(at::tanh(block->inner(block->norm(x))), block->outer->weight, bias);
    }
    at::Tensor y = at::linear(x, net.words->weight);
    // The backward pass comes to the last block, the words, and the last block again.
    if (more) y = y * (1 + net.blocks[kBlocks - 1]->as<BlockImpl>()->inner->bias.square().sum());
    return at::cross_entropy_loss(y, (ids + 1).remainder(11));
  };
  for (const bool more : {false, true}) {
    for (const bool less : {false, true}) {
      Net alone;
      FusedSGD sgd(alone.parameters(), {.lr = 0.1, .momentum = 0.9});
      const Values start = ValuesOf(alone);
      for (int step = 0; step < 3; ++step) {
        const std::vector<at::Tensor> ids = Ids(step).chunk(2);
        (forward(alone, ids[0], false, false) + forward(alone, ids[1], more, less))
            .div(2)
            .backward();
        sgd.Step();
        sgd.ZeroGrad();
      }
      const Values want = ValuesOf(alone);
      for (const ShardingStrategy strategy : kStrategies) {
        for (const bool overlap : {false, true}) {
          RunRanks(2, [&](Comm& comm) {
            Trained trained(comm, {.strategy = strategy, .overlap = overlap});
            for (int step = 0; step < 3; ++step) {
              const bool second = comm.rank() == 1;
              trained.model.BeginForward(true);
              const at::Tensor loss =
                  forward(trained.net, IdsOf(step, comm), more && second, less && second);
              trained.model.EndForward();
              loss.backward();
              trained.Step();
            }
            EXPECT_LE(Distance(trained.Full(), want, start), 1e-6)
                << static_cast<int>(strategy) << overlap << more << less;
          });
        }
      }
    }
  }
}

TEST(ShardedModel, DifferentOrdersOfUnits_AreNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    trained.model.BeginForward(true);
    at::Tensor x = trained.net.words(IdsOf(0, comm));
    // All blocks have one size: the collectives fit, the values do not.
    for (const int i : {comm.rank(), 1 - comm.rank()})
      x = trained.net.blocks[i]->as<BlockImpl>()->Apply(x);
    trained.model.EndForward();
    errors[comm.rank()] = ErrorOf([&] { x.sum().backward(); });
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("different orders"),
                                 HasSubstr("rank 0 gathered unit 'blocks.0'"),
                                 HasSubstr("rank 1 gathered unit 'blocks.1'"))));
}

// A program that only evaluates leaves a bounded amount of history for the next check.
TEST(ShardedModel, DifferentOrdersAfterALongEvaluation_AreAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    {
      const at::NoGradGuard no_grad;
      const at::Tensor ids = IdsOf(0, comm);
      for (int i = 0; i < 6000; ++i) {
        trained.model.BeginForward(true);
        trained.net.Forward(ids);
        trained.model.EndForward();
      }
    }
    trained.Forward(IdsOf(0, comm)).backward();
    for (int i = 0; i < 6000; ++i) {
      const at::NoGradGuard no_grad;
      trained.model.BeginForward(true);
      trained.net.Forward(IdsOf(0, comm));
      trained.model.EndForward();
    }
    trained.model.BeginForward(true);
    at::Tensor x = trained.net.words(IdsOf(0, comm));
    for (const int i : {comm.rank(), 1 - comm.rank()})
      x = trained.net.blocks[i]->as<BlockImpl>()->Apply(x);
    trained.model.EndForward();
    errors[comm.rank()] = ErrorOf([&] { x.sum().backward(); });
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("different orders"),
                                 HasSubstr("after 16384 uses without a backward pass"))));
}

TEST(ShardedModel, DifferentPoliciesOrModels_AreNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    ShardingOptions options{.strategy = ShardingStrategy::kFull};
    if (comm.rank() == 1) options.unit_names = {"blocks.0"};
    errors[comm.rank()] = ErrorOf([&] { Trained trained(comm, options); });
  });
  EXPECT_THAT(errors,
              Each(AllOf(HasSubstr("shard the model differently"), HasSubstr("unit 'blocks.1'"),
                         HasSubstr("rank 1 has unit '(rest)'"))));
}

// The sum of the ranks' gradients exceeds fp16, their mean does not.
TEST(ShardedModel, ReductionInHalf_HoldsTheMeanOfLargeGradients) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(4, [&](Comm& comm) {
      Net net;
      ShardedModel model(comm, comm, nullptr, &net, ParametersOf(net), {},
                         {.strategy = strategy, .reduce_dtype = at::kHalf});
      model.BeginForward(true);
      const at::Tensor loss = (net.extra->weight * 30000).sum() + (net.extra->bias / 1000).sum();
      model.EndForward();
      loss.backward();
      for (const at::Tensor& shard : model.shards()) {
        if (!shard.grad().defined()) continue;
        const std::string& name = *model.NameOf(shard);
        if (name == "extra.weight") {
          EXPECT_TRUE(shard.grad().eq(30000).all().item<bool>());
        } else if (name == "extra.bias") {
          EXPECT_TRUE(shard.grad().allclose(at::full({}, 1e-3), 1e-3));
        }
      }
    });
  }
}

TEST(ShardedModel, ReductionInFloatOfAModelInBfloat16_SumsMicroStepsInIt) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(2, [&](Comm& comm) {
      Net net;
      net.to(at::kBFloat16);
      ShardedModel model(comm, comm, nullptr, &net, ParametersOf(net), {},
                         {.strategy = strategy, .reduce_dtype = at::kFloat});
      // Adding less than 2 to 256 in bfloat16 has no effect.
      for (int i = 0; i <= 64; ++i) {
        model.BeginForward(/*communicate=*/i == 64);
        const at::Tensor loss = (net.extra->weight * (i == 0 ? 256 : 1)).sum();
        model.EndForward();
        loss.backward();
      }
      for (const at::Tensor& shard : model.shards()) {
        if (*model.NameOf(shard) != "extra.weight" || shard.numel() == 0) continue;
        EXPECT_EQ(shard.grad().scalar_type(), at::kBFloat16);
        EXPECT_TRUE(shard.grad().eq(320).all().item<bool>());
      }
    });
  }
}

// Checks the gradient of extra.weight on a rank if `gradient_of` returns that of each rank.
void ExpectGradient(const ShardingOptions& options, at::ScalarType dtype, int ranks,
                    const std::function<double(int rank)>& gradient_of, double want) {
  RunRanks(ranks, [&](Comm& comm) {
    Net net;
    net.to(dtype);
    ShardedModel model(comm, comm, nullptr, &net, ParametersOf(net), {}, options);
    model.BeginForward(true);
    const at::Tensor loss = (net.extra->weight * gradient_of(comm.rank())).sum();
    model.EndForward();
    loss.backward();
    for (const at::Tensor& shard : model.shards()) {
      if (*model.NameOf(shard) != "extra.weight" || shard.numel() == 0) continue;
      EXPECT_EQ(shard.grad().scalar_type(), dtype);
      const double got = shard.grad()[0].item<double>();
      EXPECT_EQ(got, dtype == at::kFloat ? static_cast<double>(static_cast<float>(want)) : want);
      EXPECT_TRUE(shard.grad().eq(got).all().item<bool>());
    }
  });
}

TEST(ShardedModel, ReduceDtype_DoesNotNarrowDoublesOrIgnoredParameters) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const double fine = 1 + std::exp2(-40);
      ExpectGradient(
          {.strategy = strategy, .reduce_dtype = dtype}, at::kDouble, 2, [&](int) { return fine; },
          fine);
    }
    const double fine = 1 + std::exp2(-20);
    ExpectGradient(
        {.strategy = strategy, .reduce_dtype = at::kBFloat16, .ignored_modules = "extra"},
        at::kFloat, 2, [&](int) { return fine; }, fine);
    // Gradients of other parameters are rounded.
    ExpectGradient(
        {.strategy = strategy, .reduce_dtype = at::kBFloat16}, at::kFloat, 2,
        [&](int) { return fine; }, 1);
  }
}

TEST(ShardedModel, ReduceDtypeBfloat16_RoundsSumsAndNotTheMean) {
  for (const ShardingStrategy strategy : kStrategies) {
    const ShardingOptions options = {.strategy = strategy, .reduce_dtype = at::kBFloat16};
    ExpectGradient(
        options, at::kFloat, 3, [](int rank) { return rank == 0 ? 1.0 : 0.0; }, 1.0 / 3);
    // 2 + 2^-7 lies between two numbers of bfloat16.
    ExpectGradient(
        options, at::kFloat, 2, [](int rank) { return rank == 0 ? 1 : 1 + std::exp2(-7); }, 1);
  }
}

TEST(ShardedModel, StridesThatDiffer_AreNamedOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    Net net;
    at::Tensor weight = net.extra->weight;
    // Like torch::load() on one rank of a weight that was saved with these strides.
    if (comm.rank() == 1) weight.set_data(weight.detach().t().contiguous().t());
    errors[comm.rank()] =
        ErrorOf([&] { ShardedModel(comm, comm, nullptr, &net, ParametersOf(net), {}, {}); });
  });
  EXPECT_THAT(errors, Each(HasSubstr("'extra.weight' [2, 10] Float, lies in memory with strides "
                                     "[10, 1] on rank 0 but [1, 2] on rank 1")));
}

TEST(ShardedModel, BackwardThroughAGraphOfOldValues_Throws) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunRanks(2, [&](Comm& comm) {
      Trained trained(comm, {.strategy = strategy});
      const at::Tensor old = trained.Forward(IdsOf(0, comm));
      trained.Forward(IdsOf(1, comm)).backward();
      // Another model's step: nothing in this one has changed.
      trained.model.Expire();
      trained.Forward(IdsOf(2, comm)).backward();
      trained.Step();
      trained.model.MarkChanged(trained.model.shards());
      EXPECT_THAT(ErrorOf([&] { old.backward(); }), HasSubstr("modified by an inplace operation"));
    });
  }
}

TEST(ShardedModel, PeerThatIsGone_LeavesTheUnitInTheError) {
  std::string error;
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull});
    if (comm.rank() == 1) return trained.model.BeginForward(true);
    error = ErrorOf([&] { trained.Forward(IdsOf(0, comm)); });
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1"),
                           HasSubstr("while gathering unit '(rest)' of the sharded model")));
}

TEST(ShardedModel, FrozenParameters_StayAndHaveNoGradient) {
  RunRanks(2, [](Comm& comm) {
    Net net;
    net.blocks[1]->as<BlockImpl>()->inner->weight.set_requires_grad(false);
    for (at::Tensor& parameter : net.blocks[2]->parameters()) parameter.set_requires_grad(false);
    ShardedModel model(comm, comm, nullptr, &net, ParametersOf(net), {},
                       {.strategy = ShardingStrategy::kFull});
    for (int step = 0; step < 3; ++step) {
      model.BeginForward(true);
      const at::Tensor loss = net.Loss(IdsOf(step, comm));
      model.EndForward();
      loss.backward();
    }
    for (const at::Tensor& shard : model.shards()) {
      const std::string& name = *model.NameOf(shard);
      const bool frozen = name == "blocks.1.inner.weight" || name.rfind("blocks.2.", 0) == 0;
      EXPECT_EQ(shard.requires_grad(), !frozen) << name;
      EXPECT_TRUE(!frozen || !shard.grad().defined()) << name;
    }
  });
}

// The remaining tests are about communication beside computation.

// Calls `before` before each gather and reduction, with the number of earlier ones.
class WatchedComm : public BorrowedComm {
 public:
  using Fn = std::function<void(int number)>;
  WatchedComm(Comm& comm, Fn gather, Fn reduce)
      : BorrowedComm(comm), gather_(std::move(gather)), reduce_(std::move(reduce)) {}
  void AllGatherParts(at::Tensor& flat) override {
    gather_(gathers_++);
    BorrowedComm::AllGatherParts(flat);
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    reduce_(reduces_++);
    return BorrowedComm::ReduceScatter(flat, op);
  }

 private:
  const Fn gather_, reduce_;
  int gathers_ = 0, reduces_ = 0;
};

struct Scenario {
  ShardingOptions options;
  int micro_steps = 1;
  bool hybrid = false;
};

Values TrainScenario(const Scenario& scenario, bool overlap) {
  Values result;
  const auto body = [&](Comm& world, Comm* shard, Comm* replicas) {
    ShardingOptions options = scenario.options;
    options.overlap = overlap;
    Trained trained(world, options, shard, replicas);
    for (int step = 0; step < 6; ++step) {
      const std::vector<at::Tensor> parts = IdsOf(step, world).chunk(scenario.micro_steps);
      for (int i = 0; i < scenario.micro_steps; ++i)
        trained.Forward(parts[i], i == scenario.micro_steps - 1).backward();
      {
        // Evaluation between steps, and reading.
        at::NoGradGuard no_grad;
        trained.Forward(parts[0]);
        if (step % 2 == 0) trained.model.Summon([] {});
      }
      trained.Step();
    }
    Values values = trained.Full();
    if (world.rank() == 0) result = std::move(values);
  };
  if (scenario.hybrid) {
    RunHybrid([&](Comm& world, Comm& shard, Comm& replicas) { body(world, &shard, &replicas); });
  } else {
    RunRanks(3, [&](Comm& comm) { body(comm, nullptr, nullptr); });
  }
  return result;
}

TEST(ShardedModelOverlap, Results_AreThoseWithoutItToTheBit) {
  std::vector<Scenario> scenarios;
  for (const ShardingStrategy strategy : kStrategies) {
    scenarios.push_back({.options = {.strategy = strategy}});
    scenarios.push_back({.options = {.strategy = strategy}, .micro_steps = 2});
    scenarios.push_back({.options = {.strategy = strategy, .reduce_dtype = at::kBFloat16}});
  }
  scenarios.push_back(
      {.options = {.strategy = ShardingStrategy::kFull, .reshard_after_forward = false}});
  scenarios.push_back(
      {.options = {.strategy = ShardingStrategy::kFull, .group_size = 2}, .hybrid = true});
  for (size_t i = 0; i < scenarios.size(); ++i) {
    const Values with = TrainScenario(scenarios[i], true);
    const Values again = TrainScenario(scenarios[i], true);
    const Values without = TrainScenario(scenarios[i], false);
    for (const auto& [name, tensor] : without) {
      EXPECT_TRUE(at::equal(with.at(name), tensor)) << "scenario " << i << ", " << name;
      EXPECT_TRUE(at::equal(again.at(name), tensor)) << "scenario " << i << ", " << name;
    }
  }
}

TEST(ShardedModelOverlap, FromTheSecondStep_OnlyTheFirstGatherIsWaitedForAtOnce) {
  RunRanks(2, [](Comm& comm) {
    const std::thread::id here = std::this_thread::get_id();
    int gathered = 0, gathered_here = 0, reduced = 0, reduced_here = 0;
    WatchedComm watched(
        comm,
        [&](int) {
          ++gathered;
          if (std::this_thread::get_id() == here) ++gathered_here;
        },
        [&](int) {
          ++reduced;
          if (std::this_thread::get_id() == here) ++reduced_here;
        });
    Trained trained(watched, {.strategy = ShardingStrategy::kFull, .overlap = true});
    for (int step = 0; step < 3; ++step) {
      gathered = gathered_here = reduced = reduced_here = 0;
      trained.Forward(IdsOf(step, comm)).backward();
      trained.Step();
      EXPECT_EQ(gathered, 2 * kBlocks + 1) << step;
      EXPECT_EQ(gathered_here, step == 0 ? gathered : 1) << step;
      EXPECT_EQ(reduced, kBlocks + 1);
      EXPECT_EQ(reduced_here, 0);
    }
  });
}

TEST(ShardedModelOverlap, GatherAndReduction_GoOnWhileOperatorsRun) {
  RunRanks(2, [](Comm& comm) {
    // The gather of block 0 and the reduction of block 3 wait for operators that run after their
    // start.
    Notification in_forward, in_backward;
    constexpr int kGathersBefore = 2 * kBlocks + 1, kReducesBefore = kBlocks + 1;
    WatchedComm watched(
        comm,
        [&](int number) {
          if (number == kGathersBefore + 1) in_forward.WaitForNotification();
        },
        [&](int number) {
          if (number == kReducesBefore) in_backward.WaitForNotification();
        });
    Trained trained(watched, {.strategy = ShardingStrategy::kFull, .overlap = true});
    trained.Forward(IdsOf(0, comm)).backward();
    trained.Step();
    trained.model.BeginForward(true);
    at::Tensor x = trained.net.words(IdsOf(1, comm));
    in_forward.Notify();
    for (int i = 0; i < kBlocks; ++i) {
      x = trained.net.blocks[i]->as<BlockImpl>()->Apply(x);
      // After block 2 in the backward pass.
      if (i == 1) x.register_hook([&](at::Tensor) { in_backward.Notify(); });
    }
    x = at::linear(x, trained.net.words->weight);
    trained.model.EndForward();
    x.sum().backward();
    trained.Step();
  });
}

// Runs a forward pass through some of the blocks.
void TrainOn(Trained& trained, const Comm& comm, int step, const std::vector<int>& blocks) {
  trained.model.BeginForward(true);
  at::Tensor x = trained.net.words(IdsOf(step, comm));
  for (const int i : blocks) x = trained.net.blocks[i]->as<BlockImpl>()->Apply(x);
  x = at::linear(x, trained.net.words->weight);
  trained.model.EndForward();
  at::cross_entropy_loss(x, (IdsOf(step, comm) + 1).remainder(11)).backward();
  trained.Step();
}

const std::vector<std::vector<int>> kChangingPrograms = {
    {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 3}, {3, 2, 1, 0}, {1}, {0, 1, 2, 3}, {0, 0, 1, 0}, {2, 3}};

TEST(ShardedModelOverlap, ProgramThatChangesItsOrder_GetsTheSameBits) {
  for (const ShardingStrategy strategy : kStrategies) {
    std::vector<Values> runs;
    for (const bool overlap : {true, false}) {
      RunRanks(2, [&](Comm& comm) {
        Trained trained(comm, {.strategy = strategy, .overlap = overlap});
        for (int step = 0; step < static_cast<int>(kChangingPrograms.size()); ++step)
          TrainOn(trained, comm, step, kChangingPrograms[step]);
        Values values = trained.Full();
        if (comm.rank() == 0) runs.push_back(std::move(values));
      });
    }
    for (const auto& [name, tensor] : runs[1])
      EXPECT_TRUE(at::equal(runs[0].at(name), tensor)) << name;
  }
}

TEST(ShardedModelOverlap, UnitThatDoesNotCome_CostsItsGatherAndIsFreed) {
  RunRanks(2, [](Comm& comm) {
    CountingComm counting(comm);
    Trained trained(counting, {.strategy = ShardingStrategy::kFull, .overlap = true});
    for (const int step : {0, 1}) TrainOn(trained, comm, step, {0, 1, 2, 3});
    counting.gathers = 0;
    // Forward: (rest), 0, 1, [2], 3, (rest); backward: [2], 1, 0 after 3.
    TrainOn(trained, comm, 2, {0, 1, 3});
    EXPECT_EQ(counting.gathers, 6 + 3);
    for (const auto& unit : trained.model.units()) EXPECT_FALSE(unit->present()) << unit->name();
    counting.gathers = 0;
    TrainOn(trained, comm, 3, {0, 1, 3});
    EXPECT_EQ(counting.gathers, 5 + 2) << "the order is known again";
  });
}

TEST(ShardedModelOverlap, OrdersThatDifferInALaterStep_ThrowOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull, .overlap = true});
    for (const int step : {0, 1}) TrainOn(trained, comm, step, {0, 1, 2, 3});
    errors[comm.rank()] = ErrorOf([&] {
      TrainOn(trained, comm, 2,
              comm.rank() == 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{1, 0, 2, 3});
    });
  });
  EXPECT_THAT(errors,
              Each(testing::AnyOf(HasSubstr("different orders"),
                                  AllOf(HasSubstr("ranks disagree"), HasSubstr("unit '")))));
}

TEST(ShardedModelOverlap, OneOrderAheadOnOneRankOnly_IsNotForetold) {
  RunRanks(2, [](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kGradients, .overlap = true});
    for (int step = 0; step < 4; ++step) {
      trained.model.BeginForward(true);
      at::Tensor x = trained.net.words(IdsOf(step, comm));
      for (const auto& block : *trained.net.blocks) x = block->as<BlockImpl>()->Apply(x);
      // It needs no gather, because it is present.
      if (comm.rank() == 1) x = x + 0 * trained.net.blocks[0]->as<BlockImpl>()->outer->bias.sum();
      x = at::linear(x, trained.net.words->weight);
      trained.model.EndForward();
      x.sum().backward();
      trained.Step();
    }
  });
}

TEST(ShardedModelOverlap, PeerThatIsGone_LeavesTheUnitInTheErrorOfTheOneThatWaits) {
  std::string error;
  RunRanks(2, [&](Comm& comm) {
    Trained trained(comm, {.strategy = ShardingStrategy::kFull, .overlap = true});
    trained.Forward(IdsOf(0, comm)).backward();
    trained.Step();
    // The other rank continues after the first unit.
    if (comm.rank() == 1) {
      trained.model.BeginForward(true);
      trained.net.words(IdsOf(1, comm));
      return;
    }
    error = ErrorOf([&] { trained.Forward(IdsOf(1, comm)); });
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1"), HasSubstr("while gathering unit 'blocks.")));
}

TEST(ShardedModelOverlap, ForwardThatThrows_LeavesNothingBehind) {
  std::vector<Values> runs;
  for (const bool overlap : {true, false}) {
    RunRanks(2, [&](Comm& comm) {
      Trained trained(comm, {.strategy = ShardingStrategy::kFull, .overlap = overlap});
      for (int step = 0; step < 5; ++step) {
        if (step >= 2) {
          // The gather of block 1 is under way.
          EXPECT_THAT(ErrorOfForward(trained.model,
                                     [&] {
                                       const at::Tensor x = trained.net.words(IdsOf(step, comm));
                                       trained.net.blocks[0]->as<BlockImpl>()->Apply(x);
                                     }),
                      HasSubstr("of the program"));
        }
        if (step == 3) {
          // And a backward pass that throws after the reduction of a unit has begun.
          EXPECT_THAT(ErrorOfBackward(
                          trained.model, [&] { return trained.net.words(IdsOf(step, comm)); },
                          [&](at::Tensor x) {
                            for (const auto& block : *trained.net.blocks) {
                              x = block->as<BlockImpl>()->Apply(x);
                            }
                            return x;
                          }),
                      HasSubstr("of the hook"));
          trained.sgd.ZeroGrad();
        }
        trained.Forward(IdsOf(step, comm)).backward();
        trained.Step();
      }
      Values values = trained.Full();
      if (comm.rank() == 0) runs.push_back(std::move(values));
    });
  }
  for (const auto& [name, tensor] : runs[1])
    EXPECT_TRUE(at::equal(runs[0].at(name), tensor)) << name;
}

TEST(ShardedModelOverlap, ErrorOfAReduction_IsThrownByTheBackwardPass) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    bool armed = false;
    WatchedComm watched(
        comm, [](int) {}, [&](int) { TORCH_CHECK(!armed, "the link is down"); });
    Trained trained(watched, {.strategy = ShardingStrategy::kFull, .overlap = true});
    trained.Forward(IdsOf(0, comm)).backward();
    trained.Step();
    armed = true;
    errors[comm.rank()] = ErrorOf([&] { trained.Forward(IdsOf(1, comm)).backward(); });
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("the link is down"),
                                 HasSubstr("while reducing the gradients of unit 'blocks.3'"))));
}

TEST(ShardedModelOverlap, UnderDebugMode_CollectivesOfBothThreadsAgree) {
  RunRanks(2, [](Comm& comm) {
    const std::unique_ptr<Comm> checked = MakeCheckedComm(std::make_unique<BorrowedComm>(comm));
    Trained trained(*checked, {.strategy = ShardingStrategy::kFull, .overlap = true});
    for (int step = 0; step < 3; ++step) {
      trained.Forward(IdsOf(step, comm)).backward();
      trained.Step();
      EXPECT_EQ(trained.world->AllGatherBytes("x").size(), 2u);
    }
  });
}

TEST(ShardedModelOverlap, OverGlooAndSharedMemory_RunsAreEqualToTheBit) {
  for (const auto& ranks : {RunGlooRanks, RunShmRanks}) {
    std::vector<Values> runs;
    for (const bool overlap : {true, true, false}) {
      ranks(2,
            [&](Comm& comm) {
              Trained trained(comm, {.strategy = ShardingStrategy::kFull, .overlap = overlap});
              for (int step = 0; step < 10; ++step) {
                trained.Forward(IdsOf(step, comm)).backward();
                trained.Step();
              }
              Values values = trained.Full();
              if (comm.rank() == 0) runs.push_back(std::move(values));
            },
            {});
    }
    for (const auto& [name, tensor] : runs[2]) {
      EXPECT_TRUE(at::equal(runs[0].at(name), tensor)) << name;
      EXPECT_TRUE(at::equal(runs[1].at(name), tensor)) << name;
    }
  }
}

struct Wide {
  explicit Wide(Comm& comm, const ShardingOptions& options,
                std::unique_ptr<PartStore> gradients = nullptr)
      : dtype(options.parameter_dtype.value_or(at::kFloat)),
        thread(options.overlap ? std::make_shared<CommThread>() : nullptr),
        ordered(InOrder(&comm, thread)),
        net(MakeNet()),
        model(*ordered, *ordered, nullptr, net.get(), ParametersOf(*net), {}, options, true, thread,
              nullptr, nullptr, nullptr, std::move(gradients)),
        sgd(model.shards(), {.lr = 0.1, .momentum = 0.9}) {}

  static torch::nn::Sequential MakeNet() {
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(kWide, kWide));
    at::NoGradGuard no_grad;
    uint64_t seed = 3;
    for (at::Tensor& parameter : net->parameters())
      parameter.copy_(Randn(parameter.sizes(), ++seed).div_(kWide));
    return net;
  }
  at::Tensor Forward(int step, bool communicate = true) {
    model.BeginForward(communicate);
    at::Tensor x = Randn({2, kWide}, static_cast<uint64_t>(10 * step + ordered->rank())).to(dtype);
    for (auto& layer : *net) x = x + at::tanh(layer.forward(x));
    model.EndForward();
    return x.square().mean();
  }
  void Step() { StepOn(model, sgd); }
  Values Full() { return FullOf(model); }

  const at::ScalarType dtype;
  const std::shared_ptr<CommThread> thread;
  const std::unique_ptr<Comm> ordered;
  torch::nn::Sequential net;
  ShardedModel model;
  FusedSGD sgd;
};

// It comes after the rank's last reduction: the others are at the end of the pass.
TEST(ShardedModel, ExceptionThatEndsABackwardPassOfOneRank_IsNamedOnEveryRank) {
  enum class Next { kForward, kSummon, kRead };
  for (const Next what : {Next::kForward, Next::kSummon, Next::kRead}) {
    SCOPED_TRACE(static_cast<int>(what));
    std::vector<std::string> errors(2);
    RunRanks(2, [&](Comm& comm) {
      Wide trained(comm, {.strategy = ShardingStrategy::kGradients});
      trained.Forward(0).backward();
      trained.Step();
      const at::Tensor input = Randn({2, kWide}, 9).requires_grad_();
      if (comm.rank() == 1) {
        input.register_hook([](at::Tensor) { TORCH_CHECK(false, "of the hook"); });
      }
      trained.model.BeginForward(true);
      at::Tensor x = input * 2;
      for (auto& layer : *trained.net) x = layer.forward(x);
      trained.model.EndForward();
      errors[comm.rank()] = ErrorOf([&] { x.sum().backward(); });
      if (comm.rank() == 0) return;
      EXPECT_THAT(errors[1], HasSubstr("of the hook"));
      errors[1] = ErrorOf([&] {
        if (what == Next::kSummon) trained.model.Summon([] {});
        if (what == Next::kRead) trained.Full();
        if (what == Next::kForward) trained.Forward(2);
      });
    });
    EXPECT_THAT(errors,
                Each(AllOf(HasSubstr("one is at the end of a backward pass"),
                           HasSubstr("an exception has ended the backward pass of rank 1"))));
  }
}

// One rank comes from the end of its pass, the other one from an exception inside it.
TEST(ShardedModel, ExceptionThatEndsABackwardPassOfOneRank_LoadOfAllParametersEndsIt) {
  for (const bool loads : {true, false}) {
    for (const ShardingStrategy strategy :
         {ShardingStrategy::kGradients, ShardingStrategy::kOptimizer}) {
      std::vector<std::string> errors(2), next(2);
      RunRanks(2, [&](Comm& comm) {
        Wide trained(comm, {.strategy = strategy});
        trained.Forward(0).backward();
        trained.Step();
        const Values values = trained.Full();
        const at::Tensor input = Randn({2, kWide}, 9).requires_grad_();
        if (comm.rank() == 1) {
          input.register_hook([](at::Tensor) { TORCH_CHECK(false, "of the hook"); });
        }
        trained.model.BeginForward(true);
        at::Tensor x = input * 2;
        for (auto& layer : *trained.net) x = layer.forward(x);
        trained.model.EndForward();
        errors[comm.rank()] = ErrorOf([&] { x.sum().backward(); });
        if (comm.rank() == 1) errors[1] = ErrorOf([&] { trained.Full(); });
        if (loads) {
          std::map<std::string, at::Tensor> parts;
          for (const auto& [name, value] : values) parts[name] = trained.model.PartOf(name, value);
          trained.model.LoadParts(parts);
          trained.sgd.ZeroGrad();
        }
        next[comm.rank()] = ErrorOf([&] { trained.Forward(1).backward(); });
      });
      // Or in different collectives.
      EXPECT_THAT(errors,
                  Each(AnyOf(HasSubstr("at different places"), HasSubstr("ranks disagree"))));
      EXPECT_THAT(next, Each(loads ? HasSubstr("no error")
                                   : HasSubstr("rank 0 has failed at the end of a backward pass")));
    }
  }
}

TEST(ShardedModel, RanksThatShareMemory_EqualOthersToTheBit) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const std::optional<at::ScalarType> dtype :
         {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kBFloat16)}) {
      for (const bool overlap : {true, false}) {
        ShardingOptions options = {.strategy = strategy, .overlap = overlap};
        options.parameter_dtype = options.reduce_dtype = dtype;
        Values want, got, stored;
        const auto train = [&](Comm& comm, Values* result) {
          Wide wide(comm, options, result == &stored ? std::make_unique<MemoryParts>() : nullptr);
          for (int step = 0; step < 4; ++step) {
            // With a micro-step that is not reduced, and a pass after the gradients exist.
            if (step == 2) wide.Forward(90, /*communicate=*/false).backward();
            wide.Forward(step).backward();
            {
              const at::NoGradGuard no_grad;
              wide.Forward(91);
            }
            wide.Step();
          }
          Values values = wide.Full();
          if (comm.rank() == 0) *result = std::move(values);
        };
        RunRanks(2, [&](Comm& comm) { train(comm, &want); });
        RunShmRanks(2, [&](Comm& comm) {
          train(comm, &got);
          const Wide wide(comm, options);
          for (const auto& unit : wide.model.units()) {
            EXPECT_EQ(unit->in_place(), strategy == ShardingStrategy::kFull && !dtype.has_value());
          }
        });
        ExpectEqual(got, want);
        RunShmRanks(2, [&](Comm& comm) { train(comm, &stored); });
        ExpectEqual(stored, want);
      }
    }
  }
}

TEST(ShardedModel, SummonOfSharedShards_WritesEachOnce) {
  for (const ShardingStrategy strategy : kStrategies) {
    RunShmRanks(3, [&](Comm& comm) {
      Wide wide(comm, {.strategy = strategy});
      wide.Forward(0).backward();
      wide.Step();
      Values want = wide.Full();
      for (int time = 0; time < 2; ++time) {
        wide.Forward(1).backward();  // attached
        wide.sgd.ZeroGrad();
        wide.model.Summon([&] {
          const at::NoGradGuard no_grad;
          for (at::Tensor& parameter : wide.net->parameters()) parameter.mul_(2);
          // One rank alone may use the values that it has.
          if (comm.rank() == 0) wide.Forward(2);
        });
        for (auto& [name, tensor] : want) tensor.mul_(2);
        ExpectEqual(wide.Full(), want);
      }
    });
  }
}

TEST(ShardedModel, UnitInPlace_IsNotThereOutsideOfPasses_AndRefusesWrites) {
  RunShmRanks(2, [](Comm& comm) {
    Wide wide(comm, {.strategy = ShardingStrategy::kFull});
    const at::Tensor weight = wide.net->parameters()[0];
    EXPECT_THAT(ErrorOf([&] { weight.sum(); }), HasSubstr("outside of the model's forward"));
    wide.Forward(0).backward();
    EXPECT_THAT(ErrorOf([&] { weight.sum(); }), HasSubstr("outside of the model's forward"));
    wide.model.BeginForward(true);
    EXPECT_THAT(ErrorOf([&] {
                  const at::NoGradGuard no_grad;
                  weight.mul_(2);
                }),
                HasSubstr("which is sharded"));
    EXPECT_NO_THROW(weight.sum());
    wide.model.EndForward();
  });
}

TEST(ShardedModel, ForwardPassInPlace_EndsWhenNoRankReadsShards) {
  RunShmRanks(2, [](Comm& comm) {
    static std::atomic<bool> read, changed;
    if (comm.rank() == 0) read = changed = false;
    comm.Barrier();
    Wide wide(comm, {.strategy = ShardingStrategy::kFull});
    const at::NoGradGuard no_grad;
    wide.model.BeginForward(true);
    const at::Tensor first = wide.net->parameters()[0].clone();
    if (comm.rank() == 1) {
      for (int i = 0; i < 200; ++i) EXPECT_TRUE(at::equal(wide.net->parameters()[0], first));
      read = true;
    }
    wide.model.EndForward();
    EXPECT_TRUE(read);
    wide.model.Expire();
    for (const at::Tensor& shard : wide.model.shards()) shard.zero_();
  });
}

// A pass that reduces nothing ends without a separate meeting.
TEST(ShardedModel, OptimizersStepInPlace_WaitsForReaders) {
  RunShmRanks(2, [](Comm& comm) {
    static std::atomic<bool> arrived, read;
    if (comm.rank() == 0) arrived = read = false;
    comm.Barrier();
    Wide wide(comm, {.strategy = ShardingStrategy::kFull});
    wide.Forward(0).backward();
    if (comm.rank() == 0) {
      arrived = true;
    } else {
      while (!arrived) std::this_thread::yield();
      read = true;
    }
    wide.model.AwaitReaders();
    EXPECT_TRUE(read);
  });
}

TEST(ShardedModel, RanksThatMeetAtDifferentPlaces_AreAnError) {
  std::string errors[2];
  RunShmRanks(2, [&](Comm& comm) {
    Wide wide(comm, {.strategy = ShardingStrategy::kFull});
    wide.model.BeginForward(true);
    wide.net->parameters()[0].sum();
    errors[comm.rank()] = ErrorOf([&] {
      if (comm.rank() == 0) return wide.model.AwaitReaders();
      wide.model.EndForward();
      wide.model.Expire();
    });
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("the ranks of a sharded model are at different places"));
  }
}

TEST(ShardedModel, PeerThatIsLostBeforeTheEndOfAForwardPass_IsAnErrorOfTheNextUse) {
  std::string error;
  ErrorOf([&] {
    RunShmRanks(2, [&](Comm& comm) {
      Wide wide(comm, {.strategy = ShardingStrategy::kFull});
      wide.model.BeginForward(true);
      wide.net->parameters()[0].sum();
      TORCH_CHECK(comm.rank() == 0, "rank 1 gives up");
      wide.model.EndForward();
      error = ErrorOf([&] { wide.model.Expire(); });
    });
  });
  EXPECT_THAT(error, HasSubstr("left"));
}

TEST(ShardedModel, PeerThatIsLostInAGatherOfSharedShards_IsAnErrorThatNamesTheUnit) {
  for (const ShardingStrategy strategy : kStrategies) {
    std::string error;
    const std::string thrown = ErrorOf([&] {
      RunShmRanks(2, [&](Comm& comm) {
        Wide wide(comm, {.strategy = strategy});
        wide.Forward(0).backward();
        wide.Step();
        if (comm.rank() == 1) {
          wide.model.BeginForward(true);
          TORCH_CHECK(false, "rank 1 gives up");
        }
        error = ErrorOf([&] { wide.Forward(1); });
      });
    });
    EXPECT_THAT(thrown, HasSubstr("rank 1 gives up"));
    EXPECT_THAT(error, AllOf(HasSubstr("left"), HasSubstr("gathering unit '0'")));
  }
}

}  // namespace
}  // namespace muster
