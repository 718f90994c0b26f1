// The memory of sharded training against the formulas of docs/sharding.md: what LibTorch's
// allocator has given out, counted to the byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/mutex.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/bigmodel/empty_weights.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/comm.h"
#include "worker/collective/comm_thread.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/counting_allocator.h"
#include "worker/parallel/memory_parts.h"
#include "worker/parallel/sharded_model.h"
#include "worker/parallel/test_net.h"
#include "worker/train/optimizer.h"

namespace muster {
namespace {

constexpr int kRanks = 2;
constexpr int kUnits = 8;
constexpr int64_t kWidth = 256;
constexpr int64_t kUnitBytes = 4 * (kWidth * kWidth + kWidth);
constexpr int64_t kModelBytes = kUnits * kUnitBytes;
// What is as large as a unit: its parameters or gradients in one buffer, and the gradient of its
// matrix.
constexpr size_t kLarge = 4 * kWidth * kWidth;

struct Memory {
  int64_t large = 0;    // of them as large as a unit, the most at a time
  int64_t between = 0;  // after a step, with gradients; of all ranks
  int64_t peak = 0;     // in a step
  int64_t first = 0;    // the most in the passes of the first step, which has no states yet
};

// A link whose reductions take as long as the backward pass of a unit: each one ends when the next
// unit's input has its gradient.
class SlowComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    if (std::this_thread::get_id() != here_) {
      MutexLock lock(&mu_);
      while (released_ == 0) changed_.Wait(&mu_);
      --released_;
    }
    return BorrowedComm::ReduceScatter(flat, op);
  }
  void Release() {
    MutexLock lock(&mu_);
    ++released_;
    changed_.SignalAll();
  }

 private:
  const std::thread::id here_ = std::this_thread::get_id();
  Mutex mu_;
  CondVar changed_;
  int released_ ABSL_GUARDED_BY(mu_) = 0;
};

struct Link {
  bool overlap = true, slow = false;
};

// `group`: ranks that divide one copy.
Memory Measure(ShardingStrategy strategy, Link link = {}, int ranks = kRanks, int group = 0,
               bool reshard = true, bool stored = false) {
  CountingAllocator& allocator = CountingAllocator::Get(kLarge);
  std::vector<std::vector<std::unique_ptr<Comm>>> copies, replicas;
  for (int i = 0; group > 0 && i < ranks / group; ++i) copies.push_back(MakeThreadComms(group));
  for (int i = 0; i < group; ++i) replicas.push_back(MakeThreadComms(ranks / group));
  const int64_t before = allocator.live();
  Memory memory;
  RunRanks(ranks, [&](Comm& inner) {
    SlowComm slow(inner);
    const auto thread = link.overlap ? std::make_shared<CommThread>() : nullptr;
    std::unique_ptr<Comm> ordered = std::make_unique<BorrowedComm>(slow);
    if (thread != nullptr) ordered = MakeOrderedComm(std::move(ordered), thread);
    Comm& comm = *ordered;
    if (!link.slow) {
      for (int i = 0; i < 1000; ++i) slow.Release();
    }
    torch::nn::Sequential net;
    for (int i = 0; i < kUnits; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    std::vector<NamedParameter> parameters;
    for (const auto& item : net->named_parameters())
      parameters.push_back({item.key(), item.value()});
    // Groups are measured without overlap, for which they would have to be in order with it.
    const int r = inner.rank();
    ShardedModel model(
        comm, group == 0 ? comm : *copies[r / group][r % group],
        group == 0 ? nullptr : replicas[r % group][r / group].get(), net.get(),
        std::move(parameters), {},
        {.strategy = strategy, .reshard_after_forward = reshard, .overlap = link.overlap}, true,
        thread, nullptr, stored ? std::make_unique<MemoryParts>() : nullptr);
    FusedAdamW adam(model.shards(), {.lr = 1e-3});
    for (int step = 0; step < 3; ++step) {
      comm.Barrier();
      if (comm.rank() == 0) allocator.ResetPeak();
      comm.Barrier();
      adam.ZeroGrad();
      model.BeginForward(true);
      at::Tensor x = Randn({1, kWidth}, 7).requires_grad_();
      for (int i = 0; i < kUnits; ++i) {
        // The reduction of a unit ends when the one before it has gone backward; that of the first
        // one with it.
        if (i < kUnits - 1) {
          x.register_hook([&, i](at::Tensor) {
            slow.Release();
            if (i == 0) slow.Release();
          });
        }
        x = net[i]->as<torch::nn::Linear>()->forward(x);
      }
      at::Tensor loss = x.sum();
      x.reset();
      model.EndForward();
      loss.backward();
      loss.reset();
      if (step == 0) {
        comm.Barrier();
        if (comm.rank() == 0) memory.first = allocator.peak() - before;
        comm.Barrier();
      }
      model.Expire();
      adam.Step();
    }
    comm.Barrier();
    if (comm.rank() == 0) {
      memory.large = allocator.large_peak();
      memory.between = allocator.live() - before;
      memory.peak = allocator.peak() - before;
    }
    comm.Barrier();
  });
  return memory;
}

TEST(ShardingMemory, BetweenSteps_IsTheFormula) {
  // Parameters, gradients, and two states of AdamW; of both ranks together.
  const Memory full = Measure(ShardingStrategy::kFull);
  EXPECT_NEAR(static_cast<double>(full.between), 4.0 * kModelBytes, 0.02 * 4 * kModelBytes);
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients}) {
    const double want = (kRanks + 3.0) * kModelBytes;
    EXPECT_NEAR(static_cast<double>(Measure(strategy).between), want, 0.02 * want);
  }
}

// Per rank 16/w bytes of 4 for each parameter, 8 + 8/w, 4 + 12/w: of all ranks, and in groups.
TEST(ShardingMemory, BetweenStepsOfMoreRanks_IsTheFormula) {
  const auto check = [](ShardingStrategy strategy, int ranks, int group, bool reshard,
                        double models) {
    const Memory memory = Measure(strategy, {.overlap = false}, ranks, group, reshard);
    EXPECT_NEAR(static_cast<double>(memory.between), models * kModelBytes,
                0.02 * models * kModelBytes)
        << "strategy " << static_cast<int>(strategy) << ", " << ranks << " ranks in groups of "
        << group << ", reshard " << reshard;
  };
  for (const int ranks : {1, 3, 4}) {
    for (const bool reshard : {true, false}) {
      check(ShardingStrategy::kFull, ranks, 0, reshard, 4);
    }
    // Parameters whole, the rest divided.
    check(ShardingStrategy::kGradients, ranks, 0, true, ranks + 3);
    check(ShardingStrategy::kOptimizer, ranks, 0, true, ranks + 3);
  }
  // Two copies.
  check(ShardingStrategy::kFull, 4, 2, true, 2 * 4);
  check(ShardingStrategy::kGradients, 4, 2, true, 4 + 2 * 3);
}

TEST(ShardingMemory, PeakOfMoreRanks_IsThreeUnitsMore) {
  for (const int ranks : {3, 4}) {
    const Memory memory = Measure(ShardingStrategy::kFull, {.overlap = false}, ranks);
    EXPECT_LE(memory.peak, memory.between + ranks * 3 * kUnitBytes * 102 / 100) << ranks;
    EXPECT_LE(memory.large, ranks * 3) << ranks;
  }
  const Memory hybrid = Measure(ShardingStrategy::kFull, {.overlap = false}, 4, 2);
  EXPECT_LE(hybrid.peak, hybrid.between + 4 * 3 * kUnitBytes * 102 / 100);
  EXPECT_LE(hybrid.large, 4 * 3);
}

TEST(ShardingMemory, PeakOfFullSharding_IsThreeUnitsMore) {
  for (const Link link : {Link{}, Link{.slow = true}, Link{.overlap = false}}) {
    const Memory memory = Measure(ShardingStrategy::kFull, link);
    EXPECT_LE(memory.peak, memory.between + kRanks * 3 * kUnitBytes * 102 / 100)
        << "overlap " << link.overlap << ", slow " << link.slow;
    // Gradients that are not there yet make room in the sum above, but not here.
    EXPECT_LE(memory.large, kRanks * 3) << "overlap " << link.overlap << ", slow " << link.slow;
  }
}

// Gradients are divided in the first step, too, in which no order of units is known.
TEST(ShardingMemory, FirstStep_HoldsThreeUnitsMoreThanTheParts) {
  for (const int ranks : {2, 4}) {
    const int64_t units = ranks * 3 * kUnitBytes * 102 / 100;
    for (const bool overlap : {true, false}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, overlap " << overlap);
      // Parameters and gradients.
      const Memory full = Measure(ShardingStrategy::kFull, {.overlap = overlap}, ranks);
      EXPECT_LE(full.first, 2 * kModelBytes * 102 / 100 + units);
      const Memory whole = Measure(ShardingStrategy::kGradients, {.overlap = overlap}, ranks);
      EXPECT_LE(whole.first, (ranks + 1) * kModelBytes * 102 / 100 + units);
    }
    const Memory hybrid = Measure(ShardingStrategy::kFull, {.overlap = false}, ranks, 2);
    EXPECT_LE(hybrid.first, ranks / 2 * 2 * kModelBytes * 102 / 100 + units) << ranks;
  }
}

// Of parameters and gradients those of two units are there, and at most three units more in a step;
// states are in memory.
TEST(ShardingMemory, PartsAndGradientsInAStore_AreThoseOfAFewUnits) {
  for (const bool overlap : {true, false}) {
    const Memory memory =
        Measure(ShardingStrategy::kFull, {.overlap = overlap}, kRanks, 0, true, /*stored=*/true);
    const double want = 2.0 * kModelBytes + 4 * kUnitBytes;
    EXPECT_NEAR(static_cast<double>(memory.between), want, 0.02 * want);
    EXPECT_LE(memory.peak, memory.between + kRanks * 3 * kUnitBytes * 102 / 100);
  }
}

TEST(ShardingMemory, DeferredModel_IsMadeUnitByUnit) {
  CountingAllocator& allocator = CountingAllocator::Get(kLarge);
  Mutex mu;
  const int64_t before = allocator.live();
  RunRanks(kRanks, [&](Comm& comm) {
    torch::nn::Sequential net;
    {
      MutexLock lock(&mu);  // the generator is that of the process
      net = DeferredInit([] {
        torch::nn::Sequential made;
        for (int i = 0; i < kUnits; ++i) made->push_back(torch::nn::Linear(kWidth, kWidth));
        return made;
      });
    }
    comm.Barrier();
    if (comm.rank() == 0) allocator.ResetPeak();
    comm.Barrier();
    std::vector<NamedParameter> parameters;
    for (const auto& item : net->named_parameters())
      parameters.push_back({item.key(), item.value()});
    const ShardedModel model(comm, comm, nullptr, net.get(), std::move(parameters), {},
                             {.strategy = ShardingStrategy::kFull}, true, nullptr,
                             [](const NamedParameter& parameter, bool with_values) {
                               Materialize(parameter.tensor, at::kCPU, parameter.name, with_values);
                             });
    comm.Barrier();
    if (comm.rank() == 0) {
      EXPECT_NEAR(static_cast<double>(allocator.live() - before), kModelBytes, 0.02 * kModelBytes);
      // Of the last unit on both ranks: its values, what they are sent in, and the flat buffers.
      EXPECT_LE(allocator.peak(), allocator.live() + kRanks * 4 * kUnitBytes);
    }
    comm.Barrier();
  });
}

TEST(ShardingMemory, VisitingFullParameters_TakesOneUnit) {
  CountingAllocator& allocator = CountingAllocator::Get(kLarge);
  RunRanks(kRanks, [&](Comm& comm) {
    torch::nn::Sequential net;
    for (int i = 0; i < kUnits; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    std::vector<NamedParameter> parameters;
    for (const auto& item : net->named_parameters())
      parameters.push_back({item.key(), item.value()});
    ShardedModel model(comm, comm, nullptr, net.get(), std::move(parameters), {},
                       {.strategy = ShardingStrategy::kFull});
    comm.Barrier();
    if (comm.rank() == 0) allocator.ResetPeak();
    const int64_t before = allocator.live();
    comm.Barrier();
    int64_t bytes = 0;
    model.VisitFullParameters([&](const std::string&, const at::Tensor& value) {
      bytes += static_cast<int64_t>(value.nbytes());
    });
    EXPECT_EQ(bytes, kModelBytes);
    comm.Barrier();
    // Values, and what they are assembled from.
    if (comm.rank() == 0) {
      EXPECT_LE(allocator.peak(), before + kRanks * 2 * kUnitBytes * 102 / 100);
    }
    comm.Barrier();
  });
}

TEST(ShardingMemory, Gradients_AreWholeForOneUnitAtATime) {
  // ZeRO-1 keeps all of them until the end of the backward pass.
  const Memory one = Measure(ShardingStrategy::kOptimizer);
  const Memory two = Measure(ShardingStrategy::kGradients);
  EXPECT_GE(one.peak, two.peak + kRanks * kModelBytes / 4);
  EXPECT_LE(two.peak, two.between + kRanks * 3 * kUnitBytes * 102 / 100);
}

}  // namespace
}  // namespace muster
