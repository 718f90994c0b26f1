#include "worker/collective/shm_reduce.h"

#include <cmath>

#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/minimum.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/randint.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

at::Tensor Reduced(ShmReduceOp op, const std::vector<at::Tensor>& inputs) {
  std::vector<const void*> sources;
  for (const at::Tensor& input : inputs) sources.push_back(input.const_data_ptr());
  at::Tensor out = at::zeros(inputs[0].sizes(), inputs[0].options());
  ReduceArrays(inputs[0].scalar_type(), op, sources, {out.data_ptr()}, out.numel());
  return out;
}

TEST(ReduceArrays, EveryDtype_EqualsTheOperatorTakenInOrder) {
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    for (const int64_t n : {1, 7, 1024, 5000}) {
      std::vector<at::Tensor> x;
      for (int r = 0; r < 3; ++r) {
        x.push_back(dtype == at::kFloat || dtype == at::kDouble ? at::rand({n}).to(dtype)
                                                                : at::randint(0, 127, {n}, dtype));
      }
      EXPECT_TRUE(at::equal(Reduced(ShmReduceOp::kSum, x), x[0].add(x[1]).add(x[2])));
      EXPECT_TRUE(at::equal(Reduced(ShmReduceOp::kProduct, x), x[0].mul(x[1]).mul(x[2])));
      EXPECT_TRUE(
          at::equal(Reduced(ShmReduceOp::kMax, x), at::maximum(at::maximum(x[0], x[1]), x[2])));
      EXPECT_TRUE(
          at::equal(Reduced(ShmReduceOp::kMin, x), at::minimum(at::minimum(x[0], x[1]), x[2])));
      if (CanReduce(dtype, ShmReduceOp::kAverage)) {
        EXPECT_TRUE(at::equal(Reduced(ShmReduceOp::kAverage, x), x[0].add(x[1]).add(x[2]).div(3)));
      }
    }
  }
}

TEST(ReduceArrays, NarrowFloats_AreSummedInFloatAndRoundedOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    std::vector<at::Tensor> x;
    for (int r = 0; r < 4; ++r) x.push_back(at::rand({3000}).to(dtype));
    at::Tensor sum = x[0].to(at::kFloat);
    for (int r = 1; r < 4; ++r) sum = sum.add(x[r].to(at::kFloat));
    EXPECT_TRUE(at::equal(Reduced(ShmReduceOp::kSum, x), sum.to(dtype)));
    EXPECT_TRUE(at::equal(Reduced(ShmReduceOp::kAverage, x), sum.div(4).to(dtype)));
  }
}

TEST(ReduceArrays, BoolAndNan) {
  const at::Tensor yes = at::full({3}, true, at::kBool), no = at::full({3}, false, at::kBool);
  EXPECT_TRUE(at::equal(Reduced(ShmReduceOp::kSum, {yes, yes, no}), yes));
  EXPECT_TRUE(at::equal(Reduced(ShmReduceOp::kProduct, {yes, no}), no));
  const at::Tensor nan = at::full({2}, std::nan(""), at::kFloat), one = at::full({2}, 1.0F);
  for (const auto op : {ShmReduceOp::kMax, ShmReduceOp::kMin}) {
    EXPECT_TRUE(std::isnan(Reduced(op, {nan, one})[0].item<float>()));
    EXPECT_TRUE(std::isnan(Reduced(op, {one, nan})[0].item<float>()));
  }
}

TEST(ReduceArrays, UnknownDtype_IsRefused) {
  EXPECT_FALSE(CanReduce(at::kComplexFloat, ShmReduceOp::kSum));
  EXPECT_FALSE(CanReduce(at::kLong, ShmReduceOp::kAverage));
}

// Hosts do this: each sums over its ranks, and then over these sums.
TEST(ReduceSources, SumsOfSums_AreRoundedOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    constexpr int64_t kCount = 3000;
    std::vector<at::Tensor> x;
    for (int r = 0; r < 4; ++r) x.push_back(at::rand({kCount}).to(dtype));
    const at::ScalarType wide = WideType(dtype);
    at::Tensor first = at::zeros({kCount}, wide), second = at::zeros({kCount}, wide);
    at::Tensor out = at::zeros({kCount}, dtype);
    const auto from = [&](int r) { return ReduceSource{x[r].const_data_ptr()}; };
    ReduceSources(dtype, ShmReduceOp::kAverage, {from(0), from(1)}, {first.data_ptr()}, true, 0,
                  kCount);
    ReduceSources(dtype, ShmReduceOp::kAverage, {from(2)}, {second.data_ptr()}, true, 0, kCount);
    EXPECT_TRUE(at::equal(first, x[0].to(wide).add(x[1].to(wide))));
    ReduceSources(dtype, ShmReduceOp::kAverage,
                  {{first.data_ptr(), true}, {second.data_ptr(), true}, from(3)}, {out.data_ptr()},
                  false, 4, kCount);
    const at::Tensor want = first.add(x[2].to(wide)).add(x[3].to(wide)).mul(0.25).to(dtype);
    EXPECT_TRUE(at::equal(out, want)) << dtype;
  }
}

}  // namespace
}  // namespace muster
