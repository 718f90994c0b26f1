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

// Returns a handle on any torch::optim optimizer, which is borrowed and must outlive it. Its state
// stays in the optimizer, so both can be used side by side, and parameters and groups can be added
// at any time.
//
// Saving: states of AdamW, Adam, SGD and Adagrad fit those of FusedAdamW, ... and vice versa;
// RMSprop and LBFGS fit only themselves. A user's classes (derived from any of these or not) are
// saved and loaded by their own save() and load(), as one tensor of bytes; CannotSave() reports
// those that do not override them. If such a load() throws, the optimizer may have changed in part.
//
// LBFGS steps only by StepWithClosure(). Sparse gradients go into SGD without momentum and weight
// decay, Adagrad without weight decay, LBFGS, and users' classes, which must support them; for all
// others Step() throws and names the parameter.
std::unique_ptr<OptimizerHandle> WrapTorchOptimizer(torch::optim::Optimizer& optimizer,
                                                    const TorchOptimizerOptions& options = {});

// Whether a step that the program itself takes with the torch::optim optimizer behind `handle`
// leaves the versions of its parameters unchanged, as SGD's steps do. false for handles of another
// kind.
bool StepsLeaveNoVersion(const OptimizerHandle& handle);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_TORCH_OPTIMIZER_H_
