#ifndef MUSTER_WORKER_BIGMODEL_INIT_TAPE_H_
#define MUSTER_WORKER_BIGMODEL_INIT_TAPE_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/ivalue.h"

namespace muster {

// A record of what operators did to tensors on the meta device, in order, so that their values can
// be computed later. Tensors are identified by their memory, so set_data() and data() do no harm.
// Not thread-safe.
class InitTape {
 public:
  struct Step {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments = {}, results = {};
    // The state of its generator before the step, once its random numbers have been drawn: by
    // AddAndDraw(), or by the first replay.
    mutable at::Tensor generator_state = {};
  };

  // Adds a step. Keeps aliases of the tensors on the meta device, not the objects that others have,
  // and copies of the arguments that have memory, as they are now.
  void Add(Step step);
  // Adds a step and draws its random numbers, if it has any, as its operator would: so the
  // generator continues as if there were memory, and ValueOf() repeats these numbers. Temporarily
  // needs the memory of the largest tensor.
  void AddAndDraw(Step step);

  // Returns the value of a tensor: itself if it has memory. Throws c10::Error if the tape has not
  // made it.
  at::Tensor ValueOf(const at::Tensor& wanted) const;

 private:
  class Replay;

  // Returns the numbers of the steps on which `wanted` depends, in order.
  std::vector<size_t> StepsFor(const at::Tensor& wanted) const;

  std::vector<Step> steps_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_INIT_TAPE_H_
