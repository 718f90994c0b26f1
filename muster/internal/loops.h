#ifndef MUSTER_INTERNAL_LOOPS_H_
#define MUSTER_INTERNAL_LOOPS_H_

#include <cstdint>

#include "muster/internal/core.h"

namespace muster::internal {

// Keeps the stack of live loops as loaders tell of their batches. Loaders may outlive the
// Accelerator.
class Core::Observer : public LoaderObserver {
 public:
  explicit Observer(Core* core) : core_(core) {}

  void OnStart() override;
  bool SkipsPass(const LoaderStateHandle& loader) override;
  void OnBatch(uint64_t iteration, const BatchInfo& info) override;
  // A training program's pass that was left without a micro-step (a look at the first batch, an
  // evaluation that had seen enough) says nothing about how far the data are trained on.
  bool CountsAsTrained(uint64_t iteration) override;
  void OnEnd(uint64_t iteration) override;

  void Forget() { core_ = nullptr; }

 private:
  Core* core_;
  uint64_t left_early_ = 0;  // the pass that was left before its end
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_LOOPS_H_
