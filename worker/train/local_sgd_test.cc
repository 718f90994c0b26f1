#include "worker/train/local_sgd.h"

#include "ATen/ops/complex.h"
#include "ATen/ops/full.h"
#include "ATen/ops/view_as_real.h"
#include "gtest/gtest.h"
#include "worker/collective/thread_comm.h"
#include "worker/train/optimizer.h"

namespace muster {
namespace {

// The trace of Accelerate's LocalSGD: weight 1, SGD with rate 1, gradient = rank, averaging every 2
// of 3 steps.
TEST(LocalSgd, Trace_EqualsAcceleratesOwn) {
  std::vector<std::vector<double>> trace(2);
  RunRanks(2, [&](Comm& comm) {
    const at::Tensor weight = at::full({1}, 1.0).requires_grad_(true);
    FusedSGD sgd({weight}, {.lr = 1});
    LocalSgd local(comm, {weight}, 2);
    std::vector<double>& mine = trace[comm.rank()];
    for (int step = 0; step < 3; ++step) {
      weight.mutable_grad() = at::full({1}, static_cast<double>(comm.rank()));
      sgd.Step();
      local.Step();
      mine.push_back(weight.item<double>());
    }
    local.Finish();
    mine.push_back(weight.item<double>());
  });
  EXPECT_EQ(trace[0], (std::vector<double>{1, 0, 0, -0.5}));
  EXPECT_EQ(trace[1], (std::vector<double>{0, 0, -1, -0.5}));
}

TEST(LocalSgd, Disabled_LeavesRanksAlone) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor weight = at::full({1}, static_cast<double>(comm.rank()));
    LocalSgd local(comm, {weight}, 1, /*enabled=*/false);
    EXPECT_FALSE(local.Step());
    local.Finish();
    EXPECT_EQ(weight.item<double>(), comm.rank());
  });
}

TEST(LocalSgd, Average_IsAChangeInPlace) {
  RunRanks(2, [](Comm& comm) {
    // A single tensor is exchanged without packing.
    for (const bool several : {false, true}) {
      std::vector<at::Tensor> weights = {at::full({2}, static_cast<double>(comm.rank()))};
      if (several) weights.push_back(at::full({3}, 1.0));
      LocalSgd local(comm, weights, 1);
      const auto before = weights[0]._version();
      EXPECT_TRUE(local.Step());
      EXPECT_GT(weights[0]._version(), before);
    }
  });
}

TEST(LocalSgd, MixedTensors_AreAllAveraged) {
  RunRanks(3, [](Comm& comm) {
    const double rank = comm.rank();
    const at::Tensor a = at::full({2, 2}, rank), b = at::full({3}, 10 * rank, at::kDouble);
    const at::Tensor strided = at::full({4, 2}, rank).t();
    const at::Tensor complex = at::complex(at::full({2}, rank), at::full({2}, -rank));
    LocalSgd local(comm, {a, b, complex}, 1, true, {strided});
    EXPECT_TRUE(local.Step());
    EXPECT_EQ(a[1][1].item<double>(), 1);
    EXPECT_EQ(b[2].item<double>(), 10);
    EXPECT_EQ(strided[1][3].item<double>(), 1);
    EXPECT_EQ(at::view_as_real(complex)[1][0].item<double>(), 1);
    EXPECT_EQ(at::view_as_real(complex)[1][1].item<double>(), -1);
  });
}

}  // namespace
}  // namespace muster
