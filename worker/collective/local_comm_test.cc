#include "worker/collective/local_comm.h"

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(LocalComm, EveryCollective_IsTheIdentity) {
  LocalComm comm;
  EXPECT_EQ(comm.rank(), 0);
  EXPECT_EQ(comm.size(), 1);
  at::Tensor x = at::arange(6, at::kFloat).view({2, 3}).t();
  const at::Tensor before = x.clone();
  comm.AllReduce(x, ReduceOp::kMean);
  comm.Broadcast(x, 0);
  EXPECT_TRUE(at::equal(x, before));
  const auto all = comm.AllGather(x);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_TRUE(at::equal(all[0], before));
  EXPECT_TRUE(all[0].is_contiguous());
  EXPECT_NE(all[0].data_ptr(), x.data_ptr());
  at::Tensor out = at::zeros({3, 2});
  comm.Scatter({x}, out, 0);
  EXPECT_TRUE(at::equal(out, before));
  EXPECT_EQ(comm.AllGatherBytes("a"), std::vector<std::string>{"a"});
  EXPECT_EQ(comm.BroadcastBytes("b", 0), "b");
  comm.Barrier();
  EXPECT_EQ(comm.process_group(), nullptr);
}

TEST(LocalComm, BadArguments_ThrowAsOnACluster) {
  LocalComm comm;
  at::Tensor ints = at::arange(3, at::kLong);
  at::Tensor undefined;
  EXPECT_THROW(comm.AllReduce(ints, ReduceOp::kMean), c10::Error);
  EXPECT_THROW(comm.AllReduce(undefined, ReduceOp::kSum), c10::Error);
  EXPECT_THROW(comm.Broadcast(ints, 1), c10::Error);
  EXPECT_THROW(comm.Scatter({}, ints, 0), c10::Error);
  at::Tensor other = at::zeros({2}, at::kLong);
  EXPECT_THROW(comm.Scatter({ints}, other, 0), c10::Error);
}

}  // namespace
}  // namespace muster
