#include "worker/collective/rank_order_reduce.h"

#include "ATen/ops/maximum.h"
#include "ATen/ops/minimum.h"
#include "ATen/ops/view_as_complex.h"
#include "ATen/ops/view_as_real.h"
#include "c10/core/GradMode.h"
#include "worker/collective/plain_tensor.h"

namespace muster {
namespace {

at::Tensor ReduceReal(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const at::ScalarType dtype = inputs.front().scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor result = inputs.front().detach().clone(at::MemoryFormat::Contiguous);
  if (narrow) result = result.to(at::kFloat);
  for (size_t i = 1; i < inputs.size(); ++i) {
    at::Tensor other = inputs[i].detach();
    if (narrow) other = other.to(at::kFloat);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMean:
        result.add_(other);
        break;
      case ReduceOp::kMax:
        at::maximum_out(result, result, other);
        break;
      case ReduceOp::kMin:
        at::minimum_out(result, result, other);
        break;
    }
  }
  // Divide before converting back: a sum may be too large for fp16 although the mean is not.
  if (op == ReduceOp::kMean) result.div_(static_cast<int64_t>(inputs.size()));
  return result.to(dtype);
}

}  // namespace

at::Tensor ReduceInRankOrder(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  at::NoGradGuard no_grad;
  if (!inputs.front().is_complex()) return ReduceReal(inputs, op);
  std::vector<at::Tensor> pairs;
  for (const at::Tensor& input : inputs) pairs.push_back(at::view_as_real(PlainTensor(input)));
  return at::view_as_complex(ReduceReal(pairs, op));
}

}  // namespace muster
