#ifndef MUSTER_INTERNAL_BACKWARD_UPDATES_H_
#define MUSTER_INTERNAL_BACKWARD_UPDATES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm_thread.h"
#include "worker/parallel/shard_updates.h"

namespace muster {
class FusedOptimizer;
}

namespace muster::internal {

class OptimizerSlot;
class Registry;

// The prepared optimizers' updates inside of backward passes of sharded models
// (options.sharding.optimizer_in_backward). On the CPU they run on a thread, one unit after the
// other, while the backward pass goes on; at most two units wait. On a GPU they are queued behind
// the operators that made their gradients.
//
// Between the backward pass and optimizer.step() the parameters have changed already: whatever
// would tell the difference throws. Of the training thread, but for the thread of its own.
class BackwardUpdates : public ShardUpdates {
 public:
  // A backward pass that reduces begins: what gradients are multiplied by, or nothing if this pass
  // does not end a window. Throws what refuses the pass. Called before anything changes.
  using BeginPass = std::function<std::optional<double>()>;

  // `registry` is borrowed, and used inside of backward passes alone.
  BackwardUpdates(const Registry& registry, BeginPass begin_pass);
  ~BackwardUpdates() override;

  // Throws unless `optimizer` can be updated so; makes it ready. Before its first step.
  static void Prepare(OptimizerSlot& optimizer);

  bool Begin(ShardedModel& model) override;
  void Touch() override { under_way_ = true; }
  void Update(std::vector<at::Tensor> shards) override;
  void Await() override { WaitUntilLeft(0); }
  void End(ShardedModel& model, const std::vector<at::Tensor>& trained) override;
  void Settle() override;
  void CheckStepped(const ShardedModel& model, const char* what) const override;

  // Throws if a backward pass has failed on the way.
  void CheckWhole() const;
  // Whether the last backward pass has updated parameters of `optimizer`, which has not ended that
  // step.
  bool Updated(const OptimizerSlot& optimizer) const;
  // Throws where Updated(): the program does `what` with gradients or leaves the step out.
  void CheckStepped(const OptimizerSlot& optimizer, const char* what) const;
  // Throws where gradients of `parameters` were used in a backward pass and are gone.
  static void CheckGradientsThere(const std::vector<at::Tensor>& parameters, const char* what);

  // Ends the step of `optimizer`: updates what has a gradient and was not updated in the backward
  // pass, multiplied by `factor`. Throws if its learning rates have changed since.
  void CheckRates(OptimizerSlot& optimizer) const;
  void FinishStep(OptimizerSlot& optimizer, double factor);
  // The gradients that are gone need no zero_grad() any more.
  static void ForgetGradients(OptimizerSlot& optimizer);
  // A state was loaded: what was updated counts no more.
  void Reset();
  // While a state is about to replace all that was updated, nothing keeps anyone from using it.
  void SetReplacing(bool replacing) { replacing_ = replacing; }

 private:
  // Of one group: learning rate and momentum.
  using Rates = std::vector<std::pair<double, std::optional<double>>>;
  struct Pending {
    std::shared_ptr<OptimizerSlot> optimizer;
    Rates rates;
    std::vector<const ShardedModel*> models;
  };
  static Rates RatesOf(const OptimizerSlot& optimizer);
  // Waits for updates, the first of them first, until so many are under way.
  void WaitUntilLeft(size_t most);
  // CheckStepped() inside of a pass.
  void CheckNotPending(const ShardedModel& model, const char* what) const;

  const Registry& registry_;
  const BeginPass begin_pass_;
  // Where the shards of the pass under way are: optimizer and number in its parameters.
  struct Place {
    std::shared_ptr<OptimizerSlot> optimizer;
    size_t index;
  };
  std::unordered_map<const void*, Place> places_;
  std::unordered_map<const OptimizerSlot*, Rates> rates_;  // of this pass
  double factor_ = 1;
  bool pass_open_ = false;  // some model has begun, and the pass has neither ended nor thrown
  bool under_way_ = false;  // an update has begun, and its pass has not ended
  bool replacing_ = false;
  std::unordered_map<const OptimizerSlot*, Pending> pending_;  // and kept by them
  std::deque<CommThread::Ticket> tickets_;
  CommThread thread_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_BACKWARD_UPDATES_H_
