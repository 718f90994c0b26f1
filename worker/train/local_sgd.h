#ifndef MUSTER_WORKER_TRAIN_LOCAL_SGD_H_
#define MUSTER_WORKER_TRAIN_LOCAL_SGD_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"

namespace muster {

// Local SGD: every rank trains alone, without exchanging gradients (pass communicate = false to
// DataParallel). After every `steps` calls of Step() and at the end, the parameters of all ranks
// are averaged. Works with every Comm.
//
//   LocalSgd local(comm, parameters, 8);
//   for (...) { ...; optimizer.Step(); local.Step(); }
//   local.Finish();
//
// `comm` is borrowed. Not thread-safe. Errors are c10::Error.
class LocalSgd {
 public:
  // Does nothing if `enabled` is false or there is one rank. `also`: more floating-point tensors to
  // average with the parameters, such as running statistics or optimizer state.
  LocalSgd(Comm& comm, std::vector<at::Tensor> parameters, int64_t steps, bool enabled = true,
           const std::vector<at::Tensor>& also = {});

  // Call it after each step of the optimizer. Every `steps`-th call is a collective; returns
  // whether this one was.
  bool Step();

  // Averages once more, at the end. A collective. It is not part of the destructor, where an
  // exception on one rank would make it hang.
  void Finish();

  bool enabled() const { return enabled_; }

 private:
  void Average();

  Comm& comm_;
  std::vector<at::Tensor> tensors_;
  const int64_t steps_;
  const bool enabled_;
  int64_t count_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_LOCAL_SGD_H_
