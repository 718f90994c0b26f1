#ifndef MUSTER_WORKER_PARALLEL_DDP_H_
#define MUSTER_WORKER_PARALLEL_DDP_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"
#include "worker/nested/nested.h"
#include "worker/parallel/data_parallel_options.h"

namespace muster {

// Averages the gradients of one model over the ranks while the backward pass runs, in buckets, on
// c10d::Reducer. It takes tensors, not a module: the owner of the model calls, in this order and on
// every rank,
//
//   ddp.BeforeForward(communicate);            // communicate = MicroStep::communicate
//   auto output = ddp.AfterForward(model(x));  // use the output that comes back
//   loss.backward();
//
// A micro-step that does not communicate only adds to the local gradients; the next one that does
// reduces the sum. In evaluation (no grad mode) neither call does anything.
//
// A backward pass from outputs that did not come through these calls is not reduced:
// UnexchangedGradients() tells before an optimizer steps with what it left.
//
// Parameters may be frozen and unfrozen later (requires_grad), by all ranks before the same forward
// pass: the exchange follows at the next BeforeForward. If only some ranks do, it throws and names
// parameter and rank; ranks that did not come are named after the group's timeout. While all
// parameters are frozen nothing is exchanged. Dtype and device may not change: BeforeForward
// throws.
//
// Each exchange appears on comm.board() as one collective, with the bucket that it waits for:
// "AllReduce #7 bucket 2 of 5 (1,048,576 Float)".
//
// With a Comm of one rank nothing is done. With one that has no process group (threads), gradients
// are averaged at the end of the backward pass in one piece; comm_hook and the Reducer's options
// have no effect then.
//
// Construction is a collective: it compares the parameters of all ranks (count, shape, dtype,
// requires_grad), and throws on every rank, naming rank and parameter, if they differ; then it
// broadcasts those of rank 0. Parameters must be on their device already. Tensors listed twice
// (shared weights) count once. `comm` is borrowed. Not thread-safe; forward and backward on one
// thread. Errors are c10::Error.
class DataParallel {
 public:
  // One name per parameter. `buffers` may be empty. `sparse[i]`: the gradient of parameter i is
  // sparse (an Embedding's with sparse(true)); empty: none is. A gradient of the other layout
  // throws in backward and names the parameter. Sparse gradients and hooks exclude each other.
  DataParallel(Comm& comm, std::vector<at::Tensor> parameters, std::vector<std::string> names,
               std::vector<at::Tensor> buffers, const DataParallelOptions& options = {},
               std::vector<bool> sparse = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // Throws, naming them, if parameters got no gradient in the last communicating backward pass.
  void BeforeForward(bool communicate);

  // `output`: a nest of tensors as worker/nested/nested.h describes them.
  template <typename T>
  T AfterForward(const T& output) {
    return MapAllTensors(output,
                         [this](std::vector<at::Tensor> t) { return PassOutputs(std::move(t)); });
  }
  std::vector<at::Tensor> PassOutputs(std::vector<at::Tensor> outputs);

  // After forward passes that did not communicate, makes the next backward pass reduce anyway.
  void ArmBackward();
  // Call it before a second backward pass after one forward pass (a graph that was retained), or
  // after two: makes it reduce if the previous pass was reduced and has used up the arming. Does
  // nothing with find_unused_parameters, whose graph is gone: UnexchangedGradients() reports that
  // case.
  void ArmAgain();

  // Names of the parameters whose gradients hold values that were not averaged over the ranks: from
  // a backward pass that bypassed BeforeForward/AfterForward, or from one that did not communicate
  // and was not followed by one that does. Throws as BeforeForward if the last communicating
  // backward pass left parameters out. Call it before an optimizer steps, on every rank; it is no
  // collective, and takes well below a microsecond for a hundred parameters. Undefined gradients
  // count as nothing.
  std::vector<std::string> UnexchangedGradients();

  // Call it when the gradients of all, or of `parameters`, were zeroed in place. (Not needed for
  // those that were set to undefined.)
  void ForgetPending();
  void ForgetPending(const std::vector<at::Tensor>& parameters);

  // Replaces a whole micro-step on a rank that has no batch: takes part in the collectives of the
  // others with zeros and leaves this rank's gradients alone. Used by UnevenInputs.
  void Shadow(bool communicate);

  // Sets the rank whose buffers are broadcast (0 unless set).
  void set_buffer_root(int rank);

  // Sets the factor of the loss in the next backward pass (fp16): 0-d, on any device. The errors
  // that PowerSGD has kept at another scale are rescaled.
  void set_loss_scale(const at::Tensor& scale);

  // Overwrites parameters and buffers with those of rank `root`. A collective.
  void BroadcastModel(int root);

  const DataParallelOptions& options() const;
  const std::vector<at::Tensor>& parameters() const;  // without duplicates
  // The first parameter with a sparse gradient; empty: none.
  std::string sparse_parameter() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_DDP_H_
