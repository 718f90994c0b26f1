#ifndef MUSTER_WORKER_PARALLEL_SYNC_BATCH_NORM_H_
#define MUSTER_WORKER_PARALLEL_SYNC_BATCH_NORM_H_

#include <memory>
#include <ostream>

#include "ATen/core/Tensor.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/pimpl.h"
#include "worker/collective/comm.h"

namespace muster {

// The ranks among which SyncBatchNorms share statistics while this object lives. Not thread-safe.
class StatisticsRanks {
 public:
  // Borrowed.
  explicit StatisticsRanks(Comm& comm) : comm_(std::make_shared<Comm*>(&comm)) {}
  ~StatisticsRanks() { *comm_ = nullptr; }
  StatisticsRanks(const StatisticsRanks&) = delete;
  StatisticsRanks& operator=(const StatisticsRanks&) = delete;

 private:
  friend class SyncBatchNormImpl;

  // Modules may live longer.
  const std::shared_ptr<Comm*> comm_;
};

// Batch normalization with the statistics of the batches of all ranks together, like torch's
// nn.SyncBatchNorm; useful if each rank's batch is small. Options, parameters and buffers have the
// names and defaults of torch::nn::BatchNorm1d/2d/3d, whose checkpoints fit. It replaces these
// modules in a model, for inputs of two or more dimensions (N, C, ...).
//
// In training, bound to several ranks, forward and backward are collectives: one all-reduce of 2C +
// 1 and one of 2C doubles. All ranks must take part in the same order, with the same C; batch sizes
// may differ and may be 0. Gradients of weight and bias are this rank's part: data parallelism
// averages them like all others. Unbound, when the bound ranks are gone (their Accelerator), with
// one rank, or in evaluation it is torch's batch normalization.
//
// Statistics are computed in at least float, even for half inputs. There is no second derivative
// (create_graph throws), and it cannot be used with join_uneven_inputs, since a rank without a
// batch does not take part. Not thread-safe. Errors are c10::Error.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  using NormImplBase::NormImplBase;

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  // Modules made by clone() share statistics with these ranks, too.
  void Bind(const StatisticsRanks& ranks) { comm_ = ranks.comm_; }
  // Null: unbound, or the ranks are gone.
  Comm* comm() const { return comm_ == nullptr ? nullptr : *comm_; }

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  std::shared_ptr<Comm*> comm_;
};

TORCH_MODULE(SyncBatchNorm);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SYNC_BATCH_NORM_H_
