#include "worker/parallel/uneven_inputs.h"

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/test_net.h"
#include "worker/train/accumulation.h"
#include "worker/train/clip.h"
#include "worker/train/optimizer.h"
#include "worker/train/sync_state.h"

namespace muster {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

using Runner = void (*)(int, const std::function<void(Comm&)>&);
void Gloo(int n, const std::function<void(Comm&)>& fn) { RunGlooRanks(n, fn); }

struct Result {
  std::vector<std::vector<at::Tensor>> parameters;
  std::vector<std::string> syncs;
};

// `batches[r]` batches on rank r; the gradient of a batch is that of one sample.
Result Train(Runner run, const std::vector<int>& batches, int64_t accumulate,
             const DataParallelOptions& ddp_options = {}, const UnevenInputsOptions& options = {}) {
  const int ranks = static_cast<int>(batches.size());
  Result result{std::vector<std::vector<at::Tensor>>(ranks), std::vector<std::string>(ranks)};
  run(ranks, [&](Comm& comm) {
    TestNet net(3);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers, ddp_options);
    FusedSGD sgd(net.parameters, {.lr = 0.1, .momentum = 0.9});
    Accumulation accumulation({.num_steps = accumulate});
    UnevenInputs join(comm, {&ddp}, options);
    for (int epoch = 0; epoch < 1; ++epoch) {
      for (int i = 0; i < batches[comm.rank()]; ++i) {
        const BatchFacts facts{.is_last = i + 1 == batches[comm.rank()]};
        const auto decision = join.MicroStep(accumulation.WouldSync(facts));
        const MicroStep step = accumulation.Begin(facts, decision.sync);
        result.syncs[comm.rank()] += step.sync ? 'S' : '.';
        ddp.BeforeForward(step.communicate);
        const at::Tensor out =
            ddp.AfterForward(net.Forward(Randn({1, 6}, 50 + 10 * i + comm.rank())));
        out.square().sum().div(step.divisor).backward();
        if (step.sync) {
          ScaleGradients(net.parameters, step.gradient_factor * decision.gradient_factor);
          sgd.Step();
          sgd.ZeroGrad();
        }
      }
      join.Finish([&](int root) { BroadcastOptimizerState(comm, sgd, root); });
      sgd.ZeroGrad();
    }
    // One more common step, which shows whether optimizer state is equal too.
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Randn({1, 6}, 999))).sum().backward();
    sgd.Step();
    result.parameters[comm.rank()] = net.parameters;
  });
  return result;
}

// One process: batch i of every rank that has one, the sum divided by the number of ranks (all, or
// those active).
std::vector<at::Tensor> Reference(const std::vector<int>& batches, bool divide_by_all) {
  TestNet net(3);
  FusedSGD sgd(net.parameters, {.lr = 0.1, .momentum = 0.9});
  for (int i = 0;; ++i) {
    int active = 0;
    for (const int n : batches) active += i < n;
    if (active == 0) break;
    for (size_t r = 0; r < batches.size(); ++r) {
      if (i >= batches[r]) continue;
      const double divisor = divide_by_all ? static_cast<double>(batches.size()) : active;
      net.Forward(Randn({1, 6}, 50 + 10 * i + static_cast<int>(r)))
          .square()
          .sum()
          .div(divisor)
          .backward();
    }
    sgd.Step();
    sgd.ZeroGrad();
  }
  net.Forward(Randn({1, 6}, 999)).sum().backward();
  sgd.Step();
  return net.parameters;
}

void ExpectNear(const Result& result, const std::vector<at::Tensor>& expected) {
  for (const auto& rank : result.parameters) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(rank[i].equal(result.parameters[0][i]))
          << "parameter " << i << " differs between ranks";
      EXPECT_LT(rank[i].sub(expected[i]).abs().max().item<double>(), 2e-6);
    }
  }
}

TEST(UnevenInputs, D36_RanksRunOut_OthersTrainOnOnEveryBackend) {
  for (const std::vector<int>& batches :
       {std::vector<int>{3, 7}, {7, 3}, {2, 5, 4}, {4, 4}, {0, 2}}) {
    for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
      ExpectNear(Train(run, batches, 1), Reference(batches, /*divide_by_all=*/true));
    }
  }
}

TEST(UnevenInputs, DivideByActiveRanks_WeighsThemFully) {
  ExpectNear(Train(Gloo, {3, 7}, 1, {}, {.divide_by_initial_world_size = false}),
             Reference({3, 7}, /*divide_by_all=*/false));
}

TEST(UnevenInputs, ReducerOptions_Match) {
  ExpectNear(Train(Gloo, {2, 6}, 1, {.bucket_cap_mb = 1e-4, .find_unused_parameters = true}),
             Reference({2, 6}, true));
  ExpectNear(Train(Gloo, {6, 2}, 1, {.bucket_cap_mb = 1e-4}), Reference({6, 2}, true));
}

TEST(UnevenInputs, Accumulation_AllRanksSyncTogether) {
  const Result result = Train(Gloo, {3, 7}, 2);
  // Rank 0's last batch ends rank 1's window too.
  EXPECT_EQ(result.syncs[0], ".SS");
  EXPECT_EQ(result.syncs[1], ".SS.S.S");
  for (size_t i = 0; i < result.parameters[0].size(); ++i) {
    EXPECT_TRUE(result.parameters[0][i].equal(result.parameters[1][i]));
  }
}

TEST(UnevenInputs, Buffers_AreThoseOfARankThatStillTrains) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    run(2, [](Comm& comm) {
      TestNet net(3);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers);
      UnevenInputs join(comm, {&ddp});
      for (int i = 0; i < (comm.rank() == 0 ? 1 : 4); ++i) {
        join.MicroStep(true);
        ddp.BeforeForward(true);
        ddp.AfterForward(net.Forward(Randn({1, 6}, 10 * i + comm.rank()))).sum().backward();
        EXPECT_EQ(net.buffers[0].item<float>(), i + 1);
        EXPECT_TRUE(ddp.UnexchangedGradients().empty());
      }
      join.Finish();
      EXPECT_EQ(net.buffers[0].item<float>(), 4);
    });
  }
}

// Where the loop's body freezes parameters.
enum class Freezes { kBehindTheFirstStep, kBeforeTheMicroStep, kBeforeTheForwardPass };

// Rank 0 has one batch and rank 1 has four. Freezes parameters [first, end) behind the first step,
// on both ranks, or in the second one, on rank 1; the ranks then train on together.
void ExpectFrozenAreFollowed(Runner run, Freezes where, size_t first) {
  std::vector<std::vector<at::Tensor>> gradients(2);
  run(2, [&](Comm& comm) {
    TestNet net(3);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    const auto set_trained = [&](bool trained) {
      for (size_t p = first; p < net.parameters.size(); ++p) {
        net.parameters[p].set_requires_grad(trained);
        net.parameters[p].mutable_grad().reset();
      }
    };
    // The input requires a gradient, as that of a discriminator does while the generator trains.
    const auto pass = [&](int i) {
      ddp.BeforeForward(true);
      const at::Tensor x = Randn({1, 6}, 10 * i + comm.rank()).requires_grad_(true);
      ddp.AfterForward(net.Forward(x)).square().sum().backward();
      EXPECT_TRUE(ddp.UnexchangedGradients().empty());
    };
    UnevenInputs join(comm, {&ddp});
    for (int i = 0; i < (comm.rank() == 0 ? 1 : 4); ++i) {
      if (i == 1 && where == Freezes::kBeforeTheMicroStep) set_trained(false);
      join.MicroStep(true);
      if (i == 1 && where == Freezes::kBeforeTheForwardPass) set_trained(false);
      pass(i);
      if (i == 0 && where == Freezes::kBehindTheFirstStep) set_trained(false);
    }
    join.Finish();
    for (size_t p = 0; p < net.parameters.size(); ++p) {
      EXPECT_EQ(net.parameters[p].requires_grad(), p < first) << p;
      net.parameters[p].mutable_grad().reset();
    }
    set_trained(true);
    pass(9);
    for (const at::Tensor& parameter : net.parameters) {
      gradients[comm.rank()].push_back(parameter.grad());
    }
  });
  for (size_t p = 0; p < gradients[0].size(); ++p) {
    EXPECT_TRUE(gradients[0][p].equal(gradients[1][p])) << p;
  }
}

TEST(UnevenInputs, ModelThatIsFrozen_ExchangesNothingAnyMore) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    for (const Freezes where : {Freezes::kBehindTheFirstStep, Freezes::kBeforeTheMicroStep,
                                Freezes::kBeforeTheForwardPass}) {
      ExpectFrozenAreFollowed(run, where, /*first=*/0);
    }
  }
}

TEST(UnevenInputs, ParametersThatAreFrozen_AreFollowed) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    for (const Freezes where : {Freezes::kBehindTheFirstStep, Freezes::kBeforeTheMicroStep}) {
      ExpectFrozenAreFollowed(run, where, /*first=*/2);
    }
  }
}

// The ranks without a batch are in the exchange of the micro-step by then.
TEST(UnevenInputs, ParameterFrozenWithinAMicroStep_IsNamed) {
  RunGlooRanks(2, [](Comm& comm) {
    TestNet net(3);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    UnevenInputs join(comm, {&ddp});
    if (comm.rank() == 0) {
      // Until the other rank is gone.
      EXPECT_THROW(join.Finish(), std::exception);
      return;
    }
    join.MicroStep(true);
    net.parameters[3].set_requires_grad(false);
    EXPECT_THAT(ErrorOf([&] { ddp.BeforeForward(true); }),
                HasSubstr("rank 1 changed requires_grad of parameter 'fc2.bias' after "
                          "accumulate() inside join_uneven_inputs()"));
  });
}

TEST(UnevenInputs, ParameterFrozenOnSomeRanksWithBatches_IsNamedOnAllRanks) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    std::vector<std::string> errors(3);
    run(3, [&](Comm& comm) {
      TestNet net(3);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers);
      UnevenInputs join(comm, {&ddp});
      if (comm.rank() == 2) net.parameters[3].set_requires_grad(false);
      errors[comm.rank()] = ErrorOf([&] {
        if (comm.rank() == 0) return join.Finish();
        join.MicroStep(true);
      });
    });
    EXPECT_THAT(errors, Each(HasSubstr("parameter 3 (of shape [3]) of prepared model 0 is trained "
                                       "on rank 1 and frozen on rank 2")));
  }
}

TEST(UnevenInputs, SparseGradients_AreRefusedByName) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor table = Randn({10, 3}, 5).requires_grad_(true);
    DataParallel ddp(comm, {table}, {"table"}, {}, {}, {true});
    try {
      UnevenInputs join(comm, {&ddp});
      ADD_FAILURE() << "accepted";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("sparse gradient of parameter 'table'"),
                std::string::npos);
    }
  });
}

TEST(UnevenInputs, StaticGraph_IsRefused) {
  EXPECT_THROW(Train(Gloo, {1, 2}, 1, {.static_graph = true}), c10::Error);
}

}  // namespace
}  // namespace muster
