#ifndef MUSTER_WORKER_PARALLEL_COMM_HOOKS_H_
#define MUSTER_WORKER_PARALLEL_COMM_HOOKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "c10/util/intrusive_ptr.h"

namespace c10::ivalue {
struct Future;
}
namespace c10d {
class CommHookInterface;
class GradBucket;
class ProcessGroup;
}  // namespace c10d

namespace muster {

// How gradients travel between ranks. All hooks give the mean over the ranks.
enum class CommHook {
  kNone,             // in their own dtype
  kFp16,             // as fp16: half the bytes of fp32
  kBf16,             // as bf16
  kPowerSgd,         // each matrix as two thin ones of rank `rank`, with error feedback
  kBatchedPowerSgd,  // as kPowerSgd, with a whole bucket as one square matrix: cheaper, coarser
};

// Parses "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd". Throws c10::Error for anything
// else.
CommHook ParseCommHook(absl::string_view text);

// PowerSGD (Vogels, Karimireddy, Jaggi 2019), names and defaults as torch's PowerSGDState.
struct PowerSgdOptions {
  int64_t matrix_approximation_rank = 1;
  // How many of the model's first reductions are exact, no matter what is frozen and unfrozen
  // meanwhile. They are exact again after a resume, because checkpoints do not contain PowerSGD's
  // memory. At least 2, because the Reducer rebuilds its buckets after the first.
  int64_t start_powerSGD_iter = 1000;
  // A matrix is compressed only if that makes it smaller by this factor.
  double min_compression_rate = 2;
  bool use_error_feedback = true;
  bool warm_start = true;
  double orthogonalization_epsilon = 0;
  uint64_t random_seed = 0;
};

// A cast around another hook, which then sees gradients in fp16 or bf16.
enum class CommWrapper { kNone, kFp16, kBf16 };
// Parses "no", "fp16" or "bf16". Throws c10::Error for anything else.
CommWrapper ParseCommWrapper(absl::string_view text);

// A user's hook, like those of torch's register_comm_hook: starts the exchange of one bucket of
// gradients over `group` and returns at once, with a future of the tensor that replaces the bucket
// (same numel and dtype). Only the hook divides by the number of ranks. It must start the same
// collectives in the same order on every rank; with buckets of zeros it also speaks for a rank that
// ran out of batches. It may give ranks different gradients: a checkpoint then holds the weights
// and states of rank 0. Include torch/csrc/distributed/c10d/comm.hpp to write one:
//
//   [](c10d::ProcessGroup& group, c10d::GradBucket& bucket) {
//     std::vector<at::Tensor> tensors = {bucket.getBufferRef().div_(group.getSize())};
//     return group.allreduce(tensors)->getFuture();
//   }
using GradientHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(
    c10d::ProcessGroup& group, c10d::GradBucket& bucket)>;

// Returns `hook` as a hook of c10::Reducer. Throws, naming the bucket, if it returns no future.
std::unique_ptr<c10d::CommHookInterface> MakeGradientHook(
    GradientHook hook, c10::intrusive_ptr<c10d::ProcessGroup> group);

// What the PowerSGD hook of a model keeps for the next reduction, and the loss scale that it is
// given.
struct PowerSgdState {
  int64_t reductions = 0;
  // The factor of the losses (fp16), 0-d; undefined: none. Never written in place.
  at::Tensor loss_scale = {};
};

// Returns the hook for c10::Reducer; null for kNone without a wrapper. PowerSGD waits for its two
// all-reduces of a bucket inside the hook, so that collectives come in the same order on every rank
// (on Gloo, continuations run in any order); on NCCL that wait is the stream's, not the host's.
// `state` outlives the hook, for the next hook of the same model.
std::unique_ptr<c10d::CommHookInterface> MakeCommHook(CommHook hook, CommWrapper wrapper,
                                                      const PowerSgdOptions& power_sgd,
                                                      c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      std::shared_ptr<PowerSgdState> state);

// Returns the hook for c10d::Reducer if no other is requested and the backend of `group` can
// average, as Muster's backends do for floating CPU tensors: with a hook the Reducer copies
// gradients into their buckets, which is cheaper than the products that it computes without one.
std::unique_ptr<c10d::CommHookInterface> MakeAverageHook(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_COMM_HOOKS_H_
