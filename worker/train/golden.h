#ifndef MUSTER_WORKER_TRAIN_GOLDEN_H_
#define MUSTER_WORKER_TRAIN_GOLDEN_H_

#include "nlohmann/json_fwd.hpp"

namespace muster {

// Runs the shared conformance cases of three kinds through the real classes: `in` to `out`, as
// their README describes them. For the conformance runner and tests. Errors are exceptions
// (c10::Error, or nlohmann's for a malformed case).
//
// Decisions on the cases' quirks:
//  - lr_scheduler: a one-cycle schedule stops at step total_steps - 1 instead of bouncing up again.
//  `adjust_scheduler` is
//    ignored, as Accelerate ignores its flag of that name (the cases record that); Muster's own is
//    opt-in.
//  - grad_accumulation: a loader that is left, even at its last batch, has no say in later
//  micro-steps (D5).
nlohmann::json RunLrSchedulerCase(const nlohmann::json& in);
nlohmann::json RunGradAccumulationCase(const nlohmann::json& in);
nlohmann::json RunClipGradCase(const nlohmann::json& in);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_GOLDEN_H_
