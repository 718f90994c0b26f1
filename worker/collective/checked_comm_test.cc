#include "worker/collective/checked_comm.h"

#include <atomic>

#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/call_site.h"
#include "worker/collective/nested_collectives.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

void RunChecked(int n, const std::function<void(Comm&)>& fn) {
  RunRanks(n, [&](Comm& comm) { fn(*MakeCheckedComm(std::make_unique<BorrowedComm>(comm))); });
}

TEST(CheckedComm, RightUse_PassesThrough) {
  RunChecked(3, [](Comm& comm) {
    at::Tensor x = at::ones({2});
    comm.AllReduce(x, ReduceOp::kSum);
    EXPECT_EQ(x[0].item<float>(), 3);
    comm.Broadcast(x, 1);
    EXPECT_EQ(comm.AllGather(x).size(), 3u);
    at::Tensor out = at::zeros({comm.rank()});
    comm.Scatter({at::ones({0}), at::ones({1}), at::ones({2})}, out, 0);
    EXPECT_EQ(comm.BroadcastBytes("a", 0), "a");
    EXPECT_EQ(comm.AllGatherBytes("b").size(), 3u);
    comm.Barrier();
  });
}

TEST(CheckedComm, Disagreement_EveryRankThrowsNamingRanksAndCallSites) {
  std::atomic<int> threw = 0;
  RunChecked(4, [&](Comm& comm) {
    try {
      if (comm.rank() == 2) {
        Reduce(comm, at::zeros({3}), "mean");
      } else {
        Gather(comm, at::zeros({3}));
      }
    } catch (const c10::Error& e) {
      ++threw;
      EXPECT_THAT(e.what(),
                  ContainsRegex("ranks 0, 1, 3 called AllGather float32.3. #1 at "
                                "checked_comm_test.cc:[0-9]+; rank 2 called AllReduce.mean. "
                                "float32.3. #1 at checked_comm_test.cc:[0-9]+"));
    }
    comm.Barrier();
  });
  EXPECT_EQ(threw, 4);
}

TEST(CheckedComm, UnequalShapeOrDtype_EveryRankThrows) {
  std::atomic<int> threw = 0;
  RunChecked(2, [&](Comm& comm) {
    try {
      at::Tensor x = at::zeros({2}, comm.rank() == 0 ? at::kFloat : at::kDouble);
      comm.AllReduce(x, ReduceOp::kSum);
    } catch (const c10::Error& e) {
      ++threw;
      EXPECT_THAT(e.what(), HasSubstr("rank 1 called AllReduce(sum) float64[2] #1"));
    }
  });
  EXPECT_EQ(threw, 2);
}

// The calls of the ranks are compared before their arguments, which the exchange itself would
// refuse.
TEST(CheckedComm, StructuresWithDifferentNumbersOfTensors_AreNamedWithCallsAndLines) {
  std::atomic<int> threw = 0;
  RunChecked(2, [&](Comm& comm) {
    for (size_t tensors = 0; tensors < 2; ++tensors) {
      const std::string first =
          tensors == 0 ? "Barrier #1 for a structure without tensors" : "AllGather float32.2. #2";
      try {
        Gather(comm,
               std::vector<at::Tensor>(comm.rank() == 0 ? tensors : tensors + 1, at::ones({2})));
      } catch (const c10::Error& e) {
        ++threw;
        EXPECT_THAT(e.what(), ContainsRegex("rank 0 called " + first +
                                            " at checked_comm_test.cc:[0-9]+; rank 1 called "
                                            "AllGather float32.2. #"));
      }
    }
    EXPECT_EQ(Gather(comm, std::vector<at::Tensor>(2, at::ones({2}))).size(), 2u);
  });
  EXPECT_EQ(threw, 4);
}

TEST(CheckedComm, SameCallFromDifferentLines_IsLegal) {
  RunChecked(2, [](Comm& comm) {
    const at::Tensor x = at::full({1}, comm.rank());
    const at::Tensor all = comm.rank() == 0 ? Gather(comm, x) : Gather(comm, x);
    EXPECT_EQ(all[1].item<int64_t>(), 1);
  });
}

TEST(CallSite, OutermostWins) {
  EXPECT_EQ(CurrentCallSite(), "");
  {
    const CallSite outer(std::source_location::current());
    const std::string line = CurrentCallSite();
    EXPECT_THAT(line, ContainsRegex("^checked_comm_test.cc:[0-9]+$"));
    {
      const CallSite inner(std::source_location::current());
      EXPECT_EQ(CurrentCallSite(), line);
    }
    EXPECT_EQ(CurrentCallSite(), line);
  }
  EXPECT_EQ(CurrentCallSite(), "");
}

}  // namespace
}  // namespace muster
