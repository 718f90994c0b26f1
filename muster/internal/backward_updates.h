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

// The updates that prepared optimizers make inside backward passes of sharded models
// (options.sharding.optimizer_in_backward). On the CPU a separate thread makes them, one unit after
// the other, while the backward pass continues; at most two units wait. On a GPU they are queued
// behind the operators that computed their gradients.
//
// Between the backward pass and optimizer.step() the parameters have changed already: every call
// that could observe the difference throws. Call all methods on the training thread.
class BackwardUpdates : public ShardUpdates {
 public:
  // Called when a backward pass that reduces begins, before anything changes. Returns the factor
  // that gradients are multiplied by, or nothing if this pass does not end a window. Throws if the
  // pass must be refused.
  using BeginPass = std::function<std::optional<double>()>;

  // `registry` is borrowed, and used only inside backward passes.
  BackwardUpdates(const Registry& registry, BeginPass begin_pass);
  ~BackwardUpdates() override;

  // Throws unless `optimizer` supports such updates; prepares it for them. Call it before the first
  // step.
  static void Prepare(OptimizerSlot& optimizer);

  bool Begin(ShardedModel& model) override;
  void Touch() override { under_way_ = true; }
  void Update(std::vector<at::Tensor> shards) override;
  void Await() override { WaitUntilLeft(0); }
  void End(ShardedModel& model, const std::vector<at::Tensor>& trained) override;
  void Settle() override;
  void CheckStepped(const ShardedModel& model, const char* what) const override;

  // Throws if a backward pass has failed after some of its updates.
  void CheckWhole() const;
  // Whether the last backward pass has updated parameters of `optimizer` and step() has not been
  // called since.
  bool Updated(const OptimizerSlot& optimizer) const;
  // Throws if Updated(): the program does `what` with gradients or leaves the step out.
  void CheckStepped(const OptimizerSlot& optimizer, const char* what) const;
  // Throws if a backward pass has used and freed gradients of `parameters`.
  static void CheckGradientsThere(const std::vector<at::Tensor>& parameters, const char* what);

  // CheckRates() throws if the learning rate or momentum of `optimizer` has changed since the
  // backward pass that updated it. FinishStep() ends the step: it updates the parameters that have
  // a gradient and were not updated in the backward pass, with the gradients multiplied by
  // `factor`.
  void CheckRates(OptimizerSlot& optimizer) const;
  void FinishStep(OptimizerSlot& optimizer, double factor);
  // Removes the marks of gradients that were used in a backward pass: they need no zero_grad().
  static void ForgetGradients(OptimizerSlot& optimizer);
  // Call it when a state was loaded: forgets which parameters were updated.
  void Reset();
  // While a state is about to replace everything that was updated, the checks of models do not
  // throw.
  void SetReplacing(bool replacing) { replacing_ = replacing; }

 private:
  // The learning rate and momentum of each parameter group.
  using Rates = std::vector<std::pair<double, std::optional<double>>>;
  struct Pending {
    std::shared_ptr<OptimizerSlot> optimizer;
    Rates rates;
    std::vector<const ShardedModel*> models;
  };
  static Rates RatesOf(const OptimizerSlot& optimizer);
  // Waits for updates, oldest first, until at most `most` are under way.
  void WaitUntilLeft(size_t most);
  // CheckStepped() for a model inside a pass.
  void CheckNotPending(const ShardedModel& model, const char* what) const;

  const Registry& registry_;
  const BeginPass begin_pass_;
  // The optimizer of a shard of the pass under way, and the shard's index in its parameters.
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
  std::unordered_map<const OptimizerSlot*, Pending> pending_;  // the values keep the keys alive
  std::deque<CommThread::Ticket> tickets_;
  CommThread thread_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_BACKWARD_UPDATES_H_
