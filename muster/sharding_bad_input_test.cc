// Mistakes under sharding: a clear error on every rank, under each kind of sharding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "c10/core/CPUAllocator.h"
#include "muster/accelerator.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/collective/comm_queue.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

struct Kind {
  std::string name;
  int ranks;
  ShardingOptions sharding;
  bool shared_memory = false;
};

std::vector<Kind> Kinds(const std::string& scratch) {
  const ShardingOptions full = {.strategy = ShardingStrategy::kFull};
  ShardingOptions hybrid = full, offloaded = full, overlapped = full;
  hybrid.group_size = 2;
  offloaded.offload_optimizer = offloaded.offload_parameters = Offload::kDisk;
  offloaded.offload_optimizer_path = offloaded.offload_parameters_path = scratch;
  overlapped.overlap = true;
  const ShardingOptions gradients = {.strategy = ShardingStrategy::kGradients,
                                     .offload_gradients = Offload::kDisk,
                                     .offload_gradients_path = scratch};
  ShardingOptions hybrid_offloaded = offloaded;
  hybrid_offloaded.group_size = 2;
  return {{"zero1", 2, {.strategy = ShardingStrategy::kOptimizer}},
          {"zero2", 2, {.strategy = ShardingStrategy::kGradients}},
          {"zero2 with offloaded gradients", 2, gradients},
          {"zero3", 3, full},
          {"zero3 overlapped", 2, overlapped},
          {"zero3 in shared memory", 2, full, true},
          {"hybrid", 4, hybrid},
          {"hybrid in shared memory", 4, hybrid, true},
          {"zero3 offloaded", 2, offloaded},
          {"hybrid offloaded", 4, hybrid_offloaded}};
}

// Parts of its layers are large enough that two ranks share them in memory.
torch::nn::Sequential Wide() {
  constexpr int64_t kWidth = 520;
  torch::nn::Sequential net;
  for (int i = 0; i < 3; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  return net;
}
at::Tensor Input() { return at::full({1, 520}, 0.01); }

// Wide() and its optimizer, prepared.
struct Training {
  explicit Training(Accelerator& a) : a(a), prepared(a.prepare(net, sgd)) {}
  void Step() {
    auto& [model, optimizer] = prepared;
    a.backward(model(Input()).mean());
    optimizer.step();
    optimizer.zero_grad();
  }

  Accelerator& a;
  torch::nn::Sequential net = Wide();
  FusedSGD sgd{net->parameters(), {.lr = 0.1}};
  decltype(std::declval<Accelerator&>().prepare(std::declval<torch::nn::Sequential&>(),
                                                std::declval<FusedSGD&>())) prepared;
};

// Returns what each rank threw, or "". A rank that throws leaves the job.
std::vector<std::string> Errors(
    const Kind& kind, const std::function<void(Accelerator&)>& body,
    const std::function<void(int rank, AcceleratorOptions&)>& change = nullptr) {
  std::vector<std::string> errors(kind.ranks);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  (kind.shared_memory ? RunShmRanks : RunGlooRanks)(kind.ranks,
                                                    [&](Comm& comm) {
                                                      AcceleratorOptions options;
                                                      options.sharding = kind.sharding;
                                                      if (change != nullptr)
                                                        change(comm.rank(), options);
                                                      try {
                                                        Accelerator a(CoreOn(comm, options, store));
                                                        body(a);
                                                      } catch (const c10::Error& error) {
                                                        errors[comm.rank()] =
                                                            error.what_without_backtrace();
                                                      }
                                                    },
                                                    {});
  return errors;
}

// Expects that all errors are `named`. In groups of two that use units in place only ranks 0 and 1
// do different things; the others learn that these have gone.
template <typename Matcher>
void ExpectErrors(const Kind& kind, const std::vector<std::string>& errors, const Matcher& named) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (rank < 2 || kind.sharding.group_size == 0) {
      EXPECT_THAT(errors[rank], named) << rank;
    } else {
      EXPECT_THAT(errors[rank], AnyOf(named, HasSubstr("of the sharded model meet at"))) << rank;
    }
  }
}

void PrepareOnly(Accelerator& a) {
  torch::nn::Sequential net = Wide();
  auto model = a.prepare(net);
}

TEST(ShardingBadInput, PolicyThatMatchesNothing_IsNamedOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    SCOPED_TRACE(kind.name);
    EXPECT_THAT(Errors(kind, PrepareOnly,
                       [](int, AcceleratorOptions& o) { o.sharding->unit_types = {"Linaer"}; }),
                Each(AllOf(HasSubstr("Linaer"), HasSubstr("Linear"))));
    EXPECT_THAT(Errors(kind, PrepareOnly,
                       [](int, AcceleratorOptions& o) { o.sharding->unit_names = {"7"}; }),
                Each(HasSubstr("'7'")));
    EXPECT_THAT(
        Errors(kind, PrepareOnly,
               [](int, AcceleratorOptions& o) { o.sharding->min_unit_parameters = 1 << 30; }),
        Each(HasSubstr("min_unit_parameters")));
    EXPECT_THAT(Errors(kind, PrepareOnly,
                       [](int, AcceleratorOptions& o) { o.sharding->ignored_modules = "head"; }),
                Each(HasSubstr("head")));
    EXPECT_THAT(Errors(kind, PrepareOnly,
                       [](int, AcceleratorOptions& o) { o.sharding->ignored_parameters = "head"; }),
                Each(HasSubstr("ignored_parameters: no parameter's name is 'head'")));
    EXPECT_THAT(Errors(kind, PrepareOnly,
                       [](int, AcceleratorOptions& o) { o.sharding->no_split = {"Blok"}; }),
                Each(HasSubstr("options.sharding.no_split: the model has no module of class or "
                               "name 'Blok'")));
  }
}

TEST(ShardingBadInput, ParametersThatGetOtherMemoryAfterPrepare_AreNamedOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    for (const bool converted : {false, true}) {
      SCOPED_TRACE(kind.name);
      EXPECT_THAT(Errors(kind,
                         [&](Accelerator& a) {
                           Training training(a);
                           auto& [model, optimizer] = training.prepared;
                           if (converted) {
                             a.summon_full_params(model, [&] { training.net->to(at::kDouble); });
                           } else {
                             training.net->parameters()[2].set_data(at::zeros({520, 520}));
                           }
                           a.backward(model(Input()).mean());
                           optimizer.step();
                         }),
                  Each(HasSubstr("of a sharded model has been given other memory")));
    }
  }
}

TEST(ShardingBadInput, ParametersWrittenAfterPrepare_AreNamedOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    for (const bool prepared_only : {true, false}) {
      SCOPED_TRACE(kind.name);
      EXPECT_THAT(Errors(kind,
                         [&](Accelerator& a) {
                           Training training(a);
                           auto& [model, optimizer] = training.prepared;
                           if (!prepared_only) {
                             a.backward(model(Input()).mean());
                             optimizer.step();
                           }
                           const at::NoGradGuard no_grad;
                           training.net->parameters()[2].mul_(2);
                         }),
                  Each(AllOf(HasSubstr("writes a parameter of unit '1'"),
                             HasSubstr("summon_full_params()"))));
    }
  }
}

// The optimizer's tensors are this rank's parts.
TEST(ShardingBadInput, PartsWrittenAfterAForwardPass_AreNamedOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    SCOPED_TRACE(kind.name);
    EXPECT_THAT(Errors(kind,
                       [&](Accelerator& a) {
                         Training training(a);
                         auto& [model, optimizer] = training.prepared;
                         for (int step = 0; step < 3; ++step) {
                           const at::Tensor loss = model(Input()).mean();
                           if (step == 2 && a.process_index() == 1) {
                             const at::NoGradGuard no_grad;
                             for (at::Tensor part : optimizer.handle().parameters()) part.mul_(2);
                           }
                           a.backward(loss);
                           optimizer.step();
                           optimizer.zero_grad();
                         }
                       }),
                Each(HasSubstr("rank 1 has changed its part of parameter '")));
  }
}

TEST(ShardingBadInput, AccumulationWindowsThatDiffer_AreNamedOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    for (const bool sync_each : {true, false}) {
      // Otherwise ranks wait for each other at the ends of their windows, as without sharding.
      if (!sync_each && kind.sharding.strategy != ShardingStrategy::kFull) continue;
      SCOPED_TRACE(kind.name);
      const std::vector<std::string> errors = Errors(
          kind,
          [&](Accelerator& a) {
            Training training(a);
            a.set_gradient_accumulation_steps(a.process_index() == 1 ? 3 : 2);
            for (int step = 0; step < 6; ++step) {
              auto scope = a.accumulate();
              training.Step();
            }
          },
          [&](int, AcceleratorOptions& o) { o.accumulation.sync_each_batch = sync_each; });
      // Ranks that use units in place meet only in backward passes that reduce.
      const auto named = AnyOf(
          AllOf(HasSubstr("disagree on a backward pass"), HasSubstr("accumulation window")),
          AllOf(HasSubstr("different places"), HasSubstr("the beginning of a backward pass")));
      ExpectErrors(kind, errors, named);
    }
  }
}

TEST(ShardingBadInput, StepThatOneRankLeavesOut_IsNamedOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    SCOPED_TRACE(kind.name);
    const std::vector<std::string> errors = Errors(kind, [&](Accelerator& a) {
      Training training(a);
      auto& [model, optimizer] = training.prepared;
      for (int step = 0; step < 4; ++step) {
        a.backward(model(Input()).mean());
        if (step < 2 || a.process_index() != 1) optimizer.step();
        optimizer.zero_grad();
      }
    });
    // Ranks that use units in place meet at the step itself, which one rank leaves out.
    ExpectErrors(kind, errors,
                 AnyOf(HasSubstr("not changed its parameters equally often"),
                       AllOf(HasSubstr("different places"), HasSubstr("an optimizer's step"))));
  }
}

TEST(ShardingBadInput, OptimizerOfOtherTensors_IsRefusedOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    SCOPED_TRACE(kind.name);
    const auto train = [](Accelerator& a, torch::nn::Sequential of, torch::nn::Sequential net) {
      FusedSGD sgd(of->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      a.backward(model(Input()).mean());
      optimizer.step();
    };
    EXPECT_THAT(Errors(kind, [&](Accelerator& a) { train(a, Wide(), Wide()); }),
                Each(AllOf(HasSubstr("'0.weight' of a sharded model"),
                           HasSubstr("the optimizer was created with other tensors"))));
    // The same on all ranks, which is right.
    EXPECT_THAT(Errors(kind,
                       [&](Accelerator& a) {
                         const torch::nn::Sequential net = Wide();
                         train(a, net, net);
                       }),
                Each(""));
  }
}

TEST(ShardingBadInput, SettingsThatDifferBetweenRanks_AreNamedOnEveryRank) {
  const TestFolder scratch;
  using Change = std::function<void(ShardingOptions&)>;
  for (const Kind& kind : Kinds(scratch.path())) {
    for (const auto& [what, change] : std::vector<std::pair<std::string, Change>>{
             {"no_shard", [](ShardingOptions& o) { o = {}; }},
             {"reduce_dtype=BFloat16", [](ShardingOptions& o) { o.reduce_dtype = at::kBFloat16; }},
             {"unit_names=0,1",
              [](ShardingOptions& o) {
                o.unit_names = {"0", "1"};
              }},
             {"unit_types=Linear", [](ShardingOptions& o) { o.unit_types = {"Linear"}; }},
             {"ignored_modules=1", [](ShardingOptions& o) { o.ignored_modules = "1"; }},
             {"ignored_parameters=1.bias",
              [](ShardingOptions& o) { o.ignored_parameters = "1.bias"; }},
             {"no_split=Linear", [](ShardingOptions& o) { o.no_split = {"Linear"}; }},
             {"overlap", [](ShardingOptions& o) { o.overlap = !o.overlap; }},
             {"offload_optimizer=cpu",
              [](ShardingOptions& o) { o.offload_optimizer = Offload::kCpu; }},
             {"offload_gradients=cpu",
              [](ShardingOptions& o) { o.offload_gradients = Offload::kCpu; }},
             {"group_size",
              [](ShardingOptions& o) { o.group_size = o.group_size == 0 ? 2 : 0; }}}) {
      SCOPED_TRACE(kind.name + " " + what);
      EXPECT_THAT(Errors(kind, PrepareOnly,
                         [&change = change](int rank, AcceleratorOptions& o) {
                           if (rank == 1) change(*o.sharding);
                         }),
                  Each(AllOf(HasSubstr("rank 1 has"), HasSubstr(what))));
    }
  }
}

// Hybrid sharding makes such groups on machines with unequal numbers of processes.
TEST(ShardingBadInput, GroupsOfDifferentSizes_AreNamedOnEveryRank) {
  const Kind hybrid = {"hybrid", 3, {.strategy = ShardingStrategy::kFull}};
  EXPECT_THAT(
      Errors(hybrid, PrepareOnly,
             [](int rank, AcceleratorOptions& o) { o.sharding->group_size = rank < 2 ? 2 : 1; }),
      Each(AllOf(HasSubstr("rank 2 has groups of 1 processes"), HasSubstr("rank 0 has groups of 2"),
                 HasSubstr("Run the same number on each machine"))));
}

// The units depend on the model, too.
TEST(ShardingBadInput, PolicyThatMatchesNothingOnOneRank_IsToldToEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    SCOPED_TRACE(kind.name);
    const std::vector<std::string> errors = Errors(
        kind,
        [](Accelerator& a) {
          struct NetImpl : torch::nn::Module {
            explicit NetImpl(const std::string& name) {
              register_module("layers", torch::nn::Sequential(torch::nn::Linear(4, 4)));
              // Without parameters, so that the models have the same ones.
              register_module(name, torch::nn::Sequential());
            }
          };
          auto net = std::make_shared<NetImpl>(a.process_index() == 1 ? "other" : "extra");
          auto model = a.prepare(net);
        },
        [](int, AcceleratorOptions& o) {
          o.sharding->unit_names = {"layers.0", "extra"};
        });
    EXPECT_THAT(errors, Each(HasSubstr("'extra'")));
    EXPECT_THAT(errors[0], HasSubstr("rank 1 cannot shard the model"));
  }
}

// Refuses to allocate memory of a gathered unit's size on a thread that asks for that.
class FullMemory : public c10::Allocator {
 public:
  static void Install() {
    static auto* const made = [] {
      auto* const allocator = new FullMemory(c10::GetDefaultCPUAllocator());
      c10::SetCPUAllocator(allocator, /*priority=*/255);
      return allocator;
    }();
    (void)made;
  }
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!full_ || bytes < 520 * 520 * 4, "DefaultCPUAllocator: can't allocate memory");
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

  static inline thread_local bool full_ = false;

 private:
  explicit FullMemory(c10::Allocator* inner) : inner_(inner) {}
  c10::Allocator* const inner_;
};

// The error of a rank that waits for one that has gone, in a job without a coordinator: the place,
// and that the connection has ended.
auto LostInTheModel() {
  return AllOf(HasSubstr("of the sharded model"),
               AnyOf(HasSubstr("closed by peer"), HasSubstr("reset by peer"),
                     HasSubstr("has left the group")));
}

// In a gather, for which one rank allocates memory, or in a backward pass and its reductions.
TEST(ShardingBadInput, RankWithoutMemory_SaysSoAndTheOthersLearnOfIt) {
  FullMemory::Install();
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    // The others keep the memory, use the shards of all ranks in place, or gather on another
    // thread.
    const bool offloaded = kind.sharding.offload_parameters == Offload::kDisk;
    const bool in_place = kind.shared_memory || kind.sharding.group_size > 0;
    const bool gathers = kind.sharding.strategy == ShardingStrategy::kFull &&
                         !kind.sharding.overlap && (offloaded || !in_place);
    SCOPED_TRACE(kind.name);
    const int last = kind.ranks - 1;
    const std::vector<std::string> errors = Errors(kind, [&](Accelerator& a) {
      Training training(a);
      for (int step = 0; step < 2; ++step) {
        FullMemory::full_ = step == 1 && a.process_index() == last;
        const struct Enough {
          ~Enough() { FullMemory::full_ = false; }
        } enough;
        training.Step();
      }
    });
    EXPECT_THAT(errors[last], HasSubstr("can't allocate memory"));
    // In a job, the coordinator knows which rank it was and how it ended
    // (tests/e2e/bad_input_test).
    for (int rank = 0; rank < last; ++rank) EXPECT_THAT(errors[rank], LostInTheModel()) << rank;
    if (gathers) {
      EXPECT_THAT(errors[last], HasSubstr("allocating memory for unit"));
    }
  }
}

// A gather ahead of its use runs on the communicating thread.
TEST(ShardingBadInput, RankWithoutMemoryForAGatherAhead_NamesTheUnitAndTheOthersLearnOfIt) {
  FullMemory::Install();
  AcceleratorOptions options;
  options.sharding = ShardingOptions{.strategy = ShardingStrategy::kFull, .overlap = true};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(3);
  RunGlooRanks(3, [&](Comm& comm) {
    try {
      const std::shared_ptr<internal::Core> core = CoreOn(comm, options, store);
      Accelerator a(core);
      Training training(a);
      for (int step = 0; step < 3; ++step) {
        // The first step determines the order of units.
        if (step == 2 && comm.rank() == 2) {
          core->process().comm_queue()->Submit([] { FullMemory::full_ = true; });
        }
        training.Step();
      }
    } catch (const c10::Error& error) {
      errors[comm.rank()] = error.what_without_backtrace();
    }
  });
  for (int rank = 0; rank < 2; ++rank) EXPECT_THAT(errors[rank], LostInTheModel()) << rank;
  EXPECT_THAT(errors[2],
              AllOf(HasSubstr("can't allocate memory"), HasSubstr("allocating memory for unit")));
}

TEST(ShardingBadInput, PeerThatDiesInsideAGather_IsAnErrorOnEveryRank) {
  const TestFolder scratch;
  for (const Kind& kind : Kinds(scratch.path())) {
    SCOPED_TRACE(kind.name);
    const int last = kind.ranks - 1;
    const std::vector<std::string> errors = Errors(kind, [&](Accelerator& a) {
      Training training(a);
      auto& [model, optimizer] = training.prepared;
      for (int step = 0; step < 3; ++step) {
        const at::Tensor out = model.call([&](torch::nn::SequentialImpl& layers) {
          at::Tensor x = Input();
          for (size_t i = 0; i < layers.size(); ++i) {
            TORCH_CHECK(step < 1 || i < 1 || a.process_index() != last, "rank ", last, " gives up");
            x = layers[i]->as<torch::nn::Linear>()->forward(x);
          }
          return x;
        });
        a.backward(out.mean());
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    EXPECT_THAT(errors, Each(Not("")));
    EXPECT_THAT(errors[last], HasSubstr("gives up"));
    for (int rank = 0; rank < last; ++rank) {
      EXPECT_THAT(errors[rank],
                  AnyOf(HasSubstr("of the sharded model"), HasSubstr("left the group"),
                        HasSubstr("closed"), HasSubstr("optimizer's step")))
          << rank;
    }
  }
}

}  // namespace
}  // namespace muster
