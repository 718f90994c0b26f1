#ifndef MUSTER_WORKER_TRAIN_TORCH_OPTIMIZER_H_
#define MUSTER_WORKER_TRAIN_TORCH_OPTIMIZER_H_

#include <memory>

#include "worker/train/optimizer_handle.h"

namespace torch::optim {
class Optimizer;
}

namespace muster {

struct TorchOptimizerOptions {
  // Step torch::optim's own AdamW, Adam and SGD (not classes derived from them) by LibTorch's fused
  // kernels, on their own state: several times faster, equal within float rounding.
  bool fused = true;
};

// A handle on any torch::optim optimizer, which is borrowed and must outlive it. Its state stays in
// the optimizer, so both can be used side by side, and parameters and groups can be added at any
// time.
//
// Saving: states of AdamW, Adam, SGD and Adagrad fit those of FusedAdamW, ... and the other way
// round; RMSprop and LBFGS fit themselves. Classes of the user's (derived from any of these or not)
// are saved and loaded by their own save() and load(), as one tensor of bytes; CannotSave() reports
// those that do not override them. One whose own load() throws may be changed in part.
//
// LBFGS steps by StepWithClosure() only. Sparse gradients go into SGD without momentum and weight
// decay, Adagrad without weight decay, LBFGS, and users' classes, which must support them;
// elsewhere Step() throws and names the parameter.
std::unique_ptr<OptimizerHandle> WrapTorchOptimizer(torch::optim::Optimizer& optimizer,
                                                    const TorchOptimizerOptions& options = {});

// Whether a step that the program takes by the torch::optim optimizer behind `handle` itself leaves
// the versions of its parameters as they are, as those of SGD do. false for handles of another
// kind.
bool StepsLeaveNoVersion(const OptimizerHandle& handle);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_TORCH_OPTIMIZER_H_
