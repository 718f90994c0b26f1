#ifndef MUSTER_INTERNAL_AVERAGED_SCOPE_H_
#define MUSTER_INTERNAL_AVERAGED_SCOPE_H_

#include "worker/train/ema.h"

namespace muster::internal {

class Core;

// In this scope the weights of `ema` are the average; see Ema::apply.
class [[nodiscard]] AveragedScope {
 public:
  AveragedScope(Core* core, EmaWeights& ema);
  ~AveragedScope() noexcept(false);
  AveragedScope(const AveragedScope&) = delete;
  AveragedScope& operator=(const AveragedScope&) = delete;

 private:
  Core* const core_;
  const EmaWeights::Scope scope_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_AVERAGED_SCOPE_H_
