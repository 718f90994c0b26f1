#include "worker/collective/rank_order_reduce.h"

#include "ATen/ops/maximum.h"
#include "ATen/ops/minimum.h"
#include "c10/core/GradMode.h"

namespace muster {

at::Tensor ReduceInRankOrder(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  at::NoGradGuard no_grad;
  at::Tensor result = inputs.front().detach().clone(at::MemoryFormat::Contiguous);
  for (size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor other = inputs[i].detach();
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
  if (op == ReduceOp::kMean) result.div_(static_cast<int64_t>(inputs.size()));
  return result;
}

}  // namespace muster
