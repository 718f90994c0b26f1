#ifndef MUSTER_WORKER_PARALLEL_DDP_H_
#define MUSTER_WORKER_PARALLEL_DDP_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/data/nested.h"
#include "worker/parallel/comm_hooks.h"
#include "worker/process/comm.h"

namespace muster {

// Names and defaults as torch's DistributedDataParallel.
struct DataParallelOptions {
  double bucket_cap_mb = 25;
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
  // One name per parameter. `buffers` may be empty.
  DataParallel(Comm& comm, std::vector<at::Tensor> parameters, std::vector<std::string> names,
               std::vector<at::Tensor> buffers, const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // Throws, naming them, if parameters got no gradient in the last communicating backward pass.
  void BeforeForward(bool communicate);

  // `output`: a nest of tensors as worker/data/nested.h describes them.
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

  // In place of a whole micro-step on a rank that has no batch: takes part in the collectives of
  // the others with zeros and leaves this rank's gradients alone. Used by UnevenInputs.
  void Shadow(bool communicate);

  // Whose buffers are broadcast (0 unless set).
  void set_buffer_root(int rank);

  // Overwrites parameters and buffers with those of rank `root`. A collective.
  void BroadcastModel(int root);

  const DataParallelOptions& options() const;
  const std::vector<at::Tensor>& parameters() const;  // without duplicates

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_DDP_H_
