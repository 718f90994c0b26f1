#include "worker/train/sync_state.h"

#include <limits>

#include "ATen/ops/full.h"
#include "gtest/gtest.h"
#include "worker/collective/thread_comm.h"
#include "worker/train/optimizer.h"

namespace muster {
namespace {

TEST(BroadcastPlainState, AllRanks_GetTheRootsBits) {
  RunRanks(3, [](Comm& comm) {
    const PlainState mine = {{"x", {0.1 * comm.rank(), std::numeric_limits<double>::infinity()}},
                             {"empty", {}}};
    const PlainState expected = {{"x", {0.1 * 2, std::numeric_limits<double>::infinity()}},
                                 {"empty", {}}};
    EXPECT_EQ(BroadcastPlainState(comm, mine, 2), expected);
  });
}

TEST(BroadcastOptimizerState, RanksWithoutState_GetTheRoots) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor a = at::full({2, 3}, 1.0).requires_grad_(true);
    const at::Tensor b = at::full({4}, 1.0, at::kDouble).requires_grad_(true);
    FusedAdamW optimizer({a, b}, {.lr = 0.1 * (comm.rank() + 1)});
    if (comm.rank() == 1) {
      a.mutable_grad() = at::full({2, 3}, 3.0);
      optimizer.Step();
      optimizer.Step();
    }
    BroadcastOptimizerState(comm, optimizer, 1);
    const OptimizerState state = optimizer.SaveState();
    EXPECT_EQ(optimizer.lr(0), 0.2);
    EXPECT_EQ(state.tensors.size(), 3u);
    EXPECT_EQ(state.tensors.at("0.step").item<float>(), 2);
    EXPECT_NEAR(state.tensors.at("0.exp_avg")[1][2].item<float>(), 0.57, 1e-6);
  });
}

}  // namespace
}  // namespace muster
