#include "worker/parallel/ddp.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <latch>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>

#include "ATen/core/grad_mode.h"
#include "ATen/core/ivalue.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/batch_norm.h"
#include "ATen/ops/embedding.h"
#include "ATen/ops/full.h"
#include "ATen/ops/linalg_svdvals.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/tensor.h"
#include "absl/cleanup/cleanup.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/collective_error.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/observed_comm.h"
#include "worker/collective/progress_board.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/test_net.h"
#include "worker/train/accumulation.h"
#include "worker/train/optimizer.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Runner = void (*)(int, const std::function<void(Comm&)>&);
void Gloo(int n, const std::function<void(Comm&)>& fn) { RunGlooRanks(n, fn); }
void Shm(int n, const std::function<void(Comm&)>& fn) { RunShmRanks(n, fn); }

constexpr int kSteps = 8;
constexpr int kRanks = 2;

// Returns the sample data of one micro-step of one rank.
at::Tensor Input(int step, int rank) { return Randn({4, 6}, 1000 + step * 10 + rank); }
at::Tensor Target(int step, int rank) { return Randn({4, 3}, 5000 + step * 10 + rank); }

// Returns the result of one process over both ranks' batches, with windows of two micro-steps.
std::vector<at::Tensor> Reference(bool use_last_bias = true) {
  TestNet net(7);
  FusedSGD sgd(net.parameters, {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < kSteps; ++step) {
    for (int rank = 0; rank < kRanks; ++rank) {
      at::mse_loss(net.Forward(Input(step, rank), use_last_bias), Target(step, rank))
          .div(2.0 * kRanks)
          .backward();
    }
    if (step % 2 == 1) {
      sgd.Step();
      sgd.ZeroGrad();
    }
  }
  return net.parameters;
}

// Trains the same on real ranks; returns the parameters of all ranks.
std::vector<std::vector<at::Tensor>> Train(
    const DataParallelOptions& options, bool use_last_bias = true,
    void (*run)(int, const std::function<void(Comm&)>&) = nullptr) {
  std::vector<std::vector<at::Tensor>> results(kRanks);
  const auto rank_main = [&](Comm& comm) {
    TestNet net(7 + 100 * comm.rank());  // rank 0's weights must win
    DataParallel ddp(comm, net.parameters, net.names, net.buffers, options);
    FusedSGD sgd(net.parameters, {.lr = 0.1, .momentum = 0.9});
    Accumulation accumulation({.num_steps = 2});
    for (int step = 0; step < kSteps; ++step) {
      const MicroStep micro = accumulation.Begin(std::nullopt);
      ddp.BeforeForward(micro.communicate);
      const at::Tensor out = ddp.AfterForward(net.Forward(Input(step, comm.rank()), use_last_bias));
      at::mse_loss(out, Target(step, comm.rank())).div(micro.divisor).backward();
      if (micro.sync) {
        sgd.Step();
        sgd.ZeroGrad(options.gradient_as_bucket_view ? GradZeroing::kInPlace
                                                     : GradZeroing::kSetToNone);
      }
    }
    results[comm.rank()] = net.parameters;
  };
  if (run != nullptr) {
    run(kRanks, rank_main);
  } else {
    RunGlooRanks(kRanks, rank_main);
  }
  return results;
}

void ExpectEqualRanks(const std::vector<std::vector<at::Tensor>>& ranks) {
  for (size_t i = 0; i < ranks[0].size(); ++i) {
    for (size_t r = 1; r < ranks.size(); ++r) {
      EXPECT_TRUE(ranks[0][i].equal(ranks[r][i]))
          << "parameter " << i << " differs between the ranks 0 and " << r;
    }
  }
}

double Distance(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double max = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    max = std::max(max, a[i].sub(b[i]).abs().max().item<double>());
  }
  return max;
}

TEST(DataParallel, AllModes_EqualOneProcess) {
  const std::vector<at::Tensor> expected = Reference();
  const DataParallelOptions modes[] = {
      {},
      {.bucket_cap_mb = 1e-4},
      {.gradient_as_bucket_view = true},
      {.find_unused_parameters = true},
      {.static_graph = true},
      {.bucket_cap_mb = 1e-4, .find_unused_parameters = true, .gradient_as_bucket_view = true},
      {.static_graph = true, .gradient_as_bucket_view = true},
  };
  for (const Runner run : {Gloo, Shm}) {
    for (const DataParallelOptions& mode : modes) {
      const auto ranks = Train(mode, /*use_last_bias=*/true, run);
      ExpectEqualRanks(ranks);
      EXPECT_LT(Distance(ranks[0], expected), 2e-6)
          << "bucket_cap_mb " << mode.bucket_cap_mb << " unused " << mode.find_unused_parameters
          << " static " << mode.static_graph << " view " << mode.gradient_as_bucket_view;
    }
  }
}

TEST(DataParallel, FiftyStepsOnOneToFourRanks_EqualOneProcess_TwoRunsAreEqualToTheBit) {
  constexpr int kLong = 50;
  // Every rank's part of a batch of 12 samples.
  const auto loss = [](TestNet& net, int step, int rank, int ranks) {
    const at::Tensor x = Randn({12, 6}, 1000 + step), y = Randn({12, 3}, 5000 + step);
    return at::mse_loss(net.Forward(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]);
  };
  TestNet want(7);
  FusedSGD of_want(want.parameters, {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < kLong; ++step) {
    loss(want, step, 0, 1).backward();
    of_want.Step();
    of_want.ZeroGrad();
  }
  const TestNet start(7);
  // ‖got - want‖ / ‖want - start‖ over all parameters.
  const auto distance = [&](const std::vector<at::Tensor>& got) {
    double off = 0, moved = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      off += (got[i] - want.parameters[i]).to(at::kDouble).square().sum().item<double>();
      moved +=
          (want.parameters[i] - start.parameters[i]).to(at::kDouble).square().sum().item<double>();
    }
    return std::sqrt(off / moved);
  };
  const auto train = [&](Runner run, int ranks, const DataParallelOptions& options) {
    std::vector<std::vector<at::Tensor>> results(ranks);
    run(ranks, [&](Comm& comm) {
      TestNet net(7);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers, options);
      FusedSGD sgd(net.parameters, {.lr = 0.1, .momentum = 0.9});
      for (int step = 0; step < kLong; ++step) {
        ddp.BeforeForward(true);
        ddp.AfterForward(loss(net, step, comm.rank(), ranks)).backward();
        sgd.Step();
        sgd.ZeroGrad();
      }
      results[comm.rank()] = net.parameters;
    });
    return results;
  };
  const DataParallelOptions small = {.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true};
  for (const auto& [run, options] :
       {std::pair{Runner(Gloo), DataParallelOptions{}}, std::pair{Runner(Shm), small},
        std::pair{Runner(RunRanks), DataParallelOptions{}}}) {
    for (const int ranks : {1, 2, 3, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, shared memory " << (run == Shm));
      const auto results = train(run, ranks, options);
      ExpectEqualRanks(results);
      EXPECT_LE(distance(results[0]), 1e-6);
      const auto again = train(run, ranks, options);
      for (size_t i = 0; i < results[0].size(); ++i) {
        EXPECT_TRUE(results[0][i].equal(again[0][i])) << "parameter " << i;
      }
    }
  }
}

// No gradient is multiplied before the sum: the result is the mean, to the last bit.
TEST(DataParallel, RanksThatShareMemory_DivideTheSum) {
  const auto gradient = [](int rank) { return Randn({300}, 50 + static_cast<uint64_t>(rank)); };
  const at::Tensor want = gradient(0).add(gradient(1)).add(gradient(2)).div(3);
  for (const bool view : {false, true}) {
    RunShmRanks(3, [&](Comm& comm) {
      const at::Tensor weight = at::zeros({300}).requires_grad_();
      DataParallel ddp(comm, {weight}, {"weight"}, {}, {.gradient_as_bucket_view = view});
      for (int step = 0; step < 2; ++step) {
        weight.mutable_grad().reset();
        ddp.BeforeForward(true);
        ddp.AfterForward(weight.mul(gradient(comm.rank())).sum()).backward();
        EXPECT_TRUE(at::equal(weight.grad(), want));
      }
    });
  }
}

// Returns the mapping of this process at `address`, as named in /proc.
std::string MappedAt(const void* address) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream fields(line);
    fields >> std::hex >> begin >> dash >> end;
    const auto value = reinterpret_cast<uintptr_t>(address);
    if (value >= begin && value < end) return line;
  }
  return "";
}

TEST(DataParallel, RanksOfOneHostAndOfTwo_ExchangeBucketsInPlace_AndTrainTheSame) {
  constexpr int kWide = 120;  // a bucket is larger than the limit for copies
  const auto loss = [](const std::vector<at::Tensor>& w, int step, int rank) {
    const at::Tensor x = Randn({5, kWide}, 100 + step * 10 + rank);
    return at::linear(at::tanh(at::linear(x, w[0])), w[1]).square().mean();
  };
  const auto make = [] {
    std::vector<at::Tensor> w = {Randn({kWide, kWide}, 1).div_(10),
                                 Randn({kWide, kWide}, 2).div_(10)};
    for (at::Tensor& each : w) each.requires_grad_(true);
    return w;
  };
  const auto one_process = [&](int ranks) {
    std::vector<at::Tensor> w = make();
    FusedSGD sgd(w, {.lr = 0.5, .momentum = 0.9});
    for (int step = 0; step < kSteps; ++step) {
      for (int rank = 0; rank < ranks; ++rank) loss(w, step, rank).div(ranks).backward();
      sgd.Step();
      sgd.ZeroGrad();
    }
    return w;
  };
  // The host of each rank.
  for (const std::string hosts : {"aa", "ab", "aabb", "aba"}) {
    const std::vector<at::Tensor> expected = one_process(static_cast<int>(hosts.size()));
    for (const DataParallelOptions& mode :
         {DataParallelOptions{}, DataParallelOptions{.gradient_as_bucket_view = true},
          DataParallelOptions{.bucket_cap_mb = 0.03, .gradient_as_bucket_view = true},
          DataParallelOptions{.find_unused_parameters = true, .gradient_as_bucket_view = true},
          DataParallelOptions{.static_graph = true},
          DataParallelOptions{.comm_hook = CommHook::kBf16}}) {
      std::vector<std::vector<at::Tensor>> ranks(hosts.size());
      RunHostRanks(hosts, [&](Comm& comm) {
        std::vector<at::Tensor> w = make();
        DataParallel ddp(comm, w, {"a", "b"}, {}, mode);
        FusedSGD sgd(w, {.lr = 0.5, .momentum = 0.9});
        for (int step = 0; step < kSteps; ++step) {
          ddp.BeforeForward(true);
          ddp.AfterForward(loss(w, step, comm.rank())).backward();
          const bool alone = std::count(hosts.begin(), hosts.end(), hosts[comm.rank()]) == 1;
          if (mode.gradient_as_bucket_view && step > 0 && !alone) {
            EXPECT_THAT(MappedAt(w[0].grad().const_data_ptr()), HasSubstr("muster-pool"));
          }
          sgd.Step();
          sgd.ZeroGrad(step % 2 == 0 ? GradZeroing::kInPlace : GradZeroing::kSetToNone);
        }
        ranks[comm.rank()] = w;
      });
      ExpectEqualRanks(ranks);
      EXPECT_LT(Distance(ranks[0], expected), mode.comm_hook == CommHook::kBf16 ? 1e-3 : 2e-6);
    }
  }
}

TEST(DataParallel, WithoutProcessGroup_EqualsOneProcess) {
  const auto ranks = Train({}, true, RunRanks);
  ExpectEqualRanks(ranks);
  EXPECT_LT(Distance(ranks[0], Reference()), 2e-6);
}

TEST(DataParallel, CompressingHooks_StayNearAndEqualOnAllRanks) {
  const std::vector<at::Tensor> expected = Reference();
  for (const auto& [hook, tolerance] :
       {std::pair{CommHook::kFp16, 2e-3}, std::pair{CommHook::kBf16, 1e-2}}) {
    const auto ranks = Train({.comm_hook = hook});
    ExpectEqualRanks(ranks);
    const double distance = Distance(ranks[0], expected);
    EXPECT_LT(distance, tolerance);
    EXPECT_GT(distance, 1e-7);
  }
}

TEST(DataParallel, PowerSgd_FullRankIsExactLowRankIsEqualOnAllRanks) {
  const std::vector<at::Tensor> expected = Reference();
  // Rank 3 is the full rank of the 3 x 16 matrix; 16 x 6 has rank 6.
  const auto exact = Train(
      {.comm_hook = CommHook::kPowerSgd,
       .power_sgd = {
           .matrix_approximation_rank = 6, .start_powerSGD_iter = 2, .min_compression_rate = 0.1}});
  ExpectEqualRanks(exact);
  EXPECT_LT(Distance(exact[0], expected), 1e-4);
  for (const CommHook hook : {CommHook::kPowerSgd, CommHook::kBatchedPowerSgd}) {
    const auto low =
        Train({.comm_hook = hook,
               .power_sgd = {.matrix_approximation_rank = 1, .start_powerSGD_iter = 2}});
    ExpectEqualRanks(low);
    EXPECT_LT(Distance(low[0], expected), 0.5);
    EXPECT_GT(Distance(low[0], expected), 1e-6);
  }
}

TEST(DataParallel, PowerSgd_GoesOnCompressingWhenOtherParametersAreTrained) {
  for (const bool error_feedback : {false, true}) {
    DataParallelOptions options{.comm_hook = CommHook::kPowerSgd};
    options.power_sgd.start_powerSGD_iter = 3;
    options.power_sgd.use_error_feedback = error_feedback;
    std::vector<std::vector<at::Tensor>> ranks(kRanks);
    RunGlooRanks(kRanks, [&](Comm& comm) {
      TestNet net(7);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers, options);
      FusedSGD sgd(net.parameters, {.lr = 0.1});
      for (int step = 0; step < 12; ++step) {
        net.parameters[3].set_requires_grad(step / 2 % 2 == 0);
        ddp.BeforeForward(true);
        const at::Tensor out = ddp.AfterForward(net.Forward(Input(step, comm.rank())));
        at::mse_loss(out, Target(step, comm.rank())).backward();
        const at::Tensor sizes = at::linalg_svdvals(net.parameters[0].grad());
        const double second = (sizes[1] / sizes[0]).item<double>();
        // Only the first steps are exact.
        EXPECT_EQ(second > 1e-4, step < 3) << step << " " << second;
        sgd.Step();
        sgd.ZeroGrad();
      }
      ranks[comm.rank()] = net.parameters;
    });
    ExpectEqualRanks(ranks);
  }
}

TEST(DataParallel, PowerSgdInHalf_TakesZeroAndLargeGradients) {
  for (const bool batched : {false, true}) {
    DataParallelOptions options{
        .comm_hook = batched ? CommHook::kBatchedPowerSgd : CommHook::kPowerSgd,
        .comm_wrapper = CommWrapper::kFp16};
    options.power_sgd.start_powerSGD_iter = 2;
    RunGlooRanks(kRanks, [&](Comm& comm) {
      TestNet net(7);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers, options);
      for (int step = 0; step < 6; ++step) {
        // One parameter is unused until a later step, like a branch that is not used yet; and in an
        // exact step a sum exceeds fp16.
        const double large = step == 1 ? 40000 : 1;
        const double used = step > 4 ? 1 : 0;
        ddp.BeforeForward(true);
        at::Tensor loss = used * net.parameters[2].sum();
        for (const size_t i : {0, 1, 3}) loss = loss + large * net.parameters[i].sum();
        ddp.AfterForward(loss).backward();
        for (size_t i = 0; i < net.parameters.size(); ++i) {
          EXPECT_TRUE(net.parameters[i].grad().isfinite().all().item<bool>()) << step << " " << i;
          net.parameters[i].mutable_grad().reset();
        }
      }
    });
  }
}

// The errors that compression has kept are in units of the loss scale of their step.
TEST(DataParallel, PowerSgd_ErrorFollowsTheLossScale) {
  for (const CommHook hook : {CommHook::kPowerSgd, CommHook::kBatchedPowerSgd}) {
    DataParallelOptions options{.comm_hook = hook};
    options.power_sgd.start_powerSGD_iter = 2;
    // Returns the gradients of each step, divided by its scale.
    const auto gradients = [&](const std::vector<double>& scales) {
      std::vector<at::Tensor> of_rank_0;
      RunGlooRanks(kRanks, [&](Comm& comm) {
        TestNet net(7);
        DataParallel ddp(comm, net.parameters, net.names, net.buffers, options);
        for (size_t step = 0; step < scales.size(); ++step) {
          ddp.set_loss_scale(at::full({}, scales[step], at::kFloat));
          ddp.BeforeForward(true);
          const at::Tensor out =
              ddp.AfterForward(net.Forward(Input(static_cast<int>(step), comm.rank())));
          (at::mse_loss(out, Target(static_cast<int>(step), comm.rank())) * scales[step])
              .backward();
          for (at::Tensor& parameter : net.parameters) {
            if (comm.rank() == 0) of_rank_0.push_back(parameter.grad() / scales[step]);
            parameter.mutable_grad().reset();
          }
        }
      });
      return of_rank_0;
    };
    const auto want = gradients({1, 1, 1, 1, 1, 1, 1});
    const auto got = gradients({1, 1, 1, 1024, 1024, 512, 0.25});
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(at::allclose(got[i], want[i], 1e-4, 1e-6)) << i;
    }
  }
}

TEST(DataParallel, PowerSgd_CompressesWhatHadNoGradientForAStep) {
  DataParallelOptions options{.comm_hook = CommHook::kPowerSgd};
  options.power_sgd.start_powerSGD_iter = 2;
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers, options);
    for (int step = 0; step < 6; ++step) {
      // A branch that is not used in the first compressed steps.
      const double used = step > 3 ? 1 : 0;
      ddp.BeforeForward(true);
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& parameter : net.parameters) loss = loss + used * parameter.sum();
      ddp.AfterForward(loss).backward();
      for (size_t i = 0; i < net.parameters.size(); ++i) {
        at::Tensor& grad = net.parameters[i].mutable_grad();
        // A matrix of ones has rank 1.
        EXPECT_TRUE(at::allclose(grad, at::full_like(grad, used), 1e-3, 1e-3)) << step << " " << i;
        grad.reset();
      }
    }
  });
}

// Gradients that overflow concern only a step that is skipped.
TEST(DataParallel, PowerSgd_ForgetsGradientsThatAreNotFinite) {
  for (const CommHook hook : {CommHook::kPowerSgd, CommHook::kBatchedPowerSgd}) {
    for (const bool error_feedback : {false, true}) {
      DataParallelOptions options{.comm_hook = hook};
      options.power_sgd.start_powerSGD_iter = 2;
      options.power_sgd.use_error_feedback = error_feedback;
      RunGlooRanks(kRanks, [&](Comm& comm) {
        TestNet net(7);
        DataParallel ddp(comm, net.parameters, net.names, net.buffers, options);
        for (int step = 0; step < 8; ++step) {
          const bool overflows = step == 4 && comm.rank() == 1;
          ddp.BeforeForward(true);
          const at::Tensor out = ddp.AfterForward(net.Forward(Input(step, comm.rank())));
          const double scale = overflows ? std::numeric_limits<double>::infinity() : 1;
          (at::mse_loss(out, Target(step, comm.rank())) * scale).backward();
          for (size_t i = 0; i < net.parameters.size(); ++i) {
            EXPECT_EQ(net.parameters[i].grad().isfinite().all().item<bool>(), step != 4)
                << step << " " << i;
            net.parameters[i].mutable_grad().reset();
          }
        }
      });
    }
  }
}

TEST(DataParallel, WrappedHooks_AreEqualOnAllRanks) {
  const std::vector<at::Tensor> expected = Reference();
  for (const CommHook hook : {CommHook::kNone, CommHook::kBf16, CommHook::kPowerSgd}) {
    const auto ranks = Train({.comm_hook = hook,
                              .comm_wrapper = CommWrapper::kBf16,
                              .power_sgd = {.matrix_approximation_rank = 6,
                                            .start_powerSGD_iter = 2,
                                            .min_compression_rate = 0.1}});
    ExpectEqualRanks(ranks);
    EXPECT_LT(Distance(ranks[0], expected), 3e-2);
  }
}

TEST(CommHook, Names_AreParsed) {
  EXPECT_EQ(ParseCommHook("batched_power_sgd"), CommHook::kBatchedPowerSgd);
  EXPECT_THAT(ErrorOf([] { ParseCommHook("powersgd"); }), HasSubstr("choose no, fp16"));
  EXPECT_EQ(ParseCommWrapper("fp16"), CommWrapper::kFp16);
  EXPECT_THAT(ErrorOf([] { ParseCommWrapper("fp8"); }), HasSubstr("choose no, fp16"));
}

TEST(DataParallel, UnusedParameter_WithFindUnused_Trains) {
  for (const Runner run : {Gloo, Shm}) {
    const auto ranks = Train({.find_unused_parameters = true}, /*use_last_bias=*/false, run);
    ExpectEqualRanks(ranks);
    EXPECT_LT(Distance(ranks[0], Reference(/*use_last_bias=*/false)), 2e-6);
  }
}

TEST(DataParallel, UnusedParametersThatChange_Train) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers,
                     {.find_unused_parameters = true});
    for (int step = 0; step < 6; ++step) {
      ddp.BeforeForward(true);
      ddp.AfterForward(net.Forward(Input(step, comm.rank()), /*use_last_bias=*/step % 3 != 1))
          .sum()
          .backward();
    }
    EXPECT_TRUE(net.parameters.back().grad().defined());
  });
}

TEST(DataParallel, UnusedParameter_WithoutFindUnused_IsNamed) {
  std::string error;
  std::mutex mu;
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    const std::string text = ErrorOf([&] {
      for (int step = 0; step < 2; ++step) {
        ddp.BeforeForward(true);
        ddp.AfterForward(net.Forward(Input(step, comm.rank()), /*use_last_bias=*/false))
            .sum()
            .backward();
      }
    });
    std::lock_guard<std::mutex> lock(mu);
    error = text;
    EXPECT_THAT(text, HasSubstr("parameters fc2.bias got no gradient"));
    EXPECT_THAT(text, HasSubstr("find_unused_parameters"));
  });
}

TEST(DataParallel, ModelsThatDiffer_AreNamedOnEveryRank) {
  std::mutex mu;
  int errors = 0;
  const auto expect = [&](const std::function<void(Comm&, TestNet&)>& change, const char* words) {
    errors = 0;
    RunRanks(3, [&](Comm& comm) {
      TestNet net(7);
      if (comm.rank() == 2) change(comm, net);
      const std::string text =
          ErrorOf([&] { DataParallel ddp(comm, net.parameters, net.names, net.buffers); });
      std::lock_guard<std::mutex> lock(mu);
      EXPECT_THAT(text, HasSubstr(words));
      ++errors;
    });
    EXPECT_EQ(errors, 3);
  };
  expect(
      [](Comm&, TestNet& net) {
        net.parameters[2] = at::zeros({3, 17}).requires_grad_(true);
      },
      "parameter 2 is 'fc2.weight' [3, 16] Float on rank 0 but 'fc2.weight' [3, 17] Float on rank "
      "2");
  expect(
      [](Comm&, TestNet& net) {
        net.parameters[1] = at::zeros({16}, at::kDouble).requires_grad_(true);
      },
      "'fc1.bias' [16] Double on rank 2");
  expect([](Comm&, TestNet& net) { net.parameters[3].requires_grad_(false); },
         "without gradient on rank 2");
  expect(
      [](Comm&, TestNet& net) {
        net.parameters.pop_back();
        net.names.pop_back();
      },
      "rank 0 has 4 parameters and rank 2 has 3");
  // The exchange adds up gradients by place in memory.
  expect(
      [](Comm&, TestNet& net) {
        net.parameters[2].set_data(net.parameters[2].detach().t().contiguous().t());
      },
      "parameter 2, 'fc2.weight' [3, 16] Float, lies in memory with strides [16, 1] on rank 0 but "
      "[1, 3] on rank 2");
}

TEST(DataParallel, StridesThatPlaceElementsAlike_AreTheSameModel) {
  RunRanks(2, [](Comm& comm) {
    // One column, with any stride; and a matrix with holes, whose gradient is contiguous.
    at::Tensor column = at::ones({4, 1});
    at::Tensor holes = comm.rank() == 0 ? at::ones({3, 2}) : at::ones({3, 5}).narrow(1, 0, 2);
    if (comm.rank() == 1) column = at::ones({4, 1}).as_strided({4, 1}, {1, 7});
    const std::vector<at::Tensor> parameters = {column.detach().requires_grad_(),
                                                holes.detach().requires_grad_()};
    DataParallel ddp(comm, parameters, {"column", "holes"}, {});
    ddp.BeforeForward(true);
    const at::Tensor factor = at::arange(6.0).view({3, 2}) + comm.rank();
    ddp.AfterForward(parameters[0].sum() + (parameters[1] * factor).sum()).backward();
    EXPECT_TRUE(parameters[1].grad().equal(at::arange(6.0).view({3, 2}) + 0.5));
  });
}

TEST(DataParallel, FrozenParameterWithOtherStrides_IsTheSameModelUntilItIsTrained) {
  RunRanks(2, [](Comm& comm) {
    TestNet net(7);
    const at::Tensor frozen = net.parameters[0].detach().clone();
    net.parameters[0].set_requires_grad(false);
    if (comm.rank() == 1) {
      net.parameters[0].set_data(frozen.mul(0).t().contiguous().t());
    }
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    EXPECT_TRUE(net.parameters[0].equal(frozen)) << comm.rank();
    for (int step = 0; step < 2; ++step) {
      ddp.BeforeForward(true);
      ddp.AfterForward(net.Forward(Input(step, comm.rank()))).sum().backward();
    }
    at::Tensor mine = net.parameters[2].grad().clone();
    comm.Broadcast(mine, 0);
    EXPECT_TRUE(net.parameters[2].grad().equal(mine)) << comm.rank();
    net.parameters[0].set_requires_grad(true);
    EXPECT_THAT(ErrorOf([&] { ddp.BeforeForward(true); }),
                AllOf(HasSubstr("'fc1.weight'"), HasSubstr("lies in memory with strides")));
  });
}

TEST(DataParallel, StridesThatChangeWithWhatIsTrained_AreNamed) {
  RunRanks(2, [](Comm& comm) {
    TestNet net(7);
    net.parameters[0].set_requires_grad(false);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    net.parameters[0].set_requires_grad(true);
    if (comm.rank() == 1) {
      net.parameters[0].set_data(net.parameters[0].detach().t().contiguous().t());
    }
    EXPECT_THAT(ErrorOf([&] { ddp.BeforeForward(true); }),
                AllOf(HasSubstr("'fc1.weight'"), HasSubstr("lies in memory with strides")));
  });
}

TEST(DataParallel, BuffersWithOtherStrides_AreThoseOfRankZero) {
  for (const bool several : {false, true}) {
    RunRanks(2, [&](Comm& comm) {
      TestNet net(7);
      const at::Tensor values = at::arange(6.0).view({2, 3}) + comm.rank();
      net.buffers = {comm.rank() == 0 ? values : values.t().contiguous().t()};
      if (several) net.buffers.push_back(at::full({5}, comm.rank(), at::kFloat));
      DataParallel ddp(comm, net.parameters, net.names, net.buffers);
      EXPECT_TRUE(net.buffers[0].equal(at::arange(6.0).view({2, 3}))) << comm.rank();
    });
  }
}

TEST(DataParallel, Buffers_AreThoseOfRankZeroAfterEveryExchange) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    for (const bool broadcast : {true, false}) {
      run(kRanks, [&](Comm& comm) {
        TestNet net(7);
        net.buffers[0].fill_(comm.rank() * 100);
        DataParallel ddp(comm, net.parameters, net.names, net.buffers,
                         {.broadcast_buffers = broadcast});
        EXPECT_EQ(net.buffers[0].item<float>(), 0);  // from construction
        for (int step = 0; step < 3; ++step) {
          net.buffers[0].fill_(10 * (comm.rank() + 1));
          const bool communicate = step != 1;
          ddp.BeforeForward(communicate);
          ddp.AfterForward(net.Forward(Input(0, comm.rank()))).sum().backward();
          const bool equal = broadcast && communicate;
          EXPECT_EQ(net.buffers[0].item<float>(), equal ? 11 : 10 * (comm.rank() + 1) + 1);
        }
      });
    }
  }
}

TEST(DataParallel, Buffers_ForwardTwiceBeforeBackward_BatchNormWorks) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    std::vector<at::Tensor> means(kRanks);
    run(kRanks, [&](Comm& comm) {
      const at::Tensor weight = at::ones({6}).requires_grad_(true);
      const at::Tensor bias = at::zeros({6}).requires_grad_(true);
      const at::Tensor mean = at::zeros({6}), variance = at::ones({6});
      DataParallel ddp(comm, {weight, bias}, {"weight", "bias"}, {mean, variance});
      const auto forward = [&](int step) {
        ddp.BeforeForward(true);
        return ddp.AfterForward(at::batch_norm(Input(step, comm.rank()), weight, bias, mean,
                                               variance, true, 0.1, 1e-5, false));
      };
      for (int step = 0; step < 3; ++step) {
        const at::Tensor first = forward(step);
        const at::Tensor second = forward(step + 10);
        (first.square().sum() + second.square().sum()).backward();
        // A graph that was made before the exchange of another one.
        const at::Tensor early = forward(step + 20);
        forward(step + 30).sum().backward();
        ddp.ArmBackward();
        early.square().sum().backward();
      }
      means[comm.rank()] = mean;
    });
    EXPECT_TRUE(means[0].equal(means[1]));
  }
}

TEST(DataParallel, EvaluationAndOneRank_DoNothing) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    at::NoGradGuard no_grad;
    if (comm.rank() == 0) return;  // a rank that evaluates alone must not wait
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Input(0, 0)));
  });
  LocalComm comm;
  TestNet net(7);
  DataParallel ddp(comm, net.parameters, net.names, net.buffers);
  ddp.BeforeForward(true);
  const at::Tensor out = net.Forward(Input(0, 0));
  EXPECT_TRUE(ddp.AfterForward(out).is_same(out));
}

TEST(DataParallel, SharedParameter_CountsOnce) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    net.parameters.push_back(net.parameters[0]);
    net.names.push_back("tied.weight");
    DataParallel ddp(comm, net.parameters, net.names, {});
    EXPECT_EQ(ddp.parameters().size(), 4u);
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Input(0, comm.rank()))).sum().backward();
    EXPECT_TRUE(net.parameters[0].grad().defined());
  });
}

TEST(DataParallel, ArmBackward_ReducesAfterLocalForwards) {
  std::vector<at::Tensor> grads(kRanks);
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, {});
    ddp.BeforeForward(false);
    const at::Tensor out = ddp.AfterForward(net.Forward(Input(0, comm.rank())));
    ddp.ArmBackward();
    out.sum().backward();
    grads[comm.rank()] = net.parameters[0].grad();
  });
  EXPECT_TRUE(grads[0].equal(grads[1]));
}

TEST(UnexchangedGradients, ForwardPastTheCalls_AreNamed) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    run(kRanks, [&](Comm& comm) {
      TestNet net(7);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers);
      const auto exchanged = [&](int step) {
        ddp.BeforeForward(true);
        ddp.AfterForward(net.Forward(Input(step, comm.rank()))).sum().backward();
      };
      const auto past = [&] {
        net.Forward(Input(0, comm.rank()), /*use_last_bias=*/false).sum().backward();
      };
      past();
      EXPECT_THAT(ddp.UnexchangedGradients(), ElementsAre("fc1.weight", "fc1.bias", "fc2.weight"));
      // The next exchange includes the existing gradients.
      exchanged(1);
      EXPECT_THAT(ddp.UnexchangedGradients(), IsEmpty());
      past();
      EXPECT_THAT(ddp.UnexchangedGradients(), ElementsAre("fc1.weight", "fc1.bias", "fc2.weight"));
      ddp.ForgetPending({net.parameters[0]});
      EXPECT_THAT(ddp.UnexchangedGradients(), ElementsAre("fc1.bias", "fc2.weight"));
      net.parameters[1].mutable_grad() = at::Tensor();
      EXPECT_THAT(ddp.UnexchangedGradients(), ElementsAre("fc2.weight"));
      ddp.ForgetPending();
      EXPECT_THAT(ddp.UnexchangedGradients(), IsEmpty());
      // A forward pass without a backward pass hides nothing.
      ddp.BeforeForward(true);
      ddp.AfterForward(net.Forward(Input(2, comm.rank())));
      exchanged(3);
      past();
      EXPECT_THAT(ddp.UnexchangedGradients(), ElementsAre("fc1.weight", "fc1.bias", "fc2.weight"));
    });
  }
}

TEST(UnexchangedGradients, WindowThatNeverCommunicated_IsNamed) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    run(kRanks, [&](Comm& comm) {
      TestNet net(7);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers);
      for (int step = 0; step < 4; ++step) {
        ddp.BeforeForward(step % 2 == 1);
        ddp.AfterForward(net.Forward(Input(step, comm.rank()))).sum().backward();
        EXPECT_EQ(ddp.UnexchangedGradients().size(), step % 2 == 1 ? 0u : 4u);
      }
    });
  }
}

TEST(UnexchangedGradients, AllModes_AreSilentAfterAnExchange) {
  for (const DataParallelOptions& mode :
       {DataParallelOptions{.static_graph = true},
        DataParallelOptions{.gradient_as_bucket_view = true},
        DataParallelOptions{.bucket_cap_mb = 1e-4, .find_unused_parameters = true}}) {
    RunGlooRanks(kRanks, [&](Comm& comm) {
      TestNet net(7);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers, mode);
      for (int step = 0; step < 6; ++step) {
        ddp.BeforeForward(step % 2 == 1);
        ddp.AfterForward(net.Forward(Input(step, comm.rank()))).sum().backward();
        if (step % 2 == 0) continue;
        EXPECT_THAT(ddp.UnexchangedGradients(), IsEmpty());
      }
    });
  }
}

TEST(UnexchangedGradients, LastBackwardLeavesParametersOut_Throws) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Input(0, comm.rank()), /*use_last_bias=*/false)).sum().backward();
    EXPECT_THAT(ErrorOf([&] { ddp.UnexchangedGradients(); }),
                HasSubstr("parameters fc2.bias got no gradient"));
  });
}

TEST(DataParallel, FindUnused_GradientOfALocalMicroStepOnly_IsExchanged) {
  std::vector<at::Tensor> grads(kRanks);
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, {}, {.find_unused_parameters = true});
    ddp.BeforeForward(false);
    ddp.AfterForward(net.Forward(Input(0, comm.rank()))).square().sum().backward();
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Input(1, comm.rank()), /*use_last_bias=*/false)).sum().backward();
    EXPECT_THAT(ddp.UnexchangedGradients(), IsEmpty());
    grads[comm.rank()] = net.parameters[3].grad();
  });
  EXPECT_TRUE(grads[0].equal(grads[1]));
}

TEST(DataParallel, ParametersUnfrozenAndFrozenLater_AreFollowed) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    for (const DataParallelOptions& mode :
         {DataParallelOptions{}, DataParallelOptions{.static_graph = true},
          DataParallelOptions{.gradient_as_bucket_view = true}}) {
      std::vector<std::vector<at::Tensor>> grads(kRanks);
      run(kRanks, [&](Comm& comm) {
        TestNet net(7);
        for (const int i : {0, 1, 2, 3}) net.parameters[i].requires_grad_(false);
        DataParallel ddp(comm, net.parameters, net.names, net.buffers, mode);
        const auto step = [&](int number) {
          ddp.BeforeForward(true);
          ddp.AfterForward(net.Forward(Input(number, comm.rank()))).square().sum().backward();
          EXPECT_THAT(ddp.UnexchangedGradients(), IsEmpty());
          for (const at::Tensor& parameter : net.parameters) {
            if (parameter.grad().defined()) grads[comm.rank()].push_back(parameter.grad().clone());
          }
        };
        net.parameters[2].requires_grad_(true);
        net.parameters[3].requires_grad_(true);
        step(0);
        step(1);
        net.parameters[0].requires_grad_(true);
        net.parameters[1].requires_grad_(true);
        step(2);
        step(3);
        net.parameters[0].requires_grad_(false);
        net.parameters[0].mutable_grad() = at::Tensor();
        step(4);
        step(5);
      });
      EXPECT_EQ(grads[0].size(), 2u + 2 + 4 + 4 + 3 + 3);
      ExpectEqualRanks(grads);
    }
  }
}

TEST(DataParallel, WholeModelFrozenForATime_ExchangesNothingThen) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    run(kRanks, [&](Comm& comm) {
      TestNet net(7);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers);
      for (int step = 0; step < 6; ++step) {
        const bool frozen = step % 2 == 1;
        for (at::Tensor& parameter : net.parameters) parameter.requires_grad_(!frozen);
        // A GAN's generator goes through its discriminator, here on only one rank.
        if (frozen && comm.rank() == 1) continue;
        const at::Tensor x = Input(step, comm.rank()).requires_grad_(true);
        ddp.BeforeForward(true);
        ddp.AfterForward(net.Forward(x)).sum().backward();
        EXPECT_TRUE(x.grad().defined());
        EXPECT_THAT(ddp.UnexchangedGradients(), IsEmpty());
      }
    });
  }
}

TEST(DataParallel, ParameterUnfrozenOnOneRank_IsNamed) {
  RunRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    net.parameters[3].requires_grad_(false);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    net.parameters[comm.rank() == 0 ? 0 : 3].requires_grad_(comm.rank() != 0);
    EXPECT_THAT(ErrorOf([&] { ddp.BeforeForward(true); }),
                HasSubstr("'fc1.weight' is frozen on rank 0 and trained on rank 1"));
  });
  // With real processes, the ranks that changed nothing do not come to the comparison.
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    net.parameters[3].requires_grad_(false);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    if (comm.rank() == 0) return;
    comm.process_group()->getBackend(at::kCPU)->setTimeout(std::chrono::milliseconds(300));
    net.parameters[3].requires_grad_(true);
    EXPECT_THAT(ErrorOf([&] { ddp.BeforeForward(true); }),
                AllOf(HasSubstr("rank 1 changed requires_grad of parameter 'fc2.bias'"),
                      HasSubstr("but rank 0 changed none")));
  });
}

TEST(UnexchangedGradients, ParameterUnfrozenAfterForward_IsNamed) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    net.parameters[3].requires_grad_(false);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    ddp.BeforeForward(true);
    net.parameters[3].requires_grad_(true);
    ddp.AfterForward(net.Forward(Input(0, comm.rank()))).sum().backward();
    EXPECT_THAT(ddp.UnexchangedGradients(), ElementsAre("fc2.bias"));
  });
}

TEST(DataParallel, ModelConvertedLater_IsRefusedByName) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    net.parameters[1].set_data(net.parameters[1].to(at::kDouble));
    EXPECT_THAT(ErrorOf([&] { ddp.BeforeForward(true); }),
                HasSubstr("parameter 'fc1.bias' is Double on cpu now but was Float on cpu"));
  });
}

// torch::load(module) does this. LibTorch then creates another accumulator of gradients.
TEST(DataParallel, ParameterOfOtherMemory_IsRefusedByName) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    {
      const at::NoGradGuard no_grad;
      net.parameters[1].set_(at::ones_like(net.parameters[1]));
    }
    EXPECT_THAT(ErrorOf([&] { ddp.BeforeForward(true); }),
                HasSubstr("parameter 'fc1.bias' has been given other memory"));
  });
}

TEST(DataParallel, SparseGradients_AreAveraged) {
  for (const Runner run : {Runner{Gloo}, Runner{RunRanks}}) {
    std::vector<at::Tensor> sparse(kRanks), dense(kRanks);
    run(kRanks, [&](Comm& comm) {
      const at::Tensor table = Randn({10, 3}, 5).requires_grad_(true);
      const at::Tensor weight = Randn({2, 3}, 6).requires_grad_(true);
      DataParallel ddp(comm, {table, weight}, {"table", "weight"}, {}, {}, {true, false});
      EXPECT_EQ(ddp.sparse_parameter(), "table");
      for (int step = 0; step < 3; ++step) {
        table.mutable_grad() = weight.mutable_grad() = at::Tensor();
        for (const bool communicate : {false, true}) {
          const at::Tensor ids = at::tensor({1 + step, 4 + comm.rank()}, at::kLong);
          ddp.BeforeForward(communicate);
          const at::Tensor rows = at::embedding(table, ids, -1, false, /*sparse=*/true);
          ddp.AfterForward(at::linear(rows, weight)).square().sum().backward();
        }
        EXPECT_THAT(ddp.UnexchangedGradients(), IsEmpty());
      }
      EXPECT_TRUE(table.grad().is_sparse());
      sparse[comm.rank()] = table.grad().to_dense();
      dense[comm.rank()] = weight.grad();
    });
    at::Tensor expected = at::zeros({10, 3});
    for (int rank = 0; rank < kRanks; ++rank) {
      const at::Tensor table = Randn({10, 3}, 5).requires_grad_(true);
      const at::Tensor ids = at::tensor({3, 4 + rank}, at::kLong);
      at::linear(at::embedding(table, ids), Randn({2, 3}, 6)).square().sum().backward();
      expected += table.grad().mul(2.0 / kRanks);
    }
    EXPECT_TRUE(sparse[0].equal(sparse[1]));
    EXPECT_TRUE(dense[0].equal(dense[1]));
    EXPECT_LT(Distance({sparse[0]}, {expected}), 1e-5);
  }
}

TEST(DataParallel, SparseGradients_ThatCannotBeExchanged_AreRefusedByName) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    const at::Tensor table = Randn({10, 3}, 5).requires_grad_(true);
    const at::Tensor ids = at::tensor({1, 4}, at::kLong);
    const auto step = [&](DataParallel& ddp, bool sparse) {
      ddp.BeforeForward(true);
      ddp.AfterForward(at::embedding(table, ids, -1, false, sparse)).sum().backward();
    };
    EXPECT_THAT(ErrorOf([&] {
                  DataParallel ddp(comm, {table}, {"table"}, {}, {.comm_hook = CommHook::kFp16},
                                   {true});
                }),
                HasSubstr("parameter 'table' has a sparse gradient, which communication hooks"));
    EXPECT_THAT(ErrorOf([&] {
                  DataParallel ddp(comm, {table}, {"table"}, {});
                  step(ddp, true);
                }),
                HasSubstr("parameter 'table' got a sparse gradient"));
    EXPECT_THAT(ErrorOf([&] {
                  DataParallel ddp(comm, {table}, {"table"}, {}, {}, {true});
                  step(ddp, false);
                }),
                HasSubstr("parameter 'table' belongs to a sparse embedding but got a dense"));
  });
}

TEST(GradientHook, OwnHook_ReplacesTheExchange) {
  int buckets = 0;
  std::mutex mu;
  const auto ranks =
      Train({.gradient_hook = [&](c10d::ProcessGroup& group, c10d::GradBucket& bucket) {
        {
          std::lock_guard<std::mutex> lock(mu);
          ++buckets;
        }
        std::vector<at::Tensor> tensors = {bucket.getBufferRef().div_(group.getSize())};
        return group.allreduce(tensors)->getFuture();
      }});
  ExpectEqualRanks(ranks);
  EXPECT_LT(Distance(ranks[0], Reference()), 2e-6);
  EXPECT_EQ(buckets, kRanks * kSteps / 2);
}

TEST(GradientHook, WithoutFutureOrWithAnotherHook_IsRefused) {
  const GradientHook none = [](c10d::ProcessGroup&, c10d::GradBucket&) {
    return c10::intrusive_ptr<c10::ivalue::Future>();
  };
  EXPECT_THAT(ErrorOf([&] { Train({.gradient_hook = none}); }),
              HasSubstr("gradient_hook returned no future for bucket 0"));
  EXPECT_THAT(ErrorOf([&] { Train({.comm_hook = CommHook::kFp16, .gradient_hook = none}); }),
              HasSubstr("exclude each other"));
  EXPECT_THAT(ErrorOf([&] { Train({.gradient_hook = none}, true, RunRanks); }),
              HasSubstr("needs a process group"));
}

// Returns `comm` with a board, as in JoinJob().
std::unique_ptr<Comm> OnBoard(Comm& comm, const std::shared_ptr<ProgressBoard>& board) {
  return MakeObservedComm(std::make_unique<BorrowedComm>(comm), board);
}

// One bucket for each parameter, once the first backward pass has shown their order.
const DataParallelOptions kSmallBuckets = {.bucket_cap_mb = 1.0 / 1024 / 1024,
                                           .broadcast_buffers = false};

TEST(DataParallel, Exchange_IsACollectiveOnTheBoard) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    const auto board = std::make_shared<ProgressBoard>();
    const std::unique_ptr<Comm> observed = OnBoard(comm, board);
    TestNet net(7);
    DataParallel ddp(*observed, net.parameters, net.names, {}, kSmallBuckets);
    observed->Barrier();
    const std::string before = board->Read().last_collective;
    ddp.BeforeForward(true);
    const at::Tensor out = ddp.AfterForward(net.Forward(Input(0, comm.rank())));
    EXPECT_EQ(board->Read().last_collective, before);
    out.sum().backward();
    EXPECT_THAT(board->Read().last_collective,
                AllOf(HasSubstr("AllReduce #"), HasSubstr(" bucket 1 of 1 (163 Float), done")));
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Input(1, comm.rank()))).sum().backward();
    EXPECT_THAT(board->Read().last_collective, HasSubstr(" bucket 4 of 4 (96 Float), done"));
  });
}

TEST(DataParallel, RankThatDoesNotComeToBackward_LeavesBucketAndCollectiveOnTheBoard) {
  for (const bool shared_memory : {false, true}) {
    std::latch failed(1);
    const auto rank_main = [&](Comm& comm) {
      const auto board = std::make_shared<ProgressBoard>();
      const std::unique_ptr<Comm> observed = OnBoard(comm, board);
      TestNet net(7);
      DataParallel ddp(*observed, net.parameters, net.names, {}, kSmallBuckets);
      ddp.BeforeForward(true);
      ddp.AfterForward(net.Forward(Input(0, comm.rank()))).sum().backward();
      ddp.BeforeForward(true);
      const at::Tensor out = ddp.AfterForward(net.Forward(Input(1, comm.rank())));
      observed->Barrier();
      if (comm.rank() == 1) return failed.wait();
      const absl::Cleanup release = [&] { failed.count_down(); };
      comm.process_group()->getBackend(at::kCPU)->setTimeout(std::chrono::milliseconds(300));
      const CollectiveExplainer explain = [&](absl::string_view) {
        return "waits in " + board->Read().last_collective;
      };
      EXPECT_THAT(ErrorOf([&] {
                    try {
                      out.sum().backward();
                    } catch (...) {
                      RethrowExplained(explain);
                    }
                  }),
                  AllOf(HasSubstr("waits in AllReduce #"), HasSubstr(" bucket 1 of 4 (3 Float)"),
                        Not(HasSubstr("done"))));
    };
    shared_memory ? RunShmRanks(kRanks, rank_main) : RunGlooRanks(kRanks, rank_main);
  }
}

TEST(DataParallel, BucketThatFails_IsTheOneOnTheBoard) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    const auto board = std::make_shared<ProgressBoard>();
    const std::unique_ptr<Comm> observed = OnBoard(comm, board);
    bool fail = false;
    DataParallelOptions options = kSmallBuckets;
    options.gradient_hook = [&](c10d::ProcessGroup&, c10d::GradBucket& bucket) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      if (fail && bucket.getIndex() >= 2) {
        future->setError(std::make_exception_ptr(std::runtime_error("no third bucket")));
      } else {
        future->markCompleted(bucket.getBuffer());
      }
      return future;
    };
    TestNet net(7);
    DataParallel ddp(*observed, net.parameters, net.names, {}, options);
    for (fail = false;; fail = true) {
      ddp.BeforeForward(true);
      const at::Tensor out = ddp.AfterForward(net.Forward(Input(0, comm.rank())));
      if (fail) {
        EXPECT_THROW(out.sum().backward(), std::exception);
        break;
      }
      out.sum().backward();
    }
    EXPECT_THAT(
        board->Read().last_collective,
        AllOf(HasSubstr("gradient_hook #"), HasSubstr(" bucket 3 of 4 ("), Not(HasSubstr("done"))));
  });
}

TEST(DataParallel, RankWithoutABatch_CountsTheSameCollectives) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    const auto board = std::make_shared<ProgressBoard>();
    const std::unique_ptr<Comm> observed = OnBoard(comm, board);
    TestNet net(7);
    DataParallel ddp(*observed, net.parameters, net.names, {}, kSmallBuckets);
    if (comm.rank() == 1) {
      ddp.Shadow(true);
    } else {
      ddp.BeforeForward(true);
      ddp.AfterForward(net.Forward(Input(0, comm.rank()))).sum().backward();
    }
    const std::string mine = board->Read().last_collective;
    EXPECT_THAT(comm.AllGatherBytes(mine), ElementsAre(mine, mine));
  });
}

// Gloo's backend, with a count of the bytes that are reduced over the ranks. (In a ring each rank
// sends 2 (w-1)/w of them: a reduction of parts, and a gather of them.)
class CountingBackend : public c10d::Backend {
 public:
  explicit CountingBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "counting"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    for (const at::Tensor& tensor : tensors) reduced += tensor.nbytes();
    return inner_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    for (const at::Tensor& tensor : tensors) broadcasted += tensor.nbytes();
    return inner_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions& options) override {
    messages += in.nbytes();
    return inner_->_allgather_base(out, in, options);
  }

  // `messages`: the frames in which ranks compare their calls.
  size_t reduced = 0, broadcasted = 0, messages = 0;

 private:
  const c10::intrusive_ptr<c10d::Backend> inner_;
};

// The table of docs/sharding.md: all gradients once for each exchange, halved by hooks that
// compress to 16 bits. Nothing else is exchanged in a step; any other collective would throw.
TEST(DataParallel, BytesOnTheWire_AreTheTableToTheByte) {
  constexpr size_t kModel = 4 * (16 * 6 + 16 + 3 * 16 + 3);
  constexpr size_t kFrame = 512;
  const auto hook = [](CommHook hook) { return DataParallelOptions{.comm_hook = hook}; };
  struct Case {
    std::string name;
    DataParallelOptions options;
    size_t exchange;  // bytes of each exchange
  };
  const Case cases[] = {
      {"default", {}, kModel},
      {"small buckets in place", {.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true}, kModel},
      {"static graph", {.static_graph = true}, kModel},
      // In addition, for each parameter, whether a rank uses it.
      {"find_unused_parameters", {.find_unused_parameters = true}, kModel + 4 * 4},
      {"fp16", hook(CommHook::kFp16), kModel / 2},
      {"bf16", hook(CommHook::kBf16), kModel / 2},
      // Matrices of n x m as n + m numbers, biases unchanged.
      {"PowerSGD",
       {.comm_hook = CommHook::kPowerSgd,
        .power_sgd = {.matrix_approximation_rank = 1, .start_powerSGD_iter = 2}},
       4 * ((16 + 6) + 16 + (3 + 16) + 3)},
  };
  for (const int ranks : {2, 3}) {
    for (const Case& each : cases) {
      for (const bool windows : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << each.name << ", " << ranks << " ranks, windows " << windows);
        RunGlooRanks(ranks, [&](Comm& comm) {
          c10d::ProcessGroup& group = *comm.process_group();
          const auto counting =
              c10::make_intrusive<CountingBackend>(group.getBackend(c10::DeviceType::CPU));
          TestNet net(7);
          // The exchanges of the construction belong to no step.
          DataParallel ddp(comm, net.parameters, net.names, net.buffers, each.options);
          int exchanges = 0;
          for (int step = 0; step < 8; ++step) {
            if (step == 5) {  // the first steps determine the order
              group.setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                               counting);
              group.setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
            }
            const bool communicate = !windows || step % 2 == 1;
            ddp.BeforeForward(communicate);
            ddp.AfterForward(net.Forward(Input(step, comm.rank()))).sum().backward();
            if (step >= 5 && communicate) ++exchanges;
            if (communicate) {
              for (at::Tensor& parameter : net.parameters) parameter.mutable_grad().zero_();
            }
          }
          EXPECT_EQ(exchanges, windows ? 2 : 3);
          EXPECT_EQ(counting->reduced, exchanges * each.exchange);
          // The buffer is small enough for the frame of its broadcast.
          EXPECT_EQ(counting->broadcasted, 0U);
          EXPECT_EQ(counting->messages, exchanges * kFrame);
        });
      }
    }
  }
}

TEST(DataParallel, NestedOutputs_ComeBackInPlace) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, {}, {.find_unused_parameters = true});
    ddp.BeforeForward(true);
    const at::Tensor out = net.Forward(Input(0, comm.rank()));
    const auto passed = ddp.AfterForward(
        std::make_tuple(out, std::vector<at::Tensor>{at::zeros({2}), out.mul(2)}, 5));
    EXPECT_EQ(std::get<2>(passed), 5);
    EXPECT_TRUE(std::get<1>(passed)[1].equal(out.mul(2)));
    // The first output is not part of the loss; its parameters take part in the exchange anyway.
    std::get<1>(passed)[1].sum().backward();
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Input(1, comm.rank()))).sum().backward();
  });
}

}  // namespace
}  // namespace muster
