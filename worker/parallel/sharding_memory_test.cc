// The memory of sharded training against the formulas of docs/sharding.md: what LibTorch's
// allocator has given out, counted to the byte, and what ranks have mapped to share.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
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
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/counting_allocator.h"
#include "worker/parallel/ddp.h"
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
// The size of a unit: its parameters or gradients in one buffer, or the gradient of its matrix.
constexpr size_t kLarge = 4 * kWidth * kWidth;

struct Memory {
  int64_t large = 0;    // pieces as large as a unit, the most at a time
  int64_t between = 0;  // after a step, with gradients; on all ranks
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

// The contents of a PartStore: nothing, the parts with their gradients, or only gradients.
enum class Stored { kNothing, kParts, kGradients };

// `group`: the number of ranks that divide one copy.
Memory Measure(ShardingStrategy strategy, Link link = {}, int ranks = kRanks, int group = 0,
               bool reshard = true, Stored stored = Stored::kNothing) {
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
    // Groups are measured without overlap, with which their Comms would have to be ordered.
    const int r = inner.rank();
    ShardedModel model(
        comm, group == 0 ? comm : *copies[r / group][r % group],
        group == 0 ? nullptr : replicas[r % group][r / group].get(), net.get(),
        std::move(parameters), {},
        {.strategy = strategy, .reshard_after_forward = reshard, .overlap = link.overlap}, true,
        thread, nullptr, stored == Stored::kParts ? std::make_unique<MemoryParts>() : nullptr,
        nullptr, stored == Stored::kGradients ? std::make_unique<MemoryParts>() : nullptr);
    FusedAdamW adam(model.shards(), {.lr = 1e-3});
    for (int step = 0; step < 3; ++step) {
      comm.Barrier();
      if (comm.rank() == 0) allocator.ResetPeak();
      comm.Barrier();
      adam.ZeroGrad();
      model.BeginForward(true);
      at::Tensor x = Randn({1, kWidth}, 7).requires_grad_();
      for (int i = 0; i < kUnits; ++i) {
        // The reduction of a unit ends when the previous unit has run backward; that of the first
        // one ends with its own pass.
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
  // Parameters, gradients, and two states of AdamW; on both ranks together.
  const Memory full = Measure(ShardingStrategy::kFull);
  EXPECT_NEAR(static_cast<double>(full.between), 4.0 * kModelBytes, 0.02 * 4 * kModelBytes);
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients}) {
    const double want = (kRanks + 3.0) * kModelBytes;
    EXPECT_NEAR(static_cast<double>(Measure(strategy).between), want, 0.02 * want);
  }
}

// Per rank 16/w bytes of 4 for each parameter, 8 + 8/w, 4 + 12/w: on all ranks, and in groups.
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
    // Whole parameters, the rest divided.
    check(ShardingStrategy::kGradients, ranks, 0, true, ranks + 3);
    check(ShardingStrategy::kOptimizer, ranks, 0, true, ranks + 3);
  }
  // Two copies.
  check(ShardingStrategy::kFull, 4, 2, true, 2 * 4);
  check(ShardingStrategy::kGradients, 4, 2, true, 4 + 2 * 3);
}

// The mappings of this process, whose threads are all ranks, except those of LibTorch's allocator.
class Mapped {
 public:
  Mapped() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      std::istringstream fields(line);
      Mapping mapping;
      std::string rights, device, name;
      char dash = 0;
      fields >> std::hex >> mapping.begin >> dash >> mapping.end >> rights >> mapping.offset >>
          device >> std::dec >> mapping.inode >> name;
      // The buffers of the collectives, which have a fixed size, have another name.
      mapping.shared = name == "/memfd:muster-part" || name == "/memfd:muster-pool";
      if (mapping.shared || mapping.inode == 0) all_.push_back(mapping);
    }
  }
  // Memory files, however often a part of one is mapped.
  int64_t shared() const {
    std::map<uint64_t, std::set<uint64_t>> pages;
    for (const Mapping& mapping : all_) {
      if (!mapping.shared) continue;
      for (uint64_t at = 0; at < mapping.end - mapping.begin; at += kPage) {
        pages[mapping.inode].insert(mapping.offset + at);
      }
    }
    uint64_t bytes = 0;
    for (const auto& [inode, of_file] : pages) bytes += of_file.size() * kPage;
    return static_cast<int64_t>(bytes);
  }
  // The bytes of [data, data + bytes) that lie between memory files and belong to none.
  int64_t beside(const void* data, size_t bytes) const {
    const auto begin = reinterpret_cast<uint64_t>(data);
    uint64_t shared = 0, others = 0;
    for (const Mapping& mapping : all_) {
      const uint64_t from = std::max(begin, mapping.begin);
      const uint64_t to = std::min(begin + bytes, mapping.end);
      if (from < to) (mapping.shared ? shared : others) += to - from;
    }
    return shared == 0 ? 0 : static_cast<int64_t>(others);
  }

 private:
  static constexpr uint64_t kPage = 4096;
  struct Mapping {
    uint64_t begin = 0, end = 0, offset = 0, inode = 0;
    bool shared = false;
  };
  std::vector<Mapping> all_;
};

// The ranks of a host share units of this width.
constexpr int64_t kWide = 544;
constexpr double kWideUnit = 4.0 * (kWide * kWide + kWide);
constexpr int kWideUnits = 8;
constexpr double kWideModel = kWideUnits * kWideUnit;

using Runner = void (*)(int, const std::function<void(Comm&)>&);
void Gloo(int n, const std::function<void(Comm&)>& fn) { RunGlooRanks(n, fn); }
void Shm(int n, const std::function<void(Comm&)>& fn) { RunShmRanks(n, fn); }

// The memory of all ranks after a step, with gradients. `options`: absent for data parallelism.
double MeasureWide(Runner run, int ranks, const std::optional<ShardingOptions>& options,
                   const DataParallelOptions& plain = {}) {
  CountingAllocator& allocator = CountingAllocator::Get(kLarge);
  const int64_t before = allocator.live();
  int64_t bytes = 0;
  Mutex mu;
  run(ranks, [&](Comm& comm) {
    torch::nn::Sequential net;
    for (int i = 0; i < kWideUnits; ++i) net->push_back(torch::nn::Linear(kWide, kWide));
    std::vector<NamedParameter> parameters;
    std::vector<std::string> names;
    for (const auto& item : net->named_parameters()) {
      parameters.push_back({item.key(), item.value()});
      names.push_back(item.key());
    }
    std::unique_ptr<ShardedModel> model;
    std::unique_ptr<DataParallel> whole;
    if (options.has_value()) {
      model = std::make_unique<ShardedModel>(comm, comm, nullptr, net.get(), parameters,
                                             std::vector<at::Tensor>{}, *options);
    } else {
      whole = std::make_unique<DataParallel>(comm, net->parameters(), names,
                                             std::vector<at::Tensor>{}, plain);
    }
    parameters.clear();
    FusedAdamW adam(model != nullptr ? model->shards() : net->parameters(), {.lr = 1e-3});
    // The Reducer orders its buckets after the first step.
    for (int step = 0; step < 2; ++step) {
      adam.ZeroGrad();
      const at::Tensor x = Randn({1, kWide}, 7).requires_grad_();
      const at::ScalarType dtype = options.has_value() && options->parameter_dtype.has_value()
                                       ? *options->parameter_dtype
                                       : at::kFloat;
      if (model != nullptr) {
        model->BeginForward(true);
      } else {
        whole->BeforeForward(true);
      }
      at::Tensor out = net->forward(x.to(dtype));
      if (model != nullptr) {
        model->EndForward();
      } else {
        out = whole->AfterForward(out);
      }
      out.sum().backward();
      out.reset();
      if (model != nullptr) model->Expire();
      adam.Step();
    }
    comm.Barrier();
    // No rank changes anything meanwhile.
    const Mapped mapped;
    {
      const MutexLock lock(&mu);
      std::set<const void*> seen;
      for (const at::Tensor& parameter : net->parameters()) {
        const at::Storage& storage = parameter.storage();
        if (model != nullptr && seen.insert(storage.data()).second) {
          bytes += mapped.beside(storage.data(), storage.nbytes());
        }
      }
      if (comm.rank() == 0) bytes += mapped.shared() + allocator.live() - before;
    }
    comm.Barrier();
  });
  return static_cast<double>(bytes);
}

void ExpectModels(double bytes, double models, double units = 0) {
  const double want = models * kWideModel + units * kWideUnit;
  EXPECT_NEAR(bytes, want, 0.02 * want) << "models: " << bytes / kWideModel;
}

// 16 bytes for each parameter, and a copy of the gradients if they are not the buckets.
TEST(ShardingMemory, DataParallelismBetweenSteps_IsTheFormula) {
  for (const Runner run : {Gloo, Shm}) {
    SCOPED_TRACE(testing::Message() << "shared memory " << (run == Shm));
    ExpectModels(MeasureWide(run, 3, {}, {.gradient_as_bucket_view = true}), 3 * 4);
    ExpectModels(MeasureWide(run, 2, {}, {.gradient_as_bucket_view = false}), 2 * 5);
  }
}

// The default on the CPU, unless MUSTER_SHM=no: shards are memory files, which ranks map. If
// gradients are divided, each rank keeps the buffer of its reductions, as large as a unit.
TEST(ShardingMemory, SharedMemoryBetweenSteps_IsTheFormula) {
  for (const int ranks : {2, 3}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    const auto measure = [&](ShardingStrategy strategy) {
      return MeasureWide(Shm, ranks, ShardingOptions{.strategy = strategy});
    };
    ExpectModels(measure(ShardingStrategy::kFull), 4, ranks);
    ExpectModels(measure(ShardingStrategy::kGradients), ranks + 3, ranks);
    ExpectModels(measure(ShardingStrategy::kOptimizer), ranks + 3);
  }
}

// Whole parameters take 2 bytes, and the values, gradients and AdamW states of a rank's part take 4
// each.
TEST(ShardingMemory, ParametersInBfloat16BetweenSteps_AreTheFormula) {
  for (const auto& [run, ranks] : {std::pair{Runner(Gloo), 2}, std::pair{Runner(Shm), 3}}) {
    SCOPED_TRACE(testing::Message() << "shared memory " << (run == Shm));
    const auto measure = [run = run, ranks = ranks](ShardingStrategy strategy) {
      return MeasureWide(run, ranks,
                         ShardingOptions{.strategy = strategy, .parameter_dtype = at::kBFloat16});
    };
    const double buffers = run == Shm ? ranks : 0;
    ExpectModels(measure(ShardingStrategy::kFull), 4, buffers);
    ExpectModels(measure(ShardingStrategy::kGradients), ranks / 2.0 + 4, buffers);
    ExpectModels(measure(ShardingStrategy::kOptimizer), ranks / 2.0 + 4);
  }
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
    // Gradients that do not exist yet make room in the sum above, but not here.
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

// Parameters and gradients of two units are in memory, and of at most three more in a step; states
// are in memory.
TEST(ShardingMemory, PartsAndGradientsInAStore_AreThoseOfAFewUnits) {
  for (const bool overlap : {true, false}) {
    const Memory memory =
        Measure(ShardingStrategy::kFull, {.overlap = overlap}, kRanks, 0, true, Stored::kParts);
    const double want = 2.0 * kModelBytes + 4 * kUnitBytes;
    EXPECT_NEAR(static_cast<double>(memory.between), want, 0.02 * want);
    EXPECT_LE(memory.peak, memory.between + kRanks * 3 * kUnitBytes * 102 / 100);
  }
}

// Gradients of two units are in memory after a step, and of three in it; parameters and states are
// in memory. Under kOptimizer gradients are whole until they are reduced.
TEST(ShardingMemory, GradientsInAStore_AreThoseOfAFewUnits) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    for (const bool overlap : {true, false}) {
      SCOPED_TRACE(testing::Message()
                   << "strategy " << static_cast<int>(strategy) << ", overlap " << overlap);
      const auto measure = [&](Stored stored) {
        return Measure(strategy, {.overlap = overlap}, kRanks, 0, true, stored);
      };
      const Memory memory = measure(Stored::kGradients), plain = measure(Stored::kNothing);
      const double parameters = strategy == ShardingStrategy::kFull ? 1 : kRanks;
      const double want = (parameters + 2) * kModelBytes + 2 * kUnitBytes;
      EXPECT_NEAR(static_cast<double>(memory.between), want, 0.02 * want);
      // The difference is the parts of gradients of the other units.
      EXPECT_NEAR(static_cast<double>(plain.between - memory.between),
                  kModelBytes - 2.0 * kUnitBytes, 0.02 * kModelBytes);
      if (strategy == ShardingStrategy::kOptimizer) continue;
      EXPECT_LE(memory.peak, memory.between + (kRanks * 3 + 1) * kUnitBytes * 102 / 100);
      EXPECT_LE(memory.peak, plain.peak - (kUnits - 6) * kUnitBytes);
    }
  }
}

TEST(ShardingMemory, DeferredModel_IsMadeUnitByUnit) {
  CountingAllocator& allocator = CountingAllocator::Get(kLarge);
  Mutex mu;
  const int64_t before = allocator.live();
  RunRanks(kRanks, [&](Comm& comm) {
    torch::nn::Sequential net;
    {
      MutexLock lock(&mu);  // there is one generator for the process
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
      // For the last unit on both ranks: its values, the buffers they are sent in, and the flat
      // buffers.
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
    // The values, and what they are assembled from.
    if (comm.rank() == 0) {
      EXPECT_LE(allocator.peak(), before + kRanks * 2 * kUnitBytes * 102 / 100);
    }
    comm.Barrier();
  });
}

TEST(ShardingMemory, Gradients_AreWholeForOneUnitAtATime) {
  // ZeRO-1 keeps all gradients until the end of the backward pass.
  const Memory one = Measure(ShardingStrategy::kOptimizer);
  const Memory two = Measure(ShardingStrategy::kGradients);
  EXPECT_GE(one.peak, two.peak + kRanks * kModelBytes / 4);
  EXPECT_LE(two.peak, two.between + kRanks * 3 * kUnitBytes * 102 / 100);
}

}  // namespace
}  // namespace muster
