#include "worker/parallel/ddp.h"

#include <mutex>

#include "ATen/core/grad_mode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/parallel/test_net.h"
#include "worker/process/gloo_ranks.h"
#include "worker/process/local_comm.h"
#include "worker/process/thread_comm.h"
#include "worker/train/accumulation.h"
#include "worker/train/optimizer.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

template <typename Fn>
std::string ErrorOf(Fn fn) {
  try {
    fn();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

constexpr int kSteps = 8;
constexpr int kRanks = 2;

// The sample data of one micro-step of one rank.
at::Tensor Input(int step, int rank) { return Randn({4, 6}, 1000 + step * 10 + rank); }
at::Tensor Target(int step, int rank) { return Randn({4, 3}, 5000 + step * 10 + rank); }

// What one process over both ranks' batches would get, with windows of two micro-steps.
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

// The same on real ranks; returns the parameters of all ranks.
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
    EXPECT_TRUE(ranks[0][i].equal(ranks[1][i]))
        << "parameter " << i << " differs between the ranks";
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
  for (const DataParallelOptions& mode : modes) {
    const auto ranks = Train(mode);
    ExpectEqualRanks(ranks);
    EXPECT_LT(Distance(ranks[0], expected), 2e-6)
        << "bucket_cap_mb " << mode.bucket_cap_mb << " unused " << mode.find_unused_parameters
        << " static " << mode.static_graph << " view " << mode.gradient_as_bucket_view;
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
  const auto ranks = Train({.find_unused_parameters = true}, /*use_last_bias=*/false);
  ExpectEqualRanks(ranks);
  EXPECT_LT(Distance(ranks[0], Reference(/*use_last_bias=*/false)), 2e-6);
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
}

TEST(DataParallel, Buffers_AreThoseOfRankZeroAtEverySync) {
  for (const bool broadcast : {true, false}) {
    RunGlooRanks(kRanks, [&](Comm& comm) {
      TestNet net(7);
      net.buffers[0].fill_(comm.rank() * 100);
      DataParallel ddp(comm, net.parameters, net.names, net.buffers,
                       {.broadcast_buffers = broadcast});
      EXPECT_EQ(net.buffers[0].item<float>(), 0);  // from construction
      net.buffers[0].fill_(comm.rank() * 100);
      ddp.BeforeForward(true);
      EXPECT_EQ(net.buffers[0].item<float>(), broadcast ? 0 : comm.rank() * 100);
      ddp.AfterForward(net.Forward(Input(0, comm.rank()))).sum().backward();
    });
  }
}

TEST(DataParallel, EvaluationAndOneRank_DoNothing) {
  RunGlooRanks(kRanks, [&](Comm& comm) {
    TestNet net(7);
    DataParallel ddp(comm, net.parameters, net.names, net.buffers);
    at::NoGradGuard no_grad;
    if (comm.rank() == 0) return;  // a rank that evaluates alone must not wait for anyone
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
    // The first output is left out of the loss; its parameters are heard of all the same.
    std::get<1>(passed)[1].sum().backward();
    ddp.BeforeForward(true);
    ddp.AfterForward(net.Forward(Input(1, comm.rank()))).sum().backward();
  });
}

}  // namespace
}  // namespace muster
