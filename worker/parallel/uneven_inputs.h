#ifndef MUSTER_WORKER_PARALLEL_UNEVEN_INPUTS_H_
#define MUSTER_WORKER_PARALLEL_UNEVEN_INPUTS_H_

#include <functional>
#include <vector>

#include "worker/collective/comm.h"
#include "worker/parallel/ddp.h"

namespace muster {

struct UnevenInputsOptions {
  // How gradients are averaged once some ranks have run out. true, as torch: over all ranks, so
  // that every batch of the epoch weighs the same; false: over the ranks that still have batches.
  bool divide_by_initial_world_size = true;
};

// Lets ranks have different numbers of batches (join_uneven_inputs): a rank that has run out takes
// part in the others' collectives with zeros until all have, and then gets the state of one that
// trained to the end.
//
//   UnevenInputs join(comm, {&ddp});
//   for (batch : loader) {
//     auto d = join.MicroStep(wants_sync);  // Accumulation::WouldSync, or true at the last batch
//     step = accumulation.Begin(facts, d.sync);  // all ranks sync together
//     ...  // one BeforeForward/AfterForward/backward of each model
//     ...  // at a sync: multiply the gradients by d.gradient_factor
//   }
//   join.Finish([&](int root) { BroadcastOptimizerState(comm, optimizer, root); ... });
//
// All ranks sync as soon as one does, because otherwise their windows would end at different steps
// forever. Every model makes one forward and backward pass in each micro-step. The loop's body may
// contain no other collectives (gathering metrics, sharded clipping), because they would meet the
// zeros of another operation. Ranks without a batch follow parameters that the others freeze or
// unfreeze before MicroStep(). Models with sparse gradients are refused. Works on every backend. A
// rank that throws in its loop leaves the others to their collective's timeout. `comm` and models
// are borrowed. Not thread-safe.
class UnevenInputs {
 public:
  struct Decision {
    bool sync = true;
    int active_ranks = 1;
    double gradient_factor = 1;
  };

  UnevenInputs(Comm& comm, std::vector<DataParallel*> models,
               const UnevenInputsOptions& options = {});

  // (collective) Called by a rank with a batch, before its forward pass.
  Decision MicroStep(bool wants_sync, bool sync_each_batch = false);

  // (collective) Called by a rank without a batch; returns when every rank has called it. If some
  // ranks trained longer than others, models (parameters and buffers) and then, through
  // `sync_state`, the caller's other state are overwritten with those of rank `root`; the gradients
  // on this rank are then meaningless and should be zeroed. `sync_state` is called on all ranks or
  // on none.
  void Finish(const std::function<void(int root)>& sync_state = nullptr);

 private:
  Comm& comm_;
  const std::vector<DataParallel*> models_;
  const UnevenInputsOptions options_;
  bool finished_ = false;
  bool uneven_ = false;  // some rank was without a batch while another had one
  int last_active_ = 0;  // the lowest rank that had the most batches

  struct Round {
    int active = 0;
    bool sync = false;
    bool communicate = false;
  };
  Round Exchange(bool active, bool wants_sync, bool communicate);
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_UNEVEN_INPUTS_H_
