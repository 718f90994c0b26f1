#include "tests/conformance/handlers.h"
#include "worker/train/golden.h"

namespace muster::conformance {

std::map<std::string, Handler> TrainHandlers() {
  return {{"lr_scheduler", RunLrSchedulerCase},
          {"grad_accumulation", RunGradAccumulationCase},
          {"clip_grad", RunClipGradCase}};
}

}  // namespace muster::conformance
