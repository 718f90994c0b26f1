#include "worker/collective/collectives.h"

#include <cmath>
#include <limits>

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class F>
std::string ErrorOf(F&& f) {
  try {
    f();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "";
}

TEST(ParseReduceOp, D35_UnknownOperation_IsAnError) {
  EXPECT_EQ(ParseReduceOp("mean"), ReduceOp::kMean);
  EXPECT_EQ(ParseReduceOp("min"), ReduceOp::kMin);
  EXPECT_THAT(ErrorOf([] { ParseReduceOp("avg"); }),
              HasSubstr("unknown reduction 'avg': use sum, mean, max or min"));
  EXPECT_THROW(ParseReduceOp(""), c10::Error);
}

TEST(GatherTensors, ScalarsMatricesAndTransposed_JoinInRankOrder) {
  RunRanks(3, [](Comm& comm) {
    const int r = comm.rank();
    const auto got =
        GatherTensors(comm, {at::full({}, r), at::full({2, 3}, r), at::arange(6).view({2, 3}).t()});
    EXPECT_TRUE(at::equal(got[0], at::arange(3)));
    EXPECT_EQ(got[1].sizes(), (at::IntArrayRef{6, 3}));
    EXPECT_EQ(got[1][5][2].item<int64_t>(), 2);
    EXPECT_EQ(got[2].sizes(), (at::IntArrayRef{9, 2}));
    EXPECT_TRUE(at::equal(got[2].narrow(0, 3, 3), at::arange(6).view({2, 3}).t()));
  });
}

TEST(GatherTensors, ResultNeedsNoGrad) {
  LocalComm comm;
  at::Tensor x = at::ones({2});
  x.requires_grad_();
  EXPECT_FALSE(GatherTensors(comm, {x.mul(2)})[0].requires_grad());
}

TEST(GatherTensors, UnequalShapes_ErrorOnEveryRankPointsAtPadding) {
  RunRanks(2, [](Comm& comm) {
    EXPECT_THAT(ErrorOf([&] { GatherTensors(comm, {at::zeros({2 + comm.rank()})}); }),
                AllOf(HasSubstr("float32[3]"), HasSubstr("pad_across_processes")));
  });
}

// An optional tensor that only one rank has would otherwise be paired with later tensors of the
// others.
TEST(EveryCollective, RanksWithDifferentNumbersOfTensors_AllThrowTheSame_AndCanGoOn) {
  RunRanks(2, [](Comm& comm) {
    const std::vector<at::Tensor> one = {at::full({2}, 1.F)};
    const std::vector<at::Tensor> two = {one[0], at::full({2}, 2.F)};
    const std::vector<at::Tensor>& mine = comm.rank() == 0 ? two : one;
    const auto differ = AllOf(HasSubstr("ranks disagree"), HasSubstr("float32[2], tensor 1 of 2"));
    EXPECT_THAT(ErrorOf([&] { GatherTensors(comm, mine); }), differ);
    EXPECT_THAT(ErrorOf([&] { ReduceTensors(comm, mine, ReduceOp::kSum); }), differ);
    EXPECT_THAT(ErrorOf([&] { BroadcastTensors(comm, mine, 0); }), differ);
    EXPECT_THAT(
        ErrorOf([&] { GatherTensors(comm, comm.rank() == 0 ? one : std::vector<at::Tensor>()); }),
        AllOf(HasSubstr("rank 0 called AllGather"),
              HasSubstr("rank 1 called Barrier for a structure without tensors")));
    EXPECT_THAT(GatherTensors(comm, {}), testing::IsEmpty());
    const auto all = GatherTensors(comm, two);
    EXPECT_TRUE(at::equal(all[1], at::full({4}, 2.F)));
  });
}

TEST(ReduceTensors, D35_ScaleIsApplied) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor x = at::full({2}, comm.rank() + 1.0F);
    const auto sum = ReduceTensors(comm, {x}, ReduceOp::kSum, 0.5);
    EXPECT_EQ(sum[0][1].item<float>(), 1.5);
    EXPECT_EQ(ReduceTensors(comm, {x}, ReduceOp::kMean, 4)[0][0].item<float>(), 6);
    EXPECT_EQ(x[0].item<float>(), comm.rank() + 1) << "the argument stays";
    const at::Tensor whole = at::full({1}, comm.rank() + 1);
    EXPECT_EQ(ReduceTensors(comm, {whole}, ReduceOp::kMax, 3)[0].item<int64_t>(), 6);
    EXPECT_THAT(ErrorOf([&] { ReduceTensors(comm, {whole}, ReduceOp::kSum, 0.5); }),
                HasSubstr("a scale of 0.5 does not fit int64[1]"));
    EXPECT_THAT(ErrorOf([&] { ReduceTensors(comm, {whole}, ReduceOp::kMean); }), HasSubstr("mean"));
  });
}

TEST(ReduceTensors, ScaleThatTheDtypeCannotHold_IsAnErrorBeforeTheExchange) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor whole = at::full({1}, 1);
    for (const double scale : {1e19, -1e19, static_cast<double>(INFINITY)}) {
      EXPECT_THAT(ErrorOf([&] { ReduceTensors(comm, {whole}, ReduceOp::kSum, scale); }),
                  HasSubstr("does not fit int64[1]"));
    }
    const at::Tensor truth = at::full({1}, true);
    EXPECT_THAT(ErrorOf([&] { ReduceTensors(comm, {truth}, ReduceOp::kSum, 2); }),
                HasSubstr("does not fit bool[1]"));
    EXPECT_TRUE(ReduceTensors(comm, {truth}, ReduceOp::kSum)[0].item<bool>());
  });
}

TEST(BroadcastTensors, InPlace) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor x = at::full({2}, comm.rank());
    BroadcastTensors(comm, {x}, 1);
    EXPECT_EQ(x[0].item<int64_t>(), 1);
  });
}

TEST(PadTensorsAcrossProcesses, SeveralTensorsAtOnce_BothSides) {
  RunRanks(2, [](Comm& comm) {
    const int n = comm.rank() == 0 ? 1 : 3;
    auto got = PadTensorsAcrossProcesses(
        comm, {at::ones({n, 2}), at::ones({n}, at::kLong), at::full({}, 7)}, 0, -100);
    EXPECT_EQ(got[0].sizes(), (at::IntArrayRef{3, 2}));
    EXPECT_EQ(got[0][2][1].item<float>(), n == 3 ? 1 : -100);
    EXPECT_EQ(got[1].sizes(), at::IntArrayRef{3});
    EXPECT_EQ(got[2].item<int64_t>(), 7) << "no such dimension: as it is";
    got = PadTensorsAcrossProcesses(comm, {at::ones({2, n})}, -1, 0.5, /*pad_first=*/true);
    EXPECT_EQ(got[0][0][0].item<float>(), n == 3 ? 1 : 0.5);
    EXPECT_EQ(got[0][0][2].item<float>(), 1);
  });
}

TEST(PadTensorsAcrossProcesses, OneDimensionAfterTheOther_ShapesThatDifferInBothBecomeEqual) {
  RunRanks(3, [](Comm& comm) {
    const int r = comm.rank();
    const auto long_enough = PadTensorsAcrossProcesses(comm, {at::ones({3 - r, r + 1})}, -1);
    EXPECT_EQ(long_enough[0].sizes(), (at::IntArrayRef{3 - r, 3})) << "the other dimension stays";
    const auto equal = PadTensorsAcrossProcesses(comm, long_enough, 0, 0, /*pad_first=*/true);
    EXPECT_EQ(equal[0].sizes(), (at::IntArrayRef{3, 3}));
    EXPECT_EQ(equal[0].sum().item<float>(), (3 - r) * (r + 1));
    EXPECT_EQ(equal[0][2][0].item<float>(), 1);
  });
}

// Otherwise only the shorter rank would fail, and the other one would wait for it later.
TEST(PadTensorsAcrossProcesses, ValueThatTheDtypeCannotHold_IsAnErrorOnEveryRank) {
  RunRanks(2, [](Comm& comm) {
    const int64_t n = comm.rank() + 1;
    const auto error = [&](at::ScalarType dtype, const at::Scalar& value) {
      return ErrorOf([&] { PadTensorsAcrossProcesses(comm, {at::ones({n}, dtype)}, 0, value); });
    };
    EXPECT_THAT(error(at::kChar, 1000), HasSubstr("a pad_index of 1000 does not fit int8"));
    EXPECT_THAT(error(at::kLong, 1.5), HasSubstr("a pad_index of 1.5 does not fit int64"));
    EXPECT_THAT(error(at::kLong, NAN), HasSubstr("does not fit int64"));
    EXPECT_THAT(error(at::kLong, 1e19), HasSubstr("does not fit int64"));
    EXPECT_THAT(error(at::kFloat, c10::complex<double>(0, 1)), HasSubstr("does not fit float32"));
    EXPECT_EQ(error(at::kLong, 2.0), "");
    EXPECT_EQ(error(at::kLong, std::numeric_limits<int64_t>::min()), "");
    EXPECT_EQ(error(at::kBool, 0), "");
    EXPECT_EQ(error(at::kHalf, NAN), "");
    // Tensors that need no padding may have any dtype.
    const at::Tensor labels = at::ones({2}, at::kLong);
    EXPECT_EQ(ErrorOf([&] {
                PadTensorsAcrossProcesses(comm, {at::ones({n}), labels}, 0, 0.5);
              }),
              "");
  });
}

// As PyTorch converts it.
TEST(PadTensorsAcrossProcesses, ValueBeyondANarrowFloat_IsInfinite) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor mine = at::ones({comm.rank() + 1}, at::kHalf);
    const auto padded = PadTensorsAcrossProcesses(comm, {mine}, 0, -1e9);
    const double last = padded[0][1].item<double>();
    EXPECT_EQ(last, comm.rank() == 0 ? -std::numeric_limits<double>::infinity() : 1);
  });
}

TEST(PadTensorsAcrossProcesses, OtherDifferences_EveryRankThrowsTheSame) {
  RunRanks(3, [](Comm& comm) {
    const int r = comm.rank();
    EXPECT_THAT(ErrorOf([&] {
                  PadTensorsAcrossProcesses(comm, {r == 2 ? at::ones({2}) : at::ones({2, 2})}, 0);
                }),
                AllOf(HasSubstr("number of dimensions must be the same on all ranks"),
                      HasSubstr("rank 2 has float32[2]")));
    EXPECT_THAT(ErrorOf([&] {
                  PadTensorsAcrossProcesses(comm, {at::ones({2}, r == 1 ? at::kInt : at::kLong)},
                                            0);
                }),
                HasSubstr("rank 1 has int32[2]"));
    EXPECT_THAT(ErrorOf([&] {
                  PadTensorsAcrossProcesses(comm,
                                            std::vector<at::Tensor>(1 + (r == 1), at::ones({1})));
                }),
                HasSubstr("tensors than others"));
    EXPECT_THAT(ErrorOf([&] {
                  PadTensorsAcrossProcesses(comm,
                                            std::vector<at::Tensor>(1 + (r == 0), at::ones({1})));
                }),
                HasSubstr("tensors than others"));
    comm.Barrier();
  });
}

TEST(PadInputTensor, D08_ResultIsAlwaysTheNextMultiple) {
  for (int64_t batch = 1; batch <= 20; ++batch) {
    for (int n = 1; n <= 7; ++n) {
      const at::Tensor padded = PadInputTensor(at::ones({batch, 2}), batch, n);
      EXPECT_EQ(padded.size(0), (batch + n - 1) / n * n) << batch << " " << n;
      EXPECT_EQ(padded.sum().item<float>(), 2 * batch) << "padded with zeros";
    }
  }
  EXPECT_EQ(PadInputTensor(at::ones({7}), 7, 3).size(0), 9);
  EXPECT_EQ(PadInputTensor(at::ones({9}), 9, 4).size(0), 12);
  EXPECT_EQ(PadInputTensor(at::ones({6}), 6, 4).size(0), 8);
  EXPECT_THROW(PadInputTensor(at::ones({5}), 6, 4), c10::Error);
  EXPECT_THROW(PadInputTensor(at::ones({5}), 5, 0), c10::Error);
}

TEST(SplitRangeOf, EveryItemOnce_PartsEqualWithPadding) {
  for (int64_t length = 0; length <= 20; ++length) {
    for (int n = 1; n <= 8; ++n) {
      int64_t next = 0;
      for (int r = 0; r < n; ++r) {
        const SplitRange plain = SplitRangeOf(length, n, r, false);
        EXPECT_EQ(plain.begin, next);
        EXPECT_EQ(plain.padding, 0);
        next = plain.end;
        const SplitRange padded = SplitRangeOf(length, n, r, true);
        EXPECT_EQ(padded.begin, plain.begin);
        EXPECT_EQ(padded.end - padded.begin + padded.padding, (length + n - 1) / n);
      }
      EXPECT_EQ(next, length);
    }
  }
}

}  // namespace
}  // namespace muster
