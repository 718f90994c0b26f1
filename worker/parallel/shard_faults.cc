#include "worker/parallel/shard_faults.h"

#include <cstddef>
#include <utility>

#include "c10/util/Exception.h"
#include "worker/collective/on_all.h"

namespace muster {

void ShardFaults::NoteBeginningOfForward(const std::exception_ptr& thrown) {
  if (!failures_.own.empty()) return;
  failures_.own = c10::str("rank ", rank_,
                           " has failed at the beginning of a forward pass of the sharded model: ",
                           TextOf(thrown), "; once that is mended, call load_state()");
}

void ShardFaults::NoteEndOfBackward(const std::exception_ptr& thrown) {
  failures_.own =
      c10::str("rank ", rank_,
               " has failed at the end of a backward pass of the sharded model: ", TextOf(thrown),
               "; its gradients are gone, and other ranks may have stepped with theirs: call "
               "load_state()");
}

void ShardFaults::NoteStep(const std::exception_ptr& thrown) {
  // IsOutOfMemory recognizes by the last words that a smaller batch would not help.
  const char* const outcome =
      ranks_ == 1 ? "; its parameters may have changed in part: call load_state()"
                  : "; its part of the parameters may have changed in part, and other ranks may "
                    "have stepped: call load_state()";
  failures_.own = c10::str(
      "rank ", rank_,
      " has failed in a step of an optimizer of the sharded model: ", TextOf(thrown), outcome);
  failures_.in_step = true;
}

ShardFaults::Failures ShardFaults::Forget() { return std::exchange(failures_, {}); }

void ShardFaults::Restore(const Failures& failures) {
  if (failures_.own.empty()) failures_.own = failures.own;
  if (failures_.mixed.empty()) failures_.mixed = failures.mixed;
  failures_.in_step = failures_.in_step || failures.in_step;
}

void ShardFaults::GiveValues(const std::function<bool(const std::string& name)>& has) {
  std::erase_if(without_values_, has);
}

void ShardFaults::CheckHasValues() const {
  if (without_values_.empty()) return;
  const size_t others = without_values_.size() - 1;
  TORCH_CHECK(false, "parameter '", without_values_.front(), "' of a sharded model has no values",
              others == 0 ? std::string() : c10::str(", nor have ", others, " more"),
              ": the model was made without weights (init_empty_weights()), and nothing has loaded "
              "them since prepare(); call accelerator.load_weights() or load_state() first");
}

void ShardFaults::CheckNotMixed() const { TORCH_CHECK(failures_.mixed.empty(), failures_.mixed); }

void ShardFaults::CheckNotMixedHere() const {
  CheckNotMixed();
  // If all ranks have failed in a step, each may be in a different state.
  TORCH_CHECK(!failures_.in_step, failures_.own);
}

}  // namespace muster
