#include "worker/train/local_sgd.h"

#include <utility>

#include "c10/util/Exception.h"
#include "worker/parallel/coalesce.h"
#include "worker/parallel/weight_changes.h"

namespace muster {

LocalSgd::LocalSgd(Comm& comm, std::vector<at::Tensor> parameters, int64_t steps, bool enabled,
                   const std::vector<at::Tensor>& also)
    : comm_(comm),
      tensors_(std::move(parameters)),
      steps_(steps),
      enabled_(enabled && comm.size() > 1) {
  TORCH_CHECK(steps >= 1, "local_sgd_steps must be at least 1, got ", steps);
  tensors_.insert(tensors_.end(), also.begin(), also.end());
}

bool LocalSgd::Step() {
  if (!enabled_ || ++count_ % steps_ != 0) return false;
  Average();
  return true;
}

void LocalSgd::Finish() {
  if (enabled_) Average();
}

void LocalSgd::Average() {
  AllReduceCoalesced(comm_, tensors_, ReduceOp::kMean);
  NoteWeightChange(tensors_);
}

}  // namespace muster
