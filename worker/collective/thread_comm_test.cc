#include "worker/collective/thread_comm.h"

#include <atomic>
#include <stdexcept>
#include <thread>

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(ThreadComm, AllReduce_EveryOp) {
  RunRanks(3, [](Comm& comm) {
    const float mine = static_cast<float>(comm.rank() + 1);
    const struct {
      ReduceOp op;
      float want;
    } cases[] = {
        {ReduceOp::kSum, 6}, {ReduceOp::kMean, 2}, {ReduceOp::kMax, 3}, {ReduceOp::kMin, 1}};
    for (const auto& c : cases) {
      at::Tensor x = at::full({2, 2}, mine);
      comm.AllReduce(x, c.op);
      EXPECT_TRUE(at::equal(x, at::full({2, 2}, c.want)));
    }
    at::Tensor ints = at::full({1}, comm.rank(), at::kLong);
    comm.AllReduce(ints, ReduceOp::kMax);
    EXPECT_EQ(ints.item<int64_t>(), 2);
  });
}

TEST(ThreadComm, AllReduceSum_AddsInRankOrder) {
  std::vector<at::Tensor> inputs;
  for (int r = 0; r < 4; ++r) inputs.push_back(at::rand({1000}));
  const at::Tensor want = inputs[0].add(inputs[1]).add(inputs[2]).add(inputs[3]);
  RunRanks(4, [&](Comm& comm) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      at::Tensor x = inputs[comm.rank()].clone();
      comm.AllReduce(x, ReduceOp::kSum);
      EXPECT_TRUE(at::equal(x, want));
    }
  });
}

TEST(ThreadComm, AllReduce_ViewAndLeafThatRequiresGrad_InPlace) {
  RunRanks(2, [](Comm& comm) {
    at::Tensor base = at::ones({2, 3});
    at::Tensor view = base.t();
    comm.AllReduce(view, ReduceOp::kSum);
    EXPECT_TRUE(at::equal(base, at::full({2, 3}, 2)));
    at::Tensor leaf = at::ones({2});
    leaf.requires_grad_();
    comm.AllReduce(leaf, ReduceOp::kSum);
    EXPECT_TRUE(leaf.is_leaf());
    EXPECT_EQ(leaf[0].item<float>(), 2);
  });
}

TEST(ThreadComm, GatherBroadcastScatterBytes_GiveEachRankItsPart) {
  RunRanks(3, [](Comm& comm) {
    const int r = comm.rank();
    const auto all = comm.AllGather(at::full({2}, r, at::kLong));
    ASSERT_EQ(all.size(), 3u);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(all[i][1].item<int64_t>(), i);

    at::Tensor x = at::full({2}, r);
    comm.Broadcast(x, 2);
    EXPECT_EQ(x[0].item<float>(), 2);

    std::vector<at::Tensor> parts;
    if (r == 1) {
      for (int i = 0; i < 3; ++i) parts.push_back(at::full({i}, static_cast<float>(i)));
    }
    at::Tensor out = at::zeros({r});
    comm.Scatter(parts, out, 1);
    EXPECT_TRUE(at::equal(out, at::full({r}, static_cast<float>(r))));

    const auto bytes = comm.AllGatherBytes(std::string(r, 'x'));
    EXPECT_EQ(bytes, (std::vector<std::string>{"", "x", "xx"}));
    EXPECT_EQ(comm.BroadcastBytes(r == 0 ? "root" : "ignored", 0), "root");
    comm.Barrier();
  });
}

TEST(ThreadComm, UnequalShapes_EveryRankThrowsNamingThem_GroupStaysUsable) {
  std::atomic<int> threw = 0;
  RunRanks(3, [&](Comm& comm) {
    try {
      comm.AllGather(at::zeros({comm.rank() == 1 ? 5 : 4}));
    } catch (const c10::Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("rank 1 called AllGather float32[5]"));
      ++threw;
    }
    at::Tensor x = at::ones({1});
    comm.AllReduce(x, ReduceOp::kSum);
    EXPECT_EQ(x.item<float>(), 3);
  });
  EXPECT_EQ(threw, 3);
}

TEST(ThreadComm, DifferentOperations_EveryRankThrows) {
  std::atomic<int> threw = 0;
  RunRanks(2, [&](Comm& comm) {
    try {
      at::Tensor x = at::ones({1});
      if (comm.rank() == 0) {
        comm.AllReduce(x, ReduceOp::kSum);
      } else {
        comm.Broadcast(x, 0);
      }
    } catch (const c10::Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("rank 0 called AllReduce(sum)"));
      EXPECT_THAT(e.what(), HasSubstr("rank 1 called Broadcast(root 0)"));
      ++threw;
    }
  });
  EXPECT_EQ(threw, 2);
}

TEST(ThreadComm, CommDestroyed_WaitingRanksThrow) {
  auto comms = MakeThreadComms(2);
  std::thread waiting([&] {
    try {
      comms[0]->Barrier();
      ADD_FAILURE() << "the barrier cannot complete";
    } catch (const c10::Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("Barrier #1 on rank 0: rank 1 has left the group"));
    }
  });
  comms[1].reset();
  waiting.join();
}

TEST(RunRanks, OneRankThrows_OthersLeaveAndTheFirstErrorIsRethrown) {
  std::atomic<int> left = 0;
  try {
    RunRanks(4, [&](Comm& comm) {
      if (comm.rank() == 2) throw std::runtime_error("disk on fire");
      try {
        comm.Barrier();
      } catch (const c10::Error& e) {
        EXPECT_THAT(e.what(), HasSubstr("rank 2 failed: disk on fire"));
        ++left;
        throw;
      }
    });
    ADD_FAILURE() << "must throw";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "disk on fire");
  }
  EXPECT_EQ(left, 3);
}

TEST(RunRanks, OneRankReturnsEarly_WaitingRankThrows) {
  EXPECT_THROW(RunRanks(2,
                        [](Comm& comm) {
                          if (comm.rank() == 0) comm.Barrier();
                        }),
               c10::Error);
}

TEST(RunRanks, OneRank_Works) {
  RunRanks(1, [](Comm& comm) {
    at::Tensor x = at::ones({2});
    comm.AllReduce(x, ReduceOp::kMean);
    EXPECT_EQ(x[1].item<float>(), 1);
  });
}

}  // namespace
}  // namespace muster
