#ifndef MUSTER_TESTS_CONFORMANCE_SCHEDULES_H_
#define MUSTER_TESTS_CONFORMANCE_SCHEDULES_H_

#include <nlohmann/json.hpp>

#include "worker/train/lr_scheduler.h"

namespace muster::conformance {

// The schedule that a case's `scheduler` object describes (shared/golden/README.md, section 9).
// Throws std::invalid_argument for an unknown type.
LrSchedulePtr ScheduleFromJson(const nlohmann::json& scheduler);

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_SCHEDULES_H_
