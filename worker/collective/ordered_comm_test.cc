#include "worker/collective/ordered_comm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "c10/util/Exception.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/comm_thread.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::unique_ptr<Comm> Ordered(Comm& comm, const std::shared_ptr<CommThread>& thread) {
  return MakeOrderedComm(std::make_unique<BorrowedComm>(comm), thread);
}

TEST(OrderedComm, CollectivesOfBothThreads_AreOneSequence) {
  RunRanks(3, [](Comm& inner) {
    const auto thread = std::make_shared<CommThread>();
    const std::unique_ptr<Comm> comm = Ordered(inner, thread);
    // ThreadComm compares the calls of all ranks, one by one.
    at::Tensor sum;
    for (int i = 0; i < 20; ++i) {
      thread->Submit([&comm, &sum] { sum = comm->ReduceScatter(at::ones({6}), ReduceOp::kSum); });
      EXPECT_EQ(comm->AllGatherBytes(std::to_string(comm->rank()))[2], "2");
      EXPECT_TRUE(at::equal(sum, at::full({2}, 3.0))) << "it was submitted before";
      comm->Barrier();
    }
  });
}

TEST(OrderedComm, EveryCollective_GoesThrough) {
  RunRanks(2, [](Comm& inner) {
    const auto thread = std::make_shared<CommThread>();
    const std::unique_ptr<Comm> comm = Ordered(inner, thread);
    const int rank = comm->rank();
    ASSERT_EQ(comm->size(), 2);
    at::Tensor tensor = at::full({2}, rank + 1.0);
    comm->AllReduce(tensor, ReduceOp::kSum);
    EXPECT_TRUE(at::equal(tensor, at::full({2}, 3.0)));
    EXPECT_TRUE(at::equal(comm->AllGather(at::full({1}, rank * 1.0))[1], at::ones({1})));
    at::Tensor flat = at::full({4}, rank * 1.0);
    comm->AllGatherParts(flat);
    EXPECT_EQ(flat[0].item<double>() + 10 * flat[3].item<double>(), 10);
    at::Tensor same = at::full({1}, rank * 1.0);
    comm->Broadcast(same, 1);
    EXPECT_EQ(same.item<double>(), 1);
    at::Tensor part = at::zeros({1});
    comm->Scatter({at::full({1}, 5.0), at::full({1}, 6.0)}, part, 0);
    EXPECT_EQ(part.item<double>(), 5 + rank);
    EXPECT_EQ(comm->BroadcastBytes(std::to_string(rank), 1), "1");
    EXPECT_EQ(comm->process_group(), nullptr);
    EXPECT_EQ(comm->board(), nullptr);
  });
}

TEST(OrderedComm, ErrorOnTheThread_IsThrownByTheNextCollective) {
  RunRanks(2, [](Comm& inner) {
    const auto thread = std::make_shared<CommThread>();
    const std::unique_ptr<Comm> comm = Ordered(inner, thread);
    const int64_t elements = 2 + 2 * comm->rank();
    thread->Submit([&comm, elements] {
      at::Tensor flat = at::zeros({elements});
      comm->AllGatherParts(flat);
    });
    EXPECT_THAT(ErrorOf([&] { comm->Barrier(); }),
                AllOf(HasSubstr("ranks disagree"), HasSubstr("AllGatherParts")));
    comm->Barrier();
  });
}

}  // namespace
}  // namespace muster
