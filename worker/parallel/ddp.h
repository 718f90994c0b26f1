#ifndef MUSTER_WORKER_PARALLEL_DDP_H_
#define MUSTER_WORKER_PARALLEL_DDP_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"
#include "worker/collective/progress_board.h"
#include "worker/nested/nested.h"
#include "worker/parallel/comm_hooks.h"

namespace muster {

// Names and defaults as torch's DistributedDataParallel.
struct DataParallelOptions {
  double bucket_cap_mb = 25;
  // At the end of every backward pass that communicates, the buffers of all ranks become those of
  // rank 0: they are equal, in evaluation too, whenever no accumulation window is open.
  bool broadcast_buffers = true;
  bool find_unused_parameters = false;
  // The set of used parameters and the order of their gradients never change.
  bool static_graph = false;
  // Gradients are views of the reduction buckets: saves their memory and a copy. Zero them in place
  // (grad_zeroing()).
  bool gradient_as_bucket_view = false;
  // Parameters and buffers start as those of rank 0. Off, they must be equal already.
  bool init_sync = true;
  CommHook comm_hook = CommHook::kNone;
  CommWrapper comm_wrapper = CommWrapper::kNone;
  PowerSgdOptions power_sgd = {};
  // In place of comm_hook and comm_wrapper; refused together with them, and without a process
  // group.
  GradientHook gradient_hook = nullptr;
};

// Averages the gradients of one model over the ranks while the backward pass runs, in buckets, on
// c10d::Reducer. It takes tensors, not a module: whoever owns the model calls, in this order and on
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
    std::vector<at::Tensor> tensors;
    ForEachTensor(output, [&tensors](const at::Tensor& tensor) { tensors.push_back(tensor); });
    const std::vector<at::Tensor> passed = PassOutputs(std::move(tensors));
    size_t next = 0;
    return MapTensors(output, [&](const at::Tensor&) { return passed[next++]; });
  }
  std::vector<at::Tensor> PassOutputs(std::vector<at::Tensor> outputs);

  // After forward passes that did not communicate, makes the next backward pass reduce all the
  // same.
  void ArmBackward();
  // Before a second backward pass after one forward pass (a graph that was retained), or after two:
  // makes it reduce if the pass before was reduced and has used that up. Nothing with
  // find_unused_parameters, whose graph is gone: UnexchangedGradients() tells then.
  void ArmAgain();

  // Names of the parameters whose gradients hold something that was not averaged over the ranks:
  // from a backward pass past BeforeForward/AfterForward, or one that did not communicate and was
  // not followed by one that does. Throws as BeforeForward if the last communicating backward pass
  // left parameters out. For the moment before an optimizer steps, on every rank; no collective,
  // well below a microsecond for a hundred parameters. Undefined gradients count as nothing.
  std::vector<std::string> UnexchangedGradients();

  // The gradients of all, or of `parameters`, were zeroed in place. (Not needed for those that were
  // set to undefined.)
  void ForgetPending();
  void ForgetPending(const std::vector<at::Tensor>& parameters);

  // In place of a whole micro-step on a rank that has no batch: takes part in the collectives of
  // the others with zeros and leaves this rank's gradients alone. Used by UnevenInputs.
  void Shadow(bool communicate);

  // Whose buffers are broadcast (0 unless set).
  void set_buffer_root(int rank);

  // Overwrites parameters and buffers with those of rank `root`. A collective.
  void BroadcastModel(int root);

  // Shows every exchange of gradients on `board` as the collective "gradient exchange". Borrowed;
  // null: none.
  void set_progress(ProgressBoard* board);

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
