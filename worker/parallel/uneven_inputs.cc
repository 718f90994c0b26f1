#include "worker/parallel/uneven_inputs.h"

#include <utility>

#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"

namespace muster {

UnevenInputs::UnevenInputs(Comm& comm, std::vector<DataParallel*> models,
                           const UnevenInputsOptions& options)
    : comm_(comm), models_(std::move(models)), options_(options) {
  for (const DataParallel* model : models_) {
    TORCH_CHECK(comm_.size() == 1 || !model->options().static_graph,
                "join_uneven_inputs and static_graph do not go together: turn one off");
    TORCH_CHECK(comm_.size() == 1 || model->sparse_parameter().empty(),
                "join_uneven_inputs cannot supply the sparse gradient of parameter '",
                model->sparse_parameter(),
                "': make the embedding dense (sparse(false)), or give every rank as many batches");
  }
}

UnevenInputs::Round UnevenInputs::Exchange(bool active, bool wants_sync, bool communicate) {
  Round round;
  if (comm_.size() == 1) return {active ? 1 : 0, wants_sync, communicate};
  // A row per fact, a column per rank.
  at::Tensor facts = at::zeros({3, comm_.size()}, at::kInt);
  int* const data = facts.data_ptr<int>();
  data[comm_.rank()] = active;
  data[comm_.size() + comm_.rank()] = wants_sync;
  data[2 * comm_.size() + comm_.rank()] = communicate;
  comm_.AllReduce(facts, ReduceOp::kSum);
  int lowest = -1;
  for (int rank = 0; rank < comm_.size(); ++rank) {
    if (data[rank] != 0 && lowest < 0) lowest = rank;
    round.active += data[rank];
    round.sync = round.sync || data[comm_.size() + rank] != 0;
    round.communicate = round.communicate || data[2 * comm_.size() + rank] != 0;
  }
  if (round.active > 0) {
    uneven_ = uneven_ || round.active < comm_.size();
    last_active_ = lowest;
    for (DataParallel* model : models_) model->set_buffer_root(lowest);
  }
  return round;
}

UnevenInputs::Decision UnevenInputs::MicroStep(bool wants_sync, bool sync_each_batch) {
  TORCH_CHECK(!finished_, "a micro-step after join_uneven_inputs was finished");
  const Round round = Exchange(true, wants_sync, wants_sync || sync_each_batch);
  Decision decision{.sync = round.sync, .active_ranks = round.active};
  if (!options_.divide_by_initial_world_size) {
    decision.gradient_factor = static_cast<double>(comm_.size()) / round.active;
  }
  return decision;
}

void UnevenInputs::Finish(const std::function<void(int root)>& sync_state) {
  TORCH_CHECK(!finished_, "join_uneven_inputs is finished twice");
  while (true) {
    const Round round = Exchange(false, false, false);
    if (round.active == 0) break;
    for (DataParallel* model : models_) model->Shadow(round.communicate);
  }
  finished_ = true;
  for (DataParallel* model : models_) model->set_buffer_root(0);
  if (!uneven_) return;
  for (DataParallel* model : models_) model->BroadcastModel(last_active_);
  if (sync_state != nullptr) sync_state(last_active_);
}

}  // namespace muster
