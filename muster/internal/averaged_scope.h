#ifndef MUSTER_INTERNAL_AVERAGED_SCOPE_H_
#define MUSTER_INTERNAL_AVERAGED_SCOPE_H_

#include <memory>

#include "worker/train/ema.h"

namespace muster::internal {

class Core;
class ModelSlot;

// While this object lives, the model's weights are the average of `ema`; see Ema::apply.
class [[nodiscard]] AveragedScope {
 public:
  // `sharded`: the model, if it is sharded; else null.
  AveragedScope(Core* core, EmaWeights& ema, std::shared_ptr<ModelSlot> sharded);
  ~AveragedScope() noexcept(false);
  AveragedScope(const AveragedScope&) = delete;
  AveragedScope& operator=(const AveragedScope&) = delete;

 private:
  void Announce() const;
  void MarkChanged() const;

  Core* const core_;
  const std::shared_ptr<ModelSlot> sharded_;
  const int exceptions_;
  const EmaWeights::Scope scope_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_AVERAGED_SCOPE_H_
