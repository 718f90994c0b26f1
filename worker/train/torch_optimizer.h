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
// the optimizer, so both can be used side by side. AdamW, Adam, SGD, Adagrad and RMSprop (and
// classes derived from them) can be saved and loaded; SaveState() of any other throws. States of
// AdamW, Adam, SGD and Adagrad fit those of FusedAdamW, ... and the other way round. Optimizers
// whose step needs a closure (LBFGS) are refused at their first Step().
std::unique_ptr<OptimizerHandle> WrapTorchOptimizer(torch::optim::Optimizer& optimizer,
                                                    const TorchOptimizerOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_TORCH_OPTIMIZER_H_
