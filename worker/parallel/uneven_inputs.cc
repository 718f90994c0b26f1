#include "worker/parallel/uneven_inputs.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// Returns a character for each parameter: whether it is trained.
std::string TrainedIn(const std::vector<DataParallel*>& models) {
  std::string trained;
  for (const DataParallel* model : models) {
    for (const at::Tensor& parameter : model->parameters()) {
      trained += parameter.requires_grad() ? '1' : '0';
    }
  }
  return trained;
}

// (collective) Ranks without a batch have missed it if the others have frozen or unfrozen
// parameters since: makes them train what rank `root` trains. Throws on all ranks if those with a
// batch differ.
void FollowTrained(Comm& comm, const std::vector<DataParallel*>& models, const int64_t* active,
                   int root) {
  const std::vector<std::string> all = comm.AllGatherBytes(TrainedIn(models));
  const std::string& wanted = all[root];
  for (const std::string& each : all) {
    TORCH_CHECK(each.size() == wanted.size(),
                "join_uneven_inputs: the ranks have prepared models of ", wanted.size(), " and of ",
                each.size(), " parameters; prepare the same models on every rank");
  }
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (active[rank] == 0) continue;
    size_t at = 0;
    for (size_t m = 0; m < models.size(); ++m) {
      for (size_t p = 0; p < models[m]->parameters().size(); ++p, ++at) {
        TORCH_CHECK(all[rank][at] == wanted[at], "join_uneven_inputs: parameter ", p, " (of shape ",
                    models[m]->parameters()[p].sizes(), ") of prepared model ", m, " is ",
                    wanted[at] == '1' ? "trained" : "frozen", " on rank ", root, " and ",
                    wanted[at] == '1' ? "frozen" : "trained", " on rank ", rank,
                    "; freeze and unfreeze the same parameters on every rank at the same step");
      }
    }
  }
  if (active[comm.rank()] != 0) return;
  size_t at = 0;
  for (const DataParallel* model : models) {
    for (const at::Tensor& parameter : model->parameters()) {
      const bool trained = wanted[at++] == '1';
      if (parameter.requires_grad() != trained) parameter.set_requires_grad(trained);
    }
  }
}

}  // namespace

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
  at::Tensor facts = at::zeros({4, comm_.size()}, at::kLong);
  int64_t* const data = facts.data_ptr<int64_t>();
  int64_t* const trained = data + 3 * comm_.size();
  data[comm_.rank()] = active;
  data[comm_.size() + comm_.rank()] = wants_sync;
  data[2 * comm_.size() + comm_.rank()] = communicate;
  trained[comm_.rank()] = static_cast<int64_t>(std::hash<std::string>()(TrainedIn(models_)));
  comm_.AllReduce(facts, ReduceOp::kSum);
  int lowest = -1;
  for (int rank = 0; rank < comm_.size(); ++rank) {
    if (data[rank] != 0 && lowest < 0) lowest = rank;
    round.active += static_cast<int>(data[rank]);
    round.sync = round.sync || data[comm_.size() + rank] != 0;
    round.communicate = round.communicate || data[2 * comm_.size() + rank] != 0;
  }
  if (round.active > 0) {
    uneven_ = uneven_ || round.active < comm_.size();
    last_active_ = lowest;
    for (DataParallel* model : models_) model->set_buffer_root(lowest);
  }
  // If every rank has a batch, the next forward pass compares what they train.
  const bool differ = std::any_of(trained, trained + comm_.size(),
                                  [trained](int64_t other) { return other != trained[0]; });
  if (differ && uneven_ && round.active < comm_.size()) {
    FollowTrained(comm_, models_, data, last_active_);
  }
  return round;
}

UnevenInputs::Decision UnevenInputs::MicroStep(bool wants_sync, bool sync_each_batch) {
  TORCH_CHECK(!finished_, "a micro-step after join_uneven_inputs was finished");
  const Round round = Exchange(true, wants_sync, wants_sync || sync_each_batch);
  // What the ranks without a batch do now, too: so the passes of all models follow parameters that
  // were frozen or unfrozen in one order.
  if (round.active < comm_.size()) {
    for (DataParallel* model : models_) model->Shadow(/*communicate=*/false);
  }
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
