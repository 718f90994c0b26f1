#ifndef MUSTER_WORKER_PARALLEL_TEST_PASSES_H_
#define MUSTER_WORKER_PARALLEL_TEST_PASSES_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "ATen/ops/sum.h"
#include "c10/util/Exception.h"
#include "worker/collective/test_error.h"
#include "worker/parallel/sharded_model.h"

namespace muster {

// For tests: the error of a forward pass in which the program throws after `use`.
template <typename Fn>
std::string ErrorOfForward(ShardedModel& model, Fn use) {
  return ErrorOf([&] {
    model.BeginForward(true);
    const struct End {
      ShardedModel& model;
      ~End() { model.EndForward(); }
    } end{model};
    use();
    TORCH_CHECK(false, "of the program");
  });
}

// For tests: the error of a backward pass that throws when it reaches the result of `first`, which
// `rest` has continued with in the forward pass. Its gradients are dropped.
template <typename First, typename Rest>
std::string ErrorOfBackward(ShardedModel& model, First first, Rest rest) {
  model.BeginForward(true);
  at::Tensor x = first();
  x.register_hook([](at::Tensor) { TORCH_CHECK(false, "of the hook"); });
  x = rest(x);
  model.EndForward();
  std::string error = ErrorOf([&] { x.sum().backward(); });
  x.reset();
  model.ForgetPending(model.shards());
  return error;
}

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_TEST_PASSES_H_
